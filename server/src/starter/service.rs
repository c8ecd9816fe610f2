//! The socket of the starter: one thread for each connection, which is one program or act.

use std::io::{self, IoSlice, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus};
use std::time::Duration;

use gpusession_proto::message;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use tracing::warn;

use super::{Act, Answer, Group, Purpose, Request, Said, first_bytes};
use crate::cgroups::{Cgroups, ClientBounds};
use crate::local_service;
use crate::peer::Served;
use crate::pidfd::pidfd_open;
use crate::spawn;

/// Bound on each read and write of a connection, except the wait for the program's end.
const IDLE_TIMEOUT: Duration = Duration::from_secs(5);
/// Most connections at a time, and so programs and acts: each worker has one.
const MAX_CONNECTIONS: usize = 6144;
/// Weight of the processor time of measurements, against 100 for a client's workers.
const MEASURE_WEIGHT: u64 = 20;

/// Programs that a starter starts.
#[derive(Debug, Clone)]
pub struct Programs {
    /// Path of the worker's program.
    pub program: PathBuf,
    /// Control groups of the starter's unit.
    pub groups: Cgroups,
}

/// Accepts connections until the process ends; `acts` does what needs no program.
///
/// [`spawn::hold_worker_fd`] comes first.
pub fn serve(
    listener: &UnixListener,
    programs: Programs,
    served: &Served,
    acts: impl Fn(&Act, Vec<OwnedFd>) -> io::Result<Vec<Answer>> + Send + Sync + 'static,
) -> io::Result<()> {
    let served = served.clone();
    local_service::accept(listener, "starter", MAX_CONNECTIONS, move |socket| {
        attend(socket, &programs, &served, &acts)
    })
}

/// Starts the program of one connection and ends it with the connection, or acts.
fn attend(
    mut socket: UnixStream,
    programs: &Programs,
    served: &Served,
    acts: &impl Fn(&Act, Vec<OwnedFd>) -> io::Result<Vec<Answer>>,
) -> io::Result<()> {
    socket.set_read_timeout(Some(IDLE_TIMEOUT))?;
    socket.set_write_timeout(Some(IDLE_TIMEOUT))?;
    programs.groups.tick();
    let refused = match served.peer(&socket)? {
        Ok(_) => match receive(&mut socket) {
            Ok((Request { purpose: Purpose::Act(act), .. }, descriptors)) => {
                return answer(&mut socket, acts(&act, descriptors));
            }
            Ok((request, descriptors)) => match Program::start(request, descriptors, programs) {
                Ok(started) => return started.attend(socket),
                Err(e) => format!("{}: {e}", programs.program.display()),
            },
            Err(e) => format!("the request cannot be read: {e}; a starter of the server's version can"),
        },
        Err(why) => format!("the starter answers root and the server alone: {why}"),
    };
    warn!("starter: started no program: {refused}");
    socket.write_all(&message::encode(&Said::Refused(refused)))
}

/// Sends the answers of an act.
fn answer(socket: &mut UnixStream, answers: io::Result<Vec<Answer>>) -> io::Result<()> {
    let last = match &answers {
        Ok(_) => Answer::Done,
        Err(e) => Answer::Failed(e.to_string(), e.raw_os_error()),
    };
    for answer in answers.into_iter().flatten().chain([last]) {
        socket.write_all(&message::encode(&Said::Answer(answer)))?;
    }
    Ok(())
}

/// A program with its groups, which end on drop.
struct Program {
    child: Child,
    reaped: bool,
    /// Its control group, and all groups of the unit.
    group: Option<(Group, Cgroups)>,
    kind: Kind,
}

/// Rest of an exited program that is not removed at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// All is removed.
    Helper,
    /// Its control group, which the server asks about and removes.
    Worker {
        /// Whether it lives on after a closed connection.
        outlives: bool,
    },
    /// The servers that it has started, which programs still use when it has died.
    Daemon,
}

impl Program {
    fn start(request: Request, descriptors: Vec<OwnedFd>, programs: &Programs) -> io::Result<Self> {
        let Request { purpose, arguments, environment } = request;
        let Programs { program, groups } = programs;
        let mut descriptors = descriptors.into_iter();
        let mut stream = || descriptors.next().ok_or(io::ErrorKind::InvalidInput);
        let (input, output, errors) = (stream()?, stream()?, stream()?);
        let mut command = Command::new(program);
        command
            .args(purpose.flag())
            .args(arguments)
            .env_clear()
            .envs(environment)
            .current_dir("/")
            .stdin(input)
            .stdout(output)
            .stderr(errors)
            .process_group(0);
        let (of_it, kind) = match purpose {
            Purpose::Measure(group) => (Some(group), Kind::Helper),
            Purpose::Worker { group, outlives } => (Some(group), Kind::Worker { outlives }),
            Purpose::Mps => (None, Kind::Daemon),
            _ => (None, Kind::Helper),
        };
        if kind != (Kind::Worker { outlives: true }) {
            // This thread waits for the program.
            spawn::bind(&mut command);
        }
        let mut group = None;
        if let (Some(of_it), Some(channel)) = (of_it, descriptors.next()) {
            let procs = groups.create(&of_it.of, &of_it.name(), of_it.bounds);
            if kind == Kind::Helper {
                groups.bound_client(&of_it.of, ClientBounds { memory: u64::MAX, cpu_weight: MEASURE_WEIGHT });
            }
            group = Some((of_it, groups.clone()));
            spawn::as_worker(&mut command, channel, procs.inspect_err(|_| leave(group.as_ref()))?);
        }
        let child = command.spawn().inspect_err(|_| leave(group.as_ref()))?;
        Ok(Self { child, reaped: false, group, kind })
    }

    fn attend(mut self, mut socket: UnixStream) -> io::Result<()> {
        let pidfd = pidfd_open(self.child.id())?;
        let said = message::encode(&Said::Started(self.child.id()));
        let parts = [IoSlice::new(&said)];
        let raw = [pidfd.as_raw_fd()];
        // The process may exit, and its number be another's, before the server opens a pidfd.
        let rights = [ControlMessage::ScmRights(&raw)];
        let sent = sendmsg::<()>(socket.as_raw_fd(), &parts, &rights, MsgFlags::MSG_NOSIGNAL, None)?;
        socket.write_all(&said[sent..])?;
        // The server sends nothing more: what comes is the end of the connection.
        let mut either = [pidfd.as_fd(), socket.as_fd()].map(|fd| PollFd::new(fd, PollFlags::POLLIN));
        while let Err(e) = poll(&mut either, PollTimeout::NONE) {
            if e != Errno::EINTR {
                return Err(e.into());
            }
        }
        let exited = either[0].revents().is_some_and(|found| !found.is_empty());
        if self.kind == (Kind::Worker { outlives: true }) && !exited {
            // The next server attends to it.
            drop(socket);
            self.reaped = true;
            self.child.wait()?;
            return Ok(());
        }
        let status = self.end(!exited)?;
        socket.write_all(&message::encode(&Said::Ended(status.into_raw())))
    }

    /// Kills what is left of the group, and reaps the program; `alone`: the server is gone.
    fn end(&mut self, alone: bool) -> io::Result<ExitStatus> {
        // It is not reaped yet, so its number is that of no other process or group.
        if !self.reaped && (alone || self.kind != Kind::Daemon) {
            let _ = spawn::end_group(self.child.id());
        }
        self.reaped = true;
        let status = self.child.wait();
        if alone || !matches!(self.kind, Kind::Worker { .. }) {
            leave(self.group.as_ref());
        }
        status
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        if !self.reaped {
            let _ = self.end(true);
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
    let (first, descriptors) = first_bytes(socket.as_fd(), &mut prefix)?;
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
