//! Images (cubins, fatbins, PTX) by content: one that the server has is not sent again.

use std::collections::HashMap;
use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

/// Longest image, in bytes.
pub const MAX_IMAGE: u64 = 4 << 30;

type Hash = [u8; 32];

/// See the module.
pub struct Images {
    folder: Option<PathBuf>,
    memory: Mutex<HashMap<Hash, Arc<Vec<u8>>>>,
    partial: Mutex<HashMap<Hash, Vec<u8>>>,
    limit: u64,
}

impl Images {
    /// With a folder that is shared by the server's workers, if there is one. What has come of images that are not whole yet
    /// may take `limit` bytes, but one image may always be as long as images may be.
    pub fn new(folder: Option<&str>, limit: u64) -> Self {
        Self { folder: folder.map(PathBuf::from), memory: Mutex::default(), partial: Mutex::default(), limit }
    }

    fn file(&self, hash: &Hash) -> Option<PathBuf> {
        let name: String = hash.iter().map(|b| format!("{b:02x}")).collect();
        self.folder.as_ref().map(|folder| folder.join(name))
    }

    /// The image, if this server has it. What a file says is believed only if its content has the hash.
    pub fn get(&self, hash: &Hash) -> Option<Arc<Vec<u8>>> {
        let mut memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(image) = memory.get(hash) {
            return Some(image.clone());
        }
        let image = fs::read(self.file(hash)?).ok()?;
        if blake3::hash(&image) != blake3::Hash::from_bytes(*hash) {
            return None;
        }
        let image = Arc::new(image);
        memory.insert(*hash, image.clone());
        Some(image)
    }

    /// Takes the next piece of an image; true when it is whole and has the hash.
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
        self.store(&hash, &image);
        self.memory.lock().unwrap_or_else(PoisonError::into_inner).insert(hash, Arc::new(image));
        Ok(true)
    }

    /// Writes the image for other workers, whole or not at all. A cache that cannot be written only costs time.
    fn store(&self, hash: &Hash, image: &[u8]) {
        let Some(file) = self.file(hash) else { return };
        let temporary = file.with_extension(format!("{}", std::process::id()));
        let written = fs::write(&temporary, image).and_then(|()| fs::rename(&temporary, &file));
        if written.is_err() {
            let _ = fs::remove_file(&temporary);
        }
    }
}
