//! Creation, renewal, expiry and saving of leases.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use super::{
    AllocateError, DEFAULT_TTL, Gpu, Held, Lease, Passing, QUEUE_TIMEOUT, Request, Rules, Saved, Sharing,
    Table, Withdrawn,
};
use crate::clock::{self, Moment, Random};

/// Range of lifetimes that a client can request. The limit `lease_ttl` can shorten the longest.
const TTL_RANGE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(366 * 24 * 3600));
/// Shortest lifetime of a lease after a restart. Its client renews it every 2 s, and needs up to
/// 13 s if it has to connect again.
const RESTART_TTL: Duration = Duration::from_secs(30);
/// Leases of one client on one server; a bound on memory, not a policy.
const MAX_LEASES_PER_CLIENT: usize = 64;

impl Table {
    /// Creates a table of these GPUs with the leases of an earlier run.
    ///
    /// Also returns the leases whose GPUs are gone. A lease lives on for the time that it had left
    /// when the table was stored, so the server's absence does not count. A lease of a client that
    /// is gone would never end if each restart gave it its whole lifetime again.
    pub fn new(gpus: Vec<Gpu>, rules: Rules, saved: Saved<'_>, now: Moment) -> (Self, Vec<Lease>) {
        let mut table = Self {
            gpus,
            held: BTreeMap::new(),
            aside: saved.aside.into_iter().map(|id| (id, None)).collect(),
            turns: 0,
            fencing_token: saved.fencing_token,
            withdrawn: saved.withdrawn.into_owned(),
            passing: saved.passing.into_owned(),
            waiting: Vec::new(),
            arrivals: 0,
            rules,
            draining: saved.draining.into_owned(),
            stopping: false,
        };
        table.withdrawn.retain(|uuid, _| table.gpus.iter().any(|g| g.uuid == *uuid));
        table.passing.retain(|uuid, _| table.withdrawn.contains_key(uuid));
        for (uuid, why) in &table.withdrawn {
            // Version 0.1.0 knew a wrong compute mode by the start of the reason.
            if matches!(why, Withdrawn::Broken(reason) if reason.starts_with("compute mode ")) {
                table.passing.insert(uuid.clone(), Passing::ComputeMode);
            }
        }
        let mut lost = Vec::new();
        let mut used: HashMap<String, u64> = HashMap::new();
        for lease in saved.leases.into_iter().map(Cow::into_owned) {
            let aside = table.aside.contains_key(&lease.id);
            let fits = lease.shares.iter().all(|s| {
                table.gpu(&s.gpu).is_some_and(|g| {
                    (g.by_mps() || !lease.mps)
                        && (aside
                            || s.limit_bytes
                                <= table.capacity(g).saturating_sub(used.get(&s.gpu).copied().unwrap_or(0)))
                })
            });
            if fits {
                for share in lease.shares.iter().filter(|_| !aside) {
                    *used.entry(share.gpu.clone()).or_default() += share.limit_bytes;
                }
                let left = saved.left.get(&lease.id).map_or(lease.ttl, |left| *left.max(&RESTART_TTL));
                let deadline = now + left.min(lease.ttl);
                table.held.insert(lease.id.clone(), Held { lease, deadline });
            } else {
                lost.push(lease);
            }
        }
        table.forget_aside();
        (table, lost)
    }

    /// Returns the part of the table that must survive a restart.
    pub fn save(&self, now: Moment) -> Saved<'_> {
        Saved {
            schema: 1,
            fencing_token: self.fencing_token,
            leases: self.held.values().map(|h| Cow::Borrowed(&h.lease)).collect(),
            left: self.held.iter().map(|(id, h)| (id.clone(), h.deadline.saturating_sub(now))).collect(),
            aside: self.aside.keys().cloned().collect(),
            withdrawn: Cow::Borrowed(&self.withdrawn),
            passing: Cow::Borrowed(&self.passing),
            draining: Cow::Borrowed(&self.draining),
        }
    }

    /// Returns the bytes of a GPU that may be leased.
    pub(super) fn capacity(&self, gpu: &Gpu) -> u64 {
        u64::try_from(u128::from(gpu.offered_bytes()) * u128::from(self.rules.overcommit_percent) / 100)
            .unwrap_or(u64::MAX)
    }

    /// Replaces the rules for new leases; present ones stay.
    pub fn set_rules(&mut self, rules: Rules) {
        self.rules = rules;
    }

    /// Returns the reason why a GPU is withdrawn, if it is.
    pub fn withdrawn(&self, uuid: &str) -> Option<&Withdrawn> {
        self.withdrawn.get(uuid)
    }

    /// Notes a GPU's compute mode. Returns `true` if it has changed.
    pub fn set_compute_mode(&mut self, uuid: &str, mode: u32) -> bool {
        let gpu = self.gpus.iter_mut().find(|g| g.uuid == uuid);
        gpu.is_some_and(|gpu| std::mem::replace(&mut gpu.compute_mode, mode) != mode)
    }

    /// Returns the fault that has to pass before a withdrawn GPU returns to service by itself.
    pub fn passing(&self, uuid: &str) -> Option<Passing> {
        self.passing.get(uuid).copied()
    }

    /// Withdraws a GPU, or with `None` returns it to service; leases on it stay. Returns `true` if
    /// it exists.
    pub fn withdraw(&mut self, uuid: &str, why: Option<Withdrawn>) -> bool {
        if self.gpu(uuid).is_none() {
            return false;
        }
        self.passing.remove(uuid);
        match why {
            Some(why) => self.withdrawn.insert(uuid.into(), why),
            None => self.withdrawn.remove(uuid),
        };
        true
    }

    /// Withdraws a GPU in service for a fault that may pass. Returns `true` if it was in service.
    pub fn withdraw_until_passed(&mut self, uuid: &str, fault: Passing, why: String) -> bool {
        if self.withdrawn.contains_key(uuid) || !self.withdraw(uuid, Some(Withdrawn::Broken(why))) {
            return false;
        }
        self.passing.insert(uuid.into(), fault);
        true
    }

    /// Returns a GPU to service whose fault has passed. Returns `true` if it was withdrawn for it.
    pub fn passed(&mut self, uuid: &str, fault: Passing) -> bool {
        self.passing(uuid) == Some(fault) && self.withdraw(uuid, None)
    }

    /// Drains the server for this reason, also after a restart; `None` ends that.
    pub fn drain(&mut self, why: Option<String>) {
        self.draining = why;
    }

    /// Refuses new leases until the restart.
    pub fn stop(&mut self) {
        self.stopping = true;
    }

    /// Returns the reason why new leases are refused, if they are.
    pub fn draining(&self) -> Option<&str> {
        if self.stopping { Some("it stops") } else { self.draining.as_deref() }
    }

    /// Lists the leases on a GPU, lent ones included.
    pub fn holders(&self, uuid: &str) -> Vec<&Lease> {
        let on_it = |h: &&Held| h.lease.shares.iter().any(|s| s.gpu == uuid);
        self.held.values().filter(on_it).map(|h| &h.lease).collect()
    }

    /// Lists the GPUs of this server.
    pub fn gpus(&self) -> &[Gpu] {
        &self.gpus
    }

    pub(super) fn gpu(&self, uuid: &str) -> Option<&Gpu> {
        self.gpus.iter().find(|g| g.uuid == uuid)
    }

    /// Lists leases that hold their GPUs now, or want them back and have a turn before `turn`.
    pub(super) fn holding(&self, turn: u64) -> impl Iterator<Item = &Lease> {
        let counts = move |l: &&Lease| match self.aside.get(&l.id) {
            None => true,
            Some(None) => false,
            Some(Some(t)) => *t < turn,
        };
        self.held.values().map(|h| &h.lease).filter(counts)
    }

    /// Returns the device memory of each GPU that leases hold or wait to get back; unused GPUs are
    /// absent.
    pub fn used(&self) -> HashMap<&str, u64> {
        let mut used = HashMap::new();
        for share in self.holding(u64::MAX).flat_map(|l| &l.shares) {
            *used.entry(share.gpu.as_str()).or_default() += share.limit_bytes;
        }
        used
    }

    /// Returns a lease and its remaining lifetime.
    pub fn get(&self, id: &str, now: Moment) -> Option<(&Lease, Duration)> {
        self.held.get(id).map(|h| (&h.lease, h.deadline.saturating_sub(now)))
    }

    /// Lists all leases with their remaining lifetimes.
    pub fn leases(&self, now: Moment) -> impl Iterator<Item = (&Lease, Duration)> {
        self.held.values().map(move |h| (&h.lease, h.deadline.saturating_sub(now)))
    }

    /// Creates a lease, or returns the one of the same request (then with `false`).
    ///
    /// A request with an id that does not fit waits: it keeps its place while the client repeats
    /// it.
    pub fn allocate(
        &mut self,
        request: &Request,
        now: Moment,
        unix: u64,
        random: &dyn Random,
    ) -> Result<(Lease, bool), AllocateError> {
        self.waiting.retain(|w| now.saturating_sub(w.asked) < QUEUE_TIMEOUT);
        let mine = self.held.values_mut().filter(|h| h.lease.client == request.client);
        let mut count = 0;
        for held in mine {
            if !request.request_id.is_empty() && held.lease.request_id == request.request_id {
                held.deadline = now + held.lease.ttl;
                return Ok((held.lease.clone(), false));
            }
            count += 1;
        }
        if count >= MAX_LEASES_PER_CLIENT {
            return Err(AllocateError::NeverFits(format!(
                "{} holds {count} leases, the most a client can; release some",
                request.client
            )));
        }
        let possible = self.check(request).and_then(|()| self.within_limits(request, &[]));
        let shares = match possible.and_then(|()| self.turn(request, now)) {
            Ok(shares) => shares,
            Err(waits @ AllocateError::NoCapacity { .. }) => return Err(waits),
            Err(other) => {
                self.leave_queue(&request.client, &request.request_id);
                return Err(other);
            }
        };
        let since = self.leave_queue(&request.client, &request.request_id);
        let longest = request.limits.smallest("lease_ttl").map(|(_, usec)| usec);
        let ttl = match request.ttl {
            Duration::ZERO => DEFAULT_TTL,
            // A client with a lifetime of its own never renews; its lease lives as long as a limit
            // allows for renewed leases.
            ttl => {
                ttl.min(longest.map_or(TTL_RANGE.1, Duration::from_micros)).clamp(TTL_RANGE.0, TTL_RANGE.1)
            }
        };
        let until_unix = match longest {
            Some(usec) if !request.persistent => unix + usec.div_ceil(1_000_000),
            _ => 0,
        };
        self.fencing_token += 1;
        let all = |sharing| shares.iter().all(|s| self.gpu(&s.gpu).is_some_and(|g| g.sharing == sharing));
        let lease = Lease {
            id: self.fresh_id(random),
            client: request.client.clone(),
            request_id: request.request_id.clone(),
            ticket_key: clock::bytes(random),
            fencing_token: self.fencing_token,
            ttl,
            boot_id: request.boot_id.clone(),
            encrypted: request.encrypted,
            user: request.user.clone(),
            uid: request.uid,
            who: request.who.clone(),
            why: request.why.clone(),
            created_unix: unix,
            exclusive: request.sharing == Some(Sharing::Exclusive) || all(Sharing::Exclusive),
            priority: request.priority,
            persistent: request.persistent,
            until_unix,
            on_idle: request.on_idle,
            hold: request.hold,
            idle_timeout: request.idle_timeout,
            mps: request.sharing.is_none_or(|s| s == Sharing::Mps) && all(Sharing::Mps),
            shares,
            pinned: !request.devices.is_empty(),
            waited: since.map_or(Duration::ZERO, |since| now.saturating_sub(since)),
        };
        self.held.insert(lease.id.clone(), Held { lease: lease.clone(), deadline: now + ttl });
        self.trim(&request.client);
        Ok((lease, true))
    }

    fn fresh_id(&self, random: &dyn Random) -> String {
        loop {
            let bytes: [u8; 8] = clock::bytes(random);
            let mut id = data_encoding::BASE32_NOPAD.encode(&bytes).to_ascii_lowercase();
            id.truncate(12);
            if !self.held.contains_key(&id) {
                return id;
            }
        }
    }

    /// Extends a client's lease and returns its lifetime; `None`: the client has no such lease.
    pub fn renew(&mut self, client: &str, id: &str, now: Moment) -> Option<Duration> {
        let held = self.held.get_mut(id).filter(|h| h.lease.client == client)?;
        held.deadline = now + held.lease.ttl;
        Some(held.lease.ttl)
    }

    /// Removes a lease; with `client`, only if it belongs to that client.
    pub fn remove(&mut self, client: Option<&str>, id: &str) -> Option<Lease> {
        let held = self.held.get(id)?;
        if client.is_some_and(|c| c != held.lease.client) {
            return None;
        }
        self.aside.remove(id);
        self.held.remove(id).map(|h| h.lease)
    }

    /// Removes a client's request from the queue, and the lease that it has made.
    ///
    /// The client may have lost the reply that named the lease.
    pub fn cancel(&mut self, client: &str, request_id: &str) -> Option<Lease> {
        self.leave_queue(client, request_id);
        let made = |lease: &Lease| {
            lease.client == client && lease.request_id == request_id && !request_id.is_empty()
        };
        let id = self.held.values().find(|held| made(&held.lease))?.lease.id.clone();
        self.remove(Some(client), &id)
    }

    /// Removes a new lease that could not be stored.
    pub fn undo_allocate(&mut self, id: &str) {
        self.held.remove(id);
    }

    /// Removes all leases for which `ended` returns `true`.
    pub fn remove_where(&mut self, mut ended: impl FnMut(&Lease) -> bool) -> Vec<Lease> {
        let ids: Vec<_> =
            self.held.values().filter(|h| ended(&h.lease)).map(|h| h.lease.id.clone()).collect();
        let gone = ids.iter().filter_map(|id| self.held.remove(id)).map(|h| h.lease).collect();
        self.forget_aside();
        gone
    }

    /// Removes leases that were not renewed in time, or may not live any longer.
    pub fn expire(&mut self, now: Moment, unix: u64) -> Vec<Lease> {
        let over = |h: &&Held| h.over(now, unix);
        let ids: Vec<_> = self.held.values().filter(over).map(|h| h.lease.id.clone()).collect();
        let gone = ids.iter().filter_map(|id| self.held.remove(id)).map(|h| h.lease).collect();
        self.forget_aside();
        gone
    }

    /// Returns `true` if [`Table::expire`] would remove a lease.
    pub fn expires(&self, now: Moment, unix: u64) -> bool {
        self.held.values().any(|h| h.over(now, unix))
    }

    /// Returns when the next lease expires unless it is renewed.
    pub fn next_deadline(&self) -> Option<Moment> {
        self.held.values().map(|h| h.deadline).min()
    }
}
