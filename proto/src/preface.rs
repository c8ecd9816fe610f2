//! The first bytes of a data connection, in clear: they say which worker it is for, so that `gpuserver` can hand the
//! socket over unread. Nothing in them is trusted; admission happens inside the worker.

use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// First eight bytes of every data connection.
pub const MAGIC: [u8; 8] = *b"GPUSESS\x01";
/// Version of the data plane. A server accepts this and the previous two minor versions.
pub const VERSION: u16 = 1;
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
}
