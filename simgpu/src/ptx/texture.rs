//! Texture and surface instructions.

use super::ast::Ty;
use super::atomics::{fetch, put};
use super::code::{Bounds, Fetch, Mem, NONE, SurfaceAccess};
use super::exec::{BlockState, Env, Fault};
use super::image::Image;
use super::sampler::{Point, face};
use super::warp::{Frame, Warp};

impl Warp {
    fn lane(&self, top: Frame, row: u32, lane: usize) -> u64 {
        self.regs[(top.regs + row) as usize][lane].get()
    }

    /// Reads the channels of a texel; its memory may be freed by now.
    fn read_texel(
        &mut self,
        env: &Env,
        block: &mut BlockState,
        image: &Image,
        [x, y, z]: [u64; 3],
        lane: usize,
    ) -> Result<[u32; 4], Fault> {
        let ty = image.format.channel.ty();
        let at = image.base + z * image.slice() + y * image.pitch + x * image.format.bytes();
        let mut channels = [0; 4];
        for (i, channel) in channels.iter_mut().enumerate().take(image.format.channels as usize) {
            let at = at + i as u64 * u64::from(ty.size());
            let p = self.locate(env, block, Mem::Global, at, lane, ty.size(), false)?;
            // SAFETY: `locate` checked bounds and alignment.
            *channel = unsafe { fetch(p, ty) } as u32;
        }
        Ok(channels)
    }

    pub(super) fn fetch_texels(
        &mut self,
        env: &Env,
        block: &mut BlockState,
        top: Frame,
        active: u32,
        f: &Fetch,
    ) -> Result<(), Fault> {
        let mut rest = active;
        while rest != 0 {
            let l = rest.trailing_zeros() as usize;
            rest &= rest - 1;
            let object = self.lane(top, f.texel.object, l);
            let texture = env.images.textures.get(&object).ok_or(Fault::Illegal(object))?;
            let mut point = Point {
                at: std::array::from_fn(|d| match f.texel.at[d] {
                    NONE => 0.0,
                    row if f.whole => f64::from(self.lane(top, row, l) as i32),
                    row => f64::from(f32::from_bits(self.lane(top, row, l) as u32)),
                }),
                dims: usize::from(f.texel.dims),
                layer: None,
                whole: f.whole,
            };
            if f.texel.layer != NONE {
                point.layer = Some(i64::from(self.lane(top, f.texel.layer, l) as i32));
            }
            if f.cube {
                let (at, side) = face(point.at);
                (point.at, point.dims) = (at, 2);
                point.layer = Some(point.layer.unwrap_or(0) * 6 + side);
            }
            let number = |row: u32| match row {
                NONE => 0.0,
                row => f32::from_bits(self.lane(top, row, l) as u32),
            };
            let level = match f.steps {
                [[NONE, ..], _] => number(f.level),
                steps => texture.level_of(steps.map(|step| step.map(number))),
            };
            let read = |image: &Image, at| self.read_texel(env, block, image, at, l);
            let texel = match f.gather {
                Some(channel) => texture.gather(&point, usize::from(channel), read)?,
                None => texture.fetch(&point, level, read)?,
            };
            for (d, v) in f.d.iter().zip(texel) {
                let v = if f.signed { i64::from(v as i32) as u64 } else { u64::from(v) };
                self.regs[(top.regs + d) as usize][l].set(v);
            }
        }
        Ok(())
    }

    /// Returns the address that a lane accesses, or `None` if the access has no effect.
    fn surface_address(
        &self,
        env: &Env,
        top: Frame,
        lane: usize,
        access: &SurfaceAccess,
    ) -> Result<Option<u64>, Fault> {
        let object = self.lane(top, access.texel.object, lane);
        let image = env.images.surfaces.get(&object).ok_or(Fault::Illegal(object))?;
        let coordinate = |row: u32| if row == NONE { 0 } else { i64::from(self.lane(top, row, lane) as i32) };
        let [x, y, mut z] = access.texel.at.map(coordinate);
        if access.texel.layer != NONE {
            z = coordinate(access.texel.layer);
        }
        let bytes = i64::from(access.ty.size() * u32::from(access.n));
        let room = [image.row() as i64 - bytes, image.height as i64 - 1, image.depth as i64 - 1];
        let mut at = [x, y, z];
        if at.iter().zip(room).any(|(at, last)| !(0..=last).contains(at)) {
            match access.bounds {
                Bounds::Zero => return Ok(None),
                Bounds::Clamp if room[0] >= 0 => {
                    for (at, last) in at.iter_mut().zip(room) {
                        *at = (*at).clamp(0, last);
                    }
                    at[0] &= -bytes;
                }
                _ => return Err(Fault::Illegal(image.base)),
            }
        }
        let [x, y, z] = at.map(|n| n as u64);
        let address = image.base + z * image.slice() + y * image.pitch + x;
        if !x.is_multiple_of(bytes as u64) {
            return Err(Fault::Misaligned(address));
        }
        Ok(Some(address))
    }

    /// Loads or stores a word of a surface, whose rows may begin at any byte.
    fn surface_word(
        &mut self,
        env: &Env,
        block: &mut BlockState,
        at: u64,
        lane: usize,
        size: u32,
        stored: Option<u64>,
    ) -> Result<u64, Fault> {
        let aligned = at.is_multiple_of(u64::from(size));
        let (step, ty) = match size {
            2 if aligned => (2, Ty::B16),
            4 if aligned => (4, Ty::B32),
            8 if aligned => (8, Ty::B64),
            _ => (1, Ty::B8),
        };
        let mut loaded = 0;
        for i in (0..size).step_by(step as usize) {
            let p = self.locate(env, block, Mem::Global, at + u64::from(i), lane, step, stored.is_some())?;
            // SAFETY: `locate` checked bounds and alignment.
            unsafe {
                match stored {
                    Some(v) => put(p, step, v >> (8 * i)),
                    None => loaded |= fetch(p, ty) << (8 * i),
                }
            }
        }
        Ok(loaded)
    }

    pub(super) fn access_surface(
        &mut self,
        env: &Env,
        block: &mut BlockState,
        top: Frame,
        active: u32,
        access: &SurfaceAccess,
    ) -> Result<(), Fault> {
        let size = access.ty.size();
        let mut rest = active;
        while rest != 0 {
            let l = rest.trailing_zeros() as usize;
            rest &= rest - 1;
            let address = self.surface_address(env, top, l, access)?;
            for (i, row) in access.values.iter().take(usize::from(access.n)).enumerate() {
                let row = (top.regs + row) as usize;
                let Some(at) = address.map(|at| at + i as u64 * u64::from(size)) else {
                    if !access.store {
                        self.regs[row][l].set(0);
                    }
                    continue;
                };
                let stored = access.store.then(|| self.regs[row][l].get());
                let loaded = self.surface_word(env, block, at, l, size, stored)?;
                if !access.store {
                    self.regs[row][l].set(loaded);
                }
            }
        }
        Ok(())
    }
}
