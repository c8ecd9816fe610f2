//! Acts of the starter, for callers that may wait.

use std::io::{self, IoSlice, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use gpusession_proto::message;
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use tokio::task::spawn_blocking;
use tokio::time::sleep;
use tracing::warn;

use super::{Act, Answer, Introduction, Purpose, Request, Said, away};
use crate::local_service::receive;

/// Longest time without an answer. The first one waits for the starter, too; to measure a large
/// folder takes seconds.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// Times that a process is to be killed, and the pause between two.
const KILLS: usize = 5;
const KILL_DELAY: Duration = Duration::from_secs(1);

/// The way to a starter's acts. Cheap to clone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Desk(PathBuf);

impl Desk {
    /// Returns the way to the starter at this socket.
    pub fn at(socket: &Path) -> Self {
        Self(socket.into())
    }

    /// Has the starter act; returns its answers.
    pub fn act(&self, act: &Act, descriptor: Option<BorrowedFd<'_>>) -> io::Result<Vec<Answer>> {
        self.try_act(act, descriptor).map_err(|e| away(&self.0, &e))?
    }

    /// The outer error is the connection's.
    fn try_act(&self, act: &Act, beside: Option<BorrowedFd<'_>>) -> io::Result<io::Result<Vec<Answer>>> {
        let mut socket = UnixStream::connect(&self.0)?;
        socket.set_read_timeout(Some(ANSWER_TIMEOUT))?;
        socket.set_write_timeout(Some(ANSWER_TIMEOUT))?;
        let purpose = Purpose::Act(act.clone());
        let bytes = message::encode(&Request { purpose, arguments: Vec::new(), environment: Vec::new() });
        let raw: Vec<_> = beside.iter().map(AsRawFd::as_raw_fd).collect();
        let rights = [ControlMessage::ScmRights(&raw)];
        let rights = if raw.is_empty() { &[][..] } else { &rights };
        let parts = [IoSlice::new(&bytes)];
        let sent = sendmsg::<()>(socket.as_raw_fd(), &parts, rights, MsgFlags::MSG_NOSIGNAL, None);
        // A starter that refuses the caller answers before it reads.
        let sent = sent.map_err(io::Error::from).and_then(|n| socket.write_all(&bytes[n..]));
        let mut unsent = sent.err();
        let mut answers = Vec::new();
        loop {
            match receive(&mut socket).map_err(|e| unsent.take().unwrap_or(e))? {
                Said::Answer(Answer::Done) => return Ok(Ok(answers)),
                Said::Answer(Answer::Failed(why, number)) => {
                    let kind = number.map(|number| io::Error::from_raw_os_error(number).kind());
                    return Ok(Err(io::Error::new(kind.unwrap_or(io::ErrorKind::Other), why)));
                }
                Said::Answer(answer) => answers.push(answer),
                Said::Refused(why) => return Err(io::Error::other(why)),
                other => return Err(io::Error::other(format!("it sent {other:?} out of turn"))),
            }
        }
    }

    /// Asks the starter for its user and places.
    pub fn introduction(&self) -> io::Result<Introduction> {
        match self.act(&Act::Introduce, None)?.pop() {
            Some(Answer::Introduced(introduction)) => Ok(introduction),
            _ => Err(away(&self.0, &io::Error::other("it did not introduce itself"))),
        }
    }

    /// Has the starter kill the process of a pidfd with its group, without a wait for that; needs a
    /// runtime.
    pub fn kill(&self, pidfd: OwnedFd) {
        let (this, pidfd) = (self.clone(), Arc::new(pidfd));
        tokio::spawn(async move {
            for n in 1..=KILLS {
                let (this, pidfd) = (this.clone(), pidfd.clone());
                let killing = spawn_blocking(move || this.act(&Act::Kill, Some(pidfd.as_fd())));
                match killing.await.unwrap_or_else(|e| Err(io::Error::other(e))) {
                    Ok(_) => return,
                    Err(e) => warn!("worker process: not killed: {e}; try {n} of {KILLS}"),
                }
                sleep(KILL_DELAY).await;
            }
        });
    }
}
