//! The ordered log of one process on one server.
//!
//! A post appends a frame to a buffer and returns; the sender thread writes the buffer. A call
//! appends a frame, writes the buffer itself and waits. One of the waiting threads is the reader,
//! which hands the others their replies.

use std::collections::HashMap;
use std::fmt;
use std::io::{self, Write as _};
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread::Thread;
use std::time::{Duration, Instant};

use gpusession_proto::changes;
use gpusession_proto::frame::{HEADER, Header, Reader, WAIT, Writer, op};
use gpusession_proto::grant::Endpoint;
use gpusession_proto::preface::{self, Preface};
use zerocopy::IntoBytes;

use crate::lanes::{Detached, DownTransfers, Lanes};
use crate::threads;
use crate::transport::{Transport, Wait};

/// Unsent bytes at which a post also writes the buffer, which bounds memory and slows the program.
const MAX_OUTBOX: usize = 4 << 20;
/// Time that the sender waits for more frames before it writes.
const GATHER_WINDOW: Duration = Duration::from_micros(3);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Timeout for the greeting: a worker replies at once, or when a program that ends has made room.
const GREETING_TIMEOUT: Duration = Duration::from_secs(60);
/// Usual number of bytes of one read from the socket.
const READ: usize = 256 << 10;

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
    fn call_host(&self, link: &Arc<Link>, id: u64);
    /// Takes the device's changes of host memory that it can see.
    fn host_changed(&self, region: u64, offset: u64, bytes: &[u8]);
    /// Takes the reason when the link is lost.
    fn lost(&self, reason: &str);
}

struct Outbox {
    buf: Vec<u8>,
    next_seq: u64,
}

#[derive(Default)]
struct Inbox {
    replies: HashMap<u64, Reply>,
    reader: bool,
    waiting: usize,
}

#[derive(Default)]
struct Incoming {
    buf: Vec<u8>,
    start: usize,
    end: usize,
}

/// A process's connection to its worker; see the module.
pub struct Link {
    me: Weak<Self>,
    /// The server's name, for messages.
    pub server: String,
    endpoint: Endpoint,
    address: std::net::SocketAddr,
    transport: Transport,
    outbox: Mutex<Outbox>,
    sending: Mutex<Vec<u8>>,
    pending: AtomicBool,
    sender: OnceLock<Thread>,
    sender_asleep: AtomicBool,
    inbox: Mutex<Inbox>,
    inbox_changed: Condvar,
    incoming: Mutex<Incoming>,
    lost: OnceLock<LinkLost>,
    late_error: AtomicI32,
    /// Number and duration of waits, by operation.
    waits: [Waits; op::COUNT],
    events: Box<dyn Events>,
    lane_secret: OnceLock<[u8; 32]>,
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
    /// Connects to a worker and sends the greeting; returns the link and the greeting's reply.
    ///
    /// `hello` adds the upper layer's part of the greeting.
    pub fn open(
        endpoint: &Endpoint,
        events: Box<dyn Events>,
        hello: impl FnOnce(&mut Writer<'_>),
    ) -> Result<(Arc<Self>, Reply), LinkLost> {
        let (transport, address) = connect(endpoint, 0)?;
        let link = Arc::new_cyclic(|me| Self {
            me: me.clone(),
            server: endpoint.server.clone(),
            endpoint: endpoint.clone(),
            address,
            transport,
            outbox: Mutex::new(Outbox { buf: Vec::with_capacity(READ), next_seq: 1 }),
            sending: Mutex::new(Vec::with_capacity(READ)),
            pending: AtomicBool::new(false),
            sender: OnceLock::new(),
            sender_asleep: AtomicBool::new(false),
            inbox: Mutex::default(),
            inbox_changed: Condvar::new(),
            incoming: Mutex::default(),
            lost: OnceLock::new(),
            late_error: AtomicI32::new(0),
            waits: std::array::from_fn(|_| Waits::default()),
            events,
            lane_secret: OnceLock::new(),
            lanes: OnceLock::new(),
            down: Arc::default(),
        });
        let reply = link.call(op::HELLO, Caller { thread: 0, ctx: 0 }, |w| {
            w.bytes(&endpoint.ticket);
            hello(w);
        })?;
        if reply.status == 0 {
            let secret = reply.reader().bytes().ok().and_then(|b| <[u8; 32]>::try_from(b).ok());
            let secret = secret.ok_or_else(|| LinkLost("the worker's greeting has no lane secret".into()))?;
            link.lane_secret.get_or_init(|| secret);
        }
        let sender = threads::spawn("gpusession-send", {
            let link = link.clone();
            move || link.send_loop()
        })
        .map_err(|e| LinkLost(format!("cannot start the sender thread: {e}")))?;
        link.sender.get_or_init(|| sender.thread().clone());
        Ok((link, reply))
    }

    /// Returns `true` if the stream is encrypted.
    pub fn encrypted(&self) -> bool {
        self.transport.encrypted()
    }

    /// Appends a frame to the log and returns its position.
    ///
    /// Never waits for the worker, except that it helps to send a full buffer.
    pub fn post(&self, op: u16, caller: Caller, body: impl FnOnce(&mut Writer<'_>)) -> Result<u64, LinkLost> {
        self.check()?;
        let (seq, queued) = self.append(op, 0, caller, body);
        if queued > MAX_OUTBOX {
            self.flush()?;
        } else {
            self.wake_sender();
        }
        Ok(seq)
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
        let (seq, _) = self.append(op, WAIT, caller, body);
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
        lock(&self.outbox).next_seq - 1
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
        let lanes = self.lanes.get_or_init(|| Lanes::open(self).map_err(|e| self.lose(&e.0)));
        lanes.as_ref().map_err(Clone::clone)
    }

    /// Opens a further connection to the same worker, which proves knowledge of the greeting's
    /// secret.
    pub(crate) fn open_lane(&self, lane: u16) -> Result<Transport, LinkLost> {
        let mut endpoint = self.endpoint.clone();
        endpoint.addresses = vec![self.address.to_string()];
        let (transport, _) = connect(&endpoint, lane)?;
        let secret = self.lane_secret.get().ok_or_else(|| LinkLost("lane before the greeting".into()))?;
        let mut buf = Vec::new();
        let mut w =
            Writer::new(&mut buf, &header(op::LANE, 0, Caller { thread: 0, ctx: 0 }, u64::from(lane)));
        w.bytes(blake3::keyed_hash(secret, &lane.to_le_bytes()).as_bytes());
        w.finish();
        transport.send(&buf).map_err(|e| LinkLost(format!("lane {lane}: {e}")))?;
        Ok(transport)
    }

    fn append(
        &self,
        op: u16,
        flags: u16,
        caller: Caller,
        body: impl FnOnce(&mut Writer<'_>),
    ) -> (u64, usize) {
        let mut outbox = lock(&self.outbox);
        let seq = outbox.next_seq;
        outbox.next_seq += 1;
        let mut w = Writer::new(&mut outbox.buf, &header(op, flags, caller, seq));
        body(&mut w);
        w.finish();
        (seq, outbox.buf.len())
    }

    fn check(&self) -> Result<(), LinkLost> {
        self.lost.get().map_or(Ok(()), |lost| Err(lost.clone()))
    }

    /// Writes all frames that were appended before.
    ///
    /// Two threads never write at once, and the bytes keep their order.
    fn flush(&self) -> Result<(), LinkLost> {
        let mut sending = lock(&self.sending);
        {
            let mut outbox = lock(&self.outbox);
            std::mem::swap(&mut *sending, &mut outbox.buf);
        }
        self.pending.store(false, Ordering::Relaxed);
        let sent = self.transport.send(&sending);
        sending.clear();
        sent.map_err(|e| self.lose(&format!("connection to {} lost: {e}", self.server)))
    }

    fn wake_sender(&self) {
        // SeqCst pairs with the sender's: either the sender sees `pending` before it sleeps, or
        // this thread sees the sender asleep.
        if !self.pending.swap(true, Ordering::SeqCst)
            && self.sender_asleep.load(Ordering::SeqCst)
            && let Some(sender) = self.sender.get()
        {
            sender.unpark();
        }
    }

    fn send_loop(&self) {
        let spin = threads::spin_time();
        while self.lost.get().is_none() {
            let started = Instant::now();
            let mut found = self.pending.load(Ordering::Acquire);
            while !found && started.elapsed() < spin {
                std::hint::spin_loop();
                found = self.pending.load(Ordering::Acquire);
            }
            if !found {
                self.sender_asleep.store(true, Ordering::SeqCst);
                if !self.pending.load(Ordering::SeqCst) {
                    std::thread::park();
                }
                self.sender_asleep.store(false, Ordering::SeqCst);
                continue;
            }
            if !spin.is_zero() {
                // More frames usually follow, and one write for several costs as much as for one.
                let found = Instant::now();
                while found.elapsed() < GATHER_WINDOW && self.pending.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            }
            // A waiting thread may have sent everything meanwhile.
            if self.pending.load(Ordering::Acquire) && self.flush().is_err() {
                return;
            }
        }
    }

    fn wait_reply(&self, seq: u64) -> Result<Reply, LinkLost> {
        let mut inbox = lock(&self.inbox);
        loop {
            if let Some(reply) = inbox.replies.remove(&seq) {
                return Ok(reply);
            }
            self.check()?;
            if inbox.reader {
                inbox.waiting += 1;
                inbox = self.inbox_changed.wait(inbox).unwrap_or_else(PoisonError::into_inner);
                inbox.waiting -= 1;
                continue;
            }
            inbox.reader = true;
            drop(inbox);
            let read = self.read_until(seq);
            inbox = lock(&self.inbox);
            inbox.reader = false;
            if inbox.waiting > 0 {
                self.inbox_changed.notify_all();
            }
            drop(inbox);
            return read.map_err(|e| self.lose(&format!("connection to {} lost: {e}", self.server)));
        }
    }

    /// Reads frames, as the only reader, until the reply to `seq` comes.
    fn read_until(&self, seq: u64) -> io::Result<Reply> {
        let mut incoming = lock(&self.incoming);
        let spin = threads::spin_time();
        let greeted = self.lane_secret.get().is_some();
        let wait = if greeted { Wait::Spin(spin) } else { Wait::AtMost(spin, GREETING_TIMEOUT) };
        loop {
            let (header, body) = self.next_frame(&mut incoming, wait).map_err(|e| match e.kind() {
                io::ErrorKind::WouldBlock => io::Error::other(format!(
                    "no answer to the greeting within {} s",
                    GREETING_TIMEOUT.as_secs()
                )),
                _ => e,
            })?;
            if let Some((answered, reply)) = self.handle(&header, body)? {
                if answered == seq {
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
            if inbox.reader {
                return self.check();
            }
            inbox.reader = true;
        }
        let read = self.read_available();
        let mut inbox = lock(&self.inbox);
        inbox.reader = false;
        if inbox.waiting > 0 {
            self.inbox_changed.notify_all();
        }
        drop(inbox);
        read.map_err(|e| self.lose(&format!("connection to {} lost: {e}", self.server)))
    }

    /// Waits until the detached transfers that `wanted` selects have landed; reads frames
    /// meanwhile.
    pub fn wait_detached(&self, wanted: impl Fn(&Detached) -> bool) {
        const POLL_INTERVAL: Duration = Duration::from_millis(1);
        while !self.down.wait_detached(&wanted, POLL_INTERVAL) {
            if self.poll().is_err() {
                return;
            }
        }
    }

    /// Reads whenever no other thread does, until the link is lost.
    ///
    /// Runs on a thread of its own, for unsolicited frames such as host functions.
    pub fn serve_events(&self) {
        while self.lost.get().is_none() {
            let readable = {
                let mut fds = [nix::poll::PollFd::new(
                    std::os::fd::AsFd::as_fd(&self.transport),
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

    fn read_available(&self) -> io::Result<()> {
        let mut incoming = lock(&self.incoming);
        loop {
            match self.next_frame(&mut incoming, Wait::No) {
                Ok((header, body)) => {
                    if let Some((answered, reply)) = self.handle(&header, body)? {
                        lock(&self.inbox).replies.insert(answered, reply);
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(e) => return Err(e),
            }
        }
    }

    fn handle(&self, header: &Header, body: &[u8]) -> io::Result<Option<(u64, Reply)>> {
        let bad = |e: gpusession_proto::frame::BadFrame| io::Error::other(e);
        let mut r = Reader::new(body);
        match header.op.get() {
            op::REPLY => {
                let reply = Reply { status: header.ctx.get() as i32, body: body.to_vec() };
                return Ok(Some((header.seq.get(), reply)));
            }
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
                let bytes = r.bytes().map_err(bad)?;
                self.down.land(header.seq.get(), header.ctx.get() as i32, bytes);
            }
            op::OUTPUT => self.events.output(r.bytes().map_err(bad)?, r.bytes().map_err(bad)?),
            op::CALL_HOST => {
                let id = r.word().map_err(bad)?;
                if let Some(link) = self.me.upgrade() {
                    self.events.call_host(&link, id);
                }
            }
            op::HOST_CHANGED => {
                let region = r.word().map_err(bad)?;
                let part = |offset, bytes: &[u8]| self.events.host_changed(region, offset, bytes);
                changes::read(&mut r, part).map_err(bad)?;
            }
            op::END => return Err(io::Error::other(r.text().map_err(bad)?.to_owned())),
            _ => return Err(io::Error::other("unknown frame from the worker")),
        }
        Ok(None)
    }

    fn next_frame<'a>(&self, incoming: &'a mut Incoming, wait: Wait) -> io::Result<(Header, &'a [u8])> {
        loop {
            let have = incoming.end - incoming.start;
            let mut need = HEADER;
            if have >= HEADER {
                let bytes = incoming.buf[incoming.start..]
                    .first_chunk::<HEADER>()
                    .ok_or(io::ErrorKind::InvalidData)?;
                // A refusal comes instead of the first frame: its length has the high bit set.
                if bytes[3] & 0x80 != 0 {
                    let text = &incoming.buf[incoming.start + 4..incoming.end];
                    return Err(io::Error::other(String::from_utf8_lossy(text).into_owned()));
                }
                let header = Header::parse(bytes).map_err(io::Error::other)?;
                need = HEADER + header.body_len();
                if have >= need {
                    let body = incoming.start + HEADER..incoming.start + need;
                    incoming.start += need;
                    return Ok((header, &incoming.buf[body]));
                }
            }
            if incoming.start > 0 {
                incoming.buf.copy_within(incoming.start..incoming.end, 0);
                (incoming.start, incoming.end) = (0, have);
            }
            if incoming.buf.len() < need.max(READ) {
                incoming.buf.resize(need.max(READ), 0);
            }
            match self.transport.recv(&mut incoming.buf[incoming.end..], wait)? {
                0 if have >= 4 && incoming.buf[3] & 0x80 != 0 => {
                    let text = String::from_utf8_lossy(&incoming.buf[4..have]).into_owned();
                    return Err(io::Error::other(text));
                }
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                n => incoming.end += n,
            }
        }
    }

    /// Marks the link as lost and wakes all waiting threads; the first reason stays.
    pub(crate) fn lose(&self, reason: &str) -> LinkLost {
        let mut first = false;
        let lost = self.lost.get_or_init(|| {
            first = true;
            LinkLost(reason.into())
        });
        if first {
            self.transport.shutdown();
            self.down.fail_all();
            if let Some(sender) = self.sender.get() {
                sender.unpark();
            }
            self.events.lost(&lost.0);
            drop(lock(&self.inbox));
            self.inbox_changed.notify_all();
        }
        lost.clone()
    }

    /// Closes the connection because the program does not use the worker.
    pub fn close(&self) {
        let _ = self.lost.set(LinkLost("the connection was closed".into()));
        self.transport.shutdown();
        if let Some(sender) = self.sender.get() {
            sender.unpark();
        }
    }

    /// Marks the link as unusable in a forked child, without closing the parent's connection.
    pub fn abandon(&self) {
        let _ = self.lost.set(LinkLost("the process was forked after cuInit".into()));
    }
}

fn header(op: u16, flags: u16, caller: Caller, seq: u64) -> Header {
    Header {
        len: 0.into(),
        op: op.into(),
        flags: flags.into(),
        thread: caller.thread.into(),
        epoch: 0.into(),
        seq: seq.into(),
        ack: 0.into(),
        ctx: caller.ctx.into(),
    }
}

fn connect(endpoint: &Endpoint, lane: u16) -> Result<(Transport, std::net::SocketAddr), LinkLost> {
    let mut last = format!("server {} has no address", endpoint.server);
    for address in &endpoint.addresses {
        let candidates = match address.to_socket_addrs() {
            Ok(candidates) => candidates,
            Err(e) => {
                last = format!("server {}: address {address}: {e}", endpoint.server);
                continue;
            }
        };
        for candidate in candidates {
            let attempt = TcpStream::connect_timeout(&candidate, CONNECT_TIMEOUT).and_then(|mut socket| {
                let preface = Preface::new(endpoint.worker, lane, 0, endpoint.fingerprint.is_some());
                socket.write_all(preface.as_bytes())?;
                let mut transport = match endpoint.fingerprint {
                    None => Transport::plain(socket),
                    Some(fingerprint) => Transport::tls_client(socket, crate::tls::pinned(fingerprint)?),
                }?;
                transport.watch()?;
                Ok(transport)
            });
            match attempt {
                Ok(transport) => return Ok((transport, candidate)),
                Err(e) => last = format!("server {} at {candidate}: {e}", endpoint.server),
            }
        }
    }
    Err(LinkLost(last))
}

const _: () = assert!(preface::LEN == 40);
