//! Texture and surface objects and references, in kernels.

mod common;

use common::{launch, machine, ok};
use simgpu::abi::{
    ArrayDescriptor, RESOURCE_ARRAY, RESOURCE_LINEAR, RESOURCE_MIPMAP, RESOURCE_PITCH2D, ResourceDesc,
    TextureDesc, ViewDesc,
};
use simgpu::exports::{array, context, copy, module, texture, texture_reference as reference};

const KERNELS: &std::ffi::CStr = c".version 7.0\n.target sm_75\n.address_size 64\n\
    .global .texref picture;\n.global .surfref canvas;\n\
    .visible .entry read(.param .u64 p, .param .u64 t) { .reg .b64 %rd<3>; .reg .b32 %r<9>;\n\
      ld.param.u64 %rd1, [p]; ld.param.u64 %rd2, [t]; mov.u32 %r1, 2; mov.u32 %r2, 1;\n\
      tex.2d.v4.u32.s32 {%r5, %r6, %r7, %r8}, [%rd2, {%r1, %r2}]; st.global.v2.u32 [%rd1], {%r5, %r6}; ret; }\n\
    .visible .entry draw(.param .u64 s) { .reg .b64 %rd<3>; .reg .b32 %r<9>;\n\
      ld.param.u64 %rd2, [s]; sust.b.2d.b32.trap [%rd2, {4, 1}], {77}; ret; }\n\
    .visible .entry bound(.param .u64 p) { .reg .b64 %rd<3>; .reg .b32 %r<9>;\n\
      ld.param.u64 %rd1, [p]; tex.1d.v4.u32.s32 {%r5, %r6, %r7, %r8}, [picture, {3}];\n\
      sust.b.1d.b32.trap [canvas, {8}], {%r5}; st.global.u32 [%rd1], %r5; ret; }\n";

const U8: u32 = 1;
const U32: u32 = 3;
const FLOAT: u32 = 0x20;
const SURFACE: u32 = 2;
const INTEGERS: TextureDesc = TextureDesc {
    addressMode: [1; 3],
    filterMode: 0,
    flags: 1,
    maxAnisotropy: 0,
    mipmapFilterMode: 0,
    mipmapLevelBias: 0.0,
    minMipmapLevelClamp: 0.0,
    maxMipmapLevelClamp: 0.0,
    borderColor: [0.0; 4],
    reserved: [0; 12],
};

fn resource(kind: u32, words: &[u64]) -> ResourceDesc {
    let mut r = ResourceDesc { resType: kind, ..ResourceDesc::default() };
    r.res[..words.len()].copy_from_slice(words);
    r
}

fn create(extent: [usize; 3], format: u32, flags: u32) -> usize {
    let d = ArrayDescriptor::new(extent, format, 1, flags);
    let mut h = 0;
    // SAFETY: locals of the right types.
    unsafe { ok(array::cuArray3DCreate_v2(&raw mut h, &raw const d)) };
    h
}

/// Tries to create a texture; returns the code and its number.
fn texture(r: &ResourceDesc, t: &TextureDesc, view: Option<&ViewDesc>) -> (u32, u64) {
    let mut number = 0;
    let view = view.map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: locals of the right types.
    let code = unsafe { texture::cuTexObjectCreate(&raw mut number, r, t, view) };
    (code, number)
}

struct Kernels {
    module: usize,
    memory: u64,
}

impl Kernels {
    fn run(&self, name: &std::ffi::CStr, params: &[u64]) -> (u32, [u32; 2]) {
        let (mut f, mut back) = (0, [0u32; 2]);
        // SAFETY: locals of the right types and sizes.
        unsafe {
            ok(module::cuModuleGetFunction(&raw mut f, self.module, name.as_ptr()));
            ok(launch(f, 0, params));
            let code = context::cuCtxSynchronize();
            if code == 0 {
                ok(copy::cuMemcpyDtoH_v2(back.as_mut_ptr() as u64, self.memory, 8));
            }
            (code, back)
        }
    }
}

#[test]
fn kernels_read_and_draw() {
    let m = machine();
    let mut module = 0;
    // SAFETY: a C string.
    unsafe { ok(module::cuModuleLoadData(&raw mut module, KERNELS.as_ptr().cast())) };
    let kernels = Kernels { module, memory: m.memory };
    objects(&kernels);
    descriptions(m.memory);
    references(&kernels);
    // Last, since it breaks the context: the array of a texture is gone.
    let a = create([8, 4, 0], U32, 0);
    let (code, number) = texture(&resource(RESOURCE_ARRAY, &[a as u64]), &INTEGERS, None);
    ok(code);
    // SAFETY: no pointers.
    unsafe { ok(array::cuArrayDestroy(a)) };
    assert_eq!(kernels.run(c"read", &[m.memory, number]).0, 700);
}

fn objects(kernels: &Kernels) {
    let values: Vec<u32> = (0..64).map(|i| i * 3).collect();
    let a = create([8, 4, 0], U32, SURFACE);
    let at = kernels.memory;
    let mut surface = 0;
    // SAFETY: locals of the right types and sizes.
    unsafe {
        ok(copy::cuMemcpyHtoA_v2(a, 0, values.as_ptr() as u64, 128));
        ok(copy::cuMemcpyHtoD_v2(at + 4096, values.as_ptr() as u64, 256));
        let r = resource(RESOURCE_ARRAY, &[a as u64]);
        let (code, of_array) = texture(&r, &INTEGERS, None);
        ok(code);
        assert_eq!(kernels.run(c"read", &[at, of_array]), (0, [30, 0]));
        ok(texture::cuSurfObjectCreate(&raw mut surface, &raw const r));
        assert_eq!(kernels.run(c"draw", &[surface]).0, 0);
        let mut back = [0u32; 3];
        ok(copy::cuMemcpyAtoH_v2(back.as_mut_ptr() as u64, a, 32, 12));
        assert_eq!(back, [24, 77, 30]);
        // Rows of eight pairs with a pitch, and linear memory, which has one row.
        let pitch = resource(RESOURCE_PITCH2D, &[at + 4096, u64::from(U32) | 2 << 32, 8, 4, 64]);
        let (code, of_rows) = texture(&pitch, &INTEGERS, None);
        ok(code);
        assert_eq!(kernels.run(c"read", &[at, of_rows]), (0, [60, 63]));
        let linear = resource(RESOURCE_LINEAR, &[at + 4096, u64::from(U8) | 1 << 32, 256]);
        let (code, of_bytes) = texture(&linear, &INTEGERS, None);
        ok(code);
        assert_eq!(kernels.run(c"read", &[at, of_bytes]), (0, [0, 0]));
        let mut known = ResourceDesc::default();
        ok(texture::cuTexObjectGetResourceDesc(&raw mut known, of_rows));
        assert_eq!(known.res[..5], pitch.res[..5]);
        assert_eq!(texture::cuSurfObjectGetResourceDesc(&raw mut known, of_rows), 1);
        assert_eq!(texture::cuSurfObjectDestroy(of_rows), 1);
        let mut view = ViewDesc::default();
        assert_eq!(texture::cuTexObjectGetResourceViewDesc(&raw mut view, of_rows), 1);
        for number in [of_array, of_rows, of_bytes] {
            ok(texture::cuTexObjectDestroy(number));
        }
        assert_eq!(texture::cuTexObjectDestroy(of_rows), 1);
        ok(texture::cuSurfObjectDestroy(surface));
        ok(array::cuArrayDestroy(a));
    }
}

/// Descriptions that no texture or surface can have.
fn descriptions(at: u64) {
    let a = create([8, 4, 0], U32, 0);
    let plain = resource(RESOURCE_ARRAY, &[a as u64]);
    let format = u64::from(FLOAT) | 1 << 32;
    for r in [
        resource(9, &[]),
        resource(RESOURCE_ARRAY, &[1]),
        resource(RESOURCE_MIPMAP, &[a as u64]),
        ResourceDesc { flags: 1, ..plain },
        resource(RESOURCE_LINEAR, &[at + 4, format, 64]),
        resource(RESOURCE_LINEAR, &[at, format, 1 << 40]),
        resource(RESOURCE_LINEAR, &[at, format, u64::MAX]),
        resource(RESOURCE_LINEAR, &[at, u64::from(FLOAT) | 3 << 32, 64]),
        resource(RESOURCE_LINEAR, &[at, format, 2 << 20]),
        resource(RESOURCE_PITCH2D, &[at, format, 8, 4, 33]),
        resource(RESOURCE_PITCH2D, &[at, format, 16, 4, 32]),
        resource(RESOURCE_PITCH2D, &[at, format, 8, 65000, 1024]),
        resource(RESOURCE_PITCH2D, &[at, format, u64::MAX, u64::MAX, 1 << 20]),
        resource(RESOURCE_PITCH2D, &[0, format, 8, 4, 32]),
    ] {
        assert_eq!(texture(&r, &INTEGERS, None).0, 1, "{} {:?}", r.resType, &r.res[..5]);
    }
    for t in [
        TextureDesc { addressMode: [4, 0, 0], ..INTEGERS },
        TextureDesc { filterMode: 1, ..INTEGERS },
        TextureDesc { flags: 0x100, ..INTEGERS },
        TextureDesc { maxMipmapLevelClamp: f32::NAN, ..INTEGERS },
    ] {
        assert_eq!(texture(&plain, &t, None).0, 1);
    }
    let view = ViewDesc { format: 7, width: 9, height: 4, ..ViewDesc::default() };
    assert_eq!(texture(&plain, &INTEGERS, Some(&view)).0, 1);
    let (mut number, mut most) = (0, 0);
    // SAFETY: locals of the right types.
    unsafe {
        assert_eq!(texture::cuSurfObjectCreate(&raw mut number, &raw const plain), 1);
        ok(texture::cuDeviceGetTexture1DLinearMaxWidth(&raw mut most, FLOAT, 4, 0));
        assert_eq!(most, 1 << 28);
        assert_eq!(texture::cuDeviceGetTexture1DLinearMaxWidth(&raw mut most, FLOAT, 3, 0), 1);
        ok(array::cuArrayDestroy(a));
    }
}

fn references(kernels: &Kernels) {
    let at = kernels.memory;
    let (mut picture, mut again, mut canvas, mut found) = (0, 0, 0, 0);
    let a = create([8, 0, 0], U32, SURFACE);
    let mut back = [0u32; 8];
    // SAFETY: locals of the right types and sizes.
    unsafe {
        ok(module::cuModuleGetTexRef(&raw mut picture, kernels.module, c"picture".as_ptr()));
        ok(module::cuModuleGetTexRef(&raw mut again, kernels.module, c"picture".as_ptr()));
        assert_eq!(picture, again);
        assert_eq!(module::cuModuleGetTexRef(&raw mut again, kernels.module, c"canvas".as_ptr()), 500);
        ok(module::cuModuleGetSurfRef(&raw mut canvas, kernels.module, c"canvas".as_ptr()));
        assert_eq!(reference::cuTexRefDestroy(picture), 1);
        ok(reference::cuTexRefSetAddress_v2(std::ptr::null_mut(), picture, at + 4096, 64));
        ok(reference::cuTexRefSetFlags(picture, 1));
        ok(reference::cuTexRefSetFormat(picture, U32, 1));
        assert_eq!(reference::cuSurfRefGetArray(&raw mut found, canvas), 1);
        ok(reference::cuSurfRefSetArray(canvas, a, 0));
        ok(reference::cuSurfRefGetArray(&raw mut found, canvas));
        assert_eq!(found, a);
        assert_eq!(kernels.run(c"bound", &[at]).1[0], 9);
        ok(copy::cuMemcpyAtoH_v2(back.as_mut_ptr() as u64, a, 0, 32));
        assert_eq!(back[2], 9);
        // The same texture of an array, then of bytes.
        ok(reference::cuTexRefSetArray(picture, a, 1));
        ok(copy::cuMemcpyHtoA_v2(a, 12, [5u32].as_ptr() as u64, 4));
        assert_eq!(kernels.run(c"bound", &[at]).1[0], 5);
        let mut address = 0;
        assert_eq!(reference::cuTexRefGetAddress_v2(&raw mut address, picture), 1);
        ok(copy::cuMemsetD8_v2(at + 4096, 6, 64));
        ok(reference::cuTexRefSetFormat(picture, U8, 1));
        ok(reference::cuTexRefSetAddress_v2(std::ptr::null_mut(), picture, at + 4096, 64));
        assert_eq!(kernels.run(c"bound", &[at]).1[0], 6);
        ok(array::cuArrayDestroy(a));
    }
}
