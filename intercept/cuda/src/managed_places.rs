//! Advice about managed memory and its prefetches, as the program has called them.
//!
//! The table moves no memory: it answers `cuMemRangeGetAttribute`. As natively, it counts in
//! pages (H200, driver 580).

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

const PAGE: u64 = 4096;
/// `CU_DEVICE_CPU`
pub const CPU: i32 = -1;
/// `CU_DEVICE_INVALID`: the value of an attribute if no device applies.
const NO_DEVICE: i32 = -2;
/// Bit of the host in [`Place::accessed_by`].
const HOST_BIT: u32 = 63;

/// A `CUmemLocation`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Location {
    pub kind: i32,
    pub id: i32,
}

impl Location {
    /// `CU_MEM_LOCATION_TYPE_DEVICE`
    pub const DEVICE: i32 = 1;
    /// `CU_MEM_LOCATION_TYPE_HOST`
    pub const HOST: i32 = 2;
    /// `CU_MEM_LOCATION_TYPE_HOST_NUMA`
    pub const NODE: i32 = 3;
    /// `CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT`
    pub const THIS_NODE: i32 = 4;

    /// The host, without a node.
    pub const fn host() -> Self {
        Self { kind: Self::HOST, id: CPU }
    }

    /// Returns the value of the attributes that know devices and the host only.
    fn device(self) -> i32 {
        if self.kind == Self::DEVICE { self.id } else { CPU }
    }
}

/// State of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Place {
    pub read_mostly: bool,
    pub preferred: Option<Location>,
    pub prefetched: Option<Location>,
    /// Bits of devices by their ordinal, and the host's.
    accessed_by: u64,
}

impl Place {
    /// Adds or removes a device, or [`CPU`], that accesses the page.
    pub fn access(&mut self, device: i32, accesses: bool) {
        let bit = 1 << u32::try_from(device).map_or(HOST_BIT, |device| device.min(HOST_BIT - 1));
        self.accessed_by = if accesses { self.accessed_by | bit } else { self.accessed_by & !bit };
    }
}

/// The state from an address up to the next key; below the first key it is the default.
static PLACES: Mutex<BTreeMap<u64, Place>> = Mutex::new(BTreeMap::new());

fn at(places: &BTreeMap<u64, Place>, address: u64) -> Place {
    places.range(..=address).next_back().map_or_else(Place::default, |(_, place)| *place)
}

/// Returns the addresses of the pages that a part of memory touches.
fn pages(address: u64, len: u64) -> (u64, u64) {
    (address / PAGE * PAGE, (address + len).next_multiple_of(PAGE))
}

/// Changes the state of each page of a part of memory.
pub fn change(address: u64, len: u64, change: impl Fn(&mut Place)) {
    let (start, end) = pages(address, len);
    let mut places = PLACES.lock().unwrap_or_else(PoisonError::into_inner);
    for edge in [start, end] {
        let place = at(&places, edge);
        places.insert(edge, place);
    }
    places.range_mut(start..end).for_each(|(_, place)| change(place));
    // Neighbours in the same state become one again, so that the table does not grow for ever.
    let mut before = places.range(..start).next_back().map_or_else(Place::default, |(_, place)| *place);
    let touched: Vec<_> = places.range(start..=end).map(|(key, place)| (*key, *place)).collect();
    for (key, place) in touched {
        if place == before {
            places.remove(&key);
        }
        before = place;
    }
}

/// Forgets the state of an allocation's pages.
pub fn forget(address: u64, len: u64) {
    if !PLACES.lock().unwrap_or_else(PoisonError::into_inner).is_empty() {
        change(address, len, |place| *place = Place::default());
    }
}

/// Attributes of a part of memory: those that all of its pages share.
pub struct Shared {
    places: Vec<Place>,
}

/// Returns the state of the pages that a part of memory touches.
pub fn shared(address: u64, len: u64) -> Shared {
    let (start, end) = pages(address, len);
    let places = PLACES.lock().unwrap_or_else(PoisonError::into_inner);
    let inside = places.range(start + 1..end).map(|(_, place)| *place);
    Shared { places: std::iter::once(at(&places, start)).chain(inside).collect() }
}

impl Shared {
    /// Returns the value of a `CU_MEM_RANGE_ATTRIBUTE` that is one number.
    pub fn number(&self, attribute: i32) -> Option<i32> {
        let location = |of: fn(&Place) -> Option<Location>| {
            let first = of(&self.places[0]);
            first.filter(|_| self.places.iter().all(|place| of(place) == first))
        };
        let preferred = || location(|place| place.preferred);
        let prefetched = || location(|place| place.prefetched);
        let device = |of: Option<Location>| of.map_or(NO_DEVICE, Location::device);
        let kind = |of: Option<Location>| of.map_or(0, |location| location.kind);
        let id = |of: Option<Location>| of.map_or(NO_DEVICE, |location| location.id);
        Some(match attribute {
            1 => i32::from(self.places.iter().all(|place| place.read_mostly)),
            2 => device(preferred()),
            4 => device(prefetched()),
            5 => kind(preferred()),
            6 => id(preferred()),
            7 => kind(prefetched()),
            8 => id(prefetched()),
            _ => return None,
        })
    }

    /// Returns the first `count` devices that access all pages, then [`CPU`] if the host does.
    pub fn accessed_by(&self, count: usize) -> Vec<i32> {
        let bits = self.places.iter().fold(u64::MAX, |bits, place| bits & place.accessed_by);
        let devices = (0..HOST_BIT as i32).filter(|device| bits >> device & 1 != 0);
        let host = (bits >> HOST_BIT != 0).then_some(CPU);
        devices.chain(host).chain(std::iter::repeat(NO_DEVICE)).take(count).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn numbers(address: u64, len: u64) -> [i32; 7] {
        [1, 2, 4, 5, 6, 7, 8].map(|attribute| shared(address, len).number(attribute).unwrap())
    }

    #[test]
    fn attributes_are_those_that_all_pages_share() {
        const BASE: u64 = 0x7100_0000_0000;
        assert_eq!(numbers(BASE, 4 * MIB), [0, NO_DEVICE, NO_DEVICE, 0, NO_DEVICE, 0, NO_DEVICE]);
        change(BASE, 2 * MIB, |place| place.read_mostly = true);
        assert_eq!(
            (numbers(BASE, 4 * MIB)[0], numbers(BASE, 2 * MIB)[0], numbers(BASE + 5000, 9)[0]),
            (0, 1, 1)
        );
        change(BASE + 10, 10, |place| place.read_mostly = false);
        assert_eq!((numbers(BASE, 4096)[0], numbers(BASE + 4096, 4096)[0]), (0, 1));
        let device = Location { kind: Location::DEVICE, id: 3 };
        change(BASE, 4 * MIB, |place| place.preferred = Some(device));
        change(BASE, MIB, |place| place.prefetched = Some(Location { kind: Location::NODE, id: 0 }));
        assert_eq!(numbers(BASE, 4 * MIB)[1..], [3, NO_DEVICE, 1, 3, 0, NO_DEVICE]);
        assert_eq!(numbers(BASE, MIB)[1..], [3, CPU, 1, 3, Location::NODE, 0]);
        change(BASE, 2 * MIB, |place| place.preferred = Some(Location::host()));
        assert_eq!(numbers(BASE, 4 * MIB)[1], NO_DEVICE);
        assert_eq!(numbers(BASE, 2 * MIB)[1..5], [CPU, NO_DEVICE, Location::HOST, CPU]);
        forget(BASE, 4 * MIB);
        assert_eq!(numbers(BASE, 4 * MIB), [0, NO_DEVICE, NO_DEVICE, 0, NO_DEVICE, 0, NO_DEVICE]);
        assert_eq!(shared(BASE, 4 * MIB).places.len(), 1, "the table has no entry left here");
        assert_eq!(shared(BASE, MIB).number(9), None);
    }

    #[test]
    fn devices_that_access_come_before_the_host() {
        const BASE: u64 = 0x7200_0000_0000;
        for device in [CPU, 1, 0] {
            change(BASE, MIB, |place| place.access(device, true));
        }
        change(BASE + MIB, MIB, |place| place.access(1, true));
        assert_eq!(shared(BASE, MIB).accessed_by(4), [0, 1, CPU, NO_DEVICE]);
        assert_eq!(shared(BASE, MIB).accessed_by(2), [0, 1]);
        assert_eq!(shared(BASE, 2 * MIB).accessed_by(2), [1, NO_DEVICE]);
        change(BASE, MIB, |place| place.access(0, false));
        assert_eq!(shared(BASE, MIB).accessed_by(3), [1, CPU, NO_DEVICE]);
        change(BASE, MIB, |place| place.access(7_000, true));
        assert_eq!(shared(BASE, MIB).accessed_by(3), [1, 62, CPU], "an ordinal beyond the bits is no panic");
    }
}
