//! What a program's `libcuda.so.1` or `libnvidia-ml.so.1` asks of the client daemon on the grant socket, and the answer.
//!
//! One request and one reply per connection, framed as in [`crate::message`]. The daemon takes the caller's
//! uid, pid and cgroup from the socket; what the request says is only a hint. The connection stays open: its end
//! (or the caller's pidfd) tells the daemon that the process has ended. On it the library says what became of its
//! workers ([`Outcome`]); nobody answers that, and neither side needs it.

use serde::{Deserialize, Serialize};

use crate::readings::{Query, View};

/// Version of this exchange; a daemon that does not know it answers [`Denial::ProtocolMismatch`].
pub const VERSION: u16 = 3;

/// From `libcuda.so.1` to the daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// [`VERSION`] of the library.
    pub version: u16,
    /// `GPUSESSION_LEASE`, if set.
    pub lease: Option<String>,
    /// `GPUSESSION_ID`, if set.
    pub session: Option<String>,
    /// The program's name, for listings.
    pub program: String,
    /// The file that it runs, for accounting; see [`crate::ticket::shortened`].
    pub executable: String,
    /// Environment variables of the driver that differ from their defaults (see `names.md`).
    pub environment: Vec<(String, String)>,
    /// What it wants.
    pub want: Want,
}

/// What a request is for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Want {
    /// Workers: [`Reply::Granted`].
    Workers,
    /// To know about the GPUs, without using one: [`Reply::Readings`], after which the daemon closes the connection.
    Readings(Vec<Query>),
    /// To know the CUDA version of the driver that a worker would load: [`Reply::Version`], from what the daemon has.
    Version,
}

/// From the daemon to `libcuda.so.1`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// The workers that serve this process, one for each lease, in device order.
    Granted(Vec<Endpoint>),
    /// The GPUs that workers would have, and the answers.
    Readings(View),
    /// 1000 * major + 10 * minor; the oldest where there are several servers.
    Version(u32),
    /// No GPU for this process, and why.
    Denied {
        /// What libcuda tells the program.
        denial: Denial,
        /// One line for a person.
        reason: String,
    },
}

/// Where one worker is and how to be admitted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Endpoint {
    /// Server's name in the pool.
    pub server: String,
    /// Data-plane addresses, HOST:PORT, tried in order.
    pub addresses: Vec<String>,
    /// The worker that waits for this process.
    pub worker: [u8; 16],
    /// SHA-256 of the worker's certificate; `None` where the link is declared trusted and not encrypted.
    pub fingerprint: Option<[u8; 32]>,
    /// A sealed [`crate::ticket::Ticket`].
    pub ticket: Vec<u8>,
    /// Lease the worker belongs to.
    pub lease: String,
    /// GPUs that the worker has.
    pub devices: u32,
}

/// What became of granted workers, from `libcuda.so.1` to the daemon: what people see of it is the caller's word only.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    /// All of them serve the program.
    Served,
    /// One of them could not be reached, or said no: the program uses none of this grant.
    Unserved {
        /// Its lease.
        lease: String,
        /// One line for a person.
        reason: String,
        /// The library asks for others now; else the program hears of it.
        again: bool,
    },
    /// One of them is gone while the program used it.
    Lost {
        /// Its lease.
        lease: String,
        /// One line for a person.
        reason: String,
    },
}

/// Longest encoded [`Outcome`], in bytes, without its length prefix.
pub const MAX_OUTCOME: usize = 4096;
/// Longest reason in an [`Outcome`], in characters.
pub const MAX_REASON: usize = 500;
/// Most of them that a daemon reads of one process.
pub const MAX_OUTCOMES: usize = 16;

/// Why a process gets no GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Denial {
    /// Not configured, no access, disabled: `CUDA_ERROR_NO_DEVICE`.
    NoDevice,
    /// Pending, server unreachable, pool full after the wait: `CUDA_ERROR_SYSTEM_NOT_READY`.
    NotReady,
    /// A limit refuses: `CUDA_ERROR_DEVICE_UNAVAILABLE`.
    Quota,
    /// Library, daemon and server disagree: `CUDA_ERROR_SYSTEM_DRIVER_MISMATCH`.
    ProtocolMismatch,
    /// Other programs have the lease's memory, after the wait: `CUDA_ERROR_OUT_OF_MEMORY`.
    OutOfMemory,
}

impl Denial {
    /// The `CUresult` that the program's first CUDA call returns.
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
