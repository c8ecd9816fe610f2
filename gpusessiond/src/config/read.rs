//! Reading of keys from TOML: each value with its place, later files win.

use std::path::{Path, PathBuf};

use gpusession_common::keys::Row;
use gpusession_common::units::nearest;
use serde::de::DeserializeOwned;
use toml::Spanned;
use toml::de::{DeTable, DeValue, ValueDeserializer};

use super::error::ConfigError;

/// Text of a configuration file, and its keys with their places in it.
pub(super) struct File<'a> {
    pub(super) path: &'a Path,
    pub(super) text: &'a str,
    pub(super) root: DeTable<'a>,
}

/// Reads the keys of one table from all files that have it, in order.
#[derive(Default)]
pub struct Reader<'a>(Vec<(&'a File<'a>, &'a DeTable<'a>)>);

impl<'a> File<'a> {
    pub(super) fn parse(path: &'a Path, text: &'a str) -> Result<Self, ConfigError> {
        let root = DeTable::parse(text).map_err(|e| ConfigError::parse(path, text, &e))?;
        Ok(Self { path, text, root: root.into_inner() })
    }

    /// Creates an error for a place of the text.
    fn error(&self, offset: usize, message: String) -> ConfigError {
        ConfigError::at(self.path, self.text, offset, message)
    }

    /// Reads one value.
    pub(super) fn value<T: DeserializeOwned>(
        &self,
        written: &Spanned<DeValue<'a>>,
    ) -> Result<T, ConfigError> {
        T::deserialize(ValueDeserializer::from(written.clone())).map_err(|e| {
            let offset = e.span().map_or(written.span().start, |span| span.start);
            self.error(offset, e.message().trim_end().to_owned())
        })
    }

    /// Refuses keys that a table does not have.
    pub(super) fn check_names(&self, table: &DeTable<'_>, known: &[&str]) -> Result<(), ConfigError> {
        let unknown = table.keys().find(|key| !known.contains(&&**key.get_ref()));
        let Some(key) = unknown else { return Ok(()) };
        let name = key.get_ref();
        let message = match nearest(name, known.iter().copied()) {
            Some(near) => format!("unknown key `{name}`, did you mean `{near}`?"),
            None => format!("unknown key `{name}`, known keys: {}", known.join(", ")),
        };
        Err(self.error(key.span().start, message))
    }

    /// Returns the tables of `[[name]]`.
    pub(super) fn tables(&self, name: &str) -> Result<Vec<&DeTable<'a>>, ConfigError> {
        let Some(written) = self.root.get(name) else { return Ok(Vec::new()) };
        let wrong = |offset| {
            let message = format!("[{name}] is one table, and there can be several; write [[{name}]]");
            self.error(offset, message)
        };
        let DeValue::Array(list) = written.get_ref() else { return Err(wrong(written.span().start)) };
        let table = |item: &'_ Spanned<DeValue<'a>>| item.span().start;
        list.iter()
            .map(|item| match item.get_ref() {
                DeValue::Table(inner) => Ok(inner),
                _ => Err(wrong(table(item))),
            })
            .collect()
    }
}

impl<'a> Reader<'a> {
    /// Reads a table of one file.
    pub(super) fn of(file: &'a File<'a>, table: &'a DeTable<'a>) -> Self {
        Self(vec![(file, table)])
    }

    /// Reads the keys outside of tables.
    pub(super) fn roots(files: &'a [File<'a>]) -> Self {
        Self(files.iter().map(|file| (file, &file.root)).collect())
    }

    /// Reads `[name]`, and refuses keys that are not in its rows.
    pub(super) fn table(files: &'a [File<'a>], name: &str, rows: &[Row]) -> Result<Self, ConfigError> {
        let known: Vec<_> = rows.iter().map(Row::key).collect();
        let mut tables = Vec::new();
        for file in files {
            let Some(written) = file.root.get(name) else { continue };
            let DeValue::Table(table) = written.get_ref() else {
                let message = format!("`{name}` is a table: write [{name}] with {}", known.join(", "));
                return Err(file.error(written.span().start, message));
            };
            file.check_names(table, &known)?;
            tables.push((file, table));
        }
        Ok(Self(tables))
    }

    /// Reads one key; without a value the default of its row, or the found one.
    pub fn key<T: DeserializeOwned>(
        &mut self,
        row: &Row,
        check: &impl Fn(&T) -> Result<(), String>,
        found: Option<fn() -> T>,
    ) -> Result<T, ConfigError> {
        let mut last = None;
        for (file, table) in &self.0 {
            let Some(written) = table.get(row.key()) else { continue };
            let value = file.value(written)?;
            check(&value).map_err(|why| file.error(written.span().start, format!("{}: {why}", row.key())))?;
            last = Some(value);
        }
        match (last, found) {
            (Some(value), _) => Ok(value),
            (None, Some(found)) => Ok(found()),
            (None, None) => ValueDeserializer::parse(row.value)
                .and_then(T::deserialize)
                .map_err(|e| ConfigError::Invalid { path: PathBuf::from("default"), message: e.to_string() }),
        }
    }
}

/// Default of a key that may be left out.
pub(super) fn absent<T>() -> Option<T> {
    None
}

/// Default of a lease's name, which its place in the files sets later.
pub(super) fn named_by_number() -> String {
    String::new()
}

/// Accepts every value of the type.
pub(super) fn any<T>(_: &T) -> Result<(), String> {
    Ok(())
}

/// Returns a check of a number's bounds.
pub(super) fn between(first: u32, last: u32) -> impl Fn(&u32) -> Result<(), String> {
    move |number| match (first..=last).contains(number) {
        true => Ok(()),
        false => Err(format!("{number} is not between {first} and {last}")),
    }
}
