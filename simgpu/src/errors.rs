//! Results of driver calls: codes, names and NVIDIA's texts.

use std::ffi::CStr;

/// A `CUresult` that is not success.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Error(pub u32);

pub type Result<T = ()> = std::result::Result<T, Error>;

pub const INVALID_VALUE: Error = Error(1);
pub const OUT_OF_MEMORY: Error = Error(2);
pub const NOT_INITIALIZED: Error = Error(3);
pub const DEINITIALIZED: Error = Error(4);
pub const PROFILER_DISABLED: Error = Error(5);
pub const PROFILER_NOT_INITIALIZED: Error = Error(6);
pub const PROFILER_ALREADY_STARTED: Error = Error(7);
pub const PROFILER_ALREADY_STOPPED: Error = Error(8);
pub const STUB_LIBRARY: Error = Error(34);
pub const CALL_REQUIRES_NEWER_DRIVER: Error = Error(36);
pub const DEVICE_UNAVAILABLE: Error = Error(46);
pub const MULTICAST_RESOURCE_FULL: Error = Error(47);
pub const NO_DEVICE: Error = Error(100);
pub const INVALID_DEVICE: Error = Error(101);
pub const DEVICE_NOT_LICENSED: Error = Error(102);
pub const INVALID_IMAGE: Error = Error(200);
pub const INVALID_CONTEXT: Error = Error(201);
pub const CONTEXT_ALREADY_CURRENT: Error = Error(202);
pub const MAP_FAILED: Error = Error(205);
pub const UNMAP_FAILED: Error = Error(206);
pub const ARRAY_IS_MAPPED: Error = Error(207);
pub const ALREADY_MAPPED: Error = Error(208);
pub const NO_BINARY_FOR_GPU: Error = Error(209);
pub const ALREADY_ACQUIRED: Error = Error(210);
pub const NOT_MAPPED: Error = Error(211);
pub const NOT_MAPPED_AS_ARRAY: Error = Error(212);
pub const NOT_MAPPED_AS_POINTER: Error = Error(213);
pub const ECC_UNCORRECTABLE: Error = Error(214);
pub const UNSUPPORTED_LIMIT: Error = Error(215);
pub const CONTEXT_ALREADY_IN_USE: Error = Error(216);
pub const PEER_ACCESS_UNSUPPORTED: Error = Error(217);
pub const INVALID_PTX: Error = Error(218);
pub const INVALID_GRAPHICS_CONTEXT: Error = Error(219);
pub const NVLINK_UNCORRECTABLE: Error = Error(220);
pub const JIT_COMPILER_NOT_FOUND: Error = Error(221);
pub const UNSUPPORTED_PTX_VERSION: Error = Error(222);
pub const JIT_COMPILATION_DISABLED: Error = Error(223);
pub const UNSUPPORTED_EXEC_AFFINITY: Error = Error(224);
pub const UNSUPPORTED_DEVSIDE_SYNC: Error = Error(225);
pub const CONTAINED: Error = Error(226);
pub const INSUFFICIENT_LOADER_VERSION: Error = Error(227);
pub const INVALID_SOURCE: Error = Error(300);
pub const FILE_NOT_FOUND: Error = Error(301);
pub const SHARED_OBJECT_SYMBOL_NOT_FOUND: Error = Error(302);
pub const SHARED_OBJECT_INIT_FAILED: Error = Error(303);
pub const OPERATING_SYSTEM: Error = Error(304);
pub const INVALID_HANDLE: Error = Error(400);
pub const ILLEGAL_STATE: Error = Error(401);
pub const LOSSY_QUERY: Error = Error(402);
pub const NOT_FOUND: Error = Error(500);
pub const NOT_READY: Error = Error(600);
pub const ILLEGAL_ADDRESS: Error = Error(700);
pub const LAUNCH_OUT_OF_RESOURCES: Error = Error(701);
pub const LAUNCH_TIMEOUT: Error = Error(702);
pub const LAUNCH_INCOMPATIBLE_TEXTURING: Error = Error(703);
pub const PEER_ACCESS_ALREADY_ENABLED: Error = Error(704);
pub const PEER_ACCESS_NOT_ENABLED: Error = Error(705);
pub const PRIMARY_CONTEXT_ACTIVE: Error = Error(708);
pub const CONTEXT_IS_DESTROYED: Error = Error(709);
pub const ASSERT: Error = Error(710);
pub const TOO_MANY_PEERS: Error = Error(711);
pub const HOST_MEMORY_ALREADY_REGISTERED: Error = Error(712);
pub const HOST_MEMORY_NOT_REGISTERED: Error = Error(713);
pub const HARDWARE_STACK_ERROR: Error = Error(714);
pub const ILLEGAL_INSTRUCTION: Error = Error(715);
pub const MISALIGNED_ADDRESS: Error = Error(716);
pub const INVALID_ADDRESS_SPACE: Error = Error(717);
pub const INVALID_PC: Error = Error(718);
pub const LAUNCH_FAILED: Error = Error(719);
pub const COOPERATIVE_LAUNCH_TOO_LARGE: Error = Error(720);
pub const TENSOR_MEMORY_LEAK: Error = Error(721);
pub const NOT_PERMITTED: Error = Error(800);
pub const NOT_SUPPORTED: Error = Error(801);
pub const SYSTEM_NOT_READY: Error = Error(802);
pub const SYSTEM_DRIVER_MISMATCH: Error = Error(803);
pub const COMPAT_NOT_SUPPORTED_ON_DEVICE: Error = Error(804);
pub const MPS_CONNECTION_FAILED: Error = Error(805);
pub const MPS_RPC_FAILURE: Error = Error(806);
pub const MPS_SERVER_NOT_READY: Error = Error(807);
pub const MPS_MAX_CLIENTS_REACHED: Error = Error(808);
pub const MPS_MAX_CONNECTIONS_REACHED: Error = Error(809);
pub const MPS_CLIENT_TERMINATED: Error = Error(810);
pub const CDP_NOT_SUPPORTED: Error = Error(811);
pub const CDP_VERSION_MISMATCH: Error = Error(812);
pub const STREAM_CAPTURE_UNSUPPORTED: Error = Error(900);
pub const STREAM_CAPTURE_INVALIDATED: Error = Error(901);
pub const STREAM_CAPTURE_MERGE: Error = Error(902);
pub const STREAM_CAPTURE_UNMATCHED: Error = Error(903);
pub const STREAM_CAPTURE_UNJOINED: Error = Error(904);
pub const STREAM_CAPTURE_ISOLATION: Error = Error(905);
pub const STREAM_CAPTURE_IMPLICIT: Error = Error(906);
pub const CAPTURED_EVENT: Error = Error(907);
pub const STREAM_CAPTURE_WRONG_THREAD: Error = Error(908);
pub const TIMEOUT: Error = Error(909);
pub const GRAPH_EXEC_UPDATE_FAILURE: Error = Error(910);
pub const EXTERNAL_DEVICE: Error = Error(911);
pub const INVALID_CLUSTER_SIZE: Error = Error(912);
pub const FUNCTION_NOT_LOADED: Error = Error(913);
pub const INVALID_RESOURCE_TYPE: Error = Error(914);
pub const INVALID_RESOURCE_CONFIGURATION: Error = Error(915);
pub const KEY_ROTATION: Error = Error(916);
pub const STREAM_DETACHED: Error = Error(917);
pub const GRAPH_RECAPTURE_FAILURE: Error = Error(918);
pub const FABRIC_NOT_READY: Error = Error(919);
pub const UNKNOWN: Error = Error(999);

include!(concat!(env!("OUT_DIR"), "/errors.rs"));

fn find(code: u32) -> Option<&'static (i32, &'static CStr, &'static CStr)> {
    ERRORS.binary_search_by_key(&i64::from(code), |row| i64::from(row.0)).ok().map(|i| &ERRORS[i])
}

/// Returns the name of a code, `CUDA_ERROR_...`.
pub fn name(code: u32) -> Option<&'static CStr> {
    find(code).map(|row| row.1)
}

/// Returns the driver's text for a code.
pub fn text(code: u32) -> Option<&'static CStr> {
    find(code).map(|row| row.2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_sorted_and_named() {
        assert!(ERRORS.windows(2).all(|w| w[0].0 < w[1].0));
        assert_eq!(name(700).unwrap(), c"CUDA_ERROR_ILLEGAL_ADDRESS");
        assert_eq!(text(0).unwrap(), c"no error");
        assert!(name(12345).is_none());
    }
}
