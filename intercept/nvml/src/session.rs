//! The process's knowledge of its GPUs.
//!
//! It holds the devices that initialization found, their last readings, and the server's answers to
//! questions about them.

use std::collections::HashMap;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use gpusession_link::grant::{self, Refused};
use gpusession_nvml_calls::{Call, Class, Refresh, calls};
use gpusession_proto::grant::Denial;
use gpusession_proto::readings::{Device, MAX_BYTES, Query, View, tell_apart};

use crate::status::{self, Result, Status};
use crate::trace;

/// Maximum age of a reading.
const LIVE_TTL: Duration = Duration::from_millis(100);
/// Maximum age of a fact, because the server may restart with another driver.
const STATIC_TTL: Duration = Duration::from_secs(60);
/// Maximum number of questions in a request, and of bytes of their inputs.
///
/// Both stay below the daemon's bounds for unknown callers.
const BATCH: usize = 128;
const BATCH_INPUT: usize = 4096;

/// Function that asks the daemon; tests use another one.
type Ask = fn(Vec<Query>) -> std::result::Result<View, Refused>;

/// State of the library in this process.
pub struct Session {
    ask: Ask,
    users: u32,
    /// Devices that initialization found; a handle's number is the index.
    found: Vec<Found>,
    view: Vec<Device>,
    seen: Option<Instant>,
    answers: HashMap<Query, (Instant, Result<Vec<u8>>)>,
    /// By handle.
    pub events: HashMap<usize, crate::event_set::Set>,
}

/// Identity of a device at initialization.
#[derive(Clone)]
struct Found {
    /// UUID of the GPU, as its server knows it.
    uuid: [u8; 16],
    /// Part of the identity, because two leases may be shares of one GPU.
    lease: String,
    /// UUID for the program, and offset of the PCI domain.
    ///
    /// They distinguish the program's devices, and equal those of our `libcuda.so.1`.
    uuid_and_domain_offset: ([u8; 16], u32),
}

impl Found {
    fn is(&self, device: &Device) -> bool {
        self.uuid == device.uuid && self.lease == device.lease
    }
}

struct Shared {
    process: u32,
    session: Mutex<Session>,
}

/// Locks the state of this process.
///
/// A child of `fork` inherits its parent's state, unless another thread of the parent was using it.
pub fn session() -> MutexGuard<'static, Session> {
    static SHARED: AtomicPtr<Shared> = AtomicPtr::new(std::ptr::null_mut());
    let process = std::process::id();
    loop {
        let current = SHARED.load(Ordering::Acquire);
        // SAFETY: the pointer is null or comes from `Box::into_raw`; a published box is never
        // freed.
        let shared = unsafe { current.as_ref() };
        if let Some(shared) = shared
            && shared.process == process
        {
            return shared.session.lock().unwrap_or_else(PoisonError::into_inner);
        }
        let inherited =
            shared.and_then(|parent| parent.session.try_lock().ok()).map(|parent| parent.inherit());
        let session = Mutex::new(inherited.unwrap_or_else(|| Session::new(grant::readings)));
        let fresh = Box::into_raw(Box::new(Shared { process, session }));
        if SHARED.compare_exchange(current, fresh, Ordering::AcqRel, Ordering::Acquire).is_err() {
            // SAFETY: another thread was quicker, so this box was never published.
            drop(unsafe { Box::from_raw(fresh) });
        }
    }
}

fn denied(refused: &Refused) -> Status {
    trace::why(&refused.reason);
    match refused.denial {
        Denial::Quota => status::NO_PERMISSION,
        Denial::OutOfMemory => status::MEMORY,
        Denial::ProtocolMismatch => status::LIB_RM_VERSION_MISMATCH,
        Denial::NoDevice | Denial::NotReady => status::DRIVER_NOT_LOADED,
    }
}

impl Session {
    /// Returns the state before `nvmlInit`.
    pub fn new(ask: Ask) -> Self {
        Self {
            ask,
            users: 0,
            found: Vec::new(),
            view: Vec::new(),
            seen: None,
            answers: HashMap::new(),
            events: HashMap::new(),
        }
    }

    fn inherit(&self) -> Self {
        Self { users: self.users, found: self.found.clone(), view: self.view.clone(), ..Self::new(self.ask) }
    }

    /// `nvmlInit`; the library counts the calls.
    pub fn init(&mut self) -> Result {
        if self.users == 0 {
            let view = (self.ask)(Vec::new()).map_err(|refused| denied(&refused))?;
            if view.devices.is_empty() {
                trace::why("the lease has no GPUs");
                return Err(status::DRIVER_NOT_LOADED);
            }
            let distinct = tell_apart(view.devices.iter().map(|d| (d.uuid, d.pci_address.as_str())));
            let found = |(d, uuid_and_domain_offset): (&Device, _)| Found {
                uuid: d.uuid,
                lease: d.lease.clone(),
                uuid_and_domain_offset,
            };
            self.found = view.devices.iter().zip(distinct).map(found).collect();
            self.answers.clear();
            self.take(view.devices);
        }
        self.users = self.users.checked_add(1).ok_or(status::UNKNOWN)?;
        Ok(())
    }

    /// `nvmlShutdown`.
    pub fn shutdown(&mut self) -> Result {
        self.users = self.users.checked_sub(1).ok_or(status::UNINITIALIZED)?;
        if self.users == 0 {
            self.found.clear();
            self.view.clear();
            self.answers.clear();
            self.events.clear();
        }
        Ok(())
    }

    /// Returns the number of devices; an error before `nvmlInit`.
    pub fn count(&self) -> Result<usize> {
        if self.users == 0 { Err(status::UNINITIALIZED) } else { Ok(self.found.len()) }
    }

    fn take(&mut self, devices: Vec<Device>) {
        self.view = devices;
        self.seen = Some(Instant::now());
    }

    fn found(&self, device: usize) -> Result<&Found> {
        self.count()?;
        self.found.get(device).ok_or(status::INVALID_ARGUMENT)
    }

    /// Returns the UUID of a device, as its server knows it.
    pub fn uuid(&self, device: usize) -> Result<[u8; 16]> {
        Ok(self.found(device)?.uuid)
    }

    /// Returns the UUID of a device for the program, and the offset of its PCI domain.
    pub fn uuid_and_domain_offset(&self, device: usize) -> Result<([u8; 16], u32)> {
        Ok(self.found(device)?.uuid_and_domain_offset)
    }

    /// Returns a device's present readings; `GPU_IS_LOST` if the lease does not have it any more.
    pub fn device(&mut self, device: usize) -> Result<&Device> {
        let found = self.found(device)?.clone();
        if self.seen.is_none_or(|seen| seen.elapsed() >= LIVE_TTL) {
            let view = (self.ask)(Vec::new()).map_err(lost)?;
            self.take(view.devices);
        }
        self.view.iter().find(|d| found.is(d)).ok_or(status::GPU_IS_LOST)
    }

    /// Returns a device's last readings, for values that do not change.
    pub fn known(&self, device: usize) -> Result<&Device> {
        let found = self.found(device)?;
        self.view.iter().find(|d| found.is(d)).ok_or(status::GPU_IS_LOST)
    }

    /// Returns the answers to a call with each of these inputs.
    ///
    /// A request to the server also takes all questions of the same kind that programs usually ask
    /// next.
    pub fn answer(
        &mut self,
        device: usize,
        call: &'static Call,
        inputs: &[Vec<u8>],
    ) -> Result<Vec<Result<Vec<u8>>>> {
        let uuid = self.uuid(device)?;
        let query =
            |call: &Call, input: &[u8]| Query { device: uuid, call: call.name.into(), input: input.to_vec() };
        let Class::Forward(refresh, _) = &call.class else { return Err(status::UNKNOWN) };
        let life = if *refresh == Refresh::Once { STATIC_TTL } else { LIVE_TTL };
        let wanted: Vec<Query> = inputs.iter().map(|input| query(call, input)).collect();
        let fresh = |(at, _): &(Instant, Result<Vec<u8>>)| at.elapsed() < life;
        let mut missing: Vec<(&Call, Query)> = wanted
            .iter()
            .filter(|q| !self.answers.get(*q).is_some_and(fresh))
            .map(|q| (call, q.clone()))
            .collect();
        // Of the links' calls, only the usual ones: a field may be anything.
        let usual = || {
            let ahead = call.ahead();
            *refresh != Refresh::Link || missing.iter().any(|(_, q)| ahead.contains(&q.input))
        };
        if !missing.is_empty() && *refresh != Refresh::Alone && usual() {
            for other in calls().iter().filter(|c| matches!(&c.class, Class::Forward(r, _) if r == refresh)) {
                for input in other.ahead() {
                    let ahead = query(other, &input);
                    if !self.answers.get(&ahead).is_some_and(fresh)
                        && !missing.iter().any(|(_, q)| *q == ahead)
                    {
                        missing.push((other, ahead));
                    }
                }
            }
        }
        if !missing.is_empty() {
            // The wanted questions go first, in as many requests as they need. Others that do not
            // fit wait until a call asks them.
            let asked = missing.iter().take_while(|(_, q)| wanted.contains(q)).count();
            let mut done = 0;
            while done < asked {
                done += self.fetch(&missing[done..])?;
            }
        }
        // Accepts answers of any age here, so that slow ones are not requested twice.
        let answers =
            wanted.iter().map(|q| self.answers.get(q).map_or(Err(status::UNKNOWN), |(_, a)| a.clone()));
        let answers = answers.collect();
        if self.answers.len() > 16 * BATCH {
            self.answers.retain(|_, (at, _)| at.elapsed() < LIVE_TTL);
        }
        Ok(answers)
    }

    /// Asks as many of these questions as fit into a request; returns their number.
    fn fetch(&mut self, questions: &[(&Call, Query)]) -> Result<usize> {
        let (mut inputs, mut outputs) = (0, 0);
        let batch: Vec<Query> = questions
            .iter()
            .take(BATCH)
            .take_while(|(call, query)| {
                inputs += query.input.len();
                outputs += call.output();
                inputs <= BATCH_INPUT && outputs <= MAX_BYTES
            })
            .map(|(_, query)| query.clone())
            .collect();
        let count = batch.len();
        let view = (self.ask)(batch.clone()).map_err(lost)?;
        if count == 0 || view.answers.len() != count {
            return Err(status::UNKNOWN);
        }
        let now = Instant::now();
        for (query, answer) in batch.into_iter().zip(view.answers) {
            let answer = if answer.status == 0 { Ok(answer.output) } else { Err(answer.status) };
            self.answers.insert(query, (now, answer));
        }
        self.take(view.devices);
        Ok(count)
    }
}

/// Prints why a lease does not answer any more, and returns the status.
fn lost(refused: Refused) -> Status {
    trace::why(&refused.reason);
    status::GPU_IS_LOST
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpusession_nvml_calls::find;
    use gpusession_proto::readings::Answer;
    use std::cell::RefCell;

    thread_local! {
        static ASKED: RefCell<Vec<Vec<Query>>> = const { RefCell::new(Vec::new()) };
    }

    fn device(n: u8) -> Device {
        Device {
            uuid: [n; 16],
            server: "gpu-a".into(),
            lease: "abcdefghijkl".into(),
            driver_version: "580.1".into(),
            nvml_version: "13.580.1".into(),
            cuda_version: 13000,
            name: "Card".into(),
            pci_address: "0000:01:00.0".into(),
            compute: (9, 0),
            memory_bytes: 1 << 30,
            used_bytes: 0,
            processes: vec![],
            faults: vec![],
        }
    }

    fn server(queries: Vec<Query>) -> std::result::Result<View, Refused> {
        ASKED.with_borrow_mut(|asked| asked.push(queries.clone()));
        let answers =
            queries.iter().map(|q| Answer { status: 0, output: q.call.clone().into_bytes() }).collect();
        Ok(View { devices: vec![device(1), device(2)], answers })
    }

    fn asked() -> Vec<Vec<Query>> {
        ASKED.take()
    }

    #[test]
    fn a_question_takes_its_like_along_and_no_other() {
        let mut session = Session::new(server);
        assert_eq!(session.count(), Err(status::UNINITIALIZED));
        session.init().unwrap();
        session.init().unwrap();
        assert_eq!((asked().len(), session.count()), (1, Ok(2)));
        let call = |name: &str| find(name).unwrap().1;
        let mut one =
            |name: &str, input: &[u8]| session.answer(1, call(name), &[input.to_vec()]).unwrap()[0].clone();
        assert_eq!(one("nvmlDeviceGetSerial", &[]), Ok(b"nvmlDeviceGetSerial".to_vec()));
        assert_eq!(one("nvmlDeviceGetVbiosVersion", &[]), Ok(b"nvmlDeviceGetVbiosVersion".to_vec()));
        let first = asked();
        assert_eq!(first.len(), 1, "one request for all facts");
        assert!(first[0].len() <= BATCH && first[0].iter().all(|q| q.device == [2; 16]));
        assert_eq!(first[0][0].call, "nvmlDeviceGetSerial");
        assert!(first[0].iter().all(|q| q.call != "nvmlDeviceGetPowerUsage"));
        assert_eq!(
            one("nvmlDeviceGetViolationStatus", &[0; 4]),
            Ok(b"nvmlDeviceGetViolationStatus".to_vec())
        );
        assert_eq!(asked()[0].len(), 1, "what is slow is asked alone");
        session.shutdown().unwrap();
        assert_eq!(session.count(), Ok(2));
        session.shutdown().unwrap();
        assert_eq!(session.shutdown(), Err(status::UNINITIALIZED));
    }

    #[test]
    fn a_walk_through_all_links_is_one_request() {
        let mut session = Session::new(server);
        session.init().unwrap();
        asked();
        let call = |name: &str| find(name).unwrap().1;
        let mut ask = |name: &str, input: &[u8]| session.answer(0, call(name), &[input.to_vec()]).unwrap();
        for link in 0..18u32 {
            let number = link.to_le_bytes();
            ask("nvmlDeviceGetNvLinkCapability", &[number, [0; 4]].concat());
            ask("nvmlDeviceGetFieldValues", &[165u32.to_le_bytes(), number].concat());
            ask("nvmlDeviceGetNvLinkRemotePciInfo_v2", &number);
        }
        let requests = asked();
        assert_eq!(requests.len(), 1);
        assert!(requests[0].len() <= BATCH);
        ask("nvmlDeviceGetFieldValues", &[1, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(asked()[0].len(), 1, "another field, of which most cards have no links");
    }

    #[test]
    fn parts_of_one_gpu_are_two_devices() {
        let parts = |_| {
            let part = |lease: &str, memory_bytes| Device { lease: lease.into(), memory_bytes, ..device(1) };
            Ok(View { devices: vec![part("a", 1 << 30), part("b", 2 << 30)], answers: vec![] })
        };
        let mut session = Session::new(parts);
        session.init().unwrap();
        let told = |session: &mut Session, n| {
            let (uuid, domain) = session.uuid_and_domain_offset(n).unwrap();
            (uuid[15], domain, session.device(n).unwrap().memory_bytes, session.uuid(n).unwrap())
        };
        assert_eq!(told(&mut session, 0), (1, 0, 1 << 30, [1; 16]));
        assert_eq!(told(&mut session, 1), (2, 1, 2 << 30, [1; 16]));
    }

    #[test]
    fn many_questions_take_several_requests() {
        let mut session = Session::new(server);
        session.init().unwrap();
        let call = find("nvmlDeviceGetFieldValues").unwrap().1;
        let inputs: Vec<Vec<u8>> = (1000..1300u64).map(|i| i.to_le_bytes().to_vec()).collect();
        asked();
        assert!(session.answer(0, call, &inputs).unwrap().iter().all(|a| a.is_ok()));
        let sizes: Vec<usize> = asked().iter().map(Vec::len).collect();
        assert_eq!(sizes, [128, 128, 44]);
    }

    #[test]
    fn every_refusal_has_its_status() {
        let refused = |denial| denied(&Refused { denial, reason: String::new() });
        assert_eq!(refused(Denial::NoDevice), status::DRIVER_NOT_LOADED);
        assert_eq!(refused(Denial::Quota), status::NO_PERMISSION);
        assert_eq!(refused(Denial::ProtocolMismatch), status::LIB_RM_VERSION_MISMATCH);
        let mut session = Session::new(|_| Err(Refused { denial: Denial::NotReady, reason: "later".into() }));
        assert_eq!(session.init(), Err(status::DRIVER_NOT_LOADED));
        assert_eq!(session.count(), Err(status::UNINITIALIZED));
    }
}
