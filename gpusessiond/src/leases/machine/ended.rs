//! Reasons of ended leases, for programs that wait for a broken connection to come back.

use std::time::Duration;

use super::lease::Wanted;
use super::state::{Ended, Machine};
use crate::leases::Time;

/// Number of remembered leases.
const MAX_REMEMBERED: usize = 256;
/// Longer than a program waits for its connection.
const ENDED_TTL: Duration = Duration::from_secs(120);

impl Machine {
    /// Remembers why a lease has ended.
    pub(super) fn remember(&mut self, now: Time, id: String, reason: &str) {
        let surplus = (self.ended.len() + 1).saturating_sub(MAX_REMEMBERED);
        self.ended.drain(..surplus);
        self.ended.push_back(Ended { at: now, id, reason: reason.to_owned() });
    }

    /// Returns why a granted worker no longer waits for its program, if this daemon knows that.
    pub fn ended_because(&self, now: Time, lease: &str, worker: &[u8]) -> Option<String> {
        if let Some(held) = self.slots.values().filter_map(Wanted::held).find(|held| held.id == lease) {
            let ended = held.ended.iter().any(|id| id == worker);
            return ended.then(|| format!("its worker of lease {lease} has ended"));
        }
        let of = |ended: &&Ended| ended.id == lease && now.saturating_sub(ended.at) < ENDED_TTL;
        let ended = self.ended.iter().rev().find(of)?;
        Some(format!("lease {lease} has ended: {}", ended.reason))
    }
}
