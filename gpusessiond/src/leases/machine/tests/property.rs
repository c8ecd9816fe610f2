//! Random sequences of events against a simulated pool: no lease leaks.

use super::*;

#[derive(Debug, Clone)]
enum Step {
    Want(u32, bool),
    Release(usize),
    Advance(u64),
    Lose(usize),
    /// State of the connections from now on.
    Network(Network),
    Take,
    /// A reload, with GPUs and class of each lease.
    Configure(Vec<(u32, Class)>),
    Preallocate(u32),
    Login(u32),
    Logout(u32),
    /// A process asks, with or without a session.
    Process(u32, bool),
    /// Exit of the process at this index.
    Ends(usize),
    Drain(usize, Option<u64>),
    /// The list of servers names it no longer, or again.
    List(usize, bool),
    Restart,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Network {
    Whole,
    /// No call reaches its server.
    Cut,
    /// Calls reach their servers, and no reply comes back.
    Deaf,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (1u32..4, any::<bool>()).prop_map(|(gpus, once)| Step::Want(gpus, once)),
        (0usize..8).prop_map(Step::Release),
        (1u64..40_000).prop_map(Step::Advance),
        (0usize..8).prop_map(Step::Lose),
        prop_oneof![Just(Network::Whole), Just(Network::Cut), Just(Network::Deaf)].prop_map(Step::Network),
        Just(Step::Take),
        proptest::collection::vec((1u32..3, class()), 0..4).prop_map(Step::Configure),
        (0u32..3).prop_map(Step::Preallocate),
        (0u32..5).prop_map(Step::Login),
        (0u32..5).prop_map(Step::Logout),
        (0u32..5, any::<bool>()).prop_map(|(n, session)| Step::Process(n, session)),
        (0usize..8).prop_map(Step::Ends),
        (0usize..2, proptest::option::of(0u64..100)).prop_map(|(server, grace)| Step::Drain(server, grace)),
        (0usize..2, any::<bool>()).prop_map(|(server, named)| Step::List(server, named)),
        Just(Step::Restart),
    ]
}

fn class() -> impl Strategy<Value = Class> {
    prop_oneof![Just(Class::Boot), Just(Class::Session), Just(Class::User), Just(Class::Background)]
}

fn tables(leases: &[(u32, Class)]) -> Vec<Spec> {
    let spec = |(i, (gpus, class)): (usize, &(u32, Class))| Spec {
        class: *class,
        ..configured(&format!("c{i}"), *gpus)
    };
    leases.iter().enumerate().map(spec).collect()
}

/// Asserts the invariants of every state.
fn check(m: &Machine) {
    let mut keys = std::collections::BTreeSet::new();
    for (_, wanted) in m.slots() {
        assert!(wanted.spec.once || keys.insert(wanted.spec.key.clone()), "{} twice", wanted.spec.key);
        if let Some(session) = &wanted.spec.session {
            assert!(m.sessions().contains_key(session), "{session} has ended");
        }
    }
}

/// Answers every action until the queue is empty.
fn play(m: &mut Machine, world: &mut World, now: Time, network: Network) {
    let broken = network != Network::Whole;
    let confirmed = if broken { Err(unreachable()) } else { Ok(()) };
    let mut rounds = 0;
    while let Some(action) = m.next_action() {
        rounds += 1;
        assert!(rounds < 10_000, "the machine never rests");
        match action {
            Action::Allocate { slot, servers, request } => {
                let made = match network {
                    Network::Cut => Err(unreachable()),
                    Network::Whole => world.allocate(&servers, &request),
                    // The client asks each server, since none answers.
                    Network::Deaf => {
                        for server in servers {
                            let _ = world.allocate(&[server], &request);
                        }
                        Err(unreachable())
                    }
                };
                let answer = made.map(|(server, id)| {
                    let name = format!("s{server}:7601");
                    (server, control::Lease { server: name, ..lease(&id, 1) })
                });
                m.allocated(now, slot, answer);
            }
            Action::Renew { server, leases } => {
                let answer = if broken {
                    Err(unreachable())
                } else {
                    let renew = |id: &String| control::RenewedLease {
                        id: id.clone(),
                        lost: !world.leases.contains_key(id),
                        ttl_usec: 600_000_000,
                        ..Default::default()
                    };
                    Ok(leases.iter().map(renew).collect())
                };
                m.renewed(now, server, &leases, answer);
            }
            Action::Release { server, lease } => {
                if network != Network::Cut {
                    world.release(&lease);
                }
                m.released(now, server, &lease, confirmed.clone());
            }
            Action::Withdraw { server, request_id } => {
                if network != Network::Cut
                    && let Some(id) = world.by_request.remove(&(server, request_id.clone()))
                {
                    world.release(&id);
                }
                m.released(now, server, &request_id, confirmed.clone());
            }
            Action::TakeWorkers { slot, lease: id, count, .. } => {
                let answer = if broken {
                    Err(unreachable())
                } else if world.leases.contains_key(&id) {
                    Ok(lease(&id, u8::try_from(count).unwrap()).workers)
                } else {
                    Err(PoolError::new(Trouble::NoSuchLease, "gone"))
                };
                m.workers(now, slot, &id, answer);
            }
            Action::EndWorker { slot, lease, .. } => {
                if network != Network::Cut {
                    world.ended.push(lease);
                }
                m.worker_freed(now, slot);
            }
            Action::Tell(_) => {}
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    /// Leases are neither leaked nor given up, and in the end every lease that fits is held.
    #[test]
    fn leases_are_never_leaked_and_never_given_up(
        limits in proptest::collection::vec(1u32..6, 2),
        steps in proptest::collection::vec(step(), 1..60),
    ) {
        let mut m = machine(2);
        let mut world = World { free: vec![4, 2], limits, ..World::default() };
        let mut now = s(0);
        let mut network = Network::Whole;
        let mut names = 0;
        let mut configuration: Vec<Spec> = Vec::new();
        let mut processes: Vec<(Slot, String)> = Vec::new();
        for step in steps {
            match step {
                Step::Want(gpus, once) => {
                    names += 1;
                    let mut spec = configured(&format!("l{names}"), gpus);
                    spec.once = once;
                    m.want(now, spec);
                }
                Step::Release(n) => {
                    let slot = m.slots().map(|(slot, _)| slot).nth(n);
                    if let Some(slot) = slot {
                        m.release(now, slot, "test");
                    }
                }
                Step::Advance(ms) => {
                    now += Duration::from_millis(ms);
                    m.tick(now);
                }
                Step::Lose(n) => {
                    let mut ids: Vec<_> = world.leases.keys().cloned().collect();
                    ids.sort();
                    if let Some(id) = ids.get(n) {
                        world.release(id);
                    }
                }
                Step::Network(new) => network = new,
                Step::Take => {
                    let held: Vec<_> = m.slots().filter(|(_, w)| w.held().is_some()).map(|(s, _)| s).collect();
                    if let Some(slot) = held.first() {
                        m.take(now, &[*slot]);
                    }
                }
                Step::Configure(leases) => {
                    configuration = tables(&leases);
                    m.configure(now, configuration.clone());
                    for spec in configuration.iter().filter(|t| matches!(t.class, Class::Boot | Class::Background)) {
                        prop_assert!(m.by_key(&spec.key).is_some(), "{} is configured", spec.key);
                    }
                }
                Step::Preallocate(n) => m.preallocate(now, n),
                Step::Login(n) => m.session_opened(now, session(n)),
                Step::Logout(n) => m.session_closed(now, &format!("s{n}")),
                Step::Process(n, in_session) => {
                    let session = session(n);
                    let id = Some(session.id.as_str()).filter(|_| in_session);
                    m.demand(now, session.uid, Some(&session.user), true, id);
                    play(&mut m, &mut world, now, network);
                    let used = m.slots().find_map(|(slot, w)| Some((slot, w.held()?.id.clone())));
                    if let Some((slot, lease)) = used {
                        m.process_started(slot);
                        processes.push((slot, lease));
                    }
                }
                Step::Ends(n) => {
                    if n < processes.len() {
                        let (slot, lease) = processes.swap_remove(n);
                        let there = m.slot(slot).and_then(Wanted::held).is_some_and(|h| h.id == lease);
                        m.process_ended(now, slot, &lease, vec![1; 16]);
                        play(&mut m, &mut world, now, Network::Whole);
                        prop_assert!(!there || world.ended.contains(&lease), "no server was notified of the exit");
                    }
                }
                Step::Drain(server, grace) => m.drain(now, server, grace.map(s)),
                Step::List(server, true) => m.restore_server(now, server),
                Step::List(server, false) => m.remove_server(now, server, s(60)),
                Step::Restart => {
                    let seed = u64::from(world.counter);
                    m = restart(&m, &mut world, now, seed);
                    m.configure(now, configuration.clone());
                    for (slot, lease) in &mut processes {
                        *slot = m.slot_of(lease).unwrap_or(0);
                        m.process_started(*slot);
                    }
                }
            }
            play(&mut m, &mut world, now, network);
            check(&m);
            // An idle machine returns its next deadline, unless it has no server.
            prop_assert!(m.deadline().is_some() || (0..2).all(|server| m.gone(server)));
        }
        // The pool answers again; time passes until every lease has settled.
        for server in 0..2 {
            m.restore_server(now, server);
        }
        for (slot, lease) in processes.drain(..) {
            m.process_ended(now, slot, &lease, vec![1; 16]);
        }
        for _ in 0..200 {
            now += s(5);
            m.tick(now);
            play(&mut m, &mut world, now, Network::Whole);
        }
        let held: Vec<(String, usize)> =
            m.slots().filter_map(|(_, w)| w.held()).map(|h| (h.id.clone(), h.server)).collect();
        for (id, server) in &held {
            prop_assert_eq!(world.leases.get(id).map(|(s, _)| s), Some(server), "{} is held but gone", id);
        }
        prop_assert_eq!(world.leases.len(), held.len(), "a lease was leaked");
        prop_assert_eq!(m.releases_pending(), 0);
        let background = |w: &Wanted| w.spec.class == Class::Background;
        let spare = m.slots().find(|(_, w)| background(w) && w.held().is_some());
        for (_, wanted) in m.slots() {
            let fits = (0..2).any(|server| world.fits(server, wanted.spec.gpus).is_ok());
            let waits = wanted.held().is_none() && !background(wanted);
            prop_assert!(!fits || !waits, "{} waits although it fits", wanted.spec.name);
            prop_assert!(spare.is_none() || !waits, "{} waits for what a background lease has", wanted.spec.name);
            prop_assert_eq!(wanted.processes, 0);
        }
    }
}
