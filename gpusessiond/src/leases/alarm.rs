//! Timer that wakes the lease manager at its next deadline.

use std::io;
use std::os::fd::{AsFd as _, AsRawFd, RawFd};
use std::time::Duration;

use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::Instant;

struct Timer(TimerFd);

impl AsRawFd for Timer {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

/// A kernel timer for deadlines some seconds ahead.
///
/// The runtime's timer would wake the process up to three times for such a deadline: it moves the
/// deadline from coarse slots to finer ones.
pub struct Alarm(Option<AsyncFd<Timer>>);

impl Alarm {
    /// Creates an alarm on the current runtime; falls back to the runtime's timers without a kernel
    /// timer.
    pub fn new() -> Self {
        let flags = TimerFlags::TFD_NONBLOCK | TimerFlags::TFD_CLOEXEC;
        let timer = TimerFd::new(ClockId::CLOCK_MONOTONIC, flags).ok().map(Timer);
        // SAFETY: a Timer gives the same open descriptor for as long as the AsyncFd owns it.
        Self(timer.and_then(|t| unsafe { AsyncFd::register_with_interest(t, Interest::READABLE) }.ok()))
    }

    /// Returns at this time; never for `None`.
    ///
    /// May be cancelled and called again with another time.
    pub async fn at(&self, time: Option<Instant>) {
        let Some(time) = time else { return std::future::pending().await };
        let left = time.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        if self.rings(left).await.is_err() {
            tokio::time::sleep_until(time).await;
        }
    }

    async fn rings(&self, left: Duration) -> io::Result<()> {
        let timer = self.0.as_ref().ok_or(io::ErrorKind::Unsupported)?;
        // Setting the timer discards an unread expiration of an earlier time.
        timer.get_ref().0.set(Expiration::OneShot(TimeSpec::from(left)), TimerSetTimeFlags::empty())?;
        loop {
            let mut ready = timer.readable().await?;
            if let Ok(rung) = ready.try_io(|timer| Ok(timer.get_ref().0.wait()?)) {
                return rung;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(ms: u64) -> Option<Instant> {
        Some(Instant::now() + Duration::from_millis(ms))
    }

    #[tokio::test]
    async fn it_can_be_given_up() {
        for alarm in [Alarm::new(), Alarm(None)] {
            alarm.at(after(0)).await;
            for time in [after(3_600_000), None] {
                let soon = tokio::time::timeout(Duration::from_millis(5), alarm.at(time));
                assert!(soon.await.is_err());
            }
            alarm.at(after(1)).await;
        }
    }

    #[expect(clippy::disallowed_methods, reason = "the runtime must not see the time pass")]
    #[tokio::test]
    async fn a_cancelled_alarm_does_not_end_the_next_wait() {
        let alarm = Alarm::new();
        assert!(alarm.0.is_some());
        // On a busy machine, the time may have passed before the first look at it.
        while tokio::time::timeout(Duration::ZERO, alarm.at(after(20))).await.is_ok() {}
        std::thread::sleep(Duration::from_millis(30));
        tokio::task::yield_now().await;
        let time = after(50);
        alarm.at(time).await;
        assert!(Some(Instant::now()) >= time);
    }
}
