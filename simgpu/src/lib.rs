//! A simulated CUDA driver: a `libcuda.so.1` that runs PTX on the CPU and misbehaves on request.
//!
//! From the outside in: `exports` holds the C functions; `submit` and `capture` turn a call into an
//! entry or a node. `stream` runs entries (`op`), `pool` runs grids, and `ptx` is the compiler and
//! interpreter.

#![expect(clippy::disallowed_methods, reason = "a simulated device takes time")]
#![allow(missing_docs, reason = "a simulator for tests; cuda.h describes its C functions")]
#![recursion_limit = "256"]

pub mod abi;
pub mod arena;
pub mod config;
pub mod driver;
pub mod entry;
pub mod errors;
pub mod export_tables;
pub mod exports;
pub mod fatbin;
pub mod ipc;
pub mod launch;
pub mod memory;
pub mod nvml;
pub mod pool;
pub mod proc_address;
pub mod ptx;
pub mod registry;
pub mod shared_pool;
pub mod usage;

/// The calls that are not simulated.
#[allow(non_snake_case)]
mod unsupported_calls {
    include!(concat!(env!("OUT_DIR"), "/unsupported.rs"));
}

/// Returns the result of a call that is not simulated.
fn unsupported(name: &str) -> i32 {
    if driver::config().trace {
        eprintln!("simgpu: {name} is not simulated");
    }
    errors::NOT_SUPPORTED.0 as i32
}
