//! The `gpuserver` program; see the library.

use std::os::unix::fs::MetadataExt;
use std::process::ExitCode;

use clap::Parser;
use gpuserver::admin::Refusal;
use gpuserver::cli::{self, Cli, Verb};
use gpuserver::config::ConfigError;
use gpuserver::discovery::DiscoveryError;
use gpuserver::serve::{self, End};
use serde_json::json;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, fmt};

/// Exit codes, as in the manual: configuration or usage, forced quit, internal error. After a fatal signal it ends by that.
const CONFIGURATION: u8 = 1;
const FORCED: u8 = 2;
const INTERNAL: u8 = 3;

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(e) => {
            let _ = e.print();
            return if e.use_stderr() { ExitCode::from(CONFIGURATION) } else { ExitCode::SUCCESS };
        }
    };
    let result = match cli.verb {
        Verb::Serve if cli.server.is_none() => run_server(&cli),
        _ => cli::run(&cli).map(|()| ExitCode::SUCCESS),
    };
    result.unwrap_or_else(|e| fail(&cli, &e))
}

/// Each connection of a client has buffers of 8 and 16 KiB, of which most is never written: mapped by themselves they take no memory
/// there, and leave no holes among other things.
#[cfg(target_env = "gnu")]
fn map_buffers() {
    // SAFETY: sets a number of the allocator's, and no other thread is there yet.
    unsafe { nix::libc::mallopt(nix::libc::M_MMAP_THRESHOLD, 8 << 10) };
}

#[cfg(not(target_env = "gnu"))]
fn map_buffers() {}

fn run_server(cli: &Cli) -> anyhow::Result<ExitCode> {
    map_buffers();
    let config = cli::load_config(cli)?;
    log();
    gpusession_fatal::install("gpuserver");
    // A panic ends the connection or worker whose task it is; the server ends only if it cannot go on without the task.
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

/// Whether standard error is the journal's.
fn stderr_is_journal() -> bool {
    let Ok(stream) = std::env::var("JOURNAL_STREAM") else { return false };
    let Ok(meta) = std::fs::metadata("/proc/self/fd/2") else { return false };
    stream == format!("{}:{}", meta.dev(), meta.ino())
}

fn log() {
    let filter = EnvFilter::try_from_env("GPUSESSION_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let registry = tracing_subscriber::registry().with(filter);
    if stderr_is_journal()
        && let Ok(journal) = tracing_journald::layer()
    {
        let journal = journal.with_field_prefix(None).with_syslog_identifier("gpuserver".into());
        registry.with(journal).init();
        return;
    }
    let ansi = std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty())
        && std::io::IsTerminal::is_terminal(&std::io::stderr());
    // Texts say everything; fields are for the journal.
    let fields =
        fmt::format::debug_fn(
            |writer, field, value| {
                if field.name() == "message" { write!(writer, "{value:?}") } else { Ok(()) }
            },
        );
    registry
        .with(fmt::layer().with_writer(std::io::stderr).with_target(false).with_ansi(ansi).fmt_fields(fields))
        .init();
}

fn fail(cli: &Cli, e: &anyhow::Error) -> ExitCode {
    let serving = matches!(cli.verb, Verb::Serve);
    let (code, hint) = match e.downcast_ref::<Refusal>() {
        Some(refusal) => (refusal.code.as_str(), refusal.hint.as_str()),
        None if e.is::<ConfigError>() => ("configuration", ""),
        None => ("failed", ""),
    };
    if cli::wants_json(cli) {
        let error = json!({ "error": { "code": code, "message": format!("{e:#}"), "hint": hint } });
        println!("{error:#}");
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
