//! The interface of NVIDIA's `nvidia-cuda-mps-control`: its program, its questions and answers.
//!
//! Answers are bounded, and an answer that cannot be parsed is an error, never a good state.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::Mutex;
use tokio::time::timeout;

use crate::spawn::Spawner;
use crate::starter::link::{Program, Starter};
use crate::starter::{Purpose, Request};

/// Longest answer that is read, in bytes.
const MAX_ANSWER: u64 = 64 << 10;
/// Time in which most questions must be answered.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// Name of the control program.
pub const PROGRAM: &str = "nvidia-cuda-mps-control";
/// Folders that are searched after the driver's folder and `$PATH`.
const FOLDERS: &[&str] = &["/usr/bin", "/usr/local/nvidia/bin", "/usr/local/bin", "/opt/bin"];

/// Finds the program: the named one, or the first one installed.
///
/// The order is the driver's folder, `$PATH` and the usual folders.
pub fn find(named: Option<&Path>, driver: &Path) -> Result<PathBuf, String> {
    let runs = |path: &Path| {
        use std::os::unix::fs::PermissionsExt;
        std::fs::metadata(path).is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0)
    };
    if let Some(path) = named {
        return match runs(path) {
            true => Ok(path.into()),
            false => {
                Err(format!("{} is not a program; set `mps_control` to NVIDIA's {PROGRAM}", path.display()))
            }
        };
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = driver.parent().map(Path::to_path_buf).into_iter();
    let folders = folders.chain(std::env::split_paths(&path)).chain(FOLDERS.iter().map(PathBuf::from));
    folders.filter(|f| f.is_absolute()).map(|f| f.join(PROGRAM)).find(|p| runs(p)).ok_or_else(|| {
        format!(
            "{PROGRAM} is not installed (packages: nvidia-compute-utils, nvidia-driver-cuda); install it, set \
             `mps_control` to its path, or share no GPU by MPS"
        )
    })
}

/// State of an MPS server, by its own report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServerState {
    /// Creates its contexts.
    Initializing,
    /// Serves clients.
    Active,
    /// A client had a fatal fault: all clients of the server must exit.
    Fault,
}

impl ServerState {
    /// Returns the name of the state in listings.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Initializing => "initializing",
            Self::Active => "active",
            Self::Fault => "fault",
        }
    }

    /// Parses the answer to `get_server_status`.
    pub fn parse(answer: &str) -> Result<Self, String> {
        let mut states = answer.split(|c: char| !c.is_ascii_alphabetic()).filter_map(|word| match word {
            "INITIALIZING" => Some(Self::Initializing),
            "ACTIVE" => Some(Self::Active),
            "FAULT" => Some(Self::Fault),
            _ => None,
        });
        match (states.next(), states.next()) {
            (Some(state), None) => Ok(state),
            _ => Err(format!("{:?} is not a state of an MPS server", shown(answer))),
        }
    }
}

/// Parses the answer to `get_server_list` or `get_client_list`: one process id per line.
pub fn pids(answer: &str) -> Result<Vec<u32>, String> {
    let lines = answer.lines().map(str::trim).filter(|l| !l.is_empty());
    let pid = |line: &str| line.parse::<u32>().ok().filter(|pid| *pid > 1);
    lines.map(|l| pid(l).ok_or_else(|| format!("{:?} is not a process id", shown(l)))).collect()
}

fn shown(text: &str) -> String {
    text.trim().chars().take(200).map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// Interface to one control daemon.
#[derive(Debug, Clone)]
pub struct Control {
    starter: Starter,
    /// Arguments of the worker's program, which restricts itself and becomes NVIDIA's.
    arguments: Vec<OsString>,
    /// Whole environment of the program; its pipe directory selects the daemon.
    environment: Vec<(OsString, OsString)>,
    /// The daemon talks to one program at a time, and refuses a second.
    turn: Arc<Mutex<()>>,
}

impl Control {
    /// Creates the interface to the daemon of the environment's pipe directory.
    pub fn new(starter: Starter, arguments: Vec<OsString>, environment: Vec<(OsString, OsString)>) -> Self {
        Self { starter, arguments, environment, turn: Arc::default() }
    }

    fn request(&self, more: &[&str]) -> Request {
        let arguments = self.arguments.iter().cloned().chain(more.iter().map(OsString::from)).collect();
        Request { purpose: Purpose::Mps, arguments, environment: self.environment.clone() }
    }

    /// Starts the daemon, which ends with this process; it writes to `output`.
    pub async fn daemon(&self, output: File, spawner: &Spawner) -> io::Result<Program> {
        let errors = output.try_clone()?;
        let streams = [File::open("/dev/null")?.into(), output.into(), errors.into()];
        self.starter.bound(self.request(&["-f"]), streams, spawner).await
    }

    /// Sends one question to the daemon and returns the answer.
    pub async fn ask(&self, question: &str, limit: Duration) -> Result<String, String> {
        let late = || format!("{question}: no answer within {} ms", limit.as_millis());
        timeout(limit, self.ask_in_turn(question)).await.map_err(|_| late())?
    }

    async fn ask_in_turn(&self, question: &str) -> Result<String, String> {
        let _turn = self.turn.lock().await;
        let failed = |e: std::io::Error| format!("{PROGRAM}: {e}");
        let (mut program, mut input, output) = self.starter.asked(self.request(&[])).await.map_err(failed)?;
        // If the program has exited already, its answer tells why.
        let _ = input.write_all(format!("{question}\n").as_bytes()).await;
        drop(input);
        let mut answer = Vec::new();
        output.take(MAX_ANSWER).read_to_end(&mut answer).await.map_err(failed)?;
        let status = program.wait().await.map_err(failed)?;
        let answer = String::from_utf8_lossy(&answer).into_owned();
        if !status.success() || answer.contains("Cannot find MPS control daemon") {
            return Err(format!("{question}: {status}: {}", shown(&answer)));
        }
        Ok(answer)
    }

    /// Lists the process ids of the daemon's servers.
    pub async fn servers(&self) -> Result<Vec<u32>, String> {
        pids(&self.ask("get_server_list", ANSWER_TIMEOUT).await?)
    }

    /// Returns the state of a server.
    pub async fn state(&self, server: u32) -> Result<ServerState, String> {
        ServerState::parse(&self.ask(&format!("get_server_status {server}"), ANSWER_TIMEOUT).await?)
    }

    /// Lists the process ids of a server's clients.
    pub async fn clients(&self, server: u32) -> Result<Vec<u32>, String> {
        pids(&self.ask(&format!("get_client_list {server}"), ANSWER_TIMEOUT).await?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_understood_or_errors() {
        assert_eq!(pids("\n").unwrap(), Vec::<u32>::new());
        assert_eq!(pids("4711\n4712\n").unwrap(), [4711, 4712]);
        for bad in ["0", "1", "-5", "Server 12", "99999999999", "12 13"] {
            assert!(pids(bad).is_err(), "{bad}");
        }
        assert_eq!(ServerState::parse("ACTIVE\n"), Ok(ServerState::Active));
        assert_eq!(ServerState::parse("Server 12: INITIALIZING"), Ok(ServerState::Initializing));
        assert_eq!(ServerState::parse("FAULT"), Ok(ServerState::Fault));
        for bad in ["", "INACTIVE", "Server 7 not found", "ACTIVE FAULT"] {
            assert!(ServerState::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_program_is_there_or_the_error_says_what_to_do() {
        let folder = tempfile::tempdir().unwrap();
        let driver = folder.path().join("libcuda.so.1");
        let named = folder.path().join("other");
        assert!(find(Some(&named), &driver).unwrap_err().contains("is not a program"));
        let path = folder.path().join(PROGRAM);
        std::fs::write(&path, "#!/bin/sh\n").unwrap();
        assert!(find(Some(&path), &driver).is_err(), "it cannot be run");
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(find(None, &driver).unwrap(), path);
    }

    #[tokio::test]
    async fn a_daemon_that_does_not_answer_is_left() {
        let environment = vec![("PATH".into(), "/usr/bin:/bin".into())];
        let of = |program: &Path| {
            Control::new(Starter::Here(program.into()), vec!["the driver".into()], environment.clone())
        };
        let folder = tempfile::tempdir().unwrap();
        let program = |name: &str, line: &str| {
            use std::os::unix::fs::PermissionsExt;
            let path = folder.path().join(name);
            std::fs::write(&path, format!("#!/bin/sh\n{line}\n")).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
            path
        };
        let answers = program("answers", "read question; echo \"$question $@\"");
        let said = of(&answers).ask("ps", ANSWER_TIMEOUT).await.unwrap();
        assert_eq!(said, "ps --mps the driver\n");
        let hangs = of(&program("hangs", "exec sleep 1000"));
        let e = hangs.ask("ps", Duration::from_millis(50)).await.unwrap_err();
        assert!(e.contains("no answer within 50 ms"), "{e}");
        assert!(of(Path::new("/bin/false")).ask("ps", ANSWER_TIMEOUT).await.is_err());
    }
}
