//! The leases of this client: which it wants, which it holds, and who may use them.
//!
//! [`machine`] decides, [`engine`] acts; all other code (D-Bus, grant socket, command line) sees
//! [`Leases`] only.

mod alarm;
pub mod engine;
pub mod machine;
mod process;
mod readings;
mod reported;
mod session;
pub mod sim;
mod snapshot;
mod spec;
mod text;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use gpusession_proto::control;
use gpusession_proto::grant::{Denial, Endpoint};
use gpusession_proto::readings::{Query, View};
use tokio::sync::{mpsc, watch};

pub use process::{Caller, Failure, Granted, Interruption, Waiter, WorkerRequest};
pub use reported::{DeviceView, Reported};
pub use session::Session;
pub use snapshot::{
    Clock, LeaseFacts, LeaseGauges, LeaseView, STOPPED, ServerFacts, ServerGauges, ServerView, Snapshot,
};
pub use spec::{LeaseState, Owner, Slot, Spec, Time};
pub use text::warning;

use crate::pool::PoolError;

impl LeaseState {
    /// Returns the word used on D-Bus.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Active => "active",
            Self::Idle => "idle",
            Self::Parked => "parked",
            Self::Draining => "draining",
            Self::Lost => "lost",
            Self::Released => "released",
        }
    }

    /// Parses a state that a server reports of a lease that it holds.
    pub fn of_server(word: &str) -> Option<Self> {
        match word {
            // The lease's memory or GPU is elsewhere until its next CUDA call.
            "returning" | "lent" => Some(Self::Parked),
            _ => [Self::Active, Self::Idle, Self::Parked, Self::Draining]
                .into_iter()
                .find(|s| s.as_str() == word),
        }
    }
}

/// A change of a lease or a server.
#[derive(Debug, Clone, PartialEq)]
pub enum Change {
    /// The daemon wants a new lease.
    New {
        /// Slot of the lease.
        slot: Slot,
    },
    /// A server granted the lease.
    Granted {
        /// Slot of the lease.
        slot: Slot,
    },
    /// Properties of the lease changed.
    Changed {
        /// Slot of the lease.
        slot: Slot,
    },
    /// The lease's stock of workers changed.
    Stock {
        /// Slot of the lease.
        slot: Slot,
    },
    /// A one-time request was refused; its slot no longer exists.
    Failed {
        /// Slot that the request had.
        slot: Slot,
        /// Refusal, for the caller.
        error: PoolError,
    },
    /// The lease will end, or be parked.
    PrepareForLoss {
        /// Slot of the lease.
        slot: Slot,
        /// Time until then.
        left: Duration,
        /// Reason in one line, for people.
        reason: String,
        /// Its programs are idle: any GPU work of theirs prevents the measure.
        idle: bool,
    },
    /// The server took the lease away, or it expired.
    Lost {
        /// Slot of the lease.
        slot: Slot,
        /// Id that the lease had.
        id: String,
        /// Reason in one line, for people.
        reason: String,
    },
    /// The slot no longer exists.
    Removed {
        /// Slot that the lease had.
        slot: Slot,
        /// Reason in one line, for people.
        reason: String,
        /// Lost, not released.
        lost: bool,
    },
    /// State of a server changed.
    Server {
        /// Index of the server.
        server: usize,
    },
}

/// Changes, and the state after them.
#[derive(Debug, Clone)]
pub struct Update {
    /// In order of occurrence.
    pub changes: Vec<Change>,
    /// State after all changes.
    pub snapshot: Arc<Snapshot>,
}

/// Answer to a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// Workers for the process, and all that were taken for it, usable or not.
    Granted(Vec<Endpoint>, Vec<Granted>),
    /// No worker now: ask again after the next [`Snapshot`], or give up with this denial.
    Wait(Denial, String),
    /// The lease is held, and its server starts a worker or brings lent or parked GPUs back: as
    /// `Wait`, but for longer.
    Later(String),
    /// A program of a user with fewer workers comes first: ask again soon.
    Behind(String),
    /// The process gets no GPU; the text says why and what helps.
    Denied(Denial, String),
}

/// The lease manager's interface to the rest of the daemon.
#[async_trait]
pub trait Leases: Send + Sync {
    /// Subscribes to snapshots; notified at each change, also of the stock of workers.
    fn snapshot(&self) -> watch::Receiver<Arc<Snapshot>>;
    /// Subscribes to all updates from now on, in order; the first one has the current state.
    fn updates(&self) -> mpsc::UnboundedReceiver<Update>;
    /// Asks once for a lease and waits for the answer.
    async fn create(&self, spec: Spec) -> Result<LeaseView, PoolError>;
    /// Wants a lease until it is released.
    async fn want(&self, spec: Spec) -> Slot;
    /// Wants exactly the leases of the configuration; unchanged ones stay as they are.
    async fn configure(&self, leases: Vec<Spec>);
    /// Sets whether leases may have data that is not encrypted, if their server decides so.
    fn allow_clear(&self, allow: bool);
    /// Holds this many GPUs for all users in addition to the configured leases.
    async fn preallocate(&self, count: u32);
    /// Releases a lease; returns `false` if the slot does not exist.
    async fn release(&self, slot: Slot, reason: &str) -> bool;
    /// Renews a lease now, with a new time to live if given; returns the time it has left.
    async fn renew(&self, id: &str, ttl: Option<Duration>) -> Result<Duration, PoolError>;
    /// Grants workers to a process.
    async fn grant(&self, caller: Caller, wish: WorkerRequest) -> Answer;
    /// Reads the GPUs that [`Leases::grant`] would grant, and answers queries about them.
    ///
    /// Waits for no lease.
    async fn readings(
        &self,
        caller: Caller,
        wish: WorkerRequest,
        queries: Vec<Query>,
    ) -> Result<View, (Denial, String)>;
    /// Returns the oldest CUDA version among the servers whose GPUs [`Leases::grant`] would grant.
    ///
    /// Waits for no lease and asks no server.
    async fn cuda_version(&self, caller: Caller, wish: WorkerRequest) -> Result<u32, (Denial, String)>;
    /// Returns the leases that a process of this user gets without naming one.
    async fn default_slots(&self, caller: Caller) -> Vec<Slot>;
    /// Records the state of a process's connection to its worker, `for_time` without one.
    ///
    /// Returns why the worker no longer waits for the process, if that is known.
    async fn interrupted(
        &self,
        granted: Granted,
        interruption: Interruption,
        for_time: Option<Duration>,
    ) -> Option<String>;
    /// Records that the process of these workers exited, or never got its answer.
    fn ended(&self, granted: Vec<Granted>);
    /// Records a process's report on its grant: served, or failed with a reason.
    fn report_outcome(&self, slot: Slot, uid: u32, failure: Option<Failure>);
    /// Resumes a worker that an earlier daemon granted; `None` if its lease no longer exists.
    async fn resume(&self, lease: &str, worker: [u8; 16]) -> Option<Granted>;
    /// Records a login; the user's leases of class `session` are held until the session ends.
    fn session_opened(&self, session: Arc<Session>);
    /// Records the end of a session.
    fn session_closed(&self, id: &str);
    /// Drains a server: its leases are released after `grace`, and asked for elsewhere.
    ///
    /// With `None`, uses the server again. Returns `false` if the server does not exist.
    async fn drain(&self, server: usize, grace: Option<Duration>) -> bool;
    /// Warns of the end of every lease in use; returns the number of processes that use one.
    async fn warn(&self, left: Duration, reason: &str) -> usize;
    /// Parks a lease, or asks its server to unpark it.
    async fn park(&self, slot: Slot, park: bool) -> Result<(), PoolError>;
    /// Sets or clears the owner's hint that a lease is idle.
    async fn idle_hint(&self, slot: Slot, idle: bool) -> Result<(), PoolError>;
    /// Asks a server for its description; returns the round trip and the answer.
    async fn ask(
        &self,
        server: usize,
        usage_uid: Option<u32>,
    ) -> Result<(Duration, control::ServerDescription), PoolError>;
    /// Starts an endpoint of a server for a measurement of the network.
    async fn measure(&self, server: usize, seconds: u32) -> Result<control::MeasureReply, PoolError>;
    /// Releases all leases and waits for the servers' confirmation, at most `limit`.
    async fn shutdown(&self, limit: Duration);
}
