//! Attributes of core dumps.

use super::{out, out_opt, read};
use crate::driver::context::current;
use crate::driver::core_dump::settings;
use crate::driver::driver;
use crate::errors::{Error, INVALID_VALUE, NOT_PERMITTED, Result};
use crate::export;
use crate::registry::{Registry, handle};
use gpusession_common::core_dump::{Kind, Refusal, TEXT, kind};
use std::sync::Arc;

/// Registered functions, and whether each waits for the beginning of a dump, or for its end.
static CALLBACKS: Registry<bool> = Registry::new();

fn error(refusal: Refusal) -> Error {
    match refusal {
        Refusal::Invalid => INVALID_VALUE,
        Refusal::NotPermitted => NOT_PERMITTED,
    }
}

unsafe fn get(ctx: Option<u64>, attribute: u32, to: *mut u8, size: *mut usize) -> Result {
    let kind = kind(attribute).map_err(error)?;
    // SAFETY: the program vouches for its pointers.
    unsafe {
        if to.is_null() {
            return out(size, kind.room());
        }
        let mut value = settings().get(ctx, attribute).map_err(error)?.to_vec();
        if kind == Kind::Text {
            value.push(0);
        }
        if read(size)? < value.len() {
            return Err(INVALID_VALUE);
        }
        std::ptr::copy_nonoverlapping(value.as_ptr(), to, value.len());
    }
    Ok(())
}

unsafe fn set(ctx: Option<u64>, attribute: u32, from: *const u8, size: *mut usize) -> Result {
    let kind = kind(attribute).map_err(error)?;
    // SAFETY: the program vouches for its pointers.
    unsafe {
        if from.is_null() {
            return out(size, kind.room());
        }
        let given = super::slice(from, read(size)?.min(TEXT))?;
        settings().set(ctx, attribute, given).map_err(error)
    }
}

unsafe fn register(func: usize, begins: bool, to: *mut usize) -> Result {
    driver()?;
    if func == 0 {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the program vouches for its pointer.
    unsafe { out_opt(to, CALLBACKS.insert(Arc::new(begins))) };
    Ok(())
}

fn deregister(callback: usize, begins: bool) -> Result {
    driver()?;
    if CALLBACKS.find(callback).is_none_or(|known| *known != begins) {
        return Err(INVALID_VALUE);
    }
    CALLBACKS.remove(callback).map(drop)
}

export! {
    fn cuCoredumpGetAttribute(attribute: u32, to: *mut u8, size: *mut usize) {
        get(Some(handle(&current()?) as u64), attribute, to, size)
    }
    fn cuCoredumpSetAttribute(attribute: u32, from: *const u8, size: *mut usize) {
        set(Some(handle(&current()?) as u64), attribute, from, size)
    }
    fn cuCoredumpGetAttributeGlobal(attribute: u32, to: *mut u8, size: *mut usize) {
        driver()?;
        get(None, attribute, to, size)
    }
    fn cuCoredumpSetAttributeGlobal(attribute: u32, from: *const u8, size: *mut usize) {
        driver()?;
        set(None, attribute, from, size)
    }
    fn cuCoredumpRegisterStartCallback(func: usize, _data: usize, to: *mut usize) { register(func, true, to) }
    fn cuCoredumpRegisterCompleteCallback(func: usize, _data: usize, to: *mut usize) { register(func, false, to) }
    fn cuCoredumpDeregisterStartCallback(callback: usize) { deregister(callback, true) }
    fn cuCoredumpDeregisterCompleteCallback(callback: usize) { deregister(callback, false) }
}
