//! Handles that the client minted, and the driver's objects behind them.
//!
//! A handle is kind (8 bits), server (8), generation (16), slot (32). The client reuses a slot with
//! another generation, so that a stale handle is noticed.

use std::sync::{PoisonError, RwLock};

use crate::driver::{Handle, Status, status};

/// Maximum number of handles of one kind: bounds the table that a hostile client can cause.
const MAX_SLOTS: usize = 1 << 22;
/// Slots that the table adds at a time: a client that skips numbers pays with an object of the
/// driver for each such part.
const PART: usize = 64;

/// Objects behind the handles of one kind, by slot.
pub struct Table<T> {
    kind: u8,
    parts: RwLock<Vec<Option<Box<Part<T>>>>>,
}

type Part<T> = [Option<(u16, T)>; PART];

fn generation(handle: u64) -> u16 {
    (handle >> 32) as u16
}

/// Returns the part of the table that has a handle, and the place there.
fn place(handle: u64) -> (usize, usize) {
    let slot = handle as u32 as usize;
    (slot / PART, slot % PART)
}

impl<T: Copy> Table<T> {
    /// Creates an empty table for handles of this kind.
    pub const fn new(kind: u8) -> Self {
        Self { kind, parts: RwLock::new(Vec::new()) }
    }

    /// Returns the object behind a handle; a stale or foreign handle is an error.
    pub fn get(&self, handle: u64) -> Result<T, Status> {
        let parts = self.parts.read().unwrap_or_else(PoisonError::into_inner);
        let (part, at) = place(handle);
        match parts.get(part) {
            Some(Some(slots)) => match slots[at] {
                Some((g, value)) if g == generation(handle) && (handle >> 56) as u8 == self.kind => Ok(value),
                _ => Err(status::INVALID_HANDLE),
            },
            _ => Err(status::INVALID_HANDLE),
        }
    }

    /// Returns all objects.
    pub fn all(&self) -> Vec<T> {
        let parts = self.parts.read().unwrap_or_else(PoisonError::into_inner);
        objects(&parts).map(|(_, _, value)| *value).collect()
    }

    /// Returns `true` if no handle has an object.
    pub fn is_empty(&self) -> bool {
        objects(&self.parts.read().unwrap_or_else(PoisonError::into_inner)).next().is_none()
    }

    /// Returns the client's handle of an object, without the number of its server.
    pub fn handle_of(&self, is: impl Fn(&T) -> bool) -> Option<u64> {
        let parts = self.parts.read().unwrap_or_else(PoisonError::into_inner);
        let found = objects(&parts).find(|(_, _, value)| is(value));
        found.map(|(slot, generation, _)| kind::make(self.kind, 0, generation, slot as u32))
    }

    /// Forgets the objects for which `goes` returns `true`.
    pub fn forget(&self, goes: impl Fn(&T) -> bool) {
        let mut parts = self.parts.write().unwrap_or_else(PoisonError::into_inner);
        for slot in parts.iter_mut().flatten().flat_map(|slots| slots.iter_mut()) {
            slot.take_if(|(_, value)| goes(value));
        }
    }

    /// Stores the object behind a new handle.
    pub fn put(&self, handle: u64, value: T) -> Result<(), Status> {
        let (part, at) = place(handle);
        if (handle >> 56) as u8 != self.kind || part * PART + at >= MAX_SLOTS {
            return Err(status::INVALID_HANDLE);
        }
        let mut parts = self.parts.write().unwrap_or_else(PoisonError::into_inner);
        if parts.len() <= part {
            parts.resize_with(part + 1, || None);
        }
        let slots = parts[part].get_or_insert_with(|| Box::new([const { None }; PART]));
        slots[at] = Some((generation(handle), value));
        Ok(())
    }

    /// Forgets a handle and returns its object.
    pub fn take(&self, handle: u64) -> Result<T, Status> {
        let value = self.get(handle)?;
        let (part, at) = place(handle);
        let mut parts = self.parts.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(Some(slots)) = parts.get_mut(part) {
            slots[at] = None;
        }
        Ok(value)
    }
}

/// Returns each object with its slot and generation.
fn objects<T>(parts: &[Option<Box<Part<T>>>]) -> impl Iterator<Item = (usize, u16, &T)> {
    parts.iter().enumerate().filter_map(|(part, slots)| Some((part, slots.as_deref()?))).flat_map(
        |(part, slots)| {
            slots.iter().enumerate().filter_map(move |(at, entry)| {
                let (generation, value) = entry.as_ref()?;
                Some((part * PART + at, *generation, value))
            })
        },
    )
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
        assert_eq!(table.take(u64::MAX), Err(status::INVALID_HANDLE));
    }

    #[test]
    fn skipped_numbers_take_no_slots() {
        let table = Table::new(kind::EVENT);
        let last = kind::make(kind::EVENT, 0, 3, MAX_SLOTS as u32 - 1);
        let beyond = kind::make(kind::EVENT, 0, 3, MAX_SLOTS as u32);
        table.put(last, 7).unwrap();
        assert_eq!(table.put(beyond, 7), Err(status::INVALID_HANDLE));
        assert_eq!(
            (table.get(last), table.all(), table.handle_of(|n| *n == 7)),
            (Ok(7), vec![7], Some(last))
        );
        assert_eq!(table.parts.read().unwrap().iter().flatten().count(), 1);
        // Slot 0 lies in another part.
        table.put(kind::make(kind::EVENT, 0, 1, 0), 8).unwrap();
        assert_eq!(table.parts.read().unwrap().iter().flatten().count(), 2);
        table.forget(|n| *n == 7);
        assert_eq!((table.get(last), table.all()), (Err(status::INVALID_HANDLE), vec![8]));
    }
}
