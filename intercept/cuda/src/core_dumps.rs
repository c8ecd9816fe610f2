//! GPU core dumps: the process's attributes, and the dump that a worker sends after a fault.
//!
//! As for a local driver, the attributes count at the creation of a context: before the first one
//! on a worker, the worker learns what to dump. A thread of the library writes the file, calls the
//! program's functions and aborts the process, which a local driver's thread does. Calls that
//! return the fault wait for the file, as natively, but never without end.
#![expect(clippy::disallowed_methods, reason = "a dump has a deadline, and its name may have the time")]

use std::collections::BTreeMap;
use std::ffi::{OsString, c_void};
use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use gpusession_common::core_dump::{Dump, Settings, most_bytes};
use gpusession_link::grant::privileged;
use gpusession_link::threads;
use gpusession_proto::frame::{ability, op};
use gpusession_proto::handle;

use crate::client::Client;
use crate::handles::MAX_CLIENTS;
use crate::status::{NOT_PERMITTED, NOT_SUPPORTED, OUT_OF_MEMORY, TIMEOUT};
use crate::{clients, handles, thread, trace};

/// Pieces of a dump that may wait for its file; then the worker waits.
const MAX_WAITING: usize = 16;
/// Time between two attempts to open a FIFO that no process reads.
const OPEN_INTERVAL: Duration = Duration::from_millis(5);
/// Reason why a dump is incomplete.
const LONGER: &str = "the server sends more than its GPUs' memory";
/// `CU_CTX_COREDUMP_ENABLE | CU_CTX_USER_COREDUMP_ENABLE`
const CONTEXT_FLAGS: u32 = 0x20 | 0x40;

/// `CUcoredumpStatusCallback`
pub type Callback = extern "C" fn(*mut c_void, i32, i32);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Locks the attributes of this process.
pub fn settings() -> MutexGuard<'static, Settings> {
    static SETTINGS: LazyLock<Mutex<Settings>> = LazyLock::new(|| {
        let mut name = [0u8; 256];
        // SAFETY: the buffer has as many bytes as stated, less one for a terminator.
        unsafe { libc::gethostname(name.as_mut_ptr().cast(), name.len() - 1) };
        let end = name.iter().position(|byte| *byte == 0).unwrap_or(0);
        let host = String::from_utf8_lossy(&name[..end]).into_owned();
        Mutex::new(Settings::new(&host, std::process::id(), |name| std::env::var(name).ok()))
    });
    lock(&SETTINGS)
}

/// Forgets a destroyed context's own attributes.
pub fn forget_context(ctx: u64) {
    settings().forget(ctx);
}

/// A function of the program that a dump calls.
#[derive(Clone, Copy)]
struct Registered {
    /// Whether it waits for the beginning of a dump, or for its end.
    begins: bool,
    function: Callback,
    data: usize,
}

static CALLBACKS: Mutex<BTreeMap<u64, Registered>> = Mutex::new(BTreeMap::new());

/// Registers a function of the program; returns its handle.
pub fn register(function: Callback, data: *mut c_void, begins: bool) -> u64 {
    let new = handles::mint(handle::CALLBACK, 0);
    lock(&CALLBACKS).insert(new, Registered { begins, function, data: data as usize });
    new
}

/// Forgets a registered function; `false` if there is none.
pub fn deregister(callback: u64, begins: bool) -> bool {
    let mut known = lock(&CALLBACKS);
    if known.get(&callback).is_none_or(|registered| registered.begins != begins) {
        return false;
    }
    known.remove(&callback);
    handles::retire(callback);
    true
}

/// Calls the functions that wait for the beginning, or for the end; they may not call the driver.
fn call_registered(begins: bool, device: i32) {
    let due: Vec<_> = lock(&CALLBACKS).values().filter(|one| one.begins == begins).copied().collect();
    for Registered { function, data, .. } in due {
        let pid = std::process::id() as i32;
        thread::host_function(|| function(data as *mut c_void, pid, device));
    }
}

/// Bounds of the time for which calls that failed wait for a dump, and a dump for its file.
struct Limits {
    /// Until the first byte: not every fault makes a dump.
    begin: Duration,
    /// Between two pieces.
    progress: Duration,
    /// For all of it.
    total: Duration,
    /// For the reader of a FIFO that opens it, or that takes bytes.
    file: Duration,
}

const LIMITS: Limits = Limits {
    begin: Duration::from_secs(10),
    progress: Duration::from_secs(60),
    total: Duration::from_secs(600),
    file: Duration::from_secs(30),
};

/// The one dump of a worker.
struct Awaited {
    dump: Dump,
    /// The program's number of the worker's first device: the frames do not tell which one failed.
    device: i32,
    limits: Limits,
    /// Number of dumps of the process that have begun, so that each one has a file of its own.
    begun: &'static AtomicU32,
    stage: Mutex<Stage>,
    progress: Mutex<Progress>,
    progressed: Condvar,
}

/// Stage of the frames.
enum Stage {
    Awaited {
        most: u64,
    },
    Begun {
        /// To the thread that writes; an empty piece is the end.
        pieces: SyncSender<Vec<u8>>,
        /// Bytes that may still come.
        left: u64,
    },
    Over,
}

/// Progress of the file, for calls that wait.
#[derive(Default)]
struct Progress {
    begun: bool,
    pieces: u64,
    /// The file is complete, or will not be.
    written: bool,
    /// No call waits any more.
    over: bool,
    /// Start of the first wait.
    since: Option<Instant>,
}

/// The dumps of the process's workers; `None` if a worker makes none.
static DUMPS: [OnceLock<Option<Awaited>>; MAX_CLIENTS] = [const { OnceLock::new() }; MAX_CLIENTS];

fn of(client: u8) -> Option<&'static Awaited> {
    DUMPS.get(usize::from(client))?.get()?.as_ref()
}

/// Lets a worker make a dump if the program has asked for dumps before its first context there.
///
/// `flags` are those of the new context.
#[inline]
pub fn before_context(client: &'static Client, flags: u32) {
    if let Some(dump) = DUMPS.get(usize::from(client.number)) {
        dump.get_or_init(|| ask(client, flags & CONTEXT_FLAGS != 0));
    }
}

/// As [`before_context`] before a library, which precedes a context in some programs.
///
/// The worker's context can be replaced only as long as the program has no object.
pub fn before_library(client: &'static Client) {
    if settings().dump(false).is_some() {
        before_context(client, 0);
    }
}

fn ask(client: &'static Client, forced: bool) -> Option<Awaited> {
    let dump = settings().dump(forced)?;
    // A program with more rights than its user writes no file that the user names.
    if privileged() {
        return None;
    }
    let none = |why: &str| {
        trace::why(&format!("GPU core dumps: server {} makes none: {why}", client.link.server));
    };
    if client.abilities & ability::CORE_DUMPS == 0 {
        none("it is of an earlier release; update it");
        return None;
    }
    let flags = u64::from(dump.flags);
    match thread::within(0, || client.ask(op::CORE_DUMP, |w| w.word(flags))) {
        Ok(reply) if reply.status == 0 => {}
        Ok(reply) => {
            let why = match reply.status {
                NOT_SUPPORTED => "under MPS, the other programs of a GPU would wait for it".to_owned(),
                NOT_PERMITTED => "the program has objects on the server before its first context".to_owned(),
                other => format!("its driver returns error {other}"),
            };
            none(&why);
            return None;
        }
        Err(_) => return None,
    }
    // The dump comes while the program makes no call.
    client.serve_events().ok()?;
    let memory: u64 = client.devices.iter().fold(0, |sum, device| sum.saturating_add(device.total_memory));
    let device = client.devices.iter().map(|device| device.ordinal).find(|ordinal| *ordinal >= 0);
    Some(Awaited::new(dump, device.unwrap_or(0), most_bytes(memory)))
}

/// Takes the next bytes of a worker's dump, or its end: with an error, it is incomplete.
pub fn received(client: u8, status: i32, bytes: &[u8]) {
    if let Some(awaited) = of(client) {
        awaited.received(status, bytes);
    }
}

/// Ends the dump of a worker that is lost.
pub fn lost(client: u8) {
    if let Some(awaited) = of(client) {
        awaited.lost();
    }
}

/// Ends the waits for the dump of a worker whose connection breaks.
pub fn interrupted(client: u8) {
    if let Some(awaited) = of(client) {
        let _progress = lock(&awaited.progress);
        awaited.progressed.notify_all();
    }
}

fn is_interrupted(client: u8) -> bool {
    clients::by_number(client).is_some_and(|client| client.link.is_interrupted())
}

/// Waits for the dumps of faults, as a local driver's calls do, but not in an outage.
pub fn wait() {
    if thread::forked() || thread::in_host_function() {
        return;
    }
    for number in 0..MAX_CLIENTS as u8 {
        let client = clients::by_number(number);
        if let Some(awaited) = of(number)
            && (awaited.has_begun() || client.is_some_and(Client::is_poisoned))
        {
            awaited.wait(&|| is_interrupted(number), |progress| progress.over);
        }
    }
}

impl Awaited {
    fn new(dump: Dump, device: i32, most: u64) -> Self {
        static BEGUN: AtomicU32 = AtomicU32::new(0);
        let stage = Mutex::new(Stage::Awaited { most });
        let (progress, progressed) = Default::default();
        Self { dump, device, limits: LIMITS, begun: &BEGUN, stage, progress, progressed }
    }

    fn received(&'static self, status: i32, bytes: &[u8]) {
        let pieces = {
            let mut stage = lock(&self.stage);
            if let Stage::Awaited { most } = *stage {
                *stage = if bytes.is_empty() { Stage::Over } else { self.begin(most) };
                if matches!(*stage, Stage::Over) {
                    self.over();
                }
            }
            let Stage::Begun { pieces, left } = &mut *stage else { return };
            let pieces = pieces.clone();
            match left.checked_sub(bytes.len() as u64) {
                Some(rest) if !bytes.is_empty() => *left = rest,
                Some(_) => {
                    if status != 0 {
                        let why = match status {
                            TIMEOUT => "it took too long, or this machine received it too slowly",
                            OUT_OF_MEMORY => LONGER,
                            _ => "the server stopped it",
                        };
                        incomplete(why);
                    }
                    *stage = Stage::Over;
                }
                None => {
                    incomplete(LONGER);
                    *stage = Stage::Over;
                    return;
                }
            }
            pieces
        };
        // Without the lock, since a slow file lets this wait. The link calls from one thread at a
        // time. After an error, the writer has said why.
        let _ = pieces.send(bytes.to_vec());
    }

    /// Starts the thread that writes the file.
    fn begin(&'static self, most: u64) -> Stage {
        let (sender, pieces) = sync_channel(MAX_WAITING);
        match threads::spawn("gpusession-dump", move || self.write(&pieces)) {
            Ok(_) => {
                lock(&self.progress).begun = true;
                self.progressed.notify_all();
                Stage::Begun { pieces: sender, left: most }
            }
            Err(_) => Stage::Over,
        }
    }

    /// Ends the dump without an end.
    fn lost(&self) {
        // Without its sender, the writer stops.
        *lock(&self.stage) = Stage::Over;
        self.over();
    }

    fn has_begun(&self) -> bool {
        !matches!(*lock(&self.stage), Stage::Awaited { .. })
    }

    fn over(&self) {
        lock(&self.progress).over = true;
        self.progressed.notify_all();
    }

    /// Writes the file from its first piece to its end, or as far as it can be written.
    fn write(&self, pieces: &Receiver<Vec<u8>>) {
        call_registered(true, self.device);
        let ended = match self.create() {
            Ok(file) => self.copy(pieces, file),
            Err((name, e)) => {
                trace::why(&format!("GPU core dump {}: not written: {e}", name.display()));
                true
            }
        };
        if !ended {
            self.over();
            return;
        }
        call_registered(false, self.device);
        if self.dump.aborts {
            self.abort();
        }
        self.over();
    }

    /// Copies the pieces to the file; `false` if the dump has no end.
    fn copy(&self, pieces: &Receiver<Vec<u8>>, mut file: File) -> bool {
        loop {
            let Ok(piece) = pieces.recv() else { return false };
            if piece.is_empty() {
                return true;
            }
            if let Err(e) = write_all(&mut file, &piece, self.limits.file) {
                incomplete(&e.to_string());
                return true;
            }
            lock(&self.progress).pieces += 1;
            self.progressed.notify_all();
        }
    }

    /// Creates the file; a FIFO needs a reader in time.
    ///
    /// A later dump of the process, of another lease's GPU, has a number behind its name.
    fn create(&self) -> Result<File, (OsString, io::Error)> {
        let time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let mut name = self.dump.name(time.as_secs());
        let earlier = self.begun.fetch_add(1, Ordering::Relaxed);
        if earlier > 0 {
            name.extend(format!(".{}", earlier + 1).bytes());
        }
        let name = OsString::from_vec(name);
        let until = Instant::now() + self.limits.file;
        loop {
            // Only for the user, because it has the program's memory. A FIFO must not let this
            // thread wait without end, here and for each write.
            let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
            let created = OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(true)
                .mode(0o600)
                .custom_flags(flags)
                .open(&name);
            match created {
                Err(e) if e.raw_os_error() == Some(libc::ENXIO) => {
                    if Instant::now() >= until {
                        return Err((name, io::Error::other("no process reads this FIFO")));
                    }
                    std::thread::sleep(OPEN_INTERVAL);
                }
                created => return created.map_err(|e| (name, e)),
            }
        }
    }

    /// Aborts the process once its other dumps that have begun are written.
    fn abort(&self) -> ! {
        lock(&self.progress).written = true;
        self.progressed.notify_all();
        for number in 0..MAX_CLIENTS as u8 {
            if let Some(other) = of(number).filter(|other| other.has_begun()) {
                other.wait(&|| is_interrupted(number), |progress| progress.written || progress.over);
            }
        }
        // SAFETY: ends the process, which is what the program has asked for.
        unsafe { libc::abort() }
    }

    /// Waits until `done`, as long as the limits say; an interruption ends only this wait.
    fn wait(&self, interrupted: &dyn Fn() -> bool, done: fn(&Progress) -> bool) {
        let mut progress = lock(&self.progress);
        let until = *progress.since.get_or_insert_with(Instant::now) + self.limits.total;
        while !done(&progress) && !interrupted() {
            let before = (progress.begun, progress.pieces);
            let standstill = if progress.begun { self.limits.progress } else { self.limits.begin };
            let left = until.saturating_duration_since(Instant::now());
            let stands =
                |now: &mut Progress| !done(now) && !interrupted() && (now.begun, now.pieces) == before;
            let (now, waited) = self
                .progressed
                .wait_timeout_while(progress, left.min(standstill), stands)
                .unwrap_or_else(PoisonError::into_inner);
            progress = now;
            if waited.timed_out() {
                progress.over = true;
                self.progressed.notify_all();
            }
        }
    }
}

/// Says why a dump has only a part of its bytes.
fn incomplete(why: &str) {
    trace::why(&format!("GPU core dump: incomplete: {why}"));
}

/// Writes all bytes; waits at most `patience` for a reader that takes some.
fn write_all(file: &mut File, mut bytes: &[u8], patience: Duration) -> io::Result<()> {
    while !bytes.is_empty() {
        match file.write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(len) => bytes = &bytes[len..],
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                let mut poll = libc::pollfd { fd: file.as_raw_fd(), events: libc::POLLOUT, revents: 0 };
                // SAFETY: one structure, as stated. This thread takes no signals.
                if unsafe { libc::poll(&mut poll, 1, patience.as_millis() as i32) } == 0 {
                    return Err(io::Error::other("the reader of this FIFO takes no bytes"));
                }
            }
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::atomic::{AtomicBool, AtomicU64};

    use gpusession_common::core_dump::attribute;

    use super::*;
    use crate::fake_worker::Program;

    const TEST_TIMEOUT: Duration = Duration::from_secs(20);

    fn limits(time: Duration) -> Limits {
        Limits { begin: time, progress: time, total: time, file: time }
    }

    /// Returns a dump to this file, after which the process does not abort.
    fn awaited_with(file: &Path, most: u64, limits: Limits, begun: u32) -> &'static Awaited {
        let mut settings = Settings::new("vm-1", 77, |_| None);
        settings.set(None, attribute::ON_EXCEPTION, &[1]).unwrap();
        settings.set(None, attribute::TRIGGER_HOST, &[0]).unwrap();
        settings.set(None, attribute::FILE, file.to_str().unwrap().as_bytes()).unwrap();
        let awaited = Awaited::new(settings.dump(false).unwrap(), 3, most);
        let begun = Box::leak(Box::new(AtomicU32::new(begun)));
        Box::leak(Box::new(Awaited { limits, begun, ..awaited }))
    }

    fn awaited(file: &Path, most: u64) -> &'static Awaited {
        awaited_with(file, most, limits(TEST_TIMEOUT), 0)
    }

    fn over(awaited: &Awaited) -> bool {
        lock(&awaited.progress).over
    }

    impl Awaited {
        fn wait_over(&self) {
            self.wait(&|| false, |progress| progress.over);
        }

        fn bytes(&'static self, bytes: &[u8]) {
            self.received(0, bytes);
        }
    }

    #[test]
    fn worker_of_an_earlier_release_is_not_asked() {
        for (abilities, asked) in [(ability::ALL & !ability::CORE_DUMPS, false), (ability::ALL, true)] {
            let client = Program::able(abilities).client;
            let before = client.link.position();
            assert_eq!(ask(client, true).is_some(), asked);
            assert_eq!(client.link.position() - before, u64::from(asked));
        }
    }

    #[test]
    fn pieces_reach_the_file_and_the_functions_once() {
        static CALLS: AtomicU64 = AtomicU64::new(0);
        extern "C" fn called(data: *mut c_void, pid: i32, device: i32) {
            assert!(thread::in_host_function(), "it may not call the driver");
            assert_eq!((pid as u32, device), (std::process::id(), 3));
            CALLS.fetch_add(data as u64, Ordering::SeqCst);
        }
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("dump");
        let callbacks = [(true, 1), (false, 16), (true, 256)]
            .map(|(begins, data)| register(called, data as *mut c_void, begins));
        assert!(!deregister(callbacks[2], false) && deregister(callbacks[2], true));
        let awaited = awaited(&file, 8);
        for piece in [&b"abcd"[..], b"efgh", b"", b"late"] {
            awaited.bytes(piece);
        }
        awaited.wait_over();
        assert_eq!(std::fs::read(&file).unwrap(), b"abcdefgh");
        let mode = std::os::unix::fs::MetadataExt::mode(&std::fs::metadata(&file).unwrap());
        assert_eq!((CALLS.load(Ordering::SeqCst), mode & 0o777), (17, 0o600));
        assert!(deregister(callbacks[0], true) && deregister(callbacks[1], false));
    }

    #[test]
    fn dump_beyond_its_bound_and_a_lost_one_end() {
        let folder = tempfile::tempdir().unwrap();
        let long = awaited(&folder.path().join("long"), 5);
        long.bytes(b"abcd");
        long.bytes(b"ef");
        long.bytes(b"gh");
        long.wait_over();
        assert_eq!(std::fs::read(folder.path().join("long")).unwrap(), b"abcd");

        let lost = awaited(&folder.path().join("lost"), 100);
        lost.bytes(b"ab");
        lost.lost();
        lost.bytes(b"cd");
        lost.wait_over();
        assert!(over(lost));
    }

    #[test]
    fn dump_that_the_server_cuts_off_has_an_end() {
        let folder = tempfile::tempdir().unwrap();
        let cut = awaited(&folder.path().join("cut"), 100);
        cut.bytes(b"ab");
        cut.received(TIMEOUT, b"");
        cut.bytes(b"cd");
        cut.wait_over();
        assert_eq!(std::fs::read(folder.path().join("cut")).unwrap(), b"ab");
    }

    #[test]
    fn dump_without_bytes_or_without_a_file_has_no_effect_on_files() {
        let folder = tempfile::tempdir().unwrap();
        let none = awaited(&folder.path().join("none"), 100);
        none.bytes(b"");
        none.bytes(b"ab");
        assert!(over(none));
        let silent = awaited_with(&folder.path().join("silent"), 100, limits(Duration::from_millis(1)), 0);
        silent.wait_over();
        assert!(over(silent) && !silent.has_begun(), "only one call waits");
        // Without the end of the dump.
        for place in ["no/such/folder", "."] {
            let nowhere = awaited(&folder.path().join(place), 100);
            nowhere.bytes(b"ab");
            nowhere.wait_over();
            assert!(lock(&nowhere.progress).since.unwrap().elapsed() < TEST_TIMEOUT);
        }
        let full = awaited(Path::new("/dev/full"), 100);
        full.bytes(b"ab");
        full.wait_over();
        assert!(lock(&full.progress).since.unwrap().elapsed() < TEST_TIMEOUT);
        full.bytes(b"cd");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn wait_has_a_limit_however_much_the_dump_proceeds() {
        let folder = tempfile::tempdir().unwrap();
        let total = Duration::from_millis(50);
        let limits = Limits { total, ..limits(TEST_TIMEOUT) };
        let slow = awaited_with(&folder.path().join("slow"), u64::MAX, limits, 0);
        std::thread::scope(|scope| {
            slow.bytes(b"a");
            let waits = scope.spawn(|| slow.wait_over());
            while !waits.is_finished() {
                slow.bytes(b"a");
            }
        });
        let since = lock(&slow.progress).since.unwrap();
        assert!(over(slow) && (total..TEST_TIMEOUT).contains(&since.elapsed()));
    }

    #[test]
    fn wait_ends_with_the_connection_and_begins_again_after_it() {
        let folder = tempfile::tempdir().unwrap();
        let dump = awaited(&folder.path().join("dump"), 100);
        let away = AtomicBool::new(false);
        let wait = || dump.wait(&|| away.load(Ordering::SeqCst), |progress| progress.over);
        dump.bytes(b"ab");
        std::thread::scope(|scope| {
            let waits = scope.spawn(wait);
            while lock(&dump.progress).since.is_none() {
                std::thread::yield_now();
            }
            away.store(true, Ordering::SeqCst);
            drop(lock(&dump.progress));
            dump.progressed.notify_all();
            waits.join().unwrap();
            wait();
            assert!(!over(dump));
            away.store(false, Ordering::SeqCst);
            let waits = scope.spawn(wait);
            dump.bytes(b"");
            waits.join().unwrap();
        });
        assert!(over(dump) && lock(&dump.progress).since.unwrap().elapsed() < TEST_TIMEOUT);
    }

    #[test]
    fn later_dump_of_a_process_has_a_name_of_its_own() {
        let folder = tempfile::tempdir().unwrap();
        for begun in [0, 1, 2] {
            let dump = awaited_with(&folder.path().join("dump"), 100, limits(TEST_TIMEOUT), begun);
            dump.bytes(begun.to_string().as_bytes());
            dump.bytes(b"");
            dump.wait_over();
        }
        let read = |name| std::fs::read_to_string(folder.path().join(name)).unwrap();
        assert_eq!([read("dump"), read("dump.2"), read("dump.3")], ["0", "1", "2"]);
    }

    fn fifo(folder: &Path) -> std::path::PathBuf {
        let path = folder.join("fifo");
        let name = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
        // SAFETY: the name is a C string.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        path
    }

    #[test]
    fn fifo_without_a_reader_does_not_stop_the_program() {
        let folder = tempfile::tempdir().unwrap();
        let path = fifo(folder.path());
        let short = || Limits { file: Duration::from_millis(20), ..limits(TEST_TIMEOUT) };
        let unread = awaited_with(&path, u64::MAX, short(), 0);
        unread.bytes(b"ab");
        unread.wait_over();
        // A reader that takes nothing: the pipe holds less than this.
        let _reader = File::options().read(true).write(true).open(&path).unwrap();
        let stuck = awaited_with(&path, u64::MAX, short(), 0);
        stuck.bytes(&vec![7; 1 << 20]);
        stuck.wait_over();
        for dump in [unread, stuck] {
            assert!(lock(&dump.progress).since.unwrap().elapsed() < TEST_TIMEOUT);
        }
    }

    #[test]
    fn reader_of_a_fifo_gets_the_dump() {
        let folder = tempfile::tempdir().unwrap();
        let path = fifo(folder.path());
        let dump = awaited(&path, u64::MAX);
        let bytes: Vec<u8> = (0..1 << 20).map(|i| (i / 1000) as u8).collect();
        dump.bytes(&bytes);
        dump.bytes(b"");
        assert!(std::fs::read(&path).unwrap() == bytes);
        dump.wait_over();
    }
}
