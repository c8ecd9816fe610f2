//! Answers about the past: accounting and the audit trail.

use std::io::Write;
use std::sync::Arc;

use serde_json::Value;

use super::{internal, show};
use crate::accounting::Wanted;
use crate::audit;
use crate::pool::Pool;
use crate::refusal::Refusal;
use crate::text::{date, mib, print_table, span, table};

pub(in crate::admin) async fn accounting(pool: &Pool, wanted: Wanted) -> Result<Value, Refusal> {
    let accounting = pool.accounting().clone();
    let records = tokio::task::spawn_blocking(move || accounting.list(&wanted)).await;
    let records = records.map_err(|e| internal(&e))?.map_err(|e| internal(&e))?;
    show(serde_json::to_value(records))
}

/// Most lines of the audit trail in one answer.
pub const MAX_LINES: usize = 10_000;

pub(in crate::admin) async fn audit(pool: &Arc<Pool>, wanted: audit::Wanted) -> Result<Value, Refusal> {
    let pool = pool.clone();
    let lines = tokio::task::spawn_blocking(move || pool.audit().list(&wanted, MAX_LINES)).await;
    let lines = lines.map_err(|e| internal(&e))?.map_err(|e| internal(&e))?;
    show(serde_json::to_value(lines))
}

pub(in crate::admin) async fn forget_user(
    pool: &Arc<Pool>,
    client: String,
    user: String,
) -> Result<Value, Refusal> {
    show(serde_json::to_value(pool.audit().forget(client, user).await.map_err(|e| internal(&e))?))
}

/// Prints `gpuserver accounting`.
pub fn print_accounting(out: &mut dyn Write, records: Vec<crate::accounting::Record>) -> anyhow::Result<()> {
    let n = records.len();
    let header = [
        "END", "DURATION", "RECORD", "CLIENT", "USER", "GPUS", "BUSY", "PEAK", "TO GPU", "FROM GPU", "REASON",
    ];
    let mut table = table(&header);
    for r in records {
        let what = match r.kind {
            crate::accounting::Kind::Lease => format!("lease {}", r.lease),
            crate::accounting::Kind::Process => format!("{} (pid {}, uid {})", r.program, r.pid, r.uid),
        };
        table.add_row([
            date(r.end_unix),
            span(r.end_unix.saturating_sub(r.start_unix) * 1_000_000),
            what,
            r.client,
            match (r.user.is_empty(), &r.uids[..]) {
                (false, _) => r.user,
                (true, []) => "-".into(),
                (true, uids) => {
                    format!("uid {}", uids.iter().map(u32::to_string).collect::<Vec<_>>().join(", "))
                }
            },
            r.gpus.len().to_string(),
            span(r.gpu_busy_usec),
            mib(r.peak_memory_bytes),
            mib(r.bytes_to_device),
            mib(r.bytes_from_device),
            r.reason,
        ]);
    }
    print_table(out, &table, n, "no records of that time")
}

/// Prints `gpuserver audit`.
pub fn print_audit(out: &mut dyn Write, lines: Vec<crate::audit::Line>) -> anyhow::Result<()> {
    let n = lines.len();
    let mut table =
        table(&["TIME", "NUMBER", "EVENT", "ACTOR", "FROM", "CLIENT", "LEASE", "RESULT", "DETAIL"]);
    let dash = |text: String| if text.is_empty() { "-".into() } else { text };
    for line in lines {
        let e = line.event;
        let of = if e.user.is_empty() { String::new() } else { format!(" of {}", e.user) };
        let program = if e.program.is_empty() { String::new() } else { format!("{}{of}; ", e.program) };
        table.add_row([
            date(line.time_usec / 1_000_000),
            line.seq.to_string(),
            e.event,
            e.actor,
            dash(e.from),
            dash(e.client),
            dash(e.lease),
            e.result,
            dash(format!("{program}{}", e.detail).trim_end_matches("; ").to_owned()),
        ]);
    }
    print_table(out, &table, n, "no events in this time")
}
