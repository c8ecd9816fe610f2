//! Errors of the configuration, each with its place.

use std::path::{Path, PathBuf};

use gpusession_common::units::nearest;

/// Why a configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A file cannot be read.
    #[error("{}: {error}", path.display())]
    Read {
        /// File, or folder of drop-ins.
        path: PathBuf,
        /// Reason of the operating system.
        error: std::io::Error,
    },
    /// A file is not valid TOML, or has an unknown key or a bad value.
    #[error("{}:{line}:{column}: {message}", path.display())]
    Parse {
        /// File with the error.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// Column, from 1.
        column: usize,
        /// Description with a suggestion.
        message: String,
    },
    /// The values do not fit together.
    #[error("{}: {message}", path.display())]
    Invalid {
        /// File with one of the values.
        path: PathBuf,
        /// Description with a suggestion.
        message: String,
    },
}

impl ConfigError {
    /// Creates an error for a place of a file's text.
    pub(super) fn at(path: &Path, text: &str, offset: usize, message: String) -> Self {
        let offset = offset.min(text.len());
        let before = &text.as_bytes()[..offset];
        let line = before.iter().filter(|b| **b == b'\n').count() + 1;
        let column = offset - before.iter().rposition(|b| *b == b'\n').map_or(0, |i| i + 1) + 1;
        Self::Parse { path: path.into(), line, column, message }
    }

    /// Creates an error from the parser's.
    pub(super) fn parse(path: &Path, text: &str, error: &toml::de::Error) -> Self {
        let offset = error.span().map_or(0, |span| span.start);
        Self::at(path, text, offset, explain(error.message()))
    }
}

/// Parses one TOML file; an error names file, line, column and the nearest known key.
pub fn parse_toml<T: serde::de::DeserializeOwned>(path: &Path, text: &str) -> Result<T, ConfigError> {
    toml::from_str(text).map_err(|error| ConfigError::parse(path, text, &error))
}

/// Rewords serde's "unknown field `x`, expected one of `a`, `b`", with the nearest key.
fn explain(message: &str) -> String {
    let Some(rest) = message.strip_prefix("unknown field `") else { return message.trim_end().to_owned() };
    let Some((key, expected)) = rest.split_once('`') else { return message.to_owned() };
    let known: Vec<&str> = expected.split('`').skip(1).step_by(2).collect();
    match nearest(key, known.iter().copied()) {
        Some(candidate) => format!("unknown key `{key}`, did you mean `{candidate}`?"),
        None => format!("unknown key `{key}`, known keys: {}", known.join(", ")),
    }
}
