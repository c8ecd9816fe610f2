//! Tests of the table of leases, with a property test of random steps.

use proptest::prelude::*;

use super::*;
use crate::clock::testing::Counting;
use crate::limits::{Bound, Entry};

const GIB: u64 = 1 << 30;

pub(crate) fn gpu(n: u32, memory_bytes: u64) -> Gpu {
    Gpu {
        uuid: format!("GPU-00000000-0000-0000-0000-{n:012}"),
        name: if n.is_multiple_of(2) { "NVIDIA H200" } else { "Tesla T4" }.into(),
        memory_bytes,
        compute_major: 9,
        compute_minor: 0,
        pci_address: String::new(),
        multiprocessors: 132,
        context_bytes: 0,
        compute_mode: 0,
        pageable_access: false,
        sharing: Sharing::TimeSlice,
        withheld_bytes: 0,
    }
}

pub(super) fn table(n: u32) -> Table {
    Table::new((0..n).map(|i| gpu(i, 16 * GIB)).collect(), Rules::default(), Saved::default(), Duration::ZERO)
        .0
}

pub(crate) fn request(client: &str, gpus: u32, percent: f64) -> Request {
    Request {
        client: client.into(),
        request_id: String::new(),
        gpus,
        memory: Memory::Percent(percent),
        model: String::new(),
        devices: vec![],
        sticky: vec![],
        user: String::new(),
        uid: 0,
        ttl: Duration::ZERO,
        who: String::new(),
        why: String::new(),
        boot_id: "b".into(),
        encrypted: true,
        sm_percent: 100,
        sharing: None,
        sm_count: 0,
        sm_auto: false,
        once: false,
        priority: Priority::Normal,
        persistent: false,
        on_idle: None,
        idle_timeout: Duration::ZERO,
        hold: false,
        order: 0,
        limits: Effective::default(),
    }
}

pub(super) fn allocate(
    t: &mut Table,
    r: &Request,
    now: u64,
    random: &Counting,
) -> Result<Lease, AllocateError> {
    t.allocate(r, Duration::from_secs(now), 0, random).map(|(lease, _)| lease)
}

#[test]
fn a_once_request_does_not_queue() {
    let (mut t, r) = (table(1), Counting::default());
    allocate(&mut t, &request("a", 1, 50.0), 0, &r).unwrap();
    let large = Request { once: true, ..named("b", 1, 100.0) };
    assert!(matches!(allocate(&mut t, &large, 0, &r), Err(AllocateError::NoCapacity { position: 0, .. })));
    assert!(t.waiting(Duration::ZERO).is_empty());
    allocate(&mut t, &request("c", 1, 50.0), 0, &r).unwrap();
}

#[test]
fn parts_of_the_multiprocessors() {
    let on = |sharing| Gpu { sharing, ..gpu(0, 16 * GIB) };
    let ask = |sm_count, sm_auto, percent| Request { sm_count, sm_auto, ..request("a", 1, percent) };
    assert_eq!(ask(33, false, 10.0).percent_of(&on(Sharing::Mps)), 25);
    assert_eq!(ask(34, false, 10.0).percent_of(&on(Sharing::Mps)), 26, "no fewer than asked for");
    assert_eq!(ask(500, false, 10.0).percent_of(&on(Sharing::Mps)), 100);
    assert_eq!(ask(0, true, 25.0).percent_of(&on(Sharing::Mps)), 25);
    assert_eq!(ask(0, true, 0.01).percent_of(&on(Sharing::Mps)), 1);
    assert_eq!(ask(0, true, 25.0).percent_of(&on(Sharing::TimeSlice)), 100, "time-slicing knows no parts");
    assert!(!ask(0, true, 25.0).limits_multiprocessors(), "it asks for no MPS");
}

#[test]
fn packs_fractions_and_keeps_whole_gpus_whole() {
    let (mut t, r) = (table(2), Counting::default());
    let a = allocate(&mut t, &request("a", 1, 50.0), 0, &r).unwrap();
    let b = allocate(&mut t, &request("b", 1, 50.0), 0, &r).unwrap();
    assert_eq!(a.shares[0].gpu, b.shares[0].gpu);
    assert_eq!(a.shares[0].limit_bytes, 8 * GIB);
    let whole = allocate(&mut t, &request("c", 1, 100.0), 0, &r).unwrap();
    assert_ne!(whole.shares[0].gpu, a.shares[0].gpu);
    assert!(whole.fencing_token > b.fencing_token && b.fencing_token > a.fencing_token);
    let error = allocate(&mut t, &request("d", 1, 1.0), 0, &r).unwrap_err();
    assert!(matches!(error, AllocateError::NoCapacity { .. }), "{error}");
    assert!(t.remove(Some("b"), &whole.id).is_none());
    assert!(t.remove(Some("c"), &whole.id).is_some());
    allocate(&mut t, &request("d", 1, 1.0), 0, &r).unwrap();
}

#[test]
fn a_request_gets_all_its_gpus_or_an_error() {
    let (mut t, r) = (table(2), Counting::default());
    allocate(&mut t, &request("a", 1, 100.0), 0, &r).unwrap();
    assert!(matches!(allocate(&mut t, &request("b", 2, 10.0), 0, &r), Err(AllocateError::NoCapacity { .. })));
    assert!(matches!(allocate(&mut t, &request("b", 3, 10.0), 0, &r), Err(AllocateError::NeverFits(_))));
    let mut big = request("b", 1, 1.0);
    big.memory = Memory::Bytes(17 * GIB);
    assert!(matches!(allocate(&mut t, &big, 0, &r), Err(AllocateError::NeverFits(_))));
    for bad in [f64::NAN, -1.0, 101.0, f64::INFINITY] {
        assert!(matches!(allocate(&mut t, &request("b", 1, bad), 0, &r), Err(AllocateError::Invalid(_))));
    }
    // A share that rounds down to nothing is no lease.
    assert!(matches!(allocate(&mut t, &request("b", 1, 1e-9), 0, &r), Err(AllocateError::NeverFits(_))));
    assert_eq!(t.leases(Duration::ZERO).count(), 1);
}

#[test]
fn model_devices_and_sticky() {
    let (mut t, r) = (table(4), Counting::default());
    let mut by_model = request("a", 1, 100.0);
    by_model.model = "t4".into();
    assert_eq!(allocate(&mut t, &by_model, 0, &r).unwrap().shares[0].gpu, gpu(1, 0).uuid);
    let mut listed = request("a", 0, 10.0);
    listed.devices = vec![gpu(3, 0).uuid, gpu(2, 0).uuid];
    let lease = allocate(&mut t, &listed, 0, &r).unwrap();
    assert_eq!(lease.shares.iter().map(|s| s.gpu.clone()).collect::<Vec<_>>(), listed.devices);
    let mut sticky = request("a", 1, 10.0);
    sticky.sticky = vec![gpu(0, 0).uuid];
    assert_eq!(allocate(&mut t, &sticky, 0, &r).unwrap().shares[0].gpu, gpu(0, 0).uuid);
    listed.devices = vec!["GPU-nope".into()];
    assert!(matches!(allocate(&mut t, &listed, 0, &r), Err(AllocateError::NeverFits(_))));
}

#[test]
fn a_repeated_request_id_returns_its_lease() {
    let (mut t, r) = (table(2), Counting::default());
    let mut again = request("a", 1, 100.0);
    again.request_id = "boot-1".into();
    let first = allocate(&mut t, &again, 0, &r).unwrap();
    assert_eq!(allocate(&mut t, &again, 20, &r).unwrap(), first);
    assert!(t.expire(Duration::from_secs(79), 0).is_empty(), "asking again renews");
    again.client = "b".into();
    assert_ne!(allocate(&mut t, &again, 20, &r).unwrap().id, first.id);
}

#[test]
fn a_cancelled_request_leaves_no_lease() {
    let (mut t, r) = (table(2), Counting::default());
    let mine = allocate(&mut t, &named("a", 1, 100.0), 0, &r).unwrap();
    let others = allocate(&mut t, &named("b", 1, 100.0), 0, &r).unwrap();
    assert_eq!(t.cancel("a", "another"), None);
    assert_eq!(t.cancel("a", ""), None);
    assert_eq!(t.cancel("a", "r").map(|lease| lease.id), Some(mine.id));
    assert_eq!(t.cancel("a", "r"), None);
    assert_eq!(t.leases(Duration::ZERO).map(|(lease, _)| lease.id.clone()).collect::<Vec<_>>(), [others.id]);
}

#[test]
fn silence_ends_a_lease_and_restarts_neither_do_nor_prolong_it() {
    let (mut t, r) = (table(1), Counting::default());
    let lease = allocate(&mut t, &request("a", 1, 100.0), 0, &r).unwrap();
    assert_eq!(t.renew("b", &lease.id, Duration::ZERO), None);
    assert_eq!(t.renew("a", &lease.id, Duration::from_secs(20)), Some(DEFAULT_TTL));
    assert!(t.expire(Duration::from_secs(79), 0).is_empty());
    let again = |stored: u64, older: bool| {
        let mut saved = serde_json::to_value(t.save(Duration::from_secs(stored))).unwrap();
        if older {
            saved.as_object_mut().unwrap().remove("left");
        }
        let saved: Saved = serde_json::from_value(saved).unwrap();
        Table::new(vec![gpu(0, 16 * GIB)], Rules::default(), saved, Duration::from_secs(3))
    };
    // The host may have started again: only the time that was left counts, and 30 s at least.
    for (stored, older, ends) in [(25, false, 58), (79, false, 33), (79, true, 63)] {
        let (mut t2, lost) = again(stored, older);
        assert!(lost.is_empty());
        assert_eq!(t2.get(&lease.id, Duration::from_secs(3)).unwrap().0, &lease);
        assert_eq!(t2.next_deadline(), Some(Duration::from_secs(ends)));
        assert_eq!(t2.expire(Duration::from_secs(ends), 0), std::slice::from_ref(&lease));
    }
    let (_, lost) =
        Table::new(vec![gpu(1, 16 * GIB)], Rules::default(), t.save(Duration::ZERO), Duration::ZERO);
    assert_eq!(lost.len(), 1, "its GPU is gone");
}

#[test]
fn the_state_file_writes_the_servers_choice_as_unset() {
    for (on_idle, word) in [(None, "unset"), (Some(OnIdle::Keep), "keep")] {
        let (mut t, r) = (table(1), Counting::default());
        let lease = allocate(&mut t, &Request { on_idle, ..request("a", 1, 50.0) }, 0, &r).unwrap();
        let mut json = serde_json::to_value(&lease).unwrap();
        assert_eq!(json["on_idle"], word);
        assert_eq!(serde_json::from_value::<Lease>(json.clone()).unwrap(), lease);
        json.as_object_mut().unwrap().remove("on_idle");
        assert_eq!(serde_json::from_value::<Lease>(json).unwrap().on_idle, None);
    }
}

pub(super) fn waits(result: Result<Lease, AllocateError>) -> (u32, u32) {
    match result {
        Err(AllocateError::NoCapacity { position, waiting, .. }) => (position, waiting),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_lease_tells_how_long_its_request_waited() {
    let (mut t, r) = (table(1), Counting::default());
    let first = allocate(&mut t, &request("a", 1, 100.0), 0, &r).unwrap();
    for now in [10, 40] {
        waits(allocate(&mut t, &named("b", 1, 50.0), now, &r));
    }
    t.remove(None, &first.id);
    assert_eq!(allocate(&mut t, &named("b", 1, 50.0), 42, &r).unwrap().waited, Duration::from_secs(32));
    // A request that left the queue waits from its return on.
    waits(allocate(&mut t, &named("c", 1, 100.0), 43, &r));
    assert_eq!(t.cancel("c", "r"), None);
    let direct = allocate(&mut t, &named("c", 1, 50.0), 50, &r).unwrap();
    assert_eq!((first.waited, direct.waited), (Duration::ZERO, Duration::ZERO));
}

pub(super) fn named(client: &str, gpus: u32, percent: f64) -> Request {
    Request { request_id: "r".into(), ..request(client, gpus, percent) }
}

#[test]
fn sixteen_halves_fit_on_two_nodes_of_four() {
    let random = Counting::default();
    for clients in [1, 16] {
        let mut nodes = [table(4), table(4)];
        for i in 0..16 {
            let wish = request(&format!("vm-{}", i % clients), 1, 50.0);
            let fits = nodes.iter_mut().any(|n| allocate(n, &wish, 0, &random).is_ok());
            assert!(fits, "half GPU {i} of {clients} clients");
        }
        assert!(nodes.iter_mut().all(|n| allocate(n, &request("x", 1, 1.0), 0, &random).is_err()));
    }
}

#[test]
fn eighty_one_boot_leases_on_eighty_gpus_wait_in_turn() {
    let (mut t, r) = (table(80), Counting::default());
    let leases: Vec<Lease> =
        (0..80).map(|i| allocate(&mut t, &named(&format!("vm-{i}"), 1, 100.0), 0, &r).unwrap()).collect();
    assert_eq!(waits(allocate(&mut t, &named("vm-80", 1, 100.0), 0, &r)), (1, 1));
    assert_eq!(waits(allocate(&mut t, &named("vm-81", 1, 100.0), 1, &r)), (2, 2));
    assert_eq!(waits(allocate(&mut t, &named("vm-80", 1, 100.0), 30, &r)), (1, 2), "keeps its place");
    t.remove(None, &leases[7].id);
    assert_eq!(waits(allocate(&mut t, &named("vm-81", 1, 100.0), 31, &r)), (2, 2), "not its turn");
    assert_eq!(waits(allocate(&mut t, &request("vm-82", 1, 1.0), 31, &r)).0, 0, "no request overtakes");
    let lease = allocate(&mut t, &named("vm-80", 1, 100.0), 32, &r).unwrap();
    assert_eq!(lease.shares[0].gpu, leases[7].shares[0].gpu);
    assert_eq!(waits(allocate(&mut t, &named("vm-81", 1, 100.0), 33, &r)), (1, 1));
    // A request that is not repeated loses its place.
    t.remove(None, &leases[8].id);
    assert_eq!(t.waiting(Duration::from_secs(33)).len(), 1);
    allocate(&mut t, &named("vm-83", 1, 100.0), 33 + QUEUE_TIMEOUT.as_secs(), &r).unwrap();
    assert!(t.waiting(Duration::from_secs(33) + QUEUE_TIMEOUT).is_empty());
}

#[test]
fn a_clients_requests_wait_in_its_own_order() {
    let (mut t, r) = (table(3), Counting::default());
    let all = allocate(&mut t, &request("x", 3, 100.0), 0, &r).unwrap();
    let of = |client: &str, order: u32| Request {
        request_id: format!("r{order}"),
        order,
        ..request(client, order.max(1), 100.0)
    };
    let arriving = [of("a", 3), of("b", 2), of("a", 1), of("a", 0), of("b", 1), of("a", 2)];
    for wish in &arriving {
        waits(allocate(&mut t, wish, 0, &r));
    }
    let queue: Vec<_> = t.queue().into_iter().map(|w| (w.request.client.clone(), w.request.order)).collect();
    // Each client keeps its set of places; the request without an order keeps its own.
    let expected = [("a", 1), ("b", 1), ("a", 2), ("a", 0), ("b", 2), ("a", 3)];
    assert_eq!(queue, expected.map(|(client, order)| (client.to_owned(), order)));
    assert_eq!(waits(allocate(&mut t, &of("b", 2), 1, &r)), (5, 6));
    t.remove(None, &all.id);
    waits(allocate(&mut t, &of("a", 2), 2, &r));
    allocate(&mut t, &of("a", 1), 2, &r).unwrap();
}

#[test]
fn priorities_and_requests_that_do_not_compete() {
    let (mut t, r) = (table(2), Counting::default());
    let both = allocate(&mut t, &request("a", 2, 100.0), 0, &r).unwrap();
    let low = Request { priority: Priority::BelowNormal, ..named("low", 1, 100.0) };
    assert_eq!(waits(allocate(&mut t, &low, 0, &r)), (1, 1));
    assert_eq!(waits(allocate(&mut t, &named("two", 2, 100.0), 1, &r)), (1, 2), "before the lower one");
    assert_eq!(waits(allocate(&mut t, &low, 2, &r)), (2, 2));
    t.remove(None, &both.id);
    allocate(&mut t, &Request { devices: vec![gpu(0, 0).uuid], ..request("x", 1, 10.0) }, 3, &r).unwrap_err();
    let two = allocate(&mut t, &named("two", 2, 100.0), 4, &r).unwrap();
    t.remove(None, &two.id);
    allocate(&mut t, &low, 5, &r).unwrap();
    // A request for another model blocks no other request.
    let t4 = Request { model: "t4".into(), ..named("t4", 1, 100.0) };
    let one = Request { devices: vec![gpu(1, 0).uuid], ..request("b", 1, 60.0) };
    let held = allocate(&mut t, &one, 6, &r).unwrap();
    waits(allocate(&mut t, &t4, 6, &r));
    t.remove(None, &t.holders(&gpu(0, 0).uuid)[0].id.clone());
    allocate(&mut t, &Request { model: "H200".into(), ..request("c", 1, 100.0) }, 7, &r).unwrap();
    t.remove(None, &held.id);
    waits(allocate(&mut t, &Request { model: "t4".into(), ..request("d", 1, 1.0) }, 8, &r));
}

#[test]
fn a_card_for_one_process_serves_one_mps_domain() {
    let card = |n: u32| Gpu { sharing: Sharing::Mps, ..gpu(n, 16 * GIB) };
    let cards = vec![card(0), gpu(1, 16 * GIB)];
    let mut t = Table::new(cards, Rules::default(), Saved::default(), Duration::ZERO).0;
    let r = Counting::default();
    let uuid = gpu(0, 0).uuid;
    assert!(t.set_compute_mode(&uuid, EXCLUSIVE_PROCESS) && !t.set_compute_mode(&uuid, EXCLUSIVE_PROCESS));
    let mps = |client: &str| Request { sharing: Some(Sharing::Mps), once: true, ..request(client, 1, 10.0) };
    let first = allocate(&mut t, &mps("a"), 0, &r).unwrap();
    assert_eq!((first.shares[0].gpu.as_str(), first.mps), (uuid.as_str(), true));
    let second = allocate(&mut t, &request("a", 1, 10.0), 0, &r).unwrap();
    assert_eq!(second.shares[0].gpu, uuid, "the same client's programs are in the domain");
    assert!(matches!(allocate(&mut t, &mps("b"), 0, &r), Err(AllocateError::NoCapacity { .. })));
    // No program runs beside MPS, and no domain has this card and another.
    for sharing in [Sharing::TimeSlice, Sharing::Exclusive] {
        let beside = Request { sharing: Some(sharing), devices: vec![uuid.clone()], ..request("a", 1, 10.0) };
        assert!(matches!(allocate(&mut t, &beside, 0, &r), Err(AllocateError::NeverFits(_))));
        let anywhere = Request { sharing: Some(sharing), once: true, ..request("a", 1, 10.0) };
        assert!(
            allocate(&mut t, &anywhere, 0, &r).is_ok_and(|lease| lease.shares[0].gpu != uuid)
                || sharing == Sharing::Exclusive
        );
    }
    let both = Request { sharing: Some(Sharing::TimeSlice), ..request("a", 2, 10.0) };
    let Err(AllocateError::NeverFits(why)) = allocate(&mut t, &both, 0, &r) else { panic!("two GPUs") };
    assert!(why.contains("EXCLUSIVE_PROCESS"), "{why}");
    for lease in [first, second] {
        t.remove_where(|l| l.id == lease.id);
    }
    assert!(allocate(&mut t, &mps("b"), 0, &r).is_ok(), "the domain of the first client is gone");
    t.set_rules(Rules { shared_domain: true, ..Rules::default() });
    assert!(allocate(&mut t, &mps("c"), 0, &r).is_ok(), "all clients have one domain");
}

#[test]
fn exclusive_leases_are_alone() {
    let (mut t, r) = (table(2), Counting::default());
    let alone = Request { sharing: Some(Sharing::Exclusive), ..request("a", 1, 25.0) };
    let first = allocate(&mut t, &alone, 0, &r).unwrap();
    let other = allocate(&mut t, &request("b", 1, 10.0), 0, &r).unwrap();
    assert_ne!(first.shares[0].gpu, other.shares[0].gpu);
    assert!(allocate(&mut t, &Request { client: "c".into(), ..alone.clone() }, 0, &r).is_err());
    t.remove(None, &other.id);
    allocate(&mut t, &alone, 0, &r).unwrap();
}

/// A GPU of each kind of sharing, all else being equal.
fn mixed(sharing: &[Sharing]) -> Table {
    let gpus = sharing.iter().zip(0..).map(|(s, n)| Gpu { sharing: *s, ..gpu(2 * n, 16 * GIB) });
    Table::new(gpus.collect(), Rules::default(), Saved::default(), Duration::ZERO).0
}

/// UUIDs of a lease's GPUs.
fn on(lease: &Lease) -> Vec<String> {
    lease.shares.iter().map(|s| s.gpu.clone()).collect()
}

fn wish(client: &str, sharing: &str, gpus: u32, percent: f64) -> Request {
    Request { sharing: sharing.parse().ok(), ..request(client, gpus, percent) }
}

#[test]
fn each_gpu_is_shared_in_its_own_way() {
    let ([alone, sliced, mps], r) = ([0, 2, 4].map(|n| gpu(n, 0).uuid), Counting::default());
    let mut t = mixed(&[Sharing::Exclusive, Sharing::TimeSlice, Sharing::Mps]);
    let mut get = |wish: Request| allocate(&mut t, &wish, 0, &r);
    // A request without a wish prefers MPS, then time slices, then an exclusive GPU.
    let first = get(wish("a", "", 1, 60.0)).unwrap();
    let second = get(wish("a", "", 1, 60.0)).unwrap();
    let third = get(wish("a", "", 1, 60.0)).unwrap();
    let got = [&first, &second, &third].map(|l| (on(l), l.mps, l.exclusive));
    let of = |uuid: &String, mps, exclusive| (vec![uuid.clone()], mps, exclusive);
    assert_eq!(got, [of(&mps, true, false), of(&sliced, false, false), of(&alone, false, true)]);
    let full = get(wish("a", "", 1, 60.0)).unwrap_err().to_string();
    assert!(full.contains("0 of 3 suitable ones have room"), "{full}");
    assert!(get(wish("a", "exclusive", 1, 10.0)).is_err());
    let there = |wish| Request { devices: vec![alone.clone()], ..wish };
    waits(get(there(wish("a", "", 1, 10.0))));
    assert!(matches!(get(there(wish("a", "mps", 1, 10.0))), Err(AllocateError::NeverFits(_))));
    let mixed = get(wish("a", "", 3, 10.0)).unwrap_err().to_string();
    assert!(mixed.contains("this server has 2 that are shared in one way"), "{mixed}");
}

#[test]
fn exclusive_gpus_go_to_exclusive_requests_first() {
    let ([sliced, mps, alone], r) = ([0, 2, 4].map(|n| gpu(n, 0).uuid), Counting::default());
    let mut t = mixed(&[Sharing::TimeSlice, Sharing::Mps, Sharing::Exclusive]);
    let mut get = |wish: Request| allocate(&mut t, &wish, 0, &r).unwrap();
    let got = [(); 2].map(|()| get(wish("a", "exclusive", 1, 10.0)));
    assert_eq!(got.each_ref().map(on), [[alone.clone()], [sliced.clone()]]);
    assert!(got.iter().all(|l| l.exclusive));
    assert_eq!(on(&get(wish("b", "time-slice", 1, 10.0))), std::slice::from_ref(&mps));
    t.remove_where(|_| true);
    // One lease has all three: others share the first two with it.
    let all = allocate(&mut t, &wish("a", "time-slice", 3, 10.0), 0, &r).unwrap();
    assert_eq!((on(&all), all.mps, all.exclusive), (vec![sliced, mps, alone], false, false));
    let two = Request { sticky: on(&all), ..wish("b", "time-slice", 2, 10.0) };
    assert_eq!(on(&allocate(&mut t, &two, 0, &r).unwrap()), on(&all)[..2]);
    waits(allocate(&mut t, &wish("b", "time-slice", 3, 10.0), 0, &r));
    t.remove_where(|_| true);
    // A lease returns to the GPU that it had.
    let again = Request { sticky: on(&got[0]), ..wish("a", "time-slice", 1, 10.0) };
    assert_eq!(on(&allocate(&mut t, &again, 0, &r).unwrap()), on(&got[0]));
}

#[test]
fn exclusive_request_gets_a_whole_gpu() {
    let ([alone, shared], r) = ([0, 2].map(|n| gpu(n, 0).uuid), Counting::default());
    let mut t = mixed(&[Sharing::Exclusive, Sharing::TimeSlice]);
    let part = |client: &str, uuid: &str| Request { devices: vec![uuid.into()], ..named(client, 1, 10.0) };
    let first = allocate(&mut t, &part("a", &alone), 0, &r).unwrap();
    assert_eq!(waits(allocate(&mut t, &part("b", &alone), 0, &r)), (1, 1));
    assert_eq!(waits(allocate(&mut t, &part("c", &alone), 0, &r)), (2, 2));
    // They block no request on the other GPU.
    for client in ["d", "e"] {
        assert_eq!(
            on(&allocate(&mut t, &named(client, 1, 10.0), 0, &r).unwrap()),
            std::slice::from_ref(&shared)
        );
    }
    t.remove(None, &first.id);
    assert_eq!(waits(allocate(&mut t, &part("c", &alone), 1, &r)), (2, 2), "not its turn");
    let second = allocate(&mut t, &part("b", &alone), 1, &r).unwrap();
    assert_eq!(waits(allocate(&mut t, &part("c", &alone), 1, &r)), (1, 1), "though there is memory left");

    // A reserve is on shared GPUs while they have room.
    let mut t = mixed(&[Sharing::Exclusive, Sharing::TimeSlice]);
    let half = |gpus| Reserve { client: "vm-*".into(), gpus, memory: Memory::Percent(50.0) };
    t.set_rules(Rules { reserve: vec![half(1)], overcommit_percent: 100, ..Rules::default() });
    assert_eq!(on(&allocate(&mut t, &named("a", 1, 50.0), 0, &r).unwrap()), [shared]);
    let third = allocate(&mut t, &named("b", 1, 50.0), 0, &r).unwrap();
    assert_eq!(on(&third), on(&second));
    // Then it takes an exclusive GPU as a whole.
    t.remove(None, &third.id);
    t.set_rules(Rules { reserve: vec![half(2)], overcommit_percent: 100, ..Rules::default() });
    waits(allocate(&mut t, &named("b", 1, 10.0), 0, &r));
    assert_eq!(on(&allocate(&mut t, &part("vm-1", &alone), 0, &r).unwrap()), [alone]);
}

#[test]
fn a_gpu_alone_is_lent_and_comes_back_whole() {
    let ([alone, shared], r) = ([0, 2].map(|n| gpu(n, 0).uuid), Counting::default());
    let mut t = mixed(&[Sharing::Exclusive, Sharing::TimeSlice]);
    let part = |client: &str, uuid: &str| Request { devices: vec![uuid.into()], ..request(client, 1, 10.0) };
    let lender = allocate(&mut t, &part("a", &alone), 0, &r).unwrap();
    let other = allocate(&mut t, &part("b", &shared), 0, &r).unwrap();
    let candidates = [other.id, lender.id.clone()];
    assert_eq!(t.lenders(&part("c", &alone), &candidates), candidates[1..], "the other does not help");
    assert!(t.lend(&lender.id));
    let taker = allocate(&mut t, &part("c", &alone), 0, &r).unwrap();
    // It may move to any GPU, but could have no other one alone.
    t.held.get_mut(&lender.id).unwrap().lease.pinned = false;
    assert_eq!(t.reacquire(&lender.id, true), place(1, 1));
    let candidates = [candidates[0].clone(), taker.id.clone()];
    assert_eq!(t.lenders_back(&lender.id, true, &candidates), candidates[1..]);
    assert!(t.lend(&taker.id));
    assert_eq!(t.reacquire(&lender.id, true), Ok(false));
    assert_eq!(t.reacquire(&taker.id, false), place(1, 1), "the same for it");
    // Leases that shared a GPU before it became exclusive stay, and come back one by one.
    let late = allocate(&mut t, &part("d", &shared), 0, &r).unwrap();
    let mut gpus = t.gpus().to_vec();
    gpus[1].sharing = Sharing::Exclusive;
    let (mut t, lost) = Table::new(gpus, Rules::default(), t.save(Duration::ZERO), Duration::ZERO);
    assert!(lost.is_empty());
    assert_eq!(t.holders(&shared).len(), 2);
    waits(allocate(&mut t, &part("e", &shared), 0, &r));
    assert!(t.lend(&late.id));
    assert_eq!(t.reacquire(&late.id, false), place(1, 1));
}

#[test]
fn reserved_memory_stays_free_for_its_clients() {
    let (mut t, r) = (table(2), Counting::default());
    let reserve = Reserve { client: "vm-*".into(), gpus: 1, memory: Memory::Percent(75.0) };
    t.set_rules(Rules { reserve: vec![reserve], overcommit_percent: 100, ..Rules::default() });
    allocate(&mut t, &request("db", 1, 100.0), 0, &r).unwrap();
    waits(allocate(&mut t, &request("db", 1, 50.0), 0, &r));
    allocate(&mut t, &request("db", 1, 25.0), 0, &r).unwrap();
    allocate(&mut t, &request("vm-1", 1, 75.0), 0, &r).unwrap();
    waits(allocate(&mut t, &request("vm-2", 1, 10.0), 0, &r));
}

#[test]
fn a_server_leases_only_the_part_of_a_gpu_that_it_offers() {
    let offers = Gpu { withheld_bytes: 12 * GIB, ..gpu(0, 16 * GIB) };
    let r = Counting::default();
    let (mut t, _) = Table::new(vec![offers], Rules::default(), Saved::default(), Duration::ZERO);
    let bytes = |memory| Request { memory: Memory::Bytes(memory), ..request("a", 1, 0.0) };
    let never = allocate(&mut t, &bytes(5 * GIB), 0, &r).unwrap_err();
    assert!(matches!(never, AllocateError::NeverFits(_)), "{never}");
    // A percentage is one of the part.
    let half = allocate(&mut t, &request("a", 1, 50.0), 0, &r).unwrap();
    assert_eq!(half.shares[0].limit_bytes, 2 * GIB);
    assert!(matches!(allocate(&mut t, &bytes(3 * GIB), 0, &r), Err(AllocateError::NoCapacity { .. })));
    allocate(&mut t, &bytes(2 * GIB), 0, &r).unwrap();
    t.set_rules(Rules { overcommit_percent: 150, ..Rules::default() });
    let more = allocate(&mut t, &request("a", 1, 50.0), 0, &r).unwrap();
    assert_eq!(more.shares[0].limit_bytes, 2 * GIB);
    assert!(allocate(&mut t, &request("a", 1, 1.0), 0, &r).is_err());
}

#[test]
fn overcommit_is_reported_and_bounded() {
    let (mut t, r) = (table(1), Counting::default());
    t.set_rules(Rules { reserve: vec![], overcommit_percent: 150, ..Rules::default() });
    for _ in 0..3 {
        allocate(&mut t, &request("a", 1, 50.0), 0, &r).unwrap();
    }
    waits(allocate(&mut t, &request("a", 1, 1.0), 0, &r));
    let mut whole = request("a", 1, 100.0);
    whole.memory = Memory::Bytes(17 * GIB);
    assert!(
        matches!(allocate(&mut t, &whole, 0, &r), Err(AllocateError::NeverFits(_))),
        "no more than there is"
    );
}

#[test]
fn a_fault_that_passes_returns_only_the_gpu_that_it_withdrew() {
    let mut t = table(1);
    let uuid = gpu(0, 0).uuid;
    let restarted = |t: &Table| {
        let saved = serde_json::to_vec(&t.save(Duration::ZERO)).unwrap();
        Table::new(t.gpus.clone(), Rules::default(), serde_json::from_slice(&saved).unwrap(), Duration::ZERO)
            .0
    };
    // The reason is a text for people: nothing depends on its words.
    assert!(t.withdraw_until_passed(&uuid, Passing::Silent, "any words".into()));
    assert!(!t.withdraw_until_passed(&uuid, Passing::ComputeMode, "another".into()), "it is out already");
    assert!(!t.passed(&uuid, Passing::ComputeMode), "that was not its fault");
    let mut t = restarted(&t);
    assert_eq!(t.withdrawn(&uuid), Some(&Withdrawn::Broken("any words".into())));
    assert!(t.passed(&uuid, Passing::Silent) && t.withdrawn(&uuid).is_none(), "also after a restart");
    assert!(!t.passed(&uuid, Passing::Silent) && !t.withdraw_until_passed("x", Passing::Silent, "".into()));

    // A later decision of an administrator holds.
    t.withdraw_until_passed(&uuid, Passing::Silent, "any words".into());
    t.withdraw(&uuid, Some(Withdrawn::Off("a fan is loud".into())));
    assert!(!t.passed(&uuid, Passing::Silent) && t.withdrawn(&uuid).is_some());

    // A file of version 0.1.0 has the fault in the words only.
    t.withdraw(&uuid, Some(Withdrawn::Broken("compute mode PROHIBITED does not let".into())));
    assert!(restarted(&t).passed(&uuid, Passing::ComputeMode));
    t.withdraw(&uuid, Some(Withdrawn::Broken("Xid 79".into())));
    assert!(!restarted(&t).passed(&uuid, Passing::ComputeMode));
}

#[test]
fn gpus_are_taken_out_and_put_back() {
    let (mut t, r) = (table(1), Counting::default());
    let uuid = gpu(0, 0).uuid;
    let lease = allocate(&mut t, &request("a", 1, 10.0), 0, &r).unwrap();
    assert!(t.withdraw(&uuid, Some(Withdrawn::Off("a fan is loud".into()))) && !t.withdraw("x", None));
    let error = allocate(&mut t, &request("a", 1, 10.0), 0, &r).unwrap_err();
    assert!(error.to_string().contains("a fan is loud"), "{error}");
    assert_eq!(t.renew("a", &lease.id, Duration::ZERO), Some(DEFAULT_TTL), "leases on it stay");
    let (t2, _) = Table::new(t.gpus.clone(), Rules::default(), t.save(Duration::ZERO), Duration::ZERO);
    assert_eq!(t2.withdrawn(&uuid).unwrap().reason(), "a fan is loud", "also after a restart");
    t.withdraw(&uuid, None);
    allocate(&mut t, &request("a", 1, 10.0), 0, &r).unwrap();
    t.drain(Some("maintenance".into()));
    let error = allocate(&mut t, &request("a", 1, 10.0), 0, &r).unwrap_err();
    assert!(error.to_string().contains("maintenance"), "{error}");
    let (mut t2, _) = Table::new(t.gpus.clone(), Rules::default(), t.save(Duration::ZERO), Duration::ZERO);
    assert_eq!(t2.draining(), Some("maintenance"), "also after a restart");
    t2.drain(None);
    t2.stop();
    assert_eq!(t2.draining(), Some("it stops"));
    let (t2, _) = Table::new(t2.gpus.clone(), Rules::default(), t2.save(Duration::ZERO), Duration::ZERO);
    assert_eq!(t2.draining(), None, "a stop is over with the restart");
    t.drain(None);
    allocate(&mut t, &request("a", 1, 10.0), 0, &r).unwrap();
}

pub(super) fn limited(entries: &[(&'static str, Bound)]) -> Effective {
    let layer = crate::limits::Layer::Client("a".into());
    let entries = entries.iter().map(|(name, bound)| Entry {
        name,
        layer: layer.clone(),
        bound: bound.clone(),
        origin: "f.toml:3".into(),
        of_user: false,
    });
    crate::limits::Limits { entries: entries.collect(), ..Default::default() }.of("a", "")
}

#[test]
fn limits_refuse_by_name() {
    let (mut t, r) = (table(4), Counting::default());
    let with = |name: &'static str, bound: Bound, request: Request| Request {
        limits: limited(&[("gpus", Bound::Number(3)), (name, bound)]),
        ..request
    };
    allocate(&mut t, &with("workers", Bound::Number(1), request("a", 2, 10.0)), 0, &r).unwrap();
    let persistent = Request { persistent: true, ..request("a", 1, 10.0) };
    let cases = [
        (
            with("workers", Bound::Number(1), request("a", 2, 10.0)),
            "limit gpus = 3 of client a (f.toml:3): 2 held, 2 more",
        ),
        (with("memory", Bound::Memory(Memory::Percent(5.0)), request("a", 1, 10.0)), "limit memory = 5%"),
        (with("memory", Bound::Memory(Memory::Bytes(MIB)), request("a", 1, 10.0)), "limit memory = 1MiB"),
        (with("sm_percent", Bound::Number(50), request("a", 1, 10.0)), "limit sm_percent = 50"),
        (
            with("models", Bound::Names(vec!["B200".into()]), request("a", 1, 10.0)),
            "limit models = [\"B200\"]",
        ),
        (with("max_persistent", Bound::Number(0), persistent), "limit max_persistent = 0"),
    ];
    for (request, text) in cases {
        match allocate(&mut t, &request, 0, &r) {
            Err(AllocateError::Limit(e)) => assert!(e.to_string().contains(text), "{e}"),
            other => panic!("{text}: {other:?}"),
        }
    }
    assert!(t.waiting(Duration::ZERO).is_empty(), "who may not have it does not wait for it");
    // Another client's leases do not count, and a lease that may not be renewed without end
    // ends.
    let ttl = Bound::Time(Duration::from_secs(100));
    let lease = allocate(&mut t, &with("lease_ttl", ttl.clone(), request("b", 1, 10.0)), 0, &r).unwrap();
    let boot = Request { persistent: true, ..with("lease_ttl", ttl, request("b", 1, 10.0)) };
    let boot = allocate(&mut t, &boot, 0, &r).unwrap();
    assert_eq!((lease.until_unix, boot.until_unix), (100, 0));
    assert!(t.expire(Duration::ZERO, 99).is_empty());
    assert_eq!(t.expire(Duration::ZERO, 100), [lease]);
}

#[test]
fn a_lease_lives_as_long_as_asked_for_within_lease_ttl() {
    let (mut t, r) = (table(1), Counting::default());
    let day = Duration::from_secs(86400);
    let time = |days: u32| Bound::Time(day * days);
    for (asked, limit, granted) in [
        (day * 7, None, day * 7),
        (day * 7, Some(time(0)), day * 7),
        (day * 7, Some(time(3)), day * 3),
        (day * 2, Some(time(3)), day * 2),
        (day * 9999, Some(time(0)), day * 366),
        (day * 9999, Some(time(9998)), day * 366),
        (day, Some(Bound::Time(Duration::from_millis(5))), Duration::from_secs(1)),
        (Duration::from_millis(5), Some(time(3)), Duration::from_secs(1)),
        (Duration::ZERO, Some(time(3)), DEFAULT_TTL),
    ] {
        let asks = request("a", 1, 1.0);
        let limits = limit.clone().map_or_else(Effective::default, |bound| limited(&[("lease_ttl", bound)]));
        let lease = allocate(&mut t, &Request { ttl: asked, limits, ..asks }, 0, &r).unwrap();
        assert_eq!(lease.ttl, granted, "{asked:?} {limit:?}");
        t.remove(None, &lease.id);
    }
}

#[derive(Debug, Clone)]
enum Step {
    Allocate { client: u8, gpus: u32, percent: f64 },
    Release { nth: usize, client: u8 },
    Renew { nth: usize, client: u8 },
    Pass { seconds: u64 },
    Restart,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..3u8, 0..4u32, 0.5..100.0f64).prop_map(|(client, gpus, percent)| Step::Allocate { client, gpus, percent }),
        2 => (0..8usize, 0..3u8).prop_map(|(nth, client)| Step::Release { nth, client }),
        2 => (0..8usize, 0..3u8).prop_map(|(nth, client)| Step::Renew { nth, client }),
        2 => (0..80u64).prop_map(|seconds| Step::Pass { seconds }),
        1 => Just(Step::Restart),
    ]
}

fn place(position: u32, waiting: u32) -> Result<bool, Place> {
    Err(Place { position, waiting })
}

#[test]
fn lent_leases_reacquire_in_order() {
    let mut table = table(1);
    let random = Counting::default();
    let get = |table: &mut Table, client: &str, percent| {
        table.allocate(&request(client, 1, percent), Duration::ZERO, 0, &random).map(|(lease, _)| lease.id)
    };
    let a = get(&mut table, "a", 100.0).unwrap();
    assert!(table.lend(&a) && !table.lend("none"));
    let b = get(&mut table, "b", 50.0).unwrap();
    let c = get(&mut table, "c", 50.0).unwrap();
    assert!(table.lend(&b));
    assert_eq!(table.reacquire(&a, false), place(1, 1), "c is in the way");
    assert_eq!(table.reacquire(&b, false), place(2, 2), "a asked first, though there is room for b");
    assert_eq!(table.reacquire(&a, false), place(1, 2), "and b is behind it");
    assert!(get(&mut table, "d", 50.0).is_err(), "nor is anybody served who comes later");
    // After a restart they are still lent, and none waits.
    let (mut again, lost) =
        Table::new(table.gpus().to_vec(), Rules::default(), table.save(Duration::ZERO), Duration::ZERO);
    assert!(lost.is_empty() && again.is_lent(&a));
    assert_eq!(again.reacquire(&b, false), Ok(false));
    table.cancel_reacquire(&a);
    assert_eq!(table.reacquire(&b, false), Ok(false));
    table.remove(None, &b);
    table.remove(None, &c);
    assert_eq!((table.reacquire(&a, false), table.is_lent(&a)), (Ok(false), false));
}

#[test]
fn a_lent_lease_without_programs_may_move_to_a_gpu_of_its_kind() {
    // Even numbers are one kind, odd ones another.
    let mut table = table(6);
    let random = Counting::default();
    let on = |n: u32| gpu(n, 0).uuid;
    let get = |table: &mut Table, client: &str, n: u32, pinned: bool| {
        let wish = Request { devices: vec![on(n)], ..request(client, 1, 100.0) };
        let mut lease = table.allocate(&wish, Duration::ZERO, 0, &random).unwrap().0;
        assert!(lease.pinned);
        lease.pinned = pinned;
        table.held.get_mut(&lease.id).unwrap().lease.pinned = pinned;
        lease
    };
    let (a, b) = (get(&mut table, "a", 0, false), get(&mut table, "b", 2, true));
    assert!(table.lend(&a.id) && table.lend(&b.id));
    let takers = [get(&mut table, "c", 0, false), get(&mut table, "d", 2, false)];
    assert_eq!(table.reacquire(&a.id, false), place(1, 1), "its programs' memory is bound to the GPU");
    table.cancel_reacquire(&a.id);
    assert_eq!(table.reacquire(&b.id, true), place(1, 1), "its client wants this one");
    table.cancel_reacquire(&b.id);
    assert_eq!(table.reacquire(&a.id, true), Ok(true));
    let (moved, _) = table.get(&a.id, Duration::ZERO).unwrap();
    assert_eq!((&moved.shares[0].gpu, moved.shares[0].limit_bytes), (&on(4), a.shares[0].limit_bytes));
    assert!(moved.fencing_token > takers[1].fencing_token);
    // Its own GPU comes before others, and never a withdrawn one.
    assert!(table.lend(&a.id));
    assert_eq!(table.reacquire(&a.id, true), Ok(false));
    assert!(table.lend(&a.id));
    table.withdraw(&on(4), Some(Withdrawn::Off("a fan is loud".into())));
    assert_eq!(table.reacquire(&a.id, true), place(1, 1));
    table.remove(None, &takers[0].id);
    assert_eq!(table.reacquire(&a.id, true), Ok(true));
    assert_eq!(table.get(&a.id, Duration::ZERO).unwrap().0.shares[0].gpu, on(0));
    // The lender may be on any GPU of the kind.
    table.withdraw(&on(4), None);
    let e = get(&mut table, "e", 4, false);
    let t4 = get(&mut table, "f", 1, false);
    table.lend(&a.id);
    let g = get(&mut table, "g", 0, false);
    let candidates = [t4.id, e.id.clone(), g.id];
    assert_eq!(table.lenders_back(&a.id, true, &candidates), [e.id]);
}

#[test]
fn only_as_many_lend_as_are_needed() {
    let mut table = table(4);
    let random = Counting::default();
    let ids: Vec<String> = (0..8)
        .map(|i| {
            table.allocate(&request(&format!("c{i}"), 1, 50.0), Duration::ZERO, 0, &random).unwrap().0.id
        })
        .collect();
    let one = request("new", 1, 100.0);
    let lenders = table.lenders(&one, &ids);
    assert_eq!(lenders.len(), 2, "both halves of one GPU");
    assert!(table.lenders(&one, &ids[..1]).is_empty(), "a half does not help");
    assert!(table.lenders(&request("new", 5, 100.0), &ids).is_empty());
    assert_eq!(table.lenders(&request("new", 4, 100.0), &ids).len(), 8);
}

proptest! {
    #[test]
    fn never_promises_more_than_there_is(steps in proptest::collection::vec(step(), 1..60)) {
        let kinds = [Sharing::TimeSlice, Sharing::Exclusive, Sharing::TimeSlice];
        let (mut t, r) = (mixed(&kinds), Counting::default());
        let (mut now, mut newest) = (Duration::ZERO, 0);
        for step in steps {
            let nth = |t: &Table, n: usize| t.held.keys().nth(n).cloned().unwrap_or_default();
            match step {
                Step::Allocate { client, gpus, percent } => {
                    let before = t.held.len();
                    match t.allocate(&request(&client.to_string(), gpus, percent), now, 0, &r) {
                        Ok((lease, fresh)) => {
                            prop_assert!(fresh && lease.fencing_token > newest);
                            newest = lease.fencing_token;
                            let mut distinct: Vec<_> = lease.shares.iter().map(|s| &s.gpu).collect();
                            distinct.dedup();
                            prop_assert_eq!(distinct.len(), gpus.max(1) as usize);
                        }
                        Err(_) => prop_assert_eq!(t.held.len(), before),
                    }
                }
                Step::Release { nth: n, client } => {
                    let id = nth(&t, n);
                    let owner = t.held.get(&id).map(|h| h.lease.client.clone());
                    let gone = t.remove(Some(&client.to_string()), &id).is_some();
                    prop_assert_eq!(gone, owner == Some(client.to_string()));
                }
                Step::Renew { nth: n, client } => {
                    let id = nth(&t, n);
                    if t.renew(&client.to_string(), &id, now).is_some() {
                        prop_assert_eq!(t.get(&id, now).unwrap().1, DEFAULT_TTL);
                    }
                }
                Step::Pass { seconds } => {
                    now += Duration::from_secs(seconds);
                    t.expire(now, 0);
                    prop_assert!(t.next_deadline().is_none_or(|d| d > now));
                }
                Step::Restart => {
                    let before: Vec<_> = t.held.keys().cloned().collect();
                    let (fresh, lost) = Table::new(t.gpus.clone(), t.rules.clone(), t.save(now), now);
                    prop_assert!(lost.is_empty());
                    prop_assert_eq!(fresh.held.keys().cloned().collect::<Vec<_>>(), before);
                    t = fresh;
                }
            }
            for g in t.gpus() {
                prop_assert!(t.used().get(g.uuid.as_str()).is_none_or(|used| *used <= g.memory_bytes));
                prop_assert!(g.sharing != Sharing::Exclusive || t.holders(&g.uuid).len() <= 1);
            }
        }
    }
}
