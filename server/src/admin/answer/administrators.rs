//! Answers about the pool's administrators.

use serde_json::Value;

use super::clients::a_name;
use super::{internal, show};
use crate::admin::ask::Refusal;
use crate::admin::rows::{AdministratorView, administrator_rows};
use crate::pool::Pool;
use crate::pool::administrators::NotIssued;

pub(super) async fn create(pool: &Pool, name: String, csr_pem: String) -> Result<Value, Refusal> {
    a_name(&name)?;
    let made = pool.create_administrator(&name, &csr_pem).await.map_err(|e| internal(&e))?;
    let (certificate_pem, authority_pem) = made.map_err(|e| not_issued(&e))?;
    show(serde_json::to_value(AdministratorView { certificate_pem, authority_pem }))
}

pub(super) fn list(pool: &Pool) -> Result<Value, Refusal> {
    show(serde_json::to_value(pool.administrators(administrator_rows)))
}

pub(super) async fn revoke(pool: &Pool, name: String) -> Result<Value, Refusal> {
    a_name(&name)?;
    let known = pool.revoke_administrator(&name).await.map_err(|e| internal(&e))?;
    Ok(serde_json::json!({ "name": name, "known": known }))
}

/// Creates the refusal for a certificate that was not issued.
pub fn not_issued(e: &NotIssued) -> Refusal {
    let code = match e {
        NotIssued::Exists(_) => "exists",
        NotIssued::Authority(_) => "failed",
    };
    Refusal::new(code, e.to_string())
}
