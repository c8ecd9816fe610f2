//! Calls to servers that outlast one message: their events, and reports that are retried.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;
use tracing::{debug, warn};

use super::message::Message;
use crate::pool::{PoolServer, Trouble};

/// Pause before a watch reconnects, at first and at most.
const BACKOFF_MIN: Duration = Duration::from_millis(100);
const BACKOFF_MAX: Duration = Duration::from_secs(2);
/// Tries to report a process's exit to its server.
const ENDED_TRIES: u32 = 6;

/// Follows one server's events while the manager lives.
pub(super) async fn follow(
    server: Arc<dyn PoolServer>,
    index: usize,
    boot: String,
    messages: mpsc::WeakUnboundedSender<Message>,
) {
    let mut said = false;
    let mut first = true;
    let mut pause = BACKOFF_MIN;
    loop {
        let begun = Instant::now();
        match server.describe(None).await {
            Ok(description) => {
                pause = BACKOFF_MIN;
                let Some(messages) = messages.upgrade() else { return };
                // The first success after failures matters to leases that wait.
                if !std::mem::take(&mut first) || said {
                    let _ = messages.send(Message::Reconnected(index));
                }
                said = false;
                let _ = messages.send(Message::Described(index, begun.elapsed(), description));
            }
            Err(error) => {
                if !said {
                    warn!(gpusession_server = server.address(), "{error}");
                    said = true;
                }
                if messages.upgrade().is_none() {
                    return;
                }
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(BACKOFF_MAX);
                continue;
            }
        }
        let (events, mut arriving) = mpsc::channel(64);
        let watching = server.watch(boot.clone(), events);
        tokio::pin!(watching);
        let result = loop {
            tokio::select! {
                result = &mut watching => break result,
                Some(event) = arriving.recv() => {
                    let Some(messages) = messages.upgrade() else { return };
                    let _ = messages.send(Message::Event(index, event));
                }
            }
        };
        while let Ok(event) = arriving.try_recv() {
            let Some(messages) = messages.upgrade() else { return };
            let _ = messages.send(Message::Event(index, event));
        }
        if let Err(error) = result {
            debug!(
                server = server.address(),
                "server {}: watch ended: {error}; reconnecting",
                server.address()
            );
        }
        let Some(handle) = messages.upgrade() else { return };
        let _ = handle.send(Message::Disconnected(index));
        drop(handle);
        tokio::time::sleep(pause).await;
    }
}

/// Reports to a server that a worker is no longer needed; retries transient failures.
pub(super) async fn tell_ended(pool: Arc<dyn PoolServer>, lease: String, worker: Vec<u8>) {
    for attempt in 0..ENDED_TRIES {
        match pool.process_ended(lease.clone(), worker.clone()).await {
            // A server that refuses calls over its rate limit has not recorded it either.
            Err(error) if matches!(error.trouble, Trouble::Unreachable | Trouble::LimitExceeded) => {
                debug!("lease {lease}: exit of a process not reported: {error}; retrying");
                tokio::time::sleep(Duration::from_millis(250 << attempt)).await;
            }
            _ => return,
        }
    }
}
