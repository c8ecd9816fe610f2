//! Requests to the client daemon: for workers, for readings of the GPUs, for a version.

use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use gpusession_proto::grant::{Denial, Endpoint, MAX_REASON, Outage, Outcome, Reply, Request, VERSION, Want};
use gpusession_proto::message;
use gpusession_proto::readings::{Query, View};
use gpusession_proto::ticket;
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockType, UnixAddr, connect, send, setsockopt, socket, sockopt,
};
use nix::sys::time::{TimeVal, TimeValLike};

/// The daemon's socket unless `GPUSESSION_SOCKET` names another one.
pub const SOCKET: &str = "/run/gpusession/grant.sock";

/// Timeout for a daemon that hangs.
///
/// The daemon itself waits for a pending lease up to its `wait_ms`.
const GRANT_TIMEOUT: Duration = Duration::from_secs(120);
/// Timeout for readings: the daemon asks a server and waits for no lease.
const READINGS_TIMEOUT: Duration = Duration::from_secs(15);
/// Timeout for a version, which the daemon knows without asking a server.
const VERSION_TIMEOUT: Duration = Duration::from_secs(1);
/// Timeout for the state of a worker, which the daemon knows as well.
const OUTAGE_TIMEOUT: Duration = Duration::from_secs(2);

/// Most daemons that are asked: one that exits leaves a request without an answer.
const MAX_ASKED: usize = 3;

/// Socket of the daemon that granted the workers.
///
/// Later questions come from other threads, which must not read the program's environment.
static DAEMON: OnceLock<PathBuf> = OnceLock::new();

/// Workers that serve this process, and the connection to the daemon.
///
/// The connection's end tells the daemon that the process has exited, so the user of the workers
/// keeps the grant until then.
pub struct Grant {
    /// Worker of each lease, in device order.
    pub endpoints: Vec<Endpoint>,
    connection: UnixStream,
    /// Address of the connection's other end, to recognize the connection later.
    peer: Option<PathBuf>,
}

impl Grant {
    fn new(endpoints: Vec<Endpoint>, connection: UnixStream) -> Self {
        let peer = peer(&connection);
        Self { endpoints, connection, peer }
    }

    /// Reports that all workers serve the program.
    pub fn served(&self) {
        self.tell(&Outcome::Served);
    }

    /// Reports that the worker with this number does not serve, and returns the whole grant.
    ///
    /// `again`: the program will ask for another grant.
    pub fn unserved(self, endpoint: usize, reason: &str, again: bool) {
        let (lease, reason) = self.about(endpoint, reason);
        self.tell(&Outcome::Unserved { lease, reason, again });
    }

    /// Reports that the worker with this number is lost.
    pub fn lost(&self, endpoint: usize, reason: &str) {
        let (lease, reason) = self.about(endpoint, reason);
        self.tell(&Outcome::Lost { lease, reason });
    }

    fn about(&self, endpoint: usize, reason: &str) -> (String, String) {
        let lease = self.endpoints.get(endpoint).map(|e| e.lease.clone()).unwrap_or_default();
        (lease, reason.chars().take(MAX_REASON).collect())
    }

    /// Sends a report without waiting; people see it in the daemon's status.
    fn tell(&self, outcome: &Outcome) {
        // The program may have closed this descriptor and reused its number.
        if self.peer.is_some() && peer(&self.connection) == self.peer {
            let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
            let _ = send(self.connection.as_raw_fd(), &message::encode(outcome), flags);
        }
    }
}

/// Returns the path of a connection's other end; `None` unless that is a named socket.
fn peer(connection: &UnixStream) -> Option<PathBuf> {
    connection.peer_addr().ok()?.as_pathname().map(Path::to_owned)
}

/// Reason why this process gets no answer or no GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// Kind of refusal, which determines the `CUresult`.
    pub denial: Denial,
    /// One line of text for people.
    pub reason: String,
}

impl Refused {
    fn new(denial: Denial, reason: impl Into<String>) -> Self {
        Self { denial, reason: reason.into() }
    }
}

/// Returns `true` if the program has more rights than its user, so that it must not trust the
/// environment.
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

/// Asks the daemon for workers.
///
/// Connecting waits at most a second, even if the daemon's backlog is full.
pub fn ask(environment: Vec<(String, String)>) -> Result<Grant, Refused> {
    let _ = DAEMON.set(socket_path());
    match exchange(environment, Want::Workers, GRANT_TIMEOUT)? {
        (Reply::Granted(endpoints), _) if endpoints.is_empty() => {
            Err(Refused::new(Denial::NoDevice, "the grant names no worker"))
        }
        (Reply::Granted(endpoints), connection) => Ok(Grant::new(endpoints, connection)),
        (reply, _) => Err(refused(reply)),
    }
}

/// Asks the daemon about the GPUs of the process's leases, without using a worker.
pub fn readings(queries: Vec<Query>) -> Result<View, Refused> {
    match exchange(Vec::new(), Want::Readings(queries), READINGS_TIMEOUT)? {
        (Reply::Readings(view), _) => Ok(view),
        (reply, _) => Err(refused(reply)),
    }
}

/// Asks the daemon for the CUDA version of the driver that a worker would load, without using a
/// worker.
pub fn cuda_version() -> Result<u32, Refused> {
    match exchange(Vec::new(), Want::Version, VERSION_TIMEOUT)? {
        (Reply::Version(version), _) => Ok(version),
        (reply, _) => Err(refused(reply)),
    }
}

/// Reports an interrupted connection to the daemon that granted its worker.
///
/// Returns the reason if the daemon knows that the worker no longer waits for this process. Waits
/// at most 3 s; a daemon that does not answer knows nothing.
pub fn interrupted(outage: Outage) -> Option<String> {
    let request = Request {
        version: VERSION,
        lease: None,
        session: None,
        program: program(),
        executable: String::new(),
        environment: Vec::new(),
        want: Want::Outage(outage),
    };
    match send_request(DAEMON.get()?, &request, OUTAGE_TIMEOUT) {
        Ok((Reply::Ended(reason), _)) => Some(reason.chars().take(MAX_REASON).collect()),
        _ => None,
    }
}

fn refused(reply: Reply) -> Refused {
    match reply {
        Reply::Denied { denial, reason } => Refused { denial, reason },
        _ => Refused::new(
            Denial::ProtocolMismatch,
            "the daemon's answer does not fit the request; after an update restart this program",
        ),
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
    let request = Request {
        version: VERSION,
        lease: if privileged() { None } else { std::env::var("GPUSESSION_LEASE").ok() },
        session: if privileged() { None } else { std::env::var("GPUSESSION_ID").ok() },
        program: program(),
        executable: executable(),
        environment,
        want,
    };
    send_request(&socket_path(), &request, patience)
}

/// Sends a request; if the daemon exits before its answer, the next one gets the request again.
///
/// systemd keeps the socket, so that the connection to the next daemon waits for its start.
fn send_request(path: &Path, request: &Request, patience: Duration) -> Result<(Reply, UnixStream), Refused> {
    let mut first = None;
    for _ in 1..MAX_ASKED {
        match send_once(path, request, patience) {
            Err(Unanswered { exited: true, refused }) => drop(first.get_or_insert(refused)),
            // Without systemd's socket no daemon may be there: the first one's exit is the reason.
            Err(Unanswered { refused, .. }) => return Err(first.unwrap_or(refused)),
            Ok(answer) => return Ok(answer),
        }
    }
    send_once(path, request, patience).map_err(|unanswered| first.unwrap_or(unanswered.refused))
}

/// A request without an answer.
struct Unanswered {
    refused: Refused,
    /// Whether the daemon closed the connection, as at its exit.
    exited: bool,
}

impl From<Refused> for Unanswered {
    fn from(refused: Refused) -> Self {
        Self { refused, exited: false }
    }
}

fn send_once(path: &Path, request: &Request, patience: Duration) -> Result<(Reply, UnixStream), Unanswered> {
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
        .map_err(|e| failed("cannot create a socket for", e.into()))?;
    // SO_SNDTIMEO bounds connect(), too, which otherwise waits for ever on a full backlog.
    setsockopt(&fd, sockopt::SendTimeout, &TimeVal::seconds(1))
        .map_err(|e| failed("cannot create a socket for", e.into()))?;
    let address = UnixAddr::new(path).map_err(|e| failed("unusable socket path", e.into()))?;
    connect(fd.as_raw_fd(), &address).map_err(|e| failed("no daemon at", e.into()))?;
    let mut stream = UnixStream::from(fd);
    let exchange = (|| {
        stream.set_read_timeout(Some(patience))?;
        match stream.write_all(&message::encode(request)) {
            // A daemon without a free slot for this user answers before the request, then closes.
            Err(e) if e.kind() == io::ErrorKind::BrokenPipe => {}
            written => written?,
        }
        let mut prefix = [0; 4];
        stream.read_exact(&mut prefix)?;
        let mut body = vec![0; message::body_len(prefix).map_err(io::Error::other)?];
        stream.read_exact(&mut body)?;
        message::decode::<Reply>(&body).map_err(io::Error::other)
    })();
    let reply = exchange.map_err(|e: io::Error| Unanswered {
        exited: matches!(e.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset),
        refused: failed("no valid answer from the daemon at", e),
    })?;
    Ok((reply, stream))
}

/// Returns the program's name for listings, at most 64 characters.
fn program() -> String {
    let name = std::fs::read_to_string("/proc/self/comm").unwrap_or_default();
    name.trim().chars().take(64).collect()
}

/// Returns the path of the program's executable, shortened for the ticket.
fn executable() -> String {
    let path = std::fs::read_link("/proc/self/exe").unwrap_or_default();
    ticket::shortened(&path.to_string_lossy()).to_owned()
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    /// Sends a request to daemons of which the first `exits` do not answer; returns the answer.
    fn after(exits: usize) -> Result<Reply, Refused> {
        let path = std::env::temp_dir().join(format!("grant-{}-{exits}.sock", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path).unwrap();
        std::thread::spawn(move || {
            for (number, stream) in listener.incoming().enumerate() {
                let mut stream = stream.unwrap();
                let mut prefix = [0; 4];
                stream.read_exact(&mut prefix).unwrap();
                let mut body = vec![0; message::body_len(prefix).unwrap()];
                stream.read_exact(&mut body).unwrap();
                if number >= exits {
                    stream.write_all(&message::encode(&Reply::Version(13000))).unwrap();
                }
            }
        });
        let request = Request {
            version: VERSION,
            lease: None,
            session: None,
            program: "test".into(),
            executable: String::new(),
            environment: Vec::new(),
            want: Want::Version,
        };
        let answer = send_request(&path, &request, READINGS_TIMEOUT);
        std::fs::remove_file(&path).unwrap();
        answer.map(|(reply, _)| reply)
    }

    #[test]
    fn the_next_daemon_answers_a_request_that_one_left_without_an_answer() {
        assert_eq!(after(1), Ok(Reply::Version(13000)));
        let refused = after(MAX_ASKED).unwrap_err();
        assert_eq!(refused.denial, Denial::NotReady, "{}", refused.reason);
    }
}
