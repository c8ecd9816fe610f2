//! Host memory and events that nodes of graphs use, by graph.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::regions::{self, Named};
use crate::status::Result;

/// Things of the program that nodes use.
#[derive(Clone, Default)]
pub struct Uses {
    /// Memory that copies name.
    pub regions: Vec<Named>,
    /// Handles of events that launches record.
    pub recorded: Vec<u64>,
    /// Handles of events that launches wait for.
    pub awaited: Vec<u64>,
}

impl Uses {
    /// Adds what other nodes use.
    pub fn add(&mut self, other: &Self) {
        *self = Self::sum([&*self, other]);
    }

    /// Returns what several nodes use, each thing once.
    fn sum<'a>(parts: impl IntoIterator<Item = &'a Self>) -> Self {
        let mut sum = Self::default();
        for part in parts {
            sum.regions.extend_from_slice(&part.regions);
            sum.recorded.extend_from_slice(&part.recorded);
            sum.awaited.extend_from_slice(&part.awaited);
        }
        sum.regions.sort_by_key(|region| region.id());
        sum.regions.dedup_by(|a, b| a.same(b));
        for events in [&mut sum.recorded, &mut sum.awaited] {
            events.sort_unstable();
            events.dedup();
        }
        sum
    }

    fn is_empty(&self) -> bool {
        self.regions.is_empty() && self.recorded.is_empty() && self.awaited.is_empty()
    }
}

/// Uses of one graph by node; those of nodes that a capture made have the key [`CAPTURED`].
type ByNode = HashMap<u64, Uses>;

/// Key of all nodes whose handles the library does not know; no node has this handle.
const CAPTURED: u64 = 0;

/// Uses of graphs and executable graphs, by handle; a graph without any has no entry.
static BY_GRAPH: Mutex<Option<HashMap<u64, ByNode>>> = Mutex::new(None);
/// Graph of each node that the library has returned, for changes of a node.
static NODES: Mutex<Option<Nodes>> = Mutex::new(None);

#[derive(Default)]
struct Nodes {
    graph_of: HashMap<u64, u64>,
    of_graph: HashMap<u64, HashSet<u64>>,
}

impl Nodes {
    fn insert(&mut self, node: u64, graph: u64) {
        if self.graph_of.get(&node) != Some(&graph) {
            self.remove(node);
            self.graph_of.insert(node, graph);
            self.of_graph.entry(graph).or_default().insert(node);
        }
    }

    fn remove(&mut self, node: u64) -> Option<u64> {
        let graph = self.graph_of.remove(&node)?;
        if let Some(nodes) = self.of_graph.get_mut(&graph) {
            nodes.remove(&node);
        }
        Some(graph)
    }

    fn remove_graph(&mut self, graph: u64) {
        for node in self.of_graph.remove(&graph).into_iter().flatten() {
            self.graph_of.remove(&node);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Notes what a new node of a graph uses.
///
/// The driver may give it the handle of a destroyed node whose clone is in this graph.
pub fn add(graph: u64, node: u64, uses: Uses) {
    if !uses.is_empty() {
        let mut graphs = lock(&BY_GRAPH);
        let nodes = graphs.get_or_insert_default().entry(graph).or_default();
        if let Some(before) = nodes.insert(node, uses) {
            nodes.entry(CAPTURED).or_default().add(&before);
        }
    }
}

/// Notes what a node of a graph uses, in place of what it used before.
///
/// An executable graph has the nodes of its graph.
pub fn set(graph: u64, node: u64, uses: Uses) {
    let mut graphs = lock(&BY_GRAPH);
    if !uses.is_empty() {
        graphs.get_or_insert_default().entry(graph).or_default().insert(node, uses);
    } else if let Some(nodes) = graphs.as_mut().and_then(|graphs| graphs.get_mut(&graph)) {
        nodes.remove(&node);
    }
}

/// Notes what the nodes use that a capture has added to a graph.
pub fn add_captured(graph: u64, uses: &Uses) {
    if !uses.is_empty() {
        let mut graphs = lock(&BY_GRAPH);
        let nodes = graphs.get_or_insert_default().entry(graph).or_default();
        nodes.entry(CAPTURED).or_default().add(uses);
    }
}

/// Lets a graph use what these graphs use, and no more what it used before.
pub fn replace(graph: u64, sources: &[u64]) {
    let mut graphs = lock(&BY_GRAPH);
    let Some(graphs) = graphs.as_mut() else { return };
    let mut sum = ByNode::new();
    for (node, uses) in sources.iter().filter_map(|source| graphs.get(source)).flatten() {
        sum.entry(*node).or_default().add(uses);
    }
    if sum.is_empty() {
        graphs.remove(&graph)
    } else {
        graphs.insert(graph, sum)
    };
}

/// Returns what all nodes of a graph use.
pub fn of(graph: u64) -> Uses {
    let graphs = lock(&BY_GRAPH);
    let nodes = graphs.as_ref().and_then(|graphs| graphs.get(&graph));
    Uses::sum(nodes.into_iter().flat_map(|nodes| nodes.values()))
}

/// Returns what a node of a graph uses, or may use.
pub fn of_node(graph: u64, node: u64) -> Uses {
    let graphs = lock(&BY_GRAPH);
    let nodes = graphs.as_ref().and_then(|graphs| graphs.get(&graph));
    Uses::sum(nodes.into_iter().flat_map(|nodes| [CAPTURED, node].map(|node| nodes.get(&node))).flatten())
}

/// Notes the handle of a clone's node, whose uses were those of the original.
pub fn rename(graph: u64, original: u64, node: u64) {
    if let Some(nodes) = lock(&BY_GRAPH).as_mut().and_then(|graphs| graphs.get_mut(&graph))
        && let Some(uses) = nodes.remove(&original)
    {
        nodes.insert(node, uses);
    }
}

/// Removes a destroyed graph.
pub fn forget_graph(graph: u64) {
    if let Some(graphs) = lock(&BY_GRAPH).as_mut() {
        graphs.remove(&graph);
    }
    if let Some(nodes) = lock(&NODES).as_mut() {
        nodes.remove_graph(graph);
    }
}

/// Removes a destroyed node.
pub fn forget_node(node: u64) {
    let graph = lock(&NODES).as_mut().and_then(|nodes| nodes.remove(node));
    if let Some(graph) = graph {
        set(graph, node, Uses::default());
    }
}

/// Notes that a node belongs to a graph.
pub fn node_of(node: u64, graph: u64) {
    lock(&NODES).get_or_insert_default().insert(node, graph);
}

/// Returns the graph of a node.
pub fn graph_of(node: u64) -> Option<u64> {
    lock(&NODES).as_ref().and_then(|nodes| nodes.graph_of.get(&node).copied())
}

/// Sends the program's changes in memory that an executable graph's copies name.
///
/// The program may have freed memory of nodes that it has changed since.
pub fn upload(uses: &Uses) -> Result {
    if regions::any() { regions::upload_for_graph(&uses.regions) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    fn awaits(event: u64) -> Uses {
        Uses { awaited: vec![event], ..Uses::default() }
    }

    fn awaited(graph: u64) -> Vec<u64> {
        of(graph).awaited
    }

    #[test]
    fn node_uses_what_it_was_set_to_last() {
        let [graph, exec, clone] = [0x1_0001, 0x1_0002, 0x1_0003];
        set(graph, 11, awaits(1));
        set(graph, 12, awaits(2));
        add_captured(graph, &awaits(3));
        replace(exec, &[graph]);
        replace(clone, &[graph]);
        set(exec, 11, awaits(4));
        set(graph, 12, Uses::default());
        assert_eq!(awaited(graph), [1, 3]);
        assert_eq!(awaited(exec), [2, 3, 4], "an executable graph keeps what its graph had");
        rename(clone, 12, 22);
        set(clone, 22, awaits(5));
        assert_eq!(awaited(clone), [1, 3, 5]);
        replace(exec, &[clone]);
        assert_eq!(awaited(exec), [1, 3, 5], "an update");
        [graph, exec, clone].into_iter().for_each(forget_graph);
        assert!(awaited(exec).is_empty());
    }

    #[test]
    fn handle_of_a_clones_original_may_come_again() {
        let [graph, clone] = [0x3_0001, 0x3_0002];
        add(graph, 0x3_1111, awaits(1));
        replace(clone, &[graph]);
        add(clone, 0x3_1111, awaits(2));
        assert_eq!(awaited(clone), [1, 2]);
    }

    #[test]
    fn destroyed_node_uses_nothing() {
        let graph = 0x2_0001;
        node_of(0x2_1111, graph);
        set(graph, 0x2_1111, awaits(1));
        assert_eq!(graph_of(0x2_1111), Some(graph));
        forget_node(0x2_1111);
        assert!(graph_of(0x2_1111).is_none() && awaited(graph).is_empty());
    }

    #[test]
    fn end_of_a_graph_costs_its_own_nodes() {
        const MANY: u64 = 0x4_0000_0000;
        (0..200_000).for_each(|node| node_of(MANY + node, MANY));
        let since = Instant::now();
        for graph in 1..20_000 {
            node_of(2 * MANY, MANY + graph);
            forget_graph(MANY + graph);
        }
        assert!(since.elapsed() < Duration::from_secs(5), "{:?}", since.elapsed());
        assert_eq!((graph_of(2 * MANY), graph_of(MANY)), (None, Some(MANY)));
        forget_graph(MANY);
        assert_eq!(graph_of(MANY), None);
    }
}
