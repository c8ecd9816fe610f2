//! The verbs that send several requests: `ps`, `top` and `stop`.
#![expect(clippy::disallowed_methods, reason = "a command waits on its only thread")]

use std::io::Write;
use std::path::Path;
use std::time::Duration;

use gpusession_common::units::parse_duration;
use serde_json::json;

use super::target::{Target, must_run, running};
use crate::admin::answer::status::{StatusView, StopView};
use crate::admin::answer::workers::{PsRow, print_ps, print_threads};
use crate::admin::{self, Ask, Refusal};
use crate::text::{Output, dash, mib, print_table, span, table};

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
    let text = if threads { print_threads } else { print_ps };
    out.answer("workers", serde_json::to_value(rows)?, |out, rows| text(out, rows, all))
}

/// `gpuserver top`
pub(super) fn top(out: &mut Output<'_>, server: &Target, every: &str, times: u32) -> anyhow::Result<()> {
    let Output { out, json } = out;
    let every = parse_duration(every)
        .ok()
        .filter(|d| !d.is_zero())
        .ok_or_else(|| Refusal::new("usage", format!("--every {every}: not a duration; write 2s")))?;
    let mut before = Seen::new();
    for look in 1.. {
        let rows: Vec<PsRow> = serde_json::from_value(must_run(server, &Ask::Ps)?)?;
        let now = seen(&rows);
        let rows = busiest(rows, &before, every.as_secs_f64());
        if *json {
            writeln!(out, "{}", json!({ "schema": 1, "top": rows }))?;
        } else {
            if std::io::IsTerminal::is_terminal(&std::io::stdout()) {
                write!(out, "\x1b[H\x1b[2J")?;
            }
            print_top(out, rows)?;
        }
        out.flush()?;
        before = now;
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

/// A row of `gpuserver top`.
#[derive(Debug, serde::Serialize)]
struct TopRow {
    #[serde(flatten)]
    row: PsRow,
    /// Rate since the update before; `None` in the first one.
    calls_per_second: Option<u64>,
    /// Part of the time since the update before with GPU work; `None` in the first one.
    gpu_busy_percent: Option<u64>,
}

/// Calls and microseconds of GPU work at an update, by worker id.
type Seen = std::collections::HashMap<String, (u64, u64)>;

/// Keeps the figures of an update for the next one.
fn seen(rows: &[PsRow]) -> Seen {
    rows.iter().map(|row| (row.worker.clone(), (row.calls, row.gpu_busy_usec))).collect()
}

/// Returns the workers with programs, the busiest first; `before` is from the update before.
fn busiest(rows: Vec<PsRow>, before: &Seen, seconds: f64) -> Vec<TopRow> {
    let one = |row: PsRow| {
        let before = before.get(&row.worker);
        let calls = before.map(|(calls, _)| (row.calls.saturating_sub(*calls) as f64 / seconds) as u64);
        let busy = before.map(|(_, busy)| {
            // GPU work is known to the second, so its difference can exceed the elapsed time.
            ((row.gpu_busy_usec.saturating_sub(*busy) as f64 / seconds / 1e4) as u64).min(100)
        });
        TopRow { calls_per_second: calls, gpu_busy_percent: busy, row }
    };
    let mut rows: Vec<_> = rows.into_iter().filter(|row| row.program.is_some()).map(one).collect();
    rows.sort_by_key(|top| {
        std::cmp::Reverse((top.gpu_busy_percent, top.calls_per_second, top.row.memory_bytes))
    });
    rows
}

/// Prints `gpuserver top`.
fn print_top(out: &mut dyn Write, rows: Vec<TopRow>) -> anyhow::Result<()> {
    let n = rows.len();
    let mut table = table(&[
        "PROGRAM", "CLIENT", "UID", "LEASE", "GPU", "CALLS/S", "MEMORY", "IDLE", "TO GPU", "FROM GPU",
    ]);
    for TopRow { row, calls_per_second, gpu_busy_percent } in rows {
        table.add_row([
            row.program.unwrap_or_default(),
            row.client,
            dash(row.uid),
            row.lease,
            gpu_busy_percent.map_or_else(|| "-".into(), |percent| format!("{percent} %")),
            dash(calls_per_second),
            mib(row.memory_bytes),
            span(row.idle_usec),
            mib(row.bytes_to_device),
            mib(row.bytes_from_device),
        ]);
    }
    print_table(out, &table, n, "no programs")
}
