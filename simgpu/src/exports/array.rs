//! Arrays and mipmapped arrays.

use super::{out, read};
use crate::abi::{ArrayDescriptor, FlatDescriptor};
use crate::driver::array::{ARRAYS, Array, MIPMAPS, Mipmap};
use crate::driver::capture::forbid_unsafe;
use crate::driver::context::{CONTEXTS, working};
use crate::driver::{driver, submit};
use crate::errors::{INVALID_VALUE, Result};
use crate::export;
use crate::registry::handle;
use std::sync::Arc;

fn create(to: *mut usize, descriptor: ArrayDescriptor) -> Result {
    let ctx = working()?;
    submit::not_in_callback()?;
    forbid_unsafe()?;
    if to.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the program vouches for its pointer.
    unsafe { out(to, handle(&Array::new(&ctx, descriptor)?)) }
}

fn array(h: usize) -> Result<Arc<Array>> {
    driver()?;
    ARRAYS.get(h)
}

fn mipmap(h: usize) -> Result<Arc<Mipmap>> {
    driver()?;
    MIPMAPS.get(h)
}

/// Waits for the work of an array's context, as a free of other memory does.
fn settle(context: usize) -> Result {
    submit::not_in_callback()?;
    forbid_unsafe()?;
    match CONTEXTS.find(context) {
        Some(ctx) => {
            ctx.life().check()?;
            ctx.synchronize()
        }
        None => Ok(()),
    }
}

export! {
    fn cuArrayCreate_v2(to: *mut usize, descriptor: *const FlatDescriptor) {
        let d = read(descriptor)?;
        create(to, ArrayDescriptor::new([d.Width, d.Height, 0], d.Format, d.NumChannels, 0))
    }

    fn cuArray3DCreate_v2(to: *mut usize, descriptor: *const ArrayDescriptor) {
        create(to, read(descriptor)?)
    }

    fn cuArrayGetDescriptor_v2(to: *mut FlatDescriptor, h: usize) {
        let d = array(h)?.descriptor;
        out(to, FlatDescriptor { Width: d.Width, Height: d.Height, Format: d.Format, NumChannels: d.NumChannels })
    }

    fn cuArray3DGetDescriptor_v2(to: *mut ArrayDescriptor, h: usize) {
        out(to, array(h)?.descriptor)
    }

    fn cuArrayDestroy(h: usize) {
        let array = array(h)?;
        settle(array.context)?;
        array.destroy()
    }

    // Only arrays with planes, tiles or without memory have these properties; none is simulated.
    fn cuArrayGetPlane(_to: *mut usize, h: usize, _plane: u32) {
        array(h)?;
        Err(INVALID_VALUE)
    }

    fn cuArrayGetSparseProperties(_to: *mut [u64; 6], h: usize) {
        array(h)?;
        Err(INVALID_VALUE)
    }

    fn cuArrayGetMemoryRequirements(_to: *mut [u64; 4], h: usize, device: i32) {
        array(h)?;
        driver()?.device(device)?;
        Err(INVALID_VALUE)
    }

    fn cuMipmappedArrayCreate(to: *mut usize, descriptor: *const ArrayDescriptor, levels: u32) {
        let ctx = working()?;
        submit::not_in_callback()?;
        forbid_unsafe()?;
        let d = read(descriptor)?;
        if to.is_null() {
            return Err(INVALID_VALUE);
        }
        out(to, handle(&Mipmap::new(&ctx, d, levels)?))
    }

    fn cuMipmappedArrayGetLevel(to: *mut usize, h: usize, level: u32) {
        let mipmap = mipmap(h)?;
        if to.is_null() {
            return Err(INVALID_VALUE);
        }
        out(to, handle(&mipmap.level(level)?))
    }

    fn cuMipmappedArrayDestroy(h: usize) {
        let mipmap = mipmap(h)?;
        settle(mipmap.context)?;
        mipmap.destroy()
    }

    fn cuMipmappedArrayGetMemoryRequirements(_to: *mut [u64; 4], h: usize, device: i32) {
        mipmap(h)?;
        driver()?.device(device)?;
        Err(INVALID_VALUE)
    }

    fn cuMipmappedArrayGetSparseProperties(_to: *mut [u64; 6], h: usize) {
        mipmap(h)?;
        Err(INVALID_VALUE)
    }
}
