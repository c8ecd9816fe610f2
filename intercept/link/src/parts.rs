//! Replies that come in several frames.

use std::collections::HashMap;

use gpusession_proto::frame::{BadFrame, MAX_LONG_BODY};

/// Bytes of incomplete replies of all threads, beyond which the worker is broken.
const MAX_BYTES: usize = 8 * MAX_LONG_BODY;

/// The first parts of replies, by the request's position in the log.
#[derive(Default)]
pub struct Parts {
    bytes: usize,
    replies: HashMap<u64, Vec<u8>>,
}

impl Parts {
    /// Adds the next part of a reply.
    pub fn add(&mut self, seq: u64, part: &[u8]) -> Result<(), BadFrame> {
        self.bytes += part.len();
        if self.bytes > MAX_BYTES || part.is_empty() {
            return Err(BadFrame("parts of a reply"));
        }
        self.replies.entry(seq).or_default().extend_from_slice(part);
        Ok(())
    }

    /// Returns the body of a reply whose last frame has come.
    pub fn complete(&mut self, seq: u64, last: &[u8]) -> Vec<u8> {
        // Nearly always.
        if self.replies.is_empty() {
            return last.to_vec();
        }
        let mut body = self.replies.remove(&seq).unwrap_or_default();
        self.bytes -= body.len();
        body.extend_from_slice(last);
        body
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reply_consists_of_its_own_parts() {
        let mut parts = Parts::default();
        assert_eq!(parts.complete(1, b"whole"), b"whole");
        for (seq, part) in [(2, b"a"), (3, b"x"), (2, b"b")] {
            parts.add(seq, part).unwrap();
        }
        assert_eq!(parts.complete(4, b"other"), b"other");
        assert_eq!(parts.complete(2, b"c"), b"abc");
        assert_eq!(parts.complete(3, b""), b"x");
        assert_eq!((parts.bytes, parts.replies.len()), (0, 0));
    }

    #[test]
    fn worker_cannot_fill_the_memory_of_the_program() {
        let mut parts = Parts::default();
        assert!(parts.add(1, b"").is_err(), "it would cost memory without end");
        let part = vec![0; MAX_LONG_BODY / 64];
        let added = (0..1000).take_while(|seq| parts.add(*seq % 9, &part).is_ok()).count();
        assert_eq!(added, 8 * 64);
    }
}
