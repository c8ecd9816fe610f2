//! Time and randomness as parameters, so that tests do not wait.

use std::time::{Duration, SystemTime};

/// Time since the host started, including its sleep.
pub type Moment = Duration;

/// A source of time.
pub trait Clock: Send + Sync {
    /// Returns the time since the host started.
    fn now(&self) -> Moment;
    /// Returns the seconds since 1970; for dates that people write or read.
    fn unix(&self) -> u64;
}

/// Returns the time of the wall clock, which an administrator may set.
#[expect(clippy::disallowed_methods, reason = "the one place that reads it; others get the time")]
pub fn wall() -> SystemTime {
    SystemTime::now()
}

/// The kernel's clocks.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Moment {
        nix::time::clock_gettime(nix::time::ClockId::CLOCK_BOOTTIME).map_or(Duration::ZERO, Duration::from)
    }

    fn unix(&self) -> u64 {
        wall().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs())
    }
}

/// A source of unpredictable bytes.
pub trait Random: Send + Sync {
    /// Fills `out`.
    fn fill(&self, out: &mut [u8]);
}

/// The kernel's random generator.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemRandom;

impl Random for SystemRandom {
    fn fill(&self, out: &mut [u8]) {
        // getrandom fails only on kernels without that call.
        getrandom::fill(out).expect("the kernel has no random numbers");
    }
}

/// Returns `N` unpredictable bytes.
pub fn bytes<const N: usize>(random: &dyn Random) -> [u8; N] {
    let mut out = [0; N];
    random.fill(&mut out);
    out
}

/// A clock that tests advance, and reproducible random numbers.
#[cfg(test)]
pub mod testing {
    use std::sync::Mutex;

    use super::*;

    /// A clock that stands still until a test advances it.
    #[derive(Debug, Default)]
    pub struct TestClock(Mutex<Duration>);

    impl TestClock {
        /// Advances the clock.
        pub fn advance(&self, by: Duration) {
            *self.0.lock().expect("not poisoned") += by;
        }
    }

    impl Clock for TestClock {
        fn now(&self) -> Moment {
            *self.0.lock().expect("not poisoned")
        }

        fn unix(&self) -> u64 {
            1_700_000_000 + self.now().as_secs()
        }
    }

    /// Random bytes that are the same in each run.
    #[derive(Debug, Default)]
    pub struct Counting(Mutex<u64>);

    impl Random for Counting {
        fn fill(&self, out: &mut [u8]) {
            let mut count = self.0.lock().expect("not poisoned");
            *count += 1;
            let digest = blake3::hash(&count.to_le_bytes());
            for (o, b) in out.iter_mut().zip(digest.as_bytes().iter().cycle()) {
                *o = *b;
            }
        }
    }
}
