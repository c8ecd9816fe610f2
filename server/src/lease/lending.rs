//! Lending of leases without programs, and the way back to their GPUs.

use super::placement::Occupied;
use super::{Held, Lease, Place, Request, Share, Sharing, Table};

impl Table {
    /// Returns which candidates must be lent for a request, in their order; empty if lending does
    /// not help.
    pub fn lenders(&self, request: &Request, candidates: &[String]) -> Vec<String> {
        if self.draining().is_some()
            || self.check(request).and_then(|()| self.within_limits(request, &[])).is_err()
        {
            return Vec::new();
        }
        self.enough(candidates, |table| table.choose(request).is_ok())
    }

    /// As [`Table::lenders`], for a lease that wants its shares back.
    pub fn lenders_back(&self, id: &str, may_move: bool, candidates: &[String]) -> Vec<String> {
        self.enough(candidates, |table| table.clone().reacquire(id, may_move).is_ok())
    }

    fn enough(&self, candidates: &[String], fits: impl Fn(&Self) -> bool) -> Vec<String> {
        let mut trial = self.clone();
        let mut out = Vec::new();
        for id in candidates.iter().filter(|id| !self.is_lent(id)) {
            trial.lend(id);
            out.push(id.clone());
            if !fits(&trial) {
                continue;
            }
            // A lease that is not in the way keeps its shares.
            out.retain(|id| {
                let mut without = trial.clone();
                without.aside.remove(id);
                let needed = !fits(&without);
                if !needed {
                    trial = without;
                }
                needed
            });
            return out;
        }
        Vec::new()
    }

    /// Lends the lease's shares until the lease reacquires them. Returns `true` if the lease
    /// exists.
    pub fn lend(&mut self, id: &str) -> bool {
        let there = self.held.contains_key(id);
        if there {
            self.aside.insert(id.into(), None);
        }
        there
    }

    /// Reacquires the shares of a lent lease; the error is its place in the queue.
    ///
    /// No later lease is served before it. If `may_move`, it gets other GPUs of the same kind when
    /// its own are taken; the result is then `true`, and the lease has a new fencing token.
    pub fn reacquire(&mut self, id: &str, may_move: bool) -> Result<bool, Place> {
        let (Some(held), Some(turn)) = (self.held.get(id), self.aside.get_mut(id)) else { return Ok(false) };
        let may_move = may_move && !held.lease.pinned;
        let turn = *turn.get_or_insert_with(|| {
            self.turns += 1;
            self.turns
        });
        let (shares, alone) = (&held.lease.shares, held.lease.exclusive);
        let room = |s: &Share| {
            let Some(gpu) = self.gpu(&s.gpu) else { return false };
            let others =
                || self.holding(turn).filter(|l| l.id != id && l.shares.iter().any(|o| o.gpu == s.gpu));
            let used =
                || others().flat_map(|l| &l.shares).filter(|o| o.gpu == s.gpu).map(|o| o.limit_bytes).sum();
            let alone = match alone || gpu.sharing == Sharing::Exclusive {
                true => others().next().is_none(),
                false => !others().any(|l| l.exclusive),
            };
            let fit = !may_move || !self.withdrawn.contains_key(&s.gpu);
            alone && fit && s.limit_bytes <= self.capacity(gpu).saturating_sub(used())
        };
        if shares.iter().all(room) {
            self.aside.remove(id);
            return Ok(false);
        }
        if may_move && let Some(shares) = self.elsewhere(&held.lease, turn) {
            self.aside.remove(id);
            self.fencing_token += 1;
            if let Some(held) = self.held.get_mut(id) {
                held.lease.fencing_token = self.fencing_token;
                held.lease.shares = shares;
            }
            return Ok(true);
        }
        let kind = |gpu: &str| self.gpu(gpu).map(|g| (&g.name, g.memory_bytes, g.sharing));
        let fits = |a: &str, b: &str| a == b || may_move && kind(a) == kind(b);
        let same =
            |other: &Held| other.lease.shares.iter().any(|o| shares.iter().any(|s| fits(&s.gpu, &o.gpu)));
        let others = self.aside.iter().filter(|(other, _)| self.held.get(*other).is_some_and(same));
        let turns: Vec<u64> = others.filter_map(|(_, turn)| *turn).collect();
        Err(Place {
            position: turns.iter().filter(|other| **other <= turn).count() as u32,
            waiting: turns.len() as u32,
        })
    }

    /// Finds GPUs of the same kind with room for a lease now, its own preferred.
    fn elsewhere(&self, lease: &Lease, turn: u64) -> Option<Vec<Share>> {
        let mut occupied = Occupied::of(self, self.holding(turn).filter(|l| l.id != lease.id));
        occupied.reserve(&lease.client);
        let mut out: Vec<Share> = Vec::with_capacity(lease.shares.len());
        for share in &lease.shares {
            let old = self.gpu(&share.gpu)?;
            let (_, _, gpu) = self
                .gpus
                .iter()
                .filter(|g| {
                    (&g.name, g.memory_bytes, g.sharing) == (&old.name, old.memory_bytes, old.sharing)
                })
                .filter(|g| !out.iter().any(|o| o.gpu == g.uuid) && !occupied.is_closed(g))
                .filter(|g| !lease.exclusive || !occupied.used.contains_key(g.uuid.as_str()))
                .filter_map(|g| {
                    Some((g.uuid != old.uuid, occupied.left(g).checked_sub(share.limit_bytes)?, g))
                })
                .min_by_key(|(other, left, _)| (*other, *left))?;
            out.push(Share { gpu: gpu.uuid.clone(), ..share.clone() });
        }
        Some(out)
    }

    /// Gives up a lent lease's place in the queue: none of its programs waits any more.
    pub fn cancel_reacquire(&mut self, id: &str) {
        if let Some(turn) = self.aside.get_mut(id) {
            *turn = None;
        }
    }

    /// Returns `true` if a lease is lent or parked and holds no GPU.
    pub fn is_lent(&self, id: &str) -> bool {
        self.aside.contains_key(id)
    }

    pub(super) fn forget_aside(&mut self) {
        self.aside.retain(|id, _| self.held.contains_key(id));
    }
}
