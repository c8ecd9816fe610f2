//! Helpers for tests and benchmarks of links.

pub mod peer;
pub mod syscalls;
