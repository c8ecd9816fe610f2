//! The process's address space as the devices see it.
//!
//! Device addresses are reserved and inaccessible to the host; their bytes lie elsewhere. Pinned
//! and managed memory is host memory at its own address.

use crate::arena::{Arena, GRANULARITY, SMALL};
use crate::config::Config;
use crate::errors::{INVALID_VALUE, OUT_OF_MEMORY, Result, UNKNOWN};
use crate::ipc;
use crate::ptx::exec::{MemView, Span};
use crate::shared_pool::{Part, SharedPool};
use crate::usage::Usage;
use parking_lot::Mutex;
use std::alloc::Layout;
use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const PAGE: usize = 4096;

/// The bytes of one or more allocations, and their origin.
pub struct Backing {
    ptr: *mut u8,
    len: usize,
    origin: Origin,
    /// The file that other processes map by a legacy handle.
    file: Mutex<Option<File>>,
    /// Part of a pool that this process shares, which ends with the backing.
    part: Option<(Arc<SharedPool>, Part)>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Origin {
    Heap,
    Mapped,
    /// The program's own memory.
    Borrowed,
}

// SAFETY: the bytes are only reached through raw copies and atomics, like the memory of a device.
unsafe impl Send for Backing {}
// SAFETY: as above.
unsafe impl Sync for Backing {}

impl Backing {
    fn new(ptr: *mut u8, len: usize, origin: Origin) -> Backing {
        Backing { ptr, len, origin, file: Mutex::default(), part: None }
    }

    fn heap(len: usize, poison: Option<u8>) -> Result<Arc<Backing>> {
        let layout = Layout::from_size_align(len.max(1), SMALL as usize).map_err(|_| OUT_OF_MEMORY)?;
        // SAFETY: the layout has a size.
        let ptr = unsafe { std::alloc::alloc_zeroed(layout) };
        if ptr.is_null() {
            return Err(OUT_OF_MEMORY);
        }
        if let Some(byte) = poison {
            // SAFETY: `len` bytes were just allocated.
            unsafe { ptr.write_bytes(byte, len) };
        }
        Ok(Arc::new(Backing::new(ptr, len.max(1), Origin::Heap)))
    }

    fn mapped(len: usize) -> Result<Arc<Backing>> {
        let len = len.max(1).next_multiple_of(PAGE);
        let ptr = map(0, len, libc::PROT_READ | libc::PROT_WRITE, 0).ok_or(OUT_OF_MEMORY)?;
        Ok(Arc::new(Backing::new(ptr as *mut u8, len, Origin::Mapped)))
    }

    fn poisoned(self: Arc<Backing>, poison: Option<u8>) -> Arc<Backing> {
        if let Some(byte) = poison {
            // SAFETY: `len` bytes that no other code uses yet.
            unsafe { self.ptr.write_bytes(byte, self.len) };
        }
        self
    }

    /// Maps a file, which other processes may map as well.
    fn of_file(file: &File, len: usize) -> Result<Arc<Backing>> {
        let ptr = ipc::map(file, len, None).ok_or(OUT_OF_MEMORY)?;
        Ok(Arc::new(Backing::new(ptr, len, Origin::Mapped)))
    }

    /// Maps a part of a pool; the pool's own process frees it in the end.
    fn of_part(pool: &Arc<SharedPool>, part: Part) -> Result<Arc<Backing>> {
        let mut backing = Backing::new(pool.map(part)?, part.pages() as usize, Origin::Mapped);
        backing.part = (!pool.imported).then(|| (pool.clone(), part));
        Ok(Arc::new(backing))
    }
}

impl Drop for Backing {
    fn drop(&mut self) {
        if let Some((pool, part)) = &self.part {
            pool.give(*part);
        }
        match self.origin {
            Origin::Heap => {
                if let Ok(layout) = Layout::from_size_align(self.len, SMALL as usize) {
                    // SAFETY: allocated with this layout.
                    unsafe { std::alloc::dealloc(self.ptr, layout) };
                }
            }
            // SAFETY: mapped with this length.
            Origin::Mapped => unsafe {
                libc::munmap(self.ptr.cast(), self.len);
            },
            Origin::Borrowed => {}
        }
    }
}

fn map(hint: u64, len: usize, prot: i32, flags: i32) -> Option<u64> {
    let flags = flags | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: an anonymous mapping that never replaces another one.
    let p = unsafe { libc::mmap(hint as *mut _, len, prot, flags, -1, 0) };
    (p != libc::MAP_FAILED).then_some(p as u64)
}

/// Memory created by `cuMemCreate`.
pub struct Physical {
    pub device: u32,
    /// The same device, by its number in the machine.
    card: u32,
    pub size: u64,
    pub properties: [u8; 32],
    backing: Arc<Backing>,
    /// The file that other processes map, if this process created the memory for export.
    pub file: Option<File>,
    /// `true` in the process that created it, which counts its bytes.
    charged: bool,
    /// References by the program and by mappings; the last one frees the memory.
    pub references: AtomicU64,
    usage: Arc<Usage>,
}

impl Drop for Physical {
    fn drop(&mut self) {
        if self.charged {
            self.usage.give(self.card, self.size);
        }
    }
}

#[derive(Clone)]
pub enum Kind {
    Device,
    Managed,
    Host {
        flags: u32,
    },
    Registered {
        flags: u32,
    },
    Mapped(Arc<Physical>),
    /// Memory of a pool, and the part of it that other processes may import.
    Pool {
        pool: usize,
        part: Option<Part>,
    },
    /// A variable of a module.
    Variable,
    /// Memory of another process, opened by a legacy handle.
    Opened,
}

/// A range of addresses that was allocated, mapped or registered at once.
pub struct Allocation {
    pub base: u64,
    pub size: u64,
    pub device: u32,
    /// Handle of the context that was current at its creation; 0 for mapped memory.
    pub context: usize,
    pub kind: Kind,
    /// Unique in the process (`BUFFER_ID`).
    pub id: u64,
    /// One bit per device that may access it; only for mapped memory, and for further devices of
    /// memory of a pool.
    pub access: AtomicU64,
    backing: Arc<Backing>,
    offset: usize,
    /// Bytes counted on the device.
    charged: u64,
    /// Set when a free is queued.
    pub freed: AtomicBool,
}

impl Allocation {
    pub fn end(&self) -> u64 {
        self.base + self.size
    }

    /// Returns `true` if host code may use these addresses.
    pub fn on_host(&self) -> bool {
        matches!(self.kind, Kind::Host { .. } | Kind::Registered { .. } | Kind::Managed)
    }

    pub fn pinned(&self) -> bool {
        matches!(self.kind, Kind::Host { .. } | Kind::Registered { .. })
    }

    /// Moves the bytes into a file that other processes may map, once; their address stays.
    pub fn share<T>(&self, name: impl FnOnce(&File) -> Result<T>) -> Result<T> {
        let backing = &*self.backing;
        let mut file = backing.file.lock();
        if file.is_none() {
            let new = ipc::file()?;
            let _moves = ipc::WRITING.write();
            // SAFETY: all bytes of the backing; no entry of a stream runs now.
            let bytes = unsafe { std::slice::from_raw_parts(backing.ptr, backing.len) };
            new.write_all_at(bytes, 0).map_err(|_| OUT_OF_MEMORY)?;
            ipc::map(&new, backing.len, Some(backing.ptr)).ok_or(OUT_OF_MEMORY)?;
            *file = Some(new);
        }
        name(file.as_ref().ok_or(UNKNOWN)?)
    }

    pub fn host_ptr(&self) -> *mut u8 {
        // SAFETY: `offset` lies inside the backing.
        unsafe { self.backing.ptr.add(self.offset) }
    }
}

/// The bytes behind a range of addresses, kept alive by `keep`.
pub struct Piece {
    pub ptr: *mut u8,
    pub len: usize,
    pub keep: Arc<Allocation>,
}

#[derive(Default)]
struct Inner {
    map: BTreeMap<u64, Arc<Allocation>>,
    arenas: Vec<Arena>,
    /// Windows of stream-ordered allocations, one per device.
    pools: Vec<Arena>,
    /// Ranges of `cuMemAddressReserve`.
    reserved: BTreeMap<u64, u64>,
    /// Pairs of a device and a peer whose memory it can access.
    peers: Vec<(u32, u32)>,
    view: Option<Arc<MemView>>,
}

/// Contents of device memory that was moved out.
pub struct Saved {
    contents: Vec<(Arc<Backing>, Vec<u8>)>,
    /// Bytes that this process used on each card of the machine.
    bytes: [u64; crate::config::DEVICES],
}

/// Byte that fills device memory whose contents were moved out.
const GONE: u8 = 0xdb;

pub struct Space {
    inner: Mutex<Inner>,
    config: Arc<Config>,
    cards: Vec<u32>,
    usage: Arc<Usage>,
    next_id: AtomicU64,
    allocations: AtomicU64,
}

/// Reserves a window, at `at` if possible.
fn window(at: u64, size: u64) -> Arena {
    let fixed = if at == 0 { 0 } else { libc::MAP_FIXED_NOREPLACE };
    match map(at, size as usize, libc::PROT_NONE, fixed) {
        Some(p) => Arena::new(p.next_multiple_of(GRANULARITY), size - GRANULARITY),
        // An occupied address was configured on purpose.
        None => Arena::new(at, size),
    }
}

impl Space {
    /// Creates the space; `cards` are the visible devices by their numbers in the machine.
    pub fn new(config: &Arc<Config>, cards: Vec<u32>) -> Space {
        let mut inner = Inner::default();
        let size = (config.memory * 2).next_multiple_of(GRANULARITY) + 64 * GRANULARITY;
        for d in 0..cards.len() as u64 {
            let at = if config.device_base == 0 { 0 } else { config.device_base + d * size };
            inner.arenas.push(window(at, size));
            inner.pools.push(window(config.pool_base + d * size, size));
        }
        Space {
            inner: Mutex::new(inner),
            config: config.clone(),
            cards,
            usage: Usage::open(config),
            next_id: AtomicU64::new(1),
            allocations: AtomicU64::new(0),
        }
    }

    fn insert(&self, inner: &mut Inner, mut a: Allocation) -> Arc<Allocation> {
        a.id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let a = Arc::new(a);
        inner.map.insert(a.base, a.clone());
        inner.view = None;
        a
    }

    /// Returns the machine's table of memory in use.
    pub fn usage(&self) -> &Arc<Usage> {
        &self.usage
    }

    /// Saves the contents of device memory, and frees that memory on the machine.
    pub fn move_out(&self) -> Saved {
        let inner = self.inner.lock();
        let mut saved = Saved { contents: Vec::new(), bytes: self.usage.mine() };
        for a in inner.map.values().filter(|a| !a.on_host()) {
            if saved.contents.iter().any(|(backing, _)| Arc::ptr_eq(backing, &a.backing)) {
                continue;
            }
            // SAFETY: `len` bytes that belong to the backing; nothing runs on the device now.
            let bytes = unsafe { std::slice::from_raw_parts_mut(a.backing.ptr, a.backing.len) };
            saved.contents.push((a.backing.clone(), bytes.to_vec()));
            bytes.fill(GONE);
        }
        for (card, bytes) in (0u32..).zip(saved.bytes) {
            self.usage.give(card, bytes);
        }
        saved
    }

    /// Restores the contents; returns `false`, without effect, if other processes have taken the
    /// memory.
    pub fn move_in(&self, saved: &Saved) -> bool {
        for (card, bytes) in (0u32..).zip(saved.bytes) {
            if bytes > 0 && !self.usage.take(card, bytes, self.config.memory) {
                (0..card).zip(saved.bytes).for_each(|(card, bytes)| self.usage.give(card, bytes));
                return false;
            }
        }
        for (backing, bytes) in &saved.contents {
            // SAFETY: as in `move_out`.
            unsafe { backing.ptr.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        }
        true
    }

    /// Returns the bytes of a device that all processes use.
    pub fn used(&self, device: u32) -> u64 {
        self.usage.used(self.cards[device as usize])
    }

    /// Reports a fault of a device to all processes of the machine.
    pub fn report_xid(&self, device: u32, code: u32) {
        self.usage.report_xid(self.cards[device as usize], code);
    }

    /// Counts a new context's memory on its device.
    pub fn context_made(&self, device: u32) -> Result {
        let had = self.usage.take(self.cards[device as usize], self.config.context, self.config.memory);
        if had { Ok(()) } else { Err(OUT_OF_MEMORY) }
    }

    /// Frees the memory of a destroyed context.
    pub fn context_gone(&self, device: u32) {
        self.usage.give(self.cards[device as usize], self.config.context);
    }

    fn charge(&self, device: u32, size: u64) -> Result {
        let n = self.allocations.fetch_add(1, Ordering::Relaxed) + 1;
        let every = self.config.fail_alloc_every;
        if (every != 0 && n.is_multiple_of(every))
            || !self.usage.take(self.cards[device as usize], size, self.config.memory)
        {
            return Err(OUT_OF_MEMORY);
        }
        Ok(())
    }

    /// Allocates device memory, in `backing` if that exists already.
    fn in_arena(
        &self,
        device: u32,
        context: usize,
        size: u64,
        kind: Kind,
        backing: Option<Arc<Backing>>,
    ) -> Result<Arc<Allocation>> {
        if size == 0 {
            return Err(INVALID_VALUE);
        }
        if size > self.config.memory {
            return Err(OUT_OF_MEMORY);
        }
        let charged = size.next_multiple_of(SMALL);
        self.charge(device, charged)?;
        let made = (|| {
            let backing = match (backing, &kind) {
                (Some(backing), _) => backing,
                // Whole pages, which a legacy handle may put into a file later.
                (None, Kind::Device) if self.config.export_memory => {
                    Backing::mapped(size as usize)?.poisoned(self.config.poison)
                }
                _ => Backing::heap(size as usize, self.config.poison)?,
            };
            self.place(device, context, size, kind, backing, charged)
        })();
        if made.is_err() {
            self.usage.give(self.cards[device as usize], charged);
        }
        made
    }

    /// Finds an address for device memory.
    fn place(
        &self,
        device: u32,
        context: usize,
        size: u64,
        kind: Kind,
        backing: Arc<Backing>,
        charged: u64,
    ) -> Result<Arc<Allocation>> {
        let mut inner = self.inner.lock();
        let pool = matches!(kind, Kind::Pool { .. });
        let arenas = if pool { &mut inner.pools } else { &mut inner.arenas };
        let base = arenas[device as usize].alloc(size).ok_or(OUT_OF_MEMORY)?;
        let a = Allocation {
            base,
            size,
            device,
            context,
            kind,
            id: 0,
            access: AtomicU64::new(0),
            backing,
            offset: 0,
            charged,
            freed: AtomicBool::new(false),
        };
        Ok(self.insert(&mut inner, a))
    }

    pub fn device(&self, device: u32, context: usize, size: u64) -> Result<Arc<Allocation>> {
        self.in_arena(device, context, size, Kind::Device, None)
    }

    /// Allocates from a pool, whose memory is in `shared` if other processes may use it.
    pub fn pool(
        &self,
        device: u32,
        context: usize,
        size: u64,
        pool: usize,
        shared: Option<&Arc<SharedPool>>,
    ) -> Result<Arc<Allocation>> {
        let Some(shared) = shared else {
            return self.in_arena(device, context, size, Kind::Pool { pool, part: None }, None);
        };
        if size > self.config.memory {
            return Err(OUT_OF_MEMORY);
        }
        let part = shared.take(size)?;
        let backing = Backing::of_part(shared, part).inspect_err(|_| shared.give(part))?;
        let backing = backing.poisoned(self.config.poison);
        self.in_arena(device, context, size, Kind::Pool { pool, part: Some(part) }, Some(backing))
    }

    /// Maps a part of another process's pool at a free address.
    pub fn pool_part(
        &self,
        device: u32,
        context: usize,
        pool: usize,
        shared: &Arc<SharedPool>,
        part: Part,
    ) -> Result<Arc<Allocation>> {
        let backing = Backing::of_part(shared, part)?;
        let kind = Kind::Pool { pool, part: Some(part) };
        self.place(device, context, part.size, kind, backing, 0)
    }

    pub fn variable(&self, device: u32, context: usize, size: u64) -> Result<Arc<Allocation>> {
        self.in_arena(device, context, size.max(1), Kind::Variable, None)
    }

    fn on_host(
        &self,
        device: u32,
        context: usize,
        size: u64,
        kind: Kind,
        charged: u64,
    ) -> Result<Arc<Allocation>> {
        if size == 0 {
            return Err(INVALID_VALUE);
        }
        let backing = Backing::mapped(size as usize)?;
        let base = backing.ptr as u64;
        let a = Allocation {
            base,
            size,
            device,
            context,
            kind,
            id: 0,
            access: AtomicU64::new(0),
            backing,
            offset: 0,
            charged,
            freed: AtomicBool::new(false),
        };
        Ok(self.insert(&mut self.inner.lock(), a))
    }

    pub fn host(&self, device: u32, context: usize, size: u64, flags: u32) -> Result<Arc<Allocation>> {
        self.on_host(device, context, size, Kind::Host { flags }, 0)
    }

    pub fn managed(&self, device: u32, context: usize, size: u64) -> Result<Arc<Allocation>> {
        if size > self.config.memory {
            return Err(OUT_OF_MEMORY);
        }
        self.charge(device, size.next_multiple_of(SMALL))?;
        self.on_host(device, context, size, Kind::Managed, size.next_multiple_of(SMALL))
    }

    pub fn register(
        &self,
        device: u32,
        context: usize,
        at: u64,
        size: u64,
        flags: u32,
    ) -> Result<Arc<Allocation>> {
        let mut inner = self.inner.lock();
        if overlaps(&inner.map, at, size) {
            return Err(crate::errors::HOST_MEMORY_ALREADY_REGISTERED);
        }
        let backing = Arc::new(Backing::new(at as *mut u8, size as usize, Origin::Borrowed));
        let kind = Kind::Registered { flags };
        let a = Allocation {
            base: at,
            size,
            device,
            context,
            kind,
            id: 0,
            access: AtomicU64::new(0),
            backing,
            offset: 0,
            charged: 0,
            freed: AtomicBool::new(false),
        };
        Ok(self.insert(&mut inner, a))
    }

    /// Returns the allocation that holds an address.
    pub fn find(&self, addr: u64) -> Option<Arc<Allocation>> {
        let inner = self.inner.lock();
        inner.map.range(..=addr).next_back().map(|(_, a)| a).filter(|a| addr < a.end()).cloned()
    }

    /// Removes and returns the allocation at `base` if `wanted` accepts it.
    pub fn remove(&self, base: u64, wanted: impl Fn(&Allocation) -> bool) -> Option<Arc<Allocation>> {
        let mut inner = self.inner.lock();
        let a = inner.map.get(&base).filter(|a| wanted(a)).cloned()?;
        inner.map.remove(&base);
        inner.view = None;
        if matches!(a.kind, Kind::Device | Kind::Variable | Kind::Opened | Kind::Pool { .. }) {
            let inner = &mut *inner;
            if let Some(arena) = inner.arenas.iter_mut().chain(&mut inner.pools).find(|r| r.holds(base)) {
                arena.release(base, a.size);
            }
        }
        self.usage.give(self.cards[a.device as usize], a.charged);
        Some(a)
    }

    /// Removes all allocations of a context; those of pools belong to none.
    pub fn remove_context(&self, context: usize) {
        let bases: Vec<u64> = {
            let inner = self.inner.lock();
            inner
                .map
                .values()
                .filter(|a| a.context == context && !matches!(a.kind, Kind::Mapped(_) | Kind::Pool { .. }))
                .map(|a| a.base)
                .collect()
        };
        for base in bases {
            self.remove(base, |_| true);
        }
    }

    /// Returns the bytes of a range, which may span adjacent mappings but not allocations.
    pub fn pieces(&self, addr: u64, len: u64) -> Result<Vec<Piece>> {
        let end = addr.checked_add(len).ok_or(INVALID_VALUE)?;
        let inner = self.inner.lock();
        let (mut at, mut out) = (addr, Vec::new());
        while at < end || out.is_empty() {
            let a = inner
                .map
                .range(..=at)
                .next_back()
                .map(|(_, a)| a)
                .filter(|a| at < a.end())
                .ok_or(INVALID_VALUE)?;
            if !out.is_empty() && !matches!(a.kind, Kind::Mapped(_)) {
                return Err(INVALID_VALUE);
            }
            let n = (a.end() - at).min(end - at) as usize;
            // Mapped memory without access for any device is inaccessible.
            if matches!(a.kind, Kind::Mapped(_)) && a.access.load(Ordering::Relaxed) == 0 {
                return Err(INVALID_VALUE);
            }
            // SAFETY: `at` lies inside the allocation, hence inside its backing.
            let ptr = unsafe { a.host_ptr().add((at - a.base) as usize) };
            out.push(Piece { ptr, len: n, keep: a.clone() });
            at += n as u64;
            if n == 0 {
                break;
            }
        }
        Ok(out)
    }

    /// Returns `true` if a copy on a device may access the memory at an address.
    ///
    /// As on a card, mapped memory needs access for that device; a queued free takes memory away.
    pub fn copyable(&self, at: u64, device: u32) -> bool {
        let access = |a: &Allocation| a.access.load(Ordering::Relaxed) >> device & 1 == 1;
        let mapped = |a: &Allocation| matches!(a.kind, Kind::Mapped(_));
        self.find(at).is_none_or(|a| !a.freed.load(Ordering::SeqCst) && (!mapped(&a) || access(&a)))
    }

    /// Returns the memory that kernels can access now.
    pub fn view(&self) -> Arc<MemView> {
        let mut inner = self.inner.lock();
        if let Some(view) = &inner.view {
            return view.clone();
        }
        let mut view = MemView::default();
        for a in inner.map.values() {
            let devices = match a.kind {
                Kind::Mapped(_) => a.access.load(Ordering::Relaxed),
                Kind::Host { .. } | Kind::Registered { .. } | Kind::Managed => u64::MAX,
                _ => {
                    let own = 1 << a.device | a.access.load(Ordering::Relaxed);
                    inner.peers.iter().filter(|p| p.1 == a.device).fold(own, |m, p| m | (1 << p.0))
                }
            };
            view.spans.push(Span {
                start: a.base,
                end: a.end(),
                host: a.host_ptr() as usize,
                writable: true,
                devices,
            });
            view.keep.push(a.clone());
        }
        let view = Arc::new(view);
        inner.view = Some(view.clone());
        view
    }

    /// Gives further devices access to memory of a pool, or takes it; `devices` has a bit for each.
    pub fn set_pool_access(&self, of: usize, devices: u64) {
        let mut inner = self.inner.lock();
        for a in inner.map.values().filter(|a| matches!(a.kind, Kind::Pool { pool, .. } if pool == of)) {
            a.access.store(devices, Ordering::Relaxed);
        }
        inner.view = None;
    }

    pub fn set_peer(&self, from: u32, to: u32, on: bool) {
        let mut inner = self.inner.lock();
        inner.peers.retain(|p| *p != (from, to));
        if on {
            inner.peers.push((from, to));
        }
        inner.view = None;
    }

    pub fn reserve(&self, size: u64, align: u64, hint: u64) -> Result<u64> {
        let align = align.max(GRANULARITY);
        let hint =
            if self.config.ignore_address_hints || !hint.is_multiple_of(GRANULARITY) { 0 } else { hint };
        let exact = if hint == 0 {
            None
        } else {
            map(hint, size as usize, libc::PROT_NONE, libc::MAP_FIXED_NOREPLACE)
        };
        let at = match exact {
            Some(p) if p == hint => p,
            _ => {
                let raw = map(0, (size + align) as usize, libc::PROT_NONE, 0).ok_or(OUT_OF_MEMORY)?;
                raw.next_multiple_of(align)
            }
        };
        self.inner.lock().reserved.insert(at, size);
        Ok(at)
    }

    pub fn unreserve(&self, at: u64, size: u64) -> Result {
        let mut inner = self.inner.lock();
        if inner.reserved.get(&at) != Some(&size) || overlaps(&inner.map, at, size) {
            return Err(INVALID_VALUE);
        }
        inner.reserved.remove(&at);
        // SAFETY: `reserve` mapped the range, and no mapping is left in it.
        unsafe { libc::munmap(at as *mut _, size as usize) };
        Ok(())
    }

    pub fn create(
        &self,
        device: u32,
        size: u64,
        properties: [u8; 32],
        shared: bool,
    ) -> Result<Arc<Physical>> {
        if size > self.config.memory {
            return Err(OUT_OF_MEMORY);
        }
        self.charge(device, size)?;
        let made = || -> Result<(Option<File>, Arc<Backing>)> {
            if !shared {
                return Ok((None, Backing::heap(size as usize, self.config.poison)?));
            }
            let file = ipc::file()?;
            // Behind the memory, the file tells importers its card.
            let card = self.cards[device as usize].to_le_bytes();
            file.write_all_at(&card, size).map_err(|_| OUT_OF_MEMORY)?;
            let backing = Backing::of_file(&file, size as usize)?.poisoned(self.config.poison);
            Ok((Some(file), backing))
        };
        let (file, backing) = made().inspect_err(|_| self.usage.give(self.cards[device as usize], size))?;
        Ok(self.physical(device, size, properties, backing, file, true))
    }

    fn physical(
        &self,
        device: u32,
        size: u64,
        properties: [u8; 32],
        backing: Arc<Backing>,
        file: Option<File>,
        charged: bool,
    ) -> Arc<Physical> {
        Arc::new(Physical {
            device,
            card: self.cards[device as usize],
            size,
            properties,
            backing,
            file,
            charged,
            references: AtomicU64::new(1),
            usage: self.usage.clone(),
        })
    }

    /// Returns the device that a number in the machine names.
    pub fn device_of(&self, card: u32) -> Option<u32> {
        self.cards.iter().position(|known| *known == card).map(|device| device as u32)
    }

    /// Imports memory that another process created and exported; `properties` gets its device.
    pub fn import(&self, file: File, properties: impl Fn(u32) -> [u8; 32]) -> Result<Arc<Physical>> {
        let len = file.metadata().map_err(|_| UNKNOWN)?.len();
        let mut card = [0; 4];
        let size = len.saturating_sub(card.len() as u64);
        if size == 0 || !size.is_multiple_of(GRANULARITY) {
            return Err(UNKNOWN);
        }
        file.read_exact_at(&mut card, size).map_err(|_| UNKNOWN)?;
        let card = u32::from_le_bytes(card);
        let device = self.device_of(card).ok_or(UNKNOWN)?;
        let properties = properties(device);
        let backing = Backing::of_file(&file, size as usize)?;
        Ok(self.physical(device, size, properties, backing, None, false))
    }

    /// Maps memory of another process at a free address.
    pub fn open(&self, file: &File, size: u64, card: u32, context: usize) -> Result<Arc<Allocation>> {
        let device = self.device_of(card).ok_or(INVALID_VALUE)?;
        let long = file.metadata().is_ok_and(|known| known.len() >= size);
        if size == 0 || !long {
            return Err(INVALID_VALUE);
        }
        let backing = Backing::of_file(file, (size as usize).next_multiple_of(PAGE))?;
        self.place(device, context, size, Kind::Opened, backing, 0)
    }

    pub fn map(&self, at: u64, size: u64, offset: u64, physical: Arc<Physical>) -> Result {
        let mut inner = self.inner.lock();
        let inside = inner.reserved.range(..=at).next_back().is_some_and(|(b, len)| at + size <= b + len);
        let fits = offset.checked_add(size).is_some_and(|end| end <= physical.size);
        if !inside
            || !fits
            || size == 0
            || !at.is_multiple_of(GRANULARITY)
            || !size.is_multiple_of(GRANULARITY)
            || overlaps(&inner.map, at, size)
        {
            return Err(INVALID_VALUE);
        }
        let a = Allocation {
            base: at,
            size,
            device: physical.device,
            context: 0,
            id: 0,
            access: AtomicU64::new(0),
            backing: physical.backing.clone(),
            offset: offset as usize,
            charged: 0,
            freed: AtomicBool::new(false),
            kind: Kind::Mapped(physical),
        };
        self.insert(&mut inner, a);
        Ok(())
    }

    /// Returns the mappings that make up exactly `[at, at + size)`.
    fn mappings(inner: &Inner, at: u64, size: u64) -> Result<Vec<Arc<Allocation>>> {
        let (mut next, mut out) = (at, Vec::new());
        while next < at + size {
            let a =
                inner.map.get(&next).filter(|a| matches!(a.kind, Kind::Mapped(_))).ok_or(INVALID_VALUE)?;
            next = a.end();
            out.push(a.clone());
        }
        if next == at + size && size > 0 { Ok(out) } else { Err(INVALID_VALUE) }
    }

    pub fn unmap(&self, at: u64, size: u64) -> Result {
        let mut inner = self.inner.lock();
        for a in Self::mappings(&inner, at, size)? {
            inner.map.remove(&a.base);
        }
        inner.view = None;
        Ok(())
    }

    pub fn set_access(&self, at: u64, size: u64, device: u32, allowed: bool) -> Result {
        let mut inner = self.inner.lock();
        for a in Self::mappings(&inner, at, size)? {
            if allowed {
                a.access.fetch_or(1 << device, Ordering::Relaxed);
            } else {
                a.access.fetch_and(!(1 << device), Ordering::Relaxed);
            }
        }
        inner.view = None;
        Ok(())
    }
}

fn overlaps(map: &BTreeMap<u64, Arc<Allocation>>, at: u64, size: u64) -> bool {
    map.range(..at.saturating_add(size)).next_back().is_some_and(|(_, a)| a.end() > at)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn space() -> Space {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let machine = format!("mem-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let config = Config { memory: 64 << 20, machine, ..Config::default() };
        let config = Arc::new(config);
        let space = Space::new(&config, vec![0]);
        // No other process needs the file.
        let _ = std::fs::remove_file(crate::usage::path(&config));
        space
    }

    #[test]
    fn ranges_end_with_their_allocation() {
        let s = space();
        let a = s.device(0, 0, 1000).unwrap();
        assert!(s.pieces(a.base, 1000).is_ok() && s.pieces(a.base + 1, 1000).is_err());
        assert_eq!(s.device(0, 0, 65 << 20).err(), Some(OUT_OF_MEMORY));
        assert!(s.remove(a.base, |_| true).is_some() && s.find(a.base).is_none());
    }

    #[test]
    fn neighbouring_mappings_are_one_range() {
        let s = space();
        let at = s.reserve(4 * GRANULARITY, 0, 0).unwrap();
        for i in 0..2 {
            let p = s.create(0, GRANULARITY, [0; 32], i == 1).unwrap();
            s.map(at + i * GRANULARITY, GRANULARITY, 0, p).unwrap();
        }
        assert!(s.pieces(at + 100, 1).is_err());
        s.set_access(at, 2 * GRANULARITY, 0, true).unwrap();
        assert_eq!(s.pieces(at + 100, GRANULARITY).unwrap().len(), 2);
        assert!(s.unreserve(at, 4 * GRANULARITY).is_err());
        s.unmap(at, 2 * GRANULARITY).unwrap();
        s.unreserve(at, 4 * GRANULARITY).unwrap();
    }
}
