//! Calls in a context with a fault, or in one that a reset has destroyed.
//!
//! Calls that reach the server get the error from there, or as a late one. The driver also refuses
//! calls that the library answers by itself, and has one error for all objects of a context that a
//! reset has destroyed. The worker's own context of a device lives on.

use gpusession_common::context_calls::{self, Broken};

use crate::client::any_fault;
use crate::devices::any_destroyed;
use crate::status::{CONTEXT_IS_DESTROYED, Result};
use crate::{clients, thread};

/// Returns the current context's error, if a call of this name has to.
#[inline]
pub fn check(name: &str) -> Result {
    if any_fault() || any_destroyed() { check_context(name) } else { Ok(()) }
}

#[cold]
fn check_context(name: &str) -> Result {
    if thread::in_host_function() {
        return Ok(());
    }
    let Some(broken) = broken(thread::current()) else { return Ok(()) };
    context_calls::error(name, broken).map_or(Ok(()), Err)
}

/// Returns why work in a context fails; `None`: it does not, or there is no such context.
pub fn broken(ctx: u64) -> Option<Broken> {
    let (client, device) = clients::of_context(ctx).ok()?;
    match client.context_error() {
        Some(CONTEXT_IS_DESTROYED) => Some(Broken::ResetAfterFault),
        Some(fault) => Some(Broken::Fault(fault)),
        None if ctx != client.primary(device.local) || !device.is_destroyed() => None,
        None => Some(Broken::Destroyed),
    }
}
