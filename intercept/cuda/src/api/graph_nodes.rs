//! Parameters of a graph's nodes, as the program gives them and as a frame names them.

use std::ffi::c_void;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use gpusession_proto::child_graphs::ChildGraphs;
use gpusession_proto::frame::Writer;
use gpusession_proto::handle;

use super::launch::Params;
use crate::client::Client;
use crate::cuboid::Cuboid;
use crate::entry::{INVALID_VALUE, NOT_SUPPORTED, Result, bytes, take};
use crate::functions;
use crate::graph_uses::Uses;
use crate::host_functions::{self, HostFunction};
use crate::regions::Named;
use crate::{clients, events, graph_uses, mapped, objects, ranges, route, thread};

/// Kinds of nodes in `GRAPH_ADD` and `GRAPH_EXEC_SET`.
mod node {
    pub const KERNEL: u64 = 0;
    pub const COPY: u64 = 1;
    pub const SET: u64 = 2;
    pub const EMPTY: u64 = 3;
    pub const RECORD: u64 = 4;
    pub const WAIT: u64 = 5;
    pub const CHILD: u64 = 6;
    pub const HOST: u64 = 7;
    /// A child graph that moves into the node, instead of a copy.
    pub const MOVED_CHILD: u64 = 8;
    pub const MEM_OPS: u64 = 9;
    pub const ALLOC: u64 = 10;
    pub const FREE: u64 = 11;
    pub const CONDITION: u64 = 12;
}

/// `CUDA_KERNEL_NODE_PARAMS_v2`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct KernelNode {
    pub func: *mut c_void,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared: u32,
    pub each: *const *mut c_void,
    pub extra: *const *mut c_void,
    pub kernel: *mut c_void,
    pub ctx: *mut c_void,
}

/// `CUDA_KERNEL_NODE_PARAMS` (before CUDA 12), without the last two fields.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct OldKernelNode {
    pub func: *mut c_void,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared: u32,
    pub each: *const *mut c_void,
    pub extra: *const *mut c_void,
}

impl From<OldKernelNode> for KernelNode {
    fn from(old: OldKernelNode) -> Self {
        Self {
            func: old.func,
            grid: old.grid,
            block: old.block,
            shared: old.shared,
            each: old.each,
            extra: old.extra,
            kernel: std::ptr::null_mut(),
            ctx: std::ptr::null_mut(),
        }
    }
}

/// `CUDA_MEMSET_NODE_PARAMS`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct SetNode {
    pub address: u64,
    pub pitch: usize,
    pub value: u32,
    pub element: u32,
    pub width: usize,
    pub height: usize,
}

/// `CUDA_HOST_NODE_PARAMS`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct HostNode {
    pub function: Option<extern "C" fn(*mut c_void)>,
    pub data: *mut c_void,
}

/// `CUgraphNodeParams`: a type and the parameters of a node of that type.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct NodeParams {
    pub kind: i32,
    pub reserved: [i32; 3],
    pub body: [u64; 29],
    pub reserved_too: u64,
}

/// `CUDA_BATCH_MEM_OP_NODE_PARAMS`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MemOpsNode {
    pub ctx: *mut c_void,
    pub count: u32,
    pub items: *const c_void,
    pub flags: u32,
}

/// `CUDA_MEM_ALLOC_NODE_PARAMS`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct AllocNode {
    /// `CUmemPoolProps`
    pub pool: [u8; POOL],
    /// `CUmemAccessDesc` of each device that may use the memory.
    pub access: *const c_void,
    pub count: usize,
    pub size: usize,
    /// The driver's answer.
    pub address: u64,
}

const POOL: usize = 88;
/// Offset of the location in `CUmemPoolProps`.
const POOL_LOCATION: usize = 8;
/// Bytes of a `CUmemAccessDesc`.
const ACCESS: usize = 12;
/// Bytes of a `CUstreamBatchMemOpParams`.
const MEM_OP: usize = 48;
/// Graphs of one conditional node at most.
const MAX_BODIES: u32 = 4096;

/// `CUDA_CONDITIONAL_NODE_PARAMS`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ConditionNode {
    condition: u64,
    kind: u32,
    size: u32,
    /// The driver's answer: an array that lives as long as the node.
    graphs: *const u64,
    ctx: *mut c_void,
}

const _: () = assert!(size_of::<MemOpsNode>() == 32 && size_of::<AllocNode>() == 120);
const _: () = assert!(size_of::<ConditionNode>() == 32);

/// `CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE`; a copy is 0.
const MOVE: u64 = 1;
const _: () = assert!(size_of::<SetNode>() == 40);
const _: () = assert!(size_of::<NodeParams>() == 256 && size_of::<KernelNode>() <= 232);

/// Checked parameters of a node.
pub enum Content {
    Kernel(KernelNode),
    Copy { cuboid: Box<Cuboid>, ctx: u64, ids: [u64; 2], regions: Vec<Named> },
    Set(SetNode, u64),
    Empty,
    Record(u64),
    Wait(u64),
    Child { graph: u64, moved: bool },
    Host(u64),
    MemOps { ctx: u64, flags: u32, items: Vec<u8> },
    Alloc { client: &'static Client, pool: Vec<u8>, access: Vec<u8>, size: usize },
    Free(u64),
    Condition { condition: u64, kind: u32, ctx: u64, bodies: Vec<u64> },
}

/// Everything of a kernel's node but the values of its parameters.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    kernel: [usize; 3],
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
}

impl Content {
    /// Returns the shape of a kernel's node, for which the driver refuses no parameters.
    pub fn shape(&self) -> Option<Shape> {
        let Self::Kernel(node) = self else { return None };
        let ctx = if node.ctx.is_null() { crate::thread::current() as usize } else { node.ctx as usize };
        let kernel = [node.func as usize, node.kernel as usize, ctx];
        Some(Shape { kernel, grid: node.grid, block: node.block, shared: node.shared })
    }

    fn kind(&self) -> u64 {
        match self {
            Self::Kernel(_) => node::KERNEL,
            Self::Copy { .. } => node::COPY,
            Self::Set(..) => node::SET,
            Self::Empty => node::EMPTY,
            Self::Record(_) => node::RECORD,
            Self::Wait(_) => node::WAIT,
            Self::Child { moved: false, .. } => node::CHILD,
            Self::Child { moved: true, .. } => node::MOVED_CHILD,
            Self::Host(_) => node::HOST,
            Self::MemOps { .. } => node::MEM_OPS,
            Self::Alloc { .. } => node::ALLOC,
            Self::Free(_) => node::FREE,
            Self::Condition { .. } => node::CONDITION,
        }
    }

    pub fn mem_ops(params: *const MemOpsNode) -> Result<Self> {
        let MemOpsNode { ctx, count, items, flags } = take(params)?;
        let items = bytes(items, (count as usize).checked_mul(MEM_OP).ok_or(INVALID_VALUE)?)?.to_vec();
        Ok(Self::MemOps { ctx: crate::thread::named(ctx)?, flags, items })
    }

    pub fn alloc(params: *const AllocNode) -> Result<Self> {
        let AllocNode { pool, access, count, size, .. } = take(params)?;
        let access = bytes(access, count.checked_mul(ACCESS).ok_or(INVALID_VALUE)?)?;
        let (pool, client) = objects::locations(&pool, POOL, POOL_LOCATION)?;
        let access = if access.is_empty() {
            Vec::new()
        } else {
            let (access, other) = objects::locations(access, ACCESS, 0)?;
            client.same(other)?;
            access
        };
        Ok(Self::Alloc { client, pool, access, size })
    }

    pub fn condition(client: &Client, params: *const ConditionNode) -> Result<Self> {
        let ConditionNode { condition, kind, size, ctx, .. } = take(params)?;
        if !(1..=MAX_BODIES).contains(&size) {
            return Err(INVALID_VALUE);
        }
        let ctx = crate::thread::named(ctx)?;
        let bodies = (0..size).map(|_| client.mint(handle::GRAPH)).collect();
        Ok(Self::Condition { condition, kind, ctx, bodies })
    }

    pub fn copy(client: &'static Client, copy: *const Cuboid, ctx: *mut c_void) -> Result<Self> {
        let mut cuboid = take(copy)?;
        cuboid.resolve()?;
        cuboid.check()?;
        let ctx = crate::thread::named(ctx)?;
        let (ids, regions) = cuboid.name_regions(client)?;
        Ok(Self::Copy { cuboid: Box::new(cuboid), ctx, ids, regions })
    }

    /// A node that fills memory, all of it in one allocation.
    pub fn fill(set: SetNode, ctx: u64) -> Result<Self> {
        let row = set.width.checked_mul(set.element as usize).ok_or(INVALID_VALUE)?;
        if let Some(rows) = set.height.checked_sub(1) {
            let before = if rows == 0 { Some(0) } else { set.pitch.checked_mul(rows) };
            let len = before.and_then(|before| before.checked_add(row)).ok_or(INVALID_VALUE)?;
            ranges::check(set.address, len as u64)?;
        }
        Ok(Self::Set(set, ctx))
    }

    pub fn host(client: &'static Client, host: *const HostNode) -> Result<Self> {
        let host = take(host)?;
        let function = HostFunction::Plain(host.function.ok_or(INVALID_VALUE)?, host.data as usize);
        Ok(Self::Host(host_functions::register(client, function, None)?))
    }

    /// A node that records an event, which this process then no longer knows the last record of.
    pub fn record(event: u64) -> Result<Self> {
        let event = events::find(event)?;
        event.record_in_graphs();
        Ok(Self::Record(event.handle))
    }

    pub fn wait(event: u64) -> Result<Self> {
        Ok(Self::Wait(events::find(event)?.handle))
    }

    pub fn child(graph: *mut c_void, moved: bool) -> Result<Self> {
        let graph = graph as u64;
        clients::by_object(graph)?;
        if handle::kind(graph) != handle::GRAPH || moved && child_graphs().is_embedded(graph) {
            return Err(INVALID_VALUE);
        }
        Ok(Self::Child { graph, moved })
    }

    /// Reads the parameters of a node of any type (`CUgraphNodeType`).
    pub fn any(client: &'static Client, params: *const NodeParams) -> Result<Self> {
        let NodeParams { kind, reserved, body, reserved_too } = take(params)?;
        if reserved != [0; 3] || reserved_too != 0 {
            return Err(INVALID_VALUE);
        }
        let pointer = |at: usize| body[at] as *mut c_void;
        match kind {
            0 => Ok(Self::Kernel(take(body.as_ptr().cast())?)),
            // Flags, the context, then the copy of `cuGraphAddMemcpyNode`.
            1 => Self::copy(client, body[2..].as_ptr().cast(), pointer(1)),
            2 => Self::fill(take(body.as_ptr().cast())?, crate::thread::named(pointer(5))?),
            3 => Self::host(client, body.as_ptr().cast()),
            4 => match body[1] & u64::from(u32::MAX) {
                ownership @ 0..=MOVE => Self::child(pointer(0), ownership == MOVE),
                _ => Err(INVALID_VALUE),
            },
            5 => Ok(Self::Empty),
            6 => Self::wait(body[0]),
            7 => Self::record(body[0]),
            10 => Self::alloc(body.as_ptr().cast()),
            11 => Ok(Self::Free(body[0])),
            12 => Self::mem_ops(body.as_ptr().cast()),
            13 => Self::condition(client, body.as_ptr().cast()),
            // External semaphores.
            8 | 9 => Err(NOT_SUPPORTED),
            _ => Err(INVALID_VALUE),
        }
    }

    /// Returns what launches of a graph with this node use; `None` if its type uses nothing.
    pub fn uses(&self) -> Option<Uses> {
        match self {
            Self::Copy { regions, .. } => Some(Uses { regions: regions.clone(), ..Uses::default() }),
            Self::Record(event) => Some(Uses { recorded: vec![*event], ..Uses::default() }),
            Self::Wait(event) => Some(Uses { awaited: vec![*event], ..Uses::default() }),
            Self::Child { graph, .. } => {
                let mut sum = Uses::default();
                with_children(*graph).into_iter().for_each(|graph| sum.add(&graph_uses::of(graph)));
                Some(sum)
            }
            _ => None,
        }
    }

    /// Returns an error if the node names objects or memory of another client.
    fn check(&self, client: &Client) -> Result {
        let other = match self {
            Self::Set(set, ctx) => match route::elsewhere(client, set.address) {
                Some(elsewhere) => clients::by_object(elsewhere)?,
                None => clients::by_object(*ctx)?,
            },
            Self::Copy { ctx, .. } => clients::by_object(*ctx)?,
            Self::Record(event) | Self::Wait(event) => clients::by_object(*event)?,
            Self::Child { graph, .. } => clients::by_object(*graph)?,
            Self::MemOps { ctx, items, .. } => {
                for address in addresses(items) {
                    if let Some(elsewhere) = route::elsewhere(client, address) {
                        client.same(clients::by_object(elsewhere)?)?;
                    }
                }
                clients::by_object(*ctx)?
            }
            Self::Alloc { client, .. } => client,
            Self::Condition { ctx, .. } => clients::by_object(*ctx)?,
            Self::Free(address) => match route::elsewhere(client, *address) {
                Some(elsewhere) => clients::by_object(elsewhere)?,
                None => return Ok(()),
            },
            Self::Kernel(_) => match self.context() {
                0 => return Ok(()),
                ctx => clients::of_context(ctx)?.0,
            },
            Self::Empty | Self::Host(_) => return Ok(()),
        };
        client.same(other)
    }

    /// Returns the context of a kernel's node, which is the current one if the program names none,
    /// or 0; the driver ignores one beside a function.
    pub fn context(&self) -> u64 {
        match self {
            Self::Kernel(node) if node.func.is_null() && node.ctx.is_null() => thread::current(),
            Self::Kernel(node) if node.func.is_null() => node.ctx as u64,
            _ => 0,
        }
    }

    pub fn write(&self, client: &'static Client, w: &mut Writer<'_>) -> Result {
        self.check(client)?;
        w.word(self.kind());
        match self {
            Self::Kernel(kernel) => {
                let func = if kernel.func.is_null() { kernel.kernel } else { kernel.func };
                let function = functions::find(func as u64)?;
                let params = Params { each: kernel.each, extra: kernel.extra };
                params.check(&function)?;
                function.reach(client)?;
                params.name_memory(client, &function)?;
                w.word(function.handle);
                for dimension in kernel.grid.iter().chain(&kernel.block) {
                    w.word(u64::from(*dimension));
                }
                w.word(u64::from(kernel.shared));
                params.write(&function, w)?;
            }
            Self::Copy { cuboid, ctx, ids, .. } => {
                let words: Vec<u8> = cuboid.words(client).iter().flat_map(|w| w.to_le_bytes()).collect();
                w.bytes(&words);
                w.word(handle::local(*ctx));
                ids.iter().for_each(|id| w.word(*id));
            }
            Self::Set(set, ctx) => {
                mapped::named(client, set.address)?;
                let words = [
                    set.address,
                    set.pitch as u64,
                    u64::from(set.value) | u64::from(set.element) << 32,
                    set.width as u64,
                    set.height as u64,
                ];
                let words: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
                w.bytes(&words);
                w.word(handle::local(*ctx));
            }
            Self::Empty => {}
            Self::MemOps { ctx, flags, items } => {
                addresses(items).try_for_each(|address| mapped::named(client, address))?;
                w.word(handle::local(*ctx));
                w.word(u64::from(*flags));
                w.bytes(items);
            }
            Self::Alloc { pool, access, size, .. } => {
                w.bytes(pool);
                w.bytes(access);
                w.word(*size as u64);
            }
            Self::Free(address) => w.word(*address),
            Self::Condition { condition, kind, ctx, bodies } => {
                w.word(*condition);
                w.word(u64::from(*kind));
                w.word(handle::local(*ctx));
                w.bytes(&bodies.iter().flat_map(|body| body.to_le_bytes()).collect::<Vec<_>>());
            }
            Self::Record(object)
            | Self::Wait(object)
            | Self::Child { graph: object, .. }
            | Self::Host(object) => w.word(*object),
        }
        Ok(())
    }
}
/// Returns the addresses of waits for and writes of values.
fn addresses(items: &[u8]) -> impl Iterator<Item = u64> {
    items.chunks_exact(MEM_OP).map(|item| item[8..16].try_into().map_or(0, u64::from_le_bytes))
}

/// Locks the table of child graphs whose handles the program has.
pub fn child_graphs() -> MutexGuard<'static, ChildGraphs> {
    static CHILD_GRAPHS: LazyLock<Mutex<ChildGraphs>> = LazyLock::new(Mutex::default);
    CHILD_GRAPHS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns a graph and its child graphs whose handles the program has.
pub fn with_children(graph: u64) -> Vec<u64> {
    let mut graphs = child_graphs().below(graph);
    graphs.push(graph);
    graphs
}
