//! The verbs that ask a running server, and the way to those that may do without.

use std::io::Write;
use std::time::Duration;

use serde_json::{Value, json};

use super::accounting::{accounting, past};
use super::admin::administrators;
use super::clients::clients;
use super::config::{check_config, configure};
use super::pool::pool;
use super::show;
use super::target::{Target, must_run, running};
use super::token::token;
use super::verbs::{Cli, Verb};
use crate::accounting::{Kind, Wanted};
use crate::admin::answer::status::{PsRow, StatusView, StopView};
use crate::admin::{self, Ask, Refusal};
use crate::clock::{Clock, SystemClock};
use crate::config;

/// Runs a verb that is not `serve`.
pub fn run(cli: &Cli) -> anyhow::Result<()> {
    if cli.server.is_some()
        && let Some(why) = local(&cli.verb)
    {
        return Err(admin::local_only(why).into());
    }
    let server = Target::of(cli)?;
    let out = &mut std::io::stdout().lock();
    match &cli.verb {
        Verb::Serve => anyhow::bail!("internal error: serve is not a verb of this function"),
        Verb::CheckConfig { explain, json } => check_config(out, cli, server.config()?, *explain, *json),
        Verb::Pool { verb } => pool(out, server.config()?, verb),
        Verb::Token { verb } => token(out, &server, verb),
        Verb::Admin { verb } => administrators(out, &server, verb),
        Verb::Clients { verb, json } => clients(out, &server, verb.as_ref(), *json),
        Verb::Status { json } => {
            let value = must_run(&server, &Ask::Status)?;
            if *json {
                show::json(out, "server", value)
            } else {
                show::status(out, &serde_json::from_value(value)?)
            }
        }
        Verb::Ps { all, threads, json } => ps(out, cli, &server, *all, *threads, *json),
        Verb::Leases { json } => {
            let value = must_run(&server, &Ask::Leases)?;
            if *json {
                show::json(out, "leases", value)
            } else {
                show::leases(out, serde_json::from_value(value)?)
            }
        }
        Verb::Gpus { json } => {
            let value = must_run(&server, &Ask::Gpus)?;
            if *json {
                show::json(out, "gpus", value)
            } else {
                show::gpus(out, serde_json::from_value(value)?)
            }
        }
        Verb::Park { lease, json } => parked(out, &server, &Ask::Park { lease: lease.clone() }, *json),
        Verb::Unpark { lease, json } => parked(out, &server, &Ask::Unpark { lease: lease.clone() }, *json),
        Verb::Top { every, times, json } => top(out, &server, every, *times, *json),
        Verb::Mps { json } => {
            let value = must_run(&server, &Ask::Mps)?;
            if *json {
                show::json(out, "domains", value)
            } else {
                show::mps(out, serde_json::from_value(value)?)
            }
        }
        Verb::Queue { json } => {
            let value = must_run(&server, &Ask::Queue)?;
            if *json {
                show::json(out, "queue", value)
            } else {
                show::queue(out, serde_json::from_value(value)?)
            }
        }
        Verb::Off { gpu, reason, json } => {
            let ask = Ask::Off { gpu: gpu.clone(), reason: reason.clone() };
            gpu_changed(out, must_run(&server, &ask)?, *json)
        }
        Verb::On { gpu, json } => gpu_changed(out, must_run(&server, &Ask::On { gpu: gpu.clone() })?, *json),
        Verb::Drop { gpu, json } => {
            gpu_changed(out, must_run(&server, &Ask::Drop { gpu: gpu.clone() })?, *json)?;
            if !*json {
                writeln!(out, "`gpuserver on {gpu}` returns it to service")?;
            }
            Ok(())
        }
        Verb::Drain { end, reason, json } => drain(out, &server, *end, reason, *json),
        Verb::Stop { force, json } => stop(out, &server, *force, *json),
        Verb::Limits { client, user, json } => limits(out, &server, client, user, *json),
        Verb::Accounting { since, until, client, user, kind, csv, json } => {
            let time = |text: &str| {
                past(text, SystemClock.unix()).ok_or_else(|| {
                    Refusal::new("usage", format!("{text:?}: a time like \"24h\" or 2026-11-21 is wanted"))
                })
            };
            let wanted = Wanted {
                since_unix: time(since)?,
                until_unix: until.as_deref().map(time).transpose()?.unwrap_or(0),
                client: client.clone(),
                user: user.clone(),
                kind: kind.as_deref().map(|k| if k == "lease" { Kind::Lease } else { Kind::Process }),
            };
            accounting(out, &server, &wanted, *csv, *json)
        }
        Verb::Config { verb, json } => configure(out, &server, verb, *json),
        Verb::Kill { worker, json } => kill(out, &server, worker, *json),
    }
}

/// Returns why a verb is refused with `--server`, if it asks no running server.
///
/// For the other verbs [`Ask::local`] decides.
fn local(verb: &Verb) -> Option<&'static str> {
    match verb {
        Verb::Serve => Some("a server is started on its own host"),
        Verb::CheckConfig { .. } => {
            Some("a configuration is checked on its own host, whose driver and folders it names")
        }
        Verb::Pool { .. } => Some("a pool's authority is kept on its servers' own disks"),
        _ => None,
    }
}

/// `gpuserver ps`
fn ps(
    out: &mut dyn Write,
    cli: &Cli,
    server: &Target,
    all: bool,
    threads: bool,
    json: bool,
) -> anyhow::Result<()> {
    let ask = if threads { Ask::Threads } else { Ask::Ps };
    let mut rows = Vec::new();
    if all {
        if server.remote.is_some() {
            return Err(admin::local_only("--all asks the servers of this host").into());
        }
        let mut answered = false;
        for server in Target::beside(cli) {
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
    if json {
        show::json(out, "workers", serde_json::to_value(rows)?)
    } else if threads {
        show::threads(out, rows, all)
    } else {
        show::ps(out, rows, all)
    }
}

fn parked(out: &mut dyn Write, server: &Target, ask: &Ask, json: bool) -> anyhow::Result<()> {
    let value = must_run(server, ask)?;
    if json {
        return show::json(out, "lease", value);
    }
    let (lease, state) =
        (value["lease"].as_str().unwrap_or_default(), value["state"].as_str().unwrap_or_default());
    match value["position"].as_u64() {
        Some(place) if place > 0 => writeln!(out, "lease {lease} is {state}, place {place} in the queue")?,
        _ => writeln!(out, "lease {lease} is {state}")?,
    }
    Ok(())
}

fn gpu_changed(out: &mut dyn Write, value: Value, json: bool) -> anyhow::Result<()> {
    if json {
        return show::json(out, "gpu", value);
    }
    let text = |v: &Value| v.as_str().unwrap_or_default().to_string();
    writeln!(out, "GPU {} is {}", text(&value["uuid"]), text(&value["state"]))?;
    for lease in value["leases"].as_array().into_iter().flatten() {
        writeln!(out, "  lease {} stays on it until it ends", text(lease))?;
    }
    Ok(())
}

fn drain(out: &mut dyn Write, server: &Target, end: bool, reason: &str, json: bool) -> anyhow::Result<()> {
    let value = must_run(server, &Ask::Drain { end, reason: reason.to_owned() })?;
    if json {
        return show::json(out, "drain", value);
    }
    let programs: Vec<String> = serde_json::from_value(value["programs"].clone())?;
    match end {
        true => writeln!(out, "new leases are allowed again")?,
        false => writeln!(
            out,
            "no new leases, also after a restart, until `gpuserver drain --end`; {} leases stay",
            value["leases"]
        )?,
    }
    for program in programs.iter().filter(|_| !end) {
        writeln!(out, "  still running: {program}")?;
    }
    Ok(())
}

fn limits(out: &mut dyn Write, server: &Target, client: &str, user: &str, json: bool) -> anyhow::Result<()> {
    let ask = Ask::Limits { client: client.to_owned(), user: user.to_owned() };
    let value = must_run(server, &ask)?;
    if json {
        show::json(out, "limits", value)
    } else {
        show::limits(out, serde_json::from_value(value)?)?;
        if !user.is_empty() {
            writeln!(
                out,
                "limits of {user} apply to {user}'s own leases; on a lease for all users of a machine, workers, connections \
                 and host_memory apply to {user}'s programs"
            )?;
        }
        Ok(())
    }
}

fn kill(out: &mut dyn Write, server: &Target, worker: &str, json: bool) -> anyhow::Result<()> {
    let value = must_run(server, &Ask::Kill { worker: worker.to_owned() })?;
    if json {
        return show::json(out, "killed", value);
    }
    match value["lease"].as_str() {
        Some(lease) => writeln!(
            out,
            "lease {lease} ended; if its client has it configured, the client requests it again"
        )?,
        None => writeln!(out, "worker {} is stopping", value["worker"].as_str().unwrap_or_default())?,
    }
    Ok(())
}

fn top(out: &mut dyn Write, server: &Target, every: &str, times: u32, json: bool) -> anyhow::Result<()> {
    let every = config::parse_duration(every)
        .filter(|d| !d.is_zero())
        .ok_or_else(|| Refusal::new("usage", format!("--every {every}: a duration like \"2s\" is wanted")))?;
    let mut before = show::Seen::new();
    for look in 1.. {
        let rows: Vec<PsRow> = serde_json::from_value(must_run(server, &Ask::Ps)?)?;
        let seen = show::seen(&rows);
        let rows = show::busiest(rows, &before, every.as_secs_f64());
        if json {
            writeln!(out, "{}", json!({ "schema": 1, "top": rows }))?;
        } else {
            if std::io::IsTerminal::is_terminal(&std::io::stdout()) {
                write!(out, "\x1b[H\x1b[2J")?;
            }
            show::top(out, rows)?;
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
fn stop(out: &mut dyn Write, server: &Target, force: bool, json: bool) -> anyhow::Result<()> {
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
        if programs != told && !programs.is_empty() && !json {
            let left = left.saturating_sub(STOP_TIMEOUT).as_secs();
            writeln!(out, "waiting up to {left} s for {}", programs.join(", "))?;
            out.flush()?;
        }
        told = programs;
        std::thread::sleep(POLL_INTERVAL);
    }
    if json {
        return show::json(out, "stopped", serde_json::to_value(begun)?);
    }
    writeln!(out, "stopped")?;
    Ok(())
}
