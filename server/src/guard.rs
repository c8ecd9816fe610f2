//! Bounds on connections of the control port: how many there are, and how long one without a certificate may stay.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Sleep, sleep};
use tokio_rustls::server::TlsStream;
use tonic::transport::server::{Connected, TcpConnectInfo, TlsConnectInfo};

/// Long enough to join.
pub const STRANGER_LIMIT: Duration = Duration::from_secs(30);

/// A connection that holds its place among the others until it ends.
#[derive(Debug)]
pub struct Guarded {
    stream: TlsStream<TcpStream>,
    _place: OwnedSemaphorePermit,
    until: Option<Pin<Box<Sleep>>>,
}

impl Guarded {
    /// Guards a connection; a stranger's ends after [`STRANGER_LIMIT`].
    pub fn new(stream: TlsStream<TcpStream>, place: OwnedSemaphorePermit) -> Self {
        let until = is_stranger(&stream).then(|| Box::pin(sleep(STRANGER_LIMIT)));
        Self { stream, _place: place, until }
    }
}

/// Whether the peer showed no certificate.
pub fn is_stranger(stream: &TlsStream<TcpStream>) -> bool {
    stream.get_ref().1.peer_certificates().is_none_or(<[_]>::is_empty)
}

impl Connected for Guarded {
    type ConnectInfo = TlsConnectInfo<TcpConnectInfo>;

    fn connect_info(&self) -> Self::ConnectInfo {
        self.stream.connect_info()
    }
}

impl AsyncRead for Guarded {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if let Some(until) = &mut self.until
            && until.as_mut().poll(cx).is_ready()
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
