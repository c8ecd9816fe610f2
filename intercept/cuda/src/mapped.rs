//! Host memory that the device can see.
//!
//! It is mapped pinned memory, managed memory, and host memory that a graph's copies name.
//!
//! The worker has a mirror of each region. The program's changes go up before work is launched; the
//! device's changes come back when the program synchronizes. A program and a kernel that poll the
//! same memory while both run are not supported.
//!
//! Memory that kernels can name goes up before every launch. Memory that only graphs' copies name
//! goes up before launches of those graphs, because the program promises its life only for these.

use std::collections::HashMap;
use std::io::IoSliceMut;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use gpusession_link::link::Reply;
use gpusession_proto::changes::{self, BLOCK};
use gpusession_proto::frame::{mirror, op};
use nix::errno::Errno;
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid;

use crate::client::{Client, cross_lease_error, word};
use crate::ranges::{self, Kind, Range};
use crate::status::{INVALID_VALUE, NOT_SUPPORTED, Result};
use crate::window::PAGE;
use crate::{clients, foreign_addresses, thread};

/// Way to read a region's memory.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reading {
    /// The program has promised that the memory exists.
    Promised,
    /// The program may have unmapped the memory: an unreadable part counts as unchanged.
    Guarded,
}

impl Reading {
    /// Copies memory of the program to `to`; `false` if it equals `known` or cannot be read.
    fn copy_differing(self, address: usize, known: &[u8], to: &mut [u8]) -> bool {
        if self == Self::Guarded {
            let len = to.len();
            let memory = RemoteIoVec { base: address, len };
            match process_vm_readv(Pid::this(), &mut [IoSliceMut::new(to)], &[memory]) {
                Ok(read) => return read == len && to != known,
                Err(Errno::EFAULT) => return false,
                // A sandbox forbids the call.
                Err(_) => {}
            }
        }
        // SAFETY: the memory is readable until `discard`, or while graphs that name it are
        // launched, as the program promised. The program may write to it meanwhile, as with a local
        // card.
        let now = unsafe { std::slice::from_raw_parts(address as *const u8, to.len()) };
        if now == known {
            return false;
        }
        to.copy_from_slice(now);
        true
    }
}

/// A region of host memory with a mirror in a worker.
pub struct Region {
    client: &'static Client,
    id: u64,
    base: usize,
    len: usize,
    kind: u64,
    /// The mirror's address, for kinds whose address this process chooses.
    there: u64,
    /// Whether it is ordinary memory of the program, which the program may unmap without notice.
    pageable: bool,
    device: AtomicU64,
    /// Whether kernels can name it.
    everywhere: AtomicBool,
    /// Whether the worker has the mirror.
    made: AtomicBool,
    /// The contents that the worker knows; empty once the memory is freed.
    shadow: Mutex<Vec<u8>>,
}

static REGIONS: RwLock<Vec<Arc<Region>>> = RwLock::new(Vec::new());
/// Number of regions: at zero, a launch's check is a single load.
static COUNT: AtomicUsize = AtomicUsize::new(0);
static NEXT: AtomicU64 = AtomicU64::new(1);
/// One thread at a time sends changes, so that an older state never follows a newer one.
static SENDING: Mutex<()> = Mutex::new(());

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn regions() -> Vec<Arc<Region>> {
    REGIONS.read().unwrap_or_else(PoisonError::into_inner).clone()
}

impl Region {
    fn new(
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
            shadow: Mutex::new(vec![0; len as usize]),
        }
    }

    /// Number by which the worker knows the region.
    pub fn id(&self) -> u64 {
        self.id
    }

    fn contains(&self, address: usize, len: usize) -> bool {
        address >= self.base && len <= self.len && address - self.base <= self.len - len
    }

    /// Sends the program's changes.
    fn upload(&self) -> Result {
        self.upload_part(0, self.len)
    }

    /// Sends the program's changes in the blocks of `len` bytes from an offset.
    pub fn upload_part(&self, offset: usize, len: usize) -> Result {
        self.upload_read(offset, len, Reading::Promised)
    }

    fn upload_read(&self, offset: usize, len: usize, reading: Reading) -> Result {
        let _order = lock(&SENDING);
        let mut body = Vec::new();
        let send = |body: &mut Vec<u8>| {
            self.client
                .post(op::WRITE_HOST, |w| {
                    w.word(self.id);
                    w.words(body);
                })
                .map(|_| body.clear())
        };
        let first = offset / BLOCK * BLOCK;
        for offset in (first..offset.saturating_add(len).min(self.len)).step_by(BLOCK) {
            {
                // The connection's reader takes this lock, too, so it is not held while frames are
                // sent.
                let mut shadow = lock(&self.shadow);
                if shadow.is_empty() {
                    return Ok(());
                }
                let shadow = &mut shadow[offset..(offset + BLOCK).min(self.len)];
                let mut copy = [0; BLOCK];
                let copy = &mut copy[..shadow.len()];
                if !reading.copy_differing(self.base + offset, shadow, copy) {
                    continue;
                }
                if self.kind == mirror::DEVICE {
                    changes::push(&mut body, offset as u64, copy);
                } else {
                    changes::push_differing(&mut body, offset as u64, shadow, copy);
                }
                shadow.copy_from_slice(copy);
            }
            if body.len() >= changes::FRAME {
                send(&mut body)?;
            }
        }
        if body.is_empty() { Ok(()) } else { send(&mut body) }
    }
}

/// Creates a region's mirror in its worker.
fn create(region: Region) -> Result<Arc<Region>> {
    let region = Arc::new(region);
    // Known before the reply, because the mirror's present contents arrive before it.
    REGIONS.write().unwrap_or_else(PoisonError::into_inner).push(region.clone());
    let made = region.client.ask(op::MIRROR_HOST, |w| {
        w.word(region.id);
        w.word(region.kind);
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
            Ok(region)
        }
        Err(status) => {
            drop_region(&region);
            Err(status)
        }
    }
}

fn drop_region(region: &Arc<Region>) {
    REGIONS.write().unwrap_or_else(PoisonError::into_inner).retain(|r| !Arc::ptr_eq(r, region));
    lock(&region.shadow).clear();
}

/// Returns `true` if any region exists.
#[inline]
pub fn any() -> bool {
    COUNT.load(Ordering::Relaxed) != 0
}

/// Returns `true` if pinned or managed memory has a mirror, which streams then work with.
pub fn there(client: &Client, address: usize, len: usize) -> bool {
    any() && find(client, address, len).is_some_and(|r| !r.pageable)
}

/// Serializes the creation of regions, so that no memory gets two.
static MAKING: Mutex<()> = Mutex::new(());

fn find(client: &Client, address: usize, len: usize) -> Option<Arc<Region>> {
    let regions = REGIONS.read().unwrap_or_else(PoisonError::into_inner);
    regions.iter().find(|r| r.client.number == client.number && r.contains(address, len)).cloned()
}

/// Returns the region of an allocation of pinned or registered memory; creates it at first.
fn of_pinned(client: &'static Client, range: &Range) -> Result<Arc<Region>> {
    let Range { base, size, kind, .. } = *range;
    let _making = lock(&MAKING);
    if let Some(known) = find(client, base as usize, size as usize).filter(|r| !r.pageable) {
        return Ok(known);
    }
    // With unified addressing, kernels use pinned memory of the arena by its own address.
    // Registered memory gets a second address in the arena, which both sides have reserved.
    let mut region = Region::new(client, base, size, mirror::SAME, false, false);
    if !matches!(kind, Kind::Host(_)) {
        region.there = client.window().reserve_host(base % PAGE + size)? + base % PAGE;
    }
    let there = region.there;
    // From now on copies to this memory go to the mirror first, so earlier ones must have landed.
    client.link.wait_detached(|t| t.fills(base as usize, size as usize));
    // The mirror belongs to the allocation's context, and so ends with it.
    thread::within(range.ctx, || create(region)).inspect_err(|_| give_back(client, base, there, size))
}

/// Frees the second address of registered memory in the arena.
fn give_back(client: &Client, base: u64, there: u64, size: u64) {
    if there != base {
        client.window().unreserve_host(there - base % PAGE, base % PAGE + size);
    }
}

/// Makes pinned or registered memory visible to kernels; returns the device's address for it.
pub fn map(client: &'static Client, base: u64, size: u64) -> Result<u64> {
    let range = ranges::find(base).filter(|r| r.base == base && r.size == size).ok_or(INVALID_VALUE)?;
    if range.server() != client.number {
        return Err(cross_lease_error("host memory that the device sees"));
    }
    if range.kind == Kind::Managed {
        return Ok(base);
    }
    let region = of_pinned(client, &range)?;
    region.everywhere.store(true, Ordering::Relaxed);
    Ok(region.device.load(Ordering::Relaxed))
}

/// Checks an address in a kernel's parameters, or of a copy or fill.
///
/// Pinned memory becomes mapped at its first such use.
pub fn named(client: &'static Client, address: u64) -> Result {
    if !client.host_arena.contains(&address) && !clients::several() {
        return Ok(());
    }
    match ranges::find(address) {
        Some(range) if matches!(range.kind, Kind::Host(_)) => map(client, range.base, range.size).map(|_| ()),
        Some(range) if range.kind.managed() && range.server() != client.number => {
            Err(cross_lease_error("managed memory"))
        }
        _ => Ok(()),
    }
}

/// Creates the mirror of managed memory: device memory at `base`, where this process has memory,
/// too.
pub fn map_managed(client: &'static Client, base: u64, size: u64) -> Result {
    create(Region::new(client, base, size, mirror::DEVICE, false, true)).map(|_| ())
}

/// Makes a managed variable accessible to the program at its address.
///
/// The driver chose the address, and the caller has claimed it.
pub fn map_variable(client: &'static Client, base: u64, size: u64) -> Result {
    let _making = lock(&MAKING);
    if find(client, base as usize, size as usize).is_some() {
        return Ok(());
    }
    foreign_addresses::open(base, size)?;
    // An unloaded variable may have left contents.
    // SAFETY: `open` made these pages of ours writable, and the program does not know the variable
    // yet.
    unsafe { std::ptr::write_bytes(base as *mut u8, 0, size as usize) };
    create(Region::new(client, base, size, mirror::MANAGED, false, true)).map(|_| ())
}

/// Returns the region of host memory that a graph's copy names, and the memory's offset in it.
pub fn for_graph(client: &'static Client, address: u64, len: u64) -> Result<(Arc<Region>, u64)> {
    if len == 0 || address == 0 {
        return Err(INVALID_VALUE);
    }
    // Another lease's pinned memory counts as ordinary host memory.
    let known = ranges::find(address)
        .filter(|r| r.server() == client.number && r.kind.on_host() && r.size - (address - r.base) >= len);
    let region = match known {
        Some(range) => of_pinned(client, &range)?,
        None => pageable(client, address as usize, len as usize)?,
    };
    let offset = address - region.base as u64;
    Ok((region, offset))
}

fn pageable(client: &'static Client, address: usize, len: usize) -> Result<Arc<Region>> {
    let _making = lock(&MAKING);
    reap(client)?;
    let mut overlaps = false;
    for region in regions().into_iter().filter(|r| r.client.number == client.number) {
        if region.contains(address, len) {
            return Ok(region);
        }
        overlaps |= address < region.base + region.len && region.base < address + len;
    }
    if overlaps {
        // Two mirrors of the same bytes would miss each other's changes within a graph.
        crate::trace::why("copies in graphs: overlapping parts of pageable memory; allocate it pinned");
        return Err(NOT_SUPPORTED);
    }
    create(Region::new(client, address as u64, len as u64, mirror::ANYWHERE, true, false))
}

/// Discards regions of pageable memory that no graph names any more.
fn reap(client: &Client) -> Result {
    // One reference is in `REGIONS`, one in the list that `regions` returned.
    let unnamed =
        |r: &Arc<Region>| r.client.number == client.number && r.pageable && Arc::strong_count(r) == 2;
    let dead: Vec<_> = regions().into_iter().filter(unnamed).collect();
    if dead.is_empty() || crate::streams::capturing() {
        return Ok(());
    }
    // A destroyed graph may still run.
    client.call(op::CTX_SYNC, |_| {})?;
    dead.iter().try_for_each(discard)
}

fn discard(region: &Arc<Region>) -> Result {
    let client = region.client;
    drop_region(region);
    COUNT.fetch_sub(1, Ordering::Relaxed);
    let gone = client.post(op::UNMIRROR_HOST, |w| w.word(region.id)).map(|_| ());
    give_back(client, region.base as u64, region.there, region.len as u64);
    gone
}

/// Discards the region of memory at `base` before it is freed or unregistered; the caller has
/// synchronized.
pub fn unmap(base: u64) -> Result {
    let gone: Vec<_> = regions().into_iter().filter(|r| r.base == base as usize && !r.pageable).collect();
    gone.iter().try_for_each(discard)
}

/// Sends the program's changes in memory that kernels can name; runs before work is launched.
#[inline]
pub fn upload(client: &Client) -> Result {
    if any() { upload_where(client, |r| r.everywhere.load(Ordering::Relaxed)) } else { Ok(()) }
}

/// Sends the changes that a host function may have made.
///
/// Later work may read them, and the worker compares later results with the program's contents.
/// Pageable memory may be unmapped since the last launch of the graphs that name it.
pub fn upload_after_host_function(client: &Client) -> Result {
    if !any() {
        return Ok(());
    }
    usable_regions(client).iter().try_for_each(|region| {
        let reading = if region.pageable { Reading::Guarded } else { Reading::Promised };
        region.upload_read(0, region.len, reading)
    })
}

fn upload_where(client: &Client, wanted: impl Fn(&Region) -> bool) -> Result {
    usable_regions(client).iter().filter(|r| wanted(r)).try_for_each(|region| region.upload())
}

/// Returns the regions that have a mirror in a client's worker.
fn usable_regions(client: &Client) -> Vec<Arc<Region>> {
    let mut regions = regions();
    regions.retain(|r| r.client.number == client.number && r.made.load(Ordering::Acquire));
    regions
}

/// Takes the device's changes from the worker.
pub fn changed(region: u64, offset: u64, bytes: &[u8]) {
    let Some(region) = regions().into_iter().find(|r| r.id == region) else { return };
    let mut shadow = lock(&region.shadow);
    let offset = offset as usize;
    let Some(known) = offset.checked_add(bytes.len()).and_then(|end| shadow.get_mut(offset..end)) else {
        return;
    };
    known.copy_from_slice(bytes);
    // SAFETY: the check against the shadow keeps the bytes inside the region. Its memory is
    // writable until `discard`, which takes this lock, or while the graphs that write to it run.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), (region.base + offset) as *mut u8, bytes.len()) };
}

/// Regions that graphs and executable graphs name, by handle.
static BY_GRAPH: Mutex<Option<HashMap<u64, Vec<Arc<Region>>>>> = Mutex::new(None);
/// Graph of each node that the library has returned, for changes of a node's copy.
static GRAPH_OF: Mutex<Option<HashMap<u64, u64>>> = Mutex::new(None);

/// Notes that a graph, executable or not, names these regions.
pub fn graph_names(graph: u64, named: &[Arc<Region>]) {
    if named.is_empty() {
        return;
    }
    let mut graphs = lock(&BY_GRAPH);
    let known = graphs.get_or_insert_default().entry(graph).or_default();
    for region in named {
        if !known.iter().any(|r| Arc::ptr_eq(r, region)) {
            known.push(region.clone());
        }
    }
}

/// Returns the regions that a graph names.
pub fn graph_regions(graph: u64) -> Vec<Arc<Region>> {
    lock(&BY_GRAPH).as_ref().and_then(|graphs| graphs.get(&graph).cloned()).unwrap_or_default()
}

/// Removes a destroyed graph.
pub fn forget_graph(graph: u64) {
    if let Some(graphs) = lock(&BY_GRAPH).as_mut() {
        graphs.remove(&graph);
    }
    if let Some(nodes) = lock(&GRAPH_OF).as_mut() {
        nodes.retain(|_, of| *of != graph);
    }
}

/// Notes that a node belongs to a graph.
pub fn node_of(node: u64, graph: u64) {
    lock(&GRAPH_OF).get_or_insert_default().insert(node, graph);
}

/// Returns the graph of a node.
pub fn graph_of(node: u64) -> Option<u64> {
    lock(&GRAPH_OF).as_ref().and_then(|nodes| nodes.get(&node).copied())
}

/// Sends the program's changes in memory that an executable graph's copies name.
pub fn upload_for_graph(exec: u64) -> Result {
    if !any() {
        return Ok(());
    }
    graph_regions(exec).iter().try_for_each(|region| region.upload())
}
