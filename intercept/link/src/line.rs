//! One connection of the log, and what each end keeps over several: a sender's log, a reader's
//! buffer.
//!
//! Only the stream waits here: the two ends own the locks and the threads.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use gpusession_proto::frame::{BadFrame, HEADER, Header};
use gpusession_proto::preface::Refusal;

use crate::log::Log;
use crate::transport::{Stream, Transport, Wait};

/// Usual number of bytes of one read.
const READ_BYTES: usize = if cfg!(test) { 1 << 10 } else { 256 << 10 };

/// One connection of the log, by the number of the attempt that made it.
pub struct Line<T = Transport> {
    /// Stream of this connection, for the reader.
    pub transport: Arc<T>,
    pub(crate) attempt: u32,
}

impl<T> Clone for Line<T> {
    fn clone(&self) -> Self {
        Self { transport: self.transport.clone(), attempt: self.attempt }
    }
}

/// The sender's side: frames that the other end has not acknowledged, and the connection.
pub(crate) struct Outgoing<T> {
    /// Empty if the connection cannot come back.
    pub log: Log,
    /// The connection; `None` during an outage.
    pub line: Option<Line<T>>,
}

impl<T: Stream> Outgoing<T> {
    pub fn new(line: Line<T>) -> Self {
        Self { log: Log::default(), line: Some(line) }
    }

    /// Sends a batch of whole frames, the latest of which has the number `last`; empties `batch`.
    ///
    /// Without a connection, the frames only go into the log. After an error they are in the log,
    /// too: only it can send bytes again of which the kernel has lost some. `returns`: the
    /// connection may come back.
    pub fn send(
        &mut self,
        batch: &mut Vec<u8>,
        last: u64,
        acknowledged: impl FnOnce() -> u64,
        returns: bool,
    ) -> io::Result<()> {
        let sent = self.line.as_ref().map_or(Ok(()), |line| line.transport.send(batch));
        if returns {
            self.log.acknowledge(acknowledged());
            self.log.keep(batch, last);
        } else {
            self.log.pass(batch, last);
        }
        sent
    }

    /// Continues on a new connection, at whose other end `received` frames have arrived.
    ///
    /// Later frames take it only once the rest of the log is sent.
    pub fn resume(&mut self, line: Line<T>, received: u64) -> Result<(), (Line<T>, io::Error)> {
        self.log.acknowledge(received);
        match self.log.after(received).try_for_each(|frames| line.transport.send(frames)) {
            Ok(()) => {
                self.line = Some(line);
                Ok(())
            }
            Err(e) => Err((line, e)),
        }
    }
}

#[cfg(test)]
impl<T: Stream> Incoming<T> {
    /// Returns the bytes that were received, but not taken.
    pub fn unread(&self) -> &[u8] {
        &self.buf[self.start..self.end]
    }

    pub fn line(&self) -> Option<&Line<T>> {
        self.line.as_ref()
    }

    /// Returns a copy that takes little memory.
    pub fn copy(&self) -> Self {
        let buf = self.unread().to_vec();
        Self { line: self.line.clone(), start: 0, end: buf.len(), buf, untold: self.untold }
    }
}

/// The program's reader: the connection, and bytes of it that are not taken.
pub(crate) struct Incoming<T> {
    line: Option<Line<T>>,
    buf: Vec<u8>,
    start: usize,
    end: usize,
    /// Bytes since the latest acknowledgement.
    pub untold: usize,
}

/// Reason why a thread stops reading.
pub(crate) enum Stop {
    /// No whole frame is there.
    Nothing,
    /// The connection of this attempt has ended.
    Broken(u32, io::Error),
    /// A frame of the peer ends the link, for this reason.
    Fatal(String),
}

impl From<BadFrame> for Stop {
    fn from(bad: BadFrame) -> Self {
        Self::Fatal(bad.to_string())
    }
}

impl<T: Stream> Incoming<T> {
    pub fn new(line: Line<T>) -> Self {
        Self { line: Some(line), buf: Vec::new(), start: 0, end: 0, untold: 0 }
    }

    /// Gives the connection up; frames in the buffer are not counted, and come again.
    pub fn interrupt(&mut self) {
        (self.line, self.start, self.end) = (None, 0, 0);
    }

    /// Continues on a new connection.
    pub fn resume(&mut self, line: Line<T>) {
        self.line = Some(line);
        self.untold = 0;
    }

    /// Returns a part of the buffer, by the range from [`Incoming::next_frame`].
    pub fn body(&self, body: Range<usize>) -> &[u8] {
        &self.buf[body]
    }

    /// Returns the next frame's header and the place of its body in the buffer.
    pub fn next_frame(&mut self, wait: Wait) -> Result<(Header, Range<usize>), Stop> {
        let Self { line, buf, start, end, .. } = self;
        // An outage ends readers; one that comes late finds no connection.
        let Some(line) = line else { return Err(Stop::Broken(0, io::ErrorKind::NotConnected.into())) };
        loop {
            let have = *end - *start;
            let mut need = HEADER;
            if have >= HEADER {
                let bytes =
                    buf[*start..].first_chunk::<HEADER>().ok_or_else(|| Stop::Fatal("header".into()))?;
                // A refusal comes instead of the first frame: its length has the high bit set.
                if let Some(refusal) = Refusal::read(&buf[*start..*end]) {
                    return Err(Stop::Fatal(refusal.reason));
                }
                let header = Header::parse(bytes)?;
                need = HEADER + header.body_len();
                if have >= need {
                    let body = *start + HEADER..*start + need;
                    *start += need;
                    return Ok((header, body));
                }
            }
            if *start > 0 {
                buf.copy_within(*start..*end, 0);
                (*start, *end) = (0, have);
            }
            if buf.len() < need.max(READ_BYTES) {
                buf.resize(need.max(READ_BYTES), 0);
            }
            match line.transport.recv(&mut buf[*end..], wait) {
                Ok(0) => {
                    return Err(match Refusal::read(&buf[..have]) {
                        Some(refusal) => Stop::Fatal(refusal.reason),
                        None => Stop::Broken(line.attempt, io::ErrorKind::UnexpectedEof.into()),
                    });
                }
                Ok(n) => *end += n,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Err(Stop::Nothing),
                Err(e) => return Err(Stop::Broken(line.attempt, e)),
            }
        }
    }
}
