//! Folders that workers fill: measured and deleted so that no depth, name or mode hides anything.
//!
//! A worker is presumed to be controlled by its client. So each step goes from a descriptor to a
//! name below it, never along a path, and never through a link.

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::fs::{Metadata, Permissions, ReadDir};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use crate::starter::code::Measured;
use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, OFlag, openat, renameat};
use nix::sys::stat::Mode;
use nix::unistd::{UnlinkatFlags, unlinkat};
use tracing::warn;

/// Bytes of a folder that has too much, that goes too deep, or that the server may not read.
pub(super) const BEYOND: u64 = u64::MAX;
/// Least bytes that a file or folder counts: empty ones fill a file system, too.
pub(super) const LEAST: u64 = 4096;
/// Most folders inside each other. The driver makes two.
const MAX_DEPTH: usize = 64;

/// Returns the disk space of a file or folder.
fn whole(facts: &Metadata) -> u64 {
    // Blocks, not bytes: a million small files fill a disk, too.
    LEAST.max(facts.blocks() * 512)
}

impl Measured {
    pub(super) const NOTHING: Self = Self { bytes: 0, part: 0, used: SystemTime::UNIX_EPOCH };

    pub(super) fn add(&mut self, facts: &Metadata) {
        self.bytes = self.bytes.saturating_add(whole(facts));
        let links = if facts.is_dir() { 1 } else { facts.nlink().max(1) };
        self.part = self.part.saturating_add(whole(facts) / links);
        if !facts.is_dir() {
            // Most file systems note a read at least once a day. Listing a folder is no use of it.
            let times = [facts.modified(), facts.accessed()].into_iter().flatten();
            self.used = times.fold(self.used, SystemTime::max);
        }
    }

    /// Returns the measure of a single file.
    pub(super) fn of_file(facts: &Metadata) -> Self {
        let mut found = Self::NOTHING;
        found.add(facts);
        found
    }
}

/// A folder that needs no right of its own: its mode cannot keep its owner out.
pub(super) struct Folder(pub(super) OwnedFd);

impl Folder {
    pub(super) fn at(path: &Path) -> io::Result<Self> {
        Self::below(AT_FDCWD, path.as_os_str())
    }

    pub(super) fn below(parent: impl AsFd, name: &OsStr) -> io::Result<Self> {
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        Ok(Self(openat(parent, name, flags, Mode::empty())?))
    }

    /// Returns a path to exactly this folder, which lasts as long as the descriptor.
    fn path(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.0.as_raw_fd()).into()
    }

    /// Lists the entries; the standard library looks at each one from a descriptor, too.
    fn list(&self) -> io::Result<ReadDir> {
        std::fs::read_dir(self.path())
    }

    /// As [`Folder::list`], also if its owner, this process's user, took a right away.
    pub(super) fn entries(&self) -> io::Result<ReadDir> {
        // A folder may be listed without the right to look at its entries.
        self.unlock().and_then(|()| self.list())
    }

    /// Returns `None` if its owner, this process's user, took away the right to what was asked.
    fn unless_locked<T>(&self, asked: io::Result<T>) -> io::Result<Option<T>> {
        match asked {
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
                let owner = nix::sys::stat::fstat(&self.0)?.st_uid;
                if owner == nix::unistd::geteuid().as_raw() { Ok(None) } else { Err(e) }
            }
            asked => asked.map(Some),
        }
    }

    /// Gives the owner all rights.
    fn unlock(&self) -> io::Result<()> {
        let mode = Mode::from_bits_truncate(nix::sys::stat::fstat(&self.0)?.st_mode);
        match mode.contains(Mode::S_IRWXU) {
            true => Ok(()),
            false => std::fs::set_permissions(self.path(), Permissions::from_mode(0o700)),
        }
    }
}

/// Returns `None` instead of the error of an entry that was deleted or replaced meanwhile.
pub(super) fn still_there<T>(found: io::Result<T>) -> io::Result<Option<T>> {
    match found {
        Ok(found) => Ok(Some(found)),
        Err(e)
            if matches!(
                e.raw_os_error(),
                Some(nix::libc::ENOENT | nix::libc::ENOTDIR | nix::libc::ELOOP)
            ) =>
        {
            Ok(None)
        }
        Err(e) => Err(e),
    }
}

/// Measures a file or folder; `None`: it is gone, or not readable now, which it logs.
pub(super) fn measured_entry(path: &Path, most: u64) -> Option<Measured> {
    let found = path.symlink_metadata().and_then(|facts| match facts.is_dir() {
        true => measured(path, most),
        false => Ok(Measured::of_file(&facts)),
    });
    match found {
        Ok(found) => Some(found),
        Err(e) => {
            if e.kind() != io::ErrorKind::NotFound {
                warn!("cache {}: not measured: {e}; the next check tries again", path.display());
            }
            None
        }
    }
}

/// Measures a folder with all that is in it, up to `most` bytes; more are [`BEYOND`].
///
/// So is a folder of this process's user that it may not look into: its owner took the right away.
pub(super) fn measured(path: &Path, most: u64) -> io::Result<Measured> {
    let mut found = Measured { bytes: LEAST, part: LEAST, ..Measured::NOTHING };
    let all = measure(path, most, &mut found)?;
    Ok(if all.is_some() { found } else { Measured { bytes: BEYOND, ..found } })
}

/// Measures all of a folder; `None` if that is too much, too deep or locked.
fn measure(path: &Path, most: u64, found: &mut Measured) -> io::Result<Option<()>> {
    let folder = Folder::at(path)?;
    let Some(entries) = folder.unless_locked(folder.list())? else { return Ok(None) };
    let mut open = vec![(folder, entries)];
    loop {
        let depth = open.len();
        let Some((folder, entries)) = open.last_mut() else { return Ok(Some(())) };
        let Some(entry) = entries.next().transpose()? else {
            open.pop();
            continue;
        };
        let Some(facts) = folder.unless_locked(still_there(entry.metadata()))? else { return Ok(None) };
        let Some(facts) = facts else { continue };
        found.add(&facts);
        if found.bytes > most || depth >= MAX_DEPTH {
            return Ok(None);
        }
        if !facts.is_dir() {
            continue;
        }
        let inner = folder.unless_locked(still_there(Folder::below(&folder.0, &entry.file_name())))?;
        let Some(inner) = inner else { return Ok(None) };
        let Some(inner) = inner else { continue };
        let Some(entries) = inner.unless_locked(inner.list())? else { return Ok(None) };
        open.push((inner, entries));
    }
}

/// Measures files of a folder that a process has deleted and keeps open; `seen` has their inodes.
///
/// The kernel shows them by their last path, below `/proc`. A path that is too long for it counts
/// by its file system. A process that has exited keeps none.
pub(super) fn kept(process: u32, folder: &Path, seen: &mut HashSet<u64>) -> io::Result<u64> {
    let device = std::fs::metadata(folder).map(|facts| facts.dev()).ok();
    let mut bytes: u64 = 0;
    // The process may close a descriptor, or exit, at any moment.
    for link in descriptors(process)? {
        let path = std::fs::read_link(&link);
        let Ok(facts) = std::fs::metadata(&link) else { continue };
        let inside = match path {
            Ok(path) => path.starts_with(folder),
            Err(e) => e.raw_os_error() == Some(Errno::ENAMETOOLONG as i32) && Some(facts.dev()) == device,
        };
        if inside && facts.is_file() && facts.nlink() == 0 && seen.insert(facts.ino()) {
            bytes = bytes.saturating_add(whole(&facts));
        }
    }
    Ok(bytes)
}

/// Returns the links to what a process has open.
///
/// A worker's threads share one table, and a thread that has exited shows none.
fn descriptors(process: u32) -> io::Result<Vec<PathBuf>> {
    let ended = |e: &io::Error| e.kind() == io::ErrorKind::NotFound;
    let threads = match std::fs::read_dir(format!("/proc/{process}/task")) {
        Ok(threads) => threads,
        Err(e) if ended(&e) => return Ok(Vec::new()),
        Err(e) => return Err(e),
    };
    for thread in threads.flatten() {
        let open: Vec<_> = match std::fs::read_dir(thread.path().join("fd")) {
            Ok(open) => open.flatten().map(|entry| entry.path()).collect(),
            Err(e) if ended(&e) => continue,
            Err(e) => return Err(e),
        };
        if !open.is_empty() {
            return Ok(open);
        }
    }
    Ok(Vec::new())
}

/// Moves a folder into `gone`, where no worker's rights reach what is in it.
///
/// [`empty`] deletes it from there.
pub(super) fn discard(path: &Path, gone: &Path) -> io::Result<()> {
    let folder = Folder::at(path)?;
    discard_from(AT_FDCWD, path.as_os_str(), &folder, &Folder::at(gone)?).map(drop)
}

/// Moves an open folder into `gone`; returns its new name.
fn discard_from(parent: impl AsFd, name: &OsStr, folder: &Folder, gone: &Folder) -> io::Result<OsString> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    // The kernel changes the entry `..` of a moved folder, which takes a right of that folder.
    folder.unlock()?;
    loop {
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let fresh = OsString::from(format!("{}-{n}", std::process::id()));
        match renameat(parent.as_fd(), name, &gone.0, fresh.as_os_str()) {
            Ok(()) => return Ok(fresh),
            // An earlier process of the same id left it.
            Err(Errno::ENOTEMPTY | Errno::EEXIST) => {}
            Err(e) => return Err(e.into()),
        }
    }
}

/// Deletes all that is in `gone`.
///
/// A folder inside a folder moves up first, so that no depth takes descriptors. If a dying worker
/// still adds files, these stay for the next call.
pub(super) fn empty(gone: &Path) -> io::Result<()> {
    let gone = Folder::at(gone)?;
    let mut left = Vec::new();
    for entry in gone.list()? {
        left.push(entry?.file_name());
    }
    let mut failed = None;
    while let Some(name) = left.pop() {
        // An entry that another user made stays, and the others go.
        if let Err(e) = empty_one(&gone, &name, &mut left) {
            failed.get_or_insert(e);
        }
    }
    failed.map_or(Ok(()), Err)
}

/// Deletes one entry of `gone`; the folders inside it become entries, too, which `left` gets.
fn empty_one(gone: &Folder, name: &OsStr, left: &mut Vec<OsString>) -> io::Result<()> {
    let Some(folder) = still_there(Folder::below(&gone.0, name))? else {
        return still_there(unlink(gone, name, UnlinkatFlags::NoRemoveDir)).map(drop);
    };
    folder.unlock()?;
    for entry in folder.list()? {
        let name = entry?.file_name();
        match still_there(Folder::below(&folder.0, &name))? {
            Some(inner) => {
                let moved = discard_from(&folder.0, &name, &inner, gone);
                left.extend(still_there(moved)?);
            }
            None => drop(still_there(unlink(&folder, &name, UnlinkatFlags::NoRemoveDir))?),
        }
    }
    remove_empty(gone, name)
}

/// Removes a folder, unless something is in it.
pub(super) fn remove_empty(parent: &Folder, name: &OsStr) -> io::Result<()> {
    match unlink(parent, name, UnlinkatFlags::RemoveDir) {
        Err(e) if e.kind() == io::ErrorKind::DirectoryNotEmpty => Ok(()),
        removed => still_there(removed).map(drop),
    }
}

pub(super) fn unlink(folder: &Folder, name: &OsStr, how: UnlinkatFlags) -> io::Result<()> {
    Ok(unlinkat(&folder.0, name, how)?)
}

#[cfg(test)]
pub(super) mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    const KIB: u64 = 1024;

    /// Deletes a folder as [`super::super::Cache`] does.
    fn delete(root: &Path, folder: &Path) {
        let gone = root.join("gone");
        std::fs::create_dir_all(&gone).unwrap();
        discard(folder, &gone).unwrap();
        empty(&gone).unwrap();
        assert!(!folder.exists());
        assert_eq!(std::fs::read_dir(&gone).unwrap().count(), 0, "nothing is left");
    }

    /// Acts as a user from whom a mode can keep something: it keeps nothing from root.
    pub fn unprivileged(act: impl FnOnce() + Send) {
        const NOBODY: nix::libc::uid_t = 65534;
        std::thread::scope(|scope| {
            let acts = scope.spawn(|| {
                if nix::unistd::geteuid().is_root() {
                    // SAFETY: it reads no memory, and changes the user of this thread alone.
                    let changed = unsafe { nix::libc::syscall(nix::libc::SYS_setresuid, -1, NOBODY, -1) };
                    assert_eq!(changed, 0);
                }
                act();
            });
            acts.join().unwrap();
        });
    }

    /// Makes folders inside each other, beyond the longest path, with a file in the last one.
    fn deep(top: &Path, depth: usize, bytes: usize) {
        std::fs::create_dir(top).unwrap();
        let mut folder = Folder::at(top).unwrap();
        let name = "x".repeat(200);
        for _ in 0..depth {
            nix::sys::stat::mkdirat(&folder.0, name.as_str(), Mode::S_IRWXU).unwrap();
            folder = Folder::below(&folder.0, OsStr::new(&name)).unwrap();
        }
        std::fs::write(folder.path().join("code"), vec![1; bytes]).unwrap();
    }

    #[test]
    fn no_depth_hides_a_file_and_none_keeps_it() {
        let root = tempfile::tempdir().unwrap();
        for (depth, seen) in [(3, true), (60, true), (100, false), (3000, false)] {
            let folder = root.path().join("folder");
            deep(&folder, depth, 1 << 20);
            let found = measured(&folder, 1 << 30).unwrap().bytes;
            match seen {
                true => assert!((1 << 20..2 << 20).contains(&found), "{depth}: {found}"),
                false => assert_eq!(found, BEYOND, "{depth}"),
            }
            delete(root.path(), &folder);
        }
    }

    #[test]
    fn a_mode_hides_nothing_and_keeps_nothing() {
        modes_hide_and_keep_nothing(false);
        unprivileged(|| modes_hide_and_keep_nothing(true));
    }

    fn modes_hide_and_keep_nothing(heeds_modes: bool) {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("folder");
        let modes = ["folder", "folder/inner"].into_iter().flat_map(|f| [0o0, 0o100, 0o400].map(|m| (f, m)));
        for (locked, mode) in modes {
            std::fs::create_dir_all(folder.join("inner/innermost")).unwrap();
            std::fs::write(folder.join("inner/innermost/code"), vec![1; 1 << 20]).unwrap();
            let locked = root.path().join(locked);
            std::fs::set_permissions(&locked, Permissions::from_mode(mode)).unwrap();
            let found = measured(&folder, 1 << 30).unwrap().bytes;
            assert!(found == BEYOND || !heeds_modes && found > 1 << 20, "{mode:o}: {found}");
            delete(root.path(), &folder);
        }
    }

    #[test]
    fn empty_folders_and_files_count() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("folder");
        for n in 0..200 {
            std::fs::create_dir_all(folder.join(format!("{n}"))).unwrap();
            std::fs::write(folder.join(format!("{n}-file")), b"").unwrap();
        }
        assert!(measured(&folder, 1 << 30).unwrap().bytes >= 400 * LEAST);
        assert_eq!(measured(&folder, 300 * LEAST).unwrap().bytes, BEYOND);
        delete(root.path(), &folder);
    }

    #[test]
    fn a_deleted_file_counts_once_as_long_as_it_is_open() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().canonicalize().unwrap().join("folder");
        std::fs::create_dir(&folder).unwrap();
        let of_this_process = |folder: &Path| {
            let mut seen = HashSet::new();
            kept(std::process::id(), folder, &mut seen).unwrap()
        };
        let name = folder.join("code");
        std::fs::write(&name, vec![1; 1 << 20]).unwrap();
        let (file, again) = (std::fs::File::open(&name).unwrap(), std::fs::File::open(&name).unwrap());
        assert_eq!(of_this_process(&folder), 0, "its folder counts it");
        std::fs::remove_file(&name).unwrap();
        assert!((1 << 20..2 << 20).contains(&of_this_process(&folder)));
        assert_eq!(of_this_process(root.path().join("other").as_path()), 0, "another folder's");
        drop((file, again));
        assert_eq!(of_this_process(&folder), 0);
        assert_eq!(kept(u32::MAX, &folder, &mut HashSet::new()).unwrap(), 0, "an exited process");
    }

    #[test]
    fn links_lead_nowhere() {
        let root = tempfile::tempdir().unwrap();
        let (folder, other) = (root.path().join("folder"), root.path().join("other"));
        std::fs::create_dir(&folder).unwrap();
        std::fs::create_dir(&other).unwrap();
        std::fs::write(other.join("kept"), vec![1; 100 * KIB as usize]).unwrap();
        symlink(&other, folder.join("link")).unwrap();
        symlink(other.join("kept"), folder.join("file")).unwrap();
        nix::unistd::mkfifo(&folder.join("pipe"), Mode::S_IRWXU).unwrap();
        assert!(measured(&folder, 1 << 30).unwrap().bytes < 100 * KIB);
        delete(root.path(), &folder);
        assert!(other.join("kept").exists());
        symlink(&other, &folder).unwrap();
        assert!(measured(&folder, 1 << 30).is_err(), "a link in a folder's place is none");
    }
}
