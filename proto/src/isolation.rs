//! Report of a process that took a worker's restrictions to show whether this host allows them.

use serde::{Deserialize, Serialize};

/// Restrictions that were in force, and whether the driver works with them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// Version of Landlock whose rules were in force; 0: none.
    pub landlock: u32,
    /// Restrictions that this host does not allow, and rights that remained despite them.
    pub lacking: Vec<String>,
    /// Failure of the driver, if it did not make a context on every GPU.
    pub driver: Option<Failure>,
}

/// A failure of the driver.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// The failed call and its status.
    pub reason: String,
    /// A GPU has no memory left for a context, which says nothing about restrictions.
    pub full: bool,
}
