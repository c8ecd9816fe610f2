//! Discovery of the driver's GPUs. A child process asks the driver, so that this process never
//! loads CUDA.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use gpusession_common::units::Memory;
use gpusession_common::words::Sharing;
use object::{Object, ObjectSymbol};
use serde::{Deserialize, Serialize};
use tokio::time::timeout;

use crate::config::{Config, ConfigError, GpuChoice, Gpus, gpu_sharing_key};
use crate::lease::Gpu;
use crate::mps::{self, Folders};
use crate::starter::Purpose;
use crate::starter::link::Starter;
use crate::store::{self, StoreError};

/// Symbol of gpusession's own libcuda, which must never be a server's driver.
pub const MARKER: &str = "gpusession_marker";
const PROBE_TIMEOUT: Duration = Duration::from_secs(120);
/// Folders that are searched for a driver after the loader's cache.
const FOLDERS: &[&str] = &[
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/nvidia/lib64",
    "/usr/lib/wsl/lib",
    "/run/opengl-driver/lib",
];

/// Answer of the driver.
#[derive(Debug, Clone, Deserialize)]
pub struct Probe {
    /// Version such as 580.159.04; a simulated driver has none.
    pub driver_version: Option<String>,
    /// CUDA version: 1000 * major + 10 * minor.
    pub cuda_version: u32,
    /// GPUs in the driver's order.
    pub devices: Vec<Gpu>,
}

/// Reason why the server has no GPUs to serve.
#[derive(Debug, thiserror::Error)]
pub enum DiscoveryError {
    /// `driver`, `gpus` or another key names something that does not exist: a retry does not help.
    #[error("{key}: {message}")]
    Configuration {
        /// Key in the configuration.
        key: &'static str,
        /// Description and remedy.
        message: String,
    },
    /// The driver did not answer; a later try may succeed.
    #[error("{0}")]
    Probe(String),
}

impl DiscoveryError {
    /// Adds the place in the configuration to a configuration error.
    pub fn placed(self, config: &Config) -> anyhow::Error {
        match self {
            Self::Configuration { key, .. } => ConfigError::new(config.origin(key), self.to_string()).into(),
            Self::Probe(_) => self.into(),
        }
    }
}

fn bad(key: &'static str, message: impl Into<String>) -> DiscoveryError {
    DiscoveryError::Configuration { key, message: message.into() }
}

/// Returns `true` if a library is gpusession's own. The file is read, not loaded.
fn is_ours(path: &Path) -> Result<bool, String> {
    let bytes = std::fs::read(path).map_err(|e| e.to_string())?;
    let file = object::File::parse(&*bytes).map_err(|_| "it is not a shared library".to_string())?;
    Ok(file.dynamic_symbols().any(|s| s.is_definition() && s.name() == Ok(MARKER)))
}

/// Finds the driver library: the named one, or the loader's first `libcuda.so.1`.
///
/// It skips gpusession's own library.
pub fn find_driver(named: Option<&Path>) -> Result<PathBuf, DiscoveryError> {
    if let Some(path) = named {
        return match is_ours(path) {
            Ok(false) => Ok(path.into()),
            Ok(true) => Err(bad(
                "driver",
                format!(
                    "{} is gpusession's own client library, not a driver; name NVIDIA's libcuda.so.1",
                    path.display()
                ),
            )),
            Err(e) => Err(bad("driver", format!("{}: {e}", path.display()))),
        };
    }
    let mut skipped = None;
    for path in candidates() {
        match is_ours(&path) {
            Ok(false) => return Ok(path),
            Ok(true) => skipped = Some(path),
            Err(_) => {}
        }
    }
    Err(bad(
        "driver",
        match skipped {
            Some(path) => format!(
                "the only libcuda.so.1 on this host is {}, gpusession's own client library; install NVIDIA's driver or name \
                 one with `driver`",
                path.display()
            ),
            None => {
                "no libcuda.so.1 in the loader's paths; install NVIDIA's driver or name one with `driver`"
                    .into()
            }
        },
    ))
}

fn candidates() -> Vec<PathBuf> {
    // In the loader's order: its variable, its cache, its folders.
    let mut out: Vec<PathBuf> = std::env::var_os("LD_LIBRARY_PATH")
        .iter()
        .flat_map(std::env::split_paths)
        .filter(|folder| folder.is_absolute())
        .map(|folder| folder.join("libcuda.so.1"))
        .collect();
    for program in ["/sbin/ldconfig", "/usr/sbin/ldconfig"] {
        let Ok(output) = std::process::Command::new(program).arg("-p").env_clear().output() else { continue };
        for line in String::from_utf8_lossy(&output.stdout).lines() {
            if let Some((name, path)) = line.split_once(" => ")
                && name.trim().starts_with("libcuda.so.1 ")
                && name.contains("x86-64")
            {
                out.push(PathBuf::from(path.trim()));
            }
        }
        break;
    }
    out.extend(FOLDERS.iter().map(|f| Path::new(f).join("libcuda.so.1")));
    out
}

/// Asks the driver for its GPUs and versions.
pub async fn probe(starter: &Starter, driver: &Path) -> Result<Probe, DiscoveryError> {
    let failed =
        |what: String| DiscoveryError::Probe(format!("probe of the driver {}: {what}", driver.display()));
    let output = match timeout(PROBE_TIMEOUT, starter.output(Purpose::Probe, driver, &[], &[])).await {
        Ok(Ok(output)) => output,
        Ok(Err(e)) => return Err(failed(e.to_string())),
        Err(_) => return Err(failed(format!("no answer within {} s", PROBE_TIMEOUT.as_secs()))),
    };
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let said = said.lines().last().unwrap_or("it wrote nothing");
        return Err(failed(format!("{} ({said})", output.status)));
    }
    let mut probe: Probe = serde_json::from_slice(&output.stdout)
        .map_err(|e| failed(format!("its answer cannot be parsed: {e}")))?;
    for gpu in &mut probe.devices {
        gpu.uuid = gpu.uuid.replacen("gpu-", "GPU-", 1);
        if gpu.uuid_bytes().is_none() {
            return Err(failed(format!("{:?} is not a GPU's UUID", gpu.uuid)));
        }
    }
    Ok(probe)
}

/// Memory of a context on each GPU, with one version of the driver.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Contexts {
    driver_version: Option<String>,
    /// Bytes by UUID.
    bytes: BTreeMap<String, u64>,
}

/// Corrects the measured memory of contexts, and stores it.
///
/// The probe compares free memory before and after it creates a context. Programs that outlive a
/// restart disturb that while the GPUs are `in_use`. The value of an earlier, undisturbed start
/// then counts. It also counts where the probe could not measure.
pub fn settle_contexts(state_dir: &Path, probe: &mut Probe, in_use: bool) -> Result<(), StoreError> {
    let file = state_dir.join("contexts.json");
    // An unreadable file counts as empty: the measured values apply.
    let known: Contexts = store::read(&file).unwrap_or_default();
    let known = if known.driver_version == probe.driver_version { known.bytes } else { BTreeMap::new() };
    for gpu in &mut probe.devices {
        if let Some(before) = known.get(&gpu.uuid)
            && (in_use || gpu.context_bytes == 0)
        {
            gpu.context_bytes = *before;
        }
    }
    let bytes = probe.devices.iter().map(|gpu| (gpu.uuid.clone(), gpu.context_bytes)).collect();
    store::write(&file, &Contexts { driver_version: probe.driver_version.clone(), bytes })
}

/// Finds the GPU that an entry of a configured list names.
fn find<'a>(key: &'static str, choice: &GpuChoice, found: &'a [Gpu]) -> Result<&'a Gpu, DiscoveryError> {
    let gpu = match choice {
        GpuChoice::Index(i) => found.get(*i as usize),
        GpuChoice::Uuid(uuid) => found.iter().find(|g| g.uuid == *uuid),
    };
    gpu.ok_or_else(|| {
        let there: Vec<_> =
            found.iter().enumerate().map(|(i, g)| format!("{i} = {} ({})", g.uuid, g.name)).collect();
        bad(key, format!("GPU {choice} not found; this host has {}", there.join(", ")))
    })
}

/// Returns the configured GPUs. An unknown one is an error, so that a wrong list never means all.
pub fn choose(gpus: &Gpus, found: Vec<Gpu>) -> Result<Vec<Gpu>, DiscoveryError> {
    let these = match gpus {
        Gpus::All if found.is_empty() => return Err(bad("gpus", "the driver shows no GPU")),
        Gpus::All => return Ok(found),
        Gpus::These(these) => these,
    };
    let mut out: Vec<Gpu> = Vec::new();
    for choice in these {
        let gpu = find("gpus", choice, &found)?;
        if out.contains(gpu) {
            return Err(bad("gpus", format!("{choice} names {} a second time", gpu.uuid)));
        }
        out.push(gpu.clone());
    }
    Ok(out)
}

/// Withholds the memory of each GPU that the server does not lease.
pub fn offer(memory: Memory, mut gpus: Vec<Gpu>) -> Vec<Gpu> {
    for gpu in &mut gpus {
        gpu.withheld_bytes = gpu.memory_bytes.saturating_sub(memory.of(gpu.memory_bytes));
    }
    gpus
}

/// Sets each GPU's sharing: `all`, except for those that `some` lists.
pub fn share(
    all: Sharing,
    some: &[(GpuChoice, Sharing)],
    found: &[Gpu],
    mut gpus: Vec<Gpu>,
) -> Result<Vec<Gpu>, DiscoveryError> {
    for gpu in &mut gpus {
        gpu.sharing = all;
    }
    let mut said = BTreeMap::new();
    for (choice, sharing) in some {
        let key = gpu_sharing_key(*sharing);
        let uuid = find(key, choice, found)?.uuid.as_str();
        if let Some(earlier) = said.insert(uuid, key) {
            return Err(bad(
                key,
                format!("{choice} names {uuid}, which {earlier} names already; name it once"),
            ));
        }
        let gpu = gpus.iter_mut().find(|g| g.uuid == uuid);
        let gpu = gpu.ok_or_else(|| {
            bad(
                key,
                format!(
                    "{choice} names {uuid}, which `gpus` does not list; list it there, or leave it out here"
                ),
            )
        })?;
        gpu.sharing = *sharing;
    }
    Ok(gpus)
}

/// Returns the settings of MPS if a GPU is shared by it.
pub fn mps_settings(
    config: &Config,
    driver: &Path,
    gpus: &[Gpu],
    folders: Option<Folders>,
    uid: u32,
) -> Result<Option<mps::Settings>, DiscoveryError> {
    let wanted = config.mps.as_ref().filter(|_| gpus.iter().any(|g| g.sharing == Sharing::Mps));
    let Some(wanted) = wanted else { return Ok(None) };
    let program = mps::control::find(wanted.control.as_deref(), driver).map_err(|m| bad(wanted.key, m))?;
    let folders = folders.ok_or_else(|| {
        bad(wanted.key, "the starter has no folder for MPS; its option --mps names one, as its unit does")
    })?;
    mps::check_folder(folders.all()).map_err(|m| bad(wanted.key, m))?;
    Ok(Some(mps::Settings {
        program,
        driver: driver.into(),
        output: config.runtime_dir.clone(),
        folders,
        uid,
        shared: wanted.shared,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(n: u8) -> Gpu {
        Gpu {
            uuid: format!("GPU-00000000-0000-0000-0000-0000000000{n:02x}"),
            name: "G".into(),
            memory_bytes: 1,
            compute_major: 9,
            compute_minor: 0,
            pci_address: String::new(),
            multiprocessors: 1,
            context_bytes: 0,
            compute_mode: 0,
            pageable_access: false,
            sharing: Sharing::TimeSlice,
            withheld_bytes: 0,
        }
    }

    #[test]
    fn context_sizes_are_measured_only_without_programs() {
        let folder = tempfile::tempdir().unwrap();
        let settled = |version: &str, measured: [u64; 2], in_use| {
            let devices = [gpu(1), gpu(2)].into_iter().zip(measured);
            let devices = devices.map(|(gpu, context_bytes)| Gpu { context_bytes, ..gpu }).collect();
            let mut probe = Probe { driver_version: Some(version.into()), cuda_version: 13000, devices };
            settle_contexts(folder.path(), &mut probe, in_use).unwrap();
            [probe.devices[0].context_bytes, probe.devices[1].context_bytes]
        };
        assert_eq!(settled("580", [500, 600], false), [500, 600]);
        assert_eq!(
            settled("580", [9000, 0], true),
            [500, 600],
            "a program took memory, another gave it back"
        );
        assert_eq!(settled("580", [510, 0], false), [510, 600], "the second one was full");
        assert_eq!(settled("590", [700, 0], true), [700, 0], "another driver");
    }

    #[test]
    fn a_wrong_choice_never_means_all() {
        let found = || vec![gpu(1), gpu(2)];
        assert_eq!(choose(&Gpus::All, found()).unwrap(), found());
        let these = |l: &[GpuChoice]| choose(&Gpus::These(l.to_vec()), found());
        let second = GpuChoice::Uuid(gpu(2).uuid);
        assert_eq!(these(std::slice::from_ref(&second)).unwrap(), [gpu(2)]);
        assert_eq!(these(&[second.clone(), GpuChoice::Index(0)]).unwrap(), [gpu(2), gpu(1)]);
        let error = these(&[GpuChoice::Index(2)]).unwrap_err().to_string();
        assert!(error.contains("GPU 2 not found; this host has 0 = GPU-"), "{error}");
        assert!(these(&[second, GpuChoice::Index(1)]).unwrap_err().to_string().contains("second time"));
        assert!(choose(&Gpus::All, vec![]).is_err());
    }

    #[test]
    fn the_sharing_of_a_gpu_is_configured_once() {
        use Sharing::{Exclusive, Mps, TimeSlice};
        let index = GpuChoice::Index;
        let uuid = |n| GpuChoice::Uuid(gpu(n).uuid);
        let found = [gpu(1), gpu(2), gpu(3)];
        // The second and the third GPU are served.
        let shared = |all, some: &[(GpuChoice, Sharing)]| share(all, some, &found, found[1..].to_vec());
        let modes =
            |all, some: &[_]| shared(all, some).unwrap().iter().map(|g| g.sharing).collect::<Vec<_>>();
        assert_eq!(modes(Mps, &[]), [Mps, Mps]);
        assert_eq!(
            modes(TimeSlice, &[(index(2), Exclusive)]),
            [TimeSlice, Exclusive],
            "the driver's indices"
        );
        assert_eq!(modes(Exclusive, &[(uuid(2), Mps), (index(2), TimeSlice)]), [Mps, TimeSlice]);
        let wrong = |some: &[_]| shared(TimeSlice, some).unwrap_err().to_string();
        let said = wrong(&[(index(3), Mps)]);
        assert!(said.starts_with("gpu_sharing.mps: GPU 3 not found; this host has 0 = GPU-"), "{said}");
        let said = wrong(&[(index(0), Exclusive)]);
        let not_served =
            format!("gpu_sharing.exclusive: 0 names {}, which `gpus` does not list", gpu(1).uuid);
        assert!(said.starts_with(&not_served), "{said}");
        let said = wrong(&[(index(1), TimeSlice), (uuid(2), Mps)]);
        let twice =
            format!("gpu_sharing.mps: {0} names {0}, which gpu_sharing.time-slice names", gpu(2).uuid);
        assert!(said.starts_with(&twice), "{said}");
    }

    #[test]
    fn drivers() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("libcuda.so.1");
        assert!(find_driver(Some(&path)).unwrap_err().to_string().contains("libcuda.so.1"));
        std::fs::write(&path, "text").unwrap();
        assert!(find_driver(Some(&path)).unwrap_err().to_string().contains("not a shared library"));
        // The test program itself is an ELF file without the marker.
        let program = std::env::current_exe().unwrap();
        assert_eq!(find_driver(Some(&program)).unwrap(), program);
    }
}
