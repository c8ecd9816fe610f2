//! `gpuserver stats`: shows the use of GPUs by clients and users.

use clap::Args;

use super::accounting::past;
use super::target::{Target, offline, running};
use crate::accounting::Accounting;
use crate::admin::answer::usage::{print_stats, usage_rows};
use crate::admin::{Ask, Refusal};
use crate::clock::{Clock, SystemClock};
use crate::text::Output;

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
    out.answer("usage", value, |out, rows| print_stats(out, rows, users))
}
