//! Entry points, error texts, tensor maps, and calls that only tools make.

use std::ffi::{c_char, c_void};

use gpusession_proto::frame::op;

use crate::client::string;
use crate::entry::{INVALID_VALUE, NOT_FOUND, Result, UNKNOWN, bytes, driver, give, give_optional, name};
use crate::proc_address::{self, Missing};
use crate::{clients, errors, private_tables};

/// `CUdriverProcAddress_flags`
const PER_THREAD: u64 = 2;
/// `CUdriverProcAddressQueryResult`
const FOUND: i32 = 0;
const SYMBOL_NOT_FOUND: i32 = 1;
const VERSION_NOT_SUFFICIENT: i32 = 2;

fn proc_address(
    symbol: *const c_char,
    out: *mut *const c_void,
    version: i32,
    flags: u64,
    status: *mut i32,
) -> Result {
    if out.is_null() || flags > 3 {
        return Err(INVALID_VALUE);
    }
    match proc_address::find(name(symbol)?.to_bytes(), version, flags & PER_THREAD != 0) {
        Ok(function) => {
            give_optional(status, FOUND);
            give(out, function as *const c_void)
        }
        Err(missing) => {
            give(out, std::ptr::null())?;
            give_optional(
                status,
                if missing == Missing::Symbol { SYMBOL_NOT_FOUND } else { VERSION_NOT_SUFFICIENT },
            );
            // Without a place for the status, the code alone reports that no such call exists.
            Err(NOT_FOUND)
        }
    }
}

/// Forwards a `cuTensorMapEncode*` call, because only NVIDIA's driver knows the layout of its
/// answer.
///
/// The answer depends on the arguments alone.
fn tensor_map(map: *mut [u64; 16], im2col: bool, rank: u32, scalars: &[u64], arrays: &[&[u8]]) -> Result {
    let client = clients::get()?;
    if map.is_null() || rank == 0 || rank > 5 {
        return Err(INVALID_VALUE);
    }
    let reply = client.call(op::TENSOR_MAP, |w| {
        w.word(u64::from(im2col));
        w.word(u64::from(rank));
        for scalar in scalars {
            w.word(*scalar);
        }
        for array in arrays {
            w.bytes(array);
        }
    })?;
    let mut r = reply.reader();
    let answer = string(&mut r)?;
    let mut words = [0u64; 16];
    if answer.len() != size_of_val(&words) {
        return Err(UNKNOWN);
    }
    for (word, bytes) in words.iter_mut().zip(answer.chunks_exact(8)) {
        *word = u64::from_le_bytes(bytes.try_into().unwrap_or_default());
    }
    give(map, words)
}

driver! {
    fn cuGetProcAddress(symbol: *const c_char, out: *mut *const c_void, version: i32, flags: u64) {
        proc_address(symbol, out, version, flags, std::ptr::null_mut())
    }

    fn cuGetProcAddress_v2 / cuGetProcAddress_v2_ptsz [_default] (
        symbol: *const c_char, out: *mut *const c_void, version: i32, flags: u64, status: *mut i32,
    ) {
        proc_address(symbol, out, version, flags, status)
    }

    fn cuGetErrorName(error: i32, text: *mut *const c_char) {
        match errors::find(error) {
            Some((known, _)) => give(text, known.as_ptr()),
            None => give(text, std::ptr::null()).and(Err(INVALID_VALUE)),
        }
    }

    fn cuGetErrorString(error: i32, text: *mut *const c_char) {
        match errors::find(error) {
            Some((_, known)) => give(text, known.as_ptr()),
            None => give(text, std::ptr::null()).and(Err(INVALID_VALUE)),
        }
    }

    fn cuGetExportTable(table: *mut *const c_void, id: *const [u8; 16]) {
        let id = crate::entry::take(id)?;
        match private_tables::find(&id) {
            Some(known) => give(table, known),
            None => {
                give(table, std::ptr::null())?;
                Err(INVALID_VALUE)
            }
        }
    }

    fn cuTensorMapEncodeTiled(
        map: *mut [u64; 16], kind: i32, rank: u32, address: u64, sizes: *const c_void, strides: *const c_void,
        box_sizes: *const c_void, element_strides: *const c_void, interleave: i32, swizzle: i32, promotion: i32, fill: i32,
    ) {
        let n = rank.min(5) as usize;
        let scalars = [kind, interleave, swizzle, promotion, fill].map(|v| v as u32 as u64);
        let mut words = vec![address];
        words.extend(scalars);
        tensor_map(map, false, rank, &words, &[
            bytes(sizes, n * 8)?,
            bytes(strides, n.saturating_sub(1) * 8)?,
            bytes(box_sizes, n * 4)?,
            bytes(element_strides, n * 4)?,
        ])
    }

    fn cuTensorMapEncodeIm2col(
        map: *mut [u64; 16], kind: i32, rank: u32, address: u64, sizes: *const c_void, strides: *const c_void,
        lower: *const c_void, upper: *const c_void, channels: u32, pixels: u32, element_strides: *const c_void,
        interleave: i32, swizzle: i32, promotion: i32, fill: i32,
    ) {
        let n = rank.min(5) as usize;
        let mut words = vec![address];
        words.extend([kind, interleave, swizzle, promotion, fill].map(|v| v as u32 as u64));
        words.extend([u64::from(channels), u64::from(pixels)]);
        let spatial = n.saturating_sub(2) * 4;
        tensor_map(map, true, rank, &words, &[
            bytes(sizes, n * 8)?,
            bytes(strides, n.saturating_sub(1) * 8)?,
            bytes(lower, spatial)?,
            bytes(upper, spatial)?,
            bytes(element_strides, n * 4)?,
        ])
    }

    /// Accepted without effect: profilers attach on the GPU's host.
    fn cuProfilerStart() {
        clients::get().map(|_| ())
    }

    fn cuProfilerStop() {
        clients::get().map(|_| ())
    }

    fn cuProfilerInitialize(_config: *const c_char, _output: *const c_char, _mode: i32) {
        clients::get().map(|_| ())
    }

    /// Accepted without effect: the driver's log messages stay on the server.
    fn cuLogsRegisterCallback(_function: *const c_void, _data: *mut c_void, handle: *mut u64) {
        give_optional(handle, 1);
        Ok(())
    }

    fn cuLogsUnregisterCallback(_handle: u64) {
        Ok(())
    }

    fn cuLogsCurrent(iterator: *mut u32, _flags: u32) {
        give(iterator, 0)
    }
}
