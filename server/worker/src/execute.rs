//! Replay of the log.
//!
//! The reader takes frames off the connection and never calls the driver. One executor, the *main*
//! one, replays all threads' frames in the log's order.
//!
//! A call that blocks (a full stream queue, a synchronize) must not hold back other threads. Then
//! another executor becomes the main one. The blocked one keeps the frames of its client thread,
//! and of threads whose frames depend on those, until it has caught up.
#![expect(clippy::disallowed_methods, reason = "other executors are polled at the end")]

use std::collections::{HashMap, HashSet, VecDeque};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use bytes::{Buf as _, BytesMut};
use gpusession_link::line::Line;
use gpusession_link::spin::{self, Spin};
use gpusession_link::transport::Wait;
use gpusession_link::worker_end::Next;
use gpusession_proto::frame::{HEADER, Header, op};
use gpusession_proto::supervise::FromWorker;

use crate::activity::{Activity, POLL_INTERVAL};
use crate::answer::Answer;
use crate::driver::status;
use crate::executor::Executor;
use crate::frame::{Body, Frame};
use crate::handles::Table;
use crate::objects::Stream;
use crate::order;
use crate::replies::Replies;
use crate::supervise::Supervisor;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Builder, Condvar, Mutex, MutexGuard};

mod kept;

use kept::{KEPT_BYTES, Kept, KeptFrame};

/// Time after which a call counts as blocked while other frames wait.
const BLOCKED_TIMEOUT: Duration = Duration::from_millis(if cfg!(feature = "schedules") { 0 } else { 1 });
/// Time without a connection after which the worker reports the outage to the supervisor.
const OUTAGE_DELAY: Duration = Duration::from_secs(1);
/// Bound on the memory of frames read but not yet replayed; the reader stops reading beyond it.
///
/// A client's thread has at most 4 MiB of frames under way without news of their replay. That
/// leaves room for some 60 threads whose streams are blocked.
const MAX_QUEUE_BYTES: usize = 256 << 20;

/// Outcome of one look at the connection.
enum Read {
    Some,
    /// The stream has ended, or a later connection has replaced it.
    Ended,
    Broken(io::Error),
}

#[derive(Default)]
struct State {
    queue: VecDeque<Frame>,
    queued_bytes: usize,
    main: usize,
    executors: usize,
    /// Executors that wait to become the main one.
    idle: Vec<usize>,
    /// Frame that the main executor replays, and since when.
    busy: Option<(Instant, Frame)>,
    /// Client threads whose frames a blocked executor keeps.
    kept_by: HashMap<u32, usize>,
    /// Frames of each blocked executor, the one that it replays first.
    kept: HashMap<usize, Kept>,
    /// Number of executors whose next kept frame waits for another executor's.
    held: usize,
    threads: HashSet<u32>,
    last_thread: Option<u32>,
    /// Streams on which a capture has begun, each with the client thread that began it.
    capturing: HashMap<u64, u32>,
    ended: bool,
    pause: Pause,
}

/// Whether executors may call the driver.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Pause {
    #[default]
    No,
    /// The main executor checks whether all work is done.
    Asked,
    /// No executor calls the driver.
    Paused,
    /// No executor calls the driver, and the supervisor knows that frames wait.
    Wanted,
    /// No executor ever calls the driver again: the worker exits.
    Over,
}

/// State of the client and the operations on it, as far as the replay needs them.
pub trait Perform: Send + Sync + 'static {
    /// Returns the replay of the client's log.
    fn replay(&self) -> &Replay;

    /// Returns the channel to the supervisor.
    fn supervisor(&self) -> &Supervisor;

    /// Returns the frames to the client.
    fn replies(&self) -> &Replies;

    /// Returns the time of the last GPU work.
    fn activity(&self) -> &Activity;

    /// Returns the client's streams.
    fn streams(&self) -> &Table<Stream>;

    /// Queries the GPU, in an executor's thread; returns `true` if all work is done.
    fn query(&self, executor: &mut Executor) -> bool;

    /// Replays one frame and answers it.
    fn perform(self: &Arc<Self>, executor: &mut Executor, frame: &Frame);

    /// Ends the worker, after it has sent the reason to the supervisor and the client.
    fn end(&self, reason: &str) -> !;
}

/// Queue of frames, and the executors that replay them.
pub struct Replay {
    state: Mutex<State>,
    changed: Condvar,
    /// Number of times that frames arrived, so that the main executor can spin without the lock.
    arrivals: AtomicU64,
    spinning: AtomicU64,
    /// How long the reader and the main executor spin.
    reading: Spin,
    executing: Spin,
}

impl Replay {
    /// Starts without frames and without executors.
    pub fn new() -> Self {
        Self {
            state: Mutex::default(),
            changed: Condvar::new(),
            arrivals: AtomicU64::new(0),
            spinning: AtomicU64::new(0),
            reading: Spin::default(),
            executing: Spin::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the first executor and reads frames until the last connection ends.
    pub fn run<P: Perform>(&self, session: &Arc<P>, first: Line) -> io::Result<()> {
        let mut state = self.lock();
        state.main = self.spare_executor(&mut state, session)?;
        drop(state);
        let mut scratch = vec![0; 256 << 10];
        let mut line = first;
        let result = loop {
            let mut buf = BytesMut::new();
            let end = loop {
                match self.read_some(session, &line, &mut buf, &mut scratch) {
                    Ok(Read::Some) => {}
                    Ok(Read::Ended) => break Ok(()),
                    Ok(Read::Broken(e)) => break Err(e),
                    Err(e) => return self.over(Err(e)),
                }
            };
            match self.next_line(session, &line) {
                Ok(Ok(next)) => line = next,
                Ok(Err(Some(reason))) => break Err(io::Error::other(reason)),
                Ok(Err(None)) => break end,
                Err(e) => break Err(e),
            }
        };
        self.over(result)
    }

    fn over(&self, result: io::Result<()>) -> io::Result<()> {
        self.lock().ended = true;
        self.changed.notify_all();
        result
    }

    /// Waits for the connection after one that has ended; otherwise the reason why none comes.
    fn next_line<P: Perform>(
        &self,
        session: &Arc<P>,
        ended: &Line,
    ) -> io::Result<Result<Line, Option<String>>> {
        let since = Instant::now();
        let tell = |over| {
            let ms = u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX);
            session.supervisor().report(&FromWorker::Outage { ms, over });
        };
        let mut told = false;
        loop {
            // Executors may be blocked without need, whether the client is there or not.
            let patience = if self.watching() { BLOCKED_TIMEOUT } else { Duration::from_secs(1) };
            match session.replies().end.next(ended, since, patience) {
                Next::Line(line) => {
                    tell(true);
                    return Ok(Ok(line));
                }
                Next::Over(reason) => return Ok(Err(reason)),
                Next::Later => {
                    if !told && since.elapsed() >= OUTAGE_DELAY {
                        told = true;
                        tell(false);
                    }
                    self.relieve(session, &mut self.lock())?;
                }
            }
        }
    }

    fn read_some<P: Perform>(
        &self,
        session: &Arc<P>,
        line: &Line,
        buf: &mut BytesMut,
        scratch: &mut [u8],
    ) -> io::Result<Read> {
        let mut frames = Vec::new();
        let mut taking = (buf.len() >= HEADER).then(|| session.replies().end.taking(line)).flatten();
        if buf.len() >= HEADER && taking.is_none() {
            return Ok(Read::Ended);
        }
        while let Some(taking) = taking.as_mut().filter(|_| buf.len() >= HEADER) {
            let Some(bytes) = buf.first_chunk::<HEADER>() else { break };
            let header = Header::parse(bytes).map_err(io::Error::other)?;
            let len = HEADER + header.body_len();
            if buf.len() < len {
                buf.reserve(len - buf.len());
                break;
            }
            buf.advance(HEADER);
            let body = Body::take(buf, len - HEADER);
            if taking.count(&header).map_err(io::Error::other)? {
                frames.push(Frame { header, body });
            }
        }
        drop(taking);
        if !frames.is_empty() {
            self.enqueue(session, frames)?;
            return Ok(Read::Some);
        }
        let (begin, mut spin) = (Instant::now(), self.reading.time());
        let received = loop {
            // The frame before is usually still in the queue, and the next one comes soon.
            let wait = if self.watching() { Wait::AtMost(spin, BLOCKED_TIMEOUT) } else { Wait::Spin(spin) };
            match line.transport.recv(scratch, wait) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    self.relieve(session, &mut self.lock())?;
                    spin = Duration::ZERO;
                }
                Ok(0) => return Ok(Read::Ended),
                Ok(received) => {
                    self.reading.waited(begin.elapsed());
                    break received;
                }
                Err(e) => return Ok(Read::Broken(e)),
            }
        };
        buf.extend_from_slice(&scratch[..received]);
        Ok(Read::Some)
    }

    /// Returns `true` if frames wait behind an executor that may be blocked without need.
    fn watching(&self) -> bool {
        let state = self.lock();
        !state.queue.is_empty() || state.kept.values().any(|kept| kept.later() > 0)
    }

    fn enqueue<P: Perform>(&self, session: &Arc<P>, frames: Vec<Frame>) -> io::Result<()> {
        let mut state = self.lock();
        while state.queued_bytes > MAX_QUEUE_BYTES {
            state =
                self.changed.wait_timeout(state, BLOCKED_TIMEOUT).unwrap_or_else(PoisonError::into_inner).0;
            self.relieve(session, &mut state)?;
        }
        for frame in frames {
            if state.last_thread != Some(frame.thread()) {
                state.last_thread = Some(frame.thread());
                state.threads.insert(frame.thread());
            }
            state.queued_bytes += frame.held_bytes();
            state.queue.push_back(frame);
        }
        if state.pause == Pause::Paused {
            state.pause = Pause::Wanted;
            session.supervisor().report(&FromWorker::Wanted);
        }
        let wake = self.spinning.load(Ordering::Relaxed) == 0;
        self.relieve(session, &mut state)?;
        drop(state);
        // Without the lock, for which a spinning executor would have to wait.
        self.arrivals.fetch_add(1, Ordering::Release);
        if wake {
            self.changed.notify_all();
        }
        Ok(())
    }

    /// Makes another executor the main one if the present one is blocked.
    ///
    /// Another one also replays what a blocked one keeps without need.
    fn relieve<P: Perform>(&self, session: &Arc<P>, state: &mut State) -> io::Result<()> {
        let blocked = |kept: &Kept| {
            kept.later() > 0 && kept.since().is_some_and(|since| since.elapsed() > BLOCKED_TIMEOUT)
        };
        let blocked: Vec<usize> =
            state.kept.iter().filter(|(_, kept)| blocked(kept)).map(|(id, _)| *id).collect();
        for id in blocked {
            self.step_aside(session, state, id)?;
        }
        match &state.busy {
            // Every later frame stays behind a change of shared memory, which waits for no stream.
            Some((_, frame)) if order::overtakes(frame) => Ok(()),
            Some((since, _)) if since.elapsed() > BLOCKED_TIMEOUT && !state.queue.is_empty() => {
                self.hand_over(session, state)
            }
            _ => Ok(()),
        }
    }

    /// Makes another executor the main one.
    ///
    /// The present one keeps the frames that depend on its own. It also keeps the frames of the
    /// same client thread, unless its own is a copy that the thread does not wait for.
    fn hand_over<P: Perform>(&self, session: &Arc<P>, state: &mut State) -> io::Result<()> {
        let Some((_, current)) = state.busy.take() else { return Ok(()) };
        let blocked = state.main;
        if !order::is_unawaited_copy(&current) {
            state.kept_by.insert(current.thread(), blocked);
        }
        let touched = order::touches(session.streams(), &current);
        state.kept.insert(blocked, Kept::behind(KeptFrame { frame: current, touched }));
        state.main = self.spare_executor(state, session)?;
        Ok(())
    }

    /// Gives another executor the frames that a blocked one keeps and that need not wait for its
    /// present frame.
    ///
    /// An executor that was blocked once keeps all frames of its thread. Among them can be a copy
    /// that the thread does not wait for. The thread's work on other streams continues then, as
    /// behind such a copy of the main executor.
    fn step_aside<P: Perform>(&self, session: &Arc<P>, state: &mut State, id: usize) -> io::Result<()> {
        let Some(go) = state.kept.get_mut(&id).and_then(Kept::part) else { return Ok(()) };
        // The threads' next frames stay behind what they depend on, here or there.
        state.kept_by.retain(|_, keeper| *keeper != id);
        if !go.is_empty() {
            let other = self.spare_executor(state, session)?;
            state.kept.insert(other, go.into_iter().collect());
        }
        Ok(())
    }

    /// Returns an idle executor that runs once the lock is free.
    fn spare_executor<P: Perform>(&self, state: &mut State, session: &Arc<P>) -> io::Result<usize> {
        if let Some(id) = state.idle.pop() {
            self.changed.notify_all();
            return Ok(id);
        }
        let id = state.executors;
        state.executors += 1;
        let session = session.clone();
        Builder::new().name(format!("executor-{id}")).spawn(move || {
            session.replay().execute(&session, &mut Executor { current: 0, id });
        })?;
        Ok(id)
    }

    fn execute<P: Perform>(&self, session: &Arc<P>, executor: &mut Executor) {
        loop {
            let Some((frame, kept)) = self.next(session.as_ref(), executor) else { return };
            let bulk = order::is_bulk(&frame);
            if !kept && (bulk || order::may_block(&frame)) {
                // The frame is known to wait: other threads, if any exist, continue at once.
                let mut state = self.lock();
                let others = (bulk || state.threads.len() > 1) && state.main == executor.id;
                let failed = others && self.hand_over(session, &mut state).is_err();
                drop(state);
                if failed {
                    session.end("cannot start a thread for another executor");
                }
            }
            // Without this, the client would wait forever for a thread that has panicked.
            if catch_unwind(AssertUnwindSafe(|| session.perform(executor, &frame))).is_err() {
                session.end("internal error in the worker");
            }
            session.activity().replayed(frame.header.op.get());
        }
    }

    /// Returns the next frame for this executor, and whether it kept that frame while blocked.
    ///
    /// The executor has finished its previous frame.
    fn next<P: Perform>(&self, session: &P, executor: &mut Executor) -> Option<(Frame, bool)> {
        let (spin, mut idle) = (self.executing.time(), None);
        let mut state = self.lock();
        if state.main == executor.id {
            state.busy = None;
        } else if let Some(kept) = state.kept.get_mut(&executor.id)
            && kept.finish()
            && state.held > 0
        {
            self.changed.notify_all();
        }
        loop {
            if state.ended && state.queue.is_empty() {
                return None;
            }
            if state.main == executor.id && state.pause == Pause::Asked {
                drop(state);
                let quiet = session.query(executor);
                state = self.lock();
                // Frames that arrived meanwhile are work, too.
                let quiet = quiet && state.idle();
                if state.pause == Pause::Asked {
                    state.pause = if quiet { Pause::Paused } else { Pause::No };
                }
                session.supervisor().report(&FromWorker::Paused { quiet });
                continue;
            }
            if matches!(state.pause, Pause::Paused | Pause::Wanted | Pause::Over) {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            if state.main == executor.id {
                while let Some(frame) = state.queue.pop_front() {
                    let taken = place(session, &mut state, frame);
                    let (Place::Here(frame) | Place::Known(frame)) = &taken else { continue };
                    state.queued_bytes -= frame.held_bytes();
                    let now = Instant::now();
                    session.activity().frame(frame.header.op.get(), now);
                    match taken {
                        Place::Here(frame) => {
                            idle.iter().for_each(|since: &Instant| self.executing.waited(since.elapsed()));
                            state.busy = Some((now, frame.clone()));
                            return Some((frame, false));
                        }
                        Place::Known(query) => {
                            drop(state);
                            session.activity().replayed(query.header.op.get());
                            let answer = Answer::default();
                            session.replies().reply(query.header.seq.get(), status::NOT_READY, &answer);
                            state = self.lock();
                        }
                        Place::Kept => {}
                    }
                }
            } else if state.kept.contains_key(&executor.id) {
                if held(&state, executor.id) {
                    state.held += 1;
                    state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                    state.held -= 1;
                    continue;
                }
                if let Some(frame) = state.take_kept(executor.id, session.activity()) {
                    return Some((frame, true));
                }
                // Caught up: its threads' frames follow the common order again.
                state.kept.remove(&executor.id);
                state.kept_by.retain(|_, keeper| *keeper != executor.id);
                state.idle.push(executor.id);
            }
            let left = spin.saturating_sub(idle.get_or_insert_with(Instant::now).elapsed());
            if state.main == executor.id && !left.is_zero() {
                // The next frame usually arrives soon, and a sleep costs more than the call.
                let seen = self.arrivals.load(Ordering::Acquire);
                self.spinning.fetch_add(1, Ordering::SeqCst);
                drop(state);
                spin::until(left, || self.arrivals.load(Ordering::Acquire) != seen);
                self.spinning.fetch_sub(1, Ordering::SeqCst);
                state = self.lock();
                continue;
            }
            if state.main == executor.id && session.activity().outstanding() {
                // The GPU may work for a long time while the client is silent: it is not idle then.
                let (next, late) =
                    self.changed.wait_timeout(state, POLL_INTERVAL).unwrap_or_else(PoisonError::into_inner);
                state = next;
                if late.timed_out() && state.idle() && state.pause == Pause::No {
                    drop(state);
                    session.query(executor);
                    state = self.lock();
                }
            } else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    /// Stops calling the driver if no work is under way, and reports the result to the supervisor.
    pub fn pause(&self, supervisor: &Supervisor) {
        let mut state = self.lock();
        if state.idle() && state.pause == Pause::No {
            state.pause = Pause::Asked;
            drop(state);
            self.changed.notify_all();
        } else {
            supervisor.report(&FromWorker::Paused { quiet: false });
        }
    }

    /// Lets executors call the driver again.
    pub fn resume(&self) {
        let mut state = self.lock();
        if state.pause != Pause::Over {
            state.pause = Pause::No;
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Stops calling the driver for good; returns `true` if all calls returned before the deadline.
    pub fn halt(&self, deadline: Instant) -> bool {
        self.lock().pause = Pause::Over;
        loop {
            let state = self.lock();
            if state.busy.is_none() && state.kept.values().all(|kept| !kept.replays()) {
                return true;
            }
            drop(state);
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Notes that no capture has begun on a stream after all.
    pub fn no_capture(&self, stream: u64) {
        self.lock().capturing.remove(&stream);
    }

    /// Returns `true` if an executor replays a frame: it waits for the GPU or for bytes.
    pub fn waits(&self) -> bool {
        let state = self.lock();
        state.busy.is_some() || !state.kept.is_empty()
    }
}

impl State {
    /// Takes the next frame that a blocked executor keeps, to be replayed now.
    fn take_kept(&mut self, executor: usize, activity: &Activity) -> Option<Frame> {
        let now = Instant::now();
        let frame = self.kept.get_mut(&executor)?.start(now)?;
        self.queued_bytes -= frame.held_bytes();
        activity.frame(frame.header.op.get(), now);
        Some(frame)
    }

    /// Returns `true` if a frame is of a thread that captures; notes where captures begin and end.
    ///
    /// Any thread may end one, and so does the end of its stream or of its context. Captures of
    /// other contexts then lose their order where another thread is blocked.
    fn captures(&mut self, frame: &Frame) -> bool {
        let stream = || order::word(frame, 0);
        let operation = frame.header.op.get();
        if operation == op::CAPTURE_BEGIN {
            self.capturing.insert(stream(), frame.thread());
        }
        let captures = self.capturing.values().any(|thread| *thread == frame.thread());
        match operation {
            op::CAPTURE_END | op::STREAM_DESTROY => drop(self.capturing.remove(&stream())),
            op::CTX_DESTROY | op::PRIMARY_RESET => self.capturing.clear(),
            _ => {}
        }
        captures
    }

    /// Returns `true` if every received frame is done.
    fn idle(&self) -> bool {
        self.queue.is_empty() && self.busy.is_none() && self.kept.is_empty()
    }
}

/// Where the next frame of the log goes.
enum Place {
    /// The main executor replays it.
    Here(Frame),
    /// A query of work that a blocked executor has still to do: it is not ready.
    Known(Frame),
    /// A blocked executor keeps it.
    Kept,
}

/// Passes a frame to the blocked executor that must replay it, or returns the frame.
///
/// That executor keeps the frames of the same thread, or a frame that this one depends on.
fn place<P: Perform>(session: &P, state: &mut State, frame: Frame) -> Place {
    let captures = state.captures(&frame);
    if state.kept.is_empty() || order::overtakes(&frame) {
        return Place::Here(frame);
    }
    let mut touched = order::touches(session.streams(), &frame);
    if captures {
        touched.add_to_capture(frame.thread());
    }
    if state.kept.values().any(|kept| kept.answers(&frame, &touched)) {
        return Place::Known(frame);
    }
    let keeper = match state.kept_by.get(&frame.thread()) {
        Some(keeper) => Some(*keeper),
        None if frame.header.op.get() == op::MARK => keeps_most_of(state, frame.thread()),
        None => state.kept.iter().find(|(_, kept)| kept.holds(&touched)).map(|(id, _)| *id),
    };
    match keeper.and_then(|keeper| state.kept.get_mut(&keeper)) {
        Some(kept) => {
            kept.push(KeptFrame { frame, touched });
            Place::Kept
        }
        None => Place::Here(frame),
    }
}

/// Returns the blocked executor that keeps most bytes of a thread, if above [`KEPT_BYTES`].
fn keeps_most_of(state: &State, thread: u32) -> Option<usize> {
    let bytes = |kept: &Kept| {
        let frames = kept.frames().map(|kept| &kept.frame).filter(|frame| frame.thread() == thread);
        frames.map(Frame::held_bytes).sum::<usize>()
    };
    let much =
        state.kept.iter().map(|(id, kept)| (bytes(kept), *id)).filter(|(bytes, _)| *bytes > KEPT_BYTES);
    much.max().map(|(_, id)| id)
}

/// Returns `true` if the next frame of `keeper` depends on an earlier one of another executor.
///
/// Both executors are blocked. Waiting follows the log's order, so two executors never wait for
/// each other.
fn held(state: &State, keeper: usize) -> bool {
    let Some(next) = state.kept.get(&keeper).and_then(Kept::next) else { return false };
    state.kept.iter().any(|(id, kept)| *id != keeper && kept.holds_earlier(next))
}

#[cfg(all(test, feature = "schedules"))]
mod schedules;
#[cfg(all(test, not(feature = "schedules")))]
mod tests;
