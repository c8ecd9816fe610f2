//! `gpuserver`: leases this host's GPUs to virtual machines and runs their programs' driver calls in workers.
//!
//! * [`config`]: the configuration file.
//! * [`lease`], [`registry`]: who holds which part of which GPU, and for how long, and who waits.
//! * [`limits`]: what a client or a user may have.
//! * [`pool`]: the pool's authority, join tokens, clients, and the control service on top of them.
//! * [`supervise`]: worker processes: started warm, handed sockets, ended in time.
//! * [`mps`]: NVIDIA's Multi-Process Service, one control daemon for what shares a fault.
//! * [`data`]: the acceptor that hands data connections to workers.
//! * [`accounting`]: who used what for how long.
//! * [`gpu_lock`]: one server per GPU on a host.
//! * [`health`]: what takes a GPU out of what is leased.
//! * [`discovery`]: which GPUs the driver shows.
//! * [`metrics`]: what Prometheus reads.
//! * [`admin`], [`cli`]: administration over a local socket.
//! * [`serve`]: all of it as one process.
#![deny(missing_docs)]

pub mod accounting;
pub mod admin;
pub mod cache;
pub mod cli;
pub mod clock;
pub mod config;
pub mod crowd;
pub mod data;
pub mod discovery;
pub mod gpu_lock;
pub mod guard;
pub mod health;
pub mod idle;
pub mod lease;
pub mod limits;
pub mod metrics;
pub mod monitor;
pub mod mps;
pub mod net;
pub mod pool;
pub use gpusession_proto::quiet;
pub mod registry;
pub mod serve;
pub mod store;
pub mod supervise;
pub mod threads;
