//! Reading of TOML into raw values.

use std::path::Path;

use toml::de::{DeTable, DeValue};

use super::keys::keys;
use super::origin::{ConfigError, Origin};
use super::raw::{Raw, convert};
use super::unknown::unknown;
use crate::limits::{LIMITS, Layer, OF_CLIENTS, TOP_LEVEL};

fn line_of(text: &str, offset: usize) -> usize {
    text.as_bytes().iter().take(offset).filter(|b| **b == b'\n').count() + 1
}

pub(super) fn read_text(
    raw: &mut Raw,
    file: &Path,
    text: &str,
    env: &dyn Fn(&str) -> Option<String>,
) -> Result<(), ConfigError> {
    let at = |offset: usize| Origin::File(file.into(), line_of(text, offset));
    let document = DeTable::parse(text).map_err(|e| {
        ConfigError::new(at(e.span().map_or(0, |s| s.start)), e.message().trim_end().to_string())
    })?;
    let mut path = Vec::new();
    read_table(raw, &mut path, document.get_ref(), &at, env)
}

/// Reads a table with its inner tables: `[users] scope` is the key `users.scope`.
fn read_table(
    raw: &mut Raw,
    path: &mut Vec<String>,
    table: &DeTable<'_>,
    at: &dyn Fn(usize) -> Origin,
    env: &dyn Fn(&str) -> Option<String>,
) -> Result<(), ConfigError> {
    for (key, value) in table {
        path.push(key.get_ref().to_string());
        let origin = at(key.span().start);
        let written = path.join(".");
        let bad = |m: String| ConfigError::new(at(value.span().start), format!("{written}: {m}"));
        let parts: Vec<&str> = path.iter().map(String::as_str).collect();
        let limit = match parts.as_slice() {
            ["limits", name] => Some((Layer::Default, *name)),
            ["limits", "group", of, name] => Some((Layer::Group((*of).into()), *name)),
            ["limits", "client", of, name] => Some((Layer::Client((*of).into()), *name)),
            ["limits", "user", of, name] => Some((Layer::User((*of).into()), *name)),
            _ => None,
        };
        let inner = match value.get_ref() {
            DeValue::Table(inner) => Some(inner),
            _ => None,
        };
        let leads_on = keys().any(|k| k.name.starts_with(&format!("{written}.")))
            || parts[0] == "limits" && parts.len() < 4;
        if let Some(known) = keys().find(|k| k.name == written) {
            raw.keys.insert(known.name, (convert(value.get_ref(), env).map_err(bad)?, origin));
        } else if let Some(inner) = inner.filter(|_| leads_on) {
            read_table(raw, path, inner, at, env)?;
        } else if let Some((layer, name)) = limit
            && (LIMITS
                .iter()
                .any(|l| l.name == name && (layer != Layer::Default || !TOP_LEVEL.contains(&name)))
                && !(matches!(layer, Layer::User(_)) && OF_CLIENTS.contains(&name))
                || matches!(layer, Layer::Group(_)) && ["clients", "users"].contains(&name))
        {
            let value = convert(value.get_ref(), env).map_err(bad)?;
            raw.limits.insert((layer, name.to_string()), (value, origin));
        } else if written == "reserve"
            && let DeValue::Array(list) = value.get_ref()
        {
            for item in list {
                let DeValue::Table(item_table) = item.get_ref() else {
                    return Err(bad("write it as [[reserve]]".into()));
                };
                let mut fields = Vec::new();
                for (name, value) in item_table {
                    let (name, origin) = (name.get_ref().to_string(), at(name.span().start));
                    let converted = convert(value.get_ref(), env)
                        .map_err(|m| ConfigError::new(origin.clone(), format!("reserve.{name}: {m}")))?;
                    fields.push((name, converted, origin));
                }
                raw.reserve.push((fields, at(item.span().start)));
            }
        } else {
            return Err(ConfigError::new(origin, unknown(&parts, value.get_ref())));
        }
        path.pop();
    }
    Ok(())
}
