//! How much device memory this worker may use. The lease's processes share one limit, which the supervisor counts: it grants
//! memory in chunks, and a worker asks when its own do not suffice. No limit is decided here.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use gpusession_proto::supervise::{DeviceLimit, FromWorker};

use crate::driver::{Status, status};
use crate::supervise::Supervisor;

#[derive(Clone, Copy, Default)]
struct Device {
    granted: u64,
    used: u64,
    /// What the supervisor said last about the lease.
    left: u64,
}

#[derive(Default)]
struct State {
    devices: Vec<Device>,
    /// Serial number of the last request, and of the last answer.
    asked: u64,
    answered: u64,
    /// What the last answer granted.
    bytes: u64,
    /// The last request.
    request: Option<FromWorker>,
}

/// See the module.
pub struct Quota {
    /// Who grants.
    pub supervisor: Arc<Supervisor>,
    state: Mutex<State>,
    answer: Condvar,
    /// One request at a time.
    asking: Mutex<()>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Quota {
    /// Nothing granted yet.
    pub fn new(supervisor: Arc<Supervisor>, devices: &[DeviceLimit]) -> Self {
        let state = State { devices: vec![Device::default(); devices.len()], ..State::default() };
        Self { supervisor, state: Mutex::new(state), answer: Condvar::new(), asking: Mutex::default() }
    }

    /// Counts `bytes` more on a device, or says that the lease has not that much.
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

    /// Asks the supervisor and waits for what it grants.
    fn ask(&self, device: usize, bytes: u64) -> u64 {
        let mut state = lock(&self.state);
        state.asked += 1;
        let serial = state.asked;
        // Under the lock: what is given back meanwhile is told before or after, never between the numbers and the request.
        let request = FromWorker::MemoryWanted { device: device as u32, serial, bytes };
        self.supervisor.tell(&request);
        state.request = Some(request);
        while state.answered < serial {
            state = self.answer.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.bytes
    }

    /// Takes memory off the count.
    pub fn give(&self, device: u32, bytes: u64) {
        if let Some(d) = lock(&self.state).devices.get_mut(device as usize) {
            d.used = d.used.saturating_sub(bytes);
        }
    }

    /// Counts memory that is in use already, whether it was granted or not.
    pub fn overdraw(&self, device: u32, bytes: u64) {
        if let Some(d) = lock(&self.state).devices.get_mut(device as usize) {
            d.used = d.used.saturating_add(bytes);
        }
    }

    /// Bytes in use on all devices.
    pub fn used(&self) -> u64 {
        lock(&self.state).devices.iter().map(|d| d.used).fold(0, u64::saturating_add)
    }

    /// Bytes of the lease's share that no process uses.
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

    /// The supervisor's answer.
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

    /// Another supervisor answers from now on. One that got the request and ended is not to leave a thread waiting; should both
    /// answer, both grants count.
    pub fn ask_again(&self) {
        let state = lock(&self.state);
        if let Some(request) = state.request.as_ref().filter(|_| state.answered < state.asked) {
            self.supervisor.tell(request);
        }
    }

    /// Gives back what is not in use.
    pub fn recall(&self) {
        let mut state = lock(&self.state);
        for (device, d) in state.devices.iter_mut().enumerate() {
            let bytes = d.granted.saturating_sub(d.used);
            d.granted -= bytes;
            self.supervisor.tell(&FromWorker::MemoryReturned { device: device as u32, bytes });
        }
    }
}
