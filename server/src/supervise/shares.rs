//! Objects that processes of one lease share.
//!
//! The supervisor routes a request between two workers by its own table, and passes on one
//! descriptor of the driver. It knows which worker has imports of which object: such processes
//! cannot be parked, and memory that its own worker has released counts for an importer.

use std::collections::{BTreeSet, HashMap};

use gpusession_proto::share::Name;
use gpusession_proto::supervise::MAX_SHARE_REQUESTS;

use super::stock::WorkerId;
use crate::clock::Moment;

/// Most objects of which one worker has imports.
pub(super) const MAX_IMPORTED: usize = 1 << 13;

/// A request without an answer.
#[derive(Debug, Clone)]
pub(super) struct Request {
    pub(super) importer: WorkerId,
    pub(super) serial: u64,
    pub(super) name: Name,
    pub(super) since: Moment,
    /// Whether the object's worker has it; not while that worker's memory moves.
    pub(super) asked: bool,
}

/// An object with imports.
#[derive(Debug, Default)]
pub(super) struct Shared {
    /// Workers with imports, and the number of each one's. The first one counts an orphan.
    holders: Vec<(WorkerId, u32)>,
    /// Its own worker counts it no longer.
    pub(super) orphan: bool,
}

pub(super) type Object = (WorkerId, u64);

/// Counters of one worker, so that no question about it goes through all objects.
#[derive(Debug, Default)]
pub(super) struct Account {
    /// Its requests without an answer.
    pub(super) asked: usize,
    /// Objects of which it has imports.
    pub(super) imported: usize,
    /// Its own objects with imports.
    exported: usize,
}

/// Requests without an answer by number, and all objects with imports.
#[derive(Debug, Default)]
pub(super) struct Shares {
    last: u64,
    open: HashMap<u64, Request>,
    pub(super) shared: HashMap<Object, Shared>,
    pub(super) accounts: HashMap<WorkerId, Account>,
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
    pub(super) fn ask(&mut self, request: Request) -> Option<u64> {
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
    pub(super) fn answered(&mut self, number: u64, exporter: &WorkerId) -> Option<Request> {
        self.open.get(&number).filter(|r| r.name.worker == *exporter)?;
        let request = self.open.remove(&number)?;
        self.count(request.importer, |account| account.asked -= 1);
        Some(request)
    }

    /// Marks the requests that a worker has not received yet as asked now, and returns them.
    pub(super) fn mark_asked(&mut self, id: &WorkerId, now: Moment) -> Vec<(u64, Name)> {
        let mine = self.open.iter_mut().filter(|(_, r)| r.name.worker == *id && !r.asked);
        let asked = mine.map(|(number, request)| {
            (request.asked, request.since) = (true, now);
            (*number, request.name)
        });
        asked.collect()
    }

    /// Takes out the requests that `which` selects.
    pub(super) fn take(&mut self, which: impl Fn(&Request) -> bool) -> Vec<Request> {
        let found = self.open.iter().filter(|(_, r)| which(r)).map(|(number, r)| (*number, r.name.worker));
        let found: Vec<_> = found.collect();
        found.iter().filter_map(|(number, exporter)| self.answered(*number, exporter)).collect()
    }

    /// Adds imports of an object.
    pub(super) fn hold(&mut self, object: Object, id: WorkerId, imports: u32, first: bool) -> &mut Shared {
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
    pub(super) fn drop_imports(&mut self, object: &Object, id: &WorkerId, imports: u32) -> Option<WorkerId> {
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
    pub(super) fn partners(&self, id: &WorkerId) -> BTreeSet<WorkerId> {
        let part = |(object, shared): (&Object, &Shared)| {
            let own = std::iter::once(object.0);
            own.chain(shared.holders.iter().map(|(holder, _)| *holder)).collect::<Vec<_>>()
        };
        let theirs = self.shared.iter().map(part).filter(|users| users.contains(id));
        theirs.flatten().filter(|other| other != id).collect()
    }

    /// Ends all imports of an object.
    pub(super) fn end(&mut self, object: &Object) {
        let holders = self.shared.get(object).map(|shared| shared.holders.clone());
        for (holder, imports) in holders.unwrap_or_default() {
            self.drop_imports(object, &holder, imports);
        }
    }

    /// Notes that an object's own worker counts it no longer; returns the one that does.
    pub(super) fn orphan(&mut self, object: &Object) -> Option<WorkerId> {
        let shared = self.shared.get_mut(object)?;
        let before = std::mem::replace(&mut shared.orphan, true);
        shared.holders.first().map(|(holder, _)| *holder).filter(|_| !before)
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
        assert_eq!(shares.mark_asked(&A, now), [(later, name)]);
        assert!(shares.mark_asked(&A, now).is_empty() && shares.mark_asked(&B, now).is_empty());
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
