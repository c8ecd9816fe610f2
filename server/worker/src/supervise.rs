//! The worker's end of the supervision socket.

use std::io::{self, IoSliceMut};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use gpusession_proto::supervise::{FromWorker, MAX_PACKET, ToWorker, WORKER_FD};
use nix::cmsg_space;
use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg, send};

/// The socket to `gpuserver`.
pub struct Supervisor {
    socket: OwnedFd,
}

impl Supervisor {
    /// Takes over the inherited descriptor.
    pub fn inherited() -> io::Result<Self> {
        // SAFETY: fcntl sets a flag of the descriptor, and fails if the descriptor does not exist.
        if unsafe { libc::fcntl(WORKER_FD, libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the supervisor left this descriptor to the worker; no other code in the process
        // uses it.
        Ok(Self { socket: unsafe { OwnedFd::from_raw_fd(WORKER_FD) } })
    }

    /// Waits for a message; `None` if the supervisor has exited.
    pub fn receive(&self) -> io::Result<Option<(ToWorker, Option<OwnedFd>)>> {
        let mut buf = vec![0; MAX_PACKET];
        let mut slices = [IoSliceMut::new(&mut buf)];
        let mut space = cmsg_space!(RawFd);
        let message = loop {
            match recvmsg::<()>(
                self.socket.as_raw_fd(),
                &mut slices,
                Some(&mut space),
                MsgFlags::MSG_CMSG_CLOEXEC,
            ) {
                Err(nix::errno::Errno::EINTR) => {}
                other => break other?,
            }
        };
        let mut fd = None;
        for control in message.cmsgs()? {
            if let ControlMessageOwned::ScmRights(fds) = control {
                for raw in fds {
                    // SAFETY: the kernel has just created this descriptor for the worker.
                    fd = Some(unsafe { OwnedFd::from_raw_fd(raw) });
                }
            }
        }
        let len = message.bytes;
        if len == 0 {
            return Ok(None);
        }
        let message = postcard::from_bytes(&buf[..len]).map_err(io::Error::other)?;
        Ok(Some((message, fd)))
    }

    /// Sends a message; `false` if the supervisor has exited, which the receiver notices, too.
    pub fn tell(&self, message: &FromWorker) -> bool {
        postcard::to_allocvec(message)
            .is_ok_and(|packet| send(self.socket.as_raw_fd(), &packet, MsgFlags::MSG_NOSIGNAL).is_ok())
    }
}
