//! Counts the system calls of one thread.
//!
//! The thread is the main thread of a second process of the same program, which is traced.

use std::collections::BTreeMap;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use nix::sys::ptrace;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::Pid;

/// Starts or ends the count; the traced thread calls it before and after the measured work.
pub fn mark() {
    // SAFETY: `getsid` has no preconditions. It can serve as the mark, since no other code here
    // calls it.
    unsafe { libc::getsid(0) };
}

fn name(number: u64) -> String {
    const NAMES: &[(i64, &str)] = &[
        (libc::SYS_futex, "futex"),
        (libc::SYS_sendmsg, "sendmsg"),
        (libc::SYS_sendto, "send"),
        (libc::SYS_recvfrom, "recv"),
        (libc::SYS_write, "write"),
        (libc::SYS_read, "read"),
        (libc::SYS_poll, "poll"),
        (libc::SYS_brk, "brk"),
        (libc::SYS_mmap, "mmap"),
        (libc::SYS_munmap, "munmap"),
        (libc::SYS_mremap, "mremap"),
        (libc::SYS_clock_nanosleep, "sleep"),
        (libc::SYS_sched_yield, "yield"),
    ];
    let known = NAMES.iter().find(|(known, _)| *known as u64 == number);
    known.map_or_else(|| format!("call {number}"), |(_, name)| (*name).to_string())
}

/// Runs a program and counts the system calls of its main thread between each two marks.
pub fn count(command: &mut Command) -> nix::Result<BTreeMap<String, u64>> {
    // SAFETY: between fork and exec the closure makes one system call and allocates no memory.
    unsafe { command.pre_exec(|| Ok(ptrace::traceme()?)) };
    let child = command
        .stdout(Stdio::null())
        .spawn()
        .map_err(|e| nix::Error::from_raw(e.raw_os_error().unwrap_or(0)))?;
    let child = Pid::from_raw(child.id() as i32);
    waitpid(child, None)?;
    ptrace::setoptions(child, ptrace::Options::PTRACE_O_TRACESYSGOOD | ptrace::Options::PTRACE_O_EXITKILL)?;
    let (mut counts, mut counting, mut signal) = (BTreeMap::new(), false, None);
    loop {
        ptrace::syscall(child, signal.take())?;
        match waitpid(child, None)? {
            WaitStatus::PtraceSyscall(_) => {
                let info = ptrace::syscall_info(child)?;
                if info.op != libc::PTRACE_SYSCALL_INFO_ENTRY {
                    continue;
                }
                // SAFETY: `op` says that this is a system call's entry, for which the kernel fills
                // `entry`.
                let number = unsafe { info.u.entry.nr };
                if number == libc::SYS_getsid as u64 {
                    counting = !counting;
                } else if counting {
                    *counts.entry(name(number)).or_default() += 1;
                }
            }
            WaitStatus::Stopped(_, other) => signal = Some(other),
            WaitStatus::Exited(_, 0) => return Ok(counts),
            ended => panic!("the traced program: {ended:?}"),
        }
    }
}

/// Prints the times of a measured operation, and the system calls of a second, traced run.
pub fn report(what: &str, times: &mut [u64], calls: nix::Result<BTreeMap<String, u64>>) {
    times.sort_unstable();
    let at = |percent: usize| times[(times.len() - 1) * percent / 100] as f64 / 1000.0;
    let (median, most) = (at(50), at(99));
    let calls = match calls {
        Ok(calls) => {
            let each = calls.values().sum::<u64>() as f64 / times.len() as f64;
            let kinds: Vec<_> = calls.iter().map(|(name, count)| format!("{count} {name}")).collect();
            format!(
                "{each:.4} system calls each ({} in all)",
                if kinds.is_empty() { "none".into() } else { kinds.join(", ") }
            )
        }
        Err(e) => format!("system calls were not counted: {e}"),
    };
    println!("{what}, {} in bursts: median {median:.2} us, 99 % within {most:.2} us; {calls}", times.len());
}
