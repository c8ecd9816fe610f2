//! 2D and 3D copies, which move a box of bytes.
//!
//! The host side of a box travels packed: its rows one after the other. On the way between lanes
//! and device memory, each chunk is copied by itself, as the boxes that its bytes are.

use std::sync::Arc;

use gpusession_proto::frame::{INLINE_MAX, Reader, WAIT, direction};

use super::copy::{Download, Mark, download, upload};
use super::flush::flush_results;
use crate::answer::{Answer, Done, bounded};
use crate::driver::{Handle, Status, check, status};
use crate::frame::Frame;
use crate::objects::known::Kind;
use crate::order::{BOX, box_on_lanes};
use crate::session::Session;

/// Longest packed box of a 2D or 3D copy, in bytes.
///
/// This process holds all of it if the other side is an array of a format that is not split;
/// clients split larger ones.
const MAX_BOX: usize = 8 << 30;

/// `COPY_BOX`: description, stream, direction, length of the packed bytes.
///
/// The description is a `CUDA_MEMCPY3D` without host pointers. Up to INLINE_MAX packed bytes of the
/// host side travel in the frame or its answer, more on the lanes; see [`direction`].
///
/// A box from the device without `WAIT` has no answer: its bytes land as those of a
/// `COPY_FROM_DEVICE`.
pub fn copy(session: &Arc<Session>, frame: &Frame, r: &mut Reader<'_>, answer: &mut Answer) -> Done {
    let words = description(session, r.bytes()?)?;
    let (name, to, len) = (r.word()?, r.word()?, bounded(r.word()?, MAX_BOX)?);
    let stream = session.stream(name)?;
    if !contained(&words, to, len) {
        return Err(status::INVALID_VALUE.into());
    }
    let bulk = len > INLINE_MAX;
    match to {
        direction::WITHIN => Ok(run(session, &words, stream)?),
        _ if box_on_lanes(to, len) && splits(session, &words[TARGET..]) => {
            let packed = Packed::of(&words, 0, len).ok_or(status::INVALID_VALUE)?;
            upload(session, frame, len, stream, |offset, len, bytes| {
                packed.run(session, (offset, len), bytes, stream)
            })
        }
        direction::UP | direction::UP_BY_LANES => {
            let on_lanes = box_on_lanes(to, len);
            to_device(session, frame, r, words, (len, on_lanes), stream)
        }
        direction::DOWN if bulk && !splits(session, &words) => {
            whole_from_device(session, frame, words, len, stream, answer)
        }
        direction::DOWN => {
            let packed = Packed::of(&words, TARGET, len).ok_or(status::INVALID_VALUE)?;
            let wait = frame.header.flags.get() & WAIT != 0;
            let to = Download { len, stream, name, wait };
            download(session, frame, &to, answer, |offset, len, target| {
                packed.run(session, (offset, len), target, stream)
            })?;
            if bulk && wait {
                // SAFETY: a stream of this worker.
                check(unsafe { (session.driver.call.cuStreamSynchronize)(stream) })?;
                flush_results(session, answer);
            }
            Ok(())
        }
        _ => Err(status::INVALID_VALUE.into()),
    }
}

/// Returns `true` if a side in device memory or an array can be copied in parts of any bytes.
///
/// Chunks hold whole elements of plain formats; compressed and planar ones have rows of their own
/// kind.
fn splits(session: &Session, side: &[u64]) -> bool {
    /// Words of `CUDA_ARRAY3D_DESCRIPTOR`: width, height, depth, format and channels, flags.
    const DESCRIPTOR: usize = 5;
    /// Returns `true` for `CU_AD_FORMAT_*` of integers of 8 to 32 bits, also normalized ones, half
    /// and single precision.
    const fn plain(format: u32) -> bool {
        matches!(format, 0x01..=0x03 | 0x08..=0x0a | 0x10 | 0x20 | 0xc0..=0xcb)
    }
    if side[4] as u32 != ARRAY {
        return true;
    }
    let mut descriptor = [0u64; DESCRIPTOR];
    // SAFETY: the structure has cuda.h's size; the array is known.
    let got = unsafe {
        (session.driver.generated.cuArray3DGetDescriptor_v2)(descriptor.as_mut_ptr().cast(), side[7])
    };
    got == 0 && plain(descriptor[3] as u32)
}

/// Copies a box to the device whose bytes came with the frame, or whose target is not split.
fn to_device(
    session: &Session,
    frame: &Frame,
    r: &mut Reader<'_>,
    mut words: Words,
    (len, on_lanes): (usize, bool),
    stream: Handle,
) -> Done {
    let mut packed = vec![0u8; len];
    if !on_lanes {
        let bytes = r.bytes()?;
        if bytes.len() != len {
            return Err(status::INVALID_VALUE.into());
        }
        packed.copy_from_slice(bytes);
        session.lanes.inline(len, 0);
    } else {
        receive(session, frame.header.seq.get(), &mut packed, stream)?;
    }
    words[SRC_HOST] = packed.as_ptr() as u64;
    run(session, &words, stream)?;
    // The packed bytes live no longer than this call.
    // SAFETY: a stream of this worker.
    Ok(check(unsafe { (session.driver.call.cuStreamSynchronize)(stream) })?)
}

/// Copies a large box out of an array that is not split, for a program that waits.
fn whole_from_device(
    session: &Session,
    frame: &Frame,
    mut words: Words,
    len: usize,
    stream: Handle,
    answer: &mut Answer,
) -> Done {
    if frame.header.flags.get() & WAIT == 0 {
        return Err(status::INVALID_VALUE.into());
    }
    let mut packed = vec![0u8; len];
    words[DST_HOST] = packed.as_mut_ptr() as u64;
    run(session, &words, stream)?;
    // SAFETY: a stream of this worker.
    check(unsafe { (session.driver.call.cuStreamSynchronize)(stream) })?;
    flush_results(session, answer);
    Ok(send(session, frame.header.seq.get(), &packed)?)
}

/// Words of a `CUDA_MEMCPY3D`.
type Words = [u64; BOX / 8];

/// Box whose host side is packed.
struct Packed<'a> {
    words: &'a Words,
    /// First word of the host side.
    host: usize,
    width: usize,
    height: usize,
}

/// Box in a packed one, in bytes, rows and layers.
#[derive(Debug, PartialEq, Eq)]
struct Part {
    /// Distance of its bytes from the first byte of the range that it belongs to.
    at: usize,
    from: [usize; 3],
    size: [usize; 3],
}

impl<'a> Packed<'a> {
    /// Returns the box, if the side that starts with word `host` is packed and has `len` bytes.
    fn of(words: &'a Words, host: usize, len: usize) -> Option<Self> {
        let [width, height, depth] = [words[22], words[23], words[24]];
        let bytes = width.checked_mul(height)?.checked_mul(depth)?;
        let side = &words[host..host + 11];
        let packed = side[..4] == [0; 4] && side[9] == width && side[10] == height;
        (packed && bytes > 0 && bytes == len as u64).then_some(Self {
            words,
            host,
            width: width as usize,
            height: height as usize,
        })
    }

    /// Returns the boxes that a range of the packed bytes consists of: at most five.
    fn parts(&self, offset: usize, len: usize) -> impl Iterator<Item = Part> + use<> {
        let (width, height, mut at) = (self.width, self.height, 0);
        std::iter::from_fn(move || {
            let (left, place) = (len - at, offset + at);
            let (x, row) = (place % width, place / width);
            let (y, z) = (row % height, row / height);
            let size = if left == 0 {
                return None;
            } else if x != 0 || left < width {
                [left.min(width - x), 1, 1]
            } else if y != 0 || left < width * height {
                [width, (left / width).min(height - y), 1]
            } else {
                [width, height, left / (width * height)]
            };
            let part = Part { at, from: [x, y, z], size };
            at += size.iter().product::<usize>();
            Some(part)
        })
    }

    /// Copies a range of the packed bytes, which lies at `bytes`.
    ///
    /// After an error no copy uses `bytes`.
    fn run(
        &self,
        session: &Session,
        (offset, len): (usize, usize),
        bytes: *mut u8,
        stream: Handle,
    ) -> Result<(), Status> {
        let mut parts = self.parts(offset, len);
        parts.try_for_each(|part| run(session, &self.part(&part, bytes), stream)).inspect_err(|_| {
            // Earlier parts may be under way, and the caller uses their memory again.
            // SAFETY: a stream of this worker.
            unsafe { (session.driver.call.cuStreamSynchronize)(stream) };
        })
    }

    /// Returns the copy of a part, whose range lies at `bytes`.
    fn part(&self, part: &Part, bytes: *mut u8) -> Words {
        let mut words = *self.words;
        let device = TARGET - self.host;
        for axis in 0..3 {
            words[device + axis] = words[device + axis].wrapping_add(part.from[axis] as u64);
            words[22 + axis] = part.size[axis] as u64;
        }
        (words[self.host + 9], words[self.host + 10]) = (part.size[0] as u64, part.size[1] as u64);
        words[self.host + SRC_HOST] = bytes.wrapping_add(part.at) as u64;
        words
    }
}

/// Reads a `CUDA_MEMCPY3D`, whose arrays are known.
fn description(session: &Session, bytes: &[u8]) -> Result<Words, Status> {
    let mut words = [0; BOX / 8];
    if bytes.len() != BOX {
        return Err(status::INVALID_VALUE);
    }
    for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(8)) {
        *word = u64::from_le_bytes(bytes.try_into().unwrap_or_default());
    }
    for side in [0, TARGET].into_iter().filter(|side| words[side + 4] as u32 == ARRAY) {
        session.known.check(Kind::Array, words[side + 7])?;
    }
    Ok(words)
}

/// Returns `true` if a box names no host memory but the packed bytes, and stays within them.
///
/// Otherwise a client could read or write the worker's own memory.
pub fn contained(words: &[u64], to: u64, len: usize) -> bool {
    let kind = |side: usize| words[side + 4] as u32;
    let on_device = |side: usize| matches!(kind(side), DEVICE | ARRAY);
    let packed = |side: usize| kind(side) == HOST && end(words, side).is_some_and(|end| end <= len as u64);
    match to {
        direction::WITHIN => on_device(0) && on_device(TARGET),
        direction::UP | direction::UP_BY_LANES => packed(0) && on_device(TARGET),
        direction::DOWN => on_device(0) && packed(TARGET),
        _ => false,
    }
}

/// Returns the `CUDA_MEMCPY3D` of a copy between device memory and mirrored host memory.
///
/// The host pointers in `copy`, as graphs keep it, are offsets in the `regions` of source
/// and target (0: not host memory). The result has this process's addresses.
pub fn mirrored(session: &Session, copy: &[u8], regions: [u64; 2]) -> Result<Words, Status> {
    let mut words = description(session, copy)?;
    for (side, region) in [0, TARGET].into_iter().zip(regions) {
        if matches!(words[side + 4] as u32, DEVICE | ARRAY) && region == 0 {
            continue;
        }
        let end =
            end(&words, side).filter(|_| words[side + 4] as u32 == HOST).ok_or(status::INVALID_VALUE)?;
        words[side + SRC_HOST] = session.mirrors.address(region, words[side + SRC_HOST], end)?;
    }
    Ok(words)
}

/// `COPY_HOST`: stream, regions of source and target, description (see [`mirrored`]).
///
/// It serves captures: no bytes travel now.
pub fn copy_host(session: &Session, r: &mut Reader<'_>) -> Done {
    let (stream, regions) = (session.stream(r.word()?)?, [r.word()?, r.word()?]);
    let words = mirrored(session, r.bytes()?, regions)?;
    Ok(run(session, &words, stream)?)
}

/// Returns the number of bytes from a side's base to the end of the box.
fn end(words: &[u64], side: usize) -> Option<u64> {
    let (x, y, z, pitch, rows) =
        (words[side], words[side + 1], words[side + 2], words[side + 9], words[side + 10]);
    let (width, height, depth) = (words[22], words[23], words[24]);
    let plane = z.checked_add(depth.checked_sub(1)?)?.checked_mul(rows)?;
    let row = plane.checked_add(y)?.checked_add(height.checked_sub(1)?)?;
    row.checked_mul(pitch)?.checked_add(x)?.checked_add(width)
}

/// Words of `CUDA_MEMCPY3D` that hold the host pointers.
const SRC_HOST: usize = 5;
const DST_HOST: usize = 16;
/// First word of the target's side.
const TARGET: usize = 11;
/// `CUmemorytype`
const HOST: u32 = 1;
const DEVICE: u32 = 2;
const ARRAY: u32 = 3;

fn run(session: &Session, words: &Words, stream: Handle) -> Result<(), Status> {
    // SAFETY: the structure has cuda.h's layout; the callers vouch for the host pointers in it.
    check(unsafe { (session.driver.call.cuMemcpy3DAsync_v2)(words.as_ptr().cast(), stream) })
}

fn receive(session: &Session, transfer: u64, packed: &mut [u8], stream: Handle) -> Result<(), Status> {
    let mut left = packed.len();
    let mut mark = Mark::new(session.driver, stream);
    while left > 0 {
        let mut chunk = session.lanes.next_chunk(session.driver, transfer, || mark.reached())?;
        let start = chunk.offset as usize;
        let inside = start.checked_add(chunk.len).and_then(|end| packed.get_mut(start..end));
        if let Some(target) = inside {
            // SAFETY: the chunk's memory holds `chunk.len` bytes.
            let bytes = unsafe { std::slice::from_raw_parts(chunk.memory.address(), chunk.len) };
            target.copy_from_slice(bytes);
            left = left.saturating_sub(chunk.len);
            session.lanes.copied(chunk);
        } else {
            session.lanes.copied(chunk);
            return Err(status::INVALID_VALUE);
        }
    }
    Ok(())
}

fn send(session: &Session, transfer: u64, packed: &[u8]) -> Result<(), Status> {
    session.lanes.send(transfer, packed.len(), None, |offset, len, slot| {
        // SAFETY: the slot has room for a chunk, and `packed` has `len` bytes from `offset`.
        unsafe { std::ptr::copy_nonoverlapping(packed[offset..offset + len].as_ptr(), slot.address, len) };
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes a copy of `height` rows of `width` bytes between sides of a kind, pitch and rows.
    fn words(
        source: (u32, u64, u64),
        target: (u32, u64, u64),
        (width, height): (u64, u64),
    ) -> [u64; BOX / 8] {
        let mut words = [0; BOX / 8];
        for (side, (kind, pitch, rows)) in [(0, source), (TARGET, target)] {
            (words[side + 4], words[side + 9], words[side + 10]) = (kind.into(), pitch, rows);
        }
        (words[22], words[23], words[24]) = (width, height, 2);
        words
    }

    const HOST_SIDE: (u32, u64, u64) = (HOST, 16, 4);
    const DEVICE_SIDE: (u32, u64, u64) = (DEVICE, 512, 8);

    #[test]
    fn box_stays_within_the_packed_bytes() {
        let up = words(HOST_SIDE, DEVICE_SIDE, (16, 4));
        assert!(contained(&up, 1, 128) && !contained(&up, 1, 127));
        for (word, value) in [(0, 1), (1, 1), (2, 1), (9, 17), (10, 5), (22, 17), (23, 5), (24, 3)] {
            let mut larger = up;
            larger[word] = value;
            assert!(!contained(&larger, 1, 128), "word {word}");
            larger[word] = u64::MAX;
            assert!(!contained(&larger, 1, 128), "word {word} at its most");
        }
        for empty in [23, 24] {
            let mut none = up;
            none[empty] = 0;
            assert!(!contained(&none, 1, 128), "no rows");
        }
    }

    #[test]
    fn range_of_packed_bytes_is_a_few_boxes_that_hold_each_byte_once() {
        let (width, height, depth) = (5, 3, 4);
        let words = words((DEVICE, 512, 8), (HOST, width as u64, height as u64), (5, 3));
        let words = {
            let mut all = words;
            all[24] = depth as u64;
            all
        };
        let len = width * height * depth;
        let packed = Packed::of(&words, TARGET, len).unwrap();
        for offset in 0..len {
            for end in offset + 1..=len {
                let parts: Vec<Part> = packed.parts(offset, end - offset).collect();
                assert!(parts.len() <= 5, "{offset} to {end}: {parts:?}");
                let mut bytes = Vec::new();
                for Part { at, from: [x, y, z], size: [w, h, d] } in parts {
                    assert!(x + w <= width && y + h <= height && z + d <= depth, "{offset} to {end}");
                    assert_eq!(bytes.len(), at);
                    for (layer, row) in (z..z + d).flat_map(|layer| (y..y + h).map(move |row| (layer, row))) {
                        bytes.extend((x..x + w).map(|column| (layer * height + row) * width + column));
                    }
                }
                assert_eq!(bytes, (offset..end).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn part_moves_its_bytes_between_the_slot_and_its_place_in_the_box() {
        let mut words = words((DEVICE, 512, 8), (HOST, 5, 3), (5, 3));
        (words[0], words[1], words[2], words[6]) = (7, 8, 9, 0x1000);
        let packed = Packed::of(&words, TARGET, 30).unwrap();
        let part = Part { at: 3, from: [0, 1, 1], size: [5, 2, 1] };
        let copy = packed.part(&part, std::ptr::without_provenance_mut(0x2000));
        assert_eq!(copy[..7], [7, 9, 10, 0, DEVICE.into(), 0, 0x1000], "the place of the part");
        assert_eq!((copy[9], copy[10]), (512, 8), "the device's pitch and rows");
        let host = [0, 0, 0, 0, HOST.into(), 0x2003, 0, 0, 0, 5, 2];
        assert_eq!(copy[TARGET..TARGET + 11], host);
        assert_eq!(copy[22..], [5, 2, 1]);
        assert!(contained(&copy, 2, 0x2003 + 10 - 0x2000));
    }

    #[test]
    fn only_a_packed_side_is_split() {
        let words = words((DEVICE, 512, 8), (HOST, 16, 4), (16, 4));
        assert!(Packed::of(&words, TARGET, 128).is_some());
        assert!(Packed::of(&words, TARGET, 127).is_none());
        for (word, value) in [(11, 1), (12, 1), (13, 1), (14, 1), (20, 17), (21, 5), (22, 15), (24, 0)] {
            let mut other = words;
            other[word] = value;
            assert!(Packed::of(&other, TARGET, 128).is_none(), "word {word}");
        }
        let mut huge = words;
        (huge[22], huge[20]) = (u64::MAX, u64::MAX);
        assert!(Packed::of(&huge, TARGET, 128).is_none());
    }

    #[test]
    fn direction_names_the_only_host_side() {
        let sides = [HOST_SIDE, DEVICE_SIDE, (ARRAY, 512, 8), (4, 16, 4), (0, 16, 4)];
        for source in sides {
            for target in sides {
                let words = words(source, target, (16, 4));
                let device = |side: (u32, u64, u64)| matches!(side.0, DEVICE | ARRAY);
                let expected = [
                    device(source) && device(target),
                    source.0 == HOST && device(target),
                    device(source) && target.0 == HOST,
                    source.0 == HOST && device(target),
                    false,
                ];
                let allowed = [0, 1, 2, 3, 4].map(|direction| contained(&words, direction, 128));
                assert_eq!(allowed, expected, "{} to {}", source.0, target.0);
            }
        }
    }
}
