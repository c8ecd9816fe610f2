//! Restrictions of a worker, which is presumed to be controlled by its client, and of helpers that
//! read what clients send.
//!
//! Before it serves a client, a worker gives up these rights:
//! * capabilities, all of them;
//! * files, except those that a CUDA driver needs, and networks (Landlock);
//! * sockets, except those that it receives, and other processes, new programs, changes of modes,
//!   owners and times by path, and system calls that no driver's process makes (seccomp);
//! * core dumps and large files (resource limits).

use gpusession_proto::supervise::Isolation;
use landlock::ABI;
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit, setrlimit};

mod debugger;
mod denied;
mod files;
mod listed;

pub use debugger::give_stand_ins;
pub use denied::Calls;
use denied::calls_only;
use files::files_only;
pub use files::{Files, Gpus, Mps};
pub use listed::keep_journal;

/// Limits of open files, and of the bytes of one written file.
const MAX_FILES: u64 = 4096;
const MAX_FILE_BYTES: u64 = 16 << 30;

/// Returns the measures that a helper lacks after it has restricted itself; an error with
/// [`Isolation::Require`] if there are any.
///
/// `isolation` is the server's decision; `restrict` returns what this host does not support.
pub fn of_helper(
    isolation: Isolation,
    restrict: impl FnOnce(ABI) -> Vec<String>,
) -> Result<Vec<String>, String> {
    let lacking = if isolation == Isolation::Off { Vec::new() } else { restrict(landlock()) };
    if isolation == Isolation::Require && !lacking.is_empty() {
        return Err(format!("isolation = \"require\": not possible: {}", lacking.join("; ")));
    }
    Ok(lacking)
}

/// Returns the newest version of Landlock that this kernel and this program support.
pub fn landlock() -> ABI {
    const VERSION: libc::c_uint = 1 << 0;
    let none = std::ptr::null::<libc::c_void>();
    // SAFETY: with this flag the call reads no memory and creates nothing.
    match unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, none, 0_usize, VERSION) } {
        1 => ABI::V1,
        2 => ABI::V2,
        3 => ABI::V3,
        4 => ABI::V4,
        5 => ABI::V5,
        6.. => ABI::V6,
        _ => ABI::Unsupported,
    }
}

/// Restricts capabilities, files, core dumps and sizes; returns what this host does not support.
///
/// Applied to the first thread, before the driver starts others.
pub fn before_driver(files: &Files<'_>, landlock: ABI) -> Vec<String> {
    let said = |what: &'static str| move |e: String| format!("{what}: {e}");
    // A root without capabilities keeps the pinned memory that it could have had. Others may not
    // raise the limit.
    let _ = setrlimit(Resource::RLIMIT_MEMLOCK, RLIM_INFINITY, RLIM_INFINITY);
    // One byte: zero would still start a collector that `core_pattern` names.
    let parts = [
        // Out of memory, the kernel kills this program before the server and others.
        // A client that controls the worker can take this back.
        std::fs::write("/proc/self/oom_score_adj", "500").map_err(|e| said("oom_score_adj")(e.to_string())),
        at_most(Resource::RLIMIT_CORE, 1).map_err(said("core dumps")),
        at_most(Resource::RLIMIT_FSIZE, MAX_FILE_BYTES).map_err(said("file size")),
        at_most(Resource::RLIMIT_NOFILE, MAX_FILES).map_err(said("open files")),
        files_only(files, landlock).map_err(said("landlock")),
        no_capabilities().map_err(|e| said("capabilities")(e.to_string())),
    ];
    parts.into_iter().filter_map(Result::err).collect()
}

/// Restricts this process before it becomes a program of MPS; returns what this host does not
/// support.
///
/// A server of MPS works for all programs of a domain, so it keeps the limits of its parent.
pub fn before_mps(files: &Files<'_>, landlock: ABI) -> Vec<String> {
    let parts = [
        at_most(Resource::RLIMIT_CORE, 1).map_err(|e| format!("core dumps: {e}")),
        files_only(files, landlock).map_err(|e| format!("landlock: {e}")),
        no_capabilities().map_err(|e| format!("capabilities: {e}")),
        before_client(Calls::Daemon, landlock),
    ];
    parts.into_iter().filter_map(Result::err).collect()
}

/// Lowers a limit; a lower one stays.
fn at_most(resource: Resource, limit: u64) -> Result<(), String> {
    let (_, most) = getrlimit(resource).map_err(|e| e.to_string())?;
    setrlimit(resource, most.min(limit), most.min(limit)).map_err(|e| e.to_string())
}

/// Gives up all capabilities, which a server that root runs would pass on.
fn no_capabilities() -> std::io::Result<()> {
    #[repr(C)]
    struct Header {
        version: u32,
        pid: i32,
    }
    const VERSION_3: u32 = 0x2008_0522;
    // Words for effective, permitted and inheritable capabilities, for each 32 of them.
    const NONE: [[u32; 3]; 2] = [[0; 3]; 2];
    let header = Header { version: VERSION_3, pid: 0 };
    // SAFETY: prctl takes plain numbers; capset reads the two structures, which have the kernel's
    // layout.
    unsafe {
        // The first error is past the last capability, or without the right to drop any.
        let _ = (0..64).find(|capability| libc::prctl(libc::PR_CAPBSET_DROP, *capability, 0, 0, 0) != 0);
        libc::prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
        match libc::syscall(libc::SYS_capset, &raw const header, NONE.as_ptr()) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        }
    }
}

/// Restricts the system calls of all threads, once the driver is warm.
pub fn before_client(calls: Calls, landlock: ABI) -> Result<(), String> {
    calls_only(calls, landlock).map_err(|e| format!("seccomp: {e}"))
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use super::*;

    /// Set in a test's own process.
    const ALONE: &str = "CONTAINMENT_TEST";

    /// Runs a test in a process of its own, since a process cannot regain a right.
    fn alone(test: &str, variables: &[(&str, &Path)]) {
        let done = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", &format!("containment::tests::{test}"), "--nocapture"])
            .env(ALONE, "1")
            .envs(variables.iter().copied())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&done.stdout);
        assert!(done.status.success() && said.contains("contained"), "{done:?}");
    }

    fn files(mps: Mps) -> Files<'static> {
        let gpus = Gpus::These(Vec::new());
        Files { driver: "/usr/lib/libcuda.so.1", gpus, mps }
    }

    fn denied(result: i64, what: &str) {
        let error = std::io::Error::last_os_error().raw_os_error();
        assert!(result == -1 && error == Some(libc::EPERM), "{what}: {result} {error:?}");
    }

    #[test]
    fn containment_denies_files_sockets_and_signals() {
        if std::env::var_os(ALONE).is_none() {
            let shared = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
            let test = "containment_denies_files_sockets_and_signals";
            return alone(test, &[("SHARED", shared.path())]);
        }
        let files = before_driver(&files(Mps::None), landlock());
        let calls = before_client(Calls::Own, landlock());
        // A kernel without Landlock reports that.
        match files.as_slice() {
            [] => {
                let denied = std::fs::read_dir("/root").or_else(|_| std::fs::read_dir("/home"));
                assert_eq!(denied.unwrap_err().kind(), std::io::ErrorKind::PermissionDenied);
                assert!(std::fs::write("/tmp/containment-test", "x").is_err());
                assert!(std::fs::write("/dev/shm/containment-test", "x").is_err());
                let denied = std::fs::File::open(std::env::var("SHARED").unwrap()).unwrap_err();
                assert_eq!(denied.kind(), std::io::ErrorKind::PermissionDenied);
                assert!(std::fs::read("/proc/self/stat").is_ok() && std::fs::read("/dev/null").is_ok());
                // As the driver names its threads.
                let name = |thread: i32| std::fs::write(format!("/proc/self/task/{thread}/comm"), "named");
                name(nix::unistd::gettid().as_raw()).unwrap();
                let other = move || name(nix::unistd::gettid().as_raw());
                std::thread::spawn(other).join().unwrap().unwrap();
                assert!(std::fs::write("/proc/self/oom_score_adj", "0").is_err());
                assert!(name(1).is_err(), "another process");
                facts_of_the_machine_alone();
            }
            lacking => assert!(lacking.len() == 1 && lacking[0].starts_with("landlock: "), "{lacking:?}"),
        }
        calls.unwrap();
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let mut sets = status.lines().filter(|line| line.starts_with("Cap"));
        assert!(sets.clone().count() >= 4, "{status}");
        // Without capabilities a process cannot lower this bound, which limits nothing then.
        let root = nix::unistd::geteuid().is_root();
        let none = |line: &str| line.ends_with("\t0000000000000000") || line.starts_with("CapBnd") && !root;
        assert!(sets.all(none), "{status}");
        no_hidden_file();
        assert!(std::net::UdpSocket::bind("127.0.0.1:0").is_err());
        assert!(std::os::unix::net::UnixDatagram::unbound().is_err());
        assert!(std::os::unix::net::UnixDatagram::pair().is_err());
        let raw = libc::SOCK_RAW | libc::SOCK_CLOEXEC;
        // SAFETY: the array has room for two descriptors.
        let pair = unsafe { libc::socketpair(libc::AF_UNIX, raw, 0, [0; 2].as_mut_ptr()) };
        denied(pair.into(), "datagrams by another name");
        let (one, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(std::process::Command::new("/bin/true").spawn().is_err());
        std::thread::spawn(|| {}).join().unwrap();
        // SAFETY: plain system calls; the filter refuses those that would use memory before they
        // read it.
        unsafe {
            let (own, parent) = (libc::getpid(), libc::getppid());
            denied(libc::kill(parent, 0).into(), "kill");
            denied(libc::syscall(libc::SYS_tkill, parent, 0), "tkill");
            denied(libc::syscall(libc::SYS_tgkill, parent, parent, 0), "tgkill");
            assert_eq!(libc::syscall(libc::SYS_tgkill, own, libc::gettid(), 0), 0, "its own thread");
            let null = std::ptr::null::<libc::rlimit>();
            let limit = |pid| libc::prlimit(pid, libc::RLIMIT_NOFILE, null, null.cast_mut());
            denied(limit(parent).into(), "prlimit");
            assert_eq!((limit(0), limit(own)), (0, 0));
            let mut cpus: libc::cpu_set_t = std::mem::zeroed();
            assert_eq!(libc::sched_getaffinity(0, size_of_val(&cpus), &mut cpus), 0);
            let runs_on = |pid| libc::sched_setaffinity(pid, size_of_val(&cpus), &cpus);
            let plain = libc::sched_param { sched_priority: 0 };
            for (other, of) in [(parent, "parent"), (libc::gettid(), "thread"), (-1, "nobody")] {
                denied(runs_on(other).into(), of);
                denied(libc::sched_setscheduler(other, libc::SCHED_OTHER, &plain).into(), of);
                denied(libc::sched_setparam(other, &plain).into(), of);
                denied(libc::syscall(libc::SYS_sched_setattr, other, 0, 0), of);
                denied(libc::setpriority(libc::PRIO_PROCESS, other as u32, 1).into(), of);
                denied(libc::syscall(libc::SYS_ioprio_set, 1, other, 0), of);
            }
            assert_eq!(runs_on(0), 0);
            assert_eq!(libc::sched_setscheduler(0, libc::SCHED_OTHER, &plain), 0);
            assert_eq!(libc::setpriority(libc::PRIO_PROCESS, 0, 19), 0);
            // In a worker, the first thread gives up capabilities. In a test of root's, it has them
            // all, so that the kernel protects it from this thread.
            if !root {
                assert_eq!(runs_on(own), 0);
                assert_eq!(libc::setpriority(libc::PRIO_PROCESS, own as u32, 19), 0);
            }
            denied(libc::setpriority(libc::PRIO_USER, 0, 1).into(), "all of the user");
            denied(libc::setpriority(libc::PRIO_PGRP, 0, 1).into(), "all of the group");
            denied(libc::syscall(libc::SYS_ioprio_set, 3, 0, 0), "all of the user");
            denied(libc::fcntl(0, libc::F_SETOWN, parent).into(), "fcntl");
            denied(libc::ioctl(0, 0x8901, &parent).into(), "ioctl");
            denied(libc::fork().into(), "fork");
            denied(libc::shmget(libc::IPC_PRIVATE, 4096, 0o600).into(), "shmget");
            denied(libc::semget(libc::IPC_PRIVATE, 1, 0o600).into(), "semget");
            denied(libc::msgget(libc::IPC_PRIVATE, 0o600).into(), "msgget");
            denied(libc::syscall(libc::SYS_ptrace, libc::PTRACE_TRACEME, 0, 0, 0), "ptrace");
            denied(libc::syscall(libc::SYS_process_vm_readv, parent, 0, 0, 0, 0, 0), "process_vm_readv");
            denied(libc::syscall(libc::SYS_pidfd_getfd, 0, 0, 0), "pidfd_getfd");
            denied(libc::syscall(libc::SYS_execve, 0, 0, 0), "execve");
            denied(libc::syscall(libc::SYS_unshare, 0), "unshare");
            denied(libc::syscall(libc::SYS_io_uring_setup, 0, 0), "io_uring_setup");
            denied(libc::listen(std::os::fd::AsRawFd::as_raw_fd(&one), 1).into(), "listen");
            #[cfg(target_arch = "x86_64")]
            denied(libc::syscall(0x4000_0000 | libc::SYS_getpid), "x32");
        }
        println!("contained");
        std::process::exit(0);
    }

    /// Reads what a driver needs of `/proc` and `/sys`, and tries what tells about others.
    fn facts_of_the_machine_alone() {
        for file in ["status", "cmdline", "stat", "cgroup"] {
            let other = std::fs::read(format!("/proc/{}/{file}", std::os::unix::process::parent_id()));
            assert_eq!(other.unwrap_err().kind(), std::io::ErrorKind::PermissionDenied, "{file}");
        }
        for file in ["/proc/cpuinfo", "/proc/meminfo", "/proc/sys/kernel/osrelease", "/proc/mounts"] {
            assert!(std::fs::read(file).is_ok(), "{file}");
        }
        assert!(std::fs::read("/sys/devices/system/cpu/online").is_ok());
        for file in ["/proc/interrupts", "/proc/loadavg", "/proc/locks", "/proc/sys/fs/file-nr"] {
            let other = std::fs::read(file).unwrap_err();
            assert_eq!(other.kind(), std::io::ErrorKind::PermissionDenied, "{file}");
        }
        for folder in ["/sys/fs", "/sys/kernel", "/sys/class"] {
            let other = std::fs::read_dir(folder).unwrap_err();
            assert_eq!(other.kind(), std::io::ErrorKind::PermissionDenied, "{folder}");
        }
    }

    /// Tries to make a file without a name, and to keep the server from listing open files.
    fn no_hidden_file() {
        let flags = libc::O_TMPFILE | libc::O_RDWR;
        // SAFETY: the path ends with NUL; the calls take plain numbers otherwise.
        unsafe {
            denied(libc::open(c"/dev/shm".as_ptr(), flags, 0o600).into(), "a file without a name");
            #[cfg(target_arch = "x86_64")]
            denied(libc::syscall(libc::SYS_open, c"/dev/shm".as_ptr(), flags, 0o600), "the older open");
            let how = std::ptr::null::<libc::open_how>();
            let size = size_of::<libc::open_how>();
            assert_eq!(libc::syscall(libc::SYS_openat2, libc::AT_FDCWD, c"/".as_ptr(), how, size), -1);
            assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::ENOSYS));
            denied(libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0).into(), "dumpable");
        }
        assert!(std::fs::read("/proc/self/status").is_ok());
    }

    /// Tries each call that changes what a path names, or watches it.
    fn no_change_by_path() {
        let null = std::ptr::null::<libc::c_char>();
        let here = libc::AT_FDCWD;
        let path = c"/".as_ptr();
        // SAFETY: the filter refuses these calls before they read memory, and without it a null
        // path is an error. The path of `utimensat` ends with NUL.
        unsafe {
            #[cfg(target_arch = "x86_64")]
            for call in [
                libc::SYS_chmod,
                libc::SYS_chown,
                libc::SYS_lchown,
                libc::SYS_utime,
                libc::SYS_utimes,
                libc::SYS_futimesat,
            ] {
                denied(libc::syscall(call, null, 0, 0, 0), &format!("call {call}"));
            }
            for call in [
                libc::SYS_setxattr,
                libc::SYS_lsetxattr,
                libc::SYS_removexattr,
                libc::SYS_lremovexattr,
                libc::SYS_fanotify_init,
            ] {
                denied(libc::syscall(call, null, null, null, 0, 0), &format!("call {call}"));
            }
            // The last numbers are fchmodat2, setxattrat, removexattrat and file_setattr.
            for call in [libc::SYS_fchmodat, libc::SYS_fchownat, 452, 463, 466, 469] {
                denied(libc::syscall(call, here, null, null, 0, 0), &format!("call {call}"));
            }
            denied(libc::syscall(libc::SYS_inotify_add_watch, -1, null, 0), "inotify");
            denied(libc::utimensat(here, path, std::ptr::null(), 0).into(), "utimensat");
        }
        let file = nix::sys::memfd::memfd_create(c"own", nix::sys::memfd::MFdFlags::empty()).unwrap();
        let file = std::fs::File::from(file);
        file.set_times(std::fs::FileTimes::new().set_modified(std::time::SystemTime::UNIX_EPOCH)).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        file.set_permissions(mode).unwrap();
    }

    /// Tries to make a later `close`, also one of another process, wait.
    fn no_close_that_waits(socket: &impl std::os::fd::AsFd) {
        use nix::sys::socket::{setsockopt, sockopt};
        let linger = libc::linger { l_onoff: 1, l_linger: 86_400 };
        assert_eq!(setsockopt(socket, sockopt::Linger, &linger), Err(nix::errno::Errno::EPERM));
        setsockopt(socket, sockopt::SndBuf, &65_536).unwrap();
    }

    #[test]
    fn driver_may_open_the_pipe_of_its_core_dump() {
        if std::env::var_os(ALONE).is_none() {
            return alone("driver_may_open_the_pipe_of_its_core_dump", &[]);
        }
        before_driver(&files(Mps::None), landlock());
        before_client(Calls::Own, landlock()).unwrap();
        crate::core_dump::tests::passes_a_dump_on();
        println!("contained");
        std::process::exit(0);
    }

    #[test]
    fn containment_denies_changes_by_path_and_a_close_that_waits() {
        if std::env::var_os(ALONE).is_none() {
            return alone("containment_denies_changes_by_path_and_a_close_that_waits", &[]);
        }
        before_driver(&files(Mps::None), landlock());
        before_client(Calls::Own, landlock()).unwrap();
        no_change_by_path();
        no_close_that_waits(&std::os::unix::net::UnixStream::pair().unwrap().0);
        println!("contained");
        std::process::exit(0);
    }

    #[test]
    fn a_helper_that_parks_reaches_processes_and_starts_none() {
        if std::env::var_os(ALONE).is_none() {
            return alone("a_helper_that_parks_reaches_processes_and_starts_none", &[]);
        }
        before_client(Calls::Park, landlock()).unwrap();
        no_change_by_path();
        no_close_that_waits(&std::os::unix::net::UnixStream::pair().unwrap().0);
        assert!(std::net::UdpSocket::bind("127.0.0.1:0").is_err(), "a network");
        // SAFETY: plain system calls without memory.
        unsafe {
            let parent = libc::getppid();
            assert_eq!(libc::kill(parent, 0), 0);
            denied(libc::fork().into(), "fork");
            denied(libc::syscall(libc::SYS_execve, 0, 0, 0), "execve");
            denied(libc::syscall(libc::SYS_io_uring_setup, 0, 0), "io_uring_setup");
            denied(libc::shmget(libc::IPC_PRIVATE, 4096, 0o600).into(), "shmget");
        }
        println!("contained");
        std::process::exit(0);
    }

    #[test]
    fn a_daemon_of_mps_starts_programs_of_its_own_user() {
        if std::env::var_os(ALONE).is_none() {
            return alone("a_daemon_of_mps_starts_programs_of_its_own_user", &[]);
        }
        before_client(Calls::Daemon, landlock()).unwrap();
        no_close_that_waits(&std::os::unix::net::UnixStream::pair().unwrap().0);
        assert!(std::net::UdpSocket::bind("127.0.0.1:0").is_err(), "a network");
        assert!(std::process::Command::new("/bin/true").status().unwrap().success());
        // SAFETY: plain system calls; the filter refuses those that would use memory before they
        // read it, and the path ends with NUL.
        unsafe {
            let (user, parent) = (libc::getuid(), libc::getppid());
            assert_eq!(libc::setuid(user), 0);
            denied(libc::setuid(user + 1).into(), "another user");
            denied(libc::setresuid(user, user, user).into(), "setresuid");
            assert_eq!(libc::chmod(c"/no/such/file".as_ptr(), 0o777), 0, "pretended");
            denied(libc::chown(c"/no/such/file".as_ptr(), user, 0).into(), "chown");
            denied(libc::syscall(libc::SYS_ptrace, libc::PTRACE_TRACEME, 0, 0, 0), "ptrace");
            denied(libc::syscall(libc::SYS_process_vm_readv, parent, 0, 0, 0, 0, 0), "process_vm_readv");
            denied(libc::syscall(libc::SYS_pidfd_getfd, 0, 0, 0), "pidfd_getfd");
            denied(libc::syscall(libc::SYS_io_uring_setup, 0, 0), "io_uring_setup");
            let null = std::ptr::null::<libc::rlimit>();
            denied(libc::prlimit(parent, libc::RLIMIT_NOFILE, null, null.cast_mut()).into(), "prlimit");
        }
        println!("contained");
        std::process::exit(0);
    }

    #[test]
    fn a_helper_that_lacks_a_measure_serves_only_if_the_server_says_so() {
        let lacks = |_| vec!["landlock: missing".into()];
        assert_eq!(of_helper(Isolation::Off, |_| unreachable!()), Ok(Vec::new()));
        assert_eq!(of_helper(Isolation::Try, lacks), Ok(vec!["landlock: missing".into()]));
        assert_eq!(of_helper(Isolation::Require, |_| Vec::new()), Ok(Vec::new()));
        let why = of_helper(Isolation::Require, lacks).unwrap_err();
        assert!(why.contains("require") && why.contains("landlock: missing"), "{why}");
    }

    /// Tries to connect an adopted connection to another port.
    fn no_other_peer(data: &std::net::TcpStream, service: &std::net::TcpListener) {
        use std::os::fd::AsRawFd as _;
        let fd = data.as_raw_fd();
        let port = service.local_addr().unwrap().port().to_be();
        let address = libc::sockaddr_in {
            sin_family: libc::AF_INET as u16,
            sin_port: port,
            sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes([127, 0, 0, 1]) },
            sin_zero: [0; 8],
        };
        let none = libc::sockaddr_in { sin_family: libc::AF_UNSPEC as u16, ..address };
        let len = size_of_val(&address) as u32;
        let connect = |to: &libc::sockaddr_in| {
            // SAFETY: the address has this length.
            unsafe { libc::connect(fd, std::ptr::from_ref(to).cast(), len) }
        };
        // SAFETY: an all-zero message is valid; the filter refuses these calls before they read
        // the address, which has this length.
        unsafe {
            let to = std::ptr::from_ref(&address).cast();
            let flags = libc::MSG_FASTOPEN | libc::MSG_NOSIGNAL;
            denied(libc::sendto(fd, c"x".as_ptr().cast(), 1, flags, to, len) as i64, "sendto");
            let mut message: libc::mmsghdr = std::mem::zeroed();
            denied(libc::sendmsg(fd, &message.msg_hdr, flags) as i64, "sendmsg");
            denied(libc::sendmmsg(fd, &mut message, 1, flags).into(), "sendmmsg");
        }
        // The kernel always lets a connection be dissolved.
        connect(&none);
        // Before version 4, Landlock knows no networks.
        if landlock() >= ABI::V4 {
            assert_eq!(connect(&address), -1, "another peer");
            let error = std::io::Error::last_os_error().raw_os_error();
            assert_eq!(error, Some(libc::EACCES), "another peer");
            service.set_nonblocking(true).unwrap();
            assert!(service.accept().is_err(), "a connection of the worker's");
        }
    }

    #[test]
    fn under_mps_a_worker_reaches_a_daemon_and_no_network() {
        use std::net::{TcpListener, TcpStream};
        use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
        const PIPES: &str = "CUDA_MPS_PIPE_DIRECTORY";
        if std::env::var_os(ALONE).is_none() {
            let folder = tempfile::tempdir().unwrap();
            let pipes = folder.path().join("pipes");
            std::fs::create_dir(&pipes).unwrap();
            let _daemon = UnixListener::bind(pipes.join("control")).unwrap();
            let test = "under_mps_a_worker_reaches_a_daemon_and_no_network";
            return alone(test, &[(PIPES, pipes.as_path())]);
        }
        let pipes = PathBuf::from(std::env::var_os(PIPES).unwrap());
        // A program's connection, and a service that only the server's host reaches.
        let service = TcpListener::bind("127.0.0.1:0").unwrap();
        let program = TcpListener::bind("127.0.0.1:0").unwrap();
        let _client = TcpStream::connect(program.local_addr().unwrap()).unwrap();
        let (data, _) = program.accept().unwrap();
        let files = before_driver(&files(Mps::Client), landlock());
        before_client(Calls::Mps, landlock()).unwrap();
        no_change_by_path();
        no_close_that_waits(&data);
        no_other_peer(&data, &service);
        UnixStream::connect(pipes.join("control")).unwrap();
        UnixDatagram::unbound().unwrap();
        if files.is_empty() {
            std::fs::write(pipes.join("log"), "x").unwrap();
            assert!(std::fs::write(pipes.with_file_name("beside"), "x").is_err());
        }
        assert!(std::net::UdpSocket::bind("127.0.0.1:0").is_err(), "a network");
        assert!(UnixListener::bind(pipes.join("own")).is_err(), "to be reached");
        // SAFETY: plain system calls without memory.
        unsafe {
            denied(libc::socket(libc::AF_NETLINK, libc::SOCK_RAW, 0).into(), "netlink");
            denied(libc::kill(libc::getppid(), 0).into(), "kill");
            denied(libc::fork().into(), "fork");
        }
        println!("contained");
        std::process::exit(0);
    }

    #[test]
    fn the_first_landlock_empties_no_file() {
        const FILE: &str = "CONTAINMENT_TEST_FILE";
        if std::env::var_os(ALONE).is_none() {
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), "kept").unwrap();
            alone("the_first_landlock_empties_no_file", &[(FILE, file.path())]);
            assert_eq!(std::fs::read(file.path()).unwrap(), b"kept");
            return;
        }
        let file = PathBuf::from(std::env::var_os(FILE).unwrap());
        // A folder that the worker reads.
        let driver = file.with_file_name("libcuda.so.1").display().to_string();
        let readable = Files { driver: &driver, ..files(Mps::None) };
        let lacking = before_driver(&readable, ABI::V1);
        before_client(Calls::Own, ABI::V1).unwrap();
        let landlocked = landlock() != ABI::Unsupported;
        assert_eq!(lacking.is_empty(), landlocked, "{lacking:?}");
        let path = std::ffi::CString::new(file.as_os_str().as_encoded_bytes()).unwrap();
        // SAFETY: the path ends with NUL; the calls return plain numbers.
        unsafe {
            denied(libc::truncate(path.as_ptr(), 0).into(), "truncate");
            let flags = libc::O_RDONLY | libc::O_TRUNC;
            denied(libc::open(path.as_ptr(), flags).into(), "open");
            denied(libc::syscall(libc::SYS_open, path.as_ptr(), flags), "the older open");
            assert_eq!(libc::syscall(libc::SYS_openat2, libc::AT_FDCWD, path.as_ptr(), 0, 24), -1);
            assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::ENOSYS));
        }
        assert_eq!(std::fs::write(&file, "x").is_err(), landlocked);
        println!("contained");
        std::process::exit(0);
    }
}
