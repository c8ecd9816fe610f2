//! Copies and fills.

use std::ffi::c_void;
use std::sync::Arc;

use gpusession_link::lanes::HostRange;
use gpusession_proto::frame::{INLINE_MAX, Writer, ability, direction, op};
use gpusession_proto::handle;

use crate::client::unavailable;
use crate::copies::{self, within_lease};
use crate::cuboid::{Cuboid, HOST, Plane, RELAYED, Side, on_device, on_device_alone};
use crate::deferred_uploads::{Source, try_defer};
use crate::entry::{INVALID_VALUE, Result, driver, take};
use crate::ranges::Kind;
use crate::route::elsewhere;
use crate::streams::{self, Default, Stream, find};
use crate::{clients, mapped, ranges, regions, thread};

const NULL: *mut c_void = std::ptr::null_mut();
/// Maximum bytes of a box that both sides hold packed at once; a larger box travels in parts.
const PACKED: usize = 256 << 20;

/// Runs `work` on the default stream of another lease's context, behind the present work of
/// `stream`.
///
/// The work is complete at the return. The two servers cannot wait for each other, so the program
/// waits for both.
fn beside(stream: &Stream, ctx: u64, work: impl FnOnce(&Stream) -> Result) -> Result {
    stream.drain()?;
    on_default(ctx, |there| {
        work(there)?;
        there.synchronize()
    })
}

/// Runs `work` on a context's default stream.
fn on_default<T>(ctx: u64, work: impl FnOnce(&Stream) -> Result<T>) -> Result<T> {
    let (client, _) = clients::of_context(ctx)?;
    thread::within(ctx, || work(&*streams::legacy(client, ctx)?))
}

/// Returns `true` if a copy between host and device names memory of the other kind on a side.
fn is_misnamed(device: u64, host: u64) -> bool {
    let on_host = |r: ranges::Range| matches!(r.kind, Kind::Host(_) | Kind::Registered(_));
    on_device_alone(host) || ranges::find(device).is_some_and(on_host)
}

/// Copies between addresses, whatever memory the call says that they are.
///
/// With unified addressing a driver copies so, and programs rely on it: ONNX Runtime names device
/// memory as the host's.
fn by_addresses(target: u64, source: u64, len: usize, stream: &Stream, wait: bool) -> Result {
    if len == 0 {
        return Ok(());
    }
    stream.usable()?;
    copies::check_both(target, source, len)?;
    unified(target, source, len, stream, wait)?;
    if wait { stream.synchronize() } else { Ok(()) }
}

fn to_device(target: u64, source: usize, len: usize, stream: &Stream, wait: bool) -> Result {
    if is_misnamed(target, source as u64) {
        return by_addresses(target, source as u64, len, stream, wait);
    }
    match elsewhere(stream.client, target) {
        None => copies::to_device(target, source, len, stream, wait),
        Some(ctx) => beside(stream, ctx, |there| copies::to_device(target, source, len, there, wait)),
    }
}

fn from_device(target: usize, source: u64, len: usize, stream: &Stream, wait: bool) -> Result {
    if is_misnamed(source, target as u64) {
        return by_addresses(target as u64, source, len, stream, wait);
    }
    match elsewhere(stream.client, source) {
        None => copies::from_device(target, source, len, stream, wait),
        Some(ctx) => beside(stream, ctx, |there| copies::from_device(target, source, len, there, true)),
    }
}

fn device_to_device(target: u64, source: u64, len: usize, stream: &Stream) -> Result {
    let here = stream.client;
    let (to, from) = (elsewhere(here, target), elsewhere(here, source));
    match (to, from) {
        (None, None) => within_lease(target, source, len, stream),
        (Some(to), Some(from)) if handle::server(to) == handle::server(from) => {
            beside(stream, to, |there| within_lease(target, source, len, there))
        }
        _ => {
            let (to, from) = (to.unwrap_or(stream.ctx), from.unwrap_or(stream.ctx));
            copies::check_both(target, source, len)?;
            stream.drain()?;
            let mut bytes = vec![0u8; len.min(RELAYED)];
            for offset in (0..len).step_by(RELAYED) {
                let part = &mut bytes[..RELAYED.min(len - offset)];
                let (host, len) = (part.as_mut_ptr() as usize, part.len());
                let offset = offset as u64;
                on_default(from, |there| copies::from_device(host, source + offset, len, there, true))?;
                on_default(to, |there| copies::to_device(target + offset, host, len, there, true))?;
            }
            on_default(to, |there| there.synchronize())
        }
    }
}

/// Copies between device memory as a call without `Async` does.
///
/// Between devices it is ordered with the default streams of both contexts, and so with the streams
/// that follow these, but not with others (H200, driver 580).
fn device_to_device_serialized(target: u64, source: u64, len: usize, stream: &Stream) -> Result {
    let of = |address| ranges::find(address).filter(|range| range.kind.on_device()).map(|range| range.ctx);
    match (of(target), of(source)) {
        (Some(to), Some(from)) if apart(to, from) => {
            serialized([to, from], stream, || device_to_device(target, source, len, stream))?;
        }
        _ => device_to_device(target, source, len, stream)?,
    }
    completed_pair(stream, target, source)
}

/// Returns `true` if two contexts are on different devices.
///
/// Managed variables belong to no context.
fn apart(to: u64, from: u64) -> bool {
    let ordinal = |ctx| clients::of_context(ctx).ok().map(|(_, device)| device.ordinal);
    to != from && ordinal(to).zip(ordinal(from)).is_some_and(|(to, from)| to != from)
}

/// Runs a copy between two contexts behind the work of their default streams, and waits for it.
pub(super) fn serialized(contexts: [u64; 2], stream: &Stream, copy: impl FnOnce() -> Result) -> Result {
    for ctx in contexts {
        on_default(ctx, |there| there.drain_unchecked())?;
    }
    copy()?;
    stream.synchronize()
}

/// Returns the default stream, for a call that CUDA calls synchronous.
pub(super) fn for_synchronous(default: Default) -> Result<Arc<Stream>> {
    let (_, stream) = find(NULL, default)?;
    stream.usable_synchronously()?;
    Ok(stream)
}

pub(super) fn named(stream: *mut c_void, default: Default) -> Result<Arc<Stream>> {
    find(stream, default).map(|(_, stream)| stream)
}

/// Copies between unified addresses, each of which determines its kind of memory.
pub(super) fn unified(target: u64, source: u64, len: usize, stream: &Stream, wait: bool) -> Result {
    match (on_device(target), on_device(source)) {
        (true, true) => {
            if wait {
                device_to_device_serialized(target, source, len, stream)
            } else {
                device_to_device(target, source, len, stream)
            }
        }
        (true, false) => to_device(target, source as usize, len, stream, wait),
        (false, true) => from_device(target as usize, source, len, stream, wait),
        (false, false) => {
            if !wait && stream.capture().is_some() {
                return copies::in_order(Cuboid::row((HOST, target), (HOST, source), len), stream);
            }
            // The program's own CPU copies, after the stream's work.
            stream.drain()?;
            // SAFETY: by the call's contract both ranges have `len` bytes; `copy` allows an
            // overlap.
            unsafe { std::ptr::copy(source as *const u8, target as *mut u8, len) };
            Ok(())
        }
    }
}

driver! {
    fn cuMemcpyHtoD_v2 / cuMemcpyHtoD_v2_ptds [default] (target: u64, source: *const c_void, len: usize) {
        to_device(target, source as usize, len, &*for_synchronous(default)?, true)
    }

    fn cuMemcpyHtoDAsync_v2 / cuMemcpyHtoDAsync_v2_ptsz [default] (
        target: u64, source: *const c_void, len: usize, stream: *mut c_void,
    ) {
        to_device(target, source as usize, len, &*named(stream, default)?, false)
    }

    fn cuMemcpyDtoH_v2 / cuMemcpyDtoH_v2_ptds [default] (target: *mut c_void, source: u64, len: usize) {
        from_device(target as usize, source, len, &*for_synchronous(default)?, true)
    }

    fn cuMemcpyDtoHAsync_v2 / cuMemcpyDtoHAsync_v2_ptsz [default] (
        target: *mut c_void, source: u64, len: usize, stream: *mut c_void,
    ) {
        from_device(target as usize, source, len, &*named(stream, default)?, false)
    }

    fn cuMemcpyDtoD_v2 / cuMemcpyDtoD_v2_ptds [default] (target: u64, source: u64, len: usize) {
        device_to_device_serialized(target, source, len, &*for_synchronous(default)?)
    }

    fn cuMemcpyDtoDAsync_v2 / cuMemcpyDtoDAsync_v2_ptsz [default] (
        target: u64, source: u64, len: usize, stream: *mut c_void,
    ) {
        device_to_device(target, source, len, &*named(stream, default)?)
    }

    fn cuMemcpy / cuMemcpy_ptds [default] (target: u64, source: u64, len: usize) {
        unified(target, source, len, &*for_synchronous(default)?, true)
    }

    fn cuMemcpyAsync / cuMemcpyAsync_ptsz [default] (target: u64, source: u64, len: usize, stream: *mut c_void) {
        unified(target, source, len, &*named(stream, default)?, false)
    }

    fn cuMemcpyPeer / cuMemcpyPeer_ptds [default] (
        target: u64, _to: *mut c_void, source: u64, _from: *mut c_void, len: usize,
    ) {
        device_to_device_serialized(target, source, len, &*for_synchronous(default)?)
    }

    fn cuMemcpyPeerAsync / cuMemcpyPeerAsync_ptsz [default] (
        target: u64, _to: *mut c_void, source: u64, _from: *mut c_void, len: usize, stream: *mut c_void,
    ) {
        device_to_device(target, source, len, &*named(stream, default)?)
    }

    fn cuMemcpy2D_v2 / cuMemcpy2D_v2_ptds [default] (copy: *const Plane) {
        run(take(copy)?.into(), &*for_synchronous(default)?, true)
    }

    fn cuMemcpy2DUnaligned_v2 / cuMemcpy2DUnaligned_v2_ptds [default] (copy: *const Plane) {
        run(take(copy)?.into(), &*for_synchronous(default)?, true)
    }

    fn cuMemcpy2DAsync_v2 / cuMemcpy2DAsync_v2_ptsz [default] (copy: *const Plane, stream: *mut c_void) {
        run(take(copy)?.into(), &*named(stream, default)?, false)
    }

    fn cuMemcpy3D_v2 / cuMemcpy3D_v2_ptds [default] (copy: *const Cuboid) {
        run(take(copy)?, &*for_synchronous(default)?, true)
    }

    fn cuMemcpy3DAsync_v2 / cuMemcpy3DAsync_v2_ptsz [default] (copy: *const Cuboid, stream: *mut c_void) {
        run(take(copy)?, &*named(stream, default)?, false)
    }
}

/// Defines fills. As in the driver, the synchronous ones do not wait for device memory.
macro_rules! fills {
    ($($name:ident / $twin:ident, $ordered:ident / $ordered_twin:ident
        ($target:ident: u64 $(, $arg:ident: $ty:ty)*) covers $len:expr;)*) => { driver! { $(
        fn $name / $twin [default] ($target: u64, $($arg: $ty),*) {
            for_synchronous(default)?;
            fill(NULL, default, op::$ordered, $target, $len, &[$target, $($arg as u64),*])?;
            completed(&*find(NULL, default)?.1, $target)
        }

        fn $ordered / $ordered_twin [default] ($target: u64, $($arg: $ty,)* stream: *mut c_void) {
            fill(stream, default, op::$ordered, $target, $len, &[$target, $($arg as u64),*])
        }
    )* } };
}

fn fill(
    stream: *mut c_void,
    default: Default,
    operation: u16,
    target: u64,
    len: Option<usize>,
    arguments: &[u64],
) -> Result {
    let (client, stream) = find(stream, default)?;
    match elsewhere(client, target) {
        None => fill_on(&stream, operation, target, len, arguments),
        Some(ctx) => beside(&stream, ctx, |there| fill_on(there, operation, target, len, arguments)),
    }
}

/// Makes a synchronous copy complete for both sides, as [`completed`] for one.
fn completed_pair(stream: &Stream, target: u64, source: u64) -> Result {
    let client = stream.client;
    let here = |address| elsewhere(client, address).is_none() && ranges::synchronizes(client, address);
    completed(stream, target)?;
    // One wait completes both.
    if here(target) && elsewhere(client, source).is_none() { Ok(()) } else { completed(stream, source) }
}

/// Waits for a synchronous fill or copy of pinned, registered or managed memory, which the program
/// may read or change once the call has returned.
fn completed(stream: &Stream, address: u64) -> Result {
    let wait = |there: &Stream| {
        if ranges::synchronizes(there.client, address) {
            // The reply is needed, since the memory's bytes precede it.
            return there.ask(op::STREAM_SYNC);
        }
        Ok(())
    };
    match elsewhere(stream.client, address) {
        None => wait(stream),
        Some(ctx) => on_default(ctx, wait),
    }
}

fn fill_on(stream: &Stream, operation: u16, target: u64, len: Option<usize>, arguments: &[u64]) -> Result {
    let client = stream.client;
    stream.usable()?;
    client.take_late_error()?;
    if let Some(len) = len {
        ranges::check(target, len as u64)?;
    }
    mapped::named(client, target)?;
    regions::upload(client)?;
    let sure = len.is_some_and(|len| ranges::is_device(client, stream.ctx, target, len as u64));
    let seq = client.post_if(sure, operation, |w| {
        for argument in arguments {
            w.word(*argument);
        }
        w.word(stream.handle);
    })?;
    stream.worked(seq);
    client.take_late_error()
}

fills! {
    cuMemsetD8_v2 / cuMemsetD8_v2_ptds, cuMemsetD8Async / cuMemsetD8Async_ptsz
        (target: u64, value: u8, count: usize) covers line(target, count, 1);
    cuMemsetD16_v2 / cuMemsetD16_v2_ptds, cuMemsetD16Async / cuMemsetD16Async_ptsz
        (target: u64, value: u16, count: usize) covers line(target, count, 2);
    cuMemsetD32_v2 / cuMemsetD32_v2_ptds, cuMemsetD32Async / cuMemsetD32Async_ptsz
        (target: u64, value: u32, count: usize) covers line(target, count, 4);
    cuMemsetD2D8_v2 / cuMemsetD2D8_v2_ptds, cuMemsetD2D8Async / cuMemsetD2D8Async_ptsz
        (target: u64, pitch: usize, value: u8, width: usize, height: usize)
        covers plane(target, pitch, width, height, 1);
    cuMemsetD2D16_v2 / cuMemsetD2D16_v2_ptds, cuMemsetD2D16Async / cuMemsetD2D16Async_ptsz
        (target: u64, pitch: usize, value: u16, width: usize, height: usize)
        covers plane(target, pitch, width, height, 2);
    cuMemsetD2D32_v2 / cuMemsetD2D32_v2_ptds, cuMemsetD2D32Async / cuMemsetD2D32Async_ptsz
        (target: u64, pitch: usize, value: u32, width: usize, height: usize)
        covers plane(target, pitch, width, height, 4);
}

/// Returns the bytes of a fill, or nothing if the driver refuses it for its alignment.
fn line(target: u64, count: usize, element: usize) -> Option<usize> {
    if !target.is_multiple_of(element as u64) {
        return None;
    }
    count.checked_mul(element)
}

/// Returns the bytes from the first to the last element of a plane, or nothing if the driver may
/// refuse it.
fn plane(target: u64, pitch: usize, width: usize, height: usize, element: usize) -> Option<usize> {
    let row = line(target, width, element)?;
    if !pitch.is_multiple_of(element) || pitch < row {
        return None;
    }
    pitch.checked_mul(height.checked_sub(1)?)?.checked_add(row)
}

pub(super) fn run(mut cuboid: Cuboid, stream: &Stream, wait: bool) -> Result {
    cuboid.resolve()?;
    cuboid.check()?;
    let here = stream.client;
    let (to, from) = (cuboid.target.elsewhere(here), cuboid.source.elsewhere(here));
    let (host_source, host_target) = cuboid.host_sides();
    match (to, from) {
        (None, None) => run_on(cuboid, stream, wait),
        (Some(ctx), None) if host_source => beside(stream, ctx, |there| run_on(cuboid, there, wait)),
        (None, Some(ctx)) if host_target => beside(stream, ctx, |there| run_on(cuboid, there, wait)),
        (Some(to), Some(from)) if handle::server(to) == handle::server(from) => {
            beside(stream, to, |there| run_on(cuboid, there, wait))
        }
        _ => {
            let (to, from) = (to.unwrap_or(stream.ctx), from.unwrap_or(stream.ctx));
            stream.drain()?;
            for part in cuboid.parts() {
                let mut bytes = vec![0u8; part.width * part.height];
                let host = Side::memory(HOST, bytes.as_mut_ptr() as u64, part.width, part.height);
                on_default(from, |there| run_on(Cuboid { target: host, ..part }, there, true))?;
                on_default(to, |there| run_on(Cuboid { source: host, ..part }, there, true))?;
            }
            on_default(to, |there| there.synchronize())
        }
    }
}

/// Returns row and layer of each row of a copy.
fn rows(cuboid: &Cuboid) -> impl Iterator<Item = (usize, usize)> + use<> {
    let (height, depth) = (cuboid.height, cuboid.depth);
    (0..depth).flat_map(move |z| (0..height).map(move |y| (y, z)))
}

/// Returns the rows of a copy from the program's memory, one after the other.
pub(super) fn packed_source(cuboid: &Cuboid) -> Vec<u8> {
    let mut packed = Vec::with_capacity(cuboid.width * cuboid.height * cuboid.depth);
    for (y, z) in rows(cuboid) {
        // SAFETY: by the call's contract the box lies in the program's memory.
        packed.extend_from_slice(unsafe {
            std::slice::from_raw_parts(cuboid.source.row(y, z) as *const u8, cuboid.width)
        });
    }
    packed
}

/// Returns the host memory that a copy to the device reads.
fn source(host: &Cuboid) -> Source {
    let (address, extent) = host.span(0);
    // SAFETY: by the call's contract the box lies in the program's memory; see `upload`.
    let range = unsafe { HostRange::rows(address, host.rows(0), host.height * host.depth) };
    Source { address, extent, range }
}

/// Sends a copy from the program's memory with its rows, packed; `body` writes the frame's head.
fn upload(host: &Cuboid, stream: &Stream, body: impl Fn(&mut Writer<'_>), wait: bool) -> Result {
    let client = stream.client;
    let Source { address, extent, range } = source(host);
    let sure = host.is_sure(client, stream.ctx);
    if range.len() <= INLINE_MAX {
        let packed = packed_source(host);
        let seq = client.post_if(sure, op::COPY_BOX, |w| {
            body(w);
            w.bytes(&packed);
        })?;
        stream.worked(seq);
    } else {
        // The post waits until the bytes are sent, unless the program must leave them as they are
        // until it has synchronized.
        let taken = wait || !ranges::is_pinned(client, address as u64, extent as u64);
        copies::bulk_post(client, op::COPY_BOX, body, (range, taken), |seq| stream.worked(seq))?;
        if !sure {
            stream.verdict()?;
        }
    }
    if wait {
        stream.synchronize()?;
    }
    Ok(())
}

/// Runs a copy into the program's memory, whose rows come packed; `body` writes the frame's head.
fn download(host: &Cuboid, stream: &Stream, body: impl Fn(&mut Writer<'_>), wait: bool) -> Result {
    if !wait && copies::box_from_device(host, stream, &body)? {
        return Ok(());
    }
    let (client, width) = (stream.client, host.width);
    let len = width * host.height * host.depth;
    let mut packed = vec![0u8; len];
    let bulk = len > INLINE_MAX;
    if bulk {
        client.link.lanes().map_err(unavailable)?;
        copies::changes_first(stream)?;
    }
    let down = &client.link.down;
    let target = packed.as_mut_ptr() as usize;
    let begun = client
        .link
        .begin_call(op::COPY_BOX, client.caller(), |w| {
            body(w);
            if bulk {
                // SAFETY: `packed` lives until `finish_download` below has ended the
                // transfer.
                down.expect(w.seq(), unsafe { HostRange::new(target, len) }, stream.on(), false, Vec::new());
            }
        })
        .map_err(unavailable)?;
    let seq = begun.seq;
    copies::finish_download(stream, begun, len, |bytes| packed.copy_from_slice(bytes))?;
    // Data of earlier copies into the same memory must have landed before.
    stream.wait_landed(seq)?;
    for ((y, z), row) in rows(host).zip(packed.chunks_exact(width)) {
        // SAFETY: by the call's contract the box lies in the program's memory; `packed` is
        // ours.
        unsafe { std::ptr::copy_nonoverlapping(row.as_ptr(), host.target.row(y, z) as *mut u8, width) };
    }
    stream.synced(seq);
    Ok(())
}

/// Runs a copy whose device memory belongs to the stream's lease.
fn run_on(cuboid: Cuboid, stream: &Stream, wait: bool) -> Result {
    thread::within(stream.ctx, || run_within(cuboid, stream, wait))
}

fn run_within(mut cuboid: Cuboid, stream: &Stream, wait: bool) -> Result {
    let client = stream.client;
    let (width, height, depth) = (cuboid.width, cuboid.height, cuboid.depth);
    let len = width.checked_mul(height).and_then(|n| n.checked_mul(depth)).ok_or(INVALID_VALUE)?;
    if len == 0 {
        return Ok(());
    }
    stream.usable()?;
    let to = match cuboid.host_sides() {
        (true, true) => {
            if stream.capture().is_some() {
                return copies::in_order(cuboid, stream);
            }
            stream.drain()?;
            for (y, z) in rows(&cuboid) {
                // SAFETY: by the call's contract both boxes lie in the program's memory; `copy`
                // allows an overlap.
                unsafe {
                    std::ptr::copy(
                        cuboid.source.row(y, z) as *const u8,
                        cuboid.target.row(y, z) as *mut u8,
                        width,
                    );
                }
            }
            return Ok(());
        }
        (false, false) => direction::WITHIN,
        (true, false) => direction::UP,
        (false, true) => direction::DOWN,
    };
    let on_host = to != direction::WITHIN;
    if on_host && stream.capture().is_some() {
        return copies::in_order(cuboid, stream);
    }
    cuboid.map(client)?;
    if on_host && len > PACKED && height * depth > 1 {
        return cuboid.parts().try_for_each(|part| run_within(part, stream, wait));
    }
    regions::upload(client)?;
    let host = cuboid;
    if to == direction::UP {
        cuboid.source = cuboid.source.packed(width, height);
    } else if to == direction::DOWN {
        cuboid.target = cuboid.target.packed(width, height);
    }
    let words: Vec<u8> = cuboid.words(client).iter().flat_map(|w| w.to_le_bytes()).collect();
    let frame = |w: &mut Writer<'_>, to: u64| {
        w.bytes(&words);
        w.word(stream.handle);
        w.word(to);
        w.word(if on_host { len as u64 } else { 0 });
    };
    let body = |w: &mut Writer<'_>| frame(w, to);
    if to == direction::UP {
        let from = source(&host);
        let on_lanes = client.abilities & ability::LANE_BOXES != 0;
        let later = if on_lanes { direction::UP_BY_LANES } else { to };
        let able = on_lanes || len > INLINE_MAX;
        if wait {
            copies::written_first(from.address, from.extent, stream)?;
        }
        if able && try_defer(from, stream, wait, op::COPY_BOX, |w| frame(w, later))?
            || copies::done_there(host, from.address, from.extent, stream, wait)?
        {
            return client.take_late_error();
        }
    }
    match to {
        direction::WITHIN => {
            let seq = client.post_if(host.is_sure(client, stream.ctx), op::COPY_BOX, body)?;
            stream.worked(seq);
            if wait && host.synchronizes(client) {
                stream.ask(op::STREAM_SYNC)?;
            }
        }
        direction::UP => {
            upload(&host, stream, body, wait)?;
            if wait && host.synchronizes(client) {
                stream.ask(op::STREAM_SYNC)?;
            }
        }
        _ => download(&host, stream, body, wait)?,
    }
    client.take_late_error()
}

#[cfg(test)]
mod tests {
    use super::{line, plane};

    #[test]
    fn plane_ends_behind_its_last_row_without_that_row_s_padding() {
        assert_eq!(plane(0, 512, 10, 1, 4), Some(40));
        assert_eq!(plane(0, 512, 10, 3, 4), Some(1064));
        assert_eq!(plane(0, 512, 10, 0, 4), None, "no rows");
        assert_eq!(plane(0, usize::MAX, 1, 3, 1), None);
        assert_eq!(plane(0, 0, usize::MAX, 1, 2), None);
    }

    #[test]
    fn a_fill_that_the_driver_refuses_for_its_alignment_has_no_length() {
        assert_eq!(line(8, 3, 4), Some(12));
        assert_eq!(line(9, 3, 1), Some(3));
        assert_eq!(line(6, 3, 4), None);
        assert_eq!(plane(0, 510, 10, 2, 4), None, "the second row is misaligned");
        assert_eq!(plane(0, 16, 10, 2, 4), None, "rows would overlap");
    }
}
