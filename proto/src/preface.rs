//! First bytes of a data connection, in clear; they name the worker.
//!
//! So `gpuserver` can hand over the socket without reading more. The preface gives no rights;
//! admission happens inside the worker.
//!
//! Before it closes a connection whose preface cannot be served, the server sends a [`refusal`].
//! This is a little-endian `u32`, then a reason in UTF-8. The word's highest bit is set, the other
//! bits are the length of the reason. Neither a TLS record nor a frame starts with four such bytes,
//! so a client checks the first bytes with [`refusal_len`].
//!
//! A connection that does not start with a preface is closed without an answer.

use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Magic number at the start of every data connection.
pub const MAGIC: [u8; 8] = *b"GPUSESS\x01";
/// Version of the data plane, raised when frames, operations or lanes change their meaning.
///
/// A worker serves only its own version.
pub const VERSION: u16 = 3;
/// Flag of a connection on which TLS follows the preface.
pub const FLAG_TLS: u16 = 1;
/// Length of a preface, in bytes.
pub const LEN: usize = 40;

/// The preface as it travels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Preface {
    /// [`MAGIC`].
    pub magic: [u8; 8],
    /// [`VERSION`].
    pub version: U16,
    /// [`FLAG_TLS`].
    pub flags: U16,
    /// Id of the worker that the connection is for.
    pub worker: [u8; 16],
    /// 0: the ordered log; others: bulk data.
    pub lane: U16,
    /// Zero.
    pub reserved: U16,
    /// Incremented at each reconnect; fences older connections.
    pub epoch: U32,
    /// Zero.
    pub reserved2: U32,
}

/// Reason why the first bytes of a connection are no preface that this end can serve.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BadPreface {
    /// Not gpusession's data plane.
    Magic,
    /// A version that this end does not support.
    Version(u16),
}

impl std::fmt::Display for BadPreface {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Magic => f.write_str("not a gpusession data connection"),
            Self::Version(v) => write!(
                f,
                "data-plane version {v}: this server supports only {VERSION}; update the older side"
            ),
        }
    }
}

impl std::error::Error for BadPreface {}

impl Preface {
    /// Creates a preface for `worker`.
    pub fn new(worker: [u8; 16], lane: u16, epoch: u32, tls: bool) -> Self {
        Self {
            magic: MAGIC,
            version: VERSION.into(),
            flags: if tls { FLAG_TLS } else { 0 }.into(),
            worker,
            lane: lane.into(),
            reserved: 0.into(),
            epoch: epoch.into(),
            reserved2: 0.into(),
        }
    }

    /// Reads a preface, and checks magic and version.
    pub fn parse(bytes: &[u8; LEN]) -> Result<Self, BadPreface> {
        let preface = Self::read_from_bytes(bytes).map_err(|_| BadPreface::Magic)?;
        if preface.magic != MAGIC {
            return Err(BadPreface::Magic);
        }
        match preface.version.get() {
            VERSION => Ok(preface),
            other => Err(BadPreface::Version(other)),
        }
    }

    /// Returns `true` if TLS follows.
    pub fn tls(&self) -> bool {
        self.flags.get() & FLAG_TLS != 0
    }
}

const REFUSED: u32 = 1 << 31;
/// Longest reason of a refusal, in bytes.
pub const MAX_REASON: usize = 1024;

/// Returns the bytes that refuse a connection whose preface was read.
pub fn refusal(reason: &str) -> Vec<u8> {
    let mut end = reason.len().min(MAX_REASON);
    while !reason.is_char_boundary(end) {
        end -= 1;
    }
    let reason = &reason[..end];
    let mut out = (REFUSED | reason.len() as u32).to_le_bytes().to_vec();
    out.extend_from_slice(reason.as_bytes());
    out
}

/// Returns the reason's length if a connection's first four bytes are a refusal.
///
/// The result is at most [`MAX_REASON`].
pub fn refusal_len(first: [u8; 4]) -> Option<usize> {
    let word = u32::from_le_bytes(first);
    (word & REFUSED != 0).then_some(((word & !REFUSED) as usize).min(MAX_REASON))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trip_and_refusals() {
        let preface = Preface::new([5; 16], 2, 3, true);
        let mut bytes: [u8; LEN] = preface.as_bytes().try_into().unwrap();
        assert_eq!(Preface::parse(&bytes), Ok(preface));
        bytes[8] = 99;
        assert_eq!(Preface::parse(&bytes), Err(BadPreface::Version(99)));
        bytes[0] = b'H';
        assert_eq!(Preface::parse(&bytes), Err(BadPreface::Magic));
    }
    #[test]
    fn refusals_differ_from_tls_and_frames() {
        let bytes = refusal("no such worker");
        assert_eq!(refusal_len(bytes[..4].try_into().unwrap()), Some(14));
        assert_eq!(&bytes[4..], b"no such worker");
        // Records of TLS: handshake and alert, up to the longest possible record.
        for first in [[0x16, 3, 3, 0x41], [0x15, 3, 3, 0]] {
            assert_eq!(refusal_len(first), None);
        }
        assert_eq!(refusal(&"é".repeat(2000)).len(), 4 + MAX_REASON);
        assert_eq!(refusal_len([0xff; 4]), Some(MAX_REASON));
    }
}
