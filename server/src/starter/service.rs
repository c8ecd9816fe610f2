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
use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg};
use tracing::warn;

use super::{Group, Purpose, Request, STREAMS, Said};
use crate::cgroups::Cgroups;
use crate::local_service;
use crate::peer::Served;
use crate::pidfd::pidfd_open;
use crate::spawn;

/// Bound on each read and write of a connection, except the wait for the program's end.
const IDLE_TIMEOUT: Duration = Duration::from_secs(5);
/// Most connections at a time, and so programs.
const MAX_CONNECTIONS: usize = 64;

/// Accepts connections until the process ends. `program` is the worker's.
///
/// [`spawn::hold_worker_fd`] comes first.
pub fn serve(listener: &UnixListener, program: &Path, served: &Served, groups: &Cgroups) -> io::Result<()> {
    let (program, served, groups) = (program.to_path_buf(), served.clone(), groups.clone());
    local_service::accept(listener, "starter", MAX_CONNECTIONS, move |socket| {
        attend(socket, &program, &served, &groups)
    })
}

/// Starts the program of one connection, and ends it with the connection.
fn attend(mut socket: UnixStream, program: &Path, served: &Served, groups: &Cgroups) -> io::Result<()> {
    socket.set_read_timeout(Some(IDLE_TIMEOUT))?;
    socket.set_write_timeout(Some(IDLE_TIMEOUT))?;
    let refused = match served.peer(&socket)? {
        Ok(_) => match receive(&mut socket) {
            Ok((request, descriptors)) => match Program::start(program, request, descriptors, groups) {
                Ok(started) => return started.attend(socket),
                Err(e) => format!("{}: {e}", program.display()),
            },
            Err(e) => format!("the request cannot be read: {e}; a starter of the server's version can"),
        },
        Err(why) => format!("the starter answers root and the server alone: {why}"),
    };
    warn!("starter: started no program: {refused}");
    socket.write_all(&message::encode(&Said::Refused(refused)))
}

/// A program with its groups, which end on drop.
struct Program {
    child: Child,
    reaped: bool,
    /// Its control group, and all groups of the unit.
    group: Option<(Group, Cgroups)>,
}

impl Program {
    fn start(
        program: &Path,
        request: Request,
        descriptors: Vec<OwnedFd>,
        groups: &Cgroups,
    ) -> io::Result<Self> {
        let Request { purpose, arguments, environment } = request;
        let mut descriptors = descriptors.into_iter();
        let mut stream = || descriptors.next().ok_or(io::ErrorKind::InvalidInput);
        let (input, output, errors) = (stream()?, stream()?, stream()?);
        let mut command = Command::new(program);
        command
            .arg(purpose.flag())
            .args(arguments)
            .env_clear()
            .envs(environment)
            .current_dir("/")
            .stdin(input)
            .stdout(output)
            .stderr(errors)
            .process_group(0);
        // This thread waits for the program.
        spawn::bind(&mut command);
        let mut group = None;
        if let (Purpose::Measure(of_it), Some(channel)) = (purpose, descriptors.next()) {
            let procs = groups.create(&of_it.of, &of_it.name(), of_it.bounds);
            group = Some((of_it, groups.clone()));
            spawn::as_worker(&mut command, channel, procs.inspect_err(|_| leave(group.as_ref()))?);
        }
        let child = command.spawn().inspect_err(|_| leave(group.as_ref()))?;
        Ok(Self { child, reaped: false, group })
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
        if !self.reaped {
            spawn::end_group(self.child.id());
        }
        self.reaped = true;
        let status = self.child.wait();
        leave(self.group.as_ref());
        status
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        if !self.reaped {
            let _ = self.end();
        }
    }
}

/// Removes a control group, with what is left in it.
fn leave(group: Option<&(Group, Cgroups)>) {
    if let Some((group, groups)) = group {
        groups.remove(&group.of, &group.name());
    }
}

/// Reads the request, and the descriptors that come beside its first byte.
fn receive(socket: &mut UnixStream) -> io::Result<(Request, Vec<OwnedFd>)> {
    let mut prefix = [0; 4];
    let (first, descriptors) = first_bytes(socket, &mut prefix)?;
    socket.read_exact(&mut prefix[first..])?;
    let mut body = vec![0; message::body_len(prefix).map_err(io::Error::other)?];
    socket.read_exact(&mut body)?;
    let request: Request = message::decode(&body).map_err(io::Error::other)?;
    match (descriptors.len(), request.purpose.descriptors()) {
        (found, wanted) if found == wanted => Ok((request, descriptors)),
        (found, wanted) => {
            Err(io::Error::other(format!("{found} descriptors beside the request; it needs {wanted}")))
        }
    }
}

/// Reads bytes with the descriptors beside them.
fn first_bytes(socket: &UnixStream, bytes: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    // The kernel closes those for which there is no room.
    let mut space = nix::cmsg_space!([RawFd; STREAMS + 1]);
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
