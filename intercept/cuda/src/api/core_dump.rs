//! Attributes of GPU core dumps, and functions that wait for one.
//!
//! The library keeps them for the program. No core dump is made: a worker has no folder that its
//! driver could write to.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use gpusession_common::core_dump::{Kind, Refusal, Settings, TEXT, kind};
use gpusession_proto::handle;

use crate::entry::{INVALID_VALUE, NOT_PERMITTED, Result, bytes, driver, give, give_optional, take};
use crate::{clients, handles, thread};

fn settings() -> MutexGuard<'static, Settings> {
    static SETTINGS: LazyLock<Mutex<Settings>> = LazyLock::new(|| {
        let mut name = [0u8; 256];
        // SAFETY: the buffer has as many bytes as stated, less one for a terminator.
        unsafe { libc::gethostname(name.as_mut_ptr().cast(), name.len() - 1) };
        let end = name.iter().position(|byte| *byte == 0).unwrap_or(0);
        let host = String::from_utf8_lossy(&name[..end]).into_owned();
        Mutex::new(Settings::new(&host, std::process::id(), |name| std::env::var(name).ok()))
    });
    SETTINGS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Forgets what a destroyed context had of its own.
pub fn forget_context(ctx: u64) {
    settings().forget(ctx);
}

fn status(refusal: Refusal) -> i32 {
    match refusal {
        Refusal::Invalid => INVALID_VALUE,
        Refusal::NotPermitted => NOT_PERMITTED,
    }
}

fn get(ctx: Option<u64>, attribute: u32, target: *mut c_void, size: *mut usize) -> Result {
    let kind = kind(attribute).map_err(status)?;
    if target.is_null() {
        return give(size, kind.room());
    }
    let mut value = settings().get(ctx, attribute).map_err(status)?.to_vec();
    if kind == Kind::Text {
        value.push(0);
    }
    if take(size)? < value.len() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: by the call's contract the buffer has as many bytes as stated, which was checked.
    unsafe { target.cast::<u8>().copy_from_nonoverlapping(value.as_ptr(), value.len()) };
    Ok(())
}

fn set(ctx: Option<u64>, attribute: u32, value: *const c_void, size: *mut usize) -> Result {
    let kind = kind(attribute).map_err(status)?;
    if value.is_null() {
        return give(size, kind.room());
    }
    let given = bytes(value, take(size)?.min(TEXT))?;
    settings().set(ctx, attribute, given).map_err(status)
}

/// Registered functions, and whether each waits for the beginning of a dump, or for its end.
static CALLBACKS: Mutex<BTreeMap<u64, bool>> = Mutex::new(BTreeMap::new());

fn register(function: *const c_void, begins: bool, callback: *mut u64) -> Result {
    clients::get()?;
    if function.is_null() {
        return Err(INVALID_VALUE);
    }
    let new = handles::mint(handle::CALLBACK, 0);
    CALLBACKS.lock().unwrap_or_else(PoisonError::into_inner).insert(new, begins);
    give_optional(callback, new);
    Ok(())
}

fn deregister(callback: u64, begins: bool) -> Result {
    clients::get()?;
    let mut known = CALLBACKS.lock().unwrap_or_else(PoisonError::into_inner);
    if known.get(&callback) != Some(&begins) {
        return Err(INVALID_VALUE);
    }
    known.remove(&callback);
    handles::retire(callback);
    Ok(())
}

driver! {
    fn cuCoredumpGetAttribute(attribute: u32, value: *mut c_void, size: *mut usize) {
        get(Some(thread::context()?), attribute, value, size)
    }

    fn cuCoredumpSetAttribute(attribute: u32, value: *const c_void, size: *mut usize) {
        set(Some(thread::context()?), attribute, value, size)
    }

    fn cuCoredumpGetAttributeGlobal(attribute: u32, value: *mut c_void, size: *mut usize) {
        clients::get()?;
        get(None, attribute, value, size)
    }

    fn cuCoredumpSetAttributeGlobal(attribute: u32, value: *const c_void, size: *mut usize) {
        clients::get()?;
        set(None, attribute, value, size)
    }

    fn cuCoredumpRegisterStartCallback(function: *const c_void, _data: *mut c_void, callback: *mut u64) {
        register(function, true, callback)
    }

    fn cuCoredumpRegisterCompleteCallback(function: *const c_void, _data: *mut c_void, callback: *mut u64) {
        register(function, false, callback)
    }

    fn cuCoredumpDeregisterStartCallback(callback: u64) {
        deregister(callback, true)
    }

    fn cuCoredumpDeregisterCompleteCallback(callback: u64) {
        deregister(callback, false)
    }
}
