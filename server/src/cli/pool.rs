//! `gpuserver pool`: creates, exports and imports the pool's authority.

use std::path::PathBuf;

use serde_json::{Value, json};

use super::rotate::{RotateVerb, read_export};
use super::show::Output;
use super::target::offline;
use crate::admin::Refusal;
use crate::admin::answer::unsigned;
use crate::audit;
use crate::config::Config;
use crate::signer::adopt::adopt;
use crate::signer::link::{Link, places};
use crate::signer::{Done, Operation, Why};
use clap::Subcommand;

/// A verb of `gpuserver pool`.
#[derive(Debug, Subcommand)]
pub enum PoolVerb {
    /// Create the pool's certificate authority in the state directory
    Init,
    /// Print the authority with its secret key, for `pool import` on another server of the pool
    Export,
    /// Import the authority of a pool from the output of `pool export`
    Import {
        /// File with that output; - for standard input
        file: PathBuf,
    },
    /// Replace the authority by a new one, under running programs
    ///
    /// The steps are begin, switch and finish. Each can be repeated, and `status` shows which
    /// clients the next one waits for. With several servers, take each step on all of them.
    Rotate {
        /// Step of the rotation
        #[command(subcommand)]
        verb: RotateVerb,
    },
}

/// Returns the link to the signer for a host whose server does not run.
///
/// An earlier version kept its files in the state directory; they move to the signer first.
pub(super) fn own_link(config: &Config) -> anyhow::Result<Link> {
    let link = Link::of_command(config.signer.as_deref(), &config.state_dir, &config.name)?;
    if config.signer.is_some() && nix::unistd::geteuid().is_root() {
        adopt(&link, &config.state_dir)?;
    }
    Ok(link)
}

fn made(link: &Link, operation: Operation) -> anyhow::Result<[u8; 32]> {
    match link.ask(operation).map_err(|e| unsigned(&e))? {
        Done::Authority(fingerprint) => Ok(fingerprint),
        _ => anyhow::bail!("internal error: the signer answered another question"),
    }
}

/// Returns certificates and keys of the authorities, also beside a running server.
fn export(config: &Config) -> anyhow::Result<String> {
    let link = Link::of_command(config.signer.as_deref(), &config.state_dir, &config.name)?;
    let exported = match link.ask(Operation::Export) {
        // A server of an earlier version runs, or ran last.
        Err(refused) if refused.why == Why::Missing && config.signer.is_some() => {
            Link::of_command(None, &config.state_dir, &config.name)?.ask(Operation::Export)
        }
        outcome => outcome,
    };
    match exported.map_err(|e| unsigned(&e))? {
        Done::Exported(text) => Ok(text),
        _ => anyhow::bail!("internal error: the signer answered another question"),
    }
}

pub(super) fn pool(out: &mut Output<'_>, config: &Config, verb: &PoolVerb) -> anyhow::Result<()> {
    let authority = match verb {
        PoolVerb::Export => {
            if out.json {
                let why = "pool export prints PEM, which pool import reads; leave --json out";
                return Err(Refusal::new("usage", why).into());
            }
            let exported = export(config)?;
            // The event precedes the key, which can make certificates.
            audit::note_offline(&config.state_dir, &config.name, audit::own("pool-export"))?;
            write!(out.out, "{exported}")?;
            return Ok(());
        }
        PoolVerb::Rotate { .. } => anyhow::bail!("internal error: not a verb of this function"),
        PoolVerb::Init => {
            let _lock = offline(config)?;
            made(&own_link(config)?, Operation::Init { name: config.name.clone() })?
        }
        PoolVerb::Import { file } => {
            let text = read_export(file)?;
            let _lock = offline(config)?;
            made(&own_link(config)?, Operation::Import { exported: text })?
        }
    };
    let event = if matches!(verb, PoolVerb::Import { .. }) { "pool-import" } else { "pool-init" };
    audit::note_offline(&config.state_dir, &config.name, audit::own(event))?;
    let fingerprint = data_encoding::HEXLOWER.encode(&authority);
    let folder = places(config.signer.as_deref(), &config.state_dir).folder;
    let value = json!({ "authority_sha256": fingerprint, "folder": folder });
    out.answer("pool", value, |out, _: Value| {
        writeln!(out, "The pool's authority is in {}: keep a copy in a secret place.", folder.display())?;
        writeln!(out, "Its certificate's SHA-256 is {fingerprint}.")?;
        if matches!(verb, PoolVerb::Import { .. }) {
            writeln!(out, "Next: start the server, and add it to servers.toml of the pool's clients.")?;
        } else {
            writeln!(out, "Next: start the server, and run `gpuserver token create` to let a client join.")?;
        }
        Ok(())
    })
}
