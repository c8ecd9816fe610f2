//! Objects that processes of one lease share.
//!
//! The supervisor routes a request between two workers by its own books, and passes on one
//! descriptor of the driver. It knows which worker has imports of which object: such processes
//! cannot be parked, and memory that its own worker has released counts for an importer.

use std::collections::{BTreeSet, HashMap};
use std::os::fd::OwnedFd;
use std::time::Duration;

use gpusession_proto::share::{EVENTS, Name};
use gpusession_proto::supervise::{Charge, Holding, MAX_HOLDINGS, MAX_SHARE_REQUESTS, ToWorker, Unshared};
use tracing::warn;

use super::worker::{Command, Phase, Worker, hex};
use super::{State, Supervisor, WorkerId};
use crate::clock::Moment;

/// Time that a worker may take to answer for its object.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// Most objects of which one worker has imports.
const MAX_IMPORTED: usize = 1 << 13;

/// A request without an answer.
#[derive(Debug, Clone)]
struct Request {
    importer: WorkerId,
    serial: u64,
    name: Name,
    since: Moment,
    /// Whether the object's worker has it; not while that worker's memory moves.
    asked: bool,
}

/// An object with imports.
#[derive(Debug, Default)]
struct Shared {
    /// Workers with imports, and the number of each one's. The first one counts an orphan.
    holders: Vec<(WorkerId, u32)>,
    /// Its own worker counts it no longer.
    orphan: bool,
}

type Object = (WorkerId, u64);

/// Counters of one worker, so that no question about it goes through all objects.
#[derive(Debug, Default)]
struct Account {
    /// Its requests without an answer.
    asked: usize,
    /// Objects of which it has imports.
    imported: usize,
    /// Its own objects with imports.
    exported: usize,
}

/// Requests without an answer by number, and all objects with imports.
#[derive(Debug, Default)]
pub(super) struct Shares {
    last: u64,
    open: HashMap<u64, Request>,
    shared: HashMap<Object, Shared>,
    accounts: HashMap<WorkerId, Account>,
}

impl Shares {
    /// Returns `true` if a worker has imports, or others have imports of its objects or want it.
    pub(super) fn involve(&self, id: &WorkerId) -> bool {
        let counts = |account: &Account| account.imported > 0 || account.exported > 0;
        self.accounts.get(id).is_some_and(counts)
            || self.open.values().any(|request| request.name.worker == *id && request.asked)
    }

    /// Changes a worker's counters.
    fn count(&mut self, id: WorkerId, change: impl FnOnce(&mut Account)) {
        let account = self.accounts.entry(id).or_default();
        change(account);
        if account.asked == 0 && account.imported == 0 && account.exported == 0 {
            self.accounts.remove(&id);
        }
    }

    /// Adds a request and returns its number; `None`: the worker has too many, or too many imports.
    fn ask(&mut self, request: Request) -> Option<u64> {
        let account = self.accounts.get(&request.importer);
        if account.is_some_and(|a| a.asked >= MAX_SHARE_REQUESTS || a.imported >= MAX_IMPORTED) {
            return None;
        }
        self.count(request.importer, |account| account.asked += 1);
        self.last += 1;
        self.open.insert(self.last, request);
        Some(self.last)
    }

    /// Takes out the request of a number that an object's own worker answers.
    fn answered(&mut self, number: u64, exporter: &WorkerId) -> Option<Request> {
        self.open.get(&number).filter(|r| r.name.worker == *exporter)?;
        let request = self.open.remove(&number)?;
        self.count(request.importer, |account| account.asked -= 1);
        Some(request)
    }

    /// Returns the requests that a worker has not got yet, as asked from now on.
    fn late(&mut self, id: &WorkerId, now: Moment) -> Vec<(u64, Name)> {
        let mine = self.open.iter_mut().filter(|(_, r)| r.name.worker == *id && !r.asked);
        let asked = mine.map(|(number, request)| {
            (request.asked, request.since) = (true, now);
            (*number, request.name)
        });
        asked.collect()
    }

    /// Takes out the requests that `which` selects.
    fn take(&mut self, which: impl Fn(&Request) -> bool) -> Vec<Request> {
        let found = self.open.iter().filter(|(_, r)| which(r)).map(|(number, r)| (*number, r.name.worker));
        let found: Vec<_> = found.collect();
        found.iter().filter_map(|(number, exporter)| self.answered(*number, exporter)).collect()
    }

    /// Adds imports of an object.
    fn hold(&mut self, object: Object, id: WorkerId, imports: u32, first: bool) -> &mut Shared {
        if !self.shared.contains_key(&object) {
            self.count(object.0, |account| account.exported += 1);
        }
        let holders = &mut self.shared.entry(object).or_default().holders;
        match holders.iter_mut().find(|(holder, _)| *holder == id) {
            Some((_, count)) => *count = count.saturating_add(imports),
            None => {
                holders.insert(if first { 0 } else { holders.len() }, (id, imports));
                self.count(id, |account| account.imported += 1);
            }
        }
        self.shared.entry(object).or_default()
    }

    /// Subtracts imports; returns the worker that counts the object from now on, if that changes.
    fn drop_imports(&mut self, object: &Object, id: &WorkerId, imports: u32) -> Option<WorkerId> {
        let shared = self.shared.get_mut(object)?;
        let at = shared.holders.iter().position(|(holder, _)| holder == id)?;
        shared.holders[at].1 = shared.holders[at].1.saturating_sub(imports);
        if shared.holders[at].1 > 0 {
            return None;
        }
        shared.holders.remove(at);
        let heir = shared.holders.first().map(|(holder, _)| *holder);
        let counts = shared.orphan && at == 0;
        self.count(*id, |account| account.imported -= 1);
        if heir.is_none() {
            self.shared.remove(object);
            self.count(object.0, |account| account.exported -= 1);
        }
        heir.filter(|_| counts)
    }

    /// Returns the workers that share objects with one, each once.
    fn partners(&self, id: &WorkerId) -> BTreeSet<WorkerId> {
        let part = |(object, shared): (&Object, &Shared)| {
            let own = std::iter::once(object.0);
            own.chain(shared.holders.iter().map(|(holder, _)| *holder)).collect::<Vec<_>>()
        };
        let theirs = self.shared.iter().map(part).filter(|users| users.contains(id));
        theirs.flatten().filter(|other| other != id).collect()
    }

    /// Ends all imports of an object.
    fn end(&mut self, object: &Object) {
        let holders = self.shared.get(object).map(|shared| shared.holders.clone());
        for (holder, imports) in holders.unwrap_or_default() {
            self.drop_imports(object, &holder, imports);
        }
    }

    /// Notes that an object's own worker counts it no longer; returns the one that does.
    fn orphan(&mut self, object: &Object) -> Option<WorkerId> {
        let shared = self.shared.get_mut(object)?;
        let before = std::mem::replace(&mut shared.orphan, true);
        shared.holders.first().map(|(holder, _)| *holder).filter(|_| !before)
    }
}

/// Makes a worker count an object.
fn inherit(workers: &HashMap<WorkerId, Worker>, heir: Option<WorkerId>, (worker, object): Object) {
    if let Some(heir) = heir.and_then(|heir| workers.get(&heir)) {
        let _ = heir.orders.tells.send(Command::Tell(ToWorker::ShareInherited { worker, object }));
    }
}

/// Tells a worker that another one, with which it shared objects, has exited.
fn lost(workers: &HashMap<WorkerId, Worker>, to: &WorkerId, worker: WorkerId) {
    if let Some(to) = workers.get(to) {
        let _ = to.orders.tells.send(Command::Tell(ToWorker::ShareLost { worker }));
    }
}

/// Answers a request for an object.
fn answer(
    workers: &HashMap<WorkerId, Worker>,
    request: &Request,
    given: Result<(Charge, OwnedFd), Unshared>,
) {
    let Some(worker) = workers.get(&request.importer) else { return };
    let serial = request.serial;
    let command = match given {
        Ok((charge, descriptor)) => {
            Command::Give(ToWorker::ShareGranted { serial, given: Ok(charge) }, descriptor)
        }
        Err(why) => Command::Tell(ToWorker::ShareGranted { serial, given: Err(why) }),
    };
    let _ = worker.orders.tells.send(command);
}

impl Supervisor {
    /// Asks the worker of an object for it, if it serves a process of the same lease.
    pub(super) fn share_wanted(&self, state: &mut State, importer: WorkerId, serial: u64, name: Name) {
        let State { workers, shares, .. } = state;
        let serves = |w: &&Worker| w.phase == Phase::Active && w.process.is_some();
        let Some(from) = workers.get(&importer).filter(serves) else { return };
        let request = Request { importer, serial, name, since: self.0.clock.now(), asked: true };
        let known = |w: &&Worker| w.phase == Phase::Parked || serves(w);
        let Some(to) = workers.get(&name.worker).filter(|to| known(to) && to.lease == from.lease) else {
            return answer(workers, &request, Err(Unshared::Elsewhere));
        };
        let asked = !to.moving && to.phase == Phase::Active;
        match shares.ask(Request { asked, ..request.clone() }) {
            // It gets the question once its memory is back.
            Some(_) if !asked => {}
            Some(number) => {
                let _ = to.orders.tells.send(Command::Tell(ToWorker::ShareAsked { number, name }));
            }
            None => answer(workers, &request, Err(Unshared::Busy)),
        }
    }

    /// Passes on the questions for a worker whose memory is back.
    pub(super) fn shares_back(&self, state: &mut State, id: &WorkerId) {
        let State { workers, shares, .. } = state;
        let Some(to) = workers.get(id) else { return };
        for (number, name) in shares.late(id, self.0.clock.now()) {
            let _ = to.orders.tells.send(Command::Tell(ToWorker::ShareAsked { number, name }));
        }
    }

    /// Passes on a worker's answer, which has no effect on a request that has ended.
    pub(super) fn share_given(
        &self,
        state: &mut State,
        exporter: &WorkerId,
        number: u64,
        given: Result<Charge, Unshared>,
        descriptor: Option<OwnedFd>,
    ) {
        let State { workers, shares, .. } = state;
        let Some(request) = shares.answered(number, exporter) else { return };
        let Some(importer) = workers.get(&request.importer) else { return };
        let given = given.and_then(|charge| Ok((charge, descriptor.ok_or(Unshared::Unknown)?)));
        if let Err(Unshared::Unknown) = given
            && let Some(more) = self.0.refusals.may()
        {
            warn!(
                gpusession_worker = hex(&request.importer),
                gpusession_lease = importer.lease,
                gpusession_client = importer.client,
                "worker {}: a program of {} asked for memory that no program shares with it{more}",
                hex(&request.importer),
                importer.user()
            );
        }
        if given.is_ok() {
            shares.hold(request.name.counted(), request.importer, 1, false);
        }
        answer(workers, &request, given);
    }

    /// Subtracts an import that a worker no longer has.
    pub(super) fn share_dropped(&self, state: &mut State, id: &WorkerId, object: Object) {
        let heir = state.shares.drop_imports(&object, id, 1);
        inherit(&state.workers, heir, object);
    }

    /// Makes an importer count an object that its own worker has released.
    pub(super) fn share_ended(&self, state: &mut State, exporter: &WorkerId, object: u64) {
        let object = (*exporter, object);
        let heir = state.shares.orphan(&object);
        inherit(&state.workers, heir, object);
    }

    /// Notes the imports of a worker that an earlier server has supervised.
    pub(super) fn shares_held(&self, state: &mut State, id: &WorkerId, held: &[Holding]) {
        let State { workers, shares, .. } = state;
        for holding in held.iter().take(MAX_HOLDINGS) {
            if shares.accounts.get(id).is_some_and(|account| account.imported >= MAX_IMPORTED) {
                return;
            }
            let object = (holding.worker, holding.object);
            let shared = shares.hold(object, *id, holding.imports, holding.inherited);
            shared.orphan |= holding.inherited;
            if !workers.contains_key(&holding.worker) {
                match object.1 {
                    EVENTS => shares.end(&object),
                    _ => inherit(workers, shares.orphan(&object), object),
                }
                lost(workers, id, holding.worker);
            }
        }
    }

    /// Ends the part of an exited worker: its requests, its imports, and requests for its objects.
    pub(super) fn shares_gone(&self, state: &mut State, id: &WorkerId) {
        let State { workers, shares, .. } = state;
        for request in shares.take(|r| r.importer == *id || r.name.worker == *id) {
            answer(workers, &request, Err(Unshared::Elsewhere));
        }
        for other in shares.partners(id) {
            lost(workers, &other, *id);
        }
        let objects: Vec<Object> = shares.shared.keys().copied().collect();
        for object in objects {
            let mut heir = shares.drop_imports(&object, id, u32::MAX);
            if object == (*id, EVENTS) {
                shares.end(&object);
            } else if object.0 == *id {
                heir = shares.orphan(&object).or(heir);
            }
            inherit(workers, heir, object);
        }
    }

    /// Refuses requests that a worker has not answered in time.
    pub(super) fn shares_overdue(&self, state: &mut State) {
        let now = self.0.clock.now();
        let State { workers, shares, .. } = state;
        for request in shares.take(|r| now.saturating_sub(r.since) >= ANSWER_TIMEOUT) {
            answer(workers, &request, Err(Unshared::Busy));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: WorkerId = [1; 16];
    const B: WorkerId = [2; 16];
    const C: WorkerId = [3; 16];

    #[test]
    fn released_memory_counts_for_one_of_its_importers() {
        let mut shares = Shares::default();
        let object = (A, 7);
        assert_eq!(shares.orphan(&object), None, "nobody has imports");
        for id in [B, C, B] {
            shares.hold(object, id, 1, false);
        }
        assert!(shares.involve(&A) && shares.involve(&B) && shares.involve(&C));
        assert_eq!(shares.accounts[&B].imported, 1, "one object, imported twice");
        assert_eq!(shares.drop_imports(&object, &B, 1), None);
        assert_eq!((shares.orphan(&object), shares.orphan(&object)), (Some(B), None), "once");
        assert_eq!(shares.drop_imports(&object, &B, 1), Some(C), "the next one");
        assert!(!shares.involve(&B));
        assert_eq!(shares.drop_imports(&object, &C, 9), None);
        assert!(!shares.involve(&A) && shares.shared.is_empty() && shares.accounts.is_empty());
    }

    #[test]
    fn users_of_one_object_are_partners() {
        let mut shares = Shares::default();
        for (object, id) in [((A, 1), B), ((A, 1), C), ((A, 2), B)] {
            shares.hold(object, id, 1, false);
        }
        let partners = |id| shares.partners(&id).into_iter().collect::<Vec<_>>();
        assert_eq!((partners(A), partners(B), partners(C)), (vec![B, C], vec![A, C], vec![A, B]));
        assert!(partners([9; 16]).is_empty());
        shares.end(&(A, 1));
        assert!(shares.involve(&B) && !shares.involve(&C));
        shares.end(&(A, 2));
        assert!(shares.accounts.is_empty());
    }

    #[test]
    fn requests_and_imports_of_a_worker_are_bounded() {
        use gpusession_proto::share::{Kind, Secret};
        let mut shares = Shares::default();
        let name = Name { kind: Kind::Memory, worker: A, object: 1, secret: Secret([0; 16]) };
        let request = Request { importer: B, serial: 1, name, since: Moment::default(), asked: true };
        let numbers: Vec<_> = (0..MAX_SHARE_REQUESTS).map(|_| shares.ask(request.clone()).unwrap()).collect();
        assert_eq!(shares.ask(request.clone()), None);
        assert!(shares.ask(Request { importer: C, ..request.clone() }).is_some(), "another worker's");
        assert!(shares.answered(numbers[0], &C).is_none(), "the object is not its own");
        assert!(shares.answered(numbers[0], &A).is_some() && shares.answered(numbers[0], &A).is_none());
        assert!(shares.ask(request.clone()).is_some());
        assert_eq!(shares.take(|_| true).len(), MAX_SHARE_REQUESTS + 1);
        assert!(shares.accounts.is_empty());
        for object in 0..MAX_IMPORTED as u64 {
            shares.hold((A, object), B, 1, false);
        }
        assert_eq!(shares.ask(request), None);
    }

    #[test]
    fn requests_wait_for_a_worker_whose_memory_moves() {
        use gpusession_proto::share::{Kind, Secret};
        let mut shares = Shares::default();
        let name = Name { kind: Kind::Memory, worker: A, object: 1, secret: Secret([0; 16]) };
        let request = Request { importer: B, serial: 1, name, since: Moment::default(), asked: false };
        let later = shares.ask(request.clone()).unwrap();
        assert!(!shares.involve(&A), "it is parked all the same");
        let now = Moment::default();
        assert_eq!(shares.late(&A, now), [(later, name)]);
        assert!(shares.late(&A, now).is_empty() && shares.late(&B, now).is_empty());
        assert!(shares.involve(&A), "its answer would give memory that then moves");
        assert!(shares.answered(later, &A).is_some() && !shares.involve(&A));
    }

    #[test]
    fn next_server_knows_who_counts_an_orphan() {
        let mut shares = Shares::default();
        let object = (A, 7);
        shares.hold(object, B, 1, false);
        shares.hold(object, C, 2, true).orphan = true;
        assert_eq!(shares.orphan(&object), None, "C counts it already");
        assert_eq!(shares.drop_imports(&object, &B, 1), None);
        assert_eq!(shares.drop_imports(&object, &C, 1), None);
        shares.hold(object, B, 1, false);
        assert_eq!(shares.drop_imports(&object, &C, 1), Some(B));
    }
}
