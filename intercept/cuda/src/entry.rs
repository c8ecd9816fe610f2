//! The edge to C: exported functions, their errors, and pointers of the program.

use std::panic::{AssertUnwindSafe, catch_unwind};

use gpusession_link::link::Begun;
use gpusession_proto::frame::op;
use gpusession_proto::status::is_sticky;

use crate::{clients, core_dumps, faulted, run_ahead, trace};

/// Statuses, for the bodies of exported functions.
pub use crate::status::*;

/// Runs a call's body, and turns a panic into `CUDA_ERROR_UNKNOWN`.
#[inline]
pub fn guard(name: &'static str, body: impl FnOnce() -> Result) -> Status {
    let body = || {
        if run_ahead::due() {
            run_ahead::mark(mark);
        }
        faulted::check(name)?;
        body()
    };
    let status = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => return 0,
        Ok(Err(status)) => status,
        Err(_) => UNKNOWN,
    };
    trace::failed(name, status);
    if is_sticky(status) {
        core_dumps::wait();
    }
    status
}

/// Waits for the calling thread's last mark in a client's log, and returns a new one.
fn mark(client: u8, last: Option<Begun>) -> Option<Begun> {
    let client = clients::by_number(client)?;
    // An error needs no report: the call that follows finds the connection lost, too.
    if let Some(last) = last {
        let _ = client.finish_mark(last);
    }
    client.link.begin_call(op::MARK, client.caller(), |_| {}).ok()
}

/// Defines exported driver functions.
///
/// `/ TWIN [MODE]` also defines the variant for per-thread default streams; MODE tells the body
/// which of the two runs.
macro_rules! driver {
    () => {};
    ($(#[$doc:meta])* fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $body:block $($rest:tt)*) => {
        $(#[$doc])*
        /// # Safety
        /// As the CUDA driver API documents for this call.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $ty),*) -> i32 {
            crate::entry::guard(stringify!($name), || $body)
        }
        driver!($($rest)*);
    };
    ($(#[$doc:meta])* fn $name:ident / $twin:ident [$mode:ident] ($($arg:ident: $ty:ty),* $(,)?) $body:block $($rest:tt)*) => {
        $(#[$doc])*
        /// # Safety
        /// As the CUDA driver API documents for this call.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $ty),*) -> i32 {
            let $mode = crate::streams::Default::Legacy;
            crate::entry::guard(stringify!($name), || $body)
        }
        $(#[$doc])*
        /// # Safety
        /// As the CUDA driver API documents for this call.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $twin($($arg: $ty),*) -> i32 {
            let $mode = crate::streams::Default::PerThread;
            crate::entry::guard(stringify!($name), || $body)
        }
        driver!($($rest)*);
    };
}
pub(crate) use driver;

/// Exports older names of a call with the same prototype.
macro_rules! alias {
    ($($old:ident = $new:ident($($arg:ident: $ty:ty),* $(,)?);)*) => { $(
        /// # Safety
        /// As the CUDA driver API documents for this call.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $old($($arg: $ty),*) -> i32 {
            // SAFETY: both functions have the same prototype and the same contract, which the
            // caller keeps.
            unsafe { $new($($arg),*) }
        }
    )* };
}
pub(crate) use alias;

/// Writes an answer through the program's pointer; a null pointer is an error.
#[inline]
pub fn give<T>(target: *mut T, value: T) -> Result {
    if target.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: by the contract of every driver call, a pointer for an answer is null, which was
    // checked, or valid for its type.
    unsafe { target.write_unaligned(value) };
    Ok(())
}

/// Writes an answer as [`give`] does, unless the pointer is null.
#[inline]
pub fn give_optional<T>(target: *mut T, value: T) {
    if !target.is_null() {
        // SAFETY: the pointer is not null, so by the call's contract it is valid for its type.
        unsafe { target.write_unaligned(value) };
    }
}

/// Reads a structure behind a pointer of the program.
#[inline]
pub fn take<T: Copy>(source: *const T) -> Result<T> {
    if source.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: by the contract of every driver call, a pointer to an argument is null, which was
    // checked, or valid for its type.
    Ok(unsafe { source.read_unaligned() })
}

/// Returns the `len` bytes behind a pointer of the program.
#[inline]
pub fn bytes<'a>(source: *const std::ffi::c_void, len: usize) -> Result<&'a [u8]> {
    if len == 0 {
        return Ok(&[]);
    }
    if source.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the pointer is not null, so by the call's contract the array is as long as its count
    // says.
    Ok(unsafe { std::slice::from_raw_parts(source.cast(), len) })
}

/// Returns the C string behind a pointer of the program.
pub fn name<'a>(source: *const std::ffi::c_char) -> Result<&'a std::ffi::CStr> {
    if source.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the pointer is not null, so by the call's contract the string ends in a zero byte.
    Ok(unsafe { std::ffi::CStr::from_ptr(source) })
}

/// Copies text into a buffer of the program, cut to fit with its terminator.
pub fn give_text(target: *mut std::ffi::c_char, len: i32, text: &[u8]) -> Result {
    if target.is_null() || len <= 0 {
        return Err(INVALID_VALUE);
    }
    let n = text.len().min(len as usize - 1);
    // SAFETY: by the call's contract the buffer has `len` bytes, and text and terminator fit into
    // them.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr().cast(), target, n);
        *target.add(n) = 0;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panic_becomes_a_status_before_it_reaches_c() {
        assert_eq!(guard("cuTest", || std::panic::resume_unwind(Box::new(()))), UNKNOWN);
        assert_eq!(guard("cuTest", || Err(NOT_FOUND)), NOT_FOUND);
        assert_eq!(guard("cuTest", || Ok(())), 0);
    }

    #[test]
    fn pointers_may_have_any_alignment_and_be_null_by_mistake() {
        let mut bytes = [0u8; 16];
        // SAFETY: four bytes from the second one lie in the array.
        let odd = unsafe { bytes.as_mut_ptr().add(1) }.cast::<u32>();
        assert_eq!(give(odd, 0x0403_0201), Ok(()));
        assert_eq!(take(odd), Ok(0x0403_0201));
        assert_eq!(bytes[..6], [0, 1, 2, 3, 4, 0]);
        assert_eq!(give(std::ptr::null_mut(), 1), Err(INVALID_VALUE));
        assert_eq!(take(std::ptr::null::<u32>()), Err(INVALID_VALUE));
        give_optional(std::ptr::null_mut(), 1);
        assert_eq!(name(std::ptr::null()), Err(INVALID_VALUE));
    }

    #[test]
    fn empty_array_may_be_null() {
        assert_eq!(super::bytes(std::ptr::null(), 0), Ok(&[][..]));
        assert_eq!(super::bytes(std::ptr::null(), 1), Err(INVALID_VALUE));
    }

    #[test]
    fn text_fits_its_buffer_with_a_terminator() {
        let given = |len: i32| {
            let mut buffer = [0x7f_u8; 8];
            give_text(buffer.as_mut_ptr().cast(), len, b"text").map(|()| buffer)
        };
        assert_eq!(given(8), Ok(*b"text\0\x7f\x7f\x7f"));
        assert_eq!(given(5), Ok(*b"text\0\x7f\x7f\x7f"));
        assert_eq!(given(3), Ok(*b"te\0\x7f\x7f\x7f\x7f\x7f"), "cut to fit");
        assert_eq!(given(1), Ok(*b"\0\x7f\x7f\x7f\x7f\x7f\x7f\x7f"));
        for len in [0, -1] {
            assert_eq!(given(len), Err(INVALID_VALUE));
        }
    }
}
