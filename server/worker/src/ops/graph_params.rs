//! Parameters of nodes, in the client's names of objects and memory.

use std::ffi::{CStr, c_void};
use std::mem::MaybeUninit;

use gpusession_proto::frame::{MAX_LONG_BODY, Reader};

use super::graph::{ACCESS, AllocNode, KernelNode, MEM_OP, MemOpsNode, POOL, function_in};
use super::launch::{PARAM_BUFFER, PARAM_SIZE};
use crate::answer::{Answer, Done, Failure};
use crate::driver::{Handle, Status, check, status};
use crate::host_calls::HostCalls;
use crate::objects::Func;
use crate::order::BOX;
use crate::session::Session;

/// Longest buffer of a kernel's parameters, in bytes.
const MAX_PARAMS: usize = 1 << 16;
/// Entries of an access list, and operations of a node, in one answer at most.
const MAX_ENTRIES: usize = MAX_LONG_BODY / 2 / MEM_OP;

/// Calls a getter of the driver, and returns the structure that it fills.
fn filled<T>(get: impl FnOnce(*mut c_void) -> Status) -> Result<T, Status> {
    let mut structure = MaybeUninit::<T>::zeroed();
    check(get(structure.as_mut_ptr().cast()))?;
    // SAFETY: the callers' structures have cuda.h's layout and are valid as zeros, so they are also
    // valid with what the driver has written.
    Ok(unsafe { structure.assume_init() })
}

/// `GRAPH_NODE_PARAMS`: node, type; answers the parameters of a node of that type.
pub fn read(session: &Session, r: &mut Reader<'_>, answer: &mut Answer) -> Done {
    let (node, kind) = (super::graph::read_node(session, r)?, r.word()?);
    let call = &session.driver.call;
    let mut real = 0;
    // SAFETY: the out pointer is valid; the node is known.
    check(unsafe { (session.driver.generated.cuGraphNodeGetType)(node as u64, &mut real) })?;
    if real as u64 != kind {
        return Err(status::INVALID_VALUE.into());
    }
    // SAFETY: in all calls below, the structure has the layout of cuda.h for the node's type.
    unsafe {
        match kind {
            0 => kernel(session, &filled(|p| (call.cuGraphKernelNodeGetParams_v2)(node, p))?, answer),
            1 => copy(session, filled(|p| (call.cuGraphMemcpyNodeGetParams)(node, p))?, answer),
            2 => {
                let words: [u64; 5] = filled(|p| (call.cuGraphMemsetNodeGetParams)(node, p))?;
                words.iter().for_each(|word| answer.word(*word));
                Ok(())
            }
            3 => {
                let words: [u64; 2] = filled(|p| (call.cuGraphHostNodeGetParams)(node, p))?;
                answer.word(HostCalls::of_node(words).ok_or(status::NOT_SUPPORTED)?);
                Ok(())
            }
            6 | 7 => {
                let event: Handle = filled(|p| match kind {
                    6 => (call.cuGraphEventWaitNodeGetEvent)(node, p.cast()),
                    _ => (call.cuGraphEventRecordNodeGetEvent)(node, p.cast()),
                })?;
                let known = session.events.handle_of(|object| object.0 == event);
                answer.word(known.ok_or(status::INVALID_VALUE)?);
                Ok(())
            }
            10 => {
                let node: AllocNode = filled(|p| (call.cuGraphMemAllocNodeGetParams)(node, p))?;
                answer.bytes(&node.pool.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<_>>()[..POOL]);
                answer.bytes(list(node.access, node.count, ACCESS)?);
                answer.word(node.size);
                answer.word(node.address);
                Ok(())
            }
            12 => {
                let node: MemOpsNode = filled(|p| (call.cuGraphBatchMemOpNodeGetParams)(node, p))?;
                answer.word(session.contexts.handle_of(node.ctx).unwrap_or(0));
                answer.word(u64::from(node.flags));
                answer.bytes(list(node.items.cast(), node.count as usize, MEM_OP)?);
                Ok(())
            }
            _ => Err(status::NOT_SUPPORTED.into()),
        }
    }
}

/// Returns the bytes of an array of the driver.
///
/// # Safety
/// The array has `count` entries of `size` bytes, or is null.
unsafe fn list<'a>(first: *const u8, count: usize, size: usize) -> Result<&'a [u8], Failure> {
    if first.is_null() {
        return Ok(&[]);
    }
    if count > MAX_ENTRIES {
        return Err(status::NOT_SUPPORTED.into());
    }
    // SAFETY: the caller vouches for the array.
    Ok(unsafe { std::slice::from_raw_parts(first, count * size) })
}

/// Returns the client's handle of a node's kernel, and the driver's kernel or function behind it.
fn kernel_of(session: &Session, node: &KernelNode) -> Result<(u64, Func), Status> {
    let known = |object: Handle, kernel: bool| {
        let same = |f: &Func| f.object.0 == object && f.kernel == kernel;
        if object.is_null() { None } else { session.funcs.handle_of(same) }
    };
    // Older drivers return a kernel in the function's place.
    let found =
        known(node.kernel, true).or_else(|| known(node.func, false)).or_else(|| known(node.func, true));
    // The launch of a kernel becomes a node with its function, which the client may not know.
    let found = found.or_else(|| session.funcs.handle_of(|f| f.kernel && is_function_of(session, node, f)));
    let handle = found.ok_or(status::NOT_SUPPORTED)?;
    Ok((handle, session.funcs.get(handle)?))
}

/// Returns `true` if a node's function is that of a kernel in the node's context.
fn is_function_of(session: &Session, node: &KernelNode, kernel: &Func) -> bool {
    let call = &session.driver.call;
    let (mut name, mut other) = (std::ptr::null(), std::ptr::null());
    let mut function = std::ptr::null_mut();
    // SAFETY: out pointers are valid, the objects are the driver's own, and names end in a zero.
    unsafe {
        // The names first: the question for the function may load the kernel's code.
        if node.func.is_null()
            || (call.cuFuncGetName)(&mut name, node.func) != 0
            || (call.cuKernelGetName)(&mut other, kernel.object.0) != 0
            || CStr::from_ptr(name) != CStr::from_ptr(other)
        {
            return false;
        }
        function_in(call, kernel.object.0, node.ctx, &mut function) == 0 && function == node.func
    }
}

/// Values of a kernel node's parameters, in either form of the driver.
enum Values {
    /// A pointer to each value.
    Each(*const *mut c_void),
    /// A buffer with all of them, and its length.
    Buffer(*const u8, usize),
}

impl Values {
    /// Finds the values of a node.
    ///
    /// # Safety
    /// The driver filled the structure: its lists have cuda.h's form.
    unsafe fn of(node: &KernelNode) -> Option<Self> {
        if !node.params.is_null() {
            return Some(Self::Each(node.params));
        }
        let (mut buffer, mut len) = (None, None);
        // The keys of `param_list`, then the end.
        for pair in 0..2 {
            // SAFETY: the caller vouches for the list, which ends in a null key.
            unsafe {
                let at = if node.extra.is_null() { break } else { node.extra.add(2 * pair) };
                match (at.read() as usize, at.add(1)) {
                    (PARAM_BUFFER, value) => buffer = Some(value.read().cast::<u8>()),
                    (PARAM_SIZE, value) => len = Some(value.read().cast::<usize>().read()),
                    _ => break,
                }
            }
        }
        Some(Self::Buffer(buffer?, len?))
    }

    /// Copies the value at an offset of the buffer; bytes beyond the end of a buffer are zeros.
    ///
    /// # Safety
    /// The node has a parameter with this index, of `into.len()` bytes.
    unsafe fn copy(&self, index: usize, offset: usize, into: &mut [u8]) {
        let (source, len) = match *self {
            // SAFETY: the caller vouches for the index.
            Self::Each(list) => (unsafe { list.add(index).read() }.cast::<u8>().cast_const(), into.len()),
            Self::Buffer(start, len) => {
                (start.wrapping_add(offset), len.saturating_sub(offset).min(into.len()))
            }
        };
        // SAFETY: the source is a value of the parameter's size, or the buffer's part of it.
        unsafe { std::ptr::copy_nonoverlapping(source, into.as_mut_ptr(), len) };
    }
}

fn kernel(session: &Session, node: &KernelNode, answer: &mut Answer) -> Done {
    let (handle, func) = kernel_of(session, node)?;
    answer.word(handle);
    for dimension in node.grid.iter().chain(&node.block).chain([&node.shared]) {
        answer.word(u64::from(*dimension));
    }
    // SAFETY: the driver filled the structure.
    let values = unsafe { Values::of(node) };
    let mut buffer = Vec::new();
    for index in 0.. {
        let call = &session.driver.call;
        let (mut offset, mut size) = (0, 0);
        // SAFETY: the out pointers are valid; the driver refuses an index past the end.
        let told = unsafe {
            if func.kernel {
                (call.cuKernelGetParamInfo)(func.object.0, index, &mut offset, &mut size)
            } else {
                (call.cuFuncGetParamInfo)(func.object.0, index, &mut offset, &mut size)
            }
        };
        let end = offset.saturating_add(size);
        if told != 0 {
            break;
        }
        let Some(values) = values.as_ref().filter(|_| end <= MAX_PARAMS) else {
            return Err(status::NOT_SUPPORTED.into());
        };
        if buffer.len() < end {
            buffer.resize(end, 0);
        }
        // SAFETY: the kernel has a parameter with this index, place and size.
        unsafe { values.copy(index, offset, &mut buffer[offset..end]) };
    }
    answer.bytes(&buffer);
    answer.word(session.contexts.handle_of(node.ctx).unwrap_or(0));
    Ok(())
}

/// Answers a copy's words, with offsets in place of host pointers, and the regions of both sides.
fn copy(session: &Session, mut words: [u64; BOX / 8], answer: &mut Answer) -> Done {
    const HOST: u32 = 1;
    let mut regions = [0; 2];
    for (side, region) in [0, 11].into_iter().zip(&mut regions) {
        if words[side + 4] as u32 == HOST {
            let found = session.mirrors.region(words[side + 5]);
            (*region, words[side + 5]) = found.ok_or(status::NOT_SUPPORTED)?;
        }
    }
    answer.bytes(&words.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<_>>());
    regions.iter().for_each(|region| answer.word(*region));
    Ok(())
}
