//! Servers that this client drains or leaves.

use std::time::Duration;

use super::lease::Phase;
use super::state::Machine;
use crate::leases::{Change, LeaseState};
use crate::leases::{Slot, Time};

impl Machine {
    /// Drains a server: releases its leases after `grace`, to get others elsewhere.
    ///
    /// With `None`, uses the server again.
    pub fn drain(&mut self, now: Time, server: usize, grace: Option<Duration>) {
        self.servers[server].drained = grace.map(|grace| now + grace);
        let held: Vec<Slot> = self
            .slots
            .iter()
            .filter(|(_, w)| w.held().is_some_and(|h| h.server == server))
            .map(|(slot, _)| *slot)
            .collect();
        for slot in held {
            let state = if grace.is_some() { LeaseState::Draining } else { LeaseState::Active };
            self.set_state(now, slot, state, None);
            if let Some(left) = grace {
                self.tell_leaving(slot, left);
            }
        }
        for wanted in self.slots.values_mut() {
            if let Phase::Waiting { retry } = &mut wanted.phase
                && grace.is_none()
            {
                *retry = now;
            }
        }
        self.tell(Change::Server { server });
        self.tick(now);
    }

    /// Drains a server that the list of servers no longer names.
    ///
    /// It is [`gone`](Self::gone) after its last lease.
    pub fn remove_server(&mut self, now: Time, server: usize, grace: Duration) {
        self.servers[server].removed = true;
        self.drain(now, server, Some(grace));
    }

    /// Uses a server again that the list of servers names again.
    pub fn restore_server(&mut self, now: Time, server: usize) {
        if self.gone(server) {
            // Its silence and its trouble are those of long ago.
            let health = &mut self.servers[server];
            (health.answered, health.asked, health.trouble) = (None, None, None);
        }
        let health = &mut self.servers[server];
        (health.removed, health.next) = (false, now);
        self.drain(now, server, None);
    }

    /// Returns `true` if this client has removed a server, and none of its leases is there.
    ///
    /// This client asks such a server no more, but for withdrawals of requests.
    pub fn gone(&self, server: usize) -> bool {
        self.servers[server].removed
            && !self.slots.values().any(|w| w.held().is_some_and(|held| held.server == server))
            && !self.releasing.iter().any(|release| release.server == server && !release.waits)
    }

    /// Returns `true` if the list of servers no longer names a server.
    pub fn is_removed(&self, server: usize) -> bool {
        self.servers[server].removed
    }

    /// Warns of the end of a lease that a server has allocated while it was drained.
    pub(super) fn drain_late(&mut self, now: Time, slot: Slot, server: usize) {
        if let Some(at) = self.servers[server].drained {
            self.set_state(now, slot, LeaseState::Draining, None);
            self.tell_leaving(slot, at.saturating_sub(now));
        }
    }

    fn tell_leaving(&mut self, slot: Slot, left: Duration) {
        let reason = "this client is leaving its server".to_owned();
        self.tell(Change::PrepareForLoss { slot, left, reason, idle: false });
    }

    /// Returns `true` while a server is being drained.
    pub fn drained(&self, server: usize) -> bool {
        self.servers[server].drained.is_some()
    }

    pub(super) fn run_drains(&mut self, now: Time) {
        let due: Vec<(Slot, usize, String, Time)> = self
            .slots
            .iter()
            .filter_map(|(slot, w)| {
                let held = w.held()?;
                let due = self.servers[held.server].drained.is_some_and(|at| at <= now);
                due.then(|| (*slot, held.server, held.id.clone(), held.expires))
            })
            .collect();
        for (slot, server, id, expires) in due {
            self.give_back(now, server, id, expires);
            self.lose(now, slot, "this client left its server");
        }
    }
}
