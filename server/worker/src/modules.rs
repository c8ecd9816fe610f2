//! Images (cubins, fatbins, PTX) by content: the client sends none that the server has.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File, OpenOptions};
use std::io::Read as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

/// Longest image, in bytes.
pub const MAX_IMAGE: u64 = 4 << 30;

/// Bytes that stay free for others on the file system, unless a tenth of it is less.
const KEEP_FREE: u64 = 5 << 30;

type Hash = [u8; 32];

/// Images in memory and, for all workers of a client, on disk.
pub struct Images {
    folder: Option<Folder>,
    memory: Mutex<HashMap<Hash, Arc<Vec<u8>>>>,
    /// Images in memory that the driver has not accepted yet.
    unproven: Mutex<HashSet<Hash>>,
    partial: Mutex<HashMap<Hash, Vec<u8>>>,
    limit: u64,
}

impl Images {
    /// Starts with the client's folder and its size in bytes, if it has one.
    ///
    /// Incomplete images may together take `limit` bytes; a single image may always have the full
    /// length.
    pub fn new(folder: Option<(&str, u64)>, limit: u64) -> Self {
        let folder = folder.map(|(path, most)| Folder { path: path.into(), most });
        Self {
            folder,
            memory: Mutex::default(),
            unproven: Mutex::default(),
            partial: Mutex::default(),
            limit,
        }
    }

    /// Returns the image, if this server has it; a file counts only if its content has the hash.
    pub fn get(&self, hash: &Hash) -> Option<Arc<Vec<u8>>> {
        let memory = || self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(image) = memory().get(hash) {
            return Some(image.clone());
        }
        // Read without the lock: a slow disk delays this thread only.
        let image = self.folder.as_ref()?.read(hash)?;
        if blake3::hash(&image) != blake3::Hash::from_bytes(*hash) {
            return None;
        }
        let image = Arc::new(image);
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

    /// Stores an image that the driver has accepted, for the client's other workers.
    pub fn accepted(&self, hash: &Hash, image: &[u8]) {
        let first = self.unproven.lock().unwrap_or_else(PoisonError::into_inner).remove(hash);
        if let Some(folder) = self.folder.as_ref().filter(|_| first) {
            folder.store(hash, image);
        }
    }
}

/// The client's images on disk, each in a file named after its hash.
struct Folder {
    path: PathBuf,
    /// Bytes that all files may take.
    most: u64,
}

impl Folder {
    fn file(&self, hash: &Hash) -> PathBuf {
        let name: String = hash.iter().map(|b| format!("{b:02x}")).collect();
        self.path.join(name)
    }

    /// Reads an image; a link, a pipe or any other kind of file counts as absent.
    fn read(&self, hash: &Hash) -> Option<Vec<u8>> {
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
        let file = OpenOptions::new().read(true).custom_flags(flags).open(self.file(hash)).ok()?;
        let facts = file.metadata().ok().filter(|facts| facts.is_file() && facts.len() <= MAX_IMAGE)?;
        let mut image = Vec::with_capacity(facts.len() as usize);
        // One byte more: the file may have grown since.
        File::take(file, facts.len() + 1).read_to_end(&mut image).ok()?;
        (image.len() as u64 == facts.len()).then_some(image)
    }

    /// Writes an image for the client's other workers, completely or not at all.
    ///
    /// If necessary, it replaces the images that were unused for longest. A cache that cannot be
    /// written only costs time.
    fn store(&self, hash: &Hash, image: &[u8]) {
        if !self.make_room(image.len() as u64) {
            return;
        }
        let file = self.file(hash);
        let temporary = file.with_extension(format!("{}", std::process::id()));
        let written = fs::write(&temporary, image).and_then(|()| fs::rename(&temporary, &file));
        if written.is_err() {
            let _ = fs::remove_file(&temporary);
        }
    }

    fn make_room(&self, bytes: u64) -> bool {
        if bytes > self.most || !leaves_room(&self.path, bytes) {
            return false;
        }
        let mut images: Vec<(SystemTime, u64, PathBuf)> = fs::read_dir(&self.path)
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|entry| {
                let facts = entry.metadata().ok()?;
                let used = facts.modified().ok()?.max(facts.accessed().ok()?);
                // Blocks, not bytes: a million small files fill a disk, too.
                Some((used, facts.blocks() * 512, entry.path()))
            })
            .collect();
        images.sort();
        let mut total = images.iter().map(|(_, bytes, _)| bytes).sum::<u64>() + bytes;
        for (_, bytes, path) in images {
            if total <= self.most {
                break;
            }
            if fs::remove_file(path).is_ok() {
                total -= bytes;
            }
        }
        total <= self.most
    }
}

/// Returns `true` if the file system has room for `bytes` and the reserve for others.
fn leaves_room(folder: &Path, bytes: u64) -> bool {
    nix::sys::statvfs::statvfs(folder).is_ok_and(|facts| {
        let (all, free) = (facts.blocks(), facts.blocks_available());
        let unit = facts.fragment_size();
        let keep = KEEP_FREE.min(all.saturating_mul(unit) / 10);
        free.saturating_mul(unit) >= bytes.saturating_add(keep)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(n: u8, bytes: usize) -> (Hash, Vec<u8>) {
        let image = vec![n; bytes];
        (*blake3::hash(&image).as_bytes(), image)
    }

    fn images(folder: &Path, most: u64) -> Images {
        Images::new(folder.to_str().map(|path| (path, most)), 1 << 20)
    }

    fn on_disk(folder: &Path) -> usize {
        fs::read_dir(folder).unwrap().count()
    }

    #[test]
    fn an_image_reaches_the_disk_once_the_driver_has_accepted_it() {
        let folder = tempfile::tempdir().unwrap();
        let first = images(folder.path(), 1 << 20);
        let (hash, bytes) = image(1, 5000);
        assert_eq!(first.add(hash, 5000, &bytes[..4000]), Ok(false));
        assert_eq!(first.add(hash, 5000, &bytes[4000..]), Ok(true));
        assert!(first.get(&hash).is_some());
        assert_eq!(on_disk(folder.path()), 0);
        first.accepted(&hash, &bytes);
        assert_eq!(on_disk(folder.path()), 1);
        assert_eq!(*images(folder.path(), 1 << 20).get(&hash).unwrap(), bytes);
    }

    #[test]
    fn the_folder_stays_within_its_size() {
        let folder = tempfile::tempdir().unwrap();
        let images = images(folder.path(), 100 << 10);
        for n in 0..40 {
            let (hash, bytes) = image(n, 10 << 10);
            assert_eq!(images.add(hash, bytes.len() as u64, &bytes), Ok(true));
            images.accepted(&hash, &bytes);
            let taken: u64 = fs::read_dir(folder.path())
                .unwrap()
                .map(|e| e.unwrap().metadata().unwrap().blocks() * 512)
                .sum();
            assert!(taken <= 100 << 10, "{taken}");
        }
        assert!(on_disk(folder.path()) > 5);
        let (hash, bytes) = image(41, 200 << 10);
        assert_eq!(images.add(hash, bytes.len() as u64, &bytes), Ok(true));
        images.accepted(&hash, &bytes);
        assert!(
            !folder.path().join(Folder { path: "".into(), most: 0 }.file(&hash)).exists(),
            "too large to keep"
        );
    }

    #[test]
    fn only_a_regular_file_of_the_content_is_an_image() {
        let folder = tempfile::tempdir().unwrap();
        let images = images(folder.path(), 1 << 20);
        let (hash, bytes) = image(1, 100);
        let path = Folder { path: folder.path().into(), most: 0 }.file(&hash);
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert!(images.get(&hash).is_none(), "a pipe");
        fs::remove_file(&path).unwrap();
        let other = folder.path().join("other");
        fs::write(&other, &bytes).unwrap();
        std::os::unix::fs::symlink(&other, &path).unwrap();
        assert!(images.get(&hash).is_none(), "a link");
        fs::remove_file(&path).unwrap();
        fs::write(&path, &bytes[1..]).unwrap();
        assert!(images.get(&hash).is_none(), "other content");
        fs::write(&path, &bytes).unwrap();
        assert!(images.get(&hash).is_some());
    }
}
