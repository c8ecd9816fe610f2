//! Questions about graphs: their nodes and edges, a node's neighbours, a drawing.

use std::ffi::{c_char, c_void};

use gpusession_proto::frame::{ability, op};

use crate::client::{Client, string, word};
use crate::entry::{INVALID_VALUE, OPERATING_SYSTEM, Result, UNKNOWN, driver, give, name, take};
use crate::{clients, graph_uses};

/// Selections of `GRAPH_NODES`.
mod which {
    pub const ALL: u64 = 0;
    pub const ROOTS: u64 = 1;
    pub const EDGES: u64 = 2;
    /// Nodes that a node depends on.
    pub const BEFORE: u64 = 3;
    /// Nodes that depend on a node.
    pub const AFTER: u64 = 4;
    /// Added if the answer contains the data of the edges.
    pub const WITH_DATA: u64 = 0x100;
}

/// Arrays of the program for an answer; each may be null.
struct Arrays {
    from: *mut u64,
    to: *mut u64,
    /// A `CUgraphEdgeData` for each edge.
    data: *mut u64,
}

impl Arrays {
    fn of(from: *mut u64) -> Self {
        Self { from, to: std::ptr::null_mut(), data: std::ptr::null_mut() }
    }
}

/// Writes nodes to the program's arrays; `about` is a graph, or a node for its neighbours.
///
/// A null array requests the count.
fn nodes(
    client: &Client,
    about: u64,
    graph: Option<u64>,
    which: u64,
    arrays: &Arrays,
    count: *mut usize,
) -> Result {
    let most = if arrays.from.is_null() { 0 } else { take(count)? };
    if count.is_null() {
        return Err(INVALID_VALUE);
    }
    // A worker without this ability refuses a larger number.
    let most = if client.abilities & ability::LONG_BODIES == 0 { most.min(1 << 20) } else { most };
    let with_data = !arrays.data.is_null();
    let reply = client.call(op::GRAPH_NODES, |w| {
        w.word(about);
        w.word(which | if with_data { which::WITH_DATA } else { 0 });
        w.word(most as u64);
    })?;
    let mut r = reply.reader();
    let (all, given) = (word(&mut r)?, word(&mut r)? as usize);
    let put = |array: *mut u64, i: usize, value: u64| {
        if !array.is_null() {
            // SAFETY: by the call's contract each array has `most` elements, which bounds `i`.
            unsafe { array.add(i).write(value) };
        }
    };
    let known = |node| {
        if let Some(graph) = graph {
            graph_uses::node_of(node, graph);
        }
        node
    };
    for i in 0..given.min(most) {
        put(arrays.from, i, known(client.name(word(&mut r)?)));
        if which == which::EDGES {
            put(arrays.to, i, known(client.name(word(&mut r)?)));
        }
        if with_data {
            put(arrays.data, i, word(&mut r)?);
        }
    }
    // As the driver does, clears what the answer does not fill.
    for i in given..most {
        put(arrays.from, i, 0);
        put(arrays.to, i, 0);
    }
    give(count, if arrays.from.is_null() { all as usize } else { given })
}

fn of_graph(graph: *mut c_void, which: u64, arrays: &Arrays, count: *mut usize) -> Result {
    let graph = graph as u64;
    nodes(clients::by_object(graph)?, graph, Some(graph), which, arrays, count)
}

fn edges(graph: *mut c_void, arrays: &Arrays, count: *mut usize) -> Result {
    if arrays.from.is_null() != arrays.to.is_null() {
        return Err(INVALID_VALUE);
    }
    of_graph(graph, which::EDGES, arrays, count)
}

fn of_node(node: u64, which: u64, arrays: &Arrays, count: *mut usize) -> Result {
    let client = clients::by_object(node)?;
    if node == 0 {
        return Err(INVALID_VALUE);
    }
    nodes(client, client.own(node), graph_uses::graph_of(node), which, arrays, count)
}

/// Fetches the driver's drawing of a graph.
fn drawing(client: &Client, graph: u64, flags: u32) -> Result<Vec<u8>> {
    let mut text = Vec::new();
    loop {
        let reply = client.call(op::GRAPH_DRAW, |w| {
            w.word(graph);
            w.word(u64::from(flags));
            w.word(text.len() as u64);
        })?;
        let mut r = reply.reader();
        let (len, part) = (word(&mut r)?, string(&mut r)?);
        text.extend_from_slice(part);
        match text.len() as u64 {
            so_far if so_far == len => return Ok(text),
            so_far if so_far > len || part.is_empty() => return Err(UNKNOWN),
            _ => {}
        }
    }
}

driver! {
    fn cuGraphGetNodes(graph: *mut c_void, out: *mut u64, count: *mut usize) {
        of_graph(graph, which::ALL, &Arrays::of(out), count)
    }

    fn cuGraphGetRootNodes(graph: *mut c_void, out: *mut u64, count: *mut usize) {
        of_graph(graph, which::ROOTS, &Arrays::of(out), count)
    }

    fn cuGraphGetEdges(graph: *mut c_void, from: *mut u64, to: *mut u64, count: *mut usize) {
        edges(graph, &Arrays { from, to, data: std::ptr::null_mut() }, count)
    }

    fn cuGraphGetEdges_v2(graph: *mut c_void, from: *mut u64, to: *mut u64, data: *mut u64, count: *mut usize) {
        edges(graph, &Arrays { from, to, data }, count)
    }

    fn cuGraphNodeGetDependencies(node: u64, out: *mut u64, count: *mut usize) {
        of_node(node, which::BEFORE, &Arrays::of(out), count)
    }

    fn cuGraphNodeGetDependencies_v2(node: u64, out: *mut u64, data: *mut u64, count: *mut usize) {
        of_node(node, which::BEFORE, &Arrays { data, ..Arrays::of(out) }, count)
    }

    fn cuGraphNodeGetDependentNodes(node: u64, out: *mut u64, count: *mut usize) {
        of_node(node, which::AFTER, &Arrays::of(out), count)
    }

    fn cuGraphNodeGetDependentNodes_v2(node: u64, out: *mut u64, data: *mut u64, count: *mut usize) {
        of_node(node, which::AFTER, &Arrays { data, ..Arrays::of(out) }, count)
    }

    fn cuGraphNodeGetContainingGraph(node: u64, graph: *mut *mut c_void) {
        clients::by_object(node)?;
        give(graph, graph_uses::graph_of(node).ok_or(INVALID_VALUE)? as *mut c_void)
    }

    fn cuGraphDebugDotPrint(graph: *mut c_void, path: *const c_char, flags: u32) {
        let client = clients::by_object(graph as u64)?;
        let path = name(path)?.to_str().map_err(|_| INVALID_VALUE)?;
        let text = drawing(client, graph as u64, flags)?;
        std::fs::write(path, text).map_err(|_| OPERATING_SYSTEM)
    }
}
