//! Device memory that this worker may use.
//!
//! The lease's processes share one limit, which the supervisor accounts: it grants memory in
//! chunks, and a worker asks for more when its own do not suffice. This module decides no limit.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use gpusession_proto::supervise::{DeviceLimit, FromWorker};

use crate::driver::{Status, status};
use crate::supervise::Supervisor;

#[derive(Clone, Copy, Default)]
struct Device {
    granted: u64,
    used: u64,
    /// Bytes of the lease that no worker was granted, by the supervisor's last answer.
    left: u64,
}

#[derive(Default)]
struct State {
    devices: Vec<Device>,
    /// Serial number of the last request, and of the last answer.
    asked: u64,
    answered: u64,
    /// Bytes that the last answer granted.
    bytes: u64,
    /// Kept to repeat it to a new supervisor.
    request: Option<FromWorker>,
}

/// Granted and used bytes of each device.
pub struct Quota {
    /// Supervisor that grants memory.
    pub supervisor: Arc<Supervisor>,
    state: Mutex<State>,
    answer: Condvar,
    /// Serialises requests: one is open at a time.
    asking: Mutex<()>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Quota {
    /// Starts with no memory granted.
    pub fn new(supervisor: Arc<Supervisor>, devices: &[DeviceLimit]) -> Self {
        let state = State { devices: vec![Device::default(); devices.len()], ..State::default() };
        Self { supervisor, state: Mutex::new(state), answer: Condvar::new(), asking: Mutex::default() }
    }

    /// Counts `bytes` more on a device; an error if the lease has no room for them.
    pub fn take(&self, device: u32, bytes: u64) -> Result<(), Status> {
        let device = device as usize;
        if self.take_granted(device, bytes) {
            return Ok(());
        }
        let _asking = lock(&self.asking);
        loop {
            if self.take_granted(device, bytes) {
                return Ok(());
            }
            let short = {
                let state = lock(&self.state);
                let d = state.devices.get(device).ok_or(status::INVALID_VALUE)?;
                d.used.saturating_add(bytes).saturating_sub(d.granted)
            };
            if self.ask(device, short) < short {
                return Err(status::OUT_OF_MEMORY);
            }
        }
    }

    fn take_granted(&self, device: usize, bytes: u64) -> bool {
        let mut state = lock(&self.state);
        match state.devices.get_mut(device) {
            Some(d) if d.used.checked_add(bytes).is_some_and(|sum| sum <= d.granted) => {
                d.used += bytes;
                true
            }
            _ => false,
        }
    }

    /// Asks the supervisor for memory and waits for the answer; returns the granted bytes.
    fn ask(&self, device: usize, bytes: u64) -> u64 {
        let mut state = lock(&self.state);
        state.asked += 1;
        let serial = state.asked;
        // Holds the lock: a concurrent return is reported before or after this request, never in
        // between.
        let request = FromWorker::MemoryWanted { device: device as u32, serial, bytes };
        self.supervisor.report(&request);
        state.request = Some(request);
        while state.answered < serial {
            state = self.answer.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.bytes
    }

    /// Subtracts freed memory from the used bytes.
    pub fn give(&self, device: u32, bytes: u64) {
        if let Some(d) = lock(&self.state).devices.get_mut(device as usize) {
            d.used = d.used.saturating_sub(bytes);
        }
    }

    /// Counts memory that is in use already, whether granted or not.
    pub fn overdraw(&self, device: u32, bytes: u64) {
        if let Some(d) = lock(&self.state).devices.get_mut(device as usize) {
            d.used = d.used.saturating_add(bytes);
        }
    }

    /// Returns the bytes in use on all devices.
    pub fn used(&self) -> u64 {
        lock(&self.state).devices.iter().map(|d| d.used).fold(0, u64::saturating_add)
    }

    /// Returns the bytes of the lease that this worker could still get.
    ///
    /// These are ungranted bytes, and granted ones that it does not use.
    pub fn left(&self, device: u32) -> u64 {
        let _asking = lock(&self.asking);
        let device = device as usize;
        if device >= lock(&self.state).devices.len() {
            return 0;
        }
        self.ask(device, 0);
        let state = lock(&self.state);
        let d = &state.devices[device];
        d.left.saturating_add(d.granted.saturating_sub(d.used))
    }

    /// Records the supervisor's answer.
    pub fn granted(&self, device: u32, serial: u64, bytes: u64, left: u64) {
        let mut state = lock(&self.state);
        if let Some(d) = state.devices.get_mut(device as usize) {
            d.granted = d.granted.saturating_add(bytes);
            d.left = left;
        }
        state.answered = state.answered.max(serial);
        state.bytes = bytes;
        self.answer.notify_all();
    }

    /// Repeats an open request to a new supervisor.
    ///
    /// The earlier supervisor may have exited before it answered, which would leave a thread
    /// waiting. If both answer, both grants count.
    pub fn ask_again(&self) {
        let state = lock(&self.state);
        if let Some(request) = state.request.as_ref().filter(|_| state.answered < state.asked) {
            self.supervisor.report(request);
        }
    }

    /// Returns granted memory that is not in use.
    pub fn recall(&self) {
        let mut state = lock(&self.state);
        for (device, d) in state.devices.iter_mut().enumerate() {
            let bytes = d.granted.saturating_sub(d.used);
            d.granted -= bytes;
            self.supervisor.report(&FromWorker::MemoryReturned { device: device as u32, bytes });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::supervise::tests::{Peer, pair};

    fn quota(devices: usize) -> (Arc<Quota>, Peer) {
        let (supervisor, peer) = pair();
        let limit = DeviceLimit { uuid: [0; 16], memory_bytes: u64::MAX, sm_percent: 100, context_bytes: 0 };
        (Arc::new(Quota::new(supervisor, &vec![limit; devices])), peer)
    }

    /// Runs `work` and answers its requests, each with granted bytes and bytes left.
    fn answered<T: Send + 'static>(
        quota: &Arc<Quota>,
        peer: &Peer,
        answers: &[(u64, u64)],
        work: impl FnOnce(&Quota) -> T + Send + 'static,
    ) -> (T, Vec<u64>) {
        let worker = {
            let quota = quota.clone();
            std::thread::spawn(move || work(&quota))
        };
        let mut wanted = Vec::new();
        for (granted, left) in answers {
            let FromWorker::MemoryWanted { device, serial, bytes } = peer.next() else { panic!("a request") };
            wanted.push(bytes);
            quota.granted(device, serial, *granted, *left);
        }
        (worker.join().unwrap(), wanted)
    }

    #[test]
    fn worker_asks_only_for_what_it_lacks() {
        let (quota, peer) = quota(1);
        assert_eq!(answered(&quota, &peer, &[(100, 0)], |q| q.take(0, 60)), (Ok(()), vec![60]));
        assert_eq!(quota.take(0, 40), Ok(()), "granted already");
        assert!(peer.silent());
        quota.give(0, 30);
        assert_eq!(answered(&quota, &peer, &[(20, 0)], |q| q.take(0, 50)), (Ok(()), vec![20]));
        assert_eq!(quota.used(), 120);
    }

    #[test]
    fn refused_request_counts_nothing() {
        let (quota, peer) = quota(2);
        let (refused, _) = answered(&quota, &peer, &[(9, 0)], |q| q.take(1, 10));
        assert_eq!((refused, quota.used()), (Err(status::OUT_OF_MEMORY), 0));
        assert_eq!(quota.take(1, 9), Ok(()), "the part that was granted stays");
        assert_eq!(quota.take(2, 1), Err(status::INVALID_VALUE), "no such device");
    }

    #[test]
    fn recall_returns_what_no_allocation_uses() {
        let (quota, peer) = quota(2);
        answered(&quota, &peer, &[(100, 0)], |q| q.take(0, 70)).0.unwrap();
        quota.overdraw(1, 50);
        quota.recall();
        assert_eq!(peer.next(), FromWorker::MemoryReturned { device: 0, bytes: 30 });
        assert_eq!(peer.next(), FromWorker::MemoryReturned { device: 1, bytes: 0 });
        let (taken, wanted) = answered(&quota, &peer, &[(5, 0)], |q| q.take(0, 5));
        assert_eq!((taken, wanted), (Ok(()), vec![5]), "the returned bytes are no longer granted");
        let (taken, wanted) = answered(&quota, &peer, &[(51, 0)], |q| q.take(1, 1));
        assert_eq!((taken, wanted), (Ok(()), vec![51]), "the overdraft must be granted, too");
    }

    #[test]
    fn bytes_left_are_ungranted_or_unused() {
        let (quota, peer) = quota(1);
        answered(&quota, &peer, &[(100, 7)], |q| q.take(0, 70)).0.unwrap();
        assert_eq!(answered(&quota, &peer, &[(0, 1000)], |q| q.left(0)), (1030, vec![0]));
        assert_eq!(quota.left(1), 0, "no such device");
    }

    #[test]
    fn new_supervisor_gets_only_an_open_request_again() {
        let (quota, peer) = quota(1);
        quota.ask_again();
        assert!(peer.silent());
        let taking = {
            let quota = quota.clone();
            std::thread::spawn(move || quota.take(0, 10))
        };
        let first = peer.next();
        quota.ask_again();
        assert_eq!(peer.next(), first);
        // Both supervisors answer: both grants count.
        quota.granted(0, 1, 10, 0);
        quota.granted(0, 1, 10, 0);
        assert_eq!(taking.join().unwrap(), Ok(()));
        assert_eq!(quota.take(0, 10), Ok(()));
        quota.ask_again();
        assert!(peer.silent());
    }
}
