//! Administration of the running server, over `admin.sock` or over the network.
//!
//! A connection to the socket carries one request and one answer, each a little-endian `u32` length
//! and JSON; a process that may open the socket may do everything. Over the network, a call of the
//! control service carries the same JSON; the caller needs an administrator's certificate.

use std::io::{self, Read, Write};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixStream as StdUnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use gpusession_proto::join::{self, JoinToken};
use gpusession_proto::readings::uuid_bytes;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::time::timeout;
use tracing::{debug, info, warn};

use crate::accounting::Wanted;
use crate::config::{self, parse_duration};
use crate::lease::{Sharing, Withdrawn};
use crate::limits::LIMITS;
use crate::pool::administrators::{AdministratorRecord, Administrators, NotIssued};
use crate::pool::parking::ParkError;
use crate::pool::tokens::{TokenRecord, Tokens};
use crate::pool::{Pool, find_worker};
use crate::registry::GpuUse;
use crate::supervise::{WorkerView, hex};
use crate::threads::{self, Thread};

/// Longest request over the socket, in bytes.
const MAX_REQUEST: usize = 64 << 10;
/// Longest answer that a caller accepts, in bytes.
pub const MAX_ANSWER: usize = 64 << 20;
/// Bound on each read and write of the socket.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// A request of an administrator.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "verb", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Ask {
    /// Show addresses, driver and numbers of the server.
    Status,
    /// List workers.
    Ps,
    /// List workers with the threads of their processes.
    Threads,
    /// List leases.
    Leases,
    /// List GPUs.
    Gpus,
    /// List clients.
    Clients,
    /// Refuse a client from now on.
    Revoke {
        /// Name of the client.
        name: String,
    },
    /// Remove a client.
    Forget {
        /// Name of the client.
        name: String,
    },
    /// Kill a worker, or revoke a lease.
    Kill {
        /// Worker id or its start, or a whole lease id.
        worker: String,
    },
    /// Move the device memory of a lease's programs to host memory.
    Park {
        /// Lease id or its start.
        lease: String,
    },
    /// Move it back, or reacquire the GPUs of a lent lease.
    Unpark {
        /// Lease id or its start.
        lease: String,
    },
    /// Withdraw a GPU; leases on it stay.
    Off {
        /// Index, UUID, or start of the UUID.
        gpu: String,
        /// Explanation for people.
        reason: String,
    },
    /// Lease a withdrawn GPU again.
    On {
        /// As for [`Ask::Off`].
        gpu: String,
    },
    /// Remove a GPU without leases from the pool.
    Drop {
        /// As for [`Ask::Off`].
        gpu: String,
    },
    /// Stop new leases, or resume them.
    Drain {
        /// Whether to resume new leases.
        end: bool,
        /// Explanation for people.
        reason: String,
    },
    /// Stop the server.
    Stop {
        /// Whether to stop without waiting for programs.
        force: bool,
    },
    /// List MPS domains.
    Mps,
    /// List requests that wait for GPUs.
    Queue,
    /// List the limits of a client and a user.
    Limits {
        /// Name of the client; empty: the limits for everybody.
        client: String,
        /// Name of the user; empty: none.
        user: String,
    },
    /// List records of ended leases and programs.
    Accounting {
        /// Selection of records.
        wanted: Wanted,
    },
    /// List the keys of the running configuration.
    Config,
    /// Change a key of the running server, and store the change.
    ConfigSet {
        /// Dotted name of the key.
        key: String,
        /// TOML text of the value; `None` removes the stored change.
        value: Option<String>,
    },
    /// Read the configuration files again.
    Reload,
    /// Create a join token.
    TokenCreate {
        /// Pattern of the client names that can join with it.
        pattern: String,
        /// Number of clients that can join with it.
        uses: u32,
        /// Lifetime, such as `24h`.
        ttl: String,
    },
    /// List join tokens.
    Tokens,
    /// Revoke a join token.
    TokenRevoke {
        /// Token id or its start.
        id: String,
    },
    /// Issue an administrator's certificate.
    AdministratorCreate {
        /// Name of the administrator.
        name: String,
        /// Certificate request (PEM), signed with the new key.
        csr_pem: String,
    },
    /// List administrators.
    Administrators,
    /// Refuse an administrator from now on.
    AdministratorRevoke {
        /// Name of the administrator.
        name: String,
    },
}

impl Ask {
    /// Returns a refusal if this request is not answered over the network.
    pub fn local(&self) -> Option<Refusal> {
        let why = match self {
            Self::Stop { .. } => "a server is stopped on its own host: the command waits for its process",
            Self::AdministratorCreate { .. } => {
                "administrators are made on a server's own host, so that a stolen certificate is worth nothing once it is revoked"
            }
            _ => return None,
        };
        Some(local_only(why))
    }

    /// Time that the caller waits for an answer.
    ///
    /// Killing workers takes a moment, and parking about a second for every few GiB.
    pub fn patience(&self) -> Duration {
        Duration::from_secs(if matches!(self, Self::Park { .. }) { 600 } else { 30 })
    }

    /// Returns `true` if the request may change anything, so that it is logged.
    fn changes(&self) -> bool {
        !matches!(
            self,
            Self::Status
                | Self::Ps
                | Self::Threads
                | Self::Leases
                | Self::Gpus
                | Self::Clients
                | Self::Mps
                | Self::Queue
                | Self::Limits { .. }
                | Self::Accounting { .. }
                | Self::Config
                | Self::Tokens
                | Self::Administrators
        )
    }
}

/// Creates the refusal of a verb that is not answered over the network.
pub fn local_only(why: &str) -> Refusal {
    Refusal {
        code: "local".into(),
        message: why.into(),
        hint: "run it on that host, without --server".into(),
    }
}

/// Refusal of an administrator's request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    /// Stable code for programs.
    pub code: String,
    /// Explanation for people.
    pub message: String,
    /// Remedy for people; may be empty.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub hint: String,
}

impl Refusal {
    /// Creates a refusal without a hint.
    pub fn new(code: &str, message: impl Into<String>) -> Self {
        Self { code: code.into(), message: message.into(), hint: String::new() }
    }
}

/// Answer of the server.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Answer {
    /// The request was performed; the value is what the verb shows.
    #[serde(rename = "ok")]
    Ok(serde_json::Value),
    /// The request was refused.
    #[serde(rename = "error")]
    Error(Refusal),
}

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

/// Checks that a client or an administrator can have this name.
pub fn a_name(name: &str) -> Result<(), Refusal> {
    match join::is_name(name) {
        true => Ok(()),
        false => Err(Refusal::new(
            "usage",
            format!("{name:?} is not a valid name: use a-z, 0-9, `-` and `.`, 64 characters at most"),
        )),
    }
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

/// Creates the refusal for an id that fits no token, or several.
pub fn no_token(id: &str) -> Refusal {
    Refusal::new(
        "no-such-token",
        format!("{id:?} fits no token, or several; `gpuserver token list` lists their ids"),
    )
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

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// Binds the socket, which the owner and the group `gpuserver` may use.
///
/// Replaces a socket that no server listens on any more.
pub fn bind(path: &Path) -> io::Result<UnixListener> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    if std::fs::symlink_metadata(path).is_ok_and(|m| m.file_type().is_socket()) {
        if StdUnixStream::connect(path).is_ok() {
            return Err(io::Error::new(io::ErrorKind::AddrInUse, "another gpuserver listens on this socket"));
        }
        std::fs::remove_file(path)?;
    }
    // The socket is created for its owner alone, and opened to the group afterwards.
    let before = nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_retain(0o177));
    let bound = UnixListener::bind(path);
    nix::sys::stat::umask(before);
    let listener = bound?;
    if let Ok(Some(group)) = nix::unistd::Group::from_name("gpuserver")
        && let Err(e) = nix::unistd::chown(path, None, Some(group.gid))
    {
        debug!("{}: group gpuserver not set: {e}; the socket keeps its group", path.display());
    }
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o660))?;
    Ok(listener)
}

/// Accepts connections until the task is cancelled.
pub async fn serve(listener: UnixListener, pool: Arc<Pool>) {
    loop {
        match listener.accept().await {
            Ok((socket, _)) => {
                let pool = pool.clone();
                tokio::spawn(async move {
                    if let Err(e) = one(socket, &pool).await {
                        debug!("admin.sock: connection closed: {e}");
                    }
                });
            }
            Err(e) => {
                warn!("admin.sock: accept failed: {e}; retrying in 100 ms");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn one(mut socket: UnixStream, pool: &Pool) -> io::Result<()> {
    // A process of another PID namespace has the number 0 here; it is no worker of this server.
    let peer = socket.peer_cred()?.pid().and_then(|pid| u32::try_from(pid).ok()).filter(|pid| *pid > 0);
    let mut prefix = [0; 4];
    timeout(REQUEST_TIMEOUT, socket.read_exact(&mut prefix)).await??;
    let len = u32::from_le_bytes(prefix) as usize;
    let ask = if len > MAX_REQUEST {
        Err(Refusal::new("bad-request", format!("the request is longer than {MAX_REQUEST} bytes")))
    } else {
        let mut body = vec![0; len];
        timeout(REQUEST_TIMEOUT, socket.read_exact(&mut body)).await??;
        parse(&body)
    };
    // Workers run as the server's user, and a client may have taken one over. The check comes
    // after the request: a caller that still waits for its answer has not exited.
    if let Some(pid) = peer.filter(|pid| pool.supervisor().may_be_worker(*pid)) {
        warn!("admin.sock: refused pid {pid}: it is a worker, or has exited");
        return Ok(());
    }
    let stop = match &ask {
        Ok(Ask::Stop { force }) => Some(*force),
        _ => None,
    };
    let bytes = match ask {
        Ok(ask) => written(answer(ask, pool).await),
        Err(refusal) => written(Err(refusal)),
    };
    let told = timeout(REQUEST_TIMEOUT, async {
        socket.write_all(&(bytes.len() as u32).to_le_bytes()).await?;
        socket.write_all(&bytes).await
    })
    .await;
    // After the answer, which a server that stops at once would not send.
    if let Some(force) = stop {
        pool.ask_to_stop(force);
    }
    told?
}

fn parse(body: &[u8]) -> Result<Ask, Refusal> {
    serde_json::from_slice(body)
        .map_err(|e| Refusal::new("bad-request", format!("the server does not support this request: {e}")))
}

fn written(answer: Result<serde_json::Value, Refusal>) -> Vec<u8> {
    let answer = match answer {
        Ok(value) => Answer::Ok(value),
        Err(refusal) => Answer::Error(refusal),
    };
    // JSON and plain texts always serialize.
    serde_json::to_vec(&answer).unwrap_or_default()
}

/// Answers a request that an administrator sent over the network.
pub async fn answer_remote(body: &[u8], pool: &Pool, name: &str, from: &str) -> Vec<u8> {
    let ask = match parse(body) {
        Ok(ask) => ask,
        Err(refusal) => return written(Err(refusal)),
    };
    if let Some(refusal) = ask.local() {
        return written(Err(refusal));
    }
    if ask.changes() {
        info!("administrator {name}: request from {from}: {ask:?}");
    }
    written(answer(ask, pool).await)
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

async fn answer(ask: Ask, pool: &Pool) -> Result<serde_json::Value, Refusal> {
    let internal = |e: &dyn std::fmt::Display| Refusal::new("internal", e.to_string());
    let show = |value: Result<serde_json::Value, serde_json::Error>| value.map_err(|e| internal(&e));
    match ask {
        Ask::Status => {
            let facts = pool.facts();
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
                gpus: pool.registry().gpus().await.len(),
                leases: pool.registry().count().await,
                workers: pool.supervisor().workers().len(),
                programs: pool.supervisor().programs(true),
            }))
        }
        Ask::Ps => show(serde_json::to_value(ps_rows(pool).await)),
        Ask::Threads => {
            let mut rows = ps_rows(pool).await;
            for row in &mut rows {
                row.threads = row.pid.map_or_else(Vec::new, threads::of);
            }
            show(serde_json::to_value(rows))
        }
        Ask::Leases => {
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
                        .map(|d| LeaseDevice {
                            uuid: d.gpu,
                            limit_bytes: d.limit_bytes,
                            sm_percent: d.sm_percent,
                        })
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
        Ask::Gpus => {
            let latest = pool.monitor().readings().borrow().clone();
            let reading = |uuid| latest.as_ref()?.gpu(&uuid_bytes(uuid)?);
            let rows: Vec<_> = pool
                .registry()
                .gpus()
                .await
                .iter()
                .enumerate()
                .map(|(index, g)| GpuRow {
                    index,
                    state: g.state().into(),
                    reason: g.withdrawn.as_ref().map(|w| w.reason().to_string()),
                    context_bytes: g.gpu.context_bytes,
                    uuid: g.gpu.uuid.clone(),
                    name: g.gpu.name.clone(),
                    pci_address: g.gpu.pci_address.clone(),
                    memory_bytes: g.gpu.memory_bytes,
                    leased_bytes: g.used_bytes,
                    used_bytes: reading(&g.gpu.uuid).and_then(|r| r.memory_used_bytes),
                    utilization_percent: reading(&g.gpu.uuid).and_then(|r| r.utilization_percent),
                    compute_capability: format!("{}.{}", g.gpu.compute_major, g.gpu.compute_minor),
                    sharing: g.gpu.sharing,
                    leases: g.leases.clone(),
                })
                .collect();
            show(serde_json::to_value(rows))
        }
        Ask::Clients => {
            let leases = pool.registry().leases().await;
            let rows: Vec<_> = pool
                .clients()
                .into_iter()
                .map(|c| ClientRow {
                    state: match (c.record.revoked, c.alive) {
                        (true, _) => "revoked",
                        (false, true) => "connected",
                        (false, false) => "away",
                    }
                    .into(),
                    leases: leases.iter().filter(|s| s.lease.client == c.name).count(),
                    name: c.name,
                    silent_usec: c.silent.map(micros),
                    joined_unix: c.record.joined_unix,
                    certificate_sha256: c.record.certificate,
                })
                .collect();
            show(serde_json::to_value(rows))
        }
        Ask::Revoke { name } => {
            a_name(&name)?;
            let (known, leases) = pool.revoke(&name).await.map_err(|e| internal(&e))?;
            Ok(serde_json::json!({ "client": name, "known": known, "leases_ended": leases }))
        }
        Ask::Forget { name } => {
            a_name(&name)?;
            let (known, leases) = pool.forget(&name).await.map_err(|e| internal(&e))?;
            Ok(serde_json::json!({ "client": name, "known": known, "leases_ended": leases }))
        }
        Ask::Kill { worker } => match find_worker(pool, &worker) {
            Ok(id) => {
                pool.supervisor().end_worker(&id, None, BY_HAND);
                Ok(serde_json::json!({ "worker": hex(&id) }))
            }
            // The whole lease id only: the text may be the start of an exited worker's id.
            Err(_) if pool.end_lease(&worker, BY_HAND).await => Ok(serde_json::json!({ "lease": worker })),
            Err(no_worker) => {
                Err(Refusal::new("no-such-worker", format!("{no_worker}; no lease has this id, either")))
            }
        },
        Ask::Park { lease } => {
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
        Ask::Unpark { lease } => {
            let lease = find_lease(pool, &lease).await?;
            let (state, place) = pool.unpark(&lease).await;
            Ok(serde_json::json!({ "lease": lease, "state": state, "position": place.position }))
        }
        Ask::Off { gpu, reason } => {
            let uuid = find_gpu(pool, &gpu).await?;
            pool.withdraw(&uuid, Some(Withdrawn::Off(reason))).await;
            gpu_state(pool, &uuid).await
        }
        Ask::On { gpu } => {
            let uuid = find_gpu(pool, &gpu).await?;
            pool.withdraw(&uuid, None).await;
            gpu_state(pool, &uuid).await
        }
        Ask::Drop { gpu } => {
            let uuid = find_gpu(pool, &gpu).await?;
            let leases = pool.registry().leases().await;
            let holders: Vec<_> = leases
                .iter()
                .filter(|s| s.lease.shares.iter().any(|d| d.gpu == uuid))
                .map(|s| format!("{} of {}", s.lease.id, s.lease.client))
                .collect();
            if !holders.is_empty() {
                return Err(Refusal {
                    code: "leased".into(),
                    message: format!("GPU {uuid} is leased: {}", holders.join(", ")),
                    hint: format!(
                        "`gpuserver off {gpu}` stops new leases on it; drop it when these have ended, or end them with `gpuserver kill LEASE`"
                    ),
                });
            }
            pool.withdraw(&uuid, Some(Withdrawn::Stopped("dropped by an administrator".into()))).await;
            gpu_state(pool, &uuid).await
        }
        Ask::Drain { end, reason } => {
            if let Err(e) = pool.registry().drain((!end).then_some(reason)).await {
                let mut refusal = Refusal::new(
                    "not-stored",
                    format!("the change holds only until a restart: it could not be stored: {e}"),
                );
                refusal.hint = "correct the cause and repeat the command".into();
                return Err(refusal);
            }
            let programs = pool.supervisor().programs(true);
            Ok(
                serde_json::json!({ "draining": !end, "programs": programs, "leases": pool.registry().count().await }),
            )
        }
        Ask::Stop { force } => {
            let wait = if force { Duration::ZERO } else { pool.config().drain_timeout };
            show(serde_json::to_value(StopView {
                pid: std::process::id(),
                programs: pool.supervisor().programs(true),
                wait_usec: micros(wait),
            }))
        }
        Ask::Mps => {
            let Some(mps) = pool.supervisor().mps() else {
                let mut refusal = Refusal::new("not-used", "this server does not share GPUs by MPS");
                refusal.hint = "set sharing = \"mps\" or gpu_sharing.mps, and restart it".into();
                return Err(refusal);
            };
            show(serde_json::to_value(mps.views().await))
        }
        Ask::Queue => {
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
        Ask::Limits { client, user } => {
            let rows: Vec<_> = pool
                .limits_of(&client, &user)
                .all()
                .iter()
                .map(|e| LimitRow {
                    limit: e.name.into(),
                    value: e.bound.to_string(),
                    of: e.layer.to_string(),
                    origin: e.origin.clone(),
                    help: LIMITS.iter().find(|l| l.name == e.name).map_or("", |l| l.help).into(),
                })
                .collect();
            show(serde_json::to_value(rows))
        }
        Ask::Accounting { wanted } => {
            let accounting = pool.accounting().clone();
            let records = tokio::task::spawn_blocking(move || accounting.list(&wanted)).await;
            let records = records.map_err(|e| internal(&e))?.map_err(|e| internal(&e))?;
            show(serde_json::to_value(records))
        }
        Ask::Config => show(serde_json::to_value(config_rows(&pool.config()))),
        Ask::ConfigSet { key, value } => {
            let (holds, waits) = pool.set_key(&key, value.as_deref()).await?;
            Ok(serde_json::json!({ "changed": holds, "after_restart": waits }))
        }
        Ask::Reload => {
            let (holds, waits) = pool.read_again().await?;
            Ok(serde_json::json!({ "changed": holds, "after_restart": waits }))
        }
        Ask::TokenCreate { pattern, uses, ttl } => {
            let ttl = token_ttl(&ttl)?;
            let (token, record) = pool.create_token(&pattern, uses, ttl).await.map_err(|e| internal(&e))?;
            show(serde_json::to_value(TokenView::new(&token, record)))
        }
        Ask::AdministratorCreate { name, csr_pem } => {
            a_name(&name)?;
            let made = pool.create_administrator(&name, &csr_pem).await.map_err(|e| internal(&e))?;
            let (certificate_pem, authority_pem) = made.map_err(|e| not_issued(&e))?;
            show(serde_json::to_value(AdministratorView { certificate_pem, authority_pem }))
        }
        Ask::Administrators => show(serde_json::to_value(pool.administrators(administrator_rows))),
        Ask::AdministratorRevoke { name } => {
            a_name(&name)?;
            let known = pool.revoke_administrator(&name).await.map_err(|e| internal(&e))?;
            Ok(serde_json::json!({ "name": name, "known": known }))
        }
        Ask::Tokens => show(serde_json::to_value(pool.tokens(token_rows))),
        Ask::TokenRevoke { id } => {
            let revoked = pool.revoke_token(&id).await.map_err(|e| internal(&e))?;
            let revoked = revoked.ok_or_else(|| no_token(&id))?;
            Ok(serde_json::json!({ "id": revoked }))
        }
    }
}

/// Creates the refusal for a certificate that was not issued.
pub fn not_issued(e: &NotIssued) -> Refusal {
    let code = match e {
        NotIssued::Exists(_) => "exists",
        NotIssued::Authority(_) => "failed",
    };
    Refusal::new(code, e.to_string())
}

/// Reason of a worker's or lease's end.
const BY_HAND: &str = "ended by an administrator";

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

/// Finds a GPU by index, or by at least five characters of its UUID's start.
async fn find_gpu(pool: &Pool, text: &str) -> Result<String, Refusal> {
    let gpus = pool.registry().gpus().await;
    let lower = text.to_lowercase();
    let fits: Vec<&str> = gpus
        .iter()
        .enumerate()
        .filter(|(index, g)| {
            index.to_string() == text || text.len() > 4 && g.gpu.uuid.to_lowercase().starts_with(&lower)
        })
        .map(|(_, g)| g.gpu.uuid.as_str())
        .collect();
    match fits.as_slice() {
        [one] => Ok((*one).to_string()),
        [] => Err(Refusal {
            code: "no-such-gpu".into(),
            message: format!("GPU {text:?} not found"),
            hint: "`gpuserver gpus` lists indices and UUIDs".into(),
        }),
        _ => Err(Refusal::new(
            "no-such-gpu",
            format!("{} GPUs start with {text:?}; write more of it", fits.len()),
        )),
    }
}

async fn gpu_state(pool: &Pool, uuid: &str) -> Result<serde_json::Value, Refusal> {
    let gpus = pool.registry().gpus().await;
    let gpu = gpus.iter().find(|g| g.gpu.uuid == uuid);
    Ok(serde_json::json!({
        "uuid": uuid,
        "state": gpu.map_or("stopped", |g| g.state()),
        "leases": gpu.map(|g| g.leases.clone()).unwrap_or_default(),
    }))
}

/// Parses the lifetime of a token.
pub fn token_ttl(text: &str) -> Result<Duration, Refusal> {
    parse_duration(text).filter(|d| !d.is_zero()).ok_or_else(|| {
        Refusal::new("usage", format!("--ttl {text}: a duration like \"24h\" or \"30min\" is wanted"))
    })
}

/// Sends a request to the server that listens on `path`; for the command line.
pub fn ask(path: &Path, ask: &Ask) -> io::Result<Result<serde_json::Value, Refusal>> {
    let mut socket = StdUnixStream::connect(path)?;
    socket.set_read_timeout(Some(ask.patience()))?;
    socket.set_write_timeout(Some(REQUEST_TIMEOUT))?;
    let body = serde_json::to_vec(ask)?;
    socket.write_all(&(body.len() as u32).to_le_bytes())?;
    socket.write_all(&body)?;
    let mut prefix = [0; 4];
    socket.read_exact(&mut prefix)?;
    let len = u32::from_le_bytes(prefix) as usize;
    if len > MAX_ANSWER {
        return Err(io::Error::other("the server's answer is longer than 64 MiB"));
    }
    let mut body = vec![0; len];
    socket.read_exact(&mut body)?;
    Ok(read(&body)?)
}

/// Parses an answer.
pub fn read(body: &[u8]) -> serde_json::Result<Result<serde_json::Value, Refusal>> {
    Ok(match serde_json::from_slice(body)? {
        Answer::Ok(value) => Ok(value),
        Answer::Error(refusal) => Err(refusal),
    })
}
