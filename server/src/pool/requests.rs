//! Requests for leases that are being answered, and whether their clients have withdrawn them.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Requests under way.
///
/// A request may wait for other ones. Its withdrawal, which finds no lease meanwhile, is noted
/// here, and the request gives its lease back.
#[derive(Debug, Clone, Default)]
pub struct Requests(Arc<Mutex<Entries>>);

#[derive(Debug, Default)]
struct Entries {
    last: u64,
    calls: Vec<Entry>,
}

#[derive(Debug)]
struct Entry {
    number: u64,
    client: String,
    id: String,
    withdrawn: bool,
}

/// One call of a request, until its answer.
#[derive(Debug)]
pub struct Call {
    requests: Requests,
    number: u64,
}

impl Requests {
    fn lock(&self) -> MutexGuard<'_, Entries> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a call.
    pub fn begin(&self, client: &str, id: &str) -> Call {
        let mut entries = self.lock();
        entries.last += 1;
        let number = entries.last;
        entries.calls.push(Entry { number, client: client.into(), id: id.into(), withdrawn: false });
        Call { requests: self.clone(), number }
    }

    /// Notes that a client has withdrawn a request.
    pub fn withdraw(&self, client: &str, id: &str) {
        let mut entries = self.lock();
        for entry in entries.calls.iter_mut().filter(|entry| entry.client == client && entry.id == id) {
            entry.withdrawn = true;
        }
    }
}

impl Call {
    /// Returns `true` if the client has withdrawn the request, and has not asked again since.
    ///
    /// A client cannot withdraw a request without an id.
    pub fn withdrawn(&self) -> bool {
        let entries = self.requests.lock();
        let Some(own) = entries.calls.iter().find(|entry| entry.number == self.number) else { return false };
        let same = |entry: &&Entry| entry.client == own.client && entry.id == own.id;
        !own.id.is_empty() && entries.calls.iter().filter(same).all(|entry| entry.withdrawn)
    }

    /// Notes that the client gets the lease, which earlier calls of the request then keep.
    pub fn granted(&self) {
        let mut entries = self.requests.lock();
        let Some(own) = entries.calls.iter().find(|entry| entry.number == self.number) else { return };
        let (client, id) = (own.client.clone(), own.id.clone());
        for entry in entries.calls.iter_mut().filter(|entry| entry.client == client && entry.id == id) {
            entry.withdrawn = false;
        }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.requests.lock().calls.retain(|entry| entry.number != self.number);
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
        drop(again);
        assert!(first.withdrawn(), "the later call has failed");
        let again = requests.begin("vm-1", "a");
        again.granted();
        drop(again);
        assert!(!first.withdrawn(), "the client has the lease");
        drop((first, others));
        assert!(requests.lock().calls.is_empty());
        let nameless = requests.begin("vm-1", "");
        requests.withdraw("vm-1", "");
        assert!(!nameless.withdrawn());
    }
}
