//! The cache's files and folders: their names, and the room for them.

use std::ffi::OsStr;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use crate::starter::code::Measured;
use nix::sys::statvfs::statvfs;

/// Folder of compiled code, with one for each user, each worker, and each client that shares.
pub(super) const COMPILED: &str = "compiled";
/// Folder of what the server deletes.
pub(super) const GONE: &str = "gone";
/// Bytes that stay free for others on the file system, unless a tenth of it is less.
const KEEP_FREE: u64 = 5 << 30;

/// A file or folder that the server keeps or deletes as a whole.
pub(super) struct Entry {
    pub(super) path: PathBuf,
    pub(super) found: Measured,
}

/// Creates a folder that only its owner can read.
pub(super) fn made(folder: &Path) -> io::Result<()> {
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)
}

/// Returns the name of a client's folders, which no client can choose.
pub(super) fn name_of(client: &str) -> String {
    let mut name = blake3::hash(client.as_bytes()).to_hex().to_string();
    name.truncate(32);
    name
}

/// Returns the name of the client whose folder of compiled code it is.
pub(super) fn client_of(path: &Path) -> &str {
    let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
    name.split(['-', '.']).next().unwrap_or_default()
}

/// Lists the names in a folder that are text; an absent folder is empty.
pub(super) fn names(folder: &Path) -> impl Iterator<Item = String> + use<> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok())
}

/// Lists a folder; an absent one is empty.
pub(super) fn paths(folder: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}

/// Returns `true` if the file system has room for `bytes` and the reserve for others.
pub(super) fn leaves_room(folder: &Path, bytes: u64) -> bool {
    statvfs(folder).is_ok_and(|facts| {
        let unit = facts.fragment_size();
        let keep = KEEP_FREE.min(facts.blocks().saturating_mul(unit) / 10);
        let free = facts.blocks_available().saturating_mul(unit);
        // Some file systems count no files.
        let files = facts.files() == 0 || facts.files_available() >= facts.files() / 10;
        files && free >= bytes.saturating_add(keep)
    })
}

/// Takes an absent file for a success.
pub(super) fn absent(e: io::Error) -> io::Result<()> {
    if e.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(e) }
}
