//! Acts in a folder of compiled code, and their results, as they travel to the starter.

use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

/// An act in a folder of compiled code. Names are those of folders in it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CodeAct {
    /// The cache's limit in bytes.
    pub max: u64,
    /// The act in the folder.
    pub what: What,
}

/// An act in a folder of compiled code, without the cache's limit.
///
/// The other end may be of another version: places stay, and new acts are appended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum What {
    /// Creates the folder.
    Open,
    /// Creates a folder in it.
    Create(String),
    /// Links a store's files into a worker's folder, for a time.
    Lend {
        /// Folder of the store.
        store: String,
        /// Folder of the worker.
        worker: String,
        /// Longest time of linking.
        within: Duration,
    },
    /// Moves new files of a worker's folder into a store, and deletes the folder.
    TakeBack {
        /// Folder of the worker.
        worker: String,
        /// Folder of the store.
        store: String,
    },
    /// Lists the folders.
    Names,
    /// Measures a folder, with deleted files that these processes keep open.
    Size(String, Vec<u32>),
    /// Empties the folder of what is deleted, and measures all others.
    Measure,
    /// Deletes a folder.
    Delete(String),
}

/// Result of an act; acts without a result have none.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Found {
    /// Names of folders.
    Names(Vec<String>),
    /// Names of folders with what is in them.
    Measured(Vec<(String, Measured)>),
    /// Disk space of one folder; `None`: it cannot be measured.
    Size(Option<Size>),
}

/// Disk space of a folder of compiled code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Size {
    /// All of it.
    pub bytes: u64,
    /// As `bytes`, with its part of each file that lies in several folders.
    pub part: u64,
    /// Of these, files that its writers deleted, or the server, and that they keep open.
    pub kept: u64,
}

/// Disk space of a file or folder, and the last use of a file in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Measured {
    /// All of it, as its writers may use it.
    pub bytes: u64,
    /// As `bytes`, with its part of each file that lies in several folders.
    pub part: u64,
    /// Last use of a file.
    pub used: SystemTime,
}
