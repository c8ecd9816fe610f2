//! Cost of a server whose leases many clients hold: memory and CPU time.
//!
//! Each client keeps its connection, watches for events, and renews its lease every two seconds.
//!
//!     cargo bench -p gpuserver --bench clients [-- CLIENTS [SECONDS]]
//!
//! The default is 500 clients and 20 seconds; joining takes longer with more clients. The variable
//! `CLIENTS` sets their number, too: `make bench` takes 4000, which join in about a minute.
//!
//! All clients share this process. The server is another process, with 80 GPUs and no driver, and
//! with its defaults except for limits.

use std::time::{Duration, Instant};

use gpusession_proto::control::pool_client::PoolClient;
use gpusession_proto::control::{AllocateRequest, RenewRequest, WatchRequest};
use gpusession_test_server::{Client, Server};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tonic::transport::Identity;

/// Interval in which a daemon renews its leases.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(2);
/// Clients that join at the same time.
const AT_ONCE: usize = 16;

/// Returns the CPU time of all threads of a process, and its resident memory in bytes.
fn used(pid: u32) -> (Duration, u64) {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("it runs");
    let fields: Vec<u64> = stat
        .rsplit_once(')')
        .map_or("", |(_, rest)| rest)
        .split_whitespace()
        .map(|f| f.parse().unwrap_or(0))
        .collect();
    // utime and stime, in ticks of 10 ms; rss in pages.
    (Duration::from_millis((fields[11] + fields[12]) * 10), fields[21] * 4096)
}

async fn client(server: &Server, token: &str, i: usize) -> (Client, String) {
    let name = format!("vm-{i}");
    let (certificate, key) =
        server.enrol(token, &name, &format!("machine of {name}")).await.expect("it joins");
    let identity = Identity::from_pem(certificate, key);
    let channel = server.connect(Some(identity.clone())).await.expect("a connection");
    let mut client = Client { name, identity, pool: PoolClient::new(channel) };
    // The lease outlives the joining: renewals start after the last client has joined.
    let request = AllocateRequest { memory_bytes: 100 << 20, ttl_usec: 3_600_000_000, ..client.request() };
    let lease = client.pool.allocate(request).await.expect("a lease").into_inner().id;
    (client, lease)
}

/// Watches and renews like a daemon, each client at its own time.
///
/// Renewals start when all clients have joined, since both share this machine's processors.
async fn hold(
    mut client: Client,
    lease: String,
    i: usize,
    late: std::sync::Arc<std::sync::atomic::AtomicU64>,
    mut all_joined: watch::Receiver<bool>,
) {
    let mut watching = client.pool.clone();
    let events = tokio::spawn(async move {
        let events = watching.watch(WatchRequest { boot_id: "b1".into() }).await;
        let mut events = events.expect("a stream").into_inner();
        while let Ok(Some(_)) = events.message().await {}
    });
    let _ = all_joined.wait_for(|all| *all).await;
    tokio::time::sleep(HEARTBEAT_INTERVAL.mul_f64((i % 1000) as f64 / 1000.0)).await;
    loop {
        let begun = Instant::now();
        let request = RenewRequest { leases: vec![lease.clone()], boot_id: "b1".into() };
        let renewed = client.pool.renew(request).await.expect("renewed").into_inner();
        assert!(!renewed.leases[0].lost, "{renewed:?}");
        late.fetch_max(begun.elapsed().as_micros() as u64, std::sync::atomic::Ordering::Relaxed);
        assert!(!events.is_finished(), "the stream of events ended");
        tokio::time::sleep(HEARTBEAT_INTERVAL.saturating_sub(begun.elapsed())).await;
    }
}

/// Builds the stand-in for workers, since `cargo bench` builds no examples.
fn built() -> bool {
    let folder =
        std::env::current_exe().expect("a path").ancestors().nth(2).map(std::path::Path::to_path_buf);
    let folder = folder.expect("below the target folder");
    let profile = match folder.file_name().and_then(|name| name.to_str()) {
        Some("debug") => "dev",
        Some(name) => name,
        None => return false,
    };
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = std::process::Command::new(cargo)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .args(["build", "--quiet", "--profile", profile, "--example", "fake-worker"])
        .env("CARGO_TARGET_DIR", folder.parent().unwrap_or(&folder))
        .status();
    status.is_ok_and(|status| status.success())
}

fn main() {
    if !built() {
        println!("clients: not measured: `cargo build -p gpuserver --example fake-worker` failed");
        return;
    }
    let mut numbers = std::env::args().skip(1).filter_map(|word| word.parse::<usize>().ok());
    let wanted = std::env::var("CLIENTS").ok().map(|text| text.parse().expect("CLIENTS is a number"));
    let count = numbers.next().or(wanted).unwrap_or(500);
    let seconds = numbers.next().unwrap_or(20) as u64;
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).expect("a limit");
    setrlimit(Resource::RLIMIT_NOFILE, most, most).expect("a limit");
    if most < count as u64 + 100 {
        println!(
            "clients: not measured: the limit of {most} open files is too low for {count} clients; raise it (ulimit -Hn)"
        );
        return;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let more = "warm_workers = 0\nlimits.gpus = 1\nlimits.max_persistent = 1\nlimits.requests_per_s = 100000\npark_after = 0\nwarn_after = 0\nlend_after = 0";
        let mut server = Server::prepare("many-libcuda.so.1", more).await;
        server.run_into("log").await;
        let pid = server.json(&["status"])["server"]["pid"].as_u64().expect("a process") as u32;
        let (_, empty) = used(pid);
        let token = server.token(&["--from", "127.0.0.0/8", "--uses", &count.to_string()]);
        let (late, begun) = (std::sync::Arc::default(), Instant::now());
        let server = std::sync::Arc::new(server);
        let (all_joined, joined_all) = watch::channel(false);
        let mut clients = JoinSet::new();
        let places = std::sync::Arc::new(tokio::sync::Semaphore::new(AT_ONCE));
        let mut joining = JoinSet::new();
        for i in 0..count {
            let place = places.clone().acquire_owned().await.expect("open");
            let (server, token) = (server.clone(), token.clone());
            joining.spawn(async move {
                let joined = client(&server, &token, i).await;
                drop(place);
                (joined, i)
            });
            while let Some(done) = joining.try_join_next() {
                let ((client, lease), i) = done.expect("no panic");
                clients.spawn(hold(client, lease, i, std::sync::Arc::clone(&late), joined_all.clone()));
            }
        }
        while let Some(done) = joining.join_next().await {
            let ((client, lease), i) = done.expect("no panic");
            clients.spawn(hold(client, lease, i, std::sync::Arc::clone(&late), joined_all.clone()));
        }
        let joined = begun.elapsed();
        all_joined.send_replace(true);
        tokio::time::sleep(HEARTBEAT_INTERVAL * 2).await;
        late.store(0, std::sync::atomic::Ordering::Relaxed);
        let ((before, _), begun) = (used(pid), Instant::now());
        tokio::select! {
            () = tokio::time::sleep(Duration::from_secs(seconds)) => {}
            ended = clients.join_next() => panic!("a client ended: {ended:?}"),
        }
        let ((after, resident), wall) = (used(pid), begun.elapsed());
        let percent = (after - before).as_secs_f64() / wall.as_secs_f64() * 100.0;
        println!(
            "{count} clients with a lease each: {} MB resident ({} MB without clients), {percent:.1} % of a core, \
             {:.0} us for a renewal, the slowest {} ms; they joined in {:.0} s",
            resident / 1_000_000,
            empty / 1_000_000,
            percent / 100.0 * 1e6 / (count as f64 / HEARTBEAT_INTERVAL.as_secs_f64()),
            late.load(std::sync::atomic::Ordering::Relaxed) / 1000,
            joined.as_secs_f64(),
        );
        clients.shutdown().await;
    });
}
