//! `pam_gpusession.so`: PAM's C interface to the crate `gpusession-pam`, type `session` only.

use std::ffi::{CStr, CString};
use std::ptr::null_mut;

use gpusession_pam::{Options, Pam, Trouble, close, guard, open};
use libc::{c_char, c_int, c_void};

const PAM_SUCCESS: c_int = 0;
const PAM_IGNORE: c_int = 25;
const PAM_SERVICE: c_int = 1;
const PAM_USER: c_int = 2;
const PAM_TTY: c_int = 3;
const PAM_RHOST: c_int = 4;
/// Largest entry of the user database that is read, in bytes.
const MAX_ENTRY: usize = 1 << 20;

/// PAM's handle of a login.
#[repr(C)]
pub struct Handle {
    _opaque: [u8; 0],
}

// Declarations as in <security/pam_modules.h> and <security/pam_ext.h>.
unsafe extern "C" {
    fn pam_get_item(handle: *const Handle, item: c_int, value: *mut *const c_void) -> c_int;
    fn pam_getenv(handle: *mut Handle, name: *const c_char) -> *const c_char;
    fn pam_putenv(handle: *mut Handle, assignment: *const c_char) -> c_int;
    fn pam_syslog(handle: *const Handle, priority: c_int, format: *const c_char, ...);
}

/// A login; PAM owns the handle, which is valid during the call of an entry point.
struct Login(*mut Handle);

impl Login {
    fn item(&self, item: c_int) -> Option<String> {
        let mut value = std::ptr::null();
        // SAFETY: the handle is valid, and `value` outlives the call.
        let result = unsafe { pam_get_item(self.0, item, &raw mut value) };
        if result != PAM_SUCCESS || value.is_null() {
            return None;
        }
        // SAFETY: the items in use are strings, which PAM keeps until a caller sets them again.
        // This function copies them before that.
        let text = unsafe { CStr::from_ptr(value.cast()) };
        text.to_str().ok().map(str::to_owned)
    }

    fn log(&self, Trouble { what, errno }: Trouble) {
        if let Ok(what) = CString::new(what) {
            let format = c"login session not bound, or without variables: %s (errno %d)";
            // SAFETY: the handle is valid, and the format takes a string and a number.
            unsafe { pam_syslog(self.0, libc::LOG_INFO, format.as_ptr(), what.as_ptr(), errno) };
        }
    }
}

impl Pam for Login {
    fn service(&self) -> Option<String> {
        self.item(PAM_SERVICE)
    }

    fn user(&self) -> Option<String> {
        self.item(PAM_USER)
    }

    fn tty(&self) -> Option<String> {
        self.item(PAM_TTY)
    }

    fn rhost(&self) -> Option<String> {
        self.item(PAM_RHOST)
    }

    fn uid_of(&self, user: &str) -> Option<u32> {
        let user = CString::new(user).ok()?;
        let mut buffer: Vec<c_char> = vec![0; 4096];
        loop {
            // SAFETY: all-zero bytes are a valid passwd: numbers, and pointers that are null.
            let mut entry: libc::passwd = unsafe { std::mem::zeroed() };
            let mut found = null_mut();
            // SAFETY: all pointers are to memory that outlives the call; the length is `buffer`'s.
            let result = unsafe {
                libc::getpwnam_r(
                    user.as_ptr(),
                    &raw mut entry,
                    buffer.as_mut_ptr(),
                    buffer.len(),
                    &raw mut found,
                )
            };
            match result {
                libc::ERANGE if buffer.len() < MAX_ENTRY => buffer.resize(buffer.len() * 4, 0),
                0 if !found.is_null() => return Some(entry.pw_uid),
                _ => return None,
            }
        }
    }

    fn is_set(&self, name: &str, value: &str) -> bool {
        self.in_list(name) || std::env::var_os(name).is_some_and(|set| set != value)
    }

    fn in_list(&self, name: &str) -> bool {
        let Ok(name) = CString::new(name) else { return false };
        // SAFETY: the handle is valid and the name a string; the answer is only compared with null.
        !unsafe { pam_getenv(self.0, name.as_ptr()) }.is_null()
    }

    fn put(&mut self, name: &str, value: &str) -> bool {
        let Ok(assignment) = CString::new(format!("{name}={value}")) else { return false };
        // SAFETY: the handle is valid; PAM copies the string.
        unsafe { pam_putenv(self.0, assignment.as_ptr()) == PAM_SUCCESS }
    }
}

/// Parses the module's arguments.
///
/// # Safety
/// `argv` points to `argc` strings, as PAM promises.
unsafe fn options(argc: c_int, argv: *const *const c_char) -> Options {
    let count = if argv.is_null() { 0 } else { usize::try_from(argc).unwrap_or(0) };
    // SAFETY: by the caller's promise; a null `argv` is not dereferenced, since the count is 0.
    let arguments = (0..count).filter_map(|i| unsafe {
        let argument = *argv.add(i);
        if argument.is_null() { None } else { CStr::from_ptr(argument).to_str().ok() }
    });
    Options::parse(arguments)
}

fn result(login: &Login, options: &Options, result: Result<bool, Trouble>) -> c_int {
    match result {
        Ok(true) => PAM_SUCCESS,
        Ok(false) => PAM_IGNORE,
        Err(trouble) => {
            if options.debug {
                login.log(trouble);
            }
            PAM_IGNORE
        }
    }
}

/// Entry point of PAM for the start of a login session.
///
/// # Safety
/// As PAM calls it: `handle` is the login's, and `argv` has `argc` strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pam_sm_open_session(
    handle: *mut Handle,
    _flags: c_int,
    argc: c_int,
    argv: *const *const c_char,
) -> c_int {
    let entry = || {
        // SAFETY: PAM passes the two together.
        let options = unsafe { options(argc, argv) };
        let mut login = Login(handle);
        let opened = open(&mut login, &options);
        result(&login, &options, opened)
    };
    guard(entry, PAM_IGNORE)
}

/// Entry point of PAM for the end of a login session.
///
/// # Safety
/// As PAM calls it: `handle` is the login's, and `argv` has `argc` strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pam_sm_close_session(
    handle: *mut Handle,
    _flags: c_int,
    argc: c_int,
    argv: *const *const c_char,
) -> c_int {
    let entry = || {
        // SAFETY: PAM passes the two together.
        let options = unsafe { options(argc, argv) };
        let login = Login(handle);
        result(&login, &options, close(&login, &options))
    };
    guard(entry, PAM_IGNORE)
}
