//! The process of a worker: a child, or one that an earlier server started. It leads a process
//! group of its own.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::process::ExitStatus;

use nix::sys::signal::kill;
use nix::unistd::Pid;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::process::Child;

use crate::pidfd::pidfd_open;
use crate::spawn::end_group;

/// Process of a worker, with its pidfd.
#[derive(Debug)]
pub struct Process {
    pid: u32,
    pidfd: AsyncFd<OwnedFd>,
    child: Option<Child>,
}

impl Process {
    /// Wraps a process that was just started; needs a runtime.
    pub fn started(child: Child) -> io::Result<Self> {
        let pid = child.id().ok_or(io::ErrorKind::NotFound)?;
        // The process is not reaped yet, so the number cannot be another's.
        Self::new(pid, pidfd_open(pid)?, Some(child))
    }

    /// Wraps a process that an earlier server started; needs a runtime.
    pub fn left(pid: u32, pidfd: OwnedFd) -> io::Result<Self> {
        Self::new(pid, pidfd, None)
    }

    fn new(pid: u32, pidfd: OwnedFd, child: Option<Child>) -> io::Result<Self> {
        // SAFETY: an OwnedFd keeps the same descriptor open for as long as it lives, and AsyncFd
        // owns it.
        let pidfd = unsafe { AsyncFd::register_with_interest(pidfd, Interest::READABLE) }?;
        Ok(Self { pid, pidfd, child })
    }

    /// Process id.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Returns the pidfd, for the descriptor store.
    pub fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.get_ref().as_fd()
    }

    /// Returns when the process has exited. The exit status is known for a child only.
    pub async fn wait(&mut self) -> io::Result<Option<ExitStatus>> {
        match &mut self.child {
            Some(child) => child.wait().await.map(Some),
            // A pidfd becomes readable when its process exits, and stays so.
            None => self.pidfd.readable().await.map(|_| None),
        }
    }

    /// Kills what is left of the process group.
    pub fn kill(&self) {
        // After the exit a new process may have the number, but not while the group has members.
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

/// Returns `true` if a process of this number runs; a zombie does not.
fn lives(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
    stat.is_ok_and(|s| s.rsplit_once(')').is_some_and(|(_, rest)| !rest.trim_start().starts_with('Z')))
}

/// Returns `true` if no process of this number exists, or only a zombie.
///
/// Where `/proc` hides other users' processes, they count as existing.
pub fn is_gone(pid: u32) -> bool {
    let Ok(number) = i32::try_from(pid) else { return true };
    match kill(Pid::from_raw(number), None) {
        Err(nix::errno::Errno::ESRCH) => true,
        Err(_) if !Path::new(&format!("/proc/{pid}")).exists() => false,
        _ => !lives(pid),
    }
}
