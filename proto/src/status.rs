//! `CUresult` values that both ends must judge alike.

/// Whether an error spoils the process's context: from then on every call that would use it gives the same error.
pub fn is_sticky(status: i32) -> bool {
    matches!(status, 214 | 220 | 226 | 700 | 702 | 709..=711 | 714..=719)
}
