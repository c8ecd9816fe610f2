//! Memory pools of one process in others of its lease.
//!
//! A process imports a pool as a descriptor of the driver, and then single addresses of its memory
//! by the driver's 64 bytes. Workers pass those to each other in a sealed memory file.

use std::ffi::c_void;
use std::os::fd::{AsRawFd, OwnedFd};

use gpusession_proto::frame::Reader;
use gpusession_proto::share::{Kind, Token};
use gpusession_proto::supervise::Charge;

use super::share::{descriptor, request};
use crate::answer::{Answer, Done, Failure};
use crate::driver::{Address, POSIX_FD, check, status};
use crate::objects::known::{self, Owner};
use crate::objects::pools::{Pool, unseal};
use crate::objects::shares::{Object, Source};
use crate::session::Session;

/// `SHARE_POOL`: pool; answers a token.
pub fn export(session: &Session, r: &mut Reader<'_>, answer: &mut Answer) -> Done {
    let handle = r.word()?;
    session.shares.possible()?;
    let mut state = session.allocations.lock();
    let pool = state.pools.get_mut(&handle).filter(|pool| pool.imported.is_none());
    let pool = pool.ok_or(status::INVALID_VALUE)?;
    let source = Source::Pool(handle);
    if pool.share.is_none() {
        // The driver judges whether this pool may be shared.
        descriptor(session, &source)?;
    }
    // Its own process counts what the pool holds; an importer may have to count the parts.
    let charge = Charge { device: pool.device, bytes: 0 };
    let name = session.shares.name(&mut pool.share, Kind::Pool, source, charge);
    let name = name.ok_or(status::OPERATING_SYSTEM)?;
    answer.bytes(&Token { name, offset: 0, size: 0 }.bytes());
    Ok(())
}

/// `SHARE_POOL_IMPORT`: a token; answers the driver's handle of the pool.
pub fn import(session: &Session, r: &mut Reader<'_>, answer: &mut Answer) -> Done {
    let (token, given) = request(session, r, Kind::Pool)?;
    let object = (token.name.worker, token.name.object);
    let (mut handle, raw) = (0, given.as_raw_fd() as usize as *mut c_void);
    let import = session.driver.call.cuMemPoolImportFromShareableHandle;
    // SAFETY: for this handle type the pointer is the number of a descriptor, which stays open
    // during the call; the out pointer is valid.
    check(unsafe { import(&mut handle, raw, POSIX_FD, 0) })
        .inspect_err(|_| session.shares.dropped(&mut session.shares.exports(), object))?;
    let mut state = session.allocations.lock();
    let mut exports = session.shares.exports();
    let pool = Pool { imported: Some(object), ..Pool::new(exports.charge_of(&object).device) };
    // One record stands for one import, if the driver returns the handle that it has already.
    if let Some(earlier) = state.pools.insert(handle, pool).and_then(|pool| pool.imported) {
        session.shares.dropped(&mut exports, earlier);
    }
    session.known.note(known::Kind::Pool, handle, Owner::default());
    answer.word(handle);
    Ok(())
}

/// `SHARE_POINTER`: address where memory of a shareable pool begins; answers a token.
pub fn export_pointer(session: &Session, r: &mut Reader<'_>, answer: &mut Answer) -> Done {
    let address = r.word()?;
    session.shares.possible()?;
    let mut state = session.allocations.lock();
    let pointer = state.pointers.get_mut(address).ok_or(status::INVALID_VALUE)?;
    let source = Source::Pointer(address);
    if pointer.share.is_none() {
        descriptor(session, &source)?;
    }
    let charge = Charge { device: pointer.device, bytes: pointer.bytes };
    let name = session.shares.name(&mut pointer.share, Kind::Pointer, source, charge);
    let name = name.ok_or(status::OPERATING_SYSTEM)?;
    answer.bytes(&Token { name, offset: 0, size: pointer.bytes }.bytes());
    Ok(())
}

/// Maps what another worker's driver tells about an address; the pool is known to be imported.
fn import_data(session: &Session, pool: u64, given: OwnedFd) -> Result<Address, Failure> {
    let mut data = unseal(given).ok_or(status::INVALID_VALUE)?;
    let mut address = 0;
    let import = session.driver.call.cuMemPoolImportPointer;
    // SAFETY: a pool of this worker; the pointers are to memory of the stated size.
    check(unsafe { import(&mut address, pool, (&raw mut data).cast()) })?;
    Ok(address)
}

/// `SHARE_POINTER_IMPORT`: imported pool, a token; answers address, bytes and device.
pub fn import_pointer(session: &Session, r: &mut Reader<'_>, answer: &mut Answer) -> Done {
    let pool = r.word()?;
    let known = session.allocations.lock().pools.get(&pool).and_then(|pool| pool.imported);
    let of = known.ok_or(status::INVALID_VALUE)?;
    let (token, given) = request(session, r, Kind::Pointer)?;
    let object = (token.name.worker, token.name.object);
    // The driver compares pool and data; data of another process need not get that far.
    let same = if of.0 == object.0 { Ok(()) } else { Err(status::INVALID_VALUE.into()) };
    let address = same
        .and_then(|()| import_data(session, pool, given))
        .inspect_err(|_| session.shares.dropped(&mut session.shares.exports(), object))?;
    let charge = session.shares.exports().charge_of(&object);
    session.allocations.lock().pointers.imported(address, object);
    answer.word(address);
    answer.word(charge.bytes);
    answer.word(u64::from(charge.device));
    Ok(())
}

/// Replays the destruction of a pool.
pub fn destroy(session: &Session, handle: u64, replay: impl FnOnce() -> Done) -> Done {
    let pool = {
        let mut state = session.allocations.lock();
        let pool = state.pools.remove(&handle);
        // From here on no other process gets it.
        if let Some(share) = pool.and_then(|pool| pool.share) {
            session.shares.moved(&mut session.shares.exports(), share, None);
        }
        pool
    };
    let destroyed = replay();
    match (pool, &destroyed) {
        (Some(pool), Err(_)) => {
            let kept = Pool { share: None, ..pool };
            session.allocations.lock().pools.entry(handle).or_insert(kept);
        }
        (Some(Pool { imported: Some(object), .. }), Ok(())) => {
            session.shares.dropped(&mut session.shares.exports(), object);
        }
        _ => {}
    }
    destroyed
}

/// Replays `cuMemFreeAsync`.
pub fn free(session: &Session, address: Address, replay: impl FnOnce() -> Done) -> Done {
    let own = {
        let own = session.allocations.lock().pointers.take(address);
        // From here on no other process gets it.
        if let Some(share) = own.and_then(|own| own.share) {
            session.shares.moved(&mut session.shares.exports(), share, None);
        }
        own
    };
    let freed = replay();
    let mut state = session.allocations.lock();
    match (own, &freed) {
        (Some(own), Err(_)) => state.pointers.keep(address, own),
        // One free ends all imports of the address; an error says that the driver knows none.
        (None, Ok(()) | Err(Failure::Status(status::INVALID_VALUE))) => {
            ended(session, std::iter::from_fn(|| state.pointers.one_less(address)));
        }
        _ => {}
    }
    freed
}

/// Subtracts imports.
fn ended(session: &Session, objects: impl IntoIterator<Item = Object>) {
    for object in objects {
        session.shares.dropped(&mut session.shares.exports(), object);
    }
}
