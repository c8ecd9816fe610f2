//! Messages between `gpuserver` and one of its worker processes.
//!
//! The worker inherits a `SOCK_SEQPACKET` socket as file descriptor [`WORKER_FD`]. A packet carries
//! one message: a JSON object, whose key `is` names the message.
//!
//! A worker outlives the server that started it, so the two may come from different releases. Their
//! messages therefore only grow: a new field has a default, and a receiver ignores unknown fields
//! and messages. An answer to a new request may therefore never come.
//!
//! A worker is presumed to be controlled by its client: no message from it can give it rights.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::message::Malformed;
use crate::share::Name;

/// Version of these messages, raised by a change that an earlier release cannot read.
pub const VERSION: u32 = 10;
/// Oldest version of workers that a server takes over from an earlier one.
///
/// A change that raises [`VERSION`] leaves this number alone if the server can still serve workers
/// of the version before: their records say which messages they speak.
pub const OLDEST: u32 = 10;
/// Descriptor number of the supervision socket in a worker.
pub const WORKER_FD: i32 = 3;
/// Longest packet, in bytes.
pub const MAX_PACKET: usize = 64 * 1024;
/// Most [`FromWorker::ShareWanted`] of one worker without an answer.
pub const MAX_SHARE_REQUESTS: usize = 64;
/// Default of [`Start::staging_bytes`].
pub const STAGING: u64 = 256 << 20;

/// Variables of NVIDIA's MPS with which a program limits itself.
pub const MPS_VARIABLES: &[&str] =
    &["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "CUDA_MPS_CLIENT_PRIORITY"];

/// Encodes a message for a packet.
///
/// # Panics
/// Never for the messages of this module: they all serialize.
#[allow(clippy::expect_used, reason = "derived `Serialize` of types without maps")]
pub fn encode<T: Serialize>(message: &T) -> Vec<u8> {
    serde_json::to_vec(message).expect("messages of this module serialize")
}

/// Decodes a packet.
pub fn decode<T: DeserializeOwned>(packet: &[u8]) -> Result<T, Malformed> {
    serde_json::from_slice(packet).map_err(|_| Malformed::Body)
}

/// A message from the supervisor to the worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "is")]
pub enum ToWorker {
    /// The first message: load the driver, and get ready if it asks for a warm worker.
    Start(Start),
    /// A data connection for this worker (as SCM_RIGHTS in the same packet).
    Adopt {
        /// Number that [`FromWorker::Admitted`] or [`FromWorker::Refused`] repeats.
        number: u64,
        /// Bytes of the preface, which the supervisor has read from the connection.
        preface: Vec<u8>,
        /// Address of the peer, for the log.
        peer: String,
    },
    /// Exit now, and send the client the reason; under MPS wait as with [`FromWorker::Ended`].
    Stop {
        /// Reason for the client's error text and the log.
        reason: String,
    },
    /// Answers [`FromWorker::Ended`] under MPS: the GPU work is over, the process may exit.
    Exit,
    /// Answers [`FromWorker::Sealed`].
    Opened {
        /// Reason why the ticket is no good; `None` if it is genuine.
        refused: Option<String>,
    },
    /// Answers [`FromWorker::Presented`].
    Admission {
        /// Reason why the process is not served; `None` admits it.
        refused: Option<String>,
    },
    /// Stop calling the driver until [`ToWorker::Resume`], if no work is under way.
    ///
    /// The worker answers with [`FromWorker::Paused`].
    Pause,
    /// Continue after [`ToWorker::Pause`].
    Resume,
    /// Move the device memory of this paused process to host memory.
    ///
    /// The worker answers with [`FromWorker::Moved`], if it has reported `parks`.
    MoveOut {
        /// Milliseconds that the driver may take to lock the process.
        limit_ms: u32,
    },
    /// Move the device memory back; answered with [`FromWorker::Moved`].
    MoveBack,
    /// Answers [`FromWorker::MemoryWanted`].
    MemoryGranted {
        /// Index in [`Start::devices`].
        device: u32,
        /// Serial number of the request.
        serial: u64,
        /// Bytes that the worker may use in addition to earlier grants; 0 if none.
        bytes: u64,
        /// Bytes of the lease's share that no worker was granted.
        left: u64,
    },
    /// Other workers need memory: return unused granted memory.
    ///
    /// The worker answers with one [`FromWorker::MemoryReturned`] for each device.
    MemoryRecall,
    /// Another server supervises from now on: repeat open questions.
    ///
    /// These are a [`FromWorker::Sealed`], a [`FromWorker::Presented`], a
    /// [`FromWorker::MemoryWanted`] or a [`FromWorker::ShareWanted`] without an answer. Those about
    /// images are not repeated.
    TakenOver,
    /// Another worker of the lease wants an object of this one.
    ///
    /// The worker answers with [`FromWorker::ShareGiven`].
    ShareAsked {
        /// Number that the answer repeats.
        number: u64,
        /// Name of the object, as the other process presented it.
        name: Name,
    },
    /// Answers [`FromWorker::ShareWanted`], with the driver's descriptor in the same packet.
    ShareGranted {
        /// Serial number of the request.
        serial: u64,
        /// Device memory that its own worker counts; else the reason of a refusal.
        given: Result<Charge, Unshared>,
        /// Whether another lease of the user has it, so that this worker counts it, too.
        #[serde(default)]
        count: bool,
    },
    /// The worker that counted an object of which this one has imports no longer does: count it.
    ShareInherited {
        /// Id of the worker that exported it.
        worker: [u8; 16],
        /// Number of the object.
        object: u64,
    },
    /// A worker that shared objects with this one has exited: its work counts as complete.
    ShareLost {
        /// Id of the worker.
        worker: [u8; 16],
    },
    /// Answers [`FromWorker::ImageWanted`], with the file to read in the same packet.
    ///
    /// The worker checks the content: only the hash names it.
    Image {
        /// Serial number of the request.
        serial: u64,
        /// Length of the image; `None`, without a file: the server does not have it.
        bytes: Option<u64>,
    },
    /// Answers [`FromWorker::ImageOffered`], with a pipe to write into in the same packet.
    ImageRoom {
        /// Serial number of the request.
        serial: u64,
        /// Whether there is a pipe; else the server does not want the image.
        room: bool,
    },
    /// A message of a later release, which the receiver ignores.
    #[serde(other)]
    Unknown,
}

/// A call that moves device memory and has failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MoveFailed {
    /// Name of the call.
    pub call: String,
    /// Its `CUresult`.
    pub status: i32,
}

/// Device memory that counts for a worker.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Charge {
    /// Index in [`Start::devices`], which is the same for all workers of a lease.
    pub device: u32,
    /// Number of bytes.
    pub bytes: u64,
}

/// Imports of one object that a worker has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holding {
    /// Id of the worker that exported it.
    pub worker: [u8; 16],
    /// Number of the object.
    pub object: u64,
    /// Number of the imports.
    pub imports: u32,
    /// Whether this worker counts the memory ([`ToWorker::ShareInherited`]).
    pub inherited: bool,
}

/// Most elements of [`FromWorker::SharesHeld`].
pub const MAX_HOLDINGS: usize = 256;

/// Reason why a worker does not get a shared object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Unshared {
    /// No worker of this name serves a process of the lease, or of another one that its user has on
    /// the same GPUs, on this server.
    Elsewhere,
    /// The worker has no such object, or not with this secret.
    Unknown,
    /// Too many requests are open.
    Busy,
    /// The driver of the object's worker refused, with this `CUresult`.
    Driver(i32),
}

/// Settings of a worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Start {
    /// Id of the worker.
    pub worker: [u8; 16],
    /// Id of the lease that the worker belongs to.
    pub lease: String,
    /// Key that opens tickets; without one the worker asks by [`FromWorker::Sealed`].
    ///
    /// Endpoints of measurements have one of their own, and workers of earlier releases their
    /// lease's. A program that takes over such a worker can act for the lease's other programs.
    #[serde(default)]
    pub ticket_key: Option<[u8; 32]>,
    /// Absolute path of the CUDA driver library.
    pub driver: String,
    /// GPUs that the client sees, in its device order.
    pub devices: Vec<DeviceLimit>,
    /// Whether connections without TLS are refused.
    pub require_tls: bool,
    /// Whether the server keeps images, so that the worker asks for them and offers them.
    #[serde(default)]
    pub images: bool,
    /// Whether to initialise the driver before a client connects (not under MPS).
    pub warm: bool,
    /// Whether a warm worker reads a sample of the GPUs' memory, and reports
    /// [`FromWorker::Sampled`].
    #[serde(default)]
    pub verify_memory: bool,
    /// Whether the worker is a client of NVIDIA's MPS.
    ///
    /// It then fails if the driver does not find the daemon. Before it exits, it reports
    /// [`FromWorker::Ended`]. The supervisor stops its GPU work and answers with
    /// [`ToWorker::Exit`].
    pub mps: bool,
    /// Seconds that a worker waits for a lost client to return.
    pub resume_grace_s: u32,
    /// Bytes of host memory for mirrors of the client's memory, and again for incomplete images.
    pub staging_bytes: u64,
    /// Whether the worker gives up rights that it does not need.
    pub isolation: Isolation,
}

/// Whether a worker gives up the rights that it does not need before it serves a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Isolation {
    /// The worker keeps all rights.
    Off,
    /// The worker gives up the rights that the host allows it to give up.
    Try,
    /// The worker gives up all of them, or does not start.
    Require,
}

impl Isolation {
    /// Returns the word for a helper's command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Try => "try",
            Self::Require => "require",
        }
    }

    /// Reads a word of [`Isolation::as_str`].
    pub fn parse(word: &str) -> Option<Self> {
        [Self::Off, Self::Try, Self::Require].into_iter().find(|isolation| isolation.as_str() == word)
    }
}

/// One GPU of a worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceLimit {
    /// UUID, as `cuDeviceGetUuid` returns it.
    pub uuid: [u8; 16],
    /// Bytes of the device that the lease may use; `u64::MAX` is no limit.
    pub memory_bytes: u64,
    /// Share of the multiprocessors in percent.
    pub sm_percent: u32,
    /// Bytes that a context counts.
    pub context_bytes: u64,
}

/// A message from the worker to the supervisor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "is")]
pub enum FromWorker {
    /// The driver is loaded (and initialised, if wanted); the worker accepts connections.
    Ready {
        /// SHA-256 of the worker's ephemeral certificate.
        fingerprint: [u8; 32],
        /// Result of `cuDriverGetVersion`.
        cuda_version: u32,
        /// Whether the worker answers [`ToWorker::MoveOut`].
        #[serde(default)]
        parks: bool,
    },
    /// The driver does not work; the worker exits.
    Failed {
        /// Reason, for the log.
        reason: String,
    },
    /// A process has shown this ticket, and the worker has no key to open it.
    ///
    /// The supervisor answers with [`ToWorker::Opened`].
    Sealed {
        /// The ticket as the process sent it.
        ticket: Vec<u8>,
    },
    /// A process has presented its ticket; answered with [`ToWorker::Admission`].
    Presented(ClientProcess),
    /// A connection has proved that it is the process's; it counts until the worker exits.
    Admitted {
        /// Number of the [`ToWorker::Adopt`].
        number: u64,
        /// Lane of the connection; 0 is the log.
        lane: u16,
    },
    /// A connection was refused, or closed before its admission.
    ///
    /// The client received the same reason.
    Refused {
        /// Number of the [`ToWorker::Adopt`].
        number: u64,
        /// Reason, for the log.
        reason: String,
    },
    /// Counters of the process, sent at most every second while they change.
    Usage(Usage),

    /// The client's process exited, the driver failed, or the supervisor stopped the worker.
    ///
    /// The worker exits after this message, under MPS after [`ToWorker::Exit`].
    Ended {
        /// Reason, for the log and accounting.
        reason: String,
        /// Whether all GPU work of the worker is known to be done.
        quiet: bool,
    },
    /// The answer to [`ToWorker::Pause`].
    Paused {
        /// Whether the worker stopped calling the driver.
        ///
        /// Otherwise work was under way, and the worker continues.
        quiet: bool,
    },
    /// The answer to [`ToWorker::MoveOut`] and [`ToWorker::MoveBack`].
    Moved {
        /// The driver's refusal, after which the memory is where it was; `None`: it has moved.
        failed: Option<MoveFailed>,
    },
    /// The client of a paused worker has sent frames; sent once.
    Wanted,
    /// The worker has given up its rights, as far as this host allows.
    ///
    /// The message precedes [`FromWorker::Ready`]. From then on, a client in control of the worker
    /// can do no more than the remaining rights allow.
    Contained {
        /// Rights that it could not give up, and why.
        lacking: Vec<String>,
    },
    /// The process needs more device memory than its worker was granted.
    ///
    /// The supervisor accounts the sum over a lease.
    MemoryWanted {
        /// Index in [`Start::devices`].
        device: u32,
        /// Serial number that the answer repeats.
        serial: u64,
        /// Minimum number of bytes; 0 only asks how much is left.
        bytes: u64,
    },
    /// The program wants more mapped host memory than [`Start::staging_bytes`].
    StagingFull {
        /// Bytes of host memory that mirrors would take, including the refused request.
        bytes: u64,
    },
    /// Returns granted memory that is not in use.
    MemoryReturned {
        /// Index in [`Start::devices`].
        device: u32,
        /// Number of returned bytes.
        bytes: u64,
    },
    /// The process imports an object of another worker; answered with [`ToWorker::ShareGranted`].
    ShareWanted {
        /// Serial number that the answer repeats.
        serial: u64,
        /// Name of the object, as the process presented it.
        name: Name,
        /// Whether the worker counts what another lease has. Workers of earlier releases do not,
        /// and get objects of their own lease only.
        #[serde(default)]
        counts: bool,
    },
    /// Answers [`ToWorker::ShareAsked`], with the driver's descriptor in the same packet.
    ShareGiven {
        /// Number of the request.
        number: u64,
        /// Device memory that the worker counts; else the reason of a refusal, which has no
        /// descriptor.
        given: Result<Charge, Unshared>,
    },
    /// One import of an object no longer exists.
    ShareDropped {
        /// Id of the worker that exported it.
        worker: [u8; 16],
        /// Number of the object.
        object: u64,
    },
    /// The process has released an object that it gave to others, and counts it no longer.
    ShareEnded {
        /// Number of the object.
        object: u64,
    },
    /// All imports of the process, in any number of messages, after [`ToWorker::TakenOver`].
    SharesHeld {
        /// At most [`MAX_HOLDINGS`] of them.
        held: Vec<Holding>,
    },
    /// The program has no connection and may come back, or has come back.
    ///
    /// The worker reports an outage of less than a second only at its end.
    Outage {
        /// Milliseconds without a connection.
        ms: u64,
        /// Whether the program has come back.
        over: bool,
    },
    /// The worker lacks an image; answered with [`ToWorker::Image`].
    ///
    /// The server looks among the images of the worker's client only.
    ImageWanted {
        /// Serial number that the answer repeats.
        serial: u64,
        /// BLAKE3 hash of the image.
        hash: [u8; 32],
    },
    /// The driver has accepted an image that the client sent; answered with
    /// [`ToWorker::ImageRoom`].
    ImageOffered {
        /// Serial number that the answer repeats.
        serial: u64,
        /// BLAKE3 hash of the image.
        hash: [u8; 32],
        /// Length of the image.
        bytes: u64,
    },
    /// The worker has read memory of a GPU that it never wrote; precedes [`FromWorker::Ready`].
    Sampled {
        /// Index in [`Start::devices`].
        device: u32,
        /// Number of bytes that it read.
        bytes: u64,
        /// Number of them that the driver had not cleared.
        left: u64,
    },
    /// A message of a later release, which the receiver ignores.
    #[serde(other)]
    Unknown,
}

/// The process on the client that a worker serves.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientProcess {
    /// User id on the client.
    pub uid: u32,
    /// Name of the user on the client; empty if it has none.
    pub user: String,
    /// Process id on the client.
    pub pid: u32,
    /// Name of the program.
    pub program: String,
    /// File that the program runs.
    pub executable: String,
    /// Whether the connection is encrypted.
    pub encrypted: bool,
}

/// Counters of one worker since its start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Driver calls replayed.
    pub calls: u64,
    /// Bytes copied to the device.
    pub bytes_to_device: u64,
    /// Bytes copied from the device.
    pub bytes_from_device: u64,
    /// Device memory in use, in bytes.
    pub memory_bytes: u64,
    /// CUDA contexts on the device that has most of them; each takes one place of an MPS server.
    pub contexts: u32,
    /// Microseconds since the GPU or a copy of the client was last seen at work.
    pub idle_usec: u64,
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::share::{Kind, Secret};

    /// Returns each message once, with every field different from its neighbours.
    ///
    /// Fields newer than [`FIRST`] have their defaults.
    fn messages() -> (Vec<ToWorker>, Vec<FromWorker>) {
        let device = DeviceLimit { uuid: [7; 16], memory_bytes: 1 << 40, sm_percent: 50, context_bytes: 300 };
        let start = Start {
            worker: [1; 16],
            lease: "lease".into(),
            ticket_key: Some([2; 32]),
            driver: "/driver".into(),
            devices: vec![device],
            require_tls: true,
            images: false,
            warm: false,
            verify_memory: false,
            mps: true,
            resume_grace_s: 60,
            staging_bytes: STAGING,
            isolation: Isolation::Try,
        };
        let process = ClientProcess {
            uid: 1000,
            user: "user".into(),
            pid: 42,
            program: "program".into(),
            executable: "/a".into(),
            encrypted: true,
        };
        let name = Name { kind: Kind::Memory, worker: [5; 16], object: 850, secret: Secret([6; 16]) };
        let holding = Holding { worker: [9; 16], object: 1500, imports: 1600, inherited: true };
        let to = vec![
            ToWorker::Start(start),
            ToWorker::Adopt { number: 600, preface: vec![3; 64], peer: "peer".into() },
            ToWorker::Stop { reason: "reason".into() },
            ToWorker::Exit,
            ToWorker::Admission { refused: Some("reason".into()) },
            ToWorker::Pause,
            ToWorker::Resume,
            ToWorker::MemoryGranted { device: 1, serial: 200, bytes: 300, left: 400 },
            ToWorker::MemoryRecall,
            ToWorker::TakenOver,
            ToWorker::ShareAsked { number: 900, name },
            ToWorker::ShareAsked { number: 950, name: Name { kind: Kind::Pointer, ..name } },
            ToWorker::ShareGranted { serial: 1000, given: Err(Unshared::Driver(801)), count: false },
            ToWorker::ShareInherited { worker: [7; 16], object: 1050 },
            ToWorker::ShareLost { worker: [7; 16] },
            ToWorker::Opened { refused: Some("reason".into()) },
            ToWorker::Image { serial: 1600, bytes: Some(1650) },
            ToWorker::ImageRoom { serial: 1700, room: true },
            ToWorker::MoveOut { limit_ms: 2100 },
            ToWorker::MoveBack,
        ];
        let usage = Usage {
            calls: 1,
            bytes_to_device: 200,
            bytes_from_device: 300,
            memory_bytes: 400,
            contexts: 450,
            idle_usec: 500,
        };
        let from = vec![
            FromWorker::Ready { fingerprint: [4; 32], cuda_version: 13000, parks: false },
            FromWorker::Failed { reason: "failed".into() },
            FromWorker::Presented(process),
            FromWorker::Admitted { number: 700, lane: 9 },
            FromWorker::Refused { number: 800, reason: "refused".into() },
            FromWorker::Usage(usage),
            FromWorker::Ended { reason: "ended".into(), quiet: true },
            FromWorker::Paused { quiet: true },
            FromWorker::Wanted,
            FromWorker::Contained { lacking: vec!["seccomp".into()] },
            FromWorker::MemoryWanted { device: 1, serial: 200, bytes: 300 },
            FromWorker::StagingFull { bytes: 300 },
            FromWorker::MemoryReturned { device: 1, bytes: 300 },
            FromWorker::ShareWanted { serial: 1100, name, counts: false },
            FromWorker::ShareGiven { number: 1200, given: Ok(Charge { device: 1225, bytes: 1250 }) },
            FromWorker::ShareDropped { worker: [8; 16], object: 1300 },
            FromWorker::ShareEnded { object: 1400 },
            FromWorker::SharesHeld { held: vec![holding] },
            FromWorker::Outage { ms: 1500, over: true },
            FromWorker::Sealed { ticket: vec![10; 64] },
            FromWorker::ImageWanted { serial: 1800, hash: [11; 32] },
            FromWorker::ImageOffered { serial: 1900, hash: [12; 32], bytes: 1950 },
            FromWorker::Sampled { device: 1, bytes: 2000, left: 2050 },
            FromWorker::Moved { failed: Some(MoveFailed { call: "call".into(), status: 2200 }) },
        ];
        (to, from)
    }

    /// The messages as the first release with this [`VERSION`] wrote them; later ones add lines.
    const FIRST: &str = include_str!("supervise/messages.jsonl");

    /// Fields of [`Start`] that only earlier releases have: a server starts the worker of its own.
    const DROPPED: [&str; 2] = ["module_cache", "module_cache_bytes"];

    /// Returns `true` if `present` is `first` with further fields.
    fn extends(present: &Value, first: &Value) -> bool {
        match (present, first) {
            (Value::Object(present), Value::Object(first)) => first.iter().all(|(key, value)| {
                DROPPED.contains(&key.as_str()) || present.get(key).is_some_and(|now| extends(now, value))
            }),
            (Value::Array(present), Value::Array(first)) => {
                present.len() == first.len()
                    && present.iter().zip(first).all(|(now, then)| extends(now, then))
            }
            _ => present == first,
        }
    }

    fn check<T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(message: &T, line: &str) {
        assert_eq!(decode::<T>(line.as_bytes()).as_ref(), Ok(message), "this release reads the first one");
        let (present, first) = (encode(message), serde_json::from_str(line).unwrap());
        let present = serde_json::from_slice(&present).unwrap();
        assert!(extends(&present, &first), "the first release does not read {present}, but {line}");
    }

    #[test]
    fn the_first_release_of_this_version_and_this_one_read_each_other() {
        assert_eq!(VERSION, 10, "write the new version's messages into the file");
        let (to, from) = messages();
        let mut lines = FIRST.lines();
        for message in &to {
            check(message, lines.next().unwrap());
        }
        for message in &from {
            check(message, lines.next().unwrap());
        }
        assert_eq!(lines.next(), None);
    }

    #[test]
    fn additions_of_a_later_release_are_ignored() {
        let later = br#"{"is":"Paused","quiet":true,"later":[{"a":1}]}"#;
        assert_eq!(decode(later), Ok(FromWorker::Paused { quiet: true }));
        let later = br#"{"is":"Dance","steps":[3,4]}"#;
        assert_eq!(decode(later), Ok(FromWorker::Unknown));
        assert_eq!(decode(later), Ok(ToWorker::Unknown));
        for bad in [&b"{}"[..], b"3", br#"{"is":"Paused"}"#, br#"{"is":"Exit"} {}"#, &[b'['; 4096]] {
            assert_eq!(decode::<FromWorker>(bad), Err(Malformed::Body));
        }
    }

    #[test]
    fn the_longest_list_fits_into_a_packet() {
        let held = Holding { worker: [255; 16], object: u64::MAX, imports: u32::MAX, inherited: false };
        let packet = encode(&FromWorker::SharesHeld { held: vec![held; MAX_HOLDINGS] });
        assert!(packet.len() <= MAX_PACKET, "{}", packet.len());
    }
}
