//! Slots of one lane to the device, and whether the device is done with each.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use crate::driver::{Driver, status};
use crate::staging::{Slot, Slots};

/// Slots of one lane to the device.
///
/// Chunks leave a lane in their order, so a later transfer never holds the slots that an earlier
/// one needs.
#[derive(Default)]
pub(super) struct UpSlots {
    /// Allocated when the lane opens.
    pub(super) slots: OnceLock<Slots>,
    /// Slots whose copy to the device is under way, oldest first.
    copying: Mutex<VecDeque<Slot>>,
}

impl UpSlots {
    /// Returns a free slot, or one whose copy has ended.
    pub(super) fn slot(&self, driver: &Driver, slots: &Slots) -> Option<Slot> {
        if let Some(slot) = slots.try_take() {
            return Some(slot);
        }
        let mut copying = self.copying();
        // A failure means a poisoned context, whose copies read the slot no more either.
        // SAFETY: the slot's event was recorded after its copy, and `leave` takes the slot first if
        // the event goes.
        let done = |slot: &Slot| unsafe { (driver.call.cuEventQuery)(slot.event) } != status::NOT_READY;
        let place = copying.iter().position(|slot| slot.event.is_null() || done(slot))?;
        let mut slot = copying.remove(place)?;
        slot.rest();
        Some(slot)
    }

    /// Returns `true` if half of the slots are free, or the lane is not open. Any context may be
    /// current.
    pub(super) fn is_half_free(&self, driver: &Driver) -> bool {
        let Some(slots) = self.slots.get() else { return true };
        // SAFETY: as in `slot`.
        let done =
            |slot: &&Slot| slot.event.is_null() || unsafe { (driver.call.cuEventQuery)(slot.event) } == 0;
        let copied = self.copying().iter().filter(done).count();
        2 * (slots.free() + copied) >= slots.count()
    }

    /// Takes back a slot that nothing reads.
    pub(super) fn give(&self, slot: Slot) {
        if let Some(slots) = self.slots.get() {
            slots.give(slot);
        }
    }

    /// Takes a slot whose copy to the device is queued, and whose event is recorded.
    pub(super) fn copied(&self, slot: Slot) {
        self.copying().push_back(slot);
    }

    /// Returns the slots whose copies are under way.
    pub(super) fn copying(&self) -> MutexGuard<'_, VecDeque<Slot>> {
        self.copying.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
