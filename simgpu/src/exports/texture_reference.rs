//! Texture and surface references: variables of a module that the program binds to memory, and
//! references without a variable, which no kernel reads.

use super::{out, out_opt, read};
use crate::abi::{
    FlatDescriptor, RESOURCE_ARRAY, RESOURCE_LINEAR, RESOURCE_MIPMAP, RESOURCE_PITCH2D, ResourceDesc,
    TextureDesc,
};
use crate::driver::array::{ARRAYS, MIPMAPS, SURFACE};
use crate::driver::context::current;
use crate::driver::driver;
use crate::driver::module::Module;
use crate::driver::texture::{self, ALIGNMENT};
use crate::errors::{INVALID_HANDLE, INVALID_VALUE, Result};
use crate::export;
use crate::registry::{Registry, handle};
use parking_lot::Mutex;
use std::sync::{Arc, Weak};

static REFERENCES: Registry<Reference> = Registry::new();
static SURFACES: Registry<SurfaceReference> = Registry::new();

/// `CU_TR_ADDRESS_MODE_BORDER`, the last one, and `CU_TR_FILTER_MODE_LINEAR`.
const MODES: u32 = 3;
const LINEAR: u32 = 1;
/// `CU_TRSA_OVERRIDE_FORMAT`
const OVERRIDE_FORMAT: u32 = 1;

/// A variable of a module.
struct Variable {
    module: Weak<Module>,
    address: u64,
}

#[derive(Default)]
struct Reference {
    properties: Mutex<Properties>,
    variable: Option<Variable>,
}

struct SurfaceReference {
    array: Mutex<usize>,
    variable: Variable,
}

#[derive(Default, Clone, Copy)]
struct Properties {
    /// The memory to which it is bound, if any; its format may be set later.
    resource: Option<ResourceDesc>,
    format: (u32, u32),
    modes: [u32; 3],
    filters: [u32; 2],
    bias: f32,
    clamp: [f32; 2],
    anisotropy: u32,
    border: [f32; 4],
    flags: u32,
}

impl Properties {
    fn texture(&self) -> TextureDesc {
        TextureDesc {
            addressMode: self.modes,
            filterMode: self.filters[0],
            flags: self.flags,
            maxAnisotropy: self.anisotropy,
            mipmapFilterMode: self.filters[1],
            mipmapLevelBias: self.bias,
            minMipmapLevelClamp: self.clamp[0],
            maxMipmapLevelClamp: self.clamp[1],
            borderColor: self.border,
            ..TextureDesc::default()
        }
    }

    fn format_word(&self) -> u64 {
        u64::from(self.format.0) | u64::from(self.format.1) << 32
    }

    /// Returns the handle of the array to which it is bound.
    fn array(&self, kind: u32) -> Result<usize> {
        let resource = self.resource.filter(|r| r.resType == kind).ok_or(INVALID_VALUE)?;
        Ok(resource.res[0] as usize)
    }
}

fn get(h: usize) -> Result<Properties> {
    current()?;
    Ok(*REFERENCES.find(h).ok_or(INVALID_HANDLE)?.properties.lock())
}

fn set(h: usize, change: impl FnOnce(&mut Properties)) -> Result {
    let ctx = current()?;
    let reference = REFERENCES.find(h).ok_or(INVALID_HANDLE)?;
    let mut properties = reference.properties.lock();
    change(&mut properties);
    let Some(variable) = &reference.variable else { return Ok(()) };
    // Properties that do not fit each other yet make no texture; the program may set more of them.
    let object = properties.resource.and_then(|mut resource| {
        if matches!(resource.resType, RESOURCE_LINEAR | RESOURCE_PITCH2D) {
            resource.res[1] = properties.format_word();
        }
        texture::texture(handle(&ctx), resource, properties.texture(), None).ok()
    });
    texture::bind(variable.address, object);
    Ok(())
}

fn resource(kind: u32, words: &[u64]) -> Option<ResourceDesc> {
    let mut r = ResourceDesc { resType: kind, ..ResourceDesc::default() };
    r.res[..words.len()].copy_from_slice(words);
    Some(r)
}

/// Binds rows of memory.
fn bind_rows(h: usize, d: FlatDescriptor, at: u64, pitch: usize) -> Result {
    check(aligned(at)? == at)?;
    let words = [at, 0, d.Width as u64, d.Height as u64, pitch as u64];
    set(h, |p| (p.resource, p.format) = (resource(RESOURCE_PITCH2D, &words), (d.Format, d.NumChannels)))
}

/// Returns the reference of a texture variable, which is the same each time.
pub fn texture_of(module: &Arc<Module>, address: u64) -> usize {
    let found = REFERENCES.all().into_iter().find(|r| {
        let variable = r.variable.as_ref().filter(|v| v.address == address);
        variable.and_then(|v| v.module.upgrade()).is_some_and(|m| Arc::ptr_eq(&m, module))
    });
    let variable = Variable { module: Arc::downgrade(module), address };
    let new = || {
        let reference = Arc::new(Reference { variable: Some(variable), ..Reference::default() });
        REFERENCES.insert(reference)
    };
    found.map_or_else(new, |r| handle(&r))
}

/// As [`texture_of`], of a surface variable.
pub fn surface_of(module: &Arc<Module>, address: u64) -> usize {
    let found = SURFACES.all().into_iter().find(|r| {
        r.variable.address == address && r.variable.module.upgrade().is_some_and(|m| Arc::ptr_eq(&m, module))
    });
    let variable = Variable { module: Arc::downgrade(module), address };
    let new = || SURFACES.insert(Arc::new(SurfaceReference { array: Mutex::new(0), variable }));
    found.map_or_else(new, |r| handle(&r))
}

/// Drops the references of a module that is unloaded.
pub fn forget(module: &Arc<Module>) {
    let of_it = |v: &Variable| v.module.upgrade().is_none_or(|m| Arc::ptr_eq(&m, module));
    for r in REFERENCES.all() {
        if let Some(v) = r.variable.as_ref().filter(|v| of_it(v)) {
            texture::bind(v.address, None);
            let _ = REFERENCES.remove(handle(&r));
        }
    }
    for r in SURFACES.all().into_iter().filter(|r| of_it(&r.variable)) {
        texture::bind(r.variable.address, None);
        let _ = SURFACES.remove(handle(&r));
    }
}

fn check(permitted: bool) -> Result {
    if permitted { Ok(()) } else { Err(INVALID_VALUE) }
}

/// Returns the address up to which a texture is aligned, if it is the program's.
fn aligned(at: u64) -> Result<u64> {
    driver()?.space.find(at).ok_or(INVALID_VALUE)?;
    Ok(at / ALIGNMENT * ALIGNMENT)
}

export! {
    fn cuTexRefCreate(to: *mut usize) {
        current()?;
        check(!to.is_null())?;
        out(to, REFERENCES.insert(Arc::default()))
    }
    fn cuTexRefDestroy(h: usize) {
        get(h)?;
        // References of a module go with the module.
        check(REFERENCES.get(h)?.variable.is_none())?;
        REFERENCES.remove(h).map(drop)
    }

    fn cuTexRefSetAddress_v2(offset: *mut usize, h: usize, at: u64, bytes: usize) {
        get(h)?;
        let base = aligned(at)?;
        // Without a place for the offset, the address must need none.
        check(base == at || !offset.is_null())?;
        out_opt(offset, (at - base) as usize);
        let bytes = (at - base).checked_add(bytes as u64).ok_or(INVALID_VALUE)?;
        set(h, |p| p.resource = resource(RESOURCE_LINEAR, &[base, 0, bytes]))
    }
    fn cuTexRefSetAddress2D_v2(h: usize, desc: *const FlatDescriptor, at: u64, pitch: usize) {
        bind_rows(h, read(desc)?, at, pitch)
    }
    fn cuTexRefSetAddress2D_v3(h: usize, desc: *const FlatDescriptor, at: u64, pitch: usize) {
        bind_rows(h, read(desc)?, at, pitch)
    }
    fn cuTexRefGetAddress_v2(to: *mut u64, h: usize) {
        let r = get(h)?.resource.filter(|r| matches!(r.resType, RESOURCE_LINEAR | RESOURCE_PITCH2D));
        out(to, r.ok_or(INVALID_VALUE)?.res[0])
    }
    fn cuTexRefSetArray(h: usize, array: usize, flags: u32) {
        get(h)?;
        check(flags == OVERRIDE_FORMAT)?;
        let d = ARRAYS.get(array)?.descriptor;
        let bound = resource(RESOURCE_ARRAY, &[array as u64]);
        set(h, |p| (p.resource, p.format) = (bound, (d.Format, d.NumChannels)))
    }
    fn cuTexRefGetArray(to: *mut usize, h: usize) { out(to, get(h)?.array(RESOURCE_ARRAY)?) }
    fn cuTexRefSetMipmappedArray(h: usize, mipmap: usize, flags: u32) {
        get(h)?;
        check(flags == OVERRIDE_FORMAT)?;
        let d = MIPMAPS.get(mipmap)?.descriptor;
        let bound = resource(RESOURCE_MIPMAP, &[mipmap as u64]);
        set(h, |p| (p.resource, p.format) = (bound, (d.Format, d.NumChannels)))
    }
    fn cuTexRefGetMipmappedArray(to: *mut usize, h: usize) { out(to, get(h)?.array(RESOURCE_MIPMAP)?) }
    fn cuSurfRefSetArray(h: usize, array: usize, flags: u32) {
        let ctx = current()?;
        let reference = SURFACES.find(h).ok_or(INVALID_HANDLE)?;
        check(flags == 0 && ARRAYS.get(array)?.descriptor.Flags & SURFACE != 0)?;
        let bound = resource(RESOURCE_ARRAY, &[array as u64]).ok_or(INVALID_VALUE)?;
        texture::bind(reference.variable.address, Some(texture::surface(handle(&ctx), bound)?));
        *reference.array.lock() = array;
        Ok(())
    }
    fn cuSurfRefGetArray(to: *mut usize, h: usize) {
        current()?;
        let array = *SURFACES.find(h).ok_or(INVALID_HANDLE)?.array.lock();
        check(array != 0)?;
        out(to, array)
    }
    fn cuTexRefSetFormat(h: usize, format: u32, n: u32) {
        check(matches!(n, 1 | 2 | 4))?;
        set(h, |p| p.format = (format, n))
    }
    fn cuTexRefGetFormat(format: *mut u32, n: *mut u32, h: usize) {
        let known = get(h)?.format;
        out_opt(format, known.0);
        out_opt(n, known.1);
        Ok(())
    }
    fn cuTexRefSetAddressMode(h: usize, dimension: u32, mode: u32) {
        check(dimension < 3 && mode <= MODES)?;
        set(h, |p| p.modes[dimension as usize] = mode)
    }
    fn cuTexRefGetAddressMode(to: *mut u32, h: usize, dimension: u32) {
        check(dimension < 3)?;
        out(to, get(h)?.modes[dimension as usize])
    }
    fn cuTexRefSetFilterMode(h: usize, mode: u32) {
        check(mode <= LINEAR)?;
        set(h, |p| p.filters[0] = mode)
    }
    fn cuTexRefGetFilterMode(to: *mut u32, h: usize) { out(to, get(h)?.filters[0]) }
    fn cuTexRefSetMipmapFilterMode(h: usize, mode: u32) {
        check(mode <= LINEAR)?;
        set(h, |p| p.filters[1] = mode)
    }
    fn cuTexRefGetMipmapFilterMode(to: *mut u32, h: usize) { out(to, get(h)?.filters[1]) }
    fn cuTexRefSetMipmapLevelBias(h: usize, bias: f32) { set(h, |p| p.bias = bias) }
    fn cuTexRefGetMipmapLevelBias(to: *mut f32, h: usize) { out(to, get(h)?.bias) }
    fn cuTexRefSetMipmapLevelClamp(h: usize, least: f32, most: f32) { set(h, |p| p.clamp = [least, most]) }
    fn cuTexRefGetMipmapLevelClamp(least: *mut f32, most: *mut f32, h: usize) {
        let [a, b] = get(h)?.clamp;
        out(least, a)?;
        out(most, b)
    }
    fn cuTexRefSetMaxAnisotropy(h: usize, most: u32) { set(h, |p| p.anisotropy = most) }
    fn cuTexRefGetMaxAnisotropy(to: *mut u32, h: usize) { out(to, get(h)?.anisotropy) }
    fn cuTexRefSetBorderColor(h: usize, color: *const [f32; 4]) {
        let color = read(color)?;
        set(h, |p| p.border = color)
    }
    fn cuTexRefGetBorderColor(to: *mut [f32; 4], h: usize) { out(to, get(h)?.border) }
    fn cuTexRefSetFlags(h: usize, flags: u32) { set(h, |p| p.flags = flags) }
    fn cuTexRefGetFlags(to: *mut u32, h: usize) { out(to, get(h)?.flags) }
}
