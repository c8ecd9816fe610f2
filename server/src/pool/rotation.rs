//! A rotation of the pool's authority: its steps, and the clients that each step waits for.

use std::sync::Arc;

use data_encoding::HEXLOWER;
use gpusession_proto::control::pool_event::Event as PoolEventKind;
use gpusession_proto::control::{self as wire, AwaitedClient, PoolEvent, ServerReport};
use gpusession_proto::journal::Event as Said;
use tracing::{error, info};

use super::clients::ClientView;
use super::members::{self, LIVE_WINDOW, Standing};
use super::statements::NotStated;
use super::{Pool, locked};
use crate::signer::authorities::{Phase, Present};
use crate::signer::member::Member;
use crate::signer::{Refused as NotRotated, Step};
use crate::store::{self, StoreError};

/// Most names in the text of a refusal.
const MAX_NAMED: usize = 10;

/// Reason why a step was not taken.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    /// The signer refuses the step.
    #[error(transparent)]
    Step(#[from] NotRotated),
    /// The file of the clients or the administrators cannot be written.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Revocations would end with the authority that signed them.
    #[error("the pool's statements: {0}")]
    Statements(#[from] NotStated),
    /// Servers without the authority's key, and their clients, would lose the pool.
    #[error(
        "servers {}: called in the last 30 days, and have not reported that they are ready for this step; wait until \
         `gpuserver pool rotate status` lists no server, `gpuserver pool revoke` those that are gone, or shut them out \
         with --force", listed(.servers)
    )]
    Behind {
        /// Names of the servers.
        servers: Vec<String>,
    },
    /// Clients would lose the pool.
    #[error(
        "clients {}: called in the last 30 days, and {lack}; wait until `gpuserver pool rotate status` lists no client, \
         `gpuserver clients forget` those that are gone, or shut them out with --force", listed(.clients)
    )]
    Lacking {
        /// Names of the clients.
        clients: Vec<String>,
        /// Description of what they lack.
        lack: &'static str,
    },
}

fn listed(names: &[String]) -> String {
    let shown = names.iter().take(MAX_NAMED).cloned().collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(MAX_NAMED) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

/// A client or an administrator in the status of a rotation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// Name in the pool.
    pub name: String,
    /// Whether the new authority is known to the client.
    pub trusts: bool,
    /// Whether the new authority issued its certificate.
    pub holds: bool,
    /// Latest call, a day less exact, in seconds since 1970; 0: unknown.
    pub seen_unix: u64,
    /// Whether the rotation waits for it.
    pub live: bool,
    /// Server without the authority's key that reports it; `None`: it calls this server.
    pub server: Option<String>,
}

impl Holder {
    fn named(&self) -> String {
        let of = self.server.as_ref().map(|server| format!(" of server {server}"));
        format!("{}{}", self.name, of.unwrap_or_default())
    }
}

/// Status of a rotation.
#[derive(Debug, Clone)]
pub struct Status {
    /// Phase, and its begin in seconds since 1970; `None`: no rotation.
    pub rotation: Option<(Phase, u64)>,
    /// SHA-256 of the authority that signs.
    pub signer: [u8; 32],
    /// SHA-256 of the old authority; `None`: no rotation.
    pub old: Option<[u8; 32]>,
    /// SHA-256 of the new authority; `None`: no rotation.
    pub new: Option<[u8; 32]>,
    /// Clients that lack the new authority, or a certificate of it; empty without a rotation.
    pub clients: Vec<Holder>,
    /// Administrators whose certificates end with the rotation; empty without one.
    pub administrators: Vec<String>,
    /// Servers without the authority's key that are not ready for the next step; empty without a
    /// rotation.
    pub servers: Vec<Standing>,
}

fn holders(clients: Vec<ClientView>, new: &str, unix: u64) -> Vec<Holder> {
    let holder = |client: ClientView| {
        let record = client.record;
        let holds = record.authority == new;
        Holder {
            name: client.name,
            trusts: holds || record.trusts.iter().any(|known| known == new),
            holds,
            seen_unix: record.seen_unix,
            // Unknown calls count from the begin of the rotation.
            live: client.alive || unix < record.seen_unix + LIVE_WINDOW,
            server: None,
        }
    };
    // The server that a client calls reports it.
    let counts = |client: &ClientView| !client.record.revoked && !client.record.elsewhere;
    clients.into_iter().filter(counts).map(holder).collect()
}

/// Clients that a server reports: it has left out those for which it does not wait.
fn reported(server: &Standing, trusts: bool) -> impl Iterator<Item = Holder> {
    let (name, live) = (server.name.clone(), server.live);
    let holder = move |client: &AwaitedClient| Holder {
        name: client.name.clone(),
        trusts,
        holds: false,
        seen_unix: client.seen_unix,
        live,
        server: Some(name.clone()),
    };
    server.clients.iter().map(holder)
}

impl Pool {
    /// Returns the status of the rotation of the authority.
    pub fn rotation(&self) -> Status {
        let present = self.signer.present();
        let mut status = Status {
            rotation: present.rotation(),
            signer: present.signer().fingerprint(),
            old: None,
            new: None,
            clients: Vec::new(),
            administrators: Vec::new(),
            servers: Vec::new(),
        };
        let Some((phase, _)) = present.rotation() else { return status };
        status.old = Some(present.old().fingerprint());
        status.new = present.new_one().map(|new| new.fingerprint());
        let new = HEXLOWER.encode(&status.new.unwrap_or_default());
        let lacks = |client: &Holder| if phase == Phase::Begun { !client.trusts } else { !client.holds };
        status.clients = holders(self.clients(), &new, self.unix()).into_iter().filter(lacks).collect();
        status.administrators = locked(&self.administrators).of_others(&new);
        let members = locked(&self.members).standing(phase, &status.new.unwrap_or_default(), self.unix());
        let revoked = |name: &str| self.statements(|all| all.server(name).is_some());
        for server in members.into_iter().filter(|server| !revoked(&server.name)) {
            status.clients.extend(reported(&server, phase != Phase::Begun));
            if !server.ready || server.more > 0 {
                status.servers.push(server);
            }
        }
        status
    }

    /// Notes the call of a server without the authority's key, and its progress in a rotation.
    pub(super) async fn heard(&self, server: &str, report: Option<ServerReport>) -> Result<(), StoreError> {
        {
            let mut members = locked(&self.members);
            if members.heard(server, report, self.unix()) {
                self.member_file.changed();
            }
        }
        self.member_file.store(|| store::text(&*locked(&self.members))).await
    }

    /// Returns the report of this server, which holds no authority's key, to the issuers.
    pub(super) fn report(&self, member: &Member) -> ServerReport {
        let status = self.rotation();
        let live = status.clients.into_iter().filter(|client| client.live);
        let clients = live.map(|client| AwaitedClient { name: client.name, seen_unix: client.seen_unix });
        let held: Vec<_> = member.kept().into_iter().map(|held| held.authority).collect();
        let rotation = status.rotation.map(|(phase, _)| phase).zip(status.new);
        members::report(rotation, &held, clients.collect())
    }

    /// Takes a step of a rotation; returns `false` if it was taken before.
    ///
    /// `force` takes it also if clients lose the pool by it. A server that is killed at any point
    /// can repeat the step.
    pub async fn rotate(self: &Arc<Self>, step: Step, force: bool) -> Result<bool, Refused> {
        self.signer.link().issues()?;
        let lacking = |lack, phase| {
            let status = self.rotation();
            if status.rotation.is_none_or(|(now, _)| now != phase) {
                return Ok(());
            }
            let servers = status.servers.into_iter().filter(|server| server.live);
            let servers: Vec<_> = servers.map(|server| server.name).collect();
            if !servers.is_empty() {
                return Err(Refused::Behind { servers });
            }
            let clients = status.clients.into_iter().filter(|client| client.live);
            let clients: Vec<_> = clients.map(|client| client.named()).collect();
            if clients.is_empty() { Ok(()) } else { Err(Refused::Lacking { clients, lack }) }
        };
        match &step {
            Step::Switch if !force => lacking("do not trust the new authority", Phase::Begun)?,
            Step::Finish if !force => lacking("have no certificate of the new authority", Phase::Switched)?,
            Step::Begin(_) => self.assume_seen().await?,
            Step::Switch | Step::Finish | Step::Abort => {}
        }
        let finished = step == Step::Finish;
        if finished && self.rotation().rotation.is_some_and(|(phase, _)| phase == Phase::Switched) {
            self.state_again().await?;
        }
        let (certificate, unix) = (self.certificate.clone(), self.unix());
        let (changed, kept) = self
            .signer
            .aside(move |signer| {
                let changed = signer.rotate(step)?;
                Ok((changed, changed.then(|| certificate.keep(unix)).flatten()))
            })
            .await?;
        if let Some(Err(e)) = kept {
            error!("the server's certificate: not made: {e}; trying again in an hour");
        }
        if finished {
            self.drop_administrators().await?;
        }
        if changed {
            self.rotated(&self.signer.present());
        }
        Ok(changed)
    }

    /// Counts clients of which no call is known as seen now, when a rotation begins.
    async fn assume_seen(&self) -> Result<(), StoreError> {
        locked(&self.clients).assume_seen(self.unix());
        self.client_file.changed();
        self.store_clients().await
    }

    /// Takes the authorities that an issuer has changed.
    pub(super) async fn follow_rotation(&self) {
        let present = self.signer.present();
        if present.rotation().is_some_and(|(phase, _)| phase == Phase::Begun)
            && let Err(e) = self.assume_seen().await
        {
            error!("the clients' file: not written: {e}");
        }
        self.rotated(&present);
    }

    /// Tells clients of the present authorities.
    pub(super) fn rotated(&self, present: &Present) {
        let signs = HEXLOWER.encode(&present.signer().fingerprint());
        let step = match present.rotation() {
            Some((Phase::Begun, _)) => "begun: clients learn the new authority",
            Some(_) => "switched: the new authority signs",
            None => "over: the pool has one authority",
        };
        info!(
            message_id = Said::AuthorityRotation.id(),
            gpusession_server = self.facts.config.name,
            gpusession_reason = step,
            "rotation of the pool's authority: {step}; {signs} signs"
        );
        let event = Some(PoolEventKind::AuthoritiesChanged(wire::AuthoritiesChanged {}));
        self.watches.tell_all(&PoolEvent { lease: String::new(), event });
    }

    /// Revokes administrators whose authority the pool has dropped.
    async fn drop_administrators(&self) -> Result<(), StoreError> {
        let signer = HEXLOWER.encode(&self.authority_fingerprint());
        {
            let mut all = locked(&self.administrators);
            for name in all.of_others(&signer) {
                all.revoke(&name, self.unix());
                info!("administrator {name}: revoked with the old authority");
            }
            self.administrator_file.changed();
        }
        self.store_administrators().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rotation_waits_for_clients_of_the_last_30_days() {
        let now = 100 * LIVE_WINDOW;
        let client = |name: &str, seen_unix, alive, revoked, trusts: &[&str], authority: &str| {
            let record = serde_json::json!({
                "certificate": "", "machine_id": "", "revoked": revoked, "joined_unix": 1,
                "seen_unix": seen_unix, "trusts": trusts, "authority": authority,
            });
            let record = serde_json::from_value(record).unwrap();
            ClientView { name: name.into(), record, alive, silent: None }
        };
        let all = vec![
            client("connected", now - 2 * LIVE_WINDOW, true, false, &["old", "new"], "old"),
            client("gone", now - LIVE_WINDOW, false, false, &["old"], "old"),
            client("off", now - LIVE_WINDOW + 1, false, false, &["old"], "old"),
            client("joined-later", now, false, false, &[], "new"),
            client("revoked", now, true, true, &[], "old"),
        ];
        let shown = holders(all, "new", now);
        let facts: Vec<_> = shown.iter().map(|h| (h.name.as_str(), h.trusts, h.holds, h.live)).collect();
        let expected = [
            ("connected", true, false, true),
            ("gone", false, false, false),
            ("off", false, false, true),
            ("joined-later", true, true, true),
        ];
        assert_eq!(facts, expected);
        let many: Vec<_> = (0..12).map(|n| format!("vm-{n}")).collect();
        assert!(listed(&many).ends_with("vm-9 and 2 more"));
        assert_eq!(listed(&many[..2]), "vm-0, vm-1");
    }
}
