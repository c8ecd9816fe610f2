//! Turns of users whose calls ask servers.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use tokio::time::Instant;

/// Pause between calls of one user that ask servers, beyond the first [`MAX_BURST`].
///
/// A server answers a client 100 times in a second by default, and its programs need most of that.
const TURN_INTERVAL: Duration = Duration::from_millis(200);
const MAX_BURST: u32 = 20;

/// Turns of the users whose calls ask servers: the time of each user's next one without the burst.
#[derive(Debug, Default)]
pub struct Turns(Mutex<HashMap<u32, Instant>>);

impl Turns {
    /// Takes a turn, and returns how long the call waits for it.
    pub fn take(&self, uid: u32, now: Instant) -> Duration {
        // root asks at once, to diagnose problems.
        if uid == 0 {
            return Duration::ZERO;
        }
        let mut turns = self.0.lock().unwrap_or_else(|e| e.into_inner());
        turns.retain(|_, next| *next > now);
        let next = turns.entry(uid).or_insert(now);
        let wait = next.duration_since(now).saturating_sub(TURN_INTERVAL * (MAX_BURST - 1));
        *next += TURN_INTERVAL;
        wait
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_users_loop_of_calls_leaves_the_servers_to_others() {
        let (turns, now) = (Turns::default(), Instant::now());
        let waits: Vec<_> = (0..100).map(|_| turns.take(1000, now)).collect();
        assert_eq!(waits.iter().filter(|wait| wait.is_zero()).count(), MAX_BURST as usize);
        assert_eq!(waits[99], TURN_INTERVAL * (100 - MAX_BURST), "5 a second");
        for _ in 0..100 {
            assert_eq!(turns.take(0, now), Duration::ZERO, "root");
        }
        assert_eq!(turns.take(1001, now), Duration::ZERO, "another user");
        let later = now + TURN_INTERVAL * 100;
        assert_eq!(turns.take(1000, later), Duration::ZERO);
        assert_eq!(turns.0.lock().unwrap().len(), 1, "others are forgotten");
    }
}
