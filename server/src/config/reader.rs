//! Reading of one key: its value in the files, or its default.

use std::path::{Path, PathBuf};

use gpusession_common::keys::Row;

use super::kinds::{Kind, name_from_host};
use super::origin::{ConfigError, Origin};
use super::raw::{RawKeys, default_value};
use crate::gpu_lock;

/// Name, value as text and origin of each key.
pub type Report = Vec<(String, String, Origin)>;

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
    /// Whether systemd runs this host and has the signer's unit.
    pub signer_unit: bool,
    /// Whether systemd runs this host and has the starter's unit.
    pub starter_unit: bool,
}

/// Returns the suffix of an instance's folders: `-NAME` for `gpuserver-NAME.toml`.
pub(super) fn instance(file: &Path) -> String {
    let stem = file.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
    stem.strip_prefix("gpuserver")
        .filter(|rest| rest.len() > 1 && rest.starts_with('-'))
        .unwrap_or_default()
        .into()
}

/// Reads keys from raw values, and reports each.
pub struct Reader<'a> {
    pub(super) raw: &'a RawKeys,
    pub(super) host: Host<'a>,
    pub(super) report: Report,
}

/// Facts on which defaults depend.
#[derive(Clone, Copy)]
pub struct Host<'a> {
    pub(super) file: &'a Path,
    pub(super) around: &'a Surroundings<'a>,
}

/// Returns a default that depends on the host.
type Found<T> = fn(&Host<'_>) -> (T, Origin);

impl Reader<'_> {
    /// Reads one key; without a value the default of its row, or the found one.
    pub fn key<T>(&mut self, row: &Row, kind: &Kind<T>, found: Option<Found<T>>) -> Result<T, ConfigError> {
        let parse = |value, origin: &Origin| {
            (kind.read)(value)
                .map_err(|m| ConfigError::new(origin.clone(), format!("{} = {value}: {m}", row.name)))
        };
        let (value, origin) = match (self.raw.get(row.name), found) {
            (Some((value, origin)), _) => (parse(value, origin)?, origin.clone()),
            (None, Some(found)) => found(&self.host),
            (None, None) => (parse(&default_value(row.value)?, &Origin::Default)?, Origin::Default),
        };
        self.report.push((row.name.into(), (kind.show)(&value), origin));
        Ok(value)
    }
}

/// Default of a key without which something else is found later.
pub(super) fn absent<T>(_: &Host<'_>) -> (Option<T>, Origin) {
    (None, Origin::Default)
}

/// Default of a list that is empty.
pub(super) fn nothing<T>(_: &Host<'_>) -> (Vec<T>, Origin) {
    (Vec::new(), Origin::Default)
}

/// Placeholder for a key that has to be set; its reader refuses the empty text.
pub(super) fn required(_: &Host<'_>) -> (String, Origin) {
    (String::new(), Origin::Default)
}

/// Default of `name`, from the host's name; empty if that is no name.
pub(super) fn own_name(host: &Host<'_>) -> (String, Origin) {
    (name_from_host(&host.around.host_name).unwrap_or_default(), Origin::Default)
}

/// Default of `lock_dir`.
pub(super) fn lock_folder(host: &Host<'_>) -> (Option<PathBuf>, Origin) {
    // Simulated machines on one host have GPUs with the same UUIDs, so these are not locked.
    (host.around.nvidia_driver.then(|| gpu_lock::COMMON.into()), Origin::Default)
}

/// Default of `state_dir`.
pub(super) fn state_folder(host: &Host<'_>) -> (PathBuf, Origin) {
    directory(host, "STATE_DIRECTORY", "/var/lib/gpuserver")
}

/// Default of `signer`.
pub(super) fn signer_socket(host: &Host<'_>) -> (Option<PathBuf>, Origin) {
    let socket = || format!("/run/gpuserver-ca{}/sign.sock", instance(host.file)).into();
    ((host.around.signer_unit && is_of_host(host)).then(socket), Origin::Default)
}

/// Default of `starter`.
pub(super) fn starter_socket(host: &Host<'_>) -> (Option<PathBuf>, Origin) {
    let socket = || format!("/run/gpuserver-worker{}/start.sock", instance(host.file)).into();
    ((host.around.starter_unit && is_of_host(host)).then(socket), Origin::Default)
}

/// Returns `true` for a server of this host's units.
///
/// A user's own server has files of its own, and no right to the host's signer and starter.
fn is_of_host(host: &Host<'_>) -> bool {
    host.file.parent() == Some(Path::new("/etc/gpusession"))
}

/// Default of `runtime_dir`.
pub(super) fn runtime_folder(host: &Host<'_>) -> (PathBuf, Origin) {
    directory(host, "RUNTIME_DIRECTORY", "/run/gpuserver")
}

/// Returns a directory that systemd created: the first of a colon-separated list.
///
/// Without the variable, returns the directory that systemd would create for this instance, so
/// that a verb outside the unit finds the server of its configuration.
fn directory(host: &Host<'_>, variable: &'static str, otherwise: &str) -> (PathBuf, Origin) {
    match (host.around.env)(variable) {
        Some(v) if !v.is_empty() => {
            (PathBuf::from(v.split(':').next().unwrap_or_default()), Origin::Environment(variable))
        }
        _ => (PathBuf::from(format!("{otherwise}{}", instance(host.file))), Origin::Default),
    }
}
