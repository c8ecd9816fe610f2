//! Checks of a host with NVIDIA cards: driver, devices, modes, faults, and the kernel's means of
//! isolation.
//!
//! `nvidia-smi` of the driver answers for the cards. gpusession's client has a program of that name
//! in no package, so its output is the host's own.

use crate::check::{Check, Finding};
use crate::machine::Machine;
use crate::remedy;

/// The table of these checks; all are skipped on a machine without an NVIDIA driver.
pub const CHECKS: &[Check<Machine>] = &[
    Check { id: "gpu-host.driver", run: driver },
    Check { id: "gpu-host.devices", run: devices },
    Check { id: "gpu-host.cards", run: cards },
    Check { id: "gpu-host.compute-mode", run: compute_mode },
    Check { id: "gpu-host.persistence", run: persistence },
    Check { id: "gpu-host.ecc", run: ecc },
    Check { id: "gpu-host.memory-repairs", run: memory_repairs },
    Check { id: "gpu-host.errors", run: errors },
    Check { id: "gpu-host.pcie", run: pcie },
    Check { id: "gpu-host.nvlink", run: nvlink },
    Check { id: "gpu-host.fabric", run: fabric },
    Check { id: "gpu-host.other-programs", run: other_programs },
    Check { id: "gpu-host.mps", run: mps },
    Check { id: "gpu-host.locked-memory", run: locked_memory },
    Check { id: "gpu-host.isolation", run: isolation },
];

/// First branch of NVIDIA's driver that can park programs.
const PARKING: u32 = 570;
/// First branch with CUDA 12, below which programs of today do not start.
const OLDEST: u32 = 525;

/// Returns the version of the loaded kernel driver, or the finding that there is none.
fn version(machine: &Machine) -> Result<String, Finding> {
    let none = || Finding::skipped("this machine has no NVIDIA driver of its own");
    if !machine.exists("/proc/driver/nvidia") {
        return Err(none());
    }
    let text = machine.read("/proc/driver/nvidia/version").map_err(|e| Finding::skipped(e.to_string()))?;
    let version = text.split_whitespace().find(|word| {
        let digits = word.split('.').next().unwrap_or("");
        word.contains('.') && digits.len() == 3 && digits.parse::<u32>().is_ok()
    });
    version.map(str::to_owned).ok_or_else(|| Finding::skipped("/proc/driver/nvidia/version names no version"))
}

fn driver(machine: &Machine) -> Finding {
    let version = match version(machine) {
        Ok(version) => version,
        Err(early) => return early,
    };
    let branch = version.split('.').next().and_then(|b| b.parse().ok()).unwrap_or(0);
    match branch {
        0..OLDEST => Finding::fault(
            format!("driver {version} is older than CUDA 12"),
            format!("install NVIDIA's driver of branch {PARKING} or later, then restart the host"),
        ),
        OLDEST..PARKING => Finding::warning(
            format!("driver {version} cannot park idle programs"),
            format!("install NVIDIA's driver of branch {PARKING} or later, then restart the host"),
        ),
        _ => Finding::ok(format!("driver {version}")),
    }
}

fn devices(machine: &Machine) -> Finding {
    if let Err(early) = version(machine) {
        return early;
    }
    let missing: Vec<_> = ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia0"]
        .into_iter()
        .filter(|path| !machine.exists(path))
        .collect();
    match missing.is_empty() {
        true => Finding::ok("nvidiactl, nvidia-uvm and nvidia0 are in /dev"),
        false => Finding::fault(format!("{} missing", missing.join(", ")), "nvidia-modprobe -c 0 -u"),
    }
}

/// Runs `nvidia-smi` of a host that has a driver.
fn smi(machine: &Machine, arguments: &[&str]) -> Result<String, Finding> {
    version(machine)?;
    machine
        .run("nvidia-smi", arguments)
        .ok_or_else(|| Finding::skipped("nvidia-smi is not installed, or did not answer within 5 s"))
}

/// Queries `nvidia-smi` for fields of all cards: a row for each, a text for each field.
fn query(machine: &Machine, fields: &str) -> Result<Vec<Vec<String>>, Finding> {
    query_with(machine, "--query-gpu", fields)
}

fn query_with(machine: &Machine, query: &str, fields: &str) -> Result<Vec<Vec<String>>, Finding> {
    let answer = smi(machine, &[&format!("{query}={fields}"), "--format=csv,noheader,nounits"])?;
    // Drivers older than a field report it as unknown.
    if answer.contains("not a valid field") || answer.contains("not recognized") {
        return Err(Finding::skipped(format!("nvidia-smi of this driver does not know {fields}")));
    }
    let count = fields.split(',').count();
    let rows: Vec<Vec<_>> =
        answer.lines().map(|line| line.split(", ").map(|field| field.trim().to_owned()).collect()).collect();
    if rows.is_empty() || rows.iter().any(|row: &Vec<String>| row.len() != count) {
        let first = answer.lines().next().unwrap_or("no output");
        return Err(Finding::fault(
            format!("nvidia-smi does not describe the cards: {first}"),
            "nvidia-smi; dmesg | grep -i nvrm",
        ));
    }
    Ok(rows)
}

/// Judges each card, and joins the findings.
fn each(machine: &Machine, fields: &str, judge: impl Fn(&[String]) -> Finding) -> Finding {
    joined(query(machine, fields), judge)
}

fn joined(rows: Result<Vec<Vec<String>>, Finding>, judge: impl Fn(&[String]) -> Finding) -> Finding {
    match rows {
        Ok(rows) => Finding::worst(rows.iter().map(|row| judge(row)))
            .unwrap_or_else(|| Finding::skipped("nvidia-smi lists no card")),
        Err(early) => early,
    }
}

fn cards(machine: &Machine) -> Finding {
    each(machine, "index,name,memory.total", |row| {
        Finding::ok(format!("card {}: {}, {} MiB", row[0], row[1], row[2]))
    })
}

fn compute_mode(machine: &Machine) -> Finding {
    each(machine, "index,compute_mode", |row| match row[1].as_str() {
        "Default" => Finding::ok(format!("card {}: Default", row[0])),
        // `gpuserver health` reports a card that the server cannot use in this mode.
        "Exclusive_Process" => Finding::warning(
            format!("card {}: compute mode Exclusive_Process: without MPS one process at most", row[0]),
            format!("nvidia-smi -i {} -c DEFAULT, unless gpuserver shares the card by MPS", row[0]),
        ),
        mode => Finding::fault(
            format!("card {}: compute mode {mode} allows one process at most", row[0]),
            format!("nvidia-smi -i {} -c DEFAULT", row[0]),
        ),
    })
}

fn persistence(machine: &Machine) -> Finding {
    each(machine, "index,persistence_mode", |row| match row[1].as_str() {
        "Enabled" => Finding::ok(format!("card {}: persistent", row[0])),
        _ => Finding::warning(
            format!("card {}: the driver unloads the idle card, and the next program waits for it", row[0]),
            "systemctl enable --now nvidia-persistenced",
        ),
    })
}

fn ecc(machine: &Machine) -> Finding {
    each(machine, "index,ecc.errors.uncorrected.volatile.total", |row| match row[1].parse::<u64>() {
        Ok(0) => Finding::ok(format!("card {}: no uncorrected errors", row[0])),
        Ok(errors) => Finding::fault(
            format!("card {}: {errors} uncorrected memory errors since the driver was loaded", row[0]),
            format!("gpuserver off {}; nvidia-smi -i {} -r, or replace the card", row[0], row[0]),
        ),
        Err(_) => Finding::ok(format!("card {}: no ECC", row[0])),
    })
}

fn memory_repairs(machine: &Machine) -> Finding {
    let fields = "gpu_uuid,remapped_rows.pending,remapped_rows.failure";
    let is_set = |text: &str| text == "Yes" || text.parse::<u64>().is_ok_and(|count| count > 0);
    // The check `cards` reports an nvidia-smi that answers nothing.
    let rows =
        query_with(machine, "--query-remapped-rows", fields).map_err(|early| Finding::skipped(early.found));
    joined(rows, |row| match (is_set(&row[1]), is_set(&row[2])) {
        (_, true) => Finding::fault(
            format!("{}: a row of its memory is defective, and no spare row is left", row[0]),
            format!("gpuserver off {}; replace the card", row[0]),
        ),
        (true, _) => Finding::warning(
            format!("{}: a defective row of its memory stays in use until the card is reset", row[0]),
            format!("gpuserver off {}; when its leases have ended, nvidia-smi -i {} -r", row[0], row[0]),
        ),
        _ => Finding::ok(format!("{}: no row of its memory waits for a repair", row[0])),
    })
}

fn errors(machine: &Machine) -> Finding {
    if let Err(early) = version(machine) {
        return early;
    }
    let journal = |more: &[&str]| {
        let arguments = ["--dmesg", "--boot", "--quiet", "--no-pager", "--output=cat"];
        machine.run("journalctl", &[&arguments, more].concat()).filter(|text| !text.trim().is_empty())
    };
    if journal(&["--lines=1"]).is_none() {
        return Finding::skipped("this user reads no kernel messages: root does");
    }
    let found = journal(&["--grep=NVRM: Xid", "--lines=3"]);
    let lines: Vec<&str> = found.iter().flat_map(|text| text.lines()).filter(|l| l.contains("Xid")).collect();
    match lines.is_empty() {
        true => Finding::ok("no error of a card (Xid) in the kernel messages since the host started"),
        false => Finding::warning(
            format!("errors of cards since the host started, the last: {}", lines.join("; ")),
            "journalctl -k -g Xid; gpuserver gpus; NVIDIA's catalogue of Xids says which ones are a program's",
        ),
    }
}

fn pcie(machine: &Machine) -> Finding {
    each(machine, "index,pcie.link.width.current,pcie.link.width.max", |row| {
        match (row[1].parse::<u32>(), row[2].parse::<u32>()) {
            (Ok(now), Ok(max)) if now < max => Finding::warning(
                format!("card {}: PCIe x{now} of x{max}; copies are slower than they could be", row[0]),
                "compare under load; then move the card to another slot, or seat it again",
            ),
            (Ok(now), _) => Finding::ok(format!("card {}: PCIe x{now}", row[0])),
            _ => Finding::skipped(format!("card {}: PCIe width unknown", row[0])),
        }
    })
}

/// Judges links between cards; a card without NVLink has none that could be down.
fn nvlink(machine: &Machine) -> Finding {
    let answer = match smi(machine, &["nvlink", "--status"]) {
        Ok(answer) => answer,
        Err(early) => return early,
    };
    let (mut card, mut up, mut down) = ("", 0, Vec::new());
    for line in answer.lines().map(str::trim) {
        if line.starts_with("GPU ") {
            card = line.split(':').next().unwrap_or(line);
        } else if let Some(state) = line.strip_prefix("Link ") {
            let (link, state) = state.split_once(':').unwrap_or((state, ""));
            match state.contains("inactive") {
                true => down.push(format!("{card} link {link}")),
                false => up += u32::from(state.contains("GB/s")),
            }
        }
    }
    match (up, down.is_empty()) {
        (0, true) => Finding::skipped("the cards have no NVLink"),
        (_, true) => Finding::ok(format!("{up} links of NVLink are up")),
        _ => Finding::warning(
            format!("{} inactive; copies between cards are slower", down.join(", ")),
            "nvidia-smi nvlink --errorcounters; seat bridge and cards again, or reset them: nvidia-smi -r",
        ),
    }
}

/// Judges NVSwitch, without whose manager no CUDA program of the host starts.
fn fabric(machine: &Machine) -> Finding {
    if let Err(early) = version(machine) {
        return early;
    }
    if machine.list("/proc/driver/nvidia-nvswitch/devices").is_empty() {
        return Finding::skipped("this host has no NVSwitch");
    }
    let manager = "nvidia-fabricmanager.service";
    match machine.unit(manager, "ActiveState").as_deref() {
        Some("active") => each(machine, "index,fabric.state", |row| match row[1].as_str() {
            "Not Started" | "In Progress" => Finding::fault(
                format!("card {}: not registered with the fabric manager: programs get error 802", row[0]),
                format!("sudo systemctl restart {manager}; journalctl -u {manager}"),
            ),
            state => Finding::ok(format!("card {}: fabric {state}", row[0])),
        }),
        None => Finding::skipped(format!("systemd does not answer for {manager}")),
        Some(state) => Finding::fault(
            format!("{manager} is {state}: programs get error 802 (system not yet initialized)"),
            format!("sudo systemctl enable --now {manager}; its version has to be the driver's"),
        ),
    }
}

/// Judges processes on the cards whose memory gpuserver counts for no lease.
fn other_programs(machine: &Machine) -> Finding {
    if let Err(early) = version(machine) {
        return early;
    }
    if machine.unit("gpuserver.service", "LoadState").as_deref() != Some("loaded") {
        return Finding::skipped("gpuserver.service is not installed, or systemd does not answer");
    }
    let answer =
        match smi(machine, &["--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]) {
            Ok(answer) => answer,
            Err(early) => return early,
        };
    let name = |pid: &str| machine.read(format!("/proc/{pid}/comm")).map(|comm| comm.trim().to_owned());
    let others = answer.lines().filter_map(|line| {
        let (pid, used) = line.split_once(", ")?;
        let name = name(pid.trim()).ok()?;
        let own = name.starts_with("gpuserver") || name.starts_with("nvidia-cuda-mps");
        (!own).then(|| format!("{name} (pid {}, {} MiB)", pid.trim(), used.trim()))
    });
    match others.collect::<Vec<_>>() {
        others if others.is_empty() => Finding::ok("only gpuserver's processes use the cards"),
        others => Finding::warning(
            format!("{} use the cards besides gpuserver; leases find less memory", others.join(", ")),
            "end them, or leave them room: gpu_memory in gpuserver.toml",
        ),
    }
}

fn mps(machine: &Machine) -> Finding {
    if let Err(early) = version(machine) {
        return early;
    }
    let pipe = machine.variable("CUDA_MPS_PIPE_DIRECTORY").unwrap_or("/tmp/nvidia-mps");
    match machine.exists(format!("{pipe}/control")) {
        true => Finding::warning(
            format!("another MPS control daemon has its pipe in {pipe}; gpuserver does not use it"),
            "echo quit | nvidia-cuda-mps-control, unless other programs of this host need it",
        ),
        false => Finding::ok("no MPS control daemon besides gpuserver's"),
    }
}

fn locked_memory(machine: &Machine) -> Finding {
    match machine.unit("gpuserver.service", "LimitMEMLOCK").as_deref() {
        _ if machine.unit("gpuserver.service", "LoadState").as_deref() != Some("loaded") => {
            Finding::skipped("gpuserver.service is not installed, or systemd does not answer")
        }
        Some("infinity" | "18446744073709551615") => Finding::ok("gpuserver may lock memory without limit"),
        Some(limit) => Finding::fault(
            format!("gpuserver may lock {limit} bytes of memory; pinned copies fail beyond that"),
            remedy::set_in_unit("gpuserver", "LimitMEMLOCK=infinity"),
        ),
        None => Finding::skipped("systemd does not answer for gpuserver.service"),
    }
}

/// Remedy for a server that only notes the system calls beyond the list of its workers.
pub const REFUSE_UNLISTED_CALLS: &str =
    "sudo systemctl edit gpuserver: remove GPUSERVER_UNLISTED_CALLS; sudo systemctl restart gpuserver";

fn isolation(machine: &Machine) -> Finding {
    if let Err(early) = version(machine) {
        return early;
    }
    let variables = machine.unit("gpuserver.service", "Environment").unwrap_or_default();
    if variables.split_whitespace().any(|variable| variable == "GPUSERVER_UNLISTED_CALLS=log") {
        return Finding::warning(
            "gpuserver.service has GPUSERVER_UNLISTED_CALLS=log: workers make system calls beyond their list",
            REFUSE_UNLISTED_CALLS,
        );
    }
    let mut missing = Vec::new();
    if machine.read("/sys/kernel/security/lsm").is_ok_and(|lsm| !lsm.contains("landlock")) {
        missing.push("Landlock");
    }
    if machine.read("/proc/self/status").is_ok_and(|status| !status.contains("Seccomp:")) {
        missing.push("seccomp");
    }
    if !machine.exists("/sys/fs/cgroup/cgroup.controllers") {
        missing.push("cgroup v2");
    }
    match missing.is_empty() {
        true => Finding::ok("the kernel has Landlock, seccomp and cgroup v2"),
        false => Finding::warning(
            format!("the kernel lacks {}; workers are isolated less", missing.join(", ")),
            "boot with lsm=landlock,... and systemd.unified_cgroup_hierarchy=1; see isolation.md",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::State;
    use crate::testing::{plant, program};

    fn host(version: &str) -> (tempfile::TempDir, Machine) {
        let root = tempfile::tempdir().unwrap();
        let line = format!(
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  Mon Jan  1\nGCC version: 12\n"
        );
        plant(&root, "proc/driver/nvidia/version", &line);
        let machine = Machine::below(root.path());
        (root, machine)
    }

    #[test]
    fn a_machine_without_a_driver_is_no_gpu_host() {
        let root = tempfile::tempdir().unwrap();
        let machine = Machine::below(root.path());
        for check in CHECKS {
            assert_eq!((check.run)(&machine).state, State::Skipped, "{}", check.id);
        }
    }

    #[test]
    fn an_old_driver_is_named() {
        assert_eq!(driver(&host("580.159.04").1), Finding::ok("driver 580.159.04"));
        assert_eq!(driver(&host("535.54.03").1).state, State::Warning);
        assert_eq!(driver(&host("470.82.01").1).state, State::Fault);
    }

    #[test]
    fn missing_devices_are_named() {
        let (root, machine) = host("580.159.04");
        plant(&root, "dev/nvidiactl", "");
        plant(&root, "dev/nvidia0", "");
        assert_eq!(devices(&machine).found, "/dev/nvidia-uvm missing");
    }

    #[test]
    fn modes_and_faults_of_cards_are_named() {
        let (root, machine) = host("580.159.04");
        assert_eq!(cards(&machine).state, State::Skipped, "no nvidia-smi");
        let answer = "case $1 in *compute_mode*) echo '0, Default'; echo '1, Exclusive_Process';;\n\
            *persistence*) echo '0, Disabled';;\n\
            *ecc*) echo '0, 0'; echo '1, 3';;\n\
            *pcie*) echo '0, 8, 16';;\n*) echo 'No devices were found';; esac";
        program(&root, "nvidia-smi", answer);
        let mode = compute_mode(&machine);
        assert_eq!((mode.state, mode.found.contains("card 1: compute mode")), (State::Warning, true));
        assert_eq!(persistence(&machine).state, State::Warning);
        assert!(ecc(&machine).found.starts_with("card 1: 3 uncorrected"));
        assert_eq!(pcie(&machine).state, State::Warning);
        assert_eq!(cards(&machine).state, State::Fault);
        assert!(cards(&machine).found.ends_with("No devices were found"));
    }

    #[test]
    fn links_and_the_fabric_manager_are_named() {
        let (root, machine) = host("580.159.04");
        assert_eq!(nvlink(&machine).state, State::Skipped, "no nvidia-smi");
        let links = |links: &str| {
            let gpu = "GPU 0: NVIDIA H200 (UUID: GPU-1)";
            program(
                &root,
                "nvidia-smi",
                &format!("case $1 in nvlink) printf '{gpu}\\n{links}';; *) echo '0, In Progress';; esac"),
            );
        };
        links("");
        assert_eq!(nvlink(&machine).state, State::Skipped);
        links("\\t Link 0: 26.562 GB/s\\n\\t Link 1: 26.562 GB/s\\n");
        assert_eq!(nvlink(&machine), Finding::ok("2 links of NVLink are up"));
        links("\\t Link 0: 26.562 GB/s\\n\\t Link 1: <inactive>\\n");
        assert!(nvlink(&machine).found.starts_with("GPU 0 link 1 inactive"), "{:?}", nvlink(&machine));

        assert_eq!(fabric(&machine).state, State::Skipped, "no NVSwitch");
        plant(&root, "proc/driver/nvidia-nvswitch/devices/0000:01:00.0", "");
        assert_eq!(fabric(&machine).state, State::Skipped, "no systemd");
        program(&root, "systemctl", "echo inactive");
        assert!(fabric(&machine).remedy.contains("enable --now nvidia-fabricmanager"));
        program(&root, "systemctl", "echo active");
        assert!(fabric(&machine).found.contains("card 0: not registered"));
        program(&root, "nvidia-smi", "echo 'Field \"fabric.state\" is not a valid field to query.'");
        assert_eq!(fabric(&machine).state, State::Skipped, "an older driver");
        program(&root, "nvidia-smi", "echo '0, Completed'");
        assert_eq!(fabric(&machine).state, State::Ok);
    }

    #[test]
    fn defective_memory_and_kernel_messages_of_cards_are_named() {
        let (root, machine) = host("580.159.04");
        assert_eq!(
            (memory_repairs(&machine).state, errors(&machine).state),
            (State::Skipped, State::Skipped)
        );
        let of = |answer: &str| {
            program(&root, "nvidia-smi", &format!("echo '{answer}'"));
            memory_repairs(&machine).state
        };
        assert_eq!(of("GPU-1, 0, 0"), State::Ok);
        assert_eq!(of("GPU-1, [N/A], [N/A]"), State::Ok);
        assert_eq!(of("GPU-1, 1, 0"), State::Warning);
        assert_eq!(of("GPU-1, 0, Yes"), State::Fault);
        assert_eq!(of("ERROR: Option --query-remapped-rows= is not recognized."), State::Skipped);
        program(&root, "journalctl", "case $6 in --lines*) echo 'Linux version 6.1';; esac");
        assert_eq!(errors(&machine).state, State::Ok);
        program(&root, "journalctl", "echo 'NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.'");
        assert!(errors(&machine).found.contains("Xid (PCI:0000:01:00): 79"));
    }

    #[test]
    fn programs_besides_the_server_are_named() {
        let (root, machine) = host("580.159.04");
        assert_eq!(other_programs(&machine).state, State::Skipped, "no server");
        program(&root, "systemctl", "echo loaded");
        program(&root, "nvidia-smi", "echo '10, 512'; echo '11, 900'; echo '12, [N/A]'");
        plant(&root, "proc/10/comm", "gpuserver-worke\n");
        plant(&root, "proc/12/comm", "nvidia-cuda-mps\n");
        assert_eq!(other_programs(&machine).state, State::Ok, "the process 11 has ended");
        plant(&root, "proc/11/comm", "python3\n");
        assert!(other_programs(&machine).found.starts_with("python3 (pid 11, 900 MiB) use"));
        program(&root, "nvidia-smi", "");
        assert_eq!(other_programs(&machine).state, State::Ok);
    }

    #[test]
    fn a_foreign_mps_daemon_is_named() {
        let (root, machine) = host("580.159.04");
        assert_eq!(mps(&machine).state, State::Ok);
        plant(&root, "tmp/nvidia-mps/control", "");
        assert_eq!(mps(&machine).state, State::Warning);
    }

    #[test]
    fn a_small_limit_of_locked_memory_is_named() {
        let (root, machine) = host("580.159.04");
        let systemctl = |limit: &str| {
            let script = format!("case $3 in LoadState) echo loaded;; LimitMEMLOCK) echo {limit};; esac");
            program(&root, "systemctl", &script);
        };
        systemctl("infinity");
        assert_eq!(locked_memory(&machine).state, State::Ok);
        systemctl("65536");
        assert_eq!(locked_memory(&machine).state, State::Fault);
    }

    #[test]
    fn missing_means_of_isolation_are_named() {
        let (root, machine) = host("580.159.04");
        plant(&root, "sys/kernel/security/lsm", "lockdown,capability,yama");
        plant(&root, "proc/self/status", "Seccomp:\t0\n");
        plant(&root, "sys/fs/cgroup/cgroup.controllers", "cpu memory\n");
        assert!(isolation(&machine).found.contains("lacks Landlock;"));
        plant(&root, "sys/kernel/security/lsm", "lockdown,landlock,yama");
        assert_eq!(isolation(&machine).state, State::Ok);
        let variables = "GPUSESSION_LOG=info GPUSERVER_UNLISTED_CALLS=log";
        program(&root, "systemctl", &format!("case $3 in Environment) echo {variables};; esac"));
        assert_eq!(isolation(&machine).remedy, REFUSE_UNLISTED_CALLS);
    }
}
