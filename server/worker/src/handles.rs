//! Handles that the client minted, and the driver's objects behind them.
//!
//! A handle is kind (8 bits), server (8), generation (16), slot (32). The client reuses a slot with
//! another generation, so that a stale handle is noticed.

use std::sync::{PoisonError, RwLock};

use crate::driver::{Handle, Status, status};

/// Maximum number of handles of one kind: bounds the table that a hostile client can cause.
const MAX_SLOTS: usize = 1 << 22;

/// Objects behind the handles of one kind, by slot.
pub struct Table<T> {
    kind: u8,
    slots: RwLock<Vec<Option<(u16, T)>>>,
}

fn generation(handle: u64) -> u16 {
    (handle >> 32) as u16
}

impl<T: Copy> Table<T> {
    /// Creates an empty table for handles of this kind.
    pub const fn new(kind: u8) -> Self {
        Self { kind, slots: RwLock::new(Vec::new()) }
    }

    /// Returns the object behind a handle; a stale or foreign handle is an error.
    pub fn get(&self, handle: u64) -> Result<T, Status> {
        let slots = self.slots.read().unwrap_or_else(PoisonError::into_inner);
        match slots.get(handle as u32 as usize) {
            Some(Some((g, value))) if *g == generation(handle) && (handle >> 56) as u8 == self.kind => {
                Ok(*value)
            }
            _ => Err(status::INVALID_HANDLE),
        }
    }

    /// Returns all objects.
    pub fn all(&self) -> Vec<T> {
        let slots = self.slots.read().unwrap_or_else(PoisonError::into_inner);
        slots.iter().flatten().map(|(_, value)| *value).collect()
    }

    /// Returns `true` if no handle has an object.
    pub fn is_empty(&self) -> bool {
        self.slots.read().unwrap_or_else(PoisonError::into_inner).iter().all(Option::is_none)
    }

    /// Returns the client's handle of an object, without the number of its server.
    pub fn handle_of(&self, is: impl Fn(&T) -> bool) -> Option<u64> {
        let slots = self.slots.read().unwrap_or_else(PoisonError::into_inner);
        let found = slots.iter().enumerate().find_map(|(slot, entry)| {
            entry.as_ref().filter(|(_, value)| is(value)).map(|(generation, _)| (slot, *generation))
        });
        found.map(|(slot, generation)| kind::make(self.kind, 0, generation, slot as u32))
    }

    /// Forgets the objects for which `goes` returns `true`.
    pub fn forget(&self, goes: impl Fn(&T) -> bool) {
        for slot in self.slots.write().unwrap_or_else(PoisonError::into_inner).iter_mut() {
            slot.take_if(|(_, value)| goes(value));
        }
    }

    /// Stores the object behind a new handle.
    pub fn put(&self, handle: u64, value: T) -> Result<(), Status> {
        let slot = handle as u32 as usize;
        if (handle >> 56) as u8 != self.kind || slot >= MAX_SLOTS {
            return Err(status::INVALID_HANDLE);
        }
        let mut slots = self.slots.write().unwrap_or_else(PoisonError::into_inner);
        if slots.len() <= slot {
            slots.resize_with(slot + 1, || None);
        }
        slots[slot] = Some((generation(handle), value));
        Ok(())
    }

    /// Forgets a handle and returns its object.
    pub fn take(&self, handle: u64) -> Result<T, Status> {
        let value = self.get(handle)?;
        self.slots.write().unwrap_or_else(PoisonError::into_inner)[handle as u32 as usize] = None;
        Ok(value)
    }
}

/// Kinds of handles, as the client mints them.
pub mod kind {
    pub use gpusession_proto::handle::*;
}

/// An object of the driver, which any thread may use; the pointer only goes back to the driver.
#[derive(Clone, Copy)]
pub struct Object(pub Handle);

// SAFETY: handles of the CUDA driver are valid in every thread of the process.
unsafe impl Send for Object {}
// SAFETY: as above.
unsafe impl Sync for Object {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stale_and_foreign_handles_are_refused() {
        let table = Table::new(kind::EVENT);
        let first = kind::make(kind::EVENT, 0, 1, 5);
        let second = kind::make(kind::EVENT, 0, 2, 5);
        table.put(first, 11).unwrap();
        assert_eq!(table.get(first), Ok(11));
        assert_eq!(table.get(second), Err(status::INVALID_HANDLE));
        assert!(!table.is_empty());
        assert_eq!(table.take(first), Ok(11));
        assert!(table.is_empty());
        table.put(second, 12).unwrap();
        assert_eq!(table.get(first), Err(status::INVALID_HANDLE));
        assert_eq!(table.put(kind::make(kind::STREAM, 0, 1, 1), 1), Err(status::INVALID_HANDLE));
        assert_eq!(table.put(kind::make(kind::EVENT, 0, 1, u32::MAX), 1), Err(status::INVALID_HANDLE));
        assert_eq!(table.get(u64::MAX), Err(status::INVALID_HANDLE));
    }
}
