//! Values and texts of `nvmlReturn_t`.

use std::ffi::{CStr, c_char};

/// `nvmlReturn_t`; never success in an `Err`.
pub type Status = u32;
/// Result of a call.
pub type Result<T = ()> = std::result::Result<T, Status>;

macro_rules! statuses {
    ($($name:ident = $code:literal, $text:literal;)*) => {
        $(#[allow(dead_code)] pub const $name: Status = $code;)*

        /// See NVIDIA's documentation of the NVML call of this name.
        #[unsafe(no_mangle)]
        pub extern "C" fn nvmlErrorString(status: Status) -> *const c_char {
            let text: &CStr = match status {
                $($code => $text,)*
                _ => c"Unknown Error",
            };
            text.as_ptr()
        }
    };
}

statuses! {
    SUCCESS = 0, c"Success";
    UNINITIALIZED = 1, c"Uninitialized";
    INVALID_ARGUMENT = 2, c"Invalid Argument";
    NOT_SUPPORTED = 3, c"Not Supported";
    NO_PERMISSION = 4, c"Insufficient Permissions";
    ALREADY_INITIALIZED = 5, c"Already Initialized";
    NOT_FOUND = 6, c"Not Found";
    INSUFFICIENT_SIZE = 7, c"Insufficient Size";
    INSUFFICIENT_POWER = 8, c"Insufficient External Power";
    DRIVER_NOT_LOADED = 9, c"Driver Not Loaded";
    TIMEOUT = 10, c"Timeout";
    IRQ_ISSUE = 11, c"Interrupt Request Issue";
    LIBRARY_NOT_FOUND = 12, c"NVML Shared Library Not Found";
    FUNCTION_NOT_FOUND = 13, c"Function Not Found";
    CORRUPTED_INFOROM = 14, c"Corrupted infoROM";
    GPU_IS_LOST = 15, c"GPU is lost";
    RESET_REQUIRED = 16, c"GPU requires restart";
    OPERATING_SYSTEM = 17, c"The operating system has blocked the request.";
    LIB_RM_VERSION_MISMATCH = 18, c"RM has detected an NVML/RM version mismatch.";
    IN_USE = 19, c"In use by another client";
    MEMORY = 20, c"Insufficient Memory";
    NO_DATA = 21, c"No data";
    ARGUMENT_VERSION_MISMATCH = 25, c"Argument version mismatch";
    DEPRECATED = 26, c"Deprecated";
    NOT_READY = 27, c"System is not ready for the requested operation";
    GPU_NOT_FOUND = 28, c"No GPUs were found";
    INVALID_STATE = 29, c"Resource not in correct state to perform requested operation";
    UNKNOWN = 999, c"Unknown Error";
}
