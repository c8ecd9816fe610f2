//! The CUDA driver library: NVIDIA's or the simulated one, as the supervisor names it.
#![expect(clippy::disallowed_methods, reason = "a driver that starts is polled")]

use std::ffi::{CStr, c_char, c_void};
use std::path::Path;
use std::time::{Duration, Instant};

use gpusession_proto::status::is_sticky;
use libloading::Library;

/// `CUresult`.
pub type Status = i32;
/// An opaque handle of the driver.
pub type Handle = *mut c_void;
/// A device address of the driver, which is the client's address, too.
pub type Address = u64;
/// `CUhostFn`
pub type HostFunction = extern "C" fn(*mut c_void);
/// `CUstreamCallback`
pub type StreamCallback = extern "C" fn(Handle, Status, *mut c_void);

/// `CUresult` values that the worker itself returns.
pub mod status {
    #![allow(missing_docs)]
    pub const INVALID_VALUE: i32 = 1;
    pub const OUT_OF_MEMORY: i32 = 2;
    pub const INVALID_IMAGE: i32 = 200;
    pub const OPERATING_SYSTEM: i32 = 304;
    pub const UNKNOWN: i32 = 999;
    pub const NOT_READY: i32 = 600;
    pub const INVALID_HANDLE: i32 = 400;
    pub const NOT_SUPPORTED: i32 = 801;
    pub const NOT_PERMITTED: i32 = 800;
    pub const TIMEOUT: i32 = 909;
    pub const MPS_SERVER_NOT_READY: i32 = 807;
}

/// Symbol that our own libraries export, so that a worker never forwards calls to itself.
pub const MARKER: &[u8] = b"gpusession_marker\0";

/// `CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP`: for all contexts, by its device
/// address.
pub const REGISTER_MAPPED: u32 = 1 | 2;

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`
pub const POSIX_FD: i32 = 1;

/// Returns `Ok` for success.
pub fn check(status: Status) -> Result<(), Status> {
    if status == 0 { Ok(()) } else { Err(status) }
}

/// Accepts the error of a fault, which ends no lane: the frames of its copies return it.
pub fn unless_broken(done: Result<(), Status>) -> Result<(), Status> {
    done.or_else(|status| if is_sticky(status) { Ok(()) } else { Err(status) })
}

/// Longest wait for an MPS server that starts or ends another client's work.
const MPS_START_TIMEOUT: Duration = Duration::from_secs(8);

/// Repeats a call that connects to an MPS server while that server is not ready.
pub fn check_connected(mut call: impl FnMut() -> Status) -> Result<(), Status> {
    let begun = Instant::now();
    loop {
        match call() {
            status::MPS_SERVER_NOT_READY if begun.elapsed() < MPS_START_TIMEOUT => {
                std::thread::sleep(Duration::from_millis(50));
            }
            status => return check(status),
        }
    }
}

unsafe extern "C" fn missing() -> Status {
    status::NOT_SUPPORTED
}

/// Source of the driver's functions.
pub trait Symbols {
    /// Returns the address of the C function of this name.
    fn find(&self, name: &CStr) -> Option<*const c_void>;
}

impl Symbols for Library {
    fn find(&self, name: &CStr) -> Option<*const c_void> {
        // SAFETY: takes only the symbol's address.
        unsafe { self.get::<*const c_void>(name.to_bytes_with_nul()) }.ok().map(|symbol| *symbol)
    }
}

/// Finds a function, or a substitute that returns NOT_SUPPORTED.
///
/// # Safety
/// `T` is the type of the C function of that name, which stays loaded.
pub unsafe fn function<T: Copy>(symbols: &impl Symbols, name: &CStr) -> T {
    const { assert!(size_of::<T>() == size_of::<*const c_void>()) };
    let missing: unsafe extern "C" fn() -> Status = missing;
    let address = symbols.find(name).unwrap_or(missing as *const c_void);
    // SAFETY: the caller vouches for the type. Callers of a C function clean up the arguments, so
    // the substitute, which ignores them and returns the same type, may be called with any.
    unsafe { std::mem::transmute_copy(&address) }
}

/// Functions of the driver, as `proto/calls/calls.txt` has them (see `build.rs`).
#[expect(clippy::too_many_lines, reason = "generated")]
mod functions {
    use super::{Address, Handle, HostFunction, Status, StreamCallback, Symbols, c_char, c_void, function};

    include!(concat!(env!("OUT_DIR"), "/functions.rs"));
}
pub use functions::{Called, Replayed};

/// A loaded driver library.
pub struct Driver {
    /// Functions that hand-written code calls.
    pub call: Called,
    /// Functions that generated code calls.
    pub generated: Replayed,
}

impl Driver {
    /// Loads the driver from an absolute path.
    pub fn load(path: &Path) -> Result<&'static Self, String> {
        if !path.is_absolute() {
            return Err(format!("driver {}: the path must be absolute", path.display()));
        }
        // SAFETY: loading runs the library's initialisers; the administrator named a CUDA driver.
        let library = unsafe { Library::new(path) }.map_err(|e| format!("driver {}: {e}", path.display()))?;
        // SAFETY: reads only whether the symbol is present.
        if unsafe { library.get::<*const c_void>(MARKER) }.is_ok() {
            return Err(format!(
                "driver {}: it is gpusession's own client library; name the GPU's driver",
                path.display()
            ));
        }
        // The driver's threads live as long as the process, so the library is never unloaded.
        // SAFETY: a CUDA driver library has cuda.h's functions.
        Ok(unsafe { Self::of(Box::leak(Box::new(library))) })
    }

    /// Takes the functions of a driver from their source.
    ///
    /// # Safety
    /// The symbols are functions of cuda.h, which stay loaded.
    pub unsafe fn of(symbols: &impl Symbols) -> &'static Self {
        // SAFETY: the caller vouches for the symbols.
        let (call, generated) = unsafe { (Called::load(symbols), Replayed::load(symbols)) };
        Box::leak(Box::new(Self { call, generated }))
    }
}

#[cfg(test)]
pub mod fake;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn function_that_a_driver_lacks_is_not_supported() {
        let driver = fake::driver();
        let mut handle = std::ptr::null_mut();
        // SAFETY: the substitute ignores its arguments.
        let created = unsafe { (driver.call.cuGraphCreate)(&mut handle, 0) };
        assert_eq!(created, status::NOT_SUPPORTED);
    }

    #[test]
    fn worker_loads_only_a_drivers_absolute_path() {
        let refused = |path: &str| Driver::load(Path::new(path)).err().unwrap();
        assert!(refused("libcuda.so.1").contains("must be absolute"));
        assert!(refused("/nonexistent/libcuda.so.1").contains("/nonexistent"));
    }

    #[test]
    fn connection_waits_for_an_mps_server_that_starts() {
        let mut answers = [status::MPS_SERVER_NOT_READY, status::MPS_SERVER_NOT_READY, 0].into_iter();
        assert_eq!(check_connected(|| answers.next().unwrap()), Ok(()));
        let mut answers = [status::MPS_SERVER_NOT_READY, status::OUT_OF_MEMORY].into_iter();
        assert_eq!(check_connected(|| answers.next().unwrap()), Err(status::OUT_OF_MEMORY));
    }
}
