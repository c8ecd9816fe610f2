//! Texture and surface objects, and what kernels read through them.

use crate::abi::{
    RESOURCE_ARRAY, RESOURCE_LINEAR, RESOURCE_MIPMAP, RESOURCE_PITCH2D, ResourceDesc, TextureDesc, ViewDesc,
};
use crate::driver::array::{ARRAYS, MIPMAPS, Memory, SURFACE};
use crate::driver::driver;
use crate::errors::{INVALID_VALUE, Result};
use crate::ptx::exec::Images;
use crate::ptx::image::{Format, Image};
use crate::ptx::sampler::{Mode, Sampler, Texture};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Bits of `CUDA_TEXTURE_DESC::flags`.
const READ_AS_INTEGER: u32 = 1;
const NORMALIZED: u32 = 2;
const SRGB: u32 = 0x10;
/// Also hints for trilinear filters and for the edges of cubes.
const KNOWN_FLAGS: u32 = READ_AS_INTEGER | NORMALIZED | SRGB | 0x20 | 0x40;

/// Alignment of a texture's memory and of its rows, in bytes, and its longest sides: the device's
/// attributes 14, 51 and 69 to 72.
pub const ALIGNMENT: u64 = 512;
const PITCH_ALIGNMENT: u64 = 32;
pub const LINEAR_LIMIT: u64 = 1 << 28;
const PITCH2D_LIMITS: [u64; 3] = [131_072, 65000, 2_097_120];

/// A texture or a surface as the program describes it.
#[derive(Clone)]
pub struct Object {
    pub context: usize,
    pub resource: ResourceDesc,
    pub texture: TextureDesc,
    pub view: Option<ViewDesc>,
    kind: Kind,
    /// Memory of its array, without which it is gone.
    memory: Option<Arc<Memory>>,
}

#[derive(Clone)]
enum Kind {
    Texture(Arc<Texture>),
    Surface(Image),
}

#[derive(Default)]
struct Objects {
    last: u64,
    /// By the number of the object, or the address of the variable that refers to it.
    all: BTreeMap<u64, Arc<Object>>,
    images: Option<Arc<Images>>,
}

static OBJECTS: Mutex<Objects> = Mutex::new(Objects { last: 0, all: BTreeMap::new(), images: None });

/// Notes that an array is gone.
pub fn changed() {
    OBJECTS.lock().images = None;
}

/// Adds an object, and returns its number.
pub fn insert(object: Object) -> u64 {
    let mut objects = OBJECTS.lock();
    objects.last += 1;
    objects.images = None;
    let number = objects.last;
    objects.all.insert(number, Arc::new(object));
    number
}

/// Lets the variable at an address refer to an object, or to none.
pub fn bind(address: u64, object: Option<Object>) {
    let mut objects = OBJECTS.lock();
    objects.images = None;
    match object {
        Some(object) => objects.all.insert(address, Arc::new(object)),
        None => objects.all.remove(&address),
    };
}

/// Finds an object of the program by its number.
pub fn find(number: u64, surface: bool) -> Result<Arc<Object>> {
    let objects = OBJECTS.lock();
    let object = objects.all.get(&number).filter(|_| number <= objects.last).ok_or(INVALID_VALUE)?;
    if matches!(object.kind, Kind::Surface(_)) == surface { Ok(object.clone()) } else { Err(INVALID_VALUE) }
}

pub fn remove(number: u64, surface: bool) -> Result {
    find(number, surface)?;
    bind(number, None);
    Ok(())
}

pub fn forget_context(context: usize) {
    let mut objects = OBJECTS.lock();
    objects.all.retain(|_, object| object.context != context);
    objects.images = None;
}

/// Returns the textures and surfaces that kernels can use now.
pub fn images() -> Arc<Images> {
    let mut objects = OBJECTS.lock();
    if let Some(images) = &objects.images {
        return images.clone();
    }
    let mut images = Images::default();
    for (number, object) in &objects.all {
        if object.memory.as_ref().is_some_and(|memory| !memory.lives()) {
            continue;
        }
        match &object.kind {
            Kind::Texture(texture) => drop(images.textures.insert(*number, texture.clone())),
            Kind::Surface(image) => drop(images.surfaces.insert(*number, *image)),
        }
    }
    let images = Arc::new(images);
    objects.images = Some(images.clone());
    images
}

fn check(permitted: bool) -> Result {
    if permitted { Ok(()) } else { Err(INVALID_VALUE) }
}

/// Refuses memory that is not the program's.
fn check_memory(at: u64, bytes: u64) -> Result {
    check(at.is_multiple_of(ALIGNMENT))?;
    driver()?.space.pieces(at, bytes).map(drop)
}

/// Returns the image of linear memory.
fn linear(at: u64, format: Format, bytes: u64) -> Result<Image> {
    let width = bytes / format.bytes();
    check((1..=LINEAR_LIMIT).contains(&width))?;
    check_memory(at, bytes)?;
    let image = Image::packed(format, [width, 1, 1], false).ok_or(INVALID_VALUE)?;
    Ok(Image { base: at, ..image })
}

/// Returns the image of rows with a pitch.
fn pitched(at: u64, format: Format, width: u64, height: u64, pitch: u64) -> Result<Image> {
    let [widest, highest, longest] = PITCH2D_LIMITS;
    check((1..=widest).contains(&width) && (1..=highest).contains(&height))?;
    check(pitch.is_multiple_of(PITCH_ALIGNMENT) && (width * format.bytes()..=longest).contains(&pitch))?;
    check_memory(at, (height - 1) * pitch + width * format.bytes())?;
    Ok(Image { base: at, width, height, depth: 1, pitch, format, layered: false })
}

/// Returns the images of a resource, and the memory of its array.
fn resource_images(r: &ResourceDesc) -> Result<(Vec<Image>, Option<Arc<Memory>>)> {
    let [first, second, third, fourth, fifth, ..] = r.res;
    let format = || Format::new(second as u32, (second >> 32) as u32).ok_or(INVALID_VALUE);
    check(r.flags == 0)?;
    Ok(match r.resType {
        RESOURCE_ARRAY => {
            let array = ARRAYS.find(first as usize).ok_or(INVALID_VALUE)?;
            (vec![array.image], Some(array.memory.clone()))
        }
        RESOURCE_MIPMAP => {
            let mipmap = MIPMAPS.find(first as usize).ok_or(INVALID_VALUE)?;
            (mipmap.images.clone(), Some(mipmap.memory.clone()))
        }
        RESOURCE_LINEAR => (vec![linear(first, format()?, third)?], None),
        RESOURCE_PITCH2D => (vec![pitched(first, format()?, third, fourth, fifth)?], None),
        _ => return Err(INVALID_VALUE),
    })
}

/// Returns the format of a view; those of compressed blocks are not simulated.
fn view_format(number: u32) -> Option<Format> {
    // `CU_RES_VIEW_FORMAT_UINT_1X8` and on: each type with one, two and four channels.
    let types = [0x01, 0x08, 0x02, 0x09, 0x03, 0x0a, 0x10, 0x20];
    let number = number.checked_sub(1)? as usize;
    Format::new(*types.get(number / 3)?, 1 << (number % 3))
}

/// Applies a view: other types of the channels, some of the levels, some of the layers.
fn viewed(images: &[Image], view: &ViewDesc) -> Result<Vec<Image>> {
    let whole = images[0];
    let format =
        if view.format == 0 { whole.format } else { view_format(view.format).ok_or(INVALID_VALUE)? };
    let size = |given: usize, side: u64| given as u64 == side || (given == 0 && side == 1);
    check(format.bytes() == whole.format.bytes())?;
    check(size(view.width, whole.width) && size(view.height, whole.height) && size(view.depth, whole.depth))?;
    let (first, last) = (view.firstMipmapLevel as usize, view.lastMipmapLevel as usize);
    check(first <= last && last < images.len())?;
    let (near, far) = (u64::from(view.firstLayer), u64::from(view.lastLayer));
    check(near <= far && (if whole.layered { far < whole.depth } else { far == 0 }))?;
    let layers = |image: &Image| {
        let mut image = Image { format, ..*image };
        if whole.layered {
            image.base += near * image.slice();
            image.depth = far - near + 1;
        }
        image
    };
    Ok(images[first..=last].iter().map(layers).collect())
}

fn sampler(t: &TextureDesc) -> Result<Sampler> {
    let mut modes = [Mode::Clamp; 3];
    for (mode, number) in modes.iter_mut().zip(t.addressMode) {
        *mode = Mode::new(number).ok_or(INVALID_VALUE)?;
    }
    check(t.filterMode <= 1 && t.mipmapFilterMode <= 1 && t.flags & !KNOWN_FLAGS == 0)?;
    Ok(Sampler {
        modes,
        linear: t.filterMode == 1,
        normalized: t.flags & NORMALIZED != 0,
        fractions: t.flags & READ_AS_INTEGER == 0,
        srgb: t.flags & SRGB != 0,
        border: t.borderColor,
        between_levels: t.mipmapFilterMode == 1,
        bias: t.mipmapLevelBias,
        levels: [t.minMipmapLevelClamp, t.maxMipmapLevelClamp],
    })
}

/// Creates a texture.
pub fn texture(
    context: usize,
    resource: ResourceDesc,
    texture: TextureDesc,
    view: Option<ViewDesc>,
) -> Result<Object> {
    let (mut levels, memory) = resource_images(&resource)?;
    let mut sampler = sampler(&texture)?;
    if let Some(view) = &view {
        check(memory.is_some())?;
        levels = viewed(&levels, view)?;
    }
    if resource.resType == RESOURCE_LINEAR {
        // Fetches outside linear memory return 0, whatever the modes say.
        (sampler.modes, sampler.border) = ([Mode::Border; 3], [0.0; 4]);
        (sampler.linear, sampler.normalized) = (false, false);
    }
    // A number that is not one would be no bound.
    check(!sampler.levels.iter().any(|level| level.is_nan()) && !sampler.bias.is_nan())?;
    check(resource.resType != RESOURCE_MIPMAP || sampler.normalized)?;
    let built = Texture { levels, sampler };
    check(!sampler.linear || built.is_float())?;
    Ok(Object { context, resource, texture, view, kind: Kind::Texture(Arc::new(built)), memory })
}

/// Creates a surface, which only certain arrays can be.
pub fn surface(context: usize, resource: ResourceDesc) -> Result<Object> {
    check(resource.resType == RESOURCE_ARRAY && resource.flags == 0)?;
    let array = ARRAYS.find(resource.res[0] as usize).ok_or(INVALID_VALUE)?;
    check(array.descriptor.Flags & SURFACE != 0)?;
    let (kind, memory) = (Kind::Surface(array.image), Some(array.memory.clone()));
    Ok(Object { context, resource, texture: TextureDesc::default(), view: None, kind, memory })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(channel: u32, channels: u32, extent: [u64; 3], layered: bool) -> Image {
        Image::packed(Format::new(channel, channels).unwrap(), extent, layered).unwrap()
    }

    #[test]
    fn views_stay_inside() {
        let levels: Vec<_> = (0..3).map(|l| image(0x20, 1, [8 >> l, 4 >> l, 1], false)).collect();
        let whole = ViewDesc { width: 8, height: 4, ..ViewDesc::default() };
        let part = viewed(&levels, &ViewDesc { firstMipmapLevel: 1, lastMipmapLevel: 2, ..whole }).unwrap();
        assert_eq!(part, &levels[1..]);
        // CU_RES_VIEW_FORMAT_UINT_4X8
        let bytes = viewed(&levels, &ViewDesc { format: 3, ..whole }).unwrap();
        assert_eq!(bytes[0].format, Format::new(1, 4).unwrap());
        for wrong in [
            ViewDesc { width: 16, ..whole },
            ViewDesc { lastMipmapLevel: 3, ..whole },
            ViewDesc { firstMipmapLevel: 2, lastMipmapLevel: 1, ..whole },
            ViewDesc { lastLayer: 1, ..whole },
            ViewDesc { format: 1, ..whole },
            ViewDesc { format: 25, ..whole },
        ] {
            assert_eq!(viewed(&levels, &wrong).err(), Some(INVALID_VALUE));
        }
        let layers = [image(0x20, 1, [8, 4, 6], true)];
        let view = ViewDesc { width: 8, height: 4, depth: 6, firstLayer: 2, lastLayer: 4, ..whole };
        let part = viewed(&layers, &view).unwrap()[0];
        assert_eq!((part.base, part.depth), (2 * 8 * 4 * 4, 3));
        assert!(viewed(&layers, &ViewDesc { lastLayer: 6, ..view }).is_err());
    }

    #[test]
    fn formats_of_views() {
        for (number, channel, channels) in [
            (1, 0x01, 1),
            (6, 0x08, 4),
            (9, 0x02, 4),
            (14, 0x03, 2),
            (18, 0x0a, 4),
            (19, 0x10, 1),
            (24, 0x20, 4),
        ] {
            assert_eq!(view_format(number), Format::new(channel, channels));
        }
        assert!(view_format(0).is_none() && view_format(u32::MAX).is_none());
    }
}
