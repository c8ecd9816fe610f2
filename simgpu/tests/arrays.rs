//! Arrays and mipmapped arrays: their memory, and copies between them and other memory.

mod common;

use common::{machine, ok};
use simgpu::abi::{ArrayDescriptor, MEMORY_ARRAY, MEMORY_DEVICE, MEMORY_HOST, Memcpy2D, Memcpy3D};
use simgpu::exports::{array, context, copy, graph, memory, node, stream};

const FLOAT: u32 = 0x20;
const U8: u32 = 1;

fn create(extent: [usize; 3], format: u32, channels: u32, flags: u32) -> usize {
    let d = ArrayDescriptor::new(extent, format, channels, flags);
    let mut h = 0;
    // SAFETY: locals of the right types.
    unsafe { ok(array::cuArray3DCreate_v2(&raw mut h, &raw const d)) };
    h
}

/// A copy of a box from pageable memory into an array.
fn up(from: &[u8], pitch: usize, to: usize, at: [usize; 3], extent: [usize; 3]) -> Memcpy3D {
    Memcpy3D {
        srcMemoryType: MEMORY_HOST,
        srcHost: from.as_ptr() as u64,
        srcPitch: pitch,
        dstMemoryType: MEMORY_ARRAY,
        dstArray: to,
        dstXInBytes: at[0],
        dstY: at[1],
        dstZ: at[2],
        WidthInBytes: extent[0],
        Height: extent[1],
        Depth: extent[2],
        ..Memcpy3D::default()
    }
}

fn free() -> usize {
    let (mut free, mut total) = (0, 0);
    // SAFETY: locals of the right types.
    unsafe { ok(memory::cuMemGetInfo_v2(&raw mut free, &raw mut total)) };
    free
}

#[test]
fn bytes_arrive_and_stay_inside() {
    let m = machine();
    let before = free();
    let bytes: Vec<u8> = (0..240).collect();
    let mut back = [0u8; 240];
    // SAFETY: locals of the right types and sizes.
    unsafe {
        // Four rows of ten pixels, in six layers.
        let a = create([10, 4, 6], U8, 1, 1);
        assert_eq!(before - free(), 512);
        ok(copy::cuMemcpy3D_v2(&up(&bytes, 10, a, [0; 3], [10, 4, 6])));
        ok(copy::cuMemcpyAtoH_v2(back.as_mut_ptr() as u64, a, 0, 240));
        assert_eq!(&back[..], &bytes[..]);
        // A box inside, and boxes that reach beyond each side.
        ok(copy::cuMemcpy3D_v2(&up(&[255; 8], 2, a, [8, 2, 4], [2, 2, 2])));
        ok(copy::cuMemcpyAtoH_v2(back.as_mut_ptr() as u64, a, 0, 240));
        assert_eq!(back.iter().filter(|byte| **byte == 255).count(), 8);
        assert_eq!((back[4 * 40 + 28], back[5 * 40 + 39], back[5 * 40 + 37]), (255, 255, 237));
        for (at, extent) in [
            ([9, 0, 0], [2, 1, 1]),
            ([0, 3, 0], [2, 2, 1]),
            ([0, 0, 5], [2, 1, 2]),
            ([usize::MAX, 0, 0], [2, 1, 1]),
            ([0, usize::MAX, usize::MAX], [2, 2, 2]),
        ] {
            assert_eq!(copy::cuMemcpy3D_v2(&up(&bytes, 10, a, at, extent)), 1);
        }
        for (offset, bytes) in [(239, 2), (usize::MAX, 2), (0, 241), (2, usize::MAX)] {
            assert_eq!(copy::cuMemcpyAtoD_v2(m.memory, a, offset, bytes), 1);
            assert_eq!(copy::cuMemcpyDtoA_v2(a, offset, m.memory, bytes), 1);
        }
        // From array to array, and through device memory, in a stream.
        let b = create([240, 0, 0], U8, 1, 0);
        ok(copy::cuMemcpyAtoA_v2(b, 10, a, 0, 230));
        ok(copy::cuMemcpyAtoD_v2(m.memory, b, 10, 230));
        ok(copy::cuMemcpyDtoA_v2(b, 0, m.memory, 230));
        ok(context::cuCtxSynchronize());
        back.fill(0);
        ok(copy::cuMemcpyAtoHAsync_v2(back.as_mut_ptr() as u64, b, 0, 230, m.streams[0]));
        assert_eq!((back[0], back[100], back[229]), (0, 100, 255));
        ok(copy::cuMemcpyHtoAAsync_v2(b, 100, bytes.as_ptr() as u64, 4, m.streams[0]));
        ok(stream::cuStreamSynchronize(m.streams[0]));
        ok(copy::cuMemcpyAtoH_v2(back.as_mut_ptr() as u64, b, 99, 6));
        assert_eq!(back[..6], [99, 0, 1, 2, 3, 104]);
        ok(array::cuArrayDestroy(a));
        ok(array::cuArrayDestroy(b));
        assert_eq!(array::cuArrayDestroy(b), 400);
        assert_eq!(copy::cuMemcpyAtoD_v2(m.memory, b, 0, 1), 400);
        assert_eq!(free(), before);
    }
    flat_copies(m.memory);
    levels();
    nodes(m.memory);
}

/// Two-dimensional copies, which begin at a whole element.
fn flat_copies(device: u64) {
    let a = create([8, 4, 0], FLOAT, 2, 0);
    let words: Vec<u32> = (0..64).collect();
    let mut back = [0u32; 4];
    // SAFETY: locals of the right types and sizes.
    unsafe {
        let mut p = std::mem::zeroed::<Memcpy2D>();
        (p.srcMemoryType, p.srcHost, p.srcPitch) = (MEMORY_HOST, words.as_ptr() as u64, 64);
        (p.dstMemoryType, p.dstArray, p.WidthInBytes, p.Height) = (MEMORY_ARRAY, a, 64, 4);
        ok(copy::cuMemcpy2D_v2(&raw const p));
        let mut p = std::mem::zeroed::<Memcpy2D>();
        (p.srcMemoryType, p.srcArray, p.srcXInBytes, p.srcY) = (MEMORY_ARRAY, a, 8, 2);
        (p.dstMemoryType, p.dstDevice, p.dstPitch) = (MEMORY_DEVICE, device, 8);
        (p.WidthInBytes, p.Height) = (8, 2);
        ok(copy::cuMemcpy2DAsync_v2(&raw const p, 0));
        ok(copy::cuMemcpyDtoH_v2(back.as_mut_ptr() as u64, device, 16));
        assert_eq!(back, [34, 35, 50, 51]);
        p.srcXInBytes = 4;
        assert_eq!(copy::cuMemcpy2D_v2(&raw const p), 1);
        (p.srcXInBytes, p.srcY) = (8, 3);
        assert_eq!(copy::cuMemcpy2D_v2(&raw const p), 1);
        (p.srcMemoryType, p.srcY) = (9, 0);
        assert_eq!(copy::cuMemcpy2D_v2(&raw const p), 1);
        ok(array::cuArrayDestroy(a));
    }
}

fn levels() {
    let before = free();
    let d = ArrayDescriptor::new([64, 32, 0], FLOAT, 4, 0);
    let (mut mipmap, mut level, mut again) = (0, 0, 0);
    // SAFETY: locals of the right types.
    unsafe {
        let mut known = std::mem::zeroed::<ArrayDescriptor>();
        ok(array::cuMipmappedArrayCreate(&raw mut mipmap, &raw const d, 100));
        for (number, extent) in [(0, (64, 32)), (3, (8, 4)), (6, (1, 1))] {
            ok(array::cuMipmappedArrayGetLevel(&raw mut level, mipmap, number));
            ok(array::cuArray3DGetDescriptor_v2(&raw mut known, level));
            assert_eq!((known.Width, known.Height, known.Depth), (extent.0, extent.1, 0));
            ok(copy::cuMemcpyHtoA_v2(level, 0, [7u32; 4].as_ptr() as u64, 16));
        }
        ok(array::cuMipmappedArrayGetLevel(&raw mut again, mipmap, 6));
        assert_eq!(level, again);
        assert_eq!(array::cuMipmappedArrayGetLevel(&raw mut again, mipmap, 7), 1);
        assert_eq!(array::cuArrayDestroy(level), 400);
        assert!(before - free() >= 64 * 32 * 16 * 5 / 4);
        ok(array::cuMipmappedArrayDestroy(mipmap));
        assert_eq!(array::cuArray3DGetDescriptor_v2(&raw mut known, level), 400);
        assert_eq!(array::cuMipmappedArrayDestroy(mipmap), 400);
    }
    assert_eq!(free(), before);
}

/// A copy into an array as a node of a graph, which describes it as it was given.
fn nodes(device: u64) {
    let a = create([16, 4, 4], FLOAT, 1, 0);
    let (mut g, mut n, mut exec) = (0, 0, 0);
    let mut back = [0u32; 8];
    let mut known = Memcpy3D::default();
    // SAFETY: locals of the right types and sizes.
    unsafe {
        let mut ctx = 0;
        ok(context::cuCtxGetCurrent(&raw mut ctx));
        ok(copy::cuMemsetD32_v2(device, 77, 8));
        let p = Memcpy3D {
            srcMemoryType: MEMORY_DEVICE,
            srcDevice: device,
            srcPitch: 16,
            ..up(&[], 0, a, [8, 1, 2], [16, 2, 1])
        };
        ok(graph::cuGraphCreate(&raw mut g, 0));
        ok(node::cuGraphAddMemcpyNode(&raw mut n, g, std::ptr::null(), 0, &raw const p, ctx));
        ok(node::cuGraphMemcpyNodeGetParams(n, &raw mut known));
        assert_eq!((known.dstMemoryType, known.dstArray), (MEMORY_ARRAY, a));
        assert_eq!((known.dstXInBytes, known.dstY, known.dstZ), (8, 1, 2));
        let beyond = Memcpy3D { dstZ: 4, ..p };
        assert_eq!(node::cuGraphAddMemcpyNode(&raw mut n, g, std::ptr::null(), 0, &raw const beyond, ctx), 1);
        ok(graph::cuGraphInstantiateWithFlags(&raw mut exec, g, 0));
        ok(graph::cuGraphLaunch(exec, 0));
        ok(context::cuCtxSynchronize());
        ok(copy::cuMemcpyAtoH_v2(back.as_mut_ptr() as u64, a, (2 * 64 + 16) * 4, 32));
        assert_eq!(back, [0, 0, 77, 77, 77, 77, 0, 0]);
        ok(array::cuArrayDestroy(a));
        // The graph outlives the array. This breaks the context, so it comes last.
        ok(graph::cuGraphLaunch(exec, 0));
        assert_eq!(context::cuCtxSynchronize(), 700);
    }
}
