//! Tensor maps, which only NVIDIA's driver knows how to encode and to change.

use std::ffi::c_void;

use gpusession_link::Reply;
use gpusession_proto::frame::{Reader, op};

use crate::client::{string, word};
use crate::entry::{INVALID_VALUE, Result, UNKNOWN, bytes, driver, give, give_optional, take};
use crate::{clients, mapped};

/// `CUtensorMap`
type Map = [u64; 16];

/// Kinds of maps in `TENSOR_MAP`.
mod form {
    pub const TILED: u64 = 0;
    pub const IM2COL: u64 = 1;
    pub const IM2COL_WIDE: u64 = 2;
}

/// Changes in `TENSOR_MAP_CHANGE`.
mod change {
    pub const ADDRESS: u64 = 0;
    pub const CLASS: u64 = 1;
}

/// `CU_TENSOR_MAP_ALLOC_CLASS_SMALL`
const SMALL: u32 = 1;

fn read_map(r: &mut Reader<'_>) -> Result<Map> {
    let answer = string(r)?;
    let mut words: Map = [0; 16];
    if answer.len() != size_of_val(&words) {
        return Err(UNKNOWN);
    }
    for (word, bytes) in words.iter_mut().zip(answer.chunks_exact(8)) {
        *word = u64::from_le_bytes(bytes.try_into().unwrap_or_default());
    }
    Ok(words)
}

/// Forwards a `cuTensorMapEncode*` call, whose answer depends on the arguments alone.
///
/// The first scalar is the address.
fn encode(map: *mut Map, form: u64, rank: u32, scalars: &[u64], arrays: &[&[u8]]) -> Result {
    let client = clients::get()?;
    if map.is_null() || rank == 0 || rank > 5 {
        return Err(INVALID_VALUE);
    }
    mapped::named(client, scalars[0])?;
    let reply = client.call(op::TENSOR_MAP, |w| {
        w.word(form);
        w.word(u64::from(rank));
        for scalar in scalars {
            w.word(*scalar);
        }
        for array in arrays {
            w.bytes(array);
        }
    })?;
    give(map, read_map(&mut reply.reader())?)
}

fn changed(map: &Map, change: u64, value: u64) -> Result<Reply> {
    clients::get()?.call(op::TENSOR_MAP_CHANGE, |w| {
        w.bytes(&map.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>());
        w.word(change);
        w.word(value);
    })
}

driver! {
    fn cuTensorMapEncodeTiled(
        map: *mut Map, kind: i32, rank: u32, address: u64, sizes: *const c_void, strides: *const c_void,
        box_sizes: *const c_void, element_strides: *const c_void, interleave: i32, swizzle: i32, promotion: i32, fill: i32,
    ) {
        let n = rank.min(5) as usize;
        let scalars = [kind, interleave, swizzle, promotion, fill].map(|v| v as u32 as u64);
        let mut words = vec![address];
        words.extend(scalars);
        encode(map, form::TILED, rank, &words, &[
            bytes(sizes, n * 8)?,
            bytes(strides, n.saturating_sub(1) * 8)?,
            bytes(box_sizes, n * 4)?,
            bytes(element_strides, n * 4)?,
        ])
    }

    fn cuTensorMapEncodeIm2col(
        map: *mut Map, kind: i32, rank: u32, address: u64, sizes: *const c_void, strides: *const c_void,
        lower: *const c_void, upper: *const c_void, channels: u32, pixels: u32, element_strides: *const c_void,
        interleave: i32, swizzle: i32, promotion: i32, fill: i32,
    ) {
        let n = rank.min(5) as usize;
        let mut words = vec![address];
        words.extend([kind, interleave, swizzle, promotion, fill].map(|v| v as u32 as u64));
        words.extend([u64::from(channels), u64::from(pixels)]);
        let spatial = n.saturating_sub(2) * 4;
        encode(map, form::IM2COL, rank, &words, &[
            bytes(sizes, n * 8)?,
            bytes(strides, n.saturating_sub(1) * 8)?,
            bytes(lower, spatial)?,
            bytes(upper, spatial)?,
            bytes(element_strides, n * 4)?,
        ])
    }

    fn cuTensorMapEncodeIm2colWide(
        map: *mut Map, kind: i32, rank: u32, address: u64, sizes: *const c_void, strides: *const c_void,
        lower: i32, upper: i32, channels: u32, pixels: u32, element_strides: *const c_void,
        interleave: i32, mode: i32, swizzle: i32, promotion: i32, fill: i32,
    ) {
        let n = rank.min(5) as usize;
        let mut words = vec![address];
        words.extend([kind, interleave, swizzle, promotion, fill].map(|v| v as u32 as u64));
        words.extend([u64::from(channels), u64::from(pixels)]);
        words.extend([lower, upper, mode].map(|v| v as u32 as u64));
        encode(map, form::IM2COL_WIDE, rank, &words, &[
            bytes(sizes, n * 8)?,
            bytes(strides, n.saturating_sub(1) * 8)?,
            bytes(element_strides, n * 4)?,
        ])
    }

    fn cuTensorMapReplaceAddress(map: *mut Map, address: u64) {
        mapped::named(clients::get()?, address)?;
        let reply = changed(&take(map)?, change::ADDRESS, address)?;
        give(map, read_map(&mut reply.reader())?)
    }

    fn cuTensorMapSetAllocationClass(map: *mut Map, class: u32, now: *mut u32) {
        give_optional(now, SMALL);
        let reply = changed(&take(map)?, change::CLASS, u64::from(class))?;
        let mut r = reply.reader();
        give(map, read_map(&mut r)?)?;
        give_optional(now, word(&mut r)? as u32);
        Ok(())
    }
}
