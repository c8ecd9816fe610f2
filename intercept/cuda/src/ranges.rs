//! The program's allocations by address: device memory and pinned host memory.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{PoisonError, RwLock};

use gpusession_proto::handle;

use crate::client::Client;
use crate::status::{INVALID_VALUE, Result};
use crate::{clients, managed_places};

/// Origin of an address range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// `cuMemAlloc` and similar calls, out of the window.
    Device,
    /// Another process's `cuMemAlloc`, opened here (`cuIpcOpenMemHandle`).
    Opened,
    /// The program's own mapping (`cuMemMap`), under its device's primary context.
    Mapped,
    /// A pool's memory (`cuMemAllocAsync`), with [`Client::pool_name`] of the pool.
    Pool(u64),
    /// Memory of another process's pool (`cuMemPoolImportPointer`), under its device's primary
    /// context.
    Imported,
    /// Memory of a graph's node, which exists while launches of the graph have allocated it.
    Graph,
    /// A module's variable.
    Global,
    /// Pinned host memory in the arena (`cuMemHostAlloc`), with its flags.
    Host(u32),
    /// The program's host memory, registered with these flags.
    Registered(u32),
    /// `cuMemAllocManaged`
    Managed,
    /// A module's `__managed__` variable.
    ManagedVariable,
}

impl Kind {
    /// Returns `true` if the program may touch it.
    pub fn on_host(self) -> bool {
        matches!(self, Self::Host(_) | Self::Registered(_)) || self.managed()
    }

    /// Returns `true` for managed memory.
    pub fn managed(self) -> bool {
        matches!(self, Self::Managed | Self::ManagedVariable)
    }

    /// Returns `true` if launches must look for such memory among the kernel's parameters.
    ///
    /// These are pinned memory of the arena, and with several leases managed memory, which only one
    /// of them has.
    fn named(self) -> bool {
        matches!(self, Self::Host(_)) || self.managed() && clients::several()
    }

    /// Returns `true` if kernels and copies use it as device memory.
    pub fn on_device(self) -> bool {
        !matches!(self, Self::Host(_) | Self::Registered(_))
    }
}

/// One allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    pub base: u64,
    /// Bytes that the program requested.
    pub size: u64,
    pub kind: Kind,
    /// Context that allocated it.
    pub ctx: u64,
    /// Number of the allocation, for `CU_POINTER_ATTRIBUTE_BUFFER_ID`.
    pub id: u64,
    /// Whether synchronous copies and fills wait (`CU_POINTER_ATTRIBUTE_SYNC_MEMOPS`).
    pub synchronous: bool,
    /// Of the program's own mapping: kinds of handles as which the program may export its memory,
    /// once the worker has said them.
    pub handle_types: Option<u64>,
    /// Of the program's own mapping: devices, by the worker's number, that may read and write it.
    writers: u64,
}

impl Range {
    /// Number of the client that it belongs to.
    pub fn server(&self) -> u8 {
        handle::server(self.ctx)
    }
}

static RANGES: RwLock<BTreeMap<u64, Range>> = RwLock::new(BTreeMap::new());
static NEXT_ID: AtomicU64 = AtomicU64::new(1);
/// Number of allocations that launches look for among the kernel's parameters.
static NAMED: AtomicUsize = AtomicUsize::new(0);

/// Adds an allocation to the table.
pub fn add(base: u64, size: u64, kind: Kind, ctx: u64) {
    let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
    if kind.managed() {
        managed_places::forget(base, size);
    }
    if kind.named() {
        NAMED.fetch_add(1, Ordering::Relaxed);
    }
    let mut ranges = RANGES.write().unwrap_or_else(PoisonError::into_inner);
    // Memory of graphs stays in the table until the driver uses its addresses again.
    let overlap = ranges.range(..base.saturating_add(size)).rev().take_while(|(_, r)| r.base + r.size > base);
    let stale: Vec<_> = overlap.filter(|(_, r)| r.kind == Kind::Graph).map(|(base, _)| *base).collect();
    for base in stale {
        ranges.remove(&base);
    }
    ranges.insert(
        base,
        Range { base, size, kind, ctx, id, synchronous: false, handle_types: None, writers: 0 },
    );
}

/// Returns `true` if launches must look through the kernel's parameters.
#[inline]
pub fn any_named() -> bool {
    NAMED.load(Ordering::Relaxed) != 0
}

/// Returns the allocation that contains an address.
pub fn find(address: u64) -> Option<Range> {
    let ranges = RANGES.read().unwrap_or_else(PoisonError::into_inner);
    let (_, range) = ranges.range(..=address).next_back()?;
    (address - range.base < range.size.max(1)).then_some(*range)
}

/// Returns `true` if `len` bytes from `address` are device memory of the client that work in a
/// context may read and write.
///
/// They are within one allocation, or within mappings of the program to which it has given the
/// context's device access. Memory of graphs does not count, since it may not exist now.
pub fn is_device(client: &Client, ctx: u64, address: u64, len: u64) -> bool {
    let Some(first) = find(address).filter(|r| r.kind.on_device() && r.server() == client.number) else {
        return false;
    };
    match first.kind {
        Kind::Graph => false,
        Kind::Mapped => address.checked_add(len).is_some_and(|end| {
            client.device_of(ctx).is_ok_and(|device| all_writable(client, device.local, address..end))
        }),
        _ => first.size - (address - first.base) >= len,
    }
}

/// Checks that `len` bytes from `address` stay within the allocation or the mappings there.
///
/// The driver refuses each copy and fill that begins in one and leaves it, also in pinned memory
/// (`tests/programs/hostAddresses.cu` on an H200, driver 580.159.04). The worker's driver sees
/// larger mappings, in which other allocations follow. Bytes in no allocation are the program's own
/// memory, or the server refuses them.
pub fn check(address: u64, len: u64) -> Result {
    let Some(first) = find(address).filter(|first| address.saturating_add(len) > first.base + first.size)
    else {
        return Ok(());
    };
    let end = address.checked_add(len).ok_or(INVALID_VALUE)?;
    let within = match first.kind {
        Kind::Mapped => {
            let mut at = address;
            while at < end
                && let Some(range) = find(at).filter(|range| range.kind == Kind::Mapped)
            {
                at = range.base + range.size;
            }
            at >= end
        }
        _ => false,
    };
    if within { Ok(()) } else { Err(INVALID_VALUE) }
}

/// Returns `true` if a device may read and write a part of the program's mappings.
fn all_writable(client: &Client, device: u32, part: std::ops::Range<u64>) -> bool {
    let mut at = part.start;
    while at < part.end {
        let writable =
            |r: &Range| r.kind == Kind::Mapped && r.server() == client.number && r.writers & bit(device) != 0;
        let Some(range) = find(at).filter(writable) else { return false };
        at = range.base + range.size;
    }
    true
}

fn bit(device: u32) -> u64 {
    1u64.checked_shl(device).unwrap_or(0)
}

/// Notes whether a device may read and write the program's mappings within a range.
pub fn set_writable(base: u64, size: u64, device: u32, writable: bool) {
    let end = base.saturating_add(size);
    let mut ranges = RANGES.write().unwrap_or_else(PoisonError::into_inner);
    // A mapping of which the call names a part counts as one without access.
    for range in ranges.range_mut(..end).rev().map(|(_, range)| range).take_while(|r| r.base + r.size > base)
    {
        let whole = range.base >= base && range.base + range.size <= end;
        if range.kind == Kind::Mapped && writable && whole {
            range.writers |= bit(device);
        } else {
            range.writers &= !bit(device);
        }
    }
}

/// Returns `true` for an address of managed memory.
///
/// A program may read or change its own copy of that right after a synchronous copy.
pub fn is_managed(address: u64) -> bool {
    find(address).is_some_and(|range| range.kind.managed())
}

/// Returns `true` for memory that the program has registered, by the program's own address.
pub fn is_registered(address: u64) -> bool {
    find(address).is_some_and(|range| matches!(range.kind, Kind::Registered(_)))
}

/// Returns `true` if a synchronous copy or fill of memory that it names as device memory waits for
/// its end.
///
/// The program may read or change pinned, registered and managed memory after the call, and it may
/// request the wait for other memory.
pub fn synchronizes(client: &Client, address: u64) -> bool {
    // Registered memory has its second address in the arena.
    client.host_arena.contains(&address)
        || find(address).is_some_and(|range| range.kind.on_host() || range.synchronous)
}

/// Sets whether synchronous copies and fills of the allocation that contains an address wait;
/// `false` if no allocation does.
pub fn set_synchronous(address: u64, synchronous: bool) -> bool {
    let mut ranges = RANGES.write().unwrap_or_else(PoisonError::into_inner);
    let range = ranges.range_mut(..=address).next_back().map(|(_, range)| range);
    let found = range.filter(|range| address - range.base < range.size.max(1));
    found.map(|range| range.synchronous = synchronous).is_some()
}

/// Keeps the kinds of handles of a mapping, unless it ended meanwhile.
pub fn know_handle_types(mapping: &Range, types: u64) {
    let mut ranges = RANGES.write().unwrap_or_else(PoisonError::into_inner);
    if let Some(range) = ranges.get_mut(&mapping.base).filter(|range| range.id == mapping.id) {
        range.handle_types = Some(types);
    }
}

/// Returns the client's pinned or managed memory that contains these bytes.
pub fn on_host(client: &Client, address: usize, len: usize) -> Option<Range> {
    find(address as u64).filter(|r| {
        r.kind.on_host() && r.server() == client.number && r.size - (address as u64 - r.base) >= len as u64
    })
}

/// Returns `true` if `len` bytes from `address` are pinned host memory of the client.
pub fn is_pinned(client: &Client, address: u64, len: u64) -> bool {
    find(address).is_some_and(|r| {
        matches!(r.kind, Kind::Host(_) | Kind::Registered(_))
            && r.size - (address - r.base) >= len
            && r.server() == client.number
    })
}

/// Returns `true` if an allocation overlaps the range.
pub fn overlaps(base: u64, size: u64) -> bool {
    let ranges = RANGES.read().unwrap_or_else(PoisonError::into_inner);
    ranges.range(..base.saturating_add(size)).next_back().is_some_and(|(_, r)| r.base + r.size > base)
}

/// Removes the allocation that starts at `base`, if `fits` accepts its kind, and returns it.
pub fn take(base: u64, fits: impl FnOnce(Kind) -> bool) -> Option<Range> {
    let mut ranges = RANGES.write().unwrap_or_else(PoisonError::into_inner);
    let range = *ranges.get(&base)?;
    if !fits(range.kind) {
        return None;
    }
    if range.kind.named() {
        NAMED.fetch_sub(1, Ordering::Relaxed);
    }
    ranges.remove(&base)
}

/// Removes the program's own mappings that start in a range.
pub fn unmapped(base: u64, size: u64) {
    let mut ranges = RANGES.write().unwrap_or_else(PoisonError::into_inner);
    let inside = ranges.range(base..base.saturating_add(size));
    let gone: Vec<_> = inside.filter(|(_, r)| r.kind == Kind::Mapped).map(|(base, _)| *base).collect();
    for base in gone {
        ranges.remove(&base);
    }
}

/// Gives the memory of a green context to its device's primary context, which outlives it.
pub fn adopt(green: u64, primary: u64) {
    let mut ranges = RANGES.write().unwrap_or_else(PoisonError::into_inner);
    ranges.values_mut().filter(|r| r.ctx == green).for_each(|r| r.ctx = primary);
}

/// Removes a context's memory and returns it; its pinned host memory only with `with_host`.
///
/// Memory of pools and graphs belongs to no context: `primary`, its device's primary context,
/// stands for it from now on.
pub fn forget_context(ctx: u64, primary: u64, with_host: bool) -> Vec<Range> {
    let mut ranges = RANGES.write().unwrap_or_else(PoisonError::into_inner);
    let goes = |r: &Range| {
        r.ctx == ctx
            && match r.kind {
                Kind::Device | Kind::Global | Kind::Managed => true,
                Kind::Host(_) | Kind::Registered(_) => with_host,
                // These outlive their context.
                Kind::Pool(_)
                | Kind::Graph
                | Kind::Imported
                | Kind::Opened
                | Kind::Mapped
                | Kind::ManagedVariable => false,
            }
    };
    let outlives = |r: &&mut Range| r.ctx == ctx && matches!(r.kind, Kind::Pool(_) | Kind::Graph);
    ranges.values_mut().filter(outlives).for_each(|r| r.ctx = primary);
    let gone: Vec<_> = ranges.values().filter(|r| goes(r)).copied().collect();
    for range in &gone {
        ranges.remove(&range.base);
    }
    NAMED.fetch_sub(gone.iter().filter(|r| r.kind.named()).count(), Ordering::Relaxed);
    gone
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_find_their_range() {
        add(0x5000, 0x100, Kind::Device, 1);
        assert_eq!(find(0x50ff).map(|r| r.base), Some(0x5000));
        assert_eq!(find(0x5100), None);
        assert_eq!(find(0x4fff), None);
        assert!(overlaps(0x4f00, 0x200));
        assert!(!overlaps(0x5100, 0x200));
        assert_eq!(take(0x5000, |k| k == Kind::Managed), None);
        assert!(take(0x5000, |k| k == Kind::Device).is_some());
        assert_eq!(find(0x5000), None);
    }

    #[test]
    fn bytes_beyond_an_allocation_are_refused() {
        add(0x7000, 1000, Kind::Device, 1);
        add(0x8000, 0x1000, Kind::Mapped, 1);
        add(0x9000, 0x1000, Kind::Mapped, 1);
        add(0xa000, 1000, Kind::Registered(0), 1);
        let (right, beyond) = (Ok(()), Err(INVALID_VALUE));
        assert_eq!((check(0x7000, 1000), check(0x7000, 1001), check(0x73e7, 2)), (right, beyond, beyond));
        assert_eq!((check(0x7000, u64::MAX), check(0x73e8, 1), check(0x73e7, 0)), (beyond, right, right));
        assert_eq!((check(0x8ffc, 8), check(0x8000, 0x2000), check(0x9ffc, 8)), (right, right, beyond));
        assert_eq!((check(0xa3e0, 8), check(0xa3e4, 8), check(0x9fff, 1001)), (right, beyond, beyond));
        assert_eq!(check(0x7fff, 2), right, "the driver looks at the first byte's allocation");
        take(0x7000, |_| true);
        take(0xa000, |_| true);
        unmapped(0x8000, 0x2000);
    }

    #[test]
    fn copies_need_access_to_every_mapping_that_they_touch() {
        const BASE: u64 = 0x5b5b_0000_0000;
        const STEP: u64 = 0x20_0000;
        let program = crate::fake_worker::Program::new();
        let client = program.client;
        let device = client.device_of(program.ctx).unwrap().local;
        (0..3).for_each(|i| add(BASE + i * STEP, STEP, Kind::Mapped, program.ctx));
        let sure = |from: u64, len: u64| is_device(client, program.ctx, BASE + from, len);
        assert!(!sure(0, 4), "no access yet");
        set_writable(BASE, 2 * STEP, device, true);
        assert!(sure(0, 4) && sure(0, 2 * STEP) && sure(STEP - 8, 16));
        assert!(!sure(2 * STEP - 8, 16) && !sure(2 * STEP, 4), "the third mapping has none");
        assert!(!sure(STEP, u64::MAX - 8));
        let other = client.primary(device ^ 1);
        assert!(!is_device(client, other, BASE, 4), "another device");
        set_writable(BASE + STEP, STEP / 2, device, true);
        assert!(sure(0, STEP) && !sure(STEP, 4), "a part of a mapping");
        set_writable(BASE, 3 * STEP, device, true);
        assert!(sure(0, 3 * STEP) && !sure(0, 3 * STEP + 1));
        set_writable(BASE + STEP, STEP, device, false);
        assert!(sure(0, STEP) && !sure(0, 2 * STEP) && sure(2 * STEP, STEP));
        unmapped(BASE, STEP);
        add(BASE, STEP, Kind::Mapped, program.ctx);
        assert!(!sure(0, 4), "a new mapping");
        unmapped(BASE, 3 * STEP);
    }
}
