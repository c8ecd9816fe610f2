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
