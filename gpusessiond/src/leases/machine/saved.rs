//! State that outlives the daemon.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::lease::{Asked, Phase, Recovery, SavedRelease, Wanted};
use super::state::{Machine, RECOVERY_TIMEOUT};
use crate::leases::Spec;
use crate::leases::Time;

/// A lease that outlives the daemon.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SavedLease {
    /// Description with which the next daemon continues to want it.
    pub spec: Spec,
    /// Id from the server.
    pub id: String,
    /// Name of the server that holds it.
    pub server: String,
    /// When it expires; zero for a lease that the heartbeat renews.
    pub expires: Time,
}

/// State that the next daemon of the same boot needs.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Saved {
    /// Leases that a server holds for this client.
    pub leases: Vec<SavedLease>,
    /// How often each wanted lease was given up or lost; part of its request id, so that no request
    /// is repeated by mistake.
    pub generations: BTreeMap<String, u32>,
    /// See [`Machine::preallocate`].
    pub preallocated: u32,
    /// Releases and withdrawals that the next daemon repeats.
    #[serde(default)]
    pub releases: Vec<SavedRelease>,
}

impl Machine {
    /// Returns the state that the next daemon of this boot needs.
    pub fn saved(&self) -> Saved {
        let lease = |wanted: &Wanted| {
            let spec = wanted.spec.clone();
            match (&wanted.phase, &wanted.recovery) {
                (Phase::Held(held), _) => Some(SavedLease {
                    spec,
                    id: held.id.clone(),
                    server: held.reported.server.clone(),
                    // Other leases are renewed every few seconds.
                    expires: if wanted.spec.renewed_by_itself() { Time::ZERO } else { held.expires },
                }),
                (_, Some(old)) => Some(SavedLease {
                    spec,
                    id: old.id.clone(),
                    server: old.server.clone(),
                    expires: old.expires,
                }),
                _ => None,
            }
        };
        Saved {
            leases: self.slots.values().filter_map(lease).collect(),
            generations: self.generations.clone(),
            preallocated: self.preallocated,
            releases: self.unconfirmed_releases(),
        }
    }

    fn unconfirmed_releases(&self) -> Vec<SavedRelease> {
        let named = |server: usize, id: &str, waits, until| {
            let server = self.names[server].last()?.clone();
            Some(SavedRelease { server, id: id.to_owned(), waits, until })
        };
        let of_request = |(id, asked): (String, Asked)| {
            let until = asked.since + RECOVERY_TIMEOUT * 10;
            asked
                .pending(None)
                .into_iter()
                .filter_map(move |s| named(s, &id, true, until))
                .collect::<Vec<_>>()
        };
        let mut releases: Vec<_> =
            self.releasing.iter().filter_map(|r| named(r.server, &r.id, r.waits, r.give_up)).collect();
        releases.extend(self.unplaced.iter().cloned());
        releases.extend(self.unwanted.values().flatten().cloned().flat_map(of_request));
        // The requester of a lease leaves with this daemon. The next daemon repeats all other
        // requests, and so finds their leases.
        let leaves = |w: &&Wanted| w.spec.once && w.spec.request_id.is_none() && w.recovery.is_none();
        for wanted in self.slots.values().filter(|w| w.held().is_none()).filter(leaves) {
            releases.extend(of_request((self.request_id(&wanted.spec), wanted.asked.clone())));
        }
        releases.sort_by(|a, b| (&a.id, &a.server).cmp(&(&b.id, &b.server)));
        releases
    }

    /// Restores the state of an earlier daemon of this boot.
    ///
    /// Call it before [`Machine::session_opened`] for the open sessions, and before
    /// [`Machine::configure`].
    pub fn restore(&mut self, now: Time, saved: Saved) {
        self.generations = saved.generations;
        self.preallocated = saved.preallocated;
        self.unplaced.extend(saved.releases.into_iter().filter(|release| release.until > now));
        for lease in saved.leases {
            let SavedLease { spec, id, server, expires } = lease;
            let recovery = Recovery {
                id,
                server,
                until: now + RECOVERY_TIMEOUT,
                expires,
                ended: Vec::new(),
                used: Vec::new(),
            };
            self.insert(now, spec, Some(recovery));
        }
        self.tick(now);
    }
}
