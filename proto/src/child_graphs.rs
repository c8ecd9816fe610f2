//! Graphs that live inside a node of another graph.
//!
//! Client and worker both record them. The handle of such a graph ends with the node or with the
//! graph around it; until then no call may destroy it.

use std::collections::HashMap;

/// Handles of embedded graphs, each with its parent graph and its node there.
#[derive(Debug, Default)]
pub struct ChildGraphs {
    parents: HashMap<u64, (u64, u64)>,
}

impl ChildGraphs {
    /// Records that `child` lives in `node` of `parent`.
    pub fn insert(&mut self, child: u64, parent: u64, node: u64) {
        self.parents.insert(child, (parent, node));
    }

    /// Returns `true` if the graph lives in a node of another one.
    pub fn is_embedded(&self, graph: u64) -> bool {
        self.parents.contains_key(&graph)
    }

    /// Returns the graph that lives in a node, if it has a handle.
    pub fn of_node(&self, node: u64) -> Option<u64> {
        self.parents.iter().find(|(_, (_, at))| *at == node).map(|(child, _)| *child)
    }

    /// Returns all graphs below one, at any depth.
    pub fn below(&self, graph: u64) -> Vec<u64> {
        let mut found = Vec::new();
        let mut next = vec![graph];
        while let Some(parent) = next.pop() {
            for (child, _) in self.parents.iter().filter(|(_, (of, _))| *of == parent) {
                // A hostile client may describe a circle.
                if !found.contains(child) {
                    found.push(*child);
                    next.push(*child);
                }
            }
        }
        found
    }

    /// Forgets and returns all graphs below a destroyed graph.
    pub fn destroy_graph(&mut self, graph: u64) -> Vec<u64> {
        let gone = self.below(graph);
        for child in &gone {
            self.parents.remove(child);
        }
        gone
    }

    /// Forgets and returns the graphs in a destroyed node, and all graphs below them.
    pub fn destroy_node(&mut self, node: u64) -> Vec<u64> {
        let mut gone = Vec::new();
        // A conditional node has several.
        while let Some(child) = self.of_node(node) {
            gone.extend(self.destroy_graph(child));
            self.parents.remove(&child);
            gone.push(child);
        }
        gone
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn three_levels() -> ChildGraphs {
        let mut graphs = ChildGraphs::default();
        graphs.insert(2, 1, 100);
        graphs.insert(3, 2, 200);
        graphs.insert(4, 1, 101);
        graphs
    }

    #[test]
    fn destroying_a_graph_ends_all_graphs_below_it() {
        let mut graphs = three_levels();
        let mut gone = graphs.destroy_graph(1);
        gone.sort_unstable();
        assert_eq!(gone, [2, 3, 4]);
        assert!(!graphs.is_embedded(3));
    }

    #[test]
    fn destroying_a_node_ends_its_graph_and_those_below() {
        let mut graphs = three_levels();
        let mut gone = graphs.destroy_node(100);
        gone.sort_unstable();
        assert_eq!(gone, [2, 3]);
        assert!(graphs.is_embedded(4));
        assert!(graphs.destroy_node(100).is_empty());
    }

    #[test]
    fn a_node_may_have_several_graphs() {
        let mut graphs = three_levels();
        graphs.insert(5, 1, 100);
        let mut gone = graphs.destroy_node(100);
        gone.sort_unstable();
        assert_eq!(gone, [2, 3, 5]);
    }

    #[test]
    fn a_circle_ends() {
        let mut graphs = ChildGraphs::default();
        graphs.insert(1, 2, 100);
        graphs.insert(2, 1, 101);
        assert_eq!(graphs.below(1).len(), 2);
        assert_eq!(graphs.destroy_graph(1).len(), 2);
    }
}
