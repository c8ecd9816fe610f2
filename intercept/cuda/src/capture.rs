//! Captures in progress, and the calls that they forbid.

use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::graph_uses::Uses;
use crate::status::{Result, STREAM_CAPTURE_UNSUPPORTED};
use crate::thread;

/// `CUstreamCaptureStatus`: the capture is in progress.
pub const ACTIVE: i32 = 1;
/// `CUstreamCaptureStatus`: the capture has been invalidated, but not ended.
pub const INVALIDATED: i32 = 2;

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
    /// Graph to capture into.
    pub graph: u64,
    /// Whether the capture created the graph.
    pub new_graph: bool,
    /// Host memory and events that its nodes use.
    uses: Mutex<Uses>,
}

impl Capture {
    /// Begins a capture of the calling thread, which the stream `origin` has still to join.
    pub fn begin(origin: u64, ctx: u64, mode: i32, graph: u64, new_graph: bool) -> Arc<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let capture = Arc::new(Self {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            mode,
            thread: thread::id(),
            origin,
            ctx,
            invalid: AtomicBool::new(false),
            graph,
            new_graph,
            uses: Mutex::default(),
        });
        OPEN.lock().unwrap_or_else(PoisonError::into_inner).push(capture.clone());
        CAPTURES.fetch_add(1, Ordering::Relaxed);
        if mode != 2 {
            UNSAFE_CAPTURES.fetch_add(1, Ordering::Relaxed);
        }
        capture
    }

    /// Ends the capture, which no stream takes part in any more.
    pub fn end(self: &Arc<Self>) {
        OPEN.lock().unwrap_or_else(PoisonError::into_inner).retain(|c| !Arc::ptr_eq(c, self));
        CAPTURES.fetch_sub(1, Ordering::Relaxed);
        if self.mode != 2 {
            UNSAFE_CAPTURES.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Notes what a captured node uses.
    pub fn note(&self, uses: &Uses) {
        self.uses.lock().unwrap_or_else(PoisonError::into_inner).add(uses);
    }

    /// Returns what the captured nodes use.
    pub fn uses(&self) -> Uses {
        self.uses.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Invalidates the capture after an event that it cannot contain.
    pub fn invalidate(&self) {
        self.invalid.store(true, Ordering::Relaxed);
    }

    /// Returns `true` until the capture ends.
    pub fn open(self: &Arc<Self>) -> bool {
        OPEN.lock().unwrap_or_else(PoisonError::into_inner).iter().any(|c| Arc::ptr_eq(c, self))
    }
}

/// Number of captures in progress: at zero, each question about capture is a single load.
static CAPTURES: AtomicU32 = AtomicU32::new(0);
static UNSAFE_CAPTURES: AtomicI32 = AtomicI32::new(0);
static OPEN: Mutex<Vec<Arc<Capture>>> = Mutex::new(Vec::new());

/// Returns `true` if any stream captures.
#[inline]
pub fn capturing() -> bool {
    CAPTURES.load(Ordering::Relaxed) != 0
}

/// Returns the captures in progress that began on a stream of a context.
pub fn of_context(ctx: u64) -> Vec<Arc<Capture>> {
    let open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    open.iter().filter(|capture| capture.ctx == ctx).cloned().collect()
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

#[cfg(test)]
mod tests {
    use std::sync::MutexGuard;

    use super::*;

    const CTX: u64 = 0xc0;

    /// Lets one test at a time begin captures, which all threads of the process see.
    fn alone() -> MutexGuard<'static, ()> {
        static ALONE: Mutex<()> = Mutex::new(());
        ALONE.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether another thread with this capture mode may make an unsafe call.
    fn allowed_elsewhere(mode: i32) -> Result {
        let call = move || {
            thread::exchange_capture_mode(mode);
            allowed()
        };
        std::thread::spawn(call).join().unwrap()
    }

    fn invalid(capture: &Arc<Capture>) -> bool {
        capture.invalid.load(Ordering::Relaxed)
    }

    #[test]
    fn global_capture_forbids_unsafe_calls_to_every_strict_thread() {
        let _alone = alone();
        let capture = Capture::begin(1, CTX, 0, 0, false);
        assert_eq!(allowed_elsewhere(1), Ok(()));
        assert_eq!(allowed_elsewhere(2), Ok(()));
        assert!(!invalid(&capture));
        assert_eq!(allowed_elsewhere(0), Err(STREAM_CAPTURE_UNSUPPORTED));
        assert!(invalid(&capture));
        capture.end();
        assert_eq!(allowed_elsewhere(0), Ok(()));
    }

    #[test]
    fn local_capture_forbids_unsafe_calls_to_its_thread_only() {
        let _alone = alone();
        let capture = Capture::begin(1, CTX, 1, 0, false);
        assert_eq!(allowed_elsewhere(0), Ok(()));
        assert!(!invalid(&capture));
        assert_eq!(allowed(), Err(STREAM_CAPTURE_UNSUPPORTED));
        assert!(invalid(&capture));
        assert_eq!(thread::exchange_capture_mode(2), 0);
        assert_eq!(allowed(), Ok(()), "a relaxed thread may make any call");
        capture.end();
    }

    #[test]
    fn relaxed_capture_forbids_only_to_synchronize_its_context() {
        let _alone = alone();
        let capture = Capture::begin(1, CTX, 2, 0, false);
        assert_eq!(allowed(), Ok(()));
        assert_eq!(context_sync_allowed(CTX + 1), Ok(()));
        assert!(!invalid(&capture));
        assert_eq!(context_sync_allowed(CTX), Err(STREAM_CAPTURE_UNSUPPORTED));
        assert!(invalid(&capture));
        assert!(capturing() && capture.open());
        capture.end();
        assert!(!capturing() && !capture.open());
        assert_eq!(context_sync_allowed(CTX), Ok(()));
    }
}
