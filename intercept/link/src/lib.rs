//! A process's connection to its worker: grant from the daemon, ordered log, replies, bulk lanes.
//!
//! The crate knows no CUDA. [`transport`] and
//! [`worker_end`] serve the worker's end.
#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::unreachable,
        clippy::print_stdout,
        clippy::print_stderr
    )
)]

pub mod flight;
pub mod grant;
pub mod lanes;
pub mod line;
pub mod link;
pub mod load;
pub mod log;
pub mod resume;
#[cfg(test)]
mod search;
pub mod threads;
pub mod tls;
pub mod transport;
pub mod worker_end;

pub use link::{Events, Link, LinkLost, Reply};
