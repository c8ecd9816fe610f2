//! `gpuserver accounting`: shows records of ended leases and programs.

use gpusession_common::units::parse_duration;

use super::target::{Target, offline, running};
use crate::accounting::{self, Accounting, Kind, Record, Wanted};
use crate::admin::answer::records::print_accounting;
use crate::admin::{Ask, Refusal};
use crate::clock::{Clock, SystemClock};
use crate::text::Output;
use clap::Args;

/// Selection of accounting records, and their form.
#[derive(Debug, Args)]
pub struct AccountingOptions {
    /// Earliest end: a time ago, as "24h", or a day, as 2026-11-21 (UTC)
    #[arg(long, value_name = "TIME", default_value = "24h")]
    pub since: String,
    /// Only records with an earlier end than this, in the same form
    #[arg(long, value_name = "TIME")]
    pub until: Option<String>,
    /// Only records of this client
    #[arg(long, value_name = "NAME", default_value = "")]
    pub client: String,
    /// Only records of this user (name or id), and leases with programs of this user
    #[arg(long, value_name = "NAME|UID", default_value = "")]
    pub user: String,
    /// Only leases, or only programs
    #[arg(long, value_name = "KIND", value_parser = ["lease", "process"])]
    pub kind: Option<String>,
    /// Print comma-separated values
    #[arg(long, conflicts_with = "json")]
    pub csv: bool,
}

pub(super) fn accounting(
    out: &mut Output<'_>,
    server: &Target,
    options: &AccountingOptions,
) -> anyhow::Result<()> {
    let wanted = wanted(options, SystemClock.unix())?;
    let value = match running(server, &Ask::Accounting { wanted: wanted.clone() })? {
        Some(value) => value,
        None => {
            let config = server.config()?;
            let _lock = offline(config)?;
            serde_json::to_value(Accounting::open(&config.state_dir)?.list(&wanted)?)?
        }
    };
    out.answer("records", value, |out, records: Vec<Record>| match options.csv {
        true => Ok(write!(out, "{}", accounting::csv(&records))?),
        false => print_accounting(out, records),
    })
}

/// Parses the selection of records.
fn wanted(options: &AccountingOptions, now: u64) -> Result<Wanted, Refusal> {
    let time = |text: &str| {
        past(text, now).ok_or_else(|| {
            Refusal::new("usage", format!("--since {text:?}: not a time; write 24h or 2026-11-21"))
        })
    };
    Ok(Wanted {
        since_unix: time(&options.since)?,
        until_unix: options.until.as_deref().map(time).transpose()?.unwrap_or(0),
        client: options.client.clone(),
        user: options.user.clone(),
        kind: options.kind.as_deref().map(|k| if k == "lease" { Kind::Lease } else { Kind::Process }),
    })
}

/// Parses a time in the past, in seconds since 1970: a duration before `now`, or a day.
pub(super) fn past(text: &str, now: u64) -> Option<u64> {
    if let Ok(ago) = parse_duration(text) {
        return Some(now.saturating_sub(ago.as_secs()));
    }
    let mut parts = text.split('-');
    let (year, month, day) = (parts.next()?, parts.next()?, parts.next()?);
    let month = time::Month::try_from(month.parse::<u8>().ok()?).ok()?;
    let date = time::Date::from_calendar_date(year.parse().ok()?, month, day.parse().ok()?).ok()?;
    parts.next().is_none().then(|| u64::try_from(date.midnight().assume_utc().unix_timestamp()).ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_of_the_past() {
        assert_eq!(past("1h", 10_000), Some(6_400));
        assert_eq!(past("2h", 60), Some(0));
        assert_eq!(past("2026-11-21", 0), Some(1_795_219_200));
        for bad in ["", "yesterday", "2026-13-01", "2026-11", "2026-11-21-1", "2026-02-30"] {
            assert_eq!(past(bad, 5), None, "{bad}");
        }
    }
}
