//! The endpoint of `gpusession netperf`: serves the measurements of one client.
//!
//! `--measure` takes a worker's restrictions and loads no driver. Connections, frames and lanes are
//! those of a worker, with its reader and its executors, so a measurement goes the way of a
//! program's calls and copies. Bytes for "the device" are dropped; those from it are a pattern.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::process::ExitCode;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use gpusession_link::flight::{Ended, acknowledgements, next_header};
use gpusession_link::lanes::{chunk_header, chunk_len};
use gpusession_link::load::usage;
use gpusession_link::resume::ack;
use gpusession_link::transport::{Transport, Wait};
use gpusession_link::worker_end::WorkerEnd;
use gpusession_proto::frame::{
    BadFrame, CHUNK, DOWN_LANES, FIRST_DOWN_LANE, FIRST_UP_LANE, Header, Reader, UP_LANES, chunk_of, op,
};
use gpusession_proto::measure::Request;
use gpusession_proto::supervise::{FromWorker, Isolation, Start, ToWorker};
use gpusession_proto::ticket::Ticket;
use rustls::ServerConfig;
use zerocopy::IntoBytes as _;

use crate::activity::Activity;
use crate::answer::Answer;
use crate::containment::{self, Calls};
use crate::execute::{Perform, Replay};
use crate::executor::Executor;
use crate::frame::Frame;
use crate::handles::{Table, kind};
use crate::lanes::{DOWN_SLOTS, RESERVED, UP_SLOTS};
use crate::objects::Stream;
use crate::replies::Replies;
use crate::serve::{accept, greeting, identity, proves, refuse, secret};
use crate::supervise::Supervisor;

/// Priority of the process: below programs, whose workers keep 0.
const NICE: libc::c_int = 10;
/// Time without a connection after which the endpoint exits.
const IDLE_TIMEOUT: Duration = Duration::from_secs(3);
/// Most connections at a time: those of one session, and of the one before that still ends.
const MAX_CONNECTIONS: usize = 40;
/// Most transfers whose bytes have arrived without their frame.
const MAX_TRANSFERS: usize = 64;
/// Most memory that transfers to the client come from: more than a processor caches.
const MAX_SOURCE: u64 = 1 << 30;
/// Part of the host's memory that it takes at most.
const SOURCE_PART: u64 = 32;
/// Most pieces that wait for a lane to the client.
const MAX_PIECES: usize = 256;

/// Serves the supervisor until it closes the socket, or the client leaves.
pub fn run() -> ExitCode {
    let supervisor = match Supervisor::inherited() {
        Ok(supervisor) => Arc::new(supervisor),
        Err(e) => {
            eprintln!("gpuserver-worker: no supervision socket: {e}; only gpuserver starts endpoints");
            return ExitCode::from(1);
        }
    };
    let endpoint = match prepare(&supervisor) {
        Ok(endpoint) => Arc::new(endpoint),
        Err(reason) => {
            supervisor.report(&FromWorker::Failed { reason });
            return ExitCode::from(3);
        }
    };
    let watched = endpoint.clone();
    let watch = move || watched.leave_when_idle();
    if std::thread::Builder::new().name("idle".into()).spawn(watch).is_err() {
        return ExitCode::from(3);
    }
    loop {
        match supervisor.receive() {
            Ok(Some((ToWorker::Adopt { number, preface, .. }, Some(socket)))) => {
                let endpoint = endpoint.clone();
                let serve = move || {
                    if let Err(e) = endpoint.adopt(&preface, socket) {
                        endpoint.supervisor.report(&FromWorker::Refused { number, reason: e.to_string() });
                    }
                };
                // Without a thread, the connection closes.
                let _ = std::thread::Builder::new().name("connection".into()).spawn(serve);
            }
            Ok(Some((ToWorker::Stop { reason }, _))) => endpoint.end(&reason),
            Ok(Some(_)) => {}
            Ok(None) | Err(_) => return ExitCode::SUCCESS,
        }
    }
}

fn prepare(supervisor: &Arc<Supervisor>) -> Result<Endpoint, String> {
    let start = match supervisor.receive() {
        Ok(Some((ToWorker::Start(start), _))) => start,
        Ok(_) => return Err("supervision socket: the first message was not Start".into()),
        Err(e) => return Err(format!("supervision socket: {e}")),
    };
    if start.isolation != Isolation::Off {
        let landlock = containment::landlock();
        let mut lacking = containment::before_driver(&(&start).into(), landlock);
        lacking.extend(containment::before_client(Calls::Own, landlock).err());
        if start.isolation == Isolation::Require && !lacking.is_empty() {
            return Err(format!("isolation = \"require\": not possible: {}", lacking.join("; ")));
        }
        supervisor.report(&FromWorker::Contained { lacking });
    }
    let (tls, fingerprint) = identity().map_err(|e| format!("cannot create a certificate: {e}"))?;
    let host = nix::sys::sysinfo::sysinfo().map_or(0, |info| info.ram_total());
    let chunks = (host / SOURCE_PART).min(MAX_SOURCE) as usize / CHUNK;
    let memory = Arc::new(vec![0x5a; chunks.max(DOWN_SLOTS) * CHUNK]);
    // Only now: on a busy host the start itself would take too long.
    // SAFETY: takes plain numbers, and changes this process only.
    if unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, NICE) } != 0 {
        return Err(format!("cannot lower the priority: {}", io::Error::last_os_error()));
    }
    supervisor.report(&FromWorker::Ready { fingerprint, cuda_version: 0, parks: false });
    Ok(Endpoint {
        supervisor: supervisor.clone(),
        start,
        tls,
        memory,
        present: Mutex::default(),
        changed: Condvar::new(),
    })
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Endpoint {
    supervisor: Arc<Supervisor>,
    start: Start,
    tls: Arc<ServerConfig>,
    /// Bytes of transfers to the client; the kernel zeroes no page of them while a clock runs.
    memory: Arc<Vec<u8>>,
    present: Mutex<Present>,
    /// The number of connections has changed.
    changed: Condvar,
}

#[derive(Default)]
struct Present {
    connections: usize,
    session: Option<Arc<Session>>,
}

/// A counted connection; dropping it subtracts it.
struct Counted<'a>(&'a Endpoint);

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        lock(&self.0.present).connections -= 1;
        self.0.changed.notify_all();
    }
}

impl Endpoint {
    fn count(&self) -> io::Result<Counted<'_>> {
        let mut present = lock(&self.present);
        if present.connections == MAX_CONNECTIONS {
            return Err(io::Error::other("too many connections"));
        }
        present.connections += 1;
        self.changed.notify_all();
        Ok(Counted(self))
    }

    /// Exits when no connection has existed for a time.
    fn leave_when_idle(&self) {
        let mut present = lock(&self.present);
        loop {
            let timed = self.changed.wait_timeout_while(present, IDLE_TIMEOUT, |p| p.connections == 0);
            let (now, idle) = timed.unwrap_or_else(PoisonError::into_inner);
            if idle.timed_out() {
                self.end("the client has left");
            }
            let served = self.changed.wait_while(now, |p| p.connections > 0);
            present = served.unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn end(&self, reason: &str) -> ! {
        end(&self.supervisor, reason)
    }

    fn adopt(&self, preface: &[u8], socket: OwnedFd) -> io::Result<()> {
        let _counted = self.count()?;
        let (preface, transport, control) = accept(&self.start, &self.tls, preface, socket)?;
        if preface.resumes() {
            return Err(refuse(&transport, "a measurement does not resume".into()));
        }
        let (header, body) = greeting(&transport)?;
        control.set_read_timeout(None)?;
        match (header.op.get(), preface.lane.get()) {
            (op::HELLO, 0) => self.hello(preface.attempt.get(), transport, &header, &body),
            (op::LANE, lane) if lane != 0 => {
                let session = lock(&self.present).session.clone();
                match session {
                    Some(session) if proves(&body, &session.secret, lane) => session.lane(lane, transport),
                    _ => Err(refuse(&transport, "lane without the secret of the first one".into())),
                }
            }
            _ => Err(io::Error::other("unexpected first frame")),
        }
    }

    /// Serves the log of a new session, which takes the place of an earlier one.
    fn hello(&self, attempt: u32, transport: Transport, header: &Header, body: &[u8]) -> io::Result<()> {
        let sealed = Reader::new(body).bytes().map_err(io::Error::other)?;
        let key = self.start.ticket_key.as_ref().ok_or_else(|| io::Error::other("no key for tickets"))?;
        if let Err(e) = Ticket::open(sealed, key, &self.start.worker) {
            return Err(refuse(&transport, e.to_string()));
        }
        let secret = secret()?;
        // A client that has left does not come back: the endpoint waits for none.
        let (end, line) = WorkerEnd::new(self.start.worker, &secret, Duration::ZERO, transport, attempt);
        let session = Arc::new(Session {
            replay: Replay::new(),
            supervisor: self.supervisor.clone(),
            replies: Replies::new(end),
            activity: Activity::default(),
            streams: Table::new(kind::STREAM),
            secret,
            acknowledges: self.start.resume_grace_s > 0,
            slots: Slots::new(self.memory.clone()),
            state: Mutex::default(),
            arrival: Condvar::new(),
            pieces: Condvar::new(),
        });
        session.state().open.push(line.transport.clone());
        if let Some(earlier) = lock(&self.present).session.replace(session.clone()) {
            earlier.close();
        }
        session.replies.send_with(op::REPLY, header.seq.get(), 0, |w| {
            w.bytes(&session.secret);
            w.word(self.start.resume_grace_s.into());
        });
        let done = session.replay.run(&session, line);
        session.close();
        done
    }
}

fn end(supervisor: &Supervisor, reason: &str) -> ! {
    supervisor.report(&FromWorker::Ended { reason: reason.into(), quiet: true });
    std::process::exit(0)
}

/// One series of measurements, with one number of lanes.
struct Session {
    replay: Replay,
    supervisor: Arc<Supervisor>,
    replies: Replies,
    activity: Activity,
    streams: Table<Stream>,
    /// Proof of the session's lanes.
    secret: [u8; 32],
    /// Whether both ends acknowledge chunks, as where programs' connections come back.
    acknowledges: bool,
    slots: Slots,
    state: Mutex<State>,
    /// Bytes have arrived, or the session is closed.
    arrival: Condvar,
    /// A piece has come or gone, or the session is closed.
    pieces: Condvar,
}

#[derive(Default)]
struct State {
    closed: bool,
    /// Streams of the session's connections.
    open: Vec<Arc<Transport>>,
    /// Lanes that a connection has claimed, as bits.
    lanes: u32,
    /// Bytes that have arrived, by transfer.
    arrived: HashMap<u64, u64>,
    /// Pieces that no lane has taken, oldest first.
    queue: VecDeque<Piece>,
}

/// Slots with bytes for the client, as many as lanes of a worker share at first.
///
/// As there, a slot serves any lane, and is free again once the client has its chunk. A device
/// writes a worker's slots, so that processors read them from memory. Here each chunk comes from
/// other memory than the chunks before it, which no cache holds any more.
struct Slots {
    memory: Arc<Vec<u8>>,
    /// Free slots, and the number of chunks so far; `None` once the session is closed.
    free: Mutex<Option<(usize, usize)>>,
    changed: Condvar,
}

impl Slots {
    fn new(memory: Arc<Vec<u8>>) -> Self {
        let free = Mutex::new(Some((DOWN_SLOTS - RESERVED, 0)));
        Self { memory, free, changed: Condvar::new() }
    }

    /// Takes a slot; returns the bytes of the next chunk, or `None` once the session is closed.
    fn take(&self) -> Option<&[u8]> {
        let none = |free: &mut Option<(usize, usize)>| free.is_some_and(|(slots, _)| slots == 0);
        let mut waited =
            self.changed.wait_while(lock(&self.free), none).unwrap_or_else(PoisonError::into_inner);
        let (slots, chunks) = waited.as_mut()?;
        *slots -= 1;
        let memory = self.memory.chunks_exact(CHUNK).nth(*chunks % (self.memory.len() / CHUNK));
        *chunks += 1;
        memory
    }

    fn give(&self) {
        if let Some((slots, _)) = lock(&self.free).as_mut() {
            *slots += 1;
        }
        self.changed.notify_one();
    }

    fn close(&self) {
        *lock(&self.free) = None;
        self.changed.notify_all();
    }
}

/// Part of a transfer to the client.
struct Piece {
    transfer: u64,
    offset: u64,
    len: usize,
}

impl Session {
    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Closes all connections, so that each thread of the session returns.
    fn close(&self) {
        let mut state = self.state();
        state.closed = true;
        state.open.drain(..).for_each(|transport| transport.shutdown());
        drop(state);
        self.slots.close();
        self.arrival.notify_all();
        self.pieces.notify_all();
    }

    fn lane(&self, lane: u16, transport: Transport) -> io::Result<()> {
        let transport = Arc::new(transport);
        {
            let mut state = self.state();
            let known = (FIRST_UP_LANE..FIRST_DOWN_LANE + DOWN_LANES).contains(&lane);
            if !known || state.lanes & 1 << lane != 0 || state.closed {
                return Err(refuse(&transport, format!("lane {lane} does not exist or is open already")));
            }
            state.lanes |= 1 << lane;
            state.open.push(transport.clone());
        }
        let served = match lane < FIRST_UP_LANE + UP_LANES {
            true => self.take(&transport),
            false => self.give(&transport),
        };
        let ended = match served {
            Err(Ended::Fatal(reason)) => Err(refuse(&transport, reason)),
            // The log's end tells whether that was expected.
            Ok(()) | Err(Ended::Broken(_)) => Ok(()),
        };
        transport.shutdown();
        ended
    }

    /// Receives chunks until the connection ends, and counts their bytes.
    fn take(&self, transport: &Transport) -> Result<(), Ended> {
        // The kernel zeroes no page while the clock runs.
        let mut buffers = vec![vec![0x5a; CHUNK]; UP_SLOTS];
        for number in 1.. {
            let header = next_header(transport)?;
            let len = chunk_len(&header, number)?;
            let buffer = &mut buffers[number as usize % UP_SLOTS][..header.body_len()];
            transport.recv_exact(buffer, Wait::Spin(Duration::ZERO))?;
            let mut state = self.state();
            let transfer = header.seq.get();
            if state.arrived.len() == MAX_TRANSFERS && !state.arrived.contains_key(&transfer) {
                return Err(BadFrame("too many transfers without their frames").into());
            }
            *state.arrived.entry(transfer).or_default() += len as u64;
            drop(state);
            self.arrival.notify_all();
            if self.acknowledges {
                transport.send(&ack(number))?;
            }
        }
        Ok(())
    }

    /// Sends pieces until the session is closed.
    fn give(&self, transport: &Transport) -> Result<(), Ended> {
        let under_way = Mutex::new(VecDeque::new());
        std::thread::scope(|scope| {
            if self.acknowledges {
                scope.spawn(|| acknowledgements(transport, |number, _| self.arrived(&under_way, number)));
            }
            let sent = self.send(transport, &under_way);
            // Ends the other thread.
            transport.shutdown();
            sent
        })
    }

    /// Frees the slots of chunks up to a number. `under_way`: numbers of chunks, oldest first.
    fn arrived(&self, under_way: &Mutex<VecDeque<u64>>, number: u64) -> Result<(), BadFrame> {
        let mut under_way = lock(under_way);
        if under_way.back().is_none_or(|newest| number > *newest) {
            return Err(BadFrame("acknowledges what was not sent"));
        }
        while under_way.front().is_some_and(|sent| *sent <= number) {
            under_way.pop_front();
            self.slots.give();
        }
        Ok(())
    }

    fn send(&self, transport: &Transport, under_way: &Mutex<VecDeque<u64>>) -> Result<(), Ended> {
        for number in 1.. {
            let Some(piece) = self.next_piece() else { break };
            let Some(memory) = self.slots.take() else { break };
            lock(under_way).push_back(number);
            let header = chunk_header(number, piece.transfer, piece.offset, piece.len, 0);
            let bytes = &memory[..piece.len.next_multiple_of(8)];
            transport.send_parts(&[header.as_bytes(), bytes])?;
            if !self.acknowledges {
                self.arrived(under_way, number)?;
            }
        }
        Ok(())
    }

    fn next_piece(&self) -> Option<Piece> {
        let mut state = self.state();
        loop {
            if state.closed {
                return None;
            }
            if let Some(piece) = state.queue.pop_front() {
                drop(state);
                self.pieces.notify_all();
                return Some(piece);
            }
            state = self.pieces.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Waits until a transfer's bytes have arrived; `false` if the session is closed before.
    fn arrives(&self, transfer: u64, bytes: u64) -> bool {
        let missing = |state: &mut State| {
            !state.closed && state.arrived.get(&transfer).is_none_or(|arrived| *arrived < bytes)
        };
        let waited = self.arrival.wait_while(self.state(), missing);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner);
        state.arrived.remove(&transfer);
        !state.closed
    }

    /// Queues a transfer to the client; waits while too much is queued.
    fn queue(&self, transfer: u64, bytes: u64) -> bool {
        let chunk = chunk_of(bytes as usize);
        for offset in (0..bytes).step_by(chunk) {
            let full = |state: &mut State| !state.closed && state.queue.len() >= MAX_PIECES;
            let waited = self.pieces.wait_while(self.state(), full);
            let mut state = waited.unwrap_or_else(PoisonError::into_inner);
            if state.closed {
                return false;
            }
            let len = chunk.min((bytes - offset) as usize);
            state.queue.push_back(Piece { transfer, offset, len });
        }
        self.pieces.notify_all();
        true
    }
}

impl Perform for Session {
    fn replay(&self) -> &Replay {
        &self.replay
    }

    fn supervisor(&self) -> &Supervisor {
        &self.supervisor
    }

    fn replies(&self) -> &Replies {
        &self.replies
    }

    fn activity(&self) -> &Activity {
        &self.activity
    }

    fn streams(&self) -> &Table<Stream> {
        &self.streams
    }

    fn query(&self, _executor: &mut Executor) -> bool {
        true
    }

    fn perform(self: &Arc<Self>, _executor: &mut Executor, frame: &Frame) {
        let request = match frame.header.op.get() {
            op::MEASURE => Request::read(&frame.body),
            _ => Err(BadFrame("not a measurement")),
        };
        let seq = frame.header.seq.get();
        let mut answer = Answer::default();
        let open = match request {
            Ok(Request::Echo) => {
                (0..3).for_each(|_| answer.word(0));
                true
            }
            Ok(Request::Take(bytes)) => self.arrives(seq, bytes),
            Ok(Request::Give(bytes)) => self.queue(seq, bytes),
            Ok(Request::Usage) => {
                self.replies.send_with(op::REPLY, seq, 0, |w| usage().write(w));
                return;
            }
            Err(bad) => self.end(&bad.to_string()),
        };
        if open {
            self.replies.reply(seq, 0, &answer);
        }
    }

    fn end(&self, reason: &str) -> ! {
        self.replies.send_end(reason);
        end(&self.supervisor, reason)
    }
}
