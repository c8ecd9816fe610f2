//! State that outlives the daemon: a state file, and descriptors in systemd's fd store.
//!
//! With them, programs do not notice `systemctl restart`, an upgrade or even `kill -9` of the
//! daemon. The next daemon finds its leases by their requests, and watches the same processes and
//! lease descriptors.
//!
//! State of another boot is discarded, since the processes and leases that it names no longer
//! exist.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use sd_notify::NotifyState;
use serde::{Deserialize, Serialize};
use tracing::{debug, warn};

use crate::leases::machine::Saved;

/// Longest name of a descriptor that systemd accepts, in bytes.
const MAX_NAME: usize = 255;

#[derive(Serialize, Deserialize)]
struct File {
    schema: u32,
    boot_id: String,
    #[serde(flatten)]
    saved: Saved,
}

/// Version of the state file; a file of another version is ignored.
const SCHEMA: u32 = 1;

/// The state file of the lease manager.
pub struct State {
    path: PathBuf,
    boot_id: String,
    /// Whether the last write failed; a failure is logged once, until a write succeeds.
    failing: bool,
}

impl State {
    /// Uses `state.json` in this folder.
    pub fn new(folder: &Path, boot_id: String) -> Self {
        Self { path: folder.join("state.json"), boot_id, failing: false }
    }

    /// Reads the state of an earlier daemon of this boot; empty if no usable state exists.
    pub fn load(&self) -> Saved {
        let text = match fs::read(&self.path) {
            Ok(text) => text,
            Err(error) => {
                if error.kind() != io::ErrorKind::NotFound {
                    warn!(
                        "{}: cannot read: {error}; leases of an earlier daemon are not resumed",
                        self.path.display()
                    );
                }
                return Saved::default();
            }
        };
        match serde_json::from_slice::<File>(&text) {
            Ok(file) if file.schema == SCHEMA && file.boot_id == self.boot_id => file.saved,
            Ok(file) if file.schema == SCHEMA => {
                debug!("{}: ignored: written in an earlier boot", self.path.display());
                Saved::default()
            }
            Ok(file) => {
                warn!("{}: ignored: unknown schema {}", self.path.display(), file.schema);
                Saved::default()
            }
            Err(error) => {
                warn!("{}: ignored: {error}", self.path.display());
                Saved::default()
            }
        }
    }

    /// Replaces the file.
    ///
    /// It is not synced to disk, since it is of no use after the next boot.
    pub fn save(&mut self, saved: &Saved) {
        let file = File { schema: SCHEMA, boot_id: self.boot_id.clone(), saved: saved.clone() };
        let new = self.path.with_extension("json.new");
        let folder = self.path.parent().map_or(Ok(()), fs::create_dir_all);
        let written = folder
            .and_then(|()| serde_json::to_vec(&file).map_err(io::Error::other))
            .and_then(|text| fs::write(&new, text))
            .and_then(|()| fs::rename(&new, &self.path));
        match written {
            Ok(()) => self.failing = false,
            Err(error) if !self.failing => {
                warn!("{}: cannot write: {error}; leases will not outlive the daemon", self.path.display());
                self.failing = true;
            }
            Err(_) => {}
        }
    }
}

/// Descriptors that systemd keeps for the next daemon; each one's name encodes its purpose.
#[derive(Debug, Clone, Copy, Default)]
pub struct Store;

impl Store {
    /// Passes a copy to systemd; does nothing without systemd.
    pub fn put(self, name: &str, fd: BorrowedFd<'_>) {
        debug_assert!(valid(name), "{name}");
        // Without FDPOLL=0 systemd would drop the pidfd of an exited process before the next daemon
        // sees it.
        let states = [NotifyState::FdStore, NotifyState::FdName(name), NotifyState::Custom("FDPOLL=0")];
        if let Err(error) = sd_notify::notify_with_fds(&states, &[fd]) {
            warn!("{name}: not stored by systemd: {error}; it will not outlive the daemon");
        }
    }

    /// Removes a descriptor from the store.
    pub fn remove(self, name: &str) {
        let states = [NotifyState::FdStoreRemove, NotifyState::FdName(name)];
        if let Err(error) = sd_notify::notify(&states) {
            debug!("{name}: not removed from systemd's fd store: {error}");
        }
    }
}

/// Returns `true` if systemd accepts the name.
fn valid(name: &str) -> bool {
    name.len() <= MAX_NAME && name.bytes().all(|b| b.is_ascii_graphic() && b != b':')
}

/// Purpose of a stored descriptor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kept {
    /// Pidfd of a process that has a worker.
    Process {
        /// Id of the lease.
        lease: String,
        /// Id of the worker.
        worker: [u8; 16],
    },
    /// The daemon's end of a lease descriptor.
    LeaseFd {
        /// Key of the lease's request.
        key: String,
    },
}

impl Kept {
    /// Encodes the purpose as a name in the store.
    pub fn name(&self) -> String {
        match self {
            Self::Process { lease, worker } => format!("process.{lease}.{}", crate::paths::hex(worker)),
            Self::LeaseFd { key } => format!("lease.{key}"),
        }
    }

    fn of(name: &str) -> Option<Self> {
        let (kind, rest) = name.split_once('.')?;
        match kind {
            "process" => {
                let (lease, worker) = rest.split_once('.')?;
                let mut id = [0; 16];
                let pairs = worker.as_bytes().chunks_exact(2);
                if worker.len() != 32 || !pairs.remainder().is_empty() {
                    return None;
                }
                for (byte, pair) in id.iter_mut().zip(pairs) {
                    *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
                }
                Some(Self::Process { lease: lease.to_owned(), worker: id })
            }
            "lease" => Some(Self::LeaseFd { key: rest.to_owned() }),
            _ => None,
        }
    }
}

/// Descriptors that came out of the store at the start.
#[derive(Debug, Default)]
pub struct Returned {
    /// Processes as (lease id, worker, pidfd).
    pub processes: Vec<(String, [u8; 16], OwnedFd)>,
    /// Lease descriptors by their request's key.
    pub lease_fds: HashMap<String, OwnedFd>,
}

impl Returned {
    /// Takes a descriptor from systemd; one with an unknown name is removed from the store.
    pub fn take(&mut self, name: &str, fd: OwnedFd) {
        match Kept::of(name) {
            Some(Kept::Process { lease, worker }) => self.processes.push((lease, worker, fd)),
            Some(Kept::LeaseFd { key }) => drop(self.lease_fds.insert(key, fd)),
            None => Store.remove(name),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_say_what_is_kept() {
        for kept in [
            Kept::Process { lease: "abcdefghijkl".into(), worker: [0xa7; 16] },
            Kept::LeaseFd { key: "request/0123456789abcdef".into() },
        ] {
            assert!(valid(&kept.name()));
            assert_eq!(Kept::of(&kept.name()), Some(kept));
        }
        for bad in ["", "grant", "process.a", "process.a.zz", "process.a.a7a7", "session.3"] {
            assert_eq!(Kept::of(bad), None, "{bad}");
        }
    }

    #[test]
    fn the_names_of_a_full_store_fit_into_one_variable() {
        // The kernel's MAX_ARG_STRLEN: with a longer variable, systemd could not start the daemon.
        const LONGEST: usize = 128 << 10;
        let unit = include_str!("../../units/systemd/gpusession.service");
        let most = unit.lines().find_map(|line| line.strip_prefix("FileDescriptorStoreMax=")).unwrap();
        let names = [
            Kept::Process { lease: "abcdefghijkl".into(), worker: [0xff; 16] }.name(),
            Kept::LeaseFd { key: "request/0123456789abcdef01234567".into() }.name(),
        ];
        let name = names.iter().map(String::len).max().unwrap() + ":".len();
        let sockets = "LISTEN_FDNAMES=".len() + 4 * "gpusession.socket:".len();
        assert!(sockets + most.parse::<usize>().unwrap() * name < LONGEST);
    }

    #[test]
    fn state_of_another_boot_is_not_trusted() {
        let folder = tempfile::tempdir().unwrap();
        let mut state = State::new(folder.path(), "boot-a".into());
        assert_eq!(state.load(), Saved::default());
        let saved = Saved { preallocated: 3, ..Saved::default() };
        state.save(&saved);
        assert_eq!(state.load(), saved);
        assert_eq!(State::new(folder.path(), "boot-b".into()).load(), Saved::default());
        fs::write(folder.path().join("state.json"), "{ not json").unwrap();
        assert_eq!(state.load(), Saved::default());
        fs::write(folder.path().join("state.json"), r#"{"schema": 99, "boot_id": "boot-a"}"#).unwrap();
        assert_eq!(state.load(), Saved::default());
    }
}
