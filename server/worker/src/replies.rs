//! Frames to the client: answers, late errors and reports.

use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

use gpusession_link::resume;
use gpusession_link::worker_end::WorkerEnd;
use gpusession_proto::frame::{BODY_PART, HEADER, Header, MAX_BODY, MAX_LONG_BODY, Writer, op};

use crate::answer::Answer;
use crate::driver::{Status, status};

/// The worker's end of the connection that carries the log.
pub struct Replies {
    /// Lane 0, which carries the log.
    pub end: WorkerEnd,
    last_late: AtomicI32,
    /// Whether the library understands replies in several frames.
    pub long: AtomicBool,
}

impl Replies {
    /// Starts with no error reported.
    pub fn new(end: WorkerEnd) -> Self {
        Self { end, last_late: AtomicI32::new(0), long: AtomicBool::new(false) }
    }

    /// Answers a call, in one write with the frames that must precede the answer.
    pub fn reply(&self, seq: u64, status: Status, answer: &Answer) {
        let mut frames = Vec::with_capacity(answer.before.len() + answer.body.len() + HEADER);
        frames.extend_from_slice(&answer.before);
        // A client rejects a longer frame as malformed.
        let most = if self.long.load(Ordering::Relaxed) { MAX_LONG_BODY } else { MAX_BODY };
        let (status, mut body) = match answer.body.len() {
            len if len <= most => (status, &answer.body[..]),
            _ => (status::NOT_SUPPORTED, &[][..]),
        };
        while body.len() > MAX_BODY {
            let (part, rest) = body.split_at(BODY_PART);
            self.append(&mut frames, op::REPLY_PART, seq, 0, |w| w.words(part));
            body = rest;
        }
        self.append(&mut frames, op::REPLY, seq, status, |w| w.words(body));
        self.send_frames(frames);
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

    /// Sends complete frames, in the order of the calls; the reader notices a lost connection.
    pub fn send_frames(&self, frames: Vec<u8>) {
        self.end.send(frames);
    }

    /// Tells the client why the session ends, if it is connected.
    pub fn send_end(&self, reason: &str) {
        self.end.send_outside(&resume::frame(op::END, |w| w.bytes(reason.as_bytes())));
    }

    /// Sends one frame whose body `fill` writes.
    pub fn send_with(&self, op: u16, seq: u64, status: Status, fill: impl FnOnce(&mut Writer<'_>)) {
        let mut frames = Vec::new();
        self.append(&mut frames, op, seq, status, fill);
        self.send_frames(frames);
    }

    /// Sends what the program shall do with a transfer during a hold with this number.
    pub fn send_hold(&self, op: u16, transfer: u64, hold: u64) {
        let mut header = self.header(op, transfer, 0);
        header.ctx = hold.into();
        let mut frames = Vec::new();
        Writer::new(&mut frames, &header).finish();
        self.send_frames(frames);
    }

    fn header(&self, op: u16, seq: u64, status: Status) -> Header {
        Header {
            len: 0.into(),
            op: op.into(),
            flags: 0.into(),
            thread: 0.into(),
            number: 0.into(),
            seq: seq.into(),
            ack: self.end.received().into(),
            ctx: (status as u32 as u64).into(),
        }
    }
}

#[cfg(test)]
pub mod tests {
    use std::io::Read;
    use std::net::{TcpListener, TcpStream};
    use std::sync::Arc;
    use std::time::Duration;

    use gpusession_link::line::Line;
    use gpusession_link::transport::Transport;

    use super::*;

    /// The client's end of the connection.
    pub struct Peer(pub TcpStream);

    impl Peer {
        /// Waits for the next frame: its header and its body.
        pub fn next(&mut self) -> (Header, Vec<u8>) {
            let mut head = [0; HEADER];
            self.0.read_exact(&mut head).expect("a frame");
            let header = Header::parse(&head).expect("a header");
            let mut body = vec![0; header.body_len()];
            self.0.read_exact(&mut body).expect("a body");
            (header, body)
        }
    }

    /// Returns two ends of a connection.
    pub fn transport() -> (Transport, Peer) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let theirs = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        theirs.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        (Transport::plain(listener.accept().unwrap().0).unwrap(), Peer(theirs))
    }

    /// Returns the worker's end, and the client's.
    pub fn replies() -> (Arc<Replies>, Peer) {
        let (replies, _, peer) = connection();
        (replies, peer)
    }

    /// As [`replies`], with the connection for a reader.
    pub fn connection() -> (Arc<Replies>, Line, Peer) {
        let (transport, peer) = transport();
        let (end, line) = WorkerEnd::new([1; 16], &[2; 32], Duration::ZERO, transport, 1);
        (Arc::new(Replies::new(end)), line, peer)
    }

    #[test]
    fn answer_follows_the_frames_that_must_precede_it() {
        let (replies, mut peer) = replies();
        let mut answer = Answer::default();
        replies.append(&mut answer.before, op::LANDED, 5, 0, |w| w.bytes(b"data"));
        answer.word(9);
        replies.reply(7, -1, &answer);
        let (landed, _) = peer.next();
        assert_eq!((landed.op.get(), landed.seq.get()), (op::LANDED, 5));
        let (reply, body) = peer.next();
        assert_eq!((reply.op.get(), reply.seq.get(), reply.ctx.get() as i32), (op::REPLY, 7, -1));
        assert_eq!((body, reply.ack.get()), (9u64.to_le_bytes().to_vec(), 1), "the greeting has arrived");
        assert_eq!((landed.number.get(), reply.number.get()), (1, 2));
    }

    #[test]
    fn answer_beyond_a_frame_is_not_supported() {
        let (replies, mut peer) = replies();
        let sizes = [(MAX_BODY, 0), (MAX_BODY + 8, status::NOT_SUPPORTED)];
        let sender = {
            let replies = replies.clone();
            std::thread::spawn(move || {
                for (len, _) in sizes {
                    replies.reply(1, 0, &Answer { body: vec![0; len], before: Vec::new() });
                }
            })
        };
        for (len, status) in sizes {
            let (header, body) = peer.next();
            let expected = if status == 0 { len } else { 0 };
            assert_eq!((header.ctx.get() as i32, body.len()), (status, expected));
        }
        sender.join().unwrap();
    }

    #[test]
    fn answer_beyond_a_frame_goes_in_parts_to_a_library_that_joins_them() {
        let (replies, mut peer) = replies();
        replies.long.store(true, Ordering::Relaxed);
        let body: Vec<u8> = (0..MAX_BODY + BODY_PART + 8).map(|i| (i / 8) as u8).collect();
        let sender = {
            let (replies, body) = (replies.clone(), body.clone());
            std::thread::spawn(move || {
                replies.reply(5, 0, &Answer { body, before: Vec::new() });
                replies.reply(6, 0, &Answer { body: vec![0; MAX_LONG_BODY + 8], before: Vec::new() });
            })
        };
        let mut got = Vec::new();
        for op in [op::REPLY_PART, op::REPLY_PART, op::REPLY] {
            let (header, part) = peer.next();
            assert_eq!((header.op.get(), header.seq.get()), (op, 5));
            got.extend(part);
        }
        assert!(got == body);
        let (header, part) = peer.next();
        assert_eq!((header.ctx.get() as i32, part.len()), (status::NOT_SUPPORTED, 0));
        sender.join().unwrap();
    }

    #[test]
    fn sticky_error_is_reported_once() {
        const ILLEGAL_ADDRESS: Status = 700;
        let (replies, mut peer) = replies();
        for (seq, status) in [(1, 1), (2, 1), (3, ILLEGAL_ADDRESS), (4, ILLEGAL_ADDRESS), (5, 1)] {
            replies.late_error(seq, status);
        }
        let reported: Vec<_> = (0..4).map(|_| peer.next().0.seq.get()).collect();
        assert_eq!(reported, [1, 2, 3, 5]);
    }
}
