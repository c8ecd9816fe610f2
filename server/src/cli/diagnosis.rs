//! `gpuserver health` and `gpuserver report`: checks of this host and its server, and an archive
//! for the search for a fault.

use std::net::{TcpStream, ToSocketAddrs as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use gpusession_common::units::human_bytes;
use gpusession_diagnosis::check::{Check, Finding, Findings, Place};
use gpusession_diagnosis::machine::Machine;
use gpusession_diagnosis::pseudonyms::Kind;
use gpusession_diagnosis::report::{self, Report};
use gpusession_diagnosis::{gpu_host, host, remedy};
use serde_json::{Value, json};

use super::target::{Target, running};
use crate::accounting;
use crate::admin::Ask;
use crate::admin::answer::config::config_rows;
use crate::admin::answer::gpus::GpuRow;
use crate::admin::answer::status::StatusView;
use crate::admin::answer::workers::PsRow;
use crate::audit;
use crate::cache::Cache;
use crate::clock::{Clock as _, SystemClock};
use crate::config::{Advertised, Config};
use crate::discovery::find_driver;
use crate::net::host_port;
use crate::refusal::Refusal;
use crate::signer::link::{folder_of, places, unit_of};
use crate::signer::member;
use crate::starter::unit_of as starter_unit_of;
use crate::text::Output;

/// Exit code if the server does not answer.
const UNREACHABLE: u8 = 69;
/// Exit code if this user may not ask the server.
const NOT_ALLOWED: u8 = 77;
/// Time for a connection to an advertised address.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Most addresses of an advertised name that are tried.
const MAX_ADDRESSES: usize = 4;
const UNIT: &str = "gpuserver.service";
const SERVICE: &str = "gpuserver";
/// Files that a server with many clients opens: connections, workers and their lanes.
const OPEN_FILES: u64 = 16_384;
/// Milliseconds of one write to the state folder from which requests for leases wait visibly.
const SLOW_WRITE_MS: u128 = 100;
/// Length of the shortest word of a token file that is a secret.
const MIN_TOKEN: usize = 20;
/// Remaining life of the authority's certificate below which a check warns, in seconds: a rotation
/// takes months.
const EXPIRES_SOON: i64 = 2 * 365 * 24 * 3600;
/// Remaining life below which that is a fault.
const EXPIRES_NEXT: i64 = 365 * 24 * 3600;

/// Options of `gpuserver health`.
#[derive(Debug, Args)]
pub struct HealthOptions {
    /// Also list checks that do not apply or could not read their facts; shorten no list
    #[arg(long)]
    all: bool,
    /// Exit with 1 also if there are only warnings
    #[arg(long)]
    strict: bool,
}

/// Options of `gpuserver report`.
#[derive(Debug, Args)]
pub struct ReportOptions {
    /// File to write [default: gpuserver-report-DATE.tar.gz, with --names
    /// gpuserver-report-HOST-DATE.tar.gz]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// List the archive's files and write nothing
    #[arg(long)]
    list: bool,
    /// Keep the names of users, clients and hosts, and addresses; without this, the report has
    /// pseudonyms, whose table is written beside it, to FILE.names
    #[arg(long)]
    names: bool,
}

/// Why the server gives no answer.
#[derive(Debug)]
enum Silence {
    /// This user may not ask it.
    Denied(String),
    Away(String),
}

/// Facts that the checks of the server judge.
struct Facts {
    machine: Machine,
    config: Result<Config, String>,
    status: Result<StatusView, Silence>,
    gpus: Vec<GpuRow>,
    workers: Vec<PsRow>,
}

/// The table of the server's checks.
const CHECKS: &[Check<Facts>] = &[
    Check { id: "server.configuration", run: configuration },
    Check { id: "server.answers", run: answers },
    Check { id: "server.unit", run: unit },
    Check { id: "server.drop-ins", run: drop_ins },
    Check { id: "server.signer", run: signer },
    Check { id: "server.starter", run: starter },
    Check { id: "server.driver", run: driver },
    Check { id: "server.cards", run: cards },
    Check { id: "server.isolation", run: isolation },
    Check { id: "server.authority", run: authority },
    Check { id: "server.certificate", run: certificate },
    Check { id: "server.advertise", run: advertise },
    Check { id: "server.state-folder", run: state_folder },
    Check { id: "server.disk", run: disk },
    Check { id: "server.disk-time", run: disk_time },
    Check { id: "server.cache", run: cache },
    Check { id: "server.parking", run: parking },
    Check { id: "server.ports", run: ports },
    Check { id: "server.open-files", run: open_files },
    Check { id: "server.stack", run: stack },
    Check { id: "server.descriptor-store", run: descriptor_store },
];

fn configuration(facts: &Facts) -> Finding {
    match &facts.config {
        Ok(config) if config.warnings.is_empty() => {
            Finding::ok(format!("{} without errors", config.file.display()))
        }
        Ok(config) => Finding::warning(config.warnings.join("; "), "gpuserver check-config --explain"),
        Err(error) if error.contains("Permission denied") => Finding::skipped(error.clone()),
        Err(error) => Finding::fault(error.clone(), remedy::edit(error, "gpuserver check-config")),
    }
}

fn answers(facts: &Facts) -> Finding {
    match &facts.status {
        Ok(status) if status.version != env!("CARGO_PKG_VERSION") => Finding::warning(
            format!("the server is {}, this command {}", status.version, env!("CARGO_PKG_VERSION")),
            "sudo systemctl restart gpuserver; programs continue",
        ),
        Ok(status) if status.state.starts_with("draining") => Finding::warning(
            format!("{} gives no new leases: {}", status.name, status.state),
            "gpuserver drain --end",
        ),
        Ok(status) => Finding::ok(format!(
            "{} {} is {}, control {}, data {}",
            status.name, status.version, status.state, status.control_address, status.data_address
        )),
        Err(Silence::Denied(why)) => {
            Finding::skipped(format!("{why}; root and the group gpuserver may ask the server"))
        }
        Err(Silence::Away(why)) => {
            Finding::fault(why.clone(), "systemctl status gpuserver; sudo systemctl start gpuserver")
        }
    }
}

fn unit(facts: &Facts) -> Finding {
    let state = |property: &str| facts.machine.unit(UNIT, property);
    match (state("LoadState").as_deref(), state("UnitFileState").as_deref()) {
        (None, _) => Finding::skipped("systemd does not answer"),
        (Some("masked"), _) => Finding::fault(
            "gpuserver.service is masked",
            "sudo systemctl unmask gpuserver && sudo systemctl start gpuserver",
        ),
        (Some("loaded"), Some("enabled" | "enabled-runtime" | "static")) => {
            Finding::ok("gpuserver.service starts with the host")
        }
        (Some("loaded"), _) => Finding::warning(
            "gpuserver.service is not enabled: no server after a restart of the host",
            "sudo systemctl enable gpuserver",
        ),
        _ => Finding::skipped("gpuserver.service is not installed"),
    }
}

fn drop_ins(facts: &Facts) -> Finding {
    let folder = format!("/etc/systemd/system/{UNIT}.d");
    let names = facts.machine.list(&folder).into_iter().filter(|name| name.ends_with(".conf"));
    match names.collect::<Vec<_>>() {
        names if names.is_empty() => Finding::ok("no file of this host changes gpuserver.service"),
        names => Finding::warning(
            format!("{folder}/{{{}}} change gpuserver.service", names.join(",")),
            "systemctl cat gpuserver; sudo systemctl revert gpuserver && sudo systemctl restart gpuserver",
        ),
    }
}

/// Judges the socket by which systemd starts the signer.
fn signer(facts: &Facts) -> Finding {
    let Ok(config) = &facts.config else { return Finding::skipped("the configuration has errors") };
    let Some(socket) = &config.signer else {
        return Finding::skipped("the server signs in its own process: `signer` is not set");
    };
    let lacks = ["the server signs no certificate", "no machine joins, and no certificate is renewed"];
    of_socket(facts, &unit_of(socket), "the signer", lacks)
}

/// Judges the socket by which systemd starts the starter.
fn starter(facts: &Facts) -> Finding {
    let Ok(config) = &facts.config else { return Finding::skipped("the configuration has errors") };
    let Some(socket) = &config.starter else {
        return Finding::skipped("the server starts its monitor itself: `starter` is not set");
    };
    let lacks = ["the server has no readings of its GPUs"; 2];
    of_socket(facts, &starter_unit_of(socket), "the starter", lacks)
}

/// Judges the socket of a unit by which systemd starts `what`.
///
/// `lacks` says what is missing when the service has failed, and when nothing listens.
fn of_socket(facts: &Facts, unit: &str, what: &str, lacks: [&str; 2]) -> Finding {
    let state = |of: &str, property: &str| facts.machine.unit(&format!("{unit}.{of}"), property);
    if state("socket", "LoadState").as_deref() != Some("loaded") {
        return Finding::skipped(format!("{unit}.socket is not installed, or systemd does not answer"));
    }
    match (state("socket", "ActiveState").as_deref(), state("service", "ActiveState").as_deref()) {
        (Some("active"), Some("failed")) => Finding::fault(
            format!("{unit}.service has failed: {}", lacks[0]),
            format!("journalctl -u {unit} says why; sudo systemctl restart {unit}"),
        ),
        (Some("active"), _) => Finding::ok(format!("{unit}.socket starts {what}")),
        (listens, _) => Finding::fault(
            format!("{unit}.socket is {}: {}", listens.unwrap_or("unknown"), lacks[1]),
            format!("sudo systemctl start {unit}.socket"),
        ),
    }
}

fn driver(facts: &Facts) -> Finding {
    let Ok(config) = &facts.config else { return Finding::skipped("the configuration has errors") };
    match find_driver(config.driver.as_deref()) {
        Ok(path) => Finding::ok(path.display().to_string()),
        Err(error) => Finding::fault(error.to_string(), "install NVIDIA's driver; nvidia-smi"),
    }
}

fn cards(facts: &Facts) -> Finding {
    let judge = |gpu: &GpuRow| match (gpu.state.as_str(), &gpu.reason) {
        ("free" | "leased", _) => Finding::ok(format!("card {} is {}", gpu.index, gpu.state)),
        ("broken", reason) => Finding::fault(
            format!("card {} is broken: {}", gpu.index, reason.as_deref().unwrap_or("no reason")),
            format!("repair it, then gpuserver on {}", gpu.index),
        ),
        (state, reason) => Finding::warning(
            format!("card {} is {state}: {}", gpu.index, reason.as_deref().unwrap_or("no reason")),
            format!("gpuserver on {}", gpu.index),
        ),
    };
    Finding::worst(facts.gpus.iter().map(judge)).unwrap_or_else(|| match &facts.status {
        Ok(_) => Finding::fault("the server serves no card", "gpuserver config get gpus; nvidia-smi -L"),
        Err(_) => Finding::skipped("the server does not answer"),
    })
}

fn isolation(facts: &Facts) -> Finding {
    let judge = |isolation: &str| match isolation {
        "full" => Finding::ok("workers are isolated"),
        "basic" => Finding::ok("workers are isolated, with an older kernel's means"),
        off if off.starts_with("off") => {
            Finding::warning("workers are not isolated", "gpuserver check-isolation; see isolation.md")
        }
        lacks if lacks.contains("GPUSERVER_UNLISTED_CALLS") => {
            Finding::warning(format!("workers lack {lacks}"), gpu_host::REFUSE_UNLISTED_CALLS)
        }
        // The server's own isolation, or that of an earlier server, has more.
        "partial" => Finding::warning("workers lack a restriction", "gpuserver status; gpuserver ps"),
        lacks => {
            Finding::warning(format!("workers lack {lacks}"), "gpuserver check-isolation; see isolation.md")
        }
    };
    // The server's own comes first: it is known before a worker runs.
    let server = facts.status.iter().map(|status| status.isolation.as_str());
    let workers = facts.workers.iter().map(|worker| worker.isolation.as_str());
    let known = server.chain(workers).filter(|isolation| !matches!(*isolation, "" | "later"));
    let mut findings: Vec<_> = known.map(|it| judge(it.strip_prefix("partial: ").unwrap_or(it))).collect();
    findings.dedup();
    Finding::worst(findings).unwrap_or_else(|| Finding::skipped("no worker runs"))
}

fn certificate(facts: &Facts) -> Finding {
    let Ok(status) = &facts.status else { return Finding::skipped("the server does not answer") };
    if !status.warnings.is_empty() {
        return Finding::warning(status.warnings.join("; "), "gpuserver clients; journalctl -u gpuserver");
    }
    match status.certificate_expires_unix.checked_sub(facts.machine.now) {
        _ if status.certificate_expires_unix == 0 => {
            Finding::skipped("the server reports no expiry of its certificate")
        }
        None => Finding::fault("the server's certificate has expired", "sudo systemctl restart gpuserver"),
        Some(left) => {
            Finding::ok(format!("the server's certificate is valid for another {} days", left / 86400))
        }
    }
}

/// Judges whether the addresses that clients write down lead to this server.
fn advertise(facts: &Facts) -> Finding {
    let (Ok(config), Ok(status)) = (&facts.config, &facts.status) else {
        return Finding::skipped("the server does not answer");
    };
    let own_port = status.control_address.rsplit_once(':').and_then(|(_, port)| port.parse().ok());
    let judge = |advertised: &Advertised| {
        let port = advertised.port.or(own_port).unwrap_or_default();
        let name = host_port(&advertised.host, port);
        let remedy = "correct advertise in gpuserver.toml, or the DNS entry";
        let addresses: Vec<_> = match (advertised.host.as_str(), port).to_socket_addrs() {
            Ok(addresses) => addresses.take(MAX_ADDRESSES).collect(),
            Err(error) => return Finding::warning(format!("{name} is no address here: {error}"), remedy),
        };
        let reached = addresses.iter().any(|a| TcpStream::connect_timeout(a, CONNECT_TIMEOUT).is_ok());
        match reached {
            true => Finding::ok(format!("{name} answers")),
            false => Finding::warning(format!("{name}: no server answers from this host"), remedy),
        }
    };
    Finding::worst(config.advertise.iter().map(judge)).unwrap_or_else(|| {
        Finding::skipped("advertise is not set: clients keep the address that they were given")
    })
}

fn authority(facts: &Facts) -> Finding {
    let Ok(config) = &facts.config else { return Finding::skipped("the configuration has errors") };
    let path = places(config.signer.as_deref(), &config.state_dir).folder.join("authority.pem");
    let member = facts.machine.read(member::file(&config.state_dir)).ok();
    let member = member.and_then(|text| member::authority_of(&text));
    let text = match member.map_or_else(|| facts.machine.read(&path), Ok) {
        Ok(text) => text,
        Err(unread) if unread.missing() => {
            return Finding::fault(
                format!("{unread}: this server is in no pool"),
                "gpuserver pool init, or gpuserver pool join on a further server",
            );
        }
        Err(unread) => return Finding::skipped(unread.to_string()),
    };
    let ends = x509_parser::pem::parse_x509_pem(text.as_bytes())
        .ok()
        .and_then(|(_, pem)| Some(pem.parse_x509().ok()?.validity().not_after.timestamp()));
    match ends.map(|ends| ends - facts.machine.now as i64) {
        None => Finding::fault(format!("{} is no certificate", path.display()), "gpuserver pool import FILE"),
        Some(left) if left < 0 => Finding::fault(
            "the pool's authority has expired",
            "gpuserver pool init in a new state_dir; clients join again",
        ),
        Some(left) if left < EXPIRES_SOON => {
            let found = format!("the pool's authority ends in {} days", left / 86400);
            let remedy = "gpuserver pool rotate begin; docs/admin-guide.md has the steps";
            if left < EXPIRES_NEXT { Finding::fault(found, remedy) } else { Finding::warning(found, remedy) }
        }
        Some(left) => Finding::ok(format!("the pool's authority is valid for another {} days", left / 86400)),
    }
}

fn state_folder(facts: &Facts) -> Finding {
    let Ok(config) = &facts.config else { return Finding::skipped("the configuration has errors") };
    let shown = config.state_dir.display();
    match facts.machine.owner(&config.state_dir) {
        Ok((_, mode)) if mode & 0o077 != 0 => {
            Finding::fault(format!("{shown} has mode {mode:04o}"), format!("sudo chmod 700 {shown}"))
        }
        Ok((_, mode)) => Finding::ok(format!("{shown} {mode:04o}")),
        Err(unread) => Finding::skipped(unread.to_string()),
    }
}

fn disk(facts: &Facts) -> Finding {
    let Ok(config) = &facts.config else { return Finding::skipped("the configuration has errors") };
    match facts.machine.space(&config.state_dir) {
        Some((free, total)) => host::space(&config.state_dir.display().to_string(), free, total),
        None => Finding::skipped(format!("{} does not exist yet", config.state_dir.display())),
    }
}

fn disk_time(facts: &Facts) -> Finding {
    let Ok(config) = &facts.config else { return Finding::skipped("the configuration has errors") };
    let shown = config.state_dir.display();
    match facts.machine.write_time(&config.state_dir) {
        Ok(time) if time.as_millis() > SLOW_WRITE_MS => Finding::warning(
            format!("{shown}: a write takes {} ms; each lease waits for it", time.as_millis()),
            "put state_dir on a faster disk, or look at what uses this one: iostat -x 1",
        ),
        Ok(time) => Finding::ok(format!("{shown}: a write takes {:.1} ms", time.as_secs_f64() * 1e3)),
        Err(unread) => Finding::skipped(unread.to_string()),
    }
}

fn cache(facts: &Facts) -> Finding {
    let Ok(config) = &facts.config else { return Finding::skipped("the configuration has errors") };
    let folder = Cache::folder(config);
    let shown = folder.display();
    if config.cache_max == 0 {
        return Finding::warning(
            "cache_max = 0: each start of a program transfers and compiles its code again",
            remedy::edit(&config.origin("cache_max").to_string(), "sudo systemctl restart gpuserver"),
        );
    }
    if !facts.machine.exists(&folder) {
        return Finding::skipped(format!("{shown} does not exist yet, or this user cannot see it"));
    }
    let (used, max) = (facts.machine.size(&folder), config.cache_max);
    let said = format!("{shown}: {} of {}", human_bytes(used), human_bytes(max));
    let left = max.saturating_sub(used);
    match facts.machine.space(&folder) {
        // The server trims the cache once a minute: for a moment it may be larger.
        _ if used > max.saturating_mul(2) => Finding::warning(
            format!("{said}: the server does not trim it"),
            "journalctl -u gpuserver; the server has to own the folder",
        ),
        Some((free, _)) if free < left => Finding::warning(
            format!("{said}, and {} free on the disk", human_bytes(free)),
            "lower cache_max in gpuserver.toml, or free space there",
        ),
        _ => Finding::ok(said),
    }
}

/// Judges whether parked programs find the host memory that `parked_max` allows them.
fn parking(facts: &Facts) -> Finding {
    let Ok(config) = &facts.config else { return Finding::skipped("the configuration has errors") };
    let Some((total, available)) = host::memory_bytes(&facts.machine) else {
        return Finding::skipped("/proc/meminfo has no rows MemTotal and MemAvailable");
    };
    let most = config.parked_max.of(total);
    let cards: u64 = facts.gpus.iter().map(|gpu| gpu.memory_bytes).sum();
    let said = format!("parked programs may take {} of host memory", human_bytes(most));
    match most {
        _ if config.park_after.is_zero() || most == 0 => Finding::skipped("the server parks no programs"),
        most if most > available => Finding::warning(
            format!("{said}, and {} are available", human_bytes(available)),
            "lower parked_max in gpuserver.toml, or end other programs of this host",
        ),
        most if most < cards / 4 => Finding::warning(
            format!("{said}, less than a quarter of the cards' {}", human_bytes(cards)),
            "raise parked_max, or add memory: idle programs stay on the cards otherwise",
        ),
        _ => Finding::ok(said),
    }
}

/// Judges whether another program's outgoing connection can take a port of the server.
fn ports(facts: &Facts) -> Finding {
    let Ok(config) = &facts.config else { return Finding::skipped("the configuration has errors") };
    let path = "/proc/sys/net/ipv4/ip_local_port_range";
    let text = match facts.machine.read(path) {
        Ok(text) => text,
        Err(unread) => return Finding::skipped(unread.to_string()),
    };
    let mut ends = text.split_whitespace().map_while(|word| word.parse::<u16>().ok());
    let (Some(first), Some(last)) = (ends.next(), ends.next()) else {
        return Finding::skipped(format!("{path} has no two numbers"));
    };
    let reserved = facts.machine.read("/proc/sys/net/ipv4/ip_local_reserved_ports").unwrap_or_default();
    let is_reserved = |port: u16| {
        reserved.trim().split(',').any(|range| {
            let (low, high) = range.split_once('-').unwrap_or((range, range));
            matches!((low.parse(), high.parse()), (Ok(low), Ok(high)) if (low..=high).contains(&port))
        })
    };
    let (control, (low, high)) = (config.listen.port(), config.data_ports);
    let mut ports = (low..=high).chain([control]).filter(|port| *port != 0);
    let mut wanted: Vec<String> = reserved.trim().split(',').map(str::to_owned).collect();
    wanted.extend([(low, high), (control, control)].map(|(low, high)| format!("{low}-{high}")));
    wanted.retain(|range| !range.is_empty() && range != "0-0");
    match ports.find(|port| (first..=last).contains(port) && !is_reserved(*port)) {
        Some(port) => Finding::warning(
            format!(
                "port {port} is in {first} to {last}, of which the kernel gives any program one: reserve it \
                 now and in /etc/sysctl.d, or listen below {first}"
            ),
            // The value replaces the list, so it has what is reserved already.
            format!("sudo sysctl -w net.ipv4.ip_local_reserved_ports={}", wanted.join(",")),
        ),
        None => Finding::ok(format!("ports {control} and {low} to {high} are the server's alone")),
    }
}

/// Judges a number of the unit's properties.
fn property(facts: &Facts, name: &str, judge: impl Fn(u64) -> Finding) -> Finding {
    if facts.machine.unit(UNIT, "LoadState").as_deref() != Some("loaded") {
        return Finding::skipped("gpuserver.service is not installed, or systemd does not answer");
    }
    match facts.machine.unit(UNIT, name).as_deref() {
        Some("infinity") => judge(u64::MAX),
        Some(value) => value.parse().map_or_else(|_| Finding::skipped(format!("{name}={value}")), judge),
        None => Finding::skipped(format!("systemd does not know {name}=")),
    }
}

fn open_files(facts: &Facts) -> Finding {
    property(facts, "LimitNOFILE", |limit| match limit {
        0..OPEN_FILES => Finding::warning(
            format!("{limit} open files at most; many clients need more"),
            remedy::set_in_unit(SERVICE, "LimitNOFILE=65536"),
        ),
        _ => Finding::ok("open files suffice for many clients"),
    })
}

fn stack(facts: &Facts) -> Finding {
    property(facts, "LimitSTACK", |limit| match limit {
        u64::MAX => Finding::ok("LimitSTACK=infinity, for the workers' layout of addresses"),
        limit => Finding::fault(
            format!("LimitSTACK={limit}: workers may not get the addresses that programs reserve"),
            remedy::set_in_unit(SERVICE, "LimitSTACK=infinity"),
        ),
    })
}

fn descriptor_store(facts: &Facts) -> Finding {
    property(facts, "FileDescriptorStoreMax", |max| match max {
        0 => Finding::fault(
            "FileDescriptorStoreMax=0: every restart of the server ends all programs, the next one included",
            remedy::set_in_unit(SERVICE, "FileDescriptorStoreMax=12290"),
        ),
        max => Finding::ok(format!("systemd keeps up to {max} descriptors of workers over a restart")),
    })
}

fn gather(server: &Target) -> anyhow::Result<Facts> {
    let answer = |ask: Ask| match running(server, &ask) {
        Ok(Some(value)) => Ok(value),
        Ok(None) => Err(Silence::Away(format!("no gpuserver answers at {}", server.socket.display()))),
        Err(error) if error.downcast_ref::<Refusal>().is_some_and(|r| r.code == "not-allowed") => {
            Err(Silence::Denied(format!("{error:#}")))
        }
        Err(error) => Err(Silence::Away(format!("{error:#}"))),
    };
    let status = match answer(Ask::Status) {
        Ok(value) => Ok(serde_json::from_value(value)?),
        Err(why) => Err(why),
    };
    let list = |ask: Ask| if status.is_ok() { answer(ask).unwrap_or_default() } else { Value::Null };
    Ok(Facts {
        machine: Machine::here(),
        config: server.config.clone().map_err(|error| error.to_string()),
        gpus: serde_json::from_value(list(Ask::Gpus)).unwrap_or_default(),
        workers: serde_json::from_value(list(Ask::Ps)).unwrap_or_default(),
        status,
    })
}

fn examine(facts: &Facts) -> Findings {
    let mut findings = Findings::default();
    findings.run(Place::Server, CHECKS, facts);
    findings.run(Place::GpuHost, gpu_host::CHECKS, &facts.machine);
    findings.run(Place::Host, host::CHECKS, &facts.machine);
    findings
}

/// `gpuserver health`; returns the exit code.
pub(super) fn health(out: &mut Output<'_>, server: &Target, options: &HealthOptions) -> anyhow::Result<u8> {
    let facts = gather(server)?;
    let findings = examine(&facts);
    match out.json {
        true => writeln!(out.out, "{:#}", findings.json())?,
        false => write!(out.out, "{}", findings.text(options.all))?,
    }
    let code = findings.code(options.strict);
    Ok(match facts.status {
        Err(Silence::Away(_)) => UNREACHABLE,
        Err(Silence::Denied(_)) => NOT_ALLOWED,
        Ok(_) => u8::try_from(code).unwrap_or(1),
    })
}

/// Adds keys and tokens of the state folder to the known secrets, as far as this user reads them.
fn add_secrets(report: &mut Report, machine: &Machine, state: &Path) {
    for key in ["authority.key", "next.key", "ca/authority.key", "ca/next.key"] {
        report.secrets.add(&machine.read(state.join(key)).unwrap_or_default());
    }
    let member = machine.read(member::file(state)).unwrap_or_default();
    member::keys_of(&member).iter().for_each(|key| report.secrets.add(key));
    let names = machine.list(state);
    for name in names.iter().filter(|name| name.contains("token") || name.ends_with(".key")) {
        let text = machine.read(state.join(name)).unwrap_or_default();
        // The names of a JSON file's keys are no secrets: only long words count.
        let words = text.split(|c: char| !c.is_ascii_alphanumeric() && !"-_+/=.".contains(c));
        words.filter(|word| word.len() >= MIN_TOKEN).for_each(|word| report.secrets.add(word));
    }
}

/// Age of the oldest record and event in a report, in seconds.
const REPORTED_SECONDS: u64 = 24 * 3600;

fn collect(facts: &Facts, server: &Target, keep_names: bool) -> anyhow::Result<Report> {
    let mut report = Report::new(&facts.machine, keep_names);
    if let Ok(config) = &facts.config {
        add_secrets(&mut report, &facts.machine, &config.state_dir);
        report.add_name(Kind::Host, &config.name);
        config.advertise.iter().for_each(|advertised| report.add_name(Kind::Host, &advertised.host));
        let signer = config.signer.as_deref().and_then(folder_of);
        signer.iter().for_each(|folder| add_secrets(&mut report, &facts.machine, folder));
        let rows = serde_json::to_value(config_rows(config))?;
        report.add("configuration.json", format!("{rows:#}\n"));
        report.add("state-folder", facts.machine.list(&config.state_dir).join("\n") + "\n");
    }
    report.add("versions.json", format!("{:#}\n", json!({ "gpuserver": env!("CARGO_PKG_VERSION") })));
    report.add("health.json", format!("{:#}\n", examine(facts).json()));
    let since_unix = SystemClock.unix().saturating_sub(REPORTED_SECONDS);
    let records = accounting::Wanted { since_unix, ..accounting::Wanted::default() };
    let events = audit::Wanted { since_unix, ..audit::Wanted::default() };
    let questions = [
        // Records have the reasons why leases and programs ended, events the refusals.
        ("records", Ask::Accounting { wanted: records }),
        ("events", Ask::Audit { wanted: events }),
        ("status", Ask::Status),
        ("gpus", Ask::Gpus),
        ("leases", Ask::Leases),
        ("workers", Ask::Ps),
        ("queue", Ask::Queue),
        ("running-configuration", Ask::Config),
    ];
    for (name, ask) in questions {
        let answer = match running(server, &ask) {
            Ok(Some(value)) => value,
            Ok(None) => json!({ "error": "the server does not answer" }),
            Err(error) => json!({ "error": format!("{error:#}") }),
        };
        report.add(&format!("{name}.json"), format!("{answer:#}\n"));
    }
    report.add_output("nvidia-smi", &facts.machine, "nvidia-smi", &["-q"]);
    report::add_host(&mut report, &facts.machine);
    let beside = facts.config.as_ref().map_or([None, None], |config| {
        [config.signer.as_deref().map(unit_of), config.starter.as_deref().map(starter_unit_of)]
    });
    let beside = beside.into_iter().flatten();
    let beside: Vec<_> =
        beside.flat_map(|unit| [format!("{unit}.service"), format!("{unit}.socket")]).collect();
    let units = [UNIT].into_iter().chain(beside.iter().map(String::as_str));
    report::add_units(&mut report, &facts.machine, &units.collect::<Vec<_>>());
    report.finish();
    Ok(report)
}

/// `gpuserver report`
pub(super) fn report(out: &mut Output<'_>, server: &Target, options: &ReportOptions) -> anyhow::Result<()> {
    let facts = gather(server)?;
    let report = collect(&facts, server, options.names)?;
    let name = report::name("gpuserver-report", &facts.machine, options.names);
    let path = options.output.clone().unwrap_or_else(|| format!("{name}.tar.gz").into());
    if !out.json {
        writeln!(out.out, "{}\n{}", report.describe(), report.list())?;
    }
    let mut table = None;
    if !options.list {
        table = report.write(&path, &name, facts.machine.now).map_err(|error| Refusal {
            code: "not-stored".into(),
            message: format!("{}: {error}", path.display()),
            hint: "name another file with -o".into(),
        })?;
    }
    let archive = (!options.list).then_some(&path);
    match (out.json, archive) {
        (true, archive) => {
            let files = report.files();
            let told = json!({ "schema": 1, "archive": archive, "names": table, "files": files });
            writeln!(out.out, "{told:#}")?;
        }
        (false, Some(path)) => writeln!(out.out, "{}", report::written(path, table.as_deref()))?,
        (false, None) => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use gpusession_diagnosis::check::State;
    use gpusession_diagnosis::testing::{plant, program};

    use super::*;

    fn facts() -> (tempfile::TempDir, Facts) {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join("gpuserver.toml");
        std::fs::write(&file, "name = \"gpu-a\"\nstate_dir = \"/var/lib/gpuserver\"\n").unwrap();
        let config = crate::config::load_here(&file, true).unwrap();
        let facts = Facts {
            machine: Machine::below(root.path()),
            config: Ok(config),
            status: Err(Silence::Away("no gpuserver answers".into())),
            gpus: vec![],
            workers: vec![],
        };
        (root, facts)
    }

    #[test]
    fn a_silent_server_and_old_keys_are_faults() {
        let (root, mut facts) = facts();
        assert!(answers(&facts).remedy.contains("systemctl start gpuserver"));
        facts.status = Err(Silence::Denied("/run/gpuserver/admin.sock: Permission denied".into()));
        assert_eq!(answers(&facts).state, State::Skipped);
        let file = root.path().join("old.toml");
        std::fs::write(&file, "name = \"gpu-a\"\nmps_gpus = [0]\n").unwrap();
        facts.config = crate::config::load_here(&file, true).map_err(|e| e.to_string());
        assert!(configuration(&facts).found.contains("old.toml:2: unknown key `mps_gpus`"));
        assert_eq!(configuration(&facts).state, State::Fault);
        assert_eq!(cards(&facts).state, State::Skipped);
    }

    #[test]
    fn certificates_that_end_and_addresses_that_lead_nowhere_are_named() {
        let (root, mut facts) = facts();
        assert_eq!(certificate(&facts).state, State::Skipped);
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let mut status = StatusView { control_address: format!("127.0.0.1:{port}"), ..status() };
        status.certificate_expires_unix = facts.machine.now + 20 * 86400;
        let judged = |facts: &mut Facts, status: &StatusView, advertise: &str| {
            let file = root.path().join("gpuserver.toml");
            std::fs::write(&file, format!("name = \"gpu-a\"\n{advertise}")).unwrap();
            facts.config = Ok(crate::config::load_here(&file, true).unwrap());
            facts.status = Ok(status.clone());
            (certificate(facts), super::advertise(facts))
        };
        let (certificate, advertised) = judged(&mut facts, &status, "");
        assert!(certificate.state == State::Ok && certificate.found.contains("20 days"), "{certificate:?}");
        assert_eq!(advertised.state, State::Skipped);
        let (_, advertised) = judged(&mut facts, &status, "advertise = \"127.0.0.1\"\n");
        assert_eq!(advertised.state, State::Ok, "{advertised:?}");
        status.warnings = vec!["the certificate of vm-7 has expired".into()];
        for wrong in ["advertise = \"127.0.0.1:9\"\n", "advertise = \"gpu1.invalid\"\n"] {
            let (certificate, advertised) = judged(&mut facts, &status, wrong);
            assert!(certificate.found.contains("vm-7"), "{certificate:?}");
            assert!(
                advertised.state == State::Warning && advertised.remedy.contains("DNS"),
                "{advertised:?}"
            );
        }
    }

    fn status() -> StatusView {
        serde_json::from_value(json!({
            "name": "gpu-a", "version": "", "pid": 1, "state": "online", "control_address": "",
            "data_address": "", "driver": "", "driver_version": "", "cuda_version": 0,
            "authority_sha256": "", "gpus": 0, "leases": 0, "workers": 0,
        }))
        .unwrap()
    }

    #[test]
    fn a_server_whose_workers_lack_a_restriction_is_named_before_a_worker_runs() {
        let (_root, mut facts) = facts();
        assert_eq!(isolation(&facts).state, State::Skipped);
        let mut judged = |isolation: &str| {
            facts.status = Ok(StatusView { isolation: isolation.into(), ..status() });
            super::isolation(&facts)
        };
        assert_eq!((judged("full").state, judged("basic").state), (State::Ok, State::Ok));
        assert_eq!(judged("off: isolation = \"off\"").state, State::Warning);
        assert_eq!(judged("partial: landlock: no").found, "workers lack landlock: no");
        let noted = judged("partial: the list of system calls: GPUSERVER_UNLISTED_CALLS=log notes others");
        assert_eq!((noted.state, noted.remedy.as_str()), (State::Warning, gpu_host::REFUSE_UNLISTED_CALLS));
    }

    #[test]
    fn the_authority_and_the_state_folder_are_judged() {
        let (root, facts) = facts();
        assert!(authority(&facts).remedy.starts_with("gpuserver pool init"));
        plant(&root, "var/lib/gpuserver/ca/authority.pem", "nonsense");
        assert_eq!(authority(&facts).state, State::Fault);
        let key = rcgen::KeyPair::generate().unwrap();
        let mut params = rcgen::CertificateParams::new(vec!["pool".into()]).unwrap();
        let day = std::time::Duration::from_secs(86400);
        for (days, state) in [(800, State::Ok), (400, State::Warning), (300, State::Fault)] {
            let now = std::time::Duration::from_secs(facts.machine.now);
            params.not_after = (std::time::UNIX_EPOCH + now + day * days).into();
            plant(&root, "var/lib/gpuserver/ca/authority.pem", &params.self_signed(&key).unwrap().pem());
            assert_eq!(authority(&facts).state, state);
        }
        use std::os::unix::fs::PermissionsExt as _;
        let mode = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(root.path().join("var/lib/gpuserver"), mode).unwrap();
        assert_eq!(state_folder(&facts).remedy, "sudo chmod 700 /var/lib/gpuserver");
    }

    #[test]
    fn a_unit_with_small_limits_is_named() {
        let (root, facts) = facts();
        assert_eq!(unit(&facts).state, State::Skipped);
        let script = "case $3 in LoadState) echo loaded;; UnitFileState) echo disabled;;\n\
            LimitNOFILE) echo 1024;; LimitSTACK) echo 8388608;; FileDescriptorStoreMax) echo 0;; esac";
        program(&root, "systemctl", script);
        assert_eq!(unit(&facts).remedy, "sudo systemctl enable gpuserver");
        assert_eq!(open_files(&facts).state, State::Warning);
        assert_eq!((stack(&facts).state, descriptor_store(&facts).state), (State::Fault, State::Fault));
        plant(&root, "etc/systemd/system/gpuserver.service.d/a.conf", "");
        assert_eq!(drop_ins(&facts).state, State::Warning);
    }

    #[test]
    fn a_signer_that_does_not_start_is_named() {
        let (root, mut facts) = facts();
        assert_eq!(signer(&facts).state, State::Skipped);
        let file = root.path().join("signs.toml");
        std::fs::write(&file, "signer = \"/run/gpuserver-ca-b/signer.sock\"\n").unwrap();
        facts.config = Ok(crate::config::load_here(&file, true).unwrap());
        assert_eq!(signer(&facts).state, State::Skipped, "systemd does not answer");
        let units = |socket: &str, service: &str| {
            let script = format!(
                "case $3.$5 in LoadState.*) echo loaded;; *.gpuserver-ca@b.socket) echo {socket};; *) echo {service};; esac"
            );
            program(&root, "systemctl", &script);
        };
        units("active", "inactive");
        assert_eq!(signer(&facts).state, State::Ok);
        units("inactive", "inactive");
        assert_eq!(signer(&facts).remedy, "sudo systemctl start gpuserver-ca@b.socket");
        units("active", "failed");
        assert!(signer(&facts).found.starts_with("gpuserver-ca@b.service has failed"));
        assert_eq!(starter(&facts).state, State::Skipped, "there is none");
    }

    #[test]
    fn a_starter_that_does_not_start_is_named() {
        let (root, mut facts) = facts();
        let file = root.path().join("starts.toml");
        std::fs::write(&file, "starter = \"/run/gpuserver-worker/start.sock\"\n").unwrap();
        facts.config = Ok(crate::config::load_here(&file, true).unwrap());
        let units = |socket: &str, service: &str| {
            let script = format!(
                "case $3.$5 in LoadState.*) echo loaded;; *.gpuserver-worker.socket) echo {socket};; *) echo {service};; esac"
            );
            program(&root, "systemctl", &script);
        };
        units("active", "active");
        assert_eq!(starter(&facts).state, State::Ok);
        units("inactive", "inactive");
        let found = starter(&facts);
        assert_eq!(found.remedy, "sudo systemctl start gpuserver-worker.socket");
        assert!(found.found.ends_with("no readings of its GPUs"), "{}", found.found);
    }

    #[test]
    fn a_large_cache_scarce_memory_and_shared_ports_are_named() {
        let (root, mut facts) = facts();
        let configured = |facts: &mut Facts, keys: &str| {
            let file = root.path().join("gpuserver.toml");
            std::fs::write(&file, format!("state_dir = \"/var/lib/gpuserver\"\n{keys}")).unwrap();
            facts.config = Ok(crate::config::load_here(&file, true).unwrap());
        };
        assert_eq!((disk_time(&facts).state, cache(&facts).state), (State::Skipped, State::Skipped));
        plant(&root, "var/lib/gpuserver/cache/modules/x", &"x".repeat(5000));
        assert_eq!(disk_time(&facts).state, State::Ok, "{:?}", disk_time(&facts));
        configured(&mut facts, "cache_max = \"1MiB\"");
        assert!(cache(&facts).found.contains("4.9 KiB of 1 MiB"), "{:?}", cache(&facts));
        configured(&mut facts, "cache_max = 2000");
        assert!(cache(&facts).found.contains("does not trim"), "{:?}", cache(&facts));
        configured(&mut facts, "cache_max = 0");
        assert_eq!(cache(&facts).state, State::Warning);

        assert_eq!((parking(&facts).state, ports(&facts).state), (State::Skipped, State::Skipped));
        plant(&root, "proc/meminfo", "MemTotal:  8388608 kB\nMemAvailable:  1048576 kB\n");
        assert!(
            parking(&facts).found.contains("4 GiB of host memory, and 1 GiB are"),
            "{:?}",
            parking(&facts)
        );
        configured(&mut facts, "parked_max = \"1GiB\"");
        assert_eq!(parking(&facts).state, State::Ok);
        configured(&mut facts, "park_after = 0");
        assert_eq!(parking(&facts).state, State::Skipped);

        plant(&root, "proc/sys/net/ipv4/ip_local_port_range", "32768\t60999\n");
        assert_eq!(ports(&facts).state, State::Ok);
        configured(&mut facts, "data_ports = \"40000-40100\"");
        assert!(ports(&facts).found.starts_with("port 40000 is in 32768 to 60999"));
        plant(&root, "proc/sys/net/ipv4/ip_local_reserved_ports", "8080,40000-40100\n");
        assert_eq!(ports(&facts).state, State::Ok);
    }

    #[test]
    fn keys_and_tokens_of_the_state_folder_are_secrets() {
        let (root, facts) = facts();
        plant(&root, "var/lib/gpuserver/ca/authority.key", "swordfish1\n");
        plant(&root, "var/lib/gpuserver/ca/next.key", "swordfish3\n");
        plant(&root, "var/lib/gpuserver/tokens.json", "{\"uses_left_of_the\": \"swordfish2-0123456789\"}\n");
        let mut report = Report::default();
        add_secrets(&mut report, &facts.machine, Path::new("/var/lib/gpuserver"));
        assert_eq!(report.secrets.scrub("swordfish1 \"swordfish2-0123456789\""), "(removed) \"(removed)\"");
        assert_eq!(report.secrets.scrub("swordfish3"), "(removed)");
    }
}
