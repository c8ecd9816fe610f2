//! One server per GPU on a host: whoever serves a GPU holds a lock on a file that is named after it.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use nix::fcntl::{Flock, FlockArg};

/// The right to serve some GPUs; the kernel takes it back when the process ends.
#[derive(Debug)]
pub struct GpuLocks(#[expect(dead_code, reason = "held, not used")] Vec<Flock<File>>);

/// Takes the locks of these GPUs below `folder`; `who` is what another server is told. The message names the GPU and who
/// serves it.
pub fn take(folder: &Path, gpus: &[&str], who: &str) -> Result<GpuLocks, String> {
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o1777).create(folder);
    made.map_err(|e| format!("{}: {e}", folder.display()))?;
    // Servers of other users lock here too; the mask may have taken their right.
    let _ = std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o1777));
    let mut held = Vec::new();
    for gpu in gpus {
        let path = folder.join(gpu);
        let failed = |e: std::io::Error| format!("{}: {e}", path.display());
        // In a folder that everybody may write to, nobody's link is followed.
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
        // The kernel protects files of others in such folders from being opened for creation.
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
                    "GPU {gpu} is served by {}; a GPU has one server: list in `gpus` of each those that it is to serve",
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
        // Nobody's link is followed.
        let target = folder.path().join("target");
        std::os::unix::fs::symlink(&target, locks.join("GPU-l")).unwrap();
        assert!(take(&locks, &["GPU-l"], "x").is_err() && !target.exists());
    }
}
