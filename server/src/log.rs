//! The log of this crate's programs.

use std::os::unix::fs::MetadataExt;

use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, fmt};

/// Returns `true` if standard error is a stream of the journal.
fn stderr_is_journal() -> bool {
    let Ok(stream) = std::env::var("JOURNAL_STREAM") else { return false };
    let Ok(meta) = std::fs::metadata("/proc/self/fd/2") else { return false };
    stream == format!("{}:{}", meta.dev(), meta.ino())
}

/// Starts the log of a program: the journal, or standard error.
pub fn start(program: &str) {
    // The ports log each connection that they refuse, with its address, which rustls does not know.
    let filter =
        EnvFilter::try_from_env("GPUSESSION_LOG").unwrap_or_else(|_| EnvFilter::new("info,rustls=error"));
    let registry = tracing_subscriber::registry().with(filter);
    if stderr_is_journal()
        && let Ok(journal) = tracing_journald::layer()
    {
        let journal = journal.with_field_prefix(None).with_syslog_identifier(program.into());
        registry.with(journal).init();
        return;
    }
    let ansi = std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty())
        && std::io::IsTerminal::is_terminal(&std::io::stderr());
    // The text of a message contains all its fields, which are for the journal.
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
