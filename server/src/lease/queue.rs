//! The queue of requests that wait for GPUs, and the order in which they are served.

use super::placement::wanted;
use super::{Priority, QUEUE_TIMEOUT, Request, Table, Waiting, WaitingView};
use crate::clock::Moment;

/// Waiting requests of one client on one server; a bound on memory, not a policy.
const MAX_WAITING_PER_CLIENT: usize = 16;

impl Table {
    /// Lists waiting requests in the order in which they are served.
    pub(super) fn queue(&self) -> Vec<&Waiting> {
        let mut queue: Vec<&Waiting> = self.waiting.iter().collect();
        queue.sort_by_key(|w| (w.request.priority, w.arrived));
        queue
    }

    pub(super) fn same(waiting: &Waiting, client: &str, request_id: &str) -> bool {
        waiting.request.client == client && waiting.request.request_id == request_id
    }

    /// Puts a request into the queue, or keeps it there; returns its place, 0 if it cannot wait.
    pub(super) fn wait(&mut self, request: &Request, now: Moment) -> u32 {
        if request.request_id.is_empty() || request.once {
            return 0;
        }
        let known = self.waiting.iter_mut().find(|w| Self::same(w, &request.client, &request.request_id));
        match known {
            Some(waiting) => {
                waiting.asked = now;
                waiting.request = request.clone();
            }
            None => {
                let mine = self.waiting.iter().filter(|w| w.request.client == request.client).count();
                if mine >= MAX_WAITING_PER_CLIENT {
                    return 0;
                }
                self.arrivals += 1;
                let (arrived, request) = (self.arrivals, request.clone());
                self.waiting.push(Waiting { request, arrived, since: now, asked: now });
            }
        }
        self.put_in_order(&request.client, request.priority);
        let place = self.queue().iter().position(|w| Self::same(w, &request.client, &request.request_id));
        place.and_then(|p| u32::try_from(p + 1).ok()).unwrap_or(0)
    }

    /// Sorts a client's requests by its own order, within the places that they hold.
    fn put_in_order(&mut self, client: &str, priority: Priority) {
        let mine = |w: &&mut Waiting| {
            w.request.order > 0 && w.request.client == client && w.request.priority == priority
        };
        let mut mine: Vec<&mut Waiting> = self.waiting.iter_mut().filter(mine).collect();
        let mut places: Vec<u64> = mine.iter().map(|w| w.arrived).collect();
        places.sort_unstable();
        mine.sort_by_key(|w| (w.request.order, w.arrived));
        for (waiting, place) in mine.into_iter().zip(places) {
            waiting.arrived = place;
        }
    }

    /// Removes a request that is no longer wanted; returns when it came, if it waited.
    pub fn leave_queue(&mut self, client: &str, request_id: &str) -> Option<Moment> {
        let place = self.waiting.iter().position(|w| Self::same(w, client, request_id))?;
        Some(self.waiting.remove(place).since)
    }

    /// Lists the queue in the order in which it is served, for listings.
    pub fn waiting(&self, now: Moment) -> Vec<WaitingView> {
        self.queue()
            .into_iter()
            .filter(|w| now.saturating_sub(w.asked) < QUEUE_TIMEOUT)
            .zip(1..)
            .map(|(w, position)| WaitingView {
                client: w.request.client.clone(),
                user: w.request.user.clone(),
                gpus: wanted(&w.request) as u32,
                priority: w.request.priority,
                position,
            })
            .collect()
    }
}
