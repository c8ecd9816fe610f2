//! Performs the machine's actions: calls to servers, updates for subscribers.

use std::collections::HashMap;
use std::sync::Arc;

use gpusession_proto::control;
use tokio::time::Instant;

use super::actor::Actor;
use super::calls::tell_ended;
use super::grants::valid;
use super::message::{Message, ended};
use crate::leases::machine::Action;
use crate::leases::{Change, Update};
use crate::pool::{PoolError, PoolServer, Trouble, unencrypted};

impl Actor {
    /// Performs the machine's actions, then publishes a snapshot.
    pub(super) fn work(&mut self) {
        self.work_once();
        while self.machine.has_actions() {
            self.work_once();
        }
    }

    fn work_once(&mut self) {
        let told = self.perform();
        let saved = self.machine.saved();
        if saved != self.saved {
            (self.save)(&saved);
            self.saved = saved;
        }
        self.follow_known();
        let snapshot = Arc::new(self.snapshot());
        // Waiting processes ask again at each notification, so only a real change notifies.
        let stock = told.iter().any(|c| matches!(c, Change::Stock { .. }));
        let mut changed = stock;
        {
            // Under the lock, so that a subscriber that starts now sees every update exactly once.
            let mut updates = self.updates.lock().unwrap_or_else(|e| e.into_inner());
            self.snapshot.send_if_modified(|old| {
                changed |= !old.same_facts(&snapshot);
                *old = snapshot.clone();
                changed
            });
            if changed || !told.is_empty() {
                let update = Update { changes: told.clone(), snapshot: snapshot.clone() };
                updates.retain(|to| to.send(update.clone()).is_ok());
            }
        }
        self.log_servers(&snapshot);
        for change in told {
            self.log(&change);
            match &change {
                Change::Granted { slot } => {
                    if let Some(reply) = self.creating.remove(slot) {
                        let view = snapshot.leases.iter().find(|l| l.facts.slot == *slot).cloned();
                        let gone = reply.send(view.ok_or_else(ended)).is_err();
                        if gone {
                            // The requester dropped its reply channel.
                            let now = self.now();
                            self.machine.release(now, *slot, "its requester has left");
                        }
                    }
                }
                Change::Failed { slot, error } => {
                    if let Some(reply) = self.creating.remove(slot) {
                        let _ = reply.send(Err(error.clone()));
                    }
                }
                Change::Removed { slot, .. } => {
                    self.refused.remove(slot);
                    self.failures.remove(slot);
                    self.interruptions.retain(|_, (of, ..)| of != slot);
                    if let Some(reply) = self.creating.remove(slot) {
                        let _ = reply.send(Err(ended()));
                    }
                }
                _ => {}
            }
        }
        if !self.drained.is_empty()
            && self.machine.releases_pending() == 0
            && !self.machine.has_unwanted()
            && self.machine.slots().next().is_none()
        {
            for reply in self.drained.drain(..) {
                let _ = reply.send(());
            }
        }
    }

    /// Performs the machine's actions; returns the changes that it announces.
    fn perform(&mut self) -> Vec<Change> {
        let mut told = Vec::new();
        while let Some(action) = self.machine.next_action() {
            match action {
                Action::Allocate { slot, servers, request } => {
                    let pools: Vec<_> = servers.iter().map(|i| (*i, self.servers[*i].clone())).collect();
                    let clear = self.clear;
                    self.spawn(
                        async move { Message::Allocated(slot, allocate(pools, *request, clear).await) },
                    );
                }
                Action::Renew { server, leases } => {
                    let (pool, boot) = (self.servers[server].clone(), self.boot.clone());
                    self.spawn(async move {
                        let begun = Instant::now();
                        let result = pool.renew(leases.clone(), boot).await;
                        Message::Renewed(server, leases, begun.elapsed(), result)
                    });
                }
                Action::Withdraw { server, request_id } => {
                    let pool = self.servers[server].clone();
                    self.spawn(async move {
                        let result = pool.withdraw(request_id.clone()).await;
                        Message::Withdrawn(server, request_id, result)
                    });
                }
                Action::Release { server, lease } => {
                    let pool = self.servers[server].clone();
                    self.spawn(async move {
                        let result = pool.release(lease.clone()).await;
                        Message::Released(server, lease, result)
                    });
                }
                Action::TakeWorkers { slot, server, lease, count, waiting } => {
                    let pool = self.servers[server].clone();
                    self.spawn(async move {
                        let result = pool.take_workers(lease.clone(), count, waiting, HashMap::new()).await;
                        Message::Workers(slot, lease, result)
                    });
                }
                Action::EndWorker { slot, server, lease, worker } => {
                    let pool = self.servers[server].clone();
                    self.spawn(async move {
                        tell_ended(pool, lease, worker).await;
                        Message::Freed(slot)
                    });
                }
                Action::Tell(change) => told.push(change),
            }
        }
        told
    }
}

/// Asks one server after the other; if all refuse, returns the most hopeful of their reasons.
///
/// Without `clear` a lease whose data would not be encrypted goes back.
async fn allocate(
    pools: Vec<(usize, Arc<dyn PoolServer>)>,
    request: control::AllocateRequest,
    clear: bool,
) -> Result<(usize, control::Lease), PoolError> {
    let mut refusal: Option<PoolError> = None;
    for (index, pool) in pools {
        let error = match pool.allocate(request.clone()).await {
            Ok(lease) if !valid(&lease) => {
                PoolError::new(Trouble::Protocol, format!("{}: sent an invalid lease", pool.address()))
            }
            Ok(lease) if lease.encrypted || clear => return Ok((index, lease)),
            Ok(lease) => {
                // A lease that stays at an unreachable server expires there.
                let _ = pool.release(lease.id).await;
                PoolError::new(Trouble::Clear, unencrypted(&lease.server))
            }
            Err(error) => error,
        };
        let hope = |e: &PoolError| match e.trouble {
            Trouble::NoCapacity => 4,
            Trouble::LimitExceeded => 3,
            Trouble::Unreachable => 2,
            Trouble::NeverFits => 1,
            _ => 0,
        };
        if refusal.as_ref().is_none_or(|r| hope(&error) > hope(r)) {
            refusal = Some(error);
        }
    }
    Err(refusal.unwrap_or_else(|| PoolError::new(Trouble::Unreachable, "no server to ask")))
}
