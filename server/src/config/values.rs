//! Types of values that only the configuration has.

use std::fmt;
use std::path::PathBuf;

/// A GPU of the `gpus` list, or one of `gpu_sharing`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GpuChoice {
    /// Index of the GPU in the driver.
    Index(u32),
    /// UUID: `GPU-` and lower-case digits.
    Uuid(String),
}

impl fmt::Display for GpuChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Index(i) => write!(f, "{i}"),
            Self::Uuid(u) => f.write_str(u),
        }
    }
}

/// Value of the key `gpus`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Gpus {
    /// All GPUs of the driver.
    All,
    /// These, in this order.
    These(Vec<GpuChoice>),
}

/// Settings of MPS.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mps {
    /// Key that requires NVIDIA's program; errors about the program name it.
    pub key: &'static str,
    /// Whether all clients share a domain.
    pub shared: bool,
    /// Path of nvidia-cuda-mps-control, if configured.
    pub control: Option<PathBuf>,
}

/// An address of this server for clients.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Advertised {
    /// Name or address, IPv6 without brackets.
    pub host: String,
    /// Control port for clients; `None`: the port on which this server listens.
    pub port: Option<u16>,
}
