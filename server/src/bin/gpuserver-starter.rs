//! `gpuserver-starter`: starts programs that load the driver, as a user of their own.

use std::process::ExitCode;

use anyhow::bail;
use clap::Parser;
use gpuserver::{local_service, log, spawn, starter};

/// Starts programs that load the driver for gpuserver, as a user of their own
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
    let listener = service.listener("gpuserver-worker.socket")?;
    let program = spawn::worker_program();
    if served.uid == nix::unistd::geteuid().as_raw() {
        bail!("this program runs as the server's own user; User= of its unit names another one");
    }
    tracing::info!("starting {} for {}", program.display(), service.server());
    Ok(starter::service::serve(&listener, &program, &served)?)
}
