//! Requests of administrators and their answers, as JSON.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::accounting::Wanted;

/// A request of an administrator.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "verb", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Ask {
    /// Show addresses, driver and numbers of the server.
    Status,
    /// List workers.
    Ps,
    /// List workers with the threads of their processes.
    Threads,
    /// List leases.
    Leases,
    /// List GPUs.
    Gpus,
    /// List clients.
    Clients,
    /// Refuse a client from now on.
    Revoke {
        /// Name of the client.
        name: String,
    },
    /// Remove a client.
    Forget {
        /// Name of the client.
        name: String,
    },
    /// Kill a worker, or revoke a lease.
    Kill {
        /// Worker id or its start, or a whole lease id.
        worker: String,
    },
    /// Move the device memory of a lease's programs to host memory.
    Park {
        /// Lease id or its start.
        lease: String,
    },
    /// Move it back, or reacquire the GPUs of a lent lease.
    Unpark {
        /// Lease id or its start.
        lease: String,
    },
    /// Withdraw a GPU; leases on it stay.
    Off {
        /// Index, UUID, or start of the UUID.
        gpu: String,
        /// Explanation for people.
        reason: String,
    },
    /// Lease a withdrawn GPU again.
    On {
        /// As for [`Ask::Off`].
        gpu: String,
    },
    /// Remove a GPU without leases from the pool.
    Drop {
        /// As for [`Ask::Off`].
        gpu: String,
    },
    /// Stop new leases, or resume them.
    Drain {
        /// Whether to resume new leases.
        end: bool,
        /// Explanation for people.
        reason: String,
    },
    /// Stop the server.
    Stop {
        /// Whether to stop without waiting for programs.
        force: bool,
    },
    /// List MPS domains.
    Mps,
    /// List requests that wait for GPUs.
    Queue,
    /// List the limits of a client and a user.
    Limits {
        /// Name of the client; empty: the limits for everybody.
        client: String,
        /// Name of the user; empty: none.
        user: String,
    },
    /// List records of ended leases and programs.
    Accounting {
        /// Selection of records.
        wanted: Wanted,
    },
    /// List the keys of the running configuration.
    Config,
    /// Change a key of the running server, and store the change.
    ConfigSet {
        /// Dotted name of the key.
        key: String,
        /// TOML text of the value; `None` removes the stored change.
        value: Option<String>,
    },
    /// Read the configuration files again.
    Reload,
    /// Create a join token.
    TokenCreate {
        /// Pattern of the client names that can join with it.
        pattern: String,
        /// Number of clients that can join with it.
        uses: u32,
        /// Lifetime, such as `24h`.
        ttl: String,
    },
    /// List join tokens.
    Tokens,
    /// Revoke a join token.
    TokenRevoke {
        /// Token id or its start.
        id: String,
    },
    /// Issue an administrator's certificate.
    AdministratorCreate {
        /// Name of the administrator.
        name: String,
        /// Certificate request (PEM), signed with the new key.
        csr_pem: String,
    },
    /// List administrators.
    Administrators,
    /// Refuse an administrator from now on.
    AdministratorRevoke {
        /// Name of the administrator.
        name: String,
    },
}

impl Ask {
    /// Returns a refusal if this request is not answered over the network.
    pub fn local(&self) -> Option<Refusal> {
        let why = match self {
            Self::Stop { .. } => "a server is stopped on its own host: the command waits for its process",
            Self::AdministratorCreate { .. } => {
                "administrators are made on a server's own host, so that a stolen certificate is worth nothing once it is revoked"
            }
            _ => return None,
        };
        Some(local_only(why))
    }

    /// Time that the caller waits for an answer.
    ///
    /// Killing workers takes a moment, and parking about a second for every few GiB.
    pub fn patience(&self) -> Duration {
        Duration::from_secs(if matches!(self, Self::Park { .. }) { 600 } else { 30 })
    }

    /// Returns `true` if the request may change anything, so that it is logged.
    pub(super) fn changes(&self) -> bool {
        !matches!(
            self,
            Self::Status
                | Self::Ps
                | Self::Threads
                | Self::Leases
                | Self::Gpus
                | Self::Clients
                | Self::Mps
                | Self::Queue
                | Self::Limits { .. }
                | Self::Accounting { .. }
                | Self::Config
                | Self::Tokens
                | Self::Administrators
        )
    }
}

/// Creates the refusal of a verb that is not answered over the network.
pub fn local_only(why: &str) -> Refusal {
    Refusal {
        code: "local".into(),
        message: why.into(),
        hint: "run it on that host, without --server".into(),
    }
}

/// Refusal of an administrator's request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    /// Stable code for programs.
    pub code: String,
    /// Explanation for people.
    pub message: String,
    /// Remedy for people; may be empty.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub hint: String,
}

impl Refusal {
    /// Creates a refusal without a hint.
    pub fn new(code: &str, message: impl Into<String>) -> Self {
        Self { code: code.into(), message: message.into(), hint: String::new() }
    }
}

/// Answer of the server.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Answer {
    /// The request was performed; the value is what the verb shows.
    #[serde(rename = "ok")]
    Ok(serde_json::Value),
    /// The request was refused.
    #[serde(rename = "error")]
    Error(Refusal),
}

pub(super) fn parse(body: &[u8]) -> Result<Ask, Refusal> {
    serde_json::from_slice(body)
        .map_err(|e| Refusal::new("bad-request", format!("the server does not support this request: {e}")))
}

pub(super) fn written(answer: Result<serde_json::Value, Refusal>) -> Vec<u8> {
    let answer = match answer {
        Ok(value) => Answer::Ok(value),
        Err(refusal) => Answer::Error(refusal),
    };
    // JSON and plain texts always serialize.
    serde_json::to_vec(&answer).unwrap_or_default()
}

/// Parses an answer.
pub fn read(body: &[u8]) -> serde_json::Result<Result<serde_json::Value, Refusal>> {
    Ok(match serde_json::from_slice(body)? {
        Answer::Ok(value) => Ok(value),
        Answer::Error(refusal) => Err(refusal),
    })
}
