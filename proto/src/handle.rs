//! Handles that a program sees instead of the driver's.
//!
//! A handle is kind (8 bits), server (8), generation (16), slot (32). It is never null, and never
//! one of the small constants that have a meaning in CUDA.
//!
//! Slots are multiples of [`ALIGNMENT`], but for primary contexts and for libraries before
//! 2026-12: programs take handles for pointers, and use the lowest bits of pointers. The lowest bit
//! of a stream's handle tells PyTorch whether the stream is its own (`c10/cuda/CUDAStream.cpp`).

/// Kind of contexts; slots below the number of the worker's devices are the primary contexts.
pub const CTX: u8 = 0x11;
/// Kind of streams, but for the default streams 0, 1 and 2.
pub const STREAM: u8 = 0x12;
/// Kind of events.
pub const EVENT: u8 = 0x13;
/// Kind of modules.
pub const MODULE: u8 = 0x14;
/// Kind of libraries.
pub const LIBRARY: u8 = 0x15;
/// Kind of kernels and functions, since the driver accepts each in the other's place.
pub const FUNC: u8 = 0x16;
/// Kind of graphs; an instantiated one has a handle of [`EXEC`].
pub const GRAPH: u8 = 0x17;
/// Kind of instantiated graphs.
pub const EXEC: u8 = 0x18;
/// Kind of states of the linker.
pub const LINK: u8 = 0x19;
/// Kind of user objects, which graphs keep alive.
pub const USER_OBJECT: u8 = 0x1a;
/// Kind of green contexts; each also has a handle of the kind of contexts.
pub const GREEN: u8 = 0x1b;
/// Kind of descriptors of device resources.
pub const RESOURCE_DESC: u8 = 0x1c;
/// Kind of registered functions of the program, which no worker knows.
pub const CALLBACK: u8 = 0x1d;
/// Kind of references to textures, of a module or created by the program.
pub const TEXREF: u8 = 0x1e;
/// Kind of a module's references to surfaces.
pub const SURFREF: u8 = 0x1f;

/// Composes a handle.
pub const fn make(kind: u8, server: u8, generation: u16, slot: u32) -> u64 {
    (kind as u64) << 56 | (server as u64) << 48 | (generation as u64) << 32 | slot as u64
}

/// Distance between slots that libraries give out, which is the alignment of `malloc`.
pub const ALIGNMENT: u32 = 16;

/// Returns the number of a slot that is a multiple of [`ALIGNMENT`], for tables.
pub const fn index(handle: u64) -> usize {
    (slot(handle) / ALIGNMENT) as usize
}

/// Returns the kind of a handle.
pub const fn kind(handle: u64) -> u8 {
    (handle >> 56) as u8
}

/// Returns the slot of a handle.
pub const fn slot(handle: u64) -> u32 {
    handle as u32
}

/// Returns the server of a handle: the number of the worker among those of the program.
pub const fn server(handle: u64) -> u8 {
    (handle >> 48) as u8
}

/// Returns a handle without its server's number.
pub const fn local(handle: u64) -> u64 {
    handle & !(0xff << 48)
}
