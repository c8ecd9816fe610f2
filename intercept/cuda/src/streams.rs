//! Streams as the program sees them: handles, completed work, capture.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use gpusession_link::lanes::On;
use gpusession_proto::frame::op;
use gpusession_proto::handle;

use crate::client::{Client, unavailable};
use crate::mapped::Region;
use crate::status::{
    INVALID_HANDLE, Result, STREAM_CAPTURE_IMPLICIT, STREAM_CAPTURE_INVALIDATED, STREAM_CAPTURE_UNSUPPORTED,
};
use crate::{clients, handles, host_functions, thread};

/// Meaning of a null stream to a variant of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Default {
    /// The context's one default stream.
    Legacy,
    /// The thread's own.
    PerThread,
}

/// `CU_STREAM_LEGACY`
pub const LEGACY: u64 = 1;
/// `CU_STREAM_PER_THREAD`
pub const PER_THREAD: u64 = 2;
/// `CU_STREAM_NON_BLOCKING`
const NON_BLOCKING: u32 = 1;

/// `CUstreamCaptureStatus`: the capture is in progress.
pub const ACTIVE: i32 = 1;
/// `CUstreamCaptureStatus`: the capture has been invalidated, but not ended.
pub const INVALIDATED: i32 = 2;

/// Positions of work in one worker's log.
#[derive(Default)]
pub struct Positions {
    /// Latest work on a default stream, or on a stream that is ordered with it.
    last_blocking: AtomicU64,
    /// Latest such work, except copies to the device.
    last_seen_blocking: AtomicU64,
    /// All work up to this position is complete, because a context was synchronized.
    ctx_done: AtomicU64,
}

impl Positions {
    /// Notes that the frame at this position has synchronized a context.
    pub fn context_synced(&self, seq: u64) {
        self.ctx_done.fetch_max(seq, Ordering::Relaxed);
    }
}

/// One stream.
pub struct Stream {
    pub client: &'static Client,
    /// 0 for a legacy default stream.
    pub handle: u64,
    pub ctx: u64,
    /// `CUstream_flags`
    pub flags: u32,
    /// Within the device's range; a smaller number is a higher priority.
    pub priority: i32,
    /// Number for `cuStreamGetId`.
    pub id: u64,
    last: AtomicU64,
    /// Position of the latest work except copies to the device, whose completion the host cannot
    /// observe.
    last_seen: AtomicU64,
    done: AtomicU64,
    /// Streams, each up to a position, that this one has waited for while their data was in
    /// transit.
    covers: Mutex<Vec<(On, u64)>>,
    capture: RwLock<Option<Arc<Capture>>>,
}

/// A capture in progress.
pub struct Capture {
    /// Number for `cuStreamGetCaptureInfo`.
    pub id: u64,
    /// `CUstreamCaptureMode`: 0 global, 1 thread-local, 2 relaxed.
    pub mode: i32,
    /// Number of the thread that began it.
    pub thread: u32,
    /// Handle of the stream that began it.
    pub origin: u64,
    /// Context of that stream.
    pub ctx: u64,
    /// Whether it was invalidated.
    pub invalid: AtomicBool,
    /// Graph to capture into, 0 for a new one.
    pub graph: u64,
    /// Host memory that its copies name.
    pub named: Mutex<Vec<Arc<Region>>>,
}

impl Capture {
    /// Invalidates the capture after an event that it cannot contain.
    pub fn invalidate(&self) {
        self.invalid.store(true, Ordering::Relaxed);
    }

    /// Returns `true` until the capture ends.
    pub fn open(self: &Arc<Self>) -> bool {
        OPEN.lock().unwrap_or_else(PoisonError::into_inner).iter().any(|c| Arc::ptr_eq(c, self))
    }
}

static STREAMS: RwLock<Vec<Option<Arc<Stream>>>> = RwLock::new(Vec::new());
static DEFAULTS: RwLock<Option<HashMap<u64, Arc<Stream>>>> = RwLock::new(None);
static NEXT_ID: AtomicU64 = AtomicU64::new(8);
/// Number of captures in progress: at zero, each question about capture is a single load.
static CAPTURES: AtomicU32 = AtomicU32::new(0);
static UNSAFE_CAPTURES: AtomicI32 = AtomicI32::new(0);
static OPEN: Mutex<Vec<Arc<Capture>>> = Mutex::new(Vec::new());

/// Creates a stream and returns its handle.
pub fn create(client: &'static Client, ctx: u64, flags: u32, priority: i32) -> Result<u64> {
    let (least, greatest) = client.device_of(ctx)?.priorities;
    let priority = priority.clamp(greatest, least);
    let new = client.mint(handle::STREAM);
    client.post(op::STREAM_CREATE, |w| {
        w.word(new);
        w.word(u64::from(flags));
        w.word(priority as u32 as u64);
    })?;
    let stream = Arc::new(Stream {
        client,
        handle: new,
        ctx,
        flags,
        priority,
        id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
        last: AtomicU64::new(0),
        last_seen: AtomicU64::new(0),
        done: AtomicU64::new(0),
        covers: Mutex::default(),
        capture: RwLock::new(None),
    });
    let slot = handle::slot(new) as usize;
    let mut streams = STREAMS.write().unwrap_or_else(PoisonError::into_inner);
    if streams.len() <= slot {
        streams.resize(slot + 1, None);
    }
    streams[slot] = Some(stream);
    Ok(new)
}

/// Destroys a stream.
pub fn destroy(stream: u64) -> Result {
    clients::get()?;
    let known = by_handle(stream)?;
    // A capture ends with the stream that it began on. For another stream, the driver checks at the
    // capture's end that this stream's work was joined (H100, driver 580).
    if let Some(capture) = known.capture().filter(|capture| capture.origin == stream) {
        end(&capture);
    }
    STREAMS.write().unwrap_or_else(PoisonError::into_inner)[handle::slot(stream) as usize] = None;
    if known.blocking() {
        // A synchronization of the default stream still covers the work that this stream has waited
        // for.
        let waited_for = known.covers.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if !waited_for.is_empty() {
            legacy(known.client, known.ctx)?.covers_also(&waited_for);
        }
    }
    known.client.post(op::STREAM_DESTROY, |w| w.word(stream))?;
    handles::retire(stream);
    Ok(())
}

fn by_handle(stream: u64) -> Result<Arc<Stream>> {
    if handle::kind(stream) != handle::STREAM {
        return Err(INVALID_HANDLE);
    }
    let streams = STREAMS.read().unwrap_or_else(PoisonError::into_inner);
    match streams.get(handle::slot(stream) as usize) {
        Some(Some(found)) if found.handle == stream => Ok(found.clone()),
        _ => Err(INVALID_HANDLE),
    }
}

/// Returns the stream that a program's handle means in the current context, and its client.
#[inline]
pub fn find(stream: *mut c_void, default: Default) -> Result<(&'static Client, Arc<Stream>)> {
    meant(clients::get()?, stream, default)
}

/// Finds a stream as [`find`] does, for the few calls that a host function may make.
pub fn find_even_in_host_function(
    stream: *mut c_void,
    default: Default,
) -> Result<(&'static Client, Arc<Stream>)> {
    meant(clients::even_in_host_function()?, stream, default)
}

#[inline]
fn meant(
    current: &'static Client,
    stream: *mut c_void,
    default: Default,
) -> Result<(&'static Client, Arc<Stream>)> {
    let stream = match (stream as u64, default) {
        (PER_THREAD, _) | (0, Default::PerThread) => {
            let ctx = thread::context()?;
            // The stream of a context that was reset no longer exists.
            match thread::default_stream(ctx).and_then(|known| by_handle(known).ok()) {
                Some(stream) => stream,
                None => {
                    let new = create(current, ctx, 0, 0)?;
                    thread::set_default_stream(ctx, new)?;
                    by_handle(new)?
                }
            }
        }
        (0 | LEGACY, _) => legacy(current, thread::context()?)?,
        (stream, _) => by_handle(stream)?,
    };
    Ok((stream.client, stream))
}

/// Returns the default stream of a context, if the program has used it.
fn known_legacy(ctx: u64) -> Option<Arc<Stream>> {
    DEFAULTS.read().unwrap_or_else(PoisonError::into_inner).as_ref().and_then(|d| d.get(&ctx).cloned())
}

/// Returns the default stream of a client's context.
pub fn legacy(client: &'static Client, ctx: u64) -> Result<Arc<Stream>> {
    if let Some(stream) = known_legacy(ctx) {
        return Ok(stream);
    }
    let mut defaults = DEFAULTS.write().unwrap_or_else(PoisonError::into_inner);
    let stream = defaults.get_or_insert_default().entry(ctx).or_insert_with(|| {
        Arc::new(Stream {
            client,
            handle: 0,
            ctx,
            flags: 0,
            priority: 0,
            id: 1,
            last: AtomicU64::new(0),
            last_seen: AtomicU64::new(0),
            done: AtomicU64::new(0),
            covers: Mutex::default(),
            capture: RwLock::new(None),
        })
    });
    Ok(stream.clone())
}

/// Removes the streams of a destroyed context.
pub fn forget_context(ctx: u64) {
    host_functions::forget_launches(|on, _| on.ctx == ctx);
    if let Some(defaults) = DEFAULTS.write().unwrap_or_else(PoisonError::into_inner).as_mut() {
        defaults.remove(&ctx);
    }
    let mut streams = STREAMS.write().unwrap_or_else(PoisonError::into_inner);
    for slot in streams.iter_mut() {
        if slot.as_ref().is_some_and(|s| s.ctx == ctx) {
            *slot = None;
        }
    }
}

impl Stream {
    /// Notes that the frame at this position put work on the stream.
    #[inline]
    pub fn worked(&self, seq: u64) {
        self.copied_in(seq);
        self.last_seen.fetch_max(seq, Ordering::Relaxed);
        if self.blocking() {
            self.client.positions.last_seen_blocking.fetch_max(seq, Ordering::Relaxed);
        }
    }

    /// Notes a frame that copies bytes, which the program has handed over, to memory that surely
    /// exists.
    pub fn copied_in(&self, seq: u64) {
        self.last.fetch_max(seq, Ordering::Relaxed);
        if self.blocking() {
            self.client.positions.last_blocking.fetch_max(seq, Ordering::Relaxed);
        }
    }

    /// Returns `true` if only copies noted by `copied_in` may be incomplete.
    ///
    /// The program cannot tell when these are complete, as long as its next work stays behind them.
    /// Always `false` for streams that also wait for the default stream's work.
    pub fn only_copies_in(&self) -> bool {
        let last = match (self.handle, self.blocking()) {
            (0, _) => self.client.positions.last_seen_blocking.load(Ordering::Relaxed),
            (_, true) => return false,
            (_, false) => self.last_seen.load(Ordering::Relaxed),
        };
        self.done.load(Ordering::Relaxed) >= last
    }

    /// Returns `true` if all work on the stream is known to be complete.
    pub fn idle(&self) -> bool {
        // The default stream is ordered with all blocking ones.
        let last = if self.handle == 0 {
            self.client.positions.last_blocking.load(Ordering::Relaxed)
        } else {
            self.last.load(Ordering::Relaxed)
        };
        self.done.load(Ordering::Relaxed) >= last
    }

    /// Returns `true` if the stream is idle, and so is all work that its next work would wait for.
    pub fn quiet(&self) -> bool {
        self.idle()
            && (self.handle == 0
                || !self.blocking()
                || self.done.load(Ordering::Relaxed)
                    >= self.client.positions.last_blocking.load(Ordering::Relaxed))
    }

    /// Returns `true` if the stream's work up to a position is known to be complete.
    pub fn done(&self, seq: u64) -> bool {
        self.done.load(Ordering::Relaxed) >= seq
            || self.client.positions.ctx_done.load(Ordering::Relaxed) >= seq
    }

    /// Notes that the stream's work up to this position is complete.
    pub fn synced(&self, seq: u64) {
        self.done.fetch_max(seq, Ordering::Relaxed);
    }

    /// Returns `true` if the stream is ordered with the default stream.
    fn blocking(&self) -> bool {
        self.handle == 0 || self.flags & NON_BLOCKING == 0
    }

    /// Returns the stream's name in transfers.
    pub fn on(&self) -> On {
        On { ctx: self.ctx, stream: self.handle, blocking: self.blocking() }
    }

    /// Returns the streams, each up to a position, whose work precedes the work of frame `seq`.
    pub fn covers(&self, seq: u64) -> Vec<(On, u64)> {
        self.covers_behind(seq, seq)
    }

    /// Returns the covered streams as [`Self::covers`] does.
    ///
    /// `own` is the last position of the stream's own work that counts: of the default stream's
    /// work only that before `own` is covered.
    fn covers_behind(&self, seq: u64, own: u64) -> Vec<(On, u64)> {
        let waited_for =
            |stream: &Stream| stream.covers.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let mut covers = waited_for(self);
        covers.push((self.on(), seq));
        if !self.blocking() {
            return covers;
        }
        // Order of the default stream: work on a blocking stream follows the default stream's last
        // work. That in turn follows all earlier work of the blocking streams.
        let before = if self.handle == 0 {
            seq
        } else {
            let Some(default) = known_legacy(self.ctx) else { return covers };
            let last = default.last.load(Ordering::Relaxed).min(own);
            covers.extend(waited_for(&default));
            covers.push((default.on(), last + 1));
            last
        };
        for other in blocking_streams(self.ctx).iter().filter(|other| other.handle != self.handle) {
            covers.extend(waited_for(other));
        }
        // Includes destroyed streams.
        covers.push((On { ctx: self.ctx, stream: ANY_BLOCKING, blocking: true }, before));
        covers
    }

    /// Returns the streams that the next work on this one covers.
    ///
    /// Empty unless data is in transit or a host function may be due, because the result matters
    /// only then.
    pub fn covers_so_far(&self) -> Vec<(On, u64)> {
        let client = self.client;
        if tracking(client) { self.covers(client.link.position() + 1) } else { Vec::new() }
    }

    /// Notes that the stream waits for an event that covers these.
    pub fn covers_also(&self, more: &[(On, u64)]) {
        let mut covers = self.covers.lock().unwrap_or_else(PoisonError::into_inner);
        for (on, seq) in more.iter().filter(|(on, _)| *on != self.on()) {
            match covers.iter_mut().find(|(known, _)| known == on) {
                Some((_, known)) => *known = (*known).max(*seq),
                None => covers.push((*on, *seq)),
            }
        }
    }

    /// Waits until the data of every copy that a synchronization of this stream covers has landed.
    ///
    /// The caller knows from the server that the stream's work before `seq` is complete.
    pub fn wait_landed(&self, seq: u64) {
        let waited_for = || self.covers.lock().unwrap_or_else(PoisonError::into_inner);
        let before = waited_for().clone();
        if tracking(self.client) {
            // The stream's last work may be older than that of the default stream.
            let own = self.last.load(Ordering::Relaxed).min(seq);
            settle_covered(self.client, &self.covers_behind(seq, own));
        }
        // Another thread may have added streams meanwhile.
        waited_for().retain(|covered| !before.contains(covered));
    }

    /// Waits until all work on the stream is complete, or until the program cannot tell the
    /// difference.
    pub fn synchronize(&self) -> Result {
        let client = self.client;
        self.not_captured()?;
        if self.idle() && !client.link.down.any() {
            return client.take_late_error();
        }
        if self.only_copies_in() && !client.link.down.any() {
            // No thread waits for the reply, but the worker replays no later frame before the
            // copies are complete.
            client.post(op::STREAM_SYNC, |w| w.word(self.handle))?;
            return client.take_late_error();
        }
        self.ask(op::STREAM_SYNC)
    }

    /// Waits for the stream (`STREAM_SYNC`) or queries it (`STREAM_QUERY`).
    pub fn ask(&self, operation: u16) -> Result {
        let client = self.client;
        let begun = client
            .link
            .begin_call(operation, client.caller(), |w| w.word(self.handle))
            .map_err(unavailable)?;
        let seq = begun.seq;
        let reply = client.link.finish_call(begun).map_err(unavailable)?;
        if reply.status == 0 {
            self.wait_landed(seq);
            self.synced(seq);
        }
        client.check_status(reply.status)
    }

    /// Returns the capture that the stream takes part in.
    #[inline]
    pub fn capture(&self) -> Option<Arc<Capture>> {
        if CAPTURES.load(Ordering::Relaxed) == 0 {
            return None;
        }
        self.capture.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Joins a capture, after a wait for one of its events.
    pub fn join(&self, capture: &Arc<Capture>) {
        *self.capture.write().unwrap_or_else(PoisonError::into_inner) = Some(capture.clone());
    }

    /// Checks a call that makes the program wait for the stream, which a capture forbids.
    pub fn not_captured(&self) -> Result {
        if let Some(capture) = self.capture() {
            capture.invalidate();
            return Err(STREAM_CAPTURE_UNSUPPORTED);
        }
        if self.handle == 0 {
            legacy_use(self.ctx)?;
        }
        allowed()
    }

    /// Checks a synchronous copy or fill.
    pub fn usable_synchronously(&self) -> Result {
        if CAPTURES.load(Ordering::Relaxed) == 0 {
            return Ok(());
        }
        if self.handle == 0 {
            legacy_use(self.ctx)?;
        }
        allowed()
    }

    /// Checks a call that puts work on the stream.
    pub fn usable(&self) -> Result {
        if CAPTURES.load(Ordering::Relaxed) == 0 {
            return Ok(());
        }
        match self.capture() {
            Some(capture) if capture.invalid.load(Ordering::Relaxed) => Err(STREAM_CAPTURE_INVALIDATED),
            Some(_) => Ok(()),
            None if self.handle == 0 => legacy_use(self.ctx),
            None => Ok(()),
        }
    }
}

/// Returns `true` if data is in transit or a host function may run, so that covered streams matter.
pub fn tracking(client: &Client) -> bool {
    client.link.down.any() || host_functions::any()
}

/// Handle that stands for every stream of a context that is ordered with its default stream.
const ANY_BLOCKING: u64 = u64::MAX;

/// Returns `true` if these cover a stream's work at a position.
pub fn is_covered(covers: &[(On, u64)], on: On, seq: u64) -> bool {
    covers.iter().any(|(covered, position)| {
        let any = covered.stream == ANY_BLOCKING && covered.ctx == on.ctx && on.blocking;
        (any || *covered == on) && seq < *position
    })
}

/// Waits until the data of all covered copies has landed; the server has reported them complete.
pub fn settle_covered(client: &Client, covers: &[(On, u64)]) {
    client.link.wait_detached(|t| is_covered(covers, t.on, t.seq));
    host_functions::forget_launches(|on, seq| is_covered(covers, on, seq));
}

/// Returns the streams of a context that are ordered with its default stream.
fn blocking_streams(ctx: u64) -> Vec<Arc<Stream>> {
    let streams = STREAMS.read().unwrap_or_else(PoisonError::into_inner);
    streams.iter().flatten().filter(|s| s.ctx == ctx && s.blocking()).cloned().collect()
}

/// Returns the captures that a use of a context's default stream would involve.
fn captures_of_legacy(ctx: u64) -> Vec<Arc<Capture>> {
    blocking_streams(ctx).iter().filter_map(|s| s.capture()).collect()
}

/// Returns `true` if a use of a context's default stream would be refused; invalidates no capture.
pub fn legacy_involved(ctx: u64) -> bool {
    capturing() && !captures_of_legacy(ctx).is_empty()
}

/// Refuses a use of the default stream that would involve captures, and invalidates those.
fn legacy_use(ctx: u64) -> Result {
    let captures = captures_of_legacy(ctx);
    captures.iter().for_each(|capture| capture.invalidate());
    if captures.is_empty() { Ok(()) } else { Err(STREAM_CAPTURE_IMPLICIT) }
}

/// Refuses to synchronize a context with captures, and invalidates those.
pub fn context_sync_allowed(ctx: u64) -> Result {
    if capturing() {
        let open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        let mine: Vec<_> = open.iter().filter(|c| c.ctx == ctx).collect();
        mine.iter().for_each(|capture| capture.invalidate());
        if !mine.is_empty() {
            return Err(STREAM_CAPTURE_UNSUPPORTED);
        }
    }
    allowed()
}

/// Waits for the current context before host memory that copies may use goes away.
///
/// A capture forbids to wait for the device as a whole. The function then waits for each stream
/// that takes no part in one.
pub fn wait_for_all(client: &'static Client) -> Result {
    if !capturing() {
        return client.call(op::CTX_SYNC, |_| {}).map(|_| ());
    }
    let ctx = thread::context()?;
    let mut all: Vec<_> =
        STREAMS.read().unwrap_or_else(PoisonError::into_inner).iter().flatten().cloned().collect();
    if !legacy_involved(ctx) {
        all.push(legacy(client, ctx)?);
    }
    for stream in all.iter().filter(|s| s.ctx == ctx && s.capture().is_none() && !s.idle()) {
        client.call(op::STREAM_SYNC, |w| w.word(stream.handle))?;
    }
    Ok(())
}

/// Returns `true` if any stream captures.
#[inline]
pub fn capturing() -> bool {
    CAPTURES.load(Ordering::Relaxed) != 0
}

/// Checks a call that CUDA calls unsafe during a capture, such as an allocation.
///
/// Returns an error if a capture forbids the calling thread to make it, and invalidates that
/// capture.
pub fn allowed() -> Result {
    if UNSAFE_CAPTURES.load(Ordering::Relaxed) == 0 {
        return Ok(());
    }
    let mode = thread::capture_mode();
    if mode == 2 {
        return Ok(());
    }
    let me = thread::id();
    let open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    let forbidding: Vec<_> = open
        .iter()
        .filter(|c| match c.mode {
            0 => mode == 0 || c.thread == me,
            1 => c.thread == me,
            _ => false,
        })
        .collect();
    if forbidding.is_empty() {
        return Ok(());
    }
    for capture in forbidding {
        capture.invalidate();
    }
    Err(STREAM_CAPTURE_UNSUPPORTED)
}

/// Begins a capture on a stream.
pub fn begin(stream: &Stream, mode: i32, graph: u64) {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let capture = Arc::new(Capture {
        id: NEXT.fetch_add(1, Ordering::Relaxed),
        mode,
        thread: thread::id(),
        origin: stream.handle,
        ctx: stream.ctx,
        invalid: AtomicBool::new(false),
        graph,
        named: Mutex::default(),
    });
    OPEN.lock().unwrap_or_else(PoisonError::into_inner).push(capture.clone());
    CAPTURES.fetch_add(1, Ordering::Relaxed);
    if mode != 2 {
        UNSAFE_CAPTURES.fetch_add(1, Ordering::Relaxed);
    }
    stream.join(&capture);
}

/// Ends a capture, so that no stream takes part in it.
pub fn end(capture: &Arc<Capture>) {
    for stream in STREAMS.read().unwrap_or_else(PoisonError::into_inner).iter().flatten() {
        let mut mine = stream.capture.write().unwrap_or_else(PoisonError::into_inner);
        if mine.as_ref().is_some_and(|c| Arc::ptr_eq(c, capture)) {
            *mine = None;
        }
    }
    OPEN.lock().unwrap_or_else(PoisonError::into_inner).retain(|c| !Arc::ptr_eq(c, capture));
    CAPTURES.fetch_sub(1, Ordering::Relaxed);
    if capture.mode != 2 {
        UNSAFE_CAPTURES.fetch_sub(1, Ordering::Relaxed);
    }
}
