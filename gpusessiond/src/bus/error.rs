//! Errors of the API: `org.gpusession1.Error.*`, and D-Bus's own for the rest.

use zbus::message::{Header, Message};
use zbus::names::ErrorName;

use crate::pool::{PoolError, Trouble};

/// A named error with its words.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct BusError {
    name: &'static str,
    message: String,
}

/// Result of a method.
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
    /// There is no such lease.
    no_such_lease = "org.gpusession1.Error.NoSuchLease",
    /// There is no such device.
    no_such_device = "org.gpusession1.Error.NoSuchDevice",
    /// There is no such server.
    no_such_server = "org.gpusession1.Error.NoSuchServer",
    /// There is no such session.
    no_such_session = "org.gpusession1.Error.NoSuchSession",
    /// Every GPU that fits is taken; may be retried.
    no_capacity = "org.gpusession1.Error.NoCapacity",
    /// A limit refuses.
    quota_exceeded = "org.gpusession1.Error.QuotaExceeded",
    /// The lease is lost.
    lease_lost = "org.gpusession1.Error.LeaseLost",
    /// No server answers.
    server_unreachable = "org.gpusession1.Error.ServerUnreachable",
    /// Not yet; may be retried.
    not_ready = "org.gpusession1.Error.NotReady",
    /// Versions do not fit.
    protocol_mismatch = "org.gpusession1.Error.ProtocolMismatch",
    /// The request makes no sense.
    invalid_args = "org.freedesktop.DBus.Error.InvalidArgs",
    /// The caller has too much going on already.
    limits_exceeded = "org.freedesktop.DBus.Error.LimitsExceeded",
    /// A file says something that cannot be used.
    invalid_file = "org.freedesktop.DBus.Error.InvalidFileContent",
    /// The caller may not.
    access_denied = "org.freedesktop.DBus.Error.AccessDenied",
    /// Not in this version, or not on the GPUs that there are.
    not_supported = "org.freedesktop.DBus.Error.NotSupported",
    /// Anything else.
    failed = "org.freedesktop.DBus.Error.Failed",
}

impl BusError {
    /// The error's name.
    pub fn error_name(&self) -> &'static str {
        self.name
    }
}

impl From<PoolError> for BusError {
    fn from(error: PoolError) -> Self {
        let make = match error.trouble {
            Trouble::NoCapacity => Self::no_capacity,
            // Not a matter of time.
            Trouble::NeverFits => Self::not_supported,
            Trouble::NotReady => Self::not_ready,
            Trouble::Quota | Trouble::OutOfMemory => Self::quota_exceeded,
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
