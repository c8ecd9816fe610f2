//! Events for clients: a queue for each open `Watch`.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use gpusession_proto::control::pool_event::Event as PoolEventKind;
use gpusession_proto::control::{self as wire, PoolEvent};
use tokio::sync::mpsc;
use tokio_stream::Stream;
use tonic::Status;

use crate::supervise::WorkerId;

/// Events that may wait for a client; the queue grows as needed.
const MAX_QUEUED_EVENTS: usize = 1024;
/// Most watches of a client: one for each connection that it may have.
pub(super) const MAX_WATCHES: usize = 256;

/// Boxed, since each client's queue has room for some events from the start.
type QueuedEvent = Result<Box<PoolEvent>, Box<Status>>;

/// All open watches, by client.
#[derive(Default)]
pub struct Watches(Arc<Mutex<HashMap<String, Vec<mpsc::Sender<QueuedEvent>>>>>);

/// Receiver of one watch; dropping it ends the watch.
pub struct Queue {
    all: Watches,
    client: String,
    events: mpsc::Receiver<QueuedEvent>,
}

impl Watches {
    fn locked(&self) -> MutexGuard<'_, HashMap<String, Vec<mpsc::Sender<QueuedEvent>>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens a watch for a client's events from now on; `None`: the client has as many as it may.
    pub fn begin(&self, client: &str) -> Option<Queue> {
        let (sender, events) = mpsc::channel(MAX_QUEUED_EVENTS);
        let mut all = self.locked();
        let queues = all.entry(client.into()).or_default();
        if queues.len() >= MAX_WATCHES {
            return None;
        }
        queues.push(sender);
        Some(Queue { all: Self(self.0.clone()), client: client.into(), events })
    }

    /// Sends an event to a client's watches. A watch whose queue is full ends after the queued
    /// events.
    pub fn notify(&self, client: &str, event: PoolEvent) {
        if let Some(queues) = self.locked().get_mut(client) {
            queues.retain(|queue| queue.try_send(Ok(Box::new(event.clone()))).is_ok());
        }
    }

    /// Sends an event to all watches.
    pub fn tell_all(&self, event: &PoolEvent) {
        for queues in self.locked().values_mut() {
            queues.retain(|queue| queue.try_send(Ok(Box::new(event.clone()))).is_ok());
        }
    }

    /// Ends a client's watches with a reason.
    pub fn refuse(&self, client: &str, reason: &str) {
        for queue in self.locked().remove(client).into_iter().flatten() {
            let _ = queue.try_send(Err(Box::new(Status::permission_denied(reason))));
        }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.events.close();
        let mut all = self.all.locked();
        if let Some(queues) = all.get_mut(&self.client) {
            queues.retain(|queue| !queue.is_closed());
            if queues.is_empty() {
                all.remove(&self.client);
            }
        }
    }
}

/// Stream of a client's events: the present state first, then changes. `T` lives as long as the
/// stream.
pub struct Events<T> {
    first: std::vec::IntoIter<PoolEvent>,
    /// `None`: the stream has ended.
    queue: Option<Queue>,
    _with: T,
}

impl<T> Events<T> {
    /// Creates the stream; `first` is the present state.
    pub fn new(first: Vec<PoolEvent>, queue: Queue, with: T) -> Self {
        Self { first: first.into_iter(), queue: Some(queue), _with: with }
    }
}

impl<T: Unpin> Stream for Events<T> {
    type Item = Result<PoolEvent, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if let Some(event) = self.first.next() {
            return Poll::Ready(Some(Ok(event)));
        }
        let Some(queue) = &mut self.queue else { return Poll::Ready(None) };
        let end = match std::task::ready!(queue.events.poll_recv(cx)) {
            Some(Ok(event)) => return Poll::Ready(Some(Ok(*event))),
            Some(Err(status)) => *status,
            None => Status::data_loss("too slow: events were lost; renew and watch again"),
        };
        self.queue = None;
        Poll::Ready(Some(Err(end)))
    }
}

/// Returns the event that tells a lease's number of ready workers.
pub(super) fn workers_ready(lease: String, stock: u32, ended: Option<WorkerId>) -> PoolEvent {
    let ended = ended.iter().map(|id| id.to_vec()).collect();
    PoolEvent { lease, event: Some(PoolEventKind::WorkersReady(wire::WorkersReady { stock, ended })) }
}

#[cfg(test)]
mod tests {
    use tokio_stream::StreamExt;

    use super::*;

    fn event(lease: &str) -> PoolEvent {
        PoolEvent { lease: lease.into(), event: None }
    }

    #[tokio::test]
    async fn each_watch_gets_its_events_and_a_slow_one_is_closed() {
        let watches = Watches::default();
        let mut one = Events::new(vec![event("first")], watches.begin("vm-1").unwrap(), ());
        let mut deaf = Events::new(Vec::new(), watches.begin("vm-1").unwrap(), ());
        let other = watches.begin("vm-2").unwrap();
        let lease = |said: Option<Result<PoolEvent, Status>>| said.unwrap().unwrap().lease;
        assert_eq!(lease(one.next().await), "first");
        for i in 0..=MAX_QUEUED_EVENTS {
            watches.notify("vm-1", event(&i.to_string()));
            assert_eq!(lease(one.next().await), i.to_string());
        }
        for i in 0..MAX_QUEUED_EVENTS {
            assert_eq!(lease(deaf.next().await), i.to_string());
        }
        assert_eq!(deaf.next().await.unwrap().unwrap_err().code(), tonic::Code::DataLoss);
        assert!(deaf.next().await.is_none());
        watches.refuse("vm-1", "it was revoked");
        assert_eq!(one.next().await.unwrap().unwrap_err().code(), tonic::Code::PermissionDenied);
        drop(other);
        assert!(watches.locked().is_empty(), "nothing is left of watches that ended");
    }

    #[test]
    fn a_client_has_a_bounded_number_of_watches() {
        let watches = Watches::default();
        let mut open: Vec<_> = (0..MAX_WATCHES).map_while(|_| watches.begin("vm-1")).collect();
        assert_eq!(open.len(), MAX_WATCHES);
        assert!(watches.begin("vm-1").is_none(), "one more");
        assert!(watches.begin("vm-2").is_some(), "another client");
        open.pop();
        assert!(watches.begin("vm-1").is_some(), "one has ended");
    }
}
