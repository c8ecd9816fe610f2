//! Certificates of the pool, as TLS has verified them: their fingerprints and their holders.

use std::time::Duration;

use gpusession_proto::join;
pub use gpusession_proto::pinned::sha256 as fingerprint;
use x509_parser::extensions::GeneralName;

/// Tolerated difference between the clocks of client and server.
///
/// A certificate begins by this much before its issue.
pub const CLOCK_SKEW_GRACE: Duration = Duration::from_secs(24 * 3600);

/// Returns the holder of a certificate that TLS has verified.
pub fn holder(der: &[u8]) -> Option<Holder> {
    let (_, certificate) = x509_parser::parse_x509_certificate(der).ok()?;
    let names = certificate.subject_alternative_name().ok()??;
    let names = names.value.general_names.iter().filter_map(|name| match name {
        GeneralName::DNSName(name) => Some(*name),
        _ => None,
    });
    let (role, name) = names.clone().find_map(|name| {
        let client = join::client_of(name).map(|name| (Role::Client, name));
        let administrator = || Some((Role::Administrator, join::administrator_of(name)?));
        client.or_else(administrator).or_else(|| Some((Role::Server, join::server_of(name)?)))
    })?;
    let (begins, ends) = (certificate.validity().not_before, certificate.validity().not_after);
    let identity = names.clone().find_map(join::identity_of);
    Some(Holder {
        role,
        name: name.into(),
        issued_unix: u64::try_from(begins.timestamp()).ok()? + CLOCK_SKEW_GRACE.as_secs(),
        expires_unix: u64::try_from(ends.timestamp()).ok()?,
        identity: identity.unwrap_or_else(|| fingerprint(certificate.public_key().raw)),
    })
}

/// Returns `true` if the holder of a certificate signs its renewals.
pub fn signs_renewals(der: &[u8]) -> bool {
    let Ok((_, certificate)) = x509_parser::parse_x509_certificate(der) else { return false };
    let names = certificate.subject_alternative_name().ok().flatten();
    let marked = join::signs_renewals();
    names.is_some_and(|names| {
        let is = |name: &GeneralName<'_>| matches!(name, GeneralName::DNSName(name) if *name == marked);
        names.value.general_names.iter().any(is)
    })
}

/// Returns the SHA-256 of the name of a certificate's issuer: [`subject`] of its authority.
pub fn issuer(der: &[u8]) -> Option<[u8; 32]> {
    let (_, certificate) = x509_parser::parse_x509_certificate(der).ok()?;
    Some(fingerprint(certificate.issuer().as_raw()))
}

/// Returns the SHA-256 of the name of a certificate's holder.
pub fn subject(der: &[u8]) -> Option<[u8; 32]> {
    let (_, certificate) = x509_parser::parse_x509_certificate(der).ok()?;
    Some(fingerprint(certificate.subject().as_raw()))
}

/// Returns the end of a certificate's life, in seconds since 1970.
pub fn expiry(der: &[u8]) -> Option<u64> {
    let (_, certificate) = x509_parser::parse_x509_certificate(der).ok()?;
    u64::try_from(certificate.validity().not_after.timestamp()).ok()
}

/// Formats the day of a time in seconds since 1970, such as 2031-02-03.
pub fn day(unix: u64) -> String {
    let time = i64::try_from(unix).ok().and_then(|s| time::OffsetDateTime::from_unix_timestamp(s).ok());
    time.map_or_else(|| format!("{unix} s after 1970"), |time| time.date().to_string())
}

/// Role of a certificate's holder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// May hold leases.
    Client,
    /// May send the requests of `admin.sock`.
    Administrator,
    /// May ask for the pool's statements.
    Server,
}

/// Holder of a certificate, see [`holder`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// Client, administrator or server.
    pub role: Role,
    /// Name of the holder in the pool.
    pub name: String,
    /// Issue time in seconds since 1970.
    pub issued_unix: u64,
    /// End of the certificate, in seconds since 1970.
    pub expires_unix: u64,
    /// SHA-256 of the public key with which it joined; renewed certificates carry it.
    pub identity: [u8; 32],
}

impl Holder {
    /// Returns `true` if the certificate has expired.
    pub fn expired(&self, unix: u64) -> bool {
        unix > self.expires_unix
    }
}
