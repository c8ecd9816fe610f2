//! One stream: its handle, the positions of its work, the capture that it takes part in.

use std::sync::atomic::AtomicI32;
use std::sync::{Arc, PoisonError, RwLock};

use gpusession_link::lanes::On;

use crate::capture::{Capture, capturing};
use crate::client::Client;
use crate::positions::StreamPositions;

/// `CU_STREAM_NON_BLOCKING`
const NON_BLOCKING: u32 = 1;

/// One stream.
pub struct Stream {
    pub client: &'static Client,
    /// 0 for a legacy default stream.
    pub handle: u64,
    pub ctx: u64,
    /// `CUstream_flags`
    pub flags: u32,
    /// Within the device's range; a smaller number is a higher priority.
    pub priority: AtomicI32,
    /// Number for `cuStreamGetId`.
    pub id: u64,
    /// Positions of its work in the client's log.
    pub positions: StreamPositions,
    capture: RwLock<Option<Arc<Capture>>>,
}

impl Stream {
    /// Makes a stream without work.
    pub fn new(client: &'static Client, handle: u64, ctx: u64, flags: u32, priority: i32, id: u64) -> Self {
        let blocking = handle == 0 || flags & NON_BLOCKING == 0;
        let positions = StreamPositions::new(On { ctx, stream: handle, blocking });
        let priority = AtomicI32::new(priority);
        Self { client, handle, ctx, flags, priority, id, positions, capture: RwLock::new(None) }
    }

    /// Returns the stream's name in transfers.
    pub fn on(&self) -> On {
        self.positions.on()
    }

    /// Returns `true` if the stream is ordered with the default stream.
    pub fn blocking(&self) -> bool {
        self.on().blocking
    }

    /// Notes that the frame at this position put work on the stream.
    #[inline]
    pub fn worked(&self, seq: u64) {
        self.positions.worked(&self.client.positions, seq);
    }

    /// Notes a frame that copies bytes, which the program has handed over, to memory that surely
    /// exists.
    pub fn copied_in(&self, seq: u64) {
        self.positions.copied_in(&self.client.positions, seq);
    }

    /// Returns `true` if all work on the stream is known to be complete.
    pub fn idle(&self) -> bool {
        self.positions.idle(&self.client.positions)
    }

    /// Returns `true` if the stream is idle, and so is all work that its next work would wait for.
    pub fn quiet(&self) -> bool {
        self.positions.quiet(&self.client.positions)
    }

    /// Returns `true` if no other stream has newer work that the stream's next work would wait for.
    pub fn is_newest(&self) -> bool {
        self.positions.is_newest(&self.client.positions)
    }

    /// Returns `true` if the stream's work up to a position is known to be complete.
    pub fn done(&self, seq: u64) -> bool {
        self.positions.done(&self.client.positions, seq)
    }

    /// Returns `true` if all that the stream's work has printed is there.
    pub fn is_flushed(&self) -> bool {
        self.positions.is_flushed(&self.client.positions)
    }

    /// Notes that a wait has found the stream's work up to this position complete.
    pub fn synced(&self, seq: u64) {
        self.positions.synced(seq);
    }

    /// Notes that the stream's work up to this position is complete, without a wait for it.
    pub fn finished(&self, seq: u64) {
        self.positions.finished(seq);
    }

    /// Returns the capture that the stream takes part in.
    #[inline]
    pub fn capture(&self) -> Option<Arc<Capture>> {
        if !capturing() {
            return None;
        }
        self.capture.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Joins a capture, after a wait for one of its events.
    pub fn join(&self, capture: &Arc<Capture>) {
        *self.capture.write().unwrap_or_else(PoisonError::into_inner) = Some(capture.clone());
    }

    /// Leaves a capture that ends, if it takes part in it.
    pub fn leave(&self, capture: &Arc<Capture>) {
        let mut mine = self.capture.write().unwrap_or_else(PoisonError::into_inner);
        if mine.as_ref().is_some_and(|c| Arc::ptr_eq(c, capture)) {
            *mine = None;
        }
    }
}
