//! `gpuserver-signer`: signs the pool's certificates in a process and a user of its own.

use std::os::fd::FromRawFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::{Parser, Subcommand};
use gpuserver::clock::{SystemClock, SystemRandom};
use gpuserver::config::{Config, Origin};
use gpuserver::peer::Served;
use gpuserver::signer::keeper::{Keeper, Places};
use gpuserver::signer::link::Link;
use gpuserver::signer::{Operation, adopt, socket};
use gpuserver::store::{self, StoreError};
use gpuserver::{cli, log};

/// Tries to lock the folder, 100 ms apart: a command may have it for a moment.
const TRIES: u32 = 50;

/// Signs the pool's certificates for gpuserver
#[derive(Debug, Parser)]
#[command(name = "gpuserver-signer", version, disable_help_subcommand = true)]
struct Options {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Sign for the server, on the socket that systemd passes
    Serve {
        /// Folder of the authorities and the join tokens
        #[arg(long, env = "STATE_DIRECTORY", value_name = "FOLDER")]
        folder: PathBuf,
        /// User of the server, beside root the only one that is answered
        #[arg(long, value_name = "USER", default_value = "gpuserver")]
        user: String,
        /// Unit of the server: only its main process is answered
        #[arg(long, value_name = "UNIT")]
        unit: Option<String>,
        /// Socket to listen on without systemd
        #[arg(long, value_name = "PATH")]
        listen: Option<PathBuf>,
    },
    /// Tell the signer this server's name, and move an earlier version's files to it (root)
    Prepare {
        /// Configuration file of the server
        #[arg(short, long, env = "GPUSERVER_CONF", value_name = "FILE")]
        config: Option<PathBuf>,
    },
}

fn main() -> ExitCode {
    let options = Options::parse();
    log::start("gpuserver-signer");
    let done = match &options.verb {
        Verb::Serve { folder, user, unit, listen } => serve(folder, user, unit.clone(), listen.as_deref()),
        Verb::Prepare { config } => prepare(config.as_deref()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            tracing::error!("{e:#}");
            ExitCode::FAILURE
        }
    }
}

fn serve(folder: &Path, user: &str, unit: Option<String>, listen: Option<&Path>) -> anyhow::Result<()> {
    let of_user = nix::unistd::User::from_name(user).with_context(|| format!("user {user}"))?;
    let Some(of_user) = of_user else { bail!("user {user}: does not exist; systemd-sysusers creates it") };
    let _lock = lock(folder)?;
    let keeper = Keeper::open(Places::own(folder), Arc::new(SystemClock), Arc::new(SystemRandom))?;
    let listener = match listen {
        Some(path) => UnixListener::bind(path).with_context(|| path.display().to_string())?,
        None => passed()?,
    };
    tracing::info!("signing for {} with the keys in {}", unit.as_deref().unwrap_or(user), folder.display());
    let served = Served { uid: of_user.uid.as_raw(), unit };
    Ok(socket::serve(&listener, &Arc::new(keeper), &served)?)
}

/// Locks the folder; waits for a command of root that has it.
#[expect(clippy::disallowed_methods, reason = "the process has nothing else to do yet")]
fn lock(folder: &Path) -> Result<store::Lock, StoreError> {
    let mut tries = 0;
    loop {
        match store::lock(folder) {
            Err(StoreError::Locked(_)) if tries < TRIES => {
                tries += 1;
                std::thread::sleep(Duration::from_millis(100));
            }
            locked => return locked,
        }
    }
}

/// Returns the socket that systemd listens on.
fn passed() -> anyhow::Result<UnixListener> {
    let mut passed = sd_notify::listen_fds().context("LISTEN_FDS")?;
    match (passed.next(), passed.next()) {
        // SAFETY: systemd has passed this descriptor for this process alone, and it is taken once.
        (Some(fd), None) => Ok(unsafe { UnixListener::from_raw_fd(fd) }),
        _ => bail!("systemd has passed no socket; gpuserver-ca.socket starts this program"),
    }
}

fn prepare(file: Option<&Path>) -> anyhow::Result<()> {
    let config = cli::load_config(file)?;
    let Some(socket) = config.signer.as_deref() else { return Ok(()) };
    of_root(&config)?;
    let link = Link::Socket(socket.into());
    link.ask(Operation::Name(config.name.clone()))?;
    adopt::adopt(&link, &config.state_dir)?;
    Ok(())
}

/// Refuses a name from a file that the server may have written.
fn of_root(config: &Config) -> anyhow::Result<()> {
    use std::os::unix::fs::MetadataExt;
    if let Origin::File(path, _) = config.origin("name")
        && std::fs::metadata(&path).with_context(|| path.display().to_string())?.uid() != 0
    {
        bail!("{}: sets `name` and is not root's file; set it in {}", path.display(), config.file.display());
    }
    Ok(())
}
