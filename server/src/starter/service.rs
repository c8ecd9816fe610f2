//! The socket of the starter: one thread for each connection, which is one program.

use std::io::{self, IoSliceMut, Read, Write};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus};
use std::time::Duration;

use gpusession_proto::message;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, killpg};
use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg};
use nix::unistd::Pid;
use tracing::warn;

use super::{Request, STREAMS, Said};
use crate::local_service;
use crate::peer::Served;
use crate::pidfd::pidfd_open;

/// Bound on each read and write of a connection, except the wait for the program's end.
const IDLE_TIMEOUT: Duration = Duration::from_secs(5);
/// Most connections at a time, and so programs.
const MAX_CONNECTIONS: usize = 64;

/// Accepts connections until the process ends. `program` is the worker's.
pub fn serve(listener: &UnixListener, program: &Path, served: &Served) -> io::Result<()> {
    let (program, served) = (program.to_path_buf(), served.clone());
    local_service::accept(listener, "starter", MAX_CONNECTIONS, move |s| attend(s, &program, &served))
}

/// Starts the program of one connection, and ends it with the connection.
pub(super) fn attend(mut socket: UnixStream, program: &Path, served: &Served) -> io::Result<()> {
    socket.set_read_timeout(Some(IDLE_TIMEOUT))?;
    socket.set_write_timeout(Some(IDLE_TIMEOUT))?;
    let refused = match served.peer(&socket)? {
        Ok(_) => {
            let (request, streams) = receive(&mut socket)?;
            match Program::start(program, &request, streams) {
                Ok(started) => return started.attend(socket),
                Err(e) => format!("{}: {e}", program.display()),
            }
        }
        Err(why) => format!("the starter answers root and the server alone: {why}"),
    };
    warn!("starter: started no program: {refused}");
    socket.write_all(&message::encode(&Said::Refused(refused)))
}

/// A program with its group, both killed on drop.
struct Program {
    child: Child,
    reaped: bool,
}

impl Program {
    fn start(program: &Path, request: &Request, streams: [OwnedFd; STREAMS]) -> io::Result<Self> {
        let [input, output, errors] = streams;
        let child = Command::new(program)
            .arg(request.purpose.flag())
            .args(&request.arguments)
            .env_clear()
            .envs(request.environment.iter().map(|(name, value)| (name, value)))
            .current_dir("/")
            .stdin(input)
            .stdout(output)
            .stderr(errors)
            .process_group(0)
            .spawn()?;
        Ok(Self { child, reaped: false })
    }

    fn attend(mut self, mut socket: UnixStream) -> io::Result<()> {
        let pidfd = pidfd_open(self.child.id())?;
        socket.write_all(&message::encode(&Said::Started(self.child.id())))?;
        // The server sends nothing more: what comes is the end of the connection.
        let mut either = [pidfd.as_fd(), socket.as_fd()].map(|fd| PollFd::new(fd, PollFlags::POLLIN));
        while let Err(e) = poll(&mut either, PollTimeout::NONE) {
            if e != Errno::EINTR {
                return Err(e.into());
            }
        }
        let status = self.end()?;
        socket.write_all(&message::encode(&Said::Ended(status.into_raw())))
    }

    /// Kills what is left of the group, and reaps the program.
    fn end(&mut self) -> io::Result<ExitStatus> {
        // It is not reaped yet, so its number is that of no other process or group.
        if let Some(pid) = i32::try_from(self.child.id()).ok().filter(|_| !self.reaped) {
            let _ = killpg(Pid::from_raw(pid), Signal::SIGKILL);
        }
        self.reaped = true;
        self.child.wait()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        if !self.reaped {
            let _ = self.end();
        }
    }
}

/// Reads the request, and the streams that come beside its first byte.
fn receive(socket: &mut UnixStream) -> io::Result<(Request, [OwnedFd; STREAMS])> {
    let mut prefix = [0; 4];
    let (first, streams) = first_bytes(socket, &mut prefix)?;
    socket.read_exact(&mut prefix[first..])?;
    let mut body = vec![0; message::body_len(prefix).map_err(io::Error::other)?];
    socket.read_exact(&mut body)?;
    let request = message::decode(&body).map_err(io::Error::other)?;
    let streams = streams.try_into().map_err(|_| io::Error::other("not three streams beside the request"))?;
    Ok((request, streams))
}

/// Reads bytes with the descriptors beside them.
fn first_bytes(socket: &UnixStream, bytes: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    // The kernel closes those for which there is no room.
    let mut space = nix::cmsg_space!([RawFd; STREAMS]);
    let mut parts = [IoSliceMut::new(bytes)];
    let got = recvmsg::<()>(socket.as_raw_fd(), &mut parts, Some(&mut space), MsgFlags::MSG_CMSG_CLOEXEC)?;
    let mut found = Vec::new();
    for control in got.cmsgs()? {
        let ControlMessageOwned::ScmRights(raw) = control else { continue };
        // SAFETY: the kernel has just created these descriptors for this process, and each is taken
        // once.
        found.extend(raw.into_iter().map(|raw| unsafe { OwnedFd::from_raw_fd(raw) }));
    }
    match got.bytes {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        n => Ok((n, found)),
    }
}
