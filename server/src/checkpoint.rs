//! Signatures over places in the audit trail: what the signer makes, and a reader verifies.

use ring::signature::{ED25519, UnparsedPublicKey};
use serde::{Deserialize, Serialize};

/// Domain of the signatures.
const SIGNED: &str = "gpusession audit checkpoint 2";

/// A place in the trail.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// Number of the line with the signature.
    pub seq: u64,
    /// BLAKE3 of the line before it.
    pub prev: [u8; 32],
}

/// A signature over a place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Checkpoint {
    /// The place that was signed before; all zeros: this is the first.
    pub before: Place,
    /// Ed25519 signature over both places.
    pub signature: Vec<u8>,
}

/// How to verify a trail.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verifier {
    /// Public key of the signatures.
    pub key: Vec<u8>,
    /// The place that was signed last; all zeros: none.
    pub latest: Place,
}

impl Verifier {
    /// Returns `true` if a checkpoint is the signer's.
    pub fn verifies(&self, place: &Place, checkpoint: &Checkpoint) -> bool {
        let text = text(place, &checkpoint.before);
        UnparsedPublicKey::new(&ED25519, &self.key).verify(&text, &checkpoint.signature).is_ok()
    }
}

/// Returns the signed text of a place, and of the one before.
pub fn text(place: &Place, before: &Place) -> Vec<u8> {
    let hex = |place: &Place| data_encoding::HEXLOWER.encode(&place.prev);
    format!("{SIGNED}\n{} {}\n{} {}", place.seq, hex(place), before.seq, hex(before)).into_bytes()
}
