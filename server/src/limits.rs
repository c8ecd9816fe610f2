//! Limits of clients and users: their layers, and which of them apply.
//!
//! A limit is set for everybody, a group, a client or a user. A client without a limit of its own
//! or of a group has the limit for everybody. A user's limits apply in addition: the client names
//! the user, so that this name can only lower a limit. The smallest of all applicable limits wins.

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use gpusession_common::keys::Row;
use gpusession_common::units::{Memory, parse_duration, parse_size, show_duration};

use crate::idle::Timeouts;

/// One kind of limit.
#[derive(Debug, Clone, Copy)]
pub struct Limit {
    /// Key in the configuration.
    pub name: &'static str,
    /// Form of the limit's value.
    pub kind: Kind,
    /// Default for everybody, and texts for people.
    pub row: Row,
}

impl Limit {
    /// Returns the value for everybody unless configured.
    pub fn default(&self) -> &'static str {
        self.row.default().unwrap_or_default()
    }
}

/// Form of a limit's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A whole number, of things or of requests.
    Number,
    /// A size in bytes.
    Size,
    /// A size or a percentage of a GPU's memory.
    Memory,
    /// A duration; 0: no limit.
    Time,
    /// A duration of at most 60 s; 0 is the smallest.
    Grace,
    /// A list; empty: no limit.
    Names,
}

/// Defines the limits; a row has the form of a row of `gpusession_common::keys`.
macro_rules! limits {
    ($($(#[doc = $about:literal])+ $name:ident: $kind:ident = $default:tt;)+) => {
        /// All limits.
        pub const LIMITS: &[Limit] = &[$(Limit {
            name: stringify!($name),
            kind: Kind::$kind,
            row: Row {
                section: "",
                name: concat!("limits.", stringify!($name)),
                value: stringify!($default),
                fixed: true,
                live: true,
                about: &[$($about),+],
            },
        }),+];
    };
}

limits! {
    /// GPUs of all leases together.
    gpus: Number = 1;
    /// Memory of each GPU of a lease: percent, or a size.
    memory: Memory = "100%";
    /// Multiprocessors of each GPU of a lease, 1 to 100 percent.
    sm_percent: Number = 100;
    /// Programs at a time.
    workers: Number = 64;
    /// Data connections of programs at a time; one program has up to 17.
    ///
    /// A program has 1, and 17 from its first copy of more than 64 KiB.
    connections: Number = 1088;
    /// Server memory for one program's host memory that its device code can see.
    staging: Size = "4GiB";
    /// Server memory of one program's worker, in addition to staging and parked device memory.
    ///
    /// The server kills a worker with more.
    host_memory: Size = "8GiB";
    /// Server memory of all workers of a client: percent of the host's, or a size.
    ///
    /// Parked device memory counts in addition. The server kills the largest worker.
    host_memory_total: Memory = "50%";
    /// Threads of one program's worker: about one for each of its threads that waits for the GPU.
    threads: Number = 1024;
    /// Weight of a client's processor time against other clients', 1 to 10000.
    ///
    /// It counts only while the processors are busy, and where the service has control groups.
    cpu_weight: Number = 100;
    /// Time for which a lease may be renewed or requested; 0: off.
    ///
    /// Leases of class boot or background have no end.
    /// Off is a time to live of up to 366 days.
    lease_ttl: Time = "24h";
    /// Leases that are renewed without end.
    max_persistent: Number = 2;
    /// Requests to the control service.
    requests_per_s: Number = 100;
    /// Parts of product names that may be leased; none: every model.
    models: Names = [];
    /// Names of servers that may be used; none: every server.
    servers: Names = [];
    /// Measures that a lease may request for its idle time; none: all.
    ///
    /// The measures are park, release, keep (never parked nor released) and hold (never lent).
    on_idle: Names = ["park", "release"];
    /// Time without GPU work, after which the server warns users; 0: never.
    warn_after: Time = "25min";
    /// Time without GPU work, after which the server parks the programs; 0: never.
    park_after: Time = "30min";
    /// Time without GPU work, after which the lease ends; 0: never.
    release_after: Time = 0;
    /// Time without programs, after which the lease lends its GPUs; 0: never.
    lend_after: Time = "10min";
    /// Time for which a worker waits for a program whose connection broke; 0: it ends at once.
    resume_grace: Grace = "60s";
}

/// Limits that a user cannot have: a request does not name its user, and the others count what all
/// users of a client have together.
pub const OF_CLIENTS: [&str; 3] = ["requests_per_s", "host_memory_total", "cpu_weight"];

/// Limits that each lease or program uses up in part.
const COUNTED: [&str; 4] = ["gpus", "workers", "connections", "max_persistent"];

/// Times that are top-level keys for everybody, outside `[limits]`.
pub const TOP_LEVEL: [&str; 5] = ["warn_after", "park_after", "release_after", "lend_after", "resume_grace"];

/// Longest `resume_grace`: a lease lasts no longer without its client.
const LONGEST_GRACE: Duration = Duration::from_secs(60);

/// Words that the limit `on_idle` can list: the values of a lease's key `on_idle`, and `hold`.
pub const ON_IDLE: [&str; 4] = ["park", "release", "keep", "hold"];

/// Value of a limit.
#[derive(Debug, Clone, PartialEq)]
pub enum Bound {
    /// See [`Kind::Number`].
    Number(u64),
    /// See [`Kind::Size`].
    Size(u64),
    /// See [`Kind::Memory`].
    Memory(Memory),
    /// See [`Kind::Time`].
    Time(Duration),
    /// See [`Kind::Grace`].
    Grace(Duration),
    /// See [`Kind::Names`].
    Names(Vec<String>),
}

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(n) => write!(f, "{n}"),
            Self::Size(bytes) | Self::Memory(Memory::Bytes(bytes)) if bytes.is_multiple_of(1 << 20) => {
                write!(f, "{}MiB", bytes >> 20)
            }
            Self::Size(bytes) | Self::Memory(Memory::Bytes(bytes)) => write!(f, "{bytes}"),
            Self::Memory(Memory::Percent(percent)) => write!(f, "{percent}%"),
            Self::Time(time) | Self::Grace(time) => f.write_str(&show_duration(*time)),
            Self::Names(names) => write!(f, "{names:?}"),
        }
    }
}

impl Bound {
    /// Parses the value of a limit of this kind.
    pub fn parse(kind: Kind, text: &str) -> Result<Self, String> {
        let text = text.trim();
        match kind {
            Kind::Number => text.parse().map(Self::Number).map_err(|_| "a whole number is wanted".into()),
            Kind::Size => parse_size(text).map(Self::Size),
            Kind::Memory => parse_memory(text).map(Self::Memory),
            Kind::Time => parse_duration(text)
                .map(Self::Time)
                .map_err(|_| "a duration like \"90s\", \"10min\" or \"24h\" is wanted; 0 is off".into()),
            Kind::Grace => check_grace(parse_duration(text)?).map(Self::Grace),
            Kind::Names => Ok(Self::Names(
                text.trim_start_matches('[')
                    .trim_end_matches(']')
                    .split(',')
                    .map(|n| n.trim().trim_matches('"').to_string())
                    .filter(|n| !n.is_empty())
                    .collect(),
            )),
        }
    }
}

/// Parses the memory of a limit or a reserve: a percentage above 0%, or a size.
pub fn parse_memory(text: &str) -> Result<Memory, String> {
    match Memory::parse(text)? {
        Memory::Percent(0.0) => Err("a percentage above 0% and up to 100% is wanted".into()),
        memory => Ok(memory),
    }
}

/// Checks a time for which a worker waits for its program.
pub fn check_grace(time: Duration) -> Result<Duration, String> {
    if time <= LONGEST_GRACE { Ok(time) } else { Err("at most 60 s are possible".into()) }
}

/// Clients and users for whom a limit is set.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Layer {
    /// Every client without a limit of its own.
    Default,
    /// Each client and each user of a group.
    Group(String),
    /// One client.
    Client(String),
    /// One user.
    User(String),
}

impl fmt::Display for Layer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("everybody"),
            Self::Group(name) => write!(f, "group {name}"),
            Self::Client(name) => write!(f, "client {name}"),
            Self::User(name) => write!(f, "user {name}"),
        }
    }
}

/// A limit as it was set.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    /// Key in the configuration.
    pub name: &'static str,
    /// Clients and users for whom it is set.
    pub layer: Layer,
    /// Configured value.
    pub bound: Bound,
    /// File and line that set it.
    pub origin: String,
    /// Whether it counts what a user has rather than a client; known once it is applied.
    pub of_user: bool,
}

/// Members of a group.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Group {
    /// Patterns of clients' names.
    pub clients: Vec<String>,
    /// Names of users.
    pub users: Vec<String>,
}

/// Whether a user name means the same user on every client.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Scope {
    /// `alice` on two clients is two users.
    #[default]
    Client,
    /// `alice` is one user everywhere.
    Site,
}

/// All limits of a server.
#[derive(Debug, Clone, Default)]
pub struct Limits {
    /// Configured limits, one for each name and layer.
    pub entries: Vec<Entry>,
    /// Groups by name.
    pub groups: Vec<(String, Group)>,
    /// Value of the key `scope` in `[users]`.
    pub scope: Scope,
    /// Limits of a client for which no other layer applies: the usual case, computed once.
    pub(crate) everybody: OnceLock<Arc<[Entry]>>,
}

/// Returns `true` if `name` fits a pattern in which `*` stands for any text.
pub fn fits(pattern: &str, name: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == name,
        Some((start, rest)) => {
            let Some(name) = name.strip_prefix(start) else { return false };
            (0..=name.len()).filter(|i| name.is_char_boundary(*i)).any(|i| fits(rest, &name[i..]))
        }
    }
}

impl Limits {
    fn group(&self, name: &str) -> Option<&Group> {
        self.groups.iter().find(|(n, _)| n == name).map(|(_, group)| group)
    }

    /// Describes limits of users that have no effect, because no client may have more.
    pub fn without_effect(&self) -> Vec<String> {
        let size = |bound: &Bound| match bound {
            Bound::Number(n) | Bound::Size(n) => Some(*n),
            // Zero is never, so it counts as the longest time.
            Bound::Time(t) => Some(u64::try_from(t.as_micros()).unwrap_or(u64::MAX).wrapping_sub(1)),
            Bound::Grace(t) => Some(t.as_micros() as u64),
            _ => None,
        };
        let everybody = self.of("", "");
        let of_users = |entry: &&Entry| match &entry.layer {
            Layer::User(_) => true,
            Layer::Group(name) => self.group(name).is_some_and(|g| g.clients.is_empty()),
            _ => false,
        };
        // With that scope a user's limits count over all clients.
        let counted = |name| self.scope == Scope::Site && COUNTED.contains(&name);
        let more = |entry: &&Entry| {
            if counted(entry.name) {
                return false;
            }
            let clients = self.entries.iter().filter(|e| e.name == entry.name && !of_users(e));
            let most = clients.chain(everybody.entries(entry.name)).filter_map(|e| size(&e.bound)).max();
            most.zip(size(&entry.bound)).is_some_and(|(most, own)| own > most)
        };
        let say = |e: &Entry| {
            let Entry { name, bound, layer, origin, .. } = e;
            format!(
                "{name} = {bound} of {layer} ({origin}) has no effect: no client may have as much, and users get no more"
            )
        };
        self.entries.iter().filter(of_users).filter(more).map(say).collect()
    }

    /// Returns the limits that apply to a client on behalf of a user (empty: the client's own).
    pub fn of(&self, client: &str, user: &str) -> Effective {
        let is_user = |name: &String| name == user && !user.is_empty();
        // A group's limit applies to each of its clients, and to each of its users.
        let holds = |layer: &Layer, of_user: bool| match (layer, of_user) {
            (Layer::Client(name), false) => name == client,
            (Layer::User(name), true) => is_user(name),
            (Layer::Group(name), false) => {
                self.group(name).is_some_and(|g| g.clients.iter().any(|p| fits(p, client)))
            }
            (Layer::Group(name), true) => self.group(name).is_some_and(|g| g.users.iter().any(is_user)),
            _ => false,
        };
        let entries = match self.entries.iter().any(|e| holds(&e.layer, false) || holds(&e.layer, true)) {
            true => self.those(holds),
            false => self.everybody.get_or_init(|| self.those(|_, _| false)).clone(),
        };
        Effective { entries, scope: self.scope }
    }

    fn those(&self, holds: impl Fn(&Layer, bool) -> bool) -> Arc<[Entry]> {
        let (mut out, holds) = (Vec::new(), &holds);
        for limit in LIMITS {
            let of_name = || self.entries.iter().filter(|e| e.name == limit.name);
            let held = |of_user| {
                let those = of_name().filter(move |e| holds(&e.layer, of_user));
                those.map(move |e| Entry { of_user, ..e.clone() })
            };
            let before = out.len();
            out.extend(held(false));
            if out.len() == before {
                let set = of_name().find(|e| e.layer == Layer::Default);
                out.push(set.cloned().unwrap_or_else(|| Entry {
                    name: limit.name,
                    layer: Layer::Default,
                    // A test parses all defaults.
                    bound: Bound::parse(limit.kind, limit.default()).unwrap_or(Bound::Number(0)),
                    origin: "default".into(),
                    of_user: false,
                }));
            }
            if !OF_CLIENTS.contains(&limit.name) {
                out.extend(held(true));
            }
        }
        out.into()
    }
}

/// The limits that apply to a client, and perhaps a user.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Effective {
    entries: Arc<[Entry]>,
    /// Scope of user names.
    pub scope: Scope,
}

/// A refusal by a limit.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct Exceeded {
    /// Key of the limit.
    pub name: &'static str,
    /// Text for people: the value, its layer and origin, the excess, and the remedy.
    pub text: String,
}

impl Entry {
    /// Creates a refusal: `why` describes the excess, `remedy` the way out.
    pub fn exceeded(&self, why: impl Into<String>, remedy: &str) -> Exceeded {
        let Self { name, bound, layer, origin, .. } = self;
        let why = why.into();
        Exceeded { name, text: format!("limit {name} = {bound} of {layer} ({origin}): {why}; {remedy}") }
    }
}

impl Effective {
    /// Lists the entries of one limit.
    pub fn entries<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Entry> {
        self.entries.iter().filter(move |e| e.name == name)
    }

    /// Lists all entries.
    pub fn all(&self) -> &[Entry] {
        &self.entries
    }

    /// Returns the entry with the smallest number, size or time (in µs); a time of 0 is no limit.
    pub fn smallest(&self, name: &str) -> Option<(&Entry, u64)> {
        self.entries
            .iter()
            .filter(|e| e.name == name)
            .filter_map(|e| match &e.bound {
                Bound::Number(n) | Bound::Size(n) => Some((e, *n)),
                Bound::Time(t) if !t.is_zero() => Some((e, u64::try_from(t.as_micros()).unwrap_or(u64::MAX))),
                _ => None,
            })
            .min_by_key(|(_, n)| *n)
    }

    /// Returns the entry with the least memory, and that memory in bytes; percent are of `total`.
    pub fn least_memory(&self, name: &str, total: u64) -> Option<(&Entry, u64)> {
        let bytes = |entry: &Entry| match &entry.bound {
            Bound::Memory(memory) => Some(memory.of(total)),
            _ => None,
        };
        let named = self.entries.iter().filter(|e| e.name == name);
        named.filter_map(|e| Some((e, bytes(e)?))).min_by_key(|(_, bytes)| *bytes)
    }

    /// Returns the times after which an idle lease is warned, parked, released or lent.
    pub fn idle(&self) -> Timeouts {
        let after =
            |name| self.smallest(name).map_or(Duration::ZERO, |(_, usec)| Duration::from_micros(usec));
        Timeouts {
            warn: after("warn_after"),
            park: after("park_after"),
            release: after("release_after"),
            lend: after("lend_after"),
        }
    }

    /// Returns the time for which a worker waits for a program whose connection broke.
    pub fn resume_grace(&self) -> Duration {
        let graces = self.entries("resume_grace").filter_map(|e| match e.bound {
            Bound::Grace(time) => Some(time),
            _ => None,
        });
        graces.min().unwrap_or_default()
    }

    /// Returns the first non-empty list of this name without an entry that `fits`.
    pub fn not_listed(&self, name: &str, mut fits: impl FnMut(&str) -> bool) -> Option<&Entry> {
        self.entries.iter().filter(|e| e.name == name).find(|e| match &e.bound {
            Bound::Names(names) => !names.is_empty() && !names.iter().any(|n| fits(n)),
            _ => false,
        })
    }
}

/// Rate of each client's requests: a bucket that fills evenly, up to one second's worth.
#[derive(Debug, Default)]
pub struct Rates(std::collections::HashMap<String, (Duration, f64)>);

impl Rates {
    /// Counts a request; returns `true` if the client may make it now.
    pub fn allow(&mut self, client: &str, per_second: u64, now: Duration) -> bool {
        let full = per_second as f64;
        let (at, left) = self.0.entry(client.into()).or_insert((now, full));
        *left = (*left + now.saturating_sub(*at).as_secs_f64() * full).min(full);
        *at = now;
        if *left < 1.0 {
            return false;
        }
        *left -= 1.0;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the sources below a folder, without tests in files of their own.
    fn sources(folder: &std::path::Path) -> Vec<(std::path::PathBuf, String)> {
        let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        let of = |path: std::path::PathBuf| match path.is_dir() {
            true => sources(&path),
            false => vec![(path.clone(), std::fs::read_to_string(path).unwrap())],
        };
        entries.flat_map(of).filter(|(path, _)| !path.ends_with("tests.rs")).collect()
    }

    #[test]
    fn each_limit_is_applied_somewhere() {
        let source = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        let mut sources = sources(&source);
        let (own, folder) = (source.join("limits.rs"), source.join("config"));
        sources.retain(|(path, _)| *path != own && !path.starts_with(&folder));
        assert!(sources.len() > 50, "the sources are found");
        // `Effective` returns these times as fields, and by a method.
        for limit in LIMITS.iter().filter(|limit| !TOP_LEVEL.contains(&limit.name)) {
            let word = format!("\"{}\"", limit.name);
            assert!(sources.iter().any(|(_, text)| text.contains(&word)), "no code reads {word}");
        }
    }

    fn entry(name: &'static str, layer: Layer, bound: Bound) -> Entry {
        Entry { name, layer, bound, origin: "t.toml:1".into(), of_user: false }
    }

    fn number(limits: &Limits, name: &str, client: &str, user: &str) -> u64 {
        limits.of(client, user).smallest(name).map(|(_, n)| n).unwrap()
    }

    #[test]
    fn every_default_can_be_read() {
        for limit in LIMITS {
            let bound = Bound::parse(limit.kind, limit.default()).unwrap();
            assert_eq!(Bound::parse(limit.kind, &bound.to_string()), Ok(bound), "{}", limit.name);
        }
    }

    #[test]
    fn the_smallest_of_those_that_apply_wins() {
        let n = |n| Bound::Number(n);
        let limits = Limits {
            entries: vec![
                entry("gpus", Layer::Default, n(2)),
                entry("gpus", Layer::Group("lab".into()), n(8)),
                entry("gpus", Layer::Client("vm-1".into()), n(4)),
                entry("gpus", Layer::User("alice".into()), n(1)),
            ],
            groups: vec![("lab".into(), Group { clients: vec!["vm-*".into()], users: vec!["bob".into()] })],
            ..Limits::default()
        };
        assert_eq!(number(&limits, "gpus", "db-1", ""), 2, "for everybody");
        assert_eq!(number(&limits, "gpus", "vm-2", ""), 8, "a group has more than everybody");
        assert_eq!(number(&limits, "gpus", "vm-1", ""), 4);
        assert_eq!(number(&limits, "gpus", "vm-1", "alice"), 1);
        assert_eq!(number(&limits, "gpus", "db-1", "bob"), 2, "a user gets its client less, never more");
        assert_eq!(number(&limits, "gpus", "vm-2", "alice"), 1);
        let of = |client, user| limits.of(client, user).entries("gpus").cloned().collect::<Vec<_>>();
        assert_eq!(
            of("db-1", "bob").iter().map(|e| e.of_user).collect::<Vec<_>>(),
            [false, true],
            "both count"
        );
        assert_eq!(number(&limits, "workers", "vm-1", ""), 64, "the default of the program");
        let effective = limits.of("vm-1", "alice");
        let (entry, _) = effective.smallest("gpus").unwrap();
        assert_eq!(
            entry.exceeded("1 held, 1 more asked for", "release a lease").to_string(),
            "limit gpus = 1 of user alice (t.toml:1): 1 held, 1 more asked for; release a lease"
        );
    }

    #[test]
    fn lists_and_times() {
        let limits = Limits {
            entries: vec![
                entry("models", Layer::Default, Bound::Names(vec!["H200".into()])),
                entry("lease_ttl", Layer::Default, Bound::Time(Duration::ZERO)),
            ],
            ..Limits::default()
        };
        let effective = limits.of("a", "");
        assert!(effective.not_listed("models", |m| "NVIDIA H200".contains(m)).is_none());
        assert!(effective.not_listed("models", |m| "Tesla T4".contains(m)).is_some());
        assert!(effective.not_listed("servers", |_| false).is_none(), "an empty list allows all");
        assert!(effective.smallest("lease_ttl").is_none(), "0 is off");
    }

    #[test]
    fn idle_times_of_layers() {
        let time = |minutes: u64| Bound::Time(Duration::from_secs(60 * minutes));
        let client = || Layer::Client("db".into());
        let limits = Limits {
            entries: vec![
                entry("park_after", Layer::Default, time(20)),
                entry("park_after", client(), time(0)),
                entry("release_after", client(), time(90)),
                entry("release_after", Layer::User("bob".into()), time(60)),
            ],
            ..Limits::default()
        };
        let idle = |client: &str, user: &str| limits.of(client, user).idle();
        assert_eq!(idle("vm", "").park, Duration::from_secs(1200));
        assert_eq!(idle("vm", "").warn, Duration::from_secs(1500), "the default of the program");
        assert_eq!(idle("vm", "").release, Duration::ZERO);
        assert_eq!(idle("db", "").park, Duration::ZERO, "never, whatever holds for everybody");
        assert_eq!(idle("db", "").release, Duration::from_secs(5400));
        assert_eq!(idle("db", "bob").release, Duration::from_secs(3600), "the smallest");
    }

    #[test]
    fn the_shortest_grace_applies_and_none_is_the_shortest() {
        let grace = |seconds| Bound::Grace(Duration::from_secs(seconds));
        let limits = Limits {
            entries: vec![
                entry("resume_grace", Layer::Default, grace(30)),
                entry("resume_grace", Layer::Client("db".into()), grace(60)),
                entry("resume_grace", Layer::User("alice".into()), grace(0)),
                entry("resume_grace", Layer::User("bob".into()), grace(50)),
            ],
            ..Limits::default()
        };
        let seconds = |client: &str, user: &str| limits.of(client, user).resume_grace().as_secs();
        assert_eq!(seconds("vm", ""), 30);
        assert_eq!(seconds("db", ""), 60, "a client may have more than everybody");
        assert_eq!(seconds("db", "bob"), 50, "a user gets less, never more");
        assert_eq!(seconds("vm", "bob"), 30);
        assert_eq!(seconds("db", "alice"), 0);
        assert_eq!(Limits::default().of("vm", "").resume_grace(), LONGEST_GRACE, "the default");
        assert!(limits.without_effect().is_empty(), "{:?}", limits.without_effect());
        assert!(Bound::parse(Kind::Grace, "61s").is_err() && Bound::parse(Kind::Grace, "x").is_err());
    }

    #[test]
    fn a_limit_of_no_memory_is_a_size() {
        assert_eq!(parse_memory("31.4%"), Ok(Memory::Percent(31.4)));
        assert_eq!(parse_memory("0"), Ok(Memory::Bytes(0)));
        for bad in ["0%", "-0%", "101%", "NaN%", "%"] {
            assert!(parse_memory(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn patterns() {
        assert!(fits("vm-*", "vm-12") && fits("*", "") && fits("a*c*e", "abcde") && fits("x", "x"));
        assert!(!fits("vm-*", "vm") && !fits("", "x") && !fits("a*b", "abc"));
    }

    #[test]
    fn rates() {
        let mut rates = Rates::default();
        let second = Duration::from_secs(1);
        let granted = (0..50).filter(|_| rates.allow("a", 10, second)).count();
        assert_eq!(granted, 10);
        assert!(rates.allow("b", 10, second), "each client has its own");
        assert!(rates.allow("a", 10, second + Duration::from_millis(101)));
        assert!(!rates.allow("a", 10, second + Duration::from_millis(102)));
    }
}
