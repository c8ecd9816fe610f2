//! `libcuda.so.1` for programs on a machine without a GPU. Every call is answered from state that the process knows, or
//! forwarded to the worker that serves the process. See `docs/architecture.md`.
//!
//! Rules of code that lives inside other people's programs: nothing starts before `cuInit`, nothing unwinds into C, no
//! signal handlers, nothing is printed but what `GPUSESSION_TRACE` asks for.
#![allow(non_snake_case)]

mod api;
mod backlog;
mod claims;
mod client;
mod clients;
mod compile_cache;
mod copies;
mod devices;
mod entry;
mod errors;
mod events;
mod functions;
mod handles;
mod host_functions;
mod images;
mod mapped;
#[path = "../../../simgpu/src/md2.rs"]
mod md2;
mod objects;
mod private_tables;
mod proc_address;
mod ranges;
mod streams;
mod thread;
mod trace;
mod window;

/// Tells the server that this is not a GPU's driver (see `gpuserver`'s key `driver`).
#[unsafe(no_mangle)]
pub static gpusession_marker: u32 = 1;

/// What a call that is not supported answers; counted for `GPUSESSION_TRACE=missing`.
pub(crate) fn unsupported(name: &'static str) -> i32 {
    trace::missing(name);
    entry::NOT_SUPPORTED
}
