//! The queue of requests that wait for GPUs, and the order in which they are served.

use super::placement::wanted;
use super::{
    AllocateError, Priority, QUEUE_TIMEOUT, Request, Share, TURN_TIMEOUT, Table, Waiting, WaitingView,
};
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

    /// Chooses GPUs for a request whose turn has come; another one waits, and learns its place.
    pub(super) fn turn(&mut self, request: &Request, now: Moment) -> Result<Vec<Share>, AllocateError> {
        if self.draining().is_none() {
            self.suitable(request)?;
        }
        // First, so that a request which its client puts in front takes free GPUs at once.
        self.wait(request, now);
        let why = match self.draining() {
            None => {
                self.pass_over(now);
                match self.choose(request) {
                    Err(AllocateError::NoCapacity { why, .. }) => why,
                    chosen => return chosen,
                }
            }
            Some(why) => {
                format!("this server makes no new leases: {why}; use another server, or retry later")
            }
        };
        let place = self.queue().iter().position(|w| Self::same(w, &request.client, &request.request_id));
        Err(AllocateError::NoCapacity {
            why,
            position: place.and_then(|p| u32::try_from(p + 1).ok()).unwrap_or(0),
            waiting: u32::try_from(self.waiting.len()).unwrap_or(u32::MAX),
        })
    }

    /// Puts a request into the queue, or keeps it there.
    fn wait(&mut self, request: &Request, now: Moment) {
        if request.request_id.is_empty() || request.once {
            return;
        }
        let known = self.waiting.iter_mut().find(|w| Self::same(w, &request.client, &request.request_id));
        match known {
            Some(waiting) => {
                waiting.asked = now;
                waiting.request = request.clone();
            }
            None => {
                self.arrivals += 1;
                let (arrived, request) = (self.arrivals, request.clone());
                self.waiting.push(Waiting { request, arrived, since: now, asked: now });
            }
        }
        self.put_in_order(&request.client, request.priority);
        self.trim(&request.client);
    }

    /// Removes a client's last requests until its limits would grant all that are left.
    ///
    /// A client thus keeps no more GPUs from others by waiting than by leases. Requests that leave
    /// the queue early make no room for later ones in front of other clients.
    pub(super) fn trim(&mut self, client: &str) {
        let mut kept: Vec<&Request> = Vec::new();
        let mut beyond = Vec::new();
        for waiting in self.queue().into_iter().filter(|w| w.request.client == client) {
            if kept.len() < MAX_WAITING_PER_CLIENT && self.within_limits(&waiting.request, &kept).is_ok() {
                kept.push(&waiting.request);
            } else {
                beyond.push(waiting.arrived);
            }
        }
        self.waiting.retain(|w| !beyond.contains(&w.arrived));
    }

    /// Removes requests that could have their GPUs, and that their clients no longer repeat.
    fn pass_over(&mut self, now: Moment) {
        let late = |w: &&Waiting| now.saturating_sub(w.asked) >= TURN_TIMEOUT;
        let late: Vec<Waiting> = self.queue().into_iter().filter(late).cloned().collect();
        for Waiting { request, arrived, .. } in late {
            if self.choose(&request).is_ok() {
                self.waiting.retain(|w| w.arrived != arrived);
            }
        }
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::tests::{allocate, limited, named, request, table, waits};
    use super::*;
    use crate::clock::testing::Counting;
    use crate::limits::Bound;

    /// A request for one whole GPU by a client that may have one.
    fn greedy(id: u8, order: u32) -> Request {
        let limits = limited(&[("gpus", Bound::Number(1))]);
        Request { request_id: format!("r{id}"), order, limits, ..request("greedy", 1, 100.0) }
    }

    #[test]
    fn a_request_that_its_client_does_not_repeat_keeps_no_free_gpu() {
        let (mut t, r) = (table(1), Counting::default());
        let held = allocate(&mut t, &request("x", 1, 100.0), 0, &r).unwrap();
        let (first, second) = (named("a", 1, 100.0), named("b", 1, 100.0));
        waits(allocate(&mut t, &first, 0, &r));
        assert_eq!(waits(allocate(&mut t, &second, 80, &r)), (2, 2), "no GPU is free, so it keeps its place");
        t.remove(None, &held.id);
        let mut late = t.clone();
        assert_eq!(allocate(&mut t, &first, 80, &r).unwrap().client, "a", "its client is back in time");
        assert_eq!(allocate(&mut late, &second, 80, &r).unwrap().client, "b");
        assert_eq!(waits(allocate(&mut late, &first, 81, &r)), (1, 1));
    }

    #[test]
    fn a_client_waits_for_no_more_gpus_than_it_may_have() {
        let (mut t, r) = (table(2), Counting::default());
        let held = allocate(&mut t, &request("x", 2, 100.0), 0, &r).unwrap();
        assert_eq!(waits(allocate(&mut t, &greedy(1, 2), 0, &r)), (1, 1));
        assert_eq!(waits(allocate(&mut t, &greedy(2, 3), 0, &r)), (0, 1));
        assert_eq!(waits(allocate(&mut t, &greedy(3, 1), 1, &r)), (1, 1), "its own order decides");
        assert_eq!(waits(allocate(&mut t, &named("b", 1, 100.0), 1, &r)), (2, 2));
        t.cancel("greedy", "r3");
        assert_eq!(waits(allocate(&mut t, &greedy(1, 2), 2, &r)), (2, 2), "behind the other client");
        t.cancel("b", "r");
        t.remove(None, &held.id);
        // A lease without a wait counts too.
        allocate(&mut t, &Request { once: true, ..greedy(4, 0) }, 3, &r).unwrap();
        assert!(t.waiting.is_empty());
    }

    #[derive(Debug, Clone)]
    enum Step {
        Ask(Box<Request>),
        Cancel(u8),
        Release,
        Pass(u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        let priority = prop_oneof![Just(Priority::BelowNormal), Just(Priority::Normal)];
        prop_oneof![
            4 => (0..4u8, 0..4u32, priority)
                .prop_map(|(id, order, priority)| Step::Ask(Request { priority, ..greedy(id, order) }.into())),
            1 => (0..4u8).prop_map(Step::Cancel),
            1 => Just(Step::Release),
            4 => (1..11u64).prop_map(Step::Pass),
        ]
    }

    proptest! {
        #[test]
        fn no_client_keeps_a_free_gpu_from_one_that_waits(steps in proptest::collection::vec(step(), 1..120)) {
            let (mut t, r) = (table(1), Counting::default());
            let (mut now, mut asked, mut free_since) = (0, 0, 0);
            for step in steps {
                match step {
                    Step::Ask(wish) => drop(allocate(&mut t, &wish, now, &r)),
                    Step::Cancel(id) => drop(t.cancel("greedy", &format!("r{id}"))),
                    Step::Release => drop(t.remove_where(|_| true)),
                    Step::Pass(seconds) => now += seconds,
                }
                let of_greedy = t.waiting.iter().filter(|w| w.request.client == "greedy").count();
                prop_assert!(of_greedy + t.held.len() <= 1);
                if !t.held.is_empty() {
                    free_since = now;
                }
                if now - asked >= 30 {
                    asked = now;
                    if let Ok(lease) = allocate(&mut t, &named("b", 1, 100.0), now, &r) {
                        t.remove(None, &lease.id);
                        free_since = now;
                    }
                }
                prop_assert!(now - free_since < TURN_TIMEOUT.as_secs() + 40);
            }
        }
    }
}
