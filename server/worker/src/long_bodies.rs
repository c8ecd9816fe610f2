//! Requests whose body comes in several frames.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use gpusession_proto::frame::{BadFrame, CONTINUED, LONG_REQUEST_BYTES, MAX_LONG_BODY};

use crate::answer::Failure;
use crate::calls;
use crate::driver::status;
use crate::frame::{Body, Frame};

/// Parts of requests that have not come, and requests that executors replay: [`MAX_LONG_BODY`]
/// together.
#[derive(Default)]
pub struct LongBodies(Mutex<Held>);

#[derive(Default)]
struct Held {
    /// By the program's thread.
    parts: HashMap<u32, Vec<u8>>,
    /// Bytes of the requests that executors replay.
    replayed: usize,
}

impl Held {
    /// Returns `true` if there is room for this many bytes more.
    fn has_room(&self, bytes: usize) -> bool {
        let parts: usize = self.parts.values().map(|part| part.len() + LONG_REQUEST_BYTES).sum();
        self.replayed + parts + bytes <= MAX_LONG_BODY
    }
}

/// A request with its whole body.
pub struct Whole<'a> {
    /// The body is dropped before it counts no more.
    pub frame: Frame,
    _counted: Counted<'a>,
}

struct Counted<'a> {
    bodies: &'a LongBodies,
    bytes: usize,
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.bodies.lock().replayed -= self.bytes;
    }
}

impl LongBodies {
    fn lock(&self) -> MutexGuard<'_, Held> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a `BODY_PART`.
    ///
    /// Parts beyond the bound are dropped; their request then fails by its length.
    pub fn add(&self, frame: &Frame) {
        let mut held = self.lock();
        if held.has_room(frame.body.len() + LONG_REQUEST_BYTES) {
            held.parts.entry(frame.thread()).or_default().extend_from_slice(&frame.body);
        }
    }

    /// Returns the request with its whole body if its own is only the beginning.
    pub fn joined(&self, frame: &Frame) -> Result<Option<Whole<'_>>, Failure> {
        if frame.header.flags.get() & CONTINUED == 0 {
            return Ok(None);
        }
        if !calls::may_continue(frame.header.op.get()) {
            return Err(BadFrame("an operation that has no long body").into());
        }
        let (own, len) = frame.body.split_last_chunk().ok_or(BadFrame("body too short"))?;
        let mut held = self.lock();
        let rest = held.parts.remove(&frame.thread());
        let rest = rest.filter(|rest| rest.len() as u64 == u64::from_le_bytes(*len));
        let mut body = rest.ok_or(status::OUT_OF_MEMORY)?;
        let bytes = own.len() + body.len();
        if !held.has_room(bytes) {
            return Err(status::OUT_OF_MEMORY.into());
        }
        held.replayed += bytes;
        drop(held);
        let counted = Counted { bodies: self, bytes };
        // In place: a copy would need the memory twice.
        body.extend_from_slice(own);
        body.rotate_right(own.len());
        let frame = Frame { header: frame.header, body: Body::Shared(body.into()) };
        Ok(Some(Whole { frame, _counted: counted }))
    }
}

#[cfg(test)]
mod tests {
    use gpusession_proto::frame::{BODY_PART, Header, MAX_BODY, op};

    use super::*;

    fn frame(thread: u32, flags: u16, words: &[u64]) -> Frame {
        let body: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let mut header = Header::empty();
        (header.op, header.thread, header.flags) = (op::GRAPH_ADD.into(), thread.into(), flags.into());
        Frame { header, body: Body::Shared(body.into()) }
    }

    /// Makes the longest part of a thread.
    fn parts() -> impl Fn(u32) -> Frame {
        let part = frame(0, 0, &vec![0; BODY_PART / 8]);
        move |thread| {
            let mut part = part.clone();
            part.header.thread = thread.into();
            part
        }
    }

    fn refused(joined: Result<Option<Whole<'_>>, Failure>) -> bool {
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
        let mut r = joined.frame.reader();
        assert_eq!([(); 4].map(|()| r.word()), [Ok(1), Ok(2), Ok(3), Ok(4)]);
        assert!(r.is_empty());
        assert!(refused(bodies.joined(&frame(1, CONTINUED, &[1, 16]))), "its parts are gone");
        assert!(refused(bodies.joined(&frame(2, CONTINUED, &[1, 16]))), "a part is missing");
        assert!(matches!(bodies.joined(&frame(1, CONTINUED, &[])), Err(Failure::Malformed(_))));
    }

    #[test]
    fn parts_without_a_request_are_bounded() {
        let bodies = LongBodies::default();
        let part = parts();
        for thread in 0..1000 {
            bodies.add(&part(thread));
            bodies.add(&frame(thread + 1000, 0, &[]));
        }
        assert!(bodies.lock().has_room(0) && !bodies.lock().has_room(2 * BODY_PART));
        assert!(refused(bodies.joined(&frame(999, CONTINUED, &[BODY_PART as u64]))));
    }

    #[test]
    fn request_counts_until_it_is_dropped() {
        const PARTS: usize = 100;
        let bodies = LongBodies::default();
        let part = parts();
        let add = |thread| (0..PARTS).for_each(|_| bodies.add(&part(thread)));
        let joined = |thread| bodies.joined(&frame(thread, CONTINUED, &[1, (PARTS * BODY_PART) as u64]));
        add(1);
        let Ok(Some(whole)) = joined(1) else { panic!("no request") };
        add(2);
        assert!(refused(joined(2)), "both would be longer than the longest one");
        drop(whole);
        add(2);
        assert!(joined(2).is_ok());
        assert_eq!(bodies.lock().replayed, 0);
    }

    #[test]
    fn longest_request_fits() {
        let bodies = LongBodies::default();
        let own = vec![0; MAX_BODY / 8 - 1];
        let rest = MAX_LONG_BODY - own.len() * 8;
        let part = parts();
        (0..rest / BODY_PART).for_each(|_| bodies.add(&part(1)));
        bodies.add(&frame(1, 0, &vec![0; rest % BODY_PART / 8]));
        let last = [&own[..], &[rest as u64]].concat();
        let Ok(Some(whole)) = bodies.joined(&frame(1, CONTINUED, &last)) else { panic!("no request") };
        assert_eq!(whole.frame.body.len(), MAX_LONG_BODY);
    }

    #[test]
    fn operation_that_waits_has_no_long_body() {
        let bodies = LongBodies::default();
        for operation in [op::STREAM_SYNC, op::COPY_TO_DEVICE, op::COPY_BOX, op::WRITE_HOST, op::BODY_PART] {
            bodies.add(&frame(1, 0, &[3]));
            let mut last = frame(1, CONTINUED, &[1, 8]);
            last.header.op = operation.into();
            assert!(matches!(bodies.joined(&last), Err(Failure::Malformed(_))), "{operation}");
        }
    }
}
