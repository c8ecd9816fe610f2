//! Driver calls that return the error of the calling thread's context.
//!
//! After a fault of a kernel these return the fault, and after a reset of the device that the
//! context is destroyed. Other calls continue: about devices, graphs, pools of memory, and memory
//! handles.
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

/// Why work in a context fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Broken {
    /// A kernel's fault, which each of its calls returns.
    Fault(i32),
    /// A reset of the device behind a fault has destroyed it.
    ResetAfterFault,
    /// A reset of the device has destroyed it, or its last release.
    Destroyed,
}

/// Returns the error of a call in such a context; `None`: the call continues.
pub fn error(name: &str, context: Broken) -> Option<i32> {
    let name = name.trim_end_matches("_ptsz").trim_end_matches("_ptds");
    let name = name.split_once("_v").map_or(name, |(name, _)| name);
    CALLS.binary_search(&name).ok()?;
    // Functions and modules are gone with their context.
    Some(match context {
        Broken::Fault(fault) => fault,
        _ if name.starts_with("cuFunc") => INVALID_HANDLE,
        Broken::Destroyed if name.starts_with("cuModule") && name != "cuModuleLoadData" => INVALID_HANDLE,
        _ => CONTEXT_IS_DESTROYED,
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
            let of = |context| error(name, context);
            let all = [Broken::Fault(700), Broken::ResetAfterFault, Broken::Destroyed].map(of);
            assert_eq!(all, [Some(700), Some(709), Some(709)], "{name}");
        }
        assert_eq!(error("cuFuncGetAttribute", Broken::Fault(719)), Some(719));
        assert_eq!(error("cuFuncGetAttribute", Broken::ResetAfterFault), Some(400));
        assert_eq!(error("cuModuleUnload", Broken::ResetAfterFault), Some(709));
        assert_eq!(error("cuModuleUnload", Broken::Destroyed), Some(400));
        for name in ["cuGraphCreate", "cuMemCreate", "cuDeviceGetCount", "cuMemsetD8", "cuMemset"] {
            assert_eq!(error(name, Broken::Fault(700)), None, "{name}");
        }
    }
}
