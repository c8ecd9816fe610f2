//! Parsers and formatters of single values. The error text is the cause and the remedy.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use gpusession_common::units::{Memory, parse_duration, parse_size};
use gpusession_proto::join::is_name;

use super::read::Value;
use super::{Advertised, GpuChoice, Gpus};

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

pub(super) fn absolute(value: &Value) -> Result<PathBuf, String> {
    let path = PathBuf::from(text(value)?);
    if path.is_absolute() { Ok(path) } else { Err("an absolute path is wanted".into()) }
}

pub(super) fn one_of(value: &Value, allowed: &[&str], later: &[&str]) -> Result<String, String> {
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
pub(super) fn socket_address(text: &str) -> Result<SocketAddr, String> {
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

pub(super) fn ports(value: &Value) -> Result<(u16, u16), String> {
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

pub(super) fn read_gpus(value: &Value) -> Result<Gpus, String> {
    match value {
        Value::String(s) if s == "all" => Ok(Gpus::All),
        Value::List(list) if list.is_empty() => Err("the list is empty: no GPU would be served".into()),
        Value::List(_) => gpu_list(value).map(Gpus::These),
        _ => Err("\"all\" or a list of indices and UUIDs is wanted; to serve one GPU write [0]".into()),
    }
}

pub(super) fn gpu_list(value: &Value) -> Result<Vec<GpuChoice>, String> {
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

pub(super) fn show_gpus(gpus: &Gpus) -> String {
    match gpus {
        Gpus::All => "all".into(),
        Gpus::These(these) => list(these),
    }
}

pub(super) fn duration(value: &Value) -> Result<Duration, String> {
    let bad = "a duration like \"90s\", \"10min\" or \"1h 30min\" is wanted; 0 is off";
    match value {
        Value::Integer(s) => u64::try_from(*s).map(Duration::from_secs).map_err(|_| bad.into()),
        Value::String(s) => parse_duration(s).map_err(|_| bad.into()),
        _ => Err(bad.into()),
    }
}

/// Parses "50%", "64GiB", or a number of bytes.
pub(super) fn part_of_memory(value: &Value) -> Result<Memory, String> {
    let bad = "a percentage like \"50%\", a size in KiB, MiB, GiB or a number of bytes is wanted; 0 is none";
    let parsed = match value {
        Value::Integer(bytes) => u64::try_from(*bytes).ok().map(Memory::Bytes),
        Value::String(text) => Memory::parse(text).ok(),
        _ => None,
    };
    parsed.ok_or_else(|| bad.into())
}

/// Parses "8GiB", or a number of bytes.
pub(super) fn size(value: &Value) -> Result<u64, String> {
    match value {
        Value::Integer(bytes) => u64::try_from(*bytes).map_err(|_| "a size is not negative".into()),
        Value::String(text) => parse_size(text),
        _ => Err("a size like \"4000MiB\", \"8GiB\" or bytes is wanted".into()),
    }
}

pub(super) fn list<T: fmt::Display>(items: &[T]) -> String {
    let items: Vec<_> = items.iter().map(ToString::to_string).collect();
    format!("[{}]", items.join(", "))
}

/// Derives the server's name from the host's name.
pub(super) fn name_from_host(host: &str) -> Option<String> {
    let name = host.split('.').next()?.to_ascii_lowercase();
    is_name(&name).then_some(name)
}
