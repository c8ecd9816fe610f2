//! Answers about the server as a whole: its state, programs and accounting.

use std::time::Duration;

use serde_json::Value;

use super::{internal, show};
use crate::accounting::Wanted;
use crate::admin::ask::Refusal;
use crate::admin::rows::{PsRow, StatusView, StopView, micros, ps_row};
use crate::pool::Pool;
use crate::threads;

pub(super) async fn status(pool: &Pool) -> Result<Value, Refusal> {
    let facts = pool.facts();
    show(serde_json::to_value(StatusView {
        name: facts.config.name.clone(),
        version: env!("CARGO_PKG_VERSION").into(),
        pid: std::process::id(),
        state: match pool.registry().draining().await {
            Some(why) => format!("draining: {why}"),
            None => "online".into(),
        },
        control_address: facts.control.to_string(),
        data_address: facts.data.to_string(),
        driver: facts.driver.display().to_string(),
        driver_version: pool.driver_version(),
        cuda_version: facts.cuda_version,
        authority_sha256: data_encoding::HEXLOWER.encode(&pool.authority_fingerprint()),
        gpus: pool.registry().gpus().await.len(),
        leases: pool.registry().count().await,
        workers: pool.supervisor().workers().len(),
        programs: pool.supervisor().programs(true),
    }))
}

pub(super) async fn ps(pool: &Pool) -> Result<Value, Refusal> {
    show(serde_json::to_value(ps_rows(pool).await))
}

pub(super) async fn threads(pool: &Pool) -> Result<Value, Refusal> {
    let mut rows = ps_rows(pool).await;
    for row in &mut rows {
        row.threads = row.pid.map_or_else(Vec::new, threads::of);
    }
    show(serde_json::to_value(rows))
}

pub(super) async fn drain(pool: &Pool, end: bool, reason: String) -> Result<Value, Refusal> {
    if let Err(e) = pool.registry().drain((!end).then_some(reason)).await {
        let mut refusal = Refusal::new(
            "not-stored",
            format!("the change holds only until a restart: it could not be stored: {e}"),
        );
        refusal.hint = "correct the cause and repeat the command".into();
        return Err(refusal);
    }
    let programs = pool.supervisor().programs(true);
    Ok(serde_json::json!({ "draining": !end, "programs": programs, "leases": pool.registry().count().await }))
}

pub(super) fn stop(pool: &Pool, force: bool) -> Result<Value, Refusal> {
    let wait = if force { Duration::ZERO } else { pool.config().drain_timeout };
    show(serde_json::to_value(StopView {
        pid: std::process::id(),
        programs: pool.supervisor().programs(true),
        wait_usec: micros(wait),
    }))
}

pub(super) async fn accounting(pool: &Pool, wanted: Wanted) -> Result<Value, Refusal> {
    let accounting = pool.accounting().clone();
    let records = tokio::task::spawn_blocking(move || accounting.list(&wanted)).await;
    let records = records.map_err(|e| internal(&e))?.map_err(|e| internal(&e))?;
    show(serde_json::to_value(records))
}

async fn ps_rows(pool: &Pool) -> Vec<PsRow> {
    let server = &pool.facts().config.name;
    let gpus = pool.registry().gpus().await;
    pool.supervisor().workers().into_iter().map(|w| ps_row(w, server, &gpus)).collect()
}
