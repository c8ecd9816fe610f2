//! Handing data connections to workers.

use std::net::SocketAddr;

use gpusession_proto::supervise::ToWorker;
use tokio::sync::mpsc;

use super::worker::{Command, Phase, Worker};
use super::{Supervisor, WorkerId};
use crate::clock;
use crate::limits::Exceeded;

/// Reason why a worker cannot take over a connection.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AdoptError {
    /// No worker with this id serves a client.
    #[error("no such worker: it ended, or its server was restarted")]
    Unknown,
    /// The worker's queue of connections is full.
    #[error("the worker has too many connections waiting")]
    Busy,
    /// The lease requires encryption, and the connection has none.
    #[error("this server wants the connection encrypted")]
    Clear,
    /// A limit of the client or the user is reached.
    #[error("{0}")]
    Limit(Exceeded),
}

impl Supervisor {
    /// Hands a data connection to a worker.
    pub fn adopt(
        &self,
        id: &WorkerId,
        socket: std::net::TcpStream,
        preface: Vec<u8>,
        peer: SocketAddr,
        tls: bool,
    ) -> Result<(), (AdoptError, std::net::TcpStream)> {
        let mut state = self.state();
        let usable = |w: &&mut Worker| matches!(w.phase, Phase::Taken | Phase::Active | Phase::Parked);
        let Some(worker) = state.workers.get_mut(id).filter(usable) else {
            return Err((AdoptError::Unknown, socket));
        };
        if worker.encrypted && !tls {
            return Err((AdoptError::Clear, socket));
        }
        // The user of a machine's lease is known after the first connection.
        let of = (worker.client.clone(), worker.user().to_owned());
        let open = |w: &Worker| if w.phase == Phase::Ending { 0 } else { u64::from(w.lanes.count_ones()) };
        let within = state.within((&of.0, &of.1), "connections", 1, "data connections", open);
        if let Err((exceeded, _)) = within {
            return Err((AdoptError::Limit(exceeded), socket));
        }
        let Some(worker) = state.workers.get_mut(id) else { return Err((AdoptError::Unknown, socket)) };
        let number = u64::from_le_bytes(clock::bytes(self.0.random.as_ref()));
        if !worker.unadmitted.enter(number, peer.ip(), self.0.clock.now()) {
            return Err((AdoptError::Busy, socket));
        }
        match worker.orders.commands.try_send(Command::Adopt { socket, number, preface, peer }) {
            Ok(()) => {
                if worker.lanes == 0 {
                    worker.peer = Some(peer);
                    state.remember(id);
                }
                Ok(())
            }
            Err(mpsc::error::TrySendError::Full(Command::Adopt { socket, .. })) => {
                Err((AdoptError::Busy, socket))
            }
            Err(mpsc::error::TrySendError::Closed(Command::Adopt { socket, .. })) => {
                Err((AdoptError::Unknown, socket))
            }
            Err(_) => unreachable!("an Adopt was sent, an Adopt comes back"),
        }
    }
}

pub(super) fn adopt(number: u64, preface: Vec<u8>, peer: SocketAddr) -> ToWorker {
    ToWorker::Adopt { number, preface, peer: peer.to_string() }
}
