//! The life of every lease as a plain state machine: no I/O, no clock, no randomness of its own.
//!
//! Events come in as method calls with the current time; work to do goes out as [`Action`]s. Times
//! are [`Duration`]s since an arbitrary start of the caller's monotonic clock.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use gpusession_proto::control;
use serde::{Deserialize, Serialize};

use super::{Change, LeaseState, Owner, Spec};
use crate::config::{Class, Sharing};
use crate::login::Session;
use crate::pool::{PoolError, Trouble};
use crate::values::Memory;

/// A point on the caller's monotonic clock.
pub type Time = Duration;

/// Interval between heartbeats to a server that holds leases of this client.
pub const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(2);
/// A heartbeat due within this window is sent on the current wake-up.
const COALESCE_WINDOW: Duration = Duration::from_millis(250);
/// Interval between heartbeats to a server that holds no lease of this client.
pub const IDLE_HEARTBEAT_INTERVAL: Duration = Duration::from_secs(30);
/// Silence after which a server is suspect.
pub const SUSPECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Silence after which a server is offline.
pub const OFFLINE_TIMEOUT: Duration = Duration::from_secs(60);
/// Pause after the first failure.
const BACKOFF_MIN: Duration = Duration::from_secs(1);
/// Longest pause between tries.
const BACKOFF_MAX: Duration = Duration::from_secs(30);
/// Longest pause between tries to fill a lease's stock: programs wait for its workers.
const BACKOFF_TAKE_MAX: Duration = Duration::from_secs(2);
/// Time that a lease of class `user` outlives its user's last session and process.
pub const USER_LINGER_TIMEOUT: Duration = Duration::from_secs(30);
/// Time that a boot lease defers to boot leases listed before it.
const BOOT_ORDER_DELAY: Duration = Duration::from_secs(1);
/// Time after a restart during which only the server that held a lease is asked for it.
const RECOVERY_TIMEOUT: Duration = OFFLINE_TIMEOUT;
/// Workers kept in stock for a lease, so that a process's grant needs no round trip.
const SPARE: usize = 1;
/// Most workers that one call asks for.
const TAKE_MAX: usize = 16;
/// Exited workers that are remembered, in case the reply that brings them is still in flight.
const ENDED_MAX: usize = 64;

/// A wanted lease's number inside the daemon; never reused.
pub type Slot = u64;

/// Work for the caller of the machine.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Ask the servers, in this order, for a lease; answer with [`Machine::allocated`].
    Allocate {
        slot: Slot,
        /// Indices of the servers.
        servers: Vec<usize>,
        request: Box<control::AllocateRequest>,
    },
    /// Send a heartbeat; answer with [`Machine::renewed`].
    Renew {
        server: usize,
        /// Ids of the leases that the server holds for this client.
        leases: Vec<String>,
    },
    /// Release a lease; answer with [`Machine::released`].
    Release { server: usize, lease: String },
    /// Withdraw a pending request from a server's queue; answer with [`Machine::released`].
    Withdraw { server: usize, request_id: String },
    /// Take workers out of a lease's stock; answer with [`Machine::workers`].
    TakeWorkers {
        slot: Slot,
        server: usize,
        lease: String,
        count: u32,
        /// Processes that wait for a worker.
        waiting: u32,
    },
    /// Report to a server that the process of a worker has exited.
    EndWorker { slot: Slot, server: usize, lease: String, worker: Vec<u8> },
    /// Announce a change to the daemon's other parts.
    Tell(Change),
}

/// A lease that a server holds for this client.
#[derive(Debug, Clone)]
pub struct Held {
    /// The server's description.
    pub lease: control::Lease,
    /// Index of the server.
    pub server: usize,
    /// Active, idle, parked or draining.
    pub state: LeaseState,
    /// Place in the queue, from 1, and the queue's length, of a parked lease whose programs need
    /// its GPUs.
    pub place: Option<(u32, u32)>,
    /// When the server allocated it.
    pub since: Time,
    /// When it expires unless it is renewed.
    pub expires: Time,
    /// Workers ready to be granted.
    pub stock: VecDeque<control::Worker>,
    /// Since when no program uses it, according to the server.
    pub idle_since: Option<Time>,
    /// Whether the owner was warned that the time to live ends.
    warned: bool,
    taking: bool,
    take_again: Time,
    take_attempt: u32,
    /// Processes that found the stock empty since it was last filled.
    missed: usize,
    /// The number of those processes at the start of the latest call for workers.
    asked_for: usize,
    /// A call on behalf of no process was refused, so the next process asks at once.
    spare_refused: bool,
    /// Exited workers, the latest last.
    ended: VecDeque<Vec<u8>>,
}

impl Held {
    /// Records a call that brought no worker.
    ///
    /// Processes that came after the call began do not wait for the backoff.
    fn tried(&mut self, now: Time, rng: &mut fastrand::Rng) {
        self.take_attempt += 1;
        let pause = backoff(rng, self.take_attempt).min(BACKOFF_TAKE_MAX);
        self.take_again = if self.missed > 0 && self.asked_for == 0 { now } else { now + pause };
    }

    /// Returns why the lease waits for its GPUs, if it does.
    pub fn waits(&self) -> Option<PoolError> {
        let place = Some(self.place?);
        Some(PoolError { place, ..PoolError::new(Trouble::NoCapacity, "other leases have its GPUs now") })
    }
}

/// Phase of a slot.
#[derive(Debug, Clone)]
pub enum Phase {
    Waiting {
        /// When the next try is due.
        retry: Time,
    },
    /// A request is in flight.
    Allocating,
    /// A server holds the lease for this client.
    Held(Box<Held>),
}

/// A lease that this client wants.
#[derive(Debug, Clone)]
pub struct Wanted {
    pub spec: Spec,
    pub phase: Phase,
    /// Why the last try failed.
    pub trouble: Option<PoolError>,
    /// When it was first wanted.
    pub since: Time,
    /// Number of processes that use it.
    pub processes: usize,
    attempt: u32,
    /// Until when it defers to leases listed before it.
    turn: Option<Time>,
    /// UUIDs of the GPUs that its predecessor had.
    sticky: Vec<String>,
    last_server: Option<usize>,
    /// Indices of the servers that were asked last.
    asked: Vec<usize>,
    recovery: Option<Recovery>,
    /// Since when a lease of class `user` has neither a session nor a process.
    unused: Option<Time>,
}

/// A lease that an earlier daemon held.
#[derive(Debug, Clone)]
struct Recovery {
    id: String,
    server: String,
    until: Time,
    /// When a lease with a time to live expires.
    expires: Time,
    /// Workers whose process exited before the server confirmed the lease.
    ended: Vec<Vec<u8>>,
    /// Workers of the processes that ran at the start.
    used: Vec<Vec<u8>>,
}

/// A lease that outlives the daemon.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SavedLease {
    pub spec: Spec,
    pub id: String,
    /// Name of the server that holds it.
    pub server: String,
    /// When it expires; zero for a lease that the heartbeat renews.
    pub expires: Time,
}

/// State that the next daemon of the same boot needs.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Saved {
    pub leases: Vec<SavedLease>,
    /// How often each wanted lease was given up or lost; part of its request id, so that no request
    /// is repeated by mistake.
    pub generations: BTreeMap<String, u32>,
    /// See [`Machine::preallocate`].
    pub preallocated: u32,
}

impl Wanted {
    /// Returns when the owner of a requested time to live is warned of its end.
    ///
    /// That is ten minutes before the end, or a quarter of the time to live if that is less.
    fn warns_at(&self) -> Option<Time> {
        let held = self.held().filter(|h| !h.warned && !self.spec.renewed_by_itself())?;
        let before = Duration::from_secs(600).min(self.spec.ttl.unwrap_or_default() / 4);
        Some(held.expires.saturating_sub(before))
    }

    /// Returns the lease while a server holds it.
    pub fn held(&self) -> Option<&Held> {
        match &self.phase {
            Phase::Held(held) => Some(held),
            _ => None,
        }
    }
}

/// Health of a server, as its answers show it.
#[derive(Debug, Clone, Default)]
pub struct Health {
    /// When it last answered.
    pub answered: Option<Time>,
    /// When the daemon first sent it a heartbeat: silence counts from then on until the first
    /// answer.
    pub asked: Option<Time>,
    /// Why the last call failed; `None` after a success.
    pub trouble: Option<PoolError>,
    /// GPUs that were free at its last description.
    free: u32,
    in_flight: bool,
    next: Time,
    /// When this client releases its leases there; `Some` excludes it from new requests.
    drained: Option<Time>,
}

#[derive(Debug)]
struct Releasing {
    server: usize,
    /// Id of a lease, or of a pending request.
    id: String,
    waits: bool,
    retry: Time,
    attempt: u32,
    give_up: Time,
    in_flight: bool,
    /// Slot that asks again once this lease is released.
    makes_room_for: Option<Slot>,
}

/// The state machine of all leases of this client.
#[derive(Debug)]
pub struct Machine {
    slots: BTreeMap<Slot, Wanted>,
    servers: Vec<Health>,
    names: Vec<Vec<String>>,
    releasing: Vec<Releasing>,
    /// Released leases of an earlier daemon as (server name, lease id), until that server is known.
    unplaced: Vec<(String, String)>,
    /// Dropped requests whose reply is in flight: request id, and the servers that were asked.
    unwanted: BTreeMap<Slot, (String, Vec<usize>)>,
    next_slot: Slot,
    boot_id: String,
    machine_id: String,
    rng: fastrand::Rng,
    actions: VecDeque<Action>,
    /// Why no server is known.
    notice: String,
    /// `[[lease]]` tables of the classes `session` and `user`.
    templates: Vec<Spec>,
    sessions: BTreeMap<String, Arc<Session>>,
    generations: BTreeMap<String, u32>,
    preallocated: u32,
}

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
        }
    }

    /// Adds a server, named by its address, and returns its index.
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

    pub fn slot(&self, slot: Slot) -> Option<&Wanted> {
        self.slots.get(&slot)
    }

    pub fn health(&self, server: usize) -> &Health {
        &self.servers[server]
    }

    /// Number of releases that their servers have not confirmed yet.
    pub fn releases_pending(&self) -> usize {
        self.releasing.len()
    }

    /// Records how many of a server's GPUs are free.
    pub fn described(&mut self, now: Time, server: usize, free: u32) {
        self.servers[server].free = free;
        self.next_turn(now);
    }

    /// Lets leases that defer to others check at once whether they still have to.
    fn next_turn(&mut self, now: Time) {
        for wanted in self.slots.values_mut().filter(|w| w.turn.is_some()) {
            if let Phase::Waiting { retry } = &mut wanted.phase {
                *retry = now;
            }
        }
    }

    /// Adds a name of a server; leases that waited for a server of this name are asked for.
    pub fn name_server(&mut self, now: Time, server: usize, name: &str) {
        let names = &mut self.names[server];
        if !name.is_empty() && !names.iter().any(|n| n == name) {
            names.push(name.to_owned());
            self.retry_waiting(now);
            for (_, lease) in self.unplaced.extract_if(.., |(server, _)| server == name).collect::<Vec<_>>() {
                self.give_back(now, server, lease, now + RECOVERY_TIMEOUT * 10);
            }
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
            asked: Vec::new(),
            recovery,
            unused: None,
        };
        self.slots.insert(slot, wanted);
        self.tell(Change::New { slot });
        slot
    }

    /// Drops a wanted lease and releases it at its server.
    pub fn release(&mut self, now: Time, slot: Slot, reason: &str) {
        let Some(wanted) = self.slots.remove(&slot) else { return };
        let request_id = self.request_id(&wanted.spec);
        match &wanted.phase {
            Phase::Allocating => drop(self.unwanted.insert(slot, (request_id, wanted.asked))),
            Phase::Waiting { .. } if wanted.trouble.is_some_and(|e| e.trouble == Trouble::NoCapacity) => {
                self.withdraw(now, &request_id, wanted.asked);
            }
            _ => {}
        }
        // A later lease of the same name must not find this one, whose release may be in flight.
        self.next_generation(&wanted.spec);
        match (wanted.phase, wanted.recovery) {
            (Phase::Held(held), _) => {
                let id = held.lease.id.clone();
                self.give_back(now, held.server, id, held.expires);
            }
            (_, Some(old)) => match self.names.iter().position(|names| names.contains(&old.server)) {
                Some(server) => self.give_back(now, server, old.id, now + RECOVERY_TIMEOUT * 10),
                // Released when its server is known; otherwise it expires, since this client does
                // not renew it.
                None => self.unplaced.push((old.server, old.id)),
            },
            _ => {}
        }
        // The reply to a request in flight finds no slot: `allocated` releases that lease.
        self.tell(Change::Removed { slot, reason: reason.to_owned(), lost: false });
    }

    /// Withdraws a request, so that requests queued behind it do not wait for it.
    ///
    /// A server that misses the withdrawal forgets a request that is not repeated.
    fn withdraw(&mut self, now: Time, request_id: &str, asked: Vec<usize>) {
        for server in asked.into_iter().filter(|i| self.servers[*i].trouble.is_none()) {
            self.releasing.push(Releasing {
                server,
                id: request_id.to_owned(),
                waits: true,
                retry: now,
                attempt: 0,
                give_up: now,
                in_flight: false,
                makes_room_for: None,
            });
        }
        self.run_releases(now);
    }

    fn give_back(&mut self, now: Time, server: usize, id: String, give_up: Time) {
        let give_up = give_up.max(now + BACKOFF_MIN);
        let releasing = Releasing {
            server,
            id,
            waits: false,
            retry: now,
            attempt: 0,
            give_up,
            in_flight: false,
            makes_room_for: None,
        };
        self.releasing.push(releasing);
        self.run_releases(now);
    }

    /// Takes the answer to [`Action::Allocate`].
    pub fn allocated(&mut self, now: Time, slot: Slot, result: Result<(usize, control::Lease), PoolError>) {
        self.next_turn(now);
        let Some(wanted) = self.slots.get_mut(&slot).filter(|w| matches!(w.phase, Phase::Allocating)) else {
            let unwanted = self.unwanted.remove(&slot);
            match (result, unwanted) {
                (Ok((server, lease)), _) => {
                    let expires = now + Duration::from_micros(lease.ttl_usec);
                    self.give_back(now, server, lease.id, expires);
                }
                (Err(error), Some((request_id, asked))) if error.trouble == Trouble::NoCapacity => {
                    self.withdraw(now, &request_id, asked);
                }
                _ => {}
            }
            return;
        };
        match result {
            Ok((server, mut lease)) => {
                let recovery = wanted.recovery.take();
                if let Some(old) = recovery.as_ref().filter(|old| wanted.spec.once && old.id != lease.id) {
                    // The server has forgotten the lease, and its requester did not ask for another
                    // one.
                    let (id, expires) = (old.id.clone(), now + Duration::from_micros(lease.ttl_usec));
                    self.give_back(now, server, lease.id, expires);
                    self.lost(now, slot, id, "its server no longer knows it");
                    return;
                }
                let stock = std::mem::take(&mut lease.workers).into();
                wanted.attempt = 0;
                wanted.trouble = None;
                wanted.last_server = Some(server);
                wanted.sticky = lease.devices.iter().map(|d| d.uuid.clone()).collect();
                let mut expires = now + Duration::from_micros(lease.ttl_usec);
                let mut ended = Vec::new();
                if let Some(old) = recovery.filter(|old| old.id == lease.id) {
                    if !wanted.spec.renewed_by_itself() {
                        expires = expires.min(old.expires);
                    }
                    ended = old.ended;
                } else {
                    wanted.processes = 0;
                }
                let id = lease.id.clone();
                wanted.phase = Phase::Held(Box::new(Held {
                    expires,
                    lease,
                    server,
                    state: LeaseState::Active,
                    since: now,
                    stock,
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
                for worker in ended {
                    self.actions.push_back(Action::EndWorker { slot, server, lease: id.clone(), worker });
                }
                let health = &mut self.servers[server];
                health.answered = Some(now);
                health.trouble = None;
                health.next = health.next.min(now + HEARTBEAT_INTERVAL);
                self.tell(Change::Granted { slot });
                self.fill(now, slot);
            }
            Err(error) => {
                // A background lease occupies GPUs, and counts against this client's limits too.
                let refused = matches!(error.trouble, Trouble::NoCapacity | Trouble::Quota);
                let yields = refused && self.yield_background(now, slot);
                let Some(wanted) = self.slots.get_mut(&slot) else { return };
                if let Some(old) = &wanted.recovery {
                    // The lease's server may be restarting too; after `until`, another server may
                    // serve the slot.
                    if error.trouble != Trouble::Unreachable || old.until <= now {
                        let (id, server) = (old.id.clone(), old.server.clone());
                        if let Some(server) = self.names.iter().position(|n| n.contains(&server)) {
                            // A server that returns with the lease must not keep it unused.
                            self.give_back(now, server, id.clone(), now + RECOVERY_TIMEOUT * 10);
                        }
                        let Some(wanted) = self.slots.get_mut(&slot) else { return };
                        if wanted.spec.once {
                            self.lost(now, slot, id, &error.message);
                            return;
                        }
                        wanted.recovery = None;
                        wanted.processes = 0;
                        let (spec, asked) = (wanted.spec.clone(), wanted.asked.clone());
                        if error.trouble == Trouble::NoCapacity {
                            // The request is queued there now, and would precede the next one.
                            let request_id = self.request_id(&spec);
                            self.withdraw(now, &request_id, asked);
                        }
                        self.next_generation(&spec);
                    }
                } else if wanted.spec.once && yields {
                    // Retried when the background lease is released.
                    wanted.phase = Phase::Waiting { retry: now + BACKOFF_MAX };
                    return;
                } else if wanted.spec.once {
                    self.slots.remove(&slot);
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
        }
    }

    /// Takes the answer to [`Action::Renew`].
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
            Phase::Held(held) if held.server == server && held.lease.id == renewed.id => {
                Some((*slot, wanted.spec.ttl.filter(|_| wanted.spec.once), held))
            }
            _ => None,
        });
        let Some((slot, ttl, held)) = found else { return };
        if renewed.lost {
            let reason =
                if renewed.reason.is_empty() { "its server no longer knows it" } else { &renewed.reason };
            self.lose(now, slot, reason);
            return;
        }
        if renewed.ttl_usec > 0 {
            let longest = ttl.unwrap_or(Duration::MAX);
            let expires = now + Duration::from_micros(renewed.ttl_usec).min(longest);
            held.warned &= expires <= held.expires;
            held.expires = expires;
        }
        if let Some(state) = LeaseState::of_server(&renewed.state) {
            self.set_state(now, slot, state, PoolError::place_of(renewed.position, renewed.waiting));
        }
        self.set_devices(slot, renewed.devices, renewed.fencing_token);
        if let Some(Phase::Held(held)) = self.slots.get_mut(&slot).map(|w| &mut w.phase)
            && held.lease.idle_timeout_usec != renewed.idle_timeout_usec
        {
            held.lease.idle_timeout_usec = renewed.idle_timeout_usec;
            self.tell(Change::Changed { slot });
        }
    }

    /// Updates a lease's GPUs.
    ///
    /// A lease that was lent may return on other GPUs of the same model, with a newer fencing
    /// token.
    fn set_devices(&mut self, slot: Slot, devices: Vec<control::Device>, fencing_token: u64) {
        let Some(Phase::Held(held)) = self.slots.get_mut(&slot).map(|w| &mut w.phase) else { return };
        let lease = &mut held.lease;
        if devices.len() != lease.devices.len() {
            return;
        }
        // Free memory changes all the time, so it is not announced.
        let told = |d: &control::Device| (d.uuid.clone(), d.state.clone());
        let mut news = !devices.iter().map(told).eq(lease.devices.iter().map(told));
        lease.devices = devices;
        // 0 comes from servers that predate this field.
        if fencing_token != 0 && fencing_token != lease.fencing_token {
            lease.fencing_token = fencing_token;
            news = true;
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

    fn set_state(&mut self, now: Time, slot: Slot, state: LeaseState, place: Option<(u32, u32)>) {
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
            wanted.held().filter(|h| h.server == server && h.lease.id == event.lease).map(|_| *slot)
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
                self.set_devices(slot, change.devices, change.fencing_token);
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
            None => {}
        }
    }

    fn next_generation(&mut self, spec: &Spec) {
        if !spec.once {
            *self.generations.entry(spec.key.clone()).or_default() += 1;
        }
    }

    fn lose(&mut self, now: Time, slot: Slot, reason: &str) {
        let held = self.slots.get(&slot).and_then(Wanted::held);
        let id = held.map(|h| h.lease.id.clone()).unwrap_or_default();
        self.lost(now, slot, id, reason);
    }

    fn lost(&mut self, now: Time, slot: Slot, id: String, reason: &str) {
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
                old.extend(held.stock.drain(..).map(|worker| (held.lease.id.clone(), worker)));
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

    fn fill(&mut self, now: Time, slot: Slot) {
        let Some(Phase::Held(held)) = self.slots.get_mut(&slot).map(|w| &mut w.phase) else { return };
        let wanted = (held.missed + SPARE).saturating_sub(held.stock.len()).min(TAKE_MAX);
        if wanted == 0 || held.taking || now < held.take_again {
            return;
        }
        held.taking = true;
        held.asked_for = held.missed.min(wanted);
        let action = Action::TakeWorkers {
            slot,
            server: held.server,
            lease: held.lease.id.clone(),
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
        if held.lease.id != lease {
            return;
        }
        held.taking = false;
        // Processes that came while a call on behalf of no process was in flight still wait.
        if held.asked_for > 0 {
            held.missed = 0;
        }
        let limit = |e: &PoolError| matches!(e.trouble, Trouble::Quota | Trouble::OutOfMemory);
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

    /// Takes the answer to [`Action::Release`] and [`Action::Withdraw`].
    pub fn released(&mut self, now: Time, server: usize, id: &str, result: Result<(), PoolError>) {
        let Some(at) = self.releasing.iter().position(|r| r.server == server && r.id == id) else {
            return;
        };
        match result {
            // A server that refuses calls over its rate limit has not released the lease.
            Err(error) if error.trouble.may_pass() || error.trouble == Trouble::Quota => {
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
        let refused = |e: &PoolError| matches!(e.trouble, Trouble::NoCapacity | Trouble::Quota);
        for wanted in self.slots.values_mut().filter(|w| w.turn.is_none() && !w.spec.once) {
            if let Phase::Waiting { retry } = &mut wanted.phase
                && wanted.trouble.as_ref().is_some_and(refused)
            {
                *retry = now;
            }
        }
    }

    /// Returns how long a server has been silent; `None` if it was never asked.
    pub fn silent_for(&self, now: Time, server: usize) -> Option<Duration> {
        let health = &self.servers[server];
        let since = health.answered.or(health.asked)?;
        Some(now.saturating_sub(since))
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
            let (server, id) = (held.server, held.lease.id.clone());
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
                .map(|h| h.lease.id.clone())
                .collect();
            self.actions.push_back(Action::Renew { server, leases });
        }
    }

    fn ask(&mut self, now: Time, slot: Slot) {
        let busy = self
            .slots
            .values()
            .any(|w| w.spec.class != Class::Background && !matches!(w.phase, Phase::Held(_)));
        let Some(wanted) = self.slots.get_mut(&slot) else { return };
        if wanted.spec.class == Class::Background && wanted.recovery.is_none() && busy {
            let pause = backoff(&mut self.rng, 3);
            wanted.phase = Phase::Waiting { retry: now + pause };
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
                _ if self.servers.is_empty() => (Trouble::NotReady, self.notice.clone()),
                (None, Some(name)) => (none, format!("server {name}: not in the pool")),
                _ if self.servers.iter().any(|s| s.drained.is_some()) => {
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
            wanted.asked.clone_from(&servers);
        }
        self.actions.push_back(Action::Allocate { slot, servers, request: Box::new(request) });
    }

    /// Returns the id of the request for a lease.
    ///
    /// The id changes only when the lease was released or lost, so that a repetition finds the same
    /// lease.

    fn request_id(&self, spec: &Spec) -> String {
        let generation = self.generations.get(&spec.key).copied().unwrap_or(0);
        match &spec.request_id {
            Some(id) if generation == 0 => id.clone(),
            _ => format!("{}/{}/{generation}", self.boot_id, spec.key),
        }
    }

    /// Returns the servers that may be asked for a lease.
    fn servers_for(&self, wanted: &Wanted) -> Vec<usize> {
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

    fn run_releases(&mut self, now: Time) {
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

    /// Warns the owners of leases whose requested time to live ends soon.
    fn run_warnings(&mut self, now: Time) {
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

    /// Returns when [`Machine::tick`] next has something to do.
    pub fn deadline(&self) -> Option<Time> {
        let lingering = self.slots.values().filter_map(|w| Some(w.unused? + USER_LINGER_TIMEOUT));
        let drains = self.slots.values().filter_map(|w| self.servers[w.held()?.server].drained);
        let slots = self.slots.values().filter_map(|wanted| match &wanted.phase {
            Phase::Waiting { retry } => Some(*retry),
            Phase::Allocating => None,
            Phase::Held(held) => {
                let fill = held.missed + SPARE > held.stock.len() && !held.taking;
                let ends = wanted.warns_at().unwrap_or(held.expires);
                Some(if fill { ends.min(held.take_again) } else { ends })
            }
        });
        let servers = self.servers.iter().filter(|h| !h.in_flight).map(|h| h.next);
        let releases = self.releasing.iter().filter(|r| !r.in_flight).map(|r| r.retry);
        slots.chain(servers).chain(releases).chain(lingering).chain(drains).min()
    }

    fn tell(&mut self, change: Change) {
        self.actions.push_back(Action::Tell(change));
    }

    fn by_key(&self, key: &str) -> Option<Slot> {
        self.slots.iter().find(|(_, w)| !w.spec.once && w.spec.key == key).map(|(slot, _)| *slot)
    }

    // ---- configuration

    /// Wants exactly the leases of the configuration; unchanged ones stay as they are.
    pub fn configure(&mut self, now: Time, leases: Vec<Spec>) {
        let (templates, held_always): (Vec<_>, Vec<_>) =
            leases.into_iter().partition(|s| matches!(s.class, Class::Session | Class::User));
        self.templates = templates;
        let mut kept: Vec<Slot> = Vec::new();
        for spec in held_always {
            kept.push(self.keep_or_want(now, spec));
        }
        let instances: Vec<(Slot, Option<Spec>)> = self
            .slots
            .iter()
            .filter(|(slot, w)| !w.spec.once && !kept.contains(slot) && w.spec.order != u32::MAX)
            .map(|(slot, w)| (*slot, self.templates.iter().find_map(|t| t.again_for(&w.spec))))
            .collect();
        for (slot, spec) in instances {
            match spec {
                Some(spec) => drop(self.keep_or_want(now, spec)),
                None => self.release(now, slot, "no longer in the configuration"),
            }
        }
        // Sessions that closed while no daemon ran.
        let over = |w: &Wanted| w.spec.session.as_ref().is_some_and(|id| !self.sessions.contains_key(id));
        let over: Vec<Slot> = self.slots.iter().filter(|(_, w)| over(w)).map(|(slot, _)| *slot).collect();
        for slot in over {
            self.release(now, slot, "its login session ended");
        }
        self.preallocate(now, self.preallocated);
        self.tick(now);
    }

    fn keep_or_want(&mut self, now: Time, spec: Spec) -> Slot {
        if let Some(slot) = self.by_key(&spec.key) {
            if let Some(wanted) = self.slots.get_mut(&slot).filter(|w| w.spec.same_lease(&spec)) {
                wanted.spec = spec;
                return slot;
            }
            self.release(now, slot, "its configuration changed");
        }
        self.insert(now, spec, None)
    }

    /// Holds this many GPUs for all users in addition to the configured leases, in the background.
    pub fn preallocate(&mut self, now: Time, count: u32) {
        self.preallocated = count;
        let key = |n: u32| format!("preallocated/{n}");
        for n in (0..).take_while(|n| *n < count || self.by_key(&key(*n)).is_some()).collect::<Vec<_>>() {
            match self.by_key(&key(n)) {
                Some(slot) if n >= count => self.release(now, slot, "fewer preallocated GPUs are wanted"),
                None => drop(self.insert(now, Spec::preallocated(n, key(n)), None)),
                Some(_) => {}
            }
        }
        self.tick(now);
    }

    /// Releases an unused background lease in favour of a waiting lease; returns whether one was
    /// found.
    fn yield_background(&mut self, now: Time, waiting: Slot) -> bool {
        let waits = |w: &&Wanted| w.spec.class != Class::Background && w.recovery.is_none();
        let Some(waits) = self.slots.get(&waiting).filter(waits) else { return false };
        let servers = self.servers_for(waits);
        let spare = self.slots.iter().find_map(|(slot, w)| {
            let held = w.held().filter(|held| servers.contains(&held.server))?;
            (w.spec.class == Class::Background && w.processes == 0).then_some((*slot, held))
        });
        let Some((slot, held)) = spare else { return false };
        let (server, id, expires) = (held.server, held.lease.id.clone(), held.expires);
        let reason = match waits.spec.name.as_str() {
            "" => "released in favour of a requested lease".to_owned(),
            name => format!("released in favour of lease {name}, which waits"),
        };
        self.give_back(now, server, id, expires);
        if let Some(releasing) = self.releasing.last_mut() {
            releasing.makes_room_for = Some(waiting);
        }
        self.lose(now, slot, &reason);
        true
    }

    // ---- sessions

    /// Returns the open login sessions by id.
    pub fn sessions(&self) -> &BTreeMap<String, Arc<Session>> {
        &self.sessions
    }

    /// Returns `true` if a login or a first CUDA call may want a lease; see [`Machine::demand`].
    pub fn has_templates(&self) -> bool {
        !self.templates.is_empty()
    }

    /// Records a login.
    pub fn session_opened(&mut self, now: Time, session: Arc<Session>) {
        self.sessions.insert(session.id.clone(), session);
        self.tick(now);
    }

    /// Records the end of a session and releases its leases.
    pub fn session_closed(&mut self, now: Time, id: &str) {
        if self.sessions.remove(id).is_none() {
            return;
        }
        let bound: Vec<Slot> = self
            .slots
            .iter()
            .filter(|(_, w)| w.spec.session.as_deref() == Some(id))
            .map(|(slot, _)| *slot)
            .collect();
        for slot in bound {
            self.release(now, slot, "its login session ended");
        }
        self.tick(now);
    }

    /// Wants the leases that the configuration has for a session or a user.
    ///
    /// Called at login, and by a process's first CUDA call.
    pub fn demand(&mut self, now: Time, uid: u32, user: Option<&str>, access: bool, session: Option<&str>) {
        let session = session.filter(|id| self.sessions.get(*id).is_some_and(|s| s.uid == uid));
        let wanted: Vec<Spec> = self
            .templates
            .iter()
            .filter(|t| match &t.owner {
                Owner::User(name) => user == Some(name),
                Owner::Uid(owner) => *owner == uid,
                Owner::Everyone => access,
            })
            .filter_map(|t| t.instance(uid, user, session))
            .collect();
        for spec in wanted {
            match self.by_key(&spec.key).and_then(|slot| self.slots.get_mut(&slot)) {
                Some(there) => there.unused = None,
                None => drop(self.insert(now, spec, None)),
            }
        }
        self.tick(now);
    }

    /// Releases leases of class `user` whose users are absent.
    fn run_users(&mut self, now: Time) {
        let mut gone = Vec::new();
        for (slot, wanted) in &mut self.slots {
            if wanted.spec.class != Class::User || wanted.spec.once {
                continue;
            }
            let here = wanted.processes > 0
                || self.sessions.values().any(|s| wanted.spec.owner == Owner::Uid(s.uid));
            if here {
                wanted.unused = None;
            } else if now.saturating_sub(*wanted.unused.get_or_insert(now)) >= USER_LINGER_TIMEOUT {
                gone.push(*slot);
            }
        }
        for slot in gone {
            self.release(now, slot, "its user has neither a session nor a process");
        }
    }

    // ---- processes

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

    /// Finds the slot of a lease that a process of an earlier daemon uses.
    pub fn slot_of(&self, lease: &str) -> Option<Slot> {
        let has = |w: &Wanted| {
            w.held().is_some_and(|h| h.lease.id == lease)
                || w.recovery.as_ref().is_some_and(|r| r.id == lease)
        };
        self.slots.iter().find(|(_, w)| has(w)).map(|(slot, _)| *slot)
    }

    /// Records that a process with a worker of this lease has exited.
    ///
    /// The lease's server is notified at once, or as soon as it confirms the lease.
    pub fn process_ended(&mut self, now: Time, slot: Slot, lease: &str, worker: Vec<u8>) {
        let Some(wanted) = self.slots.get_mut(&slot) else { return };
        match (&wanted.phase, &mut wanted.recovery) {
            (Phase::Held(held), _) if held.lease.id == lease => {
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

    // ---- servers that are drained

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
                let reason = "this client is leaving its server".to_owned();
                self.tell(Change::PrepareForLoss { slot, left, reason, idle: false });
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

    /// Returns `true` while a server is being drained.
    pub fn drained(&self, server: usize) -> bool {
        self.servers[server].drained.is_some()
    }

    fn run_drains(&mut self, now: Time) {
        let due: Vec<(Slot, usize, String, Time)> = self
            .slots
            .iter()
            .filter_map(|(slot, w)| {
                let held = w.held()?;
                let due = self.servers[held.server].drained.is_some_and(|at| at <= now);
                due.then(|| (*slot, held.server, held.lease.id.clone(), held.expires))
            })
            .collect();
        for (slot, server, id, expires) in due {
            self.give_back(now, server, id, expires);
            self.lose(now, slot, "this client left its server");
        }
    }

    // ---- stop and start of the daemon

    /// Returns the state that the next daemon of this boot needs.
    pub fn saved(&self) -> Saved {
        let lease = |wanted: &Wanted| {
            let spec = wanted.spec.clone();
            match (&wanted.phase, &wanted.recovery) {
                (Phase::Held(held), _) => Some(SavedLease {
                    spec,
                    id: held.lease.id.clone(),
                    server: held.lease.server.clone(),
                    // Other leases are renewed every few seconds.
                    expires: if wanted.spec.renewed_by_itself() { Time::ZERO } else { held.expires },
                }),
                (_, Some(old)) => Some(SavedLease {
                    spec,
                    id: old.id.clone(),
                    server: old.server.clone(),
                    expires: old.expires,
                }),
                _ => None,
            }
        };
        Saved {
            leases: self.slots.values().filter_map(lease).collect(),
            generations: self.generations.clone(),
            preallocated: self.preallocated,
        }
    }

    /// Restores the state of an earlier daemon of this boot.
    ///
    /// Call it before [`Machine::session_opened`] for the open sessions, and before
    /// [`Machine::configure`].
    pub fn restore(&mut self, now: Time, saved: Saved) {
        self.generations = saved.generations;
        self.preallocated = saved.preallocated;
        for lease in saved.leases {
            let SavedLease { spec, id, server, expires } = lease;
            let recovery = Recovery {
                id,
                server,
                until: now + RECOVERY_TIMEOUT,
                expires,
                ended: Vec::new(),
                used: Vec::new(),
            };
            self.insert(now, spec, Some(recovery));
        }
        self.tick(now);
    }
}

/// Returns a pause that doubles with each failed try; its upper half is random.
fn backoff(rng: &mut fastrand::Rng, attempt: u32) -> Duration {
    let full = BACKOFF_MIN.saturating_mul(1 << attempt.saturating_sub(1).min(8)).min(BACKOFF_MAX);
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
    fn a_lease_that_was_lent_may_have_other_gpus() {
        let mut m = machine(1);
        m.configure(s(0), vec![configured("l", 1)]);
        let slot = *m.slots.keys().next().expect("one");
        m.allocated(s(0), slot, Ok((0, lease("l1", 0))));
        actions(&mut m);
        let device = |uuid: &str| control::Device { uuid: uuid.into(), ..Default::default() };
        let state = |devices| control::PoolEvent {
            lease: "l1".into(),
            event: Some(control::pool_event::Event::State(control::StateChange {
                state: "active".into(),
                devices,
                ..Default::default()
            })),
        };
        let uuid = |m: &Machine| m.slots[&slot].held().expect("held").lease.devices[0].uuid.clone();
        m.event(s(1), 0, state(vec![]));
        assert_eq!((uuid(&m), told(&actions(&mut m))), ("GPU-l1".into(), vec![]));
        m.event(s(1), 0, state(vec![device("GPU-other")]));
        assert_eq!((uuid(&m), told(&actions(&mut m))), ("GPU-other".into(), vec![Change::Changed { slot }]));
        // The next heartbeat makes up for a missed event.
        let renewed = control::RenewedLease {
            id: "l1".into(),
            state: "active".into(),
            devices: vec![device("GPU-third")],
            ..Default::default()
        };
        m.renewed(s(2), 0, &["l1".into()], Ok(vec![renewed]));
        assert_eq!(uuid(&m), "GPU-third");
        m.event(s(3), 0, state(vec![device("a"), device("b")]));
        assert_eq!(uuid(&m), "GPU-third", "not as many as it has");
    }

    #[test]
    fn a_parked_lease_whose_programs_go_on_has_a_place_in_the_queue() {
        let mut m = machine(1);
        m.configure(s(0), vec![configured("l", 1)]);
        let slot = *m.slots.keys().next().expect("one");
        m.allocated(s(0), slot, Ok((0, lease("l1", 0))));
        let mut told_of = |state: &str, position, waiting| {
            let state = state.into();
            let change = control::StateChange { state, position, waiting, ..Default::default() };
            let event = Some(control::pool_event::Event::State(change));
            m.event(s(1), 0, control::PoolEvent { lease: "l1".into(), event });
            let held = m.slots[&slot].held().expect("held");
            (held.state, held.place, told(&actions(&mut m)).contains(&Change::Changed { slot }))
        };
        let parked = LeaseState::Parked;
        assert_eq!(told_of("parked", 0, 0), (parked, None, true));
        assert_eq!(told_of("returning", 2, 3), (parked, Some((2, 3)), true));
        assert_eq!(told_of("returning", 2, 3), (parked, Some((2, 3)), false));
        assert_eq!(told_of("returning", 1, 1), (parked, Some((1, 1)), true));
        assert_eq!(told_of("returning", 0, 0), (parked, None, true), "its memory is on its way");
        assert_eq!(told_of("active", 0, 0), (LeaseState::Active, None, true));
        told_of("returning", 1, 2);
        let renewed = control::RenewedLease {
            id: "l1".into(),
            state: "returning".into(),
            position: 1,
            ..Default::default()
        };
        m.renewed(s(2), 0, &["l1".into()], Ok(vec![renewed]));
        assert_eq!(m.slots[&slot].held().expect("held").place, Some((1, 1)), "news may be missed");
    }

    #[test]
    fn what_is_configured_of_idle_leases_is_asked_for() {
        use crate::config::OnIdle;
        let mut m = machine(1);
        let config = LeaseConfig { on_idle: Some(OnIdle::Keep), hold: true, ..LeaseConfig::default() };
        m.configure(s(0), vec![Spec::configured(&config, 0)]);
        let (_, asked) = request(&actions(&mut m));
        assert_eq!((asked.on_idle.as_str(), asked.hold), ("keep", true));
        m.configure(s(0), vec![configured("plain", 1)]);
        let (_, asked) = request(&actions(&mut m));
        assert_eq!((asked.on_idle.as_str(), asked.hold), ("", false), "the server's policy");
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
            assert!(pause >= s(1) / 2 && pause <= BACKOFF_MAX, "attempt {attempt}: {pause:?}");
            m.tick(retry - Duration::from_micros(1));
            assert!(matches!(m.slot(slot).unwrap().phase, Phase::Waiting { .. }));
            m.tick(retry);
            assert!(matches!(m.slot(slot).unwrap().phase, Phase::Allocating));
            last = retry;
            // The request id stays, so that a lease whose reply was lost is found again.
            assert_eq!(request(&actions(&mut m)).1.request_id, "boot/configured/a/0");
        }
        m.allocated(last, slot, Ok((1, lease("l1", 1))));
        assert!(told(&actions(&mut m)).contains(&Change::Granted { slot }));
        assert!(m.slot(slot).unwrap().trouble.is_none());
    }

    #[test]
    fn a_server_that_comes_back_keeps_no_lease_that_was_had_elsewhere() {
        let mut m = machine(2);
        let slot = m.want(s(0), configured("a", 1));
        m.allocated(s(0), slot, Ok((0, lease("l1", 0))));
        actions(&mut m);
        let released = |m: &mut Machine| {
            let is = |a: &Action| matches!(a, Action::Release { server: 0, lease } if lease == "l1");
            actions(m).iter().any(is)
        };
        m.tick(s(600));
        assert!(m.slot(slot).unwrap().held().is_none() && released(&mut m));
        m.released(s(600), 0, "l1", Err(unreachable()));
        assert!(!released(&mut m));
        m.reconnected(s(601), 0);
        assert!(released(&mut m), "at once");
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
        let warned = |m: &mut Machine, now: Time| {
            m.tick(now);
            let told = told(&actions(m));
            told.iter().filter(|c| matches!(c, Change::PrepareForLoss { idle: false, .. })).count()
        };
        assert_eq!((warned(&mut m, s(449)), warned(&mut m, s(450)), warned(&mut m, s(451))), (0, 1, 0));
        m.renewed(s(500), 0, &["l1".into()], Ok(vec![renewed]));
        assert_eq!((warned(&mut m, s(949)), warned(&mut m, s(950)), warned(&mut m, s(1099))), (0, 1, 0));
        assert!(m.slot(slot).is_some());
        m.tick(s(1100));
        assert!(m.slot(slot).is_none());
        assert!(actions(&mut m).contains(&Action::Release { server: 0, lease: "l1".into() }));
    }

    #[test]
    fn heartbeats_of_several_servers_go_together() {
        let mut m = machine(2);
        m.tick(s(0));
        let (a, b) = (m.want(s(0), configured("a", 1)), m.want(s(0), configured("b", 1)));
        m.allocated(s(0), a, Ok((0, lease("la", 1))));
        m.allocated(s(0), b, Ok((1, lease("lb", 1))));
        let asked = |m: &mut Machine| {
            let server = |a: &Action| if let Action::Renew { server, .. } = a { Some(*server) } else { None };
            actions(m).iter().filter_map(server).collect::<Vec<_>>()
        };
        assert_eq!(asked(&mut m), [0, 1]);
        // The second server answers later.
        m.renewed(Duration::from_millis(1), 0, &[], Ok(vec![]));
        m.renewed(Duration::from_millis(200), 1, &[], Ok(vec![]));
        let due = m.deadline().unwrap();
        assert_eq!(due, Duration::from_millis(2001));
        m.tick(due - COALESCE_WINDOW - Duration::from_millis(1));
        assert_eq!(asked(&mut m), Vec::<usize>::new());
        m.tick(due);
        assert_eq!(asked(&mut m), [0, 1]);
    }

    #[test]
    fn heartbeats_are_fast_while_leases_are_held_and_slow_otherwise() {
        let mut m = machine(1);
        m.tick(s(0));
        assert!(actions(&mut m).contains(&Action::Renew { server: 0, leases: vec![] }));
        m.renewed(s(0), 0, &[], Ok(vec![]));
        assert_eq!(m.deadline(), Some(IDLE_HEARTBEAT_INTERVAL));
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
    fn a_program_does_not_wait_because_a_spare_was_refused() {
        let mut m = machine(1);
        let slot = m.want(s(0), configured("a", 1));
        m.allocated(s(0), slot, Ok((0, lease("l1", 1))));
        let asks = |m: &mut Machine| -> Vec<u32> {
            let waiting = |a| match a {
                Action::TakeWorkers { waiting, .. } => Some(waiting),
                _ => None,
            };
            actions(m).into_iter().filter_map(waiting).collect()
        };
        assert!(m.take(s(0), &[slot]).is_some());
        assert_eq!(asks(&mut m), [0]);
        let refused = || Err(PoolError::new(Trouble::OutOfMemory, "no room for another"));
        m.workers(s(0), slot, "l1", refused());
        m.tick(s(0));
        assert!(asks(&mut m).is_empty(), "no process waits");
        assert!(m.take(s(0), &[slot]).is_none());
        assert_eq!(asks(&mut m), [1], "at once");
        m.workers(s(0), slot, "l1", refused());
        assert!(m.take(s(0), &[slot]).is_none());
        assert!(asks(&mut m).is_empty(), "not again at once");
        m.tick(s(3));
        assert_eq!(asks(&mut m), [1]);
        // A process comes while a call on behalf of no process is in flight.
        m.workers(s(3), slot, "l1", refused());
        m.tick(s(6));
        assert_eq!(asks(&mut m), [0]);
        assert!(m.take(s(6), &[slot]).is_none());
        m.workers(s(6), slot, "l1", refused());
        m.tick(s(6));
        assert_eq!(asks(&mut m), [1]);
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
        // Three processes find an empty stock: one call brings workers for all of them and one
        // spare.
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

    /// Returns the names of the leases that are asked for, with their order at the server.
    fn asked(m: &mut Machine) -> Vec<(String, u32)> {
        let asked = actions(m).into_iter().filter_map(|a| match a {
            Action::Allocate { slot, request, .. } => Some((m.slot(slot)?.spec.name.clone(), request.order)),
            _ => None,
        });
        asked.collect()
    }

    /// Specs of one GPU each, in file order, with the servers that they name.
    fn file(leases: &[(&str, &[&str])]) -> Vec<Spec> {
        let specs = (0..).zip(leases).map(|(order, (name, servers))| Spec {
            order,
            servers: servers.iter().map(|s| (*s).to_owned()).collect(),
            ..configured(name, 1)
        });
        specs.collect()
    }

    #[test]
    fn leases_from_boot_are_asked_for_at_once_where_there_is_room() {
        let mut m = machine(1);
        let mut leases = file(&[("a", &[]), ("b", &[]), ("mine", &[]), ("c", &[])]);
        leases[2].class = Class::Session;
        m.configure(s(0), leases);
        assert_eq!(asked(&mut m), [("a".into(), 1)], "no server has reported free GPUs yet");
        // Requests of users count from when they come.
        m.session_opened(s(0), session(0));
        m.demand(s(0), session(0).uid, None, true, Some(&session(0).id));
        m.want(s(0), Spec { name: "once".into(), ..Spec::requested("request".into(), 1000) });
        assert_eq!(asked(&mut m), [("mine".into(), 0), ("once".into(), 0)]);
        m.described(s(0), 0, 2);
        m.tick(s(0));
        assert!(asked(&mut m).is_empty());
        m.described(s(0), 0, 3);
        m.tick(s(0));
        assert_eq!(asked(&mut m), [("b".into(), 2), ("c".into(), 4)]);
    }

    #[test]
    fn where_there_is_no_room_for_all_the_first_in_the_file_gets_it() {
        let mut m = machine(2);
        m.configure(s(0), file(&[("a", &[]), ("b", &["s1:7601"]), ("c", &[])]));
        for (server, free) in [(0, 1), (1, 1)] {
            m.described(s(0), server, free);
        }
        m.tick(s(0));
        let mut order = Vec::new();
        for slot in 1..=3 {
            order.extend(asked(&mut m));
            m.allocated(s(0), slot, Err(PoolError::new(Trouble::NoCapacity, "full")));
            m.tick(s(0));
        }
        assert_eq!(order, [("a".into(), 1), ("b".into(), 2), ("c".into(), 3)]);
        // From now on they have their places in the queue, and none defers to another.
        m.tick(s(10));
        assert_eq!(asked(&mut m).len(), 3);
    }

    #[test]
    fn leases_of_different_servers_do_not_wait_for_each_other() {
        let mut m = machine(2);
        m.configure(s(0), file(&[("a", &["s0:7601"]), ("b", &["s1:7601"]), ("c", &["s0:7601"])]));
        assert_eq!(asked(&mut m), [("a".into(), 1), ("b".into(), 2)]);
        // A server that hangs holds up later leases for a bounded time.
        m.tick(BOOT_ORDER_DELAY / 2);
        assert!(asked(&mut m).is_empty());
        assert_eq!(m.deadline(), Some(BOOT_ORDER_DELAY));
        m.tick(BOOT_ORDER_DELAY);
        assert_eq!(asked(&mut m), [("c".into(), 3)]);
    }

    #[test]
    fn a_free_gpu_has_room_for_several_parts() {
        let mut m = machine(1);
        let mut leases = file(&[("a", &[]), ("b", &[]), ("c", &[]), ("d", &[])]);
        for spec in &mut leases {
            spec.memory = Memory::Percent(40.0);
        }
        m.configure(s(0), leases);
        asked(&mut m);
        for (free, expected) in [(1, 0), (2, 3)] {
            m.described(s(0), 0, free);
            m.tick(s(0));
            assert_eq!(asked(&mut m).len(), expected, "{free} free");
        }
    }

    #[test]
    fn gpus_of_one_lease_are_one_servers() {
        let mut m = machine(2);
        let mut leases = file(&[("a", &[]), ("b", &[])]);
        leases[0].gpus = 2;
        m.configure(s(0), leases);
        assert_eq!(asked(&mut m), [("a".into(), 1)]);
        for (free, expected) in [(2, 0), (3, 1)] {
            for server in 0..2 {
                m.described(s(0), server, free);
            }
            m.tick(s(0));
            assert_eq!(asked(&mut m).len(), expected, "{free} free on each");
        }
    }

    #[test]
    fn a_server_is_chosen_by_the_name_it_tells() {
        let mut m = machine(2);
        let mut spec = configured("a", 1);
        spec.servers = vec!["gpu-b".into()];
        let slot = m.want(s(0), spec);
        assert!(m.slot(slot).unwrap().trouble.is_none(), "no server has reported its name yet");
        m.tick(s(1));
        assert!(m.slot(slot).unwrap().trouble.as_ref().unwrap().message.contains("gpu-b"));
        actions(&mut m);
        m.name_server(s(1), 1, "gpu-b");
        m.tick(s(1));
        assert_eq!(request(&actions(&mut m)).0, [1], "at once");
    }

    /// A simulated pool that answers the machine's actions, with random delays and failures.
    #[derive(Default)]
    struct World {
        free: Vec<u32>,
        /// GPUs that this client may have of each server.
        limits: Vec<u32>,
        leases: HashMap<String, (usize, u32)>,
        by_request: HashMap<String, String>,
        counter: u32,
        /// Leases whose server was notified of a process's exit.
        ended: Vec<String>,
    }

    impl World {
        fn fits(&self, server: usize, gpus: u32) -> Result<(), PoolError> {
            let used: u32 = self.leases.values().filter(|(s, _)| *s == server).map(|(_, gpus)| gpus).sum();
            if used + gpus > self.limits[server] {
                Err(PoolError::new(Trouble::Quota, "a limit"))
            } else if self.free[server] < gpus {
                Err(PoolError::new(Trouble::NoCapacity, "full"))
            } else {
                Ok(())
            }
        }

        fn allocate(
            &mut self,
            servers: &[usize],
            request: &control::AllocateRequest,
        ) -> Result<(usize, String), PoolError> {
            let mut refusal = None;
            for server in servers {
                if let Some(id) = self.by_request.get(&request.request_id)
                    && self.leases.get(id).is_some_and(|(s, _)| s == server)
                {
                    return Ok((*server, id.clone()));
                }
                match self.fits(*server, request.gpus) {
                    Ok(()) => {
                        self.free[*server] -= request.gpus;
                        self.counter += 1;
                        let id = format!("w{}", self.counter);
                        self.leases.insert(id.clone(), (*server, request.gpus));
                        self.by_request.insert(request.request_id.clone(), id.clone());
                        return Ok((*server, id));
                    }
                    Err(error) => refusal = Some(error),
                }
            }
            Err(refusal.unwrap())
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
        /// Calls fail from now on, or succeed again.
        Broken(bool),
        Take,
        /// A reload, with GPUs and class of each lease.
        Configure(Vec<(u32, Class)>),
        Preallocate(u32),
        Login(u32),
        Logout(u32),
        /// A process asks, with or without a session.
        Process(u32, bool),
        /// Exit of the process at this index.
        Ends(usize),
        Drain(usize, Option<u64>),
        Restart,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (1u32..4, any::<bool>()).prop_map(|(gpus, once)| Step::Want(gpus, once)),
            (0usize..8).prop_map(Step::Release),
            (1u64..40_000).prop_map(Step::Advance),
            (0usize..8).prop_map(Step::Lose),
            any::<bool>().prop_map(Step::Broken),
            Just(Step::Take),
            proptest::collection::vec((1u32..3, class()), 0..4).prop_map(Step::Configure),
            (0u32..3).prop_map(Step::Preallocate),
            (0u32..5).prop_map(Step::Login),
            (0u32..5).prop_map(Step::Logout),
            (0u32..5, any::<bool>()).prop_map(|(n, session)| Step::Process(n, session)),
            (0usize..8).prop_map(Step::Ends),
            (0usize..2, proptest::option::of(0u64..100))
                .prop_map(|(server, grace)| Step::Drain(server, grace)),
            Just(Step::Restart),
        ]
    }

    fn class() -> impl Strategy<Value = Class> {
        prop_oneof![Just(Class::Boot), Just(Class::Session), Just(Class::User), Just(Class::Background)]
    }

    fn tables(leases: &[(u32, Class)]) -> Vec<Spec> {
        let spec = |(i, (gpus, class)): (usize, &(u32, Class))| Spec {
            class: *class,
            ..configured(&format!("c{i}"), *gpus)
        };
        leases.iter().enumerate().map(spec).collect()
    }

    /// Asserts the invariants of every state.
    fn check(m: &Machine) {
        let mut keys = std::collections::BTreeSet::new();
        for (_, wanted) in m.slots() {
            assert!(wanted.spec.once || keys.insert(wanted.spec.key.clone()), "{} twice", wanted.spec.key);
            if let Some(session) = &wanted.spec.session {
                assert!(m.sessions().contains_key(session), "{session} has ended");
            }
        }
    }

    /// Answers every action until the queue is empty.
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
                        world.allocate(&servers, &request).map(|(server, id)| {
                            let name = format!("s{server}:7601");
                            (server, control::Lease { server: name, ..lease(&id, 1) })
                        })
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
                Action::Withdraw { server, request_id } => {
                    m.released(now, server, &request_id, if broken { Err(unreachable()) } else { Ok(()) });
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
                Action::EndWorker { slot, lease, .. } => {
                    if !broken {
                        world.ended.push(lease);
                    }
                    m.worker_freed(now, slot);
                }
                Action::Tell(_) => {}
            }
        }
    }

    fn session(n: u32) -> Arc<Session> {
        Arc::new(Session {
            id: format!("s{n}"),
            uid: 1000 + n % 3,
            user: format!("u{}", n % 3),
            service: "sshd".into(),
            tty: "pts/0".into(),
            rhost: String::new(),
            leader: n,
            leader_start: 1,
            logind: None,
        })
    }

    /// Restarts the machine within one boot, through the serialized state.
    fn restart(m: &Machine, world: &mut World, now: Time, seed: u64) -> Machine {
        let saved: Saved = serde_json::from_str(&serde_json::to_string(&m.saved()).unwrap()).unwrap();
        assert_eq!(saved, m.saved());
        // Leases whose release was in flight are no longer renewed, and expire.
        let gone: Vec<String> =
            world.leases.keys().filter(|id| !saved.leases.iter().any(|l| l.id == **id)).cloned().collect();
        for id in gone {
            world.release(&id);
        }
        let mut next = Machine::new("boot".into(), "machine".into(), fastrand::Rng::with_seed(seed));
        next.restore(now, saved);
        for session in m.sessions().values() {
            next.session_opened(now, session.clone());
        }
        for (i, names) in m.names.iter().enumerate() {
            next.add_server(now, names[0].clone());
            for name in names {
                next.name_server(now, i, name);
            }
        }
        next
    }

    #[test]
    fn what_has_not_changed_is_left_alone_by_a_reload() {
        let mut m = machine(1);
        m.configure(s(0), vec![configured("a", 1), configured("b", 1)]);
        let ids: Vec<Slot> = m.slots().map(|(slot, _)| slot).collect();
        m.allocated(s(0), ids[0], Ok((0, lease("la", 1))));
        m.allocated(s(0), ids[1], Ok((0, lease("lb", 1))));
        actions(&mut m);
        let mut changed = configured("b", 2);
        changed.order = 0;
        let mut moved = configured("a", 1);
        moved.order = 1;
        m.configure(s(1), vec![changed, moved, configured("c", 1)]);
        let todo = actions(&mut m);
        assert_eq!(m.slot(ids[0]).unwrap().held().unwrap().lease.id, "la", "only moved");
        assert_eq!(m.slot(ids[0]).unwrap().spec.order, 1);
        assert!(m.slot(ids[1]).is_none());
        assert!(todo.contains(&Action::Release { server: 0, lease: "lb".into() }));
        let asked: Vec<String> = todo
            .iter()
            .filter_map(|a| {
                if let Action::Allocate { request, .. } = a { Some(request.request_id.clone()) } else { None }
            })
            .collect();
        assert_eq!(
            asked,
            ["boot/configured/b/1", "boot/configured/c/0"],
            "never the request of the old lease"
        );
    }

    #[test]
    fn session_leases_last_from_login_to_logout() {
        let mut m = machine(1);
        let template = Spec { class: Class::Session, ..configured("mine", 1) };
        m.configure(s(0), vec![template]);
        assert_eq!(m.slots().count(), 0);
        m.session_opened(s(1), session(1));
        m.demand(s(1), 1001, Some("u1"), false, Some("s1"));
        assert_eq!(m.slots().count(), 0, "no access");
        m.demand(s(1), 1002, Some("u2"), true, Some("s1"));
        assert_eq!(m.slots().count(), 0, "another user's session");
        m.demand(s(1), 1001, Some("u1"), true, Some("s1"));
        m.demand(s(2), 1001, Some("u1"), true, Some("s1"));
        let (slot, wanted) = m.slots().next().unwrap();
        assert_eq!(m.slots().count(), 1, "asked for once");
        assert_eq!(
            (wanted.spec.owner.clone(), wanted.spec.session.as_deref()),
            (Owner::Uid(1001), Some("s1"))
        );
        m.allocated(s(2), slot, Ok((0, lease("l1", 1))));
        m.session_closed(s(3), "s1");
        assert!(m.slot(slot).is_none());
        assert!(actions(&mut m).contains(&Action::Release { server: 0, lease: "l1".into() }));
    }

    #[test]
    fn a_users_lease_outlives_its_sessions_by_a_moment() {
        let mut m = machine(1);
        m.configure(s(0), vec![Spec { class: Class::User, ..configured("mine", 1) }]);
        m.session_opened(s(0), session(1));
        m.demand(s(0), 1001, Some("u1"), true, Some("s1"));
        let slot = m.slots().next().unwrap().0;
        m.allocated(s(0), slot, Ok((0, lease("l1", 1))));
        m.process_started(slot);
        m.session_closed(s(1), "s1");
        m.tick(s(500));
        assert!(m.slot(slot).is_some(), "a process still runs");
        m.renewed(s(500), 0, &[], Ok(vec![]));
        m.process_ended(s(500), slot, "l1", vec![1]);
        assert!(m.deadline().unwrap() <= s(500) + USER_LINGER_TIMEOUT);
        m.tick(s(529));
        assert!(m.slot(slot).is_some());
        m.tick(s(530));
        assert!(m.slot(slot).is_none());
    }

    #[test]
    fn a_background_lease_yields_to_one_that_waits() {
        let mut m = machine(1);
        m.configure(s(0), vec![Spec { class: Class::Background, ..configured("spare", 1) }]);
        let spare = m.slots().next().unwrap().0;
        m.allocated(s(0), spare, Ok((0, lease("l1", 1))));
        actions(&mut m);
        let slot = m.want(s(1), configured("a", 1));
        m.process_started(spare);
        m.allocated(s(1), slot, Err(PoolError::new(Trouble::NoCapacity, "full")));
        assert!(m.slot(spare).unwrap().held().is_some(), "it is in use");
        m.process_ended(s(1), spare, "l1", vec![1]);
        m.tick(s(4));
        m.allocated(s(4), slot, Err(PoolError::new(Trouble::NoCapacity, "full")));
        assert!(m.slot(spare).unwrap().held().is_none());
        assert!(actions(&mut m).contains(&Action::Release { server: 0, lease: "l1".into() }));
        m.tick(s(5));
        assert!(matches!(m.slot(spare).unwrap().phase, Phase::Waiting { .. }), "it waits its turn");
    }

    #[test]
    fn a_background_lease_yields_to_one_that_a_limit_refuses() {
        let mut m = machine(2);
        m.configure(s(0), vec![Spec { class: Class::Background, ..configured("spare", 1) }]);
        let spare = m.slots().next().unwrap().0;
        m.allocated(s(0), spare, Ok((0, lease("l1", 1))));
        actions(&mut m);
        let limit = || PoolError::new(Trouble::Quota, "at most 1 GPU");
        let elsewhere = Spec { servers: vec!["s1:7601".into()], ..configured("a", 1) };
        let slot = m.want(s(1), elsewhere);
        m.allocated(s(1), slot, Err(limit()));
        assert!(m.slot(spare).unwrap().held().is_some(), "another server's limit");
        m.release(s(1), slot, "test");
        let slot = m.want(s(1), configured("b", 1));
        actions(&mut m);
        m.allocated(s(1), slot, Err(limit()));
        assert!(m.slot(spare).unwrap().held().is_none());
        assert!(actions(&mut m).contains(&Action::Release { server: 0, lease: "l1".into() }));
        // It is asked for again as soon as there is room, however long the backoff is by now.
        m.released(s(1), 0, "l1", Ok(()));
        m.tick(s(1));
        assert_eq!(request(&actions(&mut m)).1.request_id, "boot/configured/b/0");
    }

    #[test]
    fn what_a_reload_gives_back_is_had_by_what_it_asks_for() {
        let mut m = machine(1);
        m.configure(s(0), vec![configured("a", 1), configured("b", 1)]);
        let slots: Vec<_> = m.slots().map(|(slot, _)| slot).collect();
        for (slot, id) in slots.into_iter().zip(["l1", "l2"]) {
            m.allocated(s(0), slot, Ok((0, lease(id, 1))));
        }
        actions(&mut m);
        m.configure(s(1), vec![configured("c", 2)]);
        let slot = m.slots().next().unwrap().0;
        actions(&mut m);
        m.allocated(s(1), slot, Err(PoolError::new(Trouble::Quota, "at most 2 leases")));
        let asked = |m: &mut Machine| actions(m).iter().any(|a| matches!(a, Action::Allocate { .. }));
        m.released(s(1), 0, "l1", Ok(()));
        m.tick(s(1));
        assert!(!asked(&mut m), "the other one is still on its way");
        m.released(s(1), 0, "l2", Ok(()));
        m.tick(s(1));
        assert!(asked(&mut m), "without a pause");
    }

    #[test]
    fn a_request_has_what_a_background_lease_held() {
        for trouble in [Trouble::NoCapacity, Trouble::Quota] {
            let mut m = machine(1);
            m.configure(s(0), vec![Spec { class: Class::Background, ..configured("spare", 1) }]);
            let spare = m.slots().next().unwrap().0;
            m.allocated(s(0), spare, Ok((0, lease("l1", 1))));
            let slot = m.want(s(1), Spec::requested("r".into(), 1000));
            actions(&mut m);
            let refused = || Err(PoolError::new(trouble, "refused"));
            m.allocated(s(1), slot, refused());
            let todo = actions(&mut m);
            assert!(todo.contains(&Action::Release { server: 0, lease: "l1".into() }));
            assert!(!told(&todo).iter().any(|c| matches!(c, Change::Failed { .. })), "it waits for that");
            m.tick(s(4));
            assert!(
                actions(&mut m).iter().all(|a| !matches!(a, Action::Allocate { .. })),
                "not before the release is confirmed"
            );
            m.released(s(5), 0, "l1", Ok(()));
            m.tick(s(5));
            assert_eq!(request(&actions(&mut m)).1.request_id, "boot/r/0");
            // With no background lease left it is tried once, as always.
            m.allocated(s(5), slot, refused());
            assert!(told(&actions(&mut m)).iter().any(|c| matches!(c, Change::Failed { .. })));
            assert!(m.slot(slot).is_none());
        }
    }

    #[test]
    fn a_lease_of_before_a_restart_is_found_again_by_its_request() {
        let mut m = machine(2);
        m.configure(s(0), vec![configured("a", 1)]);
        let slot = m.slots().next().unwrap().0;
        let mut held = lease("l1", 1);
        held.server = "gpu-b".into();
        m.allocated(s(0), slot, Ok((1, held.clone())));
        m.name_server(s(0), 1, "gpu-b");
        let mut world = World::default();
        let mut m = restart(&m, &mut world, s(10), 7);
        m.configure(s(10), vec![configured("a", 1)]);
        let slot = m.slots().next().unwrap().0;
        let (servers, asked) = request(&actions(&mut m));
        assert_eq!((servers, asked.request_id.as_str()), (vec![1], "boot/configured/a/0"));
        assert!(asked.again && asked.workers.is_empty(), "what the old daemon had in stock is not wanted");
        assert_eq!(m.slot_of("l1"), Some(slot));
        m.process_resumed(slot, [9; 16]);
        // Its process exits while the server is restarting, too.
        m.allocated(s(10), slot, Err(unreachable()));
        m.process_ended(s(11), slot, "l1", vec![9; 16]);
        m.tick(s(13));
        let (servers, asked) = request(&actions(&mut m));
        assert_eq!(servers, [1], "no other server is asked");
        assert_eq!(asked.workers, [vec![9; 16]], "its worker is in use");
        m.allocated(s(13), slot, Ok((1, held)));
        let ended = Action::EndWorker { slot, server: 1, lease: "l1".into(), worker: vec![9; 16] };
        assert!(actions(&mut m).contains(&ended));
        assert_eq!(m.slot(slot).unwrap().processes, 0);
    }

    #[test]
    fn a_request_that_waits_and_is_not_wanted_any_more_leaves_the_queue() {
        let full = || PoolError::new(Trouble::NoCapacity, "full");
        let withdrawn = |m: &mut Machine| -> Vec<(usize, String)> {
            let withdrawn = actions(m).into_iter().filter_map(|a| match a {
                Action::Withdraw { server, request_id } => Some((server, request_id)),
                _ => None,
            });
            withdrawn.collect()
        };
        let mut m = machine(1);
        m.configure(s(0), vec![configured("a", 1), configured("b", 1), configured("c", 1)]);
        let slots: Vec<Slot> = m.slots().map(|(slot, _)| slot).collect();
        // The first is queued, the second is asking again, the third has not been answered yet.
        m.allocated(s(0), slots[0], Err(full()));
        m.allocated(s(0), slots[1], Err(unreachable()));
        actions(&mut m);
        m.configure(s(1), vec![]);
        assert_eq!(withdrawn(&mut m), [(0, "boot/configured/a/0".into())]);
        m.allocated(s(1), slots[2], Err(full()));
        assert_eq!(withdrawn(&mut m), [(0, "boot/configured/c/0".into())], "when its answer has come");
        // A withdrawal that does not reach its server is not repeated: the server forgets the
        // request.
        m.released(s(1), 0, "boot/configured/c/0", Err(unreachable()));
        m.released(s(1), 0, "boot/configured/a/0", Ok(()));
        m.tick(s(100));
        assert_eq!((withdrawn(&mut m), m.releases_pending()), (vec![], 0));
    }

    #[test]
    fn a_lease_that_its_server_has_forgotten_does_not_wait_behind_the_question_for_it() {
        let mut m = machine(1);
        m.configure(s(0), vec![configured("a", 1)]);
        let slot = m.slots().next().unwrap().0;
        m.allocated(s(0), slot, Ok((0, control::Lease { server: "s0:7601".into(), ..lease("l1", 1) })));
        let mut m = restart(&m, &mut World::default(), s(10), 7);
        m.configure(s(10), vec![configured("a", 1)]);
        let slot = m.slots().next().unwrap().0;
        assert_eq!(request(&actions(&mut m)).1.request_id, "boot/configured/a/0");
        m.allocated(s(10), slot, Err(PoolError::new(Trouble::NoCapacity, "full")));
        let withdrawn = Action::Withdraw { server: 0, request_id: "boot/configured/a/0".into() };
        assert!(actions(&mut m).contains(&withdrawn));
        m.tick(s(100));
        assert_eq!(request(&actions(&mut m)).1.request_id, "boot/configured/a/1");
    }

    #[test]
    fn a_lease_whose_session_ended_while_no_daemon_ran_is_given_back_when_its_server_is_known() {
        let mut m = machine(1);
        m.configure(s(0), vec![configured("a", 1)]);
        let slot = m.slots().next().unwrap().0;
        m.allocated(s(0), slot, Ok((0, control::Lease { server: "gpu-a".into(), ..lease("l1", 1) })));
        let saved = m.saved();
        let mut m = Machine::new("boot".into(), "machine".into(), fastrand::Rng::with_seed(7));
        m.restore(s(10), saved);
        m.configure(s(10), vec![]);
        m.add_server(s(10), "gpu-a.example:7601".into());
        m.name_server(s(11), 0, "gpu-b");
        assert!(!actions(&mut m).iter().any(|a| matches!(a, Action::Release { .. })));
        m.name_server(s(12), 0, "gpu-a");
        let given_back = Action::Release { server: 0, lease: "l1".into() };
        assert!(actions(&mut m).contains(&given_back));
        m.name_server(s(13), 0, "gpu-a");
        assert!(!actions(&mut m).contains(&given_back), "once");
    }

    #[test]
    fn a_server_that_does_not_come_back_is_not_waited_for() {
        let mut m = machine(2);
        m.configure(s(0), vec![configured("a", 1)]);
        let slot = m.slots().next().unwrap().0;
        m.allocated(s(0), slot, Ok((0, control::Lease { server: "s0:7601".into(), ..lease("l1", 1) })));
        let mut m = restart(&m, &mut World::default(), s(10), 7);
        let slot = m.slots().next().unwrap().0;
        m.tick(s(10));
        actions(&mut m);
        m.allocated(s(10) + RECOVERY_TIMEOUT, slot, Err(unreachable()));
        actions(&mut m);
        m.tick(s(15) + RECOVERY_TIMEOUT);
        let (servers, asked) = request(&actions(&mut m));
        assert_eq!((servers.len(), asked.request_id.as_str()), (2, "boot/configured/a/1"));
    }

    #[test]
    fn a_drained_server_is_left_after_the_grace() {
        let mut m = machine(2);
        let slot = m.want(s(0), configured("a", 1));
        m.allocated(s(0), slot, Ok((0, lease("l1", 1))));
        actions(&mut m);
        m.drain(s(1), 0, Some(s(60)));
        let news = told(&actions(&mut m));
        assert!(
            news.iter().any(|c| matches!(c, Change::PrepareForLoss { left, .. } if *left == s(60))),
            "{news:?}"
        );
        m.renewed(s(60), 0, &["l1".into()], Ok(vec![]));
        m.tick(s(60));
        assert!(m.slot(slot).unwrap().held().is_some());
        m.tick(s(61));
        assert!(m.slot(slot).unwrap().held().is_none());
        m.tick(s(63));
        let todo = actions(&mut m);
        assert!(todo.contains(&Action::Release { server: 0, lease: "l1".into() }));
        assert_eq!(request(&todo).0, [1]);
    }

    #[test]
    fn a_lease_that_a_stopping_server_denies_is_given_back() {
        let mut m = machine(1);
        let slot = m.want(s(0), configured("a", 1));
        m.allocated(s(0), slot, Ok((0, lease("l1", 0))));
        actions(&mut m);
        m.workers(s(1), slot, "l1", Err(PoolError::new(Trouble::NoSuchLease, "no such lease")));
        let release = Action::Release { server: 0, lease: "l1".into() };
        let todo = actions(&mut m);
        assert!(todo.contains(&release) && told(&todo).iter().any(|c| matches!(c, Change::Lost { .. })));
        // The server is still unreachable.
        m.released(s(2), 0, "l1", Err(unreachable()));
        m.tick(s(10));
        assert!(actions(&mut m).contains(&release));
    }

    #[test]
    fn a_worker_that_ends_before_it_arrives_is_not_granted() {
        let mut m = machine(1);
        let slot = m.want(s(0), configured("a", 1));
        m.allocated(s(0), slot, Ok((0, lease("l1", 0))));
        actions(&mut m);
        let ready = control::WorkersReady { stock: 0, ended: vec![vec![0; 16]] };
        let event = Some(control::pool_event::Event::WorkersReady(ready));
        m.event(s(1), 0, control::PoolEvent { lease: "l1".into(), event });
        m.workers(s(1), slot, "l1", Ok(lease("l1", 1).workers));
        assert!(m.take(s(1), &[slot]).is_none());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]
        /// Leases are neither leaked nor given up, and in the end every lease that fits is held.
        #[test]
        fn leases_are_never_leaked_and_never_given_up(
            limits in proptest::collection::vec(1u32..6, 2),
            steps in proptest::collection::vec(step(), 1..60),
        ) {
            let mut m = machine(2);
            let mut world = World { free: vec![4, 2], limits, ..World::default() };
            let mut now = s(0);
            let mut broken = false;
            let mut names = 0;
            let mut configuration: Vec<Spec> = Vec::new();
            let mut processes: Vec<(Slot, String)> = Vec::new();
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
                    Step::Configure(leases) => {
                        configuration = tables(&leases);
                        m.configure(now, configuration.clone());
                        for spec in configuration.iter().filter(|t| matches!(t.class, Class::Boot | Class::Background)) {
                            prop_assert!(m.by_key(&spec.key).is_some(), "{} is configured", spec.key);
                        }
                    }
                    Step::Preallocate(n) => m.preallocate(now, n),
                    Step::Login(n) => m.session_opened(now, session(n)),
                    Step::Logout(n) => m.session_closed(now, &format!("s{n}")),
                    Step::Process(n, in_session) => {
                        let session = session(n);
                        let id = Some(session.id.as_str()).filter(|_| in_session);
                        m.demand(now, session.uid, Some(&session.user), true, id);
                        play(&mut m, &mut world, now, broken);
                        let used = m.slots().find_map(|(slot, w)| Some((slot, w.held()?.lease.id.clone())));
                        if let Some((slot, lease)) = used {
                            m.process_started(slot);
                            processes.push((slot, lease));
                        }
                    }
                    Step::Ends(n) => {
                        if n < processes.len() {
                            let (slot, lease) = processes.swap_remove(n);
                            let there = m.slot(slot).and_then(Wanted::held).is_some_and(|h| h.lease.id == lease);
                            m.process_ended(now, slot, &lease, vec![1; 16]);
                            play(&mut m, &mut world, now, false);
                            prop_assert!(!there || world.ended.contains(&lease), "no server was notified of the exit");
                        }
                    }
                    Step::Drain(server, grace) => m.drain(now, server, grace.map(s)),
                    Step::Restart => {
                        let seed = u64::from(world.counter);
                        m = restart(&m, &mut world, now, seed);
                        m.configure(now, configuration.clone());
                        for (slot, lease) in &mut processes {
                            *slot = m.slot_of(lease).unwrap_or(0);
                            m.process_started(*slot);
                        }
                    }
                }
                play(&mut m, &mut world, now, broken);
                check(&m);
                // An idle machine returns its next deadline.
                prop_assert!(m.deadline().is_some());
            }
            // The pool answers again; time passes until every lease has settled.
            for server in 0..2 {
                m.drain(now, server, None);
            }
            for (slot, lease) in processes.drain(..) {
                m.process_ended(now, slot, &lease, vec![1; 16]);
            }
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
            let background = |w: &Wanted| w.spec.class == Class::Background;
            let spare = m.slots().find(|(_, w)| background(w) && w.held().is_some());
            for (_, wanted) in m.slots() {
                let fits = (0..2).any(|server| world.fits(server, wanted.spec.gpus).is_ok());
                let waits = wanted.held().is_none() && !background(wanted);
                prop_assert!(!fits || !waits, "{} waits although it fits", wanted.spec.name);
                prop_assert!(spare.is_none() || !waits, "{} waits for what a background lease has", wanted.spec.name);
                prop_assert_eq!(wanted.processes, 0);
            }
        }
    }
}
