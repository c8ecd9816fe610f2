//! The process's state from `cuInit` on: its link, its devices, its contexts.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};
use std::time::{Duration, Instant};

use gpusession_link::grant::{self, Grant};
use gpusession_link::{Link, Lost, Reply};
use gpusession_proto::frame::{BadFrame, Reader, Writer};
use gpusession_proto::handle;
use gpusession_proto::supervise::MPS_VARIABLES;

use crate::entry::{
    DEVICE_UNAVAILABLE, INVALID_CONTEXT, INVALID_DEVICE, NOT_INITIALIZED, NOT_PERMITTED, Result,
    SYSTEM_NOT_READY, UNKNOWN,
};
use crate::window::{self, Window};
use crate::{claims, thread, trace};

/// Freed slots of one kind that rest.
const RESTING: usize = 1 << 16;
/// Windows offered to the worker at once.
const OFFERED: usize = 3;

/// What is known of a device; told once by the worker.
pub struct Device {
    /// Its name.
    pub name: Vec<u8>,
    /// Its UUID.
    pub uuid: [u8; 16],
    /// Its locally unique id.
    pub luid: [u8; 8],
    /// Node mask that goes with it.
    pub luid_mask: u32,
    /// Bytes of memory.
    pub total_memory: u64,
    /// PCI address as the driver writes it.
    pub pci: Vec<u8>,
    /// Attributes by number; `None` where the driver knows none.
    pub attributes: Vec<Option<i32>>,
    /// Least and greatest stream priority.
    pub priorities: (i32, i32),
    /// Limits (`CUlimit`) by number.
    pub limits: Vec<AtomicU64>,
    /// Place of each pair of multiprocessors: two arrays one after the other.
    pub tpcs: Vec<u8>,
    /// What the driver says of this device and each other one of the lease, by ordinal.
    pub peers: Vec<Peer>,
    /// How often the primary context is retained.
    pub retained: AtomicU32,
    /// Flags of the primary context.
    pub primary_flags: AtomicU32,
}

/// What a device may do with another one's memory.
#[derive(Default)]
pub struct Peer {
    /// Whether it reaches it.
    pub reached: bool,
    /// `CUdevice_P2PAttribute` values from 1; `None` where the driver knows none.
    pub attributes: Vec<Option<i32>>,
}

/// A context that the program created.
#[derive(Clone, Copy)]
pub struct Created {
    /// Its device.
    pub device: u32,
    /// Its flags.
    pub flags: u32,
    /// Version that was asked for.
    pub version: u32,
}

/// See the module.
pub struct Client {
    /// The connection to the worker.
    pub link: Arc<Link>,
    /// What the driver on the server says its version is, but never more than this library implements.
    pub driver_version: i32,
    /// The process's devices.
    pub devices: Vec<Device>,
    /// Contexts that the program created, by handle.
    pub created: RwLock<HashMap<u64, Created>>,
    /// Where lies what the device may reach and whose address is chosen here.
    pub whole_window: std::ops::Range<u64>,
    /// The part of it for pinned memory of ours, and for the device's addresses of registered memory.
    pub host_arena: std::ops::Range<u64>,
    window: Mutex<Window>,
    slots: Mutex<HashMap<u8, Slots>>,
    sticky: AtomicI32,
}

#[derive(Default)]
struct Slots {
    next: u32,
    /// Oldest first. A slot rests before it is used again: frames of other threads that name it may still be waiting.
    free: VecDeque<(u32, u16)>,
}

static CLIENT: OnceLock<std::result::Result<Client, i32>> = OnceLock::new();
static FORKED: AtomicBool = AtomicBool::new(false);

/// The newest CUDA version whose calls this library knows.
const NEWEST: i32 = 13_000;

extern "C" fn in_forked_child() {
    if let Some(Ok(client)) = CLIENT.get() {
        FORKED.store(true, Ordering::Relaxed);
        client.link.abandon();
    }
}

/// `cuInit`
pub fn init() -> Result {
    if FORKED.load(Ordering::Relaxed) {
        return Err(NOT_INITIALIZED);
    }
    let client = CLIENT.get_or_init(|| {
        let client = Client::connect()?;
        // SAFETY: the handler only stores flags.
        unsafe { libc::pthread_atfork(None, None, Some(in_forked_child)) };
        if trace::summary() {
            // SAFETY: the handler reads counters of a static that is never dropped.
            unsafe { libc::atexit(print_summary) };
        }
        Ok(client)
    });
    client.as_ref().map(|_| ()).map_err(|status| *status)
}

extern "C" fn print_summary() {
    if let Some(Ok(client)) = CLIENT.get() {
        let waits = client.link.waits();
        trace::print(&format!(
            "gpusession: {} frames to {}, {} waits for the server, {} colliding addresses",
            client.link.position(),
            client.link.server,
            waits.iter().map(|(_, count, _)| u64::from(*count)).sum::<u64>(),
            claims::collisions()
        ));
        let one = |(name, count, time): &(_, _, Duration)| format!("{count} {name} {} ms", time.as_millis());
        let waits: Vec<_> = waits.iter().map(one).collect();
        trace::print(&format!("gpusession: waits: {}", waits.join(", ")));
    }
}

/// The process's state; an error before `cuInit` and in a forked child.
#[inline]
pub fn get() -> Result<&'static Client> {
    if thread::in_host_function() {
        return Err(NOT_PERMITTED);
    }
    even_in_host_function()
}

/// The same for the few calls that host functions of streams may make.
#[inline]
pub fn even_in_host_function() -> Result<&'static Client> {
    if FORKED.load(Ordering::Relaxed) {
        return Err(NOT_INITIALIZED);
    }
    match CLIENT.get() {
        Some(Ok(client)) => Ok(client),
        Some(Err(status)) => Err(*status),
        None => Err(NOT_INITIALIZED),
    }
}

/// The version that programs are told, from the first answer on always the same: runtimes ask before `cuInit`, when there
/// is no worker yet, and compare later. The daemon knows what a worker would say; without an answer it is what this library
/// implements.
pub fn driver_version() -> i32 {
    static TOLD: OnceLock<i32> = OnceLock::new();
    *TOLD.get_or_init(|| match CLIENT.get() {
        Some(Ok(client)) => client.driver_version,
        Some(Err(_)) => NEWEST,
        None => grant::cuda_version().map_or(NEWEST, |version| NEWEST.min(version as i32)),
    })
}

fn malformed(_: BadFrame) -> i32 {
    UNKNOWN
}

/// The worker is gone: sticky.
pub fn unavailable(_: Lost) -> i32 {
    DEVICE_UNAVAILABLE
}

struct Events;

impl gpusession_link::Events for Events {
    fn output(&self, out: &[u8], err: &[u8]) {
        // Through the program's own stdio, so that it mixes with the program's lines in order.
        for (text, stream) in [(out, c_stdout()), (err, c_stderr())] {
            if !text.is_empty() {
                // SAFETY: C's own stream and `text.len()` readable bytes.
                unsafe { libc::fwrite(text.as_ptr().cast(), 1, text.len(), stream) };
            }
        }
    }

    fn call_host(&self, _link: &Arc<Link>, id: u64) {
        crate::streams::call_host(id);
    }

    fn host_changed(&self, region: u64, offset: u64, bytes: &[u8]) {
        crate::mapped::changed(region, offset, bytes);
    }

    fn lost(&self, reason: &str) {
        if let Some(Ok(client)) = CLIENT.get() {
            client.spoil(DEVICE_UNAVAILABLE);
        }
        trace::why(reason);
    }
}

unsafe extern "C" {
    static stdout: *mut libc::FILE;
    static stderr: *mut libc::FILE;
}

fn c_stdout() -> *mut libc::FILE {
    // SAFETY: C's standard stream, set before main.
    unsafe { stdout }
}

fn c_stderr() -> *mut libc::FILE {
    // SAFETY: C's standard stream, set before main.
    unsafe { stderr }
}

/// What the program's environment says of MPS: it acts where the GPU is, within what the lease has.
fn limits() -> Vec<(String, String)> {
    let set = |name: &&str| Some((name.to_string(), std::env::var(name).ok().filter(|v| v.len() <= 256)?));
    MPS_VARIABLES.iter().filter_map(set).collect()
}

/// How often a worker is asked for, and for how long after the first time. One may end between the grant and the greeting (with
/// its MPS server, say), and the next one serves.
const ATTEMPTS: u32 = 3;
const ATTEMPTS_FOR: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(250);

/// A worker that has answered the greeting, and the address windows that it was offered.
fn open() -> Result<(Grant, Vec<u64>, Arc<Link>, Reply)> {
    let begun = Instant::now();
    for attempt in 1.. {
        let grant = grant::ask(limits()).map_err(|refused| {
            trace::why(&refused.reason);
            refused.denial.cuda_error()
        })?;
        let endpoint = grant.endpoints.first().cloned().ok_or(INVALID_DEVICE)?;
        if grant.endpoints.len() > 1 {
            trace::why("the lease spans several servers: only the first one's devices are used");
        }
        let windows = window::offer(OFFERED);
        let opened = Link::open(&endpoint, Box::new(Events), |w: &mut Writer<'_>| {
            w.word(windows.len() as u64);
            w.word(window::DEVICE_WINDOW);
            for base in &windows {
                w.word(*base);
            }
        });
        match opened {
            Ok((link, reply)) => return Ok((grant, windows, link, reply)),
            Err(lost) => trace::why(&lost.0),
        }
        windows.into_iter().for_each(window::withdraw);
        if attempt == ATTEMPTS || begun.elapsed() > ATTEMPTS_FOR {
            break;
        }
        std::thread::sleep(PAUSE * attempt);
    }
    Err(SYSTEM_NOT_READY)
}

impl Client {
    fn connect() -> Result<Self> {
        let (grant, windows, link, reply) = open()?;
        let _ = grant.keep();
        if reply.status != 0 {
            return Err(reply.status);
        }
        let mut r = reply.reader();
        let _secret = r.bytes().map_err(malformed)?;
        let base = r.word().map_err(malformed)?;
        for other in windows.into_iter().filter(|w| *w != base) {
            window::withdraw(other);
        }
        if base == 0 {
            trace::why("the server could not reserve any of the offered address windows");
            return Err(SYSTEM_NOT_READY);
        }
        let driver_version = r.word().map_err(malformed)? as i32;
        let count = r.word().map_err(malformed)?;
        let mut devices = (0..count)
            .map(|_| Device::read(&mut r))
            .collect::<std::result::Result<Vec<_>, _>>()
            .map_err(malformed)?;
        for device in &mut devices {
            // A server of an earlier version ends before this: its devices reach nobody.
            device.peers = (0..count).map(|_| Peer::read(&mut r).unwrap_or_default()).collect();
        }
        Ok(Self {
            link,
            driver_version: driver_version.min(NEWEST),
            devices,
            created: RwLock::default(),
            whole_window: base..window::host_arena(base).end,
            host_arena: window::host_arena(base),
            window: Mutex::new(Window::new(base)),
            slots: Mutex::default(),
            sticky: AtomicI32::new(0),
        })
    }

    /// The window of device addresses.
    pub fn window(&self) -> MutexGuard<'_, Window> {
        self.window.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A device by ordinal.
    pub fn device(&self, ordinal: i32) -> Result<&Device> {
        usize::try_from(ordinal).ok().and_then(|i| self.devices.get(i)).ok_or(INVALID_DEVICE)
    }

    /// The device of a context.
    pub fn device_of(&self, ctx: u64) -> Result<u32> {
        if handle::kind(ctx) != handle::CTX {
            return Err(INVALID_CONTEXT);
        }
        let slot = handle::slot(ctx);
        if (slot as usize) < self.devices.len() {
            return Ok(slot);
        }
        let created = self.created.read().unwrap_or_else(PoisonError::into_inner);
        created.get(&ctx).map(|c| c.device).ok_or(INVALID_CONTEXT)
    }

    /// Handle of a device's primary context: known without asking anyone.
    pub fn primary(&self, ordinal: u32) -> u64 {
        handle::make(handle::CTX, 0, 1, ordinal)
    }

    /// A new handle.
    pub fn mint(&self, kind: u8) -> u64 {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let slots = slots.entry(kind).or_default();
        let rested = if slots.free.len() > RESTING { slots.free.pop_front() } else { None };
        let (slot, generation) = rested.unwrap_or_else(|| {
            let first = if kind == handle::CTX { self.devices.len() as u32 } else { 0 };
            slots.next = slots.next.max(first) + 1;
            (slots.next - 1, 0)
        });
        handle::make(kind, 0, generation.wrapping_add(1), slot)
    }

    /// A handle's slot may be used again, with another generation.
    pub fn retire(&self, old: u64) {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let generation = (old >> 32) as u16;
        slots.entry(handle::kind(old)).or_default().free.push_back((handle::slot(old), generation));
    }

    /// Appends a frame to the log; never waits. Returns its position.
    #[inline]
    pub fn post(&self, op: u16, body: impl FnOnce(&mut Writer<'_>)) -> Result<u64> {
        self.link.post(op, thread::caller(), body).map_err(unavailable)
    }

    /// Appends a frame, waits for the answer, and returns it if the driver says success.
    pub fn call(&self, op: u16, body: impl FnOnce(&mut Writer<'_>)) -> Result<Reply> {
        let reply = self.ask(op, body)?;
        self.told(reply.status)?;
        Ok(reply)
    }

    /// The same, whatever the driver says.
    pub fn ask(&self, op: u16, body: impl FnOnce(&mut Writer<'_>)) -> Result<Reply> {
        self.link.call(op, thread::caller(), body).map_err(unavailable)
    }

    /// What a call that has waited tells the program: its own status, or an error of a frame before it that the program
    /// was not told yet.
    pub fn told(&self, status: i32) -> Result {
        let late = self.link.take_late_error();
        self.remember(late);
        self.remember(status);
        match status {
            0 if late != 0 => Err(late),
            0 => Ok(()),
            status => Err(status),
        }
    }

    /// An error of an earlier frame, told by a call that does not wait. One that spoils the context is told for ever.
    #[inline]
    pub fn late(&self) -> Result {
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

    fn remember(&self, status: i32) {
        if gpusession_proto::status::is_sticky(status) {
            self.spoil(status);
        }
    }

    /// From now on for every call; the first one is the cause.
    fn spoil(&self, status: i32) {
        let _ = self.sticky.compare_exchange(0, status, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Appends a frame without waiting if `sure`, else waits for the driver's verdict.
    pub fn post_if(&self, sure: bool, op: u16, body: impl FnOnce(&mut Writer<'_>)) -> Result<u64> {
        if sure {
            return self.post(op, body);
        }
        let begun = self.link.begin_call(op, thread::caller(), body).map_err(unavailable)?;
        let seq = begun.seq;
        let reply = self.link.finish_call(begun).map_err(unavailable)?;
        self.told(reply.status)?;
        Ok(seq)
    }
}

/// Reads a word of an answer.
pub fn word(r: &mut Reader<'_>) -> Result<u64> {
    r.word().map_err(malformed)
}

/// Reads a byte string of an answer.
pub fn string<'a>(r: &mut Reader<'a>) -> Result<&'a [u8]> {
    r.bytes().map_err(malformed)
}

impl Device {
    fn read(r: &mut Reader<'_>) -> std::result::Result<Self, BadFrame> {
        let short = |_| BadFrame("device");
        let name = r.bytes()?.to_vec();
        let uuid = r.bytes()?.try_into().map_err(short)?;
        let luid = r.bytes()?.try_into().map_err(short)?;
        let luid_mask = r.word()? as u32;
        let total_memory = r.word()?;
        let pci = r.bytes()?.to_vec();
        let count = r.word()?.min(4096);
        let mut attributes = Vec::new();
        for number in 0..count {
            let value = r.word()?;
            let value = (value != u64::MAX).then_some(value as u32 as i32);
            attributes.push(honest(number as i32, value));
        }
        let priorities = (r.word()? as i32, r.word()? as i32);
        let count = r.word()?.min(64);
        let limits =
            (0..count).map(|_| r.word().map(AtomicU64::new)).collect::<std::result::Result<_, _>>()?;
        Ok(Self {
            name,
            uuid,
            luid,
            luid_mask,
            total_memory,
            pci,
            attributes,
            priorities,
            limits,
            tpcs: r.bytes()?.to_vec(),
            peers: Vec::new(),
            retained: AtomicU32::new(0),
            primary_flags: AtomicU32::new(0),
        })
    }
}

impl Peer {
    fn read(r: &mut Reader<'_>) -> std::result::Result<Self, BadFrame> {
        let reached = r.word()? == 1;
        let value = |value| (value != u64::MAX).then_some(value as u32 as i32);
        let attributes =
            (0..r.word()?.min(64)).map(|_| r.word().map(value)).collect::<std::result::Result<_, _>>()?;
        Ok(Self { reached, attributes })
    }
}

/// Attributes that a network cannot give are not claimed, whatever the card says of itself on its own machine.
fn honest(attribute: i32, value: Option<i32>) -> Option<i32> {
    const OVERRIDDEN: &[i32] = &[
        89,  // CONCURRENT_MANAGED_ACCESS
        88,  // PAGEABLE_MEMORY_ACCESS
        86,  // HOST_NATIVE_ATOMIC_SUPPORTED
        91,  // CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
        100, // PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES
        101, // DIRECT_MANAGED_MEM_ACCESS_FROM_HOST
        103, // HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
        116, // GPU_DIRECT_RDMA_SUPPORTED
        117, // GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS
        118, // GPU_DIRECT_RDMA_WRITES_ORDERING
        110, // GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
        124, // DMA_BUF_SUPPORTED
        125, // IPC_EVENT_SUPPORTED
        128, // HANDLE_TYPE_FABRIC_SUPPORTED
        132, // MULTICAST_SUPPORTED
    ];
    if OVERRIDDEN.contains(&attribute) { value.map(|_| 0) } else { value }
}
