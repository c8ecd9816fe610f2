//! The worker's devices and contexts.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use gpusession_proto::frame::Writer;
use gpusession_proto::handle;
use gpusession_proto::supervise::DeviceLimit;

use crate::driver::{Driver, Handle, POSIX_FD, Status, check, check_connected, status};
use crate::executor::Executor;
use crate::handles::{Object, Table, kind};

/// `CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED`
const POSIX_FD_SUPPORTED: i32 = 103;
/// `CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED`
const IPC_EVENT_SUPPORTED: i32 = 125;
/// `CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES`
const POOL_HANDLE_TYPES: i32 = 119;
/// Number of device attributes to query, from 1, with room for those of newer drivers.
const ATTRIBUTES: i32 = 192;
/// Number of `CUlimit` values sent at the start, with room for those of newer drivers.
///
/// cublasLt reads a limit at each call.
const LIMITS: i32 = 16;
/// Number of `CUdevice_P2PAttribute` values to send, from 1, with room for newer drivers.
const PEER_ATTRIBUTES: i32 = 8;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`: the client enforces the program's own mode.
const CAPTURE_RELAXED: i32 = 2;
/// `CU_STREAM_NON_BLOCKING`
const NON_BLOCKING: u32 = 1;

/// The client's devices, their primary contexts, and the contexts that the client created.
pub struct Contexts {
    /// The driver's ordinals of the client's devices.
    pub devices: Vec<i32>,
    limits: Vec<u64>,
    primary: Vec<Object>,
    /// For each device, whether it reaches the memory of each device; it always reaches its own.
    reach: Vec<Vec<bool>>,
    created: Table<(Object, u32)>,
    /// Resets so far of each primary context.
    resets: Vec<AtomicU64>,
    /// For each device, the context in which the worker copies managed memory.
    worker_contexts: Vec<OnceLock<WorkerContext>>,
    opening: Mutex<()>,
    /// For each device, whether its memory can be shared as descriptors.
    exports: Vec<bool>,
}

/// A context of the worker's own on a device, and its stream.
///
/// Streams of one context share hardware queues. So a copy of the worker's in a program's context
/// can stand behind a stream that waits in a host function, which itself waits for the copy. No
/// stream priority prevents this (seen on an H100, driver 580).
struct WorkerContext {
    ctx: Object,
    stream: Object,
}

impl WorkerContext {
    fn create(driver: &Driver, ordinal: i32) -> Result<Self, Status> {
        let (mut ctx, mut stream) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the out pointer is valid.
        check(unsafe { (driver.call.cuCtxCreate_v2)(&mut ctx, 0, ordinal) })?;
        // SAFETY: the new context is current; the out pointer is valid.
        let made = check(unsafe { (driver.call.cuStreamCreateWithPriority)(&mut stream, NON_BLOCKING, 0) });
        let mut popped = std::ptr::null_mut();
        // SAFETY: the new context is on top of this thread's stack; the out pointer is valid.
        unsafe { (driver.call.cuCtxPopCurrent_v2)(&mut popped) };
        if let Err(status) = made {
            // SAFETY: created above, and unknown to others.
            unsafe { (driver.call.cuCtxDestroy_v2)(ctx) };
            return Err(status);
        }
        Ok(Self { ctx: Object(ctx), stream: Object(stream) })
    }
}

impl Contexts {
    /// Finds the devices by UUID and retains their primary contexts, the slow part of a start.
    pub fn warm(driver: &Driver, wanted: &[DeviceLimit]) -> Result<Self, String> {
        let say = |what: &'static str| move |status: Status| format!("{what}: CUDA error {status}");
        let mut count = 0;
        // SAFETY: the out pointer is valid.
        check(unsafe { (driver.call.cuDeviceGetCount)(&mut count) }).map_err(say("cuDeviceGetCount"))?;
        let mut devices = Vec::new();
        let mut primary = Vec::new();
        for limit in wanted {
            let found = (0..count).find(|ordinal| {
                let mut uuid = [0; 16];
                // SAFETY: a CUuuid is 16 bytes, which the array has.
                let got = unsafe { (driver.call.cuDeviceGetUuid_v2)(uuid.as_mut_ptr(), *ordinal) };
                got == 0 && uuid == limit.uuid
            });
            let ordinal = found.ok_or("a GPU of the lease is missing")?;
            let mut ctx = std::ptr::null_mut();
            // SAFETY: the out pointer is valid.
            check_connected(|| unsafe { (driver.call.cuDevicePrimaryCtxRetain)(&mut ctx, ordinal) })
                .map_err(say("cuDevicePrimaryCtxRetain"))?;
            devices.push(ordinal);
            primary.push(Object(ctx));
        }
        let limits = wanted.iter().map(|d| d.memory_bytes).collect();
        let reaches = |from: i32, to: i32| {
            let mut can = 0;
            // SAFETY: the out pointer is valid.
            from == to || unsafe { (driver.call.cuDeviceCanAccessPeer)(&mut can, from, to) } == 0 && can == 1
        };
        let reach =
            devices.iter().map(|from| devices.iter().map(|to| reaches(*from, *to)).collect()).collect();
        let resets = devices.iter().map(|_| AtomicU64::new(0)).collect();
        let worker_contexts = devices.iter().map(|_| OnceLock::new()).collect();
        let exports = |ordinal: &i32| {
            let mut value = 0;
            // SAFETY: the out pointer is valid.
            let got = unsafe { (driver.call.cuDeviceGetAttribute)(&mut value, POSIX_FD_SUPPORTED, *ordinal) };
            got == 0 && value == 1
        };
        let exports = devices.iter().map(exports).collect();
        let (created, opening) = (Table::new(kind::CTX), Mutex::default());
        Ok(Self { devices, limits, primary, reach, created, resets, worker_contexts, opening, exports })
    }

    /// Returns `true` if contexts on all devices are shared by MPS.
    pub fn under_mps(&self, driver: &Driver) -> bool {
        const MPS_ENABLED: i32 = 133;
        self.devices.iter().all(|device| {
            let mut enabled = 0;
            // SAFETY: the out pointer is valid.
            let got = unsafe { (driver.call.cuDeviceGetAttribute)(&mut enabled, MPS_ENABLED, *device) };
            got == 0 && enabled == 1
        })
    }

    /// Returns the number of contexts on the device with the most of them.
    ///
    /// Primary contexts and the worker's own count.
    pub fn most_on_a_device(&self) -> u32 {
        let created = self.created.all();
        let own = |device: usize| u32::from(self.worker_contexts[device].get().is_some());
        let on = |device: usize| {
            1 + own(device) + created.iter().filter(|(_, on)| *on as usize == device).count() as u32
        };
        (0..self.devices.len()).map(on).max().unwrap_or(0)
    }

    /// Returns the driver's ordinal of a client's device.
    pub fn device(&self, ordinal: u64) -> Result<i32, Status> {
        self.devices.get(ordinal as usize).copied().ok_or(101)
    }

    /// Returns `true` if work on one device may touch the memory of another.
    pub fn reaches(&self, from: u32, to: u32) -> bool {
        self.reach.get(from as usize).and_then(|row| row.get(to as usize)).copied().unwrap_or(false)
    }

    /// Returns `true` if a device's memory can be shared as descriptors.
    pub fn exports(&self, device: u32) -> bool {
        self.exports.get(device as usize).copied().unwrap_or(false)
    }

    /// Returns the ordinals of all devices that may touch one's memory, itself included.
    pub fn reached_by(&self, device: u32) -> impl Iterator<Item = i32> {
        (0..)
            .zip(&self.devices)
            .filter(move |(from, _)| self.reaches(*from, device))
            .map(|(_, ordinal)| *ordinal)
    }

    /// Returns a device's primary context.
    pub fn primary(&self, device: u32) -> Result<Handle, Status> {
        self.primary.get(device as usize).map(|object| object.0).ok_or(101)
    }

    /// Returns the driver's context behind a handle, and the client's ordinal of its device.
    pub fn get(&self, ctx: u64) -> Result<(Handle, u32), Status> {
        if handle::kind(ctx) == kind::CTX
            && let Some(primary) = self.primary.get(handle::slot(ctx) as usize)
        {
            return Ok((primary.0, handle::slot(ctx)));
        }
        self.created.get(ctx).map(|(object, device)| (object.0, device)).map_err(|_| 201)
    }

    /// Returns all contexts, primary ones first.
    pub fn all(&self) -> Vec<Object> {
        let created = self.created.all();
        self.primary.iter().copied().chain(created.into_iter().map(|(object, _)| object)).collect()
    }

    /// Returns the client's handle of a context, without the number of its server.
    pub fn handle_of(&self, real: Handle) -> Option<u64> {
        let primary = self.primary.iter().position(|object| object.0 == real);
        match primary {
            Some(device) => Some(handle::make(kind::CTX, 0, 1, device as u32)),
            None => self.created.handle_of(|(object, _)| object.0 == real),
        }
    }

    /// Stores a created context.
    pub fn put(&self, ctx: u64, real: Handle, device: u32) -> Result<(), Status> {
        if (handle::slot(ctx) as usize) < self.primary.len() {
            return Err(status::INVALID_VALUE);
        }
        self.created.put(ctx, (Object(real), device))
    }

    /// Forgets a created context.
    pub fn take(&self, ctx: u64) -> Result<Handle, Status> {
        self.created.take(ctx).map(|(object, _)| object.0)
    }

    /// Makes a frame's context current in this OS thread.
    pub fn enter(&self, driver: &Driver, executor: &mut Executor, ctx: u64) -> Result<(), Status> {
        if executor.current == ctx {
            return Ok(());
        }
        let first = executor.current == 0;
        let real = if ctx == 0 { std::ptr::null_mut() } else { self.get(ctx)?.0 };
        // SAFETY: `real` is null or a context of the driver.
        check(unsafe { (driver.call.cuCtxSetCurrent)(real) })?;
        executor.current = ctx;
        if first {
            let mut mode = CAPTURE_RELAXED;
            // SAFETY: the pointer is valid; the mode is this thread's own.
            check(unsafe { (driver.call.cuThreadExchangeStreamCaptureMode)(&mut mode) })?;
        }
        Ok(())
    }

    /// Returns how often a context was reset; a reset destroys what it contained.
    pub fn resets(&self, ctx: u64) -> u64 {
        let primary = self.resets.get(handle::slot(ctx) as usize);
        primary.map_or(0, |count| count.load(Ordering::Relaxed))
    }

    /// Returns `true` if a context of the program's own exists.
    pub fn has_created(&self) -> bool {
        !self.created.is_empty()
    }

    /// Returns the bytes of device memory that the program can use.
    pub fn device_memory(&self, driver: &Driver) -> u64 {
        let of_device = |(device, limit): (&i32, &u64)| {
            let mut total = 0;
            // SAFETY: the out pointer is valid.
            unsafe { (driver.call.cuDeviceTotalMem_v2)(&mut total, *device) };
            (total as u64).min(*limit)
        };
        self.devices.iter().zip(&self.limits).map(of_device).fold(0, u64::saturating_add)
    }

    /// Resets a device's primary context, and makes it current.
    pub fn reset(&self, driver: &Driver, device: u32) -> Result<(), Status> {
        let ordinal = self.device(device.into())?;
        // SAFETY: the device exists; this worker's context is retained and stays valid as a handle.
        check(unsafe { (driver.call.cuDevicePrimaryCtxReset_v2)(ordinal) })?;
        self.resets[device as usize].fetch_add(1, Ordering::Relaxed);
        let mut ctx = std::ptr::null_mut();
        // SAFETY: the out pointer is valid.
        check(unsafe { (driver.call.cuDevicePrimaryCtxRetain)(&mut ctx, ordinal) })?;
        // SAFETY: just retained.
        check(unsafe { (driver.call.cuCtxSetCurrent)(ctx) })
    }

    /// Calls `work` with the first device's primary context current.
    pub fn within_first<T>(
        &self,
        driver: &Driver,
        work: impl FnOnce() -> Result<T, Status>,
    ) -> Result<T, Status> {
        within(driver, self.primary(0)?, work)
    }

    /// Creates the worker's own context on a device, once, after `count` has found room for it.
    ///
    /// `uncount` returns the room if the driver refuses.
    pub fn open_worker_context(
        &self,
        driver: &Driver,
        device: u32,
        count: impl FnOnce() -> Result<(), Status>,
        uncount: impl FnOnce(),
    ) -> Result<(), Status> {
        let ordinal = self.device(device.into())?;
        let own = &self.worker_contexts[device as usize];
        let _opening = self.opening.lock().unwrap_or_else(PoisonError::into_inner);
        if own.get().is_some() {
            return Ok(());
        }
        count()?;
        let made = WorkerContext::create(driver, ordinal).inspect_err(|_| uncount())?;
        let _ = own.set(made);
        Ok(())
    }

    /// Calls `work` with the stream of the worker's own context on a device; it is current then.
    pub fn within_worker_context(
        &self,
        driver: &Driver,
        device: u32,
        work: impl FnOnce(Handle) -> Result<(), Status>,
    ) -> Result<(), Status> {
        let own =
            self.worker_contexts.get(device as usize).and_then(OnceLock::get).ok_or(status::INVALID_VALUE)?;
        within(driver, own.ctx.0, || work(own.stream.0))
    }

    /// Waits for everything that runs in one context.
    pub fn synchronize_one(&self, driver: &Driver, ctx: u64) -> Result<(), Status> {
        // SAFETY: `within` has made a context current.
        within(driver, self.get(ctx)?.0, || check(unsafe { (driver.call.cuCtxSynchronize)() }))
    }

    /// Waits for all work on all devices, then returns the first error.
    pub fn synchronize(&self, driver: &Driver) -> Result<(), Status> {
        synchronize(driver, self.all())
    }

    /// Writes the facts about the devices that the client afterwards answers by itself.
    ///
    /// `shares` says whether processes can share memory and events.
    pub fn describe(&self, driver: &Driver, shares: bool, w: &mut Writer<'_>) -> Result<(), Status> {
        let mut version = 0;
        // SAFETY: out pointers are valid and as long as stated.
        check(unsafe { (driver.call.cuDriverGetVersion)(&mut version) })?;
        w.word(version as u64);
        w.word(self.devices.len() as u64);
        for ((&device, primary), &limit) in self.devices.iter().zip(&self.primary).zip(&self.limits) {
            let mut name = [0; 256];
            // SAFETY: as above.
            check(unsafe { (driver.call.cuDeviceGetName)(name.as_mut_ptr(), 256, device) })?;
            w.bytes(&text(&name));
            let mut uuid = [0; 16];
            // SAFETY: as above.
            check(unsafe { (driver.call.cuDeviceGetUuid_v2)(uuid.as_mut_ptr(), device) })?;
            w.bytes(&uuid);
            // Id and node mask that only Windows has.
            w.bytes(&[0; 8]);
            w.word(0);
            let mut total = 0;
            // SAFETY: as above.
            check(unsafe { (driver.call.cuDeviceTotalMem_v2)(&mut total, device) })?;
            // The lease's share bounds what the program can use.
            w.word((total as u64).min(limit));
            let mut bus = [0; 64];
            // SAFETY: as above.
            check(unsafe { (driver.call.cuDeviceGetPCIBusId)(bus.as_mut_ptr(), 64, device) })?;
            w.bytes(&text(&bus));
            w.word(ATTRIBUTES as u64);
            for attribute in 0..ATTRIBUTES {
                let mut value = 0;
                // SAFETY: as above.
                let got = unsafe { (driver.call.cuDeviceGetAttribute)(&mut value, attribute, device) };
                match attribute {
                    IPC_EVENT_SUPPORTED if !shares => value = 0,
                    // No other kind of handle can name a pool on the client's machine.
                    POOL_HANDLE_TYPES => value &= if shares { POSIX_FD } else { 0 },
                    _ => {}
                }
                // An attribute that this driver does not know must differ from one that is 0.
                w.word(if got == 0 { u64::from(value as u32) } else { u64::MAX });
            }
            // SAFETY: the context is the device's own.
            check(unsafe { (driver.call.cuCtxSetCurrent)(primary.0) })?;
            let (mut least, mut greatest) = (0, 0);
            // SAFETY: as above.
            check(unsafe { (driver.call.cuCtxGetStreamPriorityRange)(&mut least, &mut greatest) })?;
            w.word(least as u32 as u64);
            w.word(greatest as u32 as u64);
            w.word(LIMITS as u64);
            for limit in 0..LIMITS {
                let mut value = 0;
                // SAFETY: as above.
                let got = unsafe { (driver.call.cuCtxGetLimit)(&mut value, limit) };
                // The driver's own error, sent as a negative number.
                w.word(if got == 0 { value as u64 } else { -i64::from(got) as u64 });
            }
            w.bytes(&tpc_topology(driver, total_tpcs(driver, device)));
        }
        for (from, row) in self.devices.iter().zip(&self.reach) {
            for (to, reaches) in self.devices.iter().zip(row) {
                let peers = from != to;
                w.word(u64::from(*reaches && peers));
                w.word(if peers { PEER_ATTRIBUTES as u64 } else { 0 });
                if !peers {
                    continue;
                }
                for attribute in 1..=PEER_ATTRIBUTES {
                    let mut value = 0;
                    // SAFETY: the out pointer is valid.
                    let got =
                        unsafe { (driver.call.cuDeviceGetP2PAttribute)(&mut value, attribute, *from, *to) };
                    w.word(if got == 0 { u64::from(value as u32) } else { u64::MAX });
                }
            }
        }
        // SAFETY: null leaves the current context.
        check(unsafe { (driver.call.cuCtxSetCurrent)(std::ptr::null_mut()) })
    }
}

/// Waits for all work in contexts of this worker, then returns the first error.
pub fn synchronize(driver: &Driver, contexts: Vec<Object>) -> Result<(), Status> {
    // SAFETY: `within` has made a context current.
    let one = |ctx: Object| within(driver, ctx.0, || check(unsafe { (driver.call.cuCtxSynchronize)() }));
    contexts.into_iter().map(one).fold(Ok(()), Result::and)
}

/// Calls `work` with a context of this worker current.
pub fn within<T>(
    driver: &Driver,
    ctx: Handle,
    work: impl FnOnce() -> Result<T, Status>,
) -> Result<T, Status> {
    // SAFETY: a context of this worker.
    check(unsafe { (driver.call.cuCtxPushCurrent_v2)(ctx) })?;
    let done = work();
    let mut popped = std::ptr::null_mut();
    // SAFETY: the context was pushed above; the out pointer is valid.
    unsafe { (driver.call.cuCtxPopCurrent_v2)(&mut popped) };
    done
}

fn text(chars: &[std::ffi::c_char]) -> Vec<u8> {
    chars.iter().take_while(|c| **c != 0).map(|c| *c as u8).collect()
}

fn total_tpcs(driver: &Driver, device: i32) -> usize {
    const MULTIPROCESSOR_COUNT: i32 = 16;
    let mut count = 0;
    // SAFETY: the out pointer is valid.
    let got = unsafe { (driver.call.cuDeviceGetAttribute)(&mut count, MULTIPROCESSOR_COUNT, device) };
    if got == 0 { count as usize / 2 } else { 0 }
}

/// Returns the table that cublasLt reads on Hopper: the place of each pair of multiprocessors.
///
/// Two byte arrays follow each other: the place within the GPC, and the GPC's number. The result is
/// empty if the driver has no such table.
fn tpc_topology(driver: &Driver, tpcs: usize) -> Vec<u8> {
    let mut table = std::ptr::null();
    // SAFETY: the out pointer and the 16 bytes are valid.
    if unsafe { (driver.call.cuGetExportTable)(&mut table, &TPC_TABLE) } != 0 || table.is_null() {
        return Vec::new();
    }
    // SAFETY: the driver's table begins with its size in bytes, and its slots have these types.
    let Some((get, free)) = (unsafe { tpc_functions(table) }) else { return Vec::new() };
    let (mut in_gpc, mut gpc) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: a context is current; the out pointers are valid.
    if unsafe { get(&mut in_gpc, &mut gpc) } != 0 || in_gpc.is_null() || gpc.is_null() {
        return Vec::new();
    }
    // SAFETY: the driver returns one byte per pair of multiprocessors in each array, and frees
    // both.
    unsafe {
        let mut out = std::slice::from_raw_parts(in_gpc, tpcs).to_vec();
        out.extend_from_slice(std::slice::from_raw_parts(gpc, tpcs));
        free(in_gpc, gpc);
        out
    }
}

type TpcGet = unsafe extern "C" fn(*mut *mut u8, *mut *mut u8) -> i32;
type TpcFree = unsafe extern "C" fn(*mut u8, *mut u8) -> i32;

/// Returns the two functions of that table (slots 4 and 13, see `proto/calls/tables.txt`).
///
/// `None` if the table is too short or a driver leaves one of them out.
///
/// # Safety
/// The first word at `table` is the size of the table in bytes. Slots 4 and 13, if the table has
/// them, are null or functions of these types.
unsafe fn tpc_functions(table: *const c_void) -> Option<(TpcGet, TpcFree)> {
    let words = table.cast::<usize>();
    // SAFETY: the caller passes a table with that word.
    if unsafe { *words } / size_of::<usize>() <= 13 {
        return None;
    }
    // SAFETY: the table has both slots. A null slot is `None`.
    unsafe { Some(((*words.add(4).cast::<Option<TpcGet>>())?, (*words.add(13).cast::<Option<TpcFree>>())?)) }
}

/// Name of that table: 16 bytes.
const TPC_TABLE: [u8; 16] = 0x1734dc26_800d4745_8726c0f1_e7dd8bca_u128.to_be_bytes();

#[cfg(test)]
mod tests {
    use gpusession_proto::handle::make;

    use super::*;
    use crate::driver::fake;

    fn warm() -> (&'static Driver, Contexts) {
        let driver = fake::driver();
        (driver, Contexts::warm(driver, &fake::devices()).unwrap())
    }

    fn primary(device: u32) -> u64 {
        make(kind::CTX, 0, 1, device)
    }

    #[test]
    fn devices_come_in_the_order_of_the_lease() {
        let [first, second] = fake::devices();
        let contexts = Contexts::warm(fake::driver(), &[second.clone(), first]).unwrap();
        assert_eq!(contexts.devices, [1, 0]);
        assert_eq!((contexts.device(0), contexts.device(2)), (Ok(1), Err(101)));
        let missing = DeviceLimit { uuid: [9; 16], ..second };
        assert!(Contexts::warm(fake::driver(), &[missing]).is_err());
    }

    #[test]
    fn device_reaches_itself_and_what_the_driver_says() {
        let (_, contexts) = warm();
        let reaches = |from, to| contexts.reaches(from, to);
        assert_eq!((reaches(0, 0), reaches(0, 1), reaches(1, 0), reaches(1, 1)), (true, true, false, true));
        assert!(!reaches(0, 2) && !reaches(2, 0));
        assert_eq!(contexts.reached_by(1).collect::<Vec<_>>(), [0, 1]);
        assert_eq!(contexts.reached_by(0).collect::<Vec<_>>(), [0]);
    }

    #[test]
    fn created_context_never_hides_a_primary_one() {
        let (_, contexts) = warm();
        let real: Handle = std::ptr::without_provenance_mut(0x77);
        let created = make(kind::CTX, 0, 1, 300);
        assert_eq!(contexts.put(primary(1), real, 0), Err(status::INVALID_VALUE));
        assert_eq!(contexts.put(created, real, 1), Ok(()));
        assert_eq!(contexts.get(created), Ok((real, 1)));
        assert_eq!(contexts.get(primary(0)).map(|(ctx, device)| (ctx as usize, device)), Ok((0x1000, 0)));
        assert_eq!(contexts.get(make(kind::CTX, 0, 2, 300)), Err(201), "a later generation");
        assert_eq!(contexts.get(make(kind::STREAM, 0, 1, 0)), Err(201), "no context");
        assert_eq!(contexts.most_on_a_device(), 2);
        assert_eq!(contexts.take(created), Ok(real));
        assert_eq!(contexts.get(created), Err(201));
        assert_eq!(contexts.most_on_a_device(), 1);
    }

    #[test]
    fn executor_enters_the_context_of_each_frame() {
        let (driver, contexts) = warm();
        let mut executor = Executor { current: 0, id: 0 };
        assert_eq!(contexts.enter(driver, &mut executor, primary(1)), Ok(()));
        assert_eq!((executor.current, fake::current()), (primary(1), 0x1001));
        assert_eq!(fake::capture_mode(), CAPTURE_RELAXED, "the client enforces the program's mode");
        fake::forget_current();
        assert_eq!(contexts.enter(driver, &mut executor, primary(1)), Ok(()));
        assert_eq!(fake::current(), 0, "the same context needs no call");
        assert_eq!(contexts.enter(driver, &mut executor, make(kind::CTX, 0, 1, 9)), Err(201));
        assert_eq!(executor.current, primary(1));
        assert_eq!(contexts.enter(driver, &mut executor, 0), Ok(()));
        assert_eq!(fake::current(), 0);
    }

    #[test]
    fn reset_counts_for_its_own_context() {
        let (driver, contexts) = warm();
        assert_eq!(contexts.reset(driver, 1), Ok(()));
        assert_eq!((contexts.resets(primary(0)), contexts.resets(primary(1))), (0, 1));
        assert_eq!(contexts.resets(make(kind::CTX, 0, 1, 300)), 0, "a created one is destroyed instead");
        assert_eq!(contexts.reset(driver, 2), Err(101));
    }

    unsafe extern "C" fn function(_: *mut u8, _: *mut u8) -> i32 {
        0
    }

    #[test]
    fn a_table_that_lacks_a_function_is_not_used() {
        let function = function as TpcFree as usize;
        let whole = |slots: &[usize]| {
            let mut table = [0; 17];
            table[0] = size_of_val(&table);
            slots.iter().for_each(|slot| table[*slot] = function);
            table
        };
        // SAFETY: the first word is the size; a slot is null or a function without conditions.
        let usable = |table: [usize; 17]| unsafe { tpc_functions(table.as_ptr().cast()) }.is_some();
        assert!(usable(whole(&[4, 13])));
        for slots in [&[][..], &[4], &[13]] {
            assert!(!usable(whole(slots)), "{slots:?}");
        }
        let mut short = whole(&[4, 13]);
        short[0] = 13 * size_of::<usize>();
        assert!(!usable(short));
    }
}
