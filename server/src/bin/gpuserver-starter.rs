//! `gpuserver-starter`: starts programs that load the driver, as a user of their own.

use std::os::fd::FromRawFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::Parser;
use gpuserver::peer::Served;
use gpuserver::{log, spawn, starter};

/// Starts programs that load the driver for gpuserver, as a user of their own
#[derive(Debug, Parser)]
#[command(name = "gpuserver-starter", version)]
struct Options {
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

fn main() -> ExitCode {
    let options = Options::parse();
    log::start("gpuserver-starter");
    match serve(&options.user, options.unit, options.listen.as_deref()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            tracing::error!("{e:#}");
            ExitCode::FAILURE
        }
    }
}

fn serve(user: &str, unit: Option<String>, listen: Option<&Path>) -> anyhow::Result<()> {
    let of_user = nix::unistd::User::from_name(user).with_context(|| format!("user {user}"))?;
    let Some(of_user) = of_user else { bail!("user {user}: does not exist; systemd-sysusers creates it") };
    let listener = match listen {
        Some(path) => UnixListener::bind(path).with_context(|| path.display().to_string())?,
        None => passed()?,
    };
    let program = spawn::worker_program();
    let served = Served { uid: of_user.uid.as_raw(), unit };
    if served.uid == nix::unistd::geteuid().as_raw() {
        bail!("user {user}: this program runs as the server's own user; User= of its unit names another one");
    }
    tracing::info!("starting {} for {}", program.display(), served.unit.as_deref().unwrap_or(user));
    Ok(starter::service::serve(&listener, &program, &served)?)
}

/// Returns the socket that systemd listens on.
fn passed() -> anyhow::Result<UnixListener> {
    let mut passed = sd_notify::listen_fds().context("LISTEN_FDS")?;
    match (passed.next(), passed.next()) {
        // SAFETY: systemd has passed this descriptor for this process alone, and it is taken once.
        (Some(fd), None) => Ok(unsafe { UnixListener::from_raw_fd(fd) }),
        _ => bail!("systemd has passed no socket; gpuserver-worker.socket starts this program"),
    }
}
