//! Code that several programs share, and that crosses no wire.
//!
//! Without features the crate has no dependency, since it runs inside users' programs.
#![forbid(unsafe_code)]

pub mod context_calls;
pub mod core_dump;
#[cfg(feature = "config")]
pub mod help;
#[cfg(feature = "config")]
pub mod keys;
pub mod md2;
#[cfg(feature = "config")]
pub mod units;
#[cfg(feature = "config")]
pub mod usage;
#[cfg(feature = "config")]
pub mod words;
