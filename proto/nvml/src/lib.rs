//! The table of NVML calls: how `libnvidia-ml.so.1` treats each, and how forwarded ones travel.
//!
//! `symbols.txt` names every exported function (NVML 13.5), `calls.txt` states the treatment of
//! each and generates the exports. Client, server and the server's monitor read the same rows, so
//! that queries and answers agree.
//!
//! A forwarded call is a query about one device: the function's name and its input. The input has
//! these parts in the order of the parameters:
//!
//! * 4 or 8 little-endian bytes for a number,
//! * 16 bytes (a UUID) for a peer,
//! * a structure's bytes.
//!
//! The answer is NVML's result and, after success, the outputs in order:
//!
//! * the bytes of `out` and `struct`,
//! * `text` and `bytes` after a 4-byte length,
//! * the arrays of `list` after a 4-byte count.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::LazyLock;

const SYMBOLS: &str = include_str!("../symbols.txt");
const CALLS: &str = include_str!("../calls.txt");

/// Room for a `text`, in bytes: more than any string that NVML returns.
pub const TEXT: usize = 128;
/// Room for a `list`, in elements.
pub const LIST: usize = 256;
/// Longest input of a query, in bytes.
pub const MAX_INPUT: usize = 4096;
/// The only call whose query differs from its C prototype: each query is about one value.
pub const FIELD_VALUES: &str = "nvmlDeviceGetFieldValues";

/// Treatment of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Class {
    /// Answered by the library.
    Local,
    /// A query to the server.
    Forward(Refresh, Vec<Param>),
    /// `NVML_ERROR_NO_PERMISSION`, for this reason.
    Denied(&'static str),
    /// `NVML_ERROR_NOT_SUPPORTED`, for this reason.
    None(&'static str),
}

/// Time for which an answer is valid, and whether the library fetches it ahead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refresh {
    /// Valid while the driver runs; fetched together with others of its kind.
    Once,
    /// Valid for a moment; fetched together with others of its kind.
    Live,
    /// Valid for a moment; fetched together with others of its kind, if it is one of those that
    /// programs usually call.
    Link,
    /// Valid for a moment; fetched only when a program calls it.
    Alone,
}

/// A parameter after the device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Param {
    /// A number of 4 or 8 bytes, and the values to fetch ahead.
    Number(usize, Vec<u64>),
    /// Another device of the lease.
    Peer,
    /// A pointer to N bytes that NVML writes.
    Out(usize),
    /// A pointer to a structure of one of these sizes, whose first word is size and version.
    Struct(Vec<usize>),
    /// A pointer to characters, and the room for them.
    Text,
    /// A pointer to bytes, and the room for them, at most N.
    Bytes(usize),
    /// A pointer to a count, and pointers to arrays of elements of these sizes.
    List(Vec<usize>),
}

impl Param {
    /// Returns the number of C arguments.
    pub fn arguments(&self) -> usize {
        match self {
            Self::Text | Self::Bytes(_) => 2,
            Self::List(arrays) => 1 + arrays.len(),
            _ => 1,
        }
    }

    /// Returns the maximum number of output bytes.
    pub fn output(&self) -> usize {
        match self {
            Self::Number(..) | Self::Peer => 0,
            Self::Out(n) => *n,
            Self::Struct(sizes) => sizes.iter().copied().max().unwrap_or(0),
            Self::Text => 4 + TEXT,
            Self::Bytes(n) => 4 + n,
            Self::List(arrays) => 4 + LIST * arrays.iter().sum::<usize>(),
        }
    }
}

/// A call and its treatment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    /// Exported name.
    pub name: &'static str,
    /// Treatment of the call.
    pub class: Class,
    /// Whether the exported function of a forwarded call is written by hand.
    pub own_client: bool,
}

impl Call {
    /// Returns the number of C arguments of a forwarded call, including the device.
    pub fn arguments(&self) -> usize {
        match &self.class {
            Class::Forward(_, params) => 1 + params.iter().map(Param::arguments).sum::<usize>(),
            _ => 0,
        }
    }

    /// Returns the maximum number of bytes of an answer's outputs.
    pub fn output(&self) -> usize {
        match &self.class {
            Class::Forward(_, params) => params.iter().map(Param::output).sum(),
            _ => 0,
        }
    }

    /// Checks whether an input fits this call; returns the devices in it.
    pub fn peers<'a>(&self, input: &'a [u8]) -> Option<Vec<&'a [u8]>> {
        let Class::Forward(_, params) = &self.class else { return None };
        let (mut rest, mut peers) = (input, Vec::new());
        for param in params {
            let length = match param {
                Param::Number(n, _) => *n,
                Param::Peer => 16,
                Param::Struct(sizes) => struct_size(rest).filter(|n| sizes.contains(n))?,
                _ => 0,
            };
            let (mine, left) = rest.split_at_checked(length)?;
            if *param == Param::Peer {
                peers.push(mine);
            }
            rest = left;
        }
        rest.is_empty().then_some(peers)
    }

    /// Returns the inputs to fetch ahead.
    pub fn ahead(&self) -> Vec<Vec<u8>> {
        let params = match &self.class {
            Class::Forward(Refresh::Once | Refresh::Live | Refresh::Link, params) => params,
            _ => return Vec::new(),
        };
        let mut inputs = vec![Vec::new()];
        for param in params {
            match param {
                Param::Number(n, values) => {
                    inputs = inputs
                        .iter()
                        .flat_map(|i| values.iter().map(|v| [&i[..], &v.to_le_bytes()[..*n]].concat()))
                        .collect();
                }
                // Only the program knows the version of its structure.
                Param::Peer | Param::Struct(_) => return Vec::new(),
                _ => {}
            }
        }
        inputs
    }
}

/// Returns the size in a versioned structure's first four bytes.
pub fn struct_size(bytes: &[u8]) -> Option<usize> {
    let version = u32::from_le_bytes(bytes.get(..4)?.try_into().ok()?);
    Some((version & 0xff_ffff) as usize)
}

static TABLE: LazyLock<Vec<Call>> = LazyLock::new(parse);

/// Returns every exported call, sorted by name.
pub fn calls() -> &'static [Call] {
    &TABLE
}

/// Returns a call by its name, with its index in [`calls`].
pub fn find(name: &str) -> Option<(usize, &'static Call)> {
    let place = TABLE.binary_search_by(|c| c.name.cmp(name)).ok()?;
    Some((place, &TABLE[place]))
}

fn parse() -> Vec<Call> {
    let known: Vec<&str> = SYMBOLS.lines().filter(|l| !l.is_empty()).collect();
    let mut table: BTreeMap<&str, Class> = BTreeMap::new();
    let mut patterns = Vec::new();
    let mut own_clients = Vec::new();
    let wrong = |line: &str| -> ! { panic!("calls.txt: {line:?}") };
    for line in CALLS.lines().filter(|l| !l.is_empty() && !l.starts_with('#')) {
        let (verb, rest) = line.split_once(' ').unwrap_or_else(|| wrong(line));
        let refresh = match verb.trim_end_matches('*') {
            "once" => Refresh::Once,
            "live" => Refresh::Live,
            "link" => Refresh::Link,
            "alone" => Refresh::Alone,
            "local" => {
                for name in rest.split_whitespace() {
                    assert!(table.insert(name, Class::Local).is_none(), "calls.txt: {name} twice");
                }
                continue;
            }
            "denied" | "none" => {
                let (names, reason) = rest.split_once('|').unwrap_or_else(|| wrong(line));
                let class = if verb == "none" { Class::None } else { Class::Denied };
                patterns.extend(names.split_whitespace().map(|p| (p, class(reason.trim()))));
                continue;
            }
            _ => wrong(line),
        };
        let (name, params) =
            rest.strip_suffix(')').and_then(|r| r.split_once('(')).unwrap_or_else(|| wrong(line));
        if verb.ends_with('*') {
            own_clients.push(name);
        }
        let params = params.split(',').map(|p| param(p.trim()).unwrap_or_else(|| wrong(line))).collect();
        assert!(table.insert(name, Class::Forward(refresh, params)).is_none(), "calls.txt: {name} twice");
    }
    for name in table.keys() {
        assert!(known.contains(name), "calls.txt: NVML exports no {name}");
    }
    let fits = |pattern: &str, name: &str| match pattern.strip_suffix('*') {
        Some(prefix) => name.starts_with(prefix),
        None => pattern == name,
    };
    let mut calls: Vec<Call> = known
        .into_iter()
        .map(|name| {
            let class = table.remove(name).unwrap_or_else(|| {
                let found = patterns.iter().find(|(pattern, _)| fits(pattern, name));
                found.unwrap_or_else(|| panic!("calls.txt says nothing of {name}")).1.clone()
            });
            Call { name, class, own_client: own_clients.contains(&name) }
        })
        .collect();
    calls.sort_by_key(|c| c.name);
    calls
}

/// Returns the numbers of `5` or `0..3`; `0..3@5` stands for field 5 of the parts 0 to 3.
fn values(text: &str) -> Option<Vec<u64>> {
    let (range, field) = match text.split_once('@') {
        Some((range, field)) => (range, Some(field.parse::<u64>().ok()?)),
        None => (text, None),
    };
    let (first, last) = range.split_once("..").unwrap_or((range, range));
    let numbers = first.parse::<u64>().ok()?..=last.parse().ok()?;
    Some(numbers.map(|number| field.map_or(number, |field| field | number << 32)).collect())
}

fn param(text: &str) -> Option<Param> {
    let mut words = text.split_whitespace();
    let kind = words.next()?;
    let numbers: Vec<&str> = words.collect();
    let sizes = || numbers.iter().map(|n| n.parse().ok()).collect::<Option<Vec<usize>>>();
    Some(match kind {
        "u32" | "u64" => {
            let values = numbers.first().map_or(Some(Vec::new()), |word| values(word))?;
            Param::Number(if kind == "u32" { 4 } else { 8 }, values)
        }
        "peer" => Param::Peer,
        "out" => Param::Out(*sizes()?.first()?),
        "struct" => Param::Struct(sizes()?),
        "text" => Param::Text,
        "bytes" => Param::Bytes(*sizes()?.first()?),
        "list" => Param::List(sizes()?),
        _ => return None,
    })
}

/// Returns `docs/coverage-nvml.md`: the treatment of every call.
pub fn coverage() -> String {
    let count = |f: fn(&Class) -> bool| calls().iter().filter(|c| f(&c.class)).count();
    let mut out = String::from(
        "# NVML calls\n\nGenerated from `proto/nvml/calls.txt` and `proto/nvml/symbols.txt` (`make docs`).\n\n",
    );
    writeln!(
        out,
        "{} calls: {} answered by the library, {} forwarded to the server, {} refused (`NVML_ERROR_NO_PERMISSION`), {} not \
         supported (`NVML_ERROR_NOT_SUPPORTED`).\n",
        calls().len(),
        count(|c| *c == Class::Local),
        count(|c| matches!(c, Class::Forward(..))),
        count(|c| matches!(c, Class::Denied(_))),
        count(|c| matches!(c, Class::None(_)))
    )
    .expect("a string grows");
    out.push_str("| call | answer |\n|---|---|\n");
    for call in calls() {
        let answer = match &call.class {
            Class::Local => "local".to_string(),
            Class::Forward(Refresh::Once, _) => "forwarded, once".to_string(),
            Class::Forward(..) => "forwarded".to_string(),
            Class::Denied(reason) => format!("no permission: {reason}"),
            Class::None(reason) => format!("not supported: {reason}"),
        };
        writeln!(out, "| `{}` | {answer} |", call.name).expect("a string grows");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_whole() {
        assert_eq!(calls().len(), 434);
        assert!(calls().iter().all(|c| c.arguments() <= 6 && c.output() <= 5000));
        assert_eq!(find("nvmlInit").unwrap().1.class, Class::Local);
        assert!(find("nvmlNever").is_none());
        let pattern_hides_nothing =
            |name: &str| !matches!(find(name).unwrap().1.class, Class::None(_) | Class::Denied(_));
        assert!(["nvmlDeviceGetMigMode", "nvmlEventSetCreate"].into_iter().all(pattern_hides_nothing));
    }

    #[test]
    fn inputs_are_checked() {
        let call = |name| find(name).unwrap().1;
        assert_eq!(call("nvmlDeviceGetTemperature").peers(&[0; 4]), Some(vec![]));
        assert_eq!(call("nvmlDeviceGetTemperature").peers(&[0; 5]), None);
        assert_eq!(call("nvmlDeviceGetTemperature").peers(&[0; 3]), None);
        assert_eq!(call("nvmlDeviceOnSameBoard").peers(&[7; 16]), Some(vec![&[7; 16][..]]));
        let mut info = vec![0; 12];
        info[..4].copy_from_slice(&(12u32 | 1 << 24).to_le_bytes());
        assert_eq!(call("nvmlDeviceGetTemperatureV").peers(&info), Some(vec![]));
        info[0] = 16;
        assert_eq!(call("nvmlDeviceGetTemperatureV").peers(&info), None);
        assert_eq!(call("nvmlDeviceSetPersistenceMode").peers(&[]), None);
    }

    #[test]
    fn ahead_is_every_combination() {
        let ahead = find("nvmlDeviceGetTotalEccErrors").unwrap().1.ahead();
        assert_eq!(ahead.len(), 4);
        assert_eq!(ahead[1], [0, 0, 0, 0, 1, 0, 0, 0]);
        assert!(find("nvmlDeviceGetSamples").unwrap().1.ahead().is_empty());
        assert_eq!(find("nvmlDeviceGetPowerUsage").unwrap().1.ahead(), [vec![]]);
        let link = find("nvmlDeviceGetFieldValues").unwrap().1.ahead();
        assert_eq!((link.len(), &link[2][..]), (18, &[165, 0, 0, 0, 2, 0, 0, 0][..]));
        for kind in [Refresh::Once, Refresh::Live, Refresh::Link] {
            let of_kind = |c: &&Call| matches!(c.class, Class::Forward(refresh, _) if refresh == kind);
            let all: usize = calls().iter().filter(of_kind).map(|c| c.ahead().len()).sum();
            assert!((1..128).contains(&all), "{kind:?}: {all} questions ahead");
        }
    }
}
