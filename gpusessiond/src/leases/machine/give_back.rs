//! Releases of leases, and withdrawals of pending requests.

use super::action::Action;
use super::backoff::BACKOFF_MIN;
use super::backoff::backoff;
use super::lease::{Phase, SavedRelease};
use super::state::{Machine, RECOVERY_TIMEOUT, Releasing};
use crate::leases::Change;
use crate::leases::{Slot, Spec, Time};
use crate::pool::{PoolError, Trouble};

impl Machine {
    /// Drops a wanted lease and releases it at its server.
    pub fn release(&mut self, now: Time, slot: Slot, reason: &str) {
        let Some(wanted) = self.slots.remove(&slot) else { return };
        let request_id = self.request_id(&wanted.spec);
        match &wanted.phase {
            Phase::Allocating => {
                let ours = wanted.spec.request_id.is_none();
                self.unwanted.insert(slot, ours.then(|| (request_id, wanted.asked.clone())));
            }
            Phase::Waiting { .. } => {
                self.withdraw(now, &wanted.spec, wanted.asked.clone().pending(None));
            }
            _ => {}
        }
        // A later lease of the same name must not find this one, whose release may be in flight.
        self.next_generation(&wanted.spec);
        match (wanted.phase, wanted.recovery) {
            (Phase::Held(held), _) => {
                let id = held.id.clone();
                self.remember(now, id.clone(), reason);
                self.give_back(now, held.server, id, held.expires);
            }
            (_, Some(old)) => {
                self.remember(now, old.id.clone(), reason);
                match self.server_named(&old.server) {
                    Some(server) => self.give_back(now, server, old.id, now + RECOVERY_TIMEOUT * 10),
                    // Released when its server is known; otherwise it expires, since this client
                    // does not renew it.
                    None => {
                        let until = old.expires.max(now + RECOVERY_TIMEOUT * 10);
                        let release = SavedRelease { server: old.server, id: old.id, waits: false, until };
                        self.unplaced.push(release);
                    }
                }
            }
            _ => {}
        }
        // The reply to a request in flight finds no slot: `allocated` releases that lease.
        self.tell(Change::Removed { slot, reason: reason.to_owned(), lost: false });
    }

    /// Withdraws a request, so that requests queued behind it do not wait for it, and that no lease
    /// remains whose reply was lost.
    ///
    /// Not a request whose id came with the wish: its lease may be older, as that of a lease file.
    pub(super) fn withdraw(&mut self, now: Time, spec: &Spec, asked: Vec<usize>) {
        if spec.request_id.is_some() {
            return;
        }
        let request_id = self.request_id(spec);
        self.withdraw_id(now, &request_id, asked);
    }

    pub(super) fn withdraw_id(&mut self, now: Time, request_id: &str, asked: Vec<usize>) {
        for server in asked {
            self.call_off(now, server, request_id.to_owned(), true, now + RECOVERY_TIMEOUT * 10);
        }
        self.run_releases(now);
    }

    pub(super) fn give_back(&mut self, now: Time, server: usize, id: String, give_up: Time) {
        self.call_off(now, server, id, false, give_up);
        self.run_releases(now);
    }

    /// Adds a release, or with `waits` a withdrawal.
    fn call_off(&mut self, now: Time, server: usize, id: String, waits: bool, give_up: Time) {
        self.releasing.push(Releasing {
            server,
            id,
            waits,
            retry: now,
            attempt: 0,
            give_up: give_up.max(now + BACKOFF_MIN),
            in_flight: false,
            makes_room_for: None,
        });
    }

    /// Begins what an earlier daemon had to call off at a server of this name.
    pub(super) fn place(&mut self, now: Time, server: usize, name: &str) {
        for release in self.unplaced.extract_if(.., |r| r.server == name).collect::<Vec<_>>() {
            self.call_off(now, server, release.id, release.waits, release.until);
        }
        self.run_releases(now);
    }

    /// Takes the answer to [`Action::Release`] and [`Action::Withdraw`].
    pub fn released(&mut self, now: Time, server: usize, id: &str, result: Result<(), PoolError>) {
        let Some(at) = self.releasing.iter().position(|r| r.in_flight && r.server == server && r.id == id)
        else {
            return;
        };
        match result {
            // A server that refuses the call still holds the lease: an identity may be accepted
            // again, and a server be updated, long before a requested time to live ends.
            Err(error) if error.trouble != Trouble::NoSuchLease => {
                let releasing = &mut self.releasing[at];
                releasing.in_flight = false;
                releasing.attempt += 1;
                releasing.retry = now + backoff(&mut self.rng, releasing.attempt);
                if releasing.retry >= releasing.give_up {
                    self.releasing.swap_remove(at);
                }
            }
            _ => {
                let done = self.releasing.swap_remove(at);
                let waiting = done.makes_room_for.and_then(|slot| self.slots.get_mut(&slot));
                if let Some(Phase::Waiting { retry }) = waiting.map(|w| &mut w.phase) {
                    *retry = now;
                }
                self.retry_refused(now, server);
            }
        }
    }

    /// Retries leases that were refused, once all releases in flight at a server are done.
    ///
    /// After a reload the new leases are asked for while the old ones are being released.
    fn retry_refused(&mut self, now: Time, server: usize) {
        if self.releasing.iter().any(|r| r.server == server && r.in_flight) {
            return;
        }
        let refused = |e: &PoolError| matches!(e.trouble, Trouble::NoCapacity | Trouble::LimitExceeded);
        for wanted in self.slots.values_mut().filter(|w| w.turn.is_none() && !w.spec.once) {
            if let Phase::Waiting { retry } = &mut wanted.phase
                && wanted.trouble.as_ref().is_some_and(refused)
            {
                *retry = now;
            }
        }
    }

    pub(super) fn run_releases(&mut self, now: Time) {
        for releasing in &mut self.releasing {
            if !releasing.in_flight && releasing.retry <= now {
                releasing.in_flight = true;
                let (server, id) = (releasing.server, releasing.id.clone());
                self.actions.push_back(match releasing.waits {
                    true => Action::Withdraw { server, request_id: id },
                    false => Action::Release { server, lease: id },
                });
            }
        }
    }
}
