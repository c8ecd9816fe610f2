//! One worker in the supervisor's books: its state beside the record, and its orders' senders.

use std::fmt;
use std::net::SocketAddr;
use std::ops::{Deref, DerefMut};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use gpusession_proto::supervise::{MoveFailed, ToWorker};
use gpusession_proto::ticket::Ticket;
use tokio::sync::{mpsc, oneshot, watch};
use tracing::warn;

use super::event::Event;
use super::handover::{Keepable, Kept};
pub use super::record::{Phase, WorkerRecord};
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

pub(super) enum Command {
    Adopt {
        number: u64,
        socket: std::net::TcpStream,
        preface: Vec<u8>,
        peer: SocketAddr,
    },
    Tell(ToWorker),
    /// As `Tell`, with a descriptor in the same packet.
    Give(ToWorker, OwnedFd),
    /// Send the queued messages, then leave the worker to the next server.
    Leave,
}

pub(super) struct Worker {
    pub(super) book: WorkerRecord,
    /// Key of its lease, which the prefaces of its connections show.
    pub(super) lease_key: [u8; 32],
    /// Place in the store. `None`: the worker exits with this server.
    pub(super) kept: Option<Kept>,
    pub(super) changes: Changes,
    /// Descriptors for the store, until a client takes the worker.
    pub(super) keepable: Option<Keepable>,
    /// Seat in an MPS domain.
    pub(super) seat: Option<Arc<Seat>>,
    pub(super) pausing: Option<oneshot::Sender<bool>>,
    /// Awaits the answer to [`ToWorker::MoveOut`] or [`ToWorker::MoveBack`].
    pub(super) relocating: Option<oneshot::Sender<Option<MoveFailed>>>,
    /// Since when its device memory is in host memory.
    pub(super) parked_at: Option<Moment>,
    /// Connections that the worker has not decided on.
    pub(super) unadmitted: Unadmitted,
    /// A process has shown it a ticket, so that it may have contexts on its GPUs.
    pub(super) presented: bool,
    /// The server or the kernel kills it for what its process did.
    pub(super) offends: bool,
    /// The genuine ticket that its process has shown last.
    pub(super) ticket: Option<Ticket>,
    pub(super) orders: Orders,
}

/// Changes of a worker's book.
#[derive(Debug, Default)]
pub(super) struct Changes {
    /// Number of the last state for the record.
    pub(super) number: u64,
    /// Whether the record lacks a change.
    pub(super) unwritten: bool,
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

    /// Returns the event of its program's begin or `end`, if it serves one.
    pub(super) fn program_event(&self, end: Option<&str>) -> Option<Event> {
        let process = self.process.as_ref()?;
        Some(Event::Program {
            client: self.client.clone(),
            lease: self.lease.clone(),
            gpus: self.gpus.clone(),
            worker: self.id,
            user: self.user().into(),
            program: process.program.clone(),
            end: end.map(str::to_owned),
        })
    }

    /// Returns the event of a worker that was killed for what its process did.
    pub(super) fn killed_event(&self, why: &str) -> Event {
        Event::Killed {
            client: self.client.clone(),
            lease: self.lease.clone(),
            gpus: self.gpus.clone(),
            worker: self.id,
            why: why.into(),
        }
    }

    /// Returns the event of a refusal for the audit trail.
    pub(super) fn refusal(&self, kind: &'static str, limit: Option<&'static str>, why: String) -> Event {
        Event::Refused {
            kind,
            client: self.client.clone(),
            lease: self.lease.clone(),
            worker: Some(self.id),
            from: String::new(),
            limit,
            why,
        }
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
    /// Writes the book into the store at once, for the next server.
    ///
    /// It has the memory of the last write by the worker's task (`records.rs`).
    pub(super) fn remember(&mut self) {
        if let Some(kept) = &self.kept {
            self.changes.number += 1;
            kept.record().write(self.changes.number, &self.book);
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
pub(super) async fn stop_request(ends: &mut watch::Receiver<Option<String>>) -> String {
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
