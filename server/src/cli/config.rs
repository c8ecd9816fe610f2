//! `gpuserver config` and `check-config`: show, change and check the configuration.

use std::io::Write;
use std::path::Path;

use serde_json::json;

use super::show;
use super::target::{Target, config_file, must_run, running};
use super::verbs::{Cli, ConfigVerb};
use crate::admin::answer::config::{ConfigRow, config_rows};
use crate::admin::{Ask, Refusal};
use crate::config::{self, Config, ConfigError};
use crate::discovery::find_driver;

pub(super) fn configure(
    out: &mut dyn Write,
    server: &Target,
    verb: &ConfigVerb,
    json: bool,
) -> anyhow::Result<()> {
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
            return if json {
                show::json(out, "config", serde_json::to_value(rows)?)
            } else {
                show::config(out, rows, origin)
            };
        }
        ConfigVerb::Set { key, value } => Ask::ConfigSet { key: key.clone(), value: Some(value.clone()) },
        ConfigVerb::Unset { key } => Ask::ConfigSet { key: key.clone(), value: None },
        ConfigVerb::Reload => Ask::Reload,
    };
    let value = must_run(server, &ask)?;
    if json {
        return show::json(out, "config", value);
    }
    let mut nothing = true;
    for (list, note) in [("changed", ""), ("after_restart", " (after a restart)")] {
        for line in value[list].as_array().into_iter().flatten() {
            writeln!(out, "{}{note}", line.as_str().unwrap_or_default())?;
            nothing = false;
        }
    }
    if nothing {
        writeln!(out, "nothing changed")?;
    }
    Ok(())
}

pub(super) fn check_config(
    out: &mut dyn Write,
    cli: &Cli,
    config: &Config,
    explain: bool,
    json: bool,
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
    if !config.state_dir.join("ca/authority.key").exists() {
        warnings.push(format!(
            "{}: no pool authority found; `gpuserver pool init` creates one",
            config.state_dir.join("ca").display()
        ));
    }
    let help = |key: &str| {
        let limit = key.strip_prefix("limits.").and_then(|k| k.rsplit('.').next());
        let limit = crate::limits::LIMITS.iter().find(|l| Some(l.name) == limit).map(|l| (l.help, l.default));
        config::KEYS.iter().find(|k| k.name == key).map(|k| (k.help, k.default)).or(limit)
    };
    if json {
        let keys: Vec<_> = config
            .report
            .iter()
            .map(|(key, value, origin)| {
                json!({ "key": key, "value": value, "origin": origin.to_string(), "help": help(key).map(|h| h.0) })
            })
            .collect();
        return show::json(out, "config", json!({ "keys": keys, "warnings": warnings }));
    }
    let mut table = show::table(&["KEY", "VALUE", "FROM"]);
    for (key, value, origin) in &config.report {
        table.add_row([key.clone(), value.clone(), origin.to_string()]);
        if explain && let Some((text, default)) = help(key) {
            table.add_row([String::new(), format!("{text} (default: {default})"), String::new()]);
        }
    }
    writeln!(out, "{table}")?;
    for warning in &warnings {
        writeln!(out, "note: {warning}")?;
    }
    writeln!(out, "{}: good", shown(&config_file(cli).0))?;
    Ok(())
}

fn shown(path: &Path) -> std::path::Display<'_> {
    path.display()
}
