//! The socket `admin.sock`: the server's end, and the command line's.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream as StdUnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nix::libc;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::unix::UCred;
use tokio::net::{UnixListener, UnixStream};
use tokio::time::timeout;
use tracing::{debug, warn};

use super::ask::{Ask, parse, read, written};
use crate::log_throttle::LogThrottle;
use crate::pool::Pool;
use crate::refusal::Refusal;

/// Longest request over the socket, in bytes.
const MAX_REQUEST: usize = 64 << 10;
/// Longest answer that a caller accepts, in bytes.
pub const MAX_ANSWER: usize = 64 << 20;
/// Bound on each read and write of the socket.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// Most connections at once, and most of one user.
///
/// Root's connections have no bound, so that an administrator always gets an answer.
const MAX_CONNECTIONS: usize = 64;
const MAX_OF_ONE: usize = 16;

/// The bound socket, and the group that may use it.
#[derive(Debug)]
pub struct Socket {
    listener: UnixListener,
    group: u32,
}

/// Binds the socket, which the owner and the group `gpuserver` may use.
///
/// Replaces a socket that no server listens on any more.
pub fn bind(path: &Path) -> io::Result<Socket> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    if std::fs::symlink_metadata(path).is_ok_and(|m| m.file_type().is_socket()) {
        if StdUnixStream::connect(path).is_ok() {
            return Err(io::Error::new(io::ErrorKind::AddrInUse, "another gpuserver listens on this socket"));
        }
        std::fs::remove_file(path)?;
    }
    // The socket is created for its owner alone, and opened to the group afterwards.
    let before = nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_retain(0o177));
    let bound = UnixListener::bind(path);
    nix::sys::stat::umask(before);
    let listener = bound?;
    if let Ok(Some(group)) = nix::unistd::Group::from_name("gpuserver")
        && let Err(e) = nix::unistd::chown(path, None, Some(group.gid))
    {
        debug!("{}: group gpuserver not set: {e}; the socket keeps its group", path.display());
    }
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o660))?;
    let group = std::fs::symlink_metadata(path)?.gid();
    Ok(Socket { listener, group })
}

/// Connections by user, without root's.
#[derive(Debug, Default)]
struct Places(Mutex<HashMap<u32, usize>>);

/// The place of one connection, until this is dropped.
#[derive(Debug)]
struct Place {
    places: Arc<Places>,
    user: u32,
}

impl Places {
    /// Takes a place for a user; `None`: the user has its part, or all are taken.
    fn take(self: &Arc<Self>, user: u32) -> Option<Place> {
        let mut held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if user != 0 {
            let full = held.values().sum::<usize>() >= MAX_CONNECTIONS;
            if full || held.get(&user).is_some_and(|count| *count >= MAX_OF_ONE) {
                return None;
            }
            *held.entry(user).or_default() += 1;
        }
        Some(Place { places: self.clone(), user })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut held = self.places.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = held.get_mut(&self.user) {
            *count -= 1;
            if *count == 0 {
                held.remove(&self.user);
            }
        }
    }
}

/// Returns `true` if a peer is root, of the server's user, or in the group.
///
/// The socket's mode says so as well, until a process of the server's user changes it.
fn may_administer(socket: &UnixStream, peer: UCred, group: u32) -> bool {
    let known = [0, nix::unistd::geteuid().as_raw()].contains(&peer.uid());
    known || peer.gid() == group || further_groups(socket).is_ok_and(|groups| groups.contains(&group))
}

/// Returns the supplementary groups that the peer had when it connected.
fn further_groups(socket: &UnixStream) -> io::Result<Vec<u32>> {
    // Of Linux 4.13, the same on x86-64 and AArch64.
    const SO_PEERGROUPS: libc::c_int = 59;
    /// `NGROUPS_MAX`
    const MAX_GROUPS: usize = 65_536;
    let mut groups = vec![0_u32; MAX_GROUPS];
    let mut bytes = size_of_val(groups.as_slice()) as libc::socklen_t;
    // SAFETY: the kernel writes at most as many bytes as the vector has, and the number of those
    // that it wrote.
    let done = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PEERGROUPS,
            groups.as_mut_ptr().cast(),
            &raw mut bytes,
        )
    };
    if done != 0 {
        return Err(io::Error::last_os_error());
    }
    groups.truncate(bytes as usize / size_of::<u32>());
    Ok(groups)
}

/// Accepts connections until the task is cancelled.
pub async fn serve(socket: Socket, pool: Arc<Pool>) {
    let (places, refusals) = (Arc::new(Places::default()), Arc::new(LogThrottle::default()));
    loop {
        match socket.listener.accept().await {
            Ok((connection, _)) => match admitted(&connection, socket.group, &places, &pool) {
                Ok(place) => {
                    let (pool, refusals) = (pool.clone(), refusals.clone());
                    tokio::spawn(async move {
                        if let Err(e) = serve_connection(connection, &pool, &refusals).await {
                            debug!("admin.sock: connection closed: {e}");
                        }
                        drop(place);
                    });
                }
                Err(why) => warn_at_times(&refusals, &why),
            },
            Err(e) => {
                warn!("admin.sock: accept failed: {e}; retrying in 100 ms");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

/// Logs why a connection was refused, which a caller could multiply.
fn warn_at_times(refusals: &LogThrottle, why: &str) {
    if let Some(more) = refusals.may() {
        warn!("admin.sock: refused {why}{more}");
    }
}

/// Takes a place for a connection that may be served; the error says whose it is, and why not.
fn admitted(socket: &UnixStream, group: u32, places: &Arc<Places>, pool: &Pool) -> Result<Place, String> {
    let peer = socket.peer_cred().map_err(|e| format!("an unknown process: {e}"))?;
    if !may_administer(socket, peer, group) {
        let why = "neither root nor in the socket's group";
        pool.note_refused_administration(format!("uid {}", peer.uid()), String::new(), why);
        return Err(format!("uid {}: {why}", peer.uid()));
    }
    if let Some(pid) = worker(peer, pool) {
        return Err(is_worker(pid));
    }
    places.take(peer.uid()).ok_or_else(|| format!("uid {}: too many connections at once", peer.uid()))
}

/// Returns the process id of a peer that may be a worker.
fn worker(peer: UCred, pool: &Pool) -> Option<u32> {
    // A process of another PID namespace has the number 0 here; it is no worker of this server.
    let pid = peer.pid().and_then(|pid| u32::try_from(pid).ok()).filter(|pid| *pid > 0);
    pid.filter(|pid| pool.supervisor().may_be_worker(*pid, peer.uid()))
}

fn is_worker(pid: u32) -> String {
    format!("pid {pid}: it is a worker or of the workers' user, or has exited")
}

async fn serve_connection(
    mut socket: UnixStream,
    pool: &Arc<Pool>,
    refusals: &LogThrottle,
) -> io::Result<()> {
    let peer = socket.peer_cred()?;
    let mut prefix = [0; 4];
    timeout(REQUEST_TIMEOUT, socket.read_exact(&mut prefix)).await??;
    let len = u32::from_le_bytes(prefix) as usize;
    let ask = if len > MAX_REQUEST {
        Err(Refusal::new("bad-request", format!("the request is longer than {MAX_REQUEST} bytes")))
    } else {
        let mut body = vec![0; len];
        timeout(REQUEST_TIMEOUT, socket.read_exact(&mut body)).await??;
        parse(&body)
    };
    // Workers run as the server's user, and a client may have taken one over. The check comes
    // again after the request: a caller that still waits for its answer has not exited.
    if let Some(pid) = worker(peer, pool) {
        warn_at_times(refusals, &is_worker(pid));
        return Ok(());
    }
    let stop = match &ask {
        Ok(Ask::Stop { force }) => Some(*force),
        _ => None,
    };
    let bytes = match ask {
        Ok(ask) => written(ask.answer_audited(pool, format!("uid {}", peer.uid()), "").await),
        Err(refusal) => written(Err(refusal)),
    };
    let told = timeout(REQUEST_TIMEOUT, async {
        socket.write_all(&(bytes.len() as u32).to_le_bytes()).await?;
        socket.write_all(&bytes).await
    })
    .await;
    // After the answer, which a server that stops at once would not send.
    if let Some(force) = stop {
        pool.ask_to_stop(force);
    }
    told?
}

/// Sends a request to the server that listens on `path`; for the command line.
pub fn ask(path: &Path, ask: &Ask) -> io::Result<Result<serde_json::Value, Refusal>> {
    let mut socket = StdUnixStream::connect(path)?;
    socket.set_read_timeout(Some(ask.answer_timeout()))?;
    socket.set_write_timeout(Some(REQUEST_TIMEOUT))?;
    let body = serde_json::to_vec(ask)?;
    socket.write_all(&(body.len() as u32).to_le_bytes())?;
    socket.write_all(&body)?;
    let mut prefix = [0; 4];
    socket.read_exact(&mut prefix)?;
    let len = u32::from_le_bytes(prefix) as usize;
    if len > MAX_ANSWER {
        return Err(io::Error::other("the server's answer is longer than 64 MiB"));
    }
    let mut body = vec![0; len];
    socket.read_exact(&mut body)?;
    Ok(read(&body)?)
}
