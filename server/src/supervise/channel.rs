//! The supervision socket of one worker.
//!
//! It carries packets of `gpusession_proto::supervise`, with sockets attached.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use gpusession_proto::supervise::{FromWorker, MAX_PACKET, ToWorker};
use nix::sys::socket::{ControlMessage, MsgFlags, recv, sendmsg};
use tokio::io::unix::AsyncFd;

/// The supervisor's end of the socket.
#[derive(Debug)]
pub struct Channel {
    fd: AsyncFd<OwnedFd>,
}

impl Channel {
    /// Wraps the supervisor's end; needs a runtime.
    pub fn new(ours: OwnedFd) -> io::Result<Self> {
        // SAFETY: an OwnedFd keeps the same descriptor open for as long as it lives, and AsyncFd
        // owns it.
        let fd = unsafe { AsyncFd::register(ours) }?;
        Ok(Self { fd })
    }

    /// Sends a packet, with a descriptor attached if there is one.
    pub async fn send(&self, message: &ToWorker, beside: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let packet = postcard::to_allocvec(message).map_err(io::Error::other)?;
        if packet.len() > MAX_PACKET {
            return Err(io::Error::other("the packet for the worker is too long"));
        }
        let fds: Vec<_> = beside.iter().map(AsRawFd::as_raw_fd).collect();
        let rights = [ControlMessage::ScmRights(&fds)];
        let control = if fds.is_empty() { &rights[..0] } else { &rights[..] };
        loop {
            let mut ready = self.fd.writable().await?;
            let sent = ready.try_io(|fd| {
                let flags = MsgFlags::MSG_NOSIGNAL;
                sendmsg::<()>(fd.as_raw_fd(), &[IoSlice::new(&packet)], control, flags, None)
                    .map_err(io::Error::from)
            });
            if let Ok(result) = sent {
                return result.map(drop);
            }
        }
    }

    /// Receives a packet; `None` when the worker closed its end. The kernel drops descriptors that
    /// a worker sends.
    pub async fn recv(&self) -> io::Result<Option<FromWorker>> {
        let mut packet = vec![0; MAX_PACKET];
        loop {
            let mut ready = self.fd.readable().await?;
            let got = ready.try_io(|fd| {
                recv(fd.as_fd().as_raw_fd(), &mut packet, MsgFlags::MSG_TRUNC).map_err(io::Error::from)
            });
            let Ok(got) = got else { continue };
            let len = got?;
            if len == 0 {
                return Ok(None);
            }
            let bytes = packet
                .get(..len)
                .ok_or_else(|| io::Error::other("the worker sent a packet that is too long"))?;
            return match postcard::take_from_bytes(bytes) {
                Ok((message, [])) => Ok(Some(message)),
                _ => Err(io::Error::other("the worker sent a malformed packet")),
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spawn::socket_pair;

    #[tokio::test]
    async fn refuses_what_is_not_a_message() {
        use nix::sys::socket::send;
        for bad in [&[200u8; 10][..], &[99; 3], &vec![0; MAX_PACKET + 1]] {
            let (ours, theirs) = socket_pair().unwrap();
            let channel = Channel::new(ours).unwrap();
            send(theirs.as_raw_fd(), bad, MsgFlags::empty()).unwrap();
            assert!(channel.recv().await.is_err());
        }
        let (ours, theirs) = socket_pair().unwrap();
        drop(theirs);
        assert!(matches!(Channel::new(ours).unwrap().recv().await, Ok(None) | Err(_)));
    }
}
