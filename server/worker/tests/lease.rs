//! Workers of one lease under the server's own supervisor, on the simulated driver.

use std::time::Duration;

use gpuserver::accounting::Wanted;
use gpuserver::supervise::{Event, Phase, TakeError};
use gpusession_proto::frame::op;
use gpusession_proto::handle;
use gpusession_test_worker::supervised::{GPU, Site, eventually};
use gpusession_test_worker::{CALLER, Client, LEASE, MIB, WINDOW};

const OUT_OF_MEMORY: i32 = 2;

#[test]
fn memory_that_a_program_does_not_use_is_room_for_another() {
    let site = Site::new(1);
    let _inside = site.runtime.enter();
    let client = site.client(&site.take(1)[0], 1);
    // Of 256 MiB, the context takes 16. The program uses 130, and has been granted 192.
    for (slot, mib) in [2, 64, 64].into_iter().enumerate() {
        assert_eq!(client.refused(op::ALLOC, &[WINDOW + slot as u64 * 64 * MIB, mib * MIB, 0]), 0);
    }
    let take = |count| site.runtime.block_on(site.supervisor.take("vm", LEASE, count, Vec::new()));
    let mut given = 0;
    let refused = loop {
        match take(3 - given.min(2)) {
            Ok(workers) => given += workers.len(),
            Err(refused) => break refused,
        }
    };
    assert_eq!((given, refused), (3, TakeError::Memory), "48 MiB are left");
    let waits = || site.runtime.block_on(site.supervisor.take_for_waiting("vm", LEASE, 1, Vec::new()));
    for _ in 0..3 {
        assert_eq!(waits().map(|w| w.len()), Ok(1), "62 MiB that it was granted come back");
    }
    assert_eq!(waits().map(|w| w.len()), Err(TakeError::Memory));
    // An exited program leaves its place to a waiting one.
    let ending = site.supervisor.workers().into_iter().find(|w| w.process.is_some()).expect("the first").id;
    site.supervisor.end_worker(&ending, None, "ended by the test");
    eventually("it has the place", || waits().map(|w| w.len()) == Ok(1));
    site.runtime.block_on(site.supervisor.close("the test ends"));
}

#[test]
fn the_supervisor_opens_tickets_and_a_forged_one_disturbs_no_program() {
    let site = Site::new(1);
    let endpoint = site.endpoint(LEASE, 7);
    let mut forged = endpoint.ticket.clone();
    *forged.last_mut().expect("a seal") ^= 1;
    let refused = |attempt, ticket: &[u8]| {
        let mut stranger = site.stranger(endpoint.worker, attempt);
        stranger.greet(ticket);
        stranger.refusal()
    };
    assert_eq!(refused(1, &forged), "ticket was not made with this lease's key");
    let mut program = site.stranger(endpoint.worker, 2);
    program.greet(&endpoint.ticket);
    let (header, _) = program.frame().expect("an answer to the greeting");
    assert_eq!((header.op.get(), header.ctx.get()), (op::REPLY, 0));
    let served = || site.supervisor.workers().into_iter().find_map(|w| w.process);
    assert!(served().is_some_and(|process| (process.pid, &*process.user) == (7, "alice")));
    assert_eq!(refused(3, &endpoint.ticket), "this worker already serves a process: ticket used twice");
    assert_eq!(program.ask_words(op::ALLOC, &[WINDOW, 2 * MIB, 0]), Ok(0));
    site.runtime.block_on(site.supervisor.close("the test ends"));
}

#[test]
fn ready_workers_have_the_limits_that_hold_now() {
    use gpuserver::limits::{Bound, Entry, Layer, Limits};
    let site = Site::new(1);
    let _inside = site.runtime.enter();
    let taken = site.take(2);
    let _client = site.client(&taken[0], 1);
    let ids = || site.supervisor.workers().into_iter().map(|w| w.id).collect::<Vec<_>>();
    let set = |bytes| {
        let bound = Bound::Size(bytes);
        let entry =
            Entry { name: "staging", layer: Layer::Default, bound, origin: "t".into(), of_user: false };
        let mut limits = Limits::default();
        limits.entries.push(entry);
        site.supervisor.set_limits(LEASE, limits.of("vm", ""));
    };
    set(MIB);
    eventually("who waits for a program is another one", || {
        let now = ids();
        now.len() > 1 && now.contains(&taken[0].id) && !now.contains(&taken[1].id)
    });
    eventually("and is ready", || site.supervisor.workers().iter().any(|w| w.phase == Phase::Warm));
    let ending = || site.supervisor.workers().iter().any(|w| w.phase == Phase::Ending);
    eventually("the others are gone", || !ending());
    set(MIB);
    assert!(!ending(), "the same limit");
    site.runtime.block_on(site.supervisor.close("the test ends"));
}

#[test]
fn four_processes_share_one_limit() {
    let site = Site::new(4);
    let _inside = site.runtime.enter();
    let supervisor = &site.supervisor;
    let taken = site.take(4);
    let clients: Vec<Client> = taken.iter().zip(1..).map(|(taken, pid)| site.client(taken, pid)).collect();
    let alloc = |client: &Client, slot: u64, mib: u64| {
        client.refused(op::ALLOC, &[WINDOW + slot * 256 * MIB, mib * MIB, 0])
    };

    // Four contexts, and 40 MiB each: whole chunks would exceed the limit.
    for client in &clients {
        assert_eq!(alloc(client, 0, 40), 0);
    }
    for client in &clients {
        assert_eq!(
            client.memory(),
            (32 * MIB, 256 * MIB),
            "each sees the lease's share and what all leave of it"
        );
    }
    assert_eq!(alloc(&clients[0], 1, 34), OUT_OF_MEMORY);
    assert_eq!(alloc(&clients[0], 1, 32), 0);
    assert_eq!(alloc(&clients[1], 1, 2), OUT_OF_MEMORY, "what another one has taken");
    clients[2].put(WINDOW, b"the others do not notice");
    assert_eq!(clients[2].get(WINDOW, 24), b"the others do not notice");
    let sum = || supervisor.workers().iter().map(|w| w.memory_bytes).sum::<u64>();
    assert_eq!(sum(), 256 * MIB);

    // An exited program leaves its memory and its context's to the others.
    supervisor.end_worker(&taken[3].id, None, "ended by the test");
    eventually("its memory is free", || clients[1].memory().0 == 56 * MIB);
    assert_eq!(alloc(&clients[1], 1, 56), 0);
    let record = site.accounting.list(&Wanted::default()).expect("records").remove(0);
    assert_eq!((record.pid, record.peak_memory_bytes), (4, 56 * MIB), "{record:?}");

    // The lease exceeds its limit: the supervisor kills only the process with memory that it never
    // requested.
    let pids: Vec<u32> = supervisor.workers().iter().filter_map(|w| w.process.as_ref().and(w.pid)).collect();
    assert_eq!(pids.len(), 3);
    let readings: Vec<_> =
        pids.iter().zip([60 * MIB, 60 * MIB, 3 << 30]).map(|(pid, b)| (*pid, GPU, b)).collect();
    supervisor.reconcile(&readings, Duration::ZERO);
    eventually("it is killed", || supervisor.workers().iter().filter(|w| w.process.is_some()).count() == 2);
    assert!(supervisor.workers().iter().all(|w| w.pid != Some(pids[2])));

    // A program gets a worker while there is room for its context.
    let more = |count| site.runtime.block_on(supervisor.take("vm", LEASE, count, Vec::new()));
    eventually("what it had is free", || sum() < 256 * MIB);
    let room = ((256 * MIB - sum()) / (16 * MIB)) as usize;
    let mut given = 0;
    let refused = loop {
        match more(16) {
            Ok(workers) => given += workers.len(),
            Err(refused) => break refused,
        }
        assert!(given <= room, "{given} of {room}");
    };
    assert_eq!((given, refused), (room, TakeError::Memory));

    // The memory of a killed process is free soon, or its GPU is unhealthy.
    let mut events = supervisor.events();
    let mut stuck = || {
        std::iter::from_fn(|| events.try_recv().ok()).find_map(|e| match e {
            Event::Stuck { why, gpus } => Some((why, gpus)),
            _ => None,
        })
    };
    let still = [(pids[2], GPU, MIB)];
    supervisor.reconcile(&still, Duration::ZERO);
    assert_eq!(stuck(), None, "it has a moment");
    site.clock.pass(Duration::from_secs(11));
    supervisor.reconcile(&[], Duration::ZERO);
    assert_eq!(stuck(), None);
    supervisor.reconcile(&still, Duration::from_secs(2));
    assert_eq!(stuck(), None, "the reading is older than this moment");
    supervisor.reconcile(&still, Duration::ZERO);
    let (why, gpus) = stuck().expect("memory without a process");
    assert!(why.contains(&format!("process {}", pids[2])) && gpus.len() == 1, "{why}");
    site.runtime.block_on(supervisor.close("the test ends"));
}

#[test]
fn an_image_that_one_worker_loaded_is_there_for_the_next() {
    const PTX: &[u8] = b".version 7.0\n.target sm_70\n.address_size 64\n\0";
    let site = Site::new(0);
    let _inside = site.runtime.enter();
    let hash = *blake3::hash(PTX).as_bytes();
    let have = |client: &Client| {
        let reply = client.link.call(op::IMAGE_HAVE, CALLER, |w| w.bytes(&hash)).expect("an answer");
        reply.reader().word().expect("a word")
    };
    let first = site.client(&site.take(1)[0], 1);
    assert_eq!(have(&first), 0);
    let sent = first.link.call(op::IMAGE_DATA, CALLER, |w| {
        w.bytes(&hash);
        w.word(PTX.len() as u64);
        w.bytes(PTX);
    });
    assert_eq!(sent.expect("an answer").status, 0);
    let second = site.client(&site.take(1)[0], 2);
    assert_eq!(have(&second), 0, "the driver has not accepted it");
    let loaded = first.link.call(op::MODULE_LOAD, CALLER, |w| {
        w.word(handle::make(handle::MODULE, 0, 1, 1));
        w.bytes(&hash);
        w.word(0);
    });
    assert_eq!(loaded.expect("an answer").status, 0);
    eventually("the server has it", || have(&second) == 1);
    // A worker whose program has exited hands over its last images first.
    drop(first);
    assert_eq!(have(&site.client(&site.take(1)[0], 3)), 1);
    site.runtime.block_on(site.supervisor.close("the test ends"));
}
