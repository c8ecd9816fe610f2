//! The edge to C: the common parts of all exported functions.

use std::ffi::{CStr, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use gpusession_nvml_calls::{Call, Class, LIST, Param, TEXT, calls, struct_size};

use crate::session::{Session, session};
use crate::status::{self, Result, Status};
use crate::trace;

/// Handle of the first device; handles are consecutive numbers and never dereferenced.
const HANDLES: usize = 0x6770_7500;

/// Runs an exported function's body, and turns a panic into `UNKNOWN`.
pub fn guard(name: &str, body: impl FnOnce() -> Result) -> Status {
    let failed = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => return status::SUCCESS,
        Ok(Err(code)) => code,
        Err(_) => status::UNKNOWN,
    };
    trace::failed(name, failed);
    failed
}

/// Returns the handle of a device.
pub fn handle(device: usize) -> usize {
    HANDLES + device
}

/// Returns the device behind a handle; an error before `nvmlInit`.
pub fn device(session: &Session, handle: usize) -> Result<usize> {
    let count = session.count()?;
    handle.checked_sub(HANDLES).filter(|d| *d < count).ok_or(status::INVALID_ARGUMENT)
}

/// Writes a value to a program's pointer; null is an error.
///
/// # Safety
/// `to` is null or valid for a `T`.
pub unsafe fn out<T>(to: *mut T, value: T) -> Result {
    if to.is_null() {
        return Err(status::INVALID_ARGUMENT);
    }
    // SAFETY: the pointer is not null, so by this function's contract it is valid.
    unsafe { to.write_unaligned(value) };
    Ok(())
}

/// Writes bytes to a program's pointer; null is an error.
///
/// # Safety
/// `to` is null or valid for as many bytes.
unsafe fn bytes(to: *mut u8, from: &[u8]) -> Result {
    if to.is_null() {
        return Err(status::INVALID_ARGUMENT);
    }
    // SAFETY: the pointer is not null, so by this function's contract it is valid. The program's
    // memory does not overlap ours.
    unsafe { to.copy_from_nonoverlapping(from.as_ptr(), from.len()) };
    Ok(())
}

/// Writes a C string.
///
/// # Safety
/// `to` is null or valid for `room` bytes.
pub unsafe fn text(to: *mut c_char, room: u32, text: &str) -> Result {
    if to.is_null() {
        return Err(status::INVALID_ARGUMENT);
    }
    if text.len() >= room as usize {
        return Err(status::INSUFFICIENT_SIZE);
    }
    // SAFETY: text and terminator fit into `room` bytes, which the contract gives.
    unsafe {
        bytes(to.cast(), text.as_bytes())?;
        to.add(text.len()).write(0);
    }
    Ok(())
}

/// Reads a C string.
///
/// # Safety
/// `from` is null or a C string that does not change during the call.
pub unsafe fn string<'a>(from: *const c_char) -> Result<&'a str> {
    if from.is_null() {
        return Err(status::INVALID_ARGUMENT);
    }
    // SAFETY: the pointer is not null, so by this function's contract it is a C string.
    unsafe { CStr::from_ptr(from) }.to_str().map_err(|_| status::INVALID_ARGUMENT)
}

/// Writes a list whose length the program may ask for first.
///
/// `count` holds the number of elements that fit, and receives the number of elements.
///
/// # Safety
/// `count` is null or valid, `list` is null or valid for `*count` elements.
pub unsafe fn list<T>(count: *mut u32, list: *mut T, items: Vec<T>) -> Result {
    if count.is_null() {
        return Err(status::INVALID_ARGUMENT);
    }
    // SAFETY: by this function's contract both are valid if not null, and the length is checked.
    unsafe {
        let room = count.read_unaligned() as usize;
        count.write_unaligned(items.len() as u32);
        if items.is_empty() {
            return Ok(());
        }
        if room < items.len() || list.is_null() {
            return Err(status::INSUFFICIENT_SIZE);
        }
        for (i, item) in items.into_iter().enumerate() {
            list.add(i).write_unaligned(item);
        }
    }
    Ok(())
}

/// Answers a call that the table refuses.
pub fn refuse(call: usize) -> Status {
    let call = &calls()[call];
    guard(call.name, || match call.class {
        Class::Denied(reason) => {
            trace::missing(call.name, reason);
            Err(status::NO_PERMISSION)
        }
        Class::None(reason) => {
            trace::missing(call.name, reason);
            Err(status::NOT_SUPPORTED)
        }
        _ => Err(status::UNKNOWN),
    })
}

/// Forwards a call as the table describes; `arguments` are C's, the device first.
///
/// # Safety
/// Pointers are as NVML requires for this call.
pub unsafe fn forward(call: usize, arguments: &[usize]) -> Status {
    let call = &calls()[call];
    guard(call.name, || {
        let Class::Forward(_, params) = &call.class else { return Err(status::UNKNOWN) };
        let mut session = session();
        let (which, arguments) = arguments.split_first().ok_or(status::UNKNOWN)?;
        let device = device(&session, *which)?;
        // SAFETY: by this function's contract the pointers are as NVML requires.
        let input = unsafe { input(&session, device, params, arguments) }?;
        let answer = session.answer(device, call, &[input])?.pop().ok_or(status::UNKNOWN)??;
        // SAFETY: by this function's contract the pointers are as NVML requires.
        unsafe { deliver(call, params, arguments, &answer) }
    })
}

/// Returns the question's input, read from the arguments.
///
/// # Safety
/// As for [`forward`].
unsafe fn input(session: &Session, device: usize, params: &[Param], arguments: &[usize]) -> Result<Vec<u8>> {
    let mut input = Vec::new();
    let mut arguments = arguments.iter().copied();
    for param in params {
        let argument = arguments.next().ok_or(status::UNKNOWN)?;
        match param {
            // Takes only the low bytes: C leaves those above a narrow argument undefined.
            Param::Number(size, _) => input.extend_from_slice(&argument.to_le_bytes()[..*size]),
            Param::Peer => {
                let peer = self::device(session, argument)?;
                if session.known(peer)?.lease != session.known(device)?.lease {
                    return Err(status::NOT_SUPPORTED);
                }
                input.extend_from_slice(&session.uuid(peer)?);
            }
            Param::Struct(sizes) => {
                let from = argument as *const u8;
                if from.is_null() {
                    return Err(status::INVALID_ARGUMENT);
                }
                // SAFETY: the pointer is not null, and every versioned structure begins with its
                // version.
                let version = unsafe { from.cast::<[u8; 4]>().read_unaligned() };
                let size = struct_size(&version)
                    .filter(|size| sizes.contains(size))
                    .ok_or(status::ARGUMENT_VERSION_MISMATCH)?;
                // SAFETY: by NVML's contract the structure has the size that its version contains.
                input.extend_from_slice(unsafe { std::slice::from_raw_parts(from, size) });
            }
            _ => {}
        }
        for _ in 1..param.arguments() {
            arguments.next();
        }
    }
    Ok(input)
}

/// Writes the answer's outputs to the program's pointers.
///
/// # Safety
/// As for [`forward`].
unsafe fn deliver(call: &Call, params: &[Param], arguments: &[usize], answer: &[u8]) -> Result {
    let mut rest = answer;
    let mut take = |n: usize| -> Result<&[u8]> {
        let (mine, left) = rest.split_at_checked(n).ok_or(status::UNKNOWN)?;
        rest = left;
        Ok(mine)
    };
    let number = |bytes: &[u8]| bytes.try_into().map(u32::from_le_bytes).map_err(|_| status::UNKNOWN);
    let mut arguments = arguments.iter().copied();
    let mut next = || arguments.next().ok_or(status::UNKNOWN);
    for param in params {
        let argument = next()?;
        match param {
            Param::Number(..) | Param::Peer => {}
            // SAFETY: by NVML's contract the pointer is null or valid for `n` bytes.
            Param::Out(n) => unsafe { bytes(argument as *mut u8, take(*n)?) }?,
            Param::Struct(_) => {
                // SAFETY: `input` has read the version at this pointer before.
                let version = unsafe { (argument as *const [u8; 4]).read_unaligned() };
                let size = struct_size(&version).ok_or(status::UNKNOWN)?;
                // SAFETY: by NVML's contract the structure has the size that its version contains.
                unsafe { bytes(argument as *mut u8, take(size)?) }?;
            }
            Param::Text => {
                let room = next()? as u32;
                let length = number(take(4)?)? as usize;
                let said = std::str::from_utf8(take(length.min(TEXT))?).map_err(|_| status::UNKNOWN)?;
                // SAFETY: by NVML's contract the pointer is null or valid for `room` bytes.
                unsafe { text(argument as *mut c_char, room, said) }?;
            }
            Param::Bytes(_) => {
                let room = next()? as u32 as usize;
                let length = number(take(4)?)? as usize;
                let all = take(length)?;
                // SAFETY: by NVML's contract the pointer is null or valid for `room` bytes.
                unsafe { bytes(argument as *mut u8, &all[..length.min(room)]) }?;
            }
            Param::List(sizes) => {
                let count = argument as *mut u32;
                let length = number(take(4)?)? as usize;
                if count.is_null() || length > LIST {
                    return Err(status::INVALID_ARGUMENT);
                }
                // SAFETY: the pointer is not null, so by NVML's contract it is valid.
                let room = unsafe { count.read_unaligned() } as usize;
                // SAFETY: the pointer is not null, so by NVML's contract it is valid.
                unsafe { count.write_unaligned(length as u32) };
                for size in sizes {
                    let (to, all) = (next()? as *mut u8, take(length * size)?);
                    match to.is_null() {
                        // The program requests only the number.
                        true if call.name == "nvmlDeviceGetSamples" || length == 0 => {}
                        true => return Err(status::INSUFFICIENT_SIZE),
                        false if room < length => return Err(status::INSUFFICIENT_SIZE),
                        // SAFETY: the pointer is not null, and the list has room for at least
                        // `length` elements.
                        false => unsafe { bytes(to, all) }?,
                    }
                }
            }
        }
    }
    Ok(())
}
