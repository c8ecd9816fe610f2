//! Starts programs that load the driver or meet a client's bytes, in a process and as a user of
//! its own.
//!
//! The server connects to `gpuserver-starter` once for each program. It sends a [`Request`] with
//! the program's three standard streams, and for a worker or an endpoint with the worker's end of a
//! channel. The answers are [`Said::Started`], and [`Said::Ended`] when the program has exited. A
//! closed connection kills the program with its group, and so does the end of the starter. A worker
//! that outlives its server outlives both.
//!
//! The program is always the worker's, with a flag of [`Purpose`]. Arguments and environment are
//! the server's word: this protects the server from the programs, and not the programs from it.
//!
//! Only the starter's user may kill these programs, write to their control groups, and look into
//! folders that they made. So the starter also does that: an [`Act`] has a connection of its own.

use std::ffi::OsString;
use std::io::{self, IoSliceMut};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::path::Path;

use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg};
use serde::{Deserialize, Serialize};

use self::code::{CodeAct, Found};
use self::mps::{FolderAct, Told};
use crate::cgroups::{Bounds, ClientBounds, Met};

pub mod code;
pub mod desk;
pub mod groups;
pub mod link;
pub mod mps;
pub mod service;

/// User of the starter's unit.
pub const USER: &str = "gpuserver-worker";
/// Standard streams of a program, which come beside the request.
const STREAMS: usize = 3;

/// Purpose of a connection: a program, or an act.
///
/// The other end may be of another version: places stay, and new purposes are appended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Purpose {
    /// Answers the server's and clients' NVML queries.
    Monitor,
    /// Lists the GPUs of the driver.
    Probe,
    /// Endpoint of a measurement, with a worker's channel, in this control group.
    Measure(Group),
    /// Worker of a lease, with its channel, in this control group.
    Worker {
        /// Control group.
        group: Group,
        /// Whether it lives on after a closed connection, and after the starter.
        outlives: bool,
    },
    /// Tests a worker's restrictions.
    Contained,
    /// As `Contained`, without the restrictions.
    Free,
    /// Becomes NVIDIA's control program of MPS inside restrictions.
    Mps,
    /// An act, which starts no program.
    Act(Act),
}

impl Purpose {
    /// Flag of the endpoint of a measurement.
    const MEASURE: &str = "--measure";

    /// Returns the flag of the worker's program; a worker itself has none.
    pub fn flag(&self) -> Option<&'static str> {
        match self {
            Self::Monitor => Some("--monitor"),
            Self::Probe => Some("--probe"),
            Self::Measure(_) => Some(Self::MEASURE),
            Self::Contained => Some("--probe-contained"),
            Self::Free => Some("--probe-free"),
            Self::Mps => Some("--mps"),
            Self::Worker { .. } | Self::Act(_) => None,
        }
    }

    /// Returns the number of descriptors beside a request.
    fn descriptors(&self) -> usize {
        match self {
            Self::Measure(_) | Self::Worker { .. } => STREAMS + 1,
            Self::Monitor | Self::Probe | Self::Contained | Self::Free | Self::Mps => STREAMS,
            Self::Act(Act::Kill) => 1,
            Self::Act(_) => 0,
        }
    }
}

/// Act of the starter itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Act {
    /// Returns the starter's user and places.
    Introduce,
    /// Kills the process of the pidfd beside the request, with its group.
    Kill,
    /// Bounds a program's control group.
    Bound(Group),
    /// Bounds the group above the groups of a client's programs.
    BoundAll(String, ClientBounds),
    /// Returns whose bound the kernel met when it killed a program for memory.
    Met(Group),
    /// Removes the control group of an exited program.
    Leave(Group),
    /// About code that drivers compiled.
    Code(CodeAct),
    /// About a folder of an MPS daemon.
    Mps(FolderAct),
}

/// Answer to an act. Some acts have several before [`Answer::Done`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// The act is over.
    Done,
    /// The act failed, with the error and its number of the system's, if it has one.
    Failed(String, Option<i32>),
    /// Answers [`Act::Introduce`].
    Introduced(Introduction),
    /// Answers [`Act::Met`].
    Met(Option<Met>),
    /// Answers [`Act::Code`].
    Code(Found),
    /// Answers [`Act::Mps`].
    Mps(Told),
}

/// User and places of a starter.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Introduction {
    /// User of the programs that it starts.
    pub uid: u32,
    /// Describes how it bounds their memory.
    pub limits: String,
    /// Whether it has control groups for them.
    pub bounds: bool,
    /// Folder of compiled code; `None`: it keeps none.
    pub cache: Option<String>,
    /// Folder of the MPS daemons; `None`: it has no place for them.
    pub mps: Option<String>,
}

/// Control group of a program, which the starter makes inside its unit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Group {
    /// Name of the group above it, which shows only a hash of it.
    pub of: String,
    /// Id of the program.
    pub id: [u8; 16],
    /// Bounds that the kernel keeps, where the unit has control groups.
    pub bounds: Bounds,
}

impl Group {
    /// Returns the name of the program's own group.
    pub fn name(&self) -> String {
        data_encoding::HEXLOWER.encode(&self.id)
    }
}

/// The server's request.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// Purpose, which gives the program's first argument.
    pub purpose: Purpose,
    /// Arguments after it.
    pub arguments: Vec<OsString>,
    /// Whole environment.
    pub environment: Vec<(OsString, OsString)>,
}

/// Message of the starter.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Said {
    /// The program runs under this number.
    Started(u32),
    /// No program was started, with the reason.
    Refused(String),
    /// The program has exited, with its wait status.
    Ended(i32),
    /// A part of the answer to an act.
    Answer(Answer),
}

/// Adds the place and the unit of a starter to an error.
fn away(socket: &Path, e: &io::Error) -> io::Error {
    let unit = unit_of(socket);
    let text = format!("the starter at {}: {e}; systemctl status {unit}", socket.display());
    io::Error::new(e.kind(), text)
}

/// Returns the unit of the starter whose socket is at `socket`, without the type's suffix.
pub fn unit_of(socket: &Path) -> String {
    let folder = socket.parent().and_then(Path::file_name).and_then(|name| name.to_str());
    let folder = folder.unwrap_or(USER);
    let instance = folder.strip_prefix("gpuserver-worker-");
    instance.map_or_else(|| folder.into(), |name| format!("gpuserver-worker@{name}"))
}

/// Reads bytes with the descriptors beside them.
fn first_bytes(socket: BorrowedFd<'_>, bytes: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    // The kernel closes those for which there is no room.
    let mut space = nix::cmsg_space!([RawFd; STREAMS + 1]);
    let mut parts = [IoSliceMut::new(bytes)];
    let got = recvmsg::<()>(socket.as_raw_fd(), &mut parts, Some(&mut space), MsgFlags::MSG_CMSG_CLOEXEC)?;
    let mut found = Vec::new();
    for control in got.cmsgs()? {
        let ControlMessageOwned::ScmRights(raw) = control else { continue };
        // SAFETY: the kernel has just created these descriptors for this process, and each is taken
        // once.
        found.extend(raw.into_iter().map(|raw| unsafe { OwnedFd::from_raw_fd(raw) }));
    }
    match got.bytes {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        n => Ok((n, found)),
    }
}

#[cfg(test)]
mod tests;
