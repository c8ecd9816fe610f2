//! Launches: the hot path.
//!
//! A launch of a shape that the driver has accepted before is one frame, without a wait.

use std::ffi::c_void;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use gpusession_proto::frame::{Writer, op};
use gpusession_proto::launch::{self, ATTRIBUTE, COOPERATIVE, DEVICE_UPDATABLE};

use crate::client::{Client, unavailable};
use crate::entry::{
    INVALID_HANDLE, INVALID_VALUE, LAUNCH_OUT_OF_RESOURCES, NOT_SUPPORTED, Result, bytes, driver, give,
    give_optional, take,
};
use crate::events::Event;
use crate::functions::{self, Function};
use crate::streams::{self, find};
use crate::{clients, events, mapped, ranges, regions, thread, trace};

/// `CU_LAUNCH_PARAM_*`
const PARAM_END: usize = 0;
const PARAM_BUFFER: usize = 1;
const PARAM_SIZE: usize = 2;

/// Largest grid in y and z.
const MAX_GRID_YZ: u32 = 65_535;
const MAX_GRID_X: u32 = i32::MAX as u32;

/// Grid, block and dynamic shared memory of a launch.
#[derive(Clone, Copy, Hash)]
pub struct Shape {
    /// In blocks.
    pub grid: [u32; 3],
    /// In threads.
    pub block: [u32; 3],
    /// Dynamic shared memory, in bytes.
    pub shared: u32,
}

impl Shape {
    fn check(&self) -> Result {
        let [x, y, z] = self.grid;
        let empty = self.grid.contains(&0) || self.block.contains(&0);
        if empty || x > MAX_GRID_X || y > MAX_GRID_YZ || z > MAX_GRID_YZ {
            return Err(INVALID_VALUE);
        }
        Ok(())
    }

    fn write(&self, w: &mut Writer<'_>) {
        let pair = |a: u32, b: u32| u64::from(a) | u64::from(b) << 32;
        w.word(pair(self.grid[0], self.grid[1]));
        w.word(pair(self.grid[2], self.block[0]));
        w.word(pair(self.block[1], self.block[2]));
    }
}

/// Location of a kernel's parameters in the program; one of both is set.
#[derive(Clone, Copy)]
pub struct Params {
    /// Array with a pointer for each parameter.
    pub each: *const *mut c_void,
    /// List that names a buffer with all parameters.
    pub extra: *const *mut c_void,
}

impl Params {
    /// Writes the parameter buffer of `function` as a byte string.
    #[inline]
    pub fn write(self, function: &Function, w: &mut Writer<'_>) -> Result {
        if !self.each.is_null() {
            w.bytes_with(function.param_bytes, |buffer| {
                for (i, param) in function.params.iter().enumerate() {
                    // SAFETY: by the API's contract the array has a pointer for each parameter, to
                    // as many bytes as the kernel's layout says. That layout lies inside the
                    // buffer.
                    unsafe {
                        let source = self.each.add(i).read();
                        let target = buffer.as_mut_ptr().add(param.offset as usize);
                        std::ptr::copy_nonoverlapping(source.cast(), target, param.size as usize);
                    }
                }
            });
            return Ok(());
        }
        let buffer = self.buffer()?;
        // The program's buffer may lack the padding at its end.
        w.bytes_with(function.param_bytes.max(buffer.len()), |target| {
            target[..buffer.len()].copy_from_slice(buffer)
        });
        Ok(())
    }

    fn buffer<'a>(self) -> Result<&'a [u8]> {
        if self.extra.is_null() {
            return Ok(&[]);
        }
        let (mut pointer, mut size) = (std::ptr::null::<c_void>(), 0usize);
        let mut at = self.extra;
        loop {
            // SAFETY: by the API's contract the list ends in CU_LAUNCH_PARAM_END, and a value
            // follows each key.
            unsafe {
                match at.read() as usize {
                    PARAM_END => break,
                    PARAM_BUFFER => pointer = at.add(1).read(),
                    PARAM_SIZE => size = at.add(1).read().cast::<usize>().read(),
                    _ => return Err(INVALID_VALUE),
                }
                at = at.add(2);
            }
        }
        if size > 1 << 16 {
            return Err(INVALID_VALUE);
        }
        bytes(pointer, size)
    }

    /// Maps pinned memory that a parameter points into; refuses another lease's managed memory.
    #[inline]
    pub fn name_memory(self, client: &'static Client, function: &Function) -> Result {
        if !ranges::any_named() {
            return Ok(());
        }
        if self.each.is_null() {
            return mapped::named_within(client, self.buffer()?);
        }
        for (i, param) in function.params.iter().enumerate() {
            // SAFETY: by the API's contract each pointer leads to as many bytes as the kernel's
            // layout says.
            let words = unsafe {
                std::slice::from_raw_parts(self.each.add(i).read().cast::<u8>(), param.size as usize)
            };
            mapped::named_within(client, words)?;
        }
        Ok(())
    }

    /// Refuses parameters that contradict themselves or the kernel.
    ///
    /// That is a list together with pointers, neither for a kernel with parameters, or a buffer
    /// that is too long.
    pub fn check(self, function: &Function) -> Result {
        let absent = self.each.is_null() && self.extra.is_null();
        if self.each.is_null() && self.buffer()?.len() > function.param_bytes.next_multiple_of(8) {
            return Err(LAUNCH_OUT_OF_RESOURCES);
        }
        if (absent && !function.params.is_empty()) || (!self.each.is_null() && !self.extra.is_null()) {
            return Err(INVALID_VALUE);
        }
        if self.each.is_null() { Ok(()) } else { function.prove() }
    }
}

/// Returns the events that a launch records by its attributes, each once and in one order for all
/// threads.
///
/// Refuses a node that device code updates: its handle on the device would have to outlive a
/// replaced worker.
fn recorded_by(client: &Client, attributes: &[u8]) -> Result<Vec<Arc<Event>>> {
    if launch::attributes(attributes).any(|(id, value)| id == DEVICE_UPDATABLE && value as u32 != 0) {
        trace::why("launches: a kernel node that device code updates");
        return Err(NOT_SUPPORTED);
    }
    let mut recorded = launch::events(attributes).map(events::find).collect::<Result<Vec<_>>>()?;
    if recorded.iter().any(|event| event.client.number != client.number) {
        return Err(INVALID_HANDLE);
    }
    recorded.sort_by_key(|event| event.handle);
    recorded.dedup_by_key(|event| event.handle);
    Ok(recorded)
}

fn launch(
    function: *mut c_void,
    shape: Shape,
    stream: (*mut c_void, streams::Default),
    attributes: &[u8],
    params: Params,
) -> Result {
    let function = functions::find(function as u64)?;
    shape.check()?;
    params.check(&function)?;
    let (client, stream) = find(stream.0, stream.1)?;
    stream.usable()?;
    params.name_memory(client, &function)?;
    regions::upload(client)?;
    let mut hasher = DefaultHasher::new();
    // A function belongs to one context, and a kernel has settings of its own in each.
    (function.handle, shape.block, shape.shared, attributes, stream.ctx).hash(&mut hasher);
    function.context_of_call().hash(&mut hasher);
    if !attributes.is_empty() {
        // The verdict on clusters and cooperative launches depends on the grid, too.
        shape.grid.hash(&mut hasher);
    }
    // The key contains the client, because a kernel is on several workers. It is never zero, which
    // marks an empty place.
    let key = hasher.finish() ^ u64::from(client.number) << 32 | 1;
    let recorded = recorded_by(client, attributes)?;
    let orders: Vec<_> = recorded.iter().map(|event| event.order()).collect();
    let note = |seq: u64| {
        for event in &recorded {
            match stream.capture() {
                Some(capture) => event.captured_in(&capture),
                None => event.record_in_launch(&stream, seq),
            }
        }
    };
    let mut failed = Ok(());
    let body = |w: &mut Writer<'_>| {
        w.word(function.handle);
        shape.write(w);
        w.word(u64::from(shape.shared));
        w.word(stream.handle);
        w.bytes(attributes);
        failed = params.write(&function, w);
    };
    // A process that learns of the record by other means finds it: it has arrived.
    if functions::accepted(key) && !recorded.iter().any(|event| event.is_shared()) {
        let seq = client.post(op::LAUNCH, body)?;
        failed?;
        stream.worked(seq);
        note(seq);
        drop(orders);
        return client.take_late_error();
    }
    function.reach(client)?;
    let begun = client.link.begin_call(op::LAUNCH, client.caller(), body).map_err(unavailable)?;
    let seq = begun.seq;
    let reply = client.finish(begun)?;
    failed?;
    stream.worked(seq);
    client.check_status(reply.status)?;
    note(seq);
    functions::accept(key);
    Ok(())
}

/// `CUlaunchConfig`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Config {
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    stream: *mut c_void,
    attributes: *const c_void,
    count: u32,
}

impl Config {
    fn shape(&self) -> Shape {
        Shape { grid: self.grid, block: self.block, shared: self.shared }
    }

    /// Returns the attributes, with zeros for the bytes that have no meaning.
    ///
    /// Programs leave there what their stack has, which would make each launch another one.
    fn attributes(&self) -> Result<Vec<u8>> {
        if self.count > 64 {
            return Err(INVALID_VALUE);
        }
        let mut all = bytes(self.attributes, self.count as usize * ATTRIBUTE)?.to_vec();
        for attribute in all.chunks_exact_mut(ATTRIBUTE) {
            let (id, rest) = attribute.split_at_mut(4);
            rest[..4].fill(0);
            let len = value_len(u32::from_le_bytes(id.try_into().unwrap_or_default()));
            rest[4 + len..].fill(0);
        }
        Ok(all)
    }
}

/// Returns the bytes of the value of a `CUlaunchAttributeID`; all of them for an unknown one.
fn value_len(id: u32) -> usize {
    match id {
        0 => 0,
        // CUaccessPolicyWindow: an address, a length, three words
        1 => 28,
        // A boolean, an enumeration or a number
        2 | 3 | 5 | 6 | 8 | 10 | 14 => 4,
        // Dimensions of a cluster, and preferred ones
        4 | 11 => 12,
        // CUlaunchMemSyncDomainMap: two bytes
        9 => 2,
        // An event with two words, a node with one; an event with one
        7 | 13 => 16,
        12 => 12,
        _ => ATTRIBUTE - 8,
    }
}

driver! {
    fn cuLaunchKernel / cuLaunchKernel_ptsz [default] (
        function: *mut c_void, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32, shared: u32, stream: *mut c_void,
        each: *const *mut c_void, extra: *const *mut c_void,
    ) {
        let shape = Shape { grid: [gx, gy, gz], block: [bx, by, bz], shared };
        launch(function, shape, (stream, default), &[], Params { each, extra })
    }

    fn cuLaunchKernelEx / cuLaunchKernelEx_ptsz [default] (
        config: *const Config, function: *mut c_void, each: *const *mut c_void, extra: *const *mut c_void,
    ) {
        let config = take(config)?;
        let stream = (config.stream, default);
        launch(function, config.shape(), stream, &config.attributes()?, Params { each, extra })
    }

    fn cuLaunchCooperativeKernel / cuLaunchCooperativeKernel_ptsz [default] (
        function: *mut c_void, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32, shared: u32, stream: *mut c_void,
        each: *const *mut c_void,
    ) {
        let shape = Shape { grid: [gx, gy, gz], block: [bx, by, bz], shared };
        let mut attribute = [0u8; ATTRIBUTE];
        attribute[..4].copy_from_slice(&COOPERATIVE.to_le_bytes());
        attribute[8..12].copy_from_slice(&1u32.to_le_bytes());
        let params = Params { each, extra: std::ptr::null() };
        launch(function, shape, (stream, default), &attribute, params)
    }

    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks: *mut i32, function: *mut c_void, block: i32, shared: usize) {
        give(blocks, simple(function, 0, block, shared, 0)? as i32)
    }

    fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        blocks: *mut i32, function: *mut c_void, block: i32, shared: usize, flags: u32,
    ) {
        give(blocks, simple(function, 0, block, shared, flags)? as i32)
    }

    fn cuOccupancyAvailableDynamicSMemPerBlock(size: *mut usize, function: *mut c_void, blocks: i32, block: i32) {
        give(size, simple(function, 1, block, 0, blocks as u32)? as usize)
    }

    fn cuOccupancyMaxActiveClusters(clusters: *mut i32, function: *mut c_void, config: *const Config) {
        give(clusters, with_config(function, 2, config)? as i32)
    }

    fn cuOccupancyMaxPotentialClusterSize(size: *mut i32, function: *mut c_void, config: *const Config) {
        give(size, with_config(function, 3, config)? as i32)
    }

    fn cuOccupancyMaxPotentialBlockSize(
        grid: *mut i32, block: *mut i32, function: *mut c_void, dynamic: Option<extern "C" fn(i32) -> usize>, shared: usize,
        limit: i32,
    ) {
        best_block(grid, block, function, dynamic, shared, limit, 0)
    }

    fn cuOccupancyMaxPotentialBlockSizeWithFlags(
        grid: *mut i32, block: *mut i32, function: *mut c_void, dynamic: Option<extern "C" fn(i32) -> usize>, shared: usize,
        limit: i32, flags: u32,
    ) {
        best_block(grid, block, function, dynamic, shared, limit, flags)
    }
}

fn simple(function: *mut c_void, question: u64, block: i32, shared: usize, flags: u32) -> Result<u64> {
    let words = [question, block as u32 as u64, shared as u64, u64::from(flags)];
    let question = words.iter().flat_map(|w| w.to_le_bytes()).collect();
    let function = functions::find(function as u64)?;
    function.occupancy(function.client()?, question)
}

fn with_config(function: *mut c_void, question: u64, config: *const Config) -> Result<u64> {
    let config = take(config)?;
    let function = functions::find(function as u64)?;
    let (client, stream) = if config.stream.is_null() {
        (function.client()?, 0)
    } else {
        let (client, stream) = find(config.stream, streams::Default::Legacy)?;
        (client, stream.handle)
    };
    let mut body = Vec::new();
    for word in [question, 0, u64::from(config.shared), 0] {
        body.extend_from_slice(&word.to_le_bytes());
    }
    // Written as a frame, so that the same bytes serve as question and as key.
    let mut frame = Vec::new();
    let header = gpusession_proto::frame::Header::empty();
    let mut w = Writer::new(&mut frame, &header);
    config.shape().write(&mut w);
    w.word(stream);
    w.bytes(&config.attributes()?);
    w.finish();
    body.extend_from_slice(&frame[gpusession_proto::frame::HEADER..]);
    function.occupancy(client, body)
}

/// Finds the block size with the highest occupancy as the driver does.
///
/// It asks for the largest size first, then for the multiples of a warp below. The first size that
/// fills a multiprocessor ends the search (seen with driver 580 on an H200).
fn best_block(
    grid: *mut i32,
    block: *mut i32,
    function: *mut c_void,
    dynamic: Option<extern "C" fn(i32) -> usize>,
    shared: usize,
    limit: i32,
    flags: u32,
) -> Result {
    const WARP: i32 = 32;
    const MAX_THREADS_PER_BLOCK: i32 = 0;
    const MULTIPROCESSORS: usize = 16;
    const MAX_THREADS_PER_MULTIPROCESSOR: usize = 39;
    if limit < 0 {
        return Err(INVALID_VALUE);
    }
    let known = functions::find(function as u64)?;
    let client = known.client()?;
    let (_, device) = clients::of_context(thread::context()?)?;
    let full = device.attribute(MAX_THREADS_PER_MULTIPROCESSOR);
    let most = known.attribute(client, MAX_THREADS_PER_BLOCK, functions::OWN_DEVICE)?;
    let mut size = if limit > 0 { most.min(limit) } else { most };
    let (mut best, mut best_threads, mut best_blocks) = (0, 0, 0);
    while size > 0 {
        let bytes = dynamic.map_or(shared, |f| f(size));
        let blocks = simple(function, 0, size, bytes, flags)? as i32;
        if blocks * size > best_threads {
            (best, best_threads, best_blocks) = (size, blocks * size, blocks);
        }
        if best_threads >= full {
            break;
        }
        size = (size - 1) / WARP * WARP;
    }
    let count = device.attribute(MULTIPROCESSORS).max(1);
    give_optional(grid, best_blocks * count);
    give(block, best)
}

#[cfg(test)]
mod tests {
    use gpusession_proto::frame::{HEADER, Header, Reader};

    use super::*;
    use crate::functions::{How, Param};

    fn function(params: &[(u32, u32)]) -> Function {
        let params = params.iter().map(|(offset, size)| Param { offset: *offset, size: *size }).collect();
        Function::new(1, c"kernel".into(), How::Function, 2, params).unwrap()
    }

    fn written(params: Params, function: &Function) -> Result<Vec<u8>> {
        let mut frame = Vec::new();
        let mut w = Writer::new(&mut frame, &Header::empty());
        params.check(function)?;
        params.write(function, &mut w)?;
        w.finish();
        Ok(Reader::new(&frame[HEADER..]).bytes().unwrap().to_vec())
    }

    /// Returns the list that names a buffer with all parameters.
    fn list(buffer: &[u8], len: &usize) -> [*mut c_void; 5] {
        let key = |key: usize| key as *mut c_void;
        let (buffer, len) = (buffer.as_ptr().cast_mut().cast(), std::ptr::from_ref(len).cast_mut().cast());
        [key(PARAM_BUFFER), buffer, key(PARAM_SIZE), len, key(PARAM_END)]
    }

    #[test]
    fn bytes_of_an_attribute_without_meaning_are_zero() {
        let config = |attributes: &[u8]| Config {
            grid: [1; 3],
            block: [1; 3],
            shared: 0,
            stream: std::ptr::null_mut(),
            attributes: attributes.as_ptr().cast(),
            count: (attributes.len() / ATTRIBUTE) as u32,
        };
        // Programmatic serialization, an event, one of a later driver.
        let mut attributes = [0xaau8; 3 * ATTRIBUTE];
        for (attribute, id) in attributes.chunks_exact_mut(ATTRIBUTE).zip([6u32, 12, 99]) {
            attribute[..4].copy_from_slice(&id.to_le_bytes());
        }
        let clean = config(&attributes).attributes().unwrap();
        for (attribute, (id, len)) in clean.chunks_exact(ATTRIBUTE).zip([(6u32, 4), (12, 12), (99, 64)]) {
            assert_eq!(attribute[..8], [id.to_le_bytes(), [0; 4]].concat());
            assert!(attribute[8..8 + len].iter().all(|byte| *byte == 0xaa), "the value of {id}");
            assert!(attribute[8 + len..].iter().all(|byte| *byte == 0), "behind the value of {id}");
        }
        assert_eq!(config(&[]).attributes(), Ok(Vec::new()));
    }

    const NONE: *const *mut c_void = std::ptr::null();

    #[test]
    fn parameters_lie_where_the_kernel_expects_them() {
        let (mut small, mut large) = (0x11_u8, [0x22_u8; 8]);
        let each = [std::ptr::from_mut(&mut small).cast::<c_void>(), large.as_mut_ptr().cast()];
        let params = Params { each: each.as_ptr(), extra: NONE };
        let expected = [&[0x11, 0, 0, 0, 0, 0, 0, 0][..], &[0x22; 8]].concat();
        assert_eq!(written(params, &function(&[(0, 1), (8, 8)])), Ok(expected));
    }

    #[test]
    fn buffer_may_lack_the_padding_at_its_end() {
        let buffer = [7u8; 16];
        for (len, expected) in [(12, Ok(12)), (9, Ok(12)), (16, Ok(16)), (17, Err(LAUNCH_OUT_OF_RESOURCES))] {
            let list = list(&buffer, &len);
            let params = Params { each: NONE, extra: list.as_ptr() };
            let bytes = match written(params, &function(&[(0, 8), (8, 4)])) {
                Ok(bytes) => bytes,
                Err(status) => {
                    assert_eq!(Err(status), expected, "{len}");
                    continue;
                }
            };
            assert_eq!(Ok(bytes.len()), expected, "{len}");
            assert!(bytes[..len].iter().all(|byte| *byte == 7) && bytes[len..].iter().all(|byte| *byte == 0));
        }
    }

    #[test]
    fn parameters_come_in_exactly_one_form() {
        let (one, none) = (function(&[(0, 8)]), function(&[]));
        let mut value = 5u64;
        let each = [std::ptr::from_mut(&mut value).cast::<c_void>()];
        let (buffer, len) = ([0u8; 8], 8);
        let list = list(&buffer, &len);
        let both = Params { each: each.as_ptr(), extra: list.as_ptr() };
        let absent = Params { each: NONE, extra: NONE };
        assert_eq!(both.check(&one), Err(INVALID_VALUE));
        assert_eq!(absent.check(&one), Err(INVALID_VALUE));
        assert_eq!(written(absent, &none), Ok(Vec::new()));
        let unknown = [9 as *mut c_void];
        assert_eq!(Params { each: NONE, extra: unknown.as_ptr() }.check(&one), Err(INVALID_VALUE));
    }

    #[test]
    fn grid_has_blocks_in_each_dimension_within_the_limits() {
        let shape = |grid, block| Shape { grid, block, shared: 0 }.check();
        assert_eq!(shape([MAX_GRID_X, MAX_GRID_YZ, MAX_GRID_YZ], [1, 1, 1]), Ok(()));
        for grid in [[MAX_GRID_X + 1, 1, 1], [1, MAX_GRID_YZ + 1, 1], [1, 1, MAX_GRID_YZ + 1]] {
            assert_eq!(shape(grid, [1, 1, 1]), Err(INVALID_VALUE), "{grid:?}");
        }
        for dimension in 0..3 {
            let mut empty = [1; 3];
            empty[dimension] = 0;
            assert_eq!(shape(empty, [1; 3]), Err(INVALID_VALUE));
            assert_eq!(shape([1; 3], empty), Err(INVALID_VALUE));
        }
    }
}
