//! `gpusession netperf`: the network between this machine and a server, as programs use it.

mod series;
mod verdict;

use std::io::Write as _;
use std::path::PathBuf;
use std::time::Duration;

use gpusession_bus::describe;
use gpusession_proto::frame::UP_LANES;
use gpusession_proto::grant::Endpoint;
use gpusession_proto::measure::MAX_SECONDS;
use gpusession_proto::preface::Key;
use gpusession_proto::ticket::Ticket;
use gpusessiond::client::Remote;
use gpusessiond::identity::{Home, Identity};
use gpusessiond::paths;
use gpusessiond::pool::PoolServer as _;
use gpusessiond::units::control_address;
use serde_json::{Value, json};

use self::series::{Direction, Load, Memory, Rate, Series, measure};
use self::verdict::{limit, percentile};
use crate::daemon::{self, Daemon};
use crate::exit::{Failure, Result, code};
use crate::show::table;

/// Percentiles of round trips: key of the JSON, thousandths.
const PERCENTILES: [(&str, usize); 4] = [("p50", 500), ("p90", 900), ("p99", 990), ("p99_9", 999)];

/// Time of the row of programs, as a multiple of another row's.
const PARTS_OF_PROGRAMS: u32 = 4;

#[derive(clap::Args)]
pub struct Netperf {
    /// Server to measure [default: the first one that is online]
    #[arg(value_name = "SERVER")]
    server: Option<String>,
    /// Time of all measurements together, in seconds
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_SECONDS)))]
    seconds: u32,
    /// Numbers of lanes, which are parallel connections in one direction; programs use 8
    #[arg(long, value_name = "N,...", default_value = "1,4,8", value_delimiter = ',', value_parser = clap::value_parser!(u16).range(1..=i64::from(UP_LANES)))]
    lanes: Vec<u16>,
    /// Administrator's file, for a server that lets only administrators measure
    #[arg(long, value_name = "FILE", requires = "server")]
    identity: Option<PathBuf>,
}

/// Asks a server for an endpoint, with this identity.
async fn direct(identity: &Identity, server: &str, seconds: u32) -> Result<describe::Endpoint> {
    let address = control_address(server).map_err(Failure::usage)?;
    let remote = Remote::new(&address, identity).map_err(|e| Failure::of_pool(&e))?;
    let reply = remote.measure(seconds).await;
    reply.and_then(gpusessiond::survey::endpoint).map_err(|e| Failure::of_pool(&e))
}

/// Asks through the daemon; without one, with this user's own identity.
async fn ask(options: &Netperf) -> Result<describe::Endpoint> {
    let (server, seconds) = (options.server.as_deref().unwrap_or_default(), options.seconds);
    if let Some(file) = &options.identity {
        let identity = Identity::of_administrator(file).map_err(|e| Failure::of_identity(&e))?;
        return direct(&identity, server, seconds).await;
    }
    let daemon = async { Daemon::connect().await?.measure(server, seconds).await };
    let silent = match daemon.await {
        Ok(endpoint) => return Ok(endpoint),
        Err(failure) => failure,
    };
    if silent.code != code::UNREACHABLE || daemon::runs().await {
        return Err(silent);
    }
    let home = Home::of_caller();
    match (home.load(), home.addresses()) {
        (Ok(identity), Ok(addresses)) => {
            let first = addresses.first().map(String::as_str);
            let server = Some(server).filter(|s| !s.is_empty()).or(first).ok_or(silent)?;
            direct(&identity, server, seconds).await
        }
        _ => Err(silent),
    }
}

/// Adds the remedies of this verb to a server's refusal.
fn refused(failure: Failure) -> Failure {
    let hint = match failure.code {
        code::NO_CAPACITY => {
            "run the command again then; a server serves two measurements at a time, and each client once a minute"
        }
        code::NOT_ALLOWED if failure.message.starts_with("netperf") => {
            "the server's administrator changes `netperf`, or measures with --identity FILE"
        }
        code::NOT_ALLOWED if failure.message.contains("polkit") => {
            "this machine's administrator decides (polkit action org.gpusession1.measure)"
        }
        _ => return failure,
    };
    failure.hint(hint)
}

/// Makes an endpoint of programs' connections from a server's answer.
fn connectable(given: &describe::Endpoint, encrypted: bool) -> Endpoint {
    let uid = nix::unistd::getuid().as_raw();
    let ticket = Ticket {
        lease: String::new(),
        worker: given.id,
        uid,
        user: String::new(),
        pid: std::process::id(),
        boot_id: paths::boot_id(),
        issued_usec: 0,
        nonce: std::array::from_fn(|_| fastrand::u8(..)),
        program: "gpusession".into(),
        executable: String::new(),
    };
    Endpoint {
        server: given.server.clone(),
        addresses: given.addresses.clone(),
        worker: given.id,
        fingerprint: encrypted.then_some(given.fingerprint),
        key: Key::new(&given.key, &given.id, uid),
        ticket: ticket.seal(&given.key),
        lease: String::new(),
        devices: 0,
    }
}

/// Line of progress on a terminal, which the next one replaces.
struct Progress(bool);

impl Progress {
    fn show(&self, text: &str) {
        if self.0 {
            let _ = write!(std::io::stderr(), "\r\x1b[K{}", crate::plain(text));
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.show("");
    }
}

/// Returns the numbers of lanes to measure, encrypted and, if the server allows it, not.
///
/// Each one has its part of the time. A program's has the most, because a rate over a short time
/// says less.
fn rows(clear: bool, lanes: &[u16], time: Duration) -> Vec<(bool, u16, Duration)> {
    let ways: &[bool] = if clear { &[true, false] } else { &[true] };
    let mut lanes = lanes.to_vec();
    lanes.sort_unstable();
    lanes.dedup();
    let parts = |encrypted, number| match encrypted != clear && lanes.last() == Some(&number) {
        true => PARTS_OF_PROGRAMS,
        false => 1,
    };
    let rows = ways.iter().flat_map(|way| lanes.iter().map(|number| (*way, *number)));
    let sum: u32 = rows.clone().map(|(way, number)| parts(way, number)).sum();
    rows.map(|(way, number)| (way, number, time * parts(way, number) / sum)).collect()
}

/// Measures each row.
fn measure_all(given: &describe::Endpoint, options: &Netperf) -> Result<Vec<Series>> {
    let rows = rows(given.clear, &options.lanes, Duration::from_secs(options.seconds.into()));
    let progress = Progress(nix::unistd::isatty(std::io::stderr()) == Ok(true));
    let (memory, mut found) = (Memory::new(), Vec::new());
    for (number, (encrypted, lanes, time)) in rows.iter().enumerate() {
        let way = if *encrypted { "encrypted" } else { "clear" };
        let show = |phase: &str| {
            progress.show(&format!("{} of {}: {lanes} lanes, {way}, {phase}", number + 1, rows.len()));
        };
        let series = measure(&connectable(given, *encrypted), *lanes, *time, memory, show);
        found.push(series.map_err(|lost| {
            Failure::new(code::UNREACHABLE, lost.0)
                .hint("`gpusession health` checks the server's data port and the way to it")
        })?);
    }
    Ok(found)
}

/// Returns the series that is a program's: its encryption, and the most lanes that were measured.
fn programs<'a>(given: &describe::Endpoint, found: &'a [Series]) -> Option<&'a Series> {
    found.iter().filter(|series| series.encrypted != given.clear).max_by_key(|series| series.lanes)
}

fn usec(time: Duration) -> f64 {
    time.as_nanos() as f64 / 1000.0
}

fn percent(part: f64) -> u64 {
    // A server may send any counters.
    (part * 100.0).round().clamp(0.0, 1e6) as u64
}

fn rate(bytes_per_s: f64) -> String {
    match bytes_per_s {
        rate if rate >= 1e9 => format!("{:.2} GB/s", rate / 1e9),
        rate => format!("{:.1} MB/s", rate / 1e6),
    }
}

fn text(given: &describe::Endpoint, found: &[Series]) -> String {
    let names = [
        "SERVER",
        "TLS",
        "LANES",
        "RTT P50",
        "P90",
        "P99",
        "P99.9",
        "TO SERVER",
        "FROM SERVER",
        "CPU HERE",
        "CPU THERE",
    ];
    let mut rows = vec![names.map(String::from).to_vec()];
    for series in found {
        let times = PERCENTILES.map(|(_, part)| percentile(&series.round_trips, part));
        let both = |end: fn(&Rate) -> &Load| {
            let own = |rate: &Rate| percent(end(rate).own);
            format!("{}% / {}%", own(&series.to_server), own(&series.from_server))
        };
        let mut row = vec![
            given.server.clone(),
            if series.encrypted { "yes" } else { "no" }.into(),
            series.lanes.to_string(),
        ];
        row.extend(times.map(|time| time.map_or_else(|| "-".into(), |t| format!("{:.0} us", usec(t)))));
        row.extend([&series.to_server, &series.from_server].map(|r| rate(r.bytes_per_s)));
        row.extend([both(|rate| &rate.here), both(|rate| &rate.there)]);
        rows.push(row);
    }
    let mut out = table(&rows);
    if let Some(series) = programs(given, found) {
        let way = if series.encrypted { "encrypted" } else { "not encrypted" };
        out += &format!(
            "\nPrograms of this machine ({way}, {} lanes): {} to the server, {} from it.\n",
            series.lanes,
            rate(series.to_server.bytes_per_s),
            rate(series.from_server.bytes_per_s)
        );
        for (direction, rate) in directions(series) {
            out += &limit(rate, series.lanes).sentence(direction);
            out.push('\n');
        }
    }
    out
}

fn directions(series: &Series) -> [(Direction, &Rate); 2] {
    [(Direction::ToServer, &series.to_server), (Direction::FromServer, &series.from_server)]
}

fn rate_json(rate: &Rate, lanes: u16) -> Value {
    let end = |load: &Load| {
        json!({
            "cpu_percent": percent(load.own), "processors": load.processors, "host_busy_percent": load.busy.map(percent),
        })
    };
    json!({
        "bytes_per_s": rate.bytes_per_s.round() as u64, "client": end(&rate.here), "server": end(&rate.there),
        "limit": limit(rate, lanes).as_str(),
    })
}

fn json_of(given: &describe::Endpoint, found: &[Series]) -> Value {
    let series = |series: &Series| {
        let mut rtt = json!({ "samples": series.round_trips.len() });
        for (name, part) in PERCENTILES {
            rtt[name] = json!(percentile(&series.round_trips, part).map(usec));
        }
        json!({
            "transport": "tcp", "encrypted": series.encrypted, "lanes": series.lanes, "rtt_usec": rtt,
            "to_server": rate_json(&series.to_server, series.lanes),
            "from_server": rate_json(&series.from_server, series.lanes),
        })
    };
    let programs = programs(given, found);
    json!({
        "schema": 1, "server": given.server, "runs": found.iter().map(series).collect::<Vec<_>>(),
        "programs": { "encrypted": !given.clear, "lanes": programs.map(|series| series.lanes) },
    })
}

/// `gpusession netperf`.
pub async fn netperf(options: Netperf, json: bool) -> Result<i32> {
    let given = ask(&options).await.map_err(refused)?;
    let work = move || measure_all(&given, &options).map(|found| (given, found));
    let measured = tokio::task::spawn_blocking(work).await;
    let (given, found) = measured.map_err(|e| Failure::new(code::FAILED, e.to_string()))??;
    crate::print(&match json {
        true => json_of(&given, &found).to_string(),
        false => text(&given, &found),
    });
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given(clear: bool) -> describe::Endpoint {
        describe::Endpoint { server: "gpu-a".into(), clear, ..Default::default() }
    }

    fn series(encrypted: bool, lanes: u16) -> Series {
        let load = Load { own: 0.5, processors: 2, busy: Some(0.4) };
        let rate = Rate { bytes_per_s: 1.25e9 * f64::from(lanes), here: load, there: load };
        let round_trips = (1..=100).map(|n| Duration::from_nanos(n * 1500)).collect();
        Series {
            encrypted,
            lanes,
            round_trips,
            to_server: rate,
            from_server: Rate { bytes_per_s: 2e6, ..rate },
        }
    }

    #[test]
    fn the_table_ends_with_what_a_program_gets_and_why() {
        let found = [series(true, 1), series(true, 8), series(false, 1), series(false, 8)];
        let shown = text(&given(true), &found);
        let row = shown.lines().nth(4).unwrap();
        let words: Vec<_> = row.split("  ").map(str::trim).filter(|word| !word.is_empty()).collect();
        let expected = ["gpu-a", "no", "8", "75 us", "135 us", "148 us", "-", "10.00 GB/s", "2.0 MB/s"];
        assert_eq!(words, [&expected[..], &["50% / 50%"; 2]].concat());
        assert!(
            shown.contains("(not encrypted, 8 lanes): 10.00 GB/s to the server, 2.0 MB/s from it."),
            "{shown}"
        );
        assert!(shown.contains("To the server, the link limits the rate"), "{shown}");
        assert!(text(&given(false), &found).contains("(encrypted, 8 lanes)"));
        let value = json_of(&given(true), &found);
        assert_eq!(value["programs"], json!({ "encrypted": false, "lanes": 8 }));
        assert_eq!(value["runs"][3]["rtt_usec"]["p99_9"], Value::Null);
        assert_eq!(value["runs"][3]["to_server"]["bytes_per_s"], 10_000_000_000_u64);
    }

    #[test]
    fn a_programs_row_has_the_most_of_the_time() {
        let second = Duration::from_secs(1);
        assert_eq!(rows(false, &[8, 1, 8], 5 * second), [(true, 1, second), (true, 8, 4 * second)]);
        let both = [(true, 8, second), (false, 8, 4 * second)];
        assert_eq!(rows(true, &[8], 5 * second), both);
    }

    #[test]
    fn refusals_have_remedies_of_this_verb() {
        let hint = |code, message: &str| refused(Failure::new(code, message)).hint.unwrap_or_default();
        assert!(hint(code::NO_CAPACITY, "in 43 s").contains("again then"));
        assert!(hint(code::NOT_ALLOWED, "netperf = \"off\" in").contains("administrator"));
        assert!(hint(code::NOT_ALLOWED, "polkit does not let").contains("org.gpusession1.measure"));
        assert_eq!(hint(code::UNREACHABLE, "no answer"), "");
    }

    #[test]
    fn numbers_are_bounded_whatever_a_server_sends() {
        assert_eq!([f64::NAN, f64::INFINITY, -1.0].map(percent), [0, 1_000_000, 0]);
        assert_eq!(rate(f64::INFINITY), "inf GB/s");
        for arguments in
            [&["--seconds", "11"][..], &["--seconds", "0"], &["--lanes", "9"], &["--lanes", "0,1"]]
        {
            let words = [&["gpusession", "netperf"], arguments].concat();
            assert!(crate::arguments().try_get_matches_from(words).is_err(), "{arguments:?}");
        }
    }

    #[test]
    fn an_unencrypted_connection_pins_no_certificate() {
        let given = describe::Endpoint { id: [7; 16], key: [8; 32], fingerprint: [9; 32], ..given(true) };
        assert_eq!(connectable(&given, false).fingerprint, None);
        let encrypted = connectable(&given, true);
        assert_eq!(encrypted.fingerprint, Some([9; 32]));
        assert!(Ticket::open(&encrypted.ticket, &[8; 32], &[7; 16]).is_ok());
    }
}
