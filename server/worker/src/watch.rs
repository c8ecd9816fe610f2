//! A look, from time to time, for changes that a running kernel makes in memory that the program
//! watches: they travel although no synchronization ends.
//!
//! NCCL's threads watch memory in this way, to which a kernel writes that waits for them.
#![expect(clippy::disallowed_methods, reason = "a thread of its own looks at intervals")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::session::Session;

/// Time of GPU work before the first look, since most work ends before.
const FIRST_DELAY: Duration = Duration::from_millis(10);
/// Shortest and longest time between two looks.
const PAUSE: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(50));
/// Longest time between two looks at much memory.
const LONGEST_INTERVAL: Duration = Duration::from_millis(500);
/// Within these bounds, the thread rests as long as a look took that found a change: a kernel may
/// wait for the answer. After one that found none it rests this many times as long.
const REST_SHARE: u32 = 20;

/// Starts the thread that looks, or wakes it.
///
/// If it cannot start, changes travel at synchronizations only.
pub fn start(session: &Arc<Session>) {
    session.activity.watcher.get_or_init(|| {
        let session = session.clone();
        let run = move || look_always(&session);
        std::thread::Builder::new().name("watch".into()).spawn(run).ok().map(|run| run.thread().clone())
    });
    session.activity.wake_watcher();
}

/// Looks while the GPU works, until the process exits. The thread never calls the driver.
fn look_always(session: &Session) {
    let mut pause = None;
    loop {
        if !session.activity.outstanding() || !session.mirrors.any_watched() {
            std::thread::park();
            pause = None;
            continue;
        }
        std::thread::sleep(pause.unwrap_or(FIRST_DELAY));
        let before = Instant::now();
        let changed = session.mirrors.write_back_watched(session);
        pause = Some(next(pause, changed, before.elapsed()));
    }
}

/// Returns the time until the next look: longer after each that finds nothing.
fn next(pause: Option<Duration>, changed: bool, took: Duration) -> Duration {
    let (wanted, share) = match changed {
        true => (PAUSE.0, 1),
        false => (pause.map_or(PAUSE.0, |pause| (2 * pause).min(PAUSE.1)), REST_SHARE),
    };
    (took * share).clamp(wanted, LONGEST_INTERVAL)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_are_rare_where_they_find_nothing_or_take_long() {
        let quick = Duration::from_micros(10);
        let mut pause = None;
        let pauses: Vec<_> = (0..7)
            .map(|_| {
                pause = Some(next(pause, false, quick));
                pause.unwrap().as_millis()
            })
            .collect();
        assert_eq!(pauses, [2, 4, 8, 16, 32, 50, 50]);
        assert_eq!(next(pause, true, quick), PAUSE.0, "a kernel answers soon");
        let slow = Duration::from_millis(10);
        assert_eq!(next(None, true, slow), Duration::from_millis(10));
        assert_eq!(next(None, false, slow), Duration::from_millis(200));
        assert_eq!(next(None, false, 10 * slow), LONGEST_INTERVAL);
    }
}
