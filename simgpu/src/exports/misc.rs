//! Lookup of functions and tables by name, version and id.

use super::{out, out_opt, text};
use crate::errors::{INVALID_VALUE, NOT_FOUND, Result};
use crate::export;
use crate::export_tables;
use crate::proc_address::{self, Missing};
use std::ffi::c_char;

unsafe fn look_up(name: *const c_char, to: *mut usize, version: i32, flags: u64, status: *mut u32) -> Result {
    // SAFETY: the program vouches for its pointers.
    unsafe {
        if to.is_null() || flags > 2 {
            return Err(INVALID_VALUE);
        }
        match proc_address::find(text(name)?, version.max(0) as u32, flags) {
            Ok(address) => {
                out_opt(status, 0);
                out(to, address)
            }
            Err(why) => {
                out_opt(status, if why == Missing::Symbol { 1 } else { 2 });
                out(to, 0)?;
                Err(NOT_FOUND)
            }
        }
    }
}

export! {
    fn cuGetProcAddress(name: *const c_char, to: *mut usize, version: i32, flags: u64) {
        look_up(name, to, version, flags, std::ptr::null_mut())
    }

    fn cuGetProcAddress_v2 | cuGetProcAddress_v2_ptsz (name: *const c_char, to: *mut usize, version: i32, flags: u64, status: *mut u32) {
        look_up(name, to, version, if PER_THREAD && flags == 0 { 2 } else { flags }, status)
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
