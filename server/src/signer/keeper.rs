//! The keeper of the authorities' keys and of the join tokens: it checks each operation by itself.

mod servers;

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use data_encoding::HEXLOWER;
use gpusession_proto::join::{self, JoinToken, is_name};
use gpusession_proto::statement::{Signed, Statement, Verdict};
use rustls::pki_types::{CertificateDer, UnixTime};
use serde::{Deserialize, Serialize};
use tracing::info;

use super::authorities::{Authorities, Phase, Present};
use super::ca::{
    ADMINISTRATOR_TTL, AuthorityError, AuthorityKey, CLIENT_TTL, Issued, LASTING_TTL, Order, has_signed,
    requested_key,
};
use super::checkpoints::Checkpoints;
use super::lock::locked;
use super::operation::{Done, Operation, Outcome, Privileged, RESTATED, Refused, Step, Why};
use super::tokens::{MAX_BY_ADDRESS, Terms, TokenFacts, TokenKind, Tokens};
use crate::certificate::{Holder, Role, day, holder, signs_renewals};
use crate::clock::{Clock, Moment, Random};
use crate::store::{self, StoreError};

/// Most signatures in a second.
const SIGNATURES_PER_S: u32 = 20;
/// Longest time that a signature waits for its turn.
const TURN_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for which a permission holds.
const PERMISSION_TTL: Duration = Duration::from_secs(60);
/// Tokens in one answer: a whole message holds more of them.
const TOKENS_AT_ONCE: usize = 100;
/// Longest pattern of a token, in bytes.
const MAX_PATTERN: usize = 256;
/// Networks of a token at most: an answer has many tokens.
const MAX_NETWORKS: usize = 16;

/// Party behind an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Caller {
    /// Root of this host, or this process itself.
    Root,
    /// The process that serves clients.
    Server,
}

/// Files of the signer.
#[derive(Debug, Clone)]
pub struct Places {
    /// Folder of the authorities.
    pub folder: PathBuf,
    /// File of the join tokens.
    pub tokens: PathBuf,
    /// File with the name of this server; `None`: the caller gives it.
    pub name: Option<PathBuf>,
    /// Key of the audit trail's checkpoints, and the place that was signed last.
    pub checkpoints: [PathBuf; 2],
}

impl Places {
    /// Returns the files of a signer that has this folder for itself.
    pub fn own(folder: &Path) -> Self {
        let file = |name: &str| folder.join(name);
        Self {
            folder: folder.into(),
            tokens: file("tokens.json"),
            name: Some(file("server.json")),
            checkpoints: ["audit.key", "audit.json"].map(file),
        }
    }

    /// Returns the files of a server without a signer of its own process.
    pub fn inside(state_dir: &Path) -> Self {
        let tokens = state_dir.join("tokens.json");
        let audit = state_dir.join("audit");
        let checkpoints = ["checkpoint.key", "checkpoint.json"].map(|name| audit.join(name));
        Self { folder: state_dir.join("ca"), tokens, name: None, checkpoints }
    }

    fn statements(&self) -> PathBuf {
        self.folder.join("statements.json")
    }
}

/// Turns of signatures: a burst of one second's, then evenly.
#[derive(Debug, Default)]
struct Turns {
    /// Time at which the signatures so far are paid for.
    paid: Moment,
}

impl Turns {
    /// Returns how long the next signature has to wait; `None`: too long.
    fn take(&mut self, now: Moment) -> Option<Duration> {
        let each = Duration::from_secs(1) / SIGNATURES_PER_S;
        let paid = self.paid.max(now) + each;
        let wait = (paid - now).saturating_sub(Duration::from_secs(1));
        (wait <= TURN_TIMEOUT).then(|| {
            self.paid = paid;
            wait
        })
    }
}

/// Document with the name of this server.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Named {
    name: Option<String>,
}

/// Document with the number of this server's latest statement.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Numbered {
    statements: u64,
}

/// The authorities with their keys, and the join tokens.
pub struct Keeper {
    places: Places,
    authorities: Mutex<Option<Arc<Authorities>>>,
    tokens: Mutex<Tokens>,
    name: Mutex<Option<String>>,
    permitted: Mutex<Option<(Privileged, Moment)>>,
    turns: Mutex<Turns>,
    numbered: Mutex<Numbered>,
    /// From their first use on.
    checkpoints: OnceLock<Checkpoints>,
    clock: Arc<dyn Clock>,
    random: Arc<dyn Random>,
}

impl std::fmt::Debug for Keeper {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Keeper({})", self.places.folder.display())
    }
}

impl Keeper {
    /// Opens the files. The caller holds the lock of their folder.
    pub fn open(
        places: Places,
        clock: Arc<dyn Clock>,
        random: Arc<dyn Random>,
    ) -> Result<Self, AuthorityError> {
        let mut tokens: Tokens = store::read(&places.tokens)?;
        let named: Named = places.name.as_deref().map(store::read).transpose()?.unwrap_or_default();
        let numbered = store::read(&places.statements())?;
        let authorities = match Authorities::open(&places.folder, clock.unix(), random.clone()) {
            Ok(all) => {
                // Earlier versions had one authority, and named it nowhere.
                tokens.complete(&HEXLOWER.encode(&all.present().old().fingerprint()));
                Some(Arc::new(all))
            }
            Err(AuthorityError::Missing(_)) => None,
            Err(e) => return Err(e),
        };
        Ok(Self {
            places,
            authorities: Mutex::new(authorities),
            tokens: Mutex::new(tokens),
            name: Mutex::new(named.name),
            permitted: Mutex::default(),
            turns: Mutex::default(),
            numbered: Mutex::new(numbered),
            checkpoints: OnceLock::new(),
            clock,
            random,
        })
    }

    /// Does an operation, if its caller has the right.
    pub fn perform(&self, caller: Caller, operation: Operation) -> Outcome {
        let (operation, earlier) = operation.present();
        let outcome = self.perform_present(caller, operation);
        if earlier { outcome.map(Done::earlier) } else { outcome }
    }

    fn perform_present(&self, caller: Caller, operation: Operation) -> Outcome {
        if caller != Caller::Root && operation.needs_root() {
            return Err(no_right());
        }
        match operation {
            Operation::Present => Ok(Done::Present(self.present()?.describe())),
            Operation::Server { name, csr_pem, authority } => {
                self.server(caller, &name, &csr_pem, &authority).map(Done::Issued)
            }
            Operation::Check { id, secret, name, from } => {
                let authority = self.present()?.signer().fingerprint();
                self.check(&JoinToken { authority, id, secret }, &name, from)?;
                Ok(Done::Nothing)
            }
            Operation::Join { id, secret, name, csr_pem, renews, from } => {
                self.join((id, secret), &name, from, &csr_pem, renews).map(Done::Issued)
            }
            Operation::Renew { present, csr_pem, authority } => {
                self.renew((&present, None), &csr_pem, &authority).map(Done::Issued)
            }
            Operation::Privileged(operation) => {
                if caller != Caller::Root {
                    self.use_permission(&operation)?;
                }
                self.privileged(operation)
            }
            Operation::Permit(operation) => {
                *locked(&self.permitted) = Some((operation, self.clock.now()));
                Ok(Done::Nothing)
            }
            Operation::TokenCreate(terms) => self.create_token(TokenKind::Client, &terms),
            Operation::FleetCreate(terms) => self.create_token(TokenKind::Fleet, &terms),
            Operation::Tokens { after } => {
                Ok(Done::Tokens(locked(&self.tokens).list(&after, TOKENS_AT_ONCE)))
            }
            Operation::TokenRevoke { id } => {
                let revoked = self.change_tokens(|tokens| Ok(tokens.revoke(&id)))?;
                info!("token {}: revoked", revoked.as_deref().unwrap_or("(none fits)"));
                Ok(Done::Revoked(revoked))
            }
            Operation::Init { name } => self.init(&name),
            Operation::Import { exported } => self.import(&exported, Phase::Begun, self.clock.unix()),
            Operation::Export => {
                let exported = self.present()?.export();
                info!("the authorities with their keys: exported");
                Ok(Done::Exported(exported))
            }
            Operation::Name(name) => self.learn(&name).map(|()| Done::Nothing),
            Operation::AdoptTokens(more) => {
                let mut tokens = locked(&self.tokens);
                let mut all = tokens.clone();
                all.extend(more);
                store::write(&self.places.tokens, &all)?;
                *tokens = all;
                Ok(Done::Nothing)
            }
            Operation::Adopt { exported, rotation } => {
                let (phase, since) = rotation.unwrap_or((Phase::Begun, self.clock.unix()));
                self.import(&exported, phase, since)
            }
            Operation::State { verdict, turn } => self.state(verdict, turn),
            Operation::StateAgain { signed } => self.state_again(&signed),
            Operation::Checkpoint(place) => {
                self.turn()?;
                let signed = self.checkpoints()?.sign(place)?;
                info!("audit trail: line {}: signed", place.seq);
                Ok(Done::Checkpoint(signed))
            }
            Operation::Verifier => Ok(Done::Verifier(self.checkpoints()?.verifier())),
            Operation::JoinServer { id, proof, name, csr_pem, from } => {
                self.join_server((&id, &proof), (&name, &csr_pem), from).map(Done::Issued)
            }
            Operation::RenewServer { present, csr_pem, authority, proof } => {
                self.renew_server(&present, &csr_pem, &authority, &proof).map(Done::Issued)
            }
            Operation::StateFor { present, verdict, turn, proof } => {
                self.state_for(&present, verdict, turn, &proof)
            }
            Operation::RenewProven { present, csr_pem, authority, proof } => {
                self.renew((&present, Some(&proof)), &csr_pem, &authority).map(Done::Issued)
            }
            Operation::Bundle => self.bundle().map(Done::Bundle),
            Operation::GiveUp => self.give_up(),
            Operation::EarlierCheck { .. }
            | Operation::EarlierJoin { .. }
            | Operation::EarlierTokenCreate { .. }
            | Operation::EarlierTokens { .. }
            | Operation::EarlierAdoptTokens(_) => {
                Err(Refused::new(Why::Failed, "internal error: a request in its earlier form"))
            }
        }
    }

    fn checkpoints(&self) -> Result<&Checkpoints, Refused> {
        // Two threads must not make two keys.
        let _one = locked(&self.numbered);
        if let Some(open) = self.checkpoints.get() {
            return Ok(open);
        }
        let [key, latest] = &self.places.checkpoints;
        let opened = Checkpoints::open(key, latest);
        let opened = opened.map_err(|error| StoreError::Io { path: key.clone(), error })?;
        Ok(self.checkpoints.get_or_init(|| opened))
    }

    fn all(&self) -> Result<Arc<Authorities>, Refused> {
        let all = locked(&self.authorities).clone();
        all.ok_or_else(|| AuthorityError::Missing(self.places.folder.clone()).into())
    }

    fn present(&self) -> Result<Arc<Present<AuthorityKey>>, Refused> {
        Ok(self.all()?.present())
    }

    /// Waits for the turn of a signature.
    #[expect(clippy::disallowed_methods, reason = "a signer's thread has one caller, who waits")]
    fn turn(&self) -> Result<(), Refused> {
        let wait = locked(&self.turns).take(self.clock.now());
        let wait = wait.ok_or_else(|| {
            let text = format!("more than {SIGNATURES_PER_S} signatures a second; try again in some seconds");
            Refused::new(Why::Busy, text)
        })?;
        if !wait.is_zero() {
            std::thread::sleep(wait);
        }
        Ok(())
    }

    fn server(
        &self,
        caller: Caller,
        name: &str,
        csr_pem: &str,
        authority: &[u8; 32],
    ) -> Result<Issued, Refused> {
        let known = locked(&self.name).clone();
        if known.as_deref() != Some(name) {
            if caller != Caller::Root {
                let known = known.as_deref().unwrap_or("unknown to it");
                let text = format!(
                    "the signer signs for this server's own name, {known}, and not for {name}; \
                     systemctl restart gpuserver makes a new name known"
                );
                return Err(Refused::new(Why::Right, text));
            }
            self.learn(name)?;
        }
        let present = self.present()?;
        let authority = find_authority(&present, authority)?;
        self.turn()?;
        let issued = authority.issue_server(name, csr_pem, self.clock.unix(), self.random.as_ref())?;
        signed("server", name, "its own certificate", &issued);
        Ok(issued)
    }

    /// Checks a token that pins the authority which signs.
    fn check(&self, token: &JoinToken, name: &str, from: Option<IpAddr>) -> Result<(), Refused> {
        Ok(locked(&self.tokens).check(token, name, from, &token.authority, self.clock.unix())?)
    }

    fn join(
        &self,
        (id, secret): ([u8; 8], [u8; 24]),
        name: &str,
        from: Option<IpAddr>,
        csr_pem: &str,
        renews: bool,
    ) -> Result<Issued, Refused> {
        a_name(name)?;
        let present = self.present()?;
        let authority = present.signer();
        // Before the token is used up.
        requested_key(csr_pem)?;
        let token = JoinToken { authority: authority.fingerprint(), id, secret };
        self.check(&token, name, from)?;
        self.turn()?;
        // The file is written first, so that no token admits more clients than it may.
        self.change_tokens(|tokens| {
            tokens.check(&token, name, from, &token.authority, self.clock.unix())?;
            tokens.consume(&token, name, from);
            Ok(())
        })?;
        let life = if renews { CLIENT_TTL } else { LASTING_TTL };
        let order = Order { role: Role::Client, name, life, identity: None, signs_renewals: false };
        let issued = authority.issue(csr_pem, &order, self.clock.unix(), self.random.as_ref())?;
        signed("client", name, &format!("join with token {}", HEXLOWER.encode(&id)), &issued);
        Ok(issued)
    }

    /// Returns the holder of a certificate that an authority has signed, also of an expired one.
    fn shown(&self, present: &[u8], role: Role) -> Result<Holder, Refused> {
        let der = CertificateDer::from(present);
        let now = UnixTime::since_unix_epoch(Duration::from_secs(self.clock.unix()));
        let unfit = |why: String| Refused::new(Why::Request, format!("the present certificate: {why}"));
        self.present()?.verify(&der, &[], now).map_err(|e| unfit(e.to_string()))?;
        let whose = || unfit(format!("it is not a {}'s", role_word(role)));
        holder(&der).filter(|holder| holder.role == role).ok_or_else(whose)
    }

    fn own_name(&self) -> Result<String, Refused> {
        let name = locked(&self.name).clone();
        name.ok_or_else(|| Refused::new(Why::Right, "the signer does not know its server's name"))
    }

    /// Signs the next certificate of a client.
    ///
    /// `proof`: signature of the present key over the request, which a server that saw the
    /// certificate cannot make for a key of its own. Clients of earlier releases send none.
    fn renew(
        &self,
        (present, proof): (&[u8], Option<&[u8]>),
        csr_pem: &str,
        authority: &[u8; 32],
    ) -> Result<Issued, Refused> {
        let holder = self.shown(present, Role::Client)?;
        let name = &holder.name;
        let refuse = |text| Err(Refused::new(Why::Request, text));
        match proof {
            Some(proof) if !has_signed(present, &join::renewal(csr_pem), proof) => {
                return refuse(format!(
                    "the request is not signed with the key of the certificate of client {name}"
                ));
            }
            None if signs_renewals(present) => {
                return refuse(format!(
                    "client {name} has signed its renewals, and this one is not signed: its gpusessiond is of an earlier \
                     release, or a server asks for itself; update gpusessiond"
                ));
            }
            Some(_) | None => {}
        }
        let (all, unix) = (self.present()?, self.clock.unix());
        let authority = find_authority(&all, authority)?;
        self.turn()?;
        let (name, identity) = (holder.name.as_str(), Some(&holder.identity));
        let order =
            Order { role: Role::Client, name, life: CLIENT_TTL, identity, signs_renewals: proof.is_some() };
        let issued = authority.issue(csr_pem, &order, unix, self.random.as_ref())?;
        signed("client", name, "renewal", &issued);
        Ok(issued)
    }

    /// Signs a statement, which no statement takes back.
    fn state(&self, verdict: Verdict, turn: u32) -> Outcome {
        if matches!(verdict, Verdict::RevokeServer { .. }) {
            return Err(no_right());
        }
        self.state_any(verdict, turn)
    }

    fn state_any(&self, verdict: Verdict, turn: u32) -> Outcome {
        let server = self.own_name()?;
        self.state_as(server, verdict, turn)
    }

    /// Signs a statement of a server.
    ///
    /// The numbers of this issuer also count those of servers without a key.
    fn state_as(&self, server: String, verdict: Verdict, turn: u32) -> Outcome {
        a_name(verdict.name())?;
        let present = self.present()?;
        self.turn()?;
        let number = {
            let mut numbered = locked(&self.numbered);
            let next = Numbered { statements: numbered.statements + 1 };
            store::write(&self.places.statements(), &next)?;
            *numbered = next;
            numbered.statements
        };
        let (word, name) = (verdict.as_str(), verdict.name().to_owned());
        let of = server.clone();
        let statement = Statement { server, number, unix: self.clock.unix(), turn, verdict };
        let signed = present.signer().state(statement.body())?;
        info!("signed statement {number} of server {of}: {word} {name}");
        Ok(Done::Stated(vec![signed.bytes()]))
    }

    /// Signs statements again that a present authority has signed.
    fn state_again(&self, all: &[Vec<u8>]) -> Outcome {
        let unfit = |text: &str| Refused::new(Why::Request, format!("statement: {text}"));
        if all.len() > RESTATED {
            return Err(unfit(&format!("more than {RESTATED} at a time")));
        }
        let present = self.present()?;
        self.turn()?;
        let again = all.iter().map(|bytes| {
            let (signed, _) = Signed::read(bytes).map_err(|e| unfit(&e.to_string()))?;
            present.stated(&signed).ok_or_else(|| unfit("no authority of this pool has signed it"))?;
            Ok(present.signer().state(signed.body)?.bytes())
        });
        let again = again.collect::<Result<Vec<_>, Refused>>()?;
        info!("{} statements: signed again with the present authority", again.len());
        Ok(Done::Stated(again))
    }

    fn use_permission(&self, operation: &Privileged) -> Result<(), Refused> {
        let mut permitted = locked(&self.permitted);
        let holds = permitted
            .as_ref()
            .is_some_and(|(it, since)| it == operation && self.clock.now() <= *since + PERMISSION_TTL);
        if holds {
            *permitted = None;
            return Ok(());
        }
        Err(no_right())
    }

    fn privileged(&self, operation: Privileged) -> Outcome {
        let unix = self.clock.unix();
        match operation {
            Privileged::Administrator { name, csr_pem } => {
                a_name(&name)?;
                let present = self.present()?;
                self.turn()?;
                let (role, life) = (Role::Administrator, ADMINISTRATOR_TTL);
                let order = Order { role, name: &name, life, identity: None, signs_renewals: false };
                let issued = present.signer().issue(&csr_pem, &order, unix, self.random.as_ref())?;
                signed("administrator", &name, "new", &issued);
                Ok(Done::Issued(issued))
            }
            Privileged::AdmitServer { name, ttl, from } => self.admit_server(&name, ttl, &from),
            Privileged::RevokeServer { name } => self.state_any(Verdict::RevokeServer { name }, 0),
            Privileged::Rotate(step) => {
                let all = self.all()?;
                let (changed, word) = match step {
                    Step::Begin(exported) => {
                        let name = locked(&self.name).clone().unwrap_or_default();
                        (all.begin(&name, exported.as_deref(), unix)?, "begin")
                    }
                    Step::Switch => (all.switch(unix)?, "switch"),
                    Step::Finish => (all.finish(unix)?, "finish"),
                    Step::Abort => (all.abort(unix)?, "abort"),
                };
                let signs = HEXLOWER.encode(&all.present().signer().fingerprint());
                info!("rotation of the authority: {word}: {signs} signs");
                Ok(Done::Changed(changed))
            }
        }
    }

    fn create_token(&self, kind: TokenKind, terms: &Terms) -> Outcome {
        let Terms { pattern, uses, from, per_address, .. } = terms;
        if *per_address > 0 && *uses > MAX_BY_ADDRESS {
            let text = format!(
                "token: {uses} clients are too many: with a bound for each address, at most {MAX_BY_ADDRESS}; make several tokens"
            );
            return Err(Refused::new(Why::Request, text));
        }
        if pattern.len() > MAX_PATTERN || from.len() > MAX_NETWORKS {
            let most = format!("{MAX_PATTERN} bytes, and {MAX_NETWORKS} networks");
            let text =
                format!("token: the pattern of names, or the list of networks, is too long: at most {most}");
            return Err(Refused::new(Why::Request, text));
        }
        let authority = self.present()?.signer().fingerprint();
        let unix = self.clock.unix();
        let (token, record) = self
            .change_tokens(|tokens| Ok(tokens.create(kind, authority, terms, unix, self.random.as_ref())))?;
        let facts = TokenFacts::new(&HEXLOWER.encode(&token.id), &record);
        info!("token {}: created for {}; uses: {uses}", facts.id, facts.name_pattern);
        Ok(Done::Token { id: token.id, secret: token.secret, authority, facts })
    }

    /// Changes the tokens, if their file can be written.
    fn change_tokens<T>(&self, change: impl FnOnce(&mut Tokens) -> Result<T, Refused>) -> Result<T, Refused> {
        let mut tokens = locked(&self.tokens);
        let mut fresh = tokens.clone();
        let changed = change(&mut fresh)?;
        store::write(&self.places.tokens, &fresh)?;
        *tokens = fresh;
        Ok(changed)
    }

    fn learn(&self, name: &str) -> Result<(), Refused> {
        a_name(name)?;
        let mut known = locked(&self.name);
        if known.as_deref() != Some(name) {
            let document = Named { name: Some(name.into()) };
            self.places.name.as_deref().map_or(Ok(()), |file| store::write(file, &document))?;
            *known = document.name;
        }
        Ok(())
    }

    fn init(&self, name: &str) -> Outcome {
        let mut all = locked(&self.authorities);
        let (folder, unix) = (&self.places.folder, self.clock.unix());
        let made = AuthorityKey::init(folder, name, unix, self.random.as_ref())?.fingerprint();
        self.learn(name)?;
        *all = Some(Arc::new(Authorities::open(folder, unix, self.random.clone())?));
        info!("the pool's authority {}: created", HEXLOWER.encode(&made));
        Ok(Done::Authority(made))
    }

    fn import(&self, exported: &str, phase: Phase, since_unix: u64) -> Outcome {
        let mut all = locked(&self.authorities);
        let folder = &self.places.folder;
        let taken = Authorities::import(folder, exported, phase, since_unix)?.fingerprint();
        let opened = Authorities::open(folder, self.clock.unix(), self.random.clone())?;
        let signs = HEXLOWER.encode(&opened.present().old().fingerprint());
        self.change_tokens(|tokens| {
            tokens.complete(&signs);
            Ok(())
        })?;
        *all = Some(Arc::new(opened));
        info!("the pool's authority {}: imported", HEXLOWER.encode(&taken));
        Ok(Done::Authority(taken))
    }
}

fn find_authority<'a>(
    present: &'a Present<AuthorityKey>,
    authority: &[u8; 32],
) -> Result<&'a AuthorityKey, Refused> {
    let found = present.find(authority);
    found.ok_or_else(|| Refused::new(Why::Request, "the authority is not one of this pool's present ones"))
}

fn role_word(role: Role) -> &'static str {
    match role {
        Role::Client => "client",
        Role::Administrator => "administrator",
        Role::Server => "server",
    }
}

fn a_name(name: &str) -> Result<(), Refused> {
    let unfit = || Refused::new(Why::Request, format!("{name:?} is not a valid name"));
    if is_name(name) { Ok(()) } else { Err(unfit()) }
}

fn no_right() -> Refused {
    let text = "the signer does this for root alone; run the command as root on this host";
    Refused::new(Why::Right, text)
}

/// Writes the journal's line of a signature.
fn signed(role: &str, name: &str, why: &str, issued: &Issued) {
    let certificate = HEXLOWER.encode(&issued.fingerprint);
    info!("signed for {role} {name}: {why}: certificate {certificate}, until {}", day(issued.expires_unix));
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, KeyPair};
    use rustls::pki_types::pem::PemObject as _;

    use super::*;
    use crate::clock::SystemRandom;
    use crate::clock::testing::TestClock;

    pub(super) fn csr() -> String {
        let key = KeyPair::generate().unwrap();
        CertificateParams::new(vec![]).unwrap().serialize_request(&key).unwrap().pem().unwrap()
    }

    pub(super) struct Site {
        pub(super) folder: tempfile::TempDir,
        pub(super) clock: Arc<TestClock>,
        pub(super) keeper: Keeper,
    }

    impl Site {
        pub(super) fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let clock = Arc::new(TestClock::default());
            let site = Self { keeper: open(&folder, &clock), folder, clock };
            let made = site.root(Operation::Init { name: "gpu1".into() });
            assert!(matches!(made, Ok(Done::Authority(_))), "{made:?}");
            site
        }

        pub(super) fn root(&self, operation: Operation) -> Outcome {
            self.keeper.perform(Caller::Root, operation)
        }

        pub(super) fn server(&self, operation: Operation) -> Outcome {
            self.clock.advance(Duration::from_secs(1));
            self.keeper.perform(Caller::Server, operation)
        }

        pub(super) fn authority(&self) -> [u8; 32] {
            self.keeper.present().unwrap().signer().fingerprint()
        }

        pub(super) fn token(&self, pattern: &str, uses: u32) -> JoinToken {
            let terms = Terms { pattern: pattern.into(), uses, ttl: 60, from: Vec::new(), per_address: 0 };
            match self.server(Operation::TokenCreate(terms)) {
                Ok(Done::Token { id, secret, authority, .. }) => JoinToken { authority, id, secret },
                other => panic!("{other:?}"),
            }
        }
    }

    pub(super) fn open(folder: &tempfile::TempDir, clock: &Arc<TestClock>) -> Keeper {
        Keeper::open(Places::own(folder.path()), clock.clone(), Arc::new(SystemRandom)).unwrap()
    }

    pub(super) fn why(outcome: Outcome) -> Why {
        outcome.unwrap_err().why
    }

    pub(super) fn issued(outcome: Outcome) -> Issued {
        match outcome.unwrap() {
            Done::Issued(issued) => issued,
            other => panic!("{other:?}"),
        }
    }

    pub(super) fn der(issued: &Issued) -> Vec<u8> {
        CertificateDer::from_pem_slice(issued.pem.as_bytes()).unwrap().to_vec()
    }

    #[test]
    fn a_server_that_was_taken_over_gets_no_key_no_administrator_and_no_other_name() {
        let site = Site::new();
        let administrator = |name: &str| Privileged::Administrator { name: name.into(), csr_pem: csr() };
        let refused = [
            Operation::Export,
            Operation::Init { name: "gpu1".into() },
            Operation::Import { exported: String::new() },
            Operation::Name("gpu2".into()),
            Operation::Permit(Privileged::Rotate(Step::Finish)),
            Operation::Privileged(administrator("alice")),
            Operation::Privileged(Privileged::Rotate(Step::Begin(None))),
            Operation::Privileged(Privileged::Rotate(Step::Switch)),
            Operation::Privileged(Privileged::Rotate(Step::Finish)),
            Operation::Privileged(Privileged::Rotate(Step::Abort)),
            Operation::Privileged(Privileged::RevokeServer { name: "gpu2".into() }),
            Operation::Privileged(Privileged::AdmitServer { name: "gpu2".into(), ttl: 60, from: Vec::new() }),
            Operation::State { verdict: Verdict::RevokeServer { name: "gpu2".into() }, turn: 0 },
            Operation::AdoptTokens(Tokens::default()),
            Operation::Adopt { exported: String::new(), rotation: None },
            Operation::Server { name: "gpu2".into(), csr_pem: csr(), authority: site.authority() },
        ];
        for operation in refused {
            assert_eq!(why(site.server(operation.clone())), Why::Right, "{operation:?}");
        }
        let own = Operation::Server { name: "gpu1".into(), csr_pem: csr(), authority: site.authority() };
        issued(site.server(own));
        // Root permits one operation, once, within a minute.
        let alice = administrator("alice");
        site.root(Operation::Permit(alice.clone())).unwrap();
        assert_eq!(why(site.server(Operation::Privileged(administrator("bob")))), Why::Right);
        let made = der(&issued(site.server(Operation::Privileged(alice.clone()))));
        assert_eq!(holder(&made).unwrap().role, Role::Administrator);
        assert_eq!(why(site.server(Operation::Privileged(alice.clone()))), Why::Right, "used up");
        site.root(Operation::Permit(alice.clone())).unwrap();
        site.clock.advance(PERMISSION_TTL);
        assert_eq!(why(site.server(Operation::Privileged(alice))), Why::Right, "too late");
    }

    #[test]
    fn a_token_admits_its_clients_alone_also_after_a_restart() {
        let site = Site::new();
        let token = site.token("vm-*", 1);
        let join = |token: &JoinToken, name: &str| Operation::join(token, name, None, &csr(), true);
        assert_eq!(why(site.server(join(&token, "db-1"))), Why::Token);
        assert_eq!(why(site.server(join(&token, "VM"))), Why::Request);
        let mut forged = token.clone();
        forged.secret[0] ^= 1;
        assert_eq!(why(site.server(join(&forged, "vm-1"))), Why::Token);
        let malformed = Operation::join(&token, "vm-1", None, "garbage", true);
        assert_eq!(why(site.server(malformed)), Why::Request, "uses up nothing");
        let whose = holder(&der(&issued(site.server(join(&token, "vm-1"))))).unwrap();
        assert_eq!((whose.role, whose.name.as_str()), (Role::Client, "vm-1"));
        assert_eq!(why(site.server(join(&token, "vm-2"))), Why::Token);
        let late = site.token("*", 9);
        let again = Site { keeper: open(&site.folder, &site.clock), ..site };
        assert_eq!(why(again.server(join(&token, "vm-2"))), Why::Token);
        again.clock.advance(Duration::from_secs(60));
        assert_eq!(why(again.server(join(&late, "vm-2"))), Why::Token);
        let Done::Tokens(listed) = again.server(Operation::Tokens { after: String::new() }).unwrap() else {
            panic!("a list")
        };
        assert_eq!(listed.len(), 2);
        let after = listed[0].id.clone();
        assert!(
            matches!(again.server(Operation::Tokens { after }), Ok(Done::Tokens(rest)) if rest.len() == 1)
        );
        let revoked = again.server(Operation::TokenRevoke { id: listed[0].id.clone() });
        assert!(matches!(revoked, Ok(Done::Revoked(Some(_)))));
    }

    #[test]
    fn a_renewal_is_of_the_present_certificates_name_and_identity() {
        let (site, other) = (Site::new(), Site::new());
        let authority = site.authority();
        let renew = |present: &[u8]| Operation::Renew { present: present.into(), csr_pem: csr(), authority };
        let first =
            der(&issued(site.server(Operation::join(&site.token("*", 1), "vm-1", None, &csr(), true))));
        let second = der(&issued(site.server(renew(&first))));
        let (was, is) = (holder(&first).unwrap(), holder(&second).unwrap());
        assert_eq!((is.name, is.identity), (was.name, was.identity));
        assert!(is.issued_unix > was.issued_unix);
        site.clock.advance(CLIENT_TTL * 2);
        issued(site.server(renew(&second)));
        // Of a server, of an administrator, of another pool, of no authority.
        let own = Operation::Server { name: "gpu1".into(), csr_pem: csr(), authority };
        let own = der(&issued(site.server(own)));
        let alice = Privileged::Administrator { name: "alice".into(), csr_pem: csr() };
        let alice = der(&issued(site.root(Operation::Privileged(alice))));
        let foreign = Operation::join(&other.token("*", 1), "vm-1", None, &csr(), true);
        let foreign = der(&issued(other.server(foreign)));
        for bad in [own, alice, foreign, b"garbage".to_vec()] {
            assert_eq!(why(site.server(renew(&bad))), Why::Request);
        }
        let elsewhere = Operation::Renew { present: second, csr_pem: csr(), authority: other.authority() };
        assert_eq!(why(site.server(elsewhere)), Why::Request);
    }

    pub(super) fn stated(outcome: Outcome) -> Vec<(Signed, Statement)> {
        let Done::Stated(stated) = outcome.unwrap() else { panic!("statements") };
        stated.iter().map(|bytes| Signed::read(bytes).unwrap()).collect()
    }

    #[test]
    fn statements_have_numbers_and_the_servers_name_and_are_signed_again_after_a_rotation() {
        let (site, other) = (Site::new(), Site::new());
        let state = |site: &Site, name: &str| {
            let verdict = Verdict::ForgetClient { name: name.into(), identity: None };
            site.server(Operation::State { verdict, turn: 3 })
        };
        assert_eq!(why(state(&site, "VM")), Why::Request);
        let (first, statement) = stated(state(&site, "vm-1")).remove(0);
        assert_eq!((statement.server.as_str(), statement.number, statement.turn), ("gpu1", 1, 3));
        assert_eq!(statement.unix, site.clock.unix());
        let site = Site { keeper: open(&site.folder, &site.clock), ..site };
        assert_eq!(stated(state(&site, "vm-2"))[0].1.number, 2, "also after a restart");
        let present = site.keeper.present().unwrap();
        assert_eq!(present.stated(&first), Some(statement));
        let foreign = stated(state(&other, "vm-1")).remove(0).0;
        let mut forged = vec![foreign.clone(), Signed { authority: site.authority(), ..foreign }];
        forged.extend([0, 20, 40].map(|at| {
            let mut altered = first.clone();
            altered.body[at % first.body.len()] ^= 1;
            altered
        }));
        forged.push(Signed { signature: vec![0; 70], ..first.clone() });
        for forged in &forged {
            assert_eq!(present.stated(forged), None, "{forged:?}");
        }
        // The new authority signs no other ones again.
        for step in [Step::Begin(None), Step::Switch] {
            site.root(Operation::Privileged(Privileged::Rotate(step))).unwrap();
        }
        let again = |all: &[Signed]| {
            site.server(Operation::StateAgain { signed: all.iter().map(Signed::bytes).collect() })
        };
        for forged in forged {
            assert_eq!(why(again(&[first.clone(), forged])), Why::Request);
        }
        assert_eq!(why(again(&vec![first.clone(); RESTATED + 1])), Why::Request);
        let newer = stated(again(&vec![first.clone(); RESTATED])).remove(0).0;
        assert_eq!((&newer.body, newer.authority), (&first.body, site.authority()));
        site.root(Operation::Privileged(Privileged::Rotate(Step::Finish))).unwrap();
        let present = site.keeper.present().unwrap();
        assert!(present.stated(&newer).is_some() && present.stated(&first).is_none());
    }

    #[test]
    fn signatures_have_a_rate() {
        let mut turns = Turns::default();
        let now = Duration::from_secs(100);
        let waits: Vec<_> = (0..200).map_while(|_| turns.take(now)).collect();
        assert_eq!(waits.iter().filter(|wait| wait.is_zero()).count(), 20);
        assert_eq!(waits.len(), 120, "{:?}", waits.last());
        assert_eq!(turns.take(now + Duration::from_secs(7)), Some(Duration::ZERO));
    }

    #[test]
    fn authorities_are_taken_over_with_their_rotation_and_tokens() {
        let (site, folder) = (Site::new(), tempfile::tempdir().unwrap());
        let token = site.token("*", 1);
        let empty = Site { keeper: open(&folder, &site.clock), folder, clock: site.clock.clone() };
        assert_eq!(why(empty.root(Operation::Present)), Why::Missing);
        site.root(Operation::Privileged(Privileged::Rotate(Step::Begin(None)))).unwrap();
        let tokens = locked(&site.keeper.tokens).clone();
        empty.root(Operation::AdoptTokens(tokens)).unwrap();
        let exported = site.keeper.present().unwrap().export();
        let rotation = site.keeper.present().unwrap().rotation();
        let adopt = Operation::Adopt { exported, rotation };
        empty.root(adopt.clone()).unwrap();
        assert_eq!(why(empty.root(adopt)), Why::Exists);
        let (was, is) = (site.keeper.present().unwrap(), empty.keeper.present().unwrap());
        assert_eq!((is.export(), is.rotation()), (was.export(), was.rotation()));
        issued(empty.server(Operation::join(&token, "vm-1", None, &csr(), true)));
    }
}
