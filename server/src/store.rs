//! Small JSON documents on disk. Each is replaced as a whole, so that a crash leaves the old or the
//! new one.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Serialize, de::DeserializeOwned};

use crate::as_owner::as_owner_of;

/// Error of reading or writing a document.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The file system returned an error.
    #[error("{}: {error}", path.display())]
    Io {
        /// File or folder.
        path: PathBuf,
        /// Error of the system call.
        error: io::Error,
    },
    /// The file is not the expected JSON.
    #[error("{}: not what gpuserver wrote ({error}); move it away or restore a copy", path.display())]
    Content {
        /// File with the document.
        path: PathBuf,
        /// Error of the JSON parser.
        error: serde_json::Error,
    },
    /// Another process holds the state directory.
    #[error("{} is in use by another gpuserver process", .0.display())]
    Locked(PathBuf),
}

fn io_error(path: &Path) -> impl FnOnce(io::Error) -> StoreError {
    move |error| StoreError::Io { path: path.into(), error }
}

/// Reads a document; a missing one is the default.
pub fn read<T: DeserializeOwned + Default>(path: &Path) -> Result<T, StoreError> {
    match fs::read(path) {
        Ok(bytes) => {
            serde_json::from_slice(&bytes).map_err(|error| StoreError::Content { path: path.into(), error })
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(T::default()),
        Err(error) => Err(StoreError::Io { path: path.into(), error }),
    }
}

/// Returns the text of a document for its file.
pub fn text<T: Serialize>(value: &T) -> serde_json::Result<Vec<u8>> {
    serde_json::to_vec_pretty(value)
}

/// Replaces a document. Only the file's owner can read it.
pub fn write<T: Serialize>(path: &Path, value: &T) -> Result<(), StoreError> {
    let bytes = text(value).map_err(|error| StoreError::Content { path: path.into(), error })?;
    write_bytes(path, &bytes, 0o600)
}

/// Gives a file to the owner of its folder.
///
/// Root writes files, too, with commands on a stopped server. The server must be able to read them.
fn give_to_owner_of(folder: &Path, file: &File) -> io::Result<()> {
    use std::os::unix::fs::{MetadataExt, fchown};
    let owner = fs::metadata(folder)?;
    match nix::unistd::geteuid().is_root() {
        true => fchown(file, Some(owner.uid()), Some(owner.gid())),
        false => Ok(()),
    }
}

/// Replaces a file by one with these bytes and this mode.
pub fn write_bytes(path: &Path, bytes: &[u8], mode: u32) -> Result<(), StoreError> {
    let folder = path.parent().unwrap_or(Path::new("/"));
    let fresh = path.with_extension("new");
    let written = (|| {
        let _ = fs::remove_file(&fresh);
        let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&fresh)?;
        give_to_owner_of(folder, &file)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&fresh, path)?;
        File::open(folder)?.sync_all()
    })();
    written.map_err(io_error(path))
}

/// A document that several tasks change.
///
/// A write contains all changes made before it started. A task that waits for a change waits for
/// one such write only.
#[derive(Debug)]
pub struct Shared {
    path: PathBuf,
    changes: AtomicU64,
    /// Number of changes in the file; locked during a write.
    stored: Arc<tokio::sync::Mutex<u64>>,
}

impl Shared {
    /// Creates the handle of the document at `path`.
    pub fn new(path: PathBuf) -> Self {
        Self { path, changes: AtomicU64::new(0), stored: Arc::default() }
    }

    /// Counts a change. Call it while the lock that guards the document is still held.
    pub fn changed(&self) {
        self.changes.fetch_add(1, Ordering::SeqCst);
    }

    /// Returns when every change so far is in the file.
    ///
    /// `now` returns the [`text`] of the present document. It is not called if another task's write
    /// was enough.
    pub async fn store(&self, now: impl FnOnce() -> serde_json::Result<Vec<u8>>) -> Result<(), StoreError> {
        let wanted = self.changes.load(Ordering::SeqCst);
        let mut stored = self.stored.clone().lock_owned().await;
        if *stored >= wanted {
            return Ok(());
        }
        let has = self.changes.load(Ordering::SeqCst);
        let path = self.path.clone();
        let bytes = now().map_err(|error| StoreError::Content { path: path.clone(), error })?;
        // The write continues, and delays other writes, if the caller is cancelled.
        let written = tokio::task::spawn_blocking(move || {
            write_bytes(&path, &bytes, 0o600)?;
            *stored = has;
            Ok(())
        });
        written
            .await
            .unwrap_or_else(|e| Err(StoreError::Io { path: self.path.clone(), error: io::Error::other(e) }))
    }
}

/// Right to change a state directory. The kernel releases it when the process exits.
#[derive(Debug)]
pub struct Lock(#[expect(dead_code, reason = "held, not used")] nix::fcntl::Flock<File>);

/// Creates the state directory if it is missing, and locks it.
pub fn lock(state_dir: &Path) -> Result<Lock, StoreError> {
    use std::os::unix::fs::DirBuilderExt;
    fs::DirBuilder::new().recursive(true).mode(0o750).create(state_dir).map_err(io_error(state_dir))?;
    let path = state_dir.join("lock");
    let _owner = as_owner_of(state_dir).map_err(io_error(state_dir))?;
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(&path)
        .map_err(io_error(&path))?;
    match nix::fcntl::Flock::lock(file, nix::fcntl::FlockArg::LockExclusiveNonblock) {
        Ok(lock) => Ok(Lock(lock)),
        Err((_, nix::errno::Errno::EWOULDBLOCK)) => Err(StoreError::Locked(state_dir.into())),
        Err((_, errno)) => Err(StoreError::Io { path, error: errno.into() }),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[tokio::test]
    async fn changes_share_writes_and_none_is_answered_before_its_own() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("list.json");
        let (file, list) = (Arc::new(Shared::new(path.clone())), Arc::new(Mutex::new(Vec::new())));
        let writes = Arc::new(AtomicU64::new(0));
        let all = (0..200_u32).map(|i| {
            let (file, list, writes, path) = (file.clone(), list.clone(), writes.clone(), path.clone());
            tokio::spawn(async move {
                {
                    let mut list = list.lock().unwrap();
                    list.push(i);
                    file.changed();
                }
                let now = || {
                    writes.fetch_add(1, Ordering::SeqCst);
                    text(&*list.lock().unwrap())
                };
                file.store(now).await.unwrap();
                assert!(read::<Vec<u32>>(&path).unwrap().contains(&i), "{i} was answered too early");
            })
        });
        for task in all.collect::<Vec<_>>() {
            task.await.unwrap();
        }
        let writes = writes.load(Ordering::SeqCst);
        assert!(writes < 200, "{writes} writes for 200 changes");
        file.store(|| unreachable!("nothing changed")).await.unwrap();
    }

    #[tokio::test]
    async fn a_write_that_fails_is_tried_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("below/list.json");
        let file = Shared::new(path.clone());
        file.changed();
        assert!(file.store(|| text(&1)).await.is_err());
        fs::create_dir(folder.path().join("below")).unwrap();
        file.store(|| text(&2)).await.unwrap();
        assert_eq!(read::<u32>(&path).unwrap(), 2);
    }
}
