//! One worker in the supervisor's books: its record for the next server, its phase, and the senders
//! of its orders.

use std::fmt;
use std::net::SocketAddr;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::Duration;

use gpusession_proto::supervise::{ClientProcess, ToWorker, Usage};
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot, watch};
use tracing::warn;

use super::handover::Kept;
use super::quota::Ledger;
use super::stock::WorkerId;
use super::unadmitted::Unadmitted;
use crate::clock::Moment;
use crate::limits::Exceeded;
use crate::mps::Seat;

/// Missing isolation measures that a worker may report, and the bytes of each.
const MAX_LACKING: usize = 8;
const MAX_LACKING_BYTES: usize = 512;
/// Isolation of a worker that has not reported it yet.
pub(super) const LATER: &str = "later";
/// Handed-over sockets that wait for one worker, at most.
const MAX_QUEUED: usize = 64;

/// Phase in the life of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Phase {
    /// Loads the driver.
    Starting,
    /// Ready and in stock.
    Warm,
    /// Assigned to the client; no process admitted yet.
    Taken,
    /// Serves a process.
    Active,
    /// Serves a process whose device memory is parked in host memory.
    Parked,
    /// Was sent a stop request, or exits by itself.
    Ending,
}

impl Phase {
    /// Returns the name of the phase in listings.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Warm => "warm",
            Self::Taken => "taken",
            Self::Active => "active",
            Self::Parked => "parked",
            Self::Ending => "ending",
        }
    }
}

pub(super) enum Command {
    Adopt {
        number: u64,
        socket: std::net::TcpStream,
        preface: Vec<u8>,
        peer: SocketAddr,
    },
    Tell(ToWorker),
    /// Send the queued messages, then leave the worker to the next server.
    Leave,
}

/// State of a worker; the store keeps it for the next server.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct WorkerRecord {
    pub(super) id: WorkerId,
    pub(super) lease: String,
    pub(super) client: String,
    pub(super) gpus: Vec<String>,
    pub(super) phase: Phase,
    pub(super) pid: Option<u32>,
    pub(super) stocked: bool,
    pub(super) given: bool,
    pub(super) encrypted: bool,
    pub(super) process: Option<ClientProcess>,
    pub(super) peer: Option<SocketAddr>,
    /// Lanes that it has admitted, a bit each; they close with the worker.
    pub(super) lanes: u64,
    pub(super) fingerprint: Option<[u8; 32]>,
    pub(super) usage: Usage,
    /// Time of the last usage report, and the GPU time up to it.
    pub(super) used_at: Moment,
    pub(super) busy: Duration,
    pub(super) admitted_unix: u64,
    pub(super) user: String,
    /// When GPU work of the client was last seen.
    pub(super) active: Moment,
    /// Its client has sent it something while it is paused.
    pub(super) wanted: bool,
    /// Its device memory is being parked or unparked.
    pub(super) moving: bool,
    pub(super) isolation: String,
    pub(super) since: Moment,
    pub(super) ended_because: Option<String>,
    /// As [`Ledger::held`] returns it.
    pub(super) held: Vec<([u8; 16], u64, u64)>,
}

pub(super) struct Worker {
    pub(super) book: WorkerRecord,
    /// Place in the store. `None`: the worker exits with this server.
    pub(super) kept: Option<Kept>,
    /// Seat in an MPS domain.
    pub(super) seat: Option<Arc<Seat>>,
    pub(super) pausing: Option<oneshot::Sender<bool>>,
    /// Connections that the worker has not decided on.
    pub(super) unadmitted: Unadmitted,
    /// Whether the worker is isolated; `Some` only if its start shows whether isolation works on
    /// this host.
    ///
    /// A start with a client's own variables may fail because of them. Under MPS a worker loads its
    /// driver later.
    pub(super) trial: Option<bool>,
    /// A process has shown it a ticket, so that it may have contexts on its GPUs.
    pub(super) presented: bool,
    pub(super) orders: Orders,
}

/// Gives access to the worker's book.
impl Deref for Worker {
    type Target = WorkerRecord;

    fn deref(&self) -> &WorkerRecord {
        &self.book
    }
}

impl DerefMut for Worker {
    fn deref_mut(&mut self) -> &mut WorkerRecord {
        &mut self.book
    }
}

/// Logs that a worker's program exceeds a limit. `more` tells how many such lines were left out.
pub(super) fn exceeds(id: &WorkerId, worker: &Worker, exceeded: &Exceeded, more: impl fmt::Display) {
    warn!(
        gpusession_worker = hex(id),
        gpusession_lease = worker.lease,
        gpusession_client = worker.client,
        "worker {}: {exceeded}{more}",
        hex(id)
    );
}

impl WorkerRecord {
    /// Returns the user whose program it serves; empty while unknown.
    ///
    /// A lease of a whole machine belongs to no user, so that its user is known from the first
    /// process on.
    pub(super) fn user(&self) -> &str {
        if self.user.is_empty() { self.process.as_ref().map_or("", |p| &p.user) } else { &self.user }
    }

    /// Returns `true` if the worker may report its isolation now.
    ///
    /// It may do so once, before it serves a program that could forge the report.
    pub(super) fn may_be_contained(&self, lacking: &[String]) -> bool {
        self.isolation == LATER
            && self.process.is_none()
            && lacking.len() <= MAX_LACKING
            && lacking.iter().all(|l| l.len() <= MAX_LACKING_BYTES)
    }

    /// Returns `true` if the worker starts for its lease's stock.
    pub(super) fn starts(&self) -> bool {
        self.phase == Phase::Starting && self.stocked
    }

    /// Returns `true` if the worker serves a program or is about to.
    pub(super) fn serves(&self) -> bool {
        matches!(self.phase, Phase::Taken | Phase::Active | Phase::Parked)
    }

    /// Returns `true` if the worker starts for one program, which waits for it.
    pub(super) fn is_for_one(&self) -> bool {
        matches!(self.phase, Phase::Starting | Phase::Warm) && !self.stocked
    }
}

impl Worker {
    /// Writes the book into the store, for the next server.
    pub(super) fn remember(&mut self, ledger: Option<&Ledger>) {
        if let Some(ledger) = ledger {
            self.book.held = ledger.held(&self.book.id);
        }
        if let Some(kept) = &self.kept {
            kept.write(&self.book);
        }
    }
}

/// Senders of messages to a worker's task.
pub(super) struct Orders {
    /// Connections: bounded, since a client may open too many.
    pub(super) commands: mpsc::Sender<Command>,
    pub(super) tells: mpsc::UnboundedSender<Command>,
    /// Reason for the worker to stop. A channel of its own lets it overtake queued messages.
    pub(super) end: watch::Sender<Option<String>>,
}

/// Receivers of a worker's task.
pub(super) struct Queues {
    pub(super) commands: mpsc::Receiver<Command>,
    pub(super) tells: mpsc::UnboundedReceiver<Command>,
    pub(super) ends: watch::Receiver<Option<String>>,
}

pub(super) fn orders() -> (Orders, Queues) {
    let (commands, command_queue) = mpsc::channel(MAX_QUEUED);
    let (tells, tell_queue) = mpsc::unbounded_channel();
    let (end, ends) = watch::channel(None);
    (Orders { commands, tells, end }, Queues { commands: command_queue, tells: tell_queue, ends })
}

/// Waits until the worker is to stop; returns the reason.
pub(super) async fn told_to_end(ends: &mut watch::Receiver<Option<String>>) -> String {
    let reason = ends.wait_for(Option::is_some).await.ok().and_then(|reason| reason.clone());
    match reason {
        Some(reason) => reason,
        None => std::future::pending().await,
    }
}

/// Formats a worker's id for people.
pub fn hex(id: &WorkerId) -> String {
    data_encoding::HEXLOWER.encode(id)
}
