//! Names of the errors that the daemon returns.

/// Lease not found.
pub const NO_SUCH_LEASE: &str = "org.gpusession1.Error.NoSuchLease";
/// Device not found.
pub const NO_SUCH_DEVICE: &str = "org.gpusession1.Error.NoSuchDevice";
/// Server not found.
pub const NO_SUCH_SERVER: &str = "org.gpusession1.Error.NoSuchServer";
/// Session not found.
pub const NO_SUCH_SESSION: &str = "org.gpusession1.Error.NoSuchSession";
/// Every suitable GPU is taken; a later call may succeed.
pub const NO_CAPACITY: &str = "org.gpusession1.Error.NoCapacity";
/// A limit is reached.
pub const QUOTA_EXCEEDED: &str = "org.gpusession1.Error.QuotaExceeded";
/// The lease was lost.
pub const LEASE_LOST: &str = "org.gpusession1.Error.LeaseLost";
/// The server does not answer, or does not accept this client.
pub const SERVER_UNREACHABLE: &str = "org.gpusession1.Error.ServerUnreachable";
/// The daemon is not ready; a later call may succeed.
pub const NOT_READY: &str = "org.gpusession1.Error.NotReady";
/// Client and server have different protocol versions.
pub const PROTOCOL_MISMATCH: &str = "org.gpusession1.Error.ProtocolMismatch";
/// An argument is invalid.
pub const INVALID_ARGS: &str = "org.freedesktop.DBus.Error.InvalidArgs";
/// The caller has too many calls in progress.
pub const LIMITS_EXCEEDED: &str = "org.freedesktop.DBus.Error.LimitsExceeded";
/// A configuration file cannot be used.
pub const INVALID_FILE_CONTENT: &str = "org.freedesktop.DBus.Error.InvalidFileContent";
/// The caller is not allowed to do this.
pub const ACCESS_DENIED: &str = "org.freedesktop.DBus.Error.AccessDenied";
/// Not supported by this version, or by the GPUs of the pool.
pub const NOT_SUPPORTED: &str = "org.freedesktop.DBus.Error.NotSupported";
/// Any other failure.
pub const FAILED: &str = "org.freedesktop.DBus.Error.Failed";
