//! The tables of limits, and the reserves.

use std::collections::BTreeMap;

use super::keys::{ReserveKeys, limit_key};
use super::kinds::texts;
use super::origin::{ConfigError, Origin};
use super::raw::{Raw, RawKeys, RawReserve, Value};
use super::reader::{Host, Reader, Report};
use crate::lease::Reserve;
use crate::limits::{self, Bound, Entry, Group, LIMITS, Layer, Limits, ON_IDLE, Scope, TOP_LEVEL};

pub(super) fn check_limits(raw: &Raw, scope: Scope, report: &mut Report) -> Result<Limits, ConfigError> {
    let mut out = Limits { scope, ..Limits::default() };
    let mut groups: BTreeMap<String, Group> = BTreeMap::new();
    for limit in LIMITS.iter().filter(|l| !TOP_LEVEL.contains(&l.name)) {
        if !raw.limits.contains_key(&(Layer::Default, limit.name.to_string())) {
            report.push((format!("limits.{}", limit.name), limit.default().into(), Origin::Default));
        }
    }
    for ((layer, name), (value, origin)) in &raw.limits {
        let key = limit_key(layer, name);
        let bad = |m: String| ConfigError::new(origin.clone(), format!("{key} = {value}: {m}"));
        if let Layer::Group(group) = layer {
            let group = groups.entry(group.clone()).or_default();
            let members = match name.as_str() {
                "clients" => Some(&mut group.clients),
                "users" => Some(&mut group.users),
                _ => None,
            };
            if let Some(members) = members {
                *members = texts(value).map_err(bad)?.into_iter().map(String::from).collect();
                report.push((key, value.to_string(), origin.clone()));
                continue;
            }
        }
        // `read_table` inserts known names only.
        let Some(limit) = LIMITS.iter().find(|l| l.name == name) else { continue };
        let written = match value {
            Value::String(s) => s.clone(),
            Value::List(_) => texts(value).map_err(bad)?.join(","),
            Value::Other(_) if limit.kind == limits::Kind::Names => {
                return Err(bad("a list of strings is wanted".into()));
            }
            other => other.to_string(),
        };
        let bound = Bound::parse(limit.kind, &written).map_err(bad)?;
        if name == "on_idle"
            && let Bound::Names(words) = &bound
            && let Some(bad_word) = words.iter().find(|w| !ON_IDLE.contains(&w.as_str()))
        {
            return Err(bad(format!("{bad_word:?} is none of {}", ON_IDLE.join(", "))));
        }
        if name == "sm_percent" && !matches!(bound, Bound::Number(1..=100)) {
            return Err(bad("a number from 1 to 100 is wanted".into()));
        }
        report.push((key, bound.to_string(), origin.clone()));
        out.entries.push(Entry {
            name: limit.name,
            layer: layer.clone(),
            bound,
            origin: origin.to_string(),
            of_user: false,
        });
    }
    for (name, group) in &groups {
        if group.clients.is_empty() && group.users.is_empty() {
            let of_it = raw.limits.iter().find(|((layer, _), _)| *layer == Layer::Group(name.clone()));
            let origin = of_it.map_or(Origin::Default, |(_, (_, origin))| origin.clone());
            let why = format!("limits.group.{name} has no members: set its clients or users");
            return Err(ConfigError::new(origin, why));
        }
    }
    out.groups = groups.into_iter().collect();
    Ok(out)
}

fn check_reserve((fields, origin): &RawReserve, host: Host<'_>) -> Result<Reserve, ConfigError> {
    let mut raw = RawKeys::new();
    for (name, value, origin) in fields {
        let Some(row) = ReserveKeys::ROWS.iter().find(|row| row.key() == name) else {
            let why =
                format!("reserve.{name} = {value}: the keys of [[reserve]] are client, gpus and memory");
            return Err(ConfigError::new(origin.clone(), why));
        };
        raw.insert(row.name, (value.clone(), origin.clone()));
    }
    let ReserveKeys { client, gpus, memory } =
        ReserveKeys::read(&mut Reader { raw: &raw, host, report: Vec::new() })?;
    if client.is_empty() {
        return Err(ConfigError::new(origin.clone(), "reserve.client is missing: name the reserve's client"));
    }
    Ok(Reserve { client, gpus, memory })
}

/// Reads all reserves, and reports them.
pub(super) fn check_reserves(
    raw: &Raw,
    host: Host<'_>,
    report: &mut Report,
) -> Result<Vec<Reserve>, ConfigError> {
    let reserve = raw.reserve.iter().map(|part| check_reserve(part, host)).collect::<Result<Vec<_>, _>>()?;
    for (r, (_, origin)) in reserve.iter().zip(&raw.reserve) {
        let memory = Bound::Memory(r.memory);
        report.push((
            "reserve".into(),
            format!("{} GPU(s), {memory} of each, for {}", r.gpus, r.client),
            origin.clone(),
        ));
    }
    Ok(reserve)
}
