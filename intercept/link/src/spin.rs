//! Time for which a thread spins before it sleeps.
//!
//! A sleep costs the thread that ends it a system call. In a virtual machine with an H200, the
//! sleeper itself needs 5 us more, and 30 to 300 us after a sleep of a millisecond.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::threads::usable_cpus;

const SHORT_WINDOW: Duration = Duration::from_micros(50);
/// Longest wait that a thread may spend spinning.
///
/// NVIDIA's driver spins for the whole wait, unless the program asks for sleep.
const LONG_WINDOW: Duration = Duration::from_millis(2);

/// Returns the time that any thread may spin; zero with two CPUs or fewer.
pub fn short() -> Duration {
    if usable_cpus() > 2 { SHORT_WINDOW } else { Duration::ZERO }
}

/// Spins for at most `time`; returns `true` as soon as `ready` does.
///
/// Pauses leave the core to its other hyperthread, and in a long spin other threads go first.
pub fn until(time: Duration, mut ready: impl FnMut() -> bool) -> bool {
    /// Together less than a microsecond.
    const PAUSES: u32 = 8;
    let (begin, mut round) = (Instant::now(), 0u32);
    loop {
        if ready() {
            return true;
        }
        let elapsed = begin.elapsed();
        if elapsed >= time {
            return false;
        }
        round = round.wrapping_add(1);
        if elapsed >= SHORT_WINDOW && round.is_multiple_of(16) {
            std::thread::yield_now();
        }
        (0..PAUSES).for_each(|_| std::hint::spin_loop());
    }
}

/// Waits of one kind: whether the next one may be a long spin.
#[derive(Debug, Default)]
pub struct Spin {
    long: AtomicBool,
    never_long: AtomicBool,
}

impl Spin {
    /// Returns the time to spin: long if the wait before was short enough to be spent so.
    pub fn time(&self) -> Duration {
        let long = self.long.load(Ordering::Relaxed) && !self.never_long.load(Ordering::Relaxed);
        if usable_cpus() > 2 && long { LONG_WINDOW } else { short() }
    }

    /// Selects whether every wait spins for the short time only.
    pub fn never_long(&self, never: bool) {
        self.never_long.store(never, Ordering::Relaxed);
    }

    /// Notes the length of a wait, with its sleep.
    pub fn waited(&self, time: Duration) {
        let long = time < LONG_WINDOW;
        // Other threads read the flag, so that a write costs more than a look.
        if self.long.load(Ordering::Relaxed) != long {
            self.long.store(long, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_spin_follows_a_wait_that_it_would_have_covered() {
        let spin = Spin::default();
        assert_eq!(spin.time(), short());
        spin.waited(LONG_WINDOW - Duration::from_micros(1));
        assert!(spin.time() >= short());
        assert_eq!(spin.time() == LONG_WINDOW, usable_cpus() > 2, "two CPUs have other work");
        spin.never_long(true);
        assert_eq!(spin.time(), short());
        spin.never_long(false);
        assert_eq!(spin.time() == LONG_WINDOW, usable_cpus() > 2);
        spin.waited(LONG_WINDOW);
        assert_eq!(spin.time(), short());
    }

    #[test]
    fn spin_ends_when_it_is_ready_or_its_time_is_over() {
        let mut polls = 0;
        let third = || {
            polls += 1;
            polls == 3
        };
        assert!(until(Duration::from_secs(60), third));
        let begin = Instant::now();
        assert!(!until(2 * SHORT_WINDOW, || false));
        assert!(begin.elapsed() >= 2 * SHORT_WINDOW);
        assert!(until(Duration::ZERO, || true));
    }
}
