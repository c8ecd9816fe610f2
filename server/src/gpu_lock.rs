//! One server per GPU on a host: the server of a GPU locks a file that is named after it.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, Write};
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
    // Somebody else who opens a lock could keep a GPU from its server: no right for others.
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o1770).create(folder);
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
        assert_eq!((mode(&locks) & 0o1007, file & 0o007), (0o1000, 0), "{:o} {file:o}", mode(&locks));
        // A link is not followed.
        let target = folder.path().join("target");
        std::os::unix::fs::symlink(&target, locks.join("GPU-l")).unwrap();
        assert!(take(&locks, &["GPU-l"], "x").is_err() && !target.exists());
    }
}
