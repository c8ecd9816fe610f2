//! Text output of `status` and `list`.

use std::fmt::Write as _;
use std::time::{Duration, UNIX_EPOCH};

use gpusession_bus::describe::{Described, Failure, Identity, Interruption, Lease};
use gpusession_common::units::{human_bytes, human_duration};

/// Aligns columns; the last column is not padded.
pub fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns)
        .map(|c| rows.iter().filter_map(|r| r.get(c)).map(|t| t.chars().count()).max().unwrap_or(0))
        .collect();
    let mut out = String::new();
    for row in rows {
        let mut line = String::new();
        for (text, width) in row.iter().zip(&widths) {
            let _ = write!(line, "{text:width$}  ");
        }
        out.push_str(line.trim_end());
        out.push('\n');
    }
    out
}

fn who(lease: &Lease) -> String {
    match lease.uid {
        None if lease.user.is_empty() => "everyone".into(),
        None => lease.user.clone(),
        Some(uid) if lease.user.is_empty() => format!("uid {uid}"),
        Some(_) => lease.user.clone(),
    }
}

fn gpus(lease: &Lease) -> String {
    let Some(device) = lease.devices.first() else { return format!("{} GPU(s) wanted", lease.gpus) };
    let count = if lease.devices.len() > 1 { format!("{} × ", lease.devices.len()) } else { String::new() };
    let memory = if device.limit_bytes > 0 && device.limit_bytes < device.memory_bytes {
        format!("{} of {}", human_bytes(device.limit_bytes), human_bytes(device.memory_bytes))
    } else {
        human_bytes(device.memory_bytes)
    };
    format!("{count}{}, {memory}", device.name)
}

fn state_words(lease: &Lease) -> String {
    match lease.state.as_str() {
        "pending" => match (lease.position, lease.waiting) {
            (Some(position), Some(length)) => format!("waiting, position {position} of {length}"),
            _ => "waiting".into(),
        },
        "active" | "idle" if lease.processes == 0 => "ready".into(),
        "active" | "idle" => {
            format!("in use by {} process{}", lease.processes, if lease.processes == 1 { "" } else { "es" })
        }
        other => match (lease.position, lease.waiting) {
            (Some(position), Some(length)) => format!("{other}, waits, position {position} of {length}"),
            _ => other.into(),
        },
    }
}

/// Transport of a lease's data, and whether it is encrypted.
fn transport(lease: &Lease) -> String {
    match lease.transport.split_once('+') {
        Some((transport, "tls")) => format!("{transport}, encrypted"),
        _ if lease.transport.is_empty() => String::new(),
        _ => format!("{}, NOT encrypted: {}", lease.transport, lease.transport_reason),
    }
}

/// Returns in one line why a program started in this shell gets no GPU; `None` if it gets one.
pub fn no_gpu(described: &Described, mine: &[String]) -> Option<String> {
    if std::env::var_os("GPUSESSION_DISABLE").is_some_and(|v| v == "1") {
        return Some("GPUSESSION_DISABLE=1 is set in this shell".into());
    }
    let leases: Vec<_> = described.leases.iter().filter(|l| mine.contains(&l.id)).collect();
    let Some(first) = leases.first() else {
        return match (described.leases.is_empty(), described.leases_on_demand) {
            (_, true) => None,
            (true, false) if described.servers.is_empty() => {
                Some("this machine is in no pool: `gpusession join HOST` joins one".into())
            }
            (true, false) => {
                Some("no lease is configured: add a [[lease]] to /etc/gpusession/gpusession.toml".into())
            }
            (false, false) => Some(
                "the leases of this machine are not for you ([access] and for_user in gpusession.toml)"
                    .into(),
            ),
        };
    };
    if leases.iter().any(|l| l.state != "pending") {
        return None;
    }
    let why = first.trouble.as_deref().unwrap_or("no server has answered yet");
    Some(match (first.position, first.waiting) {
        (Some(position), Some(length)) => format!("waiting, position {position} of {length}: {why}"),
        _ => format!("waiting: {why}"),
    })
}

/// Returns `true` if gpusession's libraries or profile scripts read the variable.
pub fn is_ours(key: &str) -> bool {
    let known = ["ID", "LEASE", "DISABLE", "TRACE", "TRACE_FILE", "SOCKET", "WATCHED_MEMORY"];
    key.strip_prefix("GPUSESSION_").is_some_and(|rest| known.contains(&rest))
}

/// Returns the purpose of a variable, for `env --explain`.
pub fn variable(key: &str) -> &'static str {
    match key {
        "GPUSESSION_ID" => "a hint at the login session; not secret, and never stale",
        "GPUSESSION_LEASE" => "the lease, or a list ID,ID, that programs use instead of the session's",
        "GPUSESSION_DISABLE" => "1: programs of this shell have no remote GPU",
        "GPUSESSION_TRACE" => "output of gpusession's libraries on stderr: why, missing, errors, summary",
        "GPUSESSION_TRACE_FILE" => "the file to which they print it instead",
        "GPUSESSION_SOCKET" => "the socket on which programs ask for GPUs; set by `gpusession run --server`",
        "GPUSESSION_WATCHED_MEMORY" => {
            "on: pinned memory travels while the GPU works, for programs and kernels that exchange flags; off: never"
        }
        "NCCL_PROTO" => {
            "LL: NCCL's network and shared host memory work, with the two variables NCCL_ALLOC_P2P_NET_LL_BUFFERS and NCCL_P2P_LL_THRESHOLD"
        }
        "NCCL_ALLOC_P2P_NET_LL_BUFFERS" => "1: sends between machines may use the protocol LL",
        "NCCL_P2P_LL_THRESHOLD" => "bytes up to which NCCL's sends use the protocol LL",
        "NCCL_P2P_LEVEL" => "SYS: NCCL copies between GPUs of a lease by peer access, also without NVLink",
        "NCCL_WORK_FIFO_BYTES" => {
            "65536: host memory of each communicator, which every synchronization compares; NCCL's own is 1 MiB"
        }
        "NCCL_P2P_DISABLE" => {
            "1: NCCL does not try peer access, which remote GPUs of different servers do not have"
        }
        "NCCL_SHM_DISABLE" => "1: NCCL does not share host memory with the GPUs of another machine",
        "NCCL_IB_DISABLE" => {
            "1: NCCL does not look for InfiniBand on this machine, which has no GPU to reach by it"
        }
        "NCCL_SOCKET_IFNAME" => "the network that NCCL uses",
        "NCCL_DEBUG" => "how much NCCL logs",
        "CUDA_MODULE_LOADING" => "LAZY: kernels are loaded when they are first used",
        "PYTORCH_CUDA_ALLOC_CONF" | "PYTORCH_ALLOC_CONF" => "how PyTorch allocates device memory",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING" => "whether PyTorch ends a program whose NCCL communication failed",
        _ => "set by this machine's administrator",
    }
}

/// Describes a program that the lease did not serve.
fn failed(lease: &Lease, failure: &Failure) -> String {
    let Failure { usec, uid, user, pid, program, running, reason } = failure;
    let user = if user.is_empty() { format!("uid {uid}") } else { user.clone() };
    let since = (UNIX_EPOCH + Duration::from_micros(*usec)).elapsed().unwrap_or_default();
    format!(
        "{}: process {pid} ({program}) of {user} {} {} ago: {reason}",
        lease.name_or_id(),
        if *running { "lost its GPUs" } else { "could not be served" },
        human_duration(since)
    )
}

/// Describes a program that has no connection to its server now; `None` if it is back.
fn interrupted(lease: &Lease, interruption: &Interruption) -> Option<String> {
    let Interruption { pid, program, since_usec, .. } = interruption;
    let since = (UNIX_EPOCH + Duration::from_micros((*since_usec)?)).elapsed().unwrap_or_default();
    Some(format!(
        "{}: process {pid} ({program}) has no connection to {} for {}, and waits",
        lease.name_or_id(),
        lease.server,
        human_duration(since)
    ))
}

/// Describes this client's certificate, such as "identity vm-7: good until 2031-02-03 (41 days)".
fn validity(identity: &Identity, now: u64) -> String {
    let (seconds, day) = (identity.expires_usec / 1_000_000, 24 * 3600 * 1_000_000);
    let date = i64::try_from(seconds).ok().and_then(|s| x509_parser::time::ASN1Time::from_timestamp(s).ok());
    let date = date.map_or_else(String::new, |date| date.to_datetime().date().to_string());
    let why = identity.trouble.as_ref().map(|why| format!("; not renewed: {why}")).unwrap_or_default();
    let name = &identity.name;
    match identity.expires_usec.checked_sub(now) {
        Some(left) => format!("identity {name}: good until {date} ({} days){why}", left / day),
        None => format!(
            "identity {name}: EXPIRED on {date}{why}; the daemon tries to renew it for 30 days, or `renew_grace` of the servers; \
             later `gpuserver clients forget {name}` there, then `gpusession leave` and `gpusession join` here"
        ),
    }
}

/// Describes the daemon's state in a line.
fn headline(described: &Described) -> String {
    match described.state.as_str() {
        "ready" if described.gpus_wanted == 0 => "ready: no lease is configured".to_owned(),
        "ready" => format!("ready: {} GPU(s) leased", described.gpus_leased),
        "starting" => {
            format!("starting: {} of {} GPU(s) leased", described.gpus_leased, described.gpus_wanted)
        }
        "offline" => "offline: no GPU server answers".to_owned(),
        _ => format!("degraded: {} of {} GPU(s) leased", described.gpus_leased, described.gpus_wanted),
    }
}

/// Lists what keeps programs from GPUs, a line each.
fn troubles(described: &Described) -> Vec<String> {
    let mut trouble = Vec::new();
    for lease in &described.leases {
        trouble.extend(lease.failures.iter().rev().map(|failure| failed(lease, failure)));
        trouble.extend(lease.interruptions.iter().filter_map(|i| interrupted(lease, i)));
        if lease.state != "pending" && lease.position.is_none() {
            // A lease with GPUs lists only obstacles for further programs; its server's trouble is
            // listed below.
            if let (Some("limit" | "out-of-memory"), Some(why)) =
                (lease.trouble_kind.as_deref(), &lease.trouble)
            {
                trouble.push(format!("{} has no room for another program: {why}", lease.name_or_id()));
            }
            continue;
        }
        let why = lease.trouble.as_deref().unwrap_or("no server has answered yet");
        let place = match (lease.position, lease.waiting) {
            (Some(position), Some(length)) => format!("position {position} of {length}: "),
            _ => String::new(),
        };
        let mut line = format!("{} waits: {place}{why}", lease.name_or_id());
        if let Some(usec) = lease.retry_in_usec {
            let _ = write!(line, " (next try in {})", human_duration(Duration::from_micros(usec)));
        }
        trouble.push(line);
    }
    for server in &described.servers {
        match (server.state.as_str(), &server.trouble) {
            ("unauthorized", why) => trouble.push(format!(
                "{} does not accept this machine ({}): join again with `gpusession join`",
                server.name,
                why.as_deref().unwrap_or("no reason given")
            )),
            ("stopped", _) => {
                trouble.push(format!("{} is stopped: its administrator stopped it", server.name))
            }
            ("offline" | "suspect", Some(why)) => {
                trouble.push(format!("{} is {}: {why}", server.name, server.state))
            }
            _ => {}
        }
    }
    if described.servers.is_empty() {
        trouble.push("no pool: `gpusession join --server HOST TOKEN` joins one".into());
    }
    trouble
}

/// Formats `gpusession status`; `reason` is why a program started in this shell gets no GPU.
///
/// `now`: microseconds since the epoch.
pub fn status(described: &Described, reason: Option<&str>, now: u64) -> String {
    let mut out = String::new();
    let _ = writeln!(out, "gpusession {} is {}", described.version, headline(described));
    if let Some(identity) = &described.identity {
        let _ = writeln!(out, "{}", validity(identity, now));
    }
    if let Some(reason) = reason {
        let _ = writeln!(out, "no GPU for programs started in this shell: {reason}");
    }
    if !described.leases.is_empty() {
        out.push('\n');
        let mut rows = vec![];
        for lease in &described.leases {
            rows.push(vec![
                format!("  {}", lease.name_or_id()),
                state_words(lease),
                gpus(lease),
                if lease.server.is_empty() { String::new() } else { format!("on {}", lease.server) },
                format!("for {}", who(lease)),
                transport(lease),
            ]);
        }
        out.push_str(&table(&rows));
    }
    let trouble = troubles(described);
    if !trouble.is_empty() {
        out.push('\n');
        for line in trouble {
            let _ = writeln!(out, "  ! {line}");
        }
    }
    if !described.servers.is_empty() {
        out.push('\n');
        let rows: Vec<Vec<String>> = described
            .servers
            .iter()
            .map(|s| {
                let free = if s.state == "online" || s.state == "draining" {
                    format!("{} of {} GPU(s) free", s.gpus_free, s.gpus)
                } else {
                    String::new()
                };
                let rtt = if s.rtt_usec > 0 {
                    format!("{:.1} ms", s.rtt_usec as f64 / 1000.0)
                } else {
                    String::new()
                };
                vec![format!("  server {}", s.name), s.address.clone(), s.state.clone(), rtt, free]
            })
            .collect();
        out.push_str(&table(&rows));
    }
    out
}

/// Formats `gpusession list`.
pub fn list(described: &Described) -> String {
    let mut rows = vec![
        ["LEASE", "STATE", "GPU", "NAME", "MEMORY", "SERVER", "FOR", "PROCESSES", "TRANSPORT"]
            .map(String::from)
            .to_vec(),
    ];
    for lease in &described.leases {
        if lease.devices.is_empty() {
            let mut row = vec![lease.id.clone(), lease.state.clone()];
            row.extend(["-", "-", "-", "-"].map(String::from));
            row.extend([who(lease), "0".into(), "-".into()]);
            rows.push(row);
        }
        for device in &lease.devices {
            rows.push(vec![
                lease.id.clone(),
                lease.state.clone(),
                device.uuid.clone(),
                device.name.clone(),
                human_bytes(if device.limit_bytes > 0 { device.limit_bytes } else { device.memory_bytes }),
                lease.server.clone(),
                who(lease),
                lease.processes.to_string(),
                transport(lease),
            ]);
        }
    }
    if rows.len() == 1 {
        return "no leases\n".into();
    }
    table(&rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: u64 = 1_700_000_000_000_000;

    #[test]
    fn a_certificate_does_not_end_silently() {
        let of = |days: i64, trouble: Option<&str>| Described {
            identity: Some(Identity {
                name: "vm-7".into(),
                expires_usec: NOW.saturating_add_signed(days * 24 * 3600 * 1_000_000),
                trouble: trouble.map(Into::into),
            }),
            ..crate::health::testing::described()
        };
        let text = status(&of(41, None), None, NOW);
        assert!(text.contains("identity vm-7: good until 2023-12-25 (41 days)\n"), "{text}");
        let text = status(&of(3, Some("gpu1:7601 did not answer")), None, NOW);
        assert!(text.contains("(3 days); not renewed: gpu1:7601 did not answer\n"), "{text}");
        let text = status(&of(-400, None), None, NOW);
        assert!(text.contains("EXPIRED on 2022-10-10") && text.contains("clients forget vm-7"), "{text}");
    }
}
