//! Errors of the API: `org.gpusession1.Error.*`, and standard D-Bus errors for the rest.

use gpusession_bus::error;
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
    ($($function:ident = $name:expr),+ $(,)?) => {
        impl BusError {
            $(/// Creates the error with this D-Bus name; `message` is one line for the caller.
            pub fn $function(message: impl Into<String>) -> Self {
                Self { name: $name, message: message.into() }
            })+
        }
    };
}

errors! {
    no_such_lease = error::NO_SUCH_LEASE,
    no_such_device = error::NO_SUCH_DEVICE,
    no_such_server = error::NO_SUCH_SERVER,
    no_such_session = error::NO_SUCH_SESSION,
    no_capacity = error::NO_CAPACITY,
    quota_exceeded = error::QUOTA_EXCEEDED,
    lease_lost = error::LEASE_LOST,
    server_unreachable = error::SERVER_UNREACHABLE,
    not_ready = error::NOT_READY,
    protocol_mismatch = error::PROTOCOL_MISMATCH,
    invalid_args = error::INVALID_ARGS,
    limits_exceeded = error::LIMITS_EXCEEDED,
    invalid_file = error::INVALID_FILE_CONTENT,
    access_denied = error::ACCESS_DENIED,
    not_supported = error::NOT_SUPPORTED,
    failed = error::FAILED,
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
            Trouble::NeverFits | Trouble::Clear => Self::not_supported,
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
