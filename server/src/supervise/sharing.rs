//! Requests for shared objects between two workers, and the effects of a worker's exit on them.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::time::Duration;

use gpusession_proto::share::{EVENTS, Name};
use gpusession_proto::supervise::{Charge, Holding, MAX_HOLDINGS, ToWorker, Unshared};
use tokio::sync::mpsc::error::SendError;
use tracing::warn;

use super::shares::{MAX_IMPORTED, Object, Request};
use super::stock::WorkerId;
use super::supervisor::{State, Supervisor};
use super::worker::{Command, Phase, Worker, hex};

/// Time that a worker may take to answer for its object.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// Makes a worker count an object.
fn inherit(workers: &HashMap<WorkerId, Worker>, heir: Option<WorkerId>, (worker, object): Object) {
    if let Some(heir) = heir.and_then(|heir| workers.get(&heir)) {
        let _ = heir.orders.tells.send(Command::Tell(ToWorker::ShareInherited { worker, object }));
    }
}

/// Tells a worker that another one, with which it shared objects, has exited.
fn lost(workers: &HashMap<WorkerId, Worker>, to: &WorkerId, worker: WorkerId) {
    if let Some(to) = workers.get(to) {
        let _ = to.orders.tells.send(Command::Tell(ToWorker::ShareLost { worker }));
    }
}

/// Returns `true` if programs of one worker may have objects of the other's.
///
/// Both serve one lease, or leases that one user of a client has on the same GPUs. A client says
/// whose its leases and programs are; a token never helps another client.
fn may_share(one: &Worker, other: &Worker) -> bool {
    let of_one_user = !one.user().is_empty() && one.user() == other.user();
    one.lease == other.lease || one.client == other.client && of_one_user && one.gpus == other.gpus
}

/// Answers a request for an object; returns a descriptor that its worker does not get.
fn answer(
    workers: &HashMap<WorkerId, Worker>,
    request: &Request,
    given: Result<(Charge, OwnedFd), Unshared>,
) -> Option<OwnedFd> {
    let Some(worker) = workers.get(&request.importer) else {
        return given.ok().map(|(_, descriptor)| descriptor);
    };
    let serial = request.serial;
    let count = workers.get(&request.name.worker).is_some_and(|exporter| exporter.lease != worker.lease);
    let command = match given {
        Ok((charge, descriptor)) => {
            Command::Give(ToWorker::ShareGranted { serial, given: Ok(charge), count }, descriptor)
        }
        Err(why) => Command::Tell(ToWorker::ShareGranted { serial, given: Err(why), count: false }),
    };
    match worker.orders.tells.send(command) {
        Err(SendError(Command::Give(_, descriptor))) => Some(descriptor),
        _ => None,
    }
}

impl Supervisor {
    /// Asks the worker of an object for it, if it serves a process of the same lease, or of another
    /// one of the user whose objects the importing worker `counts`.
    pub(super) fn share_wanted(
        &self,
        state: &mut State,
        importer: WorkerId,
        serial: u64,
        name: Name,
        counts: bool,
    ) {
        let State { workers, shares, .. } = state;
        let serves = |w: &&Worker| w.phase == Phase::Active && w.process.is_some();
        let Some(from) = workers.get(&importer).filter(serves) else { return };
        let request = Request { importer, serial, name, since: self.0.clock.now(), asked: true };
        let known = |w: &&Worker| w.phase == Phase::Parked || serves(w);
        let may = |to: &Worker| to.lease == from.lease || counts && may_share(to, from);
        let Some(to) = workers.get(&name.worker).filter(|to| known(to) && may(to)) else {
            answer(workers, &request, Err(Unshared::Elsewhere));
            return;
        };
        let asked = !to.moving && to.phase == Phase::Active;
        match shares.ask(Request { asked, ..request.clone() }) {
            // It gets the question once its memory is back.
            Some(_) if !asked => {}
            Some(number) => {
                let _ = to.orders.tells.send(Command::Tell(ToWorker::ShareAsked { number, name }));
            }
            None => drop(answer(workers, &request, Err(Unshared::Busy))),
        }
    }

    /// Passes on the questions for a worker whose memory is back.
    pub(super) fn shares_back(&self, state: &mut State, id: &WorkerId) {
        let State { workers, shares, .. } = state;
        let Some(to) = workers.get(id) else { return };
        for (number, name) in shares.mark_asked(id, self.0.clock.now()) {
            let _ = to.orders.tells.send(Command::Tell(ToWorker::ShareAsked { number, name }));
        }
    }

    /// Passes on a worker's answer, which has no effect on a request that has ended.
    ///
    /// Returns the descriptor if no other worker gets it. The caller closes it without the state's
    /// lock: a worker chooses what it sends, and the last `close` of a socket may wait.
    #[must_use]
    pub(super) fn share_given(
        &self,
        state: &mut State,
        exporter: &WorkerId,
        number: u64,
        given: Result<Charge, Unshared>,
        descriptor: Option<OwnedFd>,
    ) -> Option<OwnedFd> {
        let State { workers, shares, .. } = state;
        let Some(request) = shares.answered(number, exporter) else { return descriptor };
        let Some(importer) = workers.get(&request.importer) else { return descriptor };
        let (given, unused) = match (given, descriptor) {
            (Ok(charge), Some(descriptor)) => (Ok((charge, descriptor)), None),
            (Ok(_), None) => (Err(Unshared::Unknown), None),
            (Err(why), descriptor) => (Err(why), descriptor),
        };
        if let Err(Unshared::Unknown) = given
            && let Some(more) = self.0.refusals.may()
        {
            warn!(
                gpusession_worker = hex(&request.importer),
                gpusession_lease = importer.lease,
                gpusession_client = importer.client,
                "worker {}: refused an import by a program of {}: no program exported that memory to it{more}",
                hex(&request.importer),
                importer.user()
            );
            let why = format!("no program exported that memory to it{more}");
            let _ = self.0.events.send(importer.refusal("import-refused", None, why));
        }
        if given.is_ok() {
            shares.hold(request.name.counted(), request.importer, 1, false);
        }
        answer(workers, &request, given).or(unused)
    }

    /// Subtracts an import that a worker no longer has.
    pub(super) fn share_dropped(&self, state: &mut State, id: &WorkerId, object: Object) {
        let heir = state.shares.drop_imports(&object, id, 1);
        inherit(&state.workers, heir, object);
    }

    /// Makes an importer count an object that its own worker has released.
    pub(super) fn share_ended(&self, state: &mut State, exporter: &WorkerId, object: u64) {
        let object = (*exporter, object);
        let heir = state.shares.orphan(&object);
        inherit(&state.workers, heir, object);
    }

    /// Notes the imports of a worker that an earlier server has supervised, from workers whose
    /// objects it may have.
    pub(super) fn shares_held(&self, state: &mut State, id: &WorkerId, held: &[Holding]) {
        let State { workers, shares, .. } = state;
        let Some(worker) = workers.get(id) else { return };
        let elsewhere =
            |holding: &&Holding| workers.get(&holding.worker).is_some_and(|other| !may_share(worker, other));
        for holding in held.iter().take(MAX_HOLDINGS).filter(|holding| !elsewhere(holding)) {
            if shares.accounts.get(id).is_some_and(|account| account.imported >= MAX_IMPORTED) {
                return;
            }
            let object = (holding.worker, holding.object);
            let shared = shares.hold(object, *id, holding.imports, holding.inherited);
            shared.orphan |= holding.inherited;
            if !workers.contains_key(&holding.worker) {
                match object.1 {
                    EVENTS => shares.end(&object),
                    _ => inherit(workers, shares.orphan(&object), object),
                }
                lost(workers, id, holding.worker);
            }
        }
    }

    /// Ends the part of an exited worker: its requests, its imports, and requests for its objects.
    pub(super) fn shares_gone(&self, state: &mut State, id: &WorkerId) {
        let State { workers, shares, .. } = state;
        for request in shares.take(|r| r.importer == *id || r.name.worker == *id) {
            answer(workers, &request, Err(Unshared::Elsewhere));
        }
        for other in shares.partners(id) {
            lost(workers, &other, *id);
        }
        let objects: Vec<Object> = shares.shared.keys().copied().collect();
        for object in objects {
            let mut heir = shares.drop_imports(&object, id, u32::MAX);
            if object == (*id, EVENTS) {
                shares.end(&object);
            } else if object.0 == *id {
                heir = shares.orphan(&object).or(heir);
            }
            inherit(workers, heir, object);
        }
    }

    /// Refuses requests that a worker has not answered in time; for memory that is on its way no
    /// worker was asked yet.
    pub(super) fn shares_overdue(&self, state: &mut State) {
        let now = self.0.clock.now();
        let State { workers, shares, .. } = state;
        for request in shares.take(|r| r.asked && now.saturating_sub(r.since) >= ANSWER_TIMEOUT) {
            answer(workers, &request, Err(Unshared::Busy));
        }
    }
}
