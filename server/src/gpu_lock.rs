//! One server per GPU on a host: the server of a GPU locks a file that is named after it.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use nix::fcntl::{Flock, FlockArg};

/// Folder of the locks of the machine's servers, unless `lock_dir` names another one.
pub const COMMON: &str = "/run/lock/gpusession";

/// Locks of the served GPUs; the kernel releases them when the process exits.
#[derive(Debug)]
pub struct GpuLocks(#[expect(dead_code, reason = "held, not used")] Vec<Flock<File>>);

/// Locks these GPUs below `folder`, and writes `who` into the files for other servers.
///
/// # Errors
/// A text that names the GPU and its server, or the file and the cause.
pub fn take(folder: &Path, gpus: &[&str], who: &str) -> Result<GpuLocks, String> {
    // Another user who opens a lock could keep a GPU from its server, so others may only look
    // whether one exists ([`is_taken`]).
    let new = !folder.exists();
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o1771).create(folder);
    if new {
        // The umask may have taken bits away.
        let _ = std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o1771));
    }
    made.map_err(|e| format!("{}: {e}", folder.display()))?;
    let mut held = Vec::new();
    for gpu in gpus {
        let path = folder.join(gpu);
        let failed = |e: std::io::Error| {
            let remedy = match e.kind() {
                io::ErrorKind::PermissionDenied => "; set `lock_dir` to a folder of the server's user",
                _ => "",
            };
            format!("{}: {e}{remedy}", path.display())
        };
        // Servers of several users may write to the folder, so no link in it is followed.
        let open = |create: bool| {
            OpenOptions::new()
                .read(true)
                .write(true)
                .create(create)
                .truncate(false)
                .mode(0o660)
                .custom_flags(nix::libc::O_NOFOLLOW)
                .open(&path)
        };
        // The kernel may forbid O_CREAT on an existing file of another user in such a folder
        // (fs.protected_regular), so the first attempt goes without it.
        let file = open(false).or_else(|_| open(true)).map_err(failed)?;
        let _ = file.set_permissions(std::fs::Permissions::from_mode(0o660));
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(mut lock) => {
                let text = format!("{who}\n");
                let written = lock
                    .set_len(0)
                    .and_then(|()| lock.rewind())
                    .and_then(|()| lock.write_all(text.as_bytes()));
                written.map_err(failed)?;
                held.push(lock);
            }
            Err((mut file, nix::errno::Errno::EWOULDBLOCK)) => {
                let mut other = String::new();
                let _ = Read::by_ref(&mut file).take(256).read_to_string(&mut other);
                let other: String = other.trim().chars().filter(|c| !c.is_control()).collect();
                return Err(format!(
                    "GPU {gpu} is served by {}; a GPU has one server: list in `gpus` of each server the GPUs that it serves",
                    if other.is_empty() { "another process" } else { &other }
                ));
            }
            Err((_, errno)) => return Err(failed(errno.into())),
        }
    }
    Ok(GpuLocks(held))
}

/// Returns `true` if a process holds the lock of a GPU below `folder`; needs no right to open it.
pub fn is_taken(folder: &Path, gpu: &str) -> bool {
    let Ok(lock) = std::fs::symlink_metadata(folder.join(gpu)) else { return false };
    let (major, minor) = (nix::sys::stat::major(lock.dev()), nix::sys::stat::minor(lock.dev()));
    // proc_locks(5): the sixth field has the device's numbers in hexadecimal and the inode.
    let file = format!("{major:02x}:{minor:02x}:{}", lock.ino());
    let locks = std::fs::read_to_string("/proc/locks").unwrap_or_default();
    locks.lines().any(|line| line.split_whitespace().nth(5) == Some(&file))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_has_one_server() {
        let folder = tempfile::tempdir().unwrap();
        let locks = folder.path().join("locks");
        let first = take(&locks, &["GPU-a", "GPU-b"], "gpuserver one (pid 7)").unwrap();
        let error = take(&locks, &["GPU-c", "GPU-b"], "gpuserver two").unwrap_err();
        assert!(
            error.contains("GPU GPU-b is served by gpuserver one (pid 7)") && error.contains("`gpus`"),
            "{error}"
        );
        take(&locks, &["GPU-c"], "gpuserver two").unwrap();
        drop(first);
        take(&locks, &["GPU-a", "GPU-b"], "gpuserver two").unwrap();
        // No stranger opens a lock, since the lock would then be the stranger's.
        let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o7777;
        let file = mode(&locks.join("GPU-a"));
        assert_eq!((mode(&locks) & 0o1007, file & 0o007), (0o1001, 0), "{:o} {file:o}", mode(&locks));
        // Others see whether a process holds it.
        let held = take(&locks, &["GPU-a"], "gpuserver one").unwrap();
        assert_eq!(["GPU-a", "GPU-b", "GPU-x"].map(|gpu| is_taken(&locks, gpu)), [true, false, false]);
        drop(held);
        assert!(!is_taken(&locks, "GPU-a"));
        // A link is not followed.
        let target = folder.path().join("target");
        std::os::unix::fs::symlink(&target, locks.join("GPU-l")).unwrap();
        assert!(take(&locks, &["GPU-l"], "x").is_err() && !target.exists());
    }
}
