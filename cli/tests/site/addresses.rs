//! Names and addresses of a server: IPv6, an address translation, and changes of both.

use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use super::*;

/// Forwards connections to another address of the same port, as an address translation does.
struct Translation(Arc<AtomicUsize>);

impl Translation {
    fn start(from: &str, to: &str, port: u16) -> Self {
        let listener = TcpListener::bind((from, port)).unwrap();
        let (to, seen) = (to.to_owned(), Arc::new(AtomicUsize::new(0)));
        let connections = seen.clone();
        std::thread::spawn(move || {
            for inside in listener.incoming().map_while(Result::ok) {
                let Ok(outside) = TcpStream::connect((to.as_str(), port)) else { continue };
                connections.fetch_add(1, Ordering::Relaxed);
                for (mut from, mut to) in [
                    (inside.try_clone().unwrap(), outside.try_clone().unwrap()),
                    (outside.try_clone().unwrap(), inside.try_clone().unwrap()),
                ] {
                    std::thread::spawn(move || {
                        let _ = std::io::copy(&mut from, &mut to);
                        let _ = to.shutdown(Shutdown::Write);
                    });
                }
            }
        });
        Self(seen)
    }

    fn connections(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

impl Site {
    fn knows(&self, address: &str) {
        let servers = format!("[[server]]\naddress = \"{address}\"\n");
        std::fs::write(self.path("etc/servers.toml"), servers).unwrap();
    }

    /// Leases, runs a program and stops the server; returns the daemon and the lease's id.
    fn leases_and_loses_its_server(&mut self) -> (Running, String) {
        let server = self.start_server();
        self.configure(LEASE, &self.token());
        let daemon = self.start_daemon();
        let lease = self.lease();
        self.runs_a_program();
        assert_eq!(server.stop(), 0);
        self.described("the stop", |d| d["servers"][0]["state"] == "stopped");
        (daemon, lease)
    }

    /// Runs a program on the machine's lease until it has shown its memory.
    fn runs_a_program(&self) {
        let mut program = self.cuda_program();
        drop(program.0.stdin.take());
        assert!(program.0.wait().unwrap().success());
        std::fs::remove_dir_all(self.path("programs")).unwrap();
    }
}

const LEASE: &str = "[client]\nname = \"vm-1\"\n[[lease]]\nmemory = \"25%\"\n";

#[test]
fn a_program_runs_over_ipv6() {
    let mut site = Site::with_simulated_gpus();
    if TcpListener::bind("[::1]:0").is_err() {
        assert!(std::env::var_os("REQUIRE_SYSTEM").is_none(), "this machine has no IPv6");
        return;
    }
    let (control, data) = (free_port(), free_port());
    site.server_listens(&format!("[::1]:{control}"), &data.to_string());
    let server = site.start_server();
    assert_eq!(site.address, format!("[::1]:{control}"));
    site.configure(LEASE, &site.token());
    let daemon = site.start_daemon();
    site.lease();
    site.runs_a_program();
    let smi: serde_json::Value = serde_json::from_slice(&site.gpusession(&["smi", "--json"]).stdout).unwrap();
    assert_eq!(smi["servers"][0]["data_addresses"], serde_json::json!([format!("[::1]:{data}")]));
    assert_eq!((daemon.stop(), server.stop()), (0, 0));
}

#[test]
fn a_server_behind_an_address_translation_advertises_its_outer_address() {
    let mut site = Site::with_simulated_gpus();
    let (control, data) = (free_port(), free_port());
    let outer = [control, data].map(|port| Translation::start("127.0.0.2", "127.0.0.1", port));
    site.server_listens(&format!("127.0.0.1:{control}"), &data.to_string());
    site.server_has("advertise = \"127.0.0.2\"\n");
    let server = site.start_server();
    site.configure(LEASE, &site.token());
    site.knows(&format!("127.0.0.2:{control}"));
    let daemon = site.start_daemon();
    site.lease();
    site.runs_a_program();
    assert!(outer[0].connections() > 0 && outer[1].connections() > 0, "nothing went around it");
    assert_eq!((daemon.stop(), server.stop()), (0, 0));
}

#[test]
fn a_lease_follows_its_server_to_another_name_and_address() {
    let mut site = Site::with_simulated_gpus();
    let (daemon, lease) = site.leases_and_loses_its_server();
    site.server_listens(&format!("127.0.0.3:{}", free_port()), &free_port().to_string());
    let path = site.path("gpuserver.toml");
    let renamed = std::fs::read_to_string(&path).unwrap().replace("gpu-a", "gpu-new");
    std::fs::write(&path, renamed).unwrap();
    let server = site.start_server();
    site.knows(&site.address);
    daemon.signal(Signal::SIGHUP);
    site.described("the server under its new name", |d| {
        d["servers"].as_array().unwrap().iter().any(|s| {
            s["address"] == site.address.as_str() && s["name"] == "gpu-new" && s["state"] == "online"
        })
    });
    // The daemon keeps a lease of an address that is gone for a minute.
    let end = Instant::now() + 4 * TEST_TIMEOUT;
    let on_new = |site: &Site| {
        let d: serde_json::Value =
            serde_json::from_slice(&site.gpusession(&["status", "--json"]).stdout).unwrap();
        d["state"] == "ready"
            && d["leases"][0]["server"] == "gpu-new"
            && d["leases"][0]["id"] != lease.as_str()
    };
    while !on_new(&site) {
        assert!(Instant::now() < end, "the lease stays with the old address");
        std::thread::sleep(Duration::from_millis(200));
    }
    site.runs_a_program();
    assert_eq!((daemon.stop(), server.stop()), (0, 0));
}

#[test]
fn programs_find_a_data_port_that_has_changed() {
    let mut site = Site::with_simulated_gpus();
    let (daemon, lease) = site.leases_and_loses_its_server();
    let control = site.address.clone();
    site.server_listens(&control, &free_port().to_string());
    let server = site.start_server();
    site.described("the server", |d| d["servers"][0]["state"] == "online" && d["state"] == "ready");
    assert_eq!(site.lease(), lease, "a lease outlives a restart of its server");
    site.runs_a_program();
    assert_eq!((daemon.stop(), server.stop()), (0, 0));
}
