//! Administration of the running server, over `admin.sock` or over the network.
//!
//! A connection to the socket carries one request and one answer, each a little-endian `u32` length
//! and JSON; a process that may open the socket may do everything. Over the network, a call of the
//! control service carries the same JSON; the caller needs an administrator's certificate.

pub mod answer;
mod ask;
pub mod remote;
mod socket;

pub use ask::{Answer, Ask, KEPT_HERE, local_only, read};
pub use socket::{MAX_ANSWER, ask, bind, serve};

pub use crate::refusal::Refusal;
