//! Initialisation, errors, devices.

use super::{out, slice, text};
use crate::abi::DevProp;
use crate::driver::context::current;
use crate::driver::{self, config, driver};
use crate::errors::{self, INVALID_DEVICE, INVALID_VALUE};
use crate::export;
use crate::registry::Registry;
use std::ffi::c_char;
use std::sync::Arc;

/// Devices of registered functions for notices.
static NOTICES: Registry<i32> = Registry::new();

/// Copies a string into the program's buffer, truncated to its length.
unsafe fn put_text(to: *mut c_char, len: i32, from: &str) -> errors::Result {
    let room = usize::try_from(len).ok().filter(|n| *n > 0 && !to.is_null()).ok_or(INVALID_VALUE)?;
    let n = from.len().min(room - 1);
    // SAFETY: the program vouches for `len` bytes.
    unsafe {
        std::ptr::copy_nonoverlapping(from.as_ptr(), to.cast(), n);
        to.add(n).write(0);
    }
    Ok(())
}

export! {
    fn cuInit(flags: u32) {
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        driver::init()
    }

    fn cuDriverGetVersion(version: *mut i32) {
        out(version, config().driver_version as i32)
    }

    fn cuGetErrorName(code: u32, name: *mut *const c_char) {
        match errors::name(code) {
            Some(s) => out(name, s.as_ptr()),
            None => {
                out(name, std::ptr::null())?;
                Err(INVALID_VALUE)
            }
        }
    }

    fn cuGetErrorString(code: u32, string: *mut *const c_char) {
        match errors::text(code) {
            Some(s) => out(string, s.as_ptr()),
            None => {
                out(string, std::ptr::null())?;
                Err(INVALID_VALUE)
            }
        }
    }

    fn cuDeviceGetCount(count: *mut i32) {
        out(count, driver()?.devices.len() as i32)
    }

    fn cuDeviceGet(device: *mut i32, ordinal: i32) {
        driver()?.device(ordinal)?;
        out(device, ordinal)
    }

    fn cuDeviceGetName(name: *mut c_char, len: i32, device: i32) {
        driver()?.device(device)?;
        put_text(name, len, &config().name)
    }

    fn cuDeviceGetUuid(uuid: *mut [u8; 16], device: i32) {
        out(uuid, driver()?.device(device)?.uuid)
    }

    fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: i32) {
        out(uuid, driver()?.device(device)?.uuid)
    }

    fn cuDeviceGetLuid(_luid: *mut c_char, _mask: *mut u32, device: i32) {
        driver()?.device(device)?;
        // As on Linux, which has no LUIDs.
        Err(errors::NOT_SUPPORTED)
    }

    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: i32) {
        driver()?.device(device)?;
        out(bytes, config().memory as usize)
    }

    fn cuDeviceGetAttribute(value: *mut i32, attribute: u32, device: i32) {
        let v = driver()?.device(device)?.attribute(attribute).ok_or(INVALID_VALUE)?;
        out(value, v)
    }

    fn cuDeviceComputeCapability(major: *mut i32, minor: *mut i32, device: i32) {
        driver()?.device(device)?;
        out(major, 7)?;
        out(minor, 5)
    }

    fn cuDeviceGetProperties(properties: *mut DevProp, device: i32) {
        let d = driver()?.device(device)?;
        let a = |id| d.attribute(id).unwrap_or(0);
        out(properties, DevProp {
            maxThreadsPerBlock: a(1),
            maxThreadsDim: [a(2), a(3), a(4)],
            maxGridSize: [a(5), a(6), a(7)],
            sharedMemPerBlock: a(8),
            totalConstantMemory: a(9),
            SIMDWidth: a(10),
            memPitch: a(11),
            regsPerBlock: a(12),
            clockRate: a(13),
            textureAlign: a(14),
        })
    }

    fn cuDeviceGetPCIBusId(id: *mut c_char, len: i32, device: i32) {
        put_text(id, len, &driver()?.device(device)?.pci_id())
    }

    fn cuDeviceGetByPCIBusId(device: *mut i32, id: *const c_char) {
        let wanted = text(id)?.to_ascii_uppercase();
        let d = driver()?;
        let found = d.devices.iter().find(|d| {
            let full = d.pci_id();
            wanted == full || wanted == full[5..] || wanted == full[..10]
        });
        out(device, found.ok_or(INVALID_DEVICE)?.ordinal as i32)
    }

    fn cuDeviceGetExecAffinitySupport(value: *mut i32, _kind: u32, device: i32) {
        driver()?.device(device)?;
        out(value, 0)
    }

    fn cuDeviceCanAccessPeer(can: *mut i32, device: i32, peer: i32) {
        let d = driver()?;
        d.device(device)?;
        d.device(peer)?;
        out(can, i32::from(device != peer && d.config.peers))
    }

    fn cuDeviceGetP2PAttribute(value: *mut i32, attribute: u32, from: i32, to: i32) {
        let d = driver()?;
        d.device(from)?;
        d.device(to)?;
        if from == to {
            return Err(INVALID_DEVICE);
        }
        match attribute {
            // Performance rank, access, native atomics, access to arrays.
            1 => out(value, 0),
            2 => out(value, i32::from(d.config.peers)),
            3 | 4 => out(value, 0),
            5 => out(value, 0),
            _ => Err(INVALID_VALUE),
        }
    }

    // No processor of the host shares atomics with the device.
    fn cuDeviceGetHostAtomicCapabilities(to: *mut u32, operations: *const u32, n: u32, device: i32) {
        driver()?.device(device)?;
        if to.is_null() || slice(operations, n as usize)?.is_empty() {
            return Err(INVALID_VALUE);
        }
        for i in 0..n as usize {
            out(to.add(i), 0)?;
        }
        Ok(())
    }

    fn cuDeviceGetP2PAtomicCapabilities(to: *mut u32, operations: *const u32, n: u32, from: i32, peer: i32) {
        let d = driver()?;
        d.device(from)?;
        d.device(peer)?;
        if from == peer {
            return Err(INVALID_DEVICE);
        }
        let operations = slice(operations, n as usize)?;
        if to.is_null() || operations.is_empty() || operations.iter().any(|operation| *operation > 12) {
            return Err(INVALID_VALUE);
        }
        for (i, operation) in operations.iter().enumerate() {
            // The link adds and exchanges 32 bits and more; CU_ATOMIC_CAPABILITY_SIGNED upwards.
            out(to.add(i), if d.config.peers && *operation == 0 { 0b1011 } else { 0 })?;
        }
        Ok(())
    }

    fn cuDeviceRegisterAsyncNotification(device: i32, func: usize, _data: usize, to: *mut usize) {
        driver()?.device(device)?;
        if func == 0 || to.is_null() {
            return Err(INVALID_VALUE);
        }
        // The memory of this card has no budget below its size, so no notice ever comes.
        out(to, NOTICES.insert(Arc::new(device)))
    }

    fn cuDeviceUnregisterAsyncNotification(device: i32, callback: usize) {
        driver()?.device(device)?;
        if NOTICES.find(callback).is_none_or(|d| *d != device) {
            return Err(INVALID_VALUE);
        }
        NOTICES.remove(callback).map(drop)
    }

    fn cuFlushGPUDirectRDMAWrites(target: u32, scope: u32) {
        current()?;
        Err(if target == 0 && matches!(scope, 100 | 200) { errors::NOT_SUPPORTED } else { INVALID_VALUE })
    }

    fn cuProfilerStart() {
        crate::driver::context::current().map(drop)
    }

    fn cuProfilerStop() {
        crate::driver::context::current().map(drop)
    }
}
