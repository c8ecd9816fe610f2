//! The choice of GPUs for a request.

use std::collections::{BTreeMap, BTreeSet};

use super::{AllocateError, Gpu, Lease, MIB, Memory, Request, Share, Sharing, Table, Withdrawn};
use crate::limits::fits;

/// Promised memory of each GPU, during one choice.
pub(super) struct Occupied<'a> {
    table: &'a Table,
    pub(super) used: BTreeMap<&'a str, u64>,
    /// GPUs on which no further lease fits: a lease has or wants them alone, or they are withdrawn.
    closed: BTreeSet<&'a str>,
    /// MPS domains of each GPU's leases; `None`: a lease without MPS, or with further GPUs.
    domains: BTreeMap<&'a str, BTreeSet<Option<&'a str>>>,
}

impl Table {
    /// Returns the client by which MPS domains on a GPU differ; empty if all clients have one.
    fn domain<'b>(&self, client: &'b str) -> &'b str {
        if self.rules.shared_domain { "" } else { client }
    }

    /// Lists the GPUs that could serve a request if no other lease existed.
    pub(super) fn suitable(&self, request: &Request) -> Result<Vec<&Gpu>, AllocateError> {
        let model = request.model.to_lowercase();
        let mut limit = None;
        let mut withdrawn = 0;
        let suitable: Vec<&Gpu> = self
            .gpus
            .iter()
            .filter(|g| request.devices.is_empty() || request.devices.contains(&g.uuid))
            .filter(|g| g.name.to_lowercase().contains(&model))
            .filter(|g| !g.one_mps_server() || request.by_mps() && wanted(request) == 1)
            .filter(|g| request.kinds().iter().any(|kind| kind.is_none_or(|mps| mps == g.by_mps())))
            .filter(|g| {
                // A program needs at least its context.
                (g.context_bytes.max(1)..=g.offered_bytes()).contains(&request.memory.of(g.offered_bytes()))
            })
            .filter(|g| self.allowed_on(request, g).map_err(|e| limit.get_or_insert(e).name).is_ok())
            .filter(|g| {
                let out = matches!(self.withdrawn.get(&g.uuid), Some(Withdrawn::Stopped(_)));
                withdrawn += usize::from(out);
                !out
            })
            .collect();
        let wanted = wanted(request);
        let of = |kind: &Option<bool>| {
            suitable.iter().filter(|g| kind.is_none_or(|mps| mps == g.by_mps())).count()
        };
        let most = request.kinds().iter().map(of).max().unwrap_or(0);
        if most >= wanted {
            return Ok(suitable);
        }
        if let Some(limit) = limit {
            return Err(AllocateError::Limit(limit));
        }
        let what = match (&request.memory, model.is_empty()) {
            (Memory::Bytes(b), true) => format!("with {} MiB", b / MIB),
            (Memory::Bytes(b), false) => format!("{:?} with {} MiB", request.model, b / MIB),
            (Memory::Percent(_), true) => "as asked for".to_string(),
            (Memory::Percent(_), false) => format!("of model {:?}", request.model),
        };
        let context = self.gpus.iter().map(|g| g.context_bytes).max().unwrap_or(0);
        let context = match context {
            0 => String::new(),
            bytes => format!(" (a program's context alone takes up to {} MiB)", bytes.div_ceil(MIB)),
        };
        let dropped = if withdrawn > 0 {
            format!(" and {withdrawn} that no longer belong to it")
        } else {
            String::new()
        };
        let alike = if most < suitable.len() {
            " that are shared in one way (by MPS or not; sharing = \"time-slice\" takes both)"
        } else {
            ""
        };
        let one_process = match self.gpus.iter().any(Gpu::one_mps_server) {
            true => " (its GPUs in compute mode EXCLUSIVE_PROCESS serve leases of one GPU by MPS)",
            false => "",
        };
        Err(AllocateError::NeverFits(format!(
            "{wanted} GPU(s) {what} are wanted, this server has {most}{alike}{one_process}{dropped}; ask for less \
             or another server{context}"
        )))
    }

    /// Chooses GPUs for a request.
    ///
    /// Preferred ones come first, then those with the least memory left, so that whole GPUs stay
    /// whole. Exclusive GPUs come last, or first for an exclusive request. Reserves of other
    /// clients, and the GPUs for which earlier requests wait, count as occupied.
    pub(super) fn choose(&self, request: &Request) -> Result<Vec<Share>, AllocateError> {
        let suitable = self.suitable(request)?;
        let mut occupied = Occupied::of(self, self.holding(u64::MAX));
        occupied.reserve(&request.client);
        let ahead = self.queue();
        let me = ahead.iter().position(|w| Self::same(w, &request.client, &request.request_id));
        let mut in_front = 0;
        let before = match me {
            Some(me) => &ahead[..me],
            None => {
                let end = ahead.partition_point(|w| w.request.priority <= request.priority);
                &ahead[..end]
            }
        };
        for earlier in before {
            in_front += 1;
            match self.suitable(&earlier.request) {
                Ok(gpus) => match occupied.best(&earlier.request, &gpus) {
                    Some(shares) => occupied.take(&shares, &earlier.request),
                    // Every GPU that becomes free belongs to the earlier request.
                    None => occupied.closed.extend(gpus.iter().map(|g| g.uuid.as_str())),
                },
                Err(_) => in_front -= 1,
            }
        }
        if let Some(shares) = occupied.best(request, &suitable) {
            return Ok(shares);
        }
        let wanted = wanted(request);
        let free = suitable.iter().filter(|g| occupied.fits(request, g).is_some()).count();
        let queue = match in_front {
            0 => String::new(),
            n => format!(" ({n} request(s) wait in front of this one)"),
        };
        let off: Vec<_> = suitable
            .iter()
            .filter_map(|g| Some(format!("{} is off: {}", g.uuid, self.withdrawn.get(&g.uuid)?.reason())))
            .collect();
        let off = if off.is_empty() { String::new() } else { format!("; {}", off.join(", ")) };
        Err(AllocateError::NoCapacity {
            why: format!(
                "{wanted} GPU(s) are wanted, {free} of {} suitable ones have room{queue}; retry when a \
                 lease ends, or ask for less memory{off}",
                suitable.len()
            ),
            position: 0,
            waiting: 0,
        })
    }
}

/// Returns the number of GPUs that a request asks for.
pub(super) fn wanted(request: &Request) -> usize {
    match (request.gpus, request.devices.len()) {
        (0, 0) => 1,
        (0, listed) => listed,
        (n, _) => n as usize,
    }
}

impl<'a> Occupied<'a> {
    /// Counts the memory of these leases.
    pub(super) fn of(table: &'a Table, leases: impl Iterator<Item = &'a Lease>) -> Self {
        let mut used = BTreeMap::new();
        let mut closed = BTreeSet::new();
        let mut domains = BTreeMap::<_, BTreeSet<_>>::new();
        for lease in leases {
            let domain = (lease.mps && lease.shares.len() == 1).then(|| table.domain(&lease.client));
            for share in &lease.shares {
                domains.entry(share.gpu.as_str()).or_default().insert(domain);
                *used.entry(share.gpu.as_str()).or_insert(0) += share.limit_bytes;
                if lease.exclusive {
                    closed.insert(share.gpu.as_str());
                }
            }
        }
        closed.extend(table.withdrawn.keys().map(String::as_str));
        Self { table, used, closed, domains }
    }

    /// Counts reserves of other clients that these have not used up.
    pub(super) fn reserve(&mut self, client: &str) {
        let table = self.table;
        for reserve in &table.rules.reserve {
            if fits(&reserve.client, client) {
                continue;
            }
            let held = table.holding(u64::MAX).filter(|l| fits(&reserve.client, &l.client));
            let held: usize = held.map(|l| l.shares.len()).sum();
            for _ in held..reserve.gpus as usize {
                let mut gpus: Vec<(u64, &Gpu)> = table
                    .gpus
                    .iter()
                    .filter(|g| !self.is_closed(g))
                    .filter_map(|g| {
                        Some((self.left(g).checked_sub(reserve.memory.of(g.offered_bytes()))?, g))
                    })
                    .collect();
                gpus.sort_by_key(|(left, g)| (g.sharing == Sharing::Exclusive, *left));
                // Memory that other leases hold already stays theirs.
                let Some((_, gpu)) = gpus.first() else { break };
                *self.used.entry(&gpu.uuid).or_insert(0) += reserve.memory.of(gpu.offered_bytes());
            }
        }
    }

    /// Returns `true` if no further lease fits, however much memory is left.
    pub(super) fn is_closed(&self, gpu: &Gpu) -> bool {
        let uuid = gpu.uuid.as_str();
        self.closed.contains(uuid) || gpu.sharing == Sharing::Exclusive && self.used.contains_key(uuid)
    }

    pub(super) fn left(&self, gpu: &Gpu) -> u64 {
        self.table.capacity(gpu).saturating_sub(self.used.get(gpu.uuid.as_str()).copied().unwrap_or(0))
    }

    /// Returns the memory that a request would leave on a GPU, if it fits.
    fn fits(&self, request: &Request, gpu: &Gpu) -> Option<u64> {
        if self.is_closed(gpu) {
            return None;
        }
        if request.sharing == Some(Sharing::Exclusive) && self.used.contains_key(gpu.uuid.as_str()) {
            return None;
        }
        if gpu.one_mps_server() {
            let own = Some(self.table.domain(&request.client));
            if self.domains.get(gpu.uuid.as_str()).is_some_and(|there| there.iter().any(|d| *d != own)) {
                return None;
            }
        }
        self.left(gpu).checked_sub(request.memory.of(gpu.offered_bytes()))
    }

    fn best(&self, request: &Request, suitable: &[&Gpu]) -> Option<Vec<Share>> {
        request.kinds().iter().find_map(|kind| self.best_of(request, suitable, *kind))
    }

    fn best_of(&self, request: &Request, suitable: &[&Gpu], kind: Option<bool>) -> Option<Vec<Share>> {
        let wanted = wanted(request);
        let alone = request.sharing == Some(Sharing::Exclusive);
        let mut candidates: Vec<((usize, bool, u64), &Gpu)> = suitable
            .iter()
            .filter(|g| kind.is_none_or(|mps| mps == g.by_mps()))
            .filter_map(|g| {
                let left = self.fits(request, g)?;
                let rank = request.sticky.iter().position(|s| *s == g.uuid).unwrap_or(usize::MAX);
                Some(((rank, alone != (g.sharing == Sharing::Exclusive), left), *g))
            })
            .collect();
        if candidates.len() < wanted {
            return None;
        }
        // A stable sort: equal GPUs stay in the driver's order.
        candidates.sort_by_key(|(order, _)| *order);
        candidates.truncate(wanted);
        if !request.devices.is_empty() {
            candidates.sort_by_key(|(_, g)| request.devices.iter().position(|d| *d == g.uuid));
        }
        let share = |g: &Gpu| Share {
            gpu: g.uuid.clone(),
            limit_bytes: request.memory.of(g.offered_bytes()),
            sm_percent: request.percent_of(g),
        };
        Some(candidates.into_iter().map(|(_, g)| share(g)).collect())
    }

    fn take(&mut self, shares: &[Share], request: &'a Request) {
        let domain = (request.by_mps() && shares.len() == 1).then(|| self.table.domain(&request.client));
        for share in shares {
            let Some(gpu) = self.table.gpu(&share.gpu) else { continue };
            *self.used.entry(&gpu.uuid).or_insert(0) += share.limit_bytes;
            self.domains.entry(&gpu.uuid).or_default().insert(domain);
            if request.sharing == Some(Sharing::Exclusive) {
                self.closed.insert(&gpu.uuid);
            }
        }
    }
}
