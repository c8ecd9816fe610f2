//! The way of a broken connection back to its worker.
//!
//! The first thread that notices the end begins an outage. From then on nothing is read, frames go
//! into the log only, and waits wait. The sender thread connects again until it succeeds, or until
//! the worker no longer waits; then the link is lost.

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use gpusession_proto::grant::{Endpoint, Outage};
use gpusession_proto::preface::{FLAG_RESUME, Refusal};

use super::{Inbox, Link, LinkLost, connect, lock};
use crate::flight::Ended;
use crate::line::{Line, Stop};
use crate::resume::{Attempt, Counts, ELSEWHERE};
use crate::threads;
use crate::transport::{Transport, Watch};

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
/// Time after which an outage is reported: most end earlier, and a server that answers knows more.
const REPORT_DELAY: Duration = Duration::from_millis(1500);
const REPORT_INTERVAL: Duration = Duration::from_secs(1);
/// Length of an outage from which queries of streams and events do not wait for its end.
const UNANSWERED_TIMEOUT: Duration = Duration::from_millis(100);
/// Bytes of the log at which a post waits for the end of the outage.
const MAX_WAITING: usize = 32 << 20;

/// Time without a connection.
#[derive(Clone)]
pub struct Interruption {
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

/// Failed attempts of one connection.
#[derive(Default)]
struct Tries {
    failures: usize,
    refused: Option<Instant>,
}

impl Tries {
    /// Counts a failure and returns its reason: as an error if no further attempt makes sense.
    fn note(&mut self, failed: Failed) -> Result<String, String> {
        self.failures += 1;
        match failed {
            Failed::Refused { reason, sure } => {
                let first = *self.refused.get_or_insert_with(Instant::now);
                if sure || first.elapsed() >= REFUSAL_INTERVAL { Err(reason) } else { Ok(reason) }
            }
            Failed::Now(reason) => Ok(reason),
        }
    }

    /// Returns `true` after the deadline; a machine that slept has tried nothing meanwhile.
    fn are_over(&self, deadline: Instant) -> bool {
        self.failures > 1 && Instant::now() >= deadline
    }
}

/// A connection that has come back.
struct Back {
    transport: Transport,
    address: SocketAddr,
    attempt: u32,
    /// Frames or chunks that the worker has.
    received: u64,
}

impl Link {
    /// Lets the link come back from now on, if the worker waits for it.
    pub(super) fn begin_to_return(&self, grace: Duration) -> Result<(), LinkLost> {
        let Some(link) = self.me.upgrade().filter(|_| !grace.is_zero()) else { return Ok(()) };
        let failed = |what: &str, e: io::Error| LinkLost(format!("cannot {what} the connection: {e}"));
        lock(&self.present).watch(&Watch::CLOSE).map_err(|e| failed("watch", e))?;
        threads::spawn("gpusession-watch", move || link.watch()).map_err(|e| failed("watch", e))?;
        self.returns.store(true, Ordering::SeqCst);
        self.acknowledge(self.received.load(Ordering::Relaxed));
        Ok(())
    }

    /// Notices the end of the log's connection while no thread reads it, until the link is lost.
    fn watch(&self) {
        /// Time for the thread that reads the connection to notice the end.
        const READER_DELAY: Duration = Duration::from_millis(5);
        let mut reported = 0;
        while self.report_outages(&mut reported).and_then(|()| self.check()).is_ok() {
            let transport = lock(&self.present).clone();
            transport.wait_for_end();
            // Bytes before the end count, such as the worker's reason.
            let _ = self.poll();
            if lock(&self.inbox).outage.is_none() {
                std::thread::park_timeout(READER_DELAY);
            }
        }
    }

    /// Waits for the end of an outage and reports it meanwhile; `reported` counts those that ended.
    fn report_outages(&self, reported: &mut u32) -> Result<(), LinkLost> {
        let report = |length: Duration, number, over| {
            let Endpoint { lease, worker, .. } = &self.endpoint;
            let ms = u64::try_from(length.as_millis()).unwrap_or(u64::MAX);
            self.events.outage(Outage { lease: lease.clone(), worker: *worker, ms, number, over })
        };
        let mut due = None;
        let mut inbox = lock(&self.inbox);
        while let Some(outage) = &inbox.outage {
            self.check()?;
            let (since, number) = (outage.since, inbox.over.0 + 1);
            let due_at = *due.get_or_insert(since + REPORT_DELAY);
            let left = due_at.saturating_duration_since(Instant::now());
            if !left.is_zero() {
                inbox.waiting += 1;
                inbox =
                    self.inbox_changed.wait_timeout(inbox, left).unwrap_or_else(PoisonError::into_inner).0;
                inbox.waiting -= 1;
                continue;
            }
            drop(inbox);
            if let Some(reason) = report(since.elapsed(), number, false) {
                return Err(self.lose(&format!("connection to {} lost: {reason}", self.server)));
            }
            due = Some(Instant::now() + REPORT_INTERVAL);
            inbox = lock(&self.inbox);
        }
        let (number, length) = inbox.over;
        drop(inbox);
        if std::mem::replace(reported, number) != number {
            report(length, number, true);
        }
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
        if !self.returns() {
            drop(inbox);
            return Err(self.lose(&format!("connection to {} lost: {reason}", self.server)));
        }
        let progress = (self.received.load(Ordering::Relaxed), self.acknowledged.load(Ordering::Relaxed));
        // A connection on which nothing arrived does not prolong the time.
        let outage = match inbox.before.take().filter(|before| before.progress == progress) {
            Some(before) => before,
            None => Interruption { since: Instant::now(), reason: reason.into(), progress },
        };
        inbox.outage = Some(outage);
        self.broken.store(true, Ordering::SeqCst);
        drop(inbox);
        lock(&self.present).shutdown();
        self.events.interrupted(&format!("connection to {} interrupted: {reason}", self.server));
        self.inbox_changed.notify_all();
        self.outbox.wake();
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

    /// Returns `true` during an outage.
    pub fn is_interrupted(&self) -> bool {
        self.broken.load(Ordering::SeqCst)
    }

    /// Returns `true` if no connection has existed for [`UNANSWERED_TIMEOUT`].
    ///
    /// A call that asks whether work is complete need not wait for the answer then.
    pub fn is_away(&self) -> bool {
        self.broken.load(Ordering::Relaxed)
            && lock(&self.inbox).outage.as_ref().is_some_and(|o| o.since.elapsed() >= UNANSWERED_TIMEOUT)
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
        if self.broken.load(Ordering::Acquire) && lock(&self.sending).outgoing.log.bytes() > MAX_WAITING {
            self.wait_out()?;
        }
        Ok(())
    }

    fn deadline(&self, outage: &Interruption) -> Instant {
        outage.since + self.session.get().map_or(Duration::ZERO, |session| session.grace) + MARGIN_GRACE
    }

    fn given_up(&self, outage: &Interruption, last: &str) -> String {
        let seconds = outage.since.elapsed().as_secs();
        format!("connection to {} lost: {}; not back within {seconds} s: {last}", self.server, outage.reason)
    }

    /// Ends an outage: with a new connection, or with the link.
    pub(super) fn come_back(&self) {
        // The old connection is shut down, so that no thread holds these locks for long.
        lock(&self.incoming).interrupt();
        lock(&self.sending).outgoing.line = None;
        let Some(outage) = lock(&self.inbox).outage.clone() else { return };
        let mut tries = Tries::default();
        while self.lost.get().is_none() {
            match self.attempt(tries.failures > 0) {
                Ok(()) => {
                    self.events.resumed(outage.since.elapsed());
                    return;
                }
                Err(failed) => match tries.note(failed) {
                    Ok(last) if tries.are_over(self.deadline(&outage)) => {
                        self.lose(&self.given_up(&outage, &last));
                    }
                    Ok(_) => self.pause(&tries, outage.since),
                    Err(reason) => {
                        self.lose(&format!("connection to {} lost: {reason}", self.server));
                    }
                },
            }
        }
    }

    /// Sleeps before the next attempt; ends early when the link is lost.
    fn pause(&self, tries: &Tries, since: Instant) {
        let pause = PAUSES[(tries.failures - 1).min(PAUSES.len() - 1)];
        // Up to a quarter longer, so that programs do not come back in step.
        let more = pause * (since.elapsed().subsec_nanos() % 256) / 1024;
        let until = Instant::now() + pause + more;
        while self.lost.get().is_none() && Instant::now() < until {
            std::thread::park_timeout(until - Instant::now());
        }
    }

    fn attempt(&self, everywhere: bool) -> Result<(), Failed> {
        let mine = || {
            let sending = lock(&self.sending);
            let received = self.received.load(Ordering::Acquire);
            Counts { received, first: sending.outgoing.log.first(), next: sending.outgoing.log.next() }
        };
        let back = self.reach(0, everywhere, &mine)?;
        *lock(&self.address) = back.address;
        self.install(Line { transport: Arc::new(back.transport), attempt: back.attempt }, back.received);
        Ok(())
    }

    /// Connects a lane again, and agrees with the worker where both continue.
    fn reach(&self, lane: u16, everywhere: bool, mine: &dyn Fn() -> Counts) -> Result<Back, Failed> {
        let mut endpoint = self.endpoint.clone();
        // The worker is most probably where it was.
        if !everywhere {
            endpoint.addresses = vec![lock(&self.address).to_string()];
        }
        let (Some(session), Some(attempts)) = (self.session.get(), self.attempts.get(usize::from(lane)))
        else {
            return Err(Failed::Now("not greeted".into()));
        };
        let connected = connect(&endpoint, lane, FLAG_RESUME, attempts, CONNECT_TIMEOUT, &Watch::CLOSE);
        // The server's refusals come in clear.
        let (transport, address, number) = connected.map_err(|e| Failed::new(e.error, false))?;
        let attempt = Attempt { key: &session.key, worker: endpoint.worker, lane, number };
        let worker = attempt.come_back(&transport, &mine()).map_err(|e| match e.to_string() {
            elsewhere if elsewhere == ELSEWHERE => {
                Failed::Refused { reason: elsewhere, sure: self.encrypted }
            }
            _ => Failed::new(e, self.encrypted),
        })?;
        Ok(Back { transport, address, attempt: number, received: worker.received })
    }

    /// Brings a bulk lane back after the end of its connection: a new one, and the number of chunks
    /// that the worker has received. `None` if the link is lost.
    ///
    /// The log's connection comes first. A lane that nothing `needs` may take any time.
    pub(crate) fn lane_back(
        &self,
        lane: u16,
        ended: Ended,
        mine: &dyn Fn() -> Counts,
        needs: &dyn Fn() -> bool,
    ) -> Option<(Transport, u64)> {
        let broken = match ended {
            Ended::Broken(error) if self.returns() => error.to_string(),
            Ended::Broken(error) => return self.lose_lane(&error.to_string()),
            Ended::Fatal(reason) => return self.lose_lane(&reason),
        };
        let mut tries = Tries::default();
        let mut outage = Interruption { since: Instant::now(), reason: broken, progress: (0, 0) };
        let mut log = lock(&self.inbox).attempt;
        loop {
            // The log's connection has most probably broken, too.
            self.poll().and_then(|()| self.wait_out()).ok()?;
            let now = lock(&self.inbox).attempt;
            if std::mem::replace(&mut log, now) != now || !needs() {
                outage.since = Instant::now();
            }
            match self.reach(lane, false, mine) {
                Ok(back) => return Some((back.transport, back.received)),
                Err(failed) => match tries.note(failed) {
                    Ok(last) if tries.are_over(self.deadline(&outage)) => {
                        self.lose(&self.given_up(&outage, &last));
                    }
                    Ok(_) => self.pause(&tries, outage.since),
                    Err(reason) => return self.lose_lane(&reason),
                },
            }
        }
    }

    fn lose_lane<T>(&self, reason: &str) -> Option<T> {
        self.lose(&format!("bulk connection to {} lost: {reason}", self.server));
        None
    }

    /// Continues on a new connection: sends what the worker lacks.
    fn install(&self, line: Line, received: u64) {
        let mut sending = lock(&self.sending);
        self.acknowledged.fetch_max(received, Ordering::Relaxed);
        lock(&self.incoming).resume(line.clone());
        *lock(&self.present) = line.transport.clone();
        {
            let mut inbox = lock(&self.inbox);
            inbox.attempt = line.attempt;
            inbox.before = inbox.outage.take();
            let length = inbox.before.as_ref().map_or(Duration::ZERO, |outage| outage.since.elapsed());
            inbox.over = (inbox.over.0 + 1, length);
            self.broken.store(false, Ordering::SeqCst);
        }
        // Before the rest is sent: both ends must read while they send it.
        self.inbox_changed.notify_all();
        if self.lost.get().is_some() {
            line.transport.shutdown();
        }
        if let Err((line, e)) = sending.outgoing.resume(line, received) {
            drop(sending);
            let _ = self.stopped(Stop::Broken(line.attempt, e));
        }
    }
}
