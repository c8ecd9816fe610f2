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
    use std::os::fd::{AsRawFd, OwnedFd};
    use std::os::unix::process::CommandExt as _;
    use std::process::Command;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use gpusession_proto::supervise::{FromWorker, MAX_PACKET, encode};
    use nix::sys::socket::{MsgFlags, recv, send};

    use super::super::records::tests::supervisor;
    use super::super::run::Origin;
    use super::*;
    use crate::pidfd::pidfd_open;
    use crate::spawn::socket_pair;

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

    /// Asks for memory up to `times`, and counts the answers, until the channel closes.
    fn ask(channel: OwnedFd, times: u64, answers: &Arc<AtomicU32>) {
        let channel = Arc::new(channel);
        let (reading, answers) = (channel.clone(), answers.clone());
        std::thread::spawn(move || {
            (0..times)
                .map(|serial| encode(&FromWorker::MemoryWanted { device: 0, serial, bytes: 0 }))
                .take_while(|packet| send(channel.as_raw_fd(), packet, MsgFlags::MSG_NOSIGNAL).is_ok())
                .for_each(drop);
        });
        std::thread::spawn(move || {
            let mut packet = vec![0; MAX_PACKET];
            while recv(reading.as_raw_fd(), &mut packet, MsgFlags::empty()).is_ok_and(|len| len > 0) {
                answers.fetch_add(1, Ordering::SeqCst);
            }
        });
    }

    /// Lets tasks run while the clock stands: until `done`, or for a while of real time.
    async fn run(done: impl Fn() -> bool, time: Duration) -> bool {
        let begun = std::time::Instant::now();
        while !done() && begun.elapsed() < time {
            tokio::task::yield_now().await;
        }
        done()
    }

    #[tokio::test(start_paused = true)]
    async fn a_flood_of_a_clients_workers_waits_for_the_next_second_and_others_do_not() {
        const LONG: Duration = Duration::from_secs(60);
        let folder = tempfile::tempdir().unwrap();
        let ids = [[1; 16], [2; 16], [3; 16], [4; 16]];
        let (this, queues) = supervisor(&folder, &ids);
        this.state().workers.get_mut(&ids[3]).unwrap().book.client = "vm-2".into();
        let mut process = Command::new("sleep").arg("1000").process_group(0).spawn().unwrap();
        // While a blocking task runs, the clock stands.
        let (end, ends) = std::sync::mpsc::channel::<()>();
        let standing = tokio::task::spawn_blocking(move || ends.recv());
        let (flood, other) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
        let mut workers = Vec::new();
        for (id, queues) in ids.into_iter().zip(queues) {
            let (channel, theirs) = socket_pair().unwrap();
            let pid = process.id();
            this.attend_to(id, Origin::Left { pid, pidfd: pidfd_open(pid).unwrap(), channel }, queues);
            workers.push(theirs);
        }
        let last = workers.pop().unwrap();
        workers.into_iter().for_each(|channel| ask(channel, u64::MAX, &flood));
        let answered = |count: &AtomicU32| count.load(Ordering::SeqCst);
        assert!(run(|| answered(&flood) >= MAX_REQUESTS, LONG).await, "{}", answered(&flood));
        // Each channel passes one request on before it waits.
        let bound = MAX_REQUESTS + 3;
        assert!(!run(|| answered(&flood) > bound, Duration::from_millis(300)).await, "{}", answered(&flood));
        ask(last, 1, &other);
        assert!(run(|| answered(&other) == 1, LONG).await, "another client waits for no second");
        tokio::time::advance(RATE_INTERVAL).await;
        assert!(run(|| answered(&flood) >= bound + MAX_REQUESTS / 2, LONG).await, "they are served again");
        drop(end);
        let _ = standing.await;
        process.kill().unwrap();
        process.wait().unwrap();
    }
}
