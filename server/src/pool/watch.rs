//! Who is told what happens to a client's leases: a queue for each `Watch` that a client has open.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use gpusession_proto::control::PoolEvent;
use tokio::sync::mpsc;
use tokio_stream::Stream;
use tonic::Status;

/// Events that wait for a client; room for them is made as they come.
const MOST: usize = 1024;

/// Boxed: a queue has room for some from its beginning on, and there is one for each client.
type Said = Result<Box<PoolEvent>, Box<Status>>;

/// All open watches.
#[derive(Default)]
pub struct Watches(Arc<Mutex<HashMap<String, Vec<mpsc::Sender<Said>>>>>);

/// Of one watch; forgotten when it is dropped.
pub struct Queue {
    all: Watches,
    client: String,
    said: mpsc::Receiver<Said>,
}

impl Watches {
    fn locked(&self) -> MutexGuard<'_, HashMap<String, Vec<mpsc::Sender<Said>>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a client is told from now on.
    pub fn begin(&self, client: &str) -> Queue {
        let (sender, said) = mpsc::channel(MOST);
        self.locked().entry(client.into()).or_default().push(sender);
        Queue { all: Self(self.0.clone()), client: client.into(), said }
    }

    /// Tells a client, if it watches. Where it has not taken earlier events, its watch ends after those.
    pub fn tell(&self, client: &str, event: PoolEvent) {
        if let Some(queues) = self.locked().get_mut(client) {
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
        self.said.close();
        let mut all = self.all.locked();
        if let Some(queues) = all.get_mut(&self.client) {
            queues.retain(|queue| !queue.is_closed());
            if queues.is_empty() {
                all.remove(&self.client);
            }
        }
    }
}

/// What a client is sent: first what holds when it begins to watch, then what happens. `T` lives as long as it does.
pub struct Events<T> {
    first: std::vec::IntoIter<PoolEvent>,
    /// `None`: it was told the end.
    queue: Option<Queue>,
    _with: T,
}

impl<T> Events<T> {
    /// See the type.
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
        let end = match std::task::ready!(queue.said.poll_recv(cx)) {
            Some(Ok(event)) => return Poll::Ready(Some(Ok(*event))),
            Some(Err(status)) => *status,
            None => Status::data_loss("too slow: events were lost; renew and watch again"),
        };
        self.queue = None;
        Poll::Ready(Some(Err(end)))
    }
}

#[cfg(test)]
mod tests {
    use tokio_stream::StreamExt;

    use super::*;

    fn event(lease: &str) -> PoolEvent {
        PoolEvent { lease: lease.into(), event: None }
    }

    #[tokio::test]
    async fn each_watch_is_told_and_one_that_does_not_listen_is_ended() {
        let watches = Watches::default();
        let mut one = Events::new(vec![event("first")], watches.begin("vm-1"), ());
        let mut deaf = Events::new(Vec::new(), watches.begin("vm-1"), ());
        let other = watches.begin("vm-2");
        let lease = |said: Option<Result<PoolEvent, Status>>| said.unwrap().unwrap().lease;
        assert_eq!(lease(one.next().await), "first");
        for i in 0..=MOST {
            watches.tell("vm-1", event(&i.to_string()));
            assert_eq!(lease(one.next().await), i.to_string());
        }
        for i in 0..MOST {
            assert_eq!(lease(deaf.next().await), i.to_string());
        }
        assert_eq!(deaf.next().await.unwrap().unwrap_err().code(), tonic::Code::DataLoss);
        assert!(deaf.next().await.is_none());
        watches.refuse("vm-1", "it was revoked");
        assert_eq!(one.next().await.unwrap().unwrap_err().code(), tonic::Code::PermissionDenied);
        drop(other);
        assert!(watches.locked().is_empty(), "nothing is left of watches that ended");
    }
}
