//! The module inside a program that logs in through the real libpam, with bad daemons.
#![expect(clippy::disallowed_methods, reason = "tests wait for other processes")]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::io::{Read as _, Write as _};
use std::mem::size_of;
use std::os::fd::{FromRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::ptr::null_mut;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use gpusession_login::{MAX_REPLY, Reply, Request};

/// Timeout that the tests give the module.
const TIMEOUT: Duration = Duration::from_secs(4);
/// Further time of a login, for loading libpam and for a busy machine.
///
/// It is below [`TIMEOUT`], to detect a login that waits twice.
const SLACK: Duration = Duration::from_millis(3900);

/// Returns the path of a library that cargo builds with this test; `deps` is the folder of both.
fn built(below_deps: &str) -> PathBuf {
    let path = std::env::current_exe().unwrap().parent().unwrap().join(below_deps);
    assert!(path.exists(), "{} is built with the tests", path.display());
    path
}

fn module() -> PathBuf {
    built("libpam_gpusession.so")
}

// ---- the program that logs in: this test program again

#[repr(C)]
struct Conversation {
    ask: Option<extern "C" fn(c_int, *mut *const c_void, *mut *mut c_void, *mut c_void) -> c_int>,
    data: *mut c_void,
}

type Start = unsafe extern "C" fn(
    *const c_char,
    *const c_char,
    *const Conversation,
    *const c_char,
    *mut *mut c_void,
) -> c_int;
type Session = unsafe extern "C" fn(*mut c_void, c_int) -> c_int;
type List = unsafe extern "C" fn(*mut c_void) -> *mut *mut c_char;

/// Loads a function of the system's libpam.
///
/// # Safety
/// `T` is the function's type.
unsafe fn libpam<T: Copy>(name: &CStr) -> T {
    assert_eq!(size_of::<T>(), size_of::<*mut c_void>());
    // SAFETY: libpam has no initialisers that do harm; the two strings end in NUL.
    let function = unsafe {
        let library = libc::dlopen(c"libpam.so.0".as_ptr(), libc::RTLD_NOW);
        assert!(!library.is_null(), "libpam is installed");
        libc::dlsym(library, name.as_ptr())
    };
    assert!(!function.is_null(), "{name:?}");
    // SAFETY: the function has the type `T`, by the caller's promise.
    unsafe { std::mem::transmute_copy(&function) }
}

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn signals() -> String {
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
    status.lines().filter(|l| ["SigBlk", "SigIgn", "SigCgt"].iter().any(|s| l.starts_with(s))).collect()
}

/// Opens and closes a login session, and prints the results on standard output.
#[test]
fn login_program() {
    let Some(services) = std::env::var_os("PAM_TEST_SERVICES") else { return };
    let services = CString::new(services.as_bytes()).unwrap();
    // SAFETY: getuid cannot fail; the entry is copied before another call reads the user database.
    let user = unsafe { CStr::from_ptr((*libc::getpwuid(libc::getuid())).pw_name).to_owned() };
    // SAFETY: the types are those of <security/pam_appl.h>.
    let (start, open, close, end, list) = unsafe {
        (
            libpam::<Start>(c"pam_start_confdir"),
            libpam::<Session>(c"pam_open_session"),
            libpam::<Session>(c"pam_close_session"),
            libpam::<Session>(c"pam_end"),
            libpam::<List>(c"pam_getenvlist"),
        )
    };
    let conversation = Conversation { ask: None, data: null_mut() };
    let mut handle = null_mut();
    // SAFETY: all strings end in NUL and outlive the calls; the handle is used until pam_end.
    unsafe {
        assert_eq!(
            start(c"test".as_ptr(), user.as_ptr(), &conversation, services.as_ptr(), &raw mut handle),
            0
        );
        let before = (threads(), signals());
        let fds = descriptors();
        let begun = Instant::now();
        let opened = open(handle, 0);
        println!("\nopened: {opened}");
        println!("took_ms: {}", begun.elapsed().as_millis());
        println!("descriptors: {}", descriptors() - fds);
        let mut variable = list(handle);
        while !(*variable).is_null() {
            println!("variable: {}", CStr::from_ptr(*variable).to_str().unwrap());
            variable = variable.add(1);
        }
        let begun = Instant::now();
        println!("closed: {}", close(handle, 0));
        println!("close_took_ms: {}", begun.elapsed().as_millis());
        println!("quiet: {}", before == (threads(), signals()));
        println!("ended: {}", end(handle, 0));
    }
}

/// Results of a login.
#[derive(Debug)]
struct Login {
    lines: Vec<(String, String)>,
    stderr: String,
    success: bool,
}

impl Login {
    fn get(&self, key: &str) -> &str {
        self.lines.iter().find(|(k, _)| k == key).map_or("", |(_, v)| v)
    }

    fn variables(&self) -> Vec<&str> {
        self.lines.iter().filter(|(k, _)| k == "variable").map(|(_, v)| v.as_str()).collect()
    }

    /// Asserts that the login worked in time and left no trace.
    fn harmless(&self) {
        assert!(self.success && self.get("opened") == "0" && self.get("closed") == "0", "{self:?}");
        assert_eq!(
            (self.get("quiet"), self.get("descriptors"), self.get("ended")),
            ("true", "0", "0"),
            "{self:?}"
        );
        assert!(self.stderr.is_empty(), "{self:?}");
        for key in ["took_ms", "close_took_ms"] {
            let took = Duration::from_millis(self.get(key).parse().unwrap());
            assert!(took < TIMEOUT + SLACK, "{self:?}");
        }
    }
}

/// Logs in with another build of the module.
fn login_with(folder: &Path, module: &Path, environment: &[(&str, &str)]) -> Login {
    let text = format!(
        "session required pam_permit.so\nsession optional {} min_uid=0 timeout_ms={} socket={folder}/pam.sock \
         environment={folder}/environment\n",
        module.display(),
        TIMEOUT.as_millis(),
        folder = folder.display()
    );
    std::fs::write(folder.join("test"), text).unwrap();
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "login_program", "--nocapture"])
        .env("PAM_TEST_SERVICES", folder)
        .envs(environment.iter().copied())
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let lines = text.lines().filter_map(|l| l.split_once(": ")).map(|(k, v)| (k.into(), v.into())).collect();
    Login { lines, stderr: String::from_utf8(output.stderr).unwrap(), success: output.status.success() }
}

fn login(folder: &Path) -> Login {
    login_with(folder, &module(), &[])
}

// ---- daemons

fn listen(folder: &Path, backlog: c_int) -> UnixListener {
    let path = folder.join("pam.sock");
    // SAFETY: plain system calls on memory that lives here; the descriptor is ours.
    unsafe {
        let fd = libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0);
        let mut address: libc::sockaddr_un = std::mem::zeroed();
        address.sun_family = libc::AF_UNIX as libc::sa_family_t;
        for (to, from) in address.sun_path.iter_mut().zip(path.as_os_str().as_bytes()) {
            *to = *from as c_char;
        }
        let length = size_of::<libc::sockaddr_un>() as libc::socklen_t;
        assert_eq!(libc::bind(fd, (&raw const address).cast(), length), 0);
        assert_eq!(libc::listen(fd, backlog), 0);
        UnixListener::from(OwnedFd::from_raw_fd(fd))
    }
}

/// Starts a daemon that serves the first connection with `serve`.
fn daemon(folder: &Path, serve: impl FnOnce(&mut UnixStream, &[u8]) + Send + 'static) -> JoinHandle<()> {
    let listener = listen(folder, 8);
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut packet = vec![0; 4096];
        let n = stream.read(&mut packet).unwrap();
        serve(&mut stream, &packet[..n]);
    })
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

#[test]
fn a_session_is_opened_and_closed() {
    let folder = folder();
    std::fs::write(folder.path().join("environment"), "NCCL_DEBUG=WARN\nTF_X=1\n").unwrap();
    let listener = listen(folder.path(), 8);
    let daemon = std::thread::spawn(move || {
        let hear = |stream: &mut UnixStream| {
            let mut packet = vec![0; 4096];
            let n = stream.read(&mut packet).unwrap();
            Request::parse(&packet[..n]).unwrap()
        };
        let (mut stream, _) = listener.accept().unwrap();
        let opened = hear(&mut stream);
        stream.write_all(&Reply { session: Some("abcdefghijkl") }.encode()).unwrap();
        let (mut stream, _) = listener.accept().unwrap();
        (opened, hear(&mut stream))
    });
    let login = login_with(folder.path(), &module(), &[("NCCL_DEBUG", "INFO"), ("GPUSESSION_ID", "outer")]);
    login.harmless();
    assert_eq!(login.variables(), ["GPUSESSION_ID=abcdefghijkl", "TF_X=1"], "NCCL_DEBUG is the user's own");
    let (opened, closed) = daemon.join().unwrap();
    let Request::Open(open) = opened else { panic!("{opened:?}") };
    // SAFETY: getuid cannot fail and touches no memory.
    assert_eq!((open.service.as_str(), open.uid), ("test", unsafe { libc::getuid() }));
    assert_eq!(closed, Request::Close);
}

#[test]
fn a_login_needs_no_daemon() {
    let folder = folder();
    login(folder.path()).harmless();
    // A socket whose listener has exited.
    drop(listen(folder.path(), 1));
    let login = login(folder.path());
    login.harmless();
    assert!(login.get("took_ms").parse::<u128>().unwrap() < TIMEOUT.as_millis());
}

#[test]
fn a_hung_daemon_costs_no_more_than_the_deadline() {
    let folder = folder();
    let _listener = listen(folder.path(), 8);
    let login = login(folder.path());
    login.harmless();
    assert!(login.variables().is_empty());
    assert!(login.get("took_ms").parse::<u128>().unwrap() >= TIMEOUT.as_millis() / 2, "it was waited for");
}

#[test]
fn a_full_backlog_costs_no_more_than_the_deadline() {
    let folder = folder();
    let _listener = listen(folder.path(), 0);
    let path = folder.path().join("pam.sock");
    // A backlog of 0 holds one connection that is not accepted yet.
    // SAFETY: plain system calls on memory that lives here.
    let _waiting: Vec<OwnedFd> = (0..4)
        .map(|_| unsafe {
            let fd = libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_NONBLOCK, 0);
            let mut address: libc::sockaddr_un = std::mem::zeroed();
            address.sun_family = libc::AF_UNIX as libc::sa_family_t;
            for (to, from) in address.sun_path.iter_mut().zip(path.as_os_str().as_bytes()) {
                *to = *from as c_char;
            }
            libc::connect(fd, (&raw const address).cast(), size_of::<libc::sockaddr_un>() as libc::socklen_t);
            OwnedFd::from_raw_fd(fd)
        })
        .collect();
    login(folder.path()).harmless();
}

#[test]
fn bad_answers_are_no_answers() {
    let good = Reply { session: Some("x") }.encode();
    let evil =
        String::from_utf8(good.clone()).unwrap().replace("GPUSESSION_ID", "LD_PRELOADxxx").into_bytes();
    let answers: Vec<Vec<u8>> = vec![
        vec![],
        b"garbage".to_vec(),
        vec![0xff; 4096],
        vec![b'g'; MAX_REPLY + 1],
        vec![b'g'; 100_000],
        good[..good.len() - 1].to_vec(),
        [good.as_slice(), b"x"].concat(),
        evil,
    ];
    for answer in answers {
        let folder = folder();
        let size = answer.len();
        let daemon = daemon(folder.path(), move |stream, _| drop(stream.write(&answer)));
        let login = login(folder.path());
        login.harmless();
        assert!(login.variables().is_empty(), "{size} bytes");
        daemon.join().unwrap();
    }
}

#[test]
fn a_daemon_that_drips_is_not_waited_for() {
    let folder = folder();
    let daemon = daemon(folder.path(), |stream, _| {
        let good = Reply { session: Some("x") }.encode();
        // Each byte is a packet of its own, until the module has closed the connection.
        for byte in good.iter().cycle() {
            std::thread::sleep(TIMEOUT / 20);
            // SAFETY: the pointer is to one byte.
            let sent = unsafe {
                let fd = std::os::fd::AsRawFd::as_raw_fd(stream);
                libc::send(fd, (byte as *const u8).cast(), 1, libc::MSG_NOSIGNAL)
            };
            if sent < 0 {
                return;
            }
        }
    });
    let login = login(folder.path());
    login.harmless();
    assert!(login.variables().is_empty());
    daemon.join().unwrap();
}

#[test]
fn a_daemon_that_goes_away_raises_no_signal() {
    let folder = folder();
    let listener = listen(folder.path(), 8);
    let daemon = std::thread::spawn(move || drop(listener.accept()));
    let login = login(folder.path());
    login.harmless();
    daemon.join().unwrap();
}

#[test]
fn a_panic_in_the_module_does_not_stop_the_login() {
    let folder = folder();
    login_with(folder.path(), &built("../examples/libpam_panicking.so"), &[]).harmless();
}

#[test]
fn the_module_exports_its_entries_and_cannot_start_threads() {
    let symbols = |arguments: &[&str]| {
        let output = Command::new("nm").arg("-D").args(arguments).arg(module()).output().expect("binutils");
        assert!(output.status.success());
        let text = String::from_utf8(output.stdout).unwrap();
        text.lines().filter_map(|l| l.split_whitespace().last().map(str::to_owned)).collect::<Vec<_>>()
    };
    assert_eq!(symbols(&["--defined-only"]), ["pam_sm_close_session", "pam_sm_open_session"]);
    for symbol in symbols(&["--undefined-only"]) {
        let name = symbol.split('@').next().unwrap();
        let forbidden =
            ["pthread_create", "fork", "clone", "posix_spawn", "setenv", "putenv", "sigaction", "signal"];
        assert!(!forbidden.contains(&name), "{symbol}");
    }
}
