//! The open watch of a client: events about its leases, and its presence.

use std::sync::Arc;

use gpusession_proto::control::pool_event::Event as PoolEventKind;
use gpusession_proto::control::{self as wire, PoolEvent};

use crate::pool::{Pool, locked};
use crate::supervise::WorkerId;

pub(in crate::pool) fn workers_ready(lease: String, stock: u32, ended: Option<WorkerId>) -> PoolEvent {
    let ended = ended.iter().map(|id| id.to_vec()).collect();
    PoolEvent { lease, event: Some(PoolEventKind::WorkersReady(wire::WorkersReady { stock, ended })) }
}

/// Presence of a client while its watch is open.
pub struct Watching(Arc<Pool>, String);

impl Watching {
    pub(super) fn begin(pool: Arc<Pool>, client: String) -> Self {
        locked(&pool.clients).watch_began(&client);
        Self(pool, client)
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        locked(&self.0.clients).watch_ended(&self.1);
    }
}
