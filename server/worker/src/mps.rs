//! `gpuserver-worker --mps DRIVER ISOLATION PROGRAM [ARGUMENT...]` restricts itself and becomes
//! NVIDIA's program: a control daemon of MPS with the servers that it starts, or one that asks it.
//!
//! All programs of a domain share an MPS server, which reads what they send. Its restrictions are
//! those of a worker, as far as it does without: it starts programs, has local sockets, and
//! signals the processes of its own domain.

use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use gpusession_proto::supervise::Isolation;

use crate::containment::{self, Files, Mps};

/// Returns only if the program could not start.
pub fn run(driver: &str, isolation: Isolation, program: &str, arguments: &[String]) -> ExitCode {
    let files = Files { driver, mps: Mps::Daemon { program: PathBuf::from(program) }, ..Files::default() };
    match containment::of_helper(isolation, |abi| containment::before_mps(&files, abi)) {
        Ok(lacking) if lacking.is_empty() => {}
        Ok(lacking) => eprintln!("gpuserver-worker: MPS runs without: {}", lacking.join("; ")),
        Err(why) => {
            eprintln!("gpuserver-worker: MPS: not started: {why}");
            return ExitCode::from(1);
        }
    }
    let e = Command::new(program).args(arguments).exec();
    eprintln!("gpuserver-worker: MPS: {program}: {e}");
    ExitCode::from(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The acts of a program that a client has taken over, and those that MPS needs.
    const ACTS: &str = r#"
denied() {
    if said=$(eval "$1" 2>&1); then echo "not denied: $1"; exit 1; fi
    case $said in
    *ermission\ denied* | *not\ permitted*) ;;
    *) echo "$1: $said"; exit 1 ;;
    esac
}
set -e
echo x >"$CUDA_MPS_PIPE_DIRECTORY/control"
echo x >"$CUDA_MPS_LOG_DIRECTORY/log"
bash -c 'cat /proc/self/status' | grep -q '^Seccomp:.2$'
bash -c 'echo named >/proc/self/task/$$/comm'
bash -c 'sleep 60 & kill $!'
echo x >/dev/shm/$$ && rm /dev/shm/$$
denied 'ls /root'
denied 'echo x >"$CUDA_MPS_PIPE_DIRECTORY/../beside"'
denied 'cat "$CUDA_MPS_PIPE_DIRECTORY/../beside"'
chmod 777 "$CUDA_MPS_PIPE_DIRECTORY"
test "$(stat -c %a "$CUDA_MPS_PIPE_DIRECTORY")" = 755
denied 'chown 0:0 "$CUDA_MPS_PIPE_DIRECTORY"'
denied 'cat /proc/$SERVER/environ'
denied 'cat /proc/$SERVER/maps'
test -z "$(readlink /proc/$SERVER/fd/0)"
denied 'exec 3<>/dev/tcp/127.0.0.1/9'
test "$SIGNALS" = open || denied 'kill -0 $SERVER'
echo contained
"#;

    #[test]
    fn a_program_of_mps_reaches_its_own_folders_and_domain_alone() {
        const ALONE: &str = "MPS_TEST";
        let test = "mps::tests::a_program_of_mps_reaches_its_own_folders_and_domain_alone";
        if std::env::var_os(ALONE).is_some() {
            let arguments = ["-c".into(), ACTS.into()];
            let code = run("/usr/lib/libcuda.so.1", Isolation::Require, "/bin/bash", &arguments);
            panic!("no program: {code:?}");
        }
        if containment::landlock() < landlock::ABI::V3 {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        for name in ["pipes", "logs"] {
            std::fs::create_dir(folder.path().join(name)).unwrap();
        }
        std::fs::write(folder.path().join("beside"), "kept").unwrap();
        let signals = if containment::landlock() < landlock::ABI::V6 { "open" } else { "closed" };
        let done = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture"])
            .env(ALONE, "1")
            .env("CUDA_MPS_PIPE_DIRECTORY", folder.path().join("pipes"))
            .env("CUDA_MPS_LOG_DIRECTORY", folder.path().join("logs"))
            .env("SERVER", std::process::id().to_string())
            .env("SIGNALS", signals)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&done.stdout);
        assert!(done.status.success() && said.contains("contained"), "{done:?}");
        assert_eq!(std::fs::read(folder.path().join("beside")).unwrap(), b"kept");
    }
}
