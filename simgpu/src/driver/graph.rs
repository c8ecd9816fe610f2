//! Graphs and the nodes they are made of.

use crate::driver::config;
use crate::driver::op::{Copy, Fill, Launch, Op};
use crate::driver::stream::{EVENTS, Point, Random, Recorded, Stream};
use crate::driver::submit;
use crate::errors::{self, INVALID_HANDLE, INVALID_VALUE, Result};
use crate::memory::Allocation;
use crate::registry::{Registry, handle};
use parking_lot::Mutex;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

pub use crate::driver::capture::{
    Capture, Capturing, capture_op, capturing, forbid_legacy, forbid_sync, forbid_unsafe,
};

pub static GRAPHS: Registry<Graph> = Registry::new();
pub static NODES: Registry<Node> = Registry::new();
pub static EXECS: Registry<Exec> = Registry::new();
pub static USER_OBJECTS: Registry<UserObject> = Registry::new();

/// A value of the program that graphs keep; its destructor runs after the last reference.
pub struct UserObject {
    pub references: Mutex<u64>,
    pub destroy: usize,
    pub data: usize,
}

impl UserObject {
    /// Drops references; after the last one the destructor runs, in a thread of its own.
    pub fn release(self: &Arc<Self>, count: u64) -> Result {
        let mut references = self.references.lock();
        *references = references.checked_sub(count).ok_or(INVALID_VALUE)?;
        if *references == 0 {
            let _ = USER_OBJECTS.remove(handle(self));
            let (destroy, data) = (self.destroy, self.data);
            std::thread::spawn(move || {
                let _inside = submit::in_callback();
                // SAFETY: the program gave this function for this purpose.
                unsafe { std::mem::transmute::<usize, unsafe extern "C" fn(usize)>(destroy)(data) };
            });
        }
        Ok(())
    }
}

/// References that a graph holds.
pub struct Held(pub Arc<UserObject>, pub u64);

impl Clone for Held {
    fn clone(&self) -> Self {
        *self.0.references.lock() += self.1;
        Held(self.0.clone(), self.1)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let _ = self.0.release(self.1);
    }
}

#[derive(Clone)]
pub enum NodeKind {
    Kernel(Launch),
    Copy(Copy),
    Fill(Fill),
    Host {
        func: usize,
        data: usize,
    },
    Child(Arc<Graph>),
    Empty,
    EventWait(usize),
    EventRecord(usize),
    /// Memory that the graph owns; a launch only notes that it is allocated.
    Alloc(Arc<GraphMemory>),
    Free(u64),
    MemOps(Vec<Op>),
    /// The value, the type, the graphs, and the array of their handles that the program got.
    Condition(Arc<Condition>, u32, Vec<Arc<Graph>>, Arc<[usize]>),
}

/// Memory of an allocation node, freed with the last graph that contains the node.
pub struct GraphMemory {
    pub allocation: Arc<Allocation>,
    /// Whether a launch has allocated it and no free has followed.
    pub live: AtomicBool,
}

static GRAPH_MEMORY: Mutex<Vec<Weak<GraphMemory>>> = Mutex::new(Vec::new());

impl GraphMemory {
    pub fn new(allocation: Arc<Allocation>) -> Arc<GraphMemory> {
        let new = Arc::new(GraphMemory { allocation, live: AtomicBool::new(false) });
        let mut known = GRAPH_MEMORY.lock();
        known.retain(|m| m.strong_count() > 0);
        known.push(Arc::downgrade(&new));
        new
    }

    /// Returns the memory of a graph at an address.
    pub fn find(at: u64) -> Option<Arc<GraphMemory>> {
        GRAPH_MEMORY.lock().iter().filter_map(Weak::upgrade).find(|m| m.allocation.base == at)
    }
}

impl Drop for GraphMemory {
    fn drop(&mut self) {
        if let Ok(d) = crate::driver::driver() {
            d.space.remove(self.allocation.base, |a| a.id == self.allocation.id);
        }
    }
}

/// The value that decides about a conditional node; device code cannot change it here.
pub struct Condition {
    pub id: u64,
    /// Value at each launch.
    pub value: u32,
}

pub static CONDITIONS: Mutex<Vec<Arc<Condition>>> = Mutex::new(Vec::new());

impl Condition {
    pub fn new(value: u32) -> Arc<Condition> {
        let new = Arc::new(Condition { id: next_id(), value });
        CONDITIONS.lock().push(new.clone());
        new
    }
}

impl NodeKind {
    /// `CUgraphNodeType`
    pub fn code(&self) -> u32 {
        match self {
            NodeKind::Kernel(_) => 0,
            NodeKind::Copy(_) => 1,
            NodeKind::Fill(_) => 2,
            NodeKind::Host { .. } => 3,
            NodeKind::Child(_) => 4,
            NodeKind::Empty => 5,
            NodeKind::EventWait(_) => 6,
            NodeKind::EventRecord(_) => 7,
            NodeKind::Alloc(_) => 10,
            NodeKind::Free(_) => 11,
            NodeKind::MemOps(_) => 12,
            NodeKind::Condition(..) => 13,
        }
    }

    /// The node that an entry of a stream becomes in a capture.
    pub fn from_op(op: &Op) -> Option<NodeKind> {
        Some(match op {
            Op::Kernel(l) => NodeKind::Kernel((**l).clone()),
            Op::Copy(c) => NodeKind::Copy((**c).clone()),
            Op::Fill(f) => NodeKind::Fill(f.clone()),
            Op::Host { func, data } => NodeKind::Host { func: *func, data: *data },
            Op::Empty => NodeKind::Empty,
            Op::Wait { .. } | Op::Write { .. } => NodeKind::MemOps(vec![op.clone()]),
            _ => return None,
        })
    }
}

pub struct Node {
    pub id: u64,
    pub kind: Mutex<NodeKind>,
    pub after: Mutex<Vec<Arc<Node>>>,
    /// Launch attributes by id.
    pub attributes: Mutex<HashMap<u32, [u64; 8]>>,
    pub graph: Weak<Graph>,
}

pub struct Graph {
    pub id: u64,
    pub nodes: Mutex<Vec<Arc<Node>>>,
    /// Maps original nodes to their copies, if this is a clone.
    pub clones: Mutex<HashMap<usize, Arc<Node>>>,
    /// User objects that live as long as the graph.
    pub objects: Mutex<Vec<Held>>,
}

fn next_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl Graph {
    pub fn new() -> Arc<Graph> {
        Arc::new(Graph {
            id: next_id(),
            nodes: Mutex::default(),
            clones: Mutex::default(),
            objects: Mutex::default(),
        })
    }

    pub fn add(self: &Arc<Self>, kind: NodeKind, after: Vec<Arc<Node>>) -> Result<Arc<Node>> {
        if after.iter().any(|n| n.graph.as_ptr() != Arc::as_ptr(self)) {
            return Err(INVALID_VALUE);
        }
        let mut seen = HashSet::new();
        let unique = after.into_iter().filter(|n| seen.insert(handle(n))).collect();
        let node = Arc::new(Node {
            id: next_id(),
            kind: Mutex::new(kind),
            after: Mutex::new(unique),
            attributes: Mutex::default(),
            graph: Arc::downgrade(self),
        });
        NODES.insert(node.clone());
        self.nodes.lock().push(node.clone());
        Ok(node)
    }

    pub fn remove(&self, node: &Arc<Node>) {
        self.nodes.lock().retain(|n| !Arc::ptr_eq(n, node));
        for n in self.nodes.lock().iter() {
            n.after.lock().retain(|a| !Arc::ptr_eq(a, node));
        }
        let _ = NODES.remove(handle(node));
    }

    pub fn duplicate(&self) -> Arc<Graph> {
        let copy = Graph::new();
        let mut clones: HashMap<usize, Arc<Node>> = HashMap::new();
        let nodes = self.nodes.lock().clone();
        for n in &nodes {
            let kind = snapshot(&n.kind.lock());
            if let Ok(node) = copy.add(kind, Vec::new()) {
                *node.attributes.lock() = n.attributes.lock().clone();
                clones.insert(handle(n), node);
            }
        }
        for n in &nodes {
            let after = n.after.lock().iter().filter_map(|a| clones.get(&handle(a)).cloned()).collect();
            *clones[&handle(n)].after.lock() = after;
        }
        *copy.clones.lock() = clones;
        *copy.objects.lock() = self.objects.lock().clone();
        copy
    }

    /// Returns all edges as (from, to).
    pub fn edges(&self) -> Vec<(usize, usize)> {
        let nodes = self.nodes.lock();
        nodes
            .iter()
            .flat_map(|n| n.after.lock().iter().map(|a| (handle(a), handle(n))).collect::<Vec<_>>())
            .collect()
    }

    /// Returns the nodes in an order that respects dependencies; `None` if there is a cycle.
    ///
    /// CUDA does not specify the order of independent nodes, so it is drawn at random.
    pub fn sorted(&self) -> Option<Vec<Arc<Node>>> {
        let mut rest = self.nodes.lock().clone();
        let mut random = Random::new(config().seed ^ self.id);
        let mut out: Vec<Arc<Node>> = Vec::with_capacity(rest.len());
        let mut placed = HashSet::new();
        while !rest.is_empty() {
            let ready: Vec<usize> = (0..rest.len())
                .filter(|&i| rest[i].after.lock().iter().all(|a| placed.contains(&handle(a))))
                .collect();
            if ready.is_empty() {
                return None;
            }
            // Large graphs stay fast by placing a whole layer at a time, in shuffled order.
            let mut layer: Vec<Arc<Node>> = ready.iter().rev().map(|&i| rest.swap_remove(i)).collect();
            for i in (1..layer.len()).rev() {
                layer.swap(i, (random.draw() % (i as u64 + 1)) as usize);
            }
            placed.extend(layer.iter().map(handle));
            out.append(&mut layer);
        }
        Some(out)
    }

    /// Removes the graph and its nodes from the tables of handles.
    pub fn destroy(self: &Arc<Self>) {
        for n in self.nodes.lock().drain(..) {
            match &*n.kind.lock() {
                NodeKind::Child(g) => g.destroy(),
                NodeKind::Condition(_, _, bodies, _) => bodies.iter().for_each(|body| body.destroy()),
                _ => {}
            }
            let _ = NODES.remove(handle(&n));
        }
        let _ = GRAPHS.remove(handle(self));
    }
}

/// One node of an executable graph.
#[derive(Clone)]
pub struct Step {
    /// Handle of the original node.
    pub node: usize,
    pub kind: NodeKind,
    pub enabled: bool,
}

pub struct Exec {
    pub id: u64,
    pub flags: u64,
    pub steps: Mutex<Vec<Step>>,
    shape: Shape,
    /// Handles of the original nodes by position; an update does not change them.
    originals: Vec<usize>,
    _objects: Vec<Held>,
}

/// The properties that an update cannot change: node types by position, and edges.
#[derive(PartialEq)]
struct Shape {
    types: Vec<u32>,
    edges: Vec<(usize, usize)>,
}

fn shape(graph: &Graph) -> Shape {
    let nodes = graph.nodes.lock();
    let position: HashMap<usize, usize> = nodes.iter().enumerate().map(|(i, n)| (handle(n), i)).collect();
    let types: Vec<u32> = nodes.iter().map(|n| n.kind.lock().code()).collect();
    let mut edges = Vec::new();
    for (i, n) in nodes.iter().enumerate() {
        edges.extend(n.after.lock().iter().filter_map(|a| position.get(&handle(a)).map(|p| (*p, i))));
    }
    edges.sort_unstable();
    Shape { types, edges }
}

fn snapshot(kind: &NodeKind) -> NodeKind {
    match kind {
        NodeKind::Child(g) => NodeKind::Child(g.duplicate()),
        NodeKind::Condition(condition, kind, bodies, _) => {
            let bodies = bodies.iter().map(|b| b.duplicate()).collect();
            NodeKind::Condition(condition.clone(), *kind, bodies, Arc::default())
        }
        other => other.clone(),
    }
}

impl Exec {
    pub fn new(graph: &Arc<Graph>, flags: u64) -> Result<Arc<Exec>> {
        let sorted = graph.sorted().ok_or(INVALID_VALUE)?;
        let steps = sorted
            .iter()
            .map(|n| Step { node: handle(n), kind: snapshot(&n.kind.lock()), enabled: true })
            .collect();
        let exec = Arc::new(Exec {
            id: next_id(),
            flags,
            steps: Mutex::new(steps),
            shape: shape(graph),
            originals: graph.nodes.lock().iter().map(handle).collect(),
            _objects: graph.objects.lock().clone(),
        });
        EXECS.insert(exec.clone());
        Ok(exec)
    }

    /// Changes the parameters of one node.
    pub fn set(&self, node: usize, change: impl FnOnce(&mut NodeKind) -> Result) -> Result {
        let mut steps = self.steps.lock();
        change(&mut steps.iter_mut().find(|s| s.node == node).ok_or(INVALID_HANDLE)?.kind)
    }

    /// Adopts the parameters of a graph of the same shape, or returns the
    /// `CUgraphExecUpdateResult`.
    pub fn update(&self, graph: &Arc<Graph>) -> std::result::Result<(), u32> {
        let new = shape(graph);
        if new.types.len() != self.shape.types.len() || new.edges != self.shape.edges {
            return Err(2);
        }
        if new != self.shape {
            return Err(3);
        }
        let sorted = graph.sorted().ok_or(1u32)?;
        let nodes: HashMap<usize, usize> =
            graph.nodes.lock().iter().map(handle).zip(self.originals.iter().copied()).collect();
        *self.steps.lock() = sorted
            .iter()
            .map(|n| Step { node: nodes[&handle(n)], kind: snapshot(&n.kind.lock()), enabled: true })
            .collect();
        Ok(())
    }

    pub fn launch(&self, stream: &Arc<Stream>) -> Result {
        // CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH
        let mut plan = Plan { auto_free: self.flags & 1 != 0, ..Plan::default() };
        for step in self.steps.lock().iter().filter(|s| s.enabled) {
            plan.add(&step.kind)?;
        }
        let point = submit::submit_after(stream, Op::Sequence(Arc::new(plan.ops)), plan.after)?;
        if let Some(point) = point {
            for (event, time) in plan.recorded {
                if let Some(e) = EVENTS.find(event) {
                    let mut state = e.state.lock();
                    state.captured = None;
                    state.recorded = Some(Recorded { point: point.clone(), time });
                }
            }
        }
        Ok(())
    }
}

/// The operations that one launch of a graph submits to a stream.
#[derive(Default)]
struct Plan {
    auto_free: bool,
    ops: Vec<Op>,
    after: Vec<Point>,
    recorded: Vec<(usize, Arc<OnceLock<std::time::Instant>>)>,
}

impl Plan {
    fn add_all(&mut self, graph: &Graph) -> Result {
        for n in graph.sorted().ok_or(INVALID_VALUE)? {
            let kind = n.kind.lock().clone();
            self.add(&kind)?;
        }
        Ok(())
    }

    fn add(&mut self, kind: &NodeKind) -> Result {
        match kind {
            NodeKind::Kernel(l) => self.ops.push(Op::Kernel(Arc::new(l.clone()))),
            NodeKind::Copy(c) => self.ops.push(Op::Copy(Arc::new(c.clone()))),
            NodeKind::Fill(f) => self.ops.push(Op::Fill(f.clone())),
            NodeKind::Host { func, data } => self.ops.push(Op::Host { func: *func, data: *data }),
            NodeKind::MemOps(list) => self.ops.extend(list.iter().cloned()),
            NodeKind::Empty => {}
            NodeKind::Alloc(memory) => {
                if memory.live.swap(true, Ordering::SeqCst) && !self.auto_free {
                    return Err(INVALID_VALUE);
                }
            }
            NodeKind::Free(at) => {
                if let Some(memory) = GraphMemory::find(*at) {
                    memory.live.store(false, Ordering::SeqCst);
                }
            }
            NodeKind::Child(g) => self.add_all(g)?,
            NodeKind::Condition(condition, kind, bodies, _) => {
                let body = match (kind, condition.value) {
                    // CU_GRAPH_COND_TYPE_IF, _WHILE and _SWITCH
                    (0, value) => bodies.get(usize::from(value == 0)),
                    (1, 0) => None,
                    (2, value) => bodies.get(value as usize),
                    // Without device code that changes the value, the loop would have no end.
                    _ => return Err(errors::NOT_SUPPORTED),
                };
                if let Some(body) = body {
                    self.add_all(body)?;
                }
            }
            NodeKind::EventWait(e) => {
                if let Some(r) = EVENTS.get(*e)?.state.lock().recorded.clone() {
                    self.after.push(r.point);
                }
            }
            NodeKind::EventRecord(e) => {
                let time = Arc::new(OnceLock::new());
                self.recorded.push((*e, time.clone()));
                self.ops.push(Op::Record(time));
            }
        }
        Ok(())
    }
}
