//! Statuses of driver calls.

/// `CUresult`
pub type Status = i32;
/// Result of a driver call; an `Err` is never success.
pub type Result<T = ()> = std::result::Result<T, Status>;

pub const INVALID_VALUE: i32 = 1;
pub const OUT_OF_MEMORY: i32 = 2;
pub const NOT_INITIALIZED: i32 = 3;
pub const DEVICE_UNAVAILABLE: i32 = 46;
pub const NO_DEVICE: i32 = 100;
pub const INVALID_DEVICE: i32 = 101;
pub const INVALID_IMAGE: i32 = 200;
pub const NO_BINARY_FOR_GPU: i32 = 209;
pub const INVALID_CONTEXT: i32 = 201;
pub const CONTEXT_IS_DESTROYED: i32 = 709;
pub const MAP_FAILED: i32 = 205;
pub const FILE_NOT_FOUND: i32 = 301;
pub const OPERATING_SYSTEM: i32 = 304;
pub const INVALID_HANDLE: i32 = 400;
pub const LOSSY_QUERY: i32 = 402;
pub const NOT_FOUND: i32 = 500;
pub const PEER_ACCESS_UNSUPPORTED: i32 = 217;
pub const UNSUPPORTED_EXEC_AFFINITY: i32 = 224;
pub const LAUNCH_OUT_OF_RESOURCES: i32 = 701;
pub const HOST_MEMORY_ALREADY_REGISTERED: i32 = 712;
pub const HOST_MEMORY_NOT_REGISTERED: i32 = 713;
pub const NOT_READY: i32 = 600;
pub const NOT_PERMITTED: i32 = 800;
pub const TIMEOUT: i32 = 909;
pub const NOT_SUPPORTED: i32 = 801;
pub const SYSTEM_NOT_READY: i32 = 802;
pub const STREAM_CAPTURE_UNSUPPORTED: i32 = 900;
pub const STREAM_CAPTURE_INVALIDATED: i32 = 901;
pub const STREAM_CAPTURE_MERGE: i32 = 902;
pub const STREAM_CAPTURE_UNMATCHED: i32 = 903;
pub const STREAM_CAPTURE_ISOLATION: i32 = 905;
pub const STREAM_CAPTURE_IMPLICIT: i32 = 906;
pub const CAPTURED_EVENT: i32 = 907;
pub const STREAM_CAPTURE_WRONG_THREAD: i32 = 908;
pub const ILLEGAL_STATE: i32 = 401;
pub const UNKNOWN: i32 = 999;
