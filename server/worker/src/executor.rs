//! State of the threads that replay frames.

/// State of one executor thread.
pub struct Executor {
    /// Handle of the context that is current in this OS thread.
    pub current: u64,
    /// Number of the executor, from 0.
    pub id: usize,
}
