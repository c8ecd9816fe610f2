//! Answers about the pool's clients.

use std::io::Write;
use std::sync::Arc;

use gpusession_proto::join;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{here_alone, internal, micros, not_stated, show};
use crate::certificate::day;
use crate::pool::Pool;
use crate::refusal::Refusal;
use crate::text::{date, print_table, span, table};

/// A row of `gpuserver clients`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ClientRow {
    /// Name of the client.
    pub name: String,
    /// connected, away, revoked.
    pub state: String,
    /// Number of leases that it holds.
    pub leases: usize,
    /// Time since its last call; `None` if unknown.
    pub silent_usec: Option<u64>,
    /// Time at which it joined, in seconds since 1970.
    pub joined_unix: u64,
    /// End of its certificate, in seconds since 1970; 0: unknown.
    #[serde(default)]
    pub expires_unix: u64,
    /// SHA-256 of its certificate.
    pub certificate_sha256: String,
}

pub(in crate::admin) async fn clients(pool: &Pool) -> Result<Value, Refusal> {
    let leases = pool.registry().leases().await;
    let rows: Vec<_> = pool
        .clients()
        .into_iter()
        .map(|c| ClientRow {
            state: match (c.record.revoked, c.alive) {
                (true, _) => "revoked",
                (false, true) => "connected",
                (false, false) => "away",
            }
            .into(),
            leases: leases.iter().filter(|s| s.lease.client == c.name).count(),
            name: c.name,
            silent_usec: c.silent.map(micros),
            joined_unix: c.record.joined_unix,
            expires_unix: c.record.expires_unix,
            certificate_sha256: c.record.certificate,
        })
        .collect();
    show(serde_json::to_value(rows))
}

pub(in crate::admin) async fn revoke(pool: &Arc<Pool>, name: String) -> Result<Value, Refusal> {
    a_name(&name)?;
    let (known, leases, stated) = pool.revoke(&name).await.map_err(|e| internal(&e))?;
    stated.map_err(|e| here_alone(&format!("client {name}"), &e))?;
    Ok(serde_json::json!({ "client": name, "known": known, "leases_ended": leases }))
}

pub(in crate::admin) async fn forget(pool: &Arc<Pool>, name: String) -> Result<Value, Refusal> {
    a_name(&name)?;
    let (known, leases) = pool.forget(&name).await.map_err(|e| not_stated(&e))?;
    Ok(serde_json::json!({ "client": name, "known": known, "leases_ended": leases }))
}

/// Checks that a client or an administrator can have this name.
pub fn a_name(name: &str) -> Result<(), Refusal> {
    match join::is_name(name) {
        true => Ok(()),
        false => Err(Refusal::new(
            "usage",
            format!("{name:?} is not a valid name: use a-z, 0-9, `-` and `.`, 64 characters at most"),
        )),
    }
}

/// Prints `gpuserver clients`.
pub fn print_clients(out: &mut dyn Write, rows: Vec<ClientRow>) -> anyhow::Result<()> {
    let n = rows.len();
    let mut table = table(&["CLIENT", "STATE", "LEASES", "LAST CALL", "ISSUED", "EXPIRES"]);
    for r in rows {
        table.add_row([
            r.name,
            r.state,
            r.leases.to_string(),
            r.silent_usec.map_or_else(|| "-".into(), |s| format!("{} ago", span(s))),
            date(r.joined_unix),
            if r.expires_unix == 0 { "-".into() } else { day(r.expires_unix) },
        ]);
    }
    print_table(
        out,
        &table,
        n,
        "no clients: `gpuserver token create` creates a token with which a client can join",
    )
}
