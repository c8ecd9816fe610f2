//! The call by which a machine joins the pool.

use gpusession_proto::control as wire;
use gpusession_proto::control::enrolment_server::Enrolment;
use gpusession_proto::join::{JoinToken, is_name};
use tonic::{Request, Response, Status};
use tracing::{error, info, warn};

use super::Service;
use crate::audit;
use crate::certificate::Role;
use crate::pool::authenticate::{Peer, peer};
use crate::pool::ca::{AuthorityError, CLIENT_TTL, LASTING_TTL, Order, requested_key};
use crate::pool::clients::Dated;
use crate::pool::locked;
use crate::pool::status::{bounded, refused, stored};

fn of(event: &str, client: &str, from: &str) -> audit::Event {
    let actor = format!("client {client}");
    audit::Event { actor, from: from.into(), client: client.into(), ..audit::own(event) }
}

#[tonic::async_trait]
impl Enrolment for Service {
    async fn join(&self, request: Request<wire::JoinRequest>) -> Result<Response<wire::JoinReply>, Status> {
        let pool = &self.0;
        let from = peer(&request).and_then(Peer::remote);
        let reached = peer(&request).and_then(Peer::local);
        let wish = request.into_inner();
        bounded([&wish.token, &wish.client_name, &wish.machine_id, &wish.boot_id], &[])?;
        let peer = from.map_or_else(|| "unknown".into(), |p| p.ip().to_canonical().to_string());
        let refuse = |status: Status| {
            if let Some(more) = pool.quiet.may() {
                let why = status.message();
                warn!(gpusession_client = wish.client_name, "join from {peer}: refused: {why}{more}");
                // As often as the journal's lines: strangers must not push out earlier events.
                pool.audit.note(audit::Event {
                    result: "refused".into(),
                    detail: format!("{why}{more}"),
                    ..of("join-refused", &wish.client_name, &peer)
                });
            }
            status
        };
        pool.may_change().await.map_err(|why| refuse(Status::unavailable(why)))?;
        let token: JoinToken =
            wish.token.parse().map_err(|e| refuse(Status::invalid_argument(format!("{e}"))))?;
        if !is_name(&wish.client_name) {
            return Err(refuse(Status::invalid_argument(format!(
                "{:?} cannot be a client's name: it has a-z, 0-9, `-` and `.`, 64 characters at most; join with --name",
                wish.client_name
            ))));
        }
        let name = wish.client_name.clone();
        let authorities = pool.authorities.present();
        let signer = authorities.signer();
        let issued = {
            // Locks both, so that the last use of a token serves one join only.
            let mut tokens = locked(&pool.tokens);
            let mut clients = locked(&pool.clients);
            tokens
                .check(&token, &name, &signer.fingerprint(), pool.clock.unix())
                .map_err(|e| refuse(Status::permission_denied(e.to_string())))?;
            let unfit = |e: AuthorityError| refuse(Status::invalid_argument(e.to_string()));
            let key = requested_key(&wish.csr_pem).map_err(unfit)?;
            clients.may_join(&name, &key).map_err(|e| refuse(refused(e)))?;
            let life = if wish.renews { CLIENT_TTL } else { LASTING_TTL };
            let order = Order { role: Role::Client, name: &name, life, identity: None };
            let unix = pool.clock.unix();
            let issued = signer.issue(&wish.csr_pem, &order, unix, pool.random.as_ref());
            let issued = issued.map_err(|e| match e {
                AuthorityError::Request(_) => refuse(Status::invalid_argument(e.to_string())),
                e => {
                    error!("join of {name}: {e}");
                    Status::internal("the server could not issue a certificate; see its journal")
                }
            })?;
            tokens.consume(&token);
            pool.token_file.changed();
            let dated = Dated::new(&issued.fingerprint, unix, issued.expires_unix);
            clients.join(&name, dated, &key, &wish.machine_id);
            pool.client_file.changed();
            issued
        };
        // In this order, so that no token admits more clients than it may.
        pool.store_tokens().await.map_err(stored)?;
        pool.store_clients().await.map_err(stored)?;
        let joined = audit::Event {
            detail: format!("token {}", data_encoding::HEXLOWER.encode(&token.id)),
            ..of("join", &name, &peer)
        };
        pool.audited(joined).await.map_err(Status::unavailable)?;
        info!(gpusession_client = name, "client {name} joined from {peer}");
        Ok(Response::new(wire::JoinReply {
            certificate_pem: issued.pem,
            authority_pem: authorities.list().into(),
            client_name: name,
            // Without `advertise`, the client keeps the name that it was given.
            servers: if pool.advertises() { pool.control_addresses(reached) } else { Vec::new() },
        }))
    }
}
