//! `gpuserver pool`: creates, exports and imports the pool's authority.

use std::path::{Path, PathBuf};

use clap::Subcommand;
use gpusession_diagnosis::machine::Machine;
use serde_json::{Value, json};

use super::rotate::{RotateVerb, read_export};
use super::target::offline;
use crate::admin::Refusal;
use crate::admin::answer::unsigned;
use crate::audit;
use crate::config::Config;
use crate::signer::adopt::adopt;
use crate::signer::link::{Link, places, unit_of};
use crate::signer::{Done, Operation, Why};
use crate::text::Output;

/// A verb of `gpuserver pool`.
#[derive(Debug, Subcommand)]
pub enum PoolVerb {
    /// Create the pool's certificate authority in the state directory
    Init {
        /// Also enable the server's unit for the next boots, and start it
        #[arg(long)]
        now: bool,
    },
    /// Print the authority with its secret key, for `pool import` on another server of the pool
    Export,
    /// Import the authority of a pool from the output of `pool export`
    Import {
        /// File with that output; - for standard input
        file: PathBuf,
        /// Also enable the server's unit for the next boots, and start it
        #[arg(long)]
        now: bool,
    },
    /// Make a token with which a server of this name joins the pool, on a server with the key
    ///
    /// The server that joins gets a certificate of this name, and no key of the authority.
    Admit {
        /// Name of the server that joins: its `name`
        name: String,
        /// Lifetime of the token
        #[arg(long, value_name = "TIME", default_value = "1h")]
        ttl: String,
        /// Networks or addresses from which the server joins with it; without, from anywhere
        #[arg(long, value_name = "NETWORK", value_delimiter = ',')]
        from: Vec<String>,
    },
    /// Join a pool without its key: issuers sign what this server needs
    ///
    /// The key of this server's certificate is made here.
    Join {
        /// Address of a server with the authority's key, HOST or HOST:PORT
        address: String,
        /// Token from `pool admit` there; - or none for standard input
        token: Option<String>,
        /// Also enable the server's unit for the next boots, and start it
        #[arg(long)]
        now: bool,
    },
    /// Give the authority's key up: this server becomes a member, for which issuers sign
    ///
    /// The server must not run. Its leases and clients stay; join tokens that it made are void.
    Yield {
        /// Address of another server with the authority's key, HOST or HOST:PORT
        address: String,
        /// Token from `pool admit` there; - or none for standard input
        token: Option<String>,
    },
    /// Revoke a server for ever: clients and the other servers refuse it
    ///
    /// The server can serve again under another `name`. If it has the authority's key, also replace
    /// the authority after the theft of its disk or of root's rights there.
    Revoke {
        /// Name of the server
        name: String,
    },
    /// Replace the authority by a new one, under running programs
    ///
    /// The steps are begin, switch and finish. Each can be repeated, and `status` shows which
    /// clients and members the next one waits for. Take each step on every issuer of the pool.
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

/// Returns the unit that runs the server whose signer has this socket.
fn unit(signer: Option<&Path>) -> anyhow::Result<String> {
    let of_host = signer.map(unit_of);
    let name = of_host.as_deref().and_then(|signer| signer.strip_prefix("gpuserver-ca"));
    let name = name.ok_or_else(|| Refusal {
        code: "usage".into(),
        message: "--now starts the unit of the package, which does not run a server with this configuration"
            .into(),
        hint: "leave --now out, and start `gpuserver serve` yourself".into(),
    })?;
    Ok(format!("gpuserver{name}.service"))
}

/// Returns the unit to start, if the verb asks for it and systemd has it.
pub(super) fn unit_to_start(
    machine: &Machine,
    signer: Option<&Path>,
    now: bool,
) -> anyhow::Result<Option<String>> {
    if !now {
        return Ok(None);
    }
    let unit = unit(signer)?;
    machine.has_unit(&unit).map_err(|why| Refusal::new("usage", why))?;
    Ok(Some(unit))
}

pub(super) fn pool(out: &mut Output<'_>, config: &Config, verb: &PoolVerb) -> anyhow::Result<()> {
    let now = matches!(verb, PoolVerb::Init { now: true } | PoolVerb::Import { now: true, .. });
    let machine = Machine::here();
    // An authority is made once, so that a reason against the start shows first.
    let unit = unit_to_start(&machine, config.signer.as_deref(), now)?;
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
        PoolVerb::Rotate { .. }
        | PoolVerb::Revoke { .. }
        | PoolVerb::Admit { .. }
        | PoolVerb::Join { .. }
        | PoolVerb::Yield { .. } => {
            anyhow::bail!("internal error: not a verb of this function")
        }
        PoolVerb::Init { .. } => {
            let _lock = offline(config)?;
            made(&own_link(config)?, Operation::Init { name: config.name.clone() })?
        }
        PoolVerb::Import { file, .. } => {
            let text = read_export(file)?;
            let _lock = offline(config)?;
            made(&own_link(config)?, Operation::Import { exported: text })?
        }
    };
    let event = if matches!(verb, PoolVerb::Import { .. }) { "pool-import" } else { "pool-init" };
    audit::note_offline(&config.state_dir, &config.name, audit::own(event))?;
    let fingerprint = data_encoding::HEXLOWER.encode(&authority);
    let folder = places(config.signer.as_deref(), &config.state_dir).folder;
    if let Some(unit) = &unit {
        machine.enable_now(unit).map_err(|why| Refusal {
            code: "failed".into(),
            message: format!("the pool's authority is in {}, but {why}", folder.display()),
            hint: format!("`journalctl -u {unit}` shows why; `systemctl enable --now {unit}` tries again"),
        })?;
    }
    let next = if unit.is_some() { "" } else { "start the server, and " };
    let value = json!({ "authority_sha256": fingerprint, "folder": folder });
    out.answer("pool", value, |out, _: Value| {
        writeln!(out, "The pool's authority is in {}: keep a copy in a secret place.", folder.display())?;
        writeln!(out, "Its certificate's SHA-256 is {fingerprint}.")?;
        if matches!(verb, PoolVerb::Import { .. }) {
            writeln!(out, "Next: {next}add it to servers.toml of the pool's clients.")?;
        } else {
            writeln!(out, "Next: {next}run `gpuserver token create` to let a client join.")?;
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use gpusession_diagnosis::testing::{plant, program};

    use super::*;

    #[test]
    fn unit_of_an_instance_is_started_if_the_package_has_it() {
        let root = tempfile::tempdir().unwrap();
        let machine = Machine::below(root.path());
        let host = Some(Path::new("/run/gpuserver-ca/sign.sock"));
        assert_eq!(unit(host).unwrap(), "gpuserver.service");
        assert_eq!(unit(Some(Path::new("/run/gpuserver-ca-a/sign.sock"))).unwrap(), "gpuserver@a.service");
        for other in [None, Some(Path::new("/home/me/sign.sock"))] {
            assert!(unit_to_start(&machine, other, true).is_err(), "{other:?}: a server of a user");
        }
        assert_eq!(unit_to_start(&machine, host, false).unwrap(), None);
        assert!(unit_to_start(&machine, host, true).is_err(), "without systemd");
        plant(&root, "run/systemd/system/.keep", "");
        program(&root, "systemctl", "echo loaded");
        assert_eq!(unit_to_start(&machine, host, true).unwrap().as_deref(), Some("gpuserver.service"));
    }
}
