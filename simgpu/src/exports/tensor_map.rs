//! Tensor maps. Their layout is the driver's secret, so this one is opaque, too: the address, then
//! everything else that was given. No simulated instruction uses them.

use super::{out, out_opt, read, slice};
use crate::driver::driver;
use crate::errors::{INVALID_VALUE, Result};
use crate::export;

/// `CUtensorMap`
type Map = [u64; 16];
/// Words of a map: the address, a mark of maps that were encoded, the allocation class.
const ADDRESS: usize = 0;
const MARK: usize = 1;
const CLASS: usize = 2;
/// First word of the rest.
const REST: usize = 3;
const ENCODED: u64 = 0x7465_6e73_6f72;
/// `CU_TENSOR_MAP_ALLOC_CLASS_AUTO`, `_SMALL` and `_LARGE`
const CLASSES: std::ops::RangeInclusive<u32> = 0..=2;
const SMALL: u32 = 1;

struct Arrays<'a> {
    sizes: &'a [u64],
    strides: &'a [u64],
    small: Vec<&'a [u32]>,
}

unsafe fn arrays<'a>(
    rank: u32,
    sizes: *const u64,
    strides: *const u64,
    small: &[(*const u32, usize)],
) -> Result<Arrays<'a>> {
    if !(1..=5).contains(&rank) {
        return Err(INVALID_VALUE);
    }
    let n = rank as usize;
    // SAFETY: the program vouches for its pointers.
    unsafe {
        let small = small.iter().map(|(list, len)| slice(*list, *len)).collect::<Result<_>>()?;
        Ok(Arrays { sizes: slice(sizes, n)?, strides: slice(strides, n - 1)?, small })
    }
}

unsafe fn encode(to: *mut Map, address: u64, scalars: &[i32], arrays: &Arrays<'_>) -> Result {
    driver()?;
    // cuda.h demands alignments of 64 and 16 bytes, and sizes between 1 and 2^32.
    if !(to as usize).is_multiple_of(64) || !address.is_multiple_of(16) {
        return Err(INVALID_VALUE);
    }
    if arrays.sizes.iter().any(|size| *size == 0 || *size > 1 << 32) {
        return Err(INVALID_VALUE);
    }
    if arrays.strides.iter().any(|stride| !stride.is_multiple_of(16)) {
        return Err(INVALID_VALUE);
    }
    let small = arrays.small.iter().flat_map(|list| list.iter().map(|value| u64::from(*value)));
    let scalars = scalars.iter().map(|value| u64::from(*value as u32));
    let all = arrays.sizes.iter().chain(arrays.strides).copied().chain(small).chain(scalars);
    let mut map: Map = [0; 16];
    for (i, value) in all.enumerate() {
        let word = &mut map[REST + i % (16 - REST)];
        *word = word.rotate_left(7) ^ value;
    }
    (map[ADDRESS], map[MARK], map[CLASS]) = (address, ENCODED, u64::from(SMALL));
    // SAFETY: the program vouches for its pointers.
    unsafe { out(to, map) }
}

unsafe fn encoded(map: *mut Map) -> Result<Map> {
    driver()?;
    // SAFETY: the program vouches for its pointers.
    let known = unsafe { read(map)? };
    if known[MARK] != ENCODED { Err(INVALID_VALUE) } else { Ok(known) }
}

export! {
    fn cuTensorMapEncodeTiled(
        to: *mut Map, kind: i32, rank: u32, address: u64, sizes: *const u64, strides: *const u64,
        boxes: *const u32, steps: *const u32, interleave: i32, swizzle: i32, promotion: i32, fill: i32
    ) {
        let n = rank as usize;
        let arrays = arrays(rank, sizes, strides, &[(boxes, n), (steps, n)])?;
        encode(to, address, &[0, kind, interleave, swizzle, promotion, fill], &arrays)
    }
    fn cuTensorMapEncodeIm2col(
        to: *mut Map, kind: i32, rank: u32, address: u64, sizes: *const u64, strides: *const u64,
        lower: *const u32, upper: *const u32, channels: u32, pixels: u32, steps: *const u32,
        interleave: i32, swizzle: i32, promotion: i32, fill: i32
    ) {
        let (n, spatial) = (rank as usize, (rank as usize).saturating_sub(2));
        let arrays = arrays(rank, sizes, strides, &[(lower, spatial), (upper, spatial), (steps, n)])?;
        let scalars = [1, kind, interleave, swizzle, promotion, fill, channels as i32, pixels as i32];
        encode(to, address, &scalars, &arrays)
    }
    fn cuTensorMapEncodeIm2colWide(
        to: *mut Map, kind: i32, rank: u32, address: u64, sizes: *const u64, strides: *const u64,
        lower: i32, upper: i32, channels: u32, pixels: u32, steps: *const u32,
        interleave: i32, mode: i32, swizzle: i32, promotion: i32, fill: i32
    ) {
        // It takes tensors of three dimensions or more.
        if rank < 3 {
            return Err(INVALID_VALUE);
        }
        let arrays = arrays(rank, sizes, strides, &[(steps, rank as usize)])?;
        let (channels, pixels) = (channels as i32, pixels as i32);
        let scalars = [2, kind, interleave, mode, swizzle, promotion, fill, channels, pixels, lower, upper];
        encode(to, address, &scalars, &arrays)
    }
    fn cuTensorMapReplaceAddress(map: *mut Map, address: u64) {
        let mut known = encoded(map)?;
        if !address.is_multiple_of(16) {
            return Err(INVALID_VALUE);
        }
        known[ADDRESS] = address;
        out(map, known)
    }
    fn cuTensorMapSetAllocationClass(map: *mut Map, class: u32, now: *mut u32) {
        out_opt(now, SMALL);
        let mut known = encoded(map)?;
        if !CLASSES.contains(&class) {
            return Err(INVALID_VALUE);
        }
        known[CLASS] = u64::from(class.max(SMALL));
        out_opt(now, class.max(SMALL));
        out(map, known)
    }
}
