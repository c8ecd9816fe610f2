//! Bulk data: chunks of up to [`CHUNK`] bytes on connections parallel to the log's.
//!
//! A frame in the log fixes a transfer's place in the order; the frame's position names the
//! transfer.
//!
//! Each lane numbers its chunks for the life of the link. Its sender keeps a chunk, or can read it
//! again, until the other end has acknowledged the number. So a lane that breaks continues on
//! another connection, with the chunk that the other end lacks.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use gpusession_proto::frame::{
    BadFrame, CHUNK, DOWN_LANES, FIRST_DOWN_LANE, FIRST_UP_LANE, Header, UP_LANES, op,
};

use crate::flight::Ended;
use crate::link::{Link, LinkLost};
use crate::threads;
use crate::transport::Transport;

mod down;
mod up;

pub use self::down::{Detached, DownTransfers, On};
pub use self::up::Sent;
use self::up::UpQueue;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Memory of the program that a transfer reads or writes.
#[derive(Clone, Copy)]
pub struct HostRange {
    address: usize,
    /// Bytes of the transfer.
    len: usize,
    /// Rows that the bytes are, one after the other; `None` if they are adjacent in memory too.
    rows: Option<Rows>,
}

/// Rows of a 2D or 3D copy in the program's memory, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rows {
    /// Bytes of a row, not 0.
    pub width: usize,
    /// Distance of two rows of a layer.
    pub pitch: usize,
    /// Rows of a layer, not 0.
    pub height: usize,
    /// Distance of two layers.
    pub layer: usize,
}

impl Rows {
    /// Returns the distance of row `number` from the first one.
    fn offset(&self, number: usize) -> usize {
        number / self.height * self.layer + number % self.height * self.pitch
    }
}

/// Part of a piece of a transfer that is adjacent in the program's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Part {
    /// Offset in the piece.
    offset: usize,
    address: usize,
    len: usize,
}

impl HostRange {
    /// # Safety
    /// The range stays mapped until the transfer has ended: readable for a transfer to the device,
    /// writable for one from the device.
    pub unsafe fn new(address: usize, len: usize) -> Self {
        Self { address, len, rows: None }
    }

    /// Describes `count` rows from `address` on.
    ///
    /// # Safety
    /// As for [`HostRange::new`], for the bytes of the rows.
    pub unsafe fn rows(address: usize, rows: Rows, count: usize) -> Self {
        let adjacent = rows.pitch == rows.width && rows.layer == rows.height * rows.pitch;
        Self { address, len: rows.width * count, rows: (!adjacent).then_some(rows) }
    }

    /// Returns the bytes of the transfer.
    #[expect(clippy::len_without_is_empty, reason = "no transfer is empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns the distance from the first byte to the end of the last one.
    fn extent(&self) -> usize {
        match &self.rows {
            Some(rows) if self.len > 0 => rows.offset(self.len / rows.width - 1) + rows.width,
            _ => self.len,
        }
    }

    fn overlaps(&self, address: usize, len: usize) -> bool {
        self.address < address.saturating_add(len) && address < self.address + self.extent()
    }

    /// Returns `len` bytes from an offset of the transfer; `aside` holds them if they lie apart.
    ///
    /// # Safety
    /// The range is mapped and readable during the use of the bytes.
    unsafe fn bytes<'a>(&self, offset: usize, len: usize, aside: &'a mut Vec<u8>) -> &'a [u8] {
        if self.rows.is_none() {
            // SAFETY: by the caller's promise.
            return unsafe { std::slice::from_raw_parts((self.address + offset) as *const u8, len) };
        }
        aside.clear();
        // SAFETY: by the caller's promise.
        unsafe { self.append(offset, len, aside) };
        aside
    }

    /// Appends `len` bytes from an offset of the transfer.
    ///
    /// # Safety
    /// The range is mapped and readable.
    unsafe fn append(&self, offset: usize, len: usize, to: &mut Vec<u8>) {
        to.reserve(len);
        for part in self.parts(offset, len) {
            // SAFETY: by the caller's promise.
            to.extend_from_slice(unsafe { std::slice::from_raw_parts(part.address as *const u8, part.len) });
        }
    }

    /// Returns where `len` bytes from an offset of the transfer lie, in the order of the bytes.
    fn parts(&self, offset: usize, len: usize) -> Vec<Part> {
        let Some(rows) = &self.rows else {
            return vec![Part { offset: 0, address: self.address + offset, len }];
        };
        let (mut parts, mut done) = (Vec::with_capacity(len / rows.width + 2), 0);
        while done < len {
            let (row, column) = ((offset + done) / rows.width, (offset + done) % rows.width);
            let part = (rows.width - column).min(len - done);
            let address = self.address + rows.offset(row) + column;
            parts.push(Part { offset: done, address, len: part });
            done += part;
        }
        parts
    }
}

/// Returns a chunk's header: its number in the lane, the transfer, the offset in it, and the bytes
/// without padding.
pub fn chunk_header(number: u64, transfer: u64, offset: u64, len: usize, status: i32) -> Header {
    Header {
        len: (len.next_multiple_of(8) as u32).into(),
        op: op::CHUNK.into(),
        flags: 0.into(),
        thread: (status as u32).into(),
        number: (number as u32).into(),
        seq: transfer.into(),
        ack: (len as u64).into(),
        ctx: offset.into(),
    }
}

/// Returns the bytes without padding of the chunk with this number; an error if the header is
/// another frame's.
pub fn chunk_len(header: &Header, number: u64) -> Result<usize, BadFrame> {
    let len = header.ack.get() as usize;
    if header.op.get() != op::CHUNK || len > CHUNK || len.next_multiple_of(8) != header.body_len() {
        return Err(BadFrame("not a chunk"));
    }
    if header.number.get() != number as u32 {
        return Err(BadFrame("a chunk out of order"));
    }
    Ok(len)
}

/// Lanes of one link, in both directions.
pub struct Lanes {
    up: Arc<UpQueue>,
    open: Arc<Open>,
}

/// Present connections of all lanes.
#[derive(Default)]
struct Open {
    state: Mutex<Connections>,
}

#[derive(Default)]
struct Connections {
    /// Connections by lane.
    present: HashMap<u16, Arc<Transport>>,
    closed: bool,
}

impl Open {
    /// Makes a connection the present one of its lane.
    fn install(&self, lane: u16, transport: Transport) -> Arc<Transport> {
        let transport = Arc::new(transport);
        let mut state = lock(&self.state);
        if state.closed {
            transport.shutdown();
        }
        state.present.insert(lane, transport.clone());
        transport
    }

    fn close(&self) {
        let mut state = lock(&self.state);
        state.closed = true;
        state.present.values().for_each(|transport| transport.shutdown());
    }
}

impl Lanes {
    /// Opens the first `count` lanes of each direction.
    pub(crate) fn open(link: &Arc<Link>, count: u16) -> Result<Self, LinkLost> {
        let threads_error = |e| LinkLost(format!("cannot start a thread for a lane: {e}"));
        let returns = link.returns();
        let (up, open) = (Arc::new(UpQueue::new(returns)), Arc::<Open>::default());
        let connect = |lane| match link.open_lane(lane) {
            Ok(transport) => Ok(Some(open.install(lane, transport))),
            // Its thread tries again.
            Err(Ended::Broken(_)) if returns => Ok(None),
            Err(Ended::Broken(e)) => Err(LinkLost(format!("lane {lane}: {e}"))),
            Err(Ended::Fatal(reason)) => Err(LinkLost(reason)),
        };
        for lane in FIRST_UP_LANE..FIRST_UP_LANE + count.min(UP_LANES) {
            let first = connect(lane)?;
            let (queue, open, link) = (up.clone(), open.clone(), Arc::downgrade(link));
            threads::spawn("gpusession-up", move || up::serve(lane, &queue, &open, first, &link))
                .map_err(threads_error)?;
        }
        for lane in FIRST_DOWN_LANE..FIRST_DOWN_LANE + count.min(DOWN_LANES) {
            let first = connect(lane)?;
            let (transfers, open, link) = (link.down.clone(), open.clone(), Arc::downgrade(link));
            let serve = move || down::serve(lane, &transfers, &open, first, &link, returns);
            threads::spawn("gpusession-down", serve).map_err(threads_error)?;
        }
        Ok(Self { up, open })
    }

    /// Ends all lanes, so that no thread of theirs uses the program's memory for long.
    pub(crate) fn shutdown(&self) {
        self.open.close();
        self.up.fail_all();
    }

    /// Waits until no lane reads the program's memory for a transfer before `transfer`; returns
    /// `false` if that takes longer than `patience`.
    pub(crate) fn wait_unread(&self, transfer: u64, patience: Duration) -> bool {
        self.up.wait_unread(transfer, patience)
    }

    /// Sends a transfer although a hold is in force; returns `true` if the hold begins with it.
    pub(crate) fn want(&self, hold: u64, transfer: u64) -> bool {
        self.up.want(hold, transfer)
    }

    /// Ends a hold.
    pub(crate) fn release(&self, hold: u64) {
        self.up.release(hold);
    }

    /// Returns `true` if a transfer to the device waits because of a hold.
    pub(crate) fn is_held(&self) -> bool {
        self.up.is_held()
    }

    /// Prepares a transfer to the device.
    ///
    /// With `taken`, the program may change its memory when [`Link::wait_sent`] returns. A short
    /// transfer copies the memory here, and that wait takes no time.
    pub fn upload(&self, range: HostRange, taken: bool) -> Upload {
        Upload { range, copy: if taken { self.up.stage(range) } else { None } }
    }

    /// Queues a transfer.
    pub fn send(&self, transfer: u64, upload: Upload) -> Sent {
        UpQueue::send(&self.up, transfer, upload.range, upload.copy)
    }
}

/// Source of a transfer to the device.
pub struct Upload {
    range: HostRange,
    copy: Option<Vec<u8>>,
}
