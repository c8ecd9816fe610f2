//! The `gpuserver` program; see the library.

use std::process::ExitCode;

use gpuserver::admin::Refusal;
use gpuserver::cli::{self, Cli, Verb};
use gpuserver::config::ConfigError;
use gpuserver::discovery::DiscoveryError;
use gpuserver::log;
use gpuserver::serve::{self, End};
use serde_json::json;

/// Exit code for a bad configuration or usage; all three codes are in the manual.
const CONFIGURATION: u8 = 1;
/// Exit code after a forced quit.
const FORCED: u8 = 2;
/// Exit code for an internal error. A fatal signal ends the process as that signal.
const INTERNAL: u8 = 3;

fn main() -> ExitCode {
    let cli = match Cli::read(std::env::args_os()) {
        Ok(cli) => cli,
        Err(e) if e.use_stderr() && std::env::args_os().any(|argument| argument == "--json") => {
            let text = e.to_string();
            let message = text.trim_start_matches("error: ").lines().next().unwrap_or_default();
            print_error("usage", message, "gpuserver --help");
            return ExitCode::from(CONFIGURATION);
        }
        Err(e) => {
            let _ = e.print();
            return if e.use_stderr() { ExitCode::from(CONFIGURATION) } else { ExitCode::SUCCESS };
        }
    };
    let result = match cli.verb {
        Verb::Serve if cli.server.is_none() => run_server(&cli),
        _ => cli::run(&cli).map(ExitCode::from),
    };
    result.unwrap_or_else(|e| fail(&cli, &e))
}

/// Makes the allocator map each buffer of 8 KiB or more by itself.
///
/// Each connection of a client has buffers of 8 and 16 KiB, most of which is never written. Mapped
/// by themselves, they take no memory for these pages and leave no holes in the heap.
#[cfg(target_env = "gnu")]
fn map_buffers() {
    // SAFETY: mallopt sets a number of the allocator, and no other thread runs yet.
    unsafe { nix::libc::mallopt(nix::libc::M_MMAP_THRESHOLD, 8 << 10) };
}

#[cfg(not(target_env = "gnu"))]
fn map_buffers() {}

fn run_server(cli: &Cli) -> anyhow::Result<ExitCode> {
    map_buffers();
    let config = cli::load_config(cli.config.as_deref())?;
    log::start("gpuserver");
    gpusession_fatal::install("gpuserver");
    // A panic ends the task of one connection or worker. The server ends only if it needs the task.
    std::panic::set_hook(Box::new(|info| tracing::error!("internal error: {info}")));
    let runtime =
        tokio::runtime::Builder::new_multi_thread().enable_all().thread_name("gpuserver").build()?;
    let end = runtime.block_on(serve::serve(config))?;
    runtime.shutdown_timeout(std::time::Duration::from_secs(1));
    Ok(match end {
        End::Stopped | End::HandedOver => ExitCode::SUCCESS,
        End::Forced => ExitCode::from(FORCED),
    })
}

/// Prints an error for programs, on standard output as `--json` does.
fn print_error(code: &str, message: &str, hint: &str) {
    println!("{:#}", json!({ "schema": 1, "error": { "code": code, "message": message, "hint": hint } }));
}

fn fail(cli: &Cli, e: &anyhow::Error) -> ExitCode {
    let serving = matches!(cli.verb, Verb::Serve);
    let (code, hint) = match e.downcast_ref::<Refusal>() {
        Some(refusal) => (refusal.code.as_str(), refusal.hint.as_str()),
        None if e.is::<ConfigError>() => ("configuration", ""),
        None => ("failed", ""),
    };
    if cli.json {
        print_error(code, &format!("{e:#}"), hint);
    } else {
        eprintln!("gpuserver: {e:#}");
        if !hint.is_empty() {
            eprintln!("gpuserver: {hint}");
        }
    }
    let configuration = e.is::<ConfigError>()
        || e.is::<Refusal>()
        || matches!(e.downcast_ref(), Some(DiscoveryError::Configuration { .. }))
        || !serving;
    ExitCode::from(if configuration { CONFIGURATION } else { INTERNAL })
}
