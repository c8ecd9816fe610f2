//! Whether the GPU still works for the client, and the reports of it to the supervisor.
#![expect(clippy::disallowed_methods, reason = "a thread of its own reports at intervals")]

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use gpusession_proto::supervise::{FromWorker, Usage};

use crate::activity::Activity;
use crate::driver::{Handle, status};
use crate::executor::Executor;
use crate::session::Session;

/// Shortest time between two reports to the supervisor.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);
/// `CU_STREAM_LEGACY`
const LEGACY: usize = 1;
/// `CU_STREAM_CAPTURE_STATUS_NONE`
const NOT_CAPTURING: i32 = 0;

impl Activity {
    /// Queries the GPU, in an executor's thread; returns `true` if all work is done.
    pub fn query(&self, session: &Session, executor: &mut Executor) -> bool {
        // The threads of copies under way call the driver, too.
        let quiet = quiet(session, executor) && session.landing.idle() && session.lanes.idle();
        if quiet {
            self.outstanding.store(false, Ordering::Relaxed);
        } else {
            self.seen(Instant::now());
        }
        quiet
    }

    /// Returns the figures up to now; never calls the driver.
    pub fn usage(&self, session: &Session) -> Usage {
        let last = Duration::from_millis(self.last.load(Ordering::Relaxed));
        let idle = self.start.elapsed().saturating_sub(last);
        Usage {
            calls: self.calls.load(Ordering::Relaxed),
            bytes_to_device: session.lanes.bytes_to_device(),
            bytes_from_device: session.lanes.bytes_from_device(),
            memory_bytes: session.quota.used(),
            contexts: session.contexts.most_on_a_device(),
            idle_usec: u64::try_from(idle.as_micros()).unwrap_or(u64::MAX),
        }
    }

    /// Starts the thread that reports to the supervisor until the process exits.
    ///
    /// The thread never calls the driver: a call could block it.
    pub fn report(session: &Arc<Session>) -> std::io::Result<()> {
        let session = session.clone();
        let tell = move || {
            let (mut told, activity) = (None, &session.activity);
            loop {
                if session.replay.waits() {
                    activity.seen(Instant::now());
                }
                let usage = activity.usage(&session);
                let seen = (activity.last.load(Ordering::Relaxed), Usage { idle_usec: 0, ..usage });
                if told != Some(seen) {
                    told = Some(seen);
                    session.supervisor().report(&FromWorker::Usage(usage));
                }
                std::thread::sleep(REPORT_INTERVAL);
            }
        };
        std::thread::Builder::new().name("report".into()).spawn(tell).map(drop)
    }
}

/// Returns `true` if all streams have finished their work.
///
/// While a stream captures, none is queried, since a query would invalidate the capture; the result
/// is `false`.
fn quiet(session: &Session, executor: &mut Executor) -> bool {
    let call = &session.driver.call;
    let mut streams: Vec<Handle> = session.streams.all().iter().map(|s| s.object.0).collect();
    let capturing = |stream: Handle| {
        let mut status = NOT_CAPTURING;
        // SAFETY: a stream of this worker, or the name of the current context's default stream; the
        // pointer is valid.
        let said = unsafe { (call.cuStreamIsCapturing)(stream, &mut status) };
        said == 0 && status != NOT_CAPTURING
    };
    // SAFETY: as above; the query takes no pointer.
    let busy = |stream: Handle| unsafe { (call.cuStreamQuery)(stream) } == status::NOT_READY;
    if streams.iter().any(|s| capturing(*s)) {
        return false;
    }
    let contexts = session.contexts.all();
    // Each context has a default stream of its own.
    let default = contexts.iter().any(|context| {
        // SAFETY: a context of this worker; `executor.current` below records the change.
        unsafe { (call.cuCtxSetCurrent)(context.0) };
        executor.current = 0;
        busy(LEGACY as Handle)
    });
    !default && !streams.drain(..).any(busy)
}
