//! Checks of a launch, and its parameters.

use crate::driver::config;
use crate::driver::context::Context;
use crate::driver::device::SHARED_PER_BLOCK;
use crate::driver::module::{Function, function};
use crate::driver::op::Launch;
use crate::errors::{COOPERATIVE_LAUNCH_TOO_LARGE, INVALID_VALUE, LAUNCH_OUT_OF_RESOURCES, Result};
use std::sync::Arc;

/// Collects a kernel's parameters from either form of launch.
///
/// # Safety
/// `params` points to one pointer per parameter, or `extra` to a list that ends with a null id.
pub unsafe fn parameters(
    f: &Function,
    params: *const *const u8,
    extra: *const *const u8,
) -> Result<Vec<u64>> {
    let mut block = vec![0u64; (f.param_size as usize).div_ceil(8)];
    let bytes = block.as_mut_ptr().cast::<u8>();
    // SAFETY: the program vouches for its pointers; sizes come from the kernel itself.
    unsafe {
        if !extra.is_null() {
            if !params.is_null() {
                return Err(INVALID_VALUE);
            }
            let (mut buffer, mut size, mut at) = (std::ptr::null::<u8>(), 0usize, extra);
            while !(*at).is_null() {
                match *at as usize {
                    1 => buffer = *at.add(1),
                    2 => size = *(*at.add(1)).cast::<usize>(),
                    _ => return Err(INVALID_VALUE),
                }
                at = at.add(2);
            }
            if size > f.param_size as usize {
                return Err(LAUNCH_OUT_OF_RESOURCES);
            }
            if size > 0 && buffer.is_null() {
                return Err(INVALID_VALUE);
            }
            // Bytes beyond a short buffer are zero; NVIDIA's driver accepts it, too.
            std::ptr::copy_nonoverlapping(buffer, bytes, size);
            return Ok(block);
        }
        if params.is_null() && !f.params.is_empty() {
            return Err(INVALID_VALUE);
        }
        for (i, (offset, size)) in f.params.iter().enumerate() {
            let from = *params.add(i);
            if from.is_null() {
                return Err(INVALID_VALUE);
            }
            std::ptr::copy_nonoverlapping(from, bytes.add(*offset as usize), *size as usize);
        }
    }
    Ok(block)
}

impl Launch {
    /// Checks the shape of a launch as the driver does before it accepts it.
    pub fn validate(&self) -> Result {
        let [gx, gy, gz] = self.grid;
        let [bx, by, bz] = self.block;
        if gx == 0 || gy == 0 || gz == 0 || bx == 0 || by == 0 || bz == 0 {
            return Err(INVALID_VALUE);
        }
        if gx > i32::MAX as u32 || gy > 65535 || gz > 65535 || bx > 1024 || by > 1024 || bz > 64 {
            return Err(INVALID_VALUE);
        }
        let threads = u64::from(bx) * u64::from(by) * u64::from(bz);
        if threads > 1024 {
            return Err(INVALID_VALUE);
        }
        let f = &self.function;
        // An H200 returns this code for more threads than `__launch_bounds__` allows.
        if threads > u64::from(f.max_threads()) {
            return Err(INVALID_VALUE);
        }
        let limit = f.max_dynamic_shared().max(SHARED_PER_BLOCK.saturating_sub(f.static_shared()));
        if self.shared > limit {
            return Err(INVALID_VALUE);
        }
        if self.cooperative {
            let room =
                u64::from(f.blocks_per_sm(threads as u32, u64::from(self.shared))) * u64::from(config().sms);
            if u64::from(gx) * u64::from(gy) * u64::from(gz) > room {
                return Err(COOPERATIVE_LAUNCH_TOO_LARGE);
            }
        }
        Ok(())
    }

    /// # Safety
    /// See [`parameters`].
    #[allow(clippy::too_many_arguments)]
    pub unsafe fn new(
        ctx: &Arc<Context>,
        handle: usize,
        grid: [u32; 3],
        block: [u32; 3],
        shared: u32,
        cooperative: bool,
        params: *const *const u8,
        extra: *const *const u8,
    ) -> Result<Launch> {
        let f = function(handle, ctx)?;
        // SAFETY: as for this function.
        let params = unsafe { parameters(&f, params, extra)? };
        let buffered = !extra.is_null();
        let launch = Launch { function: f, grid, block, shared, params, cooperative, handle, buffered };
        launch.validate()?;
        Ok(launch)
    }
}
