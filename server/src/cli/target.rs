//! The server that a verb addresses: its configuration, its socket, and requests to it.

use std::collections::BTreeSet;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use anyhow::Context;
use serde_json::Value;

use super::remote::Remote;
use crate::admin::answer::unsigned;
use crate::admin::{self, Ask, Refusal};
use crate::config::{self, Config, ConfigError};
use crate::signer::link::Link;
use crate::store::{self, StoreError};

/// Returns the configuration file, and whether it must exist.
pub fn config_file(named: Option<&Path>) -> (PathBuf, bool) {
    match named {
        Some(path) => (path.into(), true),
        None => (config::DEFAULT_FILE.into(), false),
    }
}

/// Reads the configuration that the command line names.
pub fn load_config(named: Option<&Path>) -> Result<Config, ConfigError> {
    let (file, required) = config_file(named);
    // Messages name the file, and a reader may be in another working directory.
    let file = std::path::absolute(&file).unwrap_or(file);
    config::load_here(&file, required)
}

/// The server that a verb addresses, and the configuration with which it would start.
pub(super) struct Target {
    pub(super) socket: PathBuf,
    pub(super) config: Result<Config, ConfigError>,
    pub(super) remote: Option<Remote>,
}

impl Target {
    /// Finds the server that the command line names.
    ///
    /// A running server is found even if its configuration files are bad now.
    pub(super) fn of(
        named: Option<&Path>,
        server: Option<&str>,
        identity: Option<&Path>,
    ) -> anyhow::Result<Self> {
        let remote = server.map(|server| Remote::new(server, identity));
        let remote = remote.transpose()?;
        let here = Self::here(&config_file(named).0, load_config(named));
        Ok(Self { remote, ..here })
    }

    /// Finds the server of this host whose configuration is in `file`.
    fn here(file: &Path, config: Result<Config, ConfigError>) -> Self {
        let socket = match &config {
            Ok(config) => config.admin_socket(),
            Err(_) => config::admin_socket_beside(file, &|name| std::env::var(name).ok()),
        };
        Self { socket, config, remote: None }
    }

    /// Lists the servers whose configurations are in the same folder.
    pub(super) fn beside(named: Option<&Path>) -> Vec<Self> {
        let file = config_file(named).0;
        let file = std::path::absolute(&file).unwrap_or(file);
        let folder = file.parent().and_then(|f| std::fs::read_dir(f).ok()).into_iter().flatten().flatten();
        let is_one = |path: &Path| {
            let name = path.file_name().and_then(|n| n.to_str()).and_then(|n| n.strip_suffix(".toml"));
            name.is_some_and(|n| n == "gpuserver" || n.starts_with("gpuserver-"))
        };
        // The server of the default instance may run without a file.
        let unnamed = file.with_file_name("gpuserver.toml");
        let files: BTreeSet<PathBuf> =
            folder.map(|e| e.path()).filter(|p| is_one(p)).chain([file.clone(), unnamed]).collect();
        files
            .into_iter()
            .map(|f| Self::here(&f, config::load_here(&f, f == file && named.is_some())))
            .collect()
    }

    pub(super) fn config(&self) -> Result<&Config, ConfigError> {
        self.config.as_ref().map_err(Clone::clone)
    }
}

/// Sends a request to the running server; `None` if none runs.
pub(super) fn running(server: &Target, ask: &Ask) -> anyhow::Result<Option<Value>> {
    if let Some(remote) = &server.remote {
        return remote.ask(ask).map(Some);
    }
    if let (Some(operation), Ok(config)) = (ask.privileged(), &server.config) {
        Link::permit(config.signer.as_deref(), operation).map_err(|e| unsigned(&e))?;
    }
    let path = &server.socket;
    match admin::ask(path, ask) {
        Ok(answer) => {
            if let Err(e) = &server.config {
                static TOLD: std::sync::Once = std::sync::Once::new();
                TOLD.call_once(|| {
                    eprintln!("gpuserver: note: {e}; the server continues with its earlier configuration, and would not start again");
                });
            }
            Ok(Some(answer?))
        }
        Err(e)
            if matches!(e.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::ConnectionRefused) =>
        {
            Ok(None)
        }
        Err(e) if e.kind() == std::io::ErrorKind::PermissionDenied => Err(Refusal {
            hint: "run gpuserver as root or as a member of the group gpuserver".into(),
            ..no_right(path, &e)
        }
        .into()),
        Err(e)
            if matches!(
                e.kind(),
                std::io::ErrorKind::UnexpectedEof
                    | std::io::ErrorKind::BrokenPipe
                    | std::io::ErrorKind::ConnectionReset
            ) =>
        {
            let why = "the server closed the connection: this user may not administer it, has too many \
                       connections, or the server stops; the server's journal has the reason";
            Err(e).with_context(|| format!("{}: {why}", path.display()))
        }
        Err(e) => Err(e).with_context(|| path.display().to_string()),
    }
}

/// Refuses to read a file of the server for a user without the right.
pub(super) fn no_right(path: &Path, error: &std::io::Error) -> Refusal {
    Refusal {
        code: "not-allowed".into(),
        message: format!("{}: {error}", path.display()),
        hint: "run this command as root: the server does not run, so its files are read".into(),
    }
}

pub(super) fn must_run(server: &Target, ask: &Ask) -> anyhow::Result<Value> {
    if let Some(value) = running(server, ask)? {
        return Ok(value);
    }
    server.config()?;
    Err(Refusal {
        code: "not-running".into(),
        message: format!("no gpuserver answers at {}", server.socket.display()),
        hint: "start it with `systemctl start gpuserver`, or name its configuration with -c".into(),
    }
    .into())
}

/// Locks the state directory, whose files a running server would overwrite.
pub(super) fn offline(config: &Config) -> anyhow::Result<store::Lock> {
    store::lock(&config.state_dir).map_err(|e| match e {
        StoreError::Io { path, error } if error.kind() == std::io::ErrorKind::PermissionDenied => {
            no_right(&path, &error).into()
        }
        // A verb that a running server does not do.
        StoreError::Locked(_) if UnixStream::connect(config.admin_socket()).is_ok() => {
            anyhow::Error::from(Refusal {
                code: "usage".into(),
                message: format!("a running gpuserver uses {}", config.state_dir.display()),
                hint: "stop the server, and run this verb again".into(),
            })
        }
        StoreError::Locked(_) => anyhow::Error::from(Refusal {
            code: "not-reachable".into(),
            message: format!(
                "a gpuserver uses {}, but does not answer at {}",
                config.state_dir.display(),
                config.admin_socket().display()
            ),
            hint: "use the same runtime_dir as the server".into(),
        }),
        e => e.into(),
    })
}
