//! `gpuserver token`: creates, lists and revokes join tokens.

use serde_json::{Value, json};

use super::pool::own_link;
use super::target::{Target, offline, running};
use crate::admin::Ask;
use crate::admin::answer::tokens::{FleetView, TokenView, no_token, print_token, print_tokens, terms};
use crate::admin::answer::unsigned;
use crate::audit;
use crate::config::Config;
use crate::net::host_port;
use crate::signer::tokens::TokenKind;
use crate::text::Output;
use clap::Subcommand;

/// A verb of `gpuserver token`.
#[derive(Debug, Subcommand)]
pub enum TokenVerb {
    /// Create a token with which new clients join, and print it once
    Create {
        /// Pattern of the clients' names, as in "vm-*"
        #[arg(long, value_name = "PATTERN", default_value = "*")]
        name: String,
        /// Number of clients that can join with it; several need --from or --per-address
        #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
        uses: u32,
        /// Lifetime of the token, at most 30d
        #[arg(long, value_name = "TIME", default_value = "24h")]
        ttl: String,
        /// Networks or addresses from which clients join with it; without, from anywhere
        #[arg(long, value_name = "NETWORK", value_delimiter = ',')]
        from: Vec<String>,
        /// Number of clients that can join from one address, or from one /64 of IPv6
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
        per_address: Option<u32>,
    },
    /// List tokens and fleet keys, without their secrets
    List,
    /// Revoke a token or a fleet key; clients that joined with it stay
    Revoke {
        /// Token id or its start
        id: String,
    },
}

pub(super) fn token(out: &mut Output<'_>, server: &Target, verb: &TokenVerb) -> anyhow::Result<()> {
    let ask = match verb {
        TokenVerb::Create { name, uses, ttl, from, per_address } => Ask::TokenCreate {
            pattern: name.clone(),
            uses: *uses,
            ttl: ttl.clone(),
            from: from.clone(),
            per_address: per_address.unwrap_or_default(),
        },
        TokenVerb::List => Ask::Tokens,
        TokenVerb::Revoke { id } => Ask::TokenRevoke { id: id.clone() },
    };
    let value = done(server, &ask)?;
    match verb {
        TokenVerb::Create { .. } => {
            let here = || server.config().map_or_else(|_| "HOST".into(), address);
            let address = server.remote.as_ref().map_or_else(here, |remote| remote.address.clone());
            out.answer("token", value, |out, token| print_token(out, token, &address))
        }
        TokenVerb::List => out.answer("tokens", value, print_tokens),
        TokenVerb::Revoke { .. } => out.answer("token", value, |out, value: Value| {
            Ok(writeln!(out, "token {} is revoked", value["id"].as_str().unwrap_or_default())?)
        }),
    }
}

/// Performs a request about tokens by the running server, or else on the files.
pub(super) fn done(server: &Target, ask: &Ask) -> anyhow::Result<Value> {
    match running(server, ask)? {
        Some(value) => Ok(value),
        None => token_offline(server.config()?, ask),
    }
}

fn token_offline(config: &Config, ask: &Ask) -> anyhow::Result<Value> {
    let _lock = offline(config)?;
    let link = own_link(config)?;
    let made = match ask {
        Ask::TokenCreate { pattern, uses, ttl, from, per_address } => {
            let terms = terms(TokenKind::Client, pattern.clone(), *uses, ttl, from, *per_address)?;
            let (token, facts) = link.create_token(terms).map_err(|e| unsigned(&e))?;
            serde_json::to_value(TokenView::new(&token, facts))?
        }
        Ask::FleetCreate { pattern, uses, ttl, from } => {
            let terms = terms(TokenKind::Fleet, pattern.clone(), *uses, ttl, from, 0)?;
            let (key, facts) = link.create_fleet(terms).map_err(|e| unsigned(&e))?;
            serde_json::to_value(FleetView::new(&key, facts))?
        }
        Ask::TokenRevoke { id } => {
            let revoked = link.revoke_token(id).map_err(|e| unsigned(&e))?;
            json!({ "id": revoked.ok_or_else(|| no_token(id))? })
        }
        _ => return Ok(serde_json::to_value(link.tokens().map_err(|e| unsigned(&e))?)?),
    };
    audit::note_offline(&config.state_dir, &config.name, ask.event(String::new()))?;
    Ok(made)
}

/// Returns the address at which clients reach this server.
fn address(config: &Config) -> String {
    match config.advertise.first() {
        Some(a) => host_port(&a.host, a.port.unwrap_or(config.listen.port())),
        None if config.listen.ip().is_unspecified() => {
            let host = nix::unistd::gethostname().map(|n| n.to_string_lossy().into_owned());
            host_port(&host.unwrap_or_else(|_| "HOST".into()), config.listen.port())
        }
        None => config.listen.to_string(),
    }
}

/// Reads a secret from the command line; `-` or none: from standard input.
pub(super) fn secret(text: Option<&str>, prompt: &str) -> std::io::Result<String> {
    if let Some(text) = text.filter(|text| *text != "-") {
        return Ok(text.into());
    }
    if nix::unistd::isatty(std::io::stdin()) == Ok(true) {
        eprint!("{prompt}: ");
    }
    let mut line = String::new();
    std::io::stdin().read_line(&mut line)?;
    Ok(line)
}
