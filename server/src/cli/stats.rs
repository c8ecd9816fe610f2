//! `gpuserver stats`: shows the use of GPUs by clients and users.

use clap::Args;
use gpusession_common::usage;

use super::accounting::past;
use super::show::{self, Output, table};
use super::target::{Target, offline, running};
use crate::accounting::Accounting;
use crate::admin::answer::usage::{UsageRow, usage_rows};
use crate::admin::{Ask, Refusal};
use crate::clock::{Clock, SystemClock};

/// Selection of the sums of use.
#[derive(Debug, Args)]
pub struct StatsOptions {
    /// Beginning: a time ago, as "24h", or a day, as 2026-11-21 (UTC); it counts from its full hour
    #[arg(long, value_name = "TIME", default_value = "24h")]
    pub since: String,
    /// End, in the same form; its hour counts
    #[arg(long, value_name = "TIME", default_value = "0s")]
    pub until: String,
    /// Show a row for each user of a client
    #[arg(long)]
    pub users: bool,
}

pub(super) fn stats(out: &mut Output<'_>, server: &Target, options: &StatsOptions) -> anyhow::Result<()> {
    let now = SystemClock.unix();
    let time = |text: &str| {
        past(text, now).ok_or_else(|| {
            Refusal::new("usage", format!("--since {text:?}: not a time; write 24h or 2026-11-21"))
        })
    };
    let (since_unix, until_unix, users) = (time(&options.since)?, time(&options.until)?, options.users);
    let value = match running(server, &Ask::Stats { since_unix, until_unix, users })? {
        Some(value) => value,
        None => {
            let config = server.config()?;
            let _lock = offline(config)?;
            let rows = Accounting::open(&config.state_dir)?.usage(since_unix, until_unix)?;
            serde_json::to_value(usage_rows(rows, users))?
        }
    };
    out.answer("usage", value, |out, rows: Vec<UsageRow>| {
        let n = rows.len();
        let mut header = vec!["CLIENT"];
        header.extend(users.then_some("USER"));
        header.extend(usage::COLUMNS);
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
        show::print_table(out, &table, n, "no leases and programs in that time")
    })
}
