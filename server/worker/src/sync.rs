//! Locks, atomics and threads of the replay.
//!
//! With the feature `schedules`, a test chooses which thread runs next at each of them.

#[cfg(not(feature = "schedules"))]
pub use std::{
    sync::{Condvar, Mutex, MutexGuard, atomic},
    thread::Builder,
};

#[cfg(feature = "schedules")]
pub use shuttle::{
    sync::{Condvar, Mutex, MutexGuard, atomic},
    thread::Builder,
};
