//! The call by which a machine joins the pool.

use gpusession_proto::control as wire;
use gpusession_proto::control::enrolment_server::Enrolment;
use gpusession_proto::join::{JoinToken, is_name};
use gpusession_proto::journal::Event as Said;
use tonic::{Request, Response, Status};
use tracing::{info, warn};

use super::Service;
use crate::audit;
use crate::pool::authenticate::{Peer, peer};
use crate::pool::clients::Dated;
use crate::pool::locked;
use crate::pool::status::{bounded, refused, settled, stored, unsigned};
use crate::signer::Operation;
use crate::signer::ca::requested_key;

fn client_event(event: &str, client: &str, from: &str) -> audit::Event {
    let actor = format!("client {client}");
    audit::Event { actor, from: from.into(), client: client.into(), ..audit::own(event) }
}

#[tonic::async_trait]
impl Enrolment for Service {
    async fn join(&self, request: Request<wire::JoinRequest>) -> Result<Response<wire::JoinReply>, Status> {
        let pool = &self.0;
        let from = peer(&request).and_then(Peer::remote).map(|remote| remote.ip().to_canonical());
        let reached = peer(&request).and_then(Peer::local);
        let wish = request.into_inner();
        bounded([&wish.token, &wish.client_name, &wish.machine_id, &wish.boot_id], &[])?;
        let peer = from.map_or_else(|| "unknown".into(), |from| from.to_string());
        let refuse = |status: Status| {
            if let Some(more) = pool.quiet.may() {
                let why = status.message();
                warn!(
                    message_id = Said::ClientRefused.id(),
                    gpusession_client = wish.client_name,
                    gpusession_reason = why,
                    "join from {peer}: refused: {why}{more}"
                );
                // As often as the journal's lines: strangers must not push out earlier events.
                pool.audit.note(audit::Event {
                    result: "refused".into(),
                    detail: format!("{why}{more}"),
                    ..client_event("join-refused", &wish.client_name, &peer)
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
        let key =
            requested_key(&wish.csr_pem).map_err(|e| refuse(Status::invalid_argument(e.to_string())))?;
        let (issued, earlier) = {
            let _signing = pool.signing.lock().await;
            let refused_by_signer = |e| refuse(unsigned(&format!("join of {name}"), &e));
            // First, so that strangers do not learn which names exist.
            let check = Operation::check(&token, &name, from);
            let checked = pool.signer.aside(move |signer| signer.link().ask(check)).await;
            checked.map_err(refused_by_signer)?;
            locked(&pool.clients).may_join(&name, &key).map_err(|e| refuse(refused(e)))?;
            let ahead = locked(&pool.clients).forgotten_ahead(&name, pool.clock.unix());
            settled(&format!("client {name} was forgotten"), ahead).await.map_err(refuse)?;
            let order = Operation::join(&token, &name, from, &wish.csr_pem, wish.renews);
            let issued = pool.signer.aside(move |signer| signer.link().sign(order)).await;
            let issued = issued.map_err(refused_by_signer)?;
            let dated = Dated::new(&issued.fingerprint, pool.clock.unix(), issued.expires_unix);
            let earlier = locked(&pool.clients).join(&name, dated, &key, &wish.machine_id);
            pool.client_file.changed();
            (issued, earlier)
        };
        pool.store_clients().await.map_err(stored)?;
        let joined = audit::Event {
            identity: data_encoding::HEXLOWER.encode(&key),
            detail: format!("token {}", data_encoding::HEXLOWER.encode(&token.id)),
            ..client_event("join", &name, &peer)
        };
        pool.audited(joined).await.map_err(Status::unavailable)?;
        pool.note_replaced(&name, &peer, earlier);
        info!(
            message_id = Said::ClientJoined.id(),
            gpusession_client = name,
            "client {name}: joined from {peer}"
        );
        Ok(Response::new(wire::JoinReply {
            certificate_pem: issued.pem,
            authority_pem: pool.signer.present().list().into(),
            client_name: name,
            // Without `advertise`, the client keeps the name that it was given.
            servers: if pool.advertises() { pool.control_addresses(reached) } else { Vec::new() },
        }))
    }
}
