//! NVML's facts about GPUs.
//!
//! They travel between `libnvidia-ml.so.1` and the daemon, and between `gpuserver` and its monitor
//! process. The table in `proto/nvml` defines the queries, which are only names and bytes in these
//! messages.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};

/// Maximum number of queries in one request.
pub const MAX_QUERIES: usize = 256;
/// Longest inputs, and longest outputs, of all queries of a request, in bytes.
pub const MAX_BYTES: usize = 24 * 1024;

/// A query about one device.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Query {
    /// UUID of the GPU.
    pub device: [u8; 16],
    /// Name of the NVML function.
    pub call: String,
    /// Input, in the form that the table of calls defines.
    pub input: Vec<u8>,
}

/// The answer to a [`Query`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// `nvmlReturn_t`.
    pub status: u32,
    /// Outputs, after success.
    pub output: Vec<u8>,
}

/// GPUs of a process's leases, at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct View {
    /// Devices in the order in which a program sees them.
    pub devices: Vec<Device>,
    /// Answers, in the order of the queries.
    pub answers: Vec<Answer>,
}

/// One GPU of a lease.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// UUID.
    pub uuid: [u8; 16],
    /// Server's name in the pool.
    pub server: String,
    /// Id of the lease; a server answers only queries within one.
    pub lease: String,
    /// Version of the server's driver, as in 580.159.04; empty if unknown.
    pub driver_version: String,
    /// Version of the server's NVML; empty if it has none.
    pub nvml_version: String,
    /// 1000 * major + 10 * minor.
    pub cuda_version: u32,
    /// Model of the card.
    pub name: String,
    /// Address as in 0000:01:00.0.
    pub pci_address: String,
    /// Compute capability: major, minor.
    pub compute: (u32, u32),
    /// Memory that the lease may use, in bytes.
    pub memory_bytes: u64,
    /// Memory that the lease's processes use, in bytes.
    pub used_bytes: u64,
    /// Processes that use the GPU through this lease.
    pub processes: Vec<Process>,
    /// Latest faults since the server's start.
    pub faults: Vec<Fault>,
}

/// A process of the client.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// Process id on the client.
    pub pid: u32,
    /// Name of the program.
    pub name: String,
    /// Device memory of the GPU, in bytes.
    pub used_bytes: u64,
}

/// A fault of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// Number of the fault, counted by the server.
    pub number: u64,
    /// `nvmlEventType`: 8 is an Xid, 2 an uncorrected ECC error.
    pub event: u64,
    /// Number of the Xid, if the event is one.
    pub data: u64,
}

/// A message from `gpuserver` to its monitor, on standard input.
///
/// It is framed as in [`crate::message`] and answered by one [`FromMonitor`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToMonitor {
    /// Answered by [`FromMonitor::Gpus`].
    Read,
    /// Answered by [`FromMonitor::Answers`].
    Ask(Vec<Query>),
}

/// A message from the monitor, on standard output.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromMonitor {
    /// The first message: NVML works.
    Ready {
        /// Result of `nvmlSystemGetDriverVersion`.
        driver_version: String,
        /// Result of `nvmlSystemGetNVMLVersion`.
        nvml_version: String,
    },
    /// The first message instead: NVML does not work, and the monitor exits.
    Failed(String),
    /// The answer to [`ToMonitor::Read`].
    Gpus(Vec<GpuReading>),
    /// The answer to [`ToMonitor::Ask`], in the order of the queries.
    Answers(Vec<Answer>),
    /// A fault of a GPU, at any time.
    Fault {
        /// UUID of the GPU.
        device: [u8; 16],
        /// As in [`Fault`].
        event: u64,
        /// As in [`Fault`].
        data: u64,
    },
    /// At most once: NVML reports no faults of these GPUs (of all GPUs, if the list is empty).
    Unwatched(Vec<[u8; 16]>),
}

/// Facts about a GPU that the server itself uses; `None` if the card or its NVML lacks one.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuReading {
    /// UUID.
    pub uuid: [u8; 16],
    /// Device memory in use by all processes of the host, in bytes.
    pub memory_used_bytes: Option<u64>,
    /// Device memory that no process uses and the driver does not reserve, in bytes.
    #[serde(default)]
    pub memory_free_bytes: Option<u64>,
    /// Compute processes of the host: process id, and bytes of device memory if NVML knows.
    pub processes: Vec<(u32, Option<u64>)>,
    /// Percent of the last sample period with a kernel running.
    pub utilization_percent: Option<u32>,
    /// Temperature of the card, in degrees Celsius.
    pub temperature_c: Option<u32>,
    /// Power draw of the card, in milliwatts.
    pub power_mw: Option<u32>,
    /// Uncorrected ECC errors since the driver was loaded.
    pub uncorrected_ecc: Option<u64>,
    /// `nvmlComputeMode_t`.
    pub compute_mode: Option<u32>,
}

/// Formats a UUID as programs write it: `GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx`.
pub fn uuid_text(uuid: &[u8; 16]) -> String {
    let hex = format!("{:032x}", u128::from_be_bytes(*uuid));
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

/// Makes the GPUs of a program distinct, given their UUIDs and PCI addresses in its order.
///
/// Two of its leases may be shares of one GPU, and servers number their buses alike. The result has
/// for each GPU the UUID that the program sees, and a number to add to its PCI domain.
pub fn tell_apart<'a>(gpus: impl IntoIterator<Item = ([u8; 16], &'a str)>) -> Vec<([u8; 16], u32)> {
    let (mut uuids, mut places) = (HashSet::new(), HashSet::new());
    let told = |(uuid, pci): ([u8; 16], &str)| {
        let mut uuid = u128::from_be_bytes(uuid);
        while !uuids.insert(uuid) {
            uuid = uuid.wrapping_add(1);
        }
        let (domain, slot) = pci.split_once(':').unwrap_or(("", pci));
        let domain = u32::from_str_radix(domain, 16).unwrap_or(0);
        let mut more = 0u32;
        while !places.insert((domain.wrapping_add(more), slot.to_ascii_lowercase())) {
            more += 1;
        }
        (uuid.to_be_bytes(), more)
    };
    gpus.into_iter().map(told).collect()
}

/// Reads the bytes of a UUID from the form of [`uuid_text`].
pub fn uuid_bytes(text: &str) -> Option<[u8; 16]> {
    let hex: String = text.strip_prefix("GPU-")?.chars().filter(|c| *c != '-').collect();
    let digits = hex.len() == 32 && hex.bytes().all(|b| b.is_ascii_hexdigit());
    Some(u128::from_str_radix(&hex, 16).ok().filter(|_| digits)?.to_be_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_of_a_gpu_get_distinct_uuids() {
        let first = [1; 16];
        let (mut second, mut third) = (first, first);
        (second[15], third[15]) = (2, 3);
        let gpus = [
            (first, "0000:0F:00.0"),
            (first, "0000:0f:00.0"),
            ([9; 16], "00000000:0f:00.0"),
            ([8; 16], "0000:10:00.0"),
            (second, "0001:10:00.0"),
        ];
        let told = tell_apart(gpus);
        assert_eq!(told, [(first, 0), (second, 1), ([9; 16], 2), ([8; 16], 0), (third, 0)]);
    }

    #[test]
    fn uuids() {
        let text = "GPU-01234567-89ab-cdef-0123-456789abcdef";
        let bytes = uuid_bytes(text).unwrap();
        assert_eq!((bytes[0], bytes[15]), (0x01, 0xef));
        assert_eq!(uuid_text(&bytes), text);
        for bad in ["", "GPU-", "01234567", "GPU-+1234567-89ab-cdef-0123-456789abcdef", "GPU-0123"] {
            assert_eq!(uuid_bytes(bad), None, "{bad}");
        }
    }
}
