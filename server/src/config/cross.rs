//! Checks that concern several keys together.

use std::net::SocketAddr;
use std::path::Path;

use super::checked::Config;
use super::keys::{GpuSharing, gpu_sharing_key};
use super::origin::{ConfigError, Origin};
use super::raw::Raw;
use super::values::{GpuChoice, Mps};

/// Rejects a configuration with two listeners on one port.
///
/// Ports of other programs are known only when the server binds its own.
pub(super) fn check_ports(
    raw: &Raw,
    listen: SocketAddr,
    data_ports: (u16, u16),
    metrics: Option<SocketAddr>,
) -> Result<(), ConfigError> {
    let data = SocketAddr::new(listen.ip(), data_ports.0);
    let mut listeners = vec![("listen", listen), ("data_ports", data)];
    listeners.extend(metrics.map(|address| ("metrics_listen", address)));
    // The data port moves to the next port of its range if the control service has the first.
    let apart = |a, b| (a, b) == ("listen", "data_ports") && data_ports.0 != data_ports.1;
    for (i, (other, taken)) in listeners.iter().enumerate() {
        for (key, address) in listeners.iter().skip(i + 1) {
            if apart(*other, *key) || !overlap(*taken, *address) {
                continue;
            }
            // Report the key that the configuration sets, not one with its default.
            let (key, other) = if raw.keys.contains_key(key) { (key, other) } else { (other, key) };
            if let Some((value, origin)) = raw.keys.get(key) {
                let port = address.port();
                let why =
                    format!("{key} = {value}: port {port} is also the port of {other}; change one of them");
                return Err(ConfigError::new(origin.clone(), why));
            }
        }
    }
    Ok(())
}

/// Returns `true` if two sockets cannot listen on both addresses; [::] includes IPv4.
fn overlap(a: SocketAddr, b: SocketAddr) -> bool {
    let all = |all: SocketAddr, of: SocketAddr| all.ip().is_unspecified() && (all.is_ipv6() || of.is_ipv4());
    a.port() == b.port() && a.port() != 0 && (a.ip() == b.ip() || all(a, b) || all(b, a))
}

/// Rejects a GPU with two ways of sharing.
pub(super) fn check_gpu_sharing(raw: &Raw, gpu_sharing: &GpuSharing) -> Result<(), ConfigError> {
    let mut seen: Vec<(&GpuChoice, &str)> = Vec::new();
    for (gpu, sharing) in gpu_sharing.listed() {
        let key = gpu_sharing_key(sharing);
        if let Some((_, other)) = seen.iter().find(|(known, _)| *known == gpu)
            && let Some((value, origin)) = raw.keys.get(key)
        {
            let why = format!("{key} = {value}: {other} names {gpu} already; name it once");
            return Err(ConfigError::new(origin.clone(), why));
        }
        seen.push((gpu, key));
    }
    Ok(())
}

/// Warns of MPS keys that have no effect.
pub(super) fn mps_without_effect(raw: &Raw, mps: Option<&Mps>) -> Option<String> {
    let written = |key: &str| raw.keys.contains_key(key);
    (mps.is_none() && ["mps_domain", "mps_control"].iter().any(|key| written(key))).then(|| {
        "mps_domain and mps_control have no effect without sharing = \"mps\" or gpu_sharing.mps".into()
    })
}

/// Checks that MPS can use its folder below `runtime_dir`.
pub(super) fn check_mps_folder(raw: &Raw, runtime_dir: &Path) -> Result<(), ConfigError> {
    let folder = runtime_dir.join("mps");
    crate::mps::check_folder(&folder).map_err(|m| {
        let origin = raw.keys.get("runtime_dir").map_or(Origin::Default, |(_, origin)| origin.clone());
        ConfigError::new(origin, format!("runtime_dir: {m}"))
    })
}

/// Returns texts about settings that work, but probably not as intended.
pub(super) fn cross_warnings(config: &Config, ephemeral: Option<(u16, u16)>) -> Vec<String> {
    let mut warnings = Vec::new();
    let overcommit_percent = config.rules.overcommit_percent;
    let idle = config.limits.of("", "").idle();
    if overcommit_percent > 100 {
        warnings.push(format!(
            "overcommit = \"{overcommit_percent}%\": programs may find less memory than their lease promises"
        ));
    }
    if let Some(address) = config.metrics_listen.filter(|a| !a.ip().is_loopback()) {
        warnings.push(format!(
            "metrics_listen = {address}: any peer can read names of clients and servers; let only Prometheus reach it"
        ));
    }
    if config.encryption && !config.trusted_networks.is_empty() {
        warnings.push("trusted_networks has no effect while encryption = \"on\"".into());
    }
    if !config.encryption && config.trusted_networks.is_empty() {
        warnings.push(
            "encryption = \"off\" has no effect without trusted_networks: all data is encrypted".into(),
        );
    }
    if config.mps.is_some() && !idle.park.is_zero() {
        warnings.push(
            "park_after: the driver cannot park programs under MPS, whose users are only warned; programs of \
             leases with sharing = \"time-slice\" are parked"
                .into(),
        );
    }
    let first = [idle.park, idle.release].into_iter().filter(|d| !d.is_zero()).min();
    match first {
        Some(_) if idle.warn.is_zero() => warnings
            .push("warn_after = 0: users are not warned before park_after and release_after".into()),
        Some(first) if idle.warn >= first => warnings.push(
            "warn_after is not below park_after and release_after: users are warned after five sixths of the shorter time"
                .into(),
        ),
        _ => {}
    }
    if let Some((low, high)) = ephemeral {
        for (key, port) in [("listen", config.listen.port()), ("data_ports", config.data_ports.0)] {
            if (low..=high).contains(&port) {
                warnings.push(format!(
                    "{key}: port {port} is inside the kernel's ephemeral range {low}-{high}: another program may \
                     take it before gpuserver starts"
                ));
            }
        }
    }
    warnings
}
