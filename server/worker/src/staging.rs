//! Pinned memory of the worker that data passes through on its way to and from the device.

use std::sync::{Condvar, Mutex, PoisonError};

use crate::driver::{Driver, Handle, Status, check};

/// `CU_MEMHOSTALLOC_PORTABLE`: pinned for every context.
const PORTABLE: u32 = 1;
/// `CU_EVENT_DISABLE_TIMING`
const NO_TIMING: u32 = 2;

/// Equal slots of pinned memory, each with an event that says when the device has done with it.
pub struct Slots {
    free: Mutex<Vec<Slot>>,
    changed: Condvar,
}

/// One slot; given back with [`Slots::give`].
pub struct Slot {
    /// Its memory.
    pub address: *mut u8,
    /// Recorded after the device work that uses it; see [`Slot::enter`].
    pub event: Handle,
    /// An event belongs to a context: one for each that has used the slot.
    events: Vec<(u64, Handle)>,
}

impl Slot {
    /// Chooses the event for work in the context `ctx`, which is current.
    pub fn enter(&mut self, driver: &Driver, ctx: u64) -> Result<(), Status> {
        self.event = match self.events.iter().find(|(known, _)| *known == ctx) {
            Some((_, event)) => *event,
            None => {
                let event = new_event(driver)?;
                self.events.push((ctx, event));
                event
            }
        };
        Ok(())
    }
}

// SAFETY: the pinned memory and the event belong to whoever holds the slot, in any thread.
unsafe impl Send for Slot {}

impl Slots {
    /// Allocates `count` slots of `size` bytes. A context must be current.
    pub fn new(driver: &Driver, count: usize, size: usize) -> Result<Self, Status> {
        let mut base = std::ptr::null_mut();
        // SAFETY: the out pointer is valid. The memory lives as long as the process.
        check(unsafe { (driver.call.cuMemHostAlloc)(&mut base, count * size, PORTABLE) })?;
        let mut free = Vec::with_capacity(count);
        for i in 0..count {
            // SAFETY: inside the allocation.
            let address = unsafe { base.cast::<u8>().add(i * size) };
            free.push(Slot { address, event: new_event(driver)?, events: Vec::new() });
        }
        Ok(Self { free: Mutex::new(free), changed: Condvar::new() })
    }

    /// Takes a slot, waiting until one is free.
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

    /// Gives a slot back.
    pub fn give(&self, slot: Slot) {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).push(slot);
        self.changed.notify_one();
    }
}

/// An event without timing in the current context.
fn new_event(driver: &Driver) -> Result<Handle, Status> {
    let mut event = std::ptr::null_mut();
    // SAFETY: the out pointer is valid.
    check(unsafe { (driver.call.cuEventCreate)(&mut event, NO_TIMING) })?;
    Ok(event)
}
