//! Copies and fills.

use std::ffi::c_void;
use std::sync::Arc;

use gpusession_proto::frame::{INLINE_MAX, op};

use crate::client::{self, Client, string, unavailable};
use crate::entry::{INVALID_VALUE, Result, UNKNOWN, driver, take};
use crate::mapped::Region;
use crate::ranges;
use crate::streams::{Stream, find};
use crate::{copies, mapped, thread};

const NULL: *mut c_void = std::ptr::null_mut();

fn device_to_device(client: &Client, target: u64, source: u64, len: usize, stream: &Stream) -> Result {
    if len == 0 {
        return Ok(());
    }
    stream.usable()?;
    mapped::named(client, target)?;
    mapped::named(client, source)?;
    mapped::upload(client)?;
    let sure = ranges::is_device(target, len as u64) && ranges::is_device(source, len as u64);
    let seq = client.post_if(sure, op::cuMemcpyDtoDAsync_v2, |w| {
        w.word(target);
        w.word(source);
        w.word(len as u64);
        w.word(stream.handle);
    })?;
    stream.worked(seq);
    client.late()
}

/// The default stream, for a call that CUDA calls synchronous.
fn for_synchronous(client: &Client, default: crate::streams::Default) -> Result<Arc<Stream>> {
    let stream = find(client, NULL, default)?;
    stream.usable_synchronously()?;
    Ok(stream)
}

/// Which side of a copy an address is on.
fn on_device(client: &Client, address: u64) -> bool {
    match ranges::find(address) {
        Some(range) => range.kind.on_device() && !range.kind.managed(),
        // Mappings of the program's (`cuMemMap`) and the device's addresses of registered memory are in no list.
        None => client.whole_window.contains(&address),
    }
}

/// A copy between addresses that say themselves what they are.
fn unified(
    client: &Client,
    target: u64,
    source: u64,
    len: usize,
    stream: &Arc<Stream>,
    wait: bool,
) -> Result {
    match (on_device(client, target), on_device(client, source)) {
        (true, true) => device_to_device(client, target, source, len, stream),
        (true, false) => copies::to_device(client, target, source as usize, len, stream),
        (false, true) => copies::from_device(client, target as usize, source, len, stream, wait),
        (false, false) => {
            if !wait && stream.capture().is_some() {
                let cuboid = Cuboid::row((HOST, target), (HOST, source), len);
                return copies::capture(client, cuboid, stream);
            }
            // In order with the stream's work, then by the program's own CPU.
            stream.not_captured()?;
            client.call(op::STREAM_SYNC, |w| w.word(stream.handle))?;
            // SAFETY: the program vouches for both ranges.
            unsafe { std::ptr::copy(source as *const u8, target as *mut u8, len) };
            Ok(())
        }
    }
}

driver! {
    fn cuMemcpyHtoD_v2 / cuMemcpyHtoD_v2_ptds [default] (target: u64, source: *const c_void, len: usize) {
        let client = client::get()?;
        copies::to_device(client, target, source as usize, len, &*for_synchronous(client, default)?)
    }

    fn cuMemcpyHtoDAsync_v2 / cuMemcpyHtoDAsync_v2_ptsz [default] (
        target: u64, source: *const c_void, len: usize, stream: *mut c_void,
    ) {
        let client = client::get()?;
        copies::to_device(client, target, source as usize, len, &*find(client, stream, default)?)
    }

    fn cuMemcpyDtoH_v2 / cuMemcpyDtoH_v2_ptds [default] (target: *mut c_void, source: u64, len: usize) {
        let client = client::get()?;
        copies::from_device(client, target as usize, source, len, &for_synchronous(client, default)?, true)
    }

    fn cuMemcpyDtoHAsync_v2 / cuMemcpyDtoHAsync_v2_ptsz [default] (
        target: *mut c_void, source: u64, len: usize, stream: *mut c_void,
    ) {
        let client = client::get()?;
        copies::from_device(client, target as usize, source, len, &find(client, stream, default)?, false)
    }

    fn cuMemcpyDtoD_v2 / cuMemcpyDtoD_v2_ptds [default] (target: u64, source: u64, len: usize) {
        let client = client::get()?;
        device_to_device(client, target, source, len, &*for_synchronous(client, default)?)
    }

    fn cuMemcpyDtoDAsync_v2 / cuMemcpyDtoDAsync_v2_ptsz [default] (
        target: u64, source: u64, len: usize, stream: *mut c_void,
    ) {
        let client = client::get()?;
        device_to_device(client, target, source, len, &*find(client, stream, default)?)
    }

    fn cuMemcpy / cuMemcpy_ptds [default] (target: u64, source: u64, len: usize) {
        let client = client::get()?;
        unified(client, target, source, len, &for_synchronous(client, default)?, true)
    }

    fn cuMemcpyAsync / cuMemcpyAsync_ptsz [default] (target: u64, source: u64, len: usize, stream: *mut c_void) {
        let client = client::get()?;
        unified(client, target, source, len, &find(client, stream, default)?, false)
    }

    fn cuMemcpyPeer / cuMemcpyPeer_ptds [default] (
        target: u64, _to: *mut c_void, source: u64, _from: *mut c_void, len: usize,
    ) {
        let client = client::get()?;
        device_to_device(client, target, source, len, &*for_synchronous(client, default)?)
    }

    fn cuMemcpyPeerAsync / cuMemcpyPeerAsync_ptsz [default] (
        target: u64, _to: *mut c_void, source: u64, _from: *mut c_void, len: usize, stream: *mut c_void,
    ) {
        let client = client::get()?;
        device_to_device(client, target, source, len, &*find(client, stream, default)?)
    }

    fn cuMemcpy2D_v2 / cuMemcpy2D_v2_ptds [default] (copy: *const Plane) {
        let client = client::get()?;
        run(client, take(copy)?.into(), &for_synchronous(client, default)?)
    }

    fn cuMemcpy2DUnaligned_v2 / cuMemcpy2DUnaligned_v2_ptds [default] (copy: *const Plane) {
        let client = client::get()?;
        run(client, take(copy)?.into(), &for_synchronous(client, default)?)
    }

    fn cuMemcpy2DAsync_v2 / cuMemcpy2DAsync_v2_ptsz [default] (copy: *const Plane, stream: *mut c_void) {
        let client = client::get()?;
        run(client, take(copy)?.into(), &find(client, stream, default)?)
    }

    fn cuMemcpy3D_v2 / cuMemcpy3D_v2_ptds [default] (copy: *const Cuboid) {
        let client = client::get()?;
        run(client, take(copy)?, &for_synchronous(client, default)?)
    }

    fn cuMemcpy3DAsync_v2 / cuMemcpy3DAsync_v2_ptsz [default] (copy: *const Cuboid, stream: *mut c_void) {
        let client = client::get()?;
        run(client, take(copy)?, &find(client, stream, default)?)
    }
}

/// Fills: the synchronous ones are asynchronous in the driver too, where the target is device memory.
macro_rules! fills {
    ($($name:ident / $twin:ident, $ordered:ident / $ordered_twin:ident
        ($target:ident: u64 $(, $arg:ident: $ty:ty)*) covers $len:expr;)*) => { driver! { $(
        fn $name / $twin [default] ($target: u64, $($arg: $ty),*) {
            for_synchronous(client::get()?, default)?;
            fill(NULL, default, op::$ordered, $target, $len, &[$target, $($arg as u64),*])
        }

        fn $ordered / $ordered_twin [default] ($target: u64, $($arg: $ty,)* stream: *mut c_void) {
            fill(stream, default, op::$ordered, $target, $len, &[$target, $($arg as u64),*])
        }
    )* } };
}

fn fill(
    stream: *mut c_void,
    default: crate::streams::Default,
    operation: u16,
    target: u64,
    len: Option<usize>,
    arguments: &[u64],
) -> Result {
    let client = client::get()?;
    let stream = find(client, stream, default)?;
    stream.usable()?;
    client.late()?;
    mapped::named(client, target)?;
    mapped::upload(client)?;
    let sure = len.is_some_and(|len| ranges::is_device(target, len as u64));
    let seq = client.post_if(sure, operation, |w| {
        for argument in arguments {
            w.word(*argument);
        }
        w.word(stream.handle);
    })?;
    stream.worked(seq);
    client.late()
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

/// Bytes from the first to the last element of a plane.
fn plane(pitch: usize, width: usize, height: usize, element: usize) -> Option<usize> {
    pitch.checked_mul(height.checked_sub(1)?)?.checked_add(width.checked_mul(element)?)
}

/// `CUmemorytype`
/// See above.
pub const HOST: u32 = 1;
/// See above.
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
    /// The structure's words, as the worker reads them.
    pub fn words(&self) -> [u64; 25] {
        let side = |s: &Side| {
            [
                s.x as u64,
                s.y as u64,
                s.z as u64,
                s.lod as u64,
                u64::from(s.kind),
                s.host,
                s.device,
                s.array,
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

    /// Says of each side whether it is host memory, with unified addresses resolved.
    pub fn resolve(&mut self, client: &Client) -> Result {
        for side in [&mut self.source, &mut self.target] {
            if side.kind == UNIFIED {
                let device = on_device(client, side.device);
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

    /// A copy of one row between two places, each a kind of memory and an address: target, source.
    pub fn row(target: (u32, u64), source: (u32, u64), len: usize) -> Self {
        let side = |(kind, address): (u32, u64)| Side {
            x: 0,
            y: 0,
            z: 0,
            lod: 0,
            kind,
            host: address,
            device: address,
            array: 0,
            reserved: 0,
            pitch: len,
            height: 1,
        };
        Self { source: side(source), target: side(target), width: len, height: 1, depth: 1 }
    }

    /// Names host memory by region and offset, as a worker takes it in graphs. Returns the regions of source and target; 0 is
    /// not host memory.
    pub fn name_regions(&mut self, client: &Client) -> Result<([u64; 2], Vec<Arc<Region>>)> {
        let (width, height, depth) = (self.width, self.height, self.depth);
        if width == 0 || height == 0 || depth == 0 {
            return Err(INVALID_VALUE);
        }
        let (mut ids, mut regions) = ([0; 2], Vec::new());
        for (side, id) in [&mut self.source, &mut self.target].into_iter().zip(&mut ids) {
            if side.kind != HOST {
                continue;
            }
            if ranges::find(side.host).is_some_and(|r| r.kind.managed()) {
                (side.kind, side.device) = (DEVICE, side.host);
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

    /// Whether a side is host memory: source, target.
    pub fn host_sides(&self) -> (bool, bool) {
        (self.source.kind == HOST, self.target.kind == HOST)
    }
}

impl Side {
    /// Address of a row of the box.
    fn row(&self, y: usize, z: usize) -> usize {
        self.host as usize + ((self.z + z) * self.height + self.y + y) * self.pitch + self.x
    }

    /// The same side, packed: rows one after the other from the start.
    fn packed(&self, width: usize, height: usize) -> Self {
        Self { x: 0, y: 0, z: 0, lod: 0, pitch: width, height, host: 0, ..*self }
    }
}

fn run(client: &Client, mut cuboid: Cuboid, stream: &Arc<Stream>) -> Result {
    cuboid.resolve(client)?;
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
                return copies::capture(client, cuboid, stream);
            }
            stream.not_captured()?;
            client.call(op::STREAM_SYNC, |w| w.word(stream.handle))?;
            for (y, z) in rows() {
                // SAFETY: the program vouches for both boxes.
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
        return copies::capture(client, cuboid, stream);
    }
    mapped::upload(client)?;
    let host = cuboid;
    if direction == 1 {
        cuboid.source = cuboid.source.packed(width, height);
    } else if direction == 2 {
        cuboid.target = cuboid.target.packed(width, height);
    }
    let words: Vec<u8> = cuboid.words().iter().flat_map(|w| w.to_le_bytes()).collect();
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
                // SAFETY: the program vouches for the box.
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
                .begin_call(op::COPY_BOX, thread::caller(), |w| {
                    body(w);
                    if bulk {
                        // SAFETY: `packed` lives until the transfer has ended below.
                        down.expect(
                            w.seq(),
                            unsafe { gpusession_link::lanes::HostRange::new(target, len) },
                            0,
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
                // SAFETY: the program vouches for the box.
                unsafe {
                    std::ptr::copy_nonoverlapping(row.as_ptr(), host.target.row(y, z) as *mut u8, width)
                };
            }
            stream.synced(seq);
        }
    }
    client.late()
}
