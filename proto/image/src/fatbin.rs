//! Fat binaries: lists of images, which may be compressed.

use std::borrow::Cow;
use std::io::Read;

use crate::FATBIN;
use crate::bytes::{part, u16_at, u32_at, u64_at};

/// Kind of an entry that is PTX text.
pub const PTX: u16 = 1;
/// Kind of an entry that is an ELF image.
pub const ELF: u16 = 2;

/// Length of the part of an entry's header that every version has.
const ENTRY_HEADER: u64 = 64;
const LZ4: u64 = 0x2000;
const ZSTD: u64 = 0x8000;
const ZSTD_MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];

/// One image of a fat binary.
#[derive(Debug, Clone, Copy)]
pub struct Entry<'a> {
    /// [`PTX`], [`ELF`], or another kind.
    pub kind: u16,
    /// Compute capability that it is for, such as 75.
    pub sm: u32,
    /// Image, perhaps compressed.
    pub payload: Payload<'a>,
}

/// Bytes of an entry as the fat binary has them.
#[derive(Debug, Clone, Copy)]
pub struct Payload<'a> {
    /// Bytes within the fat binary, without the padding of a compressed one.
    pub bytes: &'a [u8],
    /// Compression that the entry names.
    pub packing: Packing,
}

/// Compression of a payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packing {
    /// No compression.
    Plain,
    /// With the length of the image in bytes, by the entry's own word.
    Lz4(u64),
    /// With the length of the image in bytes, by the entry's own word.
    Zstd(u64),
    /// A compression that this code does not know.
    Unknown,
}

/// Returns the list of a fat binary: the bytes behind its header.
pub fn list(image: &[u8]) -> Option<&[u8]> {
    if u32_at(image, 0)? != FATBIN {
        return None;
    }
    part(image, u64::from(u16_at(image, 6)?), u64_at(image, 8)?)
}

/// Reads the entries of a list; `None` if one is cut off.
pub fn entries(mut list: &[u8]) -> Option<Vec<Entry<'_>>> {
    let mut found = Vec::new();
    // Fewer bytes than a header are padding.
    while list.len() as u64 >= ENTRY_HEADER {
        let (header, size) = (u64::from(u32_at(list, 4)?), u64_at(list, 8)?);
        if header < ENTRY_HEADER {
            return None;
        }
        let payload = part(list, header, size)?;
        let (packed, flags, len) = (u32_at(list, 16)?, u64_at(list, 40)?, u64_at(list, 56)?);
        let bytes = if packed == 0 { payload } else { part(payload, 0, u64::from(packed))? };
        let packing = match packed {
            0 => Packing::Plain,
            _ if flags & ZSTD != 0 || bytes.starts_with(&ZSTD_MAGIC) => Packing::Zstd(len),
            _ if flags & LZ4 != 0 => Packing::Lz4(len),
            _ => Packing::Unknown,
        };
        found.push(Entry {
            kind: u16_at(list, 0)?,
            sm: u32_at(list, 28)?,
            payload: Payload { bytes, packing },
        });
        // `part` has found both inside.
        list = &list[header as usize + size as usize..];
    }
    Some(found)
}

/// Returns an image of at most `limit` bytes; `None` if it is longer, damaged, or of an unknown
/// form.
pub fn unpack(bytes: &[u8], packing: Packing, limit: u64) -> Option<Cow<'_, [u8]>> {
    match packing {
        Packing::Plain => Some(Cow::Borrowed(bytes)),
        Packing::Lz4(len) if len <= limit => {
            lz4_flex::block::decompress(bytes, usize::try_from(len).ok()?).ok().map(Cow::Owned)
        }
        Packing::Zstd(len) if len <= limit => {
            let mut image = Vec::new();
            let decoder = ruzstd::decoding::StreamingDecoder::new(bytes).ok()?;
            decoder.take(limit).read_to_end(&mut image).ok()?;
            Some(Cow::Owned(image))
        }
        Packing::Lz4(_) | Packing::Zstd(_) | Packing::Unknown => None,
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Makes an entry; one with flags is compressed, and has `len` bytes when it is not.
    pub(crate) fn entry(kind: u16, sm: u32, flags: u64, payload: &[u8], len: usize) -> Vec<u8> {
        let mut entry = vec![0; 64];
        let padded = payload.len().next_multiple_of(8);
        let packed = if flags == 0 { 0 } else { payload.len() as u32 };
        entry[..2].copy_from_slice(&kind.to_le_bytes());
        entry[4..8].copy_from_slice(&64u32.to_le_bytes());
        entry[8..16].copy_from_slice(&(padded as u64).to_le_bytes());
        entry[16..20].copy_from_slice(&packed.to_le_bytes());
        entry[28..32].copy_from_slice(&sm.to_le_bytes());
        entry[40..48].copy_from_slice(&flags.to_le_bytes());
        entry[56..64].copy_from_slice(&(len as u64).to_le_bytes());
        entry.extend_from_slice(payload);
        entry.resize(64 + padded, 0);
        entry
    }

    fn image(entries: &[Vec<u8>]) -> Vec<u8> {
        let list = entries.concat();
        let mut image = FATBIN.to_le_bytes().to_vec();
        image.extend([1, 0, 16, 0]);
        image.extend((list.len() as u64).to_le_bytes());
        image.extend(list);
        image
    }

    const TEXT: &[u8] = b".version 8.4 .target sm_75 // plain";

    #[test]
    fn each_form_of_an_entry_unpacks_to_its_image() {
        let lz4 = lz4_flex::block::compress(TEXT);
        let level = ruzstd::encoding::CompressionLevel::Fastest;
        let zstd = ruzstd::encoding::compress_to_vec(TEXT, level);
        let image = image(&[
            entry(PTX, 52, 0, TEXT, 0),
            entry(PTX, 75, LZ4, &lz4, TEXT.len()),
            entry(ELF, 90, ZSTD, &zstd, TEXT.len()),
            entry(8, 90, 1, TEXT, TEXT.len()),
        ]);
        let found = entries(list(&image).unwrap()).unwrap();
        let known: Vec<_> = found.iter().map(|e| (e.kind, e.sm, e.payload.packing)).collect();
        let len = TEXT.len() as u64;
        assert_eq!(
            known,
            [
                (PTX, 52, Packing::Plain),
                (PTX, 75, Packing::Lz4(len)),
                (ELF, 90, Packing::Zstd(len)),
                (8, 90, Packing::Unknown)
            ]
        );
        for Entry { payload: Payload { bytes, packing }, .. } in &found[..3] {
            let unpacked = unpack(bytes, *packing, len).unwrap();
            assert!(unpacked.starts_with(TEXT), "{packing:?}");
            assert!(*packing == Packing::Plain || unpack(bytes, *packing, len - 1).is_none());
        }
        assert!(unpack(found[3].payload.bytes, found[3].payload.packing, len).is_none());
    }

    #[test]
    fn a_list_that_is_cut_off_or_endless_has_no_entries() {
        let whole = image(&[entry(PTX, 75, 0, TEXT, 0)]);
        let entries_of = |image: &[u8]| list(image).and_then(entries).map(|e| e.len());
        assert_eq!(entries_of(&whole), Some(1));
        for len in 0..whole.len() {
            assert_eq!(entries_of(&whole[..len]), None, "{len}");
        }
        let mut short = whole.clone();
        short[8] -= 8;
        assert_eq!(entries_of(&short), None, "the list ends in the entry");
        let mut endless = whole;
        endless[16 + 4..16 + 8].fill(0);
        endless[16 + 8..16 + 16].fill(0);
        assert_eq!(entries_of(&endless), None);
    }
}
