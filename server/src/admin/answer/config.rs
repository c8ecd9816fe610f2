//! Answers about the configuration and its limits.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::show;
use crate::config;
use crate::limits::LIMITS;
use crate::pool::Pool;
use crate::refusal::Refusal;

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
