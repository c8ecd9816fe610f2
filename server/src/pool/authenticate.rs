//! The client or administrator behind a call, and whether it may make the call.

use std::sync::Arc;

use gpusession_proto::journal::Event as Said;
use tonic::{Request, Status};
use tracing::{error, info, warn};

use super::administrators::NotAdmitted;
use super::clients::{Clients, Refusal, Seen};
use super::status::{beyond, refused, stored};
use super::{Pool, locked, run_detached};
use crate::certificate::{Holder, Role, day, fingerprint, holder};
use crate::connections::Certificate;
pub(super) use crate::connections::Peer;
use crate::limits::Effective;

/// Most authorities that a client may report as trusted.
const MAX_TRUSTED: usize = 8;

impl Pool {
    /// Returns the administrator behind a call over the network. The audit trail has a refusal.
    pub async fn administrator<T: Sync>(&self, request: &Request<T>) -> Result<String, Status> {
        let shown = peer(request).and_then(Peer::certificate);
        let admitted = self.admitted_administrator(shown).await;
        if let Err(refused) = &admitted {
            let holder = shown.and_then(|certificate| certificate.holder.as_ref());
            let actor = match holder.map(|holder| (holder.role, &holder.name)) {
                Some((Role::Administrator, name)) => format!("administrator {name}"),
                Some((Role::Client, name)) => format!("client {name}"),
                Some((Role::Server, name)) => format!("server {name}"),
                None => "unknown".into(),
            };
            let from = peer(request).and_then(Peer::remote).map(|p| p.ip().to_canonical().to_string());
            self.note_refused_administration(actor, from.unwrap_or_default(), refused.message());
        }
        admitted
    }

    async fn admitted_administrator(&self, shown: Option<&Certificate>) -> Result<String, Status> {
        let authority = shown.map(|shown| self.issuer(shown)).transpose()?.unwrap_or_default();
        if let Some(holder) = shown.and_then(|c| c.holder.as_ref()).filter(|h| h.expired(self.clock.unix())) {
            return Err(Status::permission_denied(format!(
                "the certificate of administrator {0:?} expired on {1}; on a server of the pool, `gpuserver admin revoke {0}` \
                 and `gpuserver admin create {0}` make a new one",
                holder.name,
                day(holder.expires_unix)
            )));
        }
        let admitted = {
            let mut all = locked(&self.administrators);
            let certificate = shown.map(|c| (&c.fingerprint, c.holder.as_ref()));
            let admitted =
                certificate.map_or(Err(NotAdmitted::Other), |(print, who)| all.admit(print, who, &authority));
            if matches!(admitted, Ok((_, true))) {
                self.administrator_file.changed();
            }
            admitted
        };
        let (name, new) = admitted.map_err(|e| {
            if let Some(more) = self.quiet.may() {
                warn!("administration over the network: refused: {e}{more}");
            }
            Status::permission_denied(e.to_string())
        })?;
        if new {
            info!(
                "administrator {name}: new on this server; another server of the pool issued the certificate"
            );
            self.store_administrators().await.map_err(stored)?;
        }
        Ok(name)
    }

    /// Returns the holder of a certificate that TLS has verified, if its calls can succeed.
    ///
    /// An expired, revoked or replaced certificate has none.
    pub fn holder(&self, der: &[u8]) -> Option<Holder> {
        let unix = self.clock.unix();
        let holder = holder(der).filter(|h| !h.expired(unix))?;
        let certificate = fingerprint(der);
        let valid = match holder.role {
            Role::Client => locked(&self.clients).accepts(&certificate, &holder, unix),
            Role::Administrator => locked(&self.administrators).is_new(&certificate, &holder).is_ok(),
            Role::Server => self.statements(|all| all.server(&holder.name).is_none()),
        };
        valid.then_some(holder)
    }

    /// Returns the client of a certificate, whichever server of the pool it joined through.
    async fn identify(&self, certificate: &Certificate) -> Result<String, Refusal> {
        let unix = self.clock.unix();
        let authority = self.signer.present().named(certificate.issuer);
        let (client, what, earlier) = {
            let mut clients = locked(&self.clients);
            let known = clients.identify(&certificate.fingerprint, unix);
            let holder = certificate.holder.as_ref().filter(|holder| holder.role == Role::Client);
            let complete = |clients: &mut Clients| {
                let authority = authority.clone();
                holder.is_some_and(|h| clients.complete(&certificate.fingerprint, h, authority, unix))
            };
            match (known, holder) {
                (Ok((name, false)), _) => {
                    if complete(&mut clients) {
                        self.client_file.changed();
                    }
                    return Ok(name);
                }
                (Ok((name, true)), _) => {
                    complete(&mut clients);
                    self.client_file.changed();
                    (name, "uses its renewed certificate", None)
                }
                (Err(Refusal::Unknown), Some(holder)) => {
                    let earlier = clients.introduce(&certificate.fingerprint, holder, unix)?;
                    complete(&mut clients);
                    self.client_file.changed();
                    (
                        holder.name.clone(),
                        "new on this server; another server of the pool issued its certificate",
                        earlier,
                    )
                }
                (Err(refusal), _) => return Err(refusal),
            }
        };
        info!(gpusession_client = client, "client {client}: {what}");
        self.note_replaced(&client, "", earlier);
        if let Err(e) = self.store_clients().await {
            error!("client {client}: cannot be stored: {e}; this server forgets it when it exits");
        }
        Ok(client)
    }

    /// Returns the client behind a call.
    pub(super) async fn client<T: Sync>(&self, request: &Request<T>) -> Result<String, Status> {
        self.client_within(request, "").await
    }

    /// As [`Pool::client`], for calls that maintain present leases.
    ///
    /// Their rate counts separately. A user whose programs exhaust the client's rate thus does not
    /// cost the client its leases.
    pub(super) async fn keeper<T: Sync>(&self, request: &Request<T>) -> Result<String, Status> {
        self.client_within(request, " keeps").await
    }

    /// As [`Pool::client`], for readings of GPUs.
    ///
    /// Their rate counts separately, so that monitoring costs no program its worker.
    pub(super) async fn reader<T: Sync>(&self, request: &Request<T>) -> Result<String, Status> {
        self.client_within(request, " reads").await
    }

    /// Returns the client behind a request for a newer certificate, and its present certificate.
    ///
    /// An expired certificate serves for the configured `renew_grace`.
    pub(super) async fn renewing<'a, T: Sync>(
        &self,
        request: &'a Request<T>,
    ) -> Result<(String, &'a Certificate), Status> {
        let certificate = presented(request)?;
        let grace = self.config().renew_grace.as_secs();
        let client = self.client_until(certificate, " renews", grace).await?;
        Ok((client, certificate))
    }

    async fn client_within<T: Sync>(&self, request: &Request<T>, calls: &str) -> Result<String, Status> {
        self.client_until(presented(request)?, calls, 0).await
    }

    /// Returns the client of a certificate that expired at most `grace` seconds ago.
    async fn client_until(
        &self,
        certificate: &Certificate,
        calls: &str,
        grace: u64,
    ) -> Result<String, Status> {
        let late = |h: &&Holder| h.expired(self.clock.unix().saturating_sub(grace));
        if let Some(holder) = certificate.holder.as_ref().filter(late) {
            let why = expired(holder, self.config().renew_grace.as_secs());
            if let Some(more) = self.quiet.may() {
                warn!(
                    message_id = Said::IdentityExpired.id(),
                    gpusession_client = holder.name,
                    gpusession_reason = why,
                    "client {}: call refused: {why}{more}",
                    holder.name
                );
            }
            return Err(Status::unauthenticated(why));
        }
        self.issuer(certificate)?;
        let client = self.identify(certificate).await.map_err(|refusal| {
            let named = certificate.holder.as_ref().map_or("unknown", |holder| &holder.name);
            self.warn_of_refused(named, &refusal);
            refused(refusal)
        })?;
        let allowed = self.limits_of(&client, "");
        if let Some((entry, most)) = allowed.smallest("requests_per_s")
            && !locked(&self.rates).allow(&format!("{client}{calls}"), most, self.clock.now())
        {
            let why = "the client asks more often";
            return Err(beyond(entry.exceeded(why, "retry after a second")));
        }
        self.serves(&allowed).map(|()| client)
    }

    /// Returns the authority of a certificate, as long as its certificates are valid.
    ///
    /// A connection may be older than the end of a rotation, which TLS does not notice.
    pub(super) fn issuer(&self, certificate: &Certificate) -> Result<String, Status> {
        self.signer.present().named(certificate.issuer).ok_or_else(|| {
            Status::unauthenticated(
                "the certificate is of an authority that the pool has replaced: for a client, an administrator runs \
                 `gpuserver clients forget NAME` on each server and the machine joins again with a new token; for an \
                 administrator, `gpuserver admin create NAME` on a server makes a new one",
            )
        })
    }

    /// Notes the authorities that a client trusts, by its own word.
    pub(super) async fn trusts(&self, client: &str, authorities: &[Vec<u8>]) -> Result<(), Status> {
        if authorities.len() > MAX_TRUSTED || authorities.iter().any(|fingerprint| fingerprint.len() != 32) {
            return Err(Status::invalid_argument("the list of authorities is malformed"));
        }
        let mut trusted: Vec<_> = authorities.iter().map(|f| data_encoding::HEXLOWER.encode(f)).collect();
        trusted.sort();
        let changed = {
            let mut clients = locked(&self.clients);
            let changed = clients.trusts(client, trusted);
            if changed {
                self.client_file.changed();
            }
            changed
        };
        if changed {
            self.store_clients().await.map_err(stored)?;
        }
        Ok(())
    }

    /// Checks that the limit `servers` allows this server.
    pub(super) fn serves(&self, allowed: &Effective) -> Result<(), Status> {
        let here = self.facts.config.name.as_str();
        match allowed.not_listed("servers", |name| name == here) {
            Some(entry) => Err(beyond(entry.exceeded(format!("this is {here}"), "use one of these servers"))),
            None => Ok(()),
        }
    }

    /// Returns a lease's id if the lease belongs to that client.
    pub(super) async fn own_lease(&self, lease: &str, client: String) -> Result<String, Status> {
        match self.registry.get(lease).await {
            Some(standing) if standing.lease.client == client => Ok(standing.lease.id),
            _ => Err(Status::not_found("no such lease")),
        }
    }

    /// Records a client's call that names its boot. Leases of earlier boots end.
    pub(super) async fn present(
        self: &Arc<Self>,
        client: &str,
        boot_id: &str,
        machine_id: &str,
    ) -> Result<(), Status> {
        let seen = locked(&self.clients).seen(client, boot_id, machine_id, self.clock.now());
        match seen {
            Ok(Seen::Known) => Ok(()),
            Ok(Seen::NewBoot) => {
                let (pool, client, boot) = (self.clone(), client.to_owned(), boot_id.to_owned());
                run_detached(async move {
                    let old = pool.registry.release_client(&client, Some(&boot)).await;
                    pool.ended(&old, "the client was restarted");
                })
                .await
            }
            Err(refusal) => {
                self.warn_of_refused(client, &refusal);
                Err(refused(refusal))
            }
        }
    }
}

/// Describes an expired certificate of a client, and the remedy.
fn expired(holder: &Holder, grace: u64) -> String {
    format!(
        "the certificate of client {0:?} expired on {1}; gpusessiond renews it until {2}, later an administrator runs \
         `gpuserver clients forget {0}` on each server of the pool, and the machine joins again with a new token",
        holder.name,
        day(holder.expires_unix),
        day(holder.expires_unix.saturating_add(grace))
    )
}

/// Returns the certificate of the peer that calls.
fn presented<T>(request: &Request<T>) -> Result<&Certificate, Status> {
    peer(request).and_then(Peer::certificate).ok_or_else(|| {
        Status::unauthenticated(
            "this call needs a client certificate of the pool; get one with `gpusession join`",
        )
    })
}

/// Returns the peer of a request's connection.
pub(super) fn peer<T>(request: &Request<T>) -> Option<&Peer> {
    request.extensions().get()
}
