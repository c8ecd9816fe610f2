//! Checks images before a driver reads them.
//!
//! A driver learns an image's length from headers in the image itself. An image whose headers
//! contradict the number of its bytes would make the driver read other memory.

use crate::{ELF, FATBIN, WRAPPER, bytes};

/// Form of an image, which its first bytes show.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// An ELF image: a cubin or an object.
    Elf,
    /// A fat binary: a list of images.
    Fatbin,
    /// Text such as PTX, or a format without a header that names a length.
    Text,
}

/// Contradiction in an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bad {
    /// The image is a wrapper, which holds addresses of the program that loads it.
    Wrapper,
    /// A header is cut off, or of an unknown form.
    Header,
    /// A section, segment or entry lies outside.
    Part,
}

/// Length of a 64-bit ELF header, and of the entries of its two tables.
const ELF_HEADER: usize = 64;
const SEGMENT: u64 = 56;
const SECTION: u64 = 64;
/// Section without bytes in the image.
const NO_BITS: u32 = 8;
/// Section whose names end in zeros.
const STRINGS: u32 = 3;
/// Kind of a fat binary's entry that is an ELF image.
const ELF_ENTRY: u16 = 2;
/// Length of the part of an entry's header that every version has.
const ENTRY_HEADER: usize = 64;

fn u16_at(image: &[u8], at: u64) -> Result<u16, Bad> {
    bytes::u16_at(image, at).ok_or(Bad::Header)
}

fn u32_at(image: &[u8], at: u64) -> Result<u32, Bad> {
    bytes::u32_at(image, at).ok_or(Bad::Header)
}

fn u64_at(image: &[u8], at: u64) -> Result<u64, Bad> {
    bytes::u64_at(image, at).ok_or(Bad::Header)
}

fn part(image: &[u8], offset: u64, size: u64) -> Result<&[u8], Bad> {
    bytes::part(image, offset, size).ok_or(Bad::Part)
}

/// Checks that every part which the image's headers name lies in the image.
pub fn check(image: &[u8]) -> Result<Kind, Bad> {
    match u32_at(image, 0) {
        Ok(WRAPPER) => Err(Bad::Wrapper),
        Ok(ELF) => elf(image).map(|()| Kind::Elf),
        Ok(FATBIN) => fatbin(image).map(|()| Kind::Fatbin),
        _ => Ok(Kind::Text),
    }
}

fn elf(image: &[u8]) -> Result<(), Bad> {
    const CLASS_64: u8 = 2;
    const LITTLE_ENDIAN: u8 = 1;
    if image.len() < ELF_HEADER || image[4] != CLASS_64 || image[5] != LITTLE_ENDIAN {
        return Err(Bad::Header);
    }
    let (segments, segment) = (u64::from(u16_at(image, 0x38)?), u64::from(u16_at(image, 0x36)?));
    let (sections, section) = (u64::from(u16_at(image, 0x3c)?), u64::from(u16_at(image, 0x3a)?));
    let (segments_at, sections_at) = (u64_at(image, 0x20)?, u64_at(image, 0x28)?);
    let of_another_size = segments != 0 && segment != SEGMENT || sections != 0 && section != SECTION;
    // Without sections in the header, the first section would hold their number.
    if of_another_size || sections == 0 && sections_at != 0 {
        return Err(Bad::Header);
    }
    part(image, segments_at, segments * SEGMENT)?;
    part(image, sections_at, sections * SECTION)?;
    for i in 0..segments {
        let at = segments_at + i * SEGMENT;
        part(image, u64_at(image, at + 0x08)?, u64_at(image, at + 0x20)?)?;
    }
    for i in 0..sections {
        let at = sections_at + i * SECTION;
        let kind = u32_at(image, at + 0x04)?;
        if kind == NO_BITS {
            continue;
        }
        let bytes = part(image, u64_at(image, at + 0x18)?, u64_at(image, at + 0x20)?)?;
        if kind == STRINGS && bytes.last().is_some_and(|last| *last != 0) {
            return Err(Bad::Part);
        }
    }
    // The number of the section with the sections' names.
    if sections != 0 && u64::from(u16_at(image, 0x3e)?) >= sections {
        return Err(Bad::Header);
    }
    Ok(())
}

fn fatbin(image: &[u8]) -> Result<(), Bad> {
    const HEADER: u64 = 16;
    let header = u64::from(u16_at(image, 6)?);
    if header < HEADER {
        return Err(Bad::Header);
    }
    let mut rest = part(image, header, u64_at(image, 8)?)?;
    // Fewer bytes than a header are padding.
    while rest.len() >= ENTRY_HEADER {
        let (kind, header, size) = (u16_at(rest, 0)?, u64::from(u32_at(rest, 4)?), u64_at(rest, 8)?);
        if header < ENTRY_HEADER as u64 {
            return Err(Bad::Header);
        }
        let payload = part(rest, header, size)?;
        let compressed = u64::from(u32_at(rest, 16)?);
        part(payload, 0, compressed)?;
        if kind == ELF_ENTRY && compressed == 0 {
            elf(payload)?;
        }
        // Both parts were found inside.
        rest = &rest[header as usize + size as usize..];
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(image: &mut [u8], at: usize, bytes: &[u8]) {
        image[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// Returns an ELF image with a segment, a section of names, and one without bytes.
    fn sample() -> Vec<u8> {
        let mut image = vec![0; 64 + 56 + 16 + 3 * 64];
        put(&mut image, 0, &[0x7f, b'E', b'L', b'F', 2, 1, 1]);
        for (at, value) in [(0x20, 64_u64), (0x28, 64 + 56 + 16)] {
            put(&mut image, at, &value.to_le_bytes());
        }
        for (at, value) in [(0x36, 56_u16), (0x38, 1), (0x3a, 64), (0x3c, 3), (0x3e, 1)] {
            put(&mut image, at, &value.to_le_bytes());
        }
        put(&mut image, 64 + 0x08, &120_u64.to_le_bytes());
        put(&mut image, 64 + 0x20, &16_u64.to_le_bytes());
        put(&mut image, 120, b"\0.names\0");
        for (section, kind, offset, size) in [(1, 3_u32, 120_u64, 8_u64), (2, 8, u64::MAX, u64::MAX)] {
            let at = 136 + section * 64;
            put(&mut image, at + 4, &kind.to_le_bytes());
            put(&mut image, at + 0x18, &offset.to_le_bytes());
            put(&mut image, at + 0x20, &size.to_le_bytes());
        }
        image
    }

    fn wrapped(payload: &[u8]) -> Vec<u8> {
        let mut image = vec![0; 16 + 64];
        put(&mut image, 0, &FATBIN.to_le_bytes());
        put(&mut image, 6, &16_u16.to_le_bytes());
        put(&mut image, 8, &(64 + payload.len() as u64).to_le_bytes());
        put(&mut image, 16, &2_u16.to_le_bytes());
        put(&mut image, 16 + 4, &64_u32.to_le_bytes());
        put(&mut image, 16 + 8, &(payload.len() as u64).to_le_bytes());
        image.extend_from_slice(payload);
        image
    }

    #[test]
    fn a_whole_image_is_good_and_each_shorter_one_is_not() {
        for (image, kind) in [(sample(), Kind::Elf), (wrapped(&sample()), Kind::Fatbin)] {
            assert_eq!(check(&image), Ok(kind));
            for len in 4..image.len() {
                assert!(check(&image[..len]).is_err(), "{kind:?} of {len} bytes");
            }
        }
        assert_eq!(check(b".version 8.0\0"), Ok(Kind::Text));
        assert_eq!(check(&[]), Ok(Kind::Text));
        assert_eq!(check(&[WRAPPER.to_le_bytes().as_slice(), &[0; 20]].concat()), Err(Bad::Wrapper));
    }

    #[test]
    fn no_changed_byte_leads_outside() {
        for image in [sample(), wrapped(&sample())] {
            for at in 0..image.len() {
                for value in [0, 1, 0x7f, 0x80, 0xff] {
                    let mut changed = image.clone();
                    changed[at] = value;
                    // It may be good or bad, but is read inside only.
                    let _ = check(&changed);
                }
            }
        }
        let mut outside = sample();
        put(&mut outside, 136 + 64 + 0x20, &(1_u64 << 40).to_le_bytes());
        assert_eq!(check(&outside), Err(Bad::Part));
        let mut endless = sample();
        put(&mut endless, 127, b"x");
        assert_eq!(check(&endless), Err(Bad::Part), "names without an end");
        let mut endless = wrapped(&sample());
        put(&mut endless, 16 + 4, &0_u32.to_le_bytes());
        assert_eq!(check(&endless), Err(Bad::Header), "an entry without a length");
    }
}
