//! Images (cubins, fatbins, PTX) by content: the client sends none that the server has.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::image_store::{Hash, ImageStore, MAX_IMAGE};

/// Bytes of images in memory beyond which idle ones leave it.
///
/// A program that compiles its kernels as it runs loads new ones without end.
const MAX_RESTING: u64 = 64 << 20;
/// Time after its last use for which an image stays: the request that names it is on its way.
const REST_WINDOW: Duration = Duration::from_secs(60);

/// Images in memory and, for all workers of a client, at the server.
pub struct Images {
    store: Option<Arc<ImageStore>>,
    memory: Mutex<HashMap<Hash, Held>>,
    partial: Mutex<HashMap<Hash, Vec<u8>>>,
    limit: u64,
    /// Whether the program sends an image again that is gone.
    forgets: AtomicBool,
}

/// An image in memory.
struct Held {
    image: Arc<Vec<u8>>,
    used: Instant,
    /// Whether the server lacks it as far as this worker knows, and the driver has not accepted it.
    unproven: bool,
}

impl Images {
    /// Starts with the server's images, if it keeps any.
    ///
    /// Incomplete images may together take `limit` bytes; a single image may always have the full
    /// length.
    pub fn new(store: Option<Arc<ImageStore>>, limit: u64) -> Self {
        let (memory, partial) = (Mutex::default(), Mutex::default());
        Self { store, memory, partial, limit, forgets: AtomicBool::new(false) }
    }

    /// From now on, forgets idle images beyond [`MAX_RESTING`].
    pub fn forget_idle(&self) {
        self.forgets.store(true, Ordering::Relaxed);
    }

    fn memory(&self) -> MutexGuard<'_, HashMap<Hash, Held>> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps an image; forgets those that were idle for longest.
    fn keep(&self, hash: Hash, image: Arc<Vec<u8>>, unproven: bool, now: Instant) {
        let mut memory = self.memory();
        memory.insert(hash, Held { image, used: now, unproven });
        let mut bytes: u64 = memory.values().map(|held| held.image.len() as u64).sum();
        if bytes <= MAX_RESTING || !self.forgets.load(Ordering::Relaxed) {
            return;
        }
        let rested = |held: &Held| {
            Arc::strong_count(&held.image) == 1 && now.saturating_duration_since(held.used) >= REST_WINDOW
        };
        let mut oldest: Vec<_> =
            memory.iter().filter(|(_, held)| rested(held)).map(|(hash, held)| (held.used, *hash)).collect();
        oldest.sort_unstable();
        for (_, hash) in oldest {
            if bytes <= MAX_RESTING {
                break;
            }
            bytes -= memory.remove(&hash).map_or(0, |held| held.image.len() as u64);
        }
    }

    /// Returns the server's images, if it keeps any.
    pub fn store(&self) -> Option<&ImageStore> {
        self.store.as_deref()
    }

    /// Returns the image, if this worker or the server has it.
    pub fn get(&self, hash: &Hash) -> Option<Arc<Vec<u8>>> {
        let now = Instant::now();
        if let Some(held) = self.memory().get_mut(hash) {
            held.used = now;
            return Some(held.image.clone());
        }
        // Asked without the lock: a slow disk delays this thread only.
        let image = Arc::new(self.store.as_ref()?.find(hash)?);
        self.keep(*hash, image.clone(), false, now);
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
        self.keep(hash, Arc::new(image), true, Instant::now());
        Ok(true)
    }

    /// Offers an image that the driver has accepted, for the client's other workers.
    pub fn accepted(&self, hash: &Hash, image: &Arc<Vec<u8>>) {
        let first = self.memory().get_mut(hash).is_some_and(|held| std::mem::take(&mut held.unproven));
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
    fn idle_images_leave_memory_oldest_first() {
        let images = Images::new(None, 1 << 30);
        let start = Instant::now();
        let add = |n: u8, after: u64| {
            images.keep([n; 32], Arc::new(vec![n; 16 << 20]), true, start + Duration::from_secs(after));
        };
        let held = || (0..=9).filter(|n| images.memory().contains_key(&[*n; 32])).collect::<Vec<u8>>();
        (0..6).for_each(|n| add(n, n.into()));
        assert_eq!(held(), [0, 1, 2, 3, 4, 5], "an earlier library sends none again");
        images.forget_idle();
        add(6, 10);
        assert_eq!(held().len(), 7, "a request for any of them may be on its way");
        let used = images.memory().get(&[1; 32]).map(|held| held.image.clone());
        add(7, 64);
        assert_eq!(held(), [1, 5, 6, 7], "those idle for a minute go, but for one in use");
        drop(used);
        add(8, 200);
        assert_eq!(held(), [5, 6, 7, 8]);
    }

    #[test]
    fn an_image_of_another_hash_is_none() {
        let images = Images::new(None, 1 << 20);
        assert_eq!(images.add([1; 32], 3, b"abc"), Err(()));
        assert!(images.get(&[1; 32]).is_none());
        assert_eq!(images.add([1; 32], MAX_IMAGE + 1, b""), Err(()));
    }
}
