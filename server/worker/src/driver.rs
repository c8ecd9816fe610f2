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

macro_rules! functions {
    ($($name:ident($($arg:ty),*);)*) => {
        /// The driver's functions that hand-written code calls.
        #[allow(non_snake_case)]
        pub struct Functions { $(#[allow(missing_docs)] pub $name: unsafe extern "C" fn($($arg),*) -> Status,)* }

        impl Functions {
            /// # Safety
            /// The symbols are those of a CUDA driver, which stays loaded.
            unsafe fn load(symbols: &impl Symbols) -> Self {
                // SAFETY: the caller vouches for the symbols; the types are those of cuda.h.
                unsafe { Self { $($name: function(symbols, {
                    const NAME: &CStr = match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                        Ok(name) => name,
                        Err(_) => panic!(),
                    };
                    NAME
                }),)* } }
            }
        }
    };
}

functions! {
    cuInit(u32);
    cuCheckpointProcessLock(i32, *const c_void);
    cuCheckpointProcessCheckpoint(i32, *const c_void);
    cuCheckpointProcessRestore(i32, *const c_void);
    cuCheckpointProcessUnlock(i32, *const c_void);
    cuDriverGetVersion(*mut i32);
    cuDeviceGetCount(*mut i32);
    cuDeviceGetName(*mut c_char, i32, i32);
    cuDeviceGetUuid_v2(*mut u8, i32);
    cuDeviceTotalMem_v2(*mut usize, i32);
    cuDeviceGetAttribute(*mut i32, i32, i32);
    cuDeviceGetPCIBusId(*mut c_char, i32, i32);
    cuDeviceCanAccessPeer(*mut i32, i32, i32);
    cuDeviceGetP2PAttribute(*mut i32, i32, i32, i32);
    cuDevicePrimaryCtxRetain(*mut Handle, i32);
    cuDevicePrimaryCtxReset_v2(i32);
    cuGetExportTable(*mut *const c_void, *const [u8; 16]);
    cuCtxCreate_v2(*mut Handle, u32, i32);
    cuCtxDestroy_v2(Handle);
    cuCtxSetCurrent(Handle);
    cuCtxPushCurrent_v2(Handle);
    cuCtxPopCurrent_v2(*mut Handle);
    cuCtxSynchronize();
    cuCtxSetLimit(i32, usize);
    cuCtxGetLimit(*mut usize, i32);
    cuCtxGetStreamPriorityRange(*mut i32, *mut i32);
    cuThreadExchangeStreamCaptureMode(*mut i32);
    cuMemGetInfo_v2(*mut usize, *mut usize);
    cuMemAlloc_v2(*mut Address, usize);
    cuMemFree_v2(Address);
    cuMemAddressReserve(*mut Address, usize, usize, Address, u64);
    cuMemAddressFree(Address, usize);
    cuMemCreate(*mut u64, usize, *const c_void, u64);
    cuMemRelease(u64);
    cuMemMap(Address, usize, usize, u64, u64);
    cuMemUnmap(Address, usize);
    cuMemExportToShareableHandle(*mut c_void, u64, i32, u64);
    cuMemImportFromShareableHandle(*mut u64, *mut c_void, i32);
    cuMemRetainAllocationHandle(*mut u64, *mut c_void);
    cuMemPoolExportToShareableHandle(*mut c_void, u64, i32, u64);
    cuMemPoolImportFromShareableHandle(*mut u64, *mut c_void, i32, u64);
    cuMemPoolExportPointer(*mut c_void, Address);
    cuMemPoolImportPointer(*mut Address, u64, *mut c_void);
    cuMemSetAccess(Address, usize, *const c_void, usize);
    cuMemHostRegister_v2(*mut c_void, usize, u32);
    cuMemHostUnregister(*mut c_void);
    cuMemHostGetDevicePointer_v2(*mut Address, *mut c_void, u32);
    cuMemsetD8Async(Address, u8, usize, Handle);
    cuMemcpyHtoDAsync_v2(Address, *const c_void, usize, Handle);
    cuMemcpyDtoH_v2(*mut c_void, Address, usize);
    cuMemcpyDtoHAsync_v2(*mut c_void, Address, usize, Handle);
    cuMemcpy3DAsync_v2(*const c_void, Handle);
    cuStreamCreateWithPriority(*mut Handle, u32, i32);
    cuStreamDestroy_v2(Handle);
    cuStreamSynchronize(Handle);
    cuStreamQuery(Handle);
    cuStreamIsCapturing(Handle, *mut i32);
    cuStreamWaitEvent(Handle, Handle, u32);
    cuStreamBatchMemOp_v2(Handle, u32, *const c_void, u32);
    cuStreamBeginCapture_v2(Handle, i32);
    cuStreamBeginCaptureToGraph(Handle, Handle, *const Handle, *const c_void, usize, i32);
    cuStreamEndCapture(Handle, *mut Handle);
    cuStreamGetCaptureInfo_v2(Handle, *mut i32, *mut u64, *mut Handle, *mut *const Handle, *mut usize);
    cuStreamGetCaptureInfo_v3(Handle, *mut i32, *mut u64, *mut Handle, *mut *const Handle, *mut *const u64, *mut usize);
    cuStreamUpdateCaptureDependencies(Handle, *mut Handle, usize, u32);
    cuStreamUpdateCaptureDependencies_v2(Handle, *mut Handle, *const c_void, usize, u32);
    cuEventCreate(*mut Handle, u32);
    cuEventDestroy_v2(Handle);
    cuEventRecord(Handle, Handle);
    cuEventRecordWithFlags(Handle, Handle, u32);
    cuEventSynchronize(Handle);
    cuEventQuery(Handle);
    cuEventElapsedTime(*mut f32, Handle, Handle);
    cuPointerGetAttribute(*mut c_void, i32, Address);
    cuModuleLoadDataEx(*mut Handle, *const c_void, u32, *const i32, *const *mut c_void);
    cuModuleUnload(Handle);
    cuModuleGetFunction(*mut Handle, Handle, *const c_char);
    cuModuleGetGlobal_v2(*mut Address, *mut usize, Handle, *const c_char);
    cuModuleGetTexRef(*mut Handle, Handle, *const c_char);
    cuModuleGetSurfRef(*mut Handle, Handle, *const c_char);
    cuTexRefCreate(*mut Handle);
    cuTexRefDestroy(Handle);
    cuLibraryLoadData(*mut Handle, *const c_void, *const i32, *const *mut c_void, u32, *const i32, *const *mut c_void, u32);
    cuLibraryUnload(Handle);
    cuLibraryGetKernel(*mut Handle, Handle, *const c_char);
    cuLibraryGetModule(*mut Handle, Handle);
    cuLibraryGetGlobal(*mut Address, *mut usize, Handle, *const c_char);
    cuLibraryGetManaged(*mut Address, *mut usize, Handle, *const c_char);
    cuLibraryGetKernelCount(*mut u32, Handle);
    cuLibraryEnumerateKernels(*mut Handle, u32, Handle);
    cuLinkCreate_v2(u32, *const i32, *mut *mut c_void, *mut Handle);
    cuLinkAddData_v2(Handle, i32, *mut c_void, usize, *const c_char, u32, *const i32, *mut *mut c_void);
    cuLinkComplete(Handle, *mut *mut c_void, *mut usize);
    cuLinkDestroy(Handle);
    cuModuleGetFunctionCount(*mut u32, Handle);
    cuModuleEnumerateFunctions(*mut Handle, u32, Handle);
    cuKernelGetFunction(*mut Handle, Handle);
    cuKernelGetName(*mut *const c_char, Handle);
    cuKernelGetAttribute(*mut i32, i32, Handle, i32);
    cuKernelSetAttribute(i32, i32, Handle, i32);
    cuKernelSetCacheConfig(Handle, i32, i32);
    cuKernelGetParamInfo(Handle, usize, *mut usize, *mut usize);
    cuFuncGetName(*mut *const c_char, Handle);
    cuFuncGetAttribute(*mut i32, i32, Handle);
    cuFuncSetAttribute(Handle, i32, i32);
    cuFuncSetCacheConfig(Handle, i32);
    cuFuncSetSharedMemConfig(Handle, i32);
    cuFuncGetParamInfo(Handle, usize, *mut usize, *mut usize);
    cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(*mut i32, Handle, i32, usize, u32);
    cuOccupancyAvailableDynamicSMemPerBlock(*mut usize, Handle, i32, i32);
    cuOccupancyMaxPotentialClusterSize(*mut i32, Handle, *const c_void);
    cuOccupancyMaxActiveClusters(*mut i32, Handle, *const c_void);
    cuLaunchKernelEx(*const c_void, Handle, *const *mut c_void, *const *mut c_void);
    cuLaunchKernel(Handle, u32, u32, u32, u32, u32, u32, u32, Handle, *const *mut c_void, *const *mut c_void);
    cuLaunchHostFunc(Handle, extern "C" fn(*mut c_void), *mut c_void);
    cuStreamAddCallback(Handle, extern "C" fn(Handle, Status, *mut c_void), *mut c_void, u32);
    cuTensorMapEncodeTiled(*mut c_void, i32, u32, Address, *const u64, *const u64, *const u32, *const u32, i32, i32, i32, i32);
    cuTensorMapEncodeIm2col(*mut c_void, i32, u32, Address, *const u64, *const u64, *const i32, *const i32, u32, u32, *const u32, i32, i32, i32, i32);
    cuTensorMapEncodeIm2colWide(*mut c_void, i32, u32, Address, *const u64, *const u64, i32, i32, u32, u32, *const u32, i32, i32, i32, i32, i32);
    cuTensorMapReplaceAddress(*mut c_void, Address);
    cuTensorMapSetAllocationClass(*mut c_void, u32, *mut u32);
    cuDeviceGetP2PAtomicCapabilities(*mut u32, *const i32, u32, i32, i32);
    cuMemMapArrayAsync(*mut c_void, u32, Handle);
    cuMemBatchDecompressAsync(*mut c_void, usize, u32, *mut usize, Handle);
    cuStreamGetDevResource(Handle, *mut c_void, i32);
    cuDevSmResourceSplit(*mut c_void, u32, *const c_void, *mut c_void, u32, *mut c_void);
    cuGraphCreate(*mut Handle, u32);
    cuGraphDestroy(Handle);
    cuGraphInstantiate_v2(*mut Handle, Handle, *mut Handle, *mut std::ffi::c_char, usize);
    cuGraphInstantiateWithParams(*mut Handle, Handle, *mut c_void);
    cuGraphExecDestroy(Handle);
    cuGraphLaunch(Handle, Handle);
    cuGraphClone(*mut Handle, Handle);
    cuGraphGetNodes(Handle, *mut Handle, *mut usize);
    cuGraphGetRootNodes(Handle, *mut Handle, *mut usize);
    cuGraphGetEdges(Handle, *mut Handle, *mut Handle, *mut usize);
    cuGraphGetEdges_v2(Handle, *mut Handle, *mut Handle, *mut c_void, *mut usize);
    cuGraphNodeGetDependencies(Handle, *mut Handle, *mut usize);
    cuGraphNodeGetDependencies_v2(Handle, *mut Handle, *mut c_void, *mut usize);
    cuGraphNodeGetDependentNodes(Handle, *mut Handle, *mut usize);
    cuGraphNodeGetDependentNodes_v2(Handle, *mut Handle, *mut c_void, *mut usize);
    cuGraphDebugDotPrint(Handle, *const c_char, u32);
    cuUserObjectCreate(*mut Handle, *mut c_void, extern "C" fn(*mut c_void), u32, u32);
    cuGraphAddKernelNode_v2(*mut Handle, Handle, *const Handle, usize, *const c_void);
    cuGraphAddMemcpyNode(*mut Handle, Handle, *const Handle, usize, *const c_void, Handle);
    cuGraphAddMemsetNode(*mut Handle, Handle, *const Handle, usize, *const c_void, Handle);
    cuGraphAddEmptyNode(*mut Handle, Handle, *const Handle, usize);
    cuGraphAddEventRecordNode(*mut Handle, Handle, *const Handle, usize, Handle);
    cuGraphAddEventWaitNode(*mut Handle, Handle, *const Handle, usize, Handle);
    cuGraphAddHostNode(*mut Handle, Handle, *const Handle, usize, *const c_void);
    cuGraphAddChildGraphNode(*mut Handle, Handle, *const Handle, usize, Handle);
    cuGraphAddNode_v2(*mut Handle, Handle, *const Handle, *const c_void, usize, *mut c_void);
    cuGraphKernelNodeGetParams_v2(Handle, *mut c_void);
    cuGraphMemcpyNodeGetParams(Handle, *mut c_void);
    cuGraphMemsetNodeGetParams(Handle, *mut c_void);
    cuGraphHostNodeGetParams(Handle, *mut c_void);
    cuGraphEventRecordNodeGetEvent(Handle, *mut Handle);
    cuGraphEventWaitNodeGetEvent(Handle, *mut Handle);
    cuGraphMemAllocNodeGetParams(Handle, *mut c_void);
    cuGraphBatchMemOpNodeGetParams(Handle, *mut c_void);
    cuDeviceGetDevResource(i32, *mut c_void, i32);
    cuCtxGetDevResource(Handle, *mut c_void, i32);
    cuGreenCtxGetDevResource(Handle, *mut c_void, i32);
    cuDevSmResourceSplitByCount(*mut c_void, *mut u32, *const c_void, *mut c_void, u32, u32);
    cuDevResourceGenerateDesc(*mut Handle, *mut c_void, u32);
    cuGreenCtxCreate(*mut Handle, Handle, i32, u32);
    cuGreenCtxDestroy(Handle);
    cuCtxFromGreenCtx(*mut Handle, Handle);
    cuGreenCtxStreamCreate(*mut Handle, Handle, u32, i32);
    cuGreenCtxRecordEvent(Handle, Handle);
    cuGreenCtxWaitEvent(Handle, Handle);
    cuCtxRecordEvent(Handle, Handle);
    cuCtxWaitEvent(Handle, Handle);
    cuGraphAddMemAllocNode(*mut Handle, Handle, *const Handle, usize, *mut c_void);
    cuGraphAddMemFreeNode(*mut Handle, Handle, *const Handle, usize, Address);
    cuGraphAddBatchMemOpNode(*mut Handle, Handle, *const Handle, usize, *const c_void);
    cuGraphBatchMemOpNodeSetParams(Handle, *const c_void);
    cuGraphExecBatchMemOpNodeSetParams(Handle, Handle, *const c_void);
    cuGraphChildGraphNodeGetGraph(Handle, *mut Handle);
    cuGraphExecChildGraphNodeSetParams(Handle, Handle, Handle);
    cuGraphExecEventRecordNodeSetEvent(Handle, Handle, Handle);
    cuGraphExecEventWaitNodeSetEvent(Handle, Handle, Handle);
    cuGraphEventRecordNodeSetEvent(Handle, Handle);
    cuGraphEventWaitNodeSetEvent(Handle, Handle);
    cuGraphExecUpdate_v2(Handle, Handle, *mut c_void);
    cuGraphExecKernelNodeSetParams_v2(Handle, Handle, *const c_void);
    cuGraphExecMemcpyNodeSetParams(Handle, Handle, *const c_void, Handle);
    cuGraphExecMemsetNodeSetParams(Handle, Handle, *const c_void, Handle);
    cuGraphExecHostNodeSetParams(Handle, Handle, *const c_void);
    cuGraphHostNodeSetParams(Handle, *const c_void);
    cuGraphKernelNodeSetParams_v2(Handle, *const c_void);
    cuGraphMemcpyNodeSetParams(Handle, *const c_void);
    cuGraphMemsetNodeSetParams(Handle, *const c_void);
}

/// Functions that generated code calls (see `build.rs`).
#[expect(clippy::too_many_lines, reason = "generated")]
mod generated {
    use super::{Handle, Status, Symbols, c_void, function};

    include!(concat!(env!("OUT_DIR"), "/functions.rs"));
}

/// A loaded driver library.
pub struct Driver {
    /// Functions that hand-written code calls.
    pub call: Functions,
    /// Functions that generated code calls.
    pub generated: generated::Functions,
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
        let (call, generated) = unsafe { (Functions::load(symbols), generated::Functions::load(symbols)) };
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
