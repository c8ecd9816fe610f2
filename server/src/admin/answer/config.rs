//! Answers about the configuration and its limits.

use serde_json::Value;

use super::show;
use crate::admin::ask::Refusal;
use crate::admin::rows::{LimitRow, config_rows};
use crate::limits::LIMITS;
use crate::pool::Pool;

pub(super) fn limits(pool: &Pool, client: String, user: String) -> Result<Value, Refusal> {
    let rows: Vec<_> = pool
        .limits_of(&client, &user)
        .all()
        .iter()
        .map(|e| LimitRow {
            limit: e.name.into(),
            value: e.bound.to_string(),
            of: e.layer.to_string(),
            origin: e.origin.clone(),
            help: LIMITS.iter().find(|l| l.name == e.name).map_or("", |l| l.help).into(),
        })
        .collect();
    show(serde_json::to_value(rows))
}

pub(super) fn config(pool: &Pool) -> Result<Value, Refusal> {
    show(serde_json::to_value(config_rows(&pool.config())))
}

pub(super) async fn set(pool: &Pool, key: String, value: Option<String>) -> Result<Value, Refusal> {
    let (holds, waits) = pool.set_key(&key, value.as_deref()).await?;
    Ok(serde_json::json!({ "changed": holds, "after_restart": waits }))
}

pub(super) async fn reload(pool: &Pool) -> Result<Value, Refusal> {
    let (holds, waits) = pool.read_again().await?;
    Ok(serde_json::json!({ "changed": holds, "after_restart": waits }))
}
