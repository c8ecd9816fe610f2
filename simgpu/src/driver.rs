//! The one driver of the process.

pub mod array;
pub mod capture;
pub mod checkpoint;
pub mod context;
pub mod core_dump;
pub mod device;
pub mod graph;
pub mod module;
pub mod op;
pub mod stream;
pub mod submit;
pub mod texture;

use crate::config::Config;
use crate::driver::context::{CONTEXTS, Context};
use crate::driver::device::Device;
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
/// Set in a forked child of a process that had initialised the driver: the child cannot use it.
static FORKED: AtomicBool = AtomicBool::new(false);

extern "C" fn in_child() {
    if DRIVER.get().is_some() {
        FORKED.store(true, Ordering::Relaxed);
    }
}

/// Returns the configuration, which exists before `cuInit`.
pub fn config() -> &'static Config {
    &CONFIG
}

/// Returns the numbers of the visible devices in the order of `CUDA_VISIBLE_DEVICES`.
///
/// The list ends at its first invalid entry.
fn visible(list: Option<&str>, devices: u32) -> Vec<u32> {
    let Some(list) = list else { return (0..devices).collect() };
    let mut cards = Vec::new();
    for entry in list.split(',').map(str::trim) {
        let found = match entry.parse::<u32>() {
            Ok(n) => (n < devices).then_some(n),
            Err(_) if entry.len() > 4 => (0..devices).find(|i| device::uuid_text(*i).starts_with(entry)),
            Err(_) => None,
        };
        match found {
            Some(card) if !cards.contains(&card) => cards.push(card),
            // A repeated device makes the list empty.
            Some(_) => return Vec::new(),
            None => break,
        }
    }
    cards
}

pub fn init() -> Result {
    if FORKED.load(Ordering::Relaxed) {
        return Err(NOT_INITIALIZED);
    }
    if DRIVER.get().is_some() {
        return Ok(());
    }
    let cards = visible(std::env::var("CUDA_VISIBLE_DEVICES").ok().as_deref(), CONFIG.devices);
    if cards.is_empty() {
        return Err(crate::errors::NO_DEVICE);
    }
    DRIVER.get_or_init(|| {
        // SAFETY: registers a function that only touches atomics.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        Driver {
            config: CONFIG.clone(),
            devices: (0u32..)
                .zip(&cards)
                .map(|(i, c)| Device::new(i, *c, Context::new(i, true, 0)))
                .collect(),
            space: Space::new(&CONFIG, cards),
        }
    });
    static SERVED: std::sync::Once = std::sync::Once::new();
    SERVED.call_once(crate::driver::checkpoint::serve);
    Ok(())
}

/// Returns the driver after `cuInit`; fails before, and inside host functions.
pub fn driver() -> Result<&'static Driver> {
    if FORKED.load(Ordering::Relaxed) {
        return Err(NOT_INITIALIZED);
    }
    // Host functions may not call the driver, except for waits and queries, which do not come here.
    crate::driver::submit::not_in_callback()?;
    DRIVER.get().ok_or(NOT_INITIALIZED)
}

impl Driver {
    /// Returns `true` if all work submitted so far is done.
    pub fn idle(&self) -> bool {
        CONTEXTS.all().iter().all(|c| c.idle())
    }

    pub fn device(&self, ordinal: i32) -> Result<&Device> {
        usize::try_from(ordinal).ok().and_then(|i| self.devices.get(i)).ok_or(INVALID_DEVICE)
    }
}

#[cfg(test)]
mod tests {
    use super::visible;

    #[test]
    fn visible_devices() {
        assert_eq!(visible(None, 3), [0, 1, 2]);
        assert_eq!(visible(Some("2, 0"), 3), [2, 0]);
        assert_eq!(visible(Some("1,-1,0"), 3), [1]);
        assert_eq!(visible(Some("GPU-73696d67-7075-4000-8000-6770752d3001"), 3), [1]);
        assert!(visible(Some(""), 3).is_empty() && visible(Some("0,0"), 3).is_empty());
    }
}
