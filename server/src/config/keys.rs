//! The table of keys: names, defaults, explanations, and which change without a restart.

use gpusession_common::words::Sharing;

use crate::limits::Layer;

/// A key of the configuration.
#[derive(Debug, Clone, Copy)]
pub struct Key {
    /// Dotted name, as in the file.
    pub name: &'static str,
    /// Default as text.
    pub default: &'static str,
    /// Explanation for people.
    pub help: &'static str,
}

/// Keys whose changes take effect without a restart; so do limits and reserves.
const LIVE: &[&str] = &[
    "warm_workers",
    "worker_idle_exit",
    "warn_after",
    "park_after",
    "release_after",
    "lend_after",
    "return_limit",
    "parked_max",
    "overcommit",
    "users.scope",
    "drain_timeout",
    "accounting_keep",
];

/// Returns `true` if a change of the key takes effect without a restart.
pub fn is_live(key: &str) -> bool {
    LIVE.contains(&key) || key.starts_with("limits.")
}

/// All keys, in the order of their explanation.
pub const KEYS: &[Key] = &[
    Key { name: "name", default: "the host name", help: "name of this server in the pool" },
    Key { name: "listen", default: "[::]:7601", help: "address of the control service" },
    Key {
        name: "advertise",
        default: "the address a client reached",
        help: "HOST, HOST:PORT or a list of them: addresses that clients of the pool use",
    },
    Key {
        name: "data_ports",
        default: "7602",
        help: "port for programs' data, or a range \"FIRST-LAST\", of which the first free port is used",
    },
    Key {
        name: "metrics_listen",
        default: "off",
        help: "address for Prometheus (GET /metrics, no encryption, no password), such as \"127.0.0.1:7603\"; \"off\": none",
    },
    Key {
        name: "gpus",
        default: "all",
        help: "\"all\", or a list of indices and UUIDs; the server does not start if one is missing",
    },
    Key {
        name: "driver",
        default: "NVIDIA's libcuda.so.1",
        help: "absolute path of the CUDA driver library that workers load",
    },
    Key { name: "registry", default: "local", help: "\"local\": this server decides alone about its GPUs" },
    Key { name: "encryption", default: "on", help: "\"on\", or \"off\" for peers inside trusted_networks" },
    Key {
        name: "trusted_networks",
        default: "[]",
        help: "networks (CIDR) whose peers may connect without encryption",
    },
    Key {
        name: "sharing",
        default: "time-slice",
        help: "how leases share GPUs that gpu_sharing does not list: \"time-slice\": in turns; \"mps\": at the same \
               time, by NVIDIA's MPS; \"exclusive\": not at all",
    },
    Key {
        name: "gpu_sharing.time-slice",
        default: "[]",
        help: "GPUs on which programs of leases take turns, as in `gpus`",
    },
    Key { name: "gpu_sharing.mps", default: "[]", help: "GPUs that leases share by MPS, as in `gpus`" },
    Key { name: "gpu_sharing.exclusive", default: "[]", help: "GPUs that one lease has alone, as in `gpus`" },
    Key {
        name: "mps_domain",
        default: "client",
        help: "programs that a fault under MPS affects: those of one \"client\" on a GPU, or with \"server\" of all clients",
    },
    Key {
        name: "mps_control",
        default: "in the driver's folder, $PATH, /usr/bin",
        help: "absolute path of nvidia-cuda-mps-control",
    },
    Key { name: "warm_workers", default: "2", help: "workers kept ready for each lease" },
    Key {
        name: "isolation",
        default: "try",
        help: "workers give up files, sockets, processes and rare system calls: \"try\": as far as this host allows; \
               \"require\": or they do not start; \"off\"",
    },
    Key {
        name: "worker_idle_exit",
        default: "10min",
        help: "a lease that took no worker for this time keeps only one ready; 0 is off",
    },
    Key {
        name: "warn_after",
        default: "25min",
        help: "a lease's users are warned after this time without GPU work of its programs; 0 is never",
    },
    Key {
        name: "park_after",
        default: "30min",
        help: "a lease's device memory moves to host memory after this time without GPU work; 0 is never",
    },
    Key {
        name: "release_after",
        default: "0",
        help: "a lease ends, and its programs fail, after this time without GPU work; 0 is never",
    },
    Key {
        name: "lend_after",
        default: "10min",
        help: "a lease without programs for this time lends its GPUs to a waiting request; 0 is never",
    },
    Key {
        name: "parked_max",
        default: "50%",
        help: "host memory for the device memory of parked programs: a percentage or a size; 0 is none",
    },
    Key {
        name: "return_limit",
        default: "1h",
        help: "longest wait of a parked program for its GPU, before it gets an error; 0 is without end",
    },
    Key {
        name: "overcommit",
        default: "100%",
        help: "part of a GPU's memory that may be promised to leases; above 100% programs may find less than promised",
    },
    Key {
        name: "compute_mode",
        default: "check",
        help: "\"check\": a GPU whose compute mode does not let several programs share it is withdrawn",
    },
    Key {
        name: "drain_timeout",
        default: "60s",
        help: "longest wait of a stop for running programs; 0 is none",
    },
    Key {
        name: "lock_dir",
        default: "/run/lock/gpusession with NVIDIA's driver, else none",
        help: "folder in which the servers of this host lock their GPUs; \"none\": no locks",
    },
    Key {
        name: "cache_max",
        default: "8GiB",
        help: "disk space for modules and for code that the driver compiled from PTX, so that programs start faster; 0 is none",
    },
    Key {
        name: "accounting_keep",
        default: "90d",
        help: "time for which accounting records are kept; 0 is for ever",
    },
    Key {
        name: "users.scope",
        default: "client",
        help: "\"client\": a user's limits count on each client separately; \"site\": on all clients together",
    },
    Key {
        name: "state_dir",
        default: "/var/lib/gpuserver",
        help: "folder of leases, clients, tokens and the pool's authority",
    },
    Key { name: "runtime_dir", default: "/run/gpuserver", help: "folder of admin.sock" },
];

/// Returns the key that lists the GPUs with this way of sharing, regardless of `sharing`.
pub fn gpu_sharing_key(sharing: Sharing) -> &'static str {
    match sharing {
        Sharing::TimeSlice => "gpu_sharing.time-slice",
        Sharing::Mps => "gpu_sharing.mps",
        Sharing::Exclusive => "gpu_sharing.exclusive",
    }
}

/// Formats the key of a limit.
pub fn limit_key(layer: &Layer, name: &str) -> String {
    let of = |kind: &str, who: &str| {
        let bare = !who.is_empty() && who.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_".contains(&b));
        if bare { format!("limits.{kind}.{who}.{name}") } else { format!("limits.{kind}.{who:?}.{name}") }
    };
    match layer {
        Layer::Default => format!("limits.{name}"),
        Layer::Group(who) => of("group", who),
        Layer::Client(who) => of("client", who),
        Layer::User(who) => of("user", who),
    }
}
