//! TLS of the control port: the server's own certificate, and the certificates that it accepts.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use data_encoding::HEXLOWER;
use rustls::client::danger::HandshakeSignatureValid;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls::time_provider::TimeProvider;
use rustls::{DigitallySignedStruct, DistinguishedName, ServerConfig, SignatureScheme};
use tonic::transport::Identity;

use super::lock::locked;
use crate::certificate::expiry;
use crate::clock::Clock;
use crate::signer::ca::{Authority, AuthorityError, SERVER_TTL, request};
use crate::signer::link::Signer;
use crate::signer::member::Held;
use crate::signer::{Operation, Refused, Why};

/// Age at which a server replaces its certificate: a third of its life.
const RENEWAL_AGE: u64 = 10 * 24 * 3600;
/// Pause after a failed replacement, in seconds.
const RETRY_INTERVAL: u64 = 3600;

/// The server's certificates and keys, which never leave this process: one of each authority.
///
/// New connections get the newest one; connections that exist are not touched.
#[derive(Debug)]
pub struct ServerCertificate {
    name: String,
    signer: Arc<Signer>,
    /// By the authority's fingerprint.
    shown: Mutex<BTreeMap<[u8; 32], Shown>>,
}

#[derive(Debug)]
struct Shown {
    key: Arc<CertifiedKey>,
    /// Certificate and key for calls of other servers.
    calling: Calling,
    renew_unix: u64,
    expires_unix: u64,
}

/// Certificate and key in PEM.
struct Calling(Identity);

impl std::fmt::Debug for Calling {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Calling")
    }
}

impl Shown {
    /// Makes a key, and has the signer sign its certificate.
    fn new(signer: &Signer, authority: &Authority, name: &str, unix: u64) -> Result<Self, Refused> {
        let key = rcgen::KeyPair::generate().map_err(AuthorityError::from)?;
        let csr_pem = request(&key)?;
        let (name, fingerprint) = (name.to_owned(), authority.fingerprint());
        let issued = signer.link().sign(Operation::Server { name, csr_pem, authority: fingerprint })?;
        let held = Held {
            authority: HEXLOWER.encode(&fingerprint),
            certificate: issued.pem,
            key: key.serialize_pem(),
        };
        let shown = Self::of(&held, authority, unix + RENEWAL_AGE)?;
        if let Some(member) = signer.link().member() {
            member.keep(held)?;
        }
        Ok(shown)
    }

    /// Shows a certificate that this server has.
    fn of(held: &Held, authority: &Authority, renew_unix: u64) -> Result<Self, Refused> {
        let unusable = |e: String| Refused::new(Why::Failed, format!("the server's certificate: {e}"));
        let der = CertificateDer::from_pem_slice(held.certificate.as_bytes());
        let der = der.map_err(|e| unusable(e.to_string()))?;
        let expires_unix = expiry(&der).unwrap_or(0);
        let calling = Calling(Identity::from_pem(&held.certificate, &held.key));
        let key = PrivateKeyDer::from_pem_slice(held.key.as_bytes()).map_err(|e| unusable(e.to_string()))?;
        let provider = rustls::crypto::ring::default_provider();
        let chain = vec![der, authority.der().clone()];
        let key = CertifiedKey::from_der(chain, key, &provider).map_err(|e| unusable(e.to_string()))?;
        Ok(Self { key: Arc::new(key), calling, renew_unix, expires_unix })
    }
}

impl ServerCertificate {
    /// Makes the first certificates.
    pub fn new(signer: Arc<Signer>, name: &str, unix: u64) -> Result<Self, Refused> {
        let made = Self { name: name.into(), signer, shown: Mutex::default() };
        if made.take_kept()? {
            return Ok(made);
        }
        made.keep(unix).map_or(Ok(made.expires_unix()), |kept| kept)?;
        Ok(made)
    }

    /// Shows the certificates that a server without the authority's key has in its file.
    ///
    /// They are replaced later, so that the server starts while every issuer is away.
    fn take_kept(&self) -> Result<bool, Refused> {
        let Some(member) = self.signer.link().member() else { return Ok(false) };
        let present = self.signer.present();
        let mut shown = locked(&self.shown);
        for held in member.kept() {
            let of = |a: &&Authority| HEXLOWER.encode(&a.fingerprint()) == held.authority;
            let Some(authority) = present.all().find(of) else { continue };
            let kept = Shown::of(&held, authority, 0)?;
            let issued = kept.expires_unix.saturating_sub(SERVER_TTL.as_secs());
            shown.insert(authority.fingerprint(), Shown { renew_unix: issued + RENEWAL_AGE, ..kept });
        }
        Ok(!shown.is_empty())
    }

    /// Replaces the certificates that are due. Returns the end of the signing authority's, or
    /// `None` if nothing was due.
    pub fn keep(&self, unix: u64) -> Option<Result<u64, Refused>> {
        let present = self.signer.present();
        let mut kept = None;
        for authority in present.all() {
            let fingerprint = authority.fingerprint();
            if locked(&self.shown).get(&fingerprint).is_some_and(|shown| unix < shown.renew_unix) {
                continue;
            }
            let made = Shown::new(&self.signer, authority, &self.name, unix);
            let mut all = locked(&self.shown);
            kept = Some(match made {
                Ok(shown) => {
                    all.insert(fingerprint, shown);
                    Ok(())
                }
                Err(e) => {
                    if let Some(shown) = all.get_mut(&fingerprint) {
                        shown.renew_unix = unix + RETRY_INTERVAL;
                    }
                    Err(e)
                }
            });
            if matches!(kept, Some(Err(_))) {
                break;
            }
        }
        locked(&self.shown).retain(|known, _| present.all().any(|a| a.fingerprint() == *known));
        kept.map(|kept| kept.map(|()| self.expires_unix()))
    }

    /// Returns certificate and key for a call of another server.
    ///
    /// They are of the old authority until a rotation is finished: each server trusts that one.
    pub fn identity(&self) -> Identity {
        let old = self.signer.present().old().fingerprint();
        let shown = locked(&self.shown);
        let of_old = shown.get(&old).or_else(|| shown.values().next());
        of_old.map_or_else(|| Identity::from_pem("", ""), |shown| shown.calling.0.clone())
    }

    /// Returns the end of the signing authority's certificate, in seconds since 1970.
    pub fn expires_unix(&self) -> u64 {
        let signer = self.signer.present().signer().fingerprint();
        locked(&self.shown).get(&signer).map_or(0, |shown| shown.expires_unix)
    }
}

impl ResolvesServerCert for ServerCertificate {
    /// Shows a certificate of an authority that the client names.
    ///
    /// Earlier versions of clients, and administrators, name none: until a rotation is finished,
    /// they get the old one. So a peer that does not know the rotation trusts this server.
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let present = self.signer.present();
        let names = hello.certificate_authorities().unwrap_or_default();
        let named = |a: &&Authority| names.iter().any(|name| a.is_named(name.as_ref()));
        let authority = present.all().find(named).unwrap_or(present.old());
        let shown = locked(&self.shown);
        let shown = shown.get(&authority.fingerprint()).or_else(|| shown.values().next())?;
        Some(shown.key.clone())
    }
}

/// The server's clock, for TLS.
struct TlsClock(Arc<dyn Clock>);

impl std::fmt::Debug for TlsClock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("TlsClock")
    }
}

impl TimeProvider for TlsClock {
    fn current_time(&self) -> Option<UnixTime> {
        Some(UnixTime::since_unix_epoch(Duration::from_secs(self.0.unix())))
    }
}

/// Accepts certificates of the pool's present authorities, expired ones too.
///
/// A TLS alert would tell the holder little. The control service refuses an expired certificate
/// with the reason and the remedy, and renews it for some time.
#[derive(Debug)]
struct OfThisPool(Arc<Signer>);

impl ClientCertVerifier for OfThisPool {
    fn offer_client_auth(&self) -> bool {
        true
    }

    fn client_auth_mandatory(&self) -> bool {
        false
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        // The authorities change; clients have one certificate, and need no hint.
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        self.0.present().verify(end_entity, intermediates, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.0.present().verifier().verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.0.present().verifier().verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.present().verifier().supported_verify_schemes()
    }
}

/// Returns the TLS configuration of the control port.
///
/// It accepts clients of this pool, and clients without a certificate, which can only join.
pub fn server_tls(
    signer: Arc<Signer>,
    shown: Arc<ServerCertificate>,
    clock: Arc<dyn Clock>,
) -> Result<ServerConfig, AuthorityError> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ServerConfig::builder_with_details(provider, Arc::new(TlsClock(clock)))
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_client_cert_verifier(Arc::new(OfThisPool(signer)))
        .with_cert_resolver(shown);
    config.alpn_protocols = vec![b"h2".to_vec()];
    // Connections are long-lived, so tickets for later ones are useless.
    config.send_tls13_tickets = 0;
    config.session_storage = Arc::new(rustls::server::NoServerSessionStorage {});
    Ok(config)
}

#[cfg(test)]
mod tests {
    use gpusession_proto::join;
    use rcgen::{CertificateParams, KeyPair};
    use rustls::client::WebPkiServerVerifier;
    use rustls::client::danger::ServerCertVerifier;
    use rustls::pki_types::ServerName;
    use rustls::{ClientConfig, ClientConnection, RootCertStore, ServerConnection};

    use super::*;
    use crate::certificate::{Role, holder, issuer};
    use crate::clock::SystemRandom;
    use crate::clock::testing::TestClock;
    use crate::signer::Step;
    use crate::signer::authorities::Authorities;
    use crate::signer::ca::{AuthorityKey, CLIENT_TTL, Order};
    use crate::signer::keeper::{Keeper, Places};
    use crate::signer::link::Link;

    const DAY: Duration = Duration::from_secs(24 * 3600);

    struct Site {
        state: tempfile::TempDir,
        clock: Arc<TestClock>,
        signer: Arc<Signer>,
        shown: Arc<ServerCertificate>,
        tls: Arc<ServerConfig>,
    }

    impl Site {
        /// The server of a pool that was made a moment ago; its clock stands `ahead` of today.
        fn new(ahead: Duration) -> Self {
            let state = tempfile::tempdir().unwrap();
            let clock = Arc::new(TestClock::default());
            clock.advance(Duration::from_secs(crate::clock::SystemClock.unix() - clock.unix()) + ahead);
            let random = Arc::new(SystemRandom);
            let keeper = Keeper::open(Places::own(state.path()), clock.clone(), random).unwrap();
            let link = Link::Here(Box::new(keeper), None);
            link.ask(Operation::Init { name: "gpu1".into() }).unwrap();
            let signer = Arc::new(Signer::open(link).unwrap());
            let shown = ServerCertificate::new(signer.clone(), "gpu1", clock.unix());
            let shown = Arc::new(shown.unwrap());
            let tls = Arc::new(server_tls(signer.clone(), shown.clone(), clock.clone()).unwrap());
            Self { state, clock, signer, shown, tls }
        }

        fn client(&self) -> Arc<ClientConfig> {
            let present = self.signer.present();
            self.client_of(present.signer())
        }

        /// A client with a certificate of this authority, which trusts it and names none.
        fn client_of(&self, authority: &Authority) -> Arc<ClientConfig> {
            let mut roots = RootCertStore::empty();
            roots.add(authority.der().clone()).unwrap();
            let provider = Arc::new(rustls::crypto::ring::default_provider());
            let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider);
            self.client_with(authority, verifier.build().unwrap())
        }

        /// A client of the present version, which trusts these authorities.
        fn trusting(&self, own: &Authority, trusts: &[&Authority]) -> Arc<ClientConfig> {
            let trusts = trusts.iter().map(|authority| authority.der().clone()).collect();
            let trusts = gpusessiond::trust::Authorities::new(trusts).unwrap();
            self.client_with(own, trusts.verifier(Arc::default()).unwrap())
        }

        fn client_with(&self, own: &Authority, check: Arc<dyn ServerCertVerifier>) -> Arc<ClientConfig> {
            let key = KeyPair::generate().unwrap();
            let csr = CertificateParams::new(vec![]).unwrap().serialize_request(&key).unwrap().pem().unwrap();
            let order = Order {
                role: Role::Client,
                name: "vm-1",
                life: CLIENT_TTL,
                identity: None,
                signs_renewals: false,
            };
            let keys = Authorities::read(self.state.path(), self.clock.unix(), &SystemRandom).unwrap();
            let key_of_own: &AuthorityKey = keys.find(&own.fingerprint()).unwrap();
            let issued = key_of_own.issue(&csr, &order, self.clock.unix(), &SystemRandom).unwrap();
            let der = CertificateDer::from_pem_slice(issued.pem.as_bytes()).unwrap();
            let provider = Arc::new(rustls::crypto::ring::default_provider());
            let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
            let clock = Arc::new(TlsClock(self.clock.clone()));
            let config = ClientConfig::builder_with_details(provider, clock)
                .with_protocol_versions(&[&rustls::version::TLS13])
                .unwrap()
                .dangerous()
                .with_custom_certificate_verifier(check)
                .with_client_auth_cert(vec![der], key)
                .unwrap();
            Arc::new(config)
        }

        fn connect(&self, client: &Arc<ClientConfig>) -> Result<Connection, rustls::Error> {
            let name = ServerName::try_from(join::any_server()).unwrap();
            let mut connection = Connection {
                client: ClientConnection::new(client.clone(), name).unwrap(),
                server: ServerConnection::new(self.tls.clone()).unwrap(),
            };
            while connection.client.is_handshaking() || connection.server.is_handshaking() {
                connection.exchange()?;
            }
            Ok(connection)
        }
    }

    struct Connection {
        client: ClientConnection,
        server: ServerConnection,
    }

    impl Connection {
        /// Moves the bytes of both sides.
        fn exchange(&mut self) -> Result<(), rustls::Error> {
            let mut wire = Vec::new();
            while self.client.wants_write() {
                self.client.write_tls(&mut wire).unwrap();
            }
            let mut rest = &wire[..];
            while !rest.is_empty() {
                self.server.read_tls(&mut rest).unwrap();
                self.server.process_new_packets()?;
            }
            let mut wire = Vec::new();
            while self.server.wants_write() {
                self.server.write_tls(&mut wire).unwrap();
            }
            let mut rest = &wire[..];
            while !rest.is_empty() {
                self.client.read_tls(&mut rest).unwrap();
                self.client.process_new_packets()?;
            }
            Ok(())
        }

        /// Returns the name of the authority whose certificate the server showed.
        fn shown(&self) -> [u8; 32] {
            issuer(&self.client.peer_certificates().unwrap()[0]).unwrap()
        }

        fn carries(&mut self, text: &[u8]) -> bool {
            use std::io::{Read, Write};
            self.client.writer().write_all(text).unwrap();
            self.exchange().unwrap();
            let mut got = vec![0; text.len()];
            self.server.reader().read_exact(&mut got).is_ok() && got == text
        }
    }

    #[test]
    fn a_server_shows_a_valid_certificate_for_years_without_a_restart() {
        let site = Site::new(Duration::ZERO);
        let mut held = site.connect(&site.client()).unwrap();
        let first = site.shown.expires_unix();
        assert_eq!(first, site.clock.unix() + SERVER_TTL.as_secs());
        let mut renewals = 0;
        for _ in 0..365 * 15 {
            site.clock.advance(DAY);
            if let Some(kept) = site.shown.keep(site.clock.unix()) {
                renewals += 1;
                assert_eq!(kept.unwrap(), site.shown.expires_unix());
            }
            assert!(site.shown.expires_unix() > site.clock.unix() + 19 * DAY.as_secs());
        }
        assert_eq!(renewals, 365 * 15 / 10);
        let client = site.client();
        site.connect(&client).unwrap();
        assert!(held.carries(b"a connection from the first day"));
    }

    #[test]
    fn clients_refuse_a_server_whose_certificate_was_never_renewed() {
        let site = Site::new(Duration::ZERO);
        site.clock.advance(SERVER_TTL + DAY);
        let refused = site.connect(&site.client()).err().unwrap().to_string();
        assert!(refused.contains("expired"), "{refused}");
    }

    #[test]
    fn an_expired_certificate_reaches_the_service_and_a_foreign_or_early_one_does_not() {
        let site = Site::new(DAY * 365 * 3);
        let client = site.client();
        site.clock.advance(CLIENT_TTL + DAY);
        site.shown.keep(site.clock.unix()).unwrap().unwrap();
        let connection = site.connect(&client).unwrap();
        let shown = &connection.server.peer_certificates().unwrap()[0];
        assert!(holder(shown).unwrap().expired(site.clock.unix()));

        let other = Site::new(Duration::ZERO);
        let stranger = ClientConfig::clone(&other.client());
        let mut trusts = ClientConfig::clone(&client);
        trusts.client_auth_cert_resolver = stranger.client_auth_cert_resolver;
        assert!(site.connect(&Arc::new(trusts)).is_err(), "of another pool");

        // A certificate of tomorrow, as from a server whose clock is wrong.
        let future = Site::new(Duration::ZERO);
        future.clock.advance(DAY * 30);
        let early = future.client();
        let now = Site { clock: Arc::new(TestClock::default()), ..future };
        now.clock.advance(Duration::from_secs(crate::clock::SystemClock.unix() - now.clock.unix()));
        let tls = server_tls(now.signer.clone(), now.shown.clone(), now.clock.clone()).unwrap();
        let now = Site { tls: Arc::new(tls), ..now };
        assert!(now.connect(&early).is_err(), "not valid yet");
    }

    #[test]
    fn each_peer_sees_a_certificate_of_an_authority_that_it_trusts_during_a_rotation() {
        let site = Site::new(Duration::ZERO);
        let unix = site.clock.unix();
        let keep = || site.shown.keep(unix).map_or(Ok(0), |kept| kept).unwrap();
        let early = site.client();
        let mut held = site.connect(&early).unwrap();
        site.signer.rotate(Step::Begin(None)).unwrap();
        keep();
        let begun = site.signer.present();
        let (old, new) = (begun.old(), begun.new_one().unwrap());
        let shown = |client: &Arc<ClientConfig>| site.connect(client).map(|c| c.shown());
        let knows_both = site.trusting(old, &[old, new]);
        let away = site.trusting(old, &[old]);
        for client in [&early, &knows_both, &away] {
            assert_eq!(shown(client), Ok(old.name()), "the old authority signs");
        }

        site.signer.rotate(Step::Switch).unwrap();
        keep();
        // Clients of earlier versions, and those that were off, know only the old one.
        assert_eq!((shown(&early), shown(&away)), (Ok(old.name()), Ok(old.name())));
        assert_eq!(shown(&knows_both), Ok(new.name()));
        let renewed = site.trusting(new, &[old, new]);
        let joined = site.trusting(new, &[new]);
        assert_eq!((shown(&renewed), shown(&joined)), (Ok(new.name()), Ok(new.name())));
        // A certificate that is due is replaced for both.
        site.clock.advance(DAY * 11);
        let until = site.shown.keep(site.clock.unix()).unwrap().unwrap();
        assert_eq!(until, site.clock.unix() + SERVER_TTL.as_secs());
        assert_eq!((shown(&away), shown(&joined)), (Ok(old.name()), Ok(new.name())));

        site.signer.rotate(Step::Finish).unwrap();
        keep();
        assert!(shown(&early).is_err() && shown(&away).is_err() && shown(&knows_both).is_err());
        assert_eq!((shown(&renewed), shown(&joined)), (Ok(new.name()), Ok(new.name())));
        assert!(held.carries(b"TLS leaves connections alone"));
    }
}
