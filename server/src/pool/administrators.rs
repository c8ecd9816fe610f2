//! Administrators who reach the server over the network, and the certificates that are valid for
//! them.
//!
//! As with clients, this server accepts a certificate that another server of the pool issued, until
//! it revokes the name.

use std::collections::BTreeMap;

use data_encoding::HEXLOWER;
use serde::{Deserialize, Serialize};

use crate::certificate::{Holder, Role};
use crate::signer::Refused;
use crate::signer::ca::Issued;

/// An administrator as stored on disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdministratorRecord {
    /// SHA-256 of the certificate, in hex; empty if this server has seen none.
    pub certificate: String,
    /// Time of issue or revocation, in seconds since 1970. Older certificates of this name are
    /// invalid.
    pub since_unix: u64,
    /// Whether the certificate is revoked.
    pub revoked: bool,
    /// SHA-256 of the authority that issued the certificate, in hex; empty in records of earlier
    /// versions.
    #[serde(default)]
    pub authority: String,
    /// Ids of join tokens that the administrator made over the network, the latest last.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tokens: Vec<String>,
}

/// Most tokens that a record names; earlier ones have most likely expired.
const MAX_TOKENS: usize = 1024;

/// All administrators that this server knows, by name.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Administrators(BTreeMap<String, AdministratorRecord>);

/// Reason why a certificate is not accepted as an administrator's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotAdmitted {
    /// The holder is a client or a server.
    #[error(
        "this needs an administrator's certificate; `gpuserver admin create NAME` on a server of the pool makes one"
    )]
    Other,
    /// The certificate was an administrator's, and is revoked or replaced.
    #[error(
        "the certificate of administrator {0:?} was revoked or replaced; `gpuserver admin create` on a server of the pool makes \
         a new one"
    )]
    Revoked(String),
}

/// Reason why no certificate was issued.
#[derive(Debug, thiserror::Error)]
pub enum NotIssued {
    /// The name has a valid certificate.
    #[error(
        "there is an administrator {0} already; `gpuserver admin revoke {0}` makes room for a new certificate"
    )]
    Exists(String),
    /// The signer refused the request.
    #[error(transparent)]
    Signer(#[from] Refused),
}

impl Administrators {
    /// Returns an error if the name has a valid certificate.
    pub fn may_issue(&self, name: &str) -> Result<(), NotIssued> {
        match self.0.get(name).is_some_and(|record| !record.revoked) {
            true => Err(NotIssued::Exists(name.into())),
            false => Ok(()),
        }
    }

    /// Notes a certificate that this authority has just issued.
    pub fn issued(&mut self, name: &str, issued: &Issued, unix: u64, authority: &[u8; 32]) {
        self.put(name, &issued.fingerprint, unix, &HEXLOWER.encode(authority));
    }

    fn put(&mut self, name: &str, certificate: &[u8; 32], since_unix: u64, authority: &str) {
        let (certificate, authority) = (HEXLOWER.encode(certificate), authority.into());
        let tokens = self.0.remove(name).map(|record| record.tokens).unwrap_or_default();
        let record = AdministratorRecord { certificate, since_unix, revoked: false, authority, tokens };
        self.0.insert(name.into(), record);
    }

    /// Completes records of earlier versions by the authority of that time.
    pub fn complete(&mut self, authority: &str) {
        for record in self.0.values_mut().filter(|record| record.authority.is_empty()) {
            authority.clone_into(&mut record.authority);
        }
    }

    /// Lists the administrators with a valid certificate of another authority than this one.
    pub fn of_others(&self, authority: &str) -> Vec<String> {
        let other = |(_, r): &(&String, &AdministratorRecord)| !r.revoked && r.authority != authority;
        self.0.iter().filter(other).map(|(name, _)| name.clone()).collect()
    }

    /// Returns the administrator of a certificate, and whether the certificate is new here.
    ///
    /// `authority` has signed it, one of the pool's.
    pub fn admit(
        &mut self,
        certificate: &[u8; 32],
        holder: Option<&Holder>,
        authority: &str,
    ) -> Result<(String, bool), NotAdmitted> {
        let holder = holder.filter(|h| h.role == Role::Administrator).ok_or(NotAdmitted::Other)?;
        let new = self.is_new(certificate, holder)?;
        if new {
            self.put(&holder.name, certificate, holder.issued_unix, authority);
        }
        Ok((holder.name.clone(), new))
    }

    /// Returns whether an administrator's certificate is new here, if it was not revoked.
    pub fn is_new(&self, certificate: &[u8; 32], holder: &Holder) -> Result<bool, NotAdmitted> {
        match self.0.get(&holder.name) {
            Some(known) if known.certificate == HEXLOWER.encode(certificate) && !known.revoked => Ok(false),
            Some(known) if holder.issued_unix <= known.since_unix => {
                Err(NotAdmitted::Revoked(holder.name.clone()))
            }
            _ => Ok(true),
        }
    }

    /// Revokes all certificates issued to a name so far, by any server. Returns `true` if this
    /// server knew the name.
    pub fn revoke(&mut self, name: &str, unix: u64) -> bool {
        let known = self.0.contains_key(name);
        let record = self.0.entry(name.into()).or_insert(AdministratorRecord {
            certificate: String::new(),
            since_unix: 0,
            revoked: true,
            authority: String::new(),
            tokens: Vec::new(),
        });
        record.revoked = true;
        record.since_unix = record.since_unix.max(unix);
        known
    }

    /// Applies a statement that revokes the certificates of a name up to a time.
    ///
    /// Returns `true` if that changes anything.
    pub fn settle(&mut self, name: &str, unix: u64) -> bool {
        let known = self.0.get(name);
        let settled = known.is_some_and(|r| r.since_unix > unix || r.revoked && r.since_unix == unix);
        if !settled {
            self.revoke(name, unix);
        }
        !settled
    }

    /// Notes a join token that an administrator made.
    pub fn made_token(&mut self, name: &str, id: &str) {
        let Some(record) = self.0.get_mut(name) else { return };
        if record.tokens.len() >= MAX_TOKENS {
            record.tokens.remove(0);
        }
        record.tokens.push(id.into());
    }

    /// Lists tokens of revoked administrators, with the name of each.
    pub fn tokens_of_revoked(&self) -> Vec<(String, String)> {
        let revoked = self.0.iter().filter(|(_, record)| record.revoked);
        revoked.flat_map(|(name, r)| r.tokens.iter().map(|id| (name.clone(), id.clone()))).collect()
    }

    /// Forgets a token that is revoked.
    pub fn revoked_token(&mut self, name: &str, id: &str) {
        if let Some(record) = self.0.get_mut(name) {
            record.tokens.retain(|known| known != id);
        }
    }

    /// Returns the seconds until a new certificate of this name counts.
    ///
    /// Certificates of the second of a revocation are revoked.
    pub fn revoked_ahead(&self, name: &str, unix: u64) -> u64 {
        let revoked = self.0.get(name).filter(|record| record.revoked);
        revoked.map_or(0, |record| (record.since_unix + 1).saturating_sub(unix))
    }

    /// Lists all administrators by name.
    pub fn list(&self) -> impl Iterator<Item = (&str, &AdministratorRecord)> {
        self.0.iter().map(|(name, record)| (name.as_str(), record))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holder(role: Role, name: &str, issued_unix: u64) -> Holder {
        Holder { role, name: name.into(), issued_unix, expires_unix: u64::MAX, identity: [0; 32] }
    }

    #[test]
    fn administrator_certificates_are_admitted_until_revoked() {
        let mut all = Administrators::default();
        all.put("alice", &[1; 32], 10, "a1");
        let alice = |issued| holder(Role::Administrator, "alice", issued);
        assert_eq!(all.admit(&[1; 32], Some(&alice(10)), "a1"), Ok(("alice".into(), false)));
        for other in [None, Some(&holder(Role::Client, "alice", 99))] {
            assert_eq!(all.admit(&[1; 32], other, "a1"), Err(NotAdmitted::Other));
        }
        let revoked = Err(NotAdmitted::Revoked("alice".into()));
        assert_eq!(all.admit(&[2; 32], Some(&alice(10)), "a1"), revoked, "one that was replaced");
        assert!(all.revoke("alice", 20));
        assert_eq!(all.admit(&[1; 32], Some(&alice(10)), "a1"), revoked);
        assert_eq!(all.admit(&[3; 32], Some(&alice(20)), "a1"), revoked, "another server's, of before");
        assert_eq!(all.admit(&[3; 32], Some(&alice(21)), "a1"), Ok(("alice".into(), true)));
        assert_eq!(all.admit(&[1; 32], Some(&alice(10)), "a1"), revoked);
        assert_eq!((all.of_others("a2"), all.of_others("a1")), (vec!["alice".to_owned()], Vec::new()));
        let old = serde_json::to_string(&all).unwrap().replace("\"authority\":\"a1\"", "\"authority\":\"\"");
        let mut old: Administrators = serde_json::from_str(&old).unwrap();
        old.complete("a2");
        assert_eq!(old.of_others("a2"), <[String; 0]>::default(), "records of an earlier version");
        // A statement of the pool revokes what was issued until then.
        let mut all = Administrators::default();
        all.put("alice", &[1; 32], 10, "a1");
        all.made_token("alice", "aa");
        assert_eq!(all.tokens_of_revoked(), []);
        assert!(!all.settle("alice", 9) && all.settle("alice", 10) && !all.settle("alice", 10));
        assert_eq!(all.admit(&[1; 32], Some(&alice(10)), "a1"), revoked);
        assert_eq!(all.tokens_of_revoked(), [("alice".to_owned(), "aa".to_owned())]);
        all.revoked_token("alice", "aa");
        assert_eq!(all.tokens_of_revoked(), []);
        assert_eq!((all.revoked_ahead("alice", 8), all.revoked_ahead("alice", 11)), (3, 0));
        assert_eq!(all.admit(&[2; 32], Some(&alice(11)), "a1"), Ok(("alice".into(), true)));
        assert!(!all.settle("alice", 10) && all.settle("carol", 10));
        // A name of which this server has seen no certificate.
        assert!(!all.revoke("bob", 20));
        let bob = holder(Role::Administrator, "bob", 15);
        assert_eq!(all.admit(&[4; 32], Some(&bob), "a1"), Err(NotAdmitted::Revoked("bob".into())));
    }
}
