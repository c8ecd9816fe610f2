//! `gpusession.toml`, its `conf.d/*.toml` drop-ins and `servers.toml`.
//!
//! Every file is parsed separately, so that an error names file, line and the probable meaning.
//! Later files win key by key; their `[[lease]]` tables are appended.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use gpusession_common::units::{Memory, nearest};
use gpusession_common::words::{Class, OnIdle, Priority, Sharing};
use gpusession_proto::login;
use serde::{Deserialize, Serialize};

use crate::units::{SmPercent, control_address};

/// The daemon's configuration, with all defaults filled in.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// `[client] name`: the name to join with; the host's name if absent.
    pub client_name: Option<String>,
    pub access: Access,
    /// `wait_ms`: how long a process's first CUDA call waits for a lease that is not held yet.
    pub wait: Duration,
    /// `[[lease]]` tables in file order.
    pub leases: Vec<LeaseConfig>,
    pub transport: Transport,
    /// `[environment]`: set for login sessions unless the user has set them.
    pub environment: BTreeMap<String, String>,
    pub log_level: String,
    /// Files that were read.
    pub files: Vec<PathBuf>,
}

/// `[access]`: users who may use the leases for all.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Access {
    /// User names or uids; `*` is every user.
    pub users: Vec<String>,
    pub groups: Vec<String>,
    /// Whether root may use them.
    pub root: bool,
    /// Most leases that a user other than root may hold in addition to the configured ones.
    pub extra_leases: u32,
}

/// One `[[lease]]` table.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LeaseConfig {
    /// Name for users; `lease` and its number if absent.
    pub name: String,
    pub gpus: u32,
    /// Limit on each GPU's memory.
    pub memory: Memory,
    pub sm_percent: SmPercent,
    /// Number of multiprocessors, in place of `sm_percent`.
    pub sm_count: Option<u32>,
    pub priority: Priority,
    /// How the GPU is shared; the server's choice if absent.
    pub sharing: Option<Sharing>,
    /// Part of the GPU model's name; any model if absent.
    pub model: Option<String>,
    /// Name or address of the only server to ask; any if absent.
    pub server: Option<String>,
    /// Name of the user who owns the lease; all users if absent.
    pub for_user: Option<String>,
    pub class: Class,
    /// Action on an idle lease; the server's policy if absent.
    pub on_idle: Option<OnIdle>,
    /// Never lend the lease while no program uses it.
    pub hold: bool,
}

impl Default for LeaseConfig {
    fn default() -> Self {
        Self {
            name: String::new(),
            gpus: 1,
            memory: Memory::default(),
            sm_percent: SmPercent::default(),
            sm_count: None,
            priority: Priority::Normal,
            sharing: None,
            model: None,
            server: None,
            for_user: None,
            class: Class::Boot,
            on_idle: None,
            hold: false,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transport {
    /// Transports in order of preference.
    pub order: Vec<String>,
    /// Number of parallel lanes for bulk data.
    pub lanes: u32,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    client: Option<ClientTable>,
    access: Option<AccessTable>,
    wait_ms: Option<u64>,
    #[serde(default)]
    lease: Vec<LeaseConfig>,
    transport: Option<TransportTable>,
    environment: Option<BTreeMap<String, String>>,
    log_level: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ClientTable {
    name: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct AccessTable {
    users: Option<Vec<String>>,
    groups: Option<Vec<String>>,
    root: Option<bool>,
    extra_leases: Option<u32>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct TransportTable {
    order: Option<Vec<String>>,
    lanes: Option<u32>,
}

/// Why a configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A file cannot be read.
    #[error("{}: {error}", path.display())]
    Read { path: PathBuf, error: std::io::Error },
    /// A file is not valid TOML, or has an unknown key or a bad value.
    #[error("{}:{line}:{column}: {message}", path.display())]
    Parse {
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// Column, from 1.
        column: usize,
        /// Description with a suggestion.
        message: String,
    },
    /// The values do not fit together.
    #[error("{}: {message}", path.display())]
    Invalid { path: PathBuf, message: String },
}

/// Parses one TOML file; an error names file, line, column and the nearest known key.
pub fn parse_toml<T: serde::de::DeserializeOwned>(path: &Path, text: &str) -> Result<T, ConfigError> {
    toml::from_str(text).map_err(|error| {
        let at = error.span().map_or(0, |span| span.start).min(text.len());
        let before = &text.as_bytes()[..at];
        let line = before.iter().filter(|b| **b == b'\n').count() + 1;
        let column = at - before.iter().rposition(|b| *b == b'\n').map_or(0, |i| i + 1) + 1;
        let header = text.lines().nth(line - 1).and_then(|l| l.trim().strip_prefix('[')?.strip_suffix(']'));
        let message = match header {
            // A table that belongs into an array of tables, as [lease].
            Some(name)
                if !name.contains('.')
                    && error.message().starts_with("invalid type: map, expected a sequence") =>
            {
                format!("[{name}] is one table, and there can be several; write [[{name}]]")
            }
            _ => explain(error.message()),
        };
        ConfigError::Parse { path: path.into(), line, column, message }
    })
}

/// Rewords serde's "unknown field `x`, expected one of `a`, `b`", with the nearest key.
fn explain(message: &str) -> String {
    let Some(rest) = message.strip_prefix("unknown field `") else { return message.trim_end().to_owned() };
    let Some((key, expected)) = rest.split_once('`') else { return message.to_owned() };
    let known: Vec<&str> = expected.split('`').skip(1).step_by(2).collect();
    match nearest(key, known.iter().copied()) {
        Some(candidate) => format!("unknown key `{key}`, did you mean `{candidate}`?"),
        None => format!("unknown key `{key}`, known keys: {}", known.join(", ")),
    }
}

/// Returns the path of the configuration file.
///
/// That is `GPUSESSION_CONF`, else `gpusession.toml` in `CONFIGURATION_DIRECTORY` or
/// `/etc/gpusession`.
pub fn default_path() -> PathBuf {
    if let Some(path) = std::env::var_os("GPUSESSION_CONF").filter(|p| !p.is_empty()) {
        return path.into();
    }
    crate::paths::configuration_directory().join("gpusession.toml")
}

impl Config {
    /// Reads `path` and the `conf.d/*.toml` next to it; a missing file counts as empty.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let mut files = Vec::new();
        if path.exists() {
            files.push(path.to_owned());
        }
        let drop_ins = path.parent().unwrap_or(Path::new(".")).join("conf.d");
        match std::fs::read_dir(&drop_ins) {
            Ok(entries) => {
                let mut found: Vec<PathBuf> = entries
                    .filter_map(|entry| Some(entry.ok()?.path()))
                    .filter(|p| p.extension().is_some_and(|e| e == "toml"))
                    .collect();
                found.sort();
                files.append(&mut found);
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(ConfigError::Read { path: drop_ins, error }),
        }
        let mut texts = Vec::new();
        for path in files {
            let text = std::fs::read_to_string(&path)
                .map_err(|error| ConfigError::Read { path: path.clone(), error })?;
            texts.push((path, text));
        }
        Self::from_texts(&texts)
    }

    /// Builds a configuration from (path, text) pairs, in order.
    pub fn from_texts(texts: &[(PathBuf, String)]) -> Result<Self, ConfigError> {
        let mut config = Self::default();
        let mut written_in = Vec::new();
        for (path, text) in texts {
            let file: File = parse_toml(path, text)?;
            config.merge(path, file)?;
            config.files.push(path.clone());
            written_in.resize(config.leases.len(), path);
        }
        for i in 0..config.leases.len() {
            if !config.leases[i].name.is_empty() {
                continue;
            }
            let name = format!("lease{}", i + 1);
            if let Some(other) = config.leases.iter().position(|l| l.name == name) {
                let message = format!(
                    "[[lease]] number {} has no name, and its default `{name}` is taken in {}; give it a name",
                    i + 1,
                    written_in[other].display()
                );
                return Err(ConfigError::Invalid { path: written_in[i].clone(), message });
            }
            config.leases[i].name = name;
        }
        Ok(config)
    }

    fn merge(&mut self, path: &Path, file: File) -> Result<(), ConfigError> {
        let invalid = |message: String| Err(ConfigError::Invalid { path: path.into(), message });
        if let Some(name) = file.client.and_then(|c| c.name) {
            self.client_name = Some(name);
        }
        if let Some(access) = file.access {
            let AccessTable { users, groups, root, extra_leases } = access;
            self.access.users = users.unwrap_or_else(|| std::mem::take(&mut self.access.users));
            self.access.groups = groups.unwrap_or_else(|| std::mem::take(&mut self.access.groups));
            self.access.root = root.unwrap_or(self.access.root);
            self.access.extra_leases = extra_leases.unwrap_or(self.access.extra_leases);
        }
        if let Some(ms) = file.wait_ms {
            if ms > 600_000 {
                return invalid(format!(
                    "wait_ms = {ms}: a first CUDA call waits at most 600000 (10 minutes)"
                ));
            }
            self.wait = Duration::from_millis(ms);
        }
        for lease in &file.lease {
            let name = if lease.name.is_empty() { "[[lease]]" } else { &lease.name };
            if !(1..=64).contains(&lease.gpus) {
                return invalid(format!("{name}: gpus = {} is not between 1 and 64", lease.gpus));
            }
            if lease.sm_count == Some(0) {
                return invalid(format!("{name}: sm_count = 0 leaves nothing to use"));
            }
            if lease.sm_count.is_some() && lease.sm_percent != SmPercent::default() {
                return invalid(format!("{name}: sm_percent and sm_count exclude each other: leave one out"));
            }
            if lease.name.len() > 64 || lease.name.chars().any(char::is_control) {
                return invalid("a lease's name has at most 64 characters, no control characters".into());
            }
            if !lease.name.is_empty() && self.leases.iter().any(|l| l.name == lease.name) {
                return invalid(format!("two [[lease]] are named `{name}`; rename one"));
            }
            if let Some(Err(error)) = lease.server.as_deref().map(control_address) {
                return invalid(format!("{name}: server: {error}"));
            }
            self.leases.push(lease.clone());
        }
        if let Some(TransportTable { order, lanes }) = file.transport {
            if let Some(order) = order {
                if let Some(bad) = order.iter().find(|t| !["shm", "rdma", "tcp"].contains(&t.as_str())) {
                    return invalid(format!("transport.order: `{bad}` is none of shm, rdma, tcp"));
                }
                self.transport.order = order;
            }
            if let Some(lanes) = lanes {
                if !(1..=16).contains(&lanes) {
                    return invalid(format!("transport.lanes = {lanes} is not between 1 and 16"));
                }
                self.transport.lanes = lanes;
            }
        }
        for (key, value) in file.environment.unwrap_or_default() {
            if key == "GPUSESSION_ID" {
                return invalid(format!("environment: `{key}`: each session gets its own; remove it"));
            }
            if let Err(error) = login::check(&key, &value) {
                return invalid(format!("environment: `{key}`: {error}"));
            }
            self.environment.insert(key, value);
        }
        let together = self.environment.iter().map(|(key, value)| (key.as_str(), value.as_str()));
        let session = std::iter::once(("GPUSESSION_ID", "123456789012"));
        if let Err(error) = (login::Reply { environment: session.chain(together).collect() }).encode() {
            return invalid(format!("environment: {error}"));
        }
        if let Some(level) = file.log_level {
            if !["error", "warn", "info", "debug", "trace"].contains(&level.as_str()) {
                return invalid(format!("log_level: `{level}` is none of error, warn, info, debug, trace"));
            }
            self.log_level = level;
        }
        Ok(())
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            client_name: None,
            access: Access { users: vec!["*".into()], groups: Vec::new(), root: true, extra_leases: 0 },
            wait: Duration::from_millis(5000),
            leases: Vec::new(),
            transport: Transport { order: vec!["shm".into(), "rdma".into(), "tcp".into()], lanes: 4 },
            environment: BTreeMap::new(),
            log_level: "info".into(),
            files: Vec::new(),
        }
    }
}

/// `servers.toml`: servers of the pool; written by `gpusession join`, may be edited.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Servers {
    /// Servers of the pool. One-time requests ask them in this order, configured leases in a random
    /// one.
    #[serde(default, rename = "server")]
    pub servers: Vec<ServerEntry>,
}

/// One server of the pool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServerEntry {
    /// HOST:PORT of the control plane.
    pub address: String,
}

impl Servers {
    /// Reads a file; `None` if it does not exist.
    pub fn load(path: &Path) -> Result<Option<Self>, ConfigError> {
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(ConfigError::Read { path: path.into(), error }),
        };
        let mut servers: Self = parse_toml(path, &text)?;
        for server in &mut servers.servers {
            server.address = control_address(&server.address)
                .map_err(|message| ConfigError::Invalid { path: path.into(), message })?;
        }
        Ok(Some(servers))
    }

    /// Formats the file's text.
    pub fn to_text(&self) -> String {
        let mut text = String::from("# GPU servers of the pool. Written by `gpusession join`.\n");
        for server in &self.servers {
            text.push_str(&format!(
                "\n[[server]]\naddress = {}\n",
                toml::Value::from(server.address.as_str())
            ));
        }
        text
    }

    pub fn addresses(&self) -> Vec<String> {
        self.servers.iter().map(|s| s.address.clone()).collect()
    }
}

#[cfg(test)]
mod tests;
