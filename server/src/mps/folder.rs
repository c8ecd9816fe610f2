//! The folders of MPS daemons, and what a daemon leaves: acts for the user of the daemons.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::libc;

use super::clear::{clean, left_behind};
use crate::starter::desk::Desk;
use crate::starter::mps::{FolderAct, Told};
use crate::starter::{Act, Answer};

/// Logs of a daemon and its servers.
pub(super) const LOGS: [&str; 2] = ["control.log", "server.log"];
/// Bytes read at a time.
const MAX_READ: u64 = 32 << 10;

/// Returns the folder of a daemon's sockets, below that of all daemons.
pub(super) fn pipes(all: &Path, number: u32) -> PathBuf {
    all.join(number.to_string()).join("p")
}

/// Returns the folder of a daemon's logs, below that of all daemons.
pub(super) fn logs(all: &Path, number: u32) -> PathBuf {
    all.join(number.to_string()).join("l")
}

/// Opens a file of a daemon, which may have put anything in its place: a link is not followed, and
/// a FIFO does not wait.
fn opened(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    let file = options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)?;
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(io::Error::other("it is no regular file")),
    }
}

/// Reads a file from a place on, or from its begin if it is shorter; returns its length, too.
pub(super) fn read(path: &Path, at: u64) -> io::Result<(Vec<u8>, u64)> {
    let mut file = opened(path, File::options().read(true))?;
    let len = file.metadata()?.len();
    file.seek(SeekFrom::Start(if len < at { 0 } else { at }))?;
    let mut bytes = Vec::new();
    file.take(MAX_READ).read_to_end(&mut bytes)?;
    Ok((bytes, len))
}

/// Does what is asked in the folder of all daemons.
pub fn perform(all: &Path, act: &FolderAct) -> io::Result<Option<Told>> {
    let log = |number: u32, log: usize| {
        let name = LOGS.get(log).ok_or(io::ErrorKind::InvalidInput)?;
        Ok::<_, io::Error>(logs(all, number).join(name))
    };
    match *act {
        FolderAct::Clear => fs::read_dir(all).into_iter().flatten().flatten().for_each(|e| clean(&e.path())),
        FolderAct::ClearOne(number) => clean(&all.join(number.to_string())),
        FolderAct::Make(number) => {
            clean(&all.join(number.to_string()));
            for folder in [pipes(all, number), logs(all, number)] {
                DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
            }
        }
        FolderAct::Left(number) => {
            let left = left_behind(&pipes(all, number));
            return Ok(Some(Told::Pids(left.iter().map(|pid| pid.as_raw().unsigned_abs()).collect())));
        }
        FolderAct::Read(number, name, at) => {
            let (bytes, len) = read(&log(number, name)?, at)?;
            return Ok(Some(Told::Log(bytes, len)));
        }
        FolderAct::Empty(number, name) => {
            opened(&log(number, name)?, File::options().write(true))?.set_len(0)?;
        }
    }
    Ok(None)
}

/// Does acts in the folder of all daemons.
#[derive(Debug, Clone)]
pub enum Folders {
    /// This process, whose user the daemons have.
    Here(PathBuf),
    /// The starter, whose user the daemons have.
    There(Desk, PathBuf),
}

impl Folders {
    /// Returns the folder of all daemons.
    pub fn all(&self) -> &Path {
        match self {
            Self::Here(all) | Self::There(_, all) => all,
        }
    }

    /// Does what is asked; waits for the starter.
    pub(super) fn act(&self, act: &FolderAct) -> io::Result<Option<Told>> {
        match self {
            Self::Here(all) => perform(all, act),
            Self::There(desk, _) => Ok(match desk.act(&Act::Mps(act.clone()), None)?.pop() {
                Some(Answer::Mps(told)) => Some(told),
                _ => None,
            }),
        }
    }

    /// As [`Self::act`], on a thread that may wait.
    pub(super) async fn have(&self, act: FolderAct) -> io::Result<Option<Told>> {
        let this = self.clone();
        let done = tokio::task::spawn_blocking(move || this.act(&act)).await;
        done.unwrap_or_else(|e| Err(io::Error::other(e)))
    }

    /// Lists processes of a daemon.
    pub(super) async fn left(&self, number: u32) -> io::Result<Vec<u32>> {
        match self.have(FolderAct::Left(number)).await? {
            Some(Told::Pids(pids)) => Ok(pids),
            _ => Err(io::Error::other("no list of processes")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_in_a_logs_place_makes_the_reader_wait_or_leave_the_folder() {
        let all = tempfile::tempdir().unwrap();
        let folders = Folders::Here(all.path().into());
        folders.act(&FolderAct::Make(1)).unwrap();
        let secret = all.path().join("secret");
        fs::write(&secret, "secret").unwrap();
        let [control, server] = LOGS.map(|log| logs(all.path(), 1).join(log));
        nix::unistd::mkfifo(&control, nix::sys::stat::Mode::S_IRWXU).unwrap();
        std::os::unix::fs::symlink(&secret, &server).unwrap();
        for log in 0..LOGS.len() {
            assert!(folders.act(&FolderAct::Read(1, log, 0)).is_err(), "{log}");
            assert!(folders.act(&FolderAct::Empty(1, log)).is_err(), "{log}");
        }
        assert_eq!(fs::read_to_string(&secret).unwrap(), "secret");
    }
}
