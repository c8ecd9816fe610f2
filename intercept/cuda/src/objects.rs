//! What a worker's own numbers of devices and names of objects are to a program with several workers. A program with one is told
//! them as they are.

use crate::client::Client;
use crate::clients;
use crate::entry::{INVALID_VALUE, Result};

fn word(structure: &[u8], at: usize) -> Result<u64> {
    let bytes = structure.get(at..at + 8).ok_or(INVALID_VALUE)?;
    Ok(bytes.try_into().map_or(0, u64::from_le_bytes))
}

fn put(structure: &mut [u8], at: usize, word: u64) {
    if let Some(bytes) = structure.get_mut(at..at + 8) {
        bytes.copy_from_slice(&word.to_le_bytes());
    }
}

/// A list of objects of a client, as its worker names them.
pub fn own(client: &Client, objects: &[u8]) -> Result<Vec<u8>> {
    let mut own = objects.to_vec();
    for at in (0..own.len() / 8).map(|i| i * 8) {
        let object = word(objects, at)?;
        client.same(clients::of(object)?)?;
        put(&mut own, at, client.own(object));
    }
    Ok(own)
}

/// `CU_MEM_LOCATION_TYPE_DEVICE`
const DEVICE: u32 = 1;

/// Structures of `len` bytes, each with a `CUmemLocation` (type, then id) at byte `at`: with devices as their worker numbers them,
/// and its client; without a device that of the current context.
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

/// The other way round, in an answer of a worker.
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

/// Where a `CUDA_RESOURCE_DESC` has its array, mipmapped array or address; its kind comes first.
const RESOURCE: usize = 8;
const FIRST_ADDRESS: u32 = 2;

/// A `CUDA_RESOURCE_DESC` as the client's worker takes it.
pub fn resource(client: &Client, description: &[u8]) -> Result<Vec<u8>> {
    let mut own = description.to_vec();
    let resource = word(description, RESOURCE)?;
    if word(description, 0)? as u32 >= FIRST_ADDRESS {
        if clients::elsewhere(client, resource).is_some() {
            return Err(clients::apart("a texture's or surface's memory"));
        }
    } else {
        client.same(clients::of(resource)?)?;
        put(&mut own, RESOURCE, client.own(resource));
    }
    Ok(own)
}

/// The other way round.
pub fn told_resource(client: &Client, answer: &[u8]) -> Result<Vec<u8>> {
    let mut told = answer.to_vec();
    if (word(answer, 0)? as u32) < FIRST_ADDRESS {
        put(&mut told, RESOURCE, client.name(word(answer, RESOURCE)?));
    }
    Ok(told)
}
