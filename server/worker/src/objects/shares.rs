//! Objects that this process shares with other processes of its user.
//!
//! An exported object has a name, which the supervisor looks up for other workers. A thread of its
//! own answers for it, because executors may stand still.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use gpusession_proto::share::{EVENTS, Kind, Name, Secret};
use gpusession_proto::supervise::{Charge, FromWorker, Holding, MAX_HOLDINGS, MAX_SHARE_REQUESTS, Unshared};

use super::counters::Page;
use crate::driver::{Address, Status, status};
use crate::quota::Quota;

/// Longest wait for another worker's object, whose memory may be on its way back to the device.
/// Before that, the supervisor answers for a worker that is silent.
const IMPORT_TIMEOUT: Duration = Duration::from_secs(600);

/// Place from which an object's descriptor comes.
#[derive(Debug, Clone)]
pub enum Source {
    /// The driver's handle of physical memory, which the program has not released.
    Handle(u64),
    /// An address where the memory is mapped.
    Mapped(Address),
    /// The page with an event's counters.
    Counters(Arc<Page>),
    /// The driver's handle of a pool.
    Pool(u64),
    /// An address where memory of a pool begins.
    Pointer(Address),
}

struct Exported {
    kind: Kind,
    secret: Secret,
    source: Source,
    /// Memory that this worker counts for it.
    charge: Charge,
    /// Whether another process may have an import.
    given: bool,
}

/// Imports of one object.
#[derive(Debug)]
struct Imported {
    imports: u32,
    charge: Charge,
    /// Whether this worker counts its memory, because its own worker no longer does.
    inherited: bool,
    /// Whether this worker counts its memory, because its own worker counts it for another lease.
    foreign: bool,
}

/// Id of the exporting worker, and number of the object.
pub type Object = ([u8; 16], u64);

/// Exported objects by number, and imported ones.
#[derive(Default)]
pub struct Exports {
    last: u64,
    objects: HashMap<u64, Exported>,
    imported: HashMap<Object, Imported>,
}

/// A request for an object of another worker.
struct Request {
    name: Name,
    /// Whether an executor still waits for the answer.
    waiting: bool,
    answer: Option<Result<Given, Unshared>>,
}

/// The driver's descriptor of an object, and whether it belongs to another lease.
#[derive(Debug)]
struct Given {
    descriptor: OwnedFd,
    foreign: bool,
}

#[derive(Default)]
struct Requests {
    last: u64,
    /// Requests, each until its answer has been used.
    open: HashMap<u64, Request>,
}

/// The shared objects of a process, and its requests for objects of others.
pub struct Shares {
    /// Whether this driver shares memory between processes.
    possible: bool,
    quota: Arc<Quota>,
    worker: [u8; 16],
    exports: Mutex<Exports>,
    requests: Mutex<Requests>,
    answered: Condvar,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shares {
    /// Starts with nothing shared.
    ///
    /// Under MPS nothing can be shared: no test has shown the effect of one process's end on
    /// another one's imports there.
    pub fn new(quota: Arc<Quota>, worker: [u8; 16], mps: bool) -> Self {
        let (exports, requests) = (Mutex::default(), Mutex::default());
        Self { possible: !mps, quota, worker, exports, requests, answered: Condvar::new() }
    }

    /// Returns an error if nothing can be shared here.
    pub fn possible(&self) -> Result<(), Status> {
        if self.possible { Ok(()) } else { Err(status::NOT_SUPPORTED) }
    }

    fn report(&self, message: &FromWorker) {
        self.quota.supervisor.report(message);
    }

    /// Locks the exported objects. While they are locked, no source of theirs may vanish.
    pub fn exports(&self) -> MutexGuard<'_, Exports> {
        lock(&self.exports)
    }

    /// Returns the name of an object. It gets its number in `number`, unless it has one.
    pub fn name(&self, number: &mut Option<u64>, kind: Kind, source: Source, charge: Charge) -> Option<Name> {
        let mut exports = self.exports();
        let object = match *number {
            Some(object) => object,
            None => {
                let mut secret = [0; 16];
                ring::rand::SecureRandom::fill(&ring::rand::SystemRandom::new(), &mut secret).ok()?;
                exports.last += 1;
                let object = exports.last;
                let exported = Exported { kind, secret: Secret(secret), source, charge, given: false };
                exports.objects.insert(object, exported);
                object
            }
        };
        *number = Some(object);
        let secret = exports.objects.get(&object)?.secret;
        Some(Name { kind, worker: self.worker, object, secret })
    }

    /// Notes where an exported object is from now on; `None`: the process no longer has it.
    pub fn moved(&self, exports: &mut Exports, object: u64, to: Option<Source>) {
        match (to, exports.objects.get_mut(&object)) {
            (Some(source), Some(exported)) => exported.source = source,
            _ => {
                if exports.objects.remove(&object).is_some_and(|gone| gone.given) {
                    self.report(&FromWorker::ShareEnded { object });
                }
            }
        }
    }

    /// Subtracts an import that the process no longer has.
    pub fn dropped(&self, exports: &mut Exports, object: Object) {
        if let Some(imported) = exports.imported.get_mut(&object) {
            imported.imports -= 1;
            if imported.imports == 0
                && let Some(gone) =
                    exports.imported.remove(&object).filter(|gone| gone.inherited || gone.foreign)
            {
                self.quota.give(gone.charge.device, gone.charge.bytes);
            }
        }
        self.report(&FromWorker::ShareDropped { worker: object.0, object: object.1 });
    }

    /// Forgets the imported events of a worker that has exited.
    pub fn lost(&self, worker: [u8; 16]) {
        self.exports().imported.remove(&(worker, EVENTS));
    }

    /// Counts the memory of an imported object, because its own worker no longer does.
    ///
    /// It exists, whether the lease has room for it or not. Waits for the supervisor.
    pub fn inherit(&self, object: &Object) {
        let known = self.exports().imported.get(object).filter(|i| !i.foreign).map(|i| i.charge);
        let Some(Charge { device, bytes }) = known else { return };
        if self.quota.take(device, bytes).is_err() {
            self.quota.overdraw(device, bytes);
        }
        match self.exports().imported.get_mut(object).filter(|imported| !imported.inherited) {
            Some(imported) => imported.inherited = true,
            // The program has dropped it meanwhile.
            None => self.quota.give(device, bytes),
        }
    }

    /// Counts the memory of an object of another lease, which counts it, too.
    ///
    /// It is an error if this lease has no room. So a user's leases cannot hand each other more
    /// than each one may have.
    fn count_foreign(&self, object: Object) -> Result<(), Unshared> {
        let known = self.exports().imported.get(&object).filter(|i| !i.foreign).map(|i| i.charge);
        let Some(Charge { device, bytes }) = known.filter(|charge| charge.bytes > 0) else { return Ok(()) };
        if let Err(refused) = self.quota.take(device, bytes) {
            self.dropped(&mut self.exports(), object);
            return Err(Unshared::Driver(refused));
        }
        match self.exports().imported.get_mut(&object).filter(|imported| !imported.foreign) {
            Some(imported) => imported.foreign = true,
            // Another thread has counted it meanwhile.
            None => self.quota.give(device, bytes),
        }
        Ok(())
    }

    /// Asks for another worker's object, and waits for the driver's descriptor of it.
    ///
    /// The object then has one import more.
    pub fn request(&self, name: Name) -> Result<OwnedFd, Unshared> {
        let full = |requests: &mut Requests| requests.open.len() >= MAX_SHARE_REQUESTS;
        let room = self.answered.wait_timeout_while(lock(&self.requests), IMPORT_TIMEOUT, full);
        let (mut requests, late) = room.unwrap_or_else(PoisonError::into_inner);
        if late.timed_out() {
            return Err(Unshared::Busy);
        }
        requests.last += 1;
        let serial = requests.last;
        requests.open.insert(serial, Request { name, waiting: true, answer: None });
        self.report(&FromWorker::ShareWanted { serial, name, counts: true });
        let unanswered =
            |requests: &mut Requests| requests.open.get(&serial).is_some_and(|r| r.answer.is_none());
        let waited = self.answered.wait_timeout_while(requests, IMPORT_TIMEOUT, unanswered);
        let (mut requests, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let answer = match requests.open.get_mut(&serial) {
            Some(request) if request.answer.is_none() => {
                request.waiting = false;
                None
            }
            _ => requests.open.remove(&serial).and_then(|request| request.answer),
        };
        self.answered.notify_all();
        drop(requests);
        let given = answer.unwrap_or(Err(Unshared::Busy))?;
        if given.foreign {
            self.count_foreign(name.counted())?;
        }
        Ok(given.descriptor)
    }

    /// Records the supervisor's answer; `foreign`: another lease has the object.
    pub fn granted(
        &self,
        serial: u64,
        given: Result<Charge, Unshared>,
        descriptor: Option<OwnedFd>,
        foreign: bool,
    ) {
        let mut requests = lock(&self.requests);
        let Some(request) = requests.open.get_mut(&serial).filter(|r| r.answer.is_none()) else { return };
        let object = request.name.counted();
        let answer = given.and_then(|charge| Ok((charge, descriptor.ok_or(Unshared::Unknown)?)));
        if let Ok((charge, _)) = answer {
            let mut exports = self.exports();
            let new = Imported { imports: 0, charge, inherited: false, foreign: false };
            exports.imported.entry(object).or_insert(new).imports += 1;
            if !request.waiting && request.name.kind != Kind::Event {
                self.dropped(&mut exports, object);
            }
        }
        if request.waiting {
            request.answer = Some(answer.map(|(_, descriptor)| Given { descriptor, foreign }));
        } else {
            requests.open.remove(&serial);
        }
        self.answered.notify_all();
    }

    /// Repeats open requests, and tells all imports, to a new supervisor.
    pub fn tell_again(&self) {
        let one = |(object, imported): (&Object, &Imported)| Holding {
            worker: object.0,
            object: object.1,
            imports: imported.imports,
            inherited: imported.inherited,
        };
        // Locked until they are sent, so that an import that ends now is reported after them.
        let exports = self.exports();
        let held: Vec<_> = exports.imported.iter().map(one).collect();
        for part in held.chunks(MAX_HOLDINGS) {
            self.report(&FromWorker::SharesHeld { held: part.to_vec() });
        }
        drop(exports);
        let requests = lock(&self.requests);
        for (serial, request) in requests.open.iter().filter(|(_, request)| request.answer.is_none()) {
            self.report(&FromWorker::ShareWanted { serial: *serial, name: request.name, counts: true });
        }
    }
}

impl Exports {
    /// Returns an imported object's memory, which its own worker counts.
    pub fn charge_of(&self, object: &Object) -> Charge {
        self.imported.get(object).map(|imported| imported.charge).unwrap_or_default()
    }

    /// Returns the place of a name's object and its memory; `None` also for a wrong
    /// secret. Another process may have an import from now on.
    pub fn give(&mut self, name: &Name) -> Option<(Source, Charge)> {
        let exported = self.objects.get_mut(&name.object)?;
        if exported.kind != name.kind || !exported.secret.is(&name.secret) {
            return None;
        }
        exported.given = true;
        Some((exported.source.clone(), exported.charge))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::supervise::tests::{Peer, pair};

    const ID: [u8; 16] = [4; 16];
    const OTHER: [u8; 16] = [5; 16];
    const CHARGE: Charge = Charge { device: 1, bytes: 9 };

    fn shares() -> (Arc<Shares>, Peer) {
        let (supervisor, peer) = pair();
        (Arc::new(Shares::new(Arc::new(Quota::new(supervisor, &[])), ID, false)), peer)
    }

    #[test]
    fn name_stays_with_its_object_and_dies_with_it() {
        let (shares, peer) = shares();
        let name =
            |number: &mut Option<u64>| shares.name(number, Kind::Memory, Source::Handle(7), CHARGE).unwrap();
        let mut number = None;
        let first = name(&mut number);
        assert_eq!((name(&mut number), first.worker), (first, ID), "the same name again");
        let other = name(&mut None);
        assert!(other.object != first.object && !other.secret.is(&first.secret));
        let mut exports = shares.exports();
        assert!(exports.give(&Name { secret: other.secret, ..first }).is_none(), "a forged one");
        assert!(exports.give(&Name { kind: Kind::Event, ..first }).is_none(), "another kind");
        assert!(matches!(exports.give(&first), Some((Source::Handle(7), CHARGE))));
        shares.moved(&mut exports, first.object, Some(Source::Mapped(0x1000)));
        assert!(matches!(exports.give(&first), Some((Source::Mapped(0x1000), CHARGE))));
        shares.moved(&mut exports, other.object, None);
        assert!(peer.silent(), "nobody had it");
        shares.moved(&mut exports, first.object, None);
        assert!(exports.give(&first).is_none());
        assert_eq!(peer.next(), FromWorker::ShareEnded { object: first.object });
    }

    fn asked(peer: &Peer) -> (u64, u64) {
        match peer.next() {
            FromWorker::ShareWanted { serial, name, .. } => (serial, name.object),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn under_mps_nothing_can_be_shared() {
        let possible = |mps| {
            let (supervisor, _peer) = pair();
            Shares::new(Arc::new(Quota::new(supervisor, &[])), ID, mps).possible()
        };
        assert_eq!((possible(false), possible(true)), (Ok(()), Err(status::NOT_SUPPORTED)));
    }

    #[test]
    fn each_request_gets_its_own_answer() {
        let (shares, peer) = shares();
        let name = |object| Name { kind: Kind::Memory, worker: OTHER, object, secret: Secret([1; 16]) };
        let asks = |object| {
            let shares = shares.clone();
            std::thread::spawn(move || shares.request(name(object)).map(drop))
        };
        let (one, two) = (asks(1), asks(2));
        let (a, b) = (asked(&peer), asked(&peer));
        let serial = |object| if a.1 == object { a.0 } else { b.0 };
        shares.granted(99, Ok(CHARGE), None, false);
        shares.granted(serial(2), Err(Unshared::Elsewhere), None, false);
        assert_eq!(two.join().unwrap(), Err(Unshared::Elsewhere));
        assert!(!one.is_finished());
        shares.tell_again();
        assert_eq!(asked(&peer), (serial(1), 1), "a new supervisor gets the open one again");
        let file = || Some(std::fs::File::open("/dev/null").unwrap().into());
        shares.granted(serial(1), Ok(CHARGE), file(), false);
        assert_eq!(one.join().unwrap(), Ok(()));
        shares.granted(serial(1), Ok(CHARGE), file(), false);
        shares.tell_again();
        let holding = Holding { worker: OTHER, object: 1, imports: 1, inherited: false };
        assert_eq!(peer.next(), FromWorker::SharesHeld { held: vec![holding] }, "one import in all");
        shares.dropped(&mut shares.exports(), (OTHER, 1));
        assert_eq!(peer.next(), FromWorker::ShareDropped { worker: OTHER, object: 1 });
        shares.tell_again();
        assert!(peer.silent());
    }
}
