//! Disk cache of workers, which lets the next program start sooner.
//!
//! It may be deleted at any time.
//! Images lie under the hash of their content, which a worker checks before it uses one. The driver
//! does not check its own files, compiled from PTX. Each client has its own folder for both, so
//! that no client reads, fills or changes another's. Each user with a lease of the user's own has
//! one for compiled files.

use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use tracing::{debug, warn};

use crate::clock::wall;
use crate::config::{Config, Origin};

/// Folder of images, with one for each client.
const IMAGES: &str = "modules";
/// Divisor of the cache's limit for one client's images, so that other clients' images stay.
const CLIENT_SHARE: u64 = 4;
/// Interval of [`Cache::trim`].
pub const TRIM_INTERVAL: Duration = Duration::from_secs(60);
/// Age up to which an unused file or folder stays: a worker may be writing it.
const FRESH_GRACE: Duration = Duration::from_secs(60);

/// Folder of the cache, and its limit in bytes.
#[derive(Debug, Clone)]
pub struct Cache {
    folder: PathBuf,
    max: u64,
}

impl Cache {
    /// Creates the folders; returns `None` without a cache, where programs start more slowly.
    pub fn open(config: &Config) -> Option<Self> {
        let folder = match std::env::var_os("CACHE_DIRECTORY") {
            Some(folder) if !folder.is_empty() => PathBuf::from(folder),
            _ => Self::folder(config),
        };
        Self::at(folder, config.cache_max)
    }

    /// Returns the folder of a server whose unit names no other.
    pub fn folder(config: &Config) -> PathBuf {
        match config.origin("state_dir") {
            Origin::Default => "/var/cache/gpuserver".into(),
            _ => config.state_dir.join("cache"),
        }
    }

    fn at(folder: PathBuf, max: u64) -> Option<Self> {
        let cache = Self { folder, max };
        if max == 0 {
            cache.trim(wall());
            return None;
        }
        match made(&cache.folder.join(IMAGES)).and_then(|()| made(&cache.folder.join("compiled"))) {
            Ok(()) => Some(cache),
            Err(e) => {
                warn!("cache {}: not created: {e}; workers keep no images", cache.folder.display());
                None
            }
        }
    }

    /// Returns the folder of a client's images (cubins, fatbins, PTX), and its size in bytes.
    pub fn images(&self, client: &str) -> Option<(PathBuf, u64)> {
        Some((self.of_client(IMAGES, client, None)?, self.max / CLIENT_SHARE))
    }

    /// Returns the folder of the driver's own cache (`CUDA_CACHE_PATH`) for a client, or for the
    /// user of the client whose lease it is.
    pub fn compiled(&self, client: &str, user: Option<u32>) -> Option<PathBuf> {
        self.of_client("compiled", client, user)
    }

    fn of_client(&self, kind: &str, client: &str, user: Option<u32>) -> Option<PathBuf> {
        let name = blake3::hash(client.as_bytes()).to_hex();
        let user = user.map(|uid| format!("-{uid}")).unwrap_or_default();
        let folder = self.folder.join(kind).join(format!("{}{user}", &name[..32]));
        made(&folder)
            .inspect_err(|e| {
                warn!("cache {}: not created: {e}; workers continue without a cache", folder.display())
            })
            .ok()?;
        Some(folder)
    }

    /// Returns the images of all clients, and those of a version that did not separate clients.
    fn all_images(&self) -> Vec<Entry> {
        let folders = std::fs::read_dir(self.folder.join(IMAGES)).into_iter().flatten().flatten();
        let all = folders.flat_map(|entry| match entry.path() {
            folder if folder.is_dir() => entries(&folder),
            file => vec![measured(file)],
        });
        all.collect()
    }

    /// Deletes the least recently used entries until the rest fits the limit.
    ///
    /// An image is an entry, and so is a whole folder of compiled files.
    pub fn trim(&self, now: SystemTime) {
        let mut kept = self.all_images();
        kept.extend(entries(&self.folder.join("compiled")));
        kept.sort_by_key(|entry| entry.used);
        let mut total: u64 = kept.iter().map(|entry| entry.bytes).sum();
        for entry in kept {
            if total <= self.max || now.duration_since(entry.used).is_ok_and(|age| age < FRESH_GRACE) {
                return;
            }
            let gone = match entry.path.is_dir() {
                true => std::fs::remove_dir_all(&entry.path),
                false => std::fs::remove_file(&entry.path),
            };
            match gone {
                Ok(()) => total -= entry.bytes,
                Err(e) => warn!("cache {}: not deleted: {e}", entry.path.display()),
            }
            debug!("cache {}: least recently used, {} bytes: deleted", entry.path.display(), entry.bytes);
        }
    }
}

/// Creates a folder that only its owner can read.
fn made(folder: &Path) -> io::Result<()> {
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)
}

struct Entry {
    path: PathBuf,
    bytes: u64,
    used: SystemTime,
}

fn entries(folder: &Path) -> Vec<Entry> {
    let all = std::fs::read_dir(folder).into_iter().flatten().flatten();
    all.map(|entry| measured(entry.path())).collect()
}

/// Measures a file or folder: bytes of all files in it, and the last use of any of them.
fn measured(path: PathBuf) -> Entry {
    let (mut bytes, mut used) = (0, SystemTime::UNIX_EPOCH);
    let mut left = vec![path.clone()];
    while let Some(path) = left.pop() {
        let Ok(facts) = path.symlink_metadata() else { continue };
        if facts.is_dir() {
            left.extend(std::fs::read_dir(&path).into_iter().flatten().flatten().map(|e| e.path()));
        } else {
            // Blocks, not bytes: a million small files fill a disk, too.
            bytes += facts.blocks() * 512;
        }
        // Most file systems note a read at least once a day. Listing a folder is no use of it.
        let read = facts.accessed().ok().filter(|_| !facts.is_dir());
        used = facts.modified().ok().into_iter().chain(read).fold(used, SystemTime::max);
    }
    Entry { path, bytes, used }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB: u64 = 1024;

    fn aged(path: &Path, age: u64) {
        let then = wall() - Duration::from_secs(age);
        let times = std::fs::FileTimes::new().set_accessed(then).set_modified(then);
        std::fs::File::open(path).unwrap().set_times(times).unwrap();
    }

    fn file(path: &Path, kib: usize, age: u64) {
        std::fs::write(path, vec![1; kib * KIB as usize]).unwrap();
        aged(path, age);
    }

    #[test]
    fn trim_removes_the_least_recently_used_entries() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path().into(), 250 * KIB).unwrap();
        let (images, bytes) = cache.images("vm-a").unwrap();
        assert_eq!(bytes, 250 * KIB / CLIENT_SHARE);
        assert_ne!(cache.images("vm-b").unwrap().0, images);
        for (name, age) in [("old", 9000), ("older", 9999), ("new", 1000)] {
            file(&images.join(name), 100, age);
        }
        cache.trim(wall());
        let left = || {
            let mut names: Vec<_> =
                std::fs::read_dir(&images).unwrap().map(|e| e.unwrap().file_name()).collect();
            names.sort();
            names
        };
        assert_eq!(left(), ["new", "old"]);
        // A file in use stays even if it exceeds the limit.
        file(&images.join("now"), 1000, 0);
        cache.trim(wall());
        assert_eq!(left(), ["now"]);
    }

    #[test]
    fn each_client_and_user_has_a_folder_that_goes_whole() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path().into(), 250 * KIB).unwrap();
        let (a, b) = (cache.compiled("vm-a", None).unwrap(), cache.compiled("../../etc", None).unwrap());
        assert_eq!(cache.compiled("vm-a", None), Some(a.clone()));
        let (alice, bob) = (cache.compiled("vm-a", Some(1000)).unwrap(), cache.compiled("vm-a", Some(1001)));
        assert!(alice != a && Some(&alice) != bob.as_ref() && alice.parent() == a.parent());
        assert_eq!(cache.compiled("vm-a", Some(1000)), Some(alice));
        assert!(a != b && b.starts_with(folder.path().join("compiled")));
        for (folder, age) in [(&a, 5000), (&b, 500)] {
            file(&folder.join("index"), 200, age);
            aged(folder, age);
        }
        cache.trim(wall());
        assert!(!a.exists() && b.exists());
        assert_eq!(Cache::at(folder.path().into(), 0).map(|c| c.max), None);
        assert!(!b.exists(), "none is kept");
    }
}
