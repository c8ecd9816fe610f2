//! Answers about join tokens.

use std::time::Duration;

use serde_json::Value;

use super::{internal, show};
use crate::admin::ask::Refusal;
use crate::admin::rows::{TokenView, token_rows};
use crate::config::parse_duration;
use crate::pool::Pool;

pub(super) async fn create(pool: &Pool, pattern: String, uses: u32, ttl: String) -> Result<Value, Refusal> {
    let ttl = token_ttl(&ttl)?;
    let (token, record) = pool.create_token(&pattern, uses, ttl).await.map_err(|e| internal(&e))?;
    show(serde_json::to_value(TokenView::new(&token, record)))
}

pub(super) fn list(pool: &Pool) -> Result<Value, Refusal> {
    show(serde_json::to_value(pool.tokens(token_rows)))
}

pub(super) async fn revoke(pool: &Pool, id: String) -> Result<Value, Refusal> {
    let revoked = pool.revoke_token(&id).await.map_err(|e| internal(&e))?;
    let revoked = revoked.ok_or_else(|| no_token(&id))?;
    Ok(serde_json::json!({ "id": revoked }))
}

/// Creates the refusal for an id that fits no token, or several.
pub fn no_token(id: &str) -> Refusal {
    Refusal::new(
        "no-such-token",
        format!("{id:?} fits no token, or several; `gpuserver token list` lists their ids"),
    )
}

/// Parses the lifetime of a token.
pub fn token_ttl(text: &str) -> Result<Duration, Refusal> {
    parse_duration(text).filter(|d| !d.is_zero()).ok_or_else(|| {
        Refusal::new("usage", format!("--ttl {text}: a duration like \"24h\" or \"30min\" is wanted"))
    })
}
