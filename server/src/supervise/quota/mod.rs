//! The ledger of one lease: the memory that the lease's processes hold. A state machine without
//! processes.
//!
//! The sum over all processes is counted here, not by the workers. A worker is granted memory in
//! chunks. When a request does not fit, the lease's other workers are first asked to return granted
//! memory that they do not use. A process counts with the driver's reading where that is larger
//! than its grants.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use gpusession_proto::supervise::DeviceLimit;

use super::stock::WorkerId;
use crate::clock::Moment;

/// Unit of grants, in bytes: larger than most requests, so that small allocations seldom ask.
const CHUNK: u64 = 64 << 20;
/// Time to answer a recall; a worker without an answer keeps what it holds.
const RECALL_TIMEOUT: Duration = Duration::from_secs(1);
/// Readings until returned memory counts as gone: the first may be older than the return.
const SETTLED: u8 = 2;
/// Time without a reading after which only grants count. Readings come each second.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(4);
/// Bytes by which unrequested memory may exceed a lease's limit on a device.
///
/// Workers never request the memory for code of modules, stacks of kernels and the driver itself.
/// This allowance is for the whole lease, in addition to [`UNASKED_EACH`].
pub const UNASKED: u64 = 1 << 30;
/// Bytes of such memory that each process may hold in addition to [`UNASKED`].
pub const UNASKED_EACH: u64 = 256 << 20;

/// Message of the ledger to a worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LedgerMessage {
    /// Answers a request for memory.
    Granted {
        /// Worker that sent the request.
        worker: WorkerId,
        /// Index of the device in the lease.
        device: u32,
        /// Serial number of the request.
        serial: u64,
        /// Granted bytes; 0: refused.
        bytes: u64,
        /// Bytes that remain ungranted.
        left: u64,
    },
    /// Asks for the return of unused memory.
    Recall {
        /// Worker that is asked.
        worker: WorkerId,
    },
}

#[derive(Debug, Clone, Copy, Default)]
struct Held {
    granted: u64,
    real: u64,
    peak: u64,
    /// Largest grants since the last reading, and between the two before it.
    ///
    /// Such memory may still be in a reading after its return.
    high: [u64; 2],
}

impl Held {
    fn grant(&mut self, granted: u64) {
        self.high[0] = self.high[0].max(self.granted).max(granted);
        self.granted = granted;
    }

    /// Returns the returned bytes that the last reading may still contain.
    fn unsettled(&self) -> u64 {
        self.high[0].max(self.high[1]).saturating_sub(self.granted)
    }
}

#[derive(Debug)]
struct Asking {
    worker: WorkerId,
    device: usize,
    serial: u64,
    bytes: u64,
    awaiting: BTreeSet<WorkerId>,
    until: Moment,
    /// Readings for which it still waits, once the others have answered.
    readings: u8,
}

/// Account of a lease's memory; see the module.
#[derive(Debug)]
pub struct Ledger {
    devices: Vec<DeviceLimit>,
    /// Most bytes to grant on each device. A lease of a whole device has no limit, but the card has
    /// a size.
    most: Vec<u64>,
    held: BTreeMap<WorkerId, Vec<Held>>,
    asking: Vec<Asking>,
    read_at: Option<Moment>,
    /// Whether the next round of readings may be older than [`SETTLE_TIMEOUT`]. It then counts for
    /// nothing, since it may contain memory that was returned long before.
    late: bool,
    /// Most bytes that all processes held at one time, over all devices.
    peak: u64,
}

impl Ledger {
    /// Creates a ledger without processes.
    pub fn new(devices: Vec<DeviceLimit>) -> Self {
        let most = devices.iter().map(|d| d.memory_bytes).collect();
        Self { devices, most, held: BTreeMap::new(), asking: Vec::new(), read_at: None, late: false, peak: 0 }
    }

    /// Bounds grants on each device by the card's memory, which `has` returns for a UUID.
    pub fn of_cards(self, has: impl Fn(&[u8; 16]) -> Option<u64>) -> Self {
        let has = self.devices.iter().map(|d| has(&d.uuid).map_or(d.memory_bytes, |m| m.min(d.memory_bytes)));
        Self { most: has.collect(), ..self }
    }

    /// Starts from an earlier peak, in bytes.
    pub fn with_peak(self, peak: u64) -> Self {
        Self { peak, ..self }
    }

    /// Returns the lease's devices and limits.
    pub fn devices(&self) -> &[DeviceLimit] {
        &self.devices
    }

    /// Counts a worker and its context from now on.
    pub fn admit(&mut self, worker: WorkerId) {
        self.held.entry(worker).or_insert_with(|| vec![Held::default(); self.devices.len()]);
        self.mark_all();
    }

    fn mark_all(&mut self) {
        // Returned memory counts for its next holder, and not twice.
        let on = |(device, limit): (usize, &DeviceLimit)| {
            let settled = |held: &Vec<Held>| Self::settled(limit, &held[device]);
            self.held.values().map(settled).fold(0, u64::saturating_add)
        };
        let all = self.devices.iter().enumerate().map(on).fold(0, u64::saturating_add);
        self.peak = self.peak.max(all);
    }

    /// Returns a worker's granted bytes and peak by GPU, for [`Ledger::restore`].
    pub fn held(&self, worker: &WorkerId) -> Vec<([u8; 16], u64, u64)> {
        let held = self.held.get(worker).into_iter().flatten();
        self.devices.iter().zip(held).map(|(device, held)| (device.uuid, held.granted, held.peak)).collect()
    }

    /// Counts a worker again that an earlier server counted.
    pub fn restore(&mut self, worker: WorkerId, held: &[([u8; 16], u64, u64)]) {
        self.admit(worker);
        for (device, now) in self.devices.iter().zip(self.held.get_mut(&worker).into_iter().flatten()) {
            if let Some((_, granted, peak)) = held.iter().find(|(uuid, ..)| *uuid == device.uuid) {
                now.grant(*granted);
                now.peak = *peak;
            }
        }
    }

    fn charged(limit: &DeviceLimit, held: &Held) -> u64 {
        held.granted.saturating_add(limit.context_bytes).max(held.real)
    }

    /// Returns the bytes that count for one worker's process on one device.
    pub fn used_by(&self, worker: &WorkerId, device: usize) -> u64 {
        match (self.held.get(worker).and_then(|h| h.get(device)), self.devices.get(device)) {
            (Some(held), Some(limit)) => Self::charged(limit, held),
            _ => 0,
        }
    }

    /// Returns the bytes of a process that its worker was never granted, without its context.
    pub fn unasked(&self, worker: &WorkerId, device: usize) -> u64 {
        match (self.held.get(worker).and_then(|h| h.get(device)), self.devices.get(device)) {
            (Some(held), Some(limit)) => Self::beyond(limit, held),
            _ => 0,
        }
    }

    /// Returns the bytes of a process beyond its grants, whenever the driver was read.
    fn beyond(limit: &DeviceLimit, held: &Held) -> u64 {
        let granted = held.granted.saturating_add(held.unsettled());
        held.real.saturating_sub(granted.saturating_add(limit.context_bytes))
    }

    /// Returns the peak of a worker's process over all devices, in bytes.
    pub fn peak(&self, worker: &WorkerId) -> u64 {
        self.held.get(worker).map_or(0, |h| h.iter().map(|h| h.peak).fold(0, u64::saturating_add))
    }

    /// Returns the bytes that count for a process without the memory that it has returned.
    fn settled(limit: &DeviceLimit, held: &Held) -> u64 {
        held.granted.saturating_add(limit.context_bytes).saturating_add(Self::beyond(limit, held))
    }

    /// Returns the most bytes that all processes held at one time, over all devices.
    ///
    /// Only this server's time counts, unless [`Ledger::with_peak`] supplied an earlier peak.
    pub fn peak_of_all(&self) -> u64 {
        self.peak
    }

    /// Returns the bytes of all processes on one device.
    pub fn used(&self, device: usize) -> u64 {
        self.held.keys().map(|w| self.used_by(w, device)).fold(0, u64::saturating_add)
    }

    /// Returns how many more programs have room for their contexts on every device.
    pub fn contexts_left(&self) -> usize {
        let left = |(at, limit): (usize, &DeviceLimit)| self.left(at).checked_div(limit.context_bytes);
        let fewest = self.devices.iter().enumerate().filter_map(left).min();
        fewest.map_or(usize::MAX, |n| usize::try_from(n).unwrap_or(usize::MAX))
    }

    /// Asks every worker with grants to return unused memory.
    pub fn recall(&self) -> Vec<LedgerMessage> {
        let has = |held: &Vec<Held>| held.iter().any(|h| h.granted > 0);
        let asked = self.held.iter().filter(|(_, held)| has(held));
        asked.map(|(worker, _)| LedgerMessage::Recall { worker: *worker }).collect()
    }

    fn left(&self, device: usize) -> u64 {
        self.devices.get(device).map_or(0, |d| d.memory_bytes.saturating_sub(self.used(device)))
    }

    fn marked(&mut self, worker: &WorkerId, device: usize) {
        let now = self.used_by(worker, device);
        if let Some(held) = self.held.get_mut(worker).and_then(|h| h.get_mut(device)) {
            held.peak = held.peak.max(now);
        }
        self.mark_all();
    }

    /// Handles a worker's request for `bytes` more; 0 asks how much is left after a recall.
    pub fn ask(
        &mut self,
        worker: WorkerId,
        device: u32,
        serial: u64,
        bytes: u64,
        now: Moment,
    ) -> Vec<LedgerMessage> {
        let at = device as usize;
        if !self.held.contains_key(&worker) || at >= self.devices.len() {
            return vec![LedgerMessage::Granted { worker, device, serial, bytes: 0, left: 0 }];
        }
        // A worker has one request at a time, so that their number bounds the waiting requests.
        // Only a worker of an earlier server repeats a request; the waiting one answers both.
        if let Some(waits) = self.asking.iter().find(|a| a.worker == worker) {
            if waits.serial == serial {
                return Vec::new();
            }
            return vec![LedgerMessage::Granted { worker, device, serial, bytes: 0, left: self.left(at) }];
        }
        let others: BTreeSet<WorkerId> = self
            .held
            .iter()
            .filter(|(id, held)| **id != worker && held[at].granted > 0)
            .map(|(id, _)| *id)
            .collect();
        let fits = bytes > 0 && self.fits(&worker, at, bytes);
        let asking = Asking {
            worker,
            device: at,
            serial,
            bytes,
            awaiting: others.clone(),
            until: now + RECALL_TIMEOUT,
            readings: SETTLED,
        };
        if fits || others.is_empty() && !self.may_come_to_fit(&asking) {
            return vec![self.answer(worker, at, serial, bytes, true)];
        }
        // A worker that owes an answer to an earlier recall of this device answers all waiting
        // requests with it.
        let owes = |id: &WorkerId| self.asking.iter().any(|a| a.device == at && a.awaiting.contains(id));
        let recalled = others.iter().filter(|id| !owes(id));
        let says = recalled.map(|id| LedgerMessage::Recall { worker: *id }).collect();
        self.asking.push(asking);
        says
    }

    /// Returns `true` if only returned memory, which the last readings still contain, is in the
    /// way.
    fn may_come_to_fit(&self, asking: &Asking) -> bool {
        let Some(limit) = self.devices.get(asking.device) else { return false };
        let settling = self.held.values().any(|held| held[asking.device].unsettled() > 0);
        let granted = |held: &Vec<Held>| held[asking.device].granted.saturating_add(limit.context_bytes);
        let sum = self.held.values().map(granted).fold(asking.bytes, u64::saturating_add);
        asking.bytes > 0
            && asking.readings > 0
            && settling
            && sum <= limit.memory_bytes
            && self.card_has(asking.device, asking.bytes)
    }

    /// Returns `true` if the card has the granted bytes and `bytes` more.
    fn card_has(&self, device: usize, bytes: u64) -> bool {
        let granted = self.held.values().map(|held| held[device].granted);
        self.most.get(device).is_some_and(|most| granted.fold(bytes, u64::saturating_add) <= *most)
    }

    /// Returns `true` if the grant keeps the sum within the limit.
    ///
    /// Memory that the process holds beyond its grants is covered by the new grant first.
    fn fits(&self, worker: &WorkerId, device: usize, bytes: u64) -> bool {
        let Some(limit) = self.devices.get(device) else { return false };
        let Some(held) = self.held.get(worker).and_then(|h| h.get(device)) else { return false };
        let more = Held { granted: held.granted.saturating_add(bytes), ..*held };
        let others = self.held.keys().filter(|id| *id != worker).map(|id| self.used_by(id, device));
        let sum = others.fold(Self::charged(limit, &more), u64::saturating_add);
        sum <= limit.memory_bytes && self.card_has(device, bytes)
    }

    fn answer(
        &mut self,
        worker: WorkerId,
        device: usize,
        serial: u64,
        bytes: u64,
        chunks: bool,
    ) -> LedgerMessage {
        let chunk = bytes.checked_next_multiple_of(CHUNK).unwrap_or(bytes);
        let granted = if bytes == 0 {
            0
        } else if chunks && self.fits(&worker, device, chunk) {
            chunk
        } else if self.fits(&worker, device, bytes) {
            bytes
        } else {
            0
        };
        if let Some(held) = self.held.get_mut(&worker).and_then(|h| h.get_mut(device)) {
            held.grant(held.granted.saturating_add(granted));
        }
        self.marked(&worker, device);
        LedgerMessage::Granted {
            worker,
            device: device as u32,
            serial,
            bytes: granted,
            left: self.left(device),
        }
    }

    /// Handles the return of memory. An answer to a recall is a return, even of 0 bytes.
    pub fn returned(&mut self, worker: &WorkerId, device: u32, bytes: u64) -> Vec<LedgerMessage> {
        if let Some(held) = self.held.get_mut(worker).and_then(|h| h.get_mut(device as usize)) {
            held.grant(held.granted.saturating_sub(bytes));
        }
        for asking in self.asking.iter_mut().filter(|a| a.device == device as usize) {
            asking.awaiting.remove(worker);
        }
        self.answer_requests()
    }

    /// Removes a worker whose process has exited, and its memory.
    pub fn on_exit(&mut self, worker: &WorkerId) -> Vec<LedgerMessage> {
        self.held.remove(worker);
        self.asking.retain(|a| a.worker != *worker);
        for asking in &mut self.asking {
            asking.awaiting.remove(worker);
        }
        self.answer_requests()
    }

    /// Answers requests that have waited too long for other workers or for readings.
    pub fn tick(&mut self, now: Moment) -> Vec<LedgerMessage> {
        if self.read_at.is_some_and(|at| at + SETTLE_TIMEOUT <= now) {
            (self.read_at, self.late) = (None, true);
            for held in self.held.values_mut() {
                for (limit, held) in self.devices.iter().zip(held) {
                    held.real = held.real.min(held.granted.saturating_add(limit.context_bytes));
                    held.high = [0; 2];
                }
            }
        }
        for asking in self.asking.iter_mut().filter(|a| a.until <= now) {
            asking.awaiting.clear();
            if asking.until + SETTLE_TIMEOUT <= now {
                asking.readings = 0;
            }
        }
        self.answer_requests()
    }

    fn answer_requests(&mut self) -> Vec<LedgerMessage> {
        let mut says = Vec::new();
        for asking in std::mem::take(&mut self.asking) {
            let fits = self.fits(&asking.worker, asking.device, asking.bytes);
            if asking.awaiting.is_empty() && (fits || !self.may_come_to_fit(&asking)) {
                // Memory is short, so grant exactly the request.
                says.push(self.answer(asking.worker, asking.device, asking.serial, asking.bytes, false));
            } else {
                self.asking.push(asking);
            }
        }
        says
    }

    /// Records the driver's reading of a process on a device.
    pub fn reading(&mut self, worker: &WorkerId, device: usize, bytes: u64) {
        if self.late {
            return;
        }
        if let Some(held) = self.held.get_mut(worker).and_then(|h| h.get_mut(device)) {
            held.real = bytes;
        }
        self.marked(worker, device);
    }

    /// Records that a round of readings is complete.
    pub fn all_read(&mut self, now: Moment) -> Vec<LedgerMessage> {
        (self.read_at, self.late) = (Some(now), false);
        for held in self.held.values_mut().flatten() {
            held.high = [held.granted, held.high[0]];
        }
        for asking in self.asking.iter_mut().filter(|a| a.awaiting.is_empty()) {
            asking.readings = asking.readings.saturating_sub(1);
        }
        self.answer_requests()
    }

    /// Returns workers to stop, with their unrequested bytes, if the lease exceeds limit and
    /// allowances.
    ///
    /// The processes with the most memory beyond their grants go first. A worker that is stopping
    /// already (not `stays`) leaves its memory to the others.
    pub fn offenders(&self, stays: impl Fn(&WorkerId) -> bool) -> Vec<(WorkerId, u64)> {
        let mut out: Vec<(WorkerId, u64)> = Vec::new();
        for (device, limit) in self.devices.iter().enumerate() {
            let unasked = |held: &Vec<Held>| Self::beyond(limit, &held[device]);
            let ended = |id: &WorkerId| out.iter().any(|(ended, _)| ended == id);
            let mut staying: Vec<_> = self
                .held
                .iter()
                .filter(|(id, _)| stays(id) && !ended(id))
                .map(|(id, held)| (*id, held))
                .collect();
            staying.sort_by_key(|(_, held)| unasked(held));
            loop {
                let used = staying.iter().map(|(_, held)| Self::settled(limit, &held[device]));
                let may = staying.iter().map(|(_, held)| unasked(held).min(UNASKED_EACH));
                let most = may.fold(limit.memory_bytes.saturating_add(UNASKED), u64::saturating_add);
                if used.fold(0, u64::saturating_add) <= most {
                    break;
                }
                match staying.pop() {
                    Some((id, held)) if unasked(held) > 0 => out.push((id, unasked(held))),
                    _ => break,
                }
            }
        }
        out
    }
}

#[cfg(test)]
mod tests;
