//! The worker's end of the log (lane 0), over all connections of its program.
//!
//! One reader takes frames off the present connection, any thread sends. A connection that breaks
//! leaves the session as it is: frames to the program stay in the log until the program comes back
//! ([`WorkerEnd::resume`]), or the reader gives up ([`WorkerEnd::next`]).

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use gpusession_proto::frame::{BadFrame, HEADER, Header, op};
use gpusession_proto::preface::{Code, refusal};

use crate::line::{Line, Outgoing};
use crate::log::frame_len;
use crate::resume::{Attempt, Counts, Fence, SessionKey, ack};
use crate::transport::{Stream, Transport};

/// Bytes after which a receiver tells how much has arrived.
pub const ACKNOWLEDGED_EVERY: usize = 256 << 10;
/// Bytes of the log above which a sender waits while no connection exists.
const MAX_WAITING: usize = 16 << 20;
/// Bytes of frames that are sent at a time.
const BATCH: usize = 4 << 20;
/// Bytes of the log that a program leaves unacknowledged only if it is broken.
const MAX_LOG: usize = 256 << 20;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Next step of the reader after the end of a connection.
pub enum Next<T = Transport> {
    /// Read this one.
    Line(Line<T>),
    /// Ask again: the program may still come back.
    Later,
    /// The session is over, for this reason if the end of the connection is none.
    Over(Option<String>),
}

/// A worker's end of its program's connection.
pub struct WorkerEnd<T = Transport> {
    worker: [u8; 16],
    key: SessionKey,
    grace: Duration,
    incoming: Mutex<Incoming<T>>,
    /// A connection has come, or none will.
    came: Condvar,
    outgoing: Mutex<Outgoing<T>>,
    /// A connection has come, so that senders need not wait.
    room: Condvar,
    /// Number of the latest frame from the program.
    received: AtomicU64,
    /// Number of the latest frame that the program has acknowledged.
    acknowledged: AtomicU64,
    /// Number of the latest frame to the program.
    sent: AtomicU64,
    broken: OnceLock<&'static str>,
}

struct Incoming<T> {
    /// The connection that counts.
    fence: Fence,
    transport: Arc<T>,
    next: Option<Line<T>>,
    received: u64,
    /// The program has said that the next end of the stream is its own.
    leaving: bool,
    /// Bytes since the latest acknowledgement.
    untold: usize,
}

impl<T: Stream> WorkerEnd<T> {
    /// Starts with the connection on which the greeting came; a lost one may come back for `grace`.
    pub fn new(
        worker: [u8; 16],
        secret: &[u8; 32],
        grace: Duration,
        transport: T,
        attempt: u32,
    ) -> (Self, Line<T>) {
        let transport = Arc::new(transport);
        let line = Line { transport: transport.clone(), attempt };
        let incoming = Incoming {
            fence: Fence::new(attempt),
            transport,
            next: None,
            // The greeting.
            received: 1,
            leaving: false,
            untold: 0,
        };
        let end = Self {
            worker,
            key: SessionKey::new(secret),
            grace,
            incoming: Mutex::new(incoming),
            came: Condvar::new(),
            outgoing: Mutex::new(Outgoing::new(line.clone())),
            room: Condvar::new(),
            received: AtomicU64::new(1),
            acknowledged: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            broken: OnceLock::new(),
        };
        (end, line)
    }

    /// Returns the number of the latest frame from the program, for headers of frames to it.
    pub fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    /// Returns `true` if a later connection may continue the present one.
    pub fn returns(&self) -> bool {
        !self.grace.is_zero()
    }

    /// Returns an attempt of the program to bring a connection back.
    pub fn attempt(&self, lane: u16, number: u32) -> Attempt<'_> {
        Attempt { key: &self.key, worker: self.worker, lane, number }
    }

    /// Numbers and sends complete frames; without a connection they wait in the log.
    ///
    /// Many frames go in batches, so that the program can acknowledge some before all are sent.
    pub fn send(&self, mut frames: Vec<u8>) {
        let mut sent = 0;
        while frames.len() - sent > BATCH {
            let mut len = frame_len(&frames[sent..]);
            while len < BATCH {
                len += frame_len(&frames[sent + len..]);
            }
            self.send_batch(frames[sent..sent + len].to_vec());
            sent += len;
        }
        frames.drain(..sent);
        if !frames.is_empty() {
            self.send_batch(frames);
        }
    }

    fn send_batch(&self, mut frames: Vec<u8>) {
        let mut outgoing = lock(&self.outgoing);
        // With a connection the socket holds senders back: waiting for acknowledgements as well
        // could wait for a reader that waits for this thread.
        while outgoing.line.is_none() && outgoing.log.bytes() > MAX_WAITING && self.returns() {
            outgoing = self.room.wait(outgoing).unwrap_or_else(PoisonError::into_inner);
        }
        let last = number(&mut frames, outgoing.log.next());
        // Before the program can have it.
        self.sent.store(last, Ordering::Release);
        let len = frames.len();
        let acknowledged = || self.acknowledged.load(Ordering::Acquire);
        let sent = outgoing.send(&mut frames, last, acknowledged, self.returns());
        // Without this batch, which the program may not have read yet.
        if outgoing.log.bytes() > MAX_LOG + len {
            let _ = self.broken.set("the program does not acknowledge what it gets");
        }
        if (sent.is_err() || self.broken.get().is_some())
            && let Some(line) = outgoing.line.take()
        {
            // The reader notices the end.
            line.transport.shutdown();
        }
    }

    /// Sends a frame that is in no log, if a connection exists.
    pub fn send_outside(&self, frame: &[u8]) {
        if let Some(line) = &lock(&self.outgoing).line {
            let _ = line.transport.send(frame);
        }
    }

    /// Begins to take frames off a connection; `None` if a later one has replaced it.
    pub fn taking(&self, line: &Line<T>) -> Option<Taking<'_, T>> {
        let incoming = lock(&self.incoming);
        let acknowledged = self.acknowledged.load(Ordering::Relaxed);
        incoming.fence.admits(line.attempt).then_some(Taking { end: self, incoming, acknowledged })
    }

    /// Waits at most `patience` for the connection after one that has ended at `since`.
    pub fn next(&self, ended: &Line<T>, since: Instant, patience: Duration) -> Next<T> {
        let mut incoming = lock(&self.incoming);
        let until = Instant::now() + patience;
        loop {
            if let Some(line) = incoming.next.take() {
                return Next::Line(line);
            }
            if let Some(reason) = self.broken.get() {
                return Next::Over(Some((*reason).into()));
            }
            // Also without an acknowledgement the program may have the greeting's answer. If it has
            // not, its daemon ends this worker, and it asks for another one.
            let fenced = !incoming.fence.admits(ended.attempt);
            if !fenced && (incoming.leaving || !self.returns()) {
                return Next::Over(None);
            }
            let now = Instant::now();
            if now.saturating_duration_since(since) >= self.grace {
                let seconds = self.grace.as_secs();
                return Next::Over(Some(format!(
                    "the connection broke and did not come back within {seconds} s"
                )));
            }
            if now >= until {
                return Next::Later;
            }
            let wait = until.min(since + self.grace) - now;
            incoming = self.came.wait_timeout(incoming, wait).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Makes a new connection the only one that counts; `theirs` is the program's position.
    ///
    /// Returns the number of frames that have arrived, or the reason for a refusal.
    fn fence(&self, line: &Line<T>, theirs: &Counts) -> Result<u64, &'static str> {
        let (received, old) = {
            let mut incoming = lock(&self.incoming);
            if !self.returns() {
                return Err("this worker does not wait for its program");
            }
            let mine = Counts {
                received: incoming.received,
                first: self.acknowledged.load(Ordering::Acquire) + 1,
                next: self.sent.load(Ordering::Acquire) + 1,
            };
            incoming.fence.pass(line.attempt, &mine, theirs)?;
            (incoming.received, std::mem::replace(&mut incoming.transport, line.transport.clone()))
        };
        // Frees a sender that is stuck in it.
        old.shutdown();
        Ok(received)
    }

    /// Continues on a connection behind the fence, where `theirs` frames have arrived: sends the
    /// welcome, then the rest of the log.
    fn carry_on(
        &self,
        line: Line<T>,
        received: u64,
        theirs: u64,
        welcome: impl FnOnce(&Counts) -> io::Result<Vec<u8>>,
    ) -> io::Result<()> {
        let mut outgoing = lock(&self.outgoing);
        // A later connection may have come so far first: it stays.
        if !lock(&self.incoming).fence.admits(line.attempt) {
            return Err(io::Error::other("a later connection has taken its place"));
        }
        outgoing.line = None;
        outgoing.log.acknowledge(theirs);
        self.acknowledged.fetch_max(theirs, Ordering::AcqRel);
        let mine = Counts { received, first: outgoing.log.first(), next: outgoing.log.next() };
        line.transport.send(&welcome(&mine)?)?;
        // Read while the rest is sent: the program sends its own meanwhile.
        lock(&self.incoming).next = Some(line.clone());
        self.came.notify_all();
        if let Err((line, e)) = outgoing.resume(line, theirs) {
            line.transport.shutdown();
            return Err(e);
        }
        self.room.notify_all();
        Ok(())
    }
}

impl WorkerEnd {
    /// Lets the program come back on a new connection, if it can prove that it is the one.
    ///
    /// An earlier connection counts until then.
    pub fn resume(&self, number: u32, transport: Transport) -> io::Result<()> {
        let line = Line { transport: Arc::new(transport), attempt: number };
        let transport = line.transport.clone();
        let attempt = self.attempt(0, number);
        let claim = attempt.challenge(&transport)?;
        let received = self.fence(&line, &claim.counts).map_err(|reason| {
            let _ = transport.send(&refusal(Code::State, reason));
            io::Error::other(reason)
        })?;
        self.carry_on(line, received, claim.counts.received, |mine| attempt.welcome(&transport, &claim, mine))
    }
}

/// The reader's right to take frames; later ones of a replaced connection are dropped.
pub struct Taking<'a, T: Stream = Transport> {
    end: &'a WorkerEnd<T>,
    incoming: MutexGuard<'a, Incoming<T>>,
    acknowledged: u64,
}

impl<T: Stream> Taking<'_, T> {
    /// Counts a whole frame; `false` if it was for the connection only.
    pub fn count(&mut self, header: &Header) -> Result<bool, BadFrame> {
        if header.ack.get() > self.end.sent.load(Ordering::Acquire) {
            return Err(BadFrame("acknowledges what was not sent"));
        }
        self.acknowledged = self.acknowledged.max(header.ack.get());
        match header.op.get() {
            op::ACK => return Ok(false),
            op::BYE => {
                self.incoming.leaving = true;
                return Ok(false);
            }
            _ => {}
        }
        if header.seq.get() != self.incoming.received + 1 {
            return Err(BadFrame("out of order"));
        }
        self.incoming.received += 1;
        self.incoming.untold += HEADER + header.body_len();
        Ok(true)
    }
}

impl<T: Stream> Drop for Taking<'_, T> {
    fn drop(&mut self) {
        let received = self.incoming.received;
        self.end.received.store(received, Ordering::Relaxed);
        self.end.acknowledged.fetch_max(self.acknowledged, Ordering::AcqRel);
        if self.incoming.untold < ACKNOWLEDGED_EVERY {
            return;
        }
        // The reader never waits for a sender, nor for the program.
        if let Ok(outgoing) = self.end.outgoing.try_lock()
            && let Some(line) = &outgoing.line
            && line.transport.writable()
        {
            let _ = line.transport.send(&ack(received));
            self.incoming.untold = 0;
        }
    }
}

/// Writes the numbers of several frames, from `next` on; returns the last one.
fn number(frames: &mut [u8], next: u64) -> u64 {
    let (mut last, mut rest) = (next - 1, frames);
    while let Some(bytes) = rest.first_chunk_mut::<HEADER>() {
        let header: &mut Header = zerocopy::transmute_mut!(bytes);
        last += 1;
        header.number = (last as u32).into();
        let len = HEADER + header.body_len();
        rest = rest.get_mut(len..).unwrap_or_default();
    }
    last
}

#[cfg(test)]
mod model;

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::{TcpListener, TcpStream};

    use gpusession_proto::frame::{HEADER, Header, Writer, op};

    use super::*;

    #[test]
    fn more_frames_than_the_log_may_hold_reach_a_program_that_acknowledges() {
        const FRAMES: u64 = 300;
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut program = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let transport = Transport::plain(listener.accept().unwrap().0).unwrap();
        let (end, _line) = WorkerEnd::new([1; 16], &[2; 32], Duration::from_secs(60), transport, 1);
        let header = Header {
            len: 0.into(),
            op: op::HOST_CHANGED.into(),
            flags: 0.into(),
            thread: 0.into(),
            number: 0.into(),
            seq: 0.into(),
            ack: 0.into(),
            ctx: 0.into(),
        };
        let mut frames = Vec::new();
        for _ in 0..FRAMES {
            let mut w = Writer::new(&mut frames, &header);
            w.bytes(&[7; 1 << 20]);
            w.finish();
        }
        assert!(frames.len() > MAX_LOG);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut body = Vec::new();
                for number in 1..=FRAMES {
                    let mut head = [0; HEADER];
                    program.read_exact(&mut head).unwrap();
                    body.resize(Header::parse(&head).unwrap().body_len(), 0);
                    program.read_exact(&mut body).unwrap();
                    end.acknowledged.store(number, Ordering::Release);
                }
            });
            end.send(frames);
        });
        assert_eq!(end.broken.get(), None);
        assert!(lock(&end.outgoing).log.bytes() < MAX_LOG / 4, "what was acknowledged is given up");
    }
}
