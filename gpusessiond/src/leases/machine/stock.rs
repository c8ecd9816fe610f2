//! Workers in stock: a process takes them, and the machine refills the stock.

use gpusession_proto::control;

use super::action::Action;
use super::lease::{Phase, Wanted};
use super::state::{Machine, STOCK_TARGET};
use crate::leases::Change;
use crate::leases::{Slot, Time};
use crate::pool::{PoolError, Trouble};

/// Most workers that one call asks for.
const MAX_TAKE: usize = 16;

impl Machine {
    /// Takes one worker of each slot for one process, or none if any slot has none ready.
    pub fn take(&mut self, now: Time, slots: &[Slot]) -> Option<Vec<control::Worker>> {
        let ready = |machine: &Self, slot: &Slot| {
            machine.slots.get(slot).and_then(Wanted::held).is_some_and(|held| !held.stock.is_empty())
        };
        let mut complete = !slots.is_empty();
        for slot in slots {
            if !ready(self, slot) {
                complete = false;
                if let Some(Phase::Held(held)) = self.slots.get_mut(slot).map(|w| &mut w.phase) {
                    held.missed += 1;
                    if std::mem::take(&mut held.spare_refused) {
                        held.take_again = now;
                    }
                }
                self.fill(now, *slot);
            }
        }
        if !complete {
            return None;
        }
        let mut workers = Vec::with_capacity(slots.len());
        for slot in slots {
            if let Some(Phase::Held(held)) = self.slots.get_mut(slot).map(|w| &mut w.phase) {
                workers.extend(held.stock.pop_front());
            }
            self.fill(now, *slot);
        }
        Some(workers)
    }

    /// Empties the stocks of an unreachable server: it may have restarted without these workers.
    ///
    /// Returns them as (lease, worker), for the caller to give back.
    pub fn disconnected(&mut self, server: usize) -> Vec<(String, control::Worker)> {
        let mut old = Vec::new();
        for wanted in self.slots.values_mut() {
            if let Phase::Held(held) = &mut wanted.phase
                && held.server == server
            {
                old.extend(held.stock.drain(..).map(|worker| (held.id.clone(), worker)));
            }
        }
        old
    }

    /// Asks a server again at once that is reachable again.
    pub fn reconnected(&mut self, now: Time, server: usize) {
        let mut slots = Vec::new();
        for (slot, wanted) in &mut self.slots {
            if let Phase::Held(held) = &mut wanted.phase
                && held.server == server
            {
                held.take_again = now;
                slots.push(*slot);
            }
        }
        for slot in slots {
            self.fill(now, slot);
        }
        self.servers[server].next = now;
        for release in self.releasing.iter_mut().filter(|r| r.server == server) {
            release.retry = now;
        }
        self.run_releases(now);
        self.retry_waiting(now);
    }

    /// Refills the stock after the server took back a worker: a limit may have room again.
    pub fn worker_freed(&mut self, now: Time, slot: Slot) {
        if let Some(Phase::Held(held)) = self.slots.get_mut(&slot).map(|w| &mut w.phase) {
            held.take_again = now;
        }
        self.fill(now, slot);
    }

    pub(super) fn fill(&mut self, now: Time, slot: Slot) {
        let Some(Phase::Held(held)) = self.slots.get_mut(&slot).map(|w| &mut w.phase) else { return };
        let wanted = (held.missed + STOCK_TARGET).saturating_sub(held.stock.len()).min(MAX_TAKE);
        if wanted == 0 || held.taking || now < held.take_again {
            return;
        }
        held.taking = true;
        held.asked_for = held.missed.min(wanted);
        let action = Action::TakeWorkers {
            slot,
            server: held.server,
            lease: held.id.clone(),
            count: wanted as u32,
            waiting: held.asked_for as u32,
        };
        self.actions.push_back(action);
    }

    /// Takes the answer to [`Action::TakeWorkers`].
    pub fn workers(
        &mut self,
        now: Time,
        slot: Slot,
        lease: &str,
        result: Result<Vec<control::Worker>, PoolError>,
    ) {
        let Some(Phase::Held(held)) = self.slots.get_mut(&slot).map(|w| &mut w.phase) else { return };
        if held.id != lease {
            return;
        }
        held.taking = false;
        // Processes that came while a call on behalf of no process was in flight still wait.
        if held.asked_for > 0 {
            held.missed = 0;
        }
        let limit = |e: &PoolError| matches!(e.trouble, Trouble::LimitExceeded | Trouble::OutOfMemory);
        match result {
            Ok(workers) if !workers.is_empty() => {
                held.missed = 0;
                held.take_attempt = 0;
                held.take_again = now;
                let ended = &held.ended;
                held.stock.extend(workers.into_iter().filter(|worker| !ended.contains(&worker.id)));
                self.slots.entry(slot).and_modify(|w| w.trouble = None);
                self.tell(Change::Stock { slot });
            }
            Ok(_) => {
                held.tried(now, &mut self.rng);
                // The limit's refusal is out of date.
                self.slots.entry(slot).and_modify(|w| w.trouble = w.trouble.take().filter(|e| !limit(e)));
            }
            Err(error) => {
                held.tried(now, &mut self.rng);
                held.spare_refused = limit(&error) && held.asked_for == 0;
                if error.trouble == Trouble::NoSuchLease {
                    // A stopping server denies its leases too, and has them again after its start.
                    let (server, expires) = (held.server, held.expires);
                    self.give_back(now, server, lease.to_owned(), expires);
                    self.lose(now, slot, &error.message);
                } else {
                    self.slots.entry(slot).and_modify(|w| w.trouble = Some(error));
                    self.tell(Change::Stock { slot });
                }
            }
        }
    }
}
