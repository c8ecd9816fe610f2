//! Statements: revocations that a pool's authority has signed, and that hold on each server.
//!
//! A statement takes a right away, or frees a client's name for a new identity. No statement makes
//! an identity valid again, so that their order does not matter: [`Verdict`] is the subject, and of
//! two statements about one subject the greater [`Statement::rank`] counts.
//!
//! The signature covers [`CONTEXT`] and the postcard encoding of [`Statement`]. No certificate
//! begins so: the same key signs both.

use data_encoding::BASE64URL_NOPAD;
use serde::{Deserialize, Serialize};

use crate::join::is_name;
use crate::message::{self, Malformed};

/// First bytes of each message that an authority signs as a statement.
pub const CONTEXT: &[u8] = b"gpusession statement 1\n";
/// Longest encoding of a signed statement, in bytes.
pub const MAX_SIGNED: usize = 512;
/// Longest signature, in bytes: ECDSA on P-256, in DER.
const MAX_SIGNATURE: usize = 80;

/// Subject of a statement, and what happens to it.
///
/// A variant keeps its place and its fields; new ones follow at the end.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Verdict {
    /// Refuse the client of this name, and this identity for ever.
    RevokeClient {
        /// Name of the client.
        name: String,
        /// SHA-256 of the public key with which it joined, if the signing server knows it.
        identity: Option<[u8; 32]>,
    },
    /// Free the name for a new identity; the present one is refused for ever.
    ForgetClient {
        /// Name of the client.
        name: String,
        /// As in [`Verdict::RevokeClient`].
        identity: Option<[u8; 32]>,
    },
    /// Refuse the certificates that an administrator of this name has so far.
    RevokeAdministrator {
        /// Name of the administrator.
        name: String,
    },
    /// Refuse the server of this name for ever.
    RevokeServer {
        /// Name of the server.
        name: String,
    },
}

impl Verdict {
    /// Returns the name of the subject.
    pub fn name(&self) -> &str {
        match self {
            Self::RevokeClient { name, .. }
            | Self::ForgetClient { name, .. }
            | Self::RevokeAdministrator { name }
            | Self::RevokeServer { name } => name,
        }
    }

    /// Returns the identity that is refused for ever.
    pub fn identity(&self) -> Option<&[u8; 32]> {
        match self {
            Self::RevokeClient { identity, .. } | Self::ForgetClient { identity, .. } => identity.as_ref(),
            Self::RevokeAdministrator { .. } | Self::RevokeServer { .. } => None,
        }
    }

    /// Returns the word for it in the JSON of verbs.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::RevokeClient { .. } => "revoke-client",
            Self::ForgetClient { .. } => "forget-client",
            Self::RevokeAdministrator { .. } => "revoke-administrator",
            Self::RevokeServer { .. } => "revoke-server",
        }
    }
}

/// A statement of a server's signer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Statement {
    /// Name of the server whose signer made it.
    pub server: String,
    /// Number among the statements of that server, from 1.
    pub number: u64,
    /// Time of that server's clock, in seconds since 1970: certificates of the name that were
    /// issued later stay.
    pub unix: u64,
    /// Place among the statements about a client's name, from 1; 0 for other verdicts.
    ///
    /// It is one more than any that the server knew. A name is revoked unless a later turn has
    /// freed it, whatever the clocks say.
    pub turn: u32,
    /// Subject.
    pub verdict: Verdict,
}

impl Statement {
    /// Reads the bytes that an authority has signed, if [`Statement::body`] writes the same.
    pub fn read(body: &[u8]) -> Result<Self, Malformed> {
        let read: Self = message::decode(body)?;
        let names = is_name(&read.server) && is_name(read.verdict.name());
        // One statement has one encoding, so that bytes identify it.
        if names && read.body() == body { Ok(read) } else { Err(Malformed::Body) }
    }

    /// Returns the bytes of the statement.
    pub fn body(&self) -> Vec<u8> {
        message::encode(self).split_off(4)
    }

    /// Returns the order of statements with the same verdict: the greatest one counts.
    pub fn rank(&self) -> (u32, u64, Vec<u8>) {
        (self.turn, self.unix, self.body())
    }
}

/// Returns the message that an authority signs for a statement.
pub fn signed_message(body: &[u8]) -> Vec<u8> {
    [CONTEXT, body].concat()
}

/// A statement with the signature of an authority.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Signed {
    /// Encoding of the [`Statement`].
    pub body: Vec<u8>,
    /// SHA-256 of the certificate of the authority that signed.
    pub authority: [u8; 32],
    /// ECDSA on P-256 with SHA-256, in DER.
    pub signature: Vec<u8>,
}

impl Signed {
    /// Reads a signed statement; the signature is not verified.
    pub fn read(bytes: &[u8]) -> Result<(Self, Statement), Malformed> {
        if bytes.len() > MAX_SIGNED {
            return Err(Malformed::TooLong(bytes.len()));
        }
        let signed: Self = message::decode(bytes)?;
        let statement = Statement::read(&signed.body)?;
        if signed.signature.len() > MAX_SIGNATURE || signed.bytes() != bytes {
            return Err(Malformed::Body);
        }
        Ok((signed, statement))
    }

    /// Returns the encoding.
    pub fn bytes(&self) -> Vec<u8> {
        message::encode(self).split_off(4)
    }

    /// Reads the text of [`Signed::text`].
    pub fn from_text(text: &str) -> Result<(Self, Statement), Malformed> {
        if text.len() > MAX_SIGNED * 2 {
            return Err(Malformed::TooLong(text.len()));
        }
        let bytes = BASE64URL_NOPAD.decode(text.as_bytes()).map_err(|_| Malformed::Body)?;
        Self::read(&bytes)
    }

    /// Returns one line of text, for files.
    pub fn text(&self) -> String {
        BASE64URL_NOPAD.encode(&self.bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn statement(verdict: Verdict) -> Statement {
        Statement { server: "gpu1".into(), number: 1, unix: 1_900_000_000, turn: 2, verdict }
    }

    #[test]
    fn statements_read_back_and_have_one_encoding() {
        let name = "vm-1".to_owned();
        let all = [
            Verdict::RevokeClient { name: name.clone(), identity: Some([7; 32]) },
            Verdict::ForgetClient { name: name.clone(), identity: None },
            Verdict::RevokeAdministrator { name: name.clone() },
            Verdict::RevokeServer { name },
        ];
        for (number, verdict) in all.into_iter().enumerate() {
            let made = statement(verdict);
            let signed = Signed { body: made.body(), authority: [9; 32], signature: vec![5; 72] };
            assert!(signed.bytes().len() < MAX_SIGNED / 2);
            assert_eq!(Signed::read(&signed.bytes()), Ok((signed.clone(), made.clone())));
            assert_eq!(Signed::from_text(&signed.text()), Ok((signed.clone(), made)));
            // The variant's number is a wire number.
            assert_eq!(signed.body[5 + 1 + 5 + 1], number as u8);
            for cut in 0..signed.body.len() {
                assert!(Statement::read(&signed.body[..cut]).is_err(), "{cut}");
            }
        }
        // A number with a superfluous byte.
        let mut longer = statement(Verdict::RevokeServer { name: "a".into() }).body();
        longer[5] = 0x81;
        longer.insert(6, 0);
        assert_eq!(Statement::read(&longer), Err(Malformed::Body));
        for (server, name) in [("gpu1", "a/b"), ("", "a"), ("gpu1", "")] {
            let mut bad = statement(Verdict::RevokeServer { name: name.into() });
            bad.server = server.into();
            assert_eq!(Statement::read(&bad.body()), Err(Malformed::Body));
        }
        let long = Signed { body: vec![0; MAX_SIGNED], authority: [0; 32], signature: Vec::new() };
        assert!(matches!(Signed::read(&long.bytes()), Err(Malformed::TooLong(_))));
    }
}
