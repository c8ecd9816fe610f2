//! Another server of the pool, as this one knows it.

use crate::clock::Moment;

/// Another server of the pool, and the latest contact with it.
#[derive(Debug, Clone, Default)]
pub struct Peer {
    /// Address, HOST:PORT.
    pub address: String,
    /// Name by its own word; empty until it has answered.
    pub server: String,
    /// Latest time at which this server had all its statements, in seconds since 1970.
    pub contact_unix: Option<u64>,
    /// Time since the host's start of the same.
    pub contact: Option<Moment>,
    /// Reason for which the latest try failed; empty if it did not.
    pub trouble: String,
    /// Run and place of the latest statement taken from it.
    pub(super) run: Vec<u8>,
    pub(super) after: u64,
    /// Reason for which some of the statements up to that place were not taken.
    pub(super) left_out: String,
    pub(super) warned: Option<Moment>,
}
