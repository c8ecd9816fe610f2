//! Signatures over the audit trail, which the server that writes the trail cannot make by itself.
//!
//! Each signature names the checkpoint before it. So a server that was taken over can write a trail
//! of its own from now on, and cannot change what it has had signed.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use ring::signature::{Ed25519KeyPair, KeyPair};

use super::lock::locked;
use crate::checkpoint::{Checkpoint, Place, Verifier, text};
use crate::store;

/// The key, and the place that was signed last.
#[derive(Debug)]
pub struct Checkpoints {
    file: PathBuf,
    key: Ed25519KeyPair,
    latest: Mutex<Place>,
}

impl Checkpoints {
    /// Opens the key, or makes it, and the file with the place that was signed last.
    pub fn open(path: &Path, latest: &Path) -> io::Result<Self> {
        let bytes = match std::fs::read(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                let key = Ed25519KeyPair::generate_pkcs8(&ring::rand::SystemRandom::new());
                let key = key.map_err(|_| io::Error::other("no random numbers for a key"))?;
                store::write_bytes(path, key.as_ref(), 0o600).map_err(io::Error::other)?;
                key.as_ref().to_vec()
            }
            read => read?,
        };
        let key = Ed25519KeyPair::from_pkcs8(&bytes)
            .map_err(|e| io::Error::other(format!("{}: {e}", path.display())))?;
        let file = latest.to_owned();
        let latest = store::read(&file).map_err(io::Error::other)?;
        Ok(Self { file, key, latest: Mutex::new(latest) })
    }

    /// Signs a place. The file has it before the signature leaves.
    pub fn sign(&self, place: Place) -> Result<Checkpoint, store::StoreError> {
        let mut latest = locked(&self.latest);
        store::write(&self.file, &place)?;
        let before = std::mem::replace(&mut *latest, place);
        let signature = self.key.sign(&text(&place, &before)).as_ref().to_vec();
        Ok(Checkpoint { before, signature })
    }

    /// Returns how to verify a trail.
    pub fn verifier(&self) -> Verifier {
        Verifier { key: self.key.public_key().as_ref().to_vec(), latest: *locked(&self.latest) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signature_names_its_place_and_the_one_before_also_after_a_restart() {
        let folder = tempfile::tempdir().unwrap();
        let place = |seq| Place { seq, prev: [seq as u8; 32] };
        let open = || Checkpoints::open(&folder.path().join("key"), &folder.path().join("latest")).unwrap();
        let signer = open();
        let first = signer.sign(place(3)).unwrap();
        assert_eq!(first.before, Place::default());
        drop(signer);
        let signer = open();
        let second = signer.sign(place(7)).unwrap();
        assert_eq!(second.before, place(3));
        let verifier = signer.verifier();
        assert_eq!(verifier.latest, place(7));
        assert!(verifier.verifies(&place(3), &first) && verifier.verifies(&place(7), &second));
        assert!(!verifier.verifies(&place(4), &second));
        let cut = Checkpoint { before: Place::default(), ..second };
        assert!(!verifier.verifies(&place(7), &cut), "another place before");
    }
}
