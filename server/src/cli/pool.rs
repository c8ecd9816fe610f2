//! `gpuserver pool`: creates, exports and imports the pool's authority.

use std::path::PathBuf;

use serde_json::{Value, json};

use super::rotate::{RotateVerb, read_export};
use super::show::Output;
use super::target::offline;
use crate::admin::Refusal;
use crate::audit;
use crate::clock::{Clock as _, SystemClock, SystemRandom};
use crate::config::Config;
use crate::pool::authorities::Authorities;
use crate::pool::ca::Authority;
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

pub(super) fn pool(out: &mut Output<'_>, config: &Config, verb: &PoolVerb) -> anyhow::Result<()> {
    let authority = match verb {
        PoolVerb::Export => {
            if out.json {
                let why = "pool export prints PEM, which pool import reads; leave --json out";
                return Err(Refusal::new("usage", why).into());
            }
            let present = Authorities::read(&config.state_dir, SystemClock.unix(), &SystemRandom)?;
            let exported = present.export();
            // The event precedes the key, which can make certificates.
            audit::note_offline(&config.state_dir, &config.name, audit::own("pool-export"))?;
            write!(out.out, "{exported}")?;
            return Ok(());
        }
        PoolVerb::Rotate { .. } => anyhow::bail!("internal error: not a verb of this function"),
        PoolVerb::Init => {
            let _lock = offline(config)?;
            Authority::init(&config.state_dir, &config.name, &SystemRandom)?
        }
        PoolVerb::Import { file } => {
            let text = read_export(file)?;
            let _lock = offline(config)?;
            Authorities::import(&config.state_dir, &text, SystemClock.unix())?
        }
    };
    let event = if matches!(verb, PoolVerb::Import { .. }) { "pool-import" } else { "pool-init" };
    audit::note_offline(&config.state_dir, &config.name, audit::own(event))?;
    let fingerprint = data_encoding::HEXLOWER.encode(&authority.fingerprint());
    let folder = config.state_dir.join("ca");
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
