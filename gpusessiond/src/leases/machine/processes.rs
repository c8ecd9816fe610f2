//! Processes that use a lease.

use std::time::Duration;

use super::action::Action;
use super::lease::{Phase, Wanted};
use super::state::Machine;
use crate::leases::Change;
use crate::leases::{Slot, Time};

impl Machine {
    /// Records that a process was granted a worker of this lease.
    pub fn process_started(&mut self, slot: Slot) {
        if let Some(wanted) = self.slots.get_mut(&slot) {
            wanted.processes += 1;
        }
    }

    /// Records that a process of an earlier daemon still uses this worker.
    pub fn process_resumed(&mut self, slot: Slot, worker: [u8; 16]) {
        self.process_started(slot);
        if let Some(old) = self.slots.get_mut(&slot).and_then(|w| w.recovery.as_mut()) {
            old.used.push(worker.to_vec());
        }
    }

    /// Finds the slot of a lease that is held, or that an earlier daemon held.
    pub fn slot_of(&self, lease: &str) -> Option<Slot> {
        let has = |w: &Wanted| {
            w.held().is_some_and(|h| h.id == lease) || w.recovery.as_ref().is_some_and(|r| r.id == lease)
        };
        self.slots.iter().find(|(_, w)| has(w)).map(|(slot, _)| *slot)
    }

    /// Records that a process with a worker of this lease has exited.
    ///
    /// The lease's server is notified at once, or as soon as it confirms the lease.
    pub fn process_ended(&mut self, now: Time, slot: Slot, lease: &str, worker: Vec<u8>) {
        let Some(wanted) = self.slots.get_mut(&slot) else { return };
        match (&wanted.phase, &mut wanted.recovery) {
            (Phase::Held(held), _) if held.id == lease => {
                // A process that never got a worker has none to return.
                if !worker.is_empty() {
                    let (server, lease) = (held.server, lease.to_owned());
                    self.actions.push_back(Action::EndWorker { slot, server, lease, worker });
                }
            }
            (_, Some(old)) if old.id == lease => old.ended.push(worker),
            // The lease was lost, and its worker with it.
            _ => return,
        }
        wanted.processes = wanted.processes.saturating_sub(1);
        self.tick(now);
    }

    /// Warns of the end of every lease in use; returns the number of processes that use one.
    pub fn warn(&mut self, left: Duration, reason: &str) -> usize {
        let used: Vec<(Slot, usize)> = self
            .slots
            .iter()
            .filter(|(_, w)| w.processes > 0)
            .map(|(slot, w)| (*slot, w.processes))
            .collect();
        for (slot, _) in &used {
            let reason = reason.to_owned();
            self.tell(Change::PrepareForLoss { slot: *slot, left, reason, idle: false });
        }
        used.iter().map(|(_, processes)| processes).sum()
    }
}
