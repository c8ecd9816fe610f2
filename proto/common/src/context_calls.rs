//! Driver calls that return the error of the calling thread's context.
//!
//! After a fault of a kernel these return the fault, and after a reset of the device behind it that
//! the context is destroyed. Other calls continue: about devices, graphs, pools of memory, and
//! memory handles.
//!
//! Source: `tests/programs/faultCalls.cu`, which makes each of them, on an H200 with driver
//! 580.159.04.

/// Names without version and `_ptsz`, sorted.
const CALLS: &[&str] = &[
    "cuArrayCreate",
    "cuArrayDestroy",
    "cuArrayGetDescriptor",
    "cuCtxGetCacheConfig",
    "cuCtxGetLimit",
    "cuCtxGetStreamPriorityRange",
    "cuCtxSetLimit",
    "cuCtxSynchronize",
    "cuEventCreate",
    "cuEventDestroy",
    "cuEventElapsedTime",
    "cuEventQuery",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuFuncGetAttribute",
    "cuFuncSetAttribute",
    "cuFuncSetCacheConfig",
    "cuGraphInstantiateWithFlags",
    "cuGraphLaunch",
    "cuGraphUpload",
    "cuLaunchHostFunc",
    "cuLaunchKernel",
    "cuMemAlloc",
    "cuMemAllocAsync",
    "cuMemAllocManaged",
    "cuMemAllocPitch",
    "cuMemFree",
    "cuMemFreeAsync",
    "cuMemFreeHost",
    "cuMemGetAddressRange",
    "cuMemGetInfo",
    "cuMemHostAlloc",
    "cuMemHostGetDevicePointer",
    "cuMemHostGetFlags",
    "cuMemHostRegister",
    "cuMemcpyAsync",
    "cuMemcpyDtoDAsync",
    "cuMemcpyDtoH",
    "cuMemcpyDtoHAsync",
    "cuMemcpyHtoD",
    "cuMemcpyHtoDAsync",
    "cuMemsetD32",
    "cuMemsetD8Async",
    "cuModuleGetFunction",
    "cuModuleGetGlobal",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuOccupancyMaxActiveBlocksPerMultiprocessor",
    "cuStreamBeginCapture",
    "cuStreamCreate",
    "cuStreamCreateWithPriority",
    "cuStreamDestroy",
    "cuStreamEndCapture",
    "cuStreamGetFlags",
    "cuStreamGetId",
    "cuStreamGetPriority",
    "cuStreamIsCapturing",
    "cuStreamQuery",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
];

const INVALID_HANDLE: i32 = 400;
const CONTEXT_IS_DESTROYED: i32 = 709;

/// Returns the error of a call in a context with a fault; `None`: the call continues.
///
/// `destroyed` tells that a reset of the device has destroyed the context.
pub fn error(name: &str, fault: i32, destroyed: bool) -> Option<i32> {
    let name = name.trim_end_matches("_ptsz").trim_end_matches("_ptds");
    let name = name.split_once("_v").map_or(name, |(name, _)| name);
    CALLS.binary_search(&name).ok()?;
    Some(match destroyed {
        // The functions are gone with their context.
        true if name.starts_with("cuFunc") => INVALID_HANDLE,
        true => CONTEXT_IS_DESTROYED,
        false => fault,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_have_their_contexts_error_in_each_version() {
        assert!(CALLS.is_sorted());
        for name in
            ["cuMemAlloc", "cuMemAlloc_v2", "cuMemcpyHtoD_v2_ptds", "cuStreamGetId_ptsz", "cuMemsetD32_v2"]
        {
            assert_eq!((error(name, 700, false), error(name, 700, true)), (Some(700), Some(709)), "{name}");
        }
        assert_eq!(error("cuFuncGetAttribute", 719, false), Some(719));
        assert_eq!(error("cuFuncGetAttribute", 719, true), Some(400));
        for name in ["cuGraphCreate", "cuMemCreate", "cuDeviceGetCount", "cuMemsetD8", "cuMemset"] {
            assert_eq!(error(name, 700, false), None, "{name}");
        }
    }
}
