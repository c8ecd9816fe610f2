//! This client's identity: a key and a certificate of the pool's authority, and how to get them.

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use gpusession_proto::control::{JoinReply, JoinRequest, RenewIdentityRequest};
use gpusession_proto::join::{self, JoinToken};
use gpusession_proto::pinned::{self, sha256};
use nix::fcntl::{Flock, FlockArg};
use rcgen::{PublicKeyData as _, SigningKey as _};
use rustls::ClientConfig;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};

use tokio::sync::{Notify, watch};

use crate::config::{ConfigError, ServerEntry, Servers};
use crate::pool::PoolError;
use crate::trust::{Authorities, Fingerprint, MAX_REVOKED, Revoked, dns_names};

/// File names of an identity.
const CERTIFICATE: &str = "client.pem";
const KEY: &str = "client.key";
/// The key of a join under way.
const JOINING: &str = "joining.key";
/// The key of a renewal under way, which may have the certificate already.
const RENEWING: &str = "renewing.key";
const AUTHORITY: &str = "authority.pem";
/// Names of servers that the pool has revoked, one on a line.
const REVOKED: &str = "revoked-servers";

/// Failure to read or obtain an identity.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// No identity exists in this folder.
    #[error("no identity in {}: join a pool with `gpusession join`", .0.display())]
    Missing(PathBuf),
    /// A file of the identity cannot be read or written.
    #[error("{}: {error}", path.display())]
    File {
        /// File of the identity, or its folder.
        path: PathBuf,
        /// Reason of the operating system.
        error: io::Error,
    },
    /// A file of the identity has invalid content.
    #[error("{}: {message}", path.display())]
    Bad {
        /// File of the identity.
        path: PathBuf,
        /// Error in it, in one line.
        message: String,
    },
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

    /// Reads the control addresses of the user's own `servers.toml`, not of the system's; empty
    /// without one.
    pub fn own_addresses() -> Result<Vec<String>, IdentityError> {
        let own = crate::paths::user_directory().map(|folder| folder.join("servers.toml"));
        // A folder that this process may not enter, such as a remote home for root, has none.
        let readable = own.filter(|path| fs::File::open(path).is_ok());
        let servers = readable.map(|path| Servers::load(&path)).transpose()?.flatten();
        Ok(servers.map(|servers| servers.addresses()).unwrap_or_default())
    }

    /// Reads the identity.
    pub fn load(&self) -> Result<Identity, IdentityError> {
        Ok(Identity::new(self.read()?))
    }

    fn read(&self) -> Result<Held, IdentityError> {
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
        let authorities = Authorities::new(certificates(AUTHORITY)?).map_err(|e| bad(AUTHORITY, e))?;
        let facts = Facts::of(&chain[0]);
        let revoked = Arc::new(self.revoked()?);
        let with = |name: &str| {
            let key = PrivateKeyDer::from_pem_slice(&read(name)?).map_err(|e| bad(name, e.to_string()))?;
            let trusted = (authorities.clone(), revoked.clone());
            Held::new(trusted, facts.clone(), chain.clone(), key).map_err(|e| bad(CERTIFICATE, e))
        };
        // A renewal replaces the certificate first; power may fail before the key follows.
        with(KEY).or_else(|error| with(RENEWING).map_err(|_| error))
    }

    /// Reads the names of the servers that the pool has revoked.
    fn revoked(&self) -> Result<Revoked, IdentityError> {
        let path = self.identity.join(REVOKED);
        match fs::read_to_string(&path) {
            Ok(text) => Ok(text.lines().map(String::from).collect()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Revoked::new()),
            Err(error) => Err(IdentityError::File { path, error }),
        }
    }

    /// Refuses these servers from now on, in all processes that share the identity.
    ///
    /// Returns the names that are new.
    pub fn refuse(&self, identity: &Identity, servers: Revoked) -> Result<Vec<String>, IdentityError> {
        let mut all = self.revoked()?;
        let room = MAX_REVOKED.saturating_sub(all.len());
        let new: Vec<_> = servers.into_iter().filter(|name| !all.contains(name)).take(room).collect();
        if new.is_empty() {
            return Ok(new);
        }
        all.extend(new.iter().cloned());
        let path = self.identity.join(REVOKED);
        let text: String = all.iter().map(|name| format!("{name}\n")).collect();
        write(&path, &text, 0o644)
            .and_then(|()| fs::File::open(&self.identity)?.sync_all())
            .map_err(|error| IdentityError::File { path, error })?;
        self.reload(identity)?;
        Ok(new)
    }

    /// Reads the identity again; returns `true` if another process has renewed it.
    pub fn reload(&self, identity: &Identity) -> Result<bool, IdentityError> {
        let (held, known) = (self.read()?, identity.held());
        let newer = held.facts.certificate != known.facts.certificate;
        let others = held.authorities.fingerprints().ne(known.authorities.fingerprints());
        if newer || others || held.revoked != known.revoked {
            identity.held.send_replace(Arc::new(held));
        }
        Ok(newer)
    }

    /// Trusts other authorities from now on.
    ///
    /// The file is replaced as a whole: a power cut leaves the old or the new list. Returns `false`
    /// if another process changes the identity at this moment, or has done so.
    pub fn trust(
        &self,
        identity: &Identity,
        from: &Authorities,
        to: &Authorities,
    ) -> Result<bool, IdentityError> {
        let path = self.identity.join(AUTHORITY);
        let failed = |error| IdentityError::File { path: path.clone(), error };
        let folder = fs::File::open(&self.identity).map_err(failed)?;
        let Ok(lock) = Flock::lock(folder, FlockArg::LockExclusiveNonblock) else { return Ok(false) };
        self.reload(identity)?;
        if identity.authorities().fingerprints().ne(from.fingerprints()) {
            return Ok(false);
        }
        write(&path, &to.to_pem(), 0o644).and_then(|()| lock.sync_all()).map_err(failed)?;
        self.reload(identity)?;
        Ok(true)
    }

    /// Replaces the certificate by a newer one, for which `ask` sends the request to a server.
    ///
    /// A power cut, or an answer that is lost, leaves a usable identity at each step. Returns
    /// `false` if another process renews it at this moment or has done so.
    pub async fn renew(
        &self,
        identity: &Identity,
        unix: u64,
        ask: impl AsyncFnOnce(RenewIdentityRequest) -> Result<String, PoolError>,
    ) -> Result<bool, IdentityError> {
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |error| IdentityError::File { path, error }
        };
        let folder = fs::File::open(&self.identity).map_err(failed(&self.identity))?;
        let Ok(_lock) = Flock::lock(folder, FlockArg::LockExclusiveNonblock) else { return Ok(false) };
        if self.reload(identity)? {
            return Ok(false);
        }
        let held = identity.held();
        let path = self.identity.join(RENEWING);
        let key = self.lasting_key(&path)?;
        let csr_pem = request(&held.facts.name, &key)?;
        let proof = self.prove_renewal(&csr_pem)?;
        let pem = ask(RenewIdentityRequest { csr_pem, proof }).await?;
        held.accepts(&pem, &key, unix)?;
        write(&self.identity.join(CERTIFICATE), &pem, 0o644)
            .and_then(|()| fs::rename(&path, self.identity.join(KEY)))
            .and_then(|()| fs::File::open(&self.identity)?.sync_all())
            .map_err(failed(&self.identity))?;
        self.reload(identity)
    }

    /// Signs a certificate request with the present key, so that no server renews the identity for
    /// a key of its own.
    fn prove_renewal(&self, csr_pem: &str) -> Result<Vec<u8>, IdentityError> {
        let path = self.identity.join(KEY);
        let pem =
            fs::read_to_string(&path).map_err(|error| IdentityError::File { path: path.clone(), error })?;
        let signed = rcgen::KeyPair::from_pem(&pem).and_then(|key| key.sign(&join::renewal(csr_pem)));
        signed.map_err(|e| IdentityError::Bad { path, message: e.to_string() })
    }

    /// Returns `true` if this process writes the identity: it has the user who owns the folder.
    pub fn is_ours(&self) -> bool {
        use std::os::unix::fs::MetadataExt as _;
        fs::metadata(&self.identity).is_ok_and(|m| m.uid() == nix::unistd::geteuid().as_raw())
    }

    /// Returns the key of a join that has not succeeded yet, or makes one.
    ///
    /// A server that has issued a certificate for it gives the name to no other key: the key must
    /// outlive a lost reply.
    fn joining_key(&self) -> Result<rcgen::KeyPair, IdentityError> {
        self.lasting_key(&self.identity.join(JOINING))
    }

    /// Returns the key in a file, or makes one and writes it there.
    fn lasting_key(&self, path: &Path) -> Result<rcgen::KeyPair, IdentityError> {
        let known = fs::read_to_string(path).ok();
        if let Some(key) = known.and_then(|pem| rcgen::KeyPair::from_pem(&pem).ok()) {
            return Ok(key);
        }
        let key = rcgen::KeyPair::generate()
            .map_err(|e| IdentityError::Tls(format!("certificate request: {e}")))?;
        let folder = fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.identity);
        folder
            .and_then(|()| write(path, &key.serialize_pem(), 0o600))
            .map_err(|error| IdentityError::File { path: path.to_owned(), error })?;
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

/// Facts of a client's certificate.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Facts {
    /// Name of the client in the pool; empty if the certificate names none.
    pub name: String,
    /// Begin of the certificate, in seconds since 1970.
    pub begins_unix: u64,
    /// End of the certificate, in seconds since 1970.
    pub expires_unix: u64,
    /// SHA-256 of the certificate.
    pub certificate: Fingerprint,
    /// SHA-256 of the name of the authority that issued the certificate.
    pub issuer: Fingerprint,
}

impl Facts {
    fn of(der: &CertificateDer<'_>) -> Self {
        let mut facts = Self { certificate: sha256(der), ..Self::default() };
        let Ok((_, parsed)) = x509_parser::parse_x509_certificate(der) else { return facts };
        facts.issuer = sha256(parsed.issuer().as_raw());
        let unix = |time: x509_parser::time::ASN1Time| u64::try_from(time.timestamp()).unwrap_or(0);
        facts.begins_unix = unix(parsed.validity().not_before);
        facts.expires_unix = unix(parsed.validity().not_after);
        let names = dns_names(der);
        facts.name = names.iter().find_map(|name| join::client_of(name)).unwrap_or_default().to_owned();
        facts
    }
}

/// An identity as read from its files.
struct Held {
    tls: Arc<ClientConfig>,
    facts: Facts,
    authorities: Authorities,
    revoked: Arc<Revoked>,
}

impl Held {
    fn new(
        (authorities, revoked): (Authorities, Arc<Revoked>),
        facts: Facts,
        chain: Vec<CertificateDer<'static>>,
        key: PrivateKeyDer<'static>,
    ) -> Result<Self, String> {
        let builder =
            builder().dangerous().with_custom_certificate_verifier(authorities.verifier(revoked.clone())?);
        let mut config = builder.with_client_auth_cert(chain, key).map_err(|e| e.to_string())?;
        config.alpn_protocols = vec![b"h2".to_vec()];
        Ok(Self { tls: Arc::new(config), facts, authorities, revoked })
    }

    /// Checks that a renewed certificate is of this client, pool and key, and has not expired.
    ///
    /// A server that sends another one must not cost this client its identity.
    fn accepts(&self, pem: &str, key: &rcgen::KeyPair, unix: u64) -> Result<(), IdentityError> {
        let wrong = |why: String| IdentityError::Tls(format!("the renewed certificate is not used: {why}"));
        let der = CertificateDer::from_pem_slice(pem.as_bytes()).map_err(|e| wrong(e.to_string()))?;
        let (_, parsed) = x509_parser::parse_x509_certificate(&der).map_err(|e| wrong(e.to_string()))?;
        if parsed.public_key().raw != key.subject_public_key_info() {
            return Err(wrong("it is for another key".into()));
        }
        let facts = Facts::of(&der);
        if facts.name != self.facts.name {
            return Err(wrong(format!("it names {:?}", facts.name)));
        }
        if facts.expires_unix <= unix {
            return Err(wrong("it has expired, or the clocks of client and server differ".into()));
        }
        self.authorities.verify(&der, unix).map_err(wrong)
    }
}

/// Credentials of this client, which a renewal replaces for all that share them.
#[derive(Clone)]
pub struct Identity {
    held: Arc<watch::Sender<Arc<Held>>>,
    /// Wakes the task that looks after the identity.
    wake: Arc<Notify>,
}

impl Identity {
    fn new(held: Held) -> Self {
        Self { held: Arc::new(watch::Sender::new(Arc::new(held))), wake: Arc::default() }
    }

    /// Reads an administrator's file from `gpuserver admin create`: certificate, key, authority.
    pub fn of_administrator(path: &Path) -> Result<Self, IdentityError> {
        let text = fs::read(path).map_err(|error| IdentityError::File { path: path.into(), error })?;
        let bad = |message: &str| IdentityError::Bad { path: path.into(), message: message.into() };
        let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
        let mut found = found.unwrap_or_default().into_iter();
        let own = found.next().ok_or_else(|| bad("no certificate found"))?;
        let authorities = Authorities::new(found.collect()).map_err(|e| bad(&e))?;
        if authorities.fingerprints().next().is_none() {
            return Err(bad("not a file from `gpuserver admin create`"));
        }
        let key = PrivateKeyDer::from_pem_slice(&text).map_err(|e| bad(&e.to_string()))?;
        let trusted = (authorities, Arc::default());
        Held::new(trusted, Facts::of(&own), vec![own], key).map(Self::new).map_err(|e| bad(&e))
    }
}

/// Notice of the next change of an [`Identity`].
pub struct Replaced(watch::Receiver<Arc<Held>>);

impl Replaced {
    /// Returns when the identity is replaced.
    pub async fn changed(&mut self) {
        if self.0.changed().await.is_err() {
            std::future::pending().await
        }
    }
}

impl Identity {
    fn held(&self) -> Arc<Held> {
        self.held.borrow().clone()
    }

    /// Returns the authorities that this client trusts.
    pub fn authorities(&self) -> Authorities {
        self.held().authorities.clone()
    }

    /// Returns the servers that this client refuses.
    pub fn revoked(&self) -> Arc<Revoked> {
        self.held().revoked.clone()
    }

    /// Wakes the task that looks after the identity: a server has other authorities than before.
    pub fn authorities_changed(&self) {
        self.wake.notify_one();
    }

    /// Returns after [`Identity::authorities_changed`].
    pub async fn woken(&self) {
        self.wake.notified().await;
    }

    /// Returns the TLS configuration for connections to servers of the pool.
    pub fn tls(&self) -> Arc<ClientConfig> {
        self.held().tls.clone()
    }

    /// Returns the facts of the present certificate.
    pub fn facts(&self) -> Facts {
        self.held().facts.clone()
    }

    /// Subscribes to replacements from now on.
    pub fn replaced(&self) -> Replaced {
        Replaced(self.held.subscribe())
    }
}

/// Makes a certificate request of a client.
fn request(name: &str, key: &rcgen::KeyPair) -> Result<String, IdentityError> {
    let failed = |e: rcgen::Error| IdentityError::Tls(format!("certificate request: {e}"));
    let mut params = rcgen::CertificateParams::new(vec![join::client(name)]).map_err(failed)?;
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(rcgen::DnType::CommonName, name);
    params.serialize_request(key).and_then(|csr| csr.pem()).map_err(failed)
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
    let key = home.joining_key()?;
    let csr_pem = request(&name, &key)?;

    let reply = call(
        address,
        Arc::new(pinned::tls(parsed.authority)),
        JoinRequest {
            token: token.trim().to_owned(),
            csr_pem,
            client_name: name,
            machine_id: crate::paths::machine_id(),
            boot_id: crate::paths::hex(&crate::paths::boot_id()),
            renews: true,
        },
    )
    .await?;
    let wrong = |why: String| {
        IdentityError::Tls(format!("{address}: sent no valid certificate of its authority: {why}"))
    };
    let first = CertificateDer::from_pem_slice(reply.authority_pem.as_bytes());
    let first = first.map_err(|e| wrong(e.to_string()))?;
    if sha256(&first) != parsed.authority {
        return Err(IdentityError::Tls(format!(
            "{address}: sent another authority than the join token pins"
        )));
    }
    // During a rotation, the pinned authority confirms the other one.
    let pinned = Authorities::new(vec![first]).map_err(wrong)?;
    let offered = pinned.offered(&reply.authority_pem, UnixTime::now().as_secs()).map_err(wrong)?;
    let authorities = Authorities::of(offered).map_err(wrong)?;
    // A server that reports no address is used at the present one.
    let mut servers: Vec<String> =
        reply.servers.iter().filter_map(|s| crate::units::control_address(s).ok()).collect();
    if servers.is_empty() {
        servers.push(address.to_owned());
    }
    home.store(&reply.certificate_pem, &key.serialize_pem(), &authorities.to_pem(), servers.clone())?;
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

        let pins = if pins_it { sha256(authority.der()) } else { [7; 32] };
        let config = pinned::tls(pins);
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

    /// A pool's authority that issues certificates for keys and names of the test's choice.
    struct Pool(Issuer<'static, KeyPair>, String);

    impl Pool {
        fn new() -> Self {
            let mut params = CertificateParams::new(vec![]).unwrap();
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            let key = KeyPair::generate().unwrap();
            let pem = params.self_signed(&key).unwrap().pem();
            Self(Issuer::new(params, key), pem)
        }

        fn issue(&self, name: &str, key: &impl rcgen::PublicKeyData, days: i64) -> String {
            let mut params = CertificateParams::new(vec![join::client(name)]).unwrap();
            params.extended_key_usages = vec![rcgen::ExtendedKeyUsagePurpose::ClientAuth];
            let now = std::time::UNIX_EPOCH + std::time::Duration::from_secs(NOW);
            let day = std::time::Duration::from_secs(24 * 3600);
            params.not_before = (now - day * 100).into();
            params.not_after = match days {
                0.. => (now + day * days as u32).into(),
                _ => (now - day * -days as u32).into(),
            };
            params.signed_by(key, &self.0).unwrap().pem()
        }
    }

    const NOW: u64 = 1_900_000_000;

    fn requested(csr_pem: &str) -> impl rcgen::PublicKeyData {
        use x509_parser::prelude::FromDer as _;
        let der = x509_parser::pem::parse_x509_pem(csr_pem.as_bytes()).unwrap().1.contents;
        let (_, csr) = x509_parser::certification_request::X509CertificationRequest::from_der(&der).unwrap();
        Asked(csr.certification_request_info.subject_pki.subject_public_key.data.to_vec())
    }

    /// The public key of a request.
    struct Asked(Vec<u8>);

    impl rcgen::PublicKeyData for Asked {
        fn der_bytes(&self) -> &[u8] {
            &self.0
        }

        fn algorithm(&self) -> &'static rcgen::SignatureAlgorithm {
            &rcgen::PKCS_ECDSA_P256_SHA256
        }
    }

    #[tokio::test]
    async fn a_renewal_keeps_a_usable_identity_whatever_happens() {
        let folder = tempfile::tempdir().unwrap();
        let home = Home { identity: folder.path().to_owned(), servers: Vec::new() };
        let (pool, foreign) = (Pool::new(), Pool::new());
        let key = KeyPair::generate().unwrap();
        home.store(&pool.issue("vm-1", &key, 5), &key.serialize_pem(), &pool.1, Vec::new()).unwrap();
        let identity = home.load().unwrap();
        let first = identity.facts();
        assert_eq!((first.name.as_str(), first.expires_unix), ("vm-1", NOW + 5 * 24 * 3600));

        let unreachable = async |_| Err(PoolError::new(crate::pool::Trouble::Unreachable, "cut"));
        assert!(home.renew(&identity, NOW, unreachable).await.is_err());
        let asked = fs::read(folder.path().join(RENEWING)).unwrap();
        let other = KeyPair::generate().unwrap();
        let wrong = [pool.issue("vm-1", &other, 90), "garbage".to_owned()];
        for pem in wrong {
            assert!(home.renew(&identity, NOW, async |_| Ok(pem)).await.is_err());
        }
        for (issuer, name, days, why) in [
            (&foreign, "vm-1", 90, "BadSignature"),
            (&pool, "vm-2", 90, "it names"),
            (&pool, "vm-1", -1, "expired"),
        ] {
            let ask =
                async |asked: RenewIdentityRequest| Ok(issuer.issue(name, &requested(&asked.csr_pem), days));
            let error = home.renew(&identity, NOW, ask).await.unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
        assert_eq!((identity.facts(), home.load().unwrap().facts()), (first.clone(), first.clone()));
        assert_eq!(fs::read(folder.path().join(RENEWING)).unwrap(), asked, "the key of a lost reply");

        let ask = async |asked: RenewIdentityRequest| Ok(pool.issue("vm-1", &requested(&asked.csr_pem), 90));
        assert!(home.renew(&identity, NOW, ask).await.unwrap());
        let second = identity.facts();
        assert_eq!(second.expires_unix, NOW + 90 * 24 * 3600);
        assert_eq!(fs::read(folder.path().join(KEY)).unwrap(), asked);

        // Power fails after the certificate is written and before its key is in place.
        let third = KeyPair::generate().unwrap();
        fs::write(folder.path().join(RENEWING), third.serialize_pem()).unwrap();
        fs::write(folder.path().join(CERTIFICATE), pool.issue("vm-1", &third, 91)).unwrap();
        assert!(home.reload(&identity).unwrap());
        assert_ne!(identity.facts(), second);
        let ask = async |asked: RenewIdentityRequest| Ok(pool.issue("vm-1", &requested(&asked.csr_pem), 92));
        assert!(home.renew(&identity, NOW, ask).await.unwrap());
        assert_eq!(home.load().unwrap().facts().expires_unix, NOW + 92 * 24 * 3600);
    }
}
