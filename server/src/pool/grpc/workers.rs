//! The calls about workers: take some for processes, and report exited processes.

use std::sync::Arc;
use std::time::Duration;

use gpusession_proto::control as wire;
use gpusession_proto::journal::Event as Said;
use tonic::{Request, Response, Status};
use tracing::info;

use crate::audit;
use crate::lease::Place;
use crate::pool::status::{beyond, bounded, unfit};
use crate::pool::{Pool, locked};
use crate::supervise::{TakeError, WorkerId};

/// Time that a call for workers waits for the GPUs of its lease.
const RETURN_TIMEOUT: Duration = Duration::from_secs(50);

pub(super) async fn take_workers(
    pool: &Arc<Pool>,
    request: Request<wire::TakeWorkersRequest>,
) -> Result<Response<wire::TakeWorkersReply>, Status> {
    let client = pool.client(&request).await?;
    locked(&pool.clients).heard(&client, pool.clock.now());
    let wish = request.into_inner();
    bounded([&wish.lease], &[wish.environment.len()])?;
    let environment = wish.environment.into_iter().collect();
    let count = wish.count.clamp(1, 16) as usize;
    if pool.parking.state(&wish.lease).is_some() {
        let mine = pool.registry.get(&wish.lease).await.is_some_and(|s| s.lease.client == client);
        if wish.waiting == 0 || !mine {
            return Ok(Response::new(wire::TakeWorkersReply { workers: Vec::new() }));
        }
        pool.bring_back(&wish.lease, RETURN_TIMEOUT).await.map_err(|Place { position, waiting }| {
            Status::unavailable(match position {
                0 => "the device memory of the lease's other programs is still on its way back".to_owned(),
                _ => format!(
                    "the lease's GPUs were given to others while it was idle, and are not free yet: position {position} \
                     of {waiting} that wait"
                ),
            })
        })?;
    }
    let taken = match wish.waiting {
        0 => pool.supervisor.take(&client, &wish.lease, count, environment).await,
        _ => pool.supervisor.take_for_waiting(&client, &wish.lease, count, environment).await,
    };
    let taken = taken.map_err(|e| {
        let text = e.to_string();
        let beyond_limit =
            matches!(e, TakeError::Limit(_) | TakeError::Memory | TakeError::Mps(_) | TakeError::TooMany(_));
        // A stock that does not fill up is no news.
        if beyond_limit
            && wish.waiting > 0
            && let Some(more) = pool.quiet_of_workers.may()
        {
            info!(
                message_id = Said::LimitRefuses.id(),
                gpusession_client = client,
                gpusession_lease = wish.lease,
                gpusession_reason = text,
                "client {client}: no worker: {text}{more}"
            );
        }
        if let TakeError::Limit(exceeded) = &e
            && wish.waiting > 0
        {
            pool.note_within_allowance(audit::Event {
                actor: format!("client {client}"),
                client: client.clone(),
                lease: wish.lease.clone(),
                result: format!("limit-{}", exceeded.name),
                detail: exceeded.text.clone(),
                ..audit::own("program-refused")
            });
        }
        match e {
            TakeError::Limit(exceeded) => beyond(exceeded),
            TakeError::NoLease => Status::not_found(text),
            TakeError::Away => Status::unavailable(text),
            TakeError::Memory => {
                let kind = wire::refusal::Kind::OutOfMemory;
                unfit(tonic::Code::ResourceExhausted, text, kind, 0, 0)
            }
            TakeError::TooMany(_) | TakeError::Mps(_) => Status::resource_exhausted(text),
            TakeError::Environment(_) => Status::invalid_argument(text),
            TakeError::NotStarting(_) | TakeError::TooSlow => Status::unavailable(text),
        }
    })?;
    let workers = taken
        .into_iter()
        .map(|t| wire::Worker { id: t.id.to_vec(), fingerprint: t.fingerprint.to_vec() })
        .collect();
    Ok(Response::new(wire::TakeWorkersReply { workers }))
}

pub(super) async fn process_ended(
    pool: &Arc<Pool>,
    request: Request<wire::ProcessEndedRequest>,
) -> Result<Response<wire::ProcessEndedReply>, Status> {
    let client = pool.keeper(&request).await?;
    locked(&pool.clients).heard(&client, pool.clock.now());
    let wish = request.into_inner();
    let id: WorkerId = wish
        .worker
        .as_slice()
        .try_into()
        .map_err(|_| Status::invalid_argument("a worker's id has 16 bytes"))?;
    let mine = pool.registry.get(&wish.lease).await.is_some_and(|s| s.lease.client == client);
    if mine {
        pool.supervisor.end_worker(&id, Some(&wish.lease), "its client process ended");
    }
    Ok(Response::new(wire::ProcessEndedReply {}))
}
