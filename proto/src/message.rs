//! Length-prefixed messages on local sockets: a little-endian `u32` length, then postcard.

use serde::{Serialize, de::DeserializeOwned};

/// Longest message on a local socket, in bytes; a longer one is rejected before any allocation.
pub const MAX_MESSAGE: usize = 64 * 1024;

/// Reason why bytes are not a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Malformed {
    /// The length prefix exceeds [`MAX_MESSAGE`].
    TooLong(usize),
    /// The body does not decode, or bytes are left over.
    Body,
}

impl std::fmt::Display for Malformed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::TooLong(n) => write!(f, "message too long: {n} bytes, at most {MAX_MESSAGE}"),
            Self::Body => f.write_str("malformed message"),
        }
    }
}

impl std::error::Error for Malformed {}

/// Encodes a message with its length prefix.
///
/// # Panics
/// Never for the types of this crate: they all serialize.
#[allow(clippy::expect_used, reason = "derived `Serialize` of types without maps or unknown lengths")]
pub fn encode<T: Serialize>(message: &T) -> Vec<u8> {
    let body = postcard::to_allocvec(message).expect("messages of this crate serialize");
    let mut out = Vec::with_capacity(4 + body.len());
    out.extend_from_slice(&(body.len() as u32).to_le_bytes());
    out.extend_from_slice(&body);
    out
}

/// Reads the length prefix; an error above [`MAX_MESSAGE`].
pub fn body_len(prefix: [u8; 4]) -> Result<usize, Malformed> {
    let len = u32::from_le_bytes(prefix) as usize;
    if len > MAX_MESSAGE { Err(Malformed::TooLong(len)) } else { Ok(len) }
}

/// Decodes a message's body (without the prefix); every byte must belong to it.
pub fn decode<T: DeserializeOwned>(body: &[u8]) -> Result<T, Malformed> {
    match postcard::take_from_bytes(body) {
        Ok((message, [])) => Ok(message),
        _ => Err(Malformed::Body),
    }
}
