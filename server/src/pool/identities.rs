//! The certificates of the pool: renewal of the server's own, and warnings of those that end.

use std::collections::BTreeMap;

use gpusession_proto::journal::Event as Said;
use tracing::{error, info, warn};

use super::clients::EXPIRY_WINDOW;
use super::{Pool, locked};
use crate::certificate::day;

const DAY: u64 = 24 * 3600;
/// Pause between looks at the certificates that end.
const LOOK: u64 = 3600;
/// Time before the end of the authority from which the server warns.
const AUTHORITY_WARNING: u64 = 2 * 365 * DAY;
/// Time before the end of the server's own certificate from which the server warns.
///
/// The server renews earlier, so that a shorter time means that this failed.
const SERVER_WARNING: u64 = 7 * DAY;

/// The warnings that were given, so that each comes once in its period.
#[derive(Debug, Default)]
pub(super) struct Warned {
    looked_unix: u64,
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
    fn remedy(&self) -> (u64, &'static str) {
        match self.role {
            "authority" => (30 * DAY, "replace it with `gpuserver pool rotate begin`"),
            "server" => (DAY, "the server tries again each hour; its journal has the reason"),
            _ => (
                DAY,
                "its daemon does not renew it: check that it runs, reaches this server, and is up to date",
            ),
        }
    }
}

impl Ending {
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
    fn due(&mut self, ending: Vec<Ending>, unix: u64) -> Vec<Ending> {
        let key = |e: &Ending| (e.role, e.name.clone());
        self.latest.retain(|known, _| ending.iter().any(|e| key(e) == *known));
        let due = |e: &Ending| self.latest.get(&key(e)).is_none_or(|at| unix >= at + e.remedy().0);
        let due: Vec<Ending> = ending.into_iter().filter(due).collect();
        self.latest.extend(due.iter().map(|e| (key(e), unix)));
        due
    }
}

impl Pool {
    /// Renews the server's certificate if that is due, and warns of certificates that end.
    pub(super) fn watch_identities(&self, unix: u64) {
        match self.certificate.keep(unix, self.random.as_ref()) {
            None => {}
            Some(Ok(until)) => info!(
                message_id = Said::IdentityRenewed.id(),
                "the server's certificate: renewed until {}; connections continue",
                day(until)
            ),
            Some(Err(e)) => error!("the server's certificate: not renewed: {e}; trying again in an hour"),
        }
        {
            let mut warned = locked(&self.warned);
            if unix < warned.looked_unix + LOOK {
                return;
            }
            warned.looked_unix = unix;
        }
        let ending = self.ending(unix);
        for e in locked(&self.warned).due(ending, unix) {
            let ended = e.expires_unix < unix;
            let event = if ended { Said::IdentityExpired } else { Said::IdentityExpiring };
            warn!(
                message_id = event.id(),
                gpusession_client = (e.role == "client").then_some(e.name.as_str()),
                gpusession_reason = e.remedy().1,
                "{}",
                e.warning(unix)
            );
        }
    }

    /// Lists the certificates that end soon or have ended.
    pub fn ending(&self, unix: u64) -> Vec<Ending> {
        let soon = |e: &Ending| {
            let warning = match e.role {
                "authority" => AUTHORITY_WARNING,
                "server" => SERVER_WARNING,
                _ => EXPIRY_WINDOW.as_secs(),
            };
            e.expires_unix <= unix + warning
        };
        self.identities().into_iter().filter(soon).collect()
    }

    /// Returns the end of the server's own certificate, in seconds since 1970.
    pub fn certificate_expires_unix(&self) -> u64 {
        self.certificate.expires_unix()
    }

    /// Returns the end of the authority's certificate, in seconds since 1970.
    pub fn authority_expires_unix(&self) -> u64 {
        self.authorities.present().signer().expires_unix()
    }

    /// Lists the certificates of the pool that this server knows, with their ends.
    pub fn identities(&self) -> Vec<Ending> {
        let server = self.facts.config.name.clone();
        let own = [
            Ending { role: "server", name: server, expires_unix: self.certificate.expires_unix() },
            Ending { role: "authority", name: String::new(), expires_unix: self.authority_expires_unix() },
        ];
        let clients = locked(&self.clients).ending(u64::MAX);
        let client = |(name, expires_unix)| Ending { role: "client", name, expires_unix };
        own.into_iter().chain(clients.into_iter().map(client)).collect()
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
