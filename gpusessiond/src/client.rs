//! Network client of a GPU server: gRPC over mutual TLS.

use std::collections::HashMap;
use std::io;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use gpusession_proto::control::pool_event::Event;
use gpusession_proto::control::{self, enrolment_client::EnrolmentClient, pool_client::PoolClient};
use gpusession_proto::join;
use hyper_util::rt::TokioIo;
use nix::sys::socket::setsockopt;
use nix::sys::socket::sockopt::TcpUserTimeout;
use rustls::ClientConfig;
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code, Status};

use crate::addresses::{self, Named};
use crate::identity::{self, Identity};
use crate::pool::{PoolError, PoolServer, Trouble};
use crate::trust::{self, Fingerprint};

/// Time to establish a connection, including TLS.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for sent data to be acknowledged; the kernel closes the connection after it, without
/// wake-ups.
const ARRIVAL_TIMEOUT: Duration = Duration::from_secs(15);
/// Silence after which a connection is probed; each probe costs wake-ups, also between heartbeats.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(30);
/// Time for an ordinary call.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// Time for a heartbeat: so a silent server is suspect within 10 s.
const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for an allocation or a cold worker: the server starts workers for it.
const SLOW_CALL_TIMEOUT: Duration = Duration::from_secs(60);
/// Time to move a lease's device memory: all of a server's GPUs at the driver's 2.7 GB/s.
///
/// The connection's keep-alive detects an unreachable server sooner.
const MOVE_TIMEOUT: Duration = Duration::from_secs(600);
/// Longest details of a refusal in bytes.
const MAX_DETAILS: usize = 4096;
/// Longest name of a server in messages, in characters.
const MAX_NAME: usize = 64;
/// Largest message that is accepted, in bytes.
const MAX_ANSWER: usize = 4 << 20;

/// A connection to one server, opened on demand and reopened after a failure.
pub struct Remote {
    address: String,
    identity: Identity,
    connection: Mutex<Connection>,
}

#[derive(Clone)]
struct Connection {
    /// SHA-256 of the certificate that this client shows.
    certificate: Fingerprint,
    client: PoolClient<Channel>,
    peer: Arc<Peer>,
}

/// The server at the other end of a channel, by its certificate.
#[derive(Debug, Default)]
struct Peer {
    /// DNS names of the certificate, the same for each connection of the channel.
    names: OnceLock<Vec<String>>,
    /// Address at which the latest connection reached it.
    reached: Mutex<Option<IpAddr>>,
    /// A later connection led to a server with other names.
    replaced: AtomicBool,
}

impl Peer {
    /// Takes the certificate of a new connection.
    ///
    /// A channel whose server gets another name ends, so that each answer has one possible sender.
    fn shows(&self, certificate: &[u8]) -> io::Result<()> {
        let names = trust::dns_names(certificate);
        if *self.names.get_or_init(|| names.clone()) == names {
            return Ok(());
        }
        self.replaced.store(true, Ordering::Relaxed);
        Err(io::Error::other("another server of the pool answers at this address now: connecting again"))
    }

    /// Returns the address of the latest connection.
    fn reached(&self) -> Option<IpAddr> {
        *self.reached.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns `true` if the certificate names the server so.
    fn is(&self, name: &str) -> bool {
        self.names.get().is_some_and(|names| names.contains(&join::server(name)))
    }
}

impl Remote {
    /// Creates a client that connects at the first call; must be called on a runtime.
    pub fn new(address: &str, identity: &Identity) -> Result<Self, PoolError> {
        let connection = Mutex::new(Connection::new(address, identity)?);
        Ok(Self { address: address.to_owned(), identity: identity.clone(), connection })
    }

    /// Returns the connection; a new one after a renewal, or if the server has got another name.
    ///
    /// Calls in progress finish on the earlier connection.
    fn connection(&self) -> Result<Connection, PoolError> {
        let mut connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        let renewed = connection.certificate != self.identity.facts().certificate;
        if renewed || connection.peer.replaced.load(Ordering::Relaxed) {
            *connection = Connection::new(&self.address, &self.identity)?;
        }
        // The connection may be older than the revocation; a new one fails in TLS.
        let names = connection.peer.names.get().map(Vec::as_slice).unwrap_or_default();
        if let Some(server) = trust::revoked_of(names, &self.identity.revoked()) {
            return Err(PoolError::new(
                Trouble::Refused,
                format!("{}: {}", self.address, trust::refusal(server)),
            ));
        }
        Ok(connection.clone())
    }

    async fn call<T>(
        &self,
        limit: Duration,
        call: impl AsyncFnOnce(PoolClient<Channel>) -> Result<tonic::Response<T>, Status>,
    ) -> Result<T, PoolError> {
        answered(&self.address, limit, call(self.connection()?.client)).await
    }

    /// Calls for an answer with the server's name, which its certificate must have, and addresses.
    ///
    /// The answer keeps the addresses that programs may connect to.
    async fn call_named<T: Naming>(
        &self,
        limit: Duration,
        call: impl AsyncFnOnce(PoolClient<Channel>) -> Result<tonic::Response<T>, Status>,
    ) -> Result<T, PoolError> {
        let Connection { client, peer, .. } = self.connection()?;
        let mut answer = answered(&self.address, limit, call(client)).await?;
        let refused =
            |why: &str| PoolError::new(Trouble::Protocol, format!("{}: answer refused: {why}", self.address));
        let (name, addresses) = answer.named();
        if !peer.is(name) {
            return Err(refused(&format!(
                "the server calls itself {}, and its certificate names another one; \
                 `systemctl restart gpuserver` there makes a certificate of its present name",
                name.chars().take(MAX_NAME).collect::<String>()
            )));
        }
        if let Some(reached) = peer.reached() {
            let Named { usable, refused: near } = addresses::named(std::mem::take(addresses), reached).await;
            if let Some(near) = near.filter(|_| usable.is_empty()) {
                return Err(refused(&addresses::refusal(&near, reached)));
            }
            *addresses = usable;
        }
        Ok(answer)
    }

    /// Asks for a newer certificate.
    pub async fn renew_identity(&self, request: control::RenewIdentityRequest) -> Result<String, PoolError> {
        let reply = self.call(SLOW_CALL_TIMEOUT, async |mut c| c.renew_identity(request).await).await?;
        Ok(reply.certificate_pem)
    }

    /// Reports which authorities this client trusts; returns the server's answer, with a list of
    /// authorities and statements about revoked servers.
    pub async fn authorities(&self) -> Result<control::ServerDescription, PoolError> {
        let authorities = self.identity.authorities().fingerprints().map(Vec::from).collect();
        let request = control::DescribeRequest { usage_uid: None, authorities };
        self.call(CALL_TIMEOUT, async |mut c| c.describe(request).await).await
    }
}

/// An answer in which a server names itself and the addresses of its data port.
trait Naming {
    fn named(&mut self) -> (&str, &mut Vec<String>);
}

impl Naming for control::Lease {
    fn named(&mut self) -> (&str, &mut Vec<String>) {
        (&self.server, &mut self.data_addresses)
    }
}

impl Naming for control::MeasureReply {
    fn named(&mut self) -> (&str, &mut Vec<String>) {
        (&self.server, &mut self.data_addresses)
    }
}

impl Naming for control::ServerDescription {
    fn named(&mut self) -> (&str, &mut Vec<String>) {
        (&self.name, &mut self.data_addresses)
    }
}

impl Connection {
    fn new(address: &str, identity: &Identity) -> Result<Self, PoolError> {
        let certificate = identity.facts().certificate;
        let (identity, peer) = (identity.clone(), Arc::new(Peer::default()));
        // A later connection trusts the authorities of its own time.
        let channel = channel(address, move || identity.tls(), peer.clone())?;
        let client = PoolClient::new(channel).max_decoding_message_size(MAX_ANSWER);
        Ok(Self { certificate, client, peer })
    }
}

async fn answered<T>(
    address: &str,
    limit: Duration,
    call: impl Future<Output = Result<tonic::Response<T>, Status>>,
) -> Result<T, PoolError> {
    match tokio::time::timeout(limit, call).await {
        Ok(Ok(reply)) => Ok(reply.into_inner()),
        Ok(Err(status)) => Err(trouble(address, &status)),
        Err(_) => {
            let message = format!("{address} did not answer within {} s", limit.as_secs());
            Err(PoolError::new(Trouble::Unreachable, message))
        }
    }
}

/// Creates a channel that connects on demand, to a peer that has proven to be a server of the pool.
fn channel(
    address: &str,
    tls: impl Fn() -> Arc<ClientConfig> + Send + 'static,
    peer: Arc<Peer>,
) -> Result<Channel, PoolError> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"))
        .map_err(|e| PoolError::new(Trouble::Invalid, format!("{address}: {e}")))?
        .connect_timeout(CONNECT_TIMEOUT)
        .http2_keep_alive_interval(KEEPALIVE_INTERVAL)
        .keep_alive_timeout(Duration::from_secs(5))
        .keep_alive_while_idle(true)
        .user_agent(concat!("gpusession/", env!("CARGO_PKG_VERSION")))
        .map_err(|e| PoolError::new(Trouble::Invalid, e.to_string()))?;
    let target = address.to_owned();
    Ok(
        endpoint.connect_with_connector_lazy(tower::service_fn(move |_: Uri| {
            let (target, tls, peer) = (target.clone(), tls(), peer.clone());
            async move {
                tokio::time::timeout(CONNECT_TIMEOUT, connect(&target, tls, &peer)).await?.map(TokioIo::new)
            }
        })),
    )
}

async fn connect(address: &str, tls: Arc<ClientConfig>, peer: &Peer) -> io::Result<TlsStream<TcpStream>> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    setsockopt(&stream, TcpUserTimeout, &(ARRIVAL_TIMEOUT.as_millis() as u32))?;
    let stream = TlsConnector::from(tls).connect(identity::server_name(), stream).await?;
    let reached = stream.get_ref().0.peer_addr()?.ip();
    *peer.reached.lock().unwrap_or_else(PoisonError::into_inner) = Some(reached);
    let certificates = stream.get_ref().1.peer_certificates();
    peer.shows(certificates.and_then(<[_]>::first).map_or(&[], |certificate| certificate))?;
    Ok(stream)
}

/// Returns the innermost source of an error: tonic's own text is "transport error".
fn root_cause(error: &dyn std::error::Error) -> String {
    let mut deepest = error.to_string();
    let mut next = error.source();
    while let Some(error) = next {
        deepest = error.to_string();
        next = error.source();
    }
    deepest
}

/// Decodes the details that a server attaches to a refusal.
fn refusal(status: &Status) -> Option<PoolError> {
    use control::refusal::Kind;
    use prost::Message as _;
    let details = Some(status.details()).filter(|d| !d.is_empty() && d.len() <= MAX_DETAILS)?;
    let refusal = control::Refusal::decode(details).ok()?;
    let trouble = match refusal.kind() {
        Kind::Unspecified => return None,
        Kind::NoCapacity => Trouble::NoCapacity,
        Kind::Limit => Trouble::LimitExceeded,
        Kind::NeverFits => Trouble::NeverFits,
        Kind::NotAccepted => Trouble::Refused,
        Kind::OutOfMemory => Trouble::OutOfMemory,
    };
    let place = PoolError::place_of(refusal.position, refusal.waiting);
    Some(PoolError { place, ..PoolError::new(trouble, status.message()) })
}

fn trouble(address: &str, status: &Status) -> PoolError {
    let said = status.message();
    if let Some(error) = refusal(status) {
        return error;
    }
    let trouble = match status.code() {
        Code::ResourceExhausted => Trouble::NoCapacity,
        Code::FailedPrecondition => Trouble::NeverFits,
        // Aborted means that another machine uses this identity.
        Code::Unauthenticated | Code::PermissionDenied | Code::Aborted => Trouble::Refused,
        Code::NotFound => Trouble::NoSuchLease,
        Code::InvalidArgument | Code::OutOfRange | Code::AlreadyExists => Trouble::Invalid,
        Code::Unimplemented => Trouble::Protocol,
        _ => Trouble::Unreachable,
    };
    if trouble != Trouble::Unreachable {
        return PoolError::new(trouble, said);
    }
    let cause = std::error::Error::source(status).map_or_else(|| said.to_owned(), root_cause);
    // A TLS alert about the client's certificate does not go away by waiting.
    let refused = cause.contains("received fatal alert")
        || cause.contains("invalid peer certificate")
        || cause.contains(trust::REFUSAL);
    let trouble = if refused { Trouble::Refused } else { trouble };
    PoolError::new(trouble, format!("{address}: {cause}{}", remedy(&cause)))
}

/// Explains TLS's words about an expired certificate.
fn remedy(cause: &str) -> &'static str {
    if cause.contains("received fatal alert: CertificateExpired") {
        "; this client's certificate has expired: the server is of a version that renews none, so `gpuserver clients forget` \
         there, then `gpusession leave` and `gpusession join` here; or the clocks differ"
    } else if cause.contains("invalid peer certificate: certificate expired") {
        "; the server's certificate has expired: restart gpuserver there; or the clocks differ"
    } else {
        ""
    }
}

#[async_trait]
impl PoolServer for Remote {
    fn address(&self) -> &str {
        &self.address
    }

    async fn allocate(&self, request: control::AllocateRequest) -> Result<control::Lease, PoolError> {
        self.call_named(SLOW_CALL_TIMEOUT, async |mut c| c.allocate(request).await).await
    }

    async fn renew(&self, leases: Vec<String>, boot_id: String) -> Result<control::RenewReply, PoolError> {
        let request = control::RenewRequest { leases, boot_id };
        self.call(HEARTBEAT_TIMEOUT, async |mut c| c.renew(request).await).await
    }

    async fn release(&self, lease: String) -> Result<(), PoolError> {
        let request = control::ReleaseRequest { lease, ..Default::default() };
        self.call(CALL_TIMEOUT, async |mut c| c.release(request).await).await.map(|_| ())
    }

    async fn withdraw(&self, request_id: String) -> Result<(), PoolError> {
        let request = control::ReleaseRequest { request_id, ..Default::default() };
        self.call(CALL_TIMEOUT, async |mut c| c.release(request).await).await.map(|_| ())
    }

    async fn take_workers(
        &self,
        lease: String,
        count: u32,
        waiting: u32,
        environment: HashMap<String, String>,
    ) -> Result<Vec<control::Worker>, PoolError> {
        let request = control::TakeWorkersRequest { lease, count, environment, waiting };
        match self.call(SLOW_CALL_TIMEOUT, async |mut c| c.take_workers(request).await).await {
            Ok(reply) => Ok(reply.workers),
            // Too many processes: that is a limit, not a lack of GPUs.
            Err(e) if e.trouble == Trouble::NoCapacity => {
                Err(PoolError { trouble: Trouble::LimitExceeded, ..e })
            }
            Err(e) => Err(e),
        }
    }

    async fn process_ended(&self, lease: String, worker: Vec<u8>) -> Result<(), PoolError> {
        let request = control::ProcessEndedRequest { lease, worker };
        self.call(CALL_TIMEOUT, async |mut c| c.process_ended(request).await).await.map(|_| ())
    }

    async fn park(&self, lease: String, park: bool) -> Result<(), PoolError> {
        let reply = self.call(MOVE_TIMEOUT, async |mut c| match park {
            true => c.park(control::ParkRequest { lease }).await,
            false => c.unpark(control::UnparkRequest { lease }).await,
        });
        reply.await.map(|_| ())
    }

    async fn idle_hint(&self, lease: String, idle: bool) -> Result<(), PoolError> {
        let request = control::IdleHintRequest { lease, idle };
        self.call(CALL_TIMEOUT, async |mut c| c.idle_hint(request).await).await.map(|_| ())
    }

    async fn readings(&self, request: control::ReadingsRequest) -> Result<control::ReadingsReply, PoolError> {
        self.call(CALL_TIMEOUT, async |mut c| c.readings(request).await).await
    }

    async fn measure(&self, seconds: u32) -> Result<control::MeasureReply, PoolError> {
        let request = control::MeasureRequest { seconds };
        self.call_named(SLOW_CALL_TIMEOUT, async |mut c| c.measure(request).await).await
    }

    async fn describe(&self, usage_uid: Option<u32>) -> Result<control::ServerDescription, PoolError> {
        let request = control::DescribeRequest { usage_uid, authorities: Vec::new() };
        self.call_named(CALL_TIMEOUT, async |mut c| c.describe(request).await).await
    }

    async fn watch(
        &self,
        boot_id: String,
        events: mpsc::Sender<control::PoolEvent>,
    ) -> Result<(), PoolError> {
        let request = control::WatchRequest { boot_id };
        let begin = || self.call(CALL_TIMEOUT, async |mut c| c.watch(request.clone()).await);
        let mut replaced = self.identity.replaced();
        let mut stream = begin().await?;
        let mut newer = None;
        loop {
            let message = match &mut newer {
                // Events that have arrived on the older connection come first.
                Some(_) => tokio::time::timeout(Duration::ZERO, stream.message()).await.unwrap_or(Ok(None)),
                None => tokio::select! {
                    message = stream.message() => message,
                    () = replaced.changed() => {
                        // The server thus never sees this client without a watch.
                        newer = begin().await.ok();
                        continue;
                    }
                },
            };
            match message {
                Ok(Some(control::PoolEvent { event: Some(Event::AuthoritiesChanged(_)), .. })) => {
                    self.identity.authorities_changed();
                }
                Ok(Some(event)) => {
                    if events.send(event).await.is_err() {
                        return Ok(());
                    }
                }
                Ok(None) | Err(_) if newer.is_some() => {
                    if let Some(newer) = newer.take() {
                        stream = newer;
                    }
                }
                Ok(None) => return Ok(()),
                Err(status) => return Err(trouble(&self.address, &status)),
            }
        }
    }
}

/// Joins the pool with a join token.
pub async fn join(
    address: &str,
    tls: Arc<ClientConfig>,
    request: control::JoinRequest,
) -> Result<control::JoinReply, PoolError> {
    let mut client = EnrolmentClient::new(channel(address, move || tls.clone(), Arc::default())?)
        .max_decoding_message_size(MAX_ANSWER);
    answered(address, SLOW_CALL_TIMEOUT, client.join(request)).await
}
