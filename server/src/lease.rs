//! Who holds which part of which GPU: a table without I/O, clocks or randomness of its own.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::clock::{self, Moment, Random};

/// Time a lease lives without a renewal where the client asks for none: as long as a worker waits for a lost client, so
/// that a cut network ends neither before the other.
pub const DEFAULT_TTL: Duration = Duration::from_secs(60);
/// Shortest and longest time that a client can ask for.
const TTL_RANGE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(24 * 3600));
const MIB: u64 = 1 << 20;
/// Leases that one client can hold on one server; a bound on memory, not a policy.
const MAX_LEASES_PER_CLIENT: usize = 64;

/// A GPU as discovery found it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
    /// `GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx`.
    pub uuid: String,
    /// Product name.
    pub name: String,
    /// Device memory of the card.
    pub memory_bytes: u64,
    /// Compute capability.
    pub compute_major: u32,
    /// Compute capability.
    pub compute_minor: u32,
    /// PCI address.
    #[serde(default)]
    pub pci_address: String,
    /// Number of multiprocessors.
    #[serde(default)]
    pub multiprocessors: u32,
    /// Device memory that one program's context counts, measured at the server's start.
    #[serde(default)]
    pub context_bytes: u64,
}

impl Gpu {
    /// The 16 bytes of the UUID; discovery checked that there are as many.
    pub fn uuid_bytes(&self) -> Option<[u8; 16]> {
        let hex: Vec<u8> = self.uuid.strip_prefix("GPU-")?.bytes().filter(|b| *b != b'-').collect();
        data_encoding::HEXLOWER_PERMISSIVE.decode(&hex).ok()?.try_into().ok()
    }
}

/// How much of each GPU's memory is wanted.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Memory {
    /// Bytes on each GPU.
    Bytes(u64),
    /// Percent of each GPU's memory, floored to MiB.
    Percent(f64),
}

impl Memory {
    /// Bytes of a card with `total` bytes.
    pub fn of(self, total: u64) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Percent(percent) if percent >= 100.0 => total,
            // A percentage below 100 of a number below 2^63 is exact enough to floor to MiB.
            Self::Percent(percent) => (total as f64 * percent / 100.0) as u64 / MIB * MIB,
        }
    }
}

/// What a client asks for.
#[derive(Debug, Clone)]
pub struct Request {
    /// The client's name, from its certificate.
    pub client: String,
    /// Repeating it returns the first lease; empty: none.
    pub request_id: String,
    /// Number of GPUs.
    pub gpus: u32,
    /// Of each.
    pub memory: Memory,
    /// Part of the product name, in any case; empty: any.
    pub model: String,
    /// Only these GPUs; empty: any.
    pub devices: Vec<String>,
    /// Rather these GPUs.
    pub sticky: Vec<String>,
    /// On whose behalf.
    pub user: String,
    /// On whose behalf.
    pub uid: u32,
    /// Zero: the default.
    pub ttl: Duration,
    /// Who asks, for people.
    pub who: String,
    /// Why, for people.
    pub why: String,
    /// The client's boot.
    pub boot_id: String,
    /// Whether data connections must be encrypted.
    pub encrypted: bool,
}

/// A part of one GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    /// Which GPU.
    pub gpu: String,
    /// Device memory that the lease may use on it.
    pub limit_bytes: u64,
    /// Share of the multiprocessors.
    pub sm_percent: u32,
}

/// Parts of GPUs held by a client.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// 12 characters a-z2-7.
    pub id: String,
    /// Who holds it.
    pub client: String,
    /// The request that made it.
    pub request_id: String,
    /// Tickets for its workers are made with it.
    #[serde(with = "hex32")]
    pub ticket_key: [u8; 32],
    /// Larger than that of every earlier lease.
    pub fencing_token: u64,
    /// In the order in which the client sees them.
    pub shares: Vec<Share>,
    /// Time it lives without a renewal.
    pub ttl: Duration,
    /// The client's boot.
    pub boot_id: String,
    /// Whether data connections must be encrypted.
    pub encrypted: bool,
    /// On whose behalf.
    pub user: String,
    /// On whose behalf.
    pub uid: u32,
    /// Who asked, for people.
    pub who: String,
    /// Why, for people.
    pub why: String,
    /// Seconds since 1970.
    pub created_unix: u64,
}

// The key stays out of logs.
impl std::fmt::Debug for Lease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lease")
            .field("id", &self.id)
            .field("client", &self.client)
            .field("fencing_token", &self.fencing_token)
            .field("shares", &self.shares)
            .finish_non_exhaustive()
    }
}

mod hex32 {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub fn serialize<S: Serializer>(key: &[u8; 32], to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&data_encoding::HEXLOWER.encode(key))
    }

    pub fn deserialize<'d, D: Deserializer<'d>>(from: D) -> Result<[u8; 32], D::Error> {
        let text = String::deserialize(from)?;
        data_encoding::HEXLOWER
            .decode(text.as_bytes())
            .ok()
            .and_then(|k| k.try_into().ok())
            .ok_or_else(|| D::Error::custom("a key of 32 bytes in hex"))
    }
}

/// Why there is no lease.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AllocateError {
    /// The request means nothing.
    #[error("{0}")]
    Invalid(String),
    /// No GPU of this server could ever satisfy it.
    #[error("{0}")]
    NeverFits(String),
    /// Others hold what is wanted.
    #[error("{0}")]
    NoCapacity(String),
    /// The lease could not be written down.
    #[error("the lease could not be stored: {0}; see the server's journal")]
    Storage(String),
}

#[derive(Debug, Clone)]
struct Held {
    lease: Lease,
    deadline: Moment,
}

/// What survives a restart.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Saved {
    schema: u32,
    fencing_token: u64,
    leases: Vec<Lease>,
    #[serde(default)]
    aside: Vec<String>,
}

/// All leases of one server. See the module.
#[derive(Debug, Clone)]
pub struct Table {
    gpus: Vec<Gpu>,
    held: BTreeMap<String, Held>,
    /// Leases that were parked or lent and hold no part of a GPU now; those that want it back have a turn.
    aside: BTreeMap<String, Option<u64>>,
    turns: u64,
    fencing_token: u64,
}

impl Table {
    /// A table over these GPUs with the leases of an earlier run. Leases start their time anew: a client cannot have
    /// renewed while the server was away. Those whose GPUs are gone are returned beside the table.
    pub fn new(gpus: Vec<Gpu>, saved: Saved, now: Moment) -> (Self, Vec<Lease>) {
        let mut table = Self {
            gpus,
            held: BTreeMap::new(),
            aside: saved.aside.into_iter().map(|id| (id, None)).collect(),
            turns: 0,
            fencing_token: saved.fencing_token,
        };
        let mut lost = Vec::new();
        for lease in saved.leases {
            let aside = table.aside.contains_key(&lease.id);
            let fits = lease.shares.iter().all(|s| {
                table.gpu(&s.gpu).is_some_and(|g| {
                    aside || s.limit_bytes <= g.memory_bytes.saturating_sub(table.used(&s.gpu))
                })
            });
            if fits {
                let deadline = now + lease.ttl;
                table.held.insert(lease.id.clone(), Held { lease, deadline });
            } else {
                lost.push(lease);
            }
        }
        table.forget_aside();
        (table, lost)
    }

    /// What has to survive a restart.
    pub fn save(&self) -> Saved {
        Saved {
            schema: 1,
            fencing_token: self.fencing_token,
            leases: self.held.values().map(|h| h.lease.clone()).collect(),
            aside: self.aside.keys().cloned().collect(),
        }
    }

    /// The GPUs of this server.
    pub fn gpus(&self) -> &[Gpu] {
        &self.gpus
    }

    fn gpu(&self, uuid: &str) -> Option<&Gpu> {
        self.gpus.iter().find(|g| g.uuid == uuid)
    }

    /// Device memory of a GPU that leases hold, or wait to get back.
    pub fn used(&self, uuid: &str) -> u64 {
        self.used_before(uuid, u64::MAX)
    }

    /// The same, of those that wait only the ones whose turn is before `turn`.
    fn used_before(&self, uuid: &str, turn: u64) -> u64 {
        let counts = |id: &String| match self.aside.get(id) {
            None => true,
            Some(None) => false,
            Some(Some(t)) => *t < turn,
        };
        self.held
            .values()
            .filter(|h| counts(&h.lease.id))
            .flat_map(|h| &h.lease.shares)
            .filter(|s| s.gpu == uuid)
            .map(|s| s.limit_bytes)
            .sum()
    }

    /// A lease and the time it has left.
    pub fn get(&self, id: &str, now: Moment) -> Option<(&Lease, Duration)> {
        self.held.get(id).map(|h| (&h.lease, h.deadline.saturating_sub(now)))
    }

    /// All leases and the time they have left.
    pub fn leases(&self, now: Moment) -> impl Iterator<Item = (&Lease, Duration)> {
        self.held.values().map(move |h| (&h.lease, h.deadline.saturating_sub(now)))
    }

    /// Makes a lease, or finds the one that the same request made before (`false` then).
    pub fn allocate(
        &mut self,
        request: &Request,
        now: Moment,
        unix: u64,
        random: &dyn Random,
    ) -> Result<(Lease, bool), AllocateError> {
        let mine = self.held.values_mut().filter(|h| h.lease.client == request.client);
        let mut count = 0;
        for held in mine {
            if !request.request_id.is_empty() && held.lease.request_id == request.request_id {
                held.deadline = now + held.lease.ttl;
                return Ok((held.lease.clone(), false));
            }
            count += 1;
        }
        if count >= MAX_LEASES_PER_CLIENT {
            return Err(AllocateError::NoCapacity(format!(
                "{} holds {count} leases, the most a client can; release some",
                request.client
            )));
        }
        let shares = self.choose(request)?;
        let ttl = match request.ttl {
            Duration::ZERO => DEFAULT_TTL,
            ttl => ttl.clamp(TTL_RANGE.0, TTL_RANGE.1),
        };
        self.fencing_token += 1;
        let lease = Lease {
            id: self.fresh_id(random),
            client: request.client.clone(),
            request_id: request.request_id.clone(),
            ticket_key: clock::bytes(random),
            fencing_token: self.fencing_token,
            shares,
            ttl,
            boot_id: request.boot_id.clone(),
            encrypted: request.encrypted,
            user: request.user.clone(),
            uid: request.uid,
            who: request.who.clone(),
            why: request.why.clone(),
            created_unix: unix,
        };
        self.held.insert(lease.id.clone(), Held { lease: lease.clone(), deadline: now + ttl });
        Ok((lease, true))
    }

    fn fresh_id(&self, random: &dyn Random) -> String {
        loop {
            let bytes: [u8; 8] = clock::bytes(random);
            let mut id = data_encoding::BASE32_NOPAD.encode(&bytes).to_ascii_lowercase();
            id.truncate(12);
            if !self.held.contains_key(&id) {
                return id;
            }
        }
    }

    /// Chooses the GPUs: the preferred ones first, then those with the least memory left, so that whole GPUs stay whole.
    fn choose(&self, request: &Request) -> Result<Vec<Share>, AllocateError> {
        if let Memory::Percent(p) = request.memory
            && !(p > 0.0 && p <= 100.0)
        {
            return Err(AllocateError::Invalid(format!("memory: {p} % is not between 0 and 100")));
        }
        if let Some(unknown) = request.devices.iter().find(|d| self.gpu(d).is_none()) {
            return Err(AllocateError::NeverFits(format!("this server has no GPU {unknown}")));
        }
        let wanted = match (request.gpus, request.devices.len()) {
            (0, 0) => 1,
            (0, listed) => listed,
            (n, _) => n as usize,
        };
        let model = request.model.to_lowercase();
        let suitable: Vec<&Gpu> = self
            .gpus
            .iter()
            .filter(|g| request.devices.is_empty() || request.devices.contains(&g.uuid))
            .filter(|g| g.name.to_lowercase().contains(&model))
            .filter(|g| (1..=g.memory_bytes).contains(&request.memory.of(g.memory_bytes)))
            .collect();
        if suitable.len() < wanted {
            let what = match (&request.memory, model.is_empty()) {
                (Memory::Bytes(b), true) => format!("with {} MiB", b / MIB),
                (Memory::Bytes(b), false) => format!("{:?} with {} MiB", request.model, b / MIB),
                (Memory::Percent(_), true) => "as asked for".to_string(),
                (Memory::Percent(_), false) => format!("of model {:?}", request.model),
            };
            return Err(AllocateError::NeverFits(format!(
                "{wanted} GPU(s) {what} are wanted, this server has {}; ask for less or another server",
                suitable.len()
            )));
        }
        let mut candidates: Vec<(usize, u64, &Gpu, u64)> = suitable
            .iter()
            .filter_map(|g| {
                let need = request.memory.of(g.memory_bytes);
                let left = g.memory_bytes.saturating_sub(self.used(&g.uuid)).checked_sub(need)?;
                let rank = request.sticky.iter().position(|s| *s == g.uuid).unwrap_or(usize::MAX);
                Some((rank, left, *g, need))
            })
            .collect();
        if candidates.len() < wanted {
            return Err(AllocateError::NoCapacity(format!(
                "{wanted} GPU(s) are wanted, {} of {} suitable ones have enough memory free; retry when a lease \
                 ends, or ask for less memory",
                candidates.len(),
                suitable.len()
            )));
        }
        // Stable: GPUs that are equal stay in the driver's order.
        candidates.sort_by_key(|(rank, left, ..)| (*rank, *left));
        candidates.truncate(wanted);
        if !request.devices.is_empty() {
            candidates.sort_by_key(|(_, _, g, _)| request.devices.iter().position(|d| *d == g.uuid));
        }
        Ok(candidates
            .into_iter()
            .map(|(_, _, g, need)| Share { gpu: g.uuid.clone(), limit_bytes: need, sm_percent: 100 })
            .collect())
    }

    /// Which of these leases have to be set aside for a request, the first ones first; none where that does not help.
    pub fn lenders(&self, request: &Request, candidates: &[String]) -> Vec<String> {
        let mut trial = self.clone();
        let mut out = Vec::new();
        for id in candidates.iter().filter(|id| !self.is_aside(id)) {
            trial.set_aside(id);
            out.push(id.clone());
            if trial.choose(request).is_err() {
                continue;
            }
            // Those that turn out not to be in the way keep theirs.
            out.retain(|id| {
                let mut without = trial.clone();
                without.aside.remove(id);
                let needed = without.choose(request).is_err();
                if !needed {
                    trial = without;
                }
                needed
            });
            return out;
        }
        Vec::new()
    }

    /// A lease gives its parts of GPUs to others until it takes them back. Says whether there is such a lease.
    pub fn set_aside(&mut self, id: &str) -> bool {
        let there = self.held.contains_key(id);
        if there {
            self.aside.insert(id.into(), None);
        }
        there
    }

    /// A lease that was set aside wants its parts back: `Ok` once it has them, else the number of leases that are before it.
    /// Nobody who comes later is served before it.
    pub fn take_back(&mut self, id: &str) -> Result<(), usize> {
        let (Some(held), Some(turn)) = (self.held.get(id), self.aside.get_mut(id)) else { return Ok(()) };
        let turn = *turn.get_or_insert_with(|| {
            self.turns += 1;
            self.turns
        });
        let shares = &held.lease.shares;
        let room = |s: &Share| {
            let left = |g: &Gpu| g.memory_bytes.saturating_sub(self.used_before(&s.gpu, turn));
            self.gpu(&s.gpu).is_some_and(|g| s.limit_bytes <= left(g))
        };
        if shares.iter().all(room) {
            self.aside.remove(id);
            return Ok(());
        }
        let same = |other: &Held| other.lease.shares.iter().any(|o| shares.iter().any(|s| s.gpu == o.gpu));
        Err(self
            .aside
            .iter()
            .filter(|(_, t)| t.is_some_and(|t| t < turn))
            .filter(|(other, _)| self.held.get(*other).is_some_and(same))
            .count())
    }

    /// Takes back nothing any more, for want of anybody who waits.
    pub fn stay_aside(&mut self, id: &str) {
        if let Some(turn) = self.aside.get_mut(id) {
            *turn = None;
        }
    }

    /// Whether a lease holds no part of a GPU now.
    pub fn is_aside(&self, id: &str) -> bool {
        self.aside.contains_key(id)
    }

    fn forget_aside(&mut self) {
        self.aside.retain(|id, _| self.held.contains_key(id));
    }

    /// Extends a client's lease. `None`: the client has no such lease.
    pub fn renew(&mut self, client: &str, id: &str, now: Moment) -> Option<Duration> {
        let held = self.held.get_mut(id).filter(|h| h.lease.client == client)?;
        held.deadline = now + held.lease.ttl;
        Some(held.lease.ttl)
    }

    /// Takes out a lease, where `client` is given only if it is that client's.
    pub fn remove(&mut self, client: Option<&str>, id: &str) -> Option<Lease> {
        let held = self.held.get(id)?;
        if client.is_some_and(|c| c != held.lease.client) {
            return None;
        }
        self.aside.remove(id);
        self.held.remove(id).map(|h| h.lease)
    }

    /// Takes back a lease that could not be stored.
    pub fn undo_allocate(&mut self, id: &str) {
        self.held.remove(id);
    }

    /// Takes out all leases that `ended` says yes to.
    pub fn remove_where(&mut self, mut ended: impl FnMut(&Lease) -> bool) -> Vec<Lease> {
        let ids: Vec<_> =
            self.held.values().filter(|h| ended(&h.lease)).map(|h| h.lease.id.clone()).collect();
        let gone = ids.iter().filter_map(|id| self.held.remove(id)).map(|h| h.lease).collect();
        self.forget_aside();
        gone
    }

    /// Takes out the leases whose client was silent for too long.
    pub fn expire(&mut self, now: Moment) -> Vec<Lease> {
        let ids: Vec<_> =
            self.held.iter().filter(|(_, h)| h.deadline <= now).map(|(id, _)| id.clone()).collect();
        let gone = ids.iter().filter_map(|id| self.held.remove(id)).map(|h| h.lease).collect();
        self.forget_aside();
        gone
    }

    /// When the next lease ends unless it is renewed.
    pub fn next_deadline(&self) -> Option<Moment> {
        self.held.values().map(|h| h.deadline).min()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::clock::testing::Counting;

    const GIB: u64 = 1 << 30;

    fn gpu(n: u32, memory_bytes: u64) -> Gpu {
        Gpu {
            uuid: format!("GPU-00000000-0000-0000-0000-{n:012}"),
            name: if n.is_multiple_of(2) { "NVIDIA H200" } else { "Tesla T4" }.into(),
            memory_bytes,
            compute_major: 9,
            compute_minor: 0,
            pci_address: String::new(),
            multiprocessors: 132,
            context_bytes: 0,
        }
    }

    fn table(n: u32) -> Table {
        Table::new((0..n).map(|i| gpu(i, 16 * GIB)).collect(), Saved::default(), Duration::ZERO).0
    }

    fn request(client: &str, gpus: u32, percent: f64) -> Request {
        Request {
            client: client.into(),
            request_id: String::new(),
            gpus,
            memory: Memory::Percent(percent),
            model: String::new(),
            devices: vec![],
            sticky: vec![],
            user: String::new(),
            uid: 0,
            ttl: Duration::ZERO,
            who: String::new(),
            why: String::new(),
            boot_id: "b".into(),
            encrypted: true,
        }
    }

    fn allocate(t: &mut Table, r: &Request, now: u64, random: &Counting) -> Result<Lease, AllocateError> {
        t.allocate(r, Duration::from_secs(now), 0, random).map(|(lease, _)| lease)
    }

    #[test]
    fn packs_fractions_and_keeps_whole_gpus_whole() {
        let (mut t, r) = (table(2), Counting::default());
        let a = allocate(&mut t, &request("a", 1, 50.0), 0, &r).unwrap();
        let b = allocate(&mut t, &request("b", 1, 50.0), 0, &r).unwrap();
        assert_eq!(a.shares[0].gpu, b.shares[0].gpu);
        assert_eq!(a.shares[0].limit_bytes, 8 * GIB);
        let whole = allocate(&mut t, &request("c", 1, 100.0), 0, &r).unwrap();
        assert_ne!(whole.shares[0].gpu, a.shares[0].gpu);
        assert!(whole.fencing_token > b.fencing_token && b.fencing_token > a.fencing_token);
        let error = allocate(&mut t, &request("d", 1, 1.0), 0, &r).unwrap_err();
        assert!(matches!(error, AllocateError::NoCapacity(_)), "{error}");
        assert!(t.remove(Some("b"), &whole.id).is_none());
        assert!(t.remove(Some("c"), &whole.id).is_some());
        allocate(&mut t, &request("d", 1, 1.0), 0, &r).unwrap();
    }

    #[test]
    fn all_or_nothing_and_never() {
        let (mut t, r) = (table(2), Counting::default());
        allocate(&mut t, &request("a", 1, 100.0), 0, &r).unwrap();
        assert!(matches!(allocate(&mut t, &request("b", 2, 10.0), 0, &r), Err(AllocateError::NoCapacity(_))));
        assert!(matches!(allocate(&mut t, &request("b", 3, 10.0), 0, &r), Err(AllocateError::NeverFits(_))));
        let mut big = request("b", 1, 1.0);
        big.memory = Memory::Bytes(17 * GIB);
        assert!(matches!(allocate(&mut t, &big, 0, &r), Err(AllocateError::NeverFits(_))));
        for bad in [f64::NAN, -1.0, 101.0, f64::INFINITY] {
            assert!(matches!(allocate(&mut t, &request("b", 1, bad), 0, &r), Err(AllocateError::Invalid(_))));
        }
        // A share that floors to nothing is not a lease.
        assert!(matches!(allocate(&mut t, &request("b", 1, 1e-9), 0, &r), Err(AllocateError::NeverFits(_))));
        assert_eq!(t.leases(Duration::ZERO).count(), 1);
    }

    #[test]
    fn model_devices_and_sticky() {
        let (mut t, r) = (table(4), Counting::default());
        let mut by_model = request("a", 1, 100.0);
        by_model.model = "t4".into();
        assert_eq!(allocate(&mut t, &by_model, 0, &r).unwrap().shares[0].gpu, gpu(1, 0).uuid);
        let mut listed = request("a", 0, 10.0);
        listed.devices = vec![gpu(3, 0).uuid, gpu(2, 0).uuid];
        let lease = allocate(&mut t, &listed, 0, &r).unwrap();
        assert_eq!(lease.shares.iter().map(|s| s.gpu.clone()).collect::<Vec<_>>(), listed.devices);
        let mut sticky = request("a", 1, 10.0);
        sticky.sticky = vec![gpu(0, 0).uuid];
        assert_eq!(allocate(&mut t, &sticky, 0, &r).unwrap().shares[0].gpu, gpu(0, 0).uuid);
        listed.devices = vec!["GPU-nope".into()];
        assert!(matches!(allocate(&mut t, &listed, 0, &r), Err(AllocateError::NeverFits(_))));
    }

    #[test]
    fn the_same_request_is_the_same_lease() {
        let (mut t, r) = (table(2), Counting::default());
        let mut again = request("a", 1, 100.0);
        again.request_id = "boot-1".into();
        let first = allocate(&mut t, &again, 0, &r).unwrap();
        assert_eq!(allocate(&mut t, &again, 20, &r).unwrap(), first);
        assert!(t.expire(Duration::from_secs(79)).is_empty(), "asking again renews");
        again.client = "b".into();
        assert_ne!(allocate(&mut t, &again, 20, &r).unwrap().id, first.id);
    }

    #[test]
    fn silence_ends_a_lease_and_a_restart_does_not() {
        let (mut t, r) = (table(1), Counting::default());
        let lease = allocate(&mut t, &request("a", 1, 100.0), 0, &r).unwrap();
        assert_eq!(t.renew("b", &lease.id, Duration::ZERO), None);
        assert_eq!(t.renew("a", &lease.id, Duration::from_secs(20)), Some(DEFAULT_TTL));
        assert!(t.expire(Duration::from_secs(79)).is_empty());
        let saved: Saved = serde_json::from_slice(&serde_json::to_vec(&t.save()).unwrap()).unwrap();
        let (mut t2, lost) = Table::new(vec![gpu(0, 16 * GIB)], saved, Duration::from_secs(3));
        assert!(lost.is_empty());
        assert_eq!(t2.get(&lease.id, Duration::from_secs(3)).unwrap().0, &lease);
        assert_eq!(t2.next_deadline(), Some(Duration::from_secs(63)));
        assert_eq!(t2.expire(Duration::from_secs(63)), [lease]);
        let (_, lost) = Table::new(vec![gpu(1, 16 * GIB)], t.save(), Duration::ZERO);
        assert_eq!(lost.len(), 1, "its GPU is gone");
    }

    #[derive(Debug, Clone)]
    enum Step {
        Allocate { client: u8, gpus: u32, percent: f64 },
        Release { nth: usize, client: u8 },
        Renew { nth: usize, client: u8 },
        Pass { seconds: u64 },
        Restart,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => (0..3u8, 0..4u32, 0.5..100.0f64).prop_map(|(client, gpus, percent)| Step::Allocate { client, gpus, percent }),
            2 => (0..8usize, 0..3u8).prop_map(|(nth, client)| Step::Release { nth, client }),
            2 => (0..8usize, 0..3u8).prop_map(|(nth, client)| Step::Renew { nth, client }),
            2 => (0..80u64).prop_map(|seconds| Step::Pass { seconds }),
            1 => Just(Step::Restart),
        ]
    }

    #[test]
    fn what_is_set_aside_comes_back_in_turn() {
        let mut table = table(1);
        let random = Counting::default();
        let get = |table: &mut Table, client: &str, percent| {
            table
                .allocate(&request(client, 1, percent), Duration::ZERO, 0, &random)
                .map(|(lease, _)| lease.id)
        };
        let a = get(&mut table, "a", 100.0).unwrap();
        assert!(table.set_aside(&a) && !table.set_aside("none"));
        let b = get(&mut table, "b", 50.0).unwrap();
        let c = get(&mut table, "c", 50.0).unwrap();
        assert!(table.set_aside(&b));
        assert_eq!(table.take_back(&a), Err(0), "c is in the way");
        assert_eq!(table.take_back(&b), Err(1), "a asked first, though there is room for b");
        assert!(get(&mut table, "d", 50.0).is_err(), "nor is anybody served who comes later");
        // A restart of the server: they are still aside, and nobody waits.
        let (mut again, lost) = Table::new(table.gpus().to_vec(), table.save(), Duration::ZERO);
        assert!(lost.is_empty() && again.is_aside(&a));
        assert_eq!(again.take_back(&b), Ok(()));
        table.stay_aside(&a);
        assert_eq!(table.take_back(&b), Ok(()));
        table.remove(None, &b);
        table.remove(None, &c);
        assert_eq!((table.take_back(&a), table.is_aside(&a)), (Ok(()), false));
    }

    #[test]
    fn only_as_many_lend_as_are_needed() {
        let mut table = table(4);
        let random = Counting::default();
        let ids: Vec<String> = (0..8)
            .map(|i| {
                table.allocate(&request(&format!("c{i}"), 1, 50.0), Duration::ZERO, 0, &random).unwrap().0.id
            })
            .collect();
        let one = request("new", 1, 100.0);
        let lenders = table.lenders(&one, &ids);
        assert_eq!(lenders.len(), 2, "both halves of one GPU");
        assert!(table.lenders(&one, &ids[..1]).is_empty(), "a half does not help");
        assert!(table.lenders(&request("new", 5, 100.0), &ids).is_empty());
        assert_eq!(table.lenders(&request("new", 4, 100.0), &ids).len(), 8);
    }

    proptest! {
        #[test]
        fn never_promises_more_than_there_is(steps in proptest::collection::vec(step(), 1..60)) {
            let (mut t, r) = (table(3), Counting::default());
            let (mut now, mut newest) = (Duration::ZERO, 0);
            for step in steps {
                let nth = |t: &Table, n: usize| t.held.keys().nth(n).cloned().unwrap_or_default();
                match step {
                    Step::Allocate { client, gpus, percent } => {
                        let before = t.held.len();
                        match t.allocate(&request(&client.to_string(), gpus, percent), now, 0, &r) {
                            Ok((lease, fresh)) => {
                                prop_assert!(fresh && lease.fencing_token > newest);
                                newest = lease.fencing_token;
                                let mut distinct: Vec<_> = lease.shares.iter().map(|s| &s.gpu).collect();
                                distinct.dedup();
                                prop_assert_eq!(distinct.len(), gpus.max(1) as usize);
                            }
                            Err(_) => prop_assert_eq!(t.held.len(), before),
                        }
                    }
                    Step::Release { nth: n, client } => {
                        let id = nth(&t, n);
                        let owner = t.held.get(&id).map(|h| h.lease.client.clone());
                        let gone = t.remove(Some(&client.to_string()), &id).is_some();
                        prop_assert_eq!(gone, owner == Some(client.to_string()));
                    }
                    Step::Renew { nth: n, client } => {
                        let id = nth(&t, n);
                        if t.renew(&client.to_string(), &id, now).is_some() {
                            prop_assert_eq!(t.get(&id, now).unwrap().1, DEFAULT_TTL);
                        }
                    }
                    Step::Pass { seconds } => {
                        now += Duration::from_secs(seconds);
                        t.expire(now);
                        prop_assert!(t.next_deadline().is_none_or(|d| d > now));
                    }
                    Step::Restart => {
                        let before: Vec<_> = t.held.keys().cloned().collect();
                        let (fresh, lost) = Table::new(t.gpus.clone(), t.save(), now);
                        prop_assert!(lost.is_empty());
                        prop_assert_eq!(fresh.held.keys().cloned().collect::<Vec<_>>(), before);
                        t = fresh;
                    }
                }
                for g in t.gpus() {
                    prop_assert!(t.used(&g.uuid) <= g.memory_bytes);
                }
            }
        }
    }
}
