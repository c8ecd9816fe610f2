//! States of the driver's linker, which keep the options and the linked image.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::jit::Options;
use crate::driver::{Status, status};
use crate::handles::{Object, kind};

/// Maximum number of states: bounds the memory that a hostile client can cause.
const MAX_LINKS: usize = 4096;

/// One state of the linker.
pub struct Link {
    pub state: Object,
    /// Options of the whole link; the driver writes its logs here until the state is destroyed.
    pub options: Options,
    /// Address and length of the linked image, which belongs to the driver.
    pub image: Option<(usize, usize)>,
}

/// All states, by the client's handle.
#[derive(Default)]
pub struct Links(Mutex<HashMap<u64, Arc<Mutex<Link>>>>);

impl Links {
    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Arc<Mutex<Link>>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores a new state.
    pub fn put(&self, handle: u64, link: Link) -> Result<(), Status> {
        let mut links = self.lock();
        let fits = kind::kind(handle) == kind::LINK && links.len() < MAX_LINKS;
        if !fits || links.contains_key(&handle) {
            return Err(status::INVALID_HANDLE);
        }
        links.insert(handle, Arc::new(Mutex::new(link)));
        Ok(())
    }

    /// Returns the state behind a handle.
    pub fn get(&self, handle: u64) -> Result<Arc<Mutex<Link>>, Status> {
        self.lock().get(&handle).cloned().ok_or(status::INVALID_HANDLE)
    }

    /// Forgets a handle and returns its state.
    pub fn take(&self, handle: u64) -> Result<Arc<Mutex<Link>>, Status> {
        self.lock().remove(&handle).ok_or(status::INVALID_HANDLE)
    }
}
