//! Texture and surface objects.

use super::{out, read};
use crate::abi::{ResourceDesc, TextureDesc, ViewDesc};
use crate::driver::context::current;
use crate::driver::driver;
use crate::driver::texture::{self, LINEAR_LIMIT};
use crate::errors::{INVALID_VALUE, Result};
use crate::export;
use crate::ptx::image::Format;
use crate::registry::handle;

fn writable<T>(to: *mut T) -> Result {
    if to.is_null() { Err(INVALID_VALUE) } else { Ok(()) }
}

export! {
    fn cuTexObjectCreate(
        to: *mut u64, resource: *const ResourceDesc, description: *const TextureDesc, view: *const ViewDesc
    ) {
        let ctx = handle(&current()?);
        writable(to)?;
        let view = if view.is_null() { None } else { Some(read(view)?) };
        let object = texture::texture(ctx, read(resource)?, read(description)?, view)?;
        out(to, texture::insert(object))
    }

    fn cuTexObjectDestroy(number: u64) {
        current()?;
        texture::remove(number, false)
    }

    fn cuTexObjectGetResourceDesc(to: *mut ResourceDesc, number: u64) {
        current()?;
        out(to, texture::find(number, false)?.resource)
    }

    fn cuTexObjectGetTextureDesc(to: *mut TextureDesc, number: u64) {
        current()?;
        out(to, texture::find(number, false)?.texture)
    }

    fn cuTexObjectGetResourceViewDesc(to: *mut ViewDesc, number: u64) {
        current()?;
        out(to, texture::find(number, false)?.view.ok_or(INVALID_VALUE)?)
    }

    fn cuSurfObjectCreate(to: *mut u64, resource: *const ResourceDesc) {
        let ctx = handle(&current()?);
        writable(to)?;
        let object = texture::surface(ctx, read(resource)?)?;
        out(to, texture::insert(object))
    }

    fn cuSurfObjectDestroy(number: u64) {
        current()?;
        texture::remove(number, true)
    }

    fn cuSurfObjectGetResourceDesc(to: *mut ResourceDesc, number: u64) {
        current()?;
        out(to, texture::find(number, true)?.resource)
    }

    fn cuDeviceGetTexture1DLinearMaxWidth(to: *mut usize, format: u32, channels: u32, device: i32) {
        driver()?.device(device)?;
        Format::new(format, channels).ok_or(INVALID_VALUE)?;
        out(to, LINEAR_LIMIT as usize)
    }
}
