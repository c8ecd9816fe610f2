//! Chunks of one bulk lane that the other end has not acknowledged, in their order.
//!
//! A chunk's number is its position among all chunks of the lane, from 1, whatever connection
//! carries it. The owner keeps each chunk's bytes until [`Flight::arrived`] returns it.

use std::collections::VecDeque;
use std::io;
use std::time::Duration;

use gpusession_proto::frame::{BadFrame, HEADER, Header, op};
use gpusession_proto::preface::{Refusal, refusal_len};

use crate::resume::Counts;
use crate::transport::{Transport, Wait};

/// Chunks of a lane that its peer has not acknowledged.
#[derive(Debug, Clone, Hash)]
pub struct Flight<C> {
    chunks: VecDeque<C>,
    /// Number of the first of them.
    first: u64,
    /// Number of the chunk that the present connection carries next.
    cursor: u64,
    /// Whether a thread writes the chunk before the cursor.
    writing: bool,
    acknowledged: u64,
}

impl<C> Default for Flight<C> {
    fn default() -> Self {
        Self { chunks: VecDeque::new(), first: 1, cursor: 1, writing: false, acknowledged: 0 }
    }
}

impl<C> Flight<C> {
    /// Returns the position of a lane's sender.
    pub fn counts(&self) -> Counts {
        Counts { received: 0, first: self.first, next: self.first + self.chunks.len() as u64 }
    }

    /// Returns `true` if no chunk is under way.
    pub fn is_empty(&self) -> bool {
        self.chunks.is_empty()
    }

    /// Returns `true` if the present connection has carried every chunk.
    pub fn is_carried(&self) -> bool {
        self.cursor == self.counts().next
    }

    /// Adds a chunk behind all others.
    pub fn push(&mut self, chunk: C) {
        self.chunks.push_back(chunk);
    }

    /// Begins to write the next chunk that the present connection has not carried, if there is one:
    /// its number and itself.
    pub fn begin(&mut self) -> Option<(u64, &mut C)> {
        let index = usize::try_from(self.cursor - self.first).ok()?;
        let chunk = self.chunks.get_mut(index)?;
        let number = self.cursor;
        self.cursor += 1;
        self.writing = true;
        Some((number, chunk))
    }

    /// Ends the writing of the chunk that [`Flight::begin`] returned; it stays under way.
    pub fn written(&mut self) -> Option<&mut C> {
        let index = usize::try_from((self.cursor - 1).checked_sub(self.first)?).ok()?;
        std::mem::take(&mut self.writing).then(|| self.chunks.get_mut(index)).flatten()
    }

    /// Notes that the other end has all chunks up to a number.
    pub fn acknowledge(&mut self, number: u64) -> Result<(), BadFrame> {
        if number >= self.cursor {
            return Err(BadFrame("acknowledges what was not sent"));
        }
        self.acknowledged = self.acknowledged.max(number);
        Ok(())
    }

    /// Removes the first chunk if it has arrived and no thread reads it any more.
    pub fn arrived(&mut self) -> Option<C> {
        if self.first > self.acknowledged || self.busy(0) {
            return None;
        }
        let chunk = self.chunks.pop_front()?;
        self.first += 1;
        Some(chunk)
    }

    /// Removes a chunk that will not arrive, unless a thread reads it.
    pub fn give_up(&mut self) -> Option<C> {
        if self.busy(self.chunks.len().checked_sub(1)?) {
            return None;
        }
        self.chunks.pop_back()
    }

    /// Returns the chunks that have not arrived.
    pub fn all(&self) -> impl Iterator<Item = &C> {
        self.chunks.iter()
    }

    /// Returns the chunks that no thread reads.
    pub fn at_rest(&mut self) -> impl Iterator<Item = &mut C> {
        let busy = self.writing.then(|| self.cursor - 1 - self.first);
        (0..).zip(&mut self.chunks).filter(move |(i, _)| Some(*i) != busy).map(|(_, chunk)| chunk)
    }

    /// Continues on a connection whose other end has `received` chunks, which [`Counts::fits`].
    pub fn restart(&mut self, received: u64) {
        self.acknowledged = self.acknowledged.max(received);
        (self.cursor, self.writing) = (received + 1, false);
    }

    fn busy(&self, index: usize) -> bool {
        self.writing && self.first + index as u64 + 1 == self.cursor
    }
}

/// End of a lane's connection.
#[derive(Debug)]
pub enum Ended {
    /// The connection has ended or broken; another one may continue.
    Broken(io::Error),
    /// The other end does not want the lane, or makes no sense.
    Fatal(String),
}

impl From<io::Error> for Ended {
    fn from(error: io::Error) -> Self {
        Self::Broken(error)
    }
}

impl From<BadFrame> for Ended {
    fn from(bad: BadFrame) -> Self {
        Self::Fatal(bad.to_string())
    }
}

/// Receives the next frame's header on a lane; a refusal may come in its place.
pub fn next_header(transport: &Transport) -> Result<Header, Ended> {
    let mut head = [0; HEADER];
    let mut have = 0;
    loop {
        match transport.recv(&mut head[have..], Wait::Spin(Duration::ZERO))? {
            0 => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
            n => have += n,
        }
        // Its length has the high bit set. It may be shorter than a header.
        let refused = (have >= 4).then(|| refusal_len([head[0], head[1], head[2], head[3]])).flatten();
        if let Some(len) = refused {
            let mut refusal = head[..have.min(4 + len)].to_vec();
            let known = refusal.len();
            refusal.resize(4 + len, 0);
            transport.recv_exact(&mut refusal[known..], Wait::Spin(Duration::ZERO))?;
            let reason = Refusal::read(&refusal).map_or_else(String::new, |refusal| refusal.reason);
            return Err(Ended::Fatal(reason));
        }
        if have == HEADER {
            return Ok(Header::parse(&head)?);
        }
    }
}

/// Receives acknowledgements of chunks until the connection ends.
///
/// `heard` gets the number of the latest chunk that has arrived, and that of a hold or 0.
pub fn acknowledgements(
    transport: &Transport,
    mut heard: impl FnMut(u64, u64) -> Result<(), BadFrame>,
) -> Ended {
    let mut next = || -> Result<(), Ended> {
        let header = next_header(transport)?;
        if header.op.get() != op::ACK || header.body_len() > 0 {
            return Err(BadFrame("not an acknowledgement").into());
        }
        Ok(heard(header.ack.get(), header.ctx.get())?)
    };
    loop {
        if let Err(ended) = next() {
            return ended;
        }
    }
}

#[cfg(test)]
mod model;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Clone)]
    enum Step {
        Push,
        /// A chunk is written whole.
        Write,
        /// The other end has one more of the written chunks.
        Arrive,
        /// Its latest count is heard.
        Hear,
        /// The connection breaks in the middle of a chunk, and comes back.
        Break,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => Just(Step::Push),
            4 => Just(Step::Write),
            3 => Just(Step::Arrive),
            2 => Just(Step::Hear),
            1 => Just(Step::Break),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]

        #[test]
        fn every_chunk_arrives_once_and_is_kept_until_then(steps in prop::collection::vec(step(), 1..120)) {
            let mut flight = Flight::default();
            let (mut pushed, mut line, mut got, mut gone) = (0, VecDeque::new(), 0, 0);
            for step in steps {
                match step {
                    Step::Push => {
                        pushed += 1;
                        flight.push(pushed);
                    }
                    Step::Write => {
                        if let Some((number, chunk)) = flight.begin() {
                            prop_assert_eq!(number, *chunk);
                            line.push_back(number);
                            prop_assert!(flight.at_rest().all(|chunk| *chunk != number));
                            prop_assert_eq!(flight.written().copied(), Some(number));
                        }
                    }
                    Step::Arrive => {
                        if let Some(number) = line.pop_front() {
                            got += 1;
                            prop_assert_eq!(number, got);
                        }
                    }
                    Step::Hear => flight.acknowledge(got).unwrap(),
                    Step::Break => {
                        let _ = flight.begin();
                        line.clear();
                        prop_assert!(flight.counts().fits(got));
                        flight.restart(got);
                    }
                }
                while let Some(chunk) = flight.arrived() {
                    gone += 1;
                    prop_assert_eq!(chunk, gone);
                }
                prop_assert!(gone <= got, "the other end has it");
                prop_assert_eq!(flight.counts().next, pushed + 1);
            }
        }
    }

    #[test]
    fn a_chunk_that_is_being_written_stays() {
        let mut flight = Flight::default();
        flight.push('a');
        flight.push('b');
        assert_eq!(flight.begin().map(|(number, chunk)| (number, *chunk)), Some((1, 'a')));
        // The other end has it before the writer's call returns.
        flight.acknowledge(1).unwrap();
        assert_eq!(flight.arrived(), None);
        assert_eq!(flight.at_rest().collect::<Vec<_>>(), [&'b']);
        assert_eq!(flight.give_up(), Some('b'));
        assert_eq!(flight.give_up(), None);
        flight.written();
        assert_eq!(flight.arrived(), Some('a'));
        assert!(flight.is_empty() && flight.written().is_none());
        flight.acknowledge(2).unwrap_err();
    }
}
