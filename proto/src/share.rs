//! Names of a worker's objects in other processes.
//!
//! A program passes a [`Token`] to another one, in a sealed memory file or as the 64 bytes of a
//! legacy handle. The other program's worker asks the supervisor for the object that it names.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Kind of a shared object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[repr(u8)]
pub enum Kind {
    /// Physical memory.
    Memory = 1,
    /// An event, as counters in shared host memory.
    Event = 2,
    /// A memory pool, whose memory comes as [`Pointer`](Self::Pointer)s.
    Pool = 3,
    /// Memory of a pool, for processes that have imported the pool.
    Pointer = 4,
}

impl Kind {
    fn of(byte: u8) -> Option<Self> {
        [Self::Memory, Self::Event, Self::Pool, Self::Pointer].into_iter().find(|kind| *kind as u8 == byte)
    }
}

/// Number that only the worker of an object and holders of its token know.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Secret(pub [u8; 16]);

impl Secret {
    /// Compares two secrets in a time that does not depend on them.
    pub fn is(&self, other: &Self) -> bool {
        let differences = self.0.iter().zip(other.0).map(|(a, b)| a ^ b);
        std::hint::black_box(differences.fold(0, |sum, byte| sum | byte)) == 0
    }
}

/// Hides the secret from logs and traces.
impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

/// Number that stands for all events of a worker where imports are counted.
pub const EVENTS: u64 = u64::MAX;

/// Name of a shared object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Name {
    /// Kind of the object.
    pub kind: Kind,
    /// Id of its worker.
    pub worker: [u8; 16],
    /// Number of the object, which its worker never uses again.
    pub object: u64,
    /// Proof that the worker has shared it.
    pub secret: Secret,
}

impl Name {
    /// Returns worker and number under which imports of the object are counted.
    ///
    /// Programs open many events and never destroy them (PyTorch), so these count as one object,
    /// which a process has until it or the other one ends.
    pub fn counted(&self) -> ([u8; 16], u64) {
        (self.worker, if self.kind == Kind::Event { EVENTS } else { self.object })
    }
}

/// A shared object, or a part of it, as programs pass it to each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Token {
    /// Name of the object.
    pub name: Name,
    /// Bytes of the object before the part.
    pub offset: u64,
    /// Bytes of the part.
    pub size: u64,
}

/// First bytes of each token; the last one is the version.
const MAGIC: [u8; 4] = *b"gps\x01";

impl Token {
    /// Bytes of a token.
    pub const LEN: usize = 64;

    /// Returns the token's bytes.
    pub fn bytes(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        let parts: [&[u8]; 7] = [
            &MAGIC,
            &(self.name.kind as u32).to_le_bytes(),
            &self.name.worker,
            &self.name.object.to_le_bytes(),
            &self.name.secret.0,
            &self.offset.to_le_bytes(),
            &self.size.to_le_bytes(),
        ];
        let mut at = 0;
        for part in parts {
            bytes[at..at + part.len()].copy_from_slice(part);
            at += part.len();
        }
        bytes
    }

    /// Parses a token; `None`: the bytes are none of this version.
    pub fn parse(bytes: &[u8; Self::LEN]) -> Option<Self> {
        let long = |at: usize| Some(u64::from_le_bytes(bytes[at..at + 8].try_into().ok()?));
        let id = |at: usize| bytes[at..at + 16].try_into().ok();
        if bytes[..4] != MAGIC || bytes[5..8] != [0; 3] {
            return None;
        }
        let name =
            Name { kind: Kind::of(bytes[4])?, worker: id(8)?, object: long(24)?, secret: Secret(id(32)?) };
        Some(Self { name, offset: long(48)?, size: long(56)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_survives_its_bytes_and_no_other_bytes_are_one() {
        let name = Name { kind: Kind::Memory, worker: [7; 16], object: 1 << 32, secret: Secret([9; 16]) };
        let token = Token { name, offset: 512, size: 3 << 20 };
        let bytes = token.bytes();
        assert_eq!(Token::parse(&bytes), Some(token));
        for kind in [Kind::Event, Kind::Pool, Kind::Pointer] {
            let other = Token { name: Name { kind, ..name }, ..token };
            assert_eq!(Token::parse(&other.bytes()), Some(other));
        }
        for at in 0..8 {
            let mut other = bytes;
            other[at] ^= 0x80;
            assert_eq!(Token::parse(&other), None, "byte {at}");
        }
        assert!(!format!("{token:?}").contains("9, 9"), "a trace shows no secret");
    }

    #[test]
    fn secrets_differ_in_any_bit() {
        let secret = Secret([5; 16]);
        for at in 0..16 {
            let mut other = secret;
            other.0[at] ^= 1;
            assert!(!secret.is(&other));
        }
        assert!(secret.is(&Secret([5; 16])));
    }
}
