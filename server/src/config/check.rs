//! The configuration from raw values: each key by its row, or its default.

use std::path::{Path, PathBuf};

use gpusession_common::keys::Row;
use gpusession_common::words::Sharing;

use super::cross::{check_gpu_sharing, check_mps_folder, check_ports, cross_warnings, mps_without_effect};
use super::keys::{GpuSharing, Keys, Users, gpu_sharing_key};
use super::kinds::{Kind, name_from_host};
use super::limit_tables::{check_limits, check_reserves};
use super::read::{Raw, RawKeys, default_value};
use super::{Config, ConfigError, Mps, Origin, Report, Surroundings, instance};
use crate::lease::Rules;
use crate::limits::{Bound, Entry, Layer};

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

/// Turns raw values into the configuration; reports each key, and warns of keys without effect.
pub(super) fn check(
    raw: Raw,
    mut warnings: Vec<String>,
    file: &Path,
    around: &Surroundings<'_>,
) -> Result<Config, ConfigError> {
    let host = Host { file, around };
    let mut reader = Reader { raw: &raw.keys, host, report: Vec::new() };
    let keys = Keys::read(&mut reader)?;
    let gpu_sharing = GpuSharing::read(&mut reader)?;
    let users = Users::read(&mut reader)?;
    let mut report = reader.report;
    if keys.name.is_empty() {
        let host_name = &around.host_name;
        let why = format!("name: the host name {host_name:?} cannot be this server's name; set `name`");
        return Err(ConfigError::new(Origin::Default, why));
    }
    check_ports(&raw, keys.listen, keys.data_ports, keys.metrics_listen)?;
    check_gpu_sharing(&raw, &gpu_sharing)?;
    let mps = mps(&keys, &gpu_sharing);
    warnings.extend(mps_without_effect(&raw, mps.as_ref()));
    if mps.is_some() {
        check_mps_folder(&raw, &keys.runtime_dir)?;
    }
    let mut limits = check_limits(&raw, users.scope, &mut report)?;
    limits.entries.extend(idle_times(&keys, &raw));
    warnings.extend(limits.without_effect());
    let reserve = check_reserves(&raw, host, &mut report)?;
    let shared_domain = mps.as_ref().is_some_and(|mps| mps.shared);
    let rules = Rules { reserve, overcommit_percent: keys.overcommit, shared_domain };
    let mut config = Config {
        keys,
        users,
        gpu_sharing: gpu_sharing.listed().map(|(gpu, sharing)| (gpu.clone(), sharing)).collect(),
        mps,
        rules,
        limits,
        file: file.into(),
        file_found: true,
        report,
        waiting: Vec::new(),
        warnings,
    };
    let more = cross_warnings(&config, around.ephemeral);
    config.warnings.extend(more);
    Ok(config)
}

/// Returns the settings of MPS, if a GPU is shared by it.
fn mps(keys: &Keys, gpu_sharing: &GpuSharing) -> Option<Mps> {
    let key = match keys.sharing {
        Sharing::Mps => "sharing",
        _ if gpu_sharing.mps.is_empty() => return None,
        _ => gpu_sharing_key(Sharing::Mps),
    };
    Some(Mps {
        key: if keys.mps_control.is_some() { "mps_control" } else { key },
        shared: keys.mps_domain == "server",
        control: keys.mps_control.clone(),
    })
}

/// Returns the idle times as limits for everybody.
fn idle_times(keys: &Keys, raw: &Raw) -> impl Iterator<Item = Entry> {
    [
        ("warn_after", keys.warn_after),
        ("park_after", keys.park_after),
        ("release_after", keys.release_after),
        ("lend_after", keys.lend_after),
    ]
    .into_iter()
    .map(|(name, time)| {
        let origin = raw.keys.get(name).map_or(&Origin::Default, |(_, origin)| origin).to_string();
        Entry { name, layer: Layer::Default, bound: Bound::Time(time), origin, of_user: false }
    })
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
    (host.around.nvidia_driver.then(|| "/run/lock/gpusession".into()), Origin::Default)
}

/// Default of `state_dir`.
pub(super) fn state_folder(host: &Host<'_>) -> (PathBuf, Origin) {
    directory(host, "STATE_DIRECTORY", "/var/lib/gpuserver")
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
