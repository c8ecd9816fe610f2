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

    /// Writes a file; an existing one is not overwritten, it may be the only trace of a lease.
    pub fn store(&self, path: &Path) -> Result<()> {
        use std::io::Write as _;
        let failed = |e: std::io::Error| {
            let failure = Failure::new(code::FAILED, format!("{}: {e}", path.display()));
            match e.kind() {
                std::io::ErrorKind::AlreadyExists => {
                    failure.hint("it may name a lease that still exists: `gpusession release` it first")
                }
                _ => failure,
            }
        };
        let text = toml::to_string(self).map_err(|e| Failure::new(code::FAILED, e.to_string()))?;
        let mut file = std::fs::File::options().write(true).create_new(true).open(path).map_err(failed)?;
        write!(
            file,
            "# A GPU lease: `gpusession run --lease {0} -- PROGRAM` uses it, `gpusession release {0}` ends it.\n{text}",
            path.display()
        )
        .map_err(failed)
    }
}
