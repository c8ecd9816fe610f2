//! `gpuserver`: leases this host's GPUs to clients, and runs their driver calls in workers.
//!
//! * [`config`]: the configuration file.
//! * [`lease`], [`registry`]: the leases, their shares of GPUs, and the queue.
//! * [`limits`]: limits of clients and users.
//! * [`pool`]: the pool's clients and administrators, and the control service on top of them.
//! * [`signer`]: the keys of the pool's authorities and the join tokens.
//! * [`statements`]: revocations that hold on each server of the pool.
//! * [`supervise`]: worker processes: started warm, handed sockets, killed in time.
//! * [`spawn`]: starts of worker processes, and of the daemons of MPS.
//! * [`starter`]: starts of programs that load the driver, as a user of their own.
//! * [`mps`]: NVIDIA's Multi-Process Service: one control daemon for each fault domain.
//! * [`data`]: the acceptor that hands data connections to workers.
//! * [`certificate`], [`connections`]: peers of the control port.
//! * [`accounting`], [`usage`]: records of ended leases and programs, and sums of use.
//! * [`gpu_lock`]: one server per GPU on a host.
//! * [`health`]: faults that withdraw a GPU.
//! * [`discovery`]: the GPUs that the driver reports.
//! * [`metrics`]: figures for Prometheus.
//! * [`admin`], [`cli`]: administration over a local socket or the network.
//! * [`serve`]: the server process.

pub mod accounting;
pub mod acts;
pub mod admin;
mod as_owner;
pub mod audit;
pub mod cache;
pub mod certificate;
pub mod cgroups;
pub mod checkpoint;
pub mod cli;
pub mod clock;
pub mod config;
pub mod connections;
pub mod data;
pub mod discovery;
pub mod gpu_lock;
pub mod health;
pub mod idle;
pub mod isolation;
pub mod lease;
pub mod limits;
pub mod local_service;
pub mod log;
pub mod metrics;
pub mod monitor;
pub mod mps;
pub mod net;
pub mod netperf;
pub mod peer;
pub mod peer_slots;
mod pidfd;
pub mod pool;
pub use gpusession_proto::log_throttle;
pub mod refusal;
pub mod registry;
pub mod serve;
pub mod signer;
pub mod spawn;
pub mod starter;
pub mod statements;
pub mod store;
pub mod supervise;
pub mod text;
pub mod threads;
pub mod usage;
