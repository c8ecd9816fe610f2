//! Account of the device memory that other calls than `ALLOC` allocate.

use std::collections::HashMap;
use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, MutexGuard, PoisonError};

use gpusession_proto::supervise::DeviceLimit;

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
    pub pools: HashMap<u64, u32>,
    /// Bytes counted for all pools and graphs of a device.
    pub pooled: Vec<u64>,
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
