//! Accounting: records of ended leases and programs, and sums of hours, in an embedded database.

mod hours;
mod record;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use redb::{Database, ReadableDatabase, ReadableTable, ReadableTableMetadata, Table, TableDefinition};
use serde::{Deserialize, Serialize};
use tracing::warn;

use self::hours::Hours;
pub use self::hours::{LeaseNote, Row};
pub use self::record::{Kind, Record};

/// Records, by the second of their end and then by a running number.
const RECORDS: TableDefinition<'_, (u64, u64), &[u8]> = TableDefinition::new("records");
/// Running programs, by worker, as last noted.
const RUNNING: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("running");
/// Held leases, by id, as last noted.
const HELD: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("held");
/// Reason in the record of a program or lease that ended unseen, as at a crash of the server.
pub const UNSEEN: &str =
    "its end was not seen: the figures are those of the last minute in which a server saw it";
/// Most orders that one transaction writes, after its first.
const BATCH: usize = 256;
/// Most ended leases whose late notes are recognized.
const MAX_ENDED: usize = 1024;
/// Most pages of the database that stay in memory, in bytes.
const MAX_CACHE_BYTES: usize = 8 << 20;
/// Most records that are kept, whatever their age.
///
/// Without it, a client that starts programs without pause could fill the disk.
const MAX_RECORDS: u64 = 2_000_000;

/// Selection of records.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Wanted {
    /// Earliest end, in seconds since 1970.
    pub since_unix: u64,
    /// First end that is too late, in seconds since 1970; 0: no bound.
    pub until_unix: u64,
    /// Name of the client; empty: all.
    pub client: String,
    /// Name or id of a user, for the user's records and leases with such programs; empty: all.
    pub user: String,
    /// Subject of the records; `None`: both.
    pub kind: Option<Kind>,
}

/// Returns `true` for a program or lease of that user, and for a lease with such a program.
fn ran(r: &Record, uid: u32) -> bool {
    // A lease without a user has the user id 0, which is not root's here.
    r.uid == uid && (r.kind == Kind::Process || !r.user.is_empty()) || r.uids.contains(&uid)
}

impl Wanted {
    fn fits(&self, r: &Record) -> bool {
        (self.client.is_empty() || r.client == self.client)
            && (self.user.is_empty()
                || r.user == self.user
                || r.users.contains(&self.user)
                || self.user.parse().is_ok_and(|uid| ran(r, uid)))
            && self.kind.is_none_or(|k| k == r.kind)
    }
}

/// Failure of the database, with its path.
#[derive(Debug, thiserror::Error)]
#[error("{}: {error}; move it away to begin a new one", path.display())]
pub struct AccountingError {
    path: PathBuf,
    error: Box<redb::Error>,
}

enum Order {
    Add(Box<Record>),
    Note(Box<Record>),
    NoteLease(Box<LeaseNote>),
    KeepRunning(BTreeSet<String>),
    /// Deletes records with an earlier end, in seconds since 1970.
    Forget(u64),
    Flush(mpsc::Sender<()>),
}

/// Sums over the leases and programs that have ended since the server started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    /// Number of ended leases.
    pub leases: u64,
    /// Number of ended programs.
    pub programs: u64,
    /// Time of GPU work of these programs.
    pub gpu_busy: Duration,
}

struct Inner {
    path: PathBuf,
    totals: Mutex<BTreeMap<String, Totals>>,
    database: Arc<Database>,
    orders: Mutex<Option<mpsc::Sender<Order>>>,
    writer: Mutex<Option<JoinHandle<()>>>,
}

/// The records of one server. Cheap to clone; a thread of its own writes.
#[derive(Clone)]
pub struct Accounting(Arc<Inner>);

impl std::fmt::Debug for Accounting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Accounting").field(&self.0.path).finish()
    }
}

impl Accounting {
    /// Opens `accounting.redb` in the state directory, and creates it if absent.
    pub fn open(state_dir: &Path) -> Result<Self, AccountingError> {
        Self::bounded(state_dir, MAX_RECORDS)
    }

    fn bounded(state_dir: &Path, most: u64) -> Result<Self, AccountingError> {
        let path = state_dir.join("accounting.redb");
        let fail = |e: redb::Error| AccountingError { path: path.clone(), error: Box::new(e) };
        let database = Database::builder().set_cache_size(MAX_CACHE_BYTES).create(&path);
        let database = Arc::new(database.map_err(|e| fail(e.into()))?);
        let first = next_number(&database).map_err(fail)?;
        let (orders, queue) = mpsc::channel();
        let theirs = database.clone();
        let writer = std::thread::Builder::new()
            .name("accounting".into())
            .spawn(move || write(&theirs, &queue, first, most))
            .map_err(|e| fail(redb::Error::Io(e)))?;
        Ok(Self(Arc::new(Inner {
            path,
            totals: Mutex::default(),
            database,
            orders: Mutex::new(Some(orders)),
            writer: Mutex::new(Some(writer)),
        })))
    }

    fn order(&self, order: Order) {
        if let Some(orders) = &*self.0.orders.lock().unwrap_or_else(PoisonError::into_inner) {
            let _ = orders.send(order);
        }
    }

    /// Queues a record for the writer.
    pub fn add(&self, record: Record) {
        {
            let mut totals = self.0.totals.lock().unwrap_or_else(PoisonError::into_inner);
            let of_client = totals.entry(record.client.clone()).or_default();
            match record.kind {
                Kind::Lease => of_client.leases += 1,
                Kind::Process => {
                    of_client.programs += 1;
                    of_client.gpu_busy += Duration::from_micros(record.gpu_busy_usec);
                }
            }
        }
        self.order(Order::Add(Box::new(record)));
    }

    /// Notes a running program, so that a later server can record it if it has exited by then.
    pub fn note(&self, record: Record) {
        self.order(Order::Note(Box::new(record)));
    }

    /// Notes a new lease, or one that continues, for the sums of hours and for a later server.
    pub fn note_lease(&self, note: LeaseNote) {
        self.order(Order::NoteLease(Box::new(note)));
    }

    /// Returns the noted leases whose end has no record.
    pub fn held(&self) -> Result<Vec<Record>, AccountingError> {
        self.flush();
        let read = || -> Result<Vec<Record>, redb::Error> {
            let table = self.0.database.begin_read()?.open_table(HELD)?;
            let rows = table.iter()?.map(|entry| Ok(serde_json::from_slice(entry?.1.value()).ok()));
            rows.filter_map(Result::transpose).collect()
        };
        read().map_err(|error| AccountingError { path: self.0.path.clone(), error: Box::new(error) })
    }

    /// Returns the records of leases among the latest `most` records, without their programs' sums.
    pub fn latest_leases(&self, most: usize) -> Result<Vec<Record>, AccountingError> {
        let read = || -> Result<Vec<Record>, redb::Error> {
            let table = self.0.database.begin_read()?.open_table(RECORDS)?;
            let rows = table.iter()?.rev().take(most);
            let rows = rows.map(|entry| Ok(serde_json::from_slice::<Record>(entry?.1.value()).ok()));
            let leases = rows.filter_map(Result::transpose);
            leases.filter(|r| r.as_ref().map_or(true, |r| r.kind == Kind::Lease)).collect()
        };
        read().map_err(|error| AccountingError { path: self.0.path.clone(), error: Box::new(error) })
    }

    /// Records the end of each noted program whose worker is not among `workers`.
    ///
    /// An earlier server noted it; the time of its last note stands for its end.
    pub fn keep_running(&self, workers: BTreeSet<String>) {
        self.order(Order::KeepRunning(workers));
    }

    /// Returns the sums since the server started, by client.
    pub fn totals(&self) -> BTreeMap<String, Totals> {
        self.0.totals.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Deletes records with an end before `unix`, in seconds since 1970.
    pub fn forget_before(&self, unix: u64) {
        self.order(Order::Forget(unix));
    }

    /// Waits until all orders so far are written.
    pub fn flush(&self) {
        let (done, wait) = mpsc::channel();
        self.order(Order::Flush(done));
        let _ = wait.recv();
    }

    /// Returns the selected records in the order of their ends.
    pub fn list(&self, wanted: &Wanted) -> Result<Vec<Record>, AccountingError> {
        self.flush();
        read(&self.0.database, wanted)
            .map_err(|error| AccountingError { path: self.0.path.clone(), error: Box::new(error) })
    }
}

impl Accounting {
    /// Returns the sums over the hours from that of `since_unix` to that of `until_unix`, by client
    /// and owner.
    ///
    /// A running lease or program counts up to its latest note.
    pub fn usage(&self, since_unix: u64, until_unix: u64) -> Result<Vec<Row>, AccountingError> {
        hours::read(&self.0.database, since_unix, until_unix)
            .map_err(|error| AccountingError { path: self.0.path.clone(), error: Box::new(error) })
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // The writer exits after the last order.
        drop(self.orders.lock().unwrap_or_else(PoisonError::into_inner).take());
        if let Some(writer) = self.writer.lock().unwrap_or_else(PoisonError::into_inner).take() {
            let _ = writer.join();
        }
    }
}

fn next_number(database: &Database) -> Result<u64, redb::Error> {
    let transaction = database.begin_write()?;
    let next = {
        // Readers need all tables.
        drop((Hours::open(&transaction)?, transaction.open_table(HELD)?));
        let table = transaction.open_table(RECORDS)?;
        // The last key does not have the largest number: a later record may have an earlier end.
        let mut next = 0;
        for entry in table.iter()? {
            next = next.max(entry?.0.value().1 + 1);
        }
        next
    };
    transaction.commit()?;
    Ok(next)
}

fn parsed(value: Option<redb::AccessGuard<'_, &'static [u8]>>) -> Option<Record> {
    value.and_then(|value| serde_json::from_slice(value.value()).ok())
}

/// Deletes the earliest records of the clients with the most until `most` records are left.
///
/// The loop of one client thus costs others none of theirs. A 64th more goes, since each search
/// reads all records.
fn bound(table: &mut Table<'_, (u64, u64), &'static [u8]>, most: u64) -> Result<(), redb::Error> {
    #[derive(Deserialize)]
    struct Owner {
        client: String,
    }
    let owner =
        |record: &[u8]| serde_json::from_slice(record).map_or_else(|_| String::new(), |o: Owner| o.client);
    if table.len()? <= most {
        return Ok(());
    }
    let mut counts = HashMap::<String, u64>::new();
    for entry in table.iter()? {
        *counts.entry(owner(entry?.1.value())).or_default() += 1;
    }
    let mut sorted: Vec<u64> = counts.values().copied().collect();
    sorted.sort_unstable();
    let (mut left, mut share) = (most - most / 64, u64::MAX);
    for (count, clients) in sorted.iter().zip((1..=sorted.len() as u64).rev()) {
        if *count > left / clients {
            share = left / clients;
            break;
        }
        left -= count;
    }
    table.retain(|_, record| {
        let count = counts.entry(owner(record)).or_default();
        let keep = *count <= share;
        *count -= u64::from(!keep);
        keep
    })?;
    Ok(())
}

fn write(database: &Database, queue: &mpsc::Receiver<Order>, mut number: u64, most: u64) {
    // The latest leases that have ended: a note of one was taken before its end.
    let mut ended = VecDeque::<String>::new();
    while let Ok(first) = queue.recv() {
        let mut orders = vec![first];
        orders.extend(queue.try_iter().take(BATCH));
        let mut flushed = Vec::new();
        let done = (|| -> Result<(), redb::Error> {
            let transaction = database.begin_write()?;
            {
                let mut table = transaction.open_table(RECORDS)?;
                let mut running = transaction.open_table(RUNNING)?;
                let mut held = transaction.open_table(HELD)?;
                let mut hours = Hours::open(&transaction)?;
                // A record is plain data and always serializes.
                let bytes = |record: &Record| serde_json::to_vec(record).unwrap_or_default();
                let mut key = |record: &Record| {
                    number += 1;
                    (record.end_unix, number - 1)
                };
                for order in orders {
                    match order {
                        Order::Add(record) => {
                            table.insert(key(&record), bytes(&record).as_slice())?;
                            match record.kind {
                                Kind::Lease => {
                                    if ended.len() == MAX_ENDED {
                                        ended.pop_front();
                                    }
                                    ended.push_back(record.lease.clone());
                                    held.remove(record.lease.as_str())?;
                                    hours.ended(&record)?;
                                }
                                Kind::Process => {
                                    let before = parsed(running.remove(record.worker.as_str())?);
                                    hours.program(&record, before.as_ref(), true)?;
                                }
                            }
                        }
                        Order::Note(record) => {
                            let noted = running.insert(record.worker.as_str(), bytes(&record).as_slice())?;
                            hours.program(&record, parsed(noted).as_ref(), false)?;
                        }
                        Order::NoteLease(note) if ended.contains(&note.record.lease) => {}
                        Order::NoteLease(note) => {
                            held.insert(note.record.lease.as_str(), bytes(&note.record).as_slice())?;
                            hours.lease(&note)?;
                        }
                        Order::KeepRunning(workers) => {
                            for entry in running.extract_if(|worker, _| !workers.contains(worker))? {
                                let (_, value) = entry?;
                                let Ok(record) = serde_json::from_slice::<Record>(value.value()) else {
                                    continue;
                                };
                                let record = Record { reason: UNSEEN.into(), ..record };
                                hours.program(&record, Some(&record), true)?;
                                table.insert(key(&record), bytes(&record).as_slice())?;
                            }
                        }
                        Order::Forget(unix) => {
                            table.retain_in(..(unix, 0), |_, _| false)?;
                            hours.forget(unix)?;
                        }
                        Order::Flush(done) => flushed.push(done),
                    }
                }
                bound(&mut table, most)?;
                hours.bound()?;
            }
            transaction.commit()?;
            Ok(())
        })();
        if let Err(e) = done {
            warn!("accounting: records not written: {e}; these records are lost");
        }
        for done in flushed {
            let _ = done.send(());
        }
    }
}

fn read(database: &Database, wanted: &Wanted) -> Result<Vec<Record>, redb::Error> {
    let transaction = database.begin_read()?;
    let table = transaction.open_table(RECORDS)?;
    let end = if wanted.until_unix == 0 { u64::MAX } else { wanted.until_unix };
    let mut out: Vec<Record> = Vec::new();
    // Sums and users of a lease's programs, which end no later than the lease.
    #[derive(Default)]
    struct Programs {
        sums: [u64; 5],
        uids: BTreeSet<u32>,
        users: BTreeSet<String>,
    }
    let mut of_lease: HashMap<String, Programs> = HashMap::new();
    for entry in table.iter()? {
        let (key, value) = entry?;
        let Ok(mut record) = serde_json::from_slice::<Record>(value.value()) else { continue };
        if record.kind == Kind::Process {
            let Programs { sums, uids, users } = of_lease.entry(record.lease.clone()).or_default();
            uids.insert(record.uid);
            users.extend((!record.user.is_empty()).then(|| record.user.clone()));
            sums[0] = sums[0].saturating_add(record.gpu_busy_usec);
            sums[1] = sums[1].max(record.peak_memory_bytes);
            sums[2] = sums[2].saturating_add(record.bytes_to_device);
            sums[3] = sums[3].saturating_add(record.bytes_from_device);
            sums[4] = sums[4].saturating_add(record.calls);
        }
        if (wanted.since_unix..end).contains(&key.value().0) {
            record.reason.retain(|c| !c.is_control());
            out.push(record);
        }
    }
    for record in out.iter_mut().filter(|r| r.kind == Kind::Lease) {
        if let Some(Programs { sums: [busy, peak, to, from, calls], uids, users }) =
            of_lease.get(&record.lease)
        {
            record.gpu_busy_usec = *busy;
            // The lease's own peak starts again at 0 when the server restarts.
            record.peak_memory_bytes = record.peak_memory_bytes.max(*peak);
            record.bytes_to_device = *to;
            record.bytes_from_device = *from;
            record.calls = *calls;
            record.uids = uids.iter().copied().collect();
            record.users = users.iter().cloned().collect();
        }
    }
    out.retain(|record| wanted.fits(record));
    Ok(out)
}

/// Formats records as comma-separated values with a header (RFC 4180).
pub fn csv(records: &[Record]) -> String {
    let mut out = String::from(
        "kind,lease,worker,client,user,uid,pid,program,gpus,start_unix,end_unix,gpu_busy_usec,peak_memory_bytes,\
         bytes_to_device,bytes_from_device,calls,reason,uids,executable,users\r\n",
    );
    for r in records {
        let kind = match r.kind {
            Kind::Lease => "lease",
            Kind::Process => "process",
        };
        let fields = [
            kind.into(),
            r.lease.clone(),
            r.worker.clone(),
            r.client.clone(),
            r.user.clone(),
            r.uid.to_string(),
            r.pid.to_string(),
            r.program.clone(),
            r.gpus.join(" "),
            r.start_unix.to_string(),
            r.end_unix.to_string(),
            r.gpu_busy_usec.to_string(),
            r.peak_memory_bytes.to_string(),
            r.bytes_to_device.to_string(),
            r.bytes_from_device.to_string(),
            r.calls.to_string(),
            r.reason.clone(),
            r.uids.iter().map(u32::to_string).collect::<Vec<_>>().join(" "),
            r.executable.clone(),
            r.users.join(" "),
        ];
        let quoted = fields.map(|f| {
            // A spreadsheet would evaluate a text that begins with one of these.
            let f = if f.starts_with(['=', '+', '-', '@']) { format!("'{f}") } else { f };
            if f.contains([',', '"', '\n', '\r']) { format!("\"{}\"", f.replace('"', "\"\"")) } else { f }
        });
        out.push_str(&quoted.join(","));
        out.push_str("\r\n");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::usage;

    fn record(kind: Kind, lease: &str, client: &str, end_unix: u64) -> Record {
        Record {
            kind,
            lease: lease.into(),
            worker: String::new(),
            client: client.into(),
            user: String::new(),
            uid: 1000,
            pid: 42,
            program: "a,\"b\"".into(),
            executable: "/opt/a".into(),
            gpus: vec!["GPU-1".into()],
            start_unix: 5,
            end_unix,
            gpu_busy_usec: 1_500_000,
            peak_memory_bytes: end_unix << 20,
            bytes_to_device: 10,
            bytes_from_device: 20,
            calls: 30,
            reason: "=its client process ended".into(),
            uids: Vec::new(),
            users: Vec::new(),
        }
    }

    #[test]
    fn records_survive_and_are_found() {
        let folder = tempfile::tempdir().unwrap();
        {
            let accounting = Accounting::open(folder.path()).unwrap();
            accounting.add(record(Kind::Process, "l1", "vm-1", 100));
            accounting.add(record(Kind::Process, "l1", "vm-1", 110));
            accounting.add(Record { uid: 0, ..record(Kind::Lease, "l1", "vm-1", 110) });
            accounting.add(record(Kind::Process, "l2", "vm-2", 120));
            accounting.add(Record { user: "alice".into(), uid: 7, ..record(Kind::Lease, "l4", "vm-4", 130) });
            accounting.add(Record { user: "bob".into(), uid: 8, ..record(Kind::Process, "l5", "vm-5", 140) });
            accounting.add(Record { uid: 0, ..record(Kind::Lease, "l5", "vm-5", 140) });
        }
        let accounting = Accounting::open(folder.path()).unwrap();
        accounting.add(record(Kind::Process, "l3", "vm-2", 120));
        let all = accounting.list(&Wanted::default()).unwrap();
        assert_eq!(
            all.iter().map(|r| r.end_unix).collect::<Vec<_>>(),
            [100, 110, 110, 120, 120, 130, 140, 140]
        );
        let leases = Wanted { kind: Some(Kind::Lease), since_unix: 105, ..Wanted::default() };
        let lease = accounting.list(&leases).unwrap().remove(0);
        assert_eq!((lease.gpu_busy_usec, lease.peak_memory_bytes, lease.calls), (3_000_000, 110 << 20, 60));
        assert_eq!(lease.uids, [1000]);
        // The lease of a whole machine is found by the users of its programs, and each program by
        // its own user.
        let of = |user: &str| {
            let records = accounting.list(&Wanted { user: user.into(), ..Wanted::default() }).unwrap();
            records.iter().map(|r| (r.kind, r.end_unix)).collect::<Vec<_>>()
        };
        let programs = [(Kind::Process, 100), (Kind::Process, 110), (Kind::Lease, 110), (Kind::Process, 120)];
        assert_eq!(of("1000"), [&programs[..], &[(Kind::Process, 120)]].concat());
        assert_eq!((of("0"), of("alice")), (vec![], vec![(Kind::Lease, 130)]));
        assert_eq!(of("bob"), [(Kind::Process, 140), (Kind::Lease, 140)]);
        assert_eq!(of("8"), of("bob"));
        let two = Wanted { client: "vm-2".into(), until_unix: 121, ..Wanted::default() };
        assert_eq!(accounting.list(&two).unwrap().len(), 2);
        accounting.forget_before(120);
        assert_eq!(accounting.list(&Wanted::default()).unwrap().len(), 5);
    }

    #[test]
    fn open_records_of_ended_workers_are_closed_at_the_next_start() {
        let folder = tempfile::tempdir().unwrap();
        let of = |worker: &str, seen: u64| Record {
            worker: worker.into(),
            reason: String::new(),
            ..record(Kind::Process, "l1", "vm-1", seen)
        };
        {
            let accounting = Accounting::open(folder.path()).unwrap();
            for worker in ["ends", "stays", "lost"] {
                accounting.note(of(worker, 100));
                accounting.note(of(worker, 160));
            }
            accounting.add(record(Kind::Lease, "l0", "vm-1", 170));
            accounting.add(Record { reason: "it ended".into(), ..of("ends", 180) });
        }
        let seen = |accounting: &Accounting| {
            let programs = Wanted { kind: Some(Kind::Process), ..Wanted::default() };
            let records = accounting.list(&programs).unwrap();
            records.into_iter().map(|r| (r.worker, r.end_unix, r.reason)).collect::<Vec<_>>()
        };
        let is = |worker: &str, end: u64, reason: &str| (worker.to_owned(), end, reason.to_owned());
        for _ in 0..2 {
            let accounting = Accounting::open(folder.path()).unwrap();
            accounting.keep_running(["stays".to_owned()].into());
            assert_eq!(seen(&accounting), [is("lost", 160, UNSEEN), is("ends", 180, "it ended")]);
        }
        let accounting = Accounting::open(folder.path()).unwrap();
        accounting.keep_running(BTreeSet::new());
        assert_eq!(seen(&accounting)[..2], [is("lost", 160, UNSEEN), is("stays", 160, UNSEEN)]);
    }

    /// Sums of all clients in the first hours of 1970.
    fn all(accounting: &Accounting) -> Vec<Row> {
        accounting.flush();
        accounting.usage(0, 10 * 3600).unwrap()
    }

    #[test]
    fn work_is_counted_once_however_often_it_is_noted() {
        let folder = tempfile::tempdir().unwrap();
        let of = |worker: &str, seen: u64, bytes: u64| Record {
            worker: worker.into(),
            user: "alice".into(),
            bytes_to_device: bytes,
            gpu_busy_usec: 10 * bytes,
            bytes_from_device: 0,
            ..record(Kind::Process, "l1", "vm-1", seen)
        };
        {
            let accounting = Accounting::open(folder.path()).unwrap();
            accounting.note(of("a", 60, 100));
            accounting.note(of("a", 3660, 150));
            accounting.note(of("lost", 3670, 7));
        }
        let accounting = Accounting::open(folder.path()).unwrap();
        accounting.keep_running(["a".to_owned()].into());
        accounting.add(of("a", 3720, 180));
        accounting.add(Record { uid: 7, ..of("b", 3720, 1000) });
        let rows = all(&accounting);
        assert_eq!(rows.len(), 2, "{rows:?}");
        let [bob, alice] = &rows[..] else { unreachable!() };
        assert_eq!((bob.owner, alice.owner), (usage::owner(7), usage::owner(1000)));
        assert_eq!((alice.user.as_str(), alice.client.as_str()), ("alice", "vm-1"));
        let usage = &alice.usage;
        assert_eq!((usage.bytes_to_device, usage.busy_usec, usage.programs), (187, 1870, 2));
        assert_eq!(bob.usage.bytes_to_device, 1000);
        // The work of the second hour alone.
        let second = accounting.usage(3600, 3600).unwrap();
        assert_eq!(second[1].usage.bytes_to_device, 87);
        accounting.forget_before(3600);
        assert_eq!(all(&accounting), second);
    }

    #[test]
    fn leases_count_for_each_gpu_while_they_hold_it() {
        let folder = tempfile::tempdir().unwrap();
        let note = |gpus, granted_after, unix| LeaseNote {
            record: Record { uid: 0, ..record(Kind::Lease, "l1", "vm-1", unix) },
            gpus,
            granted_after,
        };
        let accounting = Accounting::open(folder.path()).unwrap();
        accounting.note_lease(note(2, Some(5_000_000), 3500));
        accounting.note_lease(note(2, None, 3700));
        // Lent for ten minutes.
        accounting.note_lease(note(0, None, 3800));
        accounting.note_lease(note(2, None, 4400));
        let hour = |accounting: &Accounting, hour: u64| {
            accounting.flush();
            accounting.usage(hour * 3600, hour * 3600).unwrap().remove(0).usage
        };
        assert_eq!(hour(&accounting, 0).gpu_usec, 2 * 100 * 1_000_000);
        assert_eq!(hour(&accounting, 1).gpu_usec, 2 * 200 * 1_000_000);
        // The end of the lease, seen by the next server.
        drop(accounting);
        let accounting = Accounting::open(folder.path()).unwrap();
        assert_eq!(accounting.held().unwrap(), [note(2, None, 4400).record]);
        accounting.add(Record { uid: 0, ..record(Kind::Lease, "l1", "vm-1", 4410) });
        assert_eq!(hour(&accounting, 1).gpu_usec, 2 * 210 * 1_000_000);
        assert!(accounting.held().unwrap().is_empty());
        let rows = all(&accounting);
        assert_eq!((rows.len(), rows[0].owner, rows[0].usage.leases), (1, usage::MACHINE, 1));
        assert!(
            rows[0].usage.shown().wait_p50_usec.is_some_and(|usec| (5_000_000..5_700_000).contains(&usec))
        );
    }

    #[test]
    fn each_lease_is_counted_once_whatever_a_crash_or_the_order_of_notes_loses() {
        let folder = tempfile::tempdir().unwrap();
        let accounting = Accounting::open(folder.path()).unwrap();
        let end = |lease: &str, unix| record(Kind::Lease, lease, "vm-1", unix);
        let note = |lease: &str, unix| LeaseNote { record: end(lease, unix), gpus: 1, granted_after: None };
        // The note of the grant is lost, or all notes.
        accounting.note_lease(note("l1", 100));
        accounting.note_lease(note("l1", 160));
        accounting.add(end("l1", 200));
        accounting.add(end("l2", 200));
        // A note that was taken before the end.
        accounting.note_lease(note("l2", 190));
        // A minute's note that comes before that of the grant.
        accounting.note_lease(note("l3", 200));
        accounting.note_lease(LeaseNote { granted_after: Some(5), ..note("l3", 200) });
        accounting.add(end("l3", 200));
        assert!(accounting.held().unwrap().is_empty());
        assert_eq!(all(&accounting)[0].usage.leases, 3);
        assert_eq!(all(&accounting)[0].usage.gpu_usec, 100 * 1_000_000);
    }

    #[test]
    fn a_client_with_many_users_has_a_bounded_number_of_sums() {
        let folder = tempfile::tempdir().unwrap();
        let accounting = Accounting::open(folder.path()).unwrap();
        for uid in 0..2 * usage::MAX_OWNERS as u32 {
            accounting.add(Record { uid, ..record(Kind::Process, "l1", "vm-1", 60) });
            accounting.add(Record { uid: 5, ..record(Kind::Process, "l1", "vm-2", 60) });
        }
        let rows = all(&accounting);
        assert_eq!(rows.len(), usage::MAX_OWNERS + 2);
        let others = rows.iter().find(|row| row.owner == usage::OTHERS).unwrap();
        assert_eq!((others.client.as_str(), others.usage.programs), ("vm-1", usage::MAX_OWNERS as u64));
    }

    #[test]
    fn so_many_records_are_kept_the_oldest_go() {
        let folder = tempfile::tempdir().unwrap();
        let ends = |accounting: &Accounting| {
            let records = accounting.list(&Wanted::default()).unwrap();
            records.iter().map(|r| r.end_unix).collect::<Vec<_>>()
        };
        {
            let accounting = Accounting::bounded(folder.path(), 10).unwrap();
            (1..=1000).for_each(|end| accounting.add(record(Kind::Process, "l1", "vm-1", end)));
            assert_eq!(ends(&accounting), (991..=1000).collect::<Vec<_>>());
            accounting.add(record(Kind::Process, "l1", "vm-1", 1001));
            assert_eq!(ends(&accounting), (992..=1001).collect::<Vec<_>>());
        }
        // Records from before the restart count, too.
        let accounting = Accounting::bounded(folder.path(), 3).unwrap();
        assert_eq!(ends(&accounting), [999, 1000, 1001]);
    }

    #[test]
    fn a_clients_loop_costs_others_no_records() {
        let folder = tempfile::tempdir().unwrap();
        let accounting = Accounting::bounded(folder.path(), 100).unwrap();
        let add = |client, ends: std::ops::Range<u64>| {
            ends.for_each(|end| accounting.add(record(Kind::Lease, &format!("l{end}"), client, end)));
        };
        add("vm-2", 1..4);
        add("vm-3", 4..34);
        add("vm-1", 100..5000);
        accounting.flush();
        let ends = |client: &str| -> Vec<u64> {
            let wanted = Wanted { client: client.into(), ..Wanted::default() };
            accounting.list(&wanted).unwrap().iter().map(|r| r.end_unix).collect()
        };
        assert_eq!((ends("vm-2"), ends("vm-3")), ((1..4).collect(), (4..34).collect()));
        let of_loop = ends("vm-1");
        assert!((66..=67).contains(&of_loop.len()), "{of_loop:?}");
        assert_eq!(of_loop, (5000 - of_loop.len() as u64..5000).collect::<Vec<_>>());
    }

    #[test]
    fn a_file_that_is_no_database_is_named() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("accounting.redb"), vec![7; 9000]).unwrap();
        let error = Accounting::open(folder.path()).unwrap_err().to_string();
        assert!(error.contains("accounting.redb") && error.contains("move it away"), "{error}");
    }

    #[test]
    fn comma_separated_values() {
        let text = csv(&[record(Kind::Process, "l1", "vm-1", 100)]);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines.len(), 2);
        assert!(lines[0].starts_with("kind,lease,worker"));
        assert!(lines[1].contains(",\"a,\"\"b\"\"\",GPU-1,5,100,1500000,"), "{}", lines[1]);
        assert!(lines[1].ends_with(",30,'=its client process ended,,/opt/a,"), "{}", lines[1]);
    }
}
