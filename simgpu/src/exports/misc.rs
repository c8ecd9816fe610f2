//! Lookup of functions and tables by name, version and id.

use super::{out, out_opt, text};
use crate::driver::config;
use crate::errors::{INVALID_VALUE, NOT_FOUND, Result};
use crate::export;
use crate::export_tables;
use crate::proc_address::{self, Missing};
use std::ffi::c_char;

/// Finds a call; the outer error is one of the arguments, before which nothing is written.
unsafe fn look_up(
    name: *const c_char,
    version: i32,
    flags: u64,
) -> Result<std::result::Result<usize, Missing>> {
    if flags > 3 || version > config().driver_version as i32 {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the program vouches for its pointers.
    Ok(proc_address::find(unsafe { text(name) }?, version as u32, flags))
}

export! {
    fn cuGetProcAddress(name: *const c_char, to: *mut usize, version: i32, flags: u64) {
        if to.is_null() {
            return Err(INVALID_VALUE);
        }
        out(to, look_up(name, version, flags)?.map_err(|_| NOT_FOUND)?)
    }

    fn cuGetProcAddress_v2 | cuGetProcAddress_v2_ptsz (name: *const c_char, to: *mut usize, version: i32, flags: u64, status: *mut u32) {
        let found = look_up(name, version, if PER_THREAD && flags == 0 { 2 } else { flags })?;
        out(to, found.unwrap_or(0))?;
        out_opt(status, found.err().map_or(0, |why| why as u32));
        Ok(())
    }

    fn cuGetExportTable(to: *mut *const usize, id: *const [u8; 16]) {
        let id = super::read(id)?;
        if to.is_null() {
            return Err(INVALID_VALUE);
        }
        match export_tables::find(&id) {
            Some(t) => out(to, t),
            None => Err(export_tables::MISSING),
        }
    }

    fn cuLogsRegisterCallback(_func: usize, _data: usize, to: *mut usize) { out(to, 1) }
    fn cuLogsUnregisterCallback(_callback: usize) { Ok(()) }
    // This driver has no messages.
    fn cuLogsCurrent(iterator: *mut u32, flags: u32) {
        if flags != 0 { Err(INVALID_VALUE) } else { out(iterator, 0) }
    }
    fn cuLogsDumpToMemory(_iterator: *mut u32, buffer: *mut c_char, size: *mut usize, flags: u32) {
        if flags != 0 || buffer.is_null() || super::read(size)? == 0 {
            return Err(INVALID_VALUE);
        }
        out(buffer, 0)?;
        out(size, 0)
    }
}
