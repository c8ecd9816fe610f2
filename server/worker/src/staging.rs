//! Pinned memory of the worker for data on its way to and from the device.

use std::num::NonZeroUsize;
use std::ptr::NonNull;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use crate::contexts::Contexts;
use crate::driver::{Driver, Handle, Status, check, status, unless_broken};

/// `CU_MEMHOSTREGISTER_PORTABLE`: pinned for every context.
const PORTABLE: u32 = 1;
/// `CU_EVENT_DISABLE_TIMING`
const NO_TIMING: u32 = 2;

/// Equal slots of pinned memory, each with an event that tells when the device is done with it.
pub struct Slots {
    /// Length of a slot, in bytes.
    size: usize,
    /// Memory of this process, never unmapped: a context's end would free the driver's own.
    blocks: Mutex<Vec<Block>>,
    free: Mutex<Vec<Slot>>,
    changed: Condvar,
}

/// Adjacent slots that are pinned together.
struct Block {
    memory: NonNull<std::ffi::c_void>,
    slots: usize,
}

/// One slot; given back with [`Slots::give`].
pub struct Slot {
    /// First byte of the slot's pinned memory.
    pub address: *mut u8,
    /// Event recorded after the device work that uses the slot, or null (see [`Slot::enter`]).
    pub event: Handle,
    /// Context of that event; 0 if null.
    pub ctx: u64,
    /// Context, its resets at the time, and event: an event belongs to one context.
    events: Vec<(u64, u64, Handle)>,
}

impl Slot {
    /// Chooses the event for work in the context `ctx`, which is current.
    pub fn enter(&mut self, driver: &Driver, contexts: &Contexts, ctx: u64) -> Result<(), Status> {
        let resets = contexts.resets(ctx);
        self.event = match self.events.iter().find(|(known, when, _)| *known == ctx && *when == resets) {
            Some((_, _, event)) => *event,
            None => {
                let event = new_event(driver)?;
                self.events.retain(|(known, _, _)| *known != ctx);
                self.events.push((ctx, resets, event));
                event
            }
        };
        self.ctx = ctx;
        Ok(())
    }

    /// Forgets the event, which has happened.
    pub fn rest(&mut self) {
        (self.event, self.ctx) = (std::ptr::null_mut(), 0);
    }
}

// SAFETY: the pinned memory and the event belong to the owner of the slot, in any thread.
unsafe impl Send for Slot {}
// SAFETY: only slots and the driver reach the mapping.
unsafe impl Send for Slots {}
// SAFETY: as above.
unsafe impl Sync for Slots {}

impl Slots {
    /// Allocates and pins `count` slots of `size` bytes (see [`Slots::pin`]).
    pub fn new(driver: &Driver, count: usize, size: usize) -> Result<Self, Status> {
        let slots = Self { size, blocks: Mutex::default(), free: Mutex::default(), changed: Condvar::new() };
        slots.add(driver, count)?;
        Ok(slots)
    }

    /// Adds slots, as many as there are, so that there are at most `most`; `false` if none can be
    /// added.
    pub fn grow(&self, driver: &Driver, most: usize) -> bool {
        let count = self.count();
        let more = count.min(most.saturating_sub(count));
        more > 0 && self.add(driver, more).is_ok()
    }

    fn add(&self, driver: &Driver, count: usize) -> Result<(), Status> {
        let len = count.checked_mul(self.size).and_then(NonZeroUsize::new).ok_or(status::INVALID_VALUE)?;
        // SAFETY: a new mapping, unmapped below only if no slot refers to it.
        let memory = unsafe {
            mmap_anonymous(None, len, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, MapFlags::MAP_PRIVATE)
        }
        .map_err(|_| status::OUT_OF_MEMORY)?;
        let block = Block { memory, slots: count };
        // Behind a fault nothing can be pinned, while the connection's other transfers continue.
        if let Err(status) = unless_broken(self.pin_block(driver, &block)) {
            // SAFETY: the mapping above, which nothing uses.
            let _ = unsafe { munmap(memory, len.get()) };
            return Err(status);
        }
        let slot = |i| Slot {
            // SAFETY: inside the mapping.
            address: unsafe { memory.as_ptr().cast::<u8>().add(i * self.size) },
            event: std::ptr::null_mut(),
            ctx: 0,
            events: Vec::new(),
        };
        lock(&self.blocks).push(block);
        lock(&self.free).extend((0..count).map(slot));
        self.changed.notify_all();
        Ok(())
    }

    /// Pins the memory for every context, as long as the current context lives.
    ///
    /// Memory that is not pinned works, too, but slowly.
    pub fn pin(&self, driver: &Driver) -> Result<(), Status> {
        lock(&self.blocks).iter().try_for_each(|block| self.pin_block(driver, block))
    }

    fn pin_block(&self, driver: &Driver, block: &Block) -> Result<(), Status> {
        let (memory, len) = (block.memory.as_ptr(), block.slots * self.size);
        // SAFETY: a mapping of this process, which stays while it is pinned.
        check(unsafe { (driver.call.cuMemHostRegister_v2)(memory, len, PORTABLE) })
    }

    /// Returns the number of slots, free or not.
    pub fn count(&self) -> usize {
        lock(&self.blocks).iter().map(|block| block.slots).sum()
    }

    /// Returns the number of free slots.
    pub fn free(&self) -> usize {
        lock(&self.free).len()
    }

    /// Takes a slot and leaves `rest` free ones; waits for it at most for `patience`.
    pub fn take_within(&self, patience: Duration, rest: usize) -> Option<Slot> {
        let none = |free: &mut Vec<Slot>| free.len() <= rest;
        let waited = self.changed.wait_timeout_while(lock(&self.free), patience, none);
        let mut free = waited.unwrap_or_else(PoisonError::into_inner).0;
        if free.len() > rest { free.pop() } else { None }
    }

    /// Takes a slot if one is free.
    pub fn try_take(&self) -> Option<Slot> {
        lock(&self.free).pop()
    }

    /// Returns a slot to the free ones.
    pub fn give(&self, mut slot: Slot) {
        slot.rest();
        lock(&self.free).push(slot);
        // Not all waiting threads may take the last ones.
        self.changed.notify_all();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Creates an event without timing in the current context.
fn new_event(driver: &Driver) -> Result<Handle, Status> {
    let mut event = std::ptr::null_mut();
    // SAFETY: the out pointer is valid.
    check(unsafe { (driver.call.cuEventCreate)(&mut event, NO_TIMING) })?;
    Ok(event)
}

#[cfg(test)]
mod tests {
    use gpusession_proto::handle::make;

    use super::*;
    use crate::driver::fake;
    use crate::handles::kind;

    #[test]
    fn slots_share_no_byte() {
        let slots = Slots::new(fake::driver(), 3, 4096).unwrap();
        let mut taken: Vec<Slot> = (0..3).map(|_| slots.try_take().unwrap()).collect();
        assert!(slots.try_take().is_none());
        for (i, slot) in taken.iter().enumerate() {
            // SAFETY: the slot has 4096 bytes.
            unsafe { std::ptr::write_bytes(slot.address, i as u8 + 1, 4096) };
        }
        for (i, slot) in taken.iter().enumerate() {
            // SAFETY: as above.
            let bytes = unsafe { std::slice::from_raw_parts(slot.address, 4096) };
            assert!(bytes.iter().all(|byte| *byte == i as u8 + 1));
        }
        slots.give(taken.pop().unwrap());
        assert!(slots.try_take().is_some());
        assert_eq!(Slots::new(fake::driver(), 0, 4096).err(), Some(status::INVALID_VALUE));
    }

    #[test]
    fn slot_has_one_event_in_each_context_until_a_reset() {
        let driver = fake::driver();
        let contexts = Contexts::warm(driver, &fake::devices()).unwrap();
        let slots = Slots::new(driver, 1, 64).unwrap();
        let (one, two) = (make(kind::CTX, 0, 1, 0), make(kind::CTX, 0, 1, 1));
        let mut slot = slots.try_take().unwrap();
        let mut event = |ctx| {
            slot.enter(driver, &contexts, ctx).unwrap();
            assert_eq!(slot.ctx, ctx);
            slot.event
        };
        let (first, second) = (event(one), event(two));
        assert_ne!(first, second);
        assert_eq!((event(one), event(two)), (first, second));
        contexts.reset(driver, 0).unwrap();
        let new = event(one);
        assert_ne!(new, first, "the reset destroyed the event");
        assert_eq!((event(one), event(two)), (new, second));
        slots.give(slot);
        let slot = slots.try_take().unwrap();
        assert!(slot.event.is_null() && slot.ctx == 0, "a free slot waits for no event");
    }

    #[test]
    fn slots_double_up_to_their_bound() {
        let (driver, slots) = (fake::driver(), Slots::new(fake::driver(), 2, 4096).unwrap());
        let held = [slots.try_take().unwrap(), slots.try_take().unwrap()];
        for count in [4, 8, 11] {
            assert!(slots.grow(driver, 11) && slots.count() == count);
        }
        assert!(!slots.grow(driver, 11));
        let more: Vec<Slot> = std::iter::from_fn(|| slots.try_take()).collect();
        assert_eq!(more.len(), 9);
        let addresses = held.iter().chain(&more).map(|slot| slot.address as usize);
        assert_eq!(addresses.collect::<std::collections::BTreeSet<_>>().len(), 11);
        assert!(slots.pin(driver).is_ok());
    }

    #[test]
    fn last_slots_are_for_those_who_may_take_them() {
        let slots = Slots::new(fake::driver(), 3, 64).unwrap();
        let mut held: Vec<Slot> = (0..2).map(|_| slots.take_within(Duration::ZERO, 1).unwrap()).collect();
        assert!(slots.take_within(Duration::from_millis(1), 1).is_none());
        held.push(slots.take_within(Duration::ZERO, 0).unwrap());
        slots.give(held.remove(0));
        assert!(slots.take_within(Duration::ZERO, 1).is_none());
        slots.give(held.remove(0));
        assert!(slots.take_within(Duration::ZERO, 1).is_some());
    }

    #[test]
    fn taker_waits_for_a_slot() {
        let slots = std::sync::Arc::new(Slots::new(fake::driver(), 1, 64).unwrap());
        let slot = slots.try_take().unwrap();
        assert!(slots.take_within(Duration::from_millis(1), 0).is_none());
        let waiting = {
            let slots = slots.clone();
            std::thread::spawn(move || {
                slots.take_within(Duration::from_secs(20), 0).unwrap().address as usize
            })
        };
        let address = slot.address as usize;
        assert!(!waiting.is_finished());
        slots.give(slot);
        assert_eq!(waiting.join().unwrap(), address);
    }
}
