//! Pinned memory of the worker for data on its way to and from the device.

use std::num::NonZeroUsize;
use std::ptr::NonNull;
use std::sync::{Condvar, Mutex, PoisonError};

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
        let slots = Self { memory, len: len.get(), free, changed: Condvar::new() };
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

    /// Takes a slot; waits until one is free.
    pub fn take(&self) -> Slot {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match free.pop() {
                Some(slot) => return slot,
                None => free = self.changed.wait(free).unwrap_or_else(PoisonError::into_inner),
            }
        }
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
