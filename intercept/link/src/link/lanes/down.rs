//! Lanes from the device.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::Duration;

use gpusession_proto::frame::{BadFrame, CHUNK};

use super::{HostRange, Open as Connections, Part, chunk_len, lock};
use crate::flight::{Ended, next_header};
use crate::link::Link;
use crate::resume::{Counts, ack};
use crate::transport::{Transport, Wait};

/// Transfers from the device that have not ended.
#[derive(Default)]
pub struct DownTransfers {
    open: Mutex<Open>,
    changed: Condvar,
}

#[derive(Default)]
struct Open {
    transfers: HashMap<u64, Down>,
    lost: bool,
    /// Number of threads that wait in [`DownTransfers::begin_piece`].
    blocked: usize,
    /// Whether a thread waits for the next transfer, in [`DownTransfers::wait_for_detached`].
    sleeps: bool,
    /// That thread shall look at the lanes to the device.
    woken: bool,
}

impl Open {
    /// Returns `true` if a detached transfer that `wanted` selects can still write.
    fn unsettled(&self, wanted: &impl Fn(&Detached) -> bool) -> bool {
        self.transfers.iter().any(|(seq, t)| {
            t.detached
                && (t.status == 0 || !t.writing.is_empty())
                && wanted(&Detached { seq: *seq, on: t.on, range: t.range })
        })
    }
}

/// Stream of a transfer; a default stream's handle is the same in every context.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct On {
    /// Handle of the context.
    pub ctx: u64,
    /// Handle of the stream, 0 for the legacy default stream.
    pub stream: u64,
    /// Whether it is ordered with its context's default stream.
    pub blocking: bool,
}

/// Transfer from the device without a waiting thread.
#[derive(Clone, Copy)]
pub struct Detached {
    /// Position of its frame in the log.
    pub seq: u64,
    /// Stream behind whose work it comes.
    pub on: On,
    range: HostRange,
}

impl Detached {
    /// Returns `true` if it writes to any of these bytes.
    pub fn fills(&self, address: usize, len: usize) -> bool {
        self.range.overlaps(address, len)
    }
}

struct Down {
    range: HostRange,
    left: usize,
    status: i32,
    on: On,
    /// Whether no thread asks for the result, so that the entry goes when the data has landed.
    detached: bool,
    /// Pieces that threads write right now.
    writing: Vec<Writing>,
    /// Transfers into some of the same bytes whose data is older.
    older: Vec<u64>,
    /// Addresses and lengths of bytes that have newer data already; this transfer skips them.
    newer: Vec<(usize, usize)>,
}

impl Down {
    /// Returns `true` if a piece with these bytes may come now: none of them is being written.
    fn expects(&self, offset: usize, len: usize) -> bool {
        let written: usize = self.writing.iter().map(|piece| piece.len).sum();
        offset.checked_add(len).is_some_and(|end| {
            end <= self.range.len
                && len <= self.left.saturating_sub(written)
                && self.writing.iter().all(|piece| end <= piece.offset || piece.offset + piece.len <= offset)
        })
    }

    /// Removes the piece at an offset from those that threads write.
    fn written(&mut self, offset: u64) {
        if let Some(at) = self.writing.iter().position(|piece| piece.offset as u64 == offset) {
            self.writing.swap_remove(at);
        }
    }
}

/// Piece that a thread writes into the program's memory.
struct Writing {
    /// Offset in the transfer, and length.
    offset: usize,
    len: usize,
    /// Addresses of its first byte and behind its last one.
    start: usize,
    end: usize,
}

impl Writing {
    fn new(offset: usize, len: usize, parts: &[Part]) -> Self {
        let start = parts.first().map_or(0, |part| part.address);
        let end = parts.last().map_or(0, |part| part.address + part.len);
        Self { offset, len, start, end }
    }

    fn meets(&self, other: &Self) -> bool {
        self.start < other.end && other.start < self.end
    }
}

/// Where the bytes of a piece go.
enum Place {
    /// The transfer has failed or was canceled.
    Nowhere,
    /// All bytes, to this address.
    Whole(usize),
    /// These parts; other bytes have newer data.
    Parts(Vec<Part>),
}

/// Returns what a piece with these parts may write, apart from bytes with `newer` data.
fn place(parts: Vec<Part>, newer: &mut Vec<(usize, usize)>) -> Place {
    if let ([only], true) = (parts.as_slice(), newer.is_empty()) {
        return Place::Whole(only.address);
    }
    unite(newer);
    let mut left = Vec::with_capacity(parts.len());
    for part in parts {
        let end = part.address + part.len;
        let mut at = part.address;
        let mut keep = |from: usize, to: usize| {
            if from < to {
                left.push(Part { offset: part.offset + from - part.address, address: from, len: to - from });
            }
        };
        let first = newer.partition_point(|(address, len)| address + len <= at);
        for (address, len) in newer[first..].iter().take_while(|(address, _)| *address < end) {
            keep(at, *address);
            at = address + len;
        }
        keep(at, end);
    }
    Place::Parts(left)
}

/// Sorts ranges, and unites those that overlap or touch each other.
fn unite(ranges: &mut Vec<(usize, usize)>) {
    ranges.sort_unstable();
    ranges.dedup_by(|later, earlier| {
        let near = later.0 <= earlier.0 + earlier.1;
        if near {
            earlier.1 = earlier.1.max(later.0 + later.1 - earlier.0);
        }
        near
    });
}

/// `CUDA_ERROR_DEVICE_UNAVAILABLE`
const UNAVAILABLE: i32 = 46;

impl DownTransfers {
    /// Announces a transfer before its frame can be answered.
    ///
    /// For a `detached` one a later [`DownTransfers::wait_detached`] waits. `older` are the
    /// transfers of [`DownTransfers::overlapping`] whose data must not replace this one's.
    pub fn expect(&self, transfer: u64, range: HostRange, on: On, detached: bool, older: Vec<u64>) {
        let mut open = lock(&self.open);
        let (left, status) = (range.len, if open.lost { UNAVAILABLE } else { 0 });
        let down = Down { range, left, status, on, detached, writing: Vec::new(), older, newer: Vec::new() };
        open.transfers.insert(transfer, down);
        if std::mem::take(&mut open.sleeps) {
            self.changed.notify_all();
        }
    }

    /// Waits until a detached transfer is in progress.
    ///
    /// `false`: none is after `patience`, or after a [`DownTransfers::wake`].
    ///
    /// One thread calls this.
    pub(crate) fn wait_for_detached(&self, patience: Duration) -> bool {
        let mut open = lock(&self.open);
        if open.unsettled(&|_| true) {
            return true;
        }
        if std::mem::take(&mut open.woken) {
            return false;
        }
        open.sleeps = true;
        open = self.changed.wait_timeout(open, patience).unwrap_or_else(PoisonError::into_inner).0;
        (open.sleeps, open.woken) = (false, false);
        open.unsettled(&|_| true)
    }

    /// Wakes the thread in [`DownTransfers::wait_for_detached`].
    pub(crate) fn wake(&self) {
        lock(&self.open).woken = true;
        self.changed.notify_all();
    }

    /// Returns the detached transfers under way that write to any of these bytes.
    pub fn overlapping(&self, address: usize, len: usize) -> Vec<Detached> {
        let open = lock(&self.open);
        let filling = open.transfers.iter().filter(|(_, t)| t.detached && t.range.overlaps(address, len));
        filling.map(|(seq, t)| Detached { seq: *seq, on: t.on, range: t.range }).collect()
    }

    /// Waits for a transfer that is not detached, and returns its `CUresult`.
    pub fn wait(&self, transfer: u64) -> i32 {
        let mut open = lock(&self.open);
        loop {
            match open.transfers.get(&transfer) {
                None => return UNAVAILABLE,
                Some(t) if t.writing.is_empty() && (t.left == 0 || t.status != 0) => {
                    let status = t.status;
                    open.transfers.remove(&transfer);
                    return status;
                }
                Some(_) => open = self.changed.wait(open).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// Removes a transfer whose frame the driver refused; after the return no thread writes to its
    /// range.
    pub fn cancel(&self, transfer: u64) {
        let mut open = lock(&self.open);
        while let Some(t) = open.transfers.get_mut(&transfer) {
            t.status = UNAVAILABLE;
            if t.writing.is_empty() {
                open.transfers.remove(&transfer);
                return;
            }
            open = self.changed.wait(open).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Waits at most `patience` until the detached transfers that `wanted` selects have landed.
    ///
    /// `false`: some have not. Small ones come with frames, which the caller must read meanwhile.
    pub fn wait_detached(&self, wanted: &impl Fn(&Detached) -> bool, patience: Duration) -> bool {
        let mut open = lock(&self.open);
        if !open.unsettled(wanted) {
            return true;
        }
        open = self.changed.wait_timeout(open, patience).unwrap_or_else(PoisonError::into_inner).0;
        !open.unsettled(wanted)
    }

    /// Returns `true` if a detached transfer is in progress.
    pub fn any(&self) -> bool {
        self.any_of(|_| true)
    }

    /// Returns `true` if a detached transfer that `wanted` selects is in progress.
    pub fn any_of(&self, wanted: impl Fn(&Detached) -> bool) -> bool {
        let open = lock(&self.open);
        let mut detached = open.transfers.iter().filter(|(_, t)| t.detached);
        detached.any(|(seq, t)| wanted(&Detached { seq: *seq, on: t.on, range: t.range }))
    }

    /// Lands a small transfer, which comes in one piece.
    pub(crate) fn land(&self, transfer: u64, status: i32, bytes: &[u8]) {
        // An empty piece would count as being written for ever.
        if status != 0 || bytes.is_empty() {
            return self.piece_done(transfer, 0, 0, status);
        }
        let parts = match self.begin_piece(transfer, 0, bytes.len()) {
            Err(_) | Ok(Place::Nowhere) => return,
            Ok(Place::Whole(address)) => vec![Part { offset: 0, address, len: bytes.len() }],
            Ok(Place::Parts(parts)) => parts,
        };
        // SAFETY: `begin_piece` checked the bounds and marked the range as being written, so it
        // stays mapped until `piece_done`.
        unsafe { write_parts(bytes, &parts) };
        self.piece_done(transfer, 0, bytes.len(), 0);
    }

    /// Returns where a piece goes, and marks its transfer as being written unless that is nowhere.
    fn begin_piece(&self, transfer: u64, offset: u64, len: usize) -> Result<Place, BadFrame> {
        let mut open = lock(&self.open);
        loop {
            let Some(t) = open.transfers.get(&transfer).filter(|t| t.status == 0) else {
                return Ok(Place::Nowhere);
            };
            let Some(offset) = usize::try_from(offset).ok().filter(|offset| t.expects(*offset, len)) else {
                return Err(BadFrame("data beyond the end of a transfer, or twice"));
            };
            let parts = t.range.parts(offset, len);
            let piece = Writing::new(offset, len, &parts);
            let older = t.older.clone();
            let writing = |seq: &u64| {
                open.transfers.get(seq).is_some_and(|old| old.writing.iter().any(|w| w.meets(&piece)))
            };
            if older.iter().any(writing) {
                // Its bytes must be in the memory first.
                open.blocked += 1;
                open = self.changed.wait(open).unwrap_or_else(PoisonError::into_inner);
                open.blocked -= 1;
                continue;
            }
            for seq in older {
                if let Some(old) = open.transfers.get_mut(&seq) {
                    old.newer.extend(parts.iter().map(|part| (part.address, part.len)));
                }
            }
            let Some(t) = open.transfers.get_mut(&transfer) else { return Ok(Place::Nowhere) };
            t.writing.push(piece);
            return Ok(place(parts, &mut t.newer));
        }
    }

    /// Counts a piece that was written, or, without bytes, notes a transfer's failure.
    fn piece_done(&self, transfer: u64, offset: u64, len: usize, status: i32) {
        let mut open = lock(&self.open);
        let Some(t) = open.transfers.get_mut(&transfer) else { return };
        if len > 0 {
            t.written(offset);
            t.left -= len;
        }
        if status != 0 && t.status == 0 {
            t.status = status;
        }
        let whole = t.writing.is_empty();
        if whole && t.detached && (t.left == 0 || t.status != 0) {
            open.transfers.remove(&transfer);
        }
        if whole || open.blocked > 0 {
            self.changed.notify_all();
        }
    }

    /// Gives up the writing of a piece that will come again.
    fn piece_aborted(&self, transfer: u64, offset: u64) {
        let mut open = lock(&self.open);
        if let Some(t) = open.transfers.get_mut(&transfer) {
            t.written(offset);
            let failed = t.detached && t.status != 0 && t.writing.is_empty();
            if failed {
                open.transfers.remove(&transfer);
            }
            self.changed.notify_all();
        }
    }

    /// Returns `true` if data of a transfer has still to land.
    fn awaited(&self) -> bool {
        !lock(&self.open).transfers.is_empty()
    }

    pub(crate) fn fail_all(&self) {
        let mut open = lock(&self.open);
        open.lost = true;
        for t in open.transfers.values_mut() {
            t.status = UNAVAILABLE;
        }
        open.transfers.retain(|_, t| !t.detached || !t.writing.is_empty());
        self.changed.notify_all();
    }
}

/// Writes parts of a piece into the program's memory.
///
/// # Safety
/// The parts lie within `bytes`, and in memory of the program that is mapped and writable.
unsafe fn write_parts(bytes: &[u8], parts: &[Part]) {
    for part in parts {
        let from = bytes[part.offset..part.offset + part.len].as_ptr();
        // SAFETY: by the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(from, part.address as *mut u8, part.len) };
    }
}

/// Serves a lane until the link is lost, on one connection after the other.
pub(super) fn serve(
    lane: u16,
    transfers: &DownTransfers,
    open: &Connections,
    first: Option<Arc<Transport>>,
    link: &Weak<Link>,
    returns: bool,
) {
    let (mut line, mut received) = (first, 0);
    loop {
        let ended = match &line {
            Some(transport) => receive(transport, transfers, &mut received, returns),
            None => Ended::Broken(std::io::ErrorKind::NotConnected.into()),
        };
        let Some(link) = link.upgrade() else { return };
        let counts = || Counts { received, first: 1, next: 1 };
        let Some((transport, _)) = link.lane_back(lane, ended, &counts, &|| transfers.awaited()) else {
            return;
        };
        line = Some(open.install(lane, transport));
    }
}

/// Receives chunks directly into the program's memory until the connection ends; counts them.
fn receive(transport: &Transport, transfers: &DownTransfers, received: &mut u64, returns: bool) -> Ended {
    // Bytes that are dropped, at least in part.
    let mut aside = Vec::new();
    let mut next = || -> Result<(), Ended> {
        receive_chunk(transport, transfers, *received + 1, &mut aside)?;
        *received += 1;
        if returns {
            transport.send(&ack(*received))?;
        }
        Ok(())
    };
    loop {
        if let Err(ended) = next() {
            return ended;
        }
    }
}

fn receive_chunk(
    transport: &Transport,
    transfers: &DownTransfers,
    number: u64,
    aside: &mut Vec<u8>,
) -> Result<(), Ended> {
    const SLEEP: Wait = Wait::Spin(Duration::ZERO);
    let header = next_header(transport)?;
    let len = chunk_len(&header, number)?;
    let (transfer, status) = (header.seq.get(), header.thread.get() as i32);
    if status != 0 {
        transfers.piece_done(transfer, 0, 0, status);
        return Ok(());
    }
    if len == 0 {
        return Err(BadFrame("a chunk without bytes").into());
    }
    let offset = header.ctx.get();
    let place = transfers.begin_piece(transfer, offset, len)?;
    let done = match &place {
        Place::Whole(address) => {
            // SAFETY: `begin_piece` checked the bounds and marked the range as being written, so it
            // stays mapped until the end of the piece below.
            let target = unsafe { std::slice::from_raw_parts_mut(*address as *mut u8, len) };
            let mut padding = [0; 8];
            transport
                .recv_exact(target, SLEEP)
                .and_then(|()| transport.recv_exact(&mut padding[..header.body_len() - len], SLEEP))
        }
        Place::Parts(_) | Place::Nowhere => {
            aside.resize(CHUNK, 0);
            transport.recv_exact(&mut aside[..header.body_len()], SLEEP)
        }
    };
    match (&done, &place) {
        (_, Place::Nowhere) => {}
        (Err(_), _) => transfers.piece_aborted(transfer, offset),
        (Ok(()), place) => {
            if let Place::Parts(parts) = place {
                // SAFETY: as above.
                unsafe { write_parts(aside, parts) };
            }
            transfers.piece_done(transfer, offset, len, 0);
        }
    }
    Ok(done?)
}

#[cfg(test)]
mod tests {
    use super::super::Rows;
    use super::*;

    const STREAM: On = On { ctx: 1, stream: 2, blocking: true };

    fn expect(transfers: &DownTransfers, seq: u64, memory: &mut [u8], older: Vec<u64>) {
        // SAFETY: each test's memory outlives its transfers.
        let range = unsafe { HostRange::new(memory.as_mut_ptr() as usize, memory.len()) };
        transfers.expect(seq, range, STREAM, true, older);
    }

    #[test]
    fn older_data_never_replaces_newer_data() {
        let transfers = DownTransfers::default();
        let mut memory = [0; 16];
        expect(&transfers, 1, &mut memory, Vec::new());
        let found = transfers.overlapping(memory.as_ptr() as usize + 15, 1);
        assert_eq!(found.iter().map(|t| t.seq).collect::<Vec<_>>(), [1]);
        expect(&transfers, 2, &mut memory[4..8], vec![1]);
        expect(&transfers, 3, &mut memory[6..10], vec![1, 2]);
        transfers.land(3, 0, &[3; 4]);
        transfers.land(2, 0, &[2; 4]);
        transfers.land(1, 0, &[1; 16]);
        assert_eq!(memory, [1, 1, 1, 1, 2, 2, 3, 3, 3, 3, 1, 1, 1, 1, 1, 1]);
        assert!(!transfers.any(), "every transfer has ended");
    }

    #[test]
    fn an_empty_piece_holds_nothing_up() {
        let transfers = DownTransfers::default();
        let mut memory = [0; 8];
        expect(&transfers, 1, &mut memory, Vec::new());
        transfers.land(1, 0, &[]);
        assert!(transfers.any(), "its data has still to come");
        transfers.land(1, 0, &[7; 8]);
        assert!(!transfers.any(), "it has landed");
        assert_eq!(memory, [7; 8]);
    }

    #[test]
    fn data_in_order_is_written_whole() {
        let transfers = DownTransfers::default();
        let mut memory = [0; 8];
        expect(&transfers, 1, &mut memory, Vec::new());
        expect(&transfers, 2, &mut memory, vec![1]);
        transfers.land(1, 0, &[1; 8]);
        transfers.land(2, 0, &[2; 8]);
        assert_eq!(memory, [2; 8]);
        assert!(transfers.overlapping(memory.as_ptr() as usize, 8).is_empty());
    }

    #[test]
    fn newer_data_waits_for_a_lane_that_still_writes_older_data() {
        let transfers = DownTransfers::default();
        let mut memory = [0; 8];
        expect(&transfers, 1, &mut memory, Vec::new());
        expect(&transfers, 2, &mut memory[..4], vec![1]);
        assert!(matches!(transfers.begin_piece(1, 0, 8), Ok(Place::Whole(_))));
        std::thread::scope(|scope| {
            let newer = scope.spawn(|| transfers.begin_piece(2, 0, 4));
            transfers.piece_done(1, 0, 8, 0);
            assert!(matches!(newer.join().unwrap(), Ok(Place::Whole(_))));
        });
    }

    #[test]
    fn newer_data_does_not_wait_for_older_data_elsewhere() {
        let transfers = DownTransfers::default();
        let mut memory = [0; 16];
        expect(&transfers, 1, &mut memory, Vec::new());
        expect(&transfers, 2, &mut memory, vec![1]);
        assert!(matches!(transfers.begin_piece(1, 8, 8), Ok(Place::Whole(_))));
        // With a wait, this thread would never return.
        transfers.land(2, 0, &[2; 8]);
        transfers.land(1, 0, &[1; 8]);
        assert_eq!(memory[..8], [2; 8], "the older bytes come too late");
        transfers.piece_done(1, 8, 8, 0);
        assert!(transfers.any(), "half of the newer transfer has still to come");
        assert!(matches!(transfers.begin_piece(2, 8, 8), Ok(Place::Whole(_))));
        transfers.piece_done(2, 8, 8, 0);
        assert!(!transfers.any());
    }

    #[test]
    fn a_piece_that_comes_twice_is_refused() {
        let transfers = DownTransfers::default();
        let mut memory = [0; 16];
        expect(&transfers, 1, &mut memory, Vec::new());
        assert!(matches!(transfers.begin_piece(1, 4, 4), Ok(Place::Whole(_))));
        for (offset, len) in [(4, 4), (0, 5), (7, 1), (8, 9), (u64::MAX, 2), (0, 13)] {
            assert!(matches!(transfers.begin_piece(1, offset, len), Err(BadFrame(_))), "{offset}, {len}");
        }
        for (offset, len) in [(0, 4), (8, 8)] {
            assert!(matches!(transfers.begin_piece(1, offset, len), Ok(Place::Whole(_))), "{offset}, {len}");
        }
        [(0, 4), (4, 4), (8, 8)]
            .into_iter()
            .for_each(|(offset, len)| transfers.piece_done(1, offset, len, 0));
        assert!(!transfers.any());
    }

    #[test]
    fn parts_are_what_newer_data_leaves() {
        let left = |newer: &[(usize, usize)]| match place(
            vec![Part { offset: 0, address: 100, len: 10 }],
            &mut newer.to_vec(),
        ) {
            Place::Parts(parts) => parts.iter().map(|p| (p.offset, p.address, p.len)).collect(),
            _ => vec![(0, 100, 10)],
        };
        assert_eq!(left(&[(90, 10), (110, 5)]), [(0, 100, 10)]);
        assert_eq!(left(&[(95, 7), (108, 9)]), [(2, 102, 6)]);
        assert_eq!(left(&[(104, 2), (103, 2)]), [(0, 100, 3), (6, 106, 4)]);
        assert_eq!(
            left(&[(104, 1), (107, 1), (102, 1)]),
            [(0, 100, 2), (3, 103, 1), (5, 105, 2), (8, 108, 2)]
        );
        assert_eq!(left(&[(0, 200)]), []);
    }

    /// Announces a copy of two layers of two rows of three bytes, in memory with room for 24.
    fn expect_rows(transfers: &DownTransfers, seq: u64, memory: &mut [u8; 24], older: Vec<u64>) {
        let rows = Rows { width: 3, pitch: 5, height: 2, layer: 12 };
        // SAFETY: each test's memory outlives its transfers; the last row ends with byte 20.
        let range = unsafe { HostRange::rows(memory.as_mut_ptr() as usize, rows, 4) };
        transfers.expect(seq, range, STREAM, true, older);
    }

    #[test]
    fn rows_lie_apart_in_the_programs_memory() {
        let transfers = DownTransfers::default();
        let mut memory = [0; 24];
        expect_rows(&transfers, 1, &mut memory, Vec::new());
        let start = memory.as_ptr() as usize;
        assert_eq!(transfers.overlapping(start + 19, 1).len(), 1, "the last byte");
        assert!(transfers.overlapping(start + 20, 9).is_empty(), "behind the last row");
        assert!(matches!(transfers.begin_piece(1, 4, 9), Err(BadFrame(_))), "beyond the last row");
        let piece = |offset: u64, bytes: &[u8]| {
            let Ok(Place::Parts(parts)) = transfers.begin_piece(1, offset, bytes.len()) else { panic!() };
            // SAFETY: as above.
            unsafe { write_parts(bytes, &parts) };
            transfers.piece_done(1, offset, bytes.len(), 0);
        };
        piece(5, &[6, 7, 8, 9, 10, 11, 12]);
        assert!(transfers.any(), "the first five bytes have still to come");
        piece(0, &[1, 2, 3, 4, 5]);
        let expected = [1, 2, 3, 0, 0, 4, 5, 6, 0, 0, 0, 0, 7, 8, 9, 0, 0, 10, 11, 12, 0, 0, 0, 0];
        assert_eq!(memory, expected);
        assert!(!transfers.any());
    }

    #[test]
    fn older_rows_never_replace_newer_data_and_spare_the_bytes_between() {
        let transfers = DownTransfers::default();
        let mut memory = [0; 24];
        expect_rows(&transfers, 1, &mut memory, Vec::new());
        expect(&transfers, 2, &mut memory[1..6], vec![1]);
        expect_rows(&transfers, 3, &mut memory, vec![1, 2]);
        expect(&transfers, 4, &mut memory[13..15], vec![1, 2, 3]);
        transfers.land(4, 0, &[4; 2]);
        transfers.land(3, 0, &[3; 12]);
        transfers.land(2, 0, &[2; 5]);
        transfers.land(1, 0, &[1; 12]);
        assert_eq!(memory, [3, 3, 3, 2, 2, 3, 3, 3, 0, 0, 0, 0, 3, 4, 4, 0, 0, 3, 3, 3, 0, 0, 0, 0]);
        assert!(!transfers.any(), "every transfer has ended");
    }

    #[test]
    fn adjacent_rows_are_one_range() {
        let rows = Rows { width: 4, pitch: 4, height: 2, layer: 8 };
        // SAFETY: nothing reads or writes the range.
        let range = unsafe { HostRange::rows(64, rows, 6) };
        assert_eq!(range.parts(5, 9), [Part { offset: 0, address: 69, len: 9 }]);
        assert_eq!(range.extent(), 24);
    }
}
