//! `gpuserver accounting`: shows records of ended leases and programs.

use std::io::Write;

use super::show;
use super::target::{Target, offline, running};
use crate::accounting::{self, Accounting, Wanted};
use crate::admin::Ask;
use crate::config;

pub(super) fn accounting(
    out: &mut dyn Write,
    server: &Target,
    wanted: &Wanted,
    csv: bool,
    json: bool,
) -> anyhow::Result<()> {
    let value = match running(server, &Ask::Accounting { wanted: wanted.clone() })? {
        Some(value) => value,
        None => {
            let config = server.config()?;
            let _lock = offline(config)?;
            serde_json::to_value(Accounting::open(&config.state_dir)?.list(wanted)?)?
        }
    };
    if json {
        return show::json(out, "records", value);
    }
    let records: Vec<accounting::Record> = serde_json::from_value(value)?;
    if csv {
        write!(out, "{}", accounting::csv(&records))?;
        return Ok(());
    }
    show::accounting(out, records)
}

/// Parses a time in the past, in seconds since 1970: a duration before `now`, or a day.
pub(super) fn past(text: &str, now: u64) -> Option<u64> {
    if let Some(ago) = config::parse_duration(text) {
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
