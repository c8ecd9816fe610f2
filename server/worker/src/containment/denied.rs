//! Deny-lists of system calls (seccomp): no restricted process makes these calls.

use std::collections::BTreeMap;

use landlock::ABI;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    apply_filter_all_threads,
};

use super::listed;

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
    /// Local sockets and other processes, for the helper that unparks an earlier release's worker.
    Park,
    /// Programs, signals, and local sockets that others connect to: for NVIDIA's daemons of MPS,
    /// which have rules of Landlock, too.
    Daemon,
}

/// System calls that read and change other processes; the helper that unparks needs them.
const OTHER_MEMORY: &[i64] =
    &[libc::SYS_ptrace, libc::SYS_process_vm_readv, libc::SYS_process_vm_writev, libc::SYS_pidfd_getfd];

/// System calls that send signals to other processes; that helper and MPS need them.
const SIGNALS: &[i64] = &[
    libc::SYS_pidfd_send_signal,
    libc::SYS_kill,
    libc::SYS_tkill,
    libc::SYS_rt_sigqueueinfo,
    libc::SYS_rt_tgsigqueueinfo,
];

/// System calls that start programs and accept connections; MPS needs them.
const STARTS: &[i64] = &[
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_listen,
    libc::SYS_accept,
    libc::SYS_accept4,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_fork,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_vfork,
];

/// System calls that widen this process's rights or change how other processes run.
const FORBIDDEN: &[i64] = &[
    libc::SYS_process_madvise,
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
];

/// System calls that change or watch what a path names.
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
/// System calls of [`PATH_METADATA`] that succeed without effect in a daemon of MPS.
///
/// The control daemon opens its pipes to all users, and exits if it cannot. Its folder is closed to
/// other users, so their modes are of no use.
const MODES: &[i64] = &[
    #[cfg(target_arch = "x86_64")]
    libc::SYS_chmod,
    libc::SYS_fchmodat,
    FCHMODAT2,
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

/// Returns the calls that a process of this kind never makes, with any arguments.
fn never(calls: Calls) -> impl Iterator<Item = i64> {
    let tables: &[&[i64]] = match calls {
        Calls::Own | Calls::Mps => &[FORBIDDEN, PATH_METADATA, STARTS, OTHER_MEMORY, SIGNALS],
        Calls::Park => &[FORBIDDEN, PATH_METADATA, STARTS],
        Calls::Daemon => &[FORBIDDEN, PATH_METADATA, OTHER_MEMORY],
    };
    tables.iter().copied().flatten().copied()
}

/// Gives calls that these rules match an answer, in all threads.
pub(super) fn install(rules: BTreeMap<i64, Vec<SeccompRule>>, answer: SeccompAction) -> Result<(), String> {
    let said = |e: seccompiler::BackendError| e.to_string();
    let arch = std::env::consts::ARCH.try_into().map_err(said)?;
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, answer, arch).map_err(said)?;
    let program: BpfProgram = filter.try_into().map_err(said)?;
    apply_filter_all_threads(&program).map_err(|e| e.to_string())
}

/// Installs the filters, which answer a refused call with EPERM.
pub(super) fn calls_only(calls: Calls, landlock: ABI) -> Result<(), String> {
    let said = |e: seccompiler::BackendError| e.to_string();
    let install = |rules, errno: i32| install(rules, SeccompAction::Errno(errno as u32));
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
        Calls::Park => listed::note_others(&[listed::LOCAL_SOCKETS, OTHER_MEMORY, SIGNALS].concat()),
        // The thread that notes calls does not outlive the start of NVIDIA's program.
        Calls::Daemon => Ok(()),
    }
    .map_err(|e| e.to_string())?;
    no_x32().map_err(|e| e.to_string())?;
    // The newer calls hide their flags from filters: the C library falls back to the older ones.
    let mut hidden = BTreeMap::from([(libc::SYS_clone3, Vec::new())]);
    let (parks, daemon) = (calls == Calls::Park, calls == Calls::Daemon);
    // The helper that unparks has no rules of Landlock, which would keep it from other processes.
    let by_path = landlock < ABI::V3 && !parks;
    if !parks {
        hidden.insert(libc::SYS_openat2, Vec::new());
    }
    install(hidden, libc::ENOSYS)?;
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = never(calls).map(|call| (call, Vec::new())).collect();
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
    // Processes that a daemon starts have other numbers.
    for call in OWN_PROCESS.iter().filter(|_| !parks && !daemon) {
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
    if daemon {
        for call in MODES {
            rules.remove(call);
        }
        install(MODES.iter().map(|call| (*call, Vec::new())).collect(), 0)?;
        rules.insert(libc::SYS_prlimit64, vec![when(0, SeccompCmpOp::Ne, 0)?]);
        // It starts each server as the user of the server's first client, which is its own.
        // SAFETY: the call has no preconditions.
        let user = unsafe { libc::getuid() }.into();
        rules.insert(libc::SYS_setuid, vec![when(0, SeccompCmpOp::Ne, user)?]);
    } else {
        // Threads, but no processes, and no thread with descriptors that the server does not see.
        let (thread, files) = (libc::CLONE_THREAD as u64, libc::CLONE_FILES as u64);
        let without = |flag| when(0, SeccompCmpOp::MaskedEq(flag), 0);
        rules.insert(libc::SYS_clone, vec![without(thread)?, without(files)?]);
    }
    let unshare = u64::from(libc::CLOSE_RANGE_UNSHARE);
    rules.insert(libc::SYS_close_range, vec![when(2, SeccompCmpOp::MaskedEq(unshare), unshare)?]);
    install(rules, libc::EPERM)
}
