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
        request: control::AllocateRequest,
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
                {
                    if held.state != state {
                        held.state = state;
                        self.tell(Change::Changed { slot });
                    }
                }
            }
            Some(Event::WorkersReady(_)) => {
                if let Some(Phase::Held(held)) = self.slots.get_mut(&slot).map(|w| &mut w.phase) {
                    held.take_again = now;
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
                held.take_again = now + backoff(&mut self.rng, held.take_attempt);
            }
            Err(error) => {
                held.take_attempt += 1;
                held.take_again = now + backoff(&mut self.rng, held.take_attempt);
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
            self.lose(now, slot, "it was not renewed in time: its server did not answer");
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
        // The server of the last lease first, then those that answer, then the others, each group in random order.
        self.rng.shuffle(&mut servers);
        servers.sort_by_key(|i| (wanted.last_server != Some(*i), self.servers[*i].trouble.is_some()));
        let request_id = match &wanted.spec.request_id {
            Some(id) if wanted.generation == 0 => id.clone(),
            _ => format!("{}/{}/{}", self.boot_id, wanted.spec.key, wanted.generation),
        };
        let request = wanted.spec.request(request_id, &self.boot_id, &self.machine_id, &wanted.sticky);
        wanted.phase = Phase::Allocating;
        self.actions.push_back(Action::Allocate { slot, servers, request });
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
