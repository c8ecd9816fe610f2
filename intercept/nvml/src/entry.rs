//! From C to Rust and back: what every exported function does.

use std::ffi::{CStr, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use gpusession_nvml_calls::{Call, Class, LIST, Param, TEXT, calls, struct_size};

use crate::session::{Session, session};
use crate::status::{self, Result, Status};
use crate::trace;

/// Handles are small numbers that are never followed.
const HANDLES: usize = 0x6770_7500;

/// Runs an exported function's body; a panic ends here.
pub fn guard(name: &str, body: impl FnOnce() -> Result) -> Status {
    let failed = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => return status::SUCCESS,
        Ok(Err(code)) => code,
        Err(_) => status::UNKNOWN,
    };
    trace::failed(name, failed);
    failed
}

/// The handle of a device.
pub fn handle(device: usize) -> usize {
    HANDLES + device
}

/// The device behind a handle.
pub fn device(session: &Session, handle: usize) -> Result<usize> {
    let count = session.count()?;
    handle.checked_sub(HANDLES).filter(|d| *d < count).ok_or(status::INVALID_ARGUMENT)
}

/// Writes to a program's pointer.
///
/// # Safety
/// `to` is null or good for a `T`.
pub unsafe fn out<T>(to: *mut T, value: T) -> Result {
    if to.is_null() {
        return Err(status::INVALID_ARGUMENT);
    }
    // SAFETY: the caller vouches for it.
    unsafe { to.write_unaligned(value) };
    Ok(())
}

/// Writes bytes to a program's pointer.
///
/// # Safety
/// `to` is null or good for as many bytes.
unsafe fn bytes(to: *mut u8, from: &[u8]) -> Result {
    if to.is_null() {
        return Err(status::INVALID_ARGUMENT);
    }
    // SAFETY: the caller vouches for it; the program's memory is not ours.
    unsafe { to.copy_from_nonoverlapping(from.as_ptr(), from.len()) };
    Ok(())
}

/// Writes a C string.
///
/// # Safety
/// `to` is null or good for `room` bytes.
pub unsafe fn text(to: *mut c_char, room: u32, text: &str) -> Result {
    if to.is_null() {
        return Err(status::INVALID_ARGUMENT);
    }
    if text.len() >= room as usize {
        return Err(status::INSUFFICIENT_SIZE);
    }
    // SAFETY: it fits with its end.
    unsafe {
        bytes(to.cast(), text.as_bytes())?;
        to.add(text.len()).write(0);
    }
    Ok(())
}

/// Reads a C string.
///
/// # Safety
/// `from` is null or a C string that stays as it is meanwhile.
pub unsafe fn string<'a>(from: *const c_char) -> Result<&'a str> {
    if from.is_null() {
        return Err(status::INVALID_ARGUMENT);
    }
    // SAFETY: the caller vouches for it.
    unsafe { CStr::from_ptr(from) }.to_str().map_err(|_| status::INVALID_ARGUMENT)
}

/// Writes a list of which the program may ask the length first: `count` says how many there is room for, and is set to how many there
/// are.
///
/// # Safety
/// `count` is null or good, `list` is null or good for `*count` elements.
pub unsafe fn list<T>(count: *mut u32, list: *mut T, items: Vec<T>) -> Result {
    if count.is_null() {
        return Err(status::INVALID_ARGUMENT);
    }
    // SAFETY: the caller vouches for both.
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

/// A call that the table refuses.
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

/// A call that the table forwards; `arguments` are as C passed them, the device first.
///
/// # Safety
/// Pointers are as NVML demands for this call.
pub unsafe fn forward(call: usize, arguments: &[usize]) -> Status {
    let call = &calls()[call];
    guard(call.name, || {
        let Class::Forward(_, params) = &call.class else { return Err(status::UNKNOWN) };
        let mut session = session();
        let (which, arguments) = arguments.split_first().ok_or(status::UNKNOWN)?;
        let device = device(&session, *which)?;
        // SAFETY: the caller vouches for the pointers.
        let input = unsafe { input(&session, device, params, arguments) }?;
        let answer = session.answer(device, call, &[input])?.pop().ok_or(status::UNKNOWN)??;
        // SAFETY: as above.
        unsafe { deliver(call, params, arguments, &answer) }
    })
}

/// The question's input.
///
/// # Safety
/// As for [`forward`].
unsafe fn input(session: &Session, device: usize, params: &[Param], arguments: &[usize]) -> Result<Vec<u8>> {
    let mut input = Vec::new();
    let mut arguments = arguments.iter().copied();
    for param in params {
        let argument = arguments.next().ok_or(status::UNKNOWN)?;
        match param {
            // C leaves what is above a narrow argument undefined.
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
                // SAFETY: every versioned structure begins with its version.
                let version = unsafe { from.cast::<[u8; 4]>().read_unaligned() };
                let size = struct_size(&version)
                    .filter(|size| sizes.contains(size))
                    .ok_or(status::ARGUMENT_VERSION_MISMATCH)?;
                // SAFETY: the structure has the size that its version says.
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

/// Writes the answer's outputs where the program wants them.
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
            // SAFETY: the program vouches for its pointers.
            Param::Out(n) => unsafe { bytes(argument as *mut u8, take(*n)?) }?,
            Param::Struct(_) => {
                // SAFETY: as when it was read.
                let version = unsafe { (argument as *const [u8; 4]).read_unaligned() };
                let size = struct_size(&version).ok_or(status::UNKNOWN)?;
                // SAFETY: as above.
                unsafe { bytes(argument as *mut u8, take(size)?) }?;
            }
            Param::Text => {
                let room = next()? as u32;
                let length = number(take(4)?)? as usize;
                let said = std::str::from_utf8(take(length.min(TEXT))?).map_err(|_| status::UNKNOWN)?;
                // SAFETY: as above.
                unsafe { text(argument as *mut c_char, room, said) }?;
            }
            Param::Bytes(_) => {
                let room = next()? as u32 as usize;
                let length = number(take(4)?)? as usize;
                let all = take(length)?;
                // SAFETY: as above.
                unsafe { bytes(argument as *mut u8, &all[..length.min(room)]) }?;
            }
            Param::List(sizes) => {
                let count = argument as *mut u32;
                let length = number(take(4)?)? as usize;
                if count.is_null() || length > LIST {
                    return Err(status::INVALID_ARGUMENT);
                }
                // SAFETY: as above.
                let room = unsafe { count.read_unaligned() } as usize;
                // SAFETY: as above.
                unsafe { count.write_unaligned(length as u32) };
                for size in sizes {
                    let (to, all) = (next()? as *mut u8, take(length * size)?);
                    match to.is_null() {
                        // Only how many there are is wanted.
                        true if call.name == "nvmlDeviceGetSamples" || length == 0 => {}
                        true => return Err(status::INSUFFICIENT_SIZE),
                        false if room < length => return Err(status::INSUFFICIENT_SIZE),
                        // SAFETY: there is room for as many elements.
                        false => unsafe { bytes(to, all) }?,
                    }
                }
            }
        }
    }
    Ok(())
}
