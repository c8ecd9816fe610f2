//! Grants: which leases a process uses, and its workers and tickets.

use std::time::Duration;

use gpusession_common::words::Class;
use gpusession_proto::grant::{Denial, Endpoint};
use gpusession_proto::journal::Event;
use gpusession_proto::ticket::{MAX_USER, Ticket};
use gpusession_proto::{control, preface};
use tokio::sync::oneshot;
use tracing::{debug, warn};

use super::actor::Actor;
use super::message::Message;
use crate::addresses::MAX_ADDRESSES;
use crate::leases::machine::{Held, Wanted};
use crate::leases::readings::Place;
use crate::leases::{
    Answer, Caller, Failure, Granted, Interruption, LeaseState, Owner, Slot, Spec, WorkerRequest,
};
use crate::pool::{PoolError, Trouble, unencrypted};

/// Most users of whose programs a lease's failures are kept.
const MAX_FAILURES: usize = 16;
/// Most leases that one program can name; the library uses no more.
const MAX_NAMED: usize = 8;

/// Returns `true` if the lease is bound to a control group of the process.
fn of_group(spec: &Spec, caller: &Caller) -> bool {
    spec.control_group.as_ref().is_some_and(|group| caller.is_below(group))
}

/// Returns `true` if the process's user owns the lease.
///
/// A subordinate uid shares the leases of class `user` that its owner has for each CUDA program.
fn is_owner(spec: &Spec, caller: &Caller) -> bool {
    let shares = || spec.class == Class::User && !spec.once && caller.access;
    match &spec.owner {
        Owner::Uid(uid) if *uid == caller.uid => true,
        Owner::Uid(uid) => caller.principal.as_ref().is_some_and(|user| user.uid == *uid) && shares(),
        Owner::User(name) => caller.user.as_deref() == Some(name),
        Owner::Everyone => caller.access,
    }
}

impl Actor {
    /// Wants the leases that the configuration has for a process's session or user.
    ///
    /// For a subordinate uid, these are its owner's leases, so that many uids get no more of them.
    pub(super) fn demand(&mut self, caller: &Caller) {
        let (now, session) = (self.now(), caller.session.as_deref());
        match &caller.principal {
            None => self.machine.demand(now, caller.uid, caller.user.as_deref(), caller.access, session),
            Some(_) if !caller.access => {}
            Some(user) => self.machine.demand(now, user.uid, user.name.as_deref(), true, None),
        }
    }

    /// Selects a process's leases: the named ones, else those of its control group, its session's,
    /// its user's, those for all.
    pub(super) fn select(
        &self,
        caller: &Caller,
        wish: &WorkerRequest,
    ) -> Result<Vec<Slot>, (Denial, String)> {
        let mine = |spec: &Spec| is_owner(spec, caller);
        if let Some(named) = wish.lease.as_deref() {
            return self.named(named, caller, &mine);
        }
        let all = |test: &dyn Fn(&Spec) -> bool| {
            let slots = self.machine.slots().filter(|(_, w)| test(&w.spec));
            let mut slots: Vec<_> = slots.map(|(slot, w)| (w.spec.order, slot)).collect();
            slots.sort_unstable();
            slots.into_iter().map(|(_, slot)| slot).collect::<Vec<_>>()
        };
        let own = all(&|spec| of_group(spec, caller) && mine(spec));
        if !own.is_empty() {
            return Ok(own);
        }
        let configured = |test: &dyn Fn(&Spec) -> bool| all(&|spec| !spec.once && test(spec));
        let of_session = |spec: &Spec| spec.session.is_some() && spec.session == caller.session;
        let own = configured(&|spec| of_session(spec) && mine(spec));
        if !own.is_empty() {
            return Ok(own);
        }
        let own = configured(&|spec| spec.session.is_none() && spec.owner != Owner::Everyone && mine(spec));
        if !own.is_empty() {
            return Ok(own);
        }
        let boot = configured(&|spec| spec.owner == Owner::Everyone);
        if boot.is_empty() {
            return Err((Denial::NoDevice, "no lease is configured for this user".into()));
        }
        if !caller.access {
            let who = caller.user.clone().unwrap_or_else(|| format!("uid {}", caller.uid));
            return Err((Denial::NoDevice, format!("[access] does not let {who} use this machine's GPUs")));
        }
        Ok(boot)
    }

    /// Finds the leases of a list `ID|NAME[,ID|NAME...]`, in its order.
    fn named(
        &self,
        list: &str,
        caller: &Caller,
        mine: &dyn Fn(&Spec) -> bool,
    ) -> Result<Vec<Slot>, (Denial, String)> {
        // A name may belong to leases of several sessions: that of the caller's session comes
        // first.
        let another = |w: &Wanted| w.spec.session.is_none() || w.spec.session != caller.session;
        let find = |id: &str| {
            // Also a lease of an earlier daemon that its server has not confirmed yet.
            let of_id = self.machine.slot_of(id);
            self.machine
                .slots()
                .filter(|_| !id.is_empty())
                .filter(|(slot, w)| of_id == Some(*slot) || w.spec.name == id)
                .filter(|(_, w)| mine(&w.spec) || caller.is_root())
                .min_by_key(|(_, w)| another(w))
                .map(|(slot, _)| slot)
        };
        // Only root uses a lease of a control group from outside.
        let outside = |slot: Slot| {
            let spec = &self.machine.slot(slot)?.spec;
            let group =
                spec.control_group.as_ref().filter(|_| !of_group(spec, caller) && !caller.is_root())?;
            Some((Denial::NoDevice, format!("the lease belongs to the processes of control group {group}")))
        };
        // A lease's name may contain a comma.
        if let Some(slot) = find(list) {
            return outside(slot).map_or_else(|| Ok(vec![slot]), Err);
        }
        let denied = |reason: String| (Denial::NoDevice, reason);
        let mut slots = Vec::new();
        for id in list.split(',').map(str::trim) {
            if slots.len() == MAX_NAMED {
                return Err(denied(format!("GPUSESSION_LEASE names more than {MAX_NAMED} leases")));
            }
            match find(id) {
                Some(slot) if slots.contains(&slot) => {
                    return Err(denied(format!("GPUSESSION_LEASE names lease {id} twice")));
                }
                Some(slot) => match outside(slot) {
                    Some(refused) => return Err(refused),
                    None => slots.push(slot),
                },
                None => return Err(denied(format!("lease {id}: not found among this user's leases"))),
            }
        }
        Ok(slots)
    }

    /// Returns the held leases that a process would get, with their servers.
    pub(super) fn places(
        &self,
        caller: &Caller,
        wish: &WorkerRequest,
    ) -> Result<Vec<Place>, (Denial, String)> {
        let slots = self.select(caller, wish)?;
        let places: Vec<Place> = slots
            .iter()
            .filter_map(|slot| {
                let held = self.machine.slot(*slot)?.held()?;
                let (lease, reported) = (held.id.clone(), held.reported.clone());
                Some(Place { lease, reported, server: self.servers[held.server].clone() })
            })
            .collect();
        if places.is_empty() {
            let trouble = slots.iter().find_map(|s| self.machine.slot(*s)?.trouble.as_ref());
            return Err((
                Denial::NotReady,
                trouble.map_or_else(|| "the lease is being allocated".into(), |e| e.message.clone()),
            ));
        }
        Ok(places)
    }

    pub(super) fn grant(&mut self, caller: Caller, wish: WorkerRequest, reply: oneshot::Sender<Answer>) {
        let now = self.now();
        // A job has its own lease, and wants none of its user's.
        let job = |spec: &Spec| of_group(spec, &caller) && is_owner(spec, &caller);
        let of_job = || self.machine.slots().any(|(_, w)| job(&w.spec));
        if wish.lease.is_none() && !of_job() {
            self.demand(&caller);
        }
        let slots = match self.select(&caller, &wish) {
            Ok(slots) => slots,
            Err((denial, reason)) => {
                let _ = reply.send(Answer::Denied(denial, reason));
                return;
            }
        };
        let held: Vec<Slot> = slots
            .iter()
            .copied()
            .filter(|s| self.machine.slot(*s).is_some_and(|w| w.held().is_some()))
            .collect();
        if held.len() < slots.len() && wish.lease.is_none() && !held.is_empty() {
            debug!(
                "process {}: runs on {} of {} leases; the others are not held",
                caller.pid,
                held.len(),
                slots.len()
            );
        }
        // A program gets all leases that it names, or none.
        if held.is_empty() || (wish.lease.is_some() && held.len() < slots.len()) {
            let missing = slots.iter().find(|slot| !held.contains(slot));
            let wanted = missing.and_then(|slot| self.machine.slot(*slot));
            let _ =
                reply.send(no_gpu(wanted.and_then(|w| w.trouble.as_ref()), "the lease is being allocated"));
            return;
        }
        if let Some(reason) = held.iter().find_map(|slot| self.protocol_mismatch(*slot)) {
            let _ = reply.send(Answer::Denied(Denial::ProtocolMismatch, reason));
            return;
        }
        if let Some(reason) = held.iter().find_map(|slot| self.unencrypted(*slot)) {
            let _ = reply.send(Answer::Denied(Denial::NotReady, reason));
            return;
        }
        if self.is_behind(&caller, &wish, &held) {
            let reason = "the lease's next worker is for a waiting program of a user who has fewer ([access] fair_share)";
            let _ = reply.send(Answer::Behind(reason.into()));
            return;
        }
        if !wish.environment.is_empty() {
            self.grant_cold(caller, wish, held, reply);
            return;
        }
        let Some(workers) = self.machine.take(now, &held) else {
            self.wait_in_line(&caller, &wish, &held);
            if let Some(reason) = held.iter().find_map(|slot| self.away(*slot)) {
                let _ = reply.send(Answer::Later(reason));
                return;
            }
            let trouble = held.iter().find_map(|slot| self.no_stock(*slot));
            let _ = reply.send(match trouble {
                None => Answer::Later("the server is starting a worker".into()),
                trouble => no_worker(trouble, ""),
            });
            return;
        };
        let (answer, granted) = self.mint(&caller, &wish, &held, workers);
        let refused = !matches!(answer, Answer::Granted(..));
        if reply.send(answer).is_err() || refused {
            self.processes_ended(granted);
        }
    }

    /// Notes that the program has found no worker of these leases.
    fn wait_in_line(&mut self, caller: &Caller, wish: &WorkerRequest, held: &[Slot]) {
        if let Some(waiter) = &wish.waiter {
            let lacking = held.iter().copied().filter(|slot| {
                !wish.environment.is_empty() || self.machine.slot(*slot).is_none_or(|w| stock(w) == 0)
            });
            self.line.waits(waiter, caller.account(), lacking.collect());
        }
    }

    /// Returns `true` if all workers in stock of a lease are for users with fewer of them.
    fn is_behind(&self, caller: &Caller, wish: &WorkerRequest, held: &[Slot]) -> bool {
        let behind = |slot: &Slot| {
            let ahead = self.line.ahead(*slot, caller.account());
            ahead > 0 && self.machine.slot(*slot).is_some_and(|wanted| stock(wanted) <= ahead)
        };
        wish.waiter.is_some() && !caller.is_root() && held.iter().any(behind)
    }

    /// Returns where a lease is in the queue whose GPUs are lent or parked.
    ///
    /// Of a server that does not answer, the lease comes back no sooner than any other.
    fn away(&self, slot: Slot) -> Option<String> {
        let wanted = self.machine.slot(slot)?;
        if wanted.trouble.as_ref().is_some_and(|e| e.trouble == Trouble::Unreachable) {
            return None;
        }
        let held = wanted.held().filter(|held| held.state == LeaseState::Parked || held.parking)?;
        let place = held.waits().map(|waits| waits.waiting());
        Some(place.unwrap_or_else(|| "the lease's GPUs are with other leases, and come back".into()))
    }

    /// Returns why a lease's server gives no worker.
    ///
    /// A call that broke is no reason while the server answers heartbeats: it has restarted, and
    /// starts a worker.
    fn no_stock(&self, slot: Slot) -> Option<&PoolError> {
        let wanted = self.machine.slot(slot)?;
        let answers = wanted.held().is_some_and(|held| self.machine.health(held.server).trouble.is_none());
        wanted.trouble.as_ref().filter(|e| !(answers && e.trouble == Trouble::Unreachable))
    }

    /// Returns why the lease's server would refuse a program's connection, if it would.
    fn protocol_mismatch(&self, slot: Slot) -> Option<String> {
        let about = &self.about[self.machine.slot(slot)?.held()?.server].facts;
        let (oldest, newest) = (about.oldest_protocol, about.protocol);
        (!preface::served(oldest, newest)).then(|| {
            let oldest = oldest.unwrap_or(newest);
            let (found, remedy) = preface::mismatch(&about.name, oldest, newest, preface::VERSION.into());
            format!("{found}: {remedy}")
        })
    }

    /// Returns why a program may not use a lease whose data is not encrypted.
    ///
    /// The lease may be from a time when the configuration allowed that.
    fn unencrypted(&self, slot: Slot) -> Option<String> {
        let lease = &self.machine.slot(slot)?.held()?.reported;
        (!lease.encrypted && !self.clear).then(|| unencrypted(&lease.server))
    }

    /// Grants workers that start cold, for a process with a driver environment of its own.
    fn grant_cold(
        &mut self,
        caller: Caller,
        wish: WorkerRequest,
        held: Vec<Slot>,
        reply: oneshot::Sender<Answer>,
    ) {
        let asks: Vec<_> = held
            .iter()
            .filter_map(|slot| {
                let held = self.machine.slot(*slot)?.held()?;
                Some((*slot, held.clone(), self.servers[held.server].clone()))
            })
            .collect();
        let boot_id = self.here.boot_id;
        let issued = self.now().as_micros() as u64;
        self.wait_in_line(&caller, &wish, &held);
        for (slot, ..) in &asks {
            self.machine.process_started(*slot);
            self.line.takes(*slot, caller.account());
        }
        let messages = self.messages.clone();
        tokio::spawn(async move {
            let mut taken = Vec::new();
            let mut failed = None;
            for (slot, held, pool) in asks {
                let worker = if failed.is_some() {
                    None
                } else {
                    match pool.take_workers(held.id.clone(), 1, 1, wish.environment.clone()).await {
                        Ok(workers) if workers.is_empty() => {
                            failed = Some(PoolError::new(Trouble::NoCapacity, "the server gives no worker"));
                            None
                        }
                        Ok(workers) => workers.into_iter().next(),
                        Err(error) => {
                            failed = Some(error);
                            None
                        }
                    }
                };
                // Each slot was counted above; `Message::Ended` uncounts one without a worker too.
                taken.push((slot, held, worker.unwrap_or_default()));
            }
            let (answer, granted) = mint(&caller, &wish, boot_id, issued, &taken, entropy);
            let answer = match failed {
                None => answer,
                Some(e) => match no_worker(Some(&e), "") {
                    Answer::Wait(denial @ Denial::NotReady, reason) => Answer::Denied(denial, reason),
                    answer => answer,
                },
            };
            let refused = !matches!(answer, Answer::Granted(..));
            if (reply.send(answer).is_err() || refused)
                && let Some(messages) = messages.upgrade()
            {
                let _ = messages.send(Message::Ended(granted));
            }
        });
    }

    fn mint(
        &mut self,
        caller: &Caller,
        wish: &WorkerRequest,
        held: &[Slot],
        workers: Vec<control::Worker>,
    ) -> (Answer, Vec<Granted>) {
        let taken: Vec<_> = held
            .iter()
            .zip(workers)
            .filter_map(|(slot, worker)| Some((*slot, self.machine.slot(*slot)?.held()?.clone(), worker)))
            .collect();
        for (slot, ..) in &taken {
            self.machine.process_started(*slot);
            self.line.takes(*slot, caller.account());
        }
        mint(caller, wish, self.here.boot_id, self.now().as_micros() as u64, &taken, entropy)
    }

    /// Records the outcome of a user's program; a repeated failure of one process is logged once.
    pub(super) fn report_outcome(&mut self, slot: Slot, uid: u32, failure: Option<Failure>) {
        let now = self.now();
        let Some(wanted) = self.machine.slot(slot) else { return };
        let failures = self.failures.entry(slot).or_default();
        let before = failures.iter().position(|(f, _)| f.uid == uid).map(|at| failures.remove(at).0);
        let Some(failure) = failure else { return };
        if !failure.again && before.as_ref() != Some(&failure) {
            let lease = wanted.shown_id(slot);
            let (event, what) = match failure.running {
                true => (Event::ProgramLost, "has lost its GPUs"),
                false => (Event::ProgramUnserved, "could not be served"),
            };
            let Failure { pid, program, reason, .. } = &failure;
            warn!(
                message_id = event.id(),
                gpusession_lease = lease,
                gpusession_user = uid,
                gpusession_reason = reason,
                "process {pid} ({program}) of uid {uid}: {what}: {reason}"
            );
        }
        let pid = failure.pid;
        if failures.len() == MAX_FAILURES {
            failures.remove(0);
        }
        failures.push((failure, now));
        self.interruptions.retain(|_, (of, lost, _)| *of != slot || lost.pid != pid);
    }

    /// Records the state of a program's connection to its worker.
    pub(super) fn interrupted(
        &mut self,
        granted: Granted,
        mut interruption: Interruption,
        for_time: Option<Duration>,
    ) {
        let now = self.now();
        let Granted { slot, lease, worker, .. } = granted;
        if self.machine.slot(slot).and_then(|w| w.held()).is_none_or(|held| held.id != lease) {
            return;
        }
        interruption.since = for_time.map(|time| now.saturating_sub(time));
        self.interruptions.insert(worker, (slot, interruption, now));
    }

    pub(super) fn processes_ended(&mut self, granted: Vec<Granted>) {
        let now = self.now();
        self.line.ended(&granted);
        for one in granted {
            self.interruptions.remove(&one.worker);
            let worker = if one.worker == [0; 16] { Vec::new() } else { one.worker.to_vec() };
            self.machine.process_ended(now, one.slot, &one.lease, worker);
        }
    }
}

/// Returns the number of a lease's workers that no process has.
fn stock(wanted: &Wanted) -> usize {
    wanted.held().map_or(0, |held| held.stock.len())
}

/// Answers a process that gets no GPU: it waits, or is refused, depending on the trouble.
fn no_gpu(trouble: Option<&PoolError>, otherwise: &str) -> Answer {
    match trouble {
        None => Answer::Wait(Denial::NotReady, otherwise.into()),
        Some(e) => match e.trouble {
            Trouble::LimitExceeded => Answer::Denied(Denial::Quota, e.message.clone()),
            Trouble::OutOfMemory => Answer::Wait(Denial::OutOfMemory, e.message.clone()),
            Trouble::Protocol => Answer::Denied(Denial::ProtocolMismatch, e.message.clone()),
            Trouble::Clear => Answer::Denied(Denial::NotReady, e.message.clone()),
            _ => Answer::Wait(Denial::NotReady, e.waiting()),
        },
    }
}

/// Answers a process whose lease has no worker for it.
///
/// Unlike [`no_gpu`] it waits for a limit, which has room again when another program of the lease
/// exits.
fn no_worker(trouble: Option<&PoolError>, otherwise: &str) -> Answer {
    match no_gpu(trouble, otherwise) {
        Answer::Denied(denial @ Denial::Quota, reason) => Answer::Wait(denial, reason),
        answer => answer,
    }
}

/// Returns a nonce; `None` if the kernel gives no random bytes.
fn entropy() -> Option<[u8; 16]> {
    let mut nonce = [0; 16];
    getrandom::fill(&mut nonce).ok().map(|()| nonce)
}

/// Seals a ticket for each worker; also returns the workers, for the caller to give back.
///
/// Without a nonce the process gets no ticket, since no two tickets may be equal.
fn mint(
    caller: &Caller,
    wish: &WorkerRequest,
    boot_id: [u8; 16],
    issued_usec: u64,
    taken: &[(Slot, Held, control::Worker)],
    entropy: impl Fn() -> Option<[u8; 16]>,
) -> (Answer, Vec<Granted>) {
    let worker_id = |worker: &control::Worker| worker.id.as_slice().try_into().unwrap_or_default();
    let granted: Vec<Granted> = taken
        .iter()
        .map(|(slot, held, worker)| Granted {
            slot: *slot,
            lease: held.id.clone(),
            worker: worker_id(worker),
            user: Some(caller.account()),
        })
        .collect();
    let mut endpoints = Vec::new();
    for (_, held, worker) in taken {
        let Ok(key) = <[u8; 32]>::try_from(held.ticket_key.as_slice()) else { continue };
        let fingerprint: Option<[u8; 32]> = worker.fingerprint.as_slice().try_into().ok();
        if held.reported.encrypted && fingerprint.is_none() {
            // A malformed field must not lead to an unencrypted connection.
            continue;
        }
        let Some(nonce) = entropy() else {
            let reason = "the kernel gives no random bytes for a ticket";
            warn!("process {} of uid {}: no GPU: {reason}", caller.pid, caller.uid);
            return (Answer::Denied(Denial::NotReady, reason.into()), granted);
        };
        let ticket = Ticket {
            lease: held.id.clone(),
            worker: worker_id(worker),
            uid: caller.uid,
            user: caller.user.clone().filter(|name| name.len() <= MAX_USER).unwrap_or_default(),
            pid: caller.pid,
            boot_id,
            issued_usec,
            nonce,
            program: wish.program.clone(),
            executable: wish.executable.clone(),
        };
        endpoints.push(Endpoint {
            server: held.reported.server.clone(),
            addresses: held.data_addresses.clone(),
            worker: ticket.worker,
            key: preface::Key::new(&key, &ticket.worker, caller.uid),
            fingerprint: fingerprint.filter(|_| held.reported.encrypted),
            ticket: ticket.seal(&key),
            lease: ticket.lease,
            devices: held.reported.devices.len() as u32,
        });
    }
    (Answer::Granted(endpoints, granted.clone()), granted)
}

/// Returns `true` if a server's lease is within the bounds that the daemon accepts.
pub(super) fn valid(lease: &control::Lease) -> bool {
    !lease.id.is_empty()
        && lease.id.len() <= 64
        && lease.id.bytes().all(|b| b.is_ascii_alphanumeric())
        && lease.ticket_key.len() == 32
        && lease.ttl_usec >= 1_000_000
        && lease.devices.len() <= 1024
        && data_addresses_are_valid(&lease.data_addresses)
}

/// Returns `true` if a server names as many addresses of its data port as the daemon accepts.
pub(super) fn data_addresses_are_valid(addresses: &[String]) -> bool {
    (1..=MAX_ADDRESSES).contains(&addresses.len())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::leases::machine::Machine;

    #[test]
    fn without_random_bytes_no_ticket_is_made_and_the_worker_is_given_back() {
        let mut machine = Machine::new("boot".into(), String::new(), fastrand::Rng::with_seed(1));
        machine.add_server(Duration::ZERO, "gpu1:7601".into());
        let slot = machine.want(Duration::ZERO, Spec::requested("request/1".into(), 1000));
        let lease = control::Lease {
            id: "abcdefghijkl".into(),
            ticket_key: vec![7; 32],
            ttl_usec: 60_000_000,
            ..Default::default()
        };
        machine.allocated(Duration::ZERO, slot, Ok((0, lease)));
        let held = machine.slot(slot).unwrap().held().unwrap().clone();
        let worker = control::Worker { id: vec![9; 16], ..Default::default() };
        let taken = [(slot, held, worker)];
        let caller = Caller {
            uid: 1000,
            pid: 5,
            user: None,
            principal: None,
            access: true,
            session: None,
            control_groups: vec![],
            contained: false,
        };
        let wish = WorkerRequest::default();
        let mint = |entropy: fn() -> Option<[u8; 16]>| mint(&caller, &wish, [1; 16], 0, &taken, entropy);
        let workers = vec![Granted { slot, lease: "abcdefghijkl".into(), worker: [9; 16], user: Some(1000) }];

        let (answer, granted) = mint(|| None);
        assert!(matches!(answer, Answer::Denied(Denial::NotReady, _)), "{answer:?}");
        assert_eq!(granted, workers);

        let (answer, granted) = mint(|| Some([3; 16]));
        let Answer::Granted(endpoints, of_answer) = answer else { panic!("{answer:?}") };
        assert_eq!((&of_answer, &granted), (&workers, &workers));
        let ticket = Ticket::open(&endpoints[0].ticket, &[7; 32], &[9; 16]).unwrap();
        assert_eq!((ticket.nonce, ticket.pid), ([3; 16], 5));
    }
}
