//! Numbers of handles.
//!
//! No two live handles of a process share a slot, even for different workers, so one table by slot
//! serves all workers.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, PoisonError};

use gpusession_proto::handle;

/// Number of freed slots of one kind that stay unused.
const RESTING: usize = 1 << 16;
/// Maximum number of workers, whose numbers handles contain; each needs a window of addresses.
pub const MAX_CLIENTS: usize = 8;
/// First slot of contexts that programs create; the slots below hold the devices' primary contexts.
pub const FIRST_CREATED: u32 = 256;

#[derive(Default)]
struct Slots {
    /// Number of slots that were given out.
    next: u32,
    /// Freed slots with their last generation, oldest first.
    ///
    /// A slot rests before its next use, because frames of other threads may still name its old
    /// handle.
    free: VecDeque<(u32, u16)>,
}

static SLOTS: Mutex<BTreeMap<u8, Slots>> = Mutex::new(BTreeMap::new());

/// Returns a new handle for the worker with this number.
pub fn mint(kind: u8, server: u8) -> u64 {
    let mut slots = SLOTS.lock().unwrap_or_else(PoisonError::into_inner);
    let slots = slots.entry(kind).or_default();
    let rested = if slots.free.len() > RESTING { slots.free.pop_front() } else { None };
    let (slot, generation) = rested.unwrap_or_else(|| {
        let first = if kind == handle::CTX { FIRST_CREATED / handle::ALIGNMENT } else { 0 };
        slots.next = slots.next.max(first) + 1;
        ((slots.next - 1) * handle::ALIGNMENT, 0)
    });
    handle::make(kind, server, generation.wrapping_add(1), slot)
}

/// Frees a handle's slot for a later handle with another generation.
pub fn retire(old: u64) {
    let mut slots = SLOTS.lock().unwrap_or_else(PoisonError::into_inner);
    let generation = (old >> 32) as u16;
    slots.entry(handle::kind(old)).or_default().free.push_back((handle::slot(old), generation));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn freed_slot_rests_and_returns_with_another_generation() {
        const KIND: u8 = 0x71;
        let first = mint(KIND, 0);
        retire(first);
        let live: Vec<u64> = (0..RESTING).map(|_| mint(KIND, 0)).collect();
        assert!(live.iter().all(|new| handle::slot(*new) != handle::slot(first)), "the slot rests");
        live.into_iter().for_each(retire);
        let again = mint(KIND, 0);
        assert_eq!(handle::slot(again), handle::slot(first), "the slot that rests longest comes first");
        assert_ne!(again, first);
    }

    #[test]
    fn clients_share_the_slots_of_a_kind() {
        const KIND: u8 = 0x72;
        let (one, two) = (mint(KIND, 0), mint(KIND, 1));
        assert_ne!(handle::slot(one), handle::slot(two), "one table by slot serves both");
        assert_eq!((handle::server(one), handle::server(two)), (0, 1));
    }

    #[test]
    fn handles_are_aligned_as_pointers() {
        for kind in [handle::CTX, handle::STREAM, 0x73] {
            let (one, two) = (mint(kind, 3), mint(kind, 3));
            assert!(
                [one, two].iter().all(|new| new % u64::from(handle::ALIGNMENT) == 0),
                "{one:#x} {two:#x}"
            );
            assert_ne!(handle::index(one), handle::index(two));
        }
    }

    #[test]
    fn created_context_takes_no_slot_of_a_device() {
        assert!(handle::slot(mint(handle::CTX, 0)) >= FIRST_CREATED);
    }
}
