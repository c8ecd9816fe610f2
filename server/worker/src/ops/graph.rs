//! Graphs.
//!
//! Nodes are the driver's own values; graphs and executable graphs have the client's handles.

use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard, PoisonError};

use gpusession_proto::child_graphs::ChildGraphs;
use gpusession_proto::frame::Reader;

use crate::answer::{Answer, Done, Failure};
use crate::driver::{Called, Handle, Status, check, status};
use crate::handles::Object;
use crate::host_calls::HostCalls;
use crate::objects::known::{Kind, Owner};
use crate::session::Session;

/// `CUDA_KERNEL_NODE_PARAMS_v2`
#[repr(C)]
pub struct KernelNode {
    pub func: Handle,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared: u32,
    pub params: *const *mut std::ffi::c_void,
    pub extra: *const *mut std::ffi::c_void,
    pub kernel: Handle,
    pub ctx: Handle,
}

/// `CUgraphNodeParams`: a type and the parameters of a node of that type.
#[repr(C)]
struct NodeParams {
    kind: u32,
    reserved: [u32; 3],
    body: [u64; 29],
    reserved_too: u64,
}

const _: () = assert!(size_of::<NodeParams>() == 256);

impl NodeParams {
    /// Creates the structure; a kernel's parameters must be in the form that the driver takes.
    fn new(session: &Arc<Session>, params: &Params) -> Self {
        let mut body = [0; 29];
        let mut put = |words: &[u64]| body[..words.len()].copy_from_slice(words);
        let kind = match params {
            Params::Kernel { node, .. } => {
                let word = |dimensions: [u32; 2]| u64::from(dimensions[0]) | u64::from(dimensions[1]) << 32;
                let [x, y, z] = node.grid;
                let [a, b, c] = node.block;
                put(&[
                    node.func as u64,
                    word([x, y]),
                    word([z, a]),
                    word([b, c]),
                    u64::from(node.shared),
                    node.params as u64,
                    node.extra as u64,
                    node.kernel as u64,
                    node.ctx as u64,
                ]);
                0
            }
            // Flags and reserved, the context, then the copy.
            Params::Copy { words, ctx } => {
                put(&[&[0, *ctx as u64], words.as_slice()].concat());
                1
            }
            Params::Set { words, ctx } => {
                put(&[words.as_slice(), &[*ctx as u64]].concat());
                2
            }
            Params::Host(id) => {
                put(&HostCalls::node(session, *id).words());
                3
            }
            // CU_GRAPH_CHILD_GRAPH_OWNERSHIP_CLONE and _MOVE
            Params::Child(graph) => {
                put(&[*graph as u64, 0]);
                4
            }
            Params::MovedChild { graph, .. } => {
                put(&[*graph as u64, 1]);
                4
            }
            Params::Empty => 5,
            Params::Wait(event) => {
                put(&[*event as u64]);
                6
            }
            Params::Record(event) => {
                put(&[*event as u64]);
                7
            }
            Params::Alloc { pool, access, size } => {
                let access = [access.as_ptr() as u64, (access.len() / ACCESS) as u64];
                put(&[pool.as_slice(), &access, &[*size]].concat());
                10
            }
            Params::Free(address) => {
                put(&[*address]);
                11
            }
            Params::MemOps { ctx, flags, items } => {
                let count = (items.len() / MEM_OP_WORDS) as u64;
                put(&[*ctx as u64, count, items.as_ptr() as u64, u64::from(*flags)]);
                12
            }
            Params::Condition { condition, kind, ctx, bodies } => {
                let size = (bodies.len() as u64) << 32;
                put(&[*condition, u64::from(*kind) | size, 0, *ctx as u64]);
                13
            }
        };
        Self { kind, reserved: [0; 3], body, reserved_too: 0 }
    }
}

/// Reads known nodes from a byte string of words.
pub fn read_nodes(session: &Session, bytes: &[u8]) -> Result<Vec<Handle>, Failure> {
    if !bytes.len().is_multiple_of(8) {
        return Err(status::INVALID_VALUE.into());
    }
    let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().unwrap_or_default());
    let words = bytes.chunks_exact(8).map(word);
    session.known.check_all(Kind::Node, words.clone())?;
    Ok(words.map(|word| word as Handle).collect())
}

/// Reads a known node.
pub fn read_node(session: &Session, r: &mut Reader<'_>) -> Result<Handle, Failure> {
    let node = r.word()?;
    session.known.check(Kind::Node, node)?;
    Ok(node as Handle)
}

/// In place of the whole array: the node may be in a graph inside its owner.
const UNSURE: u64 = 1;

/// Notes a node of a graph that the driver returned.
pub fn note(session: &Session, graph: Handle, node: Handle) {
    session.known.note(Kind::Node, node as u64, Owner { of: graph as u64, whole: 0 });
}

/// Notes a node that an error about a graph names, unless it is known.
fn note_named(session: &Session, graph: Handle, node: Handle) {
    session.known.note_new(Kind::Node, node as u64, Owner { of: graph as u64, whole: UNSURE });
}

/// `GRAPH_CREATE`: new handle, flags.
pub fn create(session: &Session, r: &mut Reader<'_>) -> Done {
    let (handle, flags) = (r.word()?, r.word()? as u32);
    let mut graph = std::ptr::null_mut();
    // SAFETY: the out pointer is valid.
    check(unsafe { (session.driver.call.cuGraphCreate)(&mut graph, flags) })?;
    Ok(session.graphs.put(handle, Object(graph))?)
}

fn child_graphs(session: &Session) -> MutexGuard<'_, ChildGraphs> {
    session.child_graphs.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `GRAPH_CHILD`: new handle, graph, node of it; the handle stands for the node's own graph.
pub fn child(session: &Session, r: &mut Reader<'_>) -> Done {
    let (handle, parent, node) = (r.word()?, r.word()?, r.word()?);
    // Else the handle would outlive the graph, or end before it.
    let owner = session.known.owner(Kind::Node, node)?;
    if owner.of != session.graphs.get(parent)?.0 as u64 || owner.whole == UNSURE {
        return Err(status::INVALID_VALUE.into());
    }
    let mut known = child_graphs(session);
    if known.of_node(node).is_some() {
        return Err(status::INVALID_VALUE.into());
    }
    let mut graph = std::ptr::null_mut();
    // SAFETY: the out pointer is valid; the node is a value that the driver returned.
    check(unsafe { (session.driver.call.cuGraphChildGraphNodeGetGraph)(node as Handle, &mut graph) })?;
    session.graphs.put(handle, Object(graph))?;
    known.insert(handle, parent, node);
    Ok(())
}

/// Forgets the graphs inside a node that was destroyed.
pub fn node_destroyed(session: &Session, node: u64) {
    forget(session, child_graphs(session).destroy_node(node));
}

/// Forgets graphs that were destroyed with the graph around them: no later frame can name them.
fn forget(session: &Session, graphs: Vec<u64>) {
    for graph in graphs {
        if let Ok(Object(graph)) = session.graphs.take(graph) {
            session.known.graph_gone(graph as u64);
        }
    }
}

/// `GRAPH_DESTROY`
pub fn destroy(session: &Session, r: &mut Reader<'_>) -> Done {
    let handle = r.word()?;
    if child_graphs(session).is_embedded(handle) {
        return Err(status::INVALID_VALUE.into());
    }
    let graph = session.graphs.take(handle)?.0;
    forget(session, child_graphs(session).destroy_graph(handle));
    session.known.graph_gone(graph as u64);
    // SAFETY: a graph of this worker that no later frame can name.
    Ok(check(unsafe { (session.driver.call.cuGraphDestroy)(graph) })?)
}

/// `CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD`: the client uploads by a frame of its own.
const UPLOAD: u64 = 2;

/// Longest text about an instantiation, in bytes.
const MAX_LOG: u64 = 64 << 10;
/// Byte that no text contains.
const NO_TEXT: u8 = 0xff;

/// Instantiates a graph and lets the driver write text about it; returns the bytes that it wrote.
fn instantiate_with_log(
    session: &Session,
    graph: Handle,
    room: u64,
    exec: &mut Handle,
    node: &mut u64,
) -> (Result<(), Status>, Vec<u8>) {
    let mut log = vec![NO_TEXT; room.min(MAX_LOG) as usize];
    // SAFETY: out pointers are valid, and the buffer has the stated length.
    let made = check(unsafe {
        (session.driver.call.cuGraphInstantiate_v2)(
            exec,
            graph,
            (&raw mut *node).cast::<Handle>(),
            log.as_mut_ptr().cast(),
            log.len(),
        )
    });
    // With the terminator, and empty if the driver has left the buffer as it was.
    let written = log.iter().position(|byte| *byte == NO_TEXT).unwrap_or(log.len());
    let text = log[..written].iter().position(|byte| *byte == 0).map_or(written, |end| end + 1);
    log.truncate(text);
    (made, log)
}

/// `GRAPH_INSTANTIATE`: new handle, graph, flags, length of a buffer for text if any; answers the
/// result, the node of an error or 0, and the text for a buffer.
pub fn instantiate(session: &Session, r: &mut Reader<'_>, answer: &mut Answer) -> Done {
    let (handle, graph, flags) = (r.word()?, session.graphs.get(r.word()?)?.0, r.word()?);
    let mut exec = std::ptr::null_mut();
    if !r.is_empty() {
        const ERROR: u64 = 1;
        let mut node = 0;
        let (made, text) = instantiate_with_log(session, graph, r.word()?, &mut exec, &mut node);
        answer.word(if made.is_ok() { 0 } else { ERROR });
        answer.word(node);
        answer.bytes(&text);
        made?;
        return Ok(session.execs.put(handle, Object(exec))?);
    }
    // CUDA_GRAPH_INSTANTIATE_PARAMS: flags, stream of an upload, node, result.
    let mut params = [flags & !UPLOAD, 0, 0, 0];
    let call = &session.driver.call;
    // SAFETY: the out pointer is valid, and the structure has cuda.h's size.
    let made =
        check(unsafe { (call.cuGraphInstantiateWithParams)(&mut exec, graph, params.as_mut_ptr().cast()) });
    let [.., node, result] = params;
    note_named(session, graph, node as Handle);
    answer.word(u64::from(result as u32));
    answer.word(node);
    made?;
    Ok(session.execs.put(handle, Object(exec))?)
}

/// `GRAPH_EXEC_DESTROY`
pub fn exec_destroy(session: &Session, r: &mut Reader<'_>) -> Done {
    let exec = session.execs.take(r.word()?)?.0;
    // SAFETY: an executable graph of this worker that no later frame can name.
    Ok(check(unsafe { (session.driver.call.cuGraphExecDestroy)(exec) })?)
}

/// `GRAPH_LAUNCH`: executable graph, stream.
pub fn launch(session: &Session, r: &mut Reader<'_>) -> Done {
    let (exec, stream) = (session.execs.get(r.word()?)?.0, session.stream(r.word()?)?);
    // SAFETY: both belong to this worker.
    Ok(check(unsafe { (session.driver.call.cuGraphLaunch)(exec, stream) })?)
}

/// Parameters of a node, read from a frame.
enum Params {
    /// With whether the function is a kernel of a library.
    Kernel {
        node: Box<KernelNode>,
        bytes: Vec<u8>,
        of_library: bool,
    },
    Copy {
        words: Vec<u64>,
        ctx: Handle,
    },
    Set {
        words: Vec<u64>,
        ctx: Handle,
    },
    Empty,
    Record(Handle),
    Wait(Handle),
    Child(Handle),
    MovedChild {
        graph: Handle,
        handle: u64,
    },
    Host(u64),
    MemOps {
        ctx: Handle,
        flags: u32,
        items: Vec<u64>,
    },
    Alloc {
        pool: Vec<u64>,
        access: Vec<u8>,
        size: u64,
    },
    Free(u64),
    Condition {
        condition: u64,
        kind: u32,
        ctx: Handle,
        bodies: Vec<u64>,
    },
}

/// Bytes of a `CUmemPoolProps`, of a `CUmemAccessDesc`, of a `CUstreamBatchMemOpParams`.
pub const POOL: usize = 88;
pub const ACCESS: usize = 12;
pub const MEM_OP: usize = 48;
/// Words of a `CUstreamBatchMemOpParams`.
const MEM_OP_WORDS: usize = MEM_OP / 8;
/// Graphs of one conditional node at most.
const MAX_BODIES: usize = 4096;
/// `CU_MEM_LOCATION_TYPE_DEVICE`
const LOCATION_DEVICE: u32 = 1;

impl Params {
    fn read(session: &Arc<Session>, kind: u64, r: &mut Reader<'_>) -> Result<Self, Failure> {
        let words = |bytes: &[u8]| -> Vec<u64> {
            bytes.chunks_exact(8).map(|w| u64::from_le_bytes(w.try_into().unwrap_or_default())).collect()
        };
        let exact = |bytes: &[u8], len: usize| -> Result<Vec<u64>, Failure> {
            if bytes.len() == len { Ok(words(bytes)) } else { Err(status::INVALID_VALUE.into()) }
        };
        Ok(match kind {
            0 => {
                let func = session.funcs.get(r.word()?)?;
                let mut d = [0u32; 7];
                for dimension in &mut d {
                    *dimension = r.word()? as u32;
                }
                let node = Box::new(KernelNode {
                    func: func.object.0,
                    grid: [d[0], d[1], d[2]],
                    block: [d[3], d[4], d[5]],
                    shared: d[6],
                    params: std::ptr::null(),
                    extra: std::ptr::null(),
                    kernel: std::ptr::null_mut(),
                    ctx: std::ptr::null_mut(),
                });
                Self::Kernel { node, bytes: r.bytes()?.to_vec(), of_library: func.kernel }
            }
            1 => {
                let (description, ctx, regions) = (r.bytes()?, r.word()?, [r.word()?, r.word()?]);
                let words = super::boxes::mirrored(session, description, regions)?.to_vec();
                Self::Copy { words, ctx: session.contexts.get(ctx)?.0 }
            }
            2 => Self::Set { words: exact(r.bytes()?, 40)?, ctx: session.contexts.get(r.word()?)?.0 },
            3 => Self::Empty,
            4 => Self::Record(session.events.get(r.word()?)?.0),
            5 => Self::Wait(session.events.get(r.word()?)?.0),
            6 => Self::Child(session.graphs.get(r.word()?)?.0),
            7 => Self::Host(r.word()?),
            8 => {
                let handle = r.word()?;
                Self::MovedChild { graph: session.graphs.get(handle)?.0, handle }
            }
            9 => {
                let (ctx, flags, items) = (session.contexts.get(r.word()?)?.0, r.word()? as u32, r.bytes()?);
                if !items.len().is_multiple_of(MEM_OP) {
                    return Err(status::INVALID_VALUE.into());
                }
                Self::MemOps { ctx, flags, items: words(items) }
            }
            10 => {
                let (mut pool, access, size) = (exact(r.bytes()?, POOL)?, r.bytes()?, r.word()?);
                if !access.len().is_multiple_of(ACCESS) {
                    return Err(status::INVALID_VALUE.into());
                }
                let location = pool[1];
                if location as u32 != LOCATION_DEVICE {
                    // Memory of this host, which clients cannot have.
                    return Err(status::NOT_SUPPORTED.into());
                }
                let ordinal = session.contexts.device(location >> 32)?;
                pool[1] = u64::from(LOCATION_DEVICE) | (ordinal as u64) << 32;
                let mut access = access.to_vec();
                for id in access.chunks_exact_mut(ACCESS).filter_map(|a| a.get_mut(4..8)?.first_chunk_mut()) {
                    let device = u64::from(u32::from_le_bytes(*id));
                    *id = session.contexts.device(device)?.to_le_bytes();
                }
                session.allocations.pooling.store(true, Ordering::Relaxed);
                Self::Alloc { pool, access, size }
            }
            11 => Self::Free(r.word()?),
            12 => {
                let (condition, kind) = (r.word()?, r.word()? as u32);
                session.known.check(Kind::Condition, condition)?;
                let ctx = session.contexts.get(r.word()?)?.0;
                let bodies = words(r.bytes()?);
                if bodies.is_empty() || bodies.len() > MAX_BODIES {
                    return Err(status::INVALID_VALUE.into());
                }
                Self::Condition { condition, kind, ctx, bodies }
            }
            _ => return Err(status::NOT_SUPPORTED.into()),
        })
    }
}

impl Params {
    /// Reads the context of a library's kernel, if the frame names one; 0 and none are the frame's
    /// own.
    fn read_context(&mut self, session: &Session, r: &mut Reader<'_>) -> Done {
        let ctx = if r.is_empty() { 0 } else { r.word()? };
        if let Self::Kernel { node, of_library: true, .. } = self
            && ctx != 0
        {
            node.ctx = session.contexts.get(ctx)?.0;
            node.kernel = std::mem::replace(&mut node.func, std::ptr::null_mut());
        }
        Ok(())
    }
}

/// `CUDA_MEM_ALLOC_NODE_PARAMS`
#[repr(C)]
pub struct AllocNode {
    pub pool: [u64; POOL / 8],
    pub access: *const u8,
    pub count: usize,
    pub size: u64,
    pub address: u64,
}

/// `CUDA_BATCH_MEM_OP_NODE_PARAMS`
#[repr(C)]
pub struct MemOpsNode {
    pub ctx: Handle,
    pub count: u32,
    pub items: *const u64,
    pub flags: u32,
}

impl MemOpsNode {
    fn new(ctx: Handle, items: &[u64], flags: u32) -> Self {
        Self { ctx, count: (items.len() / MEM_OP_WORDS) as u32, items: items.as_ptr(), flags }
    }
}

/// Calls `run` with a kernel node's parameters in the form that the driver takes.
fn with_kernel(
    node: &mut KernelNode,
    bytes: &[u8],
    run: impl FnOnce(*const std::ffi::c_void) -> Status,
) -> Status {
    let mut size = bytes.len();
    let extra = super::launch::param_list(bytes, &mut size);
    node.extra = if bytes.is_empty() { std::ptr::null() } else { extra.as_ptr() };
    run((&raw const *node).cast())
}

/// Finds the function of a kernel in a context; null is the current one.
///
/// # Safety
/// Both belong to the driver.
pub unsafe fn function_in(call: &Called, kernel: Handle, ctx: Handle, function: &mut Handle) -> Status {
    // SAFETY: the caller vouches for the handles, out pointers are valid, and a context that was
    // pushed is popped.
    unsafe {
        if !ctx.is_null()
            && let error @ 1.. = (call.cuCtxPushCurrent_v2)(ctx)
        {
            return error;
        }
        let found = (call.cuKernelGetFunction)(function, kernel);
        if !ctx.is_null() {
            let mut left = std::ptr::null_mut();
            (call.cuCtxPopCurrent_v2)(&mut left);
        }
        found
    }
}

/// `GRAPH_ADD`: graph, dependencies, kind, parameters, edge data if any, a kernel's context if any;
/// answers the node.
pub fn add(session: &Arc<Session>, r: &mut Reader<'_>, answer: &mut Answer) -> Done {
    let parent = r.word()?;
    let graph = session.graphs.get(parent)?.0;
    let after = read_nodes(session, r.bytes()?)?;
    let kind = r.word()?;
    let mut params = Params::read(session, kind, r)?;
    let edges = if r.is_empty() { &[] } else { r.bytes()? };
    params.read_context(session, r)?;
    if !edges.is_empty() && edges.len() != after.len() * 8 {
        return Err(status::INVALID_VALUE.into());
    }
    if !edges.is_empty() || matches!(params, Params::MovedChild { .. } | Params::Condition { .. }) {
        return add_by_structure(session, (parent, graph), &after, edges, params, answer);
    }
    let call = &session.driver.call;
    let mut node = std::ptr::null_mut();
    let (deps, count) = (after.as_ptr(), after.len());
    let mut address = None;
    // SAFETY: the out pointer is valid, `count` is the number of dependencies, and structures have
    // cuda.h's layout.
    check(unsafe {
        match params {
            Params::Kernel { node: mut kernel, bytes, .. } => with_kernel(&mut kernel, &bytes, |p| {
                (call.cuGraphAddKernelNode_v2)(&mut node, graph, deps, count, p)
            }),
            Params::Copy { words, ctx } => {
                (call.cuGraphAddMemcpyNode)(&mut node, graph, deps, count, words.as_ptr().cast(), ctx)
            }
            Params::Set { words, ctx } => {
                (call.cuGraphAddMemsetNode)(&mut node, graph, deps, count, words.as_ptr().cast(), ctx)
            }
            Params::Empty => (call.cuGraphAddEmptyNode)(&mut node, graph, deps, count),
            Params::Record(event) => (call.cuGraphAddEventRecordNode)(&mut node, graph, deps, count, event),
            Params::Wait(event) => (call.cuGraphAddEventWaitNode)(&mut node, graph, deps, count, event),
            Params::Host(id) => {
                let host = HostCalls::node(session, id);
                (call.cuGraphAddHostNode)(&mut node, graph, deps, count, (&raw const host).cast())
            }
            Params::Child(child) => (call.cuGraphAddChildGraphNode)(&mut node, graph, deps, count, child),
            Params::MemOps { ctx, flags, items } => {
                let params = MemOpsNode::new(ctx, &items, flags);
                (call.cuGraphAddBatchMemOpNode)(&mut node, graph, deps, count, (&raw const params).cast())
            }
            Params::Alloc { pool, access, size } => {
                let mut params = AllocNode {
                    pool: pool.try_into().unwrap_or_default(),
                    access: access.as_ptr(),
                    count: access.len() / ACCESS,
                    size,
                    address: 0,
                };
                let made =
                    (call.cuGraphAddMemAllocNode)(&mut node, graph, deps, count, (&raw mut params).cast());
                address = Some(params.address);
                made
            }
            Params::Free(address) => (call.cuGraphAddMemFreeNode)(&mut node, graph, deps, count, address),
            Params::MovedChild { .. } | Params::Condition { .. } => status::INVALID_VALUE,
        }
    })?;
    note(session, graph, node);
    answer.word(node as u64);
    if let Some(address) = address {
        answer.word(address);
    }
    Ok(())
}

/// Adds a node by the structure for all types.
///
/// It serves edges that carry data, and a child graph that moves into its node.
fn add_by_structure(
    session: &Arc<Session>,
    (parent, graph): (u64, Handle),
    after: &[Handle],
    edges: &[u8],
    mut params: Params,
    answer: &mut Answer,
) -> Done {
    let mut known = child_graphs(session);
    let moved = match params {
        Params::MovedChild { handle, .. } => Some(handle),
        _ => None,
    };
    // A graph inside itself, at any depth, would be a circle.
    if moved.is_some_and(|m| known.is_embedded(m) || m == parent || known.below(m).contains(&parent)) {
        return Err(status::INVALID_VALUE.into());
    }
    let mut node = std::ptr::null_mut();
    let mut told = [0; 29];
    let mut add = |params: &Params| {
        let mut structure = NodeParams::new(session, params);
        let edges = if edges.is_empty() { std::ptr::null() } else { edges.as_ptr().cast() };
        // SAFETY: the out pointer is valid, `after` and, if not null, `edges` have `after.len()`
        // elements, and the structure has cuda.h's layout.
        let added = unsafe {
            (session.driver.call.cuGraphAddNode_v2)(
                &mut node,
                graph,
                after.as_ptr(),
                edges,
                after.len(),
                (&raw mut structure).cast(),
            )
        };
        told = structure.body;
        added
    };
    let added = match &mut params {
        Params::Kernel { node: kernel, bytes, .. } => {
            let mut size = bytes.len();
            let extra = super::launch::param_list(bytes, &mut size);
            kernel.extra = if bytes.is_empty() { std::ptr::null() } else { extra.as_ptr() };
            add(&params)
        }
        _ => add(&params),
    };
    check(added)?;
    if let Some(handle) = moved {
        known.insert(handle, parent, node as u64);
    }
    note(session, graph, node);
    answer.word(node as u64);
    match params {
        Params::Alloc { .. } => answer.word(told[14]),
        Params::Condition { bodies, .. } => {
            let graphs = told[2] as *const Handle;
            if graphs.is_null() {
                return Err(status::NOT_SUPPORTED.into());
            }
            for (i, handle) in bodies.into_iter().enumerate() {
                // SAFETY: the driver's array has a graph for each body, and lives as long as the
                // node.
                session.graphs.put(handle, Object(unsafe { *graphs.add(i) }))?;
                known.insert(handle, parent, node as u64);
            }
        }
        _ => {}
    }
    Ok(())
}

/// `GRAPH_EXEC_SET`: executable graph or 0 (the node itself), node, kind, parameters, a kernel's
/// context if any.
pub fn set_params(session: &Arc<Session>, r: &mut Reader<'_>) -> Done {
    let exec = match r.word()? {
        0 => None,
        handle => Some(session.execs.get(handle)?.0),
    };
    let node = read_node(session, r)?;
    let kind = r.word()?;
    let mut params = Params::read(session, kind, r)?;
    params.read_context(session, r)?;
    let call = &session.driver.call;
    // SAFETY: structures have cuda.h's layout; the node is a value that the driver returned.
    Ok(check(unsafe {
        match (params, exec) {
            (Params::Kernel { node: mut kernel, bytes, of_library }, exec) => {
                let set = |kernel: &mut KernelNode| {
                    with_kernel(kernel, &bytes, |p| match exec {
                        Some(exec) => (call.cuGraphExecKernelNodeSetParams_v2)(exec, node, p),
                        None => (call.cuGraphKernelNodeSetParams_v2)(node, p),
                    })
                };
                match set(&mut kernel) {
                    // A node from the launch of a kernel has the context's function, which only
                    // the function itself replaces.
                    status::INVALID_HANDLE if of_library => {
                        let of = if kernel.kernel.is_null() { kernel.func } else { kernel.kernel };
                        let found = function_in(call, of, kernel.ctx, &mut kernel.func);
                        (kernel.kernel, kernel.ctx) = (std::ptr::null_mut(), std::ptr::null_mut());
                        if found == 0 { set(&mut kernel) } else { found }
                    }
                    done => done,
                }
            }
            (Params::Copy { words, ctx }, Some(exec)) => {
                (call.cuGraphExecMemcpyNodeSetParams)(exec, node, words.as_ptr().cast(), ctx)
            }
            (Params::Copy { words, .. }, None) => {
                (call.cuGraphMemcpyNodeSetParams)(node, words.as_ptr().cast())
            }
            (Params::Set { words, ctx }, Some(exec)) => {
                (call.cuGraphExecMemsetNodeSetParams)(exec, node, words.as_ptr().cast(), ctx)
            }
            (Params::Set { words, .. }, None) => {
                (call.cuGraphMemsetNodeSetParams)(node, words.as_ptr().cast())
            }
            (Params::Host(id), exec) => {
                let host = HostCalls::node(session, id);
                match exec {
                    Some(exec) => (call.cuGraphExecHostNodeSetParams)(exec, node, (&raw const host).cast()),
                    None => (call.cuGraphHostNodeSetParams)(node, (&raw const host).cast()),
                }
            }
            (Params::Child(child), Some(exec)) => {
                (call.cuGraphExecChildGraphNodeSetParams)(exec, node, child)
            }
            (Params::Record(event), Some(exec)) => {
                (call.cuGraphExecEventRecordNodeSetEvent)(exec, node, event)
            }
            (Params::Record(event), None) => (call.cuGraphEventRecordNodeSetEvent)(node, event),
            (Params::Wait(event), Some(exec)) => (call.cuGraphExecEventWaitNodeSetEvent)(exec, node, event),
            (Params::Wait(event), None) => (call.cuGraphEventWaitNodeSetEvent)(node, event),
            (Params::MemOps { ctx, flags, items }, exec) => {
                let params = MemOpsNode::new(ctx, &items, flags);
                let params = (&raw const params).cast();
                match exec {
                    Some(exec) => (call.cuGraphExecBatchMemOpNodeSetParams)(exec, node, params),
                    None => (call.cuGraphBatchMemOpNodeSetParams)(node, params),
                }
            }
            (Params::Empty, _) => status::INVALID_VALUE,
            (
                Params::Child(_)
                | Params::MovedChild { .. }
                | Params::Alloc { .. }
                | Params::Free(_)
                | Params::Condition { .. },
                _,
            ) => status::NOT_SUPPORTED,
        }
    })?)
}

/// `GRAPH_CLONE`: new handle, graph.
pub fn clone(session: &Session, r: &mut Reader<'_>) -> Done {
    let (handle, graph) = (r.word()?, session.graphs.get(r.word()?)?.0);
    let mut copy = std::ptr::null_mut();
    // SAFETY: the out pointer is valid.
    check(unsafe { (session.driver.call.cuGraphClone)(&mut copy, graph) })?;
    Ok(session.graphs.put(handle, Object(copy))?)
}

/// `GRAPH_UPDATE`: executable graph, graph.
///
/// It answers the result, the node that differs, and its counterpart.
pub fn update(session: &Session, r: &mut Reader<'_>, answer: &mut Answer) -> Done {
    let (exec, graph) = (session.execs.get(r.word()?)?.0, session.graphs.get(r.word()?)?.0);
    // CUgraphExecUpdateResultInfo: result, node, counterpart.
    let mut info = [0u64; 3];
    // SAFETY: the structure has cuda.h's size.
    let updated =
        check(unsafe { (session.driver.call.cuGraphExecUpdate_v2)(exec, graph, info.as_mut_ptr().cast()) });
    let [result, node, counterpart] = info;
    for node in [node, counterpart] {
        note_named(session, graph, node as Handle);
    }
    for word in [result, node, counterpart] {
        answer.word(word);
    }
    Ok(updated?)
}
