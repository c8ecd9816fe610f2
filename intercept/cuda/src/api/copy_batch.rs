//! Copies in batches, with attributes, between devices, and of arrays in one dimension.

use std::ffi::c_void;

use super::copy::{for_synchronous, named, packed_source, run, serialized, unified};
use crate::cuboid::{Cuboid, HOST, Side, on_device};
use crate::entry::{INVALID_VALUE, Result, bytes, driver, give_optional, take};
use crate::streams::{self, Stream};
use crate::{arrays, clients};

/// `CUmemcpySrcAccessOrder`
mod order {
    pub const STREAM: u32 = 1;
    /// The source may change after the call.
    pub const DURING_CALL: u32 = 2;
    pub const ANY: u32 = 3;
}

/// `CUmemcpyAttributes`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Attributes {
    order: u32,
    source: [u32; 2],
    target: [u32; 2],
    flags: u32,
}

/// `CUmemcpy3DOperand`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Operand {
    kind: u32,
    /// A pointer, row length, layer height and location; or an array and an offset.
    body: [u64; 4],
}

/// `CUDA_MEMCPY3D_BATCH_OP`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Operation {
    source: Operand,
    target: Operand,
    extent: [usize; 3],
    order: u32,
    flags: u32,
}

const _: () = assert!(size_of::<Attributes>() == 24 && size_of::<Operation>() == 112);
/// `CU_MEMCPY_OPERAND_TYPE_POINTER`
const POINTER: u32 = 1;
/// `CU_MEMCPY_OPERAND_TYPE_ARRAY`
const ARRAY: u32 = 2;

/// Returns `true` if a copy has to read its source before the call returns.
fn reads_now(order: u32) -> Result<bool> {
    match order {
        order::STREAM | order::ANY => Ok(false),
        order::DURING_CALL => Ok(true),
        _ => Err(INVALID_VALUE),
    }
}

/// Returns the stream of a batch, which the driver takes on no legacy default stream.
pub fn stream_of(stream: *mut c_void, default: streams::Default) -> Result<std::sync::Arc<Stream>> {
    let stream = named(stream, default)?;
    if stream.handle == 0 { Err(INVALID_VALUE) } else { Ok(stream) }
}

/// Returns the elements of an array of the program.
pub fn elements<T: Copy>(array: *const T, count: usize) -> Result<Vec<T>> {
    if array.is_null() {
        return Err(INVALID_VALUE);
    }
    bytes(array.cast(), count.checked_mul(size_of::<T>()).ok_or(INVALID_VALUE)?)?;
    // SAFETY: the array is not null, so by the call's contract it has `count` elements.
    Ok((0..count).map(|i| unsafe { array.add(i).read_unaligned() }).collect())
}

/// Returns the first element of each group of a batch: 0, then rising numbers below `count`.
pub fn starts_of(array: *const usize, groups: usize, count: usize) -> Result<Vec<usize>> {
    if groups == 0 || groups > count {
        return Err(INVALID_VALUE);
    }
    let starts = elements(array, groups)?;
    let rising = starts.is_sorted_by(|a, b| a < b);
    if starts[0] != 0 || !rising || starts[groups - 1] >= count {
        return Err(INVALID_VALUE);
    }
    Ok(starts)
}

/// Arrays of a batch: one element for each copy, then for each group of copies.
struct Batch {
    targets: *const u64,
    sources: *const u64,
    lengths: *const usize,
    count: usize,
    attributes: *const Attributes,
    starts: *const usize,
    groups: usize,
}

/// Runs a copy; with `now` its source may change after the return.
fn one(target: u64, source: u64, len: usize, stream: &Stream, now: bool) -> Result {
    let up = on_device(target) && !on_device(source);
    if !now || !up || stream.capture().is_some() {
        return unified(target, source, len, stream, now);
    }
    // The library reads pageable memory before the return, and waits for no work of the stream.
    let taken = bytes(source as *const c_void, len)?.to_vec();
    unified(target, taken.as_ptr() as u64, len, stream, false)
}

/// Runs the copies of a batch one after the other, which is one of the permitted orders.
fn batch(batch: &Batch, failed: *mut usize, stream: *mut c_void, default: streams::Default) -> Result {
    let stream = stream_of(stream, default)?;
    let &Batch { count, groups, .. } = batch;
    give_optional(failed, usize::MAX);
    let starts = starts_of(batch.starts, groups, count)?;
    let (targets, sources) = (elements(batch.targets, count)?, elements(batch.sources, count)?);
    let lengths = elements(batch.lengths, count)?;
    let attributes = elements(batch.attributes, groups)?;
    let now = attributes.iter().map(|a| reads_now(a.order)).collect::<Result<Vec<_>>>()?;
    for i in 0..count {
        if targets[i] == 0 || sources[i] == 0 || lengths[i] == 0 {
            give_optional(failed, i);
            return Err(INVALID_VALUE);
        }
    }
    for i in 0..count {
        let group = starts.partition_point(|start| *start <= i) - 1;
        one(targets[i], sources[i], lengths[i], &stream, now[group])
            .inspect_err(|_| give_optional(failed, i))?;
    }
    Ok(())
}

impl Operation {
    fn cuboid(&self) -> Result<Cuboid> {
        let operands = [self.target, self.source];
        let mut size = None;
        for operand in operands.iter().filter(|operand| operand.kind == ARRAY) {
            let array = operand.body[0];
            let this = arrays::element(clients::by_object(array)?, array)?;
            if size.is_some_and(|other| other != this) {
                return Err(INVALID_VALUE);
            }
            size = Some(this);
        }
        let size = size.unwrap_or(1);
        let [width, height, depth] = self.extent;
        let scaled = |n: u64| (n as usize).checked_mul(size).ok_or(INVALID_VALUE);
        let side = |operand: Operand| {
            let [first, a, b, c] = operand.body;
            match operand.kind {
                POINTER => {
                    let fits = |given: u64, needed: usize| given == 0 || given as usize >= needed;
                    if first == 0 || !fits(a, width) || !fits(b, height) {
                        return Err(INVALID_VALUE);
                    }
                    Ok(Side::unified(first, scaled(a)?, b as usize))
                }
                ARRAY => Ok(Side::array(first, [scaled(a)?, b as usize, c as usize])),
                _ => Err(INVALID_VALUE),
            }
        };
        if width == 0 || height == 0 || depth == 0 {
            return Err(INVALID_VALUE);
        }
        let extent = [scaled(width as u64)?, height, depth];
        Ok(Cuboid::between(side(self.target)?, side(self.source)?, extent))
    }
}

/// Runs the copy of a box; with `now` its source may change after the return.
fn one_box(mut copy: Cuboid, stream: &Stream, now: bool) -> Result {
    copy.resolve()?;
    if !now || copy.host_sides() != (true, false) || stream.capture().is_some() {
        return run(copy, stream, now);
    }
    let size = copy.width.checked_mul(copy.height).and_then(|n| n.checked_mul(copy.depth));
    size.ok_or(INVALID_VALUE)?;
    // As in `one`, so that the call waits for no work of the stream.
    let taken = packed_source(&copy);
    copy.source = Side::memory(HOST, taken.as_ptr() as u64, copy.width, copy.height);
    run(copy, stream, false)
}

/// Runs copies of boxes one after the other.
fn boxes(
    operations: *const Operation,
    count: usize,
    failed: *mut usize,
    flags: u64,
    stream: *mut c_void,
    default: streams::Default,
) -> Result {
    let stream = stream_of(stream, default)?;
    give_optional(failed, usize::MAX);
    if count == 0 || flags != 0 {
        return Err(INVALID_VALUE);
    }
    let mut copies = Vec::new();
    for (i, operation) in elements(operations, count)?.iter().enumerate() {
        let copy = reads_now(operation.order).and_then(|now| Ok((operation.cuboid()?, now)));
        copies.push(copy.inspect_err(|_| give_optional(failed, i))?);
    }
    for (i, (copy, now)) in copies.into_iter().enumerate() {
        one_box(copy, &stream, now).inspect_err(|_| give_optional(failed, i))?;
    }
    Ok(())
}

fn between_devices(copy: *const Cuboid, stream: &Stream, wait: bool) -> Result {
    let mut copy = take(copy)?;
    let contexts = copy.take_contexts();
    for ctx in contexts.into_iter().flatten() {
        clients::of_context(ctx)?;
    }
    match contexts {
        [Some(to), Some(from)] if wait && to != from => {
            serialized([to, from], stream, || run(copy, stream, wait))
        }
        _ => run(copy, stream, wait),
    }
}

/// Copies a row of bytes, of which at least one end is in an array.
fn row(target: Side, source: Side, len: usize, stream: &Stream, wait: bool) -> Result {
    run(Cuboid::between(target, source, [len, 1, 1]), stream, wait)
}

driver! {
    fn cuMemcpyBatchAsync / cuMemcpyBatchAsync_ptsz [default] (
        targets: *const u64, sources: *const u64, lengths: *const usize, count: usize, attributes: *const Attributes,
        starts: *const usize, groups: usize, failed: *mut usize, stream: *mut c_void,
    ) {
        batch(&Batch { targets, sources, lengths, count, attributes, starts, groups }, failed, stream, default)
    }

    fn cuMemcpyBatchAsync_v2 / cuMemcpyBatchAsync_v2_ptsz [default] (
        targets: *const u64, sources: *const u64, lengths: *const usize, count: usize, attributes: *const Attributes,
        starts: *const usize, groups: usize, stream: *mut c_void,
    ) {
        let arrays = Batch { targets, sources, lengths, count, attributes, starts, groups };
        batch(&arrays, std::ptr::null_mut(), stream, default)
    }

    fn cuMemcpy3DBatchAsync / cuMemcpy3DBatchAsync_ptsz [default] (
        count: usize, operations: *const Operation, failed: *mut usize, flags: u64, stream: *mut c_void,
    ) {
        boxes(operations, count, failed, flags, stream, default)
    }

    fn cuMemcpy3DBatchAsync_v2 / cuMemcpy3DBatchAsync_v2_ptsz [default] (
        count: usize, operations: *const Operation, flags: u64, stream: *mut c_void,
    ) {
        boxes(operations, count, std::ptr::null_mut(), flags, stream, default)
    }

    fn cuMemcpyWithAttributesAsync / cuMemcpyWithAttributesAsync_ptsz [default] (
        target: u64, source: u64, len: usize, attributes: *const Attributes, stream: *mut c_void,
    ) {
        let now = reads_now(take(attributes)?.order)?;
        if target == 0 || source == 0 || len == 0 {
            return Err(INVALID_VALUE);
        }
        one(target, source, len, &*named(stream, default)?, now)
    }

    fn cuMemcpy3DWithAttributesAsync / cuMemcpy3DWithAttributesAsync_ptsz [default] (
        operation: *const Operation, flags: u64, stream: *mut c_void,
    ) {
        let operation = take(operation)?;
        let now = reads_now(operation.order)?;
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        run(operation.cuboid()?, &*named(stream, default)?, now)
    }

    fn cuMemcpy3DPeer / cuMemcpy3DPeer_ptds [default] (copy: *const Cuboid) {
        between_devices(copy, &*for_synchronous(default)?, true)
    }

    fn cuMemcpy3DPeerAsync / cuMemcpy3DPeerAsync_ptsz [default] (copy: *const Cuboid, stream: *mut c_void) {
        between_devices(copy, &*named(stream, default)?, false)
    }

    fn cuMemcpyAtoA_v2 / cuMemcpyAtoA_v2_ptds [default] (target: u64, to: usize, source: u64, from: usize, len: usize) {
        let stream = for_synchronous(default)?;
        row(Side::array(target, [to, 0, 0]), Side::array(source, [from, 0, 0]), len, &stream, true)
    }

    fn cuMemcpyAtoD_v2 / cuMemcpyAtoD_v2_ptds [default] (target: u64, source: u64, from: usize, len: usize) {
        let stream = for_synchronous(default)?;
        row(Side::device(target), Side::array(source, [from, 0, 0]), len, &stream, true)
    }

    fn cuMemcpyDtoA_v2 / cuMemcpyDtoA_v2_ptds [default] (target: u64, to: usize, source: u64, len: usize) {
        let stream = for_synchronous(default)?;
        row(Side::array(target, [to, 0, 0]), Side::device(source), len, &stream, true)
    }

    fn cuMemcpyAtoH_v2 / cuMemcpyAtoH_v2_ptds [default] (target: u64, source: u64, from: usize, len: usize) {
        let stream = for_synchronous(default)?;
        row(Side::host(target), Side::array(source, [from, 0, 0]), len, &stream, true)
    }

    fn cuMemcpyHtoA_v2 / cuMemcpyHtoA_v2_ptds [default] (target: u64, to: usize, source: u64, len: usize) {
        let stream = for_synchronous(default)?;
        row(Side::array(target, [to, 0, 0]), Side::host(source), len, &stream, true)
    }

    fn cuMemcpyAtoHAsync_v2 / cuMemcpyAtoHAsync_v2_ptsz [default] (
        target: u64, source: u64, from: usize, len: usize, stream: *mut c_void,
    ) {
        row(Side::host(target), Side::array(source, [from, 0, 0]), len, &*named(stream, default)?, false)
    }

    fn cuMemcpyHtoAAsync_v2 / cuMemcpyHtoAAsync_v2_ptsz [default] (
        target: u64, to: usize, source: u64, len: usize, stream: *mut c_void,
    ) {
        row(Side::array(target, [to, 0, 0]), Side::host(source), len, &*named(stream, default)?, false)
    }
}
