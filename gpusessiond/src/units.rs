//! Values in configuration files and on the command line: sizes, percentages, times, addresses.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// Port of the control plane if an address has none.
pub const CONTROL_PORT: u16 = 7601;

/// Limit on each GPU's memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Memory {
    /// Percentage of the GPU's memory, above 0 and at most 100.
    Percent(f64),
    /// Bytes, above 0.
    Bytes(u64),
}

impl Default for Memory {
    fn default() -> Self {
        Self::Percent(100.0)
    }
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Percent(p) => write!(f, "{p}%"),
            Self::Bytes(b) => f.write_str(&human_bytes(*b)),
        }
    }
}

impl FromStr for Memory {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        if let Some(number) = text.strip_suffix('%') {
            let percent: f64 = number.trim().parse().map_err(|_| format!("`{text}` is not a percentage"))?;
            if !(percent > 0.0 && percent <= 100.0) {
                return Err(format!("`{text}`: a share of memory is above 0% and at most 100%"));
            }
            return Ok(Self::Percent(percent));
        }
        match parse_bytes(text)? {
            0 => Err("a memory limit of 0 leaves nothing to use".into()),
            bytes => Ok(Self::Bytes(bytes)),
        }
    }
}

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

impl<'de> Deserialize<'de> for Memory {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl de::Visitor<'_> for Visitor {
            type Value = Memory;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a size such as \"4000MiB\", a share such as \"50%\", or bytes")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Memory, E> {
                text.parse().map_err(E::custom)
            }
            fn visit_u64<E: de::Error>(self, bytes: u64) -> Result<Memory, E> {
                i64::try_from(bytes).map_err(E::custom).and_then(|bytes| self.visit_i64(bytes))
            }
            fn visit_i64<E: de::Error>(self, bytes: i64) -> Result<Memory, E> {
                u64::try_from(bytes)
                    .ok()
                    .filter(|b| *b > 0)
                    .map(Memory::Bytes)
                    .ok_or_else(|| E::custom("bytes of memory are above 0"))
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

impl Serialize for Memory {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Percent(percent) => serializer.serialize_str(&format!("{percent}%")),
            Self::Bytes(bytes) => serializer.serialize_u64(*bytes),
        }
    }
}

/// Parses a size: bytes, or a number with KiB, MiB, GiB or TiB.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let shift = match unit.trim() {
        "" | "B" => 0,
        "KiB" => 10,
        "MiB" => 20,
        "GiB" => 30,
        "TiB" => 40,
        other => {
            let hint = match other.to_ascii_lowercase().as_str() {
                "k" | "kb" | "kib" => ": write KiB",
                "m" | "mb" | "mib" => ": write MiB",
                "g" | "gb" | "gib" => ": write GiB",
                "t" | "tb" | "tib" => ": write TiB",
                _ => ": use KiB, MiB, GiB or plain bytes",
            };
            return Err(format!("`{text}` is not a size{hint}"));
        }
    };
    if shift == 0 {
        return number.parse().map_err(|_| format!("`{text}` is not a size in whole bytes"));
    }
    let number: f64 = number.parse().map_err(|_| format!("`{text}` is not a size"))?;
    let bytes = number * (1u64 << shift) as f64;
    if bytes < 0.0 || bytes >= (1u64 << 60) as f64 {
        return Err(format!("`{text}` is out of range"));
    }
    Ok(bytes as u64)
}

/// Formats a size for users: `15.9 GiB`.
pub fn human_bytes(bytes: u64) -> String {
    for (shift, unit) in [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")] {
        if bytes >= 1 << shift {
            let value = bytes as f64 / (1u64 << shift) as f64;
            return if value.fract() < 0.05 || value >= 100.0 {
                format!("{value:.0} {unit}")
            } else {
                format!("{value:.1} {unit}")
            };
        }
    }
    format!("{bytes} B")
}

/// Formats a duration for users: `3 h 20 min`, `45 s`.
pub fn human_duration(duration: std::time::Duration) -> String {
    let s = duration.as_secs();
    match s {
        0..=59 => format!("{s} s"),
        60..=3599 => format!("{} min", s / 60),
        3600..=86_399 => format!("{} h {} min", s / 3600, s % 3600 / 60),
        _ => format!("{} d {} h", s / 86_400, s % 86_400 / 3600),
    }
}

/// Parses a duration as systemd.time does: `90`, `30s`, `10min`, `1d 12h`.
///
/// Plain numbers are seconds.
pub fn parse_duration(text: &str) -> Result<std::time::Duration, String> {
    let bad = || format!("`{text}` is not a duration: write 30s, 10min, 24h or 7d");
    let mut rest = text.trim();
    let mut total = std::time::Duration::ZERO;
    if rest.is_empty() {
        return Err(bad());
    }
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        let number: u64 = rest[..digits].parse().map_err(|_| bad())?;
        rest = rest[digits..].trim_start();
        let letters = rest.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(rest.len());
        let unit = match &rest[..letters] {
            "us" | "usec" => 1,
            "ms" | "msec" => 1_000,
            "" | "s" | "sec" | "second" | "seconds" => 1_000_000,
            "m" | "min" | "minute" | "minutes" => 60_000_000,
            "h" | "hr" | "hour" | "hours" => 3_600_000_000,
            "d" | "day" | "days" => 86_400_000_000,
            "w" | "week" | "weeks" => 604_800_000_000,
            _ => return Err(bad()),
        };
        rest = rest[letters..].trim_start();
        let part = number.checked_mul(unit).map(std::time::Duration::from_micros);
        total = part.and_then(|p| total.checked_add(p)).ok_or_else(bad)?;
    }
    Ok(total)
}

/// Validates an address (HOST, HOST:PORT, V6 in brackets) and adds the default port if it has none.
pub fn control_address(text: &str) -> Result<String, String> {
    with_port(text.trim(), CONTROL_PORT)
}

fn with_port(text: &str, default: u16) -> Result<String, String> {
    let bad = |why: &str| Err(format!("`{text}` is not an address: {why} (HOST, HOST:PORT or [V6]:PORT)"));
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
            _ => return bad("an IPv6 address goes into brackets"),
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

/// Escapes one element of a D-Bus object path as sd-bus does (`GPU-ab` → `GPU_2dab`).
pub fn path_element(text: &str) -> String {
    if text.is_empty() {
        return "_".into();
    }
    let mut out = String::with_capacity(text.len());
    for (i, byte) in text.bytes().enumerate() {
        if byte.is_ascii_alphabetic() || (byte.is_ascii_digit() && i > 0) {
            out.push(byte as char);
        } else {
            out.push_str(&format!("_{byte:02x}"));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        assert_eq!("50%".parse(), Ok(Memory::Percent(50.0)));
        assert_eq!("31.4%".parse(), Ok(Memory::Percent(31.4)));
        assert_eq!("4000MiB".parse(), Ok(Memory::Bytes(4000 << 20)));
        assert_eq!("1.5 GiB".parse(), Ok(Memory::Bytes(3 << 29)));
        assert_eq!("1024".parse(), Ok(Memory::Bytes(1024)));
        for bad in ["0%", "101%", "-1%", "NaN%", "0", "", "4000MB", "1e99GiB", "GiB", "12 apples"] {
            assert!(bad.parse::<Memory>().is_err(), "{bad}");
        }
        assert_eq!("4000MB".parse::<Memory>().unwrap_err(), "`4000MB` is not a size: write MiB");
        assert_eq!(human_bytes(16 << 30), "16 GiB");
        assert_eq!(human_bytes((3 << 29) + 1), "1.5 GiB");
    }

    #[test]
    fn durations() {
        use std::time::Duration;
        assert_eq!(parse_duration("90"), Ok(Duration::from_secs(90)));
        assert_eq!(parse_duration("1d 12h"), Ok(Duration::from_secs(36 * 3600)));
        assert_eq!(parse_duration("10min"), Ok(Duration::from_secs(600)));
        for bad in ["", "h", "10 apples", "-1s", "99999999999999999999", "99999999999999w"] {
            assert!(parse_duration(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn addresses() {
        assert_eq!(control_address("gpu1").as_deref(), Ok("gpu1:7601"));
        assert_eq!(control_address("gpu1:55001").as_deref(), Ok("gpu1:55001"));
        assert_eq!(control_address("[::1]").as_deref(), Ok("[::1]:7601"));
        assert_eq!(control_address("[fe80::1]:9").as_deref(), Ok("[fe80::1]:9"));
        for bad in ["", ":1", "a:", "a:0", "a:70000", "::1", "[::1", "[x]:1", "a b", "http://a"] {
            assert!(control_address(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn escapes_like_sd_bus() {
        assert_eq!(path_element("GPU-ab"), "GPU_2dab");
        assert_eq!(path_element("7abc"), "_37abc");
        assert_eq!(path_element(""), "_");
        assert_eq!(path_element("ä_"), "_c3_a4_5f");
    }
}
