//! Texture references: their properties. No simulated kernel reads a texture.

use super::{out, out_opt, read};
use crate::driver::context::current;
use crate::driver::driver;
use crate::errors::{INVALID_HANDLE, INVALID_VALUE, Result};
use crate::export;
use crate::registry::Registry;
use parking_lot::Mutex;
use std::sync::Arc;

static REFERENCES: Registry<Reference> = Registry::new();

/// Alignment of a linear texture, in bytes.
const ALIGNMENT: u64 = 512;
/// `CU_TR_ADDRESS_MODE_BORDER`, the last one, and `CU_TR_FILTER_MODE_LINEAR`.
const MODES: u32 = 3;
const LINEAR: u32 = 1;

#[derive(Default)]
struct Reference(Mutex<Properties>);

#[derive(Default, Clone, Copy)]
struct Properties {
    address: u64,
    format: (u32, u32),
    modes: [u32; 3],
    filters: [u32; 2],
    bias: f32,
    clamp: [f32; 2],
    anisotropy: u32,
    border: [f32; 4],
    flags: u32,
}

fn get(h: usize) -> Result<Properties> {
    current()?;
    Ok(*REFERENCES.find(h).ok_or(INVALID_HANDLE)?.0.lock())
}

fn set(h: usize, change: impl FnOnce(&mut Properties)) -> Result {
    current()?;
    change(&mut REFERENCES.find(h).ok_or(INVALID_HANDLE)?.0.lock());
    Ok(())
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
        REFERENCES.remove(h).map(drop)
    }

    fn cuTexRefSetAddress_v2(offset: *mut usize, h: usize, at: u64, _bytes: usize) {
        get(h)?;
        let base = aligned(at)?;
        // Without a place for the offset, the address must need none.
        check(base == at || !offset.is_null())?;
        out_opt(offset, (at - base) as usize);
        set(h, |p| p.address = base)
    }
    fn cuTexRefSetAddress2D_v2(h: usize, desc: *const [u64; 3], at: u64, _pitch: usize) {
        read(desc)?;
        check(aligned(at)? == at)?;
        set(h, |p| p.address = at)
    }
    fn cuTexRefSetAddress2D_v3(h: usize, desc: *const [u64; 3], at: u64, _pitch: usize) {
        read(desc)?;
        check(aligned(at)? == at)?;
        set(h, |p| p.address = at)
    }
    fn cuTexRefGetAddress_v2(to: *mut u64, h: usize) {
        let address = get(h)?.address;
        check(address != 0)?;
        out(to, address)
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
