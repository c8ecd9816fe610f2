//! Messages of workers and their effects, and the ledgers' messages to workers.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::time::Duration;

use gpusession_proto::journal;
use gpusession_proto::supervise::{FromWorker, ToWorker};
use tracing::{debug, info, warn};

use super::event::Event;
use super::quota::LedgerMessage;
use super::stock::WorkerId;
use super::supervisor::{LeaseState, State, Supervisor};
use super::worker::{Command, Phase, Worker, exceeds, hex};

/// Interval of a worker's usage reports while its client has GPU work.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);

impl Supervisor {
    /// Applies a worker's message; only an answer about a shared object has a descriptor.
    ///
    /// `write`: whether the worker's record is written, if the message changed it.
    pub(super) fn heard(&self, id: &WorkerId, message: FromWorker, descriptor: Option<OwnedFd>, write: bool) {
        let mut unused = None;
        let mut state = self.state();
        match message {
            FromWorker::ShareWanted { serial, name, counts } => {
                self.share_wanted(&mut state, *id, serial, name, counts);
            }
            FromWorker::ShareGiven { number, given } => {
                unused = self.share_given(&mut state, id, number, given, descriptor);
            }
            FromWorker::ShareDropped { worker, object } => {
                self.share_dropped(&mut state, id, (worker, object));
            }
            FromWorker::ShareEnded { object } => self.share_ended(&mut state, id, object),
            FromWorker::SharesHeld { held } => self.shares_held(&mut state, id, &held),
            message => {
                self.on_message(&mut state, id, message);
                state.changed(id);
            }
        }
        let unwritten = if write { state.unwritten(id) } else { None };
        drop(state);
        if let Some(unwritten) = unwritten {
            unwritten.write();
        }
        if unused.is_some() {
            // Without isolation, a worker's socket can make its last `close` wait.
            tokio::task::spawn_blocking(move || drop(unused));
        }
    }

    #[expect(clippy::too_many_lines, reason = "one `match` over the messages")]
    fn on_message(&self, state: &mut State, id: &WorkerId, message: FromWorker) {
        let State { workers, leases, sampled, .. } = state;
        let Some(worker) = workers.get_mut(id) else { return };
        let mut lease = leases.get_mut(&worker.lease);
        let now = self.0.clock.now();
        match message {
            FromWorker::MemoryWanted { device, serial, bytes } => {
                let says = match lease {
                    Some(ref mut lease) => lease.ledger.ask(*id, device, serial, bytes, now),
                    None => vec![LedgerMessage::Granted { worker: *id, device, serial, bytes: 0, left: 0 }],
                };
                say(workers, says);
            }
            FromWorker::StagingFull { bytes } => {
                let limit = lease.as_ref().and_then(|l| l.limits.smallest("staging"));
                if let Some((limit, _)) = limit
                    && let Some(more) = self.0.refusals.may()
                {
                    let why =
                        format!("a program asked for {} MiB of mapped host memory", bytes.div_ceil(1 << 20));
                    let exceeded = limit.exceeded(why, "the program got an out-of-memory error");
                    exceeds(id, worker, &exceeded, more);
                }
            }
            FromWorker::MemoryReturned { device, bytes } => {
                if let Some(lease) = lease {
                    let before = lease.ledger.contexts_left();
                    let says = lease.ledger.returned(id, device, bytes);
                    say(workers, says);
                    if lease.ledger.contexts_left() > before {
                        lease.changed.notify_waiters();
                    }
                }
            }
            FromWorker::Ready { fingerprint, cuda_version, parks } => {
                self.worker_ready(worker, lease, fingerprint, cuda_version, parks);
            }
            FromWorker::Ended { reason, .. } if worker.seat.is_some() && worker.presented => {
                // It waits until MPS has ended its GPU work.
                worker.phase = Phase::Ending;
                worker.ended_because.get_or_insert(printable(&reason));
            }
            FromWorker::Failed { reason } | FromWorker::Ended { reason, .. } => {
                worker.ended_because.get_or_insert(printable(&reason));
            }
            FromWorker::Sealed { ticket } => worker.open(&ticket),
            FromWorker::Presented(process) => self.presented(state, *id, process),
            // Others take these, and a later release's worker sends unknown ones.
            FromWorker::ShareWanted { .. }
            | FromWorker::ShareGiven { .. }
            | FromWorker::ShareDropped { .. }
            | FromWorker::ShareEnded { .. }
            | FromWorker::SharesHeld { .. }
            | FromWorker::ImageWanted { .. }
            | FromWorker::ImageOffered { .. }
            | FromWorker::Unknown => {}
            FromWorker::Admitted { number, lane } => {
                worker.unadmitted.admitted(number);
                if lane == 0 && worker.lanes & 1 != 0 {
                    self.0.resumes.fetch_add(1, Ordering::Relaxed);
                }
                worker.lanes |= 1u64.checked_shl(lane.into()).unwrap_or(0);
            }
            FromWorker::Outage { ms, over: false } => {
                worker.interrupted = Some(now.saturating_sub(Duration::from_millis(ms)));
            }
            // A program that has taken over its worker comes later.
            FromWorker::Sampled { device, bytes, left } if worker.phase == Phase::Starting => {
                let Some(gpu) = worker.gpus.get(device as usize) else { return };
                let sum = sampled.entry(gpu.clone()).or_default();
                sum.bytes = sum.bytes.saturating_add(bytes);
                sum.left = sum.left.saturating_add(left);
                if left > 0 {
                    warn!(
                        message_id = journal::Event::MemoryLeft.id(),
                        gpusession_worker = hex(id),
                        gpusession_lease = worker.lease,
                        gpusession_client = worker.client,
                        gpusession_reason = format!("{left} of {bytes} bytes of GPU {gpu} are not zero"),
                        "GPU {gpu}: the driver did not clear memory: {left} of {bytes} bytes that worker {} got are not zero; give mutually hostile clients GPUs of their own",
                        hex(id)
                    );
                }
            }
            FromWorker::Sampled { .. } => {}
            FromWorker::Outage { ms, over: true } => {
                worker.interrupted = None;
                worker.interruptions = worker.interruptions.saturating_add(1);
                if let Some(more) = self.0.resume_log.may() {
                    info!(
                        message_id = journal::Event::ProgramBack.id(),
                        gpusession_worker = hex(id),
                        gpusession_lease = worker.lease,
                        gpusession_client = worker.client,
                        gpusession_reason = format!("{ms} ms without a connection"),
                        "worker {}: its program is back after {ms} ms without a connection{more}",
                        hex(id)
                    );
                }
            }
            FromWorker::Refused { number, reason } => {
                worker.unadmitted.refused(number);
                if let Some(more) = self.0.refusals.may() {
                    warn!(
                        gpusession_worker = hex(id),
                        gpusession_lease = worker.lease,
                        gpusession_client = worker.client,
                        "worker {}: refused a connection: {}{more}",
                        hex(id),
                        printable(&reason)
                    );
                    let why = format!("{}{more}", printable(&reason));
                    let _ = self.0.events.send(worker.refusal("connection-refused", None, why));
                }
            }
            FromWorker::Usage(usage) => {
                let passed = now.saturating_sub(worker.used_at);
                worker.busy += worked(passed, Duration::from_micros(usage.idle_usec));
                worker.used_at = now;
                worker.usage = usage;
                let active = self.0.clock.now().saturating_sub(Duration::from_micros(usage.idle_usec));
                worker.active = worker.active.max(active);
            }
            FromWorker::Paused { quiet } => {
                if let Some(asked) = worker.pausing.take() {
                    let _ = asked.send(quiet);
                }
            }
            FromWorker::Moved { failed } => {
                if let Some(asked) = worker.relocating.take() {
                    let _ = asked.send(failed);
                }
            }
            FromWorker::Contained { lacking } if worker.may_be_contained(&lacking) => {
                let lacking: Vec<_> = lacking.iter().map(|l| printable(l)).collect();
                worker.isolation = match lacking.is_empty() {
                    true => self.0.options.isolation.level.as_str().into(),
                    false => lacking.join("; "),
                };
            }
            // A late report, sent while the worker exits.
            FromWorker::Contained { .. } => {}
            FromWorker::Wanted => {
                worker.wanted = true;
                self.0.wants.notify_one();
            }
        }
    }

    /// Gives a started worker to its lease's stock, or to the program that waits for it.
    fn worker_ready(
        &self,
        worker: &mut Worker,
        lease: Option<&mut LeaseState>,
        fingerprint: [u8; 32],
        cuda_version: u32,
        parks: bool,
    ) {
        if worker.phase != Phase::Starting {
            return;
        }
        worker.phase = Phase::Warm;
        worker.parks = parks;
        worker.fingerprint = Some(fingerprint);
        debug!(
            gpusession_worker = hex(&worker.id),
            gpusession_lease = worker.lease,
            cuda_version,
            "worker {}: ready",
            hex(&worker.id)
        );
        if let Some(lease) = lease {
            if worker.stocked {
                lease.stock.started(worker.id);
            }
            lease.changed.notify_waiters();
            let event = Event::Workers {
                client: worker.client.clone(),
                lease: worker.lease.clone(),
                stock: lease.stock.ready() as u32,
                ended: None,
            };
            let _ = self.0.events.send(event);
        }
    }
}

/// Sends a ledger's messages to workers. A worker's task writes a grant to the store before it
/// sends it.
pub(super) fn say(workers: &mut HashMap<WorkerId, Worker>, says: Vec<LedgerMessage>) {
    for say in says {
        let (worker, message) = match say {
            LedgerMessage::Granted { worker, device, serial, bytes, left } => {
                (worker, ToWorker::MemoryGranted { device, serial, bytes, left })
            }
            LedgerMessage::Recall { worker } => (worker, ToWorker::MemoryRecall),
        };
        if let Some(worker) = workers.get_mut(&worker) {
            worker.changes.unwritten = true;
            let _ = worker.orders.tells.send(Command::Tell(message));
        }
    }
}

/// Returns the GPU time of a report. It came `passed` after the previous one, and work ended `idle`
/// ago.
fn worked(passed: Duration, idle: Duration) -> Duration {
    // An idle worker sends no reports, so that only the end of a longer interval was work. A slow
    // host may delay reports by some seconds.
    let seen = if passed < REPORT_INTERVAL * 5 { passed } else { REPORT_INTERVAL };
    seen.saturating_sub(idle)
}

/// Cuts and cleans text of a worker for a log or a terminal.
pub(super) fn printable(text: &str) -> String {
    crate::text::printable(text, 200)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rests_between_reports_are_not_gpu_work() {
        let ms = Duration::from_millis;
        assert_eq!(worked(ms(1010), ms(10)), ms(1000), "it goes on");
        assert_eq!(worked(ms(1010), ms(700)), ms(310), "it has ended");
        assert_eq!(worked(ms(2100), ms(100)), ms(2000), "two reports came together");
        assert_eq!(worked(ms(3_600_000), ms(400)), ms(600), "one second of an hour");
        assert_eq!(worked(ms(1010), ms(5000)), ms(0), "the rest goes on");
    }
}
