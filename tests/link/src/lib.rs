//! Helpers for tests and benchmarks of links.

#![allow(missing_docs, reason = "helpers of tests")]

pub mod peer;
pub mod syscalls;
