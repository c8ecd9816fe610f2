//! Calls that the library answers itself, and calls whose questions differ from their prototypes.

use std::ffi::c_char;

use gpusession_nvml_calls::{FIELD_VALUES, find};
use gpusession_proto::readings::{Device, uuid_bytes, uuid_text};

use crate::entry::{device, guard, handle, list, out, string, text};
use crate::session::{Session, session};
use crate::status::{self, Result};

/// `nvmlPciInfo_t`. The functions before `_v3` know its first 52 bytes, the last 16 of which are
/// reserved.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct PciInfo {
    legacy: [u8; 16],
    domain: u32,
    bus: u32,
    device: u32,
    pci_device_id: u32,
    pci_subsystem_id: u32,
    id: [u8; 32],
}

impl PciInfo {
    /// Returns the information with another PCI domain.
    fn at(self, domain: u32) -> Self {
        let Self { bus, device, .. } = self;
        let (mut legacy, mut id) = ([0; 16], [0; 32]);
        let fill = |to: &mut [u8], text: String| to[..text.len()].copy_from_slice(text.as_bytes());
        fill(&mut legacy, format!("{:04x}:{:02x}:{:02x}.0", domain & 0xffff, bus & 0xff, device & 0xff));
        fill(&mut id, format!("{domain:08x}:{:02x}:{:02x}.0", bus & 0xff, device & 0xff));
        Self { domain, legacy, id, ..self }
    }
}

const PCI_INFO_BEFORE_V3: usize = 52;
const _: () = assert!(size_of::<PciInfo>() == 68);

/// `nvmlMemory_t`.
#[repr(C)]
pub struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlMemory_v2_t`.
#[repr(C)]
pub struct MemoryV2 {
    version: u32,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

const MEMORY_V2: u32 = size_of::<MemoryV2>() as u32 | 2 << 24;

/// `nvmlGpuFabricInfo_t`.
///
/// A lease's cards are in no fabric: memory of another host's cards cannot be mapped. That is a
/// state for programs and no error, and PyTorch's symmetric memory fails after an error.
#[repr(C)]
pub struct FabricInfo {
    cluster_uuid: [u8; 16],
    status: u32,
    clique: u32,
    state: u8,
}

const NO_FABRIC: FabricInfo = FabricInfo { cluster_uuid: [0; 16], status: 0, clique: 0, state: 0 };
const _: () = assert!(size_of::<FabricInfo>() == 28);

/// `nvmlGpuFabricInfo_v2_t`; a mask of 0 reports no part's health.
#[repr(C)]
pub struct FabricInfoV2 {
    version: u32,
    info: FabricInfo,
    health_mask: u32,
}

/// `nvmlGpuFabricInfo_v3_t`.
#[repr(C)]
pub struct FabricInfoV3 {
    common: FabricInfoV2,
    health_summary: u8,
}

const FABRIC_V2: u32 = size_of::<FabricInfoV2>() as u32 | 2 << 24;
const FABRIC_V3: u32 = size_of::<FabricInfoV3>() as u32 | 3 << 24;
const _: () = assert!(size_of::<FabricInfoV2>() == 36 && size_of::<FabricInfoV3>() == 40);

/// `nvmlProcessInfo_v1_t`.
#[repr(C)]
pub struct ProcessV1 {
    pid: u32,
    used: u64,
}

/// `nvmlProcessInfo_v2_t`, which is also the present `nvmlProcessInfo_t`.
#[repr(C)]
pub struct Process {
    pid: u32,
    used: u64,
    gpu_instance: u32,
    compute_instance: u32,
}

/// `nvmlUUID_v1_t`.
#[repr(C)]
pub struct Uuid {
    version: u32,
    kind: u32,
    value: [u8; 41],
}

const UUID_V1: u32 = size_of::<Uuid>() as u32 | 1 << 24;
const _: () = assert!(size_of::<Uuid>() == 52);

/// `nvmlFieldValue_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct FieldValue {
    field: u32,
    scope: u32,
    timestamp: i64,
    latency_usec: i64,
    value_type: u32,
    status: u32,
    value: u64,
}

const _: () = assert!(size_of::<FieldValue>() == 40);

/// Returns domain, bus and device of an address such as 0000:01:00.0 or 1:0.
fn pci(address: &str) -> Option<(u32, u32, u32)> {
    let hex = |text: &str| u32::from_str_radix(text, 16).ok();
    let (front, device) = address.rsplit_once(':')?;
    let device = hex(device.split('.').next()?)?;
    let (domain, bus) = front.rsplit_once(':').unwrap_or(("0", front));
    Some((hex(domain)?, hex(bus)?, device))
}

fn pci_info(session: &mut Session, device: usize) -> Result<PciInfo> {
    let (_, call) = find("nvmlDeviceGetPciInfo_v3").ok_or(status::UNKNOWN)?;
    if let Ok(Some(Ok(answer))) = session.answer(device, call, &[Vec::new()]).map(|mut a| a.pop())
        && answer.len() == size_of::<PciInfo>()
    {
        // SAFETY: the structure has only integers and bytes, for which any bits are valid, and the
        // answer has its length.
        let info = unsafe { answer.as_ptr().cast::<PciInfo>().read_unaligned() };
        let (_, more) = session.uuid_and_domain_offset(device)?;
        return Ok(if more == 0 { info } else { info.at(info.domain.wrapping_add(more)) });
    }
    // A server without NVML still reports PCI addresses.
    let (domain, bus, number) = pci(&session.known(device)?.pci_address).ok_or(status::UNKNOWN)?;
    let (_, more) = session.uuid_and_domain_offset(device)?;
    let info = PciInfo {
        legacy: [0; 16],
        domain: 0,
        bus,
        device: number,
        pci_device_id: 0,
        pci_subsystem_id: 0,
        id: [0; 32],
    };
    Ok(info.at(domain.wrapping_add(more)))
}

fn first(session: &Session) -> Result<&Device> {
    session.known(0)
}

fn memory(session: &mut Session, device: usize) -> Result<Memory> {
    let device = session.device(device)?;
    let (total, used) = (device.memory_bytes, device.used_bytes.min(device.memory_bytes));
    Ok(Memory { total, free: total - used, used })
}

/// # Safety
/// Pointers are as NVML requires.
unsafe fn processes<T>(which: usize, count: *mut u32, to: *mut T, make: impl Fn(u32, u64) -> T) -> Result {
    let mut session = session();
    let device = device(&session, which)?;
    let items = session.device(device)?.processes.iter().map(|p| make(p.pid, p.used_bytes)).collect();
    // SAFETY: by this function's contract the pointers are as NVML requires.
    unsafe { list(count, to, items) }
}

/// Writes the versioned information that a device is in no fabric.
///
/// # Safety
/// The pointer leads to a structure of the version in its first word, or is null.
unsafe fn fabric(to: *mut u32) -> Result {
    if to.is_null() {
        return Err(status::INVALID_ARGUMENT);
    }
    // SAFETY: by this function's contract there is a version, and a structure of that version.
    unsafe {
        let version = to.read_unaligned();
        let common = FabricInfoV2 { version, info: NO_FABRIC, health_mask: 0 };
        match version {
            FABRIC_V2 => out(to.cast(), common),
            FABRIC_V3 => out(to.cast(), FabricInfoV3 { common, health_summary: 0 }),
            _ => Err(status::ARGUMENT_VERSION_MISMATCH),
        }
    }
}

/// Returns a process's name from this host's kernel, or else from the lease.
///
/// A container may not see the process in `/proc`.
pub fn process_name(session: &Session, pid: u32) -> Result<String> {
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let name = line.split(|b| *b == 0).next().unwrap_or_default();
    if !name.is_empty() {
        return Ok(String::from_utf8_lossy(name).into_owned());
    }
    let mut known = (0..session.count()?).filter_map(|d| session.known(d).ok());
    let process = known.find_map(|d| d.processes.iter().find(|p| p.pid == pid));
    process.map(|p| p.name.clone()).ok_or(status::NOT_FOUND)
}

fn by_uuid(session: &Session, uuid: Option<[u8; 16]>) -> Result<usize> {
    let wanted = uuid.ok_or(status::INVALID_ARGUMENT)?;
    let found = (0..session.count()?)
        .find(|d| session.uuid_and_domain_offset(*d).is_ok_and(|(uuid, _)| uuid == wanted));
    found.map(handle).ok_or(status::NOT_FOUND)
}

pub fn by_address(session: &mut Session, address: &str) -> Result<usize> {
    let wanted = pci(address).ok_or(status::INVALID_ARGUMENT)?;
    for device in 0..session.count()? {
        let info = pci_info(session, device)?;
        if (info.domain, info.bus, info.device) == wanted {
            return Ok(handle(device));
        }
    }
    Err(status::NOT_FOUND)
}

fn by_serial(session: &mut Session, serial: &str) -> Result<usize> {
    let (_, call) = find("nvmlDeviceGetSerial").ok_or(status::UNKNOWN)?;
    for device in 0..session.count()? {
        let answer = session.answer(device, call, &[Vec::new()])?.pop();
        if let Some(Ok(answer)) = answer
            && answer.get(4..) == Some(serial.as_bytes())
        {
            return Ok(handle(device));
        }
    }
    Err(status::NOT_FOUND)
}

/// Returns the distance of two devices as `nvmlGpuTopologyLevel_t`.
pub fn level(session: &mut Session, one: usize, other: usize) -> Result<u32> {
    const SYSTEM: u32 = 50;
    if session.known(one)?.lease != session.known(other)?.lease {
        return Ok(SYSTEM);
    }
    let (_, call) = find("nvmlDeviceGetTopologyCommonAncestor").ok_or(status::UNKNOWN)?;
    let peer = session.uuid(other)?.to_vec();
    let answer = session.answer(one, call, &[peer])?.pop().ok_or(status::UNKNOWN)??;
    answer.first_chunk().map(|c| u32::from_le_bytes(*c)).ok_or(status::UNKNOWN)
}

macro_rules! nvml {
    ($(fn $name:ident($($a:ident: $t:ty),* $(,)?) $body:block)*) => {$(
        /// See NVIDIA's documentation of the NVML call of this name.
        ///
        /// # Safety
        /// Pointers are as that documentation requires.
        #[allow(clippy::macro_metavars_in_unsafe)]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($a: $t),*) -> u32 {
            guard(stringify!($name), || -> Result {
                #[allow(unused_unsafe)]
                // SAFETY: by NVML's contract the program's arguments fit this call.
                unsafe { $body }
            })
        }
    )*};
}

/// Writes an empty list, for objects that a lease never has.
macro_rules! nothing {
    ($which:ident, $count:ident) => {{
        device(&session(), $which)?;
        out($count, 0u32)
    }};
}

nvml! {
    fn nvmlInit() { session().init() }
    fn nvmlInit_v2() { session().init() }
    // The flags are for hosts without GPUs or with detached ones, which a lease's never are.
    fn nvmlInitWithFlags(_flags: u32) { session().init() }
    fn nvmlShutdown() { session().shutdown() }

    fn nvmlSystemGetDriverVersion(to: *mut c_char, room: u32) { text(to, room, &first(&session())?.driver_version) }
    fn nvmlSystemGetNVMLVersion(to: *mut c_char, room: u32) { text(to, room, &first(&session())?.nvml_version) }
    fn nvmlSystemGetCudaDriverVersion(to: *mut i32) { out(to, first(&session())?.cuda_version as i32) }
    fn nvmlSystemGetCudaDriverVersion_v2(to: *mut i32) { out(to, first(&session())?.cuda_version as i32) }
    fn nvmlSystemGetProcessName(pid: u32, to: *mut c_char, room: u32) { text(to, room, &process_name(&session(), pid)?) }
    fn nvmlSystemGetHicVersion(count: *mut u32, _entries: *mut u8) {
        session().count()?;
        out(count, 0)
    }
    fn nvmlUnitGetCount(count: *mut u32) {
        session().count()?;
        out(count, 0)
    }
    fn nvmlGetExcludedDeviceCount(count: *mut u32) { out(count, 0) }

    fn nvmlDeviceGetCount(count: *mut u32) { out(count, session().count()? as u32) }
    fn nvmlDeviceGetCount_v2(count: *mut u32) { out(count, session().count()? as u32) }
    fn nvmlDeviceGetHandleByIndex(index: u32, to: *mut usize) {
        session().uuid(index as usize)?;
        out(to, handle(index as usize))
    }
    fn nvmlDeviceGetHandleByIndex_v2(index: u32, to: *mut usize) {
        session().uuid(index as usize)?;
        out(to, handle(index as usize))
    }
    fn nvmlDeviceGetHandleByUUID(uuid: *const c_char, to: *mut usize) {
        let uuid = uuid_bytes(string(uuid)?);
        out(to, by_uuid(&session(), uuid)?)
    }
    fn nvmlDeviceGetHandleByUUIDV(uuid: *const Uuid, to: *mut usize) {
        const ASCII: u32 = 1;
        const BINARY: u32 = 2;
        if uuid.is_null() {
            return Err(status::INVALID_ARGUMENT);
        }
        if uuid.cast::<u32>().read_unaligned() != UUID_V1 {
            return Err(status::ARGUMENT_VERSION_MISMATCH);
        }
        let Uuid { kind, value, .. } = uuid.read_unaligned();
        let wanted = match kind {
            ASCII => std::ffi::CStr::from_bytes_until_nul(&value).ok().and_then(|t| uuid_bytes(t.to_str().ok()?)),
            BINARY => value.first_chunk().copied(),
            _ => None,
        };
        out(to, by_uuid(&session(), wanted)?)
    }
    fn nvmlDeviceGetHandleBySerial(serial: *const c_char, to: *mut usize) {
        let serial = string(serial)?;
        out(to, by_serial(&mut session(), serial)?)
    }
    fn nvmlDeviceGetHandleByPciBusId(id: *const c_char, to: *mut usize) {
        let id = string(id)?;
        out(to, by_address(&mut session(), id)?)
    }
    fn nvmlDeviceGetHandleByPciBusId_v2(id: *const c_char, to: *mut usize) {
        let id = string(id)?;
        out(to, by_address(&mut session(), id)?)
    }
    fn nvmlDeviceGetIndex(which: usize, to: *mut u32) { out(to, device(&session(), which)? as u32) }
    fn nvmlDeviceGetMinorNumber(which: usize, to: *mut u32) { out(to, device(&session(), which)? as u32) }
    fn nvmlDeviceGetName(which: usize, to: *mut c_char, room: u32) {
        let session = session();
        text(to, room, &session.known(device(&session, which)?)?.name)
    }
    fn nvmlDeviceGetUUID(which: usize, to: *mut c_char, room: u32) {
        let session = session();
        text(to, room, &uuid_text(&session.uuid_and_domain_offset(device(&session, which)?)?.0))
    }
    fn nvmlDeviceGetCudaComputeCapability(which: usize, major: *mut i32, minor: *mut i32) {
        let session = session();
        let (ma, mi) = session.known(device(&session, which)?)?.compute;
        out(major, ma as i32)?;
        out(minor, mi as i32)
    }
    fn nvmlDeviceGetPciInfo_v3(which: usize, to: *mut PciInfo) {
        let mut session = session();
        let device = device(&session, which)?;
        out(to, pci_info(&mut session, device)?)
    }
    fn nvmlDeviceGetPciInfo_v2(which: usize, to: *mut [u8; PCI_INFO_BEFORE_V3]) {
        let mut session = session();
        let device = device(&session, which)?;
        let info = PciInfo { id: [0; 32], ..pci_info(&mut session, device)? };
        out(to, (&raw const info).cast::<[u8; PCI_INFO_BEFORE_V3]>().read())
    }
    fn nvmlDeviceGetPciInfo(which: usize, to: *mut [u8; PCI_INFO_BEFORE_V3]) {
        match nvmlDeviceGetPciInfo_v2(which, to) {
            0 => Ok(()),
            error => Err(error),
        }
    }

    // NCCL uses this call.
    fn nvmlDeviceGetNvLinkRemotePciInfo(which: usize, link: u32, to: *mut [u8; PCI_INFO_BEFORE_V3]) {
        let mut session = session();
        let device = device(&session, which)?;
        let (_, call) = find("nvmlDeviceGetNvLinkRemotePciInfo_v2").ok_or(status::UNKNOWN)?;
        let answer = session.answer(device, call, &[link.to_le_bytes().to_vec()])?.pop().ok_or(status::UNKNOWN)??;
        out(to, *answer.first_chunk().ok_or(status::UNKNOWN)?)
    }

    fn nvmlDeviceGetMemoryInfo(which: usize, to: *mut Memory) {
        let mut session = session();
        let device = device(&session, which)?;
        out(to, memory(&mut session, device)?)
    }
    fn nvmlDeviceGetMemoryInfo_v2(which: usize, to: *mut MemoryV2) {
        let mut session = session();
        let device = device(&session, which)?;
        if to.is_null() {
            return Err(status::INVALID_ARGUMENT);
        }
        if to.cast::<u32>().read_unaligned() != MEMORY_V2 {
            return Err(status::ARGUMENT_VERSION_MISMATCH);
        }
        let Memory { total, free, used } = memory(&mut session, device)?;
        out(to, MemoryV2 { version: MEMORY_V2, total, reserved: 0, free, used })
    }
    fn nvmlDeviceGetComputeRunningProcesses(which: usize, count: *mut u32, to: *mut ProcessV1) {
        processes(which, count, to, |pid, used| ProcessV1 { pid, used })
    }
    fn nvmlDeviceGetComputeRunningProcesses_v2(which: usize, count: *mut u32, to: *mut Process) {
        processes(which, count, to, |pid, used| Process { pid, used, gpu_instance: !0, compute_instance: !0 })
    }
    fn nvmlDeviceGetComputeRunningProcesses_v3(which: usize, count: *mut u32, to: *mut Process) {
        processes(which, count, to, |pid, used| Process { pid, used, gpu_instance: !0, compute_instance: !0 })
    }
    fn nvmlDeviceGetGraphicsRunningProcesses(which: usize, count: *mut u32, _to: *mut u8) { nothing!(which, count) }
    fn nvmlDeviceGetGraphicsRunningProcesses_v2(which: usize, count: *mut u32, _to: *mut u8) { nothing!(which, count) }
    fn nvmlDeviceGetGraphicsRunningProcesses_v3(which: usize, count: *mut u32, _to: *mut u8) { nothing!(which, count) }
    fn nvmlDeviceGetMPSComputeRunningProcesses(which: usize, count: *mut u32, _to: *mut u8) { nothing!(which, count) }
    fn nvmlDeviceGetMPSComputeRunningProcesses_v2(which: usize, count: *mut u32, _to: *mut u8) { nothing!(which, count) }
    fn nvmlDeviceGetMPSComputeRunningProcesses_v3(which: usize, count: *mut u32, _to: *mut u8) { nothing!(which, count) }
    fn nvmlDeviceGetEncoderSessions(which: usize, count: *mut u32, _to: *mut u8) { nothing!(which, count) }
    fn nvmlDeviceGetFBCSessions(which: usize, count: *mut u32, _to: *mut u8) { nothing!(which, count) }

    fn nvmlDeviceGetGpuFabricInfo(which: usize, to: *mut FabricInfo) {
        device(&session(), which)?;
        out(to, NO_FABRIC)
    }
    fn nvmlDeviceGetGpuFabricInfoV(which: usize, to: *mut u32) {
        device(&session(), which)?;
        fabric(to)
    }

    fn nvmlDeviceIsMigDeviceHandle(which: usize, to: *mut u32) {
        device(&session(), which)?;
        out(to, 0)
    }
    fn nvmlDeviceGetMigDeviceHandleByIndex(which: usize, _index: u32, _to: *mut usize) {
        device(&session(), which)?;
        Err(status::NOT_FOUND)
    }
    fn nvmlDeviceGetDeviceHandleFromMigDeviceHandle(_mig: usize, _to: *mut usize) {
        session().count()?;
        Err(status::INVALID_ARGUMENT)
    }

    // Devices of different leases count as connected by the system only.
    fn nvmlDeviceGetTopologyNearestGpus(which: usize, wanted: u32, count: *mut u32, to: *mut usize) {
        let mut session = session();
        let one = device(&session, which)?;
        let mut near = Vec::new();
        for other in (0..session.count()?).filter(|other| *other != one) {
            if level(&mut session, one, other)? <= wanted {
                near.push(handle(other));
            }
        }
        list(count, to, near)
    }
    fn nvmlDeviceGetTopologyCommonAncestor(one: usize, other: usize, to: *mut u32) {
        let mut session = session();
        let (one, other) = (device(&session, one)?, device(&session, other)?);
        out(to, level(&mut session, one, other)?)
    }

    fn nvmlDeviceGetFieldValues(which: usize, count: i32, values: *mut FieldValue) {
        const MAX: i32 = 4096;
        let mut session = session();
        let device = device(&session, which)?;
        if values.is_null() || !(1..=MAX).contains(&count) {
            return Err(status::INVALID_ARGUMENT);
        }
        let asked: Vec<FieldValue> = (0..count as usize).map(|i| values.add(i).read_unaligned()).collect();
        let inputs: Vec<Vec<u8>> =
            asked.iter().map(|v| (u64::from(v.field) | u64::from(v.scope) << 32).to_le_bytes().to_vec()).collect();
        let (_, call) = find(FIELD_VALUES).ok_or(status::UNKNOWN)?;
        let answers = session.answer(device, call, &inputs)?;
        for (i, (answer, old)) in answers.into_iter().zip(asked).enumerate() {
            let value = match answer {
                Ok(bytes) if bytes.len() == size_of::<FieldValue>() => bytes.as_ptr().cast::<FieldValue>().read_unaligned(),
                Ok(_) => FieldValue { status: status::UNKNOWN, ..old },
                Err(error) => FieldValue { status: error, ..old },
            };
            values.add(i).write_unaligned(value);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        assert_eq!(pci("0000:81:0a.0"), Some((0, 0x81, 10)));
        assert_eq!(pci("00000001:81:00.0"), Some((1, 0x81, 0)));
        assert_eq!(pci("81:00.0"), Some((0, 0x81, 0)));
        assert_eq!(pci("81"), None);
        assert_eq!(pci("x:y:z"), None);
    }

    /// The sizes and versions are those of nvml.h of CUDA 13.0.
    #[test]
    fn no_fabric_in_each_version_of_the_structure() {
        for (version, length) in [(0x0200_0024_u32, 36), (0x0300_0028, 40)] {
            let mut info = [0xff_u8; 44];
            info[..4].copy_from_slice(&version.to_le_bytes());
            // SAFETY: the buffer has room for each version.
            assert_eq!(unsafe { fabric(info.as_mut_ptr().cast()) }, Ok(()));
            assert_eq!(info[..4], version.to_le_bytes());
            assert!(info[4..28].iter().all(|b| *b == 0), "no cluster, status, clique");
            assert_eq!((info[28], &info[32..36]), (0, &[0; 4][..]), "no state and no health");
            assert!(info[length..].iter().all(|b| *b == 0xff), "writes nothing behind the structure");
        }
        let mut other = 0x0100_001c_u32;
        // SAFETY: only the version is read.
        assert_eq!(unsafe { fabric(&raw mut other) }, Err(status::ARGUMENT_VERSION_MISMATCH));
        // SAFETY: null is allowed.
        assert_eq!(unsafe { fabric(std::ptr::null_mut()) }, Err(status::INVALID_ARGUMENT));
    }
}
