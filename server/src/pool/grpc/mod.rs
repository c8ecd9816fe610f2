//! The control service: requests of the pool's clients over mutual TLS. A machine without a
//! certificate may only join.

mod enrolment;
mod identity;
mod issuer;
mod leases;
mod measure;
mod server;
mod statements;
pub(in crate::pool) mod watch;
mod workers;

use std::sync::Arc;

use gpusession_proto::control as wire;
use gpusession_proto::control::pool_server::Pool as PoolService;
use tonic::{Request, Response, Status};

use self::watch::Watching;
use super::Pool;
use super::watch::Events;

/// The services of the control port.
#[derive(Clone)]
pub struct Service(pub Arc<Pool>);

#[tonic::async_trait]
impl PoolService for Service {
    async fn allocate(
        &self,
        request: Request<wire::AllocateRequest>,
    ) -> Result<Response<wire::Lease>, Status> {
        leases::allocate(&self.0, request).await
    }

    async fn renew(
        &self,
        request: Request<wire::RenewRequest>,
    ) -> Result<Response<wire::RenewReply>, Status> {
        leases::renew(&self.0, request).await
    }

    async fn release(
        &self,
        request: Request<wire::ReleaseRequest>,
    ) -> Result<Response<wire::ReleaseReply>, Status> {
        leases::release(&self.0, request).await
    }

    async fn take_workers(
        &self,
        request: Request<wire::TakeWorkersRequest>,
    ) -> Result<Response<wire::TakeWorkersReply>, Status> {
        workers::take_workers(&self.0, request).await
    }

    async fn process_ended(
        &self,
        request: Request<wire::ProcessEndedRequest>,
    ) -> Result<Response<wire::ProcessEndedReply>, Status> {
        workers::process_ended(&self.0, request).await
    }

    async fn park(&self, request: Request<wire::ParkRequest>) -> Result<Response<wire::ParkReply>, Status> {
        leases::park(&self.0, request).await
    }

    async fn unpark(
        &self,
        request: Request<wire::UnparkRequest>,
    ) -> Result<Response<wire::ParkReply>, Status> {
        leases::unpark(&self.0, request).await
    }

    async fn idle_hint(
        &self,
        request: Request<wire::IdleHintRequest>,
    ) -> Result<Response<wire::IdleHintReply>, Status> {
        leases::idle_hint(&self.0, request).await
    }

    async fn readings(
        &self,
        request: Request<wire::ReadingsRequest>,
    ) -> Result<Response<wire::ReadingsReply>, Status> {
        leases::readings(&self.0, request).await
    }

    async fn renew_identity(
        &self,
        request: Request<wire::RenewIdentityRequest>,
    ) -> Result<Response<wire::RenewIdentityReply>, Status> {
        identity::renew(&self.0, request).await
    }

    async fn describe(
        &self,
        request: Request<wire::DescribeRequest>,
    ) -> Result<Response<wire::ServerDescription>, Status> {
        server::describe(&self.0, request).await
    }

    async fn measure(
        &self,
        request: Request<wire::MeasureRequest>,
    ) -> Result<Response<wire::MeasureReply>, Status> {
        measure::measure(&self.0, request).await
    }

    type WatchStream = Events<Watching>;

    async fn watch(
        &self,
        request: Request<wire::WatchRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        watch::watch(&self.0, request).await
    }
}
