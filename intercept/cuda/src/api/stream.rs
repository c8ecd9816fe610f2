//! Streams and capture.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use gpusession_proto::frame::op;
use gpusession_proto::handle;

use crate::client::{cross_lease_error, word};
use crate::entry::{
    ILLEGAL_STATE, INVALID_VALUE, LOSSY_QUERY, NOT_READY, Result, STREAM_CAPTURE_IMPLICIT,
    STREAM_CAPTURE_INVALIDATED, STREAM_CAPTURE_ISOLATION, STREAM_CAPTURE_MERGE, STREAM_CAPTURE_UNMATCHED,
    STREAM_CAPTURE_UNSUPPORTED, STREAM_CAPTURE_WRONG_THREAD, alias, bytes, driver, give, give_optional,
};
use crate::graph_uses::Uses;
use crate::host_functions::{self, HostFunction};
use crate::streams::{self, find, find_even_in_host_function};
use crate::{capture, clients, events, graph_uses, handles, mapped, objects, ranges, regions, route, thread};

const NULL: *mut c_void = std::ptr::null_mut();
/// Length of a `CUstreamBatchMemOpParams` in words of 8 bytes.
const BATCH_WORDS: usize = 6;
/// `CU_STREAM_ATTRIBUTE_PRIORITY`
const PRIORITY: i32 = 8;
/// Length of a `CUstreamAttrValue`.
const ATTRIBUTE_BYTES: usize = 64;
const WAIT_32: u64 = 1;
const WRITE_32: u64 = 2;
const WAIT_64: u64 = 4;
const WRITE_64: u64 = 5;
/// Comparisons of a wait: GEQ 0, EQ 1, AND 2, NOR 3.
const WAIT_FLAGS: u32 = 3;

/// Returns `true` for a wait for or a write of a value that the driver does not refuse.
///
/// A driver that refuses one does so at once, so that the program must wait for its verdict.
fn is_plain(item: &[u8]) -> bool {
    let word =
        |i: usize| item.get(i * 8..).and_then(<[u8]>::first_chunk).map_or(0, |w| u64::from_le_bytes(*w));
    let (operation, address, flags) = (word(0) as u32, word(1), word(3) as u32);
    let (bytes, known) = match u64::from(operation) {
        WAIT_32 => (4, WAIT_FLAGS),
        WAIT_64 => (8, WAIT_FLAGS),
        WRITE_32 => (4, 0),
        WRITE_64 => (8, 0),
        _ => return false,
    };
    flags & !known == 0 && address.is_multiple_of(bytes) && ranges::find(address).is_some()
}

/// Puts waits for values, or writes of values, on a stream.
fn batch(stream: *mut c_void, default: streams::Default, flags: u32, items: &[u8]) -> Result {
    let (client, stream) = find(stream, default)?;
    stream.usable()?;
    for item in items.chunks_exact(BATCH_WORDS * 8) {
        let address = item[8..16].try_into().map_or(0, u64::from_le_bytes);
        if route::elsewhere(client, address).is_some() {
            return Err(cross_lease_error("memory of a wait or write on a stream"));
        }
        mapped::named(client, address)?;
    }
    regions::upload(client)?;
    let sure = flags == 0 && items.chunks_exact(BATCH_WORDS * 8).all(is_plain);
    let seq = client.post_if(sure, op::STREAM_BATCH, |w| {
        w.word(stream.handle);
        w.word(u64::from(flags));
        w.bytes(items);
    })?;
    stream.worked(seq);
    client.take_late_error()
}

fn value(
    stream: *mut c_void,
    default: streams::Default,
    kind: u64,
    address: u64,
    value: u64,
    flags: u32,
) -> Result {
    // operation, address, value, flags, alias
    let words: [u64; BATCH_WORDS] = [kind, address, value, u64::from(flags), 0, 0];
    let item: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
    batch(stream, default, 0, &item)
}

fn host_function(stream: *mut c_void, default: streams::Default, function: HostFunction) -> Result {
    let (client, stream) = find(stream, default)?;
    stream.usable()?;
    let after = stream.capture().is_none().then(|| stream.covers_so_far());
    host_functions::enqueue(&stream, function, after)?;
    client.take_late_error()
}

fn begin(
    stream: *mut c_void,
    default: streams::Default,
    mode: i32,
    graph: u64,
    nodes: &[u8],
    edges: &[u8],
) -> Result {
    let (client, stream) = find(stream, default)?;
    if !(0..=2).contains(&mode) {
        return Err(INVALID_VALUE);
    }
    if stream.handle == 0 {
        return Err(STREAM_CAPTURE_UNSUPPORTED);
    }
    if stream.capture().is_some() {
        return Err(ILLEGAL_STATE);
    }
    if graph != 0 {
        client.same(clients::by_object(graph)?)?;
    }
    let nodes = objects::own(client, nodes)?;
    mapped::before_capture(client);
    // A new graph has its handle from the start: the program may ask for it during the capture.
    let new = if graph == 0 { client.mint(handle::GRAPH) } else { 0 };
    let begun = client.call(op::CAPTURE_BEGIN, |w| {
        w.word(stream.handle);
        w.word(graph);
        w.bytes(&nodes);
        w.word(new);
        w.bytes(edges);
    });
    if let Err(status) = begun {
        if new != 0 {
            handles::retire(new);
        }
        return Err(status);
    }
    streams::begin(&stream, mode, graph | new, new != 0);
    Ok(())
}

/// Changes the nodes that the next node of a capture depends on.
fn update(
    stream: *mut c_void,
    default: streams::Default,
    nodes: *const c_void,
    edges: *const c_void,
    count: usize,
    flags: u32,
) -> Result {
    let (client, stream) = find(stream, default)?;
    let capture = stream.capture().ok_or(ILLEGAL_STATE)?;
    if capture.invalid.load(Ordering::Relaxed) {
        return Err(STREAM_CAPTURE_INVALIDATED);
    }
    let len = count.checked_mul(8).ok_or(INVALID_VALUE)?;
    let nodes = objects::own(client, bytes(nodes, len)?)?;
    let edges = if edges.is_null() { &[] } else { bytes(edges, len)? };
    client.call(op::CAPTURE_UPDATE, |w| {
        w.word(stream.handle);
        w.word(u64::from(flags));
        w.bytes(&nodes);
        w.bytes(edges);
    })?;
    Ok(())
}

struct Info {
    status: i32,
    id: u64,
    graph: u64,
    nodes: Vec<u64>,
    /// A `CUgraphEdgeData` for each node, if any edge carries data.
    edges: Vec<u64>,
}

fn capture_info(stream: *mut c_void, default: streams::Default, with_nodes: bool) -> Result<Info> {
    let (client, stream) = find(stream, default)?;
    if stream.handle == 0 && streams::legacy_involved(stream.ctx) {
        return Err(STREAM_CAPTURE_IMPLICIT);
    }
    let Some(capture) = stream.capture() else {
        return Ok(Info { status: 0, id: 0, graph: 0, nodes: Vec::new(), edges: Vec::new() });
    };
    if capture.invalid.load(Ordering::Relaxed) {
        let (id, status) = (capture.id, capture::INVALIDATED);
        return Ok(Info { status, id, graph: 0, nodes: Vec::new(), edges: Vec::new() });
    }
    let (mut nodes, mut edges) = (Vec::new(), Vec::new());
    if with_nodes {
        let reply = client.call(op::CAPTURE_INFO, |w| w.word(stream.handle))?;
        let mut r = reply.reader();
        let (_, _, count) = (word(&mut r)?, word(&mut r)?, word(&mut r)?);
        for _ in 0..count {
            let node = client.name(word(&mut r)?);
            graph_uses::node_of(node, capture.graph);
            nodes.push(node);
        }
        // Older servers, and edges without data, have none.
        while !r.is_empty() {
            edges.push(word(&mut r)?);
        }
    }
    Ok(Info { status: capture::ACTIVE, id: capture.id, graph: capture.graph, nodes, edges })
}

/// Returns a capture's dependencies in an array that belongs to the library.
///
/// As with the driver, it is valid until the thread's next query. The second array has the data of
/// the edges; it is null if no edge carries any.
fn lend_nodes(nodes: Vec<u64>, edges: Vec<u64>) -> (*const u64, *const u64) {
    thread_local! {
        static LENT: std::cell::RefCell<[Vec<u64>; 2]> = const { std::cell::RefCell::new([Vec::new(), Vec::new()]) };
    }
    LENT.with(|lent| {
        *lent.borrow_mut() = [nodes, edges];
        let [nodes, edges] = &*lent.borrow();
        (nodes.as_ptr(), if edges.is_empty() { std::ptr::null() } else { edges.as_ptr() })
    })
}

/// `CU_EVENT_WAIT_EXTERNAL`
const WAIT_EXTERNAL: u32 = 1;

driver! {
    fn cuStreamCreate(stream: *mut *mut c_void, flags: u32) {
        let client = clients::get()?;
        if stream.is_null() || flags > 1 {
            return Err(INVALID_VALUE);
        }
        give(stream, streams::create(client, thread::context()?, flags, 0)? as *mut c_void)
    }

    fn cuStreamCreateWithPriority(stream: *mut *mut c_void, flags: u32, priority: i32) {
        let client = clients::get()?;
        if stream.is_null() || flags > 1 {
            return Err(INVALID_VALUE);
        }
        give(stream, streams::create(client, thread::context()?, flags, priority)? as *mut c_void)
    }

    fn cuStreamDestroy_v2(stream: *mut c_void) {
        streams::destroy(stream as u64)
    }

    fn cuStreamSynchronize / cuStreamSynchronize_ptsz [default] (stream: *mut c_void) {
        find_even_in_host_function(stream, default)?.1.synchronize()
    }

    fn cuStreamQuery / cuStreamQuery_ptsz [default] (stream: *mut c_void) {
        let (client, stream) = find_even_in_host_function(stream, default)?;
        stream.not_captured()?;
        if stream.idle() {
            return client.take_late_error();
        }
        if client.link.is_away() {
            return Err(NOT_READY);
        }
        regions::upload_awaited(client)?;
        stream.ask(op::STREAM_QUERY)
    }

    fn cuStreamWaitEvent / cuStreamWaitEvent_ptsz [default] (stream: *mut c_void, event: *mut c_void, flags: u32) {
        let (client, stream) = find(stream, default)?;
        let event = events::find(event as u64)?;
        if event.client.number != client.number {
            // A server cannot wait for another one, so the call itself waits.
            stream.not_captured()?;
            return super::event::wait_here(&event);
        }
        let own = stream.capture();
        // A node that waits for the event's last record outside the capture.
        let external = own.is_some() && flags & WAIT_EXTERNAL != 0;
        let captured = if streams::capturing() && !external { event.capture() } else { None };
        if let Some(capture) = &captured {
            // The default stream cannot take part; a capture that has ended is an error.
            if stream.handle == 0 {
                capture.invalidate();
                return Err(STREAM_CAPTURE_IMPLICIT);
            }
            if !capture.open() || capture.invalid.load(Ordering::Relaxed) {
                return Err(STREAM_CAPTURE_INVALIDATED);
            }
            if let Some(own) = own.as_ref().filter(|own| !Arc::ptr_eq(own, capture)) {
                own.invalidate();
                capture.invalidate();
                return Err(STREAM_CAPTURE_MERGE);
            }
        } else {
            stream.usable()?;
            if let Some(own) = &own
                && event.recorded()
                && !external
            {
                own.invalidate();
                return Err(STREAM_CAPTURE_ISOLATION);
            }
            // The event has happened already.
            if event.pending().is_none() && !event.is_recorded_elsewhere() && own.is_none() {
                return client.take_late_error();
            }
        }
        // The wait is for the last record until now, not for one that another process makes later.
        let order = event.order();
        let seq = client.post_if(!event.is_shared(), op::STREAM_WAIT_EVENT, |w| {
            w.word(stream.handle);
            w.word(event.handle);
            w.word(u64::from(flags));
        })?;
        match captured {
            Some(capture) => stream.join(&capture),
            None if external => {
                let uses = Uses { awaited: vec![event.handle], ..Uses::default() };
                own.iter().for_each(|own| own.note(&uses));
            }
            None if own.is_some() => {}
            None => {
                let waits = event.pending().is_some() || event.is_in_graphs();
                if waits && streams::tracking(client) {
                    stream.positions.covers_also(&event.covers_before(seq), seq);
                }
            }
        }
        drop(order);
        stream.worked(seq);
        client.take_late_error()
    }

    fn cuStreamGetPriority / cuStreamGetPriority_ptsz [default] (stream: *mut c_void, priority: *mut i32) {
        give(priority, find(stream, default)?.1.priority.load(Ordering::Relaxed))
    }

    fn cuStreamSetAttribute / cuStreamSetAttribute_ptsz [default] (
        stream: *mut c_void, attribute: i32, value: *const c_void,
    ) {
        let (client, stream) = find(stream, default)?;
        stream.usable()?;
        let value = bytes(value, ATTRIBUTE_BYTES)?;
        client.call(op::cuStreamSetAttribute, |w| {
            w.word(stream.handle);
            w.word(u64::from(attribute as u32));
            w.bytes(value);
        })?;
        if attribute == PRIORITY
            && let Some(new) = value.first_chunk()
        {
            stream.priority.store(i32::from_ne_bytes(*new), Ordering::Relaxed);
        }
        Ok(())
    }

    fn cuStreamCopyAttributes / cuStreamCopyAttributes_ptsz [default] (target: *mut c_void, source: *mut c_void) {
        let (client, target) = find(target, default)?;
        let (other, source) = find(source, default)?;
        client.same(other)?;
        target.usable()?;
        let seq = client.post(op::cuStreamCopyAttributes, |w| {
            w.word(target.handle);
            w.word(source.handle);
        })?;
        target.worked(seq);
        target.priority.store(source.priority.load(Ordering::Relaxed), Ordering::Relaxed);
        client.take_late_error()
    }

    fn cuStreamGetFlags / cuStreamGetFlags_ptsz [default] (stream: *mut c_void, flags: *mut u32) {
        give(flags, find(stream, default)?.1.flags)
    }

    fn cuStreamGetId / cuStreamGetId_ptsz [default] (stream: *mut c_void, id: *mut u64) {
        give(id, find(stream, default)?.1.id)
    }

    fn cuStreamGetCtx / cuStreamGetCtx_ptsz [default] (stream: *mut c_void, ctx: *mut *mut c_void) {
        give(ctx, find(stream, default)?.1.ctx as *mut c_void)
    }

    fn cuStreamGetDevice / cuStreamGetDevice_ptsz [default] (stream: *mut c_void, device: *mut i32) {
        let (client, stream) = find(stream, default)?;
        give(device, client.device_of(stream.ctx)?.ordinal)
    }

    /// Accepted without effect: managed memory is exchanged whole, whichever stream uses it.
    fn cuStreamAttachMemAsync / cuStreamAttachMemAsync_ptsz [default] (
        stream: *mut c_void, _address: u64, _len: usize, flags: u32,
    ) {
        find(stream, default)?;
        if matches!(flags, 1 | 2 | 4) { Ok(()) } else { Err(INVALID_VALUE) }
    }

    fn cuLaunchHostFunc / cuLaunchHostFunc_ptsz [default] (
        stream: *mut c_void, function: Option<extern "C" fn(*mut c_void)>, data: *mut c_void,
    ) {
        host_function(stream, default, HostFunction::Plain(function.ok_or(INVALID_VALUE)?, data as usize))
    }

    /// A choice of how the stream waits for the function, which a remote stream cannot make.
    fn cuLaunchHostFunc_v2 / cuLaunchHostFunc_v2_ptsz [default] (
        stream: *mut c_void, function: Option<extern "C" fn(*mut c_void)>, data: *mut c_void, mode: u32,
    ) {
        if mode > 1 {
            return Err(INVALID_VALUE);
        }
        host_function(stream, default, HostFunction::Plain(function.ok_or(INVALID_VALUE)?, data as usize))
    }

    fn cuStreamAddCallback / cuStreamAddCallback_ptsz [default] (
        stream: *mut c_void, function: Option<extern "C" fn(*mut c_void, i32, *mut c_void)>, data: *mut c_void, flags: u32,
    ) {
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        let function = function.ok_or(INVALID_VALUE)?;
        // Unlike a host function, a callback cannot become a node.
        if let Some(capture) = find(stream, default)?.1.capture() {
            capture.invalidate();
            return Err(STREAM_CAPTURE_UNSUPPORTED);
        }
        host_function(stream, default, HostFunction::Callback(function, stream as usize, data as usize))
    }

    fn cuStreamWaitValue32_v2 / cuStreamWaitValue32_v2_ptsz [default] (stream: *mut c_void, address: u64, v: u32, flags: u32) {
        value(stream, default, WAIT_32, address, u64::from(v), flags)
    }

    fn cuStreamWaitValue64_v2 / cuStreamWaitValue64_v2_ptsz [default] (stream: *mut c_void, address: u64, v: u64, flags: u32) {
        value(stream, default, WAIT_64, address, v, flags)
    }

    fn cuStreamWriteValue32_v2 / cuStreamWriteValue32_v2_ptsz [default] (stream: *mut c_void, address: u64, v: u32, flags: u32) {
        value(stream, default, WRITE_32, address, u64::from(v), flags)
    }

    fn cuStreamWriteValue64_v2 / cuStreamWriteValue64_v2_ptsz [default] (stream: *mut c_void, address: u64, v: u64, flags: u32) {
        value(stream, default, WRITE_64, address, v, flags)
    }

    fn cuStreamWaitValue32 / cuStreamWaitValue32_ptsz [default] (stream: *mut c_void, address: u64, v: u32, flags: u32) {
        value(stream, default, WAIT_32, address, u64::from(v), flags)
    }

    fn cuStreamWaitValue64 / cuStreamWaitValue64_ptsz [default] (stream: *mut c_void, address: u64, v: u64, flags: u32) {
        value(stream, default, WAIT_64, address, v, flags)
    }

    fn cuStreamWriteValue32 / cuStreamWriteValue32_ptsz [default] (stream: *mut c_void, address: u64, v: u32, flags: u32) {
        value(stream, default, WRITE_32, address, u64::from(v), flags)
    }

    fn cuStreamWriteValue64 / cuStreamWriteValue64_ptsz [default] (stream: *mut c_void, address: u64, v: u64, flags: u32) {
        value(stream, default, WRITE_64, address, v, flags)
    }

    fn cuStreamBatchMemOp_v2 / cuStreamBatchMemOp_v2_ptsz [default] (
        stream: *mut c_void, count: u32, items: *const c_void, flags: u32,
    ) {
        batch(stream, default, flags, bytes(items, count as usize * BATCH_WORDS * 8)?)
    }

    fn cuStreamBatchMemOp / cuStreamBatchMemOp_ptsz [default] (
        stream: *mut c_void, count: u32, items: *const c_void, flags: u32,
    ) {
        batch(stream, default, flags, bytes(items, count as usize * BATCH_WORDS * 8)?)
    }

    fn cuStreamIsCapturing / cuStreamIsCapturing_ptsz [default] (stream: *mut c_void, status: *mut i32) {
        clients::get()?;
        if !streams::capturing() {
            return give(status, 0);
        }
        give(status, capture_info(stream, default, false)?.status)
    }

    fn cuThreadExchangeStreamCaptureMode(mode: *mut i32) {
        clients::get()?;
        let wanted = crate::entry::take(mode)?;
        if !(0..=2).contains(&wanted) {
            return Err(INVALID_VALUE);
        }
        give(mode, thread::exchange_capture_mode(wanted))
    }

    fn cuStreamBeginCapture_v2 / cuStreamBeginCapture_v2_ptsz [default] (stream: *mut c_void, mode: i32) {
        begin(stream, default, mode, 0, &[], &[])
    }

    fn cuStreamBeginCapture / cuStreamBeginCapture_ptsz [default] (stream: *mut c_void) {
        begin(stream, default, 0, 0, &[], &[])
    }

    fn cuStreamBeginCaptureToGraph / cuStreamBeginCaptureToGraph_ptsz [default] (
        stream: *mut c_void, graph: *mut c_void, nodes: *const c_void, edges: *const c_void, count: usize, mode: i32,
    ) {
        if graph.is_null() {
            return Err(INVALID_VALUE);
        }
        let len = count.checked_mul(8).ok_or(INVALID_VALUE)?;
        let edges = if edges.is_null() { &[] } else { bytes(edges, len)? };
        begin(stream, default, mode, graph as u64, bytes(nodes, len)?, edges)
    }

    fn cuStreamUpdateCaptureDependencies / cuStreamUpdateCaptureDependencies_ptsz [default] (
        stream: *mut c_void, nodes: *const c_void, count: usize, flags: u32,
    ) {
        update(stream, default, nodes, std::ptr::null(), count, flags)
    }

    fn cuStreamUpdateCaptureDependencies_v2 / cuStreamUpdateCaptureDependencies_v2_ptsz [default] (
        stream: *mut c_void, nodes: *const c_void, edges: *const c_void, count: usize, flags: u32,
    ) {
        update(stream, default, nodes, edges, count, flags)
    }

    fn cuStreamEndCapture / cuStreamEndCapture_ptsz [default] (stream: *mut c_void, graph: *mut *mut c_void) {
        let (client, stream) = find(stream, default)?;
        let capture = stream.capture().ok_or(ILLEGAL_STATE)?;
        // A program has its own graph already if the capture adds to it.
        if graph.is_null() && capture.new_graph {
            return Err(INVALID_VALUE);
        }
        if capture.origin != stream.handle {
            capture.invalidate();
            return Err(STREAM_CAPTURE_UNMATCHED);
        }
        // The capture ends even on the wrong thread.
        let wrong_thread = capture.mode != 2 && capture.thread != thread::id();
        let new = capture.graph;
        let reply = client.ask(op::CAPTURE_END, |w| {
            w.word(stream.handle);
            w.word(new);
        })?;
        streams::end(&capture);
        if wrong_thread || capture.invalid.load(Ordering::Relaxed) {
            give_optional(graph, NULL);
            if capture.new_graph {
                if reply.status == 0 {
                    client.post(op::GRAPH_DESTROY, |w| w.word(new))?;
                }
                graph_uses::forget_graph(new);
                handles::retire(new);
            }
            return Err(if wrong_thread { STREAM_CAPTURE_WRONG_THREAD } else { STREAM_CAPTURE_INVALIDATED });
        }
        if let Err(status) = client.check_status(reply.status) {
            if capture.new_graph {
                graph_uses::forget_graph(new);
                handles::retire(new);
            }
            give_optional(graph, NULL);
            return Err(status);
        }
        graph_uses::add_captured(new, &capture.uses());
        give_optional(graph, new as *mut c_void);
        Ok(())
    }

    fn cuStreamGetCaptureInfo / cuStreamGetCaptureInfo_ptsz [default] (stream: *mut c_void, status: *mut i32, id: *mut u64) {
        let info = capture_info(stream, default, false)?;
        give(status, info.status)?;
        give_optional(id, info.id);
        Ok(())
    }

    fn cuStreamGetCaptureInfo_v2 / cuStreamGetCaptureInfo_v2_ptsz [default] (
        stream: *mut c_void, status: *mut i32, id: *mut u64, graph: *mut *mut c_void, nodes: *mut *const u64, count: *mut usize,
    ) {
        let info = capture_info(stream, default, !nodes.is_null() || !count.is_null())?;
        if !info.edges.is_empty() {
            return Err(LOSSY_QUERY);
        }
        give(status, info.status)?;
        give_optional(id, info.id);
        give_optional(graph, info.graph as *mut c_void);
        give_optional(count, info.nodes.len());
        give_optional(nodes, lend_nodes(info.nodes, Vec::new()).0);
        Ok(())
    }

    fn cuStreamGetCaptureInfo_v3 / cuStreamGetCaptureInfo_v3_ptsz [default] (
        stream: *mut c_void, status: *mut i32, id: *mut u64, graph: *mut *mut c_void, nodes: *mut *const u64,
        edges: *mut *const c_void, count: *mut usize,
    ) {
        let listed = !nodes.is_null() || !edges.is_null() || !count.is_null();
        let info = capture_info(stream, default, listed)?;
        if edges.is_null() && !info.edges.is_empty() {
            return Err(LOSSY_QUERY);
        }
        give(status, info.status)?;
        give_optional(id, info.id);
        give_optional(graph, info.graph as *mut c_void);
        give_optional(count, info.nodes.len());
        let lent = lend_nodes(info.nodes, info.edges);
        give_optional(edges, lent.1.cast());
        give_optional(nodes, lent.0);
        Ok(())
    }
}

alias! {
    cuStreamDestroy = cuStreamDestroy_v2(stream: *mut c_void);
}
