//! The calls by which servers without the authority's key get what it signs.

use std::sync::Arc;

use gpusession_proto::control as wire;
use gpusession_proto::control::issuer_server::Issuer;
use gpusession_proto::join::is_name;
use gpusession_proto::journal::Event as Said;
use gpusession_proto::message::{self, MAX_MESSAGE};
use tonic::{Request, Response, Status};
use tracing::{info, warn};

use super::Service;
use crate::audit;
use crate::connections::Certificate;
use crate::pool::authenticate::{Peer, peer};
use crate::pool::clients::Dated;
use crate::pool::status::{bounded, refused, stored, unsigned};
use crate::pool::{Pool, locked};
use crate::signer::ca::requested_key;
use crate::signer::{Done, Operation, Outcome, Refused, Why};

/// Most checks of tokens for one server in a second.
const MAX_CHECKS_PER_S: u64 = 50;
/// Most other calls of one server in a second: the signer signs 20 for all of them.
const MAX_ORDERS_PER_S: u64 = 8;

fn server_event(event: &str, server: &str, from: &str) -> audit::Event {
    audit::Event { actor: format!("server {server}"), from: from.into(), ..audit::own(event) }
}

#[tonic::async_trait]
impl Issuer for Service {
    async fn join(
        &self,
        request: Request<wire::ServerJoinRequest>,
    ) -> Result<Response<wire::ServerJoinReply>, Status> {
        let pool = &self.0;
        let from = peer(&request).and_then(Peer::remote).map(|remote| remote.ip().to_canonical());
        let wire::ServerJoinRequest { token, proof, name, csr_pem } = request.into_inner();
        bounded([&name], &[])?;
        let shown = from.map_or_else(|| "unknown".into(), |from| from.to_string());
        let refuse = |status: Status| {
            if let Some(more) = pool.quiet.may() {
                let why = status.message();
                warn!(gpusession_server = name, "join of server {name} from {shown}: refused: {why}{more}");
                pool.audit.note(audit::Event {
                    result: "refused".into(),
                    detail: format!("{why}{more}"),
                    ..server_event("server-join-refused", &name, &shown)
                });
            }
            status
        };
        pool.signer.link().issues().map_err(|e| Status::failed_precondition(e.to_string()))?;
        pool.may_change().await.map_err(|why| refuse(Status::unavailable(why)))?;
        let malformed = || refuse(Status::invalid_argument("the token, its proof or the name is malformed"));
        let (Ok(id), Ok(proof), true) = (token.try_into(), proof.try_into(), is_name(&name)) else {
            return Err(malformed());
        };
        if pool.statements(|all| all.server(&name).is_some()) {
            return Err(refuse(Status::permission_denied(format!(
                "server {name} is revoked for ever: join under another `name`"
            ))));
        }
        let order = Operation::JoinServer { id, proof, name: name.clone(), csr_pem, from };
        let made = pool.signer.aside(move |signer| {
            let link = signer.link();
            // First, so that a stranger without a token costs no signature.
            let issued = link.sign(order)?;
            Ok((issued, link.bundle()?))
        });
        let (issued, bundle) =
            made.await.map_err(|e| refuse(unsigned(&format!("join of server {name}"), &e)))?;
        let until = crate::certificate::day(issued.expires_unix);
        let joined = audit::Event {
            detail: format!("token {}, until {until}", data_encoding::HEXLOWER.encode(&id)),
            ..server_event("server-join", &name, &shown)
        };
        pool.audited(joined).await.map_err(Status::unavailable)?;
        info!(gpusession_server = name, "server {name} joined from {shown}: certificate until {until}");
        Ok(Response::new(wire::ServerJoinReply { certificate_pem: issued.pem, bundle }))
    }

    async fn ask(
        &self,
        request: Request<wire::IssuerRequest>,
    ) -> Result<Response<wire::IssuerReply>, Status> {
        let pool = &self.0;
        let shown = peer(&request).and_then(Peer::certificate);
        let name = pool.calling_server(shown.and_then(|c| c.holder.as_ref()))?;
        let Some(shown) = shown else { return Err(Status::permission_denied("no certificate")) };
        pool.issuer(shown)?;
        pool.signer.link().issues().map_err(|e| Status::failed_precondition(e.to_string()))?;
        let from = peer(&request).and_then(Peer::remote).map(|p| p.ip().to_canonical().to_string());
        let from = from.unwrap_or_default();
        let operation = request.get_ref().operation.as_slice();
        let operation = Some(operation).filter(|bytes| bytes.len() <= MAX_MESSAGE);
        let operation = operation.and_then(|bytes| message::decode::<Operation>(bytes).ok());
        let order = operation.and_then(|operation| allowed(operation, shown)).ok_or_else(|| {
            if let Some(more) = pool.quiet.may() {
                warn!(
                    gpusession_server = name,
                    "server {name}: asked for an operation of issuers: refused{more}"
                );
                pool.audit.note(audit::Event {
                    result: "refused".into(),
                    ..server_event("issuer-refused", &name, &from)
                });
            }
            Status::permission_denied("an issuer does not do this operation for other servers")
        })?;
        let (kind, most) = match order {
            Operation::Check { .. } => ("checks", MAX_CHECKS_PER_S),
            _ => ("orders", MAX_ORDERS_PER_S),
        };
        if !locked(&pool.rates).allow(&format!("server {name} {kind}"), most, pool.clock.now()) {
            return Err(Status::resource_exhausted("this server asks too often; try again after a second"));
        }
        if matches!(order, Operation::Bundle) {
            pool.heard(&name, request.into_inner().report).await.map_err(stored)?;
        }
        let outcome = answer(pool, &name, &from, order).await?;
        let outcome = message::encode(&outcome).split_off(4);
        Ok(Response::new(wire::IssuerReply { outcome }))
    }
}

/// Returns the order for the signer, if an issuer does the operation for other servers.
///
/// The certificate of the connection names the server, whatever the operation says.
fn allowed(operation: Operation, shown: &Certificate) -> Option<Operation> {
    Some(match operation {
        Operation::Check { .. }
        | Operation::Join { .. }
        | Operation::RenewProven { .. }
        | Operation::StateAgain { .. }
        | Operation::Bundle => operation,
        Operation::StateFor { verdict, turn, proof, .. } => {
            Operation::StateFor { present: shown.der.clone(), verdict, turn, proof }
        }
        Operation::RenewServer { csr_pem, authority, proof, .. } => {
            Operation::RenewServer { present: shown.der.clone(), csr_pem, authority, proof }
        }
        _ => return None,
    })
}

async fn answer(pool: &Arc<Pool>, server: &str, from: &str, order: Operation) -> Result<Outcome, Status> {
    if matches!(order, Operation::Bundle | Operation::Check { .. }) {
        return Ok(pool.signer.aside(move |signer| signer.link().ask(order)).await);
    }
    pool.may_change().await.map_err(Status::unavailable)?;
    let _signing = pool.signing.lock().await;
    // The name is free here, too: a token takes over no name of another server's client.
    let joining = match &order {
        Operation::Join { name, csr_pem, .. } => {
            let Ok(key) = requested_key(csr_pem) else {
                return Ok(Err(Refused::new(Why::Request, "the certificate request cannot be used")));
            };
            if let Err(refusal) = locked(&pool.clients).may_join(name, &key) {
                return Ok(Err(Refused::new(Why::Token, refused(refusal).message())));
            }
            Some((name.clone(), key))
        }
        _ => None,
    };
    let (renews, states) =
        (matches!(order, Operation::RenewServer { .. }), matches!(order, Operation::StateFor { .. }));
    let outcome = pool.signer.aside(move |signer| signer.link().ask(order)).await;
    match (&outcome, joining) {
        (Ok(Done::Issued(issued)), Some((name, key))) => {
            let dated = Dated::new(&issued.fingerprint, pool.clock.unix(), issued.expires_unix);
            let earlier = locked(&pool.clients).join_elsewhere(&name, dated, &key);
            pool.client_file.changed();
            pool.store_clients().await.map_err(stored)?;
            pool.note_replaced(&name, "", earlier);
            info!(
                message_id = Said::ClientJoined.id(),
                gpusession_client = name,
                gpusession_server = server,
                "client {name}: joined through server {server}"
            );
        }
        (Ok(Done::Issued(issued)), None) if renews => {
            let until = crate::certificate::day(issued.expires_unix);
            let event = audit::Event {
                detail: format!("until {until}"),
                ..server_event("server-renewed", server, from)
            };
            pool.audited(event).await.map_err(Status::unavailable)?;
            info!(gpusession_server = server, "server {server}: certificate renewed until {until}");
        }
        (Ok(Done::Stated(stated)), None) if states => {
            let taken = pool.take(stated.clone(), &format!("server {server}")).await;
            taken.map_err(stored)?;
        }
        _ => {}
    }
    Ok(outcome)
}
