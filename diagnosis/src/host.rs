//! Checks of limits and resources, which clients and GPU hosts have in common.

use gpusession_common::units::human_bytes;

use crate::check::{Check, Finding};
use crate::machine::Machine;

/// The table of these checks.
pub const CHECKS: &[Check<Machine>] = &[
    Check { id: "host.kernel", run: kernel },
    Check { id: "host.open-files", run: open_files },
    Check { id: "host.address-space", run: address_space },
    Check { id: "host.overcommit", run: overcommit },
    Check { id: "host.memory", run: memory },
    Check { id: "host.processors", run: processors },
    Check { id: "host.stolen-time", run: stolen_time },
    Check { id: "host.retransmissions", run: retransmissions },
    Check { id: "host.clock", run: clock },
    Check { id: "host.disk", run: disk },
    Check { id: "host.journal", run: journal },
];

/// Addresses of one window: 8 TiB for device memory and 1 TiB for pinned host memory.
const WINDOW: u64 = 9 << 40;
/// First kernel with `pidfd_getfd` and everything else that daemon and server use.
const KERNEL: (u32, u32) = (5, 6);
/// A clock before this time (2025-01-01) was never set.
const PAST: u64 = 1_735_689_600;
/// Free space below which a folder counts as short, and as full, in bytes.
const SHORT: u64 = 512 << 20;
const FULL: u64 = 16 << 20;
/// Part of the processors' time taken by other virtual machines from which calls wait visibly.
const STOLEN: u64 = 5;
/// Fewest packets for a meaningful rate.
const FEW_PACKETS: u64 = 100_000;

/// Returns the soft limit of a row of `/proc/self/limits`; `u64::MAX` for unlimited.
fn limit(machine: &Machine, name: &str) -> Result<u64, Finding> {
    let text = machine.read("/proc/self/limits").map_err(|e| Finding::skipped(e.to_string()))?;
    let row = text.lines().find_map(|line| line.strip_prefix(name));
    let word = row.and_then(|row| row.split_whitespace().next());
    match word {
        Some("unlimited") => Ok(u64::MAX),
        word => word
            .and_then(|word| word.parse().ok())
            .ok_or_else(|| Finding::skipped(format!("/proc/self/limits has no row `{name}`"))),
    }
}

/// Turns the early return of a finding into the finding.
fn found(finding: Result<Finding, Finding>) -> Finding {
    finding.unwrap_or_else(|early| early)
}

fn kernel(machine: &Machine) -> Finding {
    let release = match machine.read("/proc/sys/kernel/osrelease") {
        Ok(release) => release.trim().to_owned(),
        Err(unread) => return Finding::skipped(unread.to_string()),
    };
    let mut numbers = release.split(['.', '-']).map_while(|part| part.parse::<u32>().ok());
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    if version < KERNEL {
        let (major, minor) = KERNEL;
        return Finding::fault(
            format!("Linux {release} lacks pidfd_getfd, by which gpusession follows programs"),
            format!("install a kernel of version {major}.{minor} or later"),
        );
    }
    Finding::ok(format!("Linux {release}"))
}

fn open_files(machine: &Machine) -> Finding {
    found(limit(machine, "Max open files").map(|limit| match limit {
        0..256 => Finding::fault(
            format!("{limit} open files at most; a program needs about 20 besides its own"),
            "ulimit -n 1024; for all logins a line `* soft nofile 1024` in /etc/security/limits.d",
        ),
        256..1024 => Finding::warning(
            format!("{limit} open files at most, fewer than usual"),
            "ulimit -n 1024; for all logins a line `* soft nofile 1024` in /etc/security/limits.d",
        ),
        u64::MAX => Finding::ok("open files without limit"),
        limit => Finding::ok(format!("{limit} open files at most")),
    }))
}

fn address_space(machine: &Machine) -> Finding {
    found(limit(machine, "Max address space").map(|limit| match limit {
        u64::MAX => Finding::ok("address space without limit"),
        limit if limit < WINDOW => Finding::fault(
            format!(
                "address space of at most {}; a program reserves {} of addresses for each lease",
                human_bytes(limit),
                human_bytes(WINDOW)
            ),
            "ulimit -v unlimited; for all logins remove `as` from /etc/security/limits.conf and limits.d",
        ),
        limit => Finding::ok(format!("address space of at most {}", human_bytes(limit))),
    }))
}

fn overcommit(machine: &Machine) -> Finding {
    match machine.read("/proc/sys/vm/overcommit_memory").as_deref().map(str::trim) {
        Ok("2") => Finding::warning(
            "vm.overcommit_memory is 2: the kernel may refuse memory that programs reserve and never use",
            "sysctl vm.overcommit_memory=0",
        ),
        Ok(mode) => Finding::ok(format!("vm.overcommit_memory is {mode}")),
        Err(unread) => Finding::skipped(unread.to_string()),
    }
}

/// Returns a row of `/proc/meminfo` in bytes.
fn meminfo(text: &str, name: &str) -> Option<u64> {
    let row = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    Some(row.split_whitespace().next()?.parse::<u64>().ok()? << 10)
}

/// Returns total and available memory of the machine.
pub fn memory_bytes(machine: &Machine) -> Option<(u64, u64)> {
    let text = machine.read("/proc/meminfo").ok()?;
    Some((meminfo(&text, "MemTotal")?, meminfo(&text, "MemAvailable")?))
}

fn memory(machine: &Machine) -> Finding {
    let Some((total, available)) = memory_bytes(machine) else {
        return Finding::skipped("/proc/meminfo has no rows MemTotal and MemAvailable");
    };
    let said = format!("{} of {} memory available", human_bytes(available), human_bytes(total));
    match available {
        0..SHORT => Finding::warning(said, "end programs that use memory: `ps aux --sort=-rss | head`"),
        _ => Finding::ok(said),
    }
}

/// Returns the processors that a cgroup's quota leaves; `None` without a quota.
fn quota(machine: &Machine) -> Option<f64> {
    let own = machine.read("/proc/self/cgroup").ok()?;
    let group = own.lines().find_map(|line| line.strip_prefix("0::"))?.to_owned();
    std::path::Path::new(&group)
        .ancestors()
        .filter_map(|folder| {
            let at = folder.strip_prefix("/").unwrap_or(folder);
            let text = machine.read(std::path::Path::new("/sys/fs/cgroup").join(at).join("cpu.max")).ok()?;
            let (quota, period) = text.trim().split_once(' ')?;
            Some(quota.parse::<f64>().ok()? / period.parse::<f64>().ok()?)
        })
        .reduce(f64::min)
}

fn processors(machine: &Machine) -> Finding {
    let status = match machine.read("/proc/self/status") {
        Ok(status) => status,
        Err(unread) => return Finding::skipped(unread.to_string()),
    };
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap_or("").trim();
    let count: u32 = list
        .split(',')
        .filter_map(|range| {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            Some(last.parse::<u32>().ok()?.checked_sub(first.parse().ok()?)? + 1)
        })
        .sum();
    match quota(machine) {
        Some(quota) if quota < 1.0 => Finding::warning(
            format!("a quota of {quota:.2} of one processor: each CUDA call waits when it is used up"),
            "raise CPUQuota= of the unit or the container's limit of processors to 1 or more",
        ),
        Some(quota) => Finding::ok(format!("{count} processors, a quota of {quota:.1}")),
        None if count == 1 => Finding::warning(
            "1 processor: a program and its connection to the server share it",
            "give this machine or the job a second processor",
        ),
        None => Finding::ok(format!("{count} processors, no quota")),
    }
}

fn stolen_time(machine: &Machine) -> Finding {
    let text = match machine.read("/proc/stat") {
        Ok(text) => text,
        Err(unread) => return Finding::skipped(unread.to_string()),
    };
    let row = text.lines().find_map(|line| line.strip_prefix("cpu ")).unwrap_or("");
    // The guests' times after the eighth are part of the first two.
    let times: Vec<u64> = row.split_whitespace().take(8).filter_map(|word| word.parse().ok()).collect();
    let (Some(stolen), total @ 1..) = (times.get(7), times.iter().sum::<u64>()) else {
        return Finding::skipped("/proc/stat has no row `cpu` with eight numbers");
    };
    let percent = stolen * 100 / total;
    match percent {
        STOLEN.. => Finding::warning(
            format!("other virtual machines took {percent}% of the processors' time since this one started"),
            "give this virtual machine processors of its own, or move it to another host",
        ),
        _ => Finding::ok(format!("{percent}% of the processors' time taken by other virtual machines")),
    }
}

/// Judges packets that TCP sent again, on all connections since the machine started.
fn retransmissions(machine: &Machine) -> Finding {
    let path = "/proc/net/snmp";
    let text = match machine.read(path) {
        Ok(text) => text,
        Err(unread) => return Finding::skipped(unread.to_string()),
    };
    let mut rows = text.lines().filter_map(|line| line.strip_prefix("Tcp: "));
    let names = rows.next().unwrap_or("").split(' ');
    let values: std::collections::BTreeMap<_, _> = names.zip(rows.next().unwrap_or("").split(' ')).collect();
    let number = |name: &str| values.get(name).and_then(|value| value.parse::<u64>().ok());
    let (Some(sent), Some(again)) = (number("OutSegs"), number("RetransSegs")) else {
        return Finding::skipped(format!("{path} has no OutSegs and RetransSegs"));
    };
    let said = format!("TCP sent {again} of {sent} packets again since this machine started");
    match again * 100 > sent && sent > FEW_PACKETS {
        true => Finding::warning(
            said,
            "gpusession netperf; ip -s link; look for a bad cable, a full switch or a wrong duplex setting",
        ),
        false => Finding::ok(said),
    }
}

fn clock(machine: &Machine) -> Finding {
    let remedy =
        "timedatectl set-ntp true; without a network service: timedatectl set-time 'YYYY-MM-DD HH:MM'";
    if machine.now < PAST {
        return Finding::fault("the clock stands before 2025: every certificate is not valid yet", remedy);
    }
    match machine.run("timedatectl", &["show", "--property", "NTPSynchronized", "--value"]).as_deref() {
        Some("yes\n") => Finding::ok("the clock is synchronized"),
        Some("no\n") => {
            Finding::warning("no service synchronizes the clock; certificates depend on it", remedy)
        }
        _ => Finding::skipped("timedatectl does not answer whether the clock is synchronized"),
    }
}

/// Judges free space of a file system.
pub fn space(folder: &str, free: u64, total: u64) -> Finding {
    let said = format!("{folder}: {} of {} free", human_bytes(free), human_bytes(total));
    let remedy = format!("free space there: `du -xh {folder} | sort -h | tail`");
    match free {
        0..FULL => Finding::fault(said, remedy),
        FULL..SHORT => Finding::warning(said, remedy),
        _ => Finding::ok(said),
    }
}

fn disk(machine: &Machine) -> Finding {
    let folders = ["/var/lib/gpusession", "/var/lib/gpuserver", "/run", "/tmp"];
    let mut seen = Vec::new();
    let findings = folders.iter().filter(|folder| machine.exists(folder)).filter_map(|folder| {
        let (free, total) = machine.space(folder)?;
        // Folders of one file system count once.
        let new = !seen.contains(&(free, total));
        seen.push((free, total));
        new.then(|| space(folder, free, total))
    });
    Finding::worst(findings.collect::<Vec<_>>())
        .unwrap_or_else(|| Finding::skipped("none of /var/lib/gpusession, /run and /tmp can be read"))
}

fn journal(machine: &Machine) -> Finding {
    if !machine.exists("/run/systemd/system") {
        return Finding::skipped("systemd does not run on this machine");
    }
    match machine.list("/var/log/journal").is_empty() {
        false => Finding::ok("the journal survives a restart of the machine"),
        true => Finding::warning(
            "the journal is lost when the machine restarts, and with it the reasons of a crash",
            "mkdir -p /var/log/journal && systemctl restart systemd-journald",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::State;
    use crate::testing::{plant, program};

    fn machine() -> (tempfile::TempDir, Machine) {
        let root = tempfile::tempdir().unwrap();
        let machine = Machine::below(root.path());
        (root, machine)
    }

    fn limits(root: &tempfile::TempDir, files: &str, space: &str) {
        let row = |name: &str, soft: &str| format!("{name:26}{soft:21}unlimited            files\n");
        let text = row("Max open files", files) + &row("Max address space", space);
        plant(root, "proc/self/limits", &text);
    }

    #[test]
    fn small_limits_are_named() {
        let (root, machine) = machine();
        assert_eq!(open_files(&machine).state, State::Skipped);
        limits(&root, "1024", "unlimited");
        assert_eq!(open_files(&machine).state, State::Ok);
        assert_eq!(address_space(&machine).state, State::Ok);
        limits(&root, "64", "8589934592");
        assert_eq!(open_files(&machine).state, State::Fault);
        let finding = address_space(&machine);
        assert_eq!(finding.state, State::Fault);
        assert!(finding.remedy.starts_with("ulimit -v unlimited"), "{finding:?}");
    }

    #[test]
    fn an_old_kernel_and_strict_overcommit_are_named() {
        let (root, machine) = machine();
        plant(&root, "proc/sys/kernel/osrelease", "6.1.0-18-amd64\n");
        assert_eq!(kernel(&machine).state, State::Ok);
        plant(&root, "proc/sys/kernel/osrelease", "4.18.0-553.el8\n");
        assert_eq!(kernel(&machine).state, State::Fault);
        plant(&root, "proc/sys/vm/overcommit_memory", "2\n");
        assert_eq!(overcommit(&machine).state, State::Warning);
    }

    #[test]
    fn scarce_memory_and_processors_are_named() {
        let (root, machine) = machine();
        plant(&root, "proc/meminfo", "MemTotal:  8000000 kB\nMemAvailable:  100000 kB\n");
        assert_eq!(memory(&machine).state, State::Warning);
        plant(&root, "proc/self/status", "Name:\tx\nCpus_allowed_list:\t0-1,4\n");
        assert_eq!(processors(&machine), Finding::ok("3 processors, no quota"));
        plant(&root, "proc/self/cgroup", "0::/a.slice/b.scope\n");
        plant(&root, "sys/fs/cgroup/a.slice/cpu.max", "50000 100000\n");
        plant(&root, "sys/fs/cgroup/a.slice/b.scope/cpu.max", "max 100000\n");
        assert_eq!(processors(&machine).state, State::Warning);
    }

    #[test]
    fn stolen_time_and_packets_sent_again_are_named() {
        let (root, machine) = machine();
        assert_eq!(
            (stolen_time(&machine).state, retransmissions(&machine).state),
            (State::Skipped, State::Skipped)
        );
        plant(&root, "proc/stat", "cpu  100 0 100 700 0 0 0 100 50 0\ncpu0 1 2\n");
        assert!(stolen_time(&machine).found.contains("took 10% of"), "{:?}", stolen_time(&machine));
        plant(&root, "proc/stat", "cpu  100 0 100 795 0 0 0 5 0 0\n");
        assert_eq!(stolen_time(&machine).state, State::Ok);
        let counts = |sent: u64, again: u64| {
            let text = format!("Tcp: RtoMin OutSegs RetransSegs InErrs\nTcp: 200 {sent} {again} 0\n");
            plant(&root, "proc/net/snmp", &format!("Ip: A\nIp: 1\n{text}"));
            retransmissions(&machine).state
        };
        assert_eq!(counts(1_000_000, 20_000), State::Warning);
        assert_eq!(counts(1_000_000, 2_000), State::Ok);
        assert_eq!(counts(1_000, 200), State::Ok, "too few");
    }

    #[test]
    fn a_clock_that_is_not_set_is_a_fault() {
        let (root, mut machine) = machine();
        assert_eq!(clock(&machine).state, State::Skipped);
        program(&root, "timedatectl", "echo no");
        assert_eq!(clock(&machine).state, State::Warning);
        program(&root, "timedatectl", "echo yes");
        assert_eq!(clock(&machine).state, State::Ok);
        machine.now = 3600;
        assert_eq!(clock(&machine).state, State::Fault);
    }

    #[test]
    fn a_full_disk_is_a_fault() {
        assert_eq!(space("/run", 1 << 20, 1 << 30).state, State::Fault);
        assert_eq!(space("/run", 100 << 20, 1 << 30).state, State::Warning);
        assert_eq!(space("/run", 1 << 30, 2 << 30).state, State::Ok);
        let (root, machine) = machine();
        assert_eq!(disk(&machine).state, State::Skipped);
        plant(&root, "tmp/x", "");
        assert!(disk(&machine).found.starts_with("/tmp: "));
    }

    #[test]
    fn a_volatile_journal_is_named() {
        let (root, machine) = machine();
        assert_eq!(journal(&machine).state, State::Skipped);
        plant(&root, "run/systemd/system/x", "");
        assert_eq!(journal(&machine).state, State::Warning);
        plant(&root, "var/log/journal/id/system.journal", "");
        assert_eq!(journal(&machine).state, State::Ok);
    }
}
