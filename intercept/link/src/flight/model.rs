//! A model of a bulk lane's resume: [`Flight`], [`Fence`] and the chunks' headers over a network in
//! memory, in every order of the steps of `lanes` and of the worker's `lanes`.

use std::hash::{Hash, Hasher};

use gpusession_proto::frame::{Reader, Writer};

use super::*;
use crate::link::lanes::{chunk_header, chunk_len};
use crate::log::frame_len;
use crate::resume::{Fence, ack, frame};
use crate::search::{Connection, Loss, Model, Net, search};

/// Faults of one run, at most.
const FAULTS: u8 = 2;
const CHUNKS: u64 = 2;
const PROGRAM: usize = 0;
const WORKER: usize = 1;

/// One direction of bulk data.
#[derive(Clone, Hash)]
struct Lane {
    net: Net,
    faults: u8,
    /// The end that sends chunks.
    sender: usize,
    flight: Flight<u64>,
    /// Chunks that the sender has begun with, and those that it has forgotten.
    pushed: u64,
    released: u64,
    /// Chunks that the receiver has counted.
    received: u64,
    program: Program,
    place: Place,
    /// Attempts whose wish the worker has read.
    heard: Vec<u32>,
    /// Threads of the worker, by attempt.
    threads: Vec<(u32, Thread)>,
}

#[derive(Clone, Hash)]
struct Program {
    attempt: u32,
    use_: Use,
    asked: Option<[u64; 3]>,
}

/// Use of one connection, by one or two threads of an end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Use {
    /// A chunk that is being written, or that has come and is not counted.
    busy: Option<u64>,
    /// An acknowledgement that is due.
    owes: bool,
    /// Threads that have ended: the one that sends or receives chunks, and the one that listens.
    ended: [bool; 2],
}

const FRESH: Use = Use { busy: None, owes: false, ended: [false; 2] };

/// The worker's `lanes::Place`.
#[derive(Clone, Hash)]
struct Place {
    fence: Fence,
    ended: bool,
    serving: Option<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Thread {
    Welcoming { mine: [u64; 3], theirs: u64 },
    Restarting { theirs: u64 },
    Entering,
    Serving(Use),
}

#[derive(Debug, Clone, Copy)]
enum Step {
    /// Begins, writes, counts or acknowledges a chunk.
    Carry {
        end: usize,
        attempt: u32,
    },
    /// Takes an acknowledgement.
    Listen {
        end: usize,
        attempt: u32,
    },
    Attempt,
    Welcomed,
    Fence(u32),
    Advance(u32),
    Notice {
        connection: usize,
        end: usize,
    },
    Cut {
        connection: usize,
        losses: [Loss; 2],
    },
    GiveUp,
}

fn counts([received, first, next]: [u64; 3]) -> Counts {
    Counts { received, first, next }
}

impl Lane {
    fn new(sender: usize) -> Self {
        Self {
            net: Net { connections: vec![Connection::default()] },
            faults: FAULTS,
            sender,
            flight: Flight::default(),
            pushed: 0,
            released: 0,
            received: 0,
            program: Program { attempt: 1, use_: FRESH, asked: None },
            place: Place { fence: Fence::new(1), ended: false, serving: Some(1) },
            heard: vec![1],
            threads: vec![(1, Thread::Serving(FRESH))],
        }
    }

    fn connection(&mut self, attempt: u32) -> &mut Connection {
        &mut self.net.connections[attempt as usize - 1]
    }

    fn serves(&self, end: usize, attempt: u32) -> bool {
        end == PROGRAM || self.place.fence.admits(attempt) && !self.place.ended
    }

    /// Returns `false` if the sender knows that the connection has ended.
    fn send(&mut self, end: usize, attempt: u32, bytes: &[u8]) -> bool {
        let connection = self.connection(attempt);
        if !connection.ended[end] && !connection.cut {
            connection.bytes[1 - end].extend_from_slice(bytes);
        }
        !connection.ended[end]
    }

    /// Takes a whole frame; `Err`: none will come any more.
    fn receive(&mut self, end: usize, attempt: u32) -> Result<Option<Vec<u8>>, ()> {
        let connection = self.connection(attempt);
        let bytes = &mut connection.bytes[end];
        if bytes.len() >= HEADER && frame_len(bytes) <= bytes.len() {
            let len = frame_len(bytes);
            return Ok(Some(bytes.drain(..len).collect()));
        }
        if connection.ended[end] { Err(()) } else { Ok(None) }
    }

    fn position(&self, end: usize) -> Counts {
        match end == self.sender {
            true => self.flight.counts(),
            false if end == PROGRAM => Counts { received: self.received, first: 1, next: 1 },
            false => Counts { received: self.received, ..Flight::<u64>::default().counts() },
        }
    }

    fn settle(&mut self) -> Result<(), String> {
        while let Some(chunk) = self.flight.arrived() {
            self.released += 1;
            if chunk != self.released || chunk > self.received {
                return Err(format!("chunk {chunk} is forgotten, {} have arrived", self.received));
            }
        }
        Ok(())
    }

    /// The thread that sends or receives chunks.
    fn carry(&mut self, end: usize, attempt: u32, mut own: Use) -> Result<Use, String> {
        if end == self.sender {
            if let Some(number) = own.busy.take() {
                let mut bytes =
                    zerocopy::IntoBytes::as_bytes(&chunk_header(number, number, 0, 8, 0)).to_vec();
                bytes.extend_from_slice(&number.to_le_bytes());
                own.ended[0] = !self.send(end, attempt, &bytes);
                self.flight.written();
                self.settle()?;
            } else if !self.serves(end, attempt) || end == PROGRAM && own.ended[1] {
                own.ended[0] = true;
            } else {
                if self.flight.is_carried() && self.pushed < CHUNKS {
                    self.pushed += 1;
                    self.flight.push(self.pushed);
                }
                own.busy = self.flight.begin().map(|(number, _)| number);
            }
            if own.ended[0] {
                self.net.end(attempt as usize - 1, end);
            }
            return Ok(own);
        }
        if std::mem::take(&mut own.owes) {
            own.ended[0] = !self.send(end, attempt, &ack(self.received));
        } else if let Some(number) = own.busy.take() {
            if self.serves(end, attempt) {
                self.received = number;
                own.owes = true;
            } else {
                own.ended[0] = true;
            }
        } else {
            match self.receive(end, attempt) {
                Ok(Some(bytes)) => {
                    let header = Header::parse(bytes.first_chunk().unwrap()).unwrap();
                    chunk_len(&header, self.received + 1).map_err(|e| e.to_string())?;
                    if header.seq.get() != self.received + 1 {
                        return Err(format!("chunk {} comes after {}", header.seq, self.received));
                    }
                    own.busy = Some(self.received + 1);
                }
                Ok(None) => {}
                Err(()) => own.ended[0] = true,
            }
        }
        own.ended[1] |= own.ended[0];
        Ok(own)
    }

    /// The sender's thread that listens to acknowledgements.
    fn listen(&mut self, end: usize, attempt: u32, mut own: Use) -> Result<Use, String> {
        match self.receive(end, attempt) {
            Ok(Some(bytes)) => {
                let header = Header::parse(bytes.first_chunk().unwrap()).unwrap();
                if self.serves(end, attempt) {
                    self.flight.acknowledge(header.ack.get()).map_err(|e| e.to_string())?;
                    self.settle()?;
                } else {
                    own.ended[1] = true;
                }
            }
            Ok(None) => {}
            Err(()) => own.ended[1] = true,
        }
        if own.ended[1] && end == WORKER {
            self.place.ended |= self.place.fence.admits(attempt);
        }
        Ok(own)
    }

    /// Uses a connection at one of its ends.
    fn work(
        &mut self,
        end: usize,
        attempt: u32,
        work: fn(&mut Self, usize, u32, Use) -> Result<Use, String>,
    ) -> Result<(), String> {
        if end == PROGRAM {
            self.program.use_ = work(self, end, attempt, self.program.use_)?;
            return Ok(());
        }
        let at = self.threads.iter().position(|thread| thread.0 == attempt).unwrap();
        if let Thread::Serving(own) = self.threads[at].1 {
            self.threads[at].1 = Thread::Serving(work(self, end, attempt, own)?);
        }
        Ok(())
    }

    fn fence(&mut self, attempt: u32) -> Result<(), String> {
        let Ok(Some(resume)) = self.receive(WORKER, attempt) else { return Ok(()) };
        self.heard.push(attempt);
        self.heard.sort_unstable();
        let theirs = Counts::read(&mut Reader::new(&resume[HEADER..])).unwrap();
        let mine = self.position(WORKER);
        let earlier = (1..attempt).rev().find(|earlier| self.place.fence.admits(*earlier));
        match self.place.fence.pass(attempt, &mine, &theirs) {
            Ok(()) => {
                self.place.ended = false;
                if let Some(earlier) = earlier {
                    self.net.end(earlier as usize - 1, WORKER);
                }
                let mine = [mine.received, mine.first, mine.next];
                let welcoming = Thread::Welcoming { mine, theirs: theirs.received };
                self.threads.push((attempt, welcoming));
            }
            Err(reason) if reason.contains("later") => self.net.end(attempt as usize - 1, WORKER),
            Err(_) => return Err(format!("the worker at {mine:?} refuses {theirs:?}")),
        }
        Ok(())
    }

    /// Next step of a worker's thread that does not serve yet, or serves no more.
    fn advance(&mut self, attempt: u32) -> Result<(), String> {
        let at = self.threads.iter().position(|thread| thread.0 == attempt).unwrap();
        match self.threads[at].1 {
            Thread::Welcoming { mine, theirs } => {
                if self.send(WORKER, attempt, &frame(op::WELCOME, |w: &mut Writer<'_>| counts(mine).write(w)))
                {
                    self.threads[at].1 = Thread::Restarting { theirs };
                } else {
                    self.threads.remove(at);
                }
            }
            Thread::Restarting { theirs } => {
                if self.sender == WORKER && self.serves(WORKER, attempt) {
                    self.flight.restart(theirs);
                    self.settle()?;
                }
                self.threads[at].1 = Thread::Entering;
            }
            Thread::Entering if self.serves(WORKER, attempt) => {
                self.place.serving = Some(attempt);
                self.threads[at].1 = Thread::Serving(FRESH);
            }
            Thread::Entering | Thread::Serving(_) => {
                if self.place.serving == Some(attempt) {
                    self.place.serving = None;
                    self.place.ended |= self.place.fence.admits(attempt);
                }
                self.net.end(attempt as usize - 1, WORKER);
                self.threads.remove(at);
            }
        }
        Ok(())
    }

    fn welcomed(&mut self) -> Result<(), String> {
        let attempt = self.net.connections.len() as u32;
        let Some(mine) = self.program.asked.take().map(counts) else { return Ok(()) };
        let Ok(Some(welcome)) = self.receive(PROGRAM, attempt) else { return Ok(()) };
        let theirs = Counts::read(&mut Reader::new(&welcome[HEADER..])).unwrap();
        if !mine.fits(theirs.received) || !theirs.fits(mine.received) {
            return Err(format!("{mine:?} of the program does not fit {theirs:?}"));
        }
        if self.sender == PROGRAM {
            self.flight.restart(theirs.received);
            self.settle()?;
        }
        self.program = Program { attempt, use_: FRESH, asked: None };
        Ok(())
    }
}

impl Model for Lane {
    type Step = Step;

    fn copy(&self) -> Self {
        self.clone()
    }

    fn hash(&self, hasher: &mut impl Hasher) {
        Hash::hash(self, hasher);
    }

    fn steps(&self) -> Vec<Step> {
        let mut steps = Vec::new();
        let mut may = |possible: bool, step| {
            if possible {
                steps.push(step);
            }
        };
        let Program { attempt, use_, asked } = self.program;
        let mut uses = |end, attempt, own: Use| {
            may(!own.ended[0], Step::Carry { end, attempt });
            may(self.sender == end && !own.ended[1], Step::Listen { end, attempt });
        };
        if asked.is_none() {
            uses(PROGRAM, attempt, use_);
        }
        for (attempt, thread) in &self.threads {
            if let Thread::Serving(own) = thread {
                uses(WORKER, *attempt, *own);
            }
        }
        for (attempt, thread) in &self.threads {
            let free = self.place.serving.is_none();
            let possible = match thread {
                Thread::Welcoming { .. } => true,
                Thread::Restarting { .. } | Thread::Entering => free,
                Thread::Serving(own) => own.ended == [true; 2],
            };
            may(possible, Step::Advance(*attempt));
        }
        let last = self.net.connections.len() as u32;
        if asked.is_some() {
            let Connection { bytes, ended, .. } = &self.net.connections[last as usize - 1];
            may(!bytes[PROGRAM].is_empty() || ended[PROGRAM], Step::Welcomed);
            may(self.faults > 0, Step::GiveUp);
        } else {
            may(use_.ended == [true; 2], Step::Attempt);
        }
        for attempt in 2..=last {
            let asks = self.net.connections[attempt as usize - 1].bytes[WORKER].len() >= HEADER;
            may(asks && !self.heard.contains(&attempt), Step::Fence(attempt));
        }
        for (number, connection) in self.net.connections.iter().enumerate() {
            for end in [PROGRAM, WORKER] {
                let learns = connection.cut && !connection.ended[end];
                may(learns, Step::Notice { connection: number, end });
            }
            if self.faults > 0 && !connection.cut {
                use Loss::{All, Nothing, Part};
                for losses in [[Nothing; 2], [Part; 2], [All; 2], [Nothing, All], [All, Nothing]] {
                    may(true, Step::Cut { connection: number, losses });
                }
            }
        }
        steps
    }

    fn take(&mut self, step: Step) -> Result<(), String> {
        self.faults -= u8::from(Self::is_fault(step));
        match step {
            Step::Carry { end, attempt } => self.work(end, attempt, Self::carry)?,
            Step::Listen { end, attempt } => self.work(end, attempt, Self::listen)?,
            Step::Attempt => {
                let mine = self.position(PROGRAM);
                self.net.connections.push(Connection::default());
                let attempt = self.net.connections.len() as u32;
                self.send(PROGRAM, attempt, &frame(op::RESUME, |w| mine.write(w)));
                self.program.asked = Some([mine.received, mine.first, mine.next]);
            }
            Step::Welcomed => {
                self.welcomed()?;
                if self.program.attempt as usize != self.net.connections.len() {
                    self.net.end(self.net.connections.len() - 1, PROGRAM);
                }
            }
            Step::GiveUp => {
                self.net.end(self.net.connections.len() - 1, PROGRAM);
                self.program.asked = None;
            }
            Step::Fence(attempt) => self.fence(attempt)?,
            Step::Advance(attempt) => self.advance(attempt)?,
            Step::Notice { connection, end } => self.net.end(connection, end),
            Step::Cut { connection, losses } => self.net.cut(connection, losses),
        }
        Ok(())
    }

    fn is_fault(step: Step) -> bool {
        matches!(step, Step::Cut { .. } | Step::GiveUp)
    }

    fn is_done(&self) -> bool {
        self.received == CHUNKS && self.released == CHUNKS
    }
}

#[test]
fn chunks_arrive_once_and_are_kept_until_then_in_every_order_of_steps() {
    for sender in [PROGRAM, WORKER] {
        let searched = search(Lane::new(sender)).unwrap_or_else(|broken| panic!("{broken}"));
        assert!(searched.states > 10_000 && searched.done > 100, "{searched:?}");
    }
}
