//! Streams, capture.

use std::collections::HashMap;
use std::sync::{Arc, MutexGuard, PoisonError};

use gpusession_proto::frame::{DRAIN, Reader, WAIT};

use super::flush::flush_results;
use crate::answer::{Answer, Done};
use crate::driver::{Handle, Status, check, status};
use crate::frame::Frame;
use crate::handles::Object;
use crate::host_calls::HostCalls;
use crate::objects::Stream;
use crate::objects::known::{Kind, Owner};
use crate::session::Session;

/// `CU_STREAM_CAPTURE_MODE_RELAXED`: the client enforces the program's own mode.
const CAPTURE_RELAXED: i32 = 2;
/// `CU_STREAM_NON_BLOCKING`
const NON_BLOCKING: u32 = 1;
/// `CU_EVENT_DISABLE_TIMING`
const DISABLE_TIMING: u32 = 2;
/// `CUstreamBatchMemOpParams`
const BATCH_ITEM: usize = 48;

/// `STREAM_CREATE`: new handle, flags, priority.
pub fn create(session: &Session, frame: &Frame, r: &mut Reader<'_>) -> Done {
    let (handle, flags, priority) = (r.word()?, r.word()? as u32, r.word()? as i32);
    let mut stream = std::ptr::null_mut();
    let non_blocking = flags & NON_BLOCKING != 0;
    let ctx = frame.header.ctx.get();
    // In a green context the driver has a call of its own, for non-blocking streams only.
    let green = session.greens.all().into_iter().find(|(_, own)| *own == ctx && non_blocking);
    let call = &session.driver.call;
    // SAFETY: the out pointer is valid; a green context belongs to this worker.
    check(unsafe {
        match green {
            Some((green, _)) => (call.cuGreenCtxStreamCreate)(&mut stream, green.0, flags, priority),
            None => (call.cuStreamCreateWithPriority)(&mut stream, flags, priority),
        }
    })?;
    Ok(session.streams.put(handle, Stream { object: Object(stream), non_blocking, ctx })?)
}

/// `STREAM_DESTROY`
pub fn destroy(session: &Session, r: &mut Reader<'_>) -> Done {
    let handle = r.word()?;
    let stream = session.streams.take(handle)?.object.0;
    // The graph of a capture goes with the stream that the capture began on.
    let captured = captures(session).remove(&handle);
    if let Some(Ok(Object(graph))) = captured.map(|graph| session.graphs.take(graph)) {
        session.known.graph_gone(graph as u64);
    }
    let _streams = session.settling.streams();
    // SAFETY: a stream of this worker that no later frame can name.
    Ok(check(unsafe { (session.driver.call.cuStreamDestroy_v2)(stream) })?)
}

/// `STREAM_SYNC`: stream, and `DRAIN` if work of the default stream counts that precedes only later
/// work of the stream.
pub fn sync(session: &Session, frame: &Frame, r: &mut Reader<'_>, answer: &mut Answer) -> Done {
    let stream = session.stream(r.word()?)?;
    let drain = !r.is_empty() && r.word()? == DRAIN;
    // SAFETY: a stream of this worker.
    let sync = || check(unsafe { (session.driver.call.cuStreamSynchronize)(stream) });
    let synced = if drain { reach_new_event(session, stream) } else { sync() };
    // A client that does not wait may not read either; every later frame stays behind this one.
    if frame.header.flags.get() & WAIT != 0 {
        flush_results(session, answer);
    }
    Ok(synced?)
}

/// Waits for an event that is recorded on the stream now.
fn reach_new_event(session: &Session, stream: Handle) -> Result<(), Status> {
    let call = &session.driver.call;
    let mut event = std::ptr::null_mut();
    // SAFETY: the out pointer is valid.
    check(unsafe { (call.cuEventCreate)(&mut event, DISABLE_TIMING) })?;
    // SAFETY: a stream of this worker, and the event made above.
    let reached = check(unsafe { (call.cuEventRecord)(event, stream) })
        .and_then(|()| check(unsafe { (call.cuEventSynchronize)(event) }));
    // SAFETY: the event made above; the driver keeps what a stream still needs.
    unsafe { (call.cuEventDestroy_v2)(event) };
    reached
}

/// `STREAM_QUERY`
pub fn query(session: &Session, r: &mut Reader<'_>, answer: &mut Answer) -> Done {
    let stream = session.stream(r.word()?)?;
    // SAFETY: a stream of this worker.
    let done = check(unsafe { (session.driver.call.cuStreamQuery)(stream) });
    if done != Err(status::NOT_READY) {
        flush_results(session, answer);
    }
    Ok(done?)
}

/// `STREAM_BATCH`: stream, flags, items (waits for values in device memory, and writes of them).
pub fn batch(session: &Session, r: &mut Reader<'_>) -> Done {
    let (stream, flags) = (session.stream(r.word()?)?, r.word()? as u32);
    let items = r.bytes()?;
    if !items.len().is_multiple_of(BATCH_ITEM) {
        return Err(status::INVALID_VALUE.into());
    }
    let aligned: Vec<u64> =
        items.chunks_exact(8).map(|w| u64::from_le_bytes(w.try_into().unwrap_or_default())).collect();
    let count = (items.len() / BATCH_ITEM) as u32;
    // SAFETY: `aligned` holds `count` items.
    Ok(check(unsafe {
        (session.driver.call.cuStreamBatchMemOp_v2)(stream, count, aligned.as_ptr().cast(), flags)
    })?)
}

/// `HOST_FUNC`: stream, the client's number of the call, whether a graph may repeat it, whether it
/// is a callback (an older library omits that).
pub fn host_func(session: &Arc<Session>, frame: &Frame, r: &mut Reader<'_>) -> Done {
    let (stream, id, keep) = (session.stream(r.word()?)?, r.word()?, r.word()? != 0);
    let callback = !r.is_empty() && r.word()? != 0;
    Ok(HostCalls::enqueue(session, frame, stream, id, keep, callback)?)
}

fn captures(session: &Session) -> MutexGuard<'_, HashMap<u64, u64>> {
    session.captures.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `CAPTURE_BEGIN`: stream, graph to capture into or 0, dependencies, handle for a new graph or 0,
/// data of the edges.
pub fn capture_begin(session: &Session, r: &mut Reader<'_>) -> Done {
    let (handle, graph) = (r.word()?, r.word()?);
    let stream = session.stream(handle)?;
    let nodes = super::graph::read_nodes(session, r.bytes()?)?;
    let new = if r.is_empty() { 0 } else { r.word()? };
    let edges = if r.is_empty() { &[] } else { r.bytes()? };
    if !edges.is_empty() && edges.len() != nodes.len() * 8 {
        return Err(status::INVALID_VALUE.into());
    }
    let call = &session.driver.call;
    let _streams = session.settling.capture_begins();
    if graph == 0 {
        // SAFETY: a stream of this worker.
        check(unsafe { (call.cuStreamBeginCapture_v2)(stream, CAPTURE_RELAXED) })?;
        let (mut state, mut id, mut graph, mut nodes, mut count) =
            (0, 0, std::ptr::null_mut(), std::ptr::null(), 0);
        // SAFETY: the out pointers are valid.
        let told = unsafe {
            (call.cuStreamGetCaptureInfo_v2)(stream, &mut state, &mut id, &mut graph, &mut nodes, &mut count)
        };
        if new != 0 && told == 0 && !graph.is_null() {
            session.graphs.put(new, Object(graph))?;
            captures(session).insert(handle, new);
        }
        return Ok(());
    }
    let graph = session.graphs.get(graph)?.0;
    // SAFETY: graph and stream belong to this worker; the driver reads as many nodes as `nodes`
    // has.
    Ok(check(unsafe {
        (call.cuStreamBeginCaptureToGraph)(
            stream,
            graph,
            nodes.as_ptr(),
            if edges.is_empty() { std::ptr::null() } else { edges.as_ptr().cast() },
            nodes.len(),
            CAPTURE_RELAXED,
        )
    })?)
}

/// `CAPTURE_END`: stream, new handle for the graph.
pub fn capture_end(session: &Session, r: &mut Reader<'_>, answer: &mut Answer) -> Done {
    let (origin, handle) = (r.word()?, r.word()?);
    let stream = session.stream(origin)?;
    let mut graph = std::ptr::null_mut();
    // SAFETY: the out pointer is valid.
    let ended = check(unsafe { (session.driver.call.cuStreamEndCapture)(stream, &mut graph) });
    answer.word(u64::from(!graph.is_null()));
    let new = captures(session).remove(&origin);
    if !graph.is_null() {
        session.graphs.put(handle, Object(graph))?;
    } else if let Some(new) = new {
        // The driver has destroyed the graph of a failed capture.
        if let Ok(Object(graph)) = session.graphs.take(new) {
            session.known.graph_gone(graph as u64);
        }
    }
    Ok(ended?)
}

/// `CAPTURE_UPDATE`: stream, flags, nodes, data of the edges.
pub fn capture_update(session: &Session, r: &mut Reader<'_>) -> Done {
    let (stream, flags) = (session.stream(r.word()?)?, r.word()? as u32);
    let mut nodes = super::graph::read_nodes(session, r.bytes()?)?;
    let edges = r.bytes()?;
    if !edges.is_empty() && edges.len() != nodes.len() * 8 {
        return Err(status::INVALID_VALUE.into());
    }
    let call = &session.driver.call;
    // SAFETY: a stream of this worker; the arrays have `nodes.len()` elements.
    Ok(check(unsafe {
        if edges.is_empty() {
            (call.cuStreamUpdateCaptureDependencies)(stream, nodes.as_mut_ptr(), nodes.len(), flags)
        } else {
            (call.cuStreamUpdateCaptureDependencies_v2)(
                stream,
                nodes.as_mut_ptr(),
                edges.as_ptr().cast(),
                nodes.len(),
                flags,
            )
        }
    })?)
}

/// `CAPTURE_INFO`: stream; answers status, id, the nodes that the next one depends on.
///
/// A word for each node follows if any of the edges carries data.
pub fn capture_info(session: &Session, r: &mut Reader<'_>, answer: &mut Answer) -> Done {
    let stream = session.stream(r.word()?)?;
    let call = &session.driver.call;
    let (mut state, mut id, mut graph, mut nodes, mut edges, mut count) =
        (0, 0, std::ptr::null_mut(), std::ptr::null(), std::ptr::null(), 0);
    // SAFETY: the out pointers are valid.
    check(unsafe {
        match (call.cuStreamGetCaptureInfo_v3)(
            stream, &mut state, &mut id, &mut graph, &mut nodes, &mut edges, &mut count,
        ) {
            // A driver before CUDA 12.3.
            status::NOT_SUPPORTED => (call.cuStreamGetCaptureInfo_v2)(
                stream, &mut state, &mut id, &mut graph, &mut nodes, &mut count,
            ),
            told => told,
        }
    })?;
    answer.word(state as u64);
    answer.word(id);
    answer.word(count as u64);
    for i in 0..count {
        // SAFETY: the driver's own array of `count` nodes, valid until the stream's next call.
        let node = unsafe { *nodes.add(i) };
        session.known.note_new(Kind::Node, node as u64, Owner { of: graph as u64, whole: 0 });
        answer.word(node as u64);
    }
    let edges: &[u64] = if edges.is_null() {
        &[]
    } else {
        // SAFETY: as above, with the 8 bytes of an edge's data for each node.
        unsafe { std::slice::from_raw_parts(edges, count) }
    };
    if edges.iter().any(|data| *data != 0) {
        edges.iter().for_each(|data| answer.word(*data));
    }
    Ok(())
}
