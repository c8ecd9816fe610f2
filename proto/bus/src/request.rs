//! Keys and flags of `CreateLease`.

pub const COUNT: &str = "Count";
pub const DEVICES: &str = "Devices";
pub const SERVERS: &str = "Servers";
pub const MODEL: &str = "Model";
pub const MEMORY_BYTES: &str = "MemoryBytes";
pub const MEMORY_FRACTION: &str = "MemoryFraction";
pub const SM_PERCENT: &str = "SMPercent";
pub const SM_COUNT: &str = "SMCount";
pub const SM_AUTO: &str = "SMAuto";
pub const PRIORITY: &str = "Priority";
pub const SHARING: &str = "Sharing";
pub const TTL_USEC: &str = "TTLUSec";
pub const WHO: &str = "Who";
pub const WHY: &str = "Why";
pub const UID: &str = "UID";
pub const SESSION: &str = "Session";
pub const CONTROL_GROUP: &str = "ControlGroup";
pub const IDLE_TIMEOUT_USEC: &str = "IdleTimeoutUSec";

/// Flag: the lease outlives its requester.
pub const PERSISTENT: u64 = 1;
