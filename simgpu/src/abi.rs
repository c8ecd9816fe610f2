//! Structures of the driver's C interface.

#![allow(non_snake_case)]

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Memcpy2D {
    pub srcXInBytes: usize,
    pub srcY: usize,
    pub srcMemoryType: u32,
    pub srcHost: u64,
    pub srcDevice: u64,
    pub srcArray: usize,
    pub srcPitch: usize,
    pub dstXInBytes: usize,
    pub dstY: usize,
    pub dstMemoryType: u32,
    pub dstHost: u64,
    pub dstDevice: u64,
    pub dstArray: usize,
    pub dstPitch: usize,
    pub WidthInBytes: usize,
    pub Height: usize,
}

/// `CUDA_MEMCPY3D` and `CUDA_MEMCPY3D_PEER`, whose reserved words are contexts.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Memcpy3D {
    pub srcXInBytes: usize,
    pub srcY: usize,
    pub srcZ: usize,
    pub srcLOD: usize,
    pub srcMemoryType: u32,
    pub srcHost: u64,
    pub srcDevice: u64,
    pub srcArray: usize,
    pub srcContext: usize,
    pub srcPitch: usize,
    pub srcHeight: usize,
    pub dstXInBytes: usize,
    pub dstY: usize,
    pub dstZ: usize,
    pub dstLOD: usize,
    pub dstMemoryType: u32,
    pub dstHost: u64,
    pub dstDevice: u64,
    pub dstArray: usize,
    pub dstContext: usize,
    pub dstPitch: usize,
    pub dstHeight: usize,
    pub WidthInBytes: usize,
    pub Height: usize,
    pub Depth: usize,
}

pub const MEMORY_HOST: u32 = 1;
pub const MEMORY_DEVICE: u32 = 2;
pub const MEMORY_ARRAY: u32 = 3;
pub const MEMORY_UNIFIED: u32 = 4;

/// `CUDA_ARRAY3D_DESCRIPTOR`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ArrayDescriptor {
    pub Width: usize,
    pub Height: usize,
    pub Depth: usize,
    pub Format: u32,
    pub NumChannels: u32,
    pub Flags: u32,
}

impl ArrayDescriptor {
    /// Describes an array of this width, height and depth.
    pub fn new([width, height, depth]: [usize; 3], format: u32, channels: u32, flags: u32) -> Self {
        Self {
            Width: width,
            Height: height,
            Depth: depth,
            Format: format,
            NumChannels: channels,
            Flags: flags,
        }
    }
}

/// `CUDA_ARRAY_DESCRIPTOR`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct FlatDescriptor {
    pub Width: usize,
    pub Height: usize,
    pub Format: u32,
    pub NumChannels: u32,
}

/// `CUDA_RESOURCE_DESC`: a type and a union.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct ResourceDesc {
    pub resType: u32,
    pub res: [u64; 16],
    pub flags: u32,
}

pub const RESOURCE_ARRAY: u32 = 0;
pub const RESOURCE_MIPMAP: u32 = 1;
pub const RESOURCE_LINEAR: u32 = 2;
pub const RESOURCE_PITCH2D: u32 = 3;

/// `CUDA_TEXTURE_DESC`
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct TextureDesc {
    pub addressMode: [u32; 3],
    pub filterMode: u32,
    pub flags: u32,
    pub maxAnisotropy: u32,
    pub mipmapFilterMode: u32,
    pub mipmapLevelBias: f32,
    pub minMipmapLevelClamp: f32,
    pub maxMipmapLevelClamp: f32,
    pub borderColor: [f32; 4],
    pub reserved: [u32; 12],
}

/// `CUDA_RESOURCE_VIEW_DESC`
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct ViewDesc {
    pub format: u32,
    pub width: usize,
    pub height: usize,
    pub depth: usize,
    pub firstMipmapLevel: u32,
    pub lastMipmapLevel: u32,
    pub firstLayer: u32,
    pub lastLayer: u32,
    pub reserved: [u32; 16],
}

#[repr(C)]
pub struct LaunchAttribute {
    pub id: u32,
    pub pad: u32,
    pub value: [u64; 8],
}

#[repr(C)]
pub struct LaunchConfig {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared: u32,
    pub stream: usize,
    pub attrs: *const LaunchAttribute,
    pub numAttrs: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct KernelNodeParams {
    pub func: usize,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared: u32,
    pub kernelParams: *mut *mut u8,
    pub extra: *mut *mut u8,
}

/// The fields that `_v2` adds: a kernel and a context.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct KernelNodeParamsV2 {
    pub base: KernelNodeParams,
    pub kern: usize,
    pub ctx: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct MemsetNodeParams {
    pub dst: u64,
    pub pitch: usize,
    pub value: u32,
    pub elementSize: u32,
    pub width: usize,
    pub height: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct HostNodeParams {
    pub func: usize,
    pub data: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct BatchMemOp {
    pub operation: u32,
    pub address: u64,
    pub value: u64,
    pub flags: u32,
    pub alias: u64,
    pub pad: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Location {
    pub kind: u32,
    pub id: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct AccessDesc {
    pub location: Location,
    pub flags: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct AllocationProp {
    pub kind: u32,
    pub requestedHandleTypes: u32,
    pub location: Location,
    pub win32: usize,
    pub flags: [u8; 8],
}

#[repr(C)]
pub struct PoolProps {
    pub allocType: u32,
    pub handleTypes: u32,
    pub location: Location,
    pub win32: usize,
    pub maxSize: usize,
    pub usage: u16,
    pub reserved: [u8; 54],
}

#[repr(C)]
pub struct DevProp {
    pub maxThreadsPerBlock: i32,
    pub maxThreadsDim: [i32; 3],
    pub maxGridSize: [i32; 3],
    pub sharedMemPerBlock: i32,
    pub totalConstantMemory: i32,
    pub SIMDWidth: i32,
    pub memPitch: i32,
    pub regsPerBlock: i32,
    pub clockRate: i32,
    pub textureAlign: i32,
}

#[repr(C)]
pub struct GraphInstantiateParams {
    pub flags: u64,
    pub uploadStream: usize,
    pub errNode: usize,
    pub result: u32,
}

#[repr(C)]
pub struct UpdateResult {
    pub result: u32,
    pub errorNode: usize,
    pub errorFromNode: usize,
}

/// `CUgraphNodeParams`: a type and a union.
#[repr(C)]
pub struct NodeParams {
    pub kind: i32,
    pub reserved0: [i32; 3],
    pub body: [u64; 29],
    pub reserved2: i64,
}
