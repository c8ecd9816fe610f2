//! Handing data connections to workers.

use std::net::SocketAddr;

use gpusession_proto::preface::Preface;
use gpusession_proto::supervise::ToWorker;
use tokio::sync::mpsc;

use super::errors::AdoptError;
use super::event::Event;
use super::supervisor::Supervisor;
use super::worker::{Command, Phase, Worker};
use crate::clock;

impl Supervisor {
    /// Notes a connection that the data port has refused, for the audit trail.
    pub fn connection_refused(&self, peer: SocketAddr, why: String) {
        let _ = self.0.events.send(Event::Refused {
            kind: "connection-refused",
            client: String::new(),
            lease: String::new(),
            worker: None,
            from: peer.ip().to_string(),
            limit: None,
            why,
        });
    }

    /// Hands a data connection to a worker.
    pub fn adopt(
        &self,
        preface: &Preface,
        socket: std::net::TcpStream,
        peer: SocketAddr,
    ) -> Result<(), (AdoptError, std::net::TcpStream)> {
        let mut state = self.state();
        let id = &preface.worker;
        let Some(worker) = state.workers.get_mut(id) else {
            let error = match state.left.iter().any(|left| left.book.id == *id) {
                true => AdoptError::Starting,
                false => state.farewells.refusal(preface, self.0.clock.now()),
            };
            return Err((error, socket));
        };
        // First of all: the rest is only for those that hold a grant for this worker.
        if !preface.is_genuine(&worker.lease_key) {
            return Err((AdoptError::Forged, socket));
        }
        if !matches!(worker.phase, Phase::Taken | Phase::Active | Phase::Parked) {
            let error = match &worker.ended_because {
                Some(reason) => AdoptError::Ended(reason.clone()),
                None => AdoptError::Unknown,
            };
            return Err((error, socket));
        }
        if worker.encrypted && !preface.tls() {
            return Err((AdoptError::Clear, socket));
        }
        let lane = preface.lane.get();
        let Some(latest) = worker.attempts.get_mut(usize::from(lane)) else {
            return Err((AdoptError::Forged, socket));
        };
        if preface.attempt.get() <= *latest {
            return Err((AdoptError::Replayed, socket));
        }
        *latest = preface.attempt.get();
        let more = u64::from(worker.lanes & 1 << lane == 0);
        // The user of a machine's lease is known after the first connection.
        let of = (worker.client.clone(), worker.user().to_owned());
        let open = |w: &Worker| if w.phase == Phase::Ending { 0 } else { u64::from(w.lanes.count_ones()) };
        let within = match more {
            // A lane that comes back takes no further place.
            0 => Ok(()),
            more => state.within((&of.0, &of.1), "connections", more, "data connections", open),
        };
        if let Err((exceeded, _)) = within {
            return Err((AdoptError::Limit(exceeded), socket));
        }
        let Some(worker) = state.workers.get_mut(id) else { return Err((AdoptError::Unknown, socket)) };
        let number = u64::from_le_bytes(clock::bytes(self.0.random.as_ref()));
        if !worker.unadmitted.enter(number, peer.ip(), self.0.clock.now()) {
            return Err((AdoptError::Busy, socket));
        }
        let user = preface.uid.get();
        let preface = preface.to_bytes().to_vec();
        match worker.orders.commands.try_send(Command::Adopt { socket, number, preface, peer }) {
            Ok(()) => {
                if lane == 0 {
                    worker.peer = Some(peer);
                }
                if worker.own_code {
                    worker.code_of.get_or_insert(user);
                }
                state.changed(id);
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
