//! Contexts: the current one of each thread, and the objects that they own.

use crate::driver::core_dump;
use crate::driver::stream::{Point, Role, Stream};
use crate::driver::{Driver, driver};
use crate::errors::{CONTEXT_IS_DESTROYED, DEINITIALIZED, Error, INVALID_CONTEXT, Result};
use crate::ptx::exec::Host;
use crate::registry::{Registry, handle};
use gpusession_common::context_calls::{self, Broken};
use gpusession_common::core_dump::Dump;
use parking_lot::Mutex;
use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::CStr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

pub static CONTEXTS: Registry<Context> = Registry::new();

/// The error code after which the process can create no context; 0 before.
static POISON: AtomicU32 = AtomicU32::new(0);

/// Returns the error of a call of this name in the current context, if that has a fault.
pub fn error_of_call(name: &str) -> Result {
    let Ok(Some(ctx)) = top() else { return Ok(()) };
    let life = ctx.life();
    let broken = match (not_poisoned(), ctx.active()) {
        (Ok(()), true) => return Ok(()),
        (Err(_), true) if life.check().is_ok() => return Ok(()),
        (Err(Error(fault)), true) => Broken::Fault(fault as i32),
        (Err(_), false) => Broken::ResetAfterFault,
        (Ok(()), false) => Broken::Destroyed,
    };
    let Some(code) = context_calls::error(name, broken) else { return Ok(()) };
    // The call may be the one that shows what the kernel printed before its fault.
    life.flush();
    Err(Error(code as u32))
}

pub fn not_poisoned() -> Result {
    match POISON.load(Ordering::SeqCst) {
        0 => Ok(()),
        code => Err(Error(code)),
    }
}

/// State that ends with a context, or with one activation of a primary context.
#[derive(Default)]
pub struct Life {
    pub cancel: Arc<AtomicBool>,
    sticky: AtomicU32,
    output: Mutex<Vec<(bool, Vec<u8>)>>,
    /// The dump of a fault, as the attributes were at the beginning.
    dump: Mutex<Option<Dump>>,
}

impl Life {
    /// Returns `true` if work no longer runs: the context is destroyed or broken.
    pub fn over(&self) -> bool {
        self.cancel.load(Ordering::Relaxed) || self.sticky.load(Ordering::Relaxed) != 0
    }

    /// Breaks the context for good.
    pub fn fail(&self, code: u32) {
        let _ = POISON.compare_exchange(0, code, Ordering::SeqCst, Ordering::SeqCst);
        let _ = self.sticky.compare_exchange(0, code, Ordering::SeqCst, Ordering::SeqCst);
    }

    /// Takes the attributes of core dumps; `flags` are the context's.
    pub fn begin(&self, flags: u32) {
        *self.dump.lock() = core_dump::settings().dump(flags & core_dump::CONTEXT_FLAGS != 0);
    }

    /// Dumps the fault of a kernel, if the context has to.
    pub fn faulted(&self, kernel: &CStr) {
        if let Some(dump) = self.dump.lock().take() {
            core_dump::start(dump, kernel);
        }
    }

    pub fn check(&self) -> Result {
        match self.sticky.load(Ordering::SeqCst) {
            0 => Ok(()),
            code => Err(Error(code)),
        }
    }

    /// Writes the output of kernels to the program's own stdout and stderr.
    pub fn flush(&self) {
        let chunks = std::mem::take(&mut *self.output.lock());
        if chunks.is_empty() {
            return;
        }
        for (error, text) in chunks {
            // SAFETY: the C library's streams live as long as the process.
            unsafe {
                let stream = if error { stderr } else { stdout };
                libc::fwrite(text.as_ptr().cast(), 1, text.len(), stream);
            }
        }
        // SAFETY: as above.
        unsafe { libc::fflush(stdout) };
    }
}

unsafe extern "C" {
    static stdout: *mut libc::FILE;
    static stderr: *mut libc::FILE;
}

impl Host for Life {
    fn print(&self, text: &[u8]) {
        let mut output = self.output.lock();
        match output.last_mut() {
            Some((false, last)) => last.extend_from_slice(text),
            _ => output.push((false, text.to_vec())),
        }
    }

    fn assertion(&self, text: &str) {
        self.output.lock().push((true, text.as_bytes().to_vec()));
    }

    // The device heap is not simulated, so that `malloc` in a kernel always fails.
    fn malloc(&self, _size: u64) -> u64 {
        0
    }

    fn free(&self, _at: u64) {}
}

type Destructor = unsafe extern "C" fn(usize, usize, usize);

#[derive(Default)]
pub struct State {
    streams: Vec<Weak<Stream>>,
    legacy: Option<Arc<Stream>>,
    per_thread: HashMap<u64, Arc<Stream>>,
    pub storage: HashMap<usize, (usize, Option<Destructor>)>,
    pub limits: HashMap<u32, u64>,
    pub peers: Vec<usize>,
    pub stream_order: u64,
}

pub struct Context {
    pub id: u64,
    pub device: u32,
    pub primary: bool,
    pub flags: AtomicU32,
    pub cache_config: AtomicU32,
    pub shared_config: AtomicU32,
    /// Number of retains of a primary context; 1 for other contexts until they are destroyed.
    pub references: AtomicU32,
    /// Whether a primary context was reset since the latest `cuDevicePrimaryCtxRetain`.
    pub reset: AtomicBool,
    life: Mutex<Arc<Life>>,
    pub state: Mutex<State>,
}

thread_local! {
    static STACK: RefCell<Vec<Arc<Context>>> = const { RefCell::new(Vec::new()) };
    static THREAD: u64 = {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        NEXT.fetch_add(1, Ordering::Relaxed)
    };
}

/// Returns a number that identifies the calling thread in this process.
pub fn thread_id() -> u64 {
    THREAD.try_with(|t| *t).unwrap_or(0)
}

pub fn with_stack<R>(f: impl FnOnce(&mut Vec<Arc<Context>>) -> R) -> Result<R> {
    STACK.try_with(|s| f(&mut s.borrow_mut())).map_err(|_| DEINITIALIZED)
}

/// Returns the context on top of the stack, in whatever state.
pub fn top() -> Result<Option<Arc<Context>>> {
    with_stack(|s| s.last().cloned())
}

/// Returns the current context, which must be alive.
pub fn current() -> Result<Arc<Context>> {
    driver()?;
    let ctx = top()?.ok_or(INVALID_CONTEXT)?;
    ctx.check_alive()?;
    Ok(ctx)
}

/// Returns the current context for calls that do work, which fail if it is broken.
pub fn working() -> Result<Arc<Context>> {
    let ctx = current()?;
    ctx.life().check()?;
    Ok(ctx)
}

/// Returns a context by handle; null is the current one.
pub fn by_handle(h: usize) -> Result<Arc<Context>> {
    driver()?;
    if h == 0 { current() } else { CONTEXTS.find(h).ok_or(INVALID_CONTEXT) }
}

impl Context {
    pub fn new(device: u32, primary: bool, flags: u32) -> Arc<Context> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let ctx = Arc::new(Context {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            device,
            primary,
            flags: AtomicU32::new(flags),
            cache_config: AtomicU32::new(0),
            shared_config: AtomicU32::new(1),
            references: AtomicU32::new(u32::from(!primary)),
            reset: AtomicBool::new(false),
            life: Mutex::default(),
            state: Mutex::default(),
        });
        if !primary {
            ctx.life().begin(flags);
        }
        CONTEXTS.insert(ctx.clone());
        ctx
    }

    pub fn life(&self) -> Arc<Life> {
        self.life.lock().clone()
    }

    pub fn active(&self) -> bool {
        self.references.load(Ordering::SeqCst) > 0 && !self.reset.load(Ordering::SeqCst)
    }

    pub fn check_alive(&self) -> Result {
        if self.active() { Ok(()) } else { Err(CONTEXT_IS_DESTROYED) }
    }

    /// Returns the stream behind the null handle or `CU_STREAM_LEGACY`.
    pub fn legacy(self: &Arc<Self>) -> Arc<Stream> {
        let mut state = self.state.lock();
        let made = || Stream::new(Role::Legacy, 0, 0, handle(self), self.device, self.life());
        state.legacy.get_or_insert_with(made).clone()
    }

    pub fn per_thread(self: &Arc<Self>) -> Arc<Stream> {
        let mut state = self.state.lock();
        let state = &mut *state;
        let made = || {
            let s = Stream::new(Role::PerThread, 0, 0, handle(self), self.device, self.life());
            state.streams.push(Arc::downgrade(&s));
            s
        };
        state.per_thread.entry(thread_id()).or_insert_with(made).clone()
    }

    pub fn adopt(&self, stream: &Arc<Stream>) {
        let mut state = self.state.lock();
        state.streams.retain(|s| s.strong_count() > 0);
        state.streams.push(Arc::downgrade(stream));
    }

    /// Returns all streams except the legacy one.
    pub fn streams(&self) -> Vec<Arc<Stream>> {
        self.state.lock().streams.iter().filter_map(Weak::upgrade).collect()
    }

    /// Returns `true` if all work submitted so far is done.
    pub fn idle(&self) -> bool {
        let legacy = self.state.lock().legacy.clone();
        self.streams().into_iter().chain(legacy).all(|s| s.last().reached())
    }

    /// Returns the last work of the legacy stream and of the streams that follow it.
    pub fn last_of_default(&self) -> Vec<Point> {
        let legacy = self.state.lock().legacy.clone();
        self.streams().into_iter().filter(|s| s.blocking()).chain(legacy).map(|s| s.last()).collect()
    }

    /// Waits for all work submitted so far.
    pub fn synchronize(&self) -> Result {
        let legacy = self.state.lock().legacy.clone();
        for s in self.streams().into_iter().chain(legacy) {
            s.last().wait();
        }
        let life = self.life();
        life.flush();
        life.check()
    }

    /// Ends this activation: drops its work, and frees its memory, streams and events.
    pub fn tear_down(self: &Arc<Self>, d: &Driver) {
        let me = handle(self);
        let life = std::mem::take(&mut *self.life.lock());
        // Work in flight may finish for a moment; an endless kernel must not block the process.
        let deadline = std::time::Instant::now() + std::time::Duration::from_millis(500);
        let streams: Vec<_> = self.streams().into_iter().chain(self.state.lock().legacy.clone()).collect();
        let points: Vec<_> = streams.iter().map(Stream::last).collect();
        while !life.over() && std::time::Instant::now() < deadline && !points.iter().all(|p| p.reached()) {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        life.flush();
        life.cancel.store(true, Ordering::SeqCst);
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(1);
        while std::time::Instant::now() < deadline && !points.iter().all(|p| p.reached()) {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        let state = std::mem::take(&mut *self.state.lock());
        for (key, (value, destroy)) in state.storage {
            if let Some(destroy) = destroy {
                // SAFETY: the caller of the storage table gave this function for this value.
                unsafe { destroy(me, key, value) };
            }
        }
        crate::driver::capture::context_gone(me);
        for s in crate::driver::stream::STREAMS.all().into_iter().filter(|s| s.context == me) {
            let _ = crate::driver::stream::STREAMS.remove(handle(&s));
        }
        for e in crate::driver::stream::EVENTS.all().into_iter().filter(|e| e.context == me) {
            let _ = crate::driver::stream::EVENTS.remove(handle(&e));
        }
        crate::driver::module::forget_context(me);
        for to in state.peers {
            if let Some(peer) = CONTEXTS.find(to) {
                d.space.set_peer(self.device, peer.device, false);
            }
        }
        crate::driver::texture::forget_context(me);
        crate::driver::array::forget_context(me);
        d.space.remove_context(me);
    }
}
