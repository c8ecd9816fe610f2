//! Graphs of a program: captured, or built node by node.

use super::{Run, host_function};
use crate::driver::{Copy3D, FillNode, Handle, HostNode, KernelNode};
use crate::program::{Build, Node, Plane, Work};
use std::ptr::{null, null_mut};

impl Run<'_> {
    pub(super) fn instantiate(&self, number: usize, build: Build, nodes: &[Node]) -> Handle {
        let driver = &self.device.driver;
        let graph = self.build(number, build, nodes);
        let mut exec = null_mut();
        // SAFETY: the graph is live, and the pointer is a local.
        unsafe {
            let result = (driver.cuGraphInstantiateWithFlags)(&raw mut exec, graph, 0);
            self.note(number, "cuGraphInstantiate", result);
            self.note(number, "cuGraphDestroy", (driver.cuGraphDestroy)(graph));
        }
        exec
    }

    pub(super) fn build(&self, number: usize, build: Build, nodes: &[Node]) -> Handle {
        let driver = &self.device.driver;
        let note = |name, result| self.note(number, name, result);
        // SAFETY: handles are live, and pointers are locals of the right types.
        unsafe {
            match build {
                Build::Capture { mode, stream } => self.capture(number, mode, self.streams[stream], nodes),
                Build::Nodes => self.add_nodes(number, nodes),
                Build::Clone => {
                    let original = self.add_nodes(number, nodes);
                    let mut clone = null_mut();
                    note("cuGraphClone", (driver.cuGraphClone)(&raw mut clone, original));
                    note("cuGraphDestroy", (driver.cuGraphDestroy)(original));
                    clone
                }
                Build::Child => {
                    let child = self.add_nodes(number, nodes);
                    let (mut graph, mut node) = (null_mut(), null_mut());
                    note("cuGraphCreate", (driver.cuGraphCreate)(&raw mut graph, 0));
                    let result = (driver.cuGraphAddChildGraphNode)(&raw mut node, graph, null(), 0, child);
                    note("cuGraphAddChildGraphNode", result);
                    note("cuGraphDestroy", (driver.cuGraphDestroy)(child));
                    graph
                }
            }
        }
    }

    /// Captures nodes: each lane is a stream, and events lead from lane to lane.
    fn capture(&self, number: usize, mode: u32, first: Handle, nodes: &[Node]) -> Handle {
        let driver = &self.device.driver;
        let note = |name, result| self.note(number, name, result);
        let lanes = nodes.iter().map(|node| node.lane).max().unwrap_or(0) + 1;
        let event = || {
            let mut event = null_mut();
            // SAFETY: the pointer is a local of the right type.
            note("cuEventCreate", unsafe { (driver.cuEventCreate)(&raw mut event, 2) });
            event
        };
        let mut graph = null_mut();
        // SAFETY: handles are live, and pointers are locals of the right types.
        unsafe {
            let mut streams = vec![first];
            for _ in 1..lanes {
                let mut stream = null_mut();
                note("cuStreamCreate", (driver.cuStreamCreate)(&raw mut stream, 1));
                streams.push(stream);
            }
            let mut events: Vec<Handle> = nodes.iter().map(|_| event()).collect();
            let fork = event();
            note("cuStreamBeginCapture", (driver.cuStreamBeginCapture_v2)(first, mode));
            note("cuEventRecord", (driver.cuEventRecord)(fork, first));
            for stream in &streams[1..] {
                note("cuStreamWaitEvent", (driver.cuStreamWaitEvent)(*stream, fork, 0));
            }
            for (node, event) in nodes.iter().zip(&events) {
                let stream = streams[node.lane];
                for before in &node.after {
                    note("cuStreamWaitEvent", (driver.cuStreamWaitEvent)(stream, events[*before], 0));
                }
                self.enqueue(number, &node.work, stream);
                note("cuEventRecord", (driver.cuEventRecord)(*event, stream));
            }
            for stream in &streams[1..] {
                let joined = event();
                note("cuEventRecord", (driver.cuEventRecord)(joined, *stream));
                note("cuStreamWaitEvent", (driver.cuStreamWaitEvent)(first, joined, 0));
                events.push(joined);
            }
            note("cuStreamEndCapture", (driver.cuStreamEndCapture)(first, &raw mut graph));
            events.push(fork);
            for event in events {
                note("cuEventDestroy", (driver.cuEventDestroy_v2)(event));
            }
            for stream in &streams[1..] {
                note("cuStreamDestroy", (driver.cuStreamDestroy_v2)(*stream));
            }
        }
        graph
    }

    fn add_nodes(&self, number: usize, nodes: &[Node]) -> Handle {
        let driver = &self.device.driver;
        let note = |name, result| self.note(number, name, result);
        let mut graph = null_mut();
        // SAFETY: handles are live, and structures are locals of the right types.
        unsafe {
            note("cuGraphCreate", (driver.cuGraphCreate)(&raw mut graph, 0));
            let mut handles: Vec<Handle> = Vec::new();
            for (at, node) in nodes.iter().enumerate() {
                let previous = nodes[..at].iter().rposition(|other| other.lane == node.lane);
                let mut before: Vec<usize> = node.after.iter().copied().chain(previous).collect();
                before.sort_unstable();
                before.dedup();
                let before: Vec<Handle> = before.into_iter().map(|node| handles[node]).collect();
                let (edges, count, mut handle) = (before.as_ptr(), before.len(), null_mut());
                let out = &raw mut handle;
                match node.work {
                    Work::Copy { to, from, .. } => {
                        let to = Plane { buffer: to.buffer, offset: to.offset, pitch: to.len };
                        let width = from.len;
                        let from = Plane { buffer: from.buffer, offset: from.offset, pitch: from.len };
                        let copy = self.copy_3d(to, from, width, 1);
                        let context = self.device.context;
                        let result =
                            (driver.cuGraphAddMemcpyNode)(out, graph, edges, count, &raw const copy, context);
                        note("cuGraphAddMemcpyNode", result);
                    }
                    Work::Copy2D { to, from, width, height } => {
                        let copy = self.copy_3d(to, from, width, height);
                        let context = self.device.context;
                        let result =
                            (driver.cuGraphAddMemcpyNode)(out, graph, edges, count, &raw const copy, context);
                        note("cuGraphAddMemcpyNode", result);
                    }
                    Work::Fill { to, value, width } => {
                        let fill = FillNode {
                            to: self.on_device(number, to),
                            pitch: 0,
                            value,
                            element: width as u32,
                            width: to.len / width,
                            height: 1,
                        };
                        let context = self.device.context;
                        let result =
                            (driver.cuGraphAddMemsetNode)(out, graph, edges, count, &raw const fill, context);
                        note("cuGraphAddMemsetNode", result);
                    }
                    Work::Mix { .. } | Work::Fold { .. } => {
                        let mut kernel = self.kernel(number, &node.work);
                        let mut parameters = kernel.parameters();
                        let kernel = KernelNode {
                            function: kernel.function,
                            grid: [kernel.grid, 1, 1],
                            block: [kernel.block, 1, 1],
                            shared: 0,
                            parameters: parameters.as_mut_ptr(),
                            extra: null_mut(),
                            kernel: null_mut(),
                            context: null_mut(),
                        };
                        let result =
                            (driver.cuGraphAddKernelNode_v2)(out, graph, edges, count, &raw const kernel);
                        note("cuGraphAddKernelNode", result);
                    }
                    Work::HostMix { to, from, salt, sleep } => {
                        let host =
                            HostNode { function: host_function, data: self.host_call(to, from, salt, sleep) };
                        let result = (driver.cuGraphAddHostNode)(out, graph, edges, count, &raw const host);
                        note("cuGraphAddHostNode", result);
                    }
                }
                handles.push(handle);
            }
        }
        graph
    }

    fn copy_3d(&self, to: Plane, from: Plane, width: usize, height: usize) -> Copy3D {
        let copy = self.copy_2d(to, from, width, height);
        Copy3D {
            src_x: 0,
            src_y: 0,
            src_z: 0,
            src_lod: 0,
            src_type: copy.src_type,
            src_host: copy.src_host,
            src_device: copy.src_device,
            src_array: null_mut(),
            reserved0: null_mut(),
            src_pitch: copy.src_pitch,
            src_height: height,
            dst_x: 0,
            dst_y: 0,
            dst_z: 0,
            dst_lod: 0,
            dst_type: copy.dst_type,
            dst_host: copy.dst_host,
            dst_device: copy.dst_device,
            dst_array: null_mut(),
            reserved1: null_mut(),
            dst_pitch: copy.dst_pitch,
            dst_height: height,
            width,
            height,
            depth: 1,
        }
    }
}
