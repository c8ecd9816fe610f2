//! The call that describes this server.

use std::sync::Arc;
use std::time::UNIX_EPOCH;

use gpusession_proto::control as wire;
use gpusession_proto::preface;
use gpusession_proto::readings::uuid_bytes;
use tonic::{Request, Response, Status};

use crate::clock::wall;
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
    let request = request.into_inner();
    let says = !request.authorities.is_empty();
    if says {
        pool.trusts(&client, &request.authorities).await?;
    }
    let (usage, client_programs) = match request.usage_uid {
        Some(uid) => (pool.usage_of(&client, uid).await?, pool.programs_of(&client).await),
        None => Default::default(),
    };
    let facts = &pool.facts;
    let devices = pool.registry.gpus().await;
    let readings = pool.monitor.readings().borrow().clone();
    let load = |uuid: &str| {
        let reading = readings.as_ref().and_then(|all| all.gpu(&uuid_bytes(uuid)?));
        reading.map_or_else(wire::CardLoad::default, |reading| wire::CardLoad {
            used_bytes: reading.memory_used_bytes,
            utilization_percent: reading.utilization_percent,
            temperature_c: reading.temperature_c,
            power_mw: reading.power_mw,
        })
    };
    Ok(Response::new(wire::ServerDescription {
        name: facts.config.name.clone(),
        software: format!("gpuserver {}", env!("CARGO_PKG_VERSION")),
        protocol: preface::VERSION.into(),
        oldest_protocol: Some(preface::OLDEST.into()),
        driver_version: pool.driver_version(),
        cuda_version: facts.cuda_version,
        devices: devices.iter().map(|g| device(&g.gpu, None, g.state(), g)).collect(),
        state: pool.state().await,
        data_addresses: pool.data_addresses(reached),
        idle_timeout_usec: micros(pool.default_timeouts(&client).first()),
        lease_ttl_usec: micros(DEFAULT_TTL),
        time_usec: wall().duration_since(UNIX_EPOCH).map_or(0, micros),
        loads: devices.iter().map(|g| load(&g.gpu.uuid)).collect(),
        leases: Some(pool.registry.count().await as u32),
        waiting: Some(pool.registry.waiting().await.len() as u32),
        renews_identities: true,
        programs: Some(pool.supervisor.programs(true).len() as u32),
        usage,
        client_programs,
        revoked_servers: if says { pool.revoked_servers() } else { Vec::new() },
        authorities_pem: if says { pool.signer.present().list().into() } else { String::new() },
    }))
}
