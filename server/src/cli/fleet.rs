//! `gpuserver fleet`: creates fleet keys, and derives join tokens from them.

use clap::Subcommand;
use gpusession_proto::join::{FleetKey, is_name};
use serde_json::{Value, json};

use super::target::Target;
use super::token::{done, secret};
use crate::admin::answer::tokens::print_fleet;
use crate::admin::{Ask, Refusal};
use crate::signer::fleet::FleetError;
use crate::signer::tokens::matches;
use crate::text::Output;

/// A verb of `gpuserver fleet`.
#[derive(Debug, Subcommand)]
pub enum FleetVerb {
    /// Create a fleet key for a provisioning system, and print it once
    ///
    /// `token list` shows it, and `token revoke` revokes it with all of its tokens.
    Create {
        /// Pattern of the clients' names, as in "vm-*"
        #[arg(long, value_name = "PATTERN")]
        name: String,
        /// Number of joins with all of its tokens
        #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..))]
        uses: u32,
        /// Lifetime of the key and its tokens, at most 365d
        #[arg(long, value_name = "TIME", default_value = "365d")]
        ttl: String,
        /// Networks or addresses from which clients join; without, from anywhere
        #[arg(long, value_name = "NETWORK", value_delimiter = ',')]
        from: Vec<String>,
    },
    /// Print the join token of one client, which is derived from a fleet key
    ///
    /// The token is good for this name alone. The command asks no server, and needs no root.
    Token {
        /// Fleet key from `fleet create`; - or none for standard input
        key: Option<String>,
        /// Name of the client
        #[arg(long, value_name = "NAME")]
        name: String,
    },
}

/// Creates a fleet key.
pub(super) fn create(
    out: &mut Output<'_>,
    server: &Target,
    (pattern, uses): (&str, u32),
    ttl: &str,
    from: &[String],
) -> anyhow::Result<()> {
    let ask = Ask::FleetCreate { pattern: pattern.into(), uses, ttl: ttl.into(), from: from.to_vec() };
    out.answer("fleet", done(server, &ask)?, print_fleet)
}

/// Derives the join token of a client.
pub(super) fn token(out: &mut Output<'_>, key: Option<&str>, name: &str) -> anyhow::Result<()> {
    let text = secret(key, "fleet key (`gpuserver fleet create` printed it)")?;
    let usage = |why: String| Refusal::new("usage", why);
    let key: FleetKey = text.parse().map_err(|e| usage(format!("{e}")))?;
    if !is_name(name) {
        let rule = "it has a-z, 0-9, `-` and `.`, 64 characters at most";
        return Err(usage(format!("--name {name:?}: not a client's name: {rule}")).into());
    }
    if !matches(&key.pattern, name) {
        let (pattern, name) = (key.pattern, name.into());
        return Err(usage(FleetError::WrongName { pattern, name }.to_string()).into());
    }
    let token = key.token(name);
    let id = data_encoding::HEXLOWER.encode(&token.id);
    let value = json!({ "token": token.to_text(), "id": id, "client": name });
    out.answer("token", value, |out, _: Value| Ok(writeln!(out, "{}", token.to_text())?))
}
