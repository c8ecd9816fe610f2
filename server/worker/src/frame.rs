//! One frame of the log, with its body.

use bytes::{Buf as _, Bytes, BytesMut};
use gpusession_proto::frame::{Header, Reader};

/// Longest body that a frame carries itself; nearly all launches are shorter.
///
/// Two threads that count the users of one buffer for each frame slow each other down.
const INLINE: usize = 192;

/// One frame of the log.
#[derive(Clone)]
pub struct Frame {
    pub header: Header,
    pub body: Body,
}

/// A frame's body: a multiple of 8 bytes.
#[derive(Clone)]
pub enum Body {
    /// Length and bytes.
    Inline(u8, Aligned),
    /// A part of the reader's buffer.
    Shared(Bytes),
}

/// Bytes aligned as allocated memory is: the driver reads kernel parameters in them.
#[derive(Clone)]
#[repr(align(8))]
pub struct Aligned([u8; INLINE]);

impl Body {
    /// Takes the body off the front of the reader's buffer.
    pub fn take(buf: &mut BytesMut, len: usize) -> Self {
        if len > INLINE {
            return Self::Shared(buf.split_to(len).freeze());
        }
        let mut bytes = Aligned([0; INLINE]);
        buf.copy_to_slice(&mut bytes.0[..len]);
        Self::Inline(len as u8, bytes)
    }
}

impl std::ops::Deref for Body {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Inline(len, bytes) => &bytes.0[..usize::from(*len)],
            Self::Shared(bytes) => bytes,
        }
    }
}

impl Frame {
    /// Returns the number of the client thread that sent the frame.
    pub fn thread(&self) -> u32 {
        self.header.thread.get()
    }

    /// Returns the bytes of memory that the frame takes while it waits.
    pub fn held_bytes(&self) -> usize {
        let shared = if let Body::Shared(bytes) = &self.body { bytes.len() } else { 0 };
        size_of::<Self>() + shared
    }

    /// Reads the body from its start.
    pub fn reader(&self) -> Reader<'_> {
        Reader::new(&self.body)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(len: usize) -> (Frame, usize) {
        let bytes: Vec<u8> = (0..len + 16).map(|i| i as u8).collect();
        let mut buf = BytesMut::from(&bytes[..]);
        let body = Body::take(&mut buf, len);
        assert_eq!(body[..], bytes[..len]);
        assert_eq!(buf[..], bytes[len..], "the next frame's bytes stay");
        let address = body.as_ptr() as usize;
        (Frame { header: Header::empty(), body }, address)
    }

    #[test]
    fn body_is_whole_whether_the_frame_carries_it_or_not() {
        for len in [0, 8, INLINE - 8, INLINE, INLINE + 8, 1 << 20] {
            let (frame, _) = taken(len);
            assert_eq!(matches!(frame.body, Body::Inline(..)), len <= INLINE, "{len}");
            let mut r = frame.reader();
            (0..len / 8).for_each(|_| assert!(r.word().is_ok()));
            assert!(r.is_empty());
        }
    }

    #[test]
    fn frame_holds_the_memory_of_a_long_body() {
        let short = taken(INLINE).0.held_bytes();
        assert_eq!(short, size_of::<Frame>());
        assert_eq!(taken(4096).0.held_bytes(), size_of::<Frame>() + 4096);
    }

    #[test]
    fn driver_finds_parameters_aligned() {
        let (frame, _) = taken(64);
        let Body::Inline(_, bytes) = &frame.body else { panic!("a short body") };
        assert_eq!(bytes.0.as_ptr() as usize % 8, 0);
    }
}
