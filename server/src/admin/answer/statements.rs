//! Answers about the pool's statements, and about the servers that exchange them.

use std::io::Write;
use std::sync::Arc;

use data_encoding::HEXLOWER;
use gpusession_proto::statement::{Signed, Verdict};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::clients::a_name;
use super::{internal, not_stated, show};
use crate::pool::Pool;
use crate::pool::contact::Peer;
use crate::pool::statements::NotStated;
use crate::refusal::Refusal;
use crate::text::{date, print_table, table};

/// Most statements of one request to import: a request has 64 KiB.
pub const IMPORTED: usize = 100;

/// A page of `gpuserver statements`.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct StatementPage {
    /// Statements in the order in which the server took them.
    pub statements: Vec<StatementRow>,
    /// Place of the last one.
    pub last: u64,
    /// Whether others follow.
    pub more: bool,
}

/// A row of `gpuserver statements list`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct StatementRow {
    /// revoke-client, forget-client, revoke-administrator, revoke-server.
    pub kind: String,
    /// Name of the client, administrator or server.
    pub name: String,
    /// SHA-256 of the identity that is refused for ever; empty: unknown to the signing server.
    pub identity_sha256: String,
    /// Server whose signer made it.
    pub server: String,
    /// Number among the statements of that server.
    pub number: u64,
    /// Time in seconds since 1970.
    pub made_unix: u64,
    /// SHA-256 of the authority that signed.
    pub authority_sha256: String,
    /// Statement with its signature, as `export` prints it.
    pub text: String,
}

impl StatementRow {
    fn new(signed: &Signed) -> Option<Self> {
        let (_, statement) = Signed::read(&signed.bytes()).ok()?;
        let verdict = &statement.verdict;
        Some(Self {
            kind: verdict.as_str().into(),
            name: verdict.name().into(),
            identity_sha256: verdict.identity().map(|key| HEXLOWER.encode(key)).unwrap_or_default(),
            server: statement.server,
            number: statement.number,
            made_unix: statement.unix,
            authority_sha256: HEXLOWER.encode(&signed.authority),
            text: signed.text(),
        })
    }
}

/// A server of `peers` in `gpuserver status`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PeerView {
    /// Address of its control service.
    pub address: String,
    /// Name by its own word; empty: it has not answered.
    pub server: String,
    /// Latest time at which this server had all its statements, in seconds since 1970.
    pub contact_unix: Option<u64>,
    /// Reason for which the latest try failed; empty if it did not.
    pub trouble: String,
}

impl From<Peer> for PeerView {
    fn from(peer: Peer) -> Self {
        let Peer { address, server, contact_unix, trouble, .. } = peer;
        Self { address, server, contact_unix, trouble }
    }
}

pub(in crate::admin) fn list(pool: &Pool, after: u64) -> Result<Value, Refusal> {
    let (page, last, more) = pool.statements(|all| all.page(after));
    let statements = page.iter().filter_map(StatementRow::new).collect();
    show(serde_json::to_value(StatementPage { statements, last, more }))
}

pub(in crate::admin) async fn import(pool: &Arc<Pool>, texts: Vec<String>) -> Result<Value, Refusal> {
    let read = |text: &String| {
        let bad = |e: &dyn std::fmt::Display| Refusal::new("usage", format!("{text:?} is no statement: {e}"));
        Signed::from_text(text).map(|(signed, _)| signed.bytes()).map_err(|e| bad(&e))
    };
    if texts.len() > IMPORTED {
        return Err(Refusal::new("usage", format!("more than {IMPORTED} statements in one request")));
    }
    let offered = texts.iter().map(read).collect::<Result<Vec<_>, _>>()?;
    let batch = pool.take(offered, "a file").await.map_err(|e| internal(&e))?;
    match batch.left_out {
        Some(NotStated::Foreign) => Err(Refusal::new("usage", NotStated::Foreign.to_string())),
        Some(e) => Err(not_stated(&e)),
        None => Ok(json!({ "new": batch.new })),
    }
}

pub(in crate::admin) async fn revoke_server(pool: &Arc<Pool>, name: String) -> Result<Value, Refusal> {
    a_name(&name)?;
    if pool.facts().config.name == name {
        let why = format!("this server is {name} itself: run the command on another server of the pool");
        return Err(Refusal::new("usage", why));
    }
    let made =
        pool.declare(Verdict::RevokeServer { name: name.clone() }).await.map_err(|e| not_stated(&e))?;
    Ok(json!({ "server": name, "number": made.number }))
}

/// Prints `gpuserver statements list`.
pub fn print_statements(out: &mut dyn Write, rows: Vec<StatementRow>) -> anyhow::Result<()> {
    let n = rows.len();
    let mut table = table(&["STATEMENT", "NAME", "IDENTITY", "BY", "NUMBER", "MADE"]);
    for row in rows {
        let identity = row.identity_sha256.get(..12).unwrap_or("-").to_owned();
        table.add_row([
            row.kind,
            row.name,
            identity,
            row.server,
            row.number.to_string(),
            date(row.made_unix),
        ]);
    }
    print_table(out, &table, n, "no statements: no right was revoked in the pool")
}
