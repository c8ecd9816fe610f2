//! Checks of the way to the servers, of this client's identity, and of both sides' versions.

use std::time::Duration;

use gpusession_bus::describe::Surveyed;
use gpusession_common::units::human_duration;
use gpusession_diagnosis::check::{Check, Finding};
use gpusession_diagnosis::remedy;
use gpusession_proto::preface;

use super::facts::{Daemon, Facts};
use super::probe::{Probe, Reach};

/// The table of these checks.
pub const CHECKS: &[Check<Facts>] = &[
    Check { id: "network.servers", run: servers },
    Check { id: "network.identity", run: identity },
    Check { id: "network.certificate", run: certificate },
    Check { id: "network.names", run: names },
    Check { id: "network.control-port", run: control_port },
    Check { id: "network.data-port", run: data_port },
    Check { id: "network.accepted", run: accepted },
    Check { id: "network.versions", run: versions },
    Check { id: "network.clock", run: clock },
    Check { id: "network.round-trip", run: round_trip },
    Check { id: "network.packets", run: packets },
    Check { id: "network.encryption", run: encryption },
    Check { id: "network.buffers", run: buffers },
];

/// Remaining life of a certificate below which a check warns.
///
/// The daemon renews earlier.
const EXPIRES_SOON: u64 = 14 * 24 * 3600;
/// Difference of clocks that is a warning, and one that breaks certificates of new pools.
const SKEW_WARNING: u64 = 5;
const SKEW_FAULT: u64 = 300;
/// Round trip above which programs of many small calls slow down visibly.
const FAR_USEC: u128 = 2_000;
/// Bandwidth for which receive buffers should suffice: 25 Gbit/s, in bytes per second.
const BANDWIDTH: f64 = 25e9 / 8.0;

fn servers(facts: &Facts) -> Finding {
    match (&facts.addresses, &facts.daemon) {
        (Err(error), _) => {
            Finding::fault(error.clone(), "correct the file, then sudo systemctl reload gpusession")
        }
        (Ok(addresses), _) if !addresses.is_empty() => {
            Finding::ok(format!("{} server(s): {}", addresses.len(), addresses.join("; ")))
        }
        (Ok(_), Daemon::Silent(_)) if !facts.client() => {
            Finding::skipped("no server is configured, and this machine is no client")
        }
        _ => {
            Finding::fault("no server is configured: this machine is in no pool", "sudo gpusession join HOST")
        }
    }
}

fn identity(facts: &Facts) -> Finding {
    let shown = facts.identity.display();
    match facts.machine.read(facts.identity.join("client.pem")) {
        Ok(_) if !facts.machine.exists(facts.identity.join("client.key")) => Finding::fault(
            format!("{shown} has a certificate and no key"),
            "sudo gpusession leave, then sudo gpusession join HOST",
        ),
        Ok(_) => Finding::ok(format!("an identity in {shown}")),
        Err(unread) if !unread.missing() => Finding::skipped(unread.to_string()),
        Err(_) if !facts.client() => Finding::skipped("no identity, and this machine is no client"),
        Err(_) => Finding::fault(format!("no identity in {shown}"), "sudo gpusession join HOST"),
    }
}

fn certificate(facts: &Facts) -> Finding {
    let text = match facts.machine.read(facts.identity.join("client.pem")) {
        Ok(text) => text,
        Err(unread) => return Finding::skipped(unread.to_string()),
    };
    let rejoin = "sudo gpusession leave, then sudo gpusession join HOST";
    let parsed = x509_parser::pem::parse_x509_pem(text.as_bytes()).ok().and_then(|(_, pem)| {
        let validity = pem.parse_x509().ok()?.validity().clone();
        Some((validity.not_before.timestamp(), validity.not_after.timestamp()))
    });
    let Some((begins, ends)) = parsed else {
        return Finding::fault("client.pem is no certificate", rejoin);
    };
    let now = facts.machine.now as i64;
    let span = |seconds: i64| human_duration(Duration::from_secs(seconds.unsigned_abs()));
    if now < begins {
        return Finding::fault(
            format!(
                "the certificate begins in {}: this machine's clock is behind the pool's",
                span(begins - now)
            ),
            "timedatectl; sudo timedatectl set-ntp true",
        );
    }
    match ends - now {
        left if left < 0 => Finding::fault(
            format!("the certificate ended {} ago", span(left)),
            format!("systemctl restart gpusession, which renews it for 30 days; later {rejoin}"),
        ),
        left if (left as u64) < EXPIRES_SOON => Finding::warning(
            format!("the certificate ends in {}, and is not renewed", span(left)),
            "journalctl -u gpusession, which has the reason; a server has to be reachable and up to date",
        ),
        left => Finding::ok(format!("the certificate is valid for another {}", span(left))),
    }
}

/// Judges each server that was probed, and joins the findings.
fn each(facts: &Facts, judge: impl Fn(&Probe) -> Finding) -> Finding {
    let none = || match facts.local {
        true => Finding::skipped("--local asks no server"),
        false => Finding::skipped("no server is known"),
    };
    Finding::worst(facts.probes.iter().map(judge)).unwrap_or_else(none)
}

/// Judges each server that answered a description.
fn each_described(facts: &Facts, judge: impl Fn(&Surveyed) -> Finding) -> Finding {
    let Some(survey) = &facts.survey else {
        return match facts.local {
            true => Finding::skipped("--local asks no server"),
            false => Finding::skipped("neither the daemon nor a readable identity can ask the servers"),
        };
    };
    let answered = survey.servers.iter().filter(|server| server.trouble.is_none());
    Finding::worst(answered.map(judge)).unwrap_or_else(|| Finding::skipped("no server answers"))
}

fn names(facts: &Facts) -> Finding {
    each(facts, |probe| match &probe.resolved {
        Ok(addresses) => {
            let shown: Vec<_> = addresses.iter().map(|a| a.ip().to_string()).collect();
            Finding::ok(format!("{} is {}", probe.address, shown.join(", ")))
        }
        Err(why) => Finding::fault(
            format!(
                "{} has no address: {why}; correct its entry, or the name service (getent hosts {})",
                probe.address,
                host(&probe.address)
            ),
            remedy::edit(list_of_servers(facts), "sudo systemctl reload gpusession"),
        ),
    })
}

/// Returns the file that names the daemon's servers.
fn list_of_servers(facts: &Facts) -> &'static str {
    let files = ["/etc/gpusession/servers.toml", "/var/lib/gpusession/servers.toml"];
    files.into_iter().find(|file| facts.machine.exists(file)).unwrap_or(files[0])
}

/// Returns the host of HOST:PORT.
fn host(address: &str) -> &str {
    address.rsplit_once(':').map_or(address, |(host, _)| host.trim_matches(['[', ']']))
}

fn port(address: &str) -> &str {
    address.rsplit_once(':').map_or("", |(_, port)| port)
}

fn reach(address: &str, reach: &Reach, unit: &str) -> Finding {
    match reach {
        Reach::Open(rtt) => Finding::ok(format!("{address} opens in {:.1} ms", rtt.as_secs_f64() * 1000.0)),
        Reach::Refused => Finding::fault(
            format!("{address} refuses: no program listens there"),
            format!("on {}: sudo systemctl start gpuserver; gpuserver {unit}", host(address)),
        ),
        Reach::TimedOut => Finding::fault(
            format!("{address} does not answer: a firewall drops packets, or the host is down"),
            format!(
                "open port {} (TCP) on {} and on the way; ping {}",
                port(address),
                host(address),
                host(address)
            ),
        ),
        Reach::Failed(why) => Finding::fault(
            format!("{address}: {why}"),
            format!("ip route get {}; ping {}", host(address), host(address)),
        ),
    }
}

fn control_port(facts: &Facts) -> Finding {
    each(facts, |probe| match &probe.control {
        Some(control) => reach(&probe.address, control, "status"),
        None => Finding::skipped(format!("{} has no address", probe.address)),
    })
}

fn data_port(facts: &Facts) -> Finding {
    each(facts, |probe| {
        let found = probe.data.iter().map(|(address, open)| reach(address, open, "config get data_ports"));
        Finding::worst(found)
            .unwrap_or_else(|| Finding::skipped(format!("{} has not named its data port", probe.address)))
    })
}

fn accepted(facts: &Facts) -> Finding {
    let Some(survey) = &facts.survey else {
        return each_described(facts, |_| Finding::ok(""));
    };
    let judge = |server: &Surveyed| match (server.state.as_str(), &server.trouble) {
        ("unauthorized", why) => Finding::fault(
            format!(
                "{} does not accept this machine: {}",
                server.address,
                why.as_deref().unwrap_or("no reason")
            ),
            "sudo systemctl stop gpusession; sudo gpusession leave; sudo gpusession join HOST",
        ),
        (_, Some(why)) => Finding::fault(
            format!("{} does not answer: {why}", server.address),
            "systemctl status gpuserver on the server",
        ),
        ("draining", None) => Finding::warning(
            format!("{} is drained: it gives no new leases", server.name),
            "gpuserver drain --end on the server",
        ),
        (state, None) => Finding::ok(format!("{} is {state}", server.name)),
    };
    Finding::worst(survey.servers.iter().map(judge)).unwrap_or_else(|| Finding::skipped("no server is known"))
}

fn versions(facts: &Facts) -> Finding {
    let (own, protocol) = (env!("CARGO_PKG_VERSION"), preface::VERSION);
    each_described(facts, |server| {
        let version = server.software.rsplit(' ').next().unwrap_or("");
        let (oldest, newest) = (server.oldest_protocol.unwrap_or(server.protocol), server.protocol);
        if !preface::served(Some(oldest), newest) {
            let (found, remedy) = preface::mismatch(&server.name, oldest, newest, protocol.into());
            return Finding::fault(format!("{found}; programs do not start"), remedy);
        }
        match version == own {
            true => {
                Finding::ok(format!("server {}: {version}, protocol {protocol}, as this client", server.name))
            }
            false => Finding::warning(
                format!("server {}: version {version}; this client: {own}; both work together", server.name),
                "upgrade the older side at the next occasion",
            ),
        }
    })
}

fn clock(facts: &Facts) -> Finding {
    each_described(facts, |server| {
        let Some(skew) = server.clock_skew_usec else {
            return Finding::skipped(format!("{} does not report its clock", server.name));
        };
        let seconds = skew.unsigned_abs() / 1_000_000;
        let word = if skew < 0 { "behind" } else { "ahead of" };
        let said = format!(
            "the clock of {} is {} {word} this one",
            server.name,
            human_duration(Duration::from_secs(seconds))
        );
        let remedy = "timedatectl on both; sudo timedatectl set-ntp true";
        match seconds {
            SKEW_FAULT.. => Finding::fault(said, remedy),
            SKEW_WARNING.. => Finding::warning(said, remedy),
            _ => Finding::ok(format!("the clock of {} agrees within {SKEW_WARNING} s", server.name)),
        }
    })
}

fn round_trip(facts: &Facts) -> Finding {
    each(facts, |probe| match probe.best_rtt {
        None => Finding::skipped(format!("{} is not reachable", probe.address)),
        Some(rtt) if rtt.as_micros() > FAR_USEC => Finding::warning(
            format!(
                "{}: {:.1} ms round trip; each waiting call takes that long",
                probe.address,
                rtt.as_secs_f64() * 1e3
            ),
            "use a server in the same network if there is one: gpusession smi",
        ),
        Some(rtt) => Finding::ok(format!("{}: {} us round trip", probe.address, rtt.as_micros())),
    })
}

fn packets(facts: &Facts) -> Finding {
    each(facts, |probe| match (probe.full_packets, probe.segment) {
        (None, _) => {
            Finding::skipped(format!("{} is not reachable, or did not let itself be measured", probe.address))
        }
        (Some(true), segment) => Finding::ok(format!(
            "{}: full packets arrive{}",
            probe.address,
            segment.map_or_else(String::new, |bytes| format!(", {bytes} bytes of data each"))
        )),
        (Some(false), _) => Finding::fault(
            format!(
                "{}: small packets arrive and full ones do not (an MTU black hole): set one MTU on the whole \
                 way, or allow ICMP `fragmentation needed`; until then, lower the MTU here",
                probe.address
            ),
            lower_mtu(probe),
        ),
    })
}

/// Lowers the MTU of the interface that leads to a server to the least that IPv6 allows.
fn lower_mtu(probe: &Probe) -> String {
    match probe.resolved.as_ref().ok().and_then(|addresses| addresses.first()) {
        Some(address) => format!(
            "sudo ip link set mtu 1280 $(ip -o route get {} | grep -o 'dev [^ ]*')",
            address.ip().to_canonical()
        ),
        None => "sudo ip link set mtu 1280 dev INTERFACE".into(),
    }
}

fn encryption(facts: &Facts) -> Finding {
    let Daemon::Answers(described, _) = &facts.daemon else {
        return Finding::skipped("the daemon does not answer about leases");
    };
    let held = described.leases.iter().filter(|lease| !lease.transport.is_empty());
    let judge = |lease: &gpusession_bus::describe::Lease| match lease.encrypted {
        true => Finding::ok(format!("{}: encrypted", lease.name_or_id())),
        false => Finding::warning(
            format!("{}: NOT encrypted, since {}", lease.name_or_id(), lease.transport_reason),
            "none if this network is trusted; else remove it from trusted_networks of the server",
        ),
    };
    Finding::worst(held.map(judge)).unwrap_or_else(|| Finding::skipped("no lease holds GPUs now"))
}

fn buffers(facts: &Facts) -> Finding {
    let path = "/proc/sys/net/ipv4/tcp_rmem";
    let text = match facts.machine.read(path) {
        Ok(text) => text,
        Err(unread) => return Finding::skipped(unread.to_string()),
    };
    let Some(max) = text.split_whitespace().nth(2).and_then(|word| word.parse::<f64>().ok()) else {
        return Finding::skipped(format!("{path} has no third number"));
    };
    let farthest = facts.probes.iter().filter_map(|probe| probe.best_rtt).max().unwrap_or_default();
    let wanted = farthest.as_secs_f64() * BANDWIDTH;
    let mib = |bytes: f64| (bytes / f64::from(1 << 20)).ceil();
    match max < wanted {
        true => Finding::warning(
            format!(
                "a connection buffers {} MiB at most; 25 Gbit/s over this way needs {}",
                mib(max),
                mib(wanted)
            ),
            format!("sudo sysctl net.ipv4.tcp_rmem='4096 131072 {:.0}'", wanted.max(6_291_456.0)),
        ),
        false => Finding::ok(format!("a connection buffers up to {} MiB", mib(max))),
    }
}

#[cfg(test)]
mod tests {
    use gpusession_bus::describe::{Lease, Survey};
    use gpusession_diagnosis::check::State;

    use super::super::testing::{described, facts, plant};
    use super::*;

    fn probe(control: Reach) -> Probe {
        Probe {
            address: "gpu1:7601".into(),
            resolved: Ok(vec!["192.0.2.1:7601".parse().unwrap()]),
            best_rtt: Some(Duration::from_micros(150)),
            segment: Some(1448),
            full_packets: Some(true),
            data: vec![("gpu1:7602".into(), Reach::Open(Duration::from_micros(150)))],
            control: Some(control),
        }
    }

    fn surveyed() -> Surveyed {
        Surveyed {
            name: "gpu1".into(),
            address: "gpu1:7601".into(),
            state: "online".into(),
            software: format!("gpuserver {}", env!("CARGO_PKG_VERSION")),
            protocol: preface::VERSION.into(),
            clock_skew_usec: Some(-20_000),
            ..Default::default()
        }
    }

    /// A certificate that is valid from day `begins` to day `ends` of the test's clock.
    fn identity_valid(root: &tempfile::TempDir, facts: &Facts, begins: i64, ends: i64) {
        let day = |days: i64| {
            let at = std::time::UNIX_EPOCH
                + Duration::from_secs(facts.machine.now.wrapping_add_signed(days * 86400));
            at.into()
        };
        let mut params = rcgen::CertificateParams::new(vec!["vm-1".into()]).unwrap();
        (params.not_before, params.not_after) = (day(begins), day(ends));
        let key = rcgen::KeyPair::generate().unwrap();
        plant(root, "var/lib/gpusession/identity/client.pem", &params.self_signed(&key).unwrap().pem());
    }

    #[test]
    fn a_machine_without_identity_or_servers_is_told_to_join() {
        let (root, mut facts) = facts();
        assert_eq!(servers(&facts).state, State::Skipped, "no client");
        facts.daemon = Daemon::Answers(Box::new(described()), vec![]);
        assert_eq!(servers(&facts).remedy, "sudo gpusession join HOST");
        assert_eq!(identity(&facts).remedy, "sudo gpusession join HOST");
        facts.addresses = Err("/etc/gpusession/servers.toml:1:1: unknown key `servr`".into());
        assert_eq!(servers(&facts).state, State::Fault);
        plant(&root, "var/lib/gpusession/identity/client.pem", "");
        assert!(identity(&facts).found.contains("no key"));
    }

    #[test]
    fn a_certificate_that_is_over_or_not_yet_valid_is_a_fault() {
        let (root, facts) = facts();
        assert_eq!(certificate(&facts).state, State::Skipped);
        let state = |begins, ends| {
            identity_valid(&root, &facts, begins, ends);
            (certificate(&facts).state, certificate(&facts).found)
        };
        assert_eq!(state(-1, 365).0, State::Ok);
        assert_eq!(state(-400, 10).0, State::Warning);
        assert_eq!(state(-400, -1).0, State::Fault);
        let (early, text) = state(1, 365);
        assert_eq!(early, State::Fault);
        assert!(text.contains("clock is behind"), "{text}");
        plant(&root, "var/lib/gpusession/identity/client.pem", "nonsense");
        assert_eq!(certificate(&facts).state, State::Fault);
    }

    #[test]
    fn a_lease_without_encryption_is_a_warning() {
        let (_root, mut facts) = facts();
        assert_eq!(encryption(&facts).state, State::Skipped);
        let mut of = |transport: &str, encrypted| {
            let mut described = described();
            let transport = transport.into();
            described.leases = vec![Lease { transport, encrypted, ..Default::default() }];
            facts.daemon = Daemon::Answers(Box::new(described), vec![]);
            encryption(&facts).state
        };
        assert_eq!(of("", false), State::Skipped, "it holds no GPU");
        assert_eq!(of("tcp", true), State::Ok);
        assert_eq!(of("tcp", false), State::Warning);
    }

    #[test]
    fn a_name_without_address_and_blocked_ports_are_faults() {
        let (_root, mut facts) = facts();
        assert_eq!(control_port(&facts).state, State::Skipped);
        facts.probes = vec![probe(Reach::Open(Duration::from_millis(1)))];
        assert_eq!(control_port(&facts).state, State::Ok);
        facts.probes = vec![probe(Reach::Refused)];
        assert!(control_port(&facts).remedy.contains("systemctl start gpuserver"));
        facts.probes = vec![probe(Reach::TimedOut)];
        assert!(control_port(&facts).remedy.starts_with("open port 7601"));
        facts.probes[0].data = vec![("gpu1:7602".into(), Reach::TimedOut)];
        assert!(data_port(&facts).remedy.starts_with("open port 7602"));
        facts.probes[0].resolved = Err("Name or service not known".into());
        assert!(names(&facts).found.ends_with("(getent hosts gpu1)"));
    }

    #[test]
    fn a_black_hole_and_a_long_way_are_named() {
        let (root, mut facts) = facts();
        facts.probes = vec![probe(Reach::Open(Duration::from_millis(1)))];
        assert_eq!((packets(&facts).state, round_trip(&facts).state), (State::Ok, State::Ok));
        facts.probes[0].full_packets = Some(false);
        facts.probes[0].best_rtt = Some(Duration::from_millis(20));
        assert_eq!((packets(&facts).state, round_trip(&facts).state), (State::Fault, State::Warning));
        plant(&root, "proc/sys/net/ipv4/tcp_rmem", "4096\t131072\t6291456\n");
        assert_eq!(buffers(&facts).state, State::Warning);
        facts.probes[0].best_rtt = Some(Duration::from_micros(100));
        assert_eq!(buffers(&facts).state, State::Ok);
    }

    #[test]
    fn clocks_versions_and_refusals_of_servers_are_named() {
        let (_root, mut facts) = facts();
        assert_eq!(clock(&facts).state, State::Skipped);
        let mut with = |change: fn(&mut Surveyed), check: fn(&Facts) -> Finding| {
            let mut server = surveyed();
            change(&mut server);
            facts.survey = Some(Survey::new(vec![server]));
            check(&facts)
        };
        for check in [clock, versions, accepted] {
            assert_eq!(with(|_| {}, check).state, State::Ok);
        }
        let skewed = with(|s| s.clock_skew_usec = Some(-3_600_000_000), clock);
        assert_eq!(skewed.state, State::Fault);
        assert!(skewed.found.contains("is 1 h 0 min behind this one"), "{skewed:?}");
        let mut fault = |change: fn(&mut Surveyed)| {
            let found = with(change, versions);
            assert_eq!(found.state, State::Fault);
            found.remedy
        };
        assert!(fault(|s| s.protocol = 99).contains("the client's"));
        assert!(fault(|s| s.protocol = 3).contains("the server's"));
        let later = with(|s| (s.oldest_protocol, s.protocol) = (Some(4), 99), versions);
        assert_eq!(later.state, State::Ok, "a later server serves this version, too");
        assert_eq!(with(|s| s.software = "gpuserver 0.0.1".into(), versions).state, State::Warning);
        let refuse = |s: &mut Surveyed| {
            (s.state, s.trouble) = ("unauthorized".into(), Some("revoked".into()));
        };
        assert!(with(refuse, accepted).remedy.contains("gpusession leave"));
        assert_eq!(with(|s| s.state = "draining".into(), accepted).state, State::Warning);
    }
}
