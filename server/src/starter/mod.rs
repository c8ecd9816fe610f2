//! Starts programs that load the driver or meet a client's bytes, in a process and as a user of
//! its own.
//!
//! The server connects to `gpuserver-starter` once for each program. It sends a [`Request`] with
//! the program's three standard streams, and for an endpoint with the worker's end of a channel.
//! The answers are [`Said::Started`], and [`Said::Ended`] when the program has exited. A closed
//! connection kills the program with its group, and so does the end of the starter. So no message
//! names a process, and none ends another connection's.
//!
//! The program is always the worker's, with a flag of [`Purpose`]. Arguments and environment are
//! the server's word: this protects the server from the programs, and not the programs from it.

use std::ffi::OsString;

use serde::{Deserialize, Serialize};

use crate::cgroups::Bounds;

pub mod link;
pub mod service;

/// User of the starter's unit.
pub const USER: &str = "gpuserver-worker";
/// Standard streams of a program, which come beside the request.
const STREAMS: usize = 3;

/// Purpose of a program.
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
}

impl Purpose {
    /// Flag of the endpoint of a measurement.
    const MEASURE: &str = "--measure";

    /// Returns the flag of the worker's program.
    pub fn flag(&self) -> &'static str {
        match self {
            Self::Monitor => "--monitor",
            Self::Probe => "--probe",
            Self::Measure(_) => Self::MEASURE,
        }
    }

    /// Returns the number of descriptors beside a request.
    fn descriptors(&self) -> usize {
        match self {
            Self::Monitor | Self::Probe => STREAMS,
            Self::Measure(_) => STREAMS + 1,
        }
    }
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
    fn name(&self) -> String {
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
}

#[cfg(test)]
mod tests;
