//! The one driver of the process.

use crate::config::Config;
use crate::context::Context;
use crate::device::Device;
use crate::errors::{INVALID_DEVICE, NOT_INITIALIZED, Result};
use crate::memory::Space;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, OnceLock};

pub struct Driver {
    pub config: Arc<Config>,
    pub devices: Vec<Device>,
    pub space: Space,
}

static DRIVER: OnceLock<Driver> = OnceLock::new();
static CONFIG: LazyLock<Arc<Config>> = LazyLock::new(|| Arc::new(Config::load()));
/// Set in a child of a process that had initialised the driver, which cannot use it.
static FORKED: AtomicBool = AtomicBool::new(false);

extern "C" fn in_child() {
    if DRIVER.get().is_some() {
        FORKED.store(true, Ordering::Relaxed);
    }
}

/// The configuration, which exists before `cuInit`.
pub fn config() -> &'static Config {
    &CONFIG
}

pub fn init() -> Result {
    if FORKED.load(Ordering::Relaxed) {
        return Err(NOT_INITIALIZED);
    }
    if CONFIG.devices == 0 {
        return Err(crate::errors::NO_DEVICE);
    }
    DRIVER.get_or_init(|| {
        // SAFETY: registers a function that only touches atomics.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        Driver {
            config: CONFIG.clone(),
            devices: (0..CONFIG.devices).map(|i| Device::new(i, Context::new(i, true, 0))).collect(),
            space: Space::new(&CONFIG),
        }
    });
    Ok(())
}

/// The driver, once `cuInit` has succeeded.
pub fn driver() -> Result<&'static Driver> {
    if FORKED.load(Ordering::Relaxed) {
        return Err(NOT_INITIALIZED);
    }
    DRIVER.get().ok_or(NOT_INITIALIZED)
}

impl Driver {
    pub fn device(&self, ordinal: i32) -> Result<&Device> {
        usize::try_from(ordinal).ok().and_then(|i| self.devices.get(i)).ok_or(INVALID_DEVICE)
    }
}
