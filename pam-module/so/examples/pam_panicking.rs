//! The module with a bug, which must not harm the login program.

use std::ffi::{c_char, c_int, c_void};

const PAM_IGNORE: c_int = 25;

/// Panics inside the guard of the real module.
#[unsafe(no_mangle)]
pub extern "C" fn pam_sm_open_session(_: *mut c_void, _: c_int, _: c_int, _: *const *const c_char) -> c_int {
    gpusession_pam::guard(|| panic!("a bug"), PAM_IGNORE)
}

/// Panics inside the guard of the real module, with a value of its own.
#[unsafe(no_mangle)]
pub extern "C" fn pam_sm_close_session(_: *mut c_void, _: c_int, _: c_int, _: *const *const c_char) -> c_int {
    gpusession_pam::guard(|| std::panic::panic_any(7), PAM_IGNORE)
}
