//! Handles that the client minted, and the driver's objects behind them.
//!
//! A handle is kind (8 bits), server (8), generation (16), slot (32). The client reuses a slot with
//! another generation, so that a stale handle is noticed.

use std::sync::{PoisonError, RwLock};

use crate::driver::{Handle, Status, status};

/// Maximum number of slots in a list: bounds the table that a hostile client can cause.
const MAX_SLOTS: usize = 1 << 22;
/// Slots that the table adds at a time: a client that skips numbers pays with an object of the
/// driver for each such part.
const PART: usize = 64;

/// Objects behind the handles of one kind, by slot.
pub struct Table<T> {
    kind: u8,
    lists: RwLock<[List<T>; 2]>,
}

type List<T> = Vec<Option<Box<Part<T>>>>;
type Part<T> = [Option<(u16, T)>; PART];

/// Place of a handle: list, part of the list, slot of the part.
///
/// Multiples of [`kind::ALIGNMENT`] have a list of their own, so that both are dense: present
/// libraries use only these slots, earlier ones each slot.
struct Place {
    list: usize,
    part: usize,
    at: usize,
}

fn generation(handle: u64) -> u16 {
    (handle >> 32) as u16
}

fn place(handle: u64) -> Place {
    let slot = kind::slot(handle);
    let (list, number) =
        if slot.is_multiple_of(kind::ALIGNMENT) { (0, slot / kind::ALIGNMENT) } else { (1, slot) };
    Place { list, part: number as usize / PART, at: number as usize % PART }
}

/// Returns the slot of a place, the reverse of [`place`].
fn slot(list: usize, part: usize, at: usize) -> u32 {
    let number = (part * PART + at) as u32;
    if list == 0 { number * kind::ALIGNMENT } else { number }
}

impl<T: Copy> Table<T> {
    /// Creates an empty table for handles of this kind.
    pub const fn new(kind: u8) -> Self {
        Self { kind, lists: RwLock::new([Vec::new(), Vec::new()]) }
    }

    /// Returns the object behind a handle; a stale or foreign handle is an error.
    pub fn get(&self, handle: u64) -> Result<T, Status> {
        let lists = self.lists.read().unwrap_or_else(PoisonError::into_inner);
        let Place { list, part, at } = place(handle);
        match lists[list].get(part) {
            Some(Some(slots)) => match slots[at] {
                Some((g, value)) if g == generation(handle) && (handle >> 56) as u8 == self.kind => Ok(value),
                _ => Err(status::INVALID_HANDLE),
            },
            _ => Err(status::INVALID_HANDLE),
        }
    }

    /// Returns all objects.
    pub fn all(&self) -> Vec<T> {
        let lists = self.lists.read().unwrap_or_else(PoisonError::into_inner);
        objects(&lists).map(|(_, _, value)| *value).collect()
    }

    /// Returns `true` if no handle has an object.
    pub fn is_empty(&self) -> bool {
        objects(&self.lists.read().unwrap_or_else(PoisonError::into_inner)).next().is_none()
    }

    /// Returns the client's handle of an object, without the number of its server.
    pub fn handle_of(&self, is: impl Fn(&T) -> bool) -> Option<u64> {
        let lists = self.lists.read().unwrap_or_else(PoisonError::into_inner);
        let found = objects(&lists).find(|(_, _, value)| is(value));
        found.map(|(slot, generation, _)| kind::make(self.kind, 0, generation, slot))
    }

    /// Forgets the objects for which `goes` returns `true`.
    pub fn forget(&self, goes: impl Fn(&T) -> bool) {
        let mut lists = self.lists.write().unwrap_or_else(PoisonError::into_inner);
        for slot in lists.iter_mut().flatten().flatten().flat_map(|slots| slots.iter_mut()) {
            slot.take_if(|(_, value)| goes(value));
        }
    }

    /// Stores the object behind a new handle.
    pub fn put(&self, handle: u64, value: T) -> Result<(), Status> {
        let Place { list, part, at } = place(handle);
        if (handle >> 56) as u8 != self.kind || part >= MAX_SLOTS / PART {
            return Err(status::INVALID_HANDLE);
        }
        let parts = &mut self.lists.write().unwrap_or_else(PoisonError::into_inner)[list];
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
        let Place { list, part, at } = place(handle);
        let mut lists = self.lists.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(Some(slots)) = lists[list].get_mut(part) {
            slots[at] = None;
        }
        Ok(value)
    }
}

/// Returns each object with its slot and generation.
fn objects<T>(lists: &[List<T>; 2]) -> impl Iterator<Item = (u32, u16, &T)> {
    let parts = lists.iter().enumerate().flat_map(|(list, parts)| {
        parts.iter().enumerate().filter_map(move |(part, slots)| Some((list, part, slots.as_deref()?)))
    });
    parts.flat_map(|(list, part, slots)| {
        slots.iter().enumerate().filter_map(move |(at, entry)| {
            let (generation, value) = entry.as_ref()?;
            Some((slot(list, part, at), *generation, value))
        })
    })
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
        let beyond = kind::make(kind::EVENT, 0, 3, MAX_SLOTS as u32 + 1);
        table.put(last, 7).unwrap();
        assert_eq!(table.put(beyond, 7), Err(status::INVALID_HANDLE));
        assert_eq!(
            (table.get(last), table.all(), table.handle_of(|n| *n == 7)),
            (Ok(7), vec![7], Some(last))
        );
        let parts = || table.lists.read().unwrap().iter().flatten().flatten().count();
        assert_eq!(parts(), 1);
        // Slot 1 lies in another part.
        table.put(kind::make(kind::EVENT, 0, 1, 1), 8).unwrap();
        assert_eq!(parts(), 2);
        table.forget(|n| *n == 7);
        assert_eq!((table.get(last), table.all()), (Err(status::INVALID_HANDLE), vec![8]));
    }

    #[test]
    fn slots_of_present_and_earlier_libraries_are_dense() {
        let table = Table::new(kind::EVENT);
        let handles = |step| (0..1_000).map(move |number| kind::make(kind::EVENT, 0, 1, number * step));
        let every: Vec<u64> = handles(1).chain(handles(kind::ALIGNMENT)).collect();
        for handle in &every {
            table.put(*handle, *handle).unwrap();
        }
        assert!(every.iter().all(|handle| table.get(*handle) == Ok(*handle)));
        assert!(every.iter().all(|handle| table.handle_of(|of| of == handle) == Some(*handle)));
        let parts = table.lists.read().unwrap().iter().flatten().flatten().count();
        assert_eq!(parts, 2 * 1_000_usize.div_ceil(PART));
        let last = kind::make(kind::EVENT, 0, 1, (MAX_SLOTS as u32 - 1) * kind::ALIGNMENT);
        assert_eq!(table.put(last, 5), Ok(()));
        assert_eq!(table.put(last + u64::from(kind::ALIGNMENT), 5), Err(status::INVALID_HANDLE));
    }
}
