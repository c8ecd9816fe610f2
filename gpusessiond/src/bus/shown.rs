//! Data that an object shows, replaced while calls are in progress.

use std::sync::{Arc, RwLock};

/// Data that an object shows.
///
/// It changes while calls on the object are in progress, so no call holds the lock.
pub(super) struct Shown<T>(RwLock<Arc<T>>);

impl<T> Shown<T> {
    pub(super) fn new(value: T) -> Self {
        Self(RwLock::new(Arc::new(value)))
    }

    pub(super) fn get(&self) -> Arc<T> {
        self.0.read().unwrap_or_else(|e| e.into_inner()).clone()
    }

    /// Replaces the data and returns the previous data.
    pub(super) fn set(&self, value: T) -> Arc<T> {
        std::mem::replace(&mut *self.0.write().unwrap_or_else(|e| e.into_inner()), Arc::new(value))
    }
}
