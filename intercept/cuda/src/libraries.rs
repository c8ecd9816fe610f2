//! Libraries that differ between clients.
//!
//! A library belongs to no context, so it is loaded on every client.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::client::{Client, cross_lease_error};
use crate::status::Result;

/// Exceptions of a library that differs between clients.
#[derive(Default)]
struct Exceptions {
    /// Numbers of clients whose workers could not load the library, with the errors.
    failed: Vec<(u8, i32)>,
    /// Number of the client that has the library's managed variables.
    managed: Option<u8>,
}

static EXCEPTIONS: Mutex<BTreeMap<u64, Exceptions>> = Mutex::new(BTreeMap::new());

fn exceptions() -> MutexGuard<'static, BTreeMap<u64, Exceptions>> {
    EXCEPTIONS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Notes the clients, by number, whose workers could not load a new library, with the errors.
pub fn failed_on(library: u64, failed: Vec<(u8, i32)>) {
    exceptions().insert(library, Exceptions { failed, managed: None });
}

/// Notes that a client has a library's managed variables; the first one keeps them.
pub fn managed_by(library: u64, client: &Client) {
    exceptions().entry(library).or_default().managed.get_or_insert(client.number);
}

/// Removes an unloaded library; returns the numbers of the clients that could not load it.
pub fn forget(library: u64) -> Vec<u8> {
    let known = exceptions().remove(&library).unwrap_or_default();
    known.failed.into_iter().map(|(number, _)| number).collect()
}

/// Returns an error if a library is not loaded on a client, or if another client has its managed
/// variables.
pub fn usable_on(library: u64, client: &Client) -> Result {
    let exceptions = exceptions();
    let Some(known) = exceptions.get(&library) else { return Ok(()) };
    if let Some((_, status)) = known.failed.iter().find(|(number, _)| *number == client.number) {
        return Err(*status);
    }
    match known.managed {
        Some(number) if number != client.number => Err(cross_lease_error("a library with managed variables")),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake_worker::Program;
    use crate::status::NOT_SUPPORTED;

    #[test]
    fn client_uses_a_library_that_it_loaded() {
        let client = Program::new().client;
        assert_eq!(usable_on(1, client), Ok(()), "the same on every client");
        failed_on(1, vec![(client.number + 1, 209)]);
        assert_eq!(usable_on(1, client), Ok(()));
        failed_on(2, vec![(client.number, 209)]);
        assert_eq!(usable_on(2, client), Err(209));
        assert_eq!((forget(2), forget(2)), (vec![client.number], Vec::new()));
        assert_eq!(usable_on(2, client), Ok(()));
    }

    #[test]
    fn managed_variables_stay_with_their_first_client() {
        let client = Program::new().client;
        managed_by(3, client);
        assert_eq!(usable_on(3, client), Ok(()));
        exceptions().entry(4).or_default().managed = Some(client.number + 1);
        managed_by(4, client);
        assert_eq!(usable_on(4, client), Err(NOT_SUPPORTED));
    }
}
