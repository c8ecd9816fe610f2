//! A relay on the path that knows no protocol: it changes a bit, cuts, or writes another version
//! of TLS.
#![expect(clippy::disallowed_methods, reason = "a changed connection lasts for a time")]

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Time after which a connection with a changed bit ends: an end may wait for bytes that a changed
/// length announces. The ends of this module's own tests wait for none.
const CHANGED_GRACE: Duration = Duration::from_secs(if cfg!(test) { 60 } else { 1 });
/// Extension of TLS with the versions of a peer.
const SUPPORTED_VERSIONS: [u8; 3] = [0, 0x2b, 0];

/// Fault of one direction of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// A bit of the byte at this offset is the other one.
    Bit { at: u64, bit: u8 },
    /// The connection ends before the byte at this offset.
    Cut { at: u64 },
    /// The first message of TLS names version 1.2 in the place of 1.3.
    Older,
}

/// Faults of a connection: towards the server, and back.
pub type Faults = [Option<Fault>; 2];

/// Draws a changed bit, or sometimes a cut, among the first `within` bytes of a direction.
///
/// Half of them are in the first bytes, where ends agree about the connection.
pub fn drawn(seed: u64, connection: u32, within: u64) -> Faults {
    const FIRST: u64 = 3000;
    let mut random = fastrand::Rng::with_seed(seed << 32 | u64::from(connection));
    let at = if random.bool() { random.u64(..FIRST.min(within)) } else { random.u64(..within) };
    let fault = match random.u32(..8) {
        0 => Fault::Cut { at },
        _ => Fault::Bit { at, bit: random.u8(..8) },
    };
    if random.bool() { [Some(fault), None] } else { [None, Some(fault)] }
}

/// A relay between clients and a server; it serves as long as the process runs.
pub struct Path {
    pub address: SocketAddr,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    connections: AtomicU32,
    happened: AtomicU32,
}

impl Path {
    /// Starts a relay to a server; `faults` gets the number of each connection, from 0.
    ///
    /// # Panics
    /// If loopback has no port.
    pub fn start(server: SocketAddr, faults: impl Fn(u32) -> Faults + Send + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("its number");
        let state = Arc::<State>::default();
        let serving = state.clone();
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let (Ok(client), Ok(server)) = (client, TcpStream::connect(server)) else { continue };
                let faults = faults(serving.connections.fetch_add(1, Ordering::SeqCst));
                serving.join(Arc::new([client, server]), faults);
            }
        });
        Self { address, state }
    }

    /// Returns the number of connections so far.
    pub fn connections(&self) -> u32 {
        self.state.connections.load(Ordering::SeqCst)
    }

    /// Returns the number of faults that happened.
    pub fn happened(&self) -> u32 {
        self.state.happened.load(Ordering::SeqCst)
    }
}

impl State {
    fn join(self: &Arc<Self>, ends: Arc<[TcpStream; 2]>, faults: Faults) {
        for (from, fault) in faults.into_iter().enumerate() {
            let _ = ends[from].set_nodelay(true);
            let (ends, state) = (ends.clone(), self.clone());
            std::thread::spawn(move || {
                let happened = || {
                    state.happened.fetch_add(1, Ordering::SeqCst);
                    let ends = ends.clone();
                    std::thread::spawn(move || {
                        std::thread::sleep(CHANGED_GRACE);
                        close(&ends[..]);
                    });
                };
                pass(&ends[from], &ends[1 - from], fault, happened);
                close(&ends[..]);
            });
        }
    }
}

fn close(ends: &[TcpStream]) {
    ends.iter().for_each(|end| drop(end.shutdown(Shutdown::Both)));
}

/// Passes bytes on until the end or a cut.
fn pass(mut from: &TcpStream, mut to: &TcpStream, mut fault: Option<Fault>, happened: impl Fn()) {
    let mut buf = vec![0; 64 << 10];
    let mut passed = 0;
    loop {
        let n = match from.read(&mut buf) {
            Ok(0) | Err(_) => return,
            Ok(n) => n,
        };
        let bytes = &mut buf[..n];
        let place = |at: u64| at.checked_sub(passed).filter(|at| *at < n as u64).map(|at| at as usize);
        match fault {
            Some(Fault::Bit { at, bit }) => {
                if let Some(at) = place(at) {
                    bytes[at] ^= 1 << (bit % 8);
                    happened();
                }
            }
            Some(Fault::Cut { at }) => {
                if let Some(at) = place(at) {
                    happened();
                    let _ = to.write_all(&bytes[..at]);
                    return;
                }
            }
            Some(Fault::Older) if older(bytes) => {
                happened();
                fault = None;
            }
            Some(Fault::Older) | None => {}
        }
        if to.write_all(bytes).is_err() {
            return;
        }
        passed += n as u64;
    }
}

/// Writes version 1.2 over 1.3 in the versions of a peer; `false` if the bytes have none.
fn older(bytes: &mut [u8]) -> bool {
    let Some(at) = bytes.windows(3).position(|window| window == SUPPORTED_VERSIONS) else { return false };
    // Behind its length come the versions, for a client behind a length of their own.
    let end = bytes.len().min(at + 11);
    let Some(versions) = bytes.get_mut(at + 4..end) else { return false };
    let Some(at) = versions.windows(2).position(|version| version == [3, 4]) else { return false };
    versions[at + 1] = 3;
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the bytes that arrive at the server and those that come back as its echo.
    fn echoed(faults: Faults, sent: &'static [u8]) -> (Vec<u8>, Vec<u8>, u32) {
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let path = Path::start(server.local_addr().unwrap(), move |_| faults);
        let serving = std::thread::spawn(move || {
            let (mut socket, _) = server.accept().unwrap();
            let mut all = vec![0; sent.len()];
            let mut got = 0;
            // A read of no bytes may wait.
            while got < all.len()
                && let Ok(n @ 1..) = socket.read(&mut all[got..])
            {
                got += n;
            }
            all.truncate(got);
            let _ = socket.write_all(&all);
            all
        });
        let mut client = TcpStream::connect(path.address).unwrap();
        client.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        client.write_all(sent).unwrap();
        let mut back = Vec::new();
        let _ = client.read_to_end(&mut back);
        (serving.join().unwrap(), back, path.happened())
    }

    #[test]
    fn one_bit_changes_or_the_rest_is_cut() {
        let flip = Some(Fault::Bit { at: 2, bit: 0 });
        assert_eq!(echoed([flip, None], b"abcdef"), (b"abbdef".to_vec(), b"abbdef".to_vec(), 1));
        assert_eq!(echoed([None, flip], b"abcdef"), (b"abcdef".to_vec(), b"abbdef".to_vec(), 1));
        assert_eq!(echoed([Some(Fault::Cut { at: 3 }), None], b"abcdef").0, b"abc");
        // A place beyond the end changes nothing.
        let beyond = Some(Fault::Bit { at: 6, bit: 1 });
        assert_eq!(echoed([beyond, None], b"abcdef"), (b"abcdef".to_vec(), b"abcdef".to_vec(), 0));
    }

    #[test]
    fn the_version_of_a_hello_becomes_older() {
        let mut client = *b"..\x00\x2b\x00\x05\x04\x03\x04\x03\x03..";
        assert!(older(&mut client));
        assert_eq!(&client, b"..\x00\x2b\x00\x05\x04\x03\x03\x03\x03..");
        let mut server = *b"..\x00\x2b\x00\x02\x03\x04";
        assert!(older(&mut server));
        assert_eq!(&server, b"..\x00\x2b\x00\x02\x03\x03");
        assert!(!older(&mut server.clone()) && !older(&mut [1; 40]));
    }
}
