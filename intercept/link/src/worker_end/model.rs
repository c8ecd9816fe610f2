//! A model of the log's resume: the real ends over a network in memory, in every order of their
//! steps.
//!
//! The worker's end is [`WorkerEnd`] itself. The program's end is its log, its reader's buffer and
//! the steps of `link::comeback`, each as long as its lock is held. Every step of the network and
//! of the two programs can come between any two others. A fault cuts a connection with or without
//! the bytes under way, or lets an attempt run out of time.

use std::cell::RefCell;
use std::hash::{Hash, Hasher};

use super::*;
use crate::line::{Incoming as Reading, Stop};
use crate::resume::{ELSEWHERE, frame};
use crate::search::{Loss, Model, Net, search};
use crate::transport::Wait;
use gpusession_proto::frame::{Reader, Writer};
use gpusession_proto::preface::Refusal;

mod processes;

/// Faults of one run, at most.
const FAULTS: u8 = 2;
/// Frames that the program posts, by batch.
const BATCHES: [u64; 1] = [2];
/// Frames of the worker: the operation, and the frame that has to come before it.
const SAID: [(u16, u64); 3] = [(op::REPLY, 1), (op::CALL_HOST, 2), (op::REPLY, 3)];
/// Last frame of the program; the first is the greeting.
const LAST: u64 = 3;

thread_local! {
    static NET: RefCell<Net> = RefCell::default();
}

/// An end of a connection of [`NET`].
#[derive(Debug, Clone, Copy)]
struct Wire {
    connection: usize,
    end: usize,
}

impl Wire {
    fn peer(self) -> Self {
        Self { end: 1 - self.end, ..self }
    }

    /// Removes the first whole frame that has arrived.
    fn take_frame(self) -> Option<Vec<u8>> {
        NET.with_borrow_mut(|net| {
            let bytes = &mut net.connections[self.connection].bytes[self.end];
            let len = (bytes.len() >= HEADER).then(|| frame_len(bytes)).filter(|len| *len <= bytes.len())?;
            Some(bytes.drain(..len).collect())
        })
    }
}

impl Stream for Wire {
    fn send(&self, bytes: &[u8]) -> io::Result<()> {
        NET.with_borrow_mut(|net| {
            let connection = &mut net.connections[self.connection];
            if connection.ended[self.end] {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            if !connection.cut {
                connection.bytes[self.peer().end].extend_from_slice(bytes);
            }
            Ok(())
        })
    }

    fn recv(&self, buf: &mut [u8], _: Wait) -> io::Result<usize> {
        NET.with_borrow_mut(|net| {
            let connection = &mut net.connections[self.connection];
            let bytes = &mut connection.bytes[self.end];
            let n = bytes.len().min(buf.len());
            if n > 0 {
                buf[..n].copy_from_slice(&bytes[..n]);
                bytes.drain(..n);
                return Ok(n);
            }
            if connection.ended[self.end] { Ok(0) } else { Err(io::ErrorKind::WouldBlock.into()) }
        })
    }

    fn writable(&self) -> bool {
        true
    }

    fn shutdown(&self) {
        NET.with_borrow_mut(|net| net.end(self.connection, self.end));
    }
}

fn line(attempt: u32, end: usize) -> Line<Wire> {
    Line { transport: Arc::new(Wire { connection: attempt as usize - 1, end }), attempt }
}

/// Step of the program's sender thread in an outage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Return {
    Idle,
    Apart,
    Asked { attempt: u32, received: u64, first: u64, next: u64 },
    Reading { attempt: u32, received: u64 },
}

/// The program's end, as `link` and `link::comeback` have it.
struct Program {
    outgoing: Outgoing<Wire>,
    incoming: Reading<Wire>,
    received: u64,
    acknowledged: u64,
    /// Attempt of the present connection, or of the last one.
    attempt: u32,
    outage: bool,
    back: Return,
    batches: usize,
    posted: u64,
    /// An attempt of this outage was refused for good; a second one loses the link.
    refused: bool,
    /// The link is lost: all calls return the sticky error.
    lost: bool,
}

/// The worker's threads around [`WorkerEnd`].
#[derive(Clone)]
struct Threads {
    /// The reader's connection and its bytes.
    line: Line<Wire>,
    buf: Vec<u8>,
    ended: bool,
    executed: u64,
    said: usize,
    /// Connections behind the fence that have not been welcomed: attempt, counts of both ends.
    fenced: Vec<(u32, u64, u64)>,
    /// Highest attempt behind the fence.
    newest: u32,
}

struct Log {
    net: Net,
    faults: u8,
    program: Program,
    worker: WorkerEnd<Wire>,
    threads: Threads,
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Post,
    Read,
    Part,
    Attempt,
    Welcomed,
    SendRest,
    WorkerReads,
    WorkerTakes,
    WorkerLooks,
    WorkerSays,
    Fence(u32),
    CarryOn(u32),
    Notice { connection: usize, end: usize },
    Cut { connection: usize, losses: [Loss; 2] },
    GiveUp,
}

impl Program {
    fn broke(&mut self, attempt: u32) {
        if self.attempt == attempt && !self.outage {
            self.outage = true;
            line(attempt, 0).transport.shutdown();
        }
    }

    fn post(&mut self) {
        let mut batch = Vec::new();
        for _ in 0..BATCHES[self.batches] {
            self.posted += 1;
            let mut header = Header::empty();
            header.op = op::HOST_FUNC_DONE.into();
            (header.seq, header.ack) = (self.posted.into(), self.received.into());
            Writer::new(&mut batch, &header).finish();
        }
        self.batches += 1;
        let acknowledged = self.acknowledged;
        if self.outgoing.send(&mut batch, self.posted, || acknowledged, true).is_err()
            && let Some(line) = self.outgoing.line.take()
        {
            self.broke(line.attempt);
        }
    }

    fn read(&mut self) -> Result<(), String> {
        match self.incoming.next_frame(Wait::No) {
            Ok((header, _)) => {
                self.acknowledged = self.acknowledged.max(header.ack.get());
                if header.op.get() == op::ACK {
                    return Ok(());
                }
                if u64::from(header.number.get()) != self.received + 1 {
                    return Err(format!("the program gets {} after {}", header.number, self.received));
                }
                if (header.op.get(), header.seq.get()) != SAID[self.received as usize] {
                    return Err("the program gets another frame than the worker said".into());
                }
                self.received += 1;
                Ok(())
            }
            Err(Stop::Nothing) => Ok(()),
            Err(Stop::Broken(attempt, _)) => {
                self.broke(attempt);
                Ok(())
            }
            Err(Stop::Fatal(reason)) => Err(reason),
        }
    }

    fn counts(&self) -> Counts {
        let Outgoing { log, .. } = &self.outgoing;
        Counts { received: self.received, first: log.first(), next: log.next() }
    }

    fn welcomed(&mut self, attempt: u32, mine: Counts) -> Result<(), String> {
        let wire = *line(attempt, 0).transport;
        let bytes = NET.with_borrow(|net| net.connections[wire.connection].bytes[0].clone());
        if let Some(refusal) = Refusal::read(&bytes) {
            wire.shutdown();
            if !refusal.code.passes() {
                self.lost = std::mem::replace(&mut self.refused, true);
            }
            self.back = Return::Apart;
            return Ok(());
        }
        let Some(welcome) = wire.take_frame() else {
            self.back = Return::Apart;
            return Ok(());
        };
        let theirs = Counts::read(&mut Reader::new(&welcome[HEADER..])).unwrap();
        if !mine.fits(theirs.received) || !theirs.fits(mine.received) {
            return Err(format!("{mine:?} of the program does not fit {theirs:?}"));
        }
        self.acknowledged = self.acknowledged.max(theirs.received);
        self.incoming.resume(line(attempt, 0));
        (self.attempt, self.outage, self.refused) = (attempt, false, false);
        self.back = Return::Reading { attempt, received: theirs.received };
        Ok(())
    }

    fn hash(&self, hasher: &mut impl Hasher) {
        self.outgoing.log.hash(hasher);
        self.outgoing.line.as_ref().map(|line| line.attempt).hash(hasher);
        self.incoming.unread().hash(hasher);
        self.incoming.line().map(|line| line.attempt).hash(hasher);
        (self.received, self.acknowledged, self.attempt, self.outage).hash(hasher);
        (self.back, self.batches, self.refused, self.lost).hash(hasher);
    }

    fn copy(&self) -> Self {
        let Outgoing { log, line } = &self.outgoing;
        Self {
            outgoing: Outgoing { log: log.clone(), line: line.clone() },
            incoming: self.incoming.copy(),
            ..*self
        }
    }
}

impl Threads {
    /// Counts and queues the whole frames in the buffer, as the worker's reader does.
    fn take(&mut self, worker: &WorkerEnd<Wire>) -> Result<(), String> {
        let Some(mut taking) = worker.taking(&self.line) else {
            self.ended = true;
            return Ok(());
        };
        if self.line.attempt < self.newest {
            return Err("the worker takes a frame of an earlier connection".into());
        }
        while self.buf.len() >= HEADER && frame_len(&self.buf) <= self.buf.len() {
            let header = Header::parse(self.buf.first_chunk().unwrap()).unwrap();
            self.buf.drain(..frame_len(&self.buf));
            if taking.count(&header).map_err(|e| e.to_string())? {
                if header.seq.get() != self.executed + 1 {
                    return Err(format!("{} is executed after {}", header.seq, self.executed));
                }
                self.executed += 1;
            }
        }
        Ok(())
    }

    fn says(&self) -> Option<(u16, u64)> {
        SAID.get(self.said).copied().filter(|(_, seq)| *seq <= self.executed)
    }

    fn say(&mut self, worker: &WorkerEnd<Wire>) {
        if let Some((op, seq)) = self.says() {
            let mut header = Header::empty();
            header.op = op.into();
            (header.seq, header.ack) = (seq.into(), worker.received().into());
            let mut bytes = Vec::new();
            Writer::new(&mut bytes, &header).finish();
            worker.send(bytes);
            self.said += 1;
        }
    }

    fn fence(&mut self, worker: &WorkerEnd<Wire>, attempt: u32) -> Result<(), String> {
        let line = line(attempt, 1);
        let Some(resume) = line.transport.take_frame() else { return Ok(()) };
        let theirs = Counts::read(&mut Reader::new(&resume[HEADER..])).unwrap();
        match worker.fence(&line, &theirs) {
            Ok(received) => {
                self.newest = attempt;
                self.fenced.push((attempt, received, theirs.received));
            }
            Err(ELSEWHERE) => return Err(format!("the worker refuses {theirs:?}")),
            Err(reason) => drop(line.transport.send(&refusal(Code::State, reason))),
        }
        Ok(())
    }

    fn carry_on(&mut self, worker: &WorkerEnd<Wire>, attempt: u32) {
        let at = self.fenced.iter().position(|fenced| fenced.0 == attempt).unwrap();
        let (attempt, received, theirs) = self.fenced.remove(at);
        let welcome = |mine: &Counts| Ok(frame(op::WELCOME, |w| mine.write(w)));
        // The thread ends, and with it its connection.
        if worker.carry_on(line(attempt, 1), received, theirs, welcome).is_err() {
            line(attempt, 1).transport.shutdown();
        }
    }

    fn look(&mut self, worker: &WorkerEnd<Wire>) -> Result<(), String> {
        match worker.next(&self.line, Instant::now(), Duration::ZERO) {
            Next::Line(next) => {
                (self.line, self.ended) = (next, false);
                self.buf.clear();
            }
            Next::Later => {}
            Next::Over(reason) => return Err(format!("the worker ends: {reason:?}")),
        }
        Ok(())
    }
}

impl Log {
    /// Starts when the program has the greeting's answer; that is on its way to the worker.
    fn new() -> Self {
        let net = Net { connections: vec![Default::default()] };
        NET.set(net);
        let (worker, reader) =
            WorkerEnd::new([1; 16], &[2; 32], Duration::from_secs(60), *line(1, 1).transport, 1);
        let mut threads = Threads {
            line: reader,
            buf: Vec::new(),
            ended: false,
            executed: 1,
            said: 0,
            fenced: Vec::new(),
            newest: 1,
        };
        let mut greeting = Vec::new();
        Writer::new(&mut greeting, &{
            let mut header = Header::empty();
            (header.op, header.seq) = (op::HELLO.into(), 1.into());
            header
        })
        .finish();
        let mut program = Program {
            outgoing: Outgoing::new(line(1, 0)),
            incoming: Reading::new(line(1, 0)),
            received: 0,
            acknowledged: 0,
            attempt: 1,
            outage: false,
            back: Return::Idle,
            batches: 0,
            posted: 1,
            refused: false,
            lost: false,
        };
        program.outgoing.log.pass(&mut greeting, 1);
        threads.say(&worker);
        program.read().unwrap();
        line(1, 0).transport.send(&ack(program.received)).unwrap();
        Self { net: NET.take(), faults: FAULTS, program, worker, threads }
    }

    fn received(&self, attempt: u32, end: usize) -> &[u8] {
        &self.net.connections[attempt as usize - 1].bytes[end]
    }

    fn ended(&self, attempt: u32, end: usize) -> bool {
        self.net.connections[attempt as usize - 1].ended[end]
    }
}

impl Model for Log {
    type Step = Step;

    fn copy(&self) -> Self {
        let Self { net, faults, program, worker, threads } = self;
        let incoming = lock(&worker.incoming);
        let outgoing = lock(&worker.outgoing);
        let number = |number: &AtomicU64| AtomicU64::new(number.load(Ordering::Relaxed));
        let worker = WorkerEnd {
            worker: worker.worker,
            key: SessionKey::new(&[2; 32]),
            grace: worker.grace,
            incoming: Mutex::new(Incoming {
                fence: incoming.fence,
                transport: incoming.transport.clone(),
                next: incoming.next.clone(),
                ..*incoming
            }),
            came: Condvar::new(),
            outgoing: Mutex::new(Outgoing { log: outgoing.log.clone(), line: outgoing.line.clone() }),
            room: Condvar::new(),
            received: number(&worker.received),
            acknowledged: number(&worker.acknowledged),
            sent: number(&worker.sent),
            broken: worker.broken.clone(),
        };
        let (program, threads) = (program.copy(), threads.clone());
        Self { net: net.clone(), faults: *faults, program, worker, threads }
    }

    fn hash(&self, hasher: &mut impl Hasher) {
        let Self { net, faults, program, worker, threads } = self;
        (net, faults).hash(hasher);
        program.hash(hasher);
        let incoming = lock(&worker.incoming);
        (incoming.fence, incoming.transport.connection, incoming.received, incoming.untold).hash(hasher);
        incoming.next.as_ref().map(|line| line.attempt).hash(hasher);
        let outgoing = lock(&worker.outgoing);
        outgoing.log.hash(hasher);
        outgoing.line.as_ref().map(|line| line.attempt).hash(hasher);
        for number in [&worker.received, &worker.acknowledged, &worker.sent] {
            number.load(Ordering::Relaxed).hash(hasher);
        }
        let Threads { line, buf, ended, executed, said, fenced, newest } = threads;
        (line.attempt, buf, ended, executed, said, fenced, newest).hash(hasher);
    }

    fn steps(&self) -> Vec<Step> {
        let Self { net, faults, program, threads, .. } = self;
        let back = program.back;
        let mut steps = Vec::new();
        let mut may = |possible: bool, step| {
            if possible {
                steps.push(step);
            }
        };
        let sender_is_free = !matches!(back, Return::Reading { .. }) && !program.lost;
        may(sender_is_free && program.batches < BATCHES.len(), Step::Post);
        may(!program.outage, Step::Read);
        may(program.outage && back == Return::Idle, Step::Part);
        may(back == Return::Apart && !program.lost, Step::Attempt);
        if let Return::Asked { attempt, .. } = back {
            let answered = !self.received(attempt, 0).is_empty() || self.ended(attempt, 0);
            may(answered, Step::Welcomed);
            may(*faults > 0, Step::GiveUp);
        }
        may(matches!(back, Return::Reading { .. }), Step::SendRest);
        let line = threads.line.attempt;
        let arrived = !self.received(line, 1).is_empty() || self.ended(line, 1);
        may(!threads.ended && arrived, Step::WorkerReads);
        may(!threads.ended && threads.buf.len() >= HEADER, Step::WorkerTakes);
        may(threads.ended, Step::WorkerLooks);
        may(threads.says().is_some(), Step::WorkerSays);
        for attempt in 2..=net.connections.len() as u32 {
            may(threads.newest < attempt && self.received(attempt, 1).len() >= HEADER, Step::Fence(attempt));
        }
        for (attempt, ..) in &threads.fenced {
            may(true, Step::CarryOn(*attempt));
        }
        for (number, connection) in net.connections.iter().enumerate() {
            for end in [0, 1] {
                let learns = connection.cut && !connection.ended[end];
                may(learns, Step::Notice { connection: number, end });
            }
            if *faults > 0 && !connection.cut {
                use Loss::{All, Nothing, Part};
                for losses in [[Nothing; 2], [Part; 2], [All, Nothing]] {
                    may(true, Step::Cut { connection: number, losses });
                }
            }
        }
        steps
    }

    fn take(&mut self, step: Step) -> Result<(), String> {
        NET.set(std::mem::take(&mut self.net));
        let Self { program, worker, threads, .. } = self;
        let mut result = Ok(());
        match step {
            Step::Post => program.post(),
            Step::Read => result = program.read(),
            Step::Part => {
                program.incoming.interrupt();
                program.outgoing.line = None;
                program.back = Return::Apart;
            }
            Step::Attempt => {
                NET.with_borrow_mut(|net| net.connections.push(Default::default()));
                let attempt = NET.with_borrow(|net| net.connections.len() as u32);
                let counts @ Counts { received, first, next } = program.counts();
                let _ = line(attempt, 0).transport.send(&frame(op::RESUME, |w| counts.write(w)));
                program.back = Return::Asked { attempt, received, first, next };
            }
            Step::Welcomed => {
                if let Return::Asked { attempt, received, first, next } = program.back {
                    result = program.welcomed(attempt, Counts { received, first, next });
                }
            }
            Step::SendRest => {
                if let Return::Reading { attempt, received } = program.back {
                    program.back = Return::Idle;
                    if program.outgoing.resume(line(attempt, 0), received).is_err() {
                        program.broke(attempt);
                    }
                }
            }
            Step::WorkerReads => {
                let mut bytes = [0; 1024];
                match threads.line.transport.recv(&mut bytes, Wait::No) {
                    Ok(n) if n > 0 => threads.buf.extend_from_slice(&bytes[..n]),
                    _ => threads.ended = true,
                }
            }
            Step::WorkerTakes => result = threads.take(worker),
            Step::WorkerSays => threads.say(worker),
            Step::CarryOn(attempt) => threads.carry_on(worker, attempt),
            Step::WorkerLooks => result = threads.look(worker),
            Step::Fence(attempt) => result = threads.fence(worker, attempt),
            Step::Notice { connection, end } => {
                NET.with_borrow_mut(|net| net.end(connection, end));
            }
            Step::Cut { connection, losses } => {
                NET.with_borrow_mut(|net| net.cut(connection, losses));
            }
            Step::GiveUp => {
                if let Return::Asked { attempt, .. } = program.back {
                    line(attempt, 0).transport.shutdown();
                }
                program.back = Return::Apart;
            }
        }
        self.faults -= u8::from(Self::is_fault(step));
        self.net = NET.take();
        result
    }

    fn is_fault(step: Step) -> bool {
        matches!(step, Step::Cut { .. } | Step::GiveUp)
    }

    fn is_done(&self) -> bool {
        let Self { program, threads, .. } = self;
        let up = !program.outage && program.back == Return::Idle;
        up && threads.executed == LAST && program.received as usize == SAID.len()
    }
}

#[test]
fn nothing_is_lost_or_done_twice_and_the_work_ends_in_every_order_of_steps() {
    let searched = search(Log::new()).unwrap_or_else(|broken| panic!("{broken}"));
    println!("{searched:?}");
    assert!(searched.states > 10_000 && searched.done > 100, "{searched:?}");
}
