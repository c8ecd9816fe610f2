//! Holding the program back while streams that stand still have all slots to the device.
//!
//! Acknowledgements of chunks tell the program. It then sends only the transfers that a stream has
//! reached, which the worker names one by one. Chunks of these, and those that were under way, may
//! lie in ordinary memory. Each is copied once its stream has reached it, so that the driver copies
//! at once. So every stream proceeds that would proceed on a local card.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use gpusession_proto::frame::{CHUNK, UP_LANES, chunk_room};

use crate::replies::Replies;

/// Interval at which an executor polls whether its stream has reached a held copy.
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Most ordinary memory for chunks of named transfers, in bytes.
const MAX_WANTED: usize = 64 << 20;
/// Most bytes that are under way when a hold begins: of each lane 32 MiB and a chunk.
const MAX_BYTES_IN_FLIGHT: usize = UP_LANES as usize * ((32 << 20) + CHUNK);
/// Most ordinary memory for such chunks; a hold ends only with room for those of the next one.
const MAX_AHEAD: usize = 2 * MAX_BYTES_IN_FLIGHT;

/// Whether the program is held back, and the ordinary memory of chunks.
#[derive(Default)]
pub(super) struct Hold {
    /// Number of the latest hold.
    number: u64,
    /// Named transfers, while the program is held back.
    wanted: Option<HashSet<u64>>,
    /// Costs of chunks that were under way, and of named transfers, in bytes.
    costs: [usize; 2],
}

/// A chunk's ordinary memory.
pub struct Spill {
    /// Bytes and padding.
    pub bytes: Vec<u8>,
    /// Room that it takes: index in `Hold::costs`, and bytes.
    room: Room,
}

/// Room for a chunk in ordinary memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Room {
    kind: usize,
    cost: usize,
}

impl Room {
    /// Returns room for a chunk that is dropped when it has come.
    pub(super) fn to_drop() -> Self {
        Self { kind: 0, cost: 0 }
    }

    /// Allocates the memory.
    pub(super) fn memory(self, len: usize) -> Spill {
        Spill { bytes: vec![0; len], room: self }
    }
}

impl Hold {
    /// Returns the number of the hold in force, or 0.
    pub(super) fn in_force(&self) -> u64 {
        if self.wanted.is_some() { self.number } else { 0 }
    }

    /// Returns `true` if the program does not send this transfer now.
    pub(super) fn holds_back(&self, transfer: u64) -> bool {
        self.wanted.as_ref().is_some_and(|wanted| !wanted.contains(&transfer))
    }

    /// Holds the program back, which acknowledgements of chunks report.
    pub(super) fn begin(&mut self) {
        if self.wanted.is_none() {
            self.number += 1;
            self.wanted = Some(HashSet::new());
        }
    }

    /// Names a transfer; returns the number of the hold, or 0 if the program sends it anyway.
    pub(super) fn want(&mut self, transfer: u64) -> u64 {
        let names = self.wanted.as_mut().is_some_and(|wanted| wanted.insert(transfer));
        if names { self.number } else { 0 }
    }

    /// Forgets a transfer whose frame is done.
    pub(super) fn forget(&mut self, transfer: u64) {
        if let Some(wanted) = &mut self.wanted {
            wanted.remove(&transfer);
        }
    }

    /// Returns `true` if a hold is in force that may end.
    ///
    /// The chunks that were under way have to leave room for those of another one.
    pub(super) fn may_end(&self) -> bool {
        self.wanted.is_some() && self.costs[0] <= MAX_AHEAD - MAX_BYTES_IN_FLIGHT
    }

    /// Lets the program send everything; returns the number of the hold, or 0 if it may not end.
    pub(super) fn end(&mut self) -> u64 {
        if !self.may_end() {
            return 0;
        }
        self.wanted = None;
        self.number
    }

    /// Returns room for a chunk, if the program is held back and there is any.
    pub(super) fn room(&mut self, transfer: u64, len: usize) -> Option<Room> {
        let wanted = self.wanted.as_ref()?.contains(&transfer);
        let (kind, most) = if wanted { (1, MAX_WANTED) } else { (0, MAX_AHEAD) };
        let cost = chunk_room(len);
        (self.costs[kind] + cost <= most).then(|| {
            self.costs[kind] += cost;
            Room { kind, cost }
        })
    }

    /// Takes back memory that nothing reads.
    pub(super) fn take_back(&mut self, spill: &Spill) {
        self.costs[spill.room.kind] -= spill.room.cost;
    }
}

/// Tells the program what to send, in the order of the changes.
#[derive(Default)]
pub(super) struct HoldSender {
    /// Absent: the program cannot be held back.
    pub(super) replies: OnceLock<Arc<Replies>>,
    order: Mutex<()>,
}

impl HoldSender {
    /// Sends a frame with the number of the hold that `change` returns, if it is not 0; returns
    /// `true` if it is not.
    ///
    /// `change` must release its locks: the send may wait for the program.
    pub(super) fn send(&self, op: u16, transfer: u64, change: impl FnOnce() -> u64) -> bool {
        let Some(replies) = self.replies.get() else { return false };
        let _order = self.order.lock().unwrap_or_else(PoisonError::into_inner);
        let hold = change();
        if hold != 0 {
            replies.send_hold(op, transfer, hold);
        }
        hold != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_chunks_is_bounded_each_kind_by_itself() {
        let mut hold = Hold::default();
        assert!(hold.room(1, 8).is_none() && !hold.holds_back(1), "the program sends everything");
        hold.begin();
        assert_eq!((hold.want(1), hold.want(1), hold.in_force()), (1, 0, 1));
        assert!(!hold.holds_back(1) && hold.holds_back(2));
        let small = hold.room(2, 0).unwrap();
        assert_eq!(small.cost, chunk_room(0), "a chunk without bytes is not free");
        let ahead = hold.room(2, MAX_AHEAD - chunk_room(0)).unwrap();
        assert!(hold.room(3, 8).is_none());
        let named = hold.room(1, MAX_WANTED - 8).unwrap();
        assert!(hold.room(1, 16).is_none());
        assert_eq!(hold.end(), 0, "the next hold would have no room");
        hold.take_back(&Spill { bytes: Vec::new(), room: ahead });
        hold.forget(1);
        assert!(hold.holds_back(1));
        assert_eq!((hold.end(), hold.end(), hold.want(2), hold.in_force()), (1, 0, 0, 0));
        // It comes to its end after the hold.
        hold.take_back(&Spill { bytes: Vec::new(), room: named });
        hold.take_back(&small.memory(0));
        hold.take_back(&Room::to_drop().memory(64));
        assert_eq!(hold.costs, [0, 0]);
        hold.begin();
        assert_eq!(hold.in_force(), 2);
    }
}
