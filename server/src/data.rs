//! The data port: reads who a connection is for and hands the socket to that worker. What follows the preface is not read
//! here.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use gpusession_proto::journal::Event;
use gpusession_proto::preface::{self, Preface};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tracing::{info, warn};

use crate::crowd::Crowd;
use crate::quiet::Quiet;
use crate::supervise::{AdoptError, Supervisor};

/// A connection that did not send its preface by then is closed.
const PREFACE_LIMIT: Duration = Duration::from_secs(5);
/// Connections whose preface is awaited, and how long one of many is safe from who comes next: prefaces come with the connection.
const MAX_PENDING: usize = 512;
const PATIENCE: Duration = Duration::from_secs(1);

/// Who may connect without encryption.
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

/// Serves the data port until it is closed; what was accepted by then is handed over before this returns.
pub async fn serve(
    listener: TcpListener,
    supervisor: Supervisor,
    may_be_clear: MayBeClear,
    mut closed: watch::Receiver<bool>,
) {
    let pending = Crowd::new(MAX_PENDING, PATIENCE);
    let quiet = Arc::new(Quiet::default());
    let mut handed = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = closed.changed() => {
                while handed.join_next().await.is_some() {}
                return;
            }
        };
        while handed.try_join_next().is_some() {}
        let (socket, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(e) => {
                // Out of descriptors or memory: others need them first.
                if let Some(more) = quiet.may() {
                    warn!("data port: accept: {e}{more}");
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let Some(mut place) = pending.enter(peer.ip()).await else {
            if let Some(more) = quiet.may() {
                warn!("data port: too many unfinished connections from {}{more}", peer.ip());
            }
            continue;
        };
        let (supervisor, may_be_clear, quiet) = (supervisor.clone(), may_be_clear.clone(), quiet.clone());
        handed.spawn(async move {
            let done = tokio::select! {
                done = hand_over(socket, peer, &supervisor, &may_be_clear) => done,
                () = &mut place => Err("others waited for its place".to_owned().into()),
            };
            if let Err(Refused(event, reason)) = done
                && let Some(more) = quiet.may()
            {
                info!(
                    message_id = event.map(Event::id),
                    gpusession_reason = reason,
                    "data connection from {peer} refused: {reason}{more}"
                );
            }
        });
    }
}

/// Why a connection is refused, and what the journal calls that.
struct Refused(Option<Event>, String);

impl From<String> for Refused {
    fn from(reason: String) -> Self {
        Self(None, reason)
    }
}

async fn hand_over(
    mut socket: TcpStream,
    peer: SocketAddr,
    supervisor: &Supervisor,
    may_be_clear: &MayBeClear,
) -> Result<(), Refused> {
    let mut bytes = [0; preface::LEN];
    match timeout(PREFACE_LIMIT, socket.read_exact(&mut bytes)).await {
        Ok(Ok(_)) => {}
        Ok(Err(e)) => return Err(format!("it ended inside the preface ({e})").into()),
        Err(_) => return Err("no preface in time".to_owned().into()),
    }
    let preface = match Preface::parse(&bytes) {
        Ok(preface) => preface,
        Err(e @ preface::BadPreface::Version(_)) => {
            refuse(socket, &e.to_string()).await;
            return Err(Refused(Some(Event::ProtocolMismatch), e.to_string()));
        }
        Err(e) => return Err(e.to_string().into()),
    };
    if !preface.tls() && !may_be_clear(peer.ip()) {
        let reason = AdoptError::Clear.to_string();
        refuse(socket, &reason).await;
        return Err(reason.into());
    }
    let _ = socket.set_nodelay(true);
    let socket = socket.into_std().map_err(|e| e.to_string())?;
    // The worker's threads block in it.
    socket.set_nonblocking(false).map_err(|e| e.to_string())?;
    let adopted = supervisor.adopt(&preface.worker, socket, bytes.to_vec(), peer, preface.tls());
    if let Err((error, socket)) = adopted {
        let reason = error.to_string();
        socket.set_nonblocking(true).map_err(|e| e.to_string())?;
        refuse(TcpStream::from_std(socket).map_err(|e| e.to_string())?, &reason).await;
        return Err(format!("{reason} ({})", crate::supervise::hex(&preface.worker)).into());
    }
    Ok(())
}

/// Tells the peer why. What it has sent already is read, else the kernel resets the connection and the reason is lost.
async fn refuse(mut socket: TcpStream, reason: &str) {
    let told = async {
        socket.write_all(&preface::refusal(reason)).await?;
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
