//! Administrators who reach the server over the network: which certificates are good for that.
//!
//! As with clients, a certificate that another server of the pool has issued is good here too, until its name is revoked here.

use std::collections::BTreeMap;

use data_encoding::HEXLOWER;
use serde::{Deserialize, Serialize};

use super::authority::{Authority, AuthorityError, Holder, Role};
use crate::clock::Random;

/// An administrator as stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdministratorRecord {
    /// SHA-256 of the certificate, in hex; empty where none was seen here.
    pub certificate: String,
    /// When it was issued, or revoked: seconds since 1970. Older certificates of this name are worth nothing.
    pub since_unix: u64,
    /// Refused.
    pub revoked: bool,
}

/// All administrators that this server knows.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Administrators(BTreeMap<String, AdministratorRecord>);

/// Why somebody is no administrator.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotAdmitted {
    /// It is a client, or a server.
    #[error(
        "this needs an administrator's certificate; `gpuserver admin create NAME` on a server of the pool makes one"
    )]
    Other,
    /// It was.
    #[error(
        "the certificate of administrator {0:?} was revoked or replaced; `gpuserver admin create` on a server of the pool makes \
         a new one"
    )]
    Revoked(String),
}

/// A certificate could not be made.
#[derive(Debug, thiserror::Error)]
pub enum NotIssued {
    /// The name has one.
    #[error(
        "there is an administrator {0} already; `gpuserver admin revoke {0}` makes room for a new certificate"
    )]
    Exists(String),
    /// The request is none, or the authority's trouble.
    #[error(transparent)]
    Authority(#[from] AuthorityError),
}

impl Administrators {
    /// Signs an administrator's request; returns the certificate in PEM.
    pub fn issue(
        &mut self,
        authority: &Authority,
        name: &str,
        csr_pem: &str,
        unix: u64,
        random: &dyn Random,
    ) -> Result<String, NotIssued> {
        if self.0.get(name).is_some_and(|record| !record.revoked) {
            return Err(NotIssued::Exists(name.into()));
        }
        let issued = authority.issue(csr_pem, Role::Administrator, name, random)?;
        self.put(name, &issued.fingerprint, unix);
        Ok(issued.pem)
    }

    fn put(&mut self, name: &str, certificate: &[u8; 32], since_unix: u64) {
        let certificate = HEXLOWER.encode(certificate);
        self.0.insert(name.into(), AdministratorRecord { certificate, since_unix, revoked: false });
    }

    /// The name of the administrator who has a certificate of the pool's authority, and whether it is new here.
    pub fn admit(
        &mut self,
        certificate: &[u8; 32],
        holder: Option<&Holder>,
    ) -> Result<(String, bool), NotAdmitted> {
        let holder = holder.filter(|h| h.role == Role::Administrator).ok_or(NotAdmitted::Other)?;
        let name = holder.name.clone();
        match self.0.get(&name) {
            Some(known) if known.certificate == HEXLOWER.encode(certificate) && !known.revoked => {
                Ok((name, false))
            }
            Some(known) if holder.issued_unix <= known.since_unix => Err(NotAdmitted::Revoked(name)),
            _ => {
                self.put(&name, certificate, holder.issued_unix);
                Ok((name, true))
            }
        }
    }

    /// Refuses what was issued to a name by now, here or elsewhere. Says whether this server knew of it.
    pub fn revoke(&mut self, name: &str, unix: u64) -> bool {
        let known = self.0.contains_key(name);
        let record = self.0.entry(name.into()).or_insert(AdministratorRecord {
            certificate: String::new(),
            since_unix: 0,
            revoked: true,
        });
        record.revoked = true;
        record.since_unix = record.since_unix.max(unix);
        known
    }

    /// All of them, by name.
    pub fn list(&self) -> impl Iterator<Item = (&str, &AdministratorRecord)> {
        self.0.iter().map(|(name, record)| (name.as_str(), record))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holder(role: Role, name: &str, issued_unix: u64) -> Holder {
        Holder { role, name: name.into(), issued_unix, key: [0; 32] }
    }

    #[test]
    fn who_is_admitted() {
        let mut all = Administrators::default();
        all.put("alice", &[1; 32], 10);
        let alice = |issued| holder(Role::Administrator, "alice", issued);
        assert_eq!(all.admit(&[1; 32], Some(&alice(10))), Ok(("alice".into(), false)));
        for other in [None, Some(&holder(Role::Client, "alice", 99))] {
            assert_eq!(all.admit(&[1; 32], other), Err(NotAdmitted::Other));
        }
        let revoked = Err(NotAdmitted::Revoked("alice".into()));
        assert_eq!(all.admit(&[2; 32], Some(&alice(10))), revoked, "one that was replaced");
        assert!(all.revoke("alice", 20));
        assert_eq!(all.admit(&[1; 32], Some(&alice(10))), revoked);
        assert_eq!(all.admit(&[3; 32], Some(&alice(20))), revoked, "another server's, of before");
        assert_eq!(all.admit(&[3; 32], Some(&alice(21))), Ok(("alice".into(), true)));
        assert_eq!(all.admit(&[1; 32], Some(&alice(10))), revoked);
        // One that never came here.
        assert!(!all.revoke("bob", 20));
        let bob = holder(Role::Administrator, "bob", 15);
        assert_eq!(all.admit(&[4; 32], Some(&bob)), Err(NotAdmitted::Revoked("bob".into())));
    }
}
