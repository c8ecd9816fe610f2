//! Answers about the use of GPUs by clients and their users.

use std::collections::BTreeMap;
use std::io::Write;

use gpusession_common::usage::{COLUMNS, UsageSums};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{internal, show};
use crate::accounting::Row;
use crate::pool::Pool;
use crate::refusal::Refusal;
use crate::text::{print_table, table};
use crate::usage::{self, Usage};

/// A row of `gpuserver stats`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsageRow {
    /// Name of the client.
    pub client: String,
    /// `all`; with a row for each user, `user`, `machine` (no user's) or `others` (too many users).
    pub owner: String,
    /// Id of the user on the client, if the row is a user's.
    pub uid: Option<u32>,
    /// Name of that user, by the client's word; empty if unknown.
    pub user: String,
    /// Use by that client or user.
    #[serde(flatten)]
    pub sums: UsageSums,
}

/// Returns rows for people: one for each client, or with `users` for each of its users.
pub fn usage_rows(rows: Vec<Row>, users: bool) -> Vec<UsageRow> {
    let mut sums = BTreeMap::<(String, Option<u64>), (String, Usage)>::new();
    for Row { client, owner, user, usage } in rows {
        let (name, sum) = sums.entry((client, users.then_some(owner))).or_default();
        sum.add(&usage);
        if users {
            *name = user;
        }
    }
    let row = |((client, owner), (user, usage)): ((String, Option<u64>), (String, Usage))| {
        let uid = owner.and_then(usage::uid);
        let kind = match owner {
            None => "all",
            Some(usage::MACHINE) => "machine",
            Some(usage::OTHERS) => "others",
            Some(_) => "user",
        };
        UsageRow { client, owner: kind.into(), uid, user, sums: usage.shown() }
    };
    sums.into_iter().map(row).collect()
}

pub(in crate::admin) async fn stats(
    pool: &Pool,
    since_unix: u64,
    until_unix: u64,
    users: bool,
) -> Result<Value, Refusal> {
    let accounting = pool.accounting().clone();
    let read = move || {
        accounting.flush();
        accounting.usage(since_unix, until_unix)
    };
    let rows =
        tokio::task::spawn_blocking(read).await.map_err(|e| internal(&e))?.map_err(|e| internal(&e))?;
    show(serde_json::to_value(usage_rows(rows, users)))
}

/// Prints `gpuserver stats`; `users`: rows of users.
pub fn print_stats(out: &mut dyn Write, rows: Vec<UsageRow>, users: bool) -> anyhow::Result<()> {
    let n = rows.len();
    let mut header = vec!["CLIENT"];
    header.extend(users.then_some("USER"));
    header.extend(COLUMNS);
    let mut table = table(&header);
    for row in rows {
        let mut cells = vec![row.client];
        if users {
            cells.push(match (row.uid, row.user.is_empty()) {
                (Some(_), false) => row.user,
                (Some(uid), true) => format!("uid {uid}"),
                (None, _) => row.owner,
            });
        }
        cells.extend(row.sums.cells());
        table.add_row(cells);
    }
    print_table(out, &table, n, "no leases and programs in that time")
}
