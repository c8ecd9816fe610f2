//! Calls in a context with a fault.
//!
//! Calls that reach the server get the error from there, or as a late one. The driver also refuses
//! calls that the library answers by itself, and has one error for all objects of a context that a
//! reset has destroyed.

use gpusession_common::context_calls;

use crate::client::any_fault;
use crate::status::{CONTEXT_IS_DESTROYED, Result};
use crate::{clients, thread};

/// Returns the current context's error, if a call of this name has to.
#[inline]
pub fn check(name: &str) -> Result {
    if any_fault() { check_context(name) } else { Ok(()) }
}

#[cold]
fn check_context(name: &str) -> Result {
    if thread::in_host_function() {
        return Ok(());
    }
    let Ok((client, _)) = clients::of_context(thread::current()) else { return Ok(()) };
    let Some(error) = client.context_error() else { return Ok(()) };
    context_calls::error(name, error, error == CONTEXT_IS_DESTROYED).map_or(Ok(()), Err)
}
