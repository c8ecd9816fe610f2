//! The way of a broken connection back to its worker.
//!
//! The first thread that notices the end begins an outage. From then on nothing is read, frames go
//! into the log only, and waits wait. The sender thread connects again until it succeeds, or until
//! the worker no longer waits; then the link is lost.

use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use gpusession_proto::preface::{FLAG_RESUME, Refusal};

use super::{Inbox, Line, Link, LinkLost, Stop, connect, lock};
use crate::resume::{Attempt, Counts, ELSEWHERE};

/// Time after the worker's own limit at which the link gives up.
const MARGIN_GRACE: Duration = Duration::from_secs(5);
/// Further time after which a waiting thread gives up, if the sender thread has not.
const SENDER_TIMEOUT: Duration = Duration::from_secs(20);
/// Timeout of one connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// Pauses after failed attempts; the last one repeats.
const PAUSES: [Duration; 4] = [
    Duration::from_millis(100),
    Duration::from_millis(200),
    Duration::from_millis(500),
    Duration::from_secs(1),
];
/// A clear refusal is believed if it comes again after this time: anybody on the path can forge it.
const REFUSAL_INTERVAL: Duration = Duration::from_millis(500);
/// Bytes of the log at which a post waits for the end of the outage.
const MAX_WAITING: usize = 32 << 20;

/// Time without a connection.
#[derive(Clone)]
pub struct Outage {
    since: Instant,
    reason: String,
    /// Frames that had arrived at both ends.
    progress: (u64, u64),
}

/// Reason why an attempt failed.
enum Failed {
    /// A later one may succeed.
    Now(String),
    /// The worker or its server does not want the program back.
    Refused { reason: String, sure: bool },
}

impl Failed {
    fn new(error: io::Error, encrypted: bool) -> Self {
        match error.downcast::<Refusal>() {
            Ok(refusal) if !refusal.code.passes() => {
                Self::Refused { reason: refusal.reason, sure: encrypted }
            }
            Ok(refusal) => Self::Now(refusal.reason),
            Err(error) => Self::Now(error.to_string()),
        }
    }
}

impl Link {
    /// Lets the link come back from now on, if the worker waits for it.
    ///
    /// The worker waits once it knows that the greeting's reply has arrived.
    pub(super) fn begin_to_return(&self, grace: Duration) {
        if !grace.is_zero() {
            self.returns.store(true, Ordering::SeqCst);
            self.acknowledge(self.received.load(Ordering::Relaxed));
        }
    }

    /// Makes a later break final; waits for the end of an outage before.
    pub(super) fn stay(&self) -> Result<(), LinkLost> {
        let mut inbox = lock(&self.inbox);
        while inbox.outage.is_some() {
            self.check()?;
            inbox = self.wait_for_change(inbox)?;
        }
        // Under the lock, so that an outage begins before or never.
        self.returns.store(false, Ordering::SeqCst);
        Ok(())
    }

    /// Begins an outage of the connection that `attempt` made, or loses the link.
    pub(super) fn broke(&self, attempt: u32, reason: &str) -> Result<(), LinkLost> {
        let mut inbox = lock(&self.inbox);
        self.check()?;
        if inbox.attempt != attempt || inbox.outage.is_some() {
            // Another thread has noticed it.
            return Ok(());
        }
        if !self.returns.load(Ordering::SeqCst) {
            drop(inbox);
            return Err(self.lose(&format!("connection to {} lost: {reason}", self.server)));
        }
        let progress = (self.received.load(Ordering::Relaxed), self.acknowledged.load(Ordering::Relaxed));
        // A connection on which nothing arrived does not prolong the time.
        let outage = match inbox.before.take().filter(|before| before.progress == progress) {
            Some(before) => before,
            None => Outage { since: Instant::now(), reason: reason.into(), progress },
        };
        inbox.outage = Some(outage);
        self.broken.store(true, Ordering::SeqCst);
        drop(inbox);
        lock(&self.present).shutdown();
        self.events.interrupted(&format!("connection to {} interrupted: {reason}", self.server));
        self.inbox_changed.notify_all();
        self.pending.store(true, Ordering::SeqCst);
        if let Some(sender) = self.sender.get() {
            sender.unpark();
        }
        Ok(())
    }

    /// Waits for a reply, the reader's place, the end of an outage or of the link.
    pub(super) fn wait_for_change<'a>(
        &self,
        mut inbox: MutexGuard<'a, Inbox>,
    ) -> Result<MutexGuard<'a, Inbox>, LinkLost> {
        inbox.waiting += 1;
        let Some(outage) = &inbox.outage else {
            inbox = self.inbox_changed.wait(inbox).unwrap_or_else(PoisonError::into_inner);
            inbox.waiting -= 1;
            return Ok(inbox);
        };
        let left = (self.deadline(outage) + SENDER_TIMEOUT).saturating_duration_since(Instant::now());
        inbox = self.inbox_changed.wait_timeout(inbox, left).unwrap_or_else(PoisonError::into_inner).0;
        inbox.waiting -= 1;
        match &inbox.outage {
            Some(outage) if left.is_zero() => {
                let reason = self.given_up(outage, "the attempts hang");
                drop(inbox);
                Err(self.lose(&reason))
            }
            _ => Ok(inbox),
        }
    }

    /// Waits for the end of an outage.
    pub(super) fn wait_out(&self) -> Result<(), LinkLost> {
        let mut inbox = lock(&self.inbox);
        while inbox.outage.is_some() {
            self.check()?;
            inbox = self.wait_for_change(inbox)?;
        }
        Ok(())
    }

    /// Waits for the end of an outage if the log is full.
    pub(super) fn wait_for_room(&self) -> Result<(), LinkLost> {
        if self.broken.load(Ordering::Acquire) && lock(&self.sending).log.bytes() > MAX_WAITING {
            self.wait_out()?;
        }
        Ok(())
    }

    fn deadline(&self, outage: &Outage) -> Instant {
        outage.since + self.session.get().map_or(Duration::ZERO, |session| session.grace) + MARGIN_GRACE
    }

    fn given_up(&self, outage: &Outage, last: &str) -> String {
        let seconds = outage.since.elapsed().as_secs();
        format!("connection to {} lost: {}; not back within {seconds} s: {last}", self.server, outage.reason)
    }

    /// Ends an outage: with a new connection, or with the link.
    pub(super) fn come_back(&self) {
        // The old connection is shut down, so that no thread holds these locks for long. Frames in
        // its buffers are not counted, and come again.
        {
            let mut incoming = lock(&self.incoming);
            (incoming.line, incoming.start, incoming.end) = (None, 0, 0);
        }
        lock(&self.sending).line = None;
        let Some(outage) = lock(&self.inbox).outage.clone() else { return };
        let mut refused = None;
        let mut failures = 0;
        while self.lost.get().is_none() {
            // The worker is most probably where it was.
            let last = match self.attempt(failures > 0) {
                Ok(()) => {
                    self.events.resumed(outage.since.elapsed());
                    return;
                }
                Err(Failed::Refused { reason, sure }) => {
                    let first = *refused.get_or_insert_with(Instant::now);
                    if sure || first.elapsed() >= REFUSAL_INTERVAL {
                        self.lose(&format!("connection to {} lost: {reason}", self.server));
                        return;
                    }
                    reason
                }
                Err(Failed::Now(reason)) => reason,
            };
            failures += 1;
            // A machine that slept has tried nothing meanwhile.
            if failures > 1 && Instant::now() >= self.deadline(&outage) {
                self.lose(&self.given_up(&outage, &last));
                return;
            }
            let pause = PAUSES[(failures - 1).min(PAUSES.len() - 1)];
            // Up to a quarter longer, so that programs do not come back in step.
            let more = pause * (outage.since.elapsed().subsec_nanos() % 256) / 1024;
            let until = Instant::now() + pause + more;
            while self.lost.get().is_none() && Instant::now() < until {
                std::thread::park_timeout(until - Instant::now());
            }
        }
    }

    fn attempt(&self, everywhere: bool) -> Result<(), Failed> {
        let mut endpoint = self.endpoint.clone();
        if !everywhere {
            endpoint.addresses = vec![lock(&self.address).to_string()];
        }
        let Some(session) = self.session.get() else { return Err(Failed::Now("not greeted".into())) };
        let connected = connect(&endpoint, 0, FLAG_RESUME, &self.attempts[0], CONNECT_TIMEOUT);
        // The server's refusals come in clear.
        let (transport, address, number) = connected.map_err(|e| Failed::new(e.error, false))?;
        let attempt = Attempt { key: &session.key, worker: endpoint.worker, lane: 0, number };
        let mine = {
            let sending = lock(&self.sending);
            let received = self.received.load(Ordering::Acquire);
            Counts { received, first: sending.log.first(), next: sending.log.next() }
        };
        let back = attempt.come_back(&transport, &mine);
        let worker = back.map_err(|e| match e.to_string() {
            elsewhere if elsewhere == ELSEWHERE => {
                Failed::Refused { reason: elsewhere, sure: self.encrypted }
            }
            _ => Failed::new(e, self.encrypted),
        })?;
        *lock(&self.address) = address;
        self.install(Line { transport: Arc::new(transport), attempt: number }, worker.received);
        Ok(())
    }

    /// Continues on a new connection: sends what the worker lacks.
    fn install(&self, line: Line, received: u64) {
        let mut sending = lock(&self.sending);
        self.acknowledged.fetch_max(received, Ordering::Relaxed);
        sending.log.acknowledge(received);
        {
            let mut incoming = lock(&self.incoming);
            incoming.line = Some(line.clone());
            incoming.untold = 0;
        }
        *lock(&self.present) = line.transport.clone();
        {
            let mut inbox = lock(&self.inbox);
            inbox.attempt = line.attempt;
            inbox.before = inbox.outage.take();
            self.broken.store(false, Ordering::SeqCst);
        }
        // Before the rest is sent: both ends must read while they send it.
        self.inbox_changed.notify_all();
        if self.lost.get().is_some() {
            line.transport.shutdown();
        }
        let sent = sending.log.after(received).try_for_each(|frames| line.transport.send(frames));
        match sent {
            Ok(()) => sending.line = Some(line),
            Err(e) => {
                drop(sending);
                let _ = self.stopped(Stop::Broken(line.attempt, e));
            }
        }
    }
}
