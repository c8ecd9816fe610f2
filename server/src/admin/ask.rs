//! Requests of administrators and their answers, as JSON.

use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::answer::{
    administrators, clients, config, gpus, leases, records, rotation, statements, status, tokens, usage,
    workers,
};
use crate::accounting::Wanted;
use crate::audit;
use crate::pool::Pool;
use crate::refusal::Refusal;
use crate::signer::tokens::TokenKind;
use crate::signer::{Privileged, Step};

/// A request of an administrator.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "verb", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Ask {
    /// Show addresses, driver and numbers of the server.
    Status,
    /// List workers.
    Ps,
    /// List workers with the threads of their processes.
    Threads,
    /// List leases.
    Leases,
    /// List GPUs.
    Gpus,
    /// List clients.
    Clients,
    /// Refuse a client from now on.
    Revoke {
        /// Name of the client.
        name: String,
    },
    /// Remove a client.
    Forget {
        /// Name of the client.
        name: String,
    },
    /// Kill a worker, or revoke a lease.
    Kill {
        /// Worker id or its start, or a whole lease id.
        worker: String,
    },
    /// Move the device memory of a lease's programs to host memory.
    Park {
        /// Lease id or its start.
        lease: String,
    },
    /// Move it back, or reacquire the GPUs of a lent lease.
    Unpark {
        /// Lease id or its start.
        lease: String,
    },
    /// Withdraw a GPU; leases on it stay.
    Off {
        /// Index, UUID, or start of the UUID.
        gpu: String,
        /// Explanation for people.
        reason: String,
    },
    /// Lease a withdrawn GPU again.
    On {
        /// As for [`Ask::Off`].
        gpu: String,
    },
    /// Remove a GPU without leases from the pool.
    Drop {
        /// As for [`Ask::Off`].
        gpu: String,
    },
    /// Stop new leases, or resume them.
    Drain {
        /// Whether to resume new leases.
        end: bool,
        /// Explanation for people.
        reason: String,
    },
    /// Stop the server.
    Stop {
        /// Whether to stop without waiting for programs.
        force: bool,
    },
    /// List MPS domains.
    Mps,
    /// List requests that wait for GPUs.
    Queue,
    /// List the limits of a client and a user.
    Limits {
        /// Name of the client; empty: the limits for everybody.
        client: String,
        /// Name of the user; empty: none.
        user: String,
    },
    /// List sums of the use of GPUs.
    Stats {
        /// Beginning, in seconds since 1970.
        since_unix: u64,
        /// End, in seconds since 1970.
        until_unix: u64,
        /// Whether to list the users of a client.
        users: bool,
    },
    /// List records of ended leases and programs.
    Accounting {
        /// Selection of records.
        wanted: Wanted,
    },
    /// List the keys of the running configuration.
    Config,
    /// Change a key of the running server, and store the change.
    ConfigSet {
        /// Dotted name of the key.
        key: String,
        /// TOML text of the value; `None` removes the stored change.
        value: Option<String>,
    },
    /// Read the configuration files again.
    Reload,
    /// Create a join token.
    TokenCreate {
        /// Pattern of the client names that can join with it.
        pattern: String,
        /// Number of clients that can join with it.
        uses: u32,
        /// Lifetime, such as `24h`.
        ttl: String,
        /// Networks from which clients join with it; empty: from anywhere.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        from: Vec<String>,
        /// Number of clients from one address; 0: no bound.
        // An earlier server refuses a request with this bound, and knows it without.
        #[serde(default, skip_serializing_if = "is_zero")]
        per_address: u32,
    },
    /// List join tokens.
    Tokens,
    /// Revoke a join token.
    TokenRevoke {
        /// Token id or its start.
        id: String,
    },
    /// Issue an administrator's certificate.
    AdministratorCreate {
        /// Name of the administrator.
        name: String,
        /// Certificate request (PEM), signed with the new key.
        csr_pem: String,
    },
    /// List lines of the audit trail.
    Audit {
        /// Selection of lines.
        wanted: audit::Wanted,
    },
    /// Forget a user's name in the audit trail.
    AuditForgetUser {
        /// Client of the user.
        client: String,
        /// Name of the user.
        user: String,
    },
    /// List administrators.
    Administrators,
    /// Refuse an administrator from now on.
    AdministratorRevoke {
        /// Name of the administrator.
        name: String,
    },
    /// Begin a rotation of the pool's authority.
    RotateBegin {
        /// Export of the server where the rotation began; `None`: make the new authority.
        exported: Option<String>,
    },
    /// Show the rotation.
    RotateStatus,
    /// Sign with the new authority.
    RotateSwitch {
        /// Whether to leave out clients that do not trust it.
        force: bool,
    },
    /// Drop the old authority.
    RotateFinish {
        /// Whether to leave out clients that have its certificates.
        force: bool,
    },
    /// Drop the new authority.
    RotateAbort,
    /// List statements after a place, a page at most.
    Statements {
        /// Place of the last one of the page before; 0: from the first.
        after: u64,
    },
    /// Take statements from a file.
    StatementsImport {
        /// Statements with their signatures.
        statements: Vec<String>,
    },
    /// Make a token with which a server joins the pool.
    ServerAdmit {
        /// Name of the server.
        name: String,
        /// Lifetime in seconds.
        ttl: u64,
        /// Networks from which the server joins; empty: from anywhere.
        from: Vec<IpNet>,
    },
    /// Refuse a server from now on, on each server and each client of the pool.
    ServerRevoke {
        /// Name of the server.
        name: String,
    },
    /// Create a fleet key, from which a join token derives for each name.
    FleetCreate {
        /// Pattern of the client names.
        pattern: String,
        /// Number of joins with all of its tokens.
        uses: u32,
        /// Lifetime, such as `90d`.
        ttl: String,
        /// Networks from which clients join; empty: from anywhere.
        from: Vec<String>,
    },
}

/// Effect of a request, and the place where it is answered.
enum Kind {
    /// Changes nothing.
    Read,
    /// Changes nothing, and is not answered over the network, for this reason.
    ReadHere(&'static str),
    /// May change something, so the audit trail has it.
    Change,
    /// As [`Kind::Change`], and not answered over the network, for this reason.
    ChangeHere(&'static str),
    /// As [`Kind::ChangeHere`], by an operation that the signer does for root alone.
    Root(&'static str, Privileged),
}

impl Ask {
    /// Returns effect and place: the one table of both.
    fn kind(&self) -> Kind {
        let rotate = |step| Kind::Root(KEPT_HERE, Privileged::Rotate(step));
        match self {
            Self::Status
            | Self::Ps
            | Self::Threads
            | Self::Leases
            | Self::Gpus
            | Self::Clients
            | Self::Mps
            | Self::Queue
            | Self::Limits { .. }
            | Self::Stats { .. }
            | Self::Accounting { .. }
            | Self::Config
            | Self::Tokens
            | Self::Statements { .. }
            | Self::Administrators => Kind::Read,
            Self::RotateStatus => Kind::ReadHere(KEPT_HERE),
            // The trail records its readers.
            Self::Audit { .. }
            | Self::AuditForgetUser { .. }
            | Self::Revoke { .. }
            | Self::Forget { .. }
            | Self::Kill { .. }
            | Self::Park { .. }
            | Self::Unpark { .. }
            | Self::Off { .. }
            | Self::On { .. }
            | Self::Drop { .. }
            | Self::Drain { .. }
            | Self::Reload
            | Self::TokenCreate { .. }
            | Self::TokenRevoke { .. }
            | Self::FleetCreate { .. }
            | Self::StatementsImport { .. }
            | Self::AdministratorRevoke { .. } => Kind::Change,
            Self::ConfigSet { key, .. }
                if crate::config::key_parts(key).is_ok_and(|parts| is_of_audit(&parts)) =>
            {
                Kind::ChangeHere(
                    "the audit trail's bounds are set on a server's own host, since the trail has what was done over the network",
                )
            }
            Self::ConfigSet { .. } => Kind::Change,
            Self::Stop { .. } => {
                Kind::ChangeHere("a server is stopped on its own host: the command waits for its process")
            }
            Self::AdministratorCreate { name, csr_pem } => Kind::Root(
                "administrators are made on a server's own host, so that a stolen certificate is worth nothing once it is revoked",
                Privileged::Administrator { name: name.clone(), csr_pem: csr_pem.clone() },
            ),
            Self::RotateBegin { exported } => rotate(Step::Begin(exported.clone())),
            Self::RotateSwitch { .. } => rotate(Step::Switch),
            Self::RotateFinish { .. } => rotate(Step::Finish),
            Self::RotateAbort => rotate(Step::Abort),
            Self::ServerAdmit { name, ttl, from } => {
                let (name, from) = (name.clone(), from.clone());
                Kind::Root(KEPT_HERE, Privileged::AdmitServer { name, ttl: *ttl, from })
            }
            Self::ServerRevoke { name } => {
                Kind::Root(KEPT_HERE, Privileged::RevokeServer { name: name.clone() })
            }
        }
    }

    /// Returns `true` if the request may change anything, so that it is logged.
    pub(super) fn changes(&self) -> bool {
        !matches!(self.kind(), Kind::Read | Kind::ReadHere(_))
    }

    /// Performs the request of an actor. The audit trail has a change before the answer.
    pub(super) async fn answer_audited(
        self,
        pool: &Arc<Pool>,
        actor: String,
        from: &str,
    ) -> Result<serde_json::Value, Refusal> {
        if !self.changes() {
            return self.answer(pool).await;
        }
        // These make room, or end a server without room.
        let always = matches!(self, Self::Stop { .. } | Self::ConfigSet { .. } | Self::Audit { .. });
        let untold = |why: String| Refusal::new("not-audited", why);
        if !always {
            pool.may_change().await.map_err(untold)?;
        }
        let makes_token = matches!(self, Self::TokenCreate { .. } | Self::FleetCreate { .. });
        let mut event = self.event(actor);
        event.from = from.into();
        let mut done = self.answer(pool).await;
        if let (true, Some(name), Ok(made)) = (makes_token, event.actor.strip_prefix("administrator "), &done)
        {
            done = tokens::made_by(pool, name, made).await.map(|()| made.clone());
        }
        if let Err(refusal) = &done {
            event.result.clone_from(&refusal.code);
        }
        match pool.audited(event).await {
            Err(why) if !always => Err(untold(why)),
            _ => done,
        }
    }

    /// Returns the request as an event, with those of its fields that are no secret.
    pub fn event(&self, actor: String) -> audit::Event {
        let mut words = serde_json::to_value(self).unwrap_or_default();
        // The trail names no users: it could not forget them.
        if let Self::Audit { wanted } = self
            && !wanted.user.is_empty()
        {
            words["wanted"]["user"] = "(a user)".into();
        }
        if let (Self::AuditForgetUser { .. }, Some(fields)) = (self, words.as_object_mut()) {
            fields.remove("user");
        }
        let text = |key: &str| words.get(key).and_then(|v| v.as_str()).unwrap_or_default().to_owned();
        let (event, lease) = (text("verb"), text("lease"));
        let client = match self {
            Self::Revoke { name } | Self::Forget { name } => name.clone(),
            _ => text("client"),
        };
        if let Some(fields) = words.as_object_mut() {
            fields.retain(|field, _| RECORDED.contains(&field.as_str()));
        }
        audit::Event { actor, client, lease, detail: words.to_string(), ..audit::own(&event) }
    }

    /// Performs the request and returns what the verb shows.
    async fn answer(self, pool: &Arc<Pool>) -> Result<serde_json::Value, Refusal> {
        match self {
            Self::Status => status::status(pool).await,
            Self::Ps => workers::ps(pool).await,
            Self::Threads => workers::threads(pool).await,
            Self::Leases => leases::leases(pool).await,
            Self::Gpus => gpus::gpus(pool).await,
            Self::Clients => clients::clients(pool).await,
            Self::Revoke { name } => clients::revoke(pool, name).await,
            Self::Forget { name } => clients::forget(pool, name).await,
            Self::Kill { worker } => leases::kill(pool, worker).await,
            Self::Park { lease } => leases::park(pool, lease).await,
            Self::Unpark { lease } => leases::unpark(pool, lease).await,
            Self::Off { gpu, reason } => gpus::off(pool, gpu, reason).await,
            Self::On { gpu } => gpus::on(pool, gpu).await,
            Self::Drop { gpu } => gpus::drop(pool, gpu).await,
            Self::Drain { end, reason } => status::drain(pool, end, reason).await,
            Self::Stop { force } => status::stop(pool, force),
            Self::Mps => gpus::mps(pool).await,
            Self::Queue => leases::queue(pool).await,
            Self::Limits { client, user } => config::limits(pool, client, user),
            Self::Stats { since_unix, until_unix, users } => {
                usage::stats(pool, since_unix, until_unix, users).await
            }
            Self::Accounting { wanted } => records::accounting(pool, wanted).await,
            Self::Config => config::config(pool),
            Self::ConfigSet { key, value } => config::set(pool, key, value).await,
            Self::Reload => config::reload(pool).await,
            Self::TokenCreate { pattern, uses, ttl, from, per_address } => {
                tokens::create(
                    pool,
                    tokens::terms(TokenKind::Client, pattern, uses, &ttl, &from, per_address)?,
                )
                .await
            }
            Self::FleetCreate { pattern, uses, ttl, from } => {
                tokens::create_fleet(pool, tokens::terms(TokenKind::Fleet, pattern, uses, &ttl, &from, 0)?)
                    .await
            }
            Self::AdministratorCreate { name, csr_pem } => administrators::create(pool, name, csr_pem).await,
            Self::Audit { wanted } => records::audit(pool, wanted).await,
            Self::AuditForgetUser { client, user } => records::forget_user(pool, client, user).await,
            Self::Administrators => administrators::list(pool),
            Self::AdministratorRevoke { name } => administrators::revoke(pool, name).await,
            Self::Tokens => tokens::list(pool).await,
            Self::TokenRevoke { id } => tokens::revoke(pool, id).await,
            Self::RotateBegin { exported } => rotation::step(pool, Step::Begin(exported), false).await,
            Self::RotateStatus => rotation::status(pool),
            Self::RotateSwitch { force } => rotation::step(pool, Step::Switch, force).await,
            Self::RotateFinish { force } => rotation::step(pool, Step::Finish, force).await,
            Self::RotateAbort => rotation::step(pool, Step::Abort, false).await,
            Self::Statements { after } => statements::list(pool, after),
            Self::StatementsImport { statements } => statements::import(pool, statements).await,
            Self::ServerAdmit { name, ttl, from } => tokens::admit_server(pool, name, ttl, from).await,
            Self::ServerRevoke { name } => statements::revoke_server(pool, name).await,
        }
    }

    /// Returns the operation that the signer does for root alone, if the answer needs one.
    pub fn privileged(&self) -> Option<Privileged> {
        match self.kind() {
            Kind::Root(_, operation) => Some(operation),
            _ => None,
        }
    }

    /// Returns a refusal if this request is not answered over the network.
    pub fn local(&self) -> Option<Refusal> {
        match self.kind() {
            Kind::Read | Kind::Change => None,
            Kind::ReadHere(why) | Kind::ChangeHere(why) | Kind::Root(why, _) => Some(local_only(why)),
        }
    }

    /// Time that the caller waits for an answer.
    ///
    /// Killing workers takes a moment, and parking about a second for every few GiB.
    pub fn answer_timeout(&self) -> Duration {
        Duration::from_secs(if matches!(self, Self::Park { .. }) { 600 } else { 30 })
    }
}

/// Returns `true` for a key of the audit trail, whose change may remove lines or leave some out.
fn is_of_audit(parts: &[String]) -> bool {
    parts.first().is_some_and(|first| first.starts_with("audit_"))
}

/// Fields of requests that the audit trail records: keys, certificate requests and values are none.
///
/// A field `client` or `lease` also names the client or lease of the event.
const RECORDED: [&str; 17] = [
    "client",
    "end",
    "force",
    "from",
    "gpu",
    "id",
    "key",
    "lease",
    "name",
    "pattern",
    "per_address",
    "reason",
    "ttl",
    "user",
    "uses",
    "wanted",
    "worker",
];

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(number: &u32) -> bool {
    *number == 0
}

/// Reason why verbs for the pool's authority are not answered over the network.
pub const KEPT_HERE: &str = "a pool's authority is kept on its servers' own disks";

/// Creates the refusal of a verb that is not answered over the network.
pub fn local_only(why: &str) -> Refusal {
    Refusal {
        code: "local".into(),
        message: why.into(),
        hint: "run it on that host, without --server".into(),
    }
}

/// Answer of the server.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Answer {
    /// The request was performed; the value is what the verb shows.
    #[serde(rename = "ok")]
    Ok(serde_json::Value),
    /// The request was refused.
    #[serde(rename = "error")]
    Error(Refusal),
}

pub(super) fn parse(body: &[u8]) -> Result<Ask, Refusal> {
    serde_json::from_slice(body)
        .map_err(|e| Refusal::new("bad-request", format!("the server does not support this request: {e}")))
}

pub(super) fn written(answer: Result<serde_json::Value, Refusal>) -> Vec<u8> {
    let answer = match answer {
        Ok(value) => Answer::Ok(value),
        Err(refusal) => Answer::Error(refusal),
    };
    // JSON and plain texts always serialize.
    serde_json::to_vec(&answer).unwrap_or_default()
}

/// Parses an answer.
pub fn read(body: &[u8]) -> serde_json::Result<Result<serde_json::Value, Refusal>> {
    Ok(match serde_json::from_slice(body)? {
        Answer::Ok(value) => Ok(value),
        Answer::Error(refusal) => Err(refusal),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the names that serde expected, which its error has between backquotes.
    ///
    /// A request without fields takes any.
    fn expected(json: serde_json::Value) -> Vec<String> {
        let error = serde_json::from_value::<Ask>(json).map_or_else(|e| e.to_string(), |_| String::new());
        let names = error.split_once("expected").map_or("", |(_, names)| names);
        names.split('`').skip(1).step_by(2).map(str::to_owned).collect()
    }

    #[test]
    fn each_field_of_a_request_is_recorded_or_stays_out_of_the_trail() {
        // Secrets and long texts, and the fields of requests that change nothing.
        const LEFT_OUT: [&str; 8] =
            ["after", "csr_pem", "exported", "since_unix", "statements", "until_unix", "users", "value"];
        let verbs = expected(serde_json::json!({ "verb": "?" }));
        assert!(verbs.len() > 30, "{verbs:?}");
        let fields = verbs.iter().map(|verb| (verb, expected(serde_json::json!({ "verb": verb, "?": 0 }))));
        let mut found = 0;
        for (verb, field) in fields.flat_map(|(verb, fields)| fields.into_iter().map(move |f| (verb, f))) {
            found += 1;
            let (recorded, left_out) = (RECORDED.contains(&&*field), LEFT_OUT.contains(&&*field));
            assert!(recorded != left_out, "{verb}: {field} belongs to RECORDED, or else to LEFT_OUT");
        }
        assert!(found > 30, "{found}");
    }

    #[test]
    fn the_trails_bounds_are_set_on_the_servers_own_host() {
        let set = |key: &str| Ask::ConfigSet { key: key.into(), value: None };
        for key in ["audit_max", "audit_keep", "audit_required", "\"audit_max\"", " audit_users"] {
            assert!(set(key).local().is_some(), "{key}");
        }
        for key in ["warm_workers", "limits.gpus", "audit_max\nlimits.gpus"] {
            assert!(set(key).local().is_none(), "{key}");
        }
    }

    #[test]
    fn the_trail_records_what_a_request_names_and_no_secret() {
        let detail =
            |ask: Ask| serde_json::from_str::<serde_json::Value>(&ask.event("root".into()).detail).unwrap();
        let secret = || "secret".to_owned();
        let key = "encryption".to_owned();
        assert_eq!(
            detail(Ask::ConfigSet { key: key.clone(), value: Some(secret()) }),
            serde_json::json!({ "key": key })
        );
        let name = "ann".to_owned();
        assert_eq!(
            detail(Ask::AdministratorCreate { name: name.clone(), csr_pem: secret() }),
            serde_json::json!({ "name": name })
        );
        assert_eq!(detail(Ask::RotateBegin { exported: Some(secret()) }), serde_json::json!({}));
        let event = Ask::Park { lease: "l1".into() }.event("root".into());
        assert_eq!((event.event.as_str(), event.lease.as_str()), ("park", "l1"));
    }
}
