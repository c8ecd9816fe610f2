//! Work that the machine asks its caller to do.

use gpusession_proto::control;

use crate::leases::Change;
use crate::leases::Slot;

/// Work for the caller of the machine.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Ask the servers, in this order, for a lease; answer with [`super::Machine::allocated`].
    Allocate {
        slot: Slot,
        /// Indices of the servers.
        servers: Vec<usize>,
        request: Box<control::AllocateRequest>,
    },
    /// Send a heartbeat; answer with [`super::Machine::renewed`].
    Renew {
        server: usize,
        /// Ids of the leases that the server holds for this client.
        leases: Vec<String>,
    },
    /// Release a lease; answer with [`super::Machine::released`].
    Release { server: usize, lease: String },
    /// Withdraw a request from a server: from its queue, or with the lease that it has made; answer
    /// with [`super::Machine::released`].
    Withdraw { server: usize, request_id: String },
    /// Take workers out of a lease's stock; answer with [`super::Machine::workers`].
    TakeWorkers {
        slot: Slot,
        server: usize,
        lease: String,
        count: u32,
        /// Processes that wait for a worker.
        waiting: u32,
    },
    /// Report to a server that the process of a worker has exited.
    EndWorker { slot: Slot, server: usize, lease: String, worker: Vec<u8> },
    /// Announce a change to the daemon's other parts.
    Tell(Change),
}
