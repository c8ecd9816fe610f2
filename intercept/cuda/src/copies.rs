//! Copies between the program's memory and the device, in the form that fits their size and the kind of host memory.

use std::sync::{Arc, Mutex, PoisonError};

use gpusession_link::lanes::HostRange;
use gpusession_proto::frame::{INLINE_MAX, op};

use crate::api::copy::{self, Cuboid, DEVICE, HOST};
use crate::client::{Client, string, unavailable};
use crate::entry::{INVALID_VALUE, OUT_OF_MEMORY, Result, UNKNOWN};
use crate::host_functions::Due;
use crate::mapped::Region;
use crate::ranges::Range;
use crate::streams::Stream;
use crate::{host_functions, mapped, ranges, thread};

/// Frames of bulk transfers and their chunks are queued in one order.
static BULK: Mutex<()> = Mutex::new(());

/// Largest host memory that the server is given a copy of for the sake of a host function, in bytes. Larger memory is waited for.
const PLACED: u64 = 16 << 20;

/// The same for what a copy brings to the host behind a function of a stream: larger memory may be waited for by copies from there.
const PLACED_BEHIND: u64 = 1 << 20;

/// Pinned or managed memory of the client that holds these bytes.
fn known(client: &Client, address: usize, len: usize) -> Option<Range> {
    ranges::find(address as u64).filter(|r| {
        r.kind.on_host() && r.server() == client.number && r.size - (address as u64 - r.base) >= len as u64
    })
}

/// Copies from host memory where the server has it, in the stream's order, if it has it, or if a host function may still write to it. What
/// other copies bring to it is waited for. `wait`: the program may change the source when this returns. False: the caller reads it now.
pub fn done_there(
    mut cuboid: Cuboid,
    source: usize,
    len: usize,
    stream: &Stream,
    wait: bool,
) -> Result<bool> {
    let client = stream.client;
    let mut due = host_functions::due(stream) > Due::Nothing;
    if !due && !mapped::any() && !client.link.down.any() {
        return Ok(false);
    }
    let Some(range) = known(client, source, len) else { return Ok(false) };
    if due && range.size > PLACED {
        stream.ask(op::STREAM_SYNC)?;
        due = false;
    }
    if !mapped::there(client, source, len) {
        client.link.settle(|t| t.fills(source, len));
        if !due {
            return Ok(false);
        }
    }
    let placed = match cuboid.name_regions(client) {
        // The server has no room for it.
        Err(OUT_OF_MEMORY) => return stream.ask(op::STREAM_SYNC).map(|()| false),
        placed => placed?,
    };
    put(&cuboid, placed, stream)?;
    if wait {
        stream.ask(op::STREAM_SYNC)?;
    }
    Ok(true)
}

/// Host to device, of the stream's lease. Pageable bytes are taken before this returns, pinned ones until the stream is synchronised, or
/// before this returns if the call is to `wait`.
pub fn to_device(target: u64, source: usize, len: usize, stream: &Stream, wait: bool) -> Result {
    thread::within(stream.ctx, || upwards(target, source, len, stream, wait))
}

fn upwards(target: u64, source: usize, len: usize, stream: &Stream, wait: bool) -> Result {
    let client = stream.client;
    if len == 0 {
        return Ok(());
    }
    stream.usable()?;
    client.late()?;
    if target == 0 || source == 0 {
        return Err(INVALID_VALUE);
    }
    let cuboid = || Cuboid::row((DEVICE, target), (HOST, source as u64), len);
    if stream.capture().is_some() {
        return in_order(cuboid(), stream);
    }
    mapped::upload(client)?;
    if mapped::any() && known(client, source, len).is_some_and(|r| r.kind.managed()) {
        return managed(target, source as u64, len, stream, wait);
    }
    if done_there(cuboid(), source, len, stream, wait)? {
        return Ok(());
    }
    // Managed memory as its target.
    let shown = mapped::any() && ranges::find(target).is_some_and(|r| r.kind.managed());
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
        if sure && !shown {
            stream.copied_in(seq)
        } else {
            stream.worked(seq)
        }
        return upwards_done(source, len, stream, wait, shown);
    }
    let lanes = client.link.lanes().map_err(unavailable)?;
    let order = BULK.lock().unwrap_or_else(PoisonError::into_inner);
    let seq = client.post(op::COPY_TO_DEVICE, |w| body(w, false))?;
    let pinned = ranges::is_pinned(client, source as u64, len as u64);
    let taken = wait || !pinned;
    if taken && !shown && ranges::is_device(client, target, len as u64) {
        stream.copied_in(seq)
    } else {
        stream.worked(seq)
    }
    // SAFETY: pageable memory, or a synchronous call: this waits until the bytes are sent. Pinned memory: the program may change it
    // only after it has synchronised, and freeing it synchronises.
    let sent = lanes.send(seq, unsafe { HostRange::new(source, len) });
    drop(order);
    if taken && !sent.wait() {
        return Err(crate::entry::DEVICE_UNAVAILABLE);
    }
    upwards_done(source, len, stream, wait, shown)
}

/// A synchronous copy from pinned memory is complete when it returns, for every stream; one from pageable memory need not be. What it has
/// brought to memory that the program sees, too, must be there.
fn upwards_done(source: usize, len: usize, stream: &Stream, wait: bool, shown: bool) -> Result {
    let client = stream.client;
    if wait && shown {
        stream.ask(op::STREAM_SYNC)
    } else if wait && ranges::is_pinned(client, source as u64, len as u64) {
        stream.synchronize()
    } else {
        client.late()
    }
}

/// A copy with managed memory, which is the device's. `wait`: until the program's own copy of it is right, or may change again.
fn managed(target: u64, source: u64, len: usize, stream: &Stream, wait: bool) -> Result {
    copy::within_lease(target, source, len, stream)?;
    if wait { stream.ask(op::STREAM_SYNC) } else { Ok(()) }
}

/// A copy with host memory that the server has in its own memory meanwhile, so that nothing but the stream's order matters. On a stream
/// that captures it is a node, whose launches exchange the memory.
pub fn in_order(mut cuboid: Cuboid, stream: &Stream) -> Result {
    let placed = cuboid.name_regions(stream.client)?;
    put(&cuboid, placed, stream)
}

fn put(cuboid: &Cuboid, (ids, regions): ([u64; 2], Vec<Arc<Region>>), stream: &Stream) -> Result {
    let client = stream.client;
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
    let on_host = (0..ids.len()).filter(|side| ids[*side] != 0);
    for (region, side) in regions.iter().zip(on_host) {
        let (offset, len) = cuboid.span(side);
        region.upload_part(offset, len)?;
    }
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
    let cuboid = || Cuboid::row((HOST, target as u64), (DEVICE, source), len);
    if stream.capture().is_some() {
        return in_order(cuboid(), stream);
    }
    mapped::upload(client)?;
    let due = if wait { Due::Nothing } else { host_functions::due(stream) };
    let mut wait = wait;
    if (due > Due::Nothing || mapped::any())
        && let Some(range) = known(client, target, len)
    {
        if range.kind.managed() {
            return managed(target as u64, source, len, stream, true);
        }
        // What is behind it reads it where the server has it, or must not make the program wait for the host function.
        let placed = match due {
            Due::Nothing => 0,
            Due::Function => PLACED_BEHIND,
            Due::Graph => PLACED,
        };
        if mapped::there(client, target, len) || range.size <= placed {
            let mut cuboid = cuboid();
            match cuboid.name_regions(client) {
                Ok(placed) => {
                    put(&cuboid, placed, stream)?;
                    return if wait { stream.ask(op::STREAM_SYNC) } else { Ok(()) };
                }
                Err(OUT_OF_MEMORY) => {}
                Err(status) => return Err(status),
            }
        }
        // A function of the graph could be made to wait for data that comes behind the graph.
        wait |= due == Due::Graph;
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
    if bulk && mapped::any() {
        // What kernels before it have changed in memory of the program is not there yet.
        return stream.ask(op::STREAM_SYNC);
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
