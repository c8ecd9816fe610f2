//! Entry points, error texts, and calls that only tools make.

use std::collections::BTreeSet;
use std::ffi::{c_char, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

use gpusession_proto::handle;

use crate::entry::{INVALID_VALUE, NOT_FOUND, Result, driver, give, give_optional, name, take};
use crate::proc_address::{self, Missing};
use crate::streams::Default;
use crate::{clients, errors, handles, private_tables};

/// `CUdriverProcAddress_flags`
const PER_THREAD: u64 = 2;
/// `CUdriverProcAddressQueryResult`
const FOUND: i32 = 0;
const SYMBOL_NOT_FOUND: i32 = 1;
const VERSION_NOT_SUFFICIENT: i32 = 2;

/// Finds the call `symbol`; the outer error is one of the arguments.
fn look_up(
    symbol: *const c_char,
    version: i32,
    flags: u64,
) -> Result<std::result::Result<*const c_void, Missing>> {
    // A driver compares the version first, and writes no result then.
    if flags > 3 || version > clients::driver_version() {
        return Err(INVALID_VALUE);
    }
    // A negative version is a large one where it chooses the form.
    let version = if version < 0 { clients::driver_version() } else { version };
    let found = proc_address::find(name(symbol)?.to_bytes(), version, flags & PER_THREAD != 0);
    Ok(found.map(|function| function as *const c_void))
}

/// Functions of the program that wait for log messages.
fn log_callbacks() -> MutexGuard<'static, BTreeSet<u64>> {
    static CALLBACKS: Mutex<BTreeSet<u64>> = Mutex::new(BTreeSet::new());
    CALLBACKS.lock().unwrap_or_else(PoisonError::into_inner)
}

driver! {
    fn cuGetProcAddress(symbol: *const c_char, out: *mut *const c_void, version: i32, flags: u64) {
        if out.is_null() {
            return Err(INVALID_VALUE);
        }
        give(out, look_up(symbol, version, flags)?.map_err(|_| NOT_FOUND)?)
    }

    fn cuGetProcAddress_v2 / cuGetProcAddress_v2_ptsz [default] (
        symbol: *const c_char, out: *mut *const c_void, version: i32, flags: u64, status: *mut i32,
    ) {
        if out.is_null() {
            return Err(INVALID_VALUE);
        }
        // Code with per-thread default streams means those unless it says more.
        let flags = if flags == 0 && default == Default::PerThread { PER_THREAD } else { flags };
        // A call that does not exist is no error, and its address is null.
        let (function, told) = match look_up(symbol, version, flags)? {
            Ok(function) => (function, FOUND),
            Err(Missing::Symbol) => (std::ptr::null(), SYMBOL_NOT_FOUND),
            Err(Missing::Version) => (std::ptr::null(), VERSION_NOT_SUFFICIENT),
        };
        give(out, function)?;
        give_optional(status, told);
        Ok(())
    }

    fn cuGetErrorName(error: i32, text: *mut *const c_char) {
        match errors::find(error) {
            Some((known, _)) => give(text, known.as_ptr()),
            None => give(text, std::ptr::null()).and(Err(INVALID_VALUE)),
        }
    }

    fn cuGetErrorString(error: i32, text: *mut *const c_char) {
        match errors::find(error) {
            Some((_, known)) => give(text, known.as_ptr()),
            None => give(text, std::ptr::null()).and(Err(INVALID_VALUE)),
        }
    }

    fn cuGetExportTable(table: *mut *const c_void, id: *const [u8; 16]) {
        let id = take(id)?;
        match private_tables::find(&id) {
            Some(known) => give(table, known),
            None => {
                give(table, std::ptr::null())?;
                Err(INVALID_VALUE)
            }
        }
    }

    /// Accepted without effect: profilers attach on the GPU's host.
    fn cuProfilerStart() {
        clients::get().map(|_| ())
    }

    fn cuProfilerStop() {
        clients::get().map(|_| ())
    }

    /// Accepted without effect: the driver's log messages stay on the server.
    fn cuLogsRegisterCallback(function: *const c_void, _data: *mut c_void, callback: *mut u64) {
        if function.is_null() {
            return Err(INVALID_VALUE);
        }
        let new = handles::mint(handle::CALLBACK, 0);
        log_callbacks().insert(new);
        give_optional(callback, new);
        Ok(())
    }

    fn cuLogsUnregisterCallback(callback: u64) {
        if !log_callbacks().remove(&callback) {
            return Err(INVALID_VALUE);
        }
        handles::retire(callback);
        Ok(())
    }

    fn cuLogsCurrent(iterator: *mut u32, flags: u32) {
        if flags != 0 { Err(INVALID_VALUE) } else { give(iterator, 0) }
    }

    /// As a driver without messages.
    fn cuLogsDumpToMemory(_iterator: *mut u32, buffer: *mut c_char, size: *mut usize, flags: u32) {
        let room = take(size)?;
        if flags != 0 || buffer.is_null() || room == 0 {
            return Err(INVALID_VALUE);
        }
        give(buffer, 0)?;
        give(size, 0)
    }
}
