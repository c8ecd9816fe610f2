//! TLS of the control port: the server's own certificate, and the certificates that it accepts.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustls::client::danger::HandshakeSignatureValid;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{ClientHello, ResolvesServerCert, WebPkiClientVerifier};
use rustls::sign::CertifiedKey;
use rustls::time_provider::TimeProvider;
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, RootCertStore, ServerConfig, SignatureScheme,
};

use super::ca::{Authority, AuthorityError};
use super::locked;
use crate::certificate::expiry;
use crate::clock::{Clock, Random};

/// Age at which a server replaces its certificate: a third of its life.
const RENEWAL_AGE: u64 = 10 * 24 * 3600;
/// Pause after a failed replacement.
const RETRY: u64 = 3600;

/// The server's certificate and key, which never leave this process.
///
/// New connections get the newest one; connections that exist are not touched.
#[derive(Debug)]
pub struct ServerCertificate {
    name: String,
    shown: Mutex<Shown>,
}

#[derive(Debug)]
struct Shown {
    key: Arc<CertifiedKey>,
    renew_unix: u64,
    expires_unix: u64,
}

impl ServerCertificate {
    /// Makes the first certificate.
    pub fn new(
        authority: &Authority,
        name: &str,
        unix: u64,
        random: &dyn Random,
    ) -> Result<Self, AuthorityError> {
        let (key, expires_unix) = authority.server_key(name, unix, random)?;
        let shown = Shown { key: Arc::new(key), renew_unix: unix + RENEWAL_AGE, expires_unix };
        Ok(Self { name: name.into(), shown: Mutex::new(shown) })
    }

    /// Replaces the certificate if it is due. Returns its end, or `None` if nothing was due.
    pub fn keep(
        &self,
        authority: &Authority,
        unix: u64,
        random: &dyn Random,
    ) -> Option<Result<u64, AuthorityError>> {
        if unix < locked(&self.shown).renew_unix {
            return None;
        }
        let made = authority.server_key(&self.name, unix, random);
        let mut shown = locked(&self.shown);
        Some(match made {
            Ok((key, expires_unix)) => {
                *shown = Shown { key: Arc::new(key), renew_unix: unix + RENEWAL_AGE, expires_unix };
                Ok(expires_unix)
            }
            Err(e) => {
                shown.renew_unix = unix + RETRY;
                Err(e)
            }
        })
    }

    /// Returns the certificate's end, in seconds since 1970.
    pub fn expires_unix(&self) -> u64 {
        locked(&self.shown).expires_unix
    }
}

impl ResolvesServerCert for ServerCertificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(locked(&self.shown).key.clone())
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

/// Accepts certificates of the pool's authority, expired ones too.
///
/// A TLS alert would tell the holder little. The control service refuses an expired certificate
/// with the reason and the remedy, and renews it for some time.
#[derive(Debug)]
struct OfThisPool(Arc<dyn ClientCertVerifier>);

impl ClientCertVerifier for OfThisPool {
    fn offer_client_auth(&self) -> bool {
        self.0.offer_client_auth()
    }

    fn client_auth_mandatory(&self) -> bool {
        self.0.client_auth_mandatory()
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.0.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        let verified = self.0.verify_client_cert(end_entity, intermediates, now);
        let Err(rustls::Error::InvalidCertificate(
            CertificateError::Expired | CertificateError::ExpiredContext { .. },
        )) = verified
        else {
            return verified;
        };
        let Some(end) = expiry(end_entity) else { return verified };
        let end = UnixTime::since_unix_epoch(Duration::from_secs(end));
        self.0.verify_client_cert(end_entity, intermediates, end)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.0.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.0.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }
}

/// Returns the TLS configuration of the control port.
///
/// It accepts clients of this pool, and clients without a certificate, which can only join.
pub fn server_tls(
    authority: &Authority,
    shown: Arc<ServerCertificate>,
    clock: Arc<dyn Clock>,
) -> Result<ServerConfig, AuthorityError> {
    let mut roots = RootCertStore::empty();
    roots.add(authority.der().clone())?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone())
        .allow_unauthenticated()
        .build()
        .map_err(|e| rustls::Error::General(e.to_string()))?;
    let mut config = ServerConfig::builder_with_details(provider, Arc::new(TlsClock(clock)))
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_client_cert_verifier(Arc::new(OfThisPool(verifier)))
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
    use rustls::pki_types::pem::PemObject;
    use rustls::pki_types::{PrivateKeyDer, ServerName};
    use rustls::{ClientConfig, ClientConnection, ServerConnection};

    use super::*;
    use crate::certificate::{Role, holder};
    use crate::clock::SystemRandom;
    use crate::clock::testing::TestClock;
    use crate::pool::ca::{CLIENT_TTL, Order, SERVER_TTL};

    const DAY: Duration = Duration::from_secs(24 * 3600);

    struct Site {
        _state: tempfile::TempDir,
        clock: Arc<TestClock>,
        authority: Authority,
        shown: Arc<ServerCertificate>,
        tls: Arc<ServerConfig>,
    }

    impl Site {
        /// The server of a pool that was made a moment ago; its clock stands `ahead` of today.
        fn new(ahead: Duration) -> Self {
            let state = tempfile::tempdir().unwrap();
            let authority = Authority::init(state.path(), "lab", &SystemRandom).unwrap();
            let clock = Arc::new(TestClock::default());
            clock.advance(Duration::from_secs(crate::clock::SystemClock.unix() - clock.unix()) + ahead);
            let shown = ServerCertificate::new(&authority, "gpu1", clock.unix(), &SystemRandom).unwrap();
            let shown = Arc::new(shown);
            let tls = Arc::new(server_tls(&authority, shown.clone(), clock.clone()).unwrap());
            Self { _state: state, clock, authority, shown, tls }
        }

        fn client(&self) -> Arc<ClientConfig> {
            let key = KeyPair::generate().unwrap();
            let csr = CertificateParams::new(vec![]).unwrap().serialize_request(&key).unwrap().pem().unwrap();
            let order = Order { role: Role::Client, name: "vm-1", life: CLIENT_TTL, identity: None };
            let issued = self.authority.issue(&csr, &order, self.clock.unix(), &SystemRandom).unwrap();
            let der = CertificateDer::from_pem_slice(issued.pem.as_bytes()).unwrap();
            let mut roots = RootCertStore::empty();
            roots.add(self.authority.der().clone()).unwrap();
            let provider = Arc::new(rustls::crypto::ring::default_provider());
            let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
            let clock = Arc::new(TlsClock(self.clock.clone()));
            let config = ClientConfig::builder_with_details(provider, clock)
                .with_protocol_versions(&[&rustls::version::TLS13])
                .unwrap()
                .with_root_certificates(roots)
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
            if let Some(kept) = site.shown.keep(&site.authority, site.clock.unix(), &SystemRandom) {
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
        site.shown.keep(&site.authority, site.clock.unix(), &SystemRandom).unwrap().unwrap();
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
        let tls = server_tls(&now.authority, now.shown.clone(), now.clock.clone()).unwrap();
        let now = Site { tls: Arc::new(tls), ..now };
        assert!(now.connect(&early).is_err(), "not valid yet");
    }
}
