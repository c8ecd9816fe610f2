//! Between `gpuserver` and one of its worker processes, on a `SOCK_SEQPACKET` socket that the worker inherits as file
//! descriptor [`WORKER_FD`]: one postcard message per packet, without a length prefix.
//!
//! A worker is presumed controlled by its client: the supervisor believes nothing here that would give it rights.

use serde::{Deserialize, Serialize};

/// Version of these messages. A server takes up the workers of an earlier server of the same version only: any change of what
/// is written to the socket raises it.
pub const VERSION: u32 = 5;
/// The descriptor number of the supervision socket in a worker.
pub const WORKER_FD: i32 = 3;
/// Longest packet, in bytes.
pub const MAX_PACKET: usize = 64 * 1024;
/// [`Start::staging_bytes`] where nothing else is said.
pub const STAGING: u64 = 256 << 20;

/// Variables of NVIDIA's MPS by which a program limits itself.
pub const MPS_VARIABLES: &[&str] =
    &["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "CUDA_MPS_CLIENT_PRIORITY"];

/// From the supervisor to the worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToWorker {
    /// First message: load the driver and get warm.
    Start(Start),
    /// A data connection for this worker (as SCM_RIGHTS in the same packet). `preface` was read already.
    Adopt {
        /// Comes back in [`FromWorker::Admitted`] or [`FromWorker::Refused`].
        number: u64,
        /// The preface's bytes.
        preface: Vec<u8>,
        /// The peer's address, for the log.
        peer: String,
    },
    /// End now; the client is told `reason`. Under MPS as with [`FromWorker::Ended`].
    Stop {
        /// For the client's error text and the log.
        reason: String,
    },
    /// Answers [`FromWorker::Ended`] under MPS: the GPU work is over, the process may exit.
    Exit,
    /// Answers [`FromWorker::Presented`].
    Admission {
        /// Why it is not served.
        refused: Option<String>,
    },
    /// Call the driver no more until [`ToWorker::Resume`], if nothing is going on; answered with [`FromWorker::Paused`].
    Pause,
    /// Go on.
    Resume,
    /// Answers [`FromWorker::MemoryWanted`].
    MemoryGranted {
        /// Which of [`Start::devices`].
        device: u32,
        /// The request's.
        serial: u64,
        /// Bytes that the worker may use beyond what it was granted before; 0: none.
        bytes: u64,
        /// Bytes of the lease's share that nobody was granted.
        left: u64,
    },
    /// Others want memory: give back what was granted and is not in use, each device by a [`FromWorker::MemoryReturned`].
    MemoryRecall,
    /// Another server supervises from now on: a [`FromWorker::Presented`] or [`FromWorker::MemoryWanted`] without an answer is sent again.
    TakenOver,
}

/// What a worker is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Start {
    /// Id of the worker.
    pub worker: [u8; 16],
    /// Lease the worker belongs to.
    pub lease: String,
    /// Tickets are opened with it.
    pub ticket_key: [u8; 32],
    /// Absolute path of the CUDA driver library.
    pub driver: String,
    /// UUIDs (16 raw bytes) of the GPUs that the client sees, in its device order.
    pub devices: Vec<DeviceLimit>,
    /// Whether connections without TLS are refused.
    pub require_tls: bool,
    /// Folder of the client's module cache, if there is one.
    pub module_cache: Option<String>,
    /// Most bytes that this folder may hold.
    pub module_cache_bytes: u64,
    /// Initialise the driver before a client comes (not under MPS).
    pub warm: bool,
    /// It is a client of NVIDIA's MPS: it fails if the driver did not find the daemon, and before it ends the supervisor ends its GPU
    /// work, once told by [`FromWorker::Ended`], and answers with [`ToWorker::Exit`].
    pub mps: bool,
    /// Seconds a worker waits for a lost client to come back.
    pub resume_grace_s: u32,
    /// Bytes of host memory that mirrors of the client's memory and images on their way may each take.
    pub staging_bytes: u64,
    /// Whether it gives up what it does not need.
    pub isolation: Isolation,
}

/// Whether a worker gives up what it does not need before it serves a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Isolation {
    /// It does not.
    Off,
    /// As far as the host allows it.
    Try,
    /// All of it, or it does not start.
    Require,
}

/// One GPU of a worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceLimit {
    /// UUID, as `cuDeviceGetUuid` gives it.
    pub uuid: [u8; 16],
    /// Bytes that the lease may use on it; `u64::MAX` is no limit.
    pub memory_bytes: u64,
    /// Share of the multiprocessors in percent.
    pub sm_percent: u32,
    /// Bytes that a context counts.
    pub context_bytes: u64,
}

/// From the worker to the supervisor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromWorker {
    /// The driver is loaded (and initialised, if asked for); connections can be handed over.
    Ready {
        /// SHA-256 of the worker's ephemeral certificate.
        fingerprint: [u8; 32],
        /// As `cuDriverGetVersion` says.
        cuda_version: u32,
    },
    /// The driver cannot be used; the worker ends.
    Failed {
        /// What failed, for the log.
        reason: String,
    },
    /// A process has shown its ticket; answered with [`ToWorker::Admission`].
    Presented(ClientProcess),
    /// A connection has shown that it is the process's: it counts from now on, until the worker exits.
    Admitted {
        /// Which [`ToWorker::Adopt`].
        number: u64,
        /// Its lane.
        lane: u16,
    },
    /// A connection was refused, or closed before it was admitted; the client received the same reason.
    Refused {
        /// Which [`ToWorker::Adopt`].
        number: u64,
        /// Why, for the log.
        reason: String,
    },
    /// What the process has done so far. Sent at most every second while something changes.
    Usage(Usage),

    /// The client ended, the driver failed, or it was told to stop: the worker exits after this, under MPS after [`ToWorker::Exit`].
    Ended {
        /// Why, for the log and accounting.
        reason: String,
        /// Whether its GPU work is known to be done.
        quiet: bool,
    },
    /// The answer to [`ToWorker::Pause`].
    Paused {
        /// Whether it calls the driver no more. Else frames or the GPU's work were not done, and it goes on.
        quiet: bool,
    },
    /// The client wants something of a paused worker. Told once.
    Wanted,
    /// What a client could make it do is bounded, but for what this host does not allow; told before [`FromWorker::Ready`].
    Contained {
        /// What could not be applied, and why.
        lacking: Vec<String>,
    },
    /// The process needs more device memory than its worker was granted. The sum over a lease is the supervisor's to count.
    MemoryWanted {
        /// Which of [`Start::devices`].
        device: u32,
        /// Comes back in the answer.
        serial: u64,
        /// At least so many bytes; 0 only asks how much is left.
        bytes: u64,
    },
    /// The program wants more mapped host memory than [`Start::staging_bytes`].
    StagingFull {
        /// What it would have then.
        bytes: u64,
    },
    /// Granted memory that is not in use goes back.
    MemoryReturned {
        /// Which of [`Start::devices`].
        device: u32,
        /// How much.
        bytes: u64,
    },
}

/// The process on the client that a worker serves.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientProcess {
    /// User id there.
    pub uid: u32,
    /// The user's name there; empty if there is none.
    pub user: String,
    /// Process id there.
    pub pid: u32,
    /// The program's name.
    pub program: String,
    /// The file that it runs.
    pub executable: String,
    /// Whether its connection is encrypted.
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
    /// CUDA contexts on the device that has the most of them; each takes one of an MPS server's places.
    pub contexts: u32,
    /// Microseconds since the GPU or a copy of the client's was last seen at work.
    pub idle_usec: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One of each message, with every field different from its neighbours.
    fn written() -> Vec<u8> {
        let device = DeviceLimit { uuid: [7; 16], memory_bytes: 1 << 40, sm_percent: 50, context_bytes: 300 };
        let start = Start {
            worker: [1; 16],
            lease: "lease".into(),
            ticket_key: [2; 32],
            driver: "/driver".into(),
            devices: vec![device],
            require_tls: true,
            module_cache: Some("/cache".into()),
            module_cache_bytes: 2 << 30,
            warm: false,
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
        let to = [
            ToWorker::Start(start),
            ToWorker::Adopt { number: 600, preface: vec![3; 40], peer: "peer".into() },
            ToWorker::Stop { reason: "reason".into() },
            ToWorker::Exit,
            ToWorker::Admission { refused: Some("reason".into()) },
            ToWorker::Pause,
            ToWorker::Resume,
            ToWorker::MemoryGranted { device: 1, serial: 200, bytes: 300, left: 400 },
            ToWorker::MemoryRecall,
            ToWorker::TakenOver,
        ];
        let usage = Usage {
            calls: 1,
            bytes_to_device: 200,
            bytes_from_device: 300,
            memory_bytes: 400,
            contexts: 450,
            idle_usec: 500,
        };
        let from = [
            FromWorker::Ready { fingerprint: [4; 32], cuda_version: 13000 },
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
        ];
        let to = to.iter().flat_map(|m| postcard::to_allocvec(m).unwrap());
        to.chain(from.iter().flat_map(|m| postcard::to_allocvec(m).unwrap())).collect()
    }

    #[test]
    fn other_messages_are_another_version() {
        let hash = blake3::hash(&written()).to_hex();
        assert_eq!((VERSION, &hash[..16]), (5, "638308055aae8f33"), "raise VERSION, and write both here");
    }
}
