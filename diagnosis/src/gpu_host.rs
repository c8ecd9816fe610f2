//! Checks of a host with NVIDIA cards: driver, devices, modes, faults, and the kernel's means of
//! isolation.
//!
//! `nvidia-smi` of the driver answers for the cards. gpusession's client has a program of that name
//! in no package, so its output is the host's own.

use crate::check::{Check, Finding};
use crate::machine::Machine;

/// The table of these checks; all are skipped on a machine without an NVIDIA driver.
pub const CHECKS: &[Check<Machine>] = &[
    Check { id: "gpu-host.driver", run: driver },
    Check { id: "gpu-host.devices", run: devices },
    Check { id: "gpu-host.cards", run: cards },
    Check { id: "gpu-host.compute-mode", run: compute_mode },
    Check { id: "gpu-host.persistence", run: persistence },
    Check { id: "gpu-host.ecc", run: ecc },
    Check { id: "gpu-host.pcie", run: pcie },
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

/// Queries `nvidia-smi` for fields of all cards: a row for each, a text for each field.
fn query(machine: &Machine, fields: &str) -> Result<Vec<Vec<String>>, Finding> {
    version(machine)?;
    let argument = format!("--query-gpu={fields}");
    let answer = machine
        .run("nvidia-smi", &[&argument, "--format=csv,noheader,nounits"])
        .ok_or_else(|| Finding::skipped("nvidia-smi is not installed, or did not answer within 5 s"))?;
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
    match query(machine, fields) {
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
            "systemctl edit gpuserver, and write [Service] and LimitMEMLOCK=infinity; then restart it",
        ),
        None => Finding::skipped("systemd does not answer for gpuserver.service"),
    }
}

fn isolation(machine: &Machine) -> Finding {
    if let Err(early) = version(machine) {
        return early;
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
        assert_eq!(compute_mode(&machine).remedy, "nvidia-smi -i 1 -c DEFAULT");
        assert_eq!(persistence(&machine).state, State::Warning);
        assert!(ecc(&machine).found.starts_with("card 1: 3 uncorrected"));
        assert_eq!(pcie(&machine).state, State::Warning);
        assert_eq!(cards(&machine).state, State::Fault);
        assert!(cards(&machine).found.ends_with("No devices were found"));
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
    }
}
