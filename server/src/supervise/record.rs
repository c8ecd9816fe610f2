//! The record of a worker: its state, which the next server takes over.

use std::net::SocketAddr;
use std::time::Duration;

use gpusession_proto::preface::LANES;
use gpusession_proto::supervise::{ClientProcess, Usage};
use serde::{Deserialize, Serialize};

use super::stock::WorkerId;
use crate::clock::Moment;

/// Phase in the life of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Phase {
    /// Loads the driver.
    Starting,
    /// Ready and in stock.
    Warm,
    /// Assigned to the client; no process admitted yet.
    Taken,
    /// Serves a process.
    Active,
    /// Serves a process whose device memory is parked in host memory.
    Parked,
    /// Was sent a stop request, or exits by itself.
    Ending,
}

impl Phase {
    /// Returns the name of the phase in listings.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Warm => "warm",
            Self::Taken => "taken",
            Self::Active => "active",
            Self::Parked => "parked",
            Self::Ending => "ending",
        }
    }
}

/// State of a worker; the store keeps it for the next server.
///
/// That server may be of another release. So a later field has a default, and a change that an
/// earlier release cannot read raises `SCHEMA` in `handover.rs`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct WorkerRecord {
    pub(super) id: WorkerId,
    pub(super) lease: String,
    pub(super) client: String,
    pub(super) gpus: Vec<String>,
    pub(super) phase: Phase,
    pub(super) pid: Option<u32>,
    pub(super) stocked: bool,
    pub(super) given: bool,
    pub(super) encrypted: bool,
    pub(super) process: Option<ClientProcess>,
    pub(super) peer: Option<SocketAddr>,
    /// Since when its program has no connection.
    pub(super) interrupted: Option<Moment>,
    /// Interruptions after which its program has come back.
    pub(super) interruptions: u32,
    /// Lanes that it has admitted, a bit each; they close with the worker.
    pub(super) lanes: u64,
    /// Highest number of a connection attempt, by lane.
    pub(super) attempts: [u32; LANES as usize],
    pub(super) fingerprint: Option<[u8; 32]>,
    pub(super) usage: Usage,
    /// Time of the last usage report, and the GPU time up to it.
    pub(super) used_at: Moment,
    pub(super) busy: Duration,
    pub(super) admitted_unix: u64,
    pub(super) user: String,
    /// When GPU work of the client was last seen.
    pub(super) active: Moment,
    /// Its client has sent it something while it is paused.
    pub(super) wanted: bool,
    /// Its device memory is being parked or unparked.
    pub(super) moving: bool,
    pub(super) isolation: String,
    pub(super) since: Moment,
    pub(super) ended_because: Option<String>,
    /// As [`super::quota::Ledger::held`] returns it.
    pub(super) held: Vec<([u8; 16], u64, u64)>,
    /// It moves its own device memory to host memory.
    #[serde(default)]
    pub(super) parks: bool,
    /// Bytes of compiled code that its driver keeps at most; 0: none, or unknown.
    #[serde(default)]
    pub(super) compiled_max: u64,
    /// Its driver keeps compiled code in a folder of the worker's own.
    #[serde(default)]
    pub(super) own_code: bool,
    /// User whose compiled code that is; none before the first connection.
    #[serde(default)]
    pub(super) code_of: Option<u32>,
    /// The starter started it. A release before that has no way to kill it.
    #[serde(default)]
    pub(super) of_starter: bool,
}

#[cfg(test)]
pub(super) mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// Returns a record as the first release with this schema wrote it.
    pub fn first() -> Value {
        let moment = json!({ "secs": 5, "nanos": 6 });
        json!({
            "id": vec![1; 16], "lease": "lease", "client": "vm-1", "gpus": ["GPU-1"], "phase": "Active",
            "pid": 7, "stocked": true, "given": true, "encrypted": false,
            "process": {
                "uid": 1000, "user": "alice", "pid": 8, "program": "a.out", "executable": "/a.out",
                "encrypted": false,
            },
            "peer": "10.0.0.1:5000", "interrupted": moment, "interruptions": 2, "lanes": 3,
            "attempts": vec![1; 17], "fingerprint": vec![9; 32],
            "usage": {
                "calls": 1, "bytes_to_device": 2, "bytes_from_device": 3, "memory_bytes": 4, "contexts": 1,
                "idle_usec": 5,
            },
            "used_at": moment, "busy": moment, "admitted_unix": 10, "user": "alice", "active": moment,
            "wanted": true, "moving": false, "isolation": "full", "since": moment, "ended_because": "reason",
            "held": [[vec![2; 16], 11, 12]],
        })
    }

    #[test]
    fn the_first_release_of_this_schema_and_this_one_read_each_other() {
        let first = first();
        let read: WorkerRecord = serde_json::from_value(first.clone()).unwrap();
        let written = serde_json::to_value(&read).unwrap();
        for (key, value) in first.as_object().unwrap() {
            assert_eq!(&written[key], value, "{key}");
        }
    }
}
