//! The table of keys; `gpusession_common::keys` explains the form of a row.
//!
//! A row names the check of its value. After a change `make docs` writes `gpusession.toml` and its
//! manual again.

use gpusession_common::keys;
use gpusession_common::units::Memory;
use gpusession_common::words::{Class, OnIdle, Priority, Sharing};

use serde::{Deserialize, Serialize};

use super::error::ConfigError;
use super::read::{Reader, absent, any, between, named_by_number};
use crate::units::{SmPercent, control_address};

keys! {
    /// Keys outside of tables.
    pub struct Keys("", Reader<'_>, ConfigError) {
        /// Time in milliseconds that a program's first CUDA call waits for a lease that is not
        /// granted yet; at most 600000.
        ///
        /// If the lease's worker starts, or its GPUs are lent or parked, the call waits at least a
        /// minute.
        ///
        /// If a limit of the lease refuses the program, the call waits this time, but at most 5000,
        /// for another program to exit.
        wait_ms: u64 = 5000, |ms: &u64| match ms {
            0..=600_000 => Ok(()),
            _ => Err(format!("{ms}: a first CUDA call waits at most 600000 (10 minutes)")),
        };
        /// Level of the log: error, warn, info, debug or trace.
        log_level: String = "info", |level| one_of(level, &["error", "warn", "info", "debug", "trace"]);
    }
}

keys! {
    /// This machine, as the pool sees it.
    pub struct Client("client.", Reader<'_>, ConfigError) {
        /// Name that this machine requests when it joins a pool with a credential; by default its
        /// host name.
        name: Option<String> = absent("vm-1"), any;
    }
}

keys! {
    /// Users of the leases that are not one user's own.
    #[derive(Serialize, Deserialize)]
    pub struct Access("access.", Reader<'_>, ConfigError) {
        /// Names of users (or uids) who may use them; * is every user.
        users: Vec<String> = ["*"], any;
        /// Names of groups whose members may use them.
        groups: Vec<String> = [], any;
        /// Whether root may use them.
        root: bool = true, any;
        /// Number of leases that a user may hold in addition to the configured ones.
        extra_leases: u32 = 0, any;
        /// Whether a user's programs wait in line when they start faster than 20 a second, while
        /// other users start programs, too. A worker of a lease for several users that comes free
        /// is then for the waiting user who has fewer.
        fair_share: bool = true, any;
    }
}

keys! {
    /// A lease; one table for each. Leases of class boot wait for GPUs in the order of the files.
    pub struct LeaseConfig("lease.", Reader<'_>, ConfigError) {
        /// Name in listings and for `GPUSESSION_LEASE`; lease1 and so on by default.
        name: String = named_by_number("train"), |name: &String| {
            match name.len() <= 64 && !name.chars().any(char::is_control) {
                true => Ok(()),
                false => Err("a lease's name has at most 64 characters, no control characters".into()),
            }
        };
        /// Number of GPUs, all of one server.
        ///
        /// A program sees the GPUs of all its leases that are granted when it starts, in the order
        /// of the files, unless `GPUSESSION_LEASE` names some; at most eight leases. GPUs of
        /// one lease can do more together (see `user-guide.md`), so request several GPUs of a
        /// server as one lease.
        gpus: u32 = 1, between(1, 64);
        /// Memory of each GPU: percent, or a size as in "4000MiB".
        memory: Memory = "100%", any;
        /// Upper bound on each GPU's multiprocessors, in percent; less than 100 only if the server
        /// shares the GPU by MPS.
        ///
        /// "auto" is the percentage that the lease has of the memory under MPS, and 100 elsewhere.
        sm_percent: SmPercent = 100, any;
        /// Upper bound as a number of multiprocessors, instead of a percentage.
        sm_count: Option<u32> = absent(32), |count: &Option<u32>| match count {
            Some(0) => Err("0 leaves nothing to use".into()),
            _ => Ok(()),
        };
        /// Priority: normal, or below-normal, which waits behind the others.
        priority: Priority = "normal", any;
        /// Sharing of the GPUs: time-slice, mps or exclusive; by default the server chooses.
        sharing: Option<Sharing> = absent("time-slice"), any;
        /// Part of the product's name; by default any.
        model: Option<String> = absent("H200"), any;
        /// Name or address of the only server to ask; by default any.
        server: Option<String> = absent("gpu1"), |server: &Option<String>| {
            server.as_deref().map_or(Ok(()), |address| control_address(address).map(drop))
        };
        /// The only user of this lease; by default all users with access.
        for_user: Option<String> = absent("alice"), any;
        /// Lifetime: boot (from boot to shutdown), session, user or background.
        ///
        /// A lease of class session lasts from a user's login to the logout, one of class user
        /// while the user has a login session or a process. The server's limit lease_ttl (24 h)
        /// ends both at the latest, with a warning ten minutes before. A lease of class background
        /// is as one of class boot. The daemon gives it back, unless a program uses it, when
        /// another lease or request of this machine finds no room, or a limit refuses it.
        class: Class = "boot", any;
        /// Measure of the server for an idle lease: park, release or keep; by default the server
        /// chooses.
        ///
        /// The server's limits allow measures.
        on_idle: Option<OnIdle> = absent("park"), any;
        /// Whether the lease keeps its GPUs while no program uses it, instead of lending them.
        hold: bool = false, any;
    }
}

keys! {
    /// Ways of programs' data; only `encryption` has an effect yet.
    pub struct Transport("transport.", Reader<'_>, ConfigError) {
        /// "required": this machine takes no lease whose data a server would send unencrypted;
        /// "server": the server decides.
        ///
        /// A server with `encryption = "off"` sends the data of networks that it trusts in clear.
        encryption: String = "required", |encryption| one_of(encryption, &["required", "server"]);
        /// Transports in order of preference.
        order: Vec<String> = ["shm", "rdma", "tcp"], |order: &Vec<String>| {
            order.iter().try_for_each(|transport| one_of(transport, &["shm", "rdma", "tcp"]))
        };
        /// Number of parallel lanes for bulk data.
        lanes: u32 = 4, between(1, 16);
    }
}

fn one_of(word: &String, words: &[&str]) -> Result<(), String> {
    match words.contains(&word.as_str()) {
        true => Ok(()),
        false => Err(format!("`{word}` is none of {}", words.join(", "))),
    }
}
