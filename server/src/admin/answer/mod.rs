//! The work behind each request of an administrator.

pub mod administrators;
pub mod clients;
pub mod config;
pub mod gpus;
pub mod leases;
pub mod records;
pub mod rotation;
pub mod statements;
pub mod status;
pub mod tokens;
pub mod usage;
pub mod workers;

use std::time::Duration;

use crate::pool::statements::NotStated;
use crate::refusal::Refusal;
use crate::signer::{Refused, Why};

fn internal(e: &dyn std::fmt::Display) -> Refusal {
    Refusal::new("internal", e.to_string())
}

/// Creates the refusal for what the signer did not do.
pub fn unsigned(refused: &Refused) -> Refusal {
    let code = match refused.why {
        Why::Import | Why::Request => "usage",
        Why::Phase => "wrong-phase",
        Why::Right => "not-allowed",
        Why::Exists => "exists",
        Why::Busy | Why::Away | Why::Issuers => "not-reachable",
        Why::NoIssuer => "no-issuer",
        Why::Missing | Why::Token | Why::Failed => "internal",
    };
    Refusal::new(code, refused.to_string())
}

/// Creates the refusal of the name of a revoked server.
pub fn no_more_a_name(name: &str) -> Refusal {
    Refusal::new("usage", format!("server {name} is revoked for ever: a server joins under another `name`"))
}

/// Creates the refusal for a statement that was not made.
fn not_stated(e: &NotStated) -> Refusal {
    match e {
        NotStated::Signer(refused) => unsigned(refused),
        NotStated::Full(_) => Refusal::new("too-many", e.to_string()),
        NotStated::Foreign | NotStated::Store(_) => internal(e),
    }
}

/// Creates the refusal for a revocation that holds on this server alone.
fn here_alone(what: &str, e: &NotStated) -> Refusal {
    Refusal {
        message: format!("{what}: revoked on this server, and not on the pool's other ones: {e}"),
        hint: "correct the cause and repeat the command".into(),
        ..not_stated(e)
    }
}

fn show(value: Result<serde_json::Value, serde_json::Error>) -> Result<serde_json::Value, Refusal> {
    value.map_err(|e| internal(&e))
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
