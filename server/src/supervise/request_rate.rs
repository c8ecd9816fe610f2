//! Rate of the requests that all workers of a client send.
//!
//! Each request takes the supervisor's lock, so a client with many workers could keep it from
//! others.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// Requests of one client's workers in a second.
const MAX_REQUESTS: u32 = 20_000;
const RATE_INTERVAL: Duration = Duration::from_secs(1);

/// Requests of each client in the present second.
#[derive(Default)]
pub(super) struct RequestRate(Mutex<(Option<Instant>, HashMap<String, u32>)>);

impl RequestRate {
    /// Counts a request; returns the end of this second if the client's workers have sent enough.
    pub(super) fn exceeds(&self, client: &str, now: Instant) -> Option<Instant> {
        let (since, counts) = &mut *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let begun = match *since {
            Some(begun) if now.duration_since(begun) < RATE_INTERVAL => begun,
            _ => {
                counts.clear();
                *since.insert(now)
            }
        };
        let count = match counts.get_mut(client) {
            Some(count) => count,
            None => counts.entry(client.to_owned()).or_default(),
        };
        *count = count.saturating_add(1);
        (*count > MAX_REQUESTS).then(|| begun + RATE_INTERVAL)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_with_many_workers_has_no_more_requests_than_one_worker() {
        let (rate, start) = (RequestRate::default(), Instant::now());
        let later = start + RATE_INTERVAL / 2;
        let exceeded: Vec<_> = (0..2 * MAX_REQUESTS)
            .filter_map(|n| rate.exceeds("vm-1", if n == 0 { start } else { later }))
            .collect();
        assert_eq!(exceeded, vec![start + RATE_INTERVAL; MAX_REQUESTS as usize]);
        assert_eq!(rate.exceeds("vm-2", later), None, "another client");
        assert_eq!(rate.exceeds("vm-1", start + RATE_INTERVAL), None, "the next second");
    }
}
