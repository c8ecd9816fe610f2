//! Messages in the form of the release before, in which a server and its signer may speak.
//!
//! An upgrade restarts the two at different times, and postcard has no names of fields: a message
//! with a further field is another message. So a changed message is a new variant at the end, and
//! the first form keeps its place.

use super::operation::{Done, Operation};
use super::tokens::Terms;

impl Operation {
    /// Returns the operation in the form that a signer of the release before knows.
    ///
    /// `None`: it has the same form, or the signer cannot do it. Such a signer has no token that an
    /// address bounds, so it needs no address.
    pub(super) fn earlier(&self) -> Option<Self> {
        Some(match self.clone() {
            Self::Check { id, secret, name, .. } => Self::EarlierCheck { id, secret, name },
            Self::Join { id, secret, name, csr_pem, renews, .. } => {
                Self::EarlierJoin { id, secret, name, csr_pem, renews }
            }
            Self::TokenCreate(Terms { pattern, uses, ttl, from, per_address: 0 }) if from.is_empty() => {
                Self::EarlierTokenCreate { pattern, uses, ttl }
            }
            Self::Tokens { after } => Self::EarlierTokens { after },
            Self::AdoptTokens(tokens) => Self::EarlierAdoptTokens(tokens.earlier()?),
            // Such a signer takes the server's word that the client has the key.
            Self::RenewProven { present, csr_pem, authority, .. } => {
                Self::Renew { present, csr_pem, authority }
            }
            _ => return None,
        })
    }

    /// Returns the operation in its present form, and whether it came in the earlier one.
    ///
    /// A server of the release before tells no address, which is then unknown.
    pub(super) fn present(self) -> (Self, bool) {
        let present = match self {
            Self::EarlierCheck { id, secret, name } => Self::Check { id, secret, name, from: None },
            Self::EarlierJoin { id, secret, name, csr_pem, renews } => {
                Self::Join { id, secret, name, csr_pem, renews, from: None }
            }
            Self::EarlierTokenCreate { pattern, uses, ttl } => {
                Self::TokenCreate(Terms { pattern, uses, ttl, from: Vec::new(), per_address: 0 })
            }
            Self::EarlierTokens { after } => Self::Tokens { after },
            Self::EarlierAdoptTokens(tokens) => Self::AdoptTokens(tokens.into()),
            present => return (present, false),
        };
        (present, true)
    }
}

impl Done {
    /// Returns the result in the earlier form.
    pub(super) fn earlier(self) -> Self {
        match self {
            Self::Token { id, secret, authority, facts } => {
                Self::EarlierToken { id, secret, authority, facts: facts.into() }
            }
            Self::Tokens(tokens) => Self::EarlierTokens(tokens.into_iter().map(Into::into).collect()),
            same => same,
        }
    }

    /// Returns the result in its present form.
    pub(super) fn present(self) -> Self {
        match self {
            Self::EarlierToken { id, secret, authority, facts } => {
                Self::Token { id, secret, authority, facts: facts.into() }
            }
            Self::EarlierTokens(tokens) => Self::Tokens(tokens.into_iter().map(Into::into).collect()),
            same => same,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::path::Path;
    use std::sync::Arc;

    use data_encoding::HEXLOWER;
    use gpusession_proto::join::JoinToken;
    use gpusession_proto::message;
    use rcgen::{CertificateParams, KeyPair};

    use super::super::keeper::{Caller, Keeper, Places};
    use super::super::link::Link;
    use super::super::operation::{Outcome, Why};
    use super::super::socket;
    use super::*;
    use crate::clock::SystemRandom;
    use crate::clock::testing::TestClock;
    use crate::peer::Served;

    // Bodies of messages as the last release without networks of tokens wrote them (98eb016b).
    const ID: &str = "0101010101010101";
    const SECRET: &str = "020202020202020202020202020202020202020202020202";
    /// `Check` of `vm-1`.
    const CHECK: &str = "02{ID}{SECRET}04766d2d31";
    /// `Join` of `vm-1` with the request `csr`, and its length without the request's.
    const JOIN: &str = "03{ID}{SECRET}04766d2d310363737201";
    const TO_REQUEST: usize = 38;
    /// `TokenCreate` for two clients `vm-*` and 60 s.
    const TOKEN_CREATE: &str = "0704766d2d2a023c";
    /// `Tokens` from the first.
    const TOKENS: &str = "0800";
    /// `AdoptTokens` of one token `ab`.
    const ADOPT_TOKENS: &str = "0e0102616202686804766d2d2a02a408e8070161";
    /// Result `Nothing`.
    const NOTHING: &str = "0000";
    /// Result `Tokens` with one token.
    const LISTED: &str = "00050102616204766d2d2a02e807a408";
    /// Refusal of a message that the signer could not read.
    const UNKNOWN: &str = "010238746865207369676e657220646f6573206e6f74206b6e6f77207468697320726571756573743a206d616c666f726d6564206d657373616765";

    /// Returns the recorded bytes.
    fn recorded(text: &str) -> Vec<u8> {
        let text = text.replace("{ID}", ID).replace("{SECRET}", SECRET);
        HEXLOWER.decode(text.as_bytes()).unwrap()
    }

    fn csr() -> String {
        let key = KeyPair::generate().unwrap();
        CertificateParams::new(vec![]).unwrap().serialize_request(&key).unwrap().pem().unwrap()
    }

    fn send(socket: &mut UnixStream, body: &[u8]) {
        socket.write_all(&(body.len() as u32).to_le_bytes()).unwrap();
        socket.write_all(body).unwrap();
    }

    fn receive(socket: &mut UnixStream) -> Vec<u8> {
        let mut length = [0; 4];
        socket.read_exact(&mut length).unwrap();
        let mut body = vec![0; u32::from_le_bytes(length) as usize];
        socket.read_exact(&mut body).unwrap();
        body
    }

    /// A signer of this release.
    struct Signer(Keeper, #[expect(dead_code, reason = "it deletes the folder")] tempfile::TempDir);

    impl Signer {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let clock = Arc::new(TestClock::default());
            let keeper = Keeper::open(Places::own(folder.path()), clock, Arc::new(SystemRandom)).unwrap();
            keeper.perform(Caller::Root, Operation::Init { name: "gpu1".into() }).unwrap();
            Self(keeper, folder)
        }

        /// Answers the bytes of a request.
        fn answer(&self, request: &[u8]) -> Vec<u8> {
            let (mut ours, theirs) = UnixStream::pair().unwrap();
            send(&mut ours, request);
            let served = Served { uid: nix::unistd::geteuid().as_raw(), unit: None };
            socket::answer(theirs, &self.0, &served).unwrap();
            receive(&mut ours)
        }
    }

    #[test]
    fn a_server_of_the_release_before_has_its_clients_join() {
        let signer = Signer::new();
        // It creates a token, and reads the answer to the last byte.
        let made = signer.answer(&recorded(TOKEN_CREATE));
        let facts = made.strip_prefix(&[0, 4]).expect("a token").split_at(8 + 24 + 32);
        let ((id, secret), rest) = (facts.0[..32].split_at(8), facts.1);
        let shown = [&[16], HEXLOWER.encode(id).as_bytes(), &recorded("04766d2d2a02")].concat();
        let times = rest.strip_prefix(&*shown).expect("its id, pattern and uses");
        let (created, expires) = message::decode::<(u64, u64)>(times).expect("two times, and no more");
        assert_eq!(expires - created, 60);

        let with = |recorded: &[u8]| [&recorded[..1], id, secret, &recorded[33..]].concat();
        assert_eq!(signer.answer(&with(&recorded(CHECK))), recorded(NOTHING));
        assert_eq!(signer.answer(&recorded(CHECK))[..2], [1, 3], "another token is refused");
        let csr = message::encode(&csr());
        let join = with(&recorded(JOIN)[..TO_REQUEST]);
        let joined = signer.answer(&[&*join, &csr[4..], &[1]].concat());
        assert_eq!(joined[..2], [0, 3], "a certificate: {}", String::from_utf8_lossy(&joined));

        let listed = signer.answer(&recorded(TOKENS));
        assert_eq!(listed[..3], [0, 5, 1], "a list of one");
        assert!(listed.len() < 64, "without networks");
        assert_eq!(signer.answer(&recorded(ADOPT_TOKENS)), recorded(NOTHING));
        assert_eq!(signer.answer(&recorded(TOKENS))[..3], [0, 5, 2]);
    }

    #[test]
    fn a_server_of_the_release_before_joins_nobody_with_a_token_for_some_addresses() {
        let signer = Signer::new();
        let from = vec!["10.0.0.0/8".parse().unwrap()];
        let terms = Terms { pattern: "*".into(), uses: 2, ttl: 60, from, per_address: 0 };
        let made = signer.0.perform(Caller::Root, Operation::TokenCreate(terms));
        let Ok(Done::Token { id, secret, .. }) = made else { panic!("{made:?}") };
        let check = [&[2], &id[..], &secret, b"\x04vm-1"].concat();
        let refused = String::from_utf8_lossy(&signer.answer(&check)).into_owned();
        assert!(refused.contains("not for clients at an unknown address"), "{refused}");
    }

    /// Runs a signer that knows these messages alone.
    fn earlier_signer(path: &Path, knows: &[(&str, &str)]) {
        let listener = UnixListener::bind(path).unwrap();
        let knows: Vec<_> = knows.iter().map(|(asked, said)| (recorded(asked), recorded(said))).collect();
        std::thread::spawn(move || {
            for mut socket in listener.incoming().flatten() {
                let asked = receive(&mut socket);
                let known = knows.iter().find(|(known, _)| asked == *known);
                send(&mut socket, &known.map_or_else(|| recorded(UNKNOWN), |(_, said)| said.clone()));
            }
        });
    }

    #[test]
    fn a_signer_of_the_release_before_is_asked_in_its_form() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sign.sock");
        let knows = [
            (CHECK, NOTHING),
            (JOIN, NOTHING),
            (TOKEN_CREATE, NOTHING),
            (TOKENS, LISTED),
            (ADOPT_TOKENS, NOTHING),
        ];
        earlier_signer(&path, &knows);
        let link = Link::Socket(path);
        let token = JoinToken { authority: [0; 32], id: [1; 8], secret: [2; 24] };
        let from = Some("10.0.0.1".parse().unwrap());
        let nothing = |asked: Outcome| matches!(asked, Ok(Done::Nothing));
        assert!(nothing(link.ask(Operation::check(&token, "vm-1", from))));
        assert!(nothing(link.ask(Operation::join(&token, "vm-1", from, "csr", true))));
        let terms = Terms { pattern: "vm-*".into(), uses: 2, ttl: 60, from: Vec::new(), per_address: 0 };
        assert!(nothing(link.ask(Operation::TokenCreate(terms.clone()))));
        // Such a signer would forget the bounds.
        let networks = vec!["10.0.0.0/8".parse().unwrap()];
        for wider in [Terms { from: networks, ..terms.clone() }, Terms { per_address: 1, ..terms.clone() }] {
            assert_eq!(link.ask(Operation::TokenCreate(wider)).unwrap_err().why, Why::Request);
        }
        assert_eq!(link.ask(Operation::FleetCreate(terms)).unwrap_err().why, Why::Request);
        let listed = link.ask(Operation::Tokens { after: String::new() });
        let Ok(Done::Tokens(listed)) = listed else { panic!("{listed:?}") };
        assert_eq!((listed[0].id.as_str(), listed[0].expires_unix), ("ab", 1060));
        let adopted = message::decode::<Operation>(&recorded(ADOPT_TOKENS)).unwrap().present().0;
        assert!(nothing(link.ask(adopted)));
    }
}
