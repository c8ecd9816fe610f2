//! Calls that the table describes completely, and calls that are not supported; `build.rs` writes
//! both.

use std::ffi::c_void;

use gpusession_proto::frame::op;
use gpusession_proto::handle;

use crate::client::{string, word};
use crate::entry::{INVALID_VALUE, Result, UNKNOWN, bytes, driver, give, give_optional};
use crate::streams::find;
use crate::{clients, objects, route};

/// Copies a structure of the answer to the program.
fn give_bytes(target: *mut c_void, answer: &[u8], len: usize) -> Result {
    if target.is_null() {
        return Err(INVALID_VALUE);
    }
    if answer.len() != len {
        return Err(UNKNOWN);
    }
    // SAFETY: the pointer is not null, and by the call's contract the program's structure has `len`
    // bytes, as many as `answer`.
    unsafe { std::ptr::copy_nonoverlapping(answer.as_ptr(), target.cast(), len) };
    Ok(())
}

include!(concat!(env!("OUT_DIR"), "/generated.rs"));
