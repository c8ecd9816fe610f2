//! The ordered log of one process on one server.
//!
//! A post appends a frame to a buffer and returns; the sender thread writes the buffer. A call
//! appends a frame, writes the buffer itself and waits. One of the waiting threads is the reader,
//! which hands the others their replies.
//!
//! A connection that breaks may come back ([`comeback`]): meanwhile posts continue and waits wait.

use std::collections::HashMap;
use std::fmt;
use std::io::{self, Write as _};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use gpusession_proto::changes;
use gpusession_proto::frame::{BadFrame, DOWN_LANES, HEADER, Header, Reader, UP_LANES, WAIT, Writer, op};
use gpusession_proto::grant::{Endpoint, Outage, PROGRAM_THREAD};
use gpusession_proto::place::is_nearby;
use gpusession_proto::preface::{FLAG_TLS, LANES, Preface, Refusal};
use zerocopy::IntoBytes;

use self::comeback::Interruption;
use self::sending::Sending;
use crate::flight::Ended;
use crate::line::{Incoming, Line, Stop};
use crate::link::lanes::{Detached, DownTransfers, Lanes, Sent};
use crate::outbox::Outbox;
use crate::parts::Parts;
use crate::resume::{self, SessionKey};
use crate::spin::Spin;
use crate::threads;
use crate::transport::{Transport, Wait, Watch};
use crate::worker_end::ACKNOWLEDGED_EVERY;

mod comeback;
pub mod lanes;
mod sending;

/// Unsent bytes at which a post also writes the buffer, which bounds memory and slows the program.
const MAX_OUTBOX: usize = 4 << 20;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Timeout for the greeting: a worker replies at once, or when a program that ends has made room.
const GREETING_TIMEOUT: Duration = Duration::from_secs(60);
/// Longest time, in seconds, that the link believes a worker to wait for a lost program.
const MAX_GRACE: u64 = 3600;
/// Usual number of bytes of one read from the socket.
const READ_BYTES: usize = 256 << 10;

/// Call whose frame is sent.
#[derive(Debug, Clone, Copy)]
pub struct Begun {
    /// Position of its frame in the log.
    pub seq: u64,
    op: u16,
    at: Instant,
}

/// Waits of all threads for one operation.
#[derive(Debug, Default)]
struct Waits {
    count: AtomicU32,
    /// Microseconds from the frame to the end of the wait, summed.
    usec: AtomicU64,
}

/// Reason why the link is lost; every later call returns the same one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkLost(pub String);

impl fmt::Display for LinkLost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for LinkLost {}

/// Reply to a call.
#[derive(Debug)]
pub struct Reply {
    /// The `CUresult`.
    pub status: i32,
    body: Vec<u8>,
}

impl Reply {
    /// Returns a reader of the reply's values.
    pub fn reader(&self) -> Reader<'_> {
        Reader::new(&self.body)
    }
}

/// Receiver of the worker's unsolicited frames.
///
/// The thread that reads the connection calls it, so it must not wait for this link.
pub trait Events: Send + Sync {
    /// Takes output of device code (`printf`, `assert`).
    fn output(&self, stdout: &[u8], stderr: &[u8]);
    /// Takes the number of a host function that is due; the thread that has run it posts
    /// `HOST_FUNC_DONE`.
    fn call_host(&self, link: &Arc<Link>, id: u64, status: i32);
    /// Takes the device's changes of host memory that it can see.
    fn host_changed(&self, region: u64, offset: u64, bytes: &[u8]);
    /// Takes the next bytes of the GPU core dump that the program has asked for.
    ///
    /// Without bytes it ends, with an error if it is incomplete.
    fn core_dump(&self, _status: i32, _bytes: &[u8]) {}
    /// Takes the reason when the link is lost.
    fn lost(&self, reason: &str);
    /// Takes the reason when the connection breaks, and may come back.
    fn interrupted(&self, _reason: &str) {}
    /// Takes the length of the interruption when the connection has come back.
    fn resumed(&self, _after: Duration) {}
    /// Reports an interruption, about each second of it and at its end.
    ///
    /// Returns the reason if the worker is known not to wait any longer; the link is lost then.
    fn outage(&self, _outage: Outage) -> Option<String> {
        None
    }
}

#[derive(Default)]
struct Inbox {
    replies: HashMap<u64, Reply>,
    reader: bool,
    waiting: usize,
    /// Attempt of the present connection, or of the last one.
    attempt: u32,
    outage: Option<Interruption>,
    /// The latest outage, as long as nothing has arrived since.
    before: Option<Interruption>,
    /// Number of outages that are over, and the length of the last one.
    over: (u32, Duration),
}

/// The greeting's reply, as far as it describes the session.
struct Session {
    secret: [u8; 32],
    key: SessionKey,
    /// Time for which the worker waits for a lost program.
    grace: Duration,
}

/// A process's connection to its worker; see the module.
pub struct Link {
    me: Weak<Self>,
    /// The server's name, for messages.
    pub server: String,
    endpoint: Endpoint,
    /// Address of the last connection.
    address: Mutex<SocketAddr>,
    /// Number of each lane's next connection attempt.
    attempts: [AtomicU32; LANES as usize],
    encrypted: bool,
    /// The last connection, to end it while other threads hold its locks.
    present: Mutex<Arc<Transport>>,
    outbox: Outbox,
    sending: Mutex<Sending>,
    /// Number of the latest frame from the worker.
    received: AtomicU64,
    /// Number of the latest frame that the worker has acknowledged.
    acknowledged: AtomicU64,
    /// Whether a broken connection may come back.
    returns: AtomicBool,
    /// Whether an outage lasts, for the sender.
    broken: AtomicBool,
    inbox: Mutex<Inbox>,
    inbox_changed: Condvar,
    /// Replies of which the last frame has not come.
    parts: Mutex<Parts>,
    incoming: Mutex<Incoming<Transport>>,
    /// How long a thread that waits for a reply spins.
    pub spin: Spin,
    lost: OnceLock<LinkLost>,
    late_error: AtomicI32,
    /// Number and duration of waits, by operation.
    waits: [Waits; op::COUNT],
    events: Box<dyn Events>,
    session: OnceLock<Session>,
    lanes: OnceLock<Result<Lanes, LinkLost>>,
    /// Transfers from the device that have not ended.
    pub down: Arc<DownTransfers>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Thread and context in every frame's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Caller {
    /// Number of the thread within the process.
    pub thread: u32,
    /// Handle of its current context, 0 for none.
    pub ctx: u64,
}

impl Link {
    /// Returns the id of the worker.
    pub fn worker(&self) -> [u8; 16] {
        self.endpoint.worker
    }

    /// Connects to a worker and sends the greeting; returns the link and the greeting's reply.
    ///
    /// `hello` adds the upper layer's part of the greeting.
    pub fn open(
        endpoint: &Endpoint,
        events: Box<dyn Events>,
        hello: impl FnOnce(&mut Writer<'_>),
    ) -> Result<(Arc<Self>, Reply), LinkLost> {
        let attempts: [AtomicU32; LANES as usize] = std::array::from_fn(|_| AtomicU32::new(1));
        let (transport, address, attempt) =
            connect(endpoint, 0, 0, &attempts[0], CONNECT_TIMEOUT, &Watch::PATIENT)?;
        let transport = Arc::new(transport);
        let line = Line { transport: transport.clone(), attempt };
        let link = Arc::new_cyclic(|me| Self {
            me: me.clone(),
            server: endpoint.server.clone(),
            endpoint: endpoint.clone(),
            address: Mutex::new(address),
            attempts,
            encrypted: transport.encrypted(),
            present: Mutex::new(transport),
            outbox: Outbox::new(READ_BYTES),
            sending: Mutex::new(Sending::new(line.clone())),
            received: AtomicU64::new(0),
            acknowledged: AtomicU64::new(0),
            returns: AtomicBool::new(false),
            broken: AtomicBool::new(false),
            inbox: Mutex::new(Inbox { attempt, ..Inbox::default() }),
            inbox_changed: Condvar::new(),
            parts: Mutex::default(),
            incoming: Mutex::new(Incoming::new(line)),
            spin: Spin::default(),
            lost: OnceLock::new(),
            late_error: AtomicI32::new(0),
            waits: std::array::from_fn(|_| Waits::default()),
            events,
            session: OnceLock::new(),
            lanes: OnceLock::new(),
            down: Arc::default(),
        });
        let reply = link.call(op::HELLO, Caller { thread: 0, ctx: 0 }, |w| {
            w.bytes(&endpoint.ticket);
            hello(w);
        })?;
        if reply.status == 0 {
            let mut r = reply.reader();
            let secret = r.bytes().ok().and_then(|b| <[u8; 32]>::try_from(b).ok());
            let (Some(secret), Ok(seconds)) = (secret, r.word()) else {
                return Err(LinkLost("the worker's greeting has no session secret".into()));
            };
            let grace = Duration::from_secs(seconds.min(MAX_GRACE));
            link.session.get_or_init(|| Session { secret, key: SessionKey::new(&secret), grace });
            link.begin_to_return(grace)?;
        }
        threads::spawn(PROGRAM_THREAD, {
            let link = link.clone();
            move || link.send_loop()
        })
        .map_err(|e| LinkLost(format!("cannot start the sender thread: {e}")))?;
        Ok((link, reply))
    }

    /// Returns `true` if the stream is encrypted.
    pub fn encrypted(&self) -> bool {
        self.encrypted
    }

    /// Appends a frame to the log and returns its position.
    ///
    /// Never waits for the worker, except that it helps to send a full buffer, or waits for the
    /// connection if the log is full.
    pub fn post(&self, op: u16, caller: Caller, body: impl FnOnce(&mut Writer<'_>)) -> Result<u64, LinkLost> {
        self.check()?;
        let posted = self.outbox.post(|buf, seq| self.write(buf, seq, op, 0, caller, body));
        if posted.waiting > MAX_OUTBOX {
            self.flush()?;
            self.wait_for_room()?;
        }
        if posted.asleep && !self.send_for_sleeper(posted.waiting)? {
            self.outbox.rouse();
        }
        Ok(posted.seq)
    }

    /// Appends a frame and waits for its reply.
    pub fn call(
        &self,
        op: u16,
        caller: Caller,
        body: impl FnOnce(&mut Writer<'_>),
    ) -> Result<Reply, LinkLost> {
        let begun = self.begin_call(op, caller, body)?;
        self.finish_call(begun)
    }

    /// First half of a call: at the return the frame is sent.
    pub fn begin_call(
        &self,
        op: u16,
        caller: Caller,
        body: impl FnOnce(&mut Writer<'_>),
    ) -> Result<Begun, LinkLost> {
        self.check()?;
        let at = Instant::now();
        let seq = self.outbox.append(|buf, seq| self.write(buf, seq, op, WAIT, caller, body));
        self.flush()?;
        Ok(Begun { seq, op, at })
    }

    /// Second half of a call: waits for the reply.
    pub fn finish_call(&self, begun: Begun) -> Result<Reply, LinkLost> {
        let reply = self.wait_reply(begun.seq);
        if let Some(waits) = self.waits.get(usize::from(begun.op)) {
            waits.count.fetch_add(1, Ordering::Relaxed);
            waits.usec.fetch_add(begun.at.elapsed().as_micros() as u64, Ordering::Relaxed);
        }
        reply
    }

    /// Second half of a call that is probably answered by now; counts as a wait only if it is not.
    pub fn finish_mark(&self, begun: Begun) -> Result<(), LinkLost> {
        self.check()?;
        let answered = || lock(&self.inbox).replies.remove(&begun.seq).is_some();
        if answered() {
            return Ok(());
        }
        self.poll()?;
        if answered() {
            return Ok(());
        }
        self.finish_call(Begun { at: Instant::now(), ..begun }).map(drop)
    }

    /// Returns number and duration of waits for the worker by operation, the longest first.
    pub fn waits(&self) -> Vec<(&'static str, u32, Duration)> {
        let mut waits: Vec<_> = (0..)
            .zip(&self.waits)
            .map(|(operation, waits)| {
                let usec = waits.usec.load(Ordering::Relaxed);
                (op::name(operation), waits.count.load(Ordering::Relaxed), Duration::from_micros(usec))
            })
            .filter(|(_, count, _)| *count > 0)
            .collect();
        waits.sort_by_key(|(_, _, time)| std::cmp::Reverse(*time));
        waits
    }

    /// Returns the position of the latest frame in the log.
    pub fn position(&self) -> u64 {
        self.outbox.position()
    }

    /// Returns and clears the late error, 0 if there is none.
    pub fn take_late_error(&self) -> i32 {
        if self.late_error.load(Ordering::Relaxed) == 0 {
            0
        } else {
            self.late_error.swap(0, Ordering::Relaxed)
        }
    }

    /// Returns the bulk lanes; the first call opens them.
    pub fn lanes(self: &Arc<Self>) -> Result<&Lanes, LinkLost> {
        self.lanes_of(UP_LANES.max(DOWN_LANES))
    }

    /// As [`Link::lanes`], but opens only the first `count` lanes of each direction.
    pub fn lanes_of(self: &Arc<Self>, count: u16) -> Result<&Lanes, LinkLost> {
        let lanes = self.lanes.get_or_init(|| {
            self.wait_out()?;
            Lanes::open(self, count).map_err(|e| self.lose(&e.0))
        });
        if let (Ok(lanes), Err(_)) = (lanes, self.check()) {
            lanes.shutdown();
        }
        lanes.as_ref().map_err(Clone::clone)
    }

    /// Opens a further connection to the same worker, which proves knowledge of the greeting's
    /// secret.
    pub(crate) fn open_lane(&self, lane: u16) -> Result<Transport, Ended> {
        let mut endpoint = self.endpoint.clone();
        endpoint.addresses = vec![lock(&self.address).to_string()];
        let attempts = self.attempts.get(usize::from(lane)).ok_or(BadFrame("no such lane"))?;
        let session = self.session.get().ok_or(BadFrame("a lane before the greeting"))?;
        let watch = if self.returns() { Watch::CLOSE } else { Watch::PATIENT };
        let connected = connect(&endpoint, lane, 0, attempts, CONNECT_TIMEOUT, &watch);
        let (transport, _, _) = connected.map_err(|e| match e.error.downcast() {
            Ok(Refusal { reason, .. }) => Ended::Fatal(format!("{}: {reason}", e.place)),
            Err(error) => Ended::Broken(io::Error::new(error.kind(), format!("{}: {error}", e.place))),
        })?;
        let mut buf = Vec::new();
        let caller = Caller { thread: 0, ctx: 0 };
        let mut w = Writer::new(&mut buf, &header(op::LANE, 0, caller, u64::from(lane), 0));
        w.bytes(blake3::keyed_hash(&session.secret, &lane.to_le_bytes()).as_bytes());
        w.finish();
        transport.send(&buf)?;
        Ok(transport)
    }

    /// Returns `true` if a broken connection may come back.
    pub(crate) fn returns(&self) -> bool {
        self.returns.load(Ordering::SeqCst)
    }

    fn write(
        &self,
        buf: &mut Vec<u8>,
        seq: u64,
        op: u16,
        flags: u16,
        caller: Caller,
        body: impl FnOnce(&mut Writer<'_>),
    ) {
        // A frame tells what had arrived when it was made: good enough, and without a lock.
        let received = self.received.load(Ordering::Relaxed);
        let mut w = Writer::new(buf, &header(op, flags, caller, seq, received));
        body(&mut w);
        w.finish();
    }

    /// Returns the reason if the link is lost.
    pub fn check(&self) -> Result<(), LinkLost> {
        self.lost.get().map_or(Ok(()), |lost| Err(lost.clone()))
    }

    fn wait_reply(&self, seq: u64) -> Result<Reply, LinkLost> {
        let mut inbox = lock(&self.inbox);
        loop {
            if let Some(reply) = inbox.replies.remove(&seq) {
                return Ok(reply);
            }
            self.check()?;
            if inbox.reader || inbox.outage.is_some() {
                inbox = self.wait_for_change(inbox)?;
                continue;
            }
            inbox.reader = true;
            drop(inbox);
            let read = self.read_until(seq);
            self.reader_ends();
            match read {
                Ok(reply) => return Ok(reply),
                Err(stop) => self.stopped(stop)?,
            }
            inbox = lock(&self.inbox);
        }
    }

    fn reader_ends(&self) {
        let mut inbox = lock(&self.inbox);
        inbox.reader = false;
        if inbox.waiting > 0 {
            self.inbox_changed.notify_all();
        }
    }

    /// Acts on the end of a read or write; an error if the link is lost by it.
    fn stopped(&self, stop: Stop) -> Result<(), LinkLost> {
        match stop {
            Stop::Nothing => self.check(),
            Stop::Broken(attempt, e) => self.broke(attempt, &e.to_string()),
            Stop::Fatal(reason) => Err(self.lose(&format!("connection to {} lost: {reason}", self.server))),
        }
    }

    /// Reads frames, as the only reader, until the reply to `seq` comes.
    fn read_until(&self, seq: u64) -> Result<Reply, Stop> {
        let mut incoming = lock(&self.incoming);
        let (begin, spin) = (Instant::now(), self.spin.time());
        let greeted = self.session.get().is_some();
        let wait = if greeted { Wait::Spin(spin) } else { Wait::AtMost(spin, GREETING_TIMEOUT) };
        loop {
            let taken = self.take(&mut incoming, wait).map_err(|stop| match stop {
                Stop::Nothing => {
                    Stop::Fatal(format!("no answer to the greeting within {} s", GREETING_TIMEOUT.as_secs()))
                }
                stop => stop,
            })?;
            if let Some((answered, reply)) = taken {
                if answered == seq {
                    self.spin.waited(begin.elapsed());
                    return Ok(reply);
                }
                let mut inbox = lock(&self.inbox);
                inbox.replies.insert(answered, reply);
                if inbox.waiting > 0 {
                    self.inbox_changed.notify_all();
                }
            }
        }
    }

    /// Reads the frames that have arrived, without waiting, unless another thread is the reader.
    pub fn poll(&self) -> Result<(), LinkLost> {
        {
            let mut inbox = lock(&self.inbox);
            if inbox.reader || inbox.outage.is_some() {
                return self.check();
            }
            inbox.reader = true;
        }
        let stop = self.read_available();
        self.reader_ends();
        self.stopped(stop)
    }

    /// Waits until the detached transfers that `wanted` selects have landed; reads frames
    /// meanwhile.
    ///
    /// After an error they may not have landed, even if the worker reported them complete.
    pub fn wait_detached(&self, wanted: impl Fn(&Detached) -> bool) -> Result<(), LinkLost> {
        const POLL_INTERVAL: Duration = Duration::from_millis(1);
        while !self.down.wait_detached(&wanted, POLL_INTERVAL) {
            self.poll()?;
        }
        // The loss of the link ends all transfers.
        self.check()
    }

    /// Reads whenever no other thread does, until the link is lost.
    ///
    /// Runs on a thread of its own, for unsolicited frames such as host functions.
    pub fn serve_events(&self) {
        while self.lost.get().is_none() {
            // A broken socket is always readable.
            if self.wait_out().is_err() {
                return;
            }
            let readable = {
                let transport = lock(&self.present).clone();
                let mut fds = [nix::poll::PollFd::new(
                    std::os::fd::AsFd::as_fd(&*transport),
                    nix::poll::PollFlags::POLLIN,
                )];
                nix::poll::poll(&mut fds, 100u16)
            };
            // Runs even if no bytes came: a thread that waited may have received more than its
            // reply.
            let _ = self.poll();
            if matches!(readable, Ok(n) if n > 0) {
                std::thread::yield_now();
            }
        }
    }

    /// Reads while detached transfers are under way, or transfers to the device wait, and no other
    /// thread reads, until the link is lost.
    ///
    /// Runs on a thread of its own, for programs that only watch their memory.
    pub fn serve_landings(&self) {
        /// Time that another thread of the program has to read first.
        const POLL_INTERVAL: Duration = Duration::from_millis(1);
        const LOST_INTERVAL: Duration = Duration::from_secs(1);
        while self.lost.get().is_none() {
            // The worker may want a transfer that it holds back.
            let held = || self.opened_lanes().is_some_and(Lanes::is_held);
            if held() || self.down.wait_for_detached(LOST_INTERVAL) || held() {
                std::thread::park_timeout(POLL_INTERVAL);
                let _ = self.poll();
            }
        }
    }

    /// Waits until the program may change the source of a transfer; `false` if the link was lost.
    ///
    /// Reads frames meanwhile, since the worker may hold the transfer back.
    pub fn wait_sent(&self, sent: &Sent) -> bool {
        const POLL_INTERVAL: Duration = Duration::from_millis(2);
        let mut keep_at = None;
        loop {
            if let Some(sent) = sent.wait(POLL_INTERVAL, &mut keep_at) {
                return sent;
            }
            // The loss of the link ends the transfer.
            let _ = self.poll();
        }
    }

    /// Waits until no lane reads the program's memory for a frame before `position`; reads frames
    /// meanwhile.
    ///
    /// The bytes of a frame that has failed may still be on their way.
    pub fn wait_unread(&self, position: u64) {
        const POLL_INTERVAL: Duration = Duration::from_millis(2);
        while let Some(lanes) = self.opened_lanes()
            && !lanes.wait_unread(position, POLL_INTERVAL)
        {
            // The loss of the link ends all transfers.
            let _ = self.poll();
        }
    }

    /// Lets the thread of [`Link::serve_landings`] read if the worker holds a transfer back.
    pub fn watch_held(&self) {
        if self.opened_lanes().is_some_and(Lanes::is_held) {
            self.down.wake();
        }
    }

    fn opened_lanes(&self) -> Option<&Lanes> {
        self.lanes.get().and_then(|lanes| lanes.as_ref().ok())
    }

    fn read_available(&self) -> Stop {
        let mut incoming = lock(&self.incoming);
        loop {
            match self.take(&mut incoming, Wait::No) {
                Ok(Some((answered, reply))) => {
                    lock(&self.inbox).replies.insert(answered, reply);
                }
                Ok(None) => {}
                Err(stop) => return stop,
            }
        }
    }

    /// Takes the next frame; its effect and its count happen under one lock.
    fn take(&self, incoming: &mut Incoming<Transport>, wait: Wait) -> Result<Option<(u64, Reply)>, Stop> {
        let (header, body) = incoming.next_frame(wait)?;
        let len = HEADER + body.len();
        if header.ack.get() > self.acknowledged.load(Ordering::Relaxed) {
            self.acknowledged.store(header.ack.get(), Ordering::Relaxed);
        }
        match header.op.get() {
            op::ACK => return Ok(None),
            op::END => return Err(Stop::Fatal(Reader::new(incoming.body(body)).text()?.to_owned())),
            _ => {}
        }
        let number = self.received.load(Ordering::Relaxed) + 1;
        if header.number.get() != number as u32 {
            return Err(Stop::Fatal("a frame out of order".into()));
        }
        let reply = self.handle(&header, incoming.body(body))?;
        self.received.store(number, Ordering::Release);
        incoming.untold += len;
        if incoming.untold >= ACKNOWLEDGED_EVERY && self.acknowledge(number) {
            incoming.untold = 0;
        }
        Ok(reply)
    }

    /// Tells the worker what has arrived, unless another thread is sending; never waits.
    fn acknowledge(&self, received: u64) -> bool {
        self.send_outside(&resume::ack(received))
    }

    /// Sends a short frame that is in no log, if that is possible at once.
    fn send_outside(&self, frame: &[u8]) -> bool {
        let Ok(sending) = self.sending.try_lock() else { return false };
        // The reader of the connection notices its end.
        sending
            .outgoing
            .line
            .as_ref()
            .is_some_and(|line| line.transport.writable() && line.transport.send(frame).is_ok())
    }

    fn handle(&self, header: &Header, body: &[u8]) -> Result<Option<(u64, Reply)>, Stop> {
        let mut r = Reader::new(body);
        match header.op.get() {
            op::REPLY => {
                let (seq, status) = (header.seq.get(), header.ctx.get() as i32);
                return Ok(Some((seq, Reply { status, body: lock(&self.parts).complete(seq, body) })));
            }
            op::REPLY_PART => lock(&self.parts).add(header.seq.get(), body)?,
            op::LATE_ERROR => {
                // Keeps only the first one: the others are most likely its consequences.
                let _ = self.late_error.compare_exchange(
                    0,
                    header.ctx.get() as i32,
                    Ordering::Relaxed,
                    Ordering::Relaxed,
                );
            }
            op::LANDED => {
                let bytes = r.bytes()?;
                self.down.land(header.seq.get(), header.ctx.get() as i32, bytes);
            }
            op::WANTED => {
                let (hold, transfer) = (header.ctx.get(), header.seq.get());
                if self.opened_lanes().is_some_and(|lanes| lanes.want(hold, transfer)) {
                    self.down.wake();
                }
            }
            op::RELEASE => self.opened_lanes().iter().for_each(|lanes| lanes.release(header.ctx.get())),
            op::OUTPUT => self.events.output(r.bytes()?, r.bytes()?),
            op::CALL_HOST => {
                let id = r.word()?;
                // An older worker omits the status.
                let status = if r.is_empty() { 0 } else { r.word()? as i32 };
                if let Some(link) = self.me.upgrade() {
                    self.events.call_host(&link, id, status);
                }
            }
            op::HOST_CHANGED => {
                let region = r.word()?;
                let part = |offset, bytes: &[u8]| self.events.host_changed(region, offset, bytes);
                changes::read(&mut r, part)?;
            }
            op::DUMPED => self.events.core_dump(header.ctx.get() as i32, r.bytes()?),
            _ => return Err(Stop::Fatal("unknown frame from the worker".into())),
        }
        Ok(None)
    }

    /// Marks the link as lost and wakes all waiting threads; the first reason stays.
    pub(crate) fn lose(&self, reason: &str) -> LinkLost {
        let mut first = false;
        let lost = self.lost.get_or_init(|| {
            first = true;
            LinkLost(reason.into())
        });
        if first {
            self.shutdown();
            self.down.fail_all();
            self.outbox.wake();
            self.events.lost(&lost.0);
            drop(lock(&self.inbox));
            self.inbox_changed.notify_all();
        }
        lost.clone()
    }

    /// Closes the connection because the program does not use the worker.
    pub fn close(&self) {
        self.bye();
        let _ = self.lost.set(LinkLost("the connection was closed".into()));
        self.shutdown();
        self.outbox.wake();
    }

    /// Ends all connections at once, whatever other threads do with them.
    fn shutdown(&self) {
        lock(&self.present).shutdown();
        if let Some(Ok(lanes)) = self.lanes.get() {
            lanes.shutdown();
        }
    }

    /// Tells the worker that the next end of the connection is the program's own.
    ///
    /// Calls may follow. Without this message, the worker waits for a lost program. Never waits.
    pub fn bye(&self) {
        if self.lost.get().is_none() && self.returns.load(Ordering::Relaxed) {
            self.send_outside(&resume::frame(op::BYE, |_| {}));
        }
    }

    /// Marks the link as unusable in a forked child, without closing the parent's connection.
    pub fn abandon(&self) {
        let _ = self.lost.set(LinkLost("the process was forked after cuInit".into()));
    }
}

fn header(op: u16, flags: u16, caller: Caller, seq: u64, received: u64) -> Header {
    Header {
        len: 0.into(),
        op: op.into(),
        flags: flags.into(),
        thread: caller.thread.into(),
        number: 0.into(),
        seq: seq.into(),
        ack: received.into(),
        ctx: caller.ctx.into(),
    }
}

/// Connects a lane to the first address that answers; returns the attempt's number, too.
fn connect(
    endpoint: &Endpoint,
    lane: u16,
    flags: u16,
    attempts: &AtomicU32,
    timeout: Duration,
    watch: &Watch,
) -> Result<(Transport, SocketAddr, u32), ConnectError> {
    let mut last = io::Error::other("it has no address");
    let mut place = format!("server {}", endpoint.server);
    for address in &endpoint.addresses {
        let candidates = match address.to_socket_addrs() {
            Ok(candidates) => candidates,
            Err(e) => {
                (place, last) = (format!("server {}: address {address}", endpoint.server), e);
                continue;
            }
        };
        let is_name = address.parse::<SocketAddr>().is_err();
        for candidate in candidates {
            // The server chose the name, and its domain's resolver the answer. The daemon, which
            // knows whether the server is on this machine, then hands out no name.
            if is_name && is_nearby(candidate.ip()) {
                place = format!("server {}: address {address}", endpoint.server);
                last =
                    io::Error::other(format!("the name leads to {candidate}, which is not another machine"));
                continue;
            }
            // The server takes each number once.
            let attempt = attempts.fetch_add(1, Ordering::Relaxed);
            let connected = TcpStream::connect_timeout(&candidate, timeout).and_then(|mut socket| {
                let tls = if endpoint.fingerprint.is_some() { FLAG_TLS } else { 0 };
                let preface = Preface::new(endpoint.worker, &endpoint.key, lane, attempt, flags | tls);
                socket.write_all(preface.as_bytes())?;
                let transport = match endpoint.fingerprint {
                    None => Transport::plain(socket),
                    Some(fingerprint) => Transport::tls_client(socket, crate::tls::pinned(fingerprint)?),
                }?
                .guarded();
                transport.watch(watch)?;
                Ok(transport)
            });
            match connected {
                Ok(transport) => return Ok((transport, candidate, attempt)),
                Err(e) => (place, last) = (format!("server {} at {candidate}", endpoint.server), e),
            }
        }
    }
    Err(ConnectError { place, error: last })
}

/// The last address's error.
struct ConnectError {
    place: String,
    error: io::Error,
}

impl From<ConnectError> for LinkLost {
    fn from(ConnectError { place, error }: ConnectError) -> Self {
        Self(format!("{place}: {error}"))
    }
}
