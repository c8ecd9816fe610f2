//! Requests to the signer, and its answers.

use std::net::IpAddr;

use gpusession_proto::join::JoinToken;
use gpusession_proto::statement::Verdict;
use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::authorities::{Described, NotRotated, Phase};
use super::ca::{AuthorityError, Issued};
use super::tokens::{EarlierFacts, EarlierTokens, NotAdmitted, Terms, TokenError, TokenFacts, Tokens};
use crate::checkpoint::{Checkpoint, Place, Verifier};
use crate::store::StoreError;

/// User of the signer's own process.
pub const USER: &str = "gpuserver-ca";

/// Begin of a signer's refusal of a message that it cannot read, in all releases.
pub(super) const UNREAD: &str = "the signer does not know this request";

/// A request to the signer.
///
/// Server and signer may be of two releases: a variant keeps its place and its fields, and a new
/// form follows at the end (`earlier.rs`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Operation {
    /// Describe the authorities.
    Present,
    /// Sign a certificate of this server.
    Server {
        /// Name of this server; the signer knows it from root.
        name: String,
        /// Certificate request (PEM).
        csr_pem: String,
        /// SHA-256 of the authority that signs.
        authority: [u8; 32],
    },
    /// [`Operation::Check`] without an address.
    EarlierCheck {
        /// Id of the token.
        id: [u8; 8],
        /// Secret of the token.
        secret: [u8; 24],
        /// Name of the client.
        name: String,
    },
    /// [`Operation::Join`] without an address.
    EarlierJoin {
        /// Id of the token.
        id: [u8; 8],
        /// Secret of the token.
        secret: [u8; 24],
        /// Name of the client.
        name: String,
        /// Certificate request (PEM).
        csr_pem: String,
        /// Whether the client renews its certificate.
        renews: bool,
    },
    /// Sign a newer certificate of a client.
    Renew {
        /// Its present certificate (DER).
        present: Vec<u8>,
        /// Certificate request (PEM).
        csr_pem: String,
        /// SHA-256 of the authority that signs.
        authority: [u8; 32],
    },
    /// Do what needs root, or root's permission.
    Privileged(Privileged),
    /// Allow the server a privileged operation, once and within a minute.
    Permit(Privileged),
    /// [`Operation::TokenCreate`] without addresses.
    EarlierTokenCreate {
        /// Pattern of the client names.
        pattern: String,
        /// Number of clients.
        uses: u32,
        /// Lifetime in seconds.
        ttl: u64,
    },
    /// [`Operation::Tokens`] without addresses in the answer.
    EarlierTokens {
        /// Last id of the answer before; empty: from the first.
        after: String,
    },
    /// Revoke the join token whose id begins so.
    TokenRevoke {
        /// Token id or its start.
        id: String,
    },
    /// Create the authority of a new pool.
    Init {
        /// Name of this server, which becomes a part of the authority's.
        name: String,
    },
    /// Store the authorities that another server exported.
    Import {
        /// Output of `pool export`.
        exported: String,
    },
    /// Return the authorities with their keys.
    Export,
    /// Learn the name of this server.
    Name(String),
    /// [`Operation::AdoptTokens`] without addresses.
    EarlierAdoptTokens(EarlierTokens),
    /// Take over the authorities that the server itself had.
    Adopt {
        /// As the output of `pool export`.
        exported: String,
        /// Phase of their rotation, and its begin in seconds since 1970.
        rotation: Option<(Phase, u64)>,
    },
    /// Check a join token, without using it.
    Check {
        /// Id of the token.
        id: [u8; 8],
        /// Secret of the token.
        secret: [u8; 24],
        /// Name of the client.
        name: String,
        /// Address of the client, by the server's word.
        from: Option<IpAddr>,
    },
    /// Use up a join token once, and sign the certificate of a new client.
    Join {
        /// Id of the token.
        id: [u8; 8],
        /// Secret of the token.
        secret: [u8; 24],
        /// Name of the client.
        name: String,
        /// Certificate request (PEM).
        csr_pem: String,
        /// Whether the client renews its certificate.
        renews: bool,
        /// Address of the client, by the server's word.
        from: Option<IpAddr>,
    },
    /// Create a join token.
    TokenCreate(Terms),
    /// List join tokens by id, those after one.
    Tokens {
        /// Last id of the answer before; empty: from the first.
        after: String,
    },
    /// Take over join tokens, before the authorities.
    AdoptTokens(Tokens),
    /// Sign a statement about a client or an administrator.
    State {
        /// Subject.
        verdict: Verdict,
        /// Its turn, by the server's word.
        turn: u32,
    },
    /// Sign statements of the pool again, with the authority that signs now.
    StateAgain {
        /// Statements with their signatures, [`RESTATED`] at most.
        signed: Vec<Vec<u8>>,
    },
    /// Sign a place in the audit trail.
    Checkpoint(Place),
    /// Describe how to verify the audit trail.
    Verifier,
    /// Sign the first certificate of a server that root has admitted.
    JoinServer {
        /// Id of the token.
        id: [u8; 8],
        /// Proof that the server has the token's secret, made of its name and its request.
        proof: [u8; 32],
        /// Name of the server.
        name: String,
        /// Certificate request (PEM).
        csr_pem: String,
        /// Address of the server, by the issuer's word.
        from: Option<IpAddr>,
    },
    /// Sign a newer certificate of a server that holds no authority.
    RenewServer {
        /// Its present certificate (DER), which names it.
        present: Vec<u8>,
        /// Certificate request (PEM).
        csr_pem: String,
        /// SHA-256 of the authority that signs.
        authority: [u8; 32],
        /// Signature of the present certificate's key over request and authority.
        proof: Vec<u8>,
    },
    /// [`Operation::State`] for a server that holds no authority.
    StateFor {
        /// Its present certificate (DER), which names it.
        present: Vec<u8>,
        /// Subject.
        verdict: Verdict,
        /// Its turn, by the server's word.
        turn: u32,
        /// Signature of the present certificate's key over subject and turn.
        proof: Vec<u8>,
    },
    /// Describe the authorities to servers that hold none.
    Bundle,
    /// [`Operation::Renew`] for a client that has signed its request.
    RenewProven {
        /// Its present certificate (DER).
        present: Vec<u8>,
        /// Certificate request (PEM).
        csr_pem: String,
        /// SHA-256 of the authority that signs.
        authority: [u8; 32],
        /// Signature of the present certificate's key over the request.
        proof: Vec<u8>,
    },
    /// Remove the authorities with their keys, and the join tokens, of a server that has become a
    /// member.
    GiveUp,
    /// Create a fleet key.
    FleetCreate(Terms),
}

/// Most statements that the signer signs again in one operation: a message holds as many.
pub const RESTATED: usize = 64;

/// An operation that root may permit to the server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Privileged {
    /// Sign an administrator's certificate.
    Administrator {
        /// Name of the administrator.
        name: String,
        /// Certificate request (PEM).
        csr_pem: String,
    },
    /// Take a step of a rotation.
    Rotate(Step),
    /// Sign the statement that revokes a server.
    RevokeServer {
        /// Name of the server.
        name: String,
    },
    /// Make a token that admits a server to the pool.
    AdmitServer {
        /// Name of the server.
        name: String,
        /// Lifetime in seconds.
        ttl: u64,
        /// Networks from which the server joins; empty: from anywhere.
        from: Vec<IpNet>,
    },
}

/// A step of a rotation of the authority.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Step {
    /// Make the new authority, or take it from the export of another server.
    Begin(Option<String>),
    /// Let the new authority sign.
    Switch,
    /// Drop the old authority.
    Finish,
    /// Drop the new authority.
    Abort,
}

impl Operation {
    /// Returns the operation by which a client joins with a token.
    pub fn join(token: &JoinToken, name: &str, from: Option<IpAddr>, csr_pem: &str, renews: bool) -> Self {
        let JoinToken { id, secret, .. } = token;
        let (name, csr_pem) = (name.into(), csr_pem.into());
        Self::Join { id: *id, secret: *secret, name, csr_pem, renews, from }
    }

    /// Returns the operation that checks a token.
    pub fn check(token: &JoinToken, name: &str, from: Option<IpAddr>) -> Self {
        Self::Check { id: token.id, secret: token.secret, name: name.into(), from }
    }

    /// Returns `true` if the operation needs root.
    ///
    /// The others are those for which clients and administrators call the server, and what root
    /// has permitted.
    pub fn needs_root(&self) -> bool {
        match self {
            Self::Present
            | Self::Server { .. }
            | Self::EarlierCheck { .. }
            | Self::Check { .. }
            | Self::EarlierJoin { .. }
            | Self::Join { .. }
            | Self::Renew { .. }
            | Self::Privileged(_)
            | Self::EarlierTokenCreate { .. }
            | Self::TokenCreate(_)
            | Self::EarlierTokens { .. }
            | Self::Tokens { .. }
            | Self::TokenRevoke { .. }
            | Self::State { .. }
            | Self::StateAgain { .. }
            | Self::Checkpoint(_)
            | Self::Verifier
            | Self::JoinServer { .. }
            | Self::RenewServer { .. }
            | Self::StateFor { .. }
            | Self::Bundle
            | Self::RenewProven { .. }
            | Self::FleetCreate(_) => false,
            Self::Permit(_)
            | Self::Init { .. }
            | Self::Import { .. }
            | Self::Export
            | Self::Name(_)
            | Self::EarlierAdoptTokens(_)
            | Self::AdoptTokens(_)
            | Self::Adopt { .. }
            | Self::GiveUp => true,
        }
    }
}

/// Result of an operation; its variants keep their places, as those of [`Operation`] do.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Done {
    /// No result.
    Nothing,
    /// Whether the operation changed anything.
    Changed(bool),
    /// Certificates and rotation of the authorities, for [`Operation::Present`].
    Present(Described),
    /// A certificate that was signed just now.
    Issued(Issued),
    /// [`Done::Token`] without addresses.
    EarlierToken {
        /// Public id.
        id: [u8; 8],
        /// Secret.
        secret: [u8; 24],
        /// SHA-256 of the authority that it pins.
        authority: [u8; 32],
        /// Its facts in lists.
        facts: EarlierFacts,
    },
    /// [`Done::Tokens`] without addresses.
    EarlierTokens(Vec<EarlierFacts>),
    /// Id of the token that was revoked, if one token fits.
    Revoked(Option<String>),
    /// Certificates and keys.
    Exported(String),
    /// SHA-256 of the authority.
    Authority([u8; 32]),
    /// A new token or fleet key, with its facts.
    Token {
        /// Public id.
        id: [u8; 8],
        /// Secret.
        secret: [u8; 24],
        /// SHA-256 of the authority that it pins.
        authority: [u8; 32],
        /// Its facts in lists.
        facts: TokenFacts,
    },
    /// Some tokens by id; none: the list has ended.
    Tokens(Vec<TokenFacts>),
    /// Signed statements.
    Stated(Vec<Vec<u8>>),
    /// A signature over a place in the audit trail.
    Checkpoint(Checkpoint),
    /// Key and latest place of such signatures.
    Verifier(Verifier),
    /// An encoded [`super::bundle::Bundle`].
    Bundle(Vec<u8>),
}

/// The signer's answer to an operation.
pub type Outcome = Result<Done, Refused>;

/// Kind of a refusal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Why {
    /// The signer holds no authority.
    Missing,
    /// The signer holds an authority already.
    Exists,
    /// A certificate request or certificate is unusable.
    Request,
    /// The join token is not accepted.
    Token,
    /// The step does not follow the present phase of the rotation.
    Phase,
    /// The text is no export, or of another pool.
    Import,
    /// The caller lacks the right.
    Right,
    /// Too many signatures at a time.
    Busy,
    /// A file or a certificate is at fault.
    Failed,
    /// The signer does not answer.
    Away,
    /// This server holds no authority, and no issuer of the pool answers.
    Issuers,
    /// This server holds no authority, and the operation is an issuer's.
    NoIssuer,
}

/// Reason why an operation was not done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{text}")]
pub struct Refused {
    /// Kind.
    pub why: Why,
    /// Explanation for people.
    pub text: String,
}

impl Refused {
    /// Creates a refusal.
    pub fn new(why: Why, text: impl Into<String>) -> Self {
        Self { why, text: text.into() }
    }
}

impl From<AuthorityError> for Refused {
    fn from(e: AuthorityError) -> Self {
        let why = match &e {
            AuthorityError::Missing(_) => Why::Missing,
            AuthorityError::Exists(_) => Why::Exists,
            AuthorityError::Import(_) => Why::Import,
            AuthorityError::Request(_) => Why::Request,
            AuthorityError::Unusable { .. }
            | AuthorityError::Store(_)
            | AuthorityError::Certificate(_)
            | AuthorityError::Tls(_) => Why::Failed,
        };
        Self::new(why, e.to_string())
    }
}

impl From<NotRotated> for Refused {
    fn from(e: NotRotated) -> Self {
        match e {
            NotRotated::NotBegun | NotRotated::Switched | NotRotated::NotSwitched => {
                Self::new(Why::Phase, e.to_string())
            }
            NotRotated::Foreign => Self::new(Why::Import, e.to_string()),
            NotRotated::Authority(e) => e.into(),
        }
    }
}

impl From<StoreError> for Refused {
    fn from(e: StoreError) -> Self {
        Self::new(Why::Failed, e.to_string())
    }
}

impl From<TokenError> for Refused {
    fn from(e: TokenError) -> Self {
        Self::new(Why::Token, e.to_string())
    }
}

impl From<NotAdmitted> for Refused {
    fn from(e: NotAdmitted) -> Self {
        Self::new(Why::Token, e.to_string())
    }
}
