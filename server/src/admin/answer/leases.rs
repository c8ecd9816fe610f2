//! Answers about leases, their workers, and the queue for GPUs.

use serde_json::Value;

use super::show;
use crate::admin::ask::Refusal;
use crate::admin::rows::{LeaseDevice, LeaseRow, QueueRow, micros};
use crate::pool::parking::ParkError;
use crate::pool::{Pool, find_worker};
use crate::supervise::hex;

/// Reason of a worker's or lease's end.
const BY_HAND: &str = "ended by an administrator";

pub(super) async fn leases(pool: &Pool) -> Result<Value, Refusal> {
    let rows: Vec<_> = pool
        .registry()
        .leases()
        .await
        .into_iter()
        .map(|s| LeaseRow {
            state: pool.lease_state(&s.lease.id).0.into(),
            position: pool.lease_state(&s.lease.id).1.position,
            warm: pool.supervisor().ready(&s.lease.id),
            idle_usec: micros(pool.idle_for(&s.lease.id)),
            lease: s.lease.id,
            client: s.lease.client,
            user: s.lease.user,
            who: s.lease.who,
            why: s.lease.why,
            devices: s
                .lease
                .shares
                .into_iter()
                .map(|d| LeaseDevice { uuid: d.gpu, limit_bytes: d.limit_bytes, sm_percent: d.sm_percent })
                .collect(),
            fencing_token: s.lease.fencing_token,
            encrypted: s.lease.encrypted,
            persistent: s.lease.persistent,
            exclusive: s.lease.exclusive,
            on_idle: s.lease.on_idle.as_str().into(),
            hold: s.lease.hold,
            mps: s.lease.mps,
            left_usec: micros(s.left),
            created_unix: s.lease.created_unix,
        })
        .collect();
    show(serde_json::to_value(rows))
}

pub(super) async fn kill(pool: &Pool, worker: String) -> Result<Value, Refusal> {
    match find_worker(pool, &worker) {
        Ok(id) => {
            pool.supervisor().end_worker(&id, None, BY_HAND);
            Ok(serde_json::json!({ "worker": hex(&id) }))
        }
        // The whole lease id only: the text may be the start of an exited worker's id.
        Err(_) if pool.end_lease(&worker, BY_HAND).await => Ok(serde_json::json!({ "lease": worker })),
        Err(no_worker) => {
            Err(Refusal::new("no-such-worker", format!("{no_worker}; no lease has this id, either")))
        }
    }
}

pub(super) async fn park(pool: &Pool, lease: String) -> Result<Value, Refusal> {
    let lease = find_lease(pool, &lease).await?;
    pool.park(&lease, "an administrator asked for it").await.map_err(|e| {
        let code = match e {
            ParkError::NoLease => "no-such-lease",
            ParkError::Away(_) => "away",
            ParkError::Busy => "busy",
            ParkError::Never(_) => "not-supported",
            ParkError::NoRoom { .. } => "no-room",
            ParkError::Failed(_) => "failed",
        };
        Refusal::new(code, e.to_string())
    })?;
    let state = pool.parking().state(&lease).map_or("active", |(state, _)| state);
    Ok(serde_json::json!({ "lease": lease, "state": state }))
}

pub(super) async fn unpark(pool: &Pool, lease: String) -> Result<Value, Refusal> {
    let lease = find_lease(pool, &lease).await?;
    let (state, place) = pool.unpark(&lease).await;
    Ok(serde_json::json!({ "lease": lease, "state": state, "position": place.position }))
}

pub(super) async fn queue(pool: &Pool) -> Result<Value, Refusal> {
    let rows: Vec<_> = pool
        .registry()
        .waiting()
        .await
        .into_iter()
        .map(|w| QueueRow {
            position: w.position,
            client: w.client,
            user: w.user,
            gpus: w.gpus,
            priority: match w.priority {
                crate::lease::Priority::Normal => "normal",
                crate::lease::Priority::BelowNormal => "below-normal",
            }
            .into(),
        })
        .collect();
    show(serde_json::to_value(rows))
}

/// Finds the one lease whose id starts with `prefix`.
async fn find_lease(pool: &Pool, prefix: &str) -> Result<String, Refusal> {
    let all = pool.registry().leases().await;
    let fits: Vec<_> = all.into_iter().map(|s| s.lease.id).filter(|id| id.starts_with(prefix)).collect();
    match fits.as_slice() {
        [one] if !prefix.is_empty() => Ok(one.clone()),
        [] => Err(Refusal::new(
            "no-such-lease",
            format!("lease {prefix} not found; `gpuserver leases` lists leases"),
        )),
        _ => Err(Refusal::new(
            "no-such-lease",
            format!("{} leases start with {prefix:?}; write more of the id", fits.len()),
        )),
    }
}
