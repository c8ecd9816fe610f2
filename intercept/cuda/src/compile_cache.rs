//! Cache of compiled code for NVRTC, in programs and inside cuDNN.
//!
//! The driver keeps this code, and the compiler requests it through a private table. Without the
//! cache cuDNN compiles attention again for each length of a sequence. One copy is in memory for
//! this process, another in the user's cache folder for later processes.
//!
//! Source of the interface: observation of the arguments and reactions of NVRTC 13. Slot 1 opens an
//! entry by the compiler's input, options and version; slot 3 finds its bytes. Slot 4 stores bytes,
//! slot 6 frees the result of slot 3, slot 2 closes the entry. Any error is a miss.

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_void};
use std::io::{Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::SystemTime;

use gpusession_link::grant;
use gpusession_proto::user_cache;

use crate::entry::{INVALID_VALUE, NOT_FOUND, NOT_SUPPORTED, OUT_OF_MEMORY, bytes, give, guard};

/// Maximum bytes of all entries in memory.
const IN_MEMORY: usize = 256 << 20;
/// Maximum bytes of an entry, and of the compiler's input.
const MAX_BYTES: usize = 256 << 20;

type Key = [u8; 32];

struct Cache {
    folder: Option<PathBuf>,
    max: u64,
    memory: Mutex<HashMap<Key, Arc<[u8]>>>,
}

/// Returns the cache, or `None` if the program has disabled it.
fn cache() -> Option<&'static Cache> {
    static CACHE: OnceLock<Option<Cache>> = OnceLock::new();
    CACHE.get_or_init(open).as_ref()
}

fn open() -> Option<Cache> {
    if std::env::var_os("CUDA_CACHE_DISABLE").is_some_and(|v| v == "1") {
        return None;
    }
    Some(Cache { folder: folder(), max: user_cache::max_bytes(), memory: Mutex::default() })
}

/// Creates and returns the cache folder; `None` for memory only.
///
/// A program with more rights than its user stores no code where that user could change it.
fn folder() -> Option<PathBuf> {
    if grant::privileged() {
        return None;
    }
    let folder = user_cache::folder()?;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder).ok()?;
    Some(folder)
}

impl Cache {
    fn file(&self, key: &Key) -> Option<PathBuf> {
        Some(self.folder.as_ref()?.join(blake3::Hash::from_bytes(*key).to_hex().as_str()))
    }

    fn find(&self, key: &Key) -> Option<Arc<[u8]>> {
        let known = self.memory.lock().unwrap_or_else(PoisonError::into_inner).get(key).cloned();
        known.or_else(|| {
            let found: Arc<[u8]> = read(&self.file(key)?)?.into();
            self.remember(key, found.clone());
            Some(found)
        })
    }

    fn remember(&self, key: &Key, value: Arc<[u8]>) {
        let mut memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        if memory.values().map(|v| v.len()).sum::<usize>() + value.len() <= IN_MEMORY {
            memory.insert(*key, value);
        }
    }

    fn store(&self, key: &Key, value: &[u8]) {
        self.remember(key, value.into());
        // A failed write only costs time later.
        if let Some(file) = self.file(key)
            && write(&file, value).is_ok()
            && let Some(folder) = &self.folder
        {
            trim(folder, self.max);
        }
    }
}

/// Reads an entry's file; `None` unless its hash matches its contents.
fn read(file: &Path) -> Option<Vec<u8>> {
    let mut hash = [0; 32];
    let mut value = Vec::new();
    let mut file = std::fs::File::open(file).ok()?;
    file.read_exact(&mut hash).ok()?;
    file.take(MAX_BYTES as u64).read_to_end(&mut value).ok()?;
    (blake3::hash(&value) == blake3::Hash::from_bytes(hash)).then_some(value)
}

/// Writes an entry's file under a temporary name and renames it, so that no reader sees a part of
/// it.
fn write(file: &Path, value: &[u8]) -> std::io::Result<()> {
    let temporary = file.with_extension(std::process::id().to_string());
    let mut target = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
    let written = target
        .write_all(blake3::hash(value).as_bytes())
        .and_then(|()| target.write_all(value))
        .and_then(|()| std::fs::rename(&temporary, file));
    written.inspect_err(|_| drop(std::fs::remove_file(&temporary)))
}

/// Deletes the oldest files until the rest has at most `max` bytes.
fn trim(folder: &Path, max: u64) {
    let facts = |entry: std::fs::DirEntry| {
        let facts = entry.metadata().ok()?;
        Some((facts.modified().unwrap_or(SystemTime::UNIX_EPOCH), facts.len(), entry.path()))
    };
    let mut files: Vec<_> =
        std::fs::read_dir(folder).into_iter().flatten().flatten().filter_map(facts).collect();
    let mut total: u64 = files.iter().map(|(_, bytes, _)| bytes).sum();
    files.sort();
    for (_, bytes, path) in files {
        if total <= max {
            return;
        }
        if std::fs::remove_file(path).is_ok() {
            total -= bytes;
        }
    }
}

// --- Functions of the private table.

/// Key of an entry that the compiler has open.
pub struct Entry(Key);

#[allow(clippy::too_many_arguments, reason = "the interface is NVRTC's")]
pub extern "C" fn compile_open(
    entry: *mut *mut Entry,
    kind: i32,
    input: *const c_void,
    input_len: usize,
    options: *const c_char,
    host: *const c_char,
    build: *const c_char,
    architecture: i32,
) -> i32 {
    guard("compile_cache_open", || {
        if cache().is_none() || input_len > MAX_BYTES {
            return Err(NOT_SUPPORTED);
        }
        let mut hash = blake3::Hasher::new();
        let mut add = |part: &[u8]| {
            hash.update(&(part.len() as u64).to_le_bytes());
            hash.update(part);
        };
        add(&kind.to_le_bytes());
        add(&architecture.to_le_bytes());
        for text in [options, host, build] {
            if text.is_null() {
                return Err(INVALID_VALUE);
            }
            // SAFETY: the compiler passes a C string, which stays valid during the call; null was
            // refused above.
            add(unsafe { CStr::from_ptr(text) }.to_bytes());
        }
        add(bytes(input, input_len)?);
        give(entry, Box::into_raw(Box::new(Entry(hash.finalize().into()))))
    })
}

pub extern "C" fn compile_close(entry: *mut Entry) -> i32 {
    if !entry.is_null() {
        // SAFETY: the pointer is not null, so it comes from `compile_open`; the compiler closes an
        // entry once.
        drop(unsafe { Box::from_raw(entry) });
    }
    0
}

/// Finds an entry's bytes; the caller owns them and frees them with `compile_free`.
pub extern "C" fn compile_find(entry: *const Entry, _: u64, value: *mut *mut c_void, len: *mut u32) -> i32 {
    guard("compile_cache_find", || {
        // SAFETY: the pointer is null, or comes from `compile_open` and is not closed yet.
        let Entry(key) = unsafe { entry.as_ref() }.ok_or(INVALID_VALUE)?;
        let found = cache().and_then(|cache| cache.find(key)).ok_or(NOT_FOUND)?;
        // SAFETY: `malloc` has returned at least `found.len()` bytes, which nothing else uses.
        let copy = unsafe {
            let copy = libc::malloc(found.len().max(1));
            if copy.is_null() {
                return Err(OUT_OF_MEMORY);
            }
            std::ptr::copy_nonoverlapping(found.as_ptr(), copy.cast(), found.len());
            copy
        };
        give(value, copy)?;
        give(len, found.len() as u32)
    })
}

pub extern "C" fn compile_store(entry: *const Entry, _: u64, value: *const c_void, len: usize) -> i32 {
    guard("compile_cache_store", || {
        // SAFETY: the pointer is null, or comes from `compile_open` and is not closed yet.
        let Entry(key) = unsafe { entry.as_ref() }.ok_or(INVALID_VALUE)?;
        if len > MAX_BYTES {
            return Err(NOT_SUPPORTED);
        }
        let value = bytes(value, len)?;
        if let Some(cache) = cache() {
            cache.store(key, value);
        }
        Ok(())
    })
}

pub extern "C" fn compile_free(value: *mut c_void) -> i32 {
    // SAFETY: the pointer comes from `malloc` in `compile_find`, and the compiler frees it once.
    unsafe { libc::free(value) };
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache(folder: &Path, max: u64) -> Cache {
        Cache { folder: Some(folder.into()), max, memory: Mutex::default() }
    }

    #[test]
    fn the_next_process_finds_what_this_one_stored() {
        let folder = tempfile::tempdir().unwrap();
        let first = cache(folder.path(), user_cache::MAX_BYTES);
        first.store(&[1; 32], b"compiled");
        assert_eq!(first.find(&[1; 32]).as_deref(), Some(&b"compiled"[..]));
        let second = cache(folder.path(), user_cache::MAX_BYTES);
        assert_eq!(second.find(&[1; 32]).as_deref(), Some(&b"compiled"[..]));
        assert_eq!(second.find(&[2; 32]), None);
    }

    #[test]
    fn a_file_that_is_not_whole_is_a_miss() {
        let folder = tempfile::tempdir().unwrap();
        cache(folder.path(), user_cache::MAX_BYTES).store(&[1; 32], b"compiled");
        let next = cache(folder.path(), user_cache::MAX_BYTES);
        let file = next.file(&[1; 32]).unwrap();
        for bad in [&b""[..], &[0; 31], &[0; 32], &[0; 40]] {
            std::fs::write(&file, bad).unwrap();
            assert_eq!(next.find(&[1; 32]), None);
        }
    }

    #[test]
    fn the_folder_stays_small() {
        let folder = tempfile::tempdir().unwrap();
        let cache = cache(folder.path(), 3 * (32 + 100));
        for i in 0..10 {
            cache.store(&[i; 32], &[i; 100]);
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 3);
        assert_eq!(cache.find(&[0; 32]).as_deref(), Some(&[0; 100][..]), "in memory still");
    }
}
