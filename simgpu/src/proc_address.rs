//! `cuGetProcAddress`: selects the variant of a call for a CUDA version.

use crate::driver::config;

/// One exported variant of a call.
pub struct ProcAddress {
    pub base: &'static str,
    /// First CUDA version of this prototype.
    pub version: u32,
    pub per_thread: bool,
    pub function: unsafe extern "C" fn(),
}

include!(concat!(env!("OUT_DIR"), "/proc_addresses.rs"));

/// Why the lookup failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Missing {
    Symbol = 1,
    Version = 2,
}

/// Returns the newest variant not newer than `version`.
///
/// `flags`: 1 selects the legacy stream, 2 per-thread streams.
pub fn find(name: &str, version: u32, flags: u64) -> Result<usize, Missing> {
    let start = PROC_ADDRESSES.partition_point(|p| p.base < name);
    let known = config().driver_version;
    let mut rows = PROC_ADDRESSES[start..]
        .iter()
        .take_while(|p| p.base == name)
        .filter(|p| p.version <= known)
        .peekable();
    if rows.peek().is_none() {
        return Err(Missing::Symbol);
    }
    let mut best: Option<&ProcAddress> = None;
    for p in rows.filter(|p| p.version <= version && (!p.per_thread || flags & 2 != 0)) {
        if best.is_none_or(|b| (p.version, p.per_thread) >= (b.version, b.per_thread)) {
            best = Some(p);
        }
    }
    // A per-thread variant of an older prototype does not replace a newer one.
    best.map(|p| p.function as *const () as usize).ok_or(Missing::Version)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exports::{context, launch, stream};

    fn address(f: *const ()) -> Result<usize, Missing> {
        Ok(f as usize)
    }

    #[test]
    fn versions_choose_the_variant() {
        assert_eq!(find("cuCtxGetDevice", 2000, 0), address(context::cuCtxGetDevice as *const ()));
        assert_eq!(find("cuCtxGetDevice", 13000, 0), address(context::cuCtxGetDevice_v2 as *const ()));
        assert_eq!(
            find("cuStreamGetCaptureInfo", 11030, 0),
            address(stream::cuStreamGetCaptureInfo_v2 as *const ())
        );
        assert_eq!(
            find("cuStreamGetCaptureInfo", 12030, 2),
            address(stream::cuStreamGetCaptureInfo_v3_ptsz as *const ())
        );
        assert_eq!(find("cuLaunchKernel", 4000, 2), address(launch::cuLaunchKernel as *const ()));
        assert_eq!(find("cuLaunchKernel", 7000, 2), address(launch::cuLaunchKernel_ptsz as *const ()));
        assert_eq!(find("cuLaunchKernel", 3000, 0), Err(Missing::Version));
        assert_eq!(find("", 0, 0), Err(Missing::Symbol));
        assert_eq!(find("cuSubgridCreate", 13030, 0), Err(Missing::Symbol));
    }
}
