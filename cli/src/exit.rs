//! Failures of a command: exit code, message and hint.

use std::fmt;

use gpusessiond::identity::IdentityError;
use gpusessiond::pool::{PoolError, Trouble};

/// Result of a command.
pub type Result<T> = std::result::Result<T, Failure>;

/// Exit codes.
pub mod code {
    /// Anything without a code of its own.
    pub const FAILED: i32 = 1;
    /// Wrong use.
    pub const USAGE: i32 = 64;
    /// Daemon or server unreachable.
    pub const UNREACHABLE: i32 = 69;
    /// No capacity now.
    pub const NO_CAPACITY: i32 = 75;
    /// Not allowed.
    pub const NOT_ALLOWED: i32 = 77;
    /// Configuration.
    pub const CONFIGURATION: i32 = 78;
    /// `run` has no lease.
    pub const NO_LEASE: i32 = 125;
}

/// Why a command failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// Exit code.
    pub code: i32,
    /// Subject and cause, in one line.
    pub message: String,
    /// Remedy, printed on a line of its own.
    pub hint: Option<String>,
    /// Whether a server has too few GPUs for the request, free or at all.
    pub no_room: bool,
}

impl Failure {
    /// A failure with its exit code.
    pub fn new(code: i32, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), hint: None, no_room: false }
    }

    /// Wrong use.
    pub fn usage(message: impl Into<String>) -> Self {
        Self::new(code::USAGE, message)
    }

    /// Adds the remedy.
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Sets the exit code of a `run` without lease, distinct from the program's own codes.
    pub fn no_lease(mut self) -> Self {
        self.code = code::NO_LEASE;
        self
    }

    /// Converts an error of the pool.
    pub fn of_pool(error: &PoolError) -> Self {
        let (code, hint) = match error.trouble {
            Trouble::NoCapacity => {
                (code::NO_CAPACITY, "`gpusession status` shows what is free; try again later")
            }
            // Not `NO_CAPACITY`: trying again does not help.
            Trouble::NeverFits => (
                code::FAILED,
                "`gpusession status` shows how many GPUs the servers have; ask for less or another model, or name \
                 several servers: --server A --server B",
            ),
            Trouble::LimitExceeded | Trouble::OutOfMemory => {
                (code::NOT_ALLOWED, "ask for less, or ask the pool's administrator for a higher limit")
            }
            Trouble::NotReady | Trouble::Unreachable => {
                (code::UNREACHABLE, "check the address, and that gpuserver runs there")
            }
            Trouble::Refused => {
                (code::NOT_ALLOWED, "this client's identity is not accepted: join again with a new token")
            }
            Trouble::Protocol => {
                (code::FAILED, "client and server have different versions: update the older one")
            }
            Trouble::Clear => (code::NOT_ALLOWED, ""),
            Trouble::Invalid => (code::USAGE, ""),
            Trouble::NoSuchLease => (code::FAILED, "`gpusession list` shows all leases"),
        };
        let no_room = matches!(error.trouble, Trouble::NoCapacity | Trouble::NeverFits);
        let failure = Self { no_room, ..Self::new(code, error.message.clone()) };
        if hint.is_empty() { failure } else { failure.hint(hint) }
    }

    /// Converts an error of the identity.
    pub fn of_identity(error: &IdentityError) -> Self {
        match error {
            IdentityError::Missing(_) => Self::new(code::CONFIGURATION, error.to_string())
                .hint("an administrator of the pool makes a token with `gpuserver token create`"),
            IdentityError::Pool(error) => Self::of_pool(error),
            IdentityError::File { error: io, .. } if io.kind() == std::io::ErrorKind::PermissionDenied => {
                Self::new(code::NOT_ALLOWED, error.to_string())
            }
            IdentityError::Name(_) => Self::usage(error.to_string()),
            _ => Self::new(code::CONFIGURATION, error.to_string()),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        if let Some(hint) = &self.hint {
            write!(f, "\n  hint: {hint}")?;
        }
        Ok(())
    }
}
