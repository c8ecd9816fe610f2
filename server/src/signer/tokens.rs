//! Join tokens, with which a new client or server may ask for a certificate.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv6Addr};
use std::ops::Bound;

use data_encoding::HEXLOWER;
use gpusession_proto::join::{JoinToken, fleet_secret, server_proof};
use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::fleet::FleetError;
use crate::clock::{self, Random};

/// Most clients of a token that bounds them by address: one message holds their addresses.
pub const MAX_BY_ADDRESS: u32 = 1500;
/// Begin of the hash of a token that addresses bound.
///
/// Earlier releases ignore the bounds, and write the record without them. They cannot read such a
/// hash, so they refuse the token, and a later release knows that the record lacks its bounds.
const BOUNDED: &str = "bounded:";
/// Hash of a revoked token. Earlier releases cannot read it either.
const REVOKED: &str = "revoked";
/// Names in a record that are as long as a token.
const NAMES_OF_A_TOKEN: usize = 5;

/// Kind of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenKind {
    /// A join token, with which clients join.
    Client,
    /// A token for a server, whose pattern is the one name of the server.
    Server,
    /// A fleet key, from which a join token derives for each name.
    Fleet,
}

impl TokenKind {
    /// Returns the begin of a record's hash.
    ///
    /// Earlier releases refuse a kind that they do not know, as they do [`BOUNDED`].
    fn begin(self) -> &'static str {
        match self {
            Self::Client => "",
            Self::Server => "server:",
            Self::Fleet => "fleet:",
        }
    }

    /// Returns the begin of the pattern in lists.
    fn word(self) -> &'static str {
        match self {
            Self::Client => "",
            Self::Server => "server ",
            Self::Fleet => "fleet ",
        }
    }
}

/// Bounds of a new token.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Terms {
    /// Pattern of the client names.
    pub pattern: String,
    /// Number of clients.
    pub uses: u32,
    /// Lifetime in seconds.
    pub ttl: u64,
    /// Networks from which clients join; empty: from anywhere.
    pub from: Vec<IpNet>,
    /// Number of clients from one address, or one /64 of IPv6; 0: no bound.
    pub per_address: u32,
}

/// The server's record of a token: it recognises a client's token, but cannot use it.
///
/// The records of a fleet key and of a server's token serve as the secret does.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenRecord {
    /// BLAKE3 of the secret, in hex; behind the begin of the kind, and [`BOUNDED`] if addresses
    /// bound the token. Or [`REVOKED`].
    hash: String,
    /// Pattern of acceptable names; `*` stands for any characters, `?` for one.
    pub pattern: String,
    /// Number of clients that may still join with the token.
    pub uses_left: u32,
    /// End of its validity, in seconds since 1970.
    pub expires_unix: u64,
    /// Time of its creation, in seconds since 1970.
    pub created_unix: u64,
    /// SHA-256 of the authority that it pins, in hex; empty in records of earlier versions.
    #[serde(default)]
    pub authority: String,
    /// Networks from which clients join; empty: from anywhere.
    // Always written: the signer's messages have no names, so a missing field would shift the next.
    #[serde(default)]
    pub from: Vec<IpNet>,
    /// Number of clients from one address; 0: no bound.
    #[serde(default)]
    per_address: u32,
    /// Hashes of the names that have joined, by address; empty without that bound.
    #[serde(default)]
    joined: BTreeMap<String, BTreeSet<u64>>,
}

/// Reason why a token is not accepted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    /// The token is not one of this pool, or its secret is wrong.
    #[error(
        "the join token is not one of this pool; ask for one made by `gpuserver token create` on this server"
    )]
    Unknown,
    /// An administrator has revoked it.
    #[error("the join token is revoked, or the fleet key that it is of; ask for a new one")]
    Revoked,
    /// It is of a fleet key, which is not accepted.
    #[error(transparent)]
    Fleet(#[from] FleetError),
    /// Its number of uses is exhausted.
    #[error(
        "the join token is used up; ask for a new one (`gpuserver token create --uses N` makes one for N clients)"
    )]
    UsedUp,
    /// Its validity has ended.
    #[error(
        "the join token has expired; ask for a new one (`gpuserver token create --ttl` sets how long it is good)"
    )]
    Expired,
    /// It pins an authority that the pool has replaced.
    #[error(
        "the join token is of before the rotation of the pool's authority; ask for a new one made by `gpuserver token create`"
    )]
    Rotated,
    /// It is for clients at other addresses.
    #[error(
        "the join token is not for clients at {0}; join from an address that it is for, or ask for one made by `gpuserver token create --from`"
    )]
    WrongAddress(String),
    /// Enough clients at this address have joined with it.
    #[error(
        "the join token has admitted as many clients at {0} as it may from one address; join from another one, or ask for a token without `--per-address`"
    )]
    AddressUsedUp(String),
    /// It is for a server.
    #[error("the token is for a server: `gpuserver pool join` takes it, and no client")]
    ForServer,
    /// It is for clients with other names.
    #[error("the join token is for clients named {pattern:?}, not for {name:?}; join with --name")]
    WrongName {
        /// Pattern of the acceptable names.
        pattern: String,
        /// Name with which the client wanted to join.
        name: String,
    },
}

/// Reason why a server is not admitted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotAdmitted {
    /// The token is not one of this issuer, or is for a client, or is not for this name and key.
    #[error(
        "the token admits no server of this name here: run `gpuserver pool admit {0}` on this issuer, and use its token \
         once"
    )]
    Unknown(String),
    /// It has admitted its server.
    #[error("the token has admitted server {0} already; `gpuserver pool admit {0}` makes a new one")]
    Used(String),
    /// Its validity has ended.
    #[error("the token for server {0} has expired; `gpuserver pool admit {0}` makes a new one")]
    Expired(String),
    /// It pins an authority that the pool has replaced.
    #[error(
        "the token for server {0} is of before the rotation of the pool's authority; `gpuserver pool admit {0}` makes a new \
         one"
    )]
    Rotated(String),
    /// It is for a server at other addresses.
    #[error(
        "the token for server {name} is not for a server at {from}; `gpuserver pool admit {name} --from NETWORK` makes \
         another one"
    )]
    WrongAddress {
        /// Name of the server.
        name: String,
        /// Address of the server.
        from: String,
    },
}

/// Outcome of the bounds that tokens of all kinds have.
enum Exhausted {
    Rotated,
    Expired,
    WrongAddress(String),
    UsedUp,
}

/// A token as `gpuserver token list` shows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenFacts {
    /// Public id, in hex.
    pub id: String,
    /// Pattern of the client names that can join with it.
    pub name_pattern: String,
    /// Number of clients that may still join with the token.
    pub uses_left: u32,
    /// Time of its creation, in seconds since 1970.
    pub created_unix: u64,
    /// End of its validity, in seconds since 1970.
    pub expires_unix: u64,
    /// Networks from which clients join; empty: from anywhere.
    #[serde(default)]
    pub from: Vec<IpNet>,
    /// Number of clients from one address; 0: no bound.
    #[serde(default)]
    pub per_address: u32,
}

impl TokenFacts {
    /// Describes a token.
    pub fn new(id: &str, record: &TokenRecord) -> Self {
        Self {
            id: id.into(),
            name_pattern: format!("{}{}", record.kind().0.word(), record.pattern),
            uses_left: record.uses_left,
            created_unix: record.created_unix,
            expires_unix: record.expires_unix,
            from: record.from.clone(),
            per_address: record.per_address,
        }
    }
}

impl TokenRecord {
    /// Returns the kind, and the rest of the hash.
    fn kind(&self) -> (TokenKind, &str) {
        let of = |kind: TokenKind| Some((kind, self.hash.strip_prefix(kind.begin())?));
        of(TokenKind::Server).or_else(|| of(TokenKind::Fleet)).unwrap_or((TokenKind::Client, &self.hash))
    }

    /// Returns the kind and the BLAKE3 of the secret, unless the record lost its bounds.
    fn key(&self) -> Option<(TokenKind, blake3::Hash)> {
        let (kind, rest) = self.kind();
        let bounded = rest.strip_prefix(BOUNDED);
        let lost = bounded.is_some() && self.from.is_empty() && self.per_address == 0;
        let key = blake3::Hash::from_hex(bounded.unwrap_or(rest)).ok()?;
        (!lost).then_some((kind, key))
    }

    /// Checks the bounds that tokens of all kinds have.
    fn bounds(&self, from: Option<IpAddr>, authority: &[u8; 32], unix: u64) -> Result<(), Exhausted> {
        if self.authority != HEXLOWER.encode(authority) {
            return Err(Exhausted::Rotated);
        }
        if unix >= self.expires_unix {
            return Err(Exhausted::Expired);
        }
        let inside = |address: &IpAddr| self.from.iter().any(|network| network.contains(address));
        if !self.from.is_empty() && !from.as_ref().is_some_and(inside) {
            let address = from.map_or_else(|| "an unknown address".into(), |address| address.to_string());
            return Err(Exhausted::WrongAddress(address));
        }
        if self.uses_left == 0 { Err(Exhausted::UsedUp) } else { Ok(()) }
    }
}

impl Exhausted {
    fn of_token(self, kind: TokenKind) -> TokenError {
        match (kind, self) {
            (TokenKind::Fleet, Self::Rotated) => FleetError::Rotated.into(),
            (TokenKind::Fleet, Self::Expired) => FleetError::Expired.into(),
            (TokenKind::Fleet, Self::WrongAddress(from)) => FleetError::WrongAddress(from).into(),
            (TokenKind::Fleet, Self::UsedUp) => FleetError::UsedUp.into(),
            (_, Self::Rotated) => TokenError::Rotated,
            (_, Self::Expired) => TokenError::Expired,
            (_, Self::WrongAddress(from)) => TokenError::WrongAddress(from),
            (_, Self::UsedUp) => TokenError::UsedUp,
        }
    }

    fn of_server(self, name: &str) -> NotAdmitted {
        let name = name.into();
        match self {
            Self::Rotated => NotAdmitted::Rotated(name),
            Self::Expired => NotAdmitted::Expired(name),
            Self::WrongAddress(from) => NotAdmitted::WrongAddress { name, from },
            Self::UsedUp => NotAdmitted::Used(name),
        }
    }
}

/// [`TokenFacts`] without addresses.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EarlierFacts {
    id: String,
    name_pattern: String,
    uses_left: u32,
    created_unix: u64,
    expires_unix: u64,
}

/// [`TokenRecord`] without addresses.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EarlierRecord {
    hash: String,
    pattern: String,
    uses_left: u32,
    expires_unix: u64,
    created_unix: u64,
    authority: String,
}

impl From<TokenFacts> for EarlierFacts {
    fn from(facts: TokenFacts) -> Self {
        let TokenFacts { id, name_pattern, uses_left, created_unix, expires_unix, .. } = facts;
        Self { id, name_pattern, uses_left, created_unix, expires_unix }
    }
}

impl From<EarlierFacts> for TokenFacts {
    fn from(facts: EarlierFacts) -> Self {
        let EarlierFacts { id, name_pattern, uses_left, created_unix, expires_unix } = facts;
        let (from, per_address) = (Vec::new(), 0);
        Self { id, name_pattern, uses_left, created_unix, expires_unix, from, per_address }
    }
}

impl From<EarlierRecord> for TokenRecord {
    fn from(record: EarlierRecord) -> Self {
        let EarlierRecord { hash, pattern, uses_left, expires_unix, created_unix, authority } = record;
        Self {
            hash,
            pattern,
            uses_left,
            expires_unix,
            created_unix,
            authority,
            from: Vec::new(),
            per_address: 0,
            joined: BTreeMap::new(),
        }
    }
}

/// All tokens of a pool, by id.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tokens {
    tokens: BTreeMap<String, TokenRecord>,
}

/// [`Tokens`] without addresses.
pub type EarlierTokens = BTreeMap<String, EarlierRecord>;

impl From<EarlierTokens> for Tokens {
    fn from(tokens: EarlierTokens) -> Self {
        Self { tokens: tokens.into_iter().map(|(id, record)| (id, record.into())).collect() }
    }
}

fn hash(secret: &[u8]) -> blake3::Hash {
    // The secret has 192 random bits: a plain hash of it cannot be searched.
    blake3::hash(secret)
}

impl Tokens {
    /// Creates a token; returns it and its record.
    pub fn create(
        &mut self,
        kind: TokenKind,
        authority: [u8; 32],
        terms: &Terms,
        unix: u64,
        random: &dyn Random,
    ) -> (JoinToken, TokenRecord) {
        let (begin, unbounded) = (kind.begin(), terms.from.is_empty() && terms.per_address == 0);
        let bounded = if unbounded { "" } else { BOUNDED };
        let token = JoinToken { authority, id: clock::bytes(random), secret: clock::bytes(random) };
        let record = TokenRecord {
            hash: format!("{begin}{bounded}{}", hash(&token.secret).to_hex()),
            pattern: terms.pattern.clone(),
            uses_left: terms.uses,
            expires_unix: unix.saturating_add(terms.ttl),
            created_unix: unix,
            authority: HEXLOWER.encode(&authority),
            from: terms.from.clone(),
            per_address: terms.per_address,
            joined: BTreeMap::new(),
        };
        // Expired tokens stay for a while, so that a refusal can give the reason.
        self.tokens.retain(|_, t| t.expires_unix + 30 * 24 * 3600 > unix);
        self.tokens.insert(HEXLOWER.encode(&token.id), record.clone());
        (token, record)
    }

    /// Returns at most `most` tokens by id, those after an id.
    pub fn list(&self, after: &str, most: usize) -> Vec<TokenFacts> {
        let rest = self.tokens.range::<str, _>((Bound::Excluded(after), Bound::Unbounded));
        let present = rest.filter(|(_, record)| record.hash != REVOKED);
        present.take(most).map(|(id, record)| TokenFacts::new(id, record)).collect()
    }

    /// Takes over tokens of another folder.
    pub fn extend(&mut self, more: Self) {
        self.tokens.extend(more.tokens);
    }

    /// Splits the tokens into parts, each with the length of at most `most` tokens, or one token.
    pub fn parts(self, most: usize) -> Vec<Self> {
        let mut parts: Vec<(usize, Self)> = Vec::new();
        for (id, record) in self.tokens {
            let names = record.joined.values().map(BTreeSet::len).sum::<usize>();
            let length = 1 + names / NAMES_OF_A_TOKEN;
            match parts.last_mut().filter(|(all, _)| all + length <= most) {
                Some((all, part)) => {
                    *all += length;
                    part.tokens.insert(id, record);
                }
                None => parts.push((length, Self { tokens: BTreeMap::from([(id, record)]) })),
            }
        }
        parts.into_iter().map(|(_, part)| part).collect()
    }

    /// Returns the tokens in the earlier form, if no address bounds any of them.
    pub fn earlier(self) -> Option<EarlierTokens> {
        let earlier = |record: TokenRecord| {
            let unbounded = record.from.is_empty() && record.per_address == 0;
            let TokenRecord { hash, pattern, uses_left, expires_unix, created_unix, authority, .. } = record;
            let earlier = EarlierRecord { hash, pattern, uses_left, expires_unix, created_unix, authority };
            unbounded.then_some(earlier)
        };
        self.tokens.into_iter().map(|(id, record)| Some((id, earlier(record)?))).collect()
    }

    /// Revokes the token whose id begins with `prefix`, and returns its id. `None`: no token does,
    /// or several do.
    ///
    /// Its record stays without the secret, so that a refusal can give the reason.
    pub fn revoke(&mut self, prefix: &str) -> Option<String> {
        let fits = |id: &str| !prefix.is_empty() && id.starts_with(prefix);
        let mut fit = self.tokens.iter_mut().filter(|(id, record)| fits(id) && record.hash != REVOKED);
        let (Some((id, record)), None) = (fit.next(), fit.next()) else { return None };
        record.hash = REVOKED.into();
        (record.uses_left, record.joined) = (0, BTreeMap::new());
        Some(id.clone())
    }

    /// Completes records of earlier versions by the authority of that time.
    pub fn complete(&mut self, authority: &str) {
        for record in self.tokens.values_mut().filter(|record| record.authority.is_empty()) {
            authority.clone_into(&mut record.authority);
        }
    }

    /// Checks whether the client `name` at `from` may join with `token`, without using it.
    ///
    /// The token has to pin `authority`, the one that signs certificates. An unknown address is in
    /// no network.
    pub fn check(
        &self,
        token: &JoinToken,
        name: &str,
        from: Option<IpAddr>,
        authority: &[u8; 32],
        unix: u64,
    ) -> Result<(), TokenError> {
        let record = self.tokens.get(&HEXLOWER.encode(&token.id)).ok_or(TokenError::Unknown)?;
        if record.hash == REVOKED {
            return Err(TokenError::Revoked);
        }
        let (kind, key) = record.key().ok_or(TokenError::Unknown)?;
        let (known, wrong) = match kind {
            TokenKind::Client | TokenKind::Server => (key, TokenError::Unknown),
            TokenKind::Fleet => {
                let derived = fleet_secret(key.as_bytes(), name);
                (hash(&derived), FleetError::NotDerived(name.into()).into())
            }
        };
        // Compared in constant time.
        if hash(&token.secret) != known {
            return Err(wrong);
        }
        if kind == TokenKind::Server {
            return Err(TokenError::ForServer);
        }
        record.bounds(from, authority, unix).map_err(|exhausted| exhausted.of_token(kind))?;
        if record.per_address > 0 {
            let place =
                from.map(place).ok_or_else(|| TokenError::WrongAddress("an unknown address".into()))?;
            let full = |names: &BTreeSet<u64>| names.len() >= record.per_address as usize;
            // A name that joins again takes no further place: the answer may have been lost.
            let another = |names: &&BTreeSet<u64>| !names.contains(&hash_of_name(name));
            if record.joined.get(&place).filter(another).is_some_and(full) {
                return Err(TokenError::AddressUsedUp(place));
            }
        }
        if !matches(&record.pattern, name) {
            let (pattern, name) = (record.pattern.clone(), name.into());
            return Err(match kind {
                TokenKind::Fleet => FleetError::WrongName { pattern, name }.into(),
                _ => TokenError::WrongName { pattern, name },
            });
        }
        Ok(())
    }

    /// Checks whether the server `name` at `from` has the token `id` for its certificate request.
    ///
    /// As [`Tokens::check`] does otherwise. `proof` is that of [`server_proof`].
    pub fn check_server(
        &self,
        (id, proof): (&[u8; 8], &[u8; 32]),
        (name, csr_pem): (&str, &str),
        from: Option<IpAddr>,
        authority: &[u8; 32],
        unix: u64,
    ) -> Result<(), NotAdmitted> {
        let unknown = || NotAdmitted::Unknown(name.into());
        let record = self.tokens.get(&HEXLOWER.encode(id)).ok_or_else(unknown)?;
        let key = record.key().filter(|(kind, _)| *kind == TokenKind::Server);
        let (_, key) = key.ok_or_else(unknown)?;
        // Compared in constant time.
        let proven = blake3::Hash::from_bytes(server_proof(key.as_bytes(), name, csr_pem))
            == blake3::Hash::from_bytes(*proof);
        if !proven || record.pattern != name {
            return Err(unknown());
        }
        record.bounds(from, authority, unix).map_err(|exhausted| exhausted.of_server(name))
    }

    /// Uses up a token for a server that was checked.
    pub fn consume_server(&mut self, id: &[u8; 8]) {
        if let Some(record) = self.tokens.get_mut(&HEXLOWER.encode(id)) {
            record.uses_left = record.uses_left.saturating_sub(1);
        }
    }

    /// Uses up a token that was checked.
    pub fn consume(&mut self, token: &JoinToken, name: &str, from: Option<IpAddr>) {
        let Some(record) = self.tokens.get_mut(&HEXLOWER.encode(&token.id)) else { return };
        record.uses_left = record.uses_left.saturating_sub(1);
        if let Some(from) = from.filter(|_| record.per_address > 0) {
            record.joined.entry(place(from)).or_default().insert(hash_of_name(name));
        }
    }
}

/// Returns a name's entry in a record, of one length.
fn hash_of_name(name: &str) -> u64 {
    let hash = blake3::hash(name.as_bytes());
    hash.as_bytes().first_chunk().copied().map_or(0, u64::from_le_bytes)
}

/// Returns the place of an address that counts as one: a host has a whole /64 of IPv6.
pub fn place(address: IpAddr) -> String {
    match address {
        IpAddr::V4(address) => address.to_string(),
        IpAddr::V6(address) => {
            let bits = u128::from(address) >> 64 << 64;
            format!("{}/64", Ipv6Addr::from(bits))
        }
    }
}

/// Returns `true` if a name fits a pattern of `*`, `?` and plain characters.
pub fn matches(pattern: &str, name: &str) -> bool {
    let (p, n) = (pattern.as_bytes(), name.as_bytes());
    let (mut i, mut j) = (0, 0);
    // Position of the last `*`, and the end of its match: the only place to backtrack to.
    let mut star: Option<(usize, usize)> = None;
    while j < n.len() {
        match p.get(i) {
            Some(b'*') => {
                star = Some((i, j));
                i += 1;
            }
            Some(c) if *c == b'?' || *c == n[j] => {
                i += 1;
                j += 1;
            }
            _ => match star {
                Some((at, from)) => {
                    star = Some((at, from + 1));
                    i = at + 1;
                    j = from + 1;
                }
                None => return false,
            },
        }
    }
    p[i..].iter().all(|c| *c == b'*')
}

#[cfg(test)]
mod tests {
    use gpusession_proto::join::FleetKey;
    use gpusession_proto::message;
    use proptest::prelude::*;

    use super::*;
    use crate::clock::testing::Counting;

    fn terms(pattern: &str, from: &[&str]) -> Terms {
        let from = from.iter().map(|network| network.parse().unwrap()).collect();
        Terms { pattern: pattern.into(), uses: 2, ttl: 60, from, per_address: 0 }
    }

    #[test]
    fn each_refusal_has_its_reason() {
        let (random, mut tokens) = (Counting::default(), Tokens::default());
        let (token, record) = tokens.create(TokenKind::Client, [1; 32], &terms("vm-*", &[]), 1000, &random);
        assert!(!format!("{record:?}").contains(&HEXLOWER.encode(&token.secret)));
        assert_eq!(tokens.check(&token, "vm-1", None, &[1; 32], 1000), Ok(()));
        assert!(matches!(
            tokens.check(&token, "db-1", None, &[1; 32], 1000),
            Err(TokenError::WrongName { .. })
        ));
        assert_eq!(tokens.check(&token, "vm-1", None, &[1; 32], 1060), Err(TokenError::Expired));
        let mut forged = token.clone();
        forged.secret[0] ^= 1;
        assert_eq!(tokens.check(&forged, "vm-1", None, &[1; 32], 1000), Err(TokenError::Unknown));
        assert_eq!(tokens.check(&token, "vm-1", None, &[2; 32], 1000), Err(TokenError::Rotated));
        let old = serde_json::to_string(&tokens).unwrap().replace(&"01".repeat(32), "");
        let mut old: Tokens = serde_json::from_str(&old).unwrap();
        old.complete(&"02".repeat(32));
        assert_eq!(old.check(&token, "vm-1", None, &[2; 32], 1000), Ok(()), "a record of an earlier version");
        tokens.consume(&token, "vm-1", None);
        assert_eq!(tokens.check(&token, "vm-2", None, &[1; 32], 1000), Ok(()));
        tokens.consume(&token, "vm-1", None);
        assert_eq!(tokens.check(&token, "vm-3", None, &[1; 32], 1000), Err(TokenError::UsedUp));
        assert_eq!(Tokens::default().check(&token, "vm-1", None, &[1; 32], 1000), Err(TokenError::Unknown));
    }

    #[test]
    fn a_token_is_good_from_its_networks_alone() {
        let (random, mut tokens) = (Counting::default(), Tokens::default());
        let bound = terms("*", &["10.1.0.0/16", "2001:db8::/32"]);
        let (token, _) = tokens.create(TokenKind::Client, [1; 32], &bound, 1000, &random);
        let stored = serde_json::to_string(&tokens).unwrap();
        let tokens: Tokens = serde_json::from_str(&stored).unwrap();
        let join = |from: Option<&str>| {
            let from = from.map(|address| address.parse().unwrap());
            tokens.check(&token, "vm-1", from, &[1; 32], 1000)
        };
        assert_eq!((join(Some("10.1.255.1")), join(Some("2001:db8::1"))), (Ok(()), Ok(())));
        for outside in ["10.2.0.1", "127.0.0.1", "2001:db9::1", "::ffff:10.1.0.1"] {
            assert_eq!(join(Some(outside)), Err(TokenError::WrongAddress(outside.into())));
        }
        assert!(matches!(join(None), Err(TokenError::WrongAddress(_))), "an unknown address");
    }

    #[test]
    fn a_token_that_lost_its_bounds_in_an_earlier_release_is_refused() {
        let (random, mut tokens) = (Counting::default(), Tokens::default());
        let by_address = Terms { per_address: 1, ..terms("*", &[]) };
        let networks = terms("*", &["10.1.0.0/16"]);
        for (kind, bound) in
            [(TokenKind::Client, &networks), (TokenKind::Client, &by_address), (TokenKind::Fleet, &networks)]
        {
            let (mut token, record) = tokens.create(kind, [1; 32], bound, 1000, &random);
            assert!(blake3::Hash::from_hex(&record.hash).is_err(), "an earlier release refuses it");
            if kind == TokenKind::Fleet {
                token = FleetKey { of_tokens: token, pattern: "*".into() }.token("vm-1");
            }
            let inside = Some("10.1.0.1".parse().unwrap());
            assert_eq!(tokens.check(&token, "vm-1", inside, &[1; 32], 1000), Ok(()));
            // It writes the record without the fields that it does not know.
            let id = HEXLOWER.encode(&token.id);
            let record = tokens.tokens.get_mut(&id).unwrap();
            (record.from, record.per_address) = (Vec::new(), 0);
            assert_eq!(tokens.check(&token, "vm-1", inside, &[1; 32], 1000), Err(TokenError::Unknown));
        }
    }

    #[test]
    fn earlier_releases_can_read_no_record_of_a_fleet_key_or_of_a_revoked_token() {
        let (random, mut tokens) = (Counting::default(), Tokens::default());
        let (token, record) = tokens.create(TokenKind::Fleet, [1; 32], &terms("*", &[]), 1000, &random);
        // They read the whole hash, or the one behind these.
        let unreadable = |hash: &str| {
            let rest = hash.strip_prefix(BOUNDED).or(hash.strip_prefix("server:")).unwrap_or(hash);
            blake3::Hash::from_hex(rest).is_err()
        };
        assert!(unreadable(&record.hash));
        let id = HEXLOWER.encode(&token.id);
        assert_eq!(tokens.revoke(&id), Some(id.clone()));
        let revoked = &tokens.tokens[&id];
        assert!(unreadable(&revoked.hash) && revoked.uses_left == 0, "{revoked:?}");
        // The reason of the refusal stays as long as that of an expired token.
        tokens.create(TokenKind::Client, [1; 32], &terms("*", &[]), 1060 + 30 * 24 * 3600, &random);
        assert_eq!(tokens.check(&token, "vm-1", None, &[1; 32], 1000), Err(TokenError::Unknown));
    }

    #[test]
    fn a_token_admits_no_more_clients_from_one_address_than_it_may() {
        let (random, mut tokens) = (Counting::default(), Tokens::default());
        let bound = Terms { uses: 9, per_address: 2, ..terms("*", &[]) };
        let (token, _) = tokens.create(TokenKind::Client, [1; 32], &bound, 1000, &random);
        let join = |tokens: &mut Tokens, name: &str, from: Option<&str>| {
            let from = from.map(|address| address.parse().unwrap());
            tokens.check(&token, name, from, &[1; 32], 1000)?;
            tokens.consume(&token, name, from);
            Ok(())
        };
        for same in [["10.0.0.1"; 3], ["2001:db8::1", "2001:db8::2", "2001:db8::ff:0:0:3"]] {
            assert_eq!(join(&mut tokens, "vm-1", Some(same[0])), Ok(()));
            assert_eq!(join(&mut tokens, "vm-2", Some(same[1])), Ok(()));
            let stored = serde_json::to_string(&tokens).unwrap();
            tokens = serde_json::from_str(&stored).unwrap();
            assert!(matches!(join(&mut tokens, "vm-3", Some(same[2])), Err(TokenError::AddressUsedUp(_))));
            assert_eq!(join(&mut tokens, "vm-2", Some(same[2])), Ok(()), "the answer was lost");
        }
        assert_eq!(join(&mut tokens, "vm-3", Some("10.0.0.2")), Ok(()));
        assert_eq!(join(&mut tokens, "vm-3", Some("2001:db8:0:1::1")), Ok(()), "another /64");
        assert!(matches!(join(&mut tokens, "vm-4", None), Err(TokenError::WrongAddress(_))));
    }

    #[test]
    fn a_token_for_a_server_admits_one_server_of_its_name_and_no_client() {
        use gpusession_proto::join::ServerToken;
        let (random, mut tokens) = (Counting::default(), Tokens::default());
        let here = Terms { uses: 1, ..terms("gpu2", &["10.1.0.0/16"]) };
        let (token, record) = tokens.create(TokenKind::Server, [1; 32], &here, 1000, &random);
        assert_eq!(TokenFacts::new("x", &record).name_pattern, "server gpu2");
        assert!(blake3::Hash::from_hex(&record.hash).is_err(), "an earlier release refuses it");
        let stored = serde_json::to_string(&tokens).unwrap();
        let mut tokens: Tokens = serde_json::from_str(&stored).unwrap();
        let inside = Some("10.1.0.1".parse().unwrap());
        assert_eq!(tokens.check(&token, "gpu2", inside, &[1; 32], 1000), Err(TokenError::ForServer));
        let of_server = ServerToken(token.clone());
        let (id, unknown) = (&token.id, Err(NotAdmitted::Unknown("gpu2".into())));
        let check = |tokens: &Tokens, from, authority: u8, unix| {
            let proof = of_server.proof("gpu2", "csr");
            tokens.check_server((id, &proof), ("gpu2", "csr"), from, &[authority; 32], unix)
        };
        assert_eq!(check(&tokens, inside, 1, 1000), Ok(()));
        let proof = of_server.proof("gpu3", "csr");
        let other = tokens.check_server((id, &proof), ("gpu3", "csr"), inside, &[1; 32], 1000);
        assert_eq!(other, Err(NotAdmitted::Unknown("gpu3".into())));
        let proof = of_server.proof("gpu2", "csr");
        for (proof, csr) in [(proof, "another"), ([0; 32], "csr")] {
            assert_eq!(tokens.check_server((id, &proof), ("gpu2", csr), inside, &[1; 32], 1000), unknown);
        }
        assert_eq!(check(&tokens, inside, 2, 1000), Err(NotAdmitted::Rotated("gpu2".into())));
        assert_eq!(check(&tokens, inside, 1, 1060), Err(NotAdmitted::Expired("gpu2".into())));
        for outside in [None, Some("10.2.0.1".parse().unwrap())] {
            assert!(matches!(check(&tokens, outside, 1, 1000), Err(NotAdmitted::WrongAddress { .. })));
        }
        tokens.consume_server(id);
        assert_eq!(check(&tokens, inside, 1, 1000), Err(NotAdmitted::Used("gpu2".into())));
        // A client's token, whatever its pattern, admits no server.
        let (client, _) = tokens.create(TokenKind::Client, [1; 32], &terms("gpu2", &[]), 1000, &random);
        let proof = ServerToken(client.clone()).proof("gpu2", "csr");
        assert_eq!(tokens.check_server((&client.id, &proof), ("gpu2", "csr"), None, &[1; 32], 1000), unknown);
    }

    #[test]
    fn tokens_travel_in_parts_that_a_message_holds() {
        let (random, mut tokens) = (Counting::default(), Tokens::default());
        for n in 0..150 {
            let bound = Terms { uses: MAX_BY_ADDRESS, per_address: 1, ..terms(&format!("vm-{n}-*"), &[]) };
            let (token, _) = tokens.create(TokenKind::Client, [1; 32], &bound, 1000, &random);
            let joined = if n == 70 { MAX_BY_ADDRESS } else { 40 };
            for at in 0..u128::from(joined) {
                let address = (0x2001_0db8 << 96) + ((u128::from(u32::MAX) - at) << 64);
                tokens.consume(&token, &format!("vm-{n}-{at}"), Some(Ipv6Addr::from(address).into()));
            }
        }
        let parts = tokens.clone().parts(100);
        assert!(parts.iter().all(|part| message::encode(part).len() < message::MAX_MESSAGE));
        let mut together = Tokens::default();
        parts.into_iter().for_each(|part| together.extend(part));
        assert_eq!(together, tokens);
    }

    #[test]
    fn patterns() {
        for (pattern, name, fits) in [
            ("*", "a", true),
            ("vm-?", "vm-1", true),
            ("vm-?", "vm-12", false),
            ("vm-*", "vm-", true),
            ("*-lab", "a-lab-b-lab", true),
            ("a*b*c", "aXbYbZc", true),
            ("a*b*c", "aXbYbZ", false),
            ("", "", true),
            ("", "a", false),
        ] {
            assert_eq!(matches(pattern, name), fits, "{pattern} {name}");
        }
    }

    proptest! {
        #[test]
        fn matching_is_bounded_and_literal_names_match_themselves(pattern in "[ab*?]{0,12}", name in "[ab]{0,12}") {
            let _ = matches(&pattern, &name);
            prop_assert!(matches(&name, &name));
            let starred = format!("{name}*");
            prop_assert!(matches(&starred, &name));
        }
    }
}
