//! The error text for an unknown key, with a suggestion.

use gpusession_common::units::nearest;
use toml::de::DeValue;

use super::keys::keys;
use crate::limits::{LIMITS, OF_CLIENTS, TOP_LEVEL};

/// Returns the error text for an unknown key, with a suggestion.
pub(super) fn unknown(path: &[&str], value: &DeValue<'_>) -> String {
    let written = path.join(".");
    let in_it = format!("{written}.");
    let inner: Vec<_> = keys().filter_map(|k| k.name.strip_prefix(&in_it)).collect();
    if !inner.is_empty() {
        return format!("`{written}` is a table: write [{written}] with {}", inner.join(", "));
    }
    match path {
        ["reserve"] => return "`reserve`: write it as [[reserve]]".into(),
        ["limits", rest @ ..] => return unknown_limit(&written, rest, value),
        _ => {}
    }
    if let Some(key) = keys().find(|k| path.last() == Some(&k.name)) {
        return format!("unknown key `{written}`; did you mean `{}`?", key.name);
    }
    let limits = LIMITS.iter().map(|l| format!("limits.{}", l.name));
    match nearest(&written, keys().map(|k| k.name.to_string()).chain(limits)) {
        Some(name) => format!("unknown key `{written}`; did you mean `{name}`?"),
        None => {
            let names: Vec<_> = keys().map(|k| k.name).collect();
            let limits: Vec<_> = LIMITS.iter().map(|l| l.name).collect();
            format!(
                "unknown key `{written}`; the keys are {}, reserve, and in limits and limits.group.NAME, \
                 limits.client.NAME, limits.user.NAME {}",
                names.join(", "),
                limits.join(", ")
            )
        }
    }
}

/// Returns the error text for an unknown key below `limits`.
fn unknown_limit(written: &str, path: &[&str], value: &DeValue<'_>) -> String {
    let (kind, name) = match path {
        [] => return "`limits` is a table: write [limits]".into(),
        [kind @ ("group" | "client" | "user")] | [kind @ ("group" | "client" | "user"), _] => {
            return format!("`{written}`: the name of the {kind} is missing: write [limits.{kind}.NAME]");
        }
        // [limits.client.vm.7]
        [kind @ ("group" | "client" | "user"), of @ ..] if matches!(value, DeValue::Table(_)) => {
            return format!(
                "`{written}`: write a name with a dot in quotes: [limits.{kind}.{:?}]",
                of.join(".")
            );
        }
        [name] if TOP_LEVEL.contains(name) => {
            return format!("unknown key `{written}`; did you mean `{name}`?");
        }
        [name] => ("", *name),
        [kind @ ("group" | "client" | "user"), _, name] => (*kind, *name),
        _ => {
            return format!(
                "unknown key `{written}`; limits are in [limits], [limits.group.NAME], [limits.client.NAME] and \
                 [limits.user.NAME]"
            );
        }
    };
    if kind == "user" && OF_CLIENTS.contains(&name) {
        return format!(
            "`{written}`: a request does not name its user; write limits.{name}, limits.client.NAME.{name} or limits.group.NAME.{name}"
        );
    }
    let members: &[&str] = if kind == "group" { &["clients", "users"] } else { &[] };
    let here = |name: &&str| match kind {
        "" => !TOP_LEVEL.contains(name),
        "user" => !OF_CLIENTS.contains(name),
        _ => true,
    };
    let names: Vec<&str> =
        members.iter().copied().chain(LIMITS.iter().map(|l| l.name).filter(here)).collect();
    match nearest(name, names.iter().copied()) {
        Some(near) => {
            let table = written.strip_suffix(name).unwrap_or_default();
            format!("unknown key `{written}`; did you mean `{table}{near}`?")
        }
        None => format!("unknown key `{written}`; the keys of this table are {}", names.join(", ")),
    }
}
