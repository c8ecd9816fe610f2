//! A service of root and the server on a local socket: its options, and its connections.

use std::io::{self, Read};
use std::os::fd::FromRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, bail};
use clap::Args;
use gpusession_proto::message;
use serde::de::DeserializeOwned;
use tracing::{debug, warn};

use crate::peer::Served;

/// Whom the service answers, and where it listens.
#[derive(Debug, Args)]
pub struct Service {
    /// User of the server, beside root the only one that is answered
    #[arg(long, value_name = "USER", default_value = "gpuserver")]
    user: String,
    /// Unit of the server: only its main process is answered
    #[arg(long, value_name = "UNIT")]
    unit: Option<String>,
    /// Socket to listen on without systemd
    #[arg(long, value_name = "PATH")]
    listen: Option<PathBuf>,
}

impl Service {
    /// Returns the processes that the service answers.
    pub fn served(&self) -> anyhow::Result<Served> {
        let user = &self.user;
        let known = nix::unistd::User::from_name(user).with_context(|| format!("user {user}"))?;
        let Some(known) = known else { bail!("user {user}: does not exist; systemd-sysusers creates it") };
        Ok(Served { uid: known.uid.as_raw(), unit: self.unit.clone() })
    }

    /// Returns the name for messages of the server that the service is for.
    pub fn server(&self) -> &str {
        self.unit.as_deref().unwrap_or(&self.user)
    }

    /// Opens the socket, or takes it from systemd; `unit`: the socket's unit.
    ///
    /// Call it once: a socket of systemd's is taken from the process.
    pub fn listener(&self, unit: &str) -> anyhow::Result<UnixListener> {
        if let Some(path) = &self.listen {
            return UnixListener::bind(path).with_context(|| path.display().to_string());
        }
        let mut passed = sd_notify::listen_fds().context("LISTEN_FDS")?;
        match (passed.next(), passed.next()) {
            // SAFETY: systemd has passed this descriptor for this process alone, and it is taken
            // once.
            (Some(fd), None) => Ok(unsafe { UnixListener::from_raw_fd(fd) }),
            _ => bail!("systemd has passed no socket; {unit} starts this program"),
        }
    }
}

/// Accepts connections until the process ends, at most `most` at a time; each has a thread.
///
/// `service`: its name, for messages.
pub fn accept(
    listener: &UnixListener,
    service: &'static str,
    most: usize,
    serve: impl Fn(UnixStream) -> io::Result<()> + Send + Sync + 'static,
) -> io::Result<()> {
    // Each thread has a copy of it.
    let serve = Arc::new(serve);
    loop {
        let (socket, _) = listener.accept()?;
        if Arc::strong_count(&serve) > most {
            warn!("{service}: refused a connection: {most} others are open; the caller tries again");
            continue;
        }
        let serve = serve.clone();
        let started = std::thread::Builder::new().name("connection".into()).spawn(move || {
            if let Err(e) = serve(socket) {
                debug!("{service}: a connection closed: {e}");
            }
        });
        if let Err(e) = started {
            warn!("{service}: refused a connection: no thread for it: {e}; the caller tries again");
        }
    }
}

/// Reads one message.
pub fn receive<T: DeserializeOwned>(socket: &mut UnixStream) -> io::Result<T> {
    let mut prefix = [0; 4];
    socket.read_exact(&mut prefix)?;
    let mut body = vec![0; message::body_len(prefix).map_err(io::Error::other)?];
    socket.read_exact(&mut body)?;
    message::decode(&body).map_err(io::Error::other)
}
