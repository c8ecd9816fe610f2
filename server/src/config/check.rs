//! The configuration from raw values: each key by its row, or its default.

use std::path::Path;

use gpusession_common::words::Sharing;

use super::checked::Config;
use super::cross::{check_gpu_sharing, check_mps_folder, check_ports, cross_warnings, mps_without_effect};
use super::keys::{GpuSharing, Keys, Users, gpu_sharing_key};
use super::limit_tables::{check_limits, check_reserves};
use super::origin::{ConfigError, Origin};
use super::raw::Raw;
use super::reader::{Host, Reader, Surroundings, instance};
use super::values::Mps;
use crate::lease::Rules;
use crate::limits::{Bound, Entry, Layer};

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
    let suffix = instance(file);
    for (taken, by) in [("-ca", "signer"), ("-worker", "starter")] {
        if suffix == taken || suffix.starts_with(&format!("{taken}-")) {
            let why = format!("the folders of the {by} have this name; give the instance another one");
            return Err(ConfigError::new(Origin::File(file.into(), 0), why));
        }
    }
    check_ports(&raw, keys.listen, keys.data_ports, keys.metrics_listen)?;
    check_gpu_sharing(&raw, &gpu_sharing)?;
    let mps = mps(&keys, &gpu_sharing);
    warnings.extend(mps_without_effect(&raw, mps.as_ref()));
    if mps.is_some() {
        check_mps_folder(&raw, &keys.runtime_dir)?;
    }
    let mut limits = check_limits(&raw, users.scope, &mut report)?;
    limits.entries.extend(times(&keys, &raw));
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

/// Returns the times with top-level keys as limits for everybody.
fn times(keys: &Keys, raw: &Raw) -> impl Iterator<Item = Entry> {
    [
        ("warn_after", Bound::Time(keys.warn_after)),
        ("park_after", Bound::Time(keys.park_after)),
        ("release_after", Bound::Time(keys.release_after)),
        ("lend_after", Bound::Time(keys.lend_after)),
        ("resume_grace", Bound::Grace(keys.resume_grace)),
    ]
    .into_iter()
    .map(|(name, bound)| {
        let origin = raw.keys.get(name).map_or(&Origin::Default, |(_, origin)| origin).to_string();
        Entry { name, layer: Layer::Default, bound, origin, of_user: false }
    })
}
