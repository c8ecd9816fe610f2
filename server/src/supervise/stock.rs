//! How many workers of a lease should be started, and when: a state machine without processes.

use std::collections::VecDeque;
use std::time::Duration;

use crate::clock::Moment;

/// 16 random bytes.
pub type WorkerId = [u8; 16];

/// Workers of one lease that start at the same time, at most.
const MAX_STARTING: u32 = 4;
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

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
    /// An empty stock that wants `target` ready workers.
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

    /// Workers ready to be taken.
    pub fn ready(&self) -> usize {
        self.ready.len()
    }

    /// Failures in a row, and the last one's reason.
    pub fn failing(&self) -> Option<&str> {
        self.last_failure.as_deref().filter(|_| self.failures > 0)
    }

    /// Whether failed starts hold the next one back.
    pub fn paused(&self, now: Moment) -> bool {
        now < self.not_before
    }

    /// How many workers to start now; counts them as starting.
    pub fn start(&mut self, now: Moment) -> u32 {
        if self.paused(now) {
            return 0;
        }
        let wanted = self.target + self.waiting;
        let have = self.ready.len() as u32 + self.starting;
        // After a failure one start at a time shows whether it is over.
        let most = if self.failures > 0 { 1 } else { MAX_STARTING };
        let n = wanted.saturating_sub(have).min(most.saturating_sub(self.starting));
        self.starting += n;
        n
    }

    /// A starting worker is ready.
    pub fn started(&mut self, id: WorkerId) {
        self.starting = self.starting.saturating_sub(1);
        self.failures = 0;
        self.ready.push_back(id);
    }

    /// A worker failed while it started, or ended though it was ready. Returns the pause before the next start.
    pub fn failed(&mut self, id: &WorkerId, now: Moment, reason: String) -> Duration {
        match self.ready.iter().position(|r| r == id) {
            Some(at) => drop(self.ready.remove(at)),
            None => self.starting = self.starting.saturating_sub(1),
        }
        let pause = FIRST_PAUSE.saturating_mul(1 << self.failures.min(16)).min(LONGEST_PAUSE);
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

    /// Takes one worker out, whoever ends it.
    pub fn forget(&mut self, id: &WorkerId) {
        self.ready.retain(|r| r != id);
    }

    /// A worker is told to end; `starting`: it was started for the stock and is not ready yet.
    pub fn leave(&mut self, id: &WorkerId, starting: bool) {
        match starting {
            true => self.starting = self.starting.saturating_sub(1),
            false => self.forget(id),
        }
    }

    /// Somebody waits for a worker.
    pub fn wait(&mut self) {
        self.waiting += 1;
    }

    /// Somebody waits no longer.
    pub fn unwait(&mut self) {
        self.waiting = self.waiting.saturating_sub(1);
    }

    /// A lease that takes no worker for `idle` keeps one. Returns the workers to end.
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
    fn a_worker_that_is_told_to_end_leaves_its_place() {
        let mut stock = Stock::new(1, Moment::ZERO);
        assert_eq!((stock.start(S), stock.start(S)), (1, 0));
        stock.leave(&[1; 16], true);
        assert_eq!((stock.start(S), stock.start(S)), (1, 0), "before it was ready");
        stock.started([2; 16]);
        stock.leave(&[2; 16], false);
        assert_eq!((stock.ready(), stock.start(S)), (0, 1), "and after");
    }

    #[test]
    fn fills_refills_and_serves_those_who_wait() {
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
        assert!(pauses.is_sorted() && pauses.last() == Some(&LONGEST_PAUSE), "{pauses:?}");
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
