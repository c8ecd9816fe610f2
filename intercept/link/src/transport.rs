//! Byte streams between a program and its worker, used by both ends. Sending and receiving may happen in two threads at
//! once; each direction serves one thread at a time.

use std::io::{self, IoSlice, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use gpusession_proto::preface::refusal_len;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{MsgFlags, recv, sendmsg, setsockopt, sockopt};
use rustls::{ClientConfig, ClientConnection, Connection, ServerConfig, ServerConnection};

/// How long a receiver waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// Not at all: `WouldBlock` if there is nothing.
    No,
    /// Spins for this long, then sleeps until something comes.
    Spin(Duration),
    /// Spins for the first, then sleeps for at most the second: `WouldBlock` if nothing came.
    AtMost(Duration, Duration),
}

/// A peer that acknowledges nothing for so long is gone: as long as a worker waits for a lost client, and a moment more.
const SILENCE: Duration = Duration::from_secs(65);
/// How often who waits for such a peer looks.
const LOOK: Duration = Duration::from_secs(15);
/// How long each step of a handshake may take.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// A connected stream.
pub struct Transport {
    socket: TcpStream,
    tls: Option<Tls>,
    /// See [`Transport::watch`].
    watched: bool,
}

struct Tls {
    connection: Mutex<Connection>,
    incoming: Mutex<Ciphertext>,
    outgoing: Mutex<Vec<u8>>,
}

/// A socket without vectored writes, which would raise SIGPIPE (plain ones are sent with MSG_NOSIGNAL).
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

/// A server that does not serve a connection says why in clear, in place of the first TLS record.
fn refused(socket: &TcpStream) -> io::Result<()> {
    let mut first = [0; 4];
    let peeked = loop {
        match recv(socket.as_raw_fd(), &mut first, MsgFlags::MSG_PEEK | MsgFlags::MSG_WAITALL) {
            Err(Errno::EINTR) => {}
            other => break other?,
        }
    };
    // The end of the stream is the handshake's to tell.
    let Some(len) = refusal_len(first).filter(|_| peeked == first.len()) else { return Ok(()) };
    let mut reason = Vec::new();
    socket.take((first.len() + len) as u64).read_to_end(&mut reason)?;
    Err(io::Error::other(String::from_utf8_lossy(&reason[first.len()..]).into_owned()))
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

/// A poisoned lock means that a thread of ours panicked in the middle of a stream: the stream is lost, the data behind
/// the lock is still bytes.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Transport {
    /// A stream in clear.
    pub fn plain(socket: TcpStream) -> io::Result<Self> {
        socket.set_nodelay(true)?;
        Ok(Self { socket, tls: None, watched: false })
    }

    /// TLS as the client; the configuration's verifier pins the worker's certificate.
    pub fn tls_client(socket: TcpStream, config: Arc<ClientConfig>) -> io::Result<Self> {
        let name = rustls::pki_types::ServerName::try_from("worker").map_err(io::Error::other)?;
        let mut connection = ClientConnection::new(config, name).map_err(io::Error::other)?;
        socket.set_read_timeout(Some(HANDSHAKE))?;
        socket.set_write_timeout(Some(HANDSHAKE))?;
        while connection.wants_write() {
            connection.write_tls(&mut Whole(&socket))?;
        }
        let shaken = refused(&socket).and_then(|()| Self::handshake(socket, Connection::Client(connection)));
        let shaken = shaken.map_err(|e| match e.kind() {
            io::ErrorKind::WouldBlock => {
                io::Error::other(format!("no answer to the handshake within {} s", HANDSHAKE.as_secs()))
            }
            _ => e,
        })?;
        shaken.socket.set_read_timeout(None)?;
        shaken.socket.set_write_timeout(None)?;
        Ok(shaken)
    }

    /// TLS as the worker.
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
        Ok(Self { socket, tls: Some(tls), watched: false })
    }

    /// From now on a peer that is gone without a word ends the stream with an error: by the kernel's probes where nothing is under
    /// way, else by its silence. One that only reads nothing does not: it acknowledges that it has no room, for hours if need be, so that
    /// TCP_USER_TIMEOUT, which ends that as well, is no choice.
    pub fn watch(&mut self) -> io::Result<()> {
        setsockopt(&self.socket, sockopt::KeepAlive, &true)?;
        setsockopt(&self.socket, sockopt::TcpKeepIdle, &15)?;
        setsockopt(&self.socket, sockopt::TcpKeepInterval, &10)?;
        setsockopt(&self.socket, sockopt::TcpKeepCount, &5)?;
        self.socket.set_write_timeout(Some(LOOK))?;
        self.watched = true;
        Ok(())
    }

    /// An error if the peer has left what was sent unacknowledged for too long.
    fn heard(&self) -> io::Result<()> {
        // SAFETY: plain numbers, for which zeros are values.
        let mut info: nix::libc::tcp_info = unsafe { std::mem::zeroed() };
        let mut len = size_of_val(&info) as nix::libc::socklen_t;
        // SAFETY: the kernel writes at most `len` bytes to `info`.
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
        if info.tcpi_unacked > 0 && silence >= SILENCE {
            return Err(io::Error::other(format!("no sign of life for {} s", silence.as_secs())));
        }
        Ok(())
    }

    fn write_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            match (&self.socket).write(bytes) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => bytes = &bytes[n..],
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock && self.watched => self.heard()?,
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// Whether bytes are encrypted.
    pub fn encrypted(&self) -> bool {
        self.tls.is_some()
    }

    /// Sends everything, waiting as long as it takes.
    pub fn send(&self, bytes: &[u8]) -> io::Result<()> {
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

    /// Sends several pieces one after the other, in clear with one system call.
    pub fn send_parts(&self, parts: &[&[u8]]) -> io::Result<()> {
        if self.tls.is_some() {
            return parts.iter().try_for_each(|part| self.send(part));
        }
        let mut slices: Vec<IoSlice<'_>> = parts.iter().map(|part| IoSlice::new(part)).collect();
        let mut rest = &mut slices[..];
        IoSlice::advance_slices(&mut rest, 0);
        while !rest.is_empty() {
            // Not write_vectored: writev would raise SIGPIPE in the program when the worker is gone.
            match sendmsg::<()>(self.socket.as_raw_fd(), rest, &[], MsgFlags::MSG_NOSIGNAL, None) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => IoSlice::advance_slices(&mut rest, n),
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) if self.watched => self.heard()?,
                Err(e) => return Err(e.into()),
            }
        }
        Ok(())
    }

    /// Receives some bytes; 0 is the end of the stream.
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
                // rustls holds a bounded amount of plaintext: it is taken out before more ciphertext goes in.
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
            // The kernel gathers the bytes: one system call instead of one for every packet.
            while !buf.is_empty() {
                match recv(self.socket.as_raw_fd(), buf, MsgFlags::MSG_WAITALL) {
                    Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                    Ok(n) => buf = &mut buf[n..],
                    Err(Errno::EINTR) => {}
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
        let mut started = None;
        loop {
            match recv(self.socket.as_raw_fd(), buf, MsgFlags::MSG_DONTWAIT) {
                Err(Errno::EAGAIN) => {}
                Err(Errno::EINTR) => continue,
                Err(e) => return Err(e.into()),
                Ok(n) => return Ok(n),
            }
            if sleep == Some(Duration::ZERO) {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            if *started.get_or_insert_with(Instant::now) + spin > Instant::now() {
                std::hint::spin_loop();
                continue;
            }
            let most = sleep.or(self.watched.then_some(LOOK));
            let timeout =
                most.map_or(PollTimeout::NONE, |d| PollTimeout::try_from(d).unwrap_or(PollTimeout::MAX));
            match poll(&mut [PollFd::new(self.socket.as_fd(), PollFlags::POLLIN)], timeout) {
                Ok(0) if sleep.is_none() => self.heard()?,
                Ok(0) => return Err(io::ErrorKind::WouldBlock.into()),
                Ok(_) | Err(Errno::EINTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// Ends both directions at once; a thread that waits on the stream sees its end.
    pub fn shutdown(&self) {
        // Already closed by the peer: nothing left to end.
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
    }
}

impl AsFd for Transport {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
