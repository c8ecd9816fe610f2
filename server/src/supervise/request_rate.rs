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
    /// Counts a request; returns `true` if the client's workers have sent enough for this second.
    pub(super) fn exceeds(&self, client: &str, now: Instant) -> bool {
        let (since, counts) = &mut *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if since.is_none_or(|since| now.duration_since(since) >= RATE_INTERVAL) {
            *since = Some(now);
            counts.clear();
        }
        match counts.get_mut(client) {
            Some(count) => {
                *count = count.saturating_add(1);
                *count > MAX_REQUESTS
            }
            None => counts.insert(client.to_owned(), 1).is_some(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_with_many_workers_has_no_more_requests_than_one_worker() {
        let (rate, start) = (RequestRate::default(), Instant::now());
        let exceeded = (0..2 * MAX_REQUESTS).filter(|_| rate.exceeds("vm-1", start)).count();
        assert_eq!(exceeded, MAX_REQUESTS as usize);
        assert!(!rate.exceeds("vm-2", start), "another client");
        assert!(!rate.exceeds("vm-1", start + RATE_INTERVAL), "the next second");
    }
}
