//! Byte streams between a program and its worker, used by both ends. Sending and receiving may happen in two threads at
//! once; each direction serves one thread at a time.

use std::io::{self, IoSlice, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{MsgFlags, recv, sendmsg};
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

/// A connected stream.
pub struct Transport {
    socket: TcpStream,
    tls: Option<Tls>,
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
        Ok(Self { socket, tls: None })
    }

    /// TLS as the client; the configuration's verifier pins the worker's certificate.
    pub fn tls_client(socket: TcpStream, config: Arc<ClientConfig>) -> io::Result<Self> {
        let name = rustls::pki_types::ServerName::try_from("worker").map_err(io::Error::other)?;
        let connection = ClientConnection::new(config, name).map_err(io::Error::other)?;
        Self::handshake(socket, Connection::Client(connection))
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
        Ok(Self { socket, tls: Some(tls) })
    }

    /// Whether bytes are encrypted.
    pub fn encrypted(&self) -> bool {
        self.tls.is_some()
    }

    /// Sends everything, waiting as long as it takes.
    pub fn send(&self, bytes: &[u8]) -> io::Result<()> {
        let Some(tls) = &self.tls else { return (&self.socket).write_all(bytes) };
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
            (&self.socket).write_all(&outgoing)?;
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
            let timeout =
                sleep.map_or(PollTimeout::NONE, |d| PollTimeout::try_from(d).unwrap_or(PollTimeout::MAX));
            match poll(&mut [PollFd::new(self.socket.as_fd(), PollFlags::POLLIN)], timeout) {
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
