//! Requests over the network: the call of the control service that carries them.

use std::sync::Arc;

use gpusession_proto::control as wire;
use gpusession_proto::control::administration_server::Administration;
use tonic::{Request, Response, Status};
use tracing::info;

use super::ask::{parse, written};
use crate::connections::Peer;
use crate::pool::Pool;

/// The service of the control port for administrators.
#[derive(Clone)]
pub struct Service(pub Arc<Pool>);

#[tonic::async_trait]
impl Administration for Service {
    async fn ask(&self, request: Request<wire::AskRequest>) -> Result<Response<wire::AskReply>, Status> {
        let pool = self.0.clone();
        let name = pool.administrator(&request).await?;
        let from = request.extensions().get().and_then(Peer::remote);
        let from = from.map_or_else(|| "unknown".into(), |p| p.ip().to_canonical().to_string());
        let body = request.into_inner().json;
        // The work continues if the call is cancelled, as on admin.sock.
        let answer = tokio::spawn(async move { answer_request(&body, &pool, &name, &from).await });
        let json = answer.await.map_err(|e| Status::internal(format!("internal error: {e}")))?;
        Ok(Response::new(wire::AskReply { json }))
    }
}

/// Answers the request of an administrator.
async fn answer_request(body: &[u8], pool: &Arc<Pool>, name: &str, from: &str) -> Vec<u8> {
    let ask = match parse(body) {
        Ok(ask) => ask,
        Err(refusal) => return written(Err(refusal)),
    };
    if let Some(refusal) = ask.local() {
        return written(Err(refusal));
    }
    if ask.changes() {
        info!("administrator {name}: request from {from}: {ask:?}");
    }
    written(ask.answer_audited(pool, format!("administrator {name}"), from).await)
}
