//! Copies between the program's memory and the device, in the form that fits size and kind of
//! memory.

use std::sync::{Mutex, PoisonError};

use gpusession_link::lanes::{Detached, HostRange};
use gpusession_link::link::Begun;
use gpusession_proto::frame::{INLINE_MAX, ability, op};

use crate::client::{Client, string, unavailable};
use crate::cuboid::{Cuboid, DEVICE, HOST};
use crate::deferred_uploads::{Source, try_defer};
use crate::graph_uses::Uses;
use crate::host_functions::Due;
use crate::positions::is_covered;
use crate::ranges::Range;
use crate::regions::Named;
use crate::status::{INVALID_VALUE, OUT_OF_MEMORY, Result, UNKNOWN};
use crate::streams::Stream;
use crate::{arrays, mapped, ranges, regions, thread};

/// Keeps chunks of bulk transfers queued in the order of their frames.
static BULK: Mutex<()> = Mutex::new(());

/// Largest target of a copy to the host that gets a mirror behind a function of a stream, in bytes.
///
/// Later copies from larger memory may have to wait for the stream.
const PLACED_BEHIND: u64 = 1 << 20;

/// Copies from the mirror of host memory in the stream's order, where order requires it.
///
/// That is memory with a mirror, and memory that a host function may still write to. Waits for
/// other copies that write to the memory. With `wait` the program may change the source after the
/// return. `false`: the caller reads the source now.
pub fn done_there(
    mut cuboid: Cuboid,
    source: usize,
    len: usize,
    stream: &Stream,
    wait: bool,
) -> Result<bool> {
    let client = stream.client;
    let mut due = stream.due() > Due::Nothing;
    if !due && !regions::any() && !client.link.down.any() {
        return Ok(false);
    }
    let Some(range) = ranges::on_host(client, source, len) else { return Ok(false) };
    if due && range.size > mapped::PLACED {
        stream.drain()?;
        due = false;
    }
    if !mapped::there(client, source, len) {
        client.wait_detached(|t| t.fills(source, len))?;
        if !due {
            return Ok(false);
        }
    }
    let placed = match cuboid.name_regions(client) {
        // The worker has no room for a mirror.
        Err(OUT_OF_MEMORY) => return stream.drain().map(|()| false),
        placed => placed?,
    };
    put(&cuboid, placed, stream)?;
    if wait {
        stream.ask(op::STREAM_SYNC)?;
    }
    Ok(true)
}

/// Checks that a copy stays within the allocations in which its ends begin.
pub fn check_both(target: u64, source: u64, len: usize) -> Result {
    ranges::check(target, len as u64)?;
    ranges::check(source, len as u64)
}

/// Copies from the host to a device of the stream's lease.
///
/// Pageable bytes are read before the return; pinned ones until the stream is synchronized, or
/// before the return with `wait`.
pub fn to_device(target: u64, source: usize, len: usize, stream: &Stream, wait: bool) -> Result {
    thread::within(stream.ctx, || upwards(target, source, len, stream, wait))
}

fn upwards(target: u64, source: usize, len: usize, stream: &Stream, wait: bool) -> Result {
    let client = stream.client;
    if len == 0 {
        return Ok(());
    }
    stream.usable()?;
    client.take_late_error()?;
    if target == 0 || source == 0 {
        return Err(INVALID_VALUE);
    }
    check_both(target, source as u64, len)?;
    let cuboid = || Cuboid::row((DEVICE, target), (HOST, source as u64), len);
    if stream.capture().is_some() {
        return in_order(cuboid(), stream);
    }
    regions::upload(client)?;
    if regions::any() && ranges::on_host(client, source, len).is_some_and(|r| r.kind.managed()) {
        return managed(target, source as u64, len, stream, wait);
    }
    if wait {
        written_first(source, len, stream)?;
    }
    // SAFETY: for pageable memory and synchronous calls, the post waits until the bytes are sent.
    // Pinned memory must not change before the program has synchronized, and a free synchronizes.
    let range = unsafe { HostRange::new(source, len) };
    let later = |w: &mut gpusession_proto::frame::Writer<'_>| {
        [target, len as u64, stream.handle, 0].into_iter().for_each(|word| w.word(word));
    };
    if try_defer(Source { address: source, extent: len, range }, stream, wait, op::COPY_TO_DEVICE, later)? {
        return client.take_late_error();
    }
    if done_there(cuboid(), source, len, stream, wait)? {
        return Ok(());
    }
    // Whether the target is managed memory.
    let shown = regions::any() && ranges::is_managed(target);
    let body = |w: &mut gpusession_proto::frame::Writer<'_>, inline: bool| {
        w.word(target);
        w.word(len as u64);
        w.word(stream.handle);
        w.word(u64::from(inline));
    };
    let sure = ranges::is_device(client, stream.ctx, target, len as u64);
    if len <= INLINE_MAX {
        // SAFETY: by the call's contract the program has `len` readable bytes at `source`.
        let bytes = unsafe { std::slice::from_raw_parts(source as *const u8, len) };
        mapped::sent_within(client, bytes);
        let seq = client.post_if(sure, op::COPY_TO_DEVICE, |w| {
            body(w, true);
            w.bytes(bytes);
        })?;
        if sure && !shown {
            stream.copied_in(seq)
        } else {
            stream.worked(seq)
        }
        return upwards_done(stream, wait, shown);
    }
    let taken = wait || !ranges::is_pinned(client, source as u64, len as u64);
    let posted = |seq| {
        if taken && !shown && sure { stream.copied_in(seq) } else { stream.worked(seq) }
    };
    bulk_post(client, op::COPY_TO_DEVICE, |w| body(w, false), (range, taken), posted)?;
    if !sure {
        stream.verdict()?;
    }
    upwards_done(stream, wait, shown)
}

/// Ends a copy to the device.
///
/// A synchronous copy is complete at the return, for every stream. Of pageable memory CUDA does not
/// promise that, yet libraries use the bytes in streams without order.
///
/// A synchronous copy to managed memory also waits until the program's own copy has the data.
fn upwards_done(stream: &Stream, wait: bool, shown: bool) -> Result {
    match (wait, shown) {
        (true, true) => stream.ask(op::STREAM_SYNC),
        (true, false) => stream.synchronize(),
        (false, _) => stream.client.take_late_error(),
    }
}

/// Copies between memory of one lease's devices.
pub fn within_lease(target: u64, source: u64, len: usize, stream: &Stream) -> Result {
    let client = stream.client;
    if len == 0 {
        return Ok(());
    }
    stream.usable()?;
    check_both(target, source, len)?;
    mapped::named(client, target)?;
    mapped::named(client, source)?;
    regions::upload(client)?;
    let sure = ranges::is_device(client, stream.ctx, target, len as u64)
        && ranges::is_device(client, stream.ctx, source, len as u64);
    let seq = client.post_if(sure, op::cuMemcpyDtoDAsync_v2, |w| {
        w.word(target);
        w.word(source);
        w.word(len as u64);
        w.word(stream.handle);
    })?;
    stream.worked(seq);
    client.take_late_error()
}

/// Copies from or to managed memory as device memory.
///
/// With `wait`, returns when the program's own copy is right, or may change again.
fn managed(target: u64, source: u64, len: usize, stream: &Stream, wait: bool) -> Result {
    within_lease(target, source, len, stream)?;
    if wait { stream.ask(op::STREAM_SYNC) } else { Ok(()) }
}

/// Copies with mirrors of host memory, so that only the stream's order matters.
///
/// On a capturing stream the copy becomes a node, and each launch exchanges the memory.
pub fn in_order(mut cuboid: Cuboid, stream: &Stream) -> Result {
    let placed = cuboid.name_regions(stream.client)?;
    put(&cuboid, placed, stream)
}

fn put(cuboid: &Cuboid, (ids, regions): ([u64; 2], Vec<Named>), stream: &Stream) -> Result {
    let client = stream.client;
    let words: Vec<u8> = cuboid.words(client).iter().flat_map(|w| w.to_le_bytes()).collect();
    let body = |w: &mut gpusession_proto::frame::Writer<'_>| {
        w.word(stream.handle);
        ids.iter().for_each(|id| w.word(*id));
        w.bytes(&words);
    };
    if let Some(capture) = stream.capture() {
        client.call(op::COPY_HOST, body)?;
        capture.note(&Uses { regions, ..Uses::default() });
        return Ok(());
    }
    let on_host = (0..ids.len()).filter(|side| ids[*side] != 0);
    for (region, side) in regions.iter().zip(on_host) {
        let (offset, len) = cuboid.span(side);
        region.upload_part(offset, len)?;
    }
    let seq = client.post(op::COPY_HOST, body)?;
    stream.worked(seq);
    client.take_late_error()
}

/// Copies from a device of the stream's lease to the host.
///
/// `wait`: the program expects the bytes at the return (a synchronous copy, or pageable memory).
pub fn from_device(target: usize, source: u64, len: usize, stream: &Stream, wait: bool) -> Result {
    thread::within(stream.ctx, || downwards(target, source, len, stream, wait))
}

/// Copies a box from a device of the stream's lease to pinned memory.
///
/// It does not wait for the stream.
///
/// `body` writes the frame, whose bytes come packed. `false`: the program has to wait, because of
/// the memory's kind, an older worker, or an error that this call may have to return.
pub fn box_from_device(
    host: &Cuboid,
    stream: &Stream,
    body: impl Fn(&mut gpusession_proto::frame::Writer<'_>),
) -> Result<bool> {
    let client = stream.client;
    let (target, len) = host.span(1);
    let bulk = host.width * host.height * host.depth > INLINE_MAX;
    let sure = |(first, len): (u64, usize)| ranges::is_device(client, stream.ctx, first, len as u64);
    if client.abilities & ability::LANDING_BOXES == 0 || !ranges::is_pinned(client, target as u64, len as u64)
    {
        return Ok(false);
    }
    let right = match host.device_source() {
        Some(source) => sure(source),
        None => client.abilities & ability::LANDING_ARRAYS != 0 && arrays::contains_source(client, host),
    };
    if !right {
        return Ok(false);
    }
    let due = stream.due();
    if (due > Due::Nothing || regions::any())
        && let Some(range) = ranges::on_host(client, target, len)
    {
        if range.kind.managed() {
            return Ok(false);
        }
        if put_behind(*host, range, (target, len), stream, due)? {
            return Ok(true);
        }
        // A function of the graph could otherwise wait for data that comes behind the graph.
        if due == Due::Graph {
            return Ok(false);
        }
    }
    if bulk {
        client.link.lanes().map_err(unavailable)?;
    }
    let (rows, older) = (host.rows(1), older(stream, target, len));
    client.serve_landings();
    let seq = client.post(op::COPY_BOX, |w| {
        body(w);
        // SAFETY: by the call's contract the box is writable until the copy is complete.
        let range = unsafe { HostRange::rows(target, rows, host.height * host.depth) };
        client.link.down.expect(w.seq(), range, stream.on(), true, older);
    })?;
    stream.worked(seq);
    Ok(true)
}

/// Copies to host memory by its mirror, in the stream's order, where order requires that.
///
/// Later copies read the data from the mirror, or must not make the program wait for the host
/// function. `false`: the bytes go straight to the `len` bytes at `target`.
fn put_behind(
    mut cuboid: Cuboid,
    range: Range,
    (target, len): (usize, usize),
    stream: &Stream,
    due: Due,
) -> Result<bool> {
    let largest = match due {
        Due::Nothing => 0,
        Due::Function => PLACED_BEHIND,
        Due::Graph => mapped::PLACED,
    };
    if !mapped::there(stream.client, target, len) && range.size > largest {
        return Ok(false);
    }
    match cuboid.name_regions(stream.client) {
        Ok(placed) => put(&cuboid, placed, stream).map(|()| true),
        Err(OUT_OF_MEMORY) => Ok(false),
        Err(status) => Err(status),
    }
}

fn downwards(target: usize, source: u64, len: usize, stream: &Stream, wait: bool) -> Result {
    let client = stream.client;
    if len == 0 {
        return Ok(());
    }
    stream.usable()?;
    client.take_late_error()?;
    if target == 0 || source == 0 {
        return Err(INVALID_VALUE);
    }
    check_both(target as u64, source, len)?;
    let cuboid = || Cuboid::row((HOST, target as u64), (DEVICE, source), len);
    if stream.capture().is_some() {
        return in_order(cuboid(), stream);
    }
    regions::upload(client)?;
    let due = if wait { Due::Nothing } else { stream.due() };
    let mut wait = wait;
    if (due > Due::Nothing || regions::any())
        && let Some(range) = ranges::on_host(client, target, len)
    {
        if range.kind.managed() {
            return managed(target as u64, source, len, stream, true);
        }
        if put_behind(cuboid(), range, (target, len), stream, due)? {
            return if wait { stream.ask(op::STREAM_SYNC) } else { Ok(()) };
        }
        // A function of the graph could otherwise wait for data that comes behind the graph.
        wait |= due == Due::Graph;
    }
    let wait = wait || !ranges::is_pinned(client, target as u64, len as u64);
    let down = &client.link.down;
    let bulk = len > INLINE_MAX;
    if bulk {
        client.link.lanes().map_err(unavailable)?;
        if wait {
            changes_first(stream)?;
        }
    }
    let older = older(stream, target, len);
    let body = |w: &mut gpusession_proto::frame::Writer<'_>| {
        w.word(source);
        w.word(len as u64);
        w.word(stream.handle);
        w.word(u64::from(wait));
        if bulk || !wait {
            // SAFETY: by the call's contract the target has `len` writable bytes until the copy is
            // complete.
            down.expect(w.seq(), unsafe { HostRange::new(target, len) }, stream.on(), !wait, older);
        }
    };
    if !wait {
        client.serve_landings();
        if ranges::is_device(client, stream.ctx, source, len as u64) {
            let seq = client.post(op::COPY_FROM_DEVICE, body)?;
            stream.worked(seq);
            return client.take_late_error();
        }
        let begun = client.link.begin_call(op::COPY_FROM_DEVICE, client.caller(), body);
        let begun = begun.map_err(unavailable)?;
        let seq = begun.seq;
        stream.worked(seq);
        let status = client.finish(begun).map(|reply| reply.status);
        if status != Ok(0) {
            down.cancel(seq);
        }
        return client.check_status(status?);
    }
    let begun = client.link.begin_call(op::COPY_FROM_DEVICE, client.caller(), body).map_err(unavailable)?;
    let seq = begun.seq;
    finish_download(stream, begun, len, |bytes| {
        // SAFETY: by the call's contract the target has `len` writable bytes; the reply has as
        // many.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), target as *mut u8, len) };
    })?;
    stream.wait_landed(seq)?;
    // The worker waits for a bulk copy alone. Output of work before it comes with the next wait, as
    // does shared memory that another thread's kernel has changed meanwhile.
    if !bulk {
        stream.synced(seq);
    }
    client.check_status(0)
}

/// Waits for the stream before a synchronous copy reads pageable memory that the stream may write.
///
/// A host function may, and a graph's copy. Natively such a copy synchronizes the stream first.
pub fn written_first(source: usize, len: usize, stream: &Stream) -> Result {
    let client = stream.client;
    if ranges::on_host(client, source, len).is_some() {
        return Ok(());
    }
    if stream.due() > Due::Nothing || regions::graphs_name(client, source, len) {
        stream.drain_unchecked()?;
    }
    Ok(())
}

/// Waits for earlier work's changes of the program's memory before a synchronous copy whose bytes
/// come on the lanes.
///
/// The program expects them at the copy's return, and a graph's older copy must not replace its
/// bytes. The reply to a small copy follows these changes anyway.
pub fn changes_first(stream: &Stream) -> Result {
    if regions::any() { stream.drain_unchecked() } else { Ok(()) }
}

/// Copies into the same memory that may be under way; natively a stream's queue is full then.
const STREAM_QUEUE: usize = 1000;

/// Returns the copies under way into some of the same host memory that precede the stream's next
/// work.
fn older(stream: &Stream, target: usize, len: usize) -> Vec<u64> {
    let overlapping = stream.client.link.down.overlapping(target, len);
    if overlapping.is_empty() {
        return Vec::new();
    }
    let covers = stream.covers_so_far();
    let before = |t: &Detached| t.fills(target, len) && is_covered(&covers, t.on, t.seq);
    let older: Vec<u64> = overlapping.iter().filter(|t| before(t)).map(|t| t.seq).collect();
    if older.len() < STREAM_QUEUE {
        return older;
    }
    // Without a link nothing lands in the wrong order.
    let _ = stream.client.wait_detached(before);
    Vec::new()
}

/// Waits for the bytes of a copy from the device whose frame is sent.
///
/// Bytes on the lanes land in the range that the frame's writer announced. `put` takes the `len`
/// bytes of a copy whose reply has them.
pub fn finish_download(stream: &Stream, begun: Begun, len: usize, put: impl FnOnce(&[u8])) -> Result {
    let link = &stream.client.link;
    let seq = begun.seq;
    stream.worked(seq);
    let bulk = len > INLINE_MAX;
    let reply = stream.client.finish(begun).and_then(|reply| match reply.status {
        0 => Ok(reply),
        status => Err(status),
    });
    // On an error, too, the caller may free the range that a lane's thread writes to.
    let reply = reply.inspect_err(|_| {
        if bulk {
            link.down.cancel(seq);
        }
    })?;
    if bulk {
        return match stream.client.wait_landed(seq) {
            0 => Ok(()),
            status => Err(status),
        };
    }
    let mut r = reply.reader();
    let bytes = string(&mut r)?;
    if bytes.len() != len {
        return Err(UNKNOWN);
    }
    // Earlier copies may write to the same memory.
    stream.wait_landed(seq)?;
    put(bytes);
    Ok(())
}

/// Posts a frame whose bytes travel on the lanes; with `taken`, they are sent at the return.
///
/// `posted` gets the frame's position before any wait.
pub fn bulk_post(
    client: &'static Client,
    op: u16,
    body: impl FnOnce(&mut gpusession_proto::frame::Writer<'_>),
    (range, taken): (HostRange, bool),
    posted: impl FnOnce(u64),
) -> Result {
    let lanes = client.link.lanes().map_err(unavailable)?;
    let upload = lanes.upload(range, taken);
    let order = BULK.lock().unwrap_or_else(PoisonError::into_inner);
    let seq = client.post(op, body)?;
    posted(seq);
    let sent = lanes.send(seq, upload);
    drop(order);
    // The worker may hold the bytes back, also those that the link has copied.
    client.serve_landings();
    let sent = !taken || client.wait_sent(&sent);
    client.link.watch_held();
    if sent { Ok(()) } else { Err(crate::status::DEVICE_UNAVAILABLE) }
}
