//! Interface of a GPU server to the lease manager.
//!
//! [`crate::client`] implements it over the network, tests by a simulation.

use std::collections::HashMap;

use async_trait::async_trait;
use gpusession_proto::control;
use tokio::sync::mpsc;

/// Kind of failure of a call to the pool; each maps to a D-Bus error, an exit code and a CUDA
/// error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Trouble {
    /// Every suitable GPU is taken.
    NoCapacity,
    /// A limit of this client or user is reached.
    LimitExceeded,
    /// Other programs of the lease use its memory.
    OutOfMemory,
    /// No GPU of the server is suitable, even when free.
    NeverFits,
    /// No server is known yet.
    NotReady,
    /// The server did not answer.
    Unreachable,
    /// The server does not accept this client: no valid identity, revoked, or not entitled.
    Refused,
    /// The server would send this client's data unencrypted, which the client does not allow.
    Clear,
    /// Client and server have different protocol versions.
    Protocol,
    /// The server considers the request invalid.
    Invalid,
    /// The server does not know the lease.
    NoSuchLease,
}

impl Trouble {
    /// Returns the word that `gpusession status --json` uses.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NoCapacity => "no-capacity",
            Self::LimitExceeded => "limit",
            Self::OutOfMemory => "out-of-memory",
            Self::NeverFits => "never-fits",
            Self::NotReady => "not-ready",
            Self::Unreachable => "unreachable",
            Self::Refused => "not-accepted",
            Self::Clear => "not-encrypted",
            Self::Protocol => "protocol",
            Self::Invalid => "invalid",
            Self::NoSuchLease => "no-such-lease",
        }
    }

    /// Returns `true` if the same call may succeed later without any change of settings.
    pub fn may_pass(self) -> bool {
        matches!(self, Self::NoCapacity | Self::NotReady | Self::Unreachable)
    }
}

/// Failure of a call to the pool.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct PoolError {
    /// Kind, which decides whether a retry helps.
    pub trouble: Trouble,
    /// One line for users, naming the server.
    pub message: String,
    /// Place in the server's queue, from 1, and the queue's length, if the request is queued.
    pub place: Option<(u32, u32)>,
}

impl PoolError {
    /// Creates an error without a place in a queue.
    ///
    /// The message may hold a server's text, which gets neither lines nor control characters.
    pub fn new(trouble: Trouble, message: impl Into<String>) -> Self {
        let message = message.into().replace(char::is_control, " ");
        Self { trouble, message, place: None }
    }

    /// Converts place and length of a queue as servers send them; `None` if the place is 0.
    pub fn place_of(position: u32, waiting: u32) -> Option<(u32, u32)> {
        (position > 0).then_some((position, waiting.max(position)))
    }

    /// Returns the message, preceded by the place in the queue if there is one.
    pub fn waiting(&self) -> String {
        match self.place {
            Some((position, length)) => format!("position {position} of {length}: {}", self.message),
            None => self.message.clone(),
        }
    }
}

/// Returns the reason why a lease without encryption is not used, and the remedy.
pub fn unencrypted(server: &str) -> String {
    format!(
        "server {server} would send this client's data unencrypted; `[transport] encryption = \"server\"` in \
         gpusession.toml allows it, and with --server the option --allow-clear"
    )
}

/// One GPU server.
///
/// Calls end within a bounded time. A call after a lost connection connects again.
#[async_trait]
pub trait PoolServer: Send + Sync {
    /// HOST:PORT of the control plane, or another name for messages.
    fn address(&self) -> &str;
    /// Allocates all requested GPUs or none; returns the same lease for the same `request_id`.
    async fn allocate(&self, request: control::AllocateRequest) -> Result<control::Lease, PoolError>;
    /// Renews leases and reports that this client is alive.
    async fn renew(&self, leases: Vec<String>, boot_id: String) -> Result<control::RenewReply, PoolError>;
    /// Releases a lease; succeeds for an unknown one.
    async fn release(&self, lease: String) -> Result<(), PoolError>;
    /// Withdraws a request: from the server's queue, or with the lease that it has made.
    async fn withdraw(&self, request_id: String) -> Result<(), PoolError>;
    /// Takes workers for processes of a lease, `waiting` of which wait now.
    ///
    /// A server gives parked or lent GPUs back for waiting processes only.
    async fn take_workers(
        &self,
        lease: String,
        count: u32,
        waiting: u32,
        environment: HashMap<String, String>,
    ) -> Result<Vec<control::Worker>, PoolError>;
    /// Reports that the process that was granted `worker` has exited.
    async fn process_ended(&self, lease: String, worker: Vec<u8>) -> Result<(), PoolError>;
    /// Parks a lease, or asks for it to be unparked.
    async fn park(&self, lease: String, park: bool) -> Result<(), PoolError>;
    /// Sets or clears the owner's hint that a lease is idle.
    async fn idle_hint(&self, lease: String, idle: bool) -> Result<(), PoolError>;
    /// Reads NVML values of a lease's GPUs.
    async fn readings(&self, request: control::ReadingsRequest) -> Result<control::ReadingsReply, PoolError>;
    /// Starts an endpoint for a measurement of the network.
    async fn measure(&self, seconds: u32) -> Result<control::MeasureReply, PoolError>;
    /// Describes the server and its GPUs, with the use of them by a user if one is given.
    async fn describe(&self, usage_uid: Option<u32>) -> Result<control::ServerDescription, PoolError>;
    /// Forwards events about this client's leases until the connection ends.
    async fn watch(&self, boot_id: String, events: mpsc::Sender<control::PoolEvent>)
    -> Result<(), PoolError>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_servers_refusal_is_one_plain_line() {
        let error = PoolError::new(Trouble::Invalid, "no\u{1b}]0;title\u{7}\nroot@gpu1:~# \u{9b}2J");
        assert_eq!(error.message, "no ]0;title  root@gpu1:~#  2J");
    }
}
