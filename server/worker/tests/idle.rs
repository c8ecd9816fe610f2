//! Idle time of a lease with several programs, on the simulated driver.

use std::time::Duration;

use gpuserver::accounting::Wanted;
use gpuserver::clock::Clock as _;
use gpuserver::idle::{Act, Clock, Seen, Timeouts};
use gpusession_proto::frame::op;
use gpusession_test_worker::supervised::{Site, eventually};
use gpusession_test_worker::{LEASE, MIB, WINDOW};

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
    // A report that was under way counts from its arrival: then more time has to pass.
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

    // A server that finds the workers gone records their counters of at most a minute ago.
    for client in [&works, &rests] {
        assert_eq!(client.get(WINDOW, 3), b"wor");
    }
    eventually("their copies are reported", || {
        site.supervisor
            .workers()
            .iter()
            .filter(|w| w.process.is_some())
            .all(|w| w.usage.bytes_from_device == 3)
    });
    site.clock.pass(Duration::from_secs(60));
    site.supervisor.tick();
    site.accounting.keep_running(Default::default());
    let unseen = site.accounting.list(&Wanted::default()).expect("records");
    assert_eq!(unseen.len(), 2, "{unseen:?}");
    for record in unseen {
        assert!(record.peak_memory_bytes >= 2 * MIB && record.calls > 1, "{record:?}");
        assert!(record.reason.starts_with("its end was not seen"), "{record:?}");
    }
    site.accounting.forget_before(u64::MAX);

    // Half hours of rest are no GPU time.
    for worker in &taken {
        site.supervisor.end_worker(&worker.id, None, "ended by the test");
    }
    eventually("both are on record", || {
        site.accounting.list(&Wanted::default()).expect("records").len() == 2
    });
    let records = site.accounting.list(&Wanted::default()).expect("records");
    for record in &records {
        assert!(record.gpu_busy_usec < 60_000_000, "{record:?}");
        assert!(record.gpu_busy_usec > 0, "{record:?}");
        assert_eq!((record.bytes_to_device, record.bytes_from_device), (4, 3), "{record:?}");
    }
    site.runtime.block_on(site.supervisor.close("the test ends"));
}
