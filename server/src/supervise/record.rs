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
}
