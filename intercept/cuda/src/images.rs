//! Images that programs load: length, hash, transfer to a server that lacks them.
//!
//! The API does not give an image's length; the hash serves as its name.

use std::collections::HashSet;
use std::ffi::{CStr, c_void};
use std::sync::{Mutex, PoisonError};

use gpusession_proto::frame::op;

use crate::client::{Client, word};
use crate::status::{INVALID_IMAGE, INVALID_VALUE, Result};

const WRAPPER: u32 = 0x4662_43b1;
const FATBIN: u32 = 0xba55_ed50;
const ELF: u32 = 0x464c_457f;
/// Maximum bytes of an image in one frame.
const PIECE: usize = 1 << 20;
/// Maximum length of an image in bytes; a longer one counts as invalid.
const MAX_IMAGE: u64 = 4 << 30;

fn read<T: Copy>(base: *const u8, offset: usize) -> T {
    // SAFETY: callers read a magic number, then inside the headers of that kind of image. The
    // program vouches for the image, as it does to NVIDIA's driver.
    unsafe { base.add(offset).cast::<T>().read_unaligned() }
}

/// Returns the bytes of the image at a program's pointer.
pub fn bytes<'a>(image: *const c_void) -> Result<&'a [u8]> {
    if image.is_null() {
        return Err(INVALID_VALUE);
    }
    let mut base = image.cast::<u8>();
    let mut magic: u32 = read(base, 0);
    if magic == WRAPPER {
        base = read::<*const u8>(base, 8);
        if base.is_null() {
            return Err(INVALID_IMAGE);
        }
        magic = read(base, 0);
        if magic != FATBIN && magic != ELF {
            return Err(INVALID_IMAGE);
        }
    }
    let len = match magic {
        FATBIN => u64::from(read::<u16>(base, 6)).checked_add(read::<u64>(base, 8)),
        ELF => Some(elf_length(base)?),
        // PTX text, with its terminator, which the driver looks for.
        // SAFETY: by the API's contract an image of no binary format is PTX text that ends in a
        // zero byte.
        _ => Some(unsafe { CStr::from_ptr(base.cast()) }.to_bytes_with_nul().len() as u64),
    };
    match len {
        // SAFETY: the length comes from the image's own headers or its terminator, and the program
        // vouches for the image.
        Some(len) if len <= MAX_IMAGE => Ok(unsafe { std::slice::from_raw_parts(base, len as usize) }),
        _ => Err(INVALID_IMAGE),
    }
}

/// Returns the length of an ELF image: the end of its last header, section or segment.
fn elf_length(base: *const u8) -> Result<u64> {
    const CLASS_64: u8 = 2;
    const NO_BITS: u32 = 8;
    if read::<u8>(base, 4) != CLASS_64 {
        return Err(INVALID_IMAGE);
    }
    let (phoff, shoff) = (read::<u64>(base, 0x20), read::<u64>(base, 0x28));
    let (phsize, phnum) = (u64::from(read::<u16>(base, 0x36)), u64::from(read::<u16>(base, 0x38)));
    let (shsize, shnum) = (u64::from(read::<u16>(base, 0x3a)), u64::from(read::<u16>(base, 0x3c)));
    let mut end = (shoff + shsize * shnum).max(phoff + phsize * phnum);
    if end > MAX_IMAGE {
        return Err(INVALID_IMAGE);
    }
    for i in 0..shnum {
        let header = (shoff + i * shsize) as usize;
        if read::<u32>(base, header + 4) != NO_BITS {
            end = end.max(read::<u64>(base, header + 0x18).saturating_add(read::<u64>(base, header + 0x20)));
        }
    }
    for i in 0..phnum {
        let header = (phoff + i * phsize) as usize;
        end = end.max(read::<u64>(base, header + 8).saturating_add(read::<u64>(base, header + 0x20)));
    }
    Ok(end)
}

type Hash = [u8; 32];

/// Images that the server has, with the number of the client.
static SENT: Mutex<Option<HashSet<(u8, Hash)>>> = Mutex::new(None);

/// Sends an image unless the server has it, and returns its hash.
pub fn offer(client: &Client, image: &[u8]) -> Result<Hash> {
    let hash: Hash = *blake3::hash(image).as_bytes();
    let sent = (client.number, hash);
    // One thread at a time: the pieces of two threads that send the same image would mix.
    static OFFERING: Mutex<()> = Mutex::new(());
    let _one = OFFERING.lock().unwrap_or_else(PoisonError::into_inner);
    if SENT.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default().contains(&sent) {
        return Ok(hash);
    }
    let there =
        || -> Result<bool> { Ok(word(&mut client.call(op::IMAGE_HAVE, |w| w.bytes(&hash))?.reader())? != 0) };
    if !there()? {
        for piece in image.chunks(PIECE) {
            client.post(op::IMAGE_DATA, |w| {
                w.bytes(&hash);
                w.word(image.len() as u64);
                w.bytes(piece);
            })?;
        }
        // Checks the result, and puts the pieces before the frames that other threads post after
        // this call.
        if !there()? {
            return Err(INVALID_IMAGE);
        }
    }
    SENT.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default().insert(sent);
    Ok(hash)
}
