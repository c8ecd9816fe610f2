//! Login sessions.

use serde::{Deserialize, Serialize};

/// A login of a user on this host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Session {
    /// Id of the session: the login's `GPUSESSION_ID`.
    pub id: String,
    /// Uid of the user who logged in.
    pub uid: u32,
    /// Name of that user.
    pub user: String,
    /// PAM service that opened it.
    pub service: String,
    /// Terminal; empty without one, or if the program does not know it yet, as sshd.
    pub tty: String,
    /// Host that the user comes from; empty if unknown.
    pub rhost: String,
    /// Pid of the process that opened it first.
    pub leader: u32,
    /// Start of that process in clock ticks since boot; distinguishes processes with a reused pid.
    pub leader_start: u64,
    /// Id of logind's session that the leader belongs to, if any.
    pub logind: Option<String>,
}
