//! Pinned memory of the worker for data on its way to and from the device.

use std::num::NonZeroUsize;
use std::ptr::NonNull;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous};

use crate::contexts::Contexts;
use crate::driver::{Driver, Handle, Status, check, status};

/// `CU_MEMHOSTREGISTER_PORTABLE`: pinned for every context.
const PORTABLE: u32 = 1;
/// `CU_EVENT_DISABLE_TIMING`
const NO_TIMING: u32 = 2;

/// Equal slots of pinned memory, each with an event that tells when the device is done with it.
pub struct Slots {
    /// Memory of this process, never unmapped: a context's end would free the driver's own.
    memory: NonNull<std::ffi::c_void>,
    len: usize,
    count: usize,
    free: Mutex<Vec<Slot>>,
    changed: Condvar,
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

/// Memory for a chunk.
pub enum Room {
    Pinned(Slot),
    /// The driver's copies from and to this memory wait for their stream.
    Pageable(Vec<u8>),
}

impl Room {
    /// Returns the first byte, to read.
    pub fn bytes(&self) -> *const u8 {
        match self {
            Self::Pinned(slot) => slot.address,
            Self::Pageable(bytes) => bytes.as_ptr(),
        }
    }

    /// Returns the first byte, to write.
    pub fn address(&mut self) -> *mut u8 {
        match self {
            Self::Pinned(slot) => slot.address,
            Self::Pageable(bytes) => bytes.as_mut_ptr(),
        }
    }

    /// Returns the event after which the device is done with the memory, or null.
    pub fn event(&self) -> Handle {
        if let Self::Pinned(slot) = self { slot.event } else { std::ptr::null_mut() }
    }

    /// Returns the context of that event, or 0.
    pub fn ctx(&self) -> u64 {
        if let Self::Pinned(slot) = self { slot.ctx } else { 0 }
    }

    /// Returns `true` if it is a slot.
    pub fn is_pinned(&self) -> bool {
        matches!(self, Self::Pinned(_))
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
        let len = NonZeroUsize::new(count * size).ok_or(status::INVALID_VALUE)?;
        // SAFETY: a new mapping, never unmapped.
        let memory = unsafe {
            mmap_anonymous(None, len, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, MapFlags::MAP_PRIVATE)
        }
        .map_err(|_| status::OUT_OF_MEMORY)?;
        let slot = |i| Slot {
            // SAFETY: inside the mapping.
            address: unsafe { memory.as_ptr().cast::<u8>().add(i * size) },
            event: std::ptr::null_mut(),
            ctx: 0,
            events: Vec::new(),
        };
        let free = Mutex::new((0..count).map(slot).collect());
        let slots = Self { memory, len: len.get(), count, free, changed: Condvar::new() };
        slots.pin(driver)?;
        Ok(slots)
    }

    /// Pins the memory for every context, as long as the current context lives.
    ///
    /// Memory that is not pinned works, too, but slowly.
    pub fn pin(&self, driver: &Driver) -> Result<(), Status> {
        // SAFETY: a mapping of this process, which stays.
        check(unsafe { (driver.call.cuMemHostRegister_v2)(self.memory.as_ptr(), self.len, PORTABLE) })
    }

    /// Returns the number of slots, free or not.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Takes a slot; waits until one is free, at most for `patience`.
    pub fn take_within(&self, patience: Duration) -> Option<Slot> {
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let none = |free: &mut Vec<Slot>| free.is_empty();
        let waited = self.changed.wait_timeout_while(free, patience, none);
        waited.unwrap_or_else(PoisonError::into_inner).0.pop()
    }

    /// Takes a slot if one is free.
    pub fn try_take(&self) -> Option<Slot> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }

    /// Returns a slot to the free ones.
    pub fn give(&self, mut slot: Slot) {
        slot.rest();
        self.free.lock().unwrap_or_else(PoisonError::into_inner).push(slot);
        self.changed.notify_one();
    }
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
    fn taker_waits_for_a_slot() {
        let slots = std::sync::Arc::new(Slots::new(fake::driver(), 1, 64).unwrap());
        let slot = slots.try_take().unwrap();
        assert!(slots.take_within(Duration::from_millis(1)).is_none());
        let waiting = {
            let slots = slots.clone();
            std::thread::spawn(move || slots.take_within(Duration::from_secs(20)).unwrap().address as usize)
        };
        let address = slot.address as usize;
        assert!(!waiting.is_finished());
        slots.give(slot);
        assert_eq!(waiting.join().unwrap(), address);
    }
}
