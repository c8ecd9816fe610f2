//! Mirrors of the client's host memory, by region.

use std::collections::{BTreeMap, HashMap};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::driver::{Address, Status, status};
use crate::objects::block_hash::{Hash, Keys};
use crate::objects::device_blocks::Finder;

/// The client's version of a mirror in host memory.
///
/// A thread accesses the mirror's memory only with this lock, and only while there is a version:
/// the last owner discards it before the memory ends.
#[derive(Clone)]
pub struct Shadow(Arc<Mutex<Vec<u8>>>);

impl Shadow {
    /// Starts with `len` zeros.
    pub fn new(len: usize) -> Self {
        Self(Arc::new(Mutex::new(vec![0; len])))
    }

    /// Locks the client's version, which is empty once the memory has ended.
    pub fn lock(&self) -> MutexGuard<'_, Vec<u8>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Discards the client's version: no thread accesses the memory after the return.
    pub fn discard(&self) {
        *self.lock() = Vec::new();
    }
}

/// Place of a mirror's bytes.
pub enum Backing {
    /// A mapping of this process, registered with the driver, and the client's version of it.
    /// The program watches `watched` memory while a kernel writes to it.
    Own { mapping: NonNull<std::ffi::c_void>, mapped: usize, watched: bool, shadow: Shadow },
    /// Managed memory of the driver, which this process can access, and the client's version of it.
    Managed { shadow: Shadow },
    /// Memory of a device, and the hash of each block that the client knows.
    Device { device: u32, blocks: Vec<Hash> },
}

/// One region in the worker.
pub struct Mirror {
    /// First byte, as this process or (for device memory) the driver addresses it.
    pub address: usize,
    pub len: usize,
    /// Bytes of host memory that count for the mirror.
    pub charge: u64,
    pub backing: Backing,
}

// SAFETY: the mirror owns its memory, and code reaches it only through a lock.
unsafe impl Send for Mirror {}

/// The mirrors, and what the worker knows about the memory behind them.
#[derive(Default)]
pub struct Inner {
    pub mirrors: BTreeMap<u64, Mirror>,
    pub charged: u64,
    /// Managed variables that the driver reported: size, and module or library.
    pub managed: HashMap<Address, (u64, u64)>,
    /// Library of each module that is a part of one.
    libraries: HashMap<u64, u64>,
    /// Means to find changes of mirrored device memory, by device.
    pub finders: HashMap<u32, Finder>,
}

/// Comparisons of all mirrors in host memory with what the client knows, one at a time.
///
/// A thread that found no change beside another one's comparison could answer before that one has
/// sent the change. Yet one comparison serves all threads that came before its begin.
#[derive(Default)]
pub struct Passes {
    begun: AtomicU64,
    /// Number of the latest pass that has sent all it found.
    ended: Mutex<u64>,
}

/// A thread's place among the passes: a later one sends what the thread has to send.
pub struct Ticket(u64);

/// A pass, until it is dropped; only [`Pass::end`] lets it serve other threads.
pub struct Pass<'a> {
    number: u64,
    ended: MutexGuard<'a, u64>,
}

impl Passes {
    /// Takes a place; the changes to be sent have been made.
    pub fn ticket(&self) -> Ticket {
        // It writes, so that a pass that begins later sees what this thread has seen.
        Ticket(self.begun.fetch_add(0, Ordering::SeqCst))
    }

    /// Waits for its turn, and begins a pass; `None` if another thread's has sent all.
    pub fn begin(&self, ticket: &Ticket) -> Option<Pass<'_>> {
        self.begin_in(self.ended.lock().unwrap_or_else(PoisonError::into_inner), ticket)
    }

    fn begin_in<'a>(&self, ended: MutexGuard<'a, u64>, ticket: &Ticket) -> Option<Pass<'a>> {
        let needed = *ended <= ticket.0;
        needed.then(|| Pass { number: self.begun.fetch_add(1, Ordering::SeqCst) + 1, ended })
    }
}

impl Pass<'_> {
    /// Ends the pass, all of whose changes are sent.
    pub fn end(mut self) {
        *self.ended = self.number;
    }
}

/// A mirror in host memory.
pub struct InHost {
    pub region: u64,
    pub address: usize,
    pub shadow: Shadow,
    /// Whether it is managed memory, which a program does not watch while a kernel runs.
    pub managed: bool,
    /// Whether the program watches it while a kernel writes to it.
    pub watched: bool,
}

/// All mirrors, by the client's number of the region.
pub struct Mirrors {
    pub limit: u64,
    /// Keys of the hashes of blocks, from the first mirror of device memory on.
    keys: OnceLock<Keys>,
    inner: Mutex<Inner>,
    /// Held while a finder is opened, which no callback of the driver waits for.
    pub opening: Mutex<()>,
    pub passes: Passes,
    /// Number of changes ([`Activity::changes`]) after which device memory was compared at rest,
    /// and one; 0: never.
    ///
    /// [`Activity::changes`]: crate::activity::Activity::changes
    compared: AtomicU64,
}

impl Mirrors {
    /// Starts with no mirror; all together may take `limit` bytes of host memory.
    pub fn new(limit: u64) -> Self {
        Self {
            limit,
            keys: OnceLock::new(),
            inner: Mutex::default(),
            opening: Mutex::default(),
            passes: Passes::default(),
            compared: AtomicU64::new(0),
        }
    }

    /// Notes that the client knows all device memory as it was after this number of changes.
    ///
    /// The caller took the number before it waited for all contexts, and then compared.
    pub fn compared(&self, changes: u64) {
        self.compared.store(changes + 1, Ordering::SeqCst);
    }

    /// Returns `true` if device memory is as the client knows it, since nothing has changed it.
    pub fn known(&self, changes: Option<u64>) -> bool {
        changes.is_some_and(|changes| self.compared.load(Ordering::SeqCst) == changes + 1)
    }

    /// Returns the keys of the hashes of blocks.
    pub fn keys(&self) -> Result<&Keys, Status> {
        if let Some(keys) = self.keys.get() {
            return Ok(keys);
        }
        let drawn = Keys::draw().map_err(|_| status::OPERATING_SYSTEM)?;
        Ok(self.keys.get_or_init(|| drawn))
    }

    /// Returns the mirrors in host memory.
    pub fn in_host_memory(&self) -> Vec<InHost> {
        let host = |(&region, mirror): (&u64, &Mirror)| {
            let (shadow, managed, watched) = match &mirror.backing {
                Backing::Own { shadow, watched, .. } => (shadow.clone(), false, *watched),
                Backing::Managed { shadow } => (shadow.clone(), true, false),
                Backing::Device { .. } => return None,
            };
            Some(InHost { region, address: mirror.address, shadow, managed, watched })
        };
        self.lock().mirrors.iter().filter_map(host).collect()
    }

    /// Locks the list of mirrors, and those in device memory.
    pub fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records a managed variable of `parent`; no other memory of the driver is mirrored in place.
    ///
    /// Variables of a library's module live as long as the library.
    pub fn know_managed(&self, address: Address, len: u64, parent: u64) {
        let inner = &mut *self.lock();
        let owner = inner.libraries.get(&parent).copied().unwrap_or(parent);
        inner.managed.insert(address, (len, owner));
    }

    /// Records that a module is a part of a library.
    pub fn know_module(&self, module: u64, library: u64) {
        self.lock().libraries.insert(module, library);
    }

    /// Forgets the managed variables of a module or library that is about to end.
    pub fn forget_parent(&self, parent: u64) {
        let inner = &mut *self.lock();
        inner.libraries.retain(|_, library| *library != parent);
        let (managed, mirrors, charged) = (&inner.managed, &mut inner.mirrors, &mut inner.charged);
        mirrors.retain(|_, mirror| {
            let Backing::Managed { shadow } = &mirror.backing else { return true };
            let gone = managed.get(&(mirror.address as Address)).is_none_or(|(_, p)| *p == parent);
            if gone {
                shadow.discard();
                *charged -= mirror.charge;
            }
            !gone
        });
        inner.managed.retain(|_, (_, p)| *p != parent);
    }

    /// Returns this process's address of `len` bytes from `offset` of a region in host memory.
    pub fn address(&self, region: u64, offset: u64, len: u64) -> Result<u64, Status> {
        let inner = self.lock();
        let mirror = inner.mirrors.get(&region).ok_or(status::INVALID_VALUE)?;
        let inside = offset.checked_add(len).is_some_and(|end| end <= mirror.len as u64);
        if !inside || !matches!(mirror.backing, Backing::Own { .. }) {
            return Err(status::INVALID_VALUE);
        }
        Ok(mirror.address as u64 + offset)
    }

    /// Returns region and offset of an address of this process.
    pub fn region(&self, address: u64) -> Option<(u64, u64)> {
        let inner = self.lock();
        let own = |mirror: &Mirror| matches!(mirror.backing, Backing::Own { .. });
        let offset = |mirror: &Mirror| address.checked_sub(mirror.address as u64);
        let mut found = inner.mirrors.iter().filter(|(_, mirror)| own(mirror));
        found.find_map(|(id, mirror)| {
            offset(mirror).filter(|offset| *offset < mirror.len as u64).map(|offset| (*id, offset))
        })
    }

    /// Returns `true` if there is memory that the program watches while a kernel writes to it.
    pub fn any_watched(&self) -> bool {
        let watched = |mirror: &Mirror| matches!(mirror.backing, Backing::Own { watched: true, .. });
        self.lock().mirrors.values().any(watched)
    }

    /// Returns `true` if device memory is mirrored, which only the driver can read.
    pub fn any_in_device_memory(&self) -> bool {
        self.lock().mirrors.values().any(|mirror| matches!(mirror.backing, Backing::Device { .. }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(mirrors: &Mirrors, region: u64, address: usize, backing: Backing) {
        let mut inner = mirrors.lock();
        inner.charged += 10;
        inner.mirrors.insert(region, Mirror { address, len: 0x100, charge: 10, backing });
    }

    fn own() -> Backing {
        Backing::Own { mapping: NonNull::dangling(), mapped: 0, watched: true, shadow: Shadow::new(0) }
    }

    #[test]
    fn copy_stays_within_a_region_of_host_memory() {
        let mirrors = Mirrors::new(1000);
        put(&mirrors, 1, 0x5000, own());
        put(&mirrors, 2, 0x6000, Backing::Device { device: 0, blocks: Vec::new() });
        assert_eq!(mirrors.address(1, 0x10, 0xf0), Ok(0x5010));
        assert_eq!(mirrors.address(1, 0x100, 0), Ok(0x5100));
        for (region, offset, len) in [(1, 0x10, 0xf1), (1, 0x101, 0), (1, u64::MAX, 2), (2, 0, 1), (3, 0, 1)]
        {
            assert_eq!(mirrors.address(region, offset, len), Err(status::INVALID_VALUE), "{region} {offset}");
        }
    }

    /// A thread that answers once the change that it has made is sent.
    #[derive(Default)]
    struct Sender<'a> {
        steps: usize,
        change: u64,
        ticket: Option<Ticket>,
        pass: Option<Pass<'a>>,
        read: u64,
    }

    impl<'a> Sender<'a> {
        /// Does the next step; `false` if it has to wait.
        ///
        /// `memory` counts changes, and `sent` is the latest one that the client has.
        fn step(&mut self, passes: &'a Passes, memory: &mut u64, sent: &mut u64, count: &mut u64) -> bool {
            match self.steps {
                0 => {
                    *memory += 1;
                    self.change = *memory;
                    self.ticket = Some(passes.ticket());
                }
                1 => {
                    let Ok(ended) = passes.ended.try_lock() else { return false };
                    self.pass = passes.begin_in(ended, self.ticket.as_ref().unwrap());
                    self.steps += if self.pass.is_some() { 0 } else { 2 };
                }
                2 => self.read = *memory,
                3 => {
                    (*sent, *count) = (self.read, *count + 1);
                    self.pass.take().unwrap().end();
                }
                _ => return false,
            }
            self.steps += 1;
            assert!(self.steps < 4 || *sent >= self.change, "an answer before the change");
            true
        }
    }

    /// Tries all orders of the threads' next steps.
    fn try_all(order: &mut Vec<usize>, seen: &mut Vec<u64>) {
        let passes = Passes::default();
        let mut threads: [Sender<'_>; 3] = Default::default();
        let (mut memory, mut sent, mut count) = (0, 0, 0);
        for &thread in &*order {
            if !threads[thread].step(&passes, &mut memory, &mut sent, &mut count) {
                return;
            }
        }
        if threads.iter().all(|thread| thread.steps == 4) {
            seen.push(count);
            return;
        }
        drop(threads);
        for thread in 0..3 {
            order.push(thread);
            try_all(order, seen);
            order.pop();
        }
    }

    #[test]
    fn no_thread_answers_before_its_changes_are_sent_and_one_pass_serves_many() {
        let mut seen = Vec::new();
        try_all(&mut Vec::new(), &mut seen);
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen, [1, 2, 3]);
    }

    #[test]
    fn pass_that_does_not_end_serves_nobody() {
        let passes = Passes::default();
        let ticket = passes.ticket();
        drop(passes.begin(&ticket).unwrap());
        assert!(passes.begin(&ticket).is_some());
    }

    #[test]
    fn unloaded_module_takes_the_mirrors_of_its_variables_along() {
        let mirrors = Mirrors::new(1000);
        let managed = || Backing::Managed { shadow: Shadow::new(0) };
        mirrors.know_managed(0x5000, 0x100, 71);
        mirrors.know_managed(0x6000, 0x100, 72);
        put(&mirrors, 1, 0x5000, managed());
        put(&mirrors, 2, 0x6000, managed());
        put(&mirrors, 3, 0x5000, own());
        mirrors.forget_parent(71);
        let inner = mirrors.lock();
        assert_eq!(inner.mirrors.keys().copied().collect::<Vec<_>>(), [2, 3]);
        assert_eq!(inner.managed.keys().copied().collect::<Vec<_>>(), [0x6000]);
        assert_eq!(inner.charged, 20, "its host memory is free again");
    }
}
