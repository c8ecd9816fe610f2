//! Decides how many workers of a lease to start, and when: a state machine without processes.

use std::collections::VecDeque;
use std::time::Duration;

use crate::clock::Moment;

/// Random id of a worker.
pub type WorkerId = [u8; 16];

/// Workers of one lease that start at the same time, at most.
const MAX_STARTING: u32 = 4;
const BACKOFF_MIN: Duration = Duration::from_millis(500);
const BACKOFF_MAX: Duration = Duration::from_secs(30);

/// The warm stock of one lease.
#[derive(Debug)]
pub struct Stock {
    target: u32,
    ready: VecDeque<WorkerId>,
    starting: u32,
    waiting: u32,
    failures: u32,
    not_before: Moment,
    last_failure: Option<String>,
    last_taken: Moment,
}

impl Stock {
    /// Creates an empty stock that wants `target` ready workers.
    pub fn new(target: u32, now: Moment) -> Self {
        Self {
            target,
            ready: VecDeque::new(),
            starting: 0,
            waiting: 0,
            failures: 0,
            not_before: Moment::ZERO,
            last_failure: None,
            last_taken: now,
        }
    }

    /// Returns the number of workers ready to be taken.
    pub fn ready(&self) -> usize {
        self.ready.len()
    }

    /// Returns the reason of the last failure while starts fail; `None` after a success.
    pub fn failing(&self) -> Option<&str> {
        self.last_failure.as_deref().filter(|_| self.failures > 0)
    }

    /// Returns `true` while failed starts delay the next one.
    pub fn paused(&self, now: Moment) -> bool {
        now < self.not_before
    }

    /// Returns how many workers to start now; they count as starting from then on.
    pub fn start(&mut self, now: Moment) -> u32 {
        if self.paused(now) {
            return 0;
        }
        let wanted = self.target + self.waiting;
        let have = self.ready.len() as u32 + self.starting;
        // After a failure, a single start at a time shows whether starts work again.
        let most = if self.failures > 0 { 1 } else { MAX_STARTING };
        let n = wanted.saturating_sub(have).min(most.saturating_sub(self.starting));
        self.starting += n;
        n
    }

    /// Records that a starting worker is ready.
    pub fn started(&mut self, id: WorkerId) {
        self.starting = self.starting.saturating_sub(1);
        self.failures = 0;
        self.ready.push_back(id);
    }

    /// Records that a worker failed to start, or exited while ready. Returns the pause before the
    /// next start.
    pub fn failed(&mut self, id: &WorkerId, now: Moment, reason: String) -> Duration {
        match self.ready.iter().position(|r| r == id) {
            Some(at) => drop(self.ready.remove(at)),
            None => self.starting = self.starting.saturating_sub(1),
        }
        let pause = BACKOFF_MIN.saturating_mul(1 << self.failures.min(16)).min(BACKOFF_MAX);
        self.failures += 1;
        self.not_before = now + pause;
        self.last_failure = Some(reason);
        pause
    }

    /// Takes up to `count` ready workers.
    pub fn take(&mut self, count: usize, now: Moment) -> Vec<WorkerId> {
        self.last_taken = now;
        let n = count.min(self.ready.len());
        self.ready.drain(..n).collect()
    }

    /// Removes one worker, whatever stops it.
    pub fn forget(&mut self, id: &WorkerId) {
        self.ready.retain(|r| r != id);
    }

    /// Removes a worker that is to stop. `starting`: it was started for the stock and is not ready
    /// yet.
    pub fn leave(&mut self, id: &WorkerId, starting: bool) {
        match starting {
            true => self.starting = self.starting.saturating_sub(1),
            false => self.forget(id),
        }
    }

    /// Counts a caller that waits for a worker.
    pub fn wait(&mut self) {
        self.waiting += 1;
    }

    /// Ends the wait of one caller.
    pub fn unwait(&mut self) {
        self.waiting = self.waiting.saturating_sub(1);
    }

    /// Keeps only one worker if none was taken for `idle`. Returns the surplus workers, to be
    /// stopped.
    pub fn shrink(&mut self, now: Moment, idle: Duration, full: u32) -> Vec<WorkerId> {
        if idle.is_zero() || now.saturating_sub(self.last_taken) < idle {
            self.target = full;
            return Vec::new();
        }
        self.target = full.min(1);
        let surplus = self.ready.len().saturating_sub(self.target as usize);
        self.ready.drain(..surplus).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: Duration = Duration::from_secs(1);

    #[test]
    fn a_stopped_worker_leaves_its_place() {
        let mut stock = Stock::new(1, Moment::ZERO);
        assert_eq!((stock.start(S), stock.start(S)), (1, 0));
        stock.leave(&[1; 16], true);
        assert_eq!((stock.start(S), stock.start(S)), (1, 0), "before it was ready");
        stock.started([2; 16]);
        stock.leave(&[2; 16], false);
        assert_eq!((stock.ready(), stock.start(S)), (0, 1), "and after");
    }

    #[test]
    fn stock_fills_refills_and_serves_waiting_callers() {
        let mut stock = Stock::new(2, S);
        assert_eq!(stock.start(S), 2);
        assert_eq!(stock.start(S), 0, "they are starting");
        stock.started([1; 16]);
        stock.started([2; 16]);
        assert_eq!(stock.take(1, S), [[1; 16]]);
        assert_eq!(stock.start(S), 1);
        stock.wait();
        assert_eq!(stock.start(S), 1, "a caller who waits gets one beside the stock");
        stock.unwait();
        stock.started([3; 16]);
        stock.started([4; 16]);
        assert_eq!((stock.ready(), stock.start(S)), (3, 0));
        assert_eq!(Stock::new(64, S).start(S), MAX_STARTING);
    }

    #[test]
    fn backs_off_and_recovers() {
        let mut stock = Stock::new(2, S);
        let mut now = S;
        assert_eq!(stock.start(now), 2);
        let mut pauses = vec![stock.failed(&[1; 16], now, "no driver".into())];
        assert_eq!(stock.start(now), 0);
        assert_eq!(stock.failing(), Some("no driver"));
        stock.started([2; 16]);
        assert_eq!(stock.failing(), None);
        stock.failed(&[2; 16], now, "died".into());
        assert_eq!(stock.ready(), 0);
        for _ in 0..8 {
            now = stock.not_before;
            assert_eq!(stock.start(now), 1, "one at a time while it fails");
            pauses.push(stock.failed(&[9; 16], now, "died".into()));
        }
        assert!(pauses.is_sorted() && pauses.last() == Some(&BACKOFF_MAX), "{pauses:?}");
    }

    #[test]
    fn an_idle_lease_keeps_one() {
        let mut stock = Stock::new(3, S);
        stock.start(S);
        for i in 0..3 {
            stock.started([i; 16]);
        }
        assert!(stock.shrink(S * 60, S * 100, 3).is_empty());
        assert_eq!(stock.shrink(S * 101, S * 100, 3), [[0; 16], [1; 16]]);
        assert_eq!(stock.start(S * 101), 0);
        assert_eq!(stock.take(1, S * 102), [[2; 16]]);
        assert!(stock.shrink(S * 102, S * 100, 3).is_empty());
        assert_eq!(stock.start(S * 102), 3);
    }
}
