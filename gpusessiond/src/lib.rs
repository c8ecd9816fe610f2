//! Client side of gpusession: what the daemon is made of, and what `gpusession run --server` needs of it.
//!
//! * [`leases`]: the lease manager, a state machine behind the trait [`leases::Leases`];
//! * [`client`], [`identity`]: the pool over the network, and who this client is in it;
//! * [`grant`]: the socket on which programs ask for GPUs;
//! * [`login`]: the socket on which PAM tells of login sessions;
//! * [`environment`]: what logins are given;
//! * [`bus`]: `org.gpusession1` on D-Bus;
//! * [`keep`]: what outlives the daemon; [`notice`]: what shells say at their next prompt;
//! * [`config`], [`settings`], [`access`], [`places`], [`values`], [`arguments`]: configuration.

pub mod access;
pub mod arguments;
pub mod bus;
pub mod client;
pub mod config;
pub mod environment;
pub mod grant;
pub mod identity;
pub mod keep;
pub mod leases;
pub mod login;
pub mod notice;
pub mod places;
pub mod pool;
pub mod settings;
pub mod values;
