//! `CUresult` values whose meaning both ends must know.

/// Status of a load or a link whose image the worker lacks: `CUDA_ERROR_FILE_NOT_FOUND`, which no
/// driver returns for an image in memory.
pub const IMAGE_MISSING: i32 = 301;

/// Returns `true` if an error spoils the process's context.
///
/// Every later call that would use the context returns the same error.
pub fn is_sticky(status: i32) -> bool {
    matches!(status, 214 | 220 | 226 | 700 | 702 | 710 | 714..=719)
}
