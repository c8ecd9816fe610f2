//! Host memory that the device can see: mapped pinned memory, managed memory, and host memory that a graph's copies name. The
//! worker has a mirror of each region; what the program has changed goes up before work is launched, what the device has
//! changed comes back when the program synchronises. A program and a kernel that poll the same memory while both run are not
//! supported.
//!
//! Memory that kernels can name goes up before every launch. Memory that only graphs' copies name goes up before launches of
//! those graphs: nobody else promises that it still exists.

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

use crate::client::{Client, word};
use crate::entry::{INVALID_VALUE, NOT_SUPPORTED, Result};
use crate::ranges::{self, Kind, Range};
use crate::window::PAGE;
use crate::{claims, clients, thread};

/// How a region's memory is read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reading {
    /// The program has promised that it exists.
    Promised,
    /// The program may have unmapped it: what cannot be read has not changed.
    Guarded,
}

impl Reading {
    /// Copies memory of the program that differs from what is known of it; `false` if it does not, or cannot be read.
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
        // SAFETY: the memory lives until `discard`, or as long as the graphs that are launched with it. The program may
        // write to it meanwhile, as on a local card.
        let now = unsafe { std::slice::from_raw_parts(address as *const u8, to.len()) };
        if now == known {
            return false;
        }
        to.copy_from_slice(now);
        true
    }
}

/// One region.
pub struct Region {
    client: &'static Client,
    id: u64,
    base: usize,
    len: usize,
    kind: u64,
    /// Where the worker has it, if that is said here.
    there: u64,
    /// The program's own memory, which is not registered: it lives as long as its program says, unknown to us.
    pageable: bool,
    device: AtomicU64,
    /// Kernels can name it.
    everywhere: AtomicBool,
    /// The worker has it.
    made: AtomicBool,
    /// What the worker knows; empty once the memory is gone.
    shadow: Mutex<Vec<u8>>,
}

static REGIONS: RwLock<Vec<Arc<Region>>> = RwLock::new(Vec::new());
/// While there is none, launches pay one load.
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

    /// Its number, by which the worker knows it.
    pub fn id(&self) -> u64 {
        self.id
    }

    fn contains(&self, address: usize, len: usize) -> bool {
        address >= self.base && len <= self.len && address - self.base <= self.len - len
    }

    /// Sends what the program has changed.
    fn upload(&self) -> Result {
        self.upload_part(0, self.len)
    }

    /// The same for `len` bytes from an offset.
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
                // The reader of the connection takes this lock too: it is not held while frames are sent.
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

/// Makes a region known to its worker.
fn create(region: Region) -> Result<Arc<Region>> {
    let region = Arc::new(region);
    // Known before the worker answers: what the memory holds there already comes before the answer.
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

/// Whether there is any such memory.
#[inline]
pub fn any() -> bool {
    COUNT.load(Ordering::Relaxed) != 0
}

/// Whether the server has a copy of this pinned or managed memory, so that it is the one that streams work with.
pub fn there(client: &Client, address: usize, len: usize) -> bool {
    any() && find(client, address, len).is_some_and(|r| !r.pageable)
}

/// Serialises the making of regions, so that none is made twice.
static MAKING: Mutex<()> = Mutex::new(());

fn find(client: &Client, address: usize, len: usize) -> Option<Arc<Region>> {
    let regions = REGIONS.read().unwrap_or_else(PoisonError::into_inner);
    regions.iter().find(|r| r.client.number == client.number && r.contains(address, len)).cloned()
}

/// The region of an allocation of pinned or registered memory.
fn of_pinned(client: &'static Client, range: &Range) -> Result<Arc<Region>> {
    let Range { base, size, kind, .. } = *range;
    let _making = lock(&MAKING);
    if let Some(known) = find(client, base as usize, size as usize).filter(|r| !r.pageable) {
        return Ok(known);
    }
    // With unified addressing kernels use pinned memory of ours by its own address. The program's own memory gets one in the arena
    // for it, where neither side has anything else.
    let mut region = Region::new(client, base, size, mirror::SAME, false, false);
    if !matches!(kind, Kind::Host(_)) {
        region.there = client.window().reserve_host(base % PAGE + size)? + base % PAGE;
    }
    let there = region.there;
    // What copies bring to the program's memory from now on goes to the server's first.
    client.link.settle(|t| t.fills(base as usize, size as usize));
    // It lives as long there as here.
    thread::within(range.ctx, || create(region)).inspect_err(|_| give_back(client, base, there, size))
}

/// Addresses that memory of the program's own had in the arena.
fn give_back(client: &Client, base: u64, there: u64, size: u64) {
    if there != base {
        client.window().unreserve_host(there - base % PAGE, base % PAGE + size);
    }
}

/// Makes an allocation of pinned or registered memory visible to kernels; returns the device's address for it.
pub fn map(client: &'static Client, base: u64, size: u64) -> Result<u64> {
    let range = ranges::find(base).filter(|r| r.base == base && r.size == size).ok_or(INVALID_VALUE)?;
    if range.server() != client.number {
        return Err(clients::apart("host memory that the device sees"));
    }
    if range.kind == Kind::Managed {
        return Ok(base);
    }
    let region = of_pinned(client, &range)?;
    region.everywhere.store(true, Ordering::Relaxed);
    Ok(region.device.load(Ordering::Relaxed))
}

/// An address among a kernel's parameters, or that a copy or fill takes for the device's: pinned memory counts as mapped from
/// its first use on.
pub fn named(client: &'static Client, address: u64) -> Result {
    if !client.host_arena.contains(&address) && !clients::several() {
        return Ok(());
    }
    match ranges::find(address) {
        Some(range) if matches!(range.kind, Kind::Host(_)) => map(client, range.base, range.size).map(|_| ()),
        Some(range) if range.kind.managed() && range.server() != client.number => {
            Err(clients::apart("managed memory"))
        }
        _ => Ok(()),
    }
}

/// Makes managed memory of a program: device memory at `base`, which this process has mapped there too.
pub fn map_managed(client: &'static Client, base: u64, size: u64) -> Result {
    create(Region::new(client, base, size, mirror::DEVICE, false, true)).map(|_| ())
}

/// Makes a managed variable, which the driver has put at an address of its own choice (claimed by the caller), accessible to
/// the program there.
pub fn map_variable(client: &'static Client, base: u64, size: u64) -> Result {
    let _making = lock(&MAKING);
    if find(client, base as usize, size as usize).is_some() {
        return Ok(());
    }
    claims::open(base, size)?;
    // An unloaded variable may have left something.
    // SAFETY: pages of ours; the program has not been told of the variable yet.
    unsafe { std::ptr::write_bytes(base as *mut u8, 0, size as usize) };
    create(Region::new(client, base, size, mirror::MANAGED, false, true)).map(|_| ())
}

/// The region that a graph's copy means by `len` bytes of host memory from `address`, and where in it they are.
pub fn for_graph(client: &'static Client, address: u64, len: u64) -> Result<(Arc<Region>, u64)> {
    if len == 0 || address == 0 {
        return Err(INVALID_VALUE);
    }
    // Another lease's pinned memory is host memory like any other here.
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
        // Two mirrors of the same bytes would each miss what happens to the other within a graph.
        crate::trace::why("copies of graphs name overlapping parts of pageable memory: allocate it pinned");
        return Err(NOT_SUPPORTED);
    }
    create(Region::new(client, address as u64, len as u64, mirror::ANYWHERE, true, false))
}

/// Gives up regions of pageable memory that no graph names any more.
fn reap(client: &Client) -> Result {
    // One reference is in `regions`, one in the list that this looks at.
    let unnamed =
        |r: &Arc<Region>| r.client.number == client.number && r.pageable && Arc::strong_count(r) == 2;
    let dead: Vec<_> = regions().into_iter().filter(unnamed).collect();
    if dead.is_empty() || crate::streams::capturing() {
        return Ok(());
    }
    // A graph that is gone may still run.
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

/// The memory that starts at `base` is about to be freed or unregistered; the caller has synchronised.
pub fn unmap(base: u64) -> Result {
    let gone: Vec<_> = regions().into_iter().filter(|r| r.base == base as usize && !r.pageable).collect();
    gone.iter().try_for_each(discard)
}

/// Sends what the program has changed in memory that kernels can name. Call before work is launched.
#[inline]
pub fn upload(client: &Client) -> Result {
    if any() { upload_where(client, |r| r.everywhere.load(Ordering::Relaxed)) } else { Ok(()) }
}

/// Sends what a host function has changed: work behind it may read that, and the worker compares what work behind it writes
/// with what the program has. Pageable memory may be gone since the last launch of the graphs that name it.
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

/// Regions that the worker of a client has.
fn usable_regions(client: &Client) -> Vec<Arc<Region>> {
    let mut regions = regions();
    regions.retain(|r| r.client.number == client.number && r.made.load(Ordering::Acquire));
    regions
}

/// The worker says what the device has changed.
pub fn changed(region: u64, offset: u64, bytes: &[u8]) {
    let Some(region) = regions().into_iter().find(|r| r.id == region) else { return };
    let mut shadow = lock(&region.shadow);
    let offset = offset as usize;
    let Some(known) = offset.checked_add(bytes.len()).and_then(|end| shadow.get_mut(offset..end)) else {
        return;
    };
    known.copy_from_slice(bytes);
    // SAFETY: inside memory that lives until `discard`, which takes this lock, or as long as the graphs that wrote to it run.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), (region.base + offset) as *mut u8, bytes.len()) };
}

/// Regions that graphs and executable graphs name, by handle.
static BY_GRAPH: Mutex<Option<HashMap<u64, Vec<Arc<Region>>>>> = Mutex::new(None);
/// Graphs of nodes that were made or told, for nodes whose copy is changed.
static GRAPH_OF: Mutex<Option<HashMap<u64, u64>>> = Mutex::new(None);

/// A graph, executable or not, names these regions from now on.
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

/// What a graph names.
pub fn graph_regions(graph: u64) -> Vec<Arc<Region>> {
    lock(&BY_GRAPH).as_ref().and_then(|graphs| graphs.get(&graph).cloned()).unwrap_or_default()
}

/// A graph is gone.
pub fn forget_graph(graph: u64) {
    if let Some(graphs) = lock(&BY_GRAPH).as_mut() {
        graphs.remove(&graph);
    }
    if let Some(nodes) = lock(&GRAPH_OF).as_mut() {
        nodes.retain(|_, of| *of != graph);
    }
}

/// A node belongs to a graph.
pub fn node_of(node: u64, graph: u64) {
    lock(&GRAPH_OF).get_or_insert_default().insert(node, graph);
}

/// The graph of a node.
pub fn graph_of(node: u64) -> Option<u64> {
    lock(&GRAPH_OF).as_ref().and_then(|nodes| nodes.get(&node).copied())
}

/// Sends what the program has changed in memory that this executable graph's copies name.
pub fn upload_for_graph(exec: u64) -> Result {
    if !any() {
        return Ok(());
    }
    graph_regions(exec).iter().try_for_each(|region| region.upload())
}
