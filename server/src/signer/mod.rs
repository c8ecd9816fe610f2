//! The signer: the one part that holds the keys of the pool's authorities, and the join tokens.
//!
//! [`keeper`] checks and signs. A server that systemd runs reaches it in a process and a user of
//! its own, `gpuserver-signer`, over [`socket`]; a server without root has it inside its process.
//! Each connection to the socket carries one [`Operation`] and one [`Outcome`], as
//! [`gpusession_proto::message`] encodes them.

pub mod adopt;
pub mod authorities;
pub mod bundle;
pub mod ca;
pub mod checkpoints;
mod earlier;
pub mod fleet;
pub mod issuers;
pub mod keeper;
pub mod link;
mod lock;
pub mod member;
mod operation;
pub mod socket;
pub mod tokens;

pub use operation::{Done, Operation, Outcome, Privileged, RESTATED, Refused, Step, USER, Why};
