//! Facts about devices, and the selection that the program sees.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use gpusession_proto::frame::{BadFrame, Reader};
use gpusession_proto::readings::uuid_text;

/// Facts about a device, from the worker's greeting.
pub struct Device {
    /// Ordinal on its worker.
    pub local: u32,
    /// Ordinal in the program; -1 if `CUDA_VISIBLE_DEVICES` hides it.
    pub ordinal: i32,
    pub name: Vec<u8>,
    /// UUID as the program sees it: changed by `told_apart` for the second share of one GPU.
    pub uuid: [u8; 16],
    /// In bytes.
    pub total_memory: u64,
    /// PCI address in the driver's notation.
    pub pci: Vec<u8>,
    /// Values of `CUdevice_attribute` by number; `None` if the driver knows none.
    pub attributes: Vec<Option<i32>>,
    /// Lowest and highest stream priority; the highest is the smaller number.
    pub priorities: (i32, i32),
    /// Values of `CUlimit` in a new context, by number; a negative value is the driver's error.
    pub limits: Vec<u64>,
    /// Positions of the pairs of multiprocessors (TPCs): two arrays one after the other.
    pub tpcs: Vec<u8>,
    /// Relations to each device of the same worker, by ordinal there.
    pub peers: Vec<Peer>,
    /// Number of times that the program retains the primary context.
    pub retained: AtomicU32,
    /// A reset or the last release of the primary context has followed the last retain.
    destroyed: AtomicBool,
    /// Held while a thread retains, releases or resets the primary context.
    pub retaining: Turns,
    /// `CUctx_flags` of the primary context.
    pub primary_flags: AtomicU32,
}

/// A lock that the thread which holds it may take again.
///
/// The end of a context calls destructors of the program, which may call the driver.
#[derive(Default)]
pub struct Turns {
    lock: Mutex<()>,
    /// Number of the thread that holds the lock, or 0.
    holder: AtomicU32,
}

impl Turns {
    /// Runs `work` in a thread with this number, while no other thread's work runs.
    pub fn run<T>(&self, thread: u32, work: impl FnOnce() -> T) -> T {
        struct Holder<'a>(&'a AtomicU32);
        impl Drop for Holder<'_> {
            fn drop(&mut self) {
                self.0.store(0, Ordering::Relaxed);
            }
        }
        if self.holder.load(Ordering::Relaxed) == thread {
            return work();
        }
        let _lock = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.holder.store(thread, Ordering::Relaxed);
        let _holder = Holder(&self.holder);
        work()
    }
}

/// Access of a device to another one's memory.
#[derive(Default)]
pub struct Peer {
    /// Whether the device reaches the other one's memory.
    pub reached: bool,
    /// `CUdevice_P2PAttribute` values from 1; `None` if the driver knows none.
    pub attributes: Vec<Option<i32>>,
}

impl Peer {
    /// Reads a worker's description of one device's access to another one.
    pub fn read(r: &mut Reader<'_>) -> Result<Self, BadFrame> {
        let reached = r.word()? == 1;
        let value = |value| (value != u64::MAX).then_some(value as u32 as i32);
        let attributes = (0..r.word()?.min(64)).map(|_| r.word().map(value)).collect::<Result<_, _>>()?;
        Ok(Self { reached, attributes })
    }
}

/// Number of devices whose primary context is destroyed.
static DESTROYED: AtomicUsize = AtomicUsize::new(0);

/// Returns `true` if a device's primary context is destroyed, and no thread has retained it since.
#[inline]
pub fn any_destroyed() -> bool {
    DESTROYED.load(Ordering::Relaxed) != 0
}

impl Device {
    /// Returns `true` if the primary context is destroyed, and no thread has retained it since.
    pub fn is_destroyed(&self) -> bool {
        self.destroyed.load(Ordering::Relaxed)
    }

    /// Notes that the primary context is destroyed, or retained again.
    pub fn set_destroyed(&self, destroyed: bool) {
        match (self.destroyed.swap(destroyed, Ordering::Relaxed), destroyed) {
            (false, true) => DESTROYED.fetch_add(1, Ordering::Relaxed),
            (true, false) => DESTROYED.fetch_sub(1, Ordering::Relaxed),
            _ => return,
        };
    }

    /// Reads a worker's description of its device with this ordinal.
    pub fn read(r: &mut Reader<'_>, local: u32) -> Result<Self, BadFrame> {
        let short = |_| BadFrame("device");
        let name = r.bytes()?.to_vec();
        let uuid = r.bytes()?.try_into().map_err(short)?;
        // Id and node mask that only Windows has.
        r.bytes()?;
        r.word()?;
        let total_memory = r.word()?;
        let pci = r.bytes()?.to_vec();
        let count = r.word()?.min(4096);
        let mut attributes = Vec::new();
        for number in 0..count {
            let value = r.word()?;
            let value = (value != u64::MAX).then_some(value as u32 as i32);
            attributes.push(honest(number as i32, value));
        }
        let priorities = (r.word()? as i32, r.word()? as i32);
        let count = r.word()?.min(64);
        let limits = (0..count).map(|_| r.word()).collect::<Result<_, _>>()?;
        Ok(Self {
            local,
            ordinal: -1,
            name,
            uuid,
            total_memory,
            pci,
            attributes,
            priorities,
            limits,
            tpcs: r.bytes()?.to_vec(),
            peers: Vec::new(),
            retained: AtomicU32::new(0),
            destroyed: AtomicBool::new(false),
            retaining: Turns::default(),
            primary_flags: AtomicU32::new(0),
        })
    }

    /// Sets the UUID, and adds `more` to the PCI domain, as
    /// [`tell_apart`](gpusession_proto::readings::tell_apart) decides.
    pub fn told_apart(&mut self, uuid: [u8; 16], more: u32) {
        const PCI_DOMAIN: usize = 50;
        self.uuid = uuid;
        let pci = String::from_utf8_lossy(&self.pci).into_owned();
        if more > 0
            && let Some((domain, slot)) = pci.split_once(':')
        {
            let domain = u32::from_str_radix(domain, 16).unwrap_or(0).wrapping_add(more);
            self.pci = format!("{domain:04x}:{slot}").into_bytes();
            if let Some(attribute) = self.attributes.get_mut(PCI_DOMAIN) {
                *attribute = Some(domain as i32);
            }
        }
    }

    /// Returns the access to another device of the same worker.
    pub fn peer(&self, other: &Self) -> Option<&Peer> {
        self.peers.get(other.local as usize)
    }

    /// Returns an attribute by number, 0 if the driver knows none.
    pub fn attribute(&self, number: usize) -> i32 {
        self.attributes.get(number).copied().flatten().unwrap_or(0)
    }
}

/// Returns an attribute's value, or 0 for features that this library cannot provide.
///
/// A network cannot give some of them, and the calls of others are refused, whatever the card
/// supports on its own host.
fn honest(attribute: i32, value: Option<i32>) -> Option<i32> {
    const OVERRIDDEN: &[i32] = &[
        86,  // HOST_NATIVE_ATOMIC_SUPPORTED
        88,  // PAGEABLE_MEMORY_ACCESS
        89,  // CONCURRENT_MANAGED_ACCESS
        91,  // CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
        96,  // COOPERATIVE_MULTI_DEVICE_LAUNCH
        100, // PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES
        101, // DIRECT_MANAGED_MEM_ACCESS_FROM_HOST
        110, // GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
        114, // TIMELINE_SEMAPHORE_INTEROP_SUPPORTED
        116, // GPU_DIRECT_RDMA_SUPPORTED
        117, // GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS
        118, // GPU_DIRECT_RDMA_WRITES_ORDERING
        121, // DEFERRED_MAPPING_CUDA_ARRAY_SUPPORTED, which no program has used on a card
        124, // DMA_BUF_SUPPORTED
        128, // HANDLE_TYPE_FABRIC_SUPPORTED
        129, // UNIFIED_FUNCTION_POINTERS
        132, // MULTICAST_SUPPORTED
        136, // MEM_DECOMPRESS_ALGORITHM_MASK
        137, // MEM_DECOMPRESS_MAXIMUM_LENGTH
        138, // VULKAN_CIG_SUPPORTED
        141, // HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        142, // HOST_NUMA_MEMORY_POOLS_SUPPORTED
        143, // HOST_NUMA_MULTINODE_IPC_SUPPORTED
        144, // HOST_MEMORY_POOLS_SUPPORTED
        145, // HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        146, // HOST_ALLOC_DMA_BUF_SUPPORTED
        147, // ONLY_PARTIAL_HOST_NATIVE_ATOMIC_SUPPORTED
    ];
    // Pools are shared by descriptors alone.
    const POOL_HANDLES: i32 = 119;
    const POSIX_FD: i32 = 1;
    match attribute {
        POOL_HANDLES => value.map(|handles| handles & POSIX_FD),
        _ if OVERRIDDEN.contains(&attribute) => value.map(|_| 0),
        _ => value,
    }
}

/// Returns the devices that `CUDA_VISIBLE_DEVICES` selects, in its order, as indices into `uuids`.
///
/// An entry is an ordinal or the beginning of a UUID. As with NVIDIA's driver, the list ends at an
/// entry that names no device, and naming a device twice selects none.
pub fn visible(list: Option<&str>, uuids: &[[u8; 16]]) -> Vec<usize> {
    let Some(list) = list else { return (0..uuids.len()).collect() };
    let mut seen = Vec::new();
    for entry in list.split(',').map(str::trim) {
        let named = match entry.parse::<usize>() {
            Ok(ordinal) => (ordinal < uuids.len()).then_some(ordinal),
            Err(_) if entry.starts_with("GPU-") => {
                uuids.iter().position(|uuid| uuid_text(uuid).starts_with(entry))
            }
            Err(_) => None,
        };
        let Some(named) = named else { break };
        if seen.contains(&named) {
            return Vec::new();
        }
        seen.push(named);
    }
    seen
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::{Turns, honest, visible};

    #[test]
    fn features_whose_calls_are_refused_are_denied() {
        for (attribute, refused) in
            [(141, "cuMemCreate"), (142, "cuMemPoolCreate"), (132, "cuMulticastCreate")]
        {
            assert_eq!(honest(attribute, Some(1)), Some(0), "{refused}");
        }
        assert_eq!(honest(141, None), None, "an attribute that the driver does not know");
        assert_eq!(honest(119, Some(9)), Some(1), "no pool has fabric handles");
        assert_eq!(honest(102, Some(1)), Some(1), "memory of a device");
    }

    #[test]
    fn threads_take_turns_and_a_thread_may_nest_its_own() {
        let turns = Turns::default();
        let (entered, other) = channel();
        std::thread::scope(|scope| {
            turns.run(1, || {
                assert_eq!(turns.run(1, || 5), 5);
                scope.spawn(|| turns.run(2, move || entered.send(()).unwrap()));
                assert!(other.recv_timeout(Duration::from_millis(20)).is_err(), "the first one is inside");
            });
            assert_eq!(other.recv(), Ok(()));
        });
    }

    #[test]
    fn cuda_visible_devices_selects_and_orders_devices() {
        let uuids = [[0x11; 16], [0x22; 16], [0x33; 16]];
        let seen = |list| visible(Some(list), &uuids);
        assert_eq!(visible(None, &uuids), [0, 1, 2]);
        assert_eq!(seen("2, 0"), [2, 0]);
        assert_eq!(seen("1,-1,0"), [1], "the list ends there");
        assert_eq!(seen("0,3,1"), [0]);
        assert_eq!(seen("GPU-22222222-2222-2222-2222-222222222222,GPU-11"), [1, 0]);
        for none in ["", "0,0", "nonsense", "MIG-22222222-2222-2222-2222-222222222222"] {
            assert!(seen(none).is_empty(), "{none}");
        }
    }
}
