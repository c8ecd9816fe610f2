//! The verbs that send several requests: `ps`, `top` and `stop`.
#![expect(clippy::disallowed_methods, reason = "a command waits on its only thread")]

use std::path::Path;
use std::time::Duration;

use gpusession_common::units::parse_duration;
use serde_json::json;

use super::show::{self, Output};
use super::target::{Target, must_run, running};
use crate::admin::answer::status::{StatusView, StopView};
use crate::admin::answer::workers::PsRow;
use crate::admin::{self, Ask, Refusal};

/// `gpuserver ps`
pub(super) fn ps(
    out: &mut Output<'_>,
    file: Option<&Path>,
    server: &Target,
    all: bool,
    threads: bool,
) -> anyhow::Result<()> {
    let ask = if threads { Ask::Threads } else { Ask::Ps };
    let mut rows = Vec::new();
    if all {
        if server.remote.is_some() {
            return Err(admin::local_only("--all asks the servers of this host").into());
        }
        let mut answered = false;
        for server in Target::beside(file) {
            match running(&server, &ask) {
                Ok(Some(value)) => {
                    answered = true;
                    rows.extend(serde_json::from_value::<Vec<PsRow>>(value)?);
                }
                Ok(None) => {}
                Err(e) => eprintln!("gpuserver: {}: {e:#}", server.socket.display()),
            }
        }
        if !answered {
            must_run(server, &ask)?;
        }
    } else {
        rows = serde_json::from_value(must_run(server, &ask)?)?;
    }
    let text = if threads { show::print_threads } else { show::print_ps };
    out.answer("workers", serde_json::to_value(rows)?, |out, rows| text(out, rows, all))
}

/// `gpuserver top`
pub(super) fn top(out: &mut Output<'_>, server: &Target, every: &str, times: u32) -> anyhow::Result<()> {
    let Output { out, json } = out;
    let every = parse_duration(every)
        .ok()
        .filter(|d| !d.is_zero())
        .ok_or_else(|| Refusal::new("usage", format!("--every {every}: not a duration; write 2s")))?;
    let mut before = show::Seen::new();
    for look in 1.. {
        let rows: Vec<PsRow> = serde_json::from_value(must_run(server, &Ask::Ps)?)?;
        let seen = show::seen(&rows);
        let rows = show::busiest(rows, &before, every.as_secs_f64());
        if *json {
            writeln!(out, "{}", json!({ "schema": 1, "top": rows }))?;
        } else {
            if std::io::IsTerminal::is_terminal(&std::io::stdout()) {
                write!(out, "\x1b[H\x1b[2J")?;
            }
            show::print_top(out, rows)?;
        }
        out.flush()?;
        before = seen;
        if look == times {
            break;
        }
        std::thread::sleep(every);
    }
    Ok(())
}

/// Stops the server, prints the programs that it waits for, and returns when it has exited.
pub(super) fn stop(out: &mut Output<'_>, server: &Target, force: bool) -> anyhow::Result<()> {
    const POLL_INTERVAL: Duration = Duration::from_millis(100);
    /// Time for stopping workers, after the server has waited for programs.
    const STOP_TIMEOUT: Duration = Duration::from_secs(30);
    let begun: StopView = serde_json::from_value(must_run(server, &Ask::Stop { force })?)?;
    // A zombie counts as exited.
    let runs = || {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", begun.pid)).unwrap_or_default();
        stat.rsplit_once(')').is_some_and(|(_, rest)| !rest.trim_start().starts_with('Z'))
    };
    let end = std::time::Instant::now() + Duration::from_micros(begun.wait_usec) + STOP_TIMEOUT;
    let mut told = Vec::new();
    while runs() {
        let left = end.saturating_duration_since(std::time::Instant::now());
        if left.is_zero() {
            return Err(Refusal {
                code: "failed".into(),
                message: format!("the server (pid {}) is still running", begun.pid),
                hint: "see its journal; `gpuserver stop --force` stops it without waiting".into(),
            }
            .into());
        }
        // The server stops listening before it exits.
        let programs = match admin::ask(&server.socket, &Ask::Status) {
            Ok(Ok(status)) => serde_json::from_value::<StatusView>(status)?.programs,
            _ => Vec::new(),
        };
        if programs != told && !programs.is_empty() && !out.json {
            let left = left.saturating_sub(STOP_TIMEOUT).as_secs();
            writeln!(out.out, "waiting up to {left} s for {}", programs.join(", "))?;
            out.out.flush()?;
        }
        told = programs;
        std::thread::sleep(POLL_INTERVAL);
    }
    out.answer("stopped", serde_json::to_value(begun)?, |out, _: StopView| Ok(writeln!(out, "stopped")?))
}
