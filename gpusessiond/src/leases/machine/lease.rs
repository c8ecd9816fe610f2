//! A wanted lease and its phase, a held lease and its stock, a server's health.

use std::collections::VecDeque;
use std::time::Duration;

use gpusession_common::words::Class;
use gpusession_proto::control;
use serde::{Deserialize, Serialize};

use super::backoff::backoff;
use crate::leases::{LeaseState, Reported, Slot, Spec, Time};
use crate::pool::{PoolError, Trouble};

/// Longest pause between tries to fill a lease's stock: programs wait for its workers.
const BACKOFF_TAKE_MAX: Duration = Duration::from_secs(2);

/// A lease that a server holds for this client.
#[derive(Debug, Clone)]
pub struct Held {
    /// Id from the server.
    pub id: String,
    /// Seals tickets for its workers.
    pub ticket_key: Vec<u8>,
    /// HOST:PORT of the server's data plane.
    pub data_addresses: Vec<String>,
    /// Facts that its server reports, and observers learn.
    pub reported: Reported,
    /// Free memory of each of its GPUs, in bytes, which changes all the time.
    pub memory_free_bytes: Vec<u64>,
    /// Index of the server.
    pub server: usize,
    /// Active, idle, parked or draining.
    pub state: LeaseState,
    /// Whether its memory is on the way to the server's host memory, by the latest heartbeat.
    pub parking: bool,
    /// Place in the queue, from 1, and the queue's length, of a parked lease whose programs need
    /// its GPUs.
    pub place: Option<(u32, u32)>,
    /// When the server allocated it.
    pub since: Time,
    /// When it expires unless it is renewed.
    pub expires: Time,
    /// Workers ready to be granted.
    pub stock: VecDeque<control::Worker>,
    /// Since when no program uses it, according to the server.
    pub idle_since: Option<Time>,
    /// Whether the owner was warned that the time to live ends.
    pub(super) warned: bool,
    pub(super) taking: bool,
    pub(super) take_again: Time,
    pub(super) take_attempt: u32,
    /// Processes that found the stock empty since it was last filled.
    pub(super) missed: usize,
    /// The number of those processes at the start of the latest call for workers.
    pub(super) asked_for: usize,
    /// A call on behalf of no process was refused, so the next process asks at once.
    pub(super) spare_refused: bool,
    /// Exited workers, the latest last.
    pub(super) ended: VecDeque<Vec<u8>>,
}

impl Held {
    /// Records a call that brought no worker.
    ///
    /// Processes that came after the call began do not wait for the backoff.
    pub(super) fn tried(&mut self, now: Time, rng: &mut fastrand::Rng) {
        self.take_attempt += 1;
        let pause = backoff(rng, self.take_attempt).min(BACKOFF_TAKE_MAX);
        self.take_again = if self.missed > 0 && self.asked_for == 0 { now } else { now + pause };
    }

    /// Updates the free memory of its GPUs, if a server has reported on as many as it has.
    pub(super) fn set_memory_free(&mut self, devices: &[control::Device]) {
        if devices.len() == self.memory_free_bytes.len() {
            self.memory_free_bytes = memory_free(devices);
        }
    }

    /// Returns why the lease waits for its GPUs, if it does.
    pub fn waits(&self) -> Option<PoolError> {
        let place = Some(self.place?);
        Some(PoolError { place, ..PoolError::new(Trouble::NoCapacity, "other leases have its GPUs now") })
    }
}

/// Returns the free memory of each GPU.
pub(super) fn memory_free(devices: &[control::Device]) -> Vec<u64> {
    devices.iter().map(|device| device.memory_free_bytes).collect()
}

/// A lease that is released, or a request that is withdrawn, which its server has not confirmed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SavedRelease {
    /// Name of the server that holds it.
    pub server: String,
    /// Id of the lease or of the request.
    pub id: String,
    /// Whether it is a request, which may have a lease whose reply no daemon has read.
    #[serde(default)]
    pub waits: bool,
    /// When the lease has expired.
    pub until: Time,
}

/// Phase of a slot.
#[derive(Debug, Clone)]
pub enum Phase {
    /// No request is in flight.
    Waiting {
        /// When the next try is due.
        retry: Time,
    },
    /// A request is in flight.
    Allocating,
    /// A server holds the lease for this client.
    Held(Box<Held>),
}

/// A lease that this client wants.
#[derive(Debug, Clone)]
pub struct Wanted {
    /// Description, which outlives single leases.
    pub spec: Spec,
    /// Progress of the present try.
    pub phase: Phase,
    /// Why the last try failed.
    pub trouble: Option<PoolError>,
    /// When it was first wanted.
    pub since: Time,
    /// Number of processes that use it.
    pub processes: usize,
    pub(super) attempt: u32,
    /// Until when it defers to leases listed before it.
    pub(super) turn: Option<Time>,
    /// UUIDs of the GPUs that its predecessor had.
    pub(super) sticky: Vec<String>,
    pub(super) last_server: Option<usize>,
    /// Servers that may have its request.
    pub(super) asked: Asked,
    pub(super) recovery: Option<Recovery>,
    /// Since when a lease of class `user` has neither a session nor a process.
    pub(super) unused: Option<Time>,
}

/// A lease that an earlier daemon held.
#[derive(Debug, Clone)]
pub(super) struct Recovery {
    pub(super) id: String,
    pub(super) server: String,
    pub(super) until: Time,
    /// When a lease with a time to live expires.
    pub(super) expires: Time,
    /// Workers whose process exited before the server confirmed the lease.
    pub(super) ended: Vec<Vec<u8>>,
    /// Workers of the processes that ran at the start.
    pub(super) used: Vec<Vec<u8>>,
}

/// Indices of the servers that may have a request: in their queues, or as a lease whose reply was
/// lost.
#[derive(Debug, Clone, Default)]
pub(super) struct Asked {
    /// Servers of tries that failed.
    before: Vec<usize>,
    /// Servers of the present try, in their order.
    now: Vec<usize>,
    /// When the present try began.
    pub(super) since: Time,
}

impl Asked {
    /// Begins a try that asks these servers one after the other.
    pub(super) fn begin(&mut self, now: Time, servers: &[usize]) {
        self.since = now;
        for server in std::mem::replace(&mut self.now, servers.to_vec()) {
            if !self.before.contains(&server) {
                self.before.push(server);
            }
        }
    }

    /// Returns the servers that may still have the request; `granted` has made the lease.
    pub(super) fn pending(mut self, granted: Option<usize>) -> Vec<usize> {
        let now = std::mem::take(&mut self.now);
        self.begin(self.since, &[]);
        let mut pending = self.before;
        for server in now.into_iter().take_while(|server| granted != Some(*server)) {
            if !pending.contains(&server) {
                pending.push(server);
            }
        }
        pending.retain(|server| granted != Some(*server));
        pending
    }
}

impl Wanted {
    /// Returns when the owner of a requested time to live is warned of its end.
    ///
    /// That is ten minutes before the end, or a quarter of the time to live if that is less.
    pub(super) fn warns_at(&self) -> Option<Time> {
        let held = self.held().filter(|h| !h.warned && !self.spec.renewed_by_itself())?;
        let before = Duration::from_secs(600).min(self.spec.ttl.unwrap_or_default() / 4);
        Some(held.expires.saturating_sub(before))
    }

    /// Returns the name for messages and for D-Bus: the lease's id, or the wish's while it waits.
    pub fn shown_id(&self, slot: Slot) -> String {
        match (self.held(), self.spec.class) {
            (Some(held), _) => held.id.clone(),
            _ if self.spec.name.is_empty() => format!("request{slot}"),
            (None, Class::Boot | Class::Background) => self.spec.name.clone(),
            // Several sessions or users may each have a lease of this name.
            (None, Class::Session | Class::User) => format!("{}-{slot}", self.spec.name),
        }
    }

    /// Returns the lease while a server holds it.
    pub fn held(&self) -> Option<&Held> {
        match &self.phase {
            Phase::Held(held) => Some(held),
            _ => None,
        }
    }
}

/// Health of a server, as its answers show it.
#[derive(Debug, Clone, Default)]
pub struct Health {
    /// When it last answered.
    pub answered: Option<Time>,
    /// When the daemon first sent it a heartbeat: silence counts from then on until the first
    /// answer.
    pub asked: Option<Time>,
    /// Why the last call failed; `None` after a success.
    pub trouble: Option<PoolError>,
    /// GPUs that were free at its last description.
    pub(super) free: u32,
    pub(super) in_flight: bool,
    pub(super) next: Time,
    /// When this client releases its leases there; `Some` excludes it from new requests.
    pub(super) drained: Option<Time>,
    /// Whether the list of servers no longer names it.
    pub(super) removed: bool,
}
