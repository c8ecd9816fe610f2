//! `libnvidia-ml.so.1` for programs on a machine without a GPU: shows the GPUs of the process's leases. See the README of this folder.
//!
//! Rules of code that lives inside other people's programs: no threads, nothing unwinds into C, no signal handlers, nothing is printed
//! but what `GPUSESSION_TRACE` asks for.
#![allow(non_snake_case)]

mod entry;
mod events;
mod exports;
mod local;
mod session;
mod smi;
mod status;
mod trace;

/// Tells the server that this is not a GPU's NVML.
#[unsafe(no_mangle)]
pub static gpusession_marker: u32 = 1;
