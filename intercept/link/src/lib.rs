//! A process's connection to its worker: grant from the daemon, ordered log, replies, bulk lanes.
//!
//! The crate knows no CUDA. [`transport`] and
//! [`worker_end`] serve the worker's end.

pub mod flight;
pub mod grant;
pub mod line;
pub mod link;
pub mod load;
pub mod log;
mod outbox;
mod parts;
pub mod resume;
#[cfg(test)]
mod search;
pub mod spin;
pub mod threads;
pub mod tls;
pub mod transport;
pub mod watched_memory;
pub mod worker_end;

pub use link::lanes;
pub use link::{Events, Link, LinkLost, Reply};
