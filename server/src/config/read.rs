//! Reading of TOML into raw values, each with its origin; no value is checked yet.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use toml::de::{DeTable, DeValue};

use super::keys::keys;
use super::unknown::unknown;
use super::{ConfigError, Origin};
use crate::limits::{IDLE_TIMES, LIMITS, Layer, OF_CLIENTS};

#[derive(Debug, Clone)]
pub(super) enum Value {
    String(String),
    Integer(i64),
    Bool(bool),
    List(Vec<Value>),
    /// The text of a value of a type that no key has; the key's parser rejects it.
    Other(String),
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::String(s) => write!(f, "{s:?}"),
            Self::Integer(i) => write!(f, "{i}"),
            Self::Bool(b) => write!(f, "{b}"),
            Self::Other(text) => f.write_str(text),
            Self::List(l) => {
                f.write_str("[")?;
                for (i, v) in l.iter().enumerate() {
                    write!(f, "{}{v}", if i == 0 { "" } else { ", " })?;
                }
                f.write_str("]")
            }
        }
    }
}

/// Values that were read and not yet checked.
#[derive(Default)]
pub(super) struct Raw {
    pub(super) keys: RawKeys,
    /// Limits by layer and name, and members of groups.
    pub(super) limits: BTreeMap<(Layer, String), (Value, Origin)>,
    pub(super) reserve: Vec<RawReserve>,
}

/// Unchecked values by the names of their rows.
pub(super) type RawKeys = BTreeMap<&'static str, (Value, Origin)>;

/// An unchecked `[[reserve]]`: its fields, and the place of its start.
pub(super) type RawReserve = (Vec<(String, Value, Origin)>, Origin);

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
                .any(|l| l.name == name && (layer != Layer::Default || !IDLE_TIMES.contains(&name)))
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

/// Reads the default of a row.
pub(super) fn default_value(text: &str) -> Result<Value, ConfigError> {
    let bad = |why: String| ConfigError::new(Origin::Default, format!("default {text}: {why}"));
    let value = DeValue::parse(text).map_err(|e| bad(e.to_string()))?;
    convert(value.get_ref(), &|_| None).map_err(bad)
}

fn convert(value: &DeValue<'_>, env: &dyn Fn(&str) -> Option<String>) -> Result<Value, String> {
    Ok(match value {
        DeValue::String(s) => Value::String(expand(s, env)?),
        DeValue::Integer(i) => match i64::from_str_radix(i.as_str(), i.radix()) {
            Ok(number) => Value::Integer(number),
            Err(_) => Value::Other(i.to_string()),
        },
        DeValue::Boolean(b) => Value::Bool(*b),
        DeValue::Array(list) => {
            Value::List(list.iter().map(|v| convert(v.get_ref(), env)).collect::<Result<_, _>>()?)
        }
        DeValue::Float(number) => Value::Other(number.to_string()),
        DeValue::Datetime(date) => Value::Other(date.to_string()),
        DeValue::Table(_) => Value::Other("{...}".into()),
    })
}

/// Replaces `${VAR}` by the environment variable; `$${` stands for `${`.
pub(super) fn expand(text: &str, env: &dyn Fn(&str) -> Option<String>) -> Result<String, String> {
    let mut out = String::new();
    let mut rest = text;
    while let Some(start) = rest.find("${") {
        if rest[..start].ends_with('$') {
            out.push_str(&rest[..start]);
            out.push('{');
            rest = &rest[start + 2..];
            continue;
        }
        out.push_str(&rest[..start]);
        let end = rest[start..].find('}').ok_or_else(|| format!("`${{` without `}}` in {text:?}"))? + start;
        let name = &rest[start + 2..end];
        out.push_str(&env(name).ok_or_else(|| format!("environment variable {name} is not set"))?);
        rest = &rest[end + 1..];
    }
    out.push_str(rest);
    Ok(out)
}
