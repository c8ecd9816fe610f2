//! The server's configuration: its keys, their sources and their checks.
//!
//! `gpuserver.toml` is read first, then the drop-ins `gpuserver.d/*.toml` in the same folder, in
//! the order of their names; a later value wins.
//! Every error names file, line and key; an unknown key is an error.

mod check;
mod checked;
mod cross;
mod keys;
mod kinds;
mod limit_tables;
mod origin;
mod raw;
mod read;
mod reader;
mod runtime;
#[cfg(test)]
mod tests;
mod unknown;
mod values;

use std::path::{Path, PathBuf};

use check::check;
pub use checked::Config;
pub use keys::{Keys, Users, gpu_sharing_key, is_live, keys};
pub use kinds::advertised;
pub use origin::{ConfigError, Origin};
use raw::{Raw, expand};
use read::read_text;
use reader::instance;
pub use reader::{Report, Surroundings};
pub use runtime::{edit_runtime, key_parts, runtime_file};
pub use values::{Advertised, GpuChoice, Gpus, Mps};

/// Remedy for a file that the caller may not read.
const AS_ROOT: &str = "; run this command as root";
/// Configuration file unless the command line names another.
pub const DEFAULT_FILE: &str = "/etc/gpusession/gpuserver.toml";

/// Reads `file` and its drop-ins. A missing file is an error only if `required`.
pub fn load(file: &Path, required: bool, around: &Surroundings<'_>) -> Result<Config, ConfigError> {
    let mut raw = Raw::default();
    let mut warnings = Vec::new();
    let mut file_found = true;
    match std::fs::read_to_string(file) {
        Ok(text) => read_text(&mut raw, file, &text, around.env)?,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound && !required => {
            file_found = false;
            warnings.push(format!("{} not found: all keys have their defaults", file.display()));
        }
        Err(e) => {
            let todo = match e.kind() {
                std::io::ErrorKind::NotFound => "; create it, or name another file with -c",
                std::io::ErrorKind::PermissionDenied => AS_ROOT,
                _ => "",
            };
            let why = format!("cannot be read: {e}{todo}");
            return Err(ConfigError::new(Origin::File(file.into(), 0), why));
        }
    }
    for path in drop_ins(file)? {
        let text = std::fs::read_to_string(&path).map_err(|e| {
            let todo = if e.kind() == std::io::ErrorKind::PermissionDenied { AS_ROOT } else { "" };
            ConfigError::new(Origin::File(path.clone(), 0), format!("cannot be read: {e}{todo}"))
        })?;
        read_text(&mut raw, &path, &text, around.env)?;
    }
    Ok(Config { file_found, ..check(raw, warnings, file, around)? })
}

/// As [`load`], with the facts of this host.
pub fn load_here(file: &Path, required: bool) -> Result<Config, ConfigError> {
    let host_name = nix::unistd::gethostname().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    let ephemeral = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").ok().and_then(|text| {
        let (low, high) = text.trim().split_once(char::is_whitespace)?;
        Some((low.parse().ok()?, high.trim().parse().ok()?))
    });
    let env = |name: &str| std::env::var(name).ok();
    let nvidia_driver = Path::new("/sys/module/nvidia").exists();
    let has_unit = |name: &str| {
        let is_in = |folder| Path::new(folder).join("systemd/system").join(name).exists();
        Path::new("/run/systemd/system").exists()
            && ["/usr/lib", "/usr/local/lib", "/etc"].into_iter().any(is_in)
    };
    let around = Surroundings {
        env: &env,
        host_name,
        ephemeral,
        nvidia_driver,
        signer_unit: has_unit("gpuserver-ca.socket"),
        starter_unit: has_unit("gpuserver-worker.socket"),
    };
    load(file, required, &around)
}

/// Returns the administration socket of a server whose configuration files have errors.
///
/// Takes the last legible `runtime_dir` in them, else the default.
pub fn admin_socket_beside(file: &Path, env: &dyn Fn(&str) -> Option<String>) -> PathBuf {
    let of_environment = env("RUNTIME_DIRECTORY").filter(|d| !d.is_empty());
    let mut folder = of_environment
        .and_then(|list| list.split(':').next().map(PathBuf::from))
        .unwrap_or_else(|| format!("/run/gpuserver{}", instance(file)).into());
    let files = std::iter::once(file.to_path_buf()).chain(drop_ins(file).unwrap_or_default());
    for text in files.filter_map(|path| std::fs::read_to_string(path).ok()) {
        // Parse line by line, so that errors in other lines do not matter.
        for line in text.lines().filter(|l| l.trim_start().starts_with("runtime_dir")) {
            let value = line.parse::<toml::Table>().ok().and_then(|mut t| t.remove("runtime_dir"));
            let text = value.as_ref().and_then(toml::Value::as_str).and_then(|t| expand(t, env).ok());
            folder = text.map_or(folder, PathBuf::from);
        }
    }
    folder.join("admin.sock")
}

/// Lists the drop-ins of a configuration file in the order of reading.
fn drop_ins(file: &Path) -> Result<Vec<PathBuf>, ConfigError> {
    let folder = file.with_extension("d");
    let unread = |e| {
        let why = format!("the folder of drop-ins cannot be read: {e}; make it readable, or remove it");
        ConfigError::new(Origin::File(folder.clone(), 0), why)
    };
    let entries = match std::fs::read_dir(&folder) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(unread(e)),
    };
    let paths = entries.map(|entry| Ok(entry?.path()));
    let mut out = paths.collect::<std::io::Result<Vec<PathBuf>>>().map_err(unread)?;
    out.retain(|p| p.extension().is_some_and(|e| e == "toml"));
    out.sort();
    Ok(out)
}

/// Reads a configuration from one text, without drop-ins; for tests.
pub fn from_text(name: &Path, text: &str, around: &Surroundings<'_>) -> Result<Config, ConfigError> {
    let mut raw = Raw::default();
    read_text(&mut raw, name, text, around.env)?;
    check(raw, Vec::new(), name, around)
}
