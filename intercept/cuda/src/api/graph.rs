//! Graphs.

use std::collections::HashMap;
use std::ffi::{c_char, c_void};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use gpusession_proto::frame::{Writer, op};
use gpusession_proto::handle;

use super::graph_nodes::{
    AllocNode, Content, HostNode, KernelNode, MemOpsNode, NodeParams, OldKernelNode, SetNode, Shape,
    child_graphs, with_children,
};
use crate::client::{Client, string, word};
use crate::cuboid::Cuboid;
use crate::entry::{INVALID_CONTEXT, INVALID_VALUE, Result, bytes, driver, give, give_optional, take};
use crate::ranges::{self, Kind};
use crate::streams::{self, Stream, find};
use crate::{clients, events, functions, graph_uses, handles, host_functions, objects, regions, thread};

/// `CUgraphExecUpdateResultInfo`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UpdateInfo {
    result: i32,
    from: *mut c_void,
    node: *mut c_void,
}

const _: () = assert!(size_of::<UpdateInfo>() == 24);

fn add(node: *mut u64, graph: *mut c_void, after: *const c_void, count: usize, content: &Content) -> Result {
    add_with_edges(node, graph, after, std::ptr::null(), count, content).map(|_| ())
}

/// Adds a node by the structure for all types, and writes the driver's answers into it.
fn add_any(
    node: *mut u64,
    graph: *mut c_void,
    after: *const c_void,
    edges: *const c_void,
    count: usize,
    params: *mut NodeParams,
) -> Result {
    const ADDRESS: usize = 14;
    const GRAPHS: usize = 2;
    let content = Content::any(clients::by_object(graph as u64)?, params)?;
    let answer = add_with_edges(node, graph, after, edges, count, &content)?;
    let at = match content {
        Content::Alloc { .. } => ADDRESS,
        Content::Condition { .. } => GRAPHS,
        _ => return Ok(()),
    };
    let mut known = take(params)?;
    known.body[at] = answer;
    give(params, known)
}

/// Adds a node; `edges` has a `CUgraphEdgeData` (8 bytes) per dependency, or is null for plain
/// ones.
///
/// Returns the address that the node allocates, or the array of a conditional node's graphs.
fn add_with_edges(
    node: *mut u64,
    graph: *mut c_void,
    after: *const c_void,
    edges: *const c_void,
    count: usize,
    content: &Content,
) -> Result<u64> {
    let client = clients::by_object(graph as u64)?;
    if node.is_null() {
        return Err(INVALID_VALUE);
    }
    let len = count.checked_mul(8).ok_or(INVALID_VALUE)?;
    let after = objects::own(client, bytes(after, len)?)?;
    let edges = if edges.is_null() { &[] } else { bytes(edges, len)? };
    // Goes into a buffer of its own first, so that a refusal leaves no half frame in the log.
    let mut frame = Vec::new();
    let mut w = Writer::new(&mut frame, &gpusession_proto::frame::Header::empty());
    content.write(client, &mut w)?;
    w.finish();
    let made = client.call(op::GRAPH_ADD, |w| {
        w.word(graph as u64);
        w.bytes(&after);
        w.words(&frame[gpusession_proto::frame::HEADER..]);
        // Zeros are plain edges, which need no data.
        let edges = if edges.iter().any(|byte| *byte != 0) { edges } else { &[] };
        if !edges.is_empty() || content.context() != 0 {
            w.bytes(edges);
        }
        if content.context() != 0 {
            w.word(handle::local(content.context()));
        }
    });
    let reply = made.inspect_err(|_| {
        if let Content::Condition { bodies, .. } = content {
            bodies.iter().for_each(|body| handles::retire(*body));
        }
    })?;
    let mut r = reply.reader();
    let new = client.name(word(&mut r)?);
    graph_uses::node_of(new, graph as u64);
    if let Some(uses) = content.uses() {
        graph_uses::add(graph as u64, new, uses);
    }
    if let Content::Child { graph: child, moved: true } = content {
        child_graphs().insert(*child, graph as u64, new);
    }
    give(node, new)?;
    match content {
        Content::Alloc { size, .. } => {
            let address = word(&mut r)?;
            client.claims.claim("memory of a graph", address, *size as u64)?;
            ranges::add(address, *size as u64, Kind::Graph, client.context());
            Ok(address)
        }
        Content::Condition { bodies, .. } => {
            let mut known = child_graphs();
            bodies.iter().for_each(|body| known.insert(*body, graph as u64, new));
            Ok(lend_bodies(bodies))
        }
        _ => Ok(0),
    }
}

/// Returns the array of a conditional node's graphs for the program.
fn lend_bodies(bodies: &[u64]) -> u64 {
    let array: Box<[u64]> = bodies.into();
    let start = array.as_ptr() as u64;
    body_arrays().insert(bodies.first().copied().unwrap_or(0), array);
    start
}

/// Locks the arrays that conditional nodes gave to the program, by their first graph.
///
/// The program may read an array as long as the node exists, and the graphs in it end with the
/// node.
fn body_arrays() -> MutexGuard<'static, HashMap<u64, Box<[u64]>>> {
    static BODY_ARRAYS: LazyLock<Mutex<HashMap<u64, Box<[u64]>>>> = LazyLock::new(Mutex::default);
    BODY_ARRAYS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Shapes by executable graph and node.
type Shapes = HashMap<u64, HashMap<u64, Shape>>;

/// Locks the shapes that the driver has accepted for nodes of executable graphs.
///
/// As with launches, only the first one of a shape waits for the driver's verdict.
fn accepted() -> MutexGuard<'static, Shapes> {
    static ACCEPTED: LazyLock<Mutex<Shapes>> = LazyLock::new(Mutex::default);
    ACCEPTED.lock().unwrap_or_else(PoisonError::into_inner)
}

fn set(exec: *mut c_void, node: u64, content: &Content) -> Result {
    let client = clients::by_object(node)?;
    // The driver changes no node of these types either.
    if let Content::Condition { bodies, .. } = content {
        bodies.iter().for_each(|body| handles::retire(*body));
    }
    if matches!(content, Content::Alloc { .. } | Content::Free(_) | Content::Condition { .. }) {
        return Err(INVALID_VALUE);
    }
    if !exec.is_null() {
        client.same(clients::by_object(exec as u64)?)?;
    }
    let mut frame = Vec::new();
    let mut w = Writer::new(&mut frame, &gpusession_proto::frame::Header::empty());
    content.write(client, &mut w)?;
    w.finish();
    let shape = content.shape().filter(|_| !exec.is_null());
    let known = || accepted().get(&(exec as u64)).and_then(|shapes| shapes.get(&node).copied());
    let sure = shape.is_some() && known() == shape;
    client.post_if(sure, op::GRAPH_EXEC_SET, |w| {
        w.word(exec as u64);
        w.word(client.own(node));
        w.words(&frame[gpusession_proto::frame::HEADER..]);
        if content.context() != 0 {
            w.word(handle::local(content.context()));
        }
    })?;
    if let Some(shape) = shape.filter(|_| !sure) {
        accepted().entry(exec as u64).or_default().insert(node, shape);
    }
    let graph = || if exec.is_null() { graph_uses::graph_of(node) } else { Some(exec as u64) };
    if let Some(uses) = content.uses()
        && let Some(graph) = graph()
    {
        graph_uses::set(graph, node, uses);
    }
    Ok(())
}

/// The driver's verdict about an instantiation.
#[derive(Default)]
struct Verdict {
    /// `CUgraphInstantiateResult`
    result: u64,
    /// Node that caused an error, or 0.
    node: u64,
    /// Length of the program's buffer for text, 0 for none.
    room: usize,
    /// Bytes that the driver wrote there.
    log: Vec<u8>,
}

/// `CUDA_GRAPH_INSTANTIATE_ERROR`, for an unexpected reason.
const UNEXPECTED: u64 = 1;

impl Verdict {
    /// Writes the driver's text into the program's buffer.
    ///
    /// # Safety
    /// The buffer has `room` bytes.
    unsafe fn give_log(&self, buffer: *mut c_char) {
        for (i, byte) in self.log.iter().take(self.room).enumerate() {
            // SAFETY: the caller vouches for the buffer, which `room` bounds.
            unsafe { buffer.add(i).write(*byte as c_char) };
        }
    }
}

/// Instantiates a graph; writes the driver's verdict, also on an error.
fn instantiate(exec: *mut *mut c_void, graph: *mut c_void, flags: u64, verdict: &mut Verdict) -> Result {
    verdict.result = UNEXPECTED;
    let client = clients::by_object(graph as u64)?;
    if exec.is_null() {
        return Err(INVALID_VALUE);
    }
    streams::allowed()?;
    give(exec, instantiated(client, graph as u64, flags, verdict)? as *mut c_void)
}

/// Lets the worker instantiate a graph, and returns the handle.
fn instantiated(client: &Client, graph: u64, flags: u64, verdict: &mut Verdict) -> Result<u64> {
    let new = client.mint(handle::EXEC);
    let made = client.ask(op::GRAPH_INSTANTIATE, |w| {
        w.word(new);
        w.word(graph);
        w.word(flags);
        if verdict.room > 0 {
            w.word(verdict.room as u64);
        }
    });
    let made = made.and_then(|reply| {
        let mut r = reply.reader();
        // Older workers answer no words.
        if let (Ok(result), Ok(node)) = (r.word(), r.word()) {
            verdict.result = result;
            verdict.node = if node == 0 { 0 } else { client.name(node) };
            verdict.log = string(&mut r).map(<[u8]>::to_vec).unwrap_or_default();
        }
        client.check_status(reply.status)
    });
    match made {
        Ok(()) => {
            (verdict.result, verdict.node) = (0, 0);
            graph_uses::replace(new, &with_children(graph));
            Ok(new)
        }
        Err(status) => {
            verdict.result = verdict.result.max(UNEXPECTED);
            handles::retire(new);
            Err(status)
        }
    }
}

/// Instantiates a graph as the first forms of the call do, which write a text of at most `len`
/// bytes.
///
/// They name no node, not even of an error (seen with driver 580).
fn instantiate_plain(
    exec: *mut *mut c_void,
    graph: *mut c_void,
    node: *mut *mut c_void,
    log: *mut c_char,
    len: usize,
) -> Result {
    let mut verdict = Verdict { room: if log.is_null() { 0 } else { len }, ..Verdict::default() };
    let made = instantiate(exec, graph, 0, &mut verdict);
    // SAFETY: by the call's contract the buffer has `len` bytes, unless it is null.
    unsafe { verdict.give_log(log) };
    give_optional(node, std::ptr::null_mut());
    made
}

/// `CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD`, which `cuGraphExecGetFlags` does not return.
const UPLOAD: u64 = 2;

/// Puts the upload of an executable graph on a stream.
fn upload(exec: *mut c_void, (client, stream): (&Client, Arc<Stream>)) -> Result {
    client.same(clients::by_object(exec as u64)?)?;
    let seq = client.post(op::cuGraphUpload, |w| {
        w.word(exec as u64);
        w.word(stream.handle);
    })?;
    stream.worked(seq);
    Ok(())
}

/// Returns the graph inside a node.
pub(super) fn child_of(node: u64) -> Result<u64> {
    let client = clients::by_object(node)?;
    // Held until the end, so that two threads do not name one graph twice.
    let mut known = child_graphs();
    if let Some(child) = known.of_node(node) {
        return Ok(child);
    }
    let parent = graph_uses::graph_of(node).ok_or(INVALID_VALUE)?;
    let new = client.mint(handle::GRAPH);
    let made = client.call(op::GRAPH_CHILD, |w| {
        w.word(new);
        w.word(parent);
        w.word(client.own(node));
    });
    made.inspect_err(|_| handles::retire(new))?;
    known.insert(new, parent, node);
    graph_uses::add_captured(new, &graph_uses::of_node(parent, node));
    Ok(new)
}

fn destroy(graph: u64, kind: u8, operation: u16) -> Result {
    let client = clients::by_object(graph)?;
    if handle::kind(graph) != kind {
        return Err(INVALID_VALUE);
    }
    if child_graphs().is_embedded(graph) {
        return Err(INVALID_VALUE);
    }
    client.post(operation, |w| w.word(graph))?;
    let below = child_graphs().destroy_graph(graph);
    forget(below.into_iter().chain([graph]));
    Ok(())
}

/// Removes graphs that the worker has destroyed.
fn forget(graphs: impl IntoIterator<Item = u64>) {
    for graph in graphs {
        graph_uses::forget_graph(graph);
        body_arrays().remove(&graph);
        if handle::kind(graph) == handle::EXEC {
            accepted().remove(&graph);
        }
        handles::retire(graph);
    }
}

driver! {
    fn cuGraphCreate(graph: *mut *mut c_void, flags: u32) {
        let client = clients::get()?;
        if graph.is_null() || flags != 0 {
            return Err(INVALID_VALUE);
        }
        let new = client.mint(handle::GRAPH);
        client.post(op::GRAPH_CREATE, |w| {
            w.word(new);
            w.word(u64::from(flags));
        })?;
        give(graph, new as *mut c_void)
    }

    fn cuGraphDestroy(graph: *mut c_void) {
        destroy(graph as u64, handle::GRAPH, op::GRAPH_DESTROY)
    }

    fn cuGraphExecDestroy(exec: *mut c_void) {
        destroy(exec as u64, handle::EXEC, op::GRAPH_EXEC_DESTROY)
    }

    fn cuGraphInstantiateWithFlags(exec: *mut *mut c_void, graph: *mut c_void, flags: u64) {
        // Only the call with parameters has a stream for it.
        if flags & UPLOAD != 0 {
            return Err(INVALID_VALUE);
        }
        instantiate(exec, graph, flags, &mut Verdict::default())
    }

    fn cuGraphInstantiate(exec: *mut *mut c_void, graph: *mut c_void, node: *mut *mut c_void, log: *mut c_char, len: usize) {
        instantiate_plain(exec, graph, node, log, len)
    }

    fn cuGraphInstantiate_v2(exec: *mut *mut c_void, graph: *mut c_void, node: *mut *mut c_void, log: *mut c_char, len: usize) {
        instantiate_plain(exec, graph, node, log, len)
    }

    /// `CUDA_GRAPH_INSTANTIATE_PARAMS`: flags, upload stream, node that failed, result.
    fn cuGraphInstantiateWithParams / cuGraphInstantiateWithParams_ptsz [default] (
        exec: *mut *mut c_void, graph: *mut c_void, params: *mut [u64; 4],
    ) {
        let mut known = take(params)?;
        let mut verdict = Verdict { result: UNEXPECTED, ..Verdict::default() };
        let mut make = || match known[0] & UPLOAD {
            0 => instantiate(exec, graph, known[0], &mut verdict),
            _ => {
                let on = find(known[1] as *mut c_void, default)?;
                instantiate(exec, graph, known[0] & !UPLOAD, &mut verdict)?;
                upload(take(exec)?, on)
            }
        };
        let done = make();
        known[2] = verdict.node;
        known[3] = if done.is_err() { verdict.result.max(UNEXPECTED) } else { 0 };
        give(params, known)?;
        done
    }

    fn cuGraphLaunch / cuGraphLaunch_ptsz [default] (exec: *mut c_void, stream: *mut c_void) {
        clients::get()?;
        if handle::kind(exec as u64) != handle::EXEC {
            return Err(INVALID_VALUE);
        }
        let (client, stream) = find(stream, default)?;
        client.same(clients::by_object(exec as u64)?)?;
        stream.usable()?;
        // No graph contains a launch (H200, driver 580).
        stream.not_capturing()?;
        regions::upload(client)?;
        let uses = graph_uses::of(exec as u64);
        graph_uses::upload(&uses)?;
        host_functions::launching_graph(&stream)?;
        let seq = client.post(op::GRAPH_LAUNCH, |w| {
            w.word(exec as u64);
            w.word(stream.handle);
            // Events, which the launch's place in the order depends on.
            if !uses.recorded.is_empty() || !uses.awaited.is_empty() {
                w.word(uses.recorded.len() as u64);
                uses.recorded.iter().chain(&uses.awaited).for_each(|event| w.word(*event));
            }
        })?;
        if streams::tracking(client) {
            stream.positions.covers_also(&events::covers_of(&uses.awaited, seq), seq);
        }
        host_functions::appended(&stream, seq);
        stream.worked(seq);
        client.take_late_error()
    }

    fn cuGraphClone(clone: *mut *mut c_void, graph: *mut c_void) {
        let client = clients::by_object(graph as u64)?;
        if clone.is_null() {
            return Err(INVALID_VALUE);
        }
        let new = client.mint(handle::GRAPH);
        client.call(op::GRAPH_CLONE, |w| {
            w.word(new);
            w.word(graph as u64);
        })?;
        graph_uses::replace(new, &with_children(graph as u64));
        give(clone, new as *mut c_void)
    }

    fn cuGraphAddKernelNode_v2(node: *mut u64, graph: *mut c_void, after: *const c_void, count: usize, kernel: *const KernelNode) {
        add(node, graph, after, count, &Content::Kernel(take(kernel)?))
    }

    fn cuGraphAddKernelNode(node: *mut u64, graph: *mut c_void, after: *const c_void, count: usize, kernel: *const OldKernelNode) {
        add(node, graph, after, count, &Content::Kernel(take(kernel)?.into()))
    }

    fn cuGraphAddMemcpyNode(
        node: *mut u64, graph: *mut c_void, after: *const c_void, count: usize, copy: *const Cuboid, ctx: *mut c_void,
    ) {
        add(node, graph, after, count, &Content::copy(clients::by_object(graph as u64)?, copy, ctx)?)
    }

    fn cuGraphAddMemsetNode(
        node: *mut u64, graph: *mut c_void, after: *const c_void, count: usize, set: *const SetNode, ctx: *mut c_void,
    ) {
        add(node, graph, after, count, &Content::fill(take(set)?, thread::named(ctx)?)?)
    }

    fn cuGraphAddHostNode(node: *mut u64, graph: *mut c_void, after: *const c_void, count: usize, host: *const HostNode) {
        add(node, graph, after, count, &Content::host(clients::by_object(graph as u64)?, host)?)
    }

    fn cuGraphExecHostNodeSetParams(exec: *mut c_void, node: u64, host: *const HostNode) {
        set(exec, node, &Content::host(clients::by_object(node)?, host)?)
    }

    fn cuGraphHostNodeSetParams(node: u64, host: *const HostNode) {
        set(std::ptr::null_mut(), node, &Content::host(clients::by_object(node)?, host)?)
    }

    fn cuGraphNodeFindInClone(found: *mut u64, original: u64, clone: *mut c_void) {
        let client = clients::by_object(clone as u64)?;
        client.same(clients::by_object(original)?)?;
        let reply = client.call(op::cuGraphNodeFindInClone, |w| {
            w.word(client.own(original));
            w.word(clone as u64);
        })?;
        let node = client.name(word(&mut reply.reader())?);
        graph_uses::node_of(node, clone as u64);
        graph_uses::rename(clone as u64, original, node);
        give(found, node)
    }

    fn cuGraphAddEmptyNode(node: *mut u64, graph: *mut c_void, after: *const c_void, count: usize) {
        add(node, graph, after, count, &Content::Empty)
    }

    fn cuGraphAddEventRecordNode(node: *mut u64, graph: *mut c_void, after: *const c_void, count: usize, event: *mut c_void) {
        add(node, graph, after, count, &Content::record(event as u64)?)
    }

    fn cuGraphAddEventWaitNode(node: *mut u64, graph: *mut c_void, after: *const c_void, count: usize, event: *mut c_void) {
        add(node, graph, after, count, &Content::wait(event as u64)?)
    }

    fn cuGraphAddChildGraphNode(node: *mut u64, graph: *mut c_void, after: *const c_void, count: usize, child: *mut c_void) {
        add(node, graph, after, count, &Content::child(child, false)?)
    }

    fn cuGraphAddNode(node: *mut u64, graph: *mut c_void, after: *const c_void, count: usize, params: *mut NodeParams) {
        add_any(node, graph, after, std::ptr::null(), count, params)
    }

    fn cuGraphAddNode_v2(
        node: *mut u64, graph: *mut c_void, after: *const c_void, edges: *const c_void, count: usize, params: *mut NodeParams,
    ) {
        add_any(node, graph, after, edges, count, params)
    }

    fn cuGraphAddNode_v3(
        node: *mut u64, graph: *mut c_void, after: *const c_void, edges: *const c_void, count: usize, params: *mut NodeParams,
    ) {
        of_its_context(params)?;
        add_any(node, graph, after, edges, count, params)
    }

    fn cuGraphAddMemAllocNode(node: *mut u64, graph: *mut c_void, after: *const c_void, count: usize, params: *mut AllocNode) {
        let content = Content::alloc(params)?;
        let address = add_with_edges(node, graph, after, std::ptr::null(), count, &content)?;
        let known = take(params)?;
        give(params, AllocNode { address, ..known })
    }

    fn cuGraphAddMemFreeNode(node: *mut u64, graph: *mut c_void, after: *const c_void, count: usize, address: u64) {
        add(node, graph, after, count, &Content::Free(address))
    }

    fn cuGraphAddBatchMemOpNode(node: *mut u64, graph: *mut c_void, after: *const c_void, count: usize, params: *const MemOpsNode) {
        add(node, graph, after, count, &Content::mem_ops(params)?)
    }

    fn cuGraphBatchMemOpNodeSetParams(node: u64, params: *const MemOpsNode) {
        set(std::ptr::null_mut(), node, &Content::mem_ops(params)?)
    }

    fn cuGraphExecBatchMemOpNodeSetParams(exec: *mut c_void, node: u64, params: *const MemOpsNode) {
        set(exec, node, &Content::mem_ops(params)?)
    }

    fn cuGraphConditionalHandleCreate(condition: *mut u64, graph: *mut c_void, ctx: *mut c_void, default: u32, flags: u32) {
        let client = clients::by_object(graph as u64)?;
        // Null is not the current context here.
        if ctx.is_null() {
            return Err(INVALID_CONTEXT);
        }
        let ctx = thread::named(ctx)?;
        client.same(clients::by_object(ctx)?)?;
        if condition.is_null() {
            return Err(INVALID_VALUE);
        }
        let reply = client.call(op::cuGraphConditionalHandleCreate, |w| {
            w.word(graph as u64);
            w.word(handle::local(ctx));
            w.word(u64::from(default));
            w.word(u64::from(flags));
        })?;
        give(condition, word(&mut reply.reader())?)
    }

    fn cuGraphNodeSetParams(node: u64, params: *const NodeParams) {
        set(std::ptr::null_mut(), node, &Content::any(clients::by_object(node)?, params)?)
    }

    fn cuGraphNodeSetParams_v2(node: u64, params: *const NodeParams) {
        of_its_context(params)?;
        set(std::ptr::null_mut(), node, &Content::any(clients::by_object(node)?, params)?)
    }

    fn cuGraphExecNodeSetParams(exec: *mut c_void, node: u64, params: *const NodeParams) {
        set(exec, node, &Content::any(clients::by_object(node)?, params)?)
    }

    fn cuGraphExecChildGraphNodeSetParams(exec: *mut c_void, node: u64, child: *mut c_void) {
        set(exec, node, &Content::child(child, false)?)
    }

    fn cuGraphChildGraphNodeGetGraph(node: u64, graph: *mut *mut c_void) {
        if graph.is_null() {
            return Err(INVALID_VALUE);
        }
        give(graph, child_of(node)? as *mut c_void)
    }

    fn cuGraphDestroyNode(node: u64) {
        let client = clients::by_object(node)?;
        client.call(op::cuGraphDestroyNode, |w| w.word(client.own(node)))?;
        graph_uses::forget_node(node);
        let gone = child_graphs().destroy_node(node);
        forget(gone);
        Ok(())
    }

    fn cuGraphEventRecordNodeSetEvent(node: u64, event: *mut c_void) {
        set(std::ptr::null_mut(), node, &Content::record(event as u64)?)
    }

    fn cuGraphEventWaitNodeSetEvent(node: u64, event: *mut c_void) {
        set(std::ptr::null_mut(), node, &Content::wait(event as u64)?)
    }

    fn cuGraphExecEventRecordNodeSetEvent(exec: *mut c_void, node: u64, event: *mut c_void) {
        set(exec, node, &Content::record(event as u64)?)
    }

    fn cuGraphExecEventWaitNodeSetEvent(exec: *mut c_void, node: u64, event: *mut c_void) {
        set(exec, node, &Content::wait(event as u64)?)
    }

    fn cuGraphExecKernelNodeSetParams_v2(exec: *mut c_void, node: u64, kernel: *const KernelNode) {
        set(exec, node, &Content::Kernel(take(kernel)?))
    }

    fn cuGraphExecKernelNodeSetParams(exec: *mut c_void, node: u64, kernel: *const OldKernelNode) {
        set(exec, node, &Content::Kernel(take(kernel)?.into()))
    }

    fn cuGraphExecMemcpyNodeSetParams(exec: *mut c_void, node: u64, copy: *const Cuboid, ctx: *mut c_void) {
        set(exec, node, &Content::copy(clients::by_object(node)?, copy, ctx)?)
    }

    fn cuGraphExecMemsetNodeSetParams(exec: *mut c_void, node: u64, values: *const SetNode, ctx: *mut c_void) {
        set(exec, node, &Content::fill(take(values)?, thread::named(ctx)?)?)
    }

    fn cuGraphKernelNodeSetParams_v2(node: u64, kernel: *const KernelNode) {
        set(std::ptr::null_mut(), node, &Content::Kernel(take(kernel)?))
    }

    fn cuGraphKernelNodeSetParams(node: u64, kernel: *const OldKernelNode) {
        set(std::ptr::null_mut(), node, &Content::Kernel(take(kernel)?.into()))
    }

    fn cuGraphMemcpyNodeSetParams(node: u64, copy: *const Cuboid) {
        set(std::ptr::null_mut(), node, &Content::copy(clients::by_object(node)?, copy, std::ptr::null_mut())?)
    }

    fn cuGraphMemsetNodeSetParams(node: u64, values: *const SetNode) {
        set(std::ptr::null_mut(), node, &Content::fill(take(values)?, thread::context()?)?)
    }

    fn cuGraphExecUpdate_v2(exec: *mut c_void, graph: *mut c_void, info: *mut UpdateInfo) {
        let (done, result, from, node) = update(exec, graph)?;
        give_optional(info, UpdateInfo { result, from: from as *mut c_void, node: node as *mut c_void });
        done
    }

    fn cuGraphExecUpdate(exec: *mut c_void, graph: *mut c_void, failed: *mut u64, result_out: *mut i32) {
        let (done, result, _, node) = update(exec, graph)?;
        give_optional(failed, node);
        give_optional(result_out, result);
        done
    }
}

/// Returns an error if a kernel node names a function and a context of another client.
///
/// The calls before CUDA 13.4 ignored the context beside a function.
fn of_its_context(params: *const NodeParams) -> Result {
    let NodeParams { kind, body, .. } = take(params)?;
    let KernelNode { func, ctx, .. } = take(body.as_ptr().cast())?;
    if kind != 0 || func.is_null() || ctx.is_null() {
        return Ok(());
    }
    let (client, _) = clients::of_context(ctx as u64)?;
    let function = functions::find(func as u64)?;
    if !function.is_kernel() && function.client()?.number != client.number {
        return Err(INVALID_CONTEXT);
    }
    Ok(())
}

fn update(exec: *mut c_void, graph: *mut c_void) -> Result<(Result, i32, u64, u64)> {
    let client = clients::by_object(exec as u64)?;
    client.same(clients::by_object(graph as u64)?)?;
    let reply = client.ask(op::GRAPH_UPDATE, |w| {
        w.word(exec as u64);
        w.word(graph as u64);
    })?;
    let mut r = reply.reader();
    let told = client.check_status(reply.status);
    if told.is_ok() {
        graph_uses::replace(exec as u64, &with_children(graph as u64));
    }
    let (result, from, node) =
        (word(&mut r).unwrap_or(0), word(&mut r).unwrap_or(0), word(&mut r).unwrap_or(0));
    let named = |node| if node == 0 { 0 } else { client.name(node) };
    Ok((told, result as i32, named(from), named(node)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake_worker::Program;

    #[test]
    fn text_of_an_instantiation_fills_the_buffer_of_the_program_at_most() {
        let program = Program::new();
        let (client, graph) = (program.client, program.client.mint(handle::GRAPH));
        let text = u64::from_le_bytes(*b"wrong\0\0\0");
        for (room, expected) in [(8, b"wrong\0xx"), (2, b"wrxxxxxx")] {
            let mut verdict = Verdict { room, ..Verdict::default() };
            program.answer(op::GRAPH_INSTANTIATE, 1, &[2, 0x1000, 6, text]);
            assert_eq!(instantiated(client, graph, 0, &mut verdict), Err(1));
            assert_eq!((verdict.result, verdict.node), (2, client.name(0x1000)));
            let mut log = [b'x' as c_char; 8];
            // SAFETY: the buffer is longer than the room.
            unsafe { verdict.give_log(log.as_mut_ptr()) };
            assert_eq!(log, expected.map(|byte| byte as c_char));
            assert_eq!(program.frames()[0].1[24..], (room as u64).to_le_bytes());
        }
        // Without a buffer, no text is written, whatever the worker answers.
        let mut verdict = Verdict::default();
        program.answer(op::GRAPH_INSTANTIATE, 0, &[0, 0, 6, text]);
        assert!(instantiated(client, graph, 0, &mut verdict).is_ok());
        assert_eq!(program.frames()[0].1.len(), 24);
        // SAFETY: the room is empty.
        unsafe { verdict.give_log(std::ptr::null_mut()) };
    }

    #[test]
    fn graphs_of_a_node_are_listed_as_long_as_they_exist() {
        let client = Program::new().client;
        let bodies: Vec<u64> = (0..2).map(|_| client.mint(handle::GRAPH)).collect();
        let array = lend_bodies(&bodies) as *const u64;
        // SAFETY: the array exists until its graphs are forgotten.
        assert_eq!(unsafe { std::slice::from_raw_parts(array, 2) }, bodies);
        assert!(body_arrays().contains_key(&bodies[0]));
        forget(bodies.clone());
        assert!(!body_arrays().contains_key(&bodies[0]));
    }
}
