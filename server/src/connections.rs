//! Connections of the control port: their peers, and bounds on their number and their time.

use std::collections::HashMap;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Sleep, sleep};
use tokio_rustls::server::TlsStream;
use tonic::transport::server::Connected;

use crate::certificate::{Holder, Role, fingerprint, holder, issuer};
use crate::peer_slots;

/// Most connections of one client or administrator, whatever the number of its certificates.
///
/// A daemon has one; each `gpusession run --server` has one while its program runs.
const MAX_OF_ONE: usize = 256;
/// Time that a connection without a certificate may take, enough to join.
const STRANGER_TIMEOUT: Duration = Duration::from_secs(30);

/// The peer of a connection, determined once and attached to each of its requests.
#[derive(Debug, Clone)]
pub struct Peer(Arc<Facts>);

#[derive(Debug)]
struct Facts {
    remote: Option<SocketAddr>,
    local: Option<SocketAddr>,
    certificate: Option<Certificate>,
}

/// A certificate of the pool's authority.
#[derive(Debug)]
pub struct Certificate {
    /// The certificate (DER), which a renewal shows to the signer.
    pub der: Vec<u8>,
    /// SHA-256 of the certificate.
    pub fingerprint: [u8; 32],
    /// Client or administrator that it names; `None` for a server's.
    pub holder: Option<Holder>,
    /// SHA-256 of the name of the authority that issued it.
    pub issuer: Option<[u8; 32]>,
}

impl Peer {
    fn of(stream: &TlsStream<TcpStream>) -> Self {
        let (socket, tls) = stream.get_ref();
        let der = tls.peer_certificates().and_then(<[_]>::first);
        let certificate = der.map(|der| Certificate {
            der: der.to_vec(),
            fingerprint: fingerprint(der),
            holder: holder(der),
            issuer: issuer(der),
        });
        let (remote, local) = (socket.peer_addr().ok(), socket.local_addr().ok());
        Self(Arc::new(Facts { remote, local, certificate }))
    }

    /// Returns the peer's address.
    pub fn remote(&self) -> Option<SocketAddr> {
        self.0.remote
    }

    /// Returns the address of this server that the peer reached.
    pub fn local(&self) -> Option<SocketAddr> {
        self.0.local
    }

    /// Returns the certificate that the peer presented and TLS verified.
    pub fn certificate(&self) -> Option<&Certificate> {
        self.0.certificate.as_ref()
    }
}

/// The slot of a connection.
#[derive(Debug)]
pub enum Place {
    /// A peer with a valid certificate, without a bound on its time.
    Known(OwnedSemaphorePermit, Holding),
    /// A peer without a valid certificate, for at most [`STRANGER_TIMEOUT`].
    ///
    /// Others may take its slot.
    Stranger(peer_slots::Place, Pin<Box<Sleep>>),
}

impl Place {
    /// Starts the time of a peer without a valid certificate.
    pub fn stranger(place: peer_slots::Place) -> Self {
        Self::Stranger(place, Box::pin(sleep(STRANGER_TIMEOUT)))
    }
}

type Name = (Role, String);

/// Number of connections of each client and administrator, so that none can take all slots.
#[derive(Debug, Clone, Default)]
pub struct Holders(Arc<Mutex<HashMap<Name, usize>>>);

/// One counted connection; dropping it subtracts it.
#[derive(Debug)]
pub struct Holding {
    holders: Holders,
    name: Name,
}

impl Holders {
    fn locked(&self) -> MutexGuard<'_, HashMap<Name, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts one more connection of a certificate's holder; `None` if it has [`MAX_OF_ONE`].
    pub fn enter(&self, holder: Holder) -> Option<Holding> {
        let name = (holder.role, holder.name);
        let mut all = self.locked();
        let count = all.entry(name.clone()).or_default();
        if *count >= MAX_OF_ONE {
            return None;
        }
        *count += 1;
        Some(Holding { holders: self.clone(), name })
    }
}

impl Drop for Holding {
    fn drop(&mut self) {
        let mut all = self.holders.locked();
        if let Some(count) = all.get_mut(&self.name) {
            *count -= 1;
            if *count == 0 {
                all.remove(&self.name);
            }
        }
    }
}

/// A connection that holds its slot until it ends.
#[derive(Debug)]
pub struct Guarded {
    stream: TlsStream<TcpStream>,
    place: Place,
}

impl Guarded {
    /// Attaches a slot to a connection.
    pub fn new(stream: TlsStream<TcpStream>, place: Place) -> Self {
        Self { stream, place }
    }
}

/// Returns the certificate (DER) that the peer presented and TLS verified.
pub fn shown(stream: &TlsStream<TcpStream>) -> Option<&[u8]> {
    stream.get_ref().1.peer_certificates()?.first().map(|certificate| certificate.as_ref())
}

impl Connected for Guarded {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        Peer::of(&self.stream)
    }
}

impl AsyncRead for Guarded {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if let Place::Stranger(place, until) = &mut self.place
            && (until.as_mut().poll(cx).is_ready() || Pin::new(place).poll(cx).is_ready())
        {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Guarded {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_has_no_more_connections_with_more_certificates() {
        let holders = Holders::default();
        let renewed = |role, name: &str, issued_unix| Holder {
            role,
            name: name.into(),
            issued_unix,
            expires_unix: u64::MAX,
            identity: [7; 32],
        };
        let enter = |nth: usize| holders.enter(renewed(Role::Client, "vm-1", nth as u64));
        let mut held: Vec<_> = (0..MAX_OF_ONE).map_while(enter).collect();
        assert_eq!(held.len(), MAX_OF_ONE);
        assert!(enter(MAX_OF_ONE).is_none());
        held.push(holders.enter(renewed(Role::Client, "vm-2", 0)).unwrap());
        held.push(holders.enter(renewed(Role::Administrator, "vm-1", 0)).unwrap());
        held.remove(0);
        held.push(enter(0).unwrap());
        drop(held);
        assert!(holders.locked().is_empty());
    }
}
