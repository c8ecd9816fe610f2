//! `gpuserver-starter`: starts programs that load the driver or meet a client's bytes, as a user of
//! their own.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::bail;
use clap::Parser;
use gpuserver::acts::{self, Places};
use gpuserver::cgroups::{self, Cgroups};
use gpuserver::starter::service::{self, Programs};
use gpuserver::{local_service, log, spawn};

/// Starts gpuserver's programs that load the driver or meet a client's bytes, as another user
#[derive(Debug, Parser)]
#[command(name = "gpuserver-starter", version)]
struct Options {
    #[command(flatten)]
    service: local_service::Service,
    /// Folder for NVIDIA's MPS daemons; without it no GPU is shared by MPS
    #[arg(long, value_name = "PATH")]
    mps: Option<PathBuf>,
}

fn main() -> ExitCode {
    let options = Options::parse();
    log::start("gpuserver-starter");
    match serve(options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            tracing::error!("{e:#}");
            ExitCode::FAILURE
        }
    }
}

fn serve(Options { service, mps }: Options) -> anyhow::Result<()> {
    let served = service.served()?;
    spawn::hold_worker_fd()?;
    let listener = service.listener("gpuserver-worker.socket")?;
    let program = spawn::worker_program();
    if served.uid == nix::unistd::geteuid().as_raw() {
        bail!("this program runs as the server's own user; User= of its unit names another one");
    }
    let groups = Cgroups::of_this_unit(cgroups::STARTER);
    tracing::info!("starting {} for {}; {groups}", program.display(), service.server());
    // As systemd passes it (`CacheDirectory=`).
    let cache = std::env::var_os("CACHE_DIRECTORY").filter(|folder| !folder.is_empty()).map(PathBuf::from);
    let places = Places { groups: groups.clone(), cache, mps };
    let acts = move |act: &_, descriptors| acts::perform(act, descriptors, &places);
    Ok(service::serve(&listener, Programs { program, groups }, &served, acts)?)
}
