//! The files, networks and processes that a restricted process reaches (Landlock).

use std::path::{Path, PathBuf};

use gpusession_proto::supervise::Start;
use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, PathFd, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetError, RulesetStatus, Scope, path_beneath_rules,
};

use crate::devices;

/// Readable and executable files.
///
/// These are libraries, facts about the machine for the driver, and tables of the loader and the
/// resolver.
const READABLE_FILES: &[&str] = &[
    "/usr",
    "/lib",
    "/lib64",
    "/opt",
    // PCI devices, processors, nodes of memory, and whether the driver's modules are loaded. The
    // rest of /sys has control groups of others, firmware and the kernel's own.
    "/sys/bus/pci",
    "/sys/devices",
    "/sys/module",
    "/run/nvidia-persistenced",
    "/etc/ld.so.cache",
    "/etc/nvidia",
    "/etc/localtime",
    "/etc/nsswitch.conf",
    "/etc/passwd",
    "/etc/group",
];
/// Writable files in addition to the lease's GPUs.
///
/// These are devices that every process may use.
const WRITE: &[&str] = &["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"];
/// Folder of shared memory, by which MPS talks to its clients. All processes of this user have
/// files there.
const SHARED_MEMORY: &str = "/dev/shm";
/// Beginning of the names of the simulated driver's files there, which stand for the devices.
const SIMULATED: &str = "simgpu-";
const OWN_FOLDER: &str = "/proc/self";
/// NVIDIA's driver sets the names of its threads there; a failure fails `cuInit`.
const OWN_THREADS: &str = "/proc/self/task";
const PROC: &str = "/proc";
/// Facts about the machine, for the driver and libraries.
///
/// `strace` on an H200 (driver 580.159.04) named `cpuinfo`, `devices`, `driver` and
/// `sys/vm/mmap_min_addr`. Counters of interrupts, locks and memory tell about other programs.
const MACHINE: &[&str] = &[
    "/proc/cpuinfo",
    "/proc/devices",
    "/proc/driver",
    "/proc/filesystems",
    "/proc/meminfo",
    "/proc/modules",
    "/proc/stat",
    "/proc/sys/kernel",
    "/proc/sys/vm",
    "/proc/version",
];

/// Files that a process needs in addition to those of every driver's process.
#[derive(Default)]
pub struct Files<'a> {
    /// The driver's library.
    pub driver: &'a str,
    pub gpus: Gpus,
    pub mps: Mps,
}

/// Part of a process in NVIDIA's MPS.
#[derive(Default)]
pub enum Mps {
    #[default]
    None,
    Client,
    /// The control daemon, the servers that it starts, and programs that ask it.
    Daemon {
        /// The control program, beside which the server's program lies.
        program: PathBuf,
    },
}

impl Mps {
    fn program(&self) -> Option<&Path> {
        match self {
            Self::Daemon { program } => Some(program),
            Self::None | Self::Client => None,
        }
    }
}

/// GPUs whose device files a process opens.
#[derive(Default)]
pub enum Gpus {
    #[default]
    All,
    /// By UUID.
    These(Vec<[u8; 16]>),
}

impl<'a> From<&'a Start> for Files<'a> {
    fn from(start: &'a Start) -> Self {
        Self {
            driver: &start.driver,
            gpus: Gpus::These(start.devices.iter().map(|device| device.uuid).collect()),
            mps: if start.mps { Mps::Client } else { Mps::None },
        }
    }
}

/// Restricts this process to the files of [`Files`], and to the signals and sockets of `handled`.
pub(super) fn files_only(files: &Files<'_>, abi: ABI) -> Result<(), String> {
    let own = std::env::current_exe().ok();
    let read = READABLE_FILES
        .iter()
        .map(Path::new)
        .chain(Path::new(files.driver).parent())
        .chain(files.mps.program().and_then(Path::parent))
        .chain(own.as_deref().and_then(Path::parent));
    // A driver's folder may consist of links.
    let target = std::fs::canonicalize(files.driver).ok();
    let target = target.as_deref().and_then(Path::parent);
    let runtime = std::env::var("XDG_RUNTIME_DIR").ok();
    // The folders of an MPS daemon, if one runs; clients lack the second.
    let [pipes, logs] =
        ["CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"].map(|name| std::env::var(name).ok());
    let compiled = std::env::var("CUDA_CACHE_PATH").ok();
    let (gpus, known) = match (&files.mps, &files.gpus) {
        (Mps::None, Gpus::These(uuids)) => devices::of_gpus(uuids),
        (Mps::None, Gpus::All) => (devices::all(), Ok(())),
        // MPS opens further devices, which no test has determined: allow all of them.
        _ => (vec!["/dev".into()], Ok(())),
    };
    let write = WRITE.iter().copied().chain(runtime.as_deref());
    let write = [&pipes, &logs, &compiled].into_iter().flatten().map(String::as_str).chain(write);
    let write = write.map(Path::new).chain(gpus.iter().map(PathBuf::as_path));
    let (shared, rights) = match files.mps {
        Mps::None => (simulated_devices(), existing(abi)),
        _ => (vec![SHARED_MEMORY.into()], AccessFs::from_all(abi)),
    };
    let said = |e: RulesetError| e.to_string();
    let facts = facts(&files.mps, abi)?;
    let status = handled(&files.mps, abi)
        .and_then(Ruleset::create)
        .and_then(|r| r.add_rules(path_beneath_rules(read.chain(target), AccessFs::from_read(abi))))
        .and_then(|r| r.add_rules(path_beneath_rules(write, AccessFs::from_all(abi))))
        .and_then(|r| r.add_rules(path_beneath_rules(shared, rights)))
        .and_then(|r| {
            let mut facts = facts.into_iter();
            facts.try_fold(r, |r, (paths, access)| r.add_rules(path_beneath_rules(paths, access)))
        })
        .and_then(|r| r.restrict_self())
        .map_err(said)?;
    match status.ruleset {
        RulesetStatus::FullyEnforced => known,
        RulesetStatus::PartiallyEnforced => Err("this kernel enforces only a part of the rules".into()),
        RulesetStatus::NotEnforced => Err("this kernel lacks it, or this container forbids it".into()),
    }
}

/// Returns the files that stand for the devices of the simulated driver.
fn simulated_devices() -> Vec<PathBuf> {
    let all = std::fs::read_dir(SHARED_MEMORY).into_iter().flatten().flatten();
    let of_devices = |name: &std::ffi::OsStr| name.as_encoded_bytes().starts_with(SIMULATED.as_bytes());
    all.filter(|entry| of_devices(&entry.file_name())).map(|entry| entry.path()).collect()
}

/// Returns the rights to read and write files that exist.
fn existing(abi: ABI) -> BitFlags<AccessFs> {
    let all = AccessFs::ReadFile | AccessFs::ReadDir | AccessFs::WriteFile | AccessFs::Truncate;
    all & AccessFs::from_all(abi)
}

/// Paths, and the rights to what lies beneath them.
type Rule = (Vec<PathBuf>, BitFlags<AccessFs>);

/// Returns the rights to files of `/proc`: facts about the machine and this process, and the names
/// of its threads.
fn facts(mps: &Mps, abi: ABI) -> Result<Vec<Rule>, String> {
    if matches!(mps, Mps::Daemon { .. }) {
        // A rule names no process that a daemon starts later. The kernel keeps memory, descriptors
        // and environment of processes outside this domain closed to it.
        return Ok(vec![(vec![PROC.into()], existing(abi))]);
    }
    // A rule holds for an inode, and /proc makes another inode of a folder that no descriptor keeps
    // open.
    for folder in [OWN_FOLDER, OWN_THREADS] {
        std::mem::forget(PathFd::new(folder).map_err(|e| e.to_string())?);
    }
    let read = MACHINE.iter().chain(&[OWN_FOLDER]).map(PathBuf::from).collect();
    Ok(vec![(read, AccessFs::from_read(abi)), (vec![OWN_THREADS.into()], AccessFs::from_all(abi))])
}

/// Returns the rights that a process has by rules only: files, connections, and other processes.
///
/// No rule allows a connection.
fn handled(mps: &Mps, abi: ABI) -> Result<Ruleset, RulesetError> {
    let mut all = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(abi))?;
    if abi >= ABI::V4 {
        all = all.handle_access(AccessNet::from_all(abi))?;
    }
    if abi >= ABI::V6 {
        // No test has determined whether a client of MPS uses the abstract sockets of NVIDIA's
        // daemons, which no rule could allow.
        let client = matches!(mps, Mps::Client);
        all = all.scope(if client { Scope::Signal.into() } else { Scope::from_all(abi) })?;
    }
    Ok(all)
}
