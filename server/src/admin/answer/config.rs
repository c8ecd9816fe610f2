//! Answers about the configuration and its limits.

use std::io::Write;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::show;
use crate::config;
use crate::limits::LIMITS;
use crate::pool::Pool;
use crate::refusal::Refusal;
use crate::text::{print_table, table};

/// A row of `gpuserver limits`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct LimitRow {
    /// Key of the limit.
    pub limit: String,
    /// Value as text.
    pub value: String,
    /// Layer that sets it: everybody, a group, a client or a user.
    pub of: String,
    /// File and line that set it.
    pub origin: String,
    /// Explanation for people.
    pub help: String,
}

/// A key of the configuration.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ConfigRow {
    /// Dotted name of the key.
    pub key: String,
    /// Effective value as text.
    pub value: String,
    /// Source of the value: file and line, environment variable, or default.
    pub origin: String,
    /// Whether the configuration sets it.
    pub changed: bool,
    /// Whether a change takes effect without a restart.
    pub live: bool,
    /// Whether this value is in the files only, and takes effect after a restart.
    #[serde(default)]
    pub after_restart: bool,
}

pub(in crate::admin) fn limits(pool: &Pool, client: String, user: String) -> Result<Value, Refusal> {
    let rows: Vec<_> = pool
        .limits_of(&client, &user)
        .all()
        .iter()
        .map(|e| LimitRow {
            limit: e.name.into(),
            value: e.bound.to_string(),
            of: e.layer.to_string(),
            origin: e.origin.clone(),
            help: LIMITS.iter().find(|l| l.name == e.name).map(|l| l.row.brief()).unwrap_or_default(),
        })
        .collect();
    show(serde_json::to_value(rows))
}

pub(in crate::admin) fn config(pool: &Pool) -> Result<Value, Refusal> {
    show(serde_json::to_value(config_rows(&pool.config())))
}

pub(in crate::admin) async fn set(pool: &Pool, key: String, value: Option<String>) -> Result<Value, Refusal> {
    let (holds, waits) = pool.set_key(&key, value.as_deref()).await?;
    Ok(serde_json::json!({ "changed": holds, "after_restart": waits }))
}

pub(in crate::admin) async fn reload(pool: &Pool) -> Result<Value, Refusal> {
    let (holds, waits) = pool.read_again().await?;
    Ok(serde_json::json!({ "changed": holds, "after_restart": waits }))
}

/// Lists the keys of a configuration, then the values that wait for a restart.
pub fn config_rows(config: &config::Config) -> Vec<ConfigRow> {
    let row = |(key, value, origin): &(String, String, config::Origin), after_restart| ConfigRow {
        key: key.clone(),
        value: value.clone(),
        origin: origin.to_string(),
        changed: after_restart || !matches!(origin, config::Origin::Default),
        live: config::is_live(key),
        after_restart,
    };
    let holds = config.report.iter().map(|entry| row(entry, false));
    holds.chain(config.waiting.iter().map(|entry| row(entry, true))).collect()
}

/// Prints `gpuserver limits` of a user, or without a user if the name is empty.
pub fn print_limits(out: &mut dyn Write, rows: Vec<LimitRow>, user: &str) -> anyhow::Result<()> {
    let n = rows.len();
    let mut table = table(&["LIMIT", "VALUE", "OF", "FROM", "MEANING"]);
    for r in rows {
        table.add_row([r.limit, r.value, r.of, r.origin, r.help]);
    }
    print_table(out, &table, n, "no limits")?;
    if !user.is_empty() {
        writeln!(
            out,
            "limits of {user} apply to {user}'s own leases; on a lease for all users of a machine, workers, connections, \
             threads and host_memory apply to {user}'s programs"
        )?;
    }
    Ok(())
}

/// Prints `gpuserver config get` and `gpuserver config diff`.
pub fn print_config(out: &mut dyn Write, rows: Vec<ConfigRow>, origin: bool) -> anyhow::Result<()> {
    for r in rows {
        let (waits, live) = match (r.after_restart, r.live) {
            (true, _) => (" (after a restart)", ""),
            (false, true) => ("", ""),
            (false, false) => ("", ", a change needs a restart"),
        };
        match origin {
            true => writeln!(out, "{} = {}{waits}  # {}{live}", r.key, r.value, r.origin)?,
            false => writeln!(out, "{} = {}{waits}", r.key, r.value)?,
        }
    }
    Ok(())
}

/// Prints `gpuserver config set`, `unset` and `reload`.
pub fn print_config_changes(out: &mut dyn Write, value: Value) -> anyhow::Result<()> {
    let mut nothing = true;
    for (list, note) in [("changed", ""), ("after_restart", " (after a restart)")] {
        for line in value[list].as_array().into_iter().flatten() {
            writeln!(out, "{}{note}", line.as_str().unwrap_or_default())?;
            nothing = false;
        }
    }
    if nothing {
        writeln!(out, "configuration: no key changed")?;
    }
    Ok(())
}
