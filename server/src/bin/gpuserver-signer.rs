//! `gpuserver-signer`: signs the pool's certificates in a process and a user of its own.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::{Parser, Subcommand};
use gpuserver::clock::{SystemClock, SystemRandom};
use gpuserver::config::{Config, Origin};
use gpuserver::signer::keeper::{Keeper, Places};
use gpuserver::signer::link::Link;
use gpuserver::signer::{Operation, adopt, socket};
use gpuserver::store::{self, StoreError};
use gpuserver::{cli, local_service, log};

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
        #[command(flatten)]
        service: local_service::Service,
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
        Verb::Serve { folder, service } => serve(folder, service),
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

fn serve(folder: &Path, service: &local_service::Service) -> anyhow::Result<()> {
    let served = service.served()?;
    let _lock = lock(folder)?;
    let keeper = Keeper::open(Places::own(folder), Arc::new(SystemClock), Arc::new(SystemRandom))?;
    let listener = service.listener("gpuserver-ca.socket")?;
    tracing::info!("signing for {} with the keys in {}", service.server(), folder.display());
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

fn prepare(file: Option<&Path>) -> anyhow::Result<()> {
    let config = cli::load_config(file)?;
    let Some(socket) = config.signer.as_deref() else { return Ok(()) };
    of_root(&config)?;
    let link = Link::Socket(socket.into());
    link.ask(Operation::Name(config.name.clone()))?;
    adopt::adopt(&link, &config.state_dir)?;
    Ok(())
}

/// Refuses names and places from a file that the server may have written.
///
/// In the folder of drop-ins, which is sticky, the server replaces only files and links of its own.
fn of_root(config: &Config) -> anyhow::Result<()> {
    use std::os::unix::fs::MetadataExt;
    for key in ["name", "signer", "state_dir"] {
        if let Origin::File(path, _) = config.origin(key)
            && std::fs::symlink_metadata(&path).with_context(|| path.display().to_string())?.uid() != 0
        {
            let (path, file) = (path.display(), config.file.display());
            bail!("{path}: sets `{key}` and is not root's file; set it in {file}");
        }
    }
    Ok(())
}
