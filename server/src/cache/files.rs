//! The cache's files and folders: their names, and the room for them.

use std::ffi::OsStr;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use nix::sys::statvfs::statvfs;

use super::tree::Measured;

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
