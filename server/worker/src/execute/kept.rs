//! Frames that a blocked executor keeps.

use std::collections::{HashMap, VecDeque};
use std::time::Instant;

use gpusession_proto::frame::op;

use crate::frame::Frame;
use crate::order::{self, Sum, Touched};

/// Bytes of a thread's kept frames above which the thread's mark stays behind them.
///
/// A thread with fewer kept bytes is free to continue elsewhere.
pub const KEPT_BYTES: usize = 256 << 10;

/// A frame, and what it touches.
pub struct KeptFrame {
    pub frame: Frame,
    pub touched: Touched,
}

/// Frames of a blocked executor in the log's order.
#[derive(Default)]
pub struct Kept {
    /// Frame that the executor replays.
    current: Option<KeptFrame>,
    later: VecDeque<KeptFrame>,
    /// Objects of all of them, of the present one too.
    sum: Sum,
    /// Start of the present frame if no program thread waits for it, until [`Kept::part`].
    since: Option<Instant>,
}

impl Kept {
    /// Returns the frames of an executor that replays `current`.
    pub fn behind(current: KeptFrame) -> Self {
        let mut sum = Sum::default();
        sum.add(&current.touched);
        Self { current: Some(current), sum, ..Self::default() }
    }

    /// Returns the frames, the one that the executor replays first.
    pub fn frames(&self) -> impl Iterator<Item = &KeptFrame> {
        self.current.iter().chain(&self.later)
    }

    /// Returns the frame that follows the present one.
    pub fn next(&self) -> Option<&KeptFrame> {
        self.later.front()
    }

    /// Returns the number of frames that follow the present one.
    pub fn later(&self) -> usize {
        self.later.len()
    }

    /// Returns the start of the present frame if no program thread waits for it.
    pub fn since(&self) -> Option<Instant> {
        self.since
    }

    /// Returns `true` if the executor replays a frame.
    pub fn replays(&self) -> bool {
        self.current.is_some()
    }

    pub fn push(&mut self, frame: KeptFrame) {
        self.sum.add(&frame.touched);
        self.later.push_back(frame);
    }

    /// Makes the next frame the present one, and returns it.
    pub fn start(&mut self, now: Instant) -> Option<Frame> {
        let next = self.later.pop_front()?;
        let frame = next.frame.clone();
        self.since = order::is_unawaited_copy(&frame).then_some(now);
        self.current = Some(next);
        Some(frame)
    }

    /// Ends the present frame; returns `true` if there was one.
    pub fn finish(&mut self) -> bool {
        let Some(done) = self.current.take() else { return false };
        self.sum.take(&done.touched);
        true
    }

    /// Returns `true` if a later frame depends on one of these.
    pub fn holds(&self, later: &Touched) -> bool {
        self.sum.holds(later)
    }

    /// Returns `true` if a frame of another executor depends on an earlier one of these.
    pub fn holds_earlier(&self, later: &KeptFrame) -> bool {
        let earlier = |kept: &&KeptFrame| kept.frame.header.seq.get() < later.frame.header.seq.get();
        self.sum.holds(&later.touched)
            && self.frames().take_while(earlier).any(|kept| later.touched.depends_on(&kept.touched))
    }

    /// Returns `true` if a frame asks about work of one of these: it is not ready.
    pub fn answers(&self, frame: &Frame, touched: &Touched) -> bool {
        let frames = self.frames().map(|kept| (&kept.frame, &kept.touched));
        order::asks_about((frame, touched), &self.sum, frames)
    }

    /// Takes out the frames that need not wait for the present one, once for each present frame;
    /// nothing if there is none.
    pub fn part(&mut self) -> Option<Vec<KeptFrame>> {
        self.since = None;
        let mut before = Sum::default();
        before.add(&self.current.as_ref()?.touched);
        let (mut stay, mut go) = (VecDeque::new(), Vec::new());
        let mut bytes: HashMap<u32, usize> = HashMap::new();
        for frame in self.later.drain(..) {
            let of_thread = bytes.entry(frame.frame.thread()).or_default();
            let mark = frame.frame.header.op.get() == op::MARK;
            if before.holds(&frame.touched) || mark && *of_thread > KEPT_BYTES {
                before.add(&frame.touched);
                *of_thread += frame.frame.held_bytes();
                stay.push_back(frame);
            } else {
                self.sum.take(&frame.touched);
                go.push(frame);
            }
        }
        self.later = stay;
        Some(go)
    }
}

impl FromIterator<KeptFrame> for Kept {
    fn from_iter<T: IntoIterator<Item = KeptFrame>>(frames: T) -> Self {
        let mut kept = Self::default();
        frames.into_iter().for_each(|frame| kept.push(frame));
        kept
    }
}
