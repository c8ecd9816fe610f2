//! The process's side of one worker: link, devices, contexts, addresses.
//!
//! In this crate a client is such a [`Client`], and not a machine of the pool.

use std::cell::Cell;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};
use std::time::Duration;

use gpusession_link::lanes::{Detached, Sent};
use gpusession_link::link::{Begun, Caller};
use gpusession_link::{Events, Link, LinkLost, Reply, threads};
use gpusession_proto::frame::{
    BODY_PART, BadFrame, LONG_REQUEST_BYTES, MAX_BODY, MAX_LONG_BODY, Reader, Writer, ability,
    library_ability, op,
};
use gpusession_proto::grant::Endpoint;
use gpusession_proto::handle;

use crate::devices::{Device, Peer};
use crate::foreign_addresses::Claims;
use crate::freed_blocks::FreedBlocks;
use crate::long_waits::{Beside, LongWaits};
use crate::positions::Positions;
use crate::status::{
    CONTEXT_IS_DESTROYED, DEVICE_UNAVAILABLE, INVALID_CONTEXT, NOT_SUPPORTED, OUT_OF_MEMORY, Result,
    SYSTEM_NOT_READY, UNKNOWN,
};
use crate::window::{self, Window};
use crate::{errors, handles, run_ahead, thread, trace};

/// Windows offered to the worker at once.
const OFFERED: usize = 3;

/// A context that the program created.
#[derive(Clone, Copy)]
pub struct ContextInfo {
    /// Ordinal of its device on the worker.
    pub device: u32,
    /// `CUctx_flags`
    pub flags: u32,
    /// API version, for `cuCtxGetApiVersion`.
    pub version: u32,
    /// Its creation, and each `cuCtxAttach` without a `cuCtxDetach`.
    pub users: u32,
}

/// State for one worker of the process.
pub struct Client {
    /// Number of the worker in the process, from 0; its handles contain it.
    pub number: u8,
    /// Connection to the worker.
    pub link: Arc<Link>,
    /// CUDA version of the server's driver, at most [`NEWEST`].
    pub driver_version: i32,
    /// The worker's devices, by ordinal there.
    pub devices: Vec<Device>,
    /// The worker's bits of [`ability`].
    pub abilities: u64,
    /// Contexts that the program created, by handle.
    pub created: RwLock<HashMap<u64, ContextInfo>>,
    /// Window and arena: memory that the device can reach at an address that this process chooses.
    pub whole_window: Range<u64>,
    /// Arena: pinned memory that the library allocates, and the device's addresses of registered
    /// memory.
    pub host_arena: Range<u64>,
    /// Addresses that the worker's driver has chosen.
    pub claims: Claims,
    /// Positions up to which the log's work is known to be done.
    pub positions: Positions,
    /// Blocks of pools that the program has freed and the worker has not.
    pub freed: FreedBlocks,
    /// Number of changes of a device's current pool.
    pool_changes: AtomicU64,
    window: Mutex<Window>,
    long_requests: LongRequests,
    pub long_waits: LongWaits,
    /// Number of the device's changes of host memory that have come.
    pub host_changes: AtomicU64,
    /// Held while a thread sends changes of shared memory, so that an older state never follows a
    /// newer one.
    pub sending: Mutex<()>,
    events: OnceLock<bool>,
    /// Whether the thread for programs that only watch their memory runs.
    landings: OnceLock<bool>,
    sticky: AtomicI32,
    /// The fault of a kernel, also after a reset.
    fault: AtomicI32,
}

/// Whether a client of this process has a fault.
static ANY_FAULT: AtomicBool = AtomicBool::new(false);

/// Returns `true` if a kernel of this process has failed.
#[inline]
pub fn any_fault() -> bool {
    ANY_FAULT.load(Ordering::Relaxed)
}

/// Bytes of long requests without a reply, which the worker keeps.
///
/// A forked child makes no call that takes it.
#[derive(Default)]
struct LongRequests {
    bytes: Mutex<usize>,
    ended: Condvar,
}

impl LongRequests {
    /// Waits until the worker has room for a body; the room is free again when the result is
    /// dropped.
    fn admit(&self, len: usize) -> impl Drop + use<'_> {
        struct Room<'a>(&'a LongRequests, usize);

        impl Drop for Room<'_> {
            fn drop(&mut self) {
                *self.0.lock() -= self.1;
                self.0.ended.notify_all();
            }
        }

        let room = len + LONG_REQUEST_BYTES;
        let full = |bytes: &mut usize| *bytes > 0 && *bytes + room > MAX_LONG_BODY;
        *self.ended.wait_while(self.lock(), full).unwrap_or_else(PoisonError::into_inner) += room;
        Room(self, room)
    }

    fn lock(&self) -> MutexGuard<'_, usize> {
        self.bytes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reason why a worker cannot serve.
pub struct Failed {
    /// Status for the program; `None` if the worker did not answer, so that another one may serve.
    pub status: Option<i32>,
    /// One line of text for people.
    pub reason: String,
}

impl From<i32> for Failed {
    fn from(status: i32) -> Self {
        let name = errors::find(status).map_or("an unknown error".into(), |(name, _)| name.to_string_lossy());
        Self { status: Some(status), reason: format!("its worker cannot serve this program: {name}") }
    }
}

/// Newest CUDA version whose calls this library knows.
pub const NEWEST: i32 = 13_000;

fn malformed(_: BadFrame) -> i32 {
    UNKNOWN
}

/// Returns the status of a call whose link is lost; it is sticky.
pub fn unavailable(_: LinkLost) -> i32 {
    DEVICE_UNAVAILABLE
}

/// Writes a body, or an empty frame without effect in place of one that the worker would refuse.
///
/// A frame that is too long would end the connection. Its body goes to `long`.
#[inline]
fn bounded(long: &Cell<Vec<u8>>, body: impl FnOnce(&mut Writer<'_>)) -> impl FnOnce(&mut Writer<'_>) {
    |w| {
        body(w);
        if w.is_too_long() {
            long.set(w.body().to_vec());
            w.replace(op::MARK);
        }
    }
}

impl Client {
    /// Connects to a worker and agrees with it on a window of addresses.
    ///
    /// `events` takes the worker's unsolicited frames.
    pub fn open(
        endpoint: &Endpoint,
        number: u8,
        events: Box<dyn Events>,
    ) -> std::result::Result<Self, Failed> {
        let windows = window::offer(OFFERED);
        let opened = Link::open(endpoint, events, |w: &mut Writer<'_>| {
            w.word(windows.len() as u64);
            w.word(window::DEVICE_WINDOW);
            for base in &windows {
                w.word(*base);
            }
            w.word(library_ability::ALL);
        });
        let made = match opened {
            Ok((link, reply)) => Self::greeted(number, link.clone(), &reply, &windows).map_err(|failed| {
                link.close();
                Failed { reason: format!("server {}: {}", link.server, failed.reason), ..failed }
            }),
            Err(lost) => Err(Failed { status: None, reason: lost.0 }),
        };
        let taken = made.as_ref().map_or(0, |client| client.whole_window.start);
        windows.into_iter().filter(|base| *base != taken).for_each(window::withdraw);
        made
    }

    fn greeted(
        number: u8,
        link: Arc<Link>,
        reply: &Reply,
        offered: &[u64],
    ) -> std::result::Result<Self, Failed> {
        let mut r = reply.reader();
        if reply.status != 0 {
            let said = r.text().unwrap_or_default();
            let failed = Failed::from(reply.status);
            return Err(if said.is_empty() { failed } else { Failed { reason: said.into(), ..failed } });
        }
        // The link has read these: the session's secret, and how long the worker waits.
        let (_secret, _grace) = (string(&mut r)?, word(&mut r)?);
        let base = word(&mut r)?;
        if !offered.contains(&base) {
            let reason = "its worker could not reserve any of the offered address windows".into();
            return Err(Failed { status: Some(SYSTEM_NOT_READY), reason });
        }
        let driver_version = word(&mut r)? as i32;
        let count = word(&mut r)?;
        if count > u64::from(handles::FIRST_CREATED) {
            return Err(UNKNOWN.into());
        }
        let mut devices = (0..count as u32)
            .map(|local| Device::read(&mut r, local))
            .collect::<std::result::Result<Vec<_>, _>>()
            .map_err(malformed)?;
        for device in &mut devices {
            // An older server omits these; its devices then reach no other device.
            device.peers = (0..count).map(|_| Peer::read(&mut r).unwrap_or_default()).collect();
        }
        // An older server has none.
        let abilities = r.word().unwrap_or_default();
        Ok(Self {
            number,
            link,
            driver_version: driver_version.min(NEWEST),
            devices,
            abilities,
            created: RwLock::default(),
            whole_window: base..window::host_arena(base).end,
            host_arena: window::host_arena(base),
            claims: Claims::default(),
            positions: Positions::default(),
            freed: FreedBlocks::default(),
            pool_changes: AtomicU64::new(0),
            window: Mutex::new(Window::new(base)),
            long_requests: LongRequests::default(),
            long_waits: LongWaits::default(),
            host_changes: AtomicU64::new(0),
            sending: Mutex::new(()),
            events: OnceLock::new(),
            landings: OnceLock::new(),
            sticky: AtomicI32::new(0),
            fault: AtomicI32::new(0),
        })
    }

    /// Prints the lines of `GPUSESSION_TRACE=summary`.
    pub fn print_summary(&self) {
        let waits = self.link.waits();
        trace::print(&format!(
            "gpusession: {} frames to {}, {} waits for the server, {} colliding addresses",
            self.link.position(),
            self.link.server,
            waits.iter().map(|(_, count, _)| u64::from(*count)).sum::<u64>(),
            self.claims.collisions()
        ));
        let one = |(name, count, time): &(_, _, Duration)| format!("{count} {name} {} ms", time.as_millis());
        let waits: Vec<_> = waits.iter().map(one).collect();
        trace::print(&format!("gpusession: waits: {}", waits.join(", ")));
    }

    /// Starts a thread that reads the worker's unsolicited frames, even while no thread waits for a
    /// reply.
    pub fn serve_events(&'static self) -> Result {
        let serving = self
            .events
            .get_or_init(|| threads::spawn("gpusession-event", || self.link.serve_events()).is_ok());
        if *serving { Ok(()) } else { Err(OUT_OF_MEMORY) }
    }

    /// Starts a thread that receives copies to pinned memory for a program that makes no further
    /// call, and lets copies from there proceed. Without it, the program's synchronizing calls do.
    pub fn serve_landings(&'static self) {
        self.landings
            .get_or_init(|| threads::spawn("gpusession-landing", || self.link.serve_landings()).is_ok());
    }

    /// Locks the window of device addresses.
    pub fn window(&self) -> MutexGuard<'_, Window> {
        self.window.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the device of a context of this client.
    pub fn device_of(&self, ctx: u64) -> Result<&Device> {
        if handle::kind(ctx) != handle::CTX || handle::server(ctx) != self.number {
            return Err(INVALID_CONTEXT);
        }
        if let Some(device) = self.devices.get(handle::slot(ctx) as usize) {
            return Ok(device);
        }
        let created = self.created.read().unwrap_or_else(PoisonError::into_inner);
        let known = created.get(&ctx).ok_or(CONTEXT_IS_DESTROYED)?;
        self.devices.get(known.device as usize).ok_or(INVALID_CONTEXT)
    }

    /// Returns the handle of a device's primary context, without a round trip.
    pub fn primary(&self, local: u32) -> u64 {
        handle::make(handle::CTX, self.number, 1, local)
    }

    /// Returns a new handle of a kind for this client's worker.
    pub fn mint(&self, kind: u8) -> u64 {
        handles::mint(kind, self.number)
    }

    /// Converts the worker's name of an object (an address below 2^48) into the program's.
    pub fn name(&self, object: u64) -> u64 {
        object | u64::from(self.number) << 48
    }

    /// Converts the program's name of an object of this client into the worker's.
    pub fn own(&self, named: u64) -> u64 {
        named ^ u64::from(self.number) << 48
    }

    /// Returns the primary contexts of the devices, and those that the program has created.
    pub fn contexts(&self) -> Vec<u64> {
        let created = self.created.read().unwrap_or_else(PoisonError::into_inner);
        let primaries = (0..).zip(&self.devices).map(|(local, _)| self.primary(local));
        primaries.chain(created.keys().copied()).collect()
    }

    /// Returns an error if `other`, the client of a further argument, is another one.
    pub fn same(&self, other: &Self) -> Result {
        if self.number == other.number { Ok(()) } else { Err(cross_lease_error("an argument")) }
    }

    /// Returns the thread and context that a frame of the calling thread names.
    #[inline]
    pub fn caller(&self) -> Caller {
        Caller { thread: thread::id(), ctx: handle::local(self.context()) }
    }

    /// Returns the current context, as this client's worker knows it; 0 if no context is current.
    ///
    /// A context of another client means nothing to this worker. The frame then names the primary
    /// context of this client's first device.
    #[inline]
    pub fn context(&self) -> u64 {
        let current = thread::current();
        let known = current == 0 || handle::server(current) == self.number;
        if known { current } else { self.primary(0) }
    }

    /// Appends a frame to the log and returns its position; never waits for the worker.
    #[inline]
    pub fn post(&self, op: u16, body: impl FnOnce(&mut Writer<'_>)) -> Result<u64> {
        let long = Cell::default();
        let counted = |w: &mut Writer<'_>| {
            bounded(&long, body)(w);
            run_ahead::sent(self.number, w.written());
        };
        let seq = self.link.post(op, self.caller(), counted).map_err(unavailable)?;
        let long = long.into_inner();
        if long.is_empty() {
            return Ok(seq);
        }
        let (seq, reply) = self.ask_long(op, &long)?;
        self.check_status(reply.status)?;
        Ok(seq)
    }

    /// Starts a thread, once, that works from time to time while another one waits long, or the GPU
    /// works and no thread waits.
    ///
    /// If it cannot start, the work is left to the program's calls.
    pub fn work_beside_waits(&'static self, work: fn(&Self)) {
        let serve = move || {
            self.long_waits.serve(|beside| {
                let before = self.host_changes.load(Ordering::Relaxed);
                if beside == Beside::GpuWork {
                    // A lost link ends the thread below.
                    let _ = self.link.poll();
                }
                // During an outage it would hold locks until the end.
                if !self.link.is_away() {
                    work(self);
                }
                let changed = self.host_changes.load(Ordering::Relaxed) != before;
                self.link.check().is_ok().then_some(changed)
            });
        };
        if self.long_waits.is_new() {
            let _ = threads::spawn("gpusession-upload", serve);
        }
    }

    /// Waits for the reply to a frame.
    pub fn finish(&self, begun: Begun) -> Result<Reply> {
        let _wait = self.long_waits.begin();
        self.link.finish_call(begun).map_err(unavailable)
    }

    /// Waits for the reply to a frame that is probably answered by now.
    pub fn finish_mark(&self, begun: Begun) -> Result {
        let _wait = self.long_waits.begin();
        self.link.finish_mark(begun).map_err(unavailable)
    }

    /// As [`Link::wait_detached`].
    pub fn wait_detached(&self, wanted: impl Fn(&Detached) -> bool) -> Result {
        let _wait = self.long_waits.begin();
        self.link.wait_detached(wanted).map_err(unavailable)
    }

    /// As [`Link::wait_sent`].
    pub fn wait_sent(&self, sent: &Sent) -> bool {
        let _wait = self.long_waits.begin();
        self.link.wait_sent(sent)
    }

    /// As [`Link::wait_unread`].
    pub fn wait_unread(&self, position: u64) {
        let _wait = self.long_waits.begin();
        self.link.wait_unread(position);
    }

    /// Waits for the bytes of a bulk transfer from the device; returns its status.
    pub fn wait_landed(&self, transfer: u64) -> i32 {
        let _wait = self.long_waits.begin();
        self.link.down.wait(transfer)
    }

    /// Appends a frame and waits for the reply; a failure of the driver is an error.
    pub fn call(&self, op: u16, body: impl FnOnce(&mut Writer<'_>)) -> Result<Reply> {
        let reply = self.ask(op, body)?;
        self.check_status(reply.status)?;
        Ok(reply)
    }

    /// Appends a frame and waits for the reply, which may hold a failure.
    pub fn ask(&self, op: u16, body: impl FnOnce(&mut Writer<'_>)) -> Result<Reply> {
        self.free_blocks(op)?;
        let long = Cell::default();
        let begun = self.link.begin_call(op, self.caller(), bounded(&long, body)).map_err(unavailable)?;
        let reply = self.finish(begun)?;
        let long = long.into_inner();
        if long.is_empty() { Ok(reply) } else { self.ask_long(op, &long).map(|(_, reply)| reply) }
    }

    /// Sends a request in several frames, since one cannot hold its body, and waits for the reply;
    /// also returns its position.
    ///
    /// A call that else would not wait does so here, and for other threads' requests without whose
    /// end the worker has no room.
    #[cold]
    fn ask_long(&self, op: u16, body: &[u8]) -> Result<(u64, Reply)> {
        let most = if self.abilities & ability::LONG_BODIES == 0 { MAX_BODY } else { MAX_LONG_BODY };
        if body.len() > most {
            trace::why(&format!("operation {op}: arguments of more than {} MiB", most >> 20));
            return Err(NOT_SUPPORTED);
        }
        let (own, rest) = body.split_at(MAX_BODY - size_of::<u64>());
        let _room = {
            let _wait = self.long_waits.begin();
            self.long_requests.admit(body.len())
        };
        for part in rest.chunks(BODY_PART) {
            self.link.post(op::BODY_PART, self.caller(), |w| w.words(part)).map_err(unavailable)?;
        }
        let continued = |w: &mut Writer<'_>| {
            w.set_continued();
            w.words(own);
            w.word(rest.len() as u64);
        };
        let begun = self.link.begin_call(op, self.caller(), continued).map_err(unavailable)?;
        Ok((begun.seq, self.finish(begun)?))
    }

    /// Returns an error if the worker is of a release that takes no list of this length in a
    /// call that the table describes.
    pub fn takes_list(&self, count: usize) -> Result {
        const SHORT: usize = 65_536;
        if count <= SHORT || self.abilities & ability::LONG_BODIES != 0 {
            return Ok(());
        }
        trace::why(&format!(
            "a list of {count} entries: the release of server {} takes {SHORT}; update it",
            self.link.server
        ));
        Err(NOT_SUPPORTED)
    }

    /// Lets the worker free the blocks that the program has freed, before a frame that waits.
    ///
    /// Also notes when the frame changes a device's current pool.
    #[inline]
    pub fn free_blocks(&self, op: u16) -> Result {
        if matches!(op, op::cuDeviceSetMemPool | op::cuMemSetMemPool) {
            self.pool_changes.fetch_add(1, Ordering::SeqCst);
        }
        if self.freed.is_empty() { Ok(()) } else { self.free_all_blocks() }
    }

    #[cold]
    fn free_all_blocks(&self) -> Result {
        self.freed.free_all(|block| {
            let (ctx, stream) = block.stream;
            let free = |w: &mut Writer<'_>| {
                w.word(block.base);
                w.word(stream);
            };
            thread::within(ctx, || self.post(op::cuMemFreeAsync, free)).map(drop)
        })
    }

    /// Returns the name of a pool, or of a device's current one, in the table of allocations.
    pub fn pool_name(&self, pool: Option<u64>) -> u64 {
        // No handle has such an address.
        pool.unwrap_or_else(|| u64::MAX - self.pool_changes.load(Ordering::SeqCst))
    }

    /// Returns the result of a call that has waited.
    ///
    /// A failure of the call itself comes first, then a late error that no call has returned yet.
    pub fn check_status(&self, status: i32) -> Result {
        let late = self.link.take_late_error();
        self.remember(late);
        self.remember(status);
        match status {
            0 if late != 0 => Err(late),
            0 => Ok(()),
            // The worker knows no context that was destroyed.
            INVALID_CONTEXT => Err(self.device_of(thread::current()).err().unwrap_or(INVALID_CONTEXT)),
            status => Err(status),
        }
    }

    /// Returns the late error, for a call that does not wait.
    ///
    /// Returns a sticky error of an earlier call every time.
    #[inline]
    pub fn take_late_error(&self) -> Result {
        let late = self.link.take_late_error();
        if late != 0 {
            self.remember(late);
            return Err(late);
        }
        match self.sticky.load(Ordering::Relaxed) {
            0 => Ok(()),
            sticky => Err(sticky),
        }
    }

    /// Returns `true` after a fault or the loss of the worker.
    pub fn is_poisoned(&self) -> bool {
        self.sticky.load(Ordering::Relaxed) != 0
    }

    fn remember(&self, status: i32) {
        if gpusession_proto::status::is_sticky(status) {
            self.poison(status);
        }
    }

    /// Makes an error sticky; the first one stays, because it is the cause of the others.
    pub fn poison(&self, status: i32) {
        let first = self.sticky.compare_exchange(0, status, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        if first && gpusession_proto::status::is_sticky(status) {
            self.fault.store(status, Ordering::Relaxed);
            ANY_FAULT.store(true, Ordering::Relaxed);
        }
    }

    /// Returns the fault of a kernel, which no reset undoes: no new context works.
    pub fn fault(&self) -> Option<i32> {
        Some(self.fault.load(Ordering::Relaxed)).filter(|status| *status != 0)
    }

    /// Returns the error of each call in a context with a fault: the fault, or that a reset has
    /// destroyed the context.
    pub fn context_error(&self) -> Option<i32> {
        self.fault().map(|_| self.sticky.load(Ordering::Relaxed))
    }

    /// Notes that a reset has destroyed the context with a fault.
    pub fn reset_after_fault(&self) {
        self.sticky.store(CONTEXT_IS_DESTROYED, Ordering::Relaxed);
    }

    /// Appends a frame and, unless `sure`, waits for the driver's verdict; returns the frame's
    /// position.
    pub fn post_if(&self, sure: bool, op: u16, body: impl FnOnce(&mut Writer<'_>)) -> Result<u64> {
        if sure {
            return self.post(op, body);
        }
        self.free_blocks(op)?;
        let long = Cell::default();
        let begun = self.link.begin_call(op, self.caller(), bounded(&long, body)).map_err(unavailable)?;
        let mut seq = begun.seq;
        let mut reply = self.finish(begun)?;
        let long = long.into_inner();
        if !long.is_empty() {
            (seq, reply) = self.ask_long(op, &long)?;
        }
        self.check_status(reply.status)?;
        Ok(seq)
    }
}

/// Prints why a call with arguments of two leases fails, and returns its status.
///
/// Calls that can be split per lease are served, or have an error of their own.
pub fn cross_lease_error(what: &str) -> i32 {
    trace::why(&format!(
        "{what}: belongs to another lease than the call; use memory and objects of one lease"
    ));
    NOT_SUPPORTED
}

/// Reads a word of a reply.
pub fn word(r: &mut Reader<'_>) -> Result<u64> {
    r.word().map_err(malformed)
}

/// Reads a byte string of a reply.
pub fn string<'a>(r: &mut Reader<'a>) -> Result<&'a [u8]> {
    r.bytes().map_err(malformed)
}

impl Drop for Client {
    /// Closes the link and returns the window.
    ///
    /// Runs only if the connection of another worker fails, because a program gets all its workers
    /// or none.
    fn drop(&mut self) {
        self.link.close();
        window::withdraw(self.whole_window.start);
    }
}

#[cfg(test)]
mod tests {
    use gpusession_proto::frame::op;

    use super::*;
    use crate::fake_worker::Program;

    const ILLEGAL_ADDRESS: i32 = 700;

    #[test]
    fn work_beside_a_wait_never_holds_it_up() {
        static MARKS: Mutex<Option<std::sync::mpsc::Sender<()>>> = Mutex::new(None);
        static BLOCKED: Mutex<()> = Mutex::new(());
        let program = Program::alone();
        let client = program.client;
        let (sender, begun) = std::sync::mpsc::channel();
        *MARKS.lock().unwrap() = Some(sender);
        let blocked = BLOCKED.lock().unwrap();
        client.work_beside_waits(|_| {
            MARKS.lock().unwrap().iter().for_each(|sender| sender.send(()).unwrap_or_default());
            drop(BLOCKED.lock());
        });
        let silent = program.silent();
        std::thread::scope(|scope| {
            let wait = || scope.spawn(|| client.call(op::STREAM_SYNC, |_| {}).map(drop));
            let waits = [wait(), wait()];
            begun.recv().unwrap();
            drop(silent);
            waits.into_iter().for_each(|wait| assert_eq!(wait.join().unwrap(), Ok(())));
        });
        drop(blocked);
    }

    #[test]
    fn call_returns_its_own_error_before_a_late_one() {
        let program = Program::alone();
        let client = program.client;
        let call = || client.call(op::ALLOC, |_| {}).map(drop);
        assert_eq!(call(), Ok(()));
        program.tell(op::LATE_ERROR, 1, &[]);
        program.tell(op::LATE_ERROR, 2, &[]);
        program.answer(op::ALLOC, 3, &[]);
        assert_eq!(call(), Err(3));
        assert_eq!(client.take_late_error(), Ok(()), "the late error came along with the call's own");
        program.tell(op::LATE_ERROR, 1, &[]);
        assert_eq!(call(), Err(1), "the first late error");
        assert_eq!(call(), Ok(()));
    }

    #[test]
    fn fault_stays_for_good_with_its_first_status() {
        let program = Program::alone();
        let client = program.client;
        program.tell(op::LATE_ERROR, 1, &[]);
        assert_eq!((client.take_late_error(), client.take_late_error()), (Err(1), Ok(())));
        program.tell(op::LATE_ERROR, ILLEGAL_ADDRESS, &[]);
        assert_eq!(client.take_late_error(), Err(ILLEGAL_ADDRESS));
        client.poison(DEVICE_UNAVAILABLE);
        assert_eq!(client.take_late_error(), Err(ILLEGAL_ADDRESS), "the cause of the others");
    }

    #[test]
    fn frame_names_a_context_that_its_worker_knows() {
        let program = Program::new();
        let client = program.client;
        assert_eq!(client.context(), program.ctx);
        let other = handle::make(handle::CTX, 3, 1, 5);
        assert_eq!(thread::within(other, || client.context()), client.primary(0));
        assert_eq!(thread::within(0, || client.context()), 0);
        assert_eq!(client.device_of(other).err(), Some(INVALID_CONTEXT));
        assert_eq!(client.device_of(handle::make(handle::STREAM, 0, 1, 0)).err(), Some(INVALID_CONTEXT));
        assert!(client.device_of(program.ctx).is_ok());
    }

    #[test]
    fn call_too_long_for_the_worker_fails_alone() {
        let program = Program::new();
        let client = program.client;
        let fill = |len: usize| move |w: &mut Writer<'_>| w.words(&vec![1; len]);
        for len in [MAX_BODY + 8, 2 * MAX_BODY] {
            assert_eq!(client.call(op::GRAPH_ADD, fill(len)).err(), Some(NOT_SUPPORTED));
            assert_eq!(client.post(op::GRAPH_ADD, fill(len)), Err(NOT_SUPPORTED));
            assert_eq!(client.post_if(false, op::GRAPH_ADD, fill(len)), Err(NOT_SUPPORTED));
        }
        assert!(program.operations().is_empty(), "the connection lives, and nothing went out");
        assert!(client.call(op::GRAPH_ADD, fill(MAX_BODY)).is_ok());
        assert_eq!(program.frames(), [(op::GRAPH_ADD, vec![1; MAX_BODY])]);
    }

    #[test]
    fn body_beyond_a_frame_goes_in_parts_before_it() {
        let program = Program::able(ability::ALL);
        let client = program.client;
        let body: Vec<u8> = (0..MAX_BODY + BODY_PART + 16).map(|i| (i / 8) as u8).collect();
        program.answer(op::GRAPH_ADD, 0, &[7]);
        let reply = client.call(op::GRAPH_ADD, |w| w.words(&body)).unwrap();
        assert_eq!(reply.reader().word(), Ok(7));
        program.answer(op::GRAPH_ADD, 1, &[]);
        assert_eq!(client.post(op::GRAPH_ADD, |w| w.words(&body)), Err(1), "it waits for the verdict");
        for sent in program.frames().chunks(3) {
            let [first, second, last] = sent else { panic!("{} frames", sent.len()) };
            let own = MAX_BODY - 8;
            assert_eq!((first.0, &first.1[..]), (op::BODY_PART, &body[own..own + BODY_PART]));
            assert_eq!((second.0, &second.1[..]), (op::BODY_PART, &body[own + BODY_PART..]));
            assert_eq!((last.0, &last.1[..own]), (op::GRAPH_ADD, &body[..own]));
            assert_eq!(last.1[own..], ((BODY_PART + 24) as u64).to_le_bytes());
        }
        let fill = |w: &mut Writer<'_>| w.words(&vec![1; MAX_LONG_BODY + 8]);
        assert_eq!(client.call(op::GRAPH_ADD, fill).err(), Some(NOT_SUPPORTED));
        assert!(program.operations().is_empty());
    }

    #[test]
    fn long_requests_of_two_threads_are_under_way_together() {
        let program = Program::able(ability::ALL);
        let client = program.client;
        let body = vec![1; MAX_BODY + 8];
        let before = client.link.position();
        std::thread::scope(|scope| {
            let silent = program.silent();
            for _ in 0..2 {
                scope.spawn(|| {
                    thread::set_current(program.ctx);
                    assert!(client.ask_long(op::GRAPH_ADD, &body).is_ok());
                });
            }
            // One of them may wait in the worker for the other thread. The last frame may find
            // no room in the socket.
            while client.link.position() < before + 3 {
                std::thread::yield_now();
            }
            drop(silent);
        });
        let mut operations = program.operations();
        operations.sort_unstable();
        let mut expected = [op::BODY_PART, op::GRAPH_ADD].repeat(2);
        expected.sort_unstable();
        assert_eq!(operations, expected);
    }

    #[test]
    fn long_requests_under_way_fit_into_the_worker() {
        let requests = LongRequests::default();
        let first = requests.admit(MAX_LONG_BODY / 2);
        let second = requests.admit(MAX_BODY);
        let (sender, admitted) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // The longest one goes alone.
                let _third = requests.admit(MAX_LONG_BODY);
                sender.send(*requests.lock()).unwrap();
            });
            assert!(admitted.recv_timeout(Duration::from_millis(50)).is_err());
            drop(first);
            assert!(admitted.recv_timeout(Duration::from_millis(50)).is_err());
            drop(second);
            assert_eq!(admitted.recv(), Ok(MAX_LONG_BODY + LONG_REQUEST_BYTES));
        });
        assert_eq!(*requests.lock(), 0);
    }

    #[test]
    fn frame_without_a_verdict_waits_unless_it_is_sure() {
        let program = Program::new();
        program.answer(op::FREE, 1, &[]);
        program.answer(op::FREE, 1, &[]);
        let post = |sure| program.client.post_if(sure, op::FREE, |_| {}).map(drop);
        assert_eq!(post(true), Ok(()), "nobody waits for the answer");
        assert_eq!(post(false), Err(1));
    }
}
