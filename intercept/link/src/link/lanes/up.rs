//! Lanes to the device.

use std::collections::{HashSet, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use gpusession_proto::frame::{BadFrame, CHUNK, FIRST_UP_LANE, Header, UP_LANES, chunk_of, chunk_room};
use zerocopy::IntoBytes as _;

use super::{HostRange, Open, chunk_header, lock};
use crate::flight::{Ended, Flight, acknowledgements};
use crate::link::Link;
use crate::transport::Transport;

/// Time after the last byte for which a copy waits for acknowledgements before it keeps the bytes.
///
/// Each piece that is left adds about the time that keeping it takes. So the wait is at worst twice
/// as long as with the better choice.
const ACKNOWLEDGEMENT_WINDOW: Duration = Duration::from_micros(200);
const KEEP_WINDOW: Duration = Duration::from_millis(1);
/// Longest transfer that is kept at once, so that the program waits for no lane. Lanes together are
/// faster than one thread that copies, which counts for longer ones.
const MAX_STAGED: usize = CHUNK / 4;
/// Most bytes of a lane that the worker has not acknowledged, but for one piece. The worker has
/// room for as many of all lanes.
const MAX_UNACKNOWLEDGED: usize = 32 << 20;
/// Most bytes that the link keeps of memory that belongs to the program again.
const MAX_KEPT: usize = 16 * CHUNK;
/// Most bytes of buffers for the next copies; fresh memory costs more than the copy itself.
const MAX_FREE: usize = 4 * CHUNK;

/// Pieces that wait for a lane to the device, and those under way on each.
///
/// A free lane takes the oldest piece. So no lane idles while pieces wait, and a transfer's pieces
/// never wait behind those of a later one.
pub(super) struct UpQueue {
    state: Mutex<State>,
    /// A lane has something to do.
    work: Condvar,
    /// A transfer has proceeded.
    progress: Condvar,
    /// Whether a lane that breaks comes back, so that pieces stay until they are acknowledged.
    returns: bool,
}

#[derive(Default)]
struct State {
    pieces: VecDeque<Piece>,
    lanes: [Lane; UP_LANES as usize],
    /// Bytes of pieces whose source is [`Source::Kept`].
    kept: usize,
    /// Buffers of earlier copies.
    free: Vec<Vec<u8>>,
    hold: Hold,
    lost: bool,
}

/// Whether the worker holds the program back.
#[derive(Default)]
struct Hold {
    /// Number of the latest hold, and of the latest one that has ended.
    latest: u64,
    ended: u64,
    /// Transfers that the worker wants during the hold.
    wanted: HashSet<u64>,
}

impl Hold {
    /// Notes that a hold is in force, unless it has ended; returns `true` if it is new.
    fn begin(&mut self, number: u64) -> bool {
        let begins = number > self.latest.max(self.ended);
        if begins {
            self.latest = number;
        }
        begins
    }

    fn is_on(&self) -> bool {
        self.latest > self.ended
    }
}

#[derive(Default)]
struct Lane {
    flight: Flight<Piece>,
    /// Room of the chunks in flight, in bytes.
    bytes: usize,
    /// Room of chunks that arrived before the present connection, until it brings an
    /// acknowledgement: a hold may have begun with them.
    unconfirmed: usize,
    /// Whether the present connection has ended.
    ended: bool,
}

struct Piece {
    transfer: u64,
    offset: u64,
    source: Source,
    written: bool,
    progress: Arc<Progress>,
}

#[derive(Clone)]
enum Source {
    /// Bytes of a range, from an offset on.
    Program { range: HostRange, offset: usize, len: usize },
    /// A copy, because the program may have changed its memory meanwhile.
    Kept(Arc<Vec<u8>>),
}

impl Source {
    fn len(&self) -> usize {
        match self {
            Self::Program { len, .. } => *len,
            Self::Kept(bytes) => bytes.len(),
        }
    }

    fn room(&self) -> usize {
        chunk_room(self.len())
    }

    /// Returns the bytes; `aside` holds those that are not adjacent in memory.
    ///
    /// # Safety
    /// The program's memory stays mapped during the use.
    unsafe fn bytes<'a>(&'a self, aside: &'a mut Vec<u8>) -> &'a [u8] {
        match self {
            // SAFETY: by the caller's promise.
            Self::Program { range, offset, len } => unsafe { range.bytes(*offset, *len, aside) },
            Self::Kept(bytes) => bytes,
        }
    }
}

/// Counters of one transfer, which change under the queue's lock.
struct Progress {
    /// Number of pieces that no lane has written.
    unwritten: AtomicUsize,
    /// Number of pieces whose source a lane may still read.
    open: AtomicUsize,
    failed: AtomicBool,
}

/// Progress of a transfer to the device.
pub struct Sent {
    queue: Arc<UpQueue>,
    progress: Arc<Progress>,
}

impl Sent {
    /// Waits until the program may change the source again; `false` if the link was lost before,
    /// `None` if it takes longer than `patience`.
    ///
    /// Of a chunk that the worker has not acknowledged soon after it was written, the link keeps a
    /// copy, from the time `keep_at` on, which the first call finds out.
    pub(crate) fn wait(&self, patience: Duration, keep_at: &mut Option<Instant>) -> Option<bool> {
        let Self { queue, progress } = self;
        let end = Instant::now() + patience;
        let mut state = lock(&queue.state);
        while progress.open.load(Ordering::Relaxed) > 0 {
            let patience = end.saturating_duration_since(Instant::now());
            if patience.is_zero() {
                return None;
            }
            if progress.unwritten.load(Ordering::Relaxed) > 0 {
                state =
                    queue.progress.wait_timeout(state, patience).unwrap_or_else(PoisonError::into_inner).0;
                continue;
            }
            let until = *keep_at.get_or_insert_with(|| {
                let open = progress.open.load(Ordering::Relaxed) as u32;
                Instant::now() + ACKNOWLEDGEMENT_WINDOW + KEEP_WINDOW * open
            });
            let left = until.saturating_duration_since(Instant::now());
            if !left.is_zero() {
                let left = left.min(patience);
                state = queue.progress.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
            } else if state.keep_one(progress) {
                // Other lanes need the lock meanwhile.
                drop(state);
                state = lock(&queue.state);
            } else {
                state =
                    queue.progress.wait_timeout(state, patience).unwrap_or_else(PoisonError::into_inner).0;
            }
        }
        Some(!progress.failed.load(Ordering::Relaxed))
    }
}

impl State {
    /// Keeps a copy of one piece of a transfer, if there is room and no lane is reading it.
    fn keep_one(&mut self, progress: &Arc<Progress>) -> bool {
        // Threads that stage at the same time may exceed it.
        let room = MAX_KEPT.saturating_sub(self.kept);
        let mine = |piece: &&mut Piece| {
            Arc::ptr_eq(&piece.progress, progress)
                && matches!(piece.source, Source::Program { len, .. } if len <= room)
        };
        let Some(piece) = self.lanes.iter_mut().flat_map(|lane| lane.flight.at_rest()).find(mine) else {
            return false;
        };
        let Source::Program { range, offset, len } = piece.source else { return false };
        let mut copy = self.free.pop().unwrap_or_default();
        // SAFETY: the range's creator promised that it stays mapped until the count below.
        unsafe { range.append(offset, len, &mut copy) };
        self.kept += copy.len();
        piece.source = Source::Kept(Arc::new(copy));
        progress.open.fetch_sub(1, Ordering::Relaxed);
        true
    }

    /// Takes the oldest piece that the worker takes now.
    fn next_piece(&mut self) -> Option<Piece> {
        if !self.hold.is_on() {
            return self.pieces.pop_front();
        }
        if self.hold.wanted.is_empty() {
            return None;
        }
        let wanted = |piece: &Piece| self.hold.wanted.contains(&piece.transfer);
        let oldest = self.pieces.iter().position(wanted)?;
        let piece = self.pieces.remove(oldest)?;
        // All pieces of a transfer are queued at once.
        if !self.pieces.iter().any(|other| other.transfer == piece.transfer) {
            self.hold.wanted.remove(&piece.transfer);
        }
        Some(piece)
    }

    /// Takes back the memory of a piece that has arrived.
    fn reuse(&mut self, bytes: Arc<Vec<u8>>) {
        self.kept -= bytes.len();
        if let Ok(mut bytes) = Arc::try_unwrap(bytes)
            && self.free.iter().map(Vec::capacity).sum::<usize>() + bytes.capacity() <= MAX_FREE
        {
            bytes.clear();
            self.free.push(bytes);
        }
    }

    /// Forgets a piece that no lane reads any more.
    fn release(&mut self, piece: Piece, arrived: bool) {
        if !piece.written {
            piece.progress.unwritten.fetch_sub(1, Ordering::Relaxed);
        }
        if !arrived {
            piece.progress.failed.store(true, Ordering::Relaxed);
        }
        match piece.source {
            Source::Program { .. } => drop(piece.progress.open.fetch_sub(1, Ordering::Relaxed)),
            Source::Kept(bytes) => self.reuse(bytes),
        }
    }

    /// Continues a lane on another connection, whose other end has `received` chunks.
    fn restart(&mut self, lane: usize, received: u64) {
        let before = self.lanes[lane].bytes;
        self.lanes[lane].flight.restart(received);
        self.settle(lane);
        self.lanes[lane].unconfirmed += before - self.lanes[lane].bytes;
    }

    /// Releases the pieces of a lane that have arrived, or all if the link is lost.
    fn settle(&mut self, lane: usize) {
        while let Some(piece) = self.lanes[lane].flight.arrived() {
            self.lanes[lane].bytes -= piece.source.room();
            self.release(piece, true);
        }
        while self.lost
            && let Some(piece) = self.lanes[lane].flight.give_up()
        {
            self.lanes[lane].bytes -= piece.source.room();
            self.release(piece, false);
        }
    }
}

impl Lane {
    /// Returns `true` if another piece may be under way.
    fn has_room(&self) -> bool {
        self.bytes + self.unconfirmed < MAX_UNACKNOWLEDGED || self.flight.is_empty()
    }
}

impl UpQueue {
    pub(super) fn new(returns: bool) -> Self {
        Self { state: Mutex::default(), work: Condvar::new(), progress: Condvar::new(), returns }
    }

    /// Copies a short range, if there is room for the copy.
    pub(super) fn stage(&self, range: HostRange) -> Option<Vec<u8>> {
        let mut copy = {
            let mut state = lock(&self.state);
            let staged = range.len <= MAX_STAGED && state.kept + range.len <= MAX_KEPT && !state.lost;
            staged.then(|| state.free.pop().unwrap_or_default())?
        };
        // SAFETY: the range's creator promised that it is mapped.
        unsafe { range.append(0, range.len, &mut copy) };
        Some(copy)
    }

    /// Queues a transfer from a copy, or from a range of the program's memory.
    pub(super) fn send(queue: &Arc<Self>, transfer: u64, range: HostRange, copy: Option<Vec<u8>>) -> Sent {
        let chunk = if copy.is_some() { MAX_STAGED } else { chunk_of(range.len) };
        let chunks = range.len.div_ceil(chunk);
        let progress = Arc::new(Progress {
            unwritten: AtomicUsize::new(chunks),
            open: AtomicUsize::new(if copy.is_some() { 0 } else { chunks }),
            failed: AtomicBool::new(false),
        });
        let piece = |offset: usize, source| Piece {
            transfer,
            offset: offset as u64,
            source,
            written: false,
            progress: progress.clone(),
        };
        let mut state = lock(&queue.state);
        let pieces: Vec<_> = match copy {
            Some(copy) => {
                state.kept += copy.len();
                vec![piece(0, Source::Kept(Arc::new(copy)))]
            }
            None => (0..range.len)
                .step_by(chunk)
                .map(|offset| {
                    let len = chunk.min(range.len - offset);
                    piece(offset, Source::Program { range, offset, len })
                })
                .collect(),
        };
        if state.lost {
            pieces.into_iter().for_each(|piece| state.release(piece, false));
        } else {
            state.pieces.extend(pieces);
        }
        drop(state);
        // All of them, also for one piece: the thread that waited the longest wakes the slowest.
        queue.work.notify_all();
        Sent { queue: queue.clone(), progress }
    }

    /// Ends all transfers, because the link is lost; a lane that still reads a piece ends it later.
    pub(super) fn fail_all(&self) {
        let mut state = lock(&self.state);
        state.lost = true;
        (0..state.lanes.len()).for_each(|lane| state.settle(lane));
        while let Some(piece) = state.pieces.pop_front() {
            state.release(piece, false);
        }
        drop(state);
        self.work.notify_all();
        self.progress.notify_all();
    }

    /// Sends a transfer although a hold is in force; returns `true` if the hold begins with it.
    ///
    /// The transfer may not be queued yet, and the frame be faster than acknowledgements.
    pub(super) fn want(&self, hold: u64, transfer: u64) -> bool {
        let mut state = lock(&self.state);
        let begins = state.hold.begin(hold);
        if state.hold.is_on() && state.hold.latest == hold {
            state.hold.wanted.insert(transfer);
        }
        drop(state);
        self.work.notify_all();
        begins
    }

    /// Ends a hold.
    pub(super) fn release(&self, hold: u64) {
        let mut state = lock(&self.state);
        state.hold.ended = state.hold.ended.max(hold);
        if !state.hold.is_on() {
            state.hold.wanted.clear();
        }
        drop(state);
        self.work.notify_all();
    }

    /// Returns `true` if a piece waits because of a hold.
    pub(super) fn is_held(&self) -> bool {
        let state = lock(&self.state);
        state.hold.is_on() && !state.pieces.is_empty()
    }

    /// Waits until no lane reads the program's memory for a transfer before `transfer`; returns
    /// `false` if that takes longer than `patience`.
    pub(super) fn wait_unread(&self, transfer: u64, patience: Duration) -> bool {
        let reads = |state: &mut State| {
            let mut pieces = state.pieces.iter().chain(state.lanes.iter().flat_map(|lane| lane.flight.all()));
            pieces.any(|p| p.transfer < transfer && matches!(p.source, Source::Program { .. }))
        };
        let waited = self.progress.wait_timeout_while(lock(&self.state), patience, reads);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    /// Returns `true` if a lane has something to send.
    fn needs(&self, lane: usize) -> bool {
        let state = lock(&self.state);
        !state.lanes[lane].flight.is_empty() || !state.pieces.is_empty()
    }

    /// Notes what has arrived; returns `true` if a hold begins with it.
    fn acknowledge(&self, lane: usize, number: u64, hold: u64) -> Result<bool, BadFrame> {
        let mut state = lock(&self.state);
        state.lanes[lane].flight.acknowledge(number)?;
        let waited = !state.lanes[lane].has_room();
        state.lanes[lane].unconfirmed = 0;
        state.settle(lane);
        let begins = state.hold.begin(hold);
        drop(state);
        if waited {
            self.work.notify_all();
        }
        self.progress.notify_all();
        Ok(begins)
    }

    fn end(&self, lane: usize) {
        lock(&self.state).lanes[lane].ended = true;
        self.work.notify_all();
    }

    /// Uses one connection of a lane until its end.
    fn carry(&self, lane: usize, transport: &Transport, link: &Weak<Link>) -> Ended {
        lock(&self.state).lanes[lane].ended = false;
        std::thread::scope(|scope| {
            let listen = || {
                let ended = acknowledgements(transport, |number, hold| {
                    let begins = self.acknowledge(lane, number, hold)?;
                    if begins && let Some(link) = link.upgrade() {
                        link.down.wake();
                    }
                    Ok(())
                });
                self.end(lane);
                ended
            };
            // Inherits the lane's mask of signals.
            let named = std::thread::Builder::new().name("gpusession-ack".into());
            let listener = match self.returns.then(|| named.spawn_scoped(scope, listen)).transpose() {
                Ok(listener) => listener,
                Err(e) => return Ended::Fatal(format!("cannot start a thread for a lane: {e}")),
            };
            let broken = self.write(lane, transport);
            transport.shutdown();
            match (listener.map(|listener| listener.join()), broken) {
                (Some(Ok(Ended::Fatal(reason))), _) => Ended::Fatal(reason),
                (_, Some(error)) | (Some(Ok(Ended::Broken(error))), None) => Ended::Broken(error),
                (None | Some(Err(_)), None) => Ended::Fatal("the lane's threads have ended".into()),
            }
        })
    }

    /// Waits for the next piece that a lane has to write; `None` if its connection has ended.
    fn next(&self, lane: usize) -> Option<(u64, Header, Source)> {
        let mut state = lock(&self.state);
        loop {
            if state.lost || state.lanes[lane].ended {
                return None;
            }
            if state.lanes[lane].flight.is_carried()
                && state.lanes[lane].has_room()
                && let Some(piece) = state.next_piece()
            {
                state.lanes[lane].bytes += piece.source.room();
                state.lanes[lane].flight.push(piece);
            }
            let flight = &mut state.lanes[lane].flight;
            if let Some((number, piece)) = flight.begin() {
                let header = chunk_header(number, piece.transfer, piece.offset, piece.source.len(), 0);
                return Some((number, header, piece.source.clone()));
            }
            state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Writes pieces until the connection fails, or its other thread ends it.
    fn write(&self, lane: usize, transport: &Transport) -> Option<std::io::Error> {
        let mut aside = Vec::new();
        loop {
            let (number, header, source) = self.next(lane)?;
            // SAFETY: the range's creator promised that it stays mapped until its piece is
            // released, which does not happen before `written` below.
            let bytes = unsafe { source.bytes(&mut aside) };
            let pad = bytes.len().next_multiple_of(8) - bytes.len();
            let done = transport.send_parts(&[header.as_bytes(), bytes, &[0; 8][..pad]]);
            // The buffer of a copy is free once its piece is released.
            drop(source);
            let mut state = lock(&self.state);
            let flight = &mut state.lanes[lane].flight;
            if let Some(piece) = flight.written()
                && !std::mem::replace(&mut piece.written, true)
            {
                piece.progress.unwritten.fetch_sub(1, Ordering::Relaxed);
            }
            if !self.returns && done.is_ok() {
                let _ = flight.acknowledge(number);
            }
            state.settle(lane);
            drop(state);
            self.progress.notify_all();
            if let Err(e) = done {
                return Some(e);
            }
        }
    }
}

/// Serves a lane until the link is lost, on one connection after the other.
pub(super) fn serve(
    lane: u16,
    queue: &UpQueue,
    open: &Open,
    first: Option<Arc<Transport>>,
    link: &Weak<Link>,
) {
    let index = usize::from(lane - FIRST_UP_LANE);
    let mut line = first;
    loop {
        let ended = match &line {
            Some(transport) => queue.carry(index, transport, link),
            None => Ended::Broken(std::io::ErrorKind::NotConnected.into()),
        };
        let Some(link) = link.upgrade() else { return queue.fail_all() };
        let counts = || lock(&queue.state).lanes[index].flight.counts();
        let Some((transport, received)) = link.lane_back(lane, ended, &counts, &|| queue.needs(index)) else {
            return;
        };
        {
            let mut state = lock(&queue.state);
            state.restart(index, received);
        }
        queue.progress.notify_all();
        line = Some(open.install(lane, transport));
    }
}

#[cfg(test)]
mod tests {
    use super::super::Rows;
    use super::*;

    const PIECE_BYTES: usize = 1000;
    const LONG: Duration = Duration::from_secs(20);

    /// Queues a transfer of `pieces` chunks that no lane serves.
    fn queue(returns: bool, pieces: usize, memory: &[u8]) -> (Arc<UpQueue>, Sent) {
        let queue = Arc::new(UpQueue::new(returns));
        let len = (pieces - 1) * CHUNK + PIECE_BYTES;
        assert!(memory.len() >= len);
        // SAFETY: each test's memory outlives its transfers.
        let sent = UpQueue::send(&queue, 7, unsafe { HostRange::new(memory.as_ptr() as usize, len) }, None);
        (queue, sent)
    }

    fn written(queue: &UpQueue, lane: usize) {
        let mut state = lock(&queue.state);
        if let Some(piece) = state.lanes[lane].flight.written() {
            piece.written = true;
            piece.progress.unwritten.fetch_sub(1, Ordering::Relaxed);
        }
        state.settle(lane);
        drop(state);
        queue.progress.notify_all();
    }

    #[test]
    fn source_stays_until_no_lane_reads_it() {
        let memory = vec![1; 2 * CHUNK];
        let (queue, sent) = queue(true, 2, &memory);
        queue.next(0).unwrap();
        queue.next(1).unwrap();
        let waiting = std::thread::spawn(move || sent.wait(LONG, &mut None));
        queue.fail_all();
        written(&queue, 1);
        assert!(!waiting.is_finished(), "a lane still reads the first chunk");
        written(&queue, 0);
        assert_eq!(waiting.join().unwrap(), Some(false), "the link was lost");
        // SAFETY: as above.
        let late = UpQueue::send(&queue, 8, unsafe { HostRange::new(memory.as_ptr() as usize, 5) }, None);
        assert_eq!(late.wait(LONG, &mut None), Some(false));
    }

    #[test]
    fn program_that_is_held_back_sends_wanted_transfers_alone() {
        let memory = vec![7; 100];
        let queue = Arc::new(UpQueue::new(true));
        // SAFETY: the memory outlives the transfers.
        let send = |transfer| unsafe {
            UpQueue::send(&queue, transfer, HostRange::new(memory.as_ptr() as usize, 8), None)
        };
        let taken = || {
            let transfer = lock(&queue.state).next_piece().map(|piece| piece.transfer);
            transfer.unwrap_or_default()
        };
        let _sent = [1, 2, 3].map(send);
        let hold = |number| queue.acknowledge(0, 0, number).unwrap();
        assert!(hold(1) && !hold(1) && queue.is_held());
        assert_eq!(taken(), 0);
        assert!(!queue.want(1, 3) && !queue.want(1, 5));
        assert_eq!((taken(), taken()), (3, 0));
        let _later = [4, 5].map(send);
        assert_eq!((taken(), taken()), (5, 0), "it was wanted before it was there");
        queue.release(1);
        assert!(!hold(1), "a late acknowledgement");
        assert!(!queue.want(1, 4));
        assert_eq!((taken(), taken(), taken(), taken()), (1, 2, 4, 0));
        // The frame is faster than the acknowledgements.
        let _more = [6, 7].map(send);
        assert!(queue.want(2, 7));
        assert!(!hold(2) && queue.is_held());
        assert_eq!((taken(), taken()), (7, 0));
        assert!(lock(&queue.state).hold.wanted.is_empty(), "nothing is left of a transfer");
    }

    #[test]
    fn chunks_are_kept_however_often_the_wait_is_interrupted() {
        let memory = vec![7; 2 * CHUNK];
        let (queue, sent) = queue(true, 2, &memory);
        while !lock(&queue.state).pieces.is_empty() {
            queue.next(0).unwrap();
            written(&queue, 0);
        }
        let (mut keep_at, mut rounds) = (None, 0);
        while sent.wait(Duration::from_micros(100), &mut keep_at).is_none() {
            rounds += 1;
        }
        assert!(rounds > 0 && lock(&queue.state).kept > 0);
    }

    #[test]
    fn another_connection_opens_the_window_with_its_first_acknowledgement() {
        let memory = vec![7; MAX_UNACKNOWLEDGED + 3 * CHUNK];
        let chunks = MAX_UNACKNOWLEDGED / CHUNK;
        let (queue, _sent) = queue(true, chunks + 3, &memory);
        for _ in 0..chunks {
            queue.next(0).unwrap();
            written(&queue, 0);
        }
        // Everything arrived, and a hold may have begun; the acknowledgements are lost.
        lock(&queue.state).restart(0, chunks as u64);
        assert_eq!(queue.next(0).unwrap().0, chunks as u64 + 1, "one piece asks");
        written(&queue, 0);
        assert!(!lock(&queue.state).lanes[0].has_room());
        assert!(queue.acknowledge(0, chunks as u64 + 1, 1).unwrap());
        assert!(lock(&queue.state).lanes[0].has_room() && queue.is_held());
    }

    #[test]
    fn memory_is_unread_once_its_chunks_have_arrived() {
        let memory = vec![7; CHUNK];
        let (queue, _sent) = queue(true, 1, &memory);
        let unread = |transfer| queue.wait_unread(transfer, Duration::ZERO);
        assert!(unread(7) && !unread(8), "the piece waits for a lane");
        queue.next(0).unwrap();
        written(&queue, 0);
        assert!(!unread(8), "the connection may break");
        queue.acknowledge(0, 1, 0).unwrap();
        assert!(unread(8));
    }

    #[test]
    fn lane_has_a_bounded_number_of_bytes_under_way() {
        let memory = vec![7; MAX_UNACKNOWLEDGED + 2 * CHUNK];
        let (queue, _sent) = queue(true, MAX_UNACKNOWLEDGED / CHUNK + 1, &memory);
        for _ in 0..MAX_UNACKNOWLEDGED / CHUNK {
            queue.next(0).unwrap();
            written(&queue, 0);
        }
        let waiting = {
            let queue = queue.clone();
            std::thread::spawn(move || queue.next(0).map(|(number, ..)| number))
        };
        std::thread::park_timeout(Duration::from_millis(20));
        assert!(!waiting.is_finished());
        queue.acknowledge(0, 1, 0).unwrap();
        assert_eq!(waiting.join().unwrap(), Some((MAX_UNACKNOWLEDGED / CHUNK) as u64 + 1));
    }

    #[test]
    fn rows_travel_packed() {
        let memory: Vec<u8> = (0..200).collect();
        let rows = Rows { width: 3, pitch: 5, height: 2, layer: 20 };
        let expected = [0, 1, 2, 5, 6, 7, 20, 21, 22, 25, 26, 27];
        // SAFETY: the memory outlives the transfer, and the last row ends with byte 28.
        let range = unsafe { HostRange::rows(memory.as_ptr() as usize, rows, 4) };
        let queue = Arc::new(UpQueue::new(true));
        assert_eq!(queue.stage(range).unwrap(), expected);
        let _sent = UpQueue::send(&queue, 7, range, None);
        let (_, header, source) = queue.next(0).unwrap();
        let mut aside = vec![9; 3];
        // SAFETY: as above.
        assert_eq!((unsafe { source.bytes(&mut aside) }, header.ack.get()), (&expected[..], 12));
    }

    #[test]
    fn a_chunk_that_nobody_acknowledges_is_kept() {
        let memory = vec![7; CHUNK];
        let (queue, sent) = queue(true, 1, &memory);
        queue.next(0).unwrap();
        let waiting = std::thread::spawn(move || sent.wait(LONG, &mut None));
        assert!(!waiting.is_finished(), "its lane reads it");
        written(&queue, 0);
        assert_eq!(waiting.join().unwrap(), Some(true));
        drop(memory);
        // The connection breaks: the chunk is written again, from the copy.
        lock(&queue.state).lanes[0].flight.restart(0);
        let (number, _, source) = queue.next(0).unwrap();
        assert_eq!(number, 1);
        assert!(matches!(&source, Source::Kept(bytes) if bytes[..] == [7; PIECE_BYTES]));
        written(&queue, 0);
        queue.acknowledge(0, 1, 0).unwrap();
        assert_eq!(lock(&queue.state).kept, 0);
    }

    #[test]
    fn an_acknowledged_chunk_is_not_copied() {
        let memory = vec![7; CHUNK];
        let (queue, sent) = queue(true, 1, &memory);
        queue.next(3).unwrap();
        // Before the writer's call has returned.
        queue.acknowledge(3, 1, 0).unwrap();
        assert_eq!(sent.progress.open.load(Ordering::Relaxed), 1);
        written(&queue, 3);
        assert_eq!(sent.wait(LONG, &mut None), Some(true));
        assert_eq!(lock(&queue.state).kept, 0);
        queue.acknowledge(3, 2, 0).unwrap_err();
    }

    #[test]
    fn a_short_transfer_is_copied_and_waits_for_no_lane() {
        let mut memory = vec![7; MAX_STAGED];
        let queue = Arc::new(UpQueue::new(true));
        // SAFETY: the memory outlives the transfers.
        let range = |memory: &[u8]| unsafe { HostRange::new(memory.as_ptr() as usize, memory.len()) };
        let copy = queue.stage(range(&memory)).unwrap();
        let address = copy.as_ptr();
        assert_eq!(UpQueue::send(&queue, 7, range(&memory), Some(copy)).wait(LONG, &mut None), Some(true));
        memory.fill(8);
        let (number, _, source) = queue.next(0).unwrap();
        assert!(matches!(&source, Source::Kept(bytes) if bytes.iter().all(|byte| *byte == 7)));
        drop(source);
        written(&queue, 0);
        assert_eq!(lock(&queue.state).kept, MAX_STAGED);
        queue.acknowledge(0, number, 0).unwrap();
        assert_eq!(lock(&queue.state).kept, 0);
        // Its buffer serves the next copy.
        let copy = queue.stage(range(&memory)).unwrap();
        assert_eq!(copy.as_ptr(), address);
        assert!(queue.stage(range(&[0; MAX_STAGED + 1])).is_none(), "lanes are faster");
        lock(&queue.state).kept = MAX_KEPT - 5;
        assert!(queue.stage(range(&memory[..5])).is_some() && queue.stage(range(&memory[..6])).is_none());
    }

    #[test]
    fn the_link_keeps_a_bounded_number_of_bytes() {
        let memory = vec![7; MAX_KEPT + CHUNK];
        let (queue, sent) = queue(true, 17, &memory);
        for chunk in 0..17 {
            queue.next(chunk % 2).unwrap();
            written(&queue, chunk % 2);
        }
        let waiting = std::thread::spawn(move || sent.wait(LONG, &mut None));
        while lock(&queue.state).kept + CHUNK <= MAX_KEPT {
            std::thread::yield_now();
        }
        assert!(!waiting.is_finished());
        queue.acknowledge(0, 9, 0).unwrap();
        queue.acknowledge(1, 8, 0).unwrap();
        assert_eq!(waiting.join().unwrap(), Some(true));
        assert_eq!(lock(&queue.state).kept, 0);
    }
}
