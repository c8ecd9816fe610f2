//! Heartbeats, events of the servers, and leases that are lost.

use std::time::Duration;

use gpusession_proto::control;

use super::backoff::BACKOFF_MIN;
use super::lease::{Phase, Wanted};
use super::state::{HEARTBEAT_INTERVAL, IDLE_HEARTBEAT_INTERVAL, Machine};
use crate::leases::{Change, LeaseState};
use crate::leases::{Slot, Time};
use crate::pool::PoolError;

/// Reason of a lease's end that its server does not name.
pub(super) const FORGOTTEN: &str = "its server no longer knows it";
/// Exited workers that are remembered, in case the reply that brings them is still in flight.
const ENDED_MAX: usize = 64;

impl Machine {
    /// Takes the answer to [`super::Action::Renew`].
    pub fn renewed(
        &mut self,
        now: Time,
        server: usize,
        asked: &[String],
        result: Result<Vec<control::RenewedLease>, PoolError>,
    ) {
        let busy = self.slots.values().any(|w| w.held().is_some_and(|h| h.server == server));
        let health = &mut self.servers[server];
        health.in_flight = false;
        let before = health.trouble.is_some();
        match result {
            Ok(leases) => {
                health.answered = Some(now);
                health.trouble = None;
                health.next = now + if busy { HEARTBEAT_INTERVAL } else { IDLE_HEARTBEAT_INTERVAL };
                if before {
                    self.tell(Change::Server { server });
                }
                for renewed in leases.into_iter().filter(|l| asked.contains(&l.id)) {
                    self.one_renewed(now, server, renewed);
                }
            }
            Err(error) => {
                health.trouble = Some(error);
                // A server that holds leases is asked at the heartbeat's pace; jitter spreads a
                // fleet.
                let pace = if busy { HEARTBEAT_INTERVAL } else { IDLE_HEARTBEAT_INTERVAL };
                health.next = now + pace + pace.mul_f64(self.rng.f64() / 4.0);
                self.tell(Change::Server { server });
            }
        }
    }

    fn one_renewed(&mut self, now: Time, server: usize, renewed: control::RenewedLease) {
        let found = self.slots.iter_mut().find_map(|(slot, wanted)| match &mut wanted.phase {
            Phase::Held(held) if held.server == server && held.id == renewed.id => {
                Some((*slot, wanted.spec.ttl.filter(|_| wanted.spec.once), held))
            }
            _ => None,
        });
        let Some((slot, ttl, held)) = found else { return };
        if renewed.lost {
            let reason = if renewed.reason.is_empty() { FORGOTTEN } else { &renewed.reason };
            self.lose(now, slot, reason);
            return;
        }
        if renewed.ttl_usec > 0 {
            let longest = ttl.unwrap_or(Duration::MAX);
            let expires = now + Duration::from_micros(renewed.ttl_usec).min(longest);
            held.warned &= expires <= held.expires;
            held.expires = expires;
        }
        held.parking = renewed.state == "parking";
        held.set_memory_free(&renewed.devices);
        let news = held.reported.renew(&renewed);
        if let Some(state) = LeaseState::of_server(&renewed.state) {
            self.set_state(now, slot, state, PoolError::place_of(renewed.position, renewed.waiting));
        }
        if news {
            self.tell(Change::Changed { slot });
        }
    }

    /// Sets the time to live that the next renewal of a lease asks for.
    pub fn set_ttl(&mut self, slot: Slot, ttl: Duration) {
        if let Some(wanted) = self.slots.get_mut(&slot).filter(|w| w.spec.once && w.spec.ttl.is_some()) {
            wanted.spec.ttl = Some(ttl);
        }
    }

    pub(super) fn set_state(&mut self, now: Time, slot: Slot, state: LeaseState, place: Option<(u32, u32)>) {
        let Some(Phase::Held(held)) = self.slots.get_mut(&slot).map(|w| &mut w.phase) else { return };
        if (held.state, held.place) == (state, place) {
            return;
        }
        (held.state, held.place) = (state, place);
        held.idle_since = match state {
            LeaseState::Idle | LeaseState::Parked => held.idle_since.or(Some(now)),
            _ => None,
        };
        self.tell(Change::Changed { slot });
    }

    /// Takes an event that a server sent about a lease.
    pub fn event(&mut self, now: Time, server: usize, event: control::PoolEvent) {
        use control::pool_event::Event;
        let Some(slot) = self.slots.iter().find_map(|(slot, wanted)| {
            wanted.held().filter(|h| h.server == server && h.id == event.lease).map(|_| *slot)
        }) else {
            return;
        };
        match event.event {
            Some(Event::PrepareForLoss(warning)) => self.tell(Change::PrepareForLoss {
                slot,
                left: Duration::from_micros(warning.left_usec),
                reason: warning.reason,
                idle: warning.idle,
            }),
            Some(Event::Lost(loss)) => self.lose(now, slot, &loss.reason),
            Some(Event::State(change)) => {
                if let Some(state) = LeaseState::of_server(&change.state) {
                    self.set_state(now, slot, state, PoolError::place_of(change.position, change.waiting));
                }
                if let Some(Phase::Held(held)) = self.slots.get_mut(&slot).map(|w| &mut w.phase) {
                    held.set_memory_free(&change.devices);
                    if held.reported.set_devices(&change.devices, change.fencing_token) {
                        self.tell(Change::Changed { slot });
                    }
                }
            }
            Some(Event::WorkersReady(ready)) => {
                if let Some(Phase::Held(held)) = self.slots.get_mut(&slot).map(|w| &mut w.phase) {
                    held.take_again = now;
                    held.stock.retain(|worker| !ready.ended.contains(&worker.id));
                    // Such a worker may be in a reply that is still in flight.
                    held.ended.extend(ready.ended);
                    let surplus = held.ended.len().saturating_sub(ENDED_MAX);
                    held.ended.drain(..surplus);
                }
                self.fill(now, slot);
            }
            // They concern no lease.
            Some(Event::ServerStopped(_) | Event::AuthoritiesChanged(_)) | None => {}
        }
    }

    pub(super) fn lose(&mut self, now: Time, slot: Slot, reason: &str) {
        let held = self.slots.get(&slot).and_then(Wanted::held);
        let id = held.map(|h| h.id.clone()).unwrap_or_default();
        self.lost(now, slot, id, reason);
    }

    pub(super) fn lost(&mut self, now: Time, slot: Slot, id: String, reason: &str) {
        if !self.slots.contains_key(&slot) {
            return;
        }
        self.remember(now, id.clone(), reason);
        let Some(wanted) = self.slots.get_mut(&slot) else { return };
        wanted.processes = 0;
        wanted.recovery = None;
        if wanted.spec.once {
            self.slots.remove(&slot);
        } else {
            let key = wanted.spec.key.clone();
            *self.generations.entry(key).or_default() += 1;
            wanted.attempt = 0;
            wanted.since = now;
            wanted.trouble = None;
            // Jitter: clients that lose their leases at the same time do not all ask at the same
            // time.
            wanted.phase = Phase::Waiting { retry: now + BACKOFF_MIN.mul_f64(self.rng.f64()) };
        }
        self.tell(Change::Lost { slot, id, reason: reason.to_owned() });
        if !self.slots.contains_key(&slot) {
            self.tell(Change::Removed { slot, reason: reason.to_owned(), lost: true });
        }
    }

    /// Returns how long a server has been silent; `None` if it was never asked.
    pub fn silent_for(&self, now: Time, server: usize) -> Option<Duration> {
        let health = &self.servers[server];
        let since = health.answered.or(health.asked)?;
        Some(now.saturating_sub(since))
    }

    /// Warns the owners of leases whose requested time to live ends soon.
    pub(super) fn run_warnings(&mut self, now: Time) {
        let due = |w: &Wanted| w.warns_at().is_some_and(|at| at <= now);
        let due: Vec<Slot> = self.slots.iter().filter(|(_, w)| due(w)).map(|(slot, _)| *slot).collect();
        for slot in due {
            let Some(Phase::Held(held)) = self.slots.get_mut(&slot).map(|w| &mut w.phase) else { continue };
            held.warned = true;
            let left = held.expires.saturating_sub(now);
            let reason = "its time to live ends unless its owner renews it".to_owned();
            self.tell(Change::PrepareForLoss { slot, left, reason, idle: false });
        }
    }
}
