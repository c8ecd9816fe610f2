//! The hours' sums of use in the database.

use redb::{ReadableDatabase, ReadableTable, ReadableTableMetadata, TableDefinition, WriteTransaction};
use serde::{Deserialize, Serialize};

use super::record::{Kind, Record};
use crate::usage::{self, MAX_OWNERS, OTHERS, Usage};

/// Sums by hour, client and owner.
const HOURS: TableDefinition<'_, (u64, &str, u64), &[u8]> = TableDefinition::new("hours");
/// Leases that are counted: id, the time up to which they are, and the GPUs that they hold since.
const LEASED: TableDefinition<'_, &str, (u64, u64)> = TableDefinition::new("leased");
/// Most sums that are kept, whatever their age.
const MAX_ROWS: u64 = 1_000_000;

/// A lease at a moment.
#[derive(Debug, Clone)]
pub struct LeaseNote {
    /// Its record, as if it ended at that moment.
    pub record: Record,
    /// Number of GPUs that it holds now; 0 while it is lent or parked.
    pub gpus: u64,
    /// Wait for its GPUs in microseconds, if it is new.
    pub granted_after: Option<u64>,
}

/// Sums of one client and owner.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Row {
    /// Name of the client.
    pub client: String,
    /// Owner, as [`usage::owner`] returns it.
    pub owner: u64,
    /// Name of the user as last reported; empty if unknown.
    pub user: String,
    /// Sums over the hours of the question.
    pub usage: Usage,
}

#[derive(Default, Serialize, Deserialize)]
struct Stored {
    user: String,
    usage: Usage,
}

/// The two tables in a transaction.
pub(super) struct Hours<'t> {
    hours: redb::Table<'t, (u64, &'static str, u64), &'static [u8]>,
    leased: redb::Table<'t, &'static str, (u64, u64)>,
}

impl<'t> Hours<'t> {
    pub(super) fn open(transaction: &'t WriteTransaction) -> Result<Self, redb::Error> {
        Ok(Self { hours: transaction.open_table(HOURS)?, leased: transaction.open_table(LEASED)? })
    }

    fn add(
        &mut self,
        unix: u64,
        client: &str,
        owner: u64,
        user: &str,
        more: &Usage,
    ) -> Result<(), redb::Error> {
        let hour = usage::hour(unix);
        let mut owner = owner;
        if self.hours.get((hour, client, owner))?.is_none() {
            let owners = self.hours.range((hour, client, 0)..=(hour, client, u64::MAX))?;
            if owners.take(MAX_OWNERS).count() == MAX_OWNERS {
                owner = OTHERS;
            }
        }
        let known = self.hours.get((hour, client, owner))?;
        let known = known.and_then(|value| serde_json::from_slice::<Stored>(value.value()).ok());
        let mut sums = known.unwrap_or_default();
        sums.usage.add(more);
        if owner != OTHERS && !user.is_empty() {
            user.clone_into(&mut sums.user);
        }
        // Plain data always serializes.
        let bytes = serde_json::to_vec(&sums).unwrap_or_default();
        self.hours.insert((hour, client, owner), bytes.as_slice())?;
        Ok(())
    }

    /// Adds the work of a program since it was noted before.
    pub(super) fn program(
        &mut self,
        record: &Record,
        before: Option<&Record>,
        ended: bool,
    ) -> Result<(), redb::Error> {
        let since = |value: fn(&Record) -> u64| value(record).saturating_sub(before.map_or(0, value));
        let more = Usage {
            programs: u64::from(ended),
            busy_usec: since(|r| r.gpu_busy_usec),
            bytes_to_device: since(|r| r.bytes_to_device),
            bytes_from_device: since(|r| r.bytes_from_device),
            ..Usage::default()
        };
        if more == Usage::default() {
            return Ok(());
        }
        self.add(record.end_unix, &record.client, usage::owner(record.uid), &record.user, &more)
    }

    /// Adds the GPU time of a lease since it was noted before, and its grant if it is new.
    pub(super) fn lease(&mut self, note: &LeaseNote) -> Result<(), redb::Error> {
        let LeaseNote { record, gpus, granted_after } = note;
        self.granted(record, *granted_after)?;
        self.lease_time(record)?;
        self.leased.insert(record.lease.as_str(), (record.end_unix, *gpus))?;
        Ok(())
    }

    /// Adds what is left of an ended lease.
    pub(super) fn ended(&mut self, record: &Record) -> Result<(), redb::Error> {
        debug_assert_eq!(record.kind, Kind::Lease);
        self.granted(record, None)?;
        self.lease_time(record)?;
        self.leased.remove(record.lease.as_str())?;
        Ok(())
    }

    /// Counts the grant of a lease, unless an earlier note has counted it, and its wait.
    ///
    /// The note of the grant is lost if the server is killed right afterwards, and that of a minute
    /// may come before it.
    fn granted(&mut self, record: &Record, wait: Option<u64>) -> Result<(), redb::Error> {
        let seen = self.leased.get(record.lease.as_str())?.is_some();
        if seen && wait.is_none() {
            return Ok(());
        }
        let waits = wait.map(|wait| (usage::bucket(wait), 1)).into_iter().collect();
        let granted = Usage { leases: u64::from(!seen), waits, ..Usage::default() };
        self.add(record.end_unix, &record.client, lease_owner(record), &record.user, &granted)
    }

    fn lease_time(&mut self, record: &Record) -> Result<(), redb::Error> {
        let before = self.leased.get(record.lease.as_str())?.map(|value| value.value());
        let Some((since, gpus)) = before else { return Ok(()) };
        for (hour, seconds) in usage::hours(since, record.end_unix) {
            let gpu_usec = seconds.saturating_mul(1_000_000).saturating_mul(gpus);
            if gpu_usec > 0 {
                let more = Usage { gpu_usec, ..Usage::default() };
                self.add(hour * 3600, &record.client, lease_owner(record), &record.user, &more)?;
            }
        }
        Ok(())
    }

    /// Deletes the sums of hours that ended before `unix`, and leases that were not noted since.
    pub(super) fn forget(&mut self, unix: u64) -> Result<(), redb::Error> {
        self.leased.retain(|_, (noted, _)| noted >= unix)?;
        Ok(self.hours.retain_in(..(usage::hour(unix), "", 0), |_, _| false)?)
    }

    /// Deletes the oldest sums beyond [`MAX_ROWS`].
    pub(super) fn bound(&mut self) -> Result<(), redb::Error> {
        for _ in MAX_ROWS..self.hours.len()? {
            self.hours.pop_first()?;
        }
        Ok(())
    }
}

/// Returns whose use a lease's time is.
fn lease_owner(record: &Record) -> u64 {
    if record.user.is_empty() { usage::MACHINE } else { usage::owner(record.uid) }
}

/// Sums the hours from that of `since` to that of `until`, in seconds since 1970.
pub(super) fn read(database: &redb::Database, since: u64, until: u64) -> Result<Vec<Row>, redb::Error> {
    let transaction = database.begin_read()?;
    let table = transaction.open_table(HOURS)?;
    let mut rows = std::collections::BTreeMap::<(String, u64), Stored>::new();
    for entry in table.range((usage::hour(since), "", 0)..(usage::hour(until).saturating_add(1), "", 0))? {
        let (key, value) = entry?;
        let (_, client, owner) = key.value();
        let Ok(stored) = serde_json::from_slice::<Stored>(value.value()) else { continue };
        let row = rows.entry((client.to_owned(), owner)).or_default();
        row.usage.add(&stored.usage);
        row.user = stored.user;
    }
    let row = |((client, owner), Stored { user, usage })| Row { client, owner, user, usage };
    Ok(rows.into_iter().map(row).collect())
}
