//! Formats of gpusession that cross a wire; this crate does no I/O.
//!
//! * [`control`]: gRPC between client daemon and server (feature `control`).
//! * `join`: names in certificates, and join tokens; `pinned`: TLS of a join (feature `control`).
//! * [`grant`]: requests of `libcuda.so.1` to the client daemon on its Unix socket.
//! * [`login`]: requests of `pam_gpusession.so` to the client daemon at login, and the answer.
//! * [`ticket`], [`preface`], [`frame`]: the data plane between a program and its worker.
//! * [`launch`]: attributes of launches.
//! * [`measure`]: frames of `gpusession netperf`.
//! * [`journal`]: message ids of the daemons' journal entries.
//! * [`place`]: addresses that a server on another machine cannot have.
//! * [`readings`]: NVML's facts about GPUs, on the grant socket and between `gpuserver` and its
//!   monitor.
//! * `statement`: revocations that hold on each server of a pool (feature `control`).
//! * [`share`]: names of a worker's objects in other processes.
//! * [`supervise`]: between `gpuserver` and its worker processes.
#![forbid(unsafe_code)]

pub mod changes;
pub mod child_graphs;
#[cfg(feature = "control")]
pub mod codec;
pub mod frame;
pub mod grant;
pub mod handle;
pub mod isolation;
#[cfg(feature = "control")]
pub mod join;
pub mod journal;
pub mod launch;
pub mod log_throttle;
pub mod measure;
pub mod message;
#[cfg(feature = "control")]
pub mod pinned;
pub mod place;
pub mod preface;
pub mod readings;
pub mod share;
#[cfg(feature = "control")]
pub mod statement;
pub mod status;
pub mod supervise;
pub mod ticket;
pub mod user_cache;

/// Messages between `pam_gpusession.so` and the client daemon at login.
///
/// They are a crate of their own, so that the PAM module contains no other code.
pub use gpusession_login as login;

/// The control plane, generated from `proto/gpusession/v1/pool.proto`.
#[cfg(feature = "control")]
pub mod control {
    #![allow(missing_docs, clippy::all, clippy::too_many_lines)]
    tonic::include_proto!("gpusession.v1");
}
