//! Replaying the log. The reader takes frames off the connection and never calls the driver. One executor, the *main* one,
//! replays all threads' frames in the log's order. A call that blocks (a full stream queue, a synchronize) must hold back
//! no other thread: then another executor becomes the main one, and the blocked one keeps the frames of its client thread
//! (and of threads whose frames depend on those) until it has caught up.

use std::collections::{HashMap, HashSet, VecDeque};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::{Buf as _, Bytes, BytesMut};
use gpusession_link::threads;
use gpusession_link::transport::{Transport, Wait};
use gpusession_proto::frame::{HEADER, Header, Reader, op};
use gpusession_proto::supervise::FromWorker;

use crate::activity::LOOK;
use crate::ops;
use crate::session::Session;

/// A call that takes longer than this while other frames wait is taken to be blocked.
const BLOCKED: Duration = Duration::from_millis(1);
/// Bounds the memory of frames that were read and not replayed yet: the reader stops reading beyond it. A client's thread sends at most
/// 4 MiB that it does not know to be replayed, so that this is enough for some 60 threads whose streams stand still.
const QUEUE_BYTES: usize = 256 << 20;
/// A thread's mark stays behind its frames that a blocked executor keeps, where they are more than this: a thread of which little waits
/// is free to do much elsewhere.
const KEPT_BYTES: usize = 256 << 10;

/// Bodies up to this size, those of nearly all launches among them, are carried along: two threads that count the users of one
/// buffer for each frame slow each other down.
const INLINE: usize = 192;

/// One frame of the log.
#[derive(Clone)]
pub struct Frame {
    /// Its header.
    pub header: Header,
    /// Its body.
    pub body: Body,
}

/// A frame's body: a multiple of 8 bytes.
#[derive(Clone)]
pub enum Body {
    /// Its length and its bytes.
    Inline(u8, Aligned),
    /// A part of what was read.
    Shared(Bytes),
}

/// As allocated memory is: the driver reads parameters of kernels in it.
#[derive(Clone)]
#[repr(align(8))]
pub struct Aligned([u8; INLINE]);

impl Body {
    /// Takes the body off the front of what was read.
    fn take(buf: &mut BytesMut, len: usize) -> Self {
        if len > INLINE {
            return Self::Shared(buf.split_to(len).freeze());
        }
        let mut bytes = Aligned([0; INLINE]);
        buf.copy_to_slice(&mut bytes.0[..len]);
        Self::Inline(len as u8, bytes)
    }
}

impl std::ops::Deref for Body {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Inline(len, bytes) => &bytes.0[..usize::from(*len)],
            Self::Shared(bytes) => bytes,
        }
    }
}

impl Frame {
    fn thread(&self) -> u32 {
        self.header.thread.get()
    }

    /// Memory that it takes while it waits.
    fn held_bytes(&self) -> usize {
        let shared = if let Body::Shared(bytes) = &self.body { bytes.len() } else { 0 };
        size_of::<Self>() + shared
    }

    /// Reads the body from its start.
    pub fn reader(&self) -> Reader<'_> {
        Reader::new(&self.body)
    }
}

/// What an executor knows of itself.
pub struct Executor {
    /// Handle of the context that is current in this OS thread.
    pub current: u64,
    id: usize,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Frame>,
    queued_bytes: usize,
    main: usize,
    executors: usize,
    /// Executors that wait to become the main one.
    idle: Vec<usize>,
    /// What the main executor is replaying, and since when.
    busy: Option<(Instant, Frame)>,
    /// Client threads whose frames a blocked executor keeps.
    kept_by: HashMap<u32, usize>,
    /// The frames it keeps, the one it is in first.
    kept: HashMap<usize, Kept>,
    /// Executors whose next kept frame waits for another one's.
    held: usize,
    threads: HashSet<u32>,
    last_thread: Option<u32>,
    ended: bool,
    pause: Pause,
}

/// Whether executors may call the driver.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Pause {
    #[default]
    No,
    /// The main executor is to see whether nothing is going on.
    Asked,
    /// Nobody calls the driver.
    Paused,
    /// As before, and the supervisor knows that the client wants something.
    Wanted,
    /// Nobody calls the driver any more: the worker ends.
    Over,
}

struct Kept {
    /// What the executor is in.
    current: Option<KeptFrame>,
    later: VecDeque<KeptFrame>,
}

struct KeptFrame {
    frame: Frame,
    touched: ops::Touched,
}

impl Kept {
    fn frames(&self) -> impl Iterator<Item = &KeptFrame> {
        self.current.iter().chain(&self.later)
    }
}

/// See the module.
pub struct Replay {
    state: Mutex<State>,
    changed: Condvar,
    /// Frames ready for the main executor: lets it spin without the lock.
    ready: AtomicU64,
    spinning: AtomicU64,
}

impl Replay {
    /// Nothing read yet.
    pub fn new() -> Self {
        Self {
            state: Mutex::default(),
            changed: Condvar::new(),
            ready: AtomicU64::new(0),
            spinning: AtomicU64::new(0),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads frames until the connection ends; starts the first executor.
    pub fn run(&self, session: &Arc<Session>, transport: &Transport, first: BytesMut) -> io::Result<()> {
        self.start_executor(&mut self.lock(), session)?;
        let mut buf = first;
        let mut scratch = vec![0; 256 << 10];
        let result = loop {
            match self.read_some(session, transport, &mut buf, &mut scratch) {
                Ok(true) => {}
                Ok(false) => break Ok(()),
                Err(e) => break Err(e),
            }
        };
        self.lock().ended = true;
        self.changed.notify_all();
        result
    }

    fn read_some(
        &self,
        session: &Arc<Session>,
        transport: &Transport,
        buf: &mut BytesMut,
        scratch: &mut [u8],
    ) -> io::Result<bool> {
        let mut frames = Vec::new();
        while buf.len() >= HEADER {
            let Some(bytes) = buf.first_chunk::<HEADER>() else { break };
            let header = Header::parse(bytes).map_err(io::Error::other)?;
            let len = HEADER + header.body_len();
            if buf.len() < len {
                buf.reserve(len - buf.len());
                break;
            }
            buf.advance(HEADER);
            frames.push(Frame { header, body: Body::take(buf, len - HEADER) });
        }
        if !frames.is_empty() {
            self.enqueue(session, frames)?;
            return Ok(true);
        }
        let spin = threads::spin_time();
        let received = loop {
            let wait = if self.watching() { Wait::AtMost(Duration::ZERO, BLOCKED) } else { Wait::Spin(spin) };
            match transport.recv(scratch, wait) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => self.relieve(session, &mut self.lock())?,
                other => break other?,
            }
        };
        buf.extend_from_slice(&scratch[..received]);
        Ok(received > 0)
    }

    /// Whether the main executor might be, or get, blocked with frames behind it.
    fn watching(&self) -> bool {
        !self.lock().queue.is_empty()
    }

    fn enqueue(&self, session: &Arc<Session>, frames: Vec<Frame>) -> io::Result<()> {
        let mut state = self.lock();
        while state.queued_bytes > QUEUE_BYTES {
            state = self.changed.wait_timeout(state, BLOCKED).unwrap_or_else(PoisonError::into_inner).0;
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
            session.supervisor().tell(&FromWorker::Wanted);
        }
        self.ready.store(state.queue.len() as u64, Ordering::Release);
        let wake = self.spinning.load(Ordering::Relaxed) == 0;
        self.relieve(session, &mut state)?;
        drop(state);
        if wake {
            self.changed.notify_all();
        }
        Ok(())
    }

    /// Lets another executor become the main one if the present one is blocked.
    fn relieve(&self, session: &Arc<Session>, state: &mut State) -> io::Result<()> {
        match &state.busy {
            Some((since, _)) if since.elapsed() > BLOCKED && !state.queue.is_empty() => {
                self.hand_over(session, state)
            }
            _ => Ok(()),
        }
    }

    /// Another executor becomes the main one. The present one keeps what depends on its frame, and the frames of the same
    /// client thread too, but for a copy that the thread itself does not wait for.
    fn hand_over(&self, session: &Arc<Session>, state: &mut State) -> io::Result<()> {
        let Some((_, current)) = state.busy.take() else { return Ok(()) };
        let blocked = state.main;
        if !ops::nobody_waits(&current) {
            state.kept_by.insert(current.thread(), blocked);
        }
        let touched = ops::touches(session, &current);
        state.kept.insert(
            blocked,
            Kept { current: Some(KeptFrame { frame: current, touched }), later: VecDeque::new() },
        );
        match state.idle.pop() {
            Some(next) => {
                state.main = next;
                self.changed.notify_all();
                Ok(())
            }
            None => self.start_executor(state, session),
        }
    }

    fn start_executor(&self, state: &mut State, session: &Arc<Session>) -> io::Result<()> {
        let id = state.executors;
        state.executors += 1;
        state.main = id;
        let session = session.clone();
        std::thread::Builder::new().name(format!("executor-{id}")).spawn(move || {
            session.replay.execute(&session, &mut Executor { current: 0, id });
        })?;
        Ok(())
    }

    fn execute(&self, session: &Arc<Session>, executor: &mut Executor) {
        loop {
            let Some((frame, kept)) = self.next(session, executor) else { return };
            let bulk = ops::is_bulk(&frame);
            if !kept && (bulk || ops::may_block(&frame)) {
                // Known to wait: others, if there are any, go on at once.
                let mut state = self.lock();
                let others = (bulk || state.threads.len() > 1) && state.main == executor.id;
                let failed = others && self.hand_over(session, &mut state).is_err();
                drop(state);
                if failed {
                    session.end("no thread for another executor");
                }
            }
            // A client that waits for a thread that is gone would wait for ever.
            if catch_unwind(AssertUnwindSafe(|| ops::perform(session, executor, &frame))).is_err() {
                session.end("internal error in the worker");
            }
            session.consumed.fetch_max(frame.header.seq.get(), Ordering::Relaxed);
        }
    }

    /// Next frame for this executor, which has finished the one before, and whether it is one that it kept while it was blocked.
    fn next(&self, session: &Session, executor: &mut Executor) -> Option<(Frame, bool)> {
        let spin = threads::spin_time();
        let mut spun = false;
        let mut state = self.lock();
        if state.main == executor.id {
            state.busy = None;
        } else if let Some(kept) = state.kept.get_mut(&executor.id) {
            let finished = kept.current.take().is_some();
            if finished && state.held > 0 {
                self.changed.notify_all();
            }
        }
        loop {
            if state.ended && state.queue.is_empty() {
                return None;
            }
            if state.main == executor.id && state.pause == Pause::Asked {
                drop(state);
                let quiet = session.activity.look(session, executor);
                state = self.lock();
                // What came meanwhile is work, too.
                let quiet = quiet && state.idle();
                if state.pause == Pause::Asked {
                    state.pause = if quiet { Pause::Paused } else { Pause::No };
                }
                session.supervisor().tell(&FromWorker::Paused { quiet });
                continue;
            }
            if matches!(state.pause, Pause::Paused | Pause::Wanted | Pause::Over) {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            if state.main == executor.id {
                let state = &mut *state;
                while let Some(frame) = state.queue.pop_front() {
                    self.ready.store(state.queue.len() as u64, Ordering::Release);
                    let frame = match keep(session, state, frame) {
                        Some(frame) => frame,
                        None => continue,
                    };
                    state.queued_bytes -= frame.held_bytes();
                    let now = Instant::now();
                    session.activity.frame(frame.header.op.get(), now);
                    state.busy = Some((now, frame.clone()));
                    return Some((frame, false));
                }
            } else if state.kept.contains_key(&executor.id) {
                if held(&state, executor.id) {
                    state.held += 1;
                    state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                    state.held -= 1;
                    continue;
                }
                let next = state.kept.get_mut(&executor.id).and_then(|kept| kept.later.pop_front());
                if let Some(next) = next {
                    let frame = next.frame.clone();
                    state.queued_bytes -= frame.held_bytes();
                    if let Some(kept) = state.kept.get_mut(&executor.id) {
                        kept.current = Some(next);
                    }
                    return Some((frame, true));
                }
                // Caught up: its threads' frames go in the common order again.
                state.kept.remove(&executor.id);
                state.kept_by.retain(|_, keeper| *keeper != executor.id);
                state.idle.push(executor.id);
            }
            if !spun && state.main == executor.id && !spin.is_zero() {
                // A short spin: the next frame usually comes soon, and sleeping costs more than the call.
                spun = true;
                self.spinning.fetch_add(1, Ordering::SeqCst);
                drop(state);
                let started = Instant::now();
                while self.ready.load(Ordering::Acquire) == 0 && started.elapsed() < spin {
                    std::hint::spin_loop();
                }
                self.spinning.fetch_sub(1, Ordering::SeqCst);
                state = self.lock();
                continue;
            }
            if state.main == executor.id && session.activity.outstanding() {
                // The GPU may work for long without a word from the client: then it is not idle.
                let (next, late) =
                    self.changed.wait_timeout(state, LOOK).unwrap_or_else(PoisonError::into_inner);
                state = next;
                if late.timed_out() && state.idle() && state.pause == Pause::No {
                    drop(state);
                    session.activity.look(session, executor);
                    state = self.lock();
                }
            } else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            spun = false;
        }
    }

    /// Calls the driver no more if nothing is going on, and tells the supervisor.
    pub fn pause(&self, session: &Session) {
        let mut state = self.lock();
        if state.idle() && state.pause == Pause::No {
            state.pause = Pause::Asked;
            drop(state);
            self.changed.notify_all();
        } else {
            session.supervisor().tell(&FromWorker::Paused { quiet: false });
        }
    }

    /// Goes on.
    pub fn resume(&self) {
        let mut state = self.lock();
        if state.pause != Pause::Over {
            state.pause = Pause::No;
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Calls the driver no more, for good. Whether all calls came back by then.
    pub fn halt(&self, deadline: Instant) -> bool {
        self.lock().pause = Pause::Over;
        loop {
            let state = self.lock();
            if state.busy.is_none() && state.kept.values().all(|kept| kept.current.is_none()) {
                return true;
            }
            drop(state);
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Whether an executor is in a frame now: it waits for the GPU or for bytes.
    pub fn waits(&self) -> bool {
        let state = self.lock();
        state.busy.is_some() || !state.kept.is_empty()
    }
}

impl State {
    /// Whether every frame that came is done.
    fn idle(&self) -> bool {
        self.queue.is_empty() && self.busy.is_none() && self.kept.is_empty()
    }
}

/// Gives the frame to the blocked executor that must get it: its thread's, or one that keeps a frame it depends on. Returns
/// it if there is none.
fn keep(session: &Session, state: &mut State, frame: Frame) -> Option<Frame> {
    // What the program has changed in memory that both see is the device's at once, as on a local card: kept behind its own
    // thread, it would come too late for another thread's launch, or over what that one has sent later.
    if state.kept.is_empty() || frame.header.op.get() == op::WRITE_HOST {
        return Some(frame);
    }
    let touched = ops::touches(session, &frame);
    let depends = |kept: &Kept| kept.frames().any(|earlier| touched.depends_on(&earlier.touched));
    let keeper = match state.kept_by.get(&frame.thread()) {
        Some(keeper) => Some(*keeper),
        None if frame.header.op.get() == op::MARK => keeps_most_of(state, frame.thread()),
        None => state.kept.iter().find(|(_, kept)| depends(kept)).map(|(id, _)| *id),
    };
    match keeper.and_then(|keeper| state.kept.get_mut(&keeper)) {
        Some(kept) => {
            kept.later.push_back(KeptFrame { frame, touched });
            None
        }
        None => Some(frame),
    }
}

/// The blocked executor that keeps most of a client thread's frames, if that is much.
fn keeps_most_of(state: &State, thread: u32) -> Option<usize> {
    let bytes = |kept: &Kept| {
        let frames = kept.frames().map(|kept| &kept.frame).filter(|frame| frame.thread() == thread);
        frames.map(Frame::held_bytes).sum::<usize>()
    };
    let much =
        state.kept.iter().map(|(id, kept)| (bytes(kept), *id)).filter(|(bytes, _)| *bytes > KEPT_BYTES);
    much.max().map(|(_, id)| id)
}

/// Whether the next frame that `keeper` keeps depends on an earlier one that another blocked executor keeps. Waiting follows
/// the log's order, so no two executors wait for each other.
fn held(state: &State, keeper: usize) -> bool {
    let Some(next) = state.kept.get(&keeper).and_then(|kept| kept.later.front()) else { return false };
    state.kept.iter().any(|(id, kept)| {
        *id != keeper
            && kept.frames().any(|earlier| {
                earlier.frame.header.seq.get() < next.frame.header.seq.get()
                    && next.touched.depends_on(&earlier.touched)
            })
    })
}
