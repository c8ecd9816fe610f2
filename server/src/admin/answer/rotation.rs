//! Answers about the rotation of the pool's authority.

use std::io::Write;
use std::sync::Arc;

use data_encoding::HEXLOWER;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{internal, show, unsigned};
use crate::certificate::day;
use crate::pool::Pool;
use crate::pool::members::Standing;
use crate::pool::rotation::Refused;
use crate::refusal::Refusal;
use crate::signer::Step;
use crate::text::table;

/// Answer to `gpuserver pool rotate`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RotationView {
    /// none, begun, switched.
    pub phase: String,
    /// Whether this request took a step.
    pub changed: bool,
    /// Begin of the phase, in seconds since 1970; `None`: no rotation.
    pub since_unix: Option<u64>,
    /// SHA-256 of the authority that signs certificates.
    pub authority_sha256: String,
    /// SHA-256 of the old authority; `None`: no rotation.
    pub old_sha256: Option<String>,
    /// SHA-256 of the new authority; `None`: no rotation.
    pub new_sha256: Option<String>,
    /// Clients that are not ready for the next step.
    pub clients: Vec<RotationClient>,
    /// Administrators whose certificates end with the rotation.
    pub administrators: Vec<String>,
    /// Servers without the authority's key that are not ready for the next step.
    #[serde(default)]
    pub servers: Vec<RotationServer>,
}

/// A server without the authority's key that is not ready for the next step.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RotationServer {
    /// Name of the server.
    pub name: String,
    /// Latest call, a day less exact, in seconds since 1970.
    pub seen_unix: u64,
    /// Whether the next step waits for it: it has called in the last 30 days.
    pub awaited: bool,
    /// Number of clients for which it waits, and which this answer does not name.
    pub clients_unnamed: u32,
}

/// A client that is not ready for the next step.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RotationClient {
    /// Name of the client.
    pub name: String,
    /// Whether it trusts the new authority.
    pub trusts_new: bool,
    /// Latest call, a day less exact, in seconds since 1970; `None`: unknown.
    pub seen_unix: Option<u64>,
    /// Whether the next step waits for it: it has called in the last 30 days.
    pub awaited: bool,
    /// Server without the authority's key that reports the client; `None`: it calls this server.
    #[serde(default)]
    pub server: Option<String>,
}

fn view(pool: &Pool, changed: bool) -> Result<Value, Refusal> {
    let status = pool.rotation();
    let client = |c: crate::pool::rotation::Holder| RotationClient {
        name: c.name,
        trusts_new: c.trusts,
        seen_unix: Some(c.seen_unix).filter(|seen| *seen != 0),
        awaited: c.live,
        server: c.server,
    };
    let server = |server: Standing| RotationServer {
        name: server.name,
        seen_unix: server.seen_unix,
        awaited: server.live,
        clients_unnamed: server.more,
    };
    show(serde_json::to_value(RotationView {
        phase: status.rotation.map_or("none", |(phase, _)| phase.as_str()).into(),
        changed,
        since_unix: status.rotation.map(|(_, since)| since),
        authority_sha256: HEXLOWER.encode(&status.signer),
        old_sha256: status.old.map(|f| HEXLOWER.encode(&f)),
        new_sha256: status.new.map(|f| HEXLOWER.encode(&f)),
        clients: status.clients.into_iter().map(client).collect(),
        administrators: status.administrators,
        servers: status.servers.into_iter().map(server).collect(),
    }))
}

pub(in crate::admin) fn status(pool: &Pool) -> Result<Value, Refusal> {
    view(pool, false)
}

pub(in crate::admin) async fn step(pool: &Arc<Pool>, step: Step, force: bool) -> Result<Value, Refusal> {
    let changed = pool.rotate(step, force).await.map_err(|e| match &e {
        Refused::Lacking { .. } => Refusal::new("clients-lack-authority", e.to_string()),
        Refused::Behind { .. } => Refusal::new("servers-lack-authority", e.to_string()),
        Refused::Step(refused) => unsigned(refused),
        Refused::Store(_) | Refused::Statements(_) => internal(&e),
    })?;
    view(pool, changed)
}

/// Prints `gpuserver pool rotate`.
pub fn print_rotation(out: &mut dyn Write, rotation: RotationView) -> anyhow::Result<()> {
    let (signs, next, lack) = match rotation.phase.as_str() {
        "begun" => ("the old authority", "switch", "do not trust the new authority"),
        "switched" => ("the new authority", "finish", "have no certificate of the new authority"),
        _ => {
            writeln!(
                out,
                "No rotation is under way. The pool's authority is {}.",
                rotation.authority_sha256
            )?;
            return Ok(());
        }
    };
    let since = rotation.since_unix.map_or_else(String::new, |since| format!(" on {}", day(since)));
    writeln!(out, "Rotation of the pool's authority: {}{since}; {signs} signs.", rotation.phase)?;
    for (which, fingerprint) in [("old", &rotation.old_sha256), ("new", &rotation.new_sha256)] {
        writeln!(out, "{which} authority: {}", fingerprint.as_deref().unwrap_or("-"))?;
    }
    let awaited = rotation.clients.iter().filter(|client| client.awaited).count();
    let servers = rotation.servers.iter().filter(|server| server.awaited).count();
    let yes = |awaited: bool| if awaited { "yes" } else { "no" };
    if !rotation.servers.is_empty() {
        writeln!(out, "These servers have not reported that they and their clients are ready:")?;
        let mut rows = table(&["SERVER", "LATEST CALL", "AWAITED"]);
        for server in &rotation.servers {
            rows.add_row([server.name.as_str(), &day(server.seen_unix), yes(server.awaited)]);
        }
        writeln!(out, "{rows}")?;
    }
    if !rotation.clients.is_empty() {
        writeln!(out, "These clients {lack}:")?;
        let mut rows = table(&["CLIENT", "SERVER", "LATEST CALL", "AWAITED"]);
        for client in &rotation.clients {
            let seen = client.seen_unix.map_or_else(|| "-".into(), day);
            let server = client.server.as_deref().unwrap_or("this one");
            rows.add_row([client.name.as_str(), server, &seen, yes(client.awaited)]);
        }
        writeln!(out, "{rows}")?;
    }
    if !rotation.administrators.is_empty() {
        writeln!(
            out,
            "The certificates of these administrators end with the rotation: {}.",
            rotation.administrators.join(", ")
        )?;
    }
    match (servers, awaited) {
        (0, 0) => {
            writeln!(out, "Next: once every issuer of the pool is as far, `gpuserver pool rotate {next}`.")?;
        }
        (0, 1) => writeln!(out, "Next: wait for one client, then `gpuserver pool rotate {next}`.")?,
        (0, n) => writeln!(out, "Next: wait for {n} clients, then `gpuserver pool rotate {next}`.")?,
        (1, _) => writeln!(out, "Next: wait for one server, which reports every `peer_interval`.")?,
        (n, _) => writeln!(out, "Next: wait for {n} servers, which report every `peer_interval`.")?,
    }
    Ok(())
}
