//! Waits for replies, beside which a thread does other work.

use std::time::{Duration, Instant};

use super::{Link, LinkLost, Reply, lock};
use crate::line::Stop;

/// Work during a long wait; returns the time until it is due again.
pub type Work<'a> = &'a mut dyn FnMut() -> Duration;

/// Length of a wait from which work is due.
const WORK_DELAY: Duration = Duration::from_millis(10);
/// Time between two checks of the peer, which a wait without work makes by itself.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

impl Link {
    pub(super) fn wait_reply(&self, seq: u64, mut work: Option<Work<'_>>) -> Result<Reply, LinkLost> {
        let (mut checked, mut pause) = (Instant::now(), WORK_DELAY);
        loop {
            let until = work.is_some().then(|| Instant::now() + pause);
            if let Some(reply) = self.wait_until(seq, until)? {
                return Ok(reply);
            }
            if checked.elapsed() >= CHECK_INTERVAL {
                checked = Instant::now();
                self.check_peer()?;
            }
            if let Some(work) = &mut work {
                pause = work();
            }
        }
    }

    /// Waits for a reply; `None` if the time has come first.
    fn wait_until(&self, seq: u64, until: Option<Instant>) -> Result<Option<Reply>, LinkLost> {
        let mut inbox = lock(&self.inbox);
        loop {
            if let Some(reply) = inbox.replies.remove(&seq) {
                return Ok(Some(reply));
            }
            self.check()?;
            if until.is_some_and(|until| until <= Instant::now()) {
                return Ok(None);
            }
            if inbox.reader || inbox.outage.is_some() {
                inbox = self.wait_for_change(inbox, until)?;
                continue;
            }
            inbox.reader = true;
            drop(inbox);
            let read = self.read_until(seq, until);
            self.reader_ends();
            match read {
                Ok(reply) => return Ok(Some(reply)),
                Err(stop) => self.stopped(stop)?,
            }
            inbox = lock(&self.inbox);
        }
    }

    /// Begins an outage if the peer is silent for too long.
    fn check_peer(&self) -> Result<(), LinkLost> {
        // If it is replaced meanwhile, the next check counts.
        let attempt = lock(&self.inbox).attempt;
        let transport = lock(&self.present).clone();
        match transport.check_peer() {
            Ok(()) => Ok(()),
            Err(error) => self.stopped(Stop::Broken(attempt, error)),
        }
    }
}
