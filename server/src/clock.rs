//! Time and randomness as parameters, so that what decides by them is tested without waiting.

use std::time::Duration;

/// Time since the host started, running on while it sleeps.
pub type Moment = Duration;

/// Says what time it is.
pub trait Clock: Send + Sync {
    /// Time since the host started.
    fn now(&self) -> Moment;
    /// Seconds since 1970; for expiry dates that a person wrote and for listings.
    fn unix(&self) -> u64;
}

/// The kernel's clocks.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Moment {
        nix::time::clock_gettime(nix::time::ClockId::CLOCK_BOOTTIME).map_or(Duration::ZERO, Duration::from)
    }

    fn unix(&self) -> u64 {
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs())
    }
}

/// Where unpredictable bytes come from.
pub trait Random: Send + Sync {
    /// Fills `out`.
    fn fill(&self, out: &mut [u8]);
}

/// The kernel's random generator.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemRandom;

impl Random for SystemRandom {
    fn fill(&self, out: &mut [u8]) {
        // getrandom fails only on kernels that do not have it.
        getrandom::fill(out).expect("the kernel has no random numbers");
    }
}

/// `N` unpredictable bytes.
pub fn bytes<const N: usize>(random: &dyn Random) -> [u8; N] {
    let mut out = [0; N];
    random.fill(&mut out);
    out
}

/// A clock that stands still until it is moved, and random numbers that repeat.
#[cfg(test)]
pub mod testing {
    use std::sync::Mutex;

    use super::*;

    /// See the module.
    #[derive(Debug, Default)]
    pub struct TestClock(Mutex<Duration>);

    impl TestClock {
        /// Lets time pass.
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

    /// See the module.
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
