//! Reports of the driver about cards and processes, and the server's reactions.

use std::time::{Duration, Instant};

use gpusession_proto::control::ReleaseRequest;
use gpusession_proto::readings::{GpuReading, uuid_bytes};
use nix::errno::Errno;
use nix::sys::ptrace;
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use tonic::Code;

use gpusession_test_server::{Server, alive, eventually, rest};

const GPUS: [&str; 2] =
    ["GPU-00000000-0000-0000-0000-000000000000", "GPU-00000000-0000-0000-0000-000000000001"];

/// Readings of both cards of the server.
struct Cards(Vec<GpuReading>);

impl Cards {
    /// Creates healthy readings, before the server starts.
    fn of(server: &Server) -> Self {
        let card = |uuid: &str| GpuReading {
            uuid: uuid_bytes(uuid).unwrap(),
            compute_mode: Some(0),
            uncorrected_ecc: Some(3),
            ..Default::default()
        };
        let cards = Self(GPUS.map(card).into());
        cards.say(server);
        cards
    }

    fn card(&mut self, uuid: &str) -> &mut GpuReading {
        let uuid = uuid_bytes(uuid).unwrap();
        self.0.iter_mut().find(|card| card.uuid == uuid).unwrap()
    }

    fn say(&self, server: &Server) {
        let whole = server.path("readings.new");
        std::fs::write(&whole, serde_json::to_string(&self.0).unwrap()).unwrap();
        std::fs::rename(whole, server.path("readings.json")).unwrap();
    }
}

fn state(server: &Server, uuid: &str) -> (String, String) {
    let gpus = server.json(&["gpus"])["gpus"].as_array().unwrap().clone();
    let gpu = gpus.iter().find(|gpu| gpu["uuid"] == uuid).unwrap();
    (gpu["state"].as_str().unwrap().into(), gpu["reason"].as_str().unwrap_or_default().into())
}

/// Hides the end of a process from its parent, as if it waited in the driver.
///
/// Returns a function that stops this, or `None` where the kernel allows only root to trace other
/// processes than one's children (Yama).
fn keep_from_ending(pid: u32) -> Option<impl FnOnce()> {
    let (end, ended) = std::sync::mpsc::channel::<()>();
    let (began, begun) = std::sync::mpsc::channel();
    let tracer = std::thread::spawn(move || {
        began.send(ptrace::seize(Pid::from_raw(pid.cast_signed()), ptrace::Options::empty())).unwrap();
        // The end of this thread detaches the process.
        let _ = ended.recv();
    });
    match begun.recv().unwrap() {
        Err(Errno::EPERM) if !nix::unistd::geteuid().is_root() => return None,
        seized => seized.unwrap(),
    }
    Some(move || {
        drop(end);
        tracer.join().unwrap();
    })
}

#[tokio::test]
async fn a_killed_process_that_does_not_end_breaks_its_gpu() {
    let server = Server::start().await;
    let mut vm = server.client("vm-1").await;
    let lease = vm.allocate(100.0).await.unwrap();
    let gpu = lease.devices[0].uuid.clone();
    let worker = vm.take(&lease.id).await.unwrap();
    let (_lane, said) = server.adopt(&worker.id, 0, true);
    let pid = said["pid"].as_u64().unwrap() as u32;
    let Some(let_go) = keep_from_ending(pid) else {
        assert!(std::env::var_os("REQUIRE_SYSTEM").is_none(), "this kernel lets only root trace");
        return eprintln!("not tested: this kernel lets only root trace");
    };
    vm.pool.release(ReleaseRequest { lease: lease.id.clone(), ..Default::default() }).await.unwrap();
    let released = Instant::now();
    eventually("its GPU is broken", async || state(&server, &gpu).0 == "broken").await;
    assert!(released.elapsed() > Duration::from_secs(5), "it has a moment");
    let (_, why) = state(&server, &gpu);
    assert!(why.contains(&format!("process {pid} of a worker was killed and does not exit")), "{why}");
    let_go();
    eventually("it is gone", async || server.workers().iter().all(|w| w["pid"] != pid)).await;
    assert!(server.verb(&["on", &gpu]).status.success());
    assert_eq!(state(&server, &gpu).0, "free");
}

#[tokio::test]
async fn a_gpu_whose_memory_stays_in_use_after_a_worker_is_taken_out() {
    let mut server = Server::prepare("libcuda.so.1", "").await;
    let mut cards = Cards::of(&server);
    server.run().await;
    let mut vm = server.client("vm-1").await;
    let lease = vm.allocate(10.0).await.unwrap();
    let gpu = lease.devices[0].uuid.clone();
    let worker = vm.take(&lease.id).await.unwrap();
    let (lane, said) = server.adopt(&worker.id, 0, true);
    let pid = said["pid"].as_u64().unwrap() as u32;
    cards.card(&gpu).processes = vec![(pid, Some(100 << 20))];
    cards.say(&server);
    drop(lane);
    vm.pool.release(ReleaseRequest { lease: lease.id, ..Default::default() }).await.unwrap();
    eventually("the worker is gone", async || !alive(pid)).await;
    let gone = Instant::now();
    eventually("its GPU is broken", async || state(&server, &gpu).0 == "broken").await;
    assert!(gone.elapsed() > Duration::from_secs(5), "the driver has a moment");
    let (_, why) = state(&server, &gpu);
    assert!(why.contains(&format!("memory of process {pid}, which has exited, is still in use")), "{why}");
}

#[tokio::test]
async fn a_process_has_no_more_than_its_lease() {
    let mut server = Server::prepare("libcuda.so.1", "").await;
    let mut cards = Cards::of(&server);
    server.run_into("journal").await;
    let mut vm = server.client("vm-1").await;
    let lease = vm.allocate(10.0).await.unwrap();
    let own = lease.devices[0].uuid.clone();
    let other = *GPUS.iter().find(|gpu| **gpu != own).unwrap();
    for (gpu, bytes, why) in [
        (own.as_str(), 12u64 << 30, "its lease is over its memory limit"),
        (other, 1 << 20, "uses a GPU that its lease does not have"),
    ] {
        let worker = vm.take(&lease.id).await.unwrap();
        let (mut lane, said) = server.adopt(&worker.id, 0, true);
        let pid = said["pid"].as_u64().unwrap() as u32;
        // Memory within its quota and processes of others are accepted.
        cards.card(&own).processes = vec![(pid, Some(100 << 20)), (1, Some(1 << 40)), (pid + 1, None)];
        // The other card's mode shows that the server has read this: it checks processes first.
        for (mode, shows) in [(3, "broken"), (0, "free")] {
            cards.card(other).compute_mode = Some(mode);
            cards.say(&server);
            eventually("the reading is seen", async || state(&server, other).0 == shows).await;
        }
        assert!(alive(pid));
        cards.card(&own).processes.clear();
        cards.card(gpu).processes.push((pid, Some(bytes)));
        cards.say(&server);
        eventually(why, async || !alive(pid)).await;
        assert!(rest(&mut lane).is_empty());
        eventually("the journal says why", async || {
            std::fs::read_to_string(server.path("journal")).unwrap().lines().any(|l| l.contains(why))
        })
        .await;
        cards.card(gpu).processes.clear();
        cards.say(&server);
    }
    assert_eq!(state(&server, &own).0, "leased", "that was the program's fault, not the card's");
}

#[tokio::test]
async fn a_card_that_fails_is_taken_out() {
    let mut server = Server::prepare("libcuda.so.1", "warm_workers = 0").await;
    let mut cards = Cards::of(&server);
    server.run().await;
    let mut vm = server.client("vm-1").await;
    let lease = vm.allocate(10.0).await.unwrap();
    let bad = lease.devices[0].uuid.clone();
    let good = *GPUS.iter().find(|gpu| **gpu != bad).unwrap();

    // An administrator changes the compute mode, and changes it back.
    cards.card(good).compute_mode = Some(3);
    cards.say(&server);
    eventually("the mode is seen", async || state(&server, good).0 == "broken").await;
    assert!(state(&server, good).1.contains("EXCLUSIVE_PROCESS"), "{:?}", state(&server, good));
    assert!(server.verb(&["on", good]).status.success());
    eventually("it is out again", async || state(&server, good).0 == "broken").await;
    cards.card(good).compute_mode = Some(0);
    cards.say(&server);
    eventually("it is mended", async || state(&server, good).0 == "free").await;

    cards.card(&bad).uncorrected_ecc = Some(4);
    cards.say(&server);
    eventually("the error is counted", async || state(&server, &bad).0 == "broken").await;
    assert!(state(&server, &bad).1.contains("from 3 to 4"), "{:?}", state(&server, &bad));
    let gone = vm.pool.release(ReleaseRequest { lease: lease.id.clone(), ..Default::default() }).await;
    assert!(gone.is_ok() || gone.is_err_and(|status| status.code() == Code::NotFound));
    assert_eq!(vm.allocate(10.0).await.unwrap().devices[0].uuid, good);
    assert!(server.verb(&["on", &bad]).status.success());
    assert_eq!(state(&server, &bad).0, "free", "an administrator knows better");
}

#[tokio::test]
async fn a_fault_of_a_card_that_is_not_served_withdraws_nothing() {
    let mut server = Server::prepare("libcuda.so.1", "gpus = [0]").await;
    let mut cards = Cards::of(&server);
    server.run_into("journal").await;
    let [served, other] = GPUS;
    // The compute mode shows that the server has read the first count of errors.
    for (mode, shows) in [(3, "broken"), (0, "free")] {
        cards.card(served).compute_mode = Some(mode);
        cards.say(&server);
        eventually("the reading is seen", async || state(&server, served).0 == shows).await;
    }
    // In one reading, the card that is not served in front.
    cards.0.reverse();
    cards.card(other).uncorrected_ecc = Some(4);
    cards.card(served).uncorrected_ecc = Some(4);
    cards.say(&server);
    eventually("the served card is out", async || state(&server, served).0 == "broken").await;
    let journal = std::fs::read_to_string(server.path("journal")).unwrap();
    assert!(journal.contains(&format!("{served}: withdrawn")), "{journal}");
    assert!(!journal.contains(&format!("{other}: withdrawn")), "{journal}");
}

#[tokio::test]
async fn a_lease_whose_card_was_taken_away_does_not_come_back_with_the_card() {
    let mut server = Server::start().await;
    let mut vm = server.client("vm-1").await;
    let held = |server: &Server| -> Vec<String> {
        let shown = server.json(&["leases"]);
        let leases = shown["leases"].as_array().expect("a list of leases");
        let cards = leases.iter().filter_map(|lease| lease["devices"][0]["uuid"].as_str());
        cards.map(str::to_owned).collect()
    };
    for _ in GPUS {
        vm.allocate(100.0).await.expect("room on a card");
    }
    assert_eq!(held(&server).len(), 2);
    for (cards, left) in [("gpus = [0]", 1), ("", 1)] {
        server.signal(Signal::SIGTERM);
        server.configure("libcuda.so.1", cards);
        server.run().await;
        assert_eq!(held(&server).len(), left, "{cards}");
    }
}
