//! Work that the machine asks its caller to do.

use gpusession_proto::control;

use crate::leases::Change;
use crate::leases::Slot;

/// Work for the caller of the machine.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Ask the servers, in this order, for a lease; answer with [`super::Machine::allocated`].
    Allocate {
        /// Slot to which the answer belongs.
        slot: Slot,
        /// Indices of the servers.
        servers: Vec<usize>,
        /// Request, whose id is the same when it is repeated.
        request: Box<control::AllocateRequest>,
    },
    /// Send a heartbeat; answer with [`super::Machine::renewed`].
    Renew {
        /// Index of the server.
        server: usize,
        /// Ids of the leases that the server holds for this client.
        leases: Vec<String>,
    },
    /// Release a lease; answer with [`super::Machine::released`].
    Release {
        /// Index of the server.
        server: usize,
        /// Id of the lease.
        lease: String,
    },
    /// Withdraw a request from a server: from its queue, or with the lease that it has made; answer
    /// with [`super::Machine::released`].
    Withdraw {
        /// Index of the server.
        server: usize,
        /// As in the request, so that the server finds it without a lease.
        request_id: String,
    },
    /// Take workers out of a lease's stock; answer with [`super::Machine::workers`].
    TakeWorkers {
        /// Slot to which the workers belong.
        slot: Slot,
        /// Index of the server.
        server: usize,
        /// Id of the lease.
        lease: String,
        /// Most workers that the server may give.
        count: u32,
        /// Processes that wait for a worker.
        waiting: u32,
    },
    /// Report to a server that the process of a worker has exited.
    EndWorker {
        /// Slot of the lease.
        slot: Slot,
        /// Index of the server.
        server: usize,
        /// Id of the lease.
        lease: String,
        /// Id of the worker, 16 bytes.
        worker: Vec<u8>,
    },
    /// Announce a change to the daemon's other parts.
    Tell(Change),
}
