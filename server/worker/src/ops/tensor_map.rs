//! Tensor maps: descriptions of memory for the card's copy engine, in the driver's own code.

use gpusession_proto::frame::Reader;

use crate::answer::{Answer, Done};
use crate::driver::{check, status};
use crate::session::Session;

/// `CUtensorMap`: 128 bytes, aligned to 64.
#[repr(C, align(64))]
struct TensorMap([u8; 128]);

fn wide(bytes: &[u8]) -> Vec<u64> {
    bytes.chunks_exact(8).map(|w| u64::from_le_bytes(w.try_into().unwrap_or_default())).collect()
}

fn narrow(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks_exact(4).map(|w| u32::from_le_bytes(w.try_into().unwrap_or_default())).collect()
}

/// `TENSOR_MAP`: form (0 tiled, 1 im2col, 2 wide im2col), rank, address, scalars, arrays.
///
/// It answers the encoded map.
pub fn encode(session: &Session, r: &mut Reader<'_>, answer: &mut Answer) -> Done {
    let (form, rank, address) = (r.word()?, r.word()? as u32, r.word()?);
    let mut scalars = [0; 10];
    let count = match form {
        0 => 5,
        1 => 7,
        2 => 10,
        _ => return Err(status::INVALID_VALUE.into()),
    };
    for scalar in &mut scalars[..count] {
        *scalar = r.word()? as i32;
    }
    let [kind, interleave, swizzle, promotion, fill, channels, pixels, lower, upper, mode] = scalars;
    let n = match rank {
        1..=5 => rank as usize,
        _ => return Err(status::INVALID_VALUE.into()),
    };
    let (sizes, strides) = (wide(r.bytes()?), wide(r.bytes()?));
    let mut lists = [const { Vec::new() }; 3];
    let spatial = n.saturating_sub(2);
    let lengths: &[usize] = match form {
        0 => &[n, n],
        1 => &[spatial, spatial, n],
        _ => &[n],
    };
    for (list, len) in lists.iter_mut().zip(lengths) {
        *list = narrow(r.bytes()?);
        if list.len() != *len {
            return Err(status::INVALID_VALUE.into());
        }
    }
    if sizes.len() != n || strides.len() != n - 1 {
        return Err(status::INVALID_VALUE.into());
    }
    let mut map = TensorMap([0; 128]);
    let call = &session.driver.call;
    let out = (&raw mut map).cast();
    let (sizes, strides) = (sizes.as_ptr(), strides.as_ptr());
    let [first, second, third] = lists.each_ref().map(Vec::as_ptr);
    let (channels, pixels) = (channels as u32, pixels as u32);
    // SAFETY: the map has the driver's size and alignment; each array has the number of elements
    // that the rank demands.
    check(unsafe {
        match form {
            0 => (call.cuTensorMapEncodeTiled)(
                out, kind, rank, address, sizes, strides, first, second, interleave, swizzle, promotion, fill,
            ),
            1 => (call.cuTensorMapEncodeIm2col)(
                out,
                kind,
                rank,
                address,
                sizes,
                strides,
                first.cast(),
                second.cast(),
                channels,
                pixels,
                third,
                interleave,
                swizzle,
                promotion,
                fill,
            ),
            _ => (call.cuTensorMapEncodeIm2colWide)(
                out, kind, rank, address, sizes, strides, lower, upper, channels, pixels, first, interleave,
                mode, swizzle, promotion, fill,
            ),
        }
    })?;
    answer.bytes(&map.0);
    Ok(())
}

/// `TENSOR_MAP_CHANGE`: map, change (0 address, 1 allocation class), value.
///
/// It answers the changed map, and the class if that changes.
pub fn change(session: &Session, r: &mut Reader<'_>, answer: &mut Answer) -> Done {
    let mut map = TensorMap(r.bytes()?.try_into().map_err(|_| status::INVALID_VALUE)?);
    let (change, value) = (r.word()?, r.word()?);
    let call = &session.driver.call;
    let mut class = 0;
    // SAFETY: the map has the driver's size and alignment; the out pointer is valid.
    check(unsafe {
        match change {
            0 => (call.cuTensorMapReplaceAddress)((&raw mut map).cast(), value),
            1 => (call.cuTensorMapSetAllocationClass)((&raw mut map).cast(), value as u32, &mut class),
            _ => status::INVALID_VALUE,
        }
    })?;
    answer.bytes(&map.0);
    if change == 1 {
        answer.word(u64::from(class));
    }
    Ok(())
}
