//! `gpuserver config` and `check-config`: show, change and check the configuration.

use std::path::Path;

use gpusession_common::words::Sharing;
use serde_json::{Value, json};

use super::target::{Target, config_file, must_run, running};
use crate::admin::answer::config::{ConfigRow, config_rows, print_config, print_config_changes};
use crate::admin::{Ask, Refusal};
use crate::config::{self, Config, ConfigError};
use crate::discovery::find_driver;
use crate::text::{Output, table};
use clap::Subcommand;

/// A verb of `gpuserver config`.
#[derive(Debug, Subcommand)]
pub enum ConfigVerb {
    /// Print keys and their values
    Get {
        /// Key or its start; without it, all keys
        #[arg(default_value = "")]
        key: String,
        /// Also print the source of each value
        #[arg(long)]
        origin: bool,
    },
    /// Change a key now, and store the change in gpuserver.d/90-runtime.toml
    Set {
        /// Name of the key
        key: String,
        /// New value
        value: String,
    },
    /// Remove a change that `set` has stored
    Unset {
        /// Name of the key
        key: String,
    },
    /// Print the keys that the configuration sets, and values that wait for a restart
    Diff {
        /// Also print the source of each value
        #[arg(long)]
        origin: bool,
    },
    /// Read the configuration files again, as SIGHUP does
    Reload,
}

pub(super) fn configure(out: &mut Output<'_>, server: &Target, verb: &ConfigVerb) -> anyhow::Result<()> {
    let ask = match verb {
        ConfigVerb::Get { .. } | ConfigVerb::Diff { .. } => {
            // Without a server: the configuration with which it would start.
            let value = match running(server, &Ask::Config)? {
                Some(value) => value,
                None => serde_json::to_value(config_rows(server.config()?))?,
            };
            let mut rows: Vec<ConfigRow> = serde_json::from_value(value)?;
            let origin = match verb {
                ConfigVerb::Get { key, origin } => {
                    rows.retain(|r| r.key.starts_with(key.as_str()));
                    if rows.is_empty() {
                        return Err(Refusal::new("no-such-key", format!("no key starts with {key:?}")).into());
                    }
                    *origin
                }
                ConfigVerb::Diff { origin } => {
                    rows.retain(|r| r.changed);
                    *origin
                }
                _ => false,
            };
            let value = serde_json::to_value(rows)?;
            return out.answer("config", value, |out, rows| print_config(out, rows, origin));
        }
        ConfigVerb::Set { key, value } => Ask::ConfigSet { key: key.clone(), value: Some(value.clone()) },
        ConfigVerb::Unset { key } => Ask::ConfigSet { key: key.clone(), value: None },
        ConfigVerb::Reload => Ask::Reload,
    };
    out.answer("config", must_run(server, &ask)?, print_config_changes)
}

/// Returns a text if clients of several groups may use a GPU at the same time, or one after another
/// without a look at its memory.
///
/// A configuration has no tenants; groups of clients come nearest.
fn tenants_that_share(config: &Config) -> Option<String> {
    let groups = config.limits.groups.iter().filter(|(_, group)| !group.clients.is_empty());
    let names: Vec<_> = groups.map(|(name, _)| name.as_str()).collect();
    let ways = config.gpu_sharing.iter().map(|(_, sharing)| *sharing).chain([config.sharing]);
    let lacking = match (ways.into_iter().all(|way| way == Sharing::Exclusive), config.scrub) {
        _ if names.len() < 2 => return None,
        (true, true) => return None,
        (false, false) => "sharing = \"exclusive\" and scrub = \"verify\"",
        (false, true) => "sharing = \"exclusive\"",
        (true, false) => "scrub = \"verify\"",
    };
    Some(format!(
        "limits.group: clients of {} use the same GPUs; where they may attack each other, set {lacking}",
        names.join(", ")
    ))
}

pub(super) fn check_config(
    out: &mut Output<'_>,
    file: Option<&Path>,
    config: &Config,
    explain: bool,
) -> anyhow::Result<()> {
    let driver = find_driver(config.driver.as_deref()).map_err(|e| e.placed(config))?;
    if let Some(mps) = &config.mps {
        crate::mps::control::find(mps.control.as_deref(), &driver)
            .map_err(|m| ConfigError::new(config.origin(mps.key), format!("{}: {m}", mps.key)))?;
    }
    let mut warnings = config.warnings.clone();
    warnings.push(
        "registry = \"local\": this server decides alone about its GPUs, and limits count on this server only"
            .to_string(),
    );
    // check-config does not load the driver: a server may be running, or the GPUs still missing.
    warnings.push(
        "GPUs are not checked: only the start of the server finds those in `gpus` and `gpu_sharing`"
            .to_string(),
    );
    // A folder that this user may not search tells nothing.
    let folder = crate::signer::link::places(config.signer.as_deref(), &config.state_dir).folder;
    if matches!(folder.join("authority.pem").try_exists(), Ok(false)) {
        warnings.push(format!(
            "{}: no pool authority found; `gpuserver pool init` creates one",
            folder.display()
        ));
    }
    warnings.extend(tenants_that_share(config));
    // A limit of any layer is described by its row.
    let row = |key: &str| {
        let limit = key.strip_prefix("limits.").and_then(|k| k.rsplit('.').next());
        let limit = crate::limits::LIMITS.iter().find(|l| Some(l.name) == limit).map(|l| &l.row);
        config::keys().find(|row| row.name == key).or(limit)
    };
    let keys: Vec<_> = config
        .report
        .iter()
        .map(|(key, value, origin)| {
            json!({ "key": key, "value": value, "origin": origin.to_string(), "help": row(key).map(|row| row.brief()) })
        })
        .collect();
    out.answer("config", json!({ "keys": keys, "warnings": warnings }), |out, _: Value| {
        let mut table = table(&["KEY", "VALUE", "FROM"]);
        for (key, value, origin) in &config.report {
            table.add_row([key.clone(), value.clone(), origin.to_string()]);
            if explain && let Some(row) = row(key) {
                // The text itself names a default that depends on the host.
                let default = row.default().map(|text| format!(" (default: {text})"));
                let text = row.brief() + &default.unwrap_or_default();
                table.add_row([String::new(), text, String::new()]);
            }
        }
        writeln!(out, "{}", table.trim_fmt())?;
        for warning in &warnings {
            writeln!(out, "note: {warning}")?;
        }
        writeln!(out, "{}: good", config_file(file).0.display())?;
        Ok(())
    })
}
