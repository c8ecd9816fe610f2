//! A process's connection to its worker: grant from the daemon, ordered log with pipelining, replies, bulk lanes.
//! Knows no CUDA. [`transport`] serves the worker's end too.

pub mod grant;
pub mod lanes;
pub mod link;
pub mod threads;
pub mod tls;
pub mod transport;

pub use link::{Events, Link, Lost, Reply};
