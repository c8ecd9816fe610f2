//! Entry from C: no panic unwinds into it, and results go through pointers that may be null.

use crate::errors::{INVALID_VALUE, Result, UNKNOWN};

/// Runs the body of an exported function; a panic becomes an error, since no panic may unwind into
/// C.
pub fn guard(name: &str, body: impl FnOnce() -> Result) -> u32 {
    // A thread of a locked process may restore and unlock it.
    let _inside = (!name.starts_with("cuCheckpoint")).then(crate::driver::checkpoint::enter);
    let body = || {
        crate::driver::context::error_of_call(name)?;
        body()
    };
    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)) {
        Ok(Ok(())) => 0,
        Ok(Err(e)) => {
            if crate::driver::config().trace {
                eprintln!("simgpu: {name} answers {}", e.0);
            }
            e.0
        }
        Err(_) => {
            eprintln!("simgpu: {name} panicked");
            UNKNOWN.0
        }
    }
}

/// Writes through a pointer; null is an error.
///
/// # Safety
/// `p` is null or points to a `T`.
pub unsafe fn out<T>(p: *mut T, value: T) -> Result {
    if p.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller vouches for `p`.
    unsafe { p.write_unaligned(value) };
    Ok(())
}

/// Writes through a pointer that may be null.
///
/// # Safety
/// As for [`out`].
pub unsafe fn out_opt<T>(p: *mut T, value: T) {
    if !p.is_null() {
        // SAFETY: the caller vouches for `p`.
        unsafe { p.write_unaligned(value) };
    }
}
