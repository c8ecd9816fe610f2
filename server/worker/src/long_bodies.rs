//! Requests whose body comes in several frames.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use gpusession_proto::frame::{BadFrame, CONTINUED, MAX_LONG_BODY};

use crate::answer::Failure;
use crate::driver::status;
use crate::frame::{Body, Frame};

/// Bytes that an entry counts for besides its parts, so that empty ones are bounded, too.
const ENTRY_BYTES: usize = 4096;

/// Parts of bodies whose request has not come, by the program's thread.
#[derive(Default)]
pub struct LongBodies(Mutex<HashMap<u32, Vec<u8>>>);

impl LongBodies {
    /// Adds a `BODY_PART`.
    ///
    /// Parts beyond the bound are dropped; their request then fails by its length.
    pub fn add(&self, frame: &Frame) {
        let mut parts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let held: usize = parts.values().map(|part| part.len() + ENTRY_BYTES).sum();
        if held + frame.body.len() + ENTRY_BYTES <= MAX_LONG_BODY {
            parts.entry(frame.thread()).or_default().extend_from_slice(&frame.body);
        }
    }

    /// Returns the request with its whole body if its own is only the beginning.
    pub fn joined(&self, frame: &Frame) -> Result<Option<Frame>, Failure> {
        if frame.header.flags.get() & CONTINUED == 0 {
            return Ok(None);
        }
        let (own, len) = frame.body.split_last_chunk().ok_or(BadFrame("body too short"))?;
        let rest = self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&frame.thread());
        let rest = rest.filter(|rest| rest.len() as u64 == u64::from_le_bytes(*len));
        let body = [own, &rest.ok_or(status::OUT_OF_MEMORY)?].concat();
        Ok(Some(Frame { header: frame.header, body: Body::Shared(body.into()) }))
    }
}

#[cfg(test)]
mod tests {
    use gpusession_proto::frame::{BODY_PART, Header};

    use super::*;

    fn frame(thread: u32, flags: u16, words: &[u64]) -> Frame {
        let body: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let mut header = Header::empty();
        (header.thread, header.flags) = (thread.into(), flags.into());
        Frame { header, body: Body::Shared(body.into()) }
    }

    fn refused(joined: Result<Option<Frame>, Failure>) -> bool {
        matches!(joined, Err(Failure::Status(status::OUT_OF_MEMORY)))
    }

    #[test]
    fn request_gets_the_parts_of_its_thread() {
        let bodies = LongBodies::default();
        assert!(matches!(bodies.joined(&frame(1, 0, &[9])), Ok(None)));
        for (thread, word) in [(1, 3), (2, 7), (1, 4)] {
            bodies.add(&frame(thread, 0, &[word]));
        }
        let Ok(Some(joined)) = bodies.joined(&frame(1, CONTINUED, &[1, 2, 16])) else { panic!("no request") };
        let mut r = joined.reader();
        assert_eq!([(); 4].map(|()| r.word()), [Ok(1), Ok(2), Ok(3), Ok(4)]);
        assert!(r.is_empty());
        assert!(refused(bodies.joined(&frame(1, CONTINUED, &[1, 16]))), "its parts are gone");
        assert!(refused(bodies.joined(&frame(2, CONTINUED, &[1, 16]))), "a part is missing");
        assert!(matches!(bodies.joined(&frame(1, CONTINUED, &[])), Err(Failure::Malformed(_))));
    }

    #[test]
    fn parts_without_a_request_are_bounded() {
        let bodies = LongBodies::default();
        let part = vec![0; BODY_PART / 8];
        for thread in 0..1000 {
            bodies.add(&frame(thread, 0, &part));
            bodies.add(&frame(thread + 1000, 0, &[]));
        }
        let held = || bodies.0.lock().unwrap().values().map(|part| part.len() + ENTRY_BYTES).sum::<usize>();
        assert!(held() <= MAX_LONG_BODY && held() > MAX_LONG_BODY - 2 * BODY_PART, "{}", held());
        assert!(refused(bodies.joined(&frame(999, CONTINUED, &[BODY_PART as u64]))));
    }
}
