//! The client or administrator behind a call, and whether it may make the call.

use std::sync::Arc;

use tonic::{Request, Status};
use tracing::{error, info, warn};

use super::administrators::NotAdmitted;
use super::clients::{Refusal, Seen};
use super::status::{beyond, refused, stored};
use super::{Pool, locked, run_detached};
use crate::certificate::Role;
use crate::connections::Certificate;
pub(super) use crate::connections::Peer;
use crate::limits::Effective;

impl Pool {
    /// Returns the administrator behind a call over the network.
    pub async fn administrator<T: Sync>(&self, request: &Request<T>) -> Result<String, Status> {
        let shown = peer(request).and_then(Peer::certificate);
        let admitted = {
            let mut all = locked(&self.administrators);
            let certificate = shown.map(|c| (&c.fingerprint, c.holder.as_ref()));
            let admitted = certificate.map_or(Err(NotAdmitted::Other), |(print, who)| all.admit(print, who));
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

    /// Returns the client of a certificate, whichever server of the pool it joined through.
    async fn identify(&self, certificate: &Certificate) -> Result<String, Refusal> {
        let client = {
            let mut clients = locked(&self.clients);
            let known = clients.identify(&certificate.fingerprint);
            let holder = certificate.holder.as_ref().filter(|holder| holder.role == Role::Client);
            if let (Ok(name), Some(holder)) = (&known, holder)
                && clients.note_key(name, &holder.key)
            {
                self.client_file.changed();
            }
            let (Err(Refusal::Unknown), Some(holder)) = (&known, holder) else { return known };
            clients.introduce(&certificate.fingerprint, holder)?;
            self.client_file.changed();
            holder.name.clone()
        };
        info!(
            gpusession_client = client,
            "client {client}: new on this server; it joined through another server of the pool"
        );
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

    async fn client_within<T: Sync>(&self, request: &Request<T>, calls: &str) -> Result<String, Status> {
        let Some(certificate) = peer(request).and_then(Peer::certificate) else {
            return Err(Status::unauthenticated(
                "this call needs a client certificate of the pool; get one with `gpusession join`",
            ));
        };
        let client = self.identify(certificate).await.map_err(refused)?;
        let allowed = self.limits_of(&client, "");
        if let Some((entry, most)) = allowed.smallest("requests_per_s")
            && !locked(&self.rates).allow(&format!("{client}{calls}"), most, self.clock.now())
        {
            let why = "the client asks more often";
            return Err(beyond(entry.exceeded(why, "retry after a second")));
        }
        self.serves(&allowed).map(|()| client)
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
                if let Some(more) = self.quiet.may() {
                    warn!(gpusession_client = client, "client {client}: call refused: {refusal}{more}");
                }
                Err(refused(refusal))
            }
        }
    }
}

/// Returns the peer of a request's connection.
pub(super) fn peer<T>(request: &Request<T>) -> Option<&Peer> {
    request.extensions().get()
}
