//! The table of leases and waiting requests. It has no I/O, clock or randomness of its own.

mod check;
mod lending;
mod placement;
mod queue;
mod table;
#[cfg(test)]
pub(crate) mod tests;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::time::Duration;

use gpusession_common::units::Memory;
use gpusession_common::words::{OnIdle, Priority, Sharing};
use serde::{Deserialize, Serialize};

use crate::clock::Moment;
use crate::limits::{Effective, Exceeded};

/// Lifetime of a lease without a renewal, if the client requests none.
///
/// A worker waits for a lost client for the same time, so that a cut network ends neither before
/// the other.
pub const DEFAULT_TTL: Duration = Duration::from_secs(60);
const MIB: u64 = 1 << 20;
/// `CU_COMPUTEMODE_EXCLUSIVE_PROCESS`: one process at a time, which can be an MPS server.
pub const EXCLUSIVE_PROCESS: u32 = 3;
/// Time after which a request that was not repeated leaves the queue.
pub const QUEUE_TIMEOUT: Duration = Duration::from_secs(90);
/// The same time for a request that could have its GPUs, so that it keeps them from no other one.
///
/// Clients repeat theirs within 30 s of their last answer. After a slower answer of another server,
/// the client's next request starts at the end of the queue.
pub const TURN_TIMEOUT: Duration = Duration::from_secs(45);

/// A GPU as discovery found it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
    /// `GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx`.
    pub uuid: String,
    /// Product name as the driver reports it.
    pub name: String,
    /// Device memory of the card, in bytes.
    pub memory_bytes: u64,
    /// Major number of the compute capability.
    pub compute_major: u32,
    /// Minor number of the compute capability.
    pub compute_minor: u32,
    /// PCI address as the driver writes it.
    #[serde(default)]
    pub pci_address: String,
    /// Number of multiprocessors.
    #[serde(default)]
    pub multiprocessors: u32,
    /// Device memory of one program's context in bytes, measured when the server starts.
    #[serde(default)]
    pub context_bytes: u64,
    /// `CUcomputemode`; 0 lets several programs use the GPU.
    #[serde(default)]
    pub compute_mode: u32,
    /// Whether kernels reach all memory of their process.
    #[serde(default)]
    pub pageable_access: bool,
    /// Sharing of the GPU by the configuration.
    #[serde(default)]
    pub sharing: Sharing,
    /// Device memory that this server leaves to others, in bytes.
    #[serde(default)]
    pub withheld_bytes: u64,
}

impl Gpu {
    /// Returns the device memory that this server offers, in bytes.
    pub fn offered_bytes(&self) -> u64 {
        self.memory_bytes.saturating_sub(self.withheld_bytes)
    }

    fn by_mps(&self) -> bool {
        self.sharing == Sharing::Mps
    }

    /// Returns `true` if the card takes one MPS server at a time, and no program beside it.
    pub fn one_mps_server(&self) -> bool {
        self.by_mps() && self.compute_mode == EXCLUSIVE_PROCESS
    }

    /// Returns the 16 bytes of the UUID; discovery has checked their number.
    pub fn uuid_bytes(&self) -> Option<[u8; 16]> {
        let hex: Vec<u8> = self.uuid.strip_prefix("GPU-")?.bytes().filter(|b| *b != b'-').collect();
        data_encoding::HEXLOWER_PERMISSIVE.decode(&hex).ok()?.try_into().ok()
    }
}

/// GPUs or parts of GPUs that are kept free for some clients.
#[derive(Debug, Clone, PartialEq)]
pub struct Reserve {
    /// Pattern of these clients' names.
    pub client: String,
    /// Number of reserved GPUs.
    pub gpus: u32,
    /// Reserved memory of each GPU.
    pub memory: Memory,
}

/// Rules by which GPUs are divided.
#[derive(Debug, Clone, PartialEq)]
pub struct Rules {
    /// Reserves for clients.
    pub reserve: Vec<Reserve>,
    /// Memory of a GPU that may be leased, in percent of its size.
    pub overcommit_percent: u64,
    /// Whether leases of all clients have one MPS domain.
    pub shared_domain: bool,
}

impl Default for Rules {
    fn default() -> Self {
        Self { reserve: Vec::new(), overcommit_percent: 100, shared_domain: false }
    }
}

/// Reason why a GPU is withdrawn from leasing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Withdrawn {
    /// An administrator took the GPU out of service.
    Off(String),
    /// The GPU no longer belongs to this server.
    Stopped(String),
    /// The GPU is defective or unusable.
    Broken(String),
}

impl Withdrawn {
    /// Returns the text for people.
    pub fn reason(&self) -> &str {
        match self {
            Self::Off(reason) | Self::Stopped(reason) | Self::Broken(reason) => reason,
        }
    }
}

/// Fault of a GPU that may pass: the GPU then returns to service without an administrator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Passing {
    /// The compute mode lets only one program use the GPU.
    ComputeMode,
    /// NVML reports no values of the GPU.
    Silent,
}

/// Request for a lease.
#[derive(Debug, Clone)]
pub struct Request {
    /// Name of the client, from its certificate.
    pub client: String,
    /// Request id: a repetition returns the first lease; empty: none.
    pub request_id: String,
    /// Number of GPUs; 0: as many as `devices` lists, or one.
    pub gpus: u32,
    /// Memory of each GPU.
    pub memory: Memory,
    /// Part of the product name, in any case; empty: any model.
    pub model: String,
    /// UUIDs of the only acceptable GPUs; empty: any.
    pub devices: Vec<String>,
    /// UUIDs of preferred GPUs, best first.
    pub sticky: Vec<String>,
    /// User on whose behalf the client asks; empty: its own.
    pub user: String,
    /// User id of `user`.
    pub uid: u32,
    /// Lifetime without a renewal; zero: the default.
    pub ttl: Duration,
    /// Requester, for people.
    pub who: String,
    /// Purpose, for people.
    pub why: String,
    /// Boot id of the client.
    pub boot_id: String,
    /// Whether data connections must be encrypted.
    pub encrypted: bool,
    /// Largest share of each GPU's multiprocessors, in percent.
    pub sm_percent: u32,
    /// The same share as a number of multiprocessors; 0: `sm_percent` applies.
    pub sm_count: u32,
    /// Replaces both on GPUs shared by MPS: the share of multiprocessors equals the share of
    /// memory.
    pub sm_auto: bool,
    /// The client does not repeat the request, so it never waits.
    pub once: bool,
    /// Requested sharing; `None`: as the GPUs are shared.
    pub sharing: Option<Sharing>,
    /// Priority in the queue.
    pub priority: Priority,
    /// Renewed without end, like leases from boot.
    pub persistent: bool,
    /// Action on the lease when it is idle.
    pub on_idle: Option<OnIdle>,
    /// Whether the lease is never lent, even without programs.
    pub hold: bool,
    /// Longest idle time before the action; zero: the server's setting.
    pub idle_timeout: Duration,
    /// Position among the client's waiting requests, from 1; 0: by arrival.
    pub order: u32,
    /// Limits of the client and its user.
    pub limits: Effective,
}

impl Request {
    /// Returns the share of a GPU's multiprocessors in percent, rounded up to cover the request.
    fn percent_of(&self, gpu: &Gpu) -> u32 {
        if self.sm_auto {
            let part = u128::from(self.memory.of(gpu.offered_bytes())) * 100;
            let percent = part.div_ceil(u128::from(gpu.memory_bytes.max(1))) as u32;
            return if gpu.by_mps() { percent.clamp(1, 100) } else { 100 };
        }
        match (self.sm_count, gpu.multiprocessors) {
            (0, _) => self.sm_percent,
            (_, 0) => 100,
            (count, all) => count.saturating_mul(100).div_ceil(all).clamp(1, 100),
        }
    }

    /// Returns `true` if the lease's programs share GPUs of mode `mps` by MPS.
    fn by_mps(&self) -> bool {
        matches!(self.sharing, None | Some(Sharing::Mps))
    }

    fn limits_multiprocessors(&self) -> bool {
        self.sm_count != 0 || self.sm_percent < 100
    }

    /// Returns the acceptable kinds of GPUs, best first: shared by MPS, not shared by MPS, or
    /// either.
    ///
    /// All GPUs of a lease are of one kind.
    fn kinds(&self) -> &'static [Option<bool>] {
        match self.sharing {
            Some(Sharing::TimeSlice | Sharing::Exclusive) => &[None],
            Some(Sharing::Mps) => &[Some(true)],
            None if self.limits_multiprocessors() => &[Some(true)],
            None => &[Some(true), Some(false)],
        }
    }
}

/// A lease's part of one GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    /// UUID of the GPU.
    pub gpu: String,
    /// Device memory that the lease may use on the GPU, in bytes.
    pub limit_bytes: u64,
    /// Share of the multiprocessors, in percent.
    pub sm_percent: u32,
}

/// Shares of GPUs, held for a client.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// Random: 12 characters of `a-z2-7`.
    pub id: String,
    /// Name of the client that holds the lease.
    pub client: String,
    /// Request id of the request that created it.
    pub request_id: String,
    /// Key of the tickets for its workers.
    #[serde(with = "hex32")]
    pub ticket_key: [u8; 32],
    /// Fencing token: larger than that of every earlier lease.
    pub fencing_token: u64,
    /// Shares in the order in which the client sees its GPUs.
    pub shares: Vec<Share>,
    /// Lifetime without a renewal.
    pub ttl: Duration,
    /// Boot id of the client.
    pub boot_id: String,
    /// Whether data connections must be encrypted.
    pub encrypted: bool,
    /// User on whose behalf the client holds it; empty: its own.
    pub user: String,
    /// User id of `user`.
    pub uid: u32,
    /// Requester, for people.
    pub who: String,
    /// Purpose, for people.
    pub why: String,
    /// Creation time in seconds since 1970.
    pub created_unix: u64,
    /// Whether it has its GPUs alone.
    #[serde(default)]
    pub exclusive: bool,
    /// Priority in the queue.
    #[serde(default)]
    pub priority: Priority,
    /// Renewed without end, like leases from boot.
    #[serde(default)]
    pub persistent: bool,
    /// End of the lease despite renewals, in seconds since 1970; 0: none.
    #[serde(default)]
    pub until_unix: u64,
    /// Action on the lease when it is idle.
    #[serde(default, with = "on_idle")]
    pub on_idle: Option<OnIdle>,
    /// Whether the lease is never lent, even without programs.
    #[serde(default)]
    pub hold: bool,
    /// Longest idle time before the action; zero: the server's setting.
    #[serde(default)]
    pub idle_timeout: Duration,
    /// Whether its programs share their GPUs by MPS.
    #[serde(default)]
    pub mps: bool,
    /// Whether its client named the GPUs.
    #[serde(default)]
    pub pinned: bool,
    /// Time that its request waited in the queue.
    #[serde(default)]
    pub waited: Duration,
}

// Leaves the key out, to keep it out of logs.
impl std::fmt::Debug for Lease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lease")
            .field("id", &self.id)
            .field("client", &self.client)
            .field("fencing_token", &self.fencing_token)
            .field("shares", &self.shares)
            .finish_non_exhaustive()
    }
}

/// The state file's form of a lease's `on_idle`, in which `unset` is the server's choice.
mod on_idle {
    use gpusession_common::words::OnIdle;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub fn serialize<S: Serializer>(on_idle: &Option<OnIdle>, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(on_idle.map_or("unset", OnIdle::as_str))
    }

    pub fn deserialize<'d, D: Deserializer<'d>>(from: D) -> Result<Option<OnIdle>, D::Error> {
        match String::deserialize(from)?.as_str() {
            "unset" => Ok(None),
            word => word.parse().map(Some).map_err(D::Error::custom),
        }
    }
}

mod hex32 {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub fn serialize<S: Serializer>(key: &[u8; 32], to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&data_encoding::HEXLOWER.encode(key))
    }

    pub fn deserialize<'d, D: Deserializer<'d>>(from: D) -> Result<[u8; 32], D::Error> {
        let text = String::deserialize(from)?;
        data_encoding::HEXLOWER
            .decode(text.as_bytes())
            .ok()
            .and_then(|k| k.try_into().ok())
            .ok_or_else(|| D::Error::custom("a key of 32 bytes in hex"))
    }
}

/// Reason why a request gets no lease.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AllocateError {
    /// The request contradicts itself or is out of range.
    #[error("{0}")]
    Invalid(String),
    /// No GPU of this server could ever satisfy it.
    #[error("{0}")]
    NeverFits(String),
    /// Other leases hold the requested GPUs.
    #[error("{why}")]
    NoCapacity {
        /// Text for people.
        why: String,
        /// Place in the queue, from 1; 0: the request does not wait.
        position: u32,
        /// Length of the queue.
        waiting: u32,
    },
    /// A limit of the client or its user is reached.
    #[error("{0}")]
    Limit(Exceeded),
    /// The lease could not be written to disk.
    #[error("the lease could not be stored: {0}; see the server's journal")]
    Storage(String),
}

/// A request in the queue.
#[derive(Debug, Clone)]
struct Waiting {
    request: Request,
    arrived: u64,
    since: Moment,
    asked: Moment,
}

/// Place of a lease among those that wait for the same GPUs; all 0: it does not wait.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Place {
    /// Place in the queue, from 1.
    pub position: u32,
    /// Length of the queue.
    pub waiting: u32,
}

/// One waiting request in a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WaitingView {
    /// Name of the client.
    pub client: String,
    /// User on whose behalf the client asks; empty: its own.
    pub user: String,
    /// Number of requested GPUs.
    pub gpus: u32,
    /// Priority in the queue.
    pub priority: Priority,
    /// Place in the queue, from 1.
    pub position: u32,
}

#[derive(Debug, Clone)]
struct Held {
    lease: Lease,
    deadline: Moment,
}

impl Held {
    /// Returns `true` if the lease was not renewed in time, or may not live any longer.
    fn over(&self, now: Moment, unix: u64) -> bool {
        self.deadline <= now || self.lease.until_unix != 0 && self.lease.until_unix <= unix
    }
}

/// Part of the table that survives a restart.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Saved<'a> {
    schema: u32,
    fencing_token: u64,
    leases: Vec<Cow<'a, Lease>>,
    /// Lifetime that each lease had left when this was stored; without an entry it is the whole.
    #[serde(default)]
    left: BTreeMap<String, Duration>,
    #[serde(default)]
    aside: Vec<String>,
    #[serde(default)]
    withdrawn: Cow<'a, BTreeMap<String, Withdrawn>>,
    #[serde(default)]
    passing: Cow<'a, BTreeMap<String, Passing>>,
    #[serde(default)]
    draining: Cow<'a, Option<String>>,
}

/// All leases of one server; see the module.
#[derive(Debug, Clone)]
pub struct Table {
    gpus: Vec<Gpu>,
    held: BTreeMap<String, Held>,
    /// Leases that are lent or parked and hold no GPU now.
    ///
    /// The value is the turn of a lease that wants its GPUs back.
    aside: BTreeMap<String, Option<u64>>,
    turns: u64,
    fencing_token: u64,
    withdrawn: BTreeMap<String, Withdrawn>,
    /// Withdrawn GPUs whose fault may pass.
    passing: BTreeMap<String, Passing>,
    waiting: Vec<Waiting>,
    arrivals: u64,
    rules: Rules,
    draining: Option<String>,
    stopping: bool,
}
