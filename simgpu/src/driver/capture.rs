//! Stream capture: records streams into graphs, and refuses calls that are unsafe meanwhile.

use crate::driver::context::{Context, thread_id};
use crate::driver::graph::{GRAPHS, Graph, Node, NodeKind};
use crate::driver::op::Op;
use crate::driver::stream::{Event, Role, Stream};
use crate::errors::{
    ILLEGAL_STATE, INVALID_VALUE, Result, STREAM_CAPTURE_IMPLICIT, STREAM_CAPTURE_INVALIDATED,
    STREAM_CAPTURE_ISOLATION, STREAM_CAPTURE_MERGE, STREAM_CAPTURE_UNJOINED, STREAM_CAPTURE_UNMATCHED,
    STREAM_CAPTURE_UNSUPPORTED, STREAM_CAPTURE_WRONG_THREAD,
};
use crate::registry::handle;
use parking_lot::Mutex;
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

pub const GLOBAL: u32 = 0;
pub const THREAD_LOCAL: u32 = 1;
pub const RELAXED: u32 = 2;

/// One capture sequence, from begin to end.
pub struct Capture {
    pub id: u64,
    pub graph: Arc<Graph>,
    /// Whether the capture created the graph.
    pub new_graph: bool,
    pub mode: u32,
    origin: usize,
    thread: u64,
    context: usize,
    invalid: AtomicBool,
    streams: Mutex<Vec<Weak<Stream>>>,
    /// Last nodes of streams that took part and were destroyed.
    left: Mutex<Vec<Arc<Node>>>,
}

/// A stream's part in a capture.
#[derive(Clone)]
pub struct Capturing {
    pub capture: Arc<Capture>,
    /// The nodes on which its next entry depends.
    pub last: Vec<Arc<Node>>,
}

static ACTIVE: Mutex<Vec<Arc<Capture>>> = Mutex::new(Vec::new());

thread_local! {
    static MODE: Cell<u32> = const { Cell::new(GLOBAL) };
}

impl Capture {
    pub fn invalid(&self) -> bool {
        self.invalid.load(Ordering::SeqCst)
    }

    pub fn invalidate(&self) {
        self.invalid.store(true, Ordering::SeqCst);
    }

    /// Destroys the graph of a capture that ends without one.
    fn fail(&self) {
        if self.new_graph {
            self.graph.destroy();
        }
    }
}

/// Sets the calling thread's capture interaction mode, and returns the previous one.
pub fn exchange_mode(mode: u32) -> Result<u32> {
    if mode > RELAXED {
        return Err(INVALID_VALUE);
    }
    Ok(MODE.try_with(|m| m.replace(mode)).unwrap_or(GLOBAL))
}

pub fn capturing(s: &Stream) -> bool {
    s.capture.lock().is_some()
}

/// Refuses a call that is unsafe during a capture, and invalidates that capture.
pub fn forbid_unsafe() -> Result {
    let mode = MODE.try_with(Cell::get).unwrap_or(GLOBAL);
    if mode == RELAXED {
        return Ok(());
    }
    let me = thread_id();
    let mut hit = false;
    for c in ACTIVE.lock().iter() {
        let own = c.thread == me && c.mode != RELAXED;
        if own || (mode == GLOBAL && c.mode == GLOBAL) {
            c.invalidate();
            hit = true;
        }
    }
    if hit { Err(STREAM_CAPTURE_UNSUPPORTED) } else { Ok(()) }
}

/// Refuses to wait for or to query a capturing stream, or any stream where that is unsafe.
pub fn forbid_sync(s: &Arc<Stream>) -> Result {
    if let Some(c) = &*s.capture.lock() {
        c.capture.invalidate();
        return Err(STREAM_CAPTURE_UNSUPPORTED);
    }
    if s.role == Role::Legacy {
        forbid_legacy(&crate::driver::submit::context_of(s)?)?;
    }
    forbid_unsafe()
}

/// Refuses work in the legacy stream while it would have to wait for a capturing stream.
pub fn forbid_legacy(ctx: &Arc<Context>) -> Result {
    if ACTIVE.lock().is_empty() {
        return Ok(());
    }
    let mut hit = false;
    for s in ctx.streams().iter().filter(|s| s.blocking()) {
        if let Some(c) = &*s.capture.lock() {
            c.capture.invalidate();
            hit = true;
        }
    }
    if hit { Err(STREAM_CAPTURE_IMPLICIT) } else { Ok(()) }
}

/// Returns `true` if the legacy stream would wait for a capturing stream; invalidates no capture.
pub fn legacy_involved(ctx: &Arc<Context>) -> bool {
    !ACTIVE.lock().is_empty() && ctx.streams().iter().any(|s| s.blocking() && capturing(s))
}

/// Refuses to synchronize a context with a capture in progress.
pub fn forbid_context_sync(ctx: &Arc<Context>) -> Result {
    let me = handle(ctx);
    let mut hit = false;
    for c in ACTIVE.lock().iter().filter(|c| c.context == me) {
        c.invalidate();
        hit = true;
    }
    if hit { Err(STREAM_CAPTURE_UNSUPPORTED) } else { Ok(()) }
}

/// Ends the captures of a context that is gone.
pub fn context_gone(context: usize) {
    let mut gone = Vec::new();
    ACTIVE.lock().retain(|capture| {
        let of_context = capture.context == context;
        gone.extend(of_context.then(|| capture.clone()));
        !of_context
    });
    gone.iter().for_each(|capture| capture.fail());
}

/// Records an entry as a node if its stream is capturing; returns `false` if it is not.
pub fn capture_op(s: &Arc<Stream>, op: &Op) -> Result<bool> {
    let mut state = s.capture.lock();
    let Some(c) = state.as_mut() else { return Ok(false) };
    if c.capture.invalid() {
        return Err(STREAM_CAPTURE_INVALIDATED);
    }
    let Some(kind) = NodeKind::from_op(op) else {
        c.capture.invalidate();
        return Err(STREAM_CAPTURE_UNSUPPORTED);
    };
    let node = c.capture.graph.add(kind, c.last.clone())?;
    c.last = vec![node];
    Ok(true)
}

/// Adds a node of any kind to the stream's capture; returns `false` if it is not capturing.
pub fn capture_node(s: &Arc<Stream>, kind: NodeKind) -> Result<bool> {
    let mut state = s.capture.lock();
    let Some(c) = state.as_mut() else { return Ok(false) };
    if c.capture.invalid() {
        return Err(STREAM_CAPTURE_INVALIDATED);
    }
    let node = c.capture.graph.add(kind, c.last.clone())?;
    c.last = vec![node];
    Ok(true)
}

pub fn begin(s: &Arc<Stream>, mode: u32, graph: Option<Arc<Graph>>, last: Vec<Arc<Node>>) -> Result {
    if mode > RELAXED {
        return Err(INVALID_VALUE);
    }
    if s.role == Role::Legacy {
        return Err(STREAM_CAPTURE_UNSUPPORTED);
    }
    let mut state = s.capture.lock();
    if state.is_some() {
        return Err(ILLEGAL_STATE);
    }
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let capture = Arc::new(Capture {
        id: NEXT.fetch_add(1, Ordering::Relaxed),
        new_graph: graph.is_none(),
        graph: graph.unwrap_or_else(|| {
            let new = Graph::new();
            GRAPHS.insert(new.clone());
            new
        }),
        mode,
        origin: handle(s),
        thread: thread_id(),
        context: s.context,
        invalid: AtomicBool::new(false),
        streams: Mutex::new(vec![Arc::downgrade(s)]),
        left: Mutex::default(),
    });
    ACTIVE.lock().push(capture.clone());
    *state = Some(Capturing { capture, last });
    Ok(())
}

/// Returns `true` if each of `nodes` is one of `ends` or precedes one of them.
fn joined(nodes: &[Arc<Node>], ends: &[Arc<Node>]) -> bool {
    let (mut todo, mut seen) = (ends.to_vec(), std::collections::HashSet::new());
    while let Some(n) = todo.pop() {
        if seen.insert(handle(&n)) {
            todo.extend(n.after.lock().iter().cloned());
        }
    }
    nodes.iter().all(|n| seen.contains(&handle(n)))
}

/// Takes a destroyed stream out of its capture.
///
/// A capture that began on it ends without a graph. Another one continues, and its end finds
/// whether the stream's work was joined.
pub fn leave(s: &Arc<Stream>) {
    let Some(own) = s.capture.lock().take() else { return };
    let c = own.capture;
    if c.origin != handle(s) {
        c.left.lock().extend(own.last);
        return;
    }
    ACTIVE.lock().retain(|a| !Arc::ptr_eq(a, &c));
    for other in c.streams.lock().iter().filter_map(Weak::upgrade) {
        other.capture.lock().take_if(|o| Arc::ptr_eq(&o.capture, &c));
    }
    c.fail();
}

pub fn end(s: &Arc<Stream>) -> Result<Arc<Graph>> {
    let Some(own) = s.capture.lock().clone() else { return Err(ILLEGAL_STATE) };
    let c = own.capture;
    if c.origin != handle(s) {
        c.invalidate();
        return Err(STREAM_CAPTURE_UNMATCHED);
    }
    // A call from the wrong thread ends the capture all the same.
    let wrong_thread = c.mode != RELAXED && c.thread != thread_id();
    ACTIVE.lock().retain(|a| !Arc::ptr_eq(a, &c));
    let mut unjoined = !joined(&c.left.lock(), &own.last);
    for other in c.streams.lock().iter().filter_map(Weak::upgrade) {
        let mut state = other.capture.lock();
        if state.as_ref().is_some_and(|o| Arc::ptr_eq(&o.capture, &c)) {
            let last = state.take().map(|o| o.last).unwrap_or_default();
            unjoined |= !joined(&last, &own.last);
        }
    }
    let failure = if wrong_thread {
        STREAM_CAPTURE_WRONG_THREAD
    } else if c.invalid() {
        STREAM_CAPTURE_INVALIDATED
    } else if unjoined {
        STREAM_CAPTURE_UNJOINED
    } else {
        return Ok(c.graph.clone());
    };
    c.fail();
    Err(failure)
}

/// Records an event in a capturing stream; returns `false` if the stream is not capturing.
pub fn record(s: &Arc<Stream>, event: &Event) -> Result<bool> {
    let state = s.capture.lock();
    let Some(c) = state.as_ref() else { return Ok(false) };
    if c.capture.invalid() {
        return Err(STREAM_CAPTURE_INVALIDATED);
    }
    let mut e = event.state.lock();
    e.recorded = None;
    e.captured = Some((c.capture.clone(), c.last.clone()));
    Ok(true)
}

/// Makes a stream wait for an event if a capture is involved; returns `false` if none is.
pub fn wait(s: &Arc<Stream>, event: &Event) -> Result<bool> {
    let captured = event.state.lock().captured.clone();
    let mut state = s.capture.lock();
    match (state.as_mut(), captured) {
        (None, None) => Ok(false),
        (Some(own), None) => {
            // An event that was never recorded blocks no stream.
            if event.state.lock().recorded.is_none() {
                return Ok(true);
            }
            own.capture.invalidate();
            Err(STREAM_CAPTURE_ISOLATION)
        }
        (Some(own), Some((capture, nodes))) => {
            if !Arc::ptr_eq(&own.capture, &capture) {
                own.capture.invalidate();
                capture.invalidate();
                return Err(STREAM_CAPTURE_MERGE);
            }
            if capture.invalid() {
                return Err(STREAM_CAPTURE_INVALIDATED);
            }
            for n in nodes {
                if !own.last.iter().any(|o| Arc::ptr_eq(o, &n)) {
                    own.last.push(n);
                }
            }
            Ok(true)
        }
        (None, Some((capture, nodes))) => {
            let active = ACTIVE.lock().iter().any(|a| Arc::ptr_eq(a, &capture));
            if !active || capture.invalid() {
                return Err(STREAM_CAPTURE_INVALIDATED);
            }
            if s.role == Role::Legacy {
                capture.invalidate();
                return Err(STREAM_CAPTURE_IMPLICIT);
            }
            capture.streams.lock().push(Arc::downgrade(s));
            *state = Some(Capturing { capture, last: nodes });
            Ok(true)
        }
    }
}
