//! GPU core dumps: the process's attributes, and the dump that a worker sends after a fault.
//!
//! As for a local driver, the attributes count at the creation of a context: before the first one
//! on a worker, the worker learns what to dump. A thread of the library writes the file, calls the
//! program's functions and aborts the process, which a local driver's thread does.
#![expect(clippy::disallowed_methods, reason = "the name of a dump may have the time")]

use std::collections::BTreeMap;
use std::ffi::{OsString, c_void};
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, Once, OnceLock, PoisonError};
use std::time::{Duration, SystemTime};

use gpusession_common::core_dump::{Dump, Settings};
use gpusession_link::grant::privileged;
use gpusession_link::threads;
use gpusession_proto::frame::{ability, op};
use gpusession_proto::handle;

use crate::client::Client;
use crate::handles::MAX_CLIENTS;
use crate::{clients, handles, thread, trace};

/// Bytes that a dump may have beside the worker's device memory: images and the state of threads.
const MORE_THAN_MEMORY: u64 = 1 << 30;
/// Bytes of a dump whatever memory the worker says that it has.
const MAX_BYTES: u64 = 4 << 40;
/// Pieces of a dump that may wait for its file; then the worker waits.
const MAX_WAITING: usize = 16;
/// Time without progress after which a call that failed no longer waits for the dump.
const PROGRESS_TIMEOUT: Duration = Duration::from_secs(10);
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

/// The one dump of a worker.
struct Awaited {
    dump: Dump,
    /// The program's number of the worker's first device: the frames do not tell which one failed.
    device: i32,
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
    pieces: u64,
    over: bool,
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
            none(&format!("its driver returns error {}", reply.status));
            return None;
        }
        Err(_) => return None,
    }
    // The dump comes while the program makes no call.
    client.serve_events().ok()?;
    if dump.aborts {
        static AT_EXIT: Once = Once::new();
        // SAFETY: the handler takes no arguments and reads only statics, which are never dropped.
        AT_EXIT.call_once(|| _ = unsafe { libc::atexit(at_exit) });
    }
    let memory: u64 = client.devices.iter().fold(0, |sum, device| sum.saturating_add(device.total_memory));
    let device = client.devices.iter().map(|device| device.ordinal).find(|ordinal| *ordinal >= 0);
    let most = memory.saturating_add(MORE_THAN_MEMORY).min(MAX_BYTES);
    Some(Awaited::new(dump, device.unwrap_or(0), most))
}

/// Takes the next bytes of a worker's dump, or its end.
pub fn received(client: u8, bytes: &[u8]) {
    if let Some(awaited) = of(client) {
        awaited.received(bytes);
    }
}

/// Ends the dump of a worker that is lost.
pub fn lost(client: u8) {
    if let Some(awaited) = of(client) {
        awaited.lost();
    }
}

/// Waits for the dumps of faults after which the process aborts, as a local driver's calls do.
pub fn wait() {
    if thread::forked() || thread::in_host_function() {
        return;
    }
    for number in 0..MAX_CLIENTS as u8 {
        let failed = || clients::by_number(number).is_some_and(Client::is_poisoned);
        if let Some(awaited) = of(number).filter(|awaited| awaited.dump.aborts)
            && (failed() || awaited.has_begun())
        {
            awaited.wait(PROGRESS_TIMEOUT);
        }
    }
}

/// Keeps a program that exits after a fault until it aborts.
extern "C" fn at_exit() {
    wait();
}

impl Awaited {
    fn new(dump: Dump, device: i32, most: u64) -> Self {
        let stage = Mutex::new(Stage::Awaited { most });
        Self { dump, device, stage, progress: Mutex::default(), progressed: Condvar::new() }
    }

    fn received(&'static self, bytes: &[u8]) {
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
                Some(_) => *stage = Stage::Over,
                None => {
                    trace::why("GPU core dump: incomplete: the server sends more than its GPUs' memory");
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
            Ok(_) => Stage::Begun { pieces: sender, left: most },
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

    /// Writes the file from its first piece to its end.
    fn write(&self, pieces: &Receiver<Vec<u8>>) {
        call_registered(true, self.device);
        let mut file = self.create();
        let ended = loop {
            let Ok(piece) = pieces.recv() else { break false };
            if piece.is_empty() {
                break true;
            }
            if let Some(open) = &mut file
                && let Err(e) = open.write_all(&piece)
            {
                trace::why(&format!("GPU core dump: incomplete: {e}"));
                file = None;
            }
            lock(&self.progress).pieces += 1;
            self.progressed.notify_all();
        };
        drop(file);
        if !ended {
            self.over();
            return;
        }
        call_registered(false, self.device);
        if self.dump.aborts {
            // SAFETY: ends the process, which is what the program has asked for.
            unsafe { libc::abort() };
        }
        self.over();
    }

    /// Creates the file; without one, a fault has its other effects.
    fn create(&self) -> Option<File> {
        let time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let name = OsString::from_vec(self.dump.name(time.as_secs()));
        // Only for the user, because it has the program's memory.
        let created = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&name);
        created
            .inspect_err(|e| trace::why(&format!("GPU core dump {}: not written: {e}", name.display())))
            .ok()
    }

    /// Waits until the dump ends, or stands still for `patience`.
    fn wait(&self, patience: Duration) {
        let mut progress = lock(&self.progress);
        while !progress.over {
            let before = progress.pieces;
            let stands = |now: &mut Progress| !now.over && now.pieces == before;
            let (now, waited) = self
                .progressed
                .wait_timeout_while(progress, patience, stands)
                .unwrap_or_else(PoisonError::into_inner);
            progress = now;
            // Not every fault makes a dump. Only one call waits for it.
            progress.over |= waited.timed_out();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use gpusession_common::core_dump::attribute;

    use super::*;
    use crate::fake_worker::Program;

    const TEST_TIMEOUT: Duration = Duration::from_secs(20);

    /// Returns a dump to this file, after which the process does not abort.
    fn awaited(file: &std::path::Path, most: u64) -> &'static Awaited {
        let mut settings = Settings::new("vm-1", 77, |_| None);
        settings.set(None, attribute::ON_EXCEPTION, &[1]).unwrap();
        settings.set(None, attribute::TRIGGER_HOST, &[0]).unwrap();
        settings.set(None, attribute::FILE, file.to_str().unwrap().as_bytes()).unwrap();
        Box::leak(Box::new(Awaited::new(settings.dump(false).unwrap(), 3, most)))
    }

    fn over(awaited: &Awaited) -> bool {
        lock(&awaited.progress).over
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
            awaited.received(piece);
        }
        awaited.wait(TEST_TIMEOUT);
        assert_eq!(std::fs::read(&file).unwrap(), b"abcdefgh");
        let mode = std::os::unix::fs::MetadataExt::mode(&std::fs::metadata(&file).unwrap());
        assert_eq!((CALLS.load(Ordering::SeqCst), mode & 0o777), (17, 0o600));
        assert!(deregister(callbacks[0], true) && deregister(callbacks[1], false));
    }

    #[test]
    fn dump_beyond_its_bound_and_a_lost_one_end() {
        let folder = tempfile::tempdir().unwrap();
        let long = awaited(&folder.path().join("long"), 5);
        long.received(b"abcd");
        long.received(b"ef");
        long.received(b"gh");
        long.wait(TEST_TIMEOUT);
        assert_eq!(std::fs::read(folder.path().join("long")).unwrap(), b"abcd");

        let lost = awaited(&folder.path().join("lost"), 100);
        lost.received(b"ab");
        lost.lost();
        lost.received(b"cd");
        lost.wait(TEST_TIMEOUT);
        assert!(over(lost));
    }

    #[test]
    fn dump_without_bytes_or_without_a_file_has_no_effect_on_files() {
        let folder = tempfile::tempdir().unwrap();
        let none = awaited(&folder.path().join("none"), 100);
        none.received(b"");
        none.received(b"ab");
        assert!(over(none));
        let silent = awaited(&folder.path().join("silent"), 100);
        silent.wait(Duration::from_millis(1));
        assert!(over(silent) && !silent.has_begun(), "only one call waits");
        let nowhere = awaited(&folder.path().join("no/such/folder"), 100);
        nowhere.received(b"ab");
        nowhere.received(b"");
        nowhere.wait(TEST_TIMEOUT);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
