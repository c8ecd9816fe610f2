//! When the client's GPU work was last seen, and what the supervisor hears of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use gpusession_proto::frame::op;
use gpusession_proto::supervise::{FromWorker, Usage};

use crate::driver::{Handle, status};
use crate::execute::Executor;
use crate::session::Session;

/// How often the supervisor hears, at most.
const REPORT: Duration = Duration::from_secs(1);
/// How often the GPU is asked whether it still works, while the client sends nothing.
pub const LOOK: Duration = Duration::from_millis(500);
/// `CU_STREAM_LEGACY`
const LEGACY: usize = 1;
/// `CU_STREAM_CAPTURE_STATUS_NONE`
const NOT_CAPTURING: i32 = 0;

/// See the module.
pub struct Activity {
    start: Instant,
    /// Milliseconds after `start`.
    last: AtomicU64,
    /// Work was queued since the GPU was last seen without any.
    outstanding: AtomicBool,
    calls: AtomicU64,
}

impl Default for Activity {
    fn default() -> Self {
        Self {
            start: Instant::now(),
            last: AtomicU64::new(0),
            outstanding: AtomicBool::new(false),
            calls: AtomicU64::new(0),
        }
    }
}

impl Activity {
    /// A frame is replayed from now on.
    pub fn frame(&self, operation: u16, now: Instant) {
        self.calls.fetch_add(1, Ordering::Relaxed);
        if works(operation) {
            self.outstanding.store(true, Ordering::Relaxed);
            self.seen(now);
        }
    }

    /// The GPU works, or a copy is under way.
    pub fn seen(&self, now: Instant) {
        let at = now.saturating_duration_since(self.start).as_millis() as u64;
        self.last.fetch_max(at, Ordering::Relaxed);
    }

    /// Whether the GPU may have work that the client does not wait for.
    pub fn outstanding(&self) -> bool {
        self.outstanding.load(Ordering::Relaxed)
    }

    /// Asks the GPU, in an executor's thread: whether everything is done.
    pub fn look(&self, session: &Session, executor: &mut Executor) -> bool {
        // The threads of copies on their way call the driver, too.
        let quiet = quiet(session, executor) && session.landing.idle() && session.lanes.idle();
        if quiet {
            self.outstanding.store(false, Ordering::Relaxed);
        } else {
            self.seen(Instant::now());
        }
        quiet
    }

    /// Tells the supervisor, in a thread of its own that never calls the driver, as long as the process lives.
    pub fn report(session: &Arc<Session>) -> std::io::Result<()> {
        let session = session.clone();
        let tell = move || {
            let (mut told, activity) = (None, &session.activity);
            loop {
                if session.replay.waits() {
                    activity.seen(Instant::now());
                }
                let last = activity.last.load(Ordering::Relaxed);
                let mut usage = Usage {
                    calls: activity.calls.load(Ordering::Relaxed),
                    bytes_to_device: session.lanes.bytes_to_device(),
                    bytes_from_device: session.lanes.bytes_from_device(),
                    memory_bytes: session.quota.used(),
                    contexts: session.contexts.most_on_a_device(),
                    idle_usec: 0,
                };
                if told != Some((last, usage)) {
                    told = Some((last, usage));
                    let idle = activity.start.elapsed().saturating_sub(Duration::from_millis(last));
                    usage.idle_usec = u64::try_from(idle.as_micros()).unwrap_or(u64::MAX);
                    session.supervisor().tell(&FromWorker::Usage(usage));
                }
                std::thread::sleep(REPORT);
            }
        };
        std::thread::Builder::new().name("report".into()).spawn(tell).map(drop)
    }
}

/// Operations that are work of the GPU, or a copy.
fn works(operation: u16) -> bool {
    matches!(
        operation,
        op::LAUNCH
            | op::GRAPH_LAUNCH
            | op::COPY_TO_DEVICE
            | op::COPY_FROM_DEVICE
            | op::COPY_BOX
            | op::WRITE_HOST
            | op::STREAM_BATCH
            | op::HOST_FUNC
    ) || crate::generated::works(operation)
}

/// Whether all streams have done everything. Streams that are captured are not asked, which would end the capture.
fn quiet(session: &Session, executor: &mut Executor) -> bool {
    let call = &session.driver.call;
    let mut streams: Vec<Handle> = session.streams.all().iter().map(|s| s.object.0).collect();
    let capturing = |stream: Handle| {
        let mut status = NOT_CAPTURING;
        // SAFETY: a stream of this worker, or the name of the current context's default stream; the pointer is valid.
        let said = unsafe { (call.cuStreamIsCapturing)(stream, &mut status) };
        said == 0 && status != NOT_CAPTURING
    };
    // SAFETY: as above.
    let busy = |stream: Handle| unsafe { (call.cuStreamQuery)(stream) } == status::NOT_READY;
    if streams.iter().any(|s| capturing(*s)) {
        return false;
    }
    let contexts = session.contexts.all();
    // The default streams: each context has its own.
    let default = contexts.iter().any(|context| {
        // SAFETY: a context of this worker.
        unsafe { (call.cuCtxSetCurrent)(context.0) };
        executor.current = 0;
        busy(LEGACY as Handle)
    });
    !default && !streams.drain(..).any(busy)
}
