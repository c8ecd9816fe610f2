//! The file that `gpusession request -o` writes: which lease it is and who knows of it; nothing secret.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::exit::{Failure, Result, code};

/// Who holds the lease for us.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Via {
    /// This machine's daemon.
    Daemon,
    /// Nobody: the server knows it, and whoever has the identity it was requested with may use it.
    Servers,
}

/// See the module.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LeaseFile {
    /// Lease id.
    pub id: String,
    /// Who holds it.
    pub via: Via,
    /// The request that made it; repeating it gives the same lease.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub request: String,
    /// Number of GPUs.
    pub gpus: u32,
    /// Control addresses.
    #[serde(default)]
    pub servers: Vec<String>,
}

impl LeaseFile {
    /// Reads a file.
    pub fn load(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path)
            .map_err(|e| Failure::new(code::CONFIGURATION, format!("{}: {e}", path.display())))?;
        gpusessiond::config::parse_toml(path, &text)
            .map_err(|e| Failure::new(code::CONFIGURATION, e.to_string()))
    }

    /// Writes it.
    pub fn store(&self, mut empty: Empty<'_>) -> Result<()> {
        use std::io::Write as _;
        let path = empty.path.display();
        let hint =
            format!("the lease is there: `gpusession release {}`, or it ends with its time to live", self.id);
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

/// A file that is there before the lease is asked for, so that none is made that nothing names. It goes again unless it is written.
pub struct Empty<'a> {
    path: &'a Path,
    file: std::fs::File,
    written: bool,
}

impl<'a> Empty<'a> {
    /// An existing one is not overwritten, it may be the only trace of a lease; unless it is empty, as one is whose request was
    /// interrupted.
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
