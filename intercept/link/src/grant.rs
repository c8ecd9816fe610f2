//! Asking the client daemon for a worker, or about the GPUs.

use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use gpusession_proto::grant::{Denial, Endpoint, MAX_REASON, Outcome, Reply, Request, VERSION, Want};
use gpusession_proto::message;
use gpusession_proto::readings::{Query, View};
use gpusession_proto::ticket;
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockType, UnixAddr, connect, send, setsockopt, socket, sockopt,
};
use nix::sys::time::{TimeVal, TimeValLike};

/// Where the daemon listens unless `GPUSESSION_SOCKET` says otherwise.
pub const SOCKET: &str = "/run/gpusession/grant.sock";

/// The daemon waits for a pending lease up to its `wait_ms`; this is only a bound on a daemon that hangs.
const PATIENCE: Duration = Duration::from_secs(120);
/// The daemon asks a server, and waits for nothing else.
const READINGS_PATIENCE: Duration = Duration::from_secs(15);
/// The daemon asks nobody for a version.
const VERSION_PATIENCE: Duration = Duration::from_secs(1);

/// A grant: the workers that serve this process, and the connection whose end tells the daemon that the process ended. Whoever
/// uses the workers keeps it for as long as the process lives.
pub struct Grant {
    /// One for each lease, in device order.
    pub endpoints: Vec<Endpoint>,
    connection: UnixStream,
    /// Where the daemon has bound its end.
    peer: Option<PathBuf>,
}

impl Grant {
    fn new(endpoints: Vec<Endpoint>, connection: UnixStream) -> Self {
        let peer = peer(&connection);
        Self { endpoints, connection, peer }
    }

    /// All workers serve the program.
    pub fn served(&self) {
        self.tell(&Outcome::Served);
    }

    /// The worker of this number could not be had: none of the grant is used. `again`: another one is asked for.
    pub fn unserved(self, endpoint: usize, reason: &str, again: bool) {
        let (lease, reason) = self.about(endpoint, reason);
        self.tell(&Outcome::Unserved { lease, reason, again });
    }

    /// The worker of this number is gone.
    pub fn lost(&self, endpoint: usize, reason: &str) {
        let (lease, reason) = self.about(endpoint, reason);
        self.tell(&Outcome::Lost { lease, reason });
    }

    fn about(&self, endpoint: usize, reason: &str) -> (String, String) {
        let lease = self.endpoints.get(endpoint).map(|e| e.lease.clone()).unwrap_or_default();
        (lease, reason.chars().take(MAX_REASON).collect())
    }

    /// For people who ask the daemon later: the program waits for nothing here, and goes on without.
    fn tell(&self, outcome: &Outcome) {
        // A program may have closed all its descriptors, and this one's number may be something of its own by now.
        if self.peer.is_some() && peer(&self.connection) == self.peer {
            let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
            let _ = send(self.connection.as_raw_fd(), &message::encode(outcome), flags);
        }
    }
}

/// What a connection is to; none where it is no connection to a named socket.
fn peer(connection: &UnixStream) -> Option<PathBuf> {
    connection.peer_addr().ok()?.as_pathname().map(Path::to_owned)
}

/// No GPU for this process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// Decides the `CUresult`.
    pub denial: Denial,
    /// One line for a person.
    pub reason: String,
}

impl Refused {
    fn new(denial: Denial, reason: impl Into<String>) -> Self {
        Self { denial, reason: reason.into() }
    }
}

/// Whether the program runs with more rights than its user: then nothing in the environment is believed.
pub fn privileged() -> bool {
    // SAFETY: getauxval reads the process's auxiliary vector and has no preconditions.
    unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
}

fn socket_path() -> PathBuf {
    match std::env::var_os("GPUSESSION_SOCKET") {
        Some(path) if !privileged() && !path.is_empty() => path.into(),
        _ => SOCKET.into(),
    }
}

/// Asks the daemon for workers. Connecting never blocks on a full backlog for longer than a second.
pub fn ask(environment: Vec<(String, String)>) -> Result<Grant, Refused> {
    match exchange(environment, Want::Workers, PATIENCE)? {
        (Reply::Granted(endpoints), _) if endpoints.is_empty() => {
            Err(Refused::new(Denial::NoDevice, "the grant names no worker"))
        }
        (Reply::Granted(endpoints), connection) => Ok(Grant::new(endpoints, connection)),
        (reply, _) => Err(refused(reply)),
    }
}

/// Asks the daemon about the GPUs that a worker would have; none is used for it.
pub fn readings(queries: Vec<Query>) -> Result<View, Refused> {
    match exchange(Vec::new(), Want::Readings(queries), READINGS_PATIENCE)? {
        (Reply::Readings(view), _) => Ok(view),
        (reply, _) => Err(refused(reply)),
    }
}

/// Asks the daemon for the CUDA version of the driver that a worker would load; no worker is used for it.
pub fn cuda_version() -> Result<u32, Refused> {
    match exchange(Vec::new(), Want::Version, VERSION_PATIENCE)? {
        (Reply::Version(version), _) => Ok(version),
        (reply, _) => Err(refused(reply)),
    }
}

fn refused(reply: Reply) -> Refused {
    match reply {
        Reply::Denied { denial, reason } => Refused { denial, reason },
        _ => Refused::new(Denial::ProtocolMismatch, "the daemon answered something else than it was asked"),
    }
}

fn exchange(
    environment: Vec<(String, String)>,
    want: Want,
    patience: Duration,
) -> Result<(Reply, UnixStream), Refused> {
    if std::env::var_os("GPUSESSION_DISABLE").is_some_and(|v| v == "1") && !privileged() {
        return Err(Refused::new(Denial::NoDevice, "GPUSESSION_DISABLE=1 is set"));
    }
    let path = socket_path();
    let failed = |what: &str, e: io::Error| {
        let denial = match e.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused | io::ErrorKind::PermissionDenied => {
                Denial::NoDevice
            }
            _ => Denial::NotReady,
        };
        Refused::new(denial, format!("{what} {}: {e}", path.display()))
    };
    let fd = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)
        .map_err(|e| failed("socket for", e.into()))?;
    // SO_SNDTIMEO bounds connect() too: on a full backlog it would wait for ever.
    setsockopt(&fd, sockopt::SendTimeout, &TimeVal::seconds(1))
        .map_err(|e| failed("socket for", e.into()))?;
    let address = UnixAddr::new(&path).map_err(|e| failed("address", e.into()))?;
    connect(fd.as_raw_fd(), &address).map_err(|e| failed("no daemon at", e.into()))?;
    let mut stream = UnixStream::from(fd);
    let request = Request {
        version: VERSION,
        lease: if privileged() { None } else { std::env::var("GPUSESSION_LEASE").ok() },
        session: if privileged() { None } else { std::env::var("GPUSESSION_ID").ok() },
        program: program(),
        executable: executable(),
        environment,
        want,
    };
    let exchange = (|| {
        stream.set_read_timeout(Some(patience))?;
        match stream.write_all(&message::encode(&request)) {
            // A daemon without a place for this user answers before it is asked, and closes.
            Err(e) if e.kind() == io::ErrorKind::BrokenPipe => {}
            written => written?,
        }
        let mut prefix = [0; 4];
        stream.read_exact(&mut prefix)?;
        let mut body = vec![0; message::body_len(prefix).map_err(io::Error::other)?];
        stream.read_exact(&mut body)?;
        message::decode::<Reply>(&body).map_err(io::Error::other)
    })();
    let reply = exchange.map_err(|e| failed("exchange with the daemon at", e))?;
    Ok((reply, stream))
}

/// The program's name, as listings show it.
fn program() -> String {
    let name = std::fs::read_to_string("/proc/self/comm").unwrap_or_default();
    name.trim().chars().take(64).collect()
}

/// The file that it runs.
fn executable() -> String {
    let path = std::fs::read_link("/proc/self/exe").unwrap_or_default();
    ticket::shortened(&path.to_string_lossy()).to_owned()
}
