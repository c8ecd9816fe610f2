//! The process of a worker: a child, one of the starter's, or one that an earlier server started.
//! It leads a process group of its own.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::process::ExitStatus;

use nix::errno::Errno;
use nix::sys::signal::kill;
use nix::unistd::Pid;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::process::Child;
use tracing::warn;

use crate::pidfd::pidfd_open;
use crate::spawn::end_group;
use crate::starter::desk::Desk;
use crate::starter::link::Program;

/// Process of a worker, with its pidfd.
#[derive(Debug)]
pub struct Process {
    pid: u32,
    pidfd: AsyncFd<OwnedFd>,
    source: Source,
    desk: Option<Desk>,
}

/// The process that knows the exit status.
#[derive(Debug)]
enum Source {
    /// This process. The worker lives on when this is dropped.
    Child(Child),
    /// A connection to the starter, whose end is none of a worker that outlives it.
    Starter(Program),
    /// An earlier server, or a starter that is gone.
    Other,
}

impl Process {
    /// Wraps a process that was just started; needs a runtime.
    pub fn started(child: Child) -> io::Result<Self> {
        let pid = child.id().ok_or(io::ErrorKind::NotFound)?;
        // The process is not reaped yet, so the number cannot be another's.
        Self::new(pid, pidfd_open(pid)?, Source::Child(child), None)
    }

    /// Wraps a process that the starter has just started; needs a runtime.
    pub fn of_starter(program: Program, pidfd: OwnedFd, desk: Desk) -> io::Result<Self> {
        let pid = program.id().ok_or(io::ErrorKind::NotFound)?;
        Self::new(pid, pidfd, Source::Starter(program), Some(desk))
    }

    /// Wraps a process that an earlier server started; needs a runtime.
    pub fn left(pid: u32, pidfd: OwnedFd, desk: Option<Desk>) -> io::Result<Self> {
        Self::new(pid, pidfd, Source::Other, desk)
    }

    fn new(pid: u32, pidfd: OwnedFd, source: Source, desk: Option<Desk>) -> io::Result<Self> {
        // SAFETY: an OwnedFd keeps the same descriptor open for as long as it lives, and AsyncFd
        // owns it.
        let pidfd = unsafe { AsyncFd::register_with_interest(pidfd, Interest::READABLE) }?;
        Ok(Self { pid, pidfd, source, desk })
    }

    /// Process id.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Returns the pidfd, for the descriptor store.
    pub fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.get_ref().as_fd()
    }

    /// Returns when the process has exited. Only who started it knows the exit status.
    pub async fn wait(&mut self) -> io::Result<Option<ExitStatus>> {
        match &mut self.source {
            Source::Child(child) => return child.wait().await.map(Some),
            Source::Starter(program) => match program.wait().await {
                Ok(status) => return Ok(Some(status)),
                // The starter is gone; the worker may live on.
                Err(_) => self.source = Source::Other,
            },
            Source::Other => {}
        }
        // A pidfd becomes readable when its process exits, and stays so.
        self.pidfd.readable().await.map(|_| None)
    }

    /// Kills what is left of the process group.
    pub fn kill(&self) {
        // After the exit a new process may have the number, but not while the group has members.
        let child = matches!(self.source, Source::Child(_));
        let reused = !child && self.ended() && lives(self.pid);
        if !reused {
            kill_group(self.pid, self.pidfd().try_clone_to_owned(), self.desk.as_ref());
        }
    }

    fn ended(&self) -> bool {
        use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
        poll(&mut [PollFd::new(self.pidfd(), PollFlags::POLLIN)], PollTimeout::ZERO).is_ok_and(|n| n > 0)
    }
}

/// Kills the process group of a worker; the starter does, if it has the worker's user.
pub fn kill_group(pid: u32, pidfd: io::Result<OwnedFd>, desk: Option<&Desk>) {
    if end_group(pid) == Err(Errno::EPERM)
        && let Some(desk) = desk
    {
        match pidfd {
            Ok(pidfd) => desk.kill(pidfd),
            Err(e) => warn!("worker process {pid}: not killed: {e}; it exits when its channel closes"),
        }
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
