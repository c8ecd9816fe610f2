//! Answers about the pool's administrators.

use std::io::Write;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::clients::a_name;
use super::{here_alone, internal, show, unsigned};
use crate::pool::Pool;
use crate::pool::administrators::{AdministratorRecord, Administrators, NotIssued};
use crate::refusal::Refusal;
use crate::text::{date, print_table, table};

/// A row of `gpuserver admin list`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct AdministratorRow {
    /// Name of the administrator.
    pub name: String,
    /// good, revoked.
    pub state: String,
    /// Time at which the certificate was issued or revoked, in seconds since 1970.
    pub since_unix: u64,
    /// SHA-256 of the certificate; empty if this server has not seen it.
    pub certificate_sha256: String,
}

/// Answer to `gpuserver admin create`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct AdministratorView {
    /// New certificate of the administrator.
    pub certificate_pem: String,
    /// Certificate of the pool's authority.
    pub authority_pem: String,
}

pub(in crate::admin) async fn create(pool: &Pool, name: String, csr_pem: String) -> Result<Value, Refusal> {
    a_name(&name)?;
    let made = pool.create_administrator(&name, &csr_pem).await.map_err(|e| internal(&e))?;
    let (certificate_pem, authority_pem) = made.map_err(|e| not_issued(&e))?;
    show(serde_json::to_value(AdministratorView { certificate_pem, authority_pem }))
}

pub(in crate::admin) fn list(pool: &Pool) -> Result<Value, Refusal> {
    show(serde_json::to_value(pool.administrators(administrator_rows)))
}

pub(in crate::admin) async fn revoke(pool: &Arc<Pool>, name: String) -> Result<Value, Refusal> {
    a_name(&name)?;
    let (known, stated) = pool.revoke_administrator(&name).await.map_err(|e| internal(&e))?;
    stated.map_err(|e| here_alone(&format!("administrator {name}"), &e))?;
    Ok(serde_json::json!({ "name": name, "known": known }))
}

/// Creates the refusal for a certificate that was not issued.
pub fn not_issued(e: &NotIssued) -> Refusal {
    match e {
        NotIssued::Exists(_) => Refusal::new("exists", e.to_string()),
        NotIssued::Signer(refused) => unsigned(refused),
    }
}

/// Returns the rows of `gpuserver admin list`.
pub fn administrator_rows(all: &Administrators) -> Vec<AdministratorRow> {
    let row = |(name, record): (&str, &AdministratorRecord)| AdministratorRow {
        name: name.into(),
        state: if record.revoked { "revoked" } else { "good" }.into(),
        since_unix: record.since_unix,
        certificate_sha256: record.certificate.clone(),
    };
    all.list().map(row).collect()
}

/// Prints `gpuserver admin list`.
pub fn print_administrators(out: &mut dyn Write, rows: Vec<AdministratorRow>) -> anyhow::Result<()> {
    let n = rows.len();
    let mut table = table(&["NAME", "STATE", "SINCE"]);
    for row in rows {
        table.add_row([row.name, row.state, date(row.since_unix)]);
    }
    print_table(out, &table, n, "no administrators: `gpuserver admin create` creates a certificate")
}
