//! A packet to the daemon and its answer, before a deadline.

use std::mem::{offset_of, size_of};
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use gpusession_login::MAX_REPLY;
use libc::{c_int, c_void, socklen_t};

use crate::Trouble;

/// Sends `request` to the socket at `path`; returns the answer, or nothing unless `answered`.
///
/// The listening process must have the user id of this process: root, at a login.
///
/// # Errors
/// The reason, at the deadline at the latest.
pub fn exchange(path: &Path, request: &[u8], answered: bool, deadline: Instant) -> Result<Vec<u8>, Trouble> {
    let socket = connect(path, deadline)?;
    let fd = socket.as_raw_fd();
    let uid = listener(fd)?;
    // SAFETY: geteuid cannot fail and touches no memory.
    if uid != unsafe { libc::geteuid() } {
        return Err(Trouble::new("another user listens on the socket"));
    }
    // SAFETY: the pointer and the length describe `request`, which outlives the call.
    let sent = unsafe {
        libc::send(fd, request.as_ptr().cast(), request.len(), libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT)
    };
    if usize::try_from(sent) != Ok(request.len()) {
        return Err(Trouble::errno("send"));
    }
    if !answered {
        return Ok(Vec::new());
    }
    wait_readable(fd, deadline)?;
    // One byte more than the longest answer, to detect a longer one.
    let mut answer = vec![0; MAX_REPLY + 1];
    // SAFETY: the pointer and the length describe `answer`, which outlives the call.
    let length = unsafe { libc::recv(fd, answer.as_mut_ptr().cast(), answer.len(), libc::MSG_DONTWAIT) };
    match usize::try_from(length) {
        Err(_) => Err(Trouble::errno("recv")),
        Ok(0) => Err(Trouble::new("the daemon closed the connection without an answer")),
        Ok(length) if length > MAX_REPLY => Err(Trouble::new("the daemon's answer is too long")),
        Ok(length) => {
            answer.truncate(length);
            Ok(answer)
        }
    }
}

fn left(deadline: Instant) -> Result<Duration, Trouble> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(Trouble::new("the daemon does not answer in time")) } else { Ok(left) }
}

/// Connects to the socket at `path`.
///
/// If the backlog is full, only a send timeout that was set before `connect` bounds its wait.
fn connect(path: &Path, deadline: Instant) -> Result<OwnedFd, Trouble> {
    // SAFETY: all-zero bytes are a valid sockaddr_un.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    let bytes = path.as_os_str().as_bytes();
    // One byte stays for the NUL at the end.
    if bytes.len() >= address.sun_path.len() {
        return Err(Trouble::new("the socket's path is too long"));
    }
    for (to, from) in address.sun_path.iter_mut().zip(bytes) {
        *to = *from as libc::c_char;
    }
    let length = offset_of!(libc::sockaddr_un, sun_path) + bytes.len() + 1;

    // SAFETY: socket takes three numbers.
    let fd = unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(Trouble::errno("socket"));
    }
    // SAFETY: the kernel has just created this descriptor for us; it has no other owner.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    loop {
        // The kernel rounds up to ticks; the remaining tenth covers that.
        let patience = left(deadline)? * 9 / 10;
        let timeout = libc::timeval {
            tv_sec: patience.as_secs() as libc::time_t,
            tv_usec: patience.subsec_micros().max(1) as libc::suseconds_t,
        };
        // SAFETY: the pointer and the length describe `timeout`, which outlives the call.
        let set = unsafe {
            libc::setsockopt(
                fd,
                libc::SOL_SOCKET,
                libc::SO_SNDTIMEO,
                (&raw const timeout).cast::<c_void>(),
                size_of::<libc::timeval>() as socklen_t,
            )
        };
        if set < 0 {
            return Err(Trouble::errno("SO_SNDTIMEO"));
        }
        // SAFETY: the pointer is to `address`, which outlives the call and has `length` bytes.
        if unsafe { libc::connect(fd, (&raw const address).cast(), length as socklen_t) } == 0 {
            return Ok(socket);
        }
        let trouble = Trouble::errno("connect");
        if trouble.errno != libc::EINTR {
            return Err(trouble);
        }
    }
}

/// Returns the uid of the process that called listen() on the other end.
fn listener(fd: RawFd) -> Result<u32, Trouble> {
    let mut peer = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut length = size_of::<libc::ucred>() as socklen_t;
    // SAFETY: the pointer and the length describe `peer`, and both outlive the call.
    let got = unsafe {
        libc::getsockopt(
            fd,
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast::<c_void>(),
            &raw mut length,
        )
    };
    if got < 0 { Err(Trouble::errno("SO_PEERCRED")) } else { Ok(peer.uid) }
}

fn wait_readable(fd: RawFd, deadline: Instant) -> Result<(), Trouble> {
    loop {
        let mut wanted = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        // Rounded up: a timeout of 0 would spin in the last millisecond.
        let patience = left(deadline)?.as_millis() as c_int + 1;
        // SAFETY: the pointer is to one pollfd, which outlives the call.
        match unsafe { libc::poll(&raw mut wanted, 1, patience) } {
            0 => {}
            1.. => return Ok(()),
            _ => {
                let trouble = Trouble::errno("poll");
                if trouble.errno != libc::EINTR {
                    return Err(trouble);
                }
            }
        }
    }
}
