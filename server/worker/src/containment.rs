//! Restrictions of a worker, which is presumed to be controlled by its client, and of helpers that
//! read what clients send.
//!
//! Before it serves a client, a worker gives up these rights:
//! * capabilities, all of them;
//! * files, except those that a CUDA driver needs, and networks (Landlock);
//! * sockets, except those that it receives, and other processes, new programs, changes of modes,
//!   owners and times by path, and system calls that no driver's process makes (seccomp);
//! * core dumps and large files (resource limits).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use gpusession_proto::supervise::{Isolation, Start};
use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, PathFd, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetError, RulesetStatus, Scope, path_beneath_rules,
};
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit, setrlimit};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    apply_filter_all_threads,
};

use crate::devices;

mod listed;
pub use listed::keep_journal;

/// Readable and executable files.
///
/// These are libraries, facts about the machine for the driver, and tables of the loader and the
/// resolver.
const READABLE_FILES: &[&str] = &[
    "/usr",
    "/lib",
    "/lib64",
    "/opt",
    "/proc",
    "/sys",
    "/run/nvidia-persistenced",
    "/etc/ld.so.cache",
    "/etc/nvidia",
    "/etc/localtime",
    "/etc/nsswitch.conf",
    "/etc/passwd",
    "/etc/group",
];
/// Writable files in addition to the lease's GPUs.
///
/// These are devices that every process may use, and this process's own threads. NVIDIA's driver
/// sets the names of its threads; a failure there fails `cuInit`.
const WRITE: &[&str] = &["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", OWN_THREADS];
/// Folder whose existing files are readable and writable.
///
/// Only clients of MPS may create files in it, since no account would count them.
const SHARED_MEMORY: &str = "/dev/shm";
const OWN_THREADS: &str = "/proc/self/task";
/// Limits of open files, and of the bytes of one written file.
const MAX_FILES: u64 = 4096;
const MAX_FILE_BYTES: u64 = 16 << 30;

/// Files that a process needs in addition to those of every driver's process.
#[derive(Default)]
pub struct Files<'a> {
    /// The driver's library.
    pub driver: &'a str,
    pub gpus: Gpus,
    /// Whether the process is a client of MPS.
    pub mps: bool,
}

/// GPUs whose device files a process opens.
#[derive(Default)]
pub enum Gpus {
    #[default]
    All,
    /// By UUID.
    These(Vec<[u8; 16]>),
}

impl<'a> From<&'a Start> for Files<'a> {
    fn from(start: &'a Start) -> Self {
        Self {
            driver: &start.driver,
            gpus: Gpus::These(start.devices.iter().map(|device| device.uuid).collect()),
            mps: start.mps,
        }
    }
}

/// System calls that a process needs in addition to those of every driver's process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Calls {
    /// None.
    Own,
    /// Local sockets: the driver connects to the MPS daemon as long as the program runs.
    ///
    /// The server answers no worker on its administration socket. Landlock keeps an adopted
    /// connection from other peers, from version 4 on: no filter sees an address.
    Mps,
    /// Local sockets and other processes, for the helper that parks a worker.
    Park,
}

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

fn files_only(files: &Files<'_>, abi: ABI) -> Result<(), String> {
    // A rule holds for an inode, and /proc makes another inode of a folder that no descriptor keeps
    // open.
    std::mem::forget(PathFd::new(OWN_THREADS).map_err(|e| e.to_string())?);
    let said = |e: landlock::RulesetError| e.to_string();
    let own = std::env::current_exe().ok();
    let read = READABLE_FILES
        .iter()
        .map(Path::new)
        .chain(Path::new(files.driver).parent())
        .chain(own.as_deref().and_then(Path::parent));
    // A driver's folder may consist of links.
    let target = std::fs::canonicalize(files.driver).ok();
    let target = target.as_deref().and_then(Path::parent);
    let runtime = std::env::var("XDG_RUNTIME_DIR").ok();
    // The folder in which an MPS daemon listens, if one runs.
    let pipes = std::env::var("CUDA_MPS_PIPE_DIRECTORY").ok();
    let write = WRITE.iter().copied().chain(runtime.as_deref());
    let compiled = std::env::var("CUDA_CACHE_PATH").ok();
    let (gpus, known) = match &files.gpus {
        // Clients of MPS open further devices, which no test has determined: allow all of them.
        _ if files.mps => (vec!["/dev".into()], Ok(())),
        Gpus::These(uuids) => devices::of_gpus(uuids),
        Gpus::All => (devices::all(), Ok(())),
    };
    let write = write.chain(pipes.as_deref()).chain(compiled.as_deref()).map(Path::new);
    let write = write.chain(gpus.iter().map(PathBuf::as_path));
    let shared = match files.mps {
        true => AccessFs::from_all(abi),
        false => {
            let files = AccessFs::ReadFile | AccessFs::ReadDir | AccessFs::WriteFile | AccessFs::Truncate;
            files & AccessFs::from_all(abi)
        }
    };
    let status = handled(files.mps, abi)
        .and_then(Ruleset::create)
        .and_then(|r| r.add_rules(path_beneath_rules(read.chain(target), AccessFs::from_read(abi))))
        .and_then(|r| r.add_rules(path_beneath_rules(write, AccessFs::from_all(abi))))
        .and_then(|r| r.add_rules(path_beneath_rules([SHARED_MEMORY], shared)))
        .and_then(|r| r.restrict_self())
        .map_err(said)?;
    match status.ruleset {
        RulesetStatus::FullyEnforced => known,
        RulesetStatus::PartiallyEnforced => Err("this kernel enforces only a part of the rules".into()),
        RulesetStatus::NotEnforced => Err("this kernel lacks it, or this container forbids it".into()),
    }
}

/// Returns the rights that a process has by rules only: files, connections, and other processes.
///
/// No rule allows a connection.
fn handled(mps: bool, abi: ABI) -> Result<Ruleset, RulesetError> {
    let mut all = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(abi))?;
    if abi >= ABI::V4 {
        all = all.handle_access(AccessNet::from_all(abi))?;
    }
    if abi >= ABI::V6 {
        // No test has determined whether a client of MPS uses the abstract sockets of NVIDIA's
        // daemons, which no rule could allow.
        all = all.scope(if mps { Scope::Signal.into() } else { Scope::from_all(abi) })?;
    }
    Ok(all)
}

/// Restricts the system calls of all threads, once the driver is warm.
pub fn before_client(calls: Calls, landlock: ABI) -> Result<(), String> {
    calls_only(calls, landlock).map_err(|e| format!("seccomp: {e}"))
}

/// System calls that reach other processes, answered with EPERM; the helper that parks needs them.
const CROSS_PROCESS_CALLS: &[i64] = &[
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_pidfd_getfd,
    libc::SYS_pidfd_send_signal,
    libc::SYS_kill,
    libc::SYS_tkill,
    libc::SYS_rt_sigqueueinfo,
    libc::SYS_rt_tgsigqueueinfo,
];

/// System calls that are answered with EPERM.
///
/// They start programs, widen this process's rights or change how other processes run.
const FORBIDDEN_CALLS: &[i64] = &[
    libc::SYS_process_madvise,
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_listen,
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_unshare,
    libc::SYS_setns,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_move_mount,
    libc::SYS_open_tree,
    libc::SYS_fsopen,
    libc::SYS_open_by_handle_at,
    libc::SYS_name_to_handle_at,
    // System V and POSIX objects outlive the process that created them.
    libc::SYS_shmget,
    libc::SYS_shmat,
    libc::SYS_shmctl,
    libc::SYS_semget,
    libc::SYS_semop,
    libc::SYS_semtimedop,
    libc::SYS_semctl,
    libc::SYS_msgget,
    libc::SYS_msgsnd,
    libc::SYS_msgrcv,
    libc::SYS_msgctl,
    libc::SYS_mq_open,
    libc::SYS_mq_unlink,
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_keyctl,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_sethostname,
    libc::SYS_syslog,
    libc::SYS_quotactl,
    libc::SYS_personality,
    libc::SYS_setuid,
    libc::SYS_setgid,
    libc::SYS_setresuid,
    libc::SYS_setresgid,
    libc::SYS_setgroups,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_fork,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_vfork,
];

/// System calls that change or watch what a path names, answered with EPERM.
///
/// Landlock does not see them, and a worker has the server's user: it could open the administration
/// socket to all users, or close the server's state to the server. The error is that of another
/// user's file, which a driver may meet anywhere. The calls by descriptor stay, for files that
/// Landlock let the process open.
const PATH_METADATA: &[i64] = &[
    #[cfg(target_arch = "x86_64")]
    libc::SYS_chmod,
    libc::SYS_fchmodat,
    FCHMODAT2,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_chown,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_lchown,
    libc::SYS_fchownat,
    libc::SYS_setxattr,
    libc::SYS_lsetxattr,
    SETXATTRAT,
    libc::SYS_removexattr,
    libc::SYS_lremovexattr,
    REMOVEXATTRAT,
    FILE_SETATTR,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_utime,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_utimes,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_futimesat,
    libc::SYS_inotify_add_watch,
    libc::SYS_fanotify_init,
];
// Numbers of Linux 6.6, 6.13 and 6.17, the same on each architecture.
const FCHMODAT2: i64 = 452;
const SETXATTRAT: i64 = 463;
const REMOVEXATTRAT: i64 = 466;
const FILE_SETATTR: i64 = 469;

/// Allowed for this process only, which the first argument names (0 is the caller).
///
/// `abort` signals its own process; drivers query their limits, place their pages and choose their
/// processors.
const OWN_PROCESS: &[i64] = &[
    libc::SYS_tgkill,
    libc::SYS_prlimit64,
    libc::SYS_migrate_pages,
    libc::SYS_move_pages,
    libc::SYS_sched_setaffinity,
    libc::SYS_sched_setscheduler,
    libc::SYS_sched_setparam,
    libc::SYS_sched_setattr,
];
/// Allowed for this process only by their second argument, if the first one says "a process".
///
/// A group or a user would include others.
const OWN_PRIORITY: &[(i64, u64)] =
    &[(libc::SYS_setpriority, libc::PRIO_PROCESS as u64), (libc::SYS_ioprio_set, 1 /* IOPRIO_WHO_PROCESS */)];
/// Commands of `fcntl` and `ioctl` that make the kernel send any signal to a named process.
const FCNTL_SIGNALS: &[libc::c_int] = &[libc::F_SETOWN, 10 /* F_SETSIG */, 15 /* F_SETOWN_EX */];
const IOCTL_SIGNALS: &[libc::c_int] = &[0x8901 /* FIOSETOWN */, 0x8902 /* SIOCSPGRP */];

/// Calls that open a file, each with the argument that has the flags.
const OPENS: &[(i64, u8)] = &[
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_open, 1),
    (libc::SYS_openat, 2),
];
/// Flag of `O_TMPFILE` that no other flag has.
const NAMELESS: libc::c_int = libc::O_TMPFILE & !libc::O_DIRECTORY;

/// Forbids the x32 ABI, in which the same calls have other numbers.
fn no_x32() -> Result<(), seccompiler::Error> {
    if cfg!(not(target_arch = "x86_64")) {
        return Ok(());
    }
    const X32: u32 = 0x4000_0000;
    const EPERM: u32 = 0x0005_0000 | libc::EPERM as u32;
    const ALLOW: u32 = 0x7fff_0000;
    let step = |code, jt, jf, k| seccompiler::sock_filter { code, jt, jf, k };
    // Loads the number, which is the first word; compares; answers.
    apply_filter_all_threads(&[
        step(0x20, 0, 0, 0),
        step(0x35, 0, 1, X32),
        step(0x06, 0, 0, EPERM),
        step(0x06, 0, 0, ALLOW),
    ])
}

/// Installs the filters.
fn calls_only(calls: Calls, landlock: ABI) -> Result<(), String> {
    let said = |e: seccompiler::BackendError| e.to_string();
    let arch = std::env::consts::ARCH.try_into().map_err(said)?;
    let install = |rules: BTreeMap<i64, Vec<SeccompRule>>, errno: i32| {
        let answer = SeccompAction::Errno(errno as u32);
        let filter = SeccompFilter::new(rules, SeccompAction::Allow, answer, arch).map_err(said)?;
        let program: BpfProgram = filter.try_into().map_err(said)?;
        apply_filter_all_threads(&program).map_err(|e| e.to_string())
    };
    let condition = |argument: u8, operator: SeccompCmpOp, value: u64| {
        SeccompCondition::new(argument, SeccompCmpArgLen::Dword, operator, value).map_err(said)
    };
    let rule = |conditions| SeccompRule::new(conditions).map_err(said);
    let when = |argument, operator, value| rule(vec![condition(argument, operator, value)?]);
    // Of two filters that refuse a call, the later one chooses the error.
    match calls {
        Calls::Own => listed::refuse_others(&[]),
        Calls::Mps => listed::refuse_others(listed::LOCAL_SOCKETS),
        // A driver that misses a call there loses the program, so the list is not kept.
        Calls::Park => listed::note_others(&[listed::LOCAL_SOCKETS, CROSS_PROCESS_CALLS].concat()),
    }
    .map_err(|e| e.to_string())?;
    no_x32().map_err(|e| e.to_string())?;
    // The newer calls hide their flags from filters: the C library falls back to the older ones.
    let mut hidden = BTreeMap::from([(libc::SYS_clone3, Vec::new())]);
    let parks = calls == Calls::Park;
    // The helper that parks has no rules of Landlock, which would keep it from other processes.
    let by_path = landlock < ABI::V3 && !parks;
    if !parks {
        hidden.insert(libc::SYS_openat2, Vec::new());
    }
    install(hidden, libc::ENOSYS)?;
    let others = if parks { &[] } else { CROSS_PROCESS_CALLS };
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> =
        FORBIDDEN_CALLS.iter().chain(PATH_METADATA).chain(others).map(|call| (*call, Vec::new())).collect();
    // Without a path, the call sets the times of a descriptor. A pointer has 64 bits.
    let path = SeccompCondition::new(1, SeccompCmpArgLen::Qword, SeccompCmpOp::Ne, 0).map_err(said)?;
    rules.insert(libc::SYS_utimensat, vec![rule(vec![path])?]);
    // The last `close` would wait, also that of a process that got the socket from this one.
    let lingers = [(1, libc::SOL_SOCKET), (2, libc::SO_LINGER)]
        .map(|(argument, value)| condition(argument, SeccompCmpOp::Eq, value as u64));
    rules.insert(libc::SYS_setsockopt, vec![rule(lingers.into_iter().collect::<Result<_, _>>()?)?]);
    // The supervisor hands over the client's connections; a worker talks to no other process of
    // this host.
    if calls != Calls::Own {
        rules.insert(libc::SYS_socket, vec![when(0, SeccompCmpOp::Ne, libc::AF_UNIX as u64)?]);
        // Landlock does not see that a call which sends makes a connection, too.
        let connects = libc::MSG_FASTOPEN as u64;
        for (call, flags) in [(libc::SYS_sendto, 3), (libc::SYS_sendmsg, 2), (libc::SYS_sendmmsg, 3)] {
            rules.insert(call, vec![when(flags, SeccompCmpOp::MaskedEq(connects), connects)?]);
        }
    } else {
        rules.extend([(libc::SYS_socket, Vec::new()), (libc::SYS_connect, Vec::new())]);
        // A pair of stream sockets reaches no third process; a datagram socket may name a receiver.
        // Linux turns raw pairs into datagram pairs, too.
        let kinds = [libc::SOCK_DGRAM, libc::SOCK_RAW];
        let datagrams = kinds.map(|kind| when(1, SeccompCmpOp::MaskedEq(0xf), kind as u64));
        rules.insert(libc::SYS_socketpair, datagrams.into_iter().collect::<Result<_, _>>()?);
    }
    let own = u64::from(std::process::id());
    for call in OWN_PROCESS.iter().filter(|_| !parks) {
        let other = vec![condition(0, SeccompCmpOp::Ne, 0)?, condition(0, SeccompCmpOp::Ne, own)?];
        rules.insert(*call, vec![rule(other)?]);
    }
    for (call, process) in OWN_PRIORITY {
        let other = vec![condition(1, SeccompCmpOp::Ne, 0)?, condition(1, SeccompCmpOp::Ne, own)?];
        rules.insert(*call, vec![when(0, SeccompCmpOp::Ne, *process)?, rule(other)?]);
    }
    for (call, commands) in [(libc::SYS_fcntl, FCNTL_SIGNALS), (libc::SYS_ioctl, IOCTL_SIGNALS)] {
        let any = commands.iter().map(|command| when(1, SeccompCmpOp::Eq, *command as u64));
        rules.insert(call, any.collect::<Result<_, _>>()?);
    }
    if !parks {
        for (call, argument) in OPENS {
            let flags = |mask: libc::c_int, value: libc::c_int| {
                when(*argument, SeccompCmpOp::MaskedEq(mask as u64), value as u64)
            };
            // A file without a name counts in no folder.
            let mut refused = vec![flags(NAMELESS, NAMELESS)?];
            if by_path {
                // Older versions of Landlock do not see that this empties a file which they let it
                // read.
                refused.push(flags(libc::O_TRUNC | libc::O_ACCMODE, libc::O_TRUNC | libc::O_RDONLY)?);
            }
            rules.insert(*call, refused);
        }
        // The server lists the files that this process has open, which needs this attribute.
        rules.insert(libc::SYS_prctl, vec![when(0, SeccompCmpOp::Eq, libc::PR_SET_DUMPABLE as u64)?]);
    }
    if by_path {
        rules.insert(libc::SYS_truncate, Vec::new());
    }
    // Threads, but no processes, and no thread with descriptors that the server does not see.
    let (thread, files) = (libc::CLONE_THREAD as u64, libc::CLONE_FILES as u64);
    let without = |flag| when(0, SeccompCmpOp::MaskedEq(flag), 0);
    rules.insert(libc::SYS_clone, vec![without(thread)?, without(files)?]);
    let unshare = u64::from(libc::CLOSE_RANGE_UNSHARE);
    rules.insert(libc::SYS_close_range, vec![when(2, SeccompCmpOp::MaskedEq(unshare), unshare)?]);
    install(rules, libc::EPERM)
}

#[cfg(test)]
mod tests {
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

    fn files(mps: bool) -> Files<'static> {
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
            return alone("containment_denies_files_sockets_and_signals", &[]);
        }
        let files = before_driver(&files(false), landlock());
        let calls = before_client(Calls::Own, landlock());
        // A kernel without Landlock reports that.
        match files.as_slice() {
            [] => {
                let denied = std::fs::read_dir("/root").or_else(|_| std::fs::read_dir("/home"));
                assert_eq!(denied.unwrap_err().kind(), std::io::ErrorKind::PermissionDenied);
                assert!(std::fs::write("/tmp/containment-test", "x").is_err());
                assert!(std::fs::write("/dev/shm/containment-test", "x").is_err());
                assert!(std::fs::read("/proc/self/stat").is_ok() && std::fs::read("/dev/null").is_ok());
                // As the driver names its threads.
                let name = |thread: i32| std::fs::write(format!("/proc/self/task/{thread}/comm"), "named");
                name(nix::unistd::gettid().as_raw()).unwrap();
                let other = move || name(nix::unistd::gettid().as_raw());
                std::thread::spawn(other).join().unwrap().unwrap();
                assert!(std::fs::write("/proc/self/oom_score_adj", "0").is_err());
                assert!(name(1).is_err(), "another process");
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
        before_driver(&files(false), landlock());
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
        before_driver(&files(false), landlock());
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
        let files = before_driver(&files(true), landlock());
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
        let readable = Files { driver: &driver, ..files(false) };
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
