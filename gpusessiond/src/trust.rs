//! Authorities that this client trusts, and lists of them from servers of the pool.
//!
//! A pool has one authority, and two during a rotation. A server names the one that issues
//! certificates first. An authority that is new to this client counts only with a confirmation: a
//! certificate that names it, and that a trusted authority has signed. A server that holds no
//! authority's key thus plants none.
//!
//! A server that a statement of the pool revokes is refused for ever, by its name.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use gpusession_proto::join;
use gpusession_proto::pinned::sha256;
use gpusession_proto::statement::{Signed, Verdict, signed_message};
use pem::{EncodeConfig, LineEnding, Pem};
use ring::signature::{ECDSA_P256_SHA256_ASN1, UnparsedPublicKey};
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::{DigitallySignedStruct, DistinguishedName, RootCertStore, SignatureScheme};
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::GeneralName;

/// Most authorities of a client: two for a rotation, and two for one that was interrupted.
const MAX_AUTHORITIES: usize = 4;
/// Most certificates in a server's list: authorities and confirmations.
const MAX_CERTIFICATES: usize = 2 * MAX_AUTHORITIES;
/// Most servers that a client refuses, and most statements about them in an answer.
pub const MAX_REVOKED: usize = 256;
/// Longest list of a server, in bytes.
const MAX_LIST: usize = 16 << 10;

/// SHA-256 of a certificate (DER).
pub type Fingerprint = [u8; 32];

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// An authority of the pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Authority {
    der: CertificateDer<'static>,
    /// SHA-256 of the certificate.
    pub fingerprint: Fingerprint,
    /// SHA-256 of the name that its certificates have as issuer.
    pub name: Fingerprint,
    /// Begin of the certificate, in seconds since 1970: a later authority replaces an earlier one.
    pub begins_unix: u64,
    ends_unix: u64,
}

impl Authority {
    fn new(der: CertificateDer<'static>) -> Result<Self, String> {
        let (_, parsed) = x509_parser::parse_x509_certificate(&der).map_err(|e| e.to_string())?;
        let unix = |time: x509_parser::time::ASN1Time| u64::try_from(time.timestamp()).unwrap_or(0);
        Ok(Self {
            fingerprint: sha256(&der),
            name: sha256(parsed.subject().as_raw()),
            begins_unix: unix(parsed.validity().not_before),
            ends_unix: unix(parsed.validity().not_after),
            der,
        })
    }

    fn has_stated(&self, signed: &Signed) -> bool {
        let Ok((_, parsed)) = x509_parser::parse_x509_certificate(&self.der) else { return false };
        let point = &*parsed.public_key().subject_public_key.data;
        let key = UnparsedPublicKey::new(&ECDSA_P256_SHA256_ASN1, point);
        key.verify(&signed_message(&signed.body), &signed.signature).is_ok()
    }
}

/// Names of servers that a client refuses.
pub type Revoked = BTreeSet<String>;

/// The authorities that a client trusts.
#[derive(Debug, Clone)]
pub struct Authorities {
    all: Vec<Authority>,
    roots: Arc<RootCertStore>,
}

impl Authorities {
    /// Trusts these certificates.
    pub fn new(certificates: Vec<CertificateDer<'static>>) -> Result<Self, String> {
        Self::of(certificates.into_iter().map(Authority::new).collect::<Result<_, _>>()?)
    }

    /// Trusts these authorities.
    pub fn of(all: Vec<Authority>) -> Result<Self, String> {
        if all.len() > MAX_AUTHORITIES {
            return Err(format!("more than {MAX_AUTHORITIES} authorities"));
        }
        let mut roots = RootCertStore::empty();
        for authority in &all {
            roots.add(authority.der.clone()).map_err(|e| e.to_string())?;
        }
        Ok(Self { all, roots: Arc::new(roots) })
    }

    /// Returns the fingerprint of each, for servers.
    pub fn fingerprints(&self) -> impl Iterator<Item = Fingerprint> {
        self.all.iter().map(|authority| authority.fingerprint)
    }

    fn has(&self, fingerprint: &Fingerprint) -> bool {
        self.fingerprints().any(|known| known == *fingerprint)
    }

    /// Returns the authority with this name.
    pub fn named(&self, name: &Fingerprint) -> Option<&Authority> {
        self.all.iter().find(|authority| authority.name == *name)
    }

    /// Returns the text of the file from which a client reads them.
    pub fn to_pem(&self) -> String {
        let blocks: Vec<_> =
            self.all.iter().map(|authority| Pem::new("CERTIFICATE", authority.der.to_vec())).collect();
        pem::encode_many_config(&blocks, EncodeConfig::new().set_line_ending(LineEnding::LF))
    }

    /// Checks a certificate for a client's use that one of the authorities has signed.
    pub fn verify(&self, certificate: &CertificateDer<'_>, unix: u64) -> Result<(), String> {
        let verifier = WebPkiClientVerifier::builder_with_provider(self.roots.clone(), provider());
        let verifier = verifier.build().map_err(|e| e.to_string())?;
        let now = UnixTime::since_unix_epoch(Duration::from_secs(unix));
        verifier.verify_client_cert(certificate, &[], now).map_err(|e| e.to_string())?;
        Ok(())
    }

    /// Returns the servers that these statements of the pool revoke.
    pub fn revoked(&self, statements: &[Vec<u8>]) -> Revoked {
        let name = |bytes: &Vec<u8>| {
            let (signed, statement) = Signed::read(bytes).ok()?;
            let Verdict::RevokeServer { name } = statement.verdict else { return None };
            let authority = self.all.iter().find(|authority| authority.fingerprint == signed.authority)?;
            authority.has_stated(&signed).then_some(name)
        };
        statements.iter().take(MAX_REVOKED).filter_map(name).collect()
    }

    /// Returns the check of a server's certificate, which `revoked` names not.
    pub fn verifier(&self, revoked: Arc<Revoked>) -> Result<Arc<dyn ServerCertVerifier>, String> {
        let check = WebPkiServerVerifier::builder_with_provider(self.roots.clone(), provider());
        let check = check.build().map_err(|e| e.to_string())?;
        Ok(Arc::new(OfThisPool { check, names: self.roots.subjects(), revoked }))
    }

    /// Reads the list of a server; its first authority issues certificates.
    pub fn offered(&self, list: &str, unix: u64) -> Result<Vec<Authority>, String> {
        if list.len() > MAX_LIST {
            return Err(format!("a list of more than {MAX_LIST} bytes"));
        }
        let (mut authorities, mut confirmed) = (Vec::new(), Vec::new());
        for (number, der) in CertificateDer::pem_slice_iter(list.as_bytes()).enumerate() {
            if number == MAX_CERTIFICATES {
                return Err(format!("more than {MAX_CERTIFICATES} certificates"));
            }
            let der = der.map_err(|e| e.to_string())?.into_owned();
            let (_, parsed) = x509_parser::parse_x509_certificate(&der).map_err(|e| e.to_string())?;
            match confirms(&parsed) {
                // Of the two confirmations, one is by the authority that is new to this client.
                Some(other) if self.verify(&der, unix).is_ok() => confirmed.push(other),
                Some(_) => {}
                None if !parsed.is_ca() => return Err("a certificate is not an authority's".into()),
                None => authorities.push(Authority::new(der)?),
            }
        }
        for authority in &authorities {
            if authority.ends_unix <= unix {
                return Err("an authority has expired, or the clocks of client and server differ".into());
            }
            if !self.has(&authority.fingerprint) && !confirmed.contains(&authority.fingerprint) {
                return Err("no authority that this client trusts confirms the new one".into());
            }
        }
        if authorities.is_empty() {
            return Err("a list without an authority".into());
        }
        // Only a list that could be stored is taken.
        Self::of(authorities).map(|taken| taken.all)
    }

    /// Returns the authorities to trust after each server's answer, if they differ from these.
    ///
    /// A client drops an authority only if every server has answered and none names it. It never
    /// drops the one that has signed its own certificate (`own`).
    pub fn replaced_by(&self, answers: &[Option<Vec<Authority>>], own: &Fingerprint) -> Option<Self> {
        let complete = !answers.is_empty() && answers.iter().all(Option::is_some);
        let mut all: Vec<Authority> = Vec::new();
        let held = self.all.iter().filter(|held| !complete || held.name == *own);
        for authority in answers.iter().flatten().flatten().chain(held) {
            if all.iter().all(|known| known.fingerprint != authority.fingerprint) {
                all.push(authority.clone());
            }
        }
        let same = all.len() == self.all.len() && all.iter().all(|a| self.has(&a.fingerprint));
        if same { None } else { Self::of(all).ok() }
    }

    /// Returns the servers, by index, at which a newer authority than that of this client's
    /// certificate issues certificates; empty unless every server trusts the newer one.
    pub fn renew_at(&self, answers: &[Option<Vec<Authority>>], own: &Fingerprint) -> Vec<usize> {
        let Some(own) = self.named(own) else { return Vec::new() };
        let newer = |index: &usize| {
            let first = answers.get(*index).and_then(|answer| answer.as_ref()?.first());
            first.is_some_and(|first| {
                let names = |answer: &Option<Vec<Authority>>| {
                    answer.iter().flatten().any(|authority| authority.fingerprint == first.fingerprint)
                };
                first.begins_unix > own.begins_unix
                    && self.has(&first.fingerprint)
                    && answers.iter().all(names)
            })
        };
        (0..answers.len()).filter(newer).collect()
    }
}

/// Returns the authority that a certificate confirms.
fn confirms(certificate: &X509Certificate<'_>) -> Option<Fingerprint> {
    let names = certificate.subject_alternative_name().ok()??;
    names.value.general_names.iter().find_map(|name| match name {
        GeneralName::DNSName(name) if !certificate.is_ca() => join::authority_of(name),
        _ => None,
    })
}

/// Accepts servers of the pool, and tells each server which authorities count.
///
/// A server thus never shows a certificate of an authority that this client does not know yet.
#[derive(Debug)]
struct OfThisPool {
    check: Arc<WebPkiServerVerifier>,
    names: Vec<DistinguishedName>,
    revoked: Arc<Revoked>,
}

/// Returns the DNS names of a certificate (DER), which say whom in the pool it is of.
pub fn dns_names(der: &[u8]) -> Vec<String> {
    let Ok((_, parsed)) = x509_parser::parse_x509_certificate(der) else { return Vec::new() };
    let Ok(Some(names)) = parsed.subject_alternative_name() else { return Vec::new() };
    let dns = names.value.general_names.iter().filter_map(|name| match name {
        GeneralName::DNSName(name) => Some((*name).to_owned()),
        _ => None,
    });
    dns.collect()
}

/// Returns the revoked server that these DNS names of a certificate name.
pub fn revoked_of<'a>(names: &'a [String], revoked: &Revoked) -> Option<&'a str> {
    names.iter().filter_map(|name| join::server_of(name)).find(|name| revoked.contains(*name))
}

/// Part of [`refusal`], by which the text of a TLS error is known.
pub const REFUSAL: &str = "is revoked: the pool's authority has signed that";

/// Describes the refusal of a server.
pub fn refusal(server: &str) -> String {
    format!("server {server} {REFUSAL}; remove it from servers.toml")
}

impl ServerCertVerifier for OfThisPool {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let verified = self.check.verify_server_cert(end_entity, intermediates, server_name, ocsp, now)?;
        match revoked_of(&dns_names(end_entity), &self.revoked) {
            Some(server) => Err(rustls::Error::General(refusal(server))),
            None => Ok(verified),
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.check.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.check.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.check.supported_verify_schemes()
    }

    fn root_hint_subjects(&self) -> Option<&[DistinguishedName]> {
        Some(&self.names)
    }
}

#[cfg(test)]
mod tests;
