//! Results of driver calls: codes, names and the driver's own words for them.

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

/// Code, name and text, sorted by code.
static TABLE: &[(u32, &CStr, &CStr)] = &[
    (0, c"CUDA_SUCCESS", c"no error"),
    (1, c"CUDA_ERROR_INVALID_VALUE", c"invalid argument"),
    (2, c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory"),
    (3, c"CUDA_ERROR_NOT_INITIALIZED", c"initialization error"),
    (4, c"CUDA_ERROR_DEINITIALIZED", c"driver shutting down"),
    (5, c"CUDA_ERROR_PROFILER_DISABLED", c"profiler disabled while using external profiling tool"),
    (6, c"CUDA_ERROR_PROFILER_NOT_INITIALIZED", c"profiler not initialized: call cudaProfilerInitialize()"),
    (7, c"CUDA_ERROR_PROFILER_ALREADY_STARTED", c"profiler already started"),
    (8, c"CUDA_ERROR_PROFILER_ALREADY_STOPPED", c"profiler already stopped"),
    (34, c"CUDA_ERROR_STUB_LIBRARY", c"CUDA driver is a stub library"),
    (36, c"CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER", c"API call is not supported in the installed CUDA driver"),
    (46, c"CUDA_ERROR_DEVICE_UNAVAILABLE", c"CUDA-capable device(s) is/are busy or unavailable"),
    (47, c"CUDA_ERROR_MULTICAST_RESOURCE_FULL", c"CUDA_ERROR_MULTICAST_RESOURCE_FULL"),
    (100, c"CUDA_ERROR_NO_DEVICE", c"no CUDA-capable device is detected"),
    (101, c"CUDA_ERROR_INVALID_DEVICE", c"invalid device ordinal"),
    (102, c"CUDA_ERROR_DEVICE_NOT_LICENSED", c"device doesn't have valid Grid license"),
    (200, c"CUDA_ERROR_INVALID_IMAGE", c"device kernel image is invalid"),
    (201, c"CUDA_ERROR_INVALID_CONTEXT", c"invalid device context"),
    (202, c"CUDA_ERROR_CONTEXT_ALREADY_CURRENT", c"CUDA_ERROR_CONTEXT_ALREADY_CURRENT"),
    (205, c"CUDA_ERROR_MAP_FAILED", c"mapping of buffer object failed"),
    (206, c"CUDA_ERROR_UNMAP_FAILED", c"unmapping of buffer object failed"),
    (207, c"CUDA_ERROR_ARRAY_IS_MAPPED", c"array is mapped"),
    (208, c"CUDA_ERROR_ALREADY_MAPPED", c"resource already mapped"),
    (209, c"CUDA_ERROR_NO_BINARY_FOR_GPU", c"no kernel image is available for execution on the device"),
    (210, c"CUDA_ERROR_ALREADY_ACQUIRED", c"resource already acquired"),
    (211, c"CUDA_ERROR_NOT_MAPPED", c"resource not mapped"),
    (212, c"CUDA_ERROR_NOT_MAPPED_AS_ARRAY", c"resource not mapped as array"),
    (213, c"CUDA_ERROR_NOT_MAPPED_AS_POINTER", c"resource not mapped as pointer"),
    (214, c"CUDA_ERROR_ECC_UNCORRECTABLE", c"uncorrectable ECC error encountered"),
    (215, c"CUDA_ERROR_UNSUPPORTED_LIMIT", c"limit is not supported on this architecture"),
    (216, c"CUDA_ERROR_CONTEXT_ALREADY_IN_USE", c"exclusive-thread device already in use by a different thread"),
    (217, c"CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", c"peer access is not supported between these two devices"),
    (218, c"CUDA_ERROR_INVALID_PTX", c"a PTX JIT compilation failed"),
    (219, c"CUDA_ERROR_INVALID_GRAPHICS_CONTEXT", c"invalid OpenGL or DirectX context"),
    (220, c"CUDA_ERROR_NVLINK_UNCORRECTABLE", c"uncorrectable NVLink error detected during the execution"),
    (221, c"CUDA_ERROR_JIT_COMPILER_NOT_FOUND", c"PTX JIT compiler library not found"),
    (222, c"CUDA_ERROR_UNSUPPORTED_PTX_VERSION", c"the provided PTX was compiled with an unsupported toolchain."),
    (223, c"CUDA_ERROR_JIT_COMPILATION_DISABLED", c"PTX JIT compilation was disabled"),
    (224, c"CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY", c"the provided execution affinity is not supported"),
    (225, c"CUDA_ERROR_UNSUPPORTED_DEVSIDE_SYNC", c"the provided PTX contains unsupported call to cudaDeviceSynchronize"),
    (226, c"CUDA_ERROR_CONTAINED", c"Invalid access of peer GPU memory over nvlink or a hardware error"),
    (227, c"CUDA_ERROR_INSUFFICIENT_LOADER_VERSION", c"Loader version is insufficient for fatbin"),
    (300, c"CUDA_ERROR_INVALID_SOURCE", c"device kernel image is invalid"),
    (301, c"CUDA_ERROR_FILE_NOT_FOUND", c"file not found"),
    (302, c"CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND", c"shared object symbol not found"),
    (303, c"CUDA_ERROR_SHARED_OBJECT_INIT_FAILED", c"shared object initialization failed"),
    (304, c"CUDA_ERROR_OPERATING_SYSTEM", c"OS call failed or operation not supported on this OS"),
    (400, c"CUDA_ERROR_INVALID_HANDLE", c"invalid resource handle"),
    (401, c"CUDA_ERROR_ILLEGAL_STATE", c"the operation cannot be performed in the present state"),
    (402, c"CUDA_ERROR_LOSSY_QUERY", c"attempted introspection would be semantically lossy"),
    (500, c"CUDA_ERROR_NOT_FOUND", c"named symbol not found"),
    (600, c"CUDA_ERROR_NOT_READY", c"device not ready"),
    (700, c"CUDA_ERROR_ILLEGAL_ADDRESS", c"an illegal memory access was encountered"),
    (701, c"CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", c"too many resources requested for launch"),
    (702, c"CUDA_ERROR_LAUNCH_TIMEOUT", c"the launch timed out and was terminated"),
    (703, c"CUDA_ERROR_LAUNCH_INCOMPATIBLE_TEXTURING", c"launch uses incompatible texturing mode"),
    (704, c"CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", c"peer access is already enabled"),
    (705, c"CUDA_ERROR_PEER_ACCESS_NOT_ENABLED", c"peer access has not been enabled"),
    (708, c"CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE", c"cannot set while device is active in this process"),
    (709, c"CUDA_ERROR_CONTEXT_IS_DESTROYED", c"context is destroyed"),
    (710, c"CUDA_ERROR_ASSERT", c"device-side assert triggered"),
    (711, c"CUDA_ERROR_TOO_MANY_PEERS", c"peer mapping resources exhausted"),
    (712, c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", c"part or all of the requested memory range is already mapped"),
    (713, c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", c"pointer does not correspond to a registered memory region"),
    (714, c"CUDA_ERROR_HARDWARE_STACK_ERROR", c"hardware stack error"),
    (715, c"CUDA_ERROR_ILLEGAL_INSTRUCTION", c"an illegal instruction was encountered"),
    (716, c"CUDA_ERROR_MISALIGNED_ADDRESS", c"misaligned address"),
    (717, c"CUDA_ERROR_INVALID_ADDRESS_SPACE", c"operation not supported on global/shared address space"),
    (718, c"CUDA_ERROR_INVALID_PC", c"invalid program counter"),
    (719, c"CUDA_ERROR_LAUNCH_FAILED", c"unspecified launch failure"),
    (720, c"CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE", c"too many blocks in cooperative launch"),
    (721, c"CUDA_ERROR_TENSOR_MEMORY_LEAK", c"tensor memory not completely freed"),
    (800, c"CUDA_ERROR_NOT_PERMITTED", c"operation not permitted"),
    (801, c"CUDA_ERROR_NOT_SUPPORTED", c"operation not supported"),
    (802, c"CUDA_ERROR_SYSTEM_NOT_READY", c"system not yet initialized"),
    (803, c"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", c"system has unsupported display driver / cuda driver combination"),
    (804, c"CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE", c"forward compatibility was attempted on non supported HW"),
    (805, c"CUDA_ERROR_MPS_CONNECTION_FAILED", c"MPS client failed to connect to the MPS control daemon or the MPS server"),
    (806, c"CUDA_ERROR_MPS_RPC_FAILURE", c"the remote procedural call between the MPS server and the MPS client failed"),
    (807, c"CUDA_ERROR_MPS_SERVER_NOT_READY", c"MPS server is not ready to accept new MPS client requests"),
    (808, c"CUDA_ERROR_MPS_MAX_CLIENTS_REACHED", c"the hardware resources required to create MPS client have been exhausted"),
    (809, c"CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED", c"the hardware resources required to support device connections have been exhausted"),
    (810, c"CUDA_ERROR_MPS_CLIENT_TERMINATED", c"the MPS client has been terminated by the server"),
    (811, c"CUDA_ERROR_CDP_NOT_SUPPORTED", c"is using CUDA Dynamic Parallelism, but the current configuration, like MPS, does not support it"),
    (812, c"CUDA_ERROR_CDP_VERSION_MISMATCH", c"unsupported interaction between different versions of CUDA Dynamic Parallelism"),
    (900, c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", c"operation not permitted when stream is capturing"),
    (901, c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", c"operation failed due to a previous error during capture"),
    (902, c"CUDA_ERROR_STREAM_CAPTURE_MERGE", c"operation would result in a merge of separate capture sequences"),
    (903, c"CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", c"capture was not ended in the same stream as it began"),
    (904, c"CUDA_ERROR_STREAM_CAPTURE_UNJOINED", c"capturing stream has unjoined work"),
    (905, c"CUDA_ERROR_STREAM_CAPTURE_ISOLATION", c"dependency created on uncaptured work in another stream"),
    (906, c"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", c"operation would make the legacy stream depend on a capturing blocking stream"),
    (907, c"CUDA_ERROR_CAPTURED_EVENT", c"operation not permitted on an event last recorded in a capturing stream"),
    (908, c"CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", c"attempt to terminate a thread-local capture sequence from another thread"),
    (909, c"CUDA_ERROR_TIMEOUT", c"wait operation timed out"),
    (910, c"CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE", c"the graph update was not performed because it included changes which violated constraints specific to instantiated graph update"),
    (911, c"CUDA_ERROR_EXTERNAL_DEVICE", c"an async error has occured in external entity outside of CUDA"),
    (912, c"CUDA_ERROR_INVALID_CLUSTER_SIZE", c"a kernel launch error has occurred due to cluster misconfiguration"),
    (913, c"CUDA_ERROR_FUNCTION_NOT_LOADED", c"the function handle is not loaded when calling an API that requires a loaded function"),
    (914, c"CUDA_ERROR_INVALID_RESOURCE_TYPE", c"one or more resources passed in are not valid resource types for the operation"),
    (915, c"CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION", c"one or more resources are insufficient or non-applicable for the operation"),
    (916, c"CUDA_ERROR_KEY_ROTATION", c"CUDA_ERROR_KEY_ROTATION"),
    (917, c"CUDA_ERROR_STREAM_DETACHED", c"API call not permitted since the green context associated with the stream has been destroyed"),
    (918, c"CUDA_ERROR_GRAPH_RECAPTURE_FAILURE", c"recapturing to the source graph failed and had to be terminated"),
    (919, c"CUDA_ERROR_FABRIC_NOT_READY", c"GPU fabric is not ready within the probe wait budget; application may retry (see CUDA_FABRIC_INIT_TIMEOUT_MS)"),
    (999, c"CUDA_ERROR_UNKNOWN", c"unknown error"),
];

fn find(code: u32) -> Option<&'static (u32, &'static CStr, &'static CStr)> {
    TABLE.binary_search_by_key(&code, |row| row.0).ok().map(|i| &TABLE[i])
}

/// `CUDA_ERROR_...`
pub fn name(code: u32) -> Option<&'static CStr> {
    find(code).map(|row| row.1)
}

/// What the driver says about a code.
pub fn text(code: u32) -> Option<&'static CStr> {
    find(code).map(|row| row.2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_sorted_and_named() {
        assert!(TABLE.windows(2).all(|w| w[0].0 < w[1].0));
        assert_eq!(name(700).unwrap(), c"CUDA_ERROR_ILLEGAL_ADDRESS");
        assert_eq!(text(0).unwrap(), c"no error");
        assert!(name(12345).is_none());
    }
}
