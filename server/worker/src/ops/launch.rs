//! Kernel launches, and queries about them that only the driver can answer.

use std::ffi::c_void;

use gpusession_proto::frame::Reader;
use gpusession_proto::launch::{ATTRIBUTE, COMPLETION_EVENT, PROGRAMMATIC_EVENT};

use crate::answer::{Answer, Done};
use crate::driver::{Status, check, status};
use crate::session::Session;

const MAX_ATTRIBUTES: usize = 64;
/// `CU_LAUNCH_PARAM_END`, `_BUFFER_POINTER`, `_BUFFER_SIZE`.
const PARAM_END: usize = 0;
pub const PARAM_BUFFER: usize = 1;
pub const PARAM_SIZE: usize = 2;

/// Returns the list that passes a parameter buffer to the driver; it borrows both arguments.
pub fn param_list(bytes: &[u8], size: &mut usize) -> [*mut c_void; 5] {
    let key = |value: usize| std::ptr::without_provenance_mut(value);
    [
        key(PARAM_BUFFER),
        bytes.as_ptr() as *mut c_void,
        key(PARAM_SIZE),
        std::ptr::from_mut(size).cast(),
        key(PARAM_END),
    ]
}

/// `CUlaunchConfig`
#[repr(C)]
struct Config {
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    stream: *mut c_void,
    attributes: *const c_void,
    attribute_count: u32,
}

fn halves(word: u64) -> [u32; 2] {
    [word as u32, (word >> 32) as u32]
}

/// `LAUNCH`: function, grid and block, shared bytes, stream, attributes, parameters.
///
/// A word holds two dimensions.
pub fn launch(session: &Session, r: &mut Reader<'_>) -> Done {
    let func = session.funcs.get(r.word()?)?.object.0;
    let ([gx, gy], [gz, bx], [by, bz]) = (halves(r.word()?), halves(r.word()?), halves(r.word()?));
    let shared = r.word()? as u32;
    let stream = session.stream(r.word()?)?;
    let attributes = r.bytes()?;
    let params = r.bytes()?;
    let mut size = params.len();
    let extra = param_list(params, &mut size);
    // A kernel without parameters takes neither form.
    let extra = if params.is_empty() { std::ptr::null() } else { extra.as_ptr() };
    let call = &session.driver.call;
    if attributes.is_empty() {
        // SAFETY: `func` is a kernel of the driver, which reads `size` bytes of parameters at most.
        return Ok(check(unsafe {
            (call.cuLaunchKernel)(func, gx, gy, gz, bx, by, bz, shared, stream, std::ptr::null(), extra)
        })?);
    }
    let attributes = own_attributes(session, attributes)?;
    let config = Config {
        grid: [gx, gy, gz],
        block: [bx, by, bz],
        shared,
        stream,
        attributes: attributes.as_ptr().cast(),
        attribute_count: (attributes.len() * 8 / ATTRIBUTE) as u32,
    };
    // SAFETY: as above; the configuration has cuda.h's layout and outlives the call.
    Ok(check(unsafe { (call.cuLaunchKernelEx)((&raw const config).cast(), func, std::ptr::null(), extra) })?)
}

/// Replaces the client's event handles in attributes by the driver's, aligned for the driver.
pub fn own_attributes(session: &Session, bytes: &[u8]) -> Result<Vec<u64>, Status> {
    if !bytes.len().is_multiple_of(ATTRIBUTE) || bytes.len() > ATTRIBUTE * MAX_ATTRIBUTES {
        return Err(status::INVALID_VALUE);
    }
    let mut words: Vec<u64> =
        bytes.chunks_exact(8).map(|w| u64::from_le_bytes(w.try_into().unwrap_or_default())).collect();
    for attribute in words.chunks_exact_mut(ATTRIBUTE / 8) {
        if matches!(attribute[0] as u32, PROGRAMMATIC_EVENT | COMPLETION_EVENT) {
            attribute[1] = session.events.get(attribute[1])?.0 as u64;
        }
    }
    Ok(words)
}

/// `OCCUPANCY`: question, function, block size, shared bytes, flags or count, configuration.
///
/// The questions are 0 active blocks, 1 free shared bytes, 2 active clusters, 3 cluster size. Only
/// 2 and 3 have the launch configuration.
pub fn occupancy(session: &Session, r: &mut Reader<'_>, answer: &mut Answer) -> Done {
    let question = r.word()?;
    let func = session.funcs.get(r.word()?)?.object.0;
    let (block, shared, flags) = (r.word()? as i32, r.word()? as usize, r.word()? as u32);
    let call = &session.driver.call;
    match question {
        0 => {
            let mut blocks = 0;
            // SAFETY: the out pointer is valid.
            check(unsafe {
                (call.cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags)(
                    &mut blocks,
                    func,
                    block,
                    shared,
                    flags,
                )
            })?;
            answer.word(blocks as u32 as u64);
        }
        1 => {
            let mut bytes = 0;
            // SAFETY: as above.
            check(unsafe {
                (call.cuOccupancyAvailableDynamicSMemPerBlock)(&mut bytes, func, flags as i32, block)
            })?;
            answer.word(bytes as u64);
        }
        2 | 3 => {
            let ([gx, gy], [gz, bx], [by, bz]) = (halves(r.word()?), halves(r.word()?), halves(r.word()?));
            let stream = session.stream(r.word()?)?;
            let attributes = own_attributes(session, r.bytes()?)?;
            let config = Config {
                grid: [gx, gy, gz],
                block: [bx, by, bz],
                shared: shared as u32,
                stream,
                attributes: attributes.as_ptr().cast(),
                attribute_count: (attributes.len() * 8 / ATTRIBUTE) as u32,
            };
            let config = (&raw const config).cast();
            let mut clusters = 0;
            // SAFETY: as above; the configuration has cuda.h's layout and outlives the call.
            check(unsafe {
                if question == 2 {
                    (call.cuOccupancyMaxActiveClusters)(&mut clusters, func, config)
                } else {
                    (call.cuOccupancyMaxPotentialClusterSize)(&mut clusters, func, config)
                }
            })?;
            answer.word(clusters as u32 as u64);
        }
        _ => return Err(status::INVALID_VALUE.into()),
    }
    Ok(())
}
