//! The statements that a server has taken: a set in which the order of arrival does not matter.
//!
//! Of statements with one verdict the set keeps the one with the greatest rank. So names and
//! identities bound its size, and each server of a pool ends with the same set.

use std::collections::{BTreeMap, HashMap, HashSet};

use gpusession_proto::statement::{Signed, Statement, Verdict};
use serde::{Deserialize, Serialize, Serializer};

/// Most statements of one server's signer: a server that was taken over makes no more.
pub const MAX_OF_SERVER: usize = 4096;
/// Most statements of all servers.
pub const MAX_STATEMENTS: usize = 16 * MAX_OF_SERVER;
/// Most statements of one answer to another server.
pub const PAGE: usize = 256;

/// A statement that the set keeps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kept {
    /// Statement with its signature, as other servers get it.
    pub signed: Signed,
    /// Statement.
    pub statement: Statement,
    /// Place in the order of arrival.
    place: u64,
}

/// Outcome of taking a statement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Taken {
    /// The set has changed, and may refuse more than before.
    New,
    /// The set has the statement; its signature may be newer now.
    Known,
    /// Its server has too many statements, or all servers have.
    Full,
}

/// Standing of a client's name by all statements about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClientStanding {
    /// No statement names it.
    Free,
    /// The name is refused.
    Revoked {
        /// Latest revocation, in seconds since 1970.
        unix: u64,
    },
    /// Certificates issued up to this time are refused.
    Forgotten {
        /// Latest time, in seconds since 1970.
        unix: u64,
    },
}

/// All statements of a pool that a server has taken.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(try_from = "Document")]
pub struct Statements {
    kept: BTreeMap<Verdict, Kept>,
    /// Verdicts in the order of arrival.
    order: BTreeMap<u64, Verdict>,
    of_server: HashMap<String, usize>,
    identities: HashSet<[u8; 32]>,
    /// Place of the latest arrival.
    last: u64,
}

/// The file: a statement on each line, in the order of arrival.
#[derive(Default, Serialize, Deserialize)]
struct Document {
    #[serde(default)]
    statements: Vec<String>,
}

impl TryFrom<Document> for Statements {
    type Error = String;

    fn try_from(document: Document) -> Result<Self, String> {
        let mut all = Self::default();
        for (number, text) in document.statements.iter().enumerate() {
            let (signed, statement) =
                Signed::from_text(text).map_err(|e| format!("statement {}: {e}", number + 1))?;
            all.take(signed, statement, None);
        }
        Ok(all)
    }
}

impl Serialize for Statements {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        Document { statements: self.after(0).map(|kept| kept.signed.text()).collect() }.serialize(serializer)
    }
}

impl Statements {
    /// Takes a statement whose signature the caller has verified.
    ///
    /// `signer`: the authority that signs now, whose signature replaces one of another authority.
    pub fn take(&mut self, signed: Signed, statement: Statement, signer: Option<&[u8; 32]>) -> Taken {
        let taken = match self.kept.get(&statement.verdict) {
            Some(known) if known.statement == statement => {
                let newer = known.signed.authority != signed.authority && signer == Some(&signed.authority);
                if !newer {
                    return Taken::Known;
                }
                // It takes a new place: the newer signature goes to the other servers, too.
                Taken::Known
            }
            Some(known) if statement.rank() < known.statement.rank() => return Taken::Known,
            Some(_) => Taken::New,
            None => {
                let of_server = self.of_server.get(&statement.server).copied().unwrap_or(0);
                if of_server >= MAX_OF_SERVER || self.kept.len() >= MAX_STATEMENTS {
                    return Taken::Full;
                }
                *self.of_server.entry(statement.server.clone()).or_default() += 1;
                self.identities.extend(statement.verdict.identity().copied());
                Taken::New
            }
        };
        self.last += 1;
        let (verdict, place) = (statement.verdict.clone(), self.last);
        self.order.insert(place, verdict.clone());
        if let Some(old) = self.kept.insert(verdict, Kept { signed, statement, place }) {
            self.order.remove(&old.place);
        }
        taken
    }

    /// Returns the kept statements after a place, in the order of arrival.
    pub fn after(&self, place: u64) -> impl Iterator<Item = &Kept> {
        self.order.range(place.saturating_add(1)..).filter_map(|(_, verdict)| self.kept.get(verdict))
    }

    /// Returns the next statements for another server, the place of the last one, and whether
    /// others follow.
    pub fn page(&self, after: u64) -> (Vec<Signed>, u64, bool) {
        let page: Vec<_> = self.after(after).take(PAGE).collect();
        let last = page.last().map_or(self.last, |kept| kept.place);
        (page.into_iter().map(|kept| kept.signed.clone()).collect(), last, last < self.last)
    }

    /// Returns the place of the latest arrival, which grows with each change.
    pub fn place(&self) -> u64 {
        self.last
    }

    /// Returns the number of kept statements.
    pub fn len(&self) -> usize {
        self.kept.len()
    }

    /// Returns `true` if the set is empty.
    pub fn is_empty(&self) -> bool {
        self.kept.is_empty()
    }

    /// Returns the turn of the next statement about a client's name; 0 for other verdicts.
    pub fn next_turn(&self, verdict: &Verdict) -> u32 {
        let name = match verdict {
            Verdict::RevokeClient { name, .. } | Verdict::ForgetClient { name, .. } => name,
            Verdict::RevokeAdministrator { .. } | Verdict::RevokeServer { .. } => return 0,
        };
        let about = [self.client_turn(name, true), self.client_turn(name, false)];
        about.into_iter().flatten().map(|(turn, _)| turn).max().unwrap_or(0).saturating_add(1)
    }

    /// Returns the greatest turn and time of the revocations, or of the others, of a client's name.
    fn client_turn(&self, name: &str, revoked: bool) -> Option<(u32, u64)> {
        let of = |identity| {
            let name = name.to_owned();
            if revoked {
                Verdict::RevokeClient { name, identity }
            } else {
                Verdict::ForgetClient { name, identity }
            }
        };
        let about = self.kept.range(of(None)..=of(Some([0xff; 32]))).map(|(_, kept)| &kept.statement);
        about.map(|s| (s.turn, s.unix)).reduce(|a, b| (a.0.max(b.0), a.1.max(b.1)))
    }

    /// Returns what the statements about a client's name say together.
    pub fn client(&self, name: &str) -> ClientStanding {
        match (self.client_turn(name, true), self.client_turn(name, false)) {
            (None, None) => ClientStanding::Free,
            // Of two statements that did not know of each other, the revocation counts.
            (Some((revoked, unix)), Some((forgotten, _))) if revoked >= forgotten => {
                ClientStanding::Revoked { unix }
            }
            (Some((_, unix)), None) => ClientStanding::Revoked { unix },
            (revoked, Some((_, unix))) => {
                ClientStanding::Forgotten { unix: revoked.map_or(unix, |(_, revoked)| unix.max(revoked)) }
            }
        }
    }

    /// Returns the turn of a client's revocation, if its name is revoked.
    pub fn revocation_turn(&self, name: &str) -> Option<u32> {
        let revoked = matches!(self.client(name), ClientStanding::Revoked { .. });
        self.client_turn(name, true).filter(|_| revoked).map(|(turn, _)| turn)
    }

    /// Returns `true` if the identity of a client is refused for ever.
    pub fn refuses(&self, identity: &[u8; 32]) -> bool {
        self.identities.contains(identity)
    }

    /// Returns the identities that are refused for ever.
    pub fn identities(&self) -> &HashSet<[u8; 32]> {
        &self.identities
    }

    /// Returns the time up to which certificates of an administrator are refused.
    pub fn administrator(&self, name: &str) -> Option<u64> {
        self.kept.get(&Verdict::RevokeAdministrator { name: name.into() }).map(|kept| kept.statement.unix)
    }

    /// Returns the statement that refuses a server.
    pub fn server(&self, name: &str) -> Option<&Kept> {
        self.kept.get(&Verdict::RevokeServer { name: name.into() })
    }

    /// Returns the statements that refuse servers.
    pub fn servers(&self) -> impl Iterator<Item = &Kept> {
        self.kept.range(Verdict::RevokeServer { name: String::new() }..).map(|(_, kept)| kept)
    }

    /// Returns each verdict.
    pub fn verdicts(&self) -> impl Iterator<Item = &Verdict> {
        self.kept.keys()
    }

    /// Returns statements that another authority than `signer` has signed, at most `most`.
    pub fn signed_by_others(&self, signer: &[u8; 32], most: usize) -> Vec<Signed> {
        let others = self.kept.values().filter(|kept| kept.signed.authority != *signer);
        others.take(most).map(|kept| kept.signed.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn signed(statement: &Statement) -> Signed {
        Signed { body: statement.body(), authority: [1; 32], signature: vec![0; 70] }
    }

    fn take(all: &mut Statements, statement: &Statement) -> Taken {
        all.take(signed(statement), statement.clone(), None)
    }

    fn statement(server: &str, number: u64, unix: u64, turn: u32, verdict: Verdict) -> Statement {
        Statement { server: server.into(), number, unix, turn, verdict }
    }

    fn revoke(name: &str, identity: Option<u8>) -> Verdict {
        Verdict::RevokeClient { name: name.into(), identity: identity.map(|byte| [byte; 32]) }
    }

    fn forget(name: &str, identity: Option<u8>) -> Verdict {
        Verdict::ForgetClient { name: name.into(), identity: identity.map(|byte| [byte; 32]) }
    }

    #[test]
    fn a_name_is_revoked_until_a_later_turn_frees_it_and_an_identity_for_ever() {
        let mut all = Statements::default();
        assert_eq!(all.client("vm-1"), ClientStanding::Free);
        let first = statement("gpu1", 1, 100, all.next_turn(&revoke("vm-1", None)), revoke("vm-1", Some(7)));
        assert_eq!((take(&mut all, &first), take(&mut all, &first)), (Taken::New, Taken::Known));
        assert_eq!(all.client("vm-1"), ClientStanding::Revoked { unix: 100 });
        assert_eq!(all.client("vm-10"), ClientStanding::Free);
        // Another server frees the name; its clock is late.
        let freed = statement("gpu2", 1, 90, all.next_turn(&forget("vm-1", None)), forget("vm-1", None));
        assert_eq!((freed.turn, take(&mut all, &freed)), (2, Taken::New));
        assert_eq!(all.client("vm-1"), ClientStanding::Forgotten { unix: 100 });
        assert!(all.refuses(&[7; 32]) && !all.refuses(&[8; 32]));
        // A third one did not know that, and revokes: this counts, whatever the clocks say.
        let unaware = statement("gpu3", 1, 10, 2, revoke("vm-1", Some(8)));
        assert_eq!(take(&mut all, &unaware), Taken::New);
        assert_eq!(all.client("vm-1"), ClientStanding::Revoked { unix: 100 });
        assert_eq!(all.revocation_turn("vm-1"), Some(2));
        // An earlier state of the pool, put back, changes nothing.
        for old in [&first, &freed] {
            assert_eq!(take(&mut all, old), Taken::Known);
        }
        let restored: Statements = serde_json::from_str(&serde_json::to_string(&all).unwrap()).unwrap();
        assert_eq!((restored.client("vm-1"), restored.len()), (all.client("vm-1"), 3));
        assert!(serde_json::from_str::<Statements>(r#"{"statements":["AAAA"]}"#).is_err());
    }

    #[test]
    fn a_servers_flood_is_bounded_and_leaves_room_for_others() {
        let mut all = Statements::default();
        let taken: Vec<_> = (0..MAX_OF_SERVER as u64 + 9)
            .map(|n| take(&mut all, &statement("bad", n, n, 1, revoke(&format!("vm-{n}"), None))))
            .collect();
        assert_eq!(taken.iter().filter(|taken| **taken == Taken::New).count(), MAX_OF_SERVER);
        assert_eq!((taken.last(), all.len()), (Some(&Taken::Full), MAX_OF_SERVER));
        // Later turns about one name take no more room.
        assert_eq!(take(&mut all, &statement("bad", 9, 9, 9, revoke("vm-1", None))), Taken::New);
        assert_eq!(all.len(), MAX_OF_SERVER);
        assert_eq!(take(&mut all, &statement("gpu1", 1, 9, 1, revoke("vm-new", None))), Taken::New);
        // Pages have a bound, and reach everything once.
        let (mut place, mut got) = (0, 0);
        loop {
            let (page, last, more) = all.page(place);
            assert!(page.len() <= PAGE && last > place);
            (place, got) = (last, got + page.len());
            if !more {
                break;
            }
        }
        assert_eq!((got, all.page(place).0.len()), (MAX_OF_SERVER + 1, 0));
    }

    #[test]
    fn a_newer_authoritys_signature_replaces_the_older_one() {
        let mut all = Statements::default();
        let made = statement("gpu1", 1, 1, 1, Verdict::RevokeServer { name: "gpu2".into() });
        take(&mut all, &made);
        let again = Signed { authority: [2; 32], ..signed(&made) };
        let place = all.page(0).1;
        assert_eq!(all.take(again.clone(), made.clone(), Some(&[1; 32])), Taken::Known);
        assert_eq!((all.page(place).0.len(), all.signed_by_others(&[2; 32], 9).len()), (0, 1));
        assert_eq!(all.take(again.clone(), made.clone(), Some(&[2; 32])), Taken::Known);
        assert_eq!(all.page(place).0, [again]);
        assert_eq!(all.take(signed(&made), made, Some(&[2; 32])), Taken::Known);
        assert_eq!((all.signed_by_others(&[2; 32], 9).len(), all.servers().count()), (0, 1));
    }

    fn any_statement() -> impl Strategy<Value = Statement> {
        let verdict = (0..2u8, proptest::option::of(0..3u8), 0..4u8).prop_map(|(name, identity, kind)| {
            let name = format!("vm-{name}");
            match kind {
                0 => revoke(&name, identity),
                1 => forget(&name, identity),
                2 => Verdict::RevokeAdministrator { name },
                _ => Verdict::RevokeServer { name },
            }
        });
        (0..3u8, 1..4u64, 0..5u64, 1..4u32, verdict).prop_map(|(server, number, unix, turn, verdict)| {
            statement(&format!("gpu{server}"), number, unix, turn, verdict)
        })
    }

    fn facts(all: &Statements) -> impl PartialEq + std::fmt::Debug + use<> {
        let names = ["vm-0", "vm-1"];
        let mut identities: Vec<_> = all.identities().iter().copied().collect();
        identities.sort_unstable();
        let kept: Vec<_> = all.kept.values().map(|kept| kept.statement.clone()).collect();
        (
            names.map(|name| all.client(name)),
            names.map(|name| all.administrator(name)),
            names.map(|name| all.server(name).is_some()),
            (identities, kept),
        )
    }

    proptest! {
        #[test]
        fn the_order_of_statements_does_not_matter(
            made in proptest::collection::vec(any_statement(), 0..24),
            places in proptest::collection::vec(any::<u64>(), 48),
        ) {
            let mut first = Statements::default();
            for one in &made {
                let before = first.identities().len();
                take(&mut first, one);
                prop_assert!(first.identities().len() >= before, "an identity came back");
            }
            // Another order, in which some arrive twice.
            let mut shuffled: Vec<_> = made.iter().chain(&made[..made.len() / 2]).zip(&places).collect();
            shuffled.sort_by_key(|(_, place)| **place);
            let mut second = Statements::default();
            for (one, _) in shuffled {
                take(&mut second, one);
            }
            prop_assert_eq!(facts(&first), facts(&second));
            // A third one takes over from another set, page by page.
            let mut third = Statements::default();
            for signed in second.page(0).0 {
                let (signed, statement) = Signed::read(&signed.bytes()).unwrap();
                third.take(signed, statement, None);
            }
            prop_assert_eq!(facts(&first), facts(&third));
        }
    }
}
