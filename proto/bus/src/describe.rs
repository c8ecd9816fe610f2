//! The JSON of `Describe`. Within one schema it only gains keys.
//!
//! A reader takes a key with `serde(default)` for optional: the daemon may be of another version.

use std::collections::BTreeMap;
use std::path::PathBuf;

use gpusession_common::usage::UsageSums;
use serde::{Deserialize, Serialize};

/// Version of the JSON.
pub const SCHEMA: u32 = 1;

/// State of the daemon as one user may see it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Described {
    /// [`SCHEMA`].
    pub schema: u32,
    /// Version of the daemon.
    pub version: String,
    /// `starting`, `ready`, `degraded` or `offline`.
    pub state: String,
    /// Whether the configuration has leases that begin with a session or a first call.
    pub leases_on_demand: bool,
    /// Number of GPUs of all leases that this machine wants now.
    pub gpus_wanted: u32,
    /// Number of those that it has.
    pub gpus_leased: u32,
    /// Whether every boot lease was held at one time since the start of the daemon.
    pub boot_allocation_complete: bool,
    /// Files that were read.
    #[serde(default)]
    pub configuration: Vec<PathBuf>,
    /// Variables of logins.
    pub environment: BTreeMap<String, String>,
    /// `None` before the client has joined a pool, and from older daemons.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity: Option<Identity>,
    /// In the order in which they were first wanted.
    pub leases: Vec<Lease>,
    /// In the order of the configuration.
    pub servers: Vec<Server>,
    /// Empty from older daemons.
    #[serde(default)]
    pub sessions: Vec<Session>,
}

/// This client's certificate of the pool.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Identity {
    /// Name of the client.
    pub name: String,
    /// Microseconds since the epoch at which the certificate ends.
    pub expires_usec: u64,
    /// Why the latest renewal failed.
    pub trouble: Option<String>,
}

/// A lease that this machine has or wants.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Lease {
    /// Id from the server; while pending, an id made of the name.
    pub id: String,
    /// Configured name; empty without one.
    pub name: String,
    /// `pending`, `active`, `idle`, `parked` and so on, as `State` on D-Bus.
    pub state: String,
    /// `boot`, `session`, `user` or `background`.
    pub class: String,
    /// Id of the login session whose end releases it.
    pub session: Option<String>,
    /// Control group whose processes alone may use it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub control_group: Option<String>,
    /// `None` for all users.
    pub uid: Option<u32>,
    /// Name of that user; empty for all users.
    pub user: String,
    /// Whether a user asked for it once.
    pub requested: bool,
    /// Number of GPUs that are wanted.
    pub gpus: u32,
    /// Empty while pending.
    pub server: String,
    /// Memory of each GPU that the lease may use; `None` while pending.
    pub memory_limit_bytes: Option<u64>,
    /// Share of the multiprocessors in percent; while pending, the wanted one.
    pub sm_percent: u32,
    /// Microseconds since the epoch.
    pub created_usec: u64,
    /// Microseconds since the epoch at which it ends unless renewed; 0 while pending.
    pub expires_usec: u64,
    /// Microseconds since the epoch; 0 while in use.
    pub idle_since_usec: u64,
    /// 0 for never or unknown.
    pub idle_timeout_usec: u64,
    /// Number of processes that use it.
    pub processes: usize,
    /// Whether programs' data is encrypted; `false` while pending.
    pub encrypted: bool,
    /// Empty while pending.
    pub transport: String,
    /// Reason for it, for people; empty while pending.
    pub transport_reason: String,
    /// Why it is not held, or its latest trouble: one line.
    pub trouble: Option<String>,
    /// Word for programs, such as `no-capacity`.
    pub trouble_kind: Option<String>,
    /// Programs of the asking user, for root of all users, in the last 10 minutes.
    pub failures: Vec<Failure>,
    /// Programs whose connection broke at least once.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub interruptions: Vec<Interruption>,
    /// Place in the server's queue, from 1.
    pub position: Option<u32>,
    /// Length of that queue.
    pub waiting: Option<u32>,
    /// Microseconds until the next try, while pending.
    pub retry_in_usec: Option<u64>,
    /// Program that asked.
    pub who: String,
    /// Reason that it gave.
    pub why: String,
    /// Empty while pending.
    pub devices: Vec<Device>,
}

impl Lease {
    /// Returns the configured name, or the id of a lease without one.
    pub fn name_or_id(&self) -> &str {
        if self.name.is_empty() { &self.id } else { &self.name }
    }
}

/// A program that could not begin on a lease, or lost its GPUs.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Failure {
    /// Microseconds since the epoch.
    pub usec: u64,
    /// Uid of the program.
    pub uid: u32,
    /// Empty if the user database knows no name.
    pub user: String,
    /// Pid that it had on this machine.
    pub pid: u32,
    /// Name of the executable.
    pub program: String,
    /// The program had GPUs and lost them.
    pub running: bool,
    /// One line, without control characters.
    pub reason: String,
}

/// A program whose connection to its server broke, and has come back or may still.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Interruption {
    /// Uid of the program.
    pub uid: u32,
    /// Pid on this machine.
    pub pid: u32,
    /// Name of the executable.
    pub program: String,
    /// Microseconds since the epoch at which the connection broke; `None` if it is back.
    pub since_usec: Option<u64>,
    /// Number of interruptions so far.
    pub number: u32,
}

/// A GPU of a lease.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Device {
    /// Number within the lease, from 0.
    pub ordinal: u32,
    /// `GPU-` and hexadecimal digits, as in `nvidia-smi -L`.
    pub uuid: String,
    /// Model, such as `NVIDIA H100`.
    pub name: String,
    /// As `State` of its D-Bus object.
    pub state: String,
    /// Memory of the card.
    pub memory_bytes: u64,
    /// Memory that the lease may use.
    pub limit_bytes: u64,
    /// Such as `9.0`.
    pub compute_capability: String,
    /// PCI address on the server's host.
    pub pci_address: String,
    /// Version of the server's NVIDIA driver.
    pub driver_version: String,
    /// Such as `13.0`.
    pub cuda_version: String,
}

/// A server of the pool, by the heartbeats of the daemon.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Server {
    /// Name; the address until the server has reported its name.
    pub name: String,
    /// HOST:PORT of the control service.
    pub address: String,
    /// `connecting`, `online`, `suspect`, `offline`, `stopped`, `draining` or `unauthorized`.
    pub state: String,
    /// Reason of the last failed call.
    pub trouble: Option<String>,
    /// Microseconds since the epoch; 0 for never.
    pub last_seen_usec: u64,
    /// Round trip of the last call, in microseconds.
    pub rtt_usec: u64,
    /// Program and version, such as `gpuserver 0.1.0`.
    pub software: String,
    /// Version of the data plane's protocol; 0 until reported.
    pub protocol: u32,
    /// Number of GPUs that it serves.
    pub gpus: u32,
    /// Number of those that no lease holds.
    pub gpus_free: u32,
}

/// A login session whose user may have leases.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Session {
    /// The login's `GPUSESSION_ID`.
    pub id: String,
    /// Uid of the user who logged in.
    pub uid: u32,
    /// Name of that user.
    pub user: String,
    /// PAM service that opened it.
    pub service: String,
    /// Pid of the process that opened it first.
    pub leader: u32,
    /// Id of logind's session.
    pub logind: Option<String>,
}

/// Servers as they answer now, with their cards: the JSON of `DescribeServers`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Survey {
    /// [`SCHEMA`].
    pub schema: u32,
    /// In configuration order; also those that do not answer.
    pub servers: Vec<Surveyed>,
}

/// A server's answer to a survey.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Surveyed {
    /// Name; the address of a server that does not answer.
    pub name: String,
    /// HOST:PORT of the control service.
    pub address: String,
    /// `online` or `draining`; `unauthorized`, `stopped` or `offline` with a trouble.
    pub state: String,
    /// Why it does not answer.
    pub trouble: Option<String>,
    /// Round trip of this call, in microseconds.
    pub rtt_usec: u64,
    /// The server's clock less this machine's, in microseconds; `None` from older servers.
    pub clock_skew_usec: Option<i64>,
    /// Program and version, such as `gpuserver 0.1.0`.
    pub software: String,
    /// Newest version of the data plane's protocol that its workers serve.
    pub protocol: u32,
    /// Oldest version that they serve; `None` if that is `protocol`.
    pub oldest_protocol: Option<u32>,
    /// Version of its NVIDIA driver.
    pub driver_version: String,
    /// Such as `13.0`.
    pub cuda_version: String,
    /// HOST:PORT of the data plane.
    pub data_addresses: Vec<String>,
    /// Number of leases of all clients.
    pub leases: Option<u32>,
    /// Number of requests that wait for GPUs.
    pub waiting: Option<u32>,
    /// Number of running programs of all clients.
    pub programs: Option<u32>,
    /// In the order of its indices.
    pub cards: Vec<Card>,
    /// Use of its GPUs in the present hour and the 24 before it; empty from older servers.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub last_24h: Vec<Usage>,
}

/// Use of a server's GPUs by all clients, by this one, or by the asking user.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Usage {
    /// `all`, `machine` or `you`.
    pub by: String,
    /// Sums, whose keys stand beside `by`.
    #[serde(flatten)]
    pub sums: UsageSums,
}

/// An endpoint of a server for one measurement: the JSON of `Measure`. It holds a secret.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Endpoint {
    /// Name of the server.
    pub server: String,
    /// HOST:PORT of the data plane.
    pub addresses: Vec<String>,
    /// Id that the preface names in place of a worker.
    pub id: [u8; 16],
    /// SHA-256 of the endpoint's certificate.
    pub fingerprint: [u8; 32],
    /// Key of prefaces and of the ticket.
    pub key: [u8; 32],
    /// Whether the server lets programs of this machine send data without encryption.
    pub clear: bool,
}

/// A card of a server, and its load by all users.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Card {
    /// Number within the server, from 0.
    pub index: u32,
    /// `GPU-` and hexadecimal digits, as in `nvidia-smi -L`.
    pub uuid: String,
    /// Model, such as `NVIDIA H100`.
    pub name: String,
    /// `free`, `leased`, `off`, `off-pending`, `stopped` or `broken`.
    pub state: String,
    /// Memory of the card.
    pub memory_bytes: u64,
    /// Memory that no lease holds.
    pub free_bytes: u64,
    /// How leases share it: `time-slice`, `mps` or `exclusive`; empty from older servers.
    pub sharing: String,
    /// Memory that programs use.
    pub used_bytes: Option<u64>,
    /// Time with a running kernel, by NVML; `None` if unknown.
    pub utilization_percent: Option<u32>,
    /// Degrees Celsius, by NVML; `None` if unknown.
    pub temperature_c: Option<u32>,
    /// Milliwatts, by NVML; `None` if unknown.
    pub power_mw: Option<u32>,
    /// Programs of the asking user on it, for root those of all users of this machine.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub your_programs: Vec<CardProgram>,
}

/// A program of this machine on a card.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct CardProgram {
    /// Pid on this machine.
    pub pid: u32,
    /// Uid of the program.
    pub uid: u32,
    /// Empty if the user database knows no name.
    pub user: String,
    /// Name of the executable.
    pub name: String,
    /// Id of its lease.
    pub lease: String,
    /// Memory of the card that it uses.
    pub used_bytes: u64,
}

impl Survey {
    /// Describes the servers' answers.
    pub fn new(servers: Vec<Surveyed>) -> Self {
        Self { schema: SCHEMA, servers }
    }

    /// Formats the JSON, with sorted keys.
    pub fn to_json(&self) -> String {
        serde_json::to_value(self)
            .unwrap_or_else(|_| unreachable!("strings and numbers make JSON"))
            .to_string()
    }
}

impl Described {
    /// Formats the JSON, with sorted keys.
    pub fn to_json(&self) -> String {
        serde_json::to_value(self)
            .unwrap_or_else(|_| unreachable!("strings, numbers and UTF-8 paths make JSON"))
            .to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Text of a lease without GPUs, as every version of the daemon has sent it.
    const PENDING: &str = concat!(
        r#"{"boot_allocation_complete":false,"configuration":["/etc/gpusession/gpusession.toml"],"#,
        r#""environment":{"NCCL_DEBUG":"WARN"},"gpus_leased":0,"gpus_wanted":1,"leases":["#,
        r#"{"class":"boot","created_usec":5,"devices":[],"encrypted":false,"expires_usec":0,"#,
        r#""failures":[{"pid":7,"program":"a.out","reason":"end","running":true,"uid":1000,"#,
        r#""usec":6,"user":"ada"}],"gpus":1,"id":"one","idle_since_usec":0,"idle_timeout_usec":0,"#,
        r#""memory_limit_bytes":null,"name":"one","position":1,"processes":0,"requested":false,"#,
        r#""retry_in_usec":9,"server":"","session":null,"sm_percent":100,"state":"pending","#,
        r#""transport":"","transport_reason":"","trouble":"full","trouble_kind":"no-capacity","#,
        r#""uid":null,"user":"","waiting":2,"who":"gpusessiond","why":"[[lease]] one"}],"#,
        r#""leases_on_demand":false,"schema":1,"servers":[{"address":"gpu1:7601","gpus":2,"#,
        r#""gpus_free":0,"last_seen_usec":8,"name":"gpu1","protocol":3,"rtt_usec":4,"#,
        r#""software":"gpuserver 0.1.0","state":"online","trouble":null}],"sessions":["#,
        r#"{"id":"s","leader":11,"logind":null,"service":"sshd","uid":1000,"user":"ada"}],"#,
        r#""state":"starting","version":"0.1.0"}"#,
    );

    #[test]
    fn the_text_is_read_and_written_alike() {
        let described: Described = serde_json::from_str(PENDING).unwrap();
        assert_eq!(described.leases[0].failures[0].user, "ada");
        assert_eq!(described.to_json(), PENDING);
    }

    #[test]
    fn a_device_has_its_keys() {
        let keys = serde_json::to_value(Device::default()).unwrap();
        let keys: Vec<_> = keys.as_object().unwrap().keys().cloned().collect();
        let expected = [
            "compute_capability",
            "cuda_version",
            "driver_version",
            "limit_bytes",
            "memory_bytes",
            "name",
            "ordinal",
            "pci_address",
            "state",
            "uuid",
        ];
        assert_eq!(keys, expected);
    }

    #[test]
    fn keys_of_a_later_version_are_ignored_and_those_of_an_earlier_one_suffice() {
        let lease: Lease = serde_json::from_str(r#"{"id":"one","later":true}"#).unwrap();
        assert_eq!(lease.name_or_id(), "one");
    }
}
