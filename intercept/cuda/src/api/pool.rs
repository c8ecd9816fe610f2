//! Memory pools that other processes of the lease use, too.
//!
//! A pool travels as memory does ([`share`](super::share)). The 64 bytes of a pointer are a token.

use std::ffi::c_void;
use std::os::fd::IntoRawFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

use gpusession_proto::frame::op;
use gpusession_proto::share::Kind;

use super::share::{self, Legacy, POSIX_FD, elsewhere, named};
use crate::client::{Client, string, word};
use crate::entry::{INVALID_VALUE, NOT_SUPPORTED, OPERATING_SYSTEM, Result, UNKNOWN, driver, give};
use crate::ranges;
use crate::{clients, streams};

/// Keeps one range for an address that several threads import at a time.
static IMPORTING: Mutex<()> = Mutex::new(());

fn importing() -> MutexGuard<'static, ()> {
    IMPORTING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Frees an imported address in a stream's order, and returns the frame's position.
///
/// One free ends all imports of the address (H100, driver 580).
pub fn free(client: &Client, address: u64, stream: u64) -> Result<u64> {
    let taken = {
        let _importing = importing();
        ranges::take(address, |kind| kind == ranges::Kind::Imported)
    };
    taken.ok_or(INVALID_VALUE)?;
    client.post_if(false, op::cuMemFreeAsync, |w| {
        w.word(address);
        w.word(stream);
    })
}

/// Imports the memory of a token into an imported pool, and returns the address.
fn import(pool: u64, token: &Legacy) -> Result<u64> {
    let client = clients::by_object(pool)?;
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
    let _importing = importing();
    if ranges::find(address).is_none_or(|known| known.kind != ranges::Kind::Imported) {
        ranges::add(address, size, ranges::Kind::Imported, client.primary(device as u32));
    }
    Ok(address)
}

driver! {
    fn cuMemPoolExportToShareableHandle(shareable: *mut c_void, pool: *mut c_void, kind: u32, flags: u64) {
        let client = clients::by_object(pool as u64)?;
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
        let range = ranges::find(address).filter(|r| r.base == address && matches!(r.kind, ranges::Kind::Pool(_)));
        let range = range.filter(|_| !data.is_null()).ok_or(INVALID_VALUE)?;
        streams::shares();
        let reply = clients::by_object(range.ctx)?.call(op::SHARE_POINTER, |w| w.word(address))?;
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
