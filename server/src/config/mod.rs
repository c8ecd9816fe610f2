//! The server's configuration: its keys, their sources and their checks.
//!
//! `gpuserver.toml` is read first, then the drop-ins `gpuserver.d/*.toml` in the same folder, in
//! the order of their names; a later value wins.
//! Every error names file, line and key; an unknown key is an error.

mod check;
mod cross;
mod keys;
mod kinds;
mod limit_tables;
mod read;
mod runtime;
#[cfg(test)]
mod tests;
mod unknown;

use std::fmt;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use crate::lease::Rules;
use crate::limits::Limits;
use gpusession_common::words::Sharing;

use check::check;
pub use keys::{Keys, Users, gpu_sharing_key, is_live, keys};
pub use kinds::advertised;
use read::{Raw, expand, read_text};
pub use runtime::{edit_runtime, runtime_file};

/// Remedy for a file that the caller may not read.
const AS_ROOT: &str = "; run this command as root";
/// Configuration file unless the command line names another.
pub const DEFAULT_FILE: &str = "/etc/gpusession/gpuserver.toml";

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

/// Name, value as text and origin of each key.
pub type Report = Vec<(String, String, Origin)>;

/// The configuration after all checks. It derefs to [`Keys`]: `config.listen` is a key's value.
#[derive(Debug, Clone)]
pub struct Config {
    /// Values of the keys outside of tables.
    pub keys: Keys,
    /// Values of `[users]`.
    pub users: Users,
    /// GPUs with a way of sharing of their own.
    pub gpu_sharing: Vec<(GpuChoice, Sharing)>,
    /// Settings of MPS, if a GPU is shared by it.
    pub mps: Option<Mps>,
    /// Reserves and overcommit.
    pub rules: Rules,
    /// Limits of clients and users.
    pub limits: Limits,
    /// Configuration file.
    pub file: PathBuf,
    /// Whether that file exists: then a reload requires it.
    pub file_found: bool,
    /// Name, value as text and origin of every key.
    pub report: Report,
    /// Values that changed in the files since the start, and take effect after a restart.
    pub waiting: Report,
    /// Texts about settings that work, but probably not as intended.
    pub warnings: Vec<String>,
}

impl std::ops::Deref for Config {
    type Target = Keys;

    fn deref(&self) -> &Keys {
        &self.keys
    }
}

impl Config {
    /// Returns this configuration with everything of a fresh one that changes without a restart.
    pub fn with_live_of(&self, fresh: Self) -> Self {
        let Self { keys, users, gpu_sharing, mps, rules, file, report: old, .. } = self;
        let is_old = |entry: &(String, String, Origin)| {
            old.iter().any(|(key, value, _)| (key, value) == (&entry.0, &entry.1))
        };
        let (mut report, mut waiting): (Report, Report) =
            fresh.report.into_iter().partition(|(key, ..)| is_live(key));
        // Keys that need a restart are in every report.
        waiting.retain(|entry| !is_old(entry));
        report.extend(old.iter().filter(|(key, ..)| !is_live(key)).cloned());
        Self {
            keys: keys.with_live_of(&fresh.keys),
            users: users.with_live_of(&fresh.users),
            gpu_sharing: gpu_sharing.clone(),
            mps: mps.clone(),
            // The domain of a lease changes with a restart only.
            rules: Rules { shared_domain: rules.shared_domain, ..fresh.rules },
            limits: fresh.limits,
            file: file.clone(),
            file_found: fresh.file_found,
            report,
            waiting,
            warnings: fresh.warnings,
        }
    }

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
                std::io::ErrorKind::PermissionDenied => AS_ROOT,
                _ => "",
            };
            let why = format!("cannot be read: {e}{todo}");
            return Err(ConfigError::new(Origin::File(file.into(), 0), why));
        }
    }
    for path in drop_ins(file)? {
        let text = std::fs::read_to_string(&path).map_err(|e| {
            let todo = if e.kind() == std::io::ErrorKind::PermissionDenied { AS_ROOT } else { "" };
            ConfigError::new(Origin::File(path.clone(), 0), format!("cannot be read: {e}{todo}"))
        })?;
        read_text(&mut raw, &path, &text, around.env)?;
    }
    Ok(Config { file_found, ..check(raw, warnings, file, around)? })
}

/// As [`load`], with the facts of this host.
pub fn load_here(file: &Path, required: bool) -> Result<Config, ConfigError> {
    let host_name = nix::unistd::gethostname().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    let ephemeral = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").ok().and_then(|text| {
        let (low, high) = text.trim().split_once(char::is_whitespace)?;
        Some((low.parse().ok()?, high.trim().parse().ok()?))
    });
    let env = |name: &str| std::env::var(name).ok();
    let nvidia_driver = Path::new("/sys/module/nvidia").exists();
    load(file, required, &Surroundings { env: &env, host_name, ephemeral, nvidia_driver })
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
