//! Answers about the server as a whole: its state, programs and accounting.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{internal, micros, show};
use crate::accounting::Wanted;
use crate::audit;
use crate::pool::Pool;
use crate::refusal::Refusal;
use crate::registry::GpuUse;
use crate::starter::link::users;
use crate::supervise::{Sampled, WorkerView, hex};
use crate::threads::{self, Thread};

/// Output of `gpuserver status`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct StatusView {
    /// Name in the pool.
    pub name: String,
    /// Version of gpuserver.
    pub version: String,
    /// Process id of the server.
    pub pid: u32,
    /// `online`, or `draining: ` and the reason.
    pub state: String,
    /// Address of the control service.
    pub control_address: String,
    /// Address of the data plane.
    pub data_address: String,
    /// Path of the driver library.
    pub driver: String,
    /// Version of the driver; empty if unknown.
    pub driver_version: String,
    /// CUDA version of the driver: 1000 * major + 10 * minor.
    pub cuda_version: u32,
    /// SHA-256 of the authority's certificate.
    pub authority_sha256: String,
    /// Isolation of workers, and what is missing.
    #[serde(default)]
    pub isolation: String,
    /// `memory limits: control groups`, or `memory limits: sampled` and the reason.
    #[serde(default)]
    pub memory_limits: String,
    /// Users of the server's processes.
    #[serde(default)]
    pub users: String,
    /// End of the server's certificate, which it renews itself, in seconds since 1970; 0: unknown.
    #[serde(default)]
    pub certificate_expires_unix: u64,
    /// End of the authority's certificate, in seconds since 1970; 0: unknown.
    #[serde(default)]
    pub authority_expires_unix: u64,
    /// Warnings about certificates that end soon or have ended.
    #[serde(default)]
    pub warnings: Vec<String>,
    /// Number of served GPUs.
    pub gpus: usize,
    /// Number of leases.
    pub leases: usize,
    /// Number of workers.
    pub workers: usize,
    /// Descriptions of the running programs.
    #[serde(default)]
    pub programs: Vec<String>,
}

/// Output of `gpuserver stop`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct StopView {
    /// Process id of the server.
    pub pid: u32,
    /// Descriptions of the running programs.
    pub programs: Vec<String>,
    /// Longest time that the server waits for them.
    pub wait_usec: u64,
}

/// A row of `gpuserver ps`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PsRow {
    /// Name of the server in the pool.
    #[serde(default)]
    pub server: String,
    /// Worker id.
    pub worker: String,
    /// Process id of the worker on the server's host.
    pub pid: Option<u32>,
    /// starting, warm, taken, active, ending.
    pub state: String,
    /// Whether its process shares device memory with other processes, so that it cannot be parked.
    #[serde(default)]
    pub shares_memory: bool,
    /// Id of the worker's lease.
    pub lease: String,
    /// Client that holds the lease.
    pub client: String,
    /// User of the lease; empty: the client's own.
    #[serde(default)]
    pub user: String,
    /// Name of the program that it serves.
    pub program: Option<String>,
    /// Process id of the program on the client.
    pub client_pid: Option<u32>,
    /// User id of the program on the client.
    pub uid: Option<u32>,
    /// Source address of its last connection.
    pub peer: Option<String>,
    /// Time that its program has been without a connection; `None` with one.
    #[serde(default)]
    pub interrupted_usec: Option<u64>,
    /// Interruptions of its program's connection that are over.
    #[serde(default)]
    pub interruptions: u32,
    /// Transport of the program's data: `tcp`; `None` without a program.
    #[serde(default)]
    pub transport: Option<String>,
    /// Whether the program's data is encrypted.
    pub encrypted: Option<bool>,
    /// UUIDs of the GPUs that it sees.
    pub gpus: Vec<String>,
    /// Indices of these GPUs in the server's list.
    #[serde(default)]
    pub gpu_indices: Vec<usize>,
    /// Device memory of the lease that its process uses, its context included.
    pub memory_bytes: u64,
    /// Part of that memory beyond the worker's quota: code, stacks, the driver's own.
    #[serde(default)]
    pub unasked_bytes: u64,
    /// Time with GPU work or copies, to the second.
    #[serde(default)]
    pub gpu_busy_usec: u64,
    /// Number of driver calls, as the worker reports.
    pub calls: u64,
    /// Bytes copied to the device.
    pub bytes_to_device: u64,
    /// Bytes copied from the device.
    pub bytes_from_device: u64,
    /// `full`, `off`, `later`, or the measures that this host does not allow.
    ///
    /// `later` stands until the worker is ready, and under MPS until it has a program.
    pub isolation: String,
    /// Time since its last GPU work.
    pub idle_usec: u64,
    /// Time since its start.
    pub age_usec: u64,
    /// Threads of its process; empty unless requested.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub threads: Vec<Thread>,
}

pub(in crate::admin) async fn status(pool: &Pool) -> Result<Value, Refusal> {
    let (facts, unix) = (pool.facts(), pool.unix());
    show(serde_json::to_value(StatusView {
        name: facts.config.name.clone(),
        version: env!("CARGO_PKG_VERSION").into(),
        pid: std::process::id(),
        state: match pool.registry().draining().await {
            Some(why) => format!("draining: {why}"),
            None => "online".into(),
        },
        control_address: facts.control.to_string(),
        data_address: facts.data.to_string(),
        driver: facts.driver.display().to_string(),
        driver_version: pool.driver_version(),
        cuda_version: facts.cuda_version,
        authority_sha256: data_encoding::HEXLOWER.encode(&pool.authority_fingerprint()),
        isolation: pool.supervisor().isolation().to_string(),
        memory_limits: pool.supervisor().cgroups().to_string(),
        users: users(facts.config.starter.as_deref()).into(),
        certificate_expires_unix: pool.certificate_expires_unix(),
        authority_expires_unix: pool.authority_expires_unix(),
        warnings: warnings(pool, unix),
        gpus: pool.registry().gpus().await.len(),
        leases: pool.registry().count().await,
        workers: pool.supervisor().workers().len(),
        programs: pool.supervisor().programs(true),
    }))
}

fn warnings(pool: &Pool, unix: u64) -> Vec<String> {
    let mut warnings: Vec<_> = pool.ending(unix).iter().map(|e| e.warning(unix)).collect();
    if !pool.audit().works() {
        warnings.push("the audit trail cannot be written; the journal has the reason".into());
    }
    for (gpu, Sampled { bytes, left }) in pool.supervisor().sampled() {
        if left > 0 {
            warnings
                .push(format!("{gpu}: the driver did not clear {left} of {bytes} bytes; see security.md"));
        }
    }
    warnings
}

pub(in crate::admin) async fn ps(pool: &Pool) -> Result<Value, Refusal> {
    show(serde_json::to_value(ps_rows(pool).await))
}

pub(in crate::admin) async fn threads(pool: &Pool) -> Result<Value, Refusal> {
    let mut rows = ps_rows(pool).await;
    for row in &mut rows {
        row.threads = row.pid.map_or_else(Vec::new, threads::of_process);
    }
    show(serde_json::to_value(rows))
}

pub(in crate::admin) async fn drain(pool: &Pool, end: bool, reason: String) -> Result<Value, Refusal> {
    if let Err(e) = pool.registry().drain((!end).then_some(reason)).await {
        let mut refusal = Refusal::new(
            "not-stored",
            format!("the change holds only until a restart: it could not be stored: {e}"),
        );
        refusal.hint = "correct the cause and repeat the command".into();
        return Err(refusal);
    }
    let programs = pool.supervisor().programs(true);
    Ok(serde_json::json!({ "draining": !end, "programs": programs, "leases": pool.registry().count().await }))
}

pub(in crate::admin) fn stop(pool: &Pool, force: bool) -> Result<Value, Refusal> {
    let wait = if force { Duration::ZERO } else { pool.config().drain_timeout };
    show(serde_json::to_value(StopView {
        pid: std::process::id(),
        programs: pool.supervisor().programs(true),
        wait_usec: micros(wait),
    }))
}

pub(in crate::admin) async fn accounting(pool: &Pool, wanted: Wanted) -> Result<Value, Refusal> {
    let accounting = pool.accounting().clone();
    let records = tokio::task::spawn_blocking(move || accounting.list(&wanted)).await;
    let records = records.map_err(|e| internal(&e))?.map_err(|e| internal(&e))?;
    show(serde_json::to_value(records))
}

/// Most lines of the audit trail in one answer.
pub const MAX_LINES: usize = 10_000;

pub(in crate::admin) async fn audit(pool: &Arc<Pool>, wanted: audit::Wanted) -> Result<Value, Refusal> {
    let pool = pool.clone();
    let lines = tokio::task::spawn_blocking(move || pool.audit().list(&wanted, MAX_LINES)).await;
    let lines = lines.map_err(|e| internal(&e))?.map_err(|e| internal(&e))?;
    show(serde_json::to_value(lines))
}

async fn ps_rows(pool: &Pool) -> Vec<PsRow> {
    let server = &pool.facts().config.name;
    let gpus = pool.registry().gpus().await;
    pool.supervisor().workers().into_iter().map(|w| ps_row(w, server, &gpus)).collect()
}

fn ps_row(w: WorkerView, server: &str, gpus: &[GpuUse]) -> PsRow {
    let process = w.process;
    let index = |uuid: &String| gpus.iter().position(|g| g.gpu.uuid == *uuid);
    PsRow {
        server: server.into(),
        worker: hex(&w.id),
        pid: w.pid,
        state: w.phase.as_str().into(),
        shares_memory: w.shares,
        lease: w.lease,
        client: w.client,
        user: w.user,
        program: process.as_ref().map(|p| p.program.clone()),
        client_pid: process.as_ref().map(|p| p.pid),
        uid: process.as_ref().map(|p| p.uid),
        peer: w.peer.map(|p| p.to_string()),
        interrupted_usec: w.interrupted.map(micros),
        interruptions: w.interruptions,
        transport: process.as_ref().map(|_| "tcp".into()),
        encrypted: process.as_ref().map(|p| p.encrypted),
        gpu_indices: w.gpus.iter().filter_map(index).collect(),
        gpus: w.gpus,
        memory_bytes: w.memory_bytes,
        unasked_bytes: w.unasked_bytes,
        gpu_busy_usec: micros(w.busy),
        calls: w.usage.calls,
        bytes_to_device: w.usage.bytes_to_device,
        bytes_from_device: w.usage.bytes_from_device,
        isolation: w.isolation.clone(),
        idle_usec: w.usage.idle_usec,
        age_usec: micros(w.age),
        threads: Vec::new(),
    }
}
