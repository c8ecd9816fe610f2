//! Raw values, each with its origin; no value is checked yet.

use std::collections::BTreeMap;
use std::fmt;

use toml::de::DeValue;

use super::origin::{ConfigError, Origin};
use crate::limits::Layer;

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

/// Reads the default of a row.
pub(super) fn default_value(text: &str) -> Result<Value, ConfigError> {
    let bad = |why: String| ConfigError::new(Origin::Default, format!("default {text}: {why}"));
    let value = DeValue::parse(text).map_err(|e| bad(e.to_string()))?;
    convert(value.get_ref(), &|_| None).map_err(bad)
}

pub(super) fn convert(value: &DeValue<'_>, env: &dyn Fn(&str) -> Option<String>) -> Result<Value, String> {
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
