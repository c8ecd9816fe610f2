//! Frames that the other end of a connection has not acknowledged, in their order.
//!
//! A frame's number is its position in the log, from 1. The log is the memory from which frames are
//! sent again after a break. A connection that cannot come back needs none.

use std::collections::VecDeque;

use gpusession_proto::frame::{HEADER, Header};

/// Usual size of a block, in bytes.
const BLOCK: usize = 256 << 10;
/// Longest batch that is copied into a block; a longer one becomes a block itself.
const COPIED: usize = 16 << 10;

/// Frames that the worker has not acknowledged.
#[derive(Debug, Default, Clone, Hash)]
pub struct Log {
    blocks: VecDeque<Block>,
    /// Number of the latest frame.
    last: u64,
    /// Highest number that the other end has acknowledged.
    acknowledged: u64,
    bytes: usize,
    /// An empty block for the next use.
    spare: Vec<u8>,
}

#[derive(Debug, Clone, Hash)]
struct Block {
    /// Whole frames.
    bytes: Vec<u8>,
    first: u64,
    last: u64,
}

impl Log {
    /// Returns the number of the next frame.
    pub fn next(&self) -> u64 {
        self.last + 1
    }

    /// Returns the number of the first frame that is still needed.
    pub fn first(&self) -> u64 {
        self.acknowledged + 1
    }

    /// Returns the memory that the frames take, in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Takes a batch of whole frames, the latest of which has the number `last`; empties `batch`.
    pub fn keep(&mut self, batch: &mut Vec<u8>, last: u64) {
        if batch.is_empty() {
            return;
        }
        let first = self.next();
        self.last = last;
        self.bytes += batch.len();
        if batch.len() <= COPIED {
            let room = |block: &&mut Block| block.bytes.capacity() - block.bytes.len() >= batch.len();
            if let Some(block) = self.blocks.back_mut().filter(room) {
                block.bytes.extend_from_slice(batch);
                block.last = last;
            } else {
                let mut bytes = std::mem::take(&mut self.spare);
                bytes.reserve_exact(BLOCK);
                bytes.extend_from_slice(batch);
                self.blocks.push_back(Block { bytes, first, last });
            }
            batch.clear();
        } else {
            let empty = std::mem::take(&mut self.spare);
            self.blocks.push_back(Block { bytes: std::mem::replace(batch, empty), first, last });
        }
    }

    /// Counts a batch of frames without keeping it; empties `batch`.
    pub fn pass(&mut self, batch: &mut Vec<u8>, last: u64) {
        self.last = last;
        self.acknowledged = last;
        batch.clear();
        if self.bytes > 0 {
            self.blocks.clear();
            self.bytes = 0;
        }
    }

    /// Gives up the frames up to a number; whole blocks become free.
    pub fn acknowledge(&mut self, number: u64) {
        self.acknowledged = self.acknowledged.max(number.min(self.last));
        while self.blocks.front().is_some_and(|block| block.last <= self.acknowledged)
            && let Some(block) = self.blocks.pop_front()
        {
            self.bytes -= block.bytes.len();
            if block.bytes.capacity() <= 2 * BLOCK {
                self.spare = block.bytes;
                self.spare.clear();
            }
        }
    }

    /// Returns the bytes of all frames after a number that was acknowledged at least.
    pub fn after(&self, number: u64) -> impl Iterator<Item = &[u8]> {
        self.blocks.iter().filter(move |block| block.last > number).map(move |block| {
            let known = number.saturating_sub(block.first - 1);
            (0..known).fold(&block.bytes[..], |rest, _| rest.get(frame_len(rest)..).unwrap_or_default())
        })
    }
}

/// Returns the length of the first of several whole frames.
pub(crate) fn frame_len(frames: &[u8]) -> usize {
    let header = frames.first_chunk::<HEADER>().and_then(|bytes| Header::parse(bytes).ok());
    header.map_or(frames.len(), |header| HEADER + header.body_len())
}

#[cfg(test)]
mod tests {
    use gpusession_proto::frame::Writer;
    use proptest::prelude::*;

    use super::*;

    fn frame(number: u64, len: usize) -> Vec<u8> {
        let mut header = Header::empty();
        header.seq = number.into();
        let mut bytes = Vec::new();
        let mut w = Writer::new(&mut bytes, &header);
        w.bytes_with(len, |body| body.fill(number as u8));
        w.finish();
        bytes
    }

    fn numbers(mut bytes: &[u8]) -> Vec<u64> {
        let mut numbers = Vec::new();
        while let Some(head) = bytes.first_chunk::<HEADER>() {
            let header = Header::parse(head).unwrap();
            numbers.push(header.seq.get());
            let whole = frame(header.seq.get(), header.body_len() - 8);
            // Lengths are multiples of 8 here, so that the frame can be made again.
            assert_eq!(bytes[..whole.len()], whole, "frame {}", header.seq);
            bytes = &bytes[whole.len()..];
        }
        assert!(bytes.is_empty(), "a part of a frame");
        numbers
    }

    #[derive(Debug, Clone)]
    enum Step {
        /// Frames of these lengths, in words, are sent in one batch.
        Send(Vec<usize>),
        /// So many bytes of what is under way arrive.
        Arrive(usize),
        /// The connection breaks, with all that is under way, and comes back.
        Break,
        /// The sender hears how far the receiver is.
        Hear,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => prop::collection::vec(prop_oneof![8 => 0usize..40, 1 => 2040usize..2060], 1..6)
                .prop_map(Step::Send),
            4 => prop_oneof![0usize..200, 10_000usize..60_000].prop_map(Step::Arrive),
            1 => Just(Step::Break),
            2 => Just(Step::Hear),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Any number of connections delivers each frame once, in order, and the log forgets the
        /// frames that it need not keep.
        #[test]
        fn every_frame_arrives_once(steps in prop::collection::vec(step(), 1..40)) {
            let (mut log, mut line, mut partial) = (Log::default(), VecDeque::new(), Vec::new());
            let (mut received, mut sent, mut heard, mut longest) = (0, 0, 0, 0);
            // Takes whole frames off `partial`, as a receiver does.
            let take = |partial: &mut Vec<u8>, received: &mut u64| {
                while partial.len() >= HEADER && partial.len() >= frame_len(partial) {
                    let rest = partial.split_off(frame_len(partial));
                    assert_eq!(numbers(partial), [*received + 1]);
                    *received += 1;
                    *partial = rest;
                }
            };
            for step in steps {
                match step {
                    Step::Send(lengths) => {
                        let mut batch = Vec::new();
                        for len in lengths {
                            sent += 1;
                            batch.extend_from_slice(&frame(sent, 8 * len));
                        }
                        longest = longest.max(batch.len());
                        line.extend(batch.iter().copied());
                        log.keep(&mut batch, sent);
                        prop_assert!(batch.is_empty());
                    }
                    Step::Arrive(bytes) => {
                        partial.extend(line.drain(..bytes.min(line.len())));
                        take(&mut partial, &mut received);
                    }
                    Step::Break => {
                        partial.clear();
                        prop_assert!(log.first() <= received + 1 && received < log.next());
                        line = log.after(received).flatten().copied().collect();
                        log.acknowledge(received);
                        heard = received;
                    }
                    Step::Hear => {
                        log.acknowledge(received);
                        heard = received;
                    }
                }
                let rest: Vec<u8> = log.after(heard).flatten().copied().collect();
                prop_assert!(numbers(&rest).into_iter().eq(heard + 1..=sent));
                let needed = rest.len();
                prop_assert!(log.bytes() <= needed + BLOCK + longest, "{} for {}", log.bytes(), needed);
            }
            partial.extend(line.drain(..));
            take(&mut partial, &mut received);
            prop_assert_eq!(received, sent);
        }
    }

    #[test]
    fn long_batches_are_not_copied_and_blocks_are_used_again() {
        let mut log = Log::default();
        let mut batch = frame(1, 1 << 20);
        let at = batch.as_ptr();
        log.keep(&mut batch, 1);
        assert_eq!(log.after(0).next().map(<[u8]>::as_ptr), Some(at));
        let mut batch = frame(2, 64);
        log.keep(&mut batch, 2);
        let block = log.after(1).next().map(<[u8]>::as_ptr);
        log.acknowledge(2);
        assert_eq!(log.bytes(), 0);
        log.keep(&mut frame(3, 64), 3);
        assert_eq!(log.after(2).next().map(<[u8]>::as_ptr), block);
    }

    #[test]
    fn a_log_that_is_not_needed_keeps_nothing() {
        let mut log = Log::default();
        log.keep(&mut frame(1, 64), 1);
        log.pass(&mut frame(2, 64), 2);
        assert_eq!((log.bytes(), log.first(), log.next()), (0, 3, 3));
        // An acknowledgement beyond the end is no claim on later frames.
        log.acknowledge(u64::MAX);
        assert_eq!((log.first(), log.next()), (3, 3));
    }
}
