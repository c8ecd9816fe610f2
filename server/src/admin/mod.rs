//! Administration of the running server, over `admin.sock` or over the network.
//!
//! A connection to the socket carries one request and one answer, each a little-endian `u32` length
//! and JSON. Root, the server's user and the socket's group may do everything with it. Over the
//! network, a call of the control service carries the same JSON; the caller needs a certificate of
//! an administrator.

pub mod answer;
mod ask;
pub mod remote;
mod socket;

pub use ask::{Answer, Ask, KEPT_HERE, local_only, read};
pub use socket::{MAX_ANSWER, Socket, ask, bind, serve};

pub use crate::refusal::Refusal;
