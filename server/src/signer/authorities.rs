//! The pool's authorities: one, and a second one during a rotation.
//!
//! A rotation adds the files `next.pem`, `next.key` and `rotation.json` to their folder. The
//! document alone decides: a step is done once it is written or removed. A server that was killed
//! completes or undoes the rest at its next start.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use data_encoding::HEXLOWER;
use gpusession_proto::statement::{Signed, Statement};
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{CertificateError, RootCertStore};
use serde::{Deserialize, Serialize};

use super::ca::{Authority, AuthorityError, AuthorityKey, Place, make_folder};
use super::lock::locked;
use crate::certificate::{CLOCK_SKEW_GRACE, expiry};
use crate::clock::Random;
use crate::store::{self, StoreError};

/// Phase of a rotation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// Clients learn the new authority; the old one signs.
    Begun,
    /// The new authority signs; certificates of the old one stay valid.
    Switched,
    /// The new authority's files replace the old one's.
    Finishing,
}

impl Phase {
    /// Returns the word that verbs show.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Begun => "begun",
            Self::Switched => "switched",
            Self::Finishing => "finishing",
        }
    }
}

/// The document of a rotation.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Note {
    phase: Phase,
    /// Time of the phase's begin, in seconds since 1970.
    since_unix: u64,
}

/// Reason why a step of a rotation is refused.
#[derive(Debug, thiserror::Error)]
pub enum NotRotated {
    /// No rotation is under way.
    #[error("no rotation is under way; `gpuserver pool rotate begin` begins one")]
    NotBegun,
    /// The new authority signs already.
    #[error("the new authority signs already; `gpuserver pool rotate finish` ends this rotation")]
    Switched,
    /// The old authority still signs.
    #[error("the old authority still signs; `gpuserver pool rotate switch` comes first")]
    NotSwitched,
    /// The export is of another pool, of another rotation, or of no rotation.
    #[error(
        "the export has no new authority for this server: run `gpuserver pool export` on the server where the rotation began"
    )]
    Foreign,
    /// A file or a certificate is at fault.
    #[error(transparent)]
    Authority(#[from] AuthorityError),
}

impl From<StoreError> for NotRotated {
    fn from(e: StoreError) -> Self {
        Self::Authority(e.into())
    }
}

/// The authorities at one time: their certificates, or with their keys.
pub struct Present<A = Authority> {
    rotation: Option<Note>,
    signer: A,
    other: Option<A>,
    /// Certificates for clients: the signer's first, then confirmations.
    list: String,
    verifier: Arc<dyn ClientCertVerifier>,
}

/// The authorities as the signer describes them to the server: certificates in PEM.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Described {
    rotation: Option<Note>,
    signer: String,
    other: Option<String>,
    list: String,
}

impl<A: AsRef<Authority>> Present<A> {
    fn new(
        rotation: Option<Note>,
        signer: A,
        other: Option<A>,
        list: String,
    ) -> Result<Self, AuthorityError> {
        let mut roots = RootCertStore::empty();
        for authority in [Some(&signer), other.as_ref()].into_iter().flatten() {
            roots.add(authority.as_ref().der().clone())?;
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
            // The names of a moment are no help to clients, which have one certificate.
            .clear_root_hint_subjects()
            .allow_unauthenticated()
            .build()
            .map_err(|e| rustls::Error::General(e.to_string()))?;
        Ok(Self { rotation, signer, other, list, verifier })
    }

    /// Returns phase and begin of the rotation that is under way.
    pub fn rotation(&self) -> Option<(Phase, u64)> {
        self.rotation.map(|note| (note.phase, note.since_unix))
    }

    /// Returns the authority that signs certificates.
    pub fn signer(&self) -> &A {
        &self.signer
    }

    /// Returns the authorities whose certificates are valid, the signing one first.
    pub fn all(&self) -> impl DoubleEndedIterator<Item = &A> {
        [Some(&self.signer), self.other.as_ref()].into_iter().flatten()
    }

    /// Returns the old authority of the rotation, else the only one.
    pub fn old(&self) -> &A {
        match self.rotation {
            Some(Note { phase: Phase::Switched, .. }) => self.other.as_ref().unwrap_or(&self.signer),
            _ => &self.signer,
        }
    }

    /// Returns the new authority of the rotation.
    pub fn new_one(&self) -> Option<&A> {
        match self.rotation?.phase {
            Phase::Begun => self.other.as_ref(),
            _ => Some(&self.signer),
        }
    }

    /// Returns the valid authority with this fingerprint.
    pub fn find(&self, fingerprint: &[u8; 32]) -> Option<&A> {
        self.all().find(|authority| authority.as_ref().fingerprint() == *fingerprint)
    }

    /// Returns the fingerprint, in hex, of the valid authority with this name.
    pub fn named(&self, name: Option<[u8; 32]>) -> Option<String> {
        let authority = self.all().find(|authority| Some(authority.as_ref().name()) == name)?;
        Some(HEXLOWER.encode(&authority.as_ref().fingerprint()))
    }

    /// Returns the authority that signs for a client: the old one if `knows` denies the new one.
    ///
    /// A client that has been away, or is of an earlier version, would refuse a certificate of an
    /// authority that it does not trust.
    pub fn signer_for(&self, knows: impl Fn(&str) -> bool) -> &A {
        let known = |authority: &&A| knows(&HEXLOWER.encode(&authority.as_ref().fingerprint()));
        self.all().find(known).unwrap_or(self.old())
    }

    /// Returns the list of authorities for clients.
    pub fn list(&self) -> &str {
        &self.list
    }

    /// Returns the certificates of the authorities, in PEM.
    pub fn certificates(&self) -> String {
        self.all().map(|authority| authority.as_ref().pem()).collect()
    }

    /// Returns the check of certificates of clients and administrators.
    pub fn verifier(&self) -> &Arc<dyn ClientCertVerifier> {
        &self.verifier
    }

    /// Verifies a certificate of a client or an administrator, also an expired one.
    pub fn verify(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        let verified = self.verifier.verify_client_cert(end_entity, intermediates, now);
        let Err(rustls::Error::InvalidCertificate(
            CertificateError::Expired | CertificateError::ExpiredContext { .. },
        )) = verified
        else {
            return verified;
        };
        let Some(end) = expiry(end_entity) else { return verified };
        let end = UnixTime::since_unix_epoch(Duration::from_secs(end));
        self.verifier.verify_client_cert(end_entity, intermediates, end)
    }

    /// Verifies a statement that one of the authorities has signed, and reads it.
    pub fn stated(&self, signed: &Signed) -> Option<Statement> {
        let authority = self.find(&signed.authority)?;
        let signed_by = authority.as_ref().has_stated(&signed.body, &signed.signature);
        signed_by.then(|| Statement::read(&signed.body).ok()).flatten()
    }

    /// Describes the authorities without their keys.
    pub fn describe(&self) -> Described {
        let pem = |authority: &A| authority.as_ref().pem().to_owned();
        Described {
            rotation: self.rotation,
            signer: pem(&self.signer),
            other: self.other.as_ref().map(pem),
            list: self.list.clone(),
        }
    }
}

impl TryFrom<Described> for Present {
    type Error = AuthorityError;

    fn try_from(described: Described) -> Result<Self, AuthorityError> {
        let Described { rotation, signer, other, list } = described;
        let other = other.map(|pem| Authority::from_pem(&pem)).transpose()?;
        Self::new(rotation, Authority::from_pem(&signer)?, other, list)
    }
}

impl Present<AuthorityKey> {
    /// Returns certificates and keys, for another server of the pool.
    pub fn export(&self) -> String {
        let ordered = [Some(self.old()), self.new_one()].into_iter().flatten();
        ordered.map(AuthorityKey::export).collect()
    }

    fn load(folder: &Path, unix: u64, random: &dyn Random) -> Result<Self, AuthorityError> {
        let rotation: Option<Note> = store::read(&document(folder))?;
        let at = |place| AuthorityKey::read(folder, place);
        let (signer, other) = match rotation.map(|note| note.phase) {
            None => (at(Place::Present)?, None),
            Some(Phase::Begun) => (at(Place::Present)?, Some(at(Place::Next)?)),
            Some(Phase::Switched) => (at(Place::Next)?, Some(at(Place::Present)?)),
            Some(Phase::Finishing) => {
                // Each of the two files may have its final name already.
                let [next, present] = [Place::Next, Place::Present].map(|place| place.files(folder));
                let files = next.into_iter().zip(present);
                let mut files = files.map(|(next, present)| if next.exists() { next } else { present });
                let pair = [files.next(), files.next()].map(Option::unwrap_or_default);
                (AuthorityKey::read_files(folder, pair)?, None)
            }
        };
        let rotation = rotation.filter(|note| note.phase != Phase::Finishing);
        let mut list = signer.pem().to_owned();
        if let Some(other) = &other {
            list += other.pem();
            list += &signer.confirm(other, unix, random)?;
            list += &other.confirm(&signer, unix, random)?;
        }
        Self::new(rotation, signer, other, list)
    }
}

fn document(folder: &Path) -> PathBuf {
    folder.join("rotation.json")
}

/// Completes or undoes the rest of a step that was interrupted.
fn settle(folder: &Path) -> Result<(), StoreError> {
    let document = document(folder);
    let rotation: Option<Note> = store::read(&document)?;
    let settled = (|| match rotation.map(|note| note.phase) {
        Some(Phase::Begun | Phase::Switched) => Ok(()),
        Some(Phase::Finishing) => {
            let files = Place::Next.files(folder).into_iter().zip(Place::Present.files(folder));
            for (next, present) in files {
                unless_missing(fs::rename(next, present))?;
            }
            File::open(folder)?.sync_all()?;
            remove(&document)
        }
        None => Place::Next.files(folder).iter().try_for_each(|file| remove(file)),
    })();
    settled.map_err(|error| StoreError::Io { path: folder.into(), error })
}

fn unless_missing(result: io::Result<()>) -> io::Result<()> {
    result.or_else(|e| if e.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(e) })
}

fn remove(file: &Path) -> io::Result<()> {
    unless_missing(fs::remove_file(file))?;
    file.parent().map_or(Ok(()), |folder| File::open(folder)?.sync_all())
}

/// The authorities of the pool, on disk and in use.
pub struct Authorities {
    folder: PathBuf,
    random: Arc<dyn Random>,
    present: Mutex<Arc<Present<AuthorityKey>>>,
    /// Held during a step.
    steps: Mutex<()>,
}

impl Authorities {
    /// Opens the authorities of an existing pool. The caller holds the lock of the folder.
    pub fn open(folder: &Path, unix: u64, random: Arc<dyn Random>) -> Result<Self, AuthorityError> {
        if folder.exists() {
            settle(folder)?;
        }
        let present = Mutex::new(Arc::new(Present::load(folder, unix, random.as_ref())?));
        Ok(Self { folder: folder.into(), random, present, steps: Mutex::default() })
    }

    /// Removes the authorities with their keys; the caller has closed them.
    pub fn remove(folder: &Path) -> Result<(), StoreError> {
        // The keys first, so that no interruption leaves one behind a missing certificate.
        let mut files: Vec<_> = [Place::Next, Place::Present].iter().flat_map(|p| p.files(folder)).collect();
        files.sort_by_key(|file| file.extension().is_none_or(|kind| kind != "key"));
        files.push(document(folder));
        let removed = unless_missing(files.iter().try_for_each(|file| remove(file)));
        removed.map_err(|error| StoreError::Io { path: folder.into(), error })
    }

    /// Reads the authorities, also those of a running server.
    pub fn read(
        folder: &Path,
        unix: u64,
        random: &dyn Random,
    ) -> Result<Present<AuthorityKey>, AuthorityError> {
        Present::load(folder, unix, random)
    }

    /// Stores the authorities that another server exported, on a server that has none.
    ///
    /// During a rotation, this server begins it, too; `phase` is [`Phase::Begun`], or the phase of
    /// the same server's authorities in another folder.
    pub fn import(
        folder: &Path,
        exported: &str,
        phase: Phase,
        since_unix: u64,
    ) -> Result<AuthorityKey, AuthorityError> {
        let (old, rest) = AuthorityKey::exported(exported)?;
        let new = match rest.trim() {
            "" => None,
            rest => Some(AuthorityKey::exported(rest)?.0),
        };
        if folder.join("authority.key").exists() {
            return Err(AuthorityError::Exists(folder.into()));
        }
        if let Some(new) = new {
            make_folder(folder)?;
            new.write(folder, Place::Next)?;
            store::write(&document(folder), &Note { phase, since_unix })?;
        }
        // Last, since its key marks the authority as complete.
        old.keep(folder)
    }

    /// Returns the present authorities.
    pub fn present(&self) -> Arc<Present<AuthorityKey>> {
        locked(&self.present).clone()
    }

    fn reload(&self, unix: u64) -> Result<(), NotRotated> {
        let present = Present::load(&self.folder, unix, self.random.as_ref())?;
        *locked(&self.present) = Arc::new(present);
        Ok(())
    }

    fn note(&self, phase: Phase, unix: u64) -> Result<(), NotRotated> {
        Ok(store::write(&document(&self.folder), &Note { phase, since_unix: unix })?)
    }

    /// Begins a rotation: makes the new authority, or takes it from the export of another server.
    ///
    /// As with each step, returns `false` if the step was done before.
    pub fn begin(&self, pool: &str, exported: Option<&str>, unix: u64) -> Result<bool, NotRotated> {
        let _step = locked(&self.steps);
        let present = self.present();
        let new = match exported {
            None => None,
            Some(text) => Some(theirs(&present, text)?),
        };
        match (present.rotation().map(|(phase, _)| phase), &new) {
            (None, _) => {}
            (Some(Phase::Begun), None) => return Ok(false),
            (Some(Phase::Begun), Some(new)) => {
                let same = present.new_one().is_some_and(|own| own.fingerprint() == new.fingerprint());
                return if same { Ok(false) } else { Err(NotRotated::Foreign) };
            }
            (Some(Phase::Switched | Phase::Finishing), _) => return Err(NotRotated::Switched),
        }
        let new = match new {
            Some(new) => new,
            None => {
                // Clients take the later of two authorities for the new one.
                let later = present.signer.begins_unix() + CLOCK_SKEW_GRACE.as_secs() + 1;
                AuthorityKey::generate(pool, unix.max(later), self.random.as_ref())?
            }
        };
        new.write(&self.folder, Place::Next)?;
        self.note(Phase::Begun, unix)?;
        self.reload(unix)?;
        Ok(true)
    }

    /// Lets the new authority sign from now on.
    pub fn switch(&self, unix: u64) -> Result<bool, NotRotated> {
        let _step = locked(&self.steps);
        match self.present().rotation().map(|(phase, _)| phase) {
            None => return Err(NotRotated::NotBegun),
            Some(Phase::Begun) => self.note(Phase::Switched, unix)?,
            Some(Phase::Switched | Phase::Finishing) => return Ok(false),
        }
        self.reload(unix)?;
        Ok(true)
    }

    /// Drops the old authority.
    pub fn finish(&self, unix: u64) -> Result<bool, NotRotated> {
        let _step = locked(&self.steps);
        match self.present().rotation().map(|(phase, _)| phase) {
            None => return Ok(false),
            Some(Phase::Begun) => return Err(NotRotated::NotSwitched),
            Some(Phase::Switched | Phase::Finishing) => self.note(Phase::Finishing, unix)?,
        }
        settle(&self.folder)?;
        self.reload(unix)?;
        Ok(true)
    }

    /// Drops the new authority, which has signed nothing yet.
    pub fn abort(&self, unix: u64) -> Result<bool, NotRotated> {
        let _step = locked(&self.steps);
        match self.present().rotation().map(|(phase, _)| phase) {
            None => return Ok(false),
            Some(Phase::Begun) => {}
            Some(Phase::Switched | Phase::Finishing) => return Err(NotRotated::Switched),
        }
        let failed = |error| StoreError::Io { path: self.folder.clone(), error };
        remove(&document(&self.folder)).map_err(failed)?;
        settle(&self.folder)?;
        self.reload(unix)?;
        Ok(true)
    }
}

/// Returns the new authority in the export of another server that has begun the rotation.
fn theirs(present: &Present<AuthorityKey>, exported: &str) -> Result<AuthorityKey, NotRotated> {
    let (old, rest) = AuthorityKey::exported(exported)?;
    if old.fingerprint() != present.old().fingerprint() || rest.trim().is_empty() {
        return Err(NotRotated::Foreign);
    }
    let (new, _) = AuthorityKey::exported(rest)?;
    let apart = new.name() != old.name() && new.begins_unix() > old.begins_unix();
    if apart { Ok(new) } else { Err(NotRotated::Foreign) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::SystemRandom;

    const NOW: u64 = 1_900_000_000;

    struct Site(tempfile::TempDir);

    impl Site {
        fn new() -> Self {
            let site = Self(tempfile::tempdir().unwrap());
            AuthorityKey::init(site.0.path(), "lab", NOW, &SystemRandom).unwrap();
            site
        }

        /// Opens the files, as a server does at its start.
        fn open(&self) -> Authorities {
            Authorities::open(self.0.path(), NOW, Arc::new(SystemRandom)).unwrap()
        }

        fn files(&self) -> Vec<String> {
            let entries = fs::read_dir(self.0.path()).unwrap();
            let mut names: Vec<_> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
            names.sort();
            names
        }

        fn at(&self, name: &str) -> PathBuf {
            self.0.path().join(name)
        }
    }

    fn phase(all: &Authorities) -> Option<Phase> {
        all.present().rotation().map(|(phase, _)| phase)
    }

    const ONE: [&str; 2] = ["authority.key", "authority.pem"];
    const TWO: [&str; 5] = ["authority.key", "authority.pem", "next.key", "next.pem", "rotation.json"];

    #[test]
    fn each_step_is_done_once_and_in_order() {
        let site = Site::new();
        let all = site.open();
        let old = all.present().signer().fingerprint();
        assert!(matches!(all.switch(NOW), Err(NotRotated::NotBegun)));
        assert!(!all.finish(NOW).unwrap() && !all.abort(NOW).unwrap());

        assert!(all.begin("lab", None, NOW).unwrap() && !all.begin("lab", None, NOW).unwrap());
        assert!(matches!(all.finish(NOW), Err(NotRotated::NotSwitched)));
        assert!(all.abort(NOW).unwrap() && !all.abort(NOW).unwrap());
        assert_eq!((site.files(), phase(&all)), (ONE.map(String::from).to_vec(), None));

        assert!(all.begin("lab", None, NOW).unwrap());
        assert_eq!(site.files(), TWO);
        let present = all.present();
        let new = present.new_one().unwrap().fingerprint();
        assert_eq!((present.signer().fingerprint(), present.old().fingerprint()), (old, old));
        assert_eq!(present.list().matches("BEGIN CERTIFICATE").count(), 4);
        assert!(present.list().starts_with(present.signer().pem()));

        assert!(all.switch(NOW).unwrap() && !all.switch(NOW).unwrap());
        assert!(matches!(all.begin("lab", None, NOW), Err(NotRotated::Switched)));
        assert!(matches!(all.abort(NOW), Err(NotRotated::Switched)));
        let present = all.present();
        assert_eq!((present.signer().fingerprint(), present.old().fingerprint()), (new, old));
        assert!(present.list().starts_with(present.signer().pem()));

        assert!(all.finish(NOW).unwrap() && !all.finish(NOW).unwrap());
        assert_eq!((site.files(), phase(&all)), (ONE.map(String::from).to_vec(), None));
        assert_eq!(all.present().signer().fingerprint(), new);
        assert_eq!(site.open().present().signer().fingerprint(), new);
        assert_eq!(all.present().list(), all.present().signer().pem());
        // The next rotation begins with this authority.
        assert!(all.begin("lab", None, NOW).unwrap());
        assert_eq!(all.present().old().fingerprint(), new);
    }

    #[test]
    fn a_server_killed_at_any_file_of_a_step_can_repeat_the_step() {
        let site = Site::new();
        let old = site.open().present().signer().fingerprint();
        let other = Site::new();
        let made = other.open();
        made.begin("lab", None, NOW).unwrap();
        // Killed in `begin`, after one and after both files of the new authority.
        for files in [&["next.pem"][..], &["next.pem", "next.key"]] {
            for file in files {
                fs::copy(other.at(file), site.at(file)).unwrap();
            }
            let all = site.open();
            assert_eq!((phase(&all), site.files()), (None, ONE.map(String::from).to_vec()), "{files:?}");
        }
        let all = site.open();
        assert!(all.begin("lab", None, NOW).unwrap());
        let new = all.present().new_one().unwrap().fingerprint();
        // Killed in `abort`, after the document is removed.
        let document = fs::read(site.at("rotation.json")).unwrap();
        let kept = ["next.pem", "next.key"].map(|file| fs::read(site.at(file)).unwrap());
        fs::remove_file(site.at("rotation.json")).unwrap();
        assert!(!site.open().abort(NOW).unwrap());
        assert_eq!(site.files(), ONE);
        for (file, bytes) in ["next.pem", "next.key"].iter().zip(&kept) {
            fs::write(site.at(file), bytes).unwrap();
        }
        fs::write(site.at("rotation.json"), document).unwrap();
        // Killed after `begin` and after `switch`.
        let all = site.open();
        assert_eq!((phase(&all), all.present().signer().fingerprint()), (Some(Phase::Begun), old));
        assert!(all.switch(NOW).unwrap());
        let all = site.open();
        assert_eq!((phase(&all), all.present().signer().fingerprint()), (Some(Phase::Switched), new));
        // Killed in `finish`, after none, one and both renames.
        all.note(Phase::Finishing, NOW).unwrap();
        for renamed in [None, Some("pem"), Some("key")] {
            if let Some(kind) = renamed {
                fs::rename(site.at(&format!("next.{kind}")), site.at(&format!("authority.{kind}"))).unwrap();
            }
            let read = Authorities::read(site.0.path(), NOW, &SystemRandom).unwrap();
            assert_eq!((read.signer().fingerprint(), read.all().count()), (new, 1), "{renamed:?}");
            let copy = Site(tempfile::tempdir().unwrap());
            for file in site.files() {
                fs::copy(site.at(&file), copy.at(&file)).unwrap();
            }
            let all = copy.open();
            assert!(!all.finish(NOW).unwrap());
            assert_eq!(
                (all.present().signer().fingerprint(), copy.files()),
                (new, ONE.map(String::from).to_vec())
            );
        }
    }

    #[test]
    fn another_server_takes_the_new_authority_from_an_export() {
        let (first, second) = (Site::new(), Site(tempfile::tempdir().unwrap()));
        let one = first.open();
        let alone = one.present().export();
        Authorities::import(second.0.path(), &alone, Phase::Begun, NOW).unwrap();
        let two = second.open();
        assert!(matches!(two.begin("lab", Some(&alone), NOW), Err(NotRotated::Foreign)));
        one.begin("lab", None, NOW).unwrap();
        let both = one.present().export();
        for bad in ["", "garbage", &both[..both.len() - 30]] {
            assert!(two.begin("lab", Some(bad), NOW).is_err(), "{bad}");
        }
        let strange = Site::new();
        let stranger = strange.open();
        stranger.begin("lab", None, NOW).unwrap();
        let foreign = stranger.present().export();
        assert!(matches!(two.begin("lab", Some(&foreign), NOW), Err(NotRotated::Foreign)));
        // The first server may have switched already.
        one.switch(NOW).unwrap();
        assert_eq!(one.present().export(), both);
        assert!(two.begin("lab", Some(&both), NOW).unwrap() && !two.begin("lab", Some(&both), NOW).unwrap());
        let new = |all: &Authorities| all.present().new_one().unwrap().fingerprint();
        assert_eq!((new(&two), phase(&two)), (new(&one), Some(Phase::Begun)));
        let mixed = [&*alone, &foreign[foreign.len() / 2..]].concat();
        assert!(two.begin("lab", Some(&mixed), NOW).is_err());

        // A server that comes to the pool now begins with both.
        let third = Site(tempfile::tempdir().unwrap());
        Authorities::import(third.0.path(), &both, Phase::Begun, NOW).unwrap();
        let three = third.open();
        assert_eq!((new(&three), phase(&three)), (new(&one), Some(Phase::Begun)));
        assert!(matches!(
            Authorities::import(third.0.path(), &both, Phase::Begun, NOW),
            Err(AuthorityError::Exists(_))
        ));
    }
}
