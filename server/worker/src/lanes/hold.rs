//! Holding the program back while streams that stand still have all slots to the device.
//!
//! The program then sends only the transfers that a stream has reached, which the worker names one
//! by one. Chunks that were under way, and those named ones, may lie in ordinary memory, from which
//! the driver copies at once: their streams do not stand still. So every stream proceeds that would
//! proceed on a local card.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use crate::replies::Replies;

/// Interval in which an executor looks whether its stream has reached a copy that is held back.
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Most ordinary memory for chunks of named transfers, in bytes.
const MAX_WANTED: usize = 64 << 20;
/// Most ordinary memory for other chunks, which were under way: more than sockets of eight lanes
/// hold.
const MAX_AHEAD: usize = 256 << 20;

/// Whether the program is held back, and the ordinary memory of chunks.
#[derive(Default)]
pub(super) struct Hold {
    /// Named transfers, while the program is held back.
    wanted: Option<HashSet<u64>>,
    /// Bytes of chunks that were under way, and of named transfers.
    bytes: [usize; 2],
}

/// A chunk's ordinary memory.
pub struct Spill {
    /// Bytes and padding.
    pub bytes: Vec<u8>,
    wanted: bool,
}

impl Hold {
    /// Returns `true` if the program does not send this transfer now.
    pub(super) fn holds_back(&self, transfer: u64) -> bool {
        self.wanted.as_ref().is_some_and(|wanted| !wanted.contains(&transfer))
    }

    /// Holds the program back; `false` if it is held back already.
    pub(super) fn begin(&mut self) -> bool {
        let begins = self.wanted.is_none();
        self.wanted.get_or_insert_default();
        begins
    }

    /// Names a transfer; `false` if the program sends it anyway.
    pub(super) fn want(&mut self, transfer: u64) -> bool {
        self.wanted.as_mut().is_some_and(|wanted| wanted.insert(transfer))
    }

    /// Lets the program send everything; `false` if it does so already.
    pub(super) fn end(&mut self) -> bool {
        self.wanted.take().is_some()
    }

    /// Returns memory for a chunk, if the program is held back and there is room.
    pub(super) fn spill(&mut self, transfer: u64, len: usize) -> Option<Spill> {
        let wanted = self.wanted.as_ref()?.contains(&transfer);
        let (bytes, most) = match wanted {
            true => (&mut self.bytes[1], MAX_WANTED),
            false => (&mut self.bytes[0], MAX_AHEAD),
        };
        (*bytes + len <= most).then(|| {
            *bytes += len;
            Spill { bytes: vec![0; len], wanted }
        })
    }

    /// Takes back memory that nothing reads.
    pub(super) fn take_back(&mut self, spill: Spill) {
        self.bytes[usize::from(spill.wanted)] -= spill.bytes.len();
    }
}

/// Sends what the program shall do, in the order of the changes.
#[derive(Default)]
pub(super) struct Teller {
    /// Absent: the program cannot be held back.
    pub(super) replies: OnceLock<Arc<Replies>>,
    order: Mutex<()>,
}

impl Teller {
    /// Sends a frame if `change` has changed something; returns `true` if it has.
    ///
    /// `change` must release its locks: the send may wait for the program.
    pub(super) fn tell(&self, op: u16, transfer: u64, change: impl FnOnce() -> bool) -> bool {
        let Some(replies) = self.replies.get() else { return false };
        let _order = self.order.lock().unwrap_or_else(PoisonError::into_inner);
        let changed = change();
        if changed {
            replies.send_with(op, transfer, 0, |_| {});
        }
        changed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_chunks_is_bounded_each_kind_by_itself() {
        let mut hold = Hold::default();
        assert!(hold.spill(1, 8).is_none() && !hold.holds_back(1), "the program sends everything");
        assert!(hold.begin() && !hold.begin() && hold.want(1) && !hold.want(1));
        assert!(!hold.holds_back(1) && hold.holds_back(2));
        let ahead = hold.spill(2, MAX_AHEAD).unwrap();
        assert!(hold.spill(3, 8).is_none());
        let named = hold.spill(1, MAX_WANTED - 8).unwrap();
        assert!(hold.spill(1, 16).is_none());
        assert!(hold.end() && !hold.end() && !hold.want(2));
        hold.take_back(ahead);
        hold.take_back(named);
        assert_eq!(hold.bytes, [0, 0]);
    }
}
