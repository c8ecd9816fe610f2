//! Requests of a program's libraries to the client daemon on the grant socket, and the replies.
//!
//! The libraries are `libcuda.so.1` and `libnvidia-ml.so.1`. A connection carries one request and
//! one reply, framed as in [`crate::message`]. The daemon takes the caller's uid, pid and cgroup
//! from the socket; the content of the request is only a hint.
//!
//! The connection stays open: its end (or the caller's pidfd) shows the daemon that the process has
//! exited. On it the library reports the [`Outcome`] of its workers, which gets no answer; neither
//! side depends on it.

use serde::{Deserialize, Serialize};

use crate::preface::Key;
use crate::readings::{Query, View};

/// Version of this exchange; a daemon answers [`Denial::ProtocolMismatch`] to any other.
pub const VERSION: u16 = 4;

/// A message from `libcuda.so.1` to the daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// [`VERSION`] of the library.
    pub version: u16,
    /// `GPUSESSION_LEASE`, if set.
    pub lease: Option<String>,
    /// `GPUSESSION_ID`, if set.
    pub session: Option<String>,
    /// Name of the program, for listings.
    pub program: String,
    /// File that the program runs, for accounting; see [`crate::ticket::shortened`].
    pub executable: String,
    /// Environment variables of the driver that differ from their defaults (see `names.md`).
    pub environment: Vec<(String, String)>,
    /// Purpose of the request.
    pub want: Want,
}

/// Purpose of a request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Want {
    /// Workers, answered by [`Reply::Granted`].
    Workers,
    /// Facts about the GPUs without using one, answered by [`Reply::Readings`].
    ///
    /// The daemon then closes the connection.
    Readings(Vec<Query>),
    /// CUDA version of the driver that a worker would load: [`Reply::Version`].
    ///
    /// The daemon answers from the facts that it has.
    Version,
    /// Whether a granted worker still waits for the process, whose connection to it broke.
    ///
    /// The answer is [`Reply::Ended`] if the daemon knows that it does not, else
    /// [`Reply::Awaited`].
    Outage(Outage),
}

/// State of a connection to a worker that broke.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outage {
    /// Id of the worker's lease.
    pub lease: String,
    /// Id of the worker.
    pub worker: [u8; 16],
    /// Milliseconds without a connection.
    pub ms: u64,
    /// Number of interruptions of this connection so far, with this one.
    pub number: u32,
    /// Whether the connection has come back.
    pub over: bool,
}

/// A message from the daemon to `libcuda.so.1`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// Workers that serve this process, one for each lease, in device order.
    Granted(Vec<Endpoint>),
    /// GPUs that workers would have, and the answers to the queries.
    Readings(View),
    /// 1000 * major + 10 * minor; the oldest version of several servers.
    Version(u32),
    /// No GPU for this process, with the reason.
    Denied {
        /// Kind of error that libcuda returns to the program.
        denial: Denial,
        /// Reason for a person, in one line.
        reason: String,
    },
    /// The worker may still wait for the process.
    Awaited,
    /// The worker has ended or will end, with the reason.
    Ended(String),
}

/// Address of one worker, and proof for its admission.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Endpoint {
    /// Name of the server in the pool.
    pub server: String,
    /// Data-plane addresses, HOST:PORT, tried in order.
    pub addresses: Vec<String>,
    /// Id of the worker that waits for this process.
    pub worker: [u8; 16],
    /// SHA-256 of the worker's certificate; `None` if the link is trusted and not encrypted.
    pub fingerprint: Option<[u8; 32]>,
    /// Key of the prefaces of this process's connections to the worker.
    pub key: Key,
    /// A sealed [`crate::ticket::Ticket`].
    pub ticket: Vec<u8>,
    /// Id of the lease that the worker belongs to.
    pub lease: String,
    /// Number of GPUs that the worker has.
    pub devices: u32,
}

/// Outcome of granted workers, reported by `libcuda.so.1` to the daemon.
///
/// People see it as the caller's word, which the daemon cannot verify.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    /// All granted workers serve the program.
    Served,
    /// A worker was unreachable or refused, so the program uses none of this grant.
    Unserved {
        /// Id of that worker's lease.
        lease: String,
        /// Reason for a person, in one line.
        reason: String,
        /// Whether the library now requests other workers; otherwise the program gets an error.
        again: bool,
    },
    /// A worker was lost while the program used it.
    Lost {
        /// Id of that worker's lease.
        lease: String,
        /// Reason for a person, in one line.
        reason: String,
    },
}

/// Name of the thread that runs in a program as long as it may use its workers.
///
/// It ends when the process replaces its program by `exec`.
pub const PROGRAM_THREAD: &str = "gpusession-send";

/// Longest encoded [`Outcome`], in bytes, without its length prefix.
pub const MAX_OUTCOME: usize = 4096;
/// Longest reason in an [`Outcome`], in characters.
pub const MAX_REASON: usize = 500;
/// Maximum number of outcomes that a daemon reads from one process.
pub const MAX_OUTCOMES: usize = 16;

/// Reason why a process gets no GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Denial {
    /// Not configured, no access, disabled: `CUDA_ERROR_NO_DEVICE`.
    NoDevice,
    /// Pending, server unreachable, pool full after the wait: `CUDA_ERROR_SYSTEM_NOT_READY`.
    NotReady,
    /// Refused by a limit: `CUDA_ERROR_DEVICE_UNAVAILABLE`.
    Quota,
    /// Library, daemon and server have different versions: `CUDA_ERROR_SYSTEM_DRIVER_MISMATCH`.
    ProtocolMismatch,
    /// Other programs still use the lease's memory after the wait: `CUDA_ERROR_OUT_OF_MEMORY`.
    OutOfMemory,
}

impl Denial {
    /// Returns the `CUresult` of the program's first CUDA call.
    pub fn cuda_error(self) -> i32 {
        match self {
            Self::NoDevice => 100,
            Self::NotReady => 802,
            Self::Quota => 46,
            Self::ProtocolMismatch => 803,
            Self::OutOfMemory => 2,
        }
    }
}
