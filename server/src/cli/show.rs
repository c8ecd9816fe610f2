//! Output of the verbs: tables for people, one JSON object for programs.

use std::io::Write;

use comfy_table::{Table, presets};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::admin::answer::administrators::AdministratorRow;
use crate::admin::answer::clients::ClientRow;
use crate::admin::answer::config::{ConfigRow, LimitRow};
use crate::admin::answer::gpus::GpuRow;
use crate::admin::answer::leases::{LeaseRow, QueueRow};
use crate::admin::answer::status::StatusView;
use crate::admin::answer::tokens::TokenView;
use crate::admin::answer::workers::PsRow;
use crate::certificate::day;
use crate::signer::tokens::TokenFacts;

/// Creates a table without lines.
pub fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(header);
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    table
}

/// Standard output of a verb.
pub struct Output<'a> {
    /// Place of the text.
    pub out: &'a mut dyn Write,
    /// Whether `--json` is given.
    pub json: bool,
}

impl Output<'_> {
    /// Prints an answer: as JSON under `key`, or as `text` writes it for people.
    pub fn answer<T: DeserializeOwned>(
        &mut self,
        key: &str,
        value: Value,
        text: impl FnOnce(&mut dyn Write, T) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        if self.json {
            writeln!(self.out, "{:#}", json!({ "schema": 1, key: value }))?;
            return Ok(());
        }
        text(self.out, serde_json::from_value(value)?)
    }
}

/// Formats bytes as MiB.
pub fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes >> 20)
}

fn dash<T: ToString>(value: Option<T>) -> String {
    value.map_or_else(|| "-".into(), |v| v.to_string())
}

/// Formats microseconds for people, with at most two units.
pub fn span(usec: u64) -> String {
    let seconds = usec / 1_000_000;
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}min {}s", seconds / 60, seconds % 60),
        3600..86400 => format!("{}h {}min", seconds / 3600, seconds % 3600 / 60),
        _ => format!("{}d {}h", seconds / 86400, seconds % 86400 / 3600),
    }
}

/// Formats seconds since 1970 as a date.
fn date(unix: u64) -> String {
    let format = time::macros::format_description!("[year]-[month]-[day] [hour]:[minute] UTC");
    i64::try_from(unix)
        .ok()
        .and_then(|t| time::OffsetDateTime::from_unix_timestamp(t).ok())
        .and_then(|t| t.format(format).ok())
        .unwrap_or_else(|| "-".into())
}

/// Prints a table, or this text for one without rows.
pub fn print_table(out: &mut dyn Write, table: &Table, rows: usize, nothing: &str) -> anyhow::Result<()> {
    if rows == 0 {
        writeln!(out, "{nothing}")?;
    } else {
        writeln!(out, "{}", table.trim_fmt())?;
    }
    Ok(())
}

/// Prints `gpuserver status`.
pub fn print_status(out: &mut dyn Write, s: StatusView) -> anyhow::Result<()> {
    let driver_version = if s.driver_version.is_empty() { "no version" } else { &s.driver_version };
    writeln!(out, "{} is {} (gpuserver {}, pid {})", s.name, s.state, s.version, s.pid)?;
    writeln!(out, "  control    {}", s.control_address)?;
    writeln!(out, "  data       {}", s.data_address)?;
    writeln!(
        out,
        "  driver     {} ({driver_version}, CUDA {}.{})",
        s.driver,
        s.cuda_version / 1000,
        s.cuda_version % 1000 / 10
    )?;
    writeln!(out, "  authority  {}", s.authority_sha256)?;
    if !s.isolation.is_empty() {
        writeln!(out, "  isolation  {}", s.isolation)?;
    }
    if !s.memory_limits.is_empty() {
        writeln!(out, "  host       {}", s.memory_limits)?;
    }
    if !s.users.is_empty() {
        writeln!(out, "  users      {}", s.users)?;
    }
    if s.certificate_expires_unix != 0 {
        let (own, authority) = (day(s.certificate_expires_unix), day(s.authority_expires_unix));
        writeln!(out, "  identity   certificate until {own} (renews itself), authority until {authority}")?;
    }
    for warning in &s.warnings {
        writeln!(out, "  warning    {warning}")?;
    }
    writeln!(out, "  {} GPUs, {} leases, {} workers", s.gpus, s.leases, s.workers)?;
    Ok(())
}

const NO_WORKERS: &str = "no workers: no client holds a lease";

/// Describes the program that a worker serves.
fn program(r: &PsRow) -> String {
    match (&r.program, r.client_pid, r.uid) {
        (Some(program), Some(pid), Some(uid)) => format!("{program} (pid {pid}, uid {uid})"),
        _ => "-".into(),
    }
}

/// Prints `gpuserver ps --threads`; `all`: rows of several servers.
pub fn print_threads(out: &mut dyn Write, rows: Vec<PsRow>, all: bool) -> anyhow::Result<()> {
    let n = rows.len();
    let mut table = table(&["SERVER", "WORKER", "PID", "CLIENT", "PROGRAM", "TID", "THREAD", "STATE", "CPU"]);
    for r in &rows {
        for (i, t) in r.threads.iter().enumerate() {
            let first = |text: String| if i == 0 { text } else { String::new() };
            table.add_row([
                first(r.server.clone()),
                first(r.worker.get(..12).unwrap_or(&r.worker).to_string()),
                first(dash(r.pid)),
                first(r.client.clone()),
                first(program(r)),
                t.tid.to_string(),
                t.name.clone(),
                t.state.clone(),
                format!("{}.{:02} s", t.cpu_usec / 1_000_000, t.cpu_usec / 10_000 % 100),
            ]);
        }
    }
    hide_server(&mut table, all);
    print_table(out, &table, n, NO_WORKERS)
}

/// Hides the server's column unless the rows are of several servers.
fn hide_server(table: &mut Table, all: bool) {
    if let Some(column) = table.column_mut(0).filter(|_| !all) {
        column.set_constraint(comfy_table::ColumnConstraint::Hidden);
    }
}

/// Prints `gpuserver ps`; `all`: rows of several servers.
pub fn print_ps(out: &mut dyn Write, rows: Vec<PsRow>, all: bool) -> anyhow::Result<()> {
    let n = rows.len();
    let mut table = table(&[
        "SERVER",
        "WORKER",
        "PID",
        "STATE",
        "LEASE",
        "CLIENT",
        "PROGRAM",
        "FROM",
        "TRANSPORT",
        "TLS",
        "GPU",
        "ISOLATION",
        "MEMORY",
        "CALLS",
        "AGE",
    ]);
    for r in rows {
        let (program, state) = (program(&r), state(&r));
        table.add_row([
            r.server,
            r.worker.get(..12).unwrap_or(&r.worker).to_string(),
            dash(r.pid),
            state,
            r.lease,
            r.client,
            program,
            dash(r.peer),
            dash(r.transport),
            match r.encrypted {
                Some(true) => "yes",
                Some(false) => "no",
                None => "-",
            }
            .into(),
            r.gpu_indices.iter().map(usize::to_string).collect::<Vec<_>>().join(" "),
            if r.isolation.len() > 5 { "partial".into() } else { r.isolation },
            mib(r.memory_bytes),
            r.calls.to_string(),
            span(r.age_usec),
        ]);
    }
    hide_server(&mut table, all);
    print_table(out, &table, n, NO_WORKERS)
}

/// Describes the state of a worker and of its program's connection.
fn state(row: &PsRow) -> String {
    let mut state = row.state.clone();
    if row.shares_memory {
        state += ", shares";
    }
    match (row.interrupted_usec, row.interruptions) {
        (Some(usec), _) => state += &format!(", no connection for {}", span(usec)),
        (None, 1..) => state += &format!(", interrupted {}x", row.interruptions),
        (None, 0) => {}
    }
    state
}

/// Prints `gpuserver leases`.
pub fn print_leases(out: &mut dyn Write, rows: Vec<LeaseRow>) -> anyhow::Result<()> {
    let n = rows.len();
    let mut table = table(&[
        "LEASE", "CLIENT", "USER", "STATE", "GPU", "MEMORY", "SMS", "TLS", "WARM", "IDLE", "LEFT", "SINCE",
    ]);
    for r in rows {
        for (i, d) in r.devices.into_iter().enumerate() {
            let first = |text: String| if i == 0 { text } else { String::new() };
            table.add_row([
                first(r.lease.clone()),
                first(r.client.clone()),
                first(if r.user.is_empty() { "-".into() } else { r.user.clone() }),
                first(match r.position {
                    0 => r.state.clone(),
                    place => format!("{} (place {place})", r.state),
                }),
                d.uuid,
                mib(d.limit_bytes),
                format!("{} %{}", d.sm_percent, if r.mps { ", mps" } else { "" }),
                first(if r.encrypted { "yes" } else { "no" }.into()),
                first(r.warm.to_string()),
                first(span(r.idle_usec)),
                first(span(r.left_usec)),
                first(date(r.created_unix)),
            ]);
        }
    }
    print_table(out, &table, n, "no leases")
}

/// Prints `gpuserver gpus`.
pub fn print_gpus(out: &mut dyn Write, rows: Vec<GpuRow>) -> anyhow::Result<()> {
    let n = rows.len();
    let mut table = table(&[
        "GPU", "NAME", "UUID", "PCI", "SHARING", "STATE", "BUSY", "USED", "LEASED", "MEMORY", "LEASES",
    ]);
    for r in rows {
        table.add_row([
            r.index.to_string(),
            r.name,
            r.uuid,
            r.pci_address,
            match r.compute_mode.as_str() {
                "" | "default" => r.sharing.as_str().into(),
                mode => format!("{}, {mode}", r.sharing),
            },
            match r.reason {
                Some(reason) => format!("{}: {reason}", r.state),
                None => r.state,
            },
            r.utilization_percent.map_or_else(|| "-".into(), |percent| format!("{percent} %")),
            r.used_bytes.map_or_else(|| "-".into(), mib),
            mib(r.leased_bytes),
            mib(r.memory_bytes),
            if r.leases.is_empty() { "-".into() } else { r.leases.join(" ") },
        ]);
    }
    print_table(out, &table, n, "no GPUs")
}

/// Prints `gpuserver mps`.
pub fn print_mps(out: &mut dyn Write, domains: Vec<crate::mps::DomainView>) -> anyhow::Result<()> {
    let n = domains.len();
    let mut table = table(&[
        "DOMAIN",
        "GPUS",
        "STATE",
        "DAEMON",
        "SERVERS",
        "CLIENTS",
        "LEASES",
        "RESTARTS",
        "LAST FAULT",
    ]);
    for d in domains {
        let servers: Vec<_> = d.servers.iter().map(|s| format!("{} ({})", s.pid, s.state)).collect();
        let clients: usize = d.servers.iter().map(|s| s.clients.len()).sum();
        let or_dash = |list: Vec<String>| if list.is_empty() { "-".into() } else { list.join(" ") };
        table.add_row([
            d.client,
            d.gpus.join(" "),
            if d.reason.is_empty() { d.state } else { format!("{}: {}", d.state, d.reason) },
            dash(d.daemon_pid),
            or_dash(servers),
            clients.to_string(),
            or_dash(d.leases),
            d.restarts.to_string(),
            d.faults.last().map_or_else(
                || "-".into(),
                |f| {
                    let whose: Vec<_> = f.culprits.iter().map(|pid| format!(" of process {pid}")).collect();
                    format!("{}{}: {}", date(f.unix), whose.concat(), f.why)
                },
            ),
        ]);
    }
    print_table(out, &table, n, "no MPS domains: no lease shares its GPUs by MPS")
}

/// Prints `gpuserver queue`.
pub fn print_queue(out: &mut dyn Write, rows: Vec<QueueRow>) -> anyhow::Result<()> {
    let n = rows.len();
    let mut table = table(&["PLACE", "CLIENT", "USER", "GPUS", "PRIORITY"]);
    for r in rows {
        let user = if r.user.is_empty() { "-".into() } else { r.user };
        table.add_row([r.position.to_string(), r.client, user, r.gpus.to_string(), r.priority]);
    }
    print_table(out, &table, n, "no request waits")
}

/// Prints `gpuserver park` and `gpuserver unpark`.
pub fn print_lease_state(out: &mut dyn Write, value: Value) -> anyhow::Result<()> {
    let (lease, state) =
        (value["lease"].as_str().unwrap_or_default(), value["state"].as_str().unwrap_or_default());
    match value["position"].as_u64() {
        Some(place) if place > 0 => writeln!(out, "lease {lease} is {state}, place {place} in the queue")?,
        _ => writeln!(out, "lease {lease} is {state}")?,
    }
    Ok(())
}

/// Prints `gpuserver off` and `gpuserver on`.
pub fn print_gpu_state(out: &mut dyn Write, value: Value) -> anyhow::Result<()> {
    let text = |v: &Value| v.as_str().unwrap_or_default().to_string();
    writeln!(out, "GPU {} is {}", text(&value["uuid"]), text(&value["state"]))?;
    for lease in value["leases"].as_array().into_iter().flatten() {
        writeln!(out, "  lease {} stays on it until it ends", text(lease))?;
    }
    Ok(())
}

/// Prints `gpuserver drop`; `gpu`: as the command line names it.
pub fn print_dropped(out: &mut dyn Write, value: Value, gpu: &str) -> anyhow::Result<()> {
    print_gpu_state(out, value)?;
    writeln!(out, "`gpuserver on {gpu}` returns it to service")?;
    Ok(())
}

/// Prints `gpuserver drain`.
pub fn print_drain(out: &mut dyn Write, value: Value) -> anyhow::Result<()> {
    if value["draining"] == false {
        writeln!(out, "new leases are allowed again")?;
        return Ok(());
    }
    writeln!(
        out,
        "no new leases, also after a restart, until `gpuserver drain --end`; {} leases stay",
        value["leases"]
    )?;
    for program in value["programs"].as_array().into_iter().flatten() {
        writeln!(out, "  still running: {}", program.as_str().unwrap_or_default())?;
    }
    Ok(())
}

/// Prints `gpuserver kill`.
pub fn print_killed(out: &mut dyn Write, value: Value) -> anyhow::Result<()> {
    match value["lease"].as_str() {
        Some(lease) => writeln!(
            out,
            "lease {lease} ended; if its client has it configured, the client requests it again"
        )?,
        None => writeln!(out, "worker {} is stopping", value["worker"].as_str().unwrap_or_default())?,
    }
    Ok(())
}

/// Prints `gpuserver limits` of a user, or without a user if the name is empty.
pub fn print_limits(out: &mut dyn Write, rows: Vec<LimitRow>, user: &str) -> anyhow::Result<()> {
    let n = rows.len();
    let mut table = table(&["LIMIT", "VALUE", "OF", "FROM", "MEANING"]);
    for r in rows {
        table.add_row([r.limit, r.value, r.of, r.origin, r.help]);
    }
    print_table(out, &table, n, "no limits")?;
    if !user.is_empty() {
        writeln!(
            out,
            "limits of {user} apply to {user}'s own leases; on a lease for all users of a machine, workers, connections, \
             threads and host_memory apply to {user}'s programs"
        )?;
    }
    Ok(())
}

/// Prints `gpuserver config get` and `gpuserver config diff`.
pub fn print_config(out: &mut dyn Write, rows: Vec<ConfigRow>, origin: bool) -> anyhow::Result<()> {
    for r in rows {
        let (waits, live) = match (r.after_restart, r.live) {
            (true, _) => (" (after a restart)", ""),
            (false, true) => ("", ""),
            (false, false) => ("", ", a change needs a restart"),
        };
        match origin {
            true => writeln!(out, "{} = {}{waits}  # {}{live}", r.key, r.value, r.origin)?,
            false => writeln!(out, "{} = {}{waits}", r.key, r.value)?,
        }
    }
    Ok(())
}

/// Prints `gpuserver config set`, `unset` and `reload`.
pub fn print_config_changes(out: &mut dyn Write, value: Value) -> anyhow::Result<()> {
    let mut nothing = true;
    for (list, note) in [("changed", ""), ("after_restart", " (after a restart)")] {
        for line in value[list].as_array().into_iter().flatten() {
            writeln!(out, "{}{note}", line.as_str().unwrap_or_default())?;
            nothing = false;
        }
    }
    if nothing {
        writeln!(out, "configuration: no key changed")?;
    }
    Ok(())
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

/// A row of `gpuserver top`.
#[derive(Debug, serde::Serialize)]
pub struct TopRow {
    #[serde(flatten)]
    row: PsRow,
    /// Rate since the update before; `None` in the first one.
    calls_per_second: Option<u64>,
    /// Part of the time since the update before with GPU work; `None` in the first one.
    gpu_busy_percent: Option<u64>,
}

/// Calls and microseconds of GPU work at an update, by worker id.
pub type Seen = std::collections::HashMap<String, (u64, u64)>;

/// Keeps the figures of an update for the next one.
pub fn seen(rows: &[PsRow]) -> Seen {
    rows.iter().map(|row| (row.worker.clone(), (row.calls, row.gpu_busy_usec))).collect()
}

/// Returns the workers with programs, the busiest first; `before` is from the update before.
pub fn busiest(rows: Vec<PsRow>, before: &Seen, seconds: f64) -> Vec<TopRow> {
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
pub fn print_top(out: &mut dyn Write, rows: Vec<TopRow>) -> anyhow::Result<()> {
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

/// Prints `gpuserver token list`.
pub fn print_tokens(out: &mut dyn Write, rows: Vec<TokenFacts>) -> anyhow::Result<()> {
    let n = rows.len();
    let mut table = table(&["ID", "NAMES", "FROM", "USES LEFT", "CREATED", "EXPIRES"]);
    for row in rows {
        let (made, until) = (date(row.created_unix), date(row.expires_unix));
        let from: Vec<_> = row.from.iter().map(ToString::to_string).collect();
        let mut from = if from.is_empty() { "anywhere".into() } else { from.join(", ") };
        if row.per_address > 0 {
            from += &format!(", {} per address", row.per_address);
        }
        table.add_row([row.id, row.name_pattern, from, row.uses_left.to_string(), made, until]);
    }
    print_table(out, &table, n, "no tokens: `gpuserver token create` creates one")
}

/// Prints `gpuserver admin list`.
pub fn print_administrators(out: &mut dyn Write, rows: Vec<AdministratorRow>) -> anyhow::Result<()> {
    let n = rows.len();
    let mut table = table(&["NAME", "STATE", "SINCE"]);
    for row in rows {
        table.add_row([row.name, row.state, date(row.since_unix)]);
    }
    print_table(out, &table, n, "no administrators: `gpuserver admin create` creates a certificate")
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

/// Prints `gpuserver clients`.
pub fn print_clients(out: &mut dyn Write, rows: Vec<ClientRow>) -> anyhow::Result<()> {
    let n = rows.len();
    let mut table = table(&["CLIENT", "STATE", "LEASES", "LAST CALL", "ISSUED", "EXPIRES"]);
    for r in rows {
        table.add_row([
            r.name,
            r.state,
            r.leases.to_string(),
            r.silent_usec.map_or_else(|| "-".into(), |s| format!("{} ago", span(s))),
            date(r.joined_unix),
            if r.expires_unix == 0 { "-".into() } else { day(r.expires_unix) },
        ]);
    }
    print_table(
        out,
        &table,
        n,
        "no clients: `gpuserver token create` creates a token with which a client can join",
    )
}

/// Prints `gpuserver token create`, with only the token on standard output, for scripts.
pub fn print_token(out: &mut dyn Write, t: TokenView, server: &str) -> anyhow::Result<()> {
    writeln!(out, "{}", t.token)?;
    eprintln!(
        "for {} client(s) named {:?}, until {}; run `gpusession join {server}` on the client and paste it",
        t.uses,
        t.name_pattern,
        date(t.expires_unix)
    );
    Ok(())
}
