//! What outlives this process in systemd's descriptor store: the listening sockets, and of each worker its channel, its pidfd and
//! a record of what the supervisor knows of it, in a memory file that is written whenever that changes. The next server begins
//! with what is there, whatever ended this one. A descriptor cannot come from another boot.
//!
//! A worker that is in no store loses its channel with this process, and ends.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use gpusession_proto::supervise::{VERSION, WORKER_FD};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::stat::{SFlag, fstat};
use sd_notify::NotifyState;
use serde::{Deserialize, Serialize};
use tracing::{debug, warn};

use super::Book;
use super::process::end_group;

/// Version of the records; those of another one are not read.
const SCHEMA: u32 = 1;
/// Descriptors of one worker.
const PER_WORKER: usize = 3;
/// For the listening sockets.
const LISTENERS: usize = 2;
/// Longest record: names and texts in it are bounded.
const MAX_RECORD: usize = 64 << 10;
/// A record begins with its length and the BLAKE3 hash of what follows.
const HEAD: usize = 4 + blake3::OUT_LEN;
/// How long systemd may take to read what it was sent.
const BARRIER_LIMIT: Duration = Duration::from_secs(5);

/// systemd's store. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Store(Option<Arc<Mutex<Slots>>>);

/// Names in the store are short: all of them together are one variable of the next server's environment.
#[derive(Debug, Default)]
struct Slots {
    used: BTreeSet<u32>,
    most: u32,
    full: bool,
}

/// A worker's place in the store.
#[derive(Debug)]
pub struct Kept {
    slot: u32,
    record: File,
}

impl Store {
    /// The store of the unit that this process is: systemd says in `FDSTORE` how many descriptors it takes (before version 254
    /// the unit says so). Without one, nothing outlives this process.
    pub fn of_this_unit() -> Self {
        let has = |name| std::env::var_os(name).is_some_and(|v| !v.is_empty());
        let most: usize = std::env::var("FDSTORE").ok().and_then(|v| v.parse().ok()).unwrap_or(0);
        let most = u32::try_from(most.saturating_sub(LISTENERS) / PER_WORKER).unwrap_or(u32::MAX);
        if !has("NOTIFY_SOCKET") || most == 0 {
            return Self::default();
        }
        Self(Some(Arc::new(Mutex::new(Slots { most, ..Slots::default() }))))
    }

    /// Whether there is one.
    pub fn exists(&self) -> bool {
        self.0.is_some()
    }

    fn slots(&self) -> Option<MutexGuard<'_, Slots>> {
        self.0.as_ref().map(|s| s.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Keeps a new worker. `None`: it ends with this process.
    pub fn keep(&self, channel: BorrowedFd<'_>, pidfd: BorrowedFd<'_>) -> Option<Kept> {
        let slot = {
            let mut slots = self.slots()?;
            let Some(slot) = (0..slots.most).find(|n| !slots.used.contains(n)) else {
                if !std::mem::replace(&mut slots.full, true) {
                    warn!("more than {} workers: the others will not outlive this server", slots.most);
                }
                return None;
            };
            slots.used.insert(slot);
            slot
        };
        let kept = (|| {
            let flags = nix::sys::memfd::MFdFlags::MFD_CLOEXEC;
            let record = File::from(nix::sys::memfd::memfd_create(c"gpuserver-worker", flags)?);
            // Together: systemd has all of them or none.
            put(&worker_name(slot), &[channel, pidfd, record.as_fd()])?;
            Ok::<_, io::Error>(Kept { slot, record })
        })();
        kept.inspect_err(|e| {
            warn!("a worker will not outlive this server: {e}");
            self.free(slot);
        })
        .ok()
    }

    fn free(&self, slot: u32) {
        if let Some(mut slots) = self.slots() {
            slots.used.remove(&slot);
        }
    }

    /// Forgets a worker that has ended.
    pub fn forget(&self, kept: Kept) {
        remove(&worker_name(kept.slot));
        self.free(kept.slot);
    }

    /// Keeps a listening socket: who connects while there is no server waits for the next one.
    pub fn keep_listener(&self, name: &str, socket: BorrowedFd<'_>) {
        if self.exists()
            && let Err(e) = put(name, &[socket])
        {
            warn!("{name} will not outlive this server: {e}");
        }
    }

    /// Returns when systemd has read all that it was sent. A process that has ended is no longer listened to.
    pub fn settle(&self) {
        let settled = || {
            let (ours, theirs) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC)?;
            sd_notify::notify_with_fds(&[NotifyState::Custom("BARRIER=1")], &[theirs.as_fd()])?;
            drop(theirs);
            let limit = PollTimeout::try_from(BARRIER_LIMIT).unwrap_or(PollTimeout::MAX);
            // Hung up as soon as systemd has closed its copy.
            match poll(&mut [PollFd::new(ours.as_fd(), PollFlags::empty())], limit)? {
                0 => Err(io::Error::from(io::ErrorKind::TimedOut)),
                _ => Ok(()),
            }
        };
        if self.exists()
            && let Err(e) = settled()
        {
            warn!("the service manager may not have kept everything: {e}");
        }
    }

    /// What an earlier server left here. Called before anything else opens descriptors; workers of which not everything is there,
    /// or that this server does not understand, are ended.
    pub fn left(&self) -> Left {
        let mut left = Left::default();
        let mut workers: BTreeMap<u32, Vec<OwnedFd>> = BTreeMap::new();
        for (name, fd) in passed() {
            let slot =
                name.strip_prefix('w').and_then(|n| n.parse().ok()).filter(|n| worker_name(*n) == name);
            match slot {
                Some(slot) => workers.entry(slot).or_default().push(fd),
                None => drop(left.listeners.insert(name, fd.into())),
            }
        }
        for (slot, fds) in workers {
            let (mut channel, mut pidfd, mut record) = (None, None, None);
            for fd in fds {
                match (fstat(&fd).map(|s| SFlag::from_bits_truncate(s.st_mode) & SFlag::S_IFMT), pid_of(&fd))
                {
                    (_, Some(_)) => pidfd = Some(fd),
                    (Ok(SFlag::S_IFSOCK), _) => channel = Some(fd),
                    (Ok(SFlag::S_IFREG), _) => record = Some(File::from(fd)),
                    _ => {}
                }
            }
            let pid = pidfd.as_ref().and_then(pid_of).unwrap_or_default();
            let read = match (&record, self.exists()) {
                (_, false) => Err("this server keeps no workers".into()),
                (None, _) => Err("its record is missing".into()),
                (Some(record), _) => Book::read(record),
            };
            match (read, channel, pidfd, record) {
                (Ok(book), Some(channel), Some(pidfd), Some(record)) if pid == 0 || Some(pid) == book.pid => {
                    if let Some(mut slots) = self.slots() {
                        slots.used.insert(slot);
                    }
                    left.workers.push(LeftWorker { book, channel, pidfd, kept: Kept { slot, record } });
                }
                (read, ..) => {
                    let why = read.err().unwrap_or_else(|| "not everything of it is there".into());
                    warn!("process {pid} of an earlier server's worker is ended: {why}");
                    end_group(pid);
                    remove(&worker_name(slot));
                }
            }
        }
        left
    }
}

impl Kept {
    /// Writes down what is known now.
    pub fn write(&self, book: &Book) {
        let Ok(json) = serde_json::to_vec(&Versioned { schema: SCHEMA, supervise: VERSION, book }) else {
            return;
        };
        let mut bytes = Vec::with_capacity(HEAD + json.len());
        bytes.extend_from_slice(&(json.len() as u32).to_le_bytes());
        bytes.extend_from_slice(blake3::hash(&json).as_bytes());
        bytes.extend_from_slice(&json);
        if let Err(e) = self.record.write_all_at(&bytes, 0) {
            warn!("the record of a worker was not written, it will not outlive this server: {e}");
        }
    }
}

#[derive(Serialize, Deserialize)]
struct Versioned<T> {
    schema: u32,
    supervise: u32,
    #[serde(flatten)]
    book: T,
}

impl Book {
    fn read(record: &File) -> Result<Self, String> {
        let mut bytes = vec![0; HEAD + MAX_RECORD];
        let mut len = 0;
        loop {
            match record.read_at(&mut bytes[len..], len as u64) {
                Ok(0) => break,
                Ok(n) => len += n,
                Err(e) => return Err(format!("its record: {e}")),
            }
        }
        let garbled = || "its record is garbled".to_string();
        let (head, rest) = bytes[..len].split_at_checked(HEAD).ok_or_else(garbled)?;
        let (length, hash) = head.split_first_chunk::<4>().ok_or_else(garbled)?;
        // A shorter record leaves the end of a longer one behind it.
        let json = rest.get(..u32::from_le_bytes(*length) as usize).ok_or_else(garbled)?;
        if blake3::hash(json).as_bytes() != hash {
            return Err(garbled());
        }
        #[derive(Deserialize)]
        struct Nothing {}
        let found: Versioned<Nothing> = serde_json::from_slice(json).map_err(|_| garbled())?;
        if (found.schema, found.supervise) != (SCHEMA, VERSION) {
            return Err(format!(
                "it speaks version {}.{} of the protocol, this server {SCHEMA}.{VERSION}",
                found.schema, found.supervise
            ));
        }
        let read: Versioned<Self> = serde_json::from_slice(json).map_err(|e| format!("its record: {e}"))?;
        Ok(read.book)
    }
}

/// What an earlier server left.
#[derive(Debug, Default)]
pub struct Left {
    /// Its listening sockets, by name.
    pub listeners: BTreeMap<String, std::net::TcpListener>,
    /// Its workers.
    pub workers: Vec<LeftWorker>,
}

impl Left {
    /// The listening socket of this name, if its address is as wanted.
    pub fn listener(
        &mut self,
        name: &str,
        fits: impl FnOnce(std::net::SocketAddr) -> bool,
    ) -> Option<tokio::net::TcpListener> {
        let socket = self.listeners.remove(name)?;
        if socket.local_addr().is_ok_and(fits)
            && socket.set_nonblocking(true).is_ok()
            && let Ok(listener) = tokio::net::TcpListener::from_std(socket)
        {
            return Some(listener);
        }
        remove(name);
        None
    }
}

/// A worker that an earlier server left.
#[derive(Debug)]
pub struct LeftWorker {
    /// What that server knew.
    pub book: Book,
    /// The supervisor's end of its channel.
    pub channel: OwnedFd,
    /// Its process.
    pub pidfd: OwnedFd,
    /// Its place in the store.
    pub kept: Kept,
}

fn worker_name(slot: u32) -> String {
    format!("w{slot}")
}

fn put(name: &str, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    // Ends are noticed here: systemd would throw away a pidfd whose process has ended.
    let states = [NotifyState::FdStore, NotifyState::FdName(name), NotifyState::Custom("FDPOLL=0")];
    sd_notify::notify_with_fds(&states, fds)
}

fn remove(name: &str) {
    if let Err(e) = sd_notify::notify(&[NotifyState::FdStoreRemove, NotifyState::FdName(name)]) {
        debug!("{name} stays in the descriptor store: {e}");
    }
}

/// The descriptors that systemd passed on. Descriptor 3 stays taken: new workers get theirs by that number.
fn passed() -> Vec<(String, OwnedFd)> {
    let mut out = Vec::new();
    for (raw, name) in sd_notify::listen_fds_with_names().into_iter().flatten() {
        // SAFETY: systemd passed these descriptors to this process, and this is the only place that takes them.
        let fd = unsafe { OwnedFd::from_raw_fd(raw) };
        if raw != WORKER_FD {
            out.push((name, fd));
            continue;
        }
        let mut fd = fd;
        let placeholder = File::open("/dev/null");
        let moved = placeholder.and_then(|null| {
            let copy = fd.try_clone()?;
            nix::unistd::dup3(null, &mut fd, nix::fcntl::OFlag::O_CLOEXEC)?;
            Ok(copy)
        });
        std::mem::forget(fd);
        out.extend(moved.ok().map(|copy| (name, copy)));
    }
    out
}

/// The process of a pidfd, 0 once it is gone; `None`: it is none.
fn pid_of(fd: &OwnedFd) -> Option<u32> {
    let mut text = String::new();
    File::open(format!("/proc/self/fdinfo/{}", fd.as_raw_fd())).ok()?.read_to_string(&mut text).ok()?;
    let pid: i64 = text.lines().find_map(|l| l.strip_prefix("Pid:"))?.trim().parse().ok()?;
    Some(u32::try_from(pid).unwrap_or(0))
}
