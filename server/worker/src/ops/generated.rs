//! Replay of the calls whose form the table describes completely (see `build.rs`).

use gpusession_proto::frame::{BadFrame, MAX_LONG_BODY, Reader};

use crate::answer::{Answer, Done, Failure, bounded};
use crate::driver::{check, status};
use crate::objects::known::{Kind, Owner};
use crate::session::Session;

pub use source::dispatch;

/// The generated code uses one form of cast and of block for every type.
#[allow(clippy::unnecessary_cast, clippy::too_many_lines)]
mod source {
    use super::*;
    include!(concat!(env!("OUT_DIR"), "/replay.rs"));
}

/// Copies a structure of `len` bytes into memory aligned for the driver.
fn structure(bytes: &[u8], len: usize) -> Result<Vec<u64>, Failure> {
    if bytes.len() != len {
        return Err(status::INVALID_VALUE.into());
    }
    let mut words = vec![0u64; len.div_ceil(8)];
    for (word, bytes) in words.iter_mut().zip(bytes.chunks(8)) {
        let mut padded = [0; 8];
        padded[..bytes.len()].copy_from_slice(bytes);
        *word = u64::from_le_bytes(padded);
    }
    Ok(words)
}

/// Copies a structure as [`structure`] does; an empty string yields `None`.
fn optional(bytes: &[u8], len: usize) -> Result<Option<Vec<u64>>, Failure> {
    if bytes.is_empty() { Ok(None) } else { structure(bytes, len).map(Some) }
}

/// Checks the array of a `CUDA_RESOURCE_DESC`.
fn resource(session: &Session, words: &[u64]) -> Result<(), Failure> {
    // CU_RESOURCE_TYPE_ARRAY and CU_RESOURCE_TYPE_MIPMAPPED_ARRAY
    match words {
        [kind, array, ..] if *kind as u32 == 0 => session.known.check(Kind::Array, *array)?,
        [kind, array, ..] if *kind as u32 == 1 => session.known.check(Kind::Mipmap, *array)?,
        _ => {}
    }
    Ok(())
}

fn bytes_of(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_le_bytes()).collect()
}
