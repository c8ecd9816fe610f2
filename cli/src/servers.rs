//! The servers as they answer now: `smi`, `stats`, and the free GPUs of `list`.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gpusession_bus::describe::{Card, Described, Lease, Survey, Surveyed};
use gpusession_common::units::human_bytes;
use gpusession_common::usage;
use gpusessiond::client::Remote;
use gpusessiond::identity::{Home, Identity};
use gpusessiond::pool::{PoolError, PoolServer as _};
use serde_json::{Value, json};

use crate::daemon::{self, Daemon};
use crate::exit::{Failure, Result};
use crate::show::table;

/// Interval of `smi --watch`.
const WATCH_INTERVAL: Duration = Duration::from_secs(2);
/// Clears a terminal.
const CLEAR: &str = "\x1b[H\x1b[2J";

#[derive(clap::Args)]
pub struct Smi {
    /// Repeat until interrupted, every two seconds unless --loop says otherwise
    #[arg(long)]
    watch: bool,
    /// Repeat at this interval, in seconds
    #[arg(short = 'l', long = "loop", value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    every: Option<u64>,
}

/// Asks servers directly, with a client's identity.
pub async fn direct(identity: &Identity, addresses: Vec<String>) -> std::result::Result<Survey, PoolError> {
    let remotes = addresses.iter().map(|address| Remote::new(address, identity).map(Arc::new));
    let remotes = remotes.collect::<std::result::Result<Vec<_>, _>>()?;
    let uid = nix::unistd::getuid().as_raw();
    let ask = |index: usize| {
        let remote = remotes[index].clone();
        async move {
            let begun = Instant::now();
            let described = remote.describe(Some(uid)).await?;
            Ok((begun.elapsed(), described))
        }
    };
    Ok(gpusessiond::survey::survey(addresses, uid, ask).await)
}

/// Asks the servers through the daemon; without one, with this user's own identity.
///
/// Returns the daemon's state too, which has this machine's leases.
async fn ask() -> Result<(Survey, Option<Described>)> {
    let daemon = async {
        let daemon = Daemon::connect().await?;
        Ok((daemon.survey().await?, Some(daemon.describe().await?)))
    };
    let silent = match daemon.await {
        Ok(answer) => return Ok(answer),
        Err(failure) => failure,
    };
    let home = Home::of_caller();
    match (home.load(), home.addresses()) {
        (Ok(identity), Ok(addresses)) if !addresses.is_empty() && !daemon::runs().await => {
            let survey = direct(&identity, addresses).await;
            Ok((survey.map_err(|error| Failure::of_pool(&error))?, None))
        }
        _ => Err(silent),
    }
}

/// Leases of this machine on a card of a server.
fn leases_on<'a>(
    described: Option<&'a Described>,
    server: &'a Surveyed,
    card: &'a Card,
) -> impl Iterator<Item = &'a Lease> {
    let leases = described.into_iter().flat_map(|described| &described.leases);
    let there = leases.filter(|lease| lease.server == server.name);
    there.filter(|lease| lease.devices.iter().any(|device| device.uuid == card.uuid))
}

/// Names of this machine's leases on a card, with the number of their programs.
fn yours(described: Option<&Described>, server: &Surveyed, card: &Card) -> Vec<String> {
    leases_on(described, server, card)
        .map(|lease| match lease.processes {
            0 => lease.name_or_id().to_owned(),
            1 => format!("{} (1 program)", lease.name_or_id()),
            n => format!("{} ({n} programs)", lease.name_or_id()),
        })
        .collect()
}

fn dash(values: Vec<String>) -> String {
    if values.is_empty() { "-".into() } else { values.join(", ") }
}

fn or_dash<T>(value: Option<T>, show: impl Fn(T) -> String) -> String {
    value.map_or_else(|| "-".into(), show)
}

fn header<const N: usize>(names: [&str; N]) -> Vec<Vec<String>> {
    vec![names.map(String::from).to_vec()]
}

/// Adds a line for each server that does not answer.
fn silent(survey: &Survey, out: &mut String) {
    for server in &survey.servers {
        if let Some(trouble) = &server.trouble {
            let _ = writeln!(out, "{}: no answer: {trouble}", server.name);
        }
    }
}

fn smi_text(survey: &Survey, described: Option<&Described>) -> String {
    let names =
        ["SERVER", "GPU", "NAME", "TEMP", "POWER", "USED", "MEMORY", "UTIL", "FREE", "STATE", "YOUR LEASES"];
    let mut rows = header(names);
    for server in &survey.servers {
        for card in &server.cards {
            rows.push(vec![
                server.name.clone(),
                card.index.to_string(),
                card.name.clone(),
                or_dash(card.temperature_c, |c| format!("{c} C")),
                or_dash(card.power_mw, |mw| format!("{} W", mw / 1000)),
                or_dash(card.used_bytes, human_bytes),
                human_bytes(card.memory_bytes),
                or_dash(card.utilization_percent, |percent| format!("{percent}%")),
                human_bytes(card.free_bytes),
                card.state.clone(),
                dash(yours(described, server, card)),
            ]);
        }
    }
    let mut out = if rows.len() > 1 { table(&rows) } else { "no cards\n".into() };
    silent(survey, &mut out);
    out.push_str(&programs_text(survey, described));
    out
}

/// Formats the caller's programs: a row for each of their GPUs.
fn programs_text(survey: &Survey, described: Option<&Described>) -> String {
    let mut rows = header(["SERVER", "GPU", "LEASE", "PID", "USER", "PROGRAM", "MEMORY"]);
    let leases = || described.iter().flat_map(|described| &described.leases);
    for server in &survey.servers {
        for (card, program) in server.cards.iter().flat_map(|c| c.your_programs.iter().map(move |p| (c, p))) {
            let lease = leases().find(|lease| lease.id == program.lease).map(Lease::name_or_id);
            rows.push(vec![
                server.name.clone(),
                card.index.to_string(),
                lease.unwrap_or(&program.lease).to_owned(),
                program.pid.to_string(),
                if program.user.is_empty() { format!("uid {}", program.uid) } else { program.user.clone() },
                program.name.clone(),
                human_bytes(program.used_bytes),
            ]);
        }
    }
    if rows.len() > 1 { format!("\n{}", table(&rows)) } else { String::new() }
}

fn smi_json(survey: &Survey, described: Option<&Described>) -> Value {
    let mut value = json!(survey);
    for (server, shown) in survey.servers.iter().zip(value["servers"].as_array_mut().into_iter().flatten()) {
        // `stats` shows it.
        shown.as_object_mut().and_then(|shown| shown.remove("last_24h"));
        for (card, shown) in server.cards.iter().zip(shown["cards"].as_array_mut().into_iter().flatten()) {
            shown["your_leases"] =
                leases_on(described, server, card).map(|lease| lease.id.as_str()).collect();
        }
    }
    value
}

/// `gpusession smi`.
pub async fn smi(options: Smi, json: bool) -> Result<i32> {
    let every = options.every.map(Duration::from_secs).or(options.watch.then_some(WATCH_INTERVAL));
    let terminal = nix::unistd::isatty(std::io::stdout()) == Ok(true);
    loop {
        let (survey, described) = ask().await?;
        let text = match json {
            true => smi_json(&survey, described.as_ref()).to_string(),
            false => smi_text(&survey, described.as_ref()),
        };
        if every.is_some() && terminal && !json {
            let _ = std::io::Write::write_all(&mut std::io::stdout(), CLEAR.as_bytes());
        }
        let read = crate::print(&text);
        let Some(every) = every.filter(|_| read) else { return Ok(0) };
        tokio::time::sleep(every).await;
    }
}

/// Sums over the cards of a server.
struct Sums {
    free: usize,
    memory: u64,
    free_bytes: u64,
    used: Option<u64>,
    /// Mean over the cards that report it.
    utilization: Option<u32>,
}

impl Sums {
    fn of(server: &Surveyed) -> Self {
        let cards = &server.cards;
        let busy: Vec<u32> = cards.iter().filter_map(|card| card.utilization_percent).collect();
        Self {
            free: cards.iter().filter(|card| card.state == "free").count(),
            memory: cards.iter().map(|card| card.memory_bytes).sum(),
            free_bytes: cards.iter().map(|card| card.free_bytes).sum(),
            used: cards.iter().map(|card| card.used_bytes).sum(),
            utilization: (!busy.is_empty()).then(|| busy.iter().sum::<u32>() / busy.len() as u32),
        }
    }
}

/// Formats the use of the last 24 hours: rows for all, for this machine, and for the caller.
fn usage_text(survey: &Survey) -> String {
    let names = ["LAST 24 H", "BY"].into_iter().chain(usage::COLUMNS);
    let mut rows = vec![names.map(String::from).collect()];
    for (server, used) in survey.servers.iter().flat_map(|s| s.last_24h.iter().map(move |used| (s, used))) {
        let by = if used.by == "machine" { "this machine" } else { &used.by };
        rows.push([server.name.clone(), by.into()].into_iter().chain(used.sums.cells()).collect());
    }
    if rows.len() > 1 { format!("\n{}", table(&rows)) } else { String::new() }
}

fn stats_text(survey: &Survey, described: Option<&Described>) -> String {
    let names =
        ["SERVER", "STATE", "LEASES", "WAITING", "PROGRAMS", "GPUS", "FREE", "USED", "MEMORY", "UTIL", "RTT"];
    let mut rows = header(names);
    for server in survey.servers.iter().filter(|server| server.trouble.is_none()) {
        let sums = Sums::of(server);
        let number = |n: Option<u32>| or_dash(n, |n| n.to_string());
        rows.push(vec![
            server.name.clone(),
            server.state.clone(),
            number(server.leases),
            number(server.waiting),
            number(server.programs),
            server.cards.len().to_string(),
            sums.free.to_string(),
            or_dash(sums.used, human_bytes),
            human_bytes(sums.memory),
            or_dash(sums.utilization, |percent| format!("{percent}%")),
            format!("{:.1} ms", server.rtt_usec as f64 / 1000.0),
        ]);
    }
    let mut out = if rows.len() > 1 { table(&rows) } else { String::new() };
    silent(survey, &mut out);
    out.push_str(&usage_text(survey));
    if let Some(described) = described {
        let programs: usize = described.leases.iter().map(|lease| lease.processes).sum();
        let pending = described.leases.iter().filter(|lease| lease.state == "pending").count();
        let _ = writeln!(
            out,
            "this machine: {} lease(s) with {} GPU(s), {pending} waiting, {programs} program(s)",
            described.leases.len() - pending,
            described.leases.iter().map(|lease| lease.devices.len()).sum::<usize>(),
        );
    }
    out
}

fn stats_json(survey: &Survey, described: Option<&Described>) -> Value {
    let server = |server: &Surveyed| {
        let sums = Sums::of(server);
        json!({
            "name": server.name, "state": server.state, "trouble": server.trouble, "rtt_usec": server.rtt_usec,
            "leases": server.leases, "waiting": server.waiting, "programs": server.programs,
            "gpus": server.cards.len(), "gpus_free": sums.free, "memory_bytes": sums.memory,
            "free_bytes": sums.free_bytes, "used_bytes": sums.used, "utilization_percent": sums.utilization,
            "last_24h": server.last_24h,
        })
    };
    let lease = |lease: &gpusession_bus::describe::Lease| {
        json!({
            "id": lease.id, "state": lease.state, "server": lease.server, "user": lease.user,
            "gpus": lease.devices.len(), "programs": lease.processes,
        })
    };
    let own = described.map(|d| d.leases.iter().map(lease).collect::<Vec<_>>());
    json!({ "schema": 1, "servers": survey.servers.iter().map(server).collect::<Vec<_>>(), "own": own })
}

/// `gpusession stats`.
pub async fn stats(json: bool) -> Result<i32> {
    let (survey, described) = ask().await?;
    crate::print(&match json {
        true => stats_json(&survey, described.as_ref()).to_string(),
        false => stats_text(&survey, described.as_ref()),
    });
    Ok(0)
}

/// Formats the GPUs of the servers for `list`: a row for each model of a server.
pub fn pool_text(survey: &Survey, described: &Described) -> String {
    let mut rows = header(["SERVER", "STATE", "MODEL", "GPUS", "FREE", "LARGEST FREE", "SHARING", "YOURS"]);
    for server in &survey.servers {
        let mut models: Vec<&str> = server.cards.iter().map(|card| card.name.as_str()).collect();
        models.sort_unstable();
        models.dedup();
        for model in models {
            let cards: Vec<&Card> = server.cards.iter().filter(|card| card.name == model).collect();
            let usable = cards.iter().filter(|card| matches!(card.state.as_str(), "free" | "leased"));
            let largest = usable.map(|card| card.free_bytes).max().unwrap_or(0);
            let mut sharing: Vec<String> = cards.iter().map(|card| card.sharing.clone()).collect();
            sharing.retain(|mode| !mode.is_empty());
            sharing.sort_unstable();
            sharing.dedup();
            rows.push(vec![
                server.name.clone(),
                server.state.clone(),
                model.to_owned(),
                cards.len().to_string(),
                cards.iter().filter(|card| card.state == "free").count().to_string(),
                human_bytes(largest),
                dash(sharing),
                cards
                    .iter()
                    .filter(|card| !yours(Some(described), server, card).is_empty())
                    .count()
                    .to_string(),
            ]);
        }
    }
    let mut out = if rows.len() > 1 { table(&rows) } else { String::new() };
    silent(survey, &mut out);
    out
}

/// Formats the GPUs of the servers for `list --json`.
pub fn pool_json(survey: &Survey, described: &Described) -> Value {
    let gpu = |server: &Surveyed, card: &Card| {
        json!({
            "index": card.index, "uuid": card.uuid, "model": card.name, "state": card.state,
            "memory_bytes": card.memory_bytes, "free_bytes": card.free_bytes, "sharing": card.sharing,
            "yours": !yours(Some(described), server, card).is_empty(),
        })
    };
    let server = |server: &Surveyed| {
        let gpus: Vec<_> = server.cards.iter().map(|card| gpu(server, card)).collect();
        json!({ "name": server.name, "state": server.state, "trouble": server.trouble, "gpus": gpus })
    };
    let answered = survey.servers.iter().filter(|server| server.trouble.is_none());
    let waiting: Option<u32> = answered.map(|server| server.waiting).sum();
    json!({ "servers": survey.servers.iter().map(server).collect::<Vec<_>>(), "waiting": waiting })
}

#[cfg(test)]
mod tests {
    use gpusession_bus::describe::{CardProgram, Device, Usage};

    use super::*;
    use crate::health::testing::described;

    fn site() -> (Survey, Described) {
        let card = |index: u32, state: &str, free: u64| Card {
            index,
            uuid: format!("GPU-{index}"),
            name: "NVIDIA H200".into(),
            state: state.into(),
            memory_bytes: 1 << 30,
            free_bytes: free,
            sharing: if index == 1 { "mps" } else { "time-slice" }.into(),
            temperature_c: Some(31),
            power_mw: Some(120_400),
            used_bytes: Some(1 << 20),
            utilization_percent: Some(20 * index),
            your_programs: Vec::new(),
        };
        let server = Surveyed {
            name: "gpu-a".into(),
            state: "online".into(),
            cards: vec![card(0, "free", 1 << 30), card(1, "leased", 1 << 29), card(2, "off", 1 << 30)],
            leases: Some(1),
            waiting: Some(4),
            ..Default::default()
        };
        let down = Surveyed {
            name: "gpu-b:7601".into(),
            state: "offline".into(),
            trouble: Some("Connection refused".into()),
            ..Default::default()
        };
        let device = Device { uuid: "GPU-1".into(), ..Default::default() };
        let (name, server_name) = ("train".into(), "gpu-a".into());
        let lease =
            Lease { name, server: server_name, processes: 2, devices: vec![device], ..Default::default() };
        (Survey::new(vec![server, down]), Described { leases: vec![lease], ..described() })
    }

    #[test]
    fn cards_show_load_own_leases_and_silent_servers() {
        let (survey, described) = site();
        let text = smi_text(&survey, Some(&described));
        let row = text.lines().nth(2).unwrap();
        let words: Vec<_> = row.split("  ").map(str::trim).filter(|word| !word.is_empty()).collect();
        let expected =
            ["gpu-a", "1", "NVIDIA H200", "31 C", "120 W", "1 MiB", "1 GiB", "20%", "512 MiB", "leased"];
        assert_eq!(words, [&expected[..], &["train (2 programs)"]].concat());
        assert!(text.ends_with("gpu-b:7601: no answer: Connection refused\n"), "{text}");
        assert!(!smi_text(&survey, None).contains("train"));
        assert_eq!(smi_json(&survey, Some(&described))["servers"][0]["cards"][1]["your_leases"], json!([""]));
    }

    #[test]
    fn own_programs_stand_below_the_cards() {
        let (mut survey, mut described) = site();
        described.leases[0].id = "abc".into();
        let program = CardProgram {
            pid: 42,
            uid: 1000,
            name: "python3".into(),
            lease: "abc".into(),
            used_bytes: 5 << 20,
            ..Default::default()
        };
        let other = CardProgram { pid: 43, user: "ada".into(), lease: "xyz".into(), ..program.clone() };
        survey.servers[0].cards[1].your_programs = vec![program, other];
        let text = smi_text(&survey, Some(&described));
        let rows: Vec<Vec<&str>> = text
            .split_once("\n\n")
            .unwrap()
            .1
            .lines()
            .map(|line| line.split("  ").map(str::trim).filter(|word| !word.is_empty()).collect())
            .collect();
        assert_eq!(rows[1], ["gpu-a", "1", "train", "42", "uid 1000", "python3", "5 MiB"], "{text}");
        assert_eq!(rows[2][2..5], ["xyz", "43", "ada"]);
        let json = smi_json(&survey, Some(&described));
        assert_eq!(json["servers"][0]["cards"][1]["your_programs"][0]["pid"], 42);
    }

    #[test]
    fn a_list_counts_only_usable_memory_as_free() {
        let (mut survey, described) = site();
        let text = pool_text(&survey, &described);
        assert!(text.contains("NVIDIA H200  3     1     1 GiB         mps, time-slice  1\n"), "{text}");
        survey.servers[0].cards.remove(0);
        assert!(pool_text(&survey, &described).contains("2     0     512 MiB"), "{text}");
        assert_eq!(pool_json(&survey, &described)["servers"][0]["gpus"][0]["yours"], true);
        assert_eq!(pool_json(&survey, &described)["waiting"], 4);
    }

    #[test]
    fn statistics_sum_over_cards() {
        let (survey, described) = site();
        let text = stats_text(&survey, Some(&described));
        assert!(text.contains("3 MiB  3 GiB   20%"), "{text}");
        assert!(
            text.ends_with("this machine: 1 lease(s) with 1 GPU(s), 0 waiting, 2 program(s)\n"),
            "{text}"
        );
        assert_eq!(stats_json(&survey, None)["own"], Value::Null);
    }

    #[test]
    fn statistics_show_the_use_of_a_day() {
        let (mut survey, described) = site();
        assert!(!stats_text(&survey, Some(&described)).contains("LAST 24 H"), "an older server");
        let usage = |by: &str, gpu_usec| {
            let sums = usage::UsageSums { gpu_usec, busy_usec: 1_800_000_000, ..Default::default() };
            Usage { by: by.into(), sums }
        };
        survey.servers[0].last_24h = vec![usage("all", 7_200_000_000), usage("machine", 0)];
        let text = stats_text(&survey, Some(&described));
        let words = |by: &str| {
            let row = text.lines().find(|line| line.starts_with("gpu-a") && line.contains(by)).unwrap();
            let words = row.split("  ").map(str::trim).filter(|word| !word.is_empty());
            words.map(str::to_owned).collect::<Vec<_>>()
        };
        let expected = ["gpu-a", "all", "2.0", "25%", "0 B", "0 B", "0", "0", "-", "-"];
        assert_eq!(words("all"), expected, "{text}");
        assert_eq!(words("this machine")[2..4], ["0.0", "-"]);
        let json = stats_json(&survey, None);
        assert_eq!(json["servers"][0]["last_24h"][1]["by"], "machine");
        assert!(smi_json(&survey, None)["servers"][0].get("last_24h").is_none());
    }
}
