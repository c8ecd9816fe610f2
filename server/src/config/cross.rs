//! Checks that concern several keys together.

use std::net::SocketAddr;

use super::ConfigError;
use super::read::Raw;

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
