//! A real worker process on the simulated driver, with a supervisor and clients.
//!
//! The supervisor hands over connections as `gpuserver` does. The clients break the protocol where
//! a test needs that.

#![allow(missing_docs, reason = "helpers of tests")]

pub mod supervised;

use std::io::{self, IoSlice, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use gpuserver::cache::Images;
use gpuserver::clock::wall;
use gpusession_link::{Events, Link, LinkLost, Reply};
use gpusession_proto::frame::{HEADER, Header, Reader, WAIT, Writer, op};
use gpusession_proto::grant::Endpoint;
use gpusession_proto::handle;
use gpusession_proto::preface::{Key, LEN, Preface, refusal_len};
use gpusession_proto::supervise::{
    DeviceLimit, FromWorker, Isolation, MAX_PACKET, Start, ToWorker, WORKER_FD, decode, encode,
};
use gpusession_proto::ticket::Ticket;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit, setrlimit};
use nix::sys::socket::{
    AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, recv, sendmsg, socketpair,
};
use zerocopy::IntoBytes;

/// Longest wait of these tests: no step that works takes longer, even on a slow machine.
pub const TEST_TIMEOUT: Duration = Duration::from_secs(20);
pub const LEASE: &str = "abcdefghijkl";
const CLIENT: &str = "vm";
pub const KEY: [u8; 32] = [3; 32];
/// Address and size of the window that the clients of these tests offer.
pub const WINDOW: u64 = 0x0200_0000_0000;
pub const WINDOW_SIZE: u64 = 4 << 30;
/// Primary context of the first device.
pub const CTX: u64 = handle::make(handle::CTX, 0, 1, 0);
pub const MIB: u64 = 1 << 20;

pub fn stream(slot: u32) -> u64 {
    handle::make(handle::STREAM, 0, 1, slot)
}

pub fn event(slot: u32) -> u64 {
    handle::make(handle::EVENT, 0, 1, slot)
}

/// Returns a file that cargo built together with the running test.
fn built(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("a test knows where it is");
    test.ancestors()
        .skip(1)
        .take(2)
        .map(|folder| folder.join(name))
        .find(|file| file.exists())
        .unwrap_or_else(|| panic!("{name} beside the tests: cargo builds it for the worker's tests"))
}

/// Returns the worker's program.
pub fn program() -> PathBuf {
    built("gpuserver-worker")
}

/// A machine with simulated GPUs, and the folder with all its files.
pub struct Machine {
    folder: PathBuf,
}

impl Machine {
    pub fn new() -> Arc<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name =
            format!("gpusession-worker-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let folder = std::env::temp_dir().join(name);
        std::fs::create_dir(&folder).expect("a temporary folder");
        std::os::unix::fs::symlink(built("libsimgpu.so"), folder.join("libcuda.so.1")).expect("a link in it");
        Arc::new(Self { folder })
    }

    pub fn name(&self) -> String {
        self.folder.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    pub fn driver(&self) -> PathBuf {
        self.folder.join("libcuda.so.1")
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// Settings of a worker that a test may change.
#[derive(Clone)]
pub struct Options {
    pub require_tls: bool,
    pub memory_bytes: u64,
    pub context_bytes: u64,
    pub warm: bool,
    pub mps: bool,
    /// Whether the worker reads a sample of the card's memory before it is ready.
    pub verify_memory: bool,
    /// Seconds for which the worker waits for a lost client.
    pub resume_grace_s: u32,
    /// Folder of the images that the supervisor keeps.
    pub images: Option<PathBuf>,
    /// Switches of the simulated driver, with their values.
    pub driver: Vec<(&'static str, String)>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            require_tls: false,
            memory_bytes: u64::MAX,
            context_bytes: 0,
            warm: true,
            mps: false,
            verify_memory: false,
            resume_grace_s: 0,
            images: None,
            driver: Vec::new(),
        }
    }
}

/// A worker process that is ready for connections.
pub struct Worker {
    pub id: [u8; 16],
    pub fingerprint: [u8; 32],
    pub address: SocketAddr,
    child: Child,
    channel: Arc<OwnedFd>,
    inbox: Receiver<FromWorker>,
    stop: Arc<AtomicBool>,
    door: Option<JoinHandle<()>>,
    told: Vec<FromWorker>,
    _machine: Arc<Machine>,
}

/// Occupies the low descriptors.
///
/// The child moves its channel to descriptor 3 between fork and exec, where the standard library
/// must not hold a descriptor of its own.
fn keep_low_descriptors() {
    static HELD: OnceLock<Vec<std::fs::File>> = OnceLock::new();
    HELD.get_or_init(|| {
        let mut held = Vec::new();
        loop {
            let file = std::fs::File::open("/dev/null").expect("/dev/null");
            let enough = file.as_raw_fd() > WORKER_FD;
            held.push(file);
            if enough {
                return held;
            }
        }
    });
}

fn spawn(machine: &Machine, driver: &[(&str, String)]) -> (Child, OwnedFd) {
    keep_low_descriptors();
    let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)
        .expect("a supervision socket");
    let mut command = Command::new(program());
    command
        .env_clear()
        .env("SIMGPU_MACHINE", machine.name())
        .envs(driver.iter().map(|(name, value)| (name, value)))
        .env("XDG_RUNTIME_DIR", &machine.folder)
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .process_group(0);
    let theirs_raw = theirs.as_raw_fd();
    // SAFETY: between fork and exec the closure only makes system calls that are async-signal-safe.
    unsafe {
        command.pre_exec(move || {
            // A killed test leaves no worker behind.
            nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL)?;
            if setrlimit(Resource::RLIMIT_STACK, RLIM_INFINITY, RLIM_INFINITY).is_err() {
                let _ = getrlimit(Resource::RLIMIT_STACK)
                    .and_then(|(_, hard)| setrlimit(Resource::RLIMIT_STACK, hard, hard));
            }
            if nix::libc::dup2(theirs_raw, WORKER_FD) < 0 {
                return Err(io::Error::last_os_error());
            }
            Ok(())
        });
    }
    let child = command.spawn().expect("the worker starts");
    (child, ours)
}

fn tell(channel: &OwnedFd, message: &ToWorker, beside: Option<BorrowedFd<'_>>) {
    let packet = encode(message);
    let fds: Vec<_> = beside.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&fds)];
    let control = if fds.is_empty() { &rights[..0] } else { &rights[..] };
    // An exited worker takes no more connections.
    let _ =
        sendmsg::<()>(channel.as_raw_fd(), &[IoSlice::new(&packet)], control, MsgFlags::MSG_NOSIGNAL, None);
}

/// A user whose programs are refused, and one whose programs are admitted at the second question.
pub const REFUSED: (&str, &str) = ("mallory", "a limit of mallory's says no");
pub const LATER: &str = "patience";

/// Grants memory to one worker, exactly as it asks, keeps its images, and passes on its other
/// messages.
fn supervise(channel: Arc<OwnedFd>, limit: u64, images: Option<PathBuf>) -> Receiver<FromWorker> {
    let images = images.map(|folder| Arc::new(Images::new(folder, 8 << 30, 2 << 30, wall())));
    let (sender, inbox) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let (mut granted, mut asked) = (0u64, 0);
        loop {
            let mut packet = vec![0; MAX_PACKET];
            let len = recv(channel.as_raw_fd(), &mut packet, MsgFlags::empty()).unwrap_or(0);
            if len == 0 {
                return;
            }
            match decode(&packet[..len]).expect("a message") {
                FromWorker::MemoryWanted { device, serial, bytes } => {
                    let fits = granted.checked_add(bytes).is_some_and(|sum| sum <= limit);
                    let bytes = if fits { bytes } else { 0 };
                    granted += bytes;
                    let left = limit - granted;
                    tell(&channel, &ToWorker::MemoryGranted { device, serial, bytes, left }, None);
                }
                FromWorker::MemoryReturned { bytes, .. } => granted -= bytes,
                FromWorker::ImageWanted { serial, hash } => {
                    let found = images.as_ref().and_then(|images| images.open(CLIENT, &hash, wall()));
                    let (file, bytes) = found.unzip();
                    tell(&channel, &ToWorker::Image { serial, bytes }, file.as_ref().map(AsFd::as_fd));
                }
                FromWorker::ImageOffered { serial, hash, bytes } => {
                    let room = images.as_ref().and_then(|images| images.begin(CLIENT, &hash, bytes, wall()));
                    let (reader, writer) = nix::unistd::pipe().expect("a pipe");
                    let answer = ToWorker::ImageRoom { serial, room: room.is_some() };
                    tell(&channel, &answer, room.is_some().then_some(writer.as_fd()));
                    drop(writer);
                    if let Some(incoming) = room {
                        incoming.take(reader).expect("the image");
                    }
                }
                FromWorker::Presented(process) => {
                    asked += 1;
                    let refused = (process.user == REFUSED.0).then(|| REFUSED.1.into());
                    if process.user != LATER || asked > 1 {
                        tell(&channel, &ToWorker::Admission { refused }, None);
                    }
                    drop(sender.send(FromWorker::Presented(process)));
                }
                message => drop(sender.send(message)),
            }
        }
    });
    inbox
}

impl Worker {
    pub fn start(machine: &Arc<Machine>) -> Self {
        Self::start_with(machine, &Options::default())
    }

    pub fn start_with(machine: &Arc<Machine>, options: &Options) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let mut id = [0x57; 16];
        id[..4].copy_from_slice(&NEXT.fetch_add(1, Ordering::Relaxed).to_le_bytes());
        let (child, channel) = spawn(machine, &options.driver);
        let channel = Arc::new(channel);
        let start = Start {
            worker: id,
            lease: LEASE.into(),
            ticket_key: Some(KEY),
            driver: machine.driver().to_string_lossy().into_owned(),
            devices: vec![DeviceLimit {
                uuid: *b"simgpu\x40\x00\x80\x00gpu-0\x00",
                memory_bytes: options.memory_bytes,
                sm_percent: 100,
                context_bytes: options.context_bytes,
            }],
            require_tls: options.require_tls,
            images: options.images.is_some(),
            warm: options.warm,
            verify_memory: options.verify_memory,
            mps: options.mps,
            resume_grace_s: options.resume_grace_s,
            staging_bytes: gpusession_proto::supervise::STAGING,
            isolation: Isolation::Try,
        };
        tell(&channel, &ToWorker::Start(start), None);
        let inbox = supervise(channel.clone(), options.memory_bytes, options.images.clone());

        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("its number");
        let stop = Arc::new(AtomicBool::new(false));
        let door = std::thread::spawn({
            let (stop, channel) = (stop.clone(), Arc::downgrade(&channel));
            move || {
                for socket in listener.incoming() {
                    if stop.load(Ordering::SeqCst) {
                        return;
                    }
                    let Ok(mut socket) = socket else { continue };
                    let _ = socket.set_read_timeout(Some(TEST_TIMEOUT));
                    let mut preface = vec![0; LEN];
                    if socket.read_exact(&mut preface).is_ok()
                        && let Some(channel) = channel.upgrade()
                    {
                        let _ = socket.set_read_timeout(None);
                        let adopt = ToWorker::Adopt { number: 0, preface, peer: "a test".into() };
                        tell(&channel, &adopt, Some(socket.as_fd()));
                    }
                }
            }
        });
        let mut worker = Self {
            id,
            fingerprint: [0; 32],
            address,
            child,
            channel,
            inbox,
            stop,
            door: Some(door),
            told: Vec::new(),
            _machine: machine.clone(),
        };
        let ready = worker.wait_for(|m| matches!(m, FromWorker::Ready { .. } | FromWorker::Failed { .. }));
        match ready {
            FromWorker::Ready { fingerprint, cuda_version, parks } => {
                assert_eq!((cuda_version, parks), (13000, true));
                worker.fingerprint = fingerprint;
            }
            other => panic!("the worker said {other:?}"),
        }
        worker
    }

    fn channel(&self) -> &OwnedFd {
        &self.channel
    }

    pub fn tell(&self, message: &ToWorker) {
        tell(self.channel(), message, None);
    }

    /// Hands over one end of a new connection together with any bytes; returns the other end.
    pub fn adopt_with(&self, preface: &[u8]) -> TcpStream {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let ours = TcpStream::connect(listener.local_addr().expect("its number")).expect("a connection");
        let (theirs, _) = listener.accept().expect("its other end");
        let adopt = ToWorker::Adopt { number: 0, preface: preface.to_vec(), peer: "a test".into() };
        tell(self.channel(), &adopt, Some(theirs.as_fd()));
        ours.set_read_timeout(Some(TEST_TIMEOUT)).expect("a timeout");
        ours
    }

    /// Returns the next message of the worker; `None` once it has exited.
    fn next(&mut self, until: Instant) -> Option<FromWorker> {
        let left = until.saturating_duration_since(Instant::now());
        let message = match self.inbox.recv_timeout(left) {
            Ok(message) => message,
            Err(RecvTimeoutError::Disconnected) => return None,
            Err(RecvTimeoutError::Timeout) => panic!("no message in time; earlier ones: {:?}", self.told),
        };
        self.told.push(message.clone());
        Some(message)
    }

    /// Returns what the worker has said up to now.
    pub fn told(&self) -> &[FromWorker] {
        &self.told
    }

    /// Waits until the worker sends a message that `wanted` accepts.
    pub fn wait_for(&mut self, wanted: impl Fn(&FromWorker) -> bool) -> FromWorker {
        let until = Instant::now() + TEST_TIMEOUT;
        loop {
            match self.next(until) {
                Some(message) if wanted(&message) => return message,
                Some(_) => {}
                None => panic!("the worker exited; its messages: {:?}", self.told),
            }
        }
    }

    /// Waits for the worker's refusal of a connection, and returns the reason.
    pub fn refusal(&mut self) -> String {
        match self.wait_for(|m| matches!(m, FromWorker::Refused { .. })) {
            FromWorker::Refused { reason, .. } => reason,
            other => panic!("{other:?}"),
        }
    }

    /// Waits until the process has exited by itself, not by a signal.
    pub fn exited_within(&mut self, limit: Duration) {
        let until = Instant::now() + limit;
        while self.next(until).is_some() {}
        let status = self.child.wait().expect("a child");
        assert_eq!((status.signal(), status.code()), (None, Some(0)), "its messages: {:?}", self.told);
    }

    /// Waits until the process has exited in any way.
    pub fn gone(&mut self) -> ExitStatus {
        self.child.wait().expect("a child of ours")
    }

    pub fn exited(&mut self) {
        self.exited_within(TEST_TIMEOUT);
    }

    /// Waits until the process has exited by itself, and returns the reason that it sent.
    pub fn ended_within(&mut self, limit: Duration) -> String {
        self.exited_within(limit);
        let reason = self.told.iter().rev().find_map(|m| match m {
            FromWorker::Ended { reason, .. } => Some(reason.clone()),
            _ => None,
        });
        reason.expect("the worker reports why it exits")
    }

    pub fn ended(&mut self) -> String {
        self.ended_within(TEST_TIMEOUT)
    }

    /// Closes the supervisor's end of the channel, and waits until the worker has exited by itself.
    pub fn abandoned(mut self) {
        nix::sys::socket::shutdown(self.channel.as_raw_fd(), nix::sys::socket::Shutdown::Both)
            .expect("the socket is there");
        // SAFETY: a system call with plain numbers; the child is not reaped, so its id is not
        // reused.
        let fd = unsafe { nix::libc::syscall(nix::libc::SYS_pidfd_open, self.child.id(), 0) };
        assert!(fd >= 0, "pidfd_open: {}", io::Error::last_os_error());
        // SAFETY: the kernel has just created this descriptor.
        let process = unsafe { OwnedFd::from_raw_fd(fd as i32) };
        let timeout = PollTimeout::try_from(TEST_TIMEOUT).unwrap_or(PollTimeout::MAX);
        let ended = poll(&mut [PollFd::new(process.as_fd(), PollFlags::POLLIN)], timeout).expect("poll");
        assert_eq!(ended, 1, "the worker continues without its supervisor");
        let status = self.child.wait().expect("a child");
        assert_eq!((status.signal(), status.code()), (None, Some(0)));
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the bytes of memory that the process has, and those of its address space.
    pub fn memory(&self) -> (u64, u64) {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).expect("it runs");
        let of = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).expect("a line");
            line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") << 10
        };
        (of("VmRSS:"), of("VmSize:"))
    }

    pub fn ticket(&self) -> Ticket {
        Ticket {
            lease: LEASE.into(),
            worker: self.id,
            uid: 1000,
            user: "alice".into(),
            pid: 4242,
            boot_id: [1; 16],
            issued_usec: 12,
            nonce: [9; 16],
            program: "python3".into(),
            executable: "/usr/bin/python3".into(),
        }
    }

    fn key(&self) -> Key {
        Key::new(&KEY, &self.id, 1000)
    }

    /// Returns a preface as a grant makes it.
    pub fn preface(&self, lane: u16, flags: u16) -> Preface {
        Preface::new(self.id, &self.key(), lane, 1, flags)
    }

    pub fn endpoint(&self, encrypted: bool) -> Endpoint {
        Endpoint {
            server: "test".into(),
            addresses: vec![self.address.to_string()],
            worker: self.id,
            key: self.key(),
            fingerprint: encrypted.then_some(self.fingerprint),
            ticket: self.ticket().seal(&KEY),
            lease: LEASE.into(),
            devices: 1,
        }
    }

    /// Opens a client that follows the protocol, through the link of the real one.
    pub fn client(&self, encrypted: bool) -> Client {
        Client::open(&self.endpoint(encrypted)).expect("the worker admits the client")
    }

    /// Opens a client in clear that may send anything, not yet admitted.
    pub fn stranger(&self, lane: u16) -> Raw {
        self.stranger_with(lane, 1, 0)
    }

    /// As [`Self::stranger`], with the number of the attempt and flags.
    pub fn stranger_with(&self, lane: u16, attempt: u32, flags: u16) -> Raw {
        let mut stream = TcpStream::connect(self.address).expect("a connection");
        let preface = Preface::new(self.id, &self.key(), lane, attempt, flags);
        stream.write_all(preface.as_bytes()).expect("a preface");
        Raw::new(stream)
    }

    /// Opens a client in clear that is admitted and may send anything from now on.
    pub fn guest(&mut self) -> Raw {
        let mut raw = self.stranger(0);
        raw.greet(&self.ticket().seal(&KEY));
        let (header, body) = raw.frame().expect("an answer to the greeting");
        assert_eq!((header.op.get(), header.ctx.get()), (op::REPLY, 0));
        let mut r = Reader::new(&body);
        raw.secret.copy_from_slice(r.bytes().expect("a secret"));
        r.word().expect("the time for which the worker waits");
        assert_eq!(r.word(), Ok(WINDOW), "the first window that was offered is granted");
        self.wait_for(|m| matches!(m, FromWorker::Presented { .. }));
        raw
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        self.stop.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(self.address);
        if let Some(door) = self.door.take() {
            let _ = door.join();
        }
    }
}

/// Records the worker's unsolicited messages.
#[derive(Clone, Default)]
pub struct Heard(pub Arc<Mutex<Vec<String>>>);

impl Events for Heard {
    fn output(&self, _: &[u8], _: &[u8]) {}
    fn call_host(&self, _: &Arc<Link>, _: u64, _: i32) {}
    fn host_changed(&self, _: u64, _: u64, _: &[u8]) {}
    fn lost(&self, reason: &str) {
        self.0.lock().expect("a list").push(reason.into());
    }
}

pub const CALLER: gpusession_link::link::Caller = gpusession_link::link::Caller { thread: 1, ctx: CTX };

/// A client that follows the protocol (see [`Worker::client`]).
pub struct Client {
    pub link: Arc<Link>,
    pub heard: Heard,
    pub hello: Reply,
}

impl Client {
    pub fn open(endpoint: &Endpoint) -> Result<Self, LinkLost> {
        let heard = Heard::default();
        let (link, hello) = Link::open(endpoint, Box::new(heard.clone()), |w| {
            w.word(1);
            w.word(WINDOW_SIZE);
            w.word(WINDOW);
        })?;
        Ok(Self { link, heard, hello })
    }

    pub fn try_call(&self, op: u16, words: &[u64]) -> Result<Reply, LinkLost> {
        self.link.call(op, CALLER, |w| words.iter().for_each(|word| w.word(*word)))
    }

    /// Makes a call that succeeds, and returns the words of the answer.
    pub fn call(&self, op: u16, words: &[u64]) -> Vec<u64> {
        let reply = self.try_call(op, words).expect("the worker is there");
        assert_eq!(reply.status, 0, "operation {op}");
        words_of(reply.reader())
    }

    /// Makes a call that fails, and returns the error.
    pub fn refused(&self, op: u16, words: &[u64]) -> i32 {
        self.try_call(op, words).expect("the worker is there").status
    }

    /// Returns free and total bytes of the device.
    pub fn memory(&self) -> (u64, u64) {
        let words = self.call(op::MEM_INFO, &[]);
        (words[0], words[1])
    }

    pub fn put(&self, target: u64, bytes: &[u8]) {
        let reply = self.link.call(op::COPY_TO_DEVICE, CALLER, |w| {
            [target, bytes.len() as u64, 0, 1].into_iter().for_each(|word| w.word(word));
            w.bytes(bytes);
        });
        assert_eq!(reply.expect("the worker is there").status, 0);
    }

    pub fn get(&self, source: u64, len: usize) -> Vec<u8> {
        let reply = self.link.call(op::COPY_FROM_DEVICE, CALLER, |w| {
            [source, len as u64, 0, 1].into_iter().for_each(|word| w.word(word));
        });
        let reply = reply.expect("the worker is there");
        assert_eq!(reply.status, 0);
        reply.reader().bytes().expect("bytes").to_vec()
    }
}

fn words_of(mut r: Reader<'_>) -> Vec<u64> {
    std::iter::from_fn(|| r.word().ok()).collect()
}

/// A connection in clear on which a test writes any bytes.
pub struct Raw {
    pub stream: TcpStream,
    pub secret: [u8; 32],
    pub seq: u64,
    /// Words of the last answer.
    pub words: Vec<u64>,
}

impl Raw {
    fn new(stream: TcpStream) -> Self {
        stream.set_read_timeout(Some(TEST_TIMEOUT)).expect("a timeout");
        stream.set_write_timeout(Some(TEST_TIMEOUT)).expect("a timeout");
        stream.set_nodelay(true).expect("an option");
        Self { stream, secret: [0; 32], seq: 1, words: Vec::new() }
    }

    /// Writes bytes; a closed connection shows when the test reads.
    pub fn write(&mut self, bytes: &[u8]) {
        let _ = self.stream.write_all(bytes);
    }

    pub fn greet(&mut self, ticket: &[u8]) {
        let greeting = frame(op::HELLO, 1, |w| {
            w.bytes(ticket);
            w.word(1);
            w.word(WINDOW_SIZE);
            w.word(WINDOW);
        });
        self.write(&greeting);
    }

    /// Reads the next frame; `None` at the end of the stream.
    pub fn frame(&mut self) -> Option<(Header, Vec<u8>)> {
        let mut head = [0; HEADER];
        match self.stream.read(&mut head) {
            Ok(0) => return None,
            Ok(n) => self.stream.read_exact(&mut head[n..]).ok()?,
            Err(e) if e.kind() == io::ErrorKind::ConnectionReset => return None,
            Err(e) => panic!("no frame from the worker: {e}"),
        }
        let header = Header::parse(&head).expect("a header");
        let mut body = vec![0; header.body_len()];
        self.stream.read_exact(&mut body).ok()?;
        Some((header, body))
    }

    /// Reads the next frame; `None` at the end of the stream, or after the socket's timeout.
    pub fn frame_if_any(&mut self) -> Option<(Header, Vec<u8>)> {
        let mut head = [0; HEADER];
        self.stream.read_exact(&mut head).ok()?;
        let header = Header::parse(&head).expect("a header");
        let mut body = vec![0; header.body_len()];
        self.stream.read_exact(&mut body).ok()?;
        Some((header, body))
    }

    /// Sends one frame and waits for its answer: the driver's status, or the reason for the end.
    pub fn ask(&mut self, op: u16, body: impl FnOnce(&mut Writer<'_>)) -> Result<i32, String> {
        self.seq += 1;
        let request = frame(op, self.seq, body);
        self.write(&request);
        self.answer(self.seq)
    }

    /// Waits for the answer to one request.
    pub fn answer(&mut self, seq: u64) -> Result<i32, String> {
        loop {
            let Some((header, body)) = self.frame() else { return Err("hung up".into()) };
            match header.op.get() {
                op::REPLY if header.seq.get() == seq => {
                    self.words = words_of(Reader::new(&body));
                    return Ok(header.ctx.get() as i32);
                }
                op::END => {
                    return Err(Reader::new(&body).text().expect("a reason").to_owned());
                }
                _ => {}
            }
        }
    }

    /// Sends a frame that succeeds, and returns the words of the answer.
    pub fn ask_answer(&mut self, op: u16, body: impl FnOnce(&mut Writer<'_>)) -> Vec<u64> {
        assert_eq!(self.ask(op, body), Ok(0));
        self.words.clone()
    }

    pub fn ask_words(&mut self, op: u16, words: &[u64]) -> Result<i32, String> {
        self.ask(op, |w| words.iter().for_each(|word| w.word(*word)))
    }

    /// Reads until the connection ends; returns the reason of a refusal, or an empty text.
    pub fn refusal(mut self) -> String {
        let mut first = [0; 4];
        if self.stream.read_exact(&mut first).is_err() {
            return String::new();
        }
        let len = refusal_len(first).expect("a refusal");
        let mut reason = vec![0; len];
        self.stream.read_exact(&mut reason).expect("the reason");
        String::from_utf8(reason).expect("text")
    }

    /// Returns `true` if the worker has closed the connection without an answer.
    pub fn hung_up(mut self) -> bool {
        let mut byte = [0];
        match self.stream.read(&mut byte) {
            Ok(n) => n == 0,
            Err(e) => e.kind() == io::ErrorKind::ConnectionReset,
        }
    }

    pub fn close(self) {
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

/// Builds a request of thread 1 in the first device's context, with a reply.
pub fn frame(op: u16, seq: u64, body: impl FnOnce(&mut Writer<'_>)) -> Vec<u8> {
    frame_of(1, op, seq, body)
}

/// Memory of the client to mirror: too much, beyond the end of addresses, at address 0, empty.
pub fn frame_of(thread: u32, op: u16, seq: u64, body: impl FnOnce(&mut Writer<'_>)) -> Vec<u8> {
    let mut buf = Vec::new();
    let header = Header {
        len: 0.into(),
        op: op.into(),
        flags: WAIT.into(),
        thread: thread.into(),
        number: 0.into(),
        seq: seq.into(),
        ack: 0.into(),
        ctx: CTX.into(),
    };
    let mut w = Writer::new(&mut buf, &header);
    body(&mut w);
    w.finish();
    buf
}

/// Returns `true` if a process exists, even as a zombie.
pub fn exists(pid: u32) -> bool {
    Path::new(&format!("/proc/{pid}")).exists()
}

/// Small, reproducible and good enough: xorshift64*.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn draw(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.draw() % n
    }
}
