//! Handles that a program sees instead of the driver's: kind (8 bits), server (8), generation (16), slot (32). Never null,
//! never one of the small constants that CUDA gives a meaning.

/// A context; slots below the number of the worker's devices are the primary contexts.
pub const CTX: u8 = 0x11;
/// A stream.
pub const STREAM: u8 = 0x12;
/// An event.
pub const EVENT: u8 = 0x13;
/// A module.
pub const MODULE: u8 = 0x14;
/// A library.
pub const LIBRARY: u8 = 0x15;
/// A kernel or function (the driver accepts both in each other's place).
pub const FUNC: u8 = 0x16;
/// A graph.
pub const GRAPH: u8 = 0x17;
/// An executable graph.
pub const EXEC: u8 = 0x18;

/// Puts a handle together.
pub const fn make(kind: u8, server: u8, generation: u16, slot: u32) -> u64 {
    (kind as u64) << 56 | (server as u64) << 48 | (generation as u64) << 32 | slot as u64
}

/// The kind of a handle.
pub const fn kind(handle: u64) -> u8 {
    (handle >> 56) as u8
}

/// The slot of a handle.
pub const fn slot(handle: u64) -> u32 {
    handle as u32
}

/// The server of a handle: the number of the worker among those of the program.
pub const fn server(handle: u64) -> u8 {
    (handle >> 48) as u8
}

/// A handle without its server's number.
pub const fn local(handle: u64) -> u64 {
    handle & !(0xff << 48)
}
