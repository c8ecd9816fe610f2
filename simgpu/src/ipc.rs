//! Memory and events that processes of the machine share by legacy handles.
//!
//! A handle names a descriptor of a memory file in the process that exports it.

use crate::errors::{self, INVALID_VALUE, OUT_OF_MEMORY, Result};
use parking_lot::RwLock;
use std::fs::{File, OpenOptions};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Held by entries of streams that access memory; exclusively while memory moves to other pages.
pub static WRITING: RwLock<()> = RwLock::new(());

/// Subject of a handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Subject {
    Memory = 1,
    Event = 2,
}

/// Contents of a `CUipcMemHandle` or `CUipcEventHandle`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Handle {
    subject: Subject,
    process: u32,
    descriptor: u32,
    /// Number of the file, so that no other file behind the same descriptor is taken for it.
    file: u64,
    /// Bytes of memory, and the number of its device in the machine.
    pub size: u64,
    pub card: u32,
}

pub type Bytes = [u8; 64];

impl Handle {
    /// Names a file of this process.
    pub fn new(subject: Subject, file: &File, size: u64, card: u32) -> Result<Self> {
        let number = file.metadata().map_err(|_| errors::OPERATING_SYSTEM)?.ino();
        let (process, descriptor) = (std::process::id(), file.as_raw_fd() as u32);
        Ok(Self { subject, process, descriptor, file: number, size, card })
    }

    pub fn bytes(&self) -> Bytes {
        let mut bytes = [0; 64];
        bytes[..7].copy_from_slice(b"simgpu:");
        bytes[7] = self.subject as u8;
        bytes[8..12].copy_from_slice(&self.process.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.descriptor.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.file.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.size.to_le_bytes());
        bytes[32..36].copy_from_slice(&self.card.to_le_bytes());
        bytes
    }

    /// Parses a handle; `None`: it names something else or nothing.
    pub fn parse(bytes: &Bytes, subject: Subject) -> Option<Self> {
        let half = |at: usize| Some(u32::from_le_bytes(bytes[at..at + 4].try_into().ok()?));
        let long = |at: usize| Some(u64::from_le_bytes(bytes[at..at + 8].try_into().ok()?));
        let (process, descriptor, file) = (half(8)?, half(12)?, long(16)?);
        let known = bytes[..7] == *b"simgpu:" && bytes[7] == subject as u8;
        known.then_some(Self { subject, process, descriptor, file, size: long(24)?, card: half(32)? })
    }

    /// Opens the file; `None`: its process has closed it, or has ended.
    pub fn open(&self) -> Option<File> {
        let path = format!("/proc/{}/fd/{}", self.process, self.descriptor);
        let file = OpenOptions::new().read(true).write(true).open(path).ok()?;
        file.metadata().is_ok_and(|known| known.ino() == self.file).then_some(file)
    }

    /// Returns `true` for a handle of this process.
    pub fn is_own(&self) -> bool {
        self.process == std::process::id()
    }

    /// Identifies what the handle names.
    pub fn number(&self) -> u64 {
        self.file
    }
}

/// Creates a memory file.
pub fn file() -> Result<File> {
    // SAFETY: the name is a C string; no other code owns the returned descriptor.
    unsafe {
        let fd = libc::memfd_create(c"simgpu".as_ptr(), libc::MFD_CLOEXEC);
        if fd < 0 { Err(OUT_OF_MEMORY) } else { Ok(File::from_raw_fd(fd)) }
    }
}

/// Maps a memory file, at any address or at `fixed`.
pub fn map(file: &File, len: usize, fixed: Option<*mut u8>) -> Option<*mut u8> {
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    let at = fixed.unwrap_or(std::ptr::null_mut()).cast();
    let flags = libc::MAP_SHARED | if fixed.is_some() { libc::MAP_FIXED } else { 0 };
    // SAFETY: a new mapping; the caller owns the range that a fixed one replaces.
    let p = unsafe { libc::mmap(at, len, prot, flags, file.as_raw_fd(), 0) };
    (p != libc::MAP_FAILED).then_some(p.cast())
}

/// Maps a part of a memory file, which begins at a whole page, at any address.
pub fn map_part(file: &File, at: u64, len: usize) -> Option<*mut u8> {
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping.
    let p =
        unsafe { libc::mmap(std::ptr::null_mut(), len, prot, libc::MAP_SHARED, file.as_raw_fd(), at as i64) };
    (p != libc::MAP_FAILED).then_some(p.cast())
}

const PAGE: usize = 4096;

/// The records of an event of several processes: number of the last one, number of the last
/// complete one, process of the last one.
pub struct Counter {
    words: *mut AtomicU64,
    file: File,
    /// Whether another process has created the event.
    pub opened: bool,
}

// SAFETY: the words are atomics, mapped until the drop.
unsafe impl Send for Counter {}
// SAFETY: as above.
unsafe impl Sync for Counter {}

impl Counter {
    pub fn create() -> Result<Self> {
        let file = file()?;
        file.set_len(PAGE as u64).map_err(|_| OUT_OF_MEMORY)?;
        Self::of(file, false)
    }

    pub fn open(handle: &Handle) -> Result<Self> {
        Self::of(handle.open().ok_or(errors::MAP_FAILED)?, true)
    }

    fn of(file: File, opened: bool) -> Result<Self> {
        if file.metadata().map_err(|_| errors::OPERATING_SYSTEM)?.len() != PAGE as u64 {
            return Err(INVALID_VALUE);
        }
        let words = map(&file, PAGE, None).ok_or(OUT_OF_MEMORY)?.cast();
        Ok(Self { words, file, opened })
    }

    pub fn handle(&self) -> Result<Handle> {
        Handle::new(Subject::Event, &self.file, 0, 0)
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        // SAFETY: three words at the beginning of the page.
        unsafe { &*self.words.add(index) }
    }

    /// Begins a record and returns its number.
    pub fn begin(&self) -> u64 {
        self.word(2).store(std::process::id().into(), Ordering::SeqCst);
        self.word(0).fetch_add(1, Ordering::SeqCst) + 1
    }

    pub fn complete(&self, number: u64) {
        self.word(1).fetch_max(number, Ordering::SeqCst);
    }

    /// Returns the number of the last record if another process made it.
    pub fn of_other(&self) -> Option<u64> {
        let other = self.word(2).load(Ordering::SeqCst) != u64::from(std::process::id());
        Some(self.word(0).load(Ordering::SeqCst)).filter(|number| other && *number > 0)
    }

    /// Returns `true` if a record of another process is complete, or will never be.
    pub fn is_complete(&self, number: u64) -> bool {
        self.word(1).load(Ordering::SeqCst) >= number || {
            let process = self.word(2).load(Ordering::SeqCst);
            // SAFETY: signal 0 only asks whether the process exists.
            unsafe { libc::kill(process as i32, 0) != 0 }
        }
    }

    /// Waits for a record of another process, or until `over`.
    pub fn wait(&self, number: u64, over: impl Fn() -> bool) {
        while !self.is_complete(number) && !over() {
            std::thread::sleep(Duration::from_micros(50));
        }
    }
}

impl Drop for Counter {
    fn drop(&mut self) {
        // SAFETY: mapped with this length.
        unsafe { libc::munmap(self.words.cast(), PAGE) };
    }
}
