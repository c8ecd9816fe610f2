//! State of the machine, and the times that its parts share.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use super::action::Action;
use super::lease::{Asked, Health, SavedRelease, Wanted};
use crate::leases::{Session, Slot, Spec, Time};

/// Interval between heartbeats to a server that holds leases of this client.
pub const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(2);
/// A heartbeat due within this window is sent on the current wake-up.
pub(super) const COALESCE_WINDOW: Duration = Duration::from_millis(250);
/// Interval between heartbeats to a server that holds no lease of this client.
pub const IDLE_HEARTBEAT_INTERVAL: Duration = Duration::from_secs(30);
/// Silence after which a server is suspect: one interval, and the timeout of a heartbeat.
pub const SUSPECT_TIMEOUT: Duration = Duration::from_secs(7);
/// Silence after which a server is offline.
pub const OFFLINE_TIMEOUT: Duration = Duration::from_secs(60);
/// Time that a lease of class `user` outlives its user's last session and process.
pub const USER_LINGER_TIMEOUT: Duration = Duration::from_secs(30);
/// Time after a restart during which only the server that held a lease is asked for it.
pub(super) const RECOVERY_TIMEOUT: Duration = OFFLINE_TIMEOUT;
/// Workers kept in stock for a lease, so that a process's grant needs no round trip.
pub(super) const STOCK_TARGET: usize = 1;

/// The state machine of all leases of this client.
#[derive(Debug)]
pub struct Machine {
    pub(super) slots: BTreeMap<Slot, Wanted>,
    pub(super) servers: Vec<Health>,
    pub(super) names: Vec<Vec<String>>,
    pub(super) releasing: Vec<Releasing>,
    /// Released leases of an earlier daemon, until their servers are known.
    pub(super) unplaced: Vec<SavedRelease>,
    /// Dropped requests whose reply is in flight: request id, and the servers that were asked;
    /// `None` if the id came with the wish.
    pub(super) unwanted: BTreeMap<Slot, Option<(String, Asked)>>,
    pub(super) next_slot: Slot,
    pub(super) boot_id: String,
    pub(super) machine_id: String,
    pub(super) rng: fastrand::Rng,
    pub(super) actions: VecDeque<Action>,
    /// Why no server is known.
    pub(super) notice: String,
    /// `[[lease]]` tables of the classes `session` and `user`.
    pub(super) templates: Vec<Spec>,
    pub(super) sessions: BTreeMap<String, Arc<Session>>,
    pub(super) generations: BTreeMap<String, u32>,
    pub(super) preallocated: u32,
    /// Leases that have ended, the latest last.
    pub(super) ended: VecDeque<Ended>,
}

#[derive(Debug)]
pub(super) struct Releasing {
    pub(super) server: usize,
    /// Id of a lease, or of a request that waits there or has a lease whose reply was lost.
    pub(super) id: String,
    pub(super) waits: bool,
    pub(super) retry: Time,
    pub(super) attempt: u32,
    pub(super) give_up: Time,
    pub(super) in_flight: bool,
    /// Slot that asks again once this lease is released.
    pub(super) makes_room_for: Option<Slot>,
}

/// A lease that was lost or released.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) at: Time,
    pub(super) id: String,
    pub(super) reason: String,
}
