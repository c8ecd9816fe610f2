//! Identities in a pool: the names in certificates, and the join tokens of new clients and servers.
//!
//! A certificate names the server or client *in the pool*, never its address, so that addresses may
//! change:
//!
//! * every server's certificate carries [`any_server`] and [`server`]`(name)`; a client that knows
//!   only an address verifies the first, a client that expects a certain server the second;
//! * a client's certificate carries [`client`]`(name)`, an administrator's
//!   [`administrator`]`(name)`;
//! * a renewed client certificate also carries [`identity`]: the key with which the client joined;
//! * during a rotation, the old and the new authority confirm each other by certificates that carry
//!   [`authority`] and belong to no key.
//!
//! A joining client does not know the pool's authority yet. The server sends it as the last
//! certificate of its chain. The client accepts it if its SHA-256 (of the DER) is
//! [`JoinToken::authority`]. Then the client verifies the rest of the handshake with it.

use std::fmt;
use std::str::FromStr;

use data_encoding::BASE64URL_NOPAD;

/// Domain of all names in a pool's certificates; it is never resolved.
const DOMAIN: &str = "gpusession.internal";

/// Returns the DNS name that every server of a pool has in its certificate.
pub fn any_server() -> String {
    format!("server.{DOMAIN}")
}

/// Returns the DNS name of one server of a pool.
pub fn server(name: &str) -> String {
    format!("{name}.server.{DOMAIN}")
}

/// Returns the server whose certificate has this DNS name.
pub fn server_of(dns_name: &str) -> Option<&str> {
    dns_name.strip_suffix(DOMAIN)?.strip_suffix(".server.").filter(|name| is_name(name))
}

/// Returns the DNS name in a client's certificate.
pub fn client(name: &str) -> String {
    format!("{name}.client.{DOMAIN}")
}

/// Returns the client whose certificate has this DNS name.
pub fn client_of(dns_name: &str) -> Option<&str> {
    dns_name.strip_suffix(DOMAIN)?.strip_suffix(".client.").filter(|name| is_name(name))
}

/// Returns the DNS name in an administrator's certificate.
pub fn administrator(name: &str) -> String {
    format!("{name}.administrator.{DOMAIN}")
}

/// Returns the administrator whose certificate has this DNS name.
pub fn administrator_of(dns_name: &str) -> Option<&str> {
    dns_name.strip_suffix(DOMAIN)?.strip_suffix(".administrator.").filter(|name| is_name(name))
}

/// Returns the DNS name of an identity in a renewed certificate of a client.
///
/// An identity is the SHA-256 of the public key with which the client joined.
pub fn identity(first_key: &[u8; 32]) -> String {
    let text = data_encoding::BASE32_NOPAD.encode(first_key).to_ascii_lowercase();
    format!("i-{text}.identity.{DOMAIN}")
}

/// Returns the identity that this DNS name of a certificate holds.
pub fn identity_of(dns_name: &str) -> Option<[u8; 32]> {
    let text = dns_name.strip_suffix(DOMAIN)?.strip_suffix(".identity.")?.strip_prefix("i-")?;
    let key = data_encoding::BASE32_NOPAD.decode(text.to_ascii_uppercase().as_bytes()).ok()?;
    key.try_into().ok()
}

/// Returns the DNS name in the certificate of a client that signs its renewals.
pub fn signs_renewals() -> String {
    format!("signs-renewals.{DOMAIN}")
}

/// Returns the DNS name by which an authority confirms another one, which has this fingerprint.
///
/// A fingerprint is the SHA-256 of a certificate (DER).
pub fn authority(fingerprint: &[u8; 32]) -> String {
    let text = data_encoding::BASE32_NOPAD.encode(fingerprint).to_ascii_lowercase();
    format!("a-{text}.authority.{DOMAIN}")
}

/// Returns the fingerprint of the authority that a certificate with this DNS name confirms.
pub fn authority_of(dns_name: &str) -> Option<[u8; 32]> {
    let text = dns_name.strip_suffix(DOMAIN)?.strip_suffix(".authority.")?.strip_prefix("a-")?;
    let fingerprint = data_encoding::BASE32_NOPAD.decode(text.to_ascii_uppercase().as_bytes()).ok()?;
    fingerprint.try_into().ok()
}

/// Returns the name (DER) by which a joining client asks for the authority that its token pins.
///
/// The client sends it in TLS, where other clients send the names of the authorities that they
/// trust. It does not know the authority's own name yet.
pub fn pinned(authority: &[u8; 32]) -> Vec<u8> {
    // SEQUENCE, SET, SEQUENCE of the object identifier commonName and a UTF8String of 64 bytes.
    const HEAD: [u8; 13] = [0x30, 0x4b, 0x31, 0x49, 0x30, 0x47, 0x06, 0x03, 0x55, 0x04, 0x03, 0x0c, 0x40];
    [&HEAD[..], data_encoding::HEXLOWER.encode(authority).as_bytes()].concat()
}

/// Returns `true` if `name` is valid for a server or a client.
///
/// A name consists of labels of a-z, 0-9 and `-`, separated by dots, 64 bytes at most.
pub fn is_name(name: &str) -> bool {
    let label = |l: &str| {
        !l.is_empty()
            && !l.starts_with('-')
            && !l.ends_with('-')
            && l.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
    };
    name.len() <= 64 && name.split('.').all(label)
}

/// Token that `gpuserver token create` or `fleet token` prints and `gpusession join` takes.
///
/// Its text is `gpsj-` and 86 characters of base64url.
#[derive(Clone, PartialEq, Eq)]
pub struct JoinToken {
    /// SHA-256 of the pool authority's certificate (DER).
    pub authority: [u8; 32],
    /// Number of the token; not secret.
    pub id: [u8; 8],
    /// Secret of the token; the server stores only its hash.
    pub secret: [u8; 24],
}

const PREFIX: &str = "gpsj-";
/// Begin of the text of a [`ServerToken`].
const SERVER_PREFIX: &str = "gpss-";
/// Begin of the message that a client signs to renew its certificate.
const CLIENT_RENEWAL: &[u8] = b"gpusession renewal of a client 1\n";
/// Domain of [`server_proof`].
const SERVER_PROOF: &[u8] = b"gpusession join of a server 1\n";
/// Begin of the text of a [`FleetKey`].
const FLEET_PREFIX: &str = "gpsf-";
/// Domain of [`fleet_secret`].
const FLEET_SECRET: &[u8] = b"gpusession token of a fleet 1\n";

/// Token that `gpuserver pool admit` prints and `gpuserver pool join` takes.
///
/// Its text is `gpss-` and 86 characters of base64url, so that no client takes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerToken(pub JoinToken);

/// Returns the proof of a server that has a token for its name, made of its certificate request.
///
/// `key` is the BLAKE3 of the token's secret. The secret itself thus reaches no server, and a proof
/// serves for this name and this key alone.
pub fn server_proof(key: &[u8; 32], name: &str, csr_pem: &str) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new_keyed(key);
    // A name has no line feed, which thus separates the parts.
    hasher.update(SERVER_PROOF).update(name.as_bytes()).update(b"\n").update(csr_pem.as_bytes());
    *hasher.finalize().as_bytes()
}

/// Returns the message that a client signs with its present key to get its next certificate.
pub fn renewal(csr_pem: &str) -> Vec<u8> {
    [CLIENT_RENEWAL, csr_pem.as_bytes()].concat()
}

/// Key that `gpuserver fleet create` prints: it derives a join token for each name of a fleet.
///
/// Its text is `gpsf-` and base64url of a token's bytes and the pattern. The pattern is for the
/// derivation's messages; the signer checks the one that it stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FleetKey {
    /// Authority, id and secret, of which tokens have the first two.
    pub of_tokens: JoinToken,
    /// Pattern of the clients' names.
    pub pattern: String,
}

/// Returns the secret of the join token that a fleet key gives to the client `name`.
///
/// `key` is the BLAKE3 of the fleet key's secret. A token's secret thus tells nothing about the key
/// and the other tokens.
pub fn fleet_secret(key: &[u8; 32], name: &str) -> [u8; 24] {
    let mut hasher = blake3::Hasher::new_keyed(key);
    hasher.update(FLEET_SECRET).update(name.as_bytes());
    let mut secret = [0; 24];
    hasher.finalize_xof().fill(&mut secret);
    secret
}

/// Error for a text that is not a join token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NotAToken;

/// Error for a text that is not a token for a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NotAServerToken;

/// Error for a text that is not a fleet key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NotAFleetKey;

impl fmt::Display for NotAFleetKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "not a fleet key: `gpuserver fleet create` makes one, which starts with {FLEET_PREFIX}")
    }
}

impl std::error::Error for NotAFleetKey {}

impl fmt::Display for NotAServerToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "not a token for a server: `gpuserver pool admit` makes one, which starts with {SERVER_PREFIX}"
        )
    }
}

impl std::error::Error for NotAServerToken {}

impl fmt::Display for NotAToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "not a join token: a token starts with {PREFIX} and has 91 characters")
    }
}

impl std::error::Error for NotAToken {}

// A token in a log by accident shows its id only.
impl fmt::Debug for JoinToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "JoinToken({})", data_encoding::HEXLOWER.encode(&self.id))
    }
}

impl JoinToken {
    /// Returns the text that a person passes on.
    pub fn to_text(&self) -> String {
        self.text_behind(PREFIX)
    }

    fn text_behind(&self, prefix: &str) -> String {
        format!("{prefix}{}", BASE64URL_NOPAD.encode(&self.bytes()))
    }

    fn bytes(&self) -> Vec<u8> {
        [&self.authority[..], &self.id, &self.secret].concat()
    }

    /// Splits bytes into a token and the rest.
    fn split(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let (authority, rest) = bytes.split_first_chunk()?;
        let (id, rest) = rest.split_first_chunk()?;
        let (secret, rest) = rest.split_first_chunk()?;
        Some((Self { authority: *authority, id: *id, secret: *secret }, rest))
    }

    fn from_body(body: &str) -> Result<Self, NotAToken> {
        let bytes = BASE64URL_NOPAD.decode(body.as_bytes()).map_err(|_| NotAToken)?;
        match Self::split(&bytes) {
            Some((token, [])) => Ok(token),
            _ => Err(NotAToken),
        }
    }
}

impl FromStr for JoinToken {
    type Err = NotAToken;

    fn from_str(text: &str) -> Result<Self, NotAToken> {
        Self::from_body(text.trim().strip_prefix(PREFIX).ok_or(NotAToken)?)
    }
}

impl ServerToken {
    /// Returns the text that a person passes on.
    pub fn to_text(&self) -> String {
        self.0.text_behind(SERVER_PREFIX)
    }

    /// Returns the proof of a server of this name that asks for a certificate.
    pub fn proof(&self, name: &str, csr_pem: &str) -> [u8; 32] {
        server_proof(blake3::hash(&self.0.secret).as_bytes(), name, csr_pem)
    }
}

impl FromStr for ServerToken {
    type Err = NotAServerToken;

    fn from_str(text: &str) -> Result<Self, NotAServerToken> {
        let body = text.trim().strip_prefix(SERVER_PREFIX).ok_or(NotAServerToken)?;
        JoinToken::from_body(body).map(Self).map_err(|NotAToken| NotAServerToken)
    }
}

impl FleetKey {
    /// Returns the text that a person stores.
    pub fn to_text(&self) -> String {
        let bytes = [&self.of_tokens.bytes(), self.pattern.as_bytes()].concat();
        format!("{FLEET_PREFIX}{}", BASE64URL_NOPAD.encode(&bytes))
    }

    /// Derives the token that is good for the client `name` alone.
    pub fn token(&self, name: &str) -> JoinToken {
        let JoinToken { authority, id, secret } = self.of_tokens;
        JoinToken { authority, id, secret: fleet_secret(blake3::hash(&secret).as_bytes(), name) }
    }
}

impl FromStr for FleetKey {
    type Err = NotAFleetKey;

    fn from_str(text: &str) -> Result<Self, NotAFleetKey> {
        let body = text.trim().strip_prefix(FLEET_PREFIX).ok_or(NotAFleetKey)?;
        let bytes = BASE64URL_NOPAD.decode(body.as_bytes()).map_err(|_| NotAFleetKey)?;
        let (of_tokens, pattern) = JoinToken::split(&bytes).ok_or(NotAFleetKey)?;
        let pattern = str::from_utf8(pattern).map_err(|_| NotAFleetKey)?;
        Ok(Self { of_tokens, pattern: pattern.into() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_survive_text_and_refuse_anything_else() {
        let token = JoinToken { authority: [1; 32], id: [2; 8], secret: [3; 24] };
        let text = token.to_text();
        assert_eq!(text.len(), 91);
        assert_eq!(text.parse(), Ok(token.clone()));
        assert_eq!(format!(" {text}\n").parse(), Ok(token.clone()));
        assert_eq!(format!("{token:?}"), "JoinToken(0202020202020202)");
        for bad in ["", "gpsj-", &text[1..], &text[..90], &format!("{text}A"), &text.replace('B', "é")] {
            assert_eq!(bad.parse::<JoinToken>(), Err(NotAToken), "{bad}");
        }
    }

    #[test]
    fn a_token_for_a_server_is_none_for_a_client_and_proves_one_name_and_one_request() {
        let token = ServerToken(JoinToken { authority: [1; 32], id: [2; 8], secret: [3; 24] });
        let text = token.to_text();
        assert_eq!((text.len(), text.parse()), (91, Ok(token.clone())));
        assert_eq!(text.parse::<JoinToken>(), Err(NotAToken));
        assert_eq!(token.0.to_text().parse::<ServerToken>(), Err(NotAServerToken));
        let proof = token.proof("gpu2", "csr");
        assert_eq!(proof, server_proof(blake3::hash(&[3; 24]).as_bytes(), "gpu2", "csr"));
        let other = ServerToken(JoinToken { secret: [4; 24], ..token.0.clone() });
        for another in [token.proof("gpu3", "csr"), token.proof("gpu2", "csr2"), other.proof("gpu2", "csr")] {
            assert_ne!(proof, another);
        }
    }

    #[test]
    fn a_fleet_key_survives_text_and_is_no_token() {
        let of_tokens = JoinToken { authority: [1; 32], id: [2; 8], secret: [3; 24] };
        let key = FleetKey { of_tokens: of_tokens.clone(), pattern: "vm-*".into() };
        let text = key.to_text();
        assert_eq!((text.parse(), format!("{text}\n").parse()), (Ok(key.clone()), Ok(key.clone())));
        assert!(text.parse::<JoinToken>().is_err() && text.parse::<ServerToken>().is_err());
        assert!(!format!("{key:?}").contains("3, 3"), "{key:?}");
        let cut = &text[..80];
        let no_text = format!("gpsf-{}", BASE64URL_NOPAD.encode(&[0xff; 65]));
        for bad in ["", "gpsf-", cut, &no_text, &of_tokens.to_text(), &text.replace("gpsf-", "gpsj-")] {
            assert_eq!(bad.parse::<FleetKey>(), Err(NotAFleetKey), "{bad}");
        }
    }

    #[test]
    fn a_fleet_key_gives_each_name_a_token_of_its_own() {
        let of_tokens = JoinToken { authority: [1; 32], id: [2; 8], secret: [3; 24] };
        let key = FleetKey { of_tokens: of_tokens.clone(), pattern: "vm-*".into() };
        let token = key.token("vm-7");
        // The bytes of all releases: tokens outlive an upgrade.
        assert_eq!(
            data_encoding::HEXLOWER.encode(&token.secret),
            "23f5c9425d2d2f1e5c38dc25ae9ac48de236761cd78d5001"
        );
        assert_eq!((token.authority, token.id), (of_tokens.authority, of_tokens.id));
        let other = FleetKey { of_tokens: JoinToken { secret: [4; 24], ..of_tokens.clone() }, ..key.clone() };
        for another in [key.token("vm-8"), key.token("vm-70"), other.token("vm-7"), of_tokens] {
            assert_ne!(token.secret, another.secret);
        }
    }

    #[test]
    fn confirmations_of_authorities_name_nothing_else() {
        let name = authority(&[7; 32]);
        assert_eq!(authority_of(&name), Some([7; 32]));
        assert_eq!((identity_of(&name), client_of(&name), administrator_of(&name)), (None, None, None));
        for other in [identity(&[7; 32]), client("a"), server("a"), any_server(), name.replace("a-", "")] {
            assert_eq!(authority_of(&other), None, "{other}");
            assert!(server_of(&other).is_none() || other == server("a"), "{other}");
        }
    }

    #[test]
    fn no_name_is_that_of_another_kind() {
        for name in ["a", "a.client", "a.administrator", "a.server"] {
            let (client, administrator) = (client(name), administrator(name));
            assert_eq!((client_of(&client), administrator_of(&client)), (Some(name), None));
            assert_eq!((client_of(&administrator), administrator_of(&administrator)), (None, Some(name)));
            assert_eq!((client_of(&server(name)), administrator_of(&server(name))), (None, None));
            assert_eq!(server_of(&server(name)), Some(name));
            assert_eq!((server_of(&client), server_of(&administrator)), (None, None));
        }
    }

    #[test]
    fn names() {
        for good in ["a", "vm-17", "vm.lab-2.example", "0"] {
            assert!(is_name(good), "{good}");
        }
        for bad in ["", "-a", "a-", "A", "a..b", ".a", "a_b", "a/b", &"a".repeat(65)] {
            assert!(!is_name(bad), "{bad}");
        }
    }
}
