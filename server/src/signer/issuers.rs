//! Calls to the issuers of a pool, by a server that holds no authority's key.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use gpusession_proto::control::issuer_client::IssuerClient;
use gpusession_proto::control::{IssuerRequest, ServerJoinReply, ServerJoinRequest, ServerReport};
use gpusession_proto::{join, message, pinned};
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tonic::codegen::Service;
use tonic::transport::{Channel, Endpoint, Identity, Uri};
use tonic::{Code, Status};

use super::operation::{Operation, Outcome};
use crate::net::{self, CONNECT_TIMEOUT, root_cause};
use crate::text::printable;

/// Time for an answer: a signature may wait some seconds for its turn.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(15);
/// Longest answer, in bytes.
const MAX_ANSWER: usize = 128 << 10;
/// Longest text of another server that a message shows, in characters.
const MAX_TEXT: usize = 400;

/// Reason why a server does not do an operation for this one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Trouble {
    /// It holds no authority's key.
    #[error("it is no issuer")]
    NoIssuer,
    /// It does not answer.
    #[error("it does not answer: {0}")]
    Silent(String),
    /// It refuses this server.
    #[error("it refuses: {0}")]
    Refused(String),
}

/// Certificate and key with which this server calls, and the authorities that it trusts, in PEM.
#[derive(Clone)]
pub struct Credentials {
    /// Certificates of the authorities.
    pub authorities: String,
    /// Certificate of this server.
    pub certificate: String,
    /// Key of the certificate.
    pub key: String,
}

/// Address of a server, and the name that its certificate has to have; empty: any server's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// HOST:PORT of the control port.
    pub address: String,
    /// Name in the pool.
    pub server: String,
}

/// Has an issuer's signer do an operation. Waits, whatever the calling thread is.
pub fn ask(target: &Target, credentials: &[Credentials], operation: &Operation) -> Result<Outcome, Trouble> {
    let (target, credentials) = (target.clone(), credentials.to_vec());
    let request = ordered(operation);
    waited(async move { ask_one(&target, &credentials, request).await }).unwrap_or_else(|e| Err(internal(&e)))
}

/// Asks several servers for the pool's authorities at a time, with a report of this server.
///
/// Returns their answers in the same order.
pub fn authorities(
    targets: &[Target],
    credentials: &[Credentials],
    report: &ServerReport,
) -> Vec<Result<Outcome, Trouble>> {
    let request = IssuerRequest { report: Some(report.clone()), ..ordered(&Operation::Bundle) };
    let asked: Vec<_> =
        targets.iter().map(|target| (target.clone(), credentials.to_vec(), request.clone())).collect();
    let answers = waited(async move {
        let mut asking = JoinSet::new();
        for (number, (target, credentials, request)) in asked.into_iter().enumerate() {
            asking.spawn(async move { (number, ask_one(&target, &credentials, request).await) });
        }
        let mut answers = asking.join_all().await;
        answers.sort_by_key(|(number, _)| *number);
        answers.into_iter().map(|(_, answer)| answer).collect()
    });
    answers.unwrap_or_else(|e| targets.iter().map(|_| Err(internal(&e))).collect())
}

fn ordered(operation: &Operation) -> IssuerRequest {
    IssuerRequest { operation: message::encode(operation).split_off(4), report: None }
}

/// Joins a pool through the issuer at `address`, which has to be of the pool of this authority.
pub fn join_pool(
    address: &str,
    authority: [u8; 32],
    request: ServerJoinRequest,
) -> Result<ServerJoinReply, Trouble> {
    let address = address.to_owned();
    let joined = waited(async move {
        let endpoint = Endpoint::from_shared(format!("http://{address}")).map_err(|e| silent(&e))?;
        let endpoint = endpoint.connect_timeout(CONNECT_TIMEOUT).timeout(ANSWER_TIMEOUT);
        let connector = Connector { address, tls: Arc::new(pinned::tls(authority)) };
        let channel = endpoint.connect_with_connector(connector).await.map_err(|e| silent(&e))?;
        let mut client = IssuerClient::new(channel).max_decoding_message_size(MAX_ANSWER);
        Ok(client.join(request).await.map_err(|status| trouble(&status))?.into_inner())
    });
    joined.unwrap_or_else(|e| Err(internal(&e)))
}

/// Runs a call to its end in a thread of its own, whether or not the caller's belongs to a runtime.
fn waited<T: Send>(work: impl Future<Output = T> + Send) -> io::Result<T> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("issuer".into()).spawn_scoped(scope, || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            Ok(runtime.block_on(work))
        })?;
        thread.join().unwrap_or_else(|_| Err(io::Error::other("the call panicked")))
    })
}

fn internal(e: &io::Error) -> Trouble {
    Trouble::Silent(format!("internal error: {e}"))
}

/// Asks with each of the credentials until the server takes one.
///
/// During a rotation, a server may know one of the two authorities alone.
async fn ask_one(
    target: &Target,
    credentials: &[Credentials],
    request: IssuerRequest,
) -> Result<Outcome, Trouble> {
    let mut answer = Err(Trouble::Silent("this server has no certificate".into()));
    for credentials in credentials {
        answer = ask_with(target, credentials, request.clone()).await;
        if !matches!(answer, Err(Trouble::Silent(_))) {
            break;
        }
    }
    answer
}

async fn ask_with(
    target: &Target,
    credentials: &Credentials,
    request: IssuerRequest,
) -> Result<Outcome, Trouble> {
    let mut client =
        IssuerClient::new(connect(target, credentials).await?).max_decoding_message_size(MAX_ANSWER);
    let reply = client.ask(request).await.map_err(|status| trouble(&status))?;
    let outcome = message::decode(&reply.into_inner().outcome);
    outcome.map_err(|_| Trouble::Refused("its answer is of another version of gpuserver".into()))
}

async fn connect(target: &Target, credentials: &Credentials) -> Result<Channel, Trouble> {
    let name = if target.server.is_empty() { join::any_server() } else { join::server(&target.server) };
    let identity = Identity::from_pem(&credentials.certificate, &credentials.key);
    let credentials = (credentials.authorities.as_str(), identity);
    let connected = net::connect(&target.address, name, credentials, ANSWER_TIMEOUT).await;
    connected.map_err(|cause| Trouble::Silent(plain(&cause)))
}

fn silent(error: &dyn std::error::Error) -> Trouble {
    Trouble::Silent(plain(&root_cause(error)))
}

fn trouble(status: &Status) -> Trouble {
    match status.code() {
        Code::FailedPrecondition | Code::Unimplemented => Trouble::NoIssuer,
        Code::PermissionDenied
        | Code::Unauthenticated
        | Code::ResourceExhausted
        | Code::InvalidArgument
        | Code::Unavailable
            if !status.message().is_empty() && std::error::Error::source(status).is_none() =>
        {
            Trouble::Refused(plain(status.message()))
        }
        _ => silent(status),
    }
}

/// Returns a text of another server as one line.
pub fn plain(text: &str) -> String {
    printable(text, MAX_TEXT)
}

/// Connects to a server that the pinned authority has certified.
struct Connector {
    address: String,
    tls: Arc<ClientConfig>,
}

impl Service<Uri> for Connector {
    type Response = TokioIo<TlsStream<TcpStream>>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let (address, tls) = (self.address.clone(), self.tls.clone());
        Box::pin(async move {
            let connecting = async {
                let name = ServerName::try_from(join::any_server()).map_err(io::Error::other)?;
                let socket = TcpStream::connect(address).await?;
                Ok(TokioIo::new(TlsConnector::from(tls).connect(name, socket).await?))
            };
            tokio::time::timeout(CONNECT_TIMEOUT, connecting).await?
        })
    }
}
