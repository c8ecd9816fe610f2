//! The table of leases and waiting requests. It has no I/O, clock or randomness of its own.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::clock::{self, Moment, Random};
use crate::idle::OnIdle;
use crate::limits::{Bound, Effective, Entry, Exceeded, Scope, fits};

/// Lifetime of a lease without a renewal, if the client requests none.
///
/// A worker waits for a lost client for the same time, so that a cut network ends neither before
/// the other.
pub const DEFAULT_TTL: Duration = Duration::from_secs(60);
/// Range of lifetimes that a client can request. The limit `lease_ttl` can shorten the longest.
const TTL_RANGE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(366 * 24 * 3600));
const MIB: u64 = 1 << 20;
/// Leases of one client on one server, and its waiting requests; bounds on memory, not a policy.
const MAX_LEASES_PER_CLIENT: usize = 64;
const MAX_WAITING_PER_CLIENT: usize = 16;
/// Time after which a request that was not repeated leaves the queue. Clients repeat theirs at
/// least every 30 s.
pub const QUEUE_TIMEOUT: Duration = Duration::from_secs(90);

/// How leases share a GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Sharing {
    /// Programs of several leases take turns.
    #[default]
    TimeSlice,
    /// Programs of several leases run at the same time, under NVIDIA's MPS.
    Mps,
    /// One lease has the GPU alone.
    Exclusive,
}

impl Sharing {
    /// All variants, for listings and for [`Sharing::parse`].
    pub const ALL: [Self; 3] = [Self::TimeSlice, Self::Mps, Self::Exclusive];

    /// Returns the word of the configuration file.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::TimeSlice => "time-slice",
            Self::Mps => "mps",
            Self::Exclusive => "exclusive",
        }
    }

    /// Parses the word of [`Sharing::as_str`].
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|s| s.as_str() == text)
    }
}

/// A GPU as discovery found it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
    /// `GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx`.
    pub uuid: String,
    /// Product name as the driver reports it.
    pub name: String,
    /// Device memory of the card, in bytes.
    pub memory_bytes: u64,
    /// Major number of the compute capability.
    pub compute_major: u32,
    /// Minor number of the compute capability.
    pub compute_minor: u32,
    /// PCI address as the driver writes it.
    #[serde(default)]
    pub pci_address: String,
    /// Number of multiprocessors.
    #[serde(default)]
    pub multiprocessors: u32,
    /// Device memory of one program's context in bytes, measured when the server starts.
    #[serde(default)]
    pub context_bytes: u64,
    /// `CUcomputemode`; 0 lets several programs use the GPU.
    #[serde(default)]
    pub compute_mode: u32,
    /// Sharing of the GPU by the configuration.
    #[serde(default)]
    pub sharing: Sharing,
}

impl Gpu {
    fn by_mps(&self) -> bool {
        self.sharing == Sharing::Mps
    }

    /// Returns the 16 bytes of the UUID; discovery has checked their number.
    pub fn uuid_bytes(&self) -> Option<[u8; 16]> {
        let hex: Vec<u8> = self.uuid.strip_prefix("GPU-")?.bytes().filter(|b| *b != b'-').collect();
        data_encoding::HEXLOWER_PERMISSIVE.decode(&hex).ok()?.try_into().ok()
    }
}

/// Memory requested on each GPU.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Memory {
    /// Bytes on each GPU.
    Bytes(u64),
    /// Percent of each GPU's memory, rounded down to MiB.
    Percent(f64),
}

impl Memory {
    /// Returns the bytes on a card with `total` bytes.
    pub fn of(self, total: u64) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Percent(percent) if percent >= 100.0 => total,
            // Precise enough: a percentage below 100 of a number below 2^63, rounded down to MiB.
            Self::Percent(percent) => (total as f64 * percent / 100.0) as u64 / MIB * MIB,
        }
    }
}

/// Order among waiting requests.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Priority {
    /// Served first.
    #[default]
    Normal,
    /// Served after every normal request.
    BelowNormal,
}

/// GPUs or parts of GPUs that are kept free for some clients.
#[derive(Debug, Clone, PartialEq)]
pub struct Reserve {
    /// Pattern of these clients' names.
    pub client: String,
    /// Number of reserved GPUs.
    pub gpus: u32,
    /// Reserved memory of each GPU.
    pub memory: Memory,
}

/// Rules by which GPUs are divided.
#[derive(Debug, Clone, PartialEq)]
pub struct Rules {
    /// Reserves for clients.
    pub reserve: Vec<Reserve>,
    /// Memory of a GPU that may be leased, in percent of its size.
    pub overcommit_percent: u64,
}

impl Default for Rules {
    fn default() -> Self {
        Self { reserve: Vec::new(), overcommit_percent: 100 }
    }
}

/// Reason why a GPU is withdrawn from leasing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Withdrawn {
    /// An administrator took the GPU out of service.
    Off(String),
    /// The GPU no longer belongs to this server.
    Stopped(String),
    /// The GPU is defective or unusable.
    Broken(String),
}

impl Withdrawn {
    /// Returns the text for people.
    pub fn reason(&self) -> &str {
        match self {
            Self::Off(reason) | Self::Stopped(reason) | Self::Broken(reason) => reason,
        }
    }
}

/// Request for a lease.
#[derive(Debug, Clone)]
pub struct Request {
    /// Name of the client, from its certificate.
    pub client: String,
    /// Request id: a repetition returns the first lease; empty: none.
    pub request_id: String,
    /// Number of GPUs; 0: as many as `devices` lists, or one.
    pub gpus: u32,
    /// Memory of each GPU.
    pub memory: Memory,
    /// Part of the product name, in any case; empty: any model.
    pub model: String,
    /// UUIDs of the only acceptable GPUs; empty: any.
    pub devices: Vec<String>,
    /// UUIDs of preferred GPUs, best first.
    pub sticky: Vec<String>,
    /// User on whose behalf the client asks; empty: its own.
    pub user: String,
    /// User id of `user`.
    pub uid: u32,
    /// Lifetime without a renewal; zero: the default.
    pub ttl: Duration,
    /// Requester, for people.
    pub who: String,
    /// Purpose, for people.
    pub why: String,
    /// Boot id of the client.
    pub boot_id: String,
    /// Whether data connections must be encrypted.
    pub encrypted: bool,
    /// Largest share of each GPU's multiprocessors, in percent.
    pub sm_percent: u32,
    /// The same share as a number of multiprocessors; 0: `sm_percent` applies.
    pub sm_count: u32,
    /// Replaces both on GPUs shared by MPS: the share of multiprocessors equals the share of
    /// memory.
    pub sm_auto: bool,
    /// The client does not repeat the request, so it never waits.
    pub once: bool,
    /// Requested sharing; `None`: as the GPUs are shared.
    pub sharing: Option<Sharing>,
    /// Priority in the queue.
    pub priority: Priority,
    /// Renewed without end, like leases from boot.
    pub persistent: bool,
    /// Action on the lease when it is idle.
    pub on_idle: OnIdle,
    /// Whether the lease is never lent, even without programs.
    pub hold: bool,
    /// Longest idle time before the action; zero: the server's setting.
    pub idle_timeout: Duration,
    /// Position among the client's waiting requests, from 1; 0: by arrival.
    pub order: u32,
    /// Limits of the client and its user.
    pub limits: Effective,
}

impl Request {
    /// Returns the share of a GPU's multiprocessors in percent, rounded up to cover the request.
    fn percent_of(&self, gpu: &Gpu) -> u32 {
        if self.sm_auto {
            let part = u128::from(self.memory.of(gpu.memory_bytes)) * 100;
            let percent = part.div_ceil(u128::from(gpu.memory_bytes.max(1))) as u32;
            return if gpu.by_mps() { percent.clamp(1, 100) } else { 100 };
        }
        match (self.sm_count, gpu.multiprocessors) {
            (0, _) => self.sm_percent,
            (_, 0) => 100,
            (count, all) => count.saturating_mul(100).div_ceil(all).clamp(1, 100),
        }
    }

    fn limits_multiprocessors(&self) -> bool {
        self.sm_count != 0 || self.sm_percent < 100
    }

    /// Returns the acceptable kinds of GPUs, best first: shared by MPS, not shared by MPS, or
    /// either.
    ///
    /// All GPUs of a lease are of one kind.
    fn kinds(&self) -> &'static [Option<bool>] {
        match self.sharing {
            Some(Sharing::TimeSlice | Sharing::Exclusive) => &[None],
            Some(Sharing::Mps) => &[Some(true)],
            None if self.limits_multiprocessors() => &[Some(true)],
            None => &[Some(true), Some(false)],
        }
    }
}

/// A lease's part of one GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    /// UUID of the GPU.
    pub gpu: String,
    /// Device memory that the lease may use on the GPU, in bytes.
    pub limit_bytes: u64,
    /// Share of the multiprocessors, in percent.
    pub sm_percent: u32,
}

/// Shares of GPUs, held for a client.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// Random: 12 characters of `a-z2-7`.
    pub id: String,
    /// Name of the client that holds the lease.
    pub client: String,
    /// Request id of the request that created it.
    pub request_id: String,
    /// Key of the tickets for its workers.
    #[serde(with = "hex32")]
    pub ticket_key: [u8; 32],
    /// Fencing token: larger than that of every earlier lease.
    pub fencing_token: u64,
    /// Shares in the order in which the client sees its GPUs.
    pub shares: Vec<Share>,
    /// Lifetime without a renewal.
    pub ttl: Duration,
    /// Boot id of the client.
    pub boot_id: String,
    /// Whether data connections must be encrypted.
    pub encrypted: bool,
    /// User on whose behalf the client holds it; empty: its own.
    pub user: String,
    /// User id of `user`.
    pub uid: u32,
    /// Requester, for people.
    pub who: String,
    /// Purpose, for people.
    pub why: String,
    /// Creation time in seconds since 1970.
    pub created_unix: u64,
    /// Whether it has its GPUs alone.
    #[serde(default)]
    pub exclusive: bool,
    /// Priority in the queue.
    #[serde(default)]
    pub priority: Priority,
    /// Renewed without end, like leases from boot.
    #[serde(default)]
    pub persistent: bool,
    /// End of the lease despite renewals, in seconds since 1970; 0: none.
    #[serde(default)]
    pub until_unix: u64,
    /// Action on the lease when it is idle.
    #[serde(default)]
    pub on_idle: OnIdle,
    /// Whether the lease is never lent, even without programs.
    #[serde(default)]
    pub hold: bool,
    /// Longest idle time before the action; zero: the server's setting.
    #[serde(default)]
    pub idle_timeout: Duration,
    /// Whether its programs share their GPUs by MPS.
    #[serde(default)]
    pub mps: bool,
    /// Whether its client named the GPUs.
    #[serde(default)]
    pub pinned: bool,
}

// Leaves the key out, to keep it out of logs.
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

/// Reason why a request gets no lease.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AllocateError {
    /// The request contradicts itself or is out of range.
    #[error("{0}")]
    Invalid(String),
    /// No GPU of this server could ever satisfy it.
    #[error("{0}")]
    NeverFits(String),
    /// Other leases hold the requested GPUs.
    #[error("{why}")]
    NoCapacity {
        /// Text for people.
        why: String,
        /// Place in the queue, from 1; 0: the request does not wait.
        position: u32,
        /// Length of the queue.
        waiting: u32,
    },
    /// A limit of the client or its user is reached.
    #[error("{0}")]
    Limit(Exceeded),
    /// The lease could not be written to disk.
    #[error("the lease could not be stored: {0}; see the server's journal")]
    Storage(String),
}

/// A request in the queue.
#[derive(Debug, Clone)]
struct Waiting {
    request: Request,
    arrived: u64,
    asked: Moment,
}

/// Place of a lease among those that wait for the same GPUs; all 0: it does not wait.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Place {
    /// Place in the queue, from 1.
    pub position: u32,
    /// Length of the queue.
    pub waiting: u32,
}

/// One waiting request in a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WaitingView {
    /// Name of the client.
    pub client: String,
    /// User on whose behalf the client asks; empty: its own.
    pub user: String,
    /// Number of requested GPUs.
    pub gpus: u32,
    /// Priority in the queue.
    pub priority: Priority,
    /// Place in the queue, from 1.
    pub position: u32,
}

#[derive(Debug, Clone)]
struct Held {
    lease: Lease,
    deadline: Moment,
}

impl Held {
    /// Returns `true` if the lease was not renewed in time, or may not live any longer.
    fn over(&self, now: Moment, unix: u64) -> bool {
        self.deadline <= now || self.lease.until_unix != 0 && self.lease.until_unix <= unix
    }
}

/// Part of the table that survives a restart.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Saved<'a> {
    schema: u32,
    fencing_token: u64,
    leases: Vec<Cow<'a, Lease>>,
    #[serde(default)]
    aside: Vec<String>,
    #[serde(default)]
    withdrawn: Cow<'a, BTreeMap<String, Withdrawn>>,
    #[serde(default)]
    draining: Cow<'a, Option<String>>,
}

/// All leases of one server; see the module.
#[derive(Debug, Clone)]
pub struct Table {
    gpus: Vec<Gpu>,
    held: BTreeMap<String, Held>,
    /// Leases that are lent or parked and hold no GPU now.
    ///
    /// The value is the turn of a lease that wants its GPUs back.
    aside: BTreeMap<String, Option<u64>>,
    turns: u64,
    fencing_token: u64,
    withdrawn: BTreeMap<String, Withdrawn>,
    waiting: Vec<Waiting>,
    arrivals: u64,
    rules: Rules,
    draining: Option<String>,
    stopping: bool,
}

/// Promised memory of each GPU, during one choice.
struct Occupied<'a> {
    table: &'a Table,
    used: BTreeMap<&'a str, u64>,
    /// GPUs on which no further lease fits: a lease has or wants them alone, or they are withdrawn.
    closed: BTreeSet<&'a str>,
}

impl Table {
    /// Creates a table of these GPUs with the leases of an earlier run.
    ///
    /// Also returns the leases whose GPUs are gone. The lifetime of each lease starts again, since
    /// no client could renew while the server was away.
    pub fn new(gpus: Vec<Gpu>, rules: Rules, saved: Saved<'_>, now: Moment) -> (Self, Vec<Lease>) {
        let mut table = Self {
            gpus,
            held: BTreeMap::new(),
            aside: saved.aside.into_iter().map(|id| (id, None)).collect(),
            turns: 0,
            fencing_token: saved.fencing_token,
            withdrawn: saved.withdrawn.into_owned(),
            waiting: Vec::new(),
            arrivals: 0,
            rules,
            draining: saved.draining.into_owned(),
            stopping: false,
        };
        table.withdrawn.retain(|uuid, _| table.gpus.iter().any(|g| g.uuid == *uuid));
        let mut lost = Vec::new();
        let mut used: HashMap<String, u64> = HashMap::new();
        for lease in saved.leases.into_iter().map(Cow::into_owned) {
            let aside = table.aside.contains_key(&lease.id);
            let fits = lease.shares.iter().all(|s| {
                table.gpu(&s.gpu).is_some_and(|g| {
                    (g.by_mps() || !lease.mps)
                        && (aside
                            || s.limit_bytes
                                <= table.capacity(g).saturating_sub(used.get(&s.gpu).copied().unwrap_or(0)))
                })
            });
            if fits {
                for share in lease.shares.iter().filter(|_| !aside) {
                    *used.entry(share.gpu.clone()).or_default() += share.limit_bytes;
                }
                let deadline = now + lease.ttl;
                table.held.insert(lease.id.clone(), Held { lease, deadline });
            } else {
                lost.push(lease);
            }
        }
        table.forget_aside();
        (table, lost)
    }

    /// Returns the part of the table that must survive a restart.
    pub fn save(&self) -> Saved<'_> {
        Saved {
            schema: 1,
            fencing_token: self.fencing_token,
            leases: self.held.values().map(|h| Cow::Borrowed(&h.lease)).collect(),
            aside: self.aside.keys().cloned().collect(),
            withdrawn: Cow::Borrowed(&self.withdrawn),
            draining: Cow::Borrowed(&self.draining),
        }
    }

    /// Returns the bytes of a GPU that may be leased.
    fn capacity(&self, gpu: &Gpu) -> u64 {
        u64::try_from(u128::from(gpu.memory_bytes) * u128::from(self.rules.overcommit_percent) / 100)
            .unwrap_or(u64::MAX)
    }

    /// Replaces the rules for new leases; present ones stay.
    pub fn set_rules(&mut self, rules: Rules) {
        self.rules = rules;
    }

    /// Returns the reason why a GPU is withdrawn, if it is.
    pub fn withdrawn(&self, uuid: &str) -> Option<&Withdrawn> {
        self.withdrawn.get(uuid)
    }

    /// Withdraws a GPU, or with `None` returns it to service; leases on it stay. Returns `true` if
    /// it exists.
    pub fn withdraw(&mut self, uuid: &str, why: Option<Withdrawn>) -> bool {
        if self.gpu(uuid).is_none() {
            return false;
        }
        match why {
            Some(why) => self.withdrawn.insert(uuid.into(), why),
            None => self.withdrawn.remove(uuid),
        };
        true
    }

    /// Drains the server for this reason, also after a restart; `None` ends that.
    pub fn drain(&mut self, why: Option<String>) {
        self.draining = why;
    }

    /// Refuses new leases until the restart.
    pub fn stop(&mut self) {
        self.stopping = true;
    }

    /// Returns the reason why new leases are refused, if they are.
    pub fn draining(&self) -> Option<&str> {
        if self.stopping { Some("it stops") } else { self.draining.as_deref() }
    }

    /// Lists the leases on a GPU, lent ones included.
    pub fn holders(&self, uuid: &str) -> Vec<&Lease> {
        let on_it = |h: &&Held| h.lease.shares.iter().any(|s| s.gpu == uuid);
        self.held.values().filter(on_it).map(|h| &h.lease).collect()
    }

    /// Lists the GPUs of this server.
    pub fn gpus(&self) -> &[Gpu] {
        &self.gpus
    }

    fn gpu(&self, uuid: &str) -> Option<&Gpu> {
        self.gpus.iter().find(|g| g.uuid == uuid)
    }

    /// Lists leases that hold their GPUs now, or want them back and have a turn before `turn`.
    fn holding(&self, turn: u64) -> impl Iterator<Item = &Lease> {
        let counts = move |l: &&Lease| match self.aside.get(&l.id) {
            None => true,
            Some(None) => false,
            Some(Some(t)) => *t < turn,
        };
        self.held.values().map(|h| &h.lease).filter(counts)
    }

    /// Returns the device memory of each GPU that leases hold or wait to get back; unused GPUs are
    /// absent.
    pub fn used(&self) -> HashMap<&str, u64> {
        let mut used = HashMap::new();
        for share in self.holding(u64::MAX).flat_map(|l| &l.shares) {
            *used.entry(share.gpu.as_str()).or_default() += share.limit_bytes;
        }
        used
    }

    /// Returns a lease and its remaining lifetime.
    pub fn get(&self, id: &str, now: Moment) -> Option<(&Lease, Duration)> {
        self.held.get(id).map(|h| (&h.lease, h.deadline.saturating_sub(now)))
    }

    /// Lists all leases with their remaining lifetimes.
    pub fn leases(&self, now: Moment) -> impl Iterator<Item = (&Lease, Duration)> {
        self.held.values().map(move |h| (&h.lease, h.deadline.saturating_sub(now)))
    }

    /// Creates a lease, or returns the one of the same request (then with `false`).
    ///
    /// A request with an id that does not fit waits: it keeps its place while the client repeats
    /// it.
    pub fn allocate(
        &mut self,
        request: &Request,
        now: Moment,
        unix: u64,
        random: &dyn Random,
    ) -> Result<(Lease, bool), AllocateError> {
        self.waiting.retain(|w| now.saturating_sub(w.asked) < QUEUE_TIMEOUT);
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
            return Err(AllocateError::NeverFits(format!(
                "{} holds {count} leases, the most a client can; release some",
                request.client
            )));
        }
        let chosen = self.check(request).and_then(|()| self.within_limits(request)).and_then(|()| match self
            .draining()
        {
            None => self.choose(request),
            Some(why) => Err(AllocateError::NoCapacity {
                why: format!("this server makes no new leases: {why}; use another server, or retry later"),
                position: 0,
                waiting: 0,
            }),
        });
        let shares = match chosen {
            Ok(shares) => shares,
            Err(AllocateError::NoCapacity { why, .. }) => {
                let position = self.wait(request, now);
                let waiting = u32::try_from(self.waiting.len()).unwrap_or(u32::MAX);
                return Err(AllocateError::NoCapacity { why, position, waiting });
            }
            Err(other) => {
                self.leave_queue(&request.client, &request.request_id);
                return Err(other);
            }
        };
        self.leave_queue(&request.client, &request.request_id);
        let longest = request.limits.smallest("lease_ttl").map(|(_, usec)| usec);
        let ttl = match request.ttl {
            Duration::ZERO => DEFAULT_TTL,
            // A client with a lifetime of its own never renews; its lease lives as long as a limit
            // allows for renewed leases.
            ttl => {
                ttl.min(longest.map_or(TTL_RANGE.1, Duration::from_micros)).clamp(TTL_RANGE.0, TTL_RANGE.1)
            }
        };
        let until_unix = match longest {
            Some(usec) if !request.persistent => unix + usec.div_ceil(1_000_000),
            _ => 0,
        };
        self.fencing_token += 1;
        let all = |sharing| shares.iter().all(|s| self.gpu(&s.gpu).is_some_and(|g| g.sharing == sharing));
        let lease = Lease {
            id: self.fresh_id(random),
            client: request.client.clone(),
            request_id: request.request_id.clone(),
            ticket_key: clock::bytes(random),
            fencing_token: self.fencing_token,
            ttl,
            boot_id: request.boot_id.clone(),
            encrypted: request.encrypted,
            user: request.user.clone(),
            uid: request.uid,
            who: request.who.clone(),
            why: request.why.clone(),
            created_unix: unix,
            exclusive: request.sharing == Some(Sharing::Exclusive) || all(Sharing::Exclusive),
            priority: request.priority,
            persistent: request.persistent,
            until_unix,
            on_idle: request.on_idle,
            hold: request.hold,
            idle_timeout: request.idle_timeout,
            mps: request.sharing.is_none_or(|s| s == Sharing::Mps) && all(Sharing::Mps),
            shares,
            pinned: !request.devices.is_empty(),
        };
        self.held.insert(lease.id.clone(), Held { lease: lease.clone(), deadline: now + ttl });
        Ok((lease, true))
    }

    /// Lists waiting requests in the order in which they are served.
    fn queue(&self) -> Vec<&Waiting> {
        let mut queue: Vec<&Waiting> = self.waiting.iter().collect();
        queue.sort_by_key(|w| (w.request.priority, w.arrived));
        queue
    }

    fn same(waiting: &Waiting, client: &str, request_id: &str) -> bool {
        waiting.request.client == client && waiting.request.request_id == request_id
    }

    /// Puts a request into the queue, or keeps it there; returns its place, 0 if it cannot wait.
    fn wait(&mut self, request: &Request, now: Moment) -> u32 {
        if request.request_id.is_empty() || request.once {
            return 0;
        }
        let known = self.waiting.iter_mut().find(|w| Self::same(w, &request.client, &request.request_id));
        match known {
            Some(waiting) => {
                waiting.asked = now;
                waiting.request = request.clone();
            }
            None => {
                let mine = self.waiting.iter().filter(|w| w.request.client == request.client).count();
                if mine >= MAX_WAITING_PER_CLIENT {
                    return 0;
                }
                self.arrivals += 1;
                self.waiting.push(Waiting { request: request.clone(), arrived: self.arrivals, asked: now });
            }
        }
        self.put_in_order(&request.client, request.priority);
        let place = self.queue().iter().position(|w| Self::same(w, &request.client, &request.request_id));
        place.and_then(|p| u32::try_from(p + 1).ok()).unwrap_or(0)
    }

    /// Sorts a client's requests by its own order, within the places that they hold.
    fn put_in_order(&mut self, client: &str, priority: Priority) {
        let mine = |w: &&mut Waiting| {
            w.request.order > 0 && w.request.client == client && w.request.priority == priority
        };
        let mut mine: Vec<&mut Waiting> = self.waiting.iter_mut().filter(mine).collect();
        let mut places: Vec<u64> = mine.iter().map(|w| w.arrived).collect();
        places.sort_unstable();
        mine.sort_by_key(|w| (w.request.order, w.arrived));
        for (waiting, place) in mine.into_iter().zip(places) {
            waiting.arrived = place;
        }
    }

    /// Removes a request that is no longer wanted.
    pub fn leave_queue(&mut self, client: &str, request_id: &str) {
        self.waiting.retain(|w| !Self::same(w, client, request_id));
    }

    /// Lists the queue in the order in which it is served, for listings.
    pub fn waiting(&self, now: Moment) -> Vec<WaitingView> {
        self.queue()
            .into_iter()
            .filter(|w| now.saturating_sub(w.asked) < QUEUE_TIMEOUT)
            .zip(1..)
            .map(|(w, position)| WaitingView {
                client: w.request.client.clone(),
                user: w.request.user.clone(),
                gpus: wanted(&w.request) as u32,
                priority: w.request.priority,
                position,
            })
            .collect()
    }

    /// Lists the leases that a limit counts.
    ///
    /// These are the client's, or its user's on this client or on the whole site.
    fn counted<'a>(&'a self, request: &'a Request, entry: &Entry) -> impl Iterator<Item = &'a Lease> {
        let (of_user, site) = (entry.of_user, request.limits.scope == Scope::Site);
        self.held.values().map(|h| &h.lease).filter(move |l| match of_user {
            false => l.client == request.client,
            true => l.user == request.user && (site || l.client == request.client),
        })
    }

    /// Checks the limits that do not depend on a GPU.
    fn within_limits(&self, request: &Request) -> Result<(), AllocateError> {
        let refuse = |e: Exceeded| Err(AllocateError::Limit(e));
        for asked in [request.on_idle.as_str(), if request.hold { "hold" } else { "" }] {
            let refused = request.limits.not_listed("on_idle", |allowed| allowed == asked);
            if let Some(entry) = refused.filter(|_| !asked.is_empty()) {
                return refuse(entry.exceeded(format!("{asked:?} asked for"), "leave it out of the lease"));
            }
        }
        for entry in request.limits.all() {
            let Bound::Number(most) = entry.bound else { continue };
            match entry.name {
                "gpus" => {
                    let held: usize = self.counted(request, entry).map(|l| l.shares.len()).sum();
                    let more = wanted(request);
                    if (held + more) as u64 > most {
                        let why = format!("{held} held, {more} more asked for");
                        return refuse(entry.exceeded(why, "release a lease or ask for fewer GPUs"));
                    }
                }
                "max_persistent" if request.persistent => {
                    let held = self.counted(request, entry).filter(|l| l.persistent).count();
                    if held as u64 >= most {
                        let why = format!("{held} leases already are renewed without end");
                        return refuse(entry.exceeded(why, "release one, or ask for one that ends"));
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Checks the limits on a GPU's memory, multiprocessors and model.
    fn allowed_on(&self, request: &Request, gpu: &Gpu) -> Result<(), Exceeded> {
        let need = request.memory.of(gpu.memory_bytes);
        for entry in request.limits.entries("memory") {
            if let Bound::Memory(most) = entry.bound
                && need > most.of(gpu.memory_bytes)
            {
                let why = format!("{} MiB of {} asked for", need >> 20, gpu.uuid);
                return Err(entry.exceeded(why, "ask for less memory"));
            }
        }
        let percent = request.percent_of(gpu);
        for entry in request.limits.entries("sm_percent") {
            if let Bound::Number(most) = entry.bound
                && u64::from(percent) > most
            {
                let why = format!("{percent} % of the multiprocessors asked for");
                return Err(entry.exceeded(why, "ask for sm_percent within it"));
            }
        }
        let name = gpu.name.to_lowercase();
        match request.limits.not_listed("models", |m| name.contains(&m.to_lowercase())) {
            Some(entry) => {
                let why = format!("{} is a {}", gpu.uuid, gpu.name);
                Err(entry.exceeded(why, "ask for another model or server"))
            }
            None => Ok(()),
        }
    }

    /// Checks the request itself, and that this server has its GPUs at all.
    fn check(&self, request: &Request) -> Result<(), AllocateError> {
        if let Memory::Percent(p) = request.memory
            && !(p > 0.0 && p <= 100.0)
        {
            return Err(AllocateError::Invalid(format!("memory: {p} % is not between 0 and 100")));
        }
        if !(1..=100).contains(&request.sm_percent) {
            let given = request.sm_percent;
            return Err(AllocateError::Invalid(format!("sm_percent: {given} is not between 1 and 100")));
        }
        if request.limits_multiprocessors() && request.kinds() == [None] {
            return Err(AllocateError::Invalid(
                "sm_percent and sm_count need sharing = \"mps\"; ask for that, or leave them out".into(),
            ));
        }
        if request.kinds() == [Some(true)] && !self.gpus.iter().any(Gpu::by_mps) {
            return Err(AllocateError::NeverFits(
                "no GPU of this server is shared by MPS, which sharing = \"mps\", sm_percent and sm_count need; leave them \
                 out, or use another server"
                    .into(),
            ));
        }
        match request.devices.iter().find(|d| self.gpu(d).is_none()) {
            Some(unknown) => Err(AllocateError::NeverFits(format!("this server has no GPU {unknown}"))),
            None => Ok(()),
        }
    }

    /// Lists the GPUs that could serve a request if no other lease existed.
    fn suitable(&self, request: &Request) -> Result<Vec<&Gpu>, AllocateError> {
        let model = request.model.to_lowercase();
        let mut limit = None;
        let mut withdrawn = 0;
        let suitable: Vec<&Gpu> = self
            .gpus
            .iter()
            .filter(|g| request.devices.is_empty() || request.devices.contains(&g.uuid))
            .filter(|g| g.name.to_lowercase().contains(&model))
            .filter(|g| request.kinds().iter().any(|kind| kind.is_none_or(|mps| mps == g.by_mps())))
            .filter(|g| {
                // A program needs at least its context.
                (g.context_bytes.max(1)..=g.memory_bytes).contains(&request.memory.of(g.memory_bytes))
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
        Err(AllocateError::NeverFits(format!(
            "{wanted} GPU(s) {what} are wanted, this server has {most}{alike}{dropped}; ask for less or another \
             server{context}"
        )))
    }

    /// Chooses GPUs for a request.
    ///
    /// Preferred ones come first, then those with the least memory left, so that whole GPUs stay
    /// whole. Exclusive GPUs come last, or first for an exclusive request. Reserves of other
    /// clients, and the GPUs for which earlier requests wait, count as occupied.
    fn choose(&self, request: &Request) -> Result<Vec<Share>, AllocateError> {
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
                    Some(shares) => occupied.take(&shares, earlier.request.sharing),
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

    /// Returns which candidates must be lent for a request, in their order; empty if lending does
    /// not help.
    pub fn lenders(&self, request: &Request, candidates: &[String]) -> Vec<String> {
        if self.draining().is_some()
            || self.check(request).and_then(|()| self.within_limits(request)).is_err()
        {
            return Vec::new();
        }
        self.enough(candidates, |table| table.choose(request).is_ok())
    }

    /// As [`Table::lenders`], for a lease that wants its shares back.
    pub fn lenders_back(&self, id: &str, may_move: bool, candidates: &[String]) -> Vec<String> {
        self.enough(candidates, |table| table.clone().take_back(id, may_move).is_ok())
    }

    fn enough(&self, candidates: &[String], fits: impl Fn(&Self) -> bool) -> Vec<String> {
        let mut trial = self.clone();
        let mut out = Vec::new();
        for id in candidates.iter().filter(|id| !self.is_aside(id)) {
            trial.set_aside(id);
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
    pub fn set_aside(&mut self, id: &str) -> bool {
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
    pub fn take_back(&mut self, id: &str, may_move: bool) -> Result<bool, Place> {
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
    pub fn stay_aside(&mut self, id: &str) {
        if let Some(turn) = self.aside.get_mut(id) {
            *turn = None;
        }
    }

    /// Returns `true` if a lease is lent or parked and holds no GPU.
    pub fn is_aside(&self, id: &str) -> bool {
        self.aside.contains_key(id)
    }

    fn forget_aside(&mut self) {
        self.aside.retain(|id, _| self.held.contains_key(id));
    }

    /// Extends a client's lease and returns its lifetime; `None`: the client has no such lease.
    pub fn renew(&mut self, client: &str, id: &str, now: Moment) -> Option<Duration> {
        let held = self.held.get_mut(id).filter(|h| h.lease.client == client)?;
        held.deadline = now + held.lease.ttl;
        Some(held.lease.ttl)
    }

    /// Removes a lease; with `client`, only if it belongs to that client.
    pub fn remove(&mut self, client: Option<&str>, id: &str) -> Option<Lease> {
        let held = self.held.get(id)?;
        if client.is_some_and(|c| c != held.lease.client) {
            return None;
        }
        self.aside.remove(id);
        self.held.remove(id).map(|h| h.lease)
    }

    /// Removes a new lease that could not be stored.
    pub fn undo_allocate(&mut self, id: &str) {
        self.held.remove(id);
    }

    /// Removes all leases for which `ended` returns `true`.
    pub fn remove_where(&mut self, mut ended: impl FnMut(&Lease) -> bool) -> Vec<Lease> {
        let ids: Vec<_> =
            self.held.values().filter(|h| ended(&h.lease)).map(|h| h.lease.id.clone()).collect();
        let gone = ids.iter().filter_map(|id| self.held.remove(id)).map(|h| h.lease).collect();
        self.forget_aside();
        gone
    }

    /// Removes leases that were not renewed in time, or may not live any longer.
    pub fn expire(&mut self, now: Moment, unix: u64) -> Vec<Lease> {
        let over = |h: &&Held| h.over(now, unix);
        let ids: Vec<_> = self.held.values().filter(over).map(|h| h.lease.id.clone()).collect();
        let gone = ids.iter().filter_map(|id| self.held.remove(id)).map(|h| h.lease).collect();
        self.forget_aside();
        gone
    }

    /// Returns `true` if [`Table::expire`] would remove a lease.
    pub fn expires(&self, now: Moment, unix: u64) -> bool {
        self.held.values().any(|h| h.over(now, unix))
    }

    /// Returns when the next lease expires unless it is renewed.
    pub fn next_deadline(&self) -> Option<Moment> {
        self.held.values().map(|h| h.deadline).min()
    }
}

/// Returns the number of GPUs that a request asks for.
fn wanted(request: &Request) -> usize {
    match (request.gpus, request.devices.len()) {
        (0, 0) => 1,
        (0, listed) => listed,
        (n, _) => n as usize,
    }
}

impl<'a> Occupied<'a> {
    /// Counts the memory of these leases.
    fn of(table: &'a Table, leases: impl Iterator<Item = &'a Lease>) -> Self {
        let mut used = BTreeMap::new();
        let mut closed = BTreeSet::new();
        for lease in leases {
            for share in &lease.shares {
                *used.entry(share.gpu.as_str()).or_insert(0) += share.limit_bytes;
                if lease.exclusive {
                    closed.insert(share.gpu.as_str());
                }
            }
        }
        closed.extend(table.withdrawn.keys().map(String::as_str));
        Self { table, used, closed }
    }

    /// Counts reserves of other clients that these have not used up.
    fn reserve(&mut self, client: &str) {
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
                    .filter_map(|g| Some((self.left(g).checked_sub(reserve.memory.of(g.memory_bytes))?, g)))
                    .collect();
                gpus.sort_by_key(|(left, g)| (g.sharing == Sharing::Exclusive, *left));
                // Memory that other leases hold already stays theirs.
                let Some((_, gpu)) = gpus.first() else { break };
                *self.used.entry(&gpu.uuid).or_insert(0) += reserve.memory.of(gpu.memory_bytes);
            }
        }
    }

    /// Returns `true` if no further lease fits, however much memory is left.
    fn is_closed(&self, gpu: &Gpu) -> bool {
        let uuid = gpu.uuid.as_str();
        self.closed.contains(uuid) || gpu.sharing == Sharing::Exclusive && self.used.contains_key(uuid)
    }

    fn left(&self, gpu: &Gpu) -> u64 {
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
        self.left(gpu).checked_sub(request.memory.of(gpu.memory_bytes))
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
            limit_bytes: request.memory.of(g.memory_bytes),
            sm_percent: request.percent_of(g),
        };
        Some(candidates.into_iter().map(|(_, g)| share(g)).collect())
    }

    fn take(&mut self, shares: &[Share], sharing: Option<Sharing>) {
        for share in shares {
            let Some(gpu) = self.table.gpu(&share.gpu) else { continue };
            *self.used.entry(&gpu.uuid).or_insert(0) += share.limit_bytes;
            if sharing == Some(Sharing::Exclusive) {
                self.closed.insert(&gpu.uuid);
            }
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::clock::testing::Counting;

    const GIB: u64 = 1 << 30;

    pub(crate) fn gpu(n: u32, memory_bytes: u64) -> Gpu {
        Gpu {
            uuid: format!("GPU-00000000-0000-0000-0000-{n:012}"),
            name: if n.is_multiple_of(2) { "NVIDIA H200" } else { "Tesla T4" }.into(),
            memory_bytes,
            compute_major: 9,
            compute_minor: 0,
            pci_address: String::new(),
            multiprocessors: 132,
            context_bytes: 0,
            compute_mode: 0,
            sharing: Sharing::TimeSlice,
        }
    }

    fn table(n: u32) -> Table {
        Table::new(
            (0..n).map(|i| gpu(i, 16 * GIB)).collect(),
            Rules::default(),
            Saved::default(),
            Duration::ZERO,
        )
        .0
    }

    pub(crate) fn request(client: &str, gpus: u32, percent: f64) -> Request {
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
            sm_percent: 100,
            sharing: None,
            sm_count: 0,
            sm_auto: false,
            once: false,
            priority: Priority::Normal,
            persistent: false,
            on_idle: OnIdle::Unset,
            idle_timeout: Duration::ZERO,
            hold: false,
            order: 0,
            limits: Effective::default(),
        }
    }

    fn allocate(t: &mut Table, r: &Request, now: u64, random: &Counting) -> Result<Lease, AllocateError> {
        t.allocate(r, Duration::from_secs(now), 0, random).map(|(lease, _)| lease)
    }

    #[test]
    fn who_asks_once_holds_nobody_up() {
        let (mut t, r) = (table(1), Counting::default());
        allocate(&mut t, &request("a", 1, 50.0), 0, &r).unwrap();
        let large = Request { once: true, ..named("b", 1, 100.0) };
        assert!(matches!(
            allocate(&mut t, &large, 0, &r),
            Err(AllocateError::NoCapacity { position: 0, .. })
        ));
        assert!(t.waiting(Duration::ZERO).is_empty());
        allocate(&mut t, &request("c", 1, 50.0), 0, &r).unwrap();
    }

    #[test]
    fn parts_of_the_multiprocessors() {
        let on = |sharing| Gpu { sharing, ..gpu(0, 16 * GIB) };
        let ask = |sm_count, sm_auto, percent| Request { sm_count, sm_auto, ..request("a", 1, percent) };
        assert_eq!(ask(33, false, 10.0).percent_of(&on(Sharing::Mps)), 25);
        assert_eq!(ask(34, false, 10.0).percent_of(&on(Sharing::Mps)), 26, "no fewer than asked for");
        assert_eq!(ask(500, false, 10.0).percent_of(&on(Sharing::Mps)), 100);
        assert_eq!(ask(0, true, 25.0).percent_of(&on(Sharing::Mps)), 25);
        assert_eq!(ask(0, true, 0.01).percent_of(&on(Sharing::Mps)), 1);
        assert_eq!(
            ask(0, true, 25.0).percent_of(&on(Sharing::TimeSlice)),
            100,
            "time-slicing knows no parts"
        );
        assert!(!ask(0, true, 25.0).limits_multiprocessors(), "it asks for no MPS");
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
        assert!(matches!(error, AllocateError::NoCapacity { .. }), "{error}");
        assert!(t.remove(Some("b"), &whole.id).is_none());
        assert!(t.remove(Some("c"), &whole.id).is_some());
        allocate(&mut t, &request("d", 1, 1.0), 0, &r).unwrap();
    }

    #[test]
    fn all_or_nothing_and_never() {
        let (mut t, r) = (table(2), Counting::default());
        allocate(&mut t, &request("a", 1, 100.0), 0, &r).unwrap();
        assert!(matches!(
            allocate(&mut t, &request("b", 2, 10.0), 0, &r),
            Err(AllocateError::NoCapacity { .. })
        ));
        assert!(matches!(allocate(&mut t, &request("b", 3, 10.0), 0, &r), Err(AllocateError::NeverFits(_))));
        let mut big = request("b", 1, 1.0);
        big.memory = Memory::Bytes(17 * GIB);
        assert!(matches!(allocate(&mut t, &big, 0, &r), Err(AllocateError::NeverFits(_))));
        for bad in [f64::NAN, -1.0, 101.0, f64::INFINITY] {
            assert!(matches!(allocate(&mut t, &request("b", 1, bad), 0, &r), Err(AllocateError::Invalid(_))));
        }
        // A share that rounds down to nothing is no lease.
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
        assert!(t.expire(Duration::from_secs(79), 0).is_empty(), "asking again renews");
        again.client = "b".into();
        assert_ne!(allocate(&mut t, &again, 20, &r).unwrap().id, first.id);
    }

    #[test]
    fn silence_ends_a_lease_and_a_restart_does_not() {
        let (mut t, r) = (table(1), Counting::default());
        let lease = allocate(&mut t, &request("a", 1, 100.0), 0, &r).unwrap();
        assert_eq!(t.renew("b", &lease.id, Duration::ZERO), None);
        assert_eq!(t.renew("a", &lease.id, Duration::from_secs(20)), Some(DEFAULT_TTL));
        assert!(t.expire(Duration::from_secs(79), 0).is_empty());
        let saved: Saved = serde_json::from_slice(&serde_json::to_vec(&t.save()).unwrap()).unwrap();
        let (mut t2, lost) =
            Table::new(vec![gpu(0, 16 * GIB)], Rules::default(), saved, Duration::from_secs(3));
        assert!(lost.is_empty());
        assert_eq!(t2.get(&lease.id, Duration::from_secs(3)).unwrap().0, &lease);
        assert_eq!(t2.next_deadline(), Some(Duration::from_secs(63)));
        assert_eq!(t2.expire(Duration::from_secs(63), 0), [lease]);
        let (_, lost) = Table::new(vec![gpu(1, 16 * GIB)], Rules::default(), t.save(), Duration::ZERO);
        assert_eq!(lost.len(), 1, "its GPU is gone");
    }

    fn waits(result: Result<Lease, AllocateError>) -> (u32, u32) {
        match result {
            Err(AllocateError::NoCapacity { position, waiting, .. }) => (position, waiting),
            other => panic!("{other:?}"),
        }
    }

    fn named(client: &str, gpus: u32, percent: f64) -> Request {
        Request { request_id: "r".into(), ..request(client, gpus, percent) }
    }

    #[test]
    fn sixteen_halves_fit_on_two_nodes_of_four() {
        let random = Counting::default();
        for clients in [1, 16] {
            let mut nodes = [table(4), table(4)];
            for i in 0..16 {
                let wish = request(&format!("vm-{}", i % clients), 1, 50.0);
                let fits = nodes.iter_mut().any(|n| allocate(n, &wish, 0, &random).is_ok());
                assert!(fits, "half GPU {i} of {clients} clients");
            }
            assert!(nodes.iter_mut().all(|n| allocate(n, &request("x", 1, 1.0), 0, &random).is_err()));
        }
    }

    #[test]
    fn eighty_one_boot_leases_on_eighty_gpus_wait_in_turn() {
        let (mut t, r) = (table(80), Counting::default());
        let leases: Vec<Lease> =
            (0..80).map(|i| allocate(&mut t, &named(&format!("vm-{i}"), 1, 100.0), 0, &r).unwrap()).collect();
        assert_eq!(waits(allocate(&mut t, &named("vm-80", 1, 100.0), 0, &r)), (1, 1));
        assert_eq!(waits(allocate(&mut t, &named("vm-81", 1, 100.0), 1, &r)), (2, 2));
        assert_eq!(waits(allocate(&mut t, &named("vm-80", 1, 100.0), 30, &r)), (1, 2), "keeps its place");
        t.remove(None, &leases[7].id);
        assert_eq!(waits(allocate(&mut t, &named("vm-81", 1, 100.0), 31, &r)), (2, 2), "not its turn");
        assert_eq!(
            waits(allocate(&mut t, &request("vm-82", 1, 1.0), 31, &r)).0,
            0,
            "nobody passes the queue"
        );
        let lease = allocate(&mut t, &named("vm-80", 1, 100.0), 32, &r).unwrap();
        assert_eq!(lease.shares[0].gpu, leases[7].shares[0].gpu);
        assert_eq!(waits(allocate(&mut t, &named("vm-81", 1, 100.0), 33, &r)), (1, 1));
        // A request that is not repeated loses its place.
        t.remove(None, &leases[8].id);
        assert_eq!(t.waiting(Duration::from_secs(33)).len(), 1);
        allocate(&mut t, &named("vm-83", 1, 100.0), 33 + QUEUE_TIMEOUT.as_secs(), &r).unwrap();
        assert!(t.waiting(Duration::from_secs(33) + QUEUE_TIMEOUT).is_empty());
    }

    #[test]
    fn a_clients_requests_wait_in_its_own_order() {
        let (mut t, r) = (table(3), Counting::default());
        let all = allocate(&mut t, &request("x", 3, 100.0), 0, &r).unwrap();
        let of = |client: &str, order: u32| Request {
            request_id: format!("r{order}"),
            order,
            ..request(client, order.max(1), 100.0)
        };
        let arriving = [of("a", 3), of("b", 2), of("a", 1), of("a", 0), of("b", 1), of("a", 2)];
        for wish in &arriving {
            waits(allocate(&mut t, wish, 0, &r));
        }
        let queue: Vec<_> =
            t.queue().into_iter().map(|w| (w.request.client.clone(), w.request.order)).collect();
        // Each client keeps its set of places; the request without an order keeps its own.
        let expected = [("a", 1), ("b", 1), ("a", 2), ("a", 0), ("b", 2), ("a", 3)];
        assert_eq!(queue, expected.map(|(client, order)| (client.to_owned(), order)));
        assert_eq!(waits(allocate(&mut t, &of("b", 2), 1, &r)), (5, 6));
        t.remove(None, &all.id);
        waits(allocate(&mut t, &of("a", 2), 2, &r));
        allocate(&mut t, &of("a", 1), 2, &r).unwrap();
    }

    #[test]
    fn priorities_and_requests_that_do_not_compete() {
        let (mut t, r) = (table(2), Counting::default());
        let both = allocate(&mut t, &request("a", 2, 100.0), 0, &r).unwrap();
        let low = Request { priority: Priority::BelowNormal, ..named("low", 1, 100.0) };
        assert_eq!(waits(allocate(&mut t, &low, 0, &r)), (1, 1));
        assert_eq!(waits(allocate(&mut t, &named("two", 2, 100.0), 1, &r)), (1, 2), "before the lower one");
        assert_eq!(waits(allocate(&mut t, &low, 2, &r)), (2, 2));
        t.remove(None, &both.id);
        allocate(&mut t, &Request { devices: vec![gpu(0, 0).uuid], ..request("x", 1, 10.0) }, 3, &r)
            .unwrap_err();
        let two = allocate(&mut t, &named("two", 2, 100.0), 4, &r).unwrap();
        t.remove(None, &two.id);
        allocate(&mut t, &low, 5, &r).unwrap();
        // A request for another model blocks no other request.
        let t4 = Request { model: "t4".into(), ..named("t4", 1, 100.0) };
        let one = Request { devices: vec![gpu(1, 0).uuid], ..request("b", 1, 60.0) };
        let held = allocate(&mut t, &one, 6, &r).unwrap();
        waits(allocate(&mut t, &t4, 6, &r));
        t.remove(None, &t.holders(&gpu(0, 0).uuid)[0].id.clone());
        allocate(&mut t, &Request { model: "H200".into(), ..request("c", 1, 100.0) }, 7, &r).unwrap();
        t.remove(None, &held.id);
        waits(allocate(&mut t, &Request { model: "t4".into(), ..request("d", 1, 1.0) }, 8, &r));
    }

    #[test]
    fn exclusive_leases_are_alone() {
        let (mut t, r) = (table(2), Counting::default());
        let alone = Request { sharing: Some(Sharing::Exclusive), ..request("a", 1, 25.0) };
        let first = allocate(&mut t, &alone, 0, &r).unwrap();
        let other = allocate(&mut t, &request("b", 1, 10.0), 0, &r).unwrap();
        assert_ne!(first.shares[0].gpu, other.shares[0].gpu);
        assert!(allocate(&mut t, &Request { client: "c".into(), ..alone.clone() }, 0, &r).is_err());
        t.remove(None, &other.id);
        allocate(&mut t, &alone, 0, &r).unwrap();
    }

    /// A GPU of each kind of sharing, all else being equal.
    fn mixed(sharing: &[Sharing]) -> Table {
        let gpus = sharing.iter().zip(0..).map(|(s, n)| Gpu { sharing: *s, ..gpu(2 * n, 16 * GIB) });
        Table::new(gpus.collect(), Rules::default(), Saved::default(), Duration::ZERO).0
    }

    /// UUIDs of a lease's GPUs.
    fn on(lease: &Lease) -> Vec<String> {
        lease.shares.iter().map(|s| s.gpu.clone()).collect()
    }

    fn wish(client: &str, sharing: &str, gpus: u32, percent: f64) -> Request {
        Request { sharing: Sharing::parse(sharing), ..request(client, gpus, percent) }
    }

    #[test]
    fn each_gpu_is_shared_in_its_own_way() {
        let ([alone, sliced, mps], r) = ([0, 2, 4].map(|n| gpu(n, 0).uuid), Counting::default());
        let mut t = mixed(&[Sharing::Exclusive, Sharing::TimeSlice, Sharing::Mps]);
        let mut get = |wish: Request| allocate(&mut t, &wish, 0, &r);
        // A request without a wish prefers MPS, then time slices, then an exclusive GPU.
        let first = get(wish("a", "", 1, 60.0)).unwrap();
        let second = get(wish("a", "", 1, 60.0)).unwrap();
        let third = get(wish("a", "", 1, 60.0)).unwrap();
        let got = [&first, &second, &third].map(|l| (on(l), l.mps, l.exclusive));
        let of = |uuid: &String, mps, exclusive| (vec![uuid.clone()], mps, exclusive);
        assert_eq!(got, [of(&mps, true, false), of(&sliced, false, false), of(&alone, false, true)]);
        let full = get(wish("a", "", 1, 60.0)).unwrap_err().to_string();
        assert!(full.contains("0 of 3 suitable ones have room"), "{full}");
        assert!(get(wish("a", "exclusive", 1, 10.0)).is_err());
        let there = |wish| Request { devices: vec![alone.clone()], ..wish };
        waits(get(there(wish("a", "", 1, 10.0))));
        assert!(matches!(get(there(wish("a", "mps", 1, 10.0))), Err(AllocateError::NeverFits(_))));
        let mixed = get(wish("a", "", 3, 10.0)).unwrap_err().to_string();
        assert!(mixed.contains("this server has 2 that are shared in one way"), "{mixed}");
    }

    #[test]
    fn a_gpu_alone_is_rather_for_who_wants_it() {
        let ([sliced, mps, alone], r) = ([0, 2, 4].map(|n| gpu(n, 0).uuid), Counting::default());
        let mut t = mixed(&[Sharing::TimeSlice, Sharing::Mps, Sharing::Exclusive]);
        let mut get = |wish: Request| allocate(&mut t, &wish, 0, &r).unwrap();
        let got = [(); 2].map(|()| get(wish("a", "exclusive", 1, 10.0)));
        assert_eq!(got.each_ref().map(on), [[alone.clone()], [sliced.clone()]]);
        assert!(got.iter().all(|l| l.exclusive));
        assert_eq!(on(&get(wish("b", "time-slice", 1, 10.0))), std::slice::from_ref(&mps));
        t.remove_where(|_| true);
        // One lease has all three: others share the first two with it.
        let all = allocate(&mut t, &wish("a", "time-slice", 3, 10.0), 0, &r).unwrap();
        assert_eq!((on(&all), all.mps, all.exclusive), (vec![sliced, mps, alone], false, false));
        let two = Request { sticky: on(&all), ..wish("b", "time-slice", 2, 10.0) };
        assert_eq!(on(&allocate(&mut t, &two, 0, &r).unwrap()), on(&all)[..2]);
        waits(allocate(&mut t, &wish("b", "time-slice", 3, 10.0), 0, &r));
        t.remove_where(|_| true);
        // A lease returns to the GPU that it had.
        let again = Request { sticky: on(&got[0]), ..wish("a", "time-slice", 1, 10.0) };
        assert_eq!(on(&allocate(&mut t, &again, 0, &r).unwrap()), on(&got[0]));
    }

    #[test]
    fn who_waits_for_a_gpu_alone_gets_it_whole() {
        let ([alone, shared], r) = ([0, 2].map(|n| gpu(n, 0).uuid), Counting::default());
        let mut t = mixed(&[Sharing::Exclusive, Sharing::TimeSlice]);
        let part =
            |client: &str, uuid: &str| Request { devices: vec![uuid.into()], ..named(client, 1, 10.0) };
        let first = allocate(&mut t, &part("a", &alone), 0, &r).unwrap();
        assert_eq!(waits(allocate(&mut t, &part("b", &alone), 0, &r)), (1, 1));
        assert_eq!(waits(allocate(&mut t, &part("c", &alone), 0, &r)), (2, 2));
        // They block no request on the other GPU.
        for client in ["d", "e"] {
            assert_eq!(
                on(&allocate(&mut t, &named(client, 1, 10.0), 0, &r).unwrap()),
                std::slice::from_ref(&shared)
            );
        }
        t.remove(None, &first.id);
        assert_eq!(waits(allocate(&mut t, &part("c", &alone), 1, &r)), (2, 2), "not its turn");
        let second = allocate(&mut t, &part("b", &alone), 1, &r).unwrap();
        assert_eq!(waits(allocate(&mut t, &part("c", &alone), 1, &r)), (1, 1), "though there is memory left");

        // A reserve is on shared GPUs while they have room.
        let mut t = mixed(&[Sharing::Exclusive, Sharing::TimeSlice]);
        let half = |gpus| Reserve { client: "vm-*".into(), gpus, memory: Memory::Percent(50.0) };
        t.set_rules(Rules { reserve: vec![half(1)], overcommit_percent: 100 });
        assert_eq!(on(&allocate(&mut t, &named("a", 1, 50.0), 0, &r).unwrap()), [shared]);
        let third = allocate(&mut t, &named("b", 1, 50.0), 0, &r).unwrap();
        assert_eq!(on(&third), on(&second));
        // Then it takes an exclusive GPU as a whole.
        t.remove(None, &third.id);
        t.set_rules(Rules { reserve: vec![half(2)], overcommit_percent: 100 });
        waits(allocate(&mut t, &named("b", 1, 10.0), 0, &r));
        assert_eq!(on(&allocate(&mut t, &part("vm-1", &alone), 0, &r).unwrap()), [alone]);
    }

    #[test]
    fn a_gpu_alone_is_lent_and_comes_back_whole() {
        let ([alone, shared], r) = ([0, 2].map(|n| gpu(n, 0).uuid), Counting::default());
        let mut t = mixed(&[Sharing::Exclusive, Sharing::TimeSlice]);
        let part =
            |client: &str, uuid: &str| Request { devices: vec![uuid.into()], ..request(client, 1, 10.0) };
        let lender = allocate(&mut t, &part("a", &alone), 0, &r).unwrap();
        let other = allocate(&mut t, &part("b", &shared), 0, &r).unwrap();
        let candidates = [other.id, lender.id.clone()];
        assert_eq!(t.lenders(&part("c", &alone), &candidates), candidates[1..], "the other does not help");
        assert!(t.set_aside(&lender.id));
        let taker = allocate(&mut t, &part("c", &alone), 0, &r).unwrap();
        // It may move to any GPU, but could have no other one alone.
        t.held.get_mut(&lender.id).unwrap().lease.pinned = false;
        assert_eq!(t.take_back(&lender.id, true), place(1, 1));
        let candidates = [candidates[0].clone(), taker.id.clone()];
        assert_eq!(t.lenders_back(&lender.id, true, &candidates), candidates[1..]);
        assert!(t.set_aside(&taker.id));
        assert_eq!(t.take_back(&lender.id, true), Ok(false));
        assert_eq!(t.take_back(&taker.id, false), place(1, 1), "the same for it");
        // Leases that shared a GPU before it became exclusive stay, and come back one by one.
        let late = allocate(&mut t, &part("d", &shared), 0, &r).unwrap();
        let mut gpus = t.gpus().to_vec();
        gpus[1].sharing = Sharing::Exclusive;
        let (mut t, lost) = Table::new(gpus, Rules::default(), t.save(), Duration::ZERO);
        assert!(lost.is_empty());
        assert_eq!(t.holders(&shared).len(), 2);
        waits(allocate(&mut t, &part("e", &shared), 0, &r));
        assert!(t.set_aside(&late.id));
        assert_eq!(t.take_back(&late.id, false), place(1, 1));
    }

    #[test]
    fn what_is_reserved_is_kept() {
        let (mut t, r) = (table(2), Counting::default());
        let reserve = Reserve { client: "vm-*".into(), gpus: 1, memory: Memory::Percent(75.0) };
        t.set_rules(Rules { reserve: vec![reserve], overcommit_percent: 100 });
        allocate(&mut t, &request("db", 1, 100.0), 0, &r).unwrap();
        waits(allocate(&mut t, &request("db", 1, 50.0), 0, &r));
        allocate(&mut t, &request("db", 1, 25.0), 0, &r).unwrap();
        allocate(&mut t, &request("vm-1", 1, 75.0), 0, &r).unwrap();
        waits(allocate(&mut t, &request("vm-2", 1, 10.0), 0, &r));
    }

    #[test]
    fn overcommit_is_said_and_bounded() {
        let (mut t, r) = (table(1), Counting::default());
        t.set_rules(Rules { reserve: vec![], overcommit_percent: 150 });
        for _ in 0..3 {
            allocate(&mut t, &request("a", 1, 50.0), 0, &r).unwrap();
        }
        waits(allocate(&mut t, &request("a", 1, 1.0), 0, &r));
        let mut whole = request("a", 1, 100.0);
        whole.memory = Memory::Bytes(17 * GIB);
        assert!(
            matches!(allocate(&mut t, &whole, 0, &r), Err(AllocateError::NeverFits(_))),
            "no more than there is"
        );
    }

    #[test]
    fn gpus_are_taken_out_and_put_back() {
        let (mut t, r) = (table(1), Counting::default());
        let uuid = gpu(0, 0).uuid;
        let lease = allocate(&mut t, &request("a", 1, 10.0), 0, &r).unwrap();
        assert!(t.withdraw(&uuid, Some(Withdrawn::Off("a fan is loud".into()))) && !t.withdraw("x", None));
        let error = allocate(&mut t, &request("a", 1, 10.0), 0, &r).unwrap_err();
        assert!(error.to_string().contains("a fan is loud"), "{error}");
        assert_eq!(t.renew("a", &lease.id, Duration::ZERO), Some(DEFAULT_TTL), "leases on it stay");
        let (t2, _) = Table::new(t.gpus.clone(), Rules::default(), t.save(), Duration::ZERO);
        assert_eq!(t2.withdrawn(&uuid).unwrap().reason(), "a fan is loud", "also after a restart");
        t.withdraw(&uuid, None);
        allocate(&mut t, &request("a", 1, 10.0), 0, &r).unwrap();
        t.drain(Some("maintenance".into()));
        let error = allocate(&mut t, &request("a", 1, 10.0), 0, &r).unwrap_err();
        assert!(error.to_string().contains("maintenance"), "{error}");
        let (mut t2, _) = Table::new(t.gpus.clone(), Rules::default(), t.save(), Duration::ZERO);
        assert_eq!(t2.draining(), Some("maintenance"), "also after a restart");
        t2.drain(None);
        t2.stop();
        assert_eq!(t2.draining(), Some("it stops"));
        let (t2, _) = Table::new(t2.gpus.clone(), Rules::default(), t2.save(), Duration::ZERO);
        assert_eq!(t2.draining(), None, "a stop is over with the restart");
        t.drain(None);
        allocate(&mut t, &request("a", 1, 10.0), 0, &r).unwrap();
    }

    fn limited(entries: &[(&'static str, Bound)]) -> Effective {
        let layer = crate::limits::Layer::Client("a".into());
        let entries = entries.iter().map(|(name, bound)| Entry {
            name,
            layer: layer.clone(),
            bound: bound.clone(),
            origin: "f.toml:3".into(),
            of_user: false,
        });
        crate::limits::Limits { entries: entries.collect(), ..Default::default() }.of("a", "")
    }

    #[test]
    fn limits_refuse_by_name() {
        let (mut t, r) = (table(4), Counting::default());
        let with = |name: &'static str, bound: Bound, request: Request| Request {
            limits: limited(&[("gpus", Bound::Number(3)), (name, bound)]),
            ..request
        };
        allocate(&mut t, &with("workers", Bound::Number(1), request("a", 2, 10.0)), 0, &r).unwrap();
        let persistent = Request { persistent: true, ..request("a", 1, 10.0) };
        let cases = [
            (
                with("workers", Bound::Number(1), request("a", 2, 10.0)),
                "limit gpus = 3 of client a (f.toml:3): 2 held, 2 more",
            ),
            (with("memory", Bound::Memory(Memory::Percent(5.0)), request("a", 1, 10.0)), "limit memory = 5%"),
            (with("memory", Bound::Memory(Memory::Bytes(MIB)), request("a", 1, 10.0)), "limit memory = 1MiB"),
            (with("sm_percent", Bound::Number(50), request("a", 1, 10.0)), "limit sm_percent = 50"),
            (
                with("models", Bound::Names(vec!["B200".into()]), request("a", 1, 10.0)),
                "limit models = [\"B200\"]",
            ),
            (with("max_persistent", Bound::Number(0), persistent), "limit max_persistent = 0"),
        ];
        for (request, text) in cases {
            match allocate(&mut t, &request, 0, &r) {
                Err(AllocateError::Limit(e)) => assert!(e.to_string().contains(text), "{e}"),
                other => panic!("{text}: {other:?}"),
            }
        }
        assert!(t.waiting(Duration::ZERO).is_empty(), "who may not have it does not wait for it");
        // Another client's leases do not count, and a lease that may not be renewed without end
        // ends.
        let ttl = Bound::Time(Duration::from_secs(100));
        let lease = allocate(&mut t, &with("lease_ttl", ttl.clone(), request("b", 1, 10.0)), 0, &r).unwrap();
        let boot = Request { persistent: true, ..with("lease_ttl", ttl, request("b", 1, 10.0)) };
        let boot = allocate(&mut t, &boot, 0, &r).unwrap();
        assert_eq!((lease.until_unix, boot.until_unix), (100, 0));
        assert!(t.expire(Duration::ZERO, 99).is_empty());
        assert_eq!(t.expire(Duration::ZERO, 100), [lease]);
    }

    #[test]
    fn a_lease_lives_as_long_as_asked_for_within_lease_ttl() {
        let (mut t, r) = (table(1), Counting::default());
        let day = Duration::from_secs(86400);
        let time = |days: u32| Bound::Time(day * days);
        for (asked, limit, granted) in [
            (day * 7, None, day * 7),
            (day * 7, Some(time(0)), day * 7),
            (day * 7, Some(time(3)), day * 3),
            (day * 2, Some(time(3)), day * 2),
            (day * 9999, Some(time(0)), day * 366),
            (day * 9999, Some(time(9998)), day * 366),
            (day, Some(Bound::Time(Duration::from_millis(5))), Duration::from_secs(1)),
            (Duration::from_millis(5), Some(time(3)), Duration::from_secs(1)),
            (Duration::ZERO, Some(time(3)), DEFAULT_TTL),
        ] {
            let asks = request("a", 1, 1.0);
            let limits =
                limit.clone().map_or_else(Effective::default, |bound| limited(&[("lease_ttl", bound)]));
            let lease = allocate(&mut t, &Request { ttl: asked, limits, ..asks }, 0, &r).unwrap();
            assert_eq!(lease.ttl, granted, "{asked:?} {limit:?}");
            t.remove(None, &lease.id);
        }
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

    fn place(position: u32, waiting: u32) -> Result<bool, Place> {
        Err(Place { position, waiting })
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
        assert_eq!(table.take_back(&a, false), place(1, 1), "c is in the way");
        assert_eq!(table.take_back(&b, false), place(2, 2), "a asked first, though there is room for b");
        assert_eq!(table.take_back(&a, false), place(1, 2), "and b is behind it");
        assert!(get(&mut table, "d", 50.0).is_err(), "nor is anybody served who comes later");
        // After a restart they are still lent, and none waits.
        let (mut again, lost) =
            Table::new(table.gpus().to_vec(), Rules::default(), table.save(), Duration::ZERO);
        assert!(lost.is_empty() && again.is_aside(&a));
        assert_eq!(again.take_back(&b, false), Ok(false));
        table.stay_aside(&a);
        assert_eq!(table.take_back(&b, false), Ok(false));
        table.remove(None, &b);
        table.remove(None, &c);
        assert_eq!((table.take_back(&a, false), table.is_aside(&a)), (Ok(false), false));
    }

    #[test]
    fn what_has_no_programs_comes_back_on_another_gpu_of_its_kind() {
        // Even numbers are one kind, odd ones another.
        let mut table = table(6);
        let random = Counting::default();
        let on = |n: u32| gpu(n, 0).uuid;
        let get = |table: &mut Table, client: &str, n: u32, pinned: bool| {
            let wish = Request { devices: vec![on(n)], ..request(client, 1, 100.0) };
            let mut lease = table.allocate(&wish, Duration::ZERO, 0, &random).unwrap().0;
            assert!(lease.pinned);
            lease.pinned = pinned;
            table.held.get_mut(&lease.id).unwrap().lease.pinned = pinned;
            lease
        };
        let (a, b) = (get(&mut table, "a", 0, false), get(&mut table, "b", 2, true));
        assert!(table.set_aside(&a.id) && table.set_aside(&b.id));
        let takers = [get(&mut table, "c", 0, false), get(&mut table, "d", 2, false)];
        assert_eq!(table.take_back(&a.id, false), place(1, 1), "its programs' memory is bound to the GPU");
        table.stay_aside(&a.id);
        assert_eq!(table.take_back(&b.id, true), place(1, 1), "its client wants this one");
        table.stay_aside(&b.id);
        assert_eq!(table.take_back(&a.id, true), Ok(true));
        let (moved, _) = table.get(&a.id, Duration::ZERO).unwrap();
        assert_eq!((&moved.shares[0].gpu, moved.shares[0].limit_bytes), (&on(4), a.shares[0].limit_bytes));
        assert!(moved.fencing_token > takers[1].fencing_token);
        // Its own GPU comes before others, and never a withdrawn one.
        assert!(table.set_aside(&a.id));
        assert_eq!(table.take_back(&a.id, true), Ok(false));
        assert!(table.set_aside(&a.id));
        table.withdraw(&on(4), Some(Withdrawn::Off("a fan is loud".into())));
        assert_eq!(table.take_back(&a.id, true), place(1, 1));
        table.remove(None, &takers[0].id);
        assert_eq!(table.take_back(&a.id, true), Ok(true));
        assert_eq!(table.get(&a.id, Duration::ZERO).unwrap().0.shares[0].gpu, on(0));
        // The lender may be on any GPU of the kind.
        table.withdraw(&on(4), None);
        let e = get(&mut table, "e", 4, false);
        let t4 = get(&mut table, "f", 1, false);
        table.set_aside(&a.id);
        let g = get(&mut table, "g", 0, false);
        let candidates = [t4.id, e.id.clone(), g.id];
        assert_eq!(table.lenders_back(&a.id, true, &candidates), [e.id]);
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
            let kinds = [Sharing::TimeSlice, Sharing::Exclusive, Sharing::TimeSlice];
            let (mut t, r) = (mixed(&kinds), Counting::default());
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
                        t.expire(now, 0);
                        prop_assert!(t.next_deadline().is_none_or(|d| d > now));
                    }
                    Step::Restart => {
                        let before: Vec<_> = t.held.keys().cloned().collect();
                        let (fresh, lost) = Table::new(t.gpus.clone(), t.rules.clone(), t.save(), now);
                        prop_assert!(lost.is_empty());
                        prop_assert_eq!(fresh.held.keys().cloned().collect::<Vec<_>>(), before);
                        t = fresh;
                    }
                }
                for g in t.gpus() {
                    prop_assert!(t.used().get(g.uuid.as_str()).is_none_or(|used| *used <= g.memory_bytes));
                    prop_assert!(g.sharing != Sharing::Exclusive || t.holders(&g.uuid).len() <= 1);
                }
            }
        }
    }
}
