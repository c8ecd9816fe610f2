//! A driver in this process, for tests: two devices, and events that a test lets happen.

use std::cell::Cell;
use std::sync::atomic::{AtomicI32, Ordering};

use gpusession_proto::supervise::DeviceLimit;

use super::*;

/// Table of the functions, by name.
struct Fake(&'static [(&'static CStr, *const c_void)]);

impl Symbols for Fake {
    fn find(&self, name: &CStr) -> Option<*const c_void> {
        self.0.iter().find(|(known, _)| *known == name).map(|(_, function)| *function)
    }
}

thread_local! {
    static CURRENT: Cell<usize> = const { Cell::new(0) };
    static CAPTURE_MODE: Cell<i32> = const { Cell::new(0) };
}

/// Returns the driver's context that is current in this thread.
pub fn current() -> usize {
    CURRENT.get()
}

/// Clears this thread's current context behind the worker's back.
pub fn forget_current() {
    CURRENT.set(0);
}

/// Returns this thread's capture mode.
pub fn capture_mode() -> i32 {
    CAPTURE_MODE.get()
}

/// Lets an event happen, or fail.
pub fn happen(event: Handle, status: Status) {
    of_event(event).store(status, Ordering::SeqCst);
}

fn of_event(event: Handle) -> &'static AtomicI32 {
    // SAFETY: `event_create` leaked the number behind each event.
    unsafe { &*event.cast::<AtomicI32>() }
}

/// Number of times that a parked process refuses to come back, by process id.
pub static FULL: [AtomicI32; 4] = [const { AtomicI32::new(0) }; 4];

extern "C" fn device_count(count: *mut i32) -> Status {
    // SAFETY: callers pass a valid pointer, here and below.
    unsafe { count.write(2) };
    0
}

extern "C" fn uuid(uuid: *mut u8, device: i32) -> Status {
    // SAFETY: a UUID has 16 bytes.
    unsafe { uuid.cast::<[u8; 16]>().write([device as u8 + 1; 16]) };
    0
}

extern "C" fn retain(ctx: *mut Handle, device: i32) -> Status {
    // SAFETY: as above.
    unsafe { ctx.write(std::ptr::without_provenance_mut(0x1000 + device as usize)) };
    0
}

extern "C" fn done_with_device(_device: i32) -> Status {
    0
}

/// Only the first device reaches the other one.
extern "C" fn reaches(can: *mut i32, from: i32, to: i32) -> Status {
    // SAFETY: as above.
    unsafe { can.write(i32::from((from, to) == (0, 1))) };
    0
}

extern "C" fn set_current(ctx: Handle) -> Status {
    CURRENT.set(ctx as usize);
    0
}

extern "C" fn push_current(ctx: Handle) -> Status {
    set_current(ctx)
}

extern "C" fn pop_current(ctx: *mut Handle) -> Status {
    // SAFETY: as above.
    unsafe { ctx.write(std::ptr::without_provenance_mut(CURRENT.replace(0))) };
    0
}

extern "C" fn exchange_mode(mode: *mut i32) -> Status {
    // SAFETY: as above.
    unsafe { mode.write(CAPTURE_MODE.replace(mode.read())) };
    0
}

extern "C" fn register(_address: *mut c_void, _len: usize, _flags: u32) -> Status {
    0
}

extern "C" fn device_pointer(device: *mut Address, host: *mut c_void, _flags: u32) -> Status {
    // SAFETY: as above.
    unsafe { device.write(host as Address) };
    0
}

extern "C" fn event_create(event: *mut Handle, _flags: u32) -> Status {
    let new: &'static AtomicI32 = Box::leak(Box::new(AtomicI32::new(status::NOT_READY)));
    // SAFETY: as above.
    unsafe { event.write(std::ptr::from_ref(new).cast_mut().cast()) };
    0
}

/// Status of an event whose query does not return while the event has it.
pub const QUERY_WAITS: Status = -1;

extern "C" fn event_query(event: Handle) -> Status {
    loop {
        match of_event(event).load(Ordering::SeqCst) {
            QUERY_WAITS => std::thread::sleep(Duration::from_millis(1)),
            status => return status,
        }
    }
}

extern "C" fn event_synchronize(event: Handle) -> Status {
    while event_query(event) == status::NOT_READY {
        std::thread::sleep(Duration::from_millis(1));
    }
    event_query(event)
}

extern "C" fn init(_flags: u32) -> Status {
    0
}

/// Id of a process whose calls never return.
pub const UNLOCKABLE: i32 = 77;

extern "C" fn lock(pid: i32, _args: *const c_void) -> Status {
    if pid == UNLOCKABLE { status::NOT_READY } else { 0 }
}

extern "C" fn park(_pid: i32, _args: *const c_void) -> Status {
    0
}

extern "C" fn restore(pid: i32, _args: *const c_void) -> Status {
    let full = FULL[pid as usize].fetch_sub(1, Ordering::SeqCst) > 0;
    if full { status::OUT_OF_MEMORY } else { 0 }
}

/// Returns the driver.
pub fn driver() -> &'static Driver {
    let functions: Vec<(&CStr, *const c_void)> = vec![
        (c"cuInit", init as *const c_void),
        (c"cuDeviceGetCount", device_count as *const c_void),
        (c"cuDeviceGetUuid_v2", uuid as *const c_void),
        (c"cuDevicePrimaryCtxRetain", retain as *const c_void),
        (c"cuDevicePrimaryCtxReset_v2", done_with_device as *const c_void),
        (c"cuDeviceCanAccessPeer", reaches as *const c_void),
        (c"cuCtxSetCurrent", set_current as *const c_void),
        (c"cuCtxPushCurrent_v2", push_current as *const c_void),
        (c"cuCtxPopCurrent_v2", pop_current as *const c_void),
        (c"cuThreadExchangeStreamCaptureMode", exchange_mode as *const c_void),
        (c"cuMemHostRegister_v2", register as *const c_void),
        (c"cuMemHostGetDevicePointer_v2", device_pointer as *const c_void),
        (c"cuEventCreate", event_create as *const c_void),
        (c"cuEventQuery", event_query as *const c_void),
        (c"cuEventSynchronize", event_synchronize as *const c_void),
        (c"cuCheckpointProcessLock", lock as *const c_void),
        (c"cuCheckpointProcessCheckpoint", park as *const c_void),
        (c"cuCheckpointProcessRestore", restore as *const c_void),
        (c"cuCheckpointProcessUnlock", park as *const c_void),
    ];
    // SAFETY: the functions have the types of cuda.h.
    unsafe { Driver::of(&Fake(Box::leak(functions.into_boxed_slice()))) }
}

/// Returns the limits of a lease of both devices.
pub fn devices() -> [DeviceLimit; 2] {
    [1, 2].map(|n| DeviceLimit { uuid: [n; 16], memory_bytes: 1 << 30, sm_percent: 100, context_bytes: 0 })
}
