//! Copies between the client's host memory and the device.
//!
//! Few bytes travel inside the frame or its answer, many on the lanes.

use std::sync::Arc;

use gpusession_proto::frame::{INLINE_MAX, Reader, op};

use super::allocations;
use super::flush::flush_results;
use crate::answer::{Answer, Done, Failure, bounded};
use crate::driver::{Handle, Status, check, status};
use crate::executor::Executor;
use crate::frame::Frame;
use crate::lanes::Source;
use crate::order::BOX;
use crate::session::Session;

/// Longest copy, in bytes: more than any memory has.
const MAX_COPY: usize = 1 << 47;
/// Longest packed box of a 2D or 3D copy, in bytes.
///
/// This process holds the whole box; clients split larger ones.
const MAX_BOX: usize = 8 << 30;

/// The default stream of the current context.
const NULL: Handle = std::ptr::null_mut();
/// Bytes of host memory for a copy between devices that cannot reach each other.
const STAGE: usize = 8 << 20;

/// `CUDA_ERROR_DEVICE_UNAVAILABLE`: a lane is lost, and the whole connection with it.
const LANE_GONE: Status = 46;

/// `cuMemcpyDtoDAsync_v2` in a lease of several devices: destination, source, length, stream.
///
/// The driver copies between mappings only if the device of the frame's context reaches both.
/// Otherwise the bytes pass through this process, in the stream's order.
pub fn between_devices(
    session: &Session,
    executor: &mut Executor,
    frame: &Frame,
    r: &mut Reader<'_>,
    answer: &mut Answer,
) -> Done {
    let mut body = frame.reader();
    let (target, source, len) = (body.word()?, body.word()?, bounded(body.word()?, usize::MAX)?);
    let stream = session.stream(body.word()?)?;
    let ctx = frame.header.ctx.get();
    let (_, here) = session.contexts.get(ctx)?;
    let owner = |address| session.memory.device_of(address).unwrap_or(here);
    let (to, from) = (owner(target), owner(source));
    if session.contexts.reaches(here, to) && session.contexts.reaches(here, from) {
        return allocations::generated(session, frame, r, answer);
    }
    let call = &session.driver.call;
    // SAFETY: a stream of this worker; a capture cannot contain the call, which then fails.
    check(unsafe { (call.cuStreamSynchronize)(stream) })?;
    let mut stage = vec![0u8; len.min(STAGE)];
    let enter = |device| {
        // SAFETY: a context of this worker.
        check(unsafe { (call.cuCtxSetCurrent)(session.contexts.primary(device)?) })
    };
    let mut relay = || {
        for at in (0..len).step_by(STAGE) {
            let part = stage.len().min(len - at);
            enter(from)?;
            // SAFETY: `part` bytes of the buffer, which outlives the synchronisation; the driver
            // checks the address.
            check(unsafe {
                (call.cuMemcpyDtoHAsync_v2)(
                    stage.as_mut_ptr().cast(),
                    source.wrapping_add(at as u64),
                    part,
                    NULL,
                )
            })?;
            // SAFETY: the null stream of the current context.
            check(unsafe { (call.cuStreamSynchronize)(NULL) })?;
            enter(to)?;
            // SAFETY: as above.
            check(unsafe {
                (call.cuMemcpyHtoDAsync_v2)(target.wrapping_add(at as u64), stage.as_ptr().cast(), part, NULL)
            })?;
            // SAFETY: as above.
            check(unsafe { (call.cuStreamSynchronize)(NULL) })?;
        }
        Ok(())
    };
    let relayed: Result<(), Status> = relay();
    executor.current = 0;
    session.contexts.enter(session.driver, executor, ctx)?;
    Ok(relayed?)
}

/// `COPY_TO_DEVICE`: destination, length, stream, whether the bytes follow in the frame.
pub fn to_device(session: &Session, frame: &Frame, r: &mut Reader<'_>) -> Done {
    let (target, len, stream, inline) =
        (r.word()?, bounded(r.word()?, MAX_COPY)?, session.stream(r.word()?)?, r.word()? != 0);
    let call = &session.driver.call;
    if inline {
        let bytes = r.bytes()?;
        if bytes.len() != len {
            return Err(status::INVALID_VALUE.into());
        }
        session.lanes.inline(len, 0);
        // SAFETY: `bytes` has `len` bytes, and the driver has copied pageable bytes when it
        // returns.
        return Ok(check(unsafe {
            (call.cuMemcpyHtoDAsync_v2)(target, bytes.as_ptr().cast(), len, stream)
        })?);
    }
    let transfer = frame.header.seq.get();
    let mut left = len;
    let mut first_error = 0;
    while left > 0 {
        let Some(mut chunk) = session.lanes.next_chunk(transfer) else { return Err(LANE_GONE.into()) };
        let inside =
            chunk.offset as usize <= len && chunk.len <= len - chunk.offset as usize && chunk.len <= left;
        if !inside {
            session.lanes.copied(chunk);
            return Err(Failure::Status(status::INVALID_VALUE));
        }
        left -= chunk.len;
        let ctx = frame.header.ctx.get();
        if let Err(error) = chunk.slot.enter(session.driver, &session.contexts, ctx) {
            first_error = error;
        }
        if first_error == 0 {
            // SAFETY: the slot holds `chunk.len` bytes and is not reused before its event has
            // happened.
            first_error = unsafe {
                match (call.cuMemcpyHtoDAsync_v2)(
                    target.wrapping_add(chunk.offset),
                    chunk.slot.address.cast(),
                    chunk.len,
                    stream,
                ) {
                    0 => (call.cuEventRecord)(chunk.slot.event, stream),
                    error => error,
                }
            };
        }
        session.lanes.copied(chunk);
    }
    Ok(check(first_error)?)
}

/// `COPY_FROM_DEVICE`: source, length, stream, whether the program waits.
pub fn from_device(session: &Arc<Session>, frame: &Frame, r: &mut Reader<'_>, answer: &mut Answer) -> Done {
    let (source, len, name, wait) = (r.word()?, bounded(r.word()?, MAX_COPY)?, r.word()?, r.word()? != 0);
    let stream = session.stream(name)?;
    let call = &session.driver.call;
    let seq = frame.header.seq.get();
    if len > INLINE_MAX {
        let from = Source { driver: session.driver, contexts: &session.contexts, stream, name };
        let queued = session.lanes.send(seq, len, Some(from), |offset, len, slot| {
            slot.enter(session.driver, &session.contexts, frame.header.ctx.get())?;
            // SAFETY: the slot has room for a chunk and is not reused before it is sent; stream and
            // event are this worker's.
            check(unsafe {
                match (call.cuMemcpyDtoHAsync_v2)(
                    slot.address.cast(),
                    source.wrapping_add(offset as u64),
                    len,
                    stream,
                ) {
                    0 => (call.cuEventRecord)(slot.event, stream),
                    error => error,
                }
            })
        });
        return Ok(queued?);
    }
    session.lanes.inline(0, len);
    let slots = session.landing.slots(session.driver, &session.contexts)?;
    let Some(mut slot) = slots.try_take() else {
        return without_slot(session, frame, (source, len, stream, wait), answer);
    };
    if let Err(error) = slot.enter(session.driver, &session.contexts, frame.header.ctx.get()) {
        slots.give(slot);
        return Err(error.into());
    }
    // SAFETY: the slot has room for the bytes, at most INLINE_MAX.
    let copied = check(unsafe { (call.cuMemcpyDtoHAsync_v2)(slot.address.cast(), source, len, stream) });
    if wait {
        // SAFETY: a stream of this worker.
        let synced = copied.and_then(|()| check(unsafe { (call.cuStreamSynchronize)(stream) }));
        flush_results(session, answer);
        // SAFETY: the device has filled `len` bytes of the slot.
        answer.bytes(unsafe { std::slice::from_raw_parts(slot.address, len) });
        slots.give(slot);
        return Ok(synced?);
    }
    // SAFETY: event and stream belong to this worker.
    match copied.and_then(|()| check(unsafe { (call.cuEventRecord)(slot.event, stream) })) {
        Ok(()) => session.landing.push(session.driver, &session.replies, seq, stream, slot, len),
        Err(error) => {
            slots.give(slot);
            return Err(error.into());
        }
    }
    Ok(())
}

/// Copies a few bytes from the device while blocked streams hold all slots.
///
/// Those streams must not delay the others.
fn without_slot(
    session: &Session,
    frame: &Frame,
    (source, len, stream, wait): (u64, usize, Handle, bool),
    answer: &mut Answer,
) -> Done {
    let call = &session.driver.call;
    let mut bytes = vec![0u8; len];
    // SAFETY: the buffer has `len` bytes and outlives the synchronisation; the stream is this
    // worker's.
    check(unsafe {
        match (call.cuMemcpyDtoHAsync_v2)(bytes.as_mut_ptr().cast(), source, len, stream) {
            0 => (call.cuStreamSynchronize)(stream),
            error => error,
        }
    })?;
    flush_results(session, answer);
    if wait {
        answer.bytes(&bytes);
    } else {
        session.replies.send_with(op::LANDED, frame.header.seq.get(), 0, |w| w.bytes(&bytes));
    }
    Ok(())
}

/// `COPY_BOX`: description, stream, direction, length of the packed bytes.
///
/// The description is a `CUDA_MEMCPY3D` without host pointers. The direction is 0 from device to
/// device, 1 to the device, 2 from the device. Up to INLINE_MAX packed bytes of the host side
/// travel in the frame or its answer, more on the lanes.
pub fn copy_box(session: &Session, frame: &Frame, r: &mut Reader<'_>, answer: &mut Answer) -> Done {
    let description = r.bytes()?;
    let (stream, direction, len) = (session.stream(r.word()?)?, r.word()?, bounded(r.word()?, MAX_BOX)?);
    let mut words = [0u64; BOX / 8];
    if description.len() != BOX {
        return Err(status::INVALID_VALUE.into());
    }
    for (word, bytes) in words.iter_mut().zip(description.chunks_exact(8)) {
        *word = u64::from_le_bytes(bytes.try_into().unwrap_or_default());
    }
    if !contained(&words, direction, len) {
        return Err(status::INVALID_VALUE.into());
    }
    match direction {
        0 => return Ok(run_box(session, &words, stream)?),
        1 => {
            let mut packed = vec![0u8; len];
            if len <= INLINE_MAX {
                let bytes = r.bytes()?;
                if bytes.len() != len {
                    return Err(status::INVALID_VALUE.into());
                }
                packed.copy_from_slice(bytes);
                session.lanes.inline(len, 0);
            } else {
                receive(session, frame.header.seq.get(), &mut packed)?;
            }
            words[SRC_HOST] = packed.as_ptr() as u64;
            run_box(session, &words, stream)?;
            // The packed bytes live no longer than this call.
            // SAFETY: a stream of this worker.
            check(unsafe { (session.driver.call.cuStreamSynchronize)(stream) })?;
        }
        2 => {
            let mut packed = vec![0u8; len];
            words[DST_HOST] = packed.as_mut_ptr() as u64;
            run_box(session, &words, stream)?;
            // SAFETY: a stream of this worker.
            check(unsafe { (session.driver.call.cuStreamSynchronize)(stream) })?;
            flush_results(session, answer);
            if len <= INLINE_MAX {
                answer.bytes(&packed);
                session.lanes.inline(0, len);
            } else {
                send(session, frame.header.seq.get(), &packed)?;
            }
        }
        _ => return Err(status::INVALID_VALUE.into()),
    }
    Ok(())
}

/// Returns `true` if a box names no host memory but the packed bytes, and stays within them.
///
/// Otherwise a client could read or write the worker's own memory.
pub fn contained(words: &[u64], direction: u64, len: usize) -> bool {
    let kind = |side: usize| words[side + 4] as u32;
    let on_device = |side: usize| matches!(kind(side), DEVICE | ARRAY);
    let packed = |side: usize| kind(side) == HOST && end(words, side).is_some_and(|end| end <= len as u64);
    match direction {
        0 => on_device(0) && on_device(TARGET),
        1 => packed(0) && on_device(TARGET),
        2 => on_device(0) && packed(TARGET),
        _ => false,
    }
}

/// Returns the `CUDA_MEMCPY3D` of a copy between device memory and mirrored host memory.
///
/// The host pointers in `description`, as graphs keep it, are offsets in the `regions` of source
/// and target (0: not host memory). The result has this process's addresses.
pub fn mirrored(session: &Session, description: &[u8], regions: [u64; 2]) -> Result<[u64; BOX / 8], Status> {
    let mut words = [0u64; BOX / 8];
    if description.len() != BOX {
        return Err(status::INVALID_VALUE);
    }
    for (word, bytes) in words.iter_mut().zip(description.chunks_exact(8)) {
        *word = u64::from_le_bytes(bytes.try_into().unwrap_or_default());
    }
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
    Ok(run_box(session, &words, stream)?)
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

fn run_box(session: &Session, words: &[u64; BOX / 8], stream: Handle) -> Result<(), Status> {
    // SAFETY: the structure has cuda.h's layout; the callers vouch for the host pointers in it.
    check(unsafe { (session.driver.call.cuMemcpy3DAsync_v2)(words.as_ptr().cast(), stream) })
}

fn receive(session: &Session, transfer: u64, packed: &mut [u8]) -> Result<(), Status> {
    let mut left = packed.len();
    while left > 0 {
        let Some(chunk) = session.lanes.next_chunk(transfer) else { return Err(LANE_GONE) };
        let start = chunk.offset as usize;
        let inside = start.checked_add(chunk.len).and_then(|end| packed.get_mut(start..end));
        if let Some(target) = inside {
            // SAFETY: the slot holds `chunk.len` bytes.
            target.copy_from_slice(unsafe { std::slice::from_raw_parts(chunk.slot.address, chunk.len) });
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
                    false,
                ];
                let allowed = [0, 1, 2, 3].map(|direction| contained(&words, direction, 128));
                assert_eq!(allowed, expected, "{} to {}", source.0, target.0);
            }
        }
    }
}
