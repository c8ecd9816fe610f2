//! How the log leaves: by the threads that wait, by the sender, or by a thread that posts while the
//! sender sleeps.

use std::sync::MutexGuard;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::{Link, LinkLost, READ_BYTES, lock};
use crate::line::{Line, Outgoing, Stop};
use crate::spin;
use crate::transport::Transport;

/// Time that the sender waits for more frames before it writes.
const GATHER_WINDOW: Duration = Duration::from_micros(3);
/// Time between two posts within which the sender sends the second one, even if it has to wake.
///
/// It then stays awake for the posts that follow as soon.
const BURST_WINDOW: Duration = Duration::from_micros(50);
/// Longest post that leaves in place of the sleeping sender, in bytes.
const MAX_FOR_SLEEPER: usize = 16 << 10;
/// Bytes of the log that a worker leaves unacknowledged only if it is broken.
const MAX_LOG: usize = 512 << 20;

/// The sender's side of a connection.
pub(super) struct Sending {
    pub batch: Vec<u8>,
    /// The log stays empty if the link cannot come back.
    pub outgoing: Outgoing<Transport>,
    /// When a post was last sent in place of the sleeping sender.
    for_sleeper: Option<Instant>,
}

impl Sending {
    pub fn new(line: Line<Transport>) -> Self {
        Self { batch: Vec::with_capacity(READ_BYTES), outgoing: Outgoing::new(line), for_sleeper: None }
    }
}

impl Link {
    /// Writes all frames that were appended before; during an outage only into the log.
    ///
    /// Two threads never write at once, and the bytes keep their order.
    pub(super) fn flush(&self) -> Result<(), LinkLost> {
        self.send_waiting(lock(&self.sending))
    }

    /// Writes a post of `len` bytes in place of the sleeping sender, whose wake-up costs as much.
    ///
    /// Returns `false` if that could wait, or if posts follow each other so fast that the sender
    /// should take them.
    pub(super) fn send_for_sleeper(&self, len: usize) -> Result<bool, LinkLost> {
        if len > MAX_FOR_SLEEPER {
            return Ok(false);
        }
        let Ok(mut sending) = self.sending.try_lock() else { return Ok(false) };
        let burst = sending.for_sleeper.is_some_and(|before| before.elapsed() < BURST_WINDOW);
        let writable = || sending.outgoing.line.as_ref().is_some_and(|line| line.transport.writable());
        if burst || !writable() {
            return Ok(false);
        }
        sending.for_sleeper = Some(Instant::now());
        self.send_waiting(sending).map(|()| true)
    }

    fn send_waiting(&self, mut sending: MutexGuard<'_, Sending>) -> Result<(), LinkLost> {
        let Sending { batch, outgoing, .. } = &mut *sending;
        let last = self.outbox.take(batch);
        let acknowledged = || self.acknowledged.load(Ordering::Relaxed);
        let sent = outgoing.send(batch, last, acknowledged, self.returns.load(Ordering::Relaxed));
        let too_long = outgoing.log.bytes() > MAX_LOG;
        let broken = sent.err().and_then(|e| outgoing.line.take().map(|line| (line.attempt, e)));
        drop(sending);
        if too_long {
            return Err(self.lose(&format!("{} acknowledges nothing", self.server)));
        }
        match broken {
            Some((attempt, e)) => self.stopped(Stop::Broken(attempt, e)),
            None => self.check(),
        }
    }

    pub(super) fn send_loop(&self) {
        self.outbox.set_sender(std::thread::current());
        let spin = spin::short();
        while self.lost.get().is_none() {
            if self.broken.load(Ordering::Acquire) {
                self.come_back();
                continue;
            }
            if !spin::until(spin, || self.outbox.pending()) {
                self.outbox.sleep();
                continue;
            }
            if !spin.is_zero() {
                // More frames usually follow, and one write for several costs as much as for one.
                spin::until(GATHER_WINDOW, || !self.outbox.pending());
            }
            // A waiting thread may have sent everything meanwhile.
            if self.outbox.pending() && self.flush().is_err() {
                return;
            }
        }
    }
}
