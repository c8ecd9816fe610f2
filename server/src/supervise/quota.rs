//! What the processes of one lease use of its memory: one sum over all of them, counted here and not by workers. A state
//! machine without processes.
//!
//! A worker is granted memory in chunks. When a request does not fit, the lease's other workers are first asked to give back
//! what they were granted and do not use. What the driver says a process really has counts where it is more.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use gpusession_proto::supervise::DeviceLimit;

use super::stock::WorkerId;
use crate::clock::Moment;

/// Granted beyond what was asked for, so that small allocations ask seldom.
const CHUNK: u64 = 64 << 20;
/// A worker that does not answer a recall by then keeps what it has.
const RECALL_LIMIT: Duration = Duration::from_secs(1);
/// Readings until what a worker has given back is in none of them any more: the first may have been taken before.
const SETTLED: u8 = 2;
/// Readings come each second. Without any for so long, what workers were granted is all that is known.
const SETTLE_LIMIT: Duration = Duration::from_secs(4);
/// How far a lease may be over its limit on a device, by what processes have though their workers never asked for it: code of
/// modules, stacks of kernels, the driver's own. So much together, beside what is below of each.
pub const UNASKED: u64 = 1 << 30;
/// See [`UNASKED`].
pub const UNASKED_EACH: u64 = 256 << 20;

/// What to tell a worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Say {
    /// The answer to a request.
    Granted {
        /// Whose request.
        worker: WorkerId,
        /// Which device of the lease.
        device: u32,
        /// The request's number.
        serial: u64,
        /// Bytes, 0 for none.
        bytes: u64,
        /// What nobody was granted.
        left: u64,
    },
    /// Give back what is not in use.
    Recall {
        /// Who.
        worker: WorkerId,
    },
}

#[derive(Debug, Clone, Copy, Default)]
struct Held {
    granted: u64,
    real: u64,
    peak: u64,
    /// The most that was granted since the last reading, and between the two before: readings may still count it.
    high: [u64; 2],
}

impl Held {
    fn grant(&mut self, granted: u64) {
        self.high[0] = self.high[0].max(self.granted).max(granted);
        self.granted = granted;
    }

    /// What was given back and may be in the last reading.
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
    /// How many readings it waits for, after the others have answered.
    readings: u8,
}

/// See the module.
#[derive(Debug)]
pub struct Ledger {
    devices: Vec<DeviceLimit>,
    /// The most that is granted of each device: a lease of a whole one has no limit, but no card has more than it has.
    most: Vec<u64>,
    held: BTreeMap<WorkerId, Vec<Held>>,
    asking: Vec<Asking>,
    read_at: Option<Moment>,
    /// The most that all processes had at a time, on all devices together.
    peak: u64,
}

impl Ledger {
    /// Nobody uses anything yet.
    pub fn new(devices: Vec<DeviceLimit>) -> Self {
        let most = devices.iter().map(|d| d.memory_bytes).collect();
        Self { devices, most, held: BTreeMap::new(), asking: Vec::new(), read_at: None, peak: 0 }
    }

    /// Grants no more of each device than the card has, as `has` says by UUID.
    pub fn of_cards(self, has: impl Fn(&[u8; 16]) -> Option<u64>) -> Self {
        let has = self.devices.iter().map(|d| has(&d.uuid).map_or(d.memory_bytes, |m| m.min(d.memory_bytes)));
        Self { most: has.collect(), ..self }
    }

    /// Processes had so much at a time before.
    pub fn with_peak(self, peak: u64) -> Self {
        Self { peak, ..self }
    }

    /// The lease's devices and limits.
    pub fn devices(&self) -> &[DeviceLimit] {
        &self.devices
    }

    /// A worker serves a process from now on, whose context counts.
    pub fn admit(&mut self, worker: WorkerId) {
        self.held.entry(worker).or_insert_with(|| vec![Held::default(); self.devices.len()]);
        self.mark_all();
    }

    fn mark_all(&mut self) {
        // What was given back counts for whoever has it now, and not twice.
        let on = |(device, limit): (usize, &DeviceLimit)| {
            let settled = |held: &Vec<Held>| Self::settled(limit, &held[device]);
            self.held.values().map(settled).fold(0, u64::saturating_add)
        };
        let all = self.devices.iter().enumerate().map(on).fold(0, u64::saturating_add);
        self.peak = self.peak.max(all);
    }

    /// What a worker has, by GPU: granted, and the most that it had. For [`Ledger::restore`].
    pub fn held(&self, worker: &WorkerId) -> Vec<([u8; 16], u64, u64)> {
        let held = self.held.get(worker).into_iter().flatten();
        self.devices.iter().zip(held).map(|(device, held)| (device.uuid, held.granted, held.peak)).collect()
    }

    /// A worker that was counted by an earlier server.
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

    /// Bytes of one worker's process on one device.
    pub fn of(&self, worker: &WorkerId, device: usize) -> u64 {
        match (self.held.get(worker).and_then(|h| h.get(device)), self.devices.get(device)) {
            (Some(held), Some(limit)) => Self::charged(limit, held),
            _ => 0,
        }
    }

    /// How many of them it was never granted, its context aside.
    pub fn unasked(&self, worker: &WorkerId, device: usize) -> u64 {
        match (self.held.get(worker).and_then(|h| h.get(device)), self.devices.get(device)) {
            (Some(held), Some(limit)) => Self::beyond(limit, held),
            _ => 0,
        }
    }

    /// What its process has beyond its grants, whenever it was read.
    fn beyond(limit: &DeviceLimit, held: &Held) -> u64 {
        let granted = held.granted.saturating_add(held.unsettled());
        held.real.saturating_sub(granted.saturating_add(limit.context_bytes))
    }

    /// The most that a worker's process had on all devices together.
    pub fn peak(&self, worker: &WorkerId) -> u64 {
        self.held.get(worker).map_or(0, |h| h.iter().map(|h| h.peak).fold(0, u64::saturating_add))
    }

    /// What counts of a process without what it has given back.
    fn settled(limit: &DeviceLimit, held: &Held) -> u64 {
        held.granted.saturating_add(limit.context_bytes).saturating_add(Self::beyond(limit, held))
    }

    /// The most that all processes had at a time, on all devices together, since this server counts.
    pub fn peak_of_all(&self) -> u64 {
        self.peak
    }

    /// Bytes of all processes on one device.
    pub fn used(&self, device: usize) -> u64 {
        self.held.keys().map(|w| self.of(w, device)).fold(0, u64::saturating_add)
    }

    /// How many programs more have room for their contexts on every device.
    pub fn contexts_left(&self) -> usize {
        let left = |(at, limit): (usize, &DeviceLimit)| self.left(at).checked_div(limit.context_bytes);
        let fewest = self.devices.iter().enumerate().filter_map(left).min();
        fewest.map_or(usize::MAX, |n| usize::try_from(n).unwrap_or(usize::MAX))
    }

    /// Asks everybody for what they were granted and do not use.
    pub fn recall(&self) -> Vec<Say> {
        let has = |held: &Vec<Held>| held.iter().any(|h| h.granted > 0);
        let asked = self.held.iter().filter(|(_, held)| has(held));
        asked.map(|(worker, _)| Say::Recall { worker: *worker }).collect()
    }

    fn left(&self, device: usize) -> u64 {
        self.devices.get(device).map_or(0, |d| d.memory_bytes.saturating_sub(self.used(device)))
    }

    fn marked(&mut self, worker: &WorkerId, device: usize) {
        let now = self.of(worker, device);
        if let Some(held) = self.held.get_mut(worker).and_then(|h| h.get_mut(device)) {
            held.peak = held.peak.max(now);
        }
        self.mark_all();
    }

    /// A worker asks for `bytes` more, or with 0 for what is left.
    pub fn ask(&mut self, worker: WorkerId, device: u32, serial: u64, bytes: u64, now: Moment) -> Vec<Say> {
        let at = device as usize;
        if !self.held.contains_key(&worker) || at >= self.devices.len() {
            return vec![Say::Granted { worker, device, serial, bytes: 0, left: 0 }];
        }
        // A worker has one request at a time, so that what waits here is bounded by their number. Only a worker that was left by
        // another server says it again: the one that waits answers both.
        if let Some(waits) = self.asking.iter().find(|a| a.worker == worker) {
            if waits.serial == serial {
                return Vec::new();
            }
            return vec![Say::Granted { worker, device, serial, bytes: 0, left: self.left(at) }];
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
            until: now + RECALL_LIMIT,
            readings: SETTLED,
        };
        if fits || others.is_empty() && !self.may_come_to_fit(&asking) {
            return vec![self.answer(worker, at, serial, bytes, true)];
        }
        // Whoever owes an answer to an earlier recall of this device gives it to all that wait.
        let owes = |id: &WorkerId| self.asking.iter().any(|a| a.device == at && a.awaiting.contains(id));
        let recalled = others.iter().filter(|id| !owes(id));
        let says = recalled.map(|id| Say::Recall { worker: *id }).collect();
        self.asking.push(asking);
        says
    }

    /// Whether only what was given back, and is in the last readings still, is in the way.
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

    /// Whether a card has what was granted of it and `bytes` more.
    fn card_has(&self, device: usize, bytes: u64) -> bool {
        let granted = self.held.values().map(|held| held[device].granted);
        self.most.get(device).is_some_and(|most| granted.fold(bytes, u64::saturating_add) <= *most)
    }

    /// Whether a grant keeps the sum within the limit. What a process has beyond its grants is used up by the grant first.
    fn fits(&self, worker: &WorkerId, device: usize, bytes: u64) -> bool {
        let Some(limit) = self.devices.get(device) else { return false };
        let Some(held) = self.held.get(worker).and_then(|h| h.get(device)) else { return false };
        let more = Held { granted: held.granted.saturating_add(bytes), ..*held };
        let others = self.held.keys().filter(|id| *id != worker).map(|id| self.of(id, device));
        let sum = others.fold(Self::charged(limit, &more), u64::saturating_add);
        sum <= limit.memory_bytes && self.card_has(device, bytes)
    }

    fn answer(&mut self, worker: WorkerId, device: usize, serial: u64, bytes: u64, chunks: bool) -> Say {
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
        Say::Granted { worker, device: device as u32, serial, bytes: granted, left: self.left(device) }
    }

    /// A worker gives memory back; an answer to a recall does so even if it is nothing.
    pub fn returned(&mut self, worker: &WorkerId, device: u32, bytes: u64) -> Vec<Say> {
        if let Some(held) = self.held.get_mut(worker).and_then(|h| h.get_mut(device as usize)) {
            held.grant(held.granted.saturating_sub(bytes));
        }
        for asking in self.asking.iter_mut().filter(|a| a.device == device as usize) {
            asking.awaiting.remove(worker);
        }
        self.settle()
    }

    /// A worker's process is gone, and its memory with it.
    pub fn gone(&mut self, worker: &WorkerId) -> Vec<Say> {
        self.held.remove(worker);
        self.asking.retain(|a| a.worker != *worker);
        for asking in &mut self.asking {
            asking.awaiting.remove(worker);
        }
        self.settle()
    }

    /// Answers those whose wait for others took too long.
    pub fn tick(&mut self, now: Moment) -> Vec<Say> {
        if self.read_at.is_some_and(|at| at + SETTLE_LIMIT <= now) {
            self.read_at = None;
            for held in self.held.values_mut() {
                for (limit, held) in self.devices.iter().zip(held) {
                    held.real = held.real.min(held.granted.saturating_add(limit.context_bytes));
                    held.high = [0; 2];
                }
            }
        }
        for asking in self.asking.iter_mut().filter(|a| a.until <= now) {
            asking.awaiting.clear();
            if asking.until + SETTLE_LIMIT <= now {
                asking.readings = 0;
            }
        }
        self.settle()
    }

    fn settle(&mut self) -> Vec<Say> {
        let mut says = Vec::new();
        for asking in std::mem::take(&mut self.asking) {
            let fits = self.fits(&asking.worker, asking.device, asking.bytes);
            if asking.awaiting.is_empty() && (fits || !self.may_come_to_fit(&asking)) {
                // Memory is short: exactly what was asked for.
                says.push(self.answer(asking.worker, asking.device, asking.serial, asking.bytes, false));
            } else {
                self.asking.push(asking);
            }
        }
        says
    }

    /// What the driver says a process has on a device.
    pub fn reading(&mut self, worker: &WorkerId, device: usize, bytes: u64) {
        if let Some(held) = self.held.get_mut(worker).and_then(|h| h.get_mut(device)) {
            held.real = bytes;
        }
        self.marked(worker, device);
    }

    /// All processes have been read once more.
    pub fn all_read(&mut self, now: Moment) -> Vec<Say> {
        self.read_at = Some(now);
        for held in self.held.values_mut().flatten() {
            held.high = [held.granted, held.high[0]];
        }
        for asking in self.asking.iter_mut().filter(|a| a.awaiting.is_empty()) {
            asking.readings = asking.readings.saturating_sub(1);
        }
        self.settle()
    }

    /// Workers to be ended so that no lease is over its limit by more than it may be: those whose processes have the most that
    /// they never asked for, with how much that is. Whoever ends already (not `stays`) leaves its memory to the others.
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
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;
    const T: Moment = Duration::from_secs(1);

    fn ledger(limit: u64, context: u64) -> Ledger {
        Ledger::new(vec![DeviceLimit {
            uuid: [1; 16],
            memory_bytes: limit,
            sm_percent: 100,
            context_bytes: context,
        }])
    }

    fn granted(says: &[Say]) -> u64 {
        match says {
            [Say::Granted { bytes, .. }] => *bytes,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn four_processes_share_one_limit() {
        let mut l = ledger(1024 * MIB, 0);
        for n in 1..=4 {
            l.admit([n; 16]);
            assert_eq!(granted(&l.ask([n; 16], 0, 1, 200 * MIB, T)), 256 * MIB, "in chunks");
        }
        assert_eq!(l.used(0), 1024 * MIB);
        // The others give back what they do not use: then there is some.
        let says = l.ask([1; 16], 0, 2, 100 * MIB, T);
        assert_eq!(says.len(), 3);
        assert!(l.returned(&[2; 16], 0, 56 * MIB).is_empty());
        assert!(l.returned(&[3; 16], 0, 56 * MIB).is_empty());
        assert_eq!(granted(&l.returned(&[4; 16], 0, 0)), 100 * MIB, "exactly");
        assert_eq!(l.used(0), 1012 * MIB);
        // Nobody has more: refused, and what is left is told.
        l.ask([1; 16], 0, 3, 13 * MIB, T);
        l.returned(&[2; 16], 0, 0);
        l.returned(&[3; 16], 0, 0);
        assert_eq!(
            l.returned(&[4; 16], 0, 0),
            [Say::Granted { worker: [1; 16], device: 0, serial: 3, bytes: 0, left: 12 * MIB }]
        );
        // The end of a process frees all of it, and answers whoever waited for it.
        assert_eq!(l.ask([1; 16], 0, 4, 200 * MIB, T).len(), 3);
        l.returned(&[2; 16], 0, 0);
        l.returned(&[3; 16], 0, 0);
        assert_eq!(granted(&l.gone(&[4; 16])), 200 * MIB);
    }

    #[test]
    fn contexts_count_and_strangers_get_nothing() {
        let mut l = ledger(1024 * MIB, 500 * MIB);
        assert_eq!(granted(&l.ask([1; 16], 0, 1, MIB, T)), 0);
        l.admit([1; 16]);
        assert_eq!(granted(&l.ask([1; 16], 7, 1, MIB, T)), 0, "no such device");
        assert_eq!(granted(&l.ask([1; 16], 0, 1, 600 * MIB, T)), 0);
        assert_eq!(granted(&l.ask([1; 16], 0, 1, 400 * MIB, T)), 448 * MIB);
        l.admit([2; 16]);
        assert_eq!(l.used(0), 1448 * MIB, "a second program's context is over the limit: it gets no memory");
        assert_eq!(l.ask([2; 16], 0, 1, MIB, T).len(), 1);
        assert_eq!(granted(&l.returned(&[1; 16], 0, 48 * MIB)), 0);
    }

    #[test]
    fn a_program_more_is_worth_what_the_others_do_not_use() {
        let mut l = ledger(256 * MIB, 100 * MIB);
        l.admit([1; 16]);
        assert!(l.recall().is_empty(), "nothing was granted");
        l.ask([1; 16], 0, 1, 10 * MIB, T);
        assert_eq!(l.contexts_left(), 0);
        assert_eq!(l.recall(), [Say::Recall { worker: [1; 16] }]);
        l.returned(&[1; 16], 0, 54 * MIB);
        assert_eq!(l.contexts_left(), 1);
    }

    #[test]
    fn each_worker_waits_for_one_answer_and_owes_one() {
        let mut l = ledger(1024 * MIB, 0);
        for n in 1..=3 {
            l.admit([n; 16]);
        }
        assert_eq!(granted(&l.ask([1; 16], 0, 1, 1024 * MIB, T)), 1024 * MIB);
        assert_eq!(l.ask([2; 16], 0, 1, 128 * MIB, T), [Say::Recall { worker: [1; 16] }]);
        for serial in 2..1000 {
            assert_eq!(
                l.ask([2; 16], 0, serial, MIB, T),
                [Say::Granted { worker: [2; 16], device: 0, serial, bytes: 0, left: 0 }]
            );
        }
        assert!(l.ask([2; 16], 0, 1, 128 * MIB, T).is_empty(), "said again after a change of servers");
        assert!(l.ask([3; 16], 0, 1, 128 * MIB, T).is_empty(), "the first one is asked already");
        assert_eq!(l.asking.len(), 2);
        let says = l.returned(&[1; 16], 0, 256 * MIB);
        assert_eq!(says.iter().map(|say| granted(std::slice::from_ref(say))).sum::<u64>(), 256 * MIB);
        assert!(l.asking.is_empty());
    }

    #[test]
    fn a_lease_of_a_whole_card_is_granted_what_the_card_has() {
        let mut l = ledger(u64::MAX, 500 * MIB).of_cards(|uuid| (*uuid == [1; 16]).then_some(1024 * MIB));
        assert_eq!(l.devices()[0].memory_bytes, u64::MAX, "what workers are told");
        for n in 1..=4 {
            l.admit([n; 16]);
        }
        assert_eq!(granted(&l.ask([1; 16], 0, 1, u64::MAX, T)), 0);
        assert_eq!(granted(&l.ask([1; 16], 0, 2, 1025 * MIB, T)), 0);
        // What contexts really take of it, the driver says.
        assert_eq!(granted(&l.ask([1; 16], 0, 3, 1000 * MIB, T)), 1024 * MIB);
        assert_eq!(l.ask([2; 16], 0, 1, MIB, T), [Say::Recall { worker: [1; 16] }]);
        assert_eq!(granted(&l.returned(&[1; 16], 0, 24 * MIB)), MIB);
        l.reading(&[3; 16], 0, u64::MAX);
        l.reading(&[4; 16], 0, u64::MAX);
        assert_eq!((l.used(0), l.peak_of_all()), (u64::MAX, u64::MAX), "no sum wraps");
        assert_eq!(l.ask([1; 16], 0, 4, u64::MAX, T), [Say::Recall { worker: [2; 16] }]);
        assert_eq!(granted(&l.returned(&[2; 16], 0, 0)), 0);
    }

    #[test]
    fn one_that_does_not_answer_holds_up_nobody_for_long() {
        let mut l = ledger(100 * MIB, 0);
        l.admit([1; 16]);
        l.admit([2; 16]);
        assert_eq!(granted(&l.ask([1; 16], 0, 1, 90 * MIB, T)), 90 * MIB, "a whole chunk does not fit");
        assert_eq!(l.ask([2; 16], 0, 1, 20 * MIB, T), [Say::Recall { worker: [1; 16] }]);
        assert!(l.tick(T + RECALL_LIMIT / 2).is_empty());
        assert_eq!(granted(&l.tick(T + RECALL_LIMIT)), 0);
        assert_eq!(
            granted(&l.ask([1; 16], 0, 2, 10 * MIB, T)),
            10 * MIB,
            "worker 2 has nothing to give back"
        );
    }

    #[test]
    fn another_server_counts_on() {
        let mut l = ledger(1024 * MIB, 100 * MIB);
        l.admit([1; 16]);
        l.ask([1; 16], 0, 1, 300 * MIB, T);
        l.reading(&[1; 16], 0, 500 * MIB);
        l.reading(&[1; 16], 0, 0);
        let mut next = ledger(1024 * MIB, 100 * MIB);
        next.restore([1; 16], &l.held(&[1; 16]));
        assert_eq!((next.used(0), next.peak(&[1; 16])), (l.used(0), 500 * MIB));
        assert_eq!(next.used(0), 420 * MIB);
        assert!(l.held(&[2; 16]).is_empty(), "nobody");
    }

    #[test]
    fn what_the_driver_says_counts() {
        let mut l = ledger(4096 * MIB, 500 * MIB);
        l.admit([1; 16]);
        l.admit([2; 16]);
        l.ask([1; 16], 0, 1, 64 * MIB, T);
        l.reading(&[1; 16], 0, 900 * MIB);
        assert_eq!((l.of(&[1; 16], 0), l.used(0)), (900 * MIB, 1400 * MIB));
        assert!(l.offenders(|_| true).is_empty());
        // Granted memory fills what it has already.
        assert_eq!(granted(&l.ask([1; 16], 0, 2, 256 * MIB, T)), 256 * MIB);
        assert_eq!(l.used(0), 1400 * MIB);
        // More than it ever asked for, and the lease is over its limit.
        l.reading(&[2; 16], 0, 3800 * MIB);
        assert_eq!(l.used(0), 4700 * MIB);
        let all = |_: &WorkerId| true;
        assert!(l.offenders(all).is_empty(), "not by more than it may be");
        l.reading(&[2; 16], 0, 4600 * MIB);
        assert_eq!((l.offenders(all), l.unasked(&[2; 16], 0)), (vec![([2; 16], 4100 * MIB)], 4100 * MIB));
        assert_eq!(l.peak(&[2; 16]), 4600 * MIB);
        l.reading(&[2; 16], 0, 500 * MIB);
        assert!(l.offenders(all).is_empty());
    }

    #[test]
    fn what_is_given_back_is_granted_once_the_driver_has_it() {
        let mut l = ledger(1024 * MIB, 100 * MIB);
        l.admit([1; 16]);
        l.admit([2; 16]);
        assert_eq!(granted(&l.ask([1; 16], 0, 1, 640 * MIB, T)), 640 * MIB);
        // All of it in use, and the driver has taken some for itself.
        l.reading(&[1; 16], 0, 790 * MIB);
        assert!(l.all_read(T).is_empty());
        assert_eq!(l.ask([2; 16], 0, 1, 512 * MIB, T), [Say::Recall { worker: [1; 16] }]);
        assert!(l.returned(&[1; 16], 0, 640 * MIB).is_empty(), "the driver says that it is in use");
        // This reading was taken before it was given back.
        l.reading(&[1; 16], 0, 790 * MIB);
        assert!(l.all_read(T).is_empty());
        l.reading(&[1; 16], 0, 150 * MIB);
        assert_eq!(granted(&l.all_read(T)), 512 * MIB);
        assert_eq!((l.of(&[1; 16], 0), l.unasked(&[1; 16], 0)), (150 * MIB, 50 * MIB));
        assert_eq!(
            (l.peak(&[1; 16]), l.peak_of_all()),
            (790 * MIB, 890 * MIB),
            "the other one's context, too"
        );
        // Once all is settled, what does not fit is refused at once.
        l.returned(&[1; 16], 0, 0);
        assert_eq!(l.ask([1; 16], 0, 2, 400 * MIB, T), [Say::Recall { worker: [2; 16] }]);
        assert_eq!(granted(&l.returned(&[2; 16], 0, 0)), 0);
    }

    #[test]
    fn a_reading_of_before_harms_nobody() {
        let mut l = ledger(48 * 1024 * MIB, 100 * MIB);
        for n in 1..=2 {
            l.admit([n; 16]);
            l.reading(&[n; 16], 0, 150 * MIB);
        }
        l.all_read(T);
        assert_eq!(granted(&l.ask([1; 16], 0, 1, 40 * 1024 * MIB, T)), 40 * 1024 * MIB);
        // All is read, given back and granted to the other one before the reading comes.
        assert_eq!(l.ask([2; 16], 0, 1, 40 * 1024 * MIB, T), [Say::Recall { worker: [1; 16] }]);
        assert_eq!(granted(&l.returned(&[1; 16], 0, 40 * 1024 * MIB)), 40 * 1024 * MIB);
        l.reading(&[1; 16], 0, (40 * 1024 + 150) * MIB);
        l.reading(&[2; 16], 0, 150 * MIB);
        l.all_read(T);
        assert!(l.offenders(|_| true).is_empty());
        assert_eq!(l.peak_of_all(), (40 * 1024 + 250) * MIB, "at a time");
        // Who keeps what it says it gave back is found by the next ones.
        l.reading(&[1; 16], 0, (40 * 1024 + 150) * MIB);
        l.all_read(T);
        assert_eq!(l.offenders(|_| true).len(), 1);
    }

    #[test]
    fn those_who_wait_are_answered_one_by_one_and_without_readings_too() {
        let mut l = ledger(1000 * MIB, 0);
        for n in 1..=4 {
            l.admit([n; 16]);
        }
        for n in 1..=2 {
            assert!(granted(&l.ask([n; 16], 0, 1, 450 * MIB, T)) >= 450 * MIB);
            l.reading(&[n; 16], 0, 450 * MIB);
        }
        l.all_read(T);
        let all = l.held.values().map(|h| h[0].granted).collect::<Vec<_>>();
        assert_eq!(l.ask([3; 16], 0, 1, 300 * MIB, T).len(), 2);
        assert!(l.ask([4; 16], 0, 1, 300 * MIB, T).is_empty(), "all are asked already");
        assert!(l.returned(&[1; 16], 0, all[0]).is_empty() && l.returned(&[2; 16], 0, all[1]).is_empty());
        l.reading(&[1; 16], 0, 0);
        assert_eq!(granted(&l.all_read(T)), 300 * MIB, "the second one waits on");
        l.reading(&[2; 16], 0, 0);
        assert_eq!(granted(&l.all_read(T)), 300 * MIB);

        let mut l = ledger(1000 * MIB, 0);
        l.admit([1; 16]);
        l.admit([2; 16]);
        assert_eq!(granted(&l.ask([1; 16], 0, 1, 960 * MIB, T)), 960 * MIB);
        l.reading(&[1; 16], 0, 960 * MIB);
        l.all_read(T);
        l.ask([2; 16], 0, 1, 800 * MIB, T);
        assert!(l.returned(&[1; 16], 0, 960 * MIB).is_empty());
        // The monitor has ended: what workers say counts.
        assert_eq!(granted(&l.tick(T + SETTLE_LIMIT)), 800 * MIB);
    }

    #[test]
    fn a_lease_is_brought_back_to_its_limit_by_those_who_are_beyond_their_grants() {
        let mut l = ledger(4096 * MIB, 0);
        for n in 1..=6 {
            l.admit([n; 16]);
        }
        assert_eq!(granted(&l.ask([1; 16], 0, 1, 4096 * MIB, T)), 4096 * MIB);
        // 1 GiB together, beside 256 MiB of each.
        for n in 2..=6 {
            l.reading(&[n; 16], 0, 460 * MIB);
        }
        assert!(l.offenders(|_| true).is_empty());
        l.reading(&[6; 16], 0, 470 * MIB);
        assert_eq!(l.offenders(|_| true), [([6; 16], 470 * MIB)], "the one that has the most");
        assert!(l.offenders(|id| *id != [2; 16]).is_empty(), "one that ends leaves its memory");
        // The end of one is nobody else's harm.
        l.reading(&[6; 16], 0, 460 * MIB);
        for n in 2..=6 {
            l.gone(&[n; 16]);
            assert!(l.offenders(|_| true).is_empty());
        }
        for n in 2..=6 {
            l.admit([n; 16]);
            l.reading(&[n; 16], 0, 1000 * MIB);
        }
        assert_eq!(l.offenders(|_| true).len(), 4, "as many as it takes, and who keeps to its grants stays");
        assert!(l.offenders(|_| true).iter().all(|(id, _)| *id != [1; 16]));
    }

    proptest! {
        /// Whoever keeps to its grants is never ended, whenever the driver was asked what processes have.
        #[test]
        fn honest_workers_are_left_alone(
            steps in proptest::collection::vec((0..4usize, 0..6u8, 0..900u64), 1..120),
            unasked in 0..250u64,
        ) {
            let mut l = ledger(2048 * MIB, 100 * MIB);
            let (mut used, mut now) = ([0; 4], T);
            let mut sample = None;
            for n in 0..4 {
                l.admit([n; 16]);
            }
            for (at, what, mib) in steps {
                let id = [at as u8; 16];
                let mut says = match what {
                    0 | 1 => l.ask(id, 0, 0, mib * MIB, now),
                    2 => {
                        let bytes = used[at].min(mib * MIB);
                        used[at] -= bytes;
                        l.returned(&id, 0, bytes)
                    }
                    // What the driver says comes later than it was asked.
                    3 => {
                        sample = sample.or(Some(used));
                        vec![]
                    }
                    4 => match sample.take() {
                        Some(seen) => {
                            for n in 0..4u8 {
                                l.reading(&[n; 16], 0, seen[usize::from(n)] + (100 + unasked) * MIB);
                            }
                            l.all_read(T)
                        }
                        None => vec![],
                    },
                    _ => {
                        now += Duration::from_millis(mib * 10);
                        l.tick(now)
                    }
                };
                while let Some(say) = says.pop() {
                    match say {
                        Say::Granted { worker, bytes, .. } => used[usize::from(worker[0])] += bytes,
                        Say::Recall { worker } => says.extend(l.returned(&worker, 0, 0)),
                    }
                }
                prop_assert_eq!(l.offenders(|_| true), []);
            }
        }

        /// Whatever workers ask and claim, what they are granted stays within the limit.
        #[test]
        fn grants_never_exceed_the_limit(steps in proptest::collection::vec((0..4u8, 0..5u8, 0..400u64), 1..80)) {
            let mut l = ledger(1024 * MIB, 0);
            let mut now = T;
            for n in 0..4 {
                l.admit([n; 16]);
            }
            for (worker, what, mib) in steps {
                let id = [worker; 16];
                match what {
                    0 | 1 => drop(l.ask(id, 0, 0, mib * MIB, now)),
                    2 => drop(l.returned(&id, 0, mib * MIB)),
                    3 => {
                        l.gone(&id);
                        l.admit(id);
                    }
                    _ => {
                        now += Duration::from_millis(mib * 10);
                        l.tick(now);
                    }
                }
                prop_assert!(l.used(0) <= 1024 * MIB);
            }
            now += RECALL_LIMIT;
            l.tick(now);
            prop_assert!(l.asking.is_empty(), "everybody is answered");
        }
    }
}
