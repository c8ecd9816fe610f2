//! Helpers of the tests in this folder.

mod allocate;
mod demand;
mod drain;
mod give_back;
mod property;
mod renew;
mod saved;
mod stock;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use gpusession_common::units::Memory;
use gpusession_common::words::Class;
use gpusession_proto::control;
use proptest::prelude::*;

use super::allocate::BOOT_ORDER_DELAY;
use super::*;
use crate::config::LeaseConfig;
use crate::leases::{LeaseState, Owner, Session};
use crate::pool::{PoolError, Trouble};

fn machine(servers: usize) -> Machine {
    let mut machine = Machine::new("boot".into(), "machine".into(), fastrand::Rng::with_seed(1));
    for i in 0..servers {
        machine.add_server(Duration::ZERO, format!("s{i}:7601"));
    }
    machine
}

fn configured(name: &str, gpus: u32) -> Spec {
    Spec::configured(&LeaseConfig { name: name.into(), gpus, ..LeaseConfig::default() }, 0)
}

fn actions(machine: &mut Machine) -> Vec<Action> {
    std::iter::from_fn(|| machine.next_action()).collect()
}

fn request(actions: &[Action]) -> (Vec<usize>, control::AllocateRequest) {
    let found = actions.iter().find_map(|a| match a {
        Action::Allocate { servers, request, .. } => Some((servers.clone(), (**request).clone())),
        _ => None,
    });
    found.expect("an allocation")
}

fn told(actions: &[Action]) -> Vec<Change> {
    let told = actions.iter().filter_map(|a| if let Action::Tell(c) = a { Some(c.clone()) } else { None });
    told.collect()
}

fn lease(id: &str, workers: u8) -> control::Lease {
    control::Lease {
        id: id.into(),
        ticket_key: vec![1; 32],
        ttl_usec: 600_000_000,
        devices: vec![control::Device { uuid: format!("GPU-{id}"), ..Default::default() }],
        workers: (0..workers)
            .map(|i| control::Worker { id: vec![i; 16], fingerprint: vec![0; 32] })
            .collect(),
        ..Default::default()
    }
}

fn unreachable() -> PoolError {
    PoolError::new(Trouble::Unreachable, "no answer")
}

const fn s(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// Specs of one GPU each, in file order, with the servers that they name.
fn file(leases: &[(&str, &[&str])]) -> Vec<Spec> {
    let specs = (0..).zip(leases).map(|(order, (name, servers))| Spec {
        order,
        servers: servers.iter().map(|s| (*s).to_owned()).collect(),
        ..configured(name, 1)
    });
    specs.collect()
}

/// A simulated pool that answers the machine's actions, with random delays and failures.
#[derive(Default)]
struct World {
    free: Vec<u32>,
    /// GPUs that this client may have of each server.
    limits: Vec<u32>,
    leases: HashMap<String, (usize, u32)>,
    /// By server and request id.
    by_request: HashMap<(usize, String), String>,
    counter: u32,
    /// Leases whose server was notified of a process's exit.
    ended: Vec<String>,
}

impl World {
    fn fits(&self, server: usize, gpus: u32) -> Result<(), PoolError> {
        let used: u32 = self.leases.values().filter(|(s, _)| *s == server).map(|(_, gpus)| gpus).sum();
        if used + gpus > self.limits[server] {
            Err(PoolError::new(Trouble::LimitExceeded, "a limit"))
        } else if self.free[server] < gpus {
            Err(PoolError::new(Trouble::NoCapacity, "full"))
        } else {
            Ok(())
        }
    }

    fn allocate(
        &mut self,
        servers: &[usize],
        request: &control::AllocateRequest,
    ) -> Result<(usize, String), PoolError> {
        let mut refusal = None;
        for server in servers {
            let key = (*server, request.request_id.clone());
            if let Some(id) = self.by_request.get(&key).filter(|id| self.leases.contains_key(*id)) {
                return Ok((*server, id.clone()));
            }
            match self.fits(*server, request.gpus) {
                Ok(()) => {
                    self.free[*server] -= request.gpus;
                    self.counter += 1;
                    let id = format!("w{}", self.counter);
                    self.leases.insert(id.clone(), (*server, request.gpus));
                    self.by_request.insert(key, id.clone());
                    return Ok((*server, id));
                }
                Err(error) => refusal = Some(error),
            }
        }
        Err(refusal.unwrap())
    }

    fn release(&mut self, id: &str) {
        if let Some((server, gpus)) = self.leases.remove(id) {
            self.free[server] += gpus;
        }
    }
}

fn session(n: u32) -> Arc<Session> {
    Arc::new(Session {
        id: format!("s{n}"),
        uid: 1000 + n % 3,
        user: format!("u{}", n % 3),
        service: "sshd".into(),
        tty: "pts/0".into(),
        rhost: String::new(),
        leader: n,
        leader_start: 1,
        logind: None,
    })
}

/// Restarts the machine within one boot, through the serialized state.
fn restart(m: &Machine, world: &mut World, now: Time, seed: u64) -> Machine {
    let saved: Saved = serde_json::from_str(&serde_json::to_string(&m.saved()).unwrap()).unwrap();
    assert_eq!(saved, m.saved());
    let request =
        |id: &String| world.by_request.iter().find(|(_, made)| *made == id).map(|((_, request), _)| request);
    let known = |id: &&String| {
        saved.leases.iter().any(|l| l.id == **id)
            || saved.releases.iter().any(|r| r.id == **id || r.waits && request(id) == Some(&r.id))
    };
    // The next daemon does not renew a lease that it does not know, and the lease expires.
    let gone: Vec<String> = world.leases.keys().filter(|id| !known(id)).cloned().collect();
    for id in gone {
        world.release(&id);
    }
    let mut next = Machine::new("boot".into(), "machine".into(), fastrand::Rng::with_seed(seed));
    next.restore(now, saved);
    for session in m.sessions().values() {
        next.session_opened(now, session.clone());
    }
    for (i, names) in m.names.iter().enumerate() {
        next.add_server(now, names[0].clone());
        for name in names {
            next.name_server(now, i, name);
        }
    }
    next
}
