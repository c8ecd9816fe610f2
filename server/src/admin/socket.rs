//! The socket `admin.sock`: the server's end, and the command line's.

use std::io::{self, Read, Write};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixStream as StdUnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::time::timeout;
use tracing::{debug, warn};

use super::ask::{Ask, parse, read, written};
use crate::pool::Pool;
use crate::refusal::Refusal;

/// Longest request over the socket, in bytes.
const MAX_REQUEST: usize = 64 << 10;
/// Longest answer that a caller accepts, in bytes.
pub const MAX_ANSWER: usize = 64 << 20;
/// Bound on each read and write of the socket.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// Binds the socket, which the owner and the group `gpuserver` may use.
///
/// Replaces a socket that no server listens on any more.
pub fn bind(path: &Path) -> io::Result<UnixListener> {
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
    Ok(listener)
}

/// Accepts connections until the task is cancelled.
pub async fn serve(listener: UnixListener, pool: Arc<Pool>) {
    loop {
        match listener.accept().await {
            Ok((socket, _)) => {
                let pool = pool.clone();
                tokio::spawn(async move {
                    if let Err(e) = serve_connection(socket, &pool).await {
                        debug!("admin.sock: connection closed: {e}");
                    }
                });
            }
            Err(e) => {
                warn!("admin.sock: accept failed: {e}; retrying in 100 ms");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn serve_connection(mut socket: UnixStream, pool: &Arc<Pool>) -> io::Result<()> {
    // A process of another PID namespace has the number 0 here; it is no worker of this server.
    let uid = socket.peer_cred()?.uid();
    let peer = socket.peer_cred()?.pid().and_then(|pid| u32::try_from(pid).ok()).filter(|pid| *pid > 0);
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
    // after the request: a caller that still waits for its answer has not exited.
    if let Some(pid) = peer.filter(|pid| pool.supervisor().may_be_worker(*pid)) {
        warn!("admin.sock: refused pid {pid}: it is a worker, or has exited");
        return Ok(());
    }
    let stop = match &ask {
        Ok(Ask::Stop { force }) => Some(*force),
        _ => None,
    };
    let bytes = match ask {
        Ok(ask) => written(ask.answer_audited(pool, format!("uid {uid}"), "").await),
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
