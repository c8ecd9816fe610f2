//! The first bytes of a data connection, in clear: they say which worker it is for, so that `gpuserver` can hand the
//! socket over unread. Nothing in them is trusted; admission happens inside the worker.
//!
//! A preface that cannot be served is answered with a refusal before the connection is closed: a little-endian `u32`
//! whose highest bit is set and whose other bits are the length of the UTF-8 reason that follows ([`refusal`]). Neither
//! a TLS record nor a frame starts with four such bytes, so whoever reads a connection's first bytes looks for it with
//! [`refusal_len`]. A connection that does not start with a preface at all is closed without an answer.

use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// First eight bytes of every data connection.
pub const MAGIC: [u8; 8] = *b"GPUSESS\x01";
/// Version of the data plane: raised whenever frames, operations or lanes change their meaning. A worker serves only its own.
pub const VERSION: u16 = 3;
/// Flag: TLS follows the preface.
pub const FLAG_TLS: u16 = 1;
/// Bytes of a preface.
pub const LEN: usize = 40;

/// See the module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Preface {
    /// [`MAGIC`].
    pub magic: [u8; 8],
    /// [`VERSION`].
    pub version: U16,
    /// [`FLAG_TLS`].
    pub flags: U16,
    /// Which worker the connection is for.
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

/// Why a connection's first bytes are not a preface that can be served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BadPreface {
    /// Not gpusession's data plane.
    Magic,
    /// A version that this end does not speak.
    Version(u16),
}

impl std::fmt::Display for BadPreface {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Magic => f.write_str("not a gpusession data connection"),
            Self::Version(v) => write!(f, "data-plane version {v}, this server speaks {VERSION}"),
        }
    }
}

impl std::error::Error for BadPreface {}

impl Preface {
    /// A preface for `worker`.
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

    /// Reads and checks a preface.
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

    /// Whether TLS follows.
    pub fn tls(&self) -> bool {
        self.flags.get() & FLAG_TLS != 0
    }
}

const REFUSED: u32 = 1 << 31;
/// Longest reason of a refusal, in bytes.
pub const MAX_REASON: usize = 1024;

/// The bytes that refuse a connection whose preface was read.
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

/// The length of the reason, where a connection's first four bytes are a refusal. More than [`MAX_REASON`] is cut to it.
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
    fn refusals_are_told_from_tls_and_frames() {
        let bytes = refusal("no such worker");
        assert_eq!(refusal_len(bytes[..4].try_into().unwrap()), Some(14));
        assert_eq!(&bytes[4..], b"no such worker");
        // Records of TLS: handshake and alert, up to the longest a record can be.
        for first in [[0x16, 3, 3, 0x41], [0x15, 3, 3, 0]] {
            assert_eq!(refusal_len(first), None);
        }
        assert_eq!(refusal(&"é".repeat(2000)).len(), 4 + MAX_REASON);
        assert_eq!(refusal_len([0xff; 4]), Some(MAX_REASON));
    }
}
