//! Programs whose workers say that their device memory has moved to host memory.

use gpusession_proto::control::Lease;
use gpusession_proto::readings::{GpuReading, uuid_bytes};
use gpusession_test_server::{Client, Server, alive, eventually};

/// Has NVML report these bytes of a process on a lease's GPU.
fn report(server: &Server, lease: &Lease, process: Option<(u32, u64)>) {
    let reading = GpuReading {
        uuid: uuid_bytes(&lease.devices[0].uuid).unwrap(),
        memory_free_bytes: Some(1 << 40),
        processes: process.iter().map(|(pid, bytes)| (*pid, Some(*bytes))).collect(),
        ..Default::default()
    };
    let whole = server.path("readings.new");
    std::fs::write(&whole, serde_json::to_string(&[reading]).unwrap()).unwrap();
    std::fs::rename(whole, server.path("readings.json")).unwrap();
}

/// Starts a server with this driver, and a program of a new lease.
async fn with_program(driver: &str) -> (Server, Client, Lease, u32, std::net::TcpStream) {
    let mut server = Server::prepare(driver, "").await;
    std::fs::write(server.path("readings.json"), "[]").unwrap();
    server.run_into("journal").await;
    let mut vm = server.client("vm-1").await;
    let lease = vm.allocate(100.0).await.unwrap();
    let worker = vm.take(&lease.id).await.unwrap();
    let (lane, said) = server.adopt(&worker.id, 0, true);
    let pid = said["pid"].as_u64().unwrap() as u32;
    eventually("it is served", async || {
        server.workers().iter().any(|w| w["pid"] == pid && w["state"] == "active")
    })
    .await;
    (server, vm, lease, pid, lane)
}

fn state(server: &Server, pid: u32) -> String {
    let workers = server.workers();
    workers.iter().find(|w| w["pid"] == pid).map_or("gone".into(), |w| w["state"].as_str().unwrap().into())
}

#[tokio::test]
async fn a_program_is_parked_once_nvml_reports_no_memory_of_it() {
    let (server, _vm, lease, pid, _lane) = with_program("parks-pause-libcuda.so.1").await;
    report(&server, &lease, Some((pid, 8 << 20)));
    let parked = server.verb(&["park", &lease.id]);
    assert!(parked.status.success(), "{parked:?}");
    assert_eq!(state(&server, pid), "parked");
    assert!(server.verb(&["unpark", &lease.id]).status.success());
    eventually("it is back", async || state(&server, pid) == "active").await;
}

#[tokio::test]
async fn a_worker_that_keeps_its_memory_is_killed() {
    let (server, _vm, lease, pid, _lane) = with_program("parks-pause-libcuda.so.1").await;
    report(&server, &lease, Some((pid, 3 << 30)));
    let parked = server.verb(&["park", &lease.id]);
    let said = String::from_utf8_lossy(&parked.stderr);
    assert!(said.contains("NVML reports 3072 MiB of it on the GPU"), "{parked:?}");
    eventually("it is gone", async || !alive(pid)).await;
    let rows = server.json(&["accounting", "--kind", "process"]);
    let reason = rows["records"][0]["reason"].as_str().unwrap();
    assert!(reason.contains("reported that its device memory had moved"), "{reason}");
    // Another program of the lease can be parked.
    assert_eq!(server.json(&["leases"])["leases"][0]["state"], "idle");
}

#[tokio::test]
async fn a_parked_worker_that_takes_its_memory_back_is_killed() {
    let (server, _vm, lease, pid, _lane) = with_program("parks-pause-libcuda.so.1").await;
    assert!(server.verb(&["park", &lease.id]).status.success());
    report(&server, &lease, Some((pid, 3 << 30)));
    eventually("it is gone", async || !alive(pid)).await;
    let rows = server.json(&["accounting", "--kind", "process"]);
    let reason = rows["records"][0]["reason"].as_str().unwrap();
    assert!(reason.contains("its program is parked, but its process holds device memory"), "{reason}");
}

#[tokio::test]
async fn a_worker_of_an_earlier_release_stays_where_it_is() {
    let (server, _vm, lease, pid, _lane) = with_program("pause-libcuda.so.1").await;
    let parked = server.verb(&["park", &lease.id]);
    let said = String::from_utf8_lossy(&parked.stderr);
    assert!(said.contains("earlier release"), "{parked:?}");
    assert_eq!(state(&server, pid), "active");
}
