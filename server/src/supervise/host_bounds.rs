//! Bounds the host memory and the threads of workers, and divides processor time between clients.
//!
//! Where the service has control groups ([`crate::cgroups`]), the kernel keeps the bounds. About
//! once a second the supervisor adapts them to the limits. It also reads what each worker has,
//! there and everywhere else, so that the reason names a limit before the kernel kills.
//!
//! No resource limit of a process counts the right thing: drivers reserve more addresses than any
//! machine has memory.

use std::collections::HashMap;

use super::exit::stop_offender;
use super::stock::WorkerId;
use super::supervisor::{LeaseState, State, Supervisor};
use super::worker::{Phase, Worker, exceeds};
use crate::cgroups::{Bounds, ClientBounds, Met};
use crate::limits::Limits;

/// Memory that counts in a control group and not in the numbers of its processes, in bytes: page
/// tables, sockets, pipes, files that are mapped nowhere.
const UNMAPPED: u64 = 512 << 20;
/// Remedy that an exceeded limit names.
const REMEDY: &str = "an administrator can raise it";

/// Memory and threads of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ProcessUsage {
    /// Anonymous and shared memory in bytes, swapped out or not.
    ///
    /// Memory that is mapped nowhere counts for no process, such as a memory file that was only
    /// written. Control groups and the service's `MemoryMax` bound that.
    memory: u64,
    threads: u64,
}

impl ProcessUsage {
    fn read(pid: u32) -> Option<Self> {
        Self::parse(&std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?)
    }

    fn parse(status: &str) -> Option<Self> {
        let number = |key: &str| -> Option<u64> {
            let line = status.lines().find_map(|line| line.strip_prefix(key))?;
            line.split_whitespace().next()?.parse().ok()
        };
        let memory = number("RssAnon:")? + number("RssShmem:")? + number("VmSwap:").unwrap_or(0);
        Some(Self { memory: memory << 10, threads: number("Threads:")? })
    }
}

/// Returns the host's memory in bytes.
fn host_memory() -> u64 {
    nix::sys::sysinfo::sysinfo().map_or(u64::MAX, |info| info.ram_total())
}

/// Returns a worker's host memory that counts in addition to `host_memory`, in bytes: its mapped
/// memory, and device memory that is parked or on its way.
fn beside(id: &WorkerId, worker: &Worker, lease: &LeaseState) -> (u64, u64) {
    let staging = lease.limits.smallest("staging").map_or(0, |(_, bytes)| bytes);
    let parked = match worker.moving || worker.phase == Phase::Parked {
        true => {
            let held = lease.ledger.held(id);
            held.iter().map(|(_, granted, _)| *granted).fold(0, u64::saturating_add)
        }
        false => 0,
    };
    (staging, parked)
}

impl State {
    /// Returns a worker's client, and the bounds of its control group.
    ///
    /// They include the limits of its program's user.
    pub(super) fn bounds(&self, id: &WorkerId) -> Option<(&str, Bounds)> {
        let worker = self.workers.get(id)?;
        let lease = self.leases.get(&worker.lease)?;
        let allowed = self.limits.of(&worker.client, worker.user());
        let most = |name| allowed.smallest(name).map_or(u64::MAX, |(_, most)| most);
        let (staging, parked) = beside(id, worker, lease);
        let memory = [staging, parked, UNMAPPED].into_iter().fold(most("host_memory"), u64::saturating_add);
        Some((&worker.client, Bounds { memory, threads: most("threads") }))
    }

    /// Returns the bounds of a client's control group.
    fn client_bounds(&self, client: &str, host: u64) -> ClientBounds {
        let allowed = self.limits.of(client, "");
        let mine = self.workers.iter().filter(|(_, w)| w.client == client);
        let parked = mine.filter_map(|(id, w)| Some(beside(id, w, self.leases.get(&w.lease)?).1));
        let total = allowed.least_memory("host_memory_total", host).map_or(u64::MAX, |(_, most)| most);
        let memory = parked.fold(total.saturating_add(UNMAPPED), u64::saturating_add);
        let cpu_weight = allowed.smallest("cpu_weight").map_or(100, |(_, weight)| weight);
        ClientBounds { memory, cpu_weight }
    }

    /// Stops workers that have more than the limits allow.
    fn stop_excess(&mut self, found: &[(WorkerId, ProcessUsage)], host: u64) {
        let Self { workers, leases, limits, .. } = self;
        let mut clients: HashMap<String, Vec<(WorkerId, u64, u64)>> = HashMap::new();
        for (id, has) in found {
            let Some(worker) = workers.get_mut(id) else { continue };
            let Some(lease) = leases.get(&worker.lease) else { continue };
            let (staging, parked) = beside(id, worker, lease);
            clients.entry(worker.client.clone()).or_default().push((*id, has.memory, parked));
            // Includes the limits of the program's user.
            let allowed = limits.of(&worker.client, worker.user());
            let exceeded =
                [("host_memory", has.memory, staging.saturating_add(parked)), ("threads", has.threads, 0)]
                    .into_iter()
                    .find_map(|(name, has, more)| {
                        let (limit, most) = allowed.smallest(name)?;
                        let why = match name {
                            "threads" => format!("its worker has {has} threads"),
                            _ => format!("its worker has {} MiB of the server's memory", has >> 20),
                        };
                        (has > most.saturating_add(more)).then(|| limit.exceeded(why, REMEDY))
                    });
            if let Some(exceeded) = exceeded {
                exceeds(id, worker, &exceeded, "");
                stop_offender(id, worker, &exceeded.to_string());
            }
        }
        for (client, has) in clients {
            stop_largest(limits, workers, &client, &has, host);
        }
    }
}

/// Stops the largest worker of a client whose workers have more memory together than it may have.
///
/// `has` are worker, memory, and the part of it that is parked device memory.
fn stop_largest(
    limits: &Limits,
    workers: &mut HashMap<WorkerId, Worker>,
    client: &str,
    has: &[(WorkerId, u64, u64)],
    host: u64,
) {
    let allowed = limits.of(client, "");
    let Some((limit, most)) = allowed.least_memory("host_memory_total", host) else { return };
    let sum = |of: fn(&(WorkerId, u64, u64)) -> u64| has.iter().map(of).fold(0, u64::saturating_add);
    let (together, parked) = (sum(|has| has.1), sum(|has| has.2));
    let largest = has.iter().max_by_key(|has| has.1.saturating_sub(has.2));
    if together <= most.saturating_add(parked) {
        return;
    }
    if let Some((id, memory, _)) = largest
        && let Some(worker) = workers.get_mut(id)
    {
        let why = format!(
            "its client's workers have {} MiB of the server's memory, this one the most: {} MiB",
            together >> 20,
            memory >> 20
        );
        let exceeded = limit.exceeded(why, "end a program, or an administrator raises it");
        exceeds(id, worker, &exceeded, "");
        stop_offender(id, worker, &exceeded.to_string());
    }
}

impl Supervisor {
    /// Adapts the bounds of control groups, and stops workers that exceed their limits.
    pub(super) fn bound_workers(&self) {
        let serve = |w: &Worker| matches!(w.phase, Phase::Active | Phase::Parked).then_some(w.pid).flatten();
        let asked: Vec<_> =
            self.state().workers.iter().filter_map(|(id, worker)| Some((*id, serve(worker)?))).collect();
        // The lock is free while `/proc` is read.
        let found: Vec<_> =
            asked.into_iter().filter_map(|(id, pid)| Some((id, ProcessUsage::read(pid)?))).collect();
        let host = host_memory();
        let (clients, workers) = {
            let mut state = self.state();
            state.stop_excess(&found, host);
            let mut clients: Vec<_> = state.workers.values().map(|w| w.client.clone()).collect();
            clients.sort();
            clients.dedup();
            let clients: Vec<_> = clients
                .into_iter()
                .map(|client| {
                    let bounds = state.client_bounds(&client, host);
                    (client, bounds)
                })
                .collect();
            let started = state.workers.iter().filter(|(_, w)| w.pid.is_some());
            let workers: Vec<_> = started
                .filter_map(|(id, _)| {
                    let (client, bounds) = state.bounds(id)?;
                    Some((client.to_owned(), *id, bounds))
                })
                .collect();
            (clients, workers)
        };
        for (client, bounds) in clients {
            self.groups().bound_client(&client, bounds);
        }
        for (client, id, bounds) in workers {
            self.groups().bound(&client, &id, bounds);
        }
        self.groups().tick();
    }

    /// Sets the bounds of a client's control group, which may be new.
    pub(super) fn bound_anew(&self, client: &str) {
        let bounds = self.state().client_bounds(client, host_memory());
        self.groups().bound_anew(client, bounds);
    }

    /// Sets the bounds of a client's control group.
    pub fn bound_client(&self, client: &str) {
        let bounds = self.state().client_bounds(client, host_memory());
        self.groups().bound_client(client, bounds);
    }

    /// Sets the bounds of a worker and its client at once.
    pub(super) fn bound_now(&self, id: &WorkerId) {
        let found = self.state().bounds(id).map(|(client, bounds)| (client.to_owned(), bounds));
        if let Some((client, bounds)) = found {
            self.bound_client(&client);
            self.groups().bound(&client, id, bounds);
        }
    }

    /// Returns the reason for a worker that the kernel killed for memory, and logs it.
    pub(super) async fn killed_for_memory(&self, id: &WorkerId) -> Option<String> {
        let (client, groups) = (self.state().workers.get(id)?.client.clone(), self.groups().clone());
        let worker = *id;
        let asked = tokio::task::spawn_blocking(move || groups.killed(&client, &worker));
        let met = asked.await.ok()??;
        let mut state = self.state();
        let State { workers, limits, .. } = &mut *state;
        let worker = workers.get_mut(id)?;
        worker.offends = met != Met::Host;
        let limit = match met {
            Met::Worker => limits.of(&worker.client, worker.user()),
            Met::Client => limits.of(&worker.client, ""),
            Met::Host => return Some("the kernel killed it: this service or host has no memory left".into()),
        };
        let limit = match met {
            Met::Worker => limit.smallest("host_memory"),
            _ => limit.least_memory("host_memory_total", host_memory()),
        };
        let why = "the kernel killed its worker at this bound; memory that no process maps counts";
        let exceeded = limit?.0.exceeded(why, REMEDY);
        exceeds(id, worker, &exceeded, "");
        Some(exceeded.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::ProcessUsage;

    #[test]
    fn memory_and_threads_of_this_process() {
        let before = ProcessUsage::read(std::process::id()).unwrap();
        let filled = std::hint::black_box(vec![1u8; 64 << 20]);
        let (stop, wait) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || wait.recv());
        let after = ProcessUsage::read(std::process::id()).unwrap();
        assert!(after.memory >= before.memory + (60 << 20), "{before:?} {after:?}");
        assert!(after.threads >= 2, "{after:?}");
        drop((filled, stop));
        let _ = thread.join();
        assert_eq!(ProcessUsage::read(u32::MAX), None);
    }

    #[test]
    fn swapped_memory_counts() {
        let status = "RssAnon:\t     100 kB\nRssFile:\t    5000 kB\nRssShmem:\t      20 kB\nVmSwap:\t       3 kB\nThreads:\t7\n";
        assert_eq!(ProcessUsage::parse(status), Some(ProcessUsage { memory: 123 << 10, threads: 7 }));
        let unswapped = status.replace("VmSwap:\t       3 kB\n", "");
        assert_eq!(ProcessUsage::parse(&unswapped).map(|usage| usage.memory), Some(120 << 10));
    }
}
