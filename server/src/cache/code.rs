//! The folder of code that drivers compiled, for its owner: the server, or its starter.

use std::collections::HashSet;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Instant;

use tracing::{debug, warn};

use super::files::{COMPILED, GONE, absent, made, names};
use super::tree::{self, BEYOND, kept, measured_entry};
use crate::starter::code::{Found, Measured, Size, What};

/// Folders in one answer.
const PER_ANSWER: usize = 128;
/// Divisor of the cache's limit for the compiled code of one folder.
pub(super) const CLIENT_SHARE: u64 = 4;
/// Most bytes of compiled code that the driver is asked to keep.
const MOST_COMPILED: u64 = 1 << 30;

/// The folder of compiled code, with that of what is deleted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Code {
    folder: PathBuf,
    pub(super) max: u64,
}

impl Code {
    /// Returns the code below `folder`, of a cache of `max` bytes.
    pub fn new(folder: PathBuf, max: u64) -> Self {
        Self { folder, max }
    }

    /// Returns the folder above both.
    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the bytes of one folder.
    pub(super) fn share(&self) -> u64 {
        self.max / CLIENT_SHARE
    }

    /// Returns the bytes that the driver may keep as compiled code (`CUDA_CACHE_MAXSIZE`).
    ///
    /// The driver counts lengths. Even if the files take twice their length, as small ones may, all
    /// of them are within the share.
    pub(super) fn compiled_max(&self) -> u64 {
        MOST_COMPILED.min(self.share() / 2)
    }

    /// Returns the path of a folder of compiled code.
    pub(super) fn at(&self, name: &str) -> PathBuf {
        self.folder.join(COMPILED).join(name)
    }

    /// As [`Self::at`], for a name that came from another process.
    fn named(&self, name: &str) -> io::Result<PathBuf> {
        let plain = |b: u8| b.is_ascii_alphanumeric() || b == b'-' || b == b'.';
        match name.bytes().all(plain) && !name.is_empty() && !name.starts_with('.') {
            true => Ok(self.at(name)),
            false => Err(io::Error::other(format!("{name:?} is no folder of compiled code"))),
        }
    }

    /// Does what is asked, and returns the answers.
    pub fn perform(&self, what: &What) -> io::Result<Vec<Found>> {
        match what {
            What::Open => [COMPILED, GONE].iter().try_for_each(|kind| made(&self.folder.join(kind)))?,
            What::Create(name) => made(&self.named(name)?)?,
            What::Lend { store, worker, within } => {
                self.lend(&self.named(store)?, &self.named(worker)?, Instant::now() + *within)?;
            }
            What::TakeBack { worker, store } => self.take_back(&self.named(worker)?, &self.named(store)?),
            What::Names => {
                let all: Vec<_> = names(&self.folder.join(COMPILED)).collect();
                return Ok(all.chunks(PER_ANSWER).map(|some| Found::Names(some.to_vec())).collect());
            }
            What::Size(name, writers) => {
                return Ok(vec![Found::Size(self.size(&self.named(name)?, writers))]);
            }
            What::Measure => {
                let all = self.measure();
                return Ok(all.chunks(PER_ANSWER).map(|some| Found::Measured(some.to_vec())).collect());
            }
            What::Delete(name) => self.delete(&self.named(name)?),
        }
        Ok(Vec::new())
    }

    /// Measures a folder, with what its writers deleted and keep open; `None`: it cannot be
    /// measured.
    ///
    /// Writers of a folder that is gone may keep files that were deleted for them.
    fn size(&self, folder: &Path, writers: &[u32]) -> Option<Size> {
        let most = self.share().saturating_mul(2);
        let gone = self.folder.join(GONE);
        let (found, named) = match folder.exists() {
            true => (measured_entry(folder, most)?, folder),
            false => (Measured::NOTHING, &*gone),
        };
        // The kernel names files by paths without links.
        let named = named.canonicalize().ok()?;
        let mut seen = HashSet::new();
        let kept = writers.iter().map(|writer| {
            kept(*writer, &named, &mut seen).unwrap_or_else(|e| {
                debug!("process {writer}: its open files cannot be listed: {e}; they do not count");
                0
            })
        });
        let kept = kept.fold(0, u64::saturating_add);
        let (bytes, part) = (found.bytes.saturating_add(kept), found.part.saturating_add(kept));
        Some(Size { bytes: if bytes > most { BEYOND } else { bytes }, part, kept })
    }

    fn measure(&self) -> Vec<(String, Measured)> {
        if let Err(e) = tree::empty(&self.folder.join(GONE)).or_else(absent) {
            warn!("cache {}: not emptied: {e}; delete it by hand", self.folder.join(GONE).display());
        }
        let most = self.share().saturating_mul(2);
        let all = names(&self.folder.join(COMPILED));
        all.filter_map(|name| measured_entry(&self.at(&name), most).map(|found| (name, found))).collect()
    }

    /// Deletes a file or folder whatever is in it.
    pub(super) fn delete(&self, path: &Path) {
        let gone = self.folder.join(GONE);
        let deleted = match path.is_dir() && !path.is_symlink() {
            true => made(&gone).and_then(|()| tree::discard(path, &gone)).and_then(|()| tree::empty(&gone)),
            false => std::fs::remove_file(path),
        };
        if let Err(e) = deleted.or_else(absent) {
            warn!("cache {}: not deleted: {e}; delete it by hand", path.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_name_leads_nowhere_else() {
        let folder = tempfile::tempdir().unwrap();
        let code = Code::new(folder.path().join("cache"), 1 << 20);
        let beside = folder.path().join("beside");
        std::fs::create_dir(&beside).unwrap();
        for name in ["", ".", "..", "../../beside", "/etc", "a/b", ".a", "a\0"] {
            for what in [
                What::Create(name.into()),
                What::Delete(name.into()),
                What::Size(name.into(), Vec::new()),
                What::TakeBack { worker: name.into(), store: "a".into() },
                What::TakeBack { worker: "a".into(), store: name.into() },
                What::Lend { store: name.into(), worker: "a".into(), within: Duration::from_secs(9) },
            ] {
                let error = code.perform(&what).expect_err(name).to_string();
                assert!(error.contains("no folder of compiled code"), "{what:?}: {error}");
            }
        }
        assert!(beside.exists() && !folder.path().join("cache").exists());
        code.perform(&What::Create("0af-1000".into())).unwrap();
        assert_eq!(code.perform(&What::Names).unwrap(), [Found::Names(vec!["0af-1000".into()])]);
    }
}
