//! Streams as the program sees them: handles, completed work, capture.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use gpusession_proto::frame::{DRAIN, op};
use gpusession_proto::handle;

pub use crate::capture::{Capture, allowed, capturing, context_sync_allowed};
use crate::client::{Client, unavailable};
use crate::host_functions::{self, Due};
use crate::positions::{Cover, is_covered};
use crate::status::{
    INVALID_HANDLE, NOT_READY, Result, STREAM_CAPTURE_IMPLICIT, STREAM_CAPTURE_INVALIDATED,
    STREAM_CAPTURE_UNSUPPORTED,
};
pub use crate::stream::Stream;
use crate::{capture, clients, graph_uses, handles, regions, thread};

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

static STREAMS: RwLock<Vec<Option<Arc<Stream>>>> = RwLock::new(Vec::new());
static DEFAULTS: RwLock<Option<HashMap<u64, Arc<Stream>>>> = RwLock::new(None);
static NEXT_ID: AtomicU64 = AtomicU64::new(8);
/// Whether other processes may use memory of this one, or this one theirs.
static SHARED: AtomicBool = AtomicBool::new(false);

/// Makes every later synchronization wait, because another process may see whether it did.
pub fn shares() {
    SHARED.store(true, Ordering::SeqCst);
}

/// Returns `true` if another process may see what this one does with its memory.
pub fn shares_memory() -> bool {
    SHARED.load(Ordering::Relaxed)
}

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
    let stream =
        Arc::new(Stream::new(client, new, ctx, flags, priority, NEXT_ID.fetch_add(1, Ordering::Relaxed)));
    let slot = handle::index(new);
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
    destroy_known(&known)
}

fn destroy_known(known: &Stream) -> Result {
    let stream = known.handle;
    // A capture ends with the stream that it began on. For another stream, the driver checks at the
    // capture's end that this stream's work was joined (H100, driver 580).
    if let Some(capture) = known.capture().filter(|capture| capture.origin == stream) {
        abandon(&capture);
    }
    // First, so that another thread that looks at the streams finds its work in one place.
    known.client.positions.destroyed(&known.positions);
    STREAMS.write().unwrap_or_else(PoisonError::into_inner)[handle::index(stream)] = None;
    if known.blocking() {
        // A synchronization of the default stream still covers the work that this stream has waited
        // for.
        if !known.positions.waited_for().is_empty() {
            legacy(known.client, known.ctx)?.positions.inherit(&known.positions);
        }
    }
    known.client.free_blocks(op::STREAM_DESTROY)?;
    known.client.post(op::STREAM_DESTROY, |w| w.word(stream))?;
    handles::retire(stream);
    Ok(())
}

fn by_handle(stream: u64) -> Result<Arc<Stream>> {
    if handle::kind(stream) != handle::STREAM {
        return Err(INVALID_HANDLE);
    }
    let streams = STREAMS.read().unwrap_or_else(PoisonError::into_inner);
    match streams.get(handle::index(stream)) {
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
                    // A program that keeps starting threads has the streams of the living ones.
                    for ended in thread::take_ended_streams().into_iter().filter_map(|s| by_handle(s).ok()) {
                        // In its own context: the calling thread's may be gone, or of another
                        // worker. A lost worker has no stream any more.
                        let _ = thread::within(ended.ctx, || destroy_known(&ended));
                    }
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
    // A context that was destroyed gets none.
    client.device_of(ctx)?;
    let mut defaults = DEFAULTS.write().unwrap_or_else(PoisonError::into_inner);
    let new = || Arc::new(Stream::new(client, 0, ctx, 0, 0, 1));
    let stream = defaults.get_or_insert_default().entry(ctx).or_insert_with(new);
    Ok(stream.clone())
}

/// Returns the streams of contexts, default streams included.
pub fn of_contexts(contexts: &[u64]) -> Vec<Arc<Stream>> {
    let streams = STREAMS.read().unwrap_or_else(PoisonError::into_inner);
    let named = streams.iter().flatten().filter(|s| contexts.contains(&s.ctx)).cloned();
    named.chain(contexts.iter().filter_map(|ctx| known_legacy(*ctx))).collect()
}

/// Returns all streams of a client, default streams included.
pub fn all(client: &Client) -> Vec<Arc<Stream>> {
    let streams = STREAMS.read().unwrap_or_else(PoisonError::into_inner);
    let named = streams.iter().flatten().filter(|s| s.client.number == client.number).cloned();
    let defaults = DEFAULTS.read().unwrap_or_else(PoisonError::into_inner);
    let legacy =
        defaults.iter().flat_map(|known| known.values()).filter(|s| s.client.number == client.number);
    named.chain(legacy.cloned()).collect()
}

/// Returns `true` if all work of a client is known to be complete, and its results have landed.
///
/// The program cannot see whether a wait for its device then takes place. A thread's work counts
/// from the end of the call that enqueued it.
pub fn at_rest(client: &Client) -> bool {
    let complete = |s: &Stream| s.positions.complete(&client.positions);
    // Destroyed streams come last: another thread may destroy one meanwhile.
    !shares_memory() && !tracking(client) && each_stream(client, complete) && client.positions.orphans_done()
}

/// Returns `true` if all that a client's work has printed is there.
pub fn flushed(client: &Client) -> bool {
    each_stream(client, Stream::is_flushed) && client.positions.orphans_done()
}

fn each_stream(client: &Client, holds: impl Fn(&Stream) -> bool) -> bool {
    let holds = |s: &Arc<Stream>| s.client.number != client.number || holds(s);
    STREAMS.read().unwrap_or_else(PoisonError::into_inner).iter().flatten().all(holds)
        && DEFAULTS.read().unwrap_or_else(PoisonError::into_inner).iter().flat_map(HashMap::values).all(holds)
}

/// Holds later frames back until the copies to the device are complete, if the streams of these
/// contexts have no other work; `false` if they may have.
///
/// No thread waits for that, because the program cannot tell when such copies are complete.
pub fn bar_copies(client: &Client, contexts: &[u64]) -> Result<bool> {
    /// Frames that cost less than a wait.
    const FEW: usize = 2;
    if shares_memory() || tracking(client) {
        return Ok(false);
    }
    let mut busy = of_contexts(contexts);
    // A barrier of another thread may be behind a kernel, for which the program waits here.
    busy.retain(|stream| !stream.positions.complete(&client.positions));
    if !busy.iter().all(|stream| stream.only_copies_in()) || !client.positions.orphans_done() {
        return Ok(false);
    }
    busy.retain(|stream| !stream.positions.is_behind(&client.positions));
    if busy.len() > FEW {
        return Ok(false);
    }
    busy.iter().try_for_each(|stream| thread::within(stream.ctx, || stream.bar()))?;
    Ok(true)
}

/// Ends a capture whose graph the program never gets.
fn abandon(capture: &Arc<Capture>) {
    end(capture);
    if capture.new_graph {
        graph_uses::forget_graph(capture.graph);
        handles::retire(capture.graph);
    }
}

/// Removes the streams of a destroyed context, and ends their captures.
pub fn forget_context(ctx: u64) {
    capture::of_context(ctx).iter().for_each(abandon);
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
    /// Returns the streams, each up to a position, whose work precedes the work of frame `seq`.
    pub fn covers(&self, seq: u64) -> Vec<Cover> {
        self.covers_behind(seq, seq)
    }

    /// Returns the covered streams as [`Self::covers`] does.
    ///
    /// `own` is the last position of the stream's own work that counts.
    fn covers_behind(&self, seq: u64, own: u64) -> Vec<Cover> {
        let (default, others) = match self.blocking() {
            true => (known_legacy(self.ctx), blocking_streams(self.ctx)),
            false => (None, Vec::new()),
        };
        let others = others.iter().map(|other| &other.positions);
        self.positions.covers(seq, own, default.as_ref().map(|default| &default.positions), others)
    }

    /// Returns the streams that the next work on this one covers.
    ///
    /// Empty unless data is in transit or a host function may be due, because the result matters
    /// only then.
    pub fn covers_so_far(&self) -> Vec<Cover> {
        let client = self.client;
        if tracking(client) { self.covers(client.link.position() + 1) } else { Vec::new() }
    }

    /// Returns the kind of host function that may still run before the next work on the stream.
    pub fn due(&self) -> Due {
        if !host_functions::any() {
            return Due::Nothing;
        }
        host_functions::due(self.on(), &self.covers(self.client.link.position() + 1))
    }

    /// Waits until the data of every copy that a synchronization of this stream covers has landed.
    ///
    /// The caller knows from the server that the stream's work before `seq` is complete. An error
    /// if the connection was lost before: copies may not have landed.
    pub fn wait_landed(&self, seq: u64) -> Result {
        let before = self.positions.waited_for();
        if tracking(self.client) {
            // The stream's last work may be older than that of the default stream.
            let own = self.positions.last().min(seq);
            settle_covered(self.client, &self.covers_behind(seq, own))?;
        }
        // The loss of the link ends all transfers, so that none is left to wait for.
        self.client.link.check().map_err(unavailable)?;
        // Another thread may have added streams meanwhile.
        self.positions.landed(&before);
        Ok(())
    }

    /// Waits until all work on the stream is complete, or until the program cannot tell the
    /// difference.
    pub fn synchronize(&self) -> Result {
        let client = self.client;
        self.not_captured()?;
        client.free_blocks(op::STREAM_SYNC)?;
        if self.idle() && self.is_flushed() && !client.link.down.any() {
            return client.take_late_error();
        }
        // A kernel may wait for what the program has written since its launch.
        regions::upload_awaited(client)?;
        if !shares_memory() && self.only_copies_in() && self.is_flushed() && !client.link.down.any() {
            self.bar()?;
            return client.take_late_error();
        }
        self.ask(op::STREAM_SYNC)
    }

    /// Lets the worker replay no later frame before the stream's work is complete; no thread waits.
    fn bar(&self) -> Result {
        let seq = self.client.post(op::STREAM_SYNC, |w| w.word(self.handle))?;
        self.positions.barred(seq);
        Ok(())
    }

    /// Returns `true` if only copies to the device may be incomplete.
    fn only_copies_in(&self) -> bool {
        let default = if self.blocking() { known_legacy(self.ctx) } else { None };
        self.positions.only_copies_in(&self.client.positions, default.as_ref().map(|d| &d.positions))
    }

    /// Returns the error if the driver refuses work that was just enqueued; does not wait for that
    /// work.
    pub fn verdict(&self) -> Result {
        let client = self.client;
        let begun = client.link.begin_call(op::STREAM_QUERY, client.caller(), |w| w.word(self.handle));
        let reply = client.finish(begun.map_err(unavailable)?)?;
        match reply.status {
            0 | NOT_READY => client.take_late_error(),
            status => client.check_status(status),
        }
    }

    /// Waits for the stream (`STREAM_SYNC`) or queries it (`STREAM_QUERY`).
    pub fn ask(&self, operation: u16) -> Result {
        let client = self.client;
        client.free_blocks(operation)?;
        let begun = client
            .link
            .begin_call(operation, client.caller(), |w| w.word(self.handle))
            .map_err(unavailable)?;
        let seq = begun.seq;
        let reply = client.finish(begun)?;
        if reply.status == 0 {
            self.wait_landed(seq)?;
            match operation {
                op::STREAM_QUERY => self.finished(seq),
                _ => self.synced(seq),
            }
        }
        client.check_status(reply.status)
    }

    /// Waits until work that is added to the stream now would run at once, and until the program
    /// has what the device has changed.
    ///
    /// That is more than [`Self::synchronize`] waits for: work of the default stream precedes later
    /// work of this one, but a synchronization of this one does not wait for it.
    pub fn drain(&self) -> Result {
        self.not_captured()?;
        self.drain_unchecked()
    }

    /// Waits as [`Self::drain`] does, for a call that has checked what captures forbid.
    pub fn drain_unchecked(&self) -> Result {
        let client = self.client;
        client.free_blocks(op::STREAM_SYNC)?;
        let begun = client
            .link
            .begin_call(op::STREAM_SYNC, client.caller(), |w| {
                w.word(self.handle);
                w.word(DRAIN);
            })
            .map_err(unavailable)?;
        let seq = begun.seq;
        let reply = client.finish(begun)?;
        if reply.status == 0 {
            if tracking(client) {
                settle_covered(client, &self.covers(seq))?;
            }
            client.link.check().map_err(unavailable)?;
            self.synced(seq);
        }
        client.check_status(reply.status)
    }

    /// Checks a call that makes the program wait for the stream, which a capture forbids.
    pub fn not_captured(&self) -> Result {
        self.not_capturing()?;
        if self.handle == 0 {
            legacy_use(self.ctx)?;
        }
        allowed()
    }

    /// Refuses a call that no graph can contain, and invalidates the capture that it ends.
    pub fn not_capturing(&self) -> Result {
        let Some(capture) = self.capture() else { return Ok(()) };
        capture.invalidate();
        Err(STREAM_CAPTURE_UNSUPPORTED)
    }

    /// Checks a synchronous copy or fill.
    pub fn usable_synchronously(&self) -> Result {
        if !capturing() {
            return Ok(());
        }
        if self.handle == 0 {
            legacy_use(self.ctx)?;
        }
        allowed()
    }

    /// Checks a call that puts work on the stream.
    pub fn usable(&self) -> Result {
        if !capturing() {
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

/// Waits until the data of all covered copies has landed; the server has reported them complete.
///
/// An error if the connection was lost before.
pub fn settle_covered(client: &Client, covers: &[Cover]) -> Result {
    client.wait_detached(|t| is_covered(covers, t.on, t.seq))?;
    host_functions::forget_launches(|on, seq| is_covered(covers, on, seq));
    Ok(())
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
        match client.call(op::STREAM_SYNC, |w| w.word(stream.handle)) {
            // Another thread has destroyed it meanwhile.
            Err(INVALID_HANDLE) if by_handle(stream.handle).is_err() => {}
            waited => drop(waited?),
        }
    }
    Ok(())
}

/// Begins a capture on a stream.
pub fn begin(stream: &Stream, mode: i32, graph: u64, new_graph: bool) {
    stream.join(&Capture::begin(stream.handle, stream.ctx, mode, graph, new_graph));
}

/// Ends a capture, so that no stream takes part in it.
pub fn end(capture: &Arc<Capture>) {
    for stream in STREAMS.read().unwrap_or_else(PoisonError::into_inner).iter().flatten() {
        stream.leave(capture);
    }
    capture.end();
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use gpusession_link::lanes::HostRange;

    use super::*;
    use crate::fake_worker::Program;
    use crate::status::DEVICE_UNAVAILABLE;

    const NON_BLOCKING: u32 = 1;

    fn stream(program: &Program, flags: u32) -> Arc<Stream> {
        by_handle(create(program.client, program.ctx, flags, 0).unwrap()).unwrap()
    }

    #[test]
    fn priority_stays_in_the_range_of_the_device() {
        let program = Program::new();
        let priority = |wanted| {
            let handle = create(program.client, program.ctx, 0, wanted).unwrap();
            by_handle(handle).unwrap().priority.load(Ordering::Relaxed)
        };
        assert_eq!([priority(7), priority(-3), priority(-9)], [0, -3, -5]);
    }

    #[test]
    fn copy_that_has_not_landed_when_the_link_is_lost_is_an_error() {
        let program = Program::alone();
        let stream = stream(&program, NON_BLOCKING);
        let mut target = vec![0u8; 1 << 20];
        // SAFETY: the transfer ends with the link, before the memory.
        let range = unsafe { HostRange::new(target.as_mut_ptr() as usize, target.len()) };
        let seq = program.client.post(op::COPY_FROM_DEVICE, |_| {}).unwrap();
        program.client.link.down.expect(seq, range, stream.on(), true, Vec::new());
        stream.worked(seq);
        std::thread::scope(|scope| {
            let synchronized = scope.spawn(|| {
                thread::set_current(program.ctx);
                stream.synchronize()
            });
            // The worker reports the stream complete, and its data is still on the way.
            let asked = (0..10_000).any(|_| program.operations().contains(&op::STREAM_SYNC));
            program.lose();
            assert!(asked);
            assert_eq!(synchronized.join().unwrap(), Err(DEVICE_UNAVAILABLE));
        });
        assert!(!program.client.link.down.any(), "nothing lands any more");
    }

    #[test]
    fn synchronization_without_effect_returns_at_once() {
        let program = Program::new();
        let (stream, seq) = (stream(&program, NON_BLOCKING), program.client.link.position());
        program.frames();
        assert_eq!(stream.synchronize(), Ok(()));
        assert!(program.frames().is_empty(), "the stream is idle");
        stream.copied_in(seq + 1);
        program.answer(op::STREAM_SYNC, 1, &[]);
        assert_eq!(stream.synchronize(), Ok(()), "only copies to the device: nobody waits for the answer");
        assert_eq!(program.operations(), [op::STREAM_SYNC]);
        stream.worked(program.client.link.position());
        program.answer(op::STREAM_SYNC, 1, &[]);
        assert_eq!(stream.synchronize(), Err(1));
        assert_eq!(stream.synchronize(), Ok(()));
        program.frames();
        assert!(stream.idle());
        assert_eq!(stream.synchronize(), Ok(()));
        assert!(program.frames().is_empty(), "the last synchronization covered it");
    }

    /// Held by tests that create default streams of threads: each ends those of ended threads.
    static OWN_STREAMS: Mutex<()> = Mutex::new(());

    #[test]
    fn handle_means_a_stream_of_the_current_context() {
        let _alone = OWN_STREAMS.lock().unwrap_or_else(PoisonError::into_inner);
        let program = Program::new();
        let find = |stream: u64, default| {
            meant(program.client, stream as *mut c_void, default).map(|(_, stream)| stream.handle)
        };
        let legacy = Default::Legacy;
        assert_eq!((find(0, legacy), find(LEGACY, Default::PerThread)), (Ok(0), Ok(0)));
        let own = find(0, Default::PerThread).unwrap();
        assert_eq!((find(PER_THREAD, legacy), find(0, Default::PerThread)), (Ok(own), Ok(own)));
        assert_ne!(own, 0);
        forget_context(program.ctx);
        assert_eq!(find(own, legacy), Err(INVALID_HANDLE), "a reset destroyed it");
        assert_ne!(find(PER_THREAD, legacy), Ok(own));
        assert_eq!(thread::within(0, || find(0, legacy)), Err(crate::status::INVALID_CONTEXT));
        assert_eq!(find(program.ctx, legacy), Err(INVALID_HANDLE));
    }

    #[test]
    fn default_stream_of_an_ended_thread_is_destroyed_before_the_next_one() {
        let _alone = OWN_STREAMS.lock().unwrap_or_else(PoisonError::into_inner);
        let program = Program::new();
        let (client, ctx) = (program.client, program.ctx);
        let own = || meant(client, std::ptr::null_mut(), Default::PerThread).unwrap().1.handle;
        let in_a_thread = || {
            thread::set_current(ctx);
            own()
        };
        let ended = std::thread::scope(|scope| scope.spawn(in_a_thread).join().unwrap());
        assert!(by_handle(ended).is_ok(), "the end of a thread makes no call");
        program.frames();
        let elsewhere = Program::new();
        assert!(by_handle(own()).is_ok());
        assert_eq!(by_handle(ended).err(), Some(INVALID_HANDLE));
        assert_eq!(program.operations(), [op::STREAM_DESTROY], "in its own context");
        assert_eq!(elsewhere.operations(), [op::STREAM_CREATE]);
        own();
        assert!(program.operations().is_empty() && elsewhere.operations().is_empty());
    }

    #[test]
    fn blocking_streams_cover_the_default_stream_of_their_context() {
        let (program, other) = (Program::new(), Program::new());
        let (blocking, free) = (stream(&program, 0), stream(&program, NON_BLOCKING));
        let default = legacy(program.client, program.ctx).unwrap();
        let elsewhere = legacy(other.client, other.ctx).unwrap();
        default.worked(10);
        elsewhere.worked(10);
        let covers = blocking.covers(20);
        assert!(is_covered(&covers, default.on(), 10) && is_covered(&covers, blocking.on(), 19));
        assert!(!is_covered(&covers, free.on(), 1) && !is_covered(&covers, elsewhere.on(), 1));
        assert!(!is_covered(&free.covers(20), default.on(), 10));
        assert!(is_covered(&default.covers(20), blocking.on(), 19));
    }
}
