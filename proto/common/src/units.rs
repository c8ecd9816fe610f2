//! Sizes, shares of memory and durations, as both daemons and both command lines write them.
//!
//! `fixture.txt` lists accepted and refused texts; both manuals state the syntax.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// Units of sizes, in bytes.
const SIZES: [(u64, &str); 4] = [(1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];

/// Units of durations in nanoseconds, with all names of each; the first one is the shown name.
const TIMES: [(u64, &[&str]); 10] = [
    // 365.25 days and 30.44 days.
    (31_557_600 * SECOND, &["year", "years", "yr", "yrs", "y"]),
    (2_630_016 * SECOND, &["month", "months", "M"]),
    (604_800 * SECOND, &["week", "weeks", "wk", "wks", "w"]),
    (86_400 * SECOND, &["day", "days", "d"]),
    (3_600 * SECOND, &["h", "hr", "hrs", "hour", "hours"]),
    (60 * SECOND, &["m", "min", "mins", "minute", "minutes"]),
    (SECOND, &["s", "sec", "secs", "second", "seconds"]),
    (1_000_000, &["ms", "msec", "millis"]),
    (1_000, &["us", "usec", "µs"]),
    (1, &["ns", "nsec", "nanos"]),
];
const SECOND: u64 = 1_000_000_000;

/// Memory of each GPU: of a lease, of a reserve, or as a limit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Memory {
    /// Percentage of the GPU's memory, up to 100.
    Percent(f64),
    /// Absolute size.
    Bytes(u64),
}

impl Memory {
    /// Parses a percentage from 0% to 100%, or a size.
    pub fn parse(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let Some(number) = text.strip_suffix('%') else { return parse_size(text).map(Self::Bytes) };
        let percent: f64 = number.trim().parse().map_err(|_| format!("`{text}` is not a percentage"))?;
        match (0.0..=100.0).contains(&percent) {
            true => Ok(Self::Percent(percent)),
            false => Err(format!("`{text}`: a share of memory is above 0% and at most 100%")),
        }
    }

    /// Returns `true` if nothing is left to use.
    pub fn is_zero(self) -> bool {
        matches!(self, Self::Bytes(0)) || self == Self::Percent(0.0)
    }

    /// Returns the bytes on a card with `total` bytes.
    pub fn of(self, total: u64) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Percent(percent) if percent >= 100.0 => total,
            // Precise enough: a percentage below 100 of a number below 2^63, rounded down to MiB.
            Self::Percent(percent) => (total as f64 * percent / 100.0) as u64 >> 20 << 20,
        }
    }
}

impl Default for Memory {
    fn default() -> Self {
        Self::Percent(100.0)
    }
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Percent(percent) => write!(f, "{percent}%"),
            Self::Bytes(bytes) => f.write_str(&human_bytes(*bytes)),
        }
    }
}

/// Parses the memory of a lease, which is never zero.
impl FromStr for Memory {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match Self::parse(text)? {
            Self::Bytes(0) => Err("a memory limit of 0 leaves nothing to use".into()),
            zero if zero.is_zero() => {
                Err(format!("`{}`: a share of memory is above 0% and at most 100%", text.trim()))
            }
            memory => Ok(memory),
        }
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
                match bytes {
                    0 => Err(E::custom("bytes of memory are above 0")),
                    bytes => Ok(Memory::Bytes(bytes)),
                }
            }
            fn visit_i64<E: de::Error>(self, bytes: i64) -> Result<Memory, E> {
                self.visit_u64(u64::try_from(bytes).unwrap_or(0))
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

/// Parses a size: whole bytes, or a number with KiB, MiB, GiB or TiB.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let refused = |why: &str| format!("`{text}` is not a size{why}");
    let (number, unit) = Number::split(text);
    let unit = unit.trim_start();
    let bytes = match SIZES.iter().find(|(_, name)| *name == unit) {
        Some((bytes, _)) => *bytes,
        None if matches!(unit, "" | "B") => 1,
        None => {
            // An SI unit is refused, since people write MB and mean either.
            let meant = SIZES.iter().find(|(_, name)| {
                let [short, long] = [&name[..1], name].map(str::to_ascii_lowercase);
                [short.clone(), short + "b", long].contains(&unit.to_ascii_lowercase())
            });
            return Err(match meant {
                Some((_, name)) => refused(&format!(": write {name}")),
                None => refused(": use KiB, MiB, GiB, TiB or plain bytes"),
            });
        }
    };
    if bytes == 1 && !number.is_whole() {
        return Err(refused(" in whole bytes"));
    }
    let size = number.times(bytes).ok_or_else(|| refused(""))?;
    u64::try_from(size).map_err(|_| format!("`{text}` is out of range"))
}

/// Parses a duration as systemd.time does: `90`, `30s`, `10min`, `1d 12h`.
///
/// A whole number without a unit is seconds, and stands last.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let bad = || format!("`{text}` is not a duration: write 30s, 10min, 24h or 7d");
    let mut rest = text.trim();
    let mut total: u128 = 0;
    loop {
        let (number, after) = Number::split(rest);
        let after = after.trim_start();
        let letters = after.find(|c: char| !c.is_alphabetic()).unwrap_or(after.len());
        let (name, next) = after.split_at(letters);
        rest = next.trim_start();
        let unit = match TIMES.iter().find(|(_, names)| names.contains(&name)) {
            Some((unit, _)) => *unit,
            None if name.is_empty() && rest.is_empty() && number.is_whole() => SECOND,
            None => return Err(bad()),
        };
        total = number.times(unit).and_then(|part| total.checked_add(part)).ok_or_else(bad)?;
        if rest.is_empty() {
            break;
        }
    }
    // D-Bus and the protocol carry microseconds in 64 bits.
    let micros = u64::try_from(total / 1000).map_err(|_| bad())?;
    Ok(Duration::from_micros(micros) + Duration::from_nanos((total % 1000) as u64))
}

/// A decimal number as it was written, so that no digit is lost.
struct Number<'a> {
    whole: &'a str,
    fraction: &'a str,
}

impl<'a> Number<'a> {
    /// Splits the number off the start of a text.
    fn split(text: &'a str) -> (Self, &'a str) {
        let digits =
            |text: &'a str| text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()));
        let (whole, rest) = digits(text);
        match rest.strip_prefix('.') {
            Some(after) => {
                let (fraction, rest) = digits(after);
                (Self { whole, fraction }, rest)
            }
            None => (Self { whole, fraction: "" }, rest),
        }
    }

    fn is_whole(&self) -> bool {
        self.fraction.is_empty() && !self.whole.is_empty()
    }

    /// Multiplies, rounding down; `None` without digits and on overflow.
    fn times(&self, unit: u64) -> Option<u128> {
        if self.whole.is_empty() && self.fraction.is_empty() {
            return None;
        }
        let parse = |digits: &str| if digits.is_empty() { Some(0) } else { digits.parse::<u128>().ok() };
        let unit = u128::from(unit);
        // More digits than these change no result: units have fewer.
        let fraction = &self.fraction[..self.fraction.len().min(18)];
        let part = parse(fraction)?.checked_mul(unit)? / 10_u128.pow(fraction.len() as u32);
        parse(self.whole)?.checked_mul(unit)?.checked_add(part)
    }
}

/// Formats a duration so that [`parse_duration`] reads it: `1h 30m`, `90days`.
///
/// Months and years have no whole number of days.
pub fn show_duration(duration: Duration) -> String {
    let mut left = duration.as_nanos();
    let mut parts = Vec::new();
    for (unit, names) in TIMES {
        let unit = u128::from(unit);
        let name = names[0];
        if !matches!(name, "week" | "month" | "year") && left >= unit {
            let number = left / unit;
            // Long names have a plural, which is their second one.
            let plural = names[1].strip_prefix(name) == Some("s") && number > 1;
            parts.push(format!("{number}{}", if plural { names[1] } else { name }));
            left %= unit;
        }
    }
    if parts.is_empty() { "0".into() } else { parts.join(" ") }
}

/// Formats a size for people: `15.9 GiB`.
pub fn human_bytes(bytes: u64) -> String {
    let Some((size, unit)) = SIZES.into_iter().find(|(size, _)| bytes >= *size) else {
        return format!("{bytes} B");
    };
    let value = bytes as f64 / size as f64;
    let digits = if value.fract() < 0.05 || value >= 100.0 { 0 } else { 1 };
    format!("{value:.digits$} {unit}")
}

/// Formats a duration for people: `3 h 20 min`, `45 s`.
pub fn human_duration(duration: Duration) -> String {
    let s = duration.as_secs();
    match s {
        0..=59 => format!("{s} s"),
        60..=3599 => format!("{} min", s / 60),
        3600..=86_399 => format!("{} h {} min", s / 3600, s % 3600 / 60),
        _ => format!("{} d {} h", s / 86_400, s % 86_400 / 3600),
    }
}

/// Returns the known word that is most similar to a written one, if one is similar enough.
pub fn nearest<T: AsRef<str> + Ord>(written: &str, known: impl IntoIterator<Item = T>) -> Option<T> {
    known
        .into_iter()
        .map(|word| (strsim::damerau_levenshtein(word.as_ref(), written), word))
        .min()
        .filter(|(distance, word)| *distance <= 1 + word.as_ref().len() / 3)
        .map(|(_, word)| word)
}

#[cfg(test)]
mod tests;
