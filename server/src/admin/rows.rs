//! Answers to administrators: the rows and views that the verbs show.

use std::time::Duration;

use gpusession_proto::join::JoinToken;
use serde::{Deserialize, Serialize};

use crate::config;
use crate::lease::Sharing;
use crate::pool::administrators::{AdministratorRecord, Administrators};
use crate::pool::tokens::{TokenRecord, Tokens};
use crate::registry::GpuUse;
use crate::supervise::{WorkerView, hex};
use crate::threads::Thread;

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

/// A row of `gpuserver limits`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct LimitRow {
    /// Key of the limit.
    pub limit: String,
    /// Value as text.
    pub value: String,
    /// Layer that sets it: everybody, a group, a client or a user.
    pub of: String,
    /// File and line that set it.
    pub origin: String,
    /// Explanation for people.
    pub help: String,
}

/// A key of the configuration.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ConfigRow {
    /// Dotted name of the key.
    pub key: String,
    /// Effective value as text.
    pub value: String,
    /// Source of the value: file and line, environment variable, or default.
    pub origin: String,
    /// Whether the configuration sets it.
    pub changed: bool,
    /// Whether a change takes effect without a restart.
    pub live: bool,
    /// Whether this value is in the files only, and takes effect after a restart.
    #[serde(default)]
    pub after_restart: bool,
}

/// A row of `gpuserver gpus`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct GpuRow {
    /// Index in this server's list.
    pub index: usize,
    /// UUID as the driver writes it.
    pub uuid: String,
    /// Product name.
    pub name: String,
    /// PCI address.
    pub pci_address: String,
    /// Device memory of the card.
    pub memory_bytes: u64,
    /// Part of it that is promised to leases.
    pub leased_bytes: u64,
    /// Part of it that all processes of the host use, as NVML reports.
    #[serde(default)]
    pub used_bytes: Option<u64>,
    /// Percent of the last sample period with a kernel running, as NVML reports.
    #[serde(default)]
    pub utilization_percent: Option<u32>,
    /// Compute capability, such as `9.0`.
    pub compute_capability: String,
    /// Way in which leases share it.
    #[serde(default)]
    pub sharing: Sharing,
    /// free, leased, off, off-pending, stopped, broken.
    pub state: String,
    /// Reason if it is withdrawn.
    pub reason: Option<String>,
    /// Device memory that the server counts for one program's context.
    pub context_bytes: u64,
    /// Ids of the leases on it.
    pub leases: Vec<String>,
}

/// A row of `gpuserver clients`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ClientRow {
    /// Name of the client.
    pub name: String,
    /// connected, away, revoked.
    pub state: String,
    /// Number of leases that it holds.
    pub leases: usize,
    /// Time since its last call; `None` if unknown.
    pub silent_usec: Option<u64>,
    /// Time at which it joined, in seconds since 1970.
    pub joined_unix: u64,
    /// SHA-256 of its certificate.
    pub certificate_sha256: String,
}

/// A row of `gpuserver token list`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct TokenRow {
    /// Public id of the token.
    pub id: String,
    /// Pattern of the client names that can join with it.
    pub name_pattern: String,
    /// Number of clients that can still join with it.
    pub uses_left: u32,
    /// Creation, in seconds since 1970.
    pub created_unix: u64,
    /// Expiry, in seconds since 1970.
    pub expires_unix: u64,
}

/// A row of `gpuserver admin list`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct AdministratorRow {
    /// Name of the administrator.
    pub name: String,
    /// good, revoked.
    pub state: String,
    /// Time at which the certificate was issued or revoked, in seconds since 1970.
    pub since_unix: u64,
    /// SHA-256 of the certificate; empty if this server has not seen it.
    pub certificate_sha256: String,
}

/// Returns the rows of `gpuserver admin list`.
pub fn administrator_rows(all: &Administrators) -> Vec<AdministratorRow> {
    let row = |(name, record): (&str, &AdministratorRecord)| AdministratorRow {
        name: name.into(),
        state: if record.revoked { "revoked" } else { "good" }.into(),
        since_unix: record.since_unix,
        certificate_sha256: record.certificate.clone(),
    };
    all.list().map(row).collect()
}

/// Answer to `gpuserver admin create`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct AdministratorView {
    /// New certificate of the administrator.
    pub certificate_pem: String,
    /// Certificate of the pool's authority.
    pub authority_pem: String,
}

/// Returns the rows of `gpuserver token list`.
pub fn token_rows(tokens: &Tokens) -> Vec<TokenRow> {
    let row = |(id, record): (&str, &TokenRecord)| TokenRow {
        id: id.into(),
        name_pattern: record.pattern.clone(),
        uses_left: record.uses_left,
        created_unix: record.created_unix,
        expires_unix: record.expires_unix,
    };
    tokens.list().into_iter().map(row).collect()
}

/// Answer to `gpuserver token create`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct TokenView {
    /// Secret text of the token.
    pub token: String,
    /// Public id of the token.
    pub id: String,
    /// Pattern of the client names that can join with it.
    pub name_pattern: String,
    /// Number of clients that can join with it.
    pub uses: u32,
    /// Expiry, in seconds since 1970.
    pub expires_unix: u64,
}

impl TokenView {
    /// Describes a new token.
    pub fn new(token: &JoinToken, record: TokenRecord) -> Self {
        Self {
            token: token.to_text(),
            id: data_encoding::HEXLOWER.encode(&token.id),
            name_pattern: record.pattern,
            uses: record.uses_left,
            expires_unix: record.expires_unix,
        }
    }
}

/// Lists the keys of a configuration, then the values that wait for a restart.
pub fn config_rows(config: &config::Config) -> Vec<ConfigRow> {
    let row = |(key, value, origin): &(String, String, config::Origin), after_restart| ConfigRow {
        key: key.clone(),
        value: value.clone(),
        origin: origin.to_string(),
        changed: after_restart || !matches!(origin, config::Origin::Default),
        live: config::is_live(key) || key == "reserve",
        after_restart,
    };
    let holds = config.report.iter().map(|entry| row(entry, false));
    holds.chain(config.waiting.iter().map(|entry| row(entry, true))).collect()
}

pub(super) fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

pub(super) fn ps_row(w: WorkerView, server: &str, gpus: &[GpuUse]) -> PsRow {
    let process = w.process;
    let index = |uuid: &String| gpus.iter().position(|g| g.gpu.uuid == *uuid);
    PsRow {
        server: server.into(),
        worker: hex(&w.id),
        pid: w.pid,
        state: w.phase.as_str().into(),
        lease: w.lease,
        client: w.client,
        user: w.user,
        program: process.as_ref().map(|p| p.program.clone()),
        client_pid: process.as_ref().map(|p| p.pid),
        uid: process.as_ref().map(|p| p.uid),
        peer: w.peer.map(|p| p.to_string()),
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
