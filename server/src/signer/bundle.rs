//! The authorities of a pool with signatures of theirs, for servers that hold no authority's key.
//!
//! The signer of an issuer makes a bundle, and names itself in it. So a server that was taken over
//! gives the others no authority of its own, and passes for no issuer.

use gpusession_proto::join::is_name;
use gpusession_proto::message;
use serde::{Deserialize, Serialize};

use super::authorities::{Described, Present};
use super::ca::{Authority, AuthorityError, AuthorityKey};

/// Longest bundle, in bytes.
pub const MAX_BUNDLE: usize = 32 << 10;

/// The authorities of a pool, as an issuer's signer describes them.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Bundle {
    /// Name of the issuer.
    pub server: String,
    /// Time of the issuer's clock, in seconds since 1970: a later bundle replaces an earlier one.
    pub unix: u64,
    /// Certificates and rotation of the authorities.
    pub described: Described,
}

/// A bundle with a signature of each authority in it.
#[derive(Serialize, Deserialize)]
struct Sealed {
    body: Vec<u8>,
    /// By the authority's fingerprint.
    signatures: Vec<([u8; 32], Vec<u8>)>,
}

impl Bundle {
    /// Signs the bundle with each of the authorities, and encodes it.
    pub fn seal(&self, present: &Present<AuthorityKey>) -> Result<Vec<u8>, AuthorityError> {
        let body = message::encode(self).split_off(4);
        let sign =
            |authority: &AuthorityKey| Ok((authority.fingerprint(), authority.sign_description(&body)?));
        let signatures = present.all().map(sign).collect::<Result<_, AuthorityError>>()?;
        Ok(message::encode(&Sealed { body, signatures }).split_off(4))
    }

    /// Reads a bundle that one of the trusted authorities has signed.
    pub fn open<'a>(bytes: &[u8], trusted: impl IntoIterator<Item = &'a Authority>) -> Result<Self, String> {
        if bytes.len() > MAX_BUNDLE {
            return Err(format!("a bundle of more than {MAX_BUNDLE} bytes"));
        }
        let sealed: Sealed = message::decode(bytes).map_err(|e| e.to_string())?;
        let signed = |authority: &Authority| {
            let of = |(by, _): &&([u8; 32], Vec<u8>)| *by == authority.fingerprint();
            let signature = sealed.signatures.iter().find(of);
            signature.is_some_and(|(_, signature)| authority.has_described(&sealed.body, signature))
        };
        if !trusted.into_iter().any(signed) {
            return Err("no authority that this server trusts has signed it".into());
        }
        let bundle: Self = message::decode(&sealed.body).map_err(|e| e.to_string())?;
        if is_name(&bundle.server) { Ok(bundle) } else { Err("it names no issuer".into()) }
    }

    /// Reads a bundle that the authority with this fingerprint has signed, which is in the bundle.
    pub fn open_pinned(bytes: &[u8], authority: &[u8; 32]) -> Result<Self, String> {
        if bytes.len() > MAX_BUNDLE {
            return Err(format!("a bundle of more than {MAX_BUNDLE} bytes"));
        }
        let sealed: Sealed = message::decode(bytes).map_err(|e| e.to_string())?;
        let offered: Self = message::decode(&sealed.body).map_err(|e| e.to_string())?;
        let offered: Present = offered.described.try_into().map_err(|e: AuthorityError| e.to_string())?;
        let pinned = offered.find(authority).ok_or("it lacks the authority that the token pins")?;
        Self::open(bytes, [pinned])
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::authorities::Authorities;
    use super::*;
    use crate::clock::SystemRandom;

    #[test]
    fn a_bundle_counts_if_a_trusted_authority_has_signed_it() {
        let (own, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let open = |folder: &tempfile::TempDir| {
            AuthorityKey::init(folder.path(), "lab", 1_900_000_000, &SystemRandom).unwrap();
            Authorities::open(folder.path(), 1_900_000_000, Arc::new(SystemRandom)).unwrap()
        };
        let (pool, foreign) = (open(&own), open(&other));
        let before: Present = pool.present().describe().try_into().unwrap();
        pool.begin("lab", None, 1_900_000_000).unwrap();
        let present = pool.present();
        let bundle = Bundle { server: "gpu1".into(), unix: 7, described: present.describe() };
        let sealed = bundle.seal(&present).unwrap();
        // The old authority vouches for the new one.
        let opened = Bundle::open(&sealed, before.all()).unwrap();
        assert_eq!((opened.server.as_str(), opened.unix), ("gpu1", 7));
        let after: Present = opened.described.try_into().unwrap();
        assert_eq!(after.certificates(), present.certificates());

        let pin = before.signer().fingerprint();
        assert_eq!(Bundle::open_pinned(&sealed, &pin).unwrap().server, "gpu1");
        assert!(Bundle::open_pinned(&sealed, &[7; 32]).is_err());

        let stranger: Present = foreign.present().describe().try_into().unwrap();
        assert!(Bundle::open(&sealed, stranger.all()).is_err());
        // An authority of the sender's own, among those that are known.
        let planted = Bundle { described: foreign.present().describe(), ..bundle.clone() };
        assert!(Bundle::open(&planted.seal(&foreign.present()).unwrap(), before.all()).is_err());
        for at in 0..sealed.len() {
            let mut altered = sealed.clone();
            altered[at] ^= 1;
            if let Ok(read) = Bundle::open(&altered, before.all()) {
                assert_eq!((read.server.as_str(), read.unix), ("gpu1", 7), "byte {at}");
            }
        }
        let unnamed = Bundle { server: "GPU 1".into(), ..bundle };
        assert!(Bundle::open(&unnamed.seal(&present).unwrap(), before.all()).is_err());
        assert!(Bundle::open(&vec![0; MAX_BUNDLE + 1], before.all()).is_err());
    }
}
