//! Streams, events and capture.

use super::{out, out_opt, slice};
use crate::abi::BatchMemOp;
use crate::driver::capture::{self, forbid_unsafe};
use crate::driver::context::{CONTEXTS, working};
use crate::driver::driver;
use crate::driver::graph::{GRAPHS, NODES, Node, NodeKind};
use crate::driver::op::Op;
use crate::driver::stream::{EVENTS, Event, EventState, Recorded, Role, STREAMS, Stream};
use crate::driver::submit::{self, stream, submit_after};
use crate::errors::{self, INVALID_HANDLE, INVALID_VALUE, NOT_READY, Result};
use crate::export;
use crate::ipc::Counter;
use crate::registry::handle;
use std::cell::RefCell;
use std::ptr::null_mut;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};

fn create(to: *mut usize, flags: u32, priority: i32) -> Result {
    let ctx = working()?;
    if to.is_null() || flags > 1 {
        return Err(INVALID_VALUE);
    }
    let s = Stream::new(Role::User, flags, priority.clamp(-5, 0), handle(&ctx), ctx.device, ctx.life());
    ctx.adopt(&s);
    // SAFETY: checked for null; the program vouches for it.
    unsafe { out(to, STREAMS.insert(s)) }
}

fn destroy(h: usize) -> Result {
    driver()?;
    if h <= 2 {
        return Err(INVALID_HANDLE);
    }
    STREAMS.get(h)?.life.check()?;
    let s = STREAMS.remove(h)?;
    capture::leave(&s);
    Ok(())
}

pub(super) fn event(h: usize) -> Result<Arc<Event>> {
    driver()?;
    EVENTS.get(h)
}

fn destroy_event(h: usize) -> Result {
    let e = event(h)?;
    if let Some(ctx) = CONTEXTS.find(e.context) {
        ctx.life().check()?;
    }
    EVENTS.remove(h).map(drop)
}

/// Bits of `CUevent_flags`.
pub(super) const DISABLE_TIMING: u32 = 2;
pub(super) const INTERPROCESS: u32 = 4;

fn record(h: usize, stream_handle: usize, per_thread: bool, flags: u32) -> Result {
    let (e, s) = (event(h)?, stream(stream_handle, per_thread)?);
    s.life.check()?;
    if flags > 1 {
        return Err(INVALID_VALUE);
    }
    if e.context != s.context {
        return Err(INVALID_HANDLE);
    }
    if capture::capturing(&s) && flags == 1 {
        return capture::capture_node(&s, NodeKind::EventRecord(h)).map(drop);
    }
    record_on(&e, &s)
}

/// Records an event behind the stream's work so far.
pub(super) fn record_on(e: &Arc<Event>, s: &Arc<Stream>) -> Result {
    if capture::record(s, e)? {
        return Ok(());
    }
    let time = Arc::new(OnceLock::new());
    // The event refers to this recording before its entry can run.
    let point = submit::submit(s, Op::Record(time.clone()))?;
    if let Some(point) = point {
        let mut state = e.state.lock();
        state.captured = None;
        state.recorded = Some(Recorded { point, time });
        if let Some(counter) = &e.shared {
            let number = counter.begin();
            submit::submit(s, Op::Complete(counter.clone(), number))?;
        }
    }
    Ok(())
}

pub(super) fn recorded(e: &Event) -> Result<Option<Recorded>> {
    let state = e.state.lock();
    if let Some((c, _)) = &state.captured {
        c.invalidate();
        return Err(errors::CAPTURED_EVENT);
    }
    Ok(state.recorded.clone())
}

/// Returns the last record of an event if another process made it.
fn record_of_other(e: &Event) -> Option<(Arc<Counter>, u64)> {
    let counter = e.shared.as_ref()?;
    Some((counter.clone(), counter.of_other()?))
}

fn elapsed(to: *mut f32, start: usize, end: usize) -> Result {
    let (a, b) = (event(start)?, event(end)?);
    if (a.flags | b.flags) & DISABLE_TIMING != 0 || a.device != b.device {
        return Err(INVALID_HANDLE);
    }
    let (Some(x), Some(y)) = (recorded(&a)?, recorded(&b)?) else { return Err(INVALID_HANDLE) };
    y.point.stream.life.check()?;
    if !x.point.reached() || !y.point.reached() {
        return Err(NOT_READY);
    }
    let (Some(t0), Some(t1)) = (x.time.get(), y.time.get()) else { return Err(NOT_READY) };
    let ms = if t1 >= t0 { (*t1 - *t0).as_secs_f32() * 1e3 } else { -((*t0 - *t1).as_secs_f32() * 1e3) };
    // SAFETY: the program vouches for its pointer.
    unsafe { out(to, ms) }
}

fn mem_op(s: usize, per_thread: bool, op: Op) -> Result {
    submit::submit(&stream(s, per_thread)?, op).map(drop)
}

fn check_word(at: u64, size: u64) -> Result {
    if !at.is_multiple_of(size) {
        return Err(INVALID_VALUE);
    }
    driver()?.space.pieces(at, size).map(drop)
}

fn wait_value(s: usize, at: u64, value: u64, flags: u32, wide: bool, per_thread: bool) -> Result {
    check_word(at, if wide { 8 } else { 4 })?;
    if flags & !(3 | 1 << 30) != 0 {
        return Err(INVALID_VALUE);
    }
    mem_op(s, per_thread, Op::Wait { at, value, flags, wide })
}

fn write_value(s: usize, at: u64, value: u64, flags: u32, wide: bool, per_thread: bool) -> Result {
    check_word(at, if wide { 8 } else { 4 })?;
    if flags & !1 != 0 {
        return Err(INVALID_VALUE);
    }
    mem_op(s, per_thread, Op::Write { at, value, wide })
}

fn batch(s: usize, ops: &[BatchMemOp], per_thread: bool) -> Result {
    for op in ops {
        match op.operation {
            1 => wait_value(s, op.address, op.value & 0xffff_ffff, op.flags, false, per_thread)?,
            2 => write_value(s, op.address, op.value & 0xffff_ffff, op.flags, false, per_thread)?,
            4 => wait_value(s, op.address, op.value, op.flags, true, per_thread)?,
            5 => write_value(s, op.address, op.value, op.flags, true, per_thread)?,
            3 | 6 => {}
            _ => return Err(INVALID_VALUE),
        }
    }
    Ok(())
}

thread_local! {
    /// The array that the last query returned by reference.
    static LENT: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

struct Info {
    status: u32,
    id: u64,
    graph: usize,
    last: Vec<usize>,
}

fn capture_info(s: &Arc<Stream>) -> Result<Info> {
    s.life.check()?;
    match &*s.capture.lock() {
        None => {
            if s.role == Role::Legacy && capture::legacy_involved(&submit::context_of(s)?) {
                return Err(errors::STREAM_CAPTURE_IMPLICIT);
            }
            Ok(Info { status: 0, id: 0, graph: 0, last: Vec::new() })
        }
        Some(c) => {
            let graph = handle(&c.capture.graph);
            if GRAPHS.find(graph).is_none() {
                GRAPHS.insert(c.capture.graph.clone());
            }
            Ok(Info {
                status: if c.capture.invalid() { 2 } else { 1 },
                id: c.capture.id,
                graph,
                last: c.last.iter().map(handle).collect(),
            })
        }
    }
}

fn nodes(list: &[usize]) -> Result<Vec<Arc<Node>>> {
    list.iter().map(|h| NODES.find(*h).ok_or(INVALID_VALUE)).collect()
}

unsafe fn put_info(
    s: &Arc<Stream>,
    status: *mut u32,
    id: *mut u64,
    graph: *mut usize,
    deps: *mut *const usize,
    edges: *mut usize,
    n: *mut usize,
) -> Result {
    let info = capture_info(s)?;
    // SAFETY: the program vouches for its pointers, of which all but the first may be null.
    unsafe {
        out(status, info.status)?;
        if info.status == 1 {
            out_opt(id, info.id);
            out_opt(graph, info.graph);
            out_opt(n, info.last.len());
            out_opt(edges, 0);
            LENT.with(|l| {
                *l.borrow_mut() = info.last;
                out_opt(deps, l.borrow().as_ptr());
            });
        }
    }
    Ok(())
}

fn update_dependencies(s: &Arc<Stream>, list: &[usize], flags: u32) -> Result {
    let list = nodes(list)?;
    let mut state = s.capture.lock();
    let c = state.as_mut().ok_or(errors::ILLEGAL_STATE)?;
    if c.capture.invalid() {
        return Err(errors::STREAM_CAPTURE_INVALIDATED);
    }
    match flags {
        0 => c.last.extend(list),
        1 => c.last = list,
        _ => return Err(INVALID_VALUE),
    }
    Ok(())
}

export! {
    fn cuStreamCreate(to: *mut usize, flags: u32) { create(to, flags, 0) }
    fn cuStreamCreateWithPriority(to: *mut usize, flags: u32, priority: i32) { create(to, flags, priority) }
    fn cuStreamDestroy(h: usize) { destroy(h) }
    fn cuStreamDestroy_v2(h: usize) { destroy(h) }

    fn cuStreamSynchronize | cuStreamSynchronize_ptsz (h: usize) {
        submit::synchronize(&stream(h, PER_THREAD)?)
    }

    fn cuStreamQuery | cuStreamQuery_ptsz (h: usize) {
        if submit::query(&stream(h, PER_THREAD)?)? { Ok(()) } else { Err(NOT_READY) }
    }

    fn cuStreamGetPriority | cuStreamGetPriority_ptsz (h: usize, priority: *mut i32) {
        out(priority, stream(h, PER_THREAD)?.priority.load(Ordering::Relaxed))
    }

    fn cuStreamGetFlags | cuStreamGetFlags_ptsz (h: usize, flags: *mut u32) {
        out(flags, stream(h, PER_THREAD)?.flags)
    }

    fn cuStreamGetId | cuStreamGetId_ptsz (h: usize, id: *mut u64) {
        out(id, stream(h, PER_THREAD)?.id)
    }

    fn cuStreamGetDevice | cuStreamGetDevice_ptsz (h: usize, device: *mut i32) {
        out(device, stream(h, PER_THREAD)?.device as i32)
    }

    fn cuStreamGetCtx | cuStreamGetCtx_ptsz (h: usize, ctx: *mut usize) {
        out(ctx, stream(h, PER_THREAD)?.context)
    }

    fn cuStreamWaitEvent | cuStreamWaitEvent_ptsz (h: usize, e: usize, flags: u32) {
        let (s, event) = (stream(h, PER_THREAD)?, event(e)?);
        if flags > 1 {
            return Err(INVALID_VALUE);
        }
        if flags == 1 && capture::capture_node(&s, NodeKind::EventWait(e))? {
            return Ok(());
        }
        if capture::wait(&s, &event)? {
            return Ok(());
        }
        if let Some((counter, number)) = record_of_other(&event) {
            return submit::submit(&s, Op::Await(counter, number)).map(drop);
        }
        let Some(r) = event.state.lock().recorded.clone() else { return Ok(()) };
        if r.point.reached() {
            return s.life.check();
        }
        submit_after(&s, Op::Empty, vec![r.point]).map(drop)
    }

    fn cuStreamAddCallback | cuStreamAddCallback_ptsz (h: usize, func: usize, data: usize, flags: u32) {
        if func == 0 || flags != 0 {
            return Err(INVALID_VALUE);
        }
        let s = stream(h, PER_THREAD)?;
        submit::submit(&s, Op::Callback { func, data, stream: submit::public_handle(&s) }).map(drop)
    }

    fn cuLaunchHostFunc | cuLaunchHostFunc_ptsz (h: usize, func: usize, data: usize) {
        if func == 0 {
            return Err(INVALID_VALUE);
        }
        submit::submit(&stream(h, PER_THREAD)?, Op::Host { func, data }).map(drop)
    }

    fn cuStreamAttachMemAsync | cuStreamAttachMemAsync_ptsz (h: usize, at: u64, _length: usize, flags: u32) {
        if !matches!(flags, 1 | 2 | 4) || !driver()?.space.find(at).is_some_and(|a| a.on_host()) {
            return Err(INVALID_VALUE);
        }
        submit::submit(&stream(h, PER_THREAD)?, Op::Empty).map(drop)
    }

    fn cuStreamWaitValue32 | cuStreamWaitValue32_ptsz (h: usize, at: u64, value: u32, flags: u32) {
        wait_value(h, at, u64::from(value), flags, false, PER_THREAD)
    }
    fn cuStreamWaitValue32_v2 | cuStreamWaitValue32_v2_ptsz (h: usize, at: u64, value: u32, flags: u32) {
        wait_value(h, at, u64::from(value), flags, false, PER_THREAD)
    }
    fn cuStreamWaitValue64 | cuStreamWaitValue64_ptsz (h: usize, at: u64, value: u64, flags: u32) {
        wait_value(h, at, value, flags, true, PER_THREAD)
    }
    fn cuStreamWaitValue64_v2 | cuStreamWaitValue64_v2_ptsz (h: usize, at: u64, value: u64, flags: u32) {
        wait_value(h, at, value, flags, true, PER_THREAD)
    }
    fn cuStreamWriteValue32 | cuStreamWriteValue32_ptsz (h: usize, at: u64, value: u32, flags: u32) {
        write_value(h, at, u64::from(value), flags, false, PER_THREAD)
    }
    fn cuStreamWriteValue32_v2 | cuStreamWriteValue32_v2_ptsz (h: usize, at: u64, value: u32, flags: u32) {
        write_value(h, at, u64::from(value), flags, false, PER_THREAD)
    }
    fn cuStreamWriteValue64 | cuStreamWriteValue64_ptsz (h: usize, at: u64, value: u64, flags: u32) {
        write_value(h, at, value, flags, true, PER_THREAD)
    }
    fn cuStreamWriteValue64_v2 | cuStreamWriteValue64_v2_ptsz (h: usize, at: u64, value: u64, flags: u32) {
        write_value(h, at, value, flags, true, PER_THREAD)
    }
    fn cuStreamBatchMemOp | cuStreamBatchMemOp_ptsz (h: usize, n: u32, ops: *const BatchMemOp, _flags: u32) {
        batch(h, slice(ops, n as usize)?, PER_THREAD)
    }
    fn cuStreamBatchMemOp_v2 | cuStreamBatchMemOp_v2_ptsz (h: usize, n: u32, ops: *const BatchMemOp, _flags: u32) {
        batch(h, slice(ops, n as usize)?, PER_THREAD)
    }

    fn cuStreamCopyAttributes | cuStreamCopyAttributes_ptsz (to: usize, from: usize) {
        let priority = stream(from, PER_THREAD)?.priority.load(Ordering::Relaxed);
        stream(to, PER_THREAD)?.priority.store(priority, Ordering::Relaxed);
        Ok(())
    }

    fn cuStreamGetAttribute | cuStreamGetAttribute_ptsz (h: usize, id: u32, value: *mut [u64; 8]) {
        let s = stream(h, PER_THREAD)?;
        let mut v = [0u64; 8];
        match id {
            1 | 3 | 9 | 10 => {}
            8 => v[0] = s.priority.load(Ordering::Relaxed) as u32 as u64,
            _ => return Err(INVALID_VALUE),
        }
        out(value, v)
    }

    fn cuStreamSetAttribute | cuStreamSetAttribute_ptsz (h: usize, id: u32, value: *const [u64; 8]) {
        let s = stream(h, PER_THREAD)?;
        if value.is_null() || !matches!(id, 1 | 3 | 8 | 9 | 10) {
            return Err(INVALID_VALUE);
        }
        if id == 8 {
            // SAFETY: by the call's contract the value has 64 bytes.
            s.priority.store(unsafe { value.cast::<i32>().read() }, Ordering::Relaxed);
        }
        Ok(())
    }

    fn cuEventCreate(to: *mut usize, flags: u32) {
        let ctx = working()?;
        if flags & !7 != 0 || (flags & INTERPROCESS != 0 && flags & DISABLE_TIMING == 0) {
            return Err(INVALID_VALUE);
        }
        let shared = match flags & INTERPROCESS {
            0 => None,
            _ => Some(Arc::new(Counter::create()?)),
        };
        let state = parking_lot::Mutex::new(EventState::default());
        let e = Event { flags, context: handle(&ctx), device: ctx.device, shared, state };
        out(to, EVENTS.insert(Arc::new(e)))
    }

    fn cuEventDestroy(h: usize) {
        destroy_event(h)
    }

    fn cuEventDestroy_v2(h: usize) {
        destroy_event(h)
    }

    fn cuEventRecord | cuEventRecord_ptsz (e: usize, h: usize) { record(e, h, PER_THREAD, 0) }
    fn cuEventRecordWithFlags | cuEventRecordWithFlags_ptsz (e: usize, h: usize, flags: u32) { record(e, h, PER_THREAD, flags) }

    fn cuEventQuery(h: usize) {
        let e = event(h)?;
        let last = recorded(&e)?;
        forbid_unsafe()?;
        if let Some((counter, number)) = record_of_other(&e) {
            return if counter.is_complete(number) { Ok(()) } else { Err(NOT_READY) };
        }
        match last {
            Some(r) => {
                r.point.stream.life.check()?;
                if !r.point.reached() {
                    return Err(NOT_READY);
                }
                r.point.stream.life.flush();
                r.point.stream.life.check()
            }
            None => Ok(()),
        }
    }

    fn cuEventSynchronize(h: usize) {
        let e = event(h)?;
        submit::not_in_callback()?;
        let last = recorded(&e)?;
        forbid_unsafe()?;
        if let Some((counter, number)) = record_of_other(&e) {
            counter.wait(number, || false);
            return Ok(());
        }
        match last {
            Some(r) => {
                r.point.wait();
                r.point.stream.life.flush();
                r.point.stream.life.check()
            }
            None => Ok(()),
        }
    }

    fn cuEventElapsedTime(ms: *mut f32, start: usize, end: usize) { elapsed(ms, start, end) }
    fn cuEventElapsedTime_v2(ms: *mut f32, start: usize, end: usize) { elapsed(ms, start, end) }

    fn cuStreamBeginCapture | cuStreamBeginCapture_ptsz (h: usize) {
        capture::begin(&stream(h, PER_THREAD)?, 0, None, Vec::new())
    }

    fn cuStreamBeginCapture_v2 | cuStreamBeginCapture_v2_ptsz (h: usize, mode: u32) {
        capture::begin(&stream(h, PER_THREAD)?, mode, None, Vec::new())
    }

    fn cuStreamBeginCaptureToGraph | cuStreamBeginCaptureToGraph_ptsz (h: usize, graph: usize, deps: *const usize, _data: *const u8, n: usize, mode: u32) {
        let deps = nodes(slice(deps, n)?)?;
        capture::begin(&stream(h, PER_THREAD)?, mode, Some(GRAPHS.get(graph)?), deps)
    }

    fn cuStreamEndCapture | cuStreamEndCapture_ptsz (h: usize, graph: *mut usize) {
        let s = stream(h, PER_THREAD)?;
        // A program has its own graph already if the capture adds to it.
        if graph.is_null() && s.capture.lock().as_ref().is_none_or(|own| own.capture.new_graph) {
            return Err(INVALID_VALUE);
        }
        out_opt(graph, 0);
        let g = capture::end(&s)?;
        out_opt(graph, handle(&g));
        Ok(())
    }

    fn cuStreamIsCapturing | cuStreamIsCapturing_ptsz (h: usize, status: *mut u32) {
        out(status, capture_info(&stream(h, PER_THREAD)?)?.status)
    }

    fn cuStreamGetCaptureInfo | cuStreamGetCaptureInfo_ptsz (h: usize, status: *mut u32, id: *mut u64) {
        put_info(&stream(h, PER_THREAD)?, status, id, null_mut(), null_mut(), null_mut(), null_mut())
    }

    fn cuStreamGetCaptureInfo_v2 | cuStreamGetCaptureInfo_v2_ptsz (
        h: usize, status: *mut u32, id: *mut u64, graph: *mut usize, deps: *mut *const usize, n: *mut usize
    ) {
        put_info(&stream(h, PER_THREAD)?, status, id, graph, deps, null_mut(), n)
    }

    fn cuStreamGetCaptureInfo_v3 | cuStreamGetCaptureInfo_v3_ptsz (
        h: usize, status: *mut u32, id: *mut u64, graph: *mut usize, deps: *mut *const usize, edges: *mut usize, n: *mut usize
    ) {
        put_info(&stream(h, PER_THREAD)?, status, id, graph, deps, edges, n)
    }

    fn cuStreamUpdateCaptureDependencies | cuStreamUpdateCaptureDependencies_ptsz (h: usize, list: *const usize, n: usize, flags: u32) {
        update_dependencies(&stream(h, PER_THREAD)?, slice(list, n)?, flags)
    }

    fn cuStreamUpdateCaptureDependencies_v2 | cuStreamUpdateCaptureDependencies_v2_ptsz (
        h: usize, list: *const usize, _data: *const u8, n: usize, flags: u32
    ) {
        update_dependencies(&stream(h, PER_THREAD)?, slice(list, n)?, flags)
    }

    fn cuThreadExchangeStreamCaptureMode(mode: *mut u32) {
        driver()?;
        let old = capture::exchange_mode(super::read(mode)?)?;
        out(mode, old)
    }
}
