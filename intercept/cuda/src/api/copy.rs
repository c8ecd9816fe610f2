//! Copies and fills.

use std::ffi::c_void;
use std::sync::Arc;

use gpusession_proto::frame::{INLINE_MAX, op};
use gpusession_proto::handle;

use crate::client::{Client, cross_lease_error, string, unavailable};
use crate::entry::{INVALID_VALUE, Result, UNKNOWN, driver, take};
use crate::regions::Region;
use crate::route::{elsewhere, home};
use crate::streams::{self, Default, Stream, find};
use crate::{clients, copies, mapped, ranges, regions, thread};

const NULL: *mut c_void = std::ptr::null_mut();
/// Maximum bytes of a copy between leases that are in the program at once.
const RELAYED: usize = 4 << 20;
/// Maximum bytes of a box that both sides hold packed at once; a larger box travels in parts.
const PACKED: usize = 256 << 20;

/// Runs `work` on the default stream of another lease's context, behind the present work of
/// `stream`.
///
/// The work is complete at the return. The two servers cannot wait for each other, so the program
/// waits for both.
fn beside(stream: &Stream, ctx: u64, work: impl FnOnce(&Stream) -> Result) -> Result {
    stream.synchronize()?;
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

fn to_device(target: u64, source: usize, len: usize, stream: &Stream, wait: bool) -> Result {
    match elsewhere(stream.client, target) {
        None => copies::to_device(target, source, len, stream, wait),
        Some(ctx) => beside(stream, ctx, |there| copies::to_device(target, source, len, there, wait)),
    }
}

fn from_device(target: usize, source: u64, len: usize, stream: &Stream, wait: bool) -> Result {
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
            stream.synchronize()?;
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

/// Copies between memory of one lease's devices.
pub fn within_lease(target: u64, source: u64, len: usize, stream: &Stream) -> Result {
    let client = stream.client;
    if len == 0 {
        return Ok(());
    }
    stream.usable()?;
    mapped::named(client, target)?;
    mapped::named(client, source)?;
    regions::upload(client)?;
    let sure = ranges::is_device(client, target, len as u64) && ranges::is_device(client, source, len as u64);
    let seq = client.post_if(sure, op::cuMemcpyDtoDAsync_v2, |w| {
        w.word(target);
        w.word(source);
        w.word(len as u64);
        w.word(stream.handle);
    })?;
    stream.worked(seq);
    client.take_late_error()
}

/// Returns the default stream, for a call that CUDA calls synchronous.
fn for_synchronous(default: Default) -> Result<Arc<Stream>> {
    let (_, stream) = find(NULL, default)?;
    stream.usable_synchronously()?;
    Ok(stream)
}

fn named(stream: *mut c_void, default: Default) -> Result<Arc<Stream>> {
    find(stream, default).map(|(_, stream)| stream)
}

/// Returns `true` if a unified address is copied as device memory.
fn on_device(address: u64) -> bool {
    match ranges::find(address) {
        Some(range) => range.kind.on_device() && !range.kind.managed(),
        None => home(address).is_some(),
    }
}

/// Copies between unified addresses, each of which determines its kind of memory.
fn unified(target: u64, source: u64, len: usize, stream: &Stream, wait: bool) -> Result {
    match (on_device(target), on_device(source)) {
        (true, true) => device_to_device(target, source, len, stream),
        (true, false) => to_device(target, source as usize, len, stream, wait),
        (false, true) => from_device(target as usize, source, len, stream, wait),
        (false, false) => {
            if !wait && stream.capture().is_some() {
                return copies::in_order(Cuboid::row((HOST, target), (HOST, source), len), stream);
            }
            // The program's own CPU copies, after the stream's work.
            stream.not_captured()?;
            stream.ask(op::STREAM_SYNC)?;
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
        device_to_device(target, source, len, &*for_synchronous(default)?)
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
        device_to_device(target, source, len, &*for_synchronous(default)?)
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

/// Defines fills. In the driver, too, the synchronous ones are asynchronous for device memory.
macro_rules! fills {
    ($($name:ident / $twin:ident, $ordered:ident / $ordered_twin:ident
        ($target:ident: u64 $(, $arg:ident: $ty:ty)*) covers $len:expr;)*) => { driver! { $(
        fn $name / $twin [default] ($target: u64, $($arg: $ty),*) {
            for_synchronous(default)?;
            fill(NULL, default, op::$ordered, $target, $len, &[$target, $($arg as u64),*])
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

fn fill_on(stream: &Stream, operation: u16, target: u64, len: Option<usize>, arguments: &[u64]) -> Result {
    let client = stream.client;
    stream.usable()?;
    client.take_late_error()?;
    mapped::named(client, target)?;
    regions::upload(client)?;
    let sure = len.is_some_and(|len| ranges::is_device(client, target, len as u64));
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
        (target: u64, value: u8, count: usize) covers Some(count);
    cuMemsetD16_v2 / cuMemsetD16_v2_ptds, cuMemsetD16Async / cuMemsetD16Async_ptsz
        (target: u64, value: u16, count: usize) covers count.checked_mul(2);
    cuMemsetD32_v2 / cuMemsetD32_v2_ptds, cuMemsetD32Async / cuMemsetD32Async_ptsz
        (target: u64, value: u32, count: usize) covers count.checked_mul(4);
    cuMemsetD2D8_v2 / cuMemsetD2D8_v2_ptds, cuMemsetD2D8Async / cuMemsetD2D8Async_ptsz
        (target: u64, pitch: usize, value: u8, width: usize, height: usize) covers plane(pitch, width, height, 1);
    cuMemsetD2D16_v2 / cuMemsetD2D16_v2_ptds, cuMemsetD2D16Async / cuMemsetD2D16Async_ptsz
        (target: u64, pitch: usize, value: u16, width: usize, height: usize) covers plane(pitch, width, height, 2);
    cuMemsetD2D32_v2 / cuMemsetD2D32_v2_ptds, cuMemsetD2D32Async / cuMemsetD2D32Async_ptsz
        (target: u64, pitch: usize, value: u32, width: usize, height: usize) covers plane(pitch, width, height, 4);
}

/// Returns the bytes from the first to the last element of a plane.
fn plane(pitch: usize, width: usize, height: usize, element: usize) -> Option<usize> {
    pitch.checked_mul(height.checked_sub(1)?)?.checked_add(width.checked_mul(element)?)
}

/// `CUmemorytype`
pub const HOST: u32 = 1;
/// `CUmemorytype`
pub const DEVICE: u32 = 2;
const ARRAY: u32 = 3;
const UNIFIED: u32 = 4;

/// One side of `CUDA_MEMCPY2D`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct PlaneSide {
    x: usize,
    y: usize,
    kind: u32,
    host: u64,
    device: u64,
    array: u64,
    pitch: usize,
}

/// `CUDA_MEMCPY2D`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Plane {
    source: PlaneSide,
    target: PlaneSide,
    width: usize,
    height: usize,
}

/// One side of `CUDA_MEMCPY3D`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Side {
    x: usize,
    y: usize,
    z: usize,
    lod: usize,
    kind: u32,
    host: u64,
    device: u64,
    array: u64,
    reserved: usize,
    pitch: usize,
    height: usize,
}

/// `CUDA_MEMCPY3D`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Cuboid {
    source: Side,
    target: Side,
    width: usize,
    height: usize,
    depth: usize,
}

const _: () = assert!(size_of::<Plane>() == 128 && size_of::<Cuboid>() == 200);

impl From<Plane> for Cuboid {
    fn from(plane: Plane) -> Self {
        let side = |s: PlaneSide| Side {
            x: s.x,
            y: s.y,
            z: 0,
            lod: 0,
            kind: s.kind,
            host: s.host,
            device: s.device,
            array: s.array,
            reserved: 0,
            pitch: s.pitch,
            height: 0,
        };
        Self {
            source: side(plane.source),
            target: side(plane.target),
            width: plane.width,
            height: plane.height,
            depth: 1,
        }
    }
}

impl Cuboid {
    /// Returns the structure's words, as the client's worker reads them.
    pub fn words(&self, client: &Client) -> [u64; 25] {
        let side = |s: &Side| {
            [
                s.x as u64,
                s.y as u64,
                s.z as u64,
                s.lod as u64,
                u64::from(s.kind),
                s.host,
                s.device,
                client.own(s.array),
                s.reserved as u64,
                s.pitch as u64,
                s.height as u64,
            ]
        };
        let mut words = [0; 25];
        words[..11].copy_from_slice(&side(&self.source));
        words[11..22].copy_from_slice(&side(&self.target));
        words[22..].copy_from_slice(&[self.width as u64, self.height as u64, self.depth as u64]);
        words
    }

    /// Replaces unified addresses by their kind of memory, and fills in default pitches and
    /// heights.
    pub fn resolve(&mut self) -> Result {
        for side in [&mut self.source, &mut self.target] {
            if side.kind == UNIFIED {
                let device = on_device(side.device);
                side.kind = if device { DEVICE } else { HOST };
                if !device {
                    side.host = side.device;
                }
            }
            if !matches!(side.kind, HOST | DEVICE | ARRAY) {
                return Err(INVALID_VALUE);
            }
            if side.pitch == 0 {
                side.pitch = self.width;
            }
            if side.height == 0 {
                side.height = self.height;
            }
        }
        Ok(())
    }

    /// Makes a copy of one row between two places, each a kind of memory and an address: target,
    /// source.
    pub fn row(target: (u32, u64), source: (u32, u64), len: usize) -> Self {
        let side = |(kind, address): (u32, u64)| Side::memory(kind, address, len, 1);
        Self { source: side(source), target: side(target), width: len, height: 1, depth: 1 }
    }

    /// Splits the copy into parts of a few rows, at most [`RELAYED`] bytes or one row each.
    fn parts(self) -> impl Iterator<Item = Self> {
        let rows = (RELAYED / self.width.max(1)).max(1);
        let starts = move |z| (0..self.height).step_by(rows).map(move |y| (y, z));
        (0..self.depth).flat_map(starts).map(move |(y, z)| {
            let side = |s: Side| Side { y: s.y + y, z: s.z + z, ..s };
            Self {
                source: side(self.source),
                target: side(self.target),
                height: rows.min(self.height - y),
                depth: 1,
                ..self
            }
        })
    }

    /// Replaces host memory by region and offset, as a worker takes it in graphs.
    ///
    /// Returns the regions' numbers for source and target, 0 for other memory, and the regions.
    pub fn name_regions(&mut self, client: &'static Client) -> Result<([u64; 2], Vec<Arc<Region>>)> {
        let (width, height, depth) = (self.width, self.height, self.depth);
        if width == 0 || height == 0 || depth == 0 {
            return Err(INVALID_VALUE);
        }
        let (mut ids, mut regions) = ([0; 2], Vec::new());
        for (side, id) in [&mut self.source, &mut self.target].into_iter().zip(&mut ids) {
            if ranges::find(side.host).is_some_and(|r| side.kind == HOST && r.kind.managed()) {
                (side.kind, side.device) = (DEVICE, side.host);
            }
            if side.elsewhere(client).is_some() {
                return Err(cross_lease_error("memory of a copy in a graph"));
            }
            if side.kind != HOST {
                continue;
            }
            let (first, last) = (side.row(0, 0), side.row(height - 1, depth - 1));
            let len = last.checked_sub(first).and_then(|n| n.checked_add(width)).ok_or(INVALID_VALUE)?;
            let (region, offset) = mapped::for_graph(client, first as u64, len as u64)?;
            (side.x, side.y, side.z, side.host) = (0, 0, 0, offset);
            *id = region.id();
            regions.push(region);
        }
        Ok((ids, regions))
    }

    /// Returns first byte and length of the host memory of a side (0: source, 1: target).
    ///
    /// After `name_regions` the first byte is an offset in the region.
    pub fn span(&self, side: usize) -> (usize, usize) {
        let side = if side == 0 { &self.source } else { &self.target };
        let first = side.row(0, 0);
        (first, side.row(self.height - 1, self.depth - 1) + self.width - first)
    }

    /// Returns for source and target whether they are host memory.
    pub fn host_sides(&self) -> (bool, bool) {
        (self.source.kind == HOST, self.target.kind == HOST)
    }
}

impl Side {
    /// Makes a side of rows of `pitch` bytes from an address.
    fn memory(kind: u32, address: u64, pitch: usize, height: usize) -> Self {
        Self {
            x: 0,
            y: 0,
            z: 0,
            lod: 0,
            kind,
            host: address,
            device: address,
            array: 0,
            reserved: 0,
            pitch,
            height,
        }
    }

    /// Returns the context to use, if the memory belongs to another client's device.
    fn elsewhere(&self, client: &Client) -> Option<u64> {
        match self.kind {
            DEVICE => elsewhere(client, self.device),
            ARRAY => {
                let other = clients::of(self.array).ok().filter(|other| other.number != client.number);
                other.map(|other| other.primary(0))
            }
            _ => None,
        }
    }

    /// Returns the address of a row of the box.
    fn row(&self, y: usize, z: usize) -> usize {
        self.host as usize + ((self.z + z) * self.height + self.y + y) * self.pitch + self.x
    }

    /// Returns the side in packed form: rows one after the other from the start.
    fn packed(&self, width: usize, height: usize) -> Self {
        Self { x: 0, y: 0, z: 0, lod: 0, pitch: width, height, host: 0, ..*self }
    }
}

fn run(mut cuboid: Cuboid, stream: &Stream, wait: bool) -> Result {
    cuboid.resolve()?;
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
            stream.synchronize()?;
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

/// Runs a copy whose device memory belongs to the stream's lease.
fn run_on(mut cuboid: Cuboid, stream: &Stream, wait: bool) -> Result {
    let client = stream.client;
    let (width, height, depth) = (cuboid.width, cuboid.height, cuboid.depth);
    let len = width.checked_mul(height).and_then(|n| n.checked_mul(depth)).ok_or(INVALID_VALUE)?;
    if len == 0 {
        return Ok(());
    }
    stream.usable()?;
    let rows = || (0..depth).flat_map(|z| (0..height).map(move |y| (y, z)));
    let direction = match cuboid.host_sides() {
        (true, true) => {
            if stream.capture().is_some() {
                return copies::in_order(cuboid, stream);
            }
            stream.not_captured()?;
            stream.ask(op::STREAM_SYNC)?;
            for (y, z) in rows() {
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
        (false, false) => 0u64,
        (true, false) => 1,
        (false, true) => 2,
    };
    if direction != 0 && stream.capture().is_some() {
        return copies::in_order(cuboid, stream);
    }
    if direction != 0 && len > PACKED && height * depth > 1 {
        return cuboid.parts().try_for_each(|part| run_on(part, stream, wait));
    }
    regions::upload(client)?;
    if direction == 1 {
        let (first, covered) = cuboid.span(0);
        if copies::done_there(cuboid, first, covered, stream, wait)? {
            return Ok(());
        }
    }
    let host = cuboid;
    if direction == 1 {
        cuboid.source = cuboid.source.packed(width, height);
    } else if direction == 2 {
        cuboid.target = cuboid.target.packed(width, height);
    }
    let words: Vec<u8> = cuboid.words(client).iter().flat_map(|w| w.to_le_bytes()).collect();
    let body = |w: &mut gpusession_proto::frame::Writer<'_>| {
        w.bytes(&words);
        w.word(stream.handle);
        w.word(direction);
        w.word(if direction == 0 { 0 } else { len as u64 });
    };
    match direction {
        0 => {
            let seq = client.post(op::COPY_BOX, body)?;
            stream.worked(seq);
        }
        1 => {
            let mut packed = Vec::with_capacity(len);
            for (y, z) in rows() {
                // SAFETY: by the call's contract the box lies in the program's memory.
                packed.extend_from_slice(unsafe {
                    std::slice::from_raw_parts(host.source.row(y, z) as *const u8, width)
                });
            }
            if len <= INLINE_MAX {
                let seq = client.post(op::COPY_BOX, |w| {
                    body(w);
                    w.bytes(&packed);
                })?;
                stream.worked(seq);
            } else {
                let seq = copies::bulk_post(client, op::COPY_BOX, body, &packed)?;
                stream.worked(seq);
            }
        }
        _ => {
            let mut packed = vec![0u8; len];
            let bulk = len > INLINE_MAX;
            if bulk {
                client.link.lanes().map_err(unavailable)?;
            }
            let down = &client.link.down;
            let target = packed.as_mut_ptr() as usize;
            let begun = client
                .link
                .begin_call(op::COPY_BOX, client.caller(), |w| {
                    body(w);
                    if bulk {
                        // SAFETY: `packed` lives until `cancel` or `wait` below has ended the
                        // transfer.
                        down.expect(
                            w.seq(),
                            unsafe { gpusession_link::lanes::HostRange::new(target, len) },
                            stream.on(),
                            false,
                        );
                    }
                })
                .map_err(unavailable)?;
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
                packed.copy_from_slice(bytes);
            }
            for ((y, z), row) in rows().zip(packed.chunks_exact(width)) {
                // SAFETY: by the call's contract the box lies in the program's memory; `packed` is
                // ours.
                unsafe {
                    std::ptr::copy_nonoverlapping(row.as_ptr(), host.target.row(y, z) as *mut u8, width)
                };
            }
            // Data of earlier copies must have landed, too.
            stream.wait_landed(seq);
            stream.synced(seq);
        }
    }
    client.take_late_error()
}
