//! The calls about leases: allocate, renew, park, release and read.

use std::net::SocketAddr;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use gpusession_common::units::Memory;
use gpusession_common::words::{OnIdle, Priority, Sharing};
use gpusession_proto::control as wire;
use gpusession_proto::journal::Event as Said;
use tonic::{Request, Response, Status};
use tracing::info;

use crate::audit;
use crate::lease::{AllocateError, Lease, Place, Request as LeaseRequest};
use crate::pool::authenticate::{Peer, peer};
use crate::pool::describe::limits;
use crate::pool::parking::ParkError;
use crate::pool::requests::Call;
use crate::pool::status::{beyond, bounded, unfit};
use crate::pool::{Pool, RELEASED, lease_granted, locked, readings, run_detached};
use crate::registry::GpuUse;

pub(super) async fn allocate(
    pool: &Arc<Pool>,
    request: Request<wire::AllocateRequest>,
) -> Result<Response<wire::Lease>, Status> {
    let client = pool.client(&request).await?;
    let from = peer(&request).and_then(Peer::remote);
    let reached = peer(&request).and_then(Peer::local);
    let wish = request.into_inner();
    check(&wish)?;
    let call = pool.requests.begin(&client, &wish.request_id);
    // The transport looks for a reset when a call waits. A call that its client has left already
    // ends here: its withdrawal may have come before it.
    tokio::task::yield_now().await;
    pool.present(&client, &wish.boot_id, &wish.machine_id).await?;
    let (sharing, priority, on_idle, idle_timeout) = terms(&wish)?;
    let allowed = pool.limits_of(&client, &wish.user);
    pool.serves(&allowed)?;
    let encrypted = !from.is_some_and(|p| pool.facts.config.may_be_clear(p.ip()));
    // Exhaustive, so that a new field does not compile before this server reads it.
    let wire::AllocateRequest {
        request_id,
        gpus,
        memory_bytes,
        memory_percent,
        sm_percent,
        sm_count,
        sm_auto,
        model,
        devices,
        sticky,
        user,
        uid,
        ttl_usec,
        who,
        why,
        boot_id,
        once,
        persistent,
        hold,
        order,
        again,
        workers,
        // `terms` and `present` have read these.
        sharing: _,
        priority: _,
        on_idle: _,
        idle_timeout_usec: _,
        machine_id: _,
    } = wish;
    let memory = match (memory_bytes, memory_percent) {
        (0, 0.0) => Memory::Percent(100.0),
        (0, percent) => Memory::Percent(percent),
        (bytes, _) => Memory::Bytes(bytes),
    };
    let wanted = LeaseRequest {
        client: client.clone(),
        request_id,
        gpus,
        memory,
        model,
        devices,
        sticky,
        user,
        uid,
        ttl: Duration::from_micros(ttl_usec),
        who,
        why,
        boot_id,
        encrypted,
        sm_percent: if sm_percent == 0 { 100 } else { sm_percent },
        sm_count,
        sm_auto,
        once,
        sharing,
        priority,
        persistent,
        on_idle,
        hold,
        idle_timeout,
        order,
        limits: allowed.clone(),
    };
    let known = again.then_some(workers);
    let task = {
        let pool = pool.clone();
        // A client that leaves meanwhile has the lease nevertheless.
        async move { grant(&pool, &wanted, &call, from, known).await }
    };
    let (lease, gpus) = run_detached(task).await??;
    Ok(Response::new(pool.describe_lease(&lease, &gpus, reached)))
}

/// Refuses a request with texts or lists that are too long.
fn check(wish: &wire::AllocateRequest) -> Result<(), Status> {
    bounded(
        [
            &wish.request_id,
            &wish.model,
            &wish.sharing,
            &wish.priority,
            &wish.user,
            &wish.who,
            &wish.why,
            &wish.boot_id,
            &wish.machine_id,
            &wish.on_idle,
        ]
        .into_iter()
        .chain(&wish.devices)
        .chain(&wish.sticky),
        &[wish.devices.len(), wish.sticky.len(), wish.gpus as usize],
    )
}

/// Allocates a lease, and makes it known to everyone who has to know it.
async fn grant(
    pool: &Pool,
    wanted: &LeaseRequest,
    call: &Call,
    from: Option<SocketAddr>,
    known: Option<Vec<Vec<u8>>>,
) -> Result<(Lease, Arc<[GpuUse]>), Status> {
    let LeaseRequest { client, encrypted, limits: allowed, .. } = wanted;
    let (lease, fresh) = match pool.allocate(wanted).await {
        Ok(granted) => granted,
        Err(e) => {
            if call.withdrawn() {
                // It may have queued again after its withdrawal.
                let made = pool.registry.cancel(client, &wanted.request_id).await;
                pool.ended(made.as_slice(), RELEASED);
            }
            return Err(not_allocated(pool, client, e));
        }
    };
    let gpus = pool.registry.gpus().await;
    if fresh {
        let what: Vec<_> =
            lease.shares.iter().map(|s| format!("{} MiB of {}", s.limit_bytes >> 20, s.gpu)).collect();
        info!(
            message_id = Said::LeaseGranted.id(),
            gpusession_lease = lease.id,
            gpusession_client = client,
            gpusession_server = pool.facts.config.name,
            "lease {} granted to {client}: {}",
            lease.id,
            what.join(", ")
        );
        pool.note_lease(&lease, true, true);
        let clear = if *encrypted { "" } else { ", not encrypted" };
        let gpus = lease.shares.iter().map(|s| s.gpu.clone()).collect();
        let event = lease_granted(&lease.id, client, gpus, format!("{}{clear}", what.join(", ")));
        let from = from.map(|p| p.ip().to_canonical().to_string()).unwrap_or_default();
        pool.note_within_allowance(audit::Event { from, ..event });
    }
    pool.supervisor.add_lease(&lease, limits(&lease, &gpus), allowed.clone());
    if call.withdrawn() {
        // Its withdrawal may have come before the lease or after it.
        let made = pool.registry.release(Some(client), &lease.id).await;
        pool.ended(made.as_slice(), RELEASED);
        pool.supervisor.end_lease(&lease.id, RELEASED);
        return Err(Status::cancelled("the client has withdrawn this request"));
    }
    call.granted();
    if let Some(known) = known {
        pool.supervisor.end_unclaimed(&lease.id, &known);
    }
    Ok((lease, gpus))
}

/// Parses a word of a request; an empty one leaves the choice to the server.
fn word<T: FromStr<Err = String>>(field: &str, text: &str) -> Result<Option<T>, Status> {
    let parse = |text: &str| text.parse().map_err(|e| Status::invalid_argument(format!("{field}: {e}")));
    Some(text).filter(|t| !t.is_empty()).map(parse).transpose()
}

/// Reads how a requested lease shares its GPUs, its priority, and what happens when it is idle.
fn terms(
    wish: &wire::AllocateRequest,
) -> Result<(Option<Sharing>, Priority, Option<OnIdle>, Duration), Status> {
    let sharing = word::<Sharing>("sharing", &wish.sharing)?;
    let shares = [wish.sm_count != 0, !matches!(wish.sm_percent, 0 | 100), wish.sm_auto];
    if shares.into_iter().filter(|given| *given).count() > 1 {
        return Err(Status::invalid_argument(
            "sm_percent, sm_count and sm_auto say the same: leave all but one out",
        ));
    }
    let priority = word("priority", &wish.priority)?.unwrap_or_default();
    let on_idle = word("on_idle", &wish.on_idle)?;
    let idle_timeout = match wish.idle_timeout_usec {
        0 => Duration::ZERO,
        _ if on_idle == Some(OnIdle::Keep) => {
            return Err(Status::invalid_argument(
                "on_idle \"keep\" and an idle timeout contradict each other: leave one out",
            ));
        }
        usec => Duration::from_micros(usec).max(Duration::from_secs(1)),
    };
    Ok((sharing, priority, on_idle, idle_timeout))
}

/// Logs a refused request, and builds its status.
fn not_allocated(pool: &Pool, client: &str, e: AllocateError) -> Status {
    let text = e.to_string();
    if let Some(more) = pool.quiet.may() {
        // The client itself sees malformed requests and ones that never fit.
        let event = match &e {
            AllocateError::NoCapacity { .. } => Some(Said::PoolExhausted),
            AllocateError::Limit(_) => Some(Said::LimitRefuses),
            _ => None,
        };
        info!(
            message_id = event.map(Said::id),
            gpusession_client = client,
            gpusession_reason = text,
            "client {client}: no lease: {text}{more}"
        );
    }
    if let AllocateError::Limit(exceeded) = &e {
        pool.note_within_allowance(audit::Event {
            actor: format!("client {client}"),
            client: client.into(),
            result: format!("limit-{}", exceeded.name),
            detail: exceeded.text.clone(),
            ..audit::own("lease-refused")
        });
    }
    use tonic::Code::{FailedPrecondition, ResourceExhausted};
    use wire::refusal::Kind;
    match e {
        AllocateError::Invalid(_) => Status::invalid_argument(text),
        AllocateError::NeverFits(_) => unfit(FailedPrecondition, text, Kind::NeverFits, 0, 0),
        AllocateError::NoCapacity { position, waiting, .. } => {
            unfit(ResourceExhausted, text, Kind::NoCapacity, position, waiting)
        }
        AllocateError::Limit(exceeded) => beyond(exceeded),
        AllocateError::Storage(_) => Status::internal(text),
    }
}

pub(super) async fn renew(
    pool: &Arc<Pool>,
    request: Request<wire::RenewRequest>,
) -> Result<Response<wire::RenewReply>, Status> {
    let client = pool.keeper(&request).await?;
    let wish = request.into_inner();
    bounded(wish.leases.iter().chain([&wish.boot_id]), &[wish.leases.len()])?;
    pool.present(&client, &wish.boot_id, "").await?;
    let mut leases = Vec::with_capacity(wish.leases.len());
    let gpus = pool.registry.gpus().await;
    for id in wish.leases {
        leases.push(match pool.registry.renew(&client, &id).await {
            Some(ttl) => {
                let lease = pool.registry.get(&id).await.map(|standing| standing.lease);
                pool.describe_renewed(id, lease.as_ref(), &gpus, ttl)
            }
            None => wire::RenewedLease {
                id,
                lost: true,
                reason: "the server has no such lease: it was released, ended by an administrator, or its client was \
                         silent for too long"
                    .into(),
                ..Default::default()
            },
        });
    }
    Ok(Response::new(wire::RenewReply { leases, state: pool.state().await }))
}

pub(super) async fn release(
    pool: &Arc<Pool>,
    request: Request<wire::ReleaseRequest>,
) -> Result<Response<wire::ReleaseReply>, Status> {
    let client = pool.keeper(&request).await?;
    locked(&pool.clients).heard(&client, pool.clock.now());
    let wish = request.into_inner();
    let pool = pool.clone();
    run_detached(async move {
        let made = match wish.request_id.as_str() {
            "" => None,
            id => {
                // The connection's earlier calls begin first.
                tokio::task::yield_now().await;
                // Noted first, so that a lease made from now on is given back.
                pool.requests.withdraw(&client, id);
                pool.registry.cancel(&client, id).await
            }
        };
        let named = pool.registry.release(Some(&client), &wish.lease).await;
        pool.ended(made.as_slice(), RELEASED);
        pool.ended(named.as_slice(), RELEASED);
    })
    .await?;
    Ok(Response::new(wire::ReleaseReply {}))
}

pub(super) async fn park(
    pool: &Arc<Pool>,
    request: Request<wire::ParkRequest>,
) -> Result<Response<wire::ParkReply>, Status> {
    let lease = pool.own_lease(&request.get_ref().lease, pool.client(&request).await?).await?;
    let parked = {
        let (pool, lease) = (pool.clone(), lease.clone());
        run_detached(async move { pool.park(&lease, "its client asked for it").await }).await?
    };
    parked.map_err(|e| {
        let text = e.to_string();
        match e {
            ParkError::NoLease => Status::not_found(text),
            ParkError::Never(_) | ParkError::Away(_) => Status::failed_precondition(text),
            ParkError::NoRoom { .. } => Status::resource_exhausted(text),
            ParkError::Busy => Status::unavailable(text),
            ParkError::Failed(_) => Status::internal(text),
        }
    })?;
    let (state, place) = pool.parking.state(&lease).unwrap_or(("active", Place::default()));
    Ok(Response::new(wire::ParkReply { state: state.into(), position: place.position }))
}

pub(super) async fn unpark(
    pool: &Arc<Pool>,
    request: Request<wire::UnparkRequest>,
) -> Result<Response<wire::ParkReply>, Status> {
    let lease = pool.own_lease(&request.get_ref().lease, pool.client(&request).await?).await?;
    let (state, place) = pool.unpark(&lease).await;
    Ok(Response::new(wire::ParkReply { state: state.into(), position: place.position }))
}

pub(super) async fn idle_hint(
    pool: &Arc<Pool>,
    request: Request<wire::IdleHintRequest>,
) -> Result<Response<wire::IdleHintReply>, Status> {
    let client = pool.client(&request).await?;
    let wish = request.into_inner();
    let lease = pool.own_lease(&wish.lease, client.clone()).await?;
    let state = pool.hint_idle(&client, &lease, wish.idle).into();
    Ok(Response::new(wire::IdleHintReply { state }))
}

pub(super) async fn readings(
    pool: &Arc<Pool>,
    request: Request<wire::ReadingsRequest>,
) -> Result<Response<wire::ReadingsReply>, Status> {
    let client = pool.reader(&request).await?;
    locked(&pool.clients).heard(&client, pool.clock.now());
    let wish = request.into_inner();
    bounded([&wish.lease], &[])?;
    let standing = pool.registry.get(&wish.lease).await.filter(|s| s.lease.client == client);
    let lease = standing.ok_or_else(|| Status::not_found("no such lease"))?.lease;
    let gpus = pool.registry.gpus().await;
    readings::answer(pool, &lease, &gpus, wish.queries).await.map(Response::new)
}
