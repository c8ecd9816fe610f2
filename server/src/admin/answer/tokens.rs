//! Answers about join tokens and fleet keys.

use std::io::Write;
use std::net::IpAddr;
use std::time::Duration;

use gpusession_common::units::parse_duration;
use gpusession_proto::join::{FleetKey, JoinToken, ServerToken};
use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{internal, no_more_a_name, show, unsigned};
use crate::pool::Pool;
use crate::refusal::Refusal;
use crate::signer::Privileged;
use crate::signer::tokens::{Terms, TokenFacts, TokenKind};
use crate::text::{date, print_table, table};

/// Answer to `gpuserver token create`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct TokenView {
    /// Secret text of the token.
    pub token: String,
    /// Public id of the token.
    pub id: String,
    /// Pattern of the client names that can join with it.
    pub name_pattern: String,
    /// Number of clients that can join with it.
    pub uses: u32,
    /// Expiry, in seconds since 1970.
    pub expires_unix: u64,
    /// Networks from which clients join; empty: from anywhere.
    #[serde(default)]
    pub from: Vec<IpNet>,
    /// Number of clients from one address; 0: no bound.
    #[serde(default)]
    pub per_address: u32,
}

impl TokenView {
    /// Describes a new token.
    pub fn new(token: &JoinToken, facts: TokenFacts) -> Self {
        Self {
            token: token.to_text(),
            id: facts.id,
            name_pattern: facts.name_pattern,
            uses: facts.uses_left,
            expires_unix: facts.expires_unix,
            from: facts.from,
            per_address: facts.per_address,
        }
    }
}

/// Answer to `gpuserver fleet create`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct FleetView {
    /// Secret text of the key.
    pub key: String,
    /// Public id of the key and of its tokens.
    pub id: String,
    /// Pattern of the client names.
    pub name_pattern: String,
    /// Number of joins with all of its tokens.
    pub uses: u32,
    /// Expiry of the key and of its tokens, in seconds since 1970.
    pub expires_unix: u64,
    /// Networks from which clients join; empty: from anywhere.
    pub from: Vec<IpNet>,
}

impl FleetView {
    /// Describes a new key.
    pub fn new(key: &FleetKey, facts: TokenFacts) -> Self {
        let TokenFacts { id, uses_left: uses, expires_unix, from, .. } = facts;
        Self { key: key.to_text(), id, name_pattern: key.pattern.clone(), uses, expires_unix, from }
    }
}

/// Answer to `gpuserver pool admit`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ServerTokenView {
    /// Secret text of the token.
    pub token: String,
    /// Public id of the token.
    pub id: String,
    /// Name of the server that joins with it.
    pub server: String,
    /// Expiry, in seconds since 1970.
    pub expires_unix: u64,
    /// Networks from which the server joins; empty: from anywhere.
    pub from: Vec<IpNet>,
}

impl ServerTokenView {
    /// Describes a new token.
    pub fn new(token: &ServerToken, server: &str, facts: &TokenFacts) -> Self {
        let TokenFacts { id, expires_unix, from, .. } = facts.clone();
        Self { token: token.to_text(), id, server: server.into(), expires_unix, from }
    }
}

pub(in crate::admin) async fn admit_server(
    pool: &Pool,
    name: String,
    ttl: u64,
    from: Vec<IpNet>,
) -> Result<Value, Refusal> {
    if pool.statements(|all| all.server(&name).is_some()) {
        return Err(no_more_a_name(&name));
    }
    let made = pool.admit_server(Privileged::AdmitServer { name: name.clone(), ttl, from }).await;
    let (token, facts) = made.map_err(|e| unsigned(&e))?;
    show(serde_json::to_value(ServerTokenView::new(&token, &name, &facts)))
}

/// Prints `gpuserver pool admit`, with only the token on standard output, for scripts.
pub fn print_server_token(out: &mut dyn Write, t: ServerTokenView) -> anyhow::Result<()> {
    writeln!(out, "{}", t.token)?;
    eprintln!(
        "for server {}, until {}; run `gpuserver pool join` with this server's address there, and paste it",
        t.server,
        date(t.expires_unix)
    );
    Ok(())
}

pub(in crate::admin) async fn create(pool: &Pool, terms: Terms) -> Result<Value, Refusal> {
    let (token, record) = pool.create_token(terms).await.map_err(|e| unsigned(&e))?;
    show(serde_json::to_value(TokenView::new(&token, record)))
}

pub(in crate::admin) async fn create_fleet(pool: &Pool, terms: Terms) -> Result<Value, Refusal> {
    let (key, record) = pool.create_fleet(terms).await.map_err(|e| unsigned(&e))?;
    show(serde_json::to_value(FleetView::new(&key, record)))
}

/// Notes who made a token or a fleet key, before the answer.
pub(in crate::admin) async fn made_by(pool: &Pool, name: &str, made: &Value) -> Result<(), Refusal> {
    let id = made["id"].as_str().unwrap_or_default();
    match pool.made_token(name, id).await {
        Ok(()) => Ok(()),
        // A token that would outlive its maker's right.
        Err(e) => {
            let _ = pool.revoke_token(id).await;
            Err(internal(&e))
        }
    }
}

pub(in crate::admin) async fn list(pool: &Pool) -> Result<Value, Refusal> {
    let tokens = pool.tokens().await.map_err(|e| unsigned(&e))?;
    show(serde_json::to_value(tokens))
}

pub(in crate::admin) async fn revoke(pool: &Pool, id: String) -> Result<Value, Refusal> {
    let revoked = pool.revoke_token(&id).await.map_err(|e| unsigned(&e))?;
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

/// Longest validity of a join token, in days: a copy that stayed on a disk is of no use later.
const MAX_TTL: u64 = 30;
/// Longest validity of a fleet key, in days: that of its administrator's certificate.
const MAX_FLEET_TTL: u64 = 365;

/// Reads the bounds of a new token or fleet key.
pub fn terms(
    kind: TokenKind,
    pattern: String,
    uses: u32,
    ttl: &str,
    from: &[String],
    per_address: u32,
) -> Result<Terms, Refusal> {
    let life = parse_duration(ttl).ok().filter(|d| !d.is_zero()).ok_or_else(|| {
        Refusal::new("usage", format!("--ttl {ttl}: a duration like \"24h\" or \"30min\" is wanted"))
    })?;
    let (what, days) = match kind {
        TokenKind::Client | TokenKind::Server => ("token", MAX_TTL),
        TokenKind::Fleet => ("fleet key", MAX_FLEET_TTL),
    };
    if life > Duration::from_secs(days * 24 * 3600) {
        let why =
            format!("--ttl {ttl}: a {what} is valid for {days} days at most; create the next one after that");
        return Err(Refusal::new("usage", why));
    }
    // A machine has one name of a fleet key.
    let many_names = kind != TokenKind::Fleet && pattern.contains(['*', '?']) && uses > 1;
    if many_names && from.is_empty() && per_address == 0 {
        return Err(Refusal::new(
            "usage",
            format!(
                "--uses {uses}: one machine with this token could join under {uses} names, each with limits of its own; \
                 add --from NETWORK (\"0.0.0.0/0,::/0\" is any), or --per-address N, or give each machine a token of its \
                 own by `gpuserver fleet create`"
            ),
        ));
    }
    let network = |text: &String| {
        let network = text.parse().or_else(|_| text.parse::<IpAddr>().map(IpNet::from));
        // The server sees a client's IPv4 address as such.
        let mapped =
            |network: &IpNet| matches!(network, IpNet::V6(v6) if v6.addr().to_ipv4_mapped().is_some());
        network.ok().filter(|network| !mapped(network)).ok_or_else(|| {
            let wanted = "a network like \"10.1.0.0/16\", or an address, is wanted";
            Refusal::new("usage", format!("--from {text}: {wanted}"))
        })
    };
    let from = from.iter().map(network).collect::<Result<_, _>>()?;
    Ok(Terms { pattern, uses, ttl: life.as_secs(), from, per_address })
}

/// Prints `gpuserver token list`.
pub fn print_tokens(out: &mut dyn Write, rows: Vec<TokenFacts>) -> anyhow::Result<()> {
    let n = rows.len();
    let mut table = table(&["ID", "NAMES", "FROM", "USES LEFT", "CREATED", "EXPIRES"]);
    for row in rows {
        let (made, until) = (date(row.created_unix), date(row.expires_unix));
        let from: Vec<_> = row.from.iter().map(ToString::to_string).collect();
        let mut from = if from.is_empty() { "anywhere".into() } else { from.join(", ") };
        if row.per_address > 0 {
            from += &format!(", {} per address", row.per_address);
        }
        table.add_row([row.id, row.name_pattern, from, row.uses_left.to_string(), made, until]);
    }
    print_table(out, &table, n, "no tokens: `gpuserver token create` creates one")
}

/// Prints `gpuserver token create`, with only the token on standard output, for scripts.
pub fn print_token(out: &mut dyn Write, t: TokenView, server: &str) -> anyhow::Result<()> {
    writeln!(out, "{}", t.token)?;
    eprintln!(
        "for {} client(s) named {:?}, until {}; run `gpusession join {server}` on the client and paste it",
        t.uses,
        t.name_pattern,
        date(t.expires_unix)
    );
    Ok(())
}

/// Prints `gpuserver fleet create`, with only the key on standard output, for scripts.
pub fn print_fleet(out: &mut dyn Write, key: FleetView) -> anyhow::Result<()> {
    writeln!(out, "{}", key.key)?;
    eprintln!(
        "for {} joins of clients named {:?}, until {}; keep it secret: `gpuserver fleet token --name NAME` makes the token \
         of each machine from it",
        key.uses,
        key.name_pattern,
        date(key.expires_unix)
    );
    Ok(())
}
