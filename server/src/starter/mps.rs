//! Acts about folders of MPS daemons, and their results, as they travel to the starter.

use serde::{Deserialize, Serialize};

/// An act about the folder of a daemon.
///
/// The other end may be of another version: places stay, and new acts are appended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FolderAct {
    /// Kills and removes what all daemons left.
    Clear,
    /// As `Clear`, for one daemon.
    ClearOne(u32),
    /// Makes the folders of a daemon, after that.
    Make(u32),
    /// Lists processes of a daemon.
    Left(u32),
    /// Reads one of its logs from a place on; the number of the log in `LOGS`.
    Read(u32, usize, u64),
    /// Empties one of its logs.
    Empty(u32, usize),
}

/// Result of an act; most have none.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Told {
    /// Process ids.
    Pids(Vec<u32>),
    /// A part of a log, and the log's length.
    Log(Vec<u8>, u64),
}
