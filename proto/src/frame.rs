//! Frames of the data plane.
//!
//! A frame is a fixed header, then a body of little-endian 64-bit words and padded byte strings.
//!
//! Requests go from a program to its worker in one ordered log (lane 0). Replies and events return
//! on the same connection, in any order, by the request's sequence number. Bulk bytes travel on
//! further lanes in [`op::CHUNK`] frames.
//!
//! The numbers in [`op`] are part of the protocol and come from `proto/calls/calls.txt`.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Operation numbers.
#[expect(clippy::too_many_lines, reason = "generated")]
pub mod op {
    include!(concat!(env!("OUT_DIR"), "/operations.rs"));
}

/// Bytes of a header.
pub const HEADER: usize = 40;
/// Longest body, in bytes; a longer one closes the connection.
pub const MAX_BODY: usize = 4 << 20;
/// Longest body of a request or reply in several frames, in bytes.
pub const MAX_LONG_BODY: usize = 128 << 20;
/// Bytes that such a request counts for besides its body, so that empty ones are bounded, too.
///
/// A worker keeps requests of [`MAX_LONG_BODY`] together.
pub const LONG_REQUEST_BYTES: usize = 4096;
/// Longest part of such a body in one [`op::BODY_PART`] or [`op::REPLY_PART`], in bytes.
pub const BODY_PART: usize = 1 << 20;
/// Longest data that travels inside its request or reply on lane 0, in bytes.
pub const INLINE_MAX: usize = 64 << 10;
/// Longest payload of one [`op::CHUNK`] frame on a bulk lane, in bytes.
pub const CHUNK: usize = 2 << 20;
/// Shortest payload of a chunk, in bytes, but for the last one of a transfer.
const SHORT_CHUNK: usize = 256 << 10;

/// Returns the payload in bytes of each chunk of a transfer, of which the last one may be shorter.
///
/// A transfer of some hundred kilobytes uses several lanes.
pub const fn chunk_of(transfer: usize) -> usize {
    let share = transfer.div_ceil(UP_LANES as usize).next_multiple_of(SHORT_CHUNK);
    if share < CHUNK { share } else { CHUNK }
}

/// Returns the room that a chunk counts for while it is under way or waits in the worker, in bytes.
pub const fn chunk_room(len: usize) -> usize {
    const LEAST: usize = 4096;
    if len < LEAST { LEAST } else { len.next_multiple_of(8) }
}

/// Number of lanes for data to the device, counted from [`FIRST_UP_LANE`].
pub const UP_LANES: u16 = 8;
/// Number of lanes for data from the device, counted from [`FIRST_DOWN_LANE`].
pub const DOWN_LANES: u16 = 8;
/// Lowest of the [`UP_LANES`].
pub const FIRST_UP_LANE: u16 = 1;
/// Lowest of the [`DOWN_LANES`].
pub const FIRST_DOWN_LANE: u16 = FIRST_UP_LANE + UP_LANES;

/// Kinds of a mirror (`MIRROR_HOST`): the place of shared memory in the worker.
pub mod mirror {
    /// Host memory of the worker at any address: only copies name it.
    pub const ANYWHERE: u64 = 0;
    /// Host memory of the worker at the client's address, which kernels use.
    pub const SAME: u64 = 1;
    /// The driver's managed memory at the client's address (a module's variable).
    pub const MANAGED: u64 = 2;
    /// Device memory at the client's address, exchanged in whole blocks.
    pub const DEVICE: u64 = 3;
    /// As [`SAME`]; the program watches the memory while kernels write to it.
    pub const WATCHED: u64 = 4;
}

/// Request flag: the program waits for the reply.
pub const WAIT: u16 = 1;
/// Request flag: the body continues in the thread's [`op::BODY_PART`] frames, which came before.
///
/// The last word of the frame's own body is their length, and no part of the request.
pub const CONTINUED: u16 = 2;

/// Second word of `STREAM_SYNC`: work of the default stream counts that precedes later work only.
pub const DRAIN: u64 = 1;

/// Third word of `COPY_BOX` behind the description: from where to where it copies.
pub mod direction {
    /// Inside device memory.
    pub const WITHIN: u64 = 0;
    /// To the device; up to [`INLINE_MAX`](super::INLINE_MAX) bytes travel in the frame.
    pub const UP: u64 = 1;
    /// From the device.
    pub const DOWN: u64 = 2;
    /// To the device; all bytes travel on the lanes.
    pub const UP_BY_LANES: u64 = 3;
}

/// Abilities of a worker: bits of the last word of its answer to `HELLO`.
///
/// An older worker omits the word.
pub mod ability {
    /// A `COPY_BOX` from the device may come without [`WAIT`](super::WAIT); its bytes then land as
    /// those of a `COPY_FROM_DEVICE`. The source is device memory.
    pub const LANDING_BOXES: u64 = 1;
    /// The source of such a copy may be an array of a plain format.
    pub const LANDING_ARRAYS: u64 = 2;
    /// The bytes of a `COPY_BOX` to the device may travel on the lanes, however few they are.
    pub const LANE_BOXES: u64 = 4;
    /// A request may be [`CONTINUED`](super::CONTINUED), and lists of edges may have any length.
    pub const LONG_BODIES: u64 = 8;
    /// It knows `CORE_DUMP`, and sends `DUMPED` only after one.
    pub const CORE_DUMPS: u64 = 16;
    /// It sends changes of [`WATCHED`](super::mirror::WATCHED) memory while the GPU works.
    pub const WATCHED_MEMORY: u64 = 32;
    /// A load or a link whose image it lacks has the status [`IMAGE_MISSING`]. A load takes handles
    /// for functions, and describes those of a small image.
    ///
    /// [`IMAGE_MISSING`]: crate::status::IMAGE_MISSING
    pub const QUICK_LOADS: u64 = 64;
    /// Abilities of a worker of this version.
    pub const ALL: u64 =
        LANDING_BOXES | LANDING_ARRAYS | LANE_BOXES | LONG_BODIES | CORE_DUMPS | WATCHED_MEMORY | QUICK_LOADS;
}

/// Abilities of a program's library: bits of the word behind the windows in `HELLO`.
///
/// An older library omits the word.
pub mod library_ability {
    /// It understands holds in acknowledgements of chunks, `WANTED` and `RELEASE`.
    pub const HOLDS: u64 = 1;
    /// It understands replies in several frames, `REPLY_PART` and then `REPLY`.
    pub const LONG_REPLIES: u64 = 2;
    /// It sends an image again that the worker no longer has.
    pub const IMAGES_AGAIN: u64 = 4;
    /// Abilities of a library of this version.
    pub const ALL: u64 = HOLDS | LONG_REPLIES | IMAGES_AGAIN;
}

/// Header of every frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Header {
    /// Bytes of the body: a multiple of 8, at most [`MAX_BODY`].
    pub len: U32,
    /// Number from [`op`].
    pub op: U16,
    /// [`WAIT`], [`CONTINUED`].
    pub flags: U16,
    /// The program's thread that made the call; the order within a thread is always kept.
    pub thread: U32,
    /// Frames from the worker: low bits of their number in its log; else zero.
    pub number: U32,
    /// Requests: position in the log. Replies: the request's.
    pub seq: U64,
    /// Number of the latest frame of the other direction that the sender has received; in chunks
    /// their length.
    pub ack: U64,
    /// Requests: the thread's current context (0: none). Replies: the `CUresult`. Acknowledgements
    /// of chunks, `WANTED` and `RELEASE`: number of the hold (0: none).
    pub ctx: U64,
}

/// A malformed frame, after which the receiver closes the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BadFrame(pub &'static str);

impl std::fmt::Display for BadFrame {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "malformed frame: {}", self.0)
    }
}

impl std::error::Error for BadFrame {}

impl Header {
    /// Reads a header and checks its length.
    pub fn parse(bytes: &[u8; HEADER]) -> Result<Self, BadFrame> {
        let header = Self::read_from_bytes(bytes).map_err(|_| BadFrame("header"))?;
        let len = header.len.get() as usize;
        if len > MAX_BODY {
            return Err(BadFrame("body too long"));
        }
        if !len.is_multiple_of(8) {
            return Err(BadFrame("body length not a multiple of 8"));
        }
        Ok(header)
    }

    /// Returns a header whose fields are all zero.
    pub fn empty() -> Self {
        Self::new_zeroed()
    }

    /// Returns the length of the body, in bytes.
    pub fn body_len(&self) -> usize {
        self.len.get() as usize
    }
}

/// Appends one frame to a buffer; the length is filled in by [`Writer::finish`].
pub struct Writer<'a> {
    buf: &'a mut Vec<u8>,
    start: usize,
    seq: u64,
}

impl<'a> Writer<'a> {
    /// Starts a frame with this header (its `len` is ignored).
    #[inline]
    pub fn new(buf: &'a mut Vec<u8>, header: &Header) -> Self {
        let start = buf.len();
        buf.extend_from_slice(header.as_bytes());
        Self { buf, start, seq: header.seq.get() }
    }

    /// Returns the frame's position in the log.
    pub fn seq(&self) -> u64 {
        self.seq
    }

    /// Returns the bytes of the frame so far, including its header.
    #[inline]
    pub fn written(&self) -> usize {
        self.buf.len() - self.start
    }

    /// Appends a word.
    #[inline]
    pub fn word(&mut self, value: u64) {
        self.buf.extend_from_slice(&value.to_le_bytes());
    }

    /// Appends a byte string: its length, then the bytes, padded to a multiple of 8.
    #[inline]
    pub fn bytes(&mut self, bytes: &[u8]) {
        self.word(bytes.len() as u64);
        self.buf.extend_from_slice(bytes);
        self.pad(bytes.len());
    }

    /// Appends a byte string that consists of complete words.
    pub fn words(&mut self, words: &[u8]) {
        debug_assert!(words.len().is_multiple_of(8));
        self.buf.extend_from_slice(words);
    }

    /// Appends `len` bytes that `fill` writes, as [`Writer::bytes`] would.
    ///
    /// They are zero before.
    #[inline]
    pub fn bytes_with(&mut self, len: usize, fill: impl FnOnce(&mut [u8])) {
        self.word(len as u64);
        let at = self.buf.len();
        self.buf.resize(at + len, 0);
        fill(&mut self.buf[at..]);
        self.pad(len);
    }

    /// Returns `true` if the receiver would refuse the frame for its length so far.
    #[inline]
    pub fn is_too_long(&self) -> bool {
        self.written() > HEADER + MAX_BODY
    }

    /// Returns the body so far.
    pub fn body(&self) -> &[u8] {
        &self.buf[self.start + HEADER..]
    }

    /// Marks the frame as one whose body continues in earlier frames; see [`CONTINUED`].
    pub fn set_continued(&mut self) {
        self.buf[self.start + std::mem::offset_of!(Header, flags)] |= CONTINUED as u8;
    }

    /// Replaces the frame by one of another operation, whose body is empty.
    pub fn replace(&mut self, op: u16) {
        self.buf.truncate(self.start + HEADER);
        self.buf[self.start + std::mem::offset_of!(Header, op)..][..2].copy_from_slice(&op.to_le_bytes());
    }

    #[inline]
    fn pad(&mut self, len: usize) {
        const ZERO: [u8; 8] = [0; 8];
        self.buf.extend_from_slice(&ZERO[..len.next_multiple_of(8) - len]);
    }

    /// Fills in the body's length and returns it.
    #[inline]
    pub fn finish(self) -> usize {
        let len = self.buf.len() - self.start - HEADER;
        self.buf[self.start..self.start + 4].copy_from_slice(&(len as u32).to_le_bytes());
        len
    }
}

/// Reads a body; each getter fails rather than read past the end.
#[derive(Clone)]
pub struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    /// Reads from the start of `body`.
    #[inline]
    pub fn new(body: &'a [u8]) -> Self {
        Self { rest: body }
    }

    /// Reads the next word.
    #[inline]
    pub fn word(&mut self) -> Result<u64, BadFrame> {
        let (word, rest) = self.rest.split_first_chunk::<8>().ok_or(BadFrame("body too short"))?;
        self.rest = rest;
        Ok(u64::from_le_bytes(*word))
    }

    /// Reads the next byte string, in place.
    #[inline]
    pub fn bytes(&mut self) -> Result<&'a [u8], BadFrame> {
        let len = usize::try_from(self.word()?).map_err(|_| BadFrame("string too long"))?;
        let padded = len.checked_next_multiple_of(8).ok_or(BadFrame("string too long"))?;
        if padded > self.rest.len() {
            return Err(BadFrame("string too long"));
        }
        let (bytes, rest) = self.rest.split_at(padded);
        self.rest = rest;
        Ok(&bytes[..len])
    }

    /// Reads the next byte string as text.
    pub fn text(&mut self) -> Result<&'a str, BadFrame> {
        std::str::from_utf8(self.bytes()?).map_err(|_| BadFrame("text is not UTF-8"))
    }

    /// Returns `true` if the whole body was read.
    pub fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(op: u16) -> Header {
        Header {
            len: 0.into(),
            op: op.into(),
            flags: WAIT.into(),
            thread: 3.into(),
            number: 1.into(),
            seq: 77.into(),
            ack: 0.into(),
            ctx: 5.into(),
        }
    }

    #[test]
    fn a_frame_reads_as_it_was_written() {
        let mut buf = Vec::new();
        let mut w = Writer::new(&mut buf, &header(9));
        w.word(1);
        w.bytes(b"hello");
        w.bytes(b"");
        w.bytes_with(3, |b| b.copy_from_slice(b"abc"));
        w.word(u64::MAX);
        let len = w.finish();
        let parsed = Header::parse(buf[..HEADER].try_into().unwrap()).unwrap();
        assert_eq!((parsed.body_len(), parsed.op.get()), (len, 9));
        let mut r = Reader::new(&buf[HEADER..]);
        assert_eq!(r.word(), Ok(1));
        assert_eq!(r.bytes(), Ok(&b"hello"[..]));
        assert_eq!(r.bytes(), Ok(&b""[..]));
        assert_eq!(r.text(), Ok("abc"));
        assert_eq!(r.word(), Ok(u64::MAX));
        assert!(r.is_empty());
        assert!(r.word().is_err());
    }

    #[test]
    fn lengths_are_bounded() {
        let mut h = header(1);
        h.len = (MAX_BODY as u32 + 8).into();
        assert!(Header::parse(h.as_bytes().try_into().unwrap()).is_err());
        h.len = 12.into();
        assert!(Header::parse(h.as_bytes().try_into().unwrap()).is_err());
        for len in [9u64, 1 << 40, u64::MAX] {
            let mut body = len.to_le_bytes().to_vec();
            body.extend_from_slice(&[0; 8]);
            assert!(Reader::new(&body).bytes().is_err(), "{len}");
        }
    }
}
