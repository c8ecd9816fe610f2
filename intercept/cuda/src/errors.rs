//! Names and texts of errors, exactly the driver's, because programs print and compare them.

use std::ffi::CStr;

include!(concat!(env!("OUT_DIR"), "/errors.rs"));

/// Returns the name and the text of a `CUresult`.
pub fn find(status: i32) -> Option<(&'static CStr, &'static CStr)> {
    let at = ERRORS.binary_search_by_key(&status, |row| row.0).ok()?;
    Some((ERRORS[at].1, ERRORS[at].2))
}
