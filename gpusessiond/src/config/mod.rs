//! `gpusession.toml`, its `conf.d/*.toml` drop-ins and `servers.toml`.
//!
//! Every file is parsed separately, so that an error names file, line and the probable meaning.
//! Later files win key by key; their `[[lease]]` tables are appended.

mod error;
mod keys;
mod read;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use gpusession_common::keys::Row;
use gpusession_proto::login::variables;
use serde::{Deserialize, Serialize};

use crate::units::{SmPercent, control_address};

pub use error::{ConfigError, parse_toml};
pub use keys::{Access, Client, Keys, LeaseConfig, Transport};
use read::{File, Reader};

/// The daemon's configuration, with all defaults filled in.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Config {
    /// Values of the keys outside of tables.
    pub keys: Keys,
    /// `[client]`: name and pool of this machine.
    pub client: Client,
    /// `[access]`: users who may have GPUs.
    pub access: Access,
    /// `[[lease]]` tables in file order.
    pub leases: Vec<LeaseConfig>,
    /// `[transport]`: connections of programs to workers.
    pub transport: Transport,
    /// `[environment]`: set for login sessions unless the user has set them.
    pub environment: BTreeMap<String, String>,
    /// Files that were read.
    pub files: Vec<PathBuf>,
}

/// Returns the names at the top of a file: keys and tables.
fn top() -> Vec<&'static str> {
    let rows = [Keys::ROWS, Client::ROWS, Access::ROWS, LeaseConfig::ROWS, Transport::ROWS];
    let mut names: Vec<_> = rows.concat().iter().filter_map(|row| row.name.split('.').next()).collect();
    names.push("environment");
    names.dedup();
    names
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
        let files = texts.iter().map(|(path, text)| File::parse(path, text));
        let files = files.collect::<Result<Vec<_>, _>>()?;
        let top = top();
        for file in &files {
            file.check_names(&file.root, &top)?;
        }
        let leases = read_leases(&files)?;
        let most_gpus = leases.iter().map(|lease| lease.gpus).max().unwrap_or(0);
        Ok(Self {
            keys: Keys::read(&mut Reader::roots(&files))?,
            client: Client::read(&mut Reader::table(&files, "client", Client::ROWS)?)?,
            access: Access::read(&mut Reader::table(&files, "access", Access::ROWS)?)?,
            leases,
            transport: Transport::read(&mut Reader::table(&files, "transport", Transport::ROWS)?)?,
            environment: read_environment(&files, most_gpus)?,
            files: texts.iter().map(|(path, _)| path.clone()).collect(),
        })
    }
}

/// Reads the `[[lease]]` tables of all files.
fn read_leases(files: &[File<'_>]) -> Result<Vec<LeaseConfig>, ConfigError> {
    let known: Vec<_> = LeaseConfig::ROWS.iter().map(Row::key).collect();
    let mut leases: Vec<LeaseConfig> = Vec::new();
    let mut written_in = Vec::new();
    for file in files {
        let invalid = |message| ConfigError::Invalid { path: file.path.into(), message };
        for table in file.tables("lease")? {
            file.check_names(table, &known)?;
            let lease = LeaseConfig::read(&mut Reader::of(file, table))?;
            let name = if lease.name.is_empty() { "[[lease]]" } else { &lease.name };
            if lease.sm_count.is_some() && lease.sm_percent != SmPercent::default() {
                let why = "sm_percent and sm_count exclude each other: leave one out";
                return Err(invalid(format!("{name}: {why}")));
            }
            if !lease.name.is_empty() && leases.iter().any(|l| l.name == lease.name) {
                return Err(invalid(format!("two [[lease]] are named `{name}`; rename one")));
            }
            leases.push(lease);
            written_in.push(file.path);
        }
    }
    for i in 0..leases.len() {
        if !leases[i].name.is_empty() {
            continue;
        }
        let name = format!("lease{}", i + 1);
        if let Some(other) = leases.iter().position(|l| l.name == name) {
            let message = format!(
                "[[lease]] number {} has no name, and its default `{name}` is taken in {}; give it a name",
                i + 1,
                written_in[other].display()
            );
            return Err(ConfigError::Invalid { path: written_in[i].into(), message });
        }
        leases[i].name = name;
    }
    Ok(leases)
}

/// Variables that programs on several GPUs of a lease need, unless they are set otherwise.
///
/// Without NVLink, NCCL prefers host memory that both GPUs poll, which a remote GPU cannot do.
/// Each synchronization compares the host memory from which GPUs take NCCL's work, by default 1 MiB
/// for each communicator.
pub fn variables_for(gpus: u32) -> impl Iterator<Item = (&'static str, &'static str)> {
    let needed = [("NCCL_P2P_LEVEL", "SYS"), ("NCCL_WORK_FIFO_BYTES", "65536")];
    needed.into_iter().filter(move |_| gpus > 1)
}

/// Reads the variables of `[environment]`, and adds those that the largest lease needs.
fn read_environment(files: &[File<'_>], most_gpus: u32) -> Result<BTreeMap<String, String>, ConfigError> {
    let needed = variables_for(most_gpus).map(|(name, value)| (name.to_owned(), value.to_owned()));
    let mut environment: BTreeMap<String, String> = needed.collect();
    for file in files {
        let invalid = |message| ConfigError::Invalid { path: file.path.into(), message };
        let given: BTreeMap<String, String> =
            file.root.get("environment").map(|written| file.value(written)).transpose()?.unwrap_or_default();
        for (key, value) in given {
            if key == "GPUSESSION_ID" {
                return Err(invalid(format!("environment: `{key}`: each session gets its own; remove it")));
            }
            variables::check(&key, &value)
                .map_err(|error| invalid(format!("environment: `{key}`: {error}")))?;
            environment.insert(key, value);
        }
        variables::encode(environment.iter().map(|(key, value)| (key.as_str(), value.as_str())))
            .map_err(|error| invalid(format!("environment: {error}")))?;
    }
    Ok(environment)
}

/// Values of rows without a file; a test reads each default.
macro_rules! defaults {
    ($($table:ty),+) => {$(
        impl Default for $table {
            fn default() -> Self {
                Self::read(&mut Reader::default()).expect("the default of a row is valid")
            }
        }
    )+};
}

defaults!(Keys, Client, Access, LeaseConfig, Transport);

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

    /// Returns HOST:PORT of each server, in the order of the file.
    pub fn addresses(&self) -> Vec<String> {
        self.servers.iter().map(|s| s.address.clone()).collect()
    }
}

#[cfg(test)]
mod tests;
