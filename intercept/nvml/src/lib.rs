//! `libnvidia-ml.so.1` for programs on a machine without a GPU: shows the GPUs of the process's
//! leases.
//!
//! See the README of this folder.
//!
//! Rules for code inside other people's programs: it starts no threads, lets no panic unwind into
//! C, handles no signals, and prints only the output that `GPUSESSION_TRACE` requests.
#![allow(non_snake_case)]

mod entry;
mod event_set;
mod events;
mod exports;
mod local;
mod session;
mod smi;
mod status;
mod trace;

/// Marks this library, so that a server does not load it as its GPU's NVML.
#[unsafe(no_mangle)]
pub static gpusession_marker: u32 = 1;
