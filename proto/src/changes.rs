//! Changes of memory that exists on both sides: a list of parts {offset, bytes}.
//!
//! `WRITE_HOST` and `HOST_CHANGED` carry it. Each side sends exactly the bytes that it changed, so
//! that neither overwrites the other's changes next to them.

use crate::frame::{BadFrame, Reader};

/// Memory is compared in blocks of this many bytes.
pub const BLOCK: usize = 4096;
/// A frame with changes is sent once it has this many bytes.
pub const FRAME: usize = 1 << 20;
/// Granularity of changes, in bytes.
const UNIT: usize = 4;

/// Appends one part to the body of a frame.
pub fn push(body: &mut Vec<u8>, offset: u64, bytes: &[u8]) {
    body.extend_from_slice(&offset.to_le_bytes());
    body.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
    body.extend_from_slice(bytes);
    body.resize(body.len().next_multiple_of(8), 0);
}

/// Appends the parts in which `new` differs from `old`.
///
/// Both have the same length and lie at `offset` in their region.
pub fn push_differing(body: &mut Vec<u8>, offset: u64, old: &[u8], new: &[u8]) {
    let same = |unit: usize| {
        let end = (unit + UNIT).min(new.len());
        old.get(unit..end) == Some(&new[unit..end])
    };
    let mut at = 0;
    while at < new.len() {
        if same(at) {
            at += UNIT;
            continue;
        }
        let start = at;
        while at < new.len() && !same(at) {
            at += UNIT;
        }
        push(body, offset + start as u64, &new[start..at.min(new.len())]);
    }
}

/// Reads the parts from the rest of a body, and passes each to `part`.
pub fn read<'a>(r: &mut Reader<'a>, mut part: impl FnMut(u64, &'a [u8])) -> Result<(), BadFrame> {
    while !r.is_empty() {
        let offset = r.word()?;
        part(offset, r.bytes()?);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_hold_exactly_the_units_that_differ() {
        let old = [7u8; 30];
        let mut new = old;
        (new[0], new[9], new[12], new[29]) = (1, 2, 3, 4);
        let mut body = Vec::new();
        push_differing(&mut body, 100, &old, &new);
        let mut parts = Vec::new();
        read(&mut Reader::new(&body), |offset, bytes| parts.push((offset, bytes.to_vec()))).unwrap();
        assert_eq!(
            parts,
            [(100, new[..4].to_vec()), (108, new[8..16].to_vec()), (128, new[28..].to_vec())],
            "units that differ, neighbours together, the last one short"
        );
        body.clear();
        push_differing(&mut body, 0, &old, &old);
        assert!(body.is_empty());
        assert!(read(&mut Reader::new(&[1; 8]), |_, _| ()).is_err(), "an offset without bytes");
    }
}
