//! Regions of host memory that the device can see.
//!
//! The worker has a mirror of each region. The program's changes go up before work is launched and
//! while a thread waits; the device's changes come back when the program synchronizes. A program
//! that only watches its memory sees them if it says so ([`watched`]).

use std::io::IoSliceMut;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use gpusession_link::link::Reply;
use gpusession_link::watched_memory;
use gpusession_proto::changes::{self, BLOCK, Words};
use gpusession_proto::frame::{mirror, op};
use nix::errno::Errno;
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid;

use crate::client::{Client, word};
use crate::descriptors;
use crate::status::Result;
use crate::watched;
use crate::window::PAGE;
use crate::written_pages::{self, Watch};

/// Most blocks of one part of a change.
const MAX_PART_BLOCKS: usize = 64;
/// Length below which comparing a region takes less time than asking the kernel for written pages.
const MIN_WATCHED_BYTES: usize = 64 << 10;
/// Shortest time without a change after which a page of pinned memory rests.
const REST_INTERVAL: Duration = Duration::from_secs(2);

/// Way to read a region's memory.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reading {
    /// The program has promised that the memory exists.
    Promised,
    /// The program may have unmapped the memory: an unreadable part counts as unchanged.
    Guarded,
    /// As [`Self::Guarded`], without a call of the program: all counts as unchanged if a sandbox
    /// forbids to look.
    Unasked,
}

impl Reading {
    /// Copies memory of the program to `to`; `false` if it equals `known` or cannot be read.
    fn copy_differing(self, address: usize, known: &[u8], to: &mut [u8]) -> bool {
        #[cfg(test)]
        tests::program_writes();
        if self != Self::Promised {
            match read_guarded(address, to) {
                Ok(read) => return read == to.len() && to != known,
                Err(Errno::EFAULT) => return false,
                Err(_) if self == Self::Unasked => return false,
                // A sandbox forbids the call.
                Err(_) => {}
            }
        }
        // SAFETY: the memory is readable until `discard`, or while graphs that name it are
        // launched, as the program promised. The program may write to it meanwhile, as with a local
        // card.
        if !unsafe { watched_memory::differs(address, known) } {
            return false;
        }
        // SAFETY: as above.
        unsafe { watched_memory::read(address, to) };
        true
    }

    /// Returns `true` if memory of the program is readable and equals `known`; a larger part at a
    /// time costs less.
    fn all_equal(self, address: usize, known: &[u8]) -> bool {
        let mut now = vec![0; if self == Self::Promised { 0 } else { known.len() }];
        !now.is_empty() && read_guarded(address, &mut now) == Ok(known.len()) && now == known
    }
}

/// Reads memory of the program that may not exist; returns the number of bytes.
fn read_guarded(address: usize, to: &mut [u8]) -> nix::Result<usize> {
    let memory = RemoteIoVec { base: address, len: to.len() };
    process_vm_readv(Pid::this(), &mut [IoSliceMut::new(to)], &[memory])
}

/// A region of host memory with a mirror in a worker.
pub struct Region {
    pub client: &'static Client,
    id: u64,
    pub base: usize,
    pub len: usize,
    kind: u64,
    /// The mirror's address, for kinds whose address this process chooses.
    pub there: u64,
    /// Whether it is ordinary memory of the program, which the program may unmap without notice.
    pub pageable: bool,
    device: AtomicU64,
    /// Whether kernels can name it.
    everywhere: AtomicBool,
    /// Whether the worker has the mirror.
    made: AtomicBool,
    /// Number of [`Named`] references to it.
    names: AtomicUsize,
    /// The contents that the worker knows; empty once the memory is freed.
    shadow: Mutex<Vec<u8>>,
    /// The kernel's notes of what the program has written; without them all memory is compared.
    watch: Option<Watch>,
    /// For watched pinned memory.
    rest: Option<Mutex<Rest>>,
}

/// Blocks of pinned memory that need no comparison, since the kernel would note a change.
///
/// A block that was written is compared before each launch, until it has not changed for a time.
struct Rest {
    /// Whether a block has changed since the last round, by number.
    changed: Vec<bool>,
    next_round: Instant,
}

/// Reference to a region by a graph or a capture, whose copies name it.
pub struct Named(Arc<Region>);

impl Named {
    /// Lets a graph name the region.
    pub fn new(region: Arc<Region>) -> Self {
        region.names.fetch_add(1, Ordering::Relaxed);
        Self(region)
    }

    /// Returns `true` if both refer to one region.
    pub fn same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Clone for Named {
    fn clone(&self) -> Self {
        Self::new(self.0.clone())
    }
}

impl Drop for Named {
    fn drop(&mut self) {
        self.0.names.fetch_sub(1, Ordering::Relaxed);
    }
}

impl std::ops::Deref for Named {
    type Target = Region;

    fn deref(&self) -> &Region {
        &self.0
    }
}

static REGIONS: RwLock<Vec<Arc<Region>>> = RwLock::new(Vec::new());
/// Number of regions: at zero, a launch's check is a single load.
static COUNT: AtomicUsize = AtomicUsize::new(0);
static NEXT: AtomicU64 = AtomicU64::new(1);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the address of host memory that the worker knows by region and offset.
pub fn address(client: &Client, region: u64, offset: u64) -> Option<u64> {
    let known = all().into_iter().find(|r| r.client.number == client.number && r.id == region)?;
    Some(known.base as u64 + offset)
}

/// Returns all regions.
pub fn all() -> Vec<Arc<Region>> {
    REGIONS.read().unwrap_or_else(PoisonError::into_inner).clone()
}

impl Region {
    /// Makes a region without a mirror; [`create`] creates the mirror.
    pub fn new(
        client: &'static Client,
        base: u64,
        len: u64,
        kind: u64,
        pageable: bool,
        everywhere: bool,
    ) -> Self {
        Self {
            client,
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            base: base as usize,
            len: len as usize,
            kind,
            there: base,
            pageable,
            device: AtomicU64::new(0),
            everywhere: AtomicBool::new(everywhere),
            made: AtomicBool::new(false),
            names: AtomicUsize::new(0),
            shadow: Mutex::new(vec![0; len as usize]),
            watch: (kind == mirror::DEVICE).then(|| watch(base, len)).flatten(),
            rest: None,
        }
    }

    /// Lets blocks of this pinned memory rest, which is private to the process.
    pub fn resting(mut self) -> Self {
        let blocks = self.len.div_ceil(BLOCK);
        self.watch = watch(self.base as u64, self.len as u64).filter(|_| self.base.is_multiple_of(BLOCK));
        self.rest = self.watch.is_some().then(|| {
            // All of them are new.
            Mutex::new(Rest { changed: vec![true; blocks], next_round: Instant::now() + REST_INTERVAL })
        });
        self
    }

    /// Number by which the worker knows the region.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Returns `true` if the region has all of these bytes.
    pub fn contains(&self, address: usize, len: usize) -> bool {
        address >= self.base && len <= self.len && address - self.base <= self.len - len
    }

    /// Returns `true` for pageable memory that no graph and no capture names any more.
    pub fn unnamed(&self) -> bool {
        self.pageable && self.names.load(Ordering::Relaxed) == 0
    }

    /// Returns `true` if a kernel may wait for the program's changes.
    fn awaited(&self) -> bool {
        self.everywhere.load(Ordering::Relaxed) && self.kind != mirror::DEVICE
    }

    /// Returns `true` if the region has any of these bytes.
    pub fn overlaps(&self, address: usize, len: usize) -> bool {
        address < self.base + self.len && self.base < address + len
    }

    /// Lets kernels name the region; returns the device's address for it.
    pub fn show(&self) -> u64 {
        self.everywhere.store(true, Ordering::Relaxed);
        self.device.load(Ordering::Relaxed)
    }

    /// Sends the program's changes.
    #[cfg(test)]
    fn upload(&self) -> Result {
        upload_parts(&[Part::whole(self)])
    }

    /// Sends the program's changes in the blocks of `len` bytes from an offset.
    ///
    /// A flag among them, which a kernel may watch, must not precede data in other blocks.
    pub fn upload_part(&self, offset: usize, len: usize) -> Result {
        if self.everywhere.load(Ordering::Relaxed) {
            return upload(self.client);
        }
        let first = offset / BLOCK * BLOCK;
        let end = offset.saturating_add(len).min(self.len);
        upload_parts(&[Part { region: self, blocks: first..end, reading: Reading::Promised }])
    }

    /// Sends the changes in long runs, and adds the others to `words`.
    fn collect(&self, blocks: Range<usize>, reading: Reading, words: &mut Words) -> Result {
        // The notes of writes belong to the region that has replaced a discarded one.
        if lock(&self.shadow).is_empty() {
            return Ok(());
        }
        let mut found = Found { body: Vec::new(), words };
        let (first, end) = (blocks.start, blocks.end);
        match (&self.watch, &self.rest) {
            (Some(watch), Some(rest)) if first < end && watch.works() => {
                let written = written(watch, &mut lock(rest), self.base, blocks);
                for pages in written {
                    self.compare_pages(pages, reading, &mut found)?;
                }
            }
            (Some(watch), None) if first < end => {
                let pages = written_pages::around(self.base + first, end - first);
                watch.take(pages, |pages| self.compare_pages(pages, reading, &mut found))?;
            }
            _ => self.compare(first, end, reading, &mut found)?,
        }
        self.send(&mut found.body)
    }

    fn compare_pages(&self, pages: Range<usize>, reading: Reading, found: &mut Found<'_>) -> Result {
        let first = pages.start.saturating_sub(self.base) / BLOCK * BLOCK;
        self.compare(first, (pages.end - self.base).min(self.len), reading, found)
    }

    fn send(&self, body: &mut Vec<u8>) -> Result {
        if body.is_empty() {
            return Ok(());
        }
        let sent = self.client.post(op::WRITE_HOST, |w| {
            w.word(self.id);
            w.words(body);
        });
        if body.len() >= changes::FRAME {
            // The threads that could read the worker's acknowledgements may wait for this one.
            let _ = self.client.link.poll();
        }
        body.clear();
        sent.map(|_| ())
    }

    /// Adds the program's changes between two offsets, and sends full frames.
    fn compare(&self, first: usize, end: usize, reading: Reading, found: &mut Found<'_>) -> Result {
        for offset in (first..end).step_by(MAX_PART_BLOCKS * BLOCK) {
            {
                // The connection's reader takes this lock, too, so it is not held while frames are
                // sent.
                let mut shadow = lock(&self.shadow);
                if shadow.is_empty() {
                    return Ok(());
                }
                let stop = (offset + MAX_PART_BLOCKS * BLOCK).min(end.next_multiple_of(BLOCK)).min(self.len);
                self.compare_run(&mut shadow[offset..stop], offset, reading, found);
            }
            if found.body.len() >= changes::FRAME {
                self.send(&mut found.body)?;
            }
        }
        Ok(())
    }

    /// Adds the changes of some blocks; `shadow` is their known contents.
    fn compare_run(&self, shadow: &mut [u8], offset: usize, reading: Reading, found: &mut Found<'_>) {
        if reading.all_equal(self.base + offset, shadow) {
            return;
        }
        let mut changed = 0..0;
        let mut rest = self.rest.as_ref().map(lock);
        let take = |shadow: &[u8], changed: Range<usize>, body: &mut Vec<u8>| {
            if !changed.is_empty() {
                changes::push(body, (offset + changed.start) as u64, &shadow[changed]);
            }
        };
        for at in (0..shadow.len()).step_by(BLOCK) {
            let block = at..(at + BLOCK).min(shadow.len());
            let known = &mut shadow[block.clone()];
            let mut copy = [0; BLOCK];
            let copy = &mut copy[..known.len()];
            if !reading.copy_differing(self.base + offset + at, known, copy) {
                continue;
            }
            if let Some(block) = rest.as_mut().and_then(|r| r.changed.get_mut((offset + at) / BLOCK)) {
                *block = true;
            }
            if self.kind == mirror::DEVICE {
                // Neighbouring blocks travel as one part, which the worker copies at once.
                known.copy_from_slice(copy);
                if changed.end != at {
                    take(shadow, changed.clone(), &mut found.body);
                    changed.start = at;
                }
                changed.end = block.end;
            } else {
                let (address, offset) = (self.base + offset + at, (offset + at) as u64);
                let block = changes::Block { region: self.id, address, offset, old: known, new: copy };
                found.words.push_differing(&mut found.body, &block);
                known.copy_from_slice(copy);
            }
        }
        take(shadow, changed, &mut found.body);
    }
}

/// Changes that an upload has found and not sent.
struct Found<'a> {
    /// Long runs of one region.
    body: Vec<u8>,
    words: &'a mut Words,
}

/// Blocks whose changes go up.
struct Part<'a> {
    region: &'a Region,
    blocks: Range<usize>,
    reading: Reading,
}

impl<'a> Part<'a> {
    fn whole(region: &'a Region) -> Self {
        Self { region, blocks: 0..region.len, reading: Reading::Promised }
    }

    /// As [`Self::whole`], for memory that the program may have unmapped.
    fn for_graph(region: &'a Region) -> Self {
        let reading = if region.pageable { Reading::Guarded } else { Reading::Promised };
        Self { reading, ..Self::whole(region) }
    }

    /// As [`Self::whole`], without a call of the program.
    ///
    /// The program may have unmapped registered memory.
    fn beside_wait(region: &'a Region) -> Self {
        let own = !region.pageable && region.there == region.base as u64;
        let reading = if own { Reading::Promised } else { Reading::Unasked };
        Self { reading, ..Self::whole(region) }
    }
}

/// Sends the program's changes in some blocks: long runs as they are found, then the words.
///
/// So a kernel that sees a flag sees the data, too, which the program wrote before ([`Words`]).
/// The blocks are of one client's regions.
fn upload_parts(parts: &[Part<'_>]) -> Result {
    let Some(first) = parts.first() else { return Ok(()) };
    let client = first.region.client;
    debug_assert!(parts.iter().all(|part| part.region.client.number == client.number));
    let _order = lock(&client.sending);
    let words = Words::collected(|words, again| {
        // Natively, no kernel watches the program's writes to managed memory.
        let watched = |part: &&Part<'_>| !again || part.region.kind != mirror::DEVICE;
        let mut parts = parts.iter().filter(watched);
        parts.try_for_each(|part| part.region.collect(part.blocks.clone(), part.reading, words))
    })?;
    for Part { region, .. } in parts {
        words.forget_late(region.id, &mut lock(&region.shadow));
    }
    for (id, places) in words.in_order() {
        let Some(part) = parts.iter().find(|part| part.region.id == id) else { continue };
        let mut body = Vec::new();
        changes::push_places(&mut body, &lock(&part.region.shadow), &places);
        part.region.send(&mut body)?;
    }
    Ok(())
}

/// Lets the kernel note writes to memory, if that is worth it.
fn watch(base: u64, len: u64) -> Option<Watch> {
    let (base, len) = (base as usize, len as usize);
    (len >= MIN_WATCHED_BYTES).then(|| Watch::new(written_pages::around(base, len))).flatten()
}

/// Returns the pages of pinned memory that may have changed; in each round, more of them rest.
///
/// A device writes behind the kernel's back only to pages that it pinned before, which is a write.
/// So such pages did not rest before. When they are to rest, a descriptor tells of the device. This
/// function looks for it after the protection, and the caller compares after that. So a device that
/// has finished before shows in the memory, and one that has not in the descriptors.
fn written(watch: &Watch, rest: &mut Rest, base: usize, part: Range<usize>) -> Vec<Range<usize>> {
    let mut found: Vec<Range<usize>> = Vec::new();
    let round = Instant::now() >= rest.next_round;
    let mut to_rest = false;
    let mut note = |pages| {
        found.push(pages);
        Ok::<_, std::convert::Infallible>(())
    };
    let (first, end) = (part.start / BLOCK, part.end.div_ceil(BLOCK));
    let pages = |blocks: Range<usize>| base + blocks.start * BLOCK..base + blocks.end * BLOCK;
    if !round {
        let Ok(()) = watch.look(pages(first..end), note);
        return found;
    }
    let whole = part.start == 0 && end == rest.changed.len();
    let mut at = first;
    for blocks in rest.changed[first..end].chunk_by(|a, b| a == b) {
        let run = pages(at..at + blocks.len());
        at += blocks.len();
        let Ok(()) = if blocks[0] {
            watch.look(run, &mut note)
        } else {
            to_rest = true;
            watch.take(run, &mut note)
        };
    }
    if to_rest && !descriptors::harmless() {
        watch.give_up();
        return vec![pages(first..end)];
    }
    if whole {
        rest.changed.fill(false);
        rest.next_round = Instant::now() + REST_INTERVAL;
    }
    found
}

/// Creates a region's mirror in its worker.
pub fn create(region: Region) -> Result<Arc<Region>> {
    let region = Arc::new(region);
    // Known before the reply, because the mirror's present contents arrive before it.
    REGIONS.write().unwrap_or_else(PoisonError::into_inner).push(region.clone());
    let kind = match region.kind {
        mirror::SAME if watched::wanted(region.client) => mirror::WATCHED,
        kind => kind,
    };
    let made = region.client.ask(op::MIRROR_HOST, |w| {
        w.word(region.id);
        w.word(kind);
        w.word(region.there);
        w.word(region.len as u64);
    });
    let told = |reply: Reply| match reply.status {
        0 => word(&mut reply.reader()),
        status => Err(status),
    };
    match made.and_then(told) {
        Ok(device) => {
            region.device.store(device, Ordering::Relaxed);
            region.made.store(true, Ordering::Release);
            COUNT.fetch_add(1, Ordering::Relaxed);
            if matches!(region.kind, mirror::SAME | mirror::MANAGED) {
                region.client.work_beside_waits(upload_beside_wait);
            }
            Ok(region)
        }
        Err(status) => {
            drop_region(&region);
            Err(status)
        }
    }
}

/// Removes a region from the list; `false` if another thread has done so.
fn drop_region(region: &Arc<Region>) -> bool {
    let mut regions = REGIONS.write().unwrap_or_else(PoisonError::into_inner);
    let before = regions.len();
    regions.retain(|r| !Arc::ptr_eq(r, region));
    let dropped = regions.len() < before;
    drop(regions);
    lock(&region.shadow).clear();
    dropped
}

/// Returns `true` if any region exists.
#[inline]
pub fn any() -> bool {
    COUNT.load(Ordering::Relaxed) != 0
}

/// Returns the region of pinned or managed memory of the client that has all of these bytes.
///
/// A graph that is gone may have left a region of pageable memory at the same place.
pub fn find(client: &Client, address: usize, len: usize) -> Option<Arc<Region>> {
    let regions = REGIONS.read().unwrap_or_else(PoisonError::into_inner);
    let fits = |r: &&Arc<Region>| r.client.number == client.number && !r.pageable && r.contains(address, len);
    regions.iter().find(fits).cloned()
}

/// Returns `true` if graphs name, or have named, some of this pageable memory.
pub fn graphs_name(client: &Client, address: usize, len: usize) -> bool {
    let named = |r: &Arc<Region>| r.pageable && r.client.number == client.number && r.overlaps(address, len);
    any() && REGIONS.read().unwrap_or_else(PoisonError::into_inner).iter().any(named)
}

/// Frees the second address of registered memory in the arena.
pub fn give_back(client: &Client, base: u64, there: u64, size: u64) {
    if there != base {
        client.window().unreserve_host(there - base % PAGE, base % PAGE + size);
    }
}

/// Discards a region and its mirror.
pub fn discard(region: &Arc<Region>) -> Result {
    let client = region.client;
    // An upload may still send words of it.
    let _order = lock(&client.sending);
    if !drop_region(region) {
        return Ok(());
    }
    COUNT.fetch_sub(1, Ordering::Relaxed);
    let gone = client.post(op::UNMIRROR_HOST, |w| w.word(region.id)).map(|_| ());
    give_back(client, region.base as u64, region.there, region.len as u64);
    gone
}

/// Sends the program's changes in memory that kernels can name; runs before work is launched.
#[inline]
pub fn upload(client: &Client) -> Result {
    if !any() {
        return Ok(());
    }
    if watched::wanted(client) {
        client.long_waits.gpu_works();
    }
    upload_where(client, |r| r.everywhere.load(Ordering::Relaxed))
}

/// Sends the program's changes in host memory that kernels can name; runs before the program waits.
///
/// A kernel may wait for what the program has written since its launch. Natively, managed memory
/// without concurrent access has to wait for the kernel instead.
#[inline]
pub fn upload_awaited(client: &Client) -> Result {
    if !any() {
        return Ok(());
    }
    upload_where(client, Region::awaited)
}

/// Sends such changes while a thread waits, maybe for a kernel that waits for another thread, or
/// while the program only watches its memory.
fn upload_beside_wait(client: &Client) {
    let regions = usable_regions(client);
    // The wait finds a lost link, too.
    let _ = upload_parts(
        &regions.iter().filter(|r| r.awaited()).map(|r| Part::beside_wait(r)).collect::<Vec<_>>(),
    );
}

/// Sends the changes that a host function may have made.
///
/// Later work may read them, and the worker compares later results with the program's contents.
/// Pageable memory may be unmapped since the last launch of the graphs that name it.
pub fn upload_after_host_function(client: &Client) -> Result {
    if !any() {
        return Ok(());
    }
    upload_parts(&usable_regions(client).iter().map(|r| Part::for_graph(r)).collect::<Vec<_>>())
}

/// Sends the program's changes before a launch of a graph whose copies name these regions.
///
/// Pageable memory may be unmapped, if the program has changed the nodes that named it.
pub fn upload_for_graph(regions: &[Named]) -> Result {
    upload_parts(&regions.iter().map(|r| Part::for_graph(r)).collect::<Vec<_>>())
}

fn upload_where(client: &Client, wanted: impl Fn(&Region) -> bool) -> Result {
    let regions = usable_regions(client);
    upload_parts(&regions.iter().filter(|r| wanted(r)).map(|r| Part::whole(r)).collect::<Vec<_>>())
}

/// Returns the regions that have a mirror in a client's worker.
fn usable_regions(client: &Client) -> Vec<Arc<Region>> {
    let mut regions = all();
    regions.retain(|r| r.client.number == client.number && r.made.load(Ordering::Acquire));
    regions
}

/// Takes the device's changes from the worker.
pub fn changed(region: u64, offset: u64, bytes: &[u8]) {
    let Some(region) = all().into_iter().find(|r| r.id == region) else { return };
    region.client.host_changes.fetch_add(1, Ordering::Relaxed);
    let mut shadow = lock(&region.shadow);
    let offset = offset as usize;
    let Some(known) = offset.checked_add(bytes.len()).and_then(|end| shadow.get_mut(offset..end)) else {
        return;
    };
    known.copy_from_slice(bytes);
    // SAFETY: the check against the shadow keeps the bytes inside the region. Its memory is
    // writable until `discard`, which takes this lock, or while the graphs that write to it run.
    unsafe { watched_memory::write(region.base + offset, bytes) };
}

#[cfg(test)]
mod tests;
