//! Images that programs load: fat binaries, ELF images, PTX text.
//!
//! The readers trust no byte of an image: it may be cut off, or come from a hostile client.

mod bytes;
mod check;
pub mod elf;
pub mod fatbin;
pub mod ptx;

pub use check::{Bad, Kind, check};

/// First four bytes of a wrapper, which holds an address of an image.
pub const WRAPPER: u32 = 0x4662_43b1;
/// First four bytes of a fat binary.
pub const FATBIN: u32 = 0xba55_ed50;
/// First four bytes of an ELF image.
pub const ELF: u32 = 0x464c_457f;
