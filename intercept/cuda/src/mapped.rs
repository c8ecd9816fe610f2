//! Host memory that becomes a region: mapped pinned memory, managed memory, and host memory that a
//! graph's copies name.
//!
//! Memory that kernels can name goes up before every launch. Memory that only graphs' copies name
//! goes up before launches of those graphs, because the program promises its life only for these.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gpusession_link::lanes::Detached;
use gpusession_proto::frame::{mirror, op};

use crate::client::{Client, cross_lease_error};
use crate::ranges::{self, Kind, Range};
use crate::regions::{Named, Region, all, any, create, discard, find, give_back};
use crate::status::{INVALID_VALUE, NOT_SUPPORTED, OUT_OF_MEMORY, Result};
use crate::window::PAGE;
use crate::{capture, clients, foreign_addresses, thread, trace};

/// Largest host memory that gets a mirror because of a host function, in bytes.
///
/// Copies from larger memory send it later (`deferred_uploads`), or wait for the stream.
pub const PLACED: u64 = 16 << 20;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns `true` if pinned or managed memory has a mirror, which streams then work with.
pub fn there(client: &Client, address: usize, len: usize) -> bool {
    any() && find(client, address, len).is_some()
}

/// Serializes the creation of regions, so that no memory gets two.
static MAKING: Mutex<()> = Mutex::new(());

/// Returns the region of an allocation of pinned or registered memory; creates it at first.
fn of_pinned(client: &'static Client, range: &Range) -> Result<Arc<Region>> {
    let Range { base, size, kind, .. } = *range;
    let _making = lock(&MAKING);
    if let Some(known) = find(client, base as usize, size as usize) {
        return Ok(known);
    }
    // With unified addressing, kernels use pinned memory of the arena by its own address.
    // Registered memory gets a second address in the arena, which both sides have reserved.
    let there = match kind {
        Kind::Host(_) => base,
        _ => client.window().reserve_host(base % PAGE + size)? + base % PAGE,
    };
    // From now on copies to this memory go to the mirror first, so earlier ones must have landed.
    client.wait_detached(|t| t.fills(base as usize, size as usize))?;
    // The mirror belongs to the allocation's context, and so ends with it.
    let make = || {
        let mut region = Region::new(client, base, size, mirror::SAME, false, false);
        region.there = there;
        if matches!(kind, Kind::Host(_)) {
            region = region.resting();
        }
        thread::within(range.ctx, || create(region))
    };
    let made = match make() {
        // Regions that no graph names any more may use the room.
        Err(OUT_OF_MEMORY) if reap(client) => make(),
        made => made,
    };
    made.inspect_err(|_| give_back(client, base, there, size))
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
    Ok(of_pinned(client, &range)?.show())
}

/// Returns the registered memory that has this address on the device, and the program's own address
/// of the same byte.
pub fn behind(client: &Client, address: u64) -> Option<(Range, u64)> {
    if !any() || !client.host_arena.contains(&address) {
        return None;
    }
    let at = |region: &Arc<Region>| (region.there..region.there + region.len as u64).contains(&address);
    let region = all().into_iter().find(|r| r.client.number == client.number && at(r))?;
    Some((ranges::find(region.base as u64)?, address - region.there + region.base as u64))
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

/// Checks all words of a kernel's parameters as [`named`] does.
pub fn named_within(client: &'static Client, bytes: &[u8]) -> Result {
    bytes
        .chunks_exact(8)
        .try_for_each(|word| named(client, u64::from_le_bytes(word.try_into().unwrap_or_default())))
}

/// Maps the pinned memory whose addresses are among bytes on their way to the device.
///
/// A kernel may find such an address there. It need not: no failure is an error of the copy, no
/// large memory gets a mirror for it, and none that a copy under way still fills.
pub fn sent_within(client: &'static Client, bytes: &[u8]) {
    if !ranges::any_named() {
        return;
    }
    let mut tried = 0..0;
    for word in bytes.chunks_exact(8) {
        let address = u64::from_le_bytes(word.try_into().unwrap_or_default());
        if !client.host_arena.contains(&address) || tried.contains(&address) {
            continue;
        }
        let Some(range) = ranges::find(address).filter(|range| range.size <= PLACED) else { continue };
        tried = range.base..range.base + range.size;
        let filled = |copy: &Detached| copy.fills(range.base as usize, range.size as usize);
        if !client.link.down.any_of(filled) {
            let _ = named(client, address);
        }
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
pub fn for_graph(client: &'static Client, address: u64, len: u64) -> Result<(Named, u64)> {
    if len == 0 || address == 0 {
        return Err(INVALID_VALUE);
    }
    // Another lease's pinned memory counts as ordinary host memory.
    let known = ranges::find(address)
        .filter(|r| r.server() == client.number && r.kind.on_host() && r.size - (address - r.base) >= len);
    let region = match known {
        Some(range) => Named::new(of_pinned(client, &range)?),
        None => pageable(client, address as usize, len as usize)?,
    };
    let offset = address - region.base as u64;
    Ok((region, offset))
}

fn pageable(client: &'static Client, address: usize, len: usize) -> Result<Named> {
    let _making = lock(&MAKING);
    let (dead, live): (Vec<_>, Vec<_>) =
        all().into_iter().filter(|r| r.client.number == client.number).partition(|r| r.unnamed());
    if let Some(region) = live.iter().find(|r| r.contains(address, len)) {
        return Ok(Named::new(region.clone()));
    }
    if live.iter().any(|r| r.overlaps(address, len)) {
        // Two mirrors of the same bytes would miss each other's changes within a graph.
        trace::why("copies in graphs: overlapping parts of pageable memory; allocate it pinned");
        return Err(NOT_SUPPORTED);
    }
    // A program that changes nodes of a graph often returns to the same memory. A larger region
    // could overlap what another copy names.
    if let Some(region) = dead.iter().find(|r| (r.base, r.len) == (address, len)) {
        return Ok(Named::new(region.clone()));
    }
    if dead.iter().any(|r| r.overlaps(address, len)) {
        reap(client);
    } else {
        reap_if_many(client);
    }
    let make = || create(Region::new(client, address as u64, len as u64, mirror::ANYWHERE, true, false));
    match make() {
        Err(OUT_OF_MEMORY) if reap(client) => make(),
        made => made,
    }
    .map(Named::new)
}

/// Bytes of unnamed regions from which their mirrors are discarded, since a server bounds mirrors.
const MANY_BYTES: usize = 32 << 20;

/// Makes room for the mirrors of a capture's copies; during the capture that cannot be done.
pub fn before_capture(client: &Client) {
    if any() {
        let _making = lock(&MAKING);
        reap_if_many(client);
    }
}

fn reap_if_many(client: &Client) {
    let unnamed = |r: &&Arc<Region>| r.client.number == client.number && r.unnamed();
    if all().iter().filter(unnamed).map(|r| r.len).sum::<usize>() > MANY_BYTES {
        reap(client);
    }
}

/// Discards regions of pageable memory that no graph names any more; `true` if there were any.
///
/// The caller holds [`MAKING`]. A capture, or an error of any context, leaves them.
fn reap(client: &Client) -> bool {
    let dead: Vec<_> =
        all().into_iter().filter(|r| r.client.number == client.number && r.unnamed()).collect();
    if dead.is_empty() || capture::capturing() {
        return false;
    }
    // A destroyed graph may still run, in any context.
    let wait = |ctx| thread::within(ctx, || client.call(op::CTX_SYNC, |_| {})).map(drop);
    client.contexts().into_iter().try_for_each(wait).is_ok() && dead.iter().try_for_each(discard).is_ok()
}

/// Discards the region of memory at `base` before it is freed or unregistered; the caller has
/// synchronized.
pub fn unmap(base: u64) -> Result {
    let gone: Vec<_> = all().into_iter().filter(|r| r.base == base as usize && !r.pageable).collect();
    gone.iter().try_for_each(discard)
}
