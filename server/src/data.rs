//! The data port: passes each connection to the worker or endpoint that its preface names.
//!
//! The server reads nothing after the preface.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use gpusession_proto::journal::Event;
use gpusession_proto::preface::{self, Code, Preface};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::timeout;
use tracing::info;

use crate::log_throttle::LogThrottle;
use crate::net::accept_loop;
use crate::netperf::Endpoints;
use crate::peer_slots::PeerSlots;
use crate::supervise::{AdoptError, Supervisor};

/// Time in which a connection has to send its preface.
const PREFACE_TIMEOUT: Duration = Duration::from_secs(5);
/// Most connections that have not sent their preface.
const MAX_PENDING: usize = 512;
/// Time for which a full table's slots are safe from new connections.
///
/// It can be short, since clients send the preface at once.
const QUEUE_GRACE: Duration = Duration::from_secs(1);

/// Returns `true` for addresses that may connect without encryption.
pub type MayBeClear = Arc<dyn Fn(IpAddr) -> bool + Send + Sync>;

/// Binds the first free port of a range.
pub async fn bind(host: IpAddr, (first, last): (u16, u16)) -> io::Result<TcpListener> {
    let mut error = None;
    for port in first..=last {
        match TcpListener::bind(SocketAddr::new(host, port)).await {
            Ok(listener) => return Ok(listener),
            Err(e) if e.kind() == io::ErrorKind::AddrInUse => error = Some(e),
            Err(e) => return Err(e),
        }
    }
    Err(error.unwrap_or_else(|| io::ErrorKind::AddrInUse.into()))
}

/// Serves the data port until `closed` changes.
///
/// It passes on all connections accepted by then before it returns.
pub async fn serve(
    listener: TcpListener,
    (supervisor, endpoints): (Supervisor, Endpoints),
    may_be_clear: MayBeClear,
    mut closed: watch::Receiver<bool>,
) {
    let quiet = Arc::new(LogThrottle::default());
    let serve = |socket, peer, mut place| {
        let (supervisor, endpoints) = (supervisor.clone(), endpoints.clone());
        let (may_be_clear, quiet) = (may_be_clear.clone(), quiet.clone());
        async move {
            let done = tokio::select! {
                done = hand_over(socket, peer, (&supervisor, &endpoints), &may_be_clear) => done,
                () = &mut place => Err("another connection needed its slot".to_owned().into()),
            };
            if let Err(Refused(event, reason)) = done
                && let Some(more) = quiet.may()
            {
                info!(
                    message_id = event.map(Event::id),
                    gpusession_reason = reason,
                    "data port: connection from {peer} refused: {reason}{more}"
                );
                supervisor.connection_refused(peer, format!("{reason}{more}"));
            }
        }
    };
    let pending = PeerSlots::new(MAX_PENDING, QUEUE_GRACE);
    accept_loop("data port", listener, pending, &quiet, closed.changed(), serve).await;
}

/// Reason of a refusal, with its event in the journal, if any.
struct Refused(Option<Event>, String);

impl From<String> for Refused {
    fn from(reason: String) -> Self {
        Self(None, reason)
    }
}

async fn hand_over(
    mut socket: TcpStream,
    peer: SocketAddr,
    (supervisor, endpoints): (&Supervisor, &Endpoints),
    may_be_clear: &MayBeClear,
) -> Result<(), Refused> {
    let mut bytes = [0; preface::LEN];
    match timeout(PREFACE_TIMEOUT, socket.read_exact(&mut bytes)).await {
        Ok(Ok(_)) => {}
        Ok(Err(e)) => return Err(format!("it ended inside the preface: {e}").into()),
        Err(_) => return Err("no preface within 5 s".to_owned().into()),
    }
    let preface = match Preface::parse(&bytes) {
        Ok(preface) => preface,
        Err(e @ preface::BadPreface::Version(_)) => {
            refuse(socket, Code::Version, &e.to_string()).await;
            return Err(Refused(Some(Event::ProtocolMismatch), e.to_string()));
        }
        Err(e) => return Err(e.to_string().into()),
    };
    if !preface.tls() && !may_be_clear(peer.ip()) {
        let reason = AdoptError::Clear.to_string();
        refuse(socket, Code::Clear, &reason).await;
        return Err(reason.into());
    }
    let _ = socket.set_nodelay(true);
    let socket = socket.into_std().map_err(|e| e.to_string())?;
    // The worker's threads use blocking calls.
    socket.set_nonblocking(false).map_err(|e| e.to_string())?;
    let adopted = match endpoints.serve(&preface.worker) {
        true => endpoints.adopt(&preface, socket, peer),
        false => supervisor.adopt(&preface, socket, peer),
    };
    if let Err((error, socket)) = adopted {
        let reason = error.to_string();
        socket.set_nonblocking(true).map_err(|e| e.to_string())?;
        refuse(TcpStream::from_std(socket).map_err(|e| e.to_string())?, error.code(), &reason).await;
        return Err(format!("{reason} ({})", crate::supervise::hex(&preface.worker)).into());
    }
    Ok(())
}

/// Sends the reason of a refusal to the peer.
///
/// Reads what the peer has sent already: otherwise the kernel resets the connection, and the reason
/// is lost.
async fn refuse(mut socket: TcpStream, code: Code, reason: &str) {
    let told = async {
        socket.write_all(&preface::refusal(code, reason)).await?;
        socket.shutdown().await?;
        let mut sink = [0; 4096];
        for _ in 0..64 {
            if socket.read(&mut sink).await? == 0 {
                break;
            }
        }
        io::Result::Ok(())
    };
    let _ = timeout(Duration::from_secs(1), told).await;
}
