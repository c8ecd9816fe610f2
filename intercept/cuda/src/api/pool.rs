//! Memory pools that other processes of the lease use, too.
//!
//! A pool travels as memory does ([`share`](super::share)). The 64 bytes of a pointer are a token.

use std::collections::HashMap;
use std::ffi::c_void;
use std::os::fd::IntoRawFd;
use std::sync::{Mutex, PoisonError};

use gpusession_proto::frame::op;
use gpusession_proto::share::Kind;

use super::share::{self, Legacy, POSIX_FD, elsewhere, named};
use crate::client::{Client, string, word};
use crate::entry::{INVALID_VALUE, NOT_SUPPORTED, OPERATING_SYSTEM, Result, UNKNOWN, driver, give};
use crate::ranges::{self, Range};
use crate::{clients, streams};

/// Number of the imports of each imported address.
static IMPORTS: Mutex<Option<HashMap<u64, u32>>> = Mutex::new(None);

/// Calls `work` with the table of imports.
fn imports<T>(work: impl FnOnce(&mut HashMap<u64, u32>) -> T) -> T {
    work(IMPORTS.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default())
}

/// Frees an imported address in a stream's order, and returns the frame's position.
///
/// Waits, because only the driver knows whether an address that was imported twice is freed twice.
pub fn free(client: &Client, address: u64, stream: u64) -> Result<u64> {
    let less = |imports: &mut HashMap<u64, u32>, by: u32| -> Result {
        let count = imports.get_mut(&address).ok_or(INVALID_VALUE)?;
        *count = count.saturating_sub(by);
        if *count == 0 {
            imports.remove(&address);
            ranges::take(address, |kind| kind == ranges::Kind::Imported);
        }
        Ok(())
    };
    imports(|imports| less(imports, 1))?;
    let freed = client.post_if(false, op::cuMemFreeAsync, |w| {
        w.word(address);
        w.word(stream);
    });
    if freed.is_err() {
        let _ = imports(|imports| less(imports, u32::MAX));
    }
    freed
}

/// Forgets the imported addresses of a context that has ended.
pub fn forget(gone: &[Range]) {
    imports(|imports| {
        for range in gone.iter().filter(|range| range.kind == ranges::Kind::Imported) {
            imports.remove(&range.base);
        }
    });
}

/// Imports the memory of a token into an imported pool, and returns the address.
fn import(pool: u64, token: &Legacy) -> Result<u64> {
    let client = clients::of(pool)?;
    named(token, Kind::Pointer)?;
    streams::shares();
    let reply = client.ask(op::SHARE_POINTER_IMPORT, |w| {
        w.word(client.own(pool));
        w.bytes(token);
    })?;
    client.check_status(reply.status).map_err(|status| match status {
        NOT_SUPPORTED => elsewhere(),
        // A token that names nothing is a wrong value here.
        UNKNOWN => INVALID_VALUE,
        other => other,
    })?;
    let mut r = reply.reader();
    let (address, size, device) = (word(&mut r)?, word(&mut r)?, word(&mut r)?);
    if let Err(status) = client.claims.claim("memory of a pool", address, size) {
        client.call(op::cuMemFreeAsync, |w| {
            w.word(address);
            w.word(0);
        })?;
        return Err(status);
    }
    imports(|imports| {
        let count = imports.entry(address).or_default();
        *count += 1;
        if *count == 1 {
            ranges::add(address, size, ranges::Kind::Imported, client.primary(device as u32));
        }
    });
    Ok(address)
}

driver! {
    fn cuMemPoolExportToShareableHandle(shareable: *mut c_void, pool: *mut c_void, kind: u32, flags: u64) {
        let client = clients::of(pool as u64)?;
        if shareable.is_null() || flags != 0 || kind != POSIX_FD {
            return Err(INVALID_VALUE);
        }
        streams::shares();
        let reply = client.call(op::SHARE_POOL, |w| w.word(client.own(pool as u64)))?;
        let mut reader = reply.reader();
        let token = string(&mut reader)?.try_into().map_err(|_| UNKNOWN)?;
        let file = share::seal(token).map_err(|_| OPERATING_SYSTEM)?;
        give(shareable.cast(), file.into_raw_fd())
    }

    fn cuMemPoolImportFromShareableHandle(pool: *mut *mut c_void, shareable: *mut c_void, kind: u32, flags: u64) {
        clients::get()?;
        if pool.is_null() || flags != 0 || kind != POSIX_FD {
            return Err(INVALID_VALUE);
        }
        let token = share::unseal(shareable as usize as i32, Kind::Pool)?;
        streams::shares();
        let (client, reply) = share::import(|client| client.ask(op::SHARE_POOL_IMPORT, |w| w.bytes(&token)))?;
        give(pool, client.name(word(&mut reply.reader())?) as *mut c_void)
    }

    fn cuMemPoolExportPointer(data: *mut Legacy, address: u64) {
        clients::get()?;
        let range = ranges::find(address).filter(|r| r.base == address && r.kind == ranges::Kind::Pool);
        let range = range.filter(|_| !data.is_null()).ok_or(INVALID_VALUE)?;
        streams::shares();
        let reply = clients::of(range.ctx)?.call(op::SHARE_POINTER, |w| w.word(address))?;
        let mut reader = reply.reader();
        give(data, string(&mut reader)?.try_into().map_err(|_| UNKNOWN)?)
    }

    fn cuMemPoolImportPointer(address: *mut u64, pool: *mut c_void, data: *const Legacy) {
        clients::get()?;
        if address.is_null() || data.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the pointer is not null, and by the call's contract it is to 64 bytes.
        let token = unsafe { data.read_unaligned() };
        give(address, import(pool as u64, &token)?)
    }
}
