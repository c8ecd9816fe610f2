//! The configuration from raw values: each key by its parser, or its default.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use gpusession_common::units::{Memory, parse_duration, show_duration};
use gpusession_common::words::Sharing;
use gpusession_proto::join::is_name;
use gpusession_proto::supervise::Isolation;
use ipnet::IpNet;

use super::cross::{check_mps_folder, check_ports, cross_warnings, mps_without_effect};
use super::limit_tables::{check_limits, check_reserves};
use super::read::{Raw, Value};
use super::values::{
    absolute, advertised, duration, gpu_list, list, name_from_host, one_of, part_of_memory, ports, read_gpus,
    show_gpus, size, socket_address, text, texts,
};
use super::{
    Advertised, Config, ConfigError, GpuChoice, Gpus, KEYS, Mps, Origin, Surroundings, gpu_sharing_key,
    instance,
};
use crate::lease::Rules;
use crate::limits::{Bound, Entry, IDLE_TIMES, Layer, Scope};

/// Most warm workers of a lease.
const MAX_WARM: u64 = 64;

struct Reader<'a> {
    raw: &'a Raw,
    report: Vec<(String, String, Origin)>,
}

impl Reader<'_> {
    /// Reads one key with `parse`, whose error text is the cause and the remedy.
    fn key<T>(
        &mut self,
        key: &'static str,
        default: impl FnOnce() -> (T, Origin),
        parse: impl FnOnce(&Value) -> Result<T, String>,
        show: impl FnOnce(&T) -> String,
    ) -> Result<T, ConfigError> {
        debug_assert!(KEYS.iter().any(|k| k.name == key));
        let (value, origin) = match self.raw.keys.get(key) {
            Some((value, origin)) => (
                parse(value)
                    .map_err(|m| ConfigError::new(origin.clone(), format!("{key} = {value}: {m}")))?,
                origin.clone(),
            ),
            None => default(),
        };
        self.report.push((key.into(), show(&value), origin));
        Ok(value)
    }
}

/// Turns raw values into the configuration; reports each key, and warns of keys without effect.
pub(super) fn check(
    raw: Raw,
    mut warnings: Vec<String>,
    file: &Path,
    around: &Surroundings<'_>,
) -> Result<Config, ConfigError> {
    let mut reader = Reader { raw: &raw, report: Vec::new() };
    let name = read_name(&mut reader, &around.host_name)?;
    let Addresses { listen, advertise, data_ports, metrics_listen } = read_addresses(&mut reader)?;
    check_ports(&raw, listen, data_ports, metrics_listen)?;
    let gpus = reader.key("gpus", || (Gpus::All, Origin::Default), read_gpus, show_gpus)?;
    let driver = reader.key(
        "driver",
        || (None, Origin::Default),
        |v| absolute(v).map(Some),
        |d| d.as_ref().map_or_else(|| "NVIDIA's libcuda.so.1".into(), |p| p.display().to_string()),
    )?;
    reader.key("registry", || default("local"), |v| one_of(v, &["local"], &["etcd"]), String::clone)?;
    let (encryption, trusted_networks) = read_encryption(&mut reader)?;
    let GpuSharing { sharing, gpu_sharing, mps } = read_sharing(&mut reader)?;
    warnings.extend(mps_without_effect(&raw, mps.as_ref()));
    let Workers { warm_workers, isolation, worker_idle_exit } = read_workers(&mut reader)?;
    let Idleness { idle, parked_max, return_limit } = read_idleness(&mut reader)?;
    let (state_dir, runtime_dir) = read_folders(&mut reader, file, around)?;
    let overcommit_percent = read_overcommit(&mut reader)?;
    reader.key("compute_mode", || default("check"), |v| one_of(v, &["check"], &["manage"]), String::clone)?;
    let Upkeep { drain_timeout, lock_dir, cache_max, accounting_keep } =
        read_upkeep(&mut reader, around.nvidia_driver)?;
    let scope = reader.key(
        "users.scope",
        || default("client"),
        |v| one_of(v, &["client", "site"], &[]),
        String::clone,
    )?;
    let scope = if scope == "site" { Scope::Site } else { Scope::Client };
    let mut report = reader.report;
    let mut limits = check_limits(&raw, scope, &mut report)?;
    limits.entries.extend(idle);
    warnings.extend(limits.without_effect());
    let reserve = check_reserves(&raw, &mut report)?;
    let rules = Rules { reserve, overcommit_percent };
    let mut config = Config {
        name,
        listen,
        advertise,
        data_ports,
        metrics_listen,
        gpus,
        driver,
        encryption,
        trusted_networks,
        warm_workers,
        worker_idle_exit,
        isolation,
        parked_max,
        return_limit,
        file: file.into(),
        file_found: true,
        state_dir,
        runtime_dir,
        sharing,
        gpu_sharing,
        mps,
        rules,
        drain_timeout,
        lock_dir,
        accounting_keep,
        cache_max,
        limits,
        report,
        waiting: Vec::new(),
        warnings,
    };
    if config.mps.is_some() {
        check_mps_folder(&raw, &config.runtime_dir)?;
    }
    let more = cross_warnings(&config, around.ephemeral);
    config.warnings.extend(more);
    Ok(config)
}

/// Returns the default of a key whose value is text.
fn default(s: &str) -> (String, Origin) {
    (s.to_string(), Origin::Default)
}

/// Reads the server's name; the default comes from the host's name.
fn read_name(reader: &mut Reader<'_>, host_name: &str) -> Result<String, ConfigError> {
    let name = reader.key(
        "name",
        || default(&name_from_host(host_name).unwrap_or_default()),
        |v| {
            let name = text(v)?;
            if is_name(name) {
                Ok(name.to_string())
            } else {
                Err("a name has a-z, 0-9, `-` and `.`, 64 characters at most".into())
            }
        },
        String::clone,
    )?;
    if name.is_empty() {
        return Err(ConfigError::new(
            Origin::Default,
            format!("name: the host name {host_name:?} cannot be this server's name; set `name`"),
        ));
    }
    Ok(name)
}

/// Addresses and ports of the listeners.
struct Addresses {
    listen: SocketAddr,
    advertise: Vec<Advertised>,
    data_ports: (u16, u16),
    metrics_listen: Option<SocketAddr>,
}

fn read_addresses(reader: &mut Reader<'_>) -> Result<Addresses, ConfigError> {
    let listen = reader.key(
        "listen",
        || (SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), 7601), Origin::Default),
        |v| socket_address(text(v)?),
        ToString::to_string,
    )?;
    let advertise = reader.key(
        "advertise",
        || (Vec::new(), Origin::Default),
        |v| texts(v)?.into_iter().map(advertised).collect::<Result<Vec<_>, _>>(),
        |list| {
            let shown: Vec<_> = list
                .iter()
                .map(|a| match a.port {
                    Some(port) => crate::net::host_port(&a.host, port),
                    None => a.host.clone(),
                })
                .collect();
            if shown.is_empty() { "the address a client reached".into() } else { shown.join(", ") }
        },
    )?;
    let data_ports = reader.key(
        "data_ports",
        || ((7602, 7602), Origin::Default),
        ports,
        |(a, b)| {
            if a == b { a.to_string() } else { format!("{a}-{b}") }
        },
    )?;
    let metrics_listen = reader.key(
        "metrics_listen",
        || (None, Origin::Default),
        |v| match text(v)? {
            "off" => Ok(None),
            address => address.parse().map(Some).map_err(|_| {
                "an address and a port like \"127.0.0.1:7603\" are wanted, or \"off\"".to_string()
            }),
        },
        |a| a.map_or_else(|| "off".into(), |a: SocketAddr| a.to_string()),
    )?;
    Ok(Addresses { listen, advertise, data_ports, metrics_listen })
}

/// Reads `encryption` and `trusted_networks`.
fn read_encryption(reader: &mut Reader<'_>) -> Result<(bool, Vec<IpNet>), ConfigError> {
    let encryption =
        reader.key("encryption", || default("on"), |v| one_of(v, &["on", "off"], &[]), String::clone)?
            == "on";
    let trusted_networks = reader.key(
        "trusted_networks",
        || (Vec::new(), Origin::Default),
        |v| {
            texts(v)?
                .into_iter()
                .map(|n| {
                    n.parse::<IpNet>()
                        .or_else(|_| n.parse::<IpAddr>().map(IpNet::from))
                        .map_err(|_| format!("{n:?} is not a network; \"10.1.0.0/16\" is one"))
                })
                .collect::<Result<Vec<_>, _>>()
        },
        |l| list(l),
    )?;
    Ok((encryption, trusted_networks))
}

/// Sharing of the GPUs.
struct GpuSharing {
    sharing: Sharing,
    gpu_sharing: Vec<(GpuChoice, Sharing)>,
    mps: Option<Mps>,
}

fn read_sharing(reader: &mut Reader<'_>) -> Result<GpuSharing, ConfigError> {
    let sharing = reader.key(
        "sharing",
        || (Sharing::default(), Origin::Default),
        |v| {
            let words: Vec<_> = Sharing::ALL.iter().map(|s| s.as_str()).collect();
            one_of(v, &words, &[])?.parse()
        },
        |s| s.as_str().into(),
    )?;
    let mut gpu_sharing: Vec<(GpuChoice, Sharing)> = Vec::new();
    for &mode in Sharing::ALL {
        let these = reader.key(
            gpu_sharing_key(mode),
            || (Vec::new(), Origin::Default),
            |v| {
                let these = gpu_list(v)?;
                match gpu_sharing.iter().find(|(gpu, _)| these.contains(gpu)) {
                    Some((gpu, other)) => {
                        Err(format!("{} names {gpu} already; name it once", gpu_sharing_key(*other)))
                    }
                    None => Ok(these),
                }
            },
            |l| list(l),
        )?;
        gpu_sharing.extend(these.into_iter().map(|gpu| (gpu, mode)));
    }
    let mps_domain = reader.key(
        "mps_domain",
        || default("client"),
        |v| one_of(v, &["client", "server"], &[]),
        String::clone,
    )?;
    let mps_control = reader.key(
        "mps_control",
        || (None, Origin::Default),
        |v| absolute(v).map(Some),
        |p| {
            p.as_ref()
                .map_or_else(|| "in the driver's folder, $PATH, /usr/bin".into(), |p| p.display().to_string())
        },
    )?;
    let by_mps = match sharing {
        Sharing::Mps => Some("sharing"),
        _ => gpu_sharing.iter().any(|(_, s)| *s == Sharing::Mps).then_some(gpu_sharing_key(Sharing::Mps)),
    };
    let mps = by_mps.map(|key| Mps {
        key: if mps_control.is_some() { "mps_control" } else { key },
        shared: mps_domain == "server",
        control: mps_control,
    });
    Ok(GpuSharing { sharing, gpu_sharing, mps })
}

/// Number, isolation and idle time of the workers.
struct Workers {
    warm_workers: u32,
    isolation: Isolation,
    worker_idle_exit: Duration,
}

fn read_workers(reader: &mut Reader<'_>) -> Result<Workers, ConfigError> {
    let warm_workers = reader.key(
        "warm_workers",
        || (2, Origin::Default),
        |v| {
            match v {
                Value::Integer(n) => {
                    u32::try_from(*n).ok().filter(|n| u64::from(*n) <= MAX_WARM).ok_or_else(String::new)
                }
                _ => Err(String::new()),
            }
            .map_err(|_| format!("a number from 0 to {MAX_WARM} is wanted"))
        },
        ToString::to_string,
    )?;
    let isolation = reader.key(
        "isolation",
        || default("try"),
        |v| one_of(v, &["off", "try", "require"], &[]),
        String::clone,
    )?;
    let isolation = match isolation.as_str() {
        "try" => Isolation::Try,
        "require" => Isolation::Require,
        _ => Isolation::Off,
    };
    let worker_idle_exit = reader.key(
        "worker_idle_exit",
        || (Duration::from_secs(600), Origin::Default),
        duration,
        |d| show_duration(*d),
    )?;
    Ok(Workers { warm_workers, isolation, worker_idle_exit })
}

/// Idle times, as limits of every client, and the settings of parking.
struct Idleness {
    idle: Vec<Entry>,
    parked_max: Memory,
    return_limit: Duration,
}

fn read_idleness(reader: &mut Reader<'_>) -> Result<Idleness, ConfigError> {
    let mut idle = Vec::new();
    for name in IDLE_TIMES {
        let of_default = KEYS.iter().find(|k| k.name == name).and_then(|k| parse_duration(k.default).ok());
        let default = || (of_default.unwrap_or_default(), Origin::Default);
        let time = reader.key(name, default, duration, |d| show_duration(*d))?;
        let origin = reader.report.last().map_or(Origin::Default, |(.., origin)| origin.clone());
        let bound = Bound::Time(time);
        idle.push(Entry { name, layer: Layer::Default, bound, origin: origin.to_string(), of_user: false });
    }
    let parked_max = reader.key(
        "parked_max",
        || (Memory::Percent(50.0), Origin::Default),
        part_of_memory,
        |m| match m {
            Memory::Percent(p) => format!("{p}%"),
            Memory::Bytes(b) => format!("{b}"),
        },
    )?;
    let return_limit = reader.key(
        "return_limit",
        || (Duration::from_secs(3600), Origin::Default),
        duration,
        |d| show_duration(*d),
    )?;
    Ok(Idleness { idle, parked_max, return_limit })
}

/// Returns a directory that systemd created: the first of a colon-separated list.
///
/// Without the variable, returns the directory that systemd would create for this instance, so
/// that a verb outside the unit finds the server of its configuration.
fn directory(
    file: &Path,
    around: &Surroundings<'_>,
    variable: &'static str,
    otherwise: &str,
) -> (PathBuf, Origin) {
    match (around.env)(variable) {
        Some(v) if !v.is_empty() => {
            (PathBuf::from(v.split(':').next().unwrap_or_default()), Origin::Environment(variable))
        }
        _ => (PathBuf::from(format!("{otherwise}{}", instance(file))), Origin::Default),
    }
}

/// Reads `state_dir` and `runtime_dir`.
fn read_folders(
    reader: &mut Reader<'_>,
    file: &Path,
    around: &Surroundings<'_>,
) -> Result<(PathBuf, PathBuf), ConfigError> {
    let state_dir = reader.key(
        "state_dir",
        || directory(file, around, "STATE_DIRECTORY", "/var/lib/gpuserver"),
        absolute,
        |p| p.display().to_string(),
    )?;
    let runtime_dir = reader.key(
        "runtime_dir",
        || directory(file, around, "RUNTIME_DIRECTORY", "/run/gpuserver"),
        absolute,
        |p| p.display().to_string(),
    )?;
    Ok((state_dir, runtime_dir))
}

fn read_overcommit(reader: &mut Reader<'_>) -> Result<u64, ConfigError> {
    let percent = |v: &Value| {
        let bad = || "a percentage from \"100%\" to \"1000%\" is wanted".to_string();
        let n = text(v)?.strip_suffix('%').and_then(|p| p.trim().parse::<u64>().ok()).ok_or_else(bad)?;
        if (100..=1000).contains(&n) { Ok(n) } else { Err(bad()) }
    };
    reader.key("overcommit", || (100, Origin::Default), percent, |p| format!("{p}%"))
}

/// Stop, locks, disk cache and records of the server.
struct Upkeep {
    drain_timeout: Duration,
    lock_dir: Option<PathBuf>,
    cache_max: u64,
    accounting_keep: Duration,
}

fn read_upkeep(reader: &mut Reader<'_>, nvidia_driver: bool) -> Result<Upkeep, ConfigError> {
    let drain_timeout = reader.key(
        "drain_timeout",
        || (Duration::from_secs(60), Origin::Default),
        duration,
        |d| show_duration(*d),
    )?;
    // Simulated machines on one host have GPUs with the same UUIDs, so these are not locked.
    let real = nvidia_driver.then(|| PathBuf::from("/run/lock/gpusession"));
    let lock_dir = reader.key(
        "lock_dir",
        || (real, Origin::Default),
        |v| if text(v)? == "none" { Ok(None) } else { absolute(v).map(Some) },
        |d| d.as_ref().map_or_else(|| "none".into(), |p| p.display().to_string()),
    )?;
    let cache_max = reader.key(
        "cache_max",
        || (8 << 30, Origin::Default),
        size,
        |bytes| Bound::Size(*bytes).to_string(),
    )?;
    let accounting_keep = reader.key(
        "accounting_keep",
        || (Duration::from_secs(90 * 86400), Origin::Default),
        duration,
        |d| show_duration(*d),
    )?;
    Ok(Upkeep { drain_timeout, lock_dir, cache_max, accounting_keep })
}
