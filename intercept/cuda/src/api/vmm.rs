//! Virtual memory: reserved addresses, and physical memory that the program maps there itself.

use std::ffi::c_void;

use gpusession_proto::frame::op;

use crate::client::{Client, string};
use crate::entry::{INVALID_VALUE, Result, UNKNOWN, driver, give};
use crate::ranges::{self, Kind};
use crate::window::GRANULE;
use crate::{clients, route};

driver! {
    fn cuMemAddressReserve(address: *mut u64, size: usize, alignment: usize, _hint: u64, flags: u64) {
        let client = clients::get()?;
        if address.is_null() || flags != 0 {
            return Err(INVALID_VALUE);
        }
        // The program's address is only a hint: reservations come from the window that both sides
        // hold.
        give(address, client.window().reserve(size as u64, alignment as u64)?)
    }

    fn cuMemAddressFree(address: u64, size: usize) {
        route::at(address)?.window().unreserve(address, size as u64)
    }

    fn cuMemGetAllocationGranularity(granularity: *mut usize, _properties: *const c_void, _option: i32) {
        clients::get()?;
        give(granularity, GRANULE as usize)
    }

    fn cuMemMap(address: u64, size: usize, offset: usize, handle: u64, flags: u64) {
        let client = route::at(address)?;
        client.same(clients::of(handle)?)?;
        let handle = client.own(handle);
        let device = device_of(client, handle)?;
        client.call(op::cuMemMap, |w| {
            w.word(address);
            w.word(size as u64);
            w.word(offset as u64);
            w.word(handle);
            w.word(flags);
        })?;
        ranges::add(address, size as u64, Kind::Mapped, client.primary(device));
        Ok(())
    }

    fn cuMemUnmap(address: u64, size: usize) {
        let client = route::at(address)?;
        client.call(op::cuMemUnmap, |w| {
            w.word(address);
            w.word(size as u64);
        })?;
        ranges::unmapped(address, size as u64);
        Ok(())
    }
}

/// Returns the worker's number of the device that holds physical memory.
fn device_of(client: &Client, handle: u64) -> Result<u32> {
    if client.devices.len() == 1 {
        return Ok(0);
    }
    let reply = client.call(op::cuMemGetAllocationPropertiesFromHandle, |w| w.word(handle))?;
    let mut reader = reply.reader();
    // `CUmemAllocationProp`: type, handle types, then the location's type and id.
    let device = string(&mut reader)?.get(12..16).and_then(|id| id.try_into().ok()).map(u32::from_ne_bytes);
    device.filter(|d| (*d as usize) < client.devices.len()).ok_or(UNKNOWN)
}
