//! `gpuserver-starter`: starts programs that load the driver or meet a client's bytes, as a user of
//! their own.

use std::process::ExitCode;

use anyhow::bail;
use clap::Parser;
use gpuserver::cgroups::{self, Cgroups};
use gpuserver::{local_service, log, spawn, starter};

/// Starts gpuserver's programs that load the driver or meet a client's bytes, as another user
#[derive(Debug, Parser)]
#[command(name = "gpuserver-starter", version)]
struct Options {
    #[command(flatten)]
    service: local_service::Service,
}

fn main() -> ExitCode {
    let options = Options::parse();
    log::start("gpuserver-starter");
    match serve(&options.service) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            tracing::error!("{e:#}");
            ExitCode::FAILURE
        }
    }
}

fn serve(service: &local_service::Service) -> anyhow::Result<()> {
    let served = service.served()?;
    spawn::hold_worker_fd()?;
    let listener = service.listener("gpuserver-worker.socket")?;
    let program = spawn::worker_program();
    if served.uid == nix::unistd::geteuid().as_raw() {
        bail!("this program runs as the server's own user; User= of its unit names another one");
    }
    let groups = Cgroups::of_this_unit(cgroups::STARTER);
    tracing::info!("starting {} for {}; {groups}", program.display(), service.server());
    Ok(starter::service::serve(&listener, &program, &served, &groups)?)
}
