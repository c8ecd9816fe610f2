//! The supervision socket of one worker.
//!
//! It carries packets of `gpusession_proto::supervise`, with sockets attached.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use gpusession_proto::supervise::{FromWorker, MAX_PACKET, ToWorker, decode, encode};
use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};
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
        let packet = encode(message);
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

    /// Receives a packet, with the descriptor attached to it; `None` when the worker closed its
    /// end.
    ///
    /// A descriptor is an error beside any message but [`FromWorker::ShareGiven`], and so is a
    /// second one.
    pub async fn recv(&self) -> io::Result<Option<(FromWorker, Option<OwnedFd>)>> {
        // A socket that is never empty is always ready. Without a turn for other tasks, perhaps no
        // thread would poll for the worker's exit and for requests of others meanwhile.
        tokio::task::consume_budget().await;
        let mut packet = vec![0; MAX_PACKET];
        loop {
            let mut ready = self.fd.readable().await?;
            let got = ready.try_io(|fd| receive(fd.as_raw_fd(), &mut packet));
            let Ok(got) = got else { continue };
            let (len, descriptor) = got?;
            if len == 0 {
                return Ok(None);
            }
            let bytes = packet
                .get(..len)
                .ok_or_else(|| io::Error::other("the worker sent a packet that is too long"))?;
            return match decode(bytes) {
                Ok(message @ FromWorker::ShareGiven { .. }) => Ok(Some((message, descriptor))),
                Ok(message) if descriptor.is_none() => Ok(Some((message, None))),
                Ok(_) => Err(io::Error::other("the worker sent a descriptor out of turn")),
                Err(_) => Err(io::Error::other("the worker sent a malformed packet")),
            };
        }
    }
}

/// Receives one packet and at most one descriptor; returns the packet's own length.
fn receive(socket: RawFd, packet: &mut [u8]) -> io::Result<(usize, Option<OwnedFd>)> {
    let mut space = nix::cmsg_space!(RawFd);
    let mut parts = [IoSliceMut::new(packet)];
    let flags = MsgFlags::MSG_TRUNC | MsgFlags::MSG_CMSG_CLOEXEC;
    let got = recvmsg::<()>(socket, &mut parts, Some(&mut space), flags)?;
    // Without room for the others, the kernel has closed them.
    if got.flags.contains(MsgFlags::MSG_CTRUNC) {
        let rest = got.cmsgs().into_iter().flatten();
        drop(rest.flat_map(descriptors).collect::<Vec<_>>());
        return Err(io::Error::other("the worker sent several descriptors"));
    }
    let mut found: Vec<_> = got.cmsgs()?.flat_map(descriptors).collect();
    let descriptor = found.pop();
    match found.is_empty() {
        true => Ok((got.bytes, descriptor)),
        false => Err(io::Error::other("the worker sent several descriptors")),
    }
}

/// Takes over the descriptors of a control message.
fn descriptors(control: ControlMessageOwned) -> Vec<OwnedFd> {
    let ControlMessageOwned::ScmRights(raw) = control else { return Vec::new() };
    // SAFETY: the kernel has just created these descriptors for this process, and each is taken
    // once.
    raw.into_iter().map(|raw| unsafe { OwnedFd::from_raw_fd(raw) }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spawn::socket_pair;

    #[tokio::test]
    async fn only_the_answer_about_an_object_brings_one_descriptor() {
        let given = FromWorker::ShareGiven { number: 1, given: Ok(Default::default()) };
        for (message, count, good) in [
            (&given, 0, true),
            (&given, 1, true),
            (&given, 2, false),
            (&given, 9, false),
            (&FromWorker::Wanted, 0, true),
            (&FromWorker::Wanted, 1, false),
        ] {
            let (ours, theirs) = socket_pair().unwrap();
            let packet = encode(message);
            let fds = vec![theirs.as_raw_fd(); count];
            let rights = [ControlMessage::ScmRights(&fds)];
            let parts = [IoSlice::new(&packet)];
            let control = &rights[..usize::from(count > 0)];
            sendmsg::<()>(theirs.as_raw_fd(), &parts, control, MsgFlags::empty(), None).unwrap();
            let got = Channel::new(ours).unwrap().recv().await;
            let expected = (message.clone(), count == 1);
            match got {
                Ok(got) => assert!(good && got.map(|(m, fd)| (m, fd.is_some())) == Some(expected)),
                Err(e) => assert!(!good, "{e}"),
            }
        }
    }

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
