//! Memory in use on the simulated machine, shared by all its processes.
//!
//! A small file holds one entry per process. The entry of an exited process does not count and is
//! reused, so that a killed process leaves no trace.
//!
//! A live process holds a record lock for its entry, which the kernel takes back at its exit: an
//! isolated process cannot look at others in `/proc`.

use crate::config::{Config, DEVICES};
use std::fs::{File, OpenOptions};
use std::mem::ManuallyDrop;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Upper bound of the processes of a machine.
const ENTRIES: usize = 2048;
const WORDS: usize = 2 + DEVICES;
/// Number of faults that are kept; the file has their total count after the entries, then the
/// faults.
const FAULTS: usize = 256;
/// Offset of the mail area: for each entry its checkpoint state, and a request with argument and
/// result.
const MAIL: usize = ENTRIES * WORDS + 1 + FAULTS;
const MAIL_WORDS: usize = 4;
const ALL_WORDS: usize = MAIL + ENTRIES * MAIL_WORDS;

/// The values of `nvmlEventTypeDoubleBitEccError` and `nvmlEventTypeXidCriticalError`.
pub const ECC: u64 = 2;
pub const XID: u64 = 8;

/// A fault of a device, as NVML reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    /// Number of the device in the machine.
    pub device: u32,
    /// [`ECC`] or [`XID`].
    pub event: u64,
    /// Code of the Xid; unused for [`ECC`].
    pub data: u64,
}

/// The shared file, mapped; without it, only this process counts.
///
/// Devices are those of the machine, whichever of them the process sees.
pub struct Usage {
    /// It stays open, because closing it would take back all locks of the process.
    file: Option<ManuallyDrop<File>>,
    words: *const AtomicU64,
    /// Replaces a file that cannot be opened.
    own: Box<[AtomicU64]>,
}

// SAFETY: `words` points to shared atomics that stay mapped for the life of the process.
unsafe impl Send for Usage {}
// SAFETY: as above.
unsafe impl Sync for Usage {}

pub fn path(config: &Config) -> PathBuf {
    let machine: String =
        config.machine.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
    if config.all_users {
        return format!("/dev/shm/simgpu-all-{machine}").into();
    }
    let dir = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|d| d.is_dir());
    // SAFETY: geteuid has no preconditions.
    let uid = unsafe { libc::geteuid() };
    dir.unwrap_or_else(|| "/dev/shm".into()).join(format!("simgpu-{uid}-{machine}"))
}

fn open_or_create(config: &Config) -> std::io::Result<File> {
    let path = path(config);
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(libc::O_CLOEXEC);
    // With O_CREAT, the kernel refuses a file of another user in a folder such as /dev/shm
    // (fs.protected_regular).
    let there = || options.open(&path);
    there().or_else(|_| match options.clone().create_new(true).mode(0o600).open(&path) {
        Ok(file) if config.all_users => {
            file.set_permissions(std::fs::Permissions::from_mode(0o666)).map(|()| file)
        }
        // Another process was first.
        Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => there(),
        made => made,
    })
}

/// Returns the start time of this process in clock ticks, which distinguishes it from an earlier
/// process with the same pid.
fn start_time() -> u64 {
    let started = || {
        let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
        stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
    };
    started().unwrap_or(0)
}

/// Returns the record lock of an entry, which is a byte behind all entries.
///
/// Locks of this kind belong to a process: its children inherit none, and it has none left once the
/// last of its threads has ended.
fn record(entry: usize) -> libc::flock {
    // SAFETY: all zeros are a valid value of this structure of numbers.
    let mut record: libc::flock = unsafe { std::mem::zeroed() };
    record.l_type = libc::F_WRLCK as libc::c_short;
    record.l_whence = libc::SEEK_SET as libc::c_short;
    record.l_start = (ALL_WORDS * 8 + entry) as libc::off_t;
    record.l_len = 1;
    record
}

impl Usage {
    pub fn open(config: &Config) -> Arc<Usage> {
        let mut usage = Usage { file: None, words: std::ptr::null(), own: Box::default() };
        let bytes = ALL_WORDS * 8;
        if let Ok(file) = open_or_create(config)
            && file.set_len(bytes as u64).is_ok()
        {
            // SAFETY: maps `bytes` of a file that was just given that length.
            let p = unsafe {
                libc::mmap(
                    std::ptr::null_mut(),
                    bytes,
                    libc::PROT_READ | libc::PROT_WRITE,
                    libc::MAP_SHARED,
                    file.as_raw_fd(),
                    0,
                )
            };
            if p != libc::MAP_FAILED {
                usage.words = p.cast();
                usage.file = Some(ManuallyDrop::new(file));
            }
        }
        if usage.words.is_null() {
            usage.own = (0..ALL_WORDS).map(|_| AtomicU64::new(0)).collect();
            usage.words = usage.own.as_ptr();
        }
        Arc::new(usage)
    }

    fn word(&self, entry: usize, word: usize) -> &AtomicU64 {
        debug_assert!(entry < ENTRIES && word < WORDS);
        // SAFETY: the index is inside the table, which is mapped (or `own`).
        unsafe { &*self.words.add(entry * WORDS + word) }
    }

    fn fault(&self, at: usize) -> &AtomicU64 {
        // SAFETY: the index is inside the table, which is mapped (or `own`).
        unsafe { &*self.words.add(ENTRIES * WORDS + at % (1 + FAULTS)) }
    }

    /// Returns the total number of faults of the machine.
    pub fn events(&self) -> usize {
        self.fault(0).load(Ordering::SeqCst) as usize
    }

    /// Returns a fault by its number; once overwritten, the number yields a later fault.
    pub fn event(&self, number: usize) -> Option<Fault> {
        (number < self.events()).then(|| {
            let word = self.fault(1 + number % FAULTS).load(Ordering::SeqCst);
            Fault { device: (word >> 48) as u32, event: (word >> 32) & 0xffff, data: word & 0xffff_ffff }
        })
    }

    /// Reports a fault to all processes that wait for one.
    pub fn report(&self, fault: Fault) {
        self.locked(|| {
            let n = self.events();
            let word =
                u64::from(fault.device) << 48 | (fault.event & 0xffff) << 32 | fault.data & 0xffff_ffff;
            self.fault(1 + n % FAULTS).store(word, Ordering::SeqCst);
            self.fault(0).store(n as u64 + 1, Ordering::SeqCst);
        });
    }

    /// Reports a fault of a program, or of the card: `nvmlEventTypeXidCriticalError`.
    pub fn report_xid(&self, device: u32, code: u32) {
        self.report(Fault { device, event: XID, data: u64::from(code) });
    }

    /// Returns the uncorrectable errors of a device's memory among the kept faults.
    pub fn ecc_errors(&self, device: u32) -> u64 {
        let last = self.events();
        let events = (last.saturating_sub(FAULTS)..last).filter_map(|n| self.event(n));
        events.filter(|f| f.device == device && f.event == ECC).count() as u64
    }

    /// Returns the processes with memory on a device, and their bytes.
    pub fn processes(&self, device: u32) -> Vec<(u32, u64)> {
        self.locked(|| {
            (0..ENTRIES)
                .map(|e| (e, self.word(e, 2 + device as usize).load(Ordering::Relaxed)))
                .filter(|(e, used)| *used != 0 && self.alive(*e))
                .map(|(e, used)| (self.word(e, 0).load(Ordering::Relaxed) as u32, used))
                .collect()
        })
    }

    fn locked<R>(&self, f: impl FnOnce() -> R) -> R {
        if let Some(file) = &self.file {
            // SAFETY: plain system calls on an open descriptor.
            unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX) };
        }
        let r = f();
        if let Some(file) = &self.file {
            // SAFETY: as above.
            unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_UN) };
        }
        r
    }

    fn alive(&self, entry: usize) -> bool {
        let pid = self.word(entry, 0).load(Ordering::Relaxed) as u32;
        if pid == 0 || pid == std::process::id() {
            return pid != 0;
        }
        let Some(file) = &self.file else { return false };
        let mut record = record(entry);
        // SAFETY: the descriptor is open, and the call writes to the structure only.
        let asked = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETLK, &raw mut record) };
        asked == 0 && record.l_type != libc::F_UNLCK as libc::c_short
    }

    /// Shows other processes that this one lives, which has the entry.
    fn hold(&self, entry: usize) {
        let record = record(entry);
        if let Some(file) = &self.file {
            // SAFETY: the descriptor is open, and the call reads the structure only.
            unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLK, &raw const record) };
        }
    }

    fn sum(&self, device: u32) -> u64 {
        (0..ENTRIES)
            .filter(|&e| self.word(e, 2 + device as usize).load(Ordering::Relaxed) != 0 && self.alive(e))
            .map(|e| self.word(e, 2 + device as usize).load(Ordering::Relaxed))
            .sum()
    }

    fn own_entry(&self) -> Option<usize> {
        let (pid, start) = (u64::from(std::process::id()), start_time());
        let known = (0..ENTRIES).find(|&e| self.word(e, 0).load(Ordering::Relaxed) == pid);
        let entry = known.or_else(|| (0..ENTRIES).find(|&e| !self.alive(e)))?;
        self.hold(entry);
        if self.word(entry, 1).swap(start, Ordering::Relaxed) != start || known.is_none() {
            self.clear(entry);
        }
        self.word(entry, 0).store(pid, Ordering::Relaxed);
        Some(entry)
    }

    fn clear(&self, entry: usize) {
        (0..DEVICES).for_each(|d| self.word(entry, 2 + d).store(0, Ordering::Relaxed));
        (0..MAIL_WORDS).for_each(|w| self.mail(entry, w).store(0, Ordering::Relaxed));
    }

    fn mail(&self, entry: usize, word: usize) -> &AtomicU64 {
        debug_assert!(entry < ENTRIES && word < MAIL_WORDS);
        // SAFETY: the index is inside the table, which is mapped (or `own`).
        unsafe { &*self.words.add(MAIL + entry * MAIL_WORDS + word) }
    }

    /// Returns the entry of this process, creating it if needed.
    pub fn register(self: &Arc<Self>) -> Option<Mail> {
        let entry = self.locked(|| self.own_entry())?;
        Some(Mail { usage: self.clone(), entry })
    }

    /// Returns the entry of a live process.
    pub fn find(self: Arc<Self>, pid: u32) -> Option<Mail> {
        let found = |&e: &usize| self.word(e, 0).load(Ordering::Relaxed) == u64::from(pid) && self.alive(e);
        let entry = (0..ENTRIES).find(found)?;
        Some(Mail { usage: self, entry })
    }

    /// Returns the bytes that this process uses on each device.
    pub fn mine(&self) -> [u64; DEVICES] {
        let entry = self.locked(|| self.own_entry());
        std::array::from_fn(|d| entry.map_or(0, |e| self.word(e, 2 + d).load(Ordering::Relaxed)))
    }

    /// Returns the bytes in use on a device by all live processes.
    pub fn used(&self, device: u32) -> u64 {
        self.locked(|| self.sum(device))
    }

    /// Takes `bytes` of a device unless the sum would exceed `total`.
    pub fn take(&self, device: u32, bytes: u64, total: u64) -> bool {
        self.locked(|| {
            let fits = self.sum(device).checked_add(bytes).is_some_and(|sum| sum <= total);
            let entry = if fits { self.own_entry() } else { None };
            entry.is_some_and(|e| {
                self.word(e, 2 + device as usize).fetch_add(bytes, Ordering::Relaxed);
                true
            })
        })
    }

    pub fn give(&self, device: u32, bytes: u64) {
        self.locked(|| {
            if let Some(e) = self.own_entry() {
                let w = self.word(e, 2 + device as usize);
                w.store(w.load(Ordering::Relaxed).saturating_sub(bytes), Ordering::Relaxed);
            }
        });
    }
}

/// The part of an entry through which processes send requests to its process.
pub struct Mail {
    usage: Arc<Usage>,
    entry: usize,
}

const STATE: usize = 0;
const REQUEST: usize = 1;
const ARGUMENT: usize = 2;
const RESULT: usize = 3;

impl Mail {
    fn word(&self, word: usize) -> &AtomicU64 {
        self.usage.mail(self.entry, word)
    }

    /// Returns the process's checkpoint state.
    pub fn state(&self) -> u64 {
        self.word(STATE).load(Ordering::SeqCst)
    }

    pub fn set_state(&self, state: u64) {
        self.word(STATE).store(state, Ordering::SeqCst);
    }

    /// Serves requests of other processes; never returns.
    pub fn serve(&self, mut perform: impl FnMut(u64, u64) -> u64) {
        loop {
            match self.word(REQUEST).load(Ordering::SeqCst) {
                0 => self.wait(0),
                request => {
                    let result = perform(request, self.word(ARGUMENT).load(Ordering::SeqCst));
                    self.word(RESULT).store(result, Ordering::SeqCst);
                    self.word(REQUEST).store(0, Ordering::SeqCst);
                    self.wake();
                }
            }
        }
    }

    /// Sends a request and waits for its result; `None` if the process exits meanwhile.
    pub fn ask(&self, request: u64, argument: u64) -> Option<u64> {
        let posted = || {
            self.usage.locked(|| {
                let free = self.word(REQUEST).load(Ordering::SeqCst) == 0;
                if free {
                    self.word(ARGUMENT).store(argument, Ordering::SeqCst);
                    self.word(REQUEST).store(request, Ordering::SeqCst);
                }
                free
            })
        };
        while !posted() {
            if !self.usage.alive(self.entry) {
                return None;
            }
            self.wait(self.word(REQUEST).load(Ordering::SeqCst));
        }
        self.wake();
        while self.word(REQUEST).load(Ordering::SeqCst) == request {
            if !self.usage.alive(self.entry) {
                return None;
            }
            self.wait(request);
        }
        Some(self.word(RESULT).load(Ordering::SeqCst))
    }

    /// Waits, for 50 ms at most, until the request changes.
    fn wait(&self, request: u64) {
        let limit = libc::timespec { tv_sec: 0, tv_nsec: 50_000_000 };
        let none = std::ptr::null::<u32>();
        // SAFETY: the word is mapped; on little-endian machines its first half holds the request,
        // which is small.
        unsafe {
            libc::syscall(
                libc::SYS_futex,
                self.word(REQUEST).as_ptr(),
                libc::FUTEX_WAIT,
                request as u32,
                &limit,
                none,
                0,
            )
        };
    }

    fn wake(&self) {
        // SAFETY: as in `wait`.
        unsafe { libc::syscall(libc::SYS_futex, self.word(REQUEST).as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dead_process_counts_for_nothing() {
        let config = Config { machine: format!("test-{}", std::process::id()), ..Config::default() };
        let usage = Usage::open(&config);
        assert!(usage.take(0, 600, 1000) && !usage.take(0, 600, 1000));
        // An entry left by an exited process.
        usage.word(5, 0).store(u64::from(u32::MAX - 7), Ordering::Relaxed);
        usage.word(5, 2).store(1 << 40, Ordering::Relaxed);
        assert_eq!(usage.used(0), 600);
        usage.give(0, 600);
        assert_eq!(Usage::open(&config).used(0), 0);
        std::fs::remove_file(path(&config)).ok();
    }

    #[test]
    fn a_process_counts_until_its_last_thread_has_ended() {
        let config = Config { machine: format!("threads-{}", std::process::id()), ..Config::default() };
        let usage = Usage::open(&config);
        let lock = record(5).l_start;
        // A process whose main thread exits, and whose other thread continues.
        let code = format!(
            "import ctypes, fcntl, threading, time\nfile = open({:?}, 'r+b')\n\
             fcntl.lockf(file, fcntl.LOCK_EX, 1, {lock})\n\
             threading.Thread(target=lambda: time.sleep(60)).start()\n\
             ctypes.CDLL(None).pthread_exit(None)",
            path(&config)
        );
        let mut child = std::process::Command::new("python3").args(["-c", &code]).spawn().unwrap();
        let main_thread_has_ended = || {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
            stat.rsplit_once(')').unwrap().1.trim_start().starts_with('Z')
        };
        while !main_thread_has_ended() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        usage.word(5, 0).store(u64::from(child.id()), Ordering::Relaxed);
        usage.word(5, 2).store(300, Ordering::Relaxed);
        assert_eq!(usage.used(0), 300);
        child.kill().unwrap();
        // Before the parent takes its exit status.
        while usage.used(0) != 0 {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        child.wait().unwrap();
        std::fs::remove_file(path(&config)).ok();
    }
}
