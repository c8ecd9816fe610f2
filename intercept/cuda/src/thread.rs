//! What the driver keeps per thread: the stack of current contexts, the capture mode, default streams.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::entry::{INVALID_CONTEXT, Result};

static NEXT_THREAD: AtomicU32 = AtomicU32::new(1);

// Cells without destructors stay usable while a thread ends, when libraries still make calls.
thread_local! {
    static ID: Cell<u32> = const { Cell::new(0) };
    static CURRENT: Cell<u64> = const { Cell::new(0) };
    static IN_HOST_FUNCTION: Cell<bool> = const { Cell::new(false) };
    static CAPTURE_MODE: Cell<i32> = const { Cell::new(0) };
    static RECENT: Cell<[u64; RECENT_LEN]> = const { Cell::new([0; RECENT_LEN]) };
    static BELOW: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
    static DEFAULT_STREAMS: RefCell<HashMap<u64, u64>> = RefCell::new(HashMap::new());
}

const RECENT_LEN: usize = 128;

/// Number of the calling thread within the process, from 1.
#[inline]
pub fn id() -> u32 {
    ID.with(|id| {
        if id.get() == 0 {
            id.set(NEXT_THREAD.fetch_add(1, Ordering::Relaxed));
        }
        id.get()
    })
}

/// Handle of the current context, 0 for none.
#[inline]
pub fn current() -> u64 {
    CURRENT.with(Cell::get)
}

/// The current context; an error if there is none.
#[inline]
pub fn context() -> Result<u64> {
    match current() {
        0 => Err(INVALID_CONTEXT),
        ctx => Ok(ctx),
    }
}

/// Replaces the top of the stack.
pub fn set_current(ctx: u64) {
    CURRENT.with(|c| c.set(ctx));
}

/// Pushes a context.
pub fn push(ctx: u64) {
    let before = CURRENT.with(|c| c.replace(ctx));
    if before != 0 {
        // The stack is gone only while the thread ends: then there is nothing to come back to.
        let _ = BELOW.try_with(|below| below.borrow_mut().push(before));
    }
}

/// Pops a context.
pub fn pop() -> Result<u64> {
    let ctx = context()?;
    let below = BELOW.try_with(|below| below.borrow_mut().pop()).ok().flatten();
    set_current(below.unwrap_or(0));
    Ok(ctx)
}

/// A context is gone: it is current nowhere in this thread.
pub fn forget(ctx: u64) {
    let _ = BELOW.try_with(|below| below.borrow_mut().retain(|c| *c != ctx));
    if current() == ctx {
        let below = BELOW.try_with(|below| below.borrow_mut().pop()).ok().flatten();
        set_current(below.unwrap_or(0));
    }
}

/// Runs something with another context current.
pub fn within<T>(ctx: u64, work: impl FnOnce() -> T) -> T {
    struct Before(u64);
    impl Drop for Before {
        fn drop(&mut self) {
            set_current(self.0);
        }
    }
    let _before = Before(CURRENT.with(|c| c.replace(ctx)));
    work()
}

/// Whether the thread is running a host function of a stream, which must not call the driver.
#[inline]
pub fn in_host_function() -> bool {
    IN_HOST_FUNCTION.with(Cell::get)
}

/// Runs a host function.
pub fn host_function(run: impl FnOnce()) {
    IN_HOST_FUNCTION.with(|inside| inside.set(true));
    run();
    IN_HOST_FUNCTION.with(|inside| inside.set(false));
}

/// The thread's capture mode (`CUstreamCaptureMode`): 0 global, 1 thread-local, 2 relaxed.
#[inline]
pub fn capture_mode() -> i32 {
    CAPTURE_MODE.with(Cell::get)
}

/// Sets it and returns the one before.
pub fn exchange_capture_mode(mode: i32) -> i32 {
    CAPTURE_MODE.with(|m| m.replace(mode))
}

/// Whether this thread has seen `key` lately; remembers it if `add`.
#[inline]
pub fn seen(key: u64, add: bool) -> bool {
    RECENT.with(|recent| {
        // SAFETY: the cell is this thread's own and no reference to it outlives this expression.
        let slot = unsafe { &mut (*recent.as_ptr())[key as usize % RECENT_LEN] };
        let known = *slot == key;
        if add {
            *slot = key;
        }
        known
    })
}

/// The thread's own default stream in a context, if it has been given one.
pub fn default_stream(ctx: u64) -> Option<u64> {
    DEFAULT_STREAMS.try_with(|streams| streams.borrow().get(&ctx).copied()).ok().flatten()
}

/// Gives it one.
pub fn set_default_stream(ctx: u64, stream: u64) -> Result {
    DEFAULT_STREAMS
        .try_with(|streams| streams.borrow_mut().insert(ctx, stream))
        .map(drop)
        .map_err(|_| INVALID_CONTEXT)
}
