//! Answers about workers and their programs.

use std::io::Write;

use comfy_table::Table;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{micros, show};
use crate::pool::Pool;
use crate::refusal::Refusal;
use crate::registry::GpuUse;
use crate::supervise::{WorkerView, hex};
use crate::text::{dash, mib, print_table, span, table};
use crate::threads::{self, Thread};

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

const NO_WORKERS: &str = "no workers: no client holds a lease";

/// Describes the program that a worker serves.
fn program(r: &PsRow) -> String {
    match (&r.program, r.client_pid, r.uid) {
        (Some(program), Some(pid), Some(uid)) => format!("{program} (pid {pid}, uid {uid})"),
        _ => "-".into(),
    }
}

/// Prints `gpuserver ps --threads`; `all`: rows of several servers.
pub fn print_threads(out: &mut dyn Write, rows: Vec<PsRow>, all: bool) -> anyhow::Result<()> {
    let n = rows.len();
    let mut table = table(&["SERVER", "WORKER", "PID", "CLIENT", "PROGRAM", "TID", "THREAD", "STATE", "CPU"]);
    for r in &rows {
        for (i, t) in r.threads.iter().enumerate() {
            let first = |text: String| if i == 0 { text } else { String::new() };
            table.add_row([
                first(r.server.clone()),
                first(r.worker.get(..12).unwrap_or(&r.worker).to_string()),
                first(dash(r.pid)),
                first(r.client.clone()),
                first(program(r)),
                t.tid.to_string(),
                t.name.clone(),
                t.state.clone(),
                format!("{}.{:02} s", t.cpu_usec / 1_000_000, t.cpu_usec / 10_000 % 100),
            ]);
        }
    }
    hide_server(&mut table, all);
    print_table(out, &table, n, NO_WORKERS)
}

/// Hides the server's column unless the rows are of several servers.
fn hide_server(table: &mut Table, all: bool) {
    if let Some(column) = table.column_mut(0).filter(|_| !all) {
        column.set_constraint(comfy_table::ColumnConstraint::Hidden);
    }
}

/// Prints `gpuserver ps`; `all`: rows of several servers.
pub fn print_ps(out: &mut dyn Write, rows: Vec<PsRow>, all: bool) -> anyhow::Result<()> {
    let n = rows.len();
    let mut table = table(&[
        "SERVER",
        "WORKER",
        "PID",
        "STATE",
        "LEASE",
        "CLIENT",
        "PROGRAM",
        "FROM",
        "TRANSPORT",
        "TLS",
        "GPU",
        "ISOLATION",
        "MEMORY",
        "CALLS",
        "AGE",
    ]);
    for r in rows {
        let (program, state) = (program(&r), state(&r));
        table.add_row([
            r.server,
            r.worker.get(..12).unwrap_or(&r.worker).to_string(),
            dash(r.pid),
            state,
            r.lease,
            r.client,
            program,
            dash(r.peer),
            dash(r.transport),
            match r.encrypted {
                Some(true) => "yes",
                Some(false) => "no",
                None => "-",
            }
            .into(),
            r.gpu_indices.iter().map(usize::to_string).collect::<Vec<_>>().join(" "),
            if r.isolation.len() > 5 { "partial".into() } else { r.isolation },
            mib(r.memory_bytes),
            r.calls.to_string(),
            span(r.age_usec),
        ]);
    }
    hide_server(&mut table, all);
    print_table(out, &table, n, NO_WORKERS)
}

/// Describes the state of a worker and of its program's connection.
fn state(row: &PsRow) -> String {
    let mut state = row.state.clone();
    if row.shares_memory {
        state += ", shares";
    }
    match (row.interrupted_usec, row.interruptions) {
        (Some(usec), _) => state += &format!(", no connection for {}", span(usec)),
        (None, 1..) => state += &format!(", interrupted {}x", row.interruptions),
        (None, 0) => {}
    }
    state
}
