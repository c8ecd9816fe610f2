//! Small JSON documents on disk, replaced as a whole, so that a crash leaves the old or the new one.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use serde::{Serialize, de::DeserializeOwned};

/// A document could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The file system refused.
    #[error("{}: {error}", path.display())]
    Io {
        /// Of what.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// The file holds something else.
    #[error("{}: not what gpuserver wrote ({error}); move it away or restore a copy", path.display())]
    Content {
        /// Of what.
        path: PathBuf,
        /// Why.
        error: serde_json::Error,
    },
    /// Another process has the state directory.
    #[error("{} is in use by another gpuserver process", .0.display())]
    Locked(PathBuf),
}

fn io_error(path: &Path) -> impl FnOnce(io::Error) -> StoreError {
    move |error| StoreError::Io { path: path.into(), error }
}

/// Reads a document; one that is not there is the default.
pub fn read<T: DeserializeOwned + Default>(path: &Path) -> Result<T, StoreError> {
    match fs::read(path) {
        Ok(bytes) => {
            serde_json::from_slice(&bytes).map_err(|error| StoreError::Content { path: path.into(), error })
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(T::default()),
        Err(error) => Err(StoreError::Io { path: path.into(), error }),
    }
}

/// Replaces a document. Only its owner can read it.
pub fn write<T: Serialize>(path: &Path, value: &T) -> Result<(), StoreError> {
    let bytes =
        serde_json::to_vec_pretty(value).map_err(|error| StoreError::Content { path: path.into(), error })?;
    write_bytes(path, &bytes, 0o600)
}

/// Replaces a file by one with these bytes and this mode.
pub fn write_bytes(path: &Path, bytes: &[u8], mode: u32) -> Result<(), StoreError> {
    let folder = path.parent().unwrap_or(Path::new("/"));
    let fresh = path.with_extension("new");
    let written = (|| {
        let _ = fs::remove_file(&fresh);
        let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&fresh)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&fresh, path)?;
        File::open(folder)?.sync_all()
    })();
    written.map_err(io_error(path))
}

/// The right to change a state directory; the kernel takes it back when the process ends.
#[derive(Debug)]
pub struct Lock(#[expect(dead_code, reason = "held, not used")] nix::fcntl::Flock<File>);

/// Makes the state directory where it is missing and locks it.
pub fn lock(state_dir: &Path) -> Result<Lock, StoreError> {
    use std::os::unix::fs::DirBuilderExt;
    fs::DirBuilder::new().recursive(true).mode(0o750).create(state_dir).map_err(io_error(state_dir))?;
    let path = state_dir.join("lock");
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
