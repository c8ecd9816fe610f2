//! The server's way to programs that load the driver or meet a client's bytes: a starter, or
//! children of this process.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Output, Stdio};
use std::time::Duration;

use gpusession_proto::message;
use nix::fcntl::OFlag;
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use nix::unistd::pipe2;
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::UnixStream;
use tokio::net::unix::pipe;
use tokio::process::{Child, Command};
use tokio::time::timeout;

use super::desk::Desk;
use super::{Group, Purpose, Request, STREAMS, Said, away, first_bytes};
use crate::cgroups::Cgroups;
use crate::spawn::{Spawner, clean_environment, end_group, socket_pair};

/// Longest time for the start of a program, and of the starter before it.
const START_TIMEOUT: Duration = Duration::from_secs(20);

/// Most bytes that a program without input may write to each of its streams.
const MAX_OUTPUT: u64 = 1 << 20;

/// Way to start programs that load the driver or meet a client's bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Starter {
    /// Children of this process, with its user; the worker's program.
    Here(PathBuf),
    /// Socket of `gpuserver-starter`.
    Socket(PathBuf),
}

/// A started program, killed with its group on drop.
#[derive(Debug)]
pub enum Program {
    /// Child of this process, and leader of its group.
    Child(Child),
    /// Connection to the starter, with what it has sent of its next message, and the process id.
    Started(UnixStream, Vec<u8>, u32),
}

impl Program {
    /// Waits for its end; loses nothing if it is dropped before.
    pub async fn wait(&mut self) -> io::Result<ExitStatus> {
        match self {
            Self::Child(child) => child.wait().await,
            Self::Started(socket, part, _) => match hear(socket, part).await? {
                Said::Ended(status) => Ok(ExitStatus::from_raw(status)),
                other => Err(unexpected(&other)),
            },
        }
    }

    /// Returns the status of a program that has exited.
    pub async fn exited(&mut self) -> Option<ExitStatus> {
        timeout(Duration::ZERO, self.wait()).await.ok()?.ok()
    }

    /// Kills it, without a wait for its end.
    pub async fn kill(&mut self) {
        match self {
            Self::Child(child) => drop(child.start_kill()),
            // To the starter this is the end of the connection; it still tells the wait status.
            Self::Started(socket, ..) => drop(socket.shutdown().await),
        }
    }

    /// Returns the process id; `None` after its end.
    pub fn id(&self) -> Option<u32> {
        match self {
            Self::Child(child) => child.id(),
            Self::Started(.., pid) => Some(*pid),
        }
    }
}

/// A program of the starter with a worker's channel.
#[derive(Debug)]
pub struct StartedWorker {
    /// Connection to the starter.
    pub program: Program,
    /// Descriptor of the process, which the starter has not reaped when it opens it.
    pub pidfd: OwnedFd,
    /// Supervisor's end of the channel.
    pub channel: OwnedFd,
}

impl Drop for Program {
    fn drop(&mut self) {
        // Once it is reaped, its number may be that of another group.
        if let Self::Child(child) = self
            && let Some(group) = child.id()
        {
            let _ = end_group(group);
        }
    }
}

impl Starter {
    /// Returns the way of this configuration; `socket`: its key `starter`.
    pub fn new(socket: Option<&Path>, program: &Path) -> Self {
        socket.map_or_else(|| Self::Here(program.into()), |socket| Self::Socket(socket.into()))
    }

    /// Starts a program that talks on pipes: its input, and its output.
    ///
    /// It exits at EOF on its input, however this process exits.
    pub async fn helper(
        &self,
        purpose: Purpose,
        driver: &Path,
        more: &[&str],
    ) -> io::Result<(Program, pipe::Sender, pipe::Receiver)> {
        let (theirs_in, to) = pipe2(OFlag::O_CLOEXEC)?;
        let (from, theirs_out) = pipe2(OFlag::O_CLOEXEC)?;
        let errors = io::stderr().as_fd().try_clone_to_owned()?;
        let streams = [theirs_in, theirs_out, errors];
        let more: Vec<_> = more.iter().map(OsString::from).collect();
        let started = self.start(request(purpose, driver, &more), streams).await?;
        Ok((started, pipe::Sender::from_owned_fd(to)?, pipe::Receiver::from_owned_fd(from)?))
    }

    /// Returns the way to the starter's acts; `None`: this process does everything itself.
    pub fn desk(&self) -> Option<Desk> {
        match self {
            Self::Here(_) => None,
            Self::Socket(socket) => Some(Desk::at(socket)),
        }
    }

    /// Starts a program with these streams that ends with this process, however that exits.
    pub async fn bound(
        &self,
        request: Request,
        streams: [OwnedFd; STREAMS],
        spawner: &Spawner,
    ) -> io::Result<Program> {
        match self {
            Self::Here(program) => {
                let started = spawner.start_bound(command(program, &request, streams)).await;
                started.map(Program::Child).map_err(|e| not(program, &e))
            }
            Self::Socket(_) => self.start(request, streams).await,
        }
    }

    /// Starts a program that answers on its output; returns its input, too.
    pub async fn asked(&self, request: Request) -> io::Result<(Program, pipe::Sender, pipe::Receiver)> {
        let (theirs_in, to) = pipe2(OFlag::O_CLOEXEC)?;
        let (from, theirs_out) = pipe2(OFlag::O_CLOEXEC)?;
        let nothing = File::options().write(true).open("/dev/null")?.into();
        let started = self.start(request, [theirs_in, theirs_out, nothing]).await?;
        Ok((started, pipe::Sender::from_owned_fd(to)?, pipe::Receiver::from_owned_fd(from)?))
    }

    /// Runs a program of a driver without input, and returns what it wrote.
    pub async fn output(
        &self,
        purpose: Purpose,
        driver: &Path,
        more: &[OsString],
        variables: &[(OsString, OsString)],
    ) -> io::Result<Output> {
        let (from, theirs_out) = pipe2(OFlag::O_CLOEXEC)?;
        let (errors, theirs_err) = pipe2(OFlag::O_CLOEXEC)?;
        let nothing = File::open("/dev/null")?.into();
        let streams = [nothing, theirs_out, theirs_err];
        let mut request = request(purpose, driver, more);
        request.environment.extend_from_slice(variables);
        let mut started = self.start(request, streams).await?;
        let (stdout, stderr) = tokio::try_join!(written(from), written(errors))?;
        Ok(Output { status: started.wait().await?, stdout, stderr })
    }

    /// Starts the endpoint of a measurement; returns it with the other end of its channel.
    ///
    /// A child of this process gets its control group in `groups`, of which the caller removes it.
    pub async fn endpoint(
        &self,
        group: Group,
        spawner: &Spawner,
        groups: &Cgroups,
    ) -> io::Result<(Program, OwnedFd)> {
        let environment = clean_environment(Path::new(""));
        match self {
            Self::Here(program) => {
                let procs = groups.create(&group.of, &group.name(), group.bounds)?;
                let flag = &[Purpose::MEASURE];
                let (child, channel) = spawner
                    .start(program, flag, environment, false, procs)
                    .await
                    .map_err(|e| not(program, &e))?;
                Ok((Program::Child(child), channel))
            }
            Self::Socket(path) => {
                let StartedWorker { program, channel, .. } =
                    with_channel(path, Purpose::Measure(group), environment).await?;
                Ok((program, channel))
            }
        }
    }

    async fn start(&self, request: Request, streams: [OwnedFd; STREAMS]) -> io::Result<Program> {
        match self {
            Self::Here(program) => {
                command(program, &request, streams).spawn().map(Program::Child).map_err(|e| not(program, &e))
            }
            Self::Socket(path) => Ok(started(path, &request, &streams).await?.0),
        }
    }
}

/// Has the starter at `path` start a program with a worker's channel.
pub async fn with_channel(
    path: &Path,
    purpose: Purpose,
    environment: Vec<(OsString, OsString)>,
) -> io::Result<StartedWorker> {
    let (channel, theirs) = socket_pair()?;
    let nothing = || File::options().read(true).write(true).open("/dev/null");
    let errors = io::stderr().as_fd().try_clone_to_owned()?;
    let descriptors = [nothing()?.into(), nothing()?.into(), errors, theirs];
    let request = Request { purpose, arguments: Vec::new(), environment };
    let (program, pidfd) = started(path, &request, &descriptors).await?;
    let pidfd = pidfd.ok_or_else(|| away(path, &io::Error::other("it sent no pidfd")))?;
    Ok(StartedWorker { program, pidfd, channel })
}

fn request(purpose: Purpose, driver: &Path, more: &[OsString]) -> Request {
    let arguments = [driver.as_os_str().to_owned()].into_iter();
    Request {
        purpose,
        arguments: arguments.chain(more.iter().cloned()).collect(),
        environment: clean_environment(driver),
    }
}

fn not(program: &Path, e: &io::Error) -> io::Error {
    io::Error::new(e.kind(), format!("{}: cannot be started: {e}", program.display()))
}

/// Has the starter at `path` start a program; returns its pidfd, too, unless the starter is of an
/// earlier version.
async fn started(
    path: &Path,
    request: &Request,
    descriptors: &[OwnedFd],
) -> io::Result<(Program, Option<OwnedFd>)> {
    let asked = timeout(START_TIMEOUT, ask(path, request, descriptors)).await;
    let asked = asked.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
    asked.map_err(|e| away(path, &e))
}

/// Reads what a program writes until it ends.
async fn written(pipe: OwnedFd) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    pipe::Receiver::from_owned_fd(pipe)?.take(MAX_OUTPUT + 1).read_to_end(&mut bytes).await?;
    match bytes.len() as u64 {
        0..=MAX_OUTPUT => Ok(bytes),
        _ => Err(io::Error::other(format!("it wrote more than {} MiB; killed", MAX_OUTPUT >> 20))),
    }
}

fn command(program: &Path, request: &Request, streams: [OwnedFd; STREAMS]) -> Command {
    let [input, output, errors] = streams;
    let mut command = Command::new(program);
    command
        .args(request.purpose.flag())
        .args(&request.arguments)
        .env_clear()
        .envs(request.environment.iter().map(|(name, value)| (name, value)))
        .current_dir("/")
        .stdin(Stdio::from(input))
        .stdout(Stdio::from(output))
        .stderr(Stdio::from(errors))
        .process_group(0)
        .kill_on_drop(true);
    command
}

/// Has the starter start a program; its connection is the program's life.
async fn ask(
    path: &Path,
    request: &Request,
    descriptors: &[OwnedFd],
) -> io::Result<(Program, Option<OwnedFd>)> {
    let bytes = message::encode(request);
    message::body_len([bytes[0], bytes[1], bytes[2], bytes[3]]).map_err(io::Error::other)?;
    let mut socket = UnixStream::connect(path).await?;
    let raw: Vec<_> = descriptors.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&raw)];
    socket.writable().await?;
    let sent = socket.try_io(Interest::WRITABLE, || {
        let parts = [IoSlice::new(&bytes)];
        sendmsg::<()>(socket.as_raw_fd(), &parts, &rights, MsgFlags::MSG_NOSIGNAL, None)
            .map_err(io::Error::from)
    });
    let sent = match sent {
        Ok(n) => socket.write_all(&bytes[n..]).await,
        Err(e) => Err(e),
    };
    // A starter that refuses the caller answers before it reads.
    let (mut part, mut pidfd) = (vec![0; 4], Vec::new());
    let first = socket.async_io(Interest::READABLE, || first_bytes(socket.as_fd(), &mut part)).await;
    let first = first.map(|(n, beside)| {
        part.truncate(n);
        pidfd = beside;
    });
    let said = match first {
        Ok(()) => hear(&mut socket, &mut part).await,
        Err(e) => Err(e),
    };
    match said.map_err(|e| sent.err().unwrap_or(e))? {
        Said::Started(pid) => Ok((Program::Started(socket, Vec::new(), pid), pidfd.pop())),
        Said::Refused(why) => Err(io::Error::other(why)),
        other => Err(unexpected(&other)),
    }
}

/// Reads a message; `part`: what an earlier call has read of it.
async fn hear(socket: &mut UnixStream, part: &mut Vec<u8>) -> io::Result<Said> {
    loop {
        let wanted = match part.first_chunk::<4>() {
            Some(prefix) => 4 + message::body_len(*prefix).map_err(io::Error::other)?,
            None => 4,
        };
        if part.len() == wanted && wanted > 4 {
            return message::decode(&std::mem::take(part)[4..]).map_err(io::Error::other);
        }
        // Bytes are read or not; a dropped future has read none.
        let more = (wanted - part.len()) as u64;
        if (&mut *socket).take(more).read_buf(part).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
}

fn unexpected(said: &Said) -> io::Error {
    io::Error::other(format!("the starter sent {said:?} out of turn"))
}

/// Describes the users of a server's processes; `socket`: its key `starter`.
pub fn users(socket: Option<&Path>) -> &'static str {
    match socket {
        Some(_) => "one for the server, one for its workers and all else that loads the driver",
        None => "one for all",
    }
}
