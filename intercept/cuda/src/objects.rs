//! Translation of a worker's device numbers and object names for a program with several workers.
//!
//! With a single worker the names are equal on both sides.

use gpusession_proto::handle;

use crate::client::{Client, cross_lease_error};
use crate::status::{INVALID_HANDLE, INVALID_VALUE, Result};
use crate::{clients, mapped, route};

/// Returns an error for a handle of another kind.
pub fn check_kind(handle: u64, kind: u8) -> Result {
    if handle::kind(handle) == kind { Ok(()) } else { Err(INVALID_HANDLE) }
}

fn word(structure: &[u8], at: usize) -> Result<u64> {
    let bytes = structure.get(at..at + 8).ok_or(INVALID_VALUE)?;
    Ok(bytes.try_into().map_or(0, u64::from_le_bytes))
}

fn put(structure: &mut [u8], at: usize, word: u64) {
    if let Some(bytes) = structure.get_mut(at..at + 8) {
        bytes.copy_from_slice(&word.to_le_bytes());
    }
}

/// Translates a list of a client's objects, 8 bytes each, into the worker's names.
pub fn own(client: &Client, objects: &[u8]) -> Result<Vec<u8>> {
    let mut own = objects.to_vec();
    for at in (0..own.len() / 8).map(|i| i * 8) {
        let object = word(objects, at)?;
        client.same(clients::by_object(object)?)?;
        put(&mut own, at, client.own(object));
    }
    Ok(own)
}

/// `CU_MEM_LOCATION_TYPE_DEVICE`
const DEVICE: u32 = 1;

/// Translates the `CUmemLocation`s in structures of `len` bytes, each at byte `at` (type, then id).
///
/// Returns the structures with the worker's device numbers, and their client. Without a device
/// among them, that is the current context's client.
pub fn locations(structures: &[u8], len: usize, at: usize) -> Result<(Vec<u8>, &'static Client)> {
    let (mut own, mut found) = (structures.to_vec(), None);
    for at in (0..structures.len() / len).map(|i| i * len + at) {
        let location = word(structures, at)?;
        if location as u32 == DEVICE {
            let (client, device) = clients::device((location >> 32) as i32)?;
            found.get_or_insert(client).same(client)?;
            put(&mut own, at, u64::from(DEVICE) | u64::from(device.local) << 32);
        }
    }
    Ok((own, found.map_or_else(clients::get, Ok)?))
}

/// Translates a `CUmemLocation` at byte `at` of a worker's answer into the program's device number.
pub fn told_location(client: &Client, answer: &[u8], at: usize) -> Result<Vec<u8>> {
    let mut told = answer.to_vec();
    let location = word(answer, at)?;
    if location as u32 == DEVICE
        && let Some(device) = client.devices.get((location >> 32) as usize)
    {
        put(&mut told, at, u64::from(DEVICE) | u64::from(device.ordinal as u32) << 32);
    }
    Ok(told)
}

/// Offset of a `CUDA_RESOURCE_DESC`'s array, mipmapped array or address; its kind is at offset 0.
const RESOURCE: usize = 8;
const FIRST_ADDRESS: u32 = 2;

/// Translates a `CUDA_RESOURCE_DESC` into the names of the client's worker.
pub fn resource(client: &'static Client, description: &[u8]) -> Result<Vec<u8>> {
    let mut own = description.to_vec();
    let resource = word(description, RESOURCE)?;
    if word(description, 0)? as u32 >= FIRST_ADDRESS {
        if route::elsewhere(client, resource).is_some() {
            return Err(cross_lease_error("memory of a texture or surface"));
        }
        mapped::named(client, resource)?;
    } else {
        client.same(clients::by_object(resource)?)?;
        put(&mut own, RESOURCE, client.own(resource));
    }
    Ok(own)
}

/// Translates a worker's `CUDA_RESOURCE_DESC` into the program's names.
pub fn told_resource(client: &Client, answer: &[u8]) -> Result<Vec<u8>> {
    let mut told = answer.to_vec();
    if (word(answer, 0)? as u32) < FIRST_ADDRESS {
        put(&mut told, RESOURCE, client.name(word(answer, RESOURCE)?));
    }
    Ok(told)
}
