//! Graphs as a whole: shape, instantiation, launch.

use super::{fill, out, out_opt, slice};
use crate::abi::{GraphInstantiateParams, UpdateResult};
use crate::driver::context::working;
use crate::driver::driver;
use crate::driver::graph::{EXECS, Exec, GRAPHS, Graph, Held, NODES, Node, USER_OBJECTS, UserObject};
use crate::driver::submit::stream;
use crate::errors::{self, INVALID_VALUE, Result};
use crate::export;
use crate::registry::handle;
use std::collections::HashSet;
use std::ffi::c_char;
use std::sync::Arc;

pub fn graph(h: usize) -> Result<Arc<Graph>> {
    driver()?;
    GRAPHS.find(h).ok_or(INVALID_VALUE)
}

pub fn node(h: usize) -> Result<Arc<Node>> {
    driver()?;
    NODES.find(h).ok_or(INVALID_VALUE)
}

pub fn exec(h: usize) -> Result<Arc<Exec>> {
    driver()?;
    EXECS.find(h).ok_or(INVALID_VALUE)
}

pub fn nodes(list: &[usize]) -> Result<Vec<Arc<Node>>> {
    list.iter().map(|h| node(*h)).collect()
}

fn user_object(h: usize, count: u32) -> Result<Arc<UserObject>> {
    driver()?;
    if count == 0 || count > i32::MAX as u32 {
        return Err(INVALID_VALUE);
    }
    USER_OBJECTS.find(h).ok_or(INVALID_VALUE)
}

fn instantiate(to: *mut usize, g: usize, flags: u64) -> Result {
    if to.is_null() {
        return Err(INVALID_VALUE);
    }
    let e = Exec::new(&graph(g)?, flags)?;
    // SAFETY: checked for null; the program vouches for it.
    unsafe { out(to, handle(&e)) }
}

unsafe fn change_edges(g: usize, from: *const usize, to: *const usize, n: usize, add: bool) -> Result {
    let g = graph(g)?;
    // SAFETY: the program vouches for its arrays.
    let (from, to) = unsafe { (nodes(slice(from, n)?)?, nodes(slice(to, n)?)?) };
    let edges: Vec<[&Arc<Node>; 2]> = from.iter().zip(&to).map(|(a, b)| [a, b]).collect();
    let unlike = |n: &&Arc<Node>| n.graph.as_ptr() != Arc::as_ptr(&g);
    if edges.iter().any(|e| e.iter().any(unlike) || Arc::ptr_eq(e[0], e[1])) {
        return Err(INVALID_VALUE);
    }
    // All edges change or none. Instantiation detects cycles.
    let mut known: HashSet<(usize, usize)> = g.edges().into_iter().collect();
    let mut change = |edge| if add { known.insert(edge) } else { known.remove(&edge) };
    if !edges.iter().all(|[a, b]| change((handle(*a), handle(*b)))) {
        return Err(INVALID_VALUE);
    }
    for [a, b] in edges {
        if add {
            b.after.lock().push(a.clone());
        } else {
            b.after.lock().retain(|x| !Arc::ptr_eq(x, a));
        }
    }
    Ok(())
}

unsafe fn edges(g: usize, from: *mut usize, to: *mut usize, data: *mut u64, n: *mut usize) -> Result {
    let list = graph(g)?.edges();
    let (a, b): (Vec<usize>, Vec<usize>) = list.into_iter().unzip();
    // SAFETY: the program vouches for its arrays; `n` is only written by the last one.
    unsafe {
        if from.is_null() || to.is_null() {
            return out(n, a.len());
        }
        let mut room = super::read(n)?;
        fill(from, &raw mut room, &a)?;
        if !data.is_null() {
            let mut room = super::read(n)?;
            fill(data, &raw mut room, &vec![0u64; a.len()])?;
        }
        fill(to, n, &b)
    }
}

unsafe fn dependencies(h: usize, list: *mut usize, data: *mut u64, n: *mut usize) -> Result {
    let items: Vec<usize> = node(h)?.after.lock().iter().map(handle).collect();
    // SAFETY: the program vouches for its arrays.
    unsafe {
        if !data.is_null() && !list.is_null() {
            let mut room = super::read(n)?;
            fill(data, &raw mut room, &vec![0u64; items.len()])?;
        }
        fill(list, n, &items)
    }
}

unsafe fn dependents(h: usize, list: *mut usize, data: *mut u64, n: *mut usize) -> Result {
    let g = node(h)?.graph.upgrade().ok_or(INVALID_VALUE)?;
    let items: Vec<usize> = g.edges().into_iter().filter(|e| e.0 == h).map(|e| e.1).collect();
    // SAFETY: the program vouches for its arrays.
    unsafe {
        if !data.is_null() && !list.is_null() {
            let mut room = super::read(n)?;
            fill(data, &raw mut room, &vec![0u64; items.len()])?;
        }
        fill(list, n, &items)
    }
}

export! {
    fn cuGraphCreate(to: *mut usize, flags: u32) {
        driver()?;
        if to.is_null() || flags != 0 {
            return Err(INVALID_VALUE);
        }
        out(to, GRAPHS.insert(Graph::new()))
    }

    fn cuGraphDestroy(h: usize) {
        graph(h)?.destroy();
        Ok(())
    }

    fn cuGraphClone(to: *mut usize, h: usize) {
        let copy = graph(h)?.duplicate();
        out(to, GRAPHS.insert(copy))
    }

    fn cuGraphNodeFindInClone(to: *mut usize, original: usize, clone: usize) {
        let g = graph(clone)?;
        let copy = g.clones.lock().get(&original).map(handle);
        // The clone may have lost its copy since.
        let found = copy.filter(|copy| g.nodes.lock().iter().any(|node| handle(node) == *copy));
        out(to, found.ok_or(INVALID_VALUE)?)
    }

    fn cuGraphGetNodes(h: usize, list: *mut usize, n: *mut usize) {
        let items: Vec<usize> = graph(h)?.nodes.lock().iter().map(handle).collect();
        fill(list, n, &items)
    }

    fn cuGraphGetRootNodes(h: usize, list: *mut usize, n: *mut usize) {
        let g = graph(h)?;
        let items: Vec<usize> = g.nodes.lock().iter().filter(|x| x.after.lock().is_empty()).map(handle).collect();
        fill(list, n, &items)
    }

    fn cuGraphGetEdges(h: usize, from: *mut usize, to: *mut usize, n: *mut usize) {
        edges(h, from, to, std::ptr::null_mut(), n)
    }
    fn cuGraphGetEdges_v2(h: usize, from: *mut usize, to: *mut usize, data: *mut u64, n: *mut usize) {
        edges(h, from, to, data, n)
    }

    fn cuGraphNodeGetDependencies(h: usize, list: *mut usize, n: *mut usize) {
        dependencies(h, list, std::ptr::null_mut(), n)
    }
    fn cuGraphNodeGetDependencies_v2(h: usize, list: *mut usize, data: *mut u64, n: *mut usize) {
        dependencies(h, list, data, n)
    }
    fn cuGraphNodeGetDependentNodes(h: usize, list: *mut usize, n: *mut usize) {
        dependents(h, list, std::ptr::null_mut(), n)
    }
    fn cuGraphNodeGetDependentNodes_v2(h: usize, list: *mut usize, data: *mut u64, n: *mut usize) {
        dependents(h, list, data, n)
    }

    fn cuGraphAddDependencies(h: usize, from: *const usize, to: *const usize, n: usize) {
        change_edges(h, from, to, n, true)
    }
    fn cuGraphAddDependencies_v2(h: usize, from: *const usize, to: *const usize, _data: *const u64, n: usize) {
        change_edges(h, from, to, n, true)
    }
    fn cuGraphRemoveDependencies(h: usize, from: *const usize, to: *const usize, n: usize) {
        change_edges(h, from, to, n, false)
    }
    fn cuGraphRemoveDependencies_v2(h: usize, from: *const usize, to: *const usize, _data: *const u64, n: usize) {
        change_edges(h, from, to, n, false)
    }

    fn cuGraphDestroyNode(h: usize) {
        let n = node(h)?;
        n.graph.upgrade().ok_or(INVALID_VALUE)?.remove(&n);
        Ok(())
    }

    fn cuGraphInstantiate(to: *mut usize, g: usize, error: *mut usize, log: *mut c_char, size: usize) {
        // A card's driver writes no node and no text, not even of an error.
        out_opt(error, 0);
        if size > 0 {
            out_opt(log, 0);
        }
        instantiate(to, g, 0)
    }
    fn cuGraphInstantiate_v2(to: *mut usize, g: usize, error: *mut usize, log: *mut c_char, size: usize) {
        // A card's driver writes no node and no text, not even of an error.
        out_opt(error, 0);
        if size > 0 {
            out_opt(log, 0);
        }
        instantiate(to, g, 0)
    }
    fn cuGraphInstantiateWithFlags(to: *mut usize, g: usize, flags: u64) {
        if flags & !0xf != 0 {
            return Err(INVALID_VALUE);
        }
        // Launches from device code are not simulated.
        if flags & 4 != 0 {
            return Err(errors::NOT_SUPPORTED);
        }
        instantiate(to, g, flags)
    }
    fn cuGraphInstantiateWithParams | cuGraphInstantiateWithParams_ptsz (to: *mut usize, g: usize, params: *mut GraphInstantiateParams) {
        if params.is_null() {
            return Err(INVALID_VALUE);
        }
        if (*params).flags & !0xf != 0 {
            return Err(INVALID_VALUE);
        }
        if (*params).flags & 4 != 0 {
            return Err(errors::NOT_SUPPORTED);
        }
        (*params).errNode = 0;
        // CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD does not stay with the executable graph.
        let made = instantiate(to, g, (*params).flags & !2);
        (*params).result = u32::from(made.is_err());
        if let (Err(_), Ok(graph)) = (made, graph(g))
            && graph.sorted().is_none()
        {
            // CUDA_GRAPH_INSTANTIATE_INVALID_STRUCTURE
            (*params).result = 2;
            (*params).errNode = graph.nodes.lock().last().map_or(0, handle);
        }
        made
    }

    fn cuGraphExecGetFlags(h: usize, flags: *mut u64) { out(flags, exec(h)?.flags) }

    fn cuGraphExecDestroy(h: usize) {
        exec(h)?;
        EXECS.remove(h).map(drop)
    }

    fn cuGraphLaunch | cuGraphLaunch_ptsz (h: usize, s: usize) {
        working()?;
        exec(h)?.launch(&stream(s, PER_THREAD)?)
    }

    fn cuGraphUpload | cuGraphUpload_ptsz (h: usize, s: usize) {
        working()?;
        exec(h)?;
        stream(s, PER_THREAD).map(drop)
    }

    fn cuGraphExecUpdate(h: usize, g: usize, node_out: *mut usize, result: *mut u32) {
        let updated = exec(h)?.update(&graph(g)?);
        out_opt(node_out, 0);
        out_opt(result, updated.err().unwrap_or(0));
        updated.map_err(|_| errors::GRAPH_EXEC_UPDATE_FAILURE)
    }
    fn cuGraphExecUpdate_v2(h: usize, g: usize, result: *mut UpdateResult) {
        let updated = exec(h)?.update(&graph(g)?);
        out_opt(result, UpdateResult { result: updated.err().unwrap_or(0), errorNode: 0, errorFromNode: 0 });
        updated.map_err(|_| errors::GRAPH_EXEC_UPDATE_FAILURE)
    }

    fn cuGraphNodeSetEnabled(h: usize, n: usize, enabled: u32) {
        let e = exec(h)?;
        let mut steps = e.steps.lock();
        let step = steps.iter_mut().find(|s| s.node == n).ok_or(INVALID_VALUE)?;
        if step.kind.code() > 2 {
            return Err(INVALID_VALUE);
        }
        step.enabled = enabled != 0;
        Ok(())
    }
    fn cuGraphNodeGetEnabled(h: usize, n: usize, enabled: *mut u32) {
        let e = exec(h)?;
        let steps = e.steps.lock();
        let step = steps.iter().find(|s| s.node == n).ok_or(INVALID_VALUE)?;
        out(enabled, u32::from(step.enabled))
    }

    fn cuDeviceGraphMemTrim(device: i32) { driver()?.device(device).map(drop) }
    fn cuDeviceGetGraphMemAttribute(device: i32, id: u32, value: *mut u64) {
        driver()?.device(device)?;
        if id > 3 {
            return Err(INVALID_VALUE);
        }
        out(value, 0)
    }
    fn cuDeviceSetGraphMemAttribute(device: i32, _id: u32, _value: *const u64) { driver()?.device(device).map(drop) }

    fn cuGraphGetId(h: usize, id: *mut u32) { out(id, graph(h)?.id as u32) }
    fn cuGraphExecGetId(h: usize, id: *mut u32) { out(id, exec(h)?.id as u32) }
    fn cuGraphNodeGetLocalId(h: usize, id: *mut u32) { out(id, node(h)?.id as u32) }

    fn cuUserObjectCreate(to: *mut usize, data: usize, destroy: usize, references: u32, flags: u32) {
        driver()?;
        if to.is_null() || destroy == 0 || references == 0 || references > i32::MAX as u32 || flags != 1 {
            return Err(INVALID_VALUE);
        }
        let references = parking_lot::Mutex::new(u64::from(references));
        out(to, USER_OBJECTS.insert(Arc::new(UserObject { references, destroy, data })))
    }

    fn cuUserObjectRetain(object: usize, count: u32) {
        *user_object(object, count)?.references.lock() += u64::from(count);
        Ok(())
    }

    fn cuUserObjectRelease(object: usize, count: u32) { user_object(object, count)?.release(u64::from(count)) }

    fn cuGraphRetainUserObject(h: usize, object: usize, count: u32, flags: u32) {
        let (g, object) = (graph(h)?, user_object(object, count)?);
        // CU_GRAPH_USER_OBJECT_MOVE
        match flags {
            0 => *object.references.lock() += u64::from(count),
            1 => {}
            _ => return Err(INVALID_VALUE),
        }
        g.objects.lock().push(Held(object, u64::from(count)));
        Ok(())
    }

    fn cuGraphReleaseUserObject(h: usize, object: usize, count: u32) {
        let (g, object) = (graph(h)?, user_object(object, count)?);
        let mut objects = g.objects.lock();
        let held = objects.iter_mut().find(|held| Arc::ptr_eq(&held.0, &object) && held.1 >= u64::from(count));
        held.ok_or(INVALID_VALUE)?.1 -= u64::from(count);
        object.release(u64::from(count))
    }

    fn cuGraphDebugDotPrint(h: usize, path: *const c_char, _flags: u32) {
        let g = graph(h)?;
        let mut dot = String::from("digraph dot {\n");
        for n in g.nodes.lock().iter() {
            dot += &format!("  n{} [label=\"node {} type {}\"];\n", n.id, n.id, n.kind.lock().code());
            for a in n.after.lock().iter() {
                dot += &format!("  n{} -> n{};\n", a.id, n.id);
            }
        }
        dot += "}\n";
        std::fs::write(super::text(path)?, dot).map_err(|_| errors::OPERATING_SYSTEM)
    }
}
