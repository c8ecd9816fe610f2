//! A certificate authority of the pool: one, and two during a rotation.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use gpusession_proto::statement::{Signed, Verdict, signed_message};
use gpusession_proto::{join, message};
use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DistinguishedName, DnType,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose, PublicKeyData, SerialNumber,
    SigningKey as _,
};
use ring::signature::{ECDSA_P256_SHA256_ASN1, UnparsedPublicKey};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;

use crate::certificate::{CLOCK_SKEW_GRACE, Role, expiry, fingerprint, subject};
use crate::clock::{self, Random};
use crate::store::{self, StoreError};

// prose: ok: a unit of time
const DAY: Duration = Duration::from_secs(24 * 3600);
// prose: ok: a unit of time
const YEAR: Duration = Duration::from_secs(365 * DAY.as_secs());
const AUTHORITY_TTL: Duration = Duration::from_secs(10 * YEAR.as_secs());
/// Life of a client's certificate: its daemon renews it before the last third.
pub const CLIENT_TTL: Duration = Duration::from_secs(90 * DAY.as_secs());
/// Life of the certificate of a client that does not renew it: one of an earlier version.
pub const LASTING_TTL: Duration = Duration::from_secs(5 * YEAR.as_secs());
/// Life of a server's certificate, which the server itself renews.
pub const SERVER_TTL: Duration = Duration::from_secs(30 * DAY.as_secs());
/// Life of an administrator's certificate.
pub const ADMINISTRATOR_TTL: Duration = YEAR;

/// Error of the authority.
#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    /// The authority does not exist yet.
    #[error("{} holds no pool authority; make one with `gpuserver pool init`", .0.display())]
    Missing(PathBuf),
    /// The authority exists already.
    #[error("{} holds a pool authority already, which clients trust; `gpuserver pool rotate` replaces it", .0.display())]
    Exists(PathBuf),
    /// A file of the authority is unreadable or malformed.
    #[error("{}: {reason}", path.display())]
    Unusable {
        /// Path of the bad file.
        path: PathBuf,
        /// Description for administrators.
        reason: String,
    },
    /// The file system returned an error.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A certificate could not be created.
    #[error("certificate: {0}")]
    Certificate(#[from] rcgen::Error),
    /// Certificates of the authority could not be verified.
    #[error("TLS: {0}")]
    Tls(#[from] rustls::Error),
    /// The imported text is no exported authority.
    #[error("this is not what `gpuserver pool export` prints: {0}")]
    Import(String),
    /// The certificate request of a client or administrator is malformed.
    #[error("the certificate request cannot be used: {0}")]
    Request(String),
}

/// Returns a certificate request (PEM) without a name: the signer knows the name.
pub fn request(key: &rcgen::KeyPair) -> Result<String, AuthorityError> {
    Ok(rcgen::CertificateParams::default().serialize_request(key)?.pem()?)
}

/// SHA-256 of the public key that a certificate is asked for.
pub fn requested_key(csr_pem: &str) -> Result<[u8; 32], AuthorityError> {
    let request = CertificateSigningRequestParams::from_pem(csr_pem)
        .map_err(|e| AuthorityError::Request(e.to_string()))?;
    Ok(fingerprint(&request.public_key.subject_public_key_info()))
}

/// The certificate of an authority, which signs those of a pool's servers, clients and
/// administrators.
#[derive(Debug)]
pub struct Authority {
    der: CertificateDer<'static>,
    pem: String,
    /// SHA-256 of the name that its certificates have as issuer.
    name: [u8; 32],
}

/// An authority with its key; derefs to its certificate.
pub struct AuthorityKey {
    issuer: Issuer<'static, KeyPair>,
    authority: Authority,
}

impl std::ops::Deref for AuthorityKey {
    type Target = Authority;

    fn deref(&self) -> &Authority {
        &self.authority
    }
}

impl AsRef<Authority> for AuthorityKey {
    fn as_ref(&self) -> &Authority {
        &self.authority
    }
}

impl AsRef<Authority> for Authority {
    fn as_ref(&self) -> &Authority {
        self
    }
}

/// Base names of an authority's two files, a certificate and a key, in the folder `ca`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// The authority of the pool; in a rotation, the old one.
    Present,
    /// The new authority of a rotation.
    Next,
}

impl Place {
    /// Returns the paths of certificate and key.
    pub fn files(self, folder: &Path) -> [PathBuf; 2] {
        let name = match self {
            Self::Present => "authority",
            Self::Next => "next",
        };
        [folder.join(name).with_extension("pem"), folder.join(name).with_extension("key")]
    }
}

/// A certificate that was just issued.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Issued {
    /// Certificate in PEM, for its holder.
    pub pem: String,
    /// SHA-256 of the certificate, by which the server recognises it.
    pub fingerprint: [u8; 32],
    /// End of the certificate, in seconds since 1970.
    pub expires_unix: u64,
}

/// The certificate that a client or an administrator gets.
#[derive(Debug, Clone, Copy)]
pub struct Order<'a> {
    /// Role of the holder.
    pub role: Role,
    /// Name of the holder in the pool.
    pub name: &'a str,
    /// Time from the issue to the end.
    pub life: Duration,
    /// Identity that a renewed certificate carries; `None`: the requested key is the identity.
    pub identity: Option<&'a [u8; 32]>,
    /// Whether the holder has signed the request with its present key, and will sign the next one.
    pub signs_renewals: bool,
}

fn validity(params: &mut CertificateParams, unix: u64, life: Duration) {
    let now = i64::try_from(unix).ok().and_then(|unix| OffsetDateTime::from_unix_timestamp(unix).ok());
    let now = now.unwrap_or(OffsetDateTime::UNIX_EPOCH);
    params.not_before = now - CLOCK_SKEW_GRACE;
    params.not_after = now + life;
}

fn named(params: &mut CertificateParams, name: &str, random: &dyn Random) {
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::OrganizationName, "gpusession");
    params.distinguished_name.push(DnType::CommonName, name);
    let mut serial: [u8; 16] = clock::bytes(random);
    serial[0] &= 0x7f;
    params.serial_number = Some(SerialNumber::from_slice(&serial));
}

impl Authority {
    /// Reads the certificate of an authority.
    pub fn from_pem(pem: &str) -> Result<Self, AuthorityError> {
        let unfit = |e: String| AuthorityError::Import(e);
        let der = CertificateDer::from_pem_slice(pem.as_bytes()).map_err(|e| unfit(e.to_string()))?;
        let name = subject(&der).ok_or_else(|| unfit("its certificate has no name".into()))?;
        Ok(Self { der, pem: pem.to_owned(), name })
    }

    /// Returns the SHA-256 of the name that its certificates have as issuer.
    pub fn name(&self) -> [u8; 32] {
        self.name
    }

    /// Returns the authority's certificate in PEM.
    pub fn pem(&self) -> &str {
        &self.pem
    }

    /// Returns the SHA-256 of the authority's certificate, which join tokens carry.
    pub fn fingerprint(&self) -> [u8; 32] {
        fingerprint(&self.der)
    }

    /// Returns the end of the authority's certificate, in seconds since 1970.
    pub fn expires_unix(&self) -> u64 {
        expiry(&self.der).unwrap_or(u64::MAX)
    }

    /// Returns `true` if a client that sends this name (DER) trusts the authority.
    ///
    /// A client that joins sends [`join::pinned`] instead of the authority's own name.
    pub fn is_named(&self, name: &[u8]) -> bool {
        self.name == fingerprint(name) || name == join::pinned(&self.fingerprint())
    }

    /// Returns the begin of the authority's certificate, in seconds since 1970.
    pub fn begins_unix(&self) -> u64 {
        let parsed = x509_parser::parse_x509_certificate(&self.der).ok();
        parsed.and_then(|(_, c)| u64::try_from(c.validity().not_before.timestamp()).ok()).unwrap_or(0)
    }

    /// Returns the authority's certificate.
    pub fn der(&self) -> &CertificateDer<'static> {
        &self.der
    }

    /// Returns `true` if the authority has signed these bytes as a statement.
    pub fn has_stated(&self, body: &[u8], signature: &[u8]) -> bool {
        has_signed(&self.der, &signed_message(body), signature)
    }

    /// Returns `true` if the authority has signed a description of the pool's authorities.
    pub fn has_described(&self, body: &[u8], signature: &[u8]) -> bool {
        has_signed(&self.der, &described_message(body), signature)
    }
}

/// Returns `true` if the key of a certificate (DER) has signed the message.
pub fn has_signed(der: &[u8], message: &[u8], signature: &[u8]) -> bool {
    let Ok((_, parsed)) = x509_parser::parse_x509_certificate(der) else { return false };
    let point = &*parsed.public_key().subject_public_key.data;
    UnparsedPublicKey::new(&ECDSA_P256_SHA256_ASN1, point).verify(message, signature).is_ok()
}

/// Returns the message that an authority signs for a description of the pool's authorities.
fn described_message(body: &[u8]) -> Vec<u8> {
    [b"gpusession authorities of a pool 1\n", body].concat()
}

/// Returns the message that a server signs with its present key to get its next certificate.
fn renewal_message(csr_pem: &str, authority: &[u8; 32]) -> Vec<u8> {
    [b"gpusession renewal of a server 1\n", &authority[..], csr_pem.as_bytes()].concat()
}

/// Signs a server's request for its next certificate with its present key.
pub fn prove_renewal(key_pem: &str, csr_pem: &str, authority: &[u8; 32]) -> Result<Vec<u8>, AuthorityError> {
    Ok(KeyPair::from_pem(key_pem)?.sign(&renewal_message(csr_pem, authority))?)
}

/// Returns `true` if the key of the present certificate (DER) has signed the request for the next.
pub fn proves_renewal(present: &[u8], csr_pem: &str, authority: &[u8; 32], proof: &[u8]) -> bool {
    has_signed(present, &renewal_message(csr_pem, authority), proof)
}

/// Returns the message that a server signs to have a statement made in its name.
fn order_message(verdict: &Verdict, turn: u32) -> Vec<u8> {
    [b"gpusession order of a statement 1\n".to_vec(), message::encode(&(verdict, turn))].concat()
}

/// Signs the order of a statement with the present key of the server in whose name it is made.
pub fn order_statement(key_pem: &str, verdict: &Verdict, turn: u32) -> Result<Vec<u8>, AuthorityError> {
    Ok(KeyPair::from_pem(key_pem)?.sign(&order_message(verdict, turn))?)
}

/// Returns `true` if the key of a server's certificate (DER) has signed the order of a statement.
pub fn orders_statement(present: &[u8], verdict: &Verdict, turn: u32, proof: &[u8]) -> bool {
    has_signed(present, &order_message(verdict, turn), proof)
}

/// Creates the folder of the authorities unless it exists.
pub(super) fn make_folder(folder: &Path) -> Result<(), StoreError> {
    use std::os::unix::fs::DirBuilderExt;
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(folder);
    made.map_err(|error| StoreError::Io { path: folder.into(), error })
}

impl AuthorityKey {
    /// Creates the authority of a new pool.
    pub fn init(folder: &Path, pool: &str, unix: u64, random: &dyn Random) -> Result<Self, AuthorityError> {
        Self::generate(pool, unix, random)?.keep(folder)
    }

    /// Makes an authority, whose name no other authority of the pool has.
    pub fn generate(pool: &str, unix: u64, random: &dyn Random) -> Result<Self, AuthorityError> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::default();
        let number: [u8; 4] = clock::bytes(random);
        let number = data_encoding::HEXLOWER.encode(&number);
        named(&mut params, &format!("gpusession pool {pool} {number}"), random);
        validity(&mut params, unix, AUTHORITY_TTL);
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let certificate = params.self_signed(&key)?;
        Self::new(&certificate.pem(), key)
    }

    fn new(pem: &str, key: KeyPair) -> Result<Self, AuthorityError> {
        let authority = Authority::from_pem(pem)?;
        let issuer = Issuer::from_ca_cert_der(&authority.der, key);
        let issuer = issuer.map_err(|e| AuthorityError::Import(e.to_string()))?;
        Ok(Self { issuer, authority })
    }

    /// Stores the authority of a server that has none.
    pub fn keep(self, folder: &Path) -> Result<Self, AuthorityError> {
        if folder.join("authority.key").exists() {
            return Err(AuthorityError::Exists(folder.into()));
        }
        make_folder(folder)?;
        self.write(folder, Place::Present)?;
        Ok(self)
    }

    /// Writes certificate and key.
    pub fn write(&self, folder: &Path, place: Place) -> Result<(), StoreError> {
        let [pem, key] = place.files(folder);
        store::write_bytes(&pem, self.pem.as_bytes(), 0o644)?;
        // Last, since the key marks the authority as complete.
        store::write_bytes(&key, self.issuer.key().serialize_pem().as_bytes(), 0o600)
    }

    /// Returns certificate and key, for [`Authority::import`] on another server of the pool.
    pub fn export(&self) -> String {
        format!("{}{}", self.pem, self.issuer.key().serialize_pem())
    }

    /// Reads certificate and key from the text of [`Authority::export`]; returns the rest of it.
    pub fn exported(text: &str) -> Result<(Self, &str), AuthorityError> {
        const KEY_ENDS: &str = "-----END PRIVATE KEY-----";
        let not = |what: String| AuthorityError::Import(what);
        let begin = text.find("-----BEGIN PRIVATE KEY-----").ok_or_else(|| not("it has no key".into()))?;
        let end = text.find(KEY_ENDS).map(|at| at + KEY_ENDS.len()).filter(|end| *end > begin);
        let end = end.ok_or_else(|| not("its key has no end".into()))?;
        let (pem, key_pem, rest) = (&text[..begin], &text[begin..end], &text[end..]);
        let key = KeyPair::from_pem(key_pem).map_err(|e| not(e.to_string()))?;
        let der = CertificateDer::from_pem_slice(pem.as_bytes()).map_err(|e| not(e.to_string()))?;
        let (_, certificate) = x509_parser::parse_x509_certificate(&der).map_err(|e| not(e.to_string()))?;
        if certificate.public_key().raw != key.subject_public_key_info() || !certificate.is_ca() {
            return Err(not("its certificate and key are not those of one authority".into()));
        }
        Ok((Self::new(pem.trim_start(), key)?, rest))
    }

    /// Reads certificate and key.
    pub fn read(folder: &Path, place: Place) -> Result<Self, AuthorityError> {
        Self::read_files(folder, place.files(folder))
    }

    /// Reads certificate and key from two files.
    pub fn read_files(folder: &Path, [pem_path, key_path]: [PathBuf; 2]) -> Result<Self, AuthorityError> {
        let unusable = |path: &Path, reason: String| AuthorityError::Unusable { path: path.into(), reason };
        let read = |path: &Path| match fs::read_to_string(path) {
            Ok(text) => Ok(text),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Err(AuthorityError::Missing(folder.into())),
            Err(e) => Err(unusable(path, e.to_string())),
        };
        let (pem, key) = (read(&pem_path)?, read(&key_path)?);
        let key = KeyPair::from_pem(&key).map_err(|e| unusable(&key_path, e.to_string()))?;
        Self::new(&pem, key).map_err(|e| match e {
            AuthorityError::Import(reason) => unusable(&pem_path, reason),
            e => e,
        })
    }

    /// Signs a statement.
    pub fn state(&self, body: Vec<u8>) -> Result<Signed, AuthorityError> {
        let signature = self.issuer.key().sign(&signed_message(&body))?;
        Ok(Signed { body, authority: self.fingerprint(), signature })
    }

    /// Signs a description of the pool's authorities.
    pub fn sign_description(&self, body: &[u8]) -> Result<Vec<u8>, AuthorityError> {
        Ok(self.issuer.key().sign(&described_message(body))?)
    }

    /// Confirms another authority: returns a certificate that names it, and belongs to no key.
    pub fn confirm(
        &self,
        other: &Authority,
        unix: u64,
        random: &dyn Random,
    ) -> Result<String, AuthorityError> {
        let mut params = CertificateParams::new(vec![join::authority(&other.fingerprint())])?;
        named(&mut params, "confirmation of another authority", random);
        validity(&mut params, unix, AUTHORITY_TTL);
        params.use_authority_key_identifier_extension = true;
        // No process keeps the key, so that no process can use the certificate for a connection.
        Ok(params.signed_by(&KeyPair::generate()?, &self.issuer)?.pem())
    }

    /// Signs a certificate request, of which only the public key is used.
    pub fn issue(
        &self,
        csr_pem: &str,
        order: &Order<'_>,
        unix: u64,
        random: &dyn Random,
    ) -> Result<Issued, AuthorityError> {
        let mut names = vec![match order.role {
            Role::Client => join::client(order.name),
            Role::Administrator => join::administrator(order.name),
            Role::Server => return Err(AuthorityError::Request("a server's has its own way".into())),
        }];
        names.extend(order.identity.map(join::identity));
        names.extend(order.signs_renewals.then(join::signs_renewals));
        let usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        self.sign(csr_pem, names, usages, (order.name, unix, order.life), random)
    }

    /// Signs a server's certificate request, of which only the public key is used.
    pub fn issue_server(
        &self,
        name: &str,
        csr_pem: &str,
        unix: u64,
        random: &dyn Random,
    ) -> Result<Issued, AuthorityError> {
        let names = vec![join::any_server(), join::server(name)];
        let usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        self.sign(csr_pem, names, usages, (name, unix, SERVER_TTL), random)
    }

    fn sign(
        &self,
        csr_pem: &str,
        names: Vec<String>,
        usages: Vec<ExtendedKeyUsagePurpose>,
        (name, unix, life): (&str, u64, Duration),
        random: &dyn Random,
    ) -> Result<Issued, AuthorityError> {
        let request = CertificateSigningRequestParams::from_pem(csr_pem)
            .map_err(|e| AuthorityError::Request(e.to_string()))?;
        let mut params = CertificateParams::new(names)?;
        named(&mut params, name, random);
        validity(&mut params, unix, life);
        params.use_authority_key_identifier_extension = true;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = usages;
        let certificate = CertificateSigningRequestParams { params, public_key: request.public_key }
            .signed_by(&self.issuer)?;
        let der = certificate.der();
        let expires_unix = expiry(der).unwrap_or(0);
        Ok(Issued { pem: certificate.pem(), fingerprint: fingerprint(der), expires_unix })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::certificate::holder;
    use crate::clock::SystemRandom;

    const NOW: u64 = 1_900_000_000;

    #[test]
    fn is_made_once_and_signs_only_the_name_it_is_told() {
        let state = tempfile::tempdir().unwrap();
        assert!(matches!(AuthorityKey::read(state.path(), Place::Present), Err(AuthorityError::Missing(_))));
        let made = AuthorityKey::init(state.path(), "lab", NOW, &SystemRandom).unwrap();
        assert!(matches!(
            AuthorityKey::init(state.path(), "lab", NOW, &SystemRandom),
            Err(AuthorityError::Exists(_))
        ));
        let again = AuthorityKey::read(state.path(), Place::Present).unwrap();
        assert_eq!(made.fingerprint(), again.fingerprint());
        use std::os::unix::fs::PermissionsExt;
        let mode = fs::metadata(state.path().join("authority.key")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);

        let key = KeyPair::generate().unwrap();
        let mut wish = CertificateParams::new(vec![join::any_server()]).unwrap();
        wish.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let csr = wish.serialize_request(&key).unwrap().pem().unwrap();
        let order =
            |role, name| Order { role, name, life: CLIENT_TTL, identity: None, signs_renewals: false };
        let now = NOW;
        let issued = again.issue(&csr, &order(Role::Client, "vm-1"), now, &SystemRandom).unwrap();
        let der = CertificateDer::from_pem_slice(issued.pem.as_bytes()).unwrap();
        let text = String::from_utf8_lossy(&der).into_owned();
        assert!(text.contains("vm-1.client.gpusession.internal"));
        assert!(!text.contains(&join::any_server()), "a wish in the request was granted");
        assert_eq!(issued.fingerprint, fingerprint(&der));
        let whose = holder(&der).unwrap();
        assert_eq!((whose.role, whose.name.as_str()), (Role::Client, "vm-1"));
        assert_eq!(whose.identity, requested_key(&csr).unwrap());
        assert_eq!((whose.issued_unix, whose.expires_unix), (now, now + CLIENT_TTL.as_secs()));
        let renewal = Order { identity: Some(&[7; 32]), ..order(Role::Client, "vm-1") };
        let renewed = again.issue(&csr, &renewal, now + 60, &SystemRandom).unwrap();
        let renewed = holder(&CertificateDer::from_pem_slice(renewed.pem.as_bytes()).unwrap()).unwrap();
        assert_eq!((renewed.name.as_str(), renewed.identity), ("vm-1", [7; 32]));
        let issued = again.issue(&csr, &order(Role::Administrator, "alice"), now, &SystemRandom).unwrap();
        let whose = holder(&CertificateDer::from_pem_slice(issued.pem.as_bytes()).unwrap()).unwrap();
        assert_eq!((whose.role, whose.name.as_str()), (Role::Administrator, "alice"));
        assert_eq!(holder(&again.der), None);
        assert_eq!(holder(b"garbage"), None);
        assert!(matches!(
            again.issue("garbage", &order(Role::Client, "vm-1"), now, &SystemRandom),
            Err(AuthorityError::Request(_))
        ));

        let stated = again.state(b"statement".to_vec()).unwrap();
        assert!(made.has_stated(&stated.body, &stated.signature));
        let other = AuthorityKey::generate("other", now, &SystemRandom).unwrap();
        assert!(!other.has_stated(&stated.body, &stated.signature));
        assert!(!made.has_stated(b"another", &stated.signature) && !made.has_stated(&stated.body, &[]));
    }

    fn import(folder: &Path, exported: &str) -> Result<AuthorityKey, AuthorityError> {
        AuthorityKey::exported(exported)?.0.keep(folder)
    }

    #[test]
    fn another_server_takes_it_over() {
        let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let made = AuthorityKey::init(first.path(), "lab", NOW, &SystemRandom).unwrap();
        let exported = made.export();
        let other = AuthorityKey::init(second.path(), "other", NOW, &SystemRandom).unwrap();
        assert!(matches!(import(second.path(), &exported), Err(AuthorityError::Exists(_))));
        let third = tempfile::tempdir().unwrap();
        let mixed = format!("{}{}", made.pem(), other.issuer.key().serialize_pem());
        for bad in ["", "garbage", made.pem(), &exported[10..], mixed.as_str()] {
            assert!(matches!(import(third.path(), bad), Err(AuthorityError::Import(_))), "{bad}");
        }
        let taken = import(third.path(), &exported).unwrap();
        assert_eq!((taken.fingerprint(), taken.export()), (made.fingerprint(), exported));
    }
}
