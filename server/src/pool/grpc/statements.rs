//! The call by which another server of the pool gets statements.

use gpusession_proto::control as wire;
use gpusession_proto::control::statements_server::Statements;
use gpusession_proto::statement::Signed;
use tonic::{Request, Response, Status};

use super::Service;
use crate::certificate::{Holder, Role};
use crate::pool::authenticate::{Peer, peer};
use crate::pool::locked;

/// Most calls of one server in a second: a whole list takes some.
const MAX_CALLS_PER_S: u64 = 100;

#[tonic::async_trait]
impl Statements for Service {
    async fn after(
        &self,
        request: Request<wire::StatementsRequest>,
    ) -> Result<Response<wire::StatementsReply>, Status> {
        let pool = &self.0;
        let name =
            pool.calling_server(peer(&request).and_then(Peer::certificate).and_then(|c| c.holder.as_ref()))?;
        if !locked(&pool.rates).allow(&format!("server {name}"), MAX_CALLS_PER_S, pool.clock.now()) {
            return Err(Status::resource_exhausted("this server asks too often; try again after a second"));
        }
        let request = request.into_inner();
        let after = if request.run == pool.run { request.after } else { 0 };
        let (page, last, more) = pool.statements(|all| all.page(after));
        Ok(Response::new(wire::StatementsReply {
            server: pool.facts.config.name.clone(),
            run: pool.run.to_vec(),
            statements: page.iter().map(Signed::bytes).collect(),
            last,
            more,
        }))
    }
}

impl crate::pool::Pool {
    /// Returns the name of the server that calls, unless it is revoked.
    pub(super) fn calling_server(&self, holder: Option<&Holder>) -> Result<String, Status> {
        let unix = self.clock.unix();
        let holder = holder.filter(|holder| holder.role == Role::Server && !holder.expired(unix));
        let name = holder.map(|holder| holder.name.clone());
        let name = name.ok_or_else(|| Status::permission_denied("this call is for servers of the pool"))?;
        match self.statements(|all| all.server(&name).is_some()) {
            true => Err(Status::permission_denied(format!("server {name} is revoked"))),
            false => Ok(name),
        }
    }
}
