//! This client's identity: a key and a certificate of the pool's authority, and how to get them.

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use gpusession_proto::control::{JoinReply, JoinRequest};
use gpusession_proto::join::{self, JoinToken};
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};

use crate::config::{ConfigError, ServerEntry, Servers};
use crate::pool::PoolError;

/// File names of an identity.
const CERTIFICATE: &str = "client.pem";
const KEY: &str = "client.key";
/// The key of a join under way.
const JOINING: &str = "joining.key";
const AUTHORITY: &str = "authority.pem";

/// Failure to read or obtain an identity.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// No identity exists in this folder.
    #[error("no identity in {}: join a pool with `gpusession join`", .0.display())]
    Missing(PathBuf),
    /// A file of the identity cannot be read or written.
    #[error("{}: {error}", path.display())]
    File { path: PathBuf, error: io::Error },
    /// A file of the identity has invalid content.
    #[error("{}: {message}", path.display())]
    Bad { path: PathBuf, message: String },
    /// The name is not allowed for a client.
    #[error("`{0}` cannot name a client: use a-z, 0-9, `-` and dots, 64 characters at most")]
    Name(String),
    /// Failure of TLS or of a certificate.
    #[error("{0}")]
    Tls(String),
    /// Error in `servers.toml`.
    #[error(transparent)]
    Servers(#[from] ConfigError),
    /// The pool refused, or did not answer.
    #[error(transparent)]
    Pool(#[from] PoolError),
}

/// Paths of an identity and of its list of servers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Home {
    /// Folder of certificate, key and authority.
    pub identity: PathBuf,
    /// Paths of `servers.toml`: the first existing one is read, the first writable one written.
    pub servers: Vec<PathBuf>,
}

impl Home {
    /// Returns the daemon's paths: `servers.toml` in the configuration directory first, then in the
    /// state directory.
    pub fn system() -> Self {
        let state = crate::paths::state_directory();
        Self {
            identity: state.join("identity"),
            servers: vec![
                crate::paths::configuration_directory().join("servers.toml"),
                state.join("servers.toml"),
            ],
        }
    }

    /// Returns the user's paths below `~/.config/gpusession`; the list of servers may be the
    /// system's.
    pub fn user() -> Option<Self> {
        let folder = crate::paths::user_directory()?;
        Some(Self {
            identity: folder.join("identity"),
            servers: vec![
                folder.join("servers.toml"),
                crate::paths::configuration_directory().join("servers.toml"),
            ],
        })
    }

    /// Returns the user's paths if an identity exists there, else the system's if its key is
    /// readable.
    pub fn of_caller() -> Self {
        match Self::user() {
            Some(user) if user.exists() => user,
            user => {
                let system = Self::system();
                if fs::File::open(system.identity.join(KEY)).is_ok() {
                    system
                } else {
                    user.unwrap_or(system)
                }
            }
        }
    }

    /// Returns `true` if an identity exists.
    pub fn exists(&self) -> bool {
        self.identity.join(CERTIFICATE).exists()
    }

    /// Reads the control addresses of the pool; empty without `servers.toml`.
    pub fn addresses(&self) -> Result<Vec<String>, IdentityError> {
        for path in &self.servers {
            if let Some(servers) = Servers::load(path)? {
                return Ok(servers.addresses());
            }
        }
        Ok(Vec::new())
    }

    /// Reads the identity.
    pub fn load(&self) -> Result<Identity, IdentityError> {
        if !self.exists() {
            return Err(IdentityError::Missing(self.identity.clone()));
        }
        let read = |name: &str| {
            let path = self.identity.join(name);
            fs::read(&path).map_err(|error| IdentityError::File { path, error })
        };
        let bad =
            |name: &str, message: String| IdentityError::Bad { path: self.identity.join(name), message };
        let certificates = |name: &str| {
            let found = CertificateDer::pem_slice_iter(&read(name)?)
                .collect::<Result<Vec<_>, _>>()
                .map_err(|e| bad(name, e.to_string()))?;
            if found.is_empty() { Err(bad(name, "no certificate found".into())) } else { Ok(found) }
        };
        let chain = certificates(CERTIFICATE)?;
        let mut authorities = certificates(AUTHORITY)?;
        let key = PrivateKeyDer::from_pem_slice(&read(KEY)?).map_err(|e| bad(KEY, e.to_string()))?;
        let roots = roots(authorities.swap_remove(0))?;
        let mut config = builder()
            .with_root_certificates(roots)
            .with_client_auth_cert(chain, key)
            .map_err(|e| bad(CERTIFICATE, e.to_string()))?;
        config.alpn_protocols = vec![b"h2".to_vec()];
        Ok(Identity { tls: Arc::new(config) })
    }

    /// Returns the key of a join that has not succeeded yet, or makes one.
    ///
    /// A server that has issued a certificate for it gives the name to no other key: the key must
    /// outlive a lost reply.
    fn joining_key(&self) -> Result<rcgen::KeyPair, IdentityError> {
        let path = self.identity.join(JOINING);
        let known = fs::read_to_string(&path).ok();
        if let Some(key) = known.and_then(|pem| rcgen::KeyPair::from_pem(&pem).ok()) {
            return Ok(key);
        }
        let key = rcgen::KeyPair::generate()
            .map_err(|e| IdentityError::Tls(format!("certificate request: {e}")))?;
        let folder = fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.identity);
        folder
            .and_then(|()| write(&path, &key.serialize_pem(), 0o600))
            .map_err(|error| IdentityError::File { path, error })?;
        Ok(key)
    }

    /// Writes an identity from the pool; each file is replaced by a rename, and only its owner
    /// reads the key.
    fn store(
        &self,
        certificate: &str,
        key: &str,
        authority: &str,
        servers: Vec<String>,
    ) -> Result<(), IdentityError> {
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |error| IdentityError::File { path, error }
        };
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&self.identity)
            .map_err(failed(&self.identity))?;
        write(&self.identity.join(AUTHORITY), authority, 0o644)
            .map_err(failed(&self.identity.join(AUTHORITY)))?;
        write(&self.identity.join(KEY), key, 0o600).map_err(failed(&self.identity.join(KEY)))?;
        write(&self.identity.join(CERTIFICATE), certificate, 0o644)
            .map_err(failed(&self.identity.join(CERTIFICATE)))?;
        let text = Servers { servers: servers.into_iter().map(|address| ServerEntry { address }).collect() }
            .to_text();
        let mut result = Ok(());
        for path in &self.servers {
            result = path
                .parent()
                .map_or(Ok(()), fs::create_dir_all)
                .and_then(|()| write(path, &text, 0o644))
                .map_err(failed(path));
            // The daemon may not write /etc: then the list goes next to its identity.
            if result.is_ok() {
                break;
            }
        }
        result
    }
}

fn write(path: &Path, text: &str, mode: u32) -> io::Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".new");
    let new = path.with_file_name(name);
    match fs::remove_file(&new) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(mode).open(&new)?;
    file.set_permissions(fs::Permissions::from_mode(mode))?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    fs::rename(&new, path)
}

/// Credentials of this client.
#[derive(Clone)]
pub struct Identity {
    tls: Arc<ClientConfig>,
}

impl Identity {
    /// Returns the TLS configuration for connections to servers of the pool.
    pub fn tls(&self) -> Arc<ClientConfig> {
        self.tls.clone()
    }
}

/// Returns the name that the certificate of every server of the pool has.
pub fn server_name() -> ServerName<'static> {
    ServerName::try_from(join::any_server()).unwrap_or_else(|_| unreachable!("a constant and valid DNS name"))
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

fn builder() -> rustls::ConfigBuilder<ClientConfig, rustls::WantsVerifier> {
    ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap_or_else(|_| unreachable!("ring speaks TLS 1.3"))
}

fn roots(authority: CertificateDer<'static>) -> Result<Arc<RootCertStore>, IdentityError> {
    let mut roots = RootCertStore::empty();
    roots
        .add(authority)
        .map_err(|e| IdentityError::Tls(format!("certificate of the pool's authority: {e}")))?;
    Ok(Arc::new(roots))
}

fn sha256(bytes: &[u8]) -> [u8; 32] {
    let digest = ring::digest::digest(&ring::digest::SHA256, bytes);
    let mut out = [0; 32];
    out.copy_from_slice(digest.as_ref());
    out
}

/// Accepts a server whose certificate is signed by the authority that a join token pins.
#[derive(Debug)]
struct Pinned {
    authority: [u8; 32],
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Pinned {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let unknown =
            || rustls::Error::General("the server is not of the pool that the join token is for".into());
        let authority = intermediates.iter().find(|c| sha256(c) == self.authority).ok_or_else(unknown)?;
        let roots =
            roots(authority.clone().into_owned()).map_err(|e| rustls::Error::General(e.to_string()))?;
        WebPkiServerVerifier::builder_with_provider(roots, self.provider.clone())
            .build()
            .map_err(|e| rustls::Error::General(e.to_string()))?
            .verify_server_cert(end_entity, intermediates, server_name, ocsp, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls12_signature(message, certificate, signature, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// Result of joining.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Joined {
    /// Name of this client in the pool.
    pub name: String,
    /// Control addresses of the pool.
    pub servers: Vec<String>,
}

/// Returns the default name: the host's name with invalid characters replaced.
pub fn default_name() -> String {
    let host = nix::unistd::gethostname().ok().and_then(|h| h.into_string().ok()).unwrap_or_default();
    let host: String = host
        .to_ascii_lowercase()
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() || c == '.' { c } else { '-' })
        .collect();
    let host = host.trim_matches(|c| c == '-' || c == '.');
    let host = &host[..host.len().min(64)];
    if join::is_name(host) { host.to_owned() } else { "client".to_owned() }
}

/// Joins a pool: creates a key, has it certified by the server at `address`, and stores the
/// identity.
///
/// The key never leaves this host. The server is trusted only if it belongs to the pool that the
/// token pins. `call` sends the request: [`crate::client::join`].
pub async fn join_pool(
    home: &Home,
    address: &str,
    token: &str,
    name: Option<&str>,
    call: impl AsyncFnOnce(&str, Arc<ClientConfig>, JoinRequest) -> Result<JoinReply, PoolError>,
) -> Result<Joined, IdentityError> {
    let parsed: JoinToken = token.parse().map_err(|e: join::NotAToken| IdentityError::Tls(e.to_string()))?;
    let name = name.map_or_else(default_name, str::to_owned);
    if !join::is_name(&name) {
        return Err(IdentityError::Name(name));
    }
    let certified = |e: rcgen::Error| IdentityError::Tls(format!("certificate request: {e}"));
    let key = home.joining_key()?;
    let mut params = rcgen::CertificateParams::new(vec![join::client(&name)]).map_err(certified)?;
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(rcgen::DnType::CommonName, name.as_str());
    let csr_pem = params.serialize_request(&key).and_then(|csr| csr.pem()).map_err(certified)?;

    let pinned = Pinned { authority: parsed.authority, provider: provider() };
    let mut tls =
        builder().dangerous().with_custom_certificate_verifier(Arc::new(pinned)).with_no_client_auth();
    tls.alpn_protocols = vec![b"h2".to_vec()];
    let reply = call(
        address,
        Arc::new(tls),
        JoinRequest {
            token: token.trim().to_owned(),
            csr_pem,
            client_name: name,
            machine_id: crate::paths::machine_id(),
            boot_id: crate::paths::hex(&crate::paths::boot_id()),
        },
    )
    .await?;
    let authority = CertificateDer::from_pem_slice(reply.authority_pem.as_bytes()).map_err(|e| {
        IdentityError::Tls(format!("{address}: sent no valid certificate of its authority: {e}"))
    })?;
    if sha256(&authority) != parsed.authority {
        return Err(IdentityError::Tls(format!(
            "{address}: sent another authority than the join token pins"
        )));
    }
    // A server that reports no address is used at the present one.
    let mut servers: Vec<String> =
        reply.servers.iter().filter_map(|s| crate::units::control_address(s).ok()).collect();
    if servers.is_empty() {
        servers.push(address.to_owned());
    }
    home.store(&reply.certificate_pem, &key.serialize_pem(), &reply.authority_pem, servers.clone())?;
    let _ = fs::remove_file(home.identity.join(JOINING));
    Ok(Joined { name: reply.client_name, servers })
}

#[cfg(test)]
mod tests {
    use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
    use rustls::pki_types::PrivatePkcs8KeyDer;
    use rustls::server::{ClientHello, ResolvesServerCert};
    use rustls::sign::CertifiedKey;
    use rustls::{ClientConnection, ServerConfig, ServerConnection};

    use super::*;

    /// Presents a certificate, with or without its key.
    #[derive(Debug)]
    struct Shows(Arc<CertifiedKey>);

    impl ResolvesServerCert for Shows {
        fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
            Some(self.0.clone())
        }
    }

    /// Tries a handshake with a server that presents its pool's certificate with this key.
    ///
    /// The join token pins that pool if `pins_it`, otherwise another one.
    fn believes(shown_with: impl FnOnce(KeyPair) -> KeyPair, pins_it: bool) -> Result<(), rustls::Error> {
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let authority = params.self_signed(&key).unwrap();
        let own = KeyPair::generate().unwrap();
        let server = CertificateParams::new(vec![join::any_server()]).unwrap();
        let server = server.signed_by(&own, &Issuer::new(params, key)).unwrap();
        let shown = PrivatePkcs8KeyDer::from(shown_with(own).serialize_der()).into();
        let shown = provider().key_provider.load_private_key(shown).unwrap();
        let chain = vec![server.der().clone(), authority.der().clone()];
        let config = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .with_no_client_auth()
            .with_cert_resolver(Arc::new(Shows(Arc::new(CertifiedKey::new(chain, shown)))));
        let mut server = ServerConnection::new(Arc::new(config)).unwrap();

        let pinned = if pins_it { sha256(authority.der()) } else { [7; 32] };
        let verifier = Arc::new(Pinned { authority: pinned, provider: provider() });
        let config = builder().dangerous().with_custom_certificate_verifier(verifier).with_no_client_auth();
        let mut client = ClientConnection::new(Arc::new(config), server_name()).unwrap();
        while client.is_handshaking() {
            let mut wire = Vec::new();
            while client.wants_write() {
                client.write_tls(&mut wire).unwrap();
            }
            let mut rest = &wire[..];
            while !rest.is_empty() {
                server.read_tls(&mut rest).unwrap();
                server.process_new_packets()?;
            }
            let mut wire = Vec::new();
            while server.wants_write() {
                server.write_tls(&mut wire).unwrap();
            }
            let mut rest = &wire[..];
            while !rest.is_empty() {
                client.read_tls(&mut rest).unwrap();
                client.process_new_packets()?;
            }
        }
        Ok(())
    }

    #[test]
    fn a_file_without_a_certificate_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let home = Home { identity: folder.path().to_owned(), servers: Vec::new() };
        let key = KeyPair::generate().unwrap();
        let certificate = CertificateParams::new(vec![]).unwrap().self_signed(&key).unwrap();
        let (pem, key) = (certificate.pem(), key.serialize_pem());
        for (own, authority, named) in [("", pem.as_str(), CERTIFICATE), (pem.as_str(), "", AUTHORITY)] {
            home.store(own, &key, authority, Vec::new()).unwrap();
            let Err(IdentityError::Bad { path, message }) = home.load() else { panic!("loaded") };
            assert_eq!((path, message.as_str()), (folder.path().join(named), "no certificate found"));
        }
        home.store(&pem, &key, &pem, Vec::new()).unwrap();
        assert!(home.load().is_ok());
    }

    #[test]
    fn a_join_trusts_only_the_pool_of_its_token() {
        assert_eq!(believes(|own| own, true), Ok(()));
        let impostor = believes(|_| KeyPair::generate().unwrap(), true);
        assert_eq!(impostor, Err(rustls::CertificateError::BadSignature.into()));
        let another = believes(|own| own, false).unwrap_err().to_string();
        assert!(another.contains("not of the pool that the join token is for"), "{another}");
    }
}
