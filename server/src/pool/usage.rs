//! A client's programs, and use of the last 24 hours, for `gpusession smi` and `stats`.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use gpusession_common::usage::UsageSums;
use gpusession_proto::control as wire;
use tonic::Status;
use tracing::warn;

use super::lock::locked;
use super::state::Pool;
use super::{LEASE_GRANTED, lease_granted};
use crate::accounting::{Kind, LeaseNote, Record, Row, UNSEEN};
use crate::lease::Lease;
use crate::registry::Standing;
use crate::usage::{self, Usage};

/// Interval at which running leases are counted, in seconds.
const NOTED_EVERY: u64 = 60;
/// Hours that a client sees, beside the present one.
const SHOWN_HOURS: u64 = 24;
/// Latest records whose leases may lack their line in the audit trail after a crash: more than end
/// in the moment in which a line waits for the disk.
const UNSEEN_RECORDS: usize = 1000;
/// Time before the last line of the trail in which such a lease may have begun, in seconds.
const UNSEEN_SECONDS: u64 = 300;
/// Age at which sums are read again: clients may ask at any rate.
const MAX_AGE: Duration = Duration::from_secs(2);

impl Pool {
    /// Counts a lease's GPUs from now on, and its grant if it is new.
    pub(super) fn note_lease(&self, lease: &Lease, holds: bool, fresh: bool) {
        self.accounting.note_lease(LeaseNote {
            record: self.record_of(lease, ""),
            gpus: if holds { lease.shares.len() as u64 } else { 0 },
            granted_after: fresh.then_some(u64::try_from(lease.waited.as_micros()).unwrap_or(u64::MAX)),
        });
    }

    /// Returns a lease's record, as if it ended now.
    pub(super) fn record_of(&self, lease: &Lease, reason: &str) -> Record {
        Record {
            kind: Kind::Lease,
            lease: lease.id.clone(),
            worker: String::new(),
            client: lease.client.clone(),
            user: lease.user.clone(),
            uid: lease.uid,
            pid: 0,
            program: String::new(),
            executable: String::new(),
            gpus: lease.shares.iter().map(|s| s.gpu.clone()).collect(),
            start_unix: lease.created_unix,
            end_unix: self.unix(),
            gpu_busy_usec: 0,
            peak_memory_bytes: self.supervisor.peak(&lease.id),
            bytes_to_device: 0,
            bytes_from_device: 0,
            calls: 0,
            reason: reason.into(),
            uids: Vec::new(),
            users: Vec::new(),
        }
    }

    fn held(&self) -> Vec<Record> {
        self.accounting.held().unwrap_or_else(|e| {
            warn!("accounting: noted leases not read: {e}; leases that ended at a crash have no record");
            Vec::new()
        })
    }

    /// Adds leases of an earlier server to the audit trail that are not in it.
    ///
    /// A server that is killed may have stored a lease without the event for it. `lost`: leases
    /// that this server cannot serve.
    pub async fn note_unseen_grants(&self, lost: &[Lease]) {
        let ended = self.accounting.latest_leases(UNSEEN_RECORDS).unwrap_or_default();
        let standing = self.registry.leases().await;
        let leases = lost.iter().chain(standing.iter().map(|s| &s.lease)).map(|l| self.record_of(l, ""));
        let leases = leases.chain(self.held()).chain(ended);
        let leases: BTreeMap<_, _> = leases.map(|record| (record.lease.clone(), record)).collect();
        // All that happened earlier is in the trail, or was left out on purpose.
        let since = self.audit().before_unix().saturating_sub(UNSEEN_SECONDS);
        match self.audit().leases(LEASE_GRANTED, since) {
            Ok(granted) => {
                let late = |r: &Record| r.start_unix >= since && !granted.contains(&r.lease);
                for Record { lease, client, gpus, start_unix, .. } in leases.into_values().filter(late) {
                    let age = self.unix().saturating_sub(start_unix);
                    let detail = format!("began {age} s ago; noted at the server's start");
                    self.audit().note(lease_granted(&lease, &client, gpus, detail));
                }
            }
            Err(e) => warn!("audit: trail not read: {e}; leases granted at a crash may lack their event"),
        }
    }

    /// Records the end of leases that an earlier server noted and that no longer exist.
    ///
    /// A server that is killed may have stored a lease's end without its record.
    pub async fn record_unseen_ends(&self) {
        for record in self.held() {
            if !self.registry.holds(&record.lease).await {
                self.note_lease_end(&record.lease, &record.client, &record.gpus, UNSEEN);
                self.accounting.add(Record { reason: UNSEEN.into(), ..record });
            }
        }
    }

    /// Counts all leases once a minute.
    pub(super) async fn note_leases(&self) {
        let minute = self.unix() / NOTED_EVERY;
        if self.noted.swap(minute, Ordering::Relaxed) == minute {
            return;
        }
        let leases = self.registry.leases().await;
        locked(&self.allowance).forget_unseen(|lease| leases.iter().any(|s| s.lease.id == lease));
        for standing in leases {
            let holds = !self.registry.is_lent(&standing.lease.id).await;
            self.note_lease(&standing.lease, holds, false);
        }
    }

    async fn day(&self) -> Result<Arc<[Row]>, Status> {
        let now = self.clock.now();
        if let Some((read, rows)) = &*locked(&self.day)
            && now.saturating_sub(*read) < MAX_AGE
        {
            return Ok(rows.clone());
        }
        let (accounting, unix) = (self.accounting.clone(), self.unix());
        let reads = move || accounting.usage(unix.saturating_sub(SHOWN_HOURS * 3600), unix);
        let rows = tokio::task::spawn_blocking(reads).await;
        let rows = rows.map_err(|e| Status::internal(format!("internal error: {e}")))?.map_err(|e| {
            warn!("accounting: use not read: {e}");
            Status::internal("the use of GPUs could not be read; see the server's journal")
        })?;
        let rows: Arc<[Row]> = rows.into();
        *locked(&self.day) = Some((now, rows.clone()));
        Ok(rows)
    }

    /// Returns the use by all clients, by this one, and by one of its users.
    pub(super) async fn usage_of(&self, client: &str, uid: u32) -> Result<Vec<wire::Usage>, Status> {
        let rows = self.day().await?;
        let sum = |of: &dyn Fn(&Row) -> bool| {
            let mut sums = Usage::default();
            rows.iter().filter(|row| of(row)).for_each(|row| sums.add(&row.usage));
            on_wire(sums.shown())
        };
        let owner = usage::owner(uid);
        let of_client = |row: &Row| row.client == client;
        Ok(vec![sum(&|_| true), sum(&of_client), sum(&|row| of_client(row) && row.owner == owner)])
    }

    /// Lists a client's programs, a row for each of their GPUs.
    pub(super) async fn programs_of(&self, client: &str) -> Vec<wire::CardProgram> {
        let mut rows = Vec::new();
        for Standing { lease, .. } in self.registry.of_client(client).await {
            for (process, memory) in self.supervisor.processes(&lease.id) {
                rows.extend(lease.shares.iter().zip(memory).map(|(share, used_bytes)| wire::CardProgram {
                    uuid: share.gpu.clone(),
                    lease: lease.id.clone(),
                    pid: process.pid,
                    uid: process.uid,
                    user: process.user.clone(),
                    name: process.program.clone(),
                    used_bytes,
                }));
            }
        }
        rows
    }
}

fn on_wire(sums: UsageSums) -> wire::Usage {
    wire::Usage {
        leases: sums.leases,
        programs: sums.programs,
        gpu_usec: sums.gpu_usec,
        busy_usec: sums.busy_usec,
        bytes_to_device: sums.bytes_to_device,
        bytes_from_device: sums.bytes_from_device,
        wait_p50_usec: sums.wait_p50_usec,
        wait_p95_usec: sums.wait_p95_usec,
    }
}
