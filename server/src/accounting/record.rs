//! Records of ended leases and programs.

use serde::{Deserialize, Serialize};

/// Subject of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// A lease, with the sums over its programs.
    Lease,
    /// One running instance of a program.
    Process,
}

/// An ended lease or program.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Subject of the record.
    pub kind: Kind,
    /// Lease id; of a program, that of its lease.
    pub lease: String,
    /// Worker id; empty for a lease.
    pub worker: String,
    /// Client that held the lease.
    pub client: String,
    /// Name of the lease's user, else of the program's; empty: the client's own.
    pub user: String,
    /// User id on the client; 0 for a lease without a user.
    pub uid: u32,
    /// Process id on the client; 0 for a lease.
    pub pid: u32,
    /// Name of the program; empty for a lease.
    pub program: String,
    /// Path of the program's file, as the program reported it; empty for a lease.
    #[serde(default)]
    pub executable: String,
    /// UUIDs of the GPUs.
    pub gpus: Vec<String>,
    /// Start, in seconds since 1970.
    pub start_unix: u64,
    /// End, in seconds since 1970.
    pub end_unix: u64,
    /// Time with GPU work or copies, to the second; of a lease the sum over its programs.
    pub gpu_busy_usec: u64,
    /// Peak of the device memory in use; of a lease that of all its programs together.
    pub peak_memory_bytes: u64,
    /// Bytes copied to the GPUs.
    pub bytes_to_device: u64,
    /// Bytes copied from the GPUs.
    pub bytes_from_device: u64,
    /// Number of driver calls.
    pub calls: u64,
    /// Reason of the end, for people.
    pub reason: String,
    /// Of a lease, the user ids of its programs; set when records are listed.
    ///
    /// A lease for a whole machine has no user of its own.
    #[serde(default)]
    pub uids: Vec<u32>,
    /// Of a lease, the user names of its programs; set when records are listed.
    #[serde(default)]
    pub users: Vec<String>,
}
