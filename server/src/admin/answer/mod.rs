//! The work behind each request of an administrator.

pub mod administrators;
pub mod clients;
pub mod config;
pub mod gpus;
pub mod leases;
pub mod records;
pub mod rotation;
pub mod status;
pub mod tokens;
pub mod usage;
pub mod workers;

use std::time::Duration;

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
        Why::Busy | Why::Away => "not-reachable",
        Why::Missing | Why::Token | Why::Failed => "internal",
    };
    Refusal::new(code, refused.to_string())
}

fn show(value: Result<serde_json::Value, serde_json::Error>) -> Result<serde_json::Value, Refusal> {
    value.map_err(|e| internal(&e))
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
