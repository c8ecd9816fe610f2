//! The worker's end of bulk lanes.
//!
//! Lanes to the device receive chunks into pinned slots, where the executor that replays the
//! transfer's frame finds them. Lanes from the device send slots once the device has filled them.
//!
//! A copy on a stream that stands still holds its slots. If copies hold all slots for
//! [`STANDSTILL_TIMEOUT`], the lane allocates more. At the maximum the worker holds the program
//! back ([`hold`]). So such a stream stops no other one.
//!
//! A lane is a sequence of chunks that outlives its connections: see `link::lanes`. Each connection
//! has a thread; a later one waits until the earlier one's thread has left the lane.
#![expect(clippy::disallowed_methods, reason = "the driver has no event for a slot: it is polled")]

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use gpusession_link::flight::{Ended, Flight, acknowledgements, next_header};
use gpusession_link::lanes::{chunk_header, chunk_len};
use gpusession_link::resume::{Attempt, Counts, Fence, ack_held};
use gpusession_link::transport::{Transport, Wait};
use gpusession_proto::frame::{
    BadFrame, CHUNK, DOWN_LANES, FIRST_DOWN_LANE, FIRST_UP_LANE, UP_LANES, chunk_of, op,
};
use gpusession_proto::preface::{Code, refusal};
use zerocopy::IntoBytes;

use crate::contexts::Contexts;
use crate::driver::{Driver, Handle, Status, check, status, unless_broken};
use crate::replies::Replies;
use crate::staging::{Slot, Slots};

mod hold;
mod up_slots;

use self::hold::{Hold, HoldSender, Room, Spill};
use self::up_slots::UpSlots;

/// Most transfers of failed frames whose bytes are still to come; a program that sends them has
/// fewer.
const MAX_UNWANTED: usize = 1 << 20;
/// Slots of one lane to the device at first: one fills while the device reads the other.
pub const UP_SLOTS: usize = 2;
/// Most slots of one lane to the device: 36 MiB, of all lanes 288 MiB.
const MAX_UP_SLOTS: usize = 18;
/// Slots of all lanes to the client at first, and the most, of 160 MiB.
pub const DOWN_SLOTS: usize = 18;
const MAX_DOWN_SLOTS: usize = 80;
/// Slots that only a copy takes whose stream is idle.
pub const RESERVED: usize = 2;
/// Pauses for which a lane spins while the device fills a slot, and the length of each.
const SPINS: u32 = 32;
const SPIN_INTERVAL: Duration = Duration::from_micros(2);
/// Time without a free slot after which there are more of them.
///
/// Work of this length before a copy is usual.
const STANDSTILL_TIMEOUT: Duration = Duration::from_millis(100);
/// `CUDA_ERROR_DEVICE_UNAVAILABLE`: a lane is lost, and the whole connection with it.
pub const LANE_GONE: Status = 46;

/// A chunk that has arrived.
pub struct Chunk {
    /// Offset in the transfer, in bytes.
    pub offset: u64,
    /// Length, in bytes.
    pub len: usize,
    /// Memory with the bytes.
    ///
    /// [`Lanes::copied`] takes it back: a slot once the copy's event is recorded, other memory once
    /// nothing reads it.
    pub memory: Memory,
    /// Number of the lane that owns the slot.
    lane: u16,
}

/// Memory of a chunk.
pub enum Memory {
    /// Pinned memory.
    Slot(Slot),
    /// Ordinary memory, while there is no slot.
    Heap(Spill),
}

impl Memory {
    /// Returns the address of the first byte.
    pub fn address(&mut self) -> *mut u8 {
        match self {
            Self::Slot(slot) => slot.address,
            Self::Heap(spill) => spill.bytes.as_mut_ptr(),
        }
    }
}

/// A slot on its way to the client, filled or being filled.
struct Outgoing {
    transfer: u64,
    offset: u64,
    len: usize,
    slot: Slot,
    failed: Status,
    /// The client's handle of the stream that fills the slot.
    stream: u64,
}

impl Outgoing {
    /// Returns whether the device has filled the slot, as the driver's status.
    fn state(&self, driver: &Driver) -> Status {
        match self.failed {
            0 if self.slot.event.is_null() => 0,
            // SAFETY: the slot's event is valid, since `leave` waits for pieces that are still
            // queued.
            0 => unsafe { (driver.call.cuEventQuery)(self.slot.event) },
            failed => failed,
        }
    }
}

/// State of a lane over all its connections.
#[derive(Default)]
struct Lane {
    place: Mutex<Place>,
    /// The thread of one connection at a time uses the lane.
    serving: Mutex<()>,
}

#[derive(Default)]
struct Place {
    /// The connection that counts.
    fence: Fence,
    connection: Option<Arc<Transport>>,
    /// Whether that connection has ended.
    ended: bool,
    /// Number of the latest chunk from the client.
    received: u64,
    /// Chunks to the client.
    flight: Flight<Outgoing>,
}

impl Place {
    fn counts(&self) -> Counts {
        Counts { received: self.received, ..self.flight.counts() }
    }

    fn serves(&self, attempt: u32) -> bool {
        self.fence.admits(attempt) && !self.ended
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Default)]
struct Arrived {
    chunks: HashMap<u64, VecDeque<Chunk>>,
    /// Bytes that frames have taken of transfers, until they are done.
    taken: HashMap<u64, u64>,
    /// Transfers of failed frames, with the bytes that are still to come.
    unwanted: HashMap<u64, u64>,
    failed: bool,
    hold: Hold,
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
    /// Whether a lane that breaks may come back.
    returns: bool,
    /// Lanes in both directions, from number 1 on.
    lanes: [Lane; (UP_LANES + DOWN_LANES) as usize],
    /// Slots by index of the lane to the device.
    up: [UpSlots; UP_LANES as usize],
    down: DownQueue,
    arrived: Mutex<Arrived>,
    arrival: Condvar,
    sender: HoldSender,
    /// Time of the last look whether a hold may end.
    looked: Mutex<Option<Instant>>,
    opened: Condvar,
    opening: Mutex<()>,
    received: AtomicU64,
    sent: AtomicU64,
}

impl Lanes {
    /// Creates the lanes of a process; `returns`: one that breaks may come back.
    pub fn new(returns: bool) -> Self {
        Self { returns, ..Self::default() }
    }

    fn lane(&self, number: u16) -> Option<&Lane> {
        self.lanes.get(usize::from(number.checked_sub(1)?))
    }

    /// Claims a lane for its first connection.
    ///
    /// Returns `false` if the lane does not exist or another connection has claimed it.
    pub fn claim(&self, number: u16, attempt: u32, transport: &Arc<Transport>) -> bool {
        let Some(lane) = self.lane(number) else { return false };
        let mut place = lock(&lane.place);
        let free = !place.fence.is_claimed();
        if free {
            (place.fence, place.connection) = (Fence::new(attempt), Some(transport.clone()));
        }
        free
    }

    /// Lets the program continue a lane on a new connection, if it can prove that it is the one.
    ///
    /// An earlier connection counts until then.
    pub fn come_back(&self, attempt: &Attempt<'_>, transport: &Arc<Transport>) -> io::Result<()> {
        let refused = |reason: &str| {
            let _ = transport.send(&refusal(Code::State, reason));
            Err(io::Error::other(reason.to_owned()))
        };
        let lane = match self.lane(attempt.lane) {
            Some(lane) if self.returns => lane,
            _ => return refused("this worker has no such connection to bring back"),
        };
        let claim = attempt.challenge(transport)?;
        let (mine, old) = {
            let mut place = lock(&lane.place);
            let mine = place.counts();
            if let Err(reason) = place.fence.pass(attempt.number, &mine, &claim.counts) {
                return refused(reason);
            }
            place.ended = false;
            (mine, place.connection.replace(transport.clone()))
        };
        // Ends the earlier connection's threads.
        if let Some(old) = old {
            old.shutdown();
        }
        self.down.wake();
        transport.send(&attempt.welcome(transport, &claim, &mine)?)?;
        let _serving = lock(&lane.serving);
        let mut place = lock(&lane.place);
        if place.serves(attempt.number) {
            place.flight.restart(claim.counts.received);
            self.down.take_back(&mut place);
        }
        Ok(())
    }

    /// Serves a claimed lane until the connection ends or a later one replaces it.
    pub fn serve(
        &self,
        driver: &Driver,
        contexts: &Contexts,
        number: u16,
        attempt: u32,
        transport: &Transport,
    ) -> io::Result<()> {
        let lane = self.lane(number).ok_or_else(|| io::Error::other("no such lane"))?;
        let _serving = lock(&lane.serving);
        if !lock(&lane.place).serves(attempt) {
            return Ok(());
        }
        // A parked worker calls the driver only once there is something to do.
        let enter = || {
            let first = contexts.primary(0)?;
            // SAFETY: a primary context of this worker.
            check(unsafe { (driver.call.cuCtxSetCurrent)(first) })
        };
        let ended = self.carry(driver, &enter, number, lane, attempt, transport);
        let mut place = lock(&lane.place);
        if !place.fence.admits(attempt) {
            return Ok(());
        }
        place.ended = true;
        drop(place);
        match ended {
            Ended::Broken(e) if self.returns || e.kind() == io::ErrorKind::UnexpectedEof => Ok(()),
            Ended::Broken(e) => Err(e),
            Ended::Fatal(reason) => {
                let _ = transport.send(&refusal(Code::Other, &reason));
                Err(io::Error::other(reason))
            }
        }
    }

    fn carry(
        &self,
        driver: &Driver,
        enter: &(dyn Fn() -> Result<(), Status> + Sync),
        number: u16,
        lane: &Lane,
        attempt: u32,
        transport: &Transport,
    ) -> Ended {
        let said = |s: Status| Ended::Fatal(format!("lane {number}: CUDA error {s}"));
        if number >= FIRST_DOWN_LANE {
            let opened = self.open(driver, enter, &self.down.slots, DOWN_SLOTS).map(drop);
            self.opened.notify_all();
            return match opened {
                Ok(()) => self.down.carry(driver, enter, lane, attempt, transport, self.returns),
                Err(status) => said(status),
            };
        }
        let mine = &self.up[usize::from(number - FIRST_UP_LANE)];
        let slots = match self.open(driver, enter, &mine.slots, UP_SLOTS) {
            Ok(slots) => slots,
            Err(status) => return said(status),
        };
        let mut entered = false;
        let ended = loop {
            let memory = |transfer, len| {
                if !std::mem::replace(&mut entered, true) {
                    unless_broken(enter()).map_err(|status| Ended::Fatal(format!("CUDA error {status}")))?;
                }
                Ok(self.memory(driver, (mine, slots), transfer, len))
            };
            if let Err(ended) = self.receive(number, lane, attempt, transport, memory) {
                break ended;
            }
        };
        if !self.returns || matches!(ended, Ended::Fatal(_)) {
            lock(&self.arrived).failed = true;
            self.arrival.notify_all();
        }
        ended
    }

    /// Allocates slots, unless it was done before.
    fn open<'a>(
        &self,
        driver: &Driver,
        enter: &dyn Fn() -> Result<(), Status>,
        slots: &'a OnceLock<Slots>,
        count: usize,
    ) -> Result<&'a Slots, Status> {
        let _one_at_a_time = lock(&self.opening);
        if let Some(slots) = slots.get() {
            return Ok(slots);
        }
        unless_broken(enter())?;
        let new = Slots::new(driver, count, CHUNK)?;
        Ok(slots.get_or_init(|| new))
    }

    /// Receives one chunk; its effect and its count happen under one lock.
    fn receive(
        &self,
        lane_number: u16,
        lane: &Lane,
        attempt: u32,
        transport: &Transport,
        memory: impl FnOnce(u64, usize) -> Result<Memory, Ended>,
    ) -> Result<(), Ended> {
        let header = next_header(transport)?;
        let number = lock(&lane.place).received + 1;
        let len = chunk_len(&header, number)?;
        let transfer = header.seq.get();
        let (padded, offset) = (header.body_len(), header.ctx.get());
        let mut chunk = Chunk { offset, len, memory: memory(transfer, padded)?, lane: lane_number };
        // SAFETY: this thread owns the memory, which has CHUNK or `padded` bytes; `padded` is at
        // most CHUNK.
        let target = unsafe { std::slice::from_raw_parts_mut(chunk.memory.address(), padded) };
        if let Err(e) = transport.recv_exact(target, Wait::Spin(Duration::ZERO)) {
            self.drop_chunk(&mut lock(&self.arrived), chunk);
            return Err(e.into());
        }
        let held = {
            let mut place = lock(&lane.place);
            let mut arrived = lock(&self.arrived);
            if !place.serves(attempt) {
                self.drop_chunk(&mut arrived, chunk);
                return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
            }
            place.received = number;
            self.received.fetch_add(len as u64, Ordering::Relaxed);
            if let Some(left) = arrived.unwanted.get_mut(&transfer) {
                *left = left.saturating_sub(len as u64);
                if *left == 0 {
                    arrived.unwanted.remove(&transfer);
                }
                self.drop_chunk(&mut arrived, chunk);
            } else {
                arrived.chunks.entry(transfer).or_default().push_back(chunk);
            }
            arrived.hold.in_force()
        };
        self.arrival.notify_all();
        if self.returns {
            transport.send(&ack_held(number, held))?;
        }
        Ok(())
    }

    /// Waits for memory for a chunk.
    fn memory(
        &self,
        driver: &Driver,
        (lane, slots): (&UpSlots, &Slots),
        transfer: u64,
        len: usize,
    ) -> Memory {
        let mut since = Instant::now();
        let mut idle = 0u32;
        loop {
            if let Some(slot) = lane.slot(driver, slots) {
                return Memory::Slot(slot);
            }
            let room = {
                let mut arrived = lock(&self.arrived);
                let drops = arrived.unwanted.contains_key(&transfer);
                if drops { Some(Room::to_drop()) } else { arrived.hold.room(transfer, len) }
            };
            if let Some(room) = room {
                return Memory::Heap(room.memory(len));
            }
            if since.elapsed() >= STANDSTILL_TIMEOUT {
                if !slots.grow(driver, MAX_UP_SLOTS) {
                    self.hold();
                }
                since = Instant::now();
                continue;
            }
            // Slots wait for the device or for an executor, which tells.
            let arrived = lock(&self.arrived);
            let _ = self.arrival.wait_timeout(arrived, Duration::from_micros(8 << idle.min(7)));
            idle += 1;
        }
    }

    /// Allows the program to be held back, since its library understands that.
    ///
    /// Only lanes that may come back have acknowledgements.
    pub fn program_holds(&self, replies: Arc<Replies>) {
        if self.returns {
            let _ = self.sender.replies.set(replies);
        }
    }

    /// Changes what the program sends; executors and lanes look again.
    fn send_change(&self, op: u16, transfer: u64, change: impl FnOnce(&mut Hold) -> u64) {
        if self.sender.send(op, transfer, || change(&mut lock(&self.arrived).hold)) {
            self.arrival.notify_all();
        }
    }

    /// Holds the program back, if it can be.
    fn hold(&self) {
        if self.sender.replies.get().is_none() {
            return;
        }
        let unwanted = {
            let mut arrived = lock(&self.arrived);
            arrived.hold.begin();
            arrived.unwanted.keys().copied().collect::<Vec<_>>()
        };
        // Their sources belong to the program again.
        for transfer in unwanted {
            self.send_change(op::WANTED, transfer, |hold| hold.want(transfer));
        }
        self.arrival.notify_all();
    }

    /// Ends a hold once half of the slots of each lane to the device are free.
    ///
    /// One of the executors that wait looks, once in a while.
    fn release(&self, driver: &Driver) {
        let Ok(mut looked) = self.looked.try_lock() else { return };
        let soon = looked.is_some_and(|at: Instant| at.elapsed() < hold::POLL_INTERVAL);
        if soon || !lock(&self.arrived).hold.may_end() {
            return;
        }
        *looked = Some(Instant::now());
        if self.up.iter().all(|lane| lane.is_half_free(driver)) {
            self.send_change(op::RELEASE, 0, Hold::end);
        }
    }

    /// Waits until the stream of a copy has reached it, for a chunk in ordinary memory.
    pub fn wait_reached(
        &self,
        driver: &Driver,
        mut reached: impl FnMut() -> Result<bool, Status>,
    ) -> Result<(), Status> {
        while !reached()? {
            self.release(driver);
            let arrived = lock(&self.arrived);
            drop(self.arrival.wait_timeout(arrived, hold::POLL_INTERVAL));
        }
        Ok(())
    }

    /// Notes that a transfer's frame is done; its bytes were taken.
    pub fn forget(&self, transfer: u64) {
        let mut arrived = lock(&self.arrived);
        arrived.taken.remove(&transfer);
        arrived.hold.forget(transfer);
    }

    /// Waits for the next chunk of a transfer; [`LANE_GONE`] if a lane has failed.
    ///
    /// `reached`: whether the stream of the copy has reached it, without waiting for it. Its error
    /// ends the wait: behind a fault no host function runs that would send the bytes.
    pub fn next_chunk(
        &self,
        driver: &Driver,
        transfer: u64,
        mut reached: impl FnMut() -> Result<bool, Status>,
    ) -> Result<Chunk, Status> {
        let mut arrived = lock(&self.arrived);
        loop {
            if let Some(chunks) = arrived.chunks.get_mut(&transfer) {
                let chunk = chunks.pop_front();
                if chunks.is_empty() {
                    arrived.chunks.remove(&transfer);
                }
                if let Some(chunk) = chunk {
                    *arrived.taken.entry(transfer).or_default() += chunk.len as u64;
                    return Ok(chunk);
                }
            }
            if arrived.failed {
                return Err(LANE_GONE);
            }
            if arrived.hold.holds_back(transfer) {
                drop(arrived);
                self.release(driver);
                if reached()? {
                    self.send_change(op::WANTED, transfer, |hold| hold.want(transfer));
                }
                arrived = lock(&self.arrived);
                if arrived.hold.holds_back(transfer) && !arrived.chunks.contains_key(&transfer) {
                    arrived = self
                        .arrival
                        .wait_timeout(arrived, hold::POLL_INTERVAL)
                        .unwrap_or_else(PoisonError::into_inner)
                        .0;
                }
                continue;
            }
            let (next, waited) = self
                .arrival
                .wait_timeout(arrived, STANDSTILL_TIMEOUT)
                .unwrap_or_else(PoisonError::into_inner);
            arrived = next;
            if waited.timed_out() {
                drop(arrived);
                reached()?;
                arrived = lock(&self.arrived);
            }
        }
    }

    /// Drops the chunks of a transfer of `len` bytes whose frame has failed.
    ///
    /// They would block the lanes. Returns `false` if too many such transfers lack bytes.
    pub fn discard(&self, transfer: u64, len: u64) -> bool {
        let mut arrived = lock(&self.arrived);
        let came = arrived.chunks.remove(&transfer).unwrap_or_default();
        let waiting: u64 = came.iter().map(|chunk| chunk.len as u64).sum();
        let taken = arrived.taken.remove(&transfer).unwrap_or_default();
        let left = len.saturating_sub(waiting + taken);
        if left > 0 {
            arrived.unwanted.insert(transfer, left);
        }
        let bounded = arrived.unwanted.len() <= MAX_UNWANTED;
        came.into_iter().for_each(|chunk| self.drop_chunk(&mut arrived, chunk));
        drop(arrived);
        self.arrival.notify_all();
        if left > 0 {
            // The program's memory is not read any more once its bytes have come.
            self.send_change(op::WANTED, transfer, |hold| hold.want(transfer));
        }
        bounded
    }

    /// Takes back the memory of a chunk that nothing has read.
    fn drop_chunk(&self, arrived: &mut Arrived, chunk: Chunk) {
        match chunk.memory {
            Memory::Slot(slot) => self.up[usize::from(chunk.lane - FIRST_UP_LANE)].give(slot),
            Memory::Heap(spill) => arrived.hold.take_back(&spill),
        }
    }

    /// Takes back a chunk's memory (see [`Chunk::memory`]).
    pub fn copied(&self, chunk: Chunk) {
        match chunk.memory {
            Memory::Slot(slot) => {
                self.up[usize::from(chunk.lane - FIRST_UP_LANE)].copied(slot);
            }
            Memory::Heap(spill) => lock(&self.arrived).hold.take_back(&spill),
        }
        self.arrival.notify_all();
    }

    /// Waits until no lane uses an event of a context that is about to be destroyed or reset.
    ///
    /// All work in that context is done; its events go with it.
    pub fn leave(&self, ctx: u64) {
        for lane in &self.up {
            let mut copying = lane.copying();
            let (done, others) = std::mem::take(&mut *copying).into_iter().partition(|s| s.ctx == ctx);
            *copying = others;
            drop(copying);
            VecDeque::into_iter(done).for_each(|slot| lane.give(slot));
        }
        self.arrival.notify_all();
        let pending = |pieces: &VecDeque<Outgoing>| pieces.iter().any(|piece| piece.slot.ctx == ctx);
        while pending(&lock(&self.down.pieces)) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Pins all slots again after a reset of their context, which is current.
    pub fn pin_again(&self, driver: &Driver) {
        let up = self.up.iter().map(|lane| &lane.slots);
        for slots in up.chain([&self.down.slots]).filter_map(OnceLock::get) {
            // Copies work without pinning, only slower.
            let _ = slots.pin(driver);
        }
    }

    /// Returns `true` if no piece is on its way to the client.
    pub fn idle(&self) -> bool {
        lock(&self.down.pieces).is_empty()
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
        let mut opening = lock(&self.opening);
        loop {
            if let Some(slots) = self.down.slots.get() {
                return slots;
            }
            opening = self.opened.wait(opening).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Sends `len` bytes in chunks.
    ///
    /// `copy` fills a slot with the bytes from an offset, or queues that and records the slot's
    /// event. `source` is the stream of the device's bytes; without one `copy` fills slots at once.
    pub fn send(
        &self,
        transfer: u64,
        len: usize,
        source: Option<Source<'_>>,
        mut copy: impl FnMut(usize, usize, &mut Slot) -> Result<(), Status>,
    ) -> Result<(), Status> {
        let slots = self.outgoing();
        let (chunk, mut stands) = (chunk_of(len), false);
        for offset in (0..len).step_by(chunk) {
            let mut slot = self.down.slot(slots, source.as_ref(), &mut stands);
            let len = chunk.min(len - offset);
            self.sent.fetch_add(len as u64, Ordering::Relaxed);
            let result = copy(offset, len, &mut slot);
            let failed = result.err().unwrap_or(0);
            let stream = source.as_ref().map_or(0, |source| source.name);
            let piece = Outgoing { transfer, offset: offset as u64, len, slot, failed, stream };
            lock(&self.down.pieces).push_back(piece);
            self.down.changed.notify_one();
            result?;
        }
        Ok(())
    }
}

/// Stream whose copies fill slots.
pub struct Source<'a> {
    pub driver: &'static Driver,
    pub contexts: &'a Contexts,
    pub stream: Handle,
    /// The client's handle of it.
    pub name: u64,
}

impl Source<'_> {
    /// Waits until the stream is idle, by calls of the driver that never wait.
    fn wait_for_idle(&self) {
        let mut idle = 0u32;
        // SAFETY: a stream of this worker.
        while unsafe { (self.driver.call.cuStreamQuery)(self.stream) } == status::NOT_READY {
            std::thread::sleep(Duration::from_micros(16 << idle.min(6)));
            idle += 1;
        }
    }
}

impl DownQueue {
    /// Waits for a slot for a chunk.
    ///
    /// If streams that stand still hold all that there may be, only copies on idle streams get one,
    /// and those that the processor makes. `stands`: so it was for the previous chunk.
    fn slot(&self, slots: &Slots, source: Option<&Source<'_>>, stands: &mut bool) -> Slot {
        loop {
            let patience = if *stands { Duration::ZERO } else { STANDSTILL_TIMEOUT };
            if let Some(slot) = slots.take_within(patience, RESERVED) {
                *stands = false;
                return slot;
            }
            if let Some(source) = source {
                // Slots that wait for the network will be free soon.
                *stands = self.on_device(source.driver) + RESERVED >= slots.count();
                let grow = || Ok(slots.grow(source.driver, MAX_DOWN_SLOTS));
                if !*stands || source.contexts.within_first(source.driver, grow) == Ok(true) {
                    continue;
                }
                source.wait_for_idle();
            }
            if let Some(slot) = slots.take_within(STANDSTILL_TIMEOUT, 0) {
                return slot;
            }
        }
    }

    /// Returns the number of pieces that the device has still to fill.
    fn on_device(&self, driver: &Driver) -> usize {
        lock(&self.pieces).iter().filter(|piece| piece.state(driver) == status::NOT_READY).count()
    }

    /// Lets threads of lanes look at their connections again.
    fn wake(&self) {
        // Under the lock: a thread that looked before must wait by now.
        drop(lock(&self.pieces));
        self.changed.notify_all();
    }

    /// Takes back the slots of chunks that the client has.
    fn take_back(&self, place: &mut Place) {
        while let Some(piece) = place.flight.arrived() {
            if let Some(slots) = self.slots.get() {
                slots.give(piece.slot);
            }
        }
    }

    /// Uses one connection of a lane until its end.
    fn carry(
        &self,
        driver: &Driver,
        enter: &(dyn Fn() -> Result<(), Status> + Sync),
        lane: &Lane,
        attempt: u32,
        transport: &Transport,
        returns: bool,
    ) -> Ended {
        std::thread::scope(|scope| {
            let listen = || {
                let ended = acknowledgements(transport, |number, _| {
                    let mut place = lock(&lane.place);
                    if !place.serves(attempt) {
                        return Err(BadFrame("from an earlier connection"));
                    }
                    place.flight.acknowledge(number)?;
                    self.take_back(&mut place);
                    Ok(())
                });
                let mut place = lock(&lane.place);
                place.ended |= place.fence.admits(attempt);
                drop(place);
                self.wake();
                ended
            };
            let listener = std::thread::Builder::new().name("acknowledgements".into());
            let listener = match listener.spawn_scoped(scope, listen) {
                Ok(listener) => listener,
                Err(e) => return Ended::Fatal(format!("cannot start a thread for a lane: {e}")),
            };
            let sent = self.send(driver, enter, lane, attempt, transport, returns);
            transport.shutdown();
            match (listener.join(), sent) {
                (Ok(Ended::Fatal(reason)), _) => Ended::Fatal(reason),
                (_, Err(ended)) | (Ok(ended), Ok(())) => ended,
                (Err(_), Ok(())) => Ended::Fatal("the lane's thread failed".into()),
            }
        })
    }

    /// Sends chunks until the connection fails, or is no longer the lane's.
    fn send(
        &self,
        driver: &Driver,
        enter: &dyn Fn() -> Result<(), Status>,
        lane: &Lane,
        attempt: u32,
        transport: &Transport,
        returns: bool,
    ) -> Result<(), Ended> {
        let mut entered = false;
        let mut idle = 0u32;
        loop {
            let mut place = lock(&lane.place);
            if !place.serves(attempt) {
                return Ok(());
            }
            if place.flight.is_carried() {
                let mut queue = lock(&self.pieces);
                if queue.is_empty() {
                    drop(place);
                    drop(self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner));
                    continue;
                }
                if !entered {
                    // The driver may let this thread wait.
                    drop((queue, place));
                    unless_broken(enter()).map_err(|status| Ended::Fatal(format!("CUDA error {status}")))?;
                    entered = true;
                    continue;
                }
                let Some(piece) = ready(driver, &mut queue) else {
                    drop((queue, place));
                    pause(idle);
                    idle += 1;
                    continue;
                };
                place.flight.push(piece);
            }
            idle = 0;
            let Some((number, piece)) = place.flight.begin() else { continue };
            let len = if piece.failed == 0 { piece.len } else { 0 };
            let header = chunk_header(number, piece.transfer, piece.offset, len, piece.failed);
            // SAFETY: the device has filled the slot, which has CHUNK bytes, a multiple of 8. The
            // flight owns it until `written` below at least.
            let bytes = unsafe { std::slice::from_raw_parts(piece.slot.address, len.next_multiple_of(8)) };
            drop(place);
            let sent = transport.send_parts(&[header.as_bytes(), bytes]);
            let mut place = lock(&lane.place);
            place.flight.written();
            if !returns {
                let _ = place.flight.acknowledge(number);
            }
            self.take_back(&mut place);
            drop(place);
            sent?;
        }
    }
}

/// Pauses before the poll after `polls` of them that found nothing.
///
/// The device fills a slot within 100 us, and a sleep takes 50 us at least. A kernel before the
/// copy may run for a long time.
fn pause(polls: u32) {
    let Some(sleeps) = polls.checked_sub(SPINS) else {
        let since = Instant::now();
        while since.elapsed() < SPIN_INTERVAL {
            std::hint::spin_loop();
        }
        return;
    };
    std::thread::sleep(Duration::from_micros(2 << sleeps.min(5)));
}

/// Takes any piece that is ready: a blocked stream must not delay the others.
///
/// A stream fills its slots in their order, so that one query for each stream suffices: other lanes
/// wait for the queue meanwhile.
fn ready(driver: &Driver, queue: &mut VecDeque<Outgoing>) -> Option<Outgoing> {
    let mut waiting = Vec::new();
    for i in 0..queue.len() {
        let place = (queue[i].slot.ctx, queue[i].stream);
        if waiting.contains(&place) {
            continue;
        }
        let state = queue[i].state(driver);
        if state != status::NOT_READY {
            queue[i].failed = state;
            return queue.remove(i);
        }
        waiting.push(place);
    }
    None
}

#[cfg(test)]
mod tests;
