//! Reasons why a client gets no worker, or a worker no connection.

use std::time::Duration;

use gpusession_proto::preface::Code;

use crate::limits::Exceeded;

/// Time that a call waits for a ready worker.
pub(super) const TAKE_TIMEOUT: Duration = Duration::from_secs(60);

/// Reason why a worker cannot take over a connection.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AdoptError {
    /// No worker with this id serves a client.
    #[error("no such worker: it ended, or its server was restarted")]
    Unknown,
    /// The worker has ended for this reason.
    #[error("the worker has ended: {0}")]
    Ended(String),
    /// The worker is of an earlier server, and this one has not taken it over yet.
    #[error("the server starts; try again")]
    Starting,
    /// The preface's MAC is not of the worker's lease.
    #[error("the preface was not made for this worker")]
    Forged,
    /// An earlier connection had this attempt's number.
    #[error("the preface was used before")]
    Replayed,
    /// The worker's queue of connections is full.
    #[error("the worker has too many connections waiting")]
    Busy,
    /// The lease requires encryption, and the connection has none.
    #[error("this server wants the connection encrypted")]
    Clear,
    /// A limit of the client or the user is reached.
    #[error("{0}")]
    Limit(Exceeded),
}

impl AdoptError {
    /// Returns the kind of refusal that the client gets.
    pub fn code(&self) -> Code {
        match self {
            Self::Unknown | Self::Ended(_) => Code::Gone,
            Self::Starting => Code::Starting,
            Self::Forged | Self::Replayed => Code::Other,
            Self::Busy => Code::Busy,
            Self::Clear => Code::Clear,
            Self::Limit(_) => Code::Limit,
        }
    }
}

/// Reason why a client gets no worker.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TakeError {
    /// The lease ended, or never existed.
    #[error("no such lease")]
    NoLease,
    /// The lease is parked or lent, so it has no GPUs.
    #[error("the server lent the lease's GPUs while it was idle; a new program gets them back")]
    Away,
    /// The lease has its maximum of workers.
    #[error("the lease has {0} workers, the most it may have; end a program that uses the GPU")]
    TooMany(usize),
    /// A limit of the client or the user is reached.
    #[error("{0}")]
    Limit(Exceeded),
    /// The request sets a variable that is not one of the driver's.
    #[error("{0:?} is not a variable of the CUDA driver that a worker can be started with")]
    Environment(String),
    /// The lease's workers fail to start.
    #[error("no worker starts on this server: {0}")]
    NotStarting(String),
    /// The lease's memory has no room for another context; contexts count as memory of the lease.
    #[error(
        "the lease's GPU memory has no room for the context of another program; end one that uses the GPU, or ask for a larger \
         lease"
    )]
    Memory,
    /// The lease's MPS server serves its maximum of contexts.
    #[error("{0}")]
    Mps(String),
    /// No worker became ready in time.
    #[error("no worker got ready within {} s; see the server's journal", TAKE_TIMEOUT.as_secs())]
    TooSlow,
}
