//! Waits for a worker. A thread of the library works beside long ones.
//!
//! The waiting threads read the connection, so they do nothing else meanwhile.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::time::ClockId;

use crate::thread;

/// Length of a wait from which work is due.
const LONG_DELAY: Duration = Duration::from_millis(10);
/// Shortest and longest time between two pieces of work.
const PAUSE: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(50));
/// Within these bounds, the thread rests this many times as long as it has computed.
const REST_SHARE: u32 = 20;
/// Time without a wait after which the thread sleeps until the next one.
const QUIET_INTERVAL: Duration = Duration::from_millis(if cfg!(test) { 20 } else { 1000 });

/// Waits for one worker that have not ended, and since when they last.
#[derive(Default)]
pub struct LongWaits {
    /// Whether the thread runs; no wait is noted before.
    served: AtomicBool,
    waits: Mutex<Waits>,
    begun: Condvar,
}

#[derive(Default)]
struct Waits {
    next: u64,
    /// Number and begin of each.
    present: Vec<(u64, Instant)>,
    asleep: bool,
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
        if std::mem::take(&mut waits.asleep) {
            self.begun.notify_one();
        }
        Some(Wait(self, number))
    }

    /// Returns `true` at the first call, after which a thread has to [`Self::serve`].
    pub fn is_new(&self) -> bool {
        !self.served.swap(true, Ordering::Relaxed)
    }

    /// Works from time to time while a wait is long, until `work` returns `false`.
    pub fn serve(&self, mut work: impl FnMut() -> bool) {
        let mut earliest = Instant::now();
        loop {
            self.wait_until_due(earliest);
            let before = computed();
            if !work() {
                return;
            }
            earliest = Instant::now() + pause(computed().saturating_sub(before));
        }
    }

    /// Waits until a wait is long, and until a time.
    fn wait_until_due(&self, earliest: Instant) {
        let mut busy = Instant::now();
        let mut waits = self.lock();
        loop {
            let now = Instant::now();
            let left = match waits.present.iter().map(|(_, begin)| *begin).min() {
                Some(begin) => {
                    busy = now;
                    (begin + LONG_DELAY).max(earliest).saturating_duration_since(now)
                }
                None if now - busy < QUIET_INTERVAL => LONG_DELAY,
                None => {
                    waits.asleep = true;
                    waits =
                        self.begun.wait_while(waits, |w| w.asleep).unwrap_or_else(PoisonError::into_inner);
                    busy = Instant::now();
                    continue;
                }
            };
            if left.is_zero() {
                return;
            }
            waits = self.begun.wait_timeout(waits, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Waits> {
        self.waits.lock().unwrap_or_else(PoisonError::into_inner)
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
            scope.spawn(|| waits.serve(|| sender.send(waits.lock().present.len()).is_ok()));
            // Sooner or later it sleeps.
            while !waits.lock().asleep {
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
    fn pauses_are_bounded() {
        assert_eq!(pause(Duration::ZERO), PAUSE.0);
        assert_eq!(pause(Duration::from_millis(1)), Duration::from_millis(20));
        assert_eq!(pause(Duration::from_secs(9)), PAUSE.1);
    }
}
