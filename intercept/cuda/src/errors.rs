//! Names and texts of errors, exactly the driver's, because programs print and compare them.

use std::ffi::CStr;

include!(concat!(env!("OUT_DIR"), "/errors.rs"));

/// Returns the name and the text of a `CUresult`.
pub fn find(status: i32) -> Option<(&'static CStr, &'static CStr)> {
    let at = ERRORS.binary_search_by_key(&status, |row| row.0).ok()?;
    Some((ERRORS[at].1, ERRORS[at].2))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_status_of_the_library_has_a_name() {
        use crate::status::*;
        assert!(ERRORS.is_sorted_by(|a, b| a.0 < b.0), "the search needs the order");
        for (status, name) in [
            (0, c"CUDA_SUCCESS"),
            (INVALID_VALUE, c"CUDA_ERROR_INVALID_VALUE"),
            (OUT_OF_MEMORY, c"CUDA_ERROR_OUT_OF_MEMORY"),
            (NOT_INITIALIZED, c"CUDA_ERROR_NOT_INITIALIZED"),
            (DEVICE_UNAVAILABLE, c"CUDA_ERROR_DEVICE_UNAVAILABLE"),
            (NO_DEVICE, c"CUDA_ERROR_NO_DEVICE"),
            (INVALID_DEVICE, c"CUDA_ERROR_INVALID_DEVICE"),
            (INVALID_IMAGE, c"CUDA_ERROR_INVALID_IMAGE"),
            (INVALID_CONTEXT, c"CUDA_ERROR_INVALID_CONTEXT"),
            (PEER_ACCESS_UNSUPPORTED, c"CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"),
            (UNSUPPORTED_EXEC_AFFINITY, c"CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY"),
            (FILE_NOT_FOUND, c"CUDA_ERROR_FILE_NOT_FOUND"),
            (INVALID_HANDLE, c"CUDA_ERROR_INVALID_HANDLE"),
            (ILLEGAL_STATE, c"CUDA_ERROR_ILLEGAL_STATE"),
            (NOT_FOUND, c"CUDA_ERROR_NOT_FOUND"),
            (LAUNCH_OUT_OF_RESOURCES, c"CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"),
            (HOST_MEMORY_ALREADY_REGISTERED, c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"),
            (HOST_MEMORY_NOT_REGISTERED, c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"),
            (NOT_PERMITTED, c"CUDA_ERROR_NOT_PERMITTED"),
            (NOT_SUPPORTED, c"CUDA_ERROR_NOT_SUPPORTED"),
            (SYSTEM_NOT_READY, c"CUDA_ERROR_SYSTEM_NOT_READY"),
            (STREAM_CAPTURE_UNSUPPORTED, c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"),
            (STREAM_CAPTURE_INVALIDATED, c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"),
            (STREAM_CAPTURE_UNMATCHED, c"CUDA_ERROR_STREAM_CAPTURE_UNMATCHED"),
            (STREAM_CAPTURE_ISOLATION, c"CUDA_ERROR_STREAM_CAPTURE_ISOLATION"),
            (STREAM_CAPTURE_IMPLICIT, c"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"),
            (CAPTURED_EVENT, c"CUDA_ERROR_CAPTURED_EVENT"),
            (STREAM_CAPTURE_WRONG_THREAD, c"CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD"),
            (UNKNOWN, c"CUDA_ERROR_UNKNOWN"),
        ] {
            assert_eq!(find(status).map(|(name, _)| name), Some(name));
        }
        assert_eq!(find(-1), None);
        assert_eq!(find(12_345), None);
    }
}
