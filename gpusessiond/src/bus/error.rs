//! Errors of the API: `org.gpusession1.Error.*`, and standard D-Bus errors for the rest.

use zbus::message::{Header, Message};
use zbus::names::ErrorName;

use crate::pool::{PoolError, Trouble};

/// A D-Bus error: name and message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct BusError {
    name: &'static str,
    message: String,
}

/// Result of a D-Bus method.
pub type Result<T> = std::result::Result<T, BusError>;

macro_rules! errors {
    ($($(#[$doc:meta])* $function:ident = $name:literal),+ $(,)?) => {
        impl BusError {
            $($(#[$doc])* pub fn $function(message: impl Into<String>) -> Self {
                Self { name: $name, message: message.into() }
            })+
        }
    };
}

errors! {
    /// Lease not found.
    no_such_lease = "org.gpusession1.Error.NoSuchLease",
    /// Device not found.
    no_such_device = "org.gpusession1.Error.NoSuchDevice",
    /// Server not found.
    no_such_server = "org.gpusession1.Error.NoSuchServer",
    /// Session not found.
    no_such_session = "org.gpusession1.Error.NoSuchSession",
    /// Every suitable GPU is taken; a later call may succeed.
    no_capacity = "org.gpusession1.Error.NoCapacity",
    /// A limit is reached.
    quota_exceeded = "org.gpusession1.Error.QuotaExceeded",
    /// The lease was lost.
    lease_lost = "org.gpusession1.Error.LeaseLost",
    /// The server does not answer, or does not accept this client.
    server_unreachable = "org.gpusession1.Error.ServerUnreachable",
    /// The daemon is not ready; a later call may succeed.
    not_ready = "org.gpusession1.Error.NotReady",
    /// Client and server have different protocol versions.
    protocol_mismatch = "org.gpusession1.Error.ProtocolMismatch",
    /// An argument is invalid.
    invalid_args = "org.freedesktop.DBus.Error.InvalidArgs",
    /// The caller has too many calls in progress.
    limits_exceeded = "org.freedesktop.DBus.Error.LimitsExceeded",
    /// A configuration file cannot be used.
    invalid_file = "org.freedesktop.DBus.Error.InvalidFileContent",
    /// The caller is not allowed to do this.
    access_denied = "org.freedesktop.DBus.Error.AccessDenied",
    /// Not supported by this version, or by the GPUs of the pool.
    not_supported = "org.freedesktop.DBus.Error.NotSupported",
    /// Any other failure.
    failed = "org.freedesktop.DBus.Error.Failed",
}

impl BusError {
    /// Returns the D-Bus name of the error.
    pub fn error_name(&self) -> &'static str {
        self.name
    }
}

impl From<PoolError> for BusError {
    fn from(error: PoolError) -> Self {
        let make = match error.trouble {
            Trouble::NoCapacity => Self::no_capacity,
            // A later call would not succeed either.
            Trouble::NeverFits => Self::not_supported,
            Trouble::NotReady => Self::not_ready,
            Trouble::LimitExceeded | Trouble::OutOfMemory => Self::quota_exceeded,
            Trouble::Unreachable | Trouble::Refused => Self::server_unreachable,
            Trouble::Protocol => Self::protocol_mismatch,
            Trouble::Invalid => Self::invalid_args,
            Trouble::NoSuchLease => Self::no_such_lease,
        };
        make(error.message)
    }
}

impl From<zbus::Error> for BusError {
    fn from(error: zbus::Error) -> Self {
        Self::failed(error.to_string())
    }
}

impl zbus::DBusError for BusError {
    fn create_reply(&self, call: &Header<'_>) -> zbus::Result<Message> {
        Message::error(call, self.name).build(&(&self.message,))
    }

    fn name(&self) -> ErrorName<'_> {
        ErrorName::from_static_str_unchecked(self.name)
    }

    fn description(&self) -> Option<&str> {
        Some(&self.message)
    }
}
