//! The machine that checks read: files below a root directory, programs, variables, and the time.
//!
//! Tests put faults into a folder and pass it as the root.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Time that a program which a check runs may take.
const PROGRAM_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest output of such a program that is read, in bytes.
const MAX_OUTPUT: u64 = 64 << 20;
/// Writes of which the median counts.
const WRITES: u64 = 7;

/// Source of the facts that checks judge.
#[derive(Debug, Clone)]
pub struct Machine {
    root: PathBuf,
    path: OsString,
    /// Variables of the caller.
    pub environment: BTreeMap<String, String>,
    /// Seconds since the epoch.
    pub now: u64,
    /// Effective uid of the caller; 0 reads all files.
    pub uid: u32,
}

/// A file that could not be read, as text for a finding.
#[derive(Debug)]
pub struct Unread {
    path: String,
    error: io::Error,
}

impl Unread {
    /// Returns `true` if the file does not exist.
    pub fn missing(&self) -> bool {
        matches!(self.error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
    }
}

impl fmt::Display for Unread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.error.kind() {
            io::ErrorKind::PermissionDenied => write!(f, "cannot read {} as this user", self.path),
            io::ErrorKind::NotFound => write!(f, "{} does not exist", self.path),
            _ => write!(f, "cannot read {}: {}", self.path, self.error),
        }
    }
}

impl Machine {
    /// The machine that runs this program.
    pub fn here() -> Self {
        // Many users' PATH lacks the folders of administration programs.
        let mut path = std::env::var_os("PATH").unwrap_or_default();
        path.push(":/usr/sbin:/sbin");
        let text =
            |(key, value): (OsString, OsString)| Some((key.into_string().ok()?, value.into_string().ok()?));
        #[expect(clippy::disallowed_methods, reason = "a command reads the clock once")]
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        Self {
            root: "/".into(),
            path,
            environment: std::env::vars_os().filter_map(text).collect(),
            now,
            uid: nix::unistd::geteuid().as_raw(),
        }
    }

    /// The machine whose root directory is `root` and whose programs are in its folder `bin`.
    pub fn below(root: &Path) -> Self {
        Self {
            root: root.to_owned(),
            path: root.join("bin").into(),
            environment: BTreeMap::new(),
            now: 1_800_000_000,
            uid: 1000,
        }
    }

    /// Returns the place of an absolute path below the root.
    pub fn at(&self, path: impl AsRef<Path>) -> PathBuf {
        self.root.join(path.as_ref().strip_prefix("/").unwrap_or(path.as_ref()))
    }

    /// Returns a variable that is set and not empty.
    pub fn variable(&self, name: &str) -> Option<&str> {
        self.environment.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }

    /// Reads a file as text; other bytes become replacement characters.
    pub fn read(&self, path: impl AsRef<Path>) -> Result<String, Unread> {
        let bytes = std::fs::read(self.at(&path));
        let unread = |error| Unread { path: path.as_ref().display().to_string(), error };
        bytes.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).map_err(unread)
    }

    /// Returns `true` if the path exists; a dangling link does.
    pub fn exists(&self, path: impl AsRef<Path>) -> bool {
        self.at(path).symlink_metadata().is_ok()
    }

    /// Returns owner and permission bits of a file, with links followed.
    pub fn owner(&self, path: impl AsRef<Path>) -> Result<(u32, u32), Unread> {
        use std::os::unix::fs::MetadataExt as _;
        let meta = std::fs::metadata(self.at(&path));
        let unread = |error| Unread { path: path.as_ref().display().to_string(), error };
        meta.map(|meta| (meta.uid(), meta.mode() & 0o7777)).map_err(unread)
    }

    /// Lists the names of a folder, sorted; empty if it cannot be read.
    pub fn list(&self, path: impl AsRef<Path>) -> Vec<String> {
        let entries = std::fs::read_dir(self.at(path)).into_iter().flatten().flatten();
        let mut names: Vec<_> =
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    /// Runs a program, and returns what it printed; `None` if it cannot run or does not end.
    ///
    /// Its exit status does not count: `systemctl is-active` prints its answer and fails.
    pub fn run(&self, program: &str, arguments: &[&str]) -> Option<String> {
        self.run_for(PROGRAM_TIMEOUT, program, arguments)
    }

    /// Runs a program that may take longer.
    pub fn run_for(&self, limit: Duration, program: &str, arguments: &[&str]) -> Option<String> {
        let mut child = Command::new(self.program(program)?)
            .args(arguments)
            .env("PATH", &self.path)
            .env("LC_ALL", "C")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .ok()?;
        let stdout = child.stdout.take()?;
        let (done, wait) = mpsc::channel();
        let reader = std::thread::spawn(move || {
            let mut bytes = Vec::new();
            let read = stdout.take(MAX_OUTPUT).read_to_end(&mut bytes);
            let _ = done.send(read.map(|_| bytes));
        });
        let output = wait.recv_timeout(limit);
        if output.is_err() {
            let _ = child.kill();
        }
        let _ = child.wait();
        let bytes = output.ok()?.ok()?;
        let _ = reader.join();
        Some(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Finds a program in the path.
    pub fn program(&self, name: &str) -> Option<PathBuf> {
        std::env::split_paths(&self.path).map(|folder| folder.join(name)).find(|path| path.is_file())
    }

    /// Returns a property of a systemd unit; `None` if systemd does not answer.
    pub fn unit(&self, unit: &str, property: &str) -> Option<String> {
        let answer = self.run("systemctl", &["show", "--property", property, "--value", unit])?;
        Some(answer.trim().to_owned()).filter(|value| !value.is_empty())
    }

    /// Returns the libraries of this name that the loader's cache has, in its order.
    ///
    /// `None` if the cache cannot be read. A path whose file does not exist is left out.
    pub fn loader(&self, library: &str) -> Option<Vec<String>> {
        let root = self.root.display().to_string();
        let listed = match root.as_str() {
            "/" => self.run("ldconfig", &["-p"]),
            root => Machine::here().run("ldconfig", &["-r", root, "-p"]),
        }?;
        let of = |line: &str| {
            let (name, path) = line.trim().split_once(" => ")?;
            (name.split(' ').next() == Some(library)).then(|| path.to_owned())
        };
        Some(listed.lines().filter_map(of).filter(|path| self.at(path).exists()).collect())
    }

    /// Returns the median time to write 4 KiB to the disk of a folder.
    ///
    /// The file has no name: it is gone when the command ends, however it ends.
    pub fn write_time(&self, folder: impl AsRef<Path>) -> Result<Duration, Unread> {
        use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
        let mut options = std::fs::OpenOptions::new();
        let file = options.write(true).mode(0o600).custom_flags(nix::libc::O_TMPFILE).open(self.at(&folder));
        let measured = file.and_then(|file| {
            let mut times = (0..WRITES).map(|i| {
                let begun = Instant::now();
                file.write_all_at(&[0; 4096], i * 4096)?;
                file.sync_data()?;
                Ok(begun.elapsed())
            });
            let mut times = times.by_ref().collect::<io::Result<Vec<_>>>()?;
            times.sort_unstable();
            Ok(times[times.len() / 2])
        });
        measured.map_err(|error| Unread { path: folder.as_ref().display().to_string(), error })
    }

    /// Returns the bytes of the files below a folder; links are not followed.
    pub fn size(&self, folder: impl AsRef<Path>) -> u64 {
        let mut folders = vec![self.at(folder)];
        let mut bytes = 0;
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
                match entry.metadata() {
                    Ok(meta) if meta.is_dir() => folders.push(entry.path()),
                    Ok(meta) => bytes += meta.len(),
                    Err(_) => {}
                }
            }
        }
        bytes
    }

    /// Returns free and total bytes of the file system of a folder.
    pub fn space(&self, path: impl AsRef<Path>) -> Option<(u64, u64)> {
        let found = nix::sys::statvfs::statvfs(&self.at(path)).ok()?;
        let block = found.fragment_size();
        Some((found.blocks_available() * block, found.blocks() * block))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{plant, program};

    #[test]
    fn files_and_programs_are_those_below_the_root() {
        let root = tempfile::tempdir().unwrap();
        let machine = Machine::below(root.path());
        plant(&root, "etc/x", "text\n");
        assert_eq!(machine.read("/etc/x").unwrap(), "text\n");
        assert!(machine.read("/etc/y").unwrap_err().missing());
        assert_eq!(machine.list("/etc"), ["x"]);
        assert_eq!(machine.run("prints", &["a"]), None);
        program(&root, "prints", "echo \"$@\"; exit 3");
        assert_eq!(machine.run("prints", &["a", "b"]).as_deref(), Some("a b\n"));
        assert_eq!(machine.variable("HOME"), None);
        assert!(machine.space("/etc").unwrap().1 > 0);
        plant(&root, "etc/below/y", "12345");
        assert_eq!(machine.size("/etc"), 10);
        assert!(machine.write_time("/etc").unwrap() < Duration::from_secs(10));
        assert_eq!(machine.list("/etc"), ["below", "x"], "the measured file has no name");
        assert!(machine.write_time("/none").unwrap_err().missing());
    }
}
