//! Attributes of GPU core dumps, and functions that wait for one.
//!
//! The module `core_dumps` keeps them.

use std::ffi::c_void;

use gpusession_common::core_dump::{Kind, Refusal, TEXT, kind};

use crate::core_dumps::{self, settings};
use crate::entry::{INVALID_VALUE, NOT_PERMITTED, Result, bytes, driver, give, give_optional, take};
use crate::{clients, thread};

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

fn register(function: *const c_void, data: *mut c_void, begins: bool, callback: *mut u64) -> Result {
    clients::get()?;
    if function.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the pointer is not null, so by the call's contract it is a function of this type.
    let function = unsafe { std::mem::transmute::<*const c_void, core_dumps::Callback>(function) };
    give_optional(callback, core_dumps::register(function, data, begins));
    Ok(())
}

fn deregister(callback: u64, begins: bool) -> Result {
    clients::get()?;
    if core_dumps::deregister(callback, begins) { Ok(()) } else { Err(INVALID_VALUE) }
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

    fn cuCoredumpRegisterStartCallback(function: *const c_void, data: *mut c_void, callback: *mut u64) {
        register(function, data, true, callback)
    }

    fn cuCoredumpRegisterCompleteCallback(function: *const c_void, data: *mut c_void, callback: *mut u64) {
        register(function, data, false, callback)
    }

    fn cuCoredumpDeregisterStartCallback(callback: u64) {
        deregister(callback, true)
    }

    fn cuCoredumpDeregisterCompleteCallback(callback: u64) {
        deregister(callback, false)
    }
}
