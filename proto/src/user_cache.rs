//! Where programs of a user keep what the next ones need not compile again. Any file may be deleted at any time.

use std::path::PathBuf;

/// Most bytes of all files, unless `CUDA_CACHE_MAXSIZE` says otherwise; the same default as the driver's.
pub const MAX_BYTES: u64 = 1 << 30;

/// `$CUDA_CACHE_PATH`, `$XDG_CACHE_HOME` or `~/.cache`, and in it `gpusession/compiled`, which need not exist. `None`: no home.
pub fn folder() -> Option<PathBuf> {
    let of = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let base = of("CUDA_CACHE_PATH")
        .or_else(|| of("XDG_CACHE_HOME"))
        .or_else(|| Some(of("HOME")?.join(".cache")))?;
    Some(base.join("gpusession").join("compiled"))
}

/// How much may be kept.
pub fn max_bytes() -> u64 {
    let size = std::env::var("CUDA_CACHE_MAXSIZE").ok().and_then(|v| v.trim().parse().ok());
    size.unwrap_or(MAX_BYTES)
}
