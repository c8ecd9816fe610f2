//! Parameters of nodes, as the driver knows them.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};

use gpusession_link::Reply;
use gpusession_proto::frame::{Reader, op};

use super::graph::child_of;
use super::graph_nodes::{AllocNode, HostNode, KernelNode, MemOpsNode, NodeParams, OldKernelNode, SetNode};
use crate::client::{Client, string, word};
use crate::cuboid::Cuboid;
use crate::entry::{INVALID_VALUE, NOT_SUPPORTED, Result, UNKNOWN, driver, give};
use crate::host_functions::{self, HostFunction};
use crate::{clients, events, functions, objects, regions, thread};

/// `CUgraphNodeType`
mod kind {
    pub const KERNEL: u64 = 0;
    pub const COPY: u64 = 1;
    pub const SET: u64 = 2;
    pub const HOST: u64 = 3;
    pub const CHILD: u64 = 4;
    pub const EMPTY: u64 = 5;
    pub const WAIT: u64 = 6;
    pub const RECORD: u64 = 7;
    pub const ALLOC: u64 = 10;
    pub const FREE: u64 = 11;
    pub const MEM_OPS: u64 = 12;
}

const POOL: usize = 88;
const POOL_LOCATION: usize = 8;
const ACCESS: usize = 12;
const MEM_OP: usize = 48;

/// Arrays of one answer.
type Arrays = Vec<Box<[u64]>>;

/// Arrays of answers, by node, each valid until the next question about the node.
static LENT: Mutex<Option<HashMap<u64, Arrays>>> = Mutex::new(None);

/// Keeps arrays of an answer for the program, and drops those of the last one.
fn lend(node: u64, arrays: Arrays) {
    LENT.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default().insert(node, arrays);
}

/// Copies bytes into words, for an array of structures.
fn words(bytes: &[u8]) -> Box<[u64]> {
    let word = |part: &[u8]| {
        let mut whole = [0; 8];
        whole[..part.len()].copy_from_slice(part);
        u64::from_le_bytes(whole)
    };
    bytes.chunks(8).map(word).collect()
}

/// Asks for the parameters of a node of one type.
fn ask(node: u64, kind: u64) -> Result<(&'static Client, Reply)> {
    let client = clients::by_object(node)?;
    if node == 0 {
        return Err(INVALID_VALUE);
    }
    let reply = client.call(op::GRAPH_NODE_PARAMS, |w| {
        w.word(client.own(node));
        w.word(kind);
    })?;
    Ok((client, reply))
}

fn half(r: &mut Reader<'_>) -> Result<u32> {
    Ok(word(r)? as u32)
}

fn kernel(node: u64) -> Result<KernelNode> {
    let (client, reply) = ask(node, kind::KERNEL)?;
    let mut r = reply.reader();
    let told = client.name(word(&mut r)?);
    // A kernel belongs to all clients, so its handle has the number 0.
    let function = functions::find(told).or_else(|_| functions::find(client.own(told)))?;
    let grid = [half(&mut r)?, half(&mut r)?, half(&mut r)?];
    let block = [half(&mut r)?, half(&mut r)?, half(&mut r)?];
    let shared = half(&mut r)?;
    let values = words(string(&mut r)?);
    let start = values.as_ptr() as u64;
    let inside = |p: &functions::Param| (p.offset + p.size) as usize <= values.len() * 8;
    if !function.params.iter().all(inside) {
        return Err(UNKNOWN);
    }
    let each: Box<[u64]> = function.params.iter().map(|p| start + u64::from(p.offset)).collect();
    // Older workers do not name the context.
    let ctx = r.word().ok().filter(|ctx| *ctx != 0).map_or(0, |ctx| client.name(ctx));
    let none = std::ptr::null_mut();
    let told = function.handle as *mut c_void;
    let (func, kernel) = match function.is_kernel() {
        false => (told, none),
        true if ctx == 0 => (none, told),
        // The node of a kernel names its function in that context, too.
        true => (thread::within(ctx, || functions::of_kernel(client, &function))? as *mut c_void, told),
    };
    let params = KernelNode {
        func,
        grid,
        block,
        shared,
        each: if each.is_empty() { std::ptr::null() } else { each.as_ptr().cast() },
        extra: std::ptr::null(),
        kernel,
        ctx: ctx as *mut c_void,
    };
    lend(node, vec![values, each]);
    Ok(params)
}

fn copy(node: u64) -> Result<Cuboid> {
    let (client, reply) = ask(node, kind::COPY)?;
    let mut r = reply.reader();
    let words = words(string(&mut r)?);
    let ids = [word(&mut r)?, word(&mut r)?];
    let words = words.first_chunk().ok_or(UNKNOWN)?;
    Cuboid::from_words(client, words, |side, offset| {
        regions::address(client, ids[side], offset).ok_or(NOT_SUPPORTED)
    })
}

fn set(node: u64) -> Result<SetNode> {
    let (_, reply) = ask(node, kind::SET)?;
    let mut r = reply.reader();
    let (address, pitch, packed) = (word(&mut r)?, word(&mut r)? as usize, word(&mut r)?);
    let (width, height) = (word(&mut r)? as usize, word(&mut r)? as usize);
    Ok(SetNode { address, pitch, value: packed as u32, element: (packed >> 32) as u32, width, height })
}

fn host(node: u64) -> Result<HostNode> {
    let (_, reply) = ask(node, kind::HOST)?;
    match host_functions::of_graph(word(&mut reply.reader())?) {
        Some(HostFunction::Plain(function, data)) => {
            Ok(HostNode { function: Some(function), data: data as *mut c_void })
        }
        _ => Err(NOT_SUPPORTED),
    }
}

fn event(node: u64, kind: u64) -> Result<*mut c_void> {
    let (client, reply) = ask(node, kind)?;
    let event = client.name(word(&mut reply.reader())?);
    Ok(events::find(event)?.handle as *mut c_void)
}

fn alloc(node: u64) -> Result<AllocNode> {
    let (client, reply) = ask(node, kind::ALLOC)?;
    let mut r = reply.reader();
    let pool = objects::told_location(client, string(&mut r)?, POOL_LOCATION)?;
    let mut access = string(&mut r)?.to_vec();
    for one in access.chunks_exact_mut(ACCESS) {
        let told = objects::told_location(client, one, 0)?;
        one.copy_from_slice(&told);
    }
    let (size, address) = (word(&mut r)? as usize, word(&mut r)?);
    let count = access.len() / ACCESS;
    let access = words(&access);
    let pool: [u8; POOL] = pool.try_into().map_err(|_| UNKNOWN)?;
    let first = if count == 0 { std::ptr::null() } else { access.as_ptr().cast() };
    lend(node, vec![access]);
    Ok(AllocNode { pool, access: first, count, size, address })
}

fn mem_ops(node: u64) -> Result<MemOpsNode> {
    let (client, reply) = ask(node, kind::MEM_OPS)?;
    let mut r = reply.reader();
    let (ctx, flags, items) = (word(&mut r)?, half(&mut r)?, words(string(&mut r)?));
    let ctx = if ctx == 0 { 0 } else { client.name(ctx) };
    let (count, first) = ((items.len() * 8 / MEM_OP) as u32, items.as_ptr().cast());
    lend(node, vec![items]);
    Ok(MemOpsNode { ctx: ctx as *mut c_void, count, items: first, flags })
}

/// Fills the structure for all types.
fn any(node: u64) -> Result<NodeParams> {
    let client = clients::by_object(node)?;
    let reply = client.call(op::cuGraphNodeGetType, |w| w.word(client.own(node)))?;
    let told = word(&mut reply.reader())?;
    let mut params = NodeParams { kind: told as i32, reserved: [0; 3], body: [0; 29], reserved_too: 0 };
    let body = params.body.as_mut_ptr();
    match told {
        kind::KERNEL => give(body.cast(), kernel(node)?)?,
        // Flags and the context come first.
        kind::COPY => give(params.body[2..].as_mut_ptr().cast(), copy(node)?)?,
        kind::SET => give(body.cast(), set(node)?)?,
        kind::HOST => give(body.cast(), host(node)?)?,
        kind::CHILD => give(body, child_of(node)?)?,
        kind::EMPTY => {}
        kind::WAIT | kind::RECORD => give(body.cast(), event(node, told)?)?,
        kind::ALLOC => give(body.cast(), alloc(node)?)?,
        kind::FREE => {
            let reply = client.call(op::cuGraphMemFreeNodeGetParams, |w| w.word(client.own(node)))?;
            give(body, word(&mut reply.reader())?)?;
        }
        kind::MEM_OPS => give(body.cast(), mem_ops(node)?)?,
        _ => return Err(NOT_SUPPORTED),
    }
    Ok(params)
}

driver! {
    fn cuGraphKernelNodeGetParams_v2(node: u64, params: *mut KernelNode) {
        give(params, kernel(node)?)
    }

    fn cuGraphKernelNodeGetParams(node: u64, params: *mut OldKernelNode) {
        let KernelNode { func, grid, block, shared, each, extra, kernel, .. } = kernel(node)?;
        let func = if func.is_null() { kernel } else { func };
        give(params, OldKernelNode { func, grid, block, shared, each, extra })
    }

    fn cuGraphMemcpyNodeGetParams(node: u64, params: *mut Cuboid) {
        give(params, copy(node)?)
    }

    fn cuGraphMemsetNodeGetParams(node: u64, params: *mut SetNode) {
        give(params, set(node)?)
    }

    fn cuGraphHostNodeGetParams(node: u64, params: *mut HostNode) {
        give(params, host(node)?)
    }

    fn cuGraphEventRecordNodeGetEvent(node: u64, found: *mut *mut c_void) {
        give(found, event(node, kind::RECORD)?)
    }

    fn cuGraphEventWaitNodeGetEvent(node: u64, found: *mut *mut c_void) {
        give(found, event(node, kind::WAIT)?)
    }

    fn cuGraphMemAllocNodeGetParams(node: u64, params: *mut AllocNode) {
        give(params, alloc(node)?)
    }

    fn cuGraphBatchMemOpNodeGetParams(node: u64, params: *mut MemOpsNode) {
        give(params, mem_ops(node)?)
    }

    fn cuGraphNodeGetParams(node: u64, params: *mut NodeParams) {
        give(params, any(node)?)
    }
}
