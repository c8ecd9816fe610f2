//! Values of `CUlimit` that the program has set, by context.

use std::collections::{BTreeMap, HashMap};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

type ByContext = HashMap<u64, BTreeMap<i32, u64>>;

fn set() -> MutexGuard<'static, ByContext> {
    static SET: LazyLock<Mutex<ByContext>> = LazyLock::new(Mutex::default);
    SET.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns a context's value of a limit that the program has set there.
pub fn get(ctx: u64, limit: i32) -> Option<u64> {
    set().get(&ctx)?.get(&limit).copied()
}

/// Notes the value that the driver has set, which may differ from the program's.
pub fn note(ctx: u64, limit: i32, value: u64) {
    set().entry(ctx).or_default().insert(limit, value);
}

/// Forgets the limits of a context that is destroyed or reset.
pub fn forget_context(ctx: u64) {
    set().remove(&ctx);
}
