//! The worker's end of bulk lanes.
//!
//! Lanes to the device receive chunks into pinned slots, where the executor that replays the
//! transfer's frame finds them. Lanes from the device send slots once the device has filled them.
#![expect(clippy::disallowed_methods, reason = "the driver has no event for a slot: it is polled")]

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use gpusession_link::lanes::chunk_header;
use gpusession_link::transport::{Transport, Wait};
use gpusession_proto::frame::{CHUNK, DOWN_LANES, FIRST_DOWN_LANE, HEADER, Header, UP_LANES, op};
use zerocopy::IntoBytes;

use crate::contexts::Contexts;
use crate::driver::{Driver, Status, check, status};
use crate::staging::{Slot, Slots};

/// Maximum number of remembered transfers whose frames failed.
///
/// The bytes of older ones have arrived.
const MAX_UNWANTED: usize = 1024;
/// Slots of one lane: one fills while the device reads the other.
const SLOTS_PER_LANE: usize = 2;

/// A chunk that has arrived, in a pinned slot.
pub struct Chunk {
    /// Offset in the transfer, in bytes.
    pub offset: u64,
    /// Length, in bytes.
    pub len: usize,
    /// Pinned memory with the bytes.
    ///
    /// [`Lanes::copied`] takes it back once the copy's event is recorded.
    pub slot: Slot,
    /// Index of the lane that owns the slot.
    pub lane: usize,
}

/// A slot on its way to the client, filled or being filled.
struct Outgoing {
    transfer: u64,
    offset: u64,
    len: usize,
    slot: Slot,
    failed: Status,
}

#[derive(Default)]
struct Arrived {
    chunks: HashMap<u64, VecDeque<Chunk>>,
    /// Transfers whose chunks no frame takes, oldest first.
    unwanted: VecDeque<u64>,
    failed: bool,
}

struct UpLane {
    slots: Slots,
    /// Slots whose copy to the device is under way, oldest first.
    copying: Mutex<VecDeque<Slot>>,
    /// Context of the event that the lane waits for; 0 means none.
    waits_in: AtomicU64,
}

/// Pieces that wait for a lane to the client; any free lane takes a piece that is ready.
#[derive(Default)]
struct DownQueue {
    /// Allocated when the first lane opens.
    slots: OnceLock<Slots>,
    pieces: Mutex<VecDeque<Outgoing>>,
    changed: Condvar,
}

/// All bulk lanes of the admitted process.
#[derive(Default)]
pub struct Lanes {
    up: [OnceLock<UpLane>; UP_LANES as usize],
    down: DownQueue,
    arrived: Mutex<Arrived>,
    arrival: Condvar,
    opened: Condvar,
    opening: Mutex<()>,
    /// Lanes that a connection has claimed, one bit each.
    claimed: AtomicU64,
    received: AtomicU64,
    sent: AtomicU64,
}

impl Lanes {
    /// Claims a lane for a connection.
    ///
    /// Returns `false` if the lane does not exist or another connection has claimed it.
    pub fn claim(&self, lane: u16) -> bool {
        let exists =
            (1..=UP_LANES).contains(&lane) || (FIRST_DOWN_LANE..FIRST_DOWN_LANE + DOWN_LANES).contains(&lane);
        exists && self.claimed.fetch_or(1 << lane, Ordering::Relaxed) & 1 << lane == 0
    }

    /// Serves a claimed lane until its connection ends.
    pub fn serve(
        &self,
        driver: &Driver,
        contexts: &Contexts,
        lane: u16,
        transport: &Transport,
    ) -> io::Result<()> {
        let said = |s: Status| io::Error::other(format!("CUDA error {s}"));
        let first = contexts.primary(0).map_err(said)?;
        // SAFETY: a primary context of this worker.
        check(unsafe { (driver.call.cuCtxSetCurrent)(first) }).map_err(said)?;
        if lane < FIRST_DOWN_LANE {
            let index = (lane - 1) as usize;
            let mine = match self.up[index].get() {
                Some(mine) => mine,
                None => {
                    let slots = Slots::new(driver, SLOTS_PER_LANE, CHUNK).map_err(said)?;
                    self.up[index].get_or_init(|| UpLane {
                        slots,
                        copying: Mutex::default(),
                        waits_in: AtomicU64::new(0),
                    })
                }
            };
            let result = self.receive(driver, index, mine, transport);
            self.arrived.lock().unwrap_or_else(PoisonError::into_inner).failed = true;
            self.arrival.notify_all();
            result
        } else {
            {
                let _one_at_a_time = self.opening.lock();
                if self.down.slots.get().is_none() {
                    let count = SLOTS_PER_LANE * DOWN_LANES as usize;
                    let slots = Slots::new(driver, count, CHUNK).map_err(said)?;
                    let _ = self.down.slots.set(slots);
                }
            }
            self.opened.notify_all();
            self.down.serve(driver, transport)
        }
    }

    fn receive(&self, driver: &Driver, index: usize, lane: &UpLane, transport: &Transport) -> io::Result<()> {
        let sleep = Wait::Spin(Duration::ZERO);
        loop {
            let mut head = [0; HEADER];
            match transport.recv(&mut head, sleep)? {
                0 => return Ok(()),
                n => transport.recv_exact(&mut head[n..], sleep)?,
            }
            let header = Header::parse(&head).map_err(io::Error::other)?;
            let len = header.ack.get() as usize;
            if header.op.get() != op::CHUNK || len > CHUNK || len.next_multiple_of(8) != header.body_len() {
                return Err(io::Error::other("not a chunk"));
            }
            let slot = self.free_slot(driver, lane);
            // SAFETY: this thread owns the slot, which has CHUNK bytes; the padded length is at
            // most that.
            let target = unsafe { std::slice::from_raw_parts_mut(slot.address, header.body_len()) };
            if let Err(e) = transport.recv_exact(target, sleep) {
                lane.slots.give(slot);
                return Err(e);
            }
            self.received.fetch_add(len as u64, Ordering::Relaxed);
            let chunk = Chunk { offset: header.ctx.get(), len, slot, lane: index };
            let mut arrived = self.arrived.lock().unwrap_or_else(PoisonError::into_inner);
            if arrived.unwanted.contains(&header.seq.get()) {
                drop(arrived);
                lane.slots.give(chunk.slot);
                continue;
            }
            arrived.chunks.entry(header.seq.get()).or_default().push_back(chunk);
            drop(arrived);
            self.arrival.notify_all();
        }
    }

    /// Returns a free slot, or waits for the one whose copy ends first.
    fn free_slot(&self, driver: &Driver, lane: &UpLane) -> Slot {
        loop {
            if let Some(slot) = lane.slots.try_take() {
                return slot;
            }
            let oldest = {
                let mut copying = lane.copying.lock().unwrap_or_else(PoisonError::into_inner);
                let oldest = copying.pop_front();
                lane.waits_in.store(oldest.as_ref().map_or(0, |slot| slot.ctx), Ordering::SeqCst);
                oldest
            };
            match oldest {
                Some(mut slot) => {
                    if !slot.event.is_null() {
                        // SAFETY: the slot's event was recorded after its copy, and `leave` waits
                        // for this. A failure means that the context is poisoned: then the copy
                        // reads the slot no more either.
                        unsafe { (driver.call.cuEventSynchronize)(slot.event) };
                    }
                    slot.rest();
                    lane.waits_in.store(0, Ordering::SeqCst);
                    return slot;
                }
                // All slots wait for an executor.
                None => {
                    let arrived = self.arrived.lock().unwrap_or_else(PoisonError::into_inner);
                    let _ = self.arrival.wait_timeout(arrived, Duration::from_millis(1));
                }
            }
        }
    }

    /// Waits for the next chunk of a transfer; `None` if a lane has failed.
    pub fn next_chunk(&self, transfer: u64) -> Option<Chunk> {
        let mut arrived = self.arrived.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(chunks) = arrived.chunks.get_mut(&transfer) {
                let chunk = chunks.pop_front();
                if chunks.is_empty() {
                    arrived.chunks.remove(&transfer);
                }
                if chunk.is_some() {
                    return chunk;
                }
            }
            if arrived.failed {
                return None;
            }
            arrived = self.arrival.wait(arrived).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Drops the chunks of a transfer whose frame has failed, since they would block the lanes.
    pub fn discard(&self, transfer: u64) {
        let mut arrived = self.arrived.lock().unwrap_or_else(PoisonError::into_inner);
        if arrived.unwanted.len() == MAX_UNWANTED {
            arrived.unwanted.pop_front();
        }
        arrived.unwanted.push_back(transfer);
        let came = arrived.chunks.remove(&transfer).unwrap_or_default();
        drop(arrived);
        for chunk in came {
            if let Some(lane) = self.up[chunk.lane].get() {
                lane.slots.give(chunk.slot);
            }
        }
        self.arrival.notify_all();
    }

    /// Takes back a chunk's slot, once the copy out of it is queued and its event recorded.
    pub fn copied(&self, chunk: Chunk) {
        if let Some(lane) = self.up[chunk.lane].get() {
            lane.copying.lock().unwrap_or_else(PoisonError::into_inner).push_back(chunk.slot);
            self.arrival.notify_all();
        }
    }

    /// Waits until no lane uses an event of a context that is about to be destroyed or reset.
    ///
    /// All work in that context is done; its events go with it.
    pub fn leave(&self, ctx: u64) {
        for lane in self.up.iter().filter_map(OnceLock::get) {
            let mut copying = lane.copying.lock().unwrap_or_else(PoisonError::into_inner);
            let (done, others) = std::mem::take(&mut *copying).into_iter().partition(|s| s.ctx == ctx);
            *copying = others;
            drop(copying);
            VecDeque::into_iter(done).for_each(|slot| lane.slots.give(slot));
            while lane.waits_in.load(Ordering::SeqCst) == ctx {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        self.arrival.notify_all();
        let pending = |pieces: &VecDeque<Outgoing>| pieces.iter().any(|piece| piece.slot.ctx == ctx);
        while pending(&self.down.pieces.lock().unwrap_or_else(PoisonError::into_inner)) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Pins all slots again after a reset of their context, which is current.
    pub fn pin_again(&self, driver: &Driver) {
        let slots = self.up.iter().filter_map(|lane| lane.get().map(|l| &l.slots));
        for slots in slots.chain(self.down.slots.get()) {
            // Copies work without pinning, only slower.
            let _ = slots.pin(driver);
        }
    }

    /// Returns `true` if no piece is on its way to the client.
    pub fn idle(&self) -> bool {
        self.down.pieces.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// Counts bytes that travelled in a frame instead of on a lane.
    pub fn inline(&self, to_device: usize, from_device: usize) {
        self.received.fetch_add(to_device as u64, Ordering::Relaxed);
        self.sent.fetch_add(from_device as u64, Ordering::Relaxed);
    }

    /// Returns the number of bytes received for the device.
    pub fn bytes_to_device(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    /// Returns the number of bytes sent from the device.
    pub fn bytes_from_device(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    /// Returns the slots of lanes to the client; waits until the first such lane opens.
    fn outgoing(&self) -> &Slots {
        let mut opening = self.opening.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(slots) = self.down.slots.get() {
                return slots;
            }
            opening = self.opened.wait(opening).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Sends `len` bytes of the device in chunks.
    ///
    /// `copy` queues the copy of one chunk into a slot and records its event.
    pub fn send(
        &self,
        transfer: u64,
        len: usize,
        mut copy: impl FnMut(usize, usize, &mut Slot) -> Result<(), Status>,
    ) -> Result<(), Status> {
        let slots = self.outgoing();
        for offset in (0..len).step_by(CHUNK) {
            let mut slot = slots.take();
            let len = CHUNK.min(len - offset);
            self.sent.fetch_add(len as u64, Ordering::Relaxed);
            let result = copy(offset, len, &mut slot);
            let failed = result.err().unwrap_or(0);
            let piece = Outgoing { transfer, offset: offset as u64, len, slot, failed };
            self.down.pieces.lock().unwrap_or_else(PoisonError::into_inner).push_back(piece);
            self.down.changed.notify_one();
            result?;
        }
        Ok(())
    }
}

impl DownQueue {
    fn serve(&self, driver: &Driver, transport: &Transport) -> io::Result<()> {
        let mut idle = 0u32;
        loop {
            let piece = {
                let mut queue = self.pieces.lock().unwrap_or_else(PoisonError::into_inner);
                while queue.is_empty() {
                    queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
                }
                // Takes any piece that is ready: a blocked stream must not delay the others.
                let mut ready = None;
                for i in 0..queue.len() {
                    let state = match queue[i].failed {
                        0 if queue[i].slot.event.is_null() => 0,
                        // SAFETY: the slot's event is valid, since `leave` waits for pieces that
                        // are still queued.
                        0 => unsafe { (driver.call.cuEventQuery)(queue[i].slot.event) },
                        failed => failed,
                    };
                    if state != status::NOT_READY {
                        ready = Some((i, state));
                        break;
                    }
                }
                ready.and_then(|(i, state)| queue.remove(i).map(|piece| (piece, state)))
            };
            let Some((piece, state)) = piece else {
                // Backs off from 2 to 64 us: kernels before the copy may run for a long time.
                std::thread::sleep(Duration::from_micros(2 << idle.min(5)));
                idle += 1;
                continue;
            };
            idle = 0;
            let len = if state == 0 { piece.len } else { 0 };
            let header = chunk_header(piece.transfer, piece.offset, len, state);
            // SAFETY: the device has filled the slot, which this thread owns; it has CHUNK bytes, a
            // multiple of 8.
            let bytes = unsafe { std::slice::from_raw_parts(piece.slot.address, len.next_multiple_of(8)) };
            let sent = transport.send_parts(&[header.as_bytes(), bytes]);
            if let Some(slots) = self.slots.get() {
                slots.give(piece.slot);
            }
            sent?;
        }
    }
}

#[cfg(test)]
mod tests;
