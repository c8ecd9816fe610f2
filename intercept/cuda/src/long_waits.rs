//! Waits for a worker. A thread of the library works beside long ones.
//!
//! The waiting threads read the connection, so they do nothing else meanwhile. A program that only
//! watches its memory makes no call, so that the thread reads beside the GPU's work, too.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use nix::time::ClockId;

use crate::thread;

/// Length of a wait from which work is due.
const LONG_DELAY: Duration = Duration::from_millis(10);
/// Shortest and longest time between two pieces of work.
const PAUSE: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(50));
/// Time between two pieces without a wait, once no change has come for [`CHANGE_WINDOW`].
const RARE_INTERVAL: Duration = Duration::from_secs(1);
const CHANGE_WINDOW: Duration = Duration::from_secs(10);
/// Within these bounds, the thread rests this many times as long as it has computed.
const REST_SHARE: u32 = 20;
/// Time without a wait after which the thread sleeps until the next one.
const QUIET_INTERVAL: Duration = Duration::from_millis(if cfg!(test) { 20 } else { 1000 });

/// Occasion of a piece of work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Beside {
    /// A thread waits for the worker, and reads.
    Wait,
    /// The GPU may work, and no thread waits.
    GpuWork,
}

/// Waits for one worker that have not ended, and since when they last.
#[derive(Default)]
pub struct LongWaits {
    /// Whether the thread runs; no wait is noted before.
    served: AtomicBool,
    /// Whether the thread sleeps until a wait or GPU work; changes with the lock.
    asleep: AtomicBool,
    /// Time of the latest work for the GPU, in nanoseconds after `start`; 0: none.
    work: AtomicU64,
    start: OnceLock<Instant>,
    waits: Mutex<Waits>,
    begun: Condvar,
}

#[derive(Default)]
struct Waits {
    next: u64,
    /// Number and begin of each.
    present: Vec<(u64, Instant)>,
}

impl LongWaits {
    /// Notes a wait, which ends when the result is dropped.
    pub fn begin(&self) -> Option<impl Drop + use<'_>> {
        struct Wait<'a>(&'a LongWaits, u64);

        impl Drop for Wait<'_> {
            fn drop(&mut self) {
                self.0.lock().present.retain(|(number, _)| *number != self.1);
            }
        }

        // In a forked child, a thread of the parent may have held the lock.
        if !self.served.load(Ordering::Relaxed) || thread::forked() {
            return None;
        }
        let mut waits = self.lock();
        let number = waits.next;
        waits.next += 1;
        waits.present.push((number, Instant::now()));
        self.wake();
        Some(Wait(self, number))
    }

    /// Returns `true` at the first call, after which a thread has to [`Self::serve`].
    pub fn is_new(&self) -> bool {
        !self.served.swap(true, Ordering::Relaxed)
    }

    /// Notes that the GPU gets work, which may last without a wait.
    #[inline]
    pub fn gpu_works(&self) {
        if !self.served.load(Ordering::Relaxed) || thread::forked() {
            return;
        }
        let start = self.start.get_or_init(Instant::now);
        self.work.store(1 + start.elapsed().as_nanos() as u64, Ordering::SeqCst);
        if self.asleep.load(Ordering::SeqCst) {
            let _waits = self.lock();
            self.wake();
        }
    }

    /// Returns the time of the latest work for the GPU.
    fn latest_work(&self) -> Option<Instant> {
        let after = self.work.load(Ordering::Relaxed);
        Some(*self.start.get().filter(|_| after > 0)? + Duration::from_nanos(after))
    }

    /// Wakes the thread; the caller has the lock.
    fn wake(&self) {
        if self.asleep.swap(false, Ordering::SeqCst) {
            self.begun.notify_one();
        }
    }

    /// Works from time to time while a wait is long or the GPU works. `work` returns whether a
    /// change has come, and `None` at the end.
    pub fn serve(&self, mut work: impl FnMut(Beside) -> Option<bool>) {
        let mut last = Last { end: Instant::now(), computed: Duration::ZERO, pause: PAUSE.1, change: None };
        loop {
            let beside = self.wait_until_due(&last);
            let before = computed();
            let Some(changed) = work(beside) else { return };
            let end = Instant::now();
            last = Last {
                end,
                computed: computed().saturating_sub(before),
                pause: if changed { PAUSE.0 } else { (2 * last.pause).min(PAUSE.1) },
                change: if changed { Some(end) } else { last.change },
            };
        }
    }

    /// Waits until a wait is long, or the GPU works, and a time has passed since the last piece.
    fn wait_until_due(&self, last: &Last) -> Beside {
        let mut busy = Instant::now();
        let mut waits = self.lock();
        loop {
            let now = Instant::now();
            let work = self.latest_work();
            let (beside, due) = if let Some(begin) = waits.present.iter().map(|(_, begin)| *begin).min() {
                (Beside::Wait, (begin + LONG_DELAY).max(last.end + last.pause_beside_wait()))
            } else if work.is_some() {
                (Beside::GpuWork, last.end + last.rest(work, now))
            } else if now - busy < QUIET_INTERVAL {
                waits = self.sleep(waits, LONG_DELAY);
                continue;
            } else {
                waits = self.sleep_until_woken(waits, None);
                busy = Instant::now();
                continue;
            };
            busy = now;
            let left = due.saturating_duration_since(now);
            waits = match (left, beside) {
                (Duration::ZERO, _) => return beside,
                (_, Beside::Wait) => self.sleep(waits, left),
                // A wait can begin, and be long before that.
                _ if left <= PAUSE.1 => self.sleep(waits, left.min(LONG_DELAY)),
                _ => self.sleep_until_woken(waits, Some(left)),
            };
        }
    }

    fn sleep_until_woken<'a>(
        &'a self,
        mut waits: MutexGuard<'a, Waits>,
        most: Option<Duration>,
    ) -> MutexGuard<'a, Waits> {
        let before = self.work.load(Ordering::Relaxed);
        self.asleep.store(true, Ordering::SeqCst);
        // Work before that wakes no thread.
        if self.work.load(Ordering::SeqCst) == before {
            let asleep = |_: &mut Waits| self.asleep.load(Ordering::SeqCst);
            waits = match most {
                None => self.begun.wait_while(waits, asleep).unwrap_or_else(PoisonError::into_inner),
                Some(most) => {
                    let woken = self.begun.wait_timeout_while(waits, most, asleep);
                    woken.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
        self.asleep.store(false, Ordering::SeqCst);
        waits
    }

    fn sleep<'a>(&self, waits: MutexGuard<'a, Waits>, time: Duration) -> MutexGuard<'a, Waits> {
        self.begun.wait_timeout(waits, time).unwrap_or_else(PoisonError::into_inner).0
    }

    fn lock(&self) -> MutexGuard<'_, Waits> {
        self.waits.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The last piece of work.
struct Last {
    end: Instant,
    computed: Duration,
    /// Time until the next one without a wait.
    pause: Duration,
    /// Time of the latest change.
    change: Option<Instant>,
}

impl Last {
    /// Returns the time from its end to the next piece beside a wait.
    fn pause_beside_wait(&self) -> Duration {
        // A kernel that exchanges words with the program may wait for the answer.
        if self.change == Some(self.end) {
            self.computed.clamp(PAUSE.0, PAUSE.1)
        } else {
            pause(self.computed)
        }
    }

    /// Returns the time from its end to the next piece without a wait.
    fn rest(&self, work: Option<Instant>, now: Instant) -> Duration {
        match self.change.max(work) {
            Some(latest) if now.saturating_duration_since(latest) < CHANGE_WINDOW => {
                self.pause.max((REST_SHARE * self.computed).min(RARE_INTERVAL))
            }
            _ => RARE_INTERVAL,
        }
    }
}

/// Returns the time for which the calling thread has computed; its waits do not count.
fn computed() -> Duration {
    ClockId::CLOCK_THREAD_CPUTIME_ID.now().map_or(Duration::ZERO, Duration::from)
}

fn pause(computed: Duration) -> Duration {
    (REST_SHARE * computed).clamp(PAUSE.0, PAUSE.1)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::sync_channel;

    use super::*;

    #[test]
    fn work_runs_beside_long_waits_only_and_one_at_a_time() {
        let waits = LongWaits::default();
        assert!(waits.begin().is_none(), "nobody serves");
        assert!(waits.is_new() && !waits.is_new());
        let (sender, works) = sync_channel(0);
        let mut last = None;
        std::thread::scope(|scope| {
            let serving = &waits;
            let work = move |_| sender.send(serving.lock().present.len()).is_ok().then_some(false);
            scope.spawn(move || serving.serve(work));
            // Sooner or later it sleeps.
            while !waits.asleep.load(Ordering::SeqCst) {
                std::thread::yield_now();
            }
            let begun = Instant::now();
            let many: Vec<_> = (0..20).map(|_| waits.begin()).collect();
            while works.recv() != Ok(20) {}
            assert!(begun.elapsed() >= LONG_DELAY);
            let begun = Instant::now();
            (0..5).for_each(|_| assert_eq!(works.recv(), Ok(20)));
            assert!(begun.elapsed() >= 4 * PAUSE.0, "many waits have no more work than one");
            drop(many);
            assert!(waits.lock().present.is_empty());
            // The thread ends with its next work.
            drop(works);
            last = waits.begin();
        });
        drop(last);
    }

    #[test]
    fn work_runs_beside_the_gpu() {
        let waits = LongWaits::default();
        waits.gpu_works();
        assert_eq!(waits.latest_work(), None, "nobody serves");
        assert!(waits.is_new());
        let (sender, works) = sync_channel(0);
        std::thread::scope(|scope| {
            scope.spawn(|| waits.serve(|beside| sender.send(beside).is_ok().then_some(true)));
            while !waits.asleep.load(Ordering::SeqCst) {
                std::thread::yield_now();
            }
            waits.gpu_works();
            (0..5).for_each(|_| assert_eq!(works.recv(), Ok(Beside::GpuWork)));
            drop(works);
        });
    }

    #[test]
    fn pieces_without_a_wait_are_rare_once_no_change_comes() {
        let start = Instant::now();
        let last = |pause, change| Last { end: start, computed: Duration::from_micros(100), pause, change };
        let later = start + CHANGE_WINDOW;
        assert_eq!(last(PAUSE.0, None).rest(Some(start), start), PAUSE.0);
        assert_eq!(last(PAUSE.1, None).rest(Some(start), start), PAUSE.1);
        assert_eq!(last(PAUSE.1, None).rest(Some(start), later), RARE_INTERVAL);
        assert_eq!(last(PAUSE.0, Some(later)).rest(Some(start), later), PAUSE.0, "a change has come");
        assert_eq!(last(PAUSE.1, None).rest(Some(later), later), PAUSE.1, "other work");
        let beside = |change| Last { computed: 40 * PAUSE.0, ..last(PAUSE.0, change) }.pause_beside_wait();
        assert_eq!((beside(None), beside(Some(start))), (PAUSE.1, PAUSE.1));
        let beside = |change| Last { computed: PAUSE.0, ..last(PAUSE.0, change) }.pause_beside_wait();
        assert_eq!((beside(None), beside(Some(start))), (20 * PAUSE.0, PAUSE.0));
    }

    #[test]
    fn pauses_are_bounded() {
        assert_eq!(pause(Duration::ZERO), PAUSE.0);
        assert_eq!(pause(Duration::from_millis(1)), Duration::from_millis(20));
        assert_eq!(pause(Duration::from_secs(9)), PAUSE.1);
    }
}
