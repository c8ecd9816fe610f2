//! Answers about the past: accounting and the audit trail.

use std::sync::Arc;

use serde_json::Value;

use super::{internal, show};
use crate::accounting::Wanted;
use crate::audit;
use crate::pool::Pool;
use crate::refusal::Refusal;

pub(in crate::admin) async fn accounting(pool: &Pool, wanted: Wanted) -> Result<Value, Refusal> {
    let accounting = pool.accounting().clone();
    let records = tokio::task::spawn_blocking(move || accounting.list(&wanted)).await;
    let records = records.map_err(|e| internal(&e))?.map_err(|e| internal(&e))?;
    show(serde_json::to_value(records))
}

/// Most lines of the audit trail in one answer.
pub const MAX_LINES: usize = 10_000;

pub(in crate::admin) async fn audit(pool: &Arc<Pool>, wanted: audit::Wanted) -> Result<Value, Refusal> {
    let pool = pool.clone();
    let lines = tokio::task::spawn_blocking(move || pool.audit().list(&wanted, MAX_LINES)).await;
    let lines = lines.map_err(|e| internal(&e))?.map_err(|e| internal(&e))?;
    show(serde_json::to_value(lines))
}
