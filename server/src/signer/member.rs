//! The membership of a server that holds no authority's key: a certificate of its own, and issuers.
//!
//! The file has all of it, so that the server starts while every issuer is away. The key in it is
//! made on this host, and leaves it never.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use data_encoding::HEXLOWER;
use gpusession_proto::control::{ServerJoinRequest, ServerReport};
use gpusession_proto::join::ServerToken;
use gpusession_proto::statement::{Signed, Verdict};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, UnixTime};
use serde::{Deserialize, Serialize};
use tracing::warn;

use super::authorities::{Described, Present};
use super::bundle::Bundle;
use super::ca::{AuthorityError, Issued, order_statement, prove_renewal, request, requested_key};
use super::issuers::{self, Credentials, Target, Trouble};
use super::lock::locked;
use super::operation::{Done, Operation, Outcome, Refused, Why};
use crate::certificate::{Holder, Role, holder, issuer};
use crate::clock::{Clock, SystemClock};
use crate::store;

/// Name of the file in the state directory.
const FILE: &str = "member.json";
/// Pause between warnings while no issuer answers, in seconds.
const WARNING_INTERVAL: u64 = 3600;

/// A certificate of this server with its key, in PEM.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Held {
    /// SHA-256 of the authority that signed it, in hex.
    pub authority: String,
    /// Certificate.
    pub certificate: String,
    /// Key of the certificate.
    pub key: String,
}

/// An issuer of the pool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Issuer {
    address: String,
    /// Name that its signer has in the pool.
    server: String,
}

/// All that a member keeps, as JSON.
#[derive(Clone, Serialize, Deserialize)]
struct Document {
    /// Name of this server in its certificates.
    name: String,
    /// Time of the bundle with the authorities, by the issuer's clock, in seconds since 1970.
    bundle_unix: u64,
    authorities: Described,
    certificates: Vec<Held>,
    issuers: Vec<Issuer>,
}

/// The membership of this server.
pub struct Member {
    file: PathBuf,
    document: Mutex<Document>,
    present: Mutex<Arc<Present>>,
    /// Issuers among the servers in `peers`.
    found: Mutex<Vec<Issuer>>,
    /// Reason for which no issuer answered the latest round; empty: one did.
    trouble: Mutex<String>,
    warned_unix: Mutex<u64>,
    clock: Arc<dyn Clock>,
}

impl std::fmt::Debug for Member {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Member({})", self.file.display())
    }
}

fn failed(what: &str, why: &dyn std::fmt::Display) -> Refused {
    Refused::new(Why::Failed, format!("{what}: {why}"))
}

/// Returns the membership's file in a state directory.
pub fn file(state_dir: &Path) -> PathBuf {
    state_dir.join(FILE)
}

/// Returns the certificate of the authority that signs, in PEM, from the text of the file.
pub fn authority_of(text: &str) -> Option<String> {
    let document: serde_json::Value = serde_json::from_str(text).ok()?;
    Some(document["authorities"]["signer"].as_str()?.to_owned())
}

/// Returns the keys of the server's certificates, in PEM, from the text of the file.
pub fn keys_of(text: &str) -> Vec<String> {
    let document = serde_json::from_str::<serde_json::Value>(text).unwrap_or_default();
    let held = document["certificates"].as_array().into_iter().flatten();
    held.filter_map(|held| held["key"].as_str()).map(str::to_owned).collect()
}

/// A membership that exists, as `pool join` looks at it.
pub struct Standing {
    /// Name of the server in its certificates.
    pub name: String,
    /// Names of the issuers.
    pub issuers: String,
    /// End of its latest certificate, in seconds since 1970.
    pub expires_unix: u64,
    /// SHA-256 of each authority that it trusts.
    pub authorities: Vec<[u8; 32]>,
}

impl Member {
    /// Opens the membership of a state directory, if there is one.
    pub fn open(state_dir: &Path) -> Result<Option<Self>, Refused> {
        let file = file(state_dir);
        let Some(document) = store::read::<Option<Document>>(&file)? else { return Ok(None) };
        Ok(Some(Self::of(file, document, Arc::new(SystemClock))?))
    }

    fn of(file: PathBuf, document: Document, clock: Arc<dyn Clock>) -> Result<Self, Refused> {
        let present = Arc::new(document.authorities.clone().try_into()?);
        Ok(Self {
            file,
            document: Mutex::new(document),
            present: Mutex::new(present),
            found: Mutex::default(),
            trouble: Mutex::default(),
            warned_unix: Mutex::default(),
            clock,
        })
    }

    /// Joins the pool of the token through the issuer at `address`, and stores the membership.
    pub fn join(
        state_dir: &Path,
        address: &str,
        token: &ServerToken,
        name: &str,
    ) -> Result<[u8; 32], Refused> {
        let key = rcgen::KeyPair::generate().map_err(AuthorityError::from)?;
        let csr_pem = request(&key)?;
        let request = ServerJoinRequest {
            token: token.0.id.to_vec(),
            proof: token.proof(name, &csr_pem).to_vec(),
            name: name.into(),
            csr_pem: csr_pem.clone(),
        };
        let reply = issuers::join_pool(address, token.0.authority, request).map_err(|e| {
            let why = if matches!(e, Trouble::Refused(_)) { Why::Token } else { Why::Issuers };
            Refused::new(why, format!("issuer {address}: {e}"))
        })?;
        let wrong = |e: String| failed(&format!("issuer {address}: its answer is of no use"), &e);
        let bundle = Bundle::open_pinned(&reply.bundle, &token.0.authority).map_err(wrong)?;
        let present: Present = bundle.described.clone().try_into()?;
        let unix = SystemClock.unix();
        let (_, authority) =
            certified(&present, &reply.certificate_pem, (Role::Server, name), &csr_pem, unix)
                .map_err(wrong)?;
        let held = Held {
            authority: HEXLOWER.encode(&authority),
            certificate: reply.certificate_pem,
            key: key.serialize_pem(),
        };
        let document = Document {
            name: name.into(),
            bundle_unix: bundle.unix,
            authorities: bundle.described,
            certificates: vec![held],
            issuers: vec![Issuer { address: address.into(), server: bundle.server }],
        };
        store::write(&file(state_dir), &document)?;
        Ok(present.signer().fingerprint())
    }

    /// Returns the name of this server in its certificates.
    pub fn name(&self) -> String {
        locked(&self.document).name.clone()
    }

    /// Describes the authorities that this server trusts.
    pub fn described(&self) -> Described {
        locked(&self.document).authorities.clone()
    }

    /// Returns the certificates of this server with their keys.
    pub fn kept(&self) -> Vec<Held> {
        locked(&self.document).certificates.clone()
    }

    /// Describes the membership.
    pub fn standing(&self) -> Standing {
        let document = locked(&self.document);
        let ends = document.certificates.iter().filter_map(|held| whose(&held.certificate));
        Standing {
            name: document.name.clone(),
            issuers: document.issuers.iter().map(|i| i.server.clone()).collect::<Vec<_>>().join(", "),
            expires_unix: ends.map(|holder| holder.expires_unix).max().unwrap_or(0),
            authorities: locked(&self.present).all().map(|authority| authority.fingerprint()).collect(),
        }
    }

    /// Returns why no issuer answered the latest round; empty: one did.
    pub fn trouble(&self) -> String {
        locked(&self.trouble).clone()
    }

    /// Returns the addresses of the issuers from the join.
    pub fn addresses(&self) -> Vec<String> {
        locked(&self.document).issuers.iter().map(|issuer| issuer.address.clone()).collect()
    }

    /// Returns the refusal of an operation that only an issuer does.
    pub fn no_issuer(&self) -> Refused {
        let mut names: Vec<_> = self.issuers().into_iter().map(|target| target.server).collect();
        names.dedup();
        let text = format!("this server is no issuer: run it on {}", names.join(" or "));
        Refused::new(Why::NoIssuer, text)
    }

    /// Returns the refusal of a renewal that the client has not signed.
    ///
    /// An issuer would have to take this server's word that the client has the key.
    pub fn unproven(&self) -> Refused {
        let text = "this server holds no authority's key, and the client's gpusessiond is of an earlier release, which \
                    signs no renewal: update it, or name an issuer in its servers.toml";
        Refused::new(Why::NoIssuer, text)
    }

    /// Returns the refusal of an authority, which this server needs not.
    pub fn has_pool(&self) -> Refused {
        let Standing { issuers, .. } = self.standing();
        let text = format!(
            "{} holds the membership in the pool of issuer {issuers}; remove this file first if the server leaves that pool",
            self.file.display()
        );
        Refused::new(Why::Exists, text)
    }

    fn issuers(&self) -> Vec<Target> {
        let mut all = locked(&self.document).issuers.clone();
        all.extend(locked(&self.found).iter().cloned());
        all.into_iter().map(|Issuer { address, server }| Target { address, server }).collect()
    }

    /// Returns the certificates with which this server calls: the old authority's first.
    fn shown(&self) -> Vec<Held> {
        let old = HEXLOWER.encode(&locked(&self.present).old().fingerprint());
        let mut all = self.kept();
        all.sort_by_key(|held| held.authority != old);
        all
    }

    fn credentials(&self, all: &[Held]) -> Vec<Credentials> {
        let authorities = locked(&self.present).certificates();
        let of = |held: &Held| Credentials {
            authorities: authorities.clone(),
            certificate: held.certificate.clone(),
            key: held.key.clone(),
        };
        all.iter().map(of).collect()
    }

    /// Has an issuer do an operation, and checks its answer.
    pub fn forward(&self, operation: &Operation) -> Outcome {
        self.forward_as(&self.shown(), operation)
    }

    fn forward_as(&self, shown: &[Held], operation: &Operation) -> Outcome {
        let credentials = self.credentials(shown);
        let with_token = matches!(operation, Operation::Check { .. } | Operation::Join { .. });
        let (mut refused, mut silent) = (None, Vec::new());
        for target in self.issuers() {
            match issuers::ask(&target, &credentials, operation) {
                // Another issuer may have made the token.
                Ok(Err(refusal)) if with_token && refusal.why == Why::Token => refused = Some(refusal),
                Ok(Err(refusal)) => return Err(Refused::new(refusal.why, issuers::plain(&refusal.text))),
                Ok(Ok(done)) => return self.checked(operation, done),
                Err(e) => silent.push(format!("{} at {}: {e}", target.server, target.address)),
            }
        }
        match refused {
            Some(refusal) if silent.is_empty() => {
                Err(Refused::new(refusal.why, issuers::plain(&refusal.text)))
            }
            Some(refusal) => {
                let text = issuers::plain(&refusal.text);
                Err(Refused::new(Why::Issuers, format!("{text}; issuer {}", silent.join(", issuer "))))
            }
            None => Err(Refused::new(Why::Issuers, no_answer(&silent))),
        }
    }

    /// Checks an answer, which the process of the issuer may have changed on its way.
    fn checked(&self, operation: &Operation, done: Done) -> Outcome {
        let wrong = |e: String| failed("the issuer's answer is of no use", &e);
        let (present, unix) = (locked(&self.present).clone(), self.clock.unix());
        let certified = |issued: &Issued, whose: (Role, &str), csr_pem: &str| {
            certified(&present, &issued.pem, whose, csr_pem, unix).map(|_| ()).map_err(wrong)
        };
        let stated = |all: &[Vec<u8>], right: &dyn Fn(&Verdict) -> bool| {
            let good = |bytes: &Vec<u8>| {
                let statement = Signed::read(bytes).ok().and_then(|(signed, _)| present.stated(&signed));
                statement.is_some_and(|statement| right(&statement.verdict))
            };
            if all.iter().all(good) { Ok(()) } else { Err(wrong("a statement was altered".into())) }
        };
        match (operation, &done) {
            (Operation::Check { .. }, Done::Nothing) => {}
            (Operation::Join { name, csr_pem, .. }, Done::Issued(issued)) => {
                certified(issued, (Role::Client, name), csr_pem)?;
            }
            (Operation::RenewProven { present, csr_pem, .. }, Done::Issued(issued)) => {
                let name = holder(present).map(|holder| holder.name).unwrap_or_default();
                certified(issued, (Role::Client, &name), csr_pem)?;
            }
            (Operation::RenewServer { csr_pem, .. }, Done::Issued(issued)) => {
                certified(issued, (Role::Server, &self.name()), csr_pem)?;
            }
            (Operation::StateFor { verdict, .. }, Done::Stated(all)) => stated(all, &|v| v == verdict)?,
            (Operation::StateAgain { .. }, Done::Stated(all)) => stated(all, &|_| true)?,
            _ => return Err(wrong("it answers another question".into())),
        }
        Ok(done)
    }

    /// Has an issuer sign the next certificate of this server.
    pub fn renew(&self, csr_pem: &str, authority: [u8; 32]) -> Outcome {
        self.proven(|present, key| {
            let proof = prove_renewal(key, csr_pem, &authority)?;
            Ok(Operation::RenewServer { present, csr_pem: csr_pem.to_owned(), authority, proof })
        })
    }

    /// Has an issuer sign a statement with the name of this server.
    pub fn state(&self, verdict: &Verdict, turn: u32) -> Outcome {
        self.proven(|present, key| {
            let proof = order_statement(key, verdict, turn)?;
            Ok(Operation::StateFor { present, verdict: verdict.clone(), turn, proof })
        })
    }

    /// Has an issuer do an operation that a key of this server has to sign.
    ///
    /// `sign` makes it of a certificate (DER) and its key. The connection shows that certificate.
    fn proven(&self, sign: impl Fn(Vec<u8>, &str) -> Result<Operation, Refused>) -> Outcome {
        let mut outcome = Err(failed(&self.file.display().to_string(), &"it has no certificate"));
        for held in self.shown() {
            let present = CertificateDer::from_pem_slice(held.certificate.as_bytes());
            let present = present.map_err(|e| failed(&self.file.display().to_string(), &e))?.to_vec();
            let order = sign(present, &held.key)?;
            outcome = self.forward_as(&[held], &order);
            if !outcome.as_ref().is_err_and(|refused| refused.why == Why::Issuers) {
                break;
            }
        }
        outcome
    }

    /// Stores a certificate of this server with its key, in place of that of the same authority.
    pub fn keep(&self, held: Held) -> Result<(), Refused> {
        let present = locked(&self.present).clone();
        let mut document = locked(&self.document);
        let mut fresh = document.clone();
        let of_pool = |held: &Held| {
            present.all().any(|authority| HEXLOWER.encode(&authority.fingerprint()) == held.authority)
        };
        fresh.certificates.retain(|old| old.authority != held.authority && of_pool(old));
        fresh.certificates.push(held);
        store::write(&self.file, &fresh)?;
        *document = fresh;
        Ok(())
    }

    /// Reports to the issuers, asks them for the present authorities, and looks for issuers among
    /// the `peers`.
    ///
    /// Returns `true` if the authorities have changed. The first issuer that answers decides.
    pub fn refresh(&self, peers: Vec<String>, report: ServerReport) -> Result<bool, Refused> {
        let mut targets = self.issuers();
        let known = targets.len();
        for address in peers {
            if targets.iter().all(|target| target.address != address) {
                targets.push(Target { address, server: String::new() });
            }
        }
        let answers = issuers::authorities(&targets, &self.credentials(&self.shown()), &report);
        let (mut first, mut silent) = (None, Vec::new());
        for (number, (target, answer)) in targets.into_iter().zip(answers).enumerate() {
            match self.opened(&target, answer) {
                Ok(bundle) if number < known => {
                    first.get_or_insert(bundle);
                }
                // The next call demands that its certificate has this name.
                Ok(bundle) => {
                    locked(&self.found).push(Issuer { address: target.address, server: bundle.server });
                }
                Err(Trouble::NoIssuer) if number >= known => {}
                Err(e) if number < known => {
                    silent.push(format!("{} at {}: {e}", target.server, target.address));
                    locked(&self.found).retain(|found| found.address != target.address);
                }
                Err(_) => {}
            }
        }
        self.note(first.is_some(), &silent);
        first.map_or(Ok(false), |bundle| self.take(bundle))
    }

    fn opened(&self, target: &Target, answer: Result<Outcome, Trouble>) -> Result<Bundle, Trouble> {
        let bytes = match answer? {
            Ok(Done::Bundle(bytes)) => bytes,
            Ok(_) => return Err(Trouble::Refused("it answers another question".into())),
            Err(refused) => return Err(Trouble::Refused(issuers::plain(&refused.text))),
        };
        let present = locked(&self.present).clone();
        let bundle = Bundle::open(&bytes, present.all()).map_err(Trouble::Refused)?;
        if !target.server.is_empty() && bundle.server != target.server {
            return Err(Trouble::Refused(format!("its signer has the name {}", bundle.server)));
        }
        Ok(bundle)
    }

    /// Notes whether an issuer answered; warns at the first failure, and then at intervals.
    fn note(&self, answered: bool, silent: &[String]) {
        let trouble = if answered { String::new() } else { no_answer(silent) };
        let (unix, mut warned) = (self.clock.unix(), locked(&self.warned_unix));
        if answered {
            *warned = 0;
        } else if unix >= *warned + WARNING_INTERVAL {
            *warned = unix;
            warn!("{trouble}; leases continue, and no client joins or renews its certificate here");
        }
        *locked(&self.trouble) = trouble;
    }

    /// Takes the authorities of a bundle, unless it is older than the present one.
    fn take(&self, bundle: Bundle) -> Result<bool, Refused> {
        let fresh: Present = bundle.described.clone().try_into()?;
        let mut document = locked(&self.document);
        let mut present = locked(&self.present);
        // Older authorities may be those that the pool has dropped.
        if bundle.unix < document.bundle_unix {
            return Ok(false);
        }
        if fresh.certificates() == present.certificates() && fresh.rotation() == present.rotation() {
            document.bundle_unix = bundle.unix;
            return Ok(false);
        }
        let mut changed = document.clone();
        (changed.bundle_unix, changed.authorities) = (bundle.unix, bundle.described);
        store::write(&self.file, &changed)?;
        (*document, *present) = (changed, Arc::new(fresh));
        Ok(true)
    }
}

fn no_answer(silent: &[String]) -> String {
    let all = if silent.is_empty() { "none is known".into() } else { silent.join(", ") };
    format!("no issuer of the pool answers: {all}")
}

fn whose(pem: &str) -> Option<Holder> {
    holder(&CertificateDer::from_pem_slice(pem.as_bytes()).ok()?)
}

/// Checks a new certificate: of an authority of the pool, for this role, name and request.
///
/// Returns its holder, and the authority that signed it.
fn certified(
    present: &Present,
    pem: &str,
    (role, name): (Role, &str),
    csr_pem: &str,
    unix: u64,
) -> Result<(Holder, [u8; 32]), String> {
    let der = CertificateDer::from_pem_slice(pem.as_bytes()).map_err(|e| e.to_string())?;
    let now = UnixTime::since_unix_epoch(Duration::from_secs(unix));
    present.verify(&der, &[], now).map_err(|e| format!("the certificate: {e}"))?;
    let of = holder(&der).filter(|holder| holder.role == role && holder.name == name);
    let holder = of.ok_or("the certificate has another name")?;
    let (_, parsed) = x509_parser::parse_x509_certificate(&der).map_err(|e| e.to_string())?;
    let key = crate::certificate::fingerprint(parsed.public_key().raw);
    if requested_key(csr_pem).map_err(|e| e.to_string())? != key {
        return Err("the certificate has another key".into());
    }
    let by = present.all().find(|authority| Some(authority.name()) == issuer(&der));
    Ok((holder, by.ok_or("the certificate is of no authority of the pool")?.fingerprint()))
}

#[cfg(test)]
mod tests {
    use gpusession_proto::join::JoinToken;
    use rcgen::{CertificateParams, KeyPair};

    use super::super::keeper::{Caller, Keeper, Places};
    use super::super::operation::{Privileged, Step};
    use super::super::tokens::Terms;
    use super::*;
    use crate::clock::SystemRandom;
    use crate::clock::testing::TestClock;

    struct Site {
        _folder: tempfile::TempDir,
        clock: Arc<TestClock>,
        keeper: Keeper,
        member: Member,
    }

    fn csr() -> String {
        let key = KeyPair::generate().unwrap();
        CertificateParams::new(vec![]).unwrap().serialize_request(&key).unwrap().pem().unwrap()
    }

    fn bundle(keeper: &Keeper) -> Vec<u8> {
        match keeper.perform(Caller::Server, Operation::Bundle).unwrap() {
            Done::Bundle(bytes) => bytes,
            other => panic!("{other:?}"),
        }
    }

    impl Site {
        fn new() -> Self {
            let (folder, clock) = (tempfile::tempdir().unwrap(), Arc::new(TestClock::default()));
            let places = Places::own(folder.path());
            let keeper = Keeper::open(places, clock.clone(), Arc::new(SystemRandom)).unwrap();
            keeper.perform(Caller::Root, Operation::Init { name: "gpu1".into() }).unwrap();
            let Done::Present(authorities) = keeper.perform(Caller::Root, Operation::Present).unwrap() else {
                panic!()
            };
            let document = Document {
                name: "gpu2".into(),
                bundle_unix: 0,
                authorities,
                certificates: Vec::new(),
                issuers: vec![Issuer { address: "127.0.0.1:1".into(), server: "gpu1".into() }],
            };
            let member = Member::of(file(folder.path()), document, clock.clone()).unwrap();
            Self { _folder: folder, clock, keeper, member }
        }

        fn opens(&self, bundle: Vec<u8>, server: &str) -> Result<Bundle, Trouble> {
            let target = Target { address: "127.0.0.1:1".into(), server: server.into() };
            self.member.opened(&target, Ok(Ok(Done::Bundle(bundle))))
        }

        /// Has the signer join a client with a new token.
        fn join(&self, name: &str, csr_pem: &str) -> (Operation, Done) {
            let terms = Terms { pattern: "*".into(), uses: 1, ttl: 60, from: Vec::new(), per_address: 0 };
            let made = self.keeper.perform(Caller::Server, Operation::TokenCreate(terms)).unwrap();
            let Done::Token { id, secret, authority, .. } = made else { panic!() };
            let join = Operation::join(&JoinToken { authority, id, secret }, name, None, csr_pem, true);
            (join.clone(), self.keeper.perform(Caller::Server, join).unwrap())
        }
    }

    #[test]
    fn authorities_of_an_issuer_alone_are_taken_and_older_ones_are_not() {
        let (site, other) = (Site::new(), Site::new());
        let before = site.opens(bundle(&site.keeper), "gpu1").unwrap();
        assert!(site.opens(bundle(&site.keeper), "gpu3").is_err(), "of another issuer");
        assert!(site.opens(bundle(&other.keeper), "gpu1").is_err(), "of another pool");
        assert_eq!(site.member.take(before.clone()), Ok(false), "nothing new");
        site.clock.advance(Duration::from_secs(60));
        let begin = Operation::Privileged(Privileged::Rotate(Step::Begin(None)));
        site.keeper.perform(Caller::Root, begin).unwrap();
        let begun = site.opens(bundle(&site.keeper), "gpu1").unwrap();
        assert_eq!(site.member.take(begun), Ok(true));
        assert_eq!(site.member.take(before), Ok(false), "a description of before, given again");
        assert_eq!(site.member.standing().authorities.len(), 2);
        let again = store::read::<Option<Document>>(&site.member.file).unwrap().unwrap();
        let again: Present = again.authorities.try_into().unwrap();
        assert_eq!(again.all().count(), 2, "also after a restart");
        let held = Held { authority: "00".into(), certificate: "c".into(), key: "k".into() };
        site.member.keep(held).unwrap();
        let text = std::fs::read_to_string(&site.member.file).unwrap();
        assert_eq!(keys_of(&text), ["k"]);
        let signs = site.member.standing().authorities[0];
        assert_eq!(
            super::super::ca::Authority::from_pem(&authority_of(&text).unwrap()).unwrap().fingerprint(),
            signs
        );
    }

    #[test]
    fn an_answer_that_was_changed_on_its_way_is_refused() {
        let (site, other) = (Site::new(), Site::new());
        let csr_pem = csr();
        let (join, done) = site.join("vm-1", &csr_pem);
        assert!(site.member.checked(&join, done.clone()).is_ok());
        let of_other_name = site.join("vm-2", &csr_pem).1;
        let of_other_key = site.join("vm-1", &csr()).1;
        let of_other_pool = other.join("vm-1", &csr_pem).1;
        for bad in [of_other_name, of_other_key, of_other_pool, Done::Nothing] {
            assert!(site.member.checked(&join, bad).is_err());
        }
        let own = Operation::RenewServer {
            present: Vec::new(),
            csr_pem: csr_pem.clone(),
            authority: [0; 32],
            proof: Vec::new(),
        };
        assert!(site.member.checked(&own, done).is_err(), "a client's");

        let state = |site: &Site, name: &str| {
            let verdict = Verdict::RevokeClient { name: name.into(), identity: None };
            let made = Operation::State { verdict: verdict.clone(), turn: 1 };
            let order = Operation::StateFor { present: Vec::new(), verdict, turn: 1, proof: Vec::new() };
            (order, site.keeper.perform(Caller::Server, made).unwrap())
        };
        let (order, done) = state(&site, "vm-1");
        assert!(site.member.checked(&order, done).is_ok());
        for bad in [state(&site, "vm-2").1, state(&other, "vm-1").1] {
            assert!(site.member.checked(&order, bad).is_err());
        }
    }
}
