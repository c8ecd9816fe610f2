//! `libcuda.so.1` for programs on a machine without a GPU.
//!
//! The library answers a call from state that the process knows, or forwards it to the process's
//! worker. See `docs/architecture.md`.
//!
//! Rules for code inside other people's programs: it starts nothing before `cuInit`, lets no panic
//! unwind into C, handles no signals, and prints only the output that `GPUSESSION_TRACE` requests.
#![allow(non_snake_case)]

mod api;
mod arrays;
mod capture;
mod client;
mod clients;
mod compile_cache;
mod copies;
mod core_dumps;
mod cuboid;
mod deferred_uploads;
mod descriptors;
mod devices;
mod entry;
mod errors;
mod events;
#[cfg(test)]
mod fake_worker;
mod faulted;
mod foreign_addresses;
mod freed_blocks;
mod functions;
mod graph_uses;
mod handles;
mod host_functions;
mod images;
mod jit;
mod libraries;
mod limits;
mod linker;
mod long_waits;
mod managed_places;
mod mapped;
mod modules;
mod nccl;
mod objects;
mod positions;
mod private_tables;
mod proc_address;
mod ranges;
mod references;
mod regions;
mod route;
mod run_ahead;
mod signatures;
mod status;
mod stream;
mod streams;
mod thread;
mod trace;
mod unsolicited;
mod watched;
mod window;
mod written_pages;

/// Marks this library, so that a server does not load it as its GPU driver (`gpuserver`'s key
/// `driver`).
#[unsafe(no_mangle)]
pub static gpusession_marker: u32 = 1;

/// Version of this library: `gpusession health` finds it in the file, which it does not load.
#[used]
static LIBRARY_VERSION: &str = concat!("gpusession library ", env!("CARGO_PKG_VERSION"), "\n");

/// Counts a call that is not supported for `GPUSESSION_TRACE=missing`, and returns its status.
pub(crate) fn unsupported(name: &'static str) -> i32 {
    trace::missing(name);
    status::NOT_SUPPORTED
}
