//! Selection of the client whose device memory is at an address.

use gpusession_proto::handle;

use crate::client::Client;
use crate::status::Result;
use crate::{clients, ranges};

/// Returns the context to use for device memory at this address; `None` for other memory.
pub fn home(address: u64) -> Option<u64> {
    match ranges::find(address) {
        Some(range) => range.kind.on_device().then_some(range.ctx),
        None => of_window(address),
    }
}

/// Returns the context for an address of a client's window that is in no allocation.
///
/// `ranges` has neither addresses that the program has only reserved, nor device addresses of
/// registered memory.
pub fn of_window(address: u64) -> Option<u64> {
    clients::all().ok()?.find(|c| c.whole_window.contains(&address)).map(|c| c.primary(0))
}

/// Returns the context as [`home`] does, if the memory belongs to another client.
#[inline]
pub fn elsewhere(client: &Client, address: u64) -> Option<u64> {
    if !clients::several() {
        return None;
    }
    home(address).filter(|ctx| handle::server(*ctx) != client.number)
}

/// Returns the client whose device memory is at this address, or else the current one.
pub fn by_address(address: u64) -> Result<&'static Client> {
    let here = clients::get()?;
    elsewhere(here, address).map_or(Ok(here), clients::by_object)
}
