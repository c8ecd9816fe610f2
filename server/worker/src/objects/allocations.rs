//! Account of the device memory that other calls than `ALLOC` allocate.

use std::collections::HashMap;
use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, MutexGuard, PoisonError};

use gpusession_proto::supervise::DeviceLimit;

use super::pools::{Pointers, Pool};
use super::shares::Object;

/// Memory counted for one object.
#[derive(Clone, Copy)]
pub struct Counted {
    pub device: u32,
    pub bytes: u64,
    /// Context whose end frees the object; 0 means none.
    pub ctx: u64,
}

/// Memory of `cuMemCreate`: it exists until its handle is released and no mapping uses it.
pub struct Physical {
    pub device: u32,
    pub bytes: u64,
    pub handles: u32,
    pub maps: u32,
    /// Number under which other processes know it.
    pub share: Option<u64>,
    /// The other worker's object that it is, if it is an import.
    pub imported: Option<Object>,
}

/// All counted memory.
#[derive(Default)]
pub struct State {
    pub physical: HashMap<u64, Physical>,
    /// Address of each mapping, then its length and its handle of physical memory.
    pub mapped: HashMap<u64, (u64, u64)>,
    pub arrays: HashMap<u64, Counted>,
    /// Images and contexts by the client's handles, heaps by context and limit.
    pub objects: HashMap<u64, Counted>,
    pub heaps: HashMap<(u64, i32), Counted>,
    pub pools: HashMap<u64, Pool>,
    pub pointers: Pointers,
    /// Bytes counted for all pools and graphs of a device.
    pub pooled: Vec<u64>,
}

impl State {
    /// Notes a handle of imported memory; returns `true` if no earlier import has this handle.
    ///
    /// A driver may return the handle that it has for the same memory already.
    pub fn imported(&mut self, handle: u64, device: u32, object: Object) -> bool {
        if let Some(known) = self.physical.get_mut(&handle) {
            known.handles += 1;
            return false;
        }
        // Its exporter counts the memory.
        let new = Physical { device, bytes: 0, handles: 1, maps: 0, share: None, imported: Some(object) };
        self.physical.insert(handle, new);
        true
    }

    /// Returns `true` if the program has physical memory, a mapping of it, or an array.
    pub fn has_objects(&self) -> bool {
        !(self.physical.is_empty() && self.mapped.is_empty() && self.arrays.is_empty())
    }

    /// Notes a device's default pool, or the one that it allocates from.
    pub fn of_device(&mut self, pool: u64, device: u32) {
        self.pools.entry(pool).or_insert(Pool::new(device));
    }
}

/// Account of this memory.
pub struct Allocations {
    pub contexts: Vec<u64>,
    state: Mutex<State>,
    /// Whether the program ever used stream-ordered memory; else pools need no query.
    pub pooling: AtomicBool,
}

impl Allocations {
    /// Starts with no allocation.
    pub fn new(devices: &[DeviceLimit]) -> Self {
        let state = State { pooled: vec![0; devices.len()], ..State::default() };
        Self {
            contexts: devices.iter().map(|d| d.context_bytes).collect(),
            state: Mutex::new(state),
            pooling: AtomicBool::new(false),
        }
    }

    /// Locks the account.
    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_is_imported_again_keeps_its_mappings() {
        let mut state = State::default();
        assert!(!state.has_objects());
        let object = ([1; 16], 2);
        assert!(state.imported(7, 0, object));
        assert!(state.has_objects());
        state.physical.get_mut(&7).unwrap().maps = 3;
        assert!(!state.imported(7, 0, object), "the same handle");
        assert!(state.imported(8, 0, object), "a handle of its own");
        let known = &state.physical[&7];
        assert_eq!((known.handles, known.maps, state.physical[&8].handles), (2, 3, 1));
        let own = Physical { device: 0, bytes: 5, handles: 1, maps: 0, share: None, imported: None };
        state.physical.insert(9, own);
        assert!(!state.imported(9, 0, object) && state.physical[&9].bytes == 5, "its own memory counts");
    }
}
