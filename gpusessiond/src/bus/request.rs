//! Parser of the `a{sv}` argument of `CreateLease`.

use std::collections::HashMap;
use std::time::Duration;

use gpusession_bus::request;
use gpusession_common::units::Memory;
use gpusession_common::words::Class;
use zbus::{OwnedVariant, Variant};

use super::error::{BusError, Result};
use crate::leases::{Owner, Spec};

/// Longest `Who` and `Why`, in bytes.
const MAX_TEXT: usize = 256;

/// A `CreateLease` request after parsing.
#[derive(Debug)]
pub struct Request {
    pub spec: Spec,
    /// `UID`, if given.
    pub uid: Option<u32>,
    /// `Session`, if given.
    pub session: Option<String>,
}

fn take<T>(key: &str, value: OwnedVariant) -> Result<T>
where
    T: for<'a> TryFrom<Variant<'a>>,
{
    T::try_from(Variant::from(value)).map_err(|_| BusError::invalid_args(format!("{key}: wrong type")))
}

fn text(key: &str, value: OwnedVariant) -> Result<String> {
    let text: String = take(key, value)?;
    if text.len() > MAX_TEXT || text.chars().any(char::is_control) {
        return Err(BusError::invalid_args(format!(
            "{key} has at most {MAX_TEXT} bytes and no control characters"
        )));
    }
    Ok(text)
}

fn list(key: &str, value: OwnedVariant) -> Result<Vec<String>> {
    let items: Vec<String> =
        value.try_into().map_err(|_| BusError::invalid_args(format!("{key}: wrong type")))?;
    if items.len() > 64 || items.iter().any(|i| i.len() > MAX_TEXT || i.chars().any(char::is_control)) {
        return Err(BusError::invalid_args(format!("{key}: too long, or with control characters")));
    }
    Ok(items)
}

/// Parses a request; an unknown key is an error.
pub fn read(options: HashMap<String, OwnedVariant>, key: String, uid: u32) -> Result<Request> {
    let mut spec = Spec::requested(key, uid);
    let (mut for_uid, mut session) = (None, None);
    for (key, value) in options {
        match key.as_str() {
            request::COUNT => {
                spec.gpus = take(&key, value)?;
                if !(1..=64).contains(&spec.gpus) {
                    return Err(BusError::invalid_args(format!("{key} must be between 1 and 64")));
                }
            }
            request::DEVICES => spec.devices = list(&key, value)?,
            request::SERVERS => spec.servers = list(&key, value)?,
            request::MODEL => spec.model = text(&key, value)?,
            request::MEMORY_BYTES => match take::<u64>(&key, value)? {
                0 => return Err(BusError::invalid_args(format!("{key} must be above 0"))),
                bytes => spec.memory = Memory::Bytes(bytes),
            },
            request::MEMORY_FRACTION => match take::<f64>(&key, value)? {
                share if share > 0.0 && share <= 1.0 => spec.memory = Memory::Percent(share * 100.0),
                _ => return Err(BusError::invalid_args(format!("{key} must be above 0 and at most 1"))),
            },
            request::SM_PERCENT => {
                spec.sm_percent = take(&key, value)?;
                if !(1..=100).contains(&spec.sm_percent) {
                    return Err(BusError::invalid_args(format!("{key} must be between 1 and 100")));
                }
            }
            request::SM_COUNT => spec.sm_count = take(&key, value)?,
            request::SM_AUTO => spec.sm_auto = take(&key, value)?,
            request::PRIORITY => {
                spec.priority = text(&key, value)?.parse().map_err(BusError::invalid_args)?
            }
            request::SHARING => {
                spec.sharing = Some(text(&key, value)?.parse().map_err(BusError::invalid_args)?)
            }
            request::TTL_USEC => match take::<u64>(&key, value)? {
                0 => spec.ttl = None,
                usec => spec.ttl = Some(Duration::from_micros(usec)),
            },
            request::WHO => spec.who = text(&key, value)?,
            request::WHY => spec.why = text(&key, value)?,
            request::UID => for_uid = Some(take(&key, value)?),
            request::SESSION => session = Some(text(&key, value)?),
            request::CONTROL_GROUP => {
                let group = text(&key, value)?;
                let steps = || group.split('/').skip(1);
                if !group.starts_with('/') || steps().any(|step| matches!(step, "" | "." | "..")) {
                    return Err(BusError::invalid_args(format!(
                        "{key} is a path as in /proc/PID/cgroup, below /"
                    )));
                }
                spec.control_group = Some(group);
            }
            request::IDLE_TIMEOUT_USEC => match take::<u64>(&key, value)? {
                0 => spec.idle_timeout = None,
                usec => spec.idle_timeout = Some(Duration::from_micros(usec)),
            },
            _ => return Err(BusError::invalid_args(format!("unknown key {key}"))),
        }
    }
    if [spec.sm_percent != 100, spec.sm_count != 0, spec.sm_auto].into_iter().filter(|set| *set).count() > 1 {
        return Err(BusError::invalid_args(
            "SMPercent, SMCount and SMAuto exclude each other: leave all but one out",
        ));
    }
    if let Some(uid) = for_uid {
        spec.owner = Owner::Uid(uid);
    }
    spec.class = Class::User;
    Ok(Request { spec, uid: for_uid, session })
}
