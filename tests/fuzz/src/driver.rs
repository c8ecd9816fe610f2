//! The driver's functions, from the `libcuda.so.1` that the loader finds.

use anyhow::{Context, Result};
use std::ffi::{CStr, c_void};

pub type Handle = *mut c_void;
pub type HostFn = unsafe extern "C" fn(*mut c_void);

#[repr(C)]
pub struct Copy2D {
    pub src_x: usize,
    pub src_y: usize,
    pub src_type: u32,
    pub src_host: *const c_void,
    pub src_device: u64,
    pub src_array: Handle,
    pub src_pitch: usize,
    pub dst_x: usize,
    pub dst_y: usize,
    pub dst_type: u32,
    pub dst_host: *mut c_void,
    pub dst_device: u64,
    pub dst_array: Handle,
    pub dst_pitch: usize,
    pub width: usize,
    pub height: usize,
}

#[repr(C)]
pub struct Copy3D {
    pub src_x: usize,
    pub src_y: usize,
    pub src_z: usize,
    pub src_lod: usize,
    pub src_type: u32,
    pub src_host: *const c_void,
    pub src_device: u64,
    pub src_array: Handle,
    pub reserved0: Handle,
    pub src_pitch: usize,
    pub src_height: usize,
    pub dst_x: usize,
    pub dst_y: usize,
    pub dst_z: usize,
    pub dst_lod: usize,
    pub dst_type: u32,
    pub dst_host: *mut c_void,
    pub dst_device: u64,
    pub dst_array: Handle,
    pub reserved1: Handle,
    pub dst_pitch: usize,
    pub dst_height: usize,
    pub width: usize,
    pub height: usize,
    pub depth: usize,
}

#[repr(C)]
pub struct KernelNode {
    pub function: Handle,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared: u32,
    pub parameters: *mut *mut c_void,
    pub extra: *mut *mut c_void,
    pub kernel: Handle,
    pub context: Handle,
}

/// `CUlaunchConfig`
#[repr(C)]
pub struct LaunchConfig {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared: u32,
    pub stream: Handle,
    pub attributes: *const LaunchAttribute,
    pub count: u32,
}

/// `CUlaunchAttribute` with an event as its value.
#[repr(C)]
pub struct LaunchAttribute {
    pub id: u32,
    pub event: Handle,
    pub rest: [u64; 7],
}

#[repr(C)]
pub struct FillNode {
    pub to: u64,
    pub pitch: usize,
    pub value: u32,
    pub element: u32,
    pub width: usize,
    pub height: usize,
}

#[repr(C)]
pub struct HostNode {
    pub function: HostFn,
    pub data: *mut c_void,
}

#[repr(C)]
#[derive(Default)]
pub struct UpdateResult {
    pub result: u32,
    pub from: usize,
    pub to: usize,
}

macro_rules! functions {
    ($($name:ident($($argument:ty),*);)*) => {
        /// One field for each function, named as its symbol.
        #[allow(non_snake_case, reason = "the names are the driver's")]
        pub struct Driver {
            $(pub $name: unsafe extern "C" fn($($argument),*) -> u32,)*
        }

        impl Driver {
            /// Loads the library and finds every function.
            pub fn load() -> Result<Driver> {
                // SAFETY: initializers of a CUDA driver library run in any program that links it.
                let library = unsafe { libloading::Library::new("libcuda.so.1") }
                    .context("libcuda.so.1: cannot be loaded; set LD_LIBRARY_PATH to the folder of a driver")?;
                // The library stays loaded until the process exits.
                let library: &'static libloading::Library = Box::leak(Box::new(library));
                Ok(Driver {
                    // SAFETY: the prototypes are those of cuda.h for these symbols.
                    $($name: unsafe { *library.get(concat!(stringify!($name), "\0").as_bytes())? },)*
                })
            }
        }
    };
}

functions! {
    cuInit(u32);
    cuDeviceGet(*mut i32, i32);
    cuDevicePrimaryCtxRetain(*mut Handle, i32);
    cuCtxSetCurrent(Handle);
    cuCtxSynchronize();
    cuModuleLoadData(*mut Handle, *const c_void);
    cuModuleGetFunction(*mut Handle, Handle, *const i8);
    cuMemAlloc_v2(*mut u64, usize);
    cuMemFree_v2(u64);
    cuMemAllocManaged(*mut u64, usize, u32);
    cuMemAllocAsync(*mut u64, usize, Handle);
    cuMemFreeAsync(u64, Handle);
    cuMemHostAlloc(*mut *mut c_void, usize, u32);
    cuMemFreeHost(*mut c_void);
    cuMemHostRegister_v2(*mut c_void, usize, u32);
    cuMemHostUnregister(*mut c_void);
    cuMemHostGetDevicePointer_v2(*mut u64, *mut c_void, u32);
    cuMemcpy(u64, u64, usize);
    cuMemcpyAsync(u64, u64, usize, Handle);
    cuMemcpyHtoD_v2(u64, *const c_void, usize);
    cuMemcpyHtoDAsync_v2(u64, *const c_void, usize, Handle);
    cuMemcpyDtoH_v2(*mut c_void, u64, usize);
    cuMemcpyDtoHAsync_v2(*mut c_void, u64, usize, Handle);
    cuMemcpyDtoD_v2(u64, u64, usize);
    cuMemcpyDtoDAsync_v2(u64, u64, usize, Handle);
    cuMemcpy2D_v2(*const Copy2D);
    cuMemcpy2DAsync_v2(*const Copy2D, Handle);
    cuMemsetD8_v2(u64, u8, usize);
    cuMemsetD8Async(u64, u8, usize, Handle);
    cuMemsetD16_v2(u64, u16, usize);
    cuMemsetD16Async(u64, u16, usize, Handle);
    cuMemsetD32_v2(u64, u32, usize);
    cuMemsetD32Async(u64, u32, usize, Handle);
    cuLaunchKernel(Handle, u32, u32, u32, u32, u32, u32, u32, Handle, *mut *mut c_void, *mut *mut c_void);
    cuLaunchKernelEx(*const LaunchConfig, Handle, *mut *mut c_void, *mut *mut c_void);
    cuLaunchHostFunc(Handle, HostFn, *mut c_void);
    cuStreamCreate(*mut Handle, u32);
    cuStreamDestroy_v2(Handle);
    cuStreamSynchronize(Handle);
    cuStreamQuery(Handle);
    cuStreamWaitEvent(Handle, Handle, u32);
    cuStreamWaitValue32_v2(Handle, u64, u32, u32);
    cuStreamWriteValue32_v2(Handle, u64, u32, u32);
    cuStreamBeginCapture_v2(Handle, u32);
    cuStreamEndCapture(Handle, *mut Handle);
    cuEventCreate(*mut Handle, u32);
    cuEventDestroy_v2(Handle);
    cuEventRecord(Handle, Handle);
    cuEventSynchronize(Handle);
    cuEventElapsedTime_v2(*mut f32, Handle, Handle);
    cuGraphCreate(*mut Handle, u32);
    cuGraphDestroy(Handle);
    cuGraphClone(*mut Handle, Handle);
    cuGraphAddKernelNode_v2(*mut Handle, Handle, *const Handle, usize, *const KernelNode);
    cuGraphAddMemcpyNode(*mut Handle, Handle, *const Handle, usize, *const Copy3D, Handle);
    cuGraphAddMemsetNode(*mut Handle, Handle, *const Handle, usize, *const FillNode, Handle);
    cuGraphAddHostNode(*mut Handle, Handle, *const Handle, usize, *const HostNode);
    cuGraphAddEventRecordNode(*mut Handle, Handle, *const Handle, usize, Handle);
    cuGraphAddEventWaitNode(*mut Handle, Handle, *const Handle, usize, Handle);
    cuGraphAddChildGraphNode(*mut Handle, Handle, *const Handle, usize, Handle);
    cuGraphInstantiateWithFlags(*mut Handle, Handle, u64);
    cuGraphExecUpdate_v2(Handle, Handle, *mut UpdateResult);
    cuGraphExecDestroy(Handle);
    cuGraphLaunch(Handle, Handle);
    cuPointerGetAttribute(*mut c_void, u32, u64);
}

/// The kernels of this program, as `cuModuleLoadData` takes them.
pub const KERNELS: &CStr = {
    match CStr::from_bytes_with_nul(concat!(include_str!("kernels.ptx"), "\0").as_bytes()) {
        Ok(text) => text,
        Err(_) => panic!("kernels.ptx contains no zero byte"),
    }
};
