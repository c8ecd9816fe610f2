//! Kinds of values: the parser and the formatter that a row of [`super::keys`] names.
//!
//! The error text of a parser is the cause and the remedy.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use gpusession_common::units::{Memory, parse_duration, parse_size, show_duration};
use gpusession_common::words::Sharing;
use gpusession_proto::join::is_name;
use gpusession_proto::supervise::Isolation;
use ipnet::IpNet;

use super::raw::Value;
use super::values::{Advertised, GpuChoice, Gpus};
use crate::limits::{Bound, Scope, check_grace, parse_memory};

/// Parser and formatter of a key's value.
pub struct Kind<T> {
    pub(super) read: fn(&Value) -> Result<T, String>,
    pub(super) show: fn(&T) -> String,
}

pub(super) const NAME: Kind<String> = Kind {
    read: |v| match text(v)? {
        name if is_name(name) => Ok(name.into()),
        _ => Err("a name has a-z, 0-9, `-` and `.`, 64 characters at most".into()),
    },
    show: String::clone,
};
pub(super) const PATTERN: Kind<String> = Kind { read: |v| text(v).map(String::from), show: String::clone };
pub(super) const ADDRESS: Kind<SocketAddr> =
    Kind { read: |v| socket_address(text(v)?), show: SocketAddr::to_string };
pub(super) const ADVERTISED: Kind<Vec<Advertised>> = Kind {
    read: |v| texts(v)?.into_iter().map(advertised).collect(),
    show: |list| {
        let shown = list.iter().map(|a| match a.port {
            Some(port) => crate::net::host_port(&a.host, port),
            None => a.host.clone(),
        });
        if list.is_empty() {
            "the address that a client was given".into()
        } else {
            shown.collect::<Vec<_>>().join(", ")
        }
    },
};
pub(super) const PEERS: Kind<Vec<Advertised>> = Kind {
    read: |v| {
        let peers = (ADVERTISED.read)(v)?;
        if peers.len() > 64 { Err("at most 64 servers are possible".into()) } else { Ok(peers) }
    },
    show: |list| if list.is_empty() { "none".into() } else { (ADVERTISED.show)(list) },
};
pub(super) const INTERVAL: Kind<Duration> = Kind {
    read: |v| {
        let time = duration(v)?;
        let fits = (Duration::from_secs(1)..=Duration::from_secs(3600)).contains(&time);
        if fits { Ok(time) } else { Err("a time from \"1s\" to \"1h\" is wanted".into()) }
    },
    show: DURATION.show,
};
pub(super) const PORTS: Kind<(u16, u16)> = Kind {
    read: ports,
    show: |(first, last)| if first == last { first.to_string() } else { format!("{first}-{last}") },
};
pub(super) const METRICS_ADDRESS: Kind<Option<SocketAddr>> = Kind {
    read: |v| match text(v)? {
        "off" => Ok(None),
        address => address
            .parse()
            .map(Some)
            .map_err(|_| "an address and a port like \"127.0.0.1:7603\" are wanted, or \"off\"".to_string()),
    },
    show: |address| address.map_or_else(|| "off".into(), |a| a.to_string()),
};
pub(super) const SWITCH: Kind<bool> = Kind {
    read: |v| one_of(v, &["on", "off"], &[]).map(|word| word == "on"),
    show: |on| if *on { "on" } else { "off" }.into(),
};
pub(super) const SCRUB: Kind<bool> = Kind {
    read: |v| one_of(v, &["off", "verify"], &[]).map(|word| word == "verify"),
    show: |verify| if *verify { "verify" } else { "off" }.into(),
};
pub(super) const NETWORKS: Kind<Vec<IpNet>> =
    Kind { read: |v| texts(v)?.into_iter().map(network).collect(), show: |networks| list(networks) };
pub(super) const LOCAL: Kind<String> =
    Kind { read: |v| one_of(v, &["local"], &["etcd"]), show: String::clone };
pub(super) const ALL_OR_GPUS: Kind<Gpus> = Kind { read: read_gpus, show: show_gpus };
pub(super) const GPU_LIST: Kind<Vec<GpuChoice>> = Kind { read: gpu_list, show: |gpus| list(gpus) };
pub(super) const DRIVER: Kind<Option<PathBuf>> =
    Kind { read: |v| absolute(v).map(Some), show: |path| path_or(path.as_ref(), "NVIDIA's libcuda.so.1") };
pub(super) const CHECK: Kind<String> =
    Kind { read: |v| one_of(v, &["check"], &["manage"]), show: String::clone };
pub(super) const PATH_OR_NONE: Kind<Option<PathBuf>> = Kind {
    read: |v| if text(v)? == "none" { Ok(None) } else { absolute(v).map(Some) },
    show: |path| path_or(path.as_ref(), "none"),
};
pub(super) const OVERCOMMIT: Kind<u64> = Kind {
    read: |v| {
        let percent = text(v)?.strip_suffix('%').and_then(|p| p.trim().parse().ok());
        let in_range = percent.filter(|p| (100..=1000).contains(p));
        in_range.ok_or_else(|| "a percentage from \"100%\" to \"1000%\" is wanted".into())
    },
    show: |percent| format!("{percent}%"),
};
pub(super) const SHARING: Kind<Sharing> = Kind {
    read: |v| {
        let words: Vec<_> = Sharing::ALL.iter().map(|s| s.as_str()).collect();
        one_of(v, &words, &[])?.parse()
    },
    show: Sharing::to_string,
};
pub(super) const DOMAIN: Kind<String> =
    Kind { read: |v| one_of(v, &["client", "server"], &[]), show: String::clone };
pub(super) const MEASURERS: Kind<String> =
    Kind { read: |v| one_of(v, &["clients", "admins", "off"], &[]), show: String::clone };
pub(super) const MPS_CONTROL: Kind<Option<PathBuf>> = Kind {
    read: |v| absolute(v).map(Some),
    show: |path| path_or(path.as_ref(), "in the driver's folder, $PATH, /usr/bin"),
};
pub(super) const ISOLATION: Kind<Isolation> = Kind {
    read: |v| {
        one_of(v, &["off", "try", "require"], &[]).map(|word| match word.as_str() {
            "off" => Isolation::Off,
            "try" => Isolation::Try,
            _ => Isolation::Require,
        })
    },
    show: |isolation| {
        match isolation {
            Isolation::Off => "off",
            Isolation::Try => "try",
            Isolation::Require => "require",
        }
        .into()
    },
};
/// Number of warm workers.
pub(super) const COUNT: Kind<u32> = Kind {
    read: |v| whole(v, 0, 64).ok_or_else(|| "a number from 0 to 64 is wanted".into()),
    show: u32::to_string,
};
pub(super) const DURATION: Kind<Duration> = Kind { read: duration, show: |time| show_duration(*time) };
pub(super) const GRACE: Kind<Duration> =
    Kind { read: |v| check_grace(duration(v)?), show: |time| show_duration(*time) };
pub(super) const SIZE: Kind<u64> = Kind { read: size, show: |bytes| Bound::Size(*bytes).to_string() };
pub(super) const PART_OF_MEMORY: Kind<Memory> = Kind {
    read: part_of_memory,
    show: |memory| match memory {
        Memory::Percent(percent) => format!("{percent}%"),
        Memory::Bytes(bytes) => bytes.to_string(),
    },
};
pub(super) const OFFERED: Kind<Memory> = Kind {
    read: |v| {
        let memory = part_of_memory(v)?;
        if memory.is_zero() { Err("more than 0 is wanted".into()) } else { Ok(memory) }
    },
    show: PART_OF_MEMORY.show,
};
pub(super) const FOLDER: Kind<PathBuf> = Kind { read: absolute, show: |path| path.display().to_string() };
pub(super) const SCOPE: Kind<Scope> = Kind {
    read: |v| {
        one_of(v, &["client", "site"], &[])
            .map(|word| if word == "site" { Scope::Site } else { Scope::Client })
    },
    show: |scope| if *scope == Scope::Site { "site" } else { "client" }.into(),
};
pub(super) const GPU_COUNT: Kind<u32> = Kind {
    read: |v| whole(v, 1, 1024).ok_or_else(|| "a number of GPUs is wanted".into()),
    show: u32::to_string,
};
pub(super) const RESERVED_MEMORY: Kind<Memory> = Kind {
    read: |v| match v {
        Value::String(text) => parse_memory(text),
        other => parse_memory(&other.to_string()),
    },
    show: |memory| Bound::Memory(*memory).to_string(),
};

fn path_or(path: Option<&PathBuf>, otherwise: &str) -> String {
    path.map_or_else(|| otherwise.into(), |path| path.display().to_string())
}

fn whole(value: &Value, first: u32, last: u32) -> Option<u32> {
    let Value::Integer(number) = value else { return None };
    u32::try_from(*number).ok().filter(|n| (first..=last).contains(n))
}

fn network(text: &str) -> Result<IpNet, String> {
    let network = text.parse().or_else(|_| text.parse::<IpAddr>().map(IpNet::from));
    network.map_err(|_| format!("{text:?} is not a network; \"10.1.0.0/16\" is one"))
}

pub(super) fn text(value: &Value) -> Result<&str, String> {
    match value {
        Value::String(s) => Ok(s),
        _ => Err("a string is wanted, in quotes".into()),
    }
}

pub(super) fn texts(value: &Value) -> Result<Vec<&str>, String> {
    match value {
        Value::List(list) => list.iter().map(text).collect(),
        Value::String(s) => Ok(vec![s]),
        _ => Err("a string or a list of strings is wanted".into()),
    }
}

fn absolute(value: &Value) -> Result<PathBuf, String> {
    let path = PathBuf::from(text(value)?);
    if path.is_absolute() { Ok(path) } else { Err("an absolute path is wanted".into()) }
}

fn one_of(value: &Value, allowed: &[&str], later: &[&str]) -> Result<String, String> {
    let written = text(value)?;
    if allowed.contains(&written) {
        return Ok(written.into());
    }
    let these = allowed.iter().map(|a| format!("{a:?}")).collect::<Vec<_>>().join(" or ");
    if later.contains(&written) {
        return Err(format!("this version of gpuserver does not support it yet, only {these}"));
    }
    Err(format!("only {these} is possible"))
}

/// Parses HOST:PORT for listening; a bare port stands for all addresses.
fn socket_address(text: &str) -> Result<SocketAddr, String> {
    if let Ok(address) = text.parse() {
        return Ok(address);
    }
    if let Some(port) = text.strip_prefix(':').or(Some(text)).and_then(|p| p.parse().ok()) {
        return Ok(SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), port));
    }
    Err("an address like \"[::]:7601\", \"10.1.2.3:7601\" is wanted".into())
}

/// Parses HOST, HOST:PORT or [V6]:PORT.
pub fn advertised(text: &str) -> Result<Advertised, String> {
    let bad = || "HOST, HOST:PORT or [V6]:PORT is wanted".to_string();
    if let Ok(ip) = text.parse::<IpAddr>() {
        return Ok(Advertised { host: ip.to_string(), port: None });
    }
    if let Some(rest) = text.strip_prefix('[') {
        let (host, rest) = rest.split_once(']').ok_or_else(bad)?;
        let host: Ipv6Addr = host.parse().map_err(|_| bad())?;
        let port = match rest {
            "" => None,
            _ => Some(rest.strip_prefix(':').and_then(|p| p.parse().ok()).ok_or_else(bad)?),
        };
        return Ok(Advertised { host: host.to_string(), port });
    }
    let (host, port) = match text.split_once(':') {
        Some((host, port)) => (host, Some(port.parse().map_err(|_| bad())?)),
        None => (text, None),
    };
    let host_ok = !host.is_empty() && host.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._".contains(&b));
    if !host_ok || port == Some(0) {
        return Err(bad());
    }
    Ok(Advertised { host: host.into(), port })
}

fn ports(value: &Value) -> Result<(u16, u16), String> {
    let bad = "a port or a range of ports like \"45201-46225\" is wanted";
    match value {
        Value::Integer(p) => u16::try_from(*p).map(|p| (p, p)).map_err(|_| bad.into()),
        Value::String(s) => {
            let (first, last) = s.split_once('-').unwrap_or((s, s));
            let port = |p: &str| p.trim().parse::<u16>().map_err(|_| bad.to_string());
            let (first, last) = (port(first)?, port(last)?);
            if first > last {
                return Err("the range ends before it starts".into());
            }
            Ok((first, last))
        }
        _ => Err(bad.into()),
    }
}

fn read_gpus(value: &Value) -> Result<Gpus, String> {
    match value {
        Value::String(s) if s == "all" => Ok(Gpus::All),
        Value::List(list) if list.is_empty() => Err("the list is empty: no GPU would be served".into()),
        Value::List(_) => gpu_list(value).map(Gpus::These),
        _ => Err("\"all\" or a list of indices and UUIDs is wanted; to serve one GPU write [0]".into()),
    }
}

fn gpu_list(value: &Value) -> Result<Vec<GpuChoice>, String> {
    let Value::List(list) = value else {
        return Err("a list of indices and UUIDs like [0] is wanted; `sharing` is for all other GPUs".into());
    };
    let mut out: Vec<GpuChoice> = Vec::new();
    for item in list {
        let choice = match item {
            Value::Integer(i) => {
                GpuChoice::Index(u32::try_from(*i).map_err(|_| format!("{i} is not an index of a GPU"))?)
            }
            Value::String(s) if s.to_ascii_lowercase().starts_with("gpu-") => {
                let (prefix, rest) = s.split_at(4);
                GpuChoice::Uuid(format!("{}{}", prefix.to_ascii_uppercase(), rest.to_ascii_lowercase()))
            }
            other => return Err(format!("{other} is neither an index nor a UUID (GPU-...)")),
        };
        if out.contains(&choice) {
            return Err(format!("{choice} is listed twice"));
        }
        out.push(choice);
    }
    Ok(out)
}

fn show_gpus(gpus: &Gpus) -> String {
    match gpus {
        Gpus::All => "all".into(),
        Gpus::These(these) => list(these),
    }
}

fn duration(value: &Value) -> Result<Duration, String> {
    let bad = "a duration like \"90s\", \"10min\" or \"1h 30min\" is wanted; 0 is off";
    match value {
        Value::Integer(s) => u64::try_from(*s).map(Duration::from_secs).map_err(|_| bad.into()),
        Value::String(s) => parse_duration(s).map_err(|_| bad.into()),
        _ => Err(bad.into()),
    }
}

/// Parses "50%", "64GiB", or a number of bytes.
fn part_of_memory(value: &Value) -> Result<Memory, String> {
    let bad = "a percentage like \"50%\", a size in KiB, MiB, GiB or a number of bytes is wanted; 0 is none";
    let parsed = match value {
        Value::Integer(bytes) => u64::try_from(*bytes).ok().map(Memory::Bytes),
        Value::String(text) => Memory::parse(text).ok(),
        _ => None,
    };
    parsed.ok_or_else(|| bad.into())
}

/// Parses "8GiB", or a number of bytes.
fn size(value: &Value) -> Result<u64, String> {
    match value {
        Value::Integer(bytes) => u64::try_from(*bytes).map_err(|_| "a size is not negative".into()),
        Value::String(text) => parse_size(text),
        _ => Err("a size like \"4000MiB\", \"8GiB\" or bytes is wanted".into()),
    }
}

fn list<T: fmt::Display>(items: &[T]) -> String {
    let items: Vec<_> = items.iter().map(ToString::to_string).collect();
    format!("[{}]", items.join(", "))
}

/// Derives the server's name from the host's name.
pub(super) fn name_from_host(host: &str) -> Option<String> {
    let name = host.split('.').next()?.to_ascii_lowercase();
    is_name(&name).then_some(name)
}
