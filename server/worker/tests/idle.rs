//! When a lease is idle whose programs are several, on the simulated driver.

// Other tests use the rest of both.
#[allow(dead_code)]
mod harness;
#[allow(dead_code)]
#[path = "harness/supervised.rs"]
mod supervised;

use std::time::Duration;

use gpuserver::accounting::Wanted;
use gpuserver::clock::Clock as _;
use gpuserver::idle::{Act, Clock, Seen, Timeouts};
use gpusession_proto::frame::op;
use harness::{LEASE, MIB, WINDOW};
use supervised::{Site, eventually};

const PARK_AFTER: Duration = Duration::from_secs(1800);

#[test]
fn a_lease_rests_when_all_its_programs_rest() {
    let site = Site::new(2);
    let _inside = site.runtime.enter();
    let taken = site.take(2);
    let [works, rests] = [(0, 1), (1, 2)].map(|(at, pid)| site.client(&taken[at], pid));
    for client in [&works, &rests] {
        client.call(op::ALLOC, &[WINDOW, 2 * MIB, 0]);
    }
    eventually("both are served", || site.supervisor.activity(LEASE).0 == 2);
    let limits = Timeouts { park: PARK_AFTER, ..Timeouts::default() };
    let due = || {
        let (processes, active) = site.supervisor.activity(LEASE);
        let seen = Seen { processes, active: active.expect("a lease"), away: false, hint: None };
        Clock::default().tick(seen, &limits, site.clock.now())
    };
    // A report that was on its way counts from when it is heard on: then more time has to pass.
    let rest = || {
        site.clock.pass(PARK_AFTER);
        due() == Some(Act::Park)
    };
    assert_eq!(due(), None, "both have just begun");
    eventually("both rest", rest);
    works.put(WINDOW, b"work");
    eventually("one works", || due().is_none());
    eventually("both rest again", rest);
    rests.put(WINDOW, b"work");
    eventually("the other one works", || due().is_none());

    // Half hours of rest are no GPU time.
    for worker in &taken {
        site.supervisor.end_worker(&worker.id, None, "ended by the test");
    }
    eventually("both are on record", || {
        site.accounting.list(&Wanted::default()).expect("records").len() == 2
    });
    for record in site.accounting.list(&Wanted::default()).expect("records") {
        assert!(record.gpu_busy_usec < 60_000_000, "{record:?}");
    }
    site.runtime.block_on(site.supervisor.close("the test ends"));
}
