//! The life of every lease as a plain state machine: no I/O, no clock and no randomness of its own.
//!
//! What happens comes in as method calls with the time of day; what is to be done goes out as [`Action`]s. Time is
//! whatever monotonic clock the caller has, as a [`Duration`] since some start.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use gpusession_proto::control;

use super::{Change, LeaseState, Owner, Spec};
use crate::pool::{PoolError, Trouble};

/// A point on the caller's monotonic clock.
pub type Time = Duration;

/// How often a server that holds leases hears from this client.
pub const HEARTBEAT: Duration = Duration::from_secs(2);
/// How often a server without leases of ours is asked whether it is there.
pub const HEARTBEAT_IDLE: Duration = Duration::from_secs(30);
/// Silence after which a server is suspect.
pub const SUSPECT: Duration = Duration::from_secs(10);
/// Silence after which a server counts as gone.
pub const OFFLINE: Duration = Duration::from_secs(60);
/// First pause after a failure.
const RETRY_MIN: Duration = Duration::from_secs(1);
/// Longest pause between tries.
const RETRY_MAX: Duration = Duration::from_secs(30);
/// Longest pause between tries to fill a lease's stock of workers: programs wait for it.
const TAKE_RETRY_MAX: Duration = Duration::from_secs(2);
/// Workers kept in stock for a lease, so that a process's grant needs no round trip.
const SPARE: usize = 1;
/// Most workers asked for at once.
const TAKE_MAX: usize = 16;

/// What one wanted lease is called inside the daemon; never reused.
pub type Slot = u64;

/// What the caller of the machine has to do.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Ask the servers, in this order, for a lease; answer with [`Machine::allocated`].
    Allocate {
        /// For which slot.
        slot: Slot,
        /// Indices of the servers to ask.
        servers: Vec<usize>,
        /// The request.
        request: Box<control::AllocateRequest>,
    },
    /// Send a heartbeat; answer with [`Machine::renewed`].
    Renew {
        /// To which server.
        server: usize,
        /// The leases that it holds for us.
        leases: Vec<String>,
    },
    /// Give a lease back; answer with [`Machine::released`].
    Release {
        /// Which server holds it.
        server: usize,
        /// Lease id.
        lease: String,
    },
    /// Take workers out of a lease's stock; answer with [`Machine::workers`].
    TakeWorkers {
        /// For which slot.
        slot: Slot,
        /// Which server holds it.
        server: usize,
        /// Lease id.
        lease: String,
        /// How many.
        count: u32,
        /// How many processes wait for one.
        waiting: u32,
    },
    /// Tell the world.
    Tell(Change),
}

/// A lease that a server holds for us.
#[derive(Debug, Clone)]
pub struct Held {
    /// As the server sent it.
    pub lease: control::Lease,
    /// Index of the server.
    pub server: usize,
    /// Active, idle, parked or draining.
    pub state: LeaseState,
    /// When it was granted.
    pub since: Time,
    /// When it ends unless it is renewed.
    pub expires: Time,
    /// Workers ready to be granted.
    pub stock: VecDeque<control::Worker>,
    taking: bool,
    take_again: Time,
    take_attempt: u32,
    /// Processes that found the stock empty since it was last filled.
    missed: usize,
}

/// Where a slot is in its life.
#[derive(Debug, Clone)]
pub enum Phase {
    /// Not held; the next try is due at `retry`.
    Waiting {
        /// When the next try is due.
        retry: Time,
    },
    /// A request is on its way.
    Allocating,
    /// Held.
    Held(Box<Held>),
}

/// One wanted lease.
#[derive(Debug, Clone)]
pub struct Wanted {
    /// What is wanted.
    pub spec: Spec,
    /// Where it is in its life.
    pub phase: Phase,
    /// Why the last try failed.
    pub trouble: Option<PoolError>,
    /// When it was first wanted.
    pub since: Time,
    attempt: u32,
    generation: u32,
    /// GPUs of the lease before this one.
    sticky: Vec<String>,
    last_server: Option<usize>,
}

impl Wanted {
    /// The lease, if it is held.
    pub fn held(&self) -> Option<&Held> {
        match &self.phase {
            Phase::Held(held) => Some(held),
            _ => None,
        }
    }
}

/// What is known of a server's health.
#[derive(Debug, Clone, Default)]
pub struct Health {
    /// Last time it answered.
    pub answered: Option<Time>,
    /// When the silence began to be counted.
    pub asked: Option<Time>,
    /// Why the last call failed.
    pub trouble: Option<PoolError>,
    in_flight: bool,
    next: Time,
}

#[derive(Debug)]
struct Releasing {
    server: usize,
    lease: String,
    retry: Time,
    attempt: u32,
    give_up: Time,
    in_flight: bool,
}

/// See the module.
#[derive(Debug)]
pub struct Machine {
    slots: BTreeMap<Slot, Wanted>,
    servers: Vec<Health>,
    names: Vec<Vec<String>>,
    releasing: Vec<Releasing>,
    next_slot: Slot,
    boot_id: String,
    machine_id: String,
    rng: fastrand::Rng,
    actions: VecDeque<Action>,
    /// Why no server is known.
    notice: String,
}

impl Machine {
    /// A machine that knows no server yet.
    pub fn new(boot_id: String, machine_id: String, rng: fastrand::Rng) -> Self {
        Self {
            slots: BTreeMap::new(),
            servers: Vec::new(),
            names: Vec::new(),
            releasing: Vec::new(),
            next_slot: 1,
            boot_id,
            machine_id,
            rng,
            actions: VecDeque::new(),
            notice: "no server of the pool is known".into(),
        }
    }

    /// Learns of a server, called by its address; its index.
    pub fn add_server(&mut self, now: Time, address: String) -> usize {
        self.servers.push(Health { next: now, ..Health::default() });
        self.names.push(vec![address]);
        for wanted in self.slots.values_mut() {
            if let Phase::Waiting { retry } = &mut wanted.phase {
                *retry = now;
            }
        }
        self.servers.len() - 1
    }

    /// Says why no server is known.
    pub fn set_notice(&mut self, now: Time, notice: String) {
        self.notice = notice;
        for wanted in self.slots.values_mut() {
            if let Phase::Waiting { retry } = &mut wanted.phase {
                *retry = now;
            }
        }
    }

    /// The next thing to do, until there is none.
    pub fn next_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// Whether there is something to do.
    pub fn has_actions(&self) -> bool {
        !self.actions.is_empty()
    }

    /// Every wanted lease.
    pub fn slots(&self) -> impl Iterator<Item = (Slot, &Wanted)> {
        self.slots.iter().map(|(slot, wanted)| (*slot, wanted))
    }

    /// One wanted lease.
    pub fn slot(&self, slot: Slot) -> Option<&Wanted> {
        self.slots.get(&slot)
    }

    /// Health of a server.
    pub fn health(&self, server: usize) -> &Health {
        &self.servers[server]
    }

    /// Leases that are being given back and not yet known to be gone.
    pub fn releases_pending(&self) -> usize {
        self.releasing.len()
    }

    /// Learns another name of a server.
    pub fn name_server(&mut self, server: usize, name: &str) {
        let names = &mut self.names[server];
        if !name.is_empty() && !names.iter().any(|n| n == name) {
            names.push(name.to_owned());
        }
    }

    /// Wants a lease from now on.
    pub fn want(&mut self, now: Time, spec: Spec) -> Slot {
        let slot = self.next_slot;
        self.next_slot += 1;
        let sticky = spec.sticky.clone();
        let wanted = Wanted {
            spec,
            phase: Phase::Waiting { retry: now },
            trouble: None,
            since: now,
            attempt: 0,
            generation: 0,
            sticky,
            last_server: None,
        };
        self.slots.insert(slot, wanted);
        self.tell(Change::New { slot });
        self.tick(now);
        slot
    }

    /// A lease is not wanted any more.
    pub fn release(&mut self, now: Time, slot: Slot, reason: &str) {
        let Some(wanted) = self.slots.remove(&slot) else { return };
        if let Phase::Held(held) = wanted.phase {
            let id = held.lease.id.clone();
            self.give_back(now, held.server, id, held.expires);
        }
        // A request under way answers into a slot that is gone: `allocated` gives that lease back.
        self.tell(Change::Removed { slot, reason: reason.to_owned(), lost: false });
    }

    fn give_back(&mut self, now: Time, server: usize, lease: String, give_up: Time) {
        let give_up = give_up.max(now + RETRY_MIN);
        self.releasing.push(Releasing { server, lease, retry: now, attempt: 0, give_up, in_flight: false });
        self.run_releases(now);
    }

    /// Answers [`Action::Allocate`].
    pub fn allocated(&mut self, now: Time, slot: Slot, result: Result<(usize, control::Lease), PoolError>) {
        let Some(wanted) = self.slots.get_mut(&slot).filter(|w| matches!(w.phase, Phase::Allocating)) else {
            if let Ok((server, lease)) = result {
                let expires = now + Duration::from_micros(lease.ttl_usec);
                self.give_back(now, server, lease.id, expires);
            }
            return;
        };
        match result {
            Ok((server, mut lease)) => {
                let stock = std::mem::take(&mut lease.workers).into();
                wanted.attempt = 0;
                wanted.trouble = None;
                wanted.last_server = Some(server);
                wanted.sticky = lease.devices.iter().map(|d| d.uuid.clone()).collect();
                wanted.phase = Phase::Held(Box::new(Held {
                    expires: now + Duration::from_micros(lease.ttl_usec),
                    lease,
                    server,
                    state: LeaseState::Active,
                    since: now,
                    stock,
                    taking: false,
                    take_again: now,
                    take_attempt: 0,
                    missed: 0,
                }));
                let health = &mut self.servers[server];
                health.answered = Some(now);
                health.trouble = None;
                health.next = health.next.min(now + HEARTBEAT);
                self.tell(Change::Granted { slot });
                self.fill(now, slot);
            }
            Err(error) => {
                if wanted.spec.once {
                    self.slots.remove(&slot);
                    self.tell(Change::Failed { slot, error });
                    return;
                }
                wanted.attempt += 1;
                let pause = backoff(&mut self.rng, wanted.attempt);
                wanted.trouble = Some(error);
                wanted.phase = Phase::Waiting { retry: now + pause };
                self.tell(Change::Changed { slot });
            }
        }
    }

    /// Answers [`Action::Renew`].
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
                health.next = now + if busy { HEARTBEAT } else { HEARTBEAT_IDLE };
                if before {
                    self.tell(Change::Server { server });
                }
                for renewed in leases.into_iter().filter(|l| asked.contains(&l.id)) {
                    self.one_renewed(now, server, renewed);
                }
            }
            Err(error) => {
                health.trouble = Some(error);
                // A server with leases of ours is asked at the heartbeat's pace; jitter keeps a fleet apart.
                let pace = if busy { HEARTBEAT } else { HEARTBEAT_IDLE };
                health.next = now + pace + pace.mul_f64(self.rng.f64() / 4.0);
                self.tell(Change::Server { server });
            }
        }
    }

    fn one_renewed(&mut self, now: Time, server: usize, renewed: control::RenewedLease) {
        let found = self.slots.iter_mut().find_map(|(slot, wanted)| match &mut wanted.phase {
            Phase::Held(held) if held.server == server && held.lease.id == renewed.id => Some((*slot, held)),
            _ => None,
        });
        let Some((slot, held)) = found else { return };
        if renewed.lost {
            let reason = if renewed.reason.is_empty() {
                "the server does not know it any more"
            } else {
                &renewed.reason
            };
            self.lose(now, slot, reason);
            return;
        }
        if renewed.ttl_usec > 0 {
            held.expires = now + Duration::from_micros(renewed.ttl_usec);
        }
        if let Some(state) = LeaseState::of_server(&renewed.state).filter(|s| *s != held.state) {
            held.state = state;
            self.tell(Change::Changed { slot });
        }
    }

    /// A server says something about a lease.
    pub fn event(&mut self, now: Time, server: usize, event: control::PoolEvent) {
        use control::pool_event::Event;
        let Some(slot) = self.slots.iter().find_map(|(slot, wanted)| {
            wanted.held().filter(|h| h.server == server && h.lease.id == event.lease).map(|_| *slot)
        }) else {
            return;
        };
        match event.event {
            Some(Event::PrepareForLoss(warning)) => self.tell(Change::PrepareForLoss {
                slot,
                left: Duration::from_micros(warning.left_usec),
                reason: warning.reason,
            }),
            Some(Event::Lost(loss)) => self.lose(now, slot, &loss.reason),
            Some(Event::State(change)) => {
                let state = LeaseState::of_server(&change.state);
                if let (Some(Phase::Held(held)), Some(state)) =
                    (self.slots.get_mut(&slot).map(|w| &mut w.phase), state)
                    && held.state != state
                {
                    held.state = state;
                    self.tell(Change::Changed { slot });
                }
            }
            Some(Event::WorkersReady(ready)) => {
                if let Some(Phase::Held(held)) = self.slots.get_mut(&slot).map(|w| &mut w.phase) {
                    held.take_again = now;
                    held.stock.retain(|worker| !ready.ended.contains(&worker.id));
                }
                self.fill(now, slot);
            }
            None => {}
        }
    }

    fn lose(&mut self, now: Time, slot: Slot, reason: &str) {
        let Some(wanted) = self.slots.get_mut(&slot) else { return };
        let id = wanted.held().map(|h| h.lease.id.clone()).unwrap_or_default();
        if wanted.spec.once {
            self.slots.remove(&slot);
        } else {
            wanted.generation += 1;
            wanted.attempt = 0;
            wanted.since = now;
            wanted.trouble = None;
            // A fleet that loses its leases together does not come back in the same instant.
            wanted.phase = Phase::Waiting { retry: now + RETRY_MIN.mul_f64(self.rng.f64()) };
        }
        self.tell(Change::Lost { slot, id, reason: reason.to_owned() });
        if !self.slots.contains_key(&slot) {
            self.tell(Change::Removed { slot, reason: reason.to_owned(), lost: true });
        }
    }

    /// Takes one worker of each of these slots for one process, or none if one of them has none ready.
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

    /// A server is out of reach, perhaps gone and its workers with it: nobody is sent to them any more. Returns them as
    /// (lease, worker), to be ended.
    pub fn disconnected(&mut self, server: usize) -> Vec<(String, control::Worker)> {
        let mut old = Vec::new();
        for wanted in self.slots.values_mut() {
            if let Phase::Held(held) = &mut wanted.phase
                && held.server == server
            {
                old.extend(held.stock.drain(..).map(|worker| (held.lease.id.clone(), worker)));
            }
        }
        old
    }

    /// The server is there again.
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
    }

    /// A process of the lease has ended: a limit that refused workers may have room again.
    pub fn worker_freed(&mut self, now: Time, slot: Slot) {
        if let Some(Phase::Held(held)) = self.slots.get_mut(&slot).map(|w| &mut w.phase) {
            held.take_again = now;
        }
        self.fill(now, slot);
    }

    fn fill(&mut self, now: Time, slot: Slot) {
        let Some(Phase::Held(held)) = self.slots.get_mut(&slot).map(|w| &mut w.phase) else { return };
        let wanted = (held.missed + SPARE).saturating_sub(held.stock.len()).min(TAKE_MAX);
        if wanted == 0 || held.taking || now < held.take_again {
            return;
        }
        held.taking = true;
        let action = Action::TakeWorkers {
            slot,
            server: held.server,
            lease: held.lease.id.clone(),
            count: wanted as u32,
            waiting: held.missed.min(wanted) as u32,
        };
        self.actions.push_back(action);
    }

    /// Answers [`Action::TakeWorkers`].
    pub fn workers(
        &mut self,
        now: Time,
        slot: Slot,
        lease: &str,
        result: Result<Vec<control::Worker>, PoolError>,
    ) {
        let Some(Phase::Held(held)) = self.slots.get_mut(&slot).map(|w| &mut w.phase) else { return };
        if held.lease.id != lease {
            return;
        }
        held.taking = false;
        held.missed = 0;
        match result {
            Ok(workers) if !workers.is_empty() => {
                held.take_attempt = 0;
                held.take_again = now;
                held.stock.extend(workers);
                self.slots.entry(slot).and_modify(|w| w.trouble = None);
                self.tell(Change::Stock { slot });
            }
            Ok(_) => {
                held.take_attempt += 1;
                held.take_again = now + backoff(&mut self.rng, held.take_attempt).min(TAKE_RETRY_MAX);
            }
            Err(error) => {
                held.take_attempt += 1;
                held.take_again = now + backoff(&mut self.rng, held.take_attempt).min(TAKE_RETRY_MAX);
                if error.trouble == Trouble::NoSuchLease {
                    self.lose(now, slot, &error.message);
                } else {
                    self.slots.entry(slot).and_modify(|w| w.trouble = Some(error));
                    self.tell(Change::Stock { slot });
                }
            }
        }
    }

    /// Answers [`Action::Release`].
    pub fn released(&mut self, now: Time, server: usize, lease: &str, result: Result<(), PoolError>) {
        let Some(at) = self.releasing.iter().position(|r| r.server == server && r.lease == lease) else {
            return;
        };
        match result {
            Err(error) if error.trouble.may_pass() => {
                let releasing = &mut self.releasing[at];
                releasing.in_flight = false;
                releasing.attempt += 1;
                releasing.retry = now + backoff(&mut self.rng, releasing.attempt);
                if releasing.retry >= releasing.give_up {
                    self.releasing.swap_remove(at);
                }
            }
            _ => {
                self.releasing.swap_remove(at);
            }
        }
    }

    /// Whether a server is heard: `None` where it was never asked.
    pub fn silent_for(&self, now: Time, server: usize) -> Option<Duration> {
        let health = &self.servers[server];
        let since = health.answered.or(health.asked)?;
        Some(now.saturating_sub(since))
    }

    /// Does what is due.
    pub fn tick(&mut self, now: Time) {
        self.run_releases(now);
        let expired: Vec<Slot> = self
            .slots
            .iter()
            .filter(|(_, w)| w.held().is_some_and(|h| h.expires <= now))
            .map(|(slot, _)| *slot)
            .collect();
        for slot in expired {
            let asked_for = self.slots.get(&slot).is_some_and(|w| !w.spec.renewed_by_itself());
            if let Some(held) = self.slots.get(&slot).filter(|_| asked_for).and_then(Wanted::held) {
                // The server's clock may be a little behind.
                let (server, id) = (held.server, held.lease.id.clone());
                self.give_back(now, server, id, now + RETRY_MAX);
                self.lose(now, slot, "its time is over");
            } else {
                self.lose(now, slot, "it was not renewed in time: its server did not answer");
            }
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
            let health = &mut self.servers[server];
            if health.in_flight || health.next > now {
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
                .map(|h| h.lease.id.clone())
                .collect();
            self.actions.push_back(Action::Renew { server, leases });
        }
    }

    fn ask(&mut self, now: Time, slot: Slot) {
        let Some(wanted) = self.slots.get_mut(&slot) else { return };
        let mut servers: Vec<usize> = (0..self.names.len())
            .filter(|i| {
                wanted.spec.servers.is_empty()
                    || self.names[*i].iter().any(|n| wanted.spec.servers.contains(n))
            })
            .collect();
        if servers.is_empty() {
            let message = match wanted.spec.servers.first() {
                Some(name) => format!("no server of the pool is called {name}"),
                None => self.notice.clone(),
            };
            // Names are learned from the servers themselves, so this may pass.
            self.allocated_nowhere(now, slot, PoolError::new(Trouble::Unreachable, message));
            return;
        }
        // The server of the last lease first, then those that answer, then the others. Machines with the same list
        // spread over its servers; whoever asks once means the order that was given.
        if !wanted.spec.once {
            self.rng.shuffle(&mut servers);
        }
        servers.sort_by_key(|i| (wanted.last_server != Some(*i), self.servers[*i].trouble.is_some()));
        let request_id = match &wanted.spec.request_id {
            Some(id) if wanted.generation == 0 => id.clone(),
            _ => format!("{}/{}/{}", self.boot_id, wanted.spec.key, wanted.generation),
        };
        let request = wanted.spec.request(request_id, &self.boot_id, &self.machine_id, &wanted.sticky);
        wanted.phase = Phase::Allocating;
        self.actions.push_back(Action::Allocate { slot, servers, request: Box::new(request) });
    }

    fn allocated_nowhere(&mut self, now: Time, slot: Slot, error: PoolError) {
        if let Some(wanted) = self.slots.get_mut(&slot) {
            wanted.phase = Phase::Allocating;
        }
        self.allocated(now, slot, Err(error));
    }

    fn run_releases(&mut self, now: Time) {
        for releasing in &mut self.releasing {
            if !releasing.in_flight && releasing.retry <= now {
                releasing.in_flight = true;
                self.actions
                    .push_back(Action::Release { server: releasing.server, lease: releasing.lease.clone() });
            }
        }
    }

    /// When [`Machine::tick`] has something to do next.
    pub fn deadline(&self) -> Option<Time> {
        let slots = self.slots.values().filter_map(|wanted| match &wanted.phase {
            Phase::Waiting { retry } => Some(*retry),
            Phase::Allocating => None,
            Phase::Held(held) => {
                let fill = held.missed + SPARE > held.stock.len() && !held.taking;
                Some(if fill { held.expires.min(held.take_again) } else { held.expires })
            }
        });
        let servers = self.servers.iter().filter(|h| !h.in_flight).map(|h| h.next);
        let releases = self.releasing.iter().filter(|r| !r.in_flight).map(|r| r.retry);
        slots.chain(servers).chain(releases).min()
    }

    /// Who a slot belongs to, for limits.
    pub fn count_owned(&self, uid: u32) -> usize {
        self.slots.values().filter(|w| w.spec.once && w.spec.owner == Owner::Uid(uid)).count()
    }

    fn tell(&mut self, change: Change) {
        self.actions.push_back(Action::Tell(change));
    }
}

/// A pause that doubles with each failed try, with the upper half of it random.
fn backoff(rng: &mut fastrand::Rng, attempt: u32) -> Duration {
    let full = RETRY_MIN.saturating_mul(1 << attempt.saturating_sub(1).min(8)).min(RETRY_MAX);
    full.mul_f64(0.5 + rng.f64() / 2.0)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;
    use crate::config::LeaseConfig;

    fn machine(servers: usize) -> Machine {
        let mut machine = Machine::new("boot".into(), "machine".into(), fastrand::Rng::with_seed(1));
        for i in 0..servers {
            machine.add_server(Duration::ZERO, format!("s{i}:7601"));
        }
        machine
    }

    fn configured(name: &str, gpus: u32) -> Spec {
        Spec::configured(&LeaseConfig { name: name.into(), gpus, ..LeaseConfig::default() }, 0)
    }

    fn actions(machine: &mut Machine) -> Vec<Action> {
        std::iter::from_fn(|| machine.next_action()).collect()
    }

    fn request(actions: &[Action]) -> (Vec<usize>, control::AllocateRequest) {
        let found = actions.iter().find_map(|a| match a {
            Action::Allocate { servers, request, .. } => Some((servers.clone(), (**request).clone())),
            _ => None,
        });
        found.expect("an allocation")
    }

    fn told(actions: &[Action]) -> Vec<Change> {
        let told =
            actions.iter().filter_map(|a| if let Action::Tell(c) = a { Some(c.clone()) } else { None });
        told.collect()
    }

    fn lease(id: &str, workers: u8) -> control::Lease {
        control::Lease {
            id: id.into(),
            ticket_key: vec![1; 32],
            ttl_usec: 600_000_000,
            devices: vec![control::Device { uuid: format!("GPU-{id}"), ..Default::default() }],
            workers: (0..workers)
                .map(|i| control::Worker { id: vec![i; 16], fingerprint: vec![0; 32] })
                .collect(),
            ..Default::default()
        }
    }

    fn unreachable() -> PoolError {
        PoolError::new(Trouble::Unreachable, "no answer")
    }

    const fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn a_configured_lease_is_asked_for_until_it_is_there() {
        let mut m = machine(2);
        let slot = m.want(s(0), configured("a", 1));
        let first = actions(&mut m);
        let (servers, asked) = request(&first);
        assert_eq!(servers.len(), 2);
        assert_eq!(asked.request_id, "boot/configured/a/0");
        let mut last = s(0);
        for attempt in 1..12 {
            m.allocated(last, slot, Err(unreachable()));
            let Phase::Waiting { retry } = m.slot(slot).unwrap().phase else { panic!("waits") };
            let pause = retry - last;
            assert!(pause >= s(1) / 2 && pause <= RETRY_MAX, "attempt {attempt}: {pause:?}");
            m.tick(retry - Duration::from_micros(1));
            assert!(matches!(m.slot(slot).unwrap().phase, Phase::Waiting { .. }));
            m.tick(retry);
            assert!(matches!(m.slot(slot).unwrap().phase, Phase::Allocating));
            last = retry;
            // The same request each time: a lease that was granted to a call whose answer was lost is found again.
            assert_eq!(request(&actions(&mut m)).1.request_id, "boot/configured/a/0");
        }
        m.allocated(last, slot, Ok((1, lease("l1", 1))));
        assert!(told(&actions(&mut m)).contains(&Change::Granted { slot }));
        assert!(m.slot(slot).unwrap().trouble.is_none());
    }

    #[test]
    fn a_lost_lease_is_acquired_anew_with_the_same_gpus_if_possible() {
        let mut m = machine(1);
        let slot = m.want(s(0), configured("a", 1));
        m.allocated(s(0), slot, Ok((0, lease("l1", 1))));
        actions(&mut m);
        let lost = control::RenewedLease {
            id: "l1".into(),
            lost: true,
            reason: "gone".into(),
            ..Default::default()
        };
        m.renewed(s(2), 0, &["l1".into()], Ok(vec![lost]));
        let news = told(&actions(&mut m));
        assert!(news.contains(&Change::Lost { slot, id: "l1".into(), reason: "gone".into() }), "{news:?}");
        m.tick(s(4));
        let (_, asked) = request(&actions(&mut m));
        assert_eq!(asked.sticky, ["GPU-l1"]);
        assert_eq!(asked.request_id, "boot/configured/a/1");
    }

    #[test]
    fn a_lease_that_nobody_renewed_is_lost_when_its_time_is_over() {
        let mut m = machine(1);
        let slot = m.want(s(0), configured("a", 1));
        m.allocated(s(0), slot, Ok((0, lease("l1", 1))));
        m.tick(s(599));
        assert!(m.slot(slot).unwrap().held().is_some());
        m.renewed(s(599), 0, &["l1".into()], Err(unreachable()));
        m.tick(s(600));
        assert!(m.slot(slot).unwrap().held().is_none());
        assert!(told(&actions(&mut m)).iter().any(|c| matches!(c, Change::Lost { .. })));
    }

    #[test]
    fn a_lease_with_a_time_to_live_ends_unless_somebody_renews_it() {
        let mut m = machine(1);
        let mut spec = Spec::requested("r".into(), 1000);
        spec.ttl = Some(s(600));
        let slot = m.want(s(0), spec);
        m.allocated(s(0), slot, Ok((0, lease("l1", 1))));
        actions(&mut m);
        m.renewed(s(1), 0, &[], Ok(vec![]));
        m.tick(s(100));
        assert!(
            actions(&mut m).contains(&Action::Renew { server: 0, leases: vec![] }),
            "not by the heartbeat"
        );
        let renewed = control::RenewedLease { id: "l1".into(), ttl_usec: 600_000_000, ..Default::default() };
        m.renewed(s(500), 0, &["l1".into()], Ok(vec![renewed]));
        m.tick(s(1099));
        assert!(m.slot(slot).is_some());
        actions(&mut m);
        m.tick(s(1100));
        assert!(m.slot(slot).is_none());
        assert!(actions(&mut m).contains(&Action::Release { server: 0, lease: "l1".into() }));
    }

    #[test]
    fn heartbeats_are_fast_while_leases_are_held_and_slow_otherwise() {
        let mut m = machine(1);
        m.tick(s(0));
        assert!(actions(&mut m).contains(&Action::Renew { server: 0, leases: vec![] }));
        m.renewed(s(0), 0, &[], Ok(vec![]));
        assert_eq!(m.deadline(), Some(HEARTBEAT_IDLE));
        let slot = m.want(s(1), configured("a", 1));
        m.allocated(s(1), slot, Ok((0, lease("l1", 1))));
        actions(&mut m);
        m.tick(s(3));
        assert!(actions(&mut m).contains(&Action::Renew { server: 0, leases: vec!["l1".into()] }));
        m.tick(s(4));
        assert!(actions(&mut m).is_empty(), "one heartbeat at a time");
    }

    #[test]
    fn a_request_of_a_user_is_tried_once() {
        let mut m = machine(1);
        let slot = m.want(s(0), Spec::requested("r".into(), 1000));
        m.allocated(s(0), slot, Err(PoolError::new(Trouble::NoCapacity, "full")));
        let news = told(&actions(&mut m));
        assert!(
            matches!(&news[..], [.., Change::Failed { error, .. }] if error.trouble == Trouble::NoCapacity)
        );
        assert!(m.slot(slot).is_none());
    }

    #[test]
    fn a_lease_that_comes_after_its_release_is_given_back() {
        let mut m = machine(1);
        let slot = m.want(s(0), configured("a", 1));
        m.release(s(0), slot, "test");
        actions(&mut m);
        m.allocated(s(1), slot, Ok((0, lease("late", 1))));
        assert!(actions(&mut m).contains(&Action::Release { server: 0, lease: "late".into() }));
        m.released(s(1), 0, "late", Err(unreachable()));
        assert_eq!(m.releases_pending(), 1);
        let again = m.deadline().unwrap();
        m.tick(again.max(s(3)));
        assert!(actions(&mut m).contains(&Action::Release { server: 0, lease: "late".into() }));
        m.released(s(3), 0, "late", Ok(()));
        assert_eq!(m.releases_pending(), 0);
    }

    #[test]
    fn a_worker_is_kept_in_stock() {
        let mut m = machine(1);
        let slot = m.want(s(0), configured("a", 1));
        m.allocated(s(0), slot, Ok((0, lease("l1", 1))));
        actions(&mut m);
        assert_eq!(m.take(s(0), &[slot]).unwrap().len(), 1, "no round trip");
        let refill = Action::TakeWorkers { slot, server: 0, lease: "l1".into(), count: 1, waiting: 0 };
        assert!(actions(&mut m).contains(&refill));
        // Three processes find nothing: one call brings workers for all of them and one spare.
        for _ in 0..3 {
            assert!(m.take(s(0), &[slot]).is_none());
        }
        assert!(actions(&mut m).is_empty(), "one call at a time");
        m.workers(s(0), slot, "l1", Ok(lease("l1", 1).workers));
        assert!(m.take(s(0), &[slot]).is_some());
    }

    #[test]
    fn a_worker_that_has_ended_in_stock_is_not_granted() {
        let mut m = machine(1);
        let slot = m.want(s(0), configured("a", 1));
        m.allocated(s(0), slot, Ok((0, lease("l1", 2))));
        actions(&mut m);
        let ready = control::WorkersReady { stock: 2, ended: vec![vec![0; 16]] };
        let event = Some(control::pool_event::Event::WorkersReady(ready));
        m.event(s(1), 0, control::PoolEvent { lease: "l1".into(), event });
        assert_eq!(m.take(s(1), &[slot]).unwrap()[0].id, [1; 16]);
        assert!(m.take(s(1), &[slot]).is_none());
    }

    #[test]
    fn stock_of_before_an_outage_is_not_granted() {
        let mut m = machine(1);
        let slot = m.want(s(0), configured("a", 1));
        m.allocated(s(0), slot, Ok((0, lease("l1", 2))));
        actions(&mut m);
        let old = m.disconnected(0);
        assert_eq!(
            old.iter().map(|(lease, w)| (lease.as_str(), w.id[0])).collect::<Vec<_>>(),
            [("l1", 0), ("l1", 1)]
        );
        assert!(m.take(s(9), &[slot]).is_none());
        m.workers(s(9), slot, "l1", Err(unreachable()));
        actions(&mut m);
        m.reconnected(s(9), 0);
        let todo = actions(&mut m);
        assert!(todo.iter().any(|a| matches!(a, Action::TakeWorkers { .. })), "{todo:?}");
    }

    #[test]
    fn a_process_gets_workers_of_all_its_leases_or_none() {
        let mut m = machine(1);
        let a = m.want(s(0), configured("a", 1));
        let b = m.want(s(0), configured("b", 1));
        m.allocated(s(0), a, Ok((0, lease("la", 1))));
        m.allocated(s(0), b, Ok((0, lease("lb", 0))));
        assert!(m.take(s(0), &[a, b]).is_none());
        assert_eq!(m.slot(a).unwrap().held().unwrap().stock.len(), 1);
        m.workers(s(0), b, "lb", Ok(lease("lb", 2).workers));
        assert_eq!(m.take(s(0), &[a, b]).unwrap().len(), 2);
    }

    #[test]
    fn a_server_is_chosen_by_the_name_it_tells() {
        let mut m = machine(2);
        let mut spec = configured("a", 1);
        spec.servers = vec!["gpu-b".into()];
        let slot = m.want(s(0), spec);
        assert!(m.slot(slot).unwrap().trouble.as_ref().unwrap().message.contains("gpu-b"));
        actions(&mut m);
        m.name_server(1, "gpu-b");
        m.tick(s(2));
        assert_eq!(request(&actions(&mut m)).0, [1]);
    }

    /// A pool that the machine's actions are played against, with answers delayed and failing at random.
    #[derive(Default)]
    struct World {
        free: Vec<u32>,
        leases: HashMap<String, (usize, u32)>,
        by_request: HashMap<String, String>,
        counter: u32,
    }

    impl World {
        fn allocate(
            &mut self,
            servers: &[usize],
            request: &control::AllocateRequest,
        ) -> Option<(usize, String)> {
            for server in servers {
                if let Some(id) = self.by_request.get(&request.request_id)
                    && self.leases.get(id).is_some_and(|(s, _)| s == server)
                {
                    return Some((*server, id.clone()));
                }
                if self.free[*server] >= request.gpus {
                    self.free[*server] -= request.gpus;
                    self.counter += 1;
                    let id = format!("w{}", self.counter);
                    self.leases.insert(id.clone(), (*server, request.gpus));
                    self.by_request.insert(request.request_id.clone(), id.clone());
                    return Some((*server, id));
                }
            }
            None
        }

        fn release(&mut self, id: &str) {
            if let Some((server, gpus)) = self.leases.remove(id) {
                self.free[server] += gpus;
            }
        }
    }

    #[derive(Debug, Clone)]
    enum Step {
        Want(u32, bool),
        Release(usize),
        Advance(u64),
        Lose(usize),
        /// Calls fail from now on, or answer again.
        Broken(bool),
        Take,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (1u32..4, any::<bool>()).prop_map(|(gpus, once)| Step::Want(gpus, once)),
            (0usize..8).prop_map(Step::Release),
            (1u64..40_000).prop_map(Step::Advance),
            (0usize..8).prop_map(Step::Lose),
            any::<bool>().prop_map(Step::Broken),
            Just(Step::Take),
        ]
    }

    /// Plays out everything that is to be done; every action is answered.
    fn play(m: &mut Machine, world: &mut World, now: Time, broken: bool) {
        let mut rounds = 0;
        while let Some(action) = m.next_action() {
            rounds += 1;
            assert!(rounds < 10_000, "the machine never rests");
            match action {
                Action::Allocate { slot, servers, request } => {
                    let answer = if broken {
                        Err(unreachable())
                    } else {
                        match world.allocate(&servers, &request) {
                            Some((server, id)) => Ok((server, lease(&id, 1))),
                            None => Err(PoolError::new(Trouble::NoCapacity, "full")),
                        }
                    };
                    m.allocated(now, slot, answer);
                }
                Action::Renew { server, leases } => {
                    let answer = if broken {
                        Err(unreachable())
                    } else {
                        let renew = |id: &String| control::RenewedLease {
                            id: id.clone(),
                            lost: !world.leases.contains_key(id),
                            ttl_usec: 600_000_000,
                            ..Default::default()
                        };
                        Ok(leases.iter().map(renew).collect())
                    };
                    m.renewed(now, server, &leases, answer);
                }
                Action::Release { server, lease } => {
                    if !broken {
                        world.release(&lease);
                    }
                    m.released(now, server, &lease, if broken { Err(unreachable()) } else { Ok(()) });
                }
                Action::TakeWorkers { slot, lease: id, count, .. } => {
                    let answer = if broken {
                        Err(unreachable())
                    } else if world.leases.contains_key(&id) {
                        Ok(lease(&id, u8::try_from(count).unwrap()).workers)
                    } else {
                        Err(PoolError::new(Trouble::NoSuchLease, "gone"))
                    };
                    m.workers(now, slot, &id, answer);
                }
                Action::Tell(_) => {}
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]
        /// Whatever happens, nothing is held that nobody knows of, and in the end everyone has what there is.
        #[test]
        fn leases_are_never_leaked_and_never_given_up(steps in proptest::collection::vec(step(), 1..60)) {
            let mut m = machine(2);
            let mut world = World { free: vec![4, 2], ..World::default() };
            let mut now = s(0);
            let mut broken = false;
            let mut names = 0;
            for step in steps {
                match step {
                    Step::Want(gpus, once) => {
                        names += 1;
                        let mut spec = configured(&format!("l{names}"), gpus);
                        spec.once = once;
                        m.want(now, spec);
                    }
                    Step::Release(n) => {
                        let slot = m.slots().map(|(slot, _)| slot).nth(n);
                        if let Some(slot) = slot {
                            m.release(now, slot, "test");
                        }
                    }
                    Step::Advance(ms) => {
                        now += Duration::from_millis(ms);
                        m.tick(now);
                    }
                    Step::Lose(n) => {
                        let mut ids: Vec<_> = world.leases.keys().cloned().collect();
                        ids.sort();
                        if let Some(id) = ids.get(n) {
                            world.release(id);
                        }
                    }
                    Step::Broken(now_broken) => broken = now_broken,
                    Step::Take => {
                        let held: Vec<_> = m.slots().filter(|(_, w)| w.held().is_some()).map(|(s, _)| s).collect();
                        if let Some(slot) = held.first() {
                            m.take(now, &[*slot]);
                        }
                    }
                }
                play(&mut m, &mut world, now, broken);
                // A machine that has nothing to do says when it has.
                prop_assert!(m.deadline().is_some());
            }
            // The pool answers again: time passes, everything settles.
            for _ in 0..200 {
                now += s(5);
                m.tick(now);
                play(&mut m, &mut world, now, false);
            }
            let held: Vec<(String, usize)> =
                m.slots().filter_map(|(_, w)| w.held()).map(|h| (h.lease.id.clone(), h.server)).collect();
            for (id, server) in &held {
                prop_assert_eq!(world.leases.get(id).map(|(s, _)| s), Some(server), "{} is held but gone", id);
            }
            prop_assert_eq!(world.leases.len(), held.len(), "a lease was leaked");
            prop_assert_eq!(m.releases_pending(), 0);
            for (_, wanted) in m.slots() {
                let fits = world.free.iter().any(|free| *free >= wanted.spec.gpus);
                prop_assert!(wanted.held().is_some() || !fits, "{} waits although it fits", wanted.spec.name);
            }
        }
    }
}
