//! A server of the pool as the lease manager sees it; [`crate::client`] speaks to real ones, tests have a simulated one.

use std::collections::HashMap;

use async_trait::async_trait;
use gpusession_proto::control;
use tokio::sync::mpsc;

/// What kind of trouble a call to the pool had; each has its own D-Bus error, exit code and CUDA error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Trouble {
    /// Every GPU that fits is taken.
    NoCapacity,
    /// A limit of this client or user refuses.
    Quota,
    /// Other programs of the lease have its memory.
    OutOfMemory,
    /// No GPU of the server would ever do.
    NeverFits,
    /// No server is known yet.
    NotReady,
    /// No answer.
    Unreachable,
    /// The server does not take this client: no valid identity, revoked, or not entitled.
    Refused,
    /// Both ends do not speak the same protocol.
    Protocol,
    /// The request makes no sense to the server.
    Invalid,
    /// The lease is not there.
    NoSuchLease,
}

impl Trouble {
    /// The word that `gpusession status --json` uses.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NoCapacity => "no-capacity",
            Self::Quota => "limit",
            Self::OutOfMemory => "out-of-memory",
            Self::NeverFits => "never-fits",
            Self::NotReady => "not-ready",
            Self::Unreachable => "unreachable",
            Self::Refused => "not-accepted",
            Self::Protocol => "protocol",
            Self::Invalid => "invalid",
            Self::NoSuchLease => "no-such-lease",
        }
    }

    /// Whether the same call may succeed later without anybody changing anything.
    pub fn may_pass(self) -> bool {
        matches!(self, Self::NoCapacity | Self::NotReady | Self::Unreachable)
    }
}

/// A call to the pool failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct PoolError {
    /// What kind of trouble.
    pub trouble: Trouble,
    /// One line for a person, naming the server.
    pub message: String,
    /// Place in the queue of those who wait for the same, from 1, and its length, where the server keeps one.
    pub place: Option<(u32, u32)>,
}

impl PoolError {
    /// An error with its words.
    pub fn new(trouble: Trouble, message: impl Into<String>) -> Self {
        Self { trouble, message: message.into(), place: None }
    }

    /// Place and length of a queue as servers send them; none where the place is 0.
    pub fn place_of(position: u32, waiting: u32) -> Option<(u32, u32)> {
        (position > 0).then_some((position, waiting.max(position)))
    }

    /// The message, with the place in the queue if there is one.
    pub fn waiting(&self) -> String {
        match self.place {
            Some((position, length)) => format!("position {position} of {length}: {}", self.message),
            None => self.message.clone(),
        }
    }
}

/// One GPU server. Calls end within a bounded time; a lost connection is made anew by the next call.
#[async_trait]
pub trait PoolServer: Send + Sync {
    /// HOST:PORT of the control plane, or another name for messages.
    fn address(&self) -> &str;
    /// All or nothing; repeated with the same `request_id` it returns the same lease.
    async fn allocate(&self, request: control::AllocateRequest) -> Result<control::Lease, PoolError>;
    /// Extends leases and says that this client is alive.
    async fn renew(&self, leases: Vec<String>, boot_id: String) -> Result<control::RenewReply, PoolError>;
    /// Gives a lease back. Releasing an unknown one succeeds.
    async fn release(&self, lease: String) -> Result<(), PoolError>;
    /// Takes a request that waits out of the server's queue.
    async fn withdraw(&self, request_id: String) -> Result<(), PoolError>;
    /// Takes workers for processes of a lease, `waiting` of which wait now: a lease whose GPUs were parked or lent gets them
    /// back for those only.
    async fn take_workers(
        &self,
        lease: String,
        count: u32,
        waiting: u32,
        environment: HashMap<String, String>,
    ) -> Result<Vec<control::Worker>, PoolError>;
    /// The process that was granted `worker` has ended.
    async fn process_ended(&self, lease: String, worker: Vec<u8>) -> Result<(), PoolError>;
    /// Moves a lease's device memory to the server's host memory, or asks for it back.
    async fn park(&self, lease: String, park: bool) -> Result<(), PoolError>;
    /// The lease's owner calls it idle from now on, or no longer.
    async fn idle_hint(&self, lease: String, idle: bool) -> Result<(), PoolError>;
    /// What the server's NVML says of a lease's GPUs.
    async fn readings(&self, request: control::ReadingsRequest) -> Result<control::ReadingsReply, PoolError>;
    /// The server and its GPUs.
    async fn describe(&self) -> Result<control::ServerDescription, PoolError>;
    /// Passes on what happens to this client's leases until the connection ends.
    async fn watch(&self, boot_id: String, events: mpsc::Sender<control::PoolEvent>)
    -> Result<(), PoolError>;
}
