//! Images (cubins, fatbins, PTX) by content: the client sends none that the server has.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};

use crate::image_store::{Hash, ImageStore, MAX_IMAGE};

/// Images in memory and, for all workers of a client, at the server.
pub struct Images {
    store: Option<Arc<ImageStore>>,
    memory: Mutex<HashMap<Hash, Arc<Vec<u8>>>>,
    /// Images in memory that the driver has not accepted yet.
    unproven: Mutex<HashSet<Hash>>,
    partial: Mutex<HashMap<Hash, Vec<u8>>>,
    limit: u64,
}

impl Images {
    /// Starts with the server's images, if it keeps any.
    ///
    /// Incomplete images may together take `limit` bytes; a single image may always have the full
    /// length.
    pub fn new(store: Option<Arc<ImageStore>>, limit: u64) -> Self {
        Self { store, memory: Mutex::default(), unproven: Mutex::default(), partial: Mutex::default(), limit }
    }

    /// Returns the server's images, if it keeps any.
    pub fn store(&self) -> Option<&ImageStore> {
        self.store.as_deref()
    }

    /// Returns the image, if this worker or the server has it.
    pub fn get(&self, hash: &Hash) -> Option<Arc<Vec<u8>>> {
        let memory = || self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(image) = memory().get(hash) {
            return Some(image.clone());
        }
        // Asked without the lock: a slow disk delays this thread only.
        let image = Arc::new(self.store.as_ref()?.find(hash)?);
        memory().insert(*hash, image.clone());
        Some(image)
    }

    /// Appends the next piece of an image; returns `true` once it is complete and has the hash.
    pub fn add(&self, hash: Hash, total: u64, piece: &[u8]) -> Result<bool, ()> {
        if total > MAX_IMAGE {
            return Err(());
        }
        let mut partial = self.partial.lock().unwrap_or_else(PoisonError::into_inner);
        let others: u64 = partial.iter().filter(|(h, _)| **h != hash).map(|(_, p)| p.len() as u64).sum();
        if others > self.limit {
            return Err(());
        }
        let image = partial.entry(hash).or_default();
        image.extend_from_slice(piece);
        if image.len() as u64 > total {
            partial.remove(&hash);
            return Err(());
        }
        if (image.len() as u64) < total {
            return Ok(false);
        }
        let Some(image) = partial.remove(&hash) else { return Err(()) };
        if blake3::hash(&image) != blake3::Hash::from_bytes(hash) {
            return Err(());
        }
        let image = Arc::new(image);
        self.memory.lock().unwrap_or_else(PoisonError::into_inner).insert(hash, image);
        self.unproven.lock().unwrap_or_else(PoisonError::into_inner).insert(hash);
        Ok(true)
    }

    /// Offers an image that the driver has accepted, for the client's other workers.
    pub fn accepted(&self, hash: &Hash, image: &Arc<Vec<u8>>) {
        let first = self.unproven.lock().unwrap_or_else(PoisonError::into_inner).remove(hash);
        if let Some(store) = self.store.as_ref().filter(|_| first) {
            store.offer(*hash, image.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use gpusession_proto::supervise::FromWorker;

    use super::*;
    use crate::supervise::tests::pair;

    #[test]
    fn an_image_is_offered_once_the_driver_has_accepted_it() {
        let (supervisor, peer) = pair();
        let images = Images::new(Some(Arc::new(ImageStore::new(supervisor))), 1 << 20);
        let image = vec![1; 5000];
        let hash = *blake3::hash(&image).as_bytes();
        assert_eq!(images.add(hash, 5000, &image[..4000]), Ok(false));
        assert_eq!(images.add(hash, 5000, &image[4000..]), Ok(true));
        let held = images.get(&hash).unwrap();
        assert!(*held == image && peer.silent());
        images.accepted(&hash, &held);
        assert!(matches!(peer.next(), FromWorker::ImageOffered { bytes: 5000, .. }));
        images.accepted(&hash, &held);
        assert!(peer.silent(), "once");
    }

    #[test]
    fn an_image_of_another_hash_is_none() {
        let images = Images::new(None, 1 << 20);
        assert_eq!(images.add([1; 32], 3, b"abc"), Err(()));
        assert!(images.get(&[1; 32]).is_none());
        assert_eq!(images.add([1; 32], MAX_IMAGE + 1, b""), Err(()));
    }
}
