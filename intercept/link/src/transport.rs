//! Byte streams between a program and its worker, used by both ends.
//!
//! One thread may send while another one receives; each direction serves one thread at a time.

use std::io::{self, IoSlice, Read, Write};
use std::mem::ManuallyDrop;
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use gpusession_proto::preface::{Refusal, refusal_len};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{MsgFlags, recv, sendmsg, setsockopt, sockopt};
use rustls::{ClientConfig, ClientConnection, Connection, ServerConfig, ServerConnection};

use crate::spin;

/// Time that a receiver waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// Does not wait: `WouldBlock` if no byte is there.
    No,
    /// Spins for this time, then sleeps until bytes come.
    Spin(Duration),
    /// Spins for the first time, then sleeps for at most the second: `WouldBlock` if no byte came.
    AtMost(Duration, Duration),
}

/// How soon a peer that falls silent counts as lost, in seconds.
pub struct Watch {
    /// Time without acknowledgement of sent bytes.
    silence: u64,
    /// Time of rest before the kernel asks, and between two checks while a thread waits.
    idle: u32,
    /// Time between the kernel's questions, and their number.
    probes: (u32, u32),
}

impl Watch {
    /// The stream is lost with its connection: a little longer than a worker waits for its client.
    pub const PATIENT: Self = Self { silence: 65, idle: 15, probes: (10, 5) };
    /// The stream continues on another connection, so that a wrong suspicion costs little.
    pub const CLOSE: Self = Self { silence: 10, idle: 5, probes: (2, 3) };
}

/// Timeout of each step of a handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// Connected stream, in clear or with TLS.
///
/// A program may close all its descriptors and reuse their numbers. A [guarded](Self::guarded)
/// stream then ends with an error, and leaves the program's new file alone.
pub struct Transport {
    socket: ManuallyDrop<TcpStream>,
    /// The socket's identity in the kernel, whatever its descriptor's number means later; `None` in
    /// a worker, where only our code closes descriptors, or if the kernel gives none.
    cookie: Option<u64>,
    tls: Option<Tls>,
    /// [`Watch::silence`], 0 before [`Transport::watch`].
    silence: AtomicU64,
    /// Time between two checks.
    check: AtomicU64,
}

struct Tls {
    connection: Mutex<Connection>,
    incoming: Mutex<Ciphertext>,
    outgoing: Mutex<Vec<u8>>,
}

/// Socket without vectored writes, which would raise SIGPIPE; plain ones use MSG_NOSIGNAL.
struct Whole<'a>(&'a TcpStream);

impl Read for Whole<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.0.read(buf)
    }
}

impl Write for Whole<'_> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.0.write(buf)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Reads a server's refusal and returns it as an error.
///
/// A server that refuses a connection sends the reason in clear, in place of the first TLS record.
fn refused(socket: &TcpStream) -> io::Result<()> {
    let mut first = [0; 4];
    let peeked = loop {
        match recv(socket.as_raw_fd(), &mut first, MsgFlags::MSG_PEEK | MsgFlags::MSG_WAITALL) {
            Err(Errno::EINTR) => {}
            other => break other?,
        }
    };
    // The handshake reports the end of the stream.
    let Some(len) = refusal_len(first).filter(|_| peeked == first.len()) else { return Ok(()) };
    let mut reason = Vec::new();
    socket.take((first.len() + len) as u64).read_to_end(&mut reason)?;
    Err(Refusal::read(&reason).map_or_else(|| io::ErrorKind::UnexpectedEof.into(), io::Error::other))
}

/// Bytes received and not yet decrypted.
struct Ciphertext {
    buf: Vec<u8>,
    start: usize,
    end: usize,
}

impl Ciphertext {
    fn unread(&self) -> usize {
        self.end - self.start
    }
}

/// Locks, ignoring poison.
///
/// Poison means that a thread of ours panicked within a stream. The stream is lost then, but the
/// data behind the lock is still valid bytes.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The use of a connection that the log makes.
pub trait Stream {
    /// Sends all bytes, waiting as long as it takes.
    fn send(&self, bytes: &[u8]) -> io::Result<()>;
    /// Receives some bytes and returns their number; 0 means the end of the stream.
    fn recv(&self, buf: &mut [u8], wait: Wait) -> io::Result<usize>;
    /// Returns `true` if a few bytes can be sent without waiting, while no other thread sends.
    fn writable(&self) -> bool;
    /// Ends both directions at once; a thread that waits on the stream then returns.
    fn shutdown(&self);
}

impl Stream for Transport {
    fn send(&self, bytes: &[u8]) -> io::Result<()> {
        self.send(bytes)
    }

    fn recv(&self, buf: &mut [u8], wait: Wait) -> io::Result<usize> {
        self.recv(buf, wait)
    }

    fn writable(&self) -> bool {
        self.writable()
    }

    fn shutdown(&self) {
        self.shutdown();
    }
}

impl Transport {
    /// Returns a stream in clear.
    pub fn plain(socket: TcpStream) -> io::Result<Self> {
        socket.set_nodelay(true)?;
        let socket = ManuallyDrop::new(socket);
        Ok(Self { socket, cookie: None, tls: None, silence: AtomicU64::new(0), check: AtomicU64::new(0) })
    }

    /// Checks before each use that the program has not closed the stream's descriptor.
    ///
    /// A check is a system call.
    #[must_use]
    pub fn guarded(mut self) -> Self {
        self.cookie = cookie(&self.socket).ok();
        self
    }

    /// Returns an error if the program has closed the stream's descriptor.
    fn check_descriptor(&self) -> io::Result<()> {
        match self.cookie {
            None => Ok(()),
            Some(ours) if cookie(&self.socket).is_ok_and(|now| now == ours) => Ok(()),
            Some(_) => Err(io::Error::other("the program has closed the descriptor of the connection")),
        }
    }

    /// Makes a TLS stream as the client; the configuration's verifier pins the worker's
    /// certificate.
    pub fn tls_client(socket: TcpStream, config: Arc<ClientConfig>) -> io::Result<Self> {
        let name = rustls::pki_types::ServerName::try_from("worker").map_err(io::Error::other)?;
        let mut connection = ClientConnection::new(config, name).map_err(io::Error::other)?;
        socket.set_read_timeout(Some(HANDSHAKE_TIMEOUT))?;
        socket.set_write_timeout(Some(HANDSHAKE_TIMEOUT))?;
        while connection.wants_write() {
            connection.write_tls(&mut Whole(&socket))?;
        }
        let shaken = refused(&socket).and_then(|()| Self::handshake(socket, Connection::Client(connection)));
        let shaken = shaken.map_err(|e| match e.kind() {
            io::ErrorKind::WouldBlock => io::Error::other(format!(
                "no answer to the handshake within {} s",
                HANDSHAKE_TIMEOUT.as_secs()
            )),
            _ => e,
        })?;
        shaken.socket.set_read_timeout(None)?;
        shaken.socket.set_write_timeout(None)?;
        Ok(shaken)
    }

    /// Makes a TLS stream as the worker.
    pub fn tls_server(socket: TcpStream, config: Arc<ServerConfig>) -> io::Result<Self> {
        let connection = ServerConnection::new(config).map_err(io::Error::other)?;
        Self::handshake(socket, Connection::Server(connection))
    }

    fn handshake(socket: TcpStream, mut connection: Connection) -> io::Result<Self> {
        socket.set_nodelay(true)?;
        while connection.is_handshaking() {
            connection.complete_io(&mut Whole(&socket))?;
        }
        while connection.wants_write() {
            connection.write_tls(&mut Whole(&socket))?;
        }
        let tls = Tls {
            connection: Mutex::new(connection),
            incoming: Mutex::new(Ciphertext { buf: vec![0; 128 << 10], start: 0, end: 0 }),
            outgoing: Mutex::new(Vec::new()),
        };
        let mut stream = Self::plain(socket)?;
        stream.tls = Some(tls);
        Ok(stream)
    }

    /// Lets a peer that vanishes end the stream with an error.
    ///
    /// The kernel's probes find it on an idle stream, missing acknowledgements on a busy one. A
    /// peer that only does not read keeps the stream: it acknowledges, for hours if need be, that
    /// it has no room. TCP_USER_TIMEOUT would end such a stream, too, so it is no alternative.
    pub fn watch(&self, watch: &Watch) -> io::Result<()> {
        let interval = Duration::from_secs(watch.idle.into());
        setsockopt(&*self.socket, sockopt::KeepAlive, &true)?;
        setsockopt(&*self.socket, sockopt::TcpKeepIdle, &watch.idle)?;
        setsockopt(&*self.socket, sockopt::TcpKeepInterval, &watch.probes.0)?;
        setsockopt(&*self.socket, sockopt::TcpKeepCount, &watch.probes.1)?;
        self.socket.set_write_timeout(Some(interval))?;
        self.socket.set_read_timeout(Some(interval))?;
        self.silence.store(watch.silence, Ordering::Relaxed);
        self.check.store(watch.idle.into(), Ordering::Relaxed);
        Ok(())
    }

    fn watched(&self) -> bool {
        self.silence.load(Ordering::Relaxed) > 0
    }

    /// Returns an error if sent bytes are unacknowledged for too long, or can no longer be sent.
    fn heard(&self) -> io::Result<()> {
        self.check_descriptor()?;
        // SAFETY: the structure has only integers, for which zero bits are valid.
        let mut info: nix::libc::tcp_info = unsafe { std::mem::zeroed() };
        let mut len = size_of_val(&info) as nix::libc::socklen_t;
        // SAFETY: the kernel writes at most `len` bytes to `info`, which has that size.
        let got = unsafe {
            nix::libc::getsockopt(
                self.socket.as_raw_fd(),
                nix::libc::IPPROTO_TCP,
                nix::libc::TCP_INFO,
                std::ptr::from_mut(&mut info).cast(),
                &mut len,
            )
        };
        Errno::result(got)?;
        let silence = Duration::from_millis(info.tcpi_last_ack_recv.into());
        if info.tcpi_unacked > 0 && silence.as_secs() >= self.silence.load(Ordering::Relaxed) {
            return Err(io::Error::other(format!("no acknowledgement for {} s", silence.as_secs())));
        }
        // Without its address the kernel sends nothing, so nothing is unacknowledged. A worker may
        // not ask: it has no right to sockets, and the program comes back to it.
        let own = self.socket.local_addr()?;
        if self.cookie.is_some() && !is_local(own) {
            return Err(io::Error::other(format!("this machine no longer has the address {}", own.ip())));
        }
        Ok(())
    }

    fn write_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            match (&*self.socket).write(bytes) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => bytes = &bytes[n..],
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock && self.watched() => self.heard()?,
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// Returns `true` if the stream is encrypted.
    pub fn encrypted(&self) -> bool {
        self.tls.is_some()
    }

    /// Sends all bytes, waiting as long as it takes.
    pub fn send(&self, bytes: &[u8]) -> io::Result<()> {
        self.check_descriptor()?;
        let Some(tls) = &self.tls else { return self.write_all(bytes) };
        let mut outgoing = lock(&tls.outgoing);
        for piece in bytes.chunks(256 << 10) {
            outgoing.clear();
            {
                let mut connection = lock(&tls.connection);
                let mut rest = piece;
                while !rest.is_empty() {
                    let n = connection.writer().write(rest)?;
                    rest = &rest[n..];
                    while connection.wants_write() {
                        connection.write_tls(&mut *outgoing)?;
                    }
                }
            }
            self.write_all(&outgoing)?;
        }
        Ok(())
    }

    /// Sends several pieces one after the other; in clear it needs one system call.
    pub fn send_parts(&self, parts: &[&[u8]]) -> io::Result<()> {
        if self.tls.is_some() {
            return parts.iter().try_for_each(|part| self.send(part));
        }
        self.check_descriptor()?;
        let mut slices: Vec<IoSlice<'_>> = parts.iter().map(|part| IoSlice::new(part)).collect();
        let mut rest = &mut slices[..];
        IoSlice::advance_slices(&mut rest, 0);
        while !rest.is_empty() {
            // Not write_vectored: writev would raise SIGPIPE in the program when the worker has
            // exited.
            match sendmsg::<()>(self.socket.as_raw_fd(), rest, &[], MsgFlags::MSG_NOSIGNAL, None) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => IoSlice::advance_slices(&mut rest, n),
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) if self.watched() => self.heard()?,
                Err(e) => return Err(e.into()),
            }
        }
        Ok(())
    }

    /// Receives some bytes and returns their number; 0 means the end of the stream.
    pub fn recv(&self, buf: &mut [u8], wait: Wait) -> io::Result<usize> {
        let Some(tls) = &self.tls else { return self.recv_raw(buf, wait) };
        let mut incoming = lock(&tls.incoming);
        loop {
            {
                let mut connection = lock(&tls.connection);
                match connection.reader().read(buf) {
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                    done => return done,
                }
                // rustls holds a bounded amount of plaintext, so it is read before more ciphertext
                // goes in.
                if incoming.unread() > 0 {
                    let mut rest = &incoming.buf[incoming.start..incoming.end];
                    let n = connection.read_tls(&mut rest)?;
                    incoming.start += n;
                    connection.process_new_packets().map_err(io::Error::other)?;
                    continue;
                }
            }
            let n = self.recv_raw(&mut incoming.buf, wait)?;
            if n == 0 {
                return Ok(0);
            }
            (incoming.start, incoming.end) = (0, n);
        }
    }

    /// Receives exactly `buf.len()` bytes or fails.
    pub fn recv_exact(&self, mut buf: &mut [u8], wait: Wait) -> io::Result<()> {
        if self.tls.is_none() && wait == Wait::Spin(Duration::ZERO) {
            // The kernel gathers the bytes: one system call instead of one per packet.
            while !buf.is_empty() {
                self.check_descriptor()?;
                match recv(self.socket.as_raw_fd(), buf, MsgFlags::MSG_WAITALL) {
                    Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                    Ok(n) => buf = &mut buf[n..],
                    Err(Errno::EINTR) => {}
                    Err(Errno::EAGAIN) if self.watched() => self.heard()?,
                    Err(e) => return Err(e.into()),
                }
            }
            return Ok(());
        }
        while !buf.is_empty() {
            match self.recv(buf, wait)? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                n => buf = &mut buf[n..],
            }
        }
        Ok(())
    }

    fn recv_raw(&self, buf: &mut [u8], wait: Wait) -> io::Result<usize> {
        let (spin, sleep) = match wait {
            Wait::No => (Duration::ZERO, Some(Duration::ZERO)),
            Wait::Spin(spin) => (spin, None),
            Wait::AtMost(spin, sleep) => (spin, Some(sleep)),
        };
        // A check and a vain read cost more than to wait first.
        let mut waited = self.cookie.is_none() || !spin.is_zero() || sleep == Some(Duration::ZERO);
        if waited {
            self.check_descriptor()?;
        }
        loop {
            if std::mem::replace(&mut waited, true) {
                match recv(self.socket.as_raw_fd(), buf, MsgFlags::MSG_DONTWAIT) {
                    Err(Errno::EAGAIN) => {}
                    Err(Errno::EINTR) => continue,
                    Err(e) => return Err(e.into()),
                    Ok(n) => return Ok(n),
                }
                if sleep == Some(Duration::ZERO) {
                    return Err(io::ErrorKind::WouldBlock.into());
                }
                if !spin.is_zero() && spin::until(spin, || self.readable()) {
                    continue;
                }
            }
            let check = Duration::from_secs(self.check.load(Ordering::Relaxed));
            let most = sleep.or(self.watched().then_some(check));
            let timeout =
                most.map_or(PollTimeout::NONE, |d| PollTimeout::try_from(d).unwrap_or(PollTimeout::MAX));
            match poll(&mut [PollFd::new(self.socket.as_fd(), PollFlags::POLLIN)], timeout) {
                Ok(0) if sleep.is_none() => self.heard()?,
                Ok(0) => return Err(io::ErrorKind::WouldBlock.into()),
                // The program may have closed it meanwhile.
                Ok(_) | Err(Errno::EINTR) => self.check_descriptor()?,
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// Returns `true` if a read returns at once.
    ///
    /// A read holds the socket's lock, for which a thread that sends would have to sleep; this
    /// takes none.
    fn readable(&self) -> bool {
        let mut fds = [PollFd::new(self.socket.as_fd(), PollFlags::POLLIN)];
        matches!(poll(&mut fds, PollTimeout::ZERO), Ok(n) if n > 0)
    }

    /// Returns bytes that only the two ends of this TLS session have; zeros in clear.
    pub fn exporter(&self) -> io::Result<[u8; 32]> {
        let Some(tls) = &self.tls else { return Ok([0; 32]) };
        let connection = lock(&tls.connection);
        connection.export_keying_material([0; 32], b"gpusession resume", None).map_err(io::Error::other)
    }

    /// Returns `true` if a few bytes can be sent without waiting, while no other thread sends.
    pub fn writable(&self) -> bool {
        let mut fds = [PollFd::new(self.socket.as_fd(), PollFlags::POLLOUT)];
        matches!(poll(&mut fds, PollTimeout::ZERO), Ok(n) if n > 0)
    }

    /// Waits for the end of the stream without reading it.
    pub fn wait_for_end(&self) {
        // Errors need not be asked for.
        let mut fds = [PollFd::new(self.socket.as_fd(), PollFlags::from_bits_retain(nix::libc::POLLRDHUP))];
        while let Err(Errno::EINTR) = poll(&mut fds, PollTimeout::NONE) {}
    }

    /// Ends both directions at once; a thread that waits on the stream then returns.
    pub fn shutdown(&self) {
        if self.check_descriptor().is_ok() {
            // Fails only if the peer has closed the connection already.
            let _ = self.socket.shutdown(std::net::Shutdown::Both);
        }
    }
}

impl Drop for Transport {
    fn drop(&mut self) {
        if self.check_descriptor().is_ok() {
            // SAFETY: the socket is used no more, and dropped once.
            unsafe { ManuallyDrop::drop(&mut self.socket) };
        }
    }
}

/// Returns `true` if this machine has the address, as far as the kernel says.
fn is_local(mut address: SocketAddr) -> bool {
    address.set_port(0);
    !UdpSocket::bind(address).is_err_and(|e| e.kind() == io::ErrorKind::AddrNotAvailable)
}

/// Returns the number that the kernel gives a socket for its whole life.
fn cookie(socket: &TcpStream) -> io::Result<u64> {
    let mut cookie = 0u64;
    let mut len = size_of_val(&cookie) as nix::libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes to `cookie`, which has that size.
    let got = unsafe {
        nix::libc::getsockopt(
            socket.as_raw_fd(),
            nix::libc::SOL_SOCKET,
            nix::libc::SO_COOKIE,
            std::ptr::from_mut(&mut cookie).cast(),
            &mut len,
        )
    };
    Errno::result(got)?;
    Ok(cookie)
}

impl AsFd for Transport {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::os::fd::FromRawFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn an_address_that_the_machine_lacks_is_noticed() {
        assert!(is_local(([127, 0, 0, 1], 7602).into()));
        // An address for documentation (RFC 5737).
        assert!(!is_local(([192, 0, 2, 1], 7602).into()));
    }

    #[test]
    fn a_descriptor_that_the_program_uses_for_its_own_file_stays_the_programs() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let number = socket.as_raw_fd();
        let stream = Transport::plain(socket).unwrap().guarded();
        stream.send(b"before").unwrap();
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        // SAFETY: replaces the descriptor, as a program does that closes all and opens others.
        assert_eq!(unsafe { nix::libc::dup2(ours.as_raw_fd(), number) }, number);
        drop(ours);
        // SAFETY: nothing else owns the new file.
        let mut ours = unsafe { UnixStream::from_raw_fd(number) };

        assert!(stream.send(b"x").is_err());
        theirs.write_all(b"for the program").unwrap();
        assert!(stream.recv(&mut [0; 4], Wait::No).is_err(), "the bytes are the program's");
        assert!(stream.recv_exact(&mut [0; 4], Wait::Spin(Duration::ZERO)).is_err());
        assert!(stream.send_parts(&[b"x"]).is_err());
        stream.shutdown();
        drop(stream);
        ours.write_all(b"mine").unwrap();
        let mut read = [0; 8];
        assert_eq!(theirs.read(&mut read).unwrap(), 4);
        assert_eq!(&read[..4], b"mine");
    }

    #[test]
    fn a_receiver_gets_bytes_that_come_while_it_spins_and_while_it_sleeps() {
        const SPIN: Duration = Duration::from_millis(20);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = Transport::plain(TcpStream::connect(listener.local_addr().unwrap()).unwrap()).unwrap();
        let (mut peer, _) = listener.accept().unwrap();
        let (ask, asked) = std::sync::mpsc::channel::<Duration>();
        let sender = std::thread::spawn(move || {
            for pause in asked {
                std::thread::park_timeout(pause);
                peer.write_all(b"x").unwrap();
            }
        });
        for pause in [Duration::ZERO, SPIN / 4, 3 * SPIN] {
            for wait in [Wait::Spin(SPIN), Wait::AtMost(SPIN, Duration::from_secs(20))] {
                ask.send(pause).unwrap();
                assert_eq!(stream.recv(&mut [0; 4], wait).unwrap(), 1, "{pause:?} {wait:?}");
            }
        }
        let begin = std::time::Instant::now();
        let none = stream.recv(&mut [0; 4], Wait::AtMost(SPIN, SPIN)).unwrap_err();
        assert_eq!(none.kind(), io::ErrorKind::WouldBlock);
        assert!(begin.elapsed() >= 2 * SPIN);
        drop(ask);
        sender.join().unwrap();
        assert_eq!(stream.recv(&mut [0; 4], Wait::Spin(SPIN)).unwrap(), 0, "the end of the stream");
    }
}
