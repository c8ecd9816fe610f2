//! Finds code in the images that programs pass to the driver: wrappers, fatbins, ELF images, PTX
//! text.

use std::borrow::Cow;

use gpusession_image::fatbin::{ELF, Entry, PTX, entries, unpack};
use gpusession_image::{ELF as ELF_MAGIC, FATBIN as FATBIN_MAGIC, WRAPPER as WRAPPER_MAGIC};

use crate::errors::{Error, INVALID_IMAGE, INVALID_VALUE, NO_BINARY_FOR_GPU};

/// Upper bound, in bytes, of an unpacked image.
const UNPACKED_LIMIT: u64 = 1 << 30;

/// Code that the simulated device can use.
pub enum Image {
    Ptx(String),
    Elf(Vec<u8>),
}

fn u16_at(b: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(b.get(at..at + 2)?.try_into().ok()?))
}

fn u64_at(b: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(b.get(at..at + 8)?.try_into().ok()?))
}

/// Returns the length of an ELF image according to its own headers.
fn elf_size(header: &[u8; 64]) -> Option<usize> {
    let (shoff, shentsize, shnum) = (u64_at(header, 40)?, u16_at(header, 58)?, u16_at(header, 60)?);
    usize::try_from(shoff.checked_add(u64::from(shentsize) * u64::from(shnum))?).ok()
}

/// Reads the image at `image`, whose length follows from its content.
///
/// # Safety
/// `image` must point to a complete wrapper, fatbin, ELF image or NUL-terminated PTX text.
pub unsafe fn load(image: *const u8, sm: u32) -> Result<Image, Error> {
    if image.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller vouches for the object at `image`. Its first four bytes identify its kind,
    // and each kind is read only as far as its own headers say.
    unsafe {
        match image.cast::<u32>().read_unaligned() {
            WRAPPER_MAGIC => {
                let version = image.add(4).cast::<u32>().read_unaligned();
                let data = image.add(8).cast::<*const u8>().read_unaligned();
                let first = load(data, sm);
                if version == 2 && first.is_err() {
                    // Prelinked images are listed after the wrapper; a null pointer ends the list.
                    let mut list = image.add(16).cast::<*const *const u8>().read_unaligned();
                    while !list.is_null() && !(*list).is_null() {
                        if let Ok(found) = load(*list, sm) {
                            return Ok(found);
                        }
                        list = list.add(1);
                    }
                }
                first
            }
            FATBIN_MAGIC => {
                let header = usize::from(image.add(6).cast::<u16>().read_unaligned());
                let size = image.add(8).cast::<u64>().read_unaligned() as usize;
                fatbin(std::slice::from_raw_parts(image.add(header), size), sm)
            }
            ELF_MAGIC => {
                let header: [u8; 64] = image.cast::<[u8; 64]>().read_unaligned();
                let size = elf_size(&header).filter(|n| (64..1 << 31).contains(n)).ok_or(INVALID_IMAGE)?;
                Ok(Image::Elf(std::slice::from_raw_parts(image, size).to_vec()))
            }
            _ => {
                let text = std::ffi::CStr::from_ptr(image.cast());
                let text = text.to_str().map_err(|_| INVALID_IMAGE)?;
                if text.contains(".version") { Ok(Image::Ptx(text.to_owned())) } else { Err(INVALID_IMAGE) }
            }
        }
    }
}

/// Returns the best entry for a device of compute capability `sm`: PTX that it can compile, else
/// any machine code.
fn fatbin(data: &[u8], sm: u32) -> Result<Image, Error> {
    let unpack = |e: &Entry<'_>| {
        let image = unpack(e.payload.bytes, e.payload.packing, UNPACKED_LIMIT);
        image.map(Cow::into_owned).ok_or(INVALID_IMAGE)
    };
    let list = entries(data).ok_or(INVALID_IMAGE)?;
    let ptx = list.iter().filter(|e| e.kind == PTX && e.sm <= sm).max_by_key(|e| e.sm);
    if let Some(e) = ptx {
        let mut text = unpack(e)?;
        while text.last() == Some(&0) {
            text.pop();
        }
        return Ok(Image::Ptx(String::from_utf8(text).map_err(|_| INVALID_IMAGE)?));
    }
    // Machine code is never executed, so any of it serves; the closest architecture comes first.
    let elf = list.iter().filter(|e| e.kind == ELF).min_by_key(|e| e.sm.abs_diff(sm));
    match elf {
        Some(e) => Ok(Image::Elf(unpack(e)?)),
        None => Err(NO_BINARY_FOR_GPU),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(kind: u16, sm: u32, flags: u64, payload: &[u8], unpacked: usize, compressed: bool) -> Vec<u8> {
        let mut e = vec![0u8; 64];
        let padded = payload.len().next_multiple_of(8);
        e[0..2].copy_from_slice(&kind.to_le_bytes());
        e[4..8].copy_from_slice(&64u32.to_le_bytes());
        e[8..16].copy_from_slice(&(padded as u64).to_le_bytes());
        e[16..20].copy_from_slice(&(if compressed { payload.len() as u32 } else { 0 }).to_le_bytes());
        e[28..32].copy_from_slice(&sm.to_le_bytes());
        e[40..48].copy_from_slice(&flags.to_le_bytes());
        e[56..64].copy_from_slice(&(unpacked as u64).to_le_bytes());
        e.extend_from_slice(payload);
        e.resize(64 + padded, 0);
        e
    }

    fn bin(entries: &[Vec<u8>]) -> Vec<u8> {
        let body = entries.concat();
        let mut out = FATBIN_MAGIC.to_le_bytes().to_vec();
        out.extend(1u16.to_le_bytes());
        out.extend(16u16.to_le_bytes());
        out.extend((body.len() as u64).to_le_bytes());
        out.extend(body);
        out
    }

    #[test]
    fn picks_the_best_ptx_and_unpacks_it() {
        let text = b".version 8.4 .target sm_75 // plain";
        let packed = lz4_flex::block::compress(text);
        let b = bin(&[
            entry(2, 90, 0, b"\x7fELF", 4, false),
            entry(1, 52, 0, b".version 7.0", 12, false),
            entry(1, 75, 0x2000, &packed, text.len(), true),
            entry(1, 90, 0, b".version 9.0", 12, false),
        ]);
        // SAFETY: `b` is a complete fatbin.
        match unsafe { load(b.as_ptr(), 75) } {
            Ok(Image::Ptx(t)) => assert_eq!(t.as_bytes(), text),
            _ => panic!("no PTX"),
        }
    }

    #[test]
    fn machine_code_is_for_want_of_ptx_that_fits() {
        let newer = entry(1, 90, 0, b".version 9.0", 12, false);
        let both = bin(&[newer.clone(), entry(2, 90, 0, b"\x7fELF", 4, false)]);
        let alone = bin(&[newer]);
        // SAFETY: both are complete fatbins.
        unsafe {
            assert!(matches!(load(both.as_ptr(), 75), Ok(Image::Elf(_))));
            assert!(matches!(load(alone.as_ptr(), 75), Err(NO_BINARY_FOR_GPU)));
        }
    }

    #[test]
    fn truncated_entries_are_refused() {
        let mut b = bin(&[entry(1, 75, 0, b".version 8.4", 12, false)]);
        let size = b.len() as u64 - 16;
        b[8..16].copy_from_slice(&(size - 8).to_le_bytes());
        // SAFETY: the header claims fewer bytes than `b` holds.
        assert!(matches!(unsafe { load(b.as_ptr(), 75) }, Err(INVALID_IMAGE)));
    }
}
