//! Frames to the client: answers, late errors and reports.

use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use gpusession_link::transport::Transport;
use gpusession_proto::frame::{HEADER, Header, MAX_BODY, Writer, op};

use crate::answer::Answer;
use crate::driver::{Status, status};

/// The worker's end of the connection that carries the log.
pub struct Replies {
    /// Lane 0, which carries the log.
    pub transport: Transport,
    /// Highest position of the log that was replayed.
    pub consumed: AtomicU64,
    last_late: AtomicI32,
    sending: Mutex<()>,
}

impl Replies {
    /// Starts with no frame replayed and no error reported.
    pub fn new(transport: Transport) -> Self {
        Self { transport, consumed: AtomicU64::new(0), last_late: AtomicI32::new(0), sending: Mutex::new(()) }
    }

    /// Answers a call, in one write with the frames that must precede the answer.
    pub fn reply(&self, seq: u64, status: Status, answer: &Answer) {
        let mut frames = Vec::with_capacity(answer.before.len() + answer.body.len() + HEADER);
        frames.extend_from_slice(&answer.before);
        // A client rejects a longer frame as malformed.
        let (status, body) = match answer.body.len() {
            len if len <= MAX_BODY => (status, &answer.body[..]),
            _ => (status::NOT_SUPPORTED, &[][..]),
        };
        self.append(&mut frames, op::REPLY, seq, status, |w| w.words(body));
        self.send_frames(&frames);
    }

    /// Reports the error of a frame without a reply, unless it repeats a sticky error.
    pub fn late_error(&self, seq: u64, status: Status) {
        if self.last_late.swap(status, Ordering::Relaxed) != status
            || !gpusession_proto::status::is_sticky(status)
        {
            self.send_with(op::LATE_ERROR, seq, status, |_| {});
        }
    }

    /// Appends a frame whose body `fill` writes.
    pub fn append(
        &self,
        frames: &mut Vec<u8>,
        op: u16,
        seq: u64,
        status: Status,
        fill: impl FnOnce(&mut Writer<'_>),
    ) {
        let mut w = Writer::new(frames, &self.header(op, seq, status));
        fill(&mut w);
        w.finish();
    }

    /// Sends complete frames; the reader notices a lost connection.
    pub fn send_frames(&self, frames: &[u8]) {
        let _sending = self.sending.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = self.transport.send(frames);
    }

    /// Sends one frame whose body `fill` writes.
    pub fn send_with(&self, op: u16, seq: u64, status: Status, fill: impl FnOnce(&mut Writer<'_>)) {
        let mut frames = Vec::new();
        self.append(&mut frames, op, seq, status, fill);
        self.send_frames(&frames);
    }

    fn header(&self, op: u16, seq: u64, status: Status) -> Header {
        Header {
            len: 0.into(),
            op: op.into(),
            flags: 0.into(),
            thread: 0.into(),
            epoch: 0.into(),
            seq: seq.into(),
            ack: self.consumed.load(Ordering::Relaxed).into(),
            ctx: (status as u32 as u64).into(),
        }
    }
}
