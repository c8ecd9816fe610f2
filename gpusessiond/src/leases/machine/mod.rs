//! The life of every lease as a plain state machine: no I/O, no clock, no randomness of its own.
//!
//! Events come in as method calls with the current time; work to do goes out as [`Action`]s. Times
//! are [`Duration`]s since an arbitrary start of the caller's monotonic clock.

mod action;
mod allocate;
mod backoff;
mod demand;
mod drain;
mod ended;
mod give_back;
mod lease;
mod processes;
mod renew;
mod saved;
mod state;
mod stock;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};

use super::{Change, Slot, Spec, Time};

pub use action::Action;
pub use lease::{Health, Held, Phase, Wanted};
pub use saved::{Saved, SavedLease};
pub use state::{
    HEARTBEAT_INTERVAL, IDLE_HEARTBEAT_INTERVAL, Machine, OFFLINE_TIMEOUT, SUSPECT_TIMEOUT,
    USER_LINGER_TIMEOUT,
};

use backoff::BACKOFF_MAX;
use lease::{Asked, Recovery};
use state::{COALESCE_WINDOW, RECOVERY_TIMEOUT, STOCK_TARGET};

impl Machine {
    /// Creates a machine that knows no server yet.
    pub fn new(boot_id: String, machine_id: String, rng: fastrand::Rng) -> Self {
        Self {
            slots: BTreeMap::new(),
            servers: Vec::new(),
            names: Vec::new(),
            releasing: Vec::new(),
            unplaced: Vec::new(),
            unwanted: BTreeMap::new(),
            next_slot: 1,
            boot_id,
            machine_id,
            rng,
            actions: VecDeque::new(),
            notice: "no server of the pool is known".into(),
            templates: Vec::new(),
            sessions: BTreeMap::new(),
            generations: BTreeMap::new(),
            preallocated: 0,
            ended: VecDeque::new(),
        }
    }

    /// Adds a server, named by its address, and returns its index.
    pub fn add_server(&mut self, now: Time, address: String) -> usize {
        self.servers.push(Health { next: now, ..Health::default() });
        self.names.push(vec![address.clone()]);
        for wanted in self.slots.values_mut() {
            if let Phase::Waiting { retry } = &mut wanted.phase {
                *retry = now;
            }
        }
        let server = self.servers.len() - 1;
        self.place(now, server, &address);
        server
    }

    /// Sets the reason why no server is known.
    pub fn set_notice(&mut self, now: Time, notice: String) {
        self.notice = notice;
        for wanted in self.slots.values_mut() {
            if let Phase::Waiting { retry } = &mut wanted.phase {
                *retry = now;
            }
        }
    }

    /// Takes the next action out of the queue.
    pub fn next_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// Returns `true` if an action is queued.
    pub fn has_actions(&self) -> bool {
        !self.actions.is_empty()
    }

    /// Iterates over all wanted leases.
    pub fn slots(&self) -> impl Iterator<Item = (Slot, &Wanted)> {
        self.slots.iter().map(|(slot, wanted)| (*slot, wanted))
    }

    /// Returns the wanted lease of a slot, or `None` once it has been removed.
    pub fn slot(&self, slot: Slot) -> Option<&Wanted> {
        self.slots.get(&slot)
    }

    /// Returns the state of a server.
    ///
    /// # Panics
    /// If no server has this index.
    pub fn health(&self, server: usize) -> &Health {
        &self.servers[server]
    }

    /// Number of releases that their servers have not confirmed yet.
    ///
    /// A withdrawal counts during its first try: it rarely has a lease to end, and its server may
    /// be down.
    pub fn releases_pending(&self) -> usize {
        self.releasing.iter().filter(|r| !r.waits || r.attempt == 0).count()
    }

    /// Returns `true` if the answer to a dropped request is still on its way.
    ///
    /// It may bring a lease, which is released then.
    pub fn has_unwanted(&self) -> bool {
        !self.unwanted.is_empty()
    }

    /// Records how many of a server's GPUs are free.
    pub fn described(&mut self, now: Time, server: usize, free: u32) {
        self.servers[server].free = free;
        self.next_turn(now);
    }

    /// Finds a server by one of its names; one that the list of servers names comes first.
    fn server_named(&self, name: &str) -> Option<usize> {
        let called = (0..self.names.len()).filter(|server| self.names[*server].iter().any(|n| n == name));
        called.min_by_key(|server| self.servers[*server].removed)
    }

    /// Records a server's data addresses, which its configuration may have changed.
    pub fn moved(&mut self, server: usize, addresses: &[String]) {
        for wanted in self.slots.values_mut() {
            if let Phase::Held(held) = &mut wanted.phase
                && held.server == server
            {
                held.data_addresses = addresses.to_vec();
            }
        }
    }

    /// Adds a name of a server; leases that waited for a server of this name are asked for.
    pub fn name_server(&mut self, now: Time, server: usize, name: &str) {
        let names = &mut self.names[server];
        if !name.is_empty() && !names.iter().any(|n| n == name) {
            names.push(name.to_owned());
            self.retry_waiting(now);
            self.place(now, server, name);
        }
    }

    /// Retries every waiting lease at once: another server may be known now.
    fn retry_waiting(&mut self, now: Time) {
        for wanted in self.slots.values_mut().filter(|w| w.turn.is_none()) {
            if let Phase::Waiting { retry } = &mut wanted.phase {
                *retry = now;
            }
        }
    }

    /// Wants a lease from now on.
    pub fn want(&mut self, now: Time, spec: Spec) -> Slot {
        let slot = self.insert(now, spec, None);
        self.tick(now);
        slot
    }

    fn insert(&mut self, now: Time, spec: Spec, recovery: Option<Recovery>) -> Slot {
        let slot = self.next_slot;
        self.next_slot += 1;
        let sticky = spec.sticky.clone();
        let wanted = Wanted {
            spec,
            phase: Phase::Waiting { retry: now },
            trouble: None,
            since: now,
            processes: 0,
            attempt: 0,
            turn: None,
            sticky,
            last_server: None,
            asked: Asked::default(),
            recovery,
            unused: None,
        };
        self.slots.insert(slot, wanted);
        self.tell(Change::New { slot });
        slot
    }

    /// Does all work that is due at `now`.
    pub fn tick(&mut self, now: Time) {
        self.run_releases(now);
        let expired: Vec<Slot> = self
            .slots
            .iter()
            .filter(|(_, w)| w.held().is_some_and(|h| h.expires <= now))
            .map(|(slot, _)| *slot)
            .collect();
        self.run_users(now);
        self.run_drains(now);
        self.run_warnings(now);
        for slot in expired {
            let Some(wanted) = self.slots.get(&slot) else { continue };
            let Some(held) = wanted.held() else { continue };
            // The server's clock may lag a little; and a server that returns with the lease must
            // not keep it unused.
            let (until, reason) = match wanted.spec.renewed_by_itself() {
                false => (BACKOFF_MAX, "its time to live is over"),
                true => (RECOVERY_TIMEOUT * 10, "not renewed in time: its server did not answer"),
            };
            let (server, id) = (held.server, held.id.clone());
            self.give_back(now, server, id, now + until);
            self.lose(now, slot, reason);
        }
        let due: Vec<Slot> = self
            .slots
            .iter()
            .filter(|(_, w)| matches!(w.phase, Phase::Waiting { retry } if retry <= now))
            .map(|(slot, _)| *slot)
            .collect();
        for slot in due {
            self.ask(now, slot);
        }
        let held: Vec<Slot> =
            self.slots.iter().filter(|(_, w)| w.held().is_some()).map(|(slot, _)| *slot).collect();
        for slot in held {
            self.fill(now, slot);
        }
        for server in 0..self.servers.len() {
            if self.gone(server) {
                continue;
            }
            let health = &mut self.servers[server];
            if health.in_flight || health.next > now + COALESCE_WINDOW {
                continue;
            }
            health.in_flight = true;
            health.asked.get_or_insert(now);
            let leases = self
                .slots
                .values()
                .filter(|w| w.spec.renewed_by_itself())
                .filter_map(Wanted::held)
                .filter(|h| h.server == server)
                .map(|h| h.id.clone())
                .collect();
            self.actions.push_back(Action::Renew { server, leases });
        }
    }

    /// Returns when [`Machine::tick`] next has something to do.
    pub fn deadline(&self) -> Option<Time> {
        let lingering = self.slots.values().filter_map(|w| Some(w.unused? + USER_LINGER_TIMEOUT));
        let drains = self.slots.values().filter_map(|w| self.servers[w.held()?.server].drained);
        let slots = self.slots.values().filter_map(|wanted| match &wanted.phase {
            Phase::Waiting { retry } => Some(*retry),
            Phase::Allocating => None,
            Phase::Held(held) => {
                let fill = held.missed + STOCK_TARGET > held.stock.len() && !held.taking;
                let ends = wanted.warns_at().unwrap_or(held.expires);
                Some(if fill { ends.min(held.take_again) } else { ends })
            }
        });
        let asked = |server: &usize| !self.servers[*server].in_flight && !self.gone(*server);
        let servers = (0..self.servers.len()).filter(asked).map(|server| self.servers[server].next);
        let releases = self.releasing.iter().filter(|r| !r.in_flight).map(|r| r.retry);
        slots.chain(servers).chain(releases).chain(lingering).chain(drains).min()
    }

    fn tell(&mut self, change: Change) {
        self.actions.push_back(Action::Tell(change));
    }

    fn by_key(&self, key: &str) -> Option<Slot> {
        self.slots.iter().find(|(_, w)| !w.spec.once && w.spec.key == key).map(|(slot, _)| *slot)
    }
}
