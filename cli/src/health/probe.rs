//! Connections to a server's ports, to find out whether and how packets get there.

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use std::os::fd::AsRawFd as _;

use nix::sys::socket::{getsockopt, sockopt};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Time to establish a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// Time for sent data to be acknowledged, and how often that is read.
const ARRIVAL_TIMEOUT: Duration = Duration::from_secs(2);
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Connections for the round trip, the shortest of which counts.
const ROUNDS: usize = 3;
/// Longest data of the probe for full packets; a TLS record has 16 KiB at most.
const MAX_DATA: usize = 16_000;

mod ioctl {
    nix::ioctl_read_bad!(unacknowledged, nix::libc::TIOCOUTQ, nix::libc::c_int);
}

/// Outcome of a connection attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reach {
    /// It opened within this time.
    Open(Duration),
    Refused,
    TimedOut,
    Failed(String),
}

/// How a server is reached.
#[derive(Debug)]
pub struct Probe {
    /// HOST:PORT of the control plane.
    pub address: String,
    pub resolved: Result<Vec<SocketAddr>, String>,
    /// `None` without an address.
    pub control: Option<Reach>,
    /// Shortest time in which a connection opened.
    pub best_rtt: Option<Duration>,
    /// Bytes of data in a full packet.
    pub segment: Option<u32>,
    /// Whether the server acknowledged full packets.
    pub full_packets: Option<bool>,
    /// HOST:PORT of the data plane, as the server names them.
    pub data: Vec<(String, Reach)>,
}

/// Connects to a server's control port and to its data ports.
pub async fn probe(address: String, data_addresses: Vec<String>) -> Probe {
    let resolved = match timeout(CONNECT_TIMEOUT, tokio::net::lookup_host(&address)).await {
        Ok(Ok(found)) => Ok(found.collect::<Vec<_>>()),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err("the name service does not answer".into()),
    };
    let mut probe = Probe {
        control: None,
        best_rtt: None,
        segment: None,
        full_packets: None,
        data: Vec::new(),
        resolved,
        address,
    };
    if probe.resolved.is_err() {
        return probe;
    }
    for round in 0..ROUNDS {
        let (reach, stream) = connect(&probe.address).await;
        if let Reach::Open(rtt) = reach {
            probe.best_rtt = Some(probe.best_rtt.map_or(rtt, |best| best.min(rtt)));
        }
        if round == 0 {
            probe.control = Some(reach);
        }
        let Some(stream) = stream else { break };
        if round == ROUNDS - 1 {
            probe.segment = getsockopt(&stream, sockopt::TcpMaxSeg).ok();
            let bytes = probe.segment.map_or(MAX_DATA, |bytes| (2 * bytes as usize).min(MAX_DATA));
            probe.full_packets = arrive(stream, bytes).await.ok();
        }
    }
    for data in data_addresses {
        let (reach, _) = connect(&data).await;
        probe.data.push((data, reach));
    }
    probe
}

async fn connect(address: &str) -> (Reach, Option<TcpStream>) {
    let begun = Instant::now();
    match timeout(CONNECT_TIMEOUT, TcpStream::connect(address)).await {
        Ok(Ok(stream)) => (Reach::Open(begun.elapsed()), Some(stream)),
        Ok(Err(error)) if error.kind() == io::ErrorKind::ConnectionRefused => (Reach::Refused, None),
        Ok(Err(error)) if error.kind() == io::ErrorKind::TimedOut => (Reach::TimedOut, None),
        Ok(Err(error)) => (Reach::Failed(error.to_string()), None),
        Err(_) => (Reach::TimedOut, None),
    }
}

/// Returns `true` if the server's kernel acknowledges data that fills packets.
///
/// The data begins as a TLS record, so that the server closes the connection as any failed
/// handshake. An answer counts as an acknowledgement.
async fn arrive(mut stream: TcpStream, bytes: usize) -> io::Result<bool> {
    let mut data = vec![0; bytes.max(16)];
    let body = (data.len() - 5) as u16;
    data[..3].copy_from_slice(&[0x16, 3, 1]);
    data[3..5].copy_from_slice(&body.to_be_bytes());
    stream.write_all(&data).await?;
    let end = Instant::now() + ARRIVAL_TIMEOUT;
    let mut answer = [0; 1];
    while Instant::now() < end {
        if timeout(POLL_INTERVAL, stream.read(&mut answer)).await.is_ok() {
            return Ok(true);
        }
        let mut waiting = 0;
        // SAFETY: the descriptor is the stream's, and TIOCOUTQ writes one int.
        unsafe { ioctl::unacknowledged(stream.as_raw_fd(), &raw mut waiting) }?;
        if waiting == 0 {
            return Ok(true);
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn open_and_closed_ports_are_told_apart() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let open = listener.local_addr().unwrap().to_string();
        let found = probe(open.clone(), vec![open]).await;
        assert!(matches!(found.control, Some(Reach::Open(_))), "{found:?}");
        assert!(matches!(found.data[..], [(_, Reach::Open(_))]), "{found:?}");
        assert_eq!(found.full_packets, Some(true));
        assert!(found.segment.unwrap() > 500 && found.best_rtt.is_some());
        // A bound port without a listener refuses.
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let found = probe(socket.local_addr().unwrap().to_string(), vec![]).await;
        assert_eq!((found.control, found.best_rtt), (Some(Reach::Refused), None));
    }

    #[tokio::test]
    async fn data_without_acknowledgement_does_not_arrive() {
        // Loopback acknowledges all that fits the receiver's buffer, and no more.
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.set_recv_buffer_size(1024).unwrap();
        socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let listener = socket.listen(1).unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (peer, _) = listener.accept().await.unwrap();
        assert!(!arrive(stream, 1 << 16).await.unwrap());
        drop(peer);
    }
}
