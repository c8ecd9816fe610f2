//! State that the driver keeps per thread: stack of current contexts, capture mode, default
//! streams.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::status::{INVALID_CONTEXT, Result};

static NEXT_THREAD: AtomicU32 = AtomicU32::new(1);

// Cells without destructors stay usable while a thread exits; libraries still make calls then.
thread_local! {
    static ID: Cell<u32> = const { Cell::new(0) };
    static CURRENT: Cell<u64> = const { Cell::new(0) };
    static IN_HOST_FUNCTION: Cell<bool> = const { Cell::new(false) };
    static CAPTURE_MODE: Cell<i32> = const { Cell::new(0) };
    static RECENT: Cell<[u64; RECENT_LEN]> = const { Cell::new([0; RECENT_LEN]) };
    static BELOW: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
    static DEFAULT_STREAMS: DefaultStreams = DefaultStreams(RefCell::default());
}

/// Default streams of threads that have ended.
static ENDED: Mutex<Vec<u64>> = Mutex::new(Vec::new());
static FORKED: AtomicBool = AtomicBool::new(false);

/// A thread's own default streams, by context.
///
/// The driver destroys them with their thread. A call here could wait, so that a later call of
/// another thread destroys them.
struct DefaultStreams(RefCell<HashMap<u64, u64>>);

impl Drop for DefaultStreams {
    fn drop(&mut self) {
        // Another thread of the parent may have held the lock, and a child destroys no streams.
        if !forked() {
            ENDED.lock().unwrap_or_else(PoisonError::into_inner).extend(self.0.get_mut().values());
        }
    }
}

/// Notes that this process is a forked child, whose threads have none of the parent's streams.
pub fn set_forked() {
    FORKED.store(true, Ordering::Relaxed);
}

/// Returns `true` in a forked child.
#[inline]
pub fn forked() -> bool {
    FORKED.load(Ordering::Relaxed)
}

const RECENT_LEN: usize = 128;

/// Returns the number of the calling thread within the process, from 1.
#[inline]
pub fn id() -> u32 {
    ID.with(|id| {
        if id.get() == 0 {
            id.set(NEXT_THREAD.fetch_add(1, Ordering::Relaxed));
        }
        id.get()
    })
}

/// Returns the handle of the current context, 0 for none.
#[inline]
pub fn current() -> u64 {
    CURRENT.with(Cell::get)
}

/// Returns the current context; an error without one.
#[inline]
pub fn context() -> Result<u64> {
    match current() {
        0 => Err(INVALID_CONTEXT),
        ctx => Ok(ctx),
    }
}

/// Returns the context that a program names; null means the current one.
pub fn named(ctx: *mut c_void) -> Result<u64> {
    if ctx.is_null() { context() } else { Ok(ctx as u64) }
}

/// Replaces the top of the stack.
pub fn set_current(ctx: u64) {
    CURRENT.with(|c| c.set(ctx));
}

/// Pushes a context.
pub fn push(ctx: u64) {
    let before = CURRENT.with(|c| c.replace(ctx));
    if before != 0 {
        // The stack is missing only while the thread exits, and no call returns to `before` then.
        let _ = BELOW.try_with(|below| below.borrow_mut().push(before));
    }
}

/// Pops and returns the current context; an error without one.
pub fn pop() -> Result<u64> {
    let ctx = context()?;
    let below = BELOW.try_with(|below| below.borrow_mut().pop()).ok().flatten();
    set_current(below.unwrap_or(0));
    Ok(ctx)
}

/// Removes a destroyed context from the calling thread's stack.
pub fn forget(ctx: u64) {
    let _ = BELOW.try_with(|below| below.borrow_mut().retain(|c| *c != ctx));
    if current() == ctx {
        let below = BELOW.try_with(|below| below.borrow_mut().pop()).ok().flatten();
        set_current(below.unwrap_or(0));
    }
}

/// Runs `work` with another context current.
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

/// Returns `true` inside a host function of a stream, which must not call the driver.
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

/// Returns the thread's capture mode (`CUstreamCaptureMode`): 0 global, 1 thread-local, 2 relaxed.
#[inline]
pub fn capture_mode() -> i32 {
    CAPTURE_MODE.with(Cell::get)
}

/// Sets the capture mode and returns the previous one.
pub fn exchange_capture_mode(mode: i32) -> i32 {
    CAPTURE_MODE.with(|m| m.replace(mode))
}

/// Returns `true` if this thread has seen `key` recently; remembers it if `add` is set.
#[inline]
pub fn seen(key: u64, add: bool) -> bool {
    RECENT.with(|recent| {
        // SAFETY: the cell belongs to this thread, and no reference into it outlives this closure,
        // which does not call out.
        let slot = unsafe { &mut (*recent.as_ptr())[key as usize % RECENT_LEN] };
        let known = *slot == key;
        if add {
            *slot = key;
        }
        known
    })
}

/// Returns the thread's own default stream in a context, if it has one.
pub fn default_stream(ctx: u64) -> Option<u64> {
    DEFAULT_STREAMS.try_with(|streams| streams.0.borrow().get(&ctx).copied()).ok().flatten()
}

/// Sets the thread's own default stream in a context; an error while the thread exits.
pub fn set_default_stream(ctx: u64, stream: u64) -> Result {
    DEFAULT_STREAMS
        .try_with(|streams| streams.0.borrow_mut().insert(ctx, stream))
        .map(drop)
        .map_err(|_| INVALID_CONTEXT)
}

/// Returns and clears the default streams of threads that have ended.
pub fn take_ended_streams() -> Vec<u64> {
    std::mem::take(&mut ENDED.lock().unwrap_or_else(PoisonError::into_inner))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contexts_stack() {
        assert_eq!(context(), Err(INVALID_CONTEXT));
        assert_eq!(pop(), Err(INVALID_CONTEXT));
        push(1);
        push(2);
        set_current(3);
        assert_eq!(current(), 3, "the top is replaced");
        assert_eq!(pop(), Ok(3));
        assert_eq!(pop(), Ok(1));
        assert_eq!(current(), 0);
    }

    #[test]
    fn destroyed_context_leaves_every_place_of_the_stack() {
        [1, 2, 1, 3].into_iter().for_each(push);
        forget(1);
        assert_eq!(current(), 3);
        assert_eq!(pop(), Ok(3));
        assert_eq!(pop(), Ok(2));
        assert_eq!(pop(), Err(INVALID_CONTEXT));
        [4, 5].into_iter().for_each(push);
        forget(5);
        assert_eq!(current(), 4, "the context below becomes the current one");
    }

    #[test]
    fn borrowed_context_returns_after_a_panic_too() {
        push(1);
        assert_eq!(within(2, current), 2);
        assert_eq!(current(), 1);
        let panicked = std::panic::catch_unwind(|| within(3, || std::panic::resume_unwind(Box::new(()))));
        assert!(panicked.is_err());
        assert_eq!(current(), 1);
    }

    #[test]
    fn recent_keys_make_room_for_others() {
        let (key, same_place) = (5, 5 + RECENT_LEN as u64);
        assert!(!seen(key, false));
        assert!(!seen(key, true), "the answer is about the time before");
        assert!(seen(key, false));
        assert!(!seen(same_place, true));
        assert!(!seen(key, false), "the other key has taken the place");
    }

    #[test]
    fn numbers_differ_between_threads() {
        let mine = id();
        assert_eq!(id(), mine);
        let other = std::thread::spawn(id).join().unwrap();
        assert!(mine != 0 && other != 0 && other != mine);
    }

    #[test]
    fn forked_child_does_not_wait_for_a_lock_of_its_parent() {
        let held = ENDED.lock();
        // SAFETY: the child stores a flag, drops an empty map and exits; it allocates nothing.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: calls without pointers; the alarm ends a child that waits.
            unsafe { libc::alarm(10) };
            set_forked();
            drop(DefaultStreams(RefCell::default()));
            // SAFETY: as above.
            unsafe { libc::_exit(0) };
        }
        drop(held);
        let mut status = -1;
        // SAFETY: the pointer is valid.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0);
    }
}
