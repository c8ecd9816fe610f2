//! The configuration after all checks.

use std::net::IpAddr;
use std::path::PathBuf;

use gpusession_common::words::Sharing;

use super::keys::{Keys, Users, is_live};
use super::origin::Origin;
use super::reader::Report;
use super::values::{GpuChoice, Mps};
use crate::lease::Rules;
use crate::limits::Limits;

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
