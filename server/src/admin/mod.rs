//! Administration of the running server, over `admin.sock` or over the network.
//!
//! A connection to the socket carries one request and one answer, each a little-endian `u32` length
//! and JSON; a process that may open the socket may do everything. Over the network, a call of the
//! control service carries the same JSON; the caller needs an administrator's certificate.

mod answer;
pub mod ask;
pub mod remote;
mod rows;
mod socket;

pub use answer::{a_name, no_token, not_issued, token_ttl};
pub use ask::{Answer, Ask, Refusal, local_only, read};
pub use rows::{
    AdministratorRow, AdministratorView, ClientRow, ConfigRow, GpuRow, LeaseDevice, LeaseRow, LimitRow,
    PsRow, QueueRow, StatusView, StopView, TokenRow, TokenView, administrator_rows, config_rows, token_rows,
};
pub use socket::{MAX_ANSWER, ask, bind, serve};
