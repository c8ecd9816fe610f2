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
pub(crate) mod tests;
