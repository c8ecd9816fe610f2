//! Answers of operations, and the reasons why operations fail.

use gpusession_proto::frame::BadFrame;

use crate::driver::{Status, status};

/// Values of an answer, in words.
#[derive(Default)]
pub struct Answer {
    /// Body of the reply so far.
    pub body: Vec<u8>,
    /// Complete frames that must reach the client before the answer, sent along with it.
    pub before: Vec<u8>,
}

impl Answer {
    /// Appends a word.
    pub fn word(&mut self, value: u64) {
        self.body.extend_from_slice(&value.to_le_bytes());
    }

    /// Appends a byte string.
    pub fn bytes(&mut self, bytes: &[u8]) {
        self.word(bytes.len() as u64);
        self.body.extend_from_slice(bytes);
        self.body.resize(self.body.len().next_multiple_of(8), 0);
    }
}

/// Reason why an operation did not succeed.
pub enum Failure {
    /// The driver refuses, or a check of the worker in its place.
    Status(Status),
    /// A malformed frame: the client is broken or hostile, and its worker exits.
    Malformed(BadFrame),
}

impl From<Status> for Failure {
    fn from(status: Status) -> Self {
        Self::Status(status)
    }
}

impl From<BadFrame> for Failure {
    fn from(bad: BadFrame) -> Self {
        Self::Malformed(bad)
    }
}

/// Outcome of an operation.
pub type Done = Result<(), Failure>;

/// Returns `Err` for a count whose only use would be a huge allocation.
pub fn bounded(count: u64, most: usize) -> Result<usize, Failure> {
    match usize::try_from(count) {
        Ok(n) if n <= most => Ok(n),
        _ => Err(Failure::Status(status::INVALID_VALUE)),
    }
}

#[cfg(test)]
mod tests {
    use gpusession_proto::frame::Reader;

    use super::*;

    #[test]
    fn client_reads_the_values_in_their_order() {
        let mut answer = Answer::default();
        answer.word(7);
        answer.bytes(b"text");
        answer.bytes(b"");
        answer.bytes(&[1; 8]);
        answer.word(8);
        let mut r = Reader::new(&answer.body);
        assert_eq!((r.word(), r.bytes(), r.bytes()), (Ok(7), Ok(&b"text"[..]), Ok(&b""[..])));
        assert_eq!((r.bytes(), r.word(), r.is_empty()), (Ok(&[1; 8][..]), Ok(8), true));
    }

    #[test]
    fn count_beyond_its_bound_is_refused() {
        assert!(matches!(bounded(4, 4), Ok(4)));
        for count in [5, 1 << 40, u64::MAX] {
            assert!(matches!(bounded(count, 4), Err(Failure::Status(status::INVALID_VALUE))), "{count}");
        }
    }
}
