//! Events that several processes record and wait for, as counters in host memory that they share.
//!
//! Each record of an event has a number, one more than the last. A process claims a number, and its
//! stream writes it to the device's view of the counter; other streams wait for that value.
//!
//! Records take turns in the places of an event, so that a slow stream never overwrites the number
//! of a later record. A claim names its process: if that one ends, its records count as complete.

use std::collections::{HashMap, VecDeque};
use std::num::NonZeroUsize;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use nix::sys::stat::fstat;
use nix::unistd::ftruncate;

use crate::driver::{Address, Driver, REGISTER_MAPPED, Status, check, status};

/// Bytes of a page, which is no smaller than a page of the host.
const PAGE: usize = 64 << 10;
/// Places for records of one event.
const PLACES: u64 = 8;
/// Bytes of one event: a claim and a completed number for each place.
pub const EVENT: usize = 16 * PLACES as usize;
/// Most pages of a process, and most pages of others that it uses.
const MAX_PAGES: usize = 256;
/// Bits of a claim that name the process.
const TAG_BITS: u32 = 24;

/// Short name of a process in claims: the beginning of its worker's id.
pub fn tag(worker: &[u8; 16]) -> u64 {
    let [a, b, c, ..] = *worker;
    u64::from_le_bytes([a, b, c, 0, 0, 0, 0, 0])
}

/// A record of an event: its number, and the process that made it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Record {
    number: u64,
    tag: u64,
}

impl Record {
    fn of(claim: u64) -> Option<Self> {
        let number = claim >> TAG_BITS;
        (number > 0).then_some(Self { number, tag: claim & ((1 << TAG_BITS) - 1) })
    }

    fn claim(self) -> u64 {
        self.number << TAG_BITS | self.tag
    }

    /// Returns `true` for a record of the process with this tag.
    pub fn is_of(&self, tag: u64) -> bool {
        self.tag == tag
    }
}

/// A page of counters: memory that other processes may change at any time.
pub struct Page {
    address: NonNull<u64>,
    file: OwnedFd,
    /// The device's address of the page.
    device: AtomicU64,
}

// SAFETY: the mapping lives as long as the page, and is only accessed as atomics.
unsafe impl Send for Page {}
// SAFETY: as above.
unsafe impl Sync for Page {}

impl std::fmt::Debug for Page {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Page")
    }
}

/// Seals that keep the size of a page, so that no other process makes an access of it fail.
fn seals() -> SealFlag {
    SealFlag::F_SEAL_SEAL | SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW
}

impl Page {
    fn create() -> nix::Result<Self> {
        let file = memfd_create(c"gpusession-events", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?;
        ftruncate(&file, PAGE as i64)?;
        fcntl(&file, FcntlArg::F_ADD_SEALS(seals()))?;
        Self::map(file)
    }

    /// Maps another process's page; `None` for any other descriptor.
    fn adopt(file: OwnedFd) -> Option<Self> {
        let sealed = fcntl(&file, FcntlArg::F_GET_SEALS).ok()?;
        let whole = fstat(&file).ok()?.st_size == PAGE as i64;
        let fits = whole && SealFlag::from_bits_truncate(sealed).contains(seals());
        fits.then(|| Self::map(file).ok()).flatten()
    }

    fn map(file: OwnedFd) -> nix::Result<Self> {
        let length = const { NonZeroUsize::new(PAGE).expect("a size") };
        let prot = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping, anywhere, of an open file of that size.
        let mapped = unsafe { mmap(None, length, prot, MapFlags::MAP_SHARED, &file, 0) }?;
        Ok(Self { address: mapped.cast(), file, device: AtomicU64::new(0) })
    }

    /// Makes the page known to the devices, in the current context.
    fn register(&self, driver: &Driver) -> Result<(), Status> {
        let start = self.address.as_ptr().cast();
        let mut device = 0;
        // SAFETY: the mapping has that size, and is unregistered before it ends.
        check(unsafe { (driver.call.cuMemHostRegister_v2)(start, PAGE, REGISTER_MAPPED) })?;
        // SAFETY: just registered; the out pointer is valid.
        check(unsafe { (driver.call.cuMemHostGetDevicePointer_v2)(&mut device, start, 0) })
            .inspect_err(|_| self.unregister(driver))?;
        self.device.store(device, Ordering::Relaxed);
        Ok(())
    }

    fn unregister(&self, driver: &Driver) {
        // SAFETY: the driver refuses memory that is not registered.
        unsafe { (driver.call.cuMemHostUnregister)(self.address.as_ptr().cast()) };
    }

    /// Returns a copy of the descriptor.
    pub fn descriptor(&self) -> Result<OwnedFd, Status> {
        self.file.try_clone().map_err(|_| status::OPERATING_SYSTEM)
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        let at = at % (PAGE / 8);
        // SAFETY: inside the mapping and aligned; every access of it is atomic.
        unsafe { AtomicU64::from_ptr(self.address.as_ptr().add(at)) }
    }

    /// Completes all records of one process, which no longer exists.
    fn abandon(&self, tag: u64) {
        for event in (0..PAGE).step_by(EVENT) {
            for place in 0..PLACES as usize {
                let at = event / 8 + 2 * place;
                if let Some(record) =
                    Record::of(self.word(at).load(Ordering::SeqCst)).filter(|r| r.is_of(tag))
                {
                    self.word(at + 1).fetch_max(record.number, Ordering::SeqCst);
                }
            }
        }
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: mapped with this size.
        let _ = unsafe { munmap(self.address.cast(), PAGE) };
    }
}

/// Attempt to claim the next number.
#[derive(Debug, PartialEq, Eq)]
pub enum Claim {
    /// The new record, which must be written behind an earlier one of this process, if any.
    Made(Record, Option<Record>),
    /// All places have pending records, the next one that of another process.
    Full(Record),
}

/// The counters of one event.
pub struct Counters {
    page: Arc<Page>,
    /// Bytes before the event in the page.
    offset: usize,
    /// Number under which other processes know it.
    pub share: Mutex<Option<u64>>,
    /// The worker of its own process, if this process has opened it.
    pub owner: Option<[u8; 16]>,
}

impl Counters {
    fn new(page: Arc<Page>, offset: usize, owner: Option<[u8; 16]>) -> Self {
        Self { page, offset, share: Mutex::default(), owner }
    }

    /// Returns the page, and the event's offset in it.
    pub fn place(&self) -> (&Arc<Page>, usize) {
        (&self.page, self.offset)
    }

    fn at(&self, number: u64) -> usize {
        self.offset / 8 + 2 * (number % PLACES) as usize
    }

    fn claims(&self, number: u64) -> &AtomicU64 {
        self.page.word(self.at(number))
    }

    fn done(&self, record: Record) -> &AtomicU64 {
        self.page.word(self.at(record.number) + 1)
    }

    /// Returns the last record; `None`: there is none.
    pub fn latest(&self) -> Option<Record> {
        (0..PLACES).filter_map(|place| Record::of(self.claims(place).load(Ordering::SeqCst))).max()
    }

    /// Returns `true` if a record is complete.
    pub fn is_complete(&self, record: Record) -> bool {
        self.done(record).load(Ordering::SeqCst) >= record.number
    }

    /// Completes a record that no stream will.
    pub fn complete(&self, record: Record) {
        self.done(record).fetch_max(record.number, Ordering::SeqCst);
    }

    /// Returns `true` if no record is pending.
    fn is_quiet(&self) -> bool {
        let records = (0..PLACES).filter_map(|place| Record::of(self.claims(place).load(Ordering::SeqCst)));
        records.into_iter().all(|record| self.is_complete(record))
    }

    /// Claims the next number for a process.
    pub fn claim(&self, tag: u64) -> Claim {
        loop {
            let record = Record { number: self.latest().map_or(0, |latest| latest.number) + 1, tag };
            let place = self.claims(record.number);
            let before = place.load(Ordering::SeqCst);
            let earlier = Record::of(before).filter(|earlier| !self.is_complete(*earlier));
            match earlier {
                Some(earlier) if earlier.number >= record.number => continue,
                Some(earlier) if earlier.tag != tag => return Claim::Full(earlier),
                _ => {}
            }
            let order = Ordering::SeqCst;
            if place.compare_exchange(before, record.claim(), order, order).is_ok() {
                return Claim::Made(record, earlier);
            }
        }
    }

    /// Returns the device's address of a record's counter, and the value that completes it.
    pub fn target(&self, record: Record) -> (Address, u64) {
        let byte = 8 * (self.at(record.number) + 1);
        (self.page.device.load(Ordering::Relaxed) + byte as Address, record.number)
    }
}

/// Events, and all pages.
#[derive(Default)]
struct Inner {
    /// By the client's handle.
    events: HashMap<u64, Arc<Counters>>,
    /// Pages of this process, and events without a user.
    own: Vec<Arc<Page>>,
    free: VecDeque<Counters>,
    /// Pages of other processes, by the number of the file.
    others: HashMap<u64, Arc<Page>>,
}

/// Events that other processes may know.
pub struct SharedEvents {
    /// Short name of this process.
    pub tag: u64,
    /// Whether there is or was one; else a use of an event needs no lookup.
    any: AtomicBool,
    inner: Mutex<Inner>,
}

impl SharedEvents {
    /// Starts with none.
    pub fn new(worker: &[u8; 16]) -> Self {
        Self { tag: tag(worker), any: AtomicBool::new(false), inner: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the counters behind the client's handle of an event, if it has any.
    pub fn get(&self, handle: u64) -> Option<Arc<Counters>> {
        if !self.any.load(Ordering::Relaxed) {
            return None;
        }
        self.lock().events.get(&handle).cloned()
    }

    /// Creates counters for a new event; a context must be current.
    ///
    /// It takes those of a destroyed event if all records of that one are complete.
    pub fn create(&self, driver: &Driver) -> Result<Counters, Status> {
        let mut inner = self.lock();
        if inner.free.front().is_some_and(Counters::is_quiet)
            && let Some(free) = inner.free.pop_front()
        {
            return Ok(free);
        }
        if inner.own.len() >= MAX_PAGES {
            return Err(status::OUT_OF_MEMORY);
        }
        let page = Page::create().map_err(|_| status::OUT_OF_MEMORY)?;
        page.register(driver)?;
        let page = Arc::new(page);
        inner.own.push(page.clone());
        let new = (0..PAGE).step_by(EVENT).map(|offset| Counters::new(page.clone(), offset, None));
        new.rev().for_each(|counters| inner.free.push_front(counters));
        inner.free.pop_front().ok_or(status::OUT_OF_MEMORY)
    }

    /// Finds the counters of another process's event in its page; a context must be current.
    ///
    /// `settle` waits for all work on the devices, before pages go away.
    pub fn open(
        &self,
        driver: &Driver,
        page: OwnedFd,
        offset: u64,
        owner: [u8; 16],
        settle: impl FnOnce() -> Result<(), Status>,
    ) -> Result<Counters, Status> {
        let offset = usize::try_from(offset).ok().filter(|at| *at < PAGE && at.is_multiple_of(EVENT));
        let offset = offset.ok_or(status::INVALID_VALUE)?;
        let file = fstat(&page).map_err(|_| status::OPERATING_SYSTEM)?.st_ino;
        let mut inner = self.lock();
        if !inner.others.contains_key(&file) {
            if inner.others.len() >= MAX_PAGES {
                inner.reap(driver, settle)?;
            }
            if inner.others.len() >= MAX_PAGES {
                return Err(status::OUT_OF_MEMORY);
            }
            let page = Page::adopt(page).ok_or(status::UNKNOWN)?;
            page.register(driver)?;
            inner.others.insert(file, Arc::new(page));
        }
        let page = inner.others.get(&file).ok_or(status::UNKNOWN)?.clone();
        Ok(Counters::new(page, offset, Some(owner)))
    }

    /// Stores the counters of an event.
    pub fn put(&self, handle: u64, counters: Counters) {
        self.any.store(true, Ordering::Relaxed);
        self.lock().events.insert(handle, Arc::new(counters));
    }

    /// Forgets an event; returns the number under which other processes knew it.
    pub fn remove(&self, handle: u64) -> Option<u64> {
        if !self.any.load(Ordering::Relaxed) {
            return None;
        }
        let mut inner = self.lock();
        let gone = inner.events.remove(&handle)?;
        let share = gone.share.lock().unwrap_or_else(PoisonError::into_inner).take();
        if gone.owner.is_none() {
            let (page, offset) = gone.place();
            inner.free.push_back(Counters::new(page.clone(), offset, None));
        }
        share
    }

    /// Completes the records of a process that has ended.
    ///
    /// Within this process its events then are as others.
    pub fn abandon(&self, worker: &[u8; 16]) {
        let mut inner = self.lock();
        inner.pages().for_each(|page| page.abandon(tag(worker)));
        inner.events.retain(|_, event| event.owner.as_ref() != Some(worker));
    }

    /// Registers all pages again after a reset of their context, which is current.
    pub fn register_again(&self, driver: &Driver) -> Result<(), Status> {
        self.lock().pages().try_for_each(|page| page.register(driver))
    }
}

impl Inner {
    fn pages(&self) -> impl Iterator<Item = &Arc<Page>> {
        self.own.iter().chain(self.others.values())
    }

    /// Gives up all pages of other processes without an event.
    fn reap(&mut self, driver: &Driver, settle: impl FnOnce() -> Result<(), Status>) -> Result<(), Status> {
        // A stream may still write to a page whose events are destroyed.
        settle()?;
        self.others.retain(|_, page| {
            // Each event has a reference.
            let keep = Arc::strong_count(page) > 1;
            if !keep {
                page.unregister(driver);
            }
            keep
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::fake;

    const A: [u8; 16] = [1; 16];
    const B: [u8; 16] = [2; 16];

    fn counters() -> Counters {
        Counters::new(Arc::new(Page::create().unwrap()), EVENT, None)
    }

    fn claim(counters: &Counters, worker: &[u8; 16]) -> Record {
        match counters.claim(tag(worker)) {
            Claim::Made(record, _) => record,
            Claim::Full(other) => panic!("behind {other:?}"),
        }
    }

    /// Does what the record's stream does.
    fn write(counters: &Counters, record: Record) {
        counters.done(record).store(record.number, Ordering::SeqCst);
    }

    #[test]
    fn last_record_counts_whoever_made_it() {
        let event = counters();
        assert_eq!(event.latest(), None);
        let first = claim(&event, &A);
        assert!(event.latest() == Some(first) && !event.is_complete(first) && first.is_of(tag(&A)));
        let second = claim(&event, &B);
        assert!(event.latest() == Some(second) && second.is_of(tag(&B)) && !second.is_of(tag(&A)));
        write(&event, second);
        write(&event, first);
        assert!(event.is_complete(first) && event.is_complete(second), "a slow stream changes no other");
    }

    #[test]
    fn full_event_makes_its_process_wait_in_order_and_others_wait_outside() {
        let event = counters();
        let records: Vec<_> = (0..PLACES).map(|_| claim(&event, &A)).collect();
        assert_eq!(event.claim(tag(&B)), Claim::Full(records[0]));
        let Claim::Made(ninth, Some(behind)) = event.claim(tag(&A)) else { panic!() };
        assert_eq!(behind, records[0], "its stream writes behind that record");
        write(&event, records[0]);
        write(&event, ninth);
        assert!(event.is_complete(ninth));
        write(&event, records[1]);
        assert!(matches!(event.claim(tag(&B)), Claim::Made(_, None)));
    }

    #[test]
    fn records_of_an_ended_process_are_complete() {
        let event = counters();
        let (mine, other) = (claim(&event, &A), claim(&event, &B));
        event.place().0.abandon(tag(&B));
        assert!(!event.is_complete(mine) && event.is_complete(other));
        assert!(!event.is_quiet());
    }

    #[test]
    fn page_of_another_process_shows_the_same_event() {
        let (ours, theirs) = (SharedEvents::new(&A), SharedEvents::new(&B));
        let create = || ours.create(fake::driver()).unwrap();
        let (first, second) = (create(), create());
        let record = claim(&second, &A);
        let open = |offset| {
            let page = second.place().0.descriptor().unwrap();
            theirs.open(fake::driver(), page, offset, A, || Ok(()))
        };
        let opened = open(second.place().1 as u64).unwrap();
        assert_eq!((opened.latest(), first.latest()), (Some(record), None));
        assert!(Arc::ptr_eq(opened.place().0, open(0).unwrap().place().0), "one mapping of a page");
        for offset in [8, PAGE as u64, u64::MAX] {
            assert_eq!(open(offset).err(), Some(status::INVALID_VALUE), "{offset}");
        }
        theirs.put(7, opened);
        theirs.abandon(&A);
        assert!(second.is_complete(record) && theirs.get(7).is_none(), "its process has ended");
    }

    #[test]
    fn many_other_processes_in_turn_leave_no_pages() {
        let ours = SharedEvents::new(&A);
        for number in 0..MAX_PAGES + 8 {
            let owner = [[number as u8; 8], (number as u64).to_le_bytes()].concat().try_into().unwrap();
            let theirs = SharedEvents::new(&owner);
            let page = theirs.create(fake::driver()).unwrap().place().0.descriptor().unwrap();
            // A program that never destroys what it opens.
            ours.put(number as u64, ours.open(fake::driver(), page, 0, owner, || Ok(())).unwrap());
            ours.abandon(&owner);
        }
        assert!(ours.lock().others.len() <= MAX_PAGES && ours.lock().events.is_empty());
    }

    #[test]
    fn other_descriptors_are_no_pages() {
        let page = |size, wanted| {
            let file = memfd_create(c"other", MFdFlags::MFD_ALLOW_SEALING).unwrap();
            ftruncate(&file, size).unwrap();
            fcntl(&file, FcntlArg::F_ADD_SEALS(wanted)).unwrap();
            Page::adopt(file).is_some()
        };
        let size = PAGE as i64;
        assert!(page(size, seals()));
        assert!(!page(size, seals() - SealFlag::F_SEAL_SHRINK), "it could vanish under a reader");
        assert!(!page(size / 2, seals()) && !page(2 * size, seals()));
        assert!(Page::adopt(std::fs::File::open("/dev/zero").unwrap().into()).is_none());
    }

    #[test]
    fn event_takes_the_place_of_a_destroyed_one_whose_records_are_complete() {
        let events = SharedEvents::new(&A);
        let all = PAGE / EVENT;
        let create = |handle| events.put(handle, events.create(fake::driver()).unwrap());
        (0..all as u64).for_each(create);
        assert_eq!(events.lock().own.len(), 1);
        let pending = events.get(0).unwrap();
        let record = claim(&pending, &A);
        events.remove(0);
        create(0);
        assert_eq!(events.lock().own.len(), 2, "its stream may still write");
        pending.complete(record);
        (1..9).for_each(|handle| assert_eq!(events.remove(handle), None));
        (1..=all as u64).for_each(create);
        assert_eq!(events.lock().own.len(), 2);
    }
}
