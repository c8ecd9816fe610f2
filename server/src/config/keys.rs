//! The table of keys; `gpusession_common::keys` explains the form of a row.
//!
//! After a change `make docs` writes `gpuserver.toml` and its manual again.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use gpusession_common::keys;
use gpusession_common::keys::Row;
use gpusession_common::units::Memory;
use gpusession_common::words::Sharing;
use gpusession_proto::supervise::Isolation;
use ipnet::IpNet;

use super::kinds::{
    ADDRESS, ADVERTISED, ALL_OR_GPUS, CHECK, COUNT, DOMAIN, DRIVER, DURATION, FOLDER, GPU_COUNT, GPU_LIST,
    GRACE, INTERVAL, ISOLATION, LOCAL, MEASURERS, METRICS_ADDRESS, MPS_CONTROL, NAME, NETWORKS, OFFERED,
    OVERCOMMIT, PART_OF_MEMORY, PATH_OR_NONE, PATTERN, PEERS, PORTS, RESERVED_MEMORY, SCOPE, SCRUB, SHARING,
    SIZE, SWITCH,
};
use super::origin::ConfigError;
use super::reader::{
    Reader, absent, lock_folder, nothing, own_name, required, runtime_folder, signer_socket, starter_socket,
    state_folder,
};
use super::values::{Advertised, GpuChoice, Gpus};
use crate::limits::{Layer, Scope};

keys! {
    /// Keys outside of tables.
    pub struct Keys("", Reader<'_>, ConfigError) {
        "The server and its addresses";

        /// Name of this server in the pool; by default the host name up to the first dot.
        ///
        /// A name has a-z, 0-9, - and dots, 64 characters at most.
        name: String = own_name("gpu1"), NAME;
        /// Address of the control service, on which clients join and lease.
        ///
        /// A port alone listens on all addresses.
        listen: SocketAddr = "[::]:7601", ADDRESS;
        /// Addresses that the server gives to clients: HOST, HOST:PORT or a list of them; by
        /// default the address that a client has reached.
        ///
        /// They serve for control and for data.
        /// An IPv6 address with a port is [V6]:PORT.
        /// The port is that of the control service.
        advertise: Vec<Advertised> = nothing("gpu1.example.org"), ADVERTISED;
        /// Port for programs' data; of a range "FIRST-LAST" the first free one.
        ///
        /// This port serves all workers.
        data_ports: (u16, u16) = 7602, PORTS;
        /// Address for Prometheus, such as "127.0.0.1:7603"; without encryption or password.
        ///
        /// The path is /metrics.
        metrics_listen: Option<SocketAddr> = "off", METRICS_ADDRESS;
        /// "off": no encryption of programs' data for peers inside `trusted_networks`.
        ///
        /// Control is always encrypted.
        encryption: bool = "on", SWITCH;
        /// Networks (as in "10.1.0.0/16") whose peers may send data without encryption.
        trusted_networks: Vec<IpNet> = [], NETWORKS;
        /// Peers that may measure the network with `gpusession netperf`: "clients" of the pool,
        /// "admins" only, or "off".
        ///
        /// A measurement takes 10 s at most.
        /// Two run at a time, and a client may begin one a minute.
        netperf: String = "clients", MEASURERS, live;
        /// Control addresses of other servers of the pool, HOST or HOST:PORT, from which this one
        /// takes revocations; 64 at most.
        ///
        /// Name each server on the others: a chain is enough, since servers hand on what they took.
        peers: Vec<Advertised> = nothing("gpu2.example.org"), PEERS, live;
        /// Pause between two requests to each of `peers`, from "1s" to "1h".
        peer_interval: Duration = "30s", INTERVAL, live;
        /// "local": this server alone decides about its GPUs.
        ///
        /// No other value exists yet.
        registry: String = "local", LOCAL;

        "GPUs";

        /// "all", or a list of indices and UUIDs; an entry that does not exist stops the server.
        ///
        /// A list is as in [0, "GPU-4d2f..."].
        gpus: Gpus = "all", ALL_OR_GPUS;
        /// CUDA driver library that workers load; by default NVIDIA's, where the loader finds it.
        ///
        /// The path is absolute.
        driver: Option<PathBuf> = absent("/usr/lib/x86_64-linux-gnu/libcuda.so.1"), DRIVER;
        /// "check": the server withdraws a GPU whose compute mode lets only one program use it.
        ///
        /// EXCLUSIVE_PROCESS suits a GPU that is shared by MPS. The server reports the command that
        /// repairs another mode. The server does not change the mode itself: that needs root, and
        /// affects all users of the card. No other value exists.
        compute_mode: String = "check", CHECK;
        /// Folder in which servers of this host lock their GPUs; "none": no locks. By default this
        /// folder with NVIDIA's driver, else none.
        ///
        /// A lock keeps a GPU from having two servers.
        /// The folder of the default is `/run/lock/gpusession`. It belongs to root and gpuserver;
        /// other users' servers set a folder of their own, and refuse a GPU that is locked there.
        lock_dir: Option<PathBuf> = lock_folder("/run/lock/gpusession"), PATH_OR_NONE;
        /// Part of each GPU's memory that this server leases: percent, or a size.
        ///
        /// Percentages of leases, limits and reserves are of this part.
        gpu_memory: Memory = "100%", OFFERED;
        /// Share of a GPU's memory that its leases may have together; above 100% a program may find
        /// less than its lease has.
        ///
        /// The share is at most "1000%", of `gpu_memory`.
        overcommit: u64 = "100%", OVERCOMMIT, live;

        "Sharing";

        /// How leases share a GPU: "time-slice", "mps" (at the same time, by NVIDIA's MPS),
        /// "exclusive" (one lease has it alone).
        ///
        /// This applies to all GPUs that `[gpu_sharing]` does not name.
        sharing: Sharing = "time-slice", SHARING;
        /// Programs that a fault under MPS ends: those of one "client" on a GPU, or with "server"
        /// of all clients.
        mps_domain: String = "client", DOMAIN;
        /// NVIDIA's program; by default in the driver's folder, $PATH or /usr/bin.
        ///
        /// This is the absolute path of `nvidia-cuda-mps-control`.
        mps_control: Option<PathBuf> = absent("/usr/bin/nvidia-cuda-mps-control"), MPS_CONTROL;

        "Workers, one process for each program of a client";

        /// Rights that workers give up: "require" all, or the server does not start; "try" as many
        /// as this host allows; "off" none.
        ///
        /// The rights are files, sockets, processes and rare system calls.
        /// `gpuserver check-isolation` shows which ones this host allows.
        isolation: Isolation = "require", ISOLATION;
        /// GPUs whose kernels reach all memory of their process (pageable memory access): "off",
        /// the server does not start with them and isolation = "require"; "on", it serves them.
        ///
        /// There a program's wrong pointer reads or writes memory of its worker; elsewhere it is an
        /// error.
        /// The option uvm_disable_hmm=1 of the module nvidia-uvm takes that access from all
        /// programs, except on GPUs that share page tables with the processor.
        allow_pageable_access: bool = "off", SWITCH;
        /// Look whether the driver has cleared memory that it gives: "off"; with "verify", each
        /// worker reads a sample before a program gets the worker.
        ///
        /// A sample has 2 MiB of each GPU. Bytes that are left go to the journal and the metrics.
        /// Workers under MPS do not look.
        scrub: bool = "off", SCRUB;
        /// Number of workers kept ready for each lease.
        ///
        /// The number is 0 to 64.
        warm_workers: u32 = 2, COUNT, live;
        /// A lease that took no worker for this time keeps only one ready; 0: off.
        worker_idle_exit: Duration = "10min", DURATION, live;
        /// Time for which a worker waits for a program whose connection broke; 0: it ends at once.
        ///
        /// The time is at most 60 s. A program that exits, is killed or loses its lease needs none:
        /// the daemon reports it. A new value counts for workers that start later.
        resume_grace: Duration = "60s", GRACE, live;
        /// Disk space for modules and code that the driver compiled from PTX; 0: none.
        cache_max: u64 = "8GiB", SIZE;
        /// Compiled code of leases for several users: "off" keeps it for each user apart; "on", for
        /// all users of the client together, so that a user could change it for the others.
        ///
        /// Leases of one user have their own code always.
        share_compiled: bool = "off", SWITCH;

        "Leases that are not used";

        /// Time without GPU work, after which the server warns users; 0: never.
        ///
        /// The time counts from the last work of any program of the lease.
        warn_after: Duration = "25min", DURATION, live;
        /// Time without GPU work, after which the server moves device memory to host memory; 0:
        /// never.
        ///
        /// The next call of a program brings its memory back.
        park_after: Duration = "30min", DURATION, live;
        /// Time without GPU work, after which the lease ends, and its programs fail; 0: never.
        release_after: Duration = 0, DURATION, live;
        /// Time without programs, after which a lease lends its GPUs to a request that waits; 0:
        /// never.
        lend_after: Duration = "10min", DURATION, live;
        /// Host memory for parked programs: percent of all, or a size; 0: none.
        parked_max: Memory = "50%", PART_OF_MEMORY, live;
        /// Time that a parked program waits for its GPU; 0: without end.
        ///
        /// Then the program gets an error.
        return_limit: Duration = "1h", DURATION, live;

        "Stopping, keeping, folders";

        /// Time that a stop waits for programs; shorter than TimeoutStopSec= of the unit (90 s).
        ///
        /// With 0 the stop waits for none.
        drain_timeout: Duration = "60s", DURATION, live;
        /// Time that the server keeps accounting records; 0: for ever.
        ///
        /// Of more than 2 million, the server deletes the oldest of the clients with the most.
        accounting_keep: Duration = "90d", DURATION, live;
        /// Time that the server keeps its audit trail; 0: for ever.
        audit_keep: Duration = "400d", DURATION, live;
        /// Disk space for the audit trail, whose oldest days go first; 0: no bound.
        audit_max: u64 = "2GiB", SIZE, live;
        /// Refuses joins, renewals and administrators' changes while the trail cannot be written.
        ///
        /// Leases and programs continue.
        audit_required: bool = "on", SWITCH, live;
        /// Notes the users of programs in the audit trail, under pseudonyms.
        ///
        /// `gpuserver audit forget-user` deletes the name behind one.
        audit_users: bool = "on", SWITCH, live;
        /// Time in which a client can renew its certificate after the end of it; 0: none.
        renew_grace: Duration = "30d", DURATION, live;
        /// Folder of leases, clients, accounting and the audit trail; without a signer also of
        /// tokens and the pool's authority. By default it is the StateDirectory= of the unit.
        ///
        /// Without systemd the default is `/var/lib/gpuserver`, and for `gpuserver-NAME.toml`
        /// `/var/lib/gpuserver-NAME`.
        state_dir: PathBuf = state_folder("/var/lib/gpuserver"), FOLDER;
        /// Socket of gpuserver-signer, which has the pool's authority and the join tokens; "none":
        /// this process has them, in `state_dir`.
        ///
        /// By default it is that of the unit gpuserver-ca, where systemd runs this server: for the
        /// files of `/etc/gpusession`, and for `gpuserver-NAME.toml` that of gpuserver-ca@NAME.
        signer: Option<PathBuf> = signer_socket("/run/gpuserver-ca/sign.sock"), PATH_OR_NONE;
        /// Socket of gpuserver-starter, which runs workers, MPS daemons and all else that loads the
        /// driver as a user of their own; "none": they run as this server's user.
        ///
        /// By default it is that of the unit gpuserver-worker, where systemd runs this server: for
        /// the files of `/etc/gpusession`, and for `gpuserver-NAME.toml` that of
        /// gpuserver-worker@NAME.
        starter: Option<PathBuf> = starter_socket("/run/gpuserver-worker/start.sock"), PATH_OR_NONE;
        /// Folder of admin.sock; by default the RuntimeDirectory= of the unit.
        ///
        /// Without systemd the default is `/run/gpuserver` or `/run/gpuserver-NAME`.
        runtime_dir: PathBuf = runtime_folder("/run/gpuserver"), FOLDER;
    }
}

keys! {
    /// Sharing modes of single GPUs, which take precedence over `sharing`: lists as in `gpus`.
    /// Each GPU may be named once.
    pub struct GpuSharing("gpu_sharing.", Reader<'_>, ConfigError) {
        /// GPUs on which programs of several leases take turns.
        time_slice as "time-slice": Vec<GpuChoice> = [], GPU_LIST;
        /// GPUs on which programs of several leases run at the same time, by NVIDIA's MPS.
        mps: Vec<GpuChoice> = [], GPU_LIST;
        /// GPUs that one lease has alone.
        exclusive: Vec<GpuChoice> = [], GPU_LIST;
    }
}

keys! {
    /// Users, as limits count them.
    pub struct Users("users.", Reader<'_>, ConfigError) {
        /// "client": limits count a user on each client separately; "site": on all together.
        ///
        /// Each client reports the name: with "site" one client can use up what another client's
        /// user of that name may have.
        scope: Scope = "client", SCOPE, live;
    }
}

keys! {
    /// A part of this server that is kept for some clients; one table for each part.
    pub struct ReserveKeys("reserve.", Reader<'_>, ConfigError) {
        /// Pattern of these clients' names; required.
        client: String = required("build-*"), PATTERN;
        /// Number of GPUs.
        gpus: u32 = 1, GPU_COUNT;
        /// Memory of each of these GPUs: percent, or a size.
        memory: Memory = "100%", RESERVED_MEMORY;
    }
}

/// Lists the keys that have one value, in the order of their explanation.
pub fn keys() -> impl Iterator<Item = &'static Row> + Clone {
    Keys::ROWS.iter().chain(GpuSharing::ROWS).chain(Users::ROWS)
}

/// Returns `true` if a change of the key takes effect without a restart.
///
/// All limits and reserves change so.
pub fn is_live(key: &str) -> bool {
    key == "reserve" || key.starts_with("limits.") || keys().any(|row| row.live && row.name == key)
}

/// Returns the key that lists the GPUs with this way of sharing, regardless of `sharing`.
pub fn gpu_sharing_key(sharing: Sharing) -> &'static str {
    let row = GpuSharing::ROWS.iter().find(|row| row.key() == sharing.as_str());
    row.map_or("gpu_sharing", |row| row.name)
}

impl GpuSharing {
    /// Lists the GPUs with a way of sharing of their own.
    pub(super) fn listed(&self) -> impl Iterator<Item = (&GpuChoice, Sharing)> {
        Sharing::ALL.iter().flat_map(|sharing| {
            let gpus = match sharing {
                Sharing::TimeSlice => &self.time_slice,
                Sharing::Mps => &self.mps,
                Sharing::Exclusive => &self.exclusive,
            };
            gpus.iter().map(|gpu| (gpu, *sharing))
        })
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
