//! Handles: the address of a live object, looked up before it is used.

use crate::errors::{Error, INVALID_HANDLE};
use parking_lot::RwLock;
use std::collections::HashMap;
use std::sync::{Arc, LazyLock};

/// All live objects of one kind. As in a real driver, a handle may be reused after its object is
/// destroyed.
pub struct Registry<T>(LazyLock<RwLock<HashMap<usize, Arc<T>>>>);

impl<T> Default for Registry<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> Registry<T> {
    pub const fn new() -> Self {
        Registry(LazyLock::new(Default::default))
    }

    pub fn insert(&self, object: Arc<T>) -> usize {
        let handle = Arc::as_ptr(&object) as usize;
        self.0.write().insert(handle, object);
        handle
    }

    pub fn find(&self, handle: usize) -> Option<Arc<T>> {
        self.0.read().get(&handle).cloned()
    }

    pub fn get(&self, handle: usize) -> Result<Arc<T>, Error> {
        self.find(handle).ok_or(INVALID_HANDLE)
    }

    pub fn remove(&self, handle: usize) -> Result<Arc<T>, Error> {
        self.0.write().remove(&handle).ok_or(INVALID_HANDLE)
    }

    pub fn all(&self) -> Vec<Arc<T>> {
        self.0.read().values().cloned().collect()
    }
}

/// Returns the handle of an object.
pub fn handle<T>(object: &Arc<T>) -> usize {
    Arc::as_ptr(object) as usize
}
