//! Arrays and mipmapped arrays: their extents, and their bytes in device memory.

use crate::abi::ArrayDescriptor;
use crate::arena::SMALL;
use crate::driver::context::Context;
use crate::driver::{driver, texture};
use crate::errors::{INVALID_HANDLE, INVALID_VALUE, NOT_SUPPORTED, Result};
use crate::memory::Allocation;
use crate::ptx::image::{Format, Image};
use crate::registry::{Registry, handle};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

pub static ARRAYS: Registry<Array> = Registry::new();
pub static MIPMAPS: Registry<Mipmap> = Registry::new();

/// Flags of `CUDA_ARRAY3D_DESCRIPTOR`.
pub const LAYERED: u32 = 1;
pub const SURFACE: u32 = 2;
pub const CUBEMAP: u32 = 4;
const GATHER: u32 = 8;
const COLOR: u32 = 0x20;
/// Depth textures, sparse arrays, arrays without memory, and arrays of video decoders.
const NOT_SIMULATED: u32 = 0x10 | 0x40 | 0x80 | 0x100;
/// `CU_AD_FORMAT_BC1_UNORM` and other formats of blocks, planes and normalized numbers.
const OTHER_FORMATS: [std::ops::RangeInclusive<u32>; 2] = [0x91..=0xb5, 0xc0..=0xcb];

/// The memory of an array, or of all levels of a mipmapped array.
pub struct Memory {
    allocation: Arc<Allocation>,
    gone: AtomicBool,
}

impl Memory {
    fn new(ctx: &Arc<Context>, bytes: u64) -> Result<Arc<Memory>> {
        let allocation = driver()?.space.variable(ctx.device, handle(ctx), bytes)?;
        Ok(Arc::new(Memory { allocation, gone: AtomicBool::new(false) }))
    }

    /// Returns `true` until the array is destroyed; its addresses may then be those of others.
    pub fn lives(&self) -> bool {
        !self.gone.load(Ordering::Relaxed)
    }

    fn free(&self) -> Result {
        self.gone.store(true, Ordering::Relaxed);
        texture::changed();
        driver()?.space.remove(self.allocation.base, |a| a.id == self.allocation.id);
        Ok(())
    }
}

pub struct Array {
    pub descriptor: ArrayDescriptor,
    pub image: Image,
    pub context: usize,
    pub memory: Arc<Memory>,
    /// The mipmapped array of which it is a level.
    parent: Option<Weak<Mipmap>>,
}

pub struct Mipmap {
    pub descriptor: ArrayDescriptor,
    pub images: Vec<Image>,
    pub context: usize,
    pub memory: Arc<Memory>,
    levels: Mutex<Vec<Option<Arc<Array>>>>,
}

/// Longest sides of arrays without layers, by the number of their dimensions, and most layers; for
/// textures and for surfaces.
const LIMITS: [[&[u64]; 3]; 2] =
    [[&[131_072], &[131_072, 65536], &[16384; 3]], [&[32768], &[131_072, 65536], &[16384; 3]]];
const LAYERED_LIMIT: u64 = 32768;
const LAYERS_LIMIT: u64 = 2048;

/// Checks a descriptor, and returns the image that it describes.
fn described(d: &ArrayDescriptor) -> Result<Image> {
    let extent = [d.Width as u64, d.Height as u64, d.Depth as u64];
    let [width, height, depth] = extent;
    let (layered, cube) = (d.Flags & LAYERED != 0, d.Flags & CUBEMAP != 0);
    if d.Flags & NOT_SIMULATED != 0 || OTHER_FORMATS.iter().any(|known| known.contains(&d.Format)) {
        return Err(NOT_SUPPORTED);
    }
    let format = Format::new(d.Format, d.NumChannels).ok_or(INVALID_VALUE)?;
    if d.Flags & !(LAYERED | SURFACE | CUBEMAP | GATHER | COLOR) != 0 || width == 0 {
        return Err(INVALID_VALUE);
    }
    let fits = if cube {
        let faces = if layered { depth > 0 && depth.is_multiple_of(6) } else { depth == 6 };
        width == height && faces && width <= LAYERED_LIMIT && depth <= LAYERS_LIMIT
    } else if layered {
        width <= LAYERED_LIMIT && height <= LAYERED_LIMIT && (1..=LAYERS_LIMIT).contains(&depth)
    } else {
        let dimensions = if depth > 0 { 3 } else { 1 + usize::from(height > 0) };
        let limits = LIMITS[usize::from(d.Flags & SURFACE != 0)][dimensions - 1];
        extent.iter().zip(limits).all(|(side, limit)| (1..=*limit).contains(side))
    };
    if !fits || (d.Flags & GATHER != 0 && (height == 0 || (depth > 0 && !layered))) {
        return Err(INVALID_VALUE);
    }
    Image::packed(format, [width, height.max(1), depth.max(1)], layered || cube).ok_or(INVALID_VALUE)
}

impl Array {
    pub fn new(ctx: &Arc<Context>, descriptor: ArrayDescriptor) -> Result<Arc<Array>> {
        let mut image = described(&descriptor)?;
        let memory = Memory::new(ctx, image.bytes().ok_or(INVALID_VALUE)?)?;
        image.base = memory.allocation.base;
        let array = Arc::new(Array { descriptor, image, context: handle(ctx), memory, parent: None });
        ARRAYS.insert(array.clone());
        Ok(array)
    }

    /// Frees the memory; a level goes with its mipmapped array only.
    pub fn destroy(self: &Arc<Self>) -> Result {
        if self.parent.is_some() {
            return Err(INVALID_HANDLE);
        }
        ARRAYS.remove(handle(self))?.memory.free()
    }

    /// Returns the mipmapped array of a level.
    pub fn parent(&self) -> Option<Arc<Mipmap>> {
        self.parent.as_ref()?.upgrade()
    }
}

impl Mipmap {
    /// Creates levels, each of half the size of the one before, in one piece of memory.
    pub fn new(ctx: &Arc<Context>, descriptor: ArrayDescriptor, levels: u32) -> Result<Arc<Mipmap>> {
        let first = described(&descriptor)?;
        let longest = first.width.max(first.height).max(if first.layered { 1 } else { first.depth });
        let (mut images, mut bytes) = (Vec::new(), 0u64);
        for level in 0..levels.clamp(1, 1 + longest.ilog2()) {
            let half = |side: u64| (side >> level).max(1);
            let depth = if first.layered { first.depth } else { half(first.depth) };
            let extent = [half(first.width), half(first.height), depth];
            let mut image = Image::packed(first.format, extent, first.layered).ok_or(INVALID_VALUE)?;
            image.base = bytes;
            let end = image.bytes().and_then(|n| bytes.checked_add(n)?.checked_next_multiple_of(SMALL));
            bytes = end.ok_or(INVALID_VALUE)?;
            images.push(image);
        }
        let memory = Memory::new(ctx, bytes)?;
        images.iter_mut().for_each(|image| image.base += memory.allocation.base);
        let levels = Mutex::new(vec![None; images.len()]);
        let mipmap = Arc::new(Mipmap { descriptor, images, context: handle(ctx), memory, levels });
        MIPMAPS.insert(mipmap.clone());
        Ok(mipmap)
    }

    /// Returns a level, which is the same array each time.
    pub fn level(self: &Arc<Self>, level: u32) -> Result<Arc<Array>> {
        let mut levels = self.levels.lock();
        let known = levels.get_mut(level as usize).ok_or(INVALID_VALUE)?;
        if let Some(array) = known {
            return Ok(array.clone());
        }
        let (image, d) = (self.images[level as usize], &self.descriptor);
        let side = |whole: usize, now: u64| if whole == 0 { 0 } else { now as usize };
        let descriptor = ArrayDescriptor {
            Width: image.width as usize,
            Height: side(d.Height, image.height),
            Depth: side(d.Depth, image.depth),
            ..*d
        };
        let (context, memory) = (self.context, self.memory.clone());
        let array =
            Arc::new(Array { descriptor, image, context, memory, parent: Some(Arc::downgrade(self)) });
        ARRAYS.insert(array.clone());
        *known = Some(array.clone());
        Ok(array)
    }

    pub fn destroy(self: &Arc<Self>) -> Result {
        let gone = MIPMAPS.remove(handle(self))?;
        for array in gone.levels.lock().drain(..).flatten() {
            let _ = ARRAYS.remove(handle(&array));
        }
        gone.memory.free()
    }
}

/// Destroys all arrays of a context.
pub fn forget_context(context: usize) {
    for array in ARRAYS.all().into_iter().filter(|a| a.context == context) {
        let _ = array.destroy();
    }
    for mipmap in MIPMAPS.all().into_iter().filter(|m| m.context == context) {
        let _ = mipmap.destroy();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_are_checked() {
        for (extent, channels, flags) in [
            ([64, 0, 0], 1, 0),
            ([64, 32, 0], 4, SURFACE),
            ([16, 16, 16], 2, 0),
            ([64, 0, 5], 1, LAYERED),
            ([64, 32, 5], 1, LAYERED | SURFACE),
            ([32, 32, 6], 1, CUBEMAP),
            ([32, 32, 12], 1, CUBEMAP | LAYERED),
        ] {
            let image = described(&ArrayDescriptor::new(extent, 0x20, channels, flags)).unwrap();
            assert_eq!(
                image.width * image.height * image.depth,
                extent.map(|n| n.max(1) as u64).iter().product()
            );
        }
        for (extent, channels, flags) in [
            ([0, 32, 0], 1, 0),
            ([64, 32, 0], 3, 0),
            ([64, 0, 3], 1, 0),
            ([64, 32, 0], 1, LAYERED),
            ([32, 32, 5], 1, CUBEMAP),
            ([32, 16, 6], 1, CUBEMAP),
            ([1 << 20, 0, 0], 1, 0),
            ([usize::MAX, usize::MAX, usize::MAX], 4, 0),
            ([64, 32, 0], 1, 0x1000),
        ] {
            assert_eq!(
                described(&ArrayDescriptor::new(extent, 0x20, channels, flags)).err(),
                Some(INVALID_VALUE)
            );
        }
        assert_eq!(described(&ArrayDescriptor::new([256, 256, 0], 0xb0, 3, 0)).err(), Some(NOT_SUPPORTED));
        assert_eq!(described(&ArrayDescriptor::new([256, 256, 0], 0x20, 1, 0x40)).err(), Some(NOT_SUPPORTED));
    }
}
