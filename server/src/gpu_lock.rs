//! One server per GPU on a host: the server of a GPU locks a file that is named after it.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use nix::fcntl::{Flock, FlockArg};

/// Locks of the served GPUs; the kernel releases them when the process exits.
#[derive(Debug)]
pub struct GpuLocks(#[expect(dead_code, reason = "held, not used")] Vec<Flock<File>>);

/// Locks these GPUs below `folder`, and writes `who` into the files for other servers.
///
/// # Errors
/// A text that names the GPU and its server, or the file and the cause.
pub fn take(folder: &Path, gpus: &[&str], who: &str) -> Result<GpuLocks, String> {
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o1777).create(folder);
    made.map_err(|e| format!("{}: {e}", folder.display()))?;
    // Servers of other users lock in this folder, too; the umask may have cleared their right.
    let _ = std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o1777));
    let mut held = Vec::new();
    for gpu in gpus {
        let path = folder.join(gpu);
        let failed = |e: std::io::Error| format!("{}: {e}", path.display());
        // Every user may write to the folder, so no link in it is followed.
        let open = |create: bool| {
            OpenOptions::new()
                .read(true)
                .write(true)
                .create(create)
                .truncate(false)
                .mode(0o666)
                .custom_flags(nix::libc::O_NOFOLLOW)
                .open(&path)
        };
        // The kernel may forbid O_CREAT on an existing file of another user in such a folder
        // (fs.protected_regular), so the first attempt goes without it.
        let file = open(false).or_else(|_| open(true)).map_err(failed)?;
        let _ = file.set_permissions(std::fs::Permissions::from_mode(0o666));
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
                let _ = std::io::Read::by_ref(&mut file).take(256).read_to_string(&mut other);
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
        // A link is not followed.
        let target = folder.path().join("target");
        std::os::unix::fs::symlink(&target, locks.join("GPU-l")).unwrap();
        assert!(take(&locks, &["GPU-l"], "x").is_err() && !target.exists());
    }
}
