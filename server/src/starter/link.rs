//! The server's way to programs that load the driver: a starter, or children of this process.

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

use super::{Purpose, Request, STREAMS, Said};
use crate::spawn::clean_environment;

/// Longest time for the start of a program, and of the starter before it.
const START_TIMEOUT: Duration = Duration::from_secs(20);

/// Most bytes that a program without input may write to each of its streams.
const MAX_OUTPUT: u64 = 1 << 20;

/// Way to start programs that load the driver.
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
    /// Child of this process.
    Child(Child),
    /// Connection to the starter.
    Started(UnixStream),
}

impl Program {
    /// Waits for its end.
    pub async fn wait(&mut self) -> io::Result<ExitStatus> {
        match self {
            Self::Child(child) => child.wait().await,
            Self::Started(socket) => match hear(socket).await? {
                Said::Ended(status) => Ok(ExitStatus::from_raw(status)),
                other => Err(unexpected(&other)),
            },
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
        let started = self.start(purpose, driver, more, [theirs_in, theirs_out, errors]).await?;
        Ok((started, pipe::Sender::from_owned_fd(to)?, pipe::Receiver::from_owned_fd(from)?))
    }

    /// Runs a program without input, and returns what it wrote.
    pub async fn output(&self, purpose: Purpose, driver: &Path) -> io::Result<Output> {
        let (from, theirs_out) = pipe2(OFlag::O_CLOEXEC)?;
        let (errors, theirs_err) = pipe2(OFlag::O_CLOEXEC)?;
        let nothing = File::open("/dev/null")?.into();
        let mut started = self.start(purpose, driver, &[], [nothing, theirs_out, theirs_err]).await?;
        let (stdout, stderr) = tokio::try_join!(written(from), written(errors))?;
        Ok(Output { status: started.wait().await?, stdout, stderr })
    }

    async fn start(
        &self,
        purpose: Purpose,
        driver: &Path,
        more: &[&str],
        streams: [OwnedFd; STREAMS],
    ) -> io::Result<Program> {
        let arguments = [driver.as_os_str().to_owned()].into_iter();
        let request = Request {
            purpose,
            arguments: arguments.chain(more.iter().map(OsString::from)).collect(),
            environment: clean_environment(driver),
        };
        match self {
            Self::Here(program) => child(program, &request, streams).map(Program::Child).map_err(|e| {
                io::Error::new(e.kind(), format!("{}: cannot be started: {e}", program.display()))
            }),
            Self::Socket(path) => {
                let asked = timeout(START_TIMEOUT, ask(path, &request, streams)).await;
                let asked = asked.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
                asked.map(Program::Started).map_err(|e| away(path, &e))
            }
        }
    }
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

fn child(program: &Path, request: &Request, streams: [OwnedFd; STREAMS]) -> io::Result<Child> {
    let [input, output, errors] = streams;
    Command::new(program)
        .arg(request.purpose.flag())
        .args(&request.arguments)
        .env_clear()
        .envs(request.environment.iter().map(|(name, value)| (name, value)))
        .current_dir("/")
        .stdin(Stdio::from(input))
        .stdout(Stdio::from(output))
        .stderr(Stdio::from(errors))
        .process_group(0)
        .kill_on_drop(true)
        .spawn()
}

/// Has the starter start a program; returns the connection, which is the program's life.
async fn ask(path: &Path, request: &Request, streams: [OwnedFd; STREAMS]) -> io::Result<UnixStream> {
    let bytes = message::encode(request);
    message::body_len([bytes[0], bytes[1], bytes[2], bytes[3]]).map_err(io::Error::other)?;
    let mut socket = UnixStream::connect(path).await?;
    let raw = streams.each_ref().map(AsRawFd::as_raw_fd);
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
    match hear(&mut socket).await.map_err(|e| sent.err().unwrap_or(e))? {
        Said::Started(_) => Ok(socket),
        Said::Refused(why) => Err(io::Error::other(why)),
        other => Err(unexpected(&other)),
    }
}

async fn hear(socket: &mut UnixStream) -> io::Result<Said> {
    let mut prefix = [0; 4];
    socket.read_exact(&mut prefix).await?;
    let mut body = vec![0; message::body_len(prefix).map_err(io::Error::other)?];
    socket.read_exact(&mut body).await?;
    message::decode(&body).map_err(io::Error::other)
}

fn unexpected(said: &Said) -> io::Error {
    io::Error::other(format!("the starter sent {said:?} out of turn"))
}

fn away(socket: &Path, e: &io::Error) -> io::Error {
    let unit = unit_of(socket);
    let text = format!("the starter at {}: {e}; systemctl status {unit}", socket.display());
    io::Error::new(e.kind(), text)
}

/// Describes the users of a server's processes; `socket`: its key `starter`.
pub fn users(socket: Option<&Path>) -> &'static str {
    match socket {
        Some(_) => "one for the server and its workers, one for the monitor",
        None => "one for all",
    }
}

/// Returns the unit of the starter whose socket is at `socket`, without the type's suffix.
pub fn unit_of(socket: &Path) -> String {
    let folder = socket.parent().and_then(Path::file_name).and_then(|name| name.to_str());
    let folder = folder.unwrap_or(super::USER);
    let instance = folder.strip_prefix("gpuserver-worker-");
    instance.map_or_else(|| folder.into(), |name| format!("gpuserver-worker@{name}"))
}
