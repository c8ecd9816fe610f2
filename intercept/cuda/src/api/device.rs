//! Devices and primary contexts, answered from the worker's greeting.

use std::collections::HashMap;
use std::ffi::{c_char, c_void};
use std::sync::atomic::Ordering;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use gpusession_proto::frame::{Writer, op};
use gpusession_proto::handle;

use crate::client::{Client, string};
use crate::devices::Device;
use crate::entry::{
    INVALID_CONTEXT, INVALID_DEVICE, INVALID_VALUE, NOT_SUPPORTED, Result, UNKNOWN, alias, bytes, driver,
    give, give_text, name,
};
use crate::{clients, core_dumps, handles, private_tables, thread, unsolicited};

/// Operations in one question about atomics at most.
const MAX_OPERATIONS: u32 = 1024;

/// Devices by the handles of functions that wait for their notices.
fn notices() -> MutexGuard<'static, HashMap<u64, i32>> {
    static NOTICES: LazyLock<Mutex<HashMap<u64, i32>>> = LazyLock::new(Mutex::default);
    NOTICES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns domain, bus, device and function of a device's place.
///
/// The forms are those of `cuDeviceGetByPCIBusId`: "domain:bus:device.function",
/// "domain:bus:device" and "bus:device.function", in hexadecimal numbers.
fn pci_place(text: &[u8]) -> Option<[u32; 4]> {
    let number = |text: &str| {
        let digits = text.bytes().all(|byte| byte.is_ascii_hexdigit());
        u32::from_str_radix(text, 16).ok().filter(|_| digits)
    };
    let text = std::str::from_utf8(text).ok()?;
    let (place, function) = match text.split_once('.') {
        Some((place, function)) => (place, Some(number(function)?)),
        None => (text, None),
    };
    match place.split(':').collect::<Vec<_>>()[..] {
        [domain, bus, device] => {
            Some([number(domain)?, number(bus)?, number(device)?, function.unwrap_or(0)])
        }
        [bus, device] => Some([0, number(bus)?, number(device)?, function?]),
        _ => None,
    }
}

driver! {
    /// None: a remote device has no atomic operations on the program's memory.
    fn cuDeviceGetHostAtomicCapabilities(capabilities: *mut u32, operations: *const i32, count: u32, device: i32) {
        clients::device(device)?;
        if capabilities.is_null() || operations.is_null() || count == 0 {
            return Err(INVALID_VALUE);
        }
        for i in 0..count as usize {
            // SAFETY: the array is not null, so by the call's contract it has `count` elements.
            unsafe { capabilities.add(i).write_unaligned(0) };
        }
        Ok(())
    }

    fn cuInit(flags: u32) {
        if flags != 0 { Err(INVALID_VALUE) } else { clients::init(unsolicited::receiver) }
    }

    fn cuDriverGetVersion(version: *mut i32) {
        give(version, clients::driver_version())
    }

    fn cuDeviceGet(device: *mut i32, ordinal: i32) {
        clients::device(ordinal)?;
        give(device, ordinal)
    }

    fn cuDeviceGetCount(count: *mut i32) {
        give(count, clients::devices()?.len() as i32)
    }

    fn cuDeviceGetName(text: *mut c_char, len: i32, device: i32) {
        give_text(text, len, &clients::device(device)?.1.name)
    }

    fn cuDeviceGetUuid(uuid: *mut [u8; 16], device: i32) {
        give(uuid, clients::device(device)?.1.uuid)
    }

    fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: i32) {
        give(uuid, clients::device(device)?.1.uuid)
    }

    /// Not supported: Windows alone has such ids.
    fn cuDeviceGetLuid(_luid: *mut [u8; 8], _mask: *mut u32, device: i32) {
        clients::device(device)?;
        Err(NOT_SUPPORTED)
    }

    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: i32) {
        give(bytes, clients::device(device)?.1.total_memory as usize)
    }

    fn cuDeviceGetAttribute(value: *mut i32, attribute: i32, device: i32) {
        let (_, device) = clients::device(device)?;
        let known = usize::try_from(attribute).ok().and_then(|i| device.attributes.get(i).copied().flatten());
        give(value, known.ok_or(INVALID_VALUE)?)
    }

    fn cuDeviceGetPCIBusId(text: *mut c_char, len: i32, device: i32) {
        give_text(text, len, &clients::device(device)?.1.pci)
    }

    fn cuDeviceGetByPCIBusId(device: *mut i32, text: *const c_char) {
        let wanted = pci_place(name(text)?.to_bytes()).ok_or(INVALID_DEVICE)?;
        let found = clients::devices()?.position(|d| pci_place(&d.pci) == Some(wanted));
        give(device, found.ok_or(INVALID_DEVICE)? as i32)
    }

    fn cuDeviceComputeCapability(major: *mut i32, minor: *mut i32, device: i32) {
        let (_, device) = clients::device(device)?;
        give(major, device.attribute(75))?;
        give(minor, device.attribute(76))
    }

    /// `CUdevprop`: fourteen integers that are attributes, too.
    fn cuDeviceGetProperties(properties: *mut [i32; 14], device: i32) {
        const ATTRIBUTES: [usize; 14] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14];
        let (_, device) = clients::device(device)?;
        let mut out = [0; 14];
        // maxThreadsPerBlock, maxThreadsDim[3], maxGridSize[3], sharedMemPerBlock,
        // totalConstantMemory, SIMDWidth, memPitch, regsPerBlock, clockRate, textureAlign
        for (slot, attribute) in out.iter_mut().zip(ATTRIBUTES) {
            *slot = device.attribute(attribute);
        }
        give(properties, out)
    }

    fn cuDeviceCanAccessPeer(can: *mut i32, device: i32, peer: i32) {
        let (client, from) = clients::device(device)?;
        let (other, to) = clients::device(peer)?;
        give(can, (client.number == other.number && from.peer(to).is_some_and(|p| p.reached)).into())
    }

    fn cuDeviceGetP2PAttribute(value: *mut i32, attribute: i32, device: i32, peer: i32) {
        let (client, from) = clients::device(device)?;
        let (other, to) = clients::device(peer)?;
        if device == peer {
            return Err(INVALID_DEVICE);
        }
        // Devices of two leases cannot reach each other.
        if client.number != other.number {
            return give(value, 0);
        }
        let place = usize::try_from(attribute - 1).map_err(|_| INVALID_VALUE)?;
        let known = from.peer(to).and_then(|p| p.attributes.get(place).copied());
        give(value, known.flatten().ok_or(INVALID_VALUE)?)
    }

    fn cuDeviceGetP2PAtomicCapabilities(
        capabilities: *mut u32, operations: *const c_void, count: u32, source: i32, target: i32,
    ) {
        let (client, from) = clients::device(source)?;
        let (other, to) = clients::device(target)?;
        if source == target {
            return Err(INVALID_DEVICE);
        }
        if capabilities.is_null() || !(1..=MAX_OPERATIONS).contains(&count) {
            return Err(INVALID_VALUE);
        }
        let operations = bytes(operations, count as usize * 4)?;
        // Devices of two leases cannot reach each other.
        let mut answer = vec![0; operations.len()];
        if client.number == other.number {
            let reply = client.call(op::PEER_ATOMICS, |w| {
                w.word(u64::from(from.local));
                w.word(u64::from(to.local));
                w.bytes(operations);
            })?;
            let told = string(&mut reply.reader())?;
            if told.len() != answer.len() {
                return Err(UNKNOWN);
            }
            answer.copy_from_slice(told);
        }
        // SAFETY: by the call's contract the array has `count` elements of 4 bytes.
        unsafe { capabilities.cast::<u8>().copy_from_nonoverlapping(answer.as_ptr(), answer.len()) };
        Ok(())
    }

    /// A device has no notices for the program: the server refuses memory beyond a share at once.
    fn cuDeviceRegisterAsyncNotification(
        device: i32, function: *const c_void, _data: *mut c_void, callback: *mut u64,
    ) {
        clients::device(device)?;
        if function.is_null() || callback.is_null() {
            return Err(INVALID_VALUE);
        }
        let new = handles::mint(handle::CALLBACK, 0);
        notices().insert(new, device);
        give(callback, new)
    }

    fn cuDeviceUnregisterAsyncNotification(device: i32, callback: u64) {
        clients::device(device)?;
        if notices().get(&callback) != Some(&device) {
            return Err(INVALID_VALUE);
        }
        notices().remove(&callback);
        handles::retire(callback);
        Ok(())
    }

    fn cuDeviceGetExecAffinitySupport(supported: *mut i32, _kind: i32, device: i32) {
        clients::device(device)?;
        give(supported, 0)
    }

    fn cuDevicePrimaryCtxRetain(ctx: *mut *mut c_void, device: i32) {
        let (client, device) = clients::device(device)?;
        core_dumps::before_context(client, device.primary_flags.load(Ordering::Relaxed));
        // Behind a fault no context begins.
        let inactive = device.is_destroyed() || device.retained.load(Ordering::Relaxed) == 0;
        if let Some(fault) = client.fault().filter(|_| inactive) {
            return Err(fault);
        }
        device.retaining.run(thread::id(), || {
            device.set_destroyed(false);
            device.retained.fetch_add(1, Ordering::Relaxed)
        });
        give(ctx, client.primary(device.local) as *mut c_void)
    }

    fn cuDevicePrimaryCtxRelease_v2(device: i32) {
        let (client, device) = clients::device(device)?;
        if device.retained.load(Ordering::Relaxed) == 1 {
            // Before the turn: destructors of the program may wait for a thread that retains.
            private_tables::forget_context(client.primary(device.local));
        }
        device.retaining.run(thread::id(), || {
            let before = device.retained
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1))
                .map_err(|_| INVALID_CONTEXT)?;
            // The last release destroys the context's objects, and none of those that a thread
            // creates after its own retain. Programs call it as they exit, so it does not wait.
            if before > 1 {
                return Ok(());
            }
            let ended = reset(client, device, false);
            device.set_destroyed(true);
            ended
        })
    }

    fn cuDevicePrimaryCtxReset_v2(device: i32) {
        let (client, device) = clients::device(device)?;
        private_tables::forget_context(client.primary(device.local));
        device.retaining.run(thread::id(), || {
            let ended = reset(client, device, true);
            match client.fault() {
                Some(_) => client.reset_after_fault(),
                None => ended?,
            }
            device.set_destroyed(true);
            Ok(())
        })
    }

    fn cuDevicePrimaryCtxGetState(device: i32, flags: *mut u32, active: *mut i32) {
        let (_, device) = clients::device(device)?;
        give(flags, device.primary_flags.load(Ordering::Relaxed))?;
        let retained = device.retained.load(Ordering::Relaxed) > 0;
        give(active, i32::from(retained && !device.is_destroyed()))
    }

    fn cuDevicePrimaryCtxSetFlags_v2(device: i32, flags: u32) {
        check_flags(flags)?;
        let (client, device) = clients::device(device)?;
        device.primary_flags.store(flags, Ordering::Relaxed);
        wait_as(client, flags);
        Ok(())
    }
}

/// Lets the program's threads wait as the flags select that it has set last, for any context.
///
/// The other flags select how a thread waits for a local card.
pub fn wait_as(client: &Client, flags: u32) {
    /// `CU_CTX_SCHED_BLOCKING_SYNC`
    const SLEEPS: u32 = 4;
    client.link.spin.never_long(flags & SLEEPS != 0);
}

/// Returns an error for flags of a context that no release of the driver knows.
pub fn check_flags(flags: u32) -> Result {
    const KNOWN: u32 = 0xff;
    const SCHEDULE: u32 = 7;
    if flags & !KNOWN == 0 && matches!(flags & SCHEDULE, 0 | 1 | 2 | 4) { Ok(()) } else { Err(INVALID_VALUE) }
}

fn reset(client: &Client, device: &Device, wait: bool) -> Result {
    let primary = client.primary(device.local);
    super::memory::end_context(client, primary, primary, wait, || {
        let body = |w: &mut Writer<'_>| w.word(u64::from(device.local));
        if wait {
            client.call(op::PRIMARY_RESET, body).map(drop)
        } else {
            client.post(op::PRIMARY_RESET, body).map(drop)
        }
    })
}

alias! {
    cuDevicePrimaryCtxRelease = cuDevicePrimaryCtxRelease_v2(device: i32);
    cuDevicePrimaryCtxReset = cuDevicePrimaryCtxReset_v2(device: i32);
    cuDevicePrimaryCtxSetFlags = cuDevicePrimaryCtxSetFlags_v2(device: i32, flags: u32);
}

#[cfg(test)]
mod tests {
    use super::pci_place;

    #[test]
    fn place_has_each_documented_form() {
        let place = Some([0, 0x3b, 0, 0]);
        for text in ["00000000:3B:00.0", "0000:3b:00.0", "0:3b:0.0", "0000:3b:00", "3b:00.0"] {
            assert_eq!(pci_place(text.as_bytes()), place, "{text}");
        }
        assert_eq!(pci_place(b"1:3b:0.7"), Some([1, 0x3b, 0, 7]));
        for text in ["", "3b", "3b:00", "0:0:3b:0.0", "0:3b:0.", "0:+3b:0.0", "0:3b:0.x", "0:3b:00.0.0"] {
            assert_eq!(pci_place(text.as_bytes()), None, "{text}");
        }
    }
}
