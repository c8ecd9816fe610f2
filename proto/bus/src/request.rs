//! Keys and flags of `CreateLease`.

/// Number of GPUs (u).
pub const COUNT: &str = "Count";
/// UUIDs of acceptable GPUs (as).
pub const DEVICES: &str = "Devices";
/// Names or addresses of acceptable servers (as).
pub const SERVERS: &str = "Servers";
/// GPU model (s).
pub const MODEL: &str = "Model";
/// Memory of each GPU in bytes (t); excludes [`MEMORY_FRACTION`].
pub const MEMORY_BYTES: &str = "MemoryBytes";
/// Part of each GPU's memory, up to 1 (d).
pub const MEMORY_FRACTION: &str = "MemoryFraction";
/// Percentage of the multiprocessors (u).
pub const SM_PERCENT: &str = "SMPercent";
/// Number of multiprocessors of each GPU (u).
pub const SM_COUNT: &str = "SMCount";
/// Whether the multiprocessors' share equals the memory's (b).
pub const SM_AUTO: &str = "SMAuto";
/// `low`, `normal` or `high` (s).
pub const PRIORITY: &str = "Priority";
/// `time-slice`, `mps` or `exclusive` (s).
pub const SHARING: &str = "Sharing";
/// Time to live in microseconds, from the grant or the last renewal; 0 for none (t).
pub const TTL_USEC: &str = "TTLUSec";
/// Program that asks, for people (s).
pub const WHO: &str = "Who";
/// Reason, for people (s).
pub const WHY: &str = "Why";
/// Uid of the owner, if it is another user than the caller (u).
pub const UID: &str = "UID";
/// Id of the login session whose end releases the lease (s).
pub const SESSION: &str = "Session";
/// Control group whose processes alone use the lease (s).
pub const CONTROL_GROUP: &str = "ControlGroup";
/// Rest in microseconds after which the server parks or releases it; 0 for none (t).
pub const IDLE_TIMEOUT_USEC: &str = "IdleTimeoutUSec";

/// Flag: the lease outlives its requester.
pub const PERSISTENT: u64 = 1;
