//! Answers about leases, their workers, and the queue for GPUs.

use std::io::Write;

use gpusession_common::words::OnIdle;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{micros, show};
use crate::pool::parking::ParkError;
use crate::pool::{Pool, find_worker};
use crate::refusal::Refusal;
use crate::supervise::hex;
use crate::text::{date, mib, print_table, span, table};

/// Reason of a worker's or lease's end.
const BY_HAND: &str = "ended by an administrator";

/// A row of `gpuserver leases`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct LeaseRow {
    /// Lease id.
    pub lease: String,
    /// Client that holds it.
    pub client: String,
    /// User on whose behalf the client holds it; empty: the client's own.
    pub user: String,
    /// Program or service that requested it, as the client reports.
    pub who: String,
    /// Purpose of the request, as the client reports.
    pub why: String,
    /// Shares of the lease, one for each GPU.
    pub devices: Vec<LeaseDevice>,
    /// Number larger than that of every earlier lease.
    pub fencing_token: u64,
    /// Whether its data is encrypted.
    pub encrypted: bool,
    /// Whether the client renews it without end.
    pub persistent: bool,
    /// Whether it has its GPUs to itself.
    pub exclusive: bool,
    /// Requested action while idle: park, release, keep; empty: the server's policy.
    pub on_idle: String,
    /// Whether it keeps its GPUs while it has no programs, instead of lending them.
    pub hold: bool,
    /// Time since its last GPU work, or since its start or its last program's end.
    pub idle_usec: u64,
    /// Whether its programs share their GPUs by MPS.
    pub mps: bool,
    /// Time until it expires unless renewed.
    pub left_usec: u64,
    /// Start, in seconds since 1970.
    pub created_unix: u64,
    /// Number of warm workers.
    pub warm: u32,
    /// active, idle, parking, parked, lent, returning.
    pub state: String,
    /// Place in the queue of a lease that reacquires its GPUs; 0: it does not wait.
    pub position: u32,
}

/// One GPU's part of a lease.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct LeaseDevice {
    /// UUID of the GPU.
    pub uuid: String,
    /// Device memory that the lease may use.
    pub limit_bytes: u64,
    /// Share of the multiprocessors, in percent.
    pub sm_percent: u32,
}

/// A row of `gpuserver queue`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct QueueRow {
    /// Place in the queue, from 1.
    pub position: u32,
    /// Client that waits.
    pub client: String,
    /// User of the request; empty: the client's own.
    pub user: String,
    /// Number of GPUs wanted.
    pub gpus: u32,
    /// normal, below-normal.
    pub priority: String,
}

pub(in crate::admin) async fn leases(pool: &Pool) -> Result<Value, Refusal> {
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
            on_idle: s.lease.on_idle.map_or("", OnIdle::as_str).into(),
            hold: s.lease.hold,
            mps: s.lease.mps,
            left_usec: micros(s.left),
            created_unix: s.lease.created_unix,
        })
        .collect();
    show(serde_json::to_value(rows))
}

pub(in crate::admin) async fn kill(pool: &Pool, worker: String) -> Result<Value, Refusal> {
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

pub(in crate::admin) async fn park(pool: &Pool, lease: String) -> Result<Value, Refusal> {
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

pub(in crate::admin) async fn unpark(pool: &Pool, lease: String) -> Result<Value, Refusal> {
    let lease = find_lease(pool, &lease).await?;
    let (state, place) = pool.unpark(&lease).await;
    Ok(serde_json::json!({ "lease": lease, "state": state, "position": place.position }))
}

pub(in crate::admin) async fn queue(pool: &Pool) -> Result<Value, Refusal> {
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
            priority: w.priority.as_str().into(),
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

/// Prints `gpuserver leases`.
pub fn print_leases(out: &mut dyn Write, rows: Vec<LeaseRow>) -> anyhow::Result<()> {
    let n = rows.len();
    let mut table = table(&[
        "LEASE", "CLIENT", "USER", "STATE", "GPU", "MEMORY", "SMS", "TLS", "WARM", "IDLE", "LEFT", "SINCE",
    ]);
    for r in rows {
        for (i, d) in r.devices.into_iter().enumerate() {
            let first = |text: String| if i == 0 { text } else { String::new() };
            table.add_row([
                first(r.lease.clone()),
                first(r.client.clone()),
                first(if r.user.is_empty() { "-".into() } else { r.user.clone() }),
                first(match r.position {
                    0 => r.state.clone(),
                    place => format!("{} (place {place})", r.state),
                }),
                d.uuid,
                mib(d.limit_bytes),
                format!("{} %{}", d.sm_percent, if r.mps { ", mps" } else { "" }),
                first(if r.encrypted { "yes" } else { "no" }.into()),
                first(r.warm.to_string()),
                first(span(r.idle_usec)),
                first(span(r.left_usec)),
                first(date(r.created_unix)),
            ]);
        }
    }
    print_table(out, &table, n, "no leases")
}

/// Prints `gpuserver queue`.
pub fn print_queue(out: &mut dyn Write, rows: Vec<QueueRow>) -> anyhow::Result<()> {
    let n = rows.len();
    let mut table = table(&["PLACE", "CLIENT", "USER", "GPUS", "PRIORITY"]);
    for r in rows {
        let user = if r.user.is_empty() { "-".into() } else { r.user };
        table.add_row([r.position.to_string(), r.client, user, r.gpus.to_string(), r.priority]);
    }
    print_table(out, &table, n, "no request waits")
}

/// Prints `gpuserver park` and `gpuserver unpark`.
pub fn print_lease_state(out: &mut dyn Write, value: Value) -> anyhow::Result<()> {
    let (lease, state) =
        (value["lease"].as_str().unwrap_or_default(), value["state"].as_str().unwrap_or_default());
    match value["position"].as_u64() {
        Some(place) if place > 0 => writeln!(out, "lease {lease} is {state}, place {place} in the queue")?,
        _ => writeln!(out, "lease {lease} is {state}")?,
    }
    Ok(())
}

/// Prints `gpuserver kill`.
pub fn print_killed(out: &mut dyn Write, value: Value) -> anyhow::Result<()> {
    match value["lease"].as_str() {
        Some(lease) => writeln!(
            out,
            "lease {lease} ended; if its client has it configured, the client requests it again"
        )?,
        None => writeln!(out, "worker {} is stopping", value["worker"].as_str().unwrap_or_default())?,
    }
    Ok(())
}
