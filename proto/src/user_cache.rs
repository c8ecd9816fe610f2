//! Place of a user's compiled programs, which later programs need not compile again.
//!
//! Any file may be deleted at any time.

use std::path::PathBuf;

/// Default size of all files, in bytes, which is that of the driver's own cache.
pub const MAX_BYTES: u64 = 1 << 30;

/// Returns `gpusession/compiled` in `$CUDA_CACHE_PATH`, `$XDG_CACHE_HOME` or `~/.cache`.
///
/// The folder need not exist. `None` means that the user has no home.
pub fn folder() -> Option<PathBuf> {
    let of = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let base = of("CUDA_CACHE_PATH")
        .or_else(|| of("XDG_CACHE_HOME"))
        .or_else(|| Some(of("HOME")?.join(".cache")))?;
    Some(base.join("gpusession").join("compiled"))
}

/// Returns the size that `CUDA_CACHE_MAXSIZE` or the default allows, in bytes.
pub fn max_bytes() -> u64 {
    let size = std::env::var("CUDA_CACHE_MAXSIZE").ok().and_then(|v| v.trim().parse().ok());
    size.unwrap_or(MAX_BYTES)
}
