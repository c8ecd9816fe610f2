//! The file that `gpusession request -o` writes: a lease and its holder. It contains no secret.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::exit::{Failure, Result, code};

/// Holder of a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Via {
    /// This machine's daemon.
    Daemon,
    /// No client process: any program with the identity of the request may use the lease.
    Servers,
}

/// Content of the file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LeaseFile {
    /// Lease id.
    pub id: String,
    /// Holder of the lease.
    pub via: Via,
    /// The request id; repeating the request yields the same lease. Empty with a daemon.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub request: String,
    /// Number of GPUs.
    pub gpus: u32,
    /// Control addresses of the servers that may hold the lease.
    #[serde(default)]
    pub servers: Vec<String>,
    /// Whether programs' data may be unencrypted, if the server decides so.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub allow_clear: bool,
}

impl LeaseFile {
    /// Reads a file.
    pub fn load(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path)
            .map_err(|e| Failure::new(code::CONFIGURATION, format!("{}: {e}", path.display())))?;
        gpusessiond::config::parse_toml(path, &text)
            .map_err(|e| Failure::new(code::CONFIGURATION, e.to_string()))
    }

    /// Writes the lease into the file that was created for it.
    pub fn store(&self, mut empty: Empty<'_>) -> Result<()> {
        use std::io::Write as _;
        let path = empty.path.display();
        let hint = format!("the lease exists: `gpusession release {}` releases it, else it expires", self.id);
        let failed = |e: String| Failure::new(code::FAILED, format!("{path}: {e}")).hint(&hint);
        let text = toml::to_string(self).map_err(|e| failed(e.to_string()))?;
        write!(
            empty.file,
            "# A GPU lease: `gpusession run --lease {path} -- PROGRAM` uses it, `gpusession release {path}` ends it.\n{text}"
        )
        .map_err(|e| failed(e.to_string()))?;
        empty.written = true;
        Ok(())
    }
}

/// A file created before the lease is requested, so that no lease exists that no file names.
///
/// It is removed again unless the lease is written to it.
pub struct Empty<'a> {
    path: &'a Path,
    file: std::fs::File,
    written: bool,
}

impl<'a> Empty<'a> {
    /// Creates the file, or opens an empty one that an interrupted request left.
    ///
    /// A file with content is not overwritten: it may be the only record of a lease.
    pub fn make(path: &'a Path) -> Result<Self> {
        let empty = std::fs::symlink_metadata(path).is_ok_and(|at| at.is_file() && at.len() == 0);
        let opened = std::fs::File::options().write(true).create_new(!empty).open(path);
        let file = opened.map_err(|e| match e.kind() {
            std::io::ErrorKind::AlreadyExists => {
                Failure::new(code::FAILED, format!("{}: exists already", path.display()))
                    .hint("it may name a lease that still exists: `gpusession release` it first")
            }
            _ => Failure::new(code::FAILED, format!("{}: {e}", path.display())),
        })?;
        Ok(Self { path, file, written: false })
    }
}

impl Drop for Empty<'_> {
    fn drop(&mut self) {
        if !self.written {
            let _ = std::fs::remove_file(self.path);
        }
    }
}
