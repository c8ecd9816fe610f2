//! Paths: the directories that systemd passes to the daemon, their defaults, and the user's own.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

fn from_env(variable: &str, default: &str) -> PathBuf {
    // systemd may list several directories; the first one belongs to gpusession.
    match std::env::var(variable) {
        Ok(value) if !value.is_empty() => PathBuf::from(value.split(':').next().unwrap_or(default)),
        _ => PathBuf::from(default),
    }
}

/// `/etc/gpusession`, or `CONFIGURATION_DIRECTORY`.
pub fn configuration_directory() -> PathBuf {
    from_env("CONFIGURATION_DIRECTORY", "/etc/gpusession")
}

/// `/var/lib/gpusession`, or `STATE_DIRECTORY`.
pub fn state_directory() -> PathBuf {
    from_env("STATE_DIRECTORY", "/var/lib/gpusession")
}

/// `/run/gpusession`, or `RUNTIME_DIRECTORY`.
pub fn runtime_directory() -> PathBuf {
    from_env("RUNTIME_DIRECTORY", "/run/gpusession")
}

/// The grant socket: `GPUSESSION_SOCKET`, else `grant.sock` in the runtime directory.
pub fn grant_socket() -> PathBuf {
    match std::env::var_os("GPUSESSION_SOCKET").filter(|p| !p.is_empty()) {
        Some(path) => path.into(),
        None => runtime_directory().join("grant.sock"),
    }
}

/// The login socket: `pam.sock` in the runtime directory.
pub fn login_socket() -> PathBuf {
    runtime_directory().join("pam.sock")
}

/// Folder of stored login sessions: `sessions` in the runtime directory.
pub fn sessions_directory() -> PathBuf {
    runtime_directory().join("sessions")
}

/// Folder of notices for the shells' prompts: `notice` in the runtime directory, one file per uid.
pub fn notice_directory() -> PathBuf {
    runtime_directory().join("notice")
}

/// Root's file of the variables of logins: `environment` in the runtime directory.
pub fn variables_file() -> PathBuf {
    runtime_directory().join("environment")
}

/// File of the rules that say who gets them: `login/access.json` in the runtime directory.
pub fn audience_file() -> PathBuf {
    runtime_directory().join("login/access.json")
}

/// Writes a file that all users may read.
///
/// Readers never see a partial file: it is written under another name, then renamed.
pub(crate) fn publish(path: &Path, text: &[u8]) -> io::Result<()> {
    if let Some(folder) = path.parent().filter(|folder| !folder.exists()) {
        fs::create_dir_all(folder)?;
        fs::set_permissions(folder, Permissions::from_mode(0o755))?;
    }
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let new = path.with_file_name(format!(".{name}.new"));
    fs::write(&new, text)?;
    fs::set_permissions(&new, Permissions::from_mode(0o644))?;
    fs::rename(new, path)
}

/// The user's folder: `$XDG_CONFIG_HOME/gpusession` or `~/.config/gpusession`.
pub fn user_directory() -> Option<PathBuf> {
    let base =
        std::env::var_os("XDG_CONFIG_HOME").map(PathBuf::from).filter(|p| p.is_absolute()).or_else(|| {
            Some(PathBuf::from(std::env::var_os("HOME").filter(|h| !h.is_empty())?).join(".config"))
        })?;
    Some(base.join("gpusession"))
}

/// Folder of gpusession's `libcuda.so.1`: `GPUSESSION_LIBDIR`, else next to the binary, else as
/// packaged.
pub fn library_directory() -> Option<PathBuf> {
    if let Some(folder) = std::env::var_os("GPUSESSION_LIBDIR").filter(|p| !p.is_empty()) {
        return Some(folder.into());
    }
    let triplet = format!("{}-linux-gnu", std::env::consts::ARCH);
    let beside = std::env::current_exe()
        .ok()
        .and_then(|exe| Some(exe.canonicalize().ok()?.parent()?.parent()?.join("lib/gpusession")));
    let packaged = [
        PathBuf::from(format!("/usr/lib/{triplet}/gpusession")),
        PathBuf::from("/usr/lib64/gpusession"),
        PathBuf::from("/usr/lib/gpusession"),
    ];
    beside.into_iter().chain(packaged).find(|folder| has_library(folder))
}

/// Returns `true` if a folder contains a `libcuda.so.1`.
pub fn has_library(folder: &Path) -> bool {
    folder.join("libcuda.so.1").exists()
}

/// Returns this boot's id as 16 bytes; zeros if the kernel provides none.
pub fn boot_id() -> [u8; 16] {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let mut id = [0; 16];
    let digits: Vec<u8> = text.bytes().filter_map(|b| (b as char).to_digit(16).map(|d| d as u8)).collect();
    for (byte, pair) in id.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = pair[0] << 4 | pair[1];
    }
    id
}

/// Returns the time since boot, including suspended time.
pub fn uptime() -> std::time::Duration {
    let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_BOOTTIME);
    now.map_or(std::time::Duration::ZERO, std::time::Duration::from)
}

/// Returns a stable id of this host: a hash of `/etc/machine-id`, which it does not reveal.
pub fn machine_id() -> String {
    let raw = std::fs::read_to_string("/etc/machine-id").unwrap_or_default();
    let raw = raw.trim();
    if raw.is_empty() {
        return String::new();
    }
    let key = blake3::derive_key("gpusession 2026 machine id of a client", raw.as_bytes());
    hex(&key[..16])
}

/// Formats bytes as lower-case hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut out, byte| {
        let _ = write!(out, "{byte:02x}");
        out
    })
}
