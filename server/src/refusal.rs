//! The refusal of an administrator's request, for people and for programs.

use serde::{Deserialize, Serialize};

/// Refusal of an administrator's request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    /// Stable code for programs.
    pub code: String,
    /// Explanation for people.
    pub message: String,
    /// Remedy for people; may be empty.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub hint: String,
}

impl Refusal {
    /// Creates a refusal without a hint.
    pub fn new(code: &str, message: impl Into<String>) -> Self {
        Self { code: code.into(), message: message.into(), hint: String::new() }
    }
}
