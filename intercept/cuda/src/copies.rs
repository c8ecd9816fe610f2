//! Copies between the program's memory and the device, in the form that fits their size and the kind of host memory.

use std::sync::{Mutex, PoisonError};

use gpusession_link::lanes::HostRange;
use gpusession_proto::frame::{INLINE_MAX, op};

use crate::api::copy::{Cuboid, DEVICE, HOST};
use crate::client::{Client, string, unavailable};
use crate::entry::{INVALID_VALUE, OUT_OF_MEMORY, Result, UNKNOWN};
use crate::streams::Stream;
use crate::{mapped, ranges, streams, thread};

/// Frames of bulk transfers and their chunks are queued in one order.
static BULK: Mutex<()> = Mutex::new(());

/// Host to device, of the stream's lease. Pageable bytes are taken before this returns, pinned ones until the stream is synchronised.
pub fn to_device(target: u64, source: usize, len: usize, stream: &Stream) -> Result {
    thread::within(stream.ctx, || upwards(target, source, len, stream))
}

/// Copies from host memory where the server has it, in the stream's order, if what the stream does first may write to it: kernels that
/// can name it, or a host function. What other copies bring to it is waited for. False: the caller may read it now.
pub fn done_there(cuboid: Cuboid, source: usize, len: usize, stream: &Stream) -> Result<bool> {
    let client = stream.client;
    if !client.link.down.any() && !mapped::any() && !streams::host_function_due(client) {
        return Ok(false);
    }
    let Some(range) = ranges::find(source as u64).filter(|r| {
        r.kind.on_host() && r.server() == client.number && r.size - (source as u64 - r.base) >= len as u64
    }) else {
        return Ok(false);
    };
    client.link.settle(|t| t.fills(source, len));
    let known = range.kind.managed() || mapped::seen_by_kernels(client, source, len);
    if !known && !streams::host_function_due(client) {
        return Ok(false);
    }
    match in_order(cuboid, stream) {
        // The server has no room for it: what the stream does first is waited for instead.
        Err(OUT_OF_MEMORY) => stream.ask(op::STREAM_SYNC).map(|()| false),
        done => done.map(|()| true),
    }
}

fn upwards(target: u64, source: usize, len: usize, stream: &Stream) -> Result {
    let client = stream.client;
    if len == 0 {
        return Ok(());
    }
    stream.usable()?;
    client.late()?;
    if target == 0 || source == 0 {
        return Err(INVALID_VALUE);
    }
    mapped::upload(client)?;
    let cuboid = || Cuboid::row((DEVICE, target), (HOST, source as u64), len);
    if stream.capture().is_some() {
        return in_order(cuboid(), stream);
    }
    if done_there(cuboid(), source, len, stream)? {
        return Ok(());
    }
    let body = |w: &mut gpusession_proto::frame::Writer<'_>, inline: bool| {
        w.word(target);
        w.word(len as u64);
        w.word(stream.handle);
        w.word(u64::from(inline));
    };
    if len <= INLINE_MAX {
        // SAFETY: the program vouches for the source.
        let bytes = unsafe { std::slice::from_raw_parts(source as *const u8, len) };
        let sure = ranges::is_device(client, target, len as u64);
        let seq = client.post_if(sure, op::COPY_TO_DEVICE, |w| {
            body(w, true);
            w.bytes(bytes);
        })?;
        if sure {
            stream.copied_in(seq)
        } else {
            stream.worked(seq)
        }
        return client.late();
    }
    let lanes = client.link.lanes().map_err(unavailable)?;
    let order = BULK.lock().unwrap_or_else(PoisonError::into_inner);
    let seq = client.post(op::COPY_TO_DEVICE, |w| body(w, false))?;
    let pinned = ranges::is_pinned(client, source as u64, len as u64);
    if !pinned && ranges::is_device(client, target, len as u64) {
        stream.copied_in(seq)
    } else {
        stream.worked(seq)
    }
    // SAFETY: pageable memory: this waits until the bytes are sent. Pinned memory: the program may change it only after
    // it has synchronised, and freeing it synchronises.
    let sent = lanes.send(seq, unsafe { HostRange::new(source, len) });
    drop(order);
    if !pinned && !sent.wait() {
        return Err(crate::entry::DEVICE_UNAVAILABLE);
    }
    client.late()
}

/// A copy with host memory that the server has in its own memory meanwhile, so that nothing but the stream's order matters. On a stream
/// that captures it is a node, whose launches exchange the memory.
pub fn in_order(mut cuboid: Cuboid, stream: &Stream) -> Result {
    let client = stream.client;
    let (ids, regions) = cuboid.name_regions(client)?;
    let words: Vec<u8> = cuboid.words(client).iter().flat_map(|w| w.to_le_bytes()).collect();
    let body = |w: &mut gpusession_proto::frame::Writer<'_>| {
        w.word(stream.handle);
        ids.iter().for_each(|id| w.word(*id));
        w.bytes(&words);
    };
    if let Some(capture) = stream.capture() {
        client.call(op::COPY_HOST, body)?;
        capture.named.lock().unwrap_or_else(PoisonError::into_inner).extend(regions);
        return Ok(());
    }
    regions.iter().try_for_each(|region| region.upload())?;
    let seq = client.post(op::COPY_HOST, body)?;
    stream.worked(seq);
    client.late()
}

/// Device to host, of the stream's lease. `wait`: the program expects the bytes when the call returns (a synchronous copy, or pageable memory).
pub fn from_device(target: usize, source: u64, len: usize, stream: &Stream, wait: bool) -> Result {
    thread::within(stream.ctx, || downwards(target, source, len, stream, wait))
}

fn downwards(target: usize, source: u64, len: usize, stream: &Stream, wait: bool) -> Result {
    let client = stream.client;
    if len == 0 {
        return Ok(());
    }
    stream.usable()?;
    client.late()?;
    if target == 0 || source == 0 {
        return Err(INVALID_VALUE);
    }
    mapped::upload(client)?;
    // What kernels behind it read must be there in the stream's order.
    if stream.capture().is_some() || !wait && mapped::seen_by_kernels(client, target, len) {
        return in_order(Cuboid::row((HOST, target as u64), (DEVICE, source), len), stream);
    }
    let wait = wait || !ranges::is_pinned(client, target as u64, len as u64);
    let down = &client.link.down;
    let bulk = len > INLINE_MAX;
    if bulk {
        client.link.lanes().map_err(unavailable)?;
    }
    let body = |w: &mut gpusession_proto::frame::Writer<'_>| {
        w.word(source);
        w.word(len as u64);
        w.word(stream.handle);
        w.word(u64::from(wait));
        if bulk || !wait {
            // SAFETY: the program vouches for the target until the copy is complete.
            down.expect(w.seq(), unsafe { HostRange::new(target, len) }, stream.on(), !wait);
        }
    };
    if !wait {
        let seq = client.post(op::COPY_FROM_DEVICE, body)?;
        stream.worked(seq);
        return client.late();
    }
    let begun = client.link.begin_call(op::COPY_FROM_DEVICE, client.caller(), body).map_err(unavailable)?;
    let seq = begun.seq;
    stream.worked(seq);
    let reply = client.link.finish_call(begun).map_err(unavailable)?;
    if reply.status != 0 {
        if bulk {
            down.cancel(seq);
        }
        return Err(reply.status);
    }
    if bulk {
        match down.wait(seq) {
            0 => {}
            status => return Err(status),
        }
    } else {
        let mut r = reply.reader();
        let bytes = string(&mut r)?;
        if bytes.len() != len {
            return Err(UNKNOWN);
        }
        // SAFETY: the program vouches for the target, which has `len` bytes.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), target as *mut u8, len) };
    }
    stream.settle(seq);
    stream.synced(seq);
    client.told(0)
}

/// Posts a frame whose bytes travel on the lanes; returns when they may be freed.
pub fn bulk_post(
    client: &Client,
    op: u16,
    body: impl FnOnce(&mut gpusession_proto::frame::Writer<'_>),
    bytes: &[u8],
) -> Result<u64> {
    let lanes = client.link.lanes().map_err(unavailable)?;
    let order = BULK.lock().unwrap_or_else(PoisonError::into_inner);
    let seq = client.post(op, body)?;
    // SAFETY: this waits until the bytes are sent.
    let sent = lanes.send(seq, unsafe { HostRange::new(bytes.as_ptr() as usize, bytes.len()) });
    drop(order);
    if sent.wait() { Ok(seq) } else { Err(crate::entry::DEVICE_UNAVAILABLE) }
}
