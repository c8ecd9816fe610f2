//! Bounds that the kernel keeps, for a server in a control group of its own.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::*;

const MOUNT: &str = "/sys/fs/cgroup";

/// A delegated control group, as systemd gives it to a unit; removed at the end.
struct Group(PathBuf);

impl Group {
    /// Creates the group. An error tells why this host has none, and the test is skipped.
    fn new() -> io::Result<Self> {
        let root = Path::new(MOUNT);
        // Only the root of the hierarchy may have processes beside groups.
        fs::File::options()
            .write(true)
            .open(root.join("cgroup.subtree_control"))?
            .write_all(b"+memory +pids")?;
        let group = Self(root.join(format!("gpuserver-test-{}", std::process::id())));
        fs::create_dir(&group.0)?;
        fs::create_dir(group.0.join("server"))?;
        Ok(group)
    }

    fn workers(&self) -> Vec<PathBuf> {
        let folders = |path: &Path| -> Vec<PathBuf> {
            let entries = fs::read_dir(path).into_iter().flatten().flatten();
            entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect()
        };
        let clients = folders(&self.0).into_iter().filter(|path| !path.ends_with("server"));
        clients.flat_map(|client| folders(&client)).collect()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::write(self.0.join("cgroup.kill"), "1");
        for _ in 0..200 {
            for worker in self.workers() {
                let _ = fs::remove_dir(&worker);
                let _ = worker.parent().map(fs::remove_dir);
            }
            let _ = fs::remove_dir(self.0.join("server"));
            if fs::remove_dir(&self.0).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

#[tokio::test]
async fn the_kernel_kills_a_worker_whose_unmapped_memory_exceeds_its_limit() {
    let group = match Group::new() {
        Ok(group) => group,
        Err(e) => return eprintln!("skipped: no control group with memory and pids: {e}"),
    };
    let limits = "limits.client.vm-1.host_memory = \"64MiB\"\nlimits.staging = \"1MiB\"";
    let mut server = Server::prepare("unmapped-libcuda.so.1", limits).await;
    server.group = Some(group.0.join("server/cgroup.procs"));
    server.run_into("journal").await;
    assert_eq!(server.json(&["status"])["server"]["memory_limits"], "memory limits: control groups");
    let (mut hungry, mut other) = (server.client("vm-1").await, server.client("vm-2").await);
    let mut lanes = Vec::new();
    // Before the hungry one, whose bound is the only one that is met.
    for vm in [&mut other, &mut hungry] {
        let lease = vm.allocate(10.0).await.unwrap();
        lanes.push(server.adopt(&vm.take(&lease.id).await.unwrap().id, 0, true).0);
    }
    assert!(rest(&mut lanes[1]).is_empty(), "ended");
    let journal = || std::fs::read_to_string(server.path("journal")).unwrap();
    let wanted = "limit host_memory = 64MiB of client vm-1 (";
    eventually("the journal names the limit", async || {
        journal().lines().any(|l| l.contains(wanted) && l.contains("the kernel killed its worker"))
    })
    .await;
    assert!(!journal().contains("of client vm-2 ("), "{}", journal());
    let active = |w: &&serde_json::Value| w["state"] == "active" && w["client"] == "vm-2";
    assert_eq!(server.workers().iter().filter(active).count(), 1, "the other worker continues");
    let groups: Vec<_> = group.workers().iter().map(|w| w.file_name().unwrap().to_owned()).collect();
    eventually("each worker has its group, and no other is left", async || {
        let groups = group.workers().len();
        groups == server.workers().iter().filter(|w| w["pid"].is_u64()).count()
    })
    .await;
    for worker in server.workers().iter().filter(|w| w["state"] == "active") {
        let own = fs::read_to_string(format!("/proc/{}/cgroup", worker["pid"])).unwrap();
        let id = worker["worker"].as_str().unwrap();
        assert!(own.trim_end().ends_with(&format!("/worker-{id}")), "{own} {groups:?}");
    }
}
