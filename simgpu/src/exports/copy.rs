//! Copies and fills.

use super::{out_opt, read, slice};
use crate::abi::{MEMORY_ARRAY, MEMORY_DEVICE, MEMORY_HOST, MEMORY_UNIFIED, Memcpy2D, Memcpy3D};
use crate::driver::array::ARRAYS;
use crate::driver::capture::{forbid_legacy, forbid_unsafe};
use crate::driver::context::{by_handle, working};
use crate::driver::driver;
use crate::driver::op::{Copy, Fill, Op, Place, Side};
use crate::driver::stream::Role;
use crate::driver::submit::{self, any_place};
use crate::errors::{INVALID_VALUE, NOT_SUPPORTED, Result};
use crate::export;

fn submit_copy(copy: Copy, stream: usize, per_thread: bool, wait: bool) -> Result {
    submit::copy(&submit::stream(stream, per_thread)?, copy, wait)
}

/// Returns a copy between two addresses, each declared as device or host memory.
fn linear(dst: u64, dst_host: bool, src: u64, src_host: bool, bytes: usize) -> Result<Copy> {
    driver()?;
    if bytes == 0 {
        return Ok(Copy::linear(Place::Known(0), Place::Known(0), 0));
    }
    let place = |at, host| if host { any_place(at) } else { Ok(Place::Known(at)) };
    Ok(Copy::linear(place(dst, dst_host)?, place(src, src_host)?, bytes as u64))
}

/// One end of a copy as the program describes it; in a copy of two dimensions, `z` is 0.
struct End {
    kind: u32,
    host: u64,
    device: u64,
    array: usize,
    /// Bytes, rows and slices before the box.
    at: [u64; 3],
    pitch: u64,
    rows: u64,
    level: usize,
}

impl End {
    /// Returns the end's side of a box of `extent`: bytes, rows and slices.
    fn side(&self, extent: [u64; 3]) -> Result<Side> {
        let [x, y, z] = self.at;
        if self.kind == MEMORY_ARRAY {
            if self.level != 0 {
                return Err(INVALID_VALUE);
            }
            return array_side(self.array, self.at, extent);
        }
        let or = |given: u64, other: u64| if given == 0 { other } else { given };
        let (pitch, rows) = (or(self.pitch, extent[0]), or(self.rows, extent[1]));
        if extent[1] > 1 && pitch < extent[0] {
            return Err(INVALID_VALUE);
        }
        let slice = pitch.wrapping_mul(rows);
        let offset = x.wrapping_add(y.wrapping_mul(pitch)).wrapping_add(z.wrapping_mul(slice));
        let place = match self.kind {
            MEMORY_HOST => any_place(self.host.wrapping_add(offset))?,
            MEMORY_DEVICE => Place::Known(self.device.wrapping_add(offset)),
            MEMORY_UNIFIED => any_place(self.device.wrapping_add(offset))?,
            _ => return Err(INVALID_VALUE),
        };
        Ok(Side { place, pitch, slice, array: 0 })
    }
}

/// Returns the side of a box inside an array, which starts at a whole element.
fn array_side(h: usize, at: [u64; 3], extent: [u64; 3]) -> Result<Side> {
    let image = ARRAYS.get(h)?.image;
    if !at[0].is_multiple_of(image.format.bytes()) {
        return Err(INVALID_VALUE);
    }
    let offset = image.offset(at, extent).ok_or(INVALID_VALUE)?;
    Ok(Side { place: Place::Known(image.base + offset), pitch: image.pitch, slice: image.slice(), array: h })
}

/// Returns the side of a range of an array's bytes.
fn array_bytes(h: usize, offset: usize, bytes: usize) -> Result<Side> {
    let image = ARRAYS.get(h)?.image;
    let (offset, bytes) = (offset as u64, bytes as u64);
    let inside = offset.checked_add(bytes).is_some_and(|end| image.bytes().is_some_and(|all| end <= all));
    if !inside {
        return Err(INVALID_VALUE);
    }
    Ok(Side { place: Place::Known(image.base + offset), pitch: bytes, slice: bytes, array: h })
}

fn row(dst: Side, src: Side, bytes: usize) -> Copy {
    Copy { dst, src, width: bytes as u64, height: 1, depth: 1 }
}

fn plain_side(place: Place, bytes: usize) -> Side {
    Side { place, pitch: bytes as u64, slice: bytes as u64, array: 0 }
}

fn from_box(dst: &End, src: &End, extent: [u64; 3]) -> Result<Copy> {
    let [width, height, depth] = extent;
    Ok(Copy { src: src.side(extent)?, dst: dst.side(extent)?, width, height, depth })
}

pub fn from_2d(p: &Memcpy2D) -> Result<Copy> {
    let src = End {
        kind: p.srcMemoryType,
        host: p.srcHost,
        device: p.srcDevice,
        array: p.srcArray,
        at: [p.srcXInBytes as u64, p.srcY as u64, 0],
        pitch: p.srcPitch as u64,
        rows: 0,
        level: 0,
    };
    let dst = End {
        kind: p.dstMemoryType,
        host: p.dstHost,
        device: p.dstDevice,
        array: p.dstArray,
        at: [p.dstXInBytes as u64, p.dstY as u64, 0],
        pitch: p.dstPitch as u64,
        rows: 0,
        level: 0,
    };
    from_box(&dst, &src, [p.WidthInBytes as u64, p.Height as u64, 1])
}

pub fn from_3d(p: &Memcpy3D) -> Result<Copy> {
    let src = End {
        kind: p.srcMemoryType,
        host: p.srcHost,
        device: p.srcDevice,
        array: p.srcArray,
        at: [p.srcXInBytes as u64, p.srcY as u64, p.srcZ as u64],
        pitch: p.srcPitch as u64,
        rows: p.srcHeight as u64,
        level: p.srcLOD,
    };
    let dst = End {
        kind: p.dstMemoryType,
        host: p.dstHost,
        device: p.dstDevice,
        array: p.dstArray,
        at: [p.dstXInBytes as u64, p.dstY as u64, p.dstZ as u64],
        pitch: p.dstPitch as u64,
        rows: p.dstHeight as u64,
        level: p.dstLOD,
    };
    from_box(&dst, &src, [p.WidthInBytes as u64, p.Height as u64, p.Depth as u64])
}

fn fill(at: u64, pitch: usize, value: u32, element: u32, width: usize, height: usize) -> Result<Fill> {
    let width = (width as u64).checked_mul(u64::from(element)).ok_or(INVALID_VALUE)?;
    let f = Fill { at, pitch: pitch as u64, value, element, width, height: height as u64 };
    f.validate()?;
    Ok(f)
}

fn submit_fill(f: Fill, stream: usize, per_thread: bool, wait: bool) -> Result {
    let s = submit::stream(stream, per_thread)?;
    if wait {
        if s.role == Role::Legacy {
            forbid_legacy(&submit::context_of(&s)?)?;
        }
        forbid_unsafe()?;
    }
    if f.width == 0 || f.height == 0 {
        return Ok(());
    }
    let on_host = driver()?.space.find(f.at).is_some_and(|a| a.on_host()) || submit::is_synchronous(f.at)?;
    let point = submit::submit(&s, Op::Fill(f))?;
    // Even synchronous fills of device memory return before they are complete.
    if let Some(p) = point.filter(|_| wait && on_host) {
        p.wait();
        s.life.check()?;
    }
    Ok(())
}

/// Arrays of a batch: an element for each copy, then for each group of copies.
struct Batch {
    dst: *const u64,
    src: *const u64,
    bytes: *const usize,
    n: usize,
    attributes: *const [u32; 6],
    starts: *const usize,
    groups: usize,
}

/// Runs a batch of copies; `failed`, if any, receives no number, since all arguments count first.
///
/// # Safety
/// The pointers are those of the call, which the program vouches for.
unsafe fn copy_batch(batch: &Batch, failed: *mut usize, stream: usize, per_thread: bool) -> Result {
    let &Batch { dst, src, bytes, n, attributes, starts, groups } = batch;
    // SAFETY: see above.
    unsafe {
        if stream <= 1 {
            return Err(INVALID_VALUE);
        }
        out_opt(failed, usize::MAX);
        if n == 0 || groups == 0 || groups > n {
            return Err(INVALID_VALUE);
        }
        let (dst, src, bytes) = (slice(dst, n)?, slice(src, n)?, slice(bytes, n)?);
        let (attributes, starts) = (slice(attributes, groups)?, slice(starts, groups)?);
        if starts[0] != 0 || !starts.is_sorted_by(|a, b| a < b) || starts[groups - 1] >= n {
            return Err(INVALID_VALUE);
        }
        if attributes.iter().any(|a| !(1..=3).contains(&a[0]))
            || bytes.contains(&0)
            || src.contains(&0)
            || dst.contains(&0)
        {
            return Err(INVALID_VALUE);
        }
        for i in 0..n {
            let group = starts.partition_point(|start| *start <= i) - 1;
            let copy = Copy::linear(any_place(dst[i])?, any_place(src[i])?, bytes[i] as u64);
            submit_copy(copy, stream, per_thread, attributes[group][0] == 2)?;
        }
    }
    Ok(())
}

/// Runs a batch of boxes; `failed`, if any, receives the number of the first one that is wrong.
///
/// # Safety
/// The pointers are those of the call, which the program vouches for.
unsafe fn box_batch(
    n: usize,
    list: *const [u64; 14],
    failed: *mut usize,
    flags: u64,
    stream: usize,
    per_thread: bool,
) -> Result {
    // SAFETY: see above.
    unsafe {
        if stream <= 1 {
            return Err(INVALID_VALUE);
        }
        out_opt(failed, usize::MAX);
        if n == 0 || flags != 0 {
            return Err(INVALID_VALUE);
        }
        for (i, p) in slice(list, n)?.iter().enumerate() {
            let extent = [p[10], p[11], p[12]];
            let order = p[13] as u32;
            // Arrays are not simulated.
            if extent.contains(&0) || !(1..=3).contains(&order) || p[1] == 0 || p[6] == 0 {
                out_opt(failed, i);
                return Err(INVALID_VALUE);
            }
            if p[0] as u32 != 1 || p[5] as u32 != 1 {
                return Err(NOT_SUPPORTED);
            }
            let side = |at: u64, pitch: u64, rows: u64| -> Result<Side> {
                let pitch = if pitch == 0 { extent[0] } else { pitch };
                let rows = if rows == 0 { extent[1] } else { rows };
                Ok(Side { place: any_place(at)?, pitch, slice: pitch.wrapping_mul(rows), array: 0 })
            };
            let copy = Copy {
                src: side(p[1], p[2], p[3])?,
                dst: side(p[6], p[7], p[8])?,
                width: extent[0],
                height: extent[1],
                depth: extent[2],
            };
            submit_copy(copy, stream, per_thread, order == 2)?;
        }
    }
    Ok(())
}

export! {
    fn cuMemcpyHtoD_v2 | cuMemcpyHtoD_v2_ptds (dst: u64, src: u64, bytes: usize) {
        submit_copy(linear(dst, false, src, true, bytes)?, 0, PER_THREAD, true)
    }

    fn cuMemcpyDtoH_v2 | cuMemcpyDtoH_v2_ptds (dst: u64, src: u64, bytes: usize) {
        submit_copy(linear(dst, true, src, false, bytes)?, 0, PER_THREAD, true)
    }

    fn cuMemcpyDtoD_v2 | cuMemcpyDtoD_v2_ptds (dst: u64, src: u64, bytes: usize) {
        submit_copy(linear(dst, false, src, false, bytes)?, 0, PER_THREAD, true)
    }

    fn cuMemcpyHtoDAsync_v2 | cuMemcpyHtoDAsync_v2_ptsz (dst: u64, src: u64, bytes: usize, stream: usize) {
        submit_copy(linear(dst, false, src, true, bytes)?, stream, PER_THREAD, false)
    }

    fn cuMemcpyDtoHAsync_v2 | cuMemcpyDtoHAsync_v2_ptsz (dst: u64, src: u64, bytes: usize, stream: usize) {
        submit_copy(linear(dst, true, src, false, bytes)?, stream, PER_THREAD, false)
    }

    fn cuMemcpyDtoDAsync_v2 | cuMemcpyDtoDAsync_v2_ptsz (dst: u64, src: u64, bytes: usize, stream: usize) {
        submit_copy(linear(dst, false, src, false, bytes)?, stream, PER_THREAD, false)
    }

    fn cuMemcpy | cuMemcpy_ptds (dst: u64, src: u64, bytes: usize) {
        if bytes == 0 {
            return working().map(drop);
        }
        submit_copy(Copy::linear(any_place(dst)?, any_place(src)?, bytes as u64), 0, PER_THREAD, true)
    }

    fn cuMemcpyAsync | cuMemcpyAsync_ptsz (dst: u64, src: u64, bytes: usize, stream: usize) {
        if bytes == 0 {
            return working().map(drop);
        }
        submit_copy(Copy::linear(any_place(dst)?, any_place(src)?, bytes as u64), stream, PER_THREAD, false)
    }

    fn cuMemcpyPeer | cuMemcpyPeer_ptds (dst: u64, dst_ctx: usize, src: u64, src_ctx: usize, bytes: usize) {
        by_handle(dst_ctx)?;
        by_handle(src_ctx)?;
        submit_copy(linear(dst, false, src, false, bytes)?, 0, PER_THREAD, true)
    }

    fn cuMemcpyPeerAsync | cuMemcpyPeerAsync_ptsz (dst: u64, dst_ctx: usize, src: u64, src_ctx: usize, bytes: usize, stream: usize) {
        by_handle(dst_ctx)?;
        by_handle(src_ctx)?;
        submit_copy(linear(dst, false, src, false, bytes)?, stream, PER_THREAD, false)
    }

    fn cuMemcpy2D_v2 | cuMemcpy2D_v2_ptds (p: *const Memcpy2D) {
        submit_copy(from_2d(&read(p)?)?, 0, PER_THREAD, true)
    }

    fn cuMemcpy2DUnaligned_v2 | cuMemcpy2DUnaligned_v2_ptds (p: *const Memcpy2D) {
        submit_copy(from_2d(&read(p)?)?, 0, PER_THREAD, true)
    }

    fn cuMemcpy2DAsync_v2 | cuMemcpy2DAsync_v2_ptsz (p: *const Memcpy2D, stream: usize) {
        submit_copy(from_2d(&read(p)?)?, stream, PER_THREAD, false)
    }

    fn cuMemcpy3D_v2 | cuMemcpy3D_v2_ptds (p: *const Memcpy3D) {
        submit_copy(from_3d(&read(p)?)?, 0, PER_THREAD, true)
    }

    fn cuMemcpy3DAsync_v2 | cuMemcpy3DAsync_v2_ptsz (p: *const Memcpy3D, stream: usize) {
        submit_copy(from_3d(&read(p)?)?, stream, PER_THREAD, false)
    }

    fn cuMemcpy3DPeer | cuMemcpy3DPeer_ptds (p: *const Memcpy3D) {
        submit_copy(from_3d(&read(p)?)?, 0, PER_THREAD, true)
    }

    fn cuMemcpy3DPeerAsync | cuMemcpy3DPeerAsync_ptsz (p: *const Memcpy3D, stream: usize) {
        submit_copy(from_3d(&read(p)?)?, stream, PER_THREAD, false)
    }

    fn cuMemcpyAtoA_v2 | cuMemcpyAtoA_v2_ptds (dst: usize, to: usize, src: usize, from: usize, bytes: usize) {
        working()?;
        let copy = row(array_bytes(dst, to, bytes)?, array_bytes(src, from, bytes)?, bytes);
        submit_copy(copy, 0, PER_THREAD, true)
    }

    fn cuMemcpyAtoD_v2 | cuMemcpyAtoD_v2_ptds (dst: u64, src: usize, from: usize, bytes: usize) {
        working()?;
        let copy = row(plain_side(Place::Known(dst), bytes), array_bytes(src, from, bytes)?, bytes);
        submit_copy(copy, 0, PER_THREAD, true)
    }

    fn cuMemcpyDtoA_v2 | cuMemcpyDtoA_v2_ptds (dst: usize, to: usize, src: u64, bytes: usize) {
        working()?;
        let copy = row(array_bytes(dst, to, bytes)?, plain_side(Place::Known(src), bytes), bytes);
        submit_copy(copy, 0, PER_THREAD, true)
    }

    fn cuMemcpyAtoH_v2 | cuMemcpyAtoH_v2_ptds (dst: u64, src: usize, from: usize, bytes: usize) {
        working()?;
        let copy = row(plain_side(any_place(dst)?, bytes), array_bytes(src, from, bytes)?, bytes);
        submit_copy(copy, 0, PER_THREAD, true)
    }

    fn cuMemcpyHtoA_v2 | cuMemcpyHtoA_v2_ptds (dst: usize, to: usize, src: u64, bytes: usize) {
        working()?;
        let copy = row(array_bytes(dst, to, bytes)?, plain_side(any_place(src)?, bytes), bytes);
        submit_copy(copy, 0, PER_THREAD, true)
    }

    fn cuMemcpyAtoHAsync_v2 | cuMemcpyAtoHAsync_v2_ptsz (dst: u64, src: usize, from: usize, bytes: usize, stream: usize) {
        working()?;
        let copy = row(plain_side(any_place(dst)?, bytes), array_bytes(src, from, bytes)?, bytes);
        submit_copy(copy, stream, PER_THREAD, false)
    }

    fn cuMemcpyHtoAAsync_v2 | cuMemcpyHtoAAsync_v2_ptsz (dst: usize, to: usize, src: u64, bytes: usize, stream: usize) {
        working()?;
        let copy = row(array_bytes(dst, to, bytes)?, plain_side(any_place(src)?, bytes), bytes);
        submit_copy(copy, stream, PER_THREAD, false)
    }

    fn cuMemcpyBatchAsync | cuMemcpyBatchAsync_ptsz (
        dst: *const u64, src: *const u64, bytes: *const usize, n: usize, attributes: *const [u32; 6], starts: *const usize,
        groups: usize, failed: *mut usize, stream: usize
    ) {
        let batch = Batch { dst, src, bytes, n, attributes, starts, groups };
        copy_batch(&batch, failed, stream, PER_THREAD)
    }

    fn cuMemcpyBatchAsync_v2 | cuMemcpyBatchAsync_v2_ptsz (
        dst: *const u64, src: *const u64, bytes: *const usize, n: usize, attributes: *const [u32; 6], starts: *const usize,
        groups: usize, stream: usize
    ) {
        let batch = Batch { dst, src, bytes, n, attributes, starts, groups };
        copy_batch(&batch, std::ptr::null_mut(), stream, PER_THREAD)
    }

    fn cuMemcpy3DBatchAsync | cuMemcpy3DBatchAsync_ptsz (
        n: usize, list: *const [u64; 14], failed: *mut usize, flags: u64, stream: usize
    ) {
        box_batch(n, list, failed, flags, stream, PER_THREAD)
    }

    fn cuMemcpy3DBatchAsync_v2 | cuMemcpy3DBatchAsync_v2_ptsz (n: usize, list: *const [u64; 14], flags: u64, stream: usize) {
        box_batch(n, list, std::ptr::null_mut(), flags, stream, PER_THREAD)
    }

    fn cuMemsetD8_v2 | cuMemsetD8_v2_ptds (at: u64, value: u8, n: usize) {
        submit_fill(fill(at, 0, u32::from(value), 1, n, 1)?, 0, PER_THREAD, true)
    }

    fn cuMemsetD16_v2 | cuMemsetD16_v2_ptds (at: u64, value: u16, n: usize) {
        submit_fill(fill(at, 0, u32::from(value), 2, n, 1)?, 0, PER_THREAD, true)
    }

    fn cuMemsetD32_v2 | cuMemsetD32_v2_ptds (at: u64, value: u32, n: usize) {
        submit_fill(fill(at, 0, value, 4, n, 1)?, 0, PER_THREAD, true)
    }

    fn cuMemsetD2D8_v2 | cuMemsetD2D8_v2_ptds (at: u64, pitch: usize, value: u8, width: usize, height: usize) {
        submit_fill(fill(at, pitch, u32::from(value), 1, width, height)?, 0, PER_THREAD, true)
    }

    fn cuMemsetD2D16_v2 | cuMemsetD2D16_v2_ptds (at: u64, pitch: usize, value: u16, width: usize, height: usize) {
        submit_fill(fill(at, pitch, u32::from(value), 2, width, height)?, 0, PER_THREAD, true)
    }

    fn cuMemsetD2D32_v2 | cuMemsetD2D32_v2_ptds (at: u64, pitch: usize, value: u32, width: usize, height: usize) {
        submit_fill(fill(at, pitch, value, 4, width, height)?, 0, PER_THREAD, true)
    }

    fn cuMemsetD8Async | cuMemsetD8Async_ptsz (at: u64, value: u8, n: usize, stream: usize) {
        submit_fill(fill(at, 0, u32::from(value), 1, n, 1)?, stream, PER_THREAD, false)
    }

    fn cuMemsetD16Async | cuMemsetD16Async_ptsz (at: u64, value: u16, n: usize, stream: usize) {
        submit_fill(fill(at, 0, u32::from(value), 2, n, 1)?, stream, PER_THREAD, false)
    }

    fn cuMemsetD32Async | cuMemsetD32Async_ptsz (at: u64, value: u32, n: usize, stream: usize) {
        submit_fill(fill(at, 0, value, 4, n, 1)?, stream, PER_THREAD, false)
    }

    fn cuMemsetD2D8Async | cuMemsetD2D8Async_ptsz (at: u64, pitch: usize, value: u8, width: usize, height: usize, stream: usize) {
        submit_fill(fill(at, pitch, u32::from(value), 1, width, height)?, stream, PER_THREAD, false)
    }

    fn cuMemsetD2D16Async | cuMemsetD2D16Async_ptsz (at: u64, pitch: usize, value: u16, width: usize, height: usize, stream: usize) {
        submit_fill(fill(at, pitch, u32::from(value), 2, width, height)?, stream, PER_THREAD, false)
    }

    fn cuMemsetD2D32Async | cuMemsetD2D32Async_ptsz (at: u64, pitch: usize, value: u32, width: usize, height: usize, stream: usize) {
        submit_fill(fill(at, pitch, value, 4, width, height)?, stream, PER_THREAD, false)
    }
}
