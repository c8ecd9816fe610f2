//! Keeps workers and listening sockets in systemd's descriptor store, for the next server.
//!
//! For each worker the store holds its channel, its pidfd and a record of the supervisor's
//! knowledge. The record is a memory file, rewritten after changes (`records`). The next server
//! starts from the store, however the previous one ended. A descriptor never comes from an earlier
//! boot.
//!
//! A worker outside the store loses its channel with this process, and exits. So do workers that no
//! client has taken: the next server starts its own.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use gpusession_proto::supervise::{OLDEST, VERSION, WORKER_FD};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::stat::{SFlag, fstat};
use sd_notify::NotifyState;
use serde::{Deserialize, Serialize};
use tracing::{debug, warn};

use super::process::kill_group;
use super::record::WorkerRecord;
use crate::pidfd::pid_of;
use crate::starter::desk::Desk;

/// Version of the records; 1: of workers that the server started itself.
const SCHEMA: u32 = 2;
/// Records and workers of these versions are taken over.
const KNOWN: Known = Known { schemas: 1..=SCHEMA, messages: OLDEST..=VERSION };
/// Descriptors in the store per worker.
const PER_WORKER: usize = 3;
/// Descriptors in the store that are reserved for listening sockets.
const LISTENERS: usize = 2;
/// Longest record that is read, in bytes. Names and texts in a record are bounded.
const MAX_RECORD: usize = 64 << 10;
/// Length of a record's header: the length of the JSON text and its BLAKE3 hash.
const HEAD: usize = 4 + blake3::OUT_LEN;
/// Time that systemd may take to read all messages.
const BARRIER_TIMEOUT: Duration = Duration::from_secs(5);

/// systemd's descriptor store. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Store(Option<Arc<Mutex<Slots>>>);

/// Names in the store are short: one environment variable of the next server holds them all.
#[derive(Debug, Default)]
struct Slots {
    used: BTreeSet<u32>,
    most: u32,
    full: bool,
}

/// Descriptors of a worker that the store may keep: its channel and its pidfd.
#[derive(Debug)]
pub struct Keepable([OwnedFd; 2]);

impl Keepable {
    /// Duplicates the descriptors; `None` if this process may have no more, which it logs.
    pub fn of(channel: BorrowedFd<'_>, pidfd: BorrowedFd<'_>) -> Option<Self> {
        let both = channel.try_clone_to_owned().and_then(|fd| Ok([fd, pidfd.try_clone_to_owned()?]));
        let warned = both.inspect_err(|e| {
            warn!("descriptor store: cannot keep a worker: {e}; it exits with this server");
        });
        warned.ok().map(Self)
    }
}

/// Place of a worker in the store.
#[derive(Debug)]
pub struct Kept {
    slot: u32,
    record: Arc<Record>,
}

/// A worker's record in the store.
#[derive(Debug)]
pub struct Record {
    file: File,
    /// Version of the worker's messages.
    messages: u32,
    /// Number of the state that it holds.
    holds: Mutex<u64>,
}

/// Versions that a server knows: of records, and of the messages of workers.
struct Known {
    schemas: RangeInclusive<u32>,
    messages: RangeInclusive<u32>,
}

impl Store {
    /// Returns the store of the unit that runs this process.
    ///
    /// systemd announces in `FDSTORE` how many descriptors it takes; before version 254 the unit
    /// file sets it. Without a store no worker outlives this process.
    pub fn of_this_unit() -> Self {
        let has = |name| std::env::var_os(name).is_some_and(|v| !v.is_empty());
        let most: usize = std::env::var("FDSTORE").ok().and_then(|v| v.parse().ok()).unwrap_or(0);
        let most = u32::try_from(most.saturating_sub(LISTENERS) / PER_WORKER).unwrap_or(u32::MAX);
        if !has("NOTIFY_SOCKET") || most == 0 {
            return Self::default();
        }
        Self(Some(Arc::new(Mutex::new(Slots { most, ..Slots::default() }))))
    }

    /// Returns `true` if this unit has a store.
    pub fn exists(&self) -> bool {
        self.0.is_some()
    }

    fn slots(&self) -> Option<MutexGuard<'_, Slots>> {
        self.0.as_ref().map(|s| s.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Puts a worker that a client has taken into the store. `None`: it exits with this process.
    pub fn keep(&self, worker: &Keepable) -> Option<Kept> {
        let Keepable([channel, pidfd]) = worker;
        let slot = {
            let mut slots = self.slots()?;
            let Some(slot) = (0..slots.most).find(|n| !slots.used.contains(n)) else {
                if !std::mem::replace(&mut slots.full, true) {
                    warn!(
                        "descriptor store: has room for {} workers only; further ones exit with this server",
                        slots.most
                    );
                }
                return None;
            };
            slots.used.insert(slot);
            slot
        };
        let kept = (|| {
            let flags = nix::sys::memfd::MFdFlags::MFD_CLOEXEC;
            let record = File::from(nix::sys::memfd::memfd_create(c"gpuserver-worker", flags)?);
            // In one message, so that systemd has all three or none.
            put(&worker_name(slot), &[channel.as_fd(), pidfd.as_fd(), record.as_fd()])?;
            Ok::<_, io::Error>(Kept { slot, record: Record::of(record, VERSION) })
        })();
        kept.inspect_err(|e| {
            warn!("descriptor store: cannot keep a worker: {e}; it exits with this server");
            self.free(slot);
        })
        .ok()
    }

    fn free(&self, slot: u32) {
        if let Some(mut slots) = self.slots() {
            slots.used.remove(&slot);
        }
    }

    /// Removes an exited worker from the store.
    pub fn forget(&self, kept: Kept) {
        remove(&worker_name(kept.slot));
        self.free(kept.slot);
    }

    /// Puts a listening socket into the store, so that connections wait there for the next server.
    pub fn keep_listener(&self, name: &str, socket: BorrowedFd<'_>) {
        if self.exists()
            && let Err(e) = put(name, &[socket])
        {
            warn!(
                "descriptor store: cannot keep the socket {name}: {e}; connections fail while the server restarts"
            );
        }
    }

    /// Returns when systemd has read all messages. systemd ignores messages of an exited process.
    pub fn flush_store(&self) {
        let settled = || {
            let (ours, theirs) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC)?;
            sd_notify::notify_with_fds(&[NotifyState::Custom("BARRIER=1")], &[theirs.as_fd()])?;
            drop(theirs);
            let limit = PollTimeout::try_from(BARRIER_TIMEOUT).unwrap_or(PollTimeout::MAX);
            // The pipe hangs up as soon as systemd has closed its copy.
            match poll(&mut [PollFd::new(ours.as_fd(), PollFlags::empty())], limit)? {
                0 => Err(io::Error::from(io::ErrorKind::TimedOut)),
                _ => Ok(()),
            }
        };
        if self.exists()
            && let Err(e) = settled()
        {
            warn!("descriptor store: systemd may not have kept everything: {e}");
        }
    }

    /// Returns everything that an earlier server left in the store.
    ///
    /// Must be called before anything else opens descriptors. Kills workers that are incomplete, or
    /// whose record this server cannot read; `desk`: the way to the starter that may have started
    /// them.
    pub fn left(&self, desk: Option<&Desk>) -> Left {
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
                (_, false) => Err("this server has no descriptor store".into()),
                (None, _) => Err("its record is missing".into()),
                (Some(record), _) => WorkerRecord::read(record, &KNOWN),
            };
            match (read, channel, pidfd, record) {
                (Ok((book, messages)), Some(channel), Some(pidfd), Some(record))
                    if pid == 0 || Some(pid) == book.pid =>
                {
                    if let Some(mut slots) = self.slots() {
                        slots.used.insert(slot);
                    }
                    let kept = Kept { slot, record: Record::of(record, messages) };
                    left.workers.push(LeftWorker { book, channel, pidfd, kept });
                }
                (read, _, pidfd, _) => {
                    let why = read.err().unwrap_or_else(|| "it is incomplete".into());
                    warn!(
                        "descriptor store: cannot take over worker process {pid} of an earlier server: {why}; killed, so its program's CUDA calls fail from now on"
                    );
                    kill_group(pid, pidfd.ok_or_else(|| io::ErrorKind::NotFound.into()), desk);
                    remove(&worker_name(slot));
                }
            }
        }
        left
    }
}

impl Kept {
    /// Returns the worker's record.
    pub fn record(&self) -> &Arc<Record> {
        &self.record
    }
}

impl Record {
    fn of(file: File, messages: u32) -> Arc<Self> {
        Arc::new(Self { file, messages, holds: Mutex::new(0) })
    }

    /// Writes a state of the worker, unless the record holds a later one.
    ///
    /// `number` counts the states from 1.
    pub fn write(&self, number: u64, book: &WorkerRecord) {
        let mut holds = self.holds.lock().unwrap_or_else(PoisonError::into_inner);
        if number <= *holds {
            return;
        }
        *holds = number;
        let schema = if book.of_starter { SCHEMA } else { 1 };
        let Ok(json) = serde_json::to_vec(&Versioned { schema, supervise: self.messages, book }) else {
            return;
        };
        let mut bytes = Vec::with_capacity(HEAD + json.len());
        bytes.extend_from_slice(&(json.len() as u32).to_le_bytes());
        bytes.extend_from_slice(blake3::hash(&json).as_bytes());
        bytes.extend_from_slice(&json);
        if let Err(e) = self.file.write_all_at(&bytes, 0) {
            warn!(
                "descriptor store: cannot write a worker's record: {e}; the worker may not outlive this server"
            );
        }
    }
}

#[derive(Serialize, Deserialize)]
struct Versioned<T> {
    schema: u32,
    /// Version of the worker's messages, which is not always that of the server that writes this.
    supervise: u32,
    #[serde(flatten)]
    book: T,
}

impl WorkerRecord {
    /// Returns the record, and the version of the worker's messages.
    fn read(record: &File, known: &Known) -> Result<(Self, u32), String> {
        let mut bytes = vec![0; HEAD + MAX_RECORD];
        let mut len = 0;
        loop {
            match record.read_at(&mut bytes[len..], len as u64) {
                Ok(0) => break,
                Ok(n) => len += n,
                Err(e) => return Err(format!("its record cannot be read: {e}")),
            }
        }
        let garbled = || "its record is corrupt".to_string();
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
        let versions = [
            ("records", found.schema, &known.schemas),
            ("messages to the server", found.supervise, &known.messages),
        ];
        for (name, version, known) in versions {
            if !known.contains(&version) {
                let (oldest, newest) = (known.start(), known.end());
                return Err(format!(
                    "its {name} have version {version}; this server knows {oldest} to {newest}"
                ));
            }
        }
        let read: Versioned<Self> =
            serde_json::from_slice(json).map_err(|e| format!("its record cannot be read: {e}"))?;
        Ok((read.book, found.supervise))
    }
}

/// Everything that an earlier server left in the store.
#[derive(Debug, Default)]
pub struct Left {
    /// Listening sockets by name.
    pub listeners: BTreeMap<String, std::net::TcpListener>,
    /// Complete workers with a readable record.
    pub workers: Vec<LeftWorker>,
}

impl Left {
    /// Takes the listening socket of this name if its address fits.
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
    /// State of the worker, from its record.
    pub book: WorkerRecord,
    /// Supervisor's end of the worker's channel.
    pub channel: OwnedFd,
    /// Descriptor of the worker's process.
    pub pidfd: OwnedFd,
    /// Place of the worker in this server's store.
    pub kept: Kept,
}

fn worker_name(slot: u32) -> String {
    format!("w{slot}")
}

fn put(name: &str, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    // The supervisor notices exits itself: with polling, systemd would drop the pidfd of an exited
    // process.
    let states = [NotifyState::FdStore, NotifyState::FdName(name), NotifyState::Custom("FDPOLL=0")];
    sd_notify::notify_with_fds(&states, fds)
}

fn remove(name: &str) {
    if let Err(e) = sd_notify::notify(&[NotifyState::FdStoreRemove, NotifyState::FdName(name)]) {
        debug!("descriptor store: cannot remove {name}: {e}");
    }
}

/// Returns the descriptors that systemd passed on.
///
/// Descriptor 3 stays occupied, since new workers get their channels under that number.
fn passed() -> Vec<(String, OwnedFd)> {
    let mut out = Vec::new();
    for (raw, name) in sd_notify::listen_fds_with_names().into_iter().flatten() {
        // SAFETY: systemd passed these descriptors to this process, and this is the only place that
        // takes them.
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

#[cfg(test)]
pub(super) mod tests {
    use super::super::record::tests::first;
    use super::*;

    impl Record {
        /// Returns what the next server reads.
        pub fn read(&self) -> Option<WorkerRecord> {
            WorkerRecord::read(&self.file, &KNOWN).ok().map(|(book, _)| book)
        }

        /// Keeps writers waiting, as a write does that takes long.
        pub fn held_up(&self) -> MutexGuard<'_, u64> {
            self.holds.lock().unwrap()
        }

        /// Returns the number of the state that it holds.
        pub fn writes(&self) -> u64 {
            *self.holds.lock().unwrap()
        }
    }

    fn record(messages: u32) -> Arc<Record> {
        let file = nix::sys::memfd::memfd_create(c"record", nix::sys::memfd::MFdFlags::MFD_CLOEXEC);
        Record::of(file.unwrap().into(), messages)
    }

    pub fn kept() -> Kept {
        Kept { slot: 0, record: record(VERSION) }
    }

    /// A server that knows the messages of these versions.
    fn server(messages: RangeInclusive<u32>) -> Known {
        Known { messages, ..KNOWN }
    }

    #[test]
    fn a_worker_of_the_version_before_is_taken_over_and_keeps_its_version() {
        let book: WorkerRecord = serde_json::from_value(first()).unwrap();
        let record = record(VERSION);
        record.write(1, &book);
        // The next release has new messages and can speak the old ones.
        let (read, messages) =
            WorkerRecord::read(&record.file, &server(VERSION..=VERSION + 1)).expect("taken over");
        assert_eq!((read.id, messages), (book.id, VERSION));
        // It writes the record in its turn. The release after it no longer speaks the old ones.
        let record = Record::of(record.file.try_clone().unwrap(), messages);
        record.write(1, &read);
        let refusal = WorkerRecord::read(&record.file, &server(VERSION + 1..=VERSION + 2)).unwrap_err();
        assert_eq!(
            refusal,
            format!(
                "its messages to the server have version {VERSION}; this server knows {} to {}",
                VERSION + 1,
                VERSION + 2
            )
        );
        // An upgrade that is taken back: the earlier release knows the worker.
        assert!(record.read().is_some());
    }

    #[test]
    fn a_worker_or_record_of_an_unknown_version_is_refused() {
        let book: WorkerRecord = serde_json::from_value(first()).unwrap();
        for messages in [OLDEST - 1, VERSION + 1] {
            let record = record(messages);
            record.write(1, &book);
            let refusal = WorkerRecord::read(&record.file, &KNOWN).unwrap_err();
            assert!(refusal.contains(&format!("version {messages};")), "{refusal}");
        }
        let record = record(VERSION);
        record.write(1, &book);
        let later = Known { schemas: SCHEMA + 1..=SCHEMA + 1, messages: OLDEST..=VERSION };
        let refusal = WorkerRecord::read(&record.file, &later).unwrap_err();
        assert!(refusal.starts_with("its records have version"), "{refusal}");
    }

    #[test]
    fn a_later_release_adds_fields_to_a_record_without_a_new_version() {
        let mut later = first();
        later["later"] = serde_json::json!({ "a": [1] });
        let record = record(VERSION);
        let json =
            serde_json::to_vec(&Versioned { schema: SCHEMA, supervise: VERSION, book: later }).unwrap();
        let mut bytes = (json.len() as u32).to_le_bytes().to_vec();
        bytes.extend_from_slice(blake3::hash(&json).as_bytes());
        bytes.extend_from_slice(&json);
        record.file.write_all_at(&bytes, 0).unwrap();
        assert!(record.read().is_some());
    }
}
