//! Requests for leases: which server is asked when, and its answer.

use std::collections::VecDeque;
use std::time::Duration;

use gpusession_common::units::Memory;
use gpusession_common::words::{Class, Sharing};
use gpusession_proto::control;

use super::action::Action;
use super::backoff::backoff;
use super::backoff::{BACKOFF_MAX, BACKOFF_MIN};
use super::lease::{Held, Phase, Wanted, memory_free};
use super::renew::FORGOTTEN;
use super::state::{HEARTBEAT_INTERVAL, Machine, RECOVERY_TIMEOUT};
use crate::leases::{Change, LeaseState, Reported, Slot, Spec, Time};
use crate::pool::{PoolError, Trouble};

/// Time that a boot lease defers to boot leases listed before it.
pub(super) const BOOT_ORDER_DELAY: Duration = Duration::from_secs(1);

impl Machine {
    /// Lets leases that defer to others check at once whether they still have to.
    pub(super) fn next_turn(&mut self, now: Time) {
        for wanted in self.slots.values_mut().filter(|w| w.turn.is_some()) {
            if let Phase::Waiting { retry } = &mut wanted.phase {
                *retry = now;
            }
        }
    }

    /// Takes the answer to [`Action::Allocate`].
    pub fn allocated(&mut self, now: Time, slot: Slot, result: Result<(usize, control::Lease), PoolError>) {
        self.next_turn(now);
        if !self.slots.get(&slot).is_some_and(|w| matches!(w.phase, Phase::Allocating)) {
            let granted = result.as_ref().ok().map(|(server, _)| *server);
            match self.unwanted.remove(&slot) {
                Some(Some((request_id, asked))) => {
                    self.withdraw_id(now, &request_id, asked.pending(granted));
                }
                // The lease of a request that came with its id may be older, and stays.
                Some(None) => return,
                None => {}
            }
            if let Ok((server, lease)) = result {
                let expires = now + Duration::from_micros(lease.ttl_usec);
                self.give_back(now, server, lease.id, expires);
            }
            return;
        }
        match result {
            Ok((server, lease)) => self.granted(now, slot, server, lease),
            Err(error) => self.refused(now, slot, error),
        }
    }

    /// Takes a lease that a server has allocated.
    fn granted(&mut self, now: Time, slot: Slot, server: usize, mut lease: control::Lease) {
        let Some(wanted) = self.slots.get_mut(&slot) else { return };
        let (spec, asked) = (wanted.spec.clone(), std::mem::take(&mut wanted.asked));
        self.withdraw(now, &spec, asked.pending(Some(server)));
        let Some(wanted) = self.slots.get_mut(&slot) else { return };
        let recovery = wanted.recovery.take();
        if let Some(old) = recovery.as_ref().filter(|old| wanted.spec.once && old.id != lease.id) {
            // The server has forgotten the lease, and its requester did not ask for another
            // one.
            let (id, expires) = (old.id.clone(), now + Duration::from_micros(lease.ttl_usec));
            self.give_back(now, server, lease.id, expires);
            self.lost(now, slot, id, FORGOTTEN);
            return;
        }
        let stock = std::mem::take(&mut lease.workers).into();
        wanted.attempt = 0;
        wanted.trouble = None;
        wanted.last_server = Some(server);
        wanted.sticky = lease.devices.iter().map(|d| d.uuid.clone()).collect();
        let mut expires = now + Duration::from_micros(lease.ttl_usec);
        let (mut ended, mut forgotten) = (Vec::new(), None);
        match recovery {
            Some(old) if old.id == lease.id => {
                if !wanted.spec.renewed_by_itself() {
                    expires = expires.min(old.expires);
                }
                ended = old.ended;
            }
            old => {
                wanted.processes = 0;
                forgotten = old.map(|old| old.id);
            }
        }
        let id = lease.id.clone();
        wanted.phase = Phase::Held(Box::new(Held {
            expires,
            reported: Reported::granted(&lease),
            memory_free_bytes: memory_free(&lease.devices),
            id: lease.id,
            ticket_key: lease.ticket_key,
            data_addresses: lease.data_addresses,
            server,
            state: LeaseState::Active,
            since: now,
            stock,
            parking: false,
            idle_since: None,
            place: None,
            warned: false,
            taking: false,
            take_again: now,
            take_attempt: 0,
            missed: 0,
            asked_for: 0,
            spare_refused: false,
            ended: VecDeque::new(),
        }));
        if let Some(id) = forgotten {
            self.remember(now, id, FORGOTTEN);
        }
        for worker in ended {
            self.actions.push_back(Action::EndWorker { slot, server, lease: id.clone(), worker });
        }
        let health = &mut self.servers[server];
        health.answered = Some(now);
        health.trouble = None;
        health.next = health.next.min(now + HEARTBEAT_INTERVAL);
        self.tell(Change::Granted { slot });
        self.drain_late(now, slot, server);
        self.fill(now, slot);
    }

    /// Takes the reason why no server has allocated a lease.
    fn refused(&mut self, now: Time, slot: Slot, error: PoolError) {
        // A background lease occupies GPUs, and counts against this client's limits too.
        let refused = matches!(error.trouble, Trouble::NoCapacity | Trouble::LimitExceeded);
        let yields = refused && self.yield_background(now, slot);
        let Some(wanted) = self.slots.get_mut(&slot) else { return };
        if let Some(old) = &wanted.recovery {
            // The lease's server may be restarting too; after `until`, another server may
            // serve the slot.
            if error.trouble != Trouble::Unreachable || old.until <= now {
                let (id, server) = (old.id.clone(), old.server.clone());
                if let Some(server) = self.server_named(&server) {
                    // A server that returns with the lease must not keep it unused.
                    self.give_back(now, server, id.clone(), now + RECOVERY_TIMEOUT * 10);
                }
                let Some(wanted) = self.slots.get_mut(&slot) else { return };
                let (spec, asked) = (wanted.spec.clone(), std::mem::take(&mut wanted.asked));
                // A request that is queued there would precede the next one.
                self.withdraw(now, &spec, asked.pending(None));
                let Some(wanted) = self.slots.get_mut(&slot) else { return };
                if spec.once {
                    self.lost(now, slot, id, &error.message);
                    return;
                }
                wanted.recovery = None;
                wanted.processes = 0;
                self.next_generation(&spec);
                self.remember(now, id, &error.message);
            }
        } else if wanted.spec.once && yields {
            // Retried when the background lease is released.
            wanted.phase = Phase::Waiting { retry: now + BACKOFF_MAX };
            return;
        } else if wanted.spec.once {
            if let Some(wanted) = self.slots.remove(&slot) {
                self.withdraw(now, &wanted.spec, wanted.asked.pending(None));
            }
            self.tell(Change::Failed { slot, error });
            return;
        }
        let Some(wanted) = self.slots.get_mut(&slot) else { return };
        wanted.attempt += 1;
        let pause = backoff(&mut self.rng, wanted.attempt);
        wanted.trouble = Some(error);
        wanted.phase = Phase::Waiting { retry: now + pause };
        self.tell(Change::Changed { slot });
    }

    pub(super) fn next_generation(&mut self, spec: &Spec) {
        if !spec.once {
            *self.generations.entry(spec.key.clone()).or_default() += 1;
        }
    }

    pub(super) fn ask(&mut self, now: Time, slot: Slot) {
        let busy = self
            .slots
            .values()
            .any(|w| w.spec.class != Class::Background && !matches!(w.phase, Phase::Held(_)));
        let Some(wanted) = self.slots.get_mut(&slot) else { return };
        if wanted.spec.class == Class::Background && wanted.recovery.is_none() && busy {
            let pause = backoff(&mut self.rng, 3);
            wanted.phase = Phase::Waiting { retry: now + pause };
            let (spec, asked) = (wanted.spec.clone(), std::mem::take(&mut wanted.asked).pending(None));
            if !asked.is_empty() {
                // A lease whose reply was lost counts against the limits of the others.
                self.withdraw(now, &spec, asked);
                self.next_generation(&spec);
            }
            return;
        }
        // Bounded, so that a server that hangs does not hold up later leases for long.
        let until = wanted.turn.take().unwrap_or(now + BOOT_ORDER_DELAY);
        if now < until && self.others_first(slot) {
            if let Some(wanted) = self.slots.get_mut(&slot) {
                wanted.turn = Some(until);
                wanted.phase = Phase::Waiting { retry: until };
            }
            return;
        }
        let Some(wanted) = self.slots.get(&slot) else { return };
        let mut servers = self.servers_for(wanted);
        if servers.is_empty() {
            // Servers report their names themselves, shortly after the start.
            let named = wanted.recovery.is_some() || !wanted.spec.servers.is_empty();
            if named && wanted.attempt == 0 && !wanted.spec.once {
                if let Some(wanted) = self.slots.get_mut(&slot) {
                    wanted.attempt = 1;
                    wanted.phase = Phase::Waiting { retry: now + BACKOFF_MIN };
                }
                return;
            }
            let none = Trouble::Unreachable;
            let (trouble, message) = match (&wanted.recovery, wanted.spec.servers.first()) {
                (Some(old), _) => (none, format!("{}: no answer, and it holds lease {}", old.server, old.id)),
                _ if self.servers.iter().all(|s| s.removed) => (Trouble::NotReady, self.notice.clone()),
                (None, Some(name)) => (none, format!("server {name}: not in the pool")),
                _ if self.servers.iter().any(|s| s.drained.is_some() && !s.removed) => {
                    (none, "every server is draining".into())
                }
                _ => (none, self.notice.clone()),
            };
            self.allocated_nowhere(now, slot, PoolError::new(trouble, message));
            return;
        }
        // First the server of the last lease, then the reachable servers, then the others.
        // Shuffled, so that machines with the same list spread over it; a one-time request keeps
        // the given order.
        if !wanted.spec.once {
            self.rng.shuffle(&mut servers);
        }
        servers.sort_by_key(|i| (wanted.last_server != Some(*i), self.servers[*i].trouble.is_some()));
        let request_id = self.request_id(&wanted.spec);
        let mut request = wanted.spec.request(request_id, &self.boot_id, &self.machine_id, &wanted.sticky);
        if let Some(old) = &wanted.recovery {
            // The workers in stock left with the daemon that took them.
            (request.again, request.workers) = (true, old.used.clone());
        }
        if let Some(wanted) = self.slots.get_mut(&slot) {
            wanted.phase = Phase::Allocating;
            wanted.asked.begin(now, &servers);
        }
        self.actions.push_back(Action::Allocate { slot, servers, request: Box::new(request) });
    }

    /// Returns the id of the request for a lease.
    ///
    /// The id changes only when the lease was released or lost, so that a repetition finds the same
    /// lease.
    pub(super) fn request_id(&self, spec: &Spec) -> String {
        let generation = self.generations.get(&spec.key).copied().unwrap_or(0);
        match &spec.request_id {
            Some(id) if generation == 0 => id.clone(),
            _ => format!("{}/{}/{generation}", self.boot_id, spec.key),
        }
    }

    /// Returns the servers that may be asked for a lease.
    pub(super) fn servers_for(&self, wanted: &Wanted) -> Vec<usize> {
        let called = |i: &usize, name: &str| self.names[*i].iter().any(|n| n == name);
        let all = 0..self.names.len();
        match &wanted.recovery {
            Some(old) => all.filter(|i| called(i, &old.server)).collect(),
            None => all
                .filter(|i| {
                    wanted.spec.servers.is_empty() || wanted.spec.servers.iter().any(|n| called(i, n))
                })
                .filter(|i| self.servers[*i].drained.is_none())
                .collect(),
        }
    }

    /// Returns `true` while boot leases listed earlier are being asked for and may get too few
    /// GPUs.
    ///
    /// Asking now could take GPUs from them. A lease that waits does not count: it is queued
    /// already, in the file's order.
    fn others_first(&self, slot: Slot) -> bool {
        let new = |w: &Wanted| {
            let waits = w.trouble.as_ref().is_some_and(|e| e.trouble == Trouble::NoCapacity);
            w.spec.class == Class::Boot
                && !w.spec.once
                && w.recovery.is_none()
                && w.held().is_none()
                && !waits
        };
        let Some(wanted) = self.slots.get(&slot).filter(|w| new(w)) else { return false };
        let servers = self.servers_for(wanted);
        let rivals = || {
            let shares = |w: &Wanted| self.servers_for(w).iter().any(|i| servers.contains(i));
            self.slots.values().filter(move |w| new(w) && shares(w))
        };
        let before = |w: &Wanted| matches!(w.phase, Phase::Allocating) && w.spec.order < wanted.spec.order;
        if !rivals().any(before) {
            return false;
        }
        let free = || servers.iter().map(|i| self.servers[*i].free);
        let all: u32 = rivals().map(|w| w.spec.gpus).sum();
        let room = if rivals().all(|w| w.spec.gpus == 1) {
            let part = |w: &Wanted| match w.spec.memory {
                Memory::Percent(percent) if w.spec.sharing != Some(Sharing::Exclusive) => percent,
                _ => 100.0,
            };
            let largest = rivals().map(part).fold(1.0, f64::max);
            free().sum::<u32>() * (100.0 / largest) as u32 >= all
        } else {
            // All GPUs of a lease belong to one server.
            free().any(|free| free >= all)
        };
        !room
    }

    fn allocated_nowhere(&mut self, now: Time, slot: Slot, error: PoolError) {
        if let Some(wanted) = self.slots.get_mut(&slot) {
            wanted.phase = Phase::Allocating;
        }
        self.allocated(now, slot, Err(error));
    }
}
