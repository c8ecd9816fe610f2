//! Certificates of the pool, as TLS has verified them: their fingerprints and their holders.

use std::time::Duration;

use gpusession_proto::join;

/// Tolerated difference between the clocks of client and server.
///
/// A certificate begins by this much before its issue.
pub const CLOCK_SKEW_GRACE: Duration = Duration::from_secs(24 * 3600);

/// Returns the SHA-256 of a certificate.
pub fn fingerprint(der: &[u8]) -> [u8; 32] {
    let digest = ring::digest::digest(&ring::digest::SHA256, der);
    let mut out = [0; 32];
    out.copy_from_slice(digest.as_ref());
    out
}

/// Returns the holder of a certificate that TLS has verified; `None` for a server's certificate.
pub fn holder(der: &[u8]) -> Option<Holder> {
    let (_, certificate) = x509_parser::parse_x509_certificate(der).ok()?;
    let names = certificate.subject_alternative_name().ok()??;
    let (role, name) = names.value.general_names.iter().find_map(|name| {
        let x509_parser::extensions::GeneralName::DNSName(name) = name else { return None };
        let client = join::client_of(name).map(|name| (Role::Client, name));
        client.or_else(|| Some((Role::Administrator, join::administrator_of(name)?)))
    })?;
    let begins = u64::try_from(certificate.validity().not_before.timestamp()).ok()?;
    let key = fingerprint(certificate.public_key().raw);
    Some(Holder { role, name: name.into(), issued_unix: begins + CLOCK_SKEW_GRACE.as_secs(), key })
}

/// Role of a certificate's holder, other than a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// May hold leases.
    Client,
    /// May send the requests of `admin.sock`.
    Administrator,
}

/// Holder of a certificate, see [`holder`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// Client or administrator.
    pub role: Role,
    /// Name of the holder in the pool.
    pub name: String,
    /// Issue time in seconds since 1970.
    pub issued_unix: u64,
    /// SHA-256 of its public key.
    pub key: [u8; 32],
}
