//! Events that the supervisor sends to its subscribers.

use super::stock::WorkerId;

/// Event that the supervisor sends to its subscribers.
#[derive(Debug, Clone)]
pub enum Event {
    /// The stock or the workers of a lease changed.
    Workers {
        /// Client that holds the lease.
        client: String,
        /// Id of the lease.
        lease: String,
        /// Number of ready workers.
        stock: u32,
        /// Worker that a client had taken and that has exited.
        ended: Option<WorkerId>,
    },
    /// A program begins or has ended.
    Program {
        /// Client of the program.
        client: String,
        /// Id of the lease.
        lease: String,
        /// UUIDs of its GPUs.
        gpus: Vec<String>,
        /// Worker that serves it.
        worker: WorkerId,
        /// User and program, as the client names them.
        user: String,
        /// See `user`.
        program: String,
        /// Why it has ended; `None`: it begins.
        end: Option<String>,
    },
    /// A worker or the data port refused a connection, a program or an import.
    Refused {
        /// Kind of the event in the audit trail.
        kind: &'static str,
        /// Client of the worker; empty: the connection belongs to none.
        client: String,
        /// Id of the worker's lease; empty without a worker.
        lease: String,
        /// Worker that refused.
        worker: Option<WorkerId>,
        /// Address of the connection; empty if the worker did not name it.
        from: String,
        /// Name of the limit behind the refusal, if there is one.
        limit: Option<&'static str>,
        /// Description for administrators.
        why: String,
    },
    /// A worker was killed for what its process did, whether or not it served a program.
    Killed {
        /// Client of the worker.
        client: String,
        /// Id of its lease.
        lease: String,
        /// UUIDs of its GPUs.
        gpus: Vec<String>,
        /// Worker that exited.
        worker: WorkerId,
        /// Description for administrators.
        why: String,
    },
    /// A killed worker does not exit, or the memory of an exited one is still in use.
    Stuck {
        /// UUIDs of the worker's GPUs.
        gpus: Vec<String>,
        /// Description for administrators.
        why: String,
    },
}
