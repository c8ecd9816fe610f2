//! Writing of workers' records outside of the supervisor's lock.
//!
//! A worker may send thousands of messages in a second, and each may change its record. Under the
//! lock a message only notes that the record lacks a change. The worker's task writes it at once,
//! but counters at most each [`RECORD_INTERVAL`]. It always writes before the worker gets a
//! message, so that the next server knows the message, too.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::handover::Record;
use super::record::WorkerRecord;
use super::stock::WorkerId;
use super::supervisor::{State, Supervisor};

/// Shortest time between two writes of a record for counters of its worker.
pub(super) const RECORD_INTERVAL: Duration = Duration::from_millis(50);

/// Times at which a worker's task writes its record.
#[derive(Debug, Default)]
pub(super) struct Pace {
    last: Option<Instant>,
    due: Option<Instant>,
}

impl Pace {
    /// Returns `true` if a change is to be written now; else its time comes.
    pub(super) fn changed(&mut self, now: Instant) -> bool {
        match self.last.map(|last| last + RECORD_INTERVAL).filter(|next| now < *next) {
            Some(next) => {
                self.due = Some(next);
                false
            }
            None => {
                self.written(now);
                true
            }
        }
    }

    /// Notes that all changes so far were written.
    pub(super) fn written(&mut self, now: Instant) {
        (self.last, self.due) = (Some(now), None);
    }

    /// Returns the time of the next write, if a change waits for it.
    pub(super) fn due(&self) -> Option<Instant> {
        self.due
    }
}

/// The state of a worker that its record lacks.
pub(super) struct Unwritten {
    record: Arc<Record>,
    number: u64,
    book: WorkerRecord,
}

impl Unwritten {
    /// Writes it, unless a later state was written meanwhile.
    pub(super) fn write(&self) {
        self.record.write(self.number, &self.book);
    }
}

impl State {
    /// Notes that a worker's record lacks a change.
    pub(super) fn changed(&mut self, id: &WorkerId) {
        if let Some(worker) = self.workers.get_mut(id) {
            worker.changes.unwritten = true;
        }
    }

    /// Takes what a worker's record lacks.
    pub(super) fn unwritten(&mut self, id: &WorkerId) -> Option<Unwritten> {
        let worker = self.workers.get_mut(id)?;
        let record = worker.kept.as_ref()?.record().clone();
        if !std::mem::take(&mut worker.changes.unwritten) {
            return None;
        }
        if let Some(lease) = self.leases.get(&worker.book.lease) {
            worker.book.held = lease.ledger.held(id);
        }
        worker.changes.number += 1;
        Some(Unwritten { record, number: worker.changes.number, book: worker.book.clone() })
    }
}

impl Supervisor {
    /// Writes a worker's record if it lacks a change.
    pub(super) fn write_record(&self, id: &WorkerId) {
        let unwritten = self.state().unwritten(id);
        if let Some(unwritten) = unwritten {
            unwritten.write();
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::sync::mpsc::channel;

    use gpusession_proto::supervise::{FromWorker, ToWorker, Usage};

    use super::super::groups::WorkerGroups;
    use super::super::handover::tests::kept;
    use super::super::handover::{Kept, Store};
    use super::super::record::tests::first;
    use super::super::supervisor::Options;
    use super::super::unadmitted::Unadmitted;
    use super::super::worker::{Command, Queues, Worker, orders};
    use super::*;
    use crate::accounting::Accounting;
    use crate::cgroups::{self, Cgroups};
    use crate::clock::SystemRandom;
    use crate::clock::testing::TestClock;
    use crate::isolation::Decision;
    use crate::starter::link::Starter;

    /// A supervisor with these workers.
    pub fn supervisor(folder: &tempfile::TempDir, ids: &[WorkerId]) -> (Supervisor, Vec<Queues>) {
        let options = Options {
            program: "/nowhere".into(),
            starter: Starter::Here("/nowhere".into()),
            uid: 0,
            driver: "/nowhere".into(),
            cache: None,
            warm_workers: 0,
            verify_memory: false,
            idle_exit: Duration::ZERO,
            isolation: Decision::off(""),
            mps: None,
            groups: WorkerGroups::new(Cgroups::of_this_unit(cgroups::SERVER), None),
        };
        let accounting = Accounting::open(folder.path()).unwrap();
        let (clock, random) = (Arc::new(TestClock::default()), Arc::new(SystemRandom));
        let this = Supervisor::new(options, Store::default(), Vec::new(), accounting, clock, random).unwrap();
        let mut all = Vec::new();
        for id in ids {
            let (orders, queues) = orders();
            let book = WorkerRecord { id: *id, ..serde_json::from_value(first()).unwrap() };
            let worker = Worker {
                book,
                lease_key: [0; 32],
                kept: Some(kept()),
                changes: Default::default(),
                keepable: None,
                seat: None,
                pausing: None,
                relocating: None,
                parked_at: None,
                unadmitted: Unadmitted::default(),
                presented: false,
                offends: false,
                ticket: None,
                orders,
            };
            this.state().workers.insert(*id, worker);
            all.push(queues);
        }
        (this, all)
    }

    fn record(this: &Supervisor, id: &WorkerId) -> Arc<Record> {
        this.state().workers[id].kept.as_ref().map(Kept::record).unwrap().clone()
    }

    fn calls(record: &Record) -> u64 {
        record.read().expect("a record").usage.calls
    }

    fn usage(calls: u64) -> FromWorker {
        FromWorker::Usage(Usage { calls, ..Usage::default() })
    }

    #[tokio::test]
    async fn a_record_that_is_written_delays_no_other_worker() {
        let folder = tempfile::tempdir().unwrap();
        let (this, _queues) = supervisor(&folder, &[[1; 16], [2; 16]]);
        let (slow, other) = (record(&this, &[1; 16]), record(&this, &[2; 16]));
        let busy = slow.held_up();
        let (done, is_done) = channel();
        let writer = this.clone();
        let writing = std::thread::spawn(move || {
            writer.heard(&[1; 16], usage(5), None, true);
            done.send(()).unwrap();
        });
        // While the first record is being written, the others continue.
        assert!(is_done.recv_timeout(Duration::from_millis(100)).is_err(), "it waits for its record");
        this.heard(&[2; 16], usage(7), None, true);
        assert_eq!(calls(&other), 7);
        drop(busy);
        writing.join().unwrap();
        assert_eq!(calls(&slow), 5);
    }

    #[tokio::test]
    async fn a_flood_of_messages_writes_a_record_each_interval_and_before_an_answer() {
        let folder = tempfile::tempdir().unwrap();
        let id = [1; 16];
        let (this, mut queues) = supervisor(&folder, &[id]);
        let (record, start) = (record(&this, &id), Instant::now());
        let mut pace = Pace::default();
        for n in 1..=1000 {
            let now = start + RECORD_INTERVAL * n / 500;
            this.heard(&id, usage(n.into()), None, pace.changed(now));
        }
        assert_eq!(record.writes(), 2, "at once, and at most each interval");
        assert!(calls(&record) < 1000 && pace.due().is_some());
        this.write_record(&id);
        assert_eq!(calls(&record), 1000);

        // An answer waits in the worker's queue, and its task writes the record before it sends.
        this.heard(&id, FromWorker::MemoryWanted { device: 0, serial: 1, bytes: 1 }, None, false);
        let answer = queues[0].tells.try_recv();
        assert!(matches!(answer, Ok(Command::Tell(ToWorker::MemoryGranted { .. }))));
        assert!(this.state().unwritten(&id).is_some());
    }

    #[test]
    fn an_older_state_never_replaces_a_newer_one() {
        let (kept, book) = (kept(), serde_json::from_value::<WorkerRecord>(first()).unwrap());
        let with = |calls| WorkerRecord { usage: Usage { calls, ..Usage::default() }, ..book.clone() };
        kept.record().write(2, &with(2));
        kept.record().write(1, &with(1));
        assert_eq!(calls(kept.record()), 2);
        kept.record().write(3, &with(3));
        assert_eq!(calls(kept.record()), 3);
    }
}
