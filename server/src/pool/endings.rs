//! The ends of the pool's certificates, and the warnings of them.

use std::collections::BTreeMap;

use crate::certificate::day;

pub(super) const DAY: u64 = 24 * 3600;

/// The warnings that were given, so that each comes once in its period.
#[derive(Debug, Default)]
pub(super) struct Warned {
    pub(super) looked_unix: u64,
    /// Time of the latest warning by role and name, in seconds since 1970.
    latest: BTreeMap<(&'static str, String), u64>,
}

/// A certificate, with the time of its end in seconds since 1970.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ending {
    /// `server`, `authority` or `client`.
    pub role: &'static str,
    /// Name of the holder; empty for the authority.
    pub name: String,
    /// End of the certificate.
    pub expires_unix: u64,
}

impl Ending {
    /// Returns the period in which one warning is enough, and the remedy.
    pub(super) fn remedy(&self) -> (u64, &'static str) {
        match self.role {
            "authority" => (30 * DAY, "replace it with `gpuserver pool rotate begin`"),
            "server" => (DAY, "the server tries again each hour; its journal has the reason"),
            _ => (
                DAY,
                "its daemon does not renew it: check that it runs, reaches this server, and is up to date",
            ),
        }
    }

    /// Describes the certificate's end and the remedy.
    pub fn warning(&self, unix: u64) -> String {
        let verb = if self.expires_unix < unix { "has expired, on" } else { "expires on" };
        let whose = if self.name.is_empty() { "pool" } else { &self.name };
        format!(
            "certificate of {} {whose}: {verb} {}: {}",
            self.role,
            day(self.expires_unix),
            self.remedy().1
        )
    }
}

impl Warned {
    /// Returns the certificates of which a warning is due.
    pub(super) fn due(&mut self, ending: Vec<Ending>, unix: u64) -> Vec<Ending> {
        let key = |e: &Ending| (e.role, e.name.clone());
        self.latest.retain(|known, _| ending.iter().any(|e| key(e) == *known));
        let due = |e: &Ending| self.latest.get(&key(e)).is_none_or(|at| unix >= at + e.remedy().0);
        let due: Vec<Ending> = ending.into_iter().filter(due).collect();
        self.latest.extend(due.iter().map(|e| (key(e), unix)));
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_warning_comes_once_in_its_period_until_the_certificate_is_renewed() {
        let of = |role, name: &str| Ending { role, name: name.into(), expires_unix: 100 * DAY };
        let (client, authority) = (of("client", "vm-1"), of("authority", ""));
        let mut warned = Warned::default();
        let all = || vec![client.clone(), authority.clone()];
        assert_eq!(warned.due(all(), DAY), all());
        assert_eq!(warned.due(all(), DAY + 3600), []);
        assert_eq!(warned.due(all(), 2 * DAY), std::slice::from_ref(&client));
        assert_eq!(warned.due(all(), 31 * DAY), all());
        assert_eq!(warned.due(vec![authority.clone()], 32 * DAY), []);
        assert_eq!(warned.due(all(), 32 * DAY), [client], "renewed, and about to end again");
    }
}
