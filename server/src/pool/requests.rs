//! Requests for leases that are being answered, and whether their clients have withdrawn them.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Requests under way.
///
/// A request may wait for another lease to be parked. Its withdrawal, which finds no lease
/// meanwhile, is noted here, and the request gives its lease back.
#[derive(Debug, Clone, Default)]
pub struct Requests(Arc<Mutex<Vec<Entry>>>);

#[derive(Debug)]
struct Entry {
    client: String,
    id: String,
    /// Number of calls that ask for it.
    calls: usize,
    withdrawn: bool,
}

/// One call of a request, until its answer.
#[derive(Debug)]
pub struct Call {
    requests: Requests,
    client: String,
    id: String,
}

impl Requests {
    fn lock(&self) -> MutexGuard<'_, Vec<Entry>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a call; a client that asks once more wants the lease again.
    pub fn begin(&self, client: &str, id: &str) -> Call {
        let mut entries = self.lock();
        match entries.iter_mut().find(|entry| entry.client == client && entry.id == id) {
            Some(entry) => {
                entry.calls += 1;
                entry.withdrawn = false;
            }
            None => entries.push(Entry { client: client.into(), id: id.into(), calls: 1, withdrawn: false }),
        }
        Call { requests: self.clone(), client: client.into(), id: id.into() }
    }

    /// Notes that a client has withdrawn a request.
    pub fn withdraw(&self, client: &str, id: &str) {
        for entry in self.lock().iter_mut().filter(|entry| entry.client == client && entry.id == id) {
            entry.withdrawn = true;
        }
    }
}

impl Call {
    fn is(&self, entry: &Entry) -> bool {
        entry.client == self.client && entry.id == self.id
    }

    /// Returns `true` if the client has withdrawn the request; one without an id it cannot.
    pub fn withdrawn(&self) -> bool {
        !self.id.is_empty() && self.requests.lock().iter().any(|entry| self.is(entry) && entry.withdrawn)
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.requests.lock().retain_mut(|entry| {
            if self.is(entry) {
                entry.calls -= 1;
            }
            entry.calls > 0
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_withdrawal_is_of_the_calls_under_way() {
        let requests = Requests::default();
        requests.withdraw("vm-1", "a");
        let first = requests.begin("vm-1", "a");
        let others = [requests.begin("vm-2", "a"), requests.begin("vm-1", "b")];
        assert!(!first.withdrawn(), "an earlier withdrawal is of no later call");
        requests.withdraw("vm-1", "a");
        assert!(first.withdrawn() && others.iter().all(|call| !call.withdrawn()));
        let again = requests.begin("vm-1", "a");
        assert!(!first.withdrawn() && !again.withdrawn(), "the client wants the lease again");
        requests.withdraw("vm-1", "a");
        drop(first);
        assert!(again.withdrawn());
        drop((again, others));
        assert!(requests.lock().is_empty());
        let nameless = requests.begin("vm-1", "");
        requests.withdraw("vm-1", "");
        assert!(!nameless.withdrawn());
    }
}
