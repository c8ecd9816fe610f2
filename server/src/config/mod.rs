//! The server's configuration: its keys, their sources and their checks.
//!
//! `gpuserver.toml` is read first, then the drop-ins `gpuserver.d/*.toml` in the same folder, in
//! the order of their names; a later value wins.
//! Every error names file, line and key; an unknown key is an error.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use ipnet::IpNet;
use toml::de::{DeTable, DeValue};

use gpusession_proto::join::is_name;
use gpusession_proto::supervise::Isolation;

use crate::lease::{Memory, Reserve, Rules, Sharing};
use crate::limits::{
    self, Bound, Entry, Group, IDLE_TIMES, LIMITS, Layer, Limits, OF_CLIENTS, ON_IDLE, Scope, parse_size,
};

/// Configuration file unless the command line names another.
pub const DEFAULT_FILE: &str = "/etc/gpusession/gpuserver.toml";
/// Most warm workers of a lease.
const MAX_WARM: u64 = 64;

/// A key of the configuration.
#[derive(Debug, Clone, Copy)]
pub struct Key {
    /// Dotted name, as in the file.
    pub name: &'static str,
    /// Default as text.
    pub default: &'static str,
    /// Explanation for people.
    pub help: &'static str,
}

/// Keys whose changes take effect without a restart; so do limits and reserves.
const LIVE: &[&str] = &[
    "warm_workers",
    "worker_idle_exit",
    "warn_after",
    "park_after",
    "release_after",
    "lend_after",
    "return_limit",
    "parked_max",
    "overcommit",
    "users.scope",
    "drain_timeout",
    "accounting_keep",
];

/// Returns `true` if a change of the key takes effect without a restart.
pub fn is_live(key: &str) -> bool {
    LIVE.contains(&key) || key.starts_with("limits.")
}

/// All keys, in the order of their explanation.
pub const KEYS: &[Key] = &[
    Key { name: "name", default: "the host name", help: "name of this server in the pool" },
    Key { name: "listen", default: "[::]:7601", help: "address of the control service" },
    Key {
        name: "advertise",
        default: "the address a client reached",
        help: "HOST, HOST:PORT or a list of them: addresses that clients of the pool use",
    },
    Key {
        name: "data_ports",
        default: "7602",
        help: "port for programs' data, or a range \"FIRST-LAST\", of which the first free port is used",
    },
    Key {
        name: "metrics_listen",
        default: "off",
        help: "address for Prometheus (GET /metrics, no encryption, no password), such as \"127.0.0.1:7603\"; \"off\": none",
    },
    Key {
        name: "gpus",
        default: "all",
        help: "\"all\", or a list of indices and UUIDs; the server does not start if one is missing",
    },
    Key {
        name: "driver",
        default: "NVIDIA's libcuda.so.1",
        help: "absolute path of the CUDA driver library that workers load",
    },
    Key { name: "registry", default: "local", help: "\"local\": this server decides alone about its GPUs" },
    Key { name: "encryption", default: "on", help: "\"on\", or \"off\" for peers inside trusted_networks" },
    Key {
        name: "trusted_networks",
        default: "[]",
        help: "networks (CIDR) whose peers may connect without encryption",
    },
    Key {
        name: "sharing",
        default: "time-slice",
        help: "how leases share GPUs that gpu_sharing does not list: \"time-slice\": in turns; \"mps\": at the same \
               time, by NVIDIA's MPS; \"exclusive\": not at all",
    },
    Key {
        name: "gpu_sharing.time-slice",
        default: "[]",
        help: "GPUs on which programs of leases take turns, as in `gpus`",
    },
    Key { name: "gpu_sharing.mps", default: "[]", help: "GPUs that leases share by MPS, as in `gpus`" },
    Key { name: "gpu_sharing.exclusive", default: "[]", help: "GPUs that one lease has alone, as in `gpus`" },
    Key {
        name: "mps_domain",
        default: "client",
        help: "programs that a fault under MPS affects: those of one \"client\" on a GPU, or with \"server\" of all clients",
    },
    Key {
        name: "mps_control",
        default: "in the driver's folder, $PATH, /usr/bin",
        help: "absolute path of nvidia-cuda-mps-control",
    },
    Key { name: "warm_workers", default: "2", help: "workers kept ready for each lease" },
    Key {
        name: "isolation",
        default: "try",
        help: "workers give up files, sockets, processes and rare system calls: \"try\": as far as this host allows; \
               \"require\": or they do not start; \"off\"",
    },
    Key {
        name: "worker_idle_exit",
        default: "10min",
        help: "a lease that took no worker for this time keeps only one ready; 0 is off",
    },
    Key {
        name: "warn_after",
        default: "25min",
        help: "a lease's users are warned after this time without GPU work of its programs; 0 is never",
    },
    Key {
        name: "park_after",
        default: "30min",
        help: "a lease's device memory moves to host memory after this time without GPU work; 0 is never",
    },
    Key {
        name: "release_after",
        default: "0",
        help: "a lease ends, and its programs fail, after this time without GPU work; 0 is never",
    },
    Key {
        name: "lend_after",
        default: "10min",
        help: "a lease without programs for this time lends its GPUs to a waiting request; 0 is never",
    },
    Key {
        name: "parked_max",
        default: "50%",
        help: "host memory for the device memory of parked programs: a percentage or a size; 0 is none",
    },
    Key {
        name: "return_limit",
        default: "1h",
        help: "longest wait of a parked program for its GPU, before it gets an error; 0 is without end",
    },
    Key {
        name: "overcommit",
        default: "100%",
        help: "part of a GPU's memory that may be promised to leases; above 100% programs may find less than promised",
    },
    Key {
        name: "compute_mode",
        default: "check",
        help: "\"check\": a GPU whose compute mode does not let several programs share it is withdrawn",
    },
    Key {
        name: "drain_timeout",
        default: "60s",
        help: "longest wait of a stop for running programs; 0 is none",
    },
    Key {
        name: "lock_dir",
        default: "/run/lock/gpusession with NVIDIA's driver, else none",
        help: "folder in which the servers of this host lock their GPUs; \"none\": no locks",
    },
    Key {
        name: "cache_max",
        default: "8GiB",
        help: "disk space for modules and for code that the driver compiled from PTX, so that programs start faster; 0 is none",
    },
    Key {
        name: "accounting_keep",
        default: "90d",
        help: "time for which accounting records are kept; 0 is for ever",
    },
    Key {
        name: "users.scope",
        default: "client",
        help: "\"client\": a user's limits count on each client separately; \"site\": on all clients together",
    },
    Key {
        name: "state_dir",
        default: "/var/lib/gpuserver",
        help: "folder of leases, clients, tokens and the pool's authority",
    },
    Key { name: "runtime_dir", default: "/run/gpuserver", help: "folder of admin.sock" },
];

/// Returns the key that lists the GPUs with this way of sharing, regardless of `sharing`.
pub fn gpu_sharing_key(sharing: Sharing) -> &'static str {
    match sharing {
        Sharing::TimeSlice => "gpu_sharing.time-slice",
        Sharing::Mps => "gpu_sharing.mps",
        Sharing::Exclusive => "gpu_sharing.exclusive",
    }
}

/// Source of a value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// A line of a file, from 1; 0 stands for the whole file.
    File(PathBuf, usize),
    /// An environment variable, by its name.
    Environment(&'static str),
    /// The default of the key.
    Default,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path, 0) => write!(f, "{}", path.display()),
            Self::File(path, line) => write!(f, "{}:{line}", path.display()),
            Self::Environment(name) => write!(f, "environment {name}"),
            Self::Default => f.write_str("default"),
        }
    }
}

/// An error in the configuration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{origin}: {message}")]
pub struct ConfigError {
    /// Place of the error.
    pub origin: Origin,
    /// Cause and remedy.
    pub message: String,
}

impl ConfigError {
    /// Creates an error for `origin`.
    pub fn new(origin: Origin, message: impl Into<String>) -> Self {
        Self { origin, message: message.into() }
    }
}

/// A GPU of the `gpus` list, or one of `gpu_sharing`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GpuChoice {
    /// Index of the GPU in the driver.
    Index(u32),
    /// UUID: `GPU-` and lower-case digits.
    Uuid(String),
}

impl fmt::Display for GpuChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Index(i) => write!(f, "{i}"),
            Self::Uuid(u) => f.write_str(u),
        }
    }
}

/// Value of the key `gpus`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Gpus {
    /// All GPUs of the driver.
    All,
    /// These, in this order.
    These(Vec<GpuChoice>),
}

/// Settings of MPS.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mps {
    /// Key that requires NVIDIA's program; errors about the program name it.
    pub key: &'static str,
    /// Whether all clients share a domain.
    pub shared: bool,
    /// Path of nvidia-cuda-mps-control, if configured.
    pub control: Option<PathBuf>,
}

/// An address of this server for clients.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Advertised {
    /// Name or address, IPv6 without brackets.
    pub host: String,
    /// Control port for clients; `None`: the port on which this server listens.
    pub port: Option<u16>,
}

/// The configuration after all checks.
#[derive(Debug, Clone)]
pub struct Config {
    /// Name of this server in the pool.
    pub name: String,
    /// Address of the control service.
    pub listen: SocketAddr,
    /// Addresses for clients; empty: the address that a client reached.
    pub advertise: Vec<Advertised>,
    /// First and last port of the data plane's range; (0, 0): any port.
    pub data_ports: (u16, u16),
    /// Address for Prometheus, if any.
    pub metrics_listen: Option<SocketAddr>,
    /// Served GPUs.
    pub gpus: Gpus,
    /// Path of the driver library, if configured.
    pub driver: Option<PathBuf>,
    /// Whether every data connection must be encrypted.
    pub encryption: bool,
    /// Peers for which encryption may be off.
    pub trusted_networks: Vec<IpNet>,
    /// Workers kept ready for each lease.
    pub warm_workers: u32,
    /// Time without a new program after which a lease keeps one warm worker; zero is never.
    pub worker_idle_exit: Duration,
    /// Isolation of the workers.
    pub isolation: Isolation,
    /// Host memory for the device memory of parked programs.
    pub parked_max: Memory,
    /// Longest wait of a parked program for its GPU; zero is without end.
    pub return_limit: Duration,
    /// Configuration file.
    pub file: PathBuf,
    /// Whether that file exists: then a reload requires it.
    pub file_found: bool,
    /// Folder of leases, clients, tokens and the authority.
    pub state_dir: PathBuf,
    /// Folder of the administration socket.
    pub runtime_dir: PathBuf,
    /// Way in which leases share the GPUs that `gpu_sharing` does not list.
    pub sharing: Sharing,
    /// GPUs with a way of sharing of their own.
    pub gpu_sharing: Vec<(GpuChoice, Sharing)>,
    /// Settings of MPS, if a GPU is shared by it.
    pub mps: Option<Mps>,
    /// Reserves and overcommit.
    pub rules: Rules,
    /// Longest wait of a stop for running programs.
    pub drain_timeout: Duration,
    /// Folder of the GPUs' locks; `None`: no locks.
    pub lock_dir: Option<PathBuf>,
    /// Age at which accounting records are deleted; zero: never.
    pub accounting_keep: Duration,
    /// Limit of the workers' disk cache, in bytes.
    pub cache_max: u64,
    /// Limits of clients and users.
    pub limits: Limits,
    /// Name, value as text and origin of every key.
    pub report: Vec<(String, String, Origin)>,
    /// Values that changed in the files since the start, and take effect after a restart.
    pub waiting: Vec<(String, String, Origin)>,
    /// Texts about settings that work, but probably not as intended.
    pub warnings: Vec<String>,
}

impl Config {
    /// Returns the source of a key's value.
    pub fn origin(&self, key: &str) -> Origin {
        // A key may be written with quotes that TOML does not need.
        let plain = |key: &str| key.replace(['"', '\''], "");
        let found = self.report.iter().find(|(k, ..)| plain(k) == plain(key));
        found.map_or(Origin::Default, |(.., origin)| origin.clone())
    }

    /// Returns the path of the administration socket.
    pub fn admin_socket(&self) -> PathBuf {
        self.runtime_dir.join("admin.sock")
    }

    /// Returns `true` if data connections from `peer` may go without encryption.
    pub fn may_be_clear(&self, peer: IpAddr) -> bool {
        let peer = peer.to_canonical();
        !self.encryption && self.trusted_networks.iter().any(|n| n.contains(&peer))
    }
}

/// Facts about host and environment on which the configuration depends.
pub struct Surroundings<'a> {
    /// Reads an environment variable.
    pub env: &'a dyn Fn(&str) -> Option<String>,
    /// Name of this host.
    pub host_name: String,
    /// First and last ephemeral port of the kernel, if known.
    pub ephemeral: Option<(u16, u16)>,
    /// Whether NVIDIA's kernel driver is loaded.
    pub nvidia_driver: bool,
}

/// Returns the suffix of an instance's folders: `-NAME` for `gpuserver-NAME.toml`.
fn instance(file: &Path) -> String {
    let stem = file.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
    stem.strip_prefix("gpuserver")
        .filter(|rest| rest.len() > 1 && rest.starts_with('-'))
        .unwrap_or_default()
        .into()
}

#[derive(Debug, Clone)]
enum Value {
    String(String),
    Integer(i64),
    Bool(bool),
    List(Vec<Value>),
    /// The text of a value of a type that no key has; the key's parser rejects it.
    Other(String),
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::String(s) => write!(f, "{s:?}"),
            Self::Integer(i) => write!(f, "{i}"),
            Self::Bool(b) => write!(f, "{b}"),
            Self::Other(text) => f.write_str(text),
            Self::List(l) => {
                f.write_str("[")?;
                for (i, v) in l.iter().enumerate() {
                    write!(f, "{}{v}", if i == 0 { "" } else { ", " })?;
                }
                f.write_str("]")
            }
        }
    }
}

/// Values that were read and not yet checked.
#[derive(Default)]
struct Raw {
    keys: BTreeMap<&'static str, (Value, Origin)>,
    /// Limits by layer and name, and members of groups.
    limits: BTreeMap<(Layer, String), (Value, Origin)>,
    reserve: Vec<RawReserve>,
}

/// An unchecked `[[reserve]]`: its fields, and the place of its start.
type RawReserve = (Vec<(String, Value, Origin)>, Origin);

/// Reads `file` and its drop-ins. A missing file is an error only if `required`.
pub fn load(file: &Path, required: bool, around: &Surroundings<'_>) -> Result<Config, ConfigError> {
    let mut raw = Raw::default();
    let mut warnings = Vec::new();
    let mut file_found = true;
    match std::fs::read_to_string(file) {
        Ok(text) => read_text(&mut raw, file, &text, around.env)?,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound && !required => {
            file_found = false;
            warnings.push(format!("{} not found: all keys have their defaults", file.display()));
        }
        Err(e) => {
            let todo = match e.kind() {
                std::io::ErrorKind::NotFound => "; create it, or name another file with -c",
                _ => "",
            };
            let why = format!("cannot be read: {e}{todo}");
            return Err(ConfigError::new(Origin::File(file.into(), 0), why));
        }
    }
    for path in drop_ins(file)? {
        let text = std::fs::read_to_string(&path)
            .map_err(|e| ConfigError::new(Origin::File(path.clone(), 0), format!("cannot be read: {e}")))?;
        read_text(&mut raw, &path, &text, around.env)?;
    }
    Ok(Config { file_found, ..check(raw, warnings, file, around)? })
}

/// Returns the administration socket of a server whose configuration files have errors.
///
/// Takes the last legible `runtime_dir` in them, else the default.
pub fn admin_socket_beside(file: &Path, env: &dyn Fn(&str) -> Option<String>) -> PathBuf {
    let of_environment = env("RUNTIME_DIRECTORY").filter(|d| !d.is_empty());
    let mut folder = of_environment
        .and_then(|list| list.split(':').next().map(PathBuf::from))
        .unwrap_or_else(|| format!("/run/gpuserver{}", instance(file)).into());
    let files = std::iter::once(file.to_path_buf()).chain(drop_ins(file).unwrap_or_default());
    for text in files.filter_map(|path| std::fs::read_to_string(path).ok()) {
        // Parse line by line, so that errors in other lines do not matter.
        for line in text.lines().filter(|l| l.trim_start().starts_with("runtime_dir")) {
            let value = line.parse::<toml::Table>().ok().and_then(|mut t| t.remove("runtime_dir"));
            let text = value.as_ref().and_then(toml::Value::as_str).and_then(|t| expand(t, env).ok());
            folder = text.map_or(folder, PathBuf::from);
        }
    }
    folder.join("admin.sock")
}

/// Lists the drop-ins of a configuration file in the order of reading.
fn drop_ins(file: &Path) -> Result<Vec<PathBuf>, ConfigError> {
    let folder = file.with_extension("d");
    let unread = |e| {
        let why = format!("the folder of drop-ins cannot be read: {e}; make it readable, or remove it");
        ConfigError::new(Origin::File(folder.clone(), 0), why)
    };
    let entries = match std::fs::read_dir(&folder) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(unread(e)),
    };
    let paths = entries.map(|entry| Ok(entry?.path()));
    let mut out = paths.collect::<std::io::Result<Vec<PathBuf>>>().map_err(unread)?;
    out.retain(|p| p.extension().is_some_and(|e| e == "toml"));
    out.sort();
    Ok(out)
}

/// Reads a configuration from one text, without drop-ins; for tests.
pub fn from_text(name: &Path, text: &str, around: &Surroundings<'_>) -> Result<Config, ConfigError> {
    let mut raw = Raw::default();
    read_text(&mut raw, name, text, around.env)?;
    check(raw, Vec::new(), name, around)
}

fn line_of(text: &str, offset: usize) -> usize {
    text.as_bytes().iter().take(offset).filter(|b| **b == b'\n').count() + 1
}

fn read_text(
    raw: &mut Raw,
    file: &Path,
    text: &str,
    env: &dyn Fn(&str) -> Option<String>,
) -> Result<(), ConfigError> {
    let at = |offset: usize| Origin::File(file.into(), line_of(text, offset));
    let document = DeTable::parse(text).map_err(|e| {
        ConfigError::new(at(e.span().map_or(0, |s| s.start)), e.message().trim_end().to_string())
    })?;
    let mut path = Vec::new();
    read_table(raw, &mut path, document.get_ref(), &at, env)
}

/// Reads a table with its inner tables: `[users] scope` is the key `users.scope`.
fn read_table(
    raw: &mut Raw,
    path: &mut Vec<String>,
    table: &DeTable<'_>,
    at: &dyn Fn(usize) -> Origin,
    env: &dyn Fn(&str) -> Option<String>,
) -> Result<(), ConfigError> {
    for (key, value) in table {
        path.push(key.get_ref().to_string());
        let origin = at(key.span().start);
        let written = path.join(".");
        let bad = |m: String| ConfigError::new(at(value.span().start), format!("{written}: {m}"));
        let parts: Vec<&str> = path.iter().map(String::as_str).collect();
        let limit = match parts.as_slice() {
            ["limits", name] => Some((Layer::Default, *name)),
            ["limits", "group", of, name] => Some((Layer::Group((*of).into()), *name)),
            ["limits", "client", of, name] => Some((Layer::Client((*of).into()), *name)),
            ["limits", "user", of, name] => Some((Layer::User((*of).into()), *name)),
            _ => None,
        };
        let inner = match value.get_ref() {
            DeValue::Table(inner) => Some(inner),
            _ => None,
        };
        let leads_on = KEYS.iter().any(|k| k.name.starts_with(&format!("{written}.")))
            || parts[0] == "limits" && parts.len() < 4;
        if let Some(known) = KEYS.iter().find(|k| k.name == written) {
            raw.keys.insert(known.name, (convert(value.get_ref(), env).map_err(bad)?, origin));
        } else if let Some(inner) = inner.filter(|_| leads_on) {
            read_table(raw, path, inner, at, env)?;
        } else if let Some((layer, name)) = limit
            && (LIMITS
                .iter()
                .any(|l| l.name == name && (layer != Layer::Default || !IDLE_TIMES.contains(&name)))
                && !(matches!(layer, Layer::User(_)) && OF_CLIENTS.contains(&name))
                || matches!(layer, Layer::Group(_)) && ["clients", "users"].contains(&name))
        {
            let value = convert(value.get_ref(), env).map_err(bad)?;
            raw.limits.insert((layer, name.to_string()), (value, origin));
        } else if written == "reserve"
            && let DeValue::Array(list) = value.get_ref()
        {
            for item in list {
                let DeValue::Table(item_table) = item.get_ref() else {
                    return Err(bad("write it as [[reserve]]".into()));
                };
                let mut fields = Vec::new();
                for (name, value) in item_table {
                    let (name, origin) = (name.get_ref().to_string(), at(name.span().start));
                    let converted = convert(value.get_ref(), env)
                        .map_err(|m| ConfigError::new(origin.clone(), format!("reserve.{name}: {m}")))?;
                    fields.push((name, converted, origin));
                }
                raw.reserve.push((fields, at(item.span().start)));
            }
        } else {
            return Err(ConfigError::new(origin, unknown(&parts, value.get_ref())));
        }
        path.pop();
    }
    Ok(())
}

/// Returns the error text for an unknown key, with a suggestion.
fn unknown(path: &[&str], value: &DeValue<'_>) -> String {
    let written = path.join(".");
    let in_it = format!("{written}.");
    let inner: Vec<_> = KEYS.iter().filter_map(|k| k.name.strip_prefix(&in_it)).collect();
    if !inner.is_empty() {
        return format!("`{written}` is a table: write [{written}] with {}", inner.join(", "));
    }
    match path {
        ["reserve"] => return "`reserve`: write it as [[reserve]]".into(),
        ["limits", rest @ ..] => return unknown_limit(&written, rest, value),
        _ => {}
    }
    if let Some(key) = KEYS.iter().find(|k| path.last() == Some(&k.name)) {
        return format!("unknown key `{written}`; did you mean `{}`?", key.name);
    }
    let limits = LIMITS.iter().map(|l| format!("limits.{}", l.name));
    match nearest(&written, KEYS.iter().map(|k| k.name.to_string()).chain(limits)) {
        Some(name) => format!("unknown key `{written}`; did you mean `{name}`?"),
        None => {
            let names: Vec<_> = KEYS.iter().map(|k| k.name).collect();
            let limits: Vec<_> = LIMITS.iter().map(|l| l.name).collect();
            format!(
                "unknown key `{written}`; the keys are {}, reserve, and in limits and limits.group.NAME, \
                 limits.client.NAME, limits.user.NAME {}",
                names.join(", "),
                limits.join(", ")
            )
        }
    }
}

/// Returns the error text for an unknown key below `limits`.
fn unknown_limit(written: &str, path: &[&str], value: &DeValue<'_>) -> String {
    let (kind, name) = match path {
        [] => return "`limits` is a table: write [limits]".into(),
        [kind @ ("group" | "client" | "user")] | [kind @ ("group" | "client" | "user"), _] => {
            return format!("`{written}`: the name of the {kind} is missing: write [limits.{kind}.NAME]");
        }
        // [limits.client.vm.7]
        [kind @ ("group" | "client" | "user"), of @ ..] if matches!(value, DeValue::Table(_)) => {
            return format!(
                "`{written}`: write a name with a dot in quotes: [limits.{kind}.{:?}]",
                of.join(".")
            );
        }
        [name] if IDLE_TIMES.contains(name) => {
            return format!("unknown key `{written}`; did you mean `{name}`?");
        }
        [name] => ("", *name),
        [kind @ ("group" | "client" | "user"), _, name] => (*kind, *name),
        _ => {
            return format!(
                "unknown key `{written}`; limits are in [limits], [limits.group.NAME], [limits.client.NAME] and \
                 [limits.user.NAME]"
            );
        }
    };
    if kind == "user" && OF_CLIENTS.contains(&name) {
        return format!(
            "`{written}`: a request does not name its user; write limits.{name}, limits.client.NAME.{name} or limits.group.NAME.{name}"
        );
    }
    let members: &[&str] = if kind == "group" { &["clients", "users"] } else { &[] };
    let here = |name: &&str| match kind {
        "" => !IDLE_TIMES.contains(name),
        "user" => !OF_CLIENTS.contains(name),
        _ => true,
    };
    let names: Vec<&str> =
        members.iter().copied().chain(LIMITS.iter().map(|l| l.name).filter(here)).collect();
    match nearest(name, names.iter().map(ToString::to_string)) {
        Some(near) => {
            let table = written.strip_suffix(name).unwrap_or_default();
            format!("unknown key `{written}`; did you mean `{table}{near}`?")
        }
        None => format!("unknown key `{written}`; the keys of this table are {}", names.join(", ")),
    }
}

/// Returns the most similar name, if one is similar enough.
fn nearest(written: &str, names: impl Iterator<Item = String>) -> Option<String> {
    names
        .map(|name| (strsim::damerau_levenshtein(&name, written), name))
        .min()
        .filter(|(distance, name)| *distance <= 1 + name.len() / 3)
        .map(|(_, name)| name)
}

fn convert(value: &DeValue<'_>, env: &dyn Fn(&str) -> Option<String>) -> Result<Value, String> {
    Ok(match value {
        DeValue::String(s) => Value::String(expand(s, env)?),
        DeValue::Integer(i) => match i64::from_str_radix(i.as_str(), i.radix()) {
            Ok(number) => Value::Integer(number),
            Err(_) => Value::Other(i.to_string()),
        },
        DeValue::Boolean(b) => Value::Bool(*b),
        DeValue::Array(list) => {
            Value::List(list.iter().map(|v| convert(v.get_ref(), env)).collect::<Result<_, _>>()?)
        }
        DeValue::Float(number) => Value::Other(number.to_string()),
        DeValue::Datetime(date) => Value::Other(date.to_string()),
        DeValue::Table(_) => Value::Other("{...}".into()),
    })
}

/// Replaces `${VAR}` by the environment variable; `$${` stands for `${`.
fn expand(text: &str, env: &dyn Fn(&str) -> Option<String>) -> Result<String, String> {
    let mut out = String::new();
    let mut rest = text;
    while let Some(start) = rest.find("${") {
        if rest[..start].ends_with('$') {
            out.push_str(&rest[..start]);
            out.push('{');
            rest = &rest[start + 2..];
            continue;
        }
        out.push_str(&rest[..start]);
        let end = rest[start..].find('}').ok_or_else(|| format!("`${{` without `}}` in {text:?}"))? + start;
        let name = &rest[start + 2..end];
        out.push_str(&env(name).ok_or_else(|| format!("environment variable {name} is not set"))?);
        rest = &rest[end + 1..];
    }
    out.push_str(rest);
    Ok(out)
}

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

fn text(value: &Value) -> Result<&str, String> {
    match value {
        Value::String(s) => Ok(s),
        _ => Err("a string is wanted, in quotes".into()),
    }
}

fn texts(value: &Value) -> Result<Vec<&str>, String> {
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
        Value::String(s) => parse_duration(s).ok_or_else(|| bad.into()),
        _ => Err(bad.into()),
    }
}

/// Parses "50%", "64GiB", or a number of bytes.
fn part_of_memory(value: &Value) -> Result<Memory, String> {
    let bad = "a percentage like \"50%\", a size in KiB, MiB, GiB or a number of bytes is wanted; 0 is none";
    let parsed = match value {
        Value::Integer(bytes) => u64::try_from(*bytes).ok().map(Memory::Bytes),
        Value::String(text) => match text.strip_suffix('%') {
            Some(percent) => {
                let percent = percent.trim().parse::<f64>().ok().filter(|p| (0.0..=100.0).contains(p));
                percent.map(Memory::Percent)
            }
            None => parse_size(text).ok().map(Memory::Bytes),
        },
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

/// Parses a duration in systemd's form: `90` (seconds), `10min`, `1h 30min`.
pub fn parse_duration(text: &str) -> Option<Duration> {
    let text = text.trim();
    match text.parse::<u64>() {
        Ok(seconds) => Some(Duration::from_secs(seconds)),
        Err(_) => humantime::parse_duration(text).ok(),
    }
}

/// Formats a duration so that [`parse_duration`] reads it.
pub fn show_duration(duration: Duration) -> String {
    if duration.is_zero() { "0".into() } else { humantime::format_duration(duration).to_string() }
}

fn list<T: fmt::Display>(items: &[T]) -> String {
    let items: Vec<_> = items.iter().map(ToString::to_string).collect();
    format!("[{}]", items.join(", "))
}

/// Derives the server's name from the host's name.
fn name_from_host(host: &str) -> Option<String> {
    let name = host.split('.').next()?.to_ascii_lowercase();
    is_name(&name).then_some(name)
}

fn check(
    raw: Raw,
    mut warnings: Vec<String>,
    file: &Path,
    around: &Surroundings<'_>,
) -> Result<Config, ConfigError> {
    let mut reader = Reader { raw: &raw, report: Vec::new() };
    let plain = |s: &String| s.clone();
    let default = |s: &str| (s.to_string(), Origin::Default);
    // A directory that systemd created: the first of a colon-separated list. Without the variable,
    // the directory that systemd would create for this instance, so that a verb outside the unit
    // finds the server of its configuration.
    let directory = |variable: &'static str, otherwise: &str| match (around.env)(variable) {
        Some(v) if !v.is_empty() => {
            (PathBuf::from(v.split(':').next().unwrap_or_default()), Origin::Environment(variable))
        }
        _ => (PathBuf::from(format!("{otherwise}{}", instance(file))), Origin::Default),
    };

    let name = reader.key(
        "name",
        || default(&name_from_host(&around.host_name).unwrap_or_default()),
        |v| {
            let name = text(v)?;
            if is_name(name) {
                Ok(name.to_string())
            } else {
                Err("a name has a-z, 0-9, `-` and `.`, 64 characters at most".into())
            }
        },
        plain,
    )?;
    if name.is_empty() {
        return Err(ConfigError::new(
            Origin::Default,
            format!("name: the host name {:?} cannot be this server's name; set `name`", around.host_name),
        ));
    }
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
    check_ports(&raw, listen, data_ports, metrics_listen)?;
    let gpus = reader.key("gpus", || (Gpus::All, Origin::Default), read_gpus, show_gpus)?;
    let driver = reader.key(
        "driver",
        || (None, Origin::Default),
        |v| absolute(v).map(Some),
        |d| d.as_ref().map_or_else(|| "NVIDIA's libcuda.so.1".into(), |p| p.display().to_string()),
    )?;
    reader.key("registry", || default("local"), |v| one_of(v, &["local"], &["etcd"]), plain)?;
    let encryption =
        reader.key("encryption", || default("on"), |v| one_of(v, &["on", "off"], &[]), plain)? == "on";
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
    let sharing = reader.key(
        "sharing",
        || (Sharing::default(), Origin::Default),
        |v| {
            let written = one_of(v, &Sharing::ALL.map(Sharing::as_str), &[])?;
            Ok(Sharing::parse(&written).unwrap_or_default())
        },
        |s| s.as_str().into(),
    )?;
    let mut gpu_sharing: Vec<(GpuChoice, Sharing)> = Vec::new();
    for mode in Sharing::ALL {
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
    let mps_domain =
        reader.key("mps_domain", || default("client"), |v| one_of(v, &["client", "server"], &[]), plain)?;
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
    let written = |key: &str| raw.keys.contains_key(key);
    if mps.is_none() && ["mps_domain", "mps_control"].iter().any(|key| written(key)) {
        warnings.push(
            "mps_domain and mps_control have no effect without sharing = \"mps\" or gpu_sharing.mps".into(),
        );
    }
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
    let isolation =
        reader.key("isolation", || default("try"), |v| one_of(v, &["off", "try", "require"], &[]), plain)?;
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
    let mut idle = Vec::new();
    for name in IDLE_TIMES {
        let of_default = KEYS.iter().find(|k| k.name == name).and_then(|k| parse_duration(k.default));
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
    let state_dir = reader.key(
        "state_dir",
        || directory("STATE_DIRECTORY", "/var/lib/gpuserver"),
        absolute,
        |p| p.display().to_string(),
    )?;
    let runtime_dir = reader.key(
        "runtime_dir",
        || directory("RUNTIME_DIRECTORY", "/run/gpuserver"),
        absolute,
        |p| p.display().to_string(),
    )?;
    let percent = |v: &Value| {
        let bad = || "a percentage from \"100%\" to \"1000%\" is wanted".to_string();
        let n = text(v)?.strip_suffix('%').and_then(|p| p.trim().parse::<u64>().ok()).ok_or_else(bad)?;
        if (100..=1000).contains(&n) { Ok(n) } else { Err(bad()) }
    };
    let overcommit_percent =
        reader.key("overcommit", || (100, Origin::Default), percent, |p| format!("{p}%"))?;
    reader.key("compute_mode", || default("check"), |v| one_of(v, &["check"], &["manage"]), plain)?;
    let drain_timeout = reader.key(
        "drain_timeout",
        || (Duration::from_secs(60), Origin::Default),
        duration,
        |d| show_duration(*d),
    )?;
    // Simulated machines on one host have GPUs with the same UUIDs, so these are not locked.
    let real = around.nvidia_driver.then(|| PathBuf::from("/run/lock/gpusession"));
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
    let scope =
        reader.key("users.scope", || default("client"), |v| one_of(v, &["client", "site"], &[]), plain)?;
    let mut report = reader.report;
    let scope = if scope == "site" { Scope::Site } else { Scope::Client };
    let mut limits = check_limits(&raw, scope, &mut report)?;
    limits.entries.extend(idle);
    let idle = limits.of("", "").idle();
    warnings.extend(limits.without_effect());
    let reserve = raw.reserve.iter().map(check_reserve).collect::<Result<Vec<_>, _>>()?;
    for (r, (_, origin)) in reserve.iter().zip(&raw.reserve) {
        let memory = Bound::Memory(r.memory);
        report.push((
            "reserve".into(),
            format!("{} GPU(s), {memory} of each, for {}", r.gpus, r.client),
            origin.clone(),
        ));
    }
    let rules = Rules { reserve, overcommit_percent };
    if overcommit_percent > 100 {
        warnings.push(format!(
            "overcommit = \"{overcommit_percent}%\": programs may find less memory than their lease promises"
        ));
    }

    if let Some(address) = metrics_listen.filter(|a| !a.ip().is_loopback()) {
        warnings.push(format!(
            "metrics_listen = {address}: any peer can read names of clients and servers; let only Prometheus reach it"
        ));
    }
    if encryption && !trusted_networks.is_empty() {
        warnings.push("trusted_networks has no effect while encryption = \"on\"".into());
    }
    if !encryption && trusted_networks.is_empty() {
        warnings.push(
            "encryption = \"off\" has no effect without trusted_networks: all data is encrypted".into(),
        );
    }
    if mps.is_some() {
        if !idle.park.is_zero() {
            warnings.push(
                "park_after: the driver cannot park programs under MPS, whose users are only warned; programs of \
                 leases with sharing = \"time-slice\" are parked"
                    .into(),
            );
        }
        let folder = runtime_dir.join("mps");
        crate::mps::check_folder(&folder).map_err(|m| {
            let origin = raw.keys.get("runtime_dir").map_or(Origin::Default, |(_, origin)| origin.clone());
            ConfigError::new(origin, format!("runtime_dir: {m}"))
        })?;
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
    if let Some((low, high)) = around.ephemeral {
        for (key, port) in [("listen", listen.port()), ("data_ports", data_ports.0)] {
            if (low..=high).contains(&port) {
                warnings.push(format!(
                    "{key}: port {port} is inside the kernel's ephemeral range {low}-{high}: another program may \
                     take it before gpuserver starts"
                ));
            }
        }
    }
    Ok(Config {
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
    })
}

/// Rejects a configuration with two listeners on one port.
///
/// Ports of other programs are known only when the server binds its own.
fn check_ports(
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

/// Formats the key of a limit.
pub fn limit_key(layer: &Layer, name: &str) -> String {
    let of = |kind: &str, who: &str| {
        let bare = !who.is_empty() && who.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_".contains(&b));
        if bare { format!("limits.{kind}.{who}.{name}") } else { format!("limits.{kind}.{who:?}.{name}") }
    };
    match layer {
        Layer::Default => format!("limits.{name}"),
        Layer::Group(who) => of("group", who),
        Layer::Client(who) => of("client", who),
        Layer::User(who) => of("user", who),
    }
}

fn check_limits(
    raw: &Raw,
    scope: Scope,
    report: &mut Vec<(String, String, Origin)>,
) -> Result<Limits, ConfigError> {
    let mut out = Limits { scope, ..Limits::default() };
    let mut groups: BTreeMap<String, Group> = BTreeMap::new();
    for limit in LIMITS.iter().filter(|l| !IDLE_TIMES.contains(&l.name)) {
        if !raw.limits.contains_key(&(Layer::Default, limit.name.to_string())) {
            report.push((format!("limits.{}", limit.name), limit.default.into(), Origin::Default));
        }
    }
    for ((layer, name), (value, origin)) in &raw.limits {
        let key = limit_key(layer, name);
        let bad = |m: String| ConfigError::new(origin.clone(), format!("{key} = {value}: {m}"));
        if let Layer::Group(group) = layer {
            let group = groups.entry(group.clone()).or_default();
            let members = match name.as_str() {
                "clients" => Some(&mut group.clients),
                "users" => Some(&mut group.users),
                _ => None,
            };
            if let Some(members) = members {
                *members = texts(value).map_err(bad)?.into_iter().map(String::from).collect();
                report.push((key, value.to_string(), origin.clone()));
                continue;
            }
        }
        // `read_table` inserts known names only.
        let Some(limit) = LIMITS.iter().find(|l| l.name == name) else { continue };
        let written = match value {
            Value::String(s) => s.clone(),
            Value::List(_) => texts(value).map_err(bad)?.join(","),
            Value::Other(_) if limit.kind == limits::Kind::Names => {
                return Err(bad("a list of strings is wanted".into()));
            }
            other => other.to_string(),
        };
        let bound = Bound::parse(limit.kind, &written).map_err(bad)?;
        if name == "on_idle"
            && let Bound::Names(words) = &bound
            && let Some(bad_word) = words.iter().find(|w| !ON_IDLE.contains(&w.as_str()))
        {
            return Err(bad(format!("{bad_word:?} is none of {}", ON_IDLE.join(", "))));
        }
        if name == "sm_percent" && !matches!(bound, Bound::Number(1..=100)) {
            return Err(bad("a number from 1 to 100 is wanted".into()));
        }
        report.push((key, bound.to_string(), origin.clone()));
        out.entries.push(Entry {
            name: limit.name,
            layer: layer.clone(),
            bound,
            origin: origin.to_string(),
            of_user: false,
        });
    }
    for (name, group) in &groups {
        if group.clients.is_empty() && group.users.is_empty() {
            let of_it = raw.limits.iter().find(|((layer, _), _)| *layer == Layer::Group(name.clone()));
            let origin = of_it.map_or(Origin::Default, |(_, (_, origin))| origin.clone());
            let why = format!("limits.group.{name} has no members: set its clients or users");
            return Err(ConfigError::new(origin, why));
        }
    }
    out.groups = groups.into_iter().collect();
    Ok(out)
}

fn check_reserve((fields, origin): &RawReserve) -> Result<Reserve, ConfigError> {
    let mut out = Reserve { client: String::new(), gpus: 1, memory: Memory::Percent(100.0) };
    for (name, value, origin) in fields {
        let bad = |m: String| ConfigError::new(origin.clone(), format!("reserve.{name} = {value}: {m}"));
        match name.as_str() {
            "client" => out.client = text(value).map_err(bad)?.into(),
            "gpus" => match value {
                Value::Integer(n @ 1..=1024) => out.gpus = *n as u32,
                _ => return Err(bad("a number of GPUs is wanted".into())),
            },
            "memory" => {
                let parsed = match value {
                    Value::String(text) => limits::parse_memory(text),
                    other => limits::parse_memory(&other.to_string()),
                };
                out.memory = parsed.map_err(bad)?;
            }
            _ => return Err(bad("the keys of [[reserve]] are client, gpus and memory".into())),
        }
    }
    if out.client.is_empty() {
        return Err(ConfigError::new(origin.clone(), "reserve.client is missing: name the reserve's client"));
    }
    Ok(out)
}

/// Returns the drop-in of a configuration file that `gpuserver config set` writes.
pub fn runtime_file(file: &Path) -> PathBuf {
    file.with_extension("d").join("90-runtime.toml")
}

/// Returns the text of that file with `key` set to this value, or removed if there is none.
pub fn edit_runtime(text: &str, key: &str, value: Option<&str>) -> Result<String, String> {
    let mut document: toml::Table = toml::from_str(text).map_err(|e| e.message().to_string())?;
    // TOML itself splits the dotted key, including quoted parts.
    let probe: toml::Table =
        toml::from_str(&format!("{key} = 0")).map_err(|_| format!("{key:?} is not a key"))?;
    let mut path = Vec::new();
    let mut at = &probe;
    while let Some((name, inner)) = at.iter().next() {
        path.push(name.clone());
        match inner {
            toml::Value::Table(inner) => at = inner,
            _ => break,
        }
    }
    let Some((last, folders)) = path.split_last() else { return Err(format!("{key:?} is not a key")) };
    let mut table = &mut document;
    for folder in folders {
        let inner = table.entry(folder.clone()).or_insert_with(|| toml::Value::Table(toml::Table::new()));
        table = inner.as_table_mut().ok_or_else(|| format!("{folder} is a value, not a table"))?;
    }
    match value {
        // A TOML value, or else a string without quotes.
        Some(text) => {
            let value = toml::from_str::<toml::Table>(&format!("v = {text}"))
                .ok()
                .and_then(|mut t| t.remove("v"))
                .unwrap_or_else(|| toml::Value::String(text.into()));
            table.insert(last.clone(), value);
        }
        None => drop(table.remove(last)),
    }
    let body = toml::to_string(&document).map_err(|e| e.to_string())?;
    Ok(format!("# Written by `gpuserver config set`.\n{body}"))
}

#[cfg(test)]
mod tests;
