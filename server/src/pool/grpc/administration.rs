//! The call that carries an administrator's request over the network.

use gpusession_proto::control as wire;
use gpusession_proto::control::administration_server::Administration;
use tonic::{Request, Response, Status};

use super::Service;
use crate::admin;
use crate::pool::authenticate::{Peer, peer};

#[tonic::async_trait]
impl Administration for Service {
    async fn ask(&self, request: Request<wire::AskRequest>) -> Result<Response<wire::AskReply>, Status> {
        let pool = self.0.clone();
        let name = pool.administrator(&request).await?;
        let from = peer(&request).and_then(Peer::remote);
        let from = from.map_or_else(|| "unknown".into(), |p| p.ip().to_canonical().to_string());
        let body = request.into_inner().json;
        // The work continues if the call is cancelled, as on admin.sock.
        let answer = tokio::spawn(async move { admin::answer_remote(&body, &pool, &name, &from).await });
        let json = answer.await.map_err(|e| Status::internal(format!("internal error: {e}")))?;
        Ok(Response::new(wire::AskReply { json }))
    }
}
