//! Nodes of graphs.

use super::copy::from_3d;
use super::graph::{exec, graph, node, nodes};
use super::{out, read, slice};
use crate::abi::{
    BatchMemOp, HostNodeParams, KernelNodeParams, KernelNodeParamsV2, MEMORY_ARRAY, MEMORY_DEVICE,
    MEMORY_HOST, Memcpy3D, MemsetNodeParams, NodeParams,
};
use crate::driver::array::ARRAYS;
use crate::driver::context::{CONTEXTS, by_handle, current};
use crate::driver::driver;
use crate::driver::graph::{CONDITIONS, Condition, GRAPHS, Graph, GraphMemory, NodeKind};
use crate::driver::op::{Copy, Fill, Launch, Op, Place, Side};
use crate::driver::stream::EVENTS;
use crate::errors::{self, INVALID_CONTEXT, INVALID_VALUE, Result};
use crate::export;
use crate::registry::handle;
use std::sync::Arc;

unsafe fn add(to: *mut usize, g: usize, deps: *const usize, n: usize, kind: NodeKind) -> Result {
    if to.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the program vouches for its pointers.
    unsafe {
        let node = graph(g)?.add(kind, nodes(slice(deps, n)?)?)?;
        out(to, handle(&node))
    }
}

unsafe fn kernel(p: *const KernelNodeParams, v2: Option<*const KernelNodeParamsV2>) -> Result<NodeKind> {
    // SAFETY: the program vouches for its pointers.
    unsafe {
        let p = read(p)?;
        let extra = v2.map(|q| read(q)).transpose()?;
        let h = if p.func == 0 { extra.map_or(0, |e| e.kern) } else { p.func };
        // A node can name the context of its kernel.
        if let Some(ctx) = extra.filter(|e| e.ctx != 0 && p.func == 0).and_then(|e| CONTEXTS.find(e.ctx)) {
            let k = crate::driver::module::KERNELS.get(h)?;
            let f = k.function(&ctx)?;
            return Ok(NodeKind::Kernel(launch(handle(&f), &p)?));
        }
        Ok(NodeKind::Kernel(launch(h, &p)?))
    }
}

unsafe fn launch(h: usize, p: &KernelNodeParams) -> Result<Launch> {
    // SAFETY: the program vouches for its pointers.
    unsafe {
        Launch::new(
            &current()?,
            h,
            p.grid,
            p.block,
            p.shared,
            false,
            p.kernelParams.cast::<*const u8>(),
            p.extra.cast::<*const u8>(),
        )
    }
}

fn fill(p: &MemsetNodeParams) -> Result<NodeKind> {
    if !matches!(p.elementSize, 1 | 2 | 4) || p.width == 0 || p.height == 0 {
        return Err(INVALID_VALUE);
    }
    let f = Fill {
        at: p.dst,
        pitch: p.pitch as u64,
        value: p.value,
        element: p.elementSize,
        width: p.width as u64 * u64::from(p.elementSize),
        height: p.height as u64,
    };
    f.validate()?;
    Ok(NodeKind::Fill(f))
}

fn copy(p: &Memcpy3D) -> Result<NodeKind> {
    let c = from_3d(p)?;
    c.validate()?;
    Ok(NodeKind::Copy(c))
}

fn pinned(at: u64) -> bool {
    driver().is_ok_and(|d| d.space.find(at).is_some_and(|a| a.on_host()))
}

/// One side of a copy in the words of `CUDA_MEMCPY3D`.
#[derive(Default)]
struct Described {
    kind: u32,
    host: u64,
    device: u64,
    array: usize,
    /// Bytes, rows and slices before the box, in an array.
    at: [usize; 3],
    pitch: usize,
    rows: usize,
}

fn describe_side(side: &Side, boxed: bool) -> Described {
    if let (Place::Known(at), Some(array)) = (&side.place, ARRAYS.find(side.array)) {
        let (image, offset) = (array.image, at.saturating_sub(array.image.base));
        let (z, rest) = (offset / image.slice(), offset % image.slice());
        let at = [rest % image.pitch, rest / image.pitch, z].map(|n| n as usize);
        return Described { kind: MEMORY_ARRAY, array: side.array, at, ..Described::default() };
    }
    let (kind, host, device) = match &side.place {
        Place::Known(at) if pinned(*at) => (MEMORY_HOST, *at, 0),
        Place::Known(at) => (MEMORY_DEVICE, 0, *at),
        Place::Pageable(at) => (MEMORY_HOST, *at, 0),
        Place::Staged(bytes) => (MEMORY_HOST, bytes.as_ptr() as u64, 0),
    };
    // A single row has no pitch.
    let pitch = if boxed { side.pitch } else { 0 };
    let rows = side.slice.checked_div(pitch).unwrap_or(0) as usize;
    Described { kind, host, device, pitch: pitch as usize, rows, ..Described::default() }
}

fn describe_copy(c: &Copy) -> Memcpy3D {
    let boxed = c.height > 1 || c.depth > 1;
    let (src, dst) = (describe_side(&c.src, boxed), describe_side(&c.dst, boxed));
    Memcpy3D {
        srcXInBytes: src.at[0],
        srcY: src.at[1],
        srcZ: src.at[2],
        srcMemoryType: src.kind,
        srcHost: src.host,
        srcDevice: src.device,
        srcArray: src.array,
        srcPitch: src.pitch,
        srcHeight: src.rows,
        dstXInBytes: dst.at[0],
        dstY: dst.at[1],
        dstZ: dst.at[2],
        dstMemoryType: dst.kind,
        dstHost: dst.host,
        dstDevice: dst.device,
        dstArray: dst.array,
        dstPitch: dst.pitch,
        dstHeight: dst.rows,
        WidthInBytes: c.width as usize,
        Height: c.height as usize,
        Depth: c.depth as usize,
        ..Memcpy3D::default()
    }
}

fn mem_ops(list: &[BatchMemOp]) -> Result<NodeKind> {
    let mut ops = Vec::new();
    for op in list {
        let (at, flags) = (op.address, op.flags);
        let low = op.value & 0xffff_ffff;
        ops.push(match op.operation {
            1 => Op::Wait { at, value: low, flags, wide: false },
            2 => Op::Write { at, value: low, wide: false },
            4 => Op::Wait { at, value: op.value, flags, wide: true },
            5 => Op::Write { at, value: op.value, wide: true },
            _ => return Err(INVALID_VALUE),
        });
    }
    Ok(NodeKind::MemOps(ops))
}

fn event(h: usize) -> Result<usize> {
    driver()?;
    EVENTS.get(h)?;
    Ok(h)
}

fn child(h: usize) -> Result<NodeKind> {
    let copy = graph(h)?.duplicate();
    GRAPHS.insert(copy.clone());
    Ok(NodeKind::Child(copy))
}

/// Replaces a node's parameters by others of the same type.
fn replace(h: usize, new: NodeKind) -> Result {
    let n = node(h)?;
    let mut kind = n.kind.lock();
    if kind.code() != new.code() {
        return Err(INVALID_VALUE);
    }
    *kind = new;
    Ok(())
}

fn replace_in(e: usize, h: usize, new: NodeKind) -> Result {
    exec(e)?.set(h, |kind| {
        if kind.code() != new.code() {
            return Err(INVALID_VALUE);
        }
        *kind = new;
        Ok(())
    })
}

thread_local! {
    /// The parameter pointers that the last query returned by reference, and their targets.
    static LENT: std::cell::RefCell<(Vec<usize>, Vec<u64>)> = const { std::cell::RefCell::new((Vec::new(), Vec::new())) };
}

fn kernel_params(h: usize) -> Result<KernelNodeParams> {
    let n = node(h)?;
    let kind = n.kind.lock();
    let NodeKind::Kernel(l) = &*kind else { return Err(INVALID_VALUE) };
    // The form of the call that made the node.
    let list = LENT.with(|lent| {
        let mut lent = lent.borrow_mut();
        lent.1 = l.params.clone();
        lent.1.push(u64::from(l.function.param_size));
        let (base, size) = (lent.1.as_ptr() as usize, (&raw const lent.1[l.params.len()]) as usize);
        lent.0 = if l.buffered {
            vec![1, base, 2, size, 0]
        } else {
            l.function.params.iter().map(|(offset, _)| base + *offset as usize).collect()
        };
        lent.0.as_mut_ptr()
    });
    let none = std::ptr::null_mut();
    let (each, extra) = if l.buffered { (none, list.cast()) } else { (list.cast(), none) };
    Ok(KernelNodeParams {
        func: l.handle,
        grid: l.grid,
        block: l.block,
        shared: l.shared,
        kernelParams: each,
        extra,
    })
}

/// Allocates a node's memory from `CUDA_MEM_ALLOC_NODE_PARAMS`, and writes its address there.
unsafe fn alloc(p: *mut [u64; 15]) -> Result<NodeKind> {
    // SAFETY: the program vouches for its pointers.
    unsafe {
        let [_, location, ..] = read(p)?;
        let (kind, device) = (location as u32, (location >> 32) as i32);
        if kind != 1 || (*p)[13] == 0 {
            return Err(INVALID_VALUE);
        }
        let device = driver()?.device(device)?.ordinal;
        let memory = driver()?.space.pool(device, handle(&current()?), (*p)[13], 0, None)?;
        (*p)[14] = memory.base;
        Ok(NodeKind::Alloc(GraphMemory::new(memory)))
    }
}

/// Creates a conditional node from `CUDA_CONDITIONAL_NODE_PARAMS`, and its graphs.
unsafe fn condition(p: *mut [u64; 4]) -> Result<NodeKind> {
    // SAFETY: the program vouches for its pointers.
    unsafe {
        let [id, kind, ..] = read(p)?;
        let (kind, size) = (kind as u32, (kind >> 32) as usize);
        let fits = match kind {
            0 => (1..=2).contains(&size),
            1 => size == 1,
            2 => (1..=4096).contains(&size),
            _ => false,
        };
        let known = CONDITIONS.lock().iter().find(|c| c.id == id).cloned();
        let condition = known.filter(|_| fits).ok_or(INVALID_VALUE)?;
        let bodies: Vec<_> = (0..size).map(|_| Graph::new()).collect();
        let handles: Arc<[usize]> = bodies.iter().map(|body| GRAPHS.insert(body.clone())).collect();
        (*p)[2] = handles.as_ptr() as u64;
        Ok(NodeKind::Condition(condition, kind, bodies, handles))
    }
}

/// Creates a node from the union of all parameter structures.
unsafe fn any(p: *const NodeParams) -> Result<NodeKind> {
    if p.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the type determines the body's structure, and the body is large enough for each.
    unsafe {
        let body = (&raw const (*p).body).cast::<u8>();
        match (*p).kind {
            0 => kernel(body.cast(), Some(body.cast())),
            // Preceded by flags and a context.
            1 => copy(&read(body.add(16).cast::<Memcpy3D>())?),
            2 => fill(&read(body.cast::<MemsetNodeParams>())?),
            3 => {
                let h = read(body.cast::<HostNodeParams>())?;
                Ok(NodeKind::Host { func: h.func, data: h.data })
            }
            4 => {
                let h = read(body.cast::<usize>())?;
                // CU_GRAPH_CHILD_GRAPH_OWNERSHIP_CLONE or _MOVE
                match read(body.add(8).cast::<u32>())? {
                    0 => child(h),
                    1 => Ok(NodeKind::Child(graph(h)?)),
                    _ => Err(INVALID_VALUE),
                }
            }
            5 => Ok(NodeKind::Empty),
            6 => Ok(NodeKind::EventWait(event(read(body.cast::<usize>())?)?)),
            7 => Ok(NodeKind::EventRecord(event(read(body.cast::<usize>())?)?)),
            10 => alloc(body.cast_mut().cast()),
            11 => Ok(NodeKind::Free(read(body.cast::<u64>())?)),
            13 => condition(body.cast_mut().cast()),
            12 => {
                let count = read(body.add(8).cast::<u32>())? as usize;
                mem_ops(slice(read(body.add(16).cast::<*const BatchMemOp>())?, count)?)
            }
            _ => Err(errors::NOT_SUPPORTED),
        }
    }
}

/// Checks the context beside a function, which the calls before CUDA 13.4 ignored.
unsafe fn of_its_context(p: *const NodeParams) -> Result {
    // SAFETY: the program vouches for its pointers; the body is large enough for each structure.
    unsafe {
        if p.is_null() {
            return Err(INVALID_VALUE);
        }
        let kernel = read((&raw const (*p).body).cast::<KernelNodeParamsV2>())?;
        match crate::driver::module::FUNCTIONS.find(kernel.base.func) {
            Some(f) if (*p).kind == 0 && kernel.ctx != 0 => {
                let found = CONTEXTS.find(kernel.ctx).ok_or(INVALID_CONTEXT)?;
                if handle(&found) == f.context { Ok(()) } else { Err(INVALID_CONTEXT) }
            }
            _ => Ok(()),
        }
    }
}

fn kernel_node(h: usize) -> Result<Arc<crate::driver::graph::Node>> {
    let n = node(h)?;
    if n.kind.lock().code() != 0 {
        return Err(INVALID_VALUE);
    }
    Ok(n)
}

macro_rules! get {
    ($h:expr, $pattern:pat => $value:expr) => {{
        let n = node($h)?;
        let kind = n.kind.lock();
        let $pattern = &*kind else { return Err(INVALID_VALUE) };
        $value
    }};
}

export! {
    fn cuGraphAddKernelNode(to: *mut usize, g: usize, deps: *const usize, n: usize, p: *const KernelNodeParams) {
        current()?;
        add(to, g, deps, n, kernel(p, None)?)
    }
    fn cuGraphAddKernelNode_v2(to: *mut usize, g: usize, deps: *const usize, n: usize, p: *const KernelNodeParamsV2) {
        current()?;
        add(to, g, deps, n, kernel(p.cast(), Some(p))?)
    }
    fn cuGraphAddMemcpyNode(to: *mut usize, g: usize, deps: *const usize, n: usize, p: *const Memcpy3D, _ctx: usize) {
        add(to, g, deps, n, copy(&read(p)?)?)
    }
    fn cuGraphAddMemsetNode(to: *mut usize, g: usize, deps: *const usize, n: usize, p: *const MemsetNodeParams, _ctx: usize) {
        add(to, g, deps, n, fill(&read(p)?)?)
    }
    fn cuGraphAddHostNode(to: *mut usize, g: usize, deps: *const usize, n: usize, p: *const HostNodeParams) {
        let p = read(p)?;
        add(to, g, deps, n, NodeKind::Host { func: p.func, data: p.data })
    }
    fn cuGraphAddChildGraphNode(to: *mut usize, g: usize, deps: *const usize, n: usize, h: usize) {
        add(to, g, deps, n, child(h)?)
    }
    fn cuGraphAddEmptyNode(to: *mut usize, g: usize, deps: *const usize, n: usize) {
        add(to, g, deps, n, NodeKind::Empty)
    }
    fn cuGraphAddEventRecordNode(to: *mut usize, g: usize, deps: *const usize, n: usize, e: usize) {
        add(to, g, deps, n, NodeKind::EventRecord(event(e)?))
    }
    fn cuGraphAddEventWaitNode(to: *mut usize, g: usize, deps: *const usize, n: usize, e: usize) {
        add(to, g, deps, n, NodeKind::EventWait(event(e)?))
    }
    fn cuGraphAddBatchMemOpNode(to: *mut usize, g: usize, deps: *const usize, n: usize, p: *const [usize; 4]) {
        let p = read(p)?;
        add(to, g, deps, n, mem_ops(slice(p[2] as *const BatchMemOp, p[1] & 0xffff_ffff)?)?)
    }
    fn cuGraphAddMemAllocNode(to: *mut usize, g: usize, deps: *const usize, n: usize, p: *mut [u64; 15]) {
        add(to, g, deps, n, alloc(p)?)
    }
    fn cuGraphAddMemFreeNode(to: *mut usize, g: usize, deps: *const usize, n: usize, at: u64) {
        if driver()?.space.find(at).is_none_or(|a| a.base != at) {
            return Err(INVALID_VALUE);
        }
        add(to, g, deps, n, NodeKind::Free(at))
    }
    fn cuGraphMemAllocNodeGetParams(h: usize, p: *mut [u64; 15]) {
        let a = get!(h, NodeKind::Alloc(m) => m.allocation.clone());
        let mut params = [0; 15];
        params[0] = 1;
        params[1] = 1 | u64::from(a.device) << 32;
        (params[13], params[14]) = (a.size, a.base);
        out(p, params)
    }
    fn cuGraphBatchMemOpNodeGetParams(h: usize, p: *mut [u64; 4]) {
        let list: Vec<[u64; 6]> = get!(h, NodeKind::MemOps(ops) => ops.iter().map(|op| match op {
            Op::Wait { at, value, flags, wide } => [if *wide { 4 } else { 1 }, *at, *value, u64::from(*flags), 0, 0],
            Op::Write { at, value, wide } => [if *wide { 5 } else { 2 }, *at, *value, 0, 0, 0],
            _ => [0; 6],
        }).collect());
        let items = LENT.with(|lent| {
            let mut lent = lent.borrow_mut();
            lent.1 = list.concat();
            lent.1.as_ptr() as u64
        });
        out(p, [handle(&current()?) as u64, list.len() as u64, items, 0])
    }
    fn cuGraphMemFreeNodeGetParams(h: usize, at: *mut u64) { out(at, get!(h, NodeKind::Free(at) => *at)) }
    fn cuGraphBatchMemOpNodeSetParams(h: usize, p: *const [usize; 4]) {
        let p = read(p)?;
        replace(h, mem_ops(slice(p[2] as *const BatchMemOp, p[1] & 0xffff_ffff)?)?)
    }
    fn cuGraphExecBatchMemOpNodeSetParams(e: usize, h: usize, p: *const [usize; 4]) {
        let p = read(p)?;
        replace_in(e, h, mem_ops(slice(p[2] as *const BatchMemOp, p[1] & 0xffff_ffff)?)?)
    }
    fn cuGraphConditionalHandleCreate(to: *mut u64, g: usize, ctx: usize, value: u32, flags: u32) {
        graph(g)?;
        // An H100 names no context by null here.
        if ctx == 0 {
            return Err(INVALID_CONTEXT);
        }
        by_handle(ctx)?;
        // CU_GRAPH_COND_ASSIGN_DEFAULT
        if to.is_null() || flags > 1 {
            return Err(INVALID_VALUE);
        }
        out(to, Condition::new(if flags == 1 { value } else { 0 }).id)
    }
    fn cuGraphAddNode(to: *mut usize, g: usize, deps: *const usize, n: usize, p: *const NodeParams) {
        add(to, g, deps, n, any(p)?)
    }
    fn cuGraphAddNode_v2(to: *mut usize, g: usize, deps: *const usize, _data: *const u64, n: usize, p: *const NodeParams) {
        add(to, g, deps, n, any(p)?)
    }
    fn cuGraphAddNode_v3(to: *mut usize, g: usize, deps: *const usize, _data: *const u64, n: usize, p: *const NodeParams) {
        of_its_context(p)?;
        add(to, g, deps, n, any(p)?)
    }
    fn cuGraphNodeSetParams_v2(h: usize, p: *const NodeParams) {
        of_its_context(p)?;
        replace(h, any(p)?)
    }
    fn cuGraphNodeSetParams(h: usize, p: *const NodeParams) { replace(h, any(p)?) }
    fn cuGraphExecNodeSetParams(e: usize, h: usize, p: *const NodeParams) { replace_in(e, h, any(p)?) }

    fn cuGraphNodeGetType(h: usize, kind: *mut u32) {
        let code = node(h)?.kind.lock().code();
        out(kind, code)
    }

    fn cuGraphKernelNodeGetParams(h: usize, p: *mut KernelNodeParams) { out(p, kernel_params(h)?) }
    fn cuGraphKernelNodeGetParams_v2(h: usize, p: *mut KernelNodeParamsV2) {
        let base = kernel_params(h)?;
        let f = get!(h, NodeKind::Kernel(l) => l.function.clone());
        let kern = crate::driver::module::kernel_of(&f).map_or(0, |k| handle(&k));
        out(p, KernelNodeParamsV2 { base: KernelNodeParams { func: handle(&f), ..base }, kern, ctx: f.context })
    }
    fn cuGraphKernelNodeSetParams(h: usize, p: *const KernelNodeParams) { replace(h, kernel(p, None)?) }
    fn cuGraphKernelNodeSetParams_v2(h: usize, p: *const KernelNodeParamsV2) { replace(h, kernel(p.cast(), Some(p))?) }
    fn cuGraphExecKernelNodeSetParams(e: usize, h: usize, p: *const KernelNodeParams) { replace_in(e, h, kernel(p, None)?) }
    fn cuGraphExecKernelNodeSetParams_v2(e: usize, h: usize, p: *const KernelNodeParamsV2) {
        replace_in(e, h, kernel(p.cast(), Some(p))?)
    }
    fn cuGraphKernelNodeCopyAttributes(to: usize, from: usize) {
        let attributes = kernel_node(from)?.attributes.lock().clone();
        *kernel_node(to)?.attributes.lock() = attributes;
        Ok(())
    }
    fn cuGraphKernelNodeGetAttribute(h: usize, id: u32, value: *mut [u64; 8]) {
        let known = kernel_node(h)?.attributes.lock().get(&id).copied();
        out(value, known.unwrap_or_default())
    }
    fn cuGraphKernelNodeSetAttribute(h: usize, id: u32, value: *const [u64; 8]) {
        kernel_node(h)?.attributes.lock().insert(id, read(value)?);
        Ok(())
    }

    fn cuGraphMemcpyNodeGetParams(h: usize, p: *mut Memcpy3D) {
        out(p, get!(h, NodeKind::Copy(c) => describe_copy(c)))
    }
    fn cuGraphMemcpyNodeSetParams(h: usize, p: *const Memcpy3D) { replace(h, copy(&read(p)?)?) }
    fn cuGraphExecMemcpyNodeSetParams(e: usize, h: usize, p: *const Memcpy3D, _ctx: usize) { replace_in(e, h, copy(&read(p)?)?) }

    fn cuGraphMemsetNodeGetParams(h: usize, p: *mut MemsetNodeParams) {
        let value = get!(h, NodeKind::Fill(f) => MemsetNodeParams {
            dst: f.at,
            pitch: f.pitch as usize,
            value: f.value,
            elementSize: f.element,
            width: (f.width / u64::from(f.element)) as usize,
            height: f.height as usize,
        });
        out(p, value)
    }
    fn cuGraphMemsetNodeSetParams(h: usize, p: *const MemsetNodeParams) { replace(h, fill(&read(p)?)?) }
    fn cuGraphExecMemsetNodeSetParams(e: usize, h: usize, p: *const MemsetNodeParams, _ctx: usize) { replace_in(e, h, fill(&read(p)?)?) }

    fn cuGraphHostNodeGetParams(h: usize, p: *mut HostNodeParams) {
        out(p, get!(h, NodeKind::Host { func, data } => HostNodeParams { func: *func, data: *data }))
    }
    fn cuGraphHostNodeSetParams(h: usize, p: *const HostNodeParams) {
        let p = read(p)?;
        replace(h, NodeKind::Host { func: p.func, data: p.data })
    }
    fn cuGraphExecHostNodeSetParams(e: usize, h: usize, p: *const HostNodeParams) {
        let p = read(p)?;
        replace_in(e, h, NodeKind::Host { func: p.func, data: p.data })
    }

    fn cuGraphChildGraphNodeGetGraph(h: usize, g: *mut usize) {
        out(g, get!(h, NodeKind::Child(c) => handle(c)))
    }
    fn cuGraphExecChildGraphNodeSetParams(e: usize, h: usize, g: usize) { replace_in(e, h, child(g)?) }

    fn cuGraphEventRecordNodeGetEvent(h: usize, e: *mut usize) { out(e, get!(h, NodeKind::EventRecord(e) => *e)) }
    fn cuGraphEventWaitNodeGetEvent(h: usize, e: *mut usize) { out(e, get!(h, NodeKind::EventWait(e) => *e)) }
    fn cuGraphEventRecordNodeSetEvent(h: usize, e: usize) { replace(h, NodeKind::EventRecord(event(e)?)) }
    fn cuGraphEventWaitNodeSetEvent(h: usize, e: usize) { replace(h, NodeKind::EventWait(event(e)?)) }
    fn cuGraphExecEventRecordNodeSetEvent(x: usize, h: usize, e: usize) { replace_in(x, h, NodeKind::EventRecord(event(e)?)) }
    fn cuGraphExecEventWaitNodeSetEvent(x: usize, h: usize, e: usize) { replace_in(x, h, NodeKind::EventWait(event(e)?)) }
}
