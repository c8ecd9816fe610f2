//! Output of the verbs: tables for people, one JSON object for programs.

use std::io::Write;

use comfy_table::{Table, presets};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

/// Returns a text of another party as one line for logs and terminals, at most `most` characters.
pub fn printable(text: &str, most: usize) -> String {
    text.chars().take(most).map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// Creates a table without lines.
pub fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(header);
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    table
}

/// Standard output of a verb.
pub struct Output<'a> {
    /// Place of the text.
    pub out: &'a mut dyn Write,
    /// Whether `--json` is given.
    pub json: bool,
}

impl Output<'_> {
    /// Prints an answer: as JSON under `key`, or as `text` writes it for people.
    pub fn answer<T: DeserializeOwned>(
        &mut self,
        key: &str,
        value: Value,
        text: impl FnOnce(&mut dyn Write, T) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        if self.json {
            writeln!(self.out, "{:#}", json!({ "schema": 1, key: value }))?;
            return Ok(());
        }
        text(self.out, serde_json::from_value(value)?)
    }
}

/// Formats bytes as MiB.
pub fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes >> 20)
}

/// Formats a value, or `-` for none.
pub fn dash<T: ToString>(value: Option<T>) -> String {
    value.map_or_else(|| "-".into(), |v| v.to_string())
}

/// Formats microseconds for people, with at most two units.
pub fn span(usec: u64) -> String {
    let seconds = usec / 1_000_000;
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}min {}s", seconds / 60, seconds % 60),
        3600..86400 => format!("{}h {}min", seconds / 3600, seconds % 3600 / 60),
        _ => format!("{}d {}h", seconds / 86400, seconds % 86400 / 3600),
    }
}

/// Formats seconds since 1970 as a date.
pub fn date(unix: u64) -> String {
    let format = time::macros::format_description!("[year]-[month]-[day] [hour]:[minute] UTC");
    i64::try_from(unix)
        .ok()
        .and_then(|t| time::OffsetDateTime::from_unix_timestamp(t).ok())
        .and_then(|t| t.format(format).ok())
        .unwrap_or_else(|| "-".into())
}

/// Prints a table, or this text for one without rows.
pub fn print_table(out: &mut dyn Write, table: &Table, rows: usize, nothing: &str) -> anyhow::Result<()> {
    if rows == 0 {
        writeln!(out, "{nothing}")?;
    } else {
        writeln!(out, "{}", table.trim_fmt())?;
    }
    Ok(())
}
