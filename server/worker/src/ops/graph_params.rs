//! Parameters of nodes, in the client's names of objects and memory.

use std::mem::MaybeUninit;

use gpusession_proto::frame::{MAX_BODY, Reader};

use super::graph::{ACCESS, AllocNode, KernelNode, MEM_OP, MemOpsNode, POOL};
use crate::answer::{Answer, Done, Failure};
use crate::driver::{Handle, Status, check, status};
use crate::host_calls::HostCalls;
use crate::order::BOX;
use crate::session::Session;

/// Longest buffer of a kernel's parameters, in bytes.
const MAX_PARAMS: usize = 1 << 16;
/// Entries of an access list, and operations of a node, in one answer at most.
const MAX_ENTRIES: usize = MAX_BODY / 2 / MEM_OP;

/// Calls a getter of the driver, and returns the structure that it fills.
fn filled<T>(get: impl FnOnce(*mut std::ffi::c_void) -> Status) -> Result<T, Status> {
    let mut structure = MaybeUninit::<T>::zeroed();
    check(get(structure.as_mut_ptr().cast()))?;
    // SAFETY: the callers' structures have cuda.h's layout and are valid as zeros, so they are also
    // valid with what the driver has written.
    Ok(unsafe { structure.assume_init() })
}

/// `GRAPH_NODE_PARAMS`: node, type; answers the parameters of a node of that type.
pub fn read(session: &Session, r: &mut Reader<'_>, answer: &mut Answer) -> Done {
    let (node, kind) = (r.word()? as Handle, r.word()?);
    let call = &session.driver.call;
    let mut real = 0;
    // SAFETY: the out pointer is valid; the node is a value that the driver returned.
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

fn kernel(session: &Session, node: &KernelNode, answer: &mut Answer) -> Done {
    let (func, is_kernel) = if node.func.is_null() { (node.kernel, true) } else { (node.func, false) };
    let known = session.funcs.handle_of(|f| f.object.0 == func && f.kernel == is_kernel);
    // Older drivers return a kernel in the function's place.
    let known = known.or_else(|| session.funcs.handle_of(|f| f.object.0 == func));
    let handle = known.ok_or(status::NOT_SUPPORTED)?;
    let kernel = session.funcs.get(handle)?.kernel;
    answer.word(handle);
    for dimension in node.grid.iter().chain(&node.block).chain([&node.shared]) {
        answer.word(u64::from(*dimension));
    }
    let mut buffer = Vec::new();
    for index in 0.. {
        let call = &session.driver.call;
        let (mut offset, mut size) = (0, 0);
        // SAFETY: the out pointers are valid; the driver refuses an index past the end.
        let told = unsafe {
            if kernel {
                (call.cuKernelGetParamInfo)(func, index, &mut offset, &mut size)
            } else {
                (call.cuFuncGetParamInfo)(func, index, &mut offset, &mut size)
            }
        };
        let end = offset.saturating_add(size);
        if told != 0 {
            break;
        }
        if node.params.is_null() || end > MAX_PARAMS {
            return Err(status::NOT_SUPPORTED.into());
        }
        if buffer.len() < end {
            buffer.resize(end, 0);
        }
        // SAFETY: the driver's array has a pointer for each parameter of the kernel, to as many
        // bytes as the layout says; the buffer reaches up to `end`.
        unsafe {
            let source = node.params.add(index).read().cast::<u8>();
            std::ptr::copy_nonoverlapping(source, buffer.as_mut_ptr().add(offset), size);
        }
    }
    answer.bytes(&buffer);
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
