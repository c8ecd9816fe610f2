//! The call that describes this server.

use std::sync::Arc;

use gpusession_proto::control as wire;
use gpusession_proto::preface;
use tonic::{Request, Response, Status};

use crate::lease::DEFAULT_TTL;
use crate::pool::Pool;
use crate::pool::authenticate::{Peer, peer};
use crate::pool::describe::{device, micros};

pub(super) async fn describe(
    pool: &Arc<Pool>,
    request: Request<wire::DescribeRequest>,
) -> Result<Response<wire::ServerDescription>, Status> {
    let client = pool.client(&request).await?;
    let reached = peer(&request).and_then(Peer::local);
    let facts = &pool.facts;
    let devices = pool.registry.gpus().await;
    Ok(Response::new(wire::ServerDescription {
        name: facts.config.name.clone(),
        software: format!("gpuserver {}", env!("CARGO_PKG_VERSION")),
        protocol: preface::VERSION.into(),
        driver_version: pool.driver_version(),
        cuda_version: facts.cuda_version,
        devices: devices.iter().map(|g| device(&g.gpu, None, g.state(), g)).collect(),
        state: pool.state().await,
        data_addresses: pool.data_addresses(reached),
        idle_timeout_usec: micros(pool.default_timeouts(&client).first()),
        lease_ttl_usec: micros(DEFAULT_TTL),
    }))
}
