//! Objects behind the client's handles that are more than a handle of the driver.

pub mod allocations;
pub mod block_hash;
pub mod counters;
pub mod device_blocks;
pub mod jit;
pub mod known;
pub mod links;
pub mod memory;
pub mod mirrors;
pub mod pools;
pub mod settling;
pub mod shares;

use crate::handles::Object;

/// A stream of the client.
#[derive(Clone, Copy)]
pub struct Stream {
    /// The driver's handle.
    pub object: Object,
    /// Whether the stream does not synchronise with the default stream.
    pub non_blocking: bool,
    /// The client's handle of its context.
    pub ctx: u64,
}

/// A kernel or a function: launches take both, but their attributes have different calls.
#[derive(Clone, Copy)]
pub struct Func {
    /// The driver's handle.
    pub object: Object,
    /// Whether the handle is of a kernel.
    pub kernel: bool,
    /// The client's handle of the module or library that it goes with.
    pub parent: u64,
}
