//! Time of the client's last GPU work.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::Thread;
use std::time::{Duration, Instant};

use gpusession_proto::frame::op;

use crate::calls;

/// Time between two queries whether the GPU still works, while the client sends nothing.
pub const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// Time of the last GPU work, and counters for the reports.
pub struct Activity {
    /// Time from which `last` counts.
    pub start: Instant,
    /// Milliseconds after `start`.
    pub last: AtomicU64,
    /// Whether work was queued since a query last found the GPU idle.
    pub outstanding: AtomicBool,
    /// Number of replayed frames.
    pub calls: AtomicU64,
    /// Frames that may have changed memory: those whose replay has begun, and those replayed.
    changing: (AtomicU64, AtomicU64),
    /// Thread that sleeps while the GPU rests; `None`: it could not start.
    pub watcher: OnceLock<Option<Thread>>,
}

impl Default for Activity {
    fn default() -> Self {
        Self {
            start: Instant::now(),
            last: AtomicU64::new(0),
            outstanding: AtomicBool::new(false),
            calls: AtomicU64::new(0),
            changing: Default::default(),
            watcher: OnceLock::new(),
        }
    }
}

impl Activity {
    /// Records that the replay of a frame begins.
    pub fn frame(&self, operation: u16, now: Instant) {
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.changing.0.fetch_add(u64::from(changes_memory(operation)), Ordering::SeqCst);
        if calls::works(operation) {
            if !self.outstanding() {
                self.outstanding.store(true, Ordering::Relaxed);
                self.wake_watcher();
            }
            self.seen(now);
        }
    }

    /// Records that the replay of a frame ends.
    pub fn replayed(&self, operation: u16) {
        self.changing.1.fetch_add(u64::from(changes_memory(operation)), Ordering::SeqCst);
    }

    /// Returns the number of frames so far that may have changed memory; `None` while one is being
    /// replayed.
    pub fn changes(&self) -> Option<u64> {
        // In this order: frames that begin between the two looks make the numbers differ.
        let replayed = self.changing.1.load(Ordering::SeqCst);
        (self.changing.0.load(Ordering::SeqCst) == replayed).then_some(replayed)
    }

    /// Wakes the thread that sleeps while the GPU rests.
    pub fn wake_watcher(&self) {
        if let Some(Some(thread)) = self.watcher.get() {
            thread.unpark();
        }
    }

    /// Records that the GPU works or that a copy is under way.
    pub fn seen(&self, now: Instant) {
        let at = now.saturating_duration_since(self.start).as_millis() as u64;
        self.last.fetch_max(at, Ordering::Relaxed);
    }

    /// Returns `true` if the GPU may have work that the client does not wait for.
    pub fn outstanding(&self) -> bool {
        self.outstanding.load(Ordering::Relaxed)
    }
}

/// Returns `false` for frames that surely leave all memory as it is, except what they free.
fn changes_memory(operation: u16) -> bool {
    !matches!(operation, op::FREE | op::UNMIRROR_HOST | op::CTX_SYNC | op::MARK)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_work_for_the_gpu_counts_as_activity() {
        let activity = Activity::default();
        let later = activity.start + Duration::from_secs(5);
        for operation in [op::EVENT_QUERY, op::MARK, op::IMAGE_DATA, op::ALLOC] {
            activity.frame(operation, later);
        }
        assert_eq!((activity.last.load(Ordering::Relaxed), activity.outstanding()), (0, false));
        activity.frame(op::LAUNCH, later);
        assert_eq!((activity.last.load(Ordering::Relaxed), activity.outstanding()), (5000, true));
        for operation in [op::cuMemcpyDtoDAsync_v2, op::cuMemsetD8Async, op::COPY_BOX, op::GRAPH_LAUNCH] {
            let activity = Activity::default();
            activity.frame(operation, later);
            assert!(activity.outstanding(), "{operation}");
        }
    }

    #[test]
    fn time_of_the_last_work_never_goes_back() {
        let activity = Activity::default();
        activity.seen(activity.start + Duration::from_secs(9));
        activity.seen(activity.start + Duration::from_secs(3));
        activity.seen(activity.start - Duration::from_millis(1));
        assert_eq!(activity.last.load(Ordering::Relaxed), 9000);
    }

    #[test]
    fn number_of_changes_is_known_only_between_frames() {
        let activity = Activity::default();
        activity.frame(op::FREE, activity.start);
        assert_eq!(activity.changes(), Some(0), "it changes no other memory");
        activity.frame(op::LAUNCH, activity.start);
        assert_eq!(activity.changes(), None);
        activity.replayed(op::FREE);
        assert_eq!(activity.changes(), None);
        activity.replayed(op::LAUNCH);
        assert_eq!(activity.changes(), Some(1));
    }
}
