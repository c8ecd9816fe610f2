//! Allow-list of system calls: a process of a driver makes these, and the kernel refuses each other
//! one, also those of later kernels.
//!
//! The deny-lists of the parent module hold first: their answer to a listed call is EPERM.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::sync::OnceLock;

use seccompiler::{apply_filter_all_threads, sock_filter};

/// Variable of the server with which processes write unlisted calls to the journal and make them.
///
/// It is for tests of a new driver; the deny-lists hold nevertheless.
const VARIABLE: &str = "GPUSERVER_UNLISTED_CALLS";
/// Standard error of this process, from before a worker redirects it; only with [`VARIABLE`].
static JOURNAL: OnceLock<File> = OnceLock::new();

/// Calls on descriptors: files, devices, pipes, counters, timers and memory files.
const DESCRIPTORS: &[i64] = &[
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_preadv,
    libc::SYS_pwritev,
    libc::SYS_preadv2,
    libc::SYS_pwritev2,
    libc::SYS_lseek,
    libc::SYS_close,
    libc::SYS_close_range,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_fcntl,
    libc::SYS_ioctl,
    libc::SYS_flock,
    libc::SYS_fstat,
    libc::SYS_fstatfs,
    libc::SYS_fchmod,
    libc::SYS_fchown,
    libc::SYS_fgetxattr,
    libc::SYS_flistxattr,
    libc::SYS_getdents64,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_ftruncate,
    libc::SYS_fallocate,
    libc::SYS_fadvise64,
    libc::SYS_readahead,
    libc::SYS_sendfile,
    libc::SYS_copy_file_range,
    libc::SYS_pipe2,
    libc::SYS_eventfd2,
    libc::SYS_signalfd4,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_settime,
    libc::SYS_timerfd_gettime,
    libc::SYS_memfd_create,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_ppoll,
    libc::SYS_pselect6,
];

/// Calls on paths, which Landlock confines.
const PATHS: &[i64] = &[
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_statfs,
    libc::SYS_readlinkat,
    libc::SYS_mkdirat,
    libc::SYS_mknodat,
    libc::SYS_unlinkat,
    libc::SYS_renameat2,
    libc::SYS_linkat,
    libc::SYS_symlinkat,
    libc::SYS_truncate,
    libc::SYS_utimensat,
    libc::SYS_getxattr,
    libc::SYS_lgetxattr,
    libc::SYS_listxattr,
    libc::SYS_llistxattr,
    libc::SYS_chdir,
    libc::SYS_fchdir,
    libc::SYS_getcwd,
    libc::SYS_umask,
];

/// Calls on this process's own memory.
const MEMORY: &[i64] = &[
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_mprotect,
    libc::SYS_pkey_mprotect,
    libc::SYS_pkey_alloc,
    libc::SYS_pkey_free,
    libc::SYS_brk,
    libc::SYS_madvise,
    libc::SYS_msync,
    libc::SYS_mincore,
    libc::SYS_mlock,
    libc::SYS_mlock2,
    libc::SYS_munlock,
    libc::SYS_mlockall,
    libc::SYS_munlockall,
    libc::SYS_membarrier,
    libc::SYS_mbind,
    libc::SYS_set_mempolicy,
    libc::SYS_get_mempolicy,
    libc::SYS_migrate_pages,
    libc::SYS_move_pages,
];

/// Calls on this process's own threads, signals and rights.
const THREADS: &[i64] = &[
    libc::SYS_clone,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_futex,
    libc::SYS_set_robust_list,
    libc::SYS_get_robust_list,
    libc::SYS_set_tid_address,
    libc::SYS_rseq,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_setaffinity,
    libc::SYS_sched_getscheduler,
    libc::SYS_sched_setscheduler,
    libc::SYS_sched_getparam,
    libc::SYS_sched_setparam,
    libc::SYS_sched_getattr,
    libc::SYS_sched_setattr,
    libc::SYS_sched_get_priority_max,
    libc::SYS_sched_get_priority_min,
    libc::SYS_sched_rr_get_interval,
    libc::SYS_getpriority,
    libc::SYS_setpriority,
    libc::SYS_ioprio_get,
    libc::SYS_ioprio_set,
    libc::SYS_getcpu,
    libc::SYS_wait4,
    libc::SYS_waitid,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigsuspend,
    libc::SYS_rt_sigpending,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_sigaltstack,
    libc::SYS_tgkill,
    libc::SYS_restart_syscall,
    libc::SYS_prctl,
    libc::SYS_prlimit64,
    libc::SYS_getrusage,
    libc::SYS_capget,
    libc::SYS_capset,
    // These only take rights away.
    libc::SYS_seccomp,
    libc::SYS_landlock_create_ruleset,
    libc::SYS_landlock_add_rule,
    libc::SYS_landlock_restrict_self,
];

/// Calls on clocks and timers, and questions about this process and machine.
const QUESTIONS: &[i64] = &[
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    libc::SYS_gettimeofday,
    libc::SYS_times,
    libc::SYS_timer_create,
    libc::SYS_timer_settime,
    libc::SYS_timer_gettime,
    libc::SYS_timer_getoverrun,
    libc::SYS_timer_delete,
    libc::SYS_setitimer,
    libc::SYS_getitimer,
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_getpgid,
    libc::SYS_getsid,
    libc::SYS_gettid,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_getresuid,
    libc::SYS_getresgid,
    libc::SYS_getgroups,
    libc::SYS_uname,
    libc::SYS_sysinfo,
    libc::SYS_getrandom,
];

/// Calls on sockets that this process received or has in a pair.
const SOCKETS: &[i64] = &[
    libc::SYS_socketpair,
    libc::SYS_sendto,
    libc::SYS_sendmsg,
    libc::SYS_sendmmsg,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_recvmmsg,
    libc::SYS_shutdown,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_getsockopt,
    libc::SYS_setsockopt,
];

/// Further calls of a process that reaches NVIDIA's daemons.
pub const LOCAL_SOCKETS: &[i64] = &[libc::SYS_socket, libc::SYS_connect, libc::SYS_bind];

/// Older forms of listed calls, which newer architectures lack.
#[cfg(target_arch = "x86_64")]
const OLDER_FORMS: &[i64] = &[
    libc::SYS_open,
    libc::SYS_creat,
    libc::SYS_access,
    libc::SYS_stat,
    libc::SYS_lstat,
    libc::SYS_readlink,
    libc::SYS_mkdir,
    libc::SYS_rmdir,
    libc::SYS_unlink,
    libc::SYS_rename,
    libc::SYS_renameat,
    libc::SYS_link,
    libc::SYS_symlink,
    libc::SYS_mknod,
    libc::SYS_getdents,
    libc::SYS_dup2,
    libc::SYS_pipe,
    libc::SYS_eventfd,
    libc::SYS_signalfd,
    libc::SYS_epoll_create,
    libc::SYS_epoll_wait,
    libc::SYS_poll,
    libc::SYS_select,
    libc::SYS_pause,
    libc::SYS_alarm,
    libc::SYS_time,
    libc::SYS_getpgrp,
    libc::SYS_getrlimit,
    libc::SYS_setrlimit,
    libc::SYS_arch_prctl,
];
#[cfg(not(target_arch = "x86_64"))]
const OLDER_FORMS: &[i64] = &[libc::SYS_renameat, libc::SYS_getrlimit, libc::SYS_setrlimit];

/// Returns the numbers of the calls of a process that makes these further ones.
fn listed(more: &[i64]) -> BTreeSet<u32> {
    [DESCRIPTORS, PATHS, MEMORY, THREADS, QUESTIONS, SOCKETS, OLDER_FORMS, more]
        .into_iter()
        .flatten()
        .map(|call| *call as u32)
        .collect()
}

/// Returns a filter that allows the listed calls and gives every other one this answer.
///
/// It has a step for each end of a range of numbers, in ascending order, so that no jump is long.
fn filter(calls: &BTreeSet<u32>, unlisted: u32) -> Vec<sock_filter> {
    const LOAD: u16 = 0x20;
    const AT_LEAST: u16 = 0x35;
    const ABOVE: u16 = 0x25;
    const RETURN: u16 = 0x06;
    let step = |code, jt, jf, k| sock_filter { code, jt, jf, k };
    let mut ranges: BTreeMap<u32, u32> = BTreeMap::new();
    for call in calls {
        match ranges.last_entry() {
            Some(mut last) if *last.get() + 1 == *call => *last.get_mut() = *call,
            _ => drop(ranges.insert(*call, *call)),
        }
    }
    // The number is the first word.
    let mut steps = vec![step(LOAD, 0, 0, 0)];
    for (first, last) in ranges {
        steps.extend([
            step(AT_LEAST, 1, 0, first),
            step(RETURN, 0, 0, unlisted),
            step(ABOVE, 1, 0, last),
            step(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW),
        ]);
    }
    steps.push(step(RETURN, 0, 0, unlisted));
    steps
}

/// Keeps the journal for later notes, if the server asks for them; the first call of a process.
pub fn keep_journal() {
    if std::env::var_os(VARIABLE).is_some_and(|value| value == "log")
        && let Ok(journal) = std::os::fd::AsFd::as_fd(&io::stderr()).try_clone_to_owned()
    {
        let _ = JOURNAL.set(journal.into());
    }
}

/// Refuses calls with ENOSYS that are neither listed nor `more`; with a journal, only notes them.
///
/// With this answer the C library and drivers do what they do on an older kernel.
pub fn refuse_others(more: &[i64]) -> io::Result<()> {
    match JOURNAL.get() {
        Some(_) => note_others(more),
        None => {
            let answer = libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32;
            apply_filter_all_threads(&filter(&listed(more), answer)).map_err(io::Error::other)
        }
    }
}

/// Notes calls that are neither listed nor `more`, if there is a journal.
pub fn note_others(more: &[i64]) -> io::Result<()> {
    match JOURNAL.get() {
        Some(journal) => {
            let filter = filter(&listed(more), libc::SECCOMP_RET_USER_NOTIF);
            start_notes(filter, journal.try_clone()?)
        }
        None => Ok(()),
    }
}

/// Starts a thread that lets the kernel make each unlisted call, after a note of the first of each.
fn start_notes(filter: Vec<sock_filter>, journal: File) -> io::Result<()> {
    let (installed, answer) = std::sync::mpsc::channel();
    // The thread exists before the filter, since its start may need an unlisted call.
    std::thread::Builder::new().name("unlisted".into()).spawn(move || match listen(&filter) {
        Ok(calls) => {
            let _ = installed.send(Ok(()));
            note(&calls, journal);
        }
        Err(e) => drop(installed.send(Err(e))),
    })?;
    answer.recv().map_err(io::Error::other)?
}

/// Installs a filter in all threads; returns the descriptor that tells the calls it stops.
fn listen(filter: &[sock_filter]) -> io::Result<OwnedFd> {
    let flags = libc::SECCOMP_FILTER_FLAG_NEW_LISTENER
        | libc::SECCOMP_FILTER_FLAG_TSYNC
        | libc::SECCOMP_FILTER_FLAG_TSYNC_ESRCH;
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_ptr().cast_mut().cast() };
    // SAFETY: prctl takes plain numbers; the kernel copies the program, whose steps have its layout
    // and whose length is theirs.
    let made = unsafe {
        match libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) {
            0 => {
                let mode = libc::SECCOMP_SET_MODE_FILTER;
                libc::syscall(libc::SYS_seccomp, mode, flags, &raw const program)
            }
            _ => -1,
        }
    };
    match made {
        // SAFETY: the kernel made the descriptor for this call.
        0.. => Ok(unsafe { OwnedFd::from_raw_fd(made as i32) }),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Lets the kernel make each call; makes listed calls only.
fn note(calls: &OwnedFd, mut journal: File) {
    const RECEIVE: u64 = 0xc050_2100;
    const SEND: u64 = 0xc018_2101;
    let mut noted = BTreeSet::new();
    loop {
        // SAFETY: all-zero structures are valid; the numbers are those of requests with them.
        let received = unsafe {
            let mut call: libc::seccomp_notif = std::mem::zeroed();
            (libc::ioctl(calls.as_raw_fd(), RECEIVE as _, &raw mut call) == 0).then_some(call)
        };
        // A call whose thread was killed before this one could take it is an error, and no end.
        let Some(call) = received else { continue };
        if noted.insert(call.data.nr) {
            let thread = std::fs::read_to_string(format!("/proc/self/task/{}/comm", call.pid));
            let _ = writeln!(
                journal,
                "gpuserver-worker: system call {} of thread {}: unlisted; made, because {VARIABLE}=log",
                call.data.nr,
                thread.as_deref().unwrap_or("?").trim_end()
            );
        }
        let flags = libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32;
        let mut answer = libc::seccomp_notif_resp { id: call.id, val: 0, error: 0, flags };
        // SAFETY: the structure is that of the request.
        unsafe { libc::ioctl(calls.as_raw_fd(), SEND as _, &raw mut answer) };
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Seek as _};

    use super::*;

    /// Set in a test's own process.
    const ALONE: &str = "LISTED_TEST";

    /// Runs a test in a process of its own, since a process cannot regain a right.
    fn alone(test: &str) {
        let done = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", &format!("containment::listed::tests::{test}"), "--nocapture"])
            .env(ALONE, "1")
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&done.stdout);
        assert!(done.status.success() && said.contains("contained"), "{done:?}");
    }

    /// Makes a call without arguments; returns its error.
    fn refused(call: u32) -> Option<i32> {
        // SAFETY: the tests make calls only that a filter answers, or that touch no memory.
        let done = unsafe { libc::syscall(i64::from(call), 0, 0, 0, 0, 0, 0) };
        (done == -1).then(|| io::Error::last_os_error().raw_os_error())?
    }

    #[test]
    fn the_kernel_makes_listed_calls_only() {
        if std::env::var_os(ALONE).is_none() {
            return alone("the_kernel_makes_listed_calls_only");
        }
        refuse_others(&[]).unwrap();
        // uretprobe and uprobe, which no filter sees: the kernel serves them to its own code alone.
        let unfiltered = [335, 336];
        let allowed = listed(&[]);
        // Numbers of kernels to come, too.
        for call in (0..2048).filter(|call| !allowed.contains(call) && !unfiltered.contains(call)) {
            assert_eq!(refused(call), Some(libc::ENOSYS), "call {call}");
        }
        for (call, name) in [
            (libc::SYS_sync, "sync"),
            (libc::SYS_bind, "bind"),
            (libc::SYS_splice, "splice"),
            (libc::SYS_pidfd_open, "pidfd_open"),
            (libc::SYS_memfd_secret, "memfd_secret"),
            (libc::SYS_setsid, "setsid"),
        ] {
            assert!(!allowed.contains(&(call as u32)), "{name}");
        }
        assert_eq!(refused(libc::SYS_getpid as u32), None);
        println!("contained");
        std::process::exit(0);
    }

    #[test]
    fn unlisted_calls_are_noted_once_and_made() {
        if std::env::var_os(ALONE).is_none() {
            return alone("unlisted_calls_are_noted_once_and_made");
        }
        let mut journal = tempfile::tempfile().unwrap();
        JOURNAL.set(journal.try_clone().unwrap()).unwrap();
        refuse_others(&[libc::SYS_bind]).unwrap();
        for _ in 0..2 {
            assert_eq!(refused(libc::SYS_inotify_init1 as u32), None);
        }
        assert!(refused(libc::SYS_bind as u32).is_some());
        let mut notes = String::new();
        journal.rewind().unwrap();
        journal.read_to_string(&mut notes).unwrap();
        let of = |call: i64| notes.matches(&format!("system call {call} of thread ")).count();
        assert_eq!((of(libc::SYS_inotify_init1), of(libc::SYS_bind)), (1, 0), "{notes}");
        println!("contained");
        std::process::exit(0);
    }
}
