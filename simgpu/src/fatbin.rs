//! Finds code in the images that programs pass to the driver: wrappers, fatbins, ELF images, PTX
//! text.

use crate::errors::{Error, INVALID_IMAGE, INVALID_VALUE, NO_BINARY_FOR_GPU};
use std::io::Read;

const WRAPPER_MAGIC: u32 = 0x466243b1;
const FATBIN_MAGIC: u32 = 0xba55ed50;
const ELF_MAGIC: u32 = 0x464c457f;
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

fn u32_at(b: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(b.get(at..at + 4)?.try_into().ok()?))
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

/// One entry of a fatbin.
struct Entry<'a> {
    kind: u16,
    sm: u32,
    payload: &'a [u8],
    compressed: usize,
    unpacked: u64,
    flags: u64,
}

fn entries(data: &[u8]) -> Result<Vec<Entry<'_>>, Error> {
    let mut out = Vec::new();
    let mut at = 0usize;
    while at + 64 <= data.len() {
        let e = &data[at..];
        let read = || {
            let header = u32_at(e, 4)? as usize;
            let size = usize::try_from(u64_at(e, 8)?).ok()?;
            let payload = e.get(header..header.checked_add(size)?)?;
            let entry = Entry {
                kind: u16_at(e, 0)?,
                sm: u32_at(e, 28)?,
                payload,
                compressed: u32_at(e, 16)? as usize,
                unpacked: u64_at(e, 56)?,
                flags: u64_at(e, 40)?,
            };
            Some((entry, header + size))
        };
        let (entry, step) = read().ok_or(INVALID_IMAGE)?;
        if step == 0 {
            return Err(INVALID_IMAGE);
        }
        out.push(entry);
        at += step;
    }
    Ok(out)
}

fn unpack(e: &Entry) -> Result<Vec<u8>, Error> {
    if e.compressed == 0 {
        return Ok(e.payload.to_vec());
    }
    if e.unpacked > UNPACKED_LIMIT {
        return Err(INVALID_IMAGE);
    }
    let packed = e.payload.get(..e.compressed).ok_or(INVALID_IMAGE)?;
    if e.flags & 0x8000 != 0 || packed.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]) {
        let mut out = Vec::new();
        let decoder = ruzstd::decoding::StreamingDecoder::new(packed).map_err(|_| INVALID_IMAGE)?;
        decoder.take(UNPACKED_LIMIT).read_to_end(&mut out).map_err(|_| INVALID_IMAGE)?;
        Ok(out)
    } else if e.flags & 0x2000 != 0 {
        lz4_flex::block::decompress(packed, e.unpacked as usize).map_err(|_| INVALID_IMAGE)
    } else {
        Err(INVALID_IMAGE)
    }
}

/// Returns the best entry for a device of compute capability `sm`: PTX that it can compile, else
/// any machine code.
fn fatbin(data: &[u8], sm: u32) -> Result<Image, Error> {
    let list = entries(data)?;
    let ptx = list.iter().filter(|e| e.kind == 1 && e.sm <= sm).max_by_key(|e| e.sm);
    if let Some(e) = ptx {
        let mut text = unpack(e)?;
        while text.last() == Some(&0) {
            text.pop();
        }
        return Ok(Image::Ptx(String::from_utf8(text).map_err(|_| INVALID_IMAGE)?));
    }
    // Machine code is never executed, so any of it serves; the closest architecture comes first.
    let elf = list.iter().filter(|e| e.kind == 2).min_by_key(|e| e.sm.abs_diff(sm));
    match elf {
        Some(e) => Ok(Image::Elf(unpack(e)?)),
        None => Err(NO_BINARY_FOR_GPU),
    }
}

/// A kernel in an ELF image: its name, and offset and size of each parameter.
pub struct ElfKernel {
    pub name: String,
    pub params: Vec<(u32, u32)>,
    pub param_size: u32,
}

/// A variable in an ELF image; bytes after `init` are zero.
pub struct ElfVariable {
    pub name: String,
    pub size: u64,
    pub init: Vec<u8>,
}

/// The kernels and variables of a machine-code image.
pub struct ElfInfo {
    pub kernels: Vec<ElfKernel>,
    pub variables: Vec<ElfVariable>,
}

pub fn elf(image: &[u8]) -> Option<ElfInfo> {
    let (shoff, shentsize) = (u64_at(image, 40)? as usize, usize::from(u16_at(image, 58)?));
    let (shnum, shstrndx) = (usize::from(u16_at(image, 60)?), usize::from(u16_at(image, 62)?));
    struct Section<'a> {
        name: &'a str,
        kind: u32,
        link: usize,
        data: &'a [u8],
    }
    let raw = |i: usize| image.get(shoff + i * shentsize..shoff + (i + 1) * shentsize);
    let body = |s: &[u8]| {
        let (off, size) = (u64_at(s, 24)? as usize, u64_at(s, 32)? as usize);
        image.get(off..off.checked_add(size)?)
    };
    let string = |table: &'_ [u8], at: usize| -> Option<String> {
        let tail = table.get(at..)?;
        let end = tail.iter().position(|b| *b == 0)?;
        Some(String::from_utf8_lossy(&tail[..end]).into_owned())
    };
    let names = body(raw(shstrndx)?)?;
    let mut sections = Vec::new();
    for i in 0..shnum {
        let s = raw(i)?;
        let at = u32_at(s, 0)? as usize;
        let tail = names.get(at..)?;
        let end = tail.iter().position(|b| *b == 0)?;
        let kind = u32_at(s, 4)?;
        // SHT_NOBITS has no bytes in the file.
        let data = if kind == 8 { &[][..] } else { body(s).unwrap_or(&[]) };
        sections.push(Section {
            name: std::str::from_utf8(&tail[..end]).ok()?,
            kind,
            link: u32_at(s, 40)? as usize,
            data,
        });
    }
    let mut info = ElfInfo { kernels: Vec::new(), variables: Vec::new() };
    for s in &sections {
        if let Some(name) = s.name.strip_prefix(".nv.info.") {
            let (params, param_size) = parameters(s.data);
            info.kernels.push(ElfKernel { name: name.to_owned(), params, param_size });
        }
    }
    // Device functions have an information section too; only symbols marked as entries are kernels.
    if let Some(table) = sections.iter().find(|s| s.kind == 2) {
        let strings = sections.get(table.link)?.data;
        let mut entries = Vec::new();
        for symbol in table.data.chunks_exact(24) {
            let name = string(strings, u32_at(symbol, 0)? as usize)?;
            let (kind, other) = (symbol[4] & 15, symbol[5]);
            match kind {
                2 if other & 0x10 != 0 => entries.push(name),
                1 => {
                    let (at, size) = (u64_at(symbol, 8)?, u64_at(symbol, 16)?);
                    let section = sections.get(usize::from(u16_at(symbol, 6)?)).map_or(&[][..], |s| s.data);
                    let init =
                        section.get(at as usize..).map_or(&[][..], |s| &s[..s.len().min(size as usize)]);
                    info.variables.push(ElfVariable { name, size, init: init.to_vec() });
                }
                _ => {}
            }
        }
        if !entries.is_empty() {
            info.kernels.retain(|k| entries.contains(&k.name));
        }
    }
    Some(info)
}

/// Parses the KPARAM_INFO and CBANK_PARAM_SIZE records of a kernel.
fn parameters(data: &[u8]) -> (Vec<(u32, u32)>, u32) {
    let (mut params, mut total, mut at) = (Vec::new(), 0, 0);
    while at + 4 <= data.len() {
        let (format, attribute) = (data[at], data[at + 1]);
        let value = u32::from(u16_at(data, at + 2).unwrap_or(0));
        at += 4;
        if format != 4 {
            if attribute == 0x19 {
                total = value;
            }
            continue;
        }
        let Some(body) = data.get(at..at + value as usize) else { break };
        at += value as usize;
        if attribute == 0x17 && body.len() >= 12 {
            let ordinal = u16_at(body, 4).unwrap_or(0);
            let offset = u32::from(u16_at(body, 6).unwrap_or(0));
            let size = u32_at(body, 8).unwrap_or(0) >> 18;
            params.push((ordinal, offset, size));
        }
    }
    params.sort_unstable();
    let params: Vec<(u32, u32)> = params.into_iter().map(|(_, offset, size)| (offset, size)).collect();
    let end = params.iter().map(|(o, s)| o + s).max().unwrap_or(0);
    (params, total.max(end))
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
