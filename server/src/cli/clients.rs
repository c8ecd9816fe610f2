//! `gpuserver clients`: lists, revokes and forgets clients.

use anyhow::Context;
use serde_json::{Value, json};

use super::pool::own_link;
use super::target::{Target, offline, running};
use crate::admin::answer::clients::{ClientRow, a_name, print_clients};
use crate::admin::answer::unsigned;
use crate::admin::{Ask, Refusal};
use crate::audit;
use crate::clock::{Clock, SystemClock};
use crate::config::Config;
use crate::pool::Files;
use crate::pool::clients::Clients;
use crate::pool::statements::sign;
use crate::statements::{Statements, Taken};
use crate::store;
use crate::text::Output;
use clap::Subcommand;
use gpusession_proto::statement::Verdict;

/// A verb of `gpuserver clients`.
#[derive(Debug, Subcommand)]
pub enum ClientsVerb {
    /// Revoke a client: refuse its calls, and end its leases
    Revoke {
        /// Name of the client
        name: String,
    },
    /// Forget a client, so that a machine can join under its name again
    Forget {
        /// Name of the client
        name: String,
    },
}

pub(super) fn clients(
    out: &mut Output<'_>,
    server: &Target,
    verb: Option<&ClientsVerb>,
) -> anyhow::Result<()> {
    let ask = match verb {
        None => Ask::Clients,
        Some(ClientsVerb::Revoke { name }) => Ask::Revoke { name: name.clone() },
        Some(ClientsVerb::Forget { name }) => Ask::Forget { name: name.clone() },
    };
    let value = match running(server, &ask)? {
        Some(value) => value,
        None => clients_offline(server.config()?, &ask)?,
    };
    let (name, done) = match verb {
        None => return out.answer("clients", value, print_clients),
        Some(ClientsVerb::Revoke { name }) => (name, "is revoked"),
        Some(ClientsVerb::Forget { name }) => (name, "is forgotten"),
    };
    out.answer("client", value, |out, value: Value| {
        let ended = value["leases_ended"].as_u64().unwrap_or(0);
        writeln!(out, "client {name} {done}; {ended} leases ended")?;
        if value["known"] == false {
            writeln!(out, "note: this server has not seen this name; `gpuserver clients` lists the names")?;
        }
        Ok(())
    })
}

/// Has the signer make a statement, and keeps it; returns its time. The caller holds the lock.
pub(super) fn state_offline(config: &Config, verdict: Verdict) -> anyhow::Result<u64> {
    let path = Files::below(&config.state_dir).statements;
    let mut all: Statements = store::read(&path)?;
    let turn = all.next_turn(&verdict);
    let (signed, statement) = sign(&own_link(config)?, verdict, turn).map_err(|e| unsigned(&e))?;
    let unix = statement.unix;
    if all.take(signed, statement, None) == Taken::Full {
        return Err(Refusal::new("too-many", "this server has as many statements as it may").into());
    }
    store::write(&path, &all)?;
    Ok(unix)
}

/// Performs a verb for clients on the files, without a server.
///
/// The client's leases expire after the next start, since the client cannot renew them.
fn clients_offline(config: &Config, ask: &Ask) -> anyhow::Result<Value> {
    let _lock = offline(config)?;
    let path = Files::below(&config.state_dir).clients;
    let mut clients = Clients::new(store::read(&path)?);
    let mut stated = Ok(0);
    let (name, known) = match ask {
        Ask::Revoke { name } => {
            a_name(name)?;
            let identity = clients.identity(name);
            // The revocation holds here, too, if the signer refuses.
            stated = state_offline(config, Verdict::RevokeClient { name: name.clone(), identity });
            let unix = stated.as_ref().map_or_else(|_| SystemClock.unix(), |unix| *unix);
            (name, clients.revoke(name, unix))
        }
        Ask::Forget { name } => {
            a_name(name)?;
            let identity = clients.identity(name);
            let unix = state_offline(config, Verdict::ForgetClient { name: name.clone(), identity })?;
            (name, clients.forget(name, unix))
        }
        _ => {
            let rows: Vec<_> = clients
                .list(SystemClock.now())
                .into_iter()
                .map(|c| ClientRow {
                    name: c.name,
                    state: if c.record.revoked { "revoked" } else { "away" }.into(),
                    leases: 0,
                    silent_usec: None,
                    joined_unix: c.record.joined_unix,
                    expires_unix: c.record.expires_unix,
                    certificate_sha256: c.record.certificate,
                })
                .collect();
            return Ok(serde_json::to_value(rows)?);
        }
    };
    store::write(&path, &clients.save())?;
    audit::note_offline(&config.state_dir, &config.name, ask.event(String::new()))?;
    stated.context(format!("client {name}: revoked on this server, and not on the pool's other ones"))?;
    Ok(json!({ "client": name, "known": known, "leases_ended": 0 }))
}
