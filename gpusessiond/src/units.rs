//! Values of this client only: shares of multiprocessors, addresses, elements of object paths.

use std::str::FromStr;

use serde::Deserialize;

/// Port of the control plane if an address has none.
pub const CONTROL_PORT: u16 = 7601;

/// Limit on each GPU's multiprocessors for a program of the lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "PercentOrWord")]
pub enum SmPercent {
    /// From 1 to 100.
    Percent(u32),
    /// Under MPS the lease's share of the memory, otherwise all.
    Auto,
}

impl Default for SmPercent {
    fn default() -> Self {
        Self::Percent(100)
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum PercentOrWord {
    Percent(i64),
    Word(String),
}

impl TryFrom<PercentOrWord> for SmPercent {
    type Error = String;

    fn try_from(read: PercentOrWord) -> Result<Self, String> {
        match read {
            PercentOrWord::Word(word) if word == "auto" => Ok(Self::Auto),
            PercentOrWord::Percent(percent @ 1..=100) => Ok(Self::Percent(percent as u32)),
            PercentOrWord::Percent(n) => Err(format!("{n} is not between 1 and 100")),
            PercentOrWord::Word(word) => {
                Err(format!("{word:?} is neither a number from 1 to 100 nor \"auto\""))
            }
        }
    }
}

impl FromStr for SmPercent {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        text.parse().map_or_else(|_| PercentOrWord::Word(text.into()), PercentOrWord::Percent).try_into()
    }
}

/// Validates an address (HOST, HOST:PORT, V6 or [V6]:PORT); adds the default port if it has none.
pub fn control_address(text: &str) -> Result<String, String> {
    with_port(text.trim(), CONTROL_PORT)
}

fn with_port(text: &str, default: u16) -> Result<String, String> {
    let bad =
        |why: &str| Err(format!("`{text}` is not an address: {why} (HOST, HOST:PORT, V6 or [V6]:PORT)"));
    let (host, port) = if let Some(rest) = text.strip_prefix('[') {
        let Some((v6, after)) = rest.split_once(']') else { return bad("`]` is missing") };
        if v6.parse::<std::net::Ipv6Addr>().is_err() {
            return bad("no IPv6 address between the brackets");
        }
        match after.strip_prefix(':') {
            Some(port) => (format!("[{v6}]"), Some(port)),
            None if after.is_empty() => (format!("[{v6}]"), None),
            None => return bad("only a port may follow `]`"),
        }
    } else {
        match text.matches(':').count() {
            0 => (text.to_owned(), None),
            1 => {
                let (host, port) = text.split_once(':').unwrap_or((text, ""));
                (host.to_owned(), Some(port))
            }
            // Without a port: its last part is one of the address.
            _ if text.parse::<std::net::Ipv6Addr>().is_ok() => (format!("[{text}]"), None),
            _ => return bad("no name or IPv6 address"),
        }
    };
    if host.is_empty() || host.contains(|c: char| c.is_whitespace() || c.is_control() || c == '/' || c == '@')
    {
        return bad("no host");
    }
    let port = match port {
        None => default,
        Some(port) => match port.parse::<u16>() {
            Ok(port) if port > 0 => port,
            _ => return bad("the port is a number from 1 to 65535"),
        },
    };
    Ok(format!("{host}:{port}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        assert_eq!(control_address("gpu1").as_deref(), Ok("gpu1:7601"));
        assert_eq!(control_address("gpu1:55001").as_deref(), Ok("gpu1:55001"));
        assert_eq!(control_address("[::1]").as_deref(), Ok("[::1]:7601"));
        assert_eq!(control_address("[fe80::1]:9").as_deref(), Ok("[fe80::1]:9"));
        assert_eq!(control_address("::1").as_deref(), Ok("[::1]:7601"));
        assert_eq!(control_address("fe80::1:7601").as_deref(), Ok("[fe80::1:7601]:7601"));
        for bad in [
            "",
            ":1",
            "a:",
            "a:0",
            "a:70000",
            "::g",
            "1:2:3",
            "fe80::1%eth0",
            "[::1",
            "[x]:1",
            "a b",
            "http://a",
        ] {
            assert!(control_address(bad).is_err(), "{bad}");
        }
    }
}
