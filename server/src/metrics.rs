//! Figures for Prometheus: `GET /metrics` on `metrics_listen`, in its text format.
//!
//! The figures name servers, GPUs and clients, but no user or program of a client.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use gpusession_proto::readings::uuid_bytes;
use hyper::body::Incoming;
use hyper::header::CONTENT_TYPE;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};
use tracing::{debug, warn};

use crate::pool::Pool;
use crate::supervise::Sampled;

/// Most connections at a time; the listener's queue holds further ones.
const MAX_CONNECTIONS: usize = 16;
/// Longest time of a connection.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// Longest time that a request's header may take.
const HEADER_TIMEOUT: Duration = Duration::from_secs(5);

/// A metric: name, type and help text.
struct Metric(&'static str, &'static str, &'static str);

const SERVER: Metric = Metric("gpusession_server_info", "gauge", "Versions of the server and its driver");
const DRAINING: Metric = Metric("gpusession_server_draining", "gauge", "1 while no new leases are made");
const GPU_STATE: Metric = Metric("gpusession_gpu_state", "gauge", "1 for the present state of the GPU");
const GPU_MEMORY: Metric = Metric("gpusession_gpu_memory_bytes", "gauge", "Device memory of the card");
const GPU_LEASED: Metric = Metric("gpusession_gpu_leased_bytes", "gauge", "Device memory promised to leases");
const GPU_USED: Metric =
    Metric("gpusession_gpu_used_bytes", "gauge", "Device memory in use, as NVML reports");
const GPU_BUSY: Metric = Metric(
    "gpusession_gpu_utilization_ratio",
    "gauge",
    "Part of the last sample period with a kernel running, as NVML reports",
);
const GPU_HEAT: Metric =
    Metric("gpusession_gpu_temperature_celsius", "gauge", "Temperature of the card, as NVML reports");
const GPU_POWER: Metric = Metric("gpusession_gpu_power_watts", "gauge", "Power of the card, as NVML reports");
const LEASES: Metric = Metric("gpusession_leases", "gauge", "Leases by client and state");
const WAITING: Metric = Metric("gpusession_waiting_requests", "gauge", "Requests in the queue for GPUs");
const PROGRAMS: Metric = Metric("gpusession_programs", "gauge", "Running programs by client");
const WORKERS: Metric = Metric("gpusession_workers", "gauge", "Worker processes by state");
const ISOLATION: Metric =
    Metric("gpusession_server_isolation", "gauge", "1 for the present isolation of the workers");
const IDENTITY: Metric = Metric(
    "gpusession_identity_expires_seconds",
    "gauge",
    "Time until the certificate of the server, the authority or a client expires",
);
const PEER: Metric = Metric(
    "gpusession_peer_contact_age_seconds",
    "gauge",
    "Time since this server had all statements of another server of the pool",
);
const STATEMENTS: Metric =
    Metric("gpusession_statements", "gauge", "Statements about revocations in the pool");
const PARKED: Metric =
    Metric("gpusession_parked_bytes", "gauge", "Host memory that holds parked device memory");
const ENDED_LEASES: Metric =
    Metric("gpusession_leases_ended_total", "counter", "Leases ended since the server started");
const ENDED_PROGRAMS: Metric =
    Metric("gpusession_programs_ended_total", "counter", "Programs ended since the server started");
const RESUMES: Metric = Metric(
    "gpusession_resumes_total",
    "counter",
    "Returns of programs after a broken connection since the server started",
);
const SAMPLED: Metric = Metric(
    "gpusession_gpu_sampled_bytes_total",
    "counter",
    "Device memory that new workers looked at since the server started",
);
const LEFT: Metric = Metric(
    "gpusession_gpu_left_bytes_total",
    "counter",
    "Bytes of the sampled memory that the driver had not cleared",
);
const INTERRUPTED: Metric =
    Metric("gpusession_programs_interrupted", "gauge", "Programs that are without a connection now");
const MEASUREMENTS: Metric = Metric(
    "gpusession_netperf_total",
    "counter",
    "Measurements of the network by client since the server started",
);
const BUSY: Metric =
    Metric("gpusession_programs_gpu_busy_seconds_total", "counter", "Time of GPU work of ended programs");

#[derive(Default)]
struct Text(String);

impl Text {
    /// Adds a metric with its samples: further labels than the server's, and the value.
    ///
    /// Adds nothing if there is no sample.
    fn add<'a>(
        &mut self,
        server: &str,
        Metric(name, kind, help): Metric,
        samples: impl IntoIterator<Item = (Vec<(&'a str, String)>, f64)>,
    ) {
        let mut first = true;
        for (labels, value) in samples {
            if std::mem::take(&mut first) {
                let _ = writeln!(self.0, "# HELP {name} {help}.\n# TYPE {name} {kind}");
            }
            let _ = write!(self.0, "{name}{{server=\"{}\"", escaped(server));
            for (label, text) in labels {
                let _ = write!(self.0, ",{label}=\"{}\"", escaped(&text));
            }
            let _ = writeln!(self.0, "}} {value}");
        }
    }
}

fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// Formats all metrics.
async fn text(pool: &Pool) -> String {
    let mut out = Text::default();
    let facts = pool.facts();
    let server = facts.config.name.as_str();
    let of_gpu = |uuid: &str| vec![("gpu", uuid.to_string())];
    let version = [("version", env!("CARGO_PKG_VERSION").into()), ("driver", facts.driver_version.clone())];
    out.add(server, SERVER, [(version.to_vec(), 1.0)]);
    let draining = pool.registry().draining().await.is_some();
    out.add(server, DRAINING, [(vec![], f64::from(u8::from(draining)))]);

    let gpus = pool.registry().gpus().await;
    let state = |g: &crate::registry::GpuUse| {
        let mut labels = of_gpu(&g.gpu.uuid);
        labels.push(("state", g.state().into()));
        (labels, 1.0)
    };
    out.add(server, GPU_STATE, gpus.iter().map(state));
    out.add(server, GPU_MEMORY, gpus.iter().map(|g| (of_gpu(&g.gpu.uuid), g.gpu.memory_bytes as f64)));
    out.add(server, GPU_LEASED, gpus.iter().map(|g| (of_gpu(&g.gpu.uuid), g.used_bytes as f64)));
    let latest = pool.monitor().readings().borrow().clone();
    let readings: Vec<_> = gpus
        .iter()
        .filter_map(|g| Some((&g.gpu.uuid, latest.as_ref()?.gpu(&uuid_bytes(&g.gpu.uuid)?)?.clone())))
        .collect();
    let mut read = |metric, value: fn(&gpusession_proto::readings::GpuReading) -> Option<f64>| {
        out.add(server, metric, readings.iter().filter_map(|(uuid, r)| Some((of_gpu(uuid), value(r)?))));
    };
    read(GPU_USED, |r| r.memory_used_bytes.map(|n| n as f64));
    read(GPU_BUSY, |r| r.utilization_percent.map(|n| f64::from(n) / 100.0));
    read(GPU_HEAT, |r| r.temperature_c.map(f64::from));
    read(GPU_POWER, |r| r.power_mw.map(|n| f64::from(n) / 1000.0));

    let mut leases: BTreeMap<(String, &str), u32> = BTreeMap::new();
    for standing in pool.registry().leases().await {
        let (state, _) = pool.lease_state(&standing.lease.id);
        *leases.entry((standing.lease.client, state)).or_default() += 1;
    }
    let samples = leases
        .into_iter()
        .map(|((client, state), n)| (vec![("client", client), ("state", state.to_string())], f64::from(n)));
    out.add(server, LEASES, samples);
    out.add(server, WAITING, [(vec![], pool.registry().waiting().await.len() as f64)]);
    let (mut programs, mut workers) = (BTreeMap::<String, u32>::new(), BTreeMap::<&str, u32>::new());
    let mut interrupted = 0.0;
    for worker in pool.supervisor().workers() {
        *workers.entry(worker.phase.as_str()).or_default() += 1;
        interrupted += f64::from(worker.interrupted.is_some());
        if worker.process.is_some() {
            *programs.entry(worker.client).or_default() += 1;
        }
    }
    out.add(server, PROGRAMS, programs.into_iter().map(|(c, n)| (vec![("client", c)], f64::from(n))));
    out.add(server, WORKERS, workers.into_iter().map(|(s, n)| (vec![("state", s.into())], f64::from(n))));
    out.add(server, INTERRUPTED, [(vec![], interrupted)]);
    let level = pool.supervisor().isolation().level.as_str();
    out.add(server, ISOLATION, [(vec![("level", level.into())], 1.0)]);
    out.add(server, PARKED, [(vec![], pool.parking().parked_bytes() as f64)]);

    let unix = pool.unix();
    let identities = pool.identities().into_iter().map(|i| {
        let mut labels = vec![("role", i.role.to_string())];
        labels.extend((i.role == "client").then_some(("client", i.name)));
        (labels, i.expires_unix as f64 - unix as f64)
    });
    out.add(server, IDENTITY, identities);
    let now = pool.now();
    let age = |peer: crate::pool::contact::Peer| {
        let age = now.saturating_sub(peer.contact?).as_secs_f64();
        Some((vec![("peer", peer.address), ("name", peer.server)], age))
    };
    out.add(server, PEER, pool.peers().into_iter().filter_map(age));
    out.add(server, STATEMENTS, [(vec![], pool.statements(crate::statements::Statements::len) as f64)]);

    let totals = pool.accounting().totals();
    let of_client = |value: fn(&crate::accounting::Totals) -> f64| {
        totals.iter().map(move |(client, t)| (vec![("client", client.clone())], value(t)))
    };
    out.add(server, ENDED_LEASES, of_client(|t| t.leases as f64));
    out.add(server, ENDED_PROGRAMS, of_client(|t| t.programs as f64));
    let sampled = pool.supervisor().sampled();
    let of = |count: fn(&Sampled) -> u64| sampled.iter().map(move |(gpu, s)| (of_gpu(gpu), count(s) as f64));
    out.add(server, SAMPLED, of(|s| s.bytes));
    out.add(server, LEFT, of(|s| s.left));
    out.add(server, RESUMES, [(vec![], pool.supervisor().resumes() as f64)]);
    let measured = pool.endpoints().counts().into_iter();
    out.add(server, MEASUREMENTS, measured.map(|(client, n)| (vec![("client", client)], n as f64)));
    out.add(server, BUSY, of_client(|t| t.gpu_busy.as_secs_f64()));
    out.0
}

async fn answer(request: Request<Incoming>, pool: &Pool) -> Result<Response<String>, Infallible> {
    let (status, body) = match (request.method(), request.uri().path()) {
        (&Method::GET, "/metrics") => (StatusCode::OK, text(pool).await),
        (&Method::GET, _) => (StatusCode::NOT_FOUND, "not found: only /metrics exists\n".into()),
        _ => (StatusCode::METHOD_NOT_ALLOWED, "method not allowed: only GET is\n".into()),
    };
    let mut response = Response::new(body);
    *response.status_mut() = status;
    let kind = hyper::header::HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    response.headers_mut().insert(CONTENT_TYPE, kind);
    Ok(response)
}

/// Binds the listener.
pub async fn bind(address: SocketAddr) -> std::io::Result<TcpListener> {
    TcpListener::bind(address).await
}

/// Serves requests until the task is cancelled.
pub async fn serve(listener: TcpListener, pool: Arc<Pool>) {
    let slots = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let Ok(slot) = slots.clone().acquire_owned().await else { return };
        let socket = match listener.accept().await {
            Ok((socket, _)) => socket,
            Err(e) => {
                warn!("metrics: accept failed: {e}; retrying in 100 ms");
                sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let pool = pool.clone();
        tokio::spawn(async move {
            let _slot = slot;
            let serves = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEADER_TIMEOUT)
                .max_buf_size(16 << 10)
                .serve_connection(
                    TokioIo::new(socket),
                    service_fn(|request| {
                        let pool = pool.clone();
                        async move { answer(request, &pool).await }
                    }),
                );
            if let Ok(Err(e)) = timeout(REQUEST_TIMEOUT, serves).await {
                debug!("metrics: connection closed: {e}");
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_format() {
        let mut out = Text::default();
        let labels = vec![("client", "a\"b\\c\nd".to_string())];
        out.add("s1", PROGRAMS, [(labels, 2.0), (vec![("client", "x".into())], 0.5)]);
        out.add("s1", WORKERS, []);
        assert_eq!(
            out.0,
            "# HELP gpusession_programs Running programs by client.\n# TYPE gpusession_programs gauge\n\
             gpusession_programs{server=\"s1\",client=\"a\\\"b\\\\c\\nd\"} 2\n\
             gpusession_programs{server=\"s1\",client=\"x\"} 0.5\n"
        );
    }
}
