//! Device addresses.
//!
//! The process reserves a window of its own address space, and the worker reserves the same
//! addresses on the device. The process chooses the address of each allocation. So a device pointer
//! means the same on both sides and is never also a host pointer. Small allocations share slabs of
//! 2 MiB; large ones are whole granules.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;

use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use crate::status::{INVALID_VALUE, OUT_OF_MEMORY, Result};

/// Bytes of the window for device memory.
pub const DEVICE_WINDOW: u64 = 8 << 40;
/// Bytes of the arena for pinned host memory, right behind the window.
const HOST_ARENA: u64 = 1 << 40;
/// Granularity of host memory, in bytes.
pub const PAGE: u64 = 4096;
/// Granularity of device memory, in bytes.
pub const GRANULE: u64 = 2 << 20;
/// Largest allocation that goes into a slab, in bytes.
const MAX_SLAB_BYTES: u64 = 1 << 20;
/// Alignment of `cuMemAlloc`, in bytes.
const ALIGN: u64 = 512;

/// Returns the possible bases of a window: addresses that Linux gives to programs only on request.
fn candidates() -> impl Iterator<Item = u64> {
    (0..8u64).map(|i| 0x2000_0000_0000 + i * 0x0a00_0000_0000)
}

/// Reserves addresses of this process without memory; `false` if the range has a mapping already.
pub fn reserve(base: u64, len: u64) -> bool {
    let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE | MapFlags::MAP_FIXED_NOREPLACE;
    let (Some(hint), Some(len)) = (NonZeroUsize::new(base as usize), NonZeroUsize::new(len as usize)) else {
        return false;
    };
    // SAFETY: MAP_FIXED_NOREPLACE never replaces a mapping of the program, and no pointer into the
    // new mapping exists.
    let Ok(mapped) = (unsafe { mmap_anonymous(Some(hint), len, ProtFlags::PROT_NONE, flags) }) else {
        return false;
    };
    let there = mapped.as_ptr() as u64 == base;
    if !there {
        // A kernel before 4.17 takes the address only as a hint.
        // SAFETY: the mapping is the one made above, and no pointer into it exists.
        let _ = unsafe { munmap(mapped, len.get()) };
    }
    there
}

/// Reserves free windows and returns their bases, at most `count`.
pub fn offer(count: usize) -> Vec<u64> {
    candidates().filter(|base| reserve(*base, DEVICE_WINDOW + HOST_ARENA)).take(count).collect()
}

/// Releases a window, such as one that the worker did not take.
pub fn withdraw(base: u64) {
    if let Some(pointer) = std::ptr::NonNull::new(base as *mut _) {
        // SAFETY: `offer` reserved this range; the window is unused, or its client is closed.
        let _ = unsafe { munmap(pointer, (DEVICE_WINDOW + HOST_ARENA) as usize) };
    }
}

/// Returns the arena for pinned memory that belongs to the window at `base`.
pub fn host_arena(base: u64) -> std::ops::Range<u64> {
    base + DEVICE_WINDOW..base + DEVICE_WINDOW + HOST_ARENA
}

/// Replaces a part of a reserved window by accessible memory, or again by an empty reservation.
fn remap(address: u64, len: u64, usable: bool) -> Result {
    let fixed = MapFlags::MAP_PRIVATE | MapFlags::MAP_FIXED;
    let (prot, flags) = match usable {
        true => (ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, fixed),
        false => (ProtFlags::PROT_NONE, fixed | MapFlags::MAP_NORESERVE),
    };
    let (Some(hint), Some(length)) = (NonZeroUsize::new(address as usize), NonZeroUsize::new(len as usize))
    else {
        return Err(OUT_OF_MEMORY);
    };
    // SAFETY: the range is part of our own reservation; it is unused, or its owner has freed it.
    unsafe { mmap_anonymous(Some(hint), length, prot, flags) }.map(|_| ()).map_err(|_| OUT_OF_MEMORY)
}

/// Maps ordinary memory at managed memory's address, so that the program can access it.
pub fn open(address: u64, size: u64) -> Result {
    remap(address, size.next_multiple_of(GRANULE), true)
}

/// Replaces the memory of [`open`] by an empty reservation.
pub fn close(address: u64, size: u64) {
    // On failure the memory stays until `open` replaces it.
    let _ = remap(address, size.next_multiple_of(GRANULE), false);
}

/// Free parts of an address range, first fit.
struct Free {
    ranges: BTreeMap<u64, u64>,
}

impl Free {
    fn new(base: u64, len: u64) -> Self {
        Self { ranges: BTreeMap::from([(base, len)]) }
    }

    fn take(&mut self, len: u64, align: u64) -> Option<u64> {
        let (base, start, size) = self.ranges.iter().find_map(|(&base, &size)| {
            let start = base.next_multiple_of(align);
            (size >= start - base && size - (start - base) >= len).then_some((base, start, size))
        })?;
        self.ranges.remove(&base);
        if start > base {
            self.ranges.insert(base, start - base);
        }
        if base + size > start + len {
            self.ranges.insert(start + len, base + size - start - len);
        }
        Some(start)
    }

    fn give(&mut self, mut base: u64, mut len: u64) {
        if let Some((&before, &size)) = self.ranges.range(..base).next_back()
            && before + size == base
        {
            self.ranges.remove(&before);
            (base, len) = (before, size + len);
        }
        if let Some(size) = self.ranges.remove(&(base + len)) {
            len += size;
        }
        self.ranges.insert(base, len);
    }

    fn whole(&self, base: u64, len: u64) -> bool {
        self.ranges.get(&base) == Some(&len)
    }

    fn bytes(&self) -> u64 {
        self.ranges.values().sum()
    }
}

/// A granule for small allocations of one context.
struct Slab {
    owner: u64,
    free: Free,
}

/// Next step of an allocation.
pub enum Step {
    /// The address is in an existing slab: no request to the worker.
    Ready(u64),
    /// The worker must map this range. Then a large allocation is at the address; for a slab the
    /// caller allocates again.
    Map {
        address: u64,
        /// In bytes, whole granules.
        size: u64,
        /// Whether the range becomes a slab.
        slab: bool,
    },
}

/// Allocator of the addresses of one window.
pub struct Window {
    device: Free,
    host: Free,
    slabs: BTreeMap<u64, Slab>,
    sizes: BTreeMap<u64, u64>,
    /// Sizes of the program's own reservations, by address.
    reserved: BTreeMap<u64, u64>,
}

impl Window {
    /// Creates the allocator of the window at `base`, which both sides have reserved.
    pub fn new(base: u64) -> Self {
        Self {
            device: Free::new(base, DEVICE_WINDOW),
            host: Free::new(base + DEVICE_WINDOW, HOST_ARENA),
            slabs: BTreeMap::new(),
            sizes: BTreeMap::new(),
            reserved: BTreeMap::new(),
        }
    }

    /// Returns the next step of an allocation for `owner` (a context).
    pub fn allocate(&mut self, owner: u64, size: u64) -> Result<Step> {
        if size == 0 {
            return Err(INVALID_VALUE);
        }
        if size <= MAX_SLAB_BYTES {
            let len = size.next_multiple_of(ALIGN);
            let found = self
                .slabs
                .values_mut()
                .filter(|slab| slab.owner == owner)
                .find_map(|s| s.free.take(len, ALIGN));
            if let Some(address) = found {
                self.sizes.insert(address, len);
                return Ok(Step::Ready(address));
            }
            let address = self.device.take(GRANULE, GRANULE).ok_or(OUT_OF_MEMORY)?;
            return Ok(Step::Map { address, size: GRANULE, slab: true });
        }
        let (address, size) = self.allocate_whole(size)?;
        Ok(Step::Map { address, size, slab: false })
    }

    /// Takes whole granules, which the worker must map; returns address and size.
    pub fn allocate_whole(&mut self, size: u64) -> Result<(u64, u64)> {
        let len = size.checked_next_multiple_of(GRANULE).filter(|len| *len > 0).ok_or(OUT_OF_MEMORY)?;
        let address = self.device.take(len, GRANULE).ok_or(OUT_OF_MEMORY)?;
        Ok((address, len))
    }

    /// Notes that the worker has mapped the range that `allocate` requested.
    pub fn mapped(&mut self, owner: u64, address: u64, size: u64, slab: bool) {
        if slab {
            self.slabs.insert(address, Slab { owner, free: Free::new(address, size) });
        } else {
            self.sizes.insert(address, size);
        }
    }

    /// Frees a range that the worker could not map.
    pub fn refused(&mut self, address: u64, size: u64) {
        self.device.give(address, size);
    }

    /// Frees an allocation that shares its granules with no other one.
    ///
    /// Returns the range that the worker must unmap before `unmapped`; `None`, without a change, if
    /// there are others.
    pub fn free_alone(&mut self, address: u64) -> Result<Option<(u64, u64)>> {
        let len = *self.sizes.get(&address).ok_or(INVALID_VALUE)?;
        let slab = self.slabs.range(..=address).next_back().filter(|(base, _)| address - **base < GRANULE);
        match slab {
            Some((_, slab)) if slab.free.bytes() + len < GRANULE => Ok(None),
            _ => self.free(address),
        }
    }

    /// Frees an allocation; returns the range that the worker must unmap before `unmapped`, if any.
    ///
    /// Without such a range the address is free at once, so the caller must have synchronized.
    pub fn free(&mut self, address: u64) -> Result<Option<(u64, u64)>> {
        let len = self.sizes.remove(&address).ok_or(INVALID_VALUE)?;
        if let Some((&base, slab)) = self.slabs.range_mut(..=address).next_back()
            && address - base < GRANULE
        {
            slab.free.give(address, len);
            if slab.free.whole(base, GRANULE) {
                self.slabs.remove(&base);
                return Ok(Some((base, GRANULE)));
            }
            return Ok(None);
        }
        Ok(Some((address, len)))
    }

    /// Frees a range after the worker has unmapped it.
    pub fn unmapped(&mut self, address: u64, size: u64) {
        self.device.give(address, size);
    }

    /// Reserves addresses for the program's own mappings (`cuMemAddressReserve`).
    pub fn reserve(&mut self, size: u64, align: u64) -> Result<u64> {
        if size == 0 || !size.is_multiple_of(GRANULE) || (align != 0 && !align.is_power_of_two()) {
            return Err(INVALID_VALUE);
        }
        let address = self.device.take(size, align.max(GRANULE)).ok_or(OUT_OF_MEMORY)?;
        self.reserved.insert(address, size);
        Ok(address)
    }

    /// Releases a reservation of `reserve`.
    pub fn unreserve(&mut self, address: u64, size: u64) -> Result {
        if self.reserved.get(&address) != Some(&size) {
            return Err(INVALID_VALUE);
        }
        self.reserved.remove(&address);
        self.device.give(address, size);
        Ok(())
    }

    /// Takes whole pages of the arena, without memory.
    pub fn reserve_host(&mut self, size: u64) -> Result<u64> {
        let len = size.checked_next_multiple_of(PAGE).ok_or(OUT_OF_MEMORY)?;
        self.host.take(len, PAGE).ok_or(OUT_OF_MEMORY)
    }

    /// Releases pages of `reserve_host`.
    pub fn unreserve_host(&mut self, address: u64, size: u64) {
        self.host.give(address, size.next_multiple_of(PAGE));
    }

    /// Allocates host memory in the arena.
    pub fn allocate_host(&mut self, size: u64) -> Result<u64> {
        let address = self.reserve_host(size)?;
        let usable = remap(address, size.next_multiple_of(PAGE), true);
        usable.inspect_err(|_| self.unreserve_host(address, size)).map(|()| address)
    }

    /// Frees host memory of `allocate_host`.
    pub fn free_host(&mut self, address: u64, size: u64) {
        let _ = remap(address, size.next_multiple_of(PAGE), false);
        self.unreserve_host(address, size);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: u64 = 0x2000_0000_0000;

    fn allocate(window: &mut Window, owner: u64, size: u64) -> u64 {
        loop {
            match window.allocate(owner, size).unwrap() {
                Step::Ready(address) => return address,
                Step::Map { address, size, slab } => {
                    window.mapped(owner, address, size, slab);
                    if !slab {
                        return address;
                    }
                }
            }
        }
    }

    #[test]
    fn small_allocations_share_a_slab_and_large_ones_do_not() {
        let mut w = Window::new(BASE);
        let (a, b) = (allocate(&mut w, 1, 100), allocate(&mut w, 1, 513));
        assert_eq!((a, b), (BASE, BASE + 512));
        let c = allocate(&mut w, 2, 100);
        assert_eq!(c, BASE + GRANULE, "another context gets a slab of its own");
        let d = allocate(&mut w, 1, 3 << 20);
        assert!(d.is_multiple_of(GRANULE));
        assert_eq!(w.free(a), Ok(None));
        assert_eq!(w.free(b), Ok(Some((BASE, GRANULE))), "an empty slab goes back");
        assert_eq!(w.free(b), Err(INVALID_VALUE), "freed twice");
        assert_eq!(w.free(d), Ok(Some((d, 4 << 20))));
    }

    #[test]
    fn allocation_alone_in_its_granules_is_freed_without_a_wait_before() {
        let mut w = Window::new(BASE);
        let (a, b) = (allocate(&mut w, 1, 100), allocate(&mut w, 1, 513));
        let c = allocate(&mut w, 1, 3 << 20);
        assert_eq!(w.free_alone(a), Ok(None), "the slab has another one");
        assert_eq!(w.free(a), Ok(None), "it was not freed before");
        assert_eq!(w.free_alone(b), Ok(Some((BASE, GRANULE))));
        assert_ne!(allocate(&mut w, 1, 100), BASE, "the worker has still to unmap it");
        assert_eq!(w.free_alone(b), Err(INVALID_VALUE), "freed twice");
        assert_eq!(w.free_alone(c), Ok(Some((c, 4 << 20))));
    }

    #[test]
    fn free_ranges_merge() {
        let mut free = Free::new(0, 1 << 20);
        let parts: Vec<u64> = (0..16).map(|_| free.take(1 << 16, 512).unwrap()).collect();
        assert_eq!(free.take(1, 1), None);
        for i in [3, 1, 2, 0, 15, 7, 8, 9, 4, 6, 5, 10, 14, 12, 13, 11] {
            free.give(parts[i], 1 << 16);
        }
        assert!(free.whole(0, 1 << 20));
    }
}
