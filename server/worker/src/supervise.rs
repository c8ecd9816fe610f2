//! The worker's end of the supervision socket.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use gpusession_proto::supervise::{FromWorker, MAX_PACKET, ToWorker, WORKER_FD, decode, encode};
use nix::cmsg_space;
use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};

/// The socket to `gpuserver`.
pub struct Supervisor {
    socket: OwnedFd,
}

impl Supervisor {
    /// Talks over a connected socket that keeps messages apart.
    pub fn new(socket: OwnedFd) -> Self {
        Self { socket }
    }

    /// Takes over the inherited descriptor.
    pub fn inherited() -> io::Result<Self> {
        // SAFETY: fcntl sets a flag of the descriptor, and fails if the descriptor does not exist.
        if unsafe { libc::fcntl(WORKER_FD, libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the supervisor left this descriptor to the worker; no other code in the process
        // uses it.
        Ok(Self::new(unsafe { OwnedFd::from_raw_fd(WORKER_FD) }))
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
        let message = decode(&buf[..len]).map_err(io::Error::other)?;
        Ok(Some((message, fd)))
    }

    /// Sends a message; `false` if the supervisor has exited, which the receiver notices, too.
    pub fn report(&self, message: &FromWorker) -> bool {
        self.report_with(message, None)
    }

    /// Sends a message as [`Self::tell`] does, with a descriptor attached if there is one.
    pub fn report_with(&self, message: &FromWorker, beside: Option<BorrowedFd<'_>>) -> bool {
        let fds: Vec<_> = beside.iter().map(AsRawFd::as_raw_fd).collect();
        let rights = [ControlMessage::ScmRights(&fds)];
        let control = if fds.is_empty() { &rights[..0] } else { &rights[..] };
        let packet = encode(message);
        let parts = [IoSlice::new(&packet)];
        sendmsg::<()>(self.socket.as_raw_fd(), &parts, control, MsgFlags::MSG_NOSIGNAL, None).is_ok()
    }
}

#[cfg(test)]
pub mod tests {
    use std::os::fd::AsFd;
    use std::sync::Arc;

    use nix::sys::socket::{
        AddressFamily, ControlMessage, SockFlag, SockType, recv, sendmsg, setsockopt, socketpair, sockopt,
    };
    use nix::sys::time::TimeVal;

    use super::*;

    /// The supervisor's end of a worker's socket.
    pub struct Peer(OwnedFd);

    impl Peer {
        /// Waits for the worker's next message; panics if none comes.
        pub fn next(&self) -> FromWorker {
            self.try_next().expect("a message of the worker")
        }

        /// Waits at most for seconds, like [`Self::next`].
        fn try_next(&self) -> nix::Result<FromWorker> {
            let mut buf = vec![0; MAX_PACKET];
            let len = recv(self.0.as_raw_fd(), &mut buf, MsgFlags::empty())?;
            Ok(decode(&buf[..len]).expect("a message"))
        }

        /// Returns `true` if the worker has sent nothing more.
        pub fn silent(&self) -> bool {
            recv(self.0.as_raw_fd(), &mut [0; 8], MsgFlags::MSG_DONTWAIT) == Err(nix::errno::Errno::EAGAIN)
        }
    }

    /// Returns a worker's end and the supervisor's.
    pub fn pair() -> (Arc<Supervisor>, Peer) {
        let kind = SockType::SeqPacket;
        let (ours, theirs) = socketpair(AddressFamily::Unix, kind, None, SockFlag::SOCK_CLOEXEC).unwrap();
        setsockopt(&theirs, sockopt::ReceiveTimeout, &TimeVal::new(20, 0)).unwrap();
        (Arc::new(Supervisor::new(ours)), Peer(theirs))
    }

    #[test]
    fn message_brings_its_descriptor() {
        let (ours, theirs) = pair();
        let packet = encode(&ToWorker::Pause);
        let send = |controls: &[ControlMessage<'_>]| {
            let parts = [std::io::IoSlice::new(&packet)];
            sendmsg::<()>(theirs.0.as_raw_fd(), &parts, controls, MsgFlags::empty(), None).unwrap();
        };
        send(&[]);
        send(&[ControlMessage::ScmRights(&[theirs.0.as_fd().as_raw_fd()])]);
        let received = || ours.receive().unwrap().map(|(message, fd)| (message, fd.is_some()));
        assert_eq!(received(), Some((ToWorker::Pause, false)));
        assert_eq!(received(), Some((ToWorker::Pause, true)));
    }

    #[test]
    fn exited_supervisor_is_no_error() {
        let (ours, theirs) = pair();
        assert!(ours.report(&FromWorker::Wanted));
        assert_eq!(theirs.next(), FromWorker::Wanted);
        assert!(theirs.silent());
        drop(theirs);
        assert!(ours.receive().unwrap().is_none());
        assert!(!ours.report(&FromWorker::Wanted));
    }
}
