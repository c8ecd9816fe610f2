//! `CUresult` values whose meaning both ends must know.

/// Returns `true` if an error spoils the process's context.
///
/// Every later call that would use the context returns the same error.
pub fn is_sticky(status: i32) -> bool {
    matches!(status, 214 | 220 | 226 | 700 | 702 | 710 | 714..=719)
}
