//! The window of device memory at the addresses that the client chose.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use gpusession_proto::supervise::DeviceLimit;

use super::shares::Object;
use crate::driver::{Address, Driver};

/// One allocation.
#[derive(Clone, Copy)]
pub struct Allocation {
    pub size: u64,
    pub device: u32,
    /// Number under which other processes know it.
    pub share: Option<u64>,
    /// The other worker's object that it is, which does not count here.
    pub imported: Option<Object>,
}

/// The window, and the allocations in it by address.
pub struct Memory {
    pub limits: Vec<u64>,
    pub window: Mutex<Option<(Address, u64)>>,
    pub allocations: Mutex<BTreeMap<Address, Allocation>>,
}

/// Locks one part, whether or not a thread has panicked.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Memory {
    /// Starts with no allocation; the limits are the lease's.
    pub fn new(devices: &[DeviceLimit]) -> Self {
        Self {
            limits: devices.iter().map(|d| d.memory_bytes).collect(),
            window: Mutex::default(),
            allocations: Mutex::default(),
        }
    }

    /// Reserves the first of the client's windows that the driver grants at exactly that address.
    pub fn reserve(&self, driver: &Driver, windows: &[Address], size: u64) -> Option<Address> {
        for &wanted in windows {
            let mut got = 0;
            // SAFETY: the out pointer is valid; an address is a hint.
            let reserved =
                unsafe { (driver.call.cuMemAddressReserve)(&mut got, size as usize, 0, wanted, 0) };
            if reserved != 0 {
                continue;
            }
            if got == wanted {
                *lock(&self.window) = Some((got, size));
                return Some(got);
            }
            // SAFETY: the range was just reserved, and no other code knows it.
            unsafe { (driver.call.cuMemAddressFree)(got, size as usize) };
        }
        None
    }

    /// Returns the device of the allocation that contains an address.
    pub fn device_of(&self, address: Address) -> Option<u32> {
        let allocations = lock(&self.allocations);
        let (base, allocation) = allocations.range(..=address).next_back()?;
        (address - base < allocation.size).then_some(allocation.device)
    }

    /// Returns `true` if these bytes lie in one allocation.
    pub fn contains(&self, address: Address, len: u64) -> bool {
        let allocations = lock(&self.allocations);
        allocations.range(..=address).next_back().is_some_and(|(base, allocation)| {
            let offset = address - base;
            len <= allocation.size && offset <= allocation.size - len
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_belongs_to_the_allocation_around_it() {
        let memory = Memory::new(&[]);
        let allocation = |size, device| Allocation { size, device, share: None, imported: None };
        lock(&memory.allocations).extend([(0x1000, allocation(0x100, 0)), (0x1100, allocation(0x80, 1))]);
        let owners = [0xfff, 0x1000, 0x10ff, 0x1100, 0x117f, 0x1180].map(|at| memory.device_of(at));
        assert_eq!(owners, [None, Some(0), Some(0), Some(1), Some(1), None]);
        assert!(memory.contains(0x1000, 0x100) && memory.contains(0x10ff, 1));
        assert!(!memory.contains(0x1000, 0x101), "two allocations side by side are not one");
        assert!(!memory.contains(0xfff, 2) && !memory.contains(0x1180, 1));
        assert!(!memory.contains(0x1001, u64::MAX), "no overflow");
    }
}
