//! The loop that accepts the connections of a port, calls to other servers, the text of addresses.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tracing::warn;

use crate::log_throttle::LogThrottle;
use crate::peer_slots::{PeerSlots, Place};

/// Default port of the control service.
pub const PORT: u16 = 7601;
/// Time that a connection to another server may take, TLS included.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause after a failed accept: other connections may release descriptors or memory meanwhile.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

/// Formats HOST:PORT, with brackets around an IPv6 address.
pub fn host_port(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

/// Connects to the server of the pool at `address` whose certificate has this DNS name.
///
/// `authorities` are those that this server trusts, in PEM; `answer` bounds each call. An error is
/// the text of its innermost cause.
pub async fn connect(
    address: &str,
    name: String,
    (authorities, identity): (&str, Identity),
    answer: Duration,
) -> Result<Channel, String> {
    let tls = ClientTlsConfig::new()
        .ca_certificate(Certificate::from_pem(authorities))
        .identity(identity)
        .domain_name(name);
    let connected = async {
        let endpoint = Endpoint::from_shared(format!("https://{address}"))?.tls_config(tls)?;
        endpoint.connect_timeout(CONNECT_TIMEOUT).timeout(answer).connect().await
    };
    connected.await.map_err(|e: tonic::transport::Error| root_cause(&e))
}

/// Returns the innermost cause of an error: tonic's own text is only "transport error".
pub fn root_cause(error: &dyn std::error::Error) -> String {
    let mut deepest = error;
    while let Some(next) = deepest.source() {
        deepest = next;
    }
    deepest.to_string()
}

/// Accepts connections until `closed`, and serves each in a task once it has one of `slots`.
///
/// Returns when all connections accepted by then are served; dropping the future ends their tasks.
/// `port` names the port in log lines, which `quiet` throttles.
pub async fn accept_loop<F: Future<Output = ()> + Send + 'static>(
    port: &str,
    listener: TcpListener,
    slots: PeerSlots,
    quiet: &LogThrottle,
    closed: impl Future,
    serve: impl Fn(TcpStream, SocketAddr, Place) -> F,
) {
    let mut closed = std::pin::pin!(closed);
    let mut served = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = &mut closed => break,
        };
        while served.try_join_next().is_some() {}
        let (socket, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(e) => {
                if let Some(more) = quiet.may() {
                    warn!("{port}: accept failed: {e}; retrying in 100 ms{more}");
                }
                tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
                continue;
            }
        };
        // Until a slot is free, further connections wait in the kernel's queue.
        let Some(place) = slots.enter(peer.ip()).await else {
            if let Some(more) = quiet.may() {
                warn!("{port}: connection from {peer} refused: too many unfinished ones{more}");
            }
            continue;
        };
        served.spawn(serve(socket, peer, place));
    }
    while served.join_next().await.is_some() {}
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::sync::{oneshot, watch};

    use super::*;

    #[tokio::test]
    async fn a_closed_port_serves_its_accepted_connections_to_their_end() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (close, closed) = oneshot::channel::<()>();
        let (begin, mut begun) = watch::channel(false);
        let begin = Arc::new(begin);
        let accepting = tokio::spawn(async move {
            let serve = |mut socket: TcpStream, _, _place| {
                let begin = begin.clone();
                async move {
                    begin.send_replace(true);
                    let byte = socket.read_u8().await.unwrap();
                    socket.write_u8(byte + 1).await.unwrap();
                }
            };
            let slots = PeerSlots::new(4, Duration::from_secs(1));
            accept_loop("test", listener, slots, &LogThrottle::default(), closed, serve).await;
        });
        let mut client = TcpStream::connect(address).await.unwrap();
        begun.wait_for(|begun| *begun).await.unwrap();
        close.send(()).unwrap();
        // The loop sees the end; the connection outlives it.
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(!accepting.is_finished(), "a connection is still open");
        client.write_u8(7).await.unwrap();
        assert_eq!(client.read_u8().await.unwrap(), 8);
        accepting.await.unwrap();
    }
}
