//! GPU core dumps: the driver writes one to a pipe, and the program gets its bytes.
//!
//! The driver opens the pipe by the path of this process's descriptor and writes from start to end.
//! It never aborts this process, because the program's library decides that. Its calls wait for a
//! dump, so limits of time and length keep a program from holding the driver: beyond them the rest
//! of a dump goes nowhere.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::fs::File;
use std::io::{self, PipeReader, PipeWriter, Read as _};
use std::os::fd::AsRawFd as _;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use gpusession_common::core_dump::{attribute, flag, most_bytes};
use gpusession_proto::frame::op;

use crate::containment::give_stand_ins;
use crate::driver::{Driver, Status, check, status};
use crate::output::Output;
use crate::replies::Replies;

/// Bytes of a dump in one frame, at most.
const PIECE: usize = 256 << 10;
/// Pieces that may wait for the connection; then the driver waits.
const MAX_WAITING: usize = 16;
/// Time for which the driver waits for a program that takes no bytes, in an outage too.
const STALL_TIMEOUT: Duration = Duration::from_secs(60);
/// Time from the first byte of a dump to its last one.
const DUMP_TIMEOUT: Duration = Duration::from_secs(600);

/// Bounds of a dump.
struct Limits {
    bytes: u64,
    stall: Duration,
    total: Duration,
}

/// The dump of a fault, if the program has asked for one.
pub struct CoreDump {
    /// Whether the driver is a client of MPS.
    mps: bool,
    queue: OnceLock<Arc<Queue>>,
}

impl CoreDump {
    /// Creates the state of a worker whose program has not asked for dumps.
    pub fn new(mps: bool) -> Self {
        Self { mps, queue: OnceLock::new() }
    }

    /// Lets a fault in a context that the driver creates later make a dump, the first one only.
    ///
    /// `memory` is the device memory of the lease. Under MPS the other programs of the GPU would
    /// wait for the dump.
    pub fn enable(
        &self,
        driver: &Driver,
        replies: &Arc<Replies>,
        output: &Arc<Output>,
        flags: u32,
        memory: u64,
    ) -> Result<(), Status> {
        if self.mps {
            return Err(status::NOT_SUPPORTED);
        }
        let queue = Arc::new(Queue::default());
        self.queue.set(queue.clone()).map_err(|_| status::INVALID_VALUE)?;
        give_stand_ins().map_err(|_| status::OPERATING_SYSTEM)?;
        let system = |_: io::Error| status::OPERATING_SYSTEM;
        let (from, own) = io::pipe().map_err(system)?;
        let idle = File::options().write(true).open("/dev/null").map_err(system)?;
        let path = format!("/proc/self/fd/{}\0", own.as_raw_fd());
        set(driver, attribute::FILE, path.as_bytes())?;
        set(driver, attribute::FLAGS, &(flags | flag::SKIP_ABORT).to_ne_bytes())?;
        // The older form of that flag, which newer drivers may refuse.
        let _ = set(driver, attribute::TRIGGER_HOST, &[0]);
        let limits = Limits { bytes: most_bytes(memory), stall: STALL_TIMEOUT, total: DUMP_TIMEOUT };
        let (replies, output, taken) = (replies.clone(), output.clone(), queue.clone());
        let thread = |name: &str| std::thread::Builder::new().name(name.into());
        let send = move || {
            send(&taken, |status, bytes| {
                if bytes.is_empty() {
                    // The program may abort after the end; the driver's lines come first.
                    let mut lines = Vec::new();
                    output.collect(&replies, &mut lines);
                    replies.send_frames(lines);
                }
                replies.send_with(op::DUMPED, 0, status, |w| w.bytes(bytes));
            });
        };
        thread("dump sender").spawn(send).map_err(system)?;
        thread("core dump").spawn(move || take(from, own, &idle, &limits, &queue)).map_err(system)?;
        set(driver, attribute::ON_EXCEPTION, &[1])
    }

    /// Returns a clause about the dump for the reason of the worker's end; empty without a dump.
    pub fn note(&self) -> String {
        let Some(queue) = self.queue.get() else { return String::new() };
        let pieces = queue.lock();
        let part = match pieces.over {
            _ if pieces.passed == 0 => return String::new(),
            Some(0) => "",
            _ => ", incomplete",
        };
        format!("; a kernel's fault made a GPU core dump ({} bytes{part})", pieces.passed)
    }
}

fn set(driver: &Driver, attribute: u32, value: &[u8]) -> Result<(), Status> {
    let (mut len, value) = (value.len(), value.as_ptr().cast::<c_void>());
    // SAFETY: the value has as many bytes as stated; the driver copies them.
    check(unsafe { (driver.call.cuCoredumpSetAttributeGlobal)(attribute, value, &mut len) })
}

/// Pieces of a dump on their way to the program.
#[derive(Default)]
struct Queue {
    pieces: Mutex<Pieces>,
    changed: Condvar,
}

#[derive(Default)]
struct Pieces {
    waiting: VecDeque<Vec<u8>>,
    /// Bytes of all pieces so far.
    passed: u64,
    /// The dump's end: 0, or the error that cut it off.
    over: Option<Status>,
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, Pieces> {
        self.pieces.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a piece; waits for room as long as `patience`, then the dump is over.
    fn push(&self, piece: &[u8], most: u64, patience: Duration) {
        let full = |pieces: &mut Pieces| pieces.over.is_none() && pieces.waiting.len() >= MAX_WAITING;
        let waited = self.changed.wait_timeout_while(self.lock(), patience, full);
        let (mut pieces, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        if pieces.over.is_some() {
            return;
        }
        let passed = pieces.passed + piece.len() as u64;
        if waited.timed_out() {
            pieces.over = Some(status::TIMEOUT);
        } else if passed > most {
            pieces.over = Some(status::OUT_OF_MEMORY);
        } else {
            pieces.passed = passed;
            pieces.waiting.push_back(piece.to_vec());
        }
        self.changed.notify_all();
    }

    /// Ends the dump, unless it has ended.
    fn end(&self, status: Status) {
        self.lock().over.get_or_insert(status);
        self.changed.notify_all();
    }

    /// Waits for the next piece, or for the end.
    fn next(&self) -> Result<Vec<u8>, Status> {
        let none = |pieces: &mut Pieces| pieces.over.is_none() && pieces.waiting.is_empty();
        let mut pieces = self.changed.wait_while(self.lock(), none).unwrap_or_else(PoisonError::into_inner);
        let next = pieces.waiting.pop_front();
        self.changed.notify_all();
        next.ok_or_else(|| pieces.over.unwrap_or_default())
    }
}

/// Sends the pieces of a dump, and nothing with its status at the end.
fn send(queue: &Queue, send: impl Fn(Status, &[u8])) {
    let end = loop {
        match queue.next() {
            Ok(piece) => send(0, &piece),
            Err(status) => break status,
        }
    };
    send(end, &[]);
}

/// Takes what the driver writes, to the end, whether or not it still passes the limits.
///
/// `own` is the end that the driver opens once more.
fn take(mut from: PipeReader, own: PipeWriter, idle: &File, limits: &Limits, queue: &Queue) {
    let mut bytes = vec![0; PIECE];
    let mut deadline: Option<Instant> = None;
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        if left.is_some_and(|left| !readable(&from, left)) {
            queue.end(status::TIMEOUT);
            deadline = None;
        }
        match from.read(&mut bytes) {
            Ok(0) => break,
            Ok(len) => {
                if queue.lock().passed == 0 && deadline.is_none() {
                    deadline = Some(Instant::now() + limits.total);
                    // Only the driver's own descriptor is left, whose close ends the pipe. The
                    // number stays taken: a later dump must reach no other file.
                    // SAFETY: both descriptors are this thread's.
                    unsafe { libc::dup3(idle.as_raw_fd(), own.as_raw_fd(), libc::O_CLOEXEC) };
                }
                queue.push(&bytes[..len], limits.bytes, limits.stall.min(left.unwrap_or(limits.stall)));
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => break,
        }
    }
    queue.end(0);
    std::mem::forget(own);
}

/// Waits until the pipe has bytes or its end; `false` after `patience`.
fn readable(pipe: &PipeReader, patience: Duration) -> bool {
    let mut poll = libc::pollfd { fd: pipe.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    let ms = i32::try_from(patience.as_millis()).unwrap_or(i32::MAX);
    // SAFETY: one structure, as stated. An interrupted call lets the read wait, which is harmless.
    unsafe { libc::poll(&mut poll, 1, ms) != 0 }
}

#[cfg(test)]
pub mod tests {
    use std::io::Write as _;
    use std::sync::mpsc::channel;

    use super::*;

    const TEST_TIMEOUT: Duration = Duration::from_secs(20);

    fn limits(bytes: u64) -> Limits {
        Limits { bytes, stall: TEST_TIMEOUT, total: TEST_TIMEOUT }
    }

    /// A pipe whose other end a thread takes, and the path by which a driver opens it.
    struct Pipe {
        path: String,
        queue: Arc<Queue>,
        taking: std::thread::JoinHandle<()>,
    }

    fn pipe(limits: Limits) -> Pipe {
        let (from, own) = io::pipe().unwrap();
        let idle = File::options().write(true).open("/dev/null").unwrap();
        let path = format!("/proc/self/fd/{}", own.as_raw_fd());
        let queue = Arc::new(Queue::default());
        let taken = queue.clone();
        let taking = std::thread::spawn(move || take(from, own, &idle, &limits, &taken));
        Pipe { path, queue, taking }
    }

    impl Pipe {
        /// Writes a dump as a driver does.
        fn write(self, len: usize) -> Arc<Queue> {
            let mut driver = File::create(&self.path).unwrap();
            driver.write_all(&vec![7; len]).unwrap();
            driver.write_all(b"end").unwrap();
            drop(driver);
            self.taking.join().unwrap();
            File::create(&self.path).unwrap().write_all(b"a second dump goes nowhere").unwrap();
            self.queue
        }
    }

    /// Returns what the program gets.
    fn sent(queue: &Queue) -> (Vec<u8>, Status) {
        let (to, sent) = channel();
        send(queue, |status, bytes| to.send((status, bytes.to_vec())).unwrap());
        drop(to);
        let sent: Vec<_> = sent.iter().collect();
        assert!(sent.iter().all(|(_, piece)| piece.len() <= PIECE));
        assert_eq!(sent.iter().filter(|(_, piece)| piece.is_empty()).count(), 1, "one end");
        let status = sent[sent.len() - 1].0;
        (sent.into_iter().flat_map(|(_, piece)| piece).collect(), status)
    }

    #[test]
    fn dump_ends_when_the_driver_closes_its_own_descriptor() {
        passes_a_dump_on();
    }

    /// Writes a dump as a driver does, and checks what the program would get.
    pub fn passes_a_dump_on() {
        let pipe = pipe(limits(u64::MAX));
        let queue = pipe.queue.clone();
        let program = std::thread::spawn(move || sent(&queue));
        // More than the queue holds.
        let len = 2 * MAX_WAITING * PIECE;
        pipe.write(len);
        let (dump, status) = program.join().unwrap();
        assert_eq!((dump.len(), &dump[len..], status), (len + 3, &b"end"[..], 0));
    }

    #[test]
    fn program_that_takes_no_bytes_does_not_hold_the_driver() {
        for (stall, total) in
            [(Duration::from_millis(20), TEST_TIMEOUT), (TEST_TIMEOUT, Duration::from_millis(20))]
        {
            let queue = pipe(Limits { bytes: u64::MAX, stall, total }).write(4 * MAX_WAITING * PIECE);
            let (dump, status) = sent(&queue);
            assert_eq!(status, status::TIMEOUT);
            assert!(dump.len() <= MAX_WAITING * PIECE, "{}", dump.len());
        }
    }

    #[test]
    fn driver_that_stops_in_its_dump_lets_the_program_have_an_end() {
        let pipe = pipe(Limits { total: Duration::from_millis(20), ..limits(u64::MAX) });
        let mut driver = File::create(&pipe.path).unwrap();
        driver.write_all(b"begin").unwrap();
        assert_eq!(sent(&pipe.queue), (b"begin".to_vec(), status::TIMEOUT));
        driver.write_all(b"more, that goes nowhere").unwrap();
        drop(driver);
        pipe.taking.join().unwrap();
        assert_eq!(pipe.queue.lock().passed, 5);
    }

    #[test]
    fn dump_beyond_its_bound_is_cut_off() {
        let queue = pipe(limits(PIECE as u64)).write(3 * PIECE);
        let (dump, status) = sent(&queue);
        assert_eq!(status, status::OUT_OF_MEMORY);
        assert!(!dump.is_empty() && dump.len() <= PIECE, "{}", dump.len());
    }

    #[test]
    fn reason_of_the_end_names_a_dump() {
        let dump = CoreDump::new(false);
        assert_eq!(dump.note(), "");
        let queue = dump.queue.get_or_init(Arc::default);
        assert_eq!(dump.note(), "", "no fault");
        queue.push(b"abc", 9, TEST_TIMEOUT);
        assert_eq!(dump.note(), "; a kernel's fault made a GPU core dump (3 bytes, incomplete)");
        queue.end(0);
        assert_eq!(dump.note(), "; a kernel's fault made a GPU core dump (3 bytes)");
    }
}
