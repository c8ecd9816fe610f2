//! Starts programs that load the driver, in a process and as a user of its own.
//!
//! The server connects to `gpuserver-starter` once for each program. It sends a [`Request`] with
//! the program's three standard streams. The answers are [`Said::Started`], and [`Said::Ended`]
//! when the program has exited. A closed connection kills the program with its group. So no
//! message names a process, and none ends another connection's.
//!
//! The program is always the worker's, with a flag of [`Purpose`]. Arguments and environment are
//! the server's word: this protects the server from the programs, and not the programs from it.

use std::ffi::OsString;

use serde::{Deserialize, Serialize};

pub mod link;
pub mod service;

/// User of the starter's unit.
pub const USER: &str = "gpuserver-worker";
/// Standard streams of a program, which come beside the request.
const STREAMS: usize = 3;

/// Purpose of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Purpose {
    /// Answers the server's and clients' NVML queries.
    Monitor,
    /// Lists the GPUs of the driver.
    Probe,
}

impl Purpose {
    /// Returns the flag of the worker's program.
    pub fn flag(self) -> &'static str {
        match self {
            Self::Monitor => "--monitor",
            Self::Probe => "--probe",
        }
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
}

#[cfg(test)]
mod tests;
