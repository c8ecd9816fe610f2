//! The remains of a daemon: its processes and its folder.

use std::path::Path;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tracing::{info, warn};

/// Kills what is left of a daemon, and removes its folder.
pub(super) fn clean(folder: &Path) {
    for pid in left_behind(&folder.join("p")) {
        info!("MPS: killed process {pid}, which an earlier daemon left in {}", folder.display());
        let _ = kill(pid, Signal::SIGKILL);
    }
    match std::fs::remove_dir_all(folder) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            warn!("MPS: cannot remove {}: {e}", folder.display());
        }
        _ => {}
    }
}

/// Lists processes of MPS with this pipe directory. A server may outlive its daemon.
pub(super) fn left_behind(pipe: &Path) -> Vec<Pid> {
    use std::os::unix::ffi::OsStrExt;
    let wanted = [b"CUDA_MPS_PIPE_DIRECTORY=", pipe.as_os_str().as_bytes()].concat();
    let of = |entry: std::fs::DirEntry| {
        let pid: i32 = entry.file_name().to_str()?.parse().ok()?;
        let comm = std::fs::read_to_string(entry.path().join("comm")).ok()?;
        let mps = comm.starts_with("nvidia-cuda-mps");
        let environment = std::fs::read(entry.path().join("environ")).ok().filter(|_| mps)?;
        environment.split(|b| *b == 0).any(|v| v == wanted).then(|| Pid::from_raw(pid))
    };
    std::fs::read_dir("/proc").into_iter().flatten().flatten().filter_map(of).collect()
}
