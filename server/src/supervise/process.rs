//! The process of a worker: a child, or one that an earlier server started. It leads a process group of its own.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::process::ExitStatus;

use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::process::Child;

/// See the module.
#[derive(Debug)]
pub struct Process {
    pid: u32,
    pidfd: AsyncFd<OwnedFd>,
    child: Option<Child>,
}

impl Process {
    /// One that was just started; needs a runtime.
    pub fn started(child: Child) -> io::Result<Self> {
        let pid = child.id().ok_or(io::ErrorKind::NotFound)?;
        // It is not waited for yet: the number is its.
        Self::new(pid, pidfd_open(pid)?, Some(child))
    }

    /// One that an earlier server started; needs a runtime.
    pub fn left(pid: u32, pidfd: OwnedFd) -> io::Result<Self> {
        Self::new(pid, pidfd, None)
    }

    fn new(pid: u32, pidfd: OwnedFd, child: Option<Child>) -> io::Result<Self> {
        // SAFETY: an OwnedFd keeps the same descriptor open for as long as it lives, and AsyncFd owns it.
        let pidfd = unsafe { AsyncFd::register_with_interest(pidfd, Interest::READABLE) }?;
        Ok(Self { pid, pidfd, child })
    }

    /// Its number.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// For the descriptor store.
    pub fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.get_ref().as_fd()
    }

    /// Returns when it has ended; how is known of a child only.
    pub async fn wait(&mut self) -> io::Result<Option<ExitStatus>> {
        match &mut self.child {
            Some(child) => child.wait().await.map(Some),
            // A pidfd is readable once its process has ended, and stays so.
            None => self.pidfd.readable().await.map(|_| None),
        }
    }

    /// Ends what is left of its group.
    pub fn kill(&self) {
        // After its end the number may be that of a new process: not while somebody of its group is there.
        let reused = self.child.is_none() && self.ended() && lives(self.pid);
        if !reused {
            end_group(self.pid);
        }
    }

    fn ended(&self) -> bool {
        use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
        poll(&mut [PollFd::new(self.pidfd(), PollFlags::POLLIN)], PollTimeout::ZERO).is_ok_and(|n| n > 0)
    }
}

/// Ends a worker's process group.
pub fn end_group(pid: u32) {
    // Groups 0 and 1 are never a worker's.
    if let Some(pid) = i32::try_from(pid).ok().filter(|pid| *pid > 1) {
        let _ = killpg(Pid::from_raw(pid), Signal::SIGKILL);
    }
}

/// Whether a process of this number runs; one that has ended and was not waited for does not.
fn lives(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
    stat.is_ok_and(|s| s.rsplit_once(')').is_some_and(|(_, rest)| !rest.trim_start().starts_with('Z')))
}

/// Whether there is no process of this number any more, but one at most that was not waited for. Where `/proc` hides other users'
/// processes, they are there.
pub fn is_gone(pid: u32) -> bool {
    let Ok(number) = i32::try_from(pid) else { return true };
    match kill(Pid::from_raw(number), None) {
        Err(nix::errno::Errno::ESRCH) => true,
        Err(_) if !Path::new(&format!("/proc/{pid}")).exists() => false,
        _ => !lives(pid),
    }
}

fn pidfd_open(pid: u32) -> io::Result<OwnedFd> {
    // SAFETY: pidfd_open takes a pid and flags and touches no memory of ours.
    let fd = unsafe { nix::libc::syscall(nix::libc::SYS_pidfd_open, pid as nix::libc::c_int, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor for us; nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as nix::libc::c_int) })
}
