//! Client side of gpusession: the modules of the daemon, and of `gpusession run --server`.
//!
//! * [`leases`]: the lease manager, a state machine behind the trait [`leases::Leases`];
//! * [`client`], [`identity`]: the pool over the network, and this client's identity in it;
//! * [`grant`]: the socket on which programs request GPUs;
//! * [`peer`]: the process at the other end of these sockets;
//! * [`login`]: the socket on which PAM reports login sessions;
//! * [`environment`]: variables that logins get, and who gets them;
//! * [`bus`]: `org.gpusession1` on D-Bus;
//! * [`handover`]: state that outlives the daemon; [`notice`]: notices at the shells' next prompt;
//! * [`survey`]: the servers' descriptions now;
//! * [`access`], [`subuid`]: users and what they may;
//! * [`config`], [`settings`], [`paths`], [`units`], [`arguments`]: configuration.

pub mod access;
pub mod addresses;
pub mod arguments;
pub mod bus;
pub mod client;
pub mod config;
pub mod environment;
pub mod grant;
pub mod handover;
pub mod identity;
pub mod leases;
pub mod login;
pub mod notice;
pub mod paths;
pub mod peer;
pub mod pool;
pub mod renewal;
pub mod settings;
pub mod subuid;
pub mod survey;
pub mod trust;
pub mod units;
