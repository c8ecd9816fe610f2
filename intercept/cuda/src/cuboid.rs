//! Boxes of memory that one copy moves, in the driver's form and in the worker's.

use gpusession_link::lanes::Rows;

use crate::client::{Client, cross_lease_error};
use crate::regions::Named;
use crate::route::{elsewhere, of_window};
use crate::status::{INVALID_VALUE, Result};
use crate::{clients, mapped, ranges};

/// Maximum bytes of a copy between leases that are in the program at once.
pub const RELAYED: usize = 4 << 20;

/// `CUmemorytype`
pub const HOST: u32 = 1;
/// `CUmemorytype`
pub const DEVICE: u32 = 2;
const ARRAY: u32 = 3;
const UNIFIED: u32 = 4;

/// Returns `true` if a unified address is copied as device memory.
///
/// It treats managed memory as device memory: while the device works, only the device has that
/// memory's contents.
pub fn on_device(address: u64) -> bool {
    match ranges::find(address) {
        Some(range) => range.kind.on_device(),
        None => of_window(address).is_some(),
    }
}

/// Returns `true` for device memory that the program's own instructions cannot reach.
pub fn on_device_alone(address: u64) -> bool {
    match ranges::find(address) {
        Some(range) => range.kind.on_device() && !range.kind.managed(),
        None => of_window(address).is_some(),
    }
}

/// One side of `CUDA_MEMCPY2D`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct PlaneSide {
    x: usize,
    y: usize,
    kind: u32,
    host: u64,
    device: u64,
    array: u64,
    pitch: usize,
}

/// `CUDA_MEMCPY2D`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Plane {
    source: PlaneSide,
    target: PlaneSide,
    width: usize,
    height: usize,
}

/// One side of `CUDA_MEMCPY3D`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Side {
    x: usize,
    y: usize,
    z: usize,
    lod: usize,
    kind: u32,
    host: u64,
    device: u64,
    array: u64,
    reserved: usize,
    pitch: usize,
    height: usize,
}

/// `CUDA_MEMCPY3D`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Cuboid {
    pub source: Side,
    pub target: Side,
    pub width: usize,
    pub height: usize,
    pub depth: usize,
}

const _: () = assert!(size_of::<Plane>() == 128 && size_of::<Cuboid>() == 200);

impl From<Plane> for Cuboid {
    fn from(plane: Plane) -> Self {
        let side = |s: PlaneSide| Side {
            x: s.x,
            y: s.y,
            z: 0,
            lod: 0,
            kind: s.kind,
            host: s.host,
            device: s.device,
            array: s.array,
            reserved: 0,
            pitch: s.pitch,
            height: 0,
        };
        Self {
            source: side(plane.source),
            target: side(plane.target),
            width: plane.width,
            height: plane.height,
            depth: 1,
        }
    }
}

impl Cuboid {
    /// Returns the structure's words, as the client's worker reads them.
    pub fn words(&self, client: &Client) -> [u64; 25] {
        let side = |s: &Side| {
            [
                s.x as u64,
                s.y as u64,
                s.z as u64,
                s.lod as u64,
                u64::from(s.kind),
                s.host,
                s.device,
                client.own(s.array),
                s.reserved as u64,
                s.pitch as u64,
                s.height as u64,
            ]
        };
        let mut words = [0; 25];
        words[..11].copy_from_slice(&side(&self.source));
        words[11..22].copy_from_slice(&side(&self.target));
        words[22..].copy_from_slice(&[self.width as u64, self.height as u64, self.depth as u64]);
        words
    }

    /// Makes the copy that a worker describes in words; `host` translates the region and the offset
    /// of host memory on the source's and the target's side into an address.
    pub fn from_words(
        client: &Client,
        words: &[u64; 25],
        host: impl Fn(usize, u64) -> Result<u64>,
    ) -> Result<Self> {
        let side = |at: usize, number: usize| -> Result<Side> {
            let w = &words[at..];
            let kind = w[4] as u32;
            Ok(Side {
                x: w[0] as usize,
                y: w[1] as usize,
                z: w[2] as usize,
                lod: w[3] as usize,
                kind,
                host: if kind == HOST { host(number, w[5])? } else { 0 },
                device: if kind == DEVICE { w[6] } else { 0 },
                array: if kind == ARRAY { client.name(w[7]) } else { 0 },
                reserved: 0,
                pitch: w[9] as usize,
                height: w[10] as usize,
            })
        };
        let [width, height, depth] = [words[22], words[23], words[24]].map(|n| n as usize);
        Ok(Self { source: side(0, 0)?, target: side(11, 1)?, width, height, depth })
    }

    /// Replaces unified addresses by their kind of memory, and fills in default pitches and
    /// heights.
    ///
    /// A driver goes by the address where a program calls device memory the host's, or the host's
    /// registered memory the device's.
    pub fn resolve(&mut self) -> Result {
        for side in [&mut self.source, &mut self.target] {
            match side.kind {
                HOST if on_device_alone(side.host) => (side.kind, side.device) = (DEVICE, side.host),
                DEVICE if ranges::is_registered(side.device) => (side.kind, side.host) = (HOST, side.device),
                _ => {}
            }
            if side.kind == UNIFIED {
                let device = on_device(side.device);
                side.kind = if device { DEVICE } else { HOST };
                if !device {
                    side.host = side.device;
                }
            }
            if !matches!(side.kind, HOST | DEVICE | ARRAY) {
                return Err(INVALID_VALUE);
            }
            // The box has to lie within a row's pitch and a layer's height that a driver sees.
            if side.pitch == 0 {
                side.pitch = self.width.saturating_add(side.x);
            }
            if side.height == 0 {
                side.height = self.height.saturating_add(side.y);
            }
        }
        Ok(())
    }

    /// Makes a copy of one row between two places, each a kind of memory and an address: target,
    /// source.
    pub fn row(target: (u32, u64), source: (u32, u64), len: usize) -> Self {
        let side = |(kind, address): (u32, u64)| Side::memory(kind, address, len, 1);
        Self { source: side(source), target: side(target), width: len, height: 1, depth: 1 }
    }

    /// Makes a copy between two operands, whose pitches and heights may be 0 for packed ones.
    pub fn between(target: Side, source: Side, [width, height, depth]: [usize; 3]) -> Self {
        Self { source, target, width, height, depth }
    }

    /// Removes and returns the contexts that a copy between devices names for source and target.
    ///
    /// Host memory has none, and an array its own; null means the current one.
    pub fn take_contexts(&mut self) -> [Option<u64>; 2] {
        [&mut self.source, &mut self.target].map(|side| {
            let ctx = std::mem::take(&mut side.reserved) as u64;
            (matches!(side.kind, DEVICE | UNIFIED) && ctx != 0).then_some(ctx)
        })
    }

    /// Splits the copy into parts of a few rows, at most [`RELAYED`] bytes or one row each.
    pub fn parts(self) -> impl Iterator<Item = Self> {
        let rows = (RELAYED / self.width.max(1)).max(1);
        let starts = move |z| (0..self.height).step_by(rows).map(move |y| (y, z));
        (0..self.depth).flat_map(starts).map(move |(y, z)| {
            let side = |s: Side| Side { y: s.y + y, z: s.z + z, ..s };
            Self {
                source: side(self.source),
                target: side(self.target),
                height: rows.min(self.height - y),
                depth: 1,
                ..self
            }
        })
    }

    /// Replaces host memory by region and offset, as a worker takes it in graphs.
    ///
    /// Returns the regions' numbers for source and target, 0 for other memory, and the regions.
    pub fn name_regions(&mut self, client: &'static Client) -> Result<([u64; 2], Vec<Named>)> {
        let (width, height, depth) = (self.width, self.height, self.depth);
        if width == 0 || height == 0 || depth == 0 {
            return Err(INVALID_VALUE);
        }
        self.map(client)?;
        let (mut ids, mut regions) = ([0; 2], Vec::new());
        for (side, id) in [&mut self.source, &mut self.target].into_iter().zip(&mut ids) {
            if side.kind == HOST && ranges::is_managed(side.host) {
                (side.kind, side.device) = (DEVICE, side.host);
            }
            if side.elsewhere(client).is_some() {
                return Err(cross_lease_error("memory of a copy in a graph"));
            }
            if side.kind != HOST {
                continue;
            }
            let (first, last) = (side.row(0, 0), side.row(height - 1, depth - 1));
            let len = last.checked_sub(first).and_then(|n| n.checked_add(width)).ok_or(INVALID_VALUE)?;
            let (region, offset) = mapped::for_graph(client, first as u64, len as u64)?;
            (side.x, side.y, side.z, side.host) = (0, 0, 0, offset);
            *id = region.id();
            regions.push(region);
        }
        Ok((ids, regions))
    }

    /// Checks that each side stays within the allocation that it begins in, whatever numbers the
    /// program has given.
    pub fn check(&self) -> Result {
        let [Some(rows), Some(layers)] = [self.height, self.depth].map(|n| n.checked_sub(1)) else {
            return Ok(());
        };
        if self.width == 0 {
            return Ok(());
        }
        for side in [&self.source, &self.target] {
            let base = match side.kind {
                HOST if side.host == 0 => return Err(INVALID_VALUE),
                HOST => side.host,
                DEVICE => side.device,
                _ => continue,
            };
            let row = |y: usize, z: usize| {
                let rows =
                    side.z.checked_add(z)?.checked_mul(side.height)?.checked_add(side.y.checked_add(y)?)?;
                (base as usize).checked_add(rows.checked_mul(side.pitch)?)?.checked_add(side.x)
            };
            let (first, last) = row(0, 0).zip(row(rows, layers)).ok_or(INVALID_VALUE)?;
            let len = (last - first).checked_add(self.width).ok_or(INVALID_VALUE)?;
            ranges::check(first as u64, len as u64)?;
        }
        Ok(())
    }

    /// Returns `true` if work in a context may read and write each side that is device memory.
    pub fn is_sure(&self, client: &Client, ctx: u64) -> bool {
        let sure = |(first, len)| ranges::is_device(client, ctx, first, len as u64);
        [self.source, self.target].into_iter().all(|side| self.device_span(side).is_none_or(sure))
    }

    /// Returns first byte and length of a side's device memory; `None` for other memory.
    fn device_span(&self, side: Side) -> Option<(u64, usize)> {
        let there = Self { source: Side { host: side.device, ..side }, ..*self };
        (side.kind == DEVICE).then(|| there.span(0)).map(|(first, len)| (first as u64, len))
    }

    /// Returns first byte and length of the host memory of a side (0: source, 1: target).
    ///
    /// After `name_regions` the first byte is an offset in the region.
    pub fn span(&self, side: usize) -> (usize, usize) {
        let side = if side == 0 { &self.source } else { &self.target };
        let first = side.row(0, 0);
        (first, side.row(self.height - 1, self.depth - 1) + self.width - first)
    }

    /// Returns first byte and length of the source's device memory; `None` for other memory.
    pub fn device_source(&self) -> Option<(u64, usize)> {
        self.device_span(self.source)
    }

    /// Returns the source's array, and where the box lies in it: first byte, row and layer, and
    /// their numbers; `None` for other memory.
    pub fn array_source(&self) -> Option<(u64, [(usize, usize); 3])> {
        let Side { x, y, z, lod, kind, array, .. } = self.source;
        (kind == ARRAY && lod == 0).then_some((array, [(x, self.width), (y, self.height), (z, self.depth)]))
    }

    /// Returns where the rows of the host memory of a side (0: source, 1: target) lie.
    pub fn rows(&self, side: usize) -> Rows {
        let Side { pitch, height: rows, .. } = if side == 0 { self.source } else { self.target };
        Rows { width: self.width, pitch, height: self.height, layer: rows.wrapping_mul(pitch) }
    }

    /// Makes pinned memory that the copy names as device memory visible to the device.
    pub fn map(&self, client: &'static Client) -> Result {
        let sides = [&self.source, &self.target].into_iter().filter(|side| side.kind == DEVICE);
        sides.map(|side| side.device).try_for_each(|address| mapped::named(client, address))
    }

    /// Returns `true` if a synchronous copy waits for its end because of memory that it names as
    /// device memory.
    pub fn synchronizes(&self, client: &Client) -> bool {
        let sides = [&self.source, &self.target];
        sides.into_iter().any(|side| side.kind == DEVICE && ranges::synchronizes(client, side.device))
    }

    /// Returns for source and target whether they are host memory.
    pub fn host_sides(&self) -> (bool, bool) {
        (self.source.kind == HOST, self.target.kind == HOST)
    }
}

impl Side {
    /// Makes a side of unified memory.
    pub fn unified(address: u64, pitch: usize, height: usize) -> Self {
        Self::memory(UNIFIED, address, pitch, height)
    }

    /// Makes a side of device memory.
    pub fn device(address: u64) -> Self {
        Self::memory(DEVICE, address, 0, 0)
    }

    /// Makes a side of host memory.
    pub fn host(address: u64) -> Self {
        Self::memory(HOST, address, 0, 0)
    }

    /// Makes a side in an array, from an offset in bytes, rows and layers.
    pub fn array(array: u64, [x, y, z]: [usize; 3]) -> Self {
        Self { x, y, z, array, ..Self::memory(ARRAY, 0, 0, 0) }
    }

    /// Makes a side of rows of `pitch` bytes from an address.
    pub fn memory(kind: u32, address: u64, pitch: usize, height: usize) -> Self {
        Self {
            x: 0,
            y: 0,
            z: 0,
            lod: 0,
            kind,
            host: address,
            device: address,
            array: 0,
            reserved: 0,
            pitch,
            height,
        }
    }

    /// Returns the context to use, if the memory belongs to another client's device.
    pub fn elsewhere(&self, client: &Client) -> Option<u64> {
        match self.kind {
            DEVICE => elsewhere(client, self.device),
            ARRAY => {
                let other = clients::by_object(self.array).ok().filter(|other| other.number != client.number);
                other.map(|other| other.primary(0))
            }
            _ => None,
        }
    }

    /// Returns the address of a row of the box.
    pub fn row(&self, y: usize, z: usize) -> usize {
        self.host as usize + ((self.z + z) * self.height + self.y + y) * self.pitch + self.x
    }

    /// Returns the side in packed form: rows one after the other from the start.
    pub fn packed(&self, width: usize, height: usize) -> Self {
        Self { x: 0, y: 0, z: 0, lod: 0, pitch: width, height, host: 0, ..*self }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn cuboid(width: usize, height: usize, depth: usize) -> Cuboid {
        let source = Side { x: 3, y: 5, z: 7, ..Side::memory(HOST, 0x10_0000, width + 9, height + 11) };
        let target = Side { x: 1, ..Side::memory(DEVICE, 0x20_0000, width + 2, height + 5) };
        Cuboid { source, target, width, height, depth }
    }

    #[test]
    fn span_reaches_from_the_first_to_the_last_byte() {
        let cuboid = cuboid(100, 4, 3);
        let row = |y: usize, z: usize| 0x10_0000 + ((z + 7) * 15 + y + 5) * 109 + 3;
        assert_eq!(cuboid.source.row(0, 0), row(0, 0));
        assert_eq!(cuboid.span(0), (row(0, 0), row(3, 2) + 100 - row(0, 0)));
        assert_eq!(cuboid.span(1), (0x20_0001, (2 * 9 + 3) * 102 + 100));
    }

    #[test]
    fn parts_move_each_row_once() {
        for (width, height, depth) in
            [(1 << 20, 11, 3), (RELAYED + 1, 3, 2), (RELAYED, 2, 2), (1, 9, 1), (3, 0, 2)]
        {
            let whole = cuboid(width, height, depth);
            let rows = |c: Cuboid| {
                let places = (0..c.depth).flat_map(move |z| (0..c.height).map(move |y| (y, z)));
                places.map(move |(y, z)| (c.source.row(y, z), c.target.row(y, z))).collect::<Vec<_>>()
            };
            let mut moved = Vec::new();
            for part in whole.parts() {
                assert!(part.height == 1 || part.width * part.height <= RELAYED, "at most one row beyond");
                assert_eq!((part.width, part.depth), (width, 1));
                moved.extend(rows(part));
            }
            assert_eq!(moved.len(), height * depth, "no row twice");
            assert_eq!(moved.into_iter().collect::<BTreeSet<_>>(), rows(whole).into_iter().collect());
        }
    }

    #[test]
    fn packed_rows_follow_each_other() {
        let packed = cuboid(100, 4, 3).source.packed(100, 4);
        let rows: Vec<usize> =
            (0..3).flat_map(|z| (0..4).map(move |y| (y, z))).map(|(y, z)| packed.row(y, z)).collect();
        assert_eq!(rows, (0..12).map(|i| i * 100).collect::<Vec<_>>());
    }

    #[test]
    fn plane_is_a_box_of_one_layer() {
        let side = |kind, pitch| PlaneSide { x: 1, y: 2, kind, host: 3, device: 4, array: 5, pitch };
        let plane = Plane { source: side(HOST, 64), target: side(DEVICE, 32), width: 10, height: 6 };
        let cuboid = Cuboid::from(plane);
        assert_eq!((cuboid.width, cuboid.height, cuboid.depth), (10, 6, 1));
        assert_eq!(cuboid.source.row(3, 0), 3 + (3 + 2) * 64 + 1);
        assert_eq!(cuboid.host_sides(), (true, false));
    }

    #[test]
    fn context_beside_host_memory_or_an_array_counts_for_nothing() {
        let mut copy = cuboid(10, 2, 1);
        let mut contexts = |target, source| {
            (copy.target.kind, copy.target.reserved) = (target, 5);
            (copy.source.kind, copy.source.reserved) = (source, 0);
            let taken = copy.take_contexts();
            assert_eq!((copy.target.reserved, copy.source.reserved), (0, 0));
            taken
        };
        assert_eq!(contexts(DEVICE, ARRAY), [None, Some(5)]);
        assert_eq!(contexts(ARRAY, UNIFIED), [None, None]);
        assert_eq!(contexts(HOST, HOST), [None, None]);
    }

    #[test]
    fn unified_address_of_no_device_is_host_memory() {
        let mut cuboid = cuboid(10, 2, 1);
        cuboid.source =
            Side { kind: UNIFIED, host: 0, device: 0x77_0000, pitch: 0, height: 0, ..cuboid.source };
        assert_eq!(cuboid.resolve(), Ok(()));
        assert_eq!(cuboid.host_sides(), (true, false));
        let source = cuboid.source;
        assert_eq!(
            (source.host, source.pitch, source.height),
            (0x77_0000, 10 + source.x, 2 + source.y),
            "a pitch and a height of 0"
        );
        cuboid.target.kind = 9;
        assert_eq!(cuboid.resolve(), Err(INVALID_VALUE));
    }
}
