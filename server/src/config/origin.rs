//! Sources of values, and errors that name them.

use std::fmt;
use std::path::PathBuf;

/// Source of a value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// A line of a file, from 1; 0 stands for the whole file.
    File(PathBuf, usize),
    /// An environment variable, by its name.
    Environment(&'static str),
    /// The default of the key.
    Default,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path, 0) => write!(f, "{}", path.display()),
            Self::File(path, line) => write!(f, "{}:{line}", path.display()),
            Self::Environment(name) => write!(f, "environment {name}"),
            Self::Default => f.write_str("default"),
        }
    }
}

/// An error in the configuration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{origin}: {message}")]
pub struct ConfigError {
    /// Place of the error.
    pub origin: Origin,
    /// Cause and remedy.
    pub message: String,
}

impl ConfigError {
    /// Creates an error for `origin`.
    pub fn new(origin: Origin, message: impl Into<String>) -> Self {
        Self { origin, message: message.into() }
    }
}
