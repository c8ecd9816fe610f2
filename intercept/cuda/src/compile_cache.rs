//! What NVRTC compiled before: the driver keeps it for the compiler (in programs, and built into cuDNN), which asks through a private table.
//! Without it cuDNN compiles attention anew for each length of a sequence. In memory for this process, and in the user's cache
//! folder for the next ones.
//!
//! Seen from outside, by what NVRTC 13 passes and does with the answers: slot 1 opens an entry by what is compiled, with what and by whom, 3 finds
//! its bytes, 4 stores them, 6 gives back what 3 returned, 2 closes. Any error is a miss.

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

/// Most bytes of all entries in memory.
const IN_MEMORY: usize = 256 << 20;
/// Longest entry, and longest input of the compiler.
const MAX_BYTES: usize = 256 << 20;

type Key = [u8; 32];

struct Cache {
    folder: Option<PathBuf>,
    max: u64,
    memory: Mutex<HashMap<Key, Arc<[u8]>>>,
}

/// `None`: the program wants no cache.
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

/// A program with more rights than its user keeps nothing where that user could change it.
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
        // A file that cannot be written only costs time.
        if let Some(file) = self.file(key)
            && write(&file, value).is_ok()
            && let Some(folder) = &self.folder
        {
            trim(folder, self.max);
        }
    }
}

/// A file is believed only if it is whole.
fn read(file: &Path) -> Option<Vec<u8>> {
    let mut hash = [0; 32];
    let mut value = Vec::new();
    let mut file = std::fs::File::open(file).ok()?;
    file.read_exact(&mut hash).ok()?;
    file.take(MAX_BYTES as u64).read_to_end(&mut value).ok()?;
    (blake3::hash(&value) == blake3::Hash::from_bytes(hash)).then_some(value)
}

/// Whole or not at all.
fn write(file: &Path, value: &[u8]) -> std::io::Result<()> {
    let temporary = file.with_extension(std::process::id().to_string());
    let mut target = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
    let written = target
        .write_all(blake3::hash(value).as_bytes())
        .and_then(|()| target.write_all(value))
        .and_then(|()| std::fs::rename(&temporary, file));
    written.inspect_err(|_| drop(std::fs::remove_file(&temporary)))
}

/// Deletes the oldest files until the rest is small enough.
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

// --- The slots.

/// An entry that is being asked for.
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
            // SAFETY: a C string of the compiler's.
            add(unsafe { CStr::from_ptr(text) }.to_bytes());
        }
        add(bytes(input, input_len)?);
        give(entry, Box::into_raw(Box::new(Entry(hash.finalize().into()))))
    })
}

pub extern "C" fn compile_close(entry: *mut Entry) -> i32 {
    if !entry.is_null() {
        // SAFETY: from `compile_open`; the compiler closes an entry once.
        drop(unsafe { Box::from_raw(entry) });
    }
    0
}

/// `value` is the caller's, which gives it back with `compile_free`.
pub extern "C" fn compile_find(entry: *const Entry, _: u64, value: *mut *mut c_void, len: *mut u32) -> i32 {
    guard("compile_cache_find", || {
        // SAFETY: null, or from `compile_open` and not closed yet.
        let Entry(key) = unsafe { entry.as_ref() }.ok_or(INVALID_VALUE)?;
        let found = cache().and_then(|cache| cache.find(key)).ok_or(NOT_FOUND)?;
        // SAFETY: plain allocation; the bytes are copied into it whole.
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
        // SAFETY: null, or from `compile_open` and not closed yet.
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
    // SAFETY: from `compile_find`, given back once.
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
