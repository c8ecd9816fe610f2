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

    /// Returns `true` if no state exists.
    pub fn is_empty(&self) -> bool {
        self.lock().is_empty()
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

#[cfg(test)]
mod tests {
    use gpusession_proto::frame::Reader;

    use super::*;

    fn link() -> Link {
        let options = Options::read(&mut Reader::new(&[0; 8])).unwrap_or_else(|_| panic!("no options"));
        Link { state: Object(std::ptr::null_mut()), options, image: None }
    }

    #[test]
    fn state_has_one_handle_of_its_kind() {
        let links = Links::default();
        let handle = kind::make(kind::LINK, 0, 1, 5);
        assert_eq!(links.put(kind::make(kind::MODULE, 0, 1, 5), link()), Err(status::INVALID_HANDLE));
        assert_eq!(links.put(handle, link()), Ok(()));
        assert_eq!(links.put(handle, link()), Err(status::INVALID_HANDLE), "taken");
        assert!(links.get(handle).is_ok() && links.take(handle).is_ok());
        assert_eq!(links.get(handle).err(), Some(status::INVALID_HANDLE));
        assert_eq!(links.take(handle).err(), Some(status::INVALID_HANDLE));
    }

    #[test]
    fn number_of_states_is_bounded() {
        let links = Links::default();
        let handle = |slot| kind::make(kind::LINK, 0, 1, slot as u32);
        (0..MAX_LINKS).for_each(|slot| links.put(handle(slot), link()).unwrap());
        assert_eq!(links.put(handle(MAX_LINKS), link()), Err(status::INVALID_HANDLE));
        links.take(handle(0)).unwrap();
        assert_eq!(links.put(handle(MAX_LINKS), link()), Ok(()));
    }
}
